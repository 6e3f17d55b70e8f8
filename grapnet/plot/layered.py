"""The layered graph: node by node while that can be read, group by group above."""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from grapnet import Commit, GrapNet

from .canvas import axes_for, dress, ink
from .fitted import LETTER, LINE, inches, whenever_drawn
from .grouped import draw_groups, make_groups
from .nodewise import draw_nodes
from .wiring import Marked, cuts_since, marked_relations, names_of, require_net

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

MOST_NODES, MOST_RELATIONS = 60, 800  # drawn one by one
HEAD = 8.5  # points of what stands above a layer, in two lines


def graph(
    net: GrapNet,
    *,
    ax: "Axes | None" = None,
    color_by: str = "owner",
    highlight: Marked | None = None,
    cut_since: int | Commit | None = None,
) -> "Axes":
    """Draws the layers from left to right, with who owns what, what is frozen and what was cut.

    Up to 60 nodes and 800 relations are drawn one by one: a line's colour is the sign of its
    weight, its width the size, and frozen ones are dashed; weights that are not finite have a
    colour of their own. Above, a box stands for the nodes of one owner (without owners: for those
    with the same children) and a band for all relations between two boxes, as wide as they are
    many; its frozen part is hatched.

    Args:
        net: to draw.
        ax: to draw into; a figure of its own without.
        color_by: "owner" or "activation".
        highlight: relations, or nodes with all of theirs, that stand out; everything else fades.
        cut_since: a version; relations that were cut since then and are still gone are drawn dotted
            in red. A Commit stands for the version before it.

    Raises:
        HistoryError: there is no such version, or the journal no longer knows what was cut since
            then.
    """
    require_net(net)
    names, marked, cuts = (
        names_of(net, color_by),
        marked_relations(net, highlight),
        cuts_since(net, cut_since),
    )
    count = net.count()
    few = count.nodes <= MOST_NODES and count.relations + len(cuts) <= MOST_RELATIONS
    groups = [] if few else make_groups(net, names)
    highest = max(net.sizes) * 0.13 if few else max(map(len, groups)) * 0.62
    ax = axes_for(
        ax, min(24.0, 1.8 + 2.5 * len(net.transitions)), min(9.0, max(3.4, highest + 0.8))
    )
    ax.set_xlim(-0.4, len(net.transitions) + 0.4)
    ax.set_ylim(-0.02, 1.02)
    if few:
        draw_nodes(net, ax, names, marked, cuts)
    else:
        draw_groups(net, ax, names, groups, marked, cuts)
    frozen = sum(len(store.frozen_at) for store in net.transitions)
    broken = sum(int((~store.values().isfinite()).sum()) for store in net.transitions)
    kinds = f"{frozen:,} of them frozen" + (f", {broken:,} not finite" if broken else "")
    title = f"{count.nodes:,} nodes, {count.relations:,} relations ({kinds}), version {net.version}"
    dress(ax, title, pad=8 + 2 * 72 * LINE * HEAD)
    ax.set_axis_off()
    _head(net, ax)
    return ax


def _head(net: GrapNet, ax: "Axes") -> None:
    """Writes above every layer what it is and how many nodes it has; only above some where they are
    close.
    """
    last = len(net.transitions)
    heads, texts = [], []
    for number in range(last + 1):
        kind = "sensory" if number == 0 else "output" if number == last else f"hidden {number}"
        heads.append(f"{kind}\n{net.sizes[number]:,}")
        place = {
            "xycoords": ("data", "axes fraction"),
            "xytext": (0, 3),
            "textcoords": "offset points",
        }
        style = {"ha": "center", "va": "bottom", "fontsize": HEAD, "color": ink(ax)}
        # the title leaves room
        texts.append(ax.annotate("", (number, 1.0), in_layout=False, **place, **style))
    whenever_drawn(ax, partial(_settle_heads, ax, texts, heads))


def _settle_heads(ax: "Axes", texts: Sequence["Text"], heads: Sequence[str], _: Any) -> None:
    letters = max(len(line) for head in heads for line in head.split("\n"))
    every = max(1, math.ceil(letters * LETTER * HEAD * inches(ax)[0]))
    for number, (text, head) in enumerate(zip(texts, heads, strict=True)):
        text.set_text("" if number % every else head)
