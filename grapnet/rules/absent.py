"""Absent relations with the largest gradients, found without holding the whole rectangle."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grapnet.core._change import contains, flatnonzero, kth_smallest
from grapnet.core._transition import Topology
from grapnet.execution import native

PRESENT = -1.0  # stands where a relation is: below every |gradient|


class Rectangle(Protocol):
    """One gradient for every pair of an upper and a lower node, computed where it is asked for."""

    shape: tuple[int, int]

    def parents(self, rows: slice) -> Tensor:
        """Returns those of some upper nodes, [rows, n_lower]."""
        ...

    def children(self, rows: slice) -> Tensor:
        """Returns those of some lower nodes, [rows, n_upper]."""
        ...

    def at(self, parents: Tensor, children: Tensor) -> Tensor:
        """Returns those of pairs of rows."""
        ...


@dataclass(frozen=True, eq=False)
class Absent:
    """The |gradients| of a rectangle, with PRESENT where a relation is."""

    gradients: Rectangle
    topology: Topology | None  # None: no relation is there
    exclude: Tensor | None  # sorted positions of relations that do not count as present

    def by_parent(self, cells: int) -> Iterator[tuple[int, Tensor]]:
        """Yields some upper nodes' |gradients| at a time, flat, and the number of their first
        pair.
        """
        n_upper, n_lower = self.gradients.shape
        step = max(1, cells // max(1, n_lower))
        for start in range(0, n_upper if n_lower else 0, step):
            stop = min(start + step, n_upper)
            sizes = self.gradients.parents(slice(start, stop)).abs_().view(-1)
            if self.topology is not None:
                first, last = int(self.topology.ptr[start]), int(self.topology.ptr[stop])
                pairs = (
                    self.topology.parents(first, last).long() - start
                ) * n_lower + self.topology.child[first:last]
                sizes.index_fill_(0, self._present(pairs, first), PRESENT)
            yield start * n_lower, sizes

    def by_child(self, cells: int) -> Iterator[tuple[slice, Tensor]]:
        """Yields some lower nodes' |gradients| at a time, [rows, n_upper], and which rows they
        are.
        """
        n_upper, n_lower = self.gradients.shape
        step = max(1, cells // max(1, n_upper))
        parents = None if self.topology is None else self.topology.parents()
        for start in range(0, n_lower if n_upper else 0, step):
            rows = slice(start, min(start + step, n_lower))
            sizes = self.gradients.children(rows).abs_()
            if self.topology is not None and parents is not None:
                child, upper = self.topology.child, parents
                if rows.stop - start < n_lower or self.exclude is not None:
                    inside = flatnonzero((child >= start) & (child < rows.stop))
                    if self.exclude is not None:
                        inside = inside[~contains(self.exclude, inside)]
                    child, upper = child.index_select(0, inside), parents.index_select(0, inside)
                sizes.view(-1).index_fill_(0, (child.long() - start) * n_upper + upper, PRESENT)
            yield rows, sizes

    def _present(self, pairs: Tensor, first: int) -> Tensor:
        """Returns the pairs of relations from position `first` on without those that do not
        count.
        """
        if self.exclude is None:
            return pairs
        low, high = torch.searchsorted(
            self.exclude, torch.tensor([first, first + len(pairs)], device=pairs.device)
        )
        keep = torch.ones(len(pairs), dtype=torch.bool, device=pairs.device)
        keep[self.exclude[int(low) : int(high)].long() - first] = False
        return pairs[keep]


def largest_of_all(absent: Absent, count: int, cells: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` absent pairs with the largest |gradients|, in order of their numbers, and
    those.

    The number of a pair is parent row · n_lower + child row. A running best of `count` pairs lets
    every further chunk bring only what beats its last.
    """
    numbers, sizes, least = None, None, torch.tensor(PRESENT)
    for offset, chunk in absent.by_parent(cells) if count else ():
        least = least.to(chunk)
        found = flatnonzero(
            chunk > torch.maximum(least, _low_bar(chunk, count) if sizes is None else least)
        )
        if sizes is None and len(found) < count:  # the bar was too high
            found = flatnonzero(chunk > least)
        more = chunk.index_select(0, found)
        numbers = (
            found.long() + offset
            if numbers is None
            else torch.cat([numbers, found.long() + offset])
        )
        sizes = more if sizes is None else torch.cat([sizes, more])
        if len(sizes) >= count:
            best = first_largest(sizes, count)
            numbers, sizes = numbers.index_select(0, best), sizes.index_select(0, best)
            least = sizes.amin()
    return _none(absent) if numbers is None or sizes is None else (numbers, sizes)


