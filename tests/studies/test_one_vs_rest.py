"""The one-vs-rest study forgets nothing where nodes are frozen, forgets elsewhere, and would name
what it missed.
"""

import copy

import pytest

from studies.one_vs_rest import FAST, ROWS, missed, summarise


@pytest.fixture
def good(result) -> dict:
    """The result as if a full run had come out at the paper's accuracies."""
    made = copy.deepcopy(result)
    for numbers in made["seeds"].values():
        numbers["frozen"]["accuracy"] = 87.19
        numbers["sequential"]["accuracy"] = 66.69
    made["summary"] = summarise(FAST, made["seeds"])
    return made


def test_frozen_nodes_neither_forget_nor_move_and_shared_ones_do_both(result):
    rows = result["summary"]["rows"]
    assert (rows["frozen"]["largest_forgetting"], rows["frozen"]["largest_drift"]) == (0, 0)
    assert rows["frozen"]["largest_change"] == 0
    assert rows["sequential"]["largest_forgetting"] > 5
    assert rows["momentum"]["largest_drift"] > 1e-3  # the measure sees coordinates that move
    assert rows["momentum"]["largest_forgetting"] > 5


def test_apart_without_freezing_is_as_good_as_frozen(result):
    rows = result["summary"]["rows"]
    assert (rows["unfrozen"]["largest_forgetting"], rows["unfrozen"]["largest_drift"]) == (0, 0)
    assert rows["unfrozen"]["accuracy"] == rows["frozen"]["accuracy"]
    assert rows["separate"]["largest_forgetting"] == 0


def test_parameters_are_counted(result):
    counts = {key: row["parameters"] for key, row in result["summary"]["rows"].items()}
    grown = 80 * (784 + 1 + 1) + 10
    shared = 784 * 64 + 64 + 64 * 10 + 10
    assert counts == {key: [shared if key in ("sequential", "renewed") else grown] for key in ROWS}


@pytest.mark.parametrize(
    ("key", "figure", "value", "named"),
    [
        ("frozen", "accuracy", 80.0, "frozen"),
        ("frozen", "accuracy", 94.0, "frozen"),
        ("sequential", "accuracy", 80.0, "sequential"),
        ("frozen", "forgetting", 1e-9, "forgetting"),
        ("frozen", "forgetting", -1e-9, "forgetting"),
        ("frozen", "largest_change", 1e-9, "change"),
        ("frozen", "drift", 1e-9, "drift"),
    ],
)
def test_each_missed_bar_is_named(good, key, figure, value, named):
    assert missed(good) == []
    good["seeds"]["21"][key][figure] = value
    good["summary"] = summarise(FAST, good["seeds"])
    (line,) = missed(good)
    assert line.startswith(named)
