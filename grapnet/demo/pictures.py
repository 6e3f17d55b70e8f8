"""The pictures of the demonstration: as files in a light theme, and for the report also dark and
narrow.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grapnet import plot
from grapnet.integrations.extra import require
from grapnet.page import Picture

from .heads import TASKS
from .story import Story

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NARROW = 4.3, 3.9  # inches: letters can be read where it fills the width of a telephone


def draw(story: Story, folder: Path) -> dict[str, Picture]:
    """Writes the PNG files and returns every picture by its name."""
    before_sift, tasks = (
        story.net.history[-1].version - 1,
        [", ".join(map(str, digits)) for digits in TASKS],
    )
    drawings: dict[str, Callable[[Axes | None], Axes]] = {
        "graph": lambda ax: plot.graph(story.net, cut_since=before_sift, ax=ax),
        "timeline": lambda ax: plot.timeline(story.net, story.scores, ax=ax),
        "accuracy_matrix": lambda ax: plot.accuracy_matrix(story.matrix, tasks=tasks, ax=ax),
    }
    found = {}
    for name, drawing in drawings.items():
        path = folder / f"{name}.png"
        narrow_light, narrow_dark, dark, light = (  # the last one stays as the file
            _png(drawing, path, theme, narrow=narrow)
            for theme, narrow in (
                ("light", True),
                ("dark", True),
                ("dark", False),
                ("light", False),
            )
        )
        found[name] = Picture(light, dark, narrow_light, narrow_dark)
    return found


def _png(
    drawing: "Callable[[Axes | None], Axes]", path: Path, theme: str, *, narrow: bool
) -> bytes:
    with plot.theme(theme):
        figure = (
            require("matplotlib.figure", "plot").Figure(NARROW, layout="constrained")
            if narrow
            else None
        )
        return plot.save(drawing(figure and figure.subplots()), path).read_bytes()
