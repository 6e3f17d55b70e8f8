"""Markdown as the studies write it, as one HTML page that needs no other file."""

import html
import itertools
import re
from collections.abc import Sequence

from grapnet.page import Html, heading, paragraph, table, wide
from grapnet.page import page as whole

_STARTS = {"|": "table", "- ": "ul", "#": "h", "<svg": "svg"}


def page(markdown: str, title: str) -> str:
    """Returns the page: headings, paragraphs, lists and tables, with bold and code inside of them,
    and pictures.

    Pictures are lines that begin with `<svg`, which stay as they are; everything else is escaped.

    Examples:
        >>> "<td class=right>&lt;2</td>" in page("| a | b |\\n|---|---:|\\n| **x** | <2 |", "t")
        True
    """
    blocks = [
        _block(kind, list(lines))
        for kind, lines in itertools.groupby(markdown.splitlines(), _kind)
        if kind
    ]
    return whole(title, blocks)


def _kind(line: str) -> str:
    """Returns what a line belongs to: "" for an empty one, "p" where nothing says otherwise."""
    if not line.strip():
        return ""
    return next((kind for start, kind in _STARTS.items() if line.startswith(start)), "p")


def _block(kind: str, lines: Sequence[str]) -> str:
    if kind == "table":
        titles, marks, *rows = ([_inline(cell) for cell in _cells(line)] for line in lines)
        return table(titles, rows, right=[n for n, mark in enumerate(marks) if mark.endswith(":")])
    if kind == "svg":
        return "\n".join(map(wide, lines))
    if kind == "ul":
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
    if kind == "h":
        levels = [(len(line) - len(line.lstrip("#")), line.lstrip("# ")) for line in lines]
        return "\n".join(heading(_inline(text), level) for level, text in levels)
    return paragraph(_inline(" ".join(lines)))


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner)]


def _inline(text: str) -> Html:
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return Html(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escaped))
