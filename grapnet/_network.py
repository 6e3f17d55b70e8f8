"""GrapNet: the graph as an nn.Module."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ._torch import untraced
from .core._activation import activation_function
from .core._commit import settle, unsettled
from .core._coordinates import Coordinates, note_read
from .core._errors import EditError, TopologyError
from .core._graph import Graph, chain_ends
from .core._index_map import as_tensor
from .core._layer import Layer
from .core._resolve import Requests, draw, resolve
from .core._transition import (
    Topology,
    Transition,
    erk_densities,
    random_tiles,
    random_topology,
    require_tile,
    topology_from_pairs,
)
from .execution._manager import Execution, Step
from .execution._reference import walk
from .execution._snapshot import MOST_CELLS, Snapshot, trainable_modules

if TYPE_CHECKING:
    import networkx


class GrapNet(Graph):
    """A feed-forward network whose relations and nodes can be edited while it trains.

    By default it is fully connected and initialized like a stack of `nn.Linear` of the same sizes.

    Args:
        sizes: the number of nodes of each layer, the sensory one first; a layer may be empty.
        skips: pairs of layers between which relations skip others, such as `[(0, 2)]`; a layer adds
            up what all transitions bring. `edit.insert_skip` adds some later.
        activation: the activation of the hidden layers ("relu", "gelu", "tanh", …; the output is
            linear), or one name for every layer after the sensory one.
        density: the share of possible relations that exist at first.
        distribution: "uniform" gives every transition this density, "erk" gives small transitions
            more and large ones less.
        tile: the size of the tiles in which the relations come at first, 16, 32, 64 or 128: blocks
            of so many nodes are connected fully or not at all, which the `tiles` backend runs fast.
            The last block of a layer may be smaller. By default relations are drawn one by one.
        device: where to put it.
        dtype: of the coordinates.
        generator: source of the random numbers; one on the CPU gives the same net on every device.

    Examples:
        >>> net = GrapNet([49, 48, 10])
        >>> net(torch.zeros(2, 49)).shape
        torch.Size([2, 10])
        >>> with net.edit(reason="drop the weakest tenth") as edit:
        ...     edit.cut(net.layers[0].outgoing().smallest(fraction=0.1))
        >>> net.version, net.count().relations, round(net.transitions[0].density, 2)
        (1, 2597, 0.9)
        >>> print(net)
        GrapNet(49-48-10, 2,597 relations, 0 frozen, version 1)
          layer 0: Layer(49 sensory nodes)
          transition 0: Transition(49→48, 2,117 relations, density 0.9, 0 frozen)
          layer 1: Layer(48 nodes, relu)
          transition 1: Transition(48→10, 480 relations, density 1, 0 frozen)
          layer 2: Layer(10 nodes, identity)
    """

    # the grapnet.convert.Origin of a net that gn.graft put in place of other modules
    _origin: Any = None

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        skips: Iterable[tuple[int, int]] = (),
        activation: str | Sequence[str] = "relu",
        density: float = 1.0,
        distribution: Literal["uniform", "erk"] = "uniform",
        tile: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        sizes = _checked_sizes(sizes)
        require_tile(tile)
        if not 0 <= density <= 1:
            raise ValueError(f"density must be between 0 and 1, got {density}")
        if distribution not in ("uniform", "erk"):
            raise ValueError(f'distribution is "uniform" or "erk", got {distribution!r}')
        place = torch.empty(0, device=device).device
        if place.type == "meta":
            raise ValueError(
                "a net cannot be created on the meta device, because it needs its wiring"
            )
        ends = _checked_ends(len(sizes), skips)
        pairs = [(sizes[source], sizes[target]) for source, target in ends]
        if distribution == "erk":
            shares = erk_densities(pairs, density)
        else:
            shares = [density] * len(pairs)
        topologies = []
        for (a, b), share in zip(pairs, shares, strict=True):
            if tile is None or a == 0 or b == 0:
                topologies.append(random_topology(a, b, share, place, generator))
            else:
                topologies.append(random_tiles(a, b, share, tile, place, generator))
        example = torch.empty(0, device=place, dtype=dtype or torch.get_default_dtype())
        fan_in = _fan_in(ends, topologies)
        weights = []
        biases = []
        for (_, target), topology in zip(ends, topologies, strict=True):
            scale = fan_in[target].index_select(0, topology.child)
            weights.append(draw("linear", scale, example, generator))
            # The transitions of the chain come first, one for every layer.
            if len(biases) < len(sizes) - 1:
                biases.append(draw("linear", fan_in[target], example, generator))
        self._assemble(sizes, topologies, weights, biases, activation, ends)

    @classmethod
    def from_relations(
        cls,
        sizes: Sequence[int],
        relations: Sequence[tuple[Any, ...]],
        *,
        skips: Mapping[tuple[int, int], tuple[Any, ...]] | None = None,
        biases: Sequence[Any] | None = None,
        activation: str | Sequence[str] = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> "GrapNet":
        """Returns a net with exactly these relations.

        Args:
            sizes: how many nodes each layer has.
            relations: (parents, children) or (parents, children, weights) for every transition, as
                rows of the two layers. The children of a node keep their order. Missing weights are
                initialized like `nn.Linear`.
            skips: the same for transitions that skip layers, by the two layers: `{(0, 2): …}`.
            biases: one vector for every layer after the sensory one; initialized like `nn.Linear`
                by default.
            activation: as for the constructor.
            device: where to put it.
            dtype: of the coordinates.
            generator: source of the random numbers; one on the CPU gives the same net on every
                device.
        """
        sizes = _checked_sizes(sizes)
        if len(relations) != len(sizes) - 1:
            raise ValueError(
                f"{len(sizes)} layers have {len(sizes) - 1} transitions, got relations for"
                f" {len(relations)}"
            )
        skips = skips or {}
        ends = _checked_ends(len(sizes), skips)
        given = [*relations, *skips.values()]
        example = torch.empty(0, device=device, dtype=dtype or torch.get_default_dtype())
        topologies = []
        orders = []
        for t, (source, target) in enumerate(ends):
            topology, order = _topology_of(
                given[t], t, sizes[source], sizes[target], example.device
            )
            topologies.append(topology)
            orders.append(order)
        fan_in = _fan_in(ends, topologies)
        weights = []
        offsets = []
        for t, (_, target) in enumerate(ends):
            topology = topologies[t]
            order = orders[t]
            scale = fan_in[target].index_select(0, topology.child)
            drawn = draw("linear", scale, example, generator)
            if len(given[t]) == 3:
                named = _checked_vector(given[t][2], len(order), f"weights of transition {t}")
                drawn = named[order].to(example)
            weights.append(drawn)
            # The transitions of the chain come first, one for every layer.
            if t >= len(sizes) - 1:
                continue
            offset = None if biases is None else biases[t]
            if offset is None:
                offsets.append(draw("linear", fan_in[target], example, generator))
            else:
                named = _checked_vector(offset, sizes[target], f"biases of layer {target}")
                offsets.append(named.to(example))
        net = cls.__new__(cls)
        net._assemble(sizes, topologies, weights, offsets, activation, ends)
        return net

    def _assemble(
        self,
        sizes: Sequence[int],
        topologies: Sequence[Topology],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        activation: str | Sequence[str],
        ends: Sequence[tuple[int, int]],
    ) -> None:
        names = _activation_names(activation, len(sizes) - 1)
        first = [sum(sizes[:n]) for n in range(len(sizes))]
        uids = [
            torch.arange(start, start + size, device="cpu")
            for start, size in zip(first, sizes, strict=True)
        ]
        layers = [Layer(uids[0], None, "identity")]
        layers += [Layer(u, b, name) for u, b, name in zip(uids[1:], biases, names, strict=True)]
        transitions = [Transition(t, w) for t, w in zip(topologies, weights, strict=True)]
        Graph.__init__(self, layers, transitions, ends)
        self.execution = Execution(self)

    @classmethod
    def _from_parts(
        cls,
        layers: Sequence[Layer],
        transitions: Sequence[Transition],
        ends: Sequence[tuple[int, int]] | None = None,
    ) -> "GrapNet":
        """Returns a net of layers and transitions that were built one by one, as a checkpoint does;
        see `Graph` and `gn.check`.
        """
        net = cls.__new__(cls)
        Graph.__init__(net, layers, transitions, ends)
        net.execution = Execution(net)
        return net

    def forward(self, x: Tensor) -> Tensor:
        """Computes the output for inputs of shape [..., sensory nodes]."""
        training = torch.is_grad_enabled()
        if unsettled:
            settle(wait=training)
        # One object holds everything that this pass reads, so that other threads cannot disturb it.
        plans = self.execution._plans
        shape = x.shape
        width = len(plans.view.rosters[0].uids)
        if not shape or shape[-1] != width:
            raise _wrong_shape(shape, width)
        if self._open_trial:
            raise EditError(
                "the operations of this trial are not applied yet; call edit.commit() before"
                " running the net"
            )
        if x.dtype != plans.dtype:
            x = _autocast_input(x, plans.dtype)
        compiled = torch.compiler.is_compiling()
        if compiled and self.execution._is_recorded and torch.compiler.is_dynamo_compiling():
            return _run_eagerly(self, x)
        if not training and not compiled:
            note_read()
        batch = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
        steps = self.execution._steps(plans, batch, training=training, compiled=compiled)
        live = training or compiled
        h = x
        if len(shape) != 2:
            h = x.reshape(batch, shape[-1])
        h = self.execution._sensory(h, roster=plans.view.rosters[0])
        if not plans.is_chain:
            h = _run_branches(h, steps, live)
            return h.reshape(*shape[:-1], h.shape[-1])
        for store, layer, _, plan, values_shape, weights, biases, roster in steps:
            if compiled:
                # As a constant the shape would tie compiled code to this version.
                bias = layer.values()
                values = store.values(getattr(plan, "values_shape", (-1,)))
            elif training:
                bias = layer.values()
                values = store.values(values_shape)
            else:
                bias = layer._values_of(biases)
                values = store._values_of(weights, values_shape)
            h = store(h, plan, bias, values=values)
            h = layer(h, roster=roster)
        return h if len(shape) == 2 else h.reshape(*shape[:-1], h.shape[-1])

    def walk(self, x: Tensor) -> Tensor:
        """Computes the output of x [batch, n] node by node, as Algorithm 1 of the paper; slow, for
        audits.

        It applies no dropout, as `forward` in evaluation mode.

        Raises:
            PlanError: a policy runs a transition, and Algorithm 1 is the sum.
        """
        self.execution.require_sum("walk()")
        return walk(self, x)

    def snapshot(self, *, most_cells: int = MOST_CELLS) -> Snapshot:
        """Returns the net as a detached stack of `nn.Linear` and activations, for inference and
        export.

        Args:
            most_cells: the largest matrix to make; a larger transition raises PlanError.
        """
        return Snapshot.of(self, most_cells)

    def to_module(self, *, most_cells: int = MOST_CELLS) -> nn.Sequential:
        """Returns the net as a trainable stack of plain torch modules with new Parameters.

        It computes the same function until it is trained: absent relations and frozen coordinates
        are trainable numbers in its matrices. A layer whose biases are all zero and frozen becomes
        an `nn.Linear` without bias, and dropout becomes an `nn.Dropout`.

        Args:
            most_cells: as for `snapshot`.
        """
        return trainable_modules(self, most_cells)

    def to_networkx(self) -> "networkx.DiGraph[int]":
        """Returns the graph for networkx: see `grapnet.integrations.networkx.to_networkx`."""
        from .integrations.networkx import to_networkx

        return to_networkx(self)

    def _apply(self, *args: Any, **kwargs: Any) -> "GrapNet":
        super()._apply(*args, **kwargs)
        self.execution._refresh()
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads values as `nn.Module` does; the state dict must be that of a net with the same
        wiring.

        Raises:
            TopologyError: it is that of another wiring or of plain modules; nothing is loaded.
        """
        if strict and state_dict and not any("transitions." in name for name in state_dict):
            raise TopologyError(
                f"{next(iter(state_dict))!r} and the other keys belong to plain modules, not to a"
                " net; nothing was loaded. Load them into their module and convert it:"
                " gn.from_module(module)"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        _prepare_to_load(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self.execution._is_bound:
            self.execution._bind(self)

    def __repr__(self) -> str:
        count = self.count()
        sizes = "-".join(map(str, self.sizes))
        return (
            f"GrapNet({sizes}, {count.relations:,} relations, {count.frozen:,} frozen, version"
            f" {self.version})"
        )

    def __str__(self) -> str:
        lines = [repr(self)]
        for number, layer in enumerate(self.layers):
            lines.append(f"  layer {number}: {layer!r}")
            for t in self.leaving(number):
                target = self.transitions[t].target
                where = "" if target == number + 1 else f" to layer {target}"
                lines.append(f"  transition {t}{where}: {self.transitions[t]!r}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from ._show import page

        return page(self)


def _forward(net: GrapNet, x: Tensor) -> Tensor:
    return net.forward(x)


_run_eagerly = untraced(
    _forward,
    "a recorder of grapnet is armed on this net, and what it watches runs uncompiled: disarm it, or"
    " compile without fullgraph=True",
)


def _run_branches(h: Tensor, steps: Sequence[Step], live: bool) -> Tensor:
    """Runs the steps of a net that is no chain: a layer adds up what all transitions bring."""
    entering: dict[int, list[Step]] = {}
    for step in steps:
        entering.setdefault(step.ends[1], []).append(step)
    outputs = {0: h}
    for target in sorted(entering):
        first = entering[target][0]
        if live:
            bias = first.layer.values()
        else:
            bias = first.layer._values_of(first.biases)
        received = []
        for step in entering[target]:
            store = step.transition
            if live:
                values = store.values(getattr(step.plan, "values_shape", (-1,)))
            else:
                values = store._values_of(step.weights, step.values_shape)
            received.append(store(outputs[step.ends[0]], step.plan, bias, values=values))
            # Only the first transition brings the bias.
            bias = torch.zeros_like(bias)
        h = first.layer(sum(received[1:], received[0]), roster=first.roster)
        outputs[target] = h
    return h


def _wrong_shape(shape: torch.Size, width: int) -> ValueError:
    hint = ""
    if len(shape) > 2 and math.prod(shape[1:]) == width:
        hint = " Flatten it first: x.flatten(1)"
    return ValueError(
        f"GrapNet expects x of shape [..., {width}] (one coordinate per sensory node), got"
        f" {list(shape)}.{hint}"
    )


def _autocast_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an input of another dtype converted for autocast; raises ValueError outside
    autocast.
    """
    if not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        raise ValueError(
            f"this GrapNet computes in {dtype}, got x of {x.dtype}. Convert it first: x.to({dtype})"
        )
    return x.to(dtype) if dtype == torch.float64 else x  # autocast leaves double precision alone


def _checked_sizes(sizes: Sequence[int]) -> list[int]:
    if not isinstance(sizes, Iterable):
        raise TypeError(f"sizes must be one list, as in gn.GrapNet([4, 8, 2]); got {sizes!r}")
    sizes = [operator.index(size) for size in sizes]  # refuses 2.5
    if len(sizes) < 2 or min(sizes) < 0:
        raise ValueError(f"sizes must be at least two non-negative integers, got {sizes}")
    return sizes


def _checked_ends(n_layers: int, skips: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the layers that the transitions of a net lead from and to, those of the chain
    first.
    """
    found = chain_ends(n_layers)
    for pair in skips:
        source, target = (operator.index(number) for number in pair)
        if source < 0 or not source + 1 < target < n_layers:
            raise ValueError(
                "skips are pairs of layers (source, target) with others between them, numbered 0"
                f" to {n_layers - 1}; got {pair!r}"
            )
        if (source, target) in found:
            raise ValueError(f"skips name the layers {(source, target)} twice")
        found.append((source, target))
    return found


def _fan_in(ends: Sequence[tuple[int, int]], topologies: Sequence[Topology]) -> dict[int, Tensor]:
    """Returns how many parents each node has, over all transitions, by layer."""
    found: dict[int, Tensor] = {}
    for (_, target), topology in zip(ends, topologies, strict=True):
        parents = topology.fan_in()
        found[target] = parents if target not in found else found[target] + parents
    return found


def _activation_names(activation: str | Sequence[str], count: int) -> list[str]:
    if not isinstance(activation, str | Sequence):
        raise TypeError(
            "activations are given by name, as in activation='tanh', not as"
            f" {type(activation).__name__}"
        )
    if isinstance(activation, str):
        names = [activation] * (count - 1) + ["identity"]
    else:
        names = list(activation)
    if len(names) != count:
        raise ValueError(
            f"{count} layers after the sensory one need {count} activations, got {len(names)}"
        )
    for name in names:
        activation_function(name)
    return names


def _topology_of(
    given: tuple[Any, ...], t: int, n_parents: int, n_children: int, device: torch.device
) -> tuple[Topology, Tensor]:
    """Returns the wiring of given pairs, and the order that sorts them by parent."""
    if len(given) not in (2, 3):
        raise ValueError(
            f"relations of transition {t} are (parents, children) or (parents, children, weights)"
        )
    parents, children = (as_tensor(part).reshape(-1).to("cpu", torch.int64) for part in given[:2])
    if len(parents) != len(children):
        raise ValueError(f"transition {t} has {len(parents)} parents for {len(children)} children")
    for name, rows, size in (("parents", parents, n_parents), ("children", children, n_children)):
        outside = rows[(rows < 0) | (rows >= size)]
        if len(outside):
            raise ValueError(
                f"{name} of transition {t} are rows 0 to {size - 1}, got {outside[:5].tolist()}"
            )
    keys, counts = (parents * n_children + children).unique(return_counts=True)
    if len(keys) < len(parents):
        twice = int(keys[counts > 1][0])
        raise ValueError(
            f"transition {t} names the relation from row {twice // n_children} to row"
            f" {twice % n_children} twice"
        )
    order = parents.argsort(stable=True)
    return (
        topology_from_pairs(parents[order], children[order], n_parents, n_children, device),
        order,
    )


def _checked_vector(values: Any, size: int, what: str) -> Tensor:
    values = as_tensor(values).detach().reshape(-1).cpu().clone()
    if len(values) != size:
        raise ValueError(f"{size} {what} are needed, got {len(values)}")
    return values


def _prepare_to_load(graph: Graph, state: Mapping[str, Any], prefix: str) -> None:
    """Freezes, in a commit, what is frozen in a state dict, before the stores read its values.

    Raises:
        TopologyError: the state has another wiring.
    """
    graph._require_no_edit("load a state dict")
    if not any(name.startswith(prefix) for name in state):
        return
    _require_as_many_transitions(graph, state, f"{prefix}transitions.")
    requests = Requests()
    for number, layer in enumerate(graph.layers):
        name = f"{prefix}layers.{number}."
        if not layer.is_sensory:
            _request_frozen(
                layer, state, name, requests.freeze_biases[number], requests.unfreeze_biases[number]
            )
    for t, transition in enumerate(graph.transitions):
        name = f"{prefix}transitions.{t}."
        _request_frozen(
            transition, state, name, requests.freeze_relations[t], requests.unfreeze_relations[t]
        )
    for column in graph.columns.values():
        _require_fit(column, state, f"{prefix}columns.{column.name}.")
    change = resolve(graph, requests, None)
    if not change.is_empty:
        graph._commit_change(change, "load_state_dict")


def _require_as_many_transitions(graph: Graph, state: Mapping[str, Any], prefix: str) -> None:
    """Raises TopologyError if layers came or left between graph and state."""
    held = {name for name in state if name.startswith(prefix) and name.endswith(".ptr")}
    expected = {f"{prefix}{t}.ptr" for t in range(len(graph.transitions))}
    # Without any wiring it is a part of a state dict.
    if held and held != expected:
        raise _mismatch(f"it has {len(held)} transitions where this graph has {len(expected)}")


def _request_frozen(
    store: Coordinates, state: Mapping[str, Any], name: str, freeze: list[Any], unfreeze: list[Any]
) -> None:
    _require_fit(store, state, name)
    held = state.get(name + "frozen")
    if held is None:
        return
    held = held.to(store.frozen_at)
    if len(held) and (
        int(held[0]) < 0 or int(held[-1]) >= store.size or bool((held[1:] <= held[:-1]).any())
    ):
        raise TopologyError(
            f"{name}frozen must be ascending positions below {store.size}; nothing was loaded"
        )
    freeze.append(held)
    unfreeze.append(store.frozen_at)


def _require_fit(store: Coordinates, state: Mapping[str, Any], name: str) -> None:
    difference = store._differs_from(state, name)
    if difference:
        raise _mismatch(difference)


def _mismatch(difference: str) -> TopologyError:
    return TopologyError(
        f"{difference}; the state dict belongs to a graph with another wiring, and nothing was"
        " loaded. Files of gn.save include the wiring, for gn.load(path) or"
        " gn.restore(path, into=model); Lightning's do with RulesCallback, or with load_nets"
        " in on_load_checkpoint"
    )
