"""The accuracy matrix of a stream of tasks."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from grapnet.integrations.extra import require
from grapnet.learning import AccuracyMatrix

from .canvas import axes_for, dress, ink, shortened
from .colors import is_dark
from .fitted import LETTER, LINE, fit, inches, whenever_drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_WIDE, LEAST_HIGH = 0.3, 0.13  # inches of a cell that shows its number
NUMBER = 9.0  # points of it, at most


def accuracy_matrix(
    matrix: AccuracyMatrix | Any,
    *,
    kind: Literal["seen", "local"] = "seen",
    tasks: Sequence[str] | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws how well every task was known after every task: a row is the task just learnt, a column
    one evaluated.

    Args:
        matrix: of a stream, or the accuracies themselves, [tasks, tasks] from 0 to 1, NaN where
            there is none.
        kind: "seen" answers among all classes seen so far, "local" among those of the task.
        tasks: their names; numbers without.
        ax: to draw into; a figure of its own without.
    """
    if kind not in ("seen", "local"):
        raise ValueError(f'kind is "seen" or "local", got {kind!r}')
    table = np.asarray(
        matrix.table(kind) if isinstance(matrix, AccuracyMatrix) else matrix, dtype=float
    )
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not len(table):
        raise ValueError(
            f"an accuracy matrix is square and not empty, got the shape {list(table.shape)}"
        )
    names = (
        [str(n + 1) for n in range(len(table))]
        if tasks is None
        else [shortened(name, 18) for name in tasks]
    )
    if len(names) != len(table):
        raise ValueError(f"the matrix has {len(table)} tasks, got {len(names)} names")
    ax = axes_for(ax, min(10.0, 2.6 + 0.55 * len(table)), min(9.0, 1.8 + 0.45 * len(table)))
    shades = require("matplotlib", "plot").colormaps["viridis"].with_extremes(bad=(0, 0, 0, 0))
    image = ax.imshow(np.ma.masked_invalid(table), cmap=shades, vmin=0, vmax=1, aspect="auto")
    wide, high = (1 / inch for inch in inches(ax))
    if wide >= LEAST_WIDE and high >= LEAST_HIGH:
        _write(ax, table, shades)
    else:
        bar = ax.figure.colorbar(image, ax=ax, format=_per_cent)
        bar.ax.tick_params(colors=ink(ax))
    turned = tasks is not None and max(map(len, names)) > 4
    ax.set_xticks(
        range(len(names)), names, rotation=40 if turned else 0, ha="right" if turned else "center"
    )
    ax.set_yticks(range(len(names)), names)
    dress(ax, "accuracy in per cent", "task evaluated", "after learning task")
    # turned ones need the width of little more than a line
    letters = 2.5 if turned else max(map(len, names)) + 1
    whenever_drawn(
        ax,
        partial(_thin_out, ax, ax.xaxis.get_major_locator(), ax.yaxis.get_major_locator(), letters),
    )
    return ax


def _per_cent(share: float, _: float | None = None) -> str:
    return f"{100 * share:.0f} %"


def _thin_out(ax: "Axes", across: Any, down: Any, letters: float, _: Any) -> None:
    """Leaves as many ticks as have room for their names, every n-th; `across` and `down` say where
    they are.
    """
    size, room = require("matplotlib", "plot").rcParams["font.size"], ax.get_window_extent()
    for locator, length, needed in (
        (across, room.width, letters * LETTER),
        (down, room.height, LINE),
    ):
        locator.set_params(nbins=max(1, int(length / ax.figure.dpi / (size * needed))))


def _write(ax: "Axes", table: np.ndarray, shades: Any) -> None:
    to_hex, texts = require("matplotlib.colors", "plot").to_hex, []
    for (row, column), share in np.ndenumerate(table):
        if np.isfinite(share):
            style = {"ha": "center", "va": "center", "fontsize": NUMBER}
            color = "white" if is_dark(to_hex(shades(share))) else "black"
            texts.append(ax.text(column, row, f"{100 * share:.1f}", color=color, **style))
    fit(ax, texts, 0.84, 0.95, least=4.0)
