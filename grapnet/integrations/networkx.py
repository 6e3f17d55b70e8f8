"""networkx: the net as a directed graph, as a GraphML file for Gephi, and back."""

import os
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet._atomic import atomic_write

from ._extra import require

if TYPE_CHECKING:
    import networkx

# Distances of layers and of rows in the drawing that a file proposes.
_ACROSS = 500.0
_DOWN = 20.0


def to_networkx(net: gn.GrapNet) -> "networkx.DiGraph[int]":
    """Returns the net as a `networkx.DiGraph` of plain Python numbers: its nodes by uid, its
    relations in slot order.

    A node has `layer`, `row`, `owner` (None without one), `activation`, `bias` (None for a sensory
    node), `bias_frozen` and `frozen`, which means all that belongs to the node. A relation has
    `weight`, `frozen` and `transition`. The graph has `version` and `layers`, the number of layers,
    and for every layer `activation_<n>` (that of nodes to come) and `dropout_<n>`. It is a copy:
    later edits do not change it.

    Examples:
        >>> net = gn.GrapNet.from_relations(
        ...     [2, 1], [([0, 1], [0, 0], [0.5, -2.0])], biases=[[0.25]]
        ... )
        >>> graph = to_networkx(net)
        >>> graph.edges[1, 2]
        {'weight': -2.0, 'frozen': False, 'transition': 0}
        >>> graph.nodes[2]["layer"], graph.nodes[2]["bias"], graph.in_degree(2)
        (1, 0.25, 2)
    """
    graph = require("networkx", "networkx").DiGraph(version=net.version, layers=len(net.layers))
    for n, layer in enumerate(net.layers):
        graph.graph[f"activation_{n}"] = layer.default_activation
        graph.graph[f"dropout_{n}"] = layer.dropout
        graph.add_nodes_from(_nodes(n, layer))
    for t, (source, target) in enumerate(net.ends):
        relations = net.layers[source].outgoing(to=net.layers[target])
        columns = zip(
            relations.parents.tolist(),
            relations.children.tolist(),
            relations.weights.detach().tolist(),
            relations.frozen.tolist(),
            strict=True,
        )
        for parent, child, weight, frozen in columns:
            graph.add_edge(parent, child, weight=weight, frozen=frozen, transition=t)
    return graph


