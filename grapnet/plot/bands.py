"""The bands between the boxes of two neighbouring layers, and their numbers where there is room for
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .canvas import cut_color, ground, ink
from .colors import NOBODY, is_dark
from .fitted import LETTER, LINE, inches, whenever_drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

THINNEST = 0.003
PLACES = (0.5, 0.35, 0.65, 0.25, 0.75, 0.15, 0.85, 0.42, 0.58)  # along a band, tried in this order
NUMBER = 7.0  # points


@dataclass(frozen=True)
class Band:
    """All relations between two groups; `marked` is None where nothing is to stand out."""

    upper: int
    lower: int
    count: int
    frozen: int
    cut: int
    marked: int | None

    @property
    def text(self) -> str:
        """What stands on it."""
        whole = f"{self.count:,}" if not self.marked else f"{self.marked:,} of {self.count:,}"
        parts = [whole] * (self.count > 0) + [f"{self.cut:,} cut"] * (self.cut > 0)
        return ", ".join(parts)


@dataclass(frozen=True)
class Ends:
    """The side of a column of boxes that bands start or end at."""

    x: float
    boxes: Sequence[tuple[float, float]]
    colors: Sequence[str]


def draw_bands(ax: "Axes", bands: Sequence[Band], start: Ends, end: Ends) -> None:
    """Draws every band, wide as its relations are many, and writes its number where that covers no
    other.
    """
    if not bands:
        return
    scale = _scale(bands, start, end)
    left = _stack(bands, scale, start, [band.upper for band in bands])
    right = _stack(bands, scale, end, [band.lower for band in bands])
    curves = []
    for band, y, z in zip(bands, left, right, strict=True):
        wide, color = max(band.count * scale, THINNEST), _color(band, start, end)
        faded = 0.12 if band.marked == 0 else 0.65 if is_dark(ground(ax)) else 0.5
        free = wide * (1 - band.frozen / max(band.count, 1))
        if band.count:
            gid = f"band {band.upper}-{band.lower}: {band.count}"
            _fill(
                ax,
                (start.x, y, end.x, z),
                wide,
                gid=gid,
                facecolor=color,
                alpha=faded,
                linewidth=0,
                zorder=1,
            )
        if band.frozen:
            lower = (start.x, y - free / 2, end.x, z - free / 2)
            style = {
                "facecolor": "none",
                "edgecolor": ink(ax),
                "hatch": "/////",
                "linewidth": 0,
                "alpha": faded,
            }
            _fill(ax, lower, wide - free, gid=f"frozen {band.frozen}", zorder=1.5, **style)
        if band.cut:
            _draw_cut(ax, band, _curve(start.x, y, end.x, z), wide)
        curves.append(_curve(start.x, y, end.x, z))
    paper = {
        "facecolor": ground(ax),
        "alpha": 0.75,
        "edgecolor": "none",
        "boxstyle": "round,pad=0.15",
    }
    style = {
        "ha": "center",
        "va": "center",
        "fontsize": NUMBER,
        "zorder": 5,
        "bbox": paper,
        "in_layout": False,
    }
    texts = [
        ax.text(0, 0, "", color=ink(ax) if band.count else cut_color(ax), **style) for band in bands
    ]
    whenever_drawn(ax, partial(_write, ax, bands, curves, texts))


def _scale(bands: Sequence[Band], start: Ends, end: Ends) -> float:
    """Returns the width of one relation, such that the bands of no box are wider than it."""
    limits = []
    for side, place in ((start, "upper"), (end, "lower")):
        for n, (low, high) in enumerate(side.boxes):
            total = sum(band.count for band in bands if getattr(band, place) == n)
            limits += [(high - low) * 0.94 / total] if total else []
    return min(limits, default=1.0)


def _stack(bands: Sequence[Band], scale: float, side: Ends, boxes: Sequence[int]) -> list[float]:
    """Returns the height of every band's middle where it meets its box; those of a box lie below
    each other.
    """
    wide = [max(band.count * scale, THINNEST) for band in bands]
    found = [0.0] * len(bands)
    for n, (low, high) in enumerate(side.boxes):
        mine = [k for k in range(len(bands)) if boxes[k] == n]
        y = (low + high + sum(wide[k] for k in mine)) / 2
        for k in mine:
            found[k] = y - wide[k] / 2
            y -= wide[k]
    return found


def _curve(x: float, y: float, end: float, z: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns a line that leaves and arrives level."""
    along = np.linspace(0, 1, 41)
    return x + (end - x) * along, y + (z - y) * (3 * along**2 - 2 * along**3)


def _fill(ax: "Axes", ends: tuple[float, float, float, float], wide: float, **style: Any) -> None:
    x, middle = _curve(*ends)
    drawn = ax.fill_between(x, middle - wide / 2, middle + wide / 2)
    drawn.set(**style)


def _draw_cut(ax: "Axes", band: Band, curve: tuple[np.ndarray, np.ndarray], wide: float) -> None:
    """Draws the dotted line of a cut where red is seen: in a lane of ground through a band, or
    below a thin one.
    """
    point = inches(ax)[1] / 72
    if band.count and wide >= 9 * point:
        ax.plot(*curve, color=ground(ax), linewidth=3.4, zorder=2)
    elif band.count:
        curve = curve[0], curve[1] - wide / 2 - 2 * point
    ax.plot(
        *curve, color=cut_color(ax), linestyle=":", linewidth=1.5, zorder=2.1, gid=f"cut {band.cut}"
    )


def _color(band: Band, start: Ends, end: Ends) -> str:
    first, last = start.colors[band.upper], end.colors[band.lower]
    return last if first == NOBODY else first


def _write(
    ax: "Axes",
    bands: Sequence[Band],
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
    texts: Sequence["Text"],
    _: Any,
) -> None:
    """Writes the numbers, those of the most relations first, each where it covers none of those
    before.
    """
    letter, line = (
        inch * NUMBER * size for inch, size in zip(inches(ax), (LETTER, LINE), strict=True)
    )
    taken: list[tuple[float, float, float]] = []
    for k in sorted(range(len(bands)), key=lambda k: -(bands[k].count + bands[k].cut)):
        half = letter * len(bands[k].text) / 2
        texts[k].set_text("")
        for share in PLACES:
            n = round(share * (len(curves[k][0]) - 1))
            x, y = float(curves[k][0][n]), float(curves[k][1][n])
            inside = curves[k][0][0] + half < x < curves[k][0][-1] - half
            if inside and all(abs(x - u) > half + w or abs(y - v) > line for u, v, w in taken):
                taken.append((x, y, half))
                texts[k].set(text=bands[k].text, position=(x, y))
                break
