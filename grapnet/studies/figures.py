"""What a published figure is, and how ours is found in the numbers of a seed."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Numbers = dict[str, Any]  # of one seed, or the whole result of a study that has no seeds


@dataclass(frozen=True)
class Figure:
    """One number of the paper.

    Attributes:
        name: what it measures.
        paper: what is printed.
        ours: finds it in the numbers of a seed.
        std: that is printed beside it: the published interval is then one standard deviation to
            either side.
        interval: that is printed beside it, of 95 % confidence.
        p: that is printed beside a difference, of a paired t-test.
        exact: whether it is a count or a zero, which has to come out the same.
        largest: whether it is a rounding error: ours is the largest over the seeds and has to be no
            larger.
        population: whether the printed deviation divides by the number of seeds; ours then does so
            too.
        digits: that are printed after the point.
    """

    name: str
    paper: float
    ours: Callable[[Numbers], float]
    std: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    exact: bool = False
    largest: bool = False
    population: bool = False
    digits: int = 2

    @property
    def published(self) -> tuple[float, float] | None:
        """Between which numbers ours has to lie to agree with the paper; None where it prints no
        interval.
        """
        if self.interval is not None:
            return self.interval
        if self.std is not None:
            return self.paper - self.std, self.paper + self.std
        if self.exact:
            return self.paper, self.paper
        return (0.0, self.paper) if self.largest else None


@dataclass(frozen=True)
class Artefact:
    """One table or audit of the paper: its title, in plain words what it asks, and its figures."""

    title: str
    words: str
    figures: tuple[Figure, ...]


def at(*path: str | int) -> Callable[[Numbers], float]:
    """Returns what reads the number that lies there; the mean where a list lies there."""

    def read(numbers: Numbers) -> float:
        found: Any = numbers
        for key in path:
            found = found[key]
        return fmean(found) if isinstance(found, list) else float(found)

    return read


def minus(
    one: Callable[[Numbers], float], other: Callable[[Numbers], float]
) -> Callable[[Numbers], float]:
    """Returns what reads a difference."""
    return lambda numbers: one(numbers) - other(numbers)
