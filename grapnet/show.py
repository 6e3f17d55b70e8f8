"""What a notebook shows of a net: a small page of HTML and SVG that needs nothing else, light or
dark as it is read.
"""

import html
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .plot._canvas import NOBODY, owner_colors

if TYPE_CHECKING:
    from .core.journal import Commit
    from .network import GrapNet

MOST_LAYERS, MOST_OWNERS, LAST_COMMITS = 12, 12, 5  # of more, the page says how many it leaves out
_HEIGHT, _WIDE = 130, 34  # of the bars of the picture in pixels
_STYLE = (  # in the colour of the page's own text: a notebook may be light where the system is dark
    "<style>.grapnet{color:inherit;font:13px/1.45 system-ui,sans-serif}"
    ".grapnet table{border-collapse:collapse;margin:6px 0}"
    ".grapnet td,.grapnet th{padding:2px 10px 2px 0;text-align:left;border-bottom:1px solid #8886;"
    "font-size:13px;color:inherit;background:none}.grapnet td.n,.grapnet th.n{text-align:right}"
    ".grapnet i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}"
    ".grapnet div{overflow-x:auto}.grapnet svg{display:block}"
    ".grapnet svg text{fill:currentColor;font-size:11px}</style>"
)


def page(net: "GrapNet") -> str:
    """Returns sizes, owners, activations, what is frozen, and the last commits of a net as HTML.

    It holds no scripts, stays below 20 kB for any net, and whatever users named is escaped.

    Examples:
        >>> import grapnet as gn
        >>> "<b>GrapNet(4-3-2" in gn.GrapNet([4, 3, 2])._repr_html_()
        True
    """
    count = net.count()
    share = count.frozen / max(count.relations + count.biases, 1)
    numbers = _numbers(len(net.layers))
    nodes, owned = _owners(net)
    colors = owner_colors(owner for owner in nodes)
    facts = (
        f"{count.nodes:,} nodes, {count.trainable:,} trainable coordinates, {share:.1%} frozen,"
        f" {_size(count.bytes)}"
    )
    parts = [
        _STYLE,
        f"<b>{_told(repr(net), 200)}</b><br>{facts}",
        _picture(net, numbers, colors),
        _layers(net, numbers),
        _owner_table(nodes, owned, colors),
        _commits(net.history),
    ]
    return f'<div class="grapnet">{"".join(parts)}</div>'


def _numbers(count: int) -> list[int | None]:
    """Returns which layers to show; None stands for those in the middle that are left out."""
    if count <= MOST_LAYERS:
        return list(range(count))
    half = MOST_LAYERS // 2
    return [*range(half), None, *range(count - half, count)]


def _owners(net: "GrapNet") -> "tuple[Counter[str | None], Counter[str | None]]":
    """Returns how many nodes and how many relations every owner has, hidden layers first as in
    pictures.
    """
    nodes: Counter[str | None] = Counter()
    owned: Counter[str | None] = Counter()
    last = len(net.layers) - 1
    for number in (*range(1, last), 0, last):
        labels = net.layers[number].owner_names
        codes = labels.codes.numpy()
        sizes = np.bincount(codes, minlength=len(labels.names))
        _, first = np.unique(codes, return_index=True)
        for code in codes[np.sort(first)].tolist():
            nodes[labels.names[code]] += int(sizes[code])
        if number < last:
            degrees = net.transitions[number].topology.degrees.cpu().numpy()
            for name, total in zip(
                labels.names, np.bincount(codes, degrees, len(labels.names)), strict=True
            ):
                owned[name] += int(total)
    return nodes, owned


def _picture(
    net: "GrapNet", numbers: "Sequence[int | None]", colors: "dict[str | None, str]"
) -> str:
    """Returns one bar a layer, divided by owner, with bands between them as strong as they are
    dense.
    """
    largest = max(1, *net.sizes)
    heights = {
        n: 12 + (_HEIGHT - 12) * (net.sizes[n] / largest) ** 0.5 for n in numbers if n is not None
    }
    step = 96 if len(numbers) <= 6 else 60  # from one bar to the next
    width, places = (
        step * (len(numbers) - 1) + _WIDE + 44,
        {n: 22 + step * k for k, n in enumerate(numbers)},
    )
    # letters stay readable, and it scrolls
    fits = f"width:100%;min-width:{round(0.7 * width)}px;max-width:{width}px"
    drawn = [
        f'<div><svg viewBox="0 0 {width} {_HEIGHT + 22}" style="{fits}" role="img" aria-label="the'
        ' layers">'
    ]
    for n in heights:
        if n + 1 in heights:
            x, end = places[n] + _WIDE, places[n + 1]
            ends = [((_HEIGHT - heights[m]) / 2, (_HEIGHT + heights[m]) / 2) for m in (n, n + 1)]
            pairs = net.sizes[n] * net.sizes[n + 1]
            shade = (
                0.06 + 0.3 * (net.transitions[n].size / pairs) ** 0.5
                if pairs and net.transitions[n].size
                else 0.0
            )
            path = (
                f"M{x} {ends[0][0]:.0f}L{end} {ends[1][0]:.0f}V{ends[1][1]:.0f}L{x}"
                f" {ends[0][1]:.0f}Z"
            )
            drawn.append(f'<path d="{path}" fill="{NOBODY}" opacity="{shade:.2f}"/>')
    drawn.append(f'<g stroke-width="{_WIDE}">')
    for n in heights:
        drawn += _bar(net, n, places[n] + _WIDE / 2, heights[n], colors)
    drawn.append("</g>")
    for n, x in places.items():
        if n is None:
            drawn.append(
                f'<text x="{x + _WIDE / 2}" y="{_HEIGHT / 2}" text-anchor="middle">…</text>'
            )
            continue
        middle = x + _WIDE / 2
        drawn.append(
            f'<text x="{middle}" y="{_HEIGHT + 16}" text-anchor="middle">{net.sizes[n]:,}</text>'
        )
    return "".join([*drawn, "</svg></div>"])


