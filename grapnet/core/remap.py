"""IndexMap: how the coordinates of one vector moved in one commit."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

# A copy by runs beats a gather while runs are long; both are measured in `benchmarks.run edits`.
_MOST_RUNS = 4096


@dataclass(frozen=True, eq=False)
class IndexMap:
    """Says which coordinates left and which came; the survivors keep their order.

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
    _scratch: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def is_identity(self) -> bool:
        """True when no coordinate left and none came."""
        return len(self.removed) == 0 and len(self.inserted) == 0

    def inverse(self) -> "IndexMap":
        """Returns the map that leads back: what was removed comes, what was inserted leaves."""
        return IndexMap(self.new_size, self.old_size, self.inserted, self.removed)

    def carry(self, old: Tensor, born: Tensor | float = 0) -> Tensor:
        """Returns `old` moved to the new positions, with `born` at the inserted ones.

        Works on dimension 0; further dimensions travel along. `old` itself is left as it is.

        >>> index = IndexMap(3, 3, torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
        >>> index.carry(torch.tensor([10.0, 11.0, 12.0]), born=-1.0)
        tensor([11., 12., -1.])
        """
        if len(old) != self.old_size:
            raise ValueError(f"this IndexMap carries vectors of length {self.old_size}, got {len(old)}")
        if self.is_identity:
            return old
        newborn = old.new_empty((len(self.inserted), *old.shape[1:]))
        newborn[:] = born
        runs = self._runs()
        if runs is not None:
            return torch.cat([newborn[a:b] if fresh else old[a:b] for fresh, a, b in runs] or [newborn])
        source = self._source(old.device)
        single = old.numel() == self.old_size  # [n] or [n, 1]: a flat gather is four times faster
        flat = old.reshape(-1) if single else old
        new = flat.index_select(0, source).reshape(-1, *old.shape[1:])
        if len(newborn):
            new[self.inserted.to(old.device).long()] = newborn
        return new

    def new_positions(self, old: Tensor) -> Tensor:
        """Returns where the surviving old positions `old` are in the new vector."""
        ordinal = old - _count_below(self.removed, old)
        steps = self.inserted - torch.arange(len(self.inserted), dtype=torch.int32, device=self.inserted.device)
        return ordinal + _count_below(steps, ordinal, including=True)

    def old_positions(self, new: Tensor) -> Tensor:
        """Returns where the surviving new positions `new` were in the old vector."""
        return self.inverse().new_positions(new)

    def release(self) -> None:
        """Drops the gather index that `carry` keeps while a commit moves one vector after the other."""
        self._scratch.clear()

    def _runs(self) -> list[tuple[bool, int, int]] | None:
        """Returns (newborn?, start, stop) pieces of the new vector in order, or None when they are too many."""
        if len(self.removed) + len(self.inserted) > self.new_size // 4 + _MOST_RUNS:
            return None
        removed, inserted = self.removed.cpu().numpy(), self.inserted.cpu().numpy()
        removed_at = removed - np.arange(len(removed), dtype=np.int32)  # counted in survivors
        inserted_at = inserted - np.arange(len(inserted), dtype=np.int32)
        survivors = self.old_size - len(removed)
        starts = np.unique(np.concatenate([[0], removed_at, inserted_at]))
        if len(starts) > _MOST_RUNS:
            return None
        stops = np.append(starts[1:], survivors)
        shift = np.searchsorted(removed_at, starts, side="right")
        born_from = np.searchsorted(inserted_at, starts, side="left")
        born_to = np.searchsorted(inserted_at, starts, side="right")
        runs: list[tuple[bool, int, int]] = []
        for start, stop, moved, low, high in zip(
            starts.tolist(), stops.tolist(), shift.tolist(), born_from.tolist(), born_to.tolist(), strict=True
        ):
            if high > low:
                runs.append((True, low, high))
            if stop > start:
                runs.append((False, start + moved, stop + moved))
        return runs

    def _source(self, device: torch.device) -> Tensor:
        """Returns, for every new position, the old position to read (0 where newborn)."""
        key = str(device)
        if key not in self._scratch:
            keep = torch.ones(self.old_size, dtype=torch.bool, device=device)
            keep[self.removed.to(device).long()] = False
            source = flatnonzero(keep)
            if len(self.inserted):
                old = torch.ones(self.new_size, dtype=torch.bool, device=device)
                old[self.inserted.to(device).long()] = False
                survivors, source = source, torch.zeros(self.new_size, dtype=torch.int32, device=device)
                if device.type == "cpu":
                    source.numpy()[old.numpy()] = survivors.numpy()
                else:
                    source[old] = survivors
            self._scratch[key] = source
        return self._scratch[key]


def flatnonzero(mask: Tensor) -> Tensor:
    """Returns the int32 positions where a 1-D bool tensor is true (numpy is six times faster than torch on a CPU)."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()).astype(np.int32))
    return mask.nonzero().squeeze(1).int()


def contains(ascending: Tensor, queries: Tensor) -> Tensor:
    """Says for every query whether it stands in the sorted tensor."""
    if len(ascending) == 0:
        return torch.zeros(len(queries), dtype=torch.bool, device=queries.device)
    place = torch.searchsorted(ascending, queries).clamp_(max=len(ascending) - 1)
    return ascending[place] == queries


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


def _count_below(ascending: Tensor, queries: Tensor, *, including: bool = False) -> Tensor:
    if len(ascending) == 0:
        return torch.zeros_like(queries)
    return torch.searchsorted(ascending, queries, right=including, out_int32=True).to(queries.dtype)
