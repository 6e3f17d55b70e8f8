"""Child-owned deletion against masking, the paper's figure 1, drawn from a node of a real net."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from grapnet import GrapNet, GrapNode
from grapnet.integrations.extra import require

from .canvas import axes_for, cut_color, dress, ground, ink
from .colors import NEGATIVE, POSITIVE
from .fitted import fit
from .wiring import require_net

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

FEWEST, MOST = 3, 9  # cells of a row
NARROWEST = 0.24  # inches that a cell should have at least
BESIDE = 4.2  # cells between a row of the rectangle and the list
# of texts: points at most, and the room of each in cells, 0 for half of the picture; a role has one
# size
ROLES = {
    "heading": (9.5, 0.0, 0.55),
    "caption": (8.5, 0.0, 0.55),
    "moment": (8.0, 0.0, 0.5),
    "row": (8.0, 3.6, 0.7),
    "column": (6.0, 0.9, 0.5),
    "child": (6.5, 0.84, 0.6),
    "weight": (6.5, 0.84, 0.6),
    "more": (6.5, 1.2, 0.6),
}


@dataclass(frozen=True, eq=False)
class Row:
    """What one node owns: its children, and one weight for each."""

    children: list[int]  # uids
    weights: list[float]


@dataclass(frozen=True, eq=False)
class Cell:
    """One stored number, or what stands for those that are left out."""

    text: str
    head: str = ""  # above it
    kind: str = "kept"  # or "cut", "empty", "more"


def deletion(
    net: GrapNet, *, node: GrapNode | int | None = None, slots: Any = None, ax: "Axes | None" = None
) -> "Axes":
    """Draws what a cut does to a node's children and W_alloc, beside what masking does to its row
    of a dense matrix.

    The cut is a real one, in a trial edit: the net is as before when the picture is drawn.

    Args:
        net: to cut in.
        node: whose relations, as a node or its uid; without, one that has few enough children to
            show them all.
        slots: which of its relations to cut; the smallest one without.
        ax: to draw into; a figure of its own without.

    Raises:
        EditError: the node has no such slots.
        ValueError: the node owns no relations.
    """
    require_net(net)
    node = _chosen(net, node)
    before = _row(node)
    cut = [int(np.abs(before.weights).argmin())] if slots is None else slots
    with net.edit(reason="a picture of deletion", trial=True) as edit:
        edit.cut(node, slots=cut)
        edit.commit()
        after = _row(node)
    lower = net.layers[node.layer + 1]
    ax = axes_for(ax, 9.6, 3.7)
    shown = _cells_of(ax)
    right = shown + BESIDE  # where the list starts
    ax.set_xlim(-0.1, right + shown + 1.3)
    ax.set_ylim(-0.4, 6.6)
    gone, width = set(before.children) - set(after.children), len(lower)
    dress(
        ax,
        f"{len(gone):,} of the {_counted(len(before.children), 'relation')} of node {node.uid} cut",
    )
    ax.set_axis_off()
    bits = f"{_counted(width, 'weight')} and {_counted(width, 'mask bit')} stored"
    dense = _dense_cells(lower.uid, before, gone, shown)
    masked = [
        replace(cell, text="0", kind="cut") if cell.head in map(str, gone) else cell
        for cell in dense
    ]
    _heading(ax, 0.0, "masked dense row", "the coordinate stays, with a 0")
    _draw_dense(ax, 3.3, "before", dense, f"{_counted(width, 'weight')} stored")
    _draw_dense(ax, 0.4, "after", masked, bits)
    _heading(ax, right, "child-owned list", "the reference and its number are gone")
    _draw_owned(ax, right, 3.3, "before", _owned_cells(before, gone, shown), len(before.children))
    _draw_owned(ax, right, 0.4, "after", _owned_cells(after, set(), shown), len(after.children))
    for role, (_, wide, high) in ROLES.items():
        fit(
            ax,
            [text for text in ax.texts if text.get_gid() == role],
            wide or shown + 1.3,
            high,
            least=3.5,
        )
    return ax


def _cells_of(ax: "Axes") -> int:
    """Returns how many cells a row has, such that a weight can be read in each."""
    cells = ax.get_window_extent().width / ax.figure.dpi / NARROWEST
    return min(max(int((cells - BESIDE - 1.4) / 2), FEWEST), MOST)


def _chosen(net: GrapNet, node: GrapNode | int | None) -> GrapNode:
    if node is not None:
        node = net.node(node.uid if isinstance(node, GrapNode) else int(node))
        if not node.degree:
            raise ValueError(f"{node} owns no relations, so there is none to cut")
        return node
    best = None
    for number, store in enumerate(net.transitions):
        degrees = store.topology.degrees.cpu()
        distance = torch.where(degrees > 0, (degrees - 6).abs(), 2**31 - 1)
        if (
            len(distance)
            and int(distance.min()) < 2**31 - 1
            and (best is None or int(distance.min()) < best[0])
        ):
            row = int(distance.argmin())
            best = int(distance[row]), int(net.layers[number].uid[row])
    if best is None:
        raise ValueError("the net has no relations, so there is none to cut")
    return net.node(best[1])


def _row(node: GrapNode) -> Row:
    return Row(node.children.uids.tolist(), node.W_alloc.detach().reshape(-1).tolist())


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _written(weight: float) -> str:
    """Returns a weight in at most six characters."""
    size, text = (
        abs(weight),
        f"{abs(weight):.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e"),
    )
    if 0.1 <= size < 100:
        text = f"{size:.2f}"
    elif 0.0005 <= size < 0.1:
        text = f"{size:.3f}"[1:]
    return f"−{text}" if weight < 0 else text


def _dense_cells(uids: Tensor, row: Row, gone: set[int], most: int) -> list[Cell]:
    """Returns the row of a rectangle: a number for every node of the next layer, whether it is a
    child or not.
    """
    owned = dict(zip(row.children, row.weights, strict=True))
    shown = _shortened(uids.tolist() if len(uids) <= most else row.children, gone, most)
    cells = [
        Cell(_written(owned[uid]), str(uid)) if uid in owned else Cell("0", str(uid), "empty")
        for uid in shown
    ]
    return (
        [*cells, Cell(f"+{len(uids) - len(shown):,}", "", "more")]
        if len(shown) < len(uids)
        else cells
    )


def _owned_cells(row: Row, gone: set[int], most: int) -> list[Cell]:
    owned = dict(zip(row.children, row.weights, strict=True))
    shown = _shortened(row.children, gone, most)
    cells = [
        Cell(_written(owned[uid]), str(uid), "cut" if uid in gone else "kept") for uid in shown
    ]
    return (
        [*cells, Cell(f"+{len(owned) - len(shown):,}", "", "more")]
        if len(shown) < len(owned)
        else cells
    )


def _shortened(uids: list[int], gone: set[int], most: int) -> list[int]:
    """Returns as many as fit into a row, those that are cut among them, in their order."""
    if len(uids) <= most:
        return uids
    first = [uid for uid in uids if uid in gone][: most - 1]
    others = [uid for uid in uids if uid not in gone][: most - 1 - len(first)]
    chosen = {*first, *others}
    return [uid for uid in uids if uid in chosen]


def _write(ax: "Axes", role: str, x: float, y: float, words: str, **style: Any) -> "Text":
    return ax.text(
        x, y, words, gid=role, fontsize=ROLES[role][0], **{"color": ink(ax), "va": "top", **style}
    )


def _heading(ax: "Axes", x: float, title: str, text: str) -> None:
    _write(ax, "heading", x, 6.5, title, weight="bold")
    _write(ax, "caption", x, 5.95, text)


def _draw_dense(ax: "Axes", y: float, title: str, cells: list[Cell], stored: str) -> None:
    """Draws a row of the rectangle, with the uid that each column stands for above it."""
    _write(ax, "moment", 0.0, y + 1.75, title, style="italic", va="center")
    _draw_cells(ax, 0.0, y, cells, f"dense {title}")
    for n, cell in enumerate(cells):
        _write(ax, "column", n + 0.5, y + 0.9, cell.head, ha="center", va="bottom", alpha=0.7)
    _write(ax, "caption", 0.0, y - 0.2, stored)


def _draw_owned(ax: "Axes", x: float, y: float, title: str, cells: list[Cell], count: int) -> None:
    """Draws a list of children, and the weights that lie slot by slot below it."""
    _write(ax, "moment", x, y + 1.75, title, style="italic", va="center")
    heads = [replace(cell, text=cell.head or cell.text) for cell in cells]
    for row, name in ((0.8, "children"), (0.0, r"$W_{alloc}$")):
        _write(ax, "row", x - 0.15, y + row + 0.35, name, ha="right", va="center")
        _draw_cells(ax, x, y + row, heads if row else cells, f"{name} {title}", plain=row > 0)
    stored = f"{_counted(count, 'weight')} and {_counted(count, 'reference')} stored"
    _write(ax, "caption", x, y - 0.2, stored)


def _draw_cells(
    ax: "Axes", x: float, y: float, cells: list[Cell], name: str, *, plain: bool = False
) -> None:
    """Draws boxes side by side, with their texts; `plain` texts have no sign to show."""
    color, box = ink(ax), require("matplotlib.patches", "plot").Rectangle
    outlines = {
        "cut": {"edgecolor": cut_color(ax), "hatch": "////", "linewidth": 1.4},
        "more": {"linestyle": ":"},
    }
    for n, cell in enumerate(cells):
        wide = 1.3 if cell.kind == "more" else 1.0
        style: dict[str, Any] = {"facecolor": "none", "edgecolor": color, "linewidth": 0.8}
        style |= outlines.get(cell.kind, {})
        ax.add_patch(box((x + n, y), wide, 0.7, gid=f"{name}: {cell.kind}", **style))
        signed = cell.kind == "kept" and not plain
        shade = (NEGATIVE if cell.text.startswith("−") else POSITIVE) if signed else color
        role = "more" if cell.kind == "more" else "child" if plain else "weight"
        text = _write(
            ax, role, x + n + wide / 2, y + 0.33, cell.text, ha="center", va="center", color=shade
        )
        if cell.kind == "cut":  # the number is read above the hatching
            text.set_bbox({"facecolor": ground(ax), "edgecolor": "none", "pad": 1.0})
        text.set_alpha(0.45 if cell.kind == "empty" else None)
        text.set_fontweight("normal" if plain else "bold")
