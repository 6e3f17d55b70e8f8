"""Whole numbers below a limit, in as few bits as the largest of them needs."""

import numpy as np
import torch
from torch import Tensor

_PIECE = 1 << 20  # numbers at a time, a multiple of 8: their bits take a byte each on the way


def pack(numbers: Tensor, limit: int) -> Tensor:
    """Returns numbers from 0 to `limit` - 1 as bytes, number after number, the highest bit first.

    Args:
        numbers: whole numbers, [n].
        limit: what all of them are below.
    """
    shifts = _shifts(limit)
    given = numbers.detach().cpu().numpy()
    pieces = [np.empty(0, dtype=np.uint8)]
    for start in range(0, len(given), _PIECE):
        piece = given[start : start + _PIECE]
        # [n, bits of a number]
        bits = (piece[:, None] >> shifts) & 1
        pieces.append(np.packbits(bits.astype(np.uint8).reshape(-1)))
    return torch.from_numpy(np.concatenate(pieces))


def unpack(packed: Tensor, count: int, limit: int) -> Tensor:
    """Returns the `count` numbers that `pack` has packed, int32; some may not be below `limit` if
    the bytes are others.
    """
    shifts = _shifts(limit)
    given = packed.numpy()
    numbers = np.zeros(count, dtype=np.int32)
    for start in range(0, count, _PIECE):
        stop = min(count, start + _PIECE)
        first = start * len(shifts) // 8
        last = first + packed_size(stop - start, limit)
        bits = np.unpackbits(given[first:last], count=(stop - start) * len(shifts))
        bits = bits.reshape(stop - start, len(shifts))
        for column, shift in zip(bits.T, shifts, strict=True):
            numbers[start:stop] |= column.astype(np.int32) << shift
    return torch.from_numpy(numbers)


def packed_size(count: int, limit: int) -> int:
    """Returns how many bytes `pack` makes of `count` numbers."""
    return (count * len(_shifts(limit)) + 7) // 8


def _shifts(limit: int) -> np.ndarray:
    """Returns the places of the bits of a number below `limit`, the highest first."""
    return np.arange(max(limit - 1, 0).bit_length(), dtype=np.int32)[::-1]
