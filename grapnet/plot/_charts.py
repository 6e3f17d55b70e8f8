"""Charts of a net: the rectangle of a transition, distributions, edits, and accuracies."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from grapnet import Commit, GrapNet
from grapnet.continual import AccuracyMatrix

from . import _canvas as canvas
from . import _wiring as wiring
from ._canvas import Look
from ._wiring import Groups, Wires

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

By = Literal["transition", "owner"]
Scores = Mapping[int, float] | Iterable[tuple[int, float]]
# By transition or by owner, None for nodes without one: the values and the appearance.
Parts = dict[str | None, np.ndarray]
Looks = dict[str | None, Look]

MOST_CELLS = 600  # along each side of a rectangle; larger ones are binned
MOST_BINS = 60
MOST_REASONS = 12  # edits up to which each shows its reason
TICK_SIZE = 8.0  # points
MOST_NUMBERS = 20  # tasks of an accuracy matrix that shows its numbers
KINDS = {  # the marker and the colour of every kind of edit
    "grow": ("^", "#009e73"),
    "cut": ("v", "#d55e00"),
    "rewire": ("D", "#cc79a7"),
    "freeze": ("s", "#0072b2"),
    "unfreeze": ("P", "#56b4e9"),
    "assign": ("X", "#7a5195"),
    "undo": ("<", "#e69f00"),
    "redo": (">", "#b8a800"),
    "rename": ("o", "#8c8c8c"),
}


def adjacency(net: GrapNet, transition: int = 0, *, ax: "Axes | None" = None) -> "Axes":
    """Draws which parent has which child, grouped by owner or else by family.

    The colour of a cell is the sign of the weight, its opacity the size. If a layer has more than
    600 nodes, a cell represents several pairs: its opacity is the share that is connected, its
    colour the sign of the sum of their weights. A cell with a weight that is not finite has another
    colour.

    Args:
        net: the net to draw.
        transition: the number of the transition.
        ax: the axes to draw into; a new figure by default.
    """
    wiring.require_net(net)
    transition = range(len(net.transitions))[transition]
    wires = wiring.wires_of(net, transition)
    groups = wiring.summarized(net, wiring.groups_by(net, "owner"))
    source, target = net.ends[transition]
    upper = groups[source]
    lower = groups[target]
    rows = len(upper.codes)
    columns = len(lower.codes)
    ax = canvas.axes_for(ax, 7.4, 5.2)
    if rows and columns:
        image = _image(wires, upper.places, lower.places, canvas.ink(ax))
        extent = (0.0, columns, rows, 0.0)
        ax.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    kinds = f"{100 * len(wires.weights) / max(rows * columns, 1):.3g} % of all pairs"
    broken = int((~wires.finite).sum())
    if broken:
        kinds += f", {broken:,} not finite"
    title = f"transition {transition}: {rows:,} × {columns:,}, {len(wires.weights):,} relations"
    x = f"children: nodes of layer {target}"
    canvas.set_labels(ax, f"{title} ({kinds})", x, f"parents: nodes of layer {source}")
    for spine in ax.spines.values():
        spine.set_visible(True)

    canvas.legend(ax, _cell_entries(ax, max(rows, columns) > MOST_CELLS, broken > 0))
    _divide(ax.xaxis, ax.axvline, lower)
    _divide(ax.yaxis, ax.axhline, upper)
    ax.tick_params(axis="x", rotation=30)
    return ax


def _cell_entries(ax: "Axes", binned: bool, broken: bool) -> list[tuple[str, Any]]:
    """Returns the legend of a rectangle."""
    from matplotlib.patches import Patch

    value = "weight"
    opacity = "|weight|"
    if binned:
        value = "sum of weights"
        opacity = "% of pairs"
    entries = [
        (f"{value} ≥ 0", Patch(color=canvas.POSITIVE)),
        (f"{value} < 0", Patch(color=canvas.NEGATIVE)),
    ]
    if broken:
        entries.append(("not finite", Patch(color=canvas.ink(ax))))
    entries.append((f"opacity: {opacity}", Patch(alpha=0)))
    return entries


def _image(wires: Wires, rows: np.ndarray, columns: np.ndarray, broken_color: str) -> np.ndarray:
    """Returns colours with opacities, [rows, columns, 4], of at most 600 by 600 cells."""
    from matplotlib.colors import to_rgb

    high = min(len(rows), MOST_CELLS)
    wide = min(len(columns), MOST_CELLS)
    row_cells = rows * high // len(rows)
    column_cells = columns * wide // len(columns)
    cells = row_cells[wires.parents] * wide + column_cells[wires.children]
    pairs = np.outer(np.bincount(row_cells), np.bincount(column_cells)).ravel()
    counts = np.bincount(cells, minlength=high * wide)
    sums = np.bincount(cells, wires.weights, high * wide)
    broken = np.bincount(cells[~wires.finite], minlength=high * wide) > 0
    known = (counts > 0) & ~broken

    image = np.zeros((high * wide, 4))
    image[:, :3] = np.where((sums >= 0)[:, None], to_rgb(canvas.POSITIVE), to_rgb(canvas.NEGATIVE))
    image[broken] = (*to_rgb(broken_color), 1.0)
    if known.any():
        strength = np.abs(sums[known])
        if pairs.max() > 1:
            strength = counts[known] / pairs[known]
        # The strongest weights would else make all others pale.
        full = np.quantile(strength, 0.98) or 1
        image[known, 3] = 0.25 + 0.75 * (np.minimum(strength, full) / full)
    return image.reshape(high, wide, 4)


def _divide(axis: "Axis", draw_line: Any, groups: Groups) -> None:
    """Draws lines between groups, and names those of a twentieth of the side or more.

    A side of one group keeps its numbers.
    """
    canvas.whole_numbers(axis, 6)
    if len(groups) < 2:
        return
    ends = np.cumsum(groups.sizes)
    for end in ends[:-1].tolist():
        draw_line(end, color=axis.label.get_color(), linewidth=0.6, alpha=0.7)
    named = np.flatnonzero(groups.sizes >= 0.05 * ends[-1])
    names = [canvas.shortened(groups.titles[n], 14) for n in named]
    axis.set_ticks((ends - groups.sizes / 2)[named], names, fontsize=TICK_SIZE)
    axis.set_tick_params(length=0)


def degrees(
    net: GrapNet,
    *,
    of: Literal["children", "parents"] = "children",
    by: By = "transition",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws how many nodes have how many children, or parents.

    Args:
        net: the net to count in.
        of: "children" counts the relations that nodes own, "parents" those that lead to them.
        by: one line per "transition", or per "owner" of the nodes.
        ax: the axes to draw into; a new figure by default.
    """
    if of not in ("children", "parents"):
        raise ValueError(f'of is "children" or "parents", got {of!r}')
    counts = []
    owners = []
    for store in net.transitions:
        if of == "parents":
            counts.append(store.topology.fan_in().cpu().numpy())
            owners.append(_owners(net, store.target))
        else:
            counts.append(store.topology.degrees.cpu().numpy())
            owners.append(_owners(net, store.source))
    split, looks = _split(net, counts, by, owners)
    highest = max((int(part.max(initial=0)) for part in split.values()), default=0)
    step = math.ceil((highest + 1) / MOST_BINS)
    bins = np.arange(-0.5, highest + 0.5 + step, step)
    ax = canvas.axes_for(ax, 7.0, 4.0)
    canvas.set_labels(ax, f"number of {of} of every node, by {by}", of, "nodes")
    canvas.whole_numbers(ax.xaxis)
    _draw_steps(ax, split, bins, looks)
    return ax


