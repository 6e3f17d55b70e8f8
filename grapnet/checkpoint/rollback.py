"""Modules as they are at present: what gives their parts, attributes and numbers back without
asking them.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

GoBack = Callable[[], None]


def remember_structure(modules: Iterable[nn.Module]) -> GoBack:
    """Returns a function that gives every module the attributes and the parts that it has at
    present.
    """
    listed = list(modules)
    owned = [vars(m) for m in listed] + [
        part
        for m in listed
        for part in (m._modules, m._parameters, m._buffers)
        if isinstance(part, dict)
    ]
    before = [dict(part) for part in owned]

    def go_back() -> None:
        for part, content in zip(owned, before, strict=True):
            part.clear()
            part.update(content)

    return go_back


def remember_modules(modules: Iterable[nn.Module]) -> GoBack:
    """Returns a function that gives modules, each by itself, everything back: structure, numbers
    and extra states.

    A `load_state_dict` that has just failed would fail again, and so would one into a tensor that
    cannot be written.
    """
    listed = list(modules)
    structure = remember_structure(listed)
    held = [
        tensor
        for m in listed
        for tensor in (*m.parameters(recurse=False), *m.buffers(recurse=False))
    ]
    memory = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in held
        if _has_memory(tensor)
    }
    contents = [(storage, storage.clone()) for storage in memory.values()]
    giving = [m for m in listed if type(m).get_extra_state is not nn.Module.get_extra_state]
    extras = [(module, copy.deepcopy(module.get_extra_state())) for module in giving]

    def go_back() -> None:
        structure()
        for storage, content in contents:
            storage.copy_(content)
        for module, extra in extras:
            # it may refuse even what it gave; the others get theirs
            with contextlib.suppress(Exception):
                module.set_extra_state(extra)

    return go_back


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not is_lazy(tensor)
