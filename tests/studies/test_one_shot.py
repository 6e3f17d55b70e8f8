"""The study of pruning in one shot runs, undoes what it prunes, and would name what it missed."""

import copy

import pytest

from studies import one_shot

from .conftest import set_at


def test_a_fast_run_prunes_repairs_and_undoes(result):
    assert one_shot.missed(result) == []
    for numbers in result["seeds"].values():
        assert numbers["undone bit for bit"]
        half = numbers["nodes"]["0.5"]
        assert half["norm, repaired"] > half["norm"]
        assert half["elimination"] > half["random"]
        most = numbers["relations"]["0.8"]
        assert most["alternating"] > most["random"]
        assert most["obs, solved"] > most["random"]
        assert list(numbers["trained on"]) == ["share", *one_shot.TRAINED_ON]
    text = one_shot.table(result)
    assert "elimination" in text
    assert "wanda, repaired" in text
    assert "obs, solved" in text
    for name in one_shot.TRAINED_ON:
        assert f"| {name} |" in text


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("seeds", "1", "undone bit for bit"), False, "seed 1"),
        (("summary", "trained on", "alternating", "difference", "mean"), -0.6, "0.60"),
    ],
)
def test_a_missed_bar_is_named(result, place, value, named):
    changed = copy.deepcopy(result)
    set_at(changed, place, value)
    (line,) = one_shot.missed(changed)
    assert named in line


def test_a_criterion_that_loses_too_much_is_named(result):
    changed = copy.deepcopy(result)
    for one in changed["summary"]["nodes"]["0.5"].values():
        one["difference"]["mean"] = -5.0
    (line,) = one_shot.missed(changed)
    assert line.startswith("nodes")
