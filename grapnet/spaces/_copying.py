"""Copies of a model that hold other tensors: twins without contents, and models without some
nodes.
"""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from grapnet._torch import forward_hooks, module_hooks
from grapnet.core._opened import close_copies

# Modules whose hooks are part of a forward pass: they compute weights, or collect hidden states.
_WORKING_HOOKS = ("torch.nn.utils", "transformers.utils.output_capturing")
# Types of values that a model and its copy can share.
_UNCHANGING = frozenset((bool, float, int, str, type(None)))
# By these methods a class decides how its objects are copied.
_COPYING = (
    "__deepcopy__",
    "__getnewargs__",
    "__getnewargs_ex__",
    "__getstate__",
    "__reduce__",
    "__reduce_ex__",
)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's cyclic garbage collector.

    Twins and copies of a model are many objects without cycles, gone when their function returns.
    The collector would scan them, and everything else in the process, and find nothing to free.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()


def copy_model(
    model: nn.Module,
    memo: dict[int, Any],
    other: Callable[[Tensor], Tensor],
    *,
    closes: bool = True,
) -> tuple[nn.Module, dict[int, str], list[str]]:
    """Copies a model with other tensors, and without hooks that compute nothing.

    Args:
        model: The model.
        memo: The tensors of the copy, by the ids of the model's parameters and buffers.
        other: Makes a tensor of the copy from one that is neither; it is given without gradients.
        closes: Whether the tensors in `memo` have all cells, also those that were cut.

    Returns:
        The copy, the names of its tensors that are neither parameter nor buffer by id, and a line
        for every module whose hooks were left out.
    """
    names: dict[int, str] = {}
    left_out: list[str] = []
    others: list[tuple[str, Tensor]] = []
    parts = list(model.named_modules())
    for path, module in parts:
        prefix = ""
        if path:
            prefix = f"{path}."
        for hooks in module_hooks(module):
            memo[id(hooks)] = kept_hooks(hooks)
        for hooks in forward_hooks(module):
            if len(memo[id(hooks)]) < len(hooks):
                left_out.append(f"a hook of {path or 'the model'} was left out")
        for key, value in vars(module).items():
            if _is_unchanging(value) or id(value) in memo:
                continue
            if key not in ("_parameters", "_buffers", "_modules"):
                for tensor in _held(value):
                    others.append((f"{prefix}{key}", tensor))
    for name, tensor in others:
        if id(tensor) not in memo:
            double = other(tensor.detach())
            memo[id(tensor)] = double
            names[id(double)] = name
    # Inner modules come first, so that those around them find them in the memo.
    for _, module in reversed(parts):
        if id(module) not in memo and _is_copied_by_state(type(module)):
            _copy_state(module, memo)
    double = copy.deepcopy(model, memo)
    if closes:
        close_copies(double)
    return double, names, left_out


def _is_copied_by_state(kind: type[nn.Module]) -> bool:
    """Returns whether `copy.deepcopy` copies modules of a class as it copies plain ones."""
    return all(getattr(kind, name, None) is getattr(nn.Module, name, None) for name in _COPYING)


def _copy_state(module: nn.Module, memo: dict[int, Any]) -> None:
    """Does what `copy.deepcopy` does with a module, with fewer calls."""
    state: Any = module.__getstate__()
    if type(state) is not dict:
        # A class with slots has more than attributes; `copy.deepcopy` copies it.
        return
    double = type(module).__new__(type(module))
    memo[id(module)] = double
    double.__setstate__({key: _copied(value, memo) for key, value in state.items()})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Does what `copy.deepcopy` does, faster for what attributes of modules usually are."""
    if _is_unchanging(value):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is dict:
        items: dict[Any, Any] = {}
        memo[id(value)] = items
        for key, item in value.items():
            items[_copied(key, memo)] = _copied(item, memo)
        return items
    if type(value) in (set, OrderedDict) and not value:
        memo[id(value)] = type(value)()
        return memo[id(value)]
    return copy.deepcopy(value, memo)


def _is_unchanging(value: Any) -> bool:
    """Returns whether a copy of a module can share a value with it: a number, text, or several."""
    if type(value) is tuple:
        return _UNCHANGING.issuperset(map(type, value))
    return type(value) in _UNCHANGING


def _held(value: Any) -> list[Tensor]:
    """Returns the tensors in an attribute of a module, also those of modules that it holds."""
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    found = outputs_in(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, nn.Module):
                found.extend(_held(item))
    return found


def kept_hooks(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Returns the hooks without which the model would compute something else."""
    kept: OrderedDict[int, Any] = OrderedDict()
    for key, hook in hooks.items():
        if str(getattr(hook, "__module__", "")).startswith(_WORKING_HOOKS):
            kept[key] = hook
    return kept


def outputs_in(tree: Any, depth: int = 4) -> list[Tensor]:
    """Returns the tensors in the output of a module, also those held by objects.

    Caches of transformers are state that a model hands to itself, not output.
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (str, int, float, nn.Module, type(None))) or depth == 0:
        return []
    if isinstance(tree, Mapping):
        items: Any = tree.values()
    elif isinstance(tree, (list, tuple)):
        items = tree
    elif hasattr(tree, "__dict__") and not type(tree).__name__.endswith(("Cache", "Config")):
        items = vars(tree).values()
    else:
        return []
    found: list[Tensor] = []
    for item in items:
        found.extend(outputs_in(item, depth - 1))
    return found
