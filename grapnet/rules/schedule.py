"""Schedules: at which steps a rule is due."""

import operator
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

_FARTHEST = 2**40  # steps


class Schedule(Protocol):
    """When a rule is due; a frozen dataclass whose fields a checkpoint can hold."""

    def is_due(self, step: int, task: Any) -> bool:
        """Says whether the rule is to run at this step; `task` is what `RuleManager.apply` was
        told, or None.
        """
        ...

    def may_be_due(self, first: int, last: int) -> bool:
        """Says whether the rule could be due at a step from first to last: recorders are armed
        while it could.
        """
        ...


@dataclass(frozen=True)
class Every:
    """Every `steps` steps: at start, start + steps, …, up to and including `until`.

    Examples:
        >>> schedule = Every(100, start=50, until=250)
        >>> [step for step in range(400) if schedule.is_due(step, None)]
        [50, 150, 250]
    """

    steps: int
    start: int = 0
    until: int | None = None

    def __post_init__(self) -> None:
        if not _is_whole(self.steps) or self.steps < 1:
            raise ValueError(f"a rule runs every 1 or more steps, got {self.steps!r}")
        _require_steps(self.start, self.until)

    def is_due(self, step: int, task: Any) -> bool:
        """Says whether the rule is to run at this step."""
        return self._inside(step) and (step - self.start) % self.steps == 0

    def may_be_due(self, first: int, last: int) -> bool:
        """Says whether one of its steps lies between."""
        following = max(first, self.start)
        following += (self.start - following) % self.steps
        return following <= last and self._inside(following)

    def _inside(self, step: int) -> bool:
        return step >= self.start and (self.until is None or step <= self.until)


@dataclass(frozen=True)
class At:
    """At given steps, one by one or from a list: `At(10, 50)`, `At(range(0, 1000, 100))`.

    Examples:
        >>> At(50, 10)
        At(steps=(10, 50))
    """

    steps: tuple[int, ...]

    def __init__(self, *steps: SupportsIndex | Iterable[SupportsIndex]) -> None:
        flat = {
            operator.index(s)
            for given in steps
            for s in (given if isinstance(given, Iterable) else (given,))
        }
        object.__setattr__(self, "steps", tuple(sorted(flat)))

    def is_due(self, step: int, task: Any) -> bool:
        """Says whether the rule is to run at this step."""
        return self.may_be_due(step, step)

    def may_be_due(self, first: int, last: int) -> bool:
        """Says whether one of its steps lies between."""
        place = bisect_left(self.steps, first)
        return place < len(self.steps) and self.steps[place] <= last


@dataclass(frozen=True)
class EveryTask:
    """Whenever `RuleManager.apply` is told a task, at steps from `start` to `until`.

    It is for rules that run before a task, as growth does, and for those that run after it, as
    freezing does: tell the manager the task at that moment. Recorders are armed all the time, since
    nobody knows when that will be.
    """

    start: int = 0
    until: int | None = None

    def __post_init__(self) -> None:
        _require_steps(self.start, self.until)

    def is_due(self, step: int, task: Any) -> bool:
        """Says whether a task was told."""
        return task is not None and self.may_be_due(step, step)

    def may_be_due(self, first: int, last: int) -> bool:
        """Says whether the steps overlap with those from start to until."""
        return last >= self.start and (self.until is None or first <= self.until)


def next_step(schedule: Schedule, step: int) -> int | None:
    """Returns the first step from `step` on at which a rule may be due, None when there is none
    that anyone reaches.

    Examples:
        >>> next_step(Every(100, start=50), 51), next_step(At(3), 4)
        (150, None)
    """
    reach = 1
    while not schedule.may_be_due(step, step + reach - 1):
        reach *= 2
        if reach > _FARTHEST:
            return None
    return (
        bisect_left(
            range(step, step + reach), True, key=lambda last: schedule.may_be_due(step, last)
        )
        + step
    )


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _require_steps(start: Any, until: Any) -> None:
    if not _is_whole(start) or not (until is None or _is_whole(until)):
        raise ValueError(
            f"start and until are numbers of steps, and until may be None; got {start!r} and"
            f" {until!r}"
        )
