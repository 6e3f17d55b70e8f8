"""The axes, colours, themes and files that all pictures share."""

import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grapnet._atomic import atomic_write
from grapnet.integrations._extra import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, FigureBase

PICTURES = (".png", ".svg", ".pdf")
THEMES = {"light": "#ffffff", "dark": "#14171c"}

# The colours of Okabe and Ito, which differ for every kind of colour vision. Grey takes the place
# of their black, which is not visible on a dark ground.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
NOBODY = "#8c8c8c"
# Owners beyond the seventh repeat a colour with another line, marker and hatch.
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")
HATCHES = ("", "..", "xx", "oo")
POSITIVE = "#7a68c0"
NEGATIVE = "#c97a16"

LETTER = 0.09  # inches that a letter of a title is wide
MOST_ENTRIES = 20  # of a legend


@dataclass(frozen=True)
class Look:
    """The appearance of one owner."""

    color: str = NOBODY
    line: str = LINES[0]
    marker: str = MARKERS[0]
    hatch: str = HATCHES[0]


def owner_looks(owners: Iterable[str | None]) -> dict[str | None, Look]:
    """Returns one look per owner, in order of appearance; None is grey."""
    looks: dict[str | None, Look] = {}
    number = 0
    for owner in dict.fromkeys(owners):
        if owner is None:
            looks[owner] = Look()
            continue
        round_, place = divmod(number, len(COLORS))
        style = round_ % len(LINES)
        looks[owner] = Look(COLORS[place], LINES[style], MARKERS[style], HATCHES[style])
        number += 1
    return looks


def owner_colors(owners: Iterable[str | None]) -> dict[str | None, str]:
    """Returns one colour per owner, in order of appearance; nodes without an owner are grey.

    The same owners in the same order always have the same colours. They repeat after seven;
    pictures then change the line, the marker or the hatch.

    Examples:
        >>> owner_colors(["task-1", None, "task-2", "task-1"])
        {'task-1': '#0072b2', None: '#8c8c8c', 'task-2': '#e69f00'}
    """
    return {owner: look.color for owner, look in owner_looks(owners).items()}


def is_dark(color: str) -> bool:
    """Returns whether light text reads better on a colour than dark text.

    Examples:
        >>> is_dark("#0072b2"), is_dark("#e69f00")
        (True, False)
    """
    red, green, blue = (int(color[n : n + 2], 16) / 255 for n in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.5


def readable_on(color: str) -> str:
    """Returns the colour of text on a coloured area."""
    if is_dark(color):
        return "white"
    return "black"


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
    settings = {
        "figure.facecolor": THEMES[name],
        "axes.facecolor": THEMES[name],
        "savefig.facecolor": "auto",
    }
    return require("matplotlib", "plot").rc_context(settings)


def save(drawn: "Axes | FigureBase", path: Path | str, *, dpi: int = 150) -> Path:
    """Writes a picture atomically and returns its path; texts of an SVG stay texts.

    Args:
        drawn: axes that a function of this module returned, or their figure; of a subfigure, the
            whole figure is written.
        path: a name that ends in .png, .svg or .pdf.
        dpi: dots per inch of a PNG.

    Raises:
        ValueError: the name ends otherwise; nothing was written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise ValueError(f"the name of a picture ends in {', '.join(PICTURES)}, got {path}")
    # Without dates, the same picture is the same file.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
    settings = {"svg.fonttype": "none", "svg.hashsalt": "grapnet"}
    with require("matplotlib", "plot").rc_context(settings), atomic_write(path) as partial:
        _root(drawn).savefig(
            partial,
            format=suffix[1:],
            dpi=dpi,
            metadata=metadata,
            bbox_inches="tight",
            pad_inches=0.12,
        )
    return path


def axes_for(ax: "Axes | None", width: float, height: float) -> "Axes":
    """Returns `ax`, or the axes of a new figure of this size in inches."""
    if ax is not None:
        return ax
    figure = require("matplotlib.figure", "plot").Figure((width, height), layout="constrained")
    return figure.subplots()


def ground(ax: "Axes") -> str:
    """Returns the colour behind the axes."""
    from matplotlib.colors import to_hex

    color: Any = ax.get_facecolor()
    if color[3] < 0.5:
        color = _root(ax).get_facecolor()
    return to_hex(color)


def ink(ax: "Axes") -> str:
    """Returns the colour of texts and lines on the ground of these axes."""
    if is_dark(ground(ax)):
        return "#e6e8eb"
    return "#1f2328"


def cut_color(ax: "Axes") -> str:
    """Returns the red of cut relations on the ground of these axes."""
    if is_dark(ground(ax)):
        return "#ff7a70"
    return "#e5383b"


def set_labels(ax: "Axes", title: str, x: str = "", y: str = "") -> None:
    """Sets title and labels; the title is wrapped to the width of the axes."""
    color = ink(ax)
    letters = int(size_of(ax)[0] / LETTER)
    ax.set_title(textwrap.fill(title, max(letters, 16)), color=color, fontsize=10.5)
    ax.set_xlabel(x, color=color)
    ax.set_ylabel(y, color=color)
    ax.tick_params(which="both", colors=color)
    for side, spine in ax.spines.items():
        spine.set_color(color)
        spine.set_visible(side in ("left", "bottom"))


def legend(ax: "Axes", entries: Sequence[tuple[str, Any]]) -> None:
    """Draws a legend of (name, handle) pairs at the right of the axes; its last line counts those
    that are left out.
    """
    from matplotlib.patches import Patch

    if not entries:
        return
    shown = list(entries[:MOST_ENTRIES])
    if len(entries) > len(shown):
        shown.append((f"… and {len(entries) - len(shown):,} more", Patch(alpha=0)))
    ax.legend(
        [handle for _, handle in shown],
        [shortened(name, 20) for name, _ in shown],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=8,
        labelcolor=ink(ax),
        frameon=False,
    )


def whole_numbers(axis: "Axis", most: int = 9) -> None:
    """Places at most `most` ticks on an axis, at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))
    axis.set_major_formatter("{x:,.0f}")


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 edit" or "2 edits"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def grid_lines(ax: "Axes") -> None:
    """Draws faint horizontal lines behind the data."""
    ax.grid(axis="y", color=ink(ax), alpha=0.15, linewidth=0.7)


def size_of(ax: "Axes") -> tuple[float, float]:
    """Returns the width and the height of axes in inches, before the layout of the figure."""
    box = ax.get_window_extent()
    dpi = _root(ax).dpi
    return box.width / dpi, box.height / dpi


def shortened(name: str, most: int) -> str:
    """Returns a name on one line of at most `most` letters: its start and its end.

    A `$` does not start a formula.

    Examples:
        >>> shortened("experiment of May, task 3", 16)
        'experiment…ask 3'
    """
    printable = "".join(letter if letter.isprintable() else " " for letter in name)
    name = " ".join(printable.split())
    if len(name) > most:
        end = most // 3
        name = f"{name[: most - 1 - end]}…{name[len(name) - end :]}"
    return name.replace("$", r"\$")


def _root(drawn: "Axes | FigureBase") -> "Figure":
    """Returns the figure that contains axes or a subfigure."""
    # `figure` of axes is perhaps a subfigure; `figure` of a figure or a subfigure is the outermost.
    return drawn.figure.figure
