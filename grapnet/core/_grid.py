"""Grids: the Parameters and buffers of ordinary modules, and how a commit changes them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._change import Assignment, GridChange
from ._coordinates import Coordinates, Token, layout_of, replace_content
from ._grid_map import CellMap, GridMap, Parted, RowMap, cells_at, part_vectors, with_cells
from ._opened import Opened, Pattern, holders_of, opened_of, parameter_map, set_opened
from ._staging import stage, unstage


class Grid:
    """A Parameter or a buffer of a module.

    Attributes:
        module: a module that has it.
        name: its name there.
        holders: all modules that have the Parameter, with its names: several if it is tied.
        is_parameter: False for a buffer.
    """

    __slots__ = ("holders", "is_parameter", "module", "name")

    def __init__(self, holders: list[tuple[nn.Module, str]]) -> None:
        self.module, self.name = holders[0]
        self.holders = holders
        self.is_parameter = self.name in self.module._parameters

    @property
    def tensor(self) -> Tensor:
        """The Parameter or the buffer."""
        kept: dict[str, Any] = self.module._buffers
        if self.is_parameter:
            kept = self.module._parameters
        return kept[self.name]

    @property
    def parameter(self) -> nn.Parameter:
        """The Parameter."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    @property
    def opened(self) -> Opened | None:
        """Which cells are cut or frozen; None if all are free."""
        return opened_of(self.module, self.name)

    @property
    def whole(self) -> Tensor:
        """All cells, without gradients: those of the Parameter, frozen ones, and 0 for cut ones."""
        opened = self.opened
        if opened is None:
            return self.tensor.detach()
        return opened.whole(self.tensor.detach())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that the module computes with."""
        opened = self.opened
        if opened is None:
            return tuple(self.tensor.shape)
        return opened.pattern.shape

    @property
    def n_frozen(self) -> int:
        """The number of frozen cells."""
        opened = self.opened
        return 0 if opened is None else opened.frozen_values.numel()


def named_grids(model: nn.Module) -> dict[str, Grid]:
    """Returns every Parameter and every buffer with an axis, each under its first name."""
    found: dict[str, Grid] = {}
    seen: set[int] = set()
    holders = holders_of(model)
    # Parameters first, as `named_parameters` and `named_buffers` would list them.
    for kind in ("_parameters", "_buffers"):
        for path, module in model.named_modules():
            for name, tensor in getattr(module, kind).items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if tensor.dim() or kind == "_parameters":
                    held = holders.get(id(tensor), [(module, name)])
                    found[f"{path}.{name}" if path else name] = Grid(held)
    return found


class PreparedGrid(NamedTuple):
    """A tensor after a change, computed but not installed."""

    tensor: Tensor
    content: Tensor
    gradient: Tensor | None
    change: GridChange  # with what leaves filled in
    # how the cells of the tensor itself move; frozen ones are not among them
    tensor_index: GridMap | RowMap
    # the modules that compute the tensor from now on as `opened` says, or read it as it is; none if
    # they go on reading it
    holders: tuple[tuple[nn.Module, str], ...] = ()
    opened: Opened | None = None
    is_staged: bool = False
    # where in the tensor the assigned cells are that it has before and after the change
    assigned: Tensor | None = None


class KeptContent(NamedTuple):
    """A Parameter that a commit does not change, with what it holds."""

    parameter: nn.Parameter
    content: Tensor
    gradient: Tensor | None


def keep_contents(grids: dict[str, Grid], changes: dict[str, GridChange]) -> dict[str, KeptContent]:
    """Returns the Parameters that stay as they are."""
    found = {}
    for name, grid in grids.items():
        if grid.is_parameter and name not in changes:
            parameter = grid.parameter
            found[name] = KeptContent(parameter, parameter.data, parameter.grad)
    return found


def renew_versions(kept: Sequence[KeptContent]) -> None:
    """Makes Parameters with the same contents another version, which autograd keeps apart."""
    for parameter, content, gradient in kept:
        replace_content(parameter, content, gradient)
    torch.autograd.graph.increment_version([one.parameter for one in kept])


def prepare_grids(
    grids: dict[str, Grid],
    changes: dict[str, GridChange],
    *,
    returning: Mapping[int, Tensor],
    is_staged: bool,
) -> dict[str, PreparedGrid]:
    """Computes every tensor that a commit changes; modifies nothing.

    Args:
        grids: the tensors by name.
        changes: how some of them change.
        returning: the gradients of cells that come to a Parameter, by its id; 0 without them.
        is_staged: whether the results wait outside of the memory of the model.
    """
    pairs: list[tuple[CellMap, Tensor]] = []
    for name, change in changes.items():
        tensor = grids[name].tensor
        pairs.append((change.index, tensor))
        if tensor.grad is not None:
            pairs.append((change.index, tensor.grad))
    parted = part_vectors(pairs)
    found = {}
    for name, change in changes.items():
        prepared = _prepare(grids[name], change, parted, returning)
        if is_staged:
            prepared = prepared._replace(content=stage(prepared.content), is_staged=True)
        found[name] = prepared
    return found


def _prepare(
    grid: Grid, change: GridChange, parted: dict[int, Parted], returning: Mapping[int, Tensor]
) -> PreparedGrid:
    tensor = grid.tensor
    opened = grid.opened
    held = tensor
    if opened is not None:
        held = opened.live(tensor)
    index = change.index
    assigned = change.assigned
    if assigned is not None:
        # A commit of which the journal has dropped the values repeats its structure alone.
        if assigned.after is None:
            assigned = None
        else:
            before = cells_at(held, assigned.positions)
            assigned = Assignment(assigned.positions, assigned.after.to(held), before)
    born = change.born_values
    if born is None:
        born = held.new_zeros(index.n_born)
    if id(tensor) in parted:
        moved, gone = parted[id(tensor)]
    else:
        moved = index.carry(held, born)
        gone = index.take(held)
    if assigned is not None:
        assert assigned.after is not None
        moved = with_cells(moved, index.new_positions(assigned.positions), assigned.after)
    content = moved
    after = None
    places = None
    if assigned is not None:
        places = assigned.positions
    if isinstance(index, RowMap):
        before = change.before or Pattern.full(grid.shape, index.width)
        pattern = change.after or Pattern.full(index.new_shape, index.width)
        if change.after is not None:
            is_free = pattern.is_free.to(moved.device)
            content = moved[is_free].view(pattern.content_shape)
            after = Opened(pattern, moved[~is_free])
            after.prepare(content, [module for module, name in grid.holders if name == "weight"])
        if places is not None:
            places = _free_places(places, before, pattern, index)
        index = parameter_map(before, pattern, index.rows)
    if content is tensor or content.data_ptr() == tensor.data_ptr():
        content = content.clone()
    gradient = tensor.grad
    if gradient is not None:
        if id(gradient) in parted:
            gradient = parted[id(gradient)].kept
        else:
            gradient = index.carry(gradient, returning.get(id(tensor), 0.0))
    completed = GridChange(
        change.index,
        born_values=born,
        gone_values=gone,
        before=change.before,
        after=change.after,
        relations=change.relations,
        assigned=assigned,
    )
    holders = ()
    if opened is not None or after is not None:
        holders = tuple(grid.holders)
    return PreparedGrid(
        tensor, content, gradient, completed, index, holders, after, assigned=places
    )


def _free_places(cells: Tensor, before: Pattern, after: Pattern, index: RowMap) -> Tensor:
    """Returns where cells are in the Parameter, those that it has before a change and after it.

    Args:
        cells: positions among the cells that exist before the change.
        before: which cells exist, and which are frozen.
        after: the same after the change.
        index: how the rows that exist move.
    """
    rows = (cells // before.width).long()
    new_rows = (index.new_positions(cells) // after.width).long()
    is_in_both = before.is_free[rows] & after.is_free[new_rows]
    ranks = before.is_free.cumsum(0) - 1
    places = ranks[rows] * before.width + cells % before.width
    return places[is_in_both].int()


def install_grid(prepared: PreparedGrid, layout: Token | None) -> None:
    """Installs a prepared tensor; the Parameter or buffer stays the same object."""
    content = prepared.content
    if prepared.is_staged:
        content = unstage(content, prepared.tensor.device)
    install_content(prepared.tensor, content, prepared.gradient, layout)
    for module, name in prepared.holders:
        set_opened(module, name, prepared.opened)


def install_content(
    tensor: Tensor, content: Tensor, gradient: Tensor | None, layout: Token | None
) -> None:
    """Gives a Parameter or a buffer other content, of any shape.

    Args:
        tensor: the Parameter or buffer, which stays the same object.
        content: its content from then on.
        gradient: that of a Parameter.
        layout: the token of the coordinates of a Parameter.
    """
    if not isinstance(tensor, nn.Parameter):
        tensor.data = content
        return
    replace_content(tensor, content, gradient)
    # Operations of older forward passes have saved the Parameter itself, and would read the
    # content that the edit wrote: torch compares versions.
    torch.autograd.graph.increment_version(tensor)
    install_layout(tensor, layout)


def install_layout(parameter: nn.Parameter, layout: Token | None) -> None:
    """Gives a Parameter the token of its coordinates; state of another one is refused."""
    if layout is not layout_of(parameter):
        # Counted first: after an interrupt in between, both happen again.
        Coordinates._layout_changes += 1
        parameter.grapnet_layout = layout  # pyright: ignore[reportAttributeAccessIssue]
