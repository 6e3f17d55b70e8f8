"""The published figures of the paper, read from `paper.toml`."""

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

Numbers = dict[str, Any]  # of one seed, or the whole result of a study without seeds


@dataclass(frozen=True)
class Figure:
    """One number of the paper; `paper.toml` explains the fields."""

    name: str
    paper: float
    ours: str
    minus: str | None = None
    times: float = 1.0
    std: float | None = None
    interval: Sequence[float] | None = None
    p: float | None = None
    exact: bool = False
    largest: bool = False
    population: bool = False
    digits: int = 2

    @property
    def published(self) -> tuple[float, float] | None:
        """The range in which ours agrees with the paper; None where the paper prints none."""
        if self.interval is not None:
            low, high = self.interval
            return low, high
        if self.std is not None:
            return self.paper - self.std, self.paper + self.std
        if self.exact:
            return self.paper, self.paper
        if self.largest:
            return 0.0, self.paper
        return None

    def measured(self, numbers: Numbers) -> float:
        """Returns our number of one seed: the mean, or the largest, of what lies at `ours`."""
        leaves = _leaves(numbers, self.ours.split("/"))
        if self.exact and len(set(leaves)) > 1:
            # A mean could hide counts that differ.
            raise ValueError(f"{self.ours} holds {sorted(set(leaves))}, not one number")
        if self.largest:
            return self.times * max(leaves)
        value = fmean(leaves)
        if self.minus is not None:
            value -= fmean(_leaves(numbers, self.minus.split("/")))
        return self.times * value


@dataclass(frozen=True)
class Artefact:
    """One table or audit of the paper: its title, what it asks, and its figures by name."""

    title: str
    words: str
    figures: Mapping[str, Figure]

    def __getitem__(self, name: str) -> float:
        """Returns a printed number."""
        return self.figures[name].paper


@functools.cache
def published(study: str) -> Artefact:
    """Returns what the paper prints about a study."""
    content = tomllib.loads(Path(__file__).with_name("paper.toml").read_text(encoding="utf-8"))
    found = content[study]
    figures = {}
    for name, fields in found.get("figures", {}).items():
        if isinstance(fields["paper"], int):
            fields.setdefault("digits", 0)
        figures[name] = Figure(name, **fields)
    return Artefact(found["title"], found["words"], figures)


def _leaves(found: Any, path: Sequence[str]) -> list[float]:
    """Returns all numbers at the end of a path."""
    if path:
        key, *rest = path
        if key == "*":
            inner = [_leaves(item, rest) for item in found.values()]
            return list(chain.from_iterable(inner))
        if isinstance(found, Sequence):
            return _leaves(found[int(key)], rest)
        return _leaves(found[key], rest)
    if isinstance(found, Sequence):
        return list(chain.from_iterable(_leaves(item, path) for item in found))
    return [found]
