"""Schedules: at which steps a rule is due."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class Schedule(Protocol):
    """When a rule is due; a frozen dataclass whose fields a checkpoint can hold."""

    def is_due(self, step: int, task: Any) -> bool:
        """Says whether the rule is to run at this step; `task` is what `RuleManager.apply` was told, or None."""
        ...

    def may_be_due(self, first: int, last: int) -> bool:
        """Says whether the rule could be due at a step from first to last: recorders are armed while it could."""
        ...


@dataclass(frozen=True)
class Every:
    """Every `steps` steps: at start, start + steps, …, up to and including `until`."""

    steps: int
    start: int = 0
    until: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"a rule runs every 1 or more steps, got {self.steps!r}")

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
    """At given steps."""

    steps: tuple[int, ...]

    def __init__(self, *steps: int | Iterable[int]) -> None:
        flat = [int(s) for given in steps for s in ((given,) if isinstance(given, int) else given)]
        object.__setattr__(self, "steps", tuple(sorted(set(flat))))

    def is_due(self, step: int, task: Any) -> bool:
        """Says whether the rule is to run at this step."""
        return step in self.steps

    def may_be_due(self, first: int, last: int) -> bool:
        """Says whether one of its steps lies between."""
        return any(first <= step <= last for step in self.steps)


@dataclass(frozen=True)
class TaskEnds:
    """Whenever `RuleManager.apply` is told a task; recorders are armed all the time, since nobody knows when."""

    start: int = 0
    until: int | None = None

    def is_due(self, step: int, task: Any) -> bool:
        """Says whether a task was told."""
        return task is not None and self.may_be_due(step, step)

    def may_be_due(self, first: int, last: int) -> bool:
        """Says whether the steps overlap with those from start to until."""
        return last >= self.start and (self.until is None or first <= self.until)
