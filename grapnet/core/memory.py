"""Large CPU buffers that are used again: the page faults of fresh ones cost several times the copy
into them.
"""

import math
import threading

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 20  # bytes; smaller buffers come from torch
KEEP = 256 << 20  # bytes kept for the next commit or step, in the whole process

_spare: list[np.ndarray] = []  # buffers that no tensor uses
# so that two threads never take the same one; giving back, at any time, only appends
_taking = threading.Lock()


def spare_bytes() -> int:
    """Returns how much memory waits to be used again."""
    return sum(len(buffer) for buffer in _spare)


def room(example: Tensor, rows: int) -> Tensor:
    """Returns uninitialised memory for `rows` rows like those of `example`.

    A large CPU buffer goes back to the spare ones when the last tensor over it is gone.
    """
    shape = (rows, *example.shape[1:])
    size = math.prod(shape) * example.element_size()
    if example.device.type != "cpu" or size < LARGE:
        return example.new_empty(shape)
    return torch.from_numpy(np.asarray(_Lease(size))).view(example.dtype).view(shape)


class _Lease:
    """One buffer in use; numpy and torch keep the lease alive for as long as they read it."""

    def __init__(self, size: int) -> None:
        buffer = _taken(size)
        if buffer is None:
            # up to an eighth more, so that a growing vector fits again
            step = 1 << (size.bit_length() - 4)
            buffer = np.empty(-(-size // step) * step, dtype=np.uint8)
        self._buffer = buffer
        self.__array_interface__ = {**self._buffer.__array_interface__, "shape": (size,)}

    def __del__(self) -> None:
        if spare_bytes() + len(self._buffer) <= KEEP:
            _spare.append(self._buffer)


def _taken(size: int) -> np.ndarray | None:
    """Returns a spare buffer of about `size` bytes, which is spare no more; None when there is
    none.
    """
    with _taking:
        fits = [buffer for buffer in _spare if size <= len(buffer) <= size + size // 4]
        best = min(fits, key=len, default=None)
        _spare[:] = [buffer for buffer in _spare if buffer is not best]
    return best
