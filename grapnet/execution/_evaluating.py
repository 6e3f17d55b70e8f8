"""A context in which a module is in evaluation mode, without gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Disables dropout and gradients inside the block, and restores the mode of every module
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
