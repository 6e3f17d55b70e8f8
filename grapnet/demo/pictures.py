"""The pictures of the demonstration, as files in a light theme and for the report in both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from grapnet import plot

from .heads import TASKS
from .story import Story


class Picture(NamedTuple):
    """A picture for a light and for a dark page, as PNG."""

    light: bytes
    dark: bytes


def draw(story: Story, folder: Path) -> dict[str, Picture]:
    """Writes the PNG files and returns every picture by its name."""
    before_sift = story.net.history[-1].version - 1
    drawings: dict[str, Callable[[], Any]] = {
        "graph": lambda: plot.graph(story.net, cut_since=before_sift),
        "timeline": lambda: plot.timeline(story.net, story.scores),
        "accuracy_matrix": lambda: plot.accuracy_matrix(story.matrix, tasks=[", ".join(map(str, t)) for t in TASKS]),
    }
    found = {}
    for name, drawing in drawings.items():
        made = []
        for theme in ("dark", "light"):  # the light one stays as the file
            with plot.theme(theme):
                made.append(plot.save(drawing(), folder / f"{name}.png").read_bytes())
        found[name] = Picture(dark=made[0], light=made[1])
    return found
