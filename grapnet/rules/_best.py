"""Growth that chooses: the layer that pays most, and how far to go."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from grapnet._network import GrapNet
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._space import Space

from ._rule import Layers, Recorder, RuleContext, as_names, seen_evidence, sources_of, targets_of
from ._tiny import (
    BottleneckRecorder,
    OptimalNodes,
    add_to_layer,
    add_to_space,
    require_no_removals,
    why_not_optimal,
)
from ._widen import GrowWidth, evidence_of_bottleneck

# Amplitudes that a search tries, from small steps to large ones.
SCALES = tuple(2.0**power for power in range(-12, 7))


@dataclass(frozen=True)
class GrowBest:
    """Adds the nodes that lower the loss most per parameter, in whichever layers they are.

    The candidates are the optimal nodes of every layer, those of `GrowWidth(init="tiny")`, and they
    are ranked by the decrease of the loss that they promise to first order, divided by the number
    of their weights and biases. Nodes are added in this order as long as the budget allows. A layer
    next to one that grows waits for another call, since what was recorded of it no longer holds.

    Attributes:
        nodes: the most nodes to add; or
        parameters: the most weights and biases to add; or both.
        layers: numbers of hidden layers, or names of spaces of an adopted model; by default all
            hidden layers, and all spaces that can grow in this way.
        scale: the amplitude, as in `GrowWidth`; `search_scale` chooses one.
        owner: the owner of the new nodes.

    Examples:
        >>> import grapnet as gn
        >>> from grapnet.rules import RuleManager
        >>> net = gn.GrapNet([16, 4, 12, 2])
        >>> manager = RuleManager()
        >>> _ = manager.add(GrowBest(parameters=100, scale=0.1))
        >>> with manager.recording(net):
        ...     net(torch.randn(64, 16)).square().mean().backward()
        >>> commit = manager.apply(net)
        >>> net.count().relations + sum(net.sizes[1:]) <= 16 * 4 + 4 * 12 + 12 * 2 + 18 + 100
        True
    """

    nodes: int | None = None
    parameters: int | None = None
    layers: Layers | None = None
    scale: float = 1.0
    owner: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", as_names(self.layers))
        if self.nodes is None and self.parameters is None:
            raise EditError("say how much to grow: nodes= or parameters=")
        for limit in (self.nodes, self.parameters):
            if limit is not None and limit < 1:
                raise EditError(f"nodes and parameters are at least 1, got {limit!r}")
        if not 0 < self.scale < float("inf"):
            raise EditError(f"scale is a positive number, got {self.scale!r}")

    def recorders(self, net: GrapNet | Adopted) -> dict[str, Recorder]:
        """Returns a recorder for each layer or space that may grow."""
        found: dict[str, Recorder] = {}
        for layer in self._candidates(net):
            found[evidence_of_bottleneck(layer)] = BottleneckRecorder(net, layer)
        return found

    def __call__(self, net: Any, edit: Any, context: RuleContext) -> None:
        """Adds the nodes."""
        require_no_removals(edit)
        found: dict[int | str, OptimalNodes] = {}
        for layer in self._candidates(net):
            found[layer] = seen_evidence(context, evidence_of_bottleneck(layer), "GrowBest").nodes()
        for layer, count in self._shares(net, found, context).items():
            nodes = found[layer].scaled(count, self.scale)
            if isinstance(net, Adopted):
                add_to_space(net, edit, net.space(str(layer)), nodes, self.owner)
            else:
                net.execution.require_sum("GrowBest", net.leaving(int(layer)))
                add_to_layer(net, edit, int(layer), nodes, self.owner)

    def _candidates(self, net: GrapNet | Adopted) -> list[int | str]:
        """Returns the numbers of the layers, or the names of the spaces, that may grow."""
        if self.layers is not None:
            names = as_names(self.layers) or ()
            if isinstance(net, Adopted):
                return list(names)
            return sorted({int(name) % len(net.layers) for name in names})
        if not isinstance(net, Adopted):
            return list(range(1, len(net.layers) - 1))
        spaces = [space for space in net.spaces if not why_not_optimal(net, space)]
        net.prove(spaces)
        names = [space.name for space in spaces if space.verdict in ("exact", "unproved")]
        if not names:
            raise EditError("no space of this model can grow by TINY; see GrowWidth")
        return list(names)

    def _shares(
        self, net: Graph, found: Mapping[int | str, OptimalNodes], context: RuleContext
    ) -> dict[int | str, int]:
        """Returns how many nodes the layers get."""
        places = []
        rates = []
        for layer, nodes in found.items():
            places += [layer] * len(nodes)
            rates.append(nodes.gains / _parameters_of_a_node(nodes))
        order = torch.cat(rates).argsort(descending=True, stable=True).tolist()
        left_nodes = _or_unlimited(self.nodes)
        left_parameters = _or_unlimited(self.parameters)
        left_relations = _or_unlimited(context.budget.edits)
        shares: dict[int | str, int] = {}
        for place in order:
            layer = places[place]
            cost = _parameters_of_a_node(found[layer])
            beside = any(layer != other and _are_neighbours(net, layer, other) for other in shares)
            if beside or left_nodes < 1 or cost > left_parameters or cost - 1 > left_relations:
                continue
            shares[layer] = shares.get(layer, 0) + 1
            left_nodes -= 1
            left_parameters -= cost
            left_relations -= cost - 1
        return shares


def _or_unlimited(limit: int | None) -> float:
    return float("inf") if limit is None else limit


def _parameters_of_a_node(nodes: OptimalNodes) -> int:
    """Returns the number of weights of each node, and its bias."""
    return nodes.incoming.shape[1] + nodes.outgoing.shape[1]


def _are_neighbours(net: Any, one: int | str, other: int | str) -> bool:
    """Returns whether two layers, or spaces, share a transition or a tensor."""
    if not isinstance(net, Adopted):
        return other in {*sources_of(net, int(one)), *targets_of(net, int(one))}
    tensors = []
    for name in (one, other):
        space: Space = net.space(str(name))
        tensors.append({*space.writers, *space.readers})
    return bool(tensors[0] & tensors[1])


R = TypeVar("R", GrowWidth, GrowBest)


def search_scale(
    rule: R,
    net: GrapNet | Adopted,
    evidence: Mapping[str, Any],
    measure: Callable[[], float],
    *,
    scales: Iterable[float] = SCALES,
) -> R:
    """Returns a rule with the `scale` at which a growth lowers a loss most.

    Each scale is tried in a trial, which is undone. The random numbers of a rule are the same ones
    each time. If no scale lowers the loss, the result has the smallest.

    Args:
        rule: what grows.
        net: the net, or the adopted model.
        evidence: the recorders of the rule, which have seen something.
        measure: returns the loss of the net as it is, on data that is neither trained on nor
            reported.
        scales: the scales to try.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3, 2], generator=torch.Generator().manual_seed(0))
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        >>> def measure():
        ...     return net(x).square().mean()
        >>> rule = GrowWidth(1, nodes=2, init="tiny")
        >>> recorders = rule.recorders(net)
        >>> recorders["bottleneck of layer 1"].arm(net)
        >>> before = measure()
        >>> before.backward()
        >>> rule = search_scale(rule, net, recorders, measure)
        >>> with net.edit() as edit:
        ...     rule(net, edit, RuleContext(evidence=recorders))
        >>> bool(measure() < before)
        True
    """
    tried = sorted(scales)
    with torch.no_grad():
        best = float(measure())
    chosen = tried[0]
    for scale in tried:
        candidate: Any = replace(rule, scale=scale)
        generator = torch.Generator().manual_seed(0)
        with net.edit(trial=True, generator=generator) as edit:
            candidate(net, edit, RuleContext(evidence=evidence))
            edit.commit()
            with torch.no_grad():
                loss = float(measure())
        if loss < best:
            best = loss
            chosen = scale
    return replace(rule, scale=chosen)