def _low_bar(sizes: Tensor, count: int) -> Tensor:
    """Returns a value that most likely at least `count` of the sizes exceed, and few more, from
    every 64th of them.
    """
    sample = sizes[::64].contiguous()
    expected = count / max(1, len(sizes)) * len(sample)
    rank = int(expected + 5 * expected**0.5) + 8  # five standard deviations on the safe side
    return (
        kth_smallest(sample, len(sample) - rank + 1)
        if rank <= len(sample)
        else sizes.new_tensor(PRESENT)
    )


def largest_of_each(absent: Absent, quotas: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Returns for every child as many absent pairs with the largest |gradients| as its quota says,
    like the above.
    """
    n_upper, n_lower = absent.gradients.shape
    numbers, sizes = ([part] for part in _none(absent))
    for rows, chunk in absent.by_child(cells):
        wanted = quotas[rows].clamp(max=n_upper)
        most = int(wanted.max())
        if most == 0:
            continue
        if native.reads(chunk):
            ptr = torch.arange(0, chunk.numel() + 1, n_upper, dtype=torch.int32, device="cpu")
            found = native.largest_of_rows(chunk.view(-1), ptr, wanted, least=0)
        else:
            found = _first_of_rows(chunk, wanted[:, None], most)
        numbers.append((found % n_upper).long() * n_lower + found // n_upper + rows.start)
        sizes.append(chunk.view(-1).index_select(0, found))
    order = torch.cat(numbers).argsort()
    return torch.cat(numbers)[order], torch.cat(sizes)[order]


def _first_of_rows(chunk: Tensor, wanted: Tensor, most: int) -> Tensor:
    """Returns flat positions of every row's largest, [rows, 1] of them, without those that are
    PRESENT.
    """
    columns = chunk.shape[1]
    # one more, to see whether the last has an equal
    values, at = chunk.topk(min(most + 1, columns), dim=1)
    chosen = (torch.arange(values.shape[1], device=at.device) < wanted) & (values >= 0)
    last = values.gather(1, (wanted - 1).clamp(min=0))
    following = values.gather(1, wanted.clamp(max=values.shape[1] - 1))
    tied = (wanted > 0) & (wanted < columns) & (following == last) & (last >= 0)
    chosen &= ~tied
    start = torch.arange(len(chunk), device=at.device)[:, None] * columns
    found = [(start + at)[chosen]]
    for row in tied.view(-1).nonzero().view(-1).tolist():
        found.append(start[row] + first_largest(chunk[row], int(wanted[row])).long())
    return torch.cat(found)


def largest_among(
    absent: Absent, parents: Tensor, children: Tensor, count: int | None, quotas: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the same among given pairs of rows; pairs that are present, or given twice, do not
    count.
    """
    n_lower = max(1, absent.gradients.shape[1])
    numbers = (parents * n_lower + children).unique()
    if absent.topology is not None and len(numbers):
        found = absent.topology.find(numbers // n_lower, numbers % n_lower).int()
        free = found < 0
        if absent.exclude is not None:
            free |= contains(absent.exclude, found)
        numbers = numbers[free]
    if len(numbers) == 0:
        return _none(absent)
    sizes = absent.gradients.at(numbers // n_lower, numbers % n_lower).abs_()
    if quotas is not None:
        best = _first_of_each(sizes, numbers % n_lower, quotas)
    else:
        best = first_largest(sizes, min(count or 0, len(sizes)))
    return numbers[best], sizes[best]


def first_largest(sizes: Tensor, count: int) -> Tensor:
    """Returns the ascending positions of the `count` largest; of equals the first come in."""
    if count == 0:
        return torch.empty(0, dtype=torch.int32, device=sizes.device)
    bar = kth_smallest(sizes, len(sizes) - count + 1)
    chosen = sizes > bar
    equal = flatnonzero(sizes == bar)
    chosen[equal[: count - int(chosen.sum())].long()] = True
    return flatnonzero(chosen)


def _first_of_each(sizes: Tensor, children: Tensor, quotas: Tensor) -> Tensor:
    """Returns the ascending positions of every child's largest, as many as its quota says; of
    equals the first.
    """
    order = sizes.argsort(descending=True, stable=True)
    order = order[children[order].argsort(stable=True)]  # child by child, the largest of each first
    counts = torch.bincount(children, minlength=len(quotas))
    rank = torch.arange(len(order), device=order.device) - (
        counts.cumsum(0) - counts
    ).repeat_interleave(counts)
    return order[rank < quotas.repeat_interleave(counts)].sort().values


def _none(absent: Absent) -> tuple[Tensor, Tensor]:
    sizes = absent.gradients.parents(slice(0, 0)).reshape(-1)
    return sizes.long(), sizes
