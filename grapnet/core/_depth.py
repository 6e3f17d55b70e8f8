"""Depth: layers that come into a net and leave it, and transitions that skip layers.

What is asked for is data, so that copies of a net and other processes can do the same. From it
`deepened` makes the modules and the change of a commit; the net itself is not touched.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ._activation import is_exact_behind
from ._change import BlockParameter, DepthChange, Labels, NodeRecord, Pairs
from ._coordinates import Coordinates
from ._errors import EditError
from ._index_map import empty_positions, flatnonzero
from ._layer import Layer
from ._resolve import checked_activation, draw
from ._transition import (
    Topology,
    Transition,
    full_topology,
    require_countable,
    topology_from_pairs,
)

if TYPE_CHECKING:
    from ._graph import Graph
    from ._prepare import View


@dataclass(frozen=True, eq=False)
class LayerInsertion:
    """A hidden layer that comes, with the relations that enter it.

    The values are None after the journal has dropped them; then they are 0.

    Attributes:
        after: the number of the layer that it comes behind; several come in the order in which
            they are asked for.
        nodes: its nodes.
        activation: the activation of nodes that are added to it later.
        dropout: its dropout probability.
        topology: the relations that enter it.
        biases: one per node.
        weights: one per relation.
        frozen_biases: the positions of frozen biases.
        frozen_weights: the positions of frozen weights.
    """

    after: int
    nodes: NodeRecord
    activation: str
    dropout: float
    topology: Topology
    biases: Tensor | None
    weights: Tensor | None
    frozen_biases: Tensor
    frozen_weights: Tensor

    @classmethod
    def of(cls, after: int, layer: Layer, entering: Transition) -> "LayerInsertion":
        """Returns the insertion that brings a layer back."""
        return cls(
            after,
            NodeRecord(layer.uid, layer._owner_names, layer._activation_names),
            layer.default_activation,
            layer.dropout,
            entering.topology,
            layer.values().detach().clone(),
            entering.values().detach().clone(),
            layer.frozen_at,
            entering.frozen_at,
        )

    def without_values(self) -> "LayerInsertion":
        """Returns the insertion without values, as the journal keeps it."""
        return replace(self, biases=None, weights=None)

    def modules(self, graph: "Graph") -> tuple[Layer, Transition]:
        """Returns the layer and the transition that enters it, for a net."""
        example = graph.transitions[0].weight.detach()
        biases = example.new_zeros(len(self.nodes))
        if self.biases is not None:
            biases = self.biases.to(example, copy=True)
        layer = Layer(self.nodes.uids, biases, self.activation)
        layer._renew(self.nodes.uids, self.nodes.activations, self.nodes.owners)
        layer._hold(self.frozen_biases.to(graph.device))
        layer.dropout = self.dropout
        entering = _made_transition(graph, self.topology, self.weights, self.frozen_weights)
        return layer, entering


class LayerBefore(NamedTuple):
    """The properties of the layer before one that an edit inserts."""

    activations: Labels  # one per node
    default: str  # the activation of nodes that are added later
    has_dropout: bool

    @classmethod
    def of(cls, layer: Layer) -> "LayerBefore":
        """Returns the properties of a layer."""
        return cls(layer._activation_names, layer.default_activation, layer.dropout > 0)

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.activations)


@dataclass(frozen=True, eq=False)
class WantedLayer:
    """A layer that an edit inserts, before its weights are drawn.

    Attributes:
        after: the number of the layer that it comes behind.
        before: what it receives.
        nodes: its nodes.
        default: the activation of nodes that are added later.
        is_full: whether every node has relations from all nodes of the layer before.
    """

    after: int
    before: LayerBefore
    nodes: NodeRecord
    default: str
    is_full: bool

    @classmethod
    def of(
        cls,
        after: int,
        before: LayerBefore,
        uids: Tensor,
        *,
        init: str,
        activation: str | None,
        owner: str | None,
    ) -> "WantedLayer":
        """Returns the layer; raises EditError if its activation would change what the net
        returns.
        """
        default = before.default
        surplus = Labels.uniform(default, len(uids) - before.size)
        activations = Labels.join([before.activations, surplus]).compact()
        if activation is not None:
            checked_activation(activation)
            default = activation
            activations = Labels.uniform(activation, len(uids))
        for received, _ in before.activations.kinds():
            applied = str(received) if activation is None else activation
            if not is_exact_behind(applied, str(received), is_scaled=before.has_dropout):
                behind = f"{received!r} with dropout" if before.has_dropout else repr(received)
                raise EditError(
                    f"{applied!r} behind {behind} would change what the net returns. Insert the"
                    ' layer with activation="identity"; set_activation gives the nodes another'
                    " one afterwards"
                )
        nodes = NodeRecord(uids, Labels.uniform(owner, len(uids)), activations)
        return cls(after, before, nodes, default, init == "net2deeper")

    @property
    def has_surplus(self) -> bool:
        """True if it has more nodes than the layer before."""
        return len(self.nodes) > self.before.size

    def as_layer_before(self) -> LayerBefore:
        """Returns what it gives to another layer that comes behind it."""
        return LayerBefore(self.nodes.activations, self.default, has_dropout=False)

    def insertion(self, example: Tensor, generator: torch.Generator | None) -> LayerInsertion:
        """Returns the insertion with its weights and biases; those of surplus nodes are drawn."""
        size = len(self.nodes)
        count = self.before.size
        topology = self._topology(example.device)
        # A node behind one of the layer before has the weight 1 for it, and 0 for others.
        weights = (topology.parents() == topology.child).to(example)
        biases = example.new_zeros(size)
        if self.has_surplus:
            fan_in = torch.full((size,), count, device=example.device)
            at = flatnonzero(topology.child >= count)
            scale = fan_in.index_select(0, topology.child.index_select(0, at))
            weights[at.long()] = draw("linear", scale, example, generator)
            biases[count:] = draw("linear", fan_in[count:], example, generator)
        none = empty_positions()
        return LayerInsertion(
            self.after, self.nodes, self.default, 0.0, topology, biases, weights, none, none
        )

    def _topology(self, device: torch.device) -> Topology:
        """Returns the relations that enter the layer."""
        size = len(self.nodes)
        count = self.before.size
        per_parent = size if self.is_full else 1 + size - count
        require_countable(count * per_parent, "the transition to the new layer", EditError)
        if self.is_full:
            return full_topology(count, size, device)
        rows = torch.arange(count, device="cpu")
        surplus = torch.arange(count, size, device="cpu").expand(count, -1)
        # [count, 1 + surplus]
        children = torch.cat([rows[:, None], surplus], dim=1)
        parents = rows.repeat_interleave(per_parent)
        return topology_from_pairs(parents, children.reshape(-1), count, size, device)


@dataclass(frozen=True)
class LayerRemoval:
    """A hidden layer that leaves, with the relations that enter it."""

    number: int

    def without_values(self) -> "LayerRemoval":
        """Returns itself: it has no values."""
        return self


@dataclass(frozen=True, eq=False)
class SkipInsertion:
    """A transition that comes and skips layers; see `LayerInsertion`.

    Attributes:
        source: the number of the layer that it leads from.
        target: the number of the layer that it leads to.
        topology: its relations.
        weights: one per relation.
        frozen_weights: the positions of frozen weights.
        place: its number among the transitions afterwards; None for the last one.
    """

    source: int
    target: int
    topology: Topology
    weights: Tensor | None
    frozen_weights: Tensor
    place: int | None = None

    @classmethod
    def empty(cls, graph: "Graph", source: int, target: int) -> "SkipInsertion":
        """Returns the insertion of a transition without relations."""
        device = graph.device
        ptr = torch.zeros(len(graph.layers[source]) + 1, dtype=torch.int32, device=device)
        child = torch.empty(0, dtype=torch.int32, device=device)
        topology = Topology(ptr, child, len(graph.layers[target]))
        return cls(source, target, topology, None, empty_positions())

    def without_values(self) -> "SkipInsertion":
        """Returns the insertion without values, as the journal keeps it."""
        return replace(self, weights=None)

    def module(self, graph: "Graph") -> Transition:
        """Returns the transition, for a net."""
        return _made_transition(graph, self.topology, self.weights, self.frozen_weights)


@dataclass(frozen=True)
class SkipRemoval:
    """A transition that skips layers and leaves, with its relations."""

    source: int
    target: int

    def without_values(self) -> "SkipRemoval":
        """Returns itself: it has no values."""
        return self


Asked = LayerInsertion | LayerRemoval | SkipInsertion | SkipRemoval


def _made_transition(
    graph: "Graph", topology: Topology, weights: Tensor | None, frozen: Tensor
) -> Transition:
    """Returns a transition for a net; the weights are 0 if the journal has dropped them."""
    example = graph.transitions[0].weight.detach()
    topology = topology.to(graph.device)
    values = example.new_zeros(topology.n_relations)
    if weights is not None:
        values = weights.to(example, copy=True)
    found = Transition(topology, values)
    found._hold(frozen.to(graph.device))
    return found


@dataclass(frozen=True, eq=False)
class Arrangement:
    """The layers and transitions of a net at one depth.

    Attributes:
        net: the net, held weakly.
        layers: the layers, in order.
        transitions: the transitions, in order.
        ends: the numbers of the layers that each transition leads from and to.
        topologies: the wiring of each transition.
    """

    net: "weakref.ref[Graph]"
    layers: tuple[Layer, ...]
    transitions: tuple[Transition, ...]
    ends: tuple[tuple[int, int], ...]
    topologies: tuple[Topology, ...]

    @classmethod
    def of(cls, graph: "Graph") -> "Arrangement":
        """Returns what a net has at present."""
        return cls(
            weakref.ref(graph),
            tuple(graph.layers),
            tuple(graph.transitions),
            tuple(graph.ends),
            tuple(transition.topology for transition in graph.transitions),
        )

    def prepare(self, graph: "Graph") -> list[Callable[[], None]]:
        """Returns the assignments that bring the net to this depth."""
        example = graph.transitions[0].weight
        present = _numbers((*graph.layers, *graph.transitions))
        for module in (*self.layers, *self.transitions):
            if id(module) not in present:
                # One that comes back has missed where the net went.
                own = module.parameter
                if own.device != example.device or own.dtype != example.dtype:
                    module.to(example.device, example.dtype)
                module.training = graph.training
        for layer in self.layers:
            layer._bind(graph)
        found: list[Callable[[], None]] = []
        for transition, ends, topology in zip(
            self.transitions, self.ends, self.topologies, strict=True
        ):
            place = {"source": ends[0], "target": ends[1], "topology": topology.to(graph.device)}
            found.append(partial(vars(transition).update, place))
        for name, modules in (("layers", self.layers), ("transitions", self.transitions)):
            # The lists stay the same objects.
            kept = vars(vars(graph)["_modules"][name])
            numbered = {str(number): module for number, module in enumerate(modules)}
            found.append(partial(kept.__setitem__, "_modules", numbered))
        return found

    def view(self, graph: "Graph", view: "View") -> "View":
        """Returns what forward passes read at this depth, `view` being that of the layers that the
        net has at present.
        """
        layers = _numbers(graph.layers)
        rosters = []
        biases = []
        for layer in self.layers:
            number = layers.get(id(layer))
            rosters.append(layer._roster if number is None else view.rosters[number])
            if number is None:
                biases.append(layer.vector)
            else:
                biases.append(view.biases[number])
        transitions = _numbers(graph.transitions)
        weights = []
        for transition in self.transitions:
            t = transitions.get(id(transition))
            weights.append(transition.vector if t is None else view.weights[t])
        topologies = tuple(topology.to(graph.device) for topology in self.topologies)
        return view._replace(
            rosters=tuple(rosters),
            biases=tuple(biases),
            topologies=topologies,
            weights=tuple(weights),
            ends=self.ends,
        )

    def stores(self) -> dict[str, Coordinates]:
        """Returns the stores of the coordinates, by the names of the Parameters."""
        found: dict[str, Coordinates] = {}
        for number, layer in enumerate(self.layers):
            if not layer.is_sensory:
                found[f"layers.{number}.bias"] = layer
        for t, transition in enumerate(self.transitions):
            found[f"transitions.{t}.weight"] = transition
        return found

    def entering(self, number: int) -> int:
        """Returns the number of the transition from the layer before to a layer."""
        return self.ends.index((number - 1, number))

    def skips_beside(self, other: "Arrangement") -> list[int]:
        """Returns the transitions that skip layers and that the other arrangement does not have."""
        found = _others(self.transitions, other.transitions)
        return [t for t in found if self.ends[t][1] > self.ends[t][0] + 1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Arrangement":
        # Only the copy of the net itself has copies of the modules.
        copied = memo.get(id(self.net()))
        if copied is None:
            return self
        layers = tuple(copy.deepcopy(layer, memo) for layer in self.layers)
        transitions = tuple(copy.deepcopy(transition, memo) for transition in self.transitions)
        return replace(self, net=weakref.ref(copied), layers=layers, transitions=transitions)


def deepened(graph: "Graph", asked: Sequence[Asked]) -> DepthChange:
    """Returns the change that inserts and removes layers of a net.

    Raises:
        EditError: the layers around those that come or leave do not fit each other.
    """
    before = Arrangement.of(graph)
    after = _Chain(graph, asked).arrangement()
    coming = tuple(_parameters(after, before))
    leaving = tuple(_parameters(before, after))
    for one in coming:
        # Where the neighbours are not trained, neither is what comes.
        if one.beside is not None:
            one.parameter.requires_grad_(one.beside.requires_grad)
    names = {id(store): name for name, store in before.stores().items()}
    renamed = {}
    for name, store in after.stores().items():
        old = names.get(id(store), name)
        if old != name:
            renamed[old] = name
    return DepthChange(
        came=_paths(after, before),
        left=_paths(before, after),
        born=_uids(after, before),
        gone=_uids(before, after),
        renamed=renamed,
        coming=coming,
        leaving=leaving,
        asked=tuple(asked),
        relations_born=_pairs(after, before),
        relations_gone=_pairs(before, after),
        before=before,
        after=after,
    )


def with_way_back(change: DepthChange) -> DepthChange:
    """Returns a change of depth with the operations that revert it, in `back`."""
    before = change.before
    after = change.after
    found: list[Asked] = [LayerRemoval(n) for n in _others(after.layers, before.layers)]
    numbers = _numbers(after.layers)
    place = 0
    for number, layer in enumerate(before.layers):
        if id(layer) in numbers:
            place = numbers[id(layer)]
            continue
        entering = before.transitions[before.entering(number)]
        found.append(LayerInsertion.of(place, layer, entering))
    for t in after.skips_beside(before):
        found.append(SkipRemoval(*after.ends[t]))
    for t in before.skips_beside(after):
        # The layers at both of its ends stay.
        source, target = (numbers[id(before.layers[number])] for number in before.ends[t])
        skip = before.transitions[t]
        weights = skip.values().detach().clone()
        found.append(SkipInsertion(source, target, skip.topology, weights, skip.frozen_at, place=t))
    return replace(change, back=tuple(found))


class _Chain:
    """The layers of a net after an edit, and the transitions between them."""

    def __init__(self, graph: "Graph", asked: Sequence[Asked]) -> None:
        self._graph = graph
        self._removed = {one.number for one in asked if isinstance(one, LayerRemoval)}
        self._skips = [one for one in asked if isinstance(one, SkipInsertion)]
        self._skips_removed = [
            (one.source, one.target) for one in asked if isinstance(one, SkipRemoval)
        ]
        self._layers: list[Layer] = []
        # the number that each layer has before the edit, None for one that comes
        self._origins: list[int | None] = []
        # the transitions that enter layers that come, by the numbers of these
        self._entering: dict[int, Transition] = {}
        for number, layer in enumerate(graph.layers):
            if number not in self._removed:
                self._add(layer, number)
            for one in asked:
                if isinstance(one, LayerInsertion) and one.after == number:
                    self._insert(one)

    def _add(self, layer: Layer, origin: int | None) -> None:
        self._layers.append(layer)
        self._origins.append(origin)

    def _insert(self, one: LayerInsertion) -> None:
        before = self._layers[-1]
        if one.topology.n_parents != len(before):
            raise EditError(
                f"the layer that comes after layer {one.after} was made for"
                f" {one.topology.n_parents} nodes before it, and there would be {len(before)};"
                " remove layers in another edit"
            )
        layer, entering = one.modules(self._graph)
        self._entering[len(self._layers)] = entering
        self._add(layer, None)

    def arrangement(self) -> Arrangement:
        """Returns the layers and transitions after the edit."""
        found: list[tuple[Transition, tuple[int, int], Topology]] = []
        places = {origin: n for n, origin in enumerate(self._origins) if origin is not None}
        for transition in self._graph.transitions:
            source = transition.source
            target = transition.target
            if target == source + 1:
                # The relations between two layers that follow each other leave the last layer
                # that comes between them; those that enter a removed layer leave with it.
                if target not in self._removed:
                    found += self._between(transition, places[target])
                continue
            for number in (source, target):
                if number in self._removed:
                    raise EditError(
                        f"layer {number} cannot be removed: a transition that skips layers leads"
                        f" from layer {source} to layer {target}. Remove it in an edit before:"
                        f" edit.remove_skip({source}, {target})"
                    )
            if (source, target) not in self._skips_removed:
                found.append((transition, (places[source], places[target]), transition.topology))
        for one in self._skips:
            for number in (one.source, one.target):
                if number in self._removed:
                    raise EditError(f"this edit removes layer {number}, where a skip would end")
            place = len(found) if one.place is None else one.place
            skip = one.module(self._graph)
            found.insert(place, (skip, (places[one.source], places[one.target]), skip.topology))
        ends = tuple(place for _, place, _ in found)
        for number in range(1, len(self._layers)):
            if (number - 1, number) not in ends:
                raise EditError(
                    f"no transition leads from layer {self._name(number - 1)} to the layer after"
                    " it, where layers would come or leave"
                )
        for place in ends:
            if ends.count(place) > 1:
                raise EditError(
                    f"two transitions would lead from layer {self._name(place[0])} to layer"
                    f" {self._name(place[1])}"
                )
        return Arrangement(
            weakref.ref(self._graph),
            tuple(self._layers),
            tuple(transition for transition, _, _ in found),
            ends,
            tuple(topology for _, _, topology in found),
        )

    def _name(self, number: int) -> str:
        origin = self._origins[number]
        return "(new)" if origin is None else str(origin)

    def _between(
        self, transition: Transition, target: int
    ) -> "Iterator[tuple[Transition, tuple[int, int], Topology]]":
        """Yields the transitions that enter the new layers before a layer, and the one that enters
        the layer itself.
        """
        first = target
        while self._origins[first - 1] is None:
            first -= 1
        for number in range(first, target):
            entering = self._entering[number]
            yield entering, (number - 1, number), entering.topology
        topology = self._passed_on(transition, target)
        yield transition, (target - 1, target), topology

    def _passed_on(self, transition: Transition, target: int) -> Topology:
        """Returns the wiring of a transition whose parents are the nodes of the layer before its
        target, row by row.
        """
        topology = transition.topology
        size = len(self._layers[target - 1])
        ptr = topology.ptr
        if size == topology.n_parents:
            return topology
        comes = self._origins[target - 1] is None
        if size > topology.n_parents and comes:
            surplus = ptr[-1:].expand(size - topology.n_parents)
            return Topology(torch.cat([ptr, surplus]), topology.child, topology.n_children)
        if size < topology.n_parents and int(ptr[size]) == topology.n_relations:
            return Topology(ptr[: size + 1], topology.child, topology.n_children)
        raise EditError(
            f"the relations that leave layer {transition.source} would pass on to the nodes of the"
            f" layer before, row by row, and there are {topology.n_parents} and {size} of them. A"
            " layer can be removed if the layer before it has as many nodes"
        )


def _numbers(modules: Sequence[nn.Module]) -> dict[int, int]:
    """Returns the places of modules, by their ids."""
    return {id(module): number for number, module in enumerate(modules)}


def _others(modules: Sequence[nn.Module], known: Sequence[nn.Module]) -> list[int]:
    """Returns the places of the modules that are not among the known ones."""
    kept = _numbers(known)
    return [number for number, module in enumerate(modules) if id(module) not in kept]


def _paths(one: Arrangement, other: Arrangement) -> tuple[str, ...]:
    """Returns the paths of the layers and skips that the other arrangement does not have."""
    layers = [f"layers.{number}" for number in _others(one.layers, other.layers)]
    return (*layers, *(f"transitions.{t}" for t in one.skips_beside(other)))


def _uids(one: Arrangement, other: Arrangement) -> Tensor:
    """Returns the nodes of the layers that the other arrangement does not have."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.cat([none, *(one.layers[n].uid for n in _others(one.layers, other.layers))])


