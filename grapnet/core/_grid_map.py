"""How the cells of a tensor move in a commit: GridMap by its axes, RowMap where only some rows of
cells exist.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from grapnet._torch import copy_each

from ._index_map import IndexMap


@dataclass(frozen=True, eq=False)
class GridMap:
    """Maps the cells of a tensor before a commit to those after it, by one IndexMap per axis.

    The cells that leave form one vector: first those at the removed positions of the first axis,
    then, among the rest, those at the removed positions of the second, and so on. The cells that
    come have the same order, so that the inverse of a map only exchanges the two.

    Attributes:
        shape: the shape of the tensor before the commit.
        axes: the maps of the axes that change, by dimension, in ascending order.
    """

    shape: tuple[int, ...]
    axes: dict[int, IndexMap]

    @cached_property
    def new_shape(self) -> tuple[int, ...]:
        """The shape of the tensor after the commit."""
        shape = list(self.shape)
        for dim, index in self.axes.items():
            shape[dim] = index.new_size
        return tuple(shape)

    @property
    def old_size(self) -> int:
        """The number of cells before the commit."""
        return math.prod(self.shape)

    @property
    def is_identity(self) -> bool:
        """True if no cell was removed or inserted."""
        return not self._shrinking and not self._growing

    @cached_property
    def _shrinking(self) -> list[tuple[int, IndexMap]]:
        """The axes that lose positions."""
        return [(dim, index) for dim, index in self.axes.items() if index.removed.shape[0]]

    @cached_property
    def _growing(self) -> list[tuple[int, IndexMap]]:
        """The axes that get positions."""
        return [(dim, index) for dim, index in self.axes.items() if index.inserted.shape[0]]

    @cached_property
    def n_survivors(self) -> int:
        """The number of cells that exist before and after the commit."""
        count = 1
        for dim, size in enumerate(self.shape):
            index = self.axes.get(dim)
            count *= size if index is None else index.n_survivors
        return count

    @property
    def n_born(self) -> int:
        """The number of cells that come."""
        if not self._growing:
            return 0
        return math.prod(self.new_shape) - self.n_survivors

    def inverse(self) -> "GridMap":
        """Returns the inverse map."""
        return inverses([self])[0]

    def carry(self, old: Tensor, born: Tensor | float = 0) -> Tensor:
        """Returns `old` moved to the new positions, with `born` in the cells that come; no gradient
        flows through.

        Args:
            old: a tensor of this shape, or with its cells in one vector.
            born: one number, or one for every cell that comes.

        Examples:
            >>> first = torch.tensor([0], dtype=torch.int32)
            >>> none = torch.empty(0, dtype=torch.int32)
            >>> index = GridMap((2, 2), {0: IndexMap(2, 1, first, none)})
            >>> index.carry(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            tensor([[3., 4.]])
        """
        new = self._shaped(old)
        for dim, index in self._shrinking:
            new = new.index_select(dim, index.survivors(new.device))
        if self._growing:
            blocks = self._blocks(born, new)
            # From the last axis to the first: each block spans the axes after its own in full.
            for dim, index in reversed(self._growing):
                new = _insert(new, dim, index, blocks[dim])
        if old.dim() != len(self.shape):
            return new.reshape(-1)
        return laid_out_like(new, old)

    def take(self, old: Tensor) -> Tensor:
        """Returns the cells that leave, as one vector."""
        left = self._shaped(old)
        if not self._shrinking:
            return left.new_empty(0)
        *before, (last, last_index) = self._shrinking
        taken = []
        for dim, index in before:
            taken.append(left.index_select(dim, index.gone(left.device)).reshape(-1))
            left = left.index_select(dim, index.survivors(left.device))
        taken.append(left.index_select(last, last_index.gone(left.device)).reshape(-1))
        return torch.cat(taken) if before else taken[0]

    def give(self, new: Tensor, cells: Tensor) -> None:
        """Writes a vector of cells into a tensor that `carry` has made, where cells have come."""
        whole = new.view(self.new_shape)
        # Cells of the survivors alone: narrower with every axis that was written.
        narrowed: list[tuple[int, Tensor]] = []
        start = 0
        shape = list(self.new_shape)
        for dim, index in self._growing:
            block_shape = list(shape)
            block_shape[dim] = index.n_born
            count = math.prod(block_shape)
            block = cells[start : start + count].to(new).view(block_shape)
            start += count
            places = [*narrowed, (dim, index._targets(new.device))]
            whole[_open_mesh(self.new_shape, places, new.device)] = block
            narrowed.append((dim, index.stays(new.device).long()))
            shape[dim] = index.n_survivors

    def are_gone(self, old: Tensor) -> Tensor:
        """Returns one bool per cell, by its position in the vector of the cells before the commit:
        True if it leaves.
        """
        gone = torch.zeros(old.shape, dtype=torch.bool, device=old.device)
        if not self._shrinking:
            return gone
        places = torch.unravel_index(old.long(), self.shape)
        for dim, index in self._shrinking:
            gone |= index.are_gone(places[dim].int())
        return gone

    def new_positions(self, old: Tensor) -> Tensor:
        """Returns where cells that stay are in the vector of the cells after the commit.

        Args:
            old: their positions in the vector of the cells before it, int32, on the CPU.
        """
        if self.is_identity:
            return old
        places = list(torch.unravel_index(old.long(), self.shape))
        new = torch.zeros_like(old, dtype=torch.int64)
        for dim, size in enumerate(self.new_shape):
            index = self.axes.get(dim)
            place = places[dim]
            if index is not None:
                place = index.to(old.device).new_positions(place.int()).long()
            new = new * size + place
        return new.int()

    def equals(self, other: "GridMap | RowMap") -> bool:
        """Returns whether another map moves every cell in the same way."""
        if not isinstance(other, GridMap):
            return False
        if self.shape != other.shape or self.axes.keys() != other.axes.keys():
            return False
        return all(index.equals(other.axes[dim]) for dim, index in self.axes.items())

    def release(self) -> None:
        """Drops what `carry` keeps while a commit moves one tensor after the other."""
        for index in self.axes.values():
            index.release()

    def _shaped(self, tensor: Tensor) -> Tensor:
        """Returns a tensor, without gradients, in the shape before the commit."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.shape == self.shape:
            return tensor
        if tensor.shape == (self.old_size,):
            return tensor.view(self.shape)
        raise ValueError(
            f"this GridMap carries tensors of shape {list(self.shape)}, got {list(tensor.shape)}"
        )

    def _blocks(self, born: Tensor | float, like: Tensor) -> dict[int, Tensor]:
        """Returns the cells that come by axis, in the dtype and on the device of `like`."""
        blocks = {}
        start = 0
        # [survivors of the axes before, inserted on this axis, all of the axes after]
        shape = list(self.new_shape)
        for dim, index in self._growing:
            block_shape = list(shape)
            block_shape[dim] = index.n_born
            count = math.prod(block_shape)
            if isinstance(born, Tensor):
                blocks[dim] = born[start : start + count].to(like).view(block_shape)
            else:
                blocks[dim] = like.new_full(block_shape, born)
            start += count
            shape[dim] = index.n_survivors
        return blocks


@dataclass(frozen=True, eq=False)
class RowMap:
    """Maps the rows of cells of a tensor before a commit to those after it.

    A tensor that has all of its cells may become a matrix of some of its rows, or the other way
    round; the rows keep their order.

    Attributes:
        shape: the shape of the tensor before the commit.
        new_shape: its shape after it.
        width: the number of cells in a row.
        rows: how the rows move.
    """

    shape: tuple[int, ...]
    new_shape: tuple[int, ...]
    width: int
    rows: IndexMap

    @property
    def old_size(self) -> int:
        """The number of cells before the commit."""
        return self.rows.old_size * self.width

    @property
    def is_identity(self) -> bool:
        """True if no row was removed or inserted."""
        return self.rows.is_identity and self.shape == self.new_shape

    @property
    def n_survivors(self) -> int:
        """The number of cells that exist before and after the commit."""
        return self.rows.n_survivors * self.width

    @property
    def n_born(self) -> int:
        """The number of cells that come."""
        return self.rows.n_born * self.width

    def inverse(self) -> "RowMap":
        """Returns the inverse map."""
        return RowMap(self.new_shape, self.shape, self.width, self.rows.inverse())

    def carry(self, old: Tensor, born: Tensor | float = 0) -> Tensor:
        """Returns `old` moved to the new rows, with `born` in the cells that come; no gradient
        flows through. `old` has the shape before the commit, or its cells in one vector.
        """
        is_flat = old.shape != self.shape and old.shape == (self.old_size,)
        if not is_flat and old.shape != self.shape:
            raise ValueError(
                f"this RowMap carries tensors of shape {list(self.shape)}, got {list(old.shape)}"
            )
        new = self.rows.carry(self._in_rows(old), born)
        return new.reshape(-1) if is_flat else new.reshape(self.new_shape)

    def take(self, old: Tensor) -> Tensor:
        """Returns the cells that leave, as one vector."""
        removed = self.rows.gone(old.device)
        return self._in_rows(old).index_select(0, removed).reshape(-1)

    def give(self, new: Tensor, cells: Tensor) -> None:
        """Writes a vector of cells into a tensor that `carry` has made, where rows have come."""
        self.rows.give(new.view(self.rows.new_size, self.width), cells)

    def are_gone(self, old: Tensor) -> Tensor:
        """Returns one bool per cell; see `GridMap.are_gone`."""
        return self.rows.are_gone((old // self.width).int())

    def new_positions(self, old: Tensor) -> Tensor:
        """Returns where cells that stay are in the vector of the cells after the commit; see
        `GridMap.new_positions`.
        """
        if self.rows.is_identity:
            return old
        rows = self.rows.to(old.device).new_positions(old // self.width)
        return rows * self.width + old % self.width

    def equals(self, other: "GridMap | RowMap") -> bool:
        """Returns whether another map moves every cell in the same way."""
        if not isinstance(other, RowMap):
            return False
        mine = (self.shape, self.new_shape, self.width)
        return mine == (other.shape, other.new_shape, other.width) and self.rows.equals(other.rows)

    def release(self) -> None:
        """Drops what `carry` keeps while a commit moves one tensor after the other."""
        self.rows.release()

    def _in_rows(self, tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(self.rows.old_size, self.width)


def inverses(maps: "Sequence[GridMap]") -> "list[GridMap]":
    """Returns the inverse maps; what some of the maps share, their inverses do, too."""
    axes: dict[IndexMap, IndexMap] = {}
    found: dict[GridMap, GridMap] = {}
    for one in maps:
        for index in one.axes.values():
            if index not in axes:
                axes[index] = index.inverse()
        if one not in found:
            inverted = {dim: axes[index] for dim, index in one.axes.items()}
            found[one] = GridMap(one.new_shape, inverted)
    return [found[one] for one in maps]


class Parted(NamedTuple):
    """A vector without the entries that leave, and these."""

    kept: Tensor
    gone: Tensor


# Longer vectors move alone: together they take more memory.
_SHORT = 1 << 16


def part_vectors(pairs: "Iterable[tuple[CellMap, Tensor]]") -> dict[int, Parted]:
    """Returns what stays and what leaves of those tensors that are short vectors, lose entries and
    get none, by their ids.

    Vectors that share a map, such as the weights of norms with their gradients and optimizer state,
    move at once: on a GPU a launch takes longer than to move one of them.
    """
    groups: dict[tuple[GridMap, torch.dtype, torch.device], list[Tensor]] = {}
    for index, vector in pairs:
        if not isinstance(index, GridMap) or len(index.shape) != 1:
            continue
        if index._growing or not index._shrinking:
            continue
        if vector.shape == index.shape and index.shape[0] <= _SHORT:
            groups.setdefault((index, vector.dtype, vector.device), []).append(vector)
    found = {}
    for (index, _, device), vectors in groups.items():
        axis = index.axes[0]
        # [vectors, entries]
        stacked = torch.stack([vector.detach() for vector in vectors])
        # Each in memory of its own, as Parameters are.
        kept = [stacked.new_empty(axis.new_size) for _ in vectors]
        copy_each(kept, stacked.index_select(1, axis.survivors(device)).unbind())
        gone = stacked.index_select(1, axis.gone(device)).unbind()
        for vector, stays, leaves in zip(vectors, kept, gone, strict=True):
            found[id(vector)] = Parted(stays, leaves)
    return found


def cells_at(tensor: Tensor, places: Tensor) -> Tensor:
    """Returns the cells of a tensor at places in the vector of its cells, without gradients."""
    return tensor.detach().reshape(-1).index_select(0, places.to(tensor.device))


def with_cells(tensor: Tensor, places: Tensor, cells: Tensor) -> Tensor:
    """Returns a copy of a tensor, in its memory format, with other cells at places in the vector of
    its cells.
    """
    new = tensor.detach().clone()
    at = places.to(tensor.device).long()
    cells = cells.to(tensor)
    if new.is_contiguous():
        new.view(-1).index_copy_(0, at, cells)
    else:
        new[torch.unravel_index(at, new.shape)] = cells
    return new


# How the cells of a vector or of a tensor move.
CellMap: TypeAlias = IndexMap | GridMap | RowMap

# The memory format of images and of volumes, by the number of dimensions.
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _insert(old: Tensor, dim: int, index: IndexMap, block: Tensor) -> Tensor:
    """Returns a tensor with a block at the inserted positions of one axis."""
    new = torch.cat([old, block], dim)
    order = index.order(old.device)
    # Two copies take less time than `index_copy_` of both parts, which is slow on inner axes.
    return new if order is None else new.index_select(dim, order)


def _open_mesh(
    shape: tuple[int, ...], places: list[tuple[int, Tensor]], device: torch.device
) -> tuple[Tensor, ...]:
    """Returns one index per dimension, which together select a block: `places`, and all of the
    other dimensions.
    """
    chosen = dict(places)
    mesh = []
    for dim, size in enumerate(shape):
        at = chosen.get(dim)
        if at is None:
            at = torch.arange(size, device=device)
        mesh.append(at.view(*[1] * dim, -1, *[1] * (len(shape) - dim - 1)))
    return tuple(mesh)


def laid_out_like(new: Tensor, old: Tensor) -> Tensor:
    """Returns a tensor in the memory format of another one, which convolutions run in."""
    if old.is_contiguous() or new.dim() != old.dim():
        return new
    chosen = _CHANNELS_LAST.get(old.dim())
    if chosen is not None and old.is_contiguous(memory_format=chosen):
        return new.contiguous(memory_format=chosen)
    return new
