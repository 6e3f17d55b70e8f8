"""Which submodules of a model are meant: by patterns on names, by types or by a predicate."""

import fnmatch
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from torch import nn

from grapnet.core._errors import ConversionError
from grapnet.network import GrapNet

Kind = TypeVar("Kind", bound=nn.Module)
Single = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Where = Single | Collection[Single]


def matches(model: nn.Module, where: Where) -> dict[str, nn.Module]:
    """Returns the outermost submodules that `where` says, by name; nets are passed over, and so is
    the model itself.

    A module that stands under several names is returned under the first of them that `where` says.
    """
    _require_sense(where)
    found: dict[str, nn.Module] = {}
    for name, module in _outside_of_nets(model).items():
        inside = name == "" or any(name.startswith(f"{outer}.") for outer in found)
        if not inside and not isinstance(module, GrapNet) and _says(where, name, module):
            found[name] = module
    found = _once(found)
    if not found and _says(where, "", model):
        raise ConversionError(
            "the model itself cannot be replaced in place; use gn.from_module(model)"
        )
    if not found:
        there = _outside_of_nets(model)
        nets = [
            name
            for name, module in there.items()
            if isinstance(module, GrapNet) and _says(where, name, module)
        ]
        if nets:
            raise ConversionError(f"{nets[0]!r} is a net already; see gn.ungraft for the way back")
        linears = [name for name, module in there.items() if type(module) is nn.Linear]
        raise ConversionError(_nothing("submodule", model, where, "plain nn.Linears", linears))
    return found


def matching_nets(model: nn.Module, where: Where | None) -> dict[str, GrapNet]:
    """Returns the nets of a model that `where` says, all of them for None, by name."""
    if where is not None:
        _require_sense(where)
    nets = {
        name: module
        for name, module in _outside_of_nets(model).items()
        if isinstance(module, GrapNet)
    }
    found = _once(
        {name: net for name, net in nets.items() if where is None or _says(where, name, net)}
    )
    if not found:
        raise ConversionError(_nothing("net", model, where, "nets", list(nets)))
    return found


def _outside_of_nets(model: nn.Module) -> dict[str, nn.Module]:
    """Returns all submodules under all of their names, without those that nets are made of."""
    everything = dict(model.named_modules(remove_duplicate=False))
    names = {name for name, module in everything.items() if isinstance(module, GrapNet)}
    prefixes = tuple(f"{name}." if name else "" for name in names)
    return {
        n: module for n, module in everything.items() if n in names or not n.startswith(prefixes)
    }


def _once(named: dict[str, Kind]) -> dict[str, Kind]:
    """Returns every module under the first of its names."""
    first = {id(module): name for name, module in reversed(named.items())}
    return {name: module for name, module in named.items() if first[id(module)] == name}


def _nothing(
    kind: str, model: nn.Module, where: Where | None, of: str, there: Sequence[str]
) -> str:
    names = ", ".join(map(repr, there[:8])) + (", …" if len(there) > 8 else "")
    return (
        f"no {kind} of this {type(model).__name__} matches where={where!r}; its {of} are"
        f" {names or 'none'}"
    )


def _require_sense(where: Where) -> None:
    """Raises TypeError for what is neither a pattern, nor a type, nor a predicate, nor several of
    them.
    """
    for one in _each(where):
        if isinstance(one, nn.Module) or not (isinstance(one, str | type) or callable(one)):
            raise TypeError(
                "where= is a pattern on names, a type, a predicate of name and module, or several"
                " of these; got"
                f" {'a module, whose name is meant' if isinstance(one, nn.Module) else repr(one)}"
            )


def _each(where: Where) -> Collection[Single]:
    return where if isinstance(where, list | tuple | set | frozenset) else (where,)  # pyright: ignore[reportReturnType]


def _says(where: Where, name: str, module: nn.Module) -> bool:
    for one in _each(where):
        if isinstance(one, str):
            found = fnmatch.fnmatchcase(name, one)
        else:
            found = type(module) is one if isinstance(one, type) else bool(one(name, module))
        if found:
            return True
    return False
