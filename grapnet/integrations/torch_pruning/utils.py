"""Counting, printing and timing, under Torch-Pruning's names."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from . import benchmark as benchmark


def count_params(module: nn.Module) -> int:
    """Returns the number of entries of all Parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def count_ops_and_params(model: nn.Module, example_inputs: Any, layer_wise: bool = False) -> Any:
    """Returns the multiply-adds of one example, and the number of Parameters.

    Matrix products, convolutions and attentions are counted. Torch-Pruning adds the additions of
    norms, activations and pools, so its numbers are a little larger.

    Args:
        model: the model, which runs once, in evaluation mode.
        example_inputs: a tensor; a sequence, of positional arguments; or a dict, of keyword ones.
        layer_wise: whether to return two more dicts, of both numbers by module.
    """
    counter = FlopCounterMode(display=False)
    layer_macs: dict[nn.Module, float] = {}
    started: list[int] = []
    first = next(iter(flatten_as_list(example_inputs)), None)
    batch = 1
    if isinstance(first, Tensor) and first.dim():
        batch = len(first)

    def enter(module: nn.Module, args: Any) -> None:
        started.append(counter.get_total_flops())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        flops = counter.get_total_flops() - started.pop()
        layer_macs[module] = layer_macs.get(module, 0) + flops / 2 / batch

    hooks = []
    modes = {}
    for module in model.modules():
        modes[module] = module.training
        layer_macs[module] = 0
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave))
    try:
        model.eval()
        with counter:
            if isinstance(example_inputs, dict):
                model(**example_inputs)
            elif isinstance(example_inputs, list | tuple):
                model(*example_inputs)
            else:
                model(example_inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    macs = counter.get_total_flops() / 2 / batch
    if not layer_wise:
        return macs, count_params(model)
    layer_params = {module: count_params(module) for module in model.modules()}
    return macs, count_params(model), layer_macs, layer_params


def flatten_as_list(obj: Any) -> list[Any]:
    """Returns the values in nested lists, tuples and dicts as one list."""
    if isinstance(obj, dict):
        obj = list(obj.values())
    if not isinstance(obj, list | tuple):
        return [obj]
    found = []
    for part in obj:
        found.extend(flatten_as_list(part))
    return found


class print_tool:
    """Prints a model with the lines that pruning has changed."""

    _before: str | None = None

    @staticmethod
    def before_pruning(model: nn.Module) -> None:
        """Remembers a model as it is."""
        print_tool._before = str(model)

    @staticmethod
    def after_pruning(model: nn.Module, do_print: bool = True) -> str:
        """Returns the lines of a model, and after "=>" what they have become.

        Raises:
            ValueError: `before_pruning` was not called.
        """
        if print_tool._before is None:
            raise ValueError("call print_tool.before_pruning(model) first")
        lines = []
        before = print_tool._before.splitlines()
        for line, other in zip(before, str(model).splitlines(), strict=False):
            if line != other:
                line = f"{line} => {other.strip()}"
            lines.append(line)
        print_tool._before = None
        text = "\n".join(lines)
        if do_print:
            print(text)
        return text
