"""The layered graph: node by node while that can be read, group by group above."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from grapnet import Commit, GrapNet, RelationSet

from . import _canvas as canvas
from . import _wiring as wiring
from ._canvas import Look
from ._wiring import Cuts, Groups, Wires

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A net of at most so many nodes and relations is drawn node by node.
MOST_NODES = 60
MOST_RELATIONS = 800
DASHES = (0, (3, 1.6))  # of frozen relations
HALF = 0.22  # half of the width of a box; the distance of two layers is 1
THINNEST = 0.003  # width of a band; the height of the axes is 1
APART = 0.04  # distance of two numbers on bands


@dataclass(frozen=True, eq=False)
class Scene:
    """What is drawn, and where."""

    net: GrapNet
    ax: "Axes"
    groups: list[Groups]
    looks: dict[str | None, Look]
    marked: RelationSet | None
    cuts: Cuts


def graph(
    net: GrapNet,
    *,
    ax: "Axes | None" = None,
    color_by: wiring.ColorBy = "owner",
    highlight: wiring.Marked | None = None,
    cut_since: int | Commit | None = None,
) -> "Axes":
    """Draws the layers from left to right, with owners, frozen relations and cut relations.

    Up to 60 nodes and 800 relations are drawn one by one. The colour of a line is the sign of its
    weight, the width its size, and frozen relations are dashed; weights that are not finite have
    another colour. Above that, a box represents the nodes of one owner (without owners: of one
    family) and a band all relations between two boxes, with a width proportional to their number.
    Its frozen part is hatched.

    Args:
        net: the net to draw.
        ax: the axes to draw into; a new figure by default.
        color_by: "owner" or "activation".
        highlight: relations, or nodes with their relations, to emphasize; everything else fades.
        cut_since: a version; relations that were cut since then and are still gone are drawn dotted
            in red. A Commit means the version before it.

    Raises:
        HistoryError: there is no such version, or the journal no longer knows what was cut since
            then.
    """
    wiring.require_net(net)
    groups = wiring.groups_by(net, color_by)
    looks = canvas.owner_looks(wiring.distinct_names(groups))
    marked = wiring.marked_relations(net, highlight)
    cuts = wiring.cuts_since(net, cut_since)
    count = net.count()
    few = count.nodes <= MOST_NODES and count.relations + len(cuts) <= MOST_RELATIONS
    if few:
        height = 0.13 * max(net.sizes)
    else:
        groups = wiring.summarized(net, groups)
        height = 0.62 * max(len(part) for part in groups)
    last = len(net.layers) - 1
    width = 3.0 + 2.5 * last
    ax = canvas.axes_for(ax, min(24.0, width), min(9.0, max(3.4, height + 0.8)))
    ax.set_xlim(-0.3, last + 0.3)
    ax.set_ylim(-0.02, 1.02)
    canvas.set_labels(ax, _title(net))
    _write_heads(net, ax)
    scene = Scene(net, ax, groups, looks, marked, cuts)
    if few:
        _draw_nodes(scene)
    else:
        _draw_groups(scene)
    return ax


def _title(net: GrapNet) -> str:
    count = net.count()
    frozen = sum(len(store.frozen_at) for store in net.transitions)
    broken = sum(int((~store.values().isfinite()).sum()) for store in net.transitions)
    kinds = f"{frozen:,} of them frozen"
    if broken:
        kinds += f", {broken:,} not finite"
    return f"{count.nodes:,} nodes, {count.relations:,} relations ({kinds}), version {net.version}"


def _write_heads(net: GrapNet, ax: "Axes") -> None:
    """Writes the kind and the size of the layers above them, of many of some."""
    last = len(net.layers) - 1
    kinds = ["sensory", *(f"hidden {n}" for n in range(1, last)), "output"]
    heads = [f"{kind}\n{size:,}" for kind, size in zip(kinds, net.sizes, strict=True)]
    every = math.ceil(last / 20)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.set_xticks(range(0, last + 1, every), heads[::every], fontsize=8.5)
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)


def _cut_entries(scene: Scene) -> list[tuple[str, Any]]:
    """Returns the entries of cut relations in the legend; empty if none were cut."""
    color = canvas.cut_color(scene.ax)
    lost = scene.cuts.lost
    entries = []
    if len(scene.cuts) + lost:
        entries.append((f"cut ({len(scene.cuts) + lost:,})", _stroke(color, ":")))
    if lost:
        entries.append((f"{lost:,} with a node", _stroke(color, "none")))
    return entries


def _stroke(color: str, style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, linestyle=style, linewidth=1.8)


def _draw_nodes(scene: Scene) -> None:
    """Draws a dot for every node and a line for every relation."""
    from matplotlib.lines import Line2D

    ax = scene.ax
    wires = [wiring.wires_of(scene.net, t, scene.marked) for t in range(len(scene.cuts.rows))]
    entries = _relation_entries(ax, wires) + _cut_entries(scene)
    if any(part.has_names for part in scene.groups):
        for name in wiring.distinct_names(scene.groups):
            look = scene.looks[name]
            dot = Line2D([], [], color=look.color, marker=look.marker, linestyle="none")
            entries.append((wiring.title_of(name), dot))
    canvas.legend(ax, entries)

    # From 1 at the top to 0.
    heights = [1 - (part.places + 0.5) / max(len(part.codes), 1) for part in scene.groups]
    for t, part in enumerate(wires):
        ends = scene.net.ends[t]
        _draw_relations(ax, part, _segments(ends, heights, part.parents, part.children), wires)
        style = {"colors": canvas.cut_color(ax), "linewidths": 1.1, "linestyles": ":", "zorder": 2}
        _add_lines(ax, _segments(ends, heights, *scene.cuts.rows[t]), gid="cut", **style)
    _draw_dots(scene, heights)


def _relation_entries(ax: "Axes", wires: Sequence[Wires]) -> list[tuple[str, Any]]:
    entries = []
    if any((part.finite & (part.weights >= 0)).any() for part in wires):
        entries.append(("weight ≥ 0", _stroke(canvas.POSITIVE, "-")))
    if any((part.weights < 0).any() for part in wires):
        entries.append(("weight < 0", _stroke(canvas.NEGATIVE, "-")))
    if not all(part.finite.all() for part in wires):
        entries.append(("not finite", _stroke(canvas.ink(ax), "-")))
    if any(part.frozen.any() for part in wires):
        entries.append(("frozen", _stroke(canvas.ink(ax), DASHES)))
    return entries


def _segments(
    ends: tuple[int, int],
    heights: Sequence[np.ndarray],
    parents: np.ndarray,
    children: np.ndarray,
) -> np.ndarray:
    """Returns straight lines between the nodes of two layers, [n, 2, 2]."""
    source, target = ends
    lines = np.empty((len(parents), 2, 2))
    lines[:, 0, 0] = source
    lines[:, 1, 0] = target
    lines[:, 0, 1] = heights[source][parents]
    lines[:, 1, 1] = heights[target][children]
    return lines


def _add_lines(ax: "Axes", lines: np.ndarray, **style: Any) -> None:
    from matplotlib.collections import LineCollection

    if len(lines):
        ax.add_collection(LineCollection(list(lines), **style), autolim=False)


def _draw_relations(ax: "Axes", part: Wires, lines: np.ndarray, every: Sequence[Wires]) -> None:
    """Draws the relations of a transition; widths are relative to the largest weight of all."""
    largest = max(np.abs(wires.weights).max(initial=0) for wires in every) or 1.0
    # A weight that is not finite is drawn wider than the largest, and above it.
    sizes = np.where(part.finite, np.abs(part.weights) / largest, 1.01)
    signs = np.where(part.weights >= 0, canvas.POSITIVE, canvas.NEGATIVE)
    colors = np.where(part.finite, signs, canvas.ink(ax))
    alphas = np.where(part.marked, 0.85, 0.1)
    for gid, dashes, chosen in (("free", "-", ~part.frozen), ("frozen", DASHES, part.frozen)):
        rows = np.flatnonzero(chosen)
        # The strongest lie above the others.
        rows = rows[sizes[rows].argsort(kind="stable")]
        _add_lines(
            ax,
            lines[rows],
            gid=gid,
            linestyles=[dashes],
            linewidths=0.25 + 2.2 * sizes[rows],
            colors=colors[rows].tolist(),
            alpha=alphas[rows],
            zorder=1,
        )


def _draw_dots(scene: Scene, heights: Sequence[np.ndarray]) -> None:
    """Draws the nodes, with their uids where the dots are large enough."""
    ax = scene.ax
    # Points; dots of the widest layer do not touch.
    diameter = min(14.0, 0.9 * 72 * canvas.size_of(ax)[1] / max(1, *scene.net.sizes))
    for number, part in enumerate(scene.groups):
        uids = scene.net.layers[number].uid.cpu().numpy()
        bright = np.ones(len(uids), dtype=bool)
        if scene.marked is not None:
            ends = np.concatenate([scene.marked.parents.cpu(), scene.marked.children.cpu()])
            bright = np.isin(uids, ends)
        for code, name in enumerate(part.names):
            look = scene.looks[name]
            rows = np.flatnonzero(part.codes == code)
            y = heights[number][rows]
            dots = ax.scatter(np.full(len(y), number), y, s=diameter**2, marker=look.marker)
            dots.set(facecolor=look.color, edgecolor=canvas.ground(ax), zorder=3)
            dots.set_alpha(np.where(bright[rows], 1.0, 0.25).tolist())
            if diameter < 11:
                continue
            style = {"ha": "center", "va": "center", "fontsize": 6, "clip_on": True, "zorder": 4}
            for height, uid in zip(y, uids[rows], strict=True):
                ax.text(number, height, str(uid), color=canvas.readable_on(look.color), **style)


@dataclass(frozen=True)
class Band:
    """All relations between two groups."""

    upper: int
    lower: int
    count: int
    frozen: int
    cut: int
    marked: int

    @property
    def text(self) -> str:
        """The numbers on the band."""
        parts = []
        if 0 < self.marked < self.count:
            parts.append(f"{self.marked:,} of {self.count:,}")
        elif self.count:
            parts.append(f"{self.count:,}")
        if self.cut:
            parts.append(f"{self.cut:,} cut")
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class Curve:
    """The middle of a band, and its width."""

    x: np.ndarray
    y: np.ndarray
    width: float


def _draw_groups(scene: Scene) -> None:
    """Draws a box for every group, and a band for all relations between two groups."""
    from matplotlib.patches import Patch

    ax = scene.ax
    entries = []
    if any(len(store.frozen_at) for store in scene.net.transitions):
        hatched = Patch(facecolor="none", edgecolor=canvas.ink(ax), hatch="/////", linewidth=0)
        entries.append(("frozen", hatched))
    entries += _cut_entries(scene)
    for name in wiring.distinct_names(scene.groups):
        if name is not None:
            look = scene.looks[name]
            filled = Patch(facecolor=look.color, edgecolor=canvas.ground(ax), hatch=look.hatch)
            entries.append((name, filled))
    canvas.legend(ax, entries)

    letters = max(4, min(14, 60 // len(scene.groups)))
    boxes = [_boxes(part) for part in scene.groups]
    for number, part in enumerate(scene.groups):
        for n, (title, size) in enumerate(zip(part.titles, part.sizes, strict=True)):
            look = scene.looks.get(part.names[n], Look())
            _draw_box(ax, number, boxes[number][n], f"{title}\n{size:,}", letters, look)
    for t, (source, target) in enumerate(scene.net.ends):
        _draw_bands(scene, t, boxes[source], boxes[target])


def _boxes(part: Groups) -> np.ndarray:
    """Returns the low and the high end of every box, [n_groups, 2], from the top down.

    Larger groups are higher, and no box is too low to read.
    """
    count = len(part)
    if count == 1:
        return np.array([[0.15, 0.85]])
    gap = min(0.05, 0.3 / count)
    least = 0.6 / count
    shares = np.sqrt(np.maximum(part.sizes, 1))
    heights = least + (1 - least * count - gap * (count - 1)) * shares / shares.sum()
    lows = 1 - np.cumsum(heights + gap) + gap
    return np.stack([lows, lows + heights], axis=1)


def _draw_box(
    ax: "Axes", layer: int, ends: np.ndarray, text: str, letters: int, look: Look
) -> None:
    """Draws a box with lines of at most `letters` letters."""
    from matplotlib.patches import FancyBboxPatch

    low, high = ends.tolist()
    corner = (layer - HALF, low)
    shape = "round,pad=0,rounding_size=0.02"
    box = FancyBboxPatch(corner, 2 * HALF, high - low, boxstyle=shape, gid="group", zorder=3)
    box.set(facecolor=look.color, edgecolor=canvas.ground(ax), hatch=look.hatch)
    ax.add_patch(box)
    shown = [canvas.shortened(line, letters) for line in text.splitlines()]
    # The name has a plain background, also in a hatched box.
    plain = {"facecolor": look.color, "edgecolor": "none", "pad": 0.5}
    style = {"ha": "center", "va": "center", "clip_on": True, "zorder": 4, "bbox": plain}
    color = canvas.readable_on(look.color)
    ax.text(layer, (low + high) / 2, "\n".join(shown), fontsize=7, color=color, **style)


def _bands(scene: Scene, t: int) -> list[Band]:
    """Returns a band for every pair of groups that has relations, or had some that were cut."""
    wires = wiring.wires_of(scene.net, t, scene.marked)
    source, target = scene.net.ends[t]
    upper = scene.groups[source].codes
    lower = scene.groups[target].codes
    width = len(scene.groups[target])
    cells = len(scene.groups[source]) * width
    pairs = upper[wires.parents] * width + lower[wires.children]
    parents, children = scene.cuts.rows[t]
    counts = np.bincount(pairs, minlength=cells)
    frozen = np.bincount(pairs[wires.frozen], minlength=cells)
    cut = np.bincount(upper[parents] * width + lower[children], minlength=cells)
    marked = np.bincount(pairs[wires.marked], minlength=cells)
    columns = np.stack([counts, frozen, cut, marked], axis=1).tolist()
    present = np.flatnonzero(counts + cut).tolist()
    return [Band(n // width, n % width, *columns[n]) for n in present]


def _draw_bands(scene: Scene, t: int, upper: np.ndarray, lower: np.ndarray) -> None:
    """Draws the bands of one transition, with their numbers where no two of them overlap."""
    bands = _bands(scene, t)
    source, target = scene.net.ends[t]
    uppers = [band.upper for band in bands]
    lowers = [band.lower for band in bands]
    counts = np.array([band.count for band in bands], dtype=float)
    scale = min(_scale(counts, uppers, upper), _scale(counts, lowers, lower))
    widths = np.maximum(counts * scale, THINNEST)
    starts = _stack(widths, uppers, upper)
    ends = _stack(widths, lowers, lower)
    along = np.linspace(0, 1, 41)
    x = source + HALF + (target - source - 2 * HALF) * along
    # The curve leaves and arrives level.
    bend = 3 * along**2 - 2 * along**3
    curves = []
    for n, band in enumerate(bands):
        curve = Curve(x, starts[n] + (ends[n] - starts[n]) * bend, widths[n])
        name = scene.groups[source].names[band.upper]
        if name is None:
            name = scene.groups[target].names[band.lower]
        _draw_band(scene.ax, band, curve, scene.looks.get(name, Look()).color)
        curves.append(curve)
    _write_numbers(scene.ax, bands, curves)


def _scale(counts: np.ndarray, groups: list[int], boxes: np.ndarray) -> float:
    """Returns the width of one relation at which no box is lower than all of its bands."""
    totals = np.bincount(groups, counts, len(boxes))
    return float(np.min(0.94 * np.ptp(boxes, axis=1) / np.maximum(totals, 1)))


def _stack(widths: np.ndarray, groups: list[int], boxes: np.ndarray) -> np.ndarray:
    """Returns the middle of every band at its box; the bands of a box lie below each other."""
    tops = boxes.mean(axis=1) + np.bincount(groups, widths, len(boxes)) / 2
    middles = np.empty(len(widths))
    for n, group in enumerate(groups):
        middles[n] = tops[group] - widths[n] / 2
        tops[group] -= widths[n]
    return middles


def _draw_band(ax: "Axes", band: Band, curve: Curve, color: str) -> None:
    """Draws a band, hatched where it is frozen, and a dotted line for what was cut of it."""
    low = curve.y - curve.width / 2
    high = curve.y + curve.width / 2
    alpha = 0.55
    if band.count and not band.marked:
        alpha = 0.12
    if band.count:
        gid = f"band {band.upper}-{band.lower}: {band.count}"
        ax.fill_between(curve.x, low, high, facecolor=color, alpha=alpha, linewidth=0, gid=gid)
    if band.frozen:
        top = low + curve.width * band.frozen / band.count
        style = {"facecolor": "none", "edgecolor": canvas.ink(ax), "hatch": "/////", "linewidth": 0}
        gid = f"frozen {band.frozen}"
        ax.fill_between(curve.x, low, top, alpha=alpha, gid=gid, zorder=1.5, **style)
    if band.cut:
        y = curve.y
        if band.count:
            y = low
        style = {"color": canvas.cut_color(ax), "linestyle": ":", "linewidth": 1.5}
        ax.plot(curve.x, y, gid=f"cut {band.cut}", zorder=2.1, **style)


def _write_numbers(ax: "Axes", bands: Sequence[Band], curves: Sequence[Curve]) -> None:
    """Writes the numbers in the middle of the bands, largest first, where they cover no other."""
    paper = {"facecolor": canvas.ground(ax), "alpha": 0.75, "edgecolor": "none", "pad": 1.0}
    style = {"ha": "center", "va": "center", "bbox": paper, "clip_on": True, "zorder": 5}
    taken: list[float] = []
    for n in sorted(range(len(bands)), key=lambda n: -(bands[n].count + bands[n].cut)):
        middle = len(curves[n].x) // 2
        y = float(curves[n].y[middle])
        text = bands[n].text
        if all(abs(y - other) > APART for other in taken):
            taken.append(y)
            x = float(curves[n].x[middle])
            ax.text(x, y, text, fontsize=7, color=canvas.ink(ax), **style)
