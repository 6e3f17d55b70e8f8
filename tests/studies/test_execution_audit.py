"""The execution audit runs on made-up images, finds equal answers, and would name what it
missed.
"""

import copy

import pytest

from studies import execution_audit

from .conftest import set_at


@pytest.fixture
def reached(result) -> dict:
    """A result with the times that a full run would have to reach."""
    result = copy.deepcopy(result)
    summary = result["summary"]
    for name in ("ER", "DER++"):
        summary["training"][name]["faster"]["family"] = 2.0
    summary["training"]["ER"]["over dense"] = {
        "stream": 1.15,
        "tasks": [1.3] * 5,
        "without growth": 1.0,
    }
    summary["snapshot"]["walk"] = 38.1
    summary["compiled"] = {"walk": 2.68, "reference": 2.0, "difference": 0.0}
    return result


def test_family_is_the_reference_before_and_after_cuts(result):
    assert not any(" the cuts in " in line for line in execution_audit.missed(result))
    summary = result["summary"]
    assert summary["relations"] == [13200, 13200 - 588 - 72]  # 5 % of 11,760 and of 1,440
    assert summary["families"] == [1, 5]
    exact = result["seeds"]["20"]["exact"]["float32"]
    assert min(exact["before"]["largest output"], exact["after"]["largest gradient"]) > 0.01


def test_what_runs_the_head_does_not_change_what_it_learns(result):
    for found in result["seeds"]["20"]["training"].values():
        scores = found["scores"]
        assert scores["family"] == scores["auto"] == scores["reference"]
        # twice what chance would get, so that something was learnt
        assert scores["reference"]["seen"] > 20
        assert scores["dense"] != scores["reference"]
        assert all(seconds > 0 for seconds in found["seconds"].values())
        assert len(found["over dense"]["tasks"]) == 5
        assert 0 < found["over dense"]["without growth"] < found["over dense"]["stream"]


def test_forward_passes_are_compared_with_what_they_replace(result):
    summary = result["summary"]
    assert summary["snapshot"]["families"] == 1
    assert summary["snapshot"]["difference"] < 1e-5
    assert summary["snapshot"]["walk"] > 1
    assert "missing" in summary["compiled"] or summary["compiled"]["difference"] < 1e-5


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("exact", "float32", "before", "forward share"), 5e-6, "forward before"),
        (("exact", "float64", "after", "gradient share"), float("nan"), "gradient after"),
        (("training", "DER++", "largest gap", "float64"), 0.01, "DER++: accuracy or forgetting"),
        (("training", "ER", "faster", "family"), 1.7, "ER: family is 1.70 times faster"),
        (("training", "ER", "over dense", "stream"), 1.16, "training time over dense: 1.16"),
        (("training", "ER", "over dense", "tasks", 3), 1.31, "training time over dense: 1.31"),
        (("snapshot", "walk"), 38.0, "snapshot"),
        (("compiled", "walk"), 2.6, "compiled"),
    ],
)
def test_each_missed_bar_is_named(reached, place, value, named):
    assert execution_audit.missed(reached) == []
    set_at(reached["summary"], place, value)
    (line,) = execution_audit.missed(reached)
    assert line.startswith(named)
