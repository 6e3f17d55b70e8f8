"""Criteria for relations: which of them leave, and what becomes of those that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import as_positions
from grapnet.core._sets import NodeSet, RelationSet
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._weights import Weight

from ._activations import ActivationRecorder, CovarianceRecorder
from ._correlations import TensorCorrelationRecorder, why_not_recorded
from ._gradients import GradientRecorder, TensorGradientRecorder
from ._rule import Recorder, RuleContext, seen_evidence
from ._saliency import FisherRecorder, InputRecorder, TensorFisherRecorder, why_no_inputs
from ._scopes import Comparison, Quota, Scope, compared, last_parents

Candidates = RelationSet | NodeSet
Evidence = Mapping[str, Any]
# The steps that a criterion which is given by its name records.
WINDOW = 16


class Assignment(NamedTuple):
    """Numbers for `edit.assign(what, values)`."""

    what: Any
    values: Tensor


class Choice(NamedTuple):
    """What a criterion has chosen.

    Attributes:
        leaving: the relations to cut, or the nodes to remove.
        assigned: the numbers that those which stay get in the same edit, each an `Assignment` or a
            pair `(what, values)`; None if they keep theirs.
    """

    leaving: Any
    assigned: Iterable[tuple[Any, Tensor]] | None = None

    def write(self, edit: Any) -> None:
        """Writes the choice into an open edit."""
        if len(self.leaving) == 0:
            return
        if isinstance(self.leaving, RelationSet):
            edit.cut(self.leaving)
        else:
            edit.remove_nodes(self.leaving)
        for what, values in self.assigned or ():
            edit.assign(what, values)


@runtime_checkable
class Criterion(Protocol):
    """Chooses relations or nodes that leave.

    Candidates are a RelationSet, or a NodeSet of one layer or space. `Scored` turns a score into a
    criterion; a plain function `score(net, candidates, evidence)` is one as well wherever a rule
    takes `by=`. A criterion that needs evidence also has `recorders(net, candidates)`, as a rule
    has; rules arm them.
    """

    def choose(
        self, net: Any, candidates: Any, evidence: Evidence, count: int | Quota, /
    ) -> tuple[Any, Any]:
        """Returns which candidates leave, and what becomes of those that stay: a `Choice`, or
        `(leaving, assigned)`, where `assigned` is None if they keep their numbers.

        Args:
            net: the net or the adopted model.
            candidates: the relations or nodes to choose from; none of them is frozen.
            evidence: the recorders by name, and a torch.Generator as "generator".
            count: how many of the candidates leave. For relations, rules give a `Quota`, with
                which `candidates.smallest(count=count, key=scores)` keeps to the scope and limits
                of the rule; `int(count)` is the number.
        """
        ...


def chosen(
    criterion: Criterion, net: Any, candidates: Any, evidence: Evidence, count: int | Quota
) -> Choice:
    """Returns what a criterion chooses."""
    return Choice(*criterion.choose(net, candidates, evidence, count))


class Scored:
    """A criterion that scores candidates one by one: those with the smallest scores leave.

    One that needs evidence also has `recorders(net, candidates)`, which returns recorders by the
    names under which `score` finds them in the evidence.

    Attributes:
        scope: what rules rank together by default.
        comparison: how the scores of several transitions or spaces compare: "lamp" divides the
            square of each by the sum of the squares that are not smaller in its transition, "mean"
            divides by the mean, "score" takes them as they are.
        is_local: whether scores are errors of one layer, which say little beside those of others.

    Examples:
        >>> import grapnet as gn
        >>> class Largest(Scored):
        ...     def score(self, net, candidates, evidence):
        ...         return -candidates.strengths
        >>> net = gn.GrapNet([4, 3])
        >>> relations = net.layers[0].outgoing()
        >>> choice = Largest().choose(net, relations, {}, 2)
        >>> choice.leaving.strengths.min() == relations.strengths.sort().values[-2]
        tensor(True)
    """

    scope: ClassVar[Scope] = "model"
    comparison: ClassVar[Comparison] = "score"
    is_local: ClassVar[bool] = False

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns one number per candidate; the larger ones stay."""
        raise NotImplementedError

    def refusal(self, net: Any, number: int) -> str:
        """Returns why a transition, or a layer, cannot be scored; empty if it can."""
        return ""

    def choose(
        self, net: Any, candidates: Any, evidence: Evidence, count: int | Quota, /
    ) -> Choice:
        """Returns the candidates with the smallest scores."""
        quota = Quota.of(count)
        if isinstance(candidates, NodeSet):
            scores = scored(self, net, candidates, evidence)
            order = scores.argsort(stable=True)[: int(quota)]
            return Choice(candidates[order.sort().values])
        candidates = free_of(candidates)
        scores = scored(self, net, candidates, evidence)
        how = quota.compare or self.comparison
        sizes = [len(at) for at in candidates._positions_by_transition().values()]
        key = scores
        # Within one transition the order is that of the scores.
        if quota.groups is None or quota.most is not None:
            key = compared(scores, sizes, how)
        if how == "lamp" and quota.scope in ("transition", "model"):
            # The strongest parent of each output goes last.
            last = last_parents(net, candidates, scores)
            if len(last):
                key = key.index_fill(0, last, torch.inf)
        return Choice(candidates.smallest(count=quota, key=key))


