"""Criteria for nodes: which nodes of a layer or space leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._layer import LiveNodes
from grapnet.core._sets import NodeSet
from grapnet.spaces._space import Space

from ._activations import ActivationRecorder, CovarianceRecorder
from ._criteria import WINDOW, Evidence, Random, Scored, seen
from ._least_squares import column_subset
from ._rule import Recorder
from ._saliency import SaliencyRecorder, why_no_activations
from ._scopes import Comparison

Side = Literal["both", "incoming", "outgoing"]


class NodeScored(Scored):
    """A criterion that scores the nodes of one layer or space."""

    comparison: ClassVar[Comparison] = "mean"

    def refusal(self, net: Any, number: int) -> str:
        """Returns why the activations of a layer or space cannot be recorded."""
        return why_no_activations(net, number)


def place_of(net: Graph, nodes: NodeSet) -> tuple[LiveNodes, Tensor]:
    """Returns the layer or space of some nodes, and their rows, int64.

    Raises:
        EditError: they belong to several layers.
    """
    rows = nodes._rows_by_layer()
    if len(rows) > 1:
        raise EditError(f"a criterion ranks the nodes of one layer, got those of {sorted(rows)}")
    if isinstance(nodes, LiveNodes):
        return nodes, torch.arange(len(nodes), device="cpu")
    ((number, at),) = rows.items()
    return net.layers[number], at.long().cpu()


def _recorded(net: Graph, layer: LiveNodes) -> int | str:
    """Returns how recorders call a layer: a space by its name, others by their number."""
    return layer.name if isinstance(layer, Space) else layer.index


@dataclass(frozen=True)
class NodeNorm(NodeScored):
    """The norm of the weights of a node: all of them, those that lead to it, or those it owns (Li
    et al., 2017).

    Attributes:
        side: "both", "incoming" or "outgoing". The bias and the entries of norms count as incoming.
    """

    side: Side = "both"

    def refusal(self, net: Any, number: int) -> str:
        """Returns nothing: every layer has weights."""
        return ""

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns the norm of every node."""
        layer, rows = place_of(net, candidates)
        return node_norms(net, layer, self.side)[rows]


@dataclass(frozen=True)
class MeanActivation(NodeScored):
    """The mean activation of a node over samples.

    Attributes:
        statistic: "mean" for |mean| (Molchanov et al., 2017, as a baseline), "rms" for the root
            mean square, and "rate" for the share of samples in which the node is above 0, which is
            1 minus the average percentage of zeros (Hu et al., 2016).
        window: the number of steps to record.
    """

    statistic: Literal["mean", "rms", "rate"] = "mean"
    window: int = WINDOW

    def recorders(self, net: Any, candidates: Any) -> dict[str, Recorder]:
        """Returns a recorder of the activations."""
        layer, _ = place_of(net, candidates)
        recorder = ActivationRecorder(_recorded(net, layer), window=self.window)
        return {_evidence("activations", layer): recorder}

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns the statistic of every node."""
        layer, rows = place_of(net, candidates)
        recorder = seen(evidence, _evidence("activations", layer), self)
        if self.statistic == "rate":
            found = recorder.firing_rate
        elif self.statistic == "rms":
            found = (recorder.mean.square() + recorder.variance).sqrt()
        else:
            found = recorder.mean.abs()
        return found.cpu()[rows]


@dataclass(frozen=True)
class NodeTaylor(NodeScored):
    """|a·g|: how much the loss changes, in first order, if the node is set to 0 (Molchanov et al.,
    2017).

    It is the mean over samples, each of which is a row of the batch; positions and tokens of a
    sample are summed first.

    Attributes:
        window: the number of steps to record.
    """

    window: int = WINDOW

    def recorders(self, net: Any, candidates: Any) -> dict[str, Recorder]:
        """Returns a recorder of activations times gradients."""
        layer, _ = place_of(net, candidates)
        recorder = SaliencyRecorder(_recorded(net, layer), window=self.window)
        return {_evidence("saliency", layer): recorder}

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns the mean |a·g| of every node."""
        layer, rows = place_of(net, candidates)
        return seen(evidence, _evidence("saliency", layer), self).saliency().cpu()[rows]


@dataclass(frozen=True)
class _ByCovariance(NodeScored):
    """A criterion that needs the covariance between the nodes of a layer.

    Attributes:
        window: the number of steps to record.
    """

    window: int = WINDOW

    def recorders(self, net: Any, candidates: Any) -> dict[str, Recorder]:
        """Returns a recorder of the covariance between the nodes."""
        layer, _ = place_of(net, candidates)
        name = _recorded(net, layer)
        recorder = CovarianceRecorder(name, name, window=self.window)
        return {_evidence("covariance", layer): recorder}

    def _weighted(self, net: Graph, layer: LiveNodes, evidence: Evidence) -> Tensor:
        """Returns the covariance of what each node sends on: its activation times the norm of its
        outgoing weights.
        """
        recorder = seen(evidence, _evidence("covariance", layer), self)
        norms = node_norms(net, layer, "outgoing").double()
        # Where activations alone read the nodes, all count alike.
        if not bool(norms.any()):
            norms = torch.ones_like(norms)
        return recorder.covariance().cpu() * norms * norms[:, None]