def _parameters(one: Arrangement, other: Arrangement) -> Iterator[BlockParameter]:
    """Yields the Parameters that the other arrangement does not have.

    Each comes before the next of its kind that both have, so that the order stays that of
    `net.parameters()`, or behind the last one.
    """
    # The sensory layer has no Parameter.
    kinds = (("layers", "bias", one.layers, other.layers, 1),)
    kinds += (("transitions", "weight", one.transitions, other.transitions, 0),)
    for kind, name, stores, others, first in kinds:
        known = _numbers(others)
        shared = [n for n in range(first, len(stores)) if id(stores[n]) in known]
        for number in _others(stores, others):
            later = [n for n in shared if n > number]
            beside = later[0] if later else shared[-1]
            block = f"{kind}.{number}"
            if not later:
                # Several at the end are placed together, in their order.
                block = kind
            yield BlockParameter(
                f"{kind}.{number}.{name}",
                block,
                stores[number].parameter,
                beside=stores[beside].parameter,
                is_before=bool(later),
            )


def _pairs(one: Arrangement, other: Arrangement) -> Pairs:
    """Returns the relations of transitions that have other ends in the other arrangement, or are
    not there.
    """
    known = {}
    for transition, (source, target) in zip(other.transitions, other.ends, strict=True):
        known[id(transition)] = (other.layers[source], other.layers[target])
    parents = [torch.empty(0, dtype=torch.int32, device="cpu")]
    children = [torch.empty(0, dtype=torch.int32, device="cpu")]
    for t, transition in enumerate(one.transitions):
        source, target = (one.layers[number] for number in one.ends[t])
        ends = known.get(id(transition))
        if ends is not None and ends[0] is source and ends[1] is target:
            continue
        topology = one.topologies[t]
        parents.append(source.uid[topology.parents().cpu().long()].int())
        children.append(target.uid[topology.child.cpu().long()].int())
    return Pairs(torch.cat(parents), torch.cat(children))
