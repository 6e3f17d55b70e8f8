"""A small net drawn node by node and relation by relation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grapnet import GrapNet, RelationSet
from grapnet.integrations.extra import require

from .canvas import cut_color, ground, ink, legend
from .colors import NEGATIVE, POSITIVE, is_dark, owner_colors
from .wiring import Cuts, Names, all_names, title_of, wires

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FADED = 0.1
BROKEN = 1.01  # how large a weight that is not finite is drawn; the largest finite one is 1
WRITTEN = 16  # nodes of a layer up to which each shows its uid


def draw_nodes(
    net: GrapNet, ax: "Axes", names: Sequence[Names], marked: RelationSet | None, cuts: Cuts
) -> None:
    """Draws every node as a dot and every relation as a line."""
    heights = [_heights(part.codes) for part in names]
    entries = _draw_relations(net, ax, heights, marked)
    lines = [
        segments(t, heights[t][parents], heights[t + 1][children])
        for t, (parents, children) in enumerate(cuts.rows)
    ]
    if len(cuts) or cuts.lost:
        gone = f", {cuts.lost:,} with a node" if cuts.lost else ""
        style = {
            "colors": cut_color(ax),
            "linewidths": 1.1,
            "linestyles": ":",
            "zorder": 2,
            "gid": "cut",
        }
        entries[f"cut ({len(cuts) + cuts.lost:,}{gone})"] = _collection(
            ax, np.concatenate(lines), **style
        )
    legend(ax, [*entries.items(), *_draw_nodes(net, ax, names, heights, marked)])


def segments(transition: int, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns straight lines between the nodes of two layers, [n, 2, 2]."""
    first = np.stack([np.full(len(start), float(transition)), start], axis=1)
    last = np.stack([np.full(len(end), transition + 1.0), end], axis=1)
    return np.stack([first, last], axis=1)


def _heights(codes: np.ndarray) -> np.ndarray:
    """Returns where the nodes of a layer are, from 1 at the top to 0; those of one name lie
    together.
    """
    places = np.empty(len(codes))
    places[np.argsort(codes, kind="stable")] = (np.arange(len(codes)) + 0.5) / max(len(codes), 1)
    return 1 - places


def _draw_nodes(
    net: GrapNet,
    ax: "Axes",
    names: Sequence[Names],
    heights: Sequence[np.ndarray],
    marked: RelationSet | None,
) -> list[tuple[str, Any]]:
    """Draws the dots and returns the entries of their names in the legend; none where no node has a
    name.
    """
    colors = owner_colors(all_names(names))
    widest = max(net.sizes)
    size = 190.0 if widest <= WRITTEN else max(18.0, 190.0 * WRITTEN / widest / 1.6)
    touched = (
        None if marked is None else set(marked.parents.tolist()) | set(marked.children.tolist())
    )
    for number, (layer, part) in enumerate(zip(net.layers, names, strict=True)):
        uids, bright = layer.uid.tolist(), np.ones(len(layer))
        if touched is not None:
            bright = np.array([1.0 if uid in touched else 0.25 for uid in uids])
        for code, name in enumerate(part.names):
            rows = np.flatnonzero(part.codes == code)
            dots = ax.scatter(
                np.full(len(rows), number), heights[number][rows], s=size, c=colors[name], zorder=3
            )
            dots.set_alpha(bright[rows].tolist())
            dots.set_edgecolor(ground(ax))
            text = "white" if is_dark(colors[name]) else "black"
            for row in rows if widest <= WRITTEN else ():
                place = (number, heights[number][row])
                style = {"ha": "center", "va": "center", "fontsize": 6, "color": text, "zorder": 4}
                ax.annotate(str(uids[row]), place, in_layout=False, **style)
    present = dict.fromkeys(name for part in names for name in part.names)
    return (
        [(title_of(name), _dot(colors[name])) for name in present]
        if any(part.has_any for part in names)
        else []
    )


def _draw_relations(
    net: GrapNet, ax: "Axes", heights: Sequence[np.ndarray], marked: RelationSet | None
) -> dict[str, Any]:
    found = [wires(net, t, marked) for t in range(len(net.transitions))]
    largest = (
        max((float(np.abs(part.weights).max()) for part in found if len(part.weights)), default=0.0)
        or 1.0
    )
    dashes = (0, (3, 1.6))
    for t, part in enumerate(found):
        lines = segments(t, heights[t][part.parents], heights[t + 1][part.children])
        sizes = np.where(part.finite, np.abs(part.weights) / largest, BROKEN)
        colors = np.where(part.finite, np.where(part.weights >= 0, POSITIVE, NEGATIVE), ink(ax))
        for frozen, style in ((False, "-"), (True, dashes)):
            chosen = np.flatnonzero(part.frozen == frozen)
            # the strongest lie above the others
            chosen = chosen[sizes[chosen].argsort(kind="stable")]
            kind = {"linestyles": [style], "zorder": 1, "gid": "frozen" if frozen else "free"}
            kind["colors"] = colors[chosen].tolist()
            kind["alpha"] = np.where(part.marked[chosen], 0.85, FADED)
            if len(chosen):
                _collection(ax, lines[chosen], linewidths=0.25 + 2.2 * sizes[chosen], **kind)
    entries: dict[str, Any] = {}
    if any((part.finite & (part.weights >= 0)).any() for part in found):
        entries["weight ≥ 0"] = _stroke(POSITIVE, "-")
    if any((part.weights < 0).any() for part in found):
        entries["weight < 0"] = _stroke(NEGATIVE, "-")
    if not all(part.finite.all() for part in found):
        entries["not finite"] = _stroke(ink(ax), "-")
    if any(part.frozen.any() for part in found):
        entries["frozen"] = _stroke(ink(ax), dashes)
    return entries


def _collection(ax: "Axes", lines: np.ndarray, **style: Any) -> Any:
    drawn = require("matplotlib.collections", "plot").LineCollection(list(lines), **style)
    ax.add_collection(drawn, autolim=False)
    return drawn


def _stroke(color: str, style: Any) -> Any:
    return require("matplotlib.lines", "plot").Line2D(
        [], [], color=color, linestyle=style, linewidth=1.8
    )


def _dot(color: str) -> Any:
    style = {"marker": "o", "markersize": 7, "linestyle": "none"}
    return require("matplotlib.lines", "plot").Line2D([], [], color=color, **style)
