"""A net as plain arrays: its relations, and its nodes in groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from grapnet import Commit, GrapNet, GrapNode, NodeSet, RelationSet
from grapnet.spaces import Adopted

ColorBy = Literal["owner", "activation"]
Marked = NodeSet | RelationSet | GrapNode
MOST_GROUPS = 10  # boxes of one layer
FEW_FAMILIES = 8  # families that are distinguished in a layer without owners


@dataclass(frozen=True, eq=False)
class Wires:
    """The relations of one transition, in owner order."""

    parents: np.ndarray  # [n] rows of the upper layer
    children: np.ndarray  # [n] rows of the lower layer
    weights: np.ndarray  # [n] float64, 0 where the weight is not finite
    finite: np.ndarray  # [n] bool
    frozen: np.ndarray  # [n] bool
    marked: np.ndarray  # [n] bool


@dataclass(frozen=True, eq=False)
class Cuts:
    """Relations that were cut, by transition, and those that left together with a node."""

    rows: list[tuple[np.ndarray, np.ndarray]]  # (parents, children) of every transition
    lost: int

    def __len__(self) -> int:
        return sum(len(parents) for parents, _ in self.rows)


@dataclass(frozen=True, eq=False)
class Groups:
    """The nodes of one layer in groups, in order of appearance."""

    names: list[str | None]  # owners or activations, which decide the colour
    titles: list[str]
    codes: np.ndarray  # [n_nodes] the group of every row

    def __len__(self) -> int:
        return len(self.names)

    @property
    def sizes(self) -> np.ndarray:
        """The number of nodes of every group."""
        return np.bincount(self.codes, minlength=len(self))

    @property
    def places(self) -> np.ndarray:
        """The place of every row, [n_nodes], when those of a group lie together."""
        places = np.empty(len(self.codes), dtype=np.int64)
        places[np.argsort(self.codes, kind="stable")] = np.arange(len(self.codes))
        return places

    @property
    def has_names(self) -> bool:
        """Whether some node has a name."""
        return any(name is not None for name in self.names)


def require_net(net: GrapNet | Adopted) -> None:
    """Raises TypeError for an adopted model, whose relations may have several numbers each."""
    if isinstance(net, Adopted):
        raise TypeError("this picture is one of a GrapNet; plot.spaces draws an adopted model")


def wires_of(net: GrapNet, transition: int, marked: RelationSet | None = None) -> Wires:
    """Returns the relations of a transition; without `marked`, all of them are marked."""
    store = net.transitions[transition]
    frozen = np.zeros(store.size, dtype=bool)
    frozen[store.frozen_at.cpu().numpy()] = True
    bits = np.ones(store.size, dtype=bool)
    if marked is not None:
        bits[:] = False
        at = marked._positions_by_transition().get(transition, range(0))
        if isinstance(at, torch.Tensor):
            bits[at.cpu().numpy()] = True
        else:
            bits[at.start : at.stop] = True
    weights = store.values().detach().double().cpu().numpy()
    finite = np.isfinite(weights)
    return Wires(
        parents=store.topology.parents().cpu().numpy(),
        children=store.child.cpu().numpy(),
        weights=np.where(finite, weights, 0),
        finite=finite,
        frozen=frozen,
        marked=bits,
    )


def marked_relations(net: GrapNet, highlight: Marked | None) -> RelationSet | None:
    """Returns the relations that stand out: those given, or all that belong to the nodes given."""
    if highlight is None:
        return None
    if isinstance(highlight, GrapNode):
        highlight = highlight.as_set()
    if highlight.graph is not net:
        raise ValueError("highlight belongs to another net than the one to draw")
    if isinstance(highlight, RelationSet):
        return highlight
    return highlight.incoming() | highlight.outgoing()


def cuts_since(net: GrapNet, since: int | Commit | None) -> Cuts:
    """Returns the relations that were cut after a version, or by a commit and later ones."""
    if since is None:
        none = np.empty(0, dtype=np.int64)
        return Cuts([(none, none)] * len(net.transitions), 0)
    if isinstance(since, Commit):
        since = since.version - 1
    pairs = net.diff(since).relations_removed  # [n, 2] uids
    rows = []
    found = 0
    for source, target in net.ends:
        parents = net.layers[source].rows(pairs[:, 0]).numpy()
        children = net.layers[target].rows(pairs[:, 1]).numpy()
        here = (parents >= 0) & (children >= 0)
        rows.append((parents[here], children[here]))
        found += int(here.sum())
    return Cuts(rows, len(pairs) - found)


def groups_by(net: GrapNet, color_by: ColorBy) -> list[Groups]:
    """Returns the nodes of every layer, grouped by owner or by activation."""
    columns = {"owner": "_owner_names", "activation": "_activation_names"}
    found = []
    for layer in net.layers:
        labels = getattr(layer, columns[color_by])
        used, first, codes = np.unique(labels.codes.numpy(), return_index=True, return_inverse=True)
        order = first.argsort()
        names = [labels.names[used[n]] for n in order]
        titles = [title_of(name) for name in names]
        found.append(Groups(names, titles, order.argsort()[codes]))
    return found


def title_of(name: str | None) -> str:
    """Returns the name of an owner, or "no owner"."""
    if name is None:
        return "no owner"
    return name


def distinct_names(groups: Sequence[Groups]) -> list[str | None]:
    """Returns every name once, hidden layers first, so that their owners have the first colours."""
    names: dict[str | None, None] = {}
    for part in (*groups[1:-1], groups[0], groups[-1]):
        names |= dict.fromkeys(part.names)
    return list(names)


def summarized(net: GrapNet, groups: Sequence[Groups]) -> list[Groups]:
    """Returns at most ten groups per layer: the largest ones, or families where there are no names.

    A family is a set of nodes with the same children.
    """
    found = []
    for number, part in enumerate(groups):
        if part.has_names:
            found.append(_largest(part))
        else:
            found.append(_families(net, number))
    return found


def _largest(part: Groups) -> Groups:
    """Returns the largest groups, and one for all others."""
    if len(part) <= MOST_GROUPS:
        return part
    kept = np.sort(np.argsort(-part.sizes, kind="stable")[: MOST_GROUPS - 1])
    place = np.full(len(part), len(kept))
    place[kept] = np.arange(len(kept))
    names = [part.names[n] for n in kept]
    titles = [part.titles[n] for n in kept]
    titles.append(f"{len(part) - len(kept):,} others")
    return Groups([*names, None], titles, place[part.codes])


def _families(net: GrapNet, number: int) -> Groups:
    """Returns the families of a layer, or one group for all nodes where there are too many."""
    size = net.sizes[number]
    everything = Groups([None], ["all"], np.zeros(size, dtype=np.int64))
    leaving = net.leaving(number)
    if not leaving:
        return everything
    # Nodes of one family have the same degree: many degrees are many families.
    degrees = net.transitions[leaving[0]].topology.degrees.cpu()
    if len(degrees.unique()) > FEW_FAMILIES:
        return everything
    families = net.execution.families(leaving[0])
    titles = [f"family {n + 1}" for n in range(len(families))]
    codes = np.full(size, len(titles))
    for n, family in enumerate(families):
        codes[net.layers[number].rows(family.members.uids).numpy()] = n
    if (codes == len(families)).any():
        titles.append("no children")
    if len(titles) == 1 or len(titles) > min(FEW_FAMILIES, size - 1):
        return everything
    return Groups([None] * len(titles), titles, codes)
