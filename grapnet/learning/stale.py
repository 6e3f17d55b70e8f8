"""Optimizers that were left behind: one with state of coordinates that have moved since refuses to
step.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grapnet.core.errors import OptimizerError
from grapnet.core.values import Coordinates, layout_of

_checked: "weakref.WeakKeyDictionary[Optimizer, _Checked]" = weakref.WeakKeyDictionary()


class _Checked:
    """Which layout every parameter had when the optimizer last stepped, or followed."""

    def __init__(self) -> None:
        self.changes = -1  # of layouts, in all graphs of the process
        self.groups = -1
        self.layouts: dict[int, object] = {}


def mark_followed(optimizer: Optimizer, parameters: Iterable[nn.Parameter] | None = None) -> None:
    """Notes that the optimizer's state fits the present coordinates of parameters (all of its own
    by default).
    """
    checked = _checked.setdefault(optimizer, _Checked())
    for parameter in parameters_of(optimizer) if parameters is None else parameters:
        checked.layouts[id(parameter)] = layout_of(parameter)


def forget(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Notes that the optimizer no longer holds parameters."""
    checked = _checked.setdefault(optimizer, _Checked())
    for parameter in parameters:
        checked.layouts.pop(id(parameter), None)


def refuse_stale_state(optimizer: Optimizer, *_: object) -> None:
    """Raises when the optimizer holds state of coordinates that have moved; one comparison if no
    net was edited.
    """
    checked = _checked.setdefault(optimizer, _Checked())
    if checked.changes == Coordinates.layout_changes and checked.groups == len(
        optimizer.param_groups
    ):
        return
    require_followed(optimizer, parameters_of(optimizer))
    mark_followed(optimizer)
    checked.changes, checked.groups = Coordinates.layout_changes, len(optimizer.param_groups)


def require_followed(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raises OptimizerError when the optimizer's state of one of the parameters is of coordinates
    that have moved.
    """
    layouts = _checked.setdefault(optimizer, _Checked()).layouts
    for parameter in parameters:
        verb = getattr(parameter, "grapnet_replaced", None)
        if verb is not None:
            raise OptimizerError(
                f"this optimizer holds parameters that gn.{verb} has replaced, and would not train"
                " what is there. "
                + (
                    f"Give it to gn.{verb}(..., optimizer=optimizer), or make"
                    if verb != "restore"
                    else "Make"
                )
                + " another one for the model as it is"
            )
        layout = layout_of(parameter)
        if _holds_stale_state(
            optimizer, parameter, layouts.get(id(parameter), layout) is not layout
        ):
            raise OptimizerError(
                "this optimizer holds state of relations or biases that an edit has moved since: it"
                " was not attached then, is a copy of one that was, or has loaded a state dict of"
                " before the edit. Go on with another one, or with gn.restore(path,"
                " optimizer=optimizer) of a file saved after the edit; and attach it before"
                " editing: gn.attach(optimizer, net)"
            )


def mark_replaced(parameters: Iterable[nn.Parameter], verb: str) -> None:
    """Notes that parameters have left a model, so that an optimizer which still holds them refuses
    to step.
    """
    for parameter in parameters:
        parameter.grapnet_replaced = verb  # pyright: ignore[reportAttributeAccessIssue]
    Coordinates.layout_changes += 1  # every optimizer looks once


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns every Parameter of every group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _holds_stale_state(optimizer: Optimizer, parameter: nn.Parameter, moved: bool) -> bool:
    """Says whether the state is of coordinates that have moved: the parameter did, or a size says
    so.
    """
    if moved and isinstance(optimizer, LBFGS):
        return any(optimizer.state.values())
    values = [
        v
        for v in optimizer.state.get(parameter, {}).values()
        if isinstance(v, Tensor) and v.dim() > 0
    ]
    resized = layout_of(parameter) is not None and any(
        v.shape[1:] == parameter.shape[1:] and len(v) != len(parameter) and v.numel() != 1
        for v in values
    )
    return bool(values) and (moved or resized)


def _mark_loaded_state(
    setstate: Callable[[Optimizer, dict[str, Any]], None],
) -> Callable[[Optimizer, dict[str, Any]], None]:
    """Wraps the one method through which state arrives by load_state_dict, deepcopy and
    unpickling.
    """

    @functools.wraps(setstate)
    def marked(optimizer: Optimizer, state: dict[str, Any]) -> None:
        setstate(optimizer, state)
        mark_followed(optimizer)
        _checked[optimizer].changes = -1  # the next step compares sizes, before it changes anything

    return marked


# torch has a hook for the steps of all optimizers but none for their loading, and state that is
# loaded and then left behind by an edit of equal size would be used for other relations in silence.
register_optimizer_step_pre_hook(refuse_stale_state)
Optimizer.__setstate__ = _mark_loaded_state(Optimizer.__setstate__)  # pyright: ignore[reportAttributeAccessIssue]