@dataclass(frozen=True)
class ColumnSubset(_ByCovariance):
    """Ranks nodes by how well they reconstruct the outputs of the layer, chosen one by one.

    Each is the one with the largest part that those before it cannot reconstruct: a pivoted
    Cholesky factorisation of the covariance, weighted by the norms of the outgoing weights. Nodes
    that are no candidates stay, and so reconstruct others. Scores are ranks, the last chosen node
    has 1: in the scope "model" all spaces lose about the same share.
    """

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns in which order nodes are chosen, the first one with the largest number."""
        layer, rows = place_of(net, candidates)
        covariance = self._weighted(net, layer, evidence)
        stays = torch.ones(len(covariance), dtype=torch.bool)
        stays[rows] = False
        order = column_subset(covariance, torch.ones(len(stays)), len(rows), held=stays, bias=False)
        found = torch.zeros(len(stays), dtype=torch.float64)
        found[order] = torch.arange(len(rows), 0, -1, dtype=torch.float64)
        return found[rows]


@dataclass(frozen=True)
class Redundancy(_ByCovariance):
    """The part of a node's output that the other nodes cannot reconstruct.

    That is the variance of the node that the others do not explain linearly, times the squared norm
    of its outgoing weights. Nodes are eliminated one after the other, the most redundant first, so
    that of two equal nodes one stays; n nodes take n²·n/3 multiply-adds.
    """

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns what each node costs when it is eliminated, never less than those before it."""
        layer, rows = place_of(net, candidates)
        covariance = self._weighted(net, layer, evidence)
        return eliminated(covariance, rows)


def eliminated(covariance: Tensor, rows: Tensor) -> Tensor:
    """Returns the unexplained variance of nodes, eliminated one by one from the smallest on, as a
    running maximum, [rows].

    Args:
        covariance: [n, n] float64.
        rows: the nodes that may be eliminated; the others explain them for ever.
    """
    size = covariance.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    damped = covariance + 1e-10 * size * torch.eye(len(covariance), dtype=covariance.dtype)
    precision = torch.linalg.inv(damped)
    left = torch.arange(len(covariance))
    may_leave = torch.zeros(len(covariance), dtype=torch.bool)
    may_leave[rows] = True
    found = torch.zeros(len(covariance), dtype=torch.float64)
    highest = 0.0
    for _ in range(len(rows)):
        # The variance of a node that the others do not explain is 1 over its precision.
        unexplained = (1 / precision.diagonal()).masked_fill(~may_leave[left], torch.inf)
        place = int(unexplained.argmin())
        highest = max(highest, float(unexplained[place]))
        found[left[place]] = highest
        stays = torch.arange(len(left)) != place
        column = precision[stays, place]
        rest = precision[stays][:, stays]
        precision = rest - torch.outer(column, column) / precision[place, place]
        left = left[stays]
    return found[rows]


def node_norms(net: Graph, layer: Any, side: Side = "both") -> Tensor:
    """Returns the norm of the weights of each node, [n] on the CPU."""
    if isinstance(layer, Space):
        return layer.norms(side)
    total = torch.zeros(len(layer), dtype=torch.float64, device=net.device)
    if side != "outgoing" and not layer.is_sensory:
        total += layer.values().detach().double().square()
    if side != "outgoing":
        for t in net.entering(layer.index):
            transition = net.transitions[t]
            squares = transition.values().detach().double().square()
            total.index_add_(0, transition.child.long(), squares)
    if side != "incoming":
        for t in net.leaving(layer.index):
            transition = net.transitions[t]
            squares = transition.values().detach().double().square()
            total.index_add_(0, transition.topology.parents().long(), squares)
    return total.sqrt().cpu()


def _evidence(what: str, layer: LiveNodes) -> str:
    name = layer.name if isinstance(layer, Space) else f"layer {layer.index}"
    return f"{what} of {name}"


@dataclass(frozen=True)
class RandomNodes(Random):
    """Equal chances for all nodes: the control for every other criterion."""


# What `by=` means for nodes.
NODES: dict[str, Callable[[int], Any]] = {
    "norm": lambda window: NodeNorm(),
    "incoming": lambda window: NodeNorm("incoming"),
    "outgoing": lambda window: NodeNorm("outgoing"),
    "activation": lambda window: MeanActivation(window=window),
    "taylor": NodeTaylor,
    "subset": ColumnSubset,
    "redundancy": Redundancy,
    "random": lambda window: RandomNodes(),
}
