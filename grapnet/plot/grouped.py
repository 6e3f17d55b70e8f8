"""A large net drawn group by group: a box for nodes that belong together, a band for all relations
between two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from grapnet import GrapNet, RelationSet
from grapnet.integrations.extra import require

from .bands import Band, Ends, draw_bands
from .canvas import cut_color, ground, ink, legend, shortened
from .colors import NOBODY, is_dark, owner_colors
from .fitted import fit
from .wiring import Cuts, Names, Wires, all_names, title_of, wires

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_GROUPS = 10  # boxes of one layer
FEW_FAMILIES = 8  # up to which families are told apart in a layer without owners
HALF = 0.17  # of a box's width


@dataclass(frozen=True, eq=False)
class Groups:
    """The boxes of one layer."""

    titles: list[str]
    names: list[str | None]  # of the colours
    sizes: np.ndarray  # [groups] nodes of each
    codes: np.ndarray  # [nodes] which group each row is in

    def __len__(self) -> int:
        return len(self.titles)


def make_groups(net: GrapNet, names: Sequence[Names]) -> list[Groups]:
    """Returns the boxes of every layer: by name where there are any, else by family, else one for
    all.
    """
    found = []
    for number, part in enumerate(names):
        if part.has_any:
            found.append(_by_name(part))
            continue
        codes = _families(net, number)
        sizes = np.bincount(codes, minlength=1)
        titles = [f"family {n + 1}" for n in range(len(sizes))] if len(sizes) > 1 else ["all"]
        found.append(Groups(titles, [None] * len(sizes), sizes, codes))
    return found


def draw_groups(
    net: GrapNet,
    ax: "Axes",
    names: Sequence[Names],
    groups: Sequence[Groups],
    marked: RelationSet | None,
    cuts: Cuts,
) -> None:
    """Draws the boxes, and the bands between them with the number of relations in each."""
    colors = owner_colors(all_names(names))
    boxes = [_boxes(part) for part in groups]
    entries: dict[str, Any] = {}
    owners: dict[str, tuple[str, Any]] = {}
    for number, (part, places) in enumerate(zip(groups, boxes, strict=True)):
        for title, name, size, (low, high) in zip(
            part.titles, part.names, part.sizes, places, strict=True
        ):
            _draw_box(ax, (number, low, high), shortened(title, 12), size, colors.get(name, NOBODY))
            if name is not None:
                owners.setdefault(name, (title_of(name), _patch(colors[name])))
    frozen = False
    for t, (parents, children) in enumerate(cuts.rows):
        bands = _bands(
            groups[t], groups[t + 1], wires(net, t, marked), parents, children, marked is not None
        )
        frozen |= any(band.frozen for band in bands)
        shades = [[colors.get(name, NOBODY) for name in part.names] for part in groups[t : t + 2]]
        draw_bands(
            ax,
            bands,
            Ends(t + HALF, boxes[t], shades[0]),
            Ends(t + 1 - HALF, boxes[t + 1], shades[1]),
        )
    if frozen:
        entries["frozen"] = _patch(ground(ax), hatch="/////", edgecolor=ink(ax))
    if len(cuts) or cuts.lost:
        gone = f", {cuts.lost:,} with a node" if cuts.lost else ""
        line = require("matplotlib.lines", "plot").Line2D(
            [], [], color=cut_color(ax), linestyle=":"
        )
        entries[f"cut ({len(cuts) + cuts.lost:,}{gone})"] = line
    legend(ax, [*entries.items(), *owners.values()])


def _by_name(part: Names) -> Groups:
    """Returns one box a name; of too many, the largest and one for all others."""
    sizes, codes = np.bincount(part.codes, minlength=len(part.names)), part.codes
    titles = [title_of(name) for name in part.names]
    if len(titles) <= MOST_GROUPS:
        return Groups(titles, part.names, sizes, codes)
    kept = np.sort(np.argsort(-sizes, kind="stable")[: MOST_GROUPS - 1])
    place = np.full(len(titles), MOST_GROUPS - 1)
    place[kept] = np.arange(MOST_GROUPS - 1)
    codes = place[codes]
    titles = [*(titles[n] for n in kept), f"{len(part.names) - len(kept)} others"]
    return Groups(
        titles,
        [*(part.names[n] for n in kept), None],
        np.bincount(codes, minlength=MOST_GROUPS),
        codes,
    )


def _families(net: GrapNet, number: int) -> np.ndarray:
    """Returns which family each node of a layer is in, the first one first; 0 for all where they
    say nothing.

    `net.execution.families` lists them all with their nodes, which takes seconds where there are
    thousands.
    """
    whole = np.zeros(net.sizes[number], dtype=np.int64)
    if number == len(net.transitions) or len(whole) == 0:
        return whole
    topology = net.transitions[number].topology
    # nodes of one family have as many children
    if len(np.unique(topology.degrees.cpu().numpy())) > FEW_FAMILIES:
        return whole
    keys = _keys(
        topology.parents().cpu().numpy(),
        topology.child.cpu().numpy(),
        len(whole),
        topology.n_children,
    )
    _, first, codes = np.unique(keys, return_index=True, return_inverse=True)
    return (
        first.argsort().argsort()[codes]
        if len(first) <= min(FEW_FAMILIES, len(whole) - 1)
        else whole
    )


def _keys(parents: np.ndarray, children: np.ndarray, n_parents: int, n_children: int) -> np.ndarray:
    """Returns a number a node that is the same for nodes with the same children: a sum of random
    52-bit numbers.
    """
    numbers = np.random.default_rng(0).integers(0, 2**52, n_children)
    keys = np.zeros(n_parents, dtype=np.int64)
    np.add.at(keys, parents, numbers[children])
    return keys


def _boxes(part: Groups) -> list[tuple[float, float]]:
    """Returns (low, high) of every box, from the top down; larger groups are higher, and none is
    too low to read.
    """
    gap = min(0.05, 0.3 / max(len(part), 1))
    shares = np.sqrt(np.maximum(part.sizes, 1))
    least = 0.6 / max(len(part), 1)
    heights = least + (1 - least * len(part) - gap * (len(part) - 1)) * shares / shares.sum()
    if len(part) == 1:
        heights = np.array([0.7])
    top = 1 - (1 - heights.sum() - gap * (len(part) - 1)) / 2
    ends = top - np.cumsum(heights + gap) + gap
    return [(float(low), float(low + high)) for low, high in zip(ends, heights, strict=True)]


def _bands(
    upper: Groups,
    lower: Groups,
    part: Wires,
    gone_parents: np.ndarray,
    gone_children: np.ndarray,
    some: bool,
) -> list[Band]:
    """Returns every pair of groups that has relations, or had."""
    width, cells = len(lower), len(upper) * len(lower)
    pairs = upper.codes[part.parents] * width + lower.codes[part.children]
    gone = upper.codes[gone_parents] * width + lower.codes[gone_children]
    counts, frozen, marked, cut = (
        np.bincount(which, minlength=cells)
        for which in (pairs, pairs[part.frozen], pairs[part.marked], gone)
    )
    return [
        Band(
            n // width,
            n % width,
            int(counts[n]),
            int(frozen[n]),
            int(cut[n]),
            int(marked[n]) if some else None,
        )
        for n in range(cells)
        if counts[n] or cut[n]
    ]


def _draw_box(
    ax: "Axes", place: tuple[int, float, float], title: str, size: int, color: str
) -> None:
    """Draws a box, with its name and its size where there is room for them."""
    number, low, high = place
    box = require("matplotlib.patches", "plot").FancyBboxPatch(
        (number - HALF, low),
        2 * HALF,
        high - low,
        boxstyle="round,pad=0,rounding_size=0.02",
        zorder=3,
    )
    box.set(facecolor=color, edgecolor=ground(ax), gid="group")
    ax.add_patch(box)
    style = {
        "ha": "center",
        "va": "center",
        "fontsize": 7.5,
        "color": "white" if is_dark(color) else "black",
    }
    text = ax.text(number, (low + high) / 2, f"{title}\n{size:,}", zorder=4, **style)
    fit(ax, [text], 1.9 * HALF, high - low, shorter=title)


def _patch(color: str, **style: Any) -> Any:
    return require("matplotlib.patches", "plot").Patch(facecolor=color, **style)
