"""SplitIntoFamilies: gives transitions a structure that runs as a few matrix products."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grapnet._network import GrapNet
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._index_map import contains
from grapnet.core._sets import RelationSet
from grapnet.core._transition import Topology

from ._activations import CovarianceRecorder
from ._budget import Budget, weakest_within
from ._rule import (
    Recorder,
    RuleContext,
    as_numbers,
    chosen_transitions,
    require_net,
    seen_evidence,
    taken_pairs,
)

MOST_ROUNDS = 30  # of clustering; it settles after a few


@dataclass(frozen=True)
class SplitIntoFamilies:
    """Splits transitions into families of parents with children of their own, and cuts the rest.

    Parents form groups of nearly equal size with a large correlation² inside. Each group gets an
    equal share of the children, chosen for a large |weight| inside. Relations from one group to the
    children of another are cut, the weakest first if a budget does not allow all; frozen relations
    stay. A full transition then runs as one block per family; others have gaps in their blocks
    unless `fill` is set.

    Attributes:
        transitions: numbers of the transitions.
        families: the number of families in each.
        fill: connect the absent pairs inside the blocks, with weight 0.
        window: the number of steps over which activations are recorded.

    Examples:
        >>> net = GrapNet([8, 12, 4])
        >>> split = SplitIntoFamilies(transitions=0, families=4)
        >>> recorders = split.recorders(net)
        >>> for recorder in recorders.values():
        ...     recorder.arm(net)
        >>> _ = net(torch.randn(64, 8))
        >>> with net.edit(reason="structure") as edit:
        ...     split(net, edit, RuleContext(evidence=recorders))
        >>> [family.block for family in net.execution.families(0)]
        [(2, 3), (2, 3), (2, 3), (2, 3)]
    """

    transitions: int | Iterable[int]
    families: int
    fill: bool = False
    window: int = 50

    def __post_init__(self) -> None:
        object.__setattr__(self, "transitions", as_numbers(self.transitions))
        if self.families < 1:
            raise EditError(f"families is a whole number from 1, got {self.families!r}")

    def recorders(self, net: GrapNet) -> dict[str, Recorder]:
        """Returns one recorder of the parents of each transition."""
        recorders: dict[str, Recorder] = {}
        for t in self._numbers(net):
            source = net.transitions[t].source
            recorders[_evidence(t)] = CovarianceRecorder(source, source, window=self.window)
        return recorders

    def __call__(self, net: GrapNet, edit: Edit, context: RuleContext) -> None:
        """Writes the cuts, and the connections that fill the blocks."""
        left = context.budget
        for t in self._numbers(net):
            left = self._split(net, edit, context, t, left)

    def _numbers(self, net: GrapNet) -> list[int]:
        require_net(net, "SplitIntoFamilies")
        return chosen_transitions(net, self.transitions)

    def _split(
        self, net: GrapNet, edit: Edit, context: RuleContext, t: int, budget: Budget
    ) -> Budget:
        """Splits one transition, and returns what is left of the budget."""
        topology = net.transitions[t].topology
        if min(topology.n_parents, topology.n_children) < self.families:
            raise EditError(
                f"transition {t} leads from {topology.n_parents} to {topology.n_children} nodes,"
                f" too few for {self.families} families"
            )
        relations = RelationSet.of(net, [t])
        parents = topology.parents().cpu().long()
        children = topology.child.cpu().long()
        weights = relations.weights.detach().abs().double().cpu()
        # [parents] the group of each
        upper = _clustered(_coactivation(context, t), self.families)
        n_children = topology.n_children
        held = torch.bincount(
            upper[parents] * n_children + children, weights, self.families * n_children
        ).double()
        lower = _balanced(held.view(self.families, n_children).t())  # [children] the group of each
        inside = upper[parents] == lower[children]
        outside = relations[~inside]
        cut = weakest_within(net, outside, len(outside), budget)
        edit.cut(cut)
        filled = 0
        if self.fill:
            filled = self._fill(net, edit, t, upper, lower, budget.edits)
        edit.remark(
            f"splits transition {t} into {self.families} families",
            transition=t,
            relations=len(cut),
            left_outside=len(outside) - len(cut),
            filled=filled,
            kept_weight=float(weights[inside].sum() / weights.sum().clamp(min=1e-300)),
        )
        if budget.edits is None:
            return budget
        return replace(budget, edits=budget.edits - max(len(cut), filled))

    def _fill(
        self, net: GrapNet, edit: Edit, t: int, upper: Tensor, lower: Tensor, most: int | None
    ) -> int:
        """Connects pairs inside of the blocks that are absent; returns how many."""
        transition = net.transitions[t]
        parents, children = _absent_inside(transition.topology, upper, lower, self.families)
        free = ~contains(taken_pairs(net, edit, t), parents * transition.n_children + children)
        above = net.layers[transition.source].uid[parents[free][:most]]
        below = net.layers[transition.target].uid[children[free][:most]]
        edit.connect(above, below, pairs="aligned", weights="zero")
        return len(above)


def _evidence(t: int) -> str:
    return f"coactivation before transition {t}"


def _coactivation(context: RuleContext, t: int) -> Tensor:
    """Returns correlation² between the parents, 0 with themselves, [parents, parents]."""
    recorder = seen_evidence(context, _evidence(t), "SplitIntoFamilies")
    return recorder.correlation().cpu().square().fill_diagonal_(0)


def _clustered(affinity: Tensor, k: int) -> Tensor:
    """Returns the group of every node, by k-means with groups of nearly equal size.

    Each group starts from a node of large affinity to others and small affinity to the nodes chosen
    before it.
    """
    # to the closest chosen node
    near = torch.zeros(len(affinity), dtype=affinity.dtype, device="cpu")
    chosen: list[int] = []
    for _ in range(k):
        appeal = affinity.sum(1) * (1 - near)
        appeal[chosen] = -1
        chosen.append(int(appeal.argmax()))
        near = torch.maximum(near, affinity[:, chosen[-1]])
    scores = affinity @ affinity[:, chosen] + affinity[:, chosen]
    groups = torch.empty(0, dtype=torch.int64, device="cpu")
    best = -1.0
    for _ in range(MOST_ROUNDS):
        found = _balanced(scores)
        members = torch.nn.functional.one_hot(found, k).to(affinity.dtype)  # [nodes, groups]
        scores = affinity @ members
        value = float((scores * members).sum())
        if value <= best:
            break
        groups = found
        best = value
        scores = scores / members.sum(0)
    return groups


def _balanced(scores: Tensor) -> Tensor:
    """Returns a group for each row of `scores` [n, groups], of sizes that differ by at most one.

    Each row goes to its best group; a full group keeps the rows that would lose most elsewhere.
    """
    n, k = scores.shape
    room = torch.tensor([n // k + (g < n % k) for g in range(k)], device="cpu")
    groups = torch.full((n,), -1, device="cpu")
    left = torch.arange(n, device="cpu")
    while len(left):
        open_groups = int((room > 0).sum())
        top = scores[left].masked_fill(room == 0, -torch.inf).topk(min(2, open_groups), dim=1)
        loss = top.values[:, 0] - top.values[:, -1]
        by_loss = loss.argsort(descending=True, stable=True)
        for group in range(k):
            takers = by_loss[top.indices[by_loss, 0] == group][: int(room[group])]
            groups[left[takers]] = group
            room[group] -= len(takers)
        left = left[groups[left] < 0]
    return groups


def _absent_inside(
    topology: Topology, upper: Tensor, lower: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Returns the rows of parents and children of one group that have no relation."""
    parents = topology.parents().cpu().long()
    children = topology.child.cpu().long()
    inside = upper[parents] == lower[children]
    parents = parents[inside]
    children = children[inside]
    found = []
    for group in range(k):
        rows = (upper == group).nonzero().view(-1)
        columns = (lower == group).nonzero().view(-1)
        here = upper[parents] == group
        absent = torch.ones(len(rows), len(columns), dtype=torch.bool, device="cpu")
        absent[
            torch.searchsorted(rows, parents[here]), torch.searchsorted(columns, children[here])
        ] = False
        row, column = absent.nonzero(as_tuple=True)
        found.append((rows[row], columns[column]))
    return torch.cat([row for row, _ in found]), torch.cat([column for _, column in found])