def _bar(
    net: "GrapNet", number: int, x: float, height: float, colors: "dict[str | None, str]"
) -> list[str]:
    """Returns the bar of a layer as strokes: one for each of its first owners, and one for all
    others.
    """
    labels = net.layers[number].owner_names
    sizes = np.bincount(labels.codes.numpy(), minlength=len(labels.names))
    pieces: Counter[str] = Counter()
    for code in np.flatnonzero(sizes).tolist():  # names that no node has any more stay in the table
        color = colors.get(labels.names[code], NOBODY)
        pieces[color if len(pieces) < MOST_OWNERS or color in pieces else NOBODY] += int(
            sizes[code]
        )
    y, found = (_HEIGHT - height) / 2, []
    for color, size in pieces.items():
        high = height * size / len(labels)
        found.append(f'<path d="M{x:.0f} {y:.1f}v{high:.1f}" stroke="{color}"/>')
        y += high
    return found


def _layers(net: "GrapNet", numbers: "Sequence[int | None]") -> str:
    rows = []
    for n in numbers:
        if n is None:
            rows.append(
                f'<tr><td colspan="6">… {len(net.layers) - MOST_LAYERS} layers more</td></tr>'
            )
            continue
        layer, store = net.layers[n], None if n == len(net.transitions) else net.transitions[n]
        kinds = [str(name) for name in layer.activation_names.compact().names] if len(layer) else []
        kinds = ["sensory"] if layer.is_sensory else kinds or [layer.default_activation]
        named = ", ".join(_told(kind, 20) for kind in kinds[:4]) + (" …" if len(kinds) > 4 else "")
        relations = "" if store is None else f"{store.size:,}"
        frozen = "" if store is None else f"{len(store.frozen_at) / max(store.size, 1):.0%}"
        backend = "" if store is None else _told(net.execution.choices()[n], 20)
        cells = [str(n), named, f"{len(layer):,}", relations, frozen, backend]
        rows.append(_row(cells))
    return _table(["layer", "activation", "nodes", "relations owned", "frozen", "backend"], rows)


def _owner_table(
    nodes: "Counter[str | None]", owned: "Counter[str | None]", colors: "dict[str | None, str]"
) -> str:
    names = [name for name in nodes if name is not None]
    if not names:
        return ""
    rows = []
    for name in names[:MOST_OWNERS]:
        mark = f'<i style="background:{colors[name]}"></i>{_told(name, 40)}'
        rows.append(_row([mark, "", f"{nodes[name]:,}", f"{owned[name]:,}"]))
    if len(names) > MOST_OWNERS:
        rows.append(f'<tr><td colspan="4">… {len(names) - MOST_OWNERS:,} owners more</td></tr>')
    return _table(["owner", "", "nodes", "relations owned"], rows)


def _commits(history: "Sequence[Commit]") -> str:
    rows = []
    for commit in history[: -LAST_COMMITS - 1 : -1]:
        counts = commit.counts
        change = f"+{counts['relations_added']:,} −{counts['relations_removed']:,}"
        told = [_told(text, 80) for text in (commit.reason, commit.by or "")]
        rows.append(
            f"<tr><td>{commit.version}</td><td>{told[0]}</td><td>{told[1]}</td><td"
            f' class="n">{change}</td></tr>'
        )
    if not rows:
        return ""
    more = f"<tr><td colspan='4'>… {len(history) - LAST_COMMITS:,} earlier</td></tr>"
    head = '<tr><th>version</th><th>reason</th><th>by</th><th class="n">relations</th></tr>'
    return f"<table>{head}{''.join(rows)}{more if len(history) > LAST_COMMITS else ''}</table>"


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td{_kind(n)}>{cell}</td>" for n, cell in enumerate(cells)) + "</tr>"


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th{_kind(n)}>{name}</th>" for n, name in enumerate(heads))
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _kind(column: int) -> str:
    return ' class="n"' if 2 <= column <= 4 else ""


def _told(text: str, most: int) -> str:
    """Returns a text escaped, its start and end where it is longer; less of it where letters take
    many bytes.

    Half a pair of surrogates, which no page can hold, is told by its code.
    """
    text = text.encode(errors="backslashreplace").decode()
    for length in range(most, 2, -1):
        end = length // 3
        told = html.escape(
            text if len(text) <= length else f"{text[: length - 1 - end]}…{text[-end:]}"
        )
        if len(told.encode()) <= 2 * most:
            return told
    return "…"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
