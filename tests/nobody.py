"""What a user sees who may not do everything, also where the tests run as root."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def open_folder() -> Iterator[Path]:
    """Gives a folder that everybody may look into, as those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Gives up root's rights inside the block; what is imported there has to be imported before."""
    users = os.getresuid()
    if 0 in users:
        os.setresuid(_NOBODY, _NOBODY, 0)  # the last one is the way back
    try:
        yield
    finally:
        os.setresuid(*users)
