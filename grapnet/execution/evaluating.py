"""A module in evaluation mode for a while, without gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switches dropout and gradients off inside the block; every part has its own mode again
    afterwards.
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
