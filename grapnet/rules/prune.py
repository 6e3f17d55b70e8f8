"""PruneWeakest: cuts the weakest relations, at once or along a ramp."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from grapnet.core._change import require_ranks
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._sets import RelationSet
from grapnet.network import GrapNet

from .budget import weakest_within
from .choice import chosen_transitions, given_transitions
from .rule import Moment


@dataclass(frozen=True)
class GradualSchedule:
    """The cubic ramp of Zhu and Gupta (2017): from `initial` to `final` sparsity, fast at first and
    slow at the end.

    Attributes:
        final: the sparsity from step `end` on.
        begin: the step at which it starts; before it nothing is cut.
        end: the step at which it arrives.
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
    """Cuts the weakest relations; frozen ones never.

    Attributes:
        fraction: cut this share of the present relations at every call; or
        sparsity: cut until this share of all possible relations is absent, a number or a
            `GradualSchedule`. Nothing is cut when it is already.
        transitions: numbers of the transitions to cut in; all of them by default.
        scope: "global" ranks all relations together; "transition" and "node" give each transition,
            or each node among the relations it owns, its own share, rounded. With "node", a
            relation that the budget protects is not replaced by the next one.
        score: how relations of different transitions compare. "lamp" ranks by `lamp_scores`,
            whatever the scales of the transitions, and the strongest parent of each output behind
            all others. "magnitude" ranks by |weight|. Of no effect with the scope "node".

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([8, 10, 5])
        >>> with net.edit() as edit:
        ...     PruneWeakest(sparsity=0.6, scope="node")(net, edit, Moment())
        >>> net.layers[0][3].degree, net.layers[1][7].degree, net.count().relations
        (4, 2, 52)
    """

    fraction: float | None = None
    sparsity: float | GradualSchedule | None = None
    transitions: tuple[int, ...] | int | None = None
    scope: Literal["global", "transition", "node"] = "global"
    score: Literal["lamp", "magnitude"] = "lamp"

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.sparsity is None):
            raise EditError("say how much to prune: either fraction= or sparsity=")
        for name, share in (("fraction", self.fraction), ("sparsity", self.sparsity)):
            plain = not (share is None or isinstance(share, GradualSchedule))
            if plain and not (isinstance(share, int | float) and 0 <= share <= 1):
                raise EditError(f"{name} lies between 0 and 1, got {share!r}")
        if self.scope not in ("global", "transition", "node"):
            raise EditError(f'scope is "global", "transition" or "node", got {self.scope!r}')
        if self.score not in ("lamp", "magnitude"):
            raise EditError(f'score is "lamp" or "magnitude", got {self.score!r}')
        object.__setattr__(self, "transitions", given_transitions(self.transitions))

    def __call__(self, net: GrapNet, edit: Edit, now: Moment) -> None:
        """Asks the edit to cut them."""
        numbers = chosen_transitions(net, self.transitions)
        groups = [numbers] if self.scope == "global" else [[t] for t in numbers]
        found: dict[int, Tensor | range] = {}
        for group in groups:
            found |= self._weakest_of(net, group, now).positions_by_transition()
        weakest = RelationSet(net, found)
        if now.budget.edits is not None and len(weakest) > now.budget.edits:
            weakest = weakest.smallest(count=now.budget.edits, key=self._scores(weakest))
        largest = 0.0
        if len(weakest):
            edit.cut(weakest)
            largest = float(weakest.weights.detach().abs().max())
        edit.remark(
            f"prunes the {len(weakest)} weakest relations", relations=len(weakest), largest=largest
        )

    def _weakest_of(self, net: GrapNet, transitions: list[int], now: Moment) -> RelationSet:
        """Returns what to cut in some transitions, which are ranked together."""
        relations = net.select(layer=transitions).outgoing()
        if self.scope == "node":
            weakest = self._of_each_node(net, relations, transitions[0], now.step)
            if now.budget.parents or now.budget.children:
                weakest = weakest_within(net, weakest, len(weakest), now.budget)
            return weakest
        possible = sum(net.sizes[t] * net.sizes[t + 1] for t in transitions)
        count = int(self._quota(np.array([len(relations)]), possible, now.step)[0])
        if count == 0:
            return RelationSet(net, {})
        scores = self._scores(relations)
        last = len(net.transitions) - 1
        if self.score == "lamp" and last in transitions:
            # The relations of the last transition are the last ones of the set.
            first = len(relations) - net.transitions[last].size
            scores[first + _strongest_parents(net)] = torch.inf
        return weakest_within(net, relations, count, now.budget, scores)

    def _scores(self, relations: RelationSet) -> Tensor:
        """Returns one number a relation; the smallest go first."""
        # Within one transition the order is that of |weight|, which needs no sorting here.
        if self.score == "lamp" and len(relations.positions_by_transition()) > 1:
            return lamp_scores(relations)
        return relations.weights.detach().abs()

    def _quota(self, present: np.ndarray, possible: int, step: int) -> np.ndarray:
        """Returns how many of the present relations to cut, where so many are possible."""
        if self.fraction is not None:
            return np.round(self.fraction * present).astype(np.int64)
        sparsity = (
            self.sparsity.sparsity(step)
            if isinstance(self.sparsity, GradualSchedule)
            else self.sparsity
        )
        return np.maximum(present - (possible - round(float(sparsity or 0) * possible)), 0)

    def _of_each_node(self, net: GrapNet, relations: RelationSet, t: int, step: int) -> RelationSet:
        """Returns the weakest free relations of every node of layer t, as many as it is to lose."""
        topology = net.transitions[t].topology
        quota = self._quota(topology.degrees.long().cpu().numpy(), topology.n_children, step)
        owners = topology.parents()
        if bool((frozen := relations.frozen).any()):
            relations, owners = relations[~frozen], owners[~frozen]
        require_ranks(keys := relations.weights.detach().abs())
        keys = (keys if keys.dtype == torch.float64 else keys.float()).cpu().numpy()
        return relations[torch.from_numpy(weakest_of_each(keys, owners.cpu().numpy(), quota))]


