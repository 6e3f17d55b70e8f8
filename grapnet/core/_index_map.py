"""How the positions of a vector move in a commit."""

import math
import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 20  # bytes; smaller buffers come from torch
KEEP = 256 << 20  # bytes kept for the next commit or step, in the whole process

# devices whose tensors numpy reads
_HOSTS = frozenset({"cpu"})


def on_host(device: torch.device) -> bool:
    """Returns whether numpy reads the tensors of a device, where it is faster than torch.

    Everywhere else positions stay on the device, and nothing waits for them: see `IndexMap`.
    """
    return device.type in _HOSTS


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
    if not on_host(example.device) or size < LARGE:
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

    The sizes are known without reading a position. On a GPU `carry` therefore waits for nothing,
    except where a few positions cut the vector into pieces: these it reads once.

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
        """True if nothing was removed and everything was inserted at the end, as far as that is
        known without waiting for a device.
        """
        if self.removed.shape[0] or not self.inserted.shape[0]:
            return self.is_identity
        return on_host(self.inserted.device) and int(self.inserted[0]) == self.old_size

    def to(self, device: torch.device) -> "IndexMap":
        """Returns the map with its positions on another device."""
        return IndexMap(
            self.old_size, self.new_size, moved(self.removed, device), moved(self.inserted, device)
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
        if self.removed.shape[0] == self.old_size:
            # never the memory of what was given
            newborn = self._newborn(old, born)
            return newborn.clone(memory_format=torch.contiguous_format)
        if self.appends:
            return torch.cat([old, self._newborn(old, born)], out=room(old, self.new_size))
        runs = self._runs()
        if runs is not None:
            pieces = torch.split_with_sizes(old, runs.old_lengths)
            if runs.born_lengths:
                pieces += torch.split_with_sizes(self._newborn(old, born), runs.born_lengths)
            chosen = [pieces[n] for n in runs.order]
            if old.numel() < LARGE // 8:
                return torch.cat(chosen)
            return torch.cat(chosen, out=room(old, self.new_size))
        new = room(old, self.new_size)
        single = old.numel() == self.old_size  # [n] or [n, 1]: a flat gather is four times faster
        flat, target = (old.reshape(-1), new.view(-1)) if single else (old, new)
        torch.index_select(flat, 0, self._source(old.device), out=target)
        if self.inserted.shape[0]:
            targets = self._targets(old.device)
            if isinstance(born, Tensor):
                new.index_copy_(0, targets, self._newborn(old, born))
            else:
                new.index_fill_(0, targets, born)
        return new

    @property
    def n_survivors(self) -> int:
        """The number of positions that exist before and after the commit."""
        return self.old_size - self.removed.shape[0]

    @property
    def n_born(self) -> int:
        """The number of inserted positions."""
        return self.inserted.shape[0]

    def take(self, old: Tensor) -> Tensor:
        """Returns the entries at the removed positions, as one vector."""
        removed = self.gone(old.device)
        if old.numel() == self.old_size:
            return old.detach().reshape(-1).index_select(0, removed)
        return old.detach().index_select(0, removed).reshape(-1)

    def give(self, new: Tensor, entries: Tensor) -> None:
        """Writes a vector of entries into a tensor that `carry` has made, where positions were
        inserted.
        """
        shape = (self.n_born, *new.shape[1:])
        new.index_copy_(0, self._targets(new.device), entries.to(new).view(shape))

    def survivors(self, device: torch.device) -> Tensor:
        """Returns the old positions that stay, ascending, int32."""
        key = f"survivors {device}"
        if key not in self._scratch:
            self._scratch[key] = positions_without(self.gone(device), self.old_size)
        return self._scratch[key]

    def gone(self, device: torch.device) -> Tensor:
        """Returns the removed positions on a device; moved there once in a commit."""
        if self.removed.device == device:
            return self.removed
        key = f"gone {device}"
        if key not in self._scratch:
            self._scratch[key] = moved(self.removed, device)
        return self._scratch[key]

    def stays(self, device: torch.device) -> Tensor:
        """Returns the new positions of the survivors, ascending, int32."""
        key = f"stays {device}"
        if key not in self._scratch:
            inserted = moved(self.inserted, device)
            self._scratch[key] = positions_without(inserted, self.new_size)
        return self._scratch[key]

    def order(self, device: torch.device) -> Tensor | None:
        """Returns where each new position is among the survivors followed by the inserted ones,
        int32; None if that is their order.
        """
        key = f"order {device}"
        if key not in self._scratch:
            old = np.ones(self.new_size, dtype=bool)
            old[self.inserted.cpu().numpy()] = False
            places = np.where(old, old.cumsum() - 1, self.n_survivors + (~old).cumsum() - 1)
            order = None
            if old[self.n_survivors :].any():
                # Nothing waits for what runs on a GPU.
                order = torch.from_numpy(places.astype(np.int32)).to(device, non_blocking=True)
            self._scratch[key] = order
        return self._scratch[key]

    def _newborn(self, old: Tensor, born: Tensor | float) -> Tensor:
        """Returns `born` as one entry like those of `old` for each inserted position."""
        shape = (self.inserted.shape[0], *old.shape[1:])
        if isinstance(born, Tensor):
            born = born.detach()
            if born.numel() == math.prod(shape):
                return born.to(old).reshape(shape)
        newborn = old.new_empty(shape)
        if shape[0]:
            newborn[:] = born
        return newborn

    def new_positions(self, old: Tensor) -> Tensor:
        """Returns where the surviving old positions `old` are in the new vector."""
        ordinal = old - _count_below(self.removed, old)
        return ordinal + _count_below(_counted_below(self.inserted), ordinal, including=True)

    def are_gone(self, old: Tensor) -> Tensor:
        """Returns one bool per old position: True if it was removed."""
        return contains(self.gone(old.device), old)

    def old_positions(self, new: Tensor) -> Tensor:
        """Returns where the surviving new positions `new` were in the old vector."""
        return self.inverse().new_positions(new)

    def equals(self, other: "IndexMap") -> bool:
        """Returns whether another map moves every position in the same way."""
        sizes = (other.old_size, other.new_size)
        return (
            (self.old_size, self.new_size) == sizes
            and torch.equal(self.removed, other.removed)
            and torch.equal(self.inserted, other.inserted)
        )

    def release(self) -> None:
        """Drops what `carry` keeps while a commit moves one vector after the other."""
        self._scratch.clear()

    def _runs(self) -> "_Runs | None":
        """Returns the pieces that make up the new vector, or None when they are too many."""
        if "runs" not in self._scratch:
            self._scratch["runs"] = self._find_runs()
        return self._scratch["runs"]

    def _find_runs(self) -> "_Runs | None":
        if on_host(self.removed.device):
            return _runs_of(self.removed.numpy(), self.inserted.numpy(), self)
        count = self.removed.shape[0]
        if count + self.inserted.shape[0] > _FEW_RUNS:
            return None
        positions = self.removed
        if self.inserted.shape[0]:
            positions = torch.cat([positions, self.inserted])
        positions = positions.cpu().numpy()
        return _runs_of(positions[:count], positions[count:], self)

    def _source(self, device: torch.device) -> Tensor:
        """Returns, for every new position, the old position to read (any, where newborn)."""
        key = str(device)
        if key not in self._scratch:
            removed = self.gone(device)
            inserted = moved(self.inserted, device)
            self._scratch[key] = _sources(removed, inserted, self.old_size, self.new_size)
        return self._scratch[key]

    def _targets(self, device: torch.device) -> Tensor:
        """Returns the inserted positions, int64."""
        key = f"targets {device}"
        if key not in self._scratch:
            self._scratch[key] = moved(self.inserted, device).long()
        return self._scratch[key]


def _runs_of(removed: np.ndarray, inserted: np.ndarray, index: IndexMap) -> "_Runs | None":
    """Returns the pieces of a vector that an index with these positions moves; see `_runs`."""
    if len(removed) == 1 and len(inserted) == 0:
        # One coordinate leaves: three pieces, of which the outer ones stay.
        at = int(removed[0])
        lengths = [at, 1, index.old_size - at - 1]
        filled = [length for length in lengths if length]
        kept = list(range(len(filled)))
        kept.remove(int(at > 0))
        return _Runs(filled, [], kept)
    most = max(_FEW_RUNS, index.new_size // _SHORTEST_RUN)
    if _pieces(removed) + _pieces(inserted) > most:
        return None
    # how many survivors are before each of them
    removed_at = removed - np.arange(len(removed), dtype=np.int32)
    inserted_at = inserted - np.arange(len(inserted), dtype=np.int32)
    gaps = _distinct(removed_at)
    holes = _distinct(inserted_at)
    starts = np.unique(np.concatenate([[0], gaps, holes]))  # where a run of survivors begins
    kept = np.diff(starts, append=index.old_size - len(removed_at))
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


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device.

    What goes to a GPU is read before the call returns, and nothing waits for what runs there.
    """
    return tensor.to(device, non_blocking=on_host(tensor.device))


def positions_without(gone: Tensor, size: int) -> Tensor:
    """Returns the int32 positions below `size` without those in the sorted `gone`."""
    if on_host(gone.device):
        stays = torch.ones(size, dtype=torch.bool, device=gone.device)
        stays[gone.long()] = False
        return flatnonzero(stays)
    return _sources(gone, gone[:0], size, size - gone.shape[0])


def _sources(removed: Tensor, inserted: Tensor, old_size: int, new_size: int) -> Tensor:
    """Returns the old position of every new one, int32; any position for one that is inserted."""
    device = removed.device
    if on_host(device):
        if removed.shape[0]:
            source = positions_without(removed, old_size)
        else:
            source = ascending(old_size, device)
        if inserted.shape[0]:
            survivors = source
            stays = np.ones(new_size, dtype=bool)
            stays[inserted.numpy()] = False
            source = torch.zeros(new_size, dtype=torch.int32, device=device)
            source.numpy()[stays] = survivors.numpy()
        return source
    # One scan: each survivor is one further on than the one before it, and further by as many
    # positions as were removed between the two. Behind the last one is room for those at the end.
    steps = torch.ones(new_size + 1, dtype=torch.int32, device=device)
    if inserted.shape[0]:
        steps.index_fill_(0, inserted.long(), 0)
    if removed.shape[0]:
        behind = _counted_below(removed)
        if inserted.shape[0]:
            behind += _count_below(_counted_below(inserted), behind, including=True)
        steps.index_add_(0, behind, torch.ones_like(behind))
    steps[:1] -= 1
    source = steps.cumsum(0, dtype=torch.int32)[:new_size]
    if inserted.shape[0]:
        # Those that are inserted before the first survivor.
        source.clamp_(min=0)
    return source


def _counted_below(positions: Tensor) -> Tensor:
    """Returns how many other positions are before each of the sorted positions, int32."""
    return positions - ascending(positions.shape[0], positions.device)


def map_of_sources(sources: np.ndarray, old_size: int) -> IndexMap:
    """Returns the map of a vector of which every new position has one old position as its source,
    or -1 for none. The sources ascend.

    Examples:
        >>> index = map_of_sources(np.array([0, -1, 2]), 3)
        >>> index.removed.tolist(), index.inserted.tolist()
        ([1], [1])
    """
    stays = np.zeros(old_size, dtype=bool)
    stays[sources[sources >= 0]] = True
    removed = np.flatnonzero(~stays).astype(np.int32)
    inserted = np.flatnonzero(sources < 0).astype(np.int32)
    return IndexMap(old_size, len(sources), torch.from_numpy(removed), torch.from_numpy(inserted))


def as_positions(at: Tensor | range, device: torch.device) -> Tensor:
    """Returns positions as an int32 tensor; a range becomes one on the device."""
    if isinstance(at, Tensor):
        return at
    return torch.arange(at.start, at.stop, dtype=torch.int32, device=device)


def as_tensor(values: Any) -> Tensor:
    """Returns values as a tensor; numbers, lists and arrays become CPU tensors."""
    return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")


def ascending(size: int, device: torch.device) -> Tensor:
    """Returns the int32 positions 0 to size - 1."""
    if on_host(device):
        return torch.from_numpy(np.arange(size, dtype=np.int32))
    return torch.arange(size, dtype=torch.int32, device=device)


def flatnonzero(mask: Tensor) -> Tensor:
    """Returns the int32 positions where a 1-D bool tensor is true (numpy is six times faster than
    torch on a CPU).
    """
    if on_host(mask.device):
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
    if not on_host(keys.device):
        ascending, order = keys.sort(stable=True)
        return ascending, order
    order = torch.from_numpy(keys.numpy().argsort(kind="stable"))
    return keys[order], order


def positions_in(ascending: Tensor, keys: Tensor) -> Tensor:
    """Returns the insertion point of each key in the sorted tensor."""
    if not on_host(keys.device):
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
    if on_host(values.device) and values.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.partition(values.numpy(), rank - 1))[rank - 1]
    return values.kthvalue(rank).values


def first_in_order(values: Tensor, count: int, *, largest: bool) -> Tensor:
    """Returns the ascending int32 positions of the `count` largest or smallest values; of equals
    the first come in.
    """
    if count == 0:
        return empty_positions(values.device)
    if not on_host(values.device):
        # A GPU sorts faster than it finds one value, and the host waits for nothing.
        order = values.argsort(stable=True, descending=largest)[:count]
        return order.int().sort().values
    if largest:
        bar = kth_smallest(values, len(values) - count + 1)
        chosen = values > bar
    else:
        bar = kth_smallest(values, count)
        chosen = values < bar
    equals = flatnonzero(values == bar)
    chosen[equals[: count - int(chosen.sum())].long()] = True
    return flatnonzero(chosen)


def concatenate_ranges(starts: Tensor, stops: Tensor) -> Tensor:
    """Returns the int32 positions of many ranges, one after the other."""
    lengths = (stops - starts).long()
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    offsets = torch.repeat_interleave(starts.long() - (ends - lengths), lengths, output_size=total)
    return (offsets + torch.arange(total, device=starts.device)).int()


def counted(numbers: Tensor, count: int) -> Tensor:
    """Returns how often each number below `count` occurs, int64.

    `bincount` looks for the largest number first, for which a GPU makes everything wait.
    """
    if on_host(numbers.device):
        return torch.bincount(numbers, minlength=count)
    found = torch.zeros(count, dtype=torch.int32, device=numbers.device)
    return found.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.int32)).long()


def empty_positions(device: torch.device | str = "cpu") -> Tensor:
    """Returns an int32 tensor of no positions."""
    return torch.empty(0, dtype=torch.int32, device=device)


def _pieces(positions: np.ndarray) -> int:
    """Returns the number of runs of consecutive positions."""
    return len(positions) and 1 + int(np.count_nonzero(positions[1:] - positions[:-1] != 1))


def _distinct(ascending: np.ndarray) -> np.ndarray:
    return ascending[np.flatnonzero(np.diff(ascending, prepend=-1))]


def _count_below(ascending: Tensor, queries: Tensor, *, including: bool = False) -> Tensor:
    if len(ascending) == 0:
        return torch.zeros_like(queries)
    return torch.searchsorted(ascending, queries, right=including, out_int32=True).to(queries.dtype)
