"""Child-owned deletion beside masking, the paper's figure 1, drawn from a node of a real net."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from grapnet import GrapNet, GrapNode

from . import _canvas as canvas
from ._canvas import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Cells of a row.
FEWEST = 3
MOST = 9
NARROWEST = 0.24  # inches that a cell has at least
WIDEST = 0.38  # inches of a cell in which texts have their full size
HIGHEST = 3.0  # inches of axes in which texts have their full size
BESIDE = 4.2  # cells between the dense row and the list
MORE = 1.3  # cells of the last box, which counts the numbers that are left out


@dataclass(frozen=True)
class Cell:
    """A child and its weight, and how they are drawn."""

    child: str
    weight: str
    kind: str = "kept"  # or "cut", "empty", "more"


@dataclass(frozen=True, eq=False)
class Picture:
    """The axes, and the factor of all font sizes."""

    ax: "Axes"
    scale: float

    def write(self, x: float, y: float, words: str, size: float, **style: Any) -> None:
        """Writes a text."""
        look = {"color": canvas.ink(self.ax), "va": "center", **style}
        self.ax.text(x, y, words, fontsize=size * self.scale, **look)


def deletion(
    net: GrapNet, *, node: GrapNode | int | None = None, slots: Any = None, ax: "Axes | None" = None
) -> "Axes":
    """Draws a cut in a node's children and W_alloc, beside masking in its row of a dense matrix.

    The cut is a real one, in a trial edit: the net is unchanged when the picture is drawn.

    Args:
        net: the net to cut in.
        node: the node whose relations are cut, or its uid; without, one with about six children.
        slots: the relations to cut; the smallest one without.
        ax: the axes to draw into; a figure of its own without.

    Raises:
        EditError: the node has no such slots.
        ValueError: the node owns no relations.
    """
    if node is None:
        node = _node_of_degree(net, 6)
    elif isinstance(node, int):
        node = net.node(node)
    before = _weights(node)
    if not before:
        raise ValueError(f"{node} owns no relations, so there is none to cut")
    if slots is None:
        slots = [int(np.abs(list(before.values())).argmin())]
    with net.edit(reason="a picture of deletion", trial=True) as edit:
        edit.cut(node, slots=slots)
        edit.commit()
        after = _weights(node)
    gone = before.keys() - after.keys()

    ax = canvas.axes_for(ax, 9.6, 3.7)
    relations = counted(len(before), "relation")
    canvas.dress(ax, f"{len(gone):,} of the {relations} of node {node.uid} cut")
    ax.set_axis_off()
    canvas.settle(ax)
    width, height = canvas.size_of(ax)
    most = int((width / NARROWEST - BESIDE - MORE) / 2)
    most = min(max(most, FEWEST), MOST)
    right = most + BESIDE
    end = right + most + MORE
    ax.set_xlim(-0.1, end)
    ax.set_ylim(-0.4, 6.6)
    picture = Picture(ax, min(1.0, width / end / WIDEST, height / HIGHEST))

    # A dense row has a number for every node of the next layer, whether it is a child or not.
    uids = net.layers[node.layer + 1].uid.tolist()
    columns = uids
    if len(uids) > most:
        columns = _some(list(before), gone, most)
    rest = len(uids) - len(columns)
    stored = counted(len(uids), "weight")
    masked = f"{stored} and {counted(len(uids), 'mask bit')} stored"
    _draw_heading(picture, 0.0, "masked dense row", "the coordinate stays, with a 0")
    _draw_dense(picture, 3.3, "before", _cells(columns, before, set(), rest), f"{stored} stored")
    zeros = before | dict.fromkeys(gone, 0.0)
    _draw_dense(picture, 0.4, "after", _cells(columns, zeros, gone, rest), masked)
    _draw_heading(picture, right, "child-owned list", "the reference and its number are gone")
    for y, when, owned in ((3.3, "before", before), (0.4, "after", after)):
        children = _some(list(owned), gone, most)
        cells = _cells(children, owned, gone, len(owned) - len(children))
        _draw_list(picture, right, y, when, cells, len(owned))
    return ax


def _node_of_degree(net: GrapNet, degree: int) -> GrapNode:
    """Returns a node whose number of children is closest to `degree`, and not zero."""
    best = None
    least = np.inf
    for layer, store in zip(net.layers, net.transitions, strict=False):
        degrees = store.topology.degrees.cpu().numpy()
        distances = np.where(degrees > 0, np.abs(degrees - degree), np.inf)
        if distances.min(initial=np.inf) < least:
            least = distances.min()
            best = int(layer.uid[int(distances.argmin())])
    if best is None:
        raise ValueError("the net has no relations, so there is none to cut")
    return net.node(best)


def _weights(node: GrapNode) -> dict[int, float]:
    """Returns the weight of every child, by uid, in slot order."""
    weights = node.W_alloc.detach().reshape(-1).tolist()
    return dict(zip(node.children.uids.tolist(), weights, strict=True))


def _number(weight: float) -> str:
    """Returns a weight in at most six letters."""
    text = f"{weight:.2g}"
    if len(text) > 6:
        text = f"{weight:.0e}"
    return text


def _some(uids: list[int], gone: set[int], most: int) -> list[int]:
    """Returns as many uids as a row shows, those that are cut among them, in their order."""
    if len(uids) <= most:
        return uids
    # The sort is stable: first those that are cut, then the others.
    chosen = sorted(uids, key=lambda uid: uid not in gone)[: most - 1]
    return [uid for uid in uids if uid in chosen]


def _cells(uids: list[int], weights: dict[int, float], gone: set[int], rest: int) -> list[Cell]:
    """Returns a cell for every uid, and one that counts the rest."""
    cells = []
    for uid in uids:
        kind = "kept"
        if uid in gone:
            kind = "cut"
        elif uid not in weights:
            kind = "empty"
        cells.append(Cell(str(uid), _number(weights.get(uid, 0.0)), kind))
    if rest:
        cells.append(Cell(f"+{rest:,}", f"+{rest:,}", "more"))
    return cells


def _draw_heading(picture: Picture, x: float, title: str, caption: str) -> None:
    picture.write(x, 6.35, title, 9.5, weight="bold")
    picture.write(x, 5.8, caption, 8.5)


def _draw_dense(picture: Picture, y: float, when: str, cells: list[Cell], stored: str) -> None:
    """Draws a row of the dense matrix, with the uids of its columns above it."""
    picture.write(0.0, y + 1.75, when, 8.0, style="italic")
    for n, cell in enumerate(cells):
        _draw_cell(picture, n, y, cell, f"dense {when}")
        if cell.kind != "more":
            style = {"ha": "center", "alpha": 0.7, "gid": "column"}
            picture.write(n + 0.5, y + 1.05, cell.child, 6.0, **style)
    picture.write(0.0, y - 0.35, stored, 8.5)


def _draw_list(
    picture: Picture, x: float, y: float, when: str, cells: list[Cell], count: int
) -> None:
    """Draws a list of children, and the weights below it, slot by slot."""
    picture.write(x, y + 1.75, when, 8.0, style="italic")
    picture.write(x - 0.15, y + 1.15, "children", 8.0, ha="right")
    picture.write(x - 0.15, y + 0.35, r"$W_{alloc}$", 8.0, ha="right")
    for n, cell in enumerate(cells):
        _draw_cell(picture, x + n, y + 0.8, cell, f"children {when}", child=True)
        _draw_cell(picture, x + n, y, cell, f"weights {when}")
    stored = f"{counted(count, 'weight')} and {counted(count, 'reference')} stored"
    picture.write(x, y - 0.35, stored, 8.5)


def _draw_cell(
    picture: Picture, x: float, y: float, cell: Cell, name: str, *, child: bool = False
) -> None:
    """Draws a box with the weight, or with the child, of a cell."""
    from matplotlib.patches import Rectangle

    ax = picture.ax
    width = 1.0
    box: dict[str, Any] = {"facecolor": "none", "edgecolor": canvas.ink(ax), "linewidth": 0.8}
    text: dict[str, Any] = {"ha": "center", "gid": "cell"}
    words = cell.child
    if not child:
        words = cell.weight
        text["weight"] = "bold"
        if cell.kind == "kept":
            text["color"] = canvas.POSITIVE
            if words.startswith("-"):
                text["color"] = canvas.NEGATIVE
    if cell.kind == "cut":
        box |= {"edgecolor": canvas.cut_color(ax), "hatch": "////", "linewidth": 1.4}
        # The number stands on plain ground above the hatching.
        text["bbox"] = {"facecolor": canvas.ground(ax), "edgecolor": "none", "pad": 1.0}
    elif cell.kind == "more":
        width = MORE
        box["linestyle"] = ":"
    elif cell.kind == "empty":
        text["alpha"] = 0.45
    ax.add_patch(Rectangle((x, y), width, 0.7, gid=f"{name}: {cell.kind}", **box))
    picture.write(x + width / 2, y + 0.33, words, 6.0, **text)
