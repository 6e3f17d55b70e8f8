"""Which submodules of a model are meant: by patterns on names, by types or by a predicate."""

import fnmatch
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from torch import nn

from grapnet._network import GrapNet
from grapnet.core._errors import ConversionError

Kind = TypeVar("Kind", bound=nn.Module)
Single = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Where = Single | Collection[Single]


def matches(
    model: nn.Module,
    where: Where,
    only: type[nn.Module] | None = None,
    skip: str | Collection[str] = (),
) -> dict[str, nn.Module]:
    """Returns the outermost submodules that match, by name; see `gn.graft` for the arguments.

    Nets, modules without Parameters and the model itself are passed over. A module that stands
    under several names is returned under the first of them that matches.
    """
    there = _outside_of_nets(model)
    patterns = _listed(skip)
    skipped = {name for name in there if _matches_any(name, patterns)}
    found: dict[str, nn.Module] = {}
    nets: list[str] = []
    for name, module in there.items():
        if not _matches(where, name, module):
            continue
        if isinstance(module, GrapNet):
            nets.append(name)
            continue
        is_of_kind = only is None or type(module) is only
        has_weights = next(module.parameters(), None) is not None
        if name == "" or not is_of_kind or not has_weights:
            continue
        if is_inside(name, found) or is_inside(name, skipped) or _holds(name, skipped):
            continue
        found[name] = module
    if found:
        return _once(found)
    if nets:
        raise ConversionError(f"{nets[0]!r} is a net already; see gn.ungraft for the way back")
    if _matches(where, "", model):
        raise ConversionError(
            "the model itself cannot be replaced in place; use gn.from_module(model)"
        )
    linears = [name for name, module in there.items() if type(module) is nn.Linear]
    raise ConversionError(
        f"no submodule of this {type(model).__name__} with weights matches where={where!r},"
        f" only={only!r}, skip={skip!r}; its plain nn.Linears are {_shown(linears)}"
    )


def matching_nets(model: nn.Module, where: Where | None) -> dict[str, GrapNet]:
    """Returns the nets of a model that match `where`, all of them for None, by name."""
    there = _outside_of_nets(model)
    nets = {name: module for name, module in there.items() if isinstance(module, GrapNet)}
    found = nets
    if where is not None:
        found = {name: net for name, net in nets.items() if _matches(where, name, net)}
    if not found:
        raise ConversionError(
            f"no net of this {type(model).__name__} matches where={where!r}; its nets are"
            f" {_shown(list(nets))}"
        )
    return _once(found)


def _outside_of_nets(model: nn.Module) -> dict[str, nn.Module]:
    """Returns all submodules under all of their names, without those that nets are made of."""
    everything = dict(model.named_modules(remove_duplicate=False))
    names = {name for name, module in everything.items() if isinstance(module, GrapNet)}
    prefixes = tuple(f"{name}." if name else "" for name in names)
    return {
        name: module
        for name, module in everything.items()
        if name in names or not name.startswith(prefixes)
    }


def is_inside(name: str, outer: Iterable[str]) -> bool:
    """Returns whether a module is one of `outer` or inside of one."""
    return any(name == one or name.startswith(f"{one}.") for one in outer)


def _holds(name: str, inner: Iterable[str]) -> bool:
    return any(one.startswith(f"{name}.") for one in inner)


def _once(named: dict[str, Kind]) -> dict[str, Kind]:
    """Returns every module under the first of its names."""
    first = {id(module): name for name, module in reversed(named.items())}
    return {name: module for name, module in named.items() if first[id(module)] == name}


def _shown(names: list[str]) -> str:
    text = ", ".join(map(repr, names[:8]))
    if len(names) > 8:
        text += ", …"
    return text or "none"


def _listed(one_or_several: object) -> Collection:
    if isinstance(one_or_several, list | tuple | set | frozenset):
        return one_or_several
    return (one_or_several,)


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _matches(where: Where, name: str, module: nn.Module) -> bool:
    for one in _listed(where):
        if isinstance(one, str):
            found = fnmatch.fnmatchcase(name, one)
        elif isinstance(one, type):
            found = type(module) is one
        else:
            found = bool(one(name, module))
        if found:
            return True
    return False
