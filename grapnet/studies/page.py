"""Markdown as the studies write it, as one HTML page that needs no other file."""

import html
import itertools
import re
from collections.abc import Sequence

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8886; --soft: #8881; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
p, li {{ overflow-wrap: break-word; }}
h2 {{ margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; }}
.wide {{ overflow-x: auto; margin: 1rem 0; }}
table {{ border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left; }}
th {{ background: var(--soft); }}
svg {{ display: block; width: 100%; min-width: 36rem; max-width: 50rem; height: auto; font-size: 13px; }}
svg.plot {{ background: #fff; color: #000; border-radius: 4px; }}
.right {{ text-align: right; white-space: nowrap; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
_STARTS = {"|": "table", "- ": "ul", "#": "h", "<svg": "svg"}


def page(markdown: str, title: str) -> str:
    """Returns the page: headings, paragraphs, lists and tables, with bold and code inside of them, and pictures.

    Pictures are lines that begin with `<svg`, which stay as they are; everything else is escaped.

    Examples:
        >>> "<td class=right>1 &lt; 2</td>" in page("| a | b |\\n|---|---:|\\n| **x** | 1 < 2 |", "t")
        True
    """
    blocks = [_block(kind, list(lines)) for kind, lines in itertools.groupby(markdown.splitlines(), _kind) if kind]
    return _PAGE.format(title=html.escape(title), body="\n".join(blocks))


def _kind(line: str) -> str:
    """Returns what a line belongs to: "" for an empty one, "p" where nothing says otherwise."""
    if not line.strip():
        return ""
    return next((kind for start, kind in _STARTS.items() if line.startswith(start)), "p")


def _block(kind: str, lines: Sequence[str]) -> str:
    if kind == "table":
        return _table([_cells(line) for line in lines])
    if kind == "svg":
        return "\n".join(f'<div class="wide">{line}</div>' for line in lines)
    if kind == "ul":
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
    if kind == "h":
        levels = [(len(line) - len(line.lstrip("#")), line.lstrip("# ")) for line in lines]
        return "\n".join(f"<h{level}>{_inline(text)}</h{level}>" for level, text in levels)
    return f"<p>{_inline(' '.join(lines))}</p>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table from its titles, the line that says which columns stand right, and its rows."""
    right = [" class=right" if mark.endswith(":") else "" for mark in rows[1]]
    made = []
    for cells, tag in zip((rows[0], *rows[2:]), ("th", *("td" for _ in rows[2:])), strict=True):
        inner = (f"<{tag}{kind}>{_inline(cell)}</{tag}>" for kind, cell in zip(right, cells, strict=True))
        made.append(f"<tr>{''.join(inner)}</tr>")
    return '<div class="wide"><table>\n' + "\n".join(made) + "\n</table></div>"


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner)]


def _inline(text: str) -> str:
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escaped)
