"""The forms in which studies draw what they found: rows of dots or bars, with whiskers and the
paper's intervals.

matplotlib is imported only when something is drawn; figures belong to nobody's global state and
need no screen.
"""

import argparse
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grapnet.integrations.extra import require
from grapnet.plot import PICTURES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[[dict[str, Any], "Axes"], object]  # draws the result of a study, as its JSON has it
Limits = tuple[float | None, float | None]  # None: where the values end

_INCHES = (5.5, 0.28)  # of the axes, whatever their labels need: width, and height of a line
_BLUE, _SKY, _ORANGE, _GREY = "#0072B2", "#56B4E9", "#D55E00", "#999999"  # Okabe and Ito's
# of different shapes and fills, for those who see no colours
_MARKS: tuple[dict[str, Any], ...] = (
    {"marker": "o", "markersize": 5, "color": "black", "markerfacecolor": "white"},
    {"marker": "^", "markersize": 5, "color": _ORANGE},
    {"marker": "s", "markersize": 4.5, "color": _SKY, "markeredgecolor": "black"},
    {"marker": "o", "markersize": 5.5, "color": _BLUE},
)
_CHOSEN = {1: (3,), 2: (0, 3), 3: (0, 1, 3), 4: (0, 1, 2, 3)}  # marks by number of series
_APART = {1: 0.0, 2: 0.28, 3: 0.25, 4: 0.2}  # of a line, between the series of a row


class Value(NamedTuple):
    """A number and the ends of its whisker or of its box; without ends it is known exactly, or
    once.
    """

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of a picture.

    Attributes:
        name: at its left.
        values: by series, which the legend names; a series that the row lacks is left out.
        paper: the published numbers, as strokes, in boxes where they have intervals.
        note: at its right.
    """

    name: str
    values: Mapping[str, Value]
    paper: Sequence[Value] = ()
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Rows below a heading, and vertical lines through them, which the legend names."""

    title: str
    rows: Sequence[Row]
    lines: Mapping[str, float] = field(default_factory=dict)


def spread(figure: Sequence[float]) -> Value:
    """Returns a mean with whiskers of one standard deviation.

    Examples:
        >>> spread([63.0, 2.5])
        Value(mean=63.0, low=60.5, high=65.5)
    """
    mean, std = figure
    return Value(mean, mean - std, mean + std)


def dots(
    axes: "Axes", groups: Sequence[Group], *, title: str, label: str, limits: Limits = (None, None)
) -> None:
    """Draws one mark a value, with its whisker, over the paper's strokes and boxes.

    Args:
        axes: to draw into.
        groups: from top to bottom; all rows share at most four series.
        title: what the study found, in a sentence.
        label: of the values.
        limits: of the axis; whiskers may leave them.
    """
    series = list(
        dict.fromkeys(name for group in groups for row in group.rows for name in row.values)
    )
    marks = dict(zip(series, (_MARKS[n] for n in _CHOSEN[len(series)]), strict=True))
    for y, row in _lines(axes, groups):
        _draw_paper(axes, y, row)
        for name, value in row.values.items():
            style, at = (
                marks[name],
                y + _APART[len(series)] * (series.index(name) - (len(series) - 1) / 2),
            )
            axes.plot([value.mean], [at], linestyle="none", label=name, zorder=3, **style)
            _draw_whisker(axes, at, value, style["color"])
    _finish(axes, title, label, limits)


def bars(
    axes: "Axes",
    groups: Sequence[Group],
    *,
    title: str,
    label: str,
    kinds: Sequence[str],
    limits: Limits = (None, None),
) -> None:
    """Draws one bar a row, with its whisker.

    Args:
        axes: to draw into.
        groups: from top to bottom; every row has one value, whose series is one of `kinds`.
        title: what the study found, in a sentence.
        label: of the values.
        kinds: at most three, each with a fill of its own.
        limits: of the axis.
    """
    fills: tuple[dict[str, Any], ...] = (
        {"color": _BLUE},
        {"color": _SKY},
        {"facecolor": "white", "edgecolor": _GREY, "hatch": "////"},
    )
    styles = dict(zip(kinds, fills, strict=False))
    for y, row in _lines(axes, groups):
        ((kind, value),) = row.values.items()
        axes.barh(y, value.mean, height=0.66, label=kind, zorder=1, **styles[kind])
        _draw_whisker(axes, y, value, "black")
        _draw_paper(axes, y, row)
    _finish(axes, title, label, limits)


