"""The picture of a comparison: published intervals and ours, one line a figure, as SVG that stands
in a page.
"""

import html
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grapnet.plot import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW, _WIDTH = 42, 360  # pixels: height of a line with its name above it, width of its scale


class Bar(NamedTuple):
    """One line: the published interval with its mean, and our interval with ours."""

    name: str
    paper: tuple[float, float, float]  # low, mean, high
    ours: tuple[float, float, float]
    agrees: bool


def picture(bars: Sequence[Bar]) -> str:
    """Returns the picture on one line of text; every line of it has its own scale.

    A box is the published interval, a stroke in it the paper's mean, a dot with whiskers our mean
    and its interval; the dot is hollow where our mean lies outside of the box.

    Examples:
        >>> picture([Bar("accuracy", (60.0, 63.0, 66.0), (59.0, 62.0, 65.0), True)]).count(
        ...     "<circle"
        ... )
        1
    """
    height = _ROW * len(bars)
    parts = [
        f'<svg viewBox="-5 0 {_WIDTH + 10} {height}" role="img" aria-label="published intervals and'
        ' ours">'
    ]
    for number, bar in enumerate(bars):
        parts += _line(bar, _ROW * number + 28)
    return "".join([*parts, "</svg>"])


def inline(figure: "Figure") -> str:
    """Returns a figure of matplotlib as one line of SVG that stands in a page, at least so wide
    that it can be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        save(figure, path)
        text = path.read_text(encoding="utf-8")
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    wide = float(text.partition(' width="')[2].partition("pt")[0])
    sized = f'<svg class="plot" style="min-width:{0.62 * wide:.0f}pt;max-width:{wide:.0f}pt" '
    return re.sub(r"\s*\n\s*", " ", text).replace("<svg ", sized, 1).strip()


def _line(bar: Bar, y: int) -> list[str]:
    low, high = min(bar.paper[0], bar.ours[0]), max(bar.paper[2], bar.ours[2])

    def x(value: float) -> str:
        return f"{_WIDTH * (value - low) / ((high - low) or 1.0):.1f}"

    box, mean, dot = (
        [x(value) for value in values] for values in (bar.paper, bar.paper[1:2], bar.ours)
    )
    width = f"{float(box[2]) - float(box[0]):.1f}"
    fill = "currentColor" if bar.agrees else "none"
    return [
        f'<text x="0" y="{y - 13}" fill="currentColor">{html.escape(bar.name)}</text>',
        (
            f'<rect x="{box[0]}" y="{y - 7}" width="{width}" height="14" fill="currentColor"'
            ' opacity="0.18"/>'
        ),
        f'<path d="M{mean[0]} {y - 7}v14M{dot[0]} {y}H{dot[2]}" stroke="currentColor"/>',
        f'<circle cx="{dot[1]}" cy="{y}" r="4" fill="{fill}" stroke="currentColor"/>',
    ]
