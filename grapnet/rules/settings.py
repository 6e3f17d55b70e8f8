"""Settings and states of rules and schedules as plain data that a checkpoint holds and that can be compared."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, str, np.generic)


def title(thing: Any) -> str:
    """Returns the name of an object's class, or of a function."""
    return "None" if thing is None else getattr(thing, "__name__", type(thing).__name__)


def describe(thing: Any) -> dict[str, Any]:
    """Returns what an object is: the name of its class and, of a dataclass, its fields.

    Examples:
        >>> from grapnet.rules.schedule import Every
        >>> describe(Every(100, until=500))
        {'class': 'Every', 'settings': {'steps': 100, 'start': 0, 'until': 500}}
    """
    given = {f.name: _plain(getattr(thing, f.name)) for f in fields(thing)} if is_dataclass(thing) else {}
    return {"class": title(thing), "settings": given}


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Says in words where two descriptions differ."""
    if saved["class"] != present["class"]:
        return [f"it was {saved['class']} and is {present['class']}"]
    before, after = saved["settings"], present["settings"]
    return [
        f"{name} was {before.get(name)!r} and is {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if not same(before.get(name), after.get(name))
    ]


def state_of(rule: Any) -> Any:
    """Returns the state of a rule that keeps one and takes it back; None of any other."""
    return rule.state_dict() if hasattr(rule, "state_dict") and hasattr(rule, "load_state_dict") else None


def set_state(rule: Any, state: Any) -> None:
    """Gives a rule back the state that it had, if it had one."""
    if state is not None:
        rule.load_state_dict(state)


def _plain(value: Any) -> Any:
    """Returns a setting as plain data; what has no such form is named."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (*_PLAIN, np.ndarray)):
        return value
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, _PLAIN) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [_plain(item) for item in sorted(value, key=repr)]
    return describe(value)


def same(one: Any, other: Any) -> bool:
    """Says whether two trees of plain data and tensors are equal."""
    if isinstance(one, Tensor | np.ndarray) or isinstance(other, Tensor | np.ndarray):
        if type(one) is not type(other) or one.dtype != other.dtype:
            return False
        return torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)  # NaN is NaN