def weights(net: GrapNet, *, by: By = "transition", ax: "Axes | None" = None) -> "Axes":
    """Draws a histogram of the weights of relations.

    Args:
        net: the net to count in.
        by: one line per "transition", or per "owner" of the parents.
        ax: the axes to draw into; a new figure by default.
    """
    wiring.require_net(net)
    values = []
    owners = []
    for store in net.transitions:
        values.append(store.values().detach().double().cpu().numpy())
        owners.append(_owners(net, store.source).repeat(store.topology.degrees.cpu().numpy()))
    split, looks = _split(net, values, by, owners)
    finite = {name: part[np.isfinite(part)] for name, part in split.items()}
    total = sum(len(part) for part in split.values())
    broken = total - sum(len(part) for part in finite.values())
    reach = max((np.abs(part).max(initial=0) for part in finite.values()), default=0) or 1.0
    fewest = min((len(part) for part in finite.values() if len(part)), default=0)
    bins = np.linspace(-reach, reach, int(np.clip(math.sqrt(fewest), 12, MOST_BINS)) + 1)
    note = ""
    if broken:
        note = f" ({broken:,} not finite)"
    ax = canvas.axes_for(ax, 7.0, 4.0)
    canvas.set_labels(ax, f"weights of {total:,} relations{note}, by {by}", "weight", "relations")
    _draw_steps(ax, finite, bins, looks)
    return ax


def _owners(net: GrapNet, layer: int) -> np.ndarray:
    """Returns the owner of every node of a layer, [n_nodes] of str or None."""
    return np.array(net.layers[layer].owners, dtype=object)


