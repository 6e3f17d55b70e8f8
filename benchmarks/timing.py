"""Timing several things in turn, so that a noisy machine disturbs all of them alike."""

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import grapnet as gn


@dataclass(frozen=True)
class Timed:
    """One thing to time: `before` and `after` run outside the clock."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


def interleaved(cases: Mapping[str, Timed], repeats: int) -> dict[str, float]:
    """Returns the median seconds of every case; the cases take turns, after one round that is not
    counted.
    """
    return {name: statistics.median(times) for name, times in _rounds(cases, repeats).items()}


def times_faster(
    cases: Mapping[str, Callable[[], object]], than: str, *, repeats: int, seconds: float = 0.02
) -> dict[str, float]:
    """Returns how many times faster every case is than the one called `than`.

    The cases take turns, each for about `seconds` at a time; the answer is the median over the
    rounds of the ratio within a round.
    """
    timed = {name: Timed(_repeated(case, seconds)) for name, case in cases.items()}
    rounds = _rounds(timed, repeats)
    counts = {name: case.run.count for name, case in timed.items()}  # pyright: ignore[reportFunctionMemberAccess]
    base = [t / counts[than] for t in rounds[than]]
    return {
        name: statistics.median(b * counts[name] / t for b, t in zip(base, times, strict=True))
        for name, times in rounds.items()
    }


def versions() -> dict[str, str]:
    """Returns what a result was measured with."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "grapnet": gn.__version__,
    }


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Lets torch use this many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def finish() -> None:
    """Waits until the device has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rounds(cases: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats + 1):
        for name, case in cases.items():
            case.before()
            finish()
            start = time.perf_counter()
            case.run()
            finish()
            taken[name].append(time.perf_counter() - start)
            case.after()
    return {name: times[1:] for name, times in taken.items()}


class _repeated:
    """Calls a function as often as takes about `seconds`, found by two trial runs."""

    def __init__(self, function: Callable[[], object], seconds: float) -> None:
        self.function = function
        self.count = 1
        self()
        finish()
        start = time.perf_counter()
        self()
        finish()
        self.count = max(1, min(1000, round(seconds / (time.perf_counter() - start))))

    def __call__(self) -> None:
        for _ in range(self.count):
            self.function()
