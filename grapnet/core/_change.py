"""The content of a commit as data: how vectors, layers and tensors change."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ._grid_map import GridMap, RowMap, inverses
from ._index_map import IndexMap, empty_positions, flatnonzero, moved
from ._opened import Pattern


@dataclass(frozen=True, eq=False)
class Labels:
    """A column of names (owners, activations): `names[codes[row]]`; never changed in place."""

    codes: Tensor  # [n] int32, on the CPU
    names: tuple[str | None, ...]

    @classmethod
    def uniform(cls, name: str | None, size: int) -> "Labels":
        """Returns `size` rows of one name."""
        return cls(torch.zeros(size, dtype=torch.int32, device="cpu"), (name,))

    @classmethod
    def join(cls, columns: "list[Labels]") -> "Labels":
        """Returns the concatenated columns."""
        names = tuple(dict.fromkeys(name for column in columns for name in column.names))
        codes = [column._recoded(names) for column in columns]
        return cls(
            torch.cat(codes) if codes else torch.empty(0, dtype=torch.int32, device="cpu"), names
        )

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, row: int) -> str | None:
        return self.names[self.codes[row]]

    def __iter__(self) -> Iterator[str | None]:
        return (self.names[code] for code in self.codes.tolist())

    def select(self, rows: Tensor) -> "Labels":
        """Returns the labels of `rows`, in that order."""
        if len(self.names) == 1:
            return Labels.uniform(self.names[0], rows.shape[0])
        return Labels(self.codes[rows.long()], self.names)

    def where(self, name: str | None) -> Tensor:
        """Returns the rows that carry `name`."""
        if name not in self.names:
            return torch.empty(0, dtype=torch.int32, device="cpu")
        return flatnonzero(self.codes == self.names.index(name))

    def kinds(self) -> list[tuple[str | None, Tensor]]:
        """Returns every name in use with its rows."""
        return [(name, rows) for name in self.names if len(rows := self.where(name))]

    def differs(self, other: "Labels", rows: Tensor) -> Tensor:
        """Returns one bool per row: True if another column of the same length has another name."""
        names = tuple(dict.fromkeys(self.names + other.names))
        return self._recoded(names)[rows.long()] != other._recoded(names)[rows.long()]

    def carry(self, index: IndexMap, born: "Labels") -> "Labels":
        """Returns the column after a commit, `born` at the inserted rows."""
        names = tuple(dict.fromkeys(self.names + born.names))
        if len(names) == 1:
            return Labels.uniform(names[0], index.new_size)
        return Labels(index.carry(self._recoded(names), born._recoded(names)), names)

    def replaced(self, rows: Tensor, others: "Labels") -> "Labels":
        """Returns the column with `others` at `rows`."""
        names = tuple(dict.fromkeys(self.names + others.names))
        codes = self._recoded(names).clone()
        codes[rows.long()] = others._recoded(names)
        return Labels(codes, names)

    def compact(self) -> "Labels":
        """Returns the same column with unused names left out of its table."""
        if len(self.names) == 1 and len(self):
            return self
        used = torch.bincount(self.codes, minlength=len(self.names)).tolist()
        names = tuple(name for name, count in zip(self.names, used, strict=True) if count)
        return Labels(self._recoded(names), names)

    def _recoded(self, names: tuple[str | None, ...]) -> Tensor:
        if names[: len(self.names)] == self.names:
            return self.codes
        table = torch.tensor(
            [names.index(n) if n in names else 0 for n in self.names],
            dtype=torch.int32,
            device="cpu",
        )
        return table[self.codes.long()]


@dataclass(frozen=True, eq=False)
class Shift:
    """Values that a commit itself changes: `before` becomes `after` at `positions` (in the new
    vector).
    """

    positions: Tensor  # [n] int32
    before: Tensor
    after: Tensor

    def apply(self, current: Tensor) -> Tensor:
        """Returns the values after it; see `shifted`."""
        return shifted(current, self.before, self.after)


def shifted(current: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Returns `after` where a value is still `before`, and adds the difference elsewhere."""
    return torch.where(current == before, after, current + (after - before))


