"""Means with their spread, and paired comparisons over seeds."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple


class Summary(NamedTuple):
    """A mean, a standard deviation, and of how many values; prints as `63.16 ± 3.20`."""

    mean: float
    std: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.std:.2f}"


class Paired(NamedTuple):
    """Mean and standard deviation of differences, their confidence interval, and p of a two-sided
    paired t-test.
    """

    mean: float
    std: float
    low: float
    high: float
    p: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:.2f}, {self.high:.2f}], p = {self.p:.1e}, n = {self.n}"


def summary(values: Sequence[float], *, population: bool = False) -> Summary:
    """Returns mean ± standard deviation.

    Args:
        values: one a seed; at least two, or one with `population`.
        population: divide the squares by n instead of n − 1.

    Examples:
        >>> print(summary([60.0, 62.0, 67.0]))
        63.00 ± 3.61
    """
    _require_finite(values, 1 if population else 2)
    deviation = statistics.pstdev if population else statistics.stdev
    return Summary(statistics.fmean(values), deviation(values), len(values))


def paired(a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95) -> Paired:
    """Compares two methods seed by seed: the differences a − b, with Student's interval and test.

    Where all differences are the same, the interval is that point, and p is 0, or 1 when they are
    0.

    Args:
        a: one value a seed.
        b: those of the other method, for the same seeds in the same order.
        confidence: of the interval.

    Raises:
        ValueError: the values are not pairs, fewer than two, or not finite.
        ImportError: scipy is not installed.

    Examples:
        >>> print(paired([63.0, 62.0, 66.0, 61.0], [51.0, 50.0, 52.0, 51.0]))
        +12.00 [9.40, 14.60], p = 6.8e-04, n = 4
    """
    if len(a) != len(b):
        raise ValueError(f"paired values belong to the same seeds, got {len(a)} and {len(b)}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies between 0 and 1, got {confidence}")
    _require_finite([*a, *b], 2)
    mean, std, n = summary([x - y for x, y in zip(a, b, strict=True)])
    if std == 0:
        return Paired(mean, std, mean, mean, float(mean == 0), n)
    special, error = _scipy_special(), std / math.sqrt(n)
    reach = error * float(special.stdtrit(n - 1, (1 + confidence) / 2))
    p = 2 * float(special.stdtr(n - 1, -abs(mean) / error))
    return Paired(mean, std, mean - reach, mean + reach, p, n)


def _require_finite(values: Sequence[float], least: int) -> None:
    if len(values) < least or not all(map(math.isfinite, values)):
        raise ValueError(f"statistics need at least {least} finite values, got {list(values)}")


def _scipy_special() -> Any:
    try:
        from scipy import special
    except ModuleNotFoundError:
        raise ImportError(
            'this needs scipy, which is not installed. Run: pip install "grapnet[studies]"',
            name="scipy",
        ) from None
    return special
