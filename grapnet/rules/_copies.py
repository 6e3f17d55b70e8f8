"""Net2Net on adopted models: new nodes of spaces that are copies of present ones."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grapnet.core._errors import EditError
from grapnet.core._grid_map import GridMap, cells_at
from grapnet.core._index_map import IndexMap
from grapnet.core._opened import FROZEN
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._axes import positions
from grapnet.spaces._space import Space
from grapnet.spaces._typing import CONTRACTED


def copy_nodes(
    net: Adopted,
    edit: Any,
    counts: Mapping[Space, int],
    noise: float,
    split: bool,
    owner: str | None,
) -> None:
    """Adds copies of nodes that are drawn at random; the function of the model stays.

    Every tensor is computed with all of its nodes first, copies included: along an axis of a
    growing space, a copy has the entries of its original, and where the axis is read, entries are
    multiplied by the share of the node. Then the edit gets the entries of the copies, and those
    entries of the originals that have become smaller.

    Args:
        net: the model.
        edit: the open edit.
        counts: how many copies to add to each space.
        noise: how unevenly weights are shared, as in `GrowWidth`.
        split: whether originals share their weights with the copies.
        owner: of the copies; with None, that of the original.

    Raises:
        EditError: a tensor reads and writes a growing space, activations are contracted over it, or
            the edit removes nodes.
    """
    if len(edit.removals):
        raise EditError(
            "Net2Net copies nodes of a model as it is, and this edit removes some; let the rules be"
            " due at different steps"
        )
    copies = {
        space: _Copies(net, edit, space, count, noise, split) for space, count in counts.items()
    }
    moved = {space._atom: own.index for space, own in copies.items()}
    before = net._atom_sizes()
    after = list(before)
    for atom, index in moved.items():
        after[atom] = index.new_size
    values: dict[Space, dict[str, Tensor]] = {space: {} for space in copies}
    for name, grid_map in net._maps_of(moved, before, after).items():
        whole = net._grids()[name].whole
        for space, own in copies.items():
            for dim in _dims_of(space, name):
                whole = own.widened(whole, name, dim, grid_map, before, after)
        for space in copies:
            for dim in _dims_of(space, name):
                inserted = grid_map.axes[dim].inserted.long().to(whole.device)
                values[space][name] = whole.index_select(dim, inserted)
        _assign_shared(net, edit, name, _present(whole, grid_map), copies)
    for space, own in copies.items():
        nodes = edit.add_nodes(
            space, len(own.rows), owner=owner, readers="alike", values=values[space]
        )
        if owner is None:
            _give_owners(edit, space, own.rows, nodes)


def _assign_shared(
    net: Adopted, edit: Any, name: str, whole: Tensor, copies: "Mapping[Space, _Copies]"
) -> None:
    """Gives the entries of a tensor that read originals of copies their share.

    Args:
        net: the model.
        edit: the open edit.
        name: the tensor.
        whole: its present entries, those that read originals with their share.
        copies: the spaces that grow.
    """
    is_shared = torch.zeros(whole.shape, dtype=torch.bool)
    for space, own in copies.items():
        for dim in _dims_of(space, name):
            if net._role(space, name, dim) == "reader":
                at = own.places[name, dim][own.is_shared].reshape(-1)
                is_shared.index_fill_(dim, at.cpu(), True)
    cells = is_shared.reshape(-1).nonzero().flatten()
    if len(cells):
        edit._assign(name, cells, cells_at(whole, cells))


def _dims_of(space: Space, name: str) -> list[int]:
    """Returns the dimensions of a tensor that have the nodes of a space."""
    return [dim for tensor, dim in space._members if tensor == name]


def _present(whole: Tensor, grid_map: GridMap) -> Tensor:
    """Returns the entries of a widened tensor that were there before."""
    for dim, axis in grid_map.axes.items():
        whole = whole.index_select(dim, axis.stays(whole.device).long())
    return whole


def _give_owners(edit: Any, space: Space, rows: Tensor, nodes: Any) -> None:
    """Gives copies the owners of their originals."""
    owners = space._owner_names.select(rows.int())
    for owner in dict.fromkeys(owners):
        if owner is not None:
            mine = torch.tensor([one == owner for one in owners])
            edit.set_owner(nodes[mine], owner)


class _Copies:
    """The copies that one space gets, and how they share the weights of their readers.

    Attributes:
        rows: the original of every copy, [copies] int64, ascending.
        index: how the rows of the space move.
        places: the positions of the nodes before the edit.
        shares: the factor of every node where it is read, [nodes after] float64.
        is_shared: which of the present nodes have a factor other than 1, [nodes before] bool.
    """

    def __init__(
        self, net: Adopted, edit: Any, space: Space, count: int, noise: float, split: bool
    ) -> None:
        _require_copyable(net, space)
        self._space = space
        self._net = net
        size = len(space)
        generator = edit.generator
        device = torch.device("cpu") if generator is None else generator.device
        drawn = torch.rand(2, count, dtype=torch.float64, generator=generator, device=device).cpu()
        self.rows = (drawn[0] * size).long().sort().values
        inserted = torch.arange(size, size + count, dtype=torch.int32)
        nothing = torch.empty(0, dtype=torch.int32)
        self.index = IndexMap(size, size + count, nothing, inserted)
        self.places = space.places()
        is_copied = torch.bincount(self.rows, minlength=size) > 0
        self.is_shared = torch.zeros_like(is_copied)
        if split:
            self.is_shared = is_copied & ~self._have_frozen_readers()
        own = torch.rand(size, dtype=torch.float64, generator=generator, device=device).cpu()
        self.shares = self._shares(1 + noise * (2 * own - 1), 1 + noise * (2 * drawn[1] - 1))

    def _shares(self, own: Tensor, of_copies: Tensor) -> Tensor:
        """Returns factors that add up to 1 for a node and its copies; beside an original that stays
        as it is, those of its copies add up to 0.
        """
        sums = torch.zeros_like(own).index_add_(0, self.rows, of_copies)
        times = torch.bincount(self.rows, minlength=len(own)).double()
        is_shared = self.is_shared[self.rows]
        even = of_copies - (sums / times.clamp(min=1))[self.rows]
        parts = of_copies / (sums + own)[self.rows]
        present = torch.where(self.is_shared, own / (sums + own), 1.0)
        return torch.cat([present, torch.where(is_shared, parts, even)])

    def _have_frozen_readers(self) -> Tensor:
        """Returns which nodes are read by a number that does not change, [nodes] bool."""
        found = torch.zeros(len(self._space), dtype=torch.bool)
        for (name, dim), at in self.places.items():
            grid = self._net._grids()[name]
            if self._net._role(self._space, name, dim) != "reader":
                continue
            if not grid.is_parameter or not grid.parameter.requires_grad:
                found[:] = True
            if grid.n_frozen == 0:
                continue
            opened = grid.opened
            assert opened is not None
            rows = (opened.pattern.kinds == FROZEN)[:, None].expand(-1, opened.pattern.width)
            held = rows.reshape(opened.pattern.shape).movedim(dim, 0).flatten(1).any(1)
            found |= held[at].any(1)
        return found

    def widened(
        self,
        whole: Tensor,
        name: str,
        dim: int,
        grid_map: GridMap,
        before: list[int],
        after: list[int],
    ) -> Tensor:
        """Returns a tensor with the copies on one of its axes.

        Args:
            whole: the tensor; other axes may have their copies already.
            name: its name.
            dim: the dimension.
            grid_map: how the tensor moves in the edit.
            before: the sizes of all atoms.
            after: their sizes after the edit.
        """
        axis = grid_map.axes[dim]
        expression = self._space._members[name, dim]
        old = torch.from_numpy(positions(expression, self._space._atom, before))
        new = torch.from_numpy(positions(expression, self._space._atom, after))
        if old.shape[1] != new.shape[1]:
            raise EditError(
                f"{name} has nodes of {self._space.name} inside those of another space that grows"
                " in this edit; let them grow one after the other"
            )
        # which position before the edit every one after it comes from
        source = torch.zeros(axis.new_size, dtype=torch.int64)
        cpu = torch.device("cpu")
        source[axis.stays(cpu).long()] = axis.survivors(cpu).long()
        source[new[len(old) :].reshape(-1)] = old[self.rows].reshape(-1)
        if whole.shape[dim] == axis.old_size:
            whole = whole.index_select(dim, source.to(whole.device))
        else:
            # Another space on the same axis has put its copies in.
            fresh = new[len(old) :].reshape(-1).to(whole.device)
            originals = new[self.rows].reshape(-1).to(whole.device)
            whole = whole.index_copy(dim, fresh, whole.index_select(dim, originals))
        if self._net._role(self._space, name, dim) == "reader":
            factors = torch.ones(axis.new_size, dtype=torch.float64)
            factors[new.reshape(-1)] = self.shares.repeat_interleave(new.shape[1])
            shape = [1] * whole.dim()
            shape[dim] = -1
            whole = whole * factors.to(whole).view(shape)
        return whole


def _require_copyable(net: Adopted, space: Space) -> None:
    """Raises EditError if a copy of a node would change what the others compute."""
    typed = net._typed
    readers = typed.readers.get(space._atom, ())
    if not readers:
        raise EditError(
            f"no tensor of the model reads the nodes of {space.name}, so copies change its function"
        )
    if CONTRACTED in space._marks:
        raise EditError(
            f"two activations are contracted over the nodes of {space.name}, so copies change the"
            " function of the model"
        )
    for name, _ in space._members:
        if len(_dims_of(space, name)) > 1:
            raise EditError(
                f"{name} reads and writes the nodes of {space.name}; it cannot copy them"
            )
    for place in readers:
        if place in typed.writers.get(space._atom, ()):
            raise EditError(f"{place[0]} reads and writes the nodes of {space.name} at once")
