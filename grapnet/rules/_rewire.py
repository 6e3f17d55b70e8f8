"""Rewire: drops weak relations and grows as many others (SET, RigL)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import contains, counted, first_in_order, moved, on_host
from grapnet.core._sets import RelationSet
from grapnet.core._transition import Topology, require_tile
from grapnet.spaces._adopted import Adopted

from ._budget import Budget, Side, positions_in, shared_out, sides_of
from ._gradients import GradientRecorder, gradient_recorder
from ._rule import (
    Every,
    Recorder,
    RuleContext,
    Scheduled,
    Transitions,
    as_transitions,
    leaving_relations,
    rewirable_transitions,
    seen_evidence,
    taken_pairs,
)
from ._scopes import (
    Comparison,
    Quota,
    Scope,
    compared,
    require_comparison,
    require_keep,
    require_scope,
    transition_side,
)
from ._tiles import TileGrid, tiles_by_grid, weakest_tiles

Pairs = tuple[Tensor, Tensor]  # rows of parents and of their children
NO_GRADIENTS = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class Rewire:
    """Drops the weakest relations and grows as many absent ones.

    SET is `Rewire()`, RigL is `Rewire(grow="gradient", decay_until=T)`; `set_rewiring` and `rigl`
    return rule and schedule together. `scope="child"` keeps the numbers of parents; `SRigL` also
    makes them equal and removes nodes. Frozen relations are never dropped and do not count, an
    output keeps its last parent, and a dropped relation does not come back in the same call.
    Relations and nodes that earlier rules cut, connect or remove in the same edit are not touched.
    Where a relation of an adopted model has several weights, |weight| and |gradient| are norms.

    Attributes:
        transitions: numbers of the transitions, or names of modules and tensors of an adopted
            model; all by default. A full one does not change.
        fraction: the share of the relations that may be dropped, rounded to a whole number.
        grow: "random" grows absent relations with equal chances, "gradient" those with the largest
            |gradient|.
        decay_until: the step at which the fraction reaches 0 along a cosine; constant with None.
        scope: what is ranked together, and keeps its number of relations. "transition" drops a
            share of each transition and grows as many there. "child" does so among the relations
            that lead to each node, and "owner" among those that each node owns. "model" ranks the
            relations of all transitions together, and the absent ones, too, so that transitions
            trade relations; each keeps one.
        compare: how |weights| of different transitions compare in the scope "model", as for
            `PruneWeakest`: "lamp" by default. |gradients| are compared as they are.
        keep: how many relations of each transition are not dropped at least, as an int, or which
            share of the possible ones, as a float.
        weights: the initial weights of grown relations, "zero" or "linear".
        window: the number of steps over which gradients are averaged.
        tile: drops and grows whole tiles of so many nodes a side, 16, 32, 64 or 128, by the root
            mean square of their weights and of their gradients; the relations have to come in such
            tiles, as in `GrapNet(…, density=, tile=)`. A dropped tile is replaced by one with as
            many relations: one at the border of a layer by another one at a border. A tile with a
            frozen relation is not dropped. With the scope "transition" or "model", and without
            `keep`.

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
    scope: Scope = "transition"
    compare: Comparison | None = None
    keep: float = 0
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
        require_scope(self.scope)
        require_comparison(self.compare)
        require_keep(self.keep)
        require_tile(self.tile, EditError)
        if self.tile is not None and (self.scope not in ("transition", "model") or self.keep):
            raise EditError(
                'tiles belong to many nodes: with tile=, scope is "transition" or "model", and'
                " there is no keep="
            )

    def recorders(self, net: Graph) -> dict[str, Recorder]:
        """Returns one recorder of gradients per transition, none for random growth."""
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
        taken = {t: taken_pairs(net, edit, t) for t in self._numbers(net)}
        if self.tile is not None:
            self._rewire_tiles(net, edit, context, fraction, self.tile, taken)
            return
        found = []
        for group in self._groups(net):
            open_ones = [t for t in group if _n_absent(net, t, taken[t])]
            relations = self._candidates(net, edit, open_ones)
            quota = self._quota(net, open_ones, relations, fraction, taken)
            found.append((open_ones, relations, quota))
        shares = shared_out([int(quota) for _, _, quota in found], context.budget.edits)
        for (group, relations, quota), most in zip(found, shares, strict=True):
            if most == 0:
                continue
            limits = self._limits(net, edit, relations, context.budget)
            quota = replace(quota, limits=limits, most=most)
            dropped = relations._at(quota.places(self._keys(relations)))
            self._rewire(net, edit, context, group, dropped, taken)

    def _groups(self, net: Graph) -> list[list[int]]:
        """Returns the transitions that trade relations."""
        numbers = self._numbers(net)
        if self.scope == "model" and numbers:
            return [numbers]
        return [[t] for t in numbers]

    def _candidates(self, net: Graph, edit: Edit, numbers: list[int]) -> RelationSet:
        """Returns the relations of some transitions that may be dropped."""
        relations = RelationSet.of(net, numbers)
        if any(len(net.transitions[t].frozen_at) for t in numbers):
            relations = relations[~relations.frozen]
        if len(edit.cuts):
            relations -= edit.cuts
        if len(edit.removals):
            relations -= leaving_relations(edit)
        return relations

    def _quota(
        self,
        net: Graph,
        group: list[int],
        relations: RelationSet,
        fraction: float,
        taken: dict[int, Tensor],
    ) -> Quota:
        """Returns how many relations of a group of transitions are to be dropped: no more than
        absent pairs can replace.
        """
        if self.scope in ("transition", "model") or not group:
            absent = sum(_n_absent(net, t, taken[t]) for t in group)
            return Quota.of(min(round(fraction * len(relations)), absent))
        (t,) = group
        transition = net.transitions[t]
        ends = _ends(net, t, relations, self.scope)
        if self.scope == "child":
            room = transition.topology.n_parents - transition.topology.fan_in().cpu()
        else:
            room = transition.n_children - transition.topology.degrees.cpu().long()
        room -= _of_each(net, t, taken[t], self.scope)
        present = torch.bincount(ends, minlength=len(room))
        counts = torch.minimum((fraction * present.double()).round().long(), room)
        return Quota(counts, ends.to(net.device), self.scope)

    def _limits(self, net: Graph, edit: Edit, relations: RelationSet, budget: Budget) -> list[Side]:
        """Returns what nodes and transitions can spare of some relations."""
        # With the scope "child" an output gets another parent for its last one.
        outputs = int(self.scope != "child")
        limits = []
        targets = {net.ends[t][1] for t in relations._positions_by_transition()}
        holds = outputs and any(net._is_output(layer) for layer in targets)
        if holds or budget.parents or budget.children:
            limits = sides_of(net, relations, budget, gone=edit.cuts, outputs=outputs)
        keep = self.keep
        if self.scope == "model":
            keep = keep or 1
        if keep:
            limits.append(transition_side(net, relations, keep))
        return limits

    def _keys(self, relations: RelationSet) -> Tensor:
        """Returns one number for each relation; the smallest are dropped."""
        sizes = [len(at) for at in relations._positions_by_transition().values()]
        return compared(relations.strengths, sizes, self.compare or "lamp")

    def _rewire(
        self,
        net: Graph,
        edit: Edit,
        context: RuleContext,
        group: list[int],
        dropped: RelationSet,
        taken: dict[int, Tensor],
    ) -> None:
        """Cuts `dropped` and connects as many absent pairs of a group of transitions that are not
        taken.
        """
        if len(dropped) == 0:
            return
        grown: Mapping[int, _Grown]
        if self.grow == "random":
            grown = self._random(net, group, dropped, taken, edit.generator)
        else:
            grown = self._steepest(net, context, group, dropped, taken)
        total = sum(len(pairs.parents) for pairs in grown.values())
        assert total == len(dropped), "there are absent pairs for all that is dropped"
        for t in group:
            own = RelationSet(net, {t: dropped._positions_by_transition().get(t, range(0))})
            pairs = grown[t]
            if len(own) == len(pairs.parents) == 0:
                continue
            details = _extremes(own, pairs)
            edit.cut(own)
            # Pairs that are chosen beside others come in the order of their gradients.
            ascends = self.grow == "random" or len(taken[t]) == 0
            connect_rows(net, edit, t, pairs.parents, pairs.children, self.weights, absent=ascends)
            edit.remark(
                f"rewires by {self.grow} growth",
                transition=t,
                relations=len(own),
                grown=len(pairs.parents),
                **details,
            )

    def _lost(self, net: Graph, t: int, dropped: RelationSet) -> Tensor | None:
        """Returns how many relations each child, or owner, has lost; None if it may gain others."""
        if self.scope in ("transition", "model"):
            return None
        layer = net.ends[t][int(self.scope == "child")]
        return torch.bincount(_ends(net, t, dropped, self.scope), minlength=net.sizes[layer])

    def _random(
        self,
        net: Graph,
        group: list[int],
        dropped: RelationSet,
        taken: dict[int, Tensor],
        generator: torch.Generator | None,
    ) -> dict[int, "_Grown"]:
        """Returns absent pairs of a group of transitions, all alike in chance."""
        counts = [len(dropped)]
        if len(group) > 1:
            absent = np.array([_n_absent(net, t, taken[t]) for t in group])
            drawn = _distinct(absent.sum(keepdims=True), np.array(counts), generator)
            of_pair = np.searchsorted(absent.cumsum(), drawn, side="right")
            counts = np.bincount(of_pair, minlength=len(group)).tolist()
        found = {}
        for t, count in zip(group, counts, strict=True):
            topology = net.transitions[t].topology
            lost = self._lost(net, t, dropped)
            pairs = _random_absent(topology, count, self.scope, lost, taken[t], generator)
            found[t] = _Grown(*pairs)
        return found

    def _steepest(
        self,
        net: Graph,
        context: RuleContext,
        group: list[int],
        dropped: RelationSet,
        taken: dict[int, Tensor],
    ) -> dict[int, "_Grown"]:
        """Returns the absent pairs of a group of transitions that have the largest |gradient|."""
        found = {}
        for t in group:
            recorder = seen_evidence(context, _evidence(t), 'Rewire(grow="gradient")')
            lost = self._lost(net, t, dropped)
            count = min(len(dropped), _n_absent(net, t, taken[t]))
            found[t] = _steepest_absent(net, t, recorder, count, self.scope, lost, taken[t])
        if len(group) == 1:
            return found
        gradients = [found[t].gradients.to(net.device) for t in group]
        best = torch.zeros(sum(map(len, gradients)), dtype=torch.bool, device=net.device)
        joined = torch.cat([part.double() for part in gradients])
        best[first_in_order(joined, len(dropped), largest=True).long()] = True
        for t, marks in zip(group, best.split([len(part) for part in gradients]), strict=True):
            at = marks.nonzero().view(-1)
            found[t] = _Grown(*(part[at.to(part.device)] for part in found[t]))
        return found

    def _rewire_tiles(
        self,
        net: Graph,
        edit: Edit,
        context: RuleContext,
        fraction: float,
        tile: int,
        taken: dict[int, Tensor],
    ) -> None:
        """Cuts the weakest tiles of every group of transitions and connects as many absent ones."""
        touched = edit.cuts | leaving_relations(edit)
        groups = []
        for group in self._groups(net):
            grids = []
            for t in group:
                grid = TileGrid.of(net, t, tile)
                if not grid.is_whole:
                    raise EditError(
                        f"the relations of transition {t} do not come in tiles of {tile}. Start"
                        f" with GrapNet(…, density=, tile={tile}), or cut tiles first:"
                        f" PruneWeakest(…, tile={tile})"
                    )
                grids.append(grid)
            groups.append(_Tiles.of(grids, touched, taken, self.compare or "lamp"))
        counts = [round(fraction * int(tiles.free.sum())) for tiles in groups]
        # No tile has more relations than a full one.
        most = None if context.budget.edits is None else context.budget.edits // tile**2
        for tiles, count in zip(groups, shared_out(counts, most), strict=True):
            dropped = tiles.weakest(count, context.budget, edit.cuts)
            if len(dropped):
                self._replace_tiles(net, edit, context, tiles, dropped)

    def _replace_tiles(
        self, net: Graph, edit: Edit, context: RuleContext, tiles: "_Tiles", dropped: Tensor
    ) -> None:
        """Cuts tiles, given by number, and connects absent ones with as many relations."""
        if self.grow == "random":
            source = _source(edit.generator)
            scores = torch.rand(len(tiles.absent), generator=edit.generator, device=source)
            scores = scores.to(tiles.absent.device)
        else:
            parts = []
            for grid in tiles.grids:
                name = _evidence(grid.transition)
                recorder = seen_evidence(context, name, 'Rewire(grow="gradient")')
                parts.append(recorder.of_tiles(grid.tile).view(-1).to(net.device))
            scores = torch.cat(parts)
        grown = tiles.largest_absent(scores, dropped)
        moved_in = 0
        moved_out = 0
        for grid, gone, born, own in zip(
            tiles.grids,
            tiles_by_grid(tiles.grids, dropped),
            tiles_by_grid(tiles.grids, grown),
            scores.split([len(grid.counts) for grid in tiles.grids]),
            strict=True,
        ):
            if len(gone) == len(born) == 0:
                continue
            t = grid.transition
            relations = RelationSet(net, {t: grid.relations(gone)})
            parents, children = grid.pairs(born)
            moved_out += len(relations)
            moved_in += len(parents)
            edit.cut(relations)
            details = {}
            if len(gone):
                details["largest_dropped_weight"] = float(grid.strengths[gone].max())
            if len(born):
                edit.connect(parents, children, pairs="aligned", weights=self.weights, transition=t)
            if len(born) and self.grow == "gradient":
                details["smallest_grown_gradient"] = float(own[born].min())
            edit.remark(
                f"rewires tiles by {self.grow} growth",
                transition=t,
                relations=len(relations),
                grown=len(parents),
                tiles=len(gone),
                **details,
            )
        assert moved_in == moved_out, "a tile is replaced by one of its area"

    def _numbers(self, net: Graph) -> list[int]:
        return rewirable_transitions(net, self.transitions)