@dataclass(frozen=True, eq=False)
class Assignment:
    """Values that a commit assigns to coordinates that stay: those of a vector, or the cells of a
    tensor.

    Attributes:
        positions: ascending positions in the vector before the commit, [n] int32. Of a tensor: in
            the vector of its cells that exist, on the CPU.
        after: the values after the commit; None after the journal has dropped them.
        before: the values that the commit finds; None before it is prepared, and like `after`.
    """

    positions: Tensor
    after: Tensor | None
    before: Tensor | None = None

    def __len__(self) -> int:
        return self.positions.shape[0]

    def inverse(self, positions: Tensor) -> "Assignment":
        """Returns the assignment that leads back, given the positions after the commit."""
        return Assignment(positions, self.before)

    def to(self, device: torch.device) -> "Assignment":
        """Returns the assignment on a device."""
        after = self.after
        before = self.before
        if after is not None:
            after = after.to(device)
        if before is not None:
            before = before.to(device)
        return Assignment(moved(self.positions, device), after, before)

    def without_values(self) -> "Assignment":
        """Returns the assignment as the journal keeps it for ever."""
        return Assignment(self.positions, None)


@dataclass(frozen=True, eq=False)
class VectorChange:
    """What one commit does to one vector, in both directions.

    The values are None after the journal has dropped them.
    """

    index: IndexMap
    born_frozen: Tensor | None  # [inserted] bool; None if none of them is frozen
    gone_frozen: Tensor | None  # [removed] bool; None if none of them is frozen
    flips: Tensor  # sorted int32 positions in the new vector: survivors whose frozen bit turns
    born_values: Tensor | None = None  # [inserted]
    gone_values: Tensor | None = None  # [removed]
    shift: Shift | None = None
    assigned: Assignment | None = None

    @classmethod
    def of_free(cls, index: IndexMap, born: Tensor | None = None) -> "VectorChange":
        """Returns the change of a vector without frozen coordinates; new ones get `born`, or 0."""
        none = empty_positions(index.removed.device)
        return cls(index, None, None, flips=none, born_values=born)

    def inverse(self) -> "VectorChange":
        """Returns the change that leads back."""
        shift = self.shift
        assigned = self.assigned
        if assigned is not None:
            assigned = assigned.inverse(self.index.new_positions(assigned.positions))
        return VectorChange(
            self.index.inverse(),
            born_frozen=self.gone_frozen,
            gone_frozen=self.born_frozen,
            flips=self.index.old_positions(self.flips),
            born_values=self.gone_values,
            shift=shift
            and Shift(self.index.old_positions(shift.positions), shift.after, shift.before),
            assigned=assigned,
        )

    def to(self, device: torch.device) -> "VectorChange":
        """Returns the change on the device of the net, which may have moved since."""
        if self.flips.device == device:
            return self
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        moved |= {
            name: value.to(device)
            for name, value in moved.items()
            if isinstance(value, Tensor | IndexMap)
        }
        shift = self.shift and Shift(
            *(getattr(self.shift, f.name).to(device) for f in fields(Shift))
        )
        assigned = self.assigned and self.assigned.to(device)
        return VectorChange(**{**moved, "shift": shift, "assigned": assigned})

    def without_values(self) -> "VectorChange":
        """Returns the change as the journal keeps it for ever."""
        assigned = self.assigned and self.assigned.without_values()
        return replace(self, born_values=None, gone_values=None, assigned=assigned)

    @property
    def n_assigned(self) -> int:
        """The number of coordinates that it assigns."""
        return 0 if self.assigned is None else len(self.assigned)


