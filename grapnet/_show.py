"""The HTML that a notebook shows of a net: its layers, owners and last commits."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .plot import owner_colors

if TYPE_CHECKING:
    from ._network import GrapNet

MOST = 12  # rows of a table
LONGEST = 80  # characters of a cell


def page(net: "GrapNet") -> str:
    """Returns three small tables, without scripts and in the colours of the notebook.

    Examples:
        >>> import grapnet as gn
        >>> "GrapNet(4-3-2" in gn.GrapNet([4, 3, 2])._repr_html_()
        True
    """
    layers = []
    for number in range(min(len(net.layers), MOST)):
        layer = net.layers[number]
        activations = "sensory"
        if not layer.is_sensory:
            activations = ", ".join(map(str, layer._activation_names.compact().names))
        relations = ""
        if net.leaving(number):
            relations = sum(net.transitions[t].size for t in net.leaving(number))
        layers.append([number, activations, len(layer), relations])
    owners = []
    colors = owner_colors(net.owners)
    for owner in net.owners[:MOST]:
        nodes = net.select(owner=owner)
        owners.append([owner, len(nodes), len(nodes.outgoing())])
    commits = []
    for commit in net.history[: -MOST - 1 : -1]:
        change = f"+{commit.counts['relations_added']:,} −{commit.counts['relations_removed']:,}"
        commits.append([commit.version, commit.reason, commit.by or "", change])
    tables = (
        _table(["layer", "activation", "nodes", "relations"], layers, len(net.layers)),
        _table(["owner", "nodes", "relations"], owners, len(net.owners), colors),
        _table(["version", "reason", "by", "relations"], commits, len(net.history)),
    )
    return f"<div><b>{_shown(repr(net))}</b>{''.join(tables)}</div>"


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[object]],
    total: int,
    colors: "dict[str | None, str] | None" = None,
) -> str:
    """Returns a table, with the number of rows of `total` that it omits."""
    if not rows:
        return ""
    lines = [f"<tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr>"]
    for row in rows:
        cells = [f"<td>{_shown(cell)}</td>" for cell in row]
        if colors is not None:
            mark = f'<td style="border-left:12px solid {colors[str(row[0])]}">'
            cells[0] = cells[0].replace("<td>", mark)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    if total > len(rows):
        lines.append(f'<tr><td colspan="{len(titles)}">… {total - len(rows):,} more</td></tr>')
    return f"<table>{''.join(lines)}</table>"


def _shown(cell: object) -> str:
    text = str(cell)
    if isinstance(cell, int):
        text = f"{cell:,}"
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 1]}…"
    # Half a pair of surrogates cannot be sent to a browser.
    return html.escape(text.encode(errors="backslashreplace").decode())