class _Grown(NamedTuple):
    """Absent pairs of one transition, as rows, and their |gradients| where these were ranked."""

    parents: Tensor
    children: Tensor
    gradients: Tensor = NO_GRADIENTS


@dataclass(frozen=True, eq=False)
class _Tiles:
    """The tiles of transitions that are ranked together, numbered through all of them."""

    grids: list[TileGrid]
    keys: Tensor  # [n_tiles]: the smallest are dropped
    free: Tensor  # [n_tiles]: which may be dropped
    absent: Tensor  # [n_tiles]: which may be grown
    areas: Tensor  # [n_tiles]: how many relations each could have

    @classmethod
    def of(
        cls,
        grids: list[TileGrid],
        touched: RelationSet,
        taken: dict[int, Tensor],
        compare: Comparison,
    ) -> "_Tiles":
        """Returns the tiles of some transitions beside what an edit has touched and taken."""
        free = []
        absent = []
        for grid in grids:
            t = grid.transition
            spared = grid.is_frozen | grid.has(positions_in(touched, t, grid.net.device))
            absent.append(~grid.is_present & ~grid.has_pairs(taken[t]))
            # A full transition does not change.
            own = grid.is_present & ~spared & absent[-1].any()
            if len(grids) > 1 and len(own):
                # Each transition keeps a tile.
                own[grid.strengths.argmax()] = False
            free.append(own)
        strengths = [grid.strengths for grid in grids]
        keys = compared(torch.cat(strengths), [len(part) for part in strengths], compare)
        areas = torch.cat([grid.areas for grid in grids])
        return cls(grids, keys, torch.cat(free), torch.cat(absent), areas)

    def weakest(self, count: int, budget: Budget, gone: RelationSet) -> Tensor:
        """Returns the numbers of the weakest free tiles, at most `count`, that can be cut within a
        budget, beside relations that are gone, and replaced by absent ones with as many relations.
        """
        counts = torch.cat([grid.counts for grid in self.grids])
        order = self.keys.masked_fill(~self.free, torch.inf).argsort(stable=True)
        relations = int(counts[order[:count]].sum())
        dropped = weakest_tiles(
            self.grids, self.keys, self.free, relations, budget, gone=gone, outputs=1
        )
        for area in self.areas.unique().tolist():
            of_area = dropped[self.areas[dropped] == area]
            room = int((self.absent & (self.areas == area)).sum())
            if len(of_area) > room:
                strongest = of_area[self.keys[of_area].argsort()[room:]]
                dropped = dropped[~torch.isin(dropped, strongest)]
        return dropped

    def largest_absent(self, scores: Tensor, dropped: Tensor) -> Tensor:
        """Returns the numbers of the absent tiles with the largest scores, as many of every area
        as are dropped.
        """
        grown = []
        for area in self.areas[dropped].unique().tolist():
            count = int((self.areas[dropped] == area).sum())
            there = (self.absent & (self.areas == area)).nonzero().view(-1)
            best = scores[there].argsort(descending=True, stable=True)[:count]
            grown.append(there[best])
        return torch.cat(grown)


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
    scope: Scope = "transition",
    tile: int | None = None,
) -> Scheduled:
    """Returns RigL (Evci et al. 2020) for a training of `steps` steps: `manager.add(rigl(1000))`.

    It rewires every `every` steps, up to the share `stop` of the training, at which `fraction`
    reaches 0 along a cosine. With `scope="child"` every node keeps its number of parents; with
    `tile` it moves whole tiles.

    Examples:
        >>> rigl(steps=1000).schedule
        Every(steps=100, start=100, until=750)
    """
    end = max(1, int(stop * steps))
    rule = Rewire(transitions, fraction, "gradient", decay_until=end, scope=scope, tile=tile)
    return Scheduled(rule, Every(every, start=every, until=end))