@dataclass(frozen=True, eq=False)
class NodeRecord:
    """The identity of some nodes: uids, owners, activations."""

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
    """The change of one layer: rows added and removed, biases, names and columns."""

    index: IndexMap
    born: NodeRecord
    gone: NodeRecord
    biases: VectorChange | None  # None for the sensory layer
    owners: Relabel | None = None
    activations: Relabel | None = None
    # by name, of those that were there
    columns: dict[str, VectorChange] = field(default_factory=dict)
    # by transition: old positions of relations that left their parent's constant to the child's
    # bias
    folded: dict[int, Tensor] | None = None

    @property
    def is_empty(self) -> bool:
        """True when nothing happens."""
        biases_stay = self.biases is None or (
            len(self.biases.flips) == 0
            and self.biases.shift is None
            and self.biases.assigned is None
        )
        return (
            self.index.is_identity
            and biases_stay
            and self.owners is None
            and self.activations is None
        )

    def fits(self, uids: Tensor) -> bool:
        """Returns whether a layer with these uids equals the one that the change was made on."""
        if len(uids) != self.index.old_size or not torch.equal(
            uids[self.index.removed.long()], self.gone.uids
        ):
            return False
        return not bool((self.index.carry(uids, self.born.uids).diff() <= 0).any())

    def to(self, device: torch.device) -> "LayerChange":
        """Returns the change with its coordinates on a device; rows are counted on the CPU."""
        columns = {name: c.to(device) for name, c in self.columns.items()}
        folded = self.folded and {t: at.to(device) for t, at in self.folded.items()}
        return replace(
            self, biases=self.biases and self.biases.to(device), columns=columns, folded=folded
        )

    def without_values(self) -> "LayerChange":
        """Returns the change as the journal keeps it for ever."""
        return replace(
            self, biases=self.biases and self.biases.without_values(), columns={}, folded=None
        )

    def inverse(self) -> "LayerChange":
        """Returns the change that leads back."""
        return LayerChange(
            self.index.inverse(),
            born=self.gone,
            gone=self.born,
            biases=self.biases and self.biases.inverse(),
            owners=self.owners and self.owners.inverse(self.index),
            activations=self.activations and self.activations.inverse(self.index),
            columns={name: c.inverse() for name, c in self.columns.items()},
        )


@dataclass(frozen=True, eq=False)
class Pairs:
    """Relations by the uids of both ends, on the device of the relations."""

    parents: Tensor  # [n] int32
    children: Tensor  # [n] int32

    def __len__(self) -> int:
        return self.parents.shape[0]

    def to(self, device: torch.device) -> "Pairs":
        """Returns the same relations on a device."""
        return Pairs(moved(self.parents, device), moved(self.children, device))


def no_pairs() -> Pairs:
    """Returns no relations."""
    none = torch.empty(0, dtype=torch.int32, device="cpu")
    return Pairs(none, none)


@dataclass(frozen=True, eq=False)
class TransitionChange:
    """The change of the relations of one transition."""

    index: IndexMap
    born: Pairs
    gone: Pairs
    weights: VectorChange
    # the Topology that it leads to, as far as known; the journal keeps none
    wiring: Any = None

    @property
    def is_empty(self) -> bool:
        """True when nothing happens."""
        weights_stay = len(self.weights.flips) == 0 and self.weights.assigned is None
        return self.index.is_identity and weights_stay

    def inverse(self) -> "TransitionChange":
        """Returns the change that leads back."""
        weights = self.weights.inverse()
        return TransitionChange(weights.index, born=self.gone, gone=self.born, weights=weights)


@dataclass(frozen=True)
class RelationCounts:
    """How many relations a commit adds, removes, freezes or unfreezes in the tensors of a model."""

    added: int = 0
    removed: int = 0
    frozen_or_unfrozen: int = 0

    def inverse(self) -> "RelationCounts":
        """Returns the counts of the way back."""
        return RelationCounts(self.removed, self.added, self.frozen_or_unfrozen)


NO_RELATIONS = RelationCounts()


