"""The content of a commit as data: how positions move, and how vectors and layers change."""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 20  # bytes; smaller buffers come from torch
KEEP = 256 << 20  # bytes kept for the next commit or step, in the whole process

_spare: list[np.ndarray] = []  # buffers that no tensor uses
# so that two threads never take the same one; giving back, at any time, only appends
_taking = threading.Lock()


def spare_bytes() -> int:
    """Returns how much spare memory there is."""
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


# A copy by runs costs half a microsecond a run and vector, a gather one to two nanoseconds a
# coordinate: runs pay when they are at least this long.
_SHORTEST_RUN = 600
_FEW_RUNS = 16


class _Runs(NamedTuple):
    """A vector in pieces: the lengths of the old and of the new pieces, and their order in the
    result.
    """

    old_lengths: list[int]
    born_lengths: list[int]
    order: list[int]  # numbers of the old pieces, then of the newborn ones


@dataclass(frozen=True, eq=False)
class IndexMap:
    """Maps the positions of a vector before a commit to those after it; survivors keep their order.

    Attributes:
        old_size: length of the vector before the commit.
        new_size: length after it.
        removed: sorted int32 positions in the old vector.
        inserted: sorted int32 positions in the new vector.
    """

    old_size: int
    new_size: int
    removed: Tensor
    inserted: Tensor
    _scratch: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def is_identity(self) -> bool:
        """True if no coordinate was removed or inserted."""
        return self.removed.shape[0] == 0 and self.inserted.shape[0] == 0

    @cached_property
    def appends(self) -> bool:
        """True if nothing was removed and everything was inserted at the end."""
        none_left = self.removed.shape[0] == 0
        return none_left and (self.inserted.shape[0] == 0 or int(self.inserted[0]) == self.old_size)

    def to(self, device: torch.device) -> "IndexMap":
        """Returns the map with its positions on another device."""
        return IndexMap(
            self.old_size, self.new_size, self.removed.to(device), self.inserted.to(device)
        )

    def inverse(self) -> "IndexMap":
        """Returns the inverse map."""
        return IndexMap(self.new_size, self.old_size, self.inserted, self.removed)

    def carry(self, old: Tensor, born: Tensor | float = 0) -> Tensor:
        """Returns `old` moved to the new positions, with `born` at the inserted ones; no gradient
        flows through.

        Works on dimension 0 and keeps further dimensions. `old` is not modified; it is returned
        itself if nothing moved.

        Examples:
            >>> index = IndexMap(
            ...     3, 3, torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
            ... )
            >>> index.carry(torch.tensor([10.0, 11.0, 12.0]), born=-1.0)
            tensor([11., 12., -1.])
        """
        if old.shape[:1] != (self.old_size,):  # a single number has no dimension 0
            raise ValueError(
                f"this IndexMap carries vectors of length {self.old_size}, got shape"
                f" {list(old.shape)}"
            )
        old = old.detach()
        if self.is_identity:
            return old
        newborn = self._newborn(old, born)
        if self.removed.shape[0] == self.old_size:
            # never the memory of what was given
            return newborn.clone(memory_format=torch.contiguous_format)
        if self.appends:
            return torch.cat([old, newborn], out=room(old, self.new_size))
        runs = self._runs()
        if runs is not None:
            pieces = torch.split_with_sizes(old, runs.old_lengths)
            if runs.born_lengths:
                pieces += torch.split_with_sizes(newborn, runs.born_lengths)
            chosen = [pieces[n] for n in runs.order]
            if old.numel() < LARGE // 8:
                return torch.cat(chosen)
            return torch.cat(chosen, out=room(old, self.new_size))
        new = room(old, self.new_size)
        single = old.numel() == self.old_size  # [n] or [n, 1]: a flat gather is four times faster
        flat, target = (old.reshape(-1), new.view(-1)) if single else (old, new)
        torch.index_select(flat, 0, self._source(old.device), out=target)
        if self.inserted.shape[0]:
            new.index_copy_(0, self._targets(old.device), newborn)
        return new

    def _newborn(self, old: Tensor, born: Tensor | float) -> Tensor:
        """Returns `born` as one entry like those of `old` for each inserted position."""
        shape = (self.inserted.shape[0], *old.shape[1:])
        if isinstance(born, Tensor):
            born = born.detach()
            if born.shape == shape and born.dtype == old.dtype and born.device == old.device:
                return born
        newborn = old.new_empty(shape)
        if shape[0]:
            newborn[:] = born
        return newborn

    def new_positions(self, old: Tensor) -> Tensor:
        """Returns where the surviving old positions `old` are in the new vector."""
        ordinal = old - _count_below(self.removed, old)
        steps = self.inserted - torch.arange(
            len(self.inserted), dtype=torch.int32, device=self.inserted.device
        )
        return ordinal + _count_below(steps, ordinal, including=True)

    def old_positions(self, new: Tensor) -> Tensor:
        """Returns where the surviving new positions `new` were in the old vector."""
        return self.inverse().new_positions(new)

    def release(self) -> None:
        """Drops what `carry` keeps while a commit moves one vector after the other."""
        self._scratch.clear()

    def _runs(self) -> "_Runs | None":
        """Returns the pieces that make up the new vector, or None when they are too many."""
        if "runs" not in self._scratch:
            self._scratch["runs"] = self._find_runs()
        return self._scratch["runs"]

    def _find_runs(self) -> "_Runs | None":
        if len(self.removed) == 1 and len(self.inserted) == 0:
            # One coordinate leaves: three pieces, of which the outer ones stay.
            at = int(self.removed[0])
            lengths = [at, 1, self.old_size - at - 1]
            filled = [length for length in lengths if length]
            kept = list(range(len(filled)))
            kept.remove(int(at > 0))
            return _Runs(filled, [], kept)
        if _pieces(self.removed) + _pieces(self.inserted) > max(
            _FEW_RUNS, self.new_size // _SHORTEST_RUN
        ):
            return None
        removed_at = _counted_in_survivors(self.removed)
        inserted_at = _counted_in_survivors(self.inserted)
        gaps = _distinct(removed_at)
        holes = _distinct(inserted_at)
        starts = np.unique(np.concatenate([[0], gaps, holes]))  # where a run of survivors begins
        kept = np.diff(starts, append=self.old_size - len(removed_at))
        # before each run
        dropped = np.diff(np.searchsorted(removed_at, starts, side="right"), prepend=0)
        born = np.diff(np.searchsorted(inserted_at, starts, side="right"), prepend=0)
        old_lengths = np.stack([dropped, kept], axis=1).reshape(-1)
        old_numbers = (old_lengths > 0).cumsum() - 1  # empty pieces are left out
        born_numbers = (born > 0).cumsum() - 1 + (old_lengths > 0).sum()
        order = np.stack([born_numbers, old_numbers[1::2]], axis=1).reshape(-1)
        filled = np.stack([born, kept], axis=1).reshape(-1) > 0
        return _Runs(
            old_lengths[old_lengths > 0].tolist(), born[born > 0].tolist(), order[filled].tolist()
        )

    def _source(self, device: torch.device) -> Tensor:
        """Returns, for every new position, the old position to read (0 where newborn)."""
        key = str(device)
        if key not in self._scratch:
            source = ascending(self.old_size, device)
            if self.removed.shape[0]:
                keep = torch.ones(self.old_size, dtype=torch.bool, device=device)
                keep[self.removed.to(device).long()] = False
                source = flatnonzero(keep)
            if self.inserted.shape[0]:
                old = torch.ones(self.new_size, dtype=torch.bool, device=device)
                old[self._targets(device)] = False
                survivors = source
                source = torch.zeros(self.new_size, dtype=torch.int32, device=device)
                if device.type == "cpu":
                    source.numpy()[old.numpy()] = survivors.numpy()
                else:
                    source[old] = survivors
            self._scratch[key] = source
        return self._scratch[key]

    def _targets(self, device: torch.device) -> Tensor:
        """Returns the inserted positions, int64."""
        key = f"targets {device}"
        if key not in self._scratch:
            self._scratch[key] = self.inserted.to(device).long()
        return self._scratch[key]


