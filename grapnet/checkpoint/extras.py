"""What is saved beside the net: states of objects, generators and plain data."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from grapnet.core.errors import CheckpointError
from grapnet.learning.optim import refuse_stale_state

from .fields import Fields, entry
from .tree import decode, encode


def where(name: str) -> str:
    """Returns what an extra is called in the file and in errors."""
    return f"extras.{name}" if name.isidentifier() else f"extras[{name!r}]"


def describe_extra(name: str, value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Puts the tensors of an extra into `tensors` and returns the rest as JSON."""
    if isinstance(value, Optimizer):
        refuse_stale_state(value)
    kind = _kind(value)
    if kind == "state" and not hasattr(value, "state_dict"):
        kind = "data"
    tree = encode(value if kind == "data" else _state(value), where(name), tensors)
    return {"kind": kind, "class": type(value).__name__, "shapes": _shapes(value), "tree": tree}


def read_extra(name: str, part: Any, fields: Fields) -> Any:
    """Returns the state or the data that an extra was saved as."""
    if entry(part, "kind", str, f"{where(name)}.") not in ("generator", "state", "data"):
        raise CheckpointError(f"{where(name)}.kind: expected generator, state or data")
    if "tree" not in part:
        raise CheckpointError(f"{where(name)}.tree: missing")
    return decode(part["tree"], where(name), fields)


def require_fit(name: str, target: Any, part: dict[str, Any]) -> None:
    """Raises when an object is not of the kind, the class or the shapes that were saved."""
    kind = _kind(target)
    if kind == "state" and not hasattr(target, "load_state_dict"):
        raise TypeError(
            f"{name}= takes an object with load_state_dict() or a torch.Generator, not a {type(target).__name__}"
        )
    if part["kind"] == "data":
        raise CheckpointError(f"{where(name)}: was saved as plain data, which gn.restore(path) returns")
    saved, given = str(part.get("class"))[:60], type(target).__name__
    if part["kind"] != kind or saved != given:
        raise CheckpointError(f"{where(name)}: was saved from a {saved}, not from a {given}")
    if part.get("shapes") != _shapes(target):
        raise CheckpointError(
            f"{where(name)}: was saved for parameters of shapes {str(part.get('shapes'))[:200]}, "
            f"the optimizer has {_shapes(target)}"
        )


def restore_all(objects: dict[str, Any], states: dict[str, Any]) -> None:
    """Gives every object its state; when one refuses, all of them are as before and CheckpointError names it."""
    undo, name = [], ""
    try:
        for name in sorted(
            objects, key=lambda name: isinstance(objects[name], Optimizer)
        ):  # loading ends its staleness
            undo.append(_remembered(objects[name]))
            _set_state(objects[name], states[name])
    except BaseException as error:
        for go_back in reversed(undo):
            go_back()
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(f"{where(name)}: its state does not fit the object ({error!r})") from error


def _remembered(target: Any) -> Any:
    """Returns a function that puts the present state back."""
    if isinstance(target, Optimizer):  # loading puts other dicts in place and leaves these alone
        present = {"state": target.state, "param_groups": target.param_groups}
        return lambda: vars(target).update(present)
    state, attributes = copy.deepcopy(_state(target)), set(getattr(target, "__dict__", ()))

    def go_back() -> None:
        _set_state(target, state)
        for name in set(getattr(target, "__dict__", ())) - attributes:  # a scheduler takes over whatever it is given
            delattr(target, name)

    return go_back


def _kind(value: Any) -> str:
    return "generator" if isinstance(value, torch.Generator) else "state"


def _shapes(value: Any) -> list[list[int]] | None:
    if not isinstance(value, Optimizer):
        return None
    return [list(p.shape) for group in value.param_groups for p in group["params"]]


def _state(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _set_state(target: Any, state: Any) -> None:
    if isinstance(target, torch.Generator):
        target.set_state(state)
    else:
        target.load_state_dict(state)
