"""Whether two ways to compute the same thing agree, as far as rounding allows."""

import math

import torch
from torch import Tensor

from .command import CommandError


def largest_difference(output: Tensor, expected: Tensor) -> float:
    """Returns the largest |difference| between two outputs, 0 when they are empty.

    NaN beside NaN and an infinity beside the same one are no difference; beside anything else they
    are infinite.
    """
    if output.shape != expected.shape:
        raise CommandError(
            f"the output has shape {list(output.shape)}, and the net's {list(expected.shape)}"
        )
    # halves would overflow in the difference
    given, wanted = (
        output.to(expected).double(),
        expected.double(),
    )
    differs = (given != wanted) & ~(given.isnan() & wanted.isnan())
    apart = (given - wanted).abs()[differs].nan_to_num(nan=math.inf, posinf=math.inf)
    return float(apart.max()) if apart.numel() else 0.0


def require_agreement(difference: float, expected: Tensor, what: str, state: str) -> None:
    """Raises CommandError when a difference is more than rounding.

    Args:
        difference: the largest one.
        expected: the outputs that it is a difference from.
        what: was computed otherwise.
        state: what has become of the file.
    """
    if math.isinf(difference):
        raise CommandError(
            f"{what} is NaN or infinite where the net is not, or the other way round; {state}"
        )
    numbers = expected[expected.isfinite()].abs()
    scale = 1 + (float(numbers.max()) if numbers.numel() else 0.0)
    if difference > torch.finfo(expected.dtype).eps ** 0.5 * scale:
        raise CommandError(
            f"{what} differs from the net by {difference:.3g}, more than rounding explains; {state}"
        )


def told_of_overflow(expected: Tensor) -> str:
    """Returns what to add about outputs that are no numbers, and so say little about agreement; ""
    without any.
    """
    count = int((~expected.isfinite()).sum())
    return (
        f", but {count} of {expected.numel()} outputs are NaN or infinite, here and there alike"
        if count
        else ""
    )
