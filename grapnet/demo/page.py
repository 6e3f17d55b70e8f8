"""HTML of the report: one page that needs no other file, readable on a light and on a dark ground."""

import base64
import html
from collections.abc import Iterable, Sequence

from .pictures import Picture

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --box: #f6f8fa;
  --accent: #0072b2; --fallen: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --ink: #e6e8eb; --soft: #9aa4af; --line: #343b44;
  --box: #1c2128; --accent: #56b4e9; --fallen: #e69f00; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 3rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { margin: .5rem 0; } .soft, figcaption { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } .right { text-align: right; } .fallen { color: var(--fallen); }
figure { margin: 1rem 0; } img { display: block; max-width: 100%; height: auto; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr)); gap: .7rem;
  margin: 1.2rem 0; }
.facts div { background: var(--box); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.facts b { display: block; font-size: 1.3rem; line-height: 1.3; }
.facts span { color: var(--soft); font-size: .85rem; }
.bar { display: inline-block; width: 7rem; height: .7rem; margin-right: .5rem; background: var(--line); }
.bar i { display: block; height: 100%; background: var(--accent); } .fallen .bar i { background: var(--fallen); }
ul.checks { list-style: none; padding: 0; } ul.checks li { padding-left: 1.6rem; text-indent: -1.6rem; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Returns the whole page."""
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    """Returns the heading of a section."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """Returns a paragraph."""
    return f"<p{f' class={kind}' if kind else ''}>{html.escape(text)}</p>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns boxes with one number each and what it is."""
    boxes = "".join(
        f"<div><b>{html.escape(number)}</b><span>{html.escape(what)}</span></div>" for number, what in pairs
    )
    return f'<div class="facts">{boxes}</div>'


def bar(share: float) -> str:
    """Returns a bar with its per cent, as a cell that `table` leaves as it is."""
    return f'<span class="bar"><i style="width:{100 * share:.1f}%"></i></span>{100 * share:.1f}'


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = (), fallen: int = -1) -> str:
    """Returns a table that scrolls by itself where the page is too narrow.

    Args:
        titles: of the columns.
        rows: their cells; those that begin with `<` are HTML already.
        right: which columns hold numbers.
        fallen: which row stands out.
    """
    sides, lines = set(right), []
    for number, cells in enumerate([titles, *rows]):
        tag, inner = "td" if number else "th", ""
        for n, cell in enumerate(cells):
            content = cell if cell.startswith("<") else html.escape(cell)
            inner += f"<{tag}{' class=right' if n in sides else ''}>{content}</{tag}>"
        lines.append(f"<tr{' class=fallen' if number - 1 == fallen else ''}>{inner}</tr>")
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def figure(picture: Picture, caption: str) -> str:
    """Returns a picture that follows the theme of the reader."""
    light, dark = (f"data:image/png;base64,{base64.b64encode(part).decode()}" for part in picture)
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{html.escape(caption)}"></picture>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def checked(claims: dict[str, bool]) -> str:
    """Returns a list of claims, each with a sign whether it held."""
    items = (f"<li>{'✓' if held else '✗ NOT:'} {html.escape(claim)}</li>" for claim, held in claims.items())
    return f'<ul class="checks">{"".join(items)}</ul>'
