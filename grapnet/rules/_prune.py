"""PruneWeakest: cuts the relations that a criterion finds weakest, at once or along a ramp."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._sets import RelationSet
from grapnet.core._transition import require_tile

from ._budget import Budget
from ._criteria import (
    RELATIONS,
    WINDOW,
    Choice,
    as_criterion,
    chosen,
    free_of,
    refusal_of,
    scored,
)
from ._obs import OBS, Alternating
from ._rule import (
    Every,
    Recorder,
    RuleContext,
    Scheduled,
    Transitions,
    as_transitions,
    chosen_transitions,
)
from ._scopes import (
    Amount,
    Comparison,
    Scope,
    as_pattern,
    compared,
    quota_of,
    require_comparison,
    require_keep,
    require_scope,
)
from ._tiles import TileGrid, strongest_of_children, tiles_by_grid, weakest_tiles

# The scopes of tiles, each of which belongs to many nodes.
TILED: tuple[Scope, ...] = ("transition", "model")
# What `by=` means.
CRITERIA: dict[str, Any] = {
    **RELATIONS,
    "obs": lambda window: OBS(window=window),
    "alternating": lambda window: Alternating(window=window),
}


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
    """Cuts the relations that a criterion finds weakest; frozen relations are never cut.

    Say how much with one of `fraction`, `sparsity` and `pattern`. A relation of an adopted model
    counts as one, whatever the number of its weights. Tensors that do not require gradients are
    left out, and by default those that the criterion cannot score. A criterion that gives the
    relations which stay other weights, as `OBS` does, assigns them in the same edit.

    Attributes:
        fraction: the share of the present relations to cut at every call; or
        sparsity: the share of all possible relations that is absent afterwards, a number or a
            `GradualSchedule`. A net that is sparser already does not change; or
        pattern: `(kept, of)`: of every `of` successive parents of a child, in the order of their
            rows, at most `kept` stay: (2, 4) or (4, 8). Absent relations count as cut, and frozen
            ones as kept. The last parents make up a smaller group.
        by: the criterion: "magnitude", "wanda", "taylor", "fisher", "obs", "alternating",
            "correlation", "random", an object such as `Fisher(window=50)`, or a function
            `score(net, candidates, evidence)` that returns one number per relation; the smallest go
            first.
        transitions: numbers of the transitions, or names of modules and tensors of an adopted
            model; all by default.
        scope: what is ranked together. "child" cuts the same share, rounded, of the relations that
            lead to each node, "owner" of those that each node owns, and "transition" of each
            transition; "model" ranks all relations together. By default that of the criterion:
            "child" for Wanda, "transition" for OBS, Alternating and objects that have `choose` but
            no `score`, and "model" for the others. With "child", "owner" and a pattern, a relation
            that a limit protects is not replaced by the next one.
        compare: how scores of different transitions compare in the scope "model". "lamp" takes
            layer-adaptive magnitudes (`lamp_scores`), which do not depend on the scale of a
            transition, and cuts the strongest parent of each output last. "mean" divides by the
            mean of the transition, and "score" takes scores as they are. By default that of the
            criterion: "lamp" for magnitude and Wanda, "score" for the others, which estimate losses
            already.
        keep: how many relations of each transition stay at least, as an int, or which share of the
            possible ones, as a float.
        tile: cuts whole tiles of so many nodes a side, 16, 32, 64 or 128, by the root mean square
            of the scores of their relations, and as many as come near to the share. The `tiles`
            backend runs what is left fast. A tile with a frozen relation is not cut. With the scope
            "model" or "transition", which is the default for Wanda, and a criterion that scores
            relations one by one.
        window: the number of steps that a criterion which is given by its name records.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([8, 10, 5])
        >>> with net.edit() as edit:
        ...     PruneWeakest(sparsity=0.6, scope="owner")(net, edit, RuleContext())
        >>> net.layers[0][3].degree, net.layers[1][7].degree, net.count().relations
        (4, 2, 52)
    """

    fraction: float | None = None
    sparsity: float | GradualSchedule | None = None
    pattern: tuple[int, int] | None = None
    by: Any = "magnitude"
    transitions: Transitions | None = None
    scope: Scope | None = None
    compare: Comparison | None = None
    keep: float = 0
    tile: int | None = None
    window: int = WINDOW

    def __post_init__(self) -> None:
        amounts = (self.fraction, self.sparsity, self.pattern)
        if sum(amount is not None for amount in amounts) != 1:
            raise EditError("say how much to prune: one of fraction=, sparsity= and pattern=")
        for share in (self.fraction, self.sparsity):
            if isinstance(share, int | float) and not 0 <= share <= 1:
                raise EditError(f"fraction and sparsity lie between 0 and 1, got {share!r}")
        require_keep(self.keep)
        as_criterion(self.by, CRITERIA, self.window)
        require_scope(self.scope)
        require_comparison(self.compare)
        object.__setattr__(self, "pattern", as_pattern(self.pattern))
        if self.pattern is not None and self.scope not in (None, "child"):
            raise EditError(f'with pattern=, scope is "child", got {self.scope!r}')
        require_tile(self.tile, EditError)
        if self.tile is not None:
            self._require_tiles()
        object.__setattr__(self, "transitions", as_transitions(self.transitions))

    def _require_tiles(self) -> None:
        if self.pattern is not None or self._scope not in TILED:
            raise EditError(
                'tiles belong to many nodes: with tile=, scope is "model" or "transition", and'
                " there is no pattern="
            )
        if self.keep or not hasattr(self.criterion, "score"):
            raise EditError(
                "with tile=, there is no keep=, and a criterion scores relations one by one"
            )

    @property
    def criterion(self) -> Any:
        """The criterion that `by` means."""
        return as_criterion(self.by, CRITERIA, self.window)

    @property
    def _scope(self) -> Scope:
        if self.pattern is not None:
            return "child"
        default: Any = getattr(self.criterion, "scope", "transition")
        if self.tile is not None and default not in TILED:
            default = "transition"
        return self.scope or default

    def recorders(self, net: Graph) -> dict[str, Recorder]:
        """Returns the recorders of the criterion."""
        criterion = self.criterion
        if not hasattr(criterion, "recorders"):
            return {}
        return dict(criterion.recorders(net, RelationSet.of(net, self._numbers(net))))

    def __call__(self, net: Graph, edit: Edit, context: RuleContext) -> None:
        """Asks the edit to cut them, and to assign what the criterion assigns."""
        evidence = {**context.evidence, "generator": edit.generator}
        if self.tile is not None:
            choice = self._weakest_tiles(net, self.tile, evidence, context)
        else:
            candidates = free_of(RelationSet.of(net, self._numbers(net)))
            amount = self._amount(context.step)
            quota = quota_of(net, candidates, amount, self._scope, context.budget, self.keep)
            quota = replace(quota, compare=self.compare)
            choice = chosen(self.criterion, net, candidates, evidence, quota)
        weakest = choice.leaving
        largest = 0.0
        if len(weakest):
            choice.write(edit)
            largest = float(weakest.strengths.max())
        edit.remark(
            f"prunes the {len(weakest)} weakest relations", relations=len(weakest), largest=largest
        )

    def _numbers(self, net: Graph) -> list[int]:
        criterion = self.criterion
        default = []
        if self.transitions is None:
            for t in net._trainable_transitions():
                if not refusal_of(criterion, net, t):
                    default.append(t)
        return chosen_transitions(net, self.transitions, default)

    def _amount(self, step: int) -> Amount:
        sparsity = self.sparsity
        if isinstance(sparsity, GradualSchedule):
            sparsity = sparsity.sparsity(step)
        return Amount(self.fraction, sparsity, self.pattern)

    def _weakest_tiles(
        self, net: Graph, tile: int, evidence: dict[str, Any], context: RuleContext
    ) -> Choice:
        """Returns the tiles to cut of groups of transitions, each of which is ranked together."""
        numbers = self._numbers(net)
        groups = [[t] for t in numbers]
        if self._scope == "model":
            groups = [numbers]
        budget = context.budget
        left = budget.edits
        found: dict[int, Tensor | range] = {}
        for group in groups:
            grids = []
            for t in group:
                scores = scored(self.criterion, net, RelationSet.of(net, [t]), evidence)
                grids.append(TileGrid.of(net, t, tile, scores))
            count = int(self._amount(context.step).total(net, group))
            keys = self._tile_scores(grids)
            free = torch.cat([grid.is_present & ~grid.is_frozen for grid in grids])
            budget = Budget(left, budget.parents, budget.children)
            weakest = weakest_tiles(grids, keys, free, count, budget)
            for grid, tiles in zip(grids, tiles_by_grid(grids, weakest), strict=True):
                found[grid.transition] = grid.relations(tiles)
                if left is not None:
                    left -= len(found[grid.transition])
        return Choice(RelationSet(net, found))

    def _tile_scores(self, grids: list[TileGrid]) -> Tensor:
        """Returns one number for each tile of some transitions; the smallest go first."""
        how: Any = self.compare or getattr(self.criterion, "comparison", "score")
        scores = torch.cat([grid.strengths for grid in grids])
        keys = compared(scores, [len(grid.counts) for grid in grids], how).clone()
        if how != "lamp":
            return keys
        start = 0
        for grid in grids:
            if grid.net._is_output(grid.net.ends[grid.transition][1]):
                keys[start + strongest_of_children(grid)] = torch.inf
            start += len(grid.counts)
        return keys


def gradual_pruning(
    steps: int,
    sparsity: float,
    *,
    initial: float = 0.0,
    every: int = 100,
    start: int = 0,
    stop: float = 0.75,
    **settings: Any,
) -> Scheduled:
    """Returns gradual pruning (Zhu and Gupta 2017) for a training of `steps` steps.

    `manager.add(gradual_pruning(1000, 0.9))` prunes with `PruneWeakest` along a `GradualSchedule`,
    every `every` steps from `start` on, where the sparsity is `initial`. The last pruning reaches
    `sparsity` at the share `stop` of the steps or shortly before it. `settings` are those of
    `PruneWeakest`: by default all relations are ranked together by magnitude.

    Examples:
        >>> gradual_pruning(1000, 0.9).schedule
        Every(steps=100, start=0, until=700)
    """
    end = int(stop * steps)
    # The last step at which the rule is due, where the ramp must arrive.
    end -= (end - start) % every
    ramp = GradualSchedule(sparsity, begin=start, end=end, initial=initial)
    rule = PruneWeakest(sparsity=ramp, **settings)
    return Scheduled(rule, Every(every, start=start, until=end))