@dataclass(frozen=True, eq=False)
class GridChange:
    """What one commit does to one tensor, in both directions.

    The values are None after the journal has dropped them.

    Attributes:
        index: how the cells that exist move.
        before: which cells exist before the commit, and which are frozen; None if all are free.
        after: the same after it.
        relations: the relations that change, beside those of nodes that come or leave.
        assigned: the cells that stay and get other values.
    """

    index: GridMap | RowMap
    born_values: Tensor | None = None  # [cells that come]
    gone_values: Tensor | None = None  # [cells that leave]
    before: Pattern | None = None
    after: Pattern | None = None
    relations: RelationCounts = NO_RELATIONS
    assigned: Assignment | None = None

    def inverse(self, index: GridMap | RowMap) -> "GridChange":
        """Returns the change that leads back, given the inverse of the map."""
        assigned = self.assigned
        if assigned is not None:
            assigned = assigned.inverse(self.index.new_positions(assigned.positions))
        return GridChange(
            index,
            born_values=self.gone_values,
            before=self.after,
            after=self.before,
            relations=self.relations.inverse(),
            assigned=assigned,
        )

    def without_values(self) -> "GridChange":
        """Returns the change as the journal keeps it for ever."""
        return GridChange(
            self.index,
            before=self.before,
            after=self.after,
            relations=self.relations,
            assigned=self.assigned and self.assigned.without_values(),
        )

    @property
    def n_assigned(self) -> int:
        """The number of cells that it assigns."""
        return 0 if self.assigned is None else len(self.assigned)


@dataclass(frozen=True)
class AttributeChange:
    """A number of a module that a commit changes, such as `num_heads`."""

    module: str  # its path in the model
    name: str
    before: Any
    after: Any

    def inverse(self) -> "AttributeChange":
        """Returns the change that leads back."""
        return replace(self, before=self.after, after=self.before)


@dataclass(frozen=True, eq=False)
class BlockParameter:
    """A Parameter of a block or of a layer that comes or leaves.

    Attributes:
        name: its name in the model, while the block is there.
        block: the path of the block.
        parameter: the Parameter.
        beside: the same Parameter of a neighbouring block; an attached optimizer puts both into
            one group.
        copies_state: whether it starts with a copy of the optimizer state of `beside`.
        is_before: whether its place in the group is before `beside`, not behind it.
    """

    name: str
    block: str
    parameter: nn.Parameter
    beside: nn.Parameter | None
    copies_state: bool = False
    is_before: bool = False


@dataclass(frozen=True, eq=False)
class DepthChange:
    """The blocks that a commit inserts into an adopted model, and those that it removes; likewise
    the layers of a net.

    Attributes:
        came: the paths of the blocks that come, as they are called after the commit.
        left: the paths of the blocks that leave, as they were called before it.
        born: the uids of the nodes that come with new spaces or layers, [n] int64.
        gone: the uids of the nodes that leave with spaces or layers, [n] int64.
        renamed: the names of Parameters that stay and are called otherwise, before and after.
        coming: the Parameters of the blocks that come.
        leaving: the Parameters of the blocks that leave.
        asked: what the edit asks for, so that a copy of the model can do the same; empty for the
            way back of an adopted model.
        back: the same for the way back of a net; empty for an adopted model.
        relations_born: the relations of a net that come, also those that get another parent.
        relations_gone: the relations of a net that leave, likewise.
        before: what the graph installs to go back; None after the journal has dropped it.
        after: what it installs to go on, likewise.
    """

    came: tuple[str, ...]
    left: tuple[str, ...]
    born: Tensor
    gone: Tensor
    renamed: dict[str, str] = field(default_factory=dict)
    coming: tuple[BlockParameter, ...] = ()
    leaving: tuple[BlockParameter, ...] = ()
    asked: tuple[Any, ...] = ()
    back: tuple[Any, ...] = ()
    relations_born: Pairs = field(default_factory=no_pairs)
    relations_gone: Pairs = field(default_factory=no_pairs)
    before: Any = None
    after: Any = None

    def inverse(self) -> "DepthChange":
        """Returns the change that leads back."""
        return DepthChange(
            came=self.left,
            left=self.came,
            born=self.gone,
            gone=self.born,
            renamed={after: before for before, after in self.renamed.items()},
            coming=self.leaving,
            leaving=self.coming,
            asked=self.back,
            back=self.asked,
            relations_born=self.relations_gone,
            relations_gone=self.relations_born,
            before=self.after,
            after=self.before,
        )

    def without_values(self) -> "DepthChange":
        """Returns the change as the journal keeps it for ever, without the blocks themselves."""
        asked = tuple(one.without_values() for one in self.asked)
        return replace(self._without_blocks(), asked=asked, back=())

    def copied(self, memo: dict[int, Any]) -> "DepthChange":
        """Returns the change for the copy of a graph that is being made, see `copy.deepcopy`.

        The copy of a net has copies of the layers that undo brings back. The blocks of an adopted
        model belong to that model alone.
        """
        after = copy.deepcopy(self.after, memo)
        if after is self.after:
            return self
        return replace(
            self,
            coming=copy.deepcopy(self.coming, memo),
            leaving=copy.deepcopy(self.leaving, memo),
            before=copy.deepcopy(self.before, memo),
            after=after,
        )

    def _without_blocks(self) -> "DepthChange":
        return replace(self, renamed={}, coming=(), leaving=(), before=None, after=None)

    def __reduce__(self) -> tuple[Any, ...]:
        # The blocks belong to one model; a pickled journal has none.
        bare = self._without_blocks()
        return DepthChange, tuple(getattr(bare, part.name) for part in fields(bare))


