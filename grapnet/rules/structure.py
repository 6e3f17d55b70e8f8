"""SplitIntoFamilies: gives a transition a structure that runs as a few matrix products."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grapnet.core._change import contains
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._transition import Topology
from grapnet.network import GrapNet

from .budget import weakest_within
from .choice import seen_evidence
from .recorders import CovarianceRecorder
from .rule import Moment, Recorder
from .together import taken_pairs

EVIDENCE = "coactivation"
MOST_ROUNDS = 30  # of clustering; it settles after a few


@dataclass(frozen=True)
class SplitIntoFamilies:
    """Splits a transition into families: parents that move together get children of their own, and
    the rest is cut.

    Parents are put into groups of equal size, as far as the numbers allow, so that correlation²
    inside of them is large. Each group gets an equal share of the children, so that the |weight|
    that stays is large. What leads from one group to the children of another is cut, the weakest
    first where a budget does not allow all of it; frozen relations stay. A full transition then
    runs as one block a family; a ragged one has gaps in its blocks unless `fill` is set.

    Attributes:
        transition: its number.
        families: how many.
        fill: connect what is missing inside of the blocks, with weight 0, unless the same edit does
            so already.
        window: for how many steps activations are recorded.

    Examples:
        >>> net, split = GrapNet([8, 12, 4]), SplitIntoFamilies(transition=0, families=4)
        >>> recorders = split.recorders(net)
        >>> recorders["coactivation"].arm(net)
        >>> _ = net(torch.randn(64, 8))
        >>> with net.edit(reason="structure") as edit:
        ...     split(net, edit, Moment(evidence=recorders))
        >>> [family.block for family in net.execution.families(0)]
        [(2, 3), (2, 3), (2, 3), (2, 3)]
    """

    transition: int
    families: int
    fill: bool = False
    window: int = 50

    def __post_init__(self) -> None:
        for name, least in (("families", 1), ("window", 1)):
            number = getattr(self, name)
            if not isinstance(number, int) or number < least:
                raise EditError(f"{name} is a whole number from {least}, got {number!r}")
        if not isinstance(self.transition, int):
            raise EditError(f"transition is a number, got {self.transition!r}")

    def recorders(self, net: GrapNet) -> dict[str, Recorder]:
        """Returns one recorder of the parents."""
        t = self._number(net)
        return {EVIDENCE: CovarianceRecorder(t, t, window=self.window)}

    def __call__(self, net: GrapNet, edit: Edit, now: Moment) -> None:
        """Writes the cuts, and the connections that fill the blocks."""
        t = self._number(net)
        if min(net.sizes[t], net.sizes[t + 1]) < self.families:
            raise EditError(
                f"transition {t} leads from {net.sizes[t]} to {net.sizes[t + 1]} nodes, too few for"
                f" {self.families} families"
            )
        topology, relations = net.transitions[t].topology, net.layers[t].outgoing()
        parents, children = topology.parents().cpu().long(), topology.child.cpu().long()
        weights = relations.weights.detach().abs().double().cpu()
        upper = _clustered(_coactivation(now), self.families)  # [parents] the group of each
        n_children = topology.n_children
        held = torch.bincount(
            upper[parents] * n_children + children, weights, self.families * n_children
        ).double()
        lower = _balanced(held.view(self.families, n_children).t())  # [children] the group of each
        inside = upper[parents] == lower[children]
        outside = relations[~inside]
        cut = weakest_within(net, outside, len(outside), now.budget)
        edit.cut(cut)
        filled = self._fill(net, edit, t, upper, lower, now.budget.edits) if self.fill else 0
        edit.remark(
            f"splits transition {t} into {self.families} families",
            transition=t,
            relations=len(cut),
            left_outside=len(outside) - len(cut),
            filled=filled,
            kept_weight=float(weights[inside].sum() / weights.sum().clamp(min=1e-300)),
        )

    def _fill(
        self, net: GrapNet, edit: Edit, t: int, upper: Tensor, lower: Tensor, most: int | None
    ) -> int:
        """Connects pairs inside of the blocks that are absent; returns how many."""
        parents, children = _absent_inside(net.transitions[t].topology, upper, lower, self.families)
        free = ~contains(taken_pairs(net, edit, t), parents * net.sizes[t + 1] + children)
        parents, children = parents[free][:most], children[free][:most]
        edit.connect(
            net.layers[t].uid[parents],
            net.layers[t + 1].uid[children],
            pairs="aligned",
            weights="zero",
        )
        return len(parents)

    def _number(self, net: GrapNet) -> int:
        count, t = len(net.transitions), self.transition
        if not -count <= t < count:
            raise EditError(
                f"the net has transitions 0 to {count - 1}, so there is no transition {t}"
            )
        return t % count


def _coactivation(now: Moment) -> Tensor:
    """Returns correlation² between the parents, 0 with themselves, [parents, parents]."""
    recorder = seen_evidence(now, EVIDENCE, "SplitIntoFamilies")
    return recorder.correlation().cpu().square().fill_diagonal_(0)


def _clustered(affinity: Tensor, k: int) -> Tensor:
    """Returns the group of every node, all of nearly equal size, so that affinity inside of groups
    is large: k-means.

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
    groups, best = torch.empty(0, dtype=torch.int64, device="cpu"), -1.0
    for _ in range(MOST_ROUNDS):
        found = _balanced(scores)
        members = torch.nn.functional.one_hot(found, k).to(affinity.dtype)  # [nodes, groups]
        scores = affinity @ members
        value = float((scores * members).sum())
        if value <= best:
            break
        groups, best = found, value
        scores = scores / members.sum(0)
    return groups


def _balanced(scores: Tensor) -> Tensor:
    """Returns a group for each row of `scores` [n, groups]: sizes differ by at most one, and the
    sum is large.

    Rows go to the group they like best; one that too many like keeps those who would lose most
    elsewhere.
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
    parents, children = topology.parents().cpu().long(), topology.child.cpu().long()
    inside = upper[parents] == lower[children]
    parents, children = parents[inside], children[inside]
    found = []
    for group in range(k):
        rows, columns = (upper == group).nonzero().view(-1), (lower == group).nonzero().view(-1)
        here = upper[parents] == group
        absent = torch.ones(len(rows), len(columns), dtype=torch.bool, device="cpu")
        absent[
            torch.searchsorted(rows, parents[here]), torch.searchsorted(columns, children[here])
        ] = False
        row, column = absent.nonzero(as_tuple=True)
        found.append((rows[row], columns[column]))
    return torch.cat([row for row, _ in found]), torch.cat([column for _, column in found])
