"""The report of the demonstration: chapters with tables, checks and code, as text and HTML."""

from __future__ import annotations

import base64
import html
import inspect
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import grapnet as gn

from ._command import Cell, shown, table

SHORT = 12  # lines of code that the page shows unfolded
# What to read next.
GUIDES = (
    ("Prune a model of your own without training", "guides/one-shot.md"),
    ("Prune while training", "guides/prune.md"),
    ("Edit a whole model: channels, heads, blocks", "guides/whole-models.md"),
    ("Rules that prune, rewire and grow while a model trains", "guides/rules.md"),
    ("Save, resume, undo", "guides/save-resume-undo.md"),
    ("Export plain modules for serving", "guides/deploy.md"),
)

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GrapNet: the demonstration</title>
<style>
:root { color-scheme: light dark; --ground: #fff; --card: #f4f6f8; --ink: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --bar: #bfe0f5; --good: #1a7f37; --bad: #cf222e; --link: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --card: #1d222a; --ink: #e6e8eb;
  --soft: #9aa4b0; --line: #39424e; --bar: #1d4a68; --good: #4ac26b; --bad: #ff7a70;
  --link: #6cb6ff; } }
* { box-sizing: border-box; }
body { max-width: 80rem; margin: 0 auto; padding: 1.5rem; font: 16px/1.5 system-ui, sans-serif;
  background: var(--ground); color: var(--ink); }
h1 { line-height: 1.2; margin: 0 0 .5rem; }
h2 { line-height: 1.25; margin: 0 0 .5rem; }
p { margin: 0 0 .75rem; }
a { color: var(--link); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 1rem;
  margin: 1.25rem 0; }
.tiles div { background: var(--card); border-radius: .5rem; padding: .75rem;
  color: var(--soft); font-size: .9rem; }
.tiles b { display: block; font-size: 1.2rem; white-space: nowrap; color: var(--ink); }
section { display: grid; grid-template-columns: minmax(0, 1fr); gap: .5rem 2.5rem;
  border-top: 1px solid var(--line); padding: 1.5rem 0; }
@media (min-width: 60rem) { section { grid-template-columns: minmax(0, 5fr) minmax(0, 6fr); } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 600; vertical-align: bottom; color: var(--soft); font-size: .9rem; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child, .words { text-align: left; }
td.number, td.share { white-space: nowrap; }
td.share { background: linear-gradient(var(--bar) 0 0) no-repeat left / var(--share) 70%; }
ul.checks { list-style: none; padding: 0; margin: 0 0 .75rem; }
.checks li { padding-left: 1.5rem; text-indent: -1.5rem; }
.checks b { display: inline-block; width: 1.5rem; text-indent: 0; color: var(--good); }
.checks .failed b { color: var(--bad); }
details { margin-top: .75rem; }
summary { cursor: pointer; color: var(--link); }
pre { overflow-x: auto; background: var(--card); border-radius: .5rem; padding: .75rem 1rem;
  font-size: .85rem; line-height: 1.45; margin: .5rem 0 0; }
.wrapped { white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: 1rem 0 0; }
img { width: 100%; height: auto; border-radius: .5rem; }
figcaption { color: var(--soft); font-size: .9rem; }
@media (max-width: 30rem) { body { padding: 1rem; } th, td { padding: .3rem .25rem; }
  table { font-size: .85rem; } th { font-size: .8rem; } .tiles { gap: .75rem; }
  .tiles b { font-size: 1.1rem; } }
</style>
</head>
<body>
<h1>A network that is edited while it learns</h1>
<p>$opening</p>
<p>Every number was measured in this run, $seconds s on $machine, and every claim is a check that
can fail.</p>
<div class="tiles">$tiles</div>
$chapters
<section><div><h2>What to try next</h2><ul>$next</ul></div>
<div><p>With the file of this run:</p><pre class="wrapped">$commands</pre></div></section>
</body>
</html>
""")


@dataclass
class Chapter:
    """One thing that is done to the net.

    Attributes:
        title: its title.
        text: what is done.
        rows: a table: what each row has under each title of a column.
        code: the function that does it; None if there is none worth reading.
        numbers: further numbers of `demo.json`.
        checks: what must hold, and whether it did.
        tiles: numbers for the top of the page, by what they mean.
        picture: HTML of a picture, or nothing.
    """

    title: str
    text: str
    rows: Mapping[str, Mapping[str, Cell]]
    code: Callable[..., Any] | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)
    tiles: dict[str, str] = field(default_factory=dict)
    picture: str = ""

    def lines(self) -> list[str]:
        """Returns it for a terminal."""
        titles = list(next(iter(self.rows.values())))
        cells = [[label, *row.values()] for label, row in self.rows.items()]
        marked = [f"  {_mark(held)} {claim}" for claim, held in self.checks.items()]
        return [self.title, *textwrap.wrap(self.text, 98), *table(["", *titles], cells), *marked]

    def html(self, number: int) -> str:
        """Returns it for the page: words on the left, table and code on the right."""
        left = [f"<h2>{number}. {_escaped(self.title)}</h2>", f"<p>{_escaped(self.text)}</p>"]
        left.append('<ul class="checks">')
        for claim, held in self.checks.items():
            kind = "held" if held else "failed"
            left.append(f'<li class="{kind}"><b>{_mark(held)}</b>{_escaped(claim)}</li>')
        left.append("</ul>")
        left.append(self.picture)
        right = ['<div class="scroll"><table>', "<tr><th></th>"]
        for title, cell in next(iter(self.rows.values())).items():
            right.append(f'<th class="{_kind(cell)}">{_escaped(title)}</th>')
        for label, row in self.rows.items():
            right.append(f"</tr><tr><td>{_escaped(label)}</td>")
            right += [_html_cell(cell) for cell in row.values()]
        right.append("</tr></table></div>")
        if self.code is not None:
            right.append(_folded(self.code))
        return f"<section><div>{''.join(left)}</div><div>{''.join(right)}</div></section>"


def draw(net: gn.GrapNet, folder: Path, caption: str) -> str:
    """Returns HTML with a picture of a net, for light and for dark screens."""
    from matplotlib.figure import Figure

    from grapnet import plot

    sources = {}
    for theme in ("light", "dark"):
        with plot.theme(theme):
            axes = plot.graph(net, ax=Figure((5.5, 4), layout="constrained").subplots())
            axes.set_title("")  # it is the caption
            path = plot.save(axes, folder / f"graph-{theme}.png")
        data = base64.b64encode(path.read_bytes()).decode()
        sources[theme] = f"data:image/png;base64,{data}"
    return (
        '<figure><picture><source media="(prefers-color-scheme: dark)"'
        f' srcset="{sources["dark"]}"><img src="{sources["light"]}" alt="">'
        f"</picture><figcaption>{_escaped(caption)}</figcaption></figure>"
    )


def write(
    folder: Path,
    opening: str,
    chapters: Sequence[Chapter],
    data: Mapping[str, Any],
    commands: Sequence[str],
) -> None:
    """Writes `report.html`, which proposes commands at its end, and `demo.json`."""
    checks = data["checks"].values()
    tiles = {}
    for chapter in chapters:
        tiles |= chapter.tiles
    tiles["checks held"] = f"{sum(checks)} of {len(checks)}"
    shown_tiles = []
    for meaning, number in tiles.items():
        shown_tiles.append(f"<div><b>{_escaped(number)}</b>{_escaped(meaning)}</div>")
    page = PAGE.substitute(
        opening=_escaped(opening),
        seconds=f"{data['seconds']:.0f}",
        machine=f"{os.cpu_count()} cores",
        tiles="".join(shown_tiles),
        chapters="\n".join(chapter.html(n) for n, chapter in enumerate(chapters, 1)),
        next=_guides(folder),
        commands=html.escape("\n".join(commands)),
    )
    (folder / "report.html").write_text(page, encoding="utf-8")
    text = json.dumps(data, indent=1, allow_nan=False)
    (folder / "demo.json").write_text(text + "\n", encoding="utf-8")


def _guides(folder: Path) -> str:
    """Returns links to the documentation beside the library, or the names of its pages."""
    documents = Path(__file__).resolve().parents[2] / "docs"
    items = []
    for title, name in GUIDES:
        item = f"{title}: docs/{name}"
        if (documents / name).is_file():
            place = os.path.relpath(documents / name, folder.resolve())
            item = f'<a href="{html.escape(Path(place).as_posix())}">{title}</a>'
        items.append(f"<li>{item}</li>")
    return "".join(items)


def _mark(held: bool) -> str:
    return "✓" if held else "✗"


def _escaped(text: str) -> str:
    """Returns HTML in which a number and its unit stay on one line."""
    return re.sub(r"(?<=\d) (?=[%×]|→|kB|bytes|µs|points|s )", "\u00a0", html.escape(text))


def _folded(code: Callable[..., Any]) -> str:
    """Returns the body of a function that has a docstring; a long one is folded."""
    body = textwrap.dedent(inspect.getsource(code).split('"""', 2)[2]).strip()
    is_open = " open" if body.count("\n") < SHORT else ""
    source = html.escape(body)
    return f"<details{is_open}><summary>The code</summary><pre>{source}</pre></details>"


def _kind(cell: Cell) -> str:
    """Returns the class of a cell in the page."""
    if isinstance(cell, float):
        return "share"
    if isinstance(cell, str) and not cell[:1].isdigit():
        return "words"
    return "number"


def _html_cell(cell: Cell) -> str:
    """Returns a cell of a table; a share has a bar behind it."""
    bar = ""
    if isinstance(cell, float):
        bar = f' style="--share: {cell:.1%}"'
    return f'<td class="{_kind(cell)}"{bar}>{_escaped(shown(cell))}</td>'
