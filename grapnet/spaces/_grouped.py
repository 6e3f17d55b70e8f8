"""The relations in convolutions with groups, and the channels that they lead between.

The spaces of such a convolution are its groups and what lies inside of one, since whole groups come
and leave, and so does the same channel of every group. Its kernels lead from one channel to
another, both of the same group. So the ends of these relations are `Channels`, which have a node
for every group and every node inside of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from grapnet.core._errors import EditError
from grapnet.core._layer import LiveNodes, Roster

from ._axes import Atom, Expression, ProductOf, SumOf, size_of
from ._discovery import Typed
from ._space import Space
from ._weights import Weight, leading_shape, weights_between

if TYPE_CHECKING:
    from ._adopted import Adopted

# The uid of a channel is made of those of its nodes; so many bits are for each.
_BITS = {1: 60, 2: 31, 3: 20}
# The smallest uid: those of channels are negative, and none is made of one node and of two.
_FIRST_UID = {1: -(2**61), 2: -(2**63), 3: -(2**62)}


class Channels(LiveNodes):
    """Channels that spaces divide into groups and what lies inside of one; a live NodeSet.

    They are the ends of the relations in convolutions with groups, and have no entries of their
    own: they come and leave with the nodes of the spaces.

    Args:
        net: the graph.
        factors: the numbers of the spaces, the outermost first.
    """

    def __init__(self, net: "Adopted", factors: tuple[int, ...]) -> None:
        self._bind(net)
        self._factors = factors
        # the nodes of the spaces that `_made` was made of
        self._seen: tuple[Tensor, ...] = ()
        self._made: Roster | None = None

    @property
    def spaces(self) -> list[Space]:
        """The spaces that divide the channels, the outermost first."""
        spaces = cast("Adopted", self.graph).spaces
        return [spaces[number] for number in self._factors]

    @property
    def name(self) -> str:
        """The names of the spaces."""
        return "·".join(space.name for space in self.spaces)

    @property
    def pins(self) -> tuple[str, ...]:
        """Why channels cannot be added or removed one by one."""
        names = " and ".join(space.name for space in self.spaces)
        found = (f"they come and leave with the nodes of {names}",)
        if any("output" in space.pins for space in self.spaces):
            return (*found, "output")
        return found

    @property
    def _roster(self) -> Roster:  # pyright: ignore[reportIncompatibleVariableOverride]
        present = tuple(space.uid for space in self.spaces)
        is_same = len(present) == len(self._seen) and all(
            one is other for one, other in zip(present, self._seen, strict=True)
        )
        if self._made is None or not is_same:
            self._made = Roster.of_space(_uids_of(present))
            self._seen = present
        return self._made

    def __len__(self) -> int:
        return prod(len(space) for space in self.spaces)

    def __repr__(self) -> str:
        return f"Channels({self.name!r}, {len(self)} nodes)"


def _uids_of(factors: Sequence[Tensor]) -> Tensor:
    """Returns the uids of channels, made of those of the nodes of their spaces: negative ones."""
    bits = _BITS[len(factors)]
    found = torch.zeros(1, dtype=torch.int64)
    for uids in factors:
        if len(uids) and int(uids[-1]) >= 2**bits:
            raise EditError(f"the uids of {len(factors)} spaces of channels are below {2**bits:,}")
        found = ((found << bits)[:, None] | uids).reshape(-1)
    return found + _FIRST_UID[len(factors)]


@dataclass(frozen=True)
class Blocks:
    """Where a part of a weight [groups · inside, inside, *kernel] has its groups.

    Attributes:
        groups: the numbers of the spaces that are the groups, the outermost first.
        read: those of the spaces inside of a group that the tensor reads; none for one channel.
        written: those of the spaces inside of a group that it writes.
        before: what lies before the part on the first two axes of the tensor.
    """

    groups: tuple[int, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    before: tuple[tuple[Expression, ...], tuple[Expression, ...]]


class GroupedWeight(Weight):
    """The relations in a convolution with groups: one kernel each, between channels of one group.

    The arguments are those of `Weight`, and where the groups are.
    """

    def __init__(
        self, net: "Adopted", name: str, ends: tuple[int, int], in_dim: int, blocks: Blocks
    ) -> None:
        super().__init__(net, name, *ends, in_dim, 1 - in_dim)
        self._blocks = blocks

    @property
    def _n_groups(self) -> int:
        """The number of groups."""
        return self._count(self._blocks.groups)

    def possible(self, sizes: Sequence[int]) -> int:
        """Returns how many relations are possible where spaces have some sizes."""
        blocks = self._blocks
        return prod(sizes[number] for number in blocks.groups + blocks.read + blocks.written)

    @property
    def inputs_of_a_child(self) -> int:
        """The number of numbers that are summed for one output."""
        return self._count(self._blocks.read) * prod(self.grid.shape[2:])

    @property
    def _payload(self) -> int:
        leading = leading_shape(self._pattern())
        return prod(leading[2:]) * self._pattern().width

    def rows(self, parents: Tensor, children: Tensor) -> Tensor:
        """Returns the rows of the tensor that hold some relations; see `Weight.rows`.

        Raises:
            EditError: a parent and its child are in different groups.
        """
        n_read = self._count(self._blocks.read)
        n_written = self._count(self._blocks.written)
        group = parents // n_read
        apart = int((group != children // n_written).sum())
        if apart:
            raise EditError(
                f"{apart} of the pairs are in different groups of {self.name}, where a convolution"
                " has no relations"
            )
        numbers = torch.arange(len(self._pattern().kinds))
        return self._cells(numbers)[group, parents % n_read, children % n_written]

    def _by_relation(self, of_rows: Tensor) -> Tensor:
        return self._cells(of_rows).flatten(0, 1)

    def _cells(self, of_rows: Tensor) -> Tensor:
        """Returns one entry per row of the tensor as [groups, read in each, written in each, rows
        per relation].
        """
        groups = self._n_groups
        inside = [self._count(self._blocks.read), self._count(self._blocks.written)]
        if self.in_dim == 1:
            inside.reverse()
        sizes = self.net._atom_sizes()
        starts = [sum(size_of(one, sizes) for one in part) for part in self._blocks.before]
        table = of_rows.view(leading_shape(self._pattern()))
        table = table.narrow(0, starts[0], groups * inside[0])
        if table.dim() > 1:
            table = table.narrow(1, starts[1], inside[1])
        # With one channel in a group, a row has all of the second axis.
        table = table.reshape(groups, inside[0], inside[1], -1)
        return table.transpose(1, 2) if self.in_dim == 1 else table

    def _count(self, spaces: tuple[int, ...]) -> int:
        layers = self.net.spaces
        return prod(len(layers[number]) for number in spaces)


def relations_of(
    net: "Adopted", typed: Typed, spaces: Sequence[Space]
) -> tuple[list[Weight], list[Channels]]:
    """Returns the relations of a model, in the order of its tensors, and the channels that some of
    them have as ends.

    Args:
        net: the graph.
        typed: the axes of the model.
        spaces: its spaces.
    """
    numbers = {space._atom: n for n, space in enumerate(spaces)}
    ends: dict[tuple[int, ...], int] = {}
    found: list[Weight] = []
    for name in typed.axes:
        if name not in typed.grouped:
            found += weights_between(net, typed, name, numbers)
            continue
        for in_dim, blocks in _blocks_of(typed, name, numbers):
            pair = (blocks.groups + blocks.read, blocks.groups + blocks.written)
            if max(map(len, pair)) > max(_BITS):
                continue
            for factors in pair:
                ends.setdefault(factors, len(spaces) + len(ends))
            source, target = (ends[factors] for factors in pair)
            found.append(GroupedWeight(net, name, (source, target), in_dim, blocks))
    return found, [Channels(net, factors) for factors in ends]


def _blocks_of(typed: Typed, name: str, numbers: Mapping[int, int]) -> list[tuple[int, Blocks]]:
    """Returns the parts of the weight of a convolution with groups, each with the dimension that
    has what is read; parts that no space divides are left out.
    """
    first, second = typed.axes[name][:2]
    in_dim = 1
    if _noted(typed.readers, name, 0) or _noted(typed.writers, name, 1) & numbers.keys():
        in_dim = 0
    inside = _noted(typed.readers, name, 0) | _noted(typed.writers, name, 0)
    found = []
    outer_terms = _terms(first)
    inner_terms = _terms(second)
    for n, outer in enumerate(outer_terms):
        for m, inner in enumerate(inner_terms):
            factors = _factors(outer, numbers)
            others = _factors(inner, numbers)
            if factors is None or others is None:
                continue
            groups = tuple(numbers[atom] for atom in factors if atom not in inside)
            own = tuple(numbers[atom] for atom in factors if atom in inside)
            if not groups:
                continue
            far = tuple(numbers[atom] for atom in others)
            read, written = (far, own) if in_dim == 1 else (own, far)
            before = (outer_terms[:n], inner_terms[:m])
            found.append((in_dim, Blocks(groups, read, written, before)))
    return found


def _noted(places: Mapping[int, Sequence[tuple[str, int]]], name: str, dim: int) -> set[int]:
    """Returns the atoms that are read, or written, in a dimension of a tensor."""
    return {atom for atom, having in places.items() if (name, dim) in having}


def _terms(axis: Expression) -> tuple[Expression, ...]:
    return axis.parts if isinstance(axis, SumOf) else (axis,)


def _factors(term: Expression, numbers: Mapping[int, int]) -> list[int] | None:
    """Returns the atoms of a product that are spaces; None if it is a product of other things.

    An atom of one index is no space, and has no place in a product.
    """
    parts = term.parts if isinstance(term, ProductOf) else (term,)
    atoms = [part.number for part in parts if isinstance(part, Atom)]
    if len(atoms) < len(parts):
        return None
    if len(atoms) > 1 and not all(atom in numbers for atom in atoms):
        return None
    return [atom for atom in atoms if atom in numbers]
