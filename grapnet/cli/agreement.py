"""Whether two ways to compute the same thing agree, as far as rounding allows."""

import torch
from torch import Tensor

from .command import CommandError


def largest_difference(output: Tensor, expected: Tensor) -> float:
    """Returns the largest |difference| between two outputs, 0 when they are empty."""
    if output.shape != expected.shape:
        raise CommandError(f"the output has shape {list(output.shape)}, and the net's {list(expected.shape)}")
    return float((output.to(expected) - expected).abs().max()) if expected.numel() else 0.0


def require_agreement(difference: float, expected: Tensor, what: str, state: str) -> None:
    """Raises CommandError when a difference is more than rounding.

    Args:
        difference: the largest one.
        expected: the outputs that it is a difference from.
        what: was computed otherwise.
        state: what has become of the file.
    """
    scale = 1 + (float(expected.abs().max()) if expected.numel() else 0.0)
    allowed = torch.finfo(expected.dtype).eps ** 0.5 * scale
    if not difference <= allowed:  # NaN is no agreement either
        raise CommandError(f"{what} differs from the net by {difference:.3g}, more than rounding explains; {state}")
