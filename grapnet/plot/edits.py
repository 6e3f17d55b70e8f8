"""The edits of a net in order, against accuracy or against the number of relations."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grapnet import Commit, GrapNet

from .canvas import axes_for, dress, ink, legend, shortened, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS: dict[str, tuple[str, str]] = {  # marker and colour of every kind of edit
    "grow": ("^", "#009e73"),
    "cut": ("v", "#d55e00"),
    "rewire": ("D", "#cc79a7"),
    "freeze": ("s", "#0072b2"),
    "unfreeze": ("P", "#56b4e9"),
    "undo": ("<", "#e69f00"),
    "redo": (">", "#b8a800"),
    "rename": ("o", "#8c8c8c"),
}
REASONS = 12  # edits up to which each shows its reason
Scores = Mapping[int, float] | Iterable[tuple[int, float]]


def timeline(
    history: GrapNet | Sequence[Commit], scores: Scores | None = None, *, ax: "Axes | None" = None
) -> "Axes":
    """Draws a mark for every edit, by kind, on the line of what was scored or of how many relations
    there were.

    Args:
        history: a net, or its commits. Commits alone say how the number of relations changed, not
            what it was.
        scores: versions with their accuracy from 0 to 1, as a mapping or as pairs; a version may
            come again, for what training does between two edits. The number of relations without.
        ax: to draw into; a figure of its own without.
    """
    commits = list(history.history if isinstance(history, GrapNet) else history)
    points = None if scores is None else _checked(scores)
    ax = axes_for(ax, 8.0, 4.0)
    if points is not None:
        versions, values = points
        label = "accuracy in per cent"
    else:
        versions, values = _relations(
            commits, history.count().relations if isinstance(history, GrapNet) else None
        )
        label = "relations" if isinstance(history, GrapNet) else "relations more than at the start"
    step = "default" if points is not None else "steps-post"
    dot = "o" if len(versions) == 1 else ""  # a line of one point is not seen
    ax.plot(
        versions,
        values,
        dot + "-",
        color=ink(ax),
        linewidth=1.2,
        alpha=0.6,
        drawstyle=step,
        gid="line",
        zorder=1,
    )
    entries = _mark(ax, commits, versions, values)
    names = ", ".join(f"{len(handle.get_offsets()):,} {kind}" for kind, handle in entries.items())
    dress(
        ax,
        f"{len(commits):,} edit{'' if len(commits) == 1 else 's'}"
        + (f": {names}" if names else ""),
        "version",
        label,
    )
    _ticks(ax, commits)
    ax.margins(x=0.04, y=0.1)
    if points is None:
        whole_numbers(ax.yaxis)
    ax.grid(axis="y", color=ink(ax), alpha=0.15, linewidth=0.7)
    legend(ax, entries.items(), above=True, columns=8)
    return ax


def kind_of(commit: Commit) -> str:
    """Returns which kind of edit a commit is."""
    if commit.undoes is not None:  # the graph itself gave the reason, and begins it with its verb
        return "redo" if commit.reason.startswith("redo: ") else "undo"
    counts = commit.counts
    asked = {str(done.get("operation")) for done in commit.operations}
    came = counts["nodes_added"] + counts["relations_added"] > 0
    went = counts["nodes_removed"] + counts["relations_removed"] > 0
    turned = counts["coordinates_turned"] > 0
    if came or went:
        return "rewire" if came and went else "grow" if came else "cut"
    return (
        "rename"
        if not turned
        else "unfreeze"
        if "freeze" not in asked and "unfreeze" in asked
        else "freeze"
    )


def _checked(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    given = list(scores.items() if isinstance(scores, Mapping) else scores)
    odd = [pair for pair in given if np.shape(pair) != (2,)]
    if odd:
        raise TypeError(
            f"scores are pairs (version, accuracy), or a mapping from one to the other; {odd[0]!r}"
            " is no pair"
        )
    pairs = sorted(given, key=lambda pair: pair[0])
    table = np.array(pairs, dtype=float).reshape(-1, 2)
    if not len(table) or not np.isfinite(table).all():
        raise ValueError(
            "scores are versions with an accuracy each, at least one and all of them numbers"
        )
    return table[:, 0], 100 * table[:, 1]


def _relations(commits: Sequence[Commit], last: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many relations there were at every version."""
    versions, totals = [], []
    total = 0 if last is None else last
    for commit in reversed(commits):
        versions.append(commit.version)
        totals.append(total)
        counts = commit.counts
        total += counts["relations_removed"] - counts["relations_added"]
    versions.append(commits[0].version - 1 if commits else 0)
    totals.append(total)
    found = np.array(totals[::-1], dtype=float)
    return np.array(versions[::-1], dtype=float), found if last is not None else found - found[0]


def _mark(
    ax: "Axes", commits: Sequence[Commit], versions: np.ndarray, values: np.ndarray
) -> dict[str, Any]:
    """Draws one mark a commit, on the line; where the line is unknown, at its nearest end."""
    places: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    # scored first: what the edit left
    first = dict(zip(versions[::-1].tolist(), values[::-1].tolist(), strict=True))
    for commit in commits:
        height = first.get(commit.version, float(np.interp(commit.version, versions, values)))
        places[kind_of(commit)].append((commit.version, height))
    entries = {}
    for kind, found in places.items():
        if found:
            marker, color = KINDS[kind]
            x, y = zip(*found, strict=True)
            entries[kind] = ax.scatter(
                x, y, marker=marker, color=color, s=42 if len(commits) <= 60 else 12, zorder=3
            )
    return entries


def _ticks(ax: "Axes", commits: Sequence[Commit]) -> None:
    """Writes versions, of few edits with their reasons."""
    if not 0 < len(commits) <= REASONS:
        whole_numbers(ax.xaxis)
        return
    close = ax.get_window_extent().width / ax.figure.dpi < 0.45 * len(commits)  # inches
    texts = [
        f"{commit.version} {shortened(commit.reason, 20 if close else 26)}".strip()
        for commit in commits
    ]
    turned = {"rotation": 60 if close else 32, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks([commit.version for commit in commits], texts, fontsize=7.5, **turned)
