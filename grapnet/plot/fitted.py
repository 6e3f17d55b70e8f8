"""Texts that fit into their room: how much that is, is known when a figure is drawn, after its
layout.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from grapnet.integrations.extra import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

# inches that a letter is wide and a line high, for every point of its size
LETTER, LINE = (
    0.0088,
    0.02,
)
Settle = Callable[[Any], None]  # is given the renderer, None where nothing is drawn yet


def inches(ax: "Axes") -> tuple[float, float]:
    """Returns what an inch is in the units of either axis; axes are at least a pixel wide and
    high.
    """
    room, dpi = ax.get_window_extent(), ax.figure.dpi
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    return abs(right - left) * dpi / max(room.width, 1), abs(high - low) * dpi / max(room.height, 1)


def whenever_drawn(ax: "Axes", settle: Settle) -> None:
    """Calls `settle` at once, and each time before anything in these axes is drawn.

    What it settles takes no part in the layout, which would else change with the axes that it
    makes.
    """
    settle(None)
    watch = _watch()
    watch.settle = settle
    ax.add_artist(watch)


def fit(
    ax: "Axes",
    texts: Sequence["Text"],
    wide: float,
    high: float,
    *,
    least: float = 5.0,
    shorter: str = "",
) -> None:
    """Writes texts in one size, at most their own, such that none is larger than so many units of
    the axes.

    Where that is less than `least` points, each of them is the `shorter` text, or empty where that
    does not fit either.
    """
    if texts:
        forms = [[text.get_text() for text in texts], [shorter] * len(texts), [""] * len(texts)]
        for text in texts:
            text.set_in_layout(False)  # they lie inside of the axes
        whenever_drawn(
            ax,
            partial(_settle, ax, texts, forms, (wide, high), float(texts[0].get_fontsize()), least),
        )


def _settle(
    ax: "Axes",
    texts: Sequence["Text"],
    forms: Sequence[Sequence[str]],
    room: tuple[float, float],
    largest: float,
    least: float,
    renderer: Any,
) -> None:
    if renderer is None:
        return
    # pixels
    wide, high = (
        units / inch * ax.figure.dpi for units, inch in zip(room, inches(ax), strict=True)
    )
    for form in forms:
        size = largest
        while size >= least:
            share = 1.0
            for text, words in zip(texts, form, strict=True):
                text.set(text=words, fontsize=size)
                found = text.get_window_extent(renderer)
                share = min(share, wide / max(found.width, 1e-9), high / max(found.height, 1e-9))
            if share == 1:
                return
            # letters are set on whole pixels: small ones are wider than their size says
            size *= 0.99 * share


def _watch() -> Any:
    """Returns an artist that is never seen; figures that hold one can be copied and pickled."""
    return _watch_class()()


@cache
def _watch_class() -> type:
    class Watch(require("matplotlib.artist", "plot").Artist):
        """Calls `settle` in place of being drawn."""

        settle: Settle

        def __init__(self) -> None:
            super().__init__()
            self.set(zorder=-1e6, in_layout=False)

        def draw(self, renderer: Any) -> None:
            self.settle(renderer)

        def __reduce__(self) -> tuple[Any, ...]:
            return _watch, (), self.__getstate__()

    return Watch
