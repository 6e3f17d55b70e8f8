"""State dicts with the sizes and numbers of a pruned model, under Torch-Pruning's names."""

from typing import Any

import torch
from torch import nn

load = torch.load
save = torch.save

# Values of attributes that a state dict holds.
_PLAIN = (bool, int, float, str, type(None))


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns the tensors of a model, and the numbers and texts of its modules.

    It has no code, so `torch.load(path)` reads it. `gn.save` also keeps nodes, history and
    optimizers. Files of Torch-Pruning itself are others.
    """
    numbers = {}
    for path, module in model.named_modules():
        own = {}
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training" and _is_plain(value):
                own[name] = value
        numbers[path] = own
    return {"tensors": model.state_dict(), "numbers": numbers}


def load_state_dict(model: nn.Module, state_dict: dict[str, Any]) -> nn.Module:
    """Resizes the tensors of a model, fills them, sets its numbers, and returns it.

    Parameters stay the same objects. A model that is adopted has to be adopted again.
    """
    tensors = state_dict["tensors"]
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        if name in held and held[name].shape != tensor.shape:
            held[name].grad = None
            held[name].data = held[name].data.new_empty(tensor.shape)
    model.load_state_dict(tensors)
    for path, own in state_dict["numbers"].items():
        module = model.get_submodule(path)
        for name, value in own.items():
            setattr(module, name, value)
    return model


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(part) for part in value)
    return isinstance(value, _PLAIN)
