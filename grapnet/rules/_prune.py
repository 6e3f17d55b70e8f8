"""PruneWeakest: cuts the weakest relations, at once or along a ramp."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import require_ranks
from grapnet.core._sets import RelationSet
from grapnet.core._transition import Topology, require_tile

from ._budget import Budget, largest_of_each, weakest_within
from ._rule import (
    Every,
    RuleContext,
    Scheduled,
    Transitions,
    as_transitions,
    chosen_transitions,
)
from ._tiles import TileGrid, strongest_of_children, weakest_tiles


@dataclass(frozen=True)
class GradualSchedule:
    """The cubic ramp of Zhu and Gupta (2017) from `initial` to `final` sparsity.

    It rises fast at first and slowly at the end. `gradual_pruning` returns a rule with such a ramp
    and its schedule.

    Attributes:
        final: the sparsity from step `end` on.
        begin: the first step of the ramp; nothing is cut before it.
        end: the last step of the ramp.
        initial: the sparsity at step `begin`.

    Examples:
        >>> ramp = GradualSchedule(final=0.9, begin=100, end=200)
        >>> [round(ramp.sparsity(step), 4) for step in (99, 100, 150, 200, 999)]
        [0.0, 0.0, 0.7875, 0.9, 0.9]
    """

    final: float
    begin: int
    end: int
    initial: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.initial <= self.final <= 1:
            raise EditError(
                f"a ramp goes from 0 or more up to at most 1, got {self.initial!r} to"
                f" {self.final!r}"
            )
        if not self.begin < self.end:
            raise EditError(
                f"a ramp ends after it begins, got steps {self.begin!r} to {self.end!r}"
            )

    def sparsity(self, step: int) -> float:
        """Returns the sparsity to have at a step."""
        if step < self.begin:
            return 0.0
        left = max(0.0, 1 - (step - self.begin) / (self.end - self.begin))
        return self.final + (self.initial - self.final) * left**3


@dataclass(frozen=True)
class PruneWeakest:
    """Cuts the weakest relations; frozen relations are never cut.

    A relation of an adopted model counts as one, whatever the number of its weights, and their norm
    is its |weight|. Tensors that do not require gradients are left out.

    Attributes:
        fraction: the share of the present relations to cut at every call; or
        sparsity: the share of all possible relations that is absent afterwards, a number or a
            `GradualSchedule`. A net that is sparser already does not change.
        transitions: numbers of the transitions, or names of modules and tensors of an adopted
            model; all by default.
        scope: "global" ranks all relations together; "transition" and "node" cut the same share,
            rounded, of each transition or of the relations that each node owns. With "node", a
            relation that the budget protects is not replaced by the next one.
        score: how relations of different transitions compare. "lamp" ranks by `lamp_scores`, which
            do not depend on the scale of a transition, and cuts the strongest parent of each output
            last. "magnitude" ranks by |weight|. It has no effect with the scope "node".
        tile: cuts whole tiles of so many nodes a side, 16, 32, 64 or 128, by the root mean square
            of their weights, and as many as come near to the share. The `tiles` backend runs what
            is left fast. A tile with a frozen relation is not cut. Not with the scope "node".

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([8, 10, 5])
        >>> with net.edit() as edit:
        ...     PruneWeakest(sparsity=0.6, scope="node")(net, edit, RuleContext())
        >>> net.layers[0][3].degree, net.layers[1][7].degree, net.count().relations
        (4, 2, 52)
    """

    fraction: float | None = None
    sparsity: float | GradualSchedule | None = None
    transitions: Transitions | None = None
    scope: Literal["global", "transition", "node"] = "global"
    score: Literal["lamp", "magnitude"] = "lamp"
    tile: int | None = None

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.sparsity is None):
            raise EditError("say how much to prune: either fraction= or sparsity=")
        for share in (self.fraction, self.sparsity):
            if isinstance(share, int | float) and not 0 <= share <= 1:
                raise EditError(f"fraction and sparsity lie between 0 and 1, got {share!r}")
        if self.scope not in ("global", "transition", "node"):
            raise EditError(f'scope is "global", "transition" or "node", got {self.scope!r}')
        if self.score not in ("lamp", "magnitude"):
            raise EditError(f'score is "lamp" or "magnitude", got {self.score!r}')
        require_tile(self.tile, EditError)
        if self.tile is not None and self.scope == "node":
            raise EditError(
                'tiles belong to many nodes: with tile=, scope is "global" or "transition"'
            )
        object.__setattr__(self, "transitions", as_transitions(self.transitions))

    def __call__(self, net: Graph, edit: Edit, context: RuleContext) -> None:
        """Asks the edit to cut them."""
        numbers = chosen_transitions(net, self.transitions)
        groups = [[t] for t in numbers]
        if self.scope == "global":
            groups = [numbers]
        if self.tile is not None:
            weakest = self._weakest_tiles(net, groups, self.tile, context)
        else:
            weakest = self._weakest(net, groups, context)
        largest = 0.0
        if len(weakest):
            edit.cut(weakest)
            largest = float(weakest.strengths.max())
        edit.remark(
            f"prunes the {len(weakest)} weakest relations", relations=len(weakest), largest=largest
        )

    def _weakest(self, net: Graph, groups: list[list[int]], context: RuleContext) -> RelationSet:
        """Returns what to cut of groups of transitions, each of which is ranked together."""
        found: dict[int, Tensor | range] = {}
        for group in groups:
            found |= self._weakest_of(net, group, context)._positions_by_transition()
        weakest = RelationSet(net, found)
        if context.budget.edits is not None and len(weakest) > context.budget.edits:
            weakest = weakest.smallest(count=context.budget.edits, key=self._scores(weakest))
        return weakest

    def _weakest_tiles(
        self, net: Graph, groups: list[list[int]], tile: int, context: RuleContext
    ) -> RelationSet:
        """Returns the tiles to cut of groups of transitions, each of which is ranked together."""
        budget = context.budget
        left = budget.edits
        found: dict[int, Tensor | range] = {}
        for group in groups:
            grids = [TileGrid.of(net, t, tile) for t in group]
            count = self._count(net, group, context.step)
            keys = self._tile_scores(grids)
            free = torch.cat([grid.is_present & ~grid.is_frozen for grid in grids])
            budget = Budget(left, budget.parents, budget.children)
            for grid, tiles in zip(
                grids, weakest_tiles(grids, keys, free, count, budget), strict=True
            ):
                found[grid.transition] = grid.relations(tiles)
                if left is not None:
                    left -= len(found[grid.transition])
        return RelationSet(net, found)

    def _tile_scores(self, grids: list[TileGrid]) -> Tensor:
        """Returns one number for each tile of some transitions; the smallest go first."""
        parts = [grid.strengths for grid in grids]
        if self.score == "lamp":
            for n, grid in enumerate(grids):
                parts[n] = grid.strengths.clone() if len(grids) == 1 else _lamp(grid.strengths)
                if grid.net._is_output(grid.net.ends[grid.transition][1]):
                    parts[n][strongest_of_children(grid)] = torch.inf
        return torch.cat(parts)

    def _weakest_of(self, net: Graph, transitions: list[int], context: RuleContext) -> RelationSet:
        """Returns what to cut in some transitions, which are ranked together."""
        relations = RelationSet.of(net, transitions)
        if self.scope == "node":
            weakest = self._of_each_node(net, relations, transitions[0], context.step)
            if context.budget.parents or context.budget.children:
                weakest = weakest_within(net, weakest, len(weakest), context.budget)
            return weakest
        count = self._count(net, transitions, context.step)
        if count == 0:
            return RelationSet(net, {})
        scores = self._scores(relations)
        if self.score == "lamp":
            first = 0
            for t in transitions:
                transition = net.transitions[t]
                if net._is_output(transition.target):
                    strengths = RelationSet.of(net, [t]).strengths
                    strongest = _strongest_parents(transition.topology, strengths)
                    scores[first + strongest] = torch.inf
                first += transition.size
        return weakest_within(net, relations, count, context.budget, scores)

    def _count(self, net: Graph, transitions: list[int], step: int) -> int:
        """Returns how many relations of some transitions to cut."""
        sizes = net.sizes
        present = 0
        possible = 0
        for t in transitions:
            source, target = net.ends[t]
            present += net.transitions[t].size
            possible += sizes[source] * sizes[target]
        return int(self._quota(torch.tensor(present), possible, step))

    def _scores(self, relations: RelationSet) -> Tensor:
        """Returns one number a relation; the smallest go first."""
        # Within one transition the order is that of |weight|, which needs no sorting here.
        if self.score == "lamp" and len(relations._positions_by_transition()) > 1:
            return lamp_scores(relations)
        return relations.strengths

    def _quota(self, present: Tensor, possible: int, step: int) -> Tensor:
        """Returns how many of the present relations to cut, where so many are possible."""
        if self.fraction is not None:
            return (self.fraction * present.double()).round().long()
        sparsity = self.sparsity
        if isinstance(sparsity, GradualSchedule):
            sparsity = sparsity.sparsity(step)
        kept = possible - round(float(sparsity or 0) * possible)
        return (present - kept).clamp(min=0)

    def _of_each_node(self, net: Graph, relations: RelationSet, t: int, step: int) -> RelationSet:
        """Returns the weakest free relations of every parent in transition t, as many as it is to
        lose.
        """
        topology = net.transitions[t].topology
        quota = self._quota(topology.degrees.long(), topology.n_children, step)
        owners = topology.parents().long()
        frozen = relations.frozen
        if bool(frozen.any()):
            relations = relations[~frozen]
            owners = owners[~frozen]
        keys = relations.strengths
        require_ranks(keys)
        return relations[largest_of_each(-keys, owners, quota)]


def gradual_pruning(
    steps: int,
    sparsity: float,
    *,
    initial: float = 0.0,
    every: int = 100,
    start: int = 0,
    stop: float = 0.75,
    transitions: Transitions | None = None,
    tile: int | None = None,
) -> Scheduled:
    """Returns gradual magnitude pruning (Zhu and Gupta 2017) for a training of `steps` steps.

    `manager.add(gradual_pruning(1000, 0.9))` prunes with `PruneWeakest` along a `GradualSchedule`,
    every `every` steps from `start` on, where the sparsity is `initial`. The last pruning reaches
    `sparsity` at the share `stop` of the steps or shortly before it. With `tile`, it cuts whole
    tiles.

    Examples:
        >>> gradual_pruning(1000, 0.9).schedule
        Every(steps=100, start=0, until=700)
    """
    end = int(stop * steps)
    # The last step at which the rule is due, where the ramp must arrive.
    end -= (end - start) % every
    ramp = GradualSchedule(sparsity, begin=start, end=end, initial=initial)
    rule = PruneWeakest(sparsity=ramp, transitions=transitions, tile=tile)
    return Scheduled(rule, Every(every, start=start, until=end))


def _strongest_parents(topology: Topology, strengths: Tensor) -> Tensor:
    """Returns the position of the strongest relation that leads to each child, where one does."""
    child = topology.child.long()
    strongest = strengths.new_zeros(topology.n_children)
    strongest.scatter_reduce_(0, child, strengths, "amax")
    # several of one child where weights are equal
    equals = (strengths == strongest[child]).nonzero().view(-1)
    places = torch.full_like(strongest, -1, dtype=torch.int64)
    places.scatter_reduce_(0, child[equals], equals, "amax")
    return places[places >= 0]


def lamp_scores(relations: RelationSet) -> Tensor:
    """Returns the layer-adaptive magnitude of every relation (Lee et al., 2021).

    The score is w² divided by the sum of w² over those relations of the set, in the same
    transition, that are not smaller. It does not depend on the scale of a transition, and the
    strongest relation of each transition has the score 1: pruning by these scores empties no
    transition before the others.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([16, 64, 4])
        >>> relations = net.select().outgoing()
        >>> with net.edit(reason="prune") as edit:
        ...     edit.cut(relations.smallest(fraction=0.9, key=lamp_scores(relations)))
    """
    weights = relations.strengths
    found = torch.empty(len(weights), dtype=torch.float64, device=weights.device)
    sizes = [len(at) for at in relations._positions_by_transition().values()]
    for part, place in zip(weights.split(sizes), found.split(sizes), strict=True):
        place.copy_(_lamp(part))
    return found


def _lamp(strengths: Tensor) -> Tensor:
    """Returns the layer-adaptive magnitudes of the relations, or tiles, of one transition."""
    if len(strengths) == 0:
        return strengths.double()
    tiny = torch.finfo(torch.float64).tiny
    ascending, order = strengths.sort(stable=True)
    ascending = ascending.double()
    largest = ascending[-1]
    # Divided by the largest, so that no square overflows; the smallest divisor is for zeros.
    squares = (ascending / largest.clamp(min=tiny)) ** 2
    not_smaller = squares.flip(0).cumsum(0).flip(0)
    scores = squares / not_smaller.clamp(min=tiny)
    if not bool(largest.isnan()):
        scores[-1] = 1.0
    found = torch.empty_like(scores)
    found[order] = scores
    return found
