"""Rewire: drops weak relations and grows as many others (SET, RigL)."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import contains, counted, moved, on_host, require_ranks
from grapnet.core._sets import RelationSet
from grapnet.core._transition import Topology, require_tile
from grapnet.spaces._adopted import Adopted

from ._budget import Budget, largest_of_each, positions_in, weakest_within
from ._gradients import GradientRecorder, gradient_recorder
from ._rule import (
    Every,
    Recorder,
    RuleContext,
    Scheduled,
    Transitions,
    as_transitions,
    chosen_transitions,
    leaving_relations,
    seen_evidence,
    taken_pairs,
)
from ._tiles import TileGrid, weakest_tiles

Pairs = tuple[Tensor, Tensor]  # uids of parents and of their children


@dataclass(frozen=True)
class Rewire:
    """Drops the weakest relations of each transition and grows as many absent ones.

    SET is `Rewire()`, RigL is `Rewire(grow="gradient", decay_until=T)`; `set_rewiring` and `rigl`
    return rule and schedule together. `fan_in="constant"` keeps the numbers of parents; `SRigL`
    also makes them equal and removes nodes. Frozen
    relations are never dropped and do not count, an output keeps its last parent, and a dropped
    relation does not come back in the same call. Relations and nodes that earlier rules cut,
    connect or remove in the same edit are not touched. Where a relation of an adopted model has
    several weights, |weight| and |gradient| are norms.

    Attributes:
        transitions: numbers of the transitions, or names of modules and tensors of an adopted
            model; all by default. A full one does not change.
        fraction: the share of the relations that may be dropped, rounded to a whole number.
        grow: "random" grows absent relations with equal chances, "gradient" those with the largest
            |gradient|.
        decay_until: the step at which the fraction reaches 0 along a cosine; constant with None.
        fan_in: "free" compares all relations of a transition; "constant" compares those of each
            child, which keeps its number of parents.
        weights: the initial weights of grown relations, "zero" or "linear".
        window: the number of steps over which gradients are averaged.
        tile: drops and grows whole tiles of so many nodes a side, 16, 32, 64 or 128, by the root
            mean square of their weights and of their gradients; the relations have to come in such
            tiles, as in `GrapNet(…, density=, tile=)`. A dropped tile is replaced by one with as
            many relations: one at the border of a layer by another one there. A tile with a frozen
            relation is not dropped. Not with `fan_in="constant"`.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([20, 30, 10], density=0.2)
        >>> with net.edit(reason="SET") as edit:
        ...     Rewire(fraction=0.25)(net, edit, RuleContext())
        >>> net.count().relations, len(net.history[-1].change.transitions[0].born)
        (180, 30)
    """

    transitions: Transitions | None = None
    fraction: float = 0.3
    grow: Literal["random", "gradient"] = "random"
    decay_until: int | None = None
    fan_in: Literal["free", "constant"] = "free"
    weights: Literal["zero", "linear"] = "zero"
    window: int = 1
    tile: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "transitions", as_transitions(self.transitions))
        if not 0 <= self.fraction <= 1:
            raise EditError(f"fraction lies between 0 and 1, got {self.fraction!r}")
        if self.decay_until is not None and self.decay_until < 1:
            raise EditError(f"decay_until is a step from 1, or None, got {self.decay_until!r}")
        if self.grow not in ("random", "gradient"):
            raise EditError(f'grow is "random" or "gradient", got {self.grow!r}')
        if self.fan_in not in ("free", "constant"):
            raise EditError(f'fan_in is "free" or "constant", got {self.fan_in!r}')
        require_tile(self.tile, EditError)
        if self.tile is not None and self.fan_in == "constant":
            raise EditError('with tile=, fan_in is "free"')

    def recorders(self, net: Graph) -> dict[str, Recorder]:
        """Returns one recorder of gradients a transition, none for random growth."""
        if self.grow == "random":
            return {}
        recorders: dict[str, Recorder] = {}
        for t in self._numbers(net):
            recorders[_evidence(t)] = gradient_recorder(net, t, self.window)
        return recorders

    def fraction_at(self, step: int) -> float:
        """Returns the fraction that is dropped at a step."""
        return cosine_fraction(self.fraction, step, self.decay_until)

    def __call__(self, net: Graph, edit: Edit, context: RuleContext) -> None:
        """Writes the cuts and as many connections."""
        fraction = self.fraction_at(context.step)
        if self.tile is not None:
            self._rewire_tiles(net, edit, context, fraction, self.tile)
            return
        taken = {t: taken_pairs(net, edit, t) for t in self._numbers(net)}
        candidates = {t: self._candidates(net, edit, t, fraction, taken[t]) for t in taken}
        shares = _shared_out([count for _, count in candidates.values()], context.budget.edits)
        earlier = edit.cuts
        for (t, (relations, _)), count in zip(candidates.items(), shares, strict=True):
            if count == 0:
                continue
            within = _beside(earlier, self._budget(net, context, t))
            dropped = weakest_within(net, relations, count, within)
            self._rewire(net, edit, context, t, dropped, taken[t])

    def _budget(self, net: Graph, context: RuleContext, t: int) -> Budget:
        """Returns the limits of what is dropped in transition t."""
        # An output keeps its last parent; with a constant fan-in it gets another one.
        if net._is_output(net.transitions[t].target) and self.fan_in != "constant":
            return context.budget.tightened(Budget(parents=1))
        return context.budget

    def _rewire_tiles(
        self, net: Graph, edit: Edit, context: RuleContext, fraction: float, tile: int
    ) -> None:
        """Cuts the weakest tiles of every transition and connects as many absent ones."""
        earlier = edit.cuts
        touched = earlier | leaving_relations(edit)
        grids = []
        free = []
        counts = []
        for t in self._numbers(net):
            grid = TileGrid.of(net, t, tile)
            if not grid.is_whole:
                raise EditError(
                    f"the relations of transition {t} do not come in tiles of {tile}. Start with"
                    f" GrapNet(…, density=, tile={tile}), or cut tiles first:"
                    f" PruneWeakest(…, tile={tile})"
                )
            grids.append(grid)
            spared = grid.is_frozen | grid.has(positions_in(touched, t, net.device))
            free.append(grid.is_present & ~spared)
            counts.append(round(fraction * int(free[-1].sum())))
        # No tile has more relations than a full one.
        most = None if context.budget.edits is None else context.budget.edits // tile**2
        shares = _shared_out(counts, most)
        for grid, candidates, count in zip(grids, free, shares, strict=True):
            taken = taken_pairs(net, edit, grid.transition)
            absent = ~grid.is_present & ~grid.has_pairs(taken)
            within = _beside(earlier, self._budget(net, context, grid.transition))
            dropped = _weakest_replaceable(grid, candidates, absent, count, within)
            if len(dropped):
                self._replace_tiles(net, edit, context, grid, dropped, absent)

    def _replace_tiles(
        self,
        net: Graph,
        edit: Edit,
        context: RuleContext,
        grid: TileGrid,
        dropped: Tensor,
        absent: Tensor,
    ) -> None:
        """Cuts tiles, given by number, and connects absent ones with as many relations."""
        t = grid.transition
        details = {"largest_dropped_weight": float(grid.strengths[dropped].max())}
        if self.grow == "random":
            draw = torch.rand(len(absent), generator=edit.generator, device=_source(edit.generator))
            scores = draw.to(absent.device)
        else:
            recorder = seen_evidence(context, _evidence(t), 'Rewire(grow="gradient")')
            scores = recorder.of_tiles(grid.tile).view(-1)
        grown = _largest_absent(grid, scores, absent, dropped)
        if self.grow == "gradient":
            details["smallest_grown_gradient"] = float(scores[grown].min())
        relations = RelationSet(net, {t: grid.relations(dropped)})
        edit.cut(relations)
        parents, children = grid.pairs(grown)
        assert len(parents) == len(relations), "a tile is replaced by one of its area"
        edit.connect(parents, children, pairs="aligned", weights=self.weights, transition=t)
        edit.remark(
            f"rewires tiles by {self.grow} growth",
            transition=t,
            relations=len(relations),
            tiles=len(dropped),
            **details,
        )

    def _rewire(
        self,
        net: Graph,
        edit: Edit,
        context: RuleContext,
        t: int,
        dropped: RelationSet,
        taken: Tensor,
    ) -> None:
        """Cuts `dropped` and connects as many absent pairs of transition t that are not taken."""
        if len(dropped) == 0:
            return
        topology = net.transitions[t].topology
        lost = None
        details = {}
        if self.fan_in == "constant":
            lost = torch.bincount(_children(topology, dropped, t), minlength=topology.n_children)
        largest = dropped.strengths.max().double()
        if self.grow == "random":
            parents, children = _random_absent(topology, len(dropped), lost, taken, edit.generator)
        else:
            recorder = seen_evidence(context, _evidence(t), 'Rewire(grow="gradient")')
            parents, children, gradients = _steepest_absent(
                net, t, recorder, len(dropped), lost, taken
            )
            smallest = gradients.min().double().to(largest.device)
            # both at once, as a device gives them only when it has done everything before
            details["smallest_grown_gradient"], largest = torch.stack([smallest, largest]).tolist()
        assert len(parents) == len(dropped), "there are absent pairs for all that is dropped"
        details["largest_dropped_weight"] = float(largest)
        edit.cut(dropped)
        # Pairs that are chosen beside others come in the order of their gradients.
        ascends = self.grow == "random" or len(taken) == 0
        connect_rows(net, edit, t, parents, children, self.weights, absent=ascends)
        edit.remark(
            f"rewires by {self.grow} growth", transition=t, relations=len(dropped), **details
        )

    def _candidates(
        self, net: Graph, edit: Edit, t: int, fraction: float, taken: Tensor
    ) -> tuple[RelationSet, int]:
        """Returns relations to choose from, and how many of them to drop."""
        sizes = net.sizes
        source, target = net.ends[t]
        absent = sizes[source] * sizes[target] - net.transitions[t].size - len(taken)
        if absent == 0:
            return RelationSet(net, {}), 0
        relations = RelationSet.of(net, [t])
        if len(net.transitions[t].frozen_at):
            relations = relations[~relations.frozen]
        if len(edit.cuts):
            relations -= edit.cuts
        if len(edit.removals):
            relations -= leaving_relations(edit)
        if self.fan_in == "free":
            return relations, min(round(fraction * len(relations)), absent)
        topology = net.transitions[t].topology
        children = _children(topology, relations, t)
        free = torch.bincount(children, minlength=topology.n_children)
        room = topology.n_parents - topology.fan_in().cpu() - _of_each(taken, topology.n_children)
        quotas = torch.minimum((fraction * free.double()).round().long(), room)
        keys = relations.strengths.cpu()
        require_ranks(keys)
        relations = relations[largest_of_each(-keys, children.long(), quotas)]
        return relations, len(relations)

    def _numbers(self, net: Graph) -> list[int]:
        return chosen_transitions(net, self.transitions)


def cosine_fraction(fraction: float, step: int, until: int | None) -> float:
    """Returns a fraction that goes down to 0 along a cosine; constant without an end."""
    if until is None:
        return fraction
    return fraction / 2 * (1 + math.cos(math.pi * min(step, until) / until))


def rigl(
    steps: int,
    *,
    every: int = 100,
    fraction: float = 0.3,
    stop: float = 0.75,
    transitions: Transitions | None = None,
    fan_in: Literal["free", "constant"] = "free",
    tile: int | None = None,
) -> Scheduled:
    """Returns RigL (Evci et al. 2020) for a training of `steps` steps: `manager.add(rigl(1000))`.

    It rewires every `every` steps, up to the share `stop` of the training, at which `fraction`
    reaches 0 along a cosine. With `fan_in="constant"` every node keeps its number of parents; with
    `tile` it moves whole tiles.

    Examples:
        >>> rigl(steps=1000).schedule
        Every(steps=100, start=100, until=750)
    """
    end = max(1, int(stop * steps))
    rule = Rewire(transitions, fraction, "gradient", decay_until=end, fan_in=fan_in, tile=tile)
    return Scheduled(rule, Every(every, start=every, until=end))


def set_rewiring(
    steps: int,
    *,
    every: int = 100,
    fraction: float = 0.3,
    stop: float = 1.0,
    transitions: Transitions | None = None,
    tile: int | None = None,
) -> Scheduled:
    """Returns SET (Mocanu et al. 2018) for a training of `steps` steps.

    It rewires the share `fraction` of the relations every `every` steps, up to the share `stop` of
    the training; with `tile`, whole tiles.

    Examples:
        >>> set_rewiring(steps=1000).schedule
        Every(steps=100, start=100, until=1000)
    """
    schedule = Every(every, start=every, until=int(stop * steps))
    return Scheduled(Rewire(transitions, fraction, tile=tile), schedule)


def _weakest_replaceable(
    grid: TileGrid, free: Tensor, absent: Tensor, count: int, budget: Budget
) -> Tensor:
    """Returns the numbers of the weakest free tiles, at most `count`, that can be cut within a
    budget and replaced by absent ones with as many relations.
    """
    order = grid.strengths.masked_fill(~free, torch.inf).argsort(stable=True)
    relations = int(grid.counts[order[:count]].sum())
    (dropped,) = weakest_tiles([grid], grid.strengths, free, relations, budget)
    for area in grid.areas.unique().tolist():
        of_area = dropped[grid.areas[dropped] == area]
        room = int((absent & (grid.areas == area)).sum())
        if len(of_area) > room:
            strongest = of_area[grid.strengths[of_area].argsort()[room:]]
            dropped = dropped[~torch.isin(dropped, strongest)]
    return dropped


def _largest_absent(grid: TileGrid, scores: Tensor, absent: Tensor, dropped: Tensor) -> Tensor:
    """Returns the numbers of the absent tiles with the largest scores, as many of every area as
    are dropped.
    """
    grown = []
    for area in grid.areas[dropped].unique().tolist():
        count = int((grid.areas[dropped] == area).sum())
        there = (absent & (grid.areas == area)).nonzero().view(-1)
        best = scores[there].argsort(descending=True, stable=True)[:count]
        grown.append(there[best])
    return torch.cat(grown)


def _source(generator: torch.Generator | None) -> torch.device:
    """Returns the device that random numbers are drawn on."""
    return torch.device("cpu") if generator is None else generator.device


def _evidence(t: int) -> str:
    return f"gradients of transition {t}"


def _shared_out(counts: list[int], most: int | None) -> list[int]:
    """Returns the counts, lowered in proportion where they sum to more than `most`."""
    total = sum(counts)
    if most is None or total <= most:
        return counts
    ends = [most * int(end) // total for end in np.cumsum([0, *counts])]
    return [stop - start for start, stop in pairwise(ends)]


def _beside(earlier: RelationSet, budget: Budget) -> Budget:
    """Returns a budget that holds together with what the edit cuts already, at any node."""
    parents = budget.parents
    children = budget.children
    if len(earlier) and parents:
        parents += int(earlier.children.unique(return_counts=True)[1].max())
    if len(earlier) and children:
        children += int(earlier.parents.unique(return_counts=True)[1].max())
    return Budget(budget.edits, parents, children)


def _children(topology: Topology, relations: RelationSet, t: int) -> Tensor:
    """Returns the row of every relation's child, on the CPU."""
    positions = positions_in(relations, t, topology.child.device)
    return topology.child.index_select(0, positions).cpu()


