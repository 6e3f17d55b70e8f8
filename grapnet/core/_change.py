"""Change: everything one commit does to a graph, as data that can be inverted, replayed and
stored.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._coordinates import VectorChange
from ._errors import HistoryError
from ._index_map import IndexMap, Labels, ascending, contains
from ._layer import rows_among
from ._sets import RelationSet
from ._transition import Topology

if TYPE_CHECKING:
    from ._graph import Graph


@dataclass(frozen=True, eq=False)
class NodeRecord:
    """Who some nodes are: uids, owners, activations."""

    uids: Tensor  # [n] int64
    owners: Labels
    activations: Labels

    def __len__(self) -> int:
        return self.uids.shape[0]


@dataclass(frozen=True, eq=False)
class Relabel:
    """Names that change on surviving rows (in new rows)."""

    rows: Tensor  # [n] int32
    before: Labels
    after: Labels

    def inverse(self, index: IndexMap) -> "Relabel":
        """Returns the relabelling that leads back."""
        return Relabel(index.old_positions(self.rows), self.after, self.before)


@dataclass(frozen=True, eq=False)
class LayerChange:
    """What happens to one layer: rows that come and go, biases, names, and the columns that ride
    with it.
    """

    index: IndexMap
    born: NodeRecord
    gone: NodeRecord
    biases: VectorChange | None  # None for the sensory layer
    owners: Relabel | None = None
    activations: Relabel | None = None
    # by name, of those that were there
    columns: dict[str, VectorChange] = field(default_factory=dict)
    # old positions of relations that left their parent's constant to the child's bias
    folded: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """True when nothing happens."""
        turned = self.biases is not None and (
            len(self.biases.flips) > 0 or self.biases.shift is not None
        )
        return (
            self.index.is_identity
            and not turned
            and self.owners is None
            and self.activations is None
        )

    def fits(self, uids: Tensor) -> bool:
        """Says whether a layer of these uids is like the one that the change was made on."""
        if len(uids) != self.index.old_size or not torch.equal(
            uids[self.index.removed.long()], self.gone.uids
        ):
            return False
        return not bool((self.index.carry(uids, self.born.uids).diff() <= 0).any())

    def to(self, device: torch.device) -> "LayerChange":
        """Returns the change with its coordinates on a device; rows are counted on the CPU."""
        columns = {name: c.to(device) for name, c in self.columns.items()}
        folded = None if self.folded is None else self.folded.to(device)
        return replace(
            self, biases=self.biases and self.biases.to(device), columns=columns, folded=folded
        )

    def without_values(self) -> "LayerChange":
        """Returns the change as the journal keeps it for ever."""
        return replace(
            self, biases=self.biases and self.biases.without_values(), columns={}, folded=None
        )

    def inverse(self, *, with_gradients: bool) -> "LayerChange":
        """Returns the change that leads back."""
        return LayerChange(
            self.index.inverse(),
            born=self.gone,
            gone=self.born,
            biases=self.biases and self.biases.inverse(with_gradients=with_gradients),
            owners=self.owners and self.owners.inverse(self.index),
            activations=self.activations and self.activations.inverse(self.index),
            columns={
                name: c.inverse(with_gradients=with_gradients) for name, c in self.columns.items()
            },
        )


@dataclass(frozen=True, eq=False)
class Pairs:
    """Relations named for ever: the uids of both ends."""

    parents: Tensor  # [n] int32
    children: Tensor  # [n] int32

    def __len__(self) -> int:
        return self.parents.shape[0]


@dataclass(frozen=True, eq=False)
class TransitionChange:
    """What happens to the relations of one transition."""

    index: IndexMap
    born: Pairs
    gone: Pairs
    weights: VectorChange
    wiring: Topology | None = None  # that it leads to, as far as known; the journal keeps none

    @property
    def is_empty(self) -> bool:
        """True when nothing happens."""
        return self.index.is_identity and len(self.weights.flips) == 0

    def inverse(self, *, with_gradients: bool) -> "TransitionChange":
        """Returns the change that leads back."""
        weights = self.weights.inverse(with_gradients=with_gradients)
        return TransitionChange(weights.index, born=self.gone, gone=self.born, weights=weights)


@dataclass(frozen=True, eq=False)
class Change:
    """What one commit does, layer by layer and transition by transition; what is not named
    stays.
    """

    layers: dict[int, LayerChange]
    transitions: dict[int, TransitionChange]

    @property
    def is_empty(self) -> bool:
        """True when nothing happens."""
        return all(c.is_empty for c in self.layers.values()) and all(
            c.is_empty for c in self.transitions.values()
        )

    def inverse(self, *, with_gradients: bool = False) -> "Change":
        """Returns the change that leads back to where this one started."""
        return Change(
            {n: c.inverse(with_gradients=with_gradients) for n, c in self.layers.items()},
            {t: c.inverse(with_gradients=with_gradients) for t, c in self.transitions.items()},
        )

    def to(self, device: torch.device) -> "Change":
        """Returns the change with its coordinates and relations on a device; rows are counted on
        the CPU.
        """
        if all(vector.flips.device == device for vector in self._vectors()):
            return self
        layers = {n: c.to(device) for n, c in self.layers.items()}
        weights = {t: c.weights.to(device) for t, c in self.transitions.items()}
        wires = {
            t: replace(c, index=weights[t].index, weights=weights[t], wiring=None)
            for t, c in self.transitions.items()
        }
        return Change(layers, wires)

    def without_values(self) -> "Change":
        """Returns the change without the weights and biases that came and went."""
        layers = {n: c.without_values() for n, c in self.layers.items()}
        transitions = {
            t: replace(c, weights=c.weights.without_values()) for t, c in self.transitions.items()
        }
        return Change(layers, transitions)

    @property
    def has_values(self) -> bool:
        """False once the journal has let go of the weights and biases that came and went."""
        return all(vector.gone_values is not None for vector in self._vectors())

    @property
    def detail_bytes(self) -> int:
        """The size of the lists of nodes and relations that came and went."""
        parts = [
            t
            for c in self.layers.values()
            for t in (c.index.removed, c.index.inserted, c.born.uids, c.gone.uids)
        ]
        for c in self.transitions.values():
            ends = (c.born.parents, c.born.children, c.gone.parents, c.gone.children)
            parts += [c.index.removed, c.index.inserted, c.weights.flips, *ends]
        return sum(t.numel() * t.element_size() for t in parts)

    def counts(self) -> dict[str, int]:
        """Returns how many nodes and relations came and went and how many coordinates were frozen
        or released.
        """
        layers, transitions = self.layers.values(), self.transitions.values()
        turned = [c.biases.flips for c in layers if c.biases] + [
            c.weights.flips for c in transitions
        ]
        return {
            "nodes_added": sum(len(c.born) for c in layers),
            "nodes_removed": sum(len(c.gone) for c in layers),
            "relations_added": sum(len(c.born) for c in transitions),
            "relations_removed": sum(len(c.gone) for c in transitions),
            "coordinates_turned": sum(map(len, turned)),
        }

    def _vectors(self) -> list[VectorChange]:
        return [c.biases for c in self.layers.values() if c.biases] + [
            c.weights for c in self.transitions.values()
        ]


def wirings_after(graph: "Graph", change: Change) -> dict[int, Topology]:
    """Returns the wiring after a change of every transition whose relations move or whose ends are
    renumbered.
    """
    wirings = {}
    for t, transition in enumerate(graph.transitions):
        upper = change.layers.get(t)
        lower = change.layers.get(t + 1)
        wires = change.transitions.get(t)
        if wires is not None and wires.wiring is not None:
            wirings[t] = wires.wiring
        elif any(c is not None and not c.index.is_identity for c in (upper, lower, wires)):
            wirings[t] = rewired(graph, t, transition.topology, upper, lower, wires)
    return wirings


def rewired(
    graph: "Graph",
    t: int,
    topology: Topology,
    upper: LayerChange | None,
    lower: LayerChange | None,
    wires: TransitionChange | None,
) -> Topology:
    """Returns the wiring of a transition after the changes of its two layers and of its
    relations.
    """
    child, degrees, device, n_children = (
        topology.child,
        topology.degrees.long(),
        topology.child.device,
        topology.n_children,
    )
    if lower is not None and not lower.index.is_identity:
        if len(lower.index.removed) or int(lower.index.inserted[0]) < n_children:
            child = (
                lower.index.new_positions(ascending(n_children, torch.device("cpu")))
                .to(device)
                .index_select(0, child)
            )
        n_children = lower.index.new_size
    if wires is not None:
        degrees = topology.degrees_without(wires.index.removed)
        child = wires.index.carry(
            child, rows_after(graph, t + 1, lower, wires.born.children).to(device)
        )
    if upper is not None:
        degrees = upper.index.carry(degrees)
    if wires is not None and len(wires.born):
        parents = rows_after(graph, t, upper, wires.born.parents).to(device)
        degrees = degrees + torch.bincount(parents, minlength=len(degrees))
    ptr = torch.zeros(len(degrees) + 1, dtype=torch.int32, device=device)
    ptr[1:] = degrees.cumsum(0)
    return Topology(ptr, child, n_children)


def rows_after(graph: "Graph", number: int, change: LayerChange | None, uids: Tensor) -> Tensor:
    """Returns the rows that nodes of a layer have after its change."""
    present = graph.layers[number].uid
    return rows_among(
        present if change is None else change.index.carry(present, change.born.uids), uids
    )


def require_fit(graph: "Graph", whole: Change, version: int) -> None:
    """Raises HistoryError when the change of a commit was not made on a graph like this one."""
    for number, change in whole.layers.items():
        if number >= len(graph.layers) or not change.fits(graph.layers[number].uid):
            raise HistoryError(
                f"commit {version} was made on another graph: layer {number} differs"
            )
    for t, change in whole.transitions.items():
        if t >= len(graph.transitions) or not _wires_fit(graph, t, change, whole):
            raise HistoryError(
                f"commit {version} was made on another graph: transition {t} differs"
            )


def _wires_fit(graph: "Graph", t: int, change: TransitionChange, whole: Change) -> bool:
    """Says whether what the change cuts is here, and what it connects is not."""
    store = graph.transitions[t]
    if change.index.old_size != store.size:
        return False
    cut = RelationSet(graph, {t: change.index.removed})
    if not torch.equal(cut.parents.int(), change.gone.parents) or not torch.equal(
        cut.children.int(), change.gone.children
    ):
        return False
    parents, children = (
        graph.layers[t].rows(change.born.parents),
        graph.layers[t + 1].rows(change.born.children),
    )
    newborn = [whole.layers[n].born.uids if n in whole.layers else None for n in (t, t + 1)]
    for rows, uids, fresh in (
        (parents, change.born.parents, newborn[0]),
        (children, change.born.children, newborn[1]),
    ):
        if bool((rows < 0).any()) and (
            fresh is None or not bool(torch.isin(uids[rows < 0], fresh).all())
        ):
            return False
    upper, lower = whole.layers.get(t), whole.layers.get(t + 1)
    after = rewired(graph, t, store.topology, upper, lower, change)
    owners = rows_after(graph, t, upper, change.born.parents)
    if not torch.equal(after.parents_at(change.index.inserted).cpu(), owners):
        return False
    both = (parents >= 0) & (children >= 0)
    found = store.topology.find(
        parents[both].to(graph.device), children[both].to(graph.device)
    ).int()
    return bool(((found < 0) | contains(change.index.removed, found)).all())
