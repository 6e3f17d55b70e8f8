"""GraphML of a net, written node by node and relation by relation: what networkx writes of its
graph, byte by byte.
"""

import bz2
import gzip
import io
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import grapnet as gn

if TYPE_CHECKING:
    import networkx

_OPEN = (
    "<?xml version='1.0' encoding='utf-8'?>\n<graphml"
    ' xmlns="http://graphml.graphdrawing.org/xmlns"'
    ' xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
    ' xsi:schemaLocation="http://graphml.graphdrawing.org/xmlns'
    ' http://graphml.graphdrawing.org/xmlns/1.0/graphml.xsd">'
)
_TYPES = {bool: "boolean", int: "long", float: "double", str: "string"}
# by ending, as networkx does
_COMPRESSED = {
    ".gz": gzip.open,
    ".gzip": gzip.open,
    ".bz2": bz2.open,
}
_AT_ONCE = 2**12  # relations that are Python numbers at a time

Attributes = dict[str, Any]
Keys = dict[tuple[str, str], tuple[str, str]]  # (of what, name) -> (id, type)


def write_net(path: Path, net: gn.GrapNet, graph: "networkx.Graph[Any]") -> None:
    """Writes a net; of its relations, few are in memory at a time.

    Args:
        path: the file; a name ending in .gz or .bz2 is compressed.
        net: whose relations are written.
        graph: its nodes without relations; all that is said of it and them is text and numbers that
            XML can hold.
    """
    keys = _keys(graph, next(_relations(net), None))
    with (
        _COMPRESSED.get(path.suffix, open)(path, "wb") as raw,
        io.TextIOWrapper(raw, "utf-8", newline="\n") as file,
    ):
        file.write(_OPEN)
        file.writelines(
            f'<key id="{key}" for="{what}" attr.name="{name}" attr.type="{kind}" />'
            for (what, name), (key, kind) in reversed(keys.items())
        )
        file.write('<graph edgedefault="directed">')
        file.writelines(
            f'<node id="{uid}">{_data("node", said, keys)}</node>'
            for uid, said in graph.nodes.items()
        )
        file.writelines(
            f'<edge source="{parent}" target="{child}">{_data("edge", said, keys)}</edge>'
            for parent, child, said in _relations(net)
        )
        file.write(f"{_data('graph', graph.graph, keys)}</graph></graphml>")


def _relations(net: gn.GrapNet) -> Iterator[tuple[int, int, Attributes]]:
    """Returns the ends of every relation, in slot order, and what is said of it."""
    for t, layer in enumerate(net.layers[:-1]):
        relations = layer.outgoing()
        columns = (
            relations.parents,
            relations.children,
            relations.weights.detach(),
            relations.frozen,
        )
        for parts in zip(*(column.split(_AT_ONCE) for column in columns), strict=True):
            for parent, child, weight, frozen in zip(
                *(part.tolist() for part in parts), strict=True
            ):
                yield (
                    parent,
                    child,
                    {"weight": weight, "frozen": frozen, "transition": t, "strength": abs(weight)},
                )


def _keys(graph: "networkx.Graph[Any]", relation: tuple[int, int, Attributes] | None) -> Keys:
    """Returns an id and a type for every attribute, in the order in which they are first met."""
    keys: Keys = {}
    edges = [] if relation is None else [("edge", relation[-1])]
    for what, said in chain(
        [("graph", graph.graph)], (("node", each) for each in graph.nodes.values()), edges
    ):
        for name, value in said.items():
            keys.setdefault((what, name), (f"d{len(keys)}", _TYPES[type(value)]))
    return keys


def _data(what: str, said: Attributes, keys: Keys) -> str:
    return "".join(
        _element(keys[what, name][0], escape(str(value))) for name, value in said.items()
    )


def _element(key: str, text: str) -> str:
    return f'<data key="{key}">{text}</data>' if text else f'<data key="{key}" />'
