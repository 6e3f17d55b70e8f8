"""Change: everything one commit does to a graph, as data that can be inverted, replayed and
stored.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ._coordinates import VectorChange
from ._index_map import IndexMap, Labels
from ._transition import Topology


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
