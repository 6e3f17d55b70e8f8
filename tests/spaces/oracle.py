"""What an edit must have done, by plain torch: hand-sliced models, states and snapshots.

Nothing of the library under test is imported here.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Cuts = Mapping[tuple[str, int], Sequence[int]]  # (name of a tensor, dimension) -> positions


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by every name they have, tied ones several times."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def kept(size: int, removed: Iterable[int]) -> Tensor:
    """Returns the positions of an axis that remain, in order."""
    gone = set(removed)
    assert gone <= set(range(size)), f"positions {sorted(gone)} of an axis of {size}"
    return torch.tensor([i for i in range(size) if i not in gone], dtype=torch.long)


def without(value: Tensor, name: str, cuts: Cuts) -> Tensor:
    """Returns a tensor without the positions that `cuts` removes from the tensor of that name."""
    for (cut_name, dim), removed in cuts.items():
        if cut_name == name:
            index = kept(value.shape[dim], removed).to(value.device)
            value = value.index_select(dim, index)
    return value


def copy_of(model: nn.Module) -> nn.Module:
    """Returns a deep copy with its gradients, which `copy.deepcopy` leaves out."""
    result = copy.deepcopy(model)
    for new, old in zip(result.parameters(), model.parameters(), strict=True):
        if old.grad is not None:
            new.grad = old.grad.clone()
    return result


def sliced(
    model: nn.Module,
    cuts: Cuts,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
) -> nn.Module:
    """Returns a copy of a model whose tensors lack the removed positions.

    A tied tensor is cut under one of its names. Gradients are cut like their parameters.

    Args:
        cuts: The positions to remove, by name and dimension of a parameter or buffer.
        attributes: Plain attributes to set, such as `{"attn": {"num_heads": 2}}`; the path `""`
            is the model itself.
    """
    result = copy_of(model)
    tensors = tensors_of(result)
    names = sorted({name for name, _ in cuts})
    assert len({id(tensors[name]) for name in names}) == len(names), "a tied tensor twice"
    for name in names:
        tensor = tensors[name]
        grad = tensor.grad
        tensor.grad = None
        # A tied parameter is one object, so all its names see the new content.
        tensor.data = without(tensor.data, name, cuts).contiguous()
        if grad is not None:
            tensor.grad = without(grad, name, cuts).contiguous()
    for path, values in (attributes or {}).items():
        module = result.get_submodule(path)
        for key, value in values.items():
            assert hasattr(module, key), f"{path or 'the model'} has no attribute {key}"
            setattr(module, key, value)
    return result


def silenced(model: nn.Module, zeros: Cuts) -> nn.Module:
    """Returns a copy of a model in which the given positions of the given tensors are zero."""
    result = copy_of(model)
    tensors = tensors_of(result)
    for (name, dim), positions in zeros.items():
        tensor = tensors[name].data
        index = torch.tensor(list(positions), dtype=torch.long, device=tensor.device)
        tensor.index_fill_(dim, index, 0)
    return result


def flattened(output: Any) -> list[Tensor]:
    """Returns the tensors of an output of any shape, in order.

    Looks into tuples, lists, mappings (Hugging Face's outputs are such) and dataclasses.
    """
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        parts: Iterable[Any] = output.values()
    elif isinstance(output, (tuple, list)):
        parts = output
    elif is_dataclass(output):
        parts = [getattr(output, each.name) for each in fields(output)]
    else:
        return []
    found: list[Tensor] = []
    for part in parts:
        found.extend(flattened(part))
    return found


def first_tensor(output: Any) -> Tensor:
    """Returns the first floating tensor of an output: its logits, as a rule."""
    for tensor in flattened(output):
        if tensor.is_floating_point():
            return tensor
    raise ValueError(f"no floating tensor in an output of type {type(output).__name__}")


def outputs_of(model: nn.Module, case: Any) -> list[Tensor]:
    """Returns the detached outputs of a model on the call of a case, in the mode it is in.

    The generator is seeded, so that two models draw the same dropout, and put back.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = flattened(model(*case.inputs, **case.kwargs))
    return [tensor.detach().clone() for tensor in found]


def largest_difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Returns the largest difference of two lists of tensors of the same shapes.

    A value that is NaN on one side only counts as infinite.
    """
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        # Equal infinities have no difference, though their subtraction has none to give.
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        if unequal.any():
            gap = (a[unequal].double() - b[unequal].double()).abs()
            worst = max(worst, gap.nan_to_num(nan=float("inf")).max().item())
    return worst


def _content(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a tensor as its bytes, so that NaN equals itself and -0.0 differs from 0.0."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    data = b""
    if plain.numel():
        data = plain.view(torch.uint8).numpy().tobytes()
    return (tuple(tensor.shape), str(tensor.dtype), str(tensor.device), data)


class _Same:
    """Compares by identity, and keeps the object alive so that no other gets its address."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _plain(value: Any) -> Any:
    """Returns a value of an optimizer in a form that `==` compares to the bit."""
    if isinstance(value, Tensor):
        return _content(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return copy.deepcopy(value)


def _is_plain(value: Any) -> bool:
    """Returns whether an attribute is a number, a word, or a tuple of such."""
    if isinstance(value, (tuple, list)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


def snapshot(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Returns a bit-exact picture of a model and its optimizer.

    It holds the content of every parameter, buffer and gradient, the identity of every parameter,
    the plain attributes and the class of every submodule, and the optimizer's groups and states.
    """
    picture: dict[str, Any] = {}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
        picture[f"parameter {name}"] = _content(parameter)
        picture[f"identity of {name}"] = _Same(parameter)
        picture[f"requires_grad of {name}"] = parameter.requires_grad
        gradient = None
        if parameter.grad is not None:
            gradient = _content(parameter.grad)
        picture[f"gradient of {name}"] = gradient
    for name, buffer in model.named_buffers(remove_duplicate=False):
        picture[f"buffer {name}"] = _content(buffer)
    configs: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        picture[f"class of {path}"] = type(module)
        for key, value in vars(module).items():
            if _is_plain(value):
                picture[f"attribute {path}.{key}"] = copy.deepcopy(value)
            elif isinstance(value, Tensor):
                picture[f"attribute {path}.{key}"] = _content(value)
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict") and id(config) not in configs:
            configs.add(id(config))
            picture[f"config of {path}"] = config.to_dict()
    if optimizer is not None:
        picture.update(_optimizer_snapshot(optimizer, names))
    return picture


def _optimizer_snapshot(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    picture: dict[str, Any] = {"optimizer": _Same(optimizer)}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                picture[f"group {number} members"] = [_Same(each) for each in value]
            else:
                picture[f"group {number} {key}"] = _plain(value)
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter), f"a parameter that left ({id(parameter)})")
        for key, value in state.items():
            picture[f"state {key} of {name}"] = _plain(value)
    return picture


def same(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns what differs between two snapshots, empty if nothing does."""
    differences = []
    for key in sorted({*before, *after}):
        if key not in after:
            differences.append(f"{key} is gone")
        elif key not in before:
            differences.append(f"{key} is there since")
        elif before[key] != after[key]:
            differences.append(f"{key} differs")
    return differences


def sliced_adam_state(
    model: nn.Module, optimizer: Optimizer, cuts: Cuts
) -> dict[str, dict[str, Any]]:
    """Returns what an optimizer must hold for each parameter after `cuts`, by its first name.

    To be called before the edit. Every state of a parameter's shape is indexed like the parameter;
    anything else, such as Adam's step, is kept as it is.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    expected: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        known = names[id(parameter)]
        expected[known[0]] = {}
        for key, value in state.items():
            kept_value = copy.deepcopy(value)
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                kept_value = value.clone()
                for name in known:
                    kept_value = without(kept_value, name, cuts)
            expected[known[0]][key] = kept_value
    return expected


def adam_differences(
    model: nn.Module, optimizer: Optimizer, expected: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Returns where an optimizer's states differ from `sliced_adam_state`, to the bit."""
    differences = []
    for name, parameter in model.named_parameters():
        found = optimizer.state.get(parameter, {})
        state = expected.get(name, {})
        for key in sorted({*found, *state}):
            if key not in found:
                differences.append(f"{key} of {name} is gone")
            elif key not in state:
                differences.append(f"{key} of {name} is there since")
            elif _plain(found[key]) != _plain(state[key]):
                differences.append(f"{key} of {name} differs")
    return differences
