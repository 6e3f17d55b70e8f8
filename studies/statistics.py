"""Means with their spread, and paired comparisons over seeds."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scipy.stats import t as student
from scipy.stats import ttest_rel


class Summary(NamedTuple):
    """A mean, a standard deviation, and the number of values."""

    mean: float
    std: float
    n: int


class Paired(NamedTuple):
    """The differences of two methods: mean, deviation, 95 % interval, and p of a paired t-test."""

    mean: float
    std: float
    low: float
    high: float
    p: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:.2f}, {self.high:.2f}], p = {self.p:.1e}, n = {self.n}"


def summary(values: Sequence[float], *, population: bool = False) -> Summary:
    """Returns mean ± standard deviation; with `population` the squares are divided by n.

    Examples:
        >>> summary([60.0, 62.0, 67.0], population=True).mean
        63.0
    """
    deviation = statistics.pstdev if population else statistics.stdev
    return Summary(statistics.fmean(values), deviation(values), len(values))


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Compares two methods seed by seed: the differences a − b, with Student's interval and test.

    Where all differences are the same, the interval is that point, and p is 0, or 1 when they are
    0.

    Examples:
        >>> print(paired([63.0, 62.0, 66.0, 61.0], [51.0, 50.0, 52.0, 51.0]))
        +12.00 [9.40, 14.60], p = 6.8e-04, n = 4
    """
    mean, std, n = summary([x - y for x, y in zip(a, b, strict=True)])
    if std == 0:
        return Paired(mean, std, mean, mean, float(mean == 0), n)
    test = ttest_rel(a, b)
    interval = test.confidence_interval(0.95)
    return Paired(mean, std, float(interval.low), float(interval.high), float(test.pvalue), n)


def paired_splits(a: Sequence[float], b: Sequence[float], *, test: float) -> Paired:
    """Compares two methods over random splits of the same rows: `paired`, corrected for the rows
    that the splits share.

    The variance of the mean is that of the differences times 1/n + test/(1 - test) instead of 1/n
    (Nadeau and Bengio, "Inference for the generalization error", 2003), so that more splits of the
    same rows do not make an interval as narrow as more rows would.

    Args:
        a: results of one method, split by split.
        b: those of the other.
        test: the share of the rows that every split tests on.

    Examples:
        >>> print(paired_splits([63.0, 62.0, 66.0, 61.0], [51.0, 50.0, 52.0, 51.0], test=0.3))
        +12.00 [7.72, 16.28], p = 3.0e-03, n = 4
    """
    mean, std, n = summary([x - y for x, y in zip(a, b, strict=True)])
    if std == 0:
        return Paired(mean, std, mean, mean, float(mean == 0), n)
    error = std * (1 / n + test / (1 - test)) ** 0.5
    reach = float(student.ppf(0.975, n - 1)) * error
    p = 2 * float(student.sf(abs(mean) / error, n - 1))
    return Paired(mean, std, mean - reach, mean + reach, p, n)


def merged(trees: Sequence[Any], reduce: Callable[[list[float]], Any]) -> Any:
    """Returns one tree of dicts and lists in which every number is reduced over all trees.

    Examples:
        >>> merged([{"a": 1.0, "b": [2.0, 0.0]}, {"a": 3.0, "b": [1.0, 5.0]}], max)
        {'a': 3.0, 'b': [2.0, 5.0]}
    """
    first = trees[0]
    if isinstance(first, dict):
        return {key: merged([tree[key] for tree in trees], reduce) for key in first}
    if isinstance(first, list):
        return [merged(values, reduce) for values in zip(*trees, strict=True)]
    return reduce(list(trees))
