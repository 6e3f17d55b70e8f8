"""Detects whether coordinates may have changed since they were last read.

Torch counts most writes into a tensor, and a hook counts the steps of optimizers, whose fused
kernels torch does not count.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from grapnet._torch import count_of_writes

# Numbers that differ between two states of coordinates; None if there are none.
State = tuple[int, ...] | None


def state_of(parameter: nn.Parameter, frozen: Tensor | None = None) -> State:
    """Returns numbers that differ once the coordinates may have changed; None if there are none."""
    if getattr(parameter, "grapnet_is_unreported", False) or parameter.is_inference():
        return None
    steps = getattr(parameter, "grapnet_steps", 0)
    state = (parameter.data_ptr(), count_of_writes(parameter), steps)
    if frozen is None:
        return state
    return *state, frozen.data_ptr(), count_of_writes(frozen)


def count_steps(parameter: Any) -> None:
    """Counts the steps of optimizers that hold a Parameter, for `state_of`."""
    _watch_optimizers()
    if not hasattr(parameter, "grapnet_steps"):
        parameter.grapnet_steps = 0


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not hasattr(parameter, "grapnet_steps"):
                continue
            # A trace would compile every number of steps anew.
            if torch.compiler.is_compiling() or is_capturing(parameter):
                parameter.grapnet_is_unreported = True
            else:
                parameter.grapnet_steps += 1


def is_capturing(values: Tensor) -> bool:
    """Returns whether a CUDA graph records this pass."""
    return values.is_cuda and torch.cuda.is_current_stream_capturing()