def _split(
    net: GrapNet, values: list[np.ndarray], by: By, owners: list[np.ndarray]
) -> tuple[Parts, Looks]:
    """Returns the values of every transition or of every owner, and the look of each.

    Args:
        net: the net that they are from.
        values: an array per transition.
        by: "transition" or "owner".
        owners: the owner of every value, per transition.
    """
    if by == "transition":
        split: Parts = {}
        for (source, target), part in zip(net.ends, values, strict=True):
            split[f"{source} to {target}"] = part
        return split, canvas.owner_looks(split)
    if by != "owner":
        raise ValueError(f'by is "transition" or "owner", got {by!r}')
    everything = np.concatenate(values)
    owner = np.concatenate(owners)
    split = {name: everything[owner == name] for name in dict.fromkeys(owner.tolist())}
    # An owner has the same look in every picture.
    return split, canvas.owner_looks(wiring.distinct_names(wiring.groups_by(net, "owner")))


def _draw_steps(ax: "Axes", split: Parts, bins: np.ndarray, looks: Looks) -> None:
    """Draws a stepped line per part."""
    # Earlier lines are thicker, so that they are visible below equal later ones.
    thicker = min(0.7, 3 / max(1, len(split)))
    highest = 0
    entries = []
    for n, (name, values) in enumerate(split.items()):
        title = wiring.title_of(name)
        look = looks[name]
        counts, _ = np.histogram(values, bins)
        highest = max(highest, int(counts.max(initial=0)))
        width = 1.4 + thicker * (len(split) - 1 - n)
        style = {"color": look.color, "linestyle": look.line, "linewidth": width}
        entries.append((title, ax.stairs(counts, bins, baseline=None, label=title, **style)))
    if highest > 30:
        ax.set_yscale("symlog", linthresh=1)
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.set_ylim(0, 1.6 * highest)
    else:
        canvas.whole_numbers(ax.yaxis)
        ax.set_ylim(0, 1.08 * max(highest, 1))
    canvas.grid_lines(ax)
    canvas.legend(ax, entries)


def timeline(
    history: GrapNet | Sequence[Commit], scores: Scores | None = None, *, ax: "Axes | None" = None
) -> "Axes":
    """Draws a mark for every edit, on the line of scores or of the number of relations.

    Args:
        history: a net, or its commits. Commits alone give the change of the number of relations,
            not the number itself.
        scores: versions with their accuracy from 0 to 1, as a mapping or as pairs; a version may
            occur several times, for training between two edits. Without, the number of relations.
        ax: the axes to draw into; a new figure by default.
    """
    if isinstance(history, GrapNet):
        commits = list(history.history)
        label = "relations"
        last = history.count().relations
    else:
        commits = list(history)
        label = "relations more than at the start"
        last = None
    if scores is None:
        versions, values = _relations(commits, last)
        drawstyle = "steps-post"
    else:
        pairs: Any = scores
        if isinstance(scores, Mapping):
            pairs = scores.items()
        table = np.array(sorted(pairs, key=lambda pair: pair[0]), dtype=float)
        versions = table[:, 0]
        values = 100 * table[:, 1]
        label = "accuracy in per cent"
        drawstyle = "default"

    ax = canvas.axes_for(ax, 8.6, 4.0)
    color = canvas.ink(ax)
    style = {"color": color, "linewidth": 1.2, "alpha": 0.6, "drawstyle": drawstyle, "zorder": 1}
    if len(versions) == 1:
        # A line of one point is not visible.
        style["marker"] = "o"
    ax.plot(versions, values, gid="line", **style)
    marks = _mark(ax, commits, versions, values)
    names = ", ".join(f"{len(handle.get_offsets()):,} {kind}" for kind, handle in marks)
    title = canvas.counted(len(commits), "edit")
    if names:
        title += f": {names}"
    canvas.set_labels(ax, title, "version", label)
    _write_versions(ax, commits)
    ax.margins(x=0.04, y=0.1)
    if scores is None:
        canvas.whole_numbers(ax.yaxis)
    canvas.grid_lines(ax)
    canvas.legend(ax, marks)
    return ax


