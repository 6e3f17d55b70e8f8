"""What all tests share."""

import gc


def pytest_collection_finish() -> None:
    """Hides what imports and collection made from the garbage collector, which would walk it all again and again."""
    gc.collect()
    gc.freeze()
