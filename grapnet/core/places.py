"""Where the nodes, relations and layers that a user names stand in a graph."""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from .errors import EditError
from .layer import Layer
from .relation_set import RelationSet
from .remap import ascending
from .requests import Requests
from .selection import Nodes, NodeSet, as_uids

if TYPE_CHECKING:
    from .graph import Graph
    from .node import GrapNode


def layer_number(graph: "Graph", layer: Any) -> int:
    """Returns the number of a layer, counted from the sensory one; raises EditError when there is
    none.
    """
    count = len(graph.layers)
    if isinstance(layer, Layer):
        place = next(
            (f"; this one has number {n}" for n, own in enumerate(graph.layers) if own is layer), ""
        )
        raise EditError(f"a layer is named by its number, 0 to {count - 1}{place}, got {layer!r}")
    if not isinstance(layer, int | np.integer) or not -count <= layer < count:
        raise EditError(f"the graph has layers 0 to {count - 1}, so there is no layer {layer!r}")
    return int(layer) % count


def hidden_layers(graph: "Graph", layers: Any) -> list[int]:
    """Returns the numbers of hidden layers, of all of them for None; raises EditError for one that
    is not hidden.
    """
    hidden = range(1, len(graph.layers) - 1)
    if layers is None:
        return list(hidden)
    numbers = [
        layer_number(graph, n)
        for n in ([layers] if isinstance(layers, int | np.integer) else layers)
    ]
    outside = [number for number in numbers if number not in hidden]
    if outside:
        raise EditError(f"layers {outside} are not hidden, so they have no orphans")
    return numbers


def positions_of(graph: "Graph", relations: RelationSet | Any, slots: Any) -> dict[int, Tensor]:
    """Returns the positions of relations by transition; with `slots`, `relations` is the node that
    owns them.
    """
    if slots is not None:
        if not hasattr(relations, "uid"):
            raise TypeError(f"slots= are those of one GrapNode, got {type(relations).__name__}")
        relations = cast("GrapNode", relations).outgoing(slots=slots)
    if not isinstance(relations, RelationSet):
        raise TypeError(
            "relations are given as a RelationSet (node.outgoing(), net.select(...).incoming()), "
            f"not as {type(relations).__name__}"
        )
    if relations.graph is not graph:
        raise EditError("the relations belong to another graph")
    return {
        t: torch.arange(at.start, at.stop, dtype=torch.int32, device=graph.device)
        if isinstance(at, range)
        else at
        for t, at in relations.positions_by_transition().items()
    }


def rows_of(graph: "Graph", requests: Requests, nodes: Nodes) -> dict[int, Tensor]:
    """Returns rows by layer, the nodes that the requests add counted after the present ones."""
    if isinstance(nodes, Layer) and nodes.graph is graph:
        return {nodes.index: ascending(len(nodes), torch.device("cpu"))} if len(nodes) else {}
    found: dict[int, Tensor] = {}
    if isinstance(nodes, NodeSet) and nodes.graph is graph:
        found = {
            n: requests.rows(graph.layers[n], n, uids) for n, uids in nodes.uids_by_layer.items()
        }
        if not any((rows.numpy() < 0).any() for rows in found.values()):
            return found
    left, found = as_uids(graph, nodes), {}
    for number, layer in enumerate(graph.layers):
        rows = requests.rows(layer, number, left)
        here = rows >= 0
        if len(left) and bool(here.all()):
            found[number] = rows
            return found
        if bool(here.any()):
            found[number], left = rows[here], left[~here]
    if len(left):
        graph.locate(int(left[0]))
    return found
