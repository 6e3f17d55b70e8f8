"""Criteria for relations of a net that is not trained yet: SNIP, GraSP and SynFlow.

Each makes passes of its own and returns one score per relation; the larger ones stay.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from grapnet._network import GrapNet
from grapnet._torch import pytree
from grapnet.core._errors import EditError, GrapNetError
from grapnet.core._graph import Graph
from grapnet.core._index_map import as_positions
from grapnet.core._sets import RelationSet
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._probe import copy_in_double, floating_leaves

from ._criteria import Choice, Evidence, Scored
from ._scopes import Quota

# Returns the loss of a model on a batch.
Loss = Callable[[Any, Any], Tensor]
Gradients = dict[nn.Parameter, Tensor]


class SNIP(Scored):
    """Scores relations by |weight · gradient| (Lee et al. 2019): how much the loss depends on them.

    The gradient is the sum over the batches. A relation of an adopted model that has several
    numbers has the sum of their scores. Gradients, buffers and weights stay as they are.

    Args:
        batches: what `loss` takes, one after the other.
        loss: `loss(model, batch)` returns the loss of the net, or of the model that was adopted.

    Examples:
        >>> import grapnet as gn
        >>> from torch.nn.functional import cross_entropy
        >>> net = gn.GrapNet([8, 16, 4])
        >>> batches = [(torch.randn(32, 8), torch.randint(4, (32,)))]
        >>> snip = SNIP(batches, lambda net, batch: cross_entropy(net(batch[0]), batch[1]))
        >>> relations = net.select().outgoing()
        >>> with net.edit(reason="before training") as edit:
        ...     edit.cut(relations.smallest(fraction=0.5, key=snip.score(net, relations)))
        >>> net.count().relations
        96
    """

    def __init__(self, batches: Iterable[Any], loss: Loss) -> None:
        self.batches = batches
        self.loss = loss

    def score(self, net: Graph, candidates: RelationSet, evidence: Any = None) -> Tensor:
        """Returns one number per relation; the larger ones stay, frozen ones are infinite."""
        weights = _weights_of(net)
        with _buffers_kept(net):
            gradients = _summed(weights, self.batches, lambda batch: self.loss(_called(net), batch))
        products = {}
        for weight, gradient in gradients.items():
            products[weight] = (weight.detach() * gradient).abs()
        return _by_relation(candidates, products)


class GraSP(Scored):
    """Scores relations by weight · (H · gradient) (Wang et al. 2020): what the norm of the gradient
    would lose without them.

    H is the matrix of second derivatives of the loss, and both it and the gradient are those of all
    weights, summed over the batches, which are gone through twice. The paper divides the logits by
    200 before the loss. A relation of an adopted model that has several numbers has the sum of
    their scores. Gradients, buffers and weights stay as they are.

    Args:
        batches: what `loss` takes; they can be gone through several times.
        loss: `loss(model, batch)` returns the loss of the net, or of the model that was adopted.
    """

    def __init__(self, batches: Iterable[Any], loss: Loss) -> None:
        self.batches = batches
        self.loss = loss

    def score(self, net: Graph, candidates: RelationSet, evidence: Any = None) -> Tensor:
        """Returns one number per relation; the larger ones stay, frozen ones are infinite."""
        weights = _weights_of(net)
        model = _called(net)
        with _buffers_kept(net):
            gradients = _summed(weights, self.batches, lambda batch: self.loss(model, batch))

            def alignment(batch: Any) -> Tensor:
                # Its gradient is the product of H and the gradient. The fused kernels of attention
                # have no second derivative.
                with sdpa_kernel(SDPBackend.MATH):
                    own = _gradients(weights, self.loss(model, batch), twice=True)
                parts = [(gradients[weight] * own[weight]).sum() for weight in weights]
                return torch.stack(parts).sum()

            curvatures = _summed(weights, self.batches, alignment)
        products = {}
        for weight, curvature in curvatures.items():
            products[weight] = weight.detach() * curvature
        return _by_relation(candidates, products)


@dataclass(frozen=True)
class SynFlow(Scored):
    """Scores relations by the synaptic flow through them (Tanaka et al. 2020), without data.

    The flow through a relation is the part of the sum of all outputs that passes it, for inputs of
    1, with |weight| for every weight, without biases, and with activations that return what they
    get. Relations leave in `rounds`, of which each keeps the same share of those before it, and the
    flow is computed anew for each. Scores are places in this order: cutting `fraction` of the
    candidates by them leaves those that stay after the last round.

    An adopted model runs as it is, as in the code of the paper: a copy in float64 and in evaluation
    mode, with the absolute values of all parameters and buffers. A relation that has several
    numbers has the sum of their scores.

    Attributes:
        fraction: the share of the candidates that is to be cut; a rule that cuts by this criterion
            gives its own.
        rounds: in how many rounds they leave.
    """

    fraction: float | None = None
    rounds: int = 100

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise EditError(f"fraction lies between 0 and 1, got {self.fraction!r}")
        if self.rounds < 1:
            raise EditError(f"rounds is at least 1, got {self.rounds!r}")

    def choose(
        self, net: Any, candidates: Any, evidence: Evidence, count: int | Quota, /
    ) -> Choice:
        """Returns the relations that leave in rounds until so many are gone."""
        share = int(count) / max(1, len(candidates))
        rounds = replace(self, fraction=share)
        return Scored.choose(rounds, net, candidates, evidence, count)

    def score(self, net: Graph, candidates: RelationSet, evidence: Any = None) -> Tensor:
        """Returns one number per relation; the larger ones stay, frozen ones are infinite."""
        if self.fraction is None:
            raise EditError("say what share is to be cut, SynFlow(fraction=…): rounds depend on it")
        flows: _NetFlows | _ModelFlows
        if isinstance(net, Adopted):
            flows = _ModelFlows(net, candidates)
        else:
            assert isinstance(net, GrapNet)
            flows = _NetFlows(net, candidates)
        frozen = candidates.frozen.cpu()
        free = ~frozen
        count = int(free.sum())
        # as many as `smallest(fraction=…)` leaves over
        kept = max(1, count - round(self.fraction * len(candidates)))
        present = torch.ones(len(candidates), dtype=torch.bool)
        places = torch.zeros(len(candidates), dtype=torch.float64)
        for number in range(1, self.rounds + 1):
            left = round(count * (kept / max(1, count)) ** (number / self.rounds))
            if left < int((present & free).sum()):
                at = _ascending(flows.of(present), present & free)
                leaving = at[: len(at) - left]
                places[leaving] = torch.arange(len(leaving)).double() + (count - len(at))
                present[leaving] = False
        at = _ascending(flows.of(present), present & free)
        places[at] = torch.arange(len(at)).double() + (count - len(at))
        places[frozen] = torch.inf
        return places.to(net.device)


def _ascending(scores: Tensor, among: Tensor) -> Tensor:
    """Returns the positions of those among which to rank, the smallest score first."""
    if not bool(scores.isfinite().all()):
        raise GrapNetError(
            "the synaptic flow is not finite: the model is too deep, or its weights too large, for"
            " float64"
        )
    at = among.nonzero().flatten()
    return at[scores[at].argsort(stable=True)]


class _NetFlows:
    """The synaptic flow through relations of a net."""

    def __init__(self, net: GrapNet, candidates: RelationSet) -> None:
        self._net = net
        self._at = {}
        self._weights = []
        self._parents = []
        self._children = []
        start = 0
        for t, at in candidates._positions_by_transition().items():
            self._at[t] = (as_positions(at, net.device).cpu().long(), slice(start, start + len(at)))
            start += len(at)
        for store in net.transitions:
            self._weights.append(store.values().detach().cpu().double().abs().view(-1))
            self._parents.append(store.topology.parents().cpu().long())
            self._children.append(store.topology.child.cpu().long())

    def of(self, present: Tensor) -> Tensor:
        """Returns the flow through each candidate, where some of them are gone, [n] float64."""
        net = self._net
        weights = list(self._weights)
        for t, (at, own) in self._at.items():
            weights[t] = weights[t].clone()
            weights[t][at] *= present[own]
        # what reaches every node from the inputs, and what every node sends on to the outputs
        received = [torch.zeros(size, dtype=torch.float64) for size in net.sizes]
        sent = [torch.zeros(size, dtype=torch.float64) for size in net.sizes]
        received[0] += 1
        sent[-1] += 1
        for number in range(1, len(net.layers)):
            for t in net.entering(number):
                part = weights[t] * received[net.ends[t][0]][self._parents[t]]
                received[number].index_add_(0, self._children[t], part)
        for number in range(len(net.layers) - 2, -1, -1):
            for t in net.leaving(number):
                part = weights[t] * sent[net.ends[t][1]][self._children[t]]
                sent[number].index_add_(0, self._parents[t], part)
        found = torch.empty(len(present), dtype=torch.float64)
        for t, (at, own) in self._at.items():
            source, target = net.ends[t]
            before = received[source][self._parents[t][at]]
            behind = sent[target][self._children[t][at]]
            found[own] = before * weights[t][at] * behind
        return found


class _ModelFlows:
    """The synaptic flow through relations of an adopted model, on a copy of it."""

    def __init__(self, net: Adopted, candidates: RelationSet) -> None:
        self._model, tensors, example = copy_in_double(net)
        self._example = pytree.tree_map(_as_ones, tuple(example))
        state = [*self._model.parameters(), *self._model.buffers()]
        for tensor in state:
            tensor.detach().abs_()
        # of each tensor: its weight in the copy, where its candidates are, and their cells
        self._parts = []
        start = 0
        for t, at in candidates._positions_by_transition().items():
            weight = net.transitions[t]
            cells = torch.arange(tensors[weight.name].numel()).view(tensors[weight.name].shape)
            own = weight._numbers(cells, as_positions(at, net.device)).view(len(at), -1)
            tensor = tensors[weight.name].requires_grad_()
            self._parts.append((tensor, slice(start, start + len(at)), own))
            start += len(at)

    def of(self, present: Tensor) -> Tensor:
        """Returns the flow through each candidate, where some of them are gone, [n] float64."""
        for tensor, own, cells in self._parts:
            with torch.no_grad():
                tensor.view(-1)[cells[~present[own]].view(-1)] = 0
        args, kwargs = self._example
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            outputs = floating_leaves(self._model(*args, **kwargs))
            total = torch.stack([output.sum() for output in outputs]).sum()
            tensors = [tensor for tensor, _, _ in self._parts]
            gradients = torch.autograd.grad(total, tensors, materialize_grads=True)
        found = torch.empty(len(present), dtype=torch.float64)
        for (tensor, own, cells), gradient in zip(self._parts, gradients, strict=True):
            products = (tensor.detach() * gradient).abs().reshape(-1)
            found[own] = products[cells].sum(1)
        return found


def _as_ones(value: Any) -> Any:
    """Returns an input of a model with 1 for every number; raises EditError for a whole number."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        raise EditError(
            "SynFlow sends ones through a model, and this one reads whole numbers, such as tokens;"
            " use SNIP or GraSP"
        )
    return torch.ones_like(value)


