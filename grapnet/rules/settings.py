"""Settings and states of rules and schedules as plain data that a checkpoint holds and that can be
compared.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, str, np.generic)
_EXACT: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}
# entries of a list that is compared; a quarter of it in one that stands inside of another
MOST = 64


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
    return {
        "class": title(thing),
        "settings": {name: _plain(getattr(thing, name)) for name in _field_names(thing)},
    }


def arguments(thing: Any) -> dict[str, Any]:
    """Returns the arguments that an object was made with, as far as it keeps them under their
    names, few and plain.

    Those of a dataclass are its fields, which `describe` tells. A `functools.partial` keeps its
    function and arguments.

    Examples:
        >>> def halve(net, edit, now, layer=0): ...
        >>> arguments(partial(halve, layer=1))
        {'func': 'halve', 'args': [], 'keywords': {'layer': 1}}
    """
    if isinstance(thing, partial):
        held = {"func": title(thing.func), "args": thing.args, "keywords": thing.keywords}
    elif is_dataclass(thing):
        held = {}
    else:
        present = getattr(thing, "__dict__", {})
        held = {name: present[name] for name in _argument_names(type(thing)) if name in present}
    return {name: _plain(value) for name, value in held.items() if _is_small(value)}


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
    return (
        rule.state_dict()
        if hasattr(rule, "state_dict") and hasattr(rule, "load_state_dict")
        else None
    )


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
    """Returns a number or a text of a class of its own, such as a member of an IntEnum, as
    Python's.
    """
    made = [
        plain(value)
        for kind, plain in _EXACT.items()
        if isinstance(value, kind) and type(value) not in (kind, bool)
    ]
    return made[0] if made else value


def _key(key: Any) -> Any:
    """Returns a key of a dict as plain data that is the same in every process."""
    return _exact(key) if isinstance(key, _PLAIN) else re.sub(r" at 0x[0-9a-f]+", "", repr(key))


def _is_small(value: Any, most: int = MOST) -> bool:
    """Says whether a value is a number, a text or nothing, or a short list, dict or dataclass of
    such.
    """
    if type(value) in (list, tuple, dict):
        if len(value) > most or (
            type(value) is dict and not all(type(key) is str for key in value)
        ):
            return False
        return all(
            _is_small(item, most // 4)
            for item in (value.values() if type(value) is dict else value)
        )
    if names := _field_names(value):
        return most > 0 and all(_is_small(getattr(value, name), most // 4) for name in names)
    if isinstance(value, int):
        return abs(value) < 2**63
    return (
        value is None or isinstance(value, float) or (isinstance(value, str) and len(value) <= 1000)
    )


def _argument_names(kind: type) -> list[str]:
    try:
        return [*inspect.signature(kind).parameters]
    except (TypeError, ValueError):  # a class written in C
        return []


def _field_names(thing: Any) -> list[str]:
    """Returns the names of the fields that a dataclass has values for; none of any other object, or
    of a class.
    """
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