def as_tensor(values: Any) -> Tensor:
    """Returns values as a tensor; numbers, lists and arrays become CPU tensors."""
    return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")


def ascending(size: int, device: torch.device) -> Tensor:
    """Returns the int32 positions 0 to size - 1."""
    if device.type == "cpu":
        return torch.from_numpy(np.arange(size, dtype=np.int32))
    return torch.arange(size, dtype=torch.int32, device=device)


def flatnonzero(mask: Tensor) -> Tensor:
    """Returns the int32 positions where a 1-D bool tensor is true (numpy is six times faster than
    torch on a CPU).
    """
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()).astype(np.int32))
    return mask.nonzero().squeeze(1).int()


def contains(haystack: Tensor, needles: Tensor) -> Tensor:
    """Returns one bool per needle: True if the sorted haystack contains it."""
    if len(haystack) == 0:
        return torch.zeros(len(needles), dtype=torch.bool, device=needles.device)
    place = torch.searchsorted(haystack, needles).clamp_(max=len(haystack) - 1)
    return haystack[place] == needles


def sorted_nearly(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sorted keys and their order; numpy is faster on nearly sorted keys."""
    if keys.device.type != "cpu":
        ascending, order = keys.sort(stable=True)
        return ascending, order
    order = torch.from_numpy(keys.numpy().argsort(kind="stable"))
    return keys[order], order


def positions_in(ascending: Tensor, keys: Tensor) -> Tensor:
    """Returns the insertion point of each key in the sorted tensor."""
    if keys.device.type != "cpu":
        return torch.searchsorted(ascending, keys)
    return torch.from_numpy(np.searchsorted(ascending.numpy(), keys.numpy()))


def require_ranks(key: Tensor) -> None:
    """Raises ValueError for a key that cannot be ranked."""
    if bool(torch.isnan(key).any()):
        raise ValueError("the key contains NaN, which cannot be ranked")


def kth_smallest(values: Tensor, rank: int) -> Tensor:
    """Returns the value that has `rank` - 1 others before it in order; numpy finds it in a third of
    torch's time.
    """
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.partition(values.numpy(), rank - 1))[rank - 1]
    return values.kthvalue(rank).values


def concatenate_ranges(starts: Tensor, stops: Tensor) -> Tensor:
    """Returns the int32 positions of many ranges, one after the other."""
    lengths = (stops - starts).long()
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    offsets = torch.repeat_interleave(starts.long() - (ends - lengths), lengths, output_size=total)
    return (offsets + torch.arange(total, device=starts.device)).int()


def empty_positions(device: torch.device | str = "cpu") -> Tensor:
    """Returns an int32 tensor of no positions."""
    return torch.empty(0, dtype=torch.int32, device=device)


def _pieces(positions: Tensor) -> int:
    """Returns the number of runs of consecutive positions."""
    numbers = positions.cpu().numpy()
    return len(numbers) and 1 + int(np.count_nonzero(numbers[1:] - numbers[:-1] != 1))


def _counted_in_survivors(positions: Tensor) -> np.ndarray:
    """Returns the number of survivors before each of the sorted positions."""
    return positions.cpu().numpy() - np.arange(len(positions), dtype=np.int32)


def _distinct(ascending: np.ndarray) -> np.ndarray:
    return ascending[np.flatnonzero(np.diff(ascending, prepend=-1))]


def _count_below(ascending: Tensor, queries: Tensor, *, including: bool = False) -> Tensor:
    if len(ascending) == 0:
        return torch.zeros_like(queries)
    return torch.searchsorted(ascending, queries, right=including, out_int32=True).to(queries.dtype)


@dataclass(frozen=True, eq=False)
class Labels:
    """A column of names (owners, activations): `names[codes[row]]`; never changed in place."""

    codes: Tensor  # [n] int32, on the CPU
    names: tuple[str | None, ...]

    @classmethod
    def uniform(cls, name: str | None, size: int) -> "Labels":
        """Returns `size` rows of one name."""
        return cls(torch.zeros(size, dtype=torch.int32, device="cpu"), (name,))

    @classmethod
    def join(cls, columns: "list[Labels]") -> "Labels":
        """Returns the concatenated columns."""
        names = tuple(dict.fromkeys(name for column in columns for name in column.names))
        codes = [column._recoded(names) for column in columns]
        return cls(
            torch.cat(codes) if codes else torch.empty(0, dtype=torch.int32, device="cpu"), names
        )

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, row: int) -> str | None:
        return self.names[self.codes[row]]

    def __iter__(self) -> Iterator[str | None]:
        return (self.names[code] for code in self.codes.tolist())

    def select(self, rows: Tensor) -> "Labels":
        """Returns the labels of `rows`, in that order."""
        return Labels(self.codes[rows.long()], self.names)

    def where(self, name: str | None) -> Tensor:
        """Returns the rows that carry `name`."""
        if name not in self.names:
            return torch.empty(0, dtype=torch.int32, device="cpu")
        return flatnonzero(self.codes == self.names.index(name))

    def kinds(self) -> list[tuple[str | None, Tensor]]:
        """Returns every name in use with its rows."""
        return [(name, rows) for name in self.names if len(rows := self.where(name))]

    def differs(self, other: "Labels", rows: Tensor) -> Tensor:
        """Returns one bool per row: True if another column of the same length has another name."""
        names = tuple(dict.fromkeys(self.names + other.names))
        return self._recoded(names)[rows.long()] != other._recoded(names)[rows.long()]

    def carry(self, index: IndexMap, born: "Labels") -> "Labels":
        """Returns the column after a commit, `born` at the inserted rows."""
        names = tuple(dict.fromkeys(self.names + born.names))
        return Labels(index.carry(self._recoded(names), born._recoded(names)), names)

    def replaced(self, rows: Tensor, others: "Labels") -> "Labels":
        """Returns the column with `others` at `rows`."""
        names = tuple(dict.fromkeys(self.names + others.names))
        codes = self._recoded(names).clone()
        codes[rows.long()] = others._recoded(names)
        return Labels(codes, names)

    def compact(self) -> "Labels":
        """Returns the same column with unused names left out of its table."""
        used = torch.bincount(self.codes, minlength=len(self.names)).tolist()
        names = tuple(name for name, count in zip(self.names, used, strict=True) if count)
        return Labels(self._recoded(names), names)

    def _recoded(self, names: tuple[str | None, ...]) -> Tensor:
        if names[: len(self.names)] == self.names:
            return self.codes
        table = torch.tensor(
            [names.index(n) if n in names else 0 for n in self.names],
            dtype=torch.int32,
            device="cpu",
        )
        return table[self.codes.long()]


@dataclass(frozen=True, eq=False)
class Shift:
    """Values that a commit itself changes: `before` becomes `after` at `positions` (in the new
    vector).
    """

    positions: Tensor  # [n] int32
    before: Tensor
    after: Tensor

    def apply(self, current: Tensor) -> Tensor:
        """Returns `after` where the value is still `before`, and adds the difference elsewhere."""
        return torch.where(current == self.before, self.after, current + (self.after - self.before))


@dataclass(frozen=True, eq=False)
class VectorChange:
    """What one commit does to one vector, in both directions.

    The values are None after the journal has dropped them.
    """

    index: IndexMap
    born_frozen: Tensor  # [inserted] bool
    gone_frozen: Tensor  # [removed] bool
    flips: Tensor  # sorted int32 positions in the new vector: survivors whose frozen bit turns
    born_values: Tensor | None = None  # [inserted]
    gone_values: Tensor | None = None  # [removed]
    # Gradients that a trial takes away and its end gives back, None in every other commit.
    born_gradients: Tensor | None = None  # [inserted]
    gone_gradients: Tensor | None = None  # [removed]
    flip_gradients: Tensor | None = None  # [flips]
    shift: Shift | None = None

    @classmethod
    def of_free(cls, index: IndexMap, born: Tensor | None = None) -> "VectorChange":
        """Returns the change of a vector without frozen coordinates; new ones get `born`, or 0."""
        born_frozen, gone_frozen = (
            torch.zeros_like(at, dtype=torch.bool) for at in (index.inserted, index.removed)
        )
        return cls(index, born_frozen, gone_frozen, flips=index.removed[:0], born_values=born)

    def inverse(self) -> "VectorChange":
        """Returns the change that leads back."""
        shift = self.shift
        return VectorChange(
            self.index.inverse(),
            born_frozen=self.gone_frozen,
            gone_frozen=self.born_frozen,
            flips=self.index.old_positions(self.flips),
            born_values=self.gone_values,
            born_gradients=self.gone_gradients,
            flip_gradients=self.flip_gradients,
            shift=shift
            and Shift(self.index.old_positions(shift.positions), shift.after, shift.before),
        )

    def to(self, device: torch.device) -> "VectorChange":
        """Returns the change on the device of the net, which may have moved since."""
        if self.flips.device == device:
            return self
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        moved |= {
            name: value.to(device)
            for name, value in moved.items()
            if isinstance(value, Tensor | IndexMap)
        }
        shift = self.shift and Shift(
            *(getattr(self.shift, f.name).to(device) for f in fields(Shift))
        )
        return VectorChange(**{**moved, "shift": shift})

    def without_values(self) -> "VectorChange":
        """Returns the change as the journal keeps it for ever."""
        return replace(self, born_values=None, gone_values=None)


@dataclass(frozen=True, eq=False)
class NodeRecord:
    """The identity of some nodes: uids, owners, activations."""

    uids: Tensor  # [n] int64
    owners: Labels
    activations: Labels

    def __len__(self) -> int:
        return self.uids.shape[0]


@dataclass(frozen=True, eq=False)
class Relabel:
    """Names that change on surviving rows (in new rows)."""

    rows: Tensor  # [n] int32
    before: Labels
    after: Labels

    def inverse(self, index: IndexMap) -> "Relabel":
        """Returns the relabelling that leads back."""
        return Relabel(index.old_positions(self.rows), self.after, self.before)


@dataclass(frozen=True, eq=False)
class LayerChange:
    """The change of one layer: rows added and removed, biases, names and columns."""

    index: IndexMap
    born: NodeRecord
    gone: NodeRecord
    biases: VectorChange | None  # None for the sensory layer
    owners: Relabel | None = None
    activations: Relabel | None = None
    # by name, of those that were there
    columns: dict[str, VectorChange] = field(default_factory=dict)
    # by transition: old positions of relations that left their parent's constant to the child's
    # bias
    folded: dict[int, Tensor] | None = None

    @property
    def is_empty(self) -> bool:
        """True when nothing happens."""
        turned = self.biases is not None and (
            len(self.biases.flips) > 0 or self.biases.shift is not None
        )
        return (
            self.index.is_identity
            and not turned
            and self.owners is None
            and self.activations is None
        )

    def fits(self, uids: Tensor) -> bool:
        """Returns whether a layer with these uids equals the one that the change was made on."""
        if len(uids) != self.index.old_size or not torch.equal(
            uids[self.index.removed.long()], self.gone.uids
        ):
            return False
        return not bool((self.index.carry(uids, self.born.uids).diff() <= 0).any())

    def to(self, device: torch.device) -> "LayerChange":
        """Returns the change with its coordinates on a device; rows are counted on the CPU."""
        columns = {name: c.to(device) for name, c in self.columns.items()}
        folded = self.folded and {t: at.to(device) for t, at in self.folded.items()}
        return replace(
            self, biases=self.biases and self.biases.to(device), columns=columns, folded=folded
        )

    def without_values(self) -> "LayerChange":
        """Returns the change as the journal keeps it for ever."""
        return replace(
            self, biases=self.biases and self.biases.without_values(), columns={}, folded=None
        )

    def inverse(self) -> "LayerChange":
        """Returns the change that leads back."""
        return LayerChange(
            self.index.inverse(),
            born=self.gone,
            gone=self.born,
            biases=self.biases and self.biases.inverse(),
            owners=self.owners and self.owners.inverse(self.index),
            activations=self.activations and self.activations.inverse(self.index),
            columns={name: c.inverse() for name, c in self.columns.items()},
        )


@dataclass(frozen=True, eq=False)
class Pairs:
    """Relations by the uids of both ends."""

    parents: Tensor  # [n] int32
    children: Tensor  # [n] int32

    def __len__(self) -> int:
        return self.parents.shape[0]


@dataclass(frozen=True, eq=False)
class TransitionChange:
    """The change of the relations of one transition."""

    index: IndexMap
    born: Pairs
    gone: Pairs
    weights: VectorChange
    # the Topology that it leads to, as far as known; the journal keeps none
    wiring: Any = None

    @property
    def is_empty(self) -> bool:
        """True when nothing happens."""
        return self.index.is_identity and len(self.weights.flips) == 0

    def inverse(self) -> "TransitionChange":
        """Returns the change that leads back."""
        weights = self.weights.inverse()
        return TransitionChange(weights.index, born=self.gone, gone=self.born, weights=weights)


@dataclass(frozen=True, eq=False)
class Change:
    """The change of one commit by layer and transition; others stay."""

    layers: dict[int, LayerChange]
    transitions: dict[int, TransitionChange]

    @property
    def is_empty(self) -> bool:
        """True when nothing happens."""
        return all(c.is_empty for c in self.layers.values()) and all(
            c.is_empty for c in self.transitions.values()
        )

    def inverse(self) -> "Change":
        """Returns the inverse change."""
        return Change(
            {n: c.inverse() for n, c in self.layers.items()},
            {t: c.inverse() for t, c in self.transitions.items()},
        )

    def to(self, device: torch.device) -> "Change":
        """Returns the change with its coordinates and relations on a device; rows are counted on
        the CPU.
        """
        if all(vector.flips.device == device for vector in self._vectors()):
            return self
        layers = {n: c.to(device) for n, c in self.layers.items()}
        weights = {t: c.weights.to(device) for t, c in self.transitions.items()}
        wires = {
            t: replace(c, index=weights[t].index, weights=weights[t], wiring=None)
            for t, c in self.transitions.items()
        }
        return Change(layers, wires)

    def without_values(self) -> "Change":
        """Returns the change without added and removed weights and biases."""
        layers = {n: c.without_values() for n, c in self.layers.items()}
        transitions = {
            t: replace(c, weights=c.weights.without_values()) for t, c in self.transitions.items()
        }
        return Change(layers, transitions)

    @property
    def has_values(self) -> bool:
        """False after the journal has dropped added and removed weights and biases."""
        return all(vector.gone_values is not None for vector in self._vectors())

    @property
    def detail_bytes(self) -> int:
        """The size of the lists of added and removed nodes and relations."""
        parts = [
            t
            for c in self.layers.values()
            for t in (c.index.removed, c.index.inserted, c.born.uids, c.gone.uids)
        ]
        for c in self.transitions.values():
            ends = (c.born.parents, c.born.children, c.gone.parents, c.gone.children)
            parts += [c.index.removed, c.index.inserted, c.weights.flips, *ends]
        return sum(t.numel() * t.element_size() for t in parts)

    def counts(self) -> dict[str, int]:
        """Returns the numbers of nodes and relations added and removed, and of coordinates frozen
        and unfrozen.
        """
        layers = self.layers.values()
        transitions = self.transitions.values()
        turned = [c.biases.flips for c in layers if c.biases] + [
            c.weights.flips for c in transitions
        ]
        return {
            "nodes_added": sum(len(c.born) for c in layers),
            "nodes_removed": sum(len(c.gone) for c in layers),
            "relations_added": sum(len(c.born) for c in transitions),
            "relations_removed": sum(len(c.gone) for c in transitions),
            "coordinates_turned": sum(map(len, turned)),
        }

    def _vectors(self) -> list[VectorChange]:
        return [c.biases for c in self.layers.values() if c.biases] + [
            c.weights for c in self.transitions.values()
        ]
