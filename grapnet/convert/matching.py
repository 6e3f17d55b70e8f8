"""Which submodules of a model are meant: by a pattern on names, by type or by a predicate."""

import fnmatch
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import nn

from grapnet.core.errors import ConversionError
from grapnet.network import GrapNet

Kind = TypeVar("Kind", bound=nn.Module)
Where = str | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]


def matches(model: nn.Module, where: Where) -> dict[str, nn.Module]:
    """Returns the outermost submodules that `where` says, by name; nets are passed over, and so is the model itself.

    A module that stands under several names is returned under the first of them that `where` says.
    """
    found: dict[str, nn.Module] = {}
    for name, module in _outside_of_nets(model).items():
        inside = name == "" or any(name.startswith(f"{outer}.") for outer in found)
        if not inside and not isinstance(module, GrapNet) and _says(where, name, module):
            found[name] = module
    found = _once(found)
    if not found and _says(where, "", model):
        raise ConversionError("the model itself cannot be replaced in place; use gn.from_module(model)")
    if not found:
        linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        raise ConversionError(_nothing("submodule", model, where, linears))
    return found


def matching_nets(model: nn.Module, where: Where | None) -> dict[str, GrapNet]:
    """Returns the nets of a model that `where` says, all of them for None, by name."""
    nets = {name: module for name, module in _outside_of_nets(model).items() if isinstance(module, GrapNet)}
    found = _once({name: net for name, net in nets.items() if where is None or _says(where, name, net)})
    if not found:
        raise ConversionError(_nothing("net", model, where, list(nets)))
    return found


def _outside_of_nets(model: nn.Module) -> dict[str, nn.Module]:
    """Returns all submodules under all of their names, without those that nets are made of."""
    everything = dict(model.named_modules(remove_duplicate=False))
    names = {name for name, module in everything.items() if isinstance(module, GrapNet)}
    prefixes = tuple(f"{name}." if name else "" for name in names)
    return {n: module for n, module in everything.items() if n in names or not n.startswith(prefixes)}


def _once(named: dict[str, Kind]) -> dict[str, Kind]:
    """Returns every module under the first of its names."""
    first = {id(module): name for name, module in reversed(named.items())}
    return {name: module for name, module in named.items() if first[id(module)] == name}


def _nothing(kind: str, model: nn.Module, where: Where | None, there: Sequence[str]) -> str:
    names = ", ".join(map(repr, there[:8])) or "none"
    return f"no {kind} of this {type(model).__name__} matches where={where!r}; there are {names}"


def _says(where: Where, name: str, module: nn.Module) -> bool:
    if isinstance(where, str):
        return fnmatch.fnmatchcase(name, where)
    if isinstance(where, type | tuple):
        return type(module) in (where if isinstance(where, tuple) else (where,))
    return bool(where(name, module))
