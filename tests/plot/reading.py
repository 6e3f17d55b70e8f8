"""Reads pictures as eyes do: which texts they show, and which of them lie on each other."""

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg


def texts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


def words(ax: Any) -> str:
    """Returns the title on one line."""
    return " ".join(ax.get_title().split())


def overlaps(ax: Any) -> list[tuple[str, str]]:
    """Returns the pairs of level texts that lie on each other, once the figure is drawn."""
    renderer = FigureCanvasAgg(ax.figure).get_renderer()
    ax.figure.draw(renderer)
    shown = [*ax.texts, ax.title, *(ax.get_legend().get_texts() if ax.get_legend() else [])]
    if ax.axison:
        shown += [ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels(), *ax.get_yticklabels()]
    level = [text for text in shown if text.get_text() and text.get_rotation() in (0, 90)]
    rooms = [(text.get_text(), text.get_window_extent(renderer)) for text in level]
    return [
        (a, b)
        for n, (a, room) in enumerate(rooms)
        for b, other in rooms[:n]
        if room.overlaps(other)
    ]