def from_networkx(
    graph: "networkx.DiGraph[Any]",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> gn.GrapNet:
    """Returns the net of a directed graph, from `to_networkx` or made by hand.

    Every node has a `layer`; `row` orders the nodes of a layer, and the relations of a node keep
    their order. Missing weights, or biases of a layer, are initialized like `nn.Linear`. Nodes get
    uids from 0, layer by layer; names, versions and history are not kept.

    Args:
        graph: a `networkx.DiGraph`, perhaps from a file: `networkx.read_graphml(path)`.
        device: the device of the net.
        dtype: the type of the coordinates.

    Raises:
        ValueError: a node without a layer, a relation that does not lead to a later layer, or
            weights or biases of which some are missing.

    Examples:
        >>> import networkx
        >>> graph = networkx.DiGraph([("pixel", "hidden"), ("hidden", "cat"), ("hidden", "dog")])
        >>> networkx.set_node_attributes(
        ...     graph, {"pixel": 0, "hidden": 1, "cat": 2, "dog": 2}, "layer"
        ... )
        >>> from_networkx(graph)
        GrapNet(1-1-2, 3 relations, 0 frozen, version 0)
    """
    if not graph.is_directed():
        raise ValueError("relations go from parents to children; pass a DiGraph")
    members = _layers(graph)
    last = len(members) - 1
    biases = []
    activations = []
    for n in range(1, last + 1):
        given = [graph.nodes[name].get("bias") for name in members[n]]
        biases.append(_all_or_none(given, f"biases of layer {n}"))
        usual = "identity" if n == last else "relu"
        activations.append(graph.graph.get(f"activation_{n}", usual))
    relations = _relations(graph, members)
    adjacent = [relations.pop((n, n + 1)) for n in range(last)]
    net = gn.GrapNet.from_relations(
        [len(layer) for layer in members],
        adjacent,
        skips=relations,
        biases=biases,
        activation=activations,
        device=device,
        dtype=dtype,
    )
    for n, layer in enumerate(net.layers):
        layer.dropout = graph.graph.get(f"dropout_{n}", 0.0)
    _label(net, graph, members)
    return net


def write_graphml(net: "gn.GrapNet | networkx.Graph[Any]", path: str | os.PathLike[str]) -> None:
    """Writes a net as GraphML, which Gephi, Cytoscape and yEd read; a name ending in .gz is
    compressed.

    Besides the attributes of `to_networkx`, a node has a `label` and a position (`x`, `y`: layers
    as columns), a relation its `strength`, the absolute weight. Attributes that are None are
    omitted. The file is written atomically; `from_networkx(networkx.read_graphml(path))` reads it.

    Args:
        net: the net, or a part of what `to_networkx` returned, which is not changed.
        path: the file.
    """
    graph = to_networkx(net) if isinstance(net, gn.GrapNet) else net.copy()
    for data in graph.nodes.values():
        for key in [key for key, value in data.items() if value is None]:
            del data[key]
        data["label"] = f"{data['layer']}:{data['row']}"
        data["x"] = _ACROSS * data["layer"]
        # Row 0 is on top.
        data["y"] = -_DOWN * data["row"]
    for *_, data in graph.edges(data=True):
        data["strength"] = abs(data["weight"])
    with atomic_write(path) as partial:
        require("networkx", "networkx").write_graphml(graph, os.fspath(partial), prettyprint=False)


def _nodes(n: int, layer: Any) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yields every node of a layer with its attributes."""
    biases: list[float | None] = [None] * len(layer)
    held = torch.zeros(len(layer), dtype=torch.bool)
    if not layer.is_sensory:
        biases = layer.biases.detach().tolist()
        held[layer.frozen_at.cpu().long()] = True
    columns = {
        "owner": layer.owners,
        "activation": layer.activations,
        "bias": biases,
        "bias_frozen": held.tolist(),
        "frozen": layer.frozen.tolist(),
    }
    for row, uid in enumerate(layer.uids.tolist()):
        values = {key: column[row] for key, column in columns.items()}
        yield uid, {"layer": n, "row": row, **values}


def _layers(graph: "networkx.DiGraph[Any]") -> list[list[Hashable]]:
    """Returns the names of the nodes of every layer, in row order."""
    found: dict[int, list[Hashable]] = {}
    for name, data in graph.nodes.items():
        layer = data.get("layer", -1)
        if layer < 0:
            raise ValueError(f"node {name!r} has no layer, a number from 0 on")
        found.setdefault(layer, []).append(name)
    count = max([graph.graph.get("layers", 2), 2, *(n + 1 for n in found)])
    layers = []
    for n in range(count):
        names = found.get(n, [])
        layers.append(sorted(names, key=lambda name: graph.nodes[name].get("row", 0)))
    return layers


def _relations(
    graph: "networkx.DiGraph[Any]", members: list[list[Hashable]]
) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Returns (parents, children) or (parents, children, weights) of every transition, by the
    layers that it leads from and to; those from a layer to the next come first.
    """
    places: dict[Hashable, tuple[int, int]] = {}
    for n, names in enumerate(members):
        for row, name in enumerate(names):
            places[name] = (n, row)
    found: dict[tuple[int, int], tuple[list[int], list[int], list[float | None]]] = {}
    for n in range(len(members) - 1):
        found[n, n + 1] = ([], [], [])
    for parent, child, weight in graph.edges(data="weight"):
        upper, parent_row = places[parent]
        lower, child_row = places[child]
        if lower <= upper:
            raise ValueError(
                f"relations go from a layer to a later one, and that from {parent!r} to {child!r}"
                f" goes from layer {upper} to layer {lower}"
            )
        parents, children, weights = found.setdefault((upper, lower), ([], [], []))
        parents.append(parent_row)
        children.append(child_row)
        weights.append(weight)
    relations: dict[tuple[int, int], tuple[Any, ...]] = {}
    for ends, (parents, children, weights) in found.items():
        given = _all_or_none(weights, f"weights from layer {ends[0]} to layer {ends[1]}")
        relations[ends] = (parents, children)
        if given is not None:
            relations[ends] = (parents, children, given)
    return relations


def _all_or_none(values: list[float | None], what: str) -> Tensor | None:
    """Returns the values in double precision, None when there is none."""
    missing = values.count(None)
    if 0 < missing < len(values):
        raise ValueError(f"{missing} of {len(values)} {what} are missing; give all of them or none")
    if missing:
        return None
    return torch.tensor(values, dtype=torch.float64)


def _label(net: gn.GrapNet, graph: "networkx.DiGraph[Any]", members: list[list[Hashable]]) -> None:
    """Sets owners and activations, and freezes what is frozen, in one edit."""
    uids: dict[Hashable, int] = {}
    with net.edit(reason="from networkx") as edit:
        for layer, names in zip(net.layers, members, strict=True):
            uids |= zip(names, layer.uids.tolist(), strict=True)
            for owner, rows in _rows_by(graph, names, "owner"):
                edit.set_owner(layer[rows], owner)
            if layer.is_sensory:
                continue
            for activation, rows in _rows_by(graph, names, "activation"):
                edit.set_activation(layer[rows], activation)
            for frozen, rows in _rows_by(graph, names, "bias_frozen"):
                if frozen:
                    edit.freeze(layer[rows], incoming=False, outgoing=False)
        held = set()
        for parent, child, frozen in graph.edges(data="frozen"):
            if frozen:
                held.add((uids[parent], uids[child]))
        relations = net.select().outgoing()
        pairs = zip(relations.parents.tolist(), relations.children.tolist(), strict=True)
        edit.freeze(relations[torch.tensor([pair in held for pair in pairs], dtype=torch.bool)])


def _rows_by(
    graph: "networkx.DiGraph[Any]", names: list[Hashable], key: str
) -> Iterable[tuple[Any, list[int]]]:
    """Returns every value of an attribute with the rows that have it; None is left out."""
    found: dict[Any, list[int]] = {}
    for row, name in enumerate(names):
        value = graph.nodes[name].get(key)
        if value is not None:
            found.setdefault(value, []).append(row)
    return found.items()
