"""The tabular study: the paper's counts on real rows, the same ones for the random control, and
misses are named.
"""

import copy

import pytest

from studies import tabular

COUNTS = {"Breast Cancer": ([[1536, 1184]], [[96, 64]]), "Wine": ([[504, 342]], [[54, 36]])}


@pytest.fixture
def reached(result) -> dict:
    """Returns the fast result with the accuracies of the paper."""
    full = copy.deepcopy(result)
    for name, one in full["summary"]["sets"].items():
        for row in ("none", "covariance"):
            one["rows"][row]["after"][0] = tabular.PAPER[f"{name}, {tabular.ROWS[row]}"] - 0.99
    assert tabular.missed(full) == []
    return full


@pytest.mark.parametrize("name", COUNTS)
def test_a_fast_run_removes_what_the_paper_removes(result, name):
    rows = result["summary"]["sets"][name]["rows"]
    assert list(rows) == list(tabular.ROWS)
    for row in ("covariance", "random"):
        assert (rows[row]["relations"], rows[row]["nodes"]) == COUNTS[name]
    whole = COUNTS[name][0][0][0]
    assert rows["none"]["relations"] == rows["renewed"]["relations"] == [[whole, whole]]


@pytest.mark.parametrize("name", COUNTS)
def test_every_row_is_the_same_run_up_to_the_edit(result, name):
    for numbers in result["seeds"].values():
        rows = [numbers[name][row] for row in tabular.ROWS]
        assert len({row["before"] for row in rows}) == 1
        assert rows[0]["edited"] == rows[0]["before"]
    assert (
        len(
            {
                numbers[name][row]["edited"]
                for numbers in result["seeds"].values()
                for row in tabular.ROWS
            }
        )
        > 2
    )


def test_further_splits_enter_the_differences_alone(result):
    numbers = copy.deepcopy(result["seeds"])
    for seed in numbers.values():
        for one in seed.values():
            for row, figures in one["further"].items():
                figures["after"] = [90.0 + (row == "covariance")]
                figures["edited"] = [80.0]
    settings = tabular.Settings(**{**result["settings"], "further": 1})
    found = tabular.summarise(settings, {int(seed): one for seed, one in numbers.items()})
    assert found["splits"] == 4
    for name, one in found["sets"].items():
        before = result["summary"]["sets"][name]
        pair, was = (part["contrasts"]["covariance − no edit"] for part in (one, before))
        assert pair["n"] == 4
        assert pair["mean"] == pytest.approx((was["mean"] + 1) / 2)
        assert list(one["rows"]["none"]["after"]) == before["rows"]["none"]["after"]


@pytest.mark.parametrize(
    ("name", "row", "what", "value", "named"),
    [
        ("Breast Cancer", "covariance", "relations", [[1536, 1183]], "353"),
        ("Breast Cancer", "random", "nodes", [[96, 64], [96, 65]], "32 of 96, 31"),
        ("Wine", "random", "relations", [[504, 504]], "removed 0"),
        ("Wine", "covariance", "after", [97.88, 1.0], "97.88"),
        ("Breast Cancer", "none", "after", [97.5, 1.0], "97.50"),
        ("Wine", "none", "after", [float("nan"), 1.0], "nan"),
    ],
)
def test_each_missed_bar_is_named(reached, name, row, what, value, named):
    reached["summary"]["sets"][name]["rows"][row][what] = value
    (line,) = tabular.missed(reached)
    assert line.startswith(name)
    assert named in line
