"""How degrees and weights are distributed, by transition or by owner."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from grapnet import GrapNet

from .canvas import axes_for, counted, dress, ink, legend, whole_numbers
from .colors import NOBODY, owner_colors, owner_styles
from .wiring import all_names, names_of, require_net, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import StepPatch

By = Literal["transition", "owner"]
Parts = dict[str | None, np.ndarray]  # by transition, or by owner: None is nobody
MOST_BINS = 60
MOST_LINES = 10  # a picture of more cannot be read, and the smallest become one


def degrees(
    net: GrapNet,
    *,
    of: Literal["children", "parents"] = "children",
    by: By = "transition",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws how many nodes have how many children, or parents.

    Args:
        net: to count in.
        of: "children" counts the relations that nodes own, "parents" those that lead to them.
        by: one line for each "transition" or for each "owner" of the nodes.
        ax: to draw into; a figure of its own without.
    """
    require_net(net)
    if of not in ("children", "parents"):
        raise ValueError(f'of is "children" or "parents", got {of!r}')
    counts = []
    for store in net.transitions:
        topology = store.topology
        counts.append((topology.degrees if of == "children" else topology.fan_in()).cpu().numpy())
    split, colors = _split(net, counts, by, lower=of == "parents")
    highest = max((int(values.max()) for values in split.values() if len(values)), default=0)
    bins = np.arange(-0.5, highest + 1.5, max(1, -(-(highest + 1) // MOST_BINS)))
    bins = np.append(bins, bins[-1] + (bins[1] - bins[0])) if bins[-1] < highest + 0.5 else bins
    ax = axes_for(ax, 6.4, 4.0)
    entries = _draw(ax, split, bins, colors)
    dress(ax, f"number of {of} of every node, by {by}", of, "nodes")
    whole_numbers(ax.xaxis)
    legend(ax, entries, above=True, columns=5)
    return ax


def weights(net: GrapNet, *, by: By = "transition", ax: "Axes | None" = None) -> "Axes":
    """Draws how many relations have which weight.

    Args:
        net: to count in.
        by: one line for each "transition" or for each "owner" of the parents.
        ax: to draw into; a figure of its own without.
    """
    require_net(net)
    values = [store.values().detach().double().cpu().numpy() for store in net.transitions]
    repeats = [store.topology.degrees.cpu().numpy() for store in net.transitions]
    split, colors = _split(net, values, by, repeats=repeats)
    finite = {name: part[np.isfinite(part)] for name, part in split.items()}
    reach = (
        max((float(np.abs(part).max()) for part in finite.values() if len(part)), default=0.0)
        or 1.0
    )
    fewest = min((len(part) for part in finite.values() if len(part)), default=0)
    bins = np.linspace(-reach, reach, int(np.clip(fewest**0.5, 12, MOST_BINS)) + 1)
    ax = axes_for(ax, 6.4, 4.0)
    entries = _draw(ax, finite, bins, colors)
    total, known = (sum(map(len, parts.values())) for parts in (split, finite))
    note = f" ({total - known:,} not finite)" if total > known else ""
    dress(ax, f"weights of {total:,} relations{note}, by {by}", "weight", "relations")
    legend(ax, entries, above=True, columns=5)
    return ax


def _split(
    net: GrapNet,
    values: list[np.ndarray],
    by: By,
    *,
    lower: bool = False,
    repeats: list[np.ndarray] | None = None,
) -> tuple[Parts, Mapping[str | None, str]]:
    """Returns the values of every transition, or of every owner, and a colour for each."""
    if by not in ("transition", "owner"):
        raise ValueError(f'by is "transition" or "owner", got {by!r}')
    if by == "transition":
        split: Parts = {f"{t} to {t + 1}": part for t, part in enumerate(values)}
        return split, owner_colors(split)
    names, found = names_of(net, "owner"), {}
    for t, part in enumerate(values):
        layer = names[t + 1 if lower else t]
        codes = layer.codes if repeats is None else layer.codes.repeat(repeats[t])
        for code, name in enumerate(layer.names):
            found.setdefault(name, []).append(part[codes == code])
    return {name: np.concatenate(parts) for name, parts in found.items()}, owner_colors(
        all_names(names)
    )


def _draw(
    ax: "Axes", split: Parts, bins: np.ndarray, colors: Mapping[str | None, str]
) -> list[tuple[str, "StepPatch"]]:
    """Draws one stepped line a part, and one for all but the largest of too many; returns the
    entries of the legend.
    """
    largest = sorted(split, key=lambda name: -len(split[name]))[:MOST_LINES]
    others, styles = (
        [values for name, values in split.items() if name not in largest],
        owner_styles(colors),
    )
    lines = [
        (title_of(name), split[name], colors[name], styles[name])
        for name in split
        if name in largest
    ]
    if others:
        lines.append((f"{len(others):,} others", np.concatenate(others), NOBODY, ":"))
    most, entries, thicker = 0, [], min(0.7, 3 / max(1, len(lines)))
    for later, (title, values, color, style) in zip(range(len(lines))[::-1], lines, strict=True):
        counts, _ = np.histogram(values, bins)
        most = max(most, int(counts.max(initial=0)))
        # seen below equal later ones
        look = {
            "color": color,
            "linestyle": style,
            "linewidth": 1.4 + thicker * later,
        }
        entries.append((title, ax.stairs(counts, bins, label=title, baseline=None, **look)))
    if most > 30:
        ax.set_yscale("symlog", linthresh=1)
        ax.yaxis.set_major_formatter(counted)
    else:
        whole_numbers(ax.yaxis)
    ax.set_ylim(0, max(most, 1) * (1.6 if most > 30 else 1.08))
    ax.grid(axis="y", color=ink(ax), alpha=0.15, linewidth=0.7)
    return entries
