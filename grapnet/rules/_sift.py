"""CovarianceSifter: cuts the children that a criterion finds weakest for a whole family."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grapnet._network import GrapNet
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import require_ranks
from grapnet.core._sets import RelationSet
from grapnet.core._transition import Topology
from grapnet.execution._family import find_families
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._grouped import Channels
from grapnet.spaces._space import Space

from ._budget import Budget, Side
from ._criteria import RELATIONS, as_criterion, refusal_of, scored
from ._rule import (
    Recorder,
    RuleContext,
    Transitions,
    as_transitions,
    chosen_transitions,
)
from ._scopes import (
    Comparison,
    Quota,
    Scope,
    compared,
    require_comparison,
    require_keep,
    require_scope,
    spare_of,
)

NO_NODES = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class CovarianceSifter:
    """Cuts the weakest children of every family, and removes the nodes that this leaves without
    parents.

    A family is a group of nodes with the same children, or a single node. The score of a child is
    the mean score of its relations to the members: by default the |correlation| between its
    activation and theirs, 0 where one is constant. A child is cut from all members or from none, so
    that a family remains one: a child with a frozen relation to the family stays, and a budget
    spares the strongest children first.

    In an adopted model a relation may have several numbers, such as a kernel. Its correlation is
    the root of the mean square of theirs: of what each of them is multiplied with, and of the child
    where it is read next (`TensorCorrelationRecorder`). Nodes without parents are removed from
    spaces where that is exact.

    Attributes:
        transitions: numbers of the transitions; by default all between hidden layers. Of an adopted
            model, names of modules; by default all Linears and convolutions that do not read the
            input, and whose children are not pinned.
        fraction: the share of the children to cut, rounded down to a whole number. A child of
            several families counts for each of them.
        scope: what is ranked together: the children of each family ("owner"), the families of each
            child ("child"), the children of all families of each transition ("transition"), or of
            all transitions ("model").
        compare: how scores of different transitions compare in the scope "model", as for
            `PruneWeakest`. By default that of the criterion: "score" for correlations.
        window: the number of steps that a criterion which is given by its name records.
        by: the criterion of relations: "correlation", "magnitude", "wanda", "taylor", "fisher",
            "random", an object, or a function, as for `PruneWeakest`; it scores relations one by
            one.
        keep: how many relations of each transition stay at least, as an int, or which share of the
            possible ones, as a float.

    Examples:
        >>> net = GrapNet([4, 6, 6, 2])
        >>> sifter = CovarianceSifter()
        >>> recorders = sifter.recorders(net)
        >>> for recorder in recorders.values():
        ...     recorder.arm(net)
        >>> _ = net(torch.randn(64, 4))
        >>> with net.edit(reason="sift") as edit:
        ...     sifter(net, edit, RuleContext(evidence=recorders))
        >>> net.sizes, len(net.layers[1].outgoing())
        ([4, 6, 3, 2], 18)
    """

    transitions: Transitions | None = None
    fraction: float = 0.5
    window: int = 50
    by: Any = "correlation"
    scope: Scope = "owner"
    compare: Comparison | None = None
    keep: float = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "transitions", as_transitions(self.transitions))
        require_scope(self.scope)
        require_comparison(self.compare)
        require_keep(self.keep)
        if not hasattr(self.criterion, "score"):
            raise EditError(f"a family is sifted by scores, and {self.by!r} has none")
        if not 0 <= self.fraction <= 1:
            raise EditError(f"fraction lies between 0 and 1, got {self.fraction!r}")

    @property
    def criterion(self) -> Any:
        """The criterion that `by` means."""
        return as_criterion(self.by, RELATIONS, self.window)

    def recorders(self, net: Graph) -> dict[str, Recorder]:
        """Returns the recorders of the criterion; by default one of the two ends of each
        transition.
        """
        criterion = self.criterion
        if not hasattr(criterion, "recorders"):
            return {}
        return dict(criterion.recorders(net, RelationSet.of(net, self._numbers(net))))

    def __call__(self, net: GrapNet | Adopted, edit: Edit, context: RuleContext) -> None:
        """Writes the cuts and the removal of orphans."""
        numbers = self._numbers(net)
        evidence = {**context.evidence, "generator": edit.generator}
        targets = {}
        for t in numbers:
            scores = scored(self.criterion, net, RelationSet.of(net, [t]), evidence)
            targets[t] = _targets(net, t, scores)
        weak = self._weakest(net, targets, context.budget)
        weak = _within(net, targets, weak, context.budget, self.keep)
        cut = [t for t, marks in zip(numbers, weak, strict=True) if marks.any()]
        for t, marks in zip(numbers, weak, strict=True):
            if t in cut:
                marked = torch.from_numpy(marks[targets[t].of_relation])
                chosen = RelationSet.of(net, [t])[marked]
                edit.cut(chosen)
                edit.remark(
                    f"cuts {int(marks.sum())} child targets of {len(targets[t].degrees)} families",
                    transition=t,
                    relations=len(chosen),
                    largest_score=float(targets[t].scores[marks].max()),
                    mean_score=float(targets[t].scores[marks].mean()),
                )
        below = _below(net, cut)
        if below:
            edit.remove_orphans(below)

    def _weakest(
        self, net: Graph, targets: "dict[int, _Targets]", budget: Budget
    ) -> list[np.ndarray]:
        """Marks the targets that are to go, transition by transition; limits of relations and of
        parents are left aside.
        """
        if not targets:
            return []
        parts = list(targets.values())
        sizes = [len(part.scores) for part in parts]
        degrees = torch.from_numpy(np.concatenate([part.degrees for part in parts]))
        families = _joined([part.families for part in parts], [len(p.degrees) for p in parts])
        if self.scope == "owner":
            groups = families
        elif self.scope == "child":
            n_children = [net.transitions[t].topology.n_children for t in targets]
            groups = _joined([part.children for part in parts], n_children)
        else:
            groups = torch.arange(len(sizes), device="cpu").repeat_interleave(torch.tensor(sizes))
        present = torch.bincount(groups)
        if self.scope == "model":
            present = present.sum().view(1)
        counts = (self.fraction * present.double() + 1e-9).long()
        scores = torch.from_numpy(np.concatenate([part.scores for part in parts]))
        # a target with a frozen relation stays
        free = scores.isfinite()
        limits = []
        if budget.children:
            limits.append(Side(families[free], (degrees - budget.children).clamp(min=0)))
        key = scores[free]
        quota = Quota(counts, groups[free], self.scope, limits=limits)
        if self.scope == "model":
            how: Any = self.compare or getattr(self.criterion, "comparison", "score")
            key = compared(key, [int(part.sum()) for part in free.split(sizes)], how)
            quota = Quota(counts, limits=limits)
        weak = torch.zeros_like(free)
        weak[free.nonzero().view(-1)[quota.places(key).long()]] = True
        return [part.numpy() for part in weak.split(sizes)]

    def _numbers(self, net: Graph) -> list[int]:
        if not isinstance(net, Adopted):
            hidden = range(1, len(net.layers) - 1)
            between = [t for t, ends in enumerate(net.ends) if all(n in hidden for n in ends)]
            return chosen_transitions(net, self.transitions, between)
        between = []
        for t in net._trainable_transitions():
            parents, children = (_spaces_of(net, number) for number in net.ends[t])
            # The model computes both, and returns no child.
            is_computed = any(space.writers for space in parents)
            is_hidden = is_computed and not any(space.pins for space in children)
            if is_hidden and not refusal_of(self.criterion, net, t):
                between.append(t)
        return chosen_transitions(net, self.transitions, between)


def _spaces_of(net: Adopted, number: int) -> list[Space]:
    """Returns a space, or those that divide channels."""
    layer = net.layers[number]
    return layer.spaces if isinstance(layer, Channels) else [layer]


def _below(net: Graph, cut: list[int]) -> list[int]:
    """Returns the hidden layers, or spaces, that may lose their last parents with some cuts."""
    if not isinstance(net, Adopted):
        first = min((net.transitions[t].target for t in cut), default=len(net.layers))
        return list(range(first, len(net.layers) - 1))
    reached = {net.ends[t][1] for t in cut}
    size = 0
    while size < len(reached):
        size = len(reached)
        reached |= {target for source, target in net.ends if source in reached}
    return [number for number in sorted(reached) if number in net._orphanages()]


class _Targets(NamedTuple):
    """The children of whole families of one transition, family by family."""

    families: np.ndarray  # [n] the number of the family, ascending
    children: np.ndarray  # [n] the child's row
    scores: np.ndarray  # [n] infinite where one of the relations is frozen
    sizes: np.ndarray  # [n] how many relations it has, one a member
    degrees: np.ndarray  # [families] how many targets each has
    of_relation: np.ndarray  # [relations] the number of the target of each


def _targets(net: Graph, t: int, strengths: Tensor) -> _Targets:
    """Returns the targets of a transition's families and their scores, the means of those of their
    relations.
    """
    topology = net.transitions[t].topology
    relations = RelationSet.of(net, [t])
    parent = topology.parents().cpu().long()
    child = topology.child.cpu().long()
    families = _families(topology)
    upper = net.layers[net.transitions[t].source]
    rows = torch.cat([NO_NODES, *families]).numpy()
    sizes = np.array([len(members) for members in families], dtype=np.int64)
    # a node without children is never asked for its own
    family_of = np.zeros(len(upper), dtype=np.int64)
    family_of[rows] = np.repeat(np.arange(len(sizes)), sizes)
    # one member of each family: its children are the targets
    first = torch.from_numpy(rows[sizes.cumsum() - sizes])
    at = topology.owned_by(first.to(topology.ptr.device)).cpu().numpy()
    pairs = family_of[parent.numpy()] * topology.n_children + child.numpy()
    # of the target that a pair is
    number = np.empty(len(sizes) * topology.n_children, dtype=np.int32)
    number[pairs[at]] = np.arange(len(at), dtype=np.int32)
    of_relation = number[pairs]
    family, target = np.divmod(pairs[at], max(topology.n_children, 1))
    require_ranks(strengths)
    scores = np.bincount(of_relation, strengths.cpu().double().numpy(), len(at)) / sizes[family]
    scores[of_relation[relations.frozen.cpu().numpy()]] = np.inf
    return _Targets(
        family,
        target,
        scores,
        sizes[family],
        np.bincount(family, minlength=len(sizes)),
        of_relation,
    )


def _families(topology: Topology) -> list[Tensor]:
    """Returns the rows of the nodes that share their children, the largest families first."""
    found = []
    for families in find_families(topology):
        for members, children in zip(families.members, families.children, strict=True):
            found.append((members.cpu(), len(children)))
    found.sort(key=lambda family: -len(family[0]) * family[1])
    return [members for members, _ in found]


def _joined(parts: list[np.ndarray], sizes: list[int]) -> Tensor:
    """Returns numbers of several transitions, each counted on from the sizes of those before it."""
    starts = np.cumsum([0, *sizes])
    return torch.from_numpy(
        np.concatenate([part + start for part, start in zip(parts, starts, strict=False)])
    )


def _within(
    net: Graph,
    targets: dict[int, _Targets],
    weak: list[np.ndarray],
    budget: Budget,
    keep: float,
) -> list[np.ndarray]:
    """Returns the marks of weak targets, transition by transition, without those that limits of
    relations and of parents spare.
    """
    if not targets or (budget.edits is None and budget.parents == 0 and keep == 0):
        return weak
    parts = list(zip(targets.values(), weak, strict=True))
    scores = np.concatenate([part.scores[marks] for part, marks in parts])
    sizes = np.concatenate([part.sizes[marks] for part, marks in parts])
    # what each target takes from, and how many relations that can spare
    limits = []
    if budget.parents:
        fan_in = [net.transitions[t].topology.fan_in().cpu().numpy() for t in targets]
        child = _joined([part.children[marks] for part, marks in parts], [*map(len, fan_in)])
        limits.append((child.numpy(), np.concatenate(fan_in) - budget.parents))
    if keep:
        numbers = np.repeat(np.arange(len(parts)), [marks.sum() for marks in weak])
        limits.append((numbers, np.array([spare_of(net, t, keep) for t in targets])))
    if budget.edits is not None:
        limits.append((np.zeros_like(sizes), np.array([budget.edits])))
    order = scores.argsort(kind="stable")
    kept = np.ones(len(scores), dtype=bool)
    for places, spare in limits:
        kept &= _running_totals(places, sizes * kept, order) <= spare[places]
    ends = np.cumsum([marks.sum() for marks in weak])
    for marks, part in zip(weak, np.split(kept, ends[:-1]), strict=True):
        marks[marks] = part
    return weak


def _running_totals(groups: np.ndarray, sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns for every entry the sum of the sizes in its group up to and including it, taken in
    `order`.
    """
    order = order[np.argsort(groups[order], kind="stable")]
    totals = sizes[order].cumsum()
    numbers = groups[order]
    opens = np.diff(numbers, prepend=-1) > 0  # the first of its group
    before = (totals - sizes[order])[opens]
    found = np.empty_like(totals)
    found[order] = totals - before[opens.cumsum() - 1]
    return found
