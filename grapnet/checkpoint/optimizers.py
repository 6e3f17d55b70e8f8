"""Whether the state that an optimizer has loaded is one that it can step with."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grapnet.core._errors import CheckpointError

_SIZES = (3, 5, 7, 11, 13)  # of a trial parameter; all differ, so that a shape tells its dimensions


def require_state(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raises CheckpointError when an option, or an entry of the state, is missing or has another
    form than this optimizer gives it.

    One step of a small optimizer of the same class gives the expected form of every entry. Classes
    outside of torch.optim are not checked in this way.

    Args:
        optimizer: the optimizer, after it has loaded.
        groups: the parameter groups that it had before.
    """
    for n, (group, own) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for name in optimizer.defaults.keys() & own.keys():
            if name not in group or not _is_alike(group[name], own[name]):
                raise CheckpointError(f"param_groups[{n}][{name!r}]: missing or of another type")
        expected: dict[int, dict[str, Any] | None] = {}  # by the number of dimensions
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                continue
            if parameter.dim() not in expected:
                expected[parameter.dim()] = _first_state(optimizer, group, parameter)
            for key, example in (expected[parameter.dim()] or {}).items():
                shape = list(parameter.shape)
                if key not in state or not _has_form(state[key], example, shape):
                    raise CheckpointError(f"{key!r} of a parameter of shape {shape} does not fit")


def _first_state(
    optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> dict[str, Any] | None:
    """Returns the state after one step of a small parameter with the options of a group; None where
    that is not possible.
    """
    kind = type(optimizer)
    if parameter.dim() > len(_SIZES) or kind is not getattr(torch.optim, kind.__name__, None):
        return None
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    trial = nn.Parameter(parameter.new_zeros(_SIZES[: parameter.dim()]))
    trial.grad = torch.zeros_like(trial)
    make: Any = kind
    # without the hooks that others have registered for steps
    step: Any = inspect.unwrap(kind.step)
    try:
        small = make([{**options, "params": [trial]}])
        with torch.no_grad():
            step(small)
    except Exception:  # one that wants a closure, or sparse gradients
        return None
    return dict(small.state[trial])


def _has_form(value: Any, example: Any, shape: list[int]) -> bool:
    """Says whether a value has the form of an example from a parameter of the shape `_SIZES`."""
    if not isinstance(example, Tensor):
        return _is_alike(value, example)
    expected = []
    for dimension, size in enumerate(example.shape):
        is_of_parameter = dimension < len(shape) and size == _SIZES[dimension]
        expected.append(shape[dimension] if is_of_parameter else size)
    return isinstance(value, Tensor) and list(value.shape) == expected


def _is_alike(value: Any, example: Any) -> bool:
    """Says whether a number stands for a number, and a sequence for one of the same length."""
    if isinstance(example, bool | str) or example is None:
        return True
    if isinstance(example, int | float | Tensor):
        return isinstance(value, int | float | Tensor)
    if isinstance(example, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(example)
    return True
