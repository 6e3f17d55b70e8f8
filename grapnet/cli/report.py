"""`grapnet report`: every result that is there beside the paper's figures, with pass or fail."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import Command, CommandError, Outcome
from .files import require_free, writing
from .study import OUT, studies_named

if TYPE_CHECKING:
    from grapnet.studies.tables import Report

# results of this machine come before those that came with the code
FOLDERS = (
    OUT,
    Path("results"),
)


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "studies", nargs="*", metavar="NAME", help="of a study; all when none is named"
    )
    parser.add_argument(
        "--results",
        type=Path,
        action="append",
        metavar="FOLDER",
        help=(
            "where results lie; given twice, the first comes first (default:"
            f" {', then '.join(map(str, FOLDERS))})"
        ),
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write everything there as one page"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write everything there as Markdown"
    )
    parser.add_argument(
        "--force", action="store_true", help="write over these files if they are there"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if a bar was missed or a result is not there"
    )


def _run(given: argparse.Namespace) -> Outcome:
    from grapnet.studies.tables import markdown, report

    names = studies_named(given.studies or ["all"])
    for path in (given.html, given.markdown):
        if path is not None:
            require_free(path, force=given.force)
    if given.html is not None and given.html == given.markdown:
        raise CommandError(f"--html and --markdown are both {given.html}", "name two files")
    folders = tuple(given.results or FOLDERS)
    reports = [report(name, *folders) for name in names]
    if not any(one.path for one in reports):
        asked = names[0] if given.studies else "NAME"
        raise CommandError(
            f"there is no result in {' or '.join(map(str, folders))}",
            f"grapnet study {asked} makes one in {OUT}; --results FOLDER looks elsewhere",
        )
    texts = {
        given.markdown: markdown(reports, sources=True),
        given.html: _page(reports) if given.html else "",
    }
    for path, text in texts.items():
        if path is not None:
            with writing(path, force=given.force) as partial:
                partial.write_text(text, encoding="utf-8")
    written = [str(path) for path in (given.markdown, given.html) if path is not None]
    missed = any(one.problems or one.missed for one in reports)
    data = {"studies": {one.name: _data(one) for one in reports}, "written": written}
    return Outcome(_text(reports, written), data, int(given.check and missed))


def _page(reports: Sequence["Report"]) -> str:
    """Returns the page; with the studies' own plots where matplotlib is there."""
    from grapnet.studies.page import page
    from grapnet.studies.tables import markdown

    plots = importlib.util.find_spec("matplotlib") is not None
    return page(
        markdown(reports, pictures=True, plots=plots, sources=True),
        "GrapNet: the paper's figures beside ours",
    )


def _data(one: "Report") -> dict[str, Any]:
    from grapnet.studies.tables import counts

    agree, of, without = counts(one)
    return {
        "title": one.artefact.title,
        "file": one.path and str(one.path),
        "figures": {"met": agree, "published intervals": of, "without one": without},
        "problems": one.problems,
        "missed": one.missed,
        "passed over": list(one.passed_over),
    }


def _text(reports: Sequence["Report"], written: Sequence[str]) -> str:
    """Returns one line a study, what each misses, and where it was read and written."""
    rows = [("study", "published intervals met", "bars", "from")]
    lines = []
    for one in reports:
        found = _data(one)
        count = len(one.problems) + len(one.missed)
        bars = "no result" if one.path is None else f"{count} missed" if count else "all reached"
        met = (
            "–"
            if one.path is None
            else f"{found['figures']['met']} of {found['figures']['published intervals']}"
        )
        rows.append((one.name, met, bars, str(one.path or "–")))
        lines += [
            f"MISSED {one.name}: {line}" for line in (one.problems + one.missed if one.path else ())
        ]
        lines += [f"passed over {line}" for line in one.passed_over]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if absent := [one.name for one in reports if one.path is None]:
        lines.append(f"MISSED no result: {', '.join(absent)}; grapnet study NAME makes one")
    reached = sum(one.path is not None and not one.problems and not one.missed for one in reports)
    table += ["", f"{reached} of {len(reports)} reach every bar."]
    return "\n".join(
        [*table, *([""] if lines else []), *lines, *(f"Written: {path}" for path in written)]
    )


COMMANDS = (
    Command(
        "report",
        "set all results beside the paper's tables, with pass or fail",
        "The paper's studies",
        _configure,
        _run,
        (
            "report",
            "report --check --html runs/report.html",
            "report localization --results results",
        ),
    ),
)