def set_rewiring(
    steps: int,
    *,
    every: int = 100,
    fraction: float = 0.3,
    stop: float = 1.0,
    transitions: Transitions | None = None,
    scope: Scope = "transition",
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
    return Scheduled(Rewire(transitions, fraction, scope=scope, tile=tile), schedule)


def _source(generator: torch.Generator | None) -> torch.device:
    """Returns the device that random numbers are drawn on."""
    return torch.device("cpu") if generator is None else generator.device


def _evidence(t: int) -> str:
    return f"gradients of transition {t}"


def _n_absent(net: Graph, t: int, taken: Tensor) -> int:
    """Returns how many pairs of a transition can be connected."""
    transition = net.transitions[t]
    return transition.topology.n_parents * transition.n_children - transition.size - len(taken)


def _ends(net: Graph, t: int, relations: RelationSet, scope: Scope) -> Tensor:
    """Returns the row of every relation's child, or owner, on the CPU."""
    topology = net.transitions[t].topology
    positions = positions_in(relations, t, topology.child.device)
    if scope == "child":
        return topology.child.index_select(0, positions).cpu().long()
    return topology.parents_at(positions).cpu().long()


def _of_each(net: Graph, t: int, pairs: Tensor, scope: Scope) -> Tensor:
    """Returns how many of the numbered pairs lead to each child, or belong to each owner."""
    transition = net.transitions[t]
    n_children = transition.n_children
    if scope == "child":
        return torch.bincount(pairs % max(1, n_children), minlength=n_children)
    return torch.bincount(pairs // max(1, n_children), minlength=transition.topology.n_parents)


def _extremes(dropped: RelationSet, grown: "_Grown") -> dict[str, float]:
    """Returns the largest |weight| that was dropped, and the smallest |gradient| that was grown."""
    found = {}
    if len(dropped):
        found["largest_dropped_weight"] = dropped.strengths.max().double()
    if len(grown.gradients):
        found["smallest_grown_gradient"] = grown.gradients.min().double()
    if not found:
        return {}
    # all at once, as a device gives them only when it has done everything before
    device = dropped.graph.device
    numbers = torch.stack([number.to(device) for number in found.values()]).tolist()
    return dict(zip(found, numbers, strict=True))


def _steepest_absent(
    net: Graph,
    t: int,
    recorder: Any,
    count: int,
    scope: Scope,
    lost: Tensor | None,
    taken: Tensor,
) -> _Grown:
    """Returns the absent pairs of the largest |gradient| that are not taken: as many as asked for,
    or as every child, or owner, has lost.
    """
    transition = net.transitions[t]
    quotas: dict[str, Any] = {}
    if lost is not None:
        name = "per_child" if scope == "child" else "per_parent"
        quotas[name] = lost + _of_each(net, t, taken, scope)
    if len(taken) == 0:
        if isinstance(recorder, GradientRecorder):
            return _Grown(*recorder._largest_absent_rows(count, **quotas))
        parents, children, gradients = recorder.largest_absent(count, ranked=False, **quotas)
        rows = net._rows(transition.source, parents)
        return _Grown(rows, net._rows(transition.target, children), gradients)
    # As many more as might be taken; what is left is ranked, so the first ones are the largest.
    most = None if quotas else count + len(taken)
    parents, children, gradients = recorder.largest_absent(most, **quotas)
    upper = net._rows(transition.source, parents).long()
    rows = net._rows(transition.target, children).long()
    free = (~contains(taken, upper * transition.n_children + rows)).nonzero().view(-1)
    if lost is not None:
        ends = rows if scope == "child" else upper
        order = free[ends[free].argsort(stable=True)]  # node by node, the largest of each first
        found = torch.bincount(ends[order], minlength=len(lost))
        rank = torch.arange(len(order), device="cpu") - (found.cumsum(0) - found)[ends[order]]
        free = order[rank < lost[ends[order]]]
    free = free[:count]
    return _Grown(upper[free], rows[free], gradients[free.to(gradients.device)])


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
    if len(parents) == 0:
        return
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
    scope: Scope,
    lost: Tensor | None,
    taken: Tensor,
    generator: torch.Generator | None,
) -> Pairs:
    """Returns rows of absent (parent, child) pairs, all alike in chance, sorted: as many as asked
    for, or as every child, or owner, has lost.

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
    if scope == "child":
        present = _sorted(child.long() * n_parents + parent)
        absent = n_parents - counted(child, n_children).cpu().numpy()
    else:
        present = _sorted(parent * n_children + child)
        absent = np.array([n_parents * n_children - len(present)])
        if scope == "owner":
            absent = n_children - counted(parent, n_parents).cpu().numpy()
    quotas = np.array([count]) if lost is None else lost.numpy()
    # among the absent pairs only
    numbers = moved(torch.from_numpy(_distinct(absent, quotas, generator)), device)
    # how many absent pairs stand before each present one
    before = present - torch.arange(len(present), device=device)
    cells = numbers + torch.searchsorted(before, numbers, right=True)
    if scope == "child":
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