def free_of(relations: RelationSet) -> RelationSet:
    """Returns the relations that are not frozen."""
    stores = relations.graph.transitions
    if not any(len(stores[t].frozen_at) for t in relations._positions_by_transition()):
        return relations
    return relations[~relations.frozen]


def scored(criterion: Any, net: Any, candidates: Any, evidence: Evidence) -> Tensor:
    """Returns the scores of a criterion, checked; those of nodes are on the CPU."""
    scores = criterion.score(net, candidates, evidence).detach().reshape(-1)
    if len(scores) != len(candidates):
        raise ValueError(f"score has {len(scores)} entries for {len(candidates)} candidates")
    if scores.dtype == torch.bool:
        scores = scores.int()
    if isinstance(candidates, NodeSet):
        return scores.cpu()
    return scores.to(net.device)


@dataclass(frozen=True)
class ByFunction(Scored):
    """A function `score(net, candidates, evidence)` as a criterion."""

    function: Callable[[Any, Any, Evidence], Tensor]

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns what the function does."""
        return self.function(net, candidates, evidence)


def as_criterion(by: Any, known: Mapping[str, Callable[[int], Any]], window: int) -> Any:
    """Returns the criterion that a setting `by` means.

    Args:
        by: a name, a criterion, or a function `score(net, candidates, evidence)`.
        known: makes criteria of names and a window.
        window: the number of steps that a criterion which is given by its name records.

    Raises:
        EditError: it is none of these.
    """
    if isinstance(by, str):
        if by not in known:
            raise EditError(f"by is one of {', '.join(known)}, or a criterion, got {by!r}")
        return known[by](window)
    if isinstance(by, type):
        raise EditError(f"by is a criterion, {by.__name__}(…), not its class")
    if isinstance(by, Criterion):
        return by
    if callable(by):
        return ByFunction(cast(Any, by))
    raise EditError(f"by is a name, a criterion or a function, got {by!r}")


def refusal_of(criterion: Any, net: Graph, number: int) -> str:
    """Returns why a criterion cannot score a transition or layer; empty if it can."""
    if not hasattr(criterion, "refusal"):
        return ""
    return criterion.refusal(net, number)


def by_transition(candidates: RelationSet) -> Iterator[tuple[int, Tensor]]:
    """Yields transitions, and the int32 positions of the candidates there."""
    device = candidates.graph.device
    for t, at in candidates._positions_by_transition().items():
        yield t, as_positions(at, device)


def seen(evidence: Evidence, name: str, criterion: object) -> Any:
    """Returns a recorder; raises EditError if it is missing or empty."""
    return seen_evidence(RuleContext(evidence=evidence), name, type(criterion).__name__)


def _numbers(weight: Weight, whole: Tensor, at: Tensor) -> Tensor:
    """Returns the numbers of relations in a tensor of the shape of a weight, [n, payload]."""
    return weight._numbers(whole, at).reshape(len(at), -1)


@dataclass(frozen=True)
class Magnitude(Scored):
    """|w|; the norm, where a relation has several numbers."""

    comparison: ClassVar[Comparison] = "lamp"

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns |w| of every relation."""
        return candidates.strengths


