"""Interrupts: an error at any line, or a signal, leaves all of before or all of after.

`python -m tools.interrupts` does the same by the ten thousand.
"""

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.core.injection import OPERATIONS, Task, spread
from tests.core.worlds import EDITS
from tools.interrupts import judge

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="every injection is a forked process"),
    pytest.mark.xdist_group("interrupts"),
]

VERBS = ["edit", "trial", "undo", "redo"]
# Gates run the model on tensors of torch without contents. An error at a line of torch in there may
# end the process ("trying to set the current FakeTensorMode, but one already exists"), so that
# these operations are interrupted at lines of the library alone.
WITH_GATES = [
    "edit an adopted model",
    "trial of an adopted model",
    "edit a model and a net together",
]


def every_kind() -> list[str]:
    """Returns the names of operations: every kind of edit with one verb, and all others."""
    names = [name for name in OPERATIONS if ":" not in name and name not in WITH_GATES]
    for number, kind in enumerate(EDITS):
        names.append(f"{VERBS[number % len(VERBS)]}: {kind}")
    return names


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    tasks = spread(180, 20, seed=0, names=every_kind(), rounds=1)
    # A commit and a trial are what users interrupt most.
    for verb in ("edit", "trial"):
        tasks.append(Task(f"{verb}: prune and grow", 1, {"lines": 40}))
    for name in WITH_GATES:
        tasks.append(Task(name, 1, {"lines": 10}))
    return judge([replace(task, calls=1) for task in tasks], jobs=2)


def test_an_error_anywhere_leaves_all_of_before_or_all_of_after(result: dict[str, Any]) -> None:
    assert result["injections"] >= 180
    assert result["failures"] == []
    assert set(result["verdicts"]) <= {"before", "after", "between"}


def test_errors_arrive_in_every_way_and_on_both_sides(result: dict[str, Any]) -> None:
    for way, verdicts in result["ways"].items():
        # a signal may come too late on a busy machine
        assert set(verdicts) - {"missed"} or "signal" in way or "timer" in way, way
    assert result["verdicts"]["before"] > 0
    assert result["verdicts"]["after"] > 0


def test_the_judge_tells_torn_worlds_from_clean_ones(result: dict[str, Any]) -> None:
    found = dict(result["controls"])
    assert found.pop("nothing") == "before"
    assert found.pop("all") == "after"
    assert found.pop("an open edit") == "stuck"
    assert found.pop("a trial in effect") == "stuck"
    assert set(found.values()) == {"torn"}