def _relations(commits: Sequence[Commit], last: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns every version with its number of relations; from 0 on where the last is unknown."""
    versions = [commits[0].version - 1 if commits else 0]
    totals = [0]
    for commit in commits:
        change = commit.counts["relations_added"] - commit.counts["relations_removed"]
        versions.append(commit.version)
        totals.append(totals[-1] + change)
    values = np.array(totals, dtype=float)
    if last is not None:
        values += last - totals[-1]
    return np.array(versions, dtype=float), values


def _kind_of(commit: Commit) -> str:
    """Returns the kind of edit that a commit is."""
    if commit.undoes is not None:
        # The graph itself writes these reasons.
        if commit.reason.startswith("redo: "):
            return "redo"
        return "undo"
    counts = commit.counts
    kinds = ("nodes", "relations", "blocks")
    added = any(counts[f"{kind}_added"] for kind in kinds)
    removed = any(counts[f"{kind}_removed"] for kind in kinds)
    if added and removed:
        return "rewire"
    if added:
        return "grow"
    if removed:
        return "cut"
    if counts["coordinates_assigned"]:
        return "assign"
    if not counts["coordinates_frozen_or_unfrozen"]:
        return "rename"
    operations = {operation.get("operation") for operation in commit.operations}
    if "unfreeze" in operations and "freeze" not in operations:
        return "unfreeze"
    return "freeze"


def _mark(
    ax: "Axes", commits: Sequence[Commit], versions: np.ndarray, values: np.ndarray
) -> list[tuple[str, Any]]:
    """Draws a mark per commit, on the line or level with its nearest end."""
    # The first score of a version is the one right after the edit.
    first = dict(zip(versions[::-1].tolist(), values[::-1].tolist(), strict=True))
    places: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for commit in commits:
        height = first.get(commit.version, float(np.interp(commit.version, versions, values)))
        places[_kind_of(commit)].append((commit.version, height))
    size = 42
    if len(commits) > 60:
        size = 12
    marks = []
    for kind, found in places.items():
        if found:
            marker, color = KINDS[kind]
            x, y = zip(*found, strict=True)
            marks.append((kind, ax.scatter(x, y, marker=marker, color=color, s=size, zorder=3)))
    return marks


def _write_versions(ax: "Axes", commits: Sequence[Commit]) -> None:
    """Writes versions below the axes, of few edits with their reasons."""
    if not 0 < len(commits) <= MOST_REASONS:
        canvas.whole_numbers(ax.xaxis)
        return
    versions = [commit.version for commit in commits]
    texts = [
        f"{commit.version} {canvas.shortened(commit.reason, 22)}".strip() for commit in commits
    ]
    style = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(versions, texts, fontsize=TICK_SIZE, **style)


def accuracy_matrix(
    matrix: AccuracyMatrix | Any,
    *,
    kind: Literal["seen", "local"] = "seen",
    tasks: Sequence[str] | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the accuracy on every task after every task: a row per task learnt, a column per task
    evaluated.

    Args:
        matrix: of a stream, or the accuracies themselves, [tasks, tasks] from 0 to 1, NaN where
            there is none.
        kind: "seen" answers among all classes seen so far, "local" among those of the task.
        tasks: the names of the tasks; numbers without.
        ax: the axes to draw into; a new figure by default.
    """
    if isinstance(matrix, AccuracyMatrix):
        matrix = matrix.table(kind)
    table = np.asarray(matrix, dtype=float)
    count = len(table)
    if table.shape != (count, count) or not count:
        raise ValueError(f"an accuracy matrix is square and not empty, got {list(table.shape)}")
    if tasks is None:
        tasks = [str(n + 1) for n in range(count)]
    if len(tasks) != count:
        raise ValueError(f"the matrix has {count} tasks, got {len(tasks)} names")
    names = [canvas.shortened(name, 18) for name in tasks]
    ax = canvas.axes_for(ax, min(10.0, 2.6 + 0.55 * count), min(9.0, 1.8 + 0.45 * count))
    canvas.set_labels(ax, "accuracy in per cent", "task evaluated", "after learning task")
    step = math.ceil(count / MOST_NUMBERS)
    style = {"rotation": 40, "ha": "right"}
    ax.set_xticks(range(0, count, step), names[::step], fontsize=TICK_SIZE, **style)
    ax.set_yticks(range(0, count, step), names[::step], fontsize=TICK_SIZE)
    _draw_accuracies(ax, table)
    return ax


def _draw_accuracies(ax: "Axes", table: np.ndarray) -> None:
    """Draws coloured cells, with the numbers of few tasks or else a colour bar."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = colormaps["viridis"].with_extremes(bad=(0, 0, 0, 0))
    image = ax.imshow(np.ma.masked_invalid(table), cmap=shades, vmin=0, vmax=1, aspect="auto")
    if len(table) > MOST_NUMBERS:
        bar = ax.figure.colorbar(image, ax=ax, format="{x:.0%}")
        bar.ax.tick_params(colors=canvas.ink(ax))
        return
    size = min(9.0, 120 / len(table))
    for (row, column), share in np.ndenumerate(table):
        if np.isfinite(share):
            color = canvas.readable_on(to_hex(shades(share)))
            style = {"ha": "center", "va": "center", "fontsize": size, "color": color}
            ax.text(column, row, f"{100 * share:.1f}", clip_on=True, **style)