def stream_bars(
    axes: "Axes",
    streams: Mapping[str, Mapping[str, Any]],
    *,
    title: str,
    lines: Mapping[str, Mapping[str, float]],
    papers: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> None:
    """Draws the seen-class accuracies of heads on streams as bars, and at their right what each
    stores.

    Args:
        axes: to draw into.
        streams: by heading, the rows as `stream_heads.compared` returns them; the first of each is
            ours.
        title: what the study found, in a sentence.
        lines: by heading, vertical lines by name.
        papers: by heading, published mean and standard deviation by row.
    """
    kinds, papers = ("our head", "stores no image", "stores images"), papers or {}
    groups = []
    for heading, found in streams.items():
        rows = []
        for number, (name, row) in enumerate(found.items()):
            kind = kinds[2] if row["images"] else kinds[min(number, 1)]
            score = row["seen_class"]
            published = papers.get(heading, {}).get(name)
            note = f"{score['mean']:.2f} ± {score['std']:.2f}  {_size(row['bytes'])}"
            note += f"  {row['images']:,} images" if row["images"] else ""
            value = {kind: spread((score["mean"], score["std"]))}
            rows.append(Row(name, value, [] if published is None else [spread(published)], note))
        groups.append(Group(heading, rows, lines.get(heading, {})))
    label = "seen-class accuracy in per cent, ± standard deviation, and bytes stored"
    bars(axes, groups, title=title, label=label, kinds=kinds, limits=(0, 100))


def shares(axes: "Axes") -> None:
    """Gives positive values a logarithmic axis with plain numbers on it."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def differences(axes: "Axes") -> None:
    """Gives rounding errors a logarithmic axis with an exact 0 at its left; called once they are
    drawn.
    """
    found = [float(x) for line in axes.get_lines() for x in line.get_xdata() if x > 0]  # pyright: ignore
    smallest, largest = (
        f"{value:e}".partition("e")[2]
        for value in (min(found, default=1e-16), max(found, default=1))
    )
    low, high = int(smallest), int(largest) + 1
    axes.set_xscale("symlog", linthresh=10.0**low, linscale=0.8)
    step = max(1, (high - low + 5) // 6)
    decades = list(range(high, low - 1, -step))[::-1]
    axes.set_xticks([0.0, *(10.0**n for n in decades)], ["0", *(f"1e{n}" for n in decades)])
    axes.set_xticks([], minor=True)
    axes.set_xlim(-0.3 * 10.0**low, 10.0**high)


def picture_path(text: str) -> Path:
    """Returns the path of a picture, as a type of argparse: it says at once what would fail when
    all seeds are done.
    """
    path = Path(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(
            f"{text} is no picture that can be written: end it in {', '.join(PICTURES)}"
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    try:
        require("matplotlib.figure", "studies")
    except ImportError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def drawn(draw: Draw, result: dict[str, Any]) -> "Figure":
    """Returns the picture of a result, as high as its lines need; that of a fast run says that it
    is one.
    """
    figure: Figure = require("matplotlib.figure", "studies").Figure()
    axes = figure.add_axes((0, 0, 1, 1))  # labels lie outside: `plot.save` makes room for them
    draw(result, axes)
    settings = result["settings"]
    if settings.get("fast") or "made-up" in settings.values():
        axes.set_title(
            f"{axes.get_title('left')}\nA fast run: no number here means anything.",
            loc="left",
            fontsize=10.5,
        )
    low, high = axes.get_ylim()
    figure.set_size_inches(_INCHES[0], max(1.0, _INCHES[1] * abs(high - low)))
    return figure


def _lines(axes: "Axes", groups: Sequence[Group]) -> Iterator[tuple[int, Row]]:
    """Yields every row with its line, counted from the top, and writes names, notes, headings and
    vertical lines.
    """
    names, y = {}, 0
    for group in groups:
        if group.title:
            axes.text(
                0.008,
                y,
                group.title,
                transform=axes.get_yaxis_transform(),
                va="center",
                weight="bold",
                zorder=4,
            )
            y += 1
        ends = y - 0.5, y + len(group.rows) - 0.5
        for (name, x), style in zip(group.lines.items(), ("--", ":", "-."), strict=False):
            axes.plot(
                [x, x], ends, linestyle=style, color="black", linewidth=1, label=name, zorder=2
            )
        for row in group.rows:
            names[y] = row.name
            axes.text(
                1.015, y, row.note, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5
            )
            yield y, row
            y += 1
    axes.set_yticks(list(names), list(names.values()))
    axes.set_ylim(y - 0.4, -0.6)


def _draw_whisker(axes: "Axes", y: float, value: Value, color: str) -> None:
    if value.low is not None and value.high is not None:
        axes.plot(
            [value.low, value.high],
            [y, y],
            color=color,
            linewidth=1.2,
            marker="|",
            markersize=4,
            zorder=2.5,
        )


def _draw_paper(axes: "Axes", y: float, row: Row) -> None:
    for one in row.paper:
        if one.low is not None and one.high is not None:
            axes.barh(
                y,
                one.high - one.low,
                left=one.low,
                height=0.8,
                color="black",
                alpha=0.2,
                zorder=1.5,
            )
        ends = [y - 0.4, y + 0.4]
        axes.plot(
            [one.mean] * 2,
            ends,
            color="black",
            linewidth=2,
            label="paper",
            zorder=2,
            solid_capstyle="butt",
        )


def _finish(axes: "Axes", title: str, label: str, limits: Limits) -> None:
    axes.set_title("\n".join(textwrap.wrap(title, 72)), loc="left", fontsize=10.5)
    axes.set_xlabel(label)
    if limits != (None, None):
        axes.set_xlim(*limits)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.85", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    named = {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    if named:  # below the label, however high the axes are
        below = {
            "loc": "upper left",
            "bbox_to_anchor": (0, 0),
            "borderaxespad": 4.2,
            "frameon": False,
        }
        axes.legend(list(named.values()), list(named), ncols=2, fontsize=9, **below)


def _size(count: int) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