@dataclass(frozen=True)
class Recorded(Scored):
    """Base of the criteria that record something of each transition.

    Attributes:
        window: the number of steps to record.
    """

    window: int = WINDOW
    # what is recorded, for the names of the evidence
    what: ClassVar[str]
    # recorders `of_net(source, target, window=…)` and `of_model(net, transition, window=…)`
    of_net: ClassVar[Any]
    of_model: ClassVar[Any]

    def recorders(self, net: Any, candidates: Any) -> dict[str, Recorder]:
        """Returns a recorder for each transition."""
        found: dict[str, Recorder] = {}
        for t, _ in by_transition(candidates):
            if isinstance(net, Adopted):
                recorder = self.of_model(net, t, window=self.window)
            else:
                recorder = self.of_net(*net.ends[t], window=self.window)
            found[f"{self.what} of transition {t}"] = recorder
        return found

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns the score of every relation."""
        parts = [torch.empty(0, device=net.device)]
        for t, at in by_transition(candidates):
            recorder = seen(evidence, f"{self.what} of transition {t}", self)
            score = self._in_model if isinstance(net, Adopted) else self._in_net
            parts.append(score(recorder, net, t, at).to(net.device))
        return torch.cat(parts)

    def _in_net(self, recorder: Any, net: Any, t: int, at: Tensor) -> Tensor:
        """Returns the scores of the relations at some positions of a transition of a net."""
        raise NotImplementedError

    def _in_model(self, recorder: Any, net: Any, t: int, at: Tensor) -> Tensor:
        """Returns the scores of the relations at some positions of a tensor of a model."""
        raise NotImplementedError


def _recorder_above(source: int, target: int, *, window: int) -> ActivationRecorder:
    """Returns a recorder of what a transition of a net reads."""
    return ActivationRecorder(source, window=window)


@dataclass(frozen=True)
class Wanda(Recorded):
    """|w|·‖x‖, the weight times the root mean square of what it is multiplied with (Sun et al.,
    2024).

    It is ranked per child, as published. Of a relation with several numbers, as a kernel has, it is
    the norm of these products, and ‖x‖ is taken for each place of the kernel.

    Attributes:
        window: the number of steps to record.
    """

    scope: ClassVar[Scope] = "child"
    comparison: ClassVar[Comparison] = "lamp"
    what: ClassVar[str] = "inputs"
    of_net: ClassVar[Any] = staticmethod(_recorder_above)
    of_model: ClassVar[Any] = InputRecorder

    def refusal(self, net: Any, number: int) -> str:
        """Returns why a tensor is not the weight of a Linear or convolution."""
        return why_no_inputs(net, number)

    def _in_net(self, recorder: Any, net: Any, t: int, at: Tensor) -> Tensor:
        scale = (recorder.mean.square() + recorder.variance).sqrt().to(at.device)
        parents = net.transitions[t].topology.parents_at(at).long()
        return net.transitions[t]._strengths(at) * scale[parents]

    def _in_model(self, recorder: Any, net: Any, t: int, at: Tensor) -> Tensor:
        whole = net.transitions[t].grid.whole
        scale = recorder.mean_squares().sqrt().to(whole.device)
        return _numbers(net.transitions[t], whole * scale, at).norm(dim=1)


@dataclass(frozen=True)
class Taylor(Recorded):
    """|w·g|: how much the loss changes, in first order, if the relation is cut.

    Of a relation with several numbers it is |Σ w·g|. The gradient is averaged over the recorded
    backward passes.

    Attributes:
        window: the number of steps to record.
    """

    what: ClassVar[str] = "gradients"
    of_net: ClassVar[Any] = GradientRecorder
    of_model: ClassVar[Any] = TensorGradientRecorder

    def _in_net(self, recorder: Any, net: Any, t: int, at: Tensor) -> Tensor:
        relations = RelationSet(net, {t: at})
        gradients = recorder.of(relations.parents, relations.children)
        return (relations.weights.detach() * gradients).abs()

    def _in_model(self, recorder: Any, net: Any, t: int, at: Tensor) -> Tensor:
        product = net.transitions[t].grid.whole * recorder.gradient()
        return _numbers(net.transitions[t], product, at).sum(1).abs()


@dataclass(frozen=True)
class Fisher(Recorded):
    """w²·F: the diagonal of the Fisher information in place of the Hessian of optimal brain damage
    (LeCun et al., 1990).

    F is the sum over samples of the squared gradient of the sample's loss. A sample is a row of the
    batch; in an adopted model, an entry of the first dimension of what the module receives, with
    all its positions and tokens. Of a relation with several numbers it is Σ w²·F.

    Attributes:
        window: the number of steps to record.
    """

    what: ClassVar[str] = "squared gradients"
    of_net: ClassVar[Any] = FisherRecorder
    of_model: ClassVar[Any] = TensorFisherRecorder

    def refusal(self, net: Any, number: int) -> str:
        """Returns why a tensor is not the weight of a Linear or convolution."""
        return why_no_inputs(net, number)

    def _in_net(self, recorder: Any, net: Any, t: int, at: Tensor) -> Tensor:
        relations = RelationSet(net, {t: at})
        squares = recorder.of(relations.parents, relations.children)
        return relations.weights.detach().square() * squares

    def _in_model(self, recorder: Any, net: Any, t: int, at: Tensor) -> Tensor:
        product = net.transitions[t].grid.whole.square() * recorder.fisher()
        return _numbers(net.transitions[t], product, at).sum(1)


@dataclass(frozen=True)
class Correlation(Recorded):
    """|correlation| between the activations of parent and child, 0 where one is constant.

    `CovarianceSifter` uses it. Of a relation with several numbers it is the root of the mean square
    of theirs: of what each of them is multiplied with, and of the child where it is read next.

    Attributes:
        window: the number of steps to record.
    """

    what: ClassVar[str] = "correlation"
    of_net: ClassVar[Any] = CovarianceRecorder
    of_model: ClassVar[Any] = TensorCorrelationRecorder

    def refusal(self, net: Any, number: int) -> str:
        """Returns why there are no correlations across a tensor."""
        return why_not_recorded(net, number) if isinstance(net, Adopted) else ""

    def _in_net(self, recorder: Any, net: Any, t: int, at: Tensor) -> Tensor:
        return _of_pairs(recorder.correlation().abs(), net, t, at)

    def _in_model(self, recorder: Any, net: Any, t: int, at: Tensor) -> Tensor:
        return _of_pairs(recorder.strengths(), net, t, at)


def _of_pairs(table: Tensor, net: Graph, t: int, at: Tensor) -> Tensor:
    """Returns the entries of [parents, children] for the relations at some positions."""
    topology = net.transitions[t].topology
    parents = topology.parents_at(at).long().to(table.device)
    children = topology.child[at.long()].long().to(table.device)
    return table[parents, children]


@dataclass(frozen=True)
class Random(Scored):
    """Equal chances for all relations, or nodes: the control for every other criterion.

    Attributes:
        seed: of a generator of its own, with which every choice is the same; None to draw from the
            generator of the evidence, which is that of the edit.
    """

    seed: int | None = None

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns random numbers."""
        generator = evidence.get("generator")
        if self.seed is not None:
            generator = torch.Generator(device="cpu").manual_seed(self.seed)
        device = torch.device("cpu") if generator is None else generator.device
        numbers = torch.rand(
            len(candidates), dtype=torch.float64, generator=generator, device=device
        )
        return numbers


# What `by=` means for relations.
RELATIONS: dict[str, Callable[[int], Any]] = {
    "magnitude": lambda window: Magnitude(),
    "wanda": Wanda,
    "taylor": Taylor,
    "fisher": Fisher,
    "correlation": Correlation,
    "random": lambda window: Random(),
}
