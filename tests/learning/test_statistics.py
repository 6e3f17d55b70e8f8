"""Paired comparisons and summaries, against scipy and numpy."""

import math
import sys

import numpy as np
import pytest
from scipy import stats

from grapnet.learning.statistics import Paired, Summary, paired, summary


@pytest.mark.parametrize("n", [2, 5, 10])
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_a_paired_comparison_is_scipys(n, confidence):
    draw = np.random.default_rng(n)
    a, b = draw.normal(63, 3, n).tolist(), draw.normal(60, 2, n).tolist()
    found, known = paired(a, b, confidence=confidence), stats.ttest_rel(a, b)
    interval = known.confidence_interval(confidence)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(known.pvalue)
    differences = np.subtract(a, b)
    assert (found.mean, found.std, found.n) == pytest.approx(
        (differences.mean(), differences.std(ddof=1), n)
    )
    assert stats.ttest_ind(a, b).pvalue != pytest.approx(found.p)  # the pairs matter
    back = paired(b, a, confidence=confidence)
    assert (back.low, back.high, back.p) == pytest.approx((-found.high, -found.low, found.p))


def test_small_p_values_do_not_become_zero():
    a = [50.0 + 0.001 * n for n in range(10)]
    b = [2.0 - 0.0007 * n * n for n in range(10)]
    assert 0 < paired(a, b).p < 1e-30
    assert paired(a, b).p == pytest.approx(stats.ttest_rel(a, b).pvalue)


def test_differences_that_are_all_the_same_need_no_test():
    assert paired([3.0, 4.0, 5.0], [1.0, 2.0, 3.0]) == Paired(2.0, 0.0, 2.0, 2.0, 0.0, 3)
    assert paired([3.0, 4.0], [3.0, 4.0]) == Paired(0.0, 0.0, 0.0, 0.0, 1.0, 2)


def test_a_summary_is_mean_and_standard_deviation():
    values = [96.2, 97.1, 95.0, 98.4]
    assert summary(values) == pytest.approx((np.mean(values), np.std(values, ddof=1), 4))
    assert summary(values, population=True) == pytest.approx((np.mean(values), np.std(values), 4))
    assert str(summary(values)) == f"{summary(values).mean:.2f} ± 1.44"
    assert summary([1.0], population=True) == Summary(1.0, 0.0, 1)


@pytest.mark.parametrize(
    ("a", "b", "named"),
    [
        ([1.0, 2.0], [1.0], "got 2 and 1"),
        ([1.0], [1.0], "at least 2"),
        ([1.0, math.nan], [1.0, 2.0], "finite"),
        ([1.0, 2.0], [1.0, math.inf], "finite"),
    ],
)
def test_values_that_cannot_be_compared_are_refused(a, b, named):
    with pytest.raises(ValueError, match=named):
        paired(a, b)


def test_other_mistakes_are_named():
    with pytest.raises(ValueError, match="confidence lies between 0 and 1, got 95"):
        paired([1.0, 2.0], [2.0, 4.0], confidence=95)
    with pytest.raises(ValueError, match="at least 2 finite"):
        summary([1.0])


def test_without_scipy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r'pip install "grapnet\[studies\]"'):
        paired([1.0, 2.0], [2.0, 4.0])
    assert summary([1.0, 2.0]).mean == 1.5
