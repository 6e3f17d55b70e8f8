"""networkx: the net as a directed graph, as a GraphML file for Gephi, and back."""

import os
import re
from collections.abc import Hashable, Iterable
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet._atomic import atomic_write

from .extra import require
from .networkx_graphml import write_net

if TYPE_CHECKING:
    import networkx

# what XML cannot hold or give back
_STRANGE = re.compile(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SPACING = 10.0  # between nodes of one layer in the drawing that a file proposes
_SHARE = 2.0  # of its height: the drawing's width


def to_networkx(net: gn.GrapNet) -> "networkx.DiGraph[int]":
    """Returns the net as a `networkx.DiGraph` of plain Python numbers: its nodes by uid, its
    relations in slot order.

    A node has `layer`, `row`, `owner` (None without one), `activation`, `bias` (None for a sensory
    node), `bias_frozen` and `frozen`, which means all that belongs to the node; a relation has
    `weight`, `frozen` and `transition`. The graph itself knows the `version` and how many `layers`
    there are, and for each its `activation_<n>` (that of nodes to come) and `dropout_<n>`. It is a
    copy: later edits do not show in it.

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
    graph = _without_relations(net)
    for t, layer in enumerate(net.layers[:-1]):
        relations = layer.outgoing()
        ends = relations.parents.tolist(), relations.children.tolist()
        coordinates = relations.weights.detach().tolist(), relations.frozen.tolist()
        graph.add_edges_from(
            (parent, child, {"weight": weight, "frozen": frozen, "transition": t})
            for parent, child, weight, frozen in zip(*ends, *coordinates, strict=True)
        )
    return graph


def from_networkx(
    graph: "networkx.DiGraph[Any]",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> gn.GrapNet:
    """Returns the net that a directed graph describes, as `to_networkx` does or in your own hand.

    Every node names its `layer`; `row` orders the nodes of a layer, and a node's relations keep the
    order they have in the graph. Weights, or the biases of a layer, are drawn as `nn.Linear` draws
    them when none is given. Nodes count from uid 0, layer by layer; names of the graph's nodes,
    versions and history are not kept.

    Args:
        graph: a `networkx.DiGraph`, read from a file perhaps: `networkx.read_graphml(path)`.
        device: where to put the net.
        dtype: of the coordinates.

    Raises:
        ValueError: a node without a layer, a relation that does not lead from a layer to the next,
            or weights or biases of which some are missing.

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
        raise ValueError(
            "relations lead from parents to children, and this graph is not directed; give a"
            " DiGraph"
        )
    members = _layers(graph)
    rows = {name: row for layer in members for row, name in enumerate(layer)}
    relations = _relations(graph, len(members) - 1, rows)
    last = len(members) - 1
    usual = ["identity", *["relu"] * (last - 1), "identity"]
    activations = [graph.graph.get(f"activation_{n}", usual[n]) for n in range(1, last + 1)]
    net = gn.GrapNet.from_relations(
        [len(layer) for layer in members],
        relations,
        biases=[_biases(graph, n, members[n]) for n in range(1, last + 1)],
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

    Beside what `to_networkx` gives, a node has a `label` and a place to stand (`x`, `y`: layers as
    columns), a relation its `strength`, the absolute weight. What is None is left out, as GraphML
    has no such value. The file is complete before it takes the place of an older one;
    `from_networkx(networkx.read_graphml(path))` reads it. The relations of a net are written one by
    one, and take no memory; a graph takes as much as networkx's own writer needs.

    Args:
        net: the net; or a graph, such as a part of what `to_networkx` gave. It stays as it is:
            labels, places and strengths that it brings are written, and the others made where it
            has `layer` and `row`, or `weight`.
        path: the file.

    Raises:
        TypeError: it is neither, but a model around nets perhaps; nothing was written.
        ValueError: a name or another text holds a character that XML cannot; nothing was written.
    """
    if isinstance(net, gn.GrapNet):
        nodes = _drawable(_without_relations(net))
        with atomic_write(path) as partial:
            write_net(partial, net, nodes)
        return
    graph = _drawable(_copy_of(net))
    with atomic_write(path) as partial:
        require("networkx", "networkx").write_graphml_xml(
            graph, os.fspath(partial), prettyprint=False
        )


def _without_relations(net: gn.GrapNet) -> "networkx.DiGraph[int]":
    """Returns the graph of a net's nodes, which knows all that `to_networkx` tells but the
    relations.
    """
    graph = require("networkx", "networkx").DiGraph(version=net.version, layers=len(net.layers))
    for n, layer in enumerate(net.layers):
        graph.graph |= {f"activation_{n}": layer.default_activation, f"dropout_{n}": layer.dropout}
        graph.add_nodes_from(_nodes(n, layer))
    return graph


def _copy_of(given: Any) -> "networkx.Graph[Any]":
    """Returns a copy of a graph, which is the caller's to change; raises TypeError for anything
    else.
    """
    if isinstance(given, require("networkx", "networkx").Graph):
        return given.copy()
    if isinstance(given, nn.Module):
        inside = [name for name, part in given.named_modules() if isinstance(part, gn.GrapNet)]
        hint = (
            f"; its nets are {', '.join(map(repr, inside))}: write model.get_submodule(name)"
            if inside
            else ""
        )
        raise TypeError(
            f"a file holds one net, or a networkx graph, and this {type(given).__name__} is a"
            f" model{hint}"
        )
    raise TypeError(
        f"a GrapNet or a networkx graph is written as GraphML, got {type(given).__name__}"
    )


def _drawable(graph: "networkx.Graph[Any]") -> "networkx.Graph[Any]":
    """Returns the graph with text and numbers only, and with labels and places where it knows
    layers and rows.
    """
    for what, data in _described(graph):
        for key, value in list(data.items()):
            if value is None:
                del data[key]
            elif isinstance(value, str) and _STRANGE.search(value):
                raise ValueError(
                    f"{what} has the {key} {value!r}, which no XML file can hold; rename it"
                )
    placed = [
        d
        for d in graph.nodes.values()
        if all(isinstance(d.get(key), Integral) for key in ("layer", "row"))
    ]
    sizes: dict[int, int] = {}  # of the layers, as far as the graph shows them
    for data in placed:
        sizes[data["layer"]] = max(sizes.get(data["layer"], 1), data["row"] + 1)
    height, last = max(sizes.values(), default=1), max([1, *sizes])
    for data in placed:
        layer, row = data["layer"], data["row"]
        x = layer * _SPACING * height * _SHARE / last
        y = ((sizes[layer] - 1) / 2 - row) * _SPACING * height / sizes[layer]  # row 0 on top
        for key, value in {"label": f"{layer}:{row}", "x": x, "y": y}.items():
            data.setdefault(key, value)
    for *_, data in graph.edges(data=True):
        if "weight" in data:
            data.setdefault("strength", abs(data["weight"]))
    return graph


def _described(graph: "networkx.Graph[Any]") -> "Iterable[tuple[str, dict[str, Any]]]":
    """Returns everything that has attributes in a graph, with what to call it."""
    yield "the graph", graph.graph
    yield from ((f"node {name}", data) for name, data in graph.nodes.items())
    yield from (
        (f"the relation from {ends[0]} to {ends[1]}", data)
        for *ends, data in graph.edges(data=True)
    )


def _nodes(n: int, layer: Any) -> Iterable[tuple[int, dict[str, Any]]]:
    """Returns every node of a layer with what is known of it."""
    held = torch.zeros(len(layer), dtype=torch.bool)
    biases: list[float | None] = [None] * len(layer)
    if not layer.is_sensory:
        held[layer.frozen_at.cpu().long()] = True
        biases = layer.biases.detach().tolist()
    columns = (
        layer.uids.tolist(),
        layer.owners,
        layer.activations,
        biases,
        held.tolist(),
        layer.frozen.tolist(),
    )
    names = "owner", "activation", "bias", "bias_frozen", "frozen"
    for row, (uid, *values) in enumerate(zip(*columns, strict=True)):
        yield uid, {"layer": n, "row": row, **dict(zip(names, values, strict=True))}


def _layers(graph: "networkx.DiGraph[Any]") -> list[list[Hashable]]:
    """Returns the names of the nodes of every layer, in row order."""
    found: dict[int, list[Hashable]] = {}
    for name, data in graph.nodes.items():
        layer = data.get("layer")
        if isinstance(layer, bool) or not isinstance(layer, Integral) or layer < 0:
            raise ValueError(
                f"node {name!r} has layer {layer!r}; every node names its layer, a number from 0 on"
            )
        found.setdefault(int(layer), []).append(name)
    count = max([graph.graph.get("layers", 2), 2, *(n + 1 for n in found)])
    return [
        sorted(found.get(n, []), key=lambda name: graph.nodes[name].get("row", 0))
        for n in range(count)
    ]


def _relations(
    graph: "networkx.DiGraph[Any]", count: int, rows: dict[Hashable, int]
) -> list[tuple[Any, ...]]:
    """Returns (parents, children) or (parents, children, weights) of every transition."""
    parents, children, weights = ([[] for _ in range(count)] for _ in range(3))
    for parent, child, weight in graph.edges(data="weight"):
        upper, lower = graph.nodes[parent]["layer"], graph.nodes[child]["layer"]
        if lower != upper + 1:
            raise ValueError(
                f"a relation leads from a layer to the next one, and that from {parent!r} to"
                f" {child!r} leads from layer {upper} to layer {lower}"
            )
        parents[upper].append(rows[parent])
        children[upper].append(rows[child])
        weights[upper].append(weight)
    ends = zip(parents, children, strict=True)
    given = [_all_or_none(each, f"weights of transition {t}") for t, each in enumerate(weights)]
    return [
        (*pair, *([] if each is None else [each])) for pair, each in zip(ends, given, strict=True)
    ]


def _biases(graph: "networkx.DiGraph[Any]", n: int, layer: list[Hashable]) -> Tensor | None:
    return _all_or_none([graph.nodes[name].get("bias") for name in layer], f"biases of layer {n}")


def _all_or_none(values: list[float | None], what: str) -> Tensor | None:
    """Returns the values in double precision, None when there is none; raises ValueError when some
    are missing.
    """
    missing = values.count(None)
    if 0 < missing < len(values):
        raise ValueError(
            f"{missing} of {len(values)} {what} are missing; give all of them, or none to have them"
            " drawn"
        )
    return None if missing else torch.tensor(values, dtype=torch.float64)


def _label(net: gn.GrapNet, graph: "networkx.DiGraph[Any]", members: list[list[Hashable]]) -> None:
    """Gives the nodes their owners and own activations, and freezes what is frozen, in one edit."""
    uids: dict[Hashable, int] = {}
    with net.edit(reason="from networkx") as edit:
        for layer, names in zip(net.layers, members, strict=True):
            uids |= zip(names, layer.uids.tolist(), strict=True)
            nodes = [graph.nodes[name] for name in names]
            for owner, rows in _grouped(node.get("owner") for node in nodes):
                edit.set_owner(layer[rows], owner)
            for activation, rows in _grouped(
                None if layer.is_sensory else node.get("activation") for node in nodes
            ):
                edit.set_activation(layer[rows], activation)
            held = [row for row, node in enumerate(nodes) if node.get("bias_frozen", False)]
            edit.freeze(layer[held], incoming=False, outgoing=False)
        frozen = {
            (uids[a], uids[b]) for a, b, held in graph.edges(data="frozen", default=False) if held
        }
        relations = net.select().outgoing()
        pairs = zip(relations.parents.tolist(), relations.children.tolist(), strict=True)
        edit.freeze(relations[torch.tensor([pair in frozen for pair in pairs], dtype=torch.bool)])


def _grouped(labels: Iterable[str | None]) -> Iterable[tuple[str, list[int]]]:
    """Returns every label with the rows that have it; rows without one are left out."""
    found: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        if label is not None:
            found.setdefault(label, []).append(row)
    return found.items()
