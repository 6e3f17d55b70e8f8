"""Space: a set of nodes that tensors of a model share, such as the channels between two layers."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from grapnet.core._layer import LiveNodes, Roster
from grapnet.core._sets import NodeSet, as_key, how_many

from ._axes import Expression, atoms_of, occurrences, positions
from ._discovery import AtomRecord, Typed

if TYPE_CHECKING:
    from ._adopted import Adopted

Verdict = Literal["exact", "normalised", "differs", "unproved", "pinned"]


class Space(LiveNodes):
    """The nodes of one space, in order; a live NodeSet of all of them.

    Attributes:
        name: the module that writes it; `net.space(name)` returns it.
        pins: why its nodes cannot be added or removed; empty if they can.
        writers: names of the tensors that compute its nodes.
        readers: names of the tensors that sum over its nodes.
        riders: names of the other tensors with one entry, or several, per node: biases, norms,
            running statistics.
    """

    def __init__(
        self,
        uids: Tensor,
        atom: int,
        name: str,
        record: AtomRecord,
        members: Mapping[tuple[str, int], Expression],
        writers: tuple[str, ...],
        readers: tuple[str, ...],
    ) -> None:
        self._enrol(Roster.of_space(uids))
        self.name = name
        self.pins = record.pins
        self.writers = writers
        self.readers = readers
        self.riders = tuple(
            dict.fromkeys(n for n, _ in members if n not in writers and n not in readers)
        )
        self._atom = atom
        self._marks = record.marks
        self._members = dict(members)  # by tensor and dimension
        self._proof: Verdict = "unproved"

    @property
    def verdict(self) -> Verdict:
        """What removing nodes does to the function of the model.

        - "exact": the same as setting the weights of all readers of the nodes to 0; of all writers
          where activations alone read them.
        - "normalised": a norm or a mean is taken over the nodes, so that those which stay change.
        - "differs": the size of the space is also a number in the formula, as in a scale.
        - "unproved": "exact" by its type; the first edit compares values.
        - "pinned": nodes cannot be added or removed; see `pins`.
        """
        if self.pins:
            return "pinned"
        if any(mark.startswith("normalised") for mark in self._marks):
            return "normalised"
        return self._proof

    def prove(self) -> Verdict:
        """Returns the verdict, and compares values first if no edit has done so yet."""
        cast("Adopted", self.graph).prove([self])
        return self.verdict

    def places(self) -> dict[tuple[str, int], Tensor]:
        """Returns where the nodes are: for every tensor and dimension that has them, the positions
        on that axis, [nodes, k] int64.
        """
        net = cast("Adopted", self.graph)
        sizes = net._atom_sizes()
        found = {}
        for place, axis in self._members.items():
            found[place] = torch.from_numpy(positions(axis, self._atom, sizes))
        return found

    @property
    def first_size(self) -> int:
        """The number of nodes at adoption."""
        return cast("Adopted", self.graph)._typed.atoms[self._atom].size

    @property
    def rows_per_node(self) -> int:
        """How many positions each node has on the axis of its first writer, or of its first tensor
        if none writes it: 1 for a channel, 64 for a head of that width.
        """
        net = cast("Adopted", self.graph)
        sizes = net._atom_sizes()
        for (name, _), axis in self._members.items():
            if not self.writers or name == self.writers[0]:
                return occurrences(axis, self._atom, sizes)
        return 1

    def norms(self, side: Literal["both", "incoming", "outgoing"] = "both") -> Tensor:
        """Returns the norm of the weights of each node, [n] on the CPU.

        Args:
            side: "incoming" for writers and riders, "outgoing" for readers, "both" for all of them.
        """
        net = cast("Adopted", self.graph)
        total = torch.zeros(len(self), dtype=torch.float64)
        grids = net._grids()
        reads = net._typed.readers.get(self._atom, ())
        for (name, dim), at in self.places().items():
            grid = grids[name]
            is_outgoing = (name, dim) in reads
            if not grid.is_parameter or side == ("incoming" if is_outgoing else "outgoing"):
                continue
            squares = grid.whole.double().square()
            others = [d for d in range(squares.dim()) if d != dim]
            by_position = squares.sum(others) if others else squares
            total += by_position.cpu()[at].sum(1)
        return total.sqrt()

    def weakest(
        self,
        *,
        count: int | None = None,
        fraction: float | None = None,
        multiple: int = 1,
        key: Tensor | None = None,
    ) -> NodeSet:
        """Returns the nodes with the smallest key (`norms` by default); ties keep their order.

        Args:
            count: how many.
            fraction: which share of the nodes.
            multiple: round so that a multiple of this many nodes stays; never more nodes than asked
                for are returned.
            key: one number per node.
        """
        stay = len(self) - how_many(count, fraction, len(self))
        leave = max(0, len(self) - math.ceil(stay / multiple) * multiple)
        key = as_key(self.norms() if key is None else key, len(self), "nodes").cpu()
        chosen = key.argsort(stable=True)[:leave].sort().values
        return self[chosen]

    def __dir__(self) -> list[str]:
        # They raise: both are in the code and the tensors of the model.
        return [name for name in super().__dir__() if name not in ("activations", "biases")]

    def __repr__(self) -> str:
        return f"Space({self.name!r}, {len(self)} nodes, {self.verdict})"


def spaces_of(typed: Typed) -> list[Space]:
    """Returns the atoms that are sets of nodes, in the order of the tensors that have them."""
    members: dict[int, dict[tuple[str, int], Expression]] = {}
    for name, axes in typed.axes.items():
        for dim, axis in enumerate(axes):
            for atom in atoms_of(axis):
                members.setdefault(atom, {})[name, dim] = axis
    spaces: list[Space] = []
    taken: dict[str, int] = {}
    next_uid = 0
    for atom, found in members.items():
        record = typed.atoms[atom]
        writers = tuple(dict.fromkeys(name for name, _ in typed.writers.get(atom, ())))
        readers = tuple(dict.fromkeys(name for name, _ in typed.readers.get(atom, ())))
        is_shared = len(found) > 1 or bool(writers) or bool(readers)
        if record.size < 2 or not is_shared:
            continue
        first = writers[0] if writers else next(iter(found))[0]
        name = first.rpartition(".")[0] or first
        if readers and not writers:
            name = f"{name}:in"
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            name = f"{name}#{taken[name]}"
        uids = torch.arange(next_uid, next_uid + record.size, device="cpu")
        next_uid += record.size
        spaces.append(Space(uids, atom, name, record, found, writers, readers))
    return spaces
