"""Reading fields of a file that may say anything."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grapnet.core.errors import CheckpointError

LARGEST = 2**53


class Fields:
    """The tensors of one checkpoint; every read checks type and shape and names the field that is wrong."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.read: set[str] = set()

    def tensor(self, name: str, dtype: torch.dtype, size: int | None = None) -> Tensor:
        """Returns a vector of a given type and, when said, length."""
        tensor = self.any(name)
        if tensor.dtype != dtype or tensor.dim() != 1:
            raise CheckpointError(f"{name}: expected a vector of {dtype}, found {tensor.dtype} {list(tensor.shape)}")
        if size is not None and len(tensor) != size:
            raise CheckpointError(f"{name}: expected {size} entries, found {len(tensor)}")
        return tensor

    def any(self, name: str) -> Tensor:
        """Returns a tensor of any type and shape."""
        if name not in self.tensors:
            raise CheckpointError(f"{name}: missing")
        self.read.add(name)
        return self.tensors[name]

    def positions(self, name: str, limit: int) -> Tensor:
        """Returns ascending int32 positions below `limit`."""
        found = self.tensor(name, torch.int32)
        if len(found) and (int(found[0]) < 0 or int(found[-1]) >= limit or bool((found.diff() <= 0).any())):
            raise CheckpointError(f"{name}: expected ascending positions from 0 to {limit - 1}")
        return found


def entry(document: Any, name: str, kind: type, where: str) -> Any:
    """Returns one entry of a JSON object, of exactly one type."""
    if not isinstance(document, dict) or name not in document:
        raise CheckpointError(f"{where}{name}: missing")
    value = document[name]
    if type(value) is not kind:
        raise CheckpointError(f"{where}{name}: expected {kind.__name__}, found {type(value).__name__}")
    return value


def number(document: Any, name: str, where: str, least: int = 0) -> int:
    """Returns a whole number of sane size."""
    value = entry(document, name, int, where)
    if not least <= value <= LARGEST:
        raise CheckpointError(f"{where}{name}: {str(value)[:30]} is out of range")
    return value


def names(document: Any, name: str, where: str) -> tuple[str | None, ...]:
    """Returns a table of distinct names, None allowed."""
    found: Sequence[Any] = entry(document, name, list, where)
    if any(not isinstance(item, str | None) for item in found) or len(set(found)) != len(found) or not found:
        raise CheckpointError(f"{where}{name}: expected distinct names")
    return tuple(found)