def _weights_of(net: Graph) -> list[nn.Parameter]:
    """Returns the Parameters that hold the trainable relations of a net, each once."""
    found: dict[nn.Parameter, None] = {}
    for t in net._trainable_transitions():
        found[_parameter_of(net, t)] = None
    return list(found)


def _parameter_of(net: Graph, t: int) -> nn.Parameter:
    """Returns the Parameter that holds the relations of a transition."""
    if isinstance(net, Adopted):
        return net.transitions[t].grid.parameter
    return net.transitions[t].weight


def _called(net: Graph) -> nn.Module:
    """Returns what a loss calls: the net, or the model that was adopted."""
    return net.model if isinstance(net, Adopted) else net


def _gradients(weights: list[nn.Parameter], loss: Tensor, *, twice: bool = False) -> Gradients:
    """Returns the gradient of a loss for some weights.

    Args:
        weights: the weights.
        loss: the loss.
        twice: whether the gradients are differentiated again.
    """
    found = torch.autograd.grad(loss, weights, create_graph=twice, materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def _summed(
    weights: list[nn.Parameter], batches: Iterable[Any], loss: Callable[[Any], Tensor]
) -> Gradients:
    """Returns the sum over batches of the gradient of a loss."""
    totals = {weight: torch.zeros_like(weight) for weight in weights}
    count = 0
    with torch.enable_grad():
        for batch in batches:
            for weight, gradient in _gradients(weights, loss(batch)).items():
                totals[weight] += gradient.detach()
            count += 1
    if count == 0:
        raise ValueError("there is no batch; GraSP goes through its batches twice")
    return totals


def _by_relation(candidates: RelationSet, products: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """Returns a number of every relation from those of weights, infinite where it is frozen."""
    net = candidates.graph
    parts = []
    for t, at in candidates._positions_by_transition().items():
        store: Any = net.transitions[t]
        positions = as_positions(at, net.device)
        product = products.get(_parameter_of(net, t))
        if product is None:
            parts.append(torch.full((len(at),), torch.inf, device=net.device))
            continue
        numbers = store._free_numbers(product.detach(), positions).view(len(at), -1)
        parts.append(numbers.sum(1))
    if not parts:
        return torch.empty(0, device=net.device)
    scores = torch.cat(parts)
    scores[candidates.frozen.to(scores.device)] = torch.inf
    return scores


@contextmanager
def _buffers_kept(net: Graph) -> Iterator[None]:
    """Restores the buffers of a model afterwards: norms count the batches that they see.

    Buffers that have not changed are not written: a write makes what was recorded stale.
    """
    kept = [(buffer, buffer.clone()) for buffer in _called(net).buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
