"""One batch of CIFAR-10, read from either version's file without running anything it says."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataError

PIXELS = 3 * 32 * 32  # the red, green and blue planes, row by row
Batch = tuple[np.ndarray, np.ndarray]  # images [n, 3072] uint8, labels [n] int64


def read_binary(path: Path) -> Batch:
    """Returns a batch of the binary version: records of one byte of label and 3,072 of pixels."""
    content = np.frombuffer(path.read_bytes(), np.uint8)
    if not len(content) or len(content) % (1 + PIXELS):
        raise DataError(
            f"{path} has {len(content):,} bytes, which are not whole records of {1 + PIXELS:,}"
        )
    records = content.reshape(-1, 1 + PIXELS)
    return _checked(path, records[:, 1:].copy(), records[:, 0])


def read_pickle(path: Path) -> Batch:
    """Returns a batch of the Python version: a pickled dictionary with one array of pixels and a
    list of labels.
    """
    with path.open("rb") as file:
        try:
            content = _BatchUnpickler(file, encoding="bytes").load()
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
        except Exception as error:  # a damaged pickle raises nearly anything
            raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    fields = _by_text(content)
    images, labels = getattr(fields.get("data"), "array", None), fields.get("labels")
    if images is None or not isinstance(labels, list):
        raise DataError(
            f"{path} is not a batch of CIFAR-10: it has no array `data` and list `labels`"
        )
    if not all(type(label) is int and 0 <= label <= 9 for label in labels):
        raise DataError(f"{path} names classes that are not numbers from 0 to 9")
    return _checked(path, images, np.array(labels, np.int64))


def _by_text(content: object) -> dict[str, Any]:
    """Returns a dictionary by text keys (Python 2 wrote bytes); an empty one for anything else."""
    if not isinstance(content, dict):
        return {}
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): value
        for key, value in content.items()
    }


def _checked(path: Path, images: np.ndarray, labels: np.ndarray) -> Batch:
    if images.ndim != 2 or images.shape[1] != PIXELS or len(images) != len(labels):
        raise DataError(
            f"{path} holds images of shape {list(images.shape)} for {len(labels)} labels"
        )
    if (labels > 9).any():
        raise DataError(f"{path} names class {labels.max()}; the classes are 0 to 9")
    return images, labels.astype(np.int64)


class _Kind:
    """Stands for `numpy.dtype` inside a batch and remembers its name.

    `__setstate__` is here, as in `_Array`, because without it a pickle could set attributes of the
    class itself.
    """

    __slots__ = ("name",)

    def __init__(self, name: str | bytes = "", *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Takes no notice of byte order and alignment: one byte has neither."""


class _Array:
    """Stands for `numpy.ndarray` inside a batch: bytes in the row order of a shape, and nothing
    else.
    """

    __slots__ = ("array",)

    def __init__(self, *_: object) -> None:
        self.array = np.zeros((0,), np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Kind, bool, bytes]) -> None:
        _, shape, kind, columns_first, content = state
        if (
            type(kind) is not _Kind
            or kind.name != "u1"
            or columns_first
            or not isinstance(content, bytes)
        ):
            raise DataError("its array is not one of bytes, row by row")
        self.array = np.frombuffer(content, np.uint8).reshape(shape).copy()


_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
}


class _BatchUnpickler(pickle.Unpickler):
    """Knows plain values and the array of bytes, and refuses every other name a pickle may call."""

    def find_class(self, module: str, name: str, /) -> type:
        known = _KNOWN.get((module, name))
        if known is None:
            raise DataError(
                f"it asks for {module}.{name}, which no batch of CIFAR-10 needs; nothing of it"
                " was run"
            )
        return known
