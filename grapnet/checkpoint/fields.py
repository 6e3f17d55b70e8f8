"""Reading fields of a file that may say anything."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grapnet.core.errors import CheckpointError
from grapnet.core.labels import Labels

LARGEST = 2**53


class Fields:
    """The tensors of one checkpoint; every read checks type and shape and names the field that is
    wrong.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.read: set[str] = set()

    def any(self, name: str) -> Tensor:
        """Returns a tensor of any type and shape."""
        if name not in self.tensors:
            raise CheckpointError(f"{name}: missing")
        self.read.add(name)
        return self.tensors[name]

    def vector(self, name: str, dtype: torch.dtype, size: int | None = None) -> Tensor:
        """Returns a vector of a given type and, when said, length."""
        tensor = self.any(name)
        if tensor.dtype != dtype or tensor.dim() != 1:
            raise CheckpointError(
                f"{name}: expected a vector of {dtype}, found {tensor.dtype} {list(tensor.shape)}"
            )
        if size is not None and len(tensor) != size:
            raise CheckpointError(f"{name}: expected {size} entries, found {len(tensor)}")
        return tensor

    def below(self, limit: int, name: str, dtype: torch.dtype, size: int | None = None) -> Tensor:
        """Returns a vector of whole numbers from 0 to `limit` - 1."""
        found = self.vector(name, dtype, size)
        if len(found) and (int(found.min()) < 0 or int(found.max()) >= limit):
            raise CheckpointError(f"{name}: expected numbers from 0 to {limit - 1}")
        return found

    def positions(self, limit: int, name: str) -> Tensor:
        """Returns ascending int32 positions below `limit`."""
        found = self.below(limit, name, torch.int32)
        if bool((found.diff() <= 0).any()):
            raise CheckpointError(f"{name}: expected ascending positions")
        return found

    def labels(self, table: tuple[str | None, ...], name: str, size: int) -> Labels:
        """Returns `size` names out of a table."""
        return Labels(self.below(len(table), name, torch.int32, size), table)

    def under(self, prefix: str) -> "Fields":
        """Returns the tensors whose names begin with `prefix`, by the rest of their names; they
        count as read here.
        """
        mine = [name for name in self.tensors if name.startswith(prefix)]
        self.read.update(mine)
        return Fields({name.removeprefix(prefix): self.tensors[name] for name in mine})

    def require_all_read(self) -> None:
        """Raises CheckpointError when a tensor was never asked for."""
        unknown = self.tensors.keys() - self.read
        if unknown:
            raise CheckpointError(
                f"container: no field refers to the tensor {min(unknown)[:100]!r}"
            )


@contextlib.contextmanager
def named(prefix: str) -> Iterator[None]:
    """Puts `prefix` before the field that a CheckpointError names."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{prefix}{error}") from error.__cause__


def entry(document: Any, name: str, kind: type, where: str) -> Any:
    """Returns one entry of a JSON object, of exactly one type."""
    if not isinstance(document, dict) or name not in document:
        raise CheckpointError(f"{where}{name}: missing")
    value = document[name]
    if type(value) is not kind:
        raise CheckpointError(
            f"{where}{name}: expected {kind.__name__}, found {type(value).__name__}"
        )
    return value


def number(document: Any, name: str, where: str, most: int = LARGEST) -> int:
    """Returns a whole number of sane size."""
    value = entry(document, name, int, where)
    if not 0 <= value <= most:
        raise CheckpointError(f"{where}{name}: expected a number from 0 to {most}")
    return value


def names(document: Any, name: str, where: str) -> tuple[str | None, ...]:
    """Returns a table of distinct names, None allowed."""
    found: Sequence[Any] = entry(document, name, list, where)
    if (
        any(not isinstance(item, str | None) for item in found)
        or len(set(found)) != len(found)
        or not found
    ):
        raise CheckpointError(f"{where}{name}: expected distinct names")
    return tuple(found)
