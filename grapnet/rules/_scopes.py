"""Scopes: among which candidates a criterion ranks, how scores compare, and how many leave."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import as_positions, flatnonzero, require_ranks
from grapnet.core._sets import RelationSet

from ._budget import Budget, Side, largest_of_each, positions_in, sides_of, weakest_places

Scope = Literal["child", "owner", "transition", "model"]
Comparison = Literal["lamp", "mean", "score"]


@dataclass(frozen=True, eq=False)
class Quota:
    """How many of some relations leave, and among which they are ranked.

    Rules give it to criteria in place of a count. `relations.smallest(count=quota, key=scores)`
    keeps to the scope, the pattern and the limits; `int(quota)` is how many leave in all.

    Attributes:
        counts: how many relations of each group leave, [groups] int64.
        groups: the group of each relation, [n] int64; None if all of them are one group.
        scope: what a group is: the relations that lead to a child, that a node owns, of a
            transition, or all of them.
        pattern: `(kept, of)`, if a group has so many successive parents of one child and keeps at
            most so many relations.
        compare: how scores of several transitions compare; None for the way of the criterion.
        limits: what nodes and transitions can spare.
        most: the largest number of relations that leave in all; None for no limit.
    """

    counts: Tensor
    groups: Tensor | None = None
    scope: Scope = "model"
    pattern: tuple[int, int] | None = None
    compare: Comparison | None = None
    limits: Sequence[Side] = field(default_factory=tuple)
    most: int | None = None

    @classmethod
    def of(cls, count: "int | Quota") -> "Quota":
        """Returns a number of relations that are ranked together as a quota."""
        if isinstance(count, Quota):
            return count
        return cls(torch.tensor([count], device="cpu"))

    def __index__(self) -> int:
        """Returns how many leave in all, before limits."""
        return int(self.counts.sum())

    def places(self, key: Tensor) -> Tensor:
        """Returns the ascending places of the relations that leave, int32.

        Args:
            key: one number per relation; the smallest leave first.
        """
        require_ranks(key)
        by_relation = [side.nodes for side in self.limits]
        if self.groups is not None:
            by_relation.append(self.groups)
        for numbers in by_relation:
            if len(numbers) != len(key):
                raise ValueError(
                    f"this Quota is for {len(numbers)} relations, and the key has {len(key)}"
                    " entries; rank all candidates"
                )
        if self.groups is None:
            return weakest_places(key, self._within(int(self.counts[0])), list(self.limits))
        limits: list[Side] = []
        if self.scope == "transition":
            found = self._places_of_each(key, self.groups)
        else:
            marks = largest_of_each(-key, self.groups, self.counts.to(key.device))
            found = flatnonzero(marks)
            limits = narrowed(self.limits, found)
        if not limits and self._within(len(found)) == len(found):
            return found
        # A relation that is spared here is not replaced by another one.
        some = weakest_places(key[found.long()], self._within(len(found)), limits)
        return found[some.long()]

    def _within(self, count: int) -> int:
        return count if self.most is None else min(count, self.most)

    def _places_of_each(self, key: Tensor, groups: Tensor) -> Tensor:
        """Returns the places that leave of each group, whose relations follow each other."""
        found = [torch.empty(0, dtype=torch.int32, device=key.device)]
        limits = list(self.limits)
        sizes = torch.bincount(groups, minlength=len(self.counts)).tolist()
        start = 0
        for size, count in zip(sizes, self.counts.tolist(), strict=True):
            some = slice(start, start + size)
            sides = [Side(side.nodes[some], side.spare) for side in limits]
            found.append(weakest_places(key[some], count, sides) + start)
            start += size
            # What one group takes from a node, the next ones cannot take.
            for place, side in enumerate(limits):
                lost = torch.bincount(side.nodes[found[-1].long()], minlength=len(side.spare))
                limits[place] = Side(side.nodes, side.spare - lost)
        return torch.cat(found).int()


def narrowed(limits: Sequence[Side], at: Tensor) -> list[Side]:
    """Returns limits for the relations at some places alone."""
    return [Side(side.nodes[at.long()], side.spare) for side in limits]


@dataclass(frozen=True)
class Amount:
    """How many relations a rule cuts.

    Attributes:
        fraction: the share of the present ones; or
        sparsity: the share of the possible ones that is absent afterwards; or
        pattern: `(kept, of)`: so many parents of each group of parents stay.
    """

    fraction: float | None = None
    sparsity: float | None = None
    pattern: tuple[int, int] | None = None

    def of(self, present: Tensor, possible: int) -> Tensor:
        """Returns how many of the present relations leave, where so many are possible."""
        if self.fraction is not None:
            return (self.fraction * present.double()).round().long()
        kept = possible - round((self.sparsity or 0.0) * possible)
        return (present - kept).clamp(min=0)

    def total(self, net: Graph, transitions: Sequence[int]) -> Tensor:
        """Returns how many relations of some transitions together leave, one number."""
        present = 0
        possible = 0
        for t in transitions:
            present += net.transitions[t].size
            possible += possible_relations(net, t)
        return self.of(torch.tensor(present, device="cpu"), possible)


def require_scope(scope: str | None, known: Sequence[str] = get_args(Scope)) -> None:
    """Raises EditError for a word that is none of the scopes of a rule; None is its default."""
    if scope is not None and scope not in known:
        listed = ", ".join(f'"{word}"' for word in known)
        raise EditError(f"scope is one of {listed}, got {scope!r}")


def require_keep(keep: float) -> None:
    """Raises EditError for what is neither a number of relations, or nodes, nor a share."""
    if keep < 0 or (isinstance(keep, float) and keep > 1):
        raise EditError(f"keep is a number, or a share between 0 and 1, got {keep!r}")


def require_comparison(compare: str | None) -> None:
    """Raises EditError for a word that is no comparison."""
    if compare is not None and compare not in get_args(Comparison):
        listed = ", ".join(f'"{word}"' for word in get_args(Comparison))
        raise EditError(f"compare is one of {listed}, got {compare!r}")


def quota_of(
    net: Graph, candidates: RelationSet, amount: Amount, scope: Scope, budget: Budget, keep: float
) -> Quota:
    """Returns how many of the free relations of some transitions leave.

    Args:
        net: the net.
        candidates: the free relations of whole transitions.
        amount: how many relations leave.
        scope: what is ranked together.
        budget: the limits of the rule.
        keep: how many relations of each transition stay at least, or which share of the possible
            ones.
    """
    transitions = list(candidates._positions_by_transition())
    limits = sides_of(net, candidates, budget)
    if keep:
        limits.append(transition_side(net, candidates, keep))
    if scope == "model":
        counts = amount.total(net, transitions).view(1)
        return Quota(counts, None, scope, limits=limits, most=budget.edits)
    groups = []
    counts = []
    start = 0
    for t in transitions:
        own, quotas = _groups(net, candidates, t, amount, scope)
        groups.append(own + start)
        counts.append(quotas.to(own.device))
        start += len(quotas)
    nothing = torch.empty(0, dtype=torch.int64, device=net.device)
    return Quota(
        torch.cat([nothing, *counts]),
        torch.cat([nothing, *groups]),
        scope,
        amount.pattern,
        limits=limits,
        most=budget.edits,
    )


def _groups(
    net: Graph, candidates: RelationSet, t: int, amount: Amount, scope: Scope
) -> tuple[Tensor, Tensor]:
    """Returns the group of every candidate of a transition, counted from 0, and how many relations
    of each group leave.
    """
    positions = positions_in(candidates, t, net.device)
    if scope == "transition":
        return torch.zeros_like(positions, dtype=torch.int64), amount.total(net, [t]).view(1)
    topology = net.transitions[t].topology
    # how many parents a child can have, and children a parent
    n_parents = topology.n_parents // net.transitions[t]._n_groups
    n_children = topology.n_children // net.transitions[t]._n_groups
    children = topology.child.long()
    if amount.pattern is not None:
        kept, of = amount.pattern
        blocks = -(-n_parents // of)
        every = children * blocks + topology.parents().long() % n_parents // of
        present = torch.bincount(every, minlength=topology.n_children * blocks)
        return every[positions.long()], (present - kept).clamp(min=0)
    if scope == "owner":
        quotas = amount.of(topology.degrees.long(), n_children)
        return topology.parents_at(positions).long(), quotas
    quotas = amount.of(topology.fan_in().long(), n_parents)
    return children[positions.long()], quotas


def transition_side(net: Graph, candidates: RelationSet, keep: float) -> Side:
    """Returns how many relations each transition can spare."""
    spare = []
    numbers = []
    for n, (t, at) in enumerate(candidates._positions_by_transition().items()):
        spare.append(spare_of(net, t, keep))
        numbers.append(torch.full((len(at),), n, device=net.device))
    nothing = torch.empty(0, dtype=torch.int64, device=net.device)
    return Side(torch.cat([nothing, *numbers]), torch.tensor(spare, device=net.device).long())


def spare_of(net: Graph, t: int, keep: float) -> int:
    """Returns how many relations a transition can spare, of which `keep` stay."""
    least = keep
    if isinstance(keep, float):
        least = round(keep * possible_relations(net, t))
    return max(0, net.transitions[t].size - int(least))


def possible_relations(net: Graph, t: int) -> int:
    """Returns how many relations a transition can have."""
    source, target = net.ends[t]
    return len(net.layers[source]) * len(net.layers[target]) // net.transitions[t]._n_groups


def compared(scores: Tensor, sizes: Sequence[int], how: Comparison) -> Tensor:
    """Returns scores of several transitions, or spaces, as numbers that compare.

    Args:
        scores: one number per candidate, those of one transition after those of another.
        sizes: how many of each transition there are.
        how: "lamp" for layer-adaptive magnitudes, "mean" to divide by the mean of the transition,
            "score" to leave them as they are.
    """
    if how == "score" or len(sizes) < 2:
        return scores
    found = []
    for part in scores.split(list(sizes)):
        if how == "lamp":
            found.append(layer_adaptive(part))
        else:
            found.append(by_mean(part))
    return torch.cat(found)


def by_mean(scores: Tensor) -> Tensor:
    """Returns scores divided by their mean."""
    scores = scores.double()
    return scores / scores.mean().clamp(min=torch.finfo(scores.dtype).tiny)


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
        place.copy_(layer_adaptive(part))
    return found


def layer_adaptive(scores: Tensor) -> Tensor:
    """Returns the layer-adaptive magnitudes of the relations, or tiles, of one transition: the
    square of each score divided by the sum of the squares that are not smaller.
    """
    if len(scores) == 0:
        return scores.double()
    tiny = torch.finfo(torch.float64).tiny
    ascending, order = scores.sort(stable=True)
    ascending = ascending.double()
    largest = ascending[-1]
    # Divided by the largest, so that no square overflows; the smallest divisor is for zeros.
    squares = (ascending / largest.clamp(min=tiny)) ** 2
    not_smaller = squares.flip(0).cumsum(0).flip(0)
    adapted = squares / not_smaller.clamp(min=tiny)
    if not bool(largest.isnan()):
        adapted[-1] = 1.0
    found = torch.empty_like(adapted)
    found[order] = adapted
    return found


def last_parents(net: Graph, candidates: RelationSet, scores: Tensor) -> Tensor:
    """Returns the places of the strongest relation that leads to each output, int64."""
    found = [torch.empty(0, dtype=torch.int64, device=scores.device)]
    start = 0
    for t, at in candidates._positions_by_transition().items():
        stop = start + len(at)
        transition = net.transitions[t]
        if net._is_output(transition.target):
            positions = as_positions(at, scores.device).long()
            child = transition.topology.child.long()[positions]
            own = scores[start:stop].double()
            found.append(start + _strongest_of_each(own, child, transition.n_children))
        start = stop
    return torch.cat(found)


def _strongest_of_each(scores: Tensor, child: Tensor, n_children: int) -> Tensor:
    """Returns the place of the largest score of each child that has one."""
    strongest = scores.new_full((n_children,), -torch.inf)
    strongest.scatter_reduce_(0, child, scores, "amax")
    # several of one child where scores are equal
    equals = (scores == strongest[child]).nonzero().view(-1)
    places = torch.full_like(strongest, -1, dtype=torch.int64)
    places.scatter_reduce_(0, child[equals], equals, "amax")
    return places[places >= 0]


def as_pattern(pattern: Sequence[int] | None) -> tuple[int, int] | None:
    """Returns the setting `pattern` of a rule; raises EditError if it is none."""
    if pattern is None:
        return None
    numbers = tuple(pattern)
    if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1] or numbers[1] < 1:
        raise EditError(
            f"pattern is (kept, of), as (2, 4) for two of every four parents, got {pattern!r}"
        )
    return numbers[0], numbers[1]