def _strongest_parents(net: GrapNet) -> Tensor:
    """Returns the position of the strongest relation that leads to each output, where one does."""
    transition = net.transitions[-1]
    child = transition.child.long()
    weights = transition.values().detach().abs()
    strongest = weights.new_zeros(net.sizes[-1]).scatter_reduce_(0, child, weights, "amax")
    # several of one output where weights are equal
    equals = (weights == strongest[child]).nonzero().view(-1)
    places = torch.full_like(strongest, -1, dtype=torch.int64)
    places.scatter_reduce_(0, child[equals], equals, "amax")
    return places[places >= 0]


def lamp_scores(relations: RelationSet) -> Tensor:
    """Returns the layer-adaptive magnitude of every relation (Lee et al., 2021).

    It is w² divided by the sum of w² over those relations of the set, in the same transition, that
    are not smaller. So the scale of a transition does not count, and the strongest relation of
    each has the score 1: ranked by these scores, no transition is emptied before the others.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([16, 64, 4])
        >>> relations = net.select().outgoing()
        >>> with net.edit(reason="prune") as edit:
        ...     edit.cut(relations.smallest(fraction=0.9, key=lamp_scores(relations)))
    """
    weights = relations.weights.detach().abs()
    found = torch.empty(len(weights), dtype=torch.float64, device=weights.device)
    sizes = [len(at) for at in relations.positions_by_transition().values()]
    tiny = torch.finfo(found.dtype).tiny
    for part, place in zip(weights.split(sizes), found.split(sizes), strict=True):
        ascending, order = part.sort(stable=True)
        ascending = ascending.double()
        largest = ascending[-1]
        # Divided by the largest, so that no square overflows; the smallest divisor is for zeros.
        squares = (ascending / largest.clamp(min=tiny)) ** 2
        not_smaller = squares.flip(0).cumsum(0).flip(0)
        scores = squares / not_smaller.clamp(min=tiny)
        if not bool(largest.isnan()):
            scores[-1] = 1.0
        place[order] = scores
    return found


def weakest_of_each(keys: np.ndarray, owners: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """Says which keys are among the `quota[owner]` smallest of their owner; the first of equals
    come first.

    Owners are ascending. Those of similar degree are sorted together, as the rows of a rectangle:
    ten times faster than one sort by owner and key.
    """
    degrees = np.bincount(owners, minlength=len(quota))
    quota = np.minimum(quota, degrees)
    starts = degrees.cumsum() - degrees
    bounds = np.full(len(quota), -np.inf, dtype=keys.dtype)  # the largest key that goes
    levels = np.ceil(np.log2(np.maximum(degrees, 1))).astype(np.int64)
    for level in np.unique(levels[quota > 0]):
        rows = np.flatnonzero((levels == level) & (quota > 0))
        width = degrees[rows].max()
        if len(rows) * width == len(keys) == degrees[rows].sum():  # all keys, and as many of each
            cells = np.sort(keys.reshape(len(rows), width), axis=1)
        else:
            slots = np.arange(width)
            places = np.minimum(starts[rows, None] + slots, len(keys) - 1)
            cells = np.sort(np.where(slots < degrees[rows, None], keys[places], np.inf), axis=1)
        bounds[rows] = cells[np.arange(len(rows)), quota[rows] - 1]
    bound = np.repeat(bounds, degrees)
    chosen = keys <= bound
    if np.count_nonzero(chosen) == quota.sum():
        return chosen
    below, equal = keys < bound, keys == bound
    missing = quota - np.bincount(owners[below], minlength=len(quota))  # to be filled with equals
    counted = np.concatenate([[0], equal.cumsum()])
    nth = counted[1:] - counted[starts[owners]]  # 1 for the first equal of its owner
    return below | (equal & (nth <= missing[owners]))
