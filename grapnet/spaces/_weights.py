"""Weight: the relations of a model that one of its tensors holds, as a transition of the graph."""

import weakref
from collections.abc import Mapping, Sequence
from itertools import permutations, product
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from grapnet.core._coordinates import Token
from grapnet.core._errors import FrozenError
from grapnet.core._grid import Grid
from grapnet.core._index_map import as_positions
from grapnet.core._opened import CUT, FREE, FROZEN, Pattern
from grapnet.core._transition import Topology

from ._axes import Expression, SumOf, atoms_of, positions
from ._discovery import Typed
from ._space import Space

if TYPE_CHECKING:
    from ._adopted import Adopted


class Weight:
    """The relations from the nodes of one space to those of another that one tensor holds.

    A relation has one number or several: a kernel, the rows of a head, the cells behind a flatten.
    While all relations exist and none is frozen, the tensor is the module's own; see
    `grapnet.core._opened`.

    Attributes:
        name: the name of the tensor.
        source: the number of the space that the tensor reads.
        target: the number of the space that it writes.
        in_dim: the dimension of the tensor that has the space that is read.
        out_dim: the dimension that has the space that is written.
    """

    def __init__(
        self, net: "Adopted", name: str, source: int, target: int, in_dim: int, out_dim: int
    ) -> None:
        self._net = weakref.ref(net)
        self.name = name
        self.source = source
        self.target = target
        self.in_dim = in_dim
        self.out_dim = out_dim
        self._made: Topology | None = None
        # what the relations depend on, and the token that stands for it
        self._seen: tuple[tuple[object, ...], Token] = ((), Token())

    @property
    def net(self) -> "Adopted":
        """The graph."""
        net = self._net()
        assert net is not None
        return net

    @property
    def grid(self) -> Grid:
        """The tensor."""
        return self.net._grids()[self.name]

    @property
    def topology(self) -> Topology:
        """Which nodes are related: the children of every parent."""
        token = self._structure
        net = self.net
        if self._made is not None and self._made.token is token:
            return self._made.to(net.device)
        if self.grid.opened is None:
            first = self._first_child(torch.arange(self.n_parents)).int()
            child = (first[:, None] + torch.arange(self.reach, dtype=torch.int32)).view(-1)
            ptr = torch.arange(self.n_parents + 1, dtype=torch.int32) * self.reach
        else:
            related = self._by_relation(self._pattern().kinds != CUT).any(2)
            ptr = torch.zeros(len(related) + 1, dtype=torch.int32)
            ptr[1:] = related.sum(1).cumsum(0)
            parent, column = map(torch.from_numpy, np.nonzero(related.numpy()))
            child = (self._first_child(parent) + column).int()
        self._made = Topology(ptr, child, self.n_children, token).to(net.device)
        return self._made

    @property
    def _structure(self) -> Token:
        """Changes when relations or nodes come or leave."""
        layers = self.net.layers
        rosters = (layers[self.source]._roster, layers[self.target]._roster)
        present = (*rosters, self.grid.opened)
        earlier, token = self._seen
        if len(earlier) != len(present) or any(
            one is not other for one, other in zip(earlier, present, strict=True)
        ):
            token = Token()
            self._seen = (present, token)
        return token

    @property
    def child(self) -> Tensor:
        """The child of every relation, int32."""
        return self.topology.child

    @property
    def n_parents(self) -> int:
        """The number of nodes that the tensor reads."""
        return len(self.net.layers[self.source])

    @property
    def n_children(self) -> int:
        """The number of nodes that it writes."""
        return len(self.net.layers[self.target])

    @property
    def _n_groups(self) -> int:
        """The number of groups of nodes that can only be related inside of a group."""
        return 1

    @property
    def reach(self) -> int:
        """The number of children that a parent can have."""
        return self.n_children // self._n_groups

    @property
    def inputs_of_a_child(self) -> int:
        """The number of numbers that are summed for one output."""
        shape = self.grid.shape
        return prod(shape) // max(shape[self.out_dim], 1)

    def possible(self, sizes: Sequence[int]) -> int:
        """Returns how many relations are possible where spaces have some sizes."""
        return sizes[self.source] * sizes[self.target]

    def _first_child(self, parents: Tensor) -> Tensor:
        """Returns the first child that each of some parents can have."""
        return parents // (self.n_parents // self._n_groups) * self.reach

    @property
    def size(self) -> int:
        """The number of relations."""
        if self.grid.opened is None:
            return self.n_parents * self.reach
        return self.topology.n_relations

    @property
    def density(self) -> float:
        """The share of the possible relations that exist."""
        return self.size / (self.n_parents * self.reach)

    @property
    def is_trainable(self) -> bool:
        """Whether it is a Parameter that requires gradients."""
        grid = self.grid
        return grid.is_parameter and grid.parameter.requires_grad

    @property
    def weight(self) -> Tensor:
        """The tensor as the module computes with it, live and differentiable."""
        grid = self.grid
        return getattr(grid.module, grid.name)

    @property
    def _payload(self) -> int:
        """How many numbers a relation has."""
        at = self._places()
        shape = self.grid.shape
        others = [size for d, size in enumerate(shape) if d not in (self.in_dim, self.out_dim)]
        return at[0].shape[1] * at[1].shape[1] * int(np.prod(others))

    @property
    def frozen_at(self) -> Tensor:
        """The positions of the frozen relations, int32: those of which no number is free."""
        opened = self.grid.opened
        if opened is None or len(opened.frozen_values) == 0:
            return torch.empty(0, dtype=torch.int32, device=self.net.device)
        every = torch.arange(self.size, dtype=torch.int32, device=self.net.device)
        return every[self._frozen_bits(every)]

    def _frozen_bits(self, at: Tensor) -> Tensor:
        """Returns one bool per relation: True where it is frozen."""
        opened = self.grid.opened
        if opened is None or len(opened.frozen_values) == 0:
            return torch.zeros(len(at), dtype=torch.bool, device=at.device)
        has_free = self._by_relation(self._pattern().kinds == FREE).any(2)
        return ~has_free[self._cells_of(at)].to(at.device)

    def _weights_at(self, at: Tensor | range) -> Tensor:
        """Returns the numbers of relations, live and differentiable: [n], or [n, payload]."""
        return self._numbers(self.weight, as_positions(at, self.net.device))

    def _strengths(self, at: Tensor | range) -> Tensor:
        """Returns the norm of the numbers of relations."""
        norms = self.norms(self.grid.whole)
        if self.grid.opened is None and isinstance(at, range):
            return norms.reshape(-1)[at.start : at.stop]
        parents, columns = self._cells_of(as_positions(at, self.net.device))
        return norms[parents.to(norms.device), columns.to(norms.device)]

    def norms(self, whole: Tensor) -> Tensor:
        """Returns the norm of every relation in a tensor of the shape of the weight, such as the
        weight itself or its gradient, [parents, reach]; relations that were cut included.
        """
        cells = whole.detach().reshape(-1, self._pattern().width)
        if cells.shape[1] == 1:
            of_rows = cells.squeeze(1).abs()
        else:
            of_rows = torch.linalg.vector_norm(cells, dim=1)
        found = self._by_relation(of_rows)
        if found.shape[2] == 1:
            return found.squeeze(2)
        return torch.linalg.vector_norm(found, dim=2)

    def _gradients(self, at: Tensor) -> Tensor | None:
        """Returns the gradients of relations, 0 where a number is frozen; None before the first
        backward pass.
        """
        gradient = self.grid.tensor.grad
        if gradient is None:
            return None
        return self._free_numbers(gradient.detach(), at)

    def _free_numbers(self, content: Tensor, at: Tensor) -> Tensor:
        """Returns what a tensor of the shape of the Parameter has for relations, 0 where a number
        is frozen.
        """
        opened = self.grid.opened
        if opened is not None:
            zero = torch.zeros_like(opened.frozen_values)
            content = type(opened)(opened.pattern, zero).whole(content)
        return self._numbers(content, at)

    def _require_free(self, at: Tensor | slice) -> None:
        """Raises FrozenError if a number of one of the relations is frozen."""
        opened = self.grid.opened
        if opened is None or len(opened.frozen_values) == 0:
            return
        held = self._by_relation(self._pattern().kinds == FROZEN).any(2)
        at = self._listed(at)
        count = int(held[self._cells_of(at)].sum())
        if count:
            raise FrozenError(
                f"{count} of the {len(at)} relations to assign are frozen; unfreeze them in an"
                " edit first"
            )

    def _write(self, at: Tensor | slice, new: Tensor) -> None:
        """Assigns the numbers of relations."""
        at = self._listed(at)
        grid = self.grid
        whole = grid.whole.clone()
        rows = self.rows(*self._ends(at.cpu())).to(whole.device)
        width = self._pattern().width
        cells = whole.view(-1, width)
        cells[rows.reshape(-1)] = new.to(whole).reshape(-1, width)
        content = cells
        if grid.opened is not None:
            content = cells[grid.opened.free_at(cells.device)]
        with torch.no_grad():
            grid.parameter.copy_(content.view(grid.parameter.shape))

    def rows(self, parents: Tensor, children: Tensor) -> Tensor:
        """Returns the rows of the tensor (see `Pattern`) that hold some relations, [n, rows per
        relation] int64, on the CPU.

        Args:
            parents: rows of nodes in the space that is read, which may have lost relations.
            children: as many rows of nodes in the space that is written.
        """
        reads, writes = self._places()
        table = self._table(torch.arange(len(self._pattern().kinds)))
        return table[reads[parents][:, :, None], writes[children][:, None, :]].flatten(1)

    def _pattern(self) -> Pattern:
        """Returns which cells of the tensor exist."""
        return self.net._pattern_of(self.name)

    def _numbers(self, whole: Tensor, at: Tensor) -> Tensor:
        rows = self.rows(*self._ends(at.cpu())).to(whole.device)
        width = self._pattern().width
        found = whole.reshape(-1, width)[rows.reshape(-1)].view(len(at), rows.shape[1] * width)
        return found.squeeze(1) if found.shape[1] == 1 else found

    def _ends(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of the parents and of the children of relations, int64."""
        if self.grid.opened is None:
            parents = at.long() // self.reach
            return parents, self._first_child(parents) + at.long() % self.reach
        topology = self.topology.to(torch.device("cpu"))
        return topology.parents_at(at).long(), topology.child[at.long()].long()

    def _cells_of(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where relations are in what has one entry for every possible one, [parents,
        reach].
        """
        parents, children = self._ends(at.cpu())
        return parents, children - self._first_child(parents)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Returns the positions of the nodes of both spaces on the axes of the tensor, [nodes, k]
        int64 each.
        """
        net = self.net
        sizes = net._atom_sizes()
        axes = net._typed.axes[self.name]
        found = []
        for number, dim in ((self.source, self.in_dim), (self.target, self.out_dim)):
            atom = cast(Space, net.layers[number])._atom
            found.append(torch.from_numpy(positions(axes[dim], atom, sizes)))
        return found[0], found[1]

    def _by_relation(self, of_rows: Tensor) -> Tensor:
        """Returns one entry per row of the tensor, gathered by the relations that are possible:
        [parents, reach, rows per relation].
        """
        table = self._table(of_rows)
        reads, writes = self._places()
        if _is_in_order(reads, table.shape[0]) and _is_in_order(writes, table.shape[1]):
            blocks = table.reshape(*reads.shape, *writes.shape, -1)
            return blocks.transpose(1, 2).flatten(2)
        return table[reads[:, None, :, None], writes[None, :, None, :]].flatten(2)

    def _table(self, of_rows: Tensor) -> Tensor:
        """Returns one entry per row of the tensor as [in_dim, out_dim, the others]."""
        table = of_rows.view(leading_shape(self._pattern()))
        table = table.movedim((self.in_dim, self.out_dim), (0, 1))
        return table.reshape(table.shape[0], table.shape[1], -1)

    def _listed(self, at: Tensor | slice) -> Tensor:
        if isinstance(at, Tensor):
            return at
        return torch.arange(at.start, at.stop, dtype=torch.int32, device=self.net.device)

    def __repr__(self) -> str:
        layers: Any = self.net.layers
        return f"Weight({self.name!r}, {layers[self.source].name} → {layers[self.target].name})"


def _is_in_order(places: Tensor, size: int) -> bool:
    """Returns whether nodes have all positions of an axis, one node after the other."""
    return torch.equal(places.reshape(-1), torch.arange(size))


def leading_shape(pattern: Pattern) -> tuple[int, ...]:
    """Returns the shape of the rows of a pattern: the dimensions without those inside a row."""
    leading = list(pattern.shape)
    width = pattern.width
    while width > 1:
        width //= leading.pop()
    return tuple(leading)


def weights_between(
    net: "Adopted", typed: Typed, name: str, numbers: Mapping[int, int]
) -> list[Weight]:
    """Returns the relations of one tensor, one entry for each two spaces that it reads and writes.

    Args:
        net: the graph.
        typed: the axes of the model.
        name: the tensor.
        numbers: the numbers of the spaces, by their atoms.
    """
    found: dict[object, Weight] = {}
    axes = typed.axes[name]
    outer = [_outer_atoms(axis, numbers) for axis in axes]
    for in_dim, out_dim in permutations(range(len(axes)), 2):
        for source, target in product(outer[in_dim], outer[out_dim]):
            is_read = (name, in_dim) in typed.readers.get(source, ())
            is_written = (name, out_dim) in typed.writers.get(target, ())
            if is_read and is_written:
                ends = (numbers[source], numbers[target])
                # A tied embedding leads both ways, with the same numbers.
                same = frozenset([(in_dim, source), (out_dim, target)])
                found.setdefault(same, Weight(net, name, *ends, in_dim, out_dim))
    return list(found.values())


def _outer_atoms(expression: Expression, numbers: Mapping[int, int]) -> list[int]:
    """Returns the outermost atoms of the terms of an axis that are spaces.

    No position belongs to two of them: where one is also an inner atom of another term, as in
    a·b + b, it stands for that term as well.
    """
    terms = expression.parts if isinstance(expression, SumOf) else (expression,)
    inside = []
    for term in terms:
        inside.append([atom for atom in atoms_of(term) if atom in numbers])
    first = dict.fromkeys(atoms[0] for atoms in inside if atoms)
    # The terms that each atom is part of; an atom of many terms is taken first.
    mine: dict[int, list[list[int]]] = {}
    for atom in first:
        mine[atom] = [atoms for atoms in inside if atom in atoms]
    found: set[int] = set()
    for atom in sorted(first, key=lambda atom: len(mine[atom]), reverse=True):
        if all(found.isdisjoint(atoms) for atoms in mine[atom]):
            found.add(atom)
    return [atom for atom in first if atom in found]
