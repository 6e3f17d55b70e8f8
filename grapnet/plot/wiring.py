"""A net as plain arrays: its relations, their marks, and the names that nodes are coloured by."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grapnet import Commit, GrapNet, GrapNode, NodeSet, RelationSet

# what nodes can be coloured by
COLUMNS = {
    "owner": "owner_names",
    "activation": "activation_names",
}
UNOWNED = "no owner"  # what nodes without a name are called
Marked = NodeSet | RelationSet | GrapNode


@dataclass(frozen=True, eq=False)
class Wires:
    """The relations of one transition, in owner order."""

    parents: np.ndarray  # [n] rows of the upper layer
    children: np.ndarray  # [n] rows of the lower layer
    weights: np.ndarray  # [n] float64, 0 where it is no finite number
    finite: np.ndarray  # [n] bool
    frozen: np.ndarray  # [n] bool
    marked: np.ndarray  # [n] bool: is to stand out


@dataclass(frozen=True, eq=False)
class Cuts:
    """Relations that are gone, as rows of the layers that they led between, and those whose nodes
    are gone too.
    """

    rows: list[tuple[np.ndarray, np.ndarray]]  # one pair of arrays a transition
    lost: int

    def __len__(self) -> int:
        return sum(len(parents) for parents, _ in self.rows)


@dataclass(frozen=True, eq=False)
class Names:
    """What the nodes of one layer are called: `names[codes[row]]`, in order of appearance."""

    codes: np.ndarray  # [n] int64
    names: list[str | None]

    @property
    def has_any(self) -> bool:
        """True when some node has a name."""
        return any(name is not None for name in self.names)


def require_net(net: object) -> None:
    """Raises TypeError for what is no net."""
    if not isinstance(net, GrapNet):
        way = (
            "; gn.from_module(module) makes a net of a stack of Linears"
            if isinstance(net, torch.nn.Module)
            else ""
        )
        raise TypeError(f"what is drawn is a GrapNet, got {type(net).__name__}{way}")


def wires(net: GrapNet, transition: int, marked: RelationSet | None = None) -> Wires:
    """Returns the relations of a transition; those in `marked` are marked, all of them without
    it.
    """
    store = net.transitions[transition]
    frozen = np.zeros(store.size, dtype=bool)
    frozen[store.frozen_at.cpu().numpy()] = True
    bits = np.ones(store.size, dtype=bool)
    if marked is not None:
        at = marked.positions_by_transition().get(transition, range(0))
        bits[:] = False
        bits[at.cpu().numpy() if isinstance(at, torch.Tensor) else slice(at.start, at.stop)] = True
    parents = store.topology.parents().cpu().numpy()
    weights = store.values().detach().double().cpu().numpy()
    finite = np.isfinite(weights)
    return Wires(
        parents, store.child.cpu().numpy(), np.where(finite, weights, 0), finite, frozen, bits
    )


def names_of(net: GrapNet, color_by: str) -> list[Names]:
    """Returns what the nodes of every layer are called, by owner or by activation."""
    if color_by not in COLUMNS:
        raise ValueError(
            f"color_by is {' or '.join(repr(name) for name in COLUMNS)}, got {color_by!r}"
        )
    found = []
    for layer in net.layers:
        labels = getattr(layer, COLUMNS[color_by])
        used, first, codes = np.unique(labels.codes.numpy(), return_index=True, return_inverse=True)
        order = first.argsort()
        found.append(Names(order.argsort()[codes], [labels.names[used[n]] for n in order]))
    return found


def all_names(names: Sequence[Names]) -> Iterator[str | None]:
    """Yields every name in use, hidden layers first, so that what they own has the first
    colours.
    """
    for part in (*names[1:-1], names[0], names[-1]):
        yield from part.names


def title_of(name: str | None) -> str:
    """Returns what a picture calls the nodes of one name; a name that says nothing by itself stands
    in quotes.

    Examples:
        >>> title_of("task-1"), title_of(None), title_of("no owner"), title_of("")
        ('task-1', 'no owner', "'no owner'", "''")
    """
    if name is None:
        return UNOWNED
    return repr(name) if name.strip() in ("", UNOWNED) else name


def marked_relations(net: GrapNet, highlight: Marked | None) -> RelationSet | None:
    """Returns the relations that are to stand out: those given, or all that nodes have; None for no
    difference.
    """
    if highlight is None or isinstance(highlight, RelationSet):
        _require_of(net, highlight)
        return highlight
    nodes = highlight.as_set() if isinstance(highlight, GrapNode) else highlight
    if not isinstance(nodes, NodeSet):
        raise TypeError(
            f"highlight is a RelationSet, a NodeSet or a GrapNode, got {type(highlight).__name__}"
        )
    _require_of(net, nodes)
    return nodes.incoming() | nodes.outgoing()


def cuts_since(net: GrapNet, since: int | Commit | None) -> Cuts:
    """Returns what the journal says was cut since a version, or since just before a commit, and is
    still gone.
    """
    none: Any = np.empty(0, dtype=np.int64)
    if since is None:
        return Cuts([(none, none)] * len(net.transitions), 0)
    # [n, 2] uids
    pairs = net.diff(since.version - 1 if isinstance(since, Commit) else since).relations_removed
    rows, found = [], 0
    for upper, lower in zip(net.layers, list(net.layers)[1:], strict=False):
        parents, children = upper.rows(pairs[:, 0]).numpy(), lower.rows(pairs[:, 1]).numpy()
        here = (parents >= 0) & (children >= 0)
        rows.append((parents[here], children[here]))
        found += int(here.sum())
    return Cuts(rows, len(pairs) - found)


def _require_of(net: GrapNet, found: NodeSet | RelationSet | None) -> None:
    if found is not None and found.graph is not net:
        raise ValueError("highlight belongs to another net than the one to draw")
