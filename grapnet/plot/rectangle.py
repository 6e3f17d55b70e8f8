"""The rectangle of a transition: parents × children, those that belong together side by side."""

from typing import TYPE_CHECKING, Any

import numpy as np

from grapnet import GrapNet
from grapnet.integrations.extra import require

from .canvas import axes_for, dress, ink, legend, shortened, whole_numbers
from .colors import NEGATIVE, POSITIVE
from .grouped import Groups, make_groups
from .wiring import Wires, names_of, require_net, wires

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CELLS = 600  # along each side; larger rectangles are binned


def adjacency(net: GrapNet, transition: int = 0, *, ax: "Axes | None" = None) -> "Axes":
    """Draws which parent has which child: rows grouped by owner, else by family, and the sign of
    weights as colour.

    A cell is the more opaque the larger the weight. Of a layer with more than 600 nodes a cell
    stands for several: it is the more opaque the more of its pairs are related, and has the colour
    of the sign of their sum. A cell with a weight that is not finite has a colour of its own.

    Args:
        net: to draw.
        transition: which of its transitions.
        ax: to draw into; a figure of its own without.
    """
    require_net(net)
    if not 0 <= transition < len(net.transitions):
        raise ValueError(
            f"the net has transitions 0 to {len(net.transitions) - 1}, got {transition!r}"
        )
    part, groups = (
        wires(net, transition),
        make_groups(net, names_of(net, "owner"))[transition : transition + 2],
    )
    rows, columns = (_places(group) for group in groups)
    ax = axes_for(ax, 6.4, 5.2)
    if len(rows) and len(columns):
        image = _image(part, rows, columns, ink(ax))
        ax.imshow(
            image,
            aspect="auto",
            interpolation="nearest",
            extent=(0.0, len(columns), float(len(rows)), 0.0),
        )
    size = f"{len(rows):,} × {len(columns):,}"
    share = f"{100 * len(part.weights) / max(len(rows) * len(columns), 1):.3g} %"
    broken = int((~part.finite).sum())
    kinds = f"{share} of all pairs" + (f", {broken:,} not finite" if broken else "")
    dress(
        ax,
        f"transition {transition}: {size}, {len(part.weights):,} relations ({kinds})",
        f"children: nodes of layer {transition + 1}",
        f"parents: nodes of layer {transition}",
    )
    for side in ax.spines.values():
        side.set_visible(True)
    _separate(ax, groups[0], upright=False)
    _separate(ax, groups[1], upright=True)
    patch = require("matplotlib.patches", "plot").Patch
    binned = max(len(rows), len(columns)) > MOST_CELLS
    what, strength = ("sum of weights", "share of pairs") if binned else ("weight", "|weight|")
    entries = [(f"{what} ≥ 0", patch(color=POSITIVE)), (f"{what} < 0", patch(color=NEGATIVE))]
    entries += [("not finite", patch(color=ink(ax)))] if broken else []
    legend(ax, [*entries, (f"opacity: {strength}", patch(alpha=0))], above=True)
    return ax


def _places(group: Groups) -> np.ndarray:
    """Returns where each row goes when those of a group lie together."""
    places = np.empty(len(group.codes), dtype=np.int64)
    places[np.argsort(group.codes, kind="stable")] = np.arange(len(group.codes))
    return places


def _image(part: Wires, rows: np.ndarray, columns: np.ndarray, broken_color: str) -> np.ndarray:
    """Returns colours with opacities, [rows, columns, 4], of at most 600 by 600 cells."""
    sides = [_cells(places) for places in (rows, columns)]
    (row_cells, high), (column_cells, wide) = ((cells, int(cells.max()) + 1) for cells in sides)
    at = row_cells[part.parents] * wide + column_cells[part.children]
    # that every cell stands for
    pairs = np.outer(np.bincount(row_cells), np.bincount(column_cells)).ravel()
    counts, sums = (np.bincount(at, of, high * wide) for of in (None, part.weights))
    broken = np.bincount(at[~part.finite], minlength=high * wide) > 0
    to_rgb = require("matplotlib.colors", "plot").to_rgb
    image = np.zeros((high * wide, 4))
    image[:, :3] = np.where((sums >= 0)[:, None], to_rgb(POSITIVE), to_rgb(NEGATIVE))
    image[broken] = *to_rgb(broken_color), 1.0
    known = (counts > 0) & ~broken
    if known.any():
        strength = (np.abs(sums) if pairs.max() == 1 else counts / pairs)[known]
        full = np.quantile(strength, 0.98) or 1
        image[known, 3] = 0.25 + 0.75 * (np.minimum(strength, full) / full)
    return image.reshape(high, wide, 4)


def _cells(places: np.ndarray) -> np.ndarray:
    """Returns in which cell of its side each node is; one cell a node while there are enough."""
    return places * min(len(places), MOST_CELLS) // len(places)


def _separate(ax: "Axes", group: Groups, *, upright: bool) -> None:
    """Draws a line between two groups and names those that have room for it; a side of one group
    keeps its numbers.
    """
    axis: Any = ax.xaxis if upright else ax.yaxis
    whole_numbers(axis, 6)
    if len(group) < 2:
        return
    ends = np.cumsum(group.sizes)
    for end in ends[:-1]:
        (ax.axvline if upright else ax.axhline)(float(end), color=ink(ax), linewidth=0.6, alpha=0.7)
    middles, shares = ends - group.sizes / 2, group.sizes / max(int(ends[-1]), 1)
    named = np.flatnonzero(shares > (0.08 if upright else 0.035))
    axis.set_ticks(middles[named], [shortened(group.titles[n], 14) for n in named], fontsize=8)
    axis.set_tick_params(length=0, rotation=35 if upright and len(named) > 4 else 0)
