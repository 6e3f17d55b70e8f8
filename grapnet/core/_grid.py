"""Grids: the Parameters and buffers of ordinary modules, and how a commit changes them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ._change import GridChange
from ._coordinates import Coordinates, Token, layout_of, replace_content


class Grid:
    """A Parameter or a buffer of a module."""

    __slots__ = ("module", "name")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name

    @property
    def is_parameter(self) -> bool:
        """False for a buffer."""
        return self.name in self.module._parameters

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


@dataclass(frozen=True, eq=False)
class PreparedGrid:
    """A tensor after a change, computed but not installed."""

    tensor: Tensor
    content: Tensor
    gradient: Tensor | None
    change: GridChange | None  # with what leaves filled in; None if the commit does not touch it


def prepare_grids(
    grids: dict[str, Grid], changes: dict[str, GridChange], keep_gradients: bool
) -> dict[str, PreparedGrid]:
    """Computes every Parameter and every changed buffer after a commit; modifies nothing.

    A Parameter that stays as it is becomes another version, too, which autograd keeps apart.
    """
    found = {}
    for name, grid in grids.items():
        change = changes.get(name)
        if change is not None:
            found[name] = _prepare(grid.tensor, change, keep_gradients)
        elif grid.is_parameter:
            parameter = grid.parameter
            found[name] = PreparedGrid(parameter, parameter.data, parameter.grad, None)
    return found


def _prepare(tensor: Tensor, change: GridChange, keep_gradients: bool) -> PreparedGrid:
    index = change.index
    born = change.born_values
    content = index.carry(tensor, 0.0 if born is None else born)
    if content is tensor or content.data_ptr() == tensor.data_ptr():
        content = content.clone()
    gradient = tensor.grad
    change = replace(change, gone_values=index.take(tensor))
    if born is None:
        change = replace(change, born_values=content.new_zeros(index.n_born))
    if gradient is not None:
        if keep_gradients:
            change = replace(change, gone_gradients=index.take(gradient))
        returning = change.born_gradients
        gradient = index.carry(gradient, 0.0 if returning is None else returning)
    return PreparedGrid(tensor, content, gradient, change)


def install_grid(prepared: PreparedGrid, layout: Token | None) -> None:
    """Installs a prepared tensor; the Parameter or buffer stays the same object."""
    if prepared.change is None:
        layout = layout_of(prepared.tensor)
    install_content(prepared.tensor, prepared.content, prepared.gradient, layout)


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
    # Operations of older forward passes have saved the Parameter itself, and would go on with the
    # new content: torch compares versions.
    torch.autograd.graph.increment_version(tensor)
    if layout is not layout_of(tensor):
        # Counted first: after an interrupt in between, both happen again.
        Coordinates._layout_changes += 1
        tensor.grapnet_layout = layout  # pyright: ignore[reportAttributeAccessIssue]