def _of_each(pairs: Tensor, n_children: int) -> Tensor:
    """Returns how many of the numbered pairs lead to each child."""
    return torch.bincount(pairs % max(1, n_children), minlength=n_children)


def _steepest_absent(
    net: Graph, t: int, recorder: Any, count: int, per_child: Tensor | None, taken: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the absent pairs of the largest |gradient| that are not taken, as rows, and those
    gradients.
    """
    transition = net.transitions[t]
    if len(taken) == 0:
        if isinstance(recorder, GradientRecorder):
            return recorder._largest_absent_rows(count, per_child)
        parents, children, gradients = recorder.largest_absent(
            count, per_child=per_child, ranked=False
        )
        rows = net._rows(transition.source, parents)
        return rows, net._rows(transition.target, children), gradients
    n_children = transition.n_children
    quotas = None if per_child is None else per_child + _of_each(taken, n_children)
    # As many more as might be taken; what is left is ranked, so the first ones are the largest.
    parents, children, gradients = recorder.largest_absent(
        None if quotas is not None else count + len(taken), per_child=quotas
    )
    upper = net._rows(transition.source, parents).long()
    rows = net._rows(transition.target, children).long()
    pairs = upper * n_children + rows
    free = (~contains(taken, pairs)).nonzero().view(-1)
    if per_child is not None:
        order = free[rows[free].argsort(stable=True)]  # child by child, the largest of each first
        found = torch.bincount(rows[order], minlength=n_children)
        rank = torch.arange(len(order), device="cpu") - (found.cumsum(0) - found)[rows[order]]
        free = order[rank < per_child[rows[order]]]
    free = free[:count]
    return upper[free], rows[free], gradients[free.to(gradients.device)]


def connect_rows(
    net: Graph,
    edit: Edit,
    t: int,
    parents: Tensor,
    children: Tensor,
    weights: str,
    *,
    absent: bool,
) -> None:
    """Connects pairs of rows of a transition; see `Edit._connect_rows`."""
    if not isinstance(net, Adopted):
        edit._connect_rows(t, parents, children, weights, absent=absent)
        return
    source, target = net.ends[t]
    edit.connect(
        net.layers[source].uid[parents.cpu().long()],
        net.layers[target].uid[children.cpu().long()],
        pairs="aligned",
        weights=weights,
        transition=t,
    )


def _random_absent(
    topology: Topology,
    count: int,
    per_child: Tensor | None,
    taken: Tensor,
    generator: torch.Generator | None,
) -> Pairs:
    """Returns rows of absent (parent, child) pairs, all alike in chance, sorted; a number of each
    child if given.

    Absent pairs that are taken count as present.
    """
    n_parents = topology.n_parents
    n_children = topology.n_children
    parent = topology.parents().long()
    child = topology.child
    device = child.device
    if len(taken):
        parent = torch.cat([parent, moved(taken // n_children, device)])
        child = torch.cat([child, moved((taken % n_children).int(), device)])
    # Pairs are numbered child by child where each child has its own number to grow, parent by
    # parent otherwise.
    if per_child is None:
        present = _sorted(parent * n_children + child)
        absent = np.array([n_parents * n_children - len(present)])
        quotas = np.array([count])
    else:
        present = _sorted(child.long() * n_parents + parent)
        absent = n_parents - counted(child, n_children).cpu().numpy()
        quotas = per_child.numpy()
    # among the absent pairs only
    numbers = moved(torch.from_numpy(_distinct(absent, quotas, generator)), device)
    # how many absent pairs stand before each present one
    before = present - torch.arange(len(present), device=device)
    cells = numbers + torch.searchsorted(before, numbers, right=True)
    if per_child is not None:
        cells = _sorted(cells % n_parents * n_children + cells // n_parents)
    return cells // n_children, cells % n_children


def _sorted(keys: Tensor) -> Tensor:
    """Returns ascending keys; those of relations are nearly so, which numpy's stable sort sees."""
    if on_host(keys.device):
        return torch.from_numpy(np.sort(keys.numpy(), kind="stable"))
    return keys.sort().values


def _distinct(
    sizes: np.ndarray, quotas: np.ndarray, generator: torch.Generator | None
) -> np.ndarray:
    """Returns sorted distinct numbers: `quotas[g]` of those of group g, which owns the next
    `sizes[g]` numbers.
    """
    starts = sizes.cumsum() - sizes
    spared = 2 * quotas > sizes  # quicker to draw what is left out
    wanted = np.where(spared, sizes - quotas, quotas)
    source = _source(generator)
    drawn = np.empty(0, dtype=np.int64)
    missing = wanted
    while missing.any():  # draw with repetition, keep the distinct ones, top up
        group = np.repeat(np.arange(len(sizes)), missing)
        numbers = (
            torch.rand(len(group), dtype=torch.float64, generator=generator, device=source)
            .cpu()
            .numpy()
        )
        drawn = np.concatenate([drawn, starts[group] + (numbers * sizes[group]).astype(np.int64)])
        drawn.sort(kind="stable")
        drawn = drawn[np.diff(drawn, prepend=-1) > 0]
        missing = wanted - np.diff(np.searchsorted(drawn, np.append(starts, sizes.sum())))
    if not spared.any():
        return drawn
    group = np.searchsorted(starts, drawn, side="right") - 1
    rest = np.setdiff1d(
        _ranges(starts[spared], sizes[spared]), drawn[spared[group]], assume_unique=True
    )
    return np.sort(np.concatenate([drawn[~spared[group]], rest]))


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the numbers of many ranges, one after the other."""
    return np.arange(sizes.sum()) + np.repeat(starts - (sizes.cumsum() - sizes), sizes)
