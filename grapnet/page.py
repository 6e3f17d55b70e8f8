"""HTML of reports: one page that needs no other file, read on a light and a dark ground and in a
narrow window.
"""

import base64
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

NARROW = "max-width: 36rem"  # of the window: up to there pictures have a form of their own
STYLE = f"""
:root {{ color-scheme: light dark; --ground: #ffffff; --ink: #1f2328; --soft: #59636e;
  --line: #d1d9e0;
  --box: #f6f8fa; --accent: #0072b2; --fallen: #d55e00; --shade: #0004; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ground: #14171c; --ink: #e6e8eb; --soft: #9aa4af;
  --line: #343b44;
  --box: #1c2128; --accent: #56b4e9; --fallen: #e69f00; --shade: #fff4; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 3rem; background: var(--ground);
  color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }}
h1 {{ font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; }}
h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .4rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }}
h3 {{ font-size: 1rem; margin: 1.5rem 0 .4rem; }}
p, figcaption {{ margin: .5rem 0; max-width: 52rem; }}
.soft, figcaption {{ color: var(--soft); font-size: .9rem; }}
code {{ font-size: .9em; }}
.wide {{ overflow-x: auto; margin: .8rem 0; background:
  linear-gradient(to right, var(--ground) 40%, transparent) left / 2.5rem 100% no-repeat local,
  linear-gradient(to left, var(--ground) 40%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / .9rem 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / .9rem 100% no-repeat scroll; }}
table {{ border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left; }}
th {{ color: var(--soft); font-weight: 600; vertical-align: bottom; }}
.right {{ text-align: right; }} td.right:not(:has(span)), td span {{ white-space: nowrap; }}
.fallen {{ color: var(--fallen); }}
figure {{ margin: 1rem 0; }} img {{ display: block; max-width: 100%; height: auto; }}
svg {{ display: block; width: 100%; max-width: 26rem; height: auto; font-size: 13px; }}
/* matplotlib's white grounds would hide the shadows of their box, and shine on a dark page */
.plot [id=patch_1] path, .plot [id=patch_2] path {{ fill: none !important; }}
@media (prefers-color-scheme: dark) {{ svg.plot {{ filter: invert(.92) hue-rotate(180deg); }} }}
.facts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr));
  gap: .7rem;
  margin: 1.2rem 0; max-width: 52rem; }}
.facts div {{ background: var(--box); border: 1px solid var(--line); border-radius: .5rem;
  padding: .6rem .8rem; }}
.facts b {{ display: block; font-size: 1.3rem; line-height: 1.3; }}
.facts span {{ color: var(--soft); font-size: .85rem; }}
.bar {{ display: inline-block; width: 7rem; height: .7rem; margin-right: .5rem;
  background: var(--line); }}
.bar i {{ display: block; height: 100%; background: var(--accent); }}
.fallen .bar i {{ background: var(--fallen); }}
ul.checks {{ list-style: none; padding: 0; }}
ul.checks li {{ padding-left: 1.6rem; text-indent: -1.6rem; }}
@media ({NARROW}) {{
  table {{ font-size: .78rem; line-height: 1.35; }} th, td {{ padding-right: .5rem; }}
  th {{ font-size: .72rem; }}
  td:first-child {{ min-width: 3.6rem; }}
  table:has(th:nth-child(7)) :is(th, td) {{ font-size: .68rem; padding-right: .3rem; }}
  img {{ width: 100%; }} .bar {{ display: block; width: 4rem; }}
  .facts {{ grid-template-columns: 1fr 1fr; }} .facts b {{ font-size: 1.05rem; }}
}}
"""


class Html(str):
    """Text that is HTML already; every other text is escaped."""


class Picture(NamedTuple):
    """A picture as PNG, for a light and a dark page, and for windows that are too narrow for it."""

    light: bytes
    dark: bytes
    narrow_light: bytes
    narrow_dark: bytes


def page(title: str, parts: Iterable[str]) -> str:
    """Returns the whole page."""
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    """Returns the heading of a section."""
    return f"<h{level}>{_escaped(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """Returns a paragraph."""
    return f"<p{f' class={kind}' if kind else ''}>{_escaped(text)}</p>"


def wide(content: str) -> str:
    """Returns a box that scrolls by itself where the window is too narrow, with a shadow where
    there is more of it.
    """
    return f'<div class="wide">{content}</div>'


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[int] = (),
    fallen: int = -1,
) -> str:
    """Returns a table in a box of its own.

    Args:
        titles: of the columns.
        rows: their cells.
        right: which columns hold numbers.
        fallen: which row stands out.

    Examples:
        >>> "<td class=right>&lt;2</td>" in table(["a", "b"], [["x", "<2"]], right=[1])
        True
    """
    sides, lines = set(right), []
    for number, cells in enumerate([titles, *rows]):
        tag, inner = "td" if number else "th", ""
        for n, cell in enumerate(cells):
            side = " class=right" if n in sides else ""
            inner += f"<{tag}{side}>{_cell(cell, right=n in sides)}</{tag}>"
        lines.append(f"<tr{' class=fallen' if number - 1 == fallen else ''}>{inner}</tr>")
    return wide("<table>\n" + "\n".join(lines) + "\n</table>")


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns boxes with one number each and what it is."""
    boxes = "".join(
        f"<div><b>{_escaped(number)}</b><span>{_escaped(what)}</span></div>"
        for number, what in pairs
    )
    return f'<div class="facts">{boxes}</div>'


def bar(share: float) -> Html:
    """Returns a bar with its per cent, for a cell of a table."""
    return Html(
        f'<span class="bar"><i style="width:{100 * share:.1f}%"></i></span>{100 * share:.1f}'
    )


def figure(picture: Picture, caption: str) -> str:
    """Returns a picture that follows the theme and the width of the reader's window."""
    light, dark, narrow, narrow_dark = (
        f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in picture
    )
    is_dark = "(prefers-color-scheme: dark)"
    sources = {f"{is_dark} and ({NARROW})": narrow_dark, f"({NARROW})": narrow, is_dark: dark}
    # a PNG has its width there, in dots
    width = round(0.7 * int.from_bytes(picture.light[16:20], "big"))
    return (
        "<figure><picture>"
        + "".join(f'<source media="{media}" srcset="{png}">' for media, png in sources.items())
        + f'<img src="{light}" width="{width}" alt="{html.escape(caption)}"></picture>'
        + f"<figcaption>{_escaped(caption)}</figcaption></figure>"
    )


def checked(claims: Mapping[str, bool]) -> str:
    """Returns a list of claims, each with a sign whether it held."""
    items = (
        f"<li>{'✓' if held else '✗ NOT:'} {_escaped(claim)}</li>" for claim, held in claims.items()
    )
    return f'<ul class="checks">{"".join(items)}</ul>'


def _cell(text: str, *, right: bool) -> str:
    """Returns a cell; the lines of one that holds numbers break between them but never inside of
    one.
    """
    found = _escaped(text)
    if "<" in found or not (right or re.search(r"\d ± |\de-\d", found)):
        return found
    pieces = re.split(r"(?<!±) (?!=)", found)
    return " ".join(f"<span>{piece}</span>" for piece in pieces) if len(pieces) > 1 else found


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(text, quote=False)
