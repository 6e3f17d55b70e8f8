"""Timing several things in turn, so that a noisy machine disturbs all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timed:
    """One thing to time: `before` and `after` run outside the clock."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


def interleaved(cases: Mapping[str, Timed], repeats: int) -> dict[str, float]:
    """Returns the median seconds of every case; the cases take turns, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats + 1):
        for name, case in cases.items():
            case.before()
            start = time.perf_counter()
            case.run()
            seconds[name].append(time.perf_counter() - start)
            case.after()
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}
