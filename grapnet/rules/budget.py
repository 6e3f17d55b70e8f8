"""Budgets: how much one apply may change, and how few parents and children it may leave a node."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grapnet.core._change import kth_smallest, require_ranks
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._sets import RelationSet
from grapnet.network import GrapNet

# rounds that look only at the nodes that would fall short, before all nodes are looked at
_SINGLE_ROUNDS = 4


@dataclass(frozen=True)
class Budget:
    """What a rule must not exceed in one `apply`.

    Relations that leave because one of their nodes is removed are not counted: only cuts are.

    Attributes:
        edits: the most relations cut, and the most relations connected; None for any number.
        parents: the fewest parents that cuts leave a node, unless it has fewer already.
        children: the fewest children that cuts leave a node, unless it has fewer already.
    """

    edits: int | None = None
    parents: int = 0
    children: int = 0

    def __post_init__(self) -> None:
        for name in ("edits", "parents", "children"):
            number = getattr(self, name)
            if number is None and name == "edits":
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise EditError(
                    f"a budget's {name} is a whole number, not negative, got {number!r}"
                )

    def tightened(self, other: "Budget | None") -> "Budget":
        """Returns the budget that keeps within both.

        Examples:
            >>> Budget(edits=10, parents=1).tightened(Budget(parents=3))
            Budget(edits=10, parents=3, children=0)
        """
        if other is None:
            return self
        edits = [budget.edits for budget in (self, other) if budget.edits is not None]
        return Budget(
            min(edits, default=None),
            max(self.parents, other.parents),
            max(self.children, other.children),
        )


def weakest_within(
    net: GrapNet,
    relations: RelationSet,
    count: int,
    budget: Budget,
    key: Tensor | None = None,
    *,
    frozen: bool = False,
) -> RelationSet:
    """Returns the `count` weakest of some relations, or fewer, that can be cut within a budget.

    A node that would fall short keeps its strongest ones, as many as it needs, and weaker relations
    of other nodes are taken instead. A relation that is kept for its parent's sake is not counted
    for its child, so a few more may stay than is strictly necessary. Relations outside of the set
    stay, and count as parents and children.

    Args:
        net: the net they are in.
        relations: the ones to choose from.
        count: how many at most; `budget.edits` may allow fewer.
        budget: what to keep within.
        key: one number a relation, |weight| by default; the smallest are the weakest.
        frozen: choose frozen ones too.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3])
        >>> relations = net.layers[0].outgoing()
        >>> [len(weakest_within(net, relations, 12, Budget(parents=n))) for n in (0, 1, 3)]
        [12, 9, 3]
    """
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    key = (
        relations.weights.detach().abs() if key is None else key.detach().reshape(-1).to(net.device)
    )
    if len(key) != len(relations):
        raise ValueError(f"key has {len(key)} entries for {len(relations)} relations")
    if not frozen and any(len(transition.frozen_at) for transition in net.transitions):
        free = ~relations.frozen
        relations, key = relations[free], key[free]
    count = min(count, len(relations) if budget.edits is None else budget.edits)
    if budget.parents == budget.children == 0 or count == 0 or len(relations) == 0:
        return relations.smallest(count=count, key=key)
    require_ranks(key)
    key = key.byte() if key.dtype == torch.bool else key
    return relations[_weakest_marks(key, count, _sides(net, relations, budget))]


def enforce(
    net: GrapNet,
    edit: Edit,
    budget: Budget,
    *,
    rule: str = "the edit",
    settled: RelationSet | None = None,
    cuts: int | None = None,
    connections: int | None = None,
) -> None:
    """Takes back cuts of an open edit until it keeps within a budget, those of the largest |weight|
    first.

    Relations that the edit connects do not make up for those that it cuts.

    Args:
        net: the net of the edit.
        edit: the open edit.
        budget: what to keep within.
        rule: who asked, for the error.
        settled: cuts that stand whatever happens; `budget.edits` does not count them.
        cuts: how many cuts are allowed beside the settled ones, `budget.edits` by default.
        connections: how many connections are allowed in all, `budget.edits` by default.

    Raises:
        EditError: the edit connects more relations than are allowed; nothing was taken back.
    """
    cuts, connections = (budget.edits if limit is None else limit for limit in (cuts, connections))
    if connections is not None and edit.n_connections > connections:
        raise EditError(
            f"{rule} brings the edit to {edit.n_connections:,} connected relations, and the budget"
            f" allows {connections:,}; connect fewer, or give a larger Budget(edits=…)"
        )
    everything = edit.cuts
    asked = everything if settled is None else everything - settled
    if (budget.parents or budget.children) and len(asked):
        key = asked.weights.detach().abs()
        taken_back = torch.zeros(len(asked), dtype=torch.bool, device=key.device)
        for side in _sides(net, everything, budget, among=asked):
            standing = torch.bincount(side.nodes[~taken_back], minlength=len(side.spare))
            taken_back |= _strongest(key, side.nodes, standing - side.spare, ~taken_back)
        edit.keep(asked[taken_back])
        asked = asked[~taken_back]
    if cuts is not None and len(asked) > cuts:
        edit.keep(asked.largest(count=len(asked) - cuts))


@dataclass(eq=False)
class _Side:
    """One end of some relations: the number of each one's node, and how many of them each node can
    spare.
    """

    nodes: Tensor  # [n_relations] int64
    spare: Tensor  # [n_nodes] int64


def _sides(
    net: GrapNet, cut: RelationSet, budget: Budget, among: RelationSet | None = None
) -> list[_Side]:
    """Returns the ends whose minimum matters.

    Args:
        net: the net.
        cut: the relations that go, or might.
        budget: the minima.
        among: the part of them to look at; what the others take from a node it cannot spare again.
    """
    sizes = net.sizes
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    sides = []
    for end, least in ((1, budget.parents), (0, budget.children)):
        if least == 0:
            continue
        total = torch.zeros(sum(sizes), dtype=torch.int64, device=net.device)
        for t, transition in enumerate(net.transitions):
            topology, first = transition.topology, offsets[t + end]
            total[first : first + sizes[t + end]] = (
                topology.fan_in() if end else topology.degrees.long()
            )
        nodes = _nodes(net, cut if among is None else among, end, offsets)
        spare = (total - least).clamp_(min=0)
        if among is not None and len(among) < len(cut):
            spare -= torch.bincount(_nodes(net, cut - among, end, offsets), minlength=len(spare))
        sides.append(_Side(nodes, spare.clamp_(min=0)))
    return sides


def _nodes(net: GrapNet, relations: RelationSet, end: int, offsets: list[int]) -> Tensor:
    """Returns for every relation the number of its parent (end 0) or child (end 1), counted through
    all layers.
    """
    found = []
    for t, at in relations.positions_by_transition().items():
        topology = net.transitions[t].topology
        if isinstance(at, range):
            rows = (
                topology.child[at.start : at.stop] if end else topology.parents(at.start, at.stop)
            )
        else:
            rows = topology.child.index_select(0, at) if end else topology.parents_at(at)
        found.append(rows.long() + offsets[t + end])
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=net.device)


def _weakest_marks(key: Tensor, count: int, sides: list[_Side]) -> Tensor:
    """Marks the weakest `count` relations of which no node loses more than it can spare,
    [n_relations].
    """
    stays = torch.zeros(len(key), dtype=torch.bool, device=key.device)
    candidates = [torch.bincount(side.nodes, minlength=len(side.spare)) for side in sides]
    looked_at = [torch.zeros_like(side.spare, dtype=torch.bool) for side in sides]
    chosen, turn = _smallest_marks(key, stays, count), 0
    while True:
        for side, total, seen in zip(sides, candidates, looked_at, strict=True):
            short = torch.bincount(side.nodes[chosen], minlength=len(side.spare)) > side.spare
            short = (short if turn < _SINGLE_ROUNDS else total > side.spare) & ~seen
            if bool(short.any()):
                stays |= _strongest(key, side.nodes, (total - side.spare) * short)
                seen |= short
        if not bool((chosen & stays).any()):
            return chosen
        chosen, turn = _smallest_marks(key, stays, count), turn + 1


def _smallest_marks(key: Tensor, stays: Tensor, count: int) -> Tensor:
    """Marks the `count` smallest keys of those that need not stay, the first of equals first."""
    free = None if not bool(stays.any()) else (~stays).nonzero().view(-1)  # None: all of them
    keys = key if free is None else key[free]
    count = min(count, len(keys))
    if count == 0:
        return torch.zeros_like(stays)
    limit = kth_smallest(keys, count)
    chosen = keys < limit
    chosen[(keys == limit).nonzero().view(-1)[: count - int(chosen.sum())]] = True
    return chosen if free is None else torch.zeros_like(stays).index_copy_(0, free, chosen)


def _strongest(key: Tensor, nodes: Tensor, quota: Tensor, eligible: Tensor | None = None) -> Tensor:
    """Marks of the relations of every node as many as its quota, those of the largest key first,
    [n_relations].
    """
    wanted = quota[nodes] > 0
    at = (wanted if eligible is None else wanted & eligible).nonzero().view(-1)
    at = at[key[at].argsort(descending=True, stable=True)]
    at = at[nodes[at].argsort(stable=True)]  # by node, and the strongest of each node first
    sorted_nodes = nodes[at]
    rank = torch.arange(len(at), device=at.device) - torch.searchsorted(sorted_nodes, sorted_nodes)
    marks = torch.zeros_like(wanted)
    marks[at[rank < quota[sorted_nodes]]] = True
    return marks
