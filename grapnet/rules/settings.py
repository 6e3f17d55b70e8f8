"""Settings and states of rules and schedules as plain data that a checkpoint holds and that can be compared."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, str, np.generic)
_EXACT: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
_PARTIAL = ("func", "args", "keywords")


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
    return {"class": title(thing), "settings": {name: _plain(getattr(thing, name)) for name in _field_names(thing)}}


def attributes(thing: Any) -> dict[str, Any]:
    """Returns what an object holds beside the fields of a dataclass, as far as it is plain data without tensors.

    A `functools.partial` holds its function and its arguments.

    Examples:
        >>> def halve(net, edit, now, layer=0): ...
        >>> attributes(partial(halve, layer=1))
        {'func': {'class': 'halve', 'settings': {}}, 'args': [], 'keywords': {'layer': 1}}
    """
    held = {name: getattr(thing, name) for name in _PARTIAL} if isinstance(thing, partial) else {}
    held |= getattr(thing, "__dict__", {})
    beside = held.keys() - _field_names(thing)
    return {name: _plain(value) for name, value in held.items() if name in beside and _is_plain(value)}


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Says in words where two descriptions differ."""
    if saved["class"] != present["class"]:
        return [f"it was {saved['class']} and is {present['class']}"]
    return differing(saved["settings"], present["settings"])


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Says in words which settings differ."""
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
        return _exact(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [_plain(item) for item in sorted(value, key=repr)]
    return describe(value)


def _exact(value: Any) -> Any:
    """Returns a number or a text of a class of its own, such as a member of an IntEnum, as Python's."""
    made = [
        plain(value) for kind, plain in _EXACT.items() if isinstance(value, kind) and type(value) not in (kind, bool)
    ]
    return made[0] if made else value


def _key(key: Any) -> Any:
    """Returns a key of a dict as plain data that is the same in every process."""
    return _exact(key) if isinstance(key, _PLAIN) else re.sub(r" at 0x[0-9a-f]+", "", repr(key))


def _is_plain(value: Any, levels: int = 16) -> bool:
    """Says whether a value holds no tensors or arrays, and is nested no deeper than a few levels."""
    if isinstance(value, Tensor | np.ndarray) or levels == 0:
        return False
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        items = [getattr(value, name) for name in _field_names(value)]
    return all(_is_plain(item, levels - 1) for item in items)


def _field_names(thing: Any) -> list[str]:
    """Returns the names of the fields that a dataclass has values for; none of any other object, or of a class."""
    if isinstance(thing, type) or not is_dataclass(thing):
        return []
    return [field.name for field in fields(thing) if hasattr(thing, field.name)]


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