@dataclass(frozen=True, eq=False)
class Change:
    """The change of one commit by layer and transition; others stay."""

    layers: dict[int, LayerChange]
    transitions: dict[int, TransitionChange]
    # of an adopted model: by the names of Parameters and buffers
    tensors: dict[str, GridChange] = field(default_factory=dict)
    attributes: tuple[AttributeChange, ...] = ()
    # of an adopted model whose blocks come or leave, or of a net whose layers do; then nothing
    # else changes
    depth: DepthChange | None = None

    @property
    def is_empty(self) -> bool:
        """True when nothing happens."""
        parts = [*self.layers.values(), *self.transitions.values()]
        is_still = not self.tensors and self.depth is None
        return is_still and all(part.is_empty for part in parts)

    def inverse(self) -> "Change":
        """Returns the inverse change."""
        return Change(
            {n: c.inverse() for n, c in self.layers.items()},
            {t: c.inverse() for t, c in self.transitions.items()},
            self._inverse_tensors(),
            tuple(attribute.inverse() for attribute in reversed(self.attributes)),
            self.depth and self.depth.inverse(),
        )

    def _inverse_tensors(self) -> dict[str, GridChange]:
        grids = [c.index for c in self.tensors.values() if isinstance(c.index, GridMap)]
        back = dict(zip(grids, inverses(grids), strict=True))
        found = {}
        for name, c in self.tensors.items():
            index = c.index.inverse() if isinstance(c.index, RowMap) else back[c.index]
            found[name] = c.inverse(index)
        return found

    def to(self, device: torch.device) -> "Change":
        """Returns the change with its coordinates and relations on a device; rows are counted on
        the CPU.
        """
        if all(vector.flips.device == device for vector in self._vectors()):
            return self
        layers = {n: c.to(device) for n, c in self.layers.items()}
        weights = {t: c.weights.to(device) for t, c in self.transitions.items()}
        wires = {}
        for t, c in self.transitions.items():
            wires[t] = TransitionChange(
                weights[t].index, c.born.to(device), c.gone.to(device), weights[t]
            )
        return replace(self, layers=layers, transitions=wires)

    def without_values(self) -> "Change":
        """Returns the change without added and removed weights and biases."""
        layers = {n: c.without_values() for n, c in self.layers.items()}
        transitions = {
            t: replace(c, weights=c.weights.without_values()) for t, c in self.transitions.items()
        }
        tensors = {name: c.without_values() for name, c in self.tensors.items()}
        depth = self.depth and self.depth.without_values()
        return replace(self, layers=layers, transitions=transitions, tensors=tensors, depth=depth)

    @property
    def has_values(self) -> bool:
        """False after the journal has dropped added and removed weights, biases and blocks."""
        if self.depth is not None and self.depth.after is None:
            return False
        parts = [*self._vectors(), *self.tensors.values()]
        return all(part.gone_values is not None for part in parts)

    @property
    def detail_bytes(self) -> int:
        """The size of the lists of added and removed nodes and relations."""
        parts = [
            t
            for c in self.layers.values()
            for t in (c.index.removed, c.index.inserted, c.born.uids, c.gone.uids)
        ]
        for c in self.transitions.values():
            ends = (c.born.parents, c.born.children, c.gone.parents, c.gone.children)
            parts += [c.index.removed, c.index.inserted, c.weights.flips, *ends]
        for c in (*self._vectors(), *self.tensors.values()):
            if c.assigned is not None:
                parts.append(c.assigned.positions)
        for c in self.tensors.values():
            parts += [pattern.kinds for pattern in (c.before, c.after) if pattern is not None]
            if isinstance(c.index, RowMap):
                parts += [c.index.rows.removed, c.index.rows.inserted]
        if self.depth is not None:
            parts += [self.depth.born, self.depth.gone]
            for pairs in (self.depth.relations_born, self.depth.relations_gone):
                parts += [pairs.parents, pairs.children]
        return sum(t.numel() * t.element_size() for t in parts)

    def born_uids(self) -> list[Tensor]:
        """Returns the uids of the nodes that come."""
        found = [c.born.uids for c in self.layers.values()]
        if self.depth is not None:
            found.append(self.depth.born)
        return found

    def gone_uids(self) -> list[Tensor]:
        """Returns the uids of the nodes that leave."""
        found = [c.gone.uids for c in self.layers.values()]
        if self.depth is not None:
            found.append(self.depth.gone)
        return found

    def born_relations(self) -> list[Pairs]:
        """Returns the relations that come, without those in the tensors of an adopted model."""
        found = [c.born for c in self.transitions.values()]
        if self.depth is not None:
            found.append(self.depth.relations_born)
        return found

    def gone_relations(self) -> list[Pairs]:
        """Returns the relations that leave; see `born_relations`."""
        found = [c.gone for c in self.transitions.values()]
        if self.depth is not None:
            found.append(self.depth.relations_gone)
        return found

    def counts(self) -> dict[str, int]:
        """Returns the numbers of nodes, relations and blocks added and removed, and of coordinates
        frozen, unfrozen and assigned.
        """
        layers = self.layers.values()
        transitions = self.transitions.values()
        flips = [c.biases.flips for c in layers if c.biases] + [
            c.weights.flips for c in transitions
        ]
        inside = [c.relations for c in self.tensors.values()]
        came: tuple[str, ...] = ()
        left: tuple[str, ...] = ()
        if self.depth is not None:
            came = self.depth.came
            left = self.depth.left
        return {
            "nodes_added": sum(map(len, self.born_uids())),
            "nodes_removed": sum(map(len, self.gone_uids())),
            "relations_added": sum(map(len, self.born_relations()))
            + sum(part.added for part in inside),
            "relations_removed": sum(map(len, self.gone_relations()))
            + sum(part.removed for part in inside),
            "coordinates_frozen_or_unfrozen": sum(map(len, flips))
            + sum(part.frozen_or_unfrozen for part in inside),
            "coordinates_assigned": sum(
                part.n_assigned for part in (*self._vectors(), *self.tensors.values())
            ),
            "blocks_added": len(came),
            "blocks_removed": len(left),
        }

    def _vectors(self) -> list[VectorChange]:
        return [c.biases for c in self.layers.values() if c.biases] + [
            c.weights for c in self.transitions.values()
        ]
