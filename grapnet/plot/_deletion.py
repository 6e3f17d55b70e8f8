"""Child-owned deletion beside masking, the paper's figure 1, drawn from a node of a real net."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from grapnet import GrapNet, GrapNode

from . import _canvas as canvas
from . import _wiring as wiring
from ._canvas import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 9  # cells of a row
BESIDE = 4.2  # cells between the dense row and the list
MORE = 1.3  # cells of the last box, which counts the numbers that are left out


@dataclass(frozen=True)
class Cell:
    """A child and its weight, and how they are drawn."""

    child: str
    weight: str
    kind: str = "kept"  # or "cut", "empty", "more"


def deletion(
    net: GrapNet, *, node: GrapNode | int | None = None, slots: Any = None, ax: "Axes | None" = None
) -> "Axes":
    """Draws a cut in a node's children and W_alloc, beside masking in its row of a dense matrix.

    The cut is a real one, in a trial edit: the net is unchanged when the picture is drawn.

    Args:
        net: the net to cut in.
        node: the node whose relations are cut, or its uid; without, one with about six children.
        slots: the relations to cut; the smallest one without.
        ax: the axes to draw into; a new figure by default.

    Raises:
        EditError: the node has no such slots.
        ValueError: the node owns no relations.
    """
    wiring.require_net(net)
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
    canvas.set_labels(ax, f"{len(gone):,} of the {relations} of node {node.uid} cut")
    ax.set_axis_off()
    right = MOST + BESIDE
    ax.set_xlim(-0.1, right + MOST + MORE)
    ax.set_ylim(-0.4, 6.6)

    # A dense row has a number for every possible child, whether it is one or not.
    uids = []
    for t in net.leaving(node.layer):
        uids += net.layers[net.transitions[t].target].uid.tolist()
    columns = uids
    if len(uids) > MOST:
        columns = _some(list(before), gone)
    rest = len(uids) - len(columns)
    stored = counted(len(uids), "weight")
    masked = f"{stored} and {counted(len(uids), 'mask bit')} stored"
    _draw_heading(ax, 0.0, "masked dense row", "the coordinate stays, with a 0")
    _draw_dense(ax, 3.3, "before", _cells(columns, before, set(), rest), f"{stored} stored")
    zeros = before | dict.fromkeys(gone, 0.0)
    _draw_dense(ax, 0.4, "after", _cells(columns, zeros, gone, rest), masked)
    _draw_heading(ax, right, "child-owned list", "the reference and its number are gone")
    for y, when, owned in ((3.3, "before", before), (0.4, "after", after)):
        children = _some(list(owned), gone)
        cells = _cells(children, owned, gone, len(owned) - len(children))
        _draw_list(ax, right, y, when, cells, len(owned))
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


def _some(uids: list[int], gone: set[int]) -> list[int]:
    """Returns as many uids as a row shows, those that are cut among them, in their order."""
    if len(uids) <= MOST:
        return uids
    # The sort is stable: first those that are cut, then the others.
    chosen = sorted(uids, key=lambda uid: uid not in gone)[: MOST - 1]
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
        cells.append(Cell(str(uid), f"{weights.get(uid, 0.0):.2g}", kind))
    if rest:
        cells.append(Cell(f"+{rest:,}", f"+{rest:,}", "more"))
    return cells


def _write(ax: "Axes", x: float, y: float, words: str, size: float, **style: Any) -> None:
    look = {"color": canvas.ink(ax), "va": "center", **style}
    ax.text(x, y, words, fontsize=size, **look)


def _draw_heading(ax: "Axes", x: float, title: str, caption: str) -> None:
    _write(ax, x, 6.35, title, 9.5, weight="bold")
    _write(ax, x, 5.8, caption, 8.5)


def _draw_dense(ax: "Axes", y: float, when: str, cells: list[Cell], stored: str) -> None:
    """Draws a row of the dense matrix, with the uids of its columns above it."""
    _write(ax, 0.0, y + 1.75, when, 8.0, style="italic")
    for n, cell in enumerate(cells):
        _draw_cell(ax, n, y, cell, f"dense {when}")
        if cell.kind != "more":
            style = {"ha": "center", "alpha": 0.7, "gid": "column"}
            _write(ax, n + 0.5, y + 1.05, cell.child, 6.0, **style)
    _write(ax, 0.0, y - 0.35, stored, 8.5)


def _draw_list(ax: "Axes", x: float, y: float, when: str, cells: list[Cell], count: int) -> None:
    """Draws a list of children, and the weights below it, slot by slot."""
    _write(ax, x, y + 1.75, when, 8.0, style="italic")
    _write(ax, x - 0.15, y + 1.15, "children", 8.0, ha="right")
    _write(ax, x - 0.15, y + 0.35, r"$W_{alloc}$", 8.0, ha="right")
    for n, cell in enumerate(cells):
        _draw_cell(ax, x + n, y + 0.8, cell, f"children {when}", child=True)
        _draw_cell(ax, x + n, y, cell, f"weights {when}")
    stored = f"{counted(count, 'weight')} and {counted(count, 'reference')} stored"
    _write(ax, x, y - 0.35, stored, 8.5)


def _draw_cell(
    ax: "Axes", x: float, y: float, cell: Cell, name: str, *, child: bool = False
) -> None:
    """Draws a box with the weight, or with the child, of a cell."""
    from matplotlib.patches import Rectangle

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
        # The number has a plain background above the hatching.
        text["bbox"] = {"facecolor": canvas.ground(ax), "edgecolor": "none", "pad": 1.0}
    elif cell.kind == "more":
        width = MORE
        box["linestyle"] = ":"
    elif cell.kind == "empty":
        text["alpha"] = 0.45
    ax.add_patch(Rectangle((x, y), width, 0.7, gid=f"{name}: {cell.kind}", **box))
    _write(ax, x + width / 2, y + 0.33, words, 6.0, **text)
