"""When rules are due, and when recorders must watch for them."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from grapnet.rules import At, Every, EveryTask

SCHEDULES = {
    "every step": (Every(1), list(range(40))),
    "every third": (Every(3), list(range(0, 40, 3))),
    "late": (Every(7, start=5), [5, 12, 19, 26, 33]),
    "until, included": (Every(7, start=5, until=19), [5, 12, 19]),
    "until, between": (Every(7, start=5, until=18), [5, 12]),
    "never": (Every(2, start=9, until=8), []),
    "given steps": (At(4, 30, 9), [4, 9, 30]),
    "a range": (At(range(0, 40, 10)), [0, 10, 20, 30]),
    "numbers of numpy": (At(np.int64(3), np.array([5, 3])), [3, 5]),
    "no steps": (At(), []),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_due_at_its_steps(name: str) -> None:
    schedule, steps = SCHEDULES[name]
    assert [step for step in range(40) if schedule.is_due(step, None)] == steps
    assert [step for step in range(40) if schedule.is_due(step, "a task")] == steps


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_may_be_due_exactly_when_a_step_lies_between(name: str) -> None:
    schedule, steps = SCHEDULES[name]
    for first in range(-3, 30):
        for last in range(first - 1, 36):
            assert schedule.may_be_due(first, last) == any(
                first <= step <= last for step in steps
            ), (first, last)


def test_every_task_is_due_when_a_task_is_told_between_start_and_until() -> None:
    schedule = EveryTask(start=3, until=6)
    for task in ("a", 0):  # task 0 is a task
        assert [step for step in range(10) if schedule.is_due(step, task)] == [3, 4, 5, 6]
    assert not any(schedule.is_due(step, None) for step in range(10))
    assert schedule.may_be_due(0, 3)
    assert schedule.may_be_due(6, 9)
    assert not schedule.may_be_due(0, 2)
    assert not schedule.may_be_due(7, 9)
    assert EveryTask().may_be_due(10**6, 10**6)


@pytest.mark.parametrize("schedule", [Every(3, until=9), At(1, 2), EveryTask(2)])
def test_a_schedule_is_data(schedule: Any) -> None:
    assert dataclasses.is_dataclass(schedule)
    assert schedule == type(schedule)(*dataclasses.asdict(schedule).values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.steps = 2
    with pytest.raises(ValueError, match="0"):
        Every(0)
