"""The spaces of an adopted model: a band for each, between what writes it and what reads it."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grapnet.spaces import Adopted, Space

from . import _canvas as canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BANDS = 64  # above, spaces that differ in the numbers of their blocks only share a band
ROW = 0.27  # inches
THICK = 0.62  # of a band; the distance of two bands is 1
LETTERS = 28  # of the name of a tensor
SHORTEST = 0.035  # length of a band; the longest has 1
LETTER = 0.0115  # width of a letter; the longest band has 1
MEANINGS = {
    "exact": (canvas.COLORS[2], "exact"),
    "unproved": (canvas.COLORS[0], "exact by its type"),
    "normalised": (canvas.COLORS[1], "normalised"),
    "differs": (canvas.COLORS[5], "differs"),
    "pinned": (canvas.NOBODY, "pinned"),
}


@dataclass(frozen=True)
class Row:
    """One band: a space, or several that differ in the numbers of their blocks only."""

    name: str
    nodes: int
    first: int  # nodes at adoption
    rows_per_node: int
    verdict: str
    pin: str  # why it is pinned, if it is
    writers: str
    readers: str

    @property
    def text(self) -> str:
        """The name and the size."""
        size = f"{self.nodes:,}"
        if self.nodes != self.first:
            size += f" of {self.first:,}"
        if self.rows_per_node > 1:
            size += f" × {self.rows_per_node:,}"
        text = f"{canvas.shortened(self.name, 46)}  {size}"
        if self.pin:
            text += f", {canvas.shortened(self.pin, 24)}"
        return text


def spaces(net: Adopted, *, ax: "Axes | None" = None) -> "Axes":
    """Draws a band for every space of an adopted model, ordered by the flow from input to output.

    What writes a space is named on its left and what reads it on its right, without the path of the
    block that both are in, and with the share of relations that are left where some were cut.

    The length of a band is the square root of the number of nodes; its paler part are nodes that
    were removed since adoption, a hatched part nodes that were added, and a pinned band longer than
    all others is broken. The colour is the verdict: what removing nodes does to the function.

    Above 64 spaces, those that differ in the numbers of their blocks only share a band.

    Args:
        net: the adopted model, or that of a file, `gn.open(path).adopted`.
        ax: the axes to draw into; a new figure by default.
    """
    rows = _rows(net)
    left = LETTER * max(len(row.writers) for row in rows) + 0.06
    right = LETTER * max(len(row.readers) for row in rows) + 0.06
    width = 4.8 * (1 + left + right) + 1.4
    ax = canvas.axes_for(ax, width, max(2.6, ROW * len(rows) + 0.9))
    ax.set_xlim(-left, 1 + right)
    ax.set_ylim(len(rows) - 0.4, -1.2)
    canvas.set_labels(ax, _title(net))
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)
    # A vocabulary, which is not edited, would leave no room for the others: its band is broken.
    free = [row for row in rows if row.verdict != "pinned"] or rows
    longest = math.sqrt(max(max(row.nodes, row.first) for row in free))
    _write_heads(ax)
    for number, row in enumerate(rows):
        _draw_band(ax, number, row, longest)
    canvas.legend(ax, _entries(ax, rows))
    return ax


def _title(net: Adopted) -> str:
    first = sum(space.first_size for space in net.spaces)
    present = sum(len(space) for space in net.spaces)
    nodes = f"{present:,} nodes"
    if first != present:
        nodes = f"{present:,} of {first:,} nodes"
    return f"{canvas.counted(len(net.spaces), 'space')}, {nodes}, version {net.version}"


def _rows(net: Adopted) -> list[Row]:
    left = _relations_left(net)
    folded: dict[tuple[str, str], list[Space]] = {}
    for space in _by_flow(net):
        name = space.name
        if len(net.spaces) > MOST_BANDS:
            # The numbers of blocks, not those in names like conv1.
            name = re.sub(r"\b\d+\.", "*.", name)
        folded.setdefault((name, space.verdict), []).append(space)
    rows = []
    for (name, _), members in folded.items():
        writers = dict.fromkeys(writer for space in members for writer in space.writers)
        readers = dict.fromkeys(reader for space in members for reader in space.readers)
        if len(members) > 1:
            name = f"{name} ({len(members)} spaces)"
        rows.append(
            Row(
                name,
                sum(len(space) for space in members),
                sum(space.first_size for space in members),
                members[0].rows_per_node,
                members[0].verdict,
                next(iter(members[0].pins), ""),
                _listed(list(writers), members[0], left),
                _listed(list(readers), members[0], left),
            )
        )
    return rows


def _by_flow(net: Adopted) -> list[Space]:
    """Returns the spaces from input to output.

    A space follows those that it is computed from. In a cycle, as between a residual stream and
    its blocks, it follows the first of them.
    """
    written: dict[str, list[int]] = {}
    for number, space in enumerate(net.spaces):
        for name in space.writers:
            written.setdefault(name, []).append(number)
    sources: dict[int, set[int]] = {n: set() for n in range(len(net.spaces))}
    for number, space in enumerate(net.spaces):
        for name in space.readers:
            for target in written.get(name, ()):
                if target != number:
                    sources[target].add(number)
    placed: list[int] = []
    while sources:
        done = set(placed)
        ready = [n for n, before in sources.items() if before <= done]
        begun = [n for n, before in sources.items() if before & done]
        chosen = (ready or begun or list(sources))[0]
        placed.append(chosen)
        del sources[chosen]
    return [net.spaces[n] for n in placed]


def _relations_left(net: Adopted) -> dict[str, float]:
    """Returns the share of relations that are left in tensors of which some were cut."""
    return {weight.name: weight.density for weight in net.transitions if weight.density < 1}


def _listed(names: Sequence[str], space: Space, left: dict[str, float]) -> str:
    """Returns the first tensor of some, and how many others there are."""
    if not names:
        return ""
    text = _beside(names[0].removesuffix(".weight"), space.name)
    if names[0] in left:
        text += f" ({100 * left[names[0]]:.0f} %)"
    if len(names) > 1:
        text += f" and {len(names) - 1} more"
    return text


def _beside(name: str, space: str) -> str:
    """Returns the name of a tensor, without the path of the block that it shares with its space."""
    parts = name.split(".")
    shared = 0
    for part, own in zip(parts[:-1], space.split("."), strict=False):
        if part != own:
            break
        shared += 1
    if shared > 1:
        name = "…" + ".".join(parts[shared:])
    return canvas.shortened(name, LETTERS)


def _write_heads(ax: "Axes") -> None:
    style = {"va": "center", "fontsize": 8, "color": canvas.ink(ax), "fontstyle": "italic"}
    ax.text(-0.03, -0.85, "written by", ha="right", **style)
    ax.text(0.0, -0.85, "space, nodes", ha="left", **style)
    ax.text(1.03, -0.85, "read by", ha="left", **style)


def _draw_band(ax: "Axes", number: int, row: Row, longest: float) -> None:
    from matplotlib.patches import Rectangle

    color = MEANINGS[row.verdict][0]
    most = max(row.nodes, row.first)
    length = min(max(SHORTEST, math.sqrt(most) / longest), 1.0)
    stays = length * min(row.nodes, row.first) / most
    low = number - THICK / 2
    parts: list[tuple[float, float, dict[str, Any]]] = [(0.0, stays, {"facecolor": color})]
    if row.nodes < row.first:
        parts.append((stays, length - stays, {"facecolor": color, "alpha": 0.28}))
    elif row.nodes > row.first:
        added = {"facecolor": color, "hatch": "////", "edgecolor": canvas.ground(ax)}
        parts.append((stays, length - stays, added))
    for start, width, style in parts:
        ax.add_patch(Rectangle((start, low), width, THICK, linewidth=0, zorder=2, **style))
    if math.sqrt(most) > longest:
        for x in (0.95, 0.96):
            slash = ([x - 0.006, x + 0.006], [number + THICK / 2, number - THICK / 2])
            ax.plot(*slash, color=canvas.ground(ax), linewidth=1.4, zorder=3)
    line = {"color": canvas.ink(ax), "alpha": 0.16, "linewidth": 0.6, "zorder": 1}
    if row.writers:
        ax.plot([-0.02, 0.0], [number, number], **line)
    if row.readers:
        ax.plot([length, 1.02], [number, number], **line)
    _write_band(ax, number, row, length, stays)


def _write_band(ax: "Axes", number: int, row: Row, length: float, stays: float) -> None:
    """Writes the name where it fits: into the part that stays, the pale part or behind the band."""
    style = {"va": "center", "ha": "left", "fontsize": 7.5, "zorder": 4}
    ink = canvas.ink(ax)
    width = len(row.text) * 1.1 * LETTER
    if width > stays and row.nodes < row.first and width < length - stays:
        ax.text(stays + 0.008, number, row.text, color=ink, **style)
    elif width > stays and width < 1 - length:
        paper = {"facecolor": canvas.ground(ax), "edgecolor": "none", "pad": 1.0}
        ax.text(length + 0.012, number, row.text, color=ink, bbox=paper, **style)
    else:
        color = canvas.readable_on(MEANINGS[row.verdict][0])
        ax.text(0.008, number, row.text, color=color, **style)
    for x, side, text in ((-0.03, "right", row.writers), (1.03, "left", row.readers)):
        if text:
            ax.text(x, number, text, ha=side, color=ink, alpha=0.75, va="center", fontsize=7)


def _entries(ax: "Axes", rows: Sequence[Row]) -> list[tuple[str, Any]]:
    from matplotlib.patches import Patch

    entries = []
    for verdict, (color, meaning) in MEANINGS.items():
        if any(row.verdict == verdict for row in rows):
            entries.append((meaning, Patch(facecolor=color)))
    if any(row.nodes < row.first for row in rows):
        entries.append(("removed", Patch(facecolor=canvas.ink(ax), alpha=0.2)))
    if any(row.nodes > row.first for row in rows):
        hatched = Patch(
            facecolor=canvas.ink(ax), alpha=0.6, hatch="////", edgecolor=canvas.ground(ax)
        )
        entries.append(("added", hatched))
    return entries
