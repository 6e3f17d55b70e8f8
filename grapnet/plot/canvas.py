"""Where pictures are drawn: axes of a figure that belongs to nobody, in a light or a dark theme,
and their files.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grapnet._atomic import atomic_write
from grapnet.integrations.extra import require

from .colors import CUT, CUT_ON_DARK, is_dark

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, FigureBase

PICTURES = (".png", ".svg", ".pdf")
# grounds; everything else is drawn to be read on its ground
THEMES = {
    "light": "#ffffff",
    "dark": "#14171c",
}
DARK_INK, LIGHT_INK = "#1f2328", "#e6e8eb"


def theme(name: str) -> AbstractContextManager[Any]:
    """Gives the figures that are made inside its block a "light" or a "dark" ground.

    Examples:
        >>> import grapnet as gn
        >>> from grapnet import plot
        >>> with plot.theme("dark"):
        ...     axes = plot.graph(gn.GrapNet([4, 3, 2]))
    """
    if name not in THEMES:
        raise ValueError(f"a theme is {' or '.join(THEMES)}, got {name!r}")
    ground = THEMES[name]
    settings = {"figure.facecolor": ground, "axes.facecolor": ground, "savefig.facecolor": "auto"}
    return require("matplotlib", "plot").rc_context(settings)


def save(drawn: "Axes | FigureBase", path: Path | str, *, dpi: int = 150) -> Path:
    """Writes a picture, whole or not at all, and returns where; texts of an SVG stay texts.

    Args:
        drawn: axes that a function of this module returned, or their figure; of a subfigure, all of
            its figure is written.
        path: a name that ends in .png, .svg or .pdf.
        dpi: dots per inch of a PNG.

    Raises:
        ValueError: the name ends otherwise; nothing was written.
    """
    path = Path(path)
    if path.suffix.lower() not in PICTURES:
        raise ValueError(
            f"{path} is no picture that can be written: its name must end in {', '.join(PICTURES)}"
        )
    kind = path.suffix.lower().removeprefix(".")
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    texts = require("matplotlib", "plot").rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "grapnet"}
    )
    how = {
        "dpi": dpi,
        "bbox_inches": "tight",
        "bbox_extra_artists": _seen(_root(drawn)),
        "pad_inches": 0.12,
    }
    with texts, atomic_write(path) as partial:
        _root(drawn).savefig(partial, format=kind, metadata=undated, **how)
    return path


def axes_for(ax: "Axes | None", width: float, height: float) -> "Axes":
    """Returns `ax`, or the axes of a figure of its own, of so many inches; raises TypeError for
    several.
    """
    if ax is not None:
        if not isinstance(ax, require("matplotlib.axes", "plot").Axes):
            raise TypeError(
                "ax= is one Axes, such as axes[0, 0] of plt.subplots(2, 2), got"
                f" {type(ax).__name__}"
            )
        return ax
    figure = require("matplotlib.figure", "plot").Figure(
        figsize=(width, height), layout="constrained"
    )
    return figure.subplots()


def ground(ax: "Axes") -> str:
    """Returns the colour behind what is drawn: of the axes, and where they let it through of what
    they lie in.
    """
    to_hex = require("matplotlib.colors", "plot").to_hex
    color = np.ones(3)
    for part in (*_down_to(ax.figure, _root(ax)), ax):
        *face, opacity = np.array(part.get_facecolor(), float)
        color = opacity * np.array(face) + (1 - opacity) * color
    return to_hex(color)


def _root(drawn: "Axes | FigureBase") -> "Figure":
    """Returns the figure in which axes, or a figure of a figure, lie in the end."""
    return drawn.figure.figure  # of axes first what they lie in; that of a figure is itself


def _seen(figure: "Figure") -> list[Any]:
    """Returns what a picture must be large enough for: what the layout knows, and texts and legends
    besides.
    """
    beside = [
        part for ax in figure.axes for part in (*ax.texts, ax.get_legend()) if part is not None
    ]
    return [*figure.get_default_bbox_extra_artists(), *beside]


def _down_to(part: "FigureBase", figure: "FigureBase") -> "list[FigureBase]":
    """Returns the figures from one to a part of it, each inside of the one before it; none where it
    is no part.
    """
    if part is figure:
        return [figure]
    inside = next((found for one in figure.subfigs if (found := _down_to(part, one))), [])
    return [figure, *inside] if inside else []


def ink(ax: "Axes") -> str:
    """Returns the colour of texts and lines that is read on the ground of these axes."""
    return LIGHT_INK if is_dark(ground(ax)) else DARK_INK


def cut_color(ax: "Axes") -> str:
    """Returns the red of what was cut that is seen on the ground of these axes."""
    return CUT_ON_DARK if is_dark(ground(ax)) else CUT


def dress(
    ax: "Axes", title: str = "", x: str = "", y: str = "", *, pad: float | None = None
) -> None:
    """Titles and labels axes in a colour that is read on their ground; `pad` points lie below the
    title.
    """
    color = ink(ax)
    _set_title(ax, title, pad)
    ax.set_xlabel(x, color=color)
    ax.set_ylabel(y, color=color)
    ax.tick_params(which="both", colors=color)
    for side, spine in ax.spines.items():
        spine.set_color(color)
        spine.set_visible(side in ("left", "bottom"))


def whole_numbers(axis: "Axis", most: int = 9) -> None:
    """Gives an axis at most so many ticks, at whole numbers."""
    locator = require("matplotlib.ticker", "plot").MaxNLocator(
        nbins=most, integer=True, min_n_ticks=1
    )
    axis.set_major_locator(locator)
    axis.set_major_formatter(counted)


def counted(value: float, _: float | None = None) -> str:
    """Returns what a tick of an axis that counts is called, nothing between two whole numbers."""
    return f"{round(value):,}" if value == round(value) else ""


def legend(
    ax: "Axes", entries: Iterable[tuple[str, Any]], *, above: bool = False, columns: int = 4
) -> None:
    """Puts a legend below the axes or between them and their title; of too many entries it says how
    many.
    """
    entries = list(entries)
    if not entries:
        return
    names, handles = [shortened(name, 30) for name, _ in entries], [handle for _, handle in entries]
    room = ax.get_window_extent()
    columns = _fitting(names, min(columns, len(names)), room.width / ax.figure.dpi)
    # of a low picture no more than is left of it
    lines = max(2, int(0.4 * room.height / ax.figure.dpi / 0.19))
    most = columns * min(lines, 4 if columns > 1 else 7)
    if len(names) > most:
        names[most - 1 :] = [f"… and {len(names) - most + 1} more"]
        handles[most - 1 :] = [require("matplotlib.patches", "plot").Patch(alpha=0)]
    drawn = ax.legend(
        handles,
        names,
        loc="lower left" if above else "upper center",
        bbox_to_anchor=(0.0, 1.0) if above else (0.5, 0.0),
        borderaxespad=0.3,
        ncols=columns,
        fontsize=8,
        labelcolor=ink(ax),
        frameon=False,
        handletextpad=0.5,
        columnspacing=1.4,
    )
    drawn.set_in_layout(False)  # one wider than its axes would make them narrower at every drawing
    if above:
        _set_title(ax, ax.get_title("left"), pad=10.0 + 13.5 * -(-len(names) // columns))
    else:
        _keep_free_below(ax, 72 * drawn.get_window_extent().height / ax.figure.dpi + 0.3 * 8)


def _keep_free_below(ax: "Axes", points: float) -> None:
    """Makes layouts leave so much room below axes, whatever their width."""
    boxes = require("matplotlib.offsetbox", "plot")
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "bbox_transform": ax.transAxes}
    empty = boxes.DrawingArea(1, points)
    ax.add_artist(boxes.AnchoredOffsetbox(child=empty, pad=0, borderpad=0, frameon=False, **place))


def _set_title(ax: "Axes", title: str, pad: float | None = None) -> None:
    """Titles axes, in smaller letters where it would else be wider than they are, and with fewer
    below 6.5 points.

    A layout keeps the middle of a title above its axes: one of twice their width would make them
        ever narrower.
    """
    # inches: layouts leave axes more than they begin with
    wide = 1.2 * ax.get_window_extent().width / ax.figure.dpi
    fits = 72 * wide / (0.56 * max(len(title), 1))  # points
    title = shortened(title, max(8, int(len(title) * fits / 6.5)))
    ax.set_title(title, loc="left", color=ink(ax), fontsize=min(10.5, max(fits, 6.5)), pad=pad)


def _fitting(names: Sequence[str], most: int, wide: float) -> int:
    """Returns into how many columns, filled one after the other, names fit that have so many
    inches.
    """
    for columns in range(most, 1, -1):
        longest = [max(map(len, part)) for part in np.array_split(names, columns)]
        if 0.064 * sum(longest) + 0.43 * columns <= wide:
            return columns
    return 1


def shortened(name: str, most: int) -> str:
    """Returns a name on one line of at most so many characters, with its start and its end; `$`
    starts no formula.

    Examples:
        >>> shortened("experiment of May, task 3", 16)
        'experiment…ask 3'
    """
    name = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    end = most // 3
    name = name if len(name) <= most else f"{name[: most - 1 - end]}…{name[-end:]}"
    return name.replace("$", r"\$")
