"""All studies beside the paper: every published figure, ours with its spread and interval, the
controls, the bars.

`python -m grapnet.studies.tables --check` exits 1 and names what the results in results/ miss.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from grapnet.learning import paired, summary

from . import all as studies
from .command import as_command, write_text
from .drawing import drawn
from .figures import Artefact, Figure
from .page import page
from .picture import Bar, inline, picture
from .published import ARTEFACTS

PLACES = ("features",)  # settings that say where a machine keeps its data, not what is done with it
LARGEST = 1e100  # of what a result holds
MEANING = (
    "Ours is mean ± standard deviation over the seeds, with the 95 % confidence interval of the"
    " mean (Student's t); of rounding errors it is the largest. The published interval is the"
    " paper's confidence interval where it prints one, one of its standard deviations to either"
    " side of its mean where it prints that, the number itself for counts and zeros, and at most"
    " the number for rounding errors. A figure passes when ours lies in it."
)
SEEN = (
    "Boxes are the published intervals, strokes the paper's means; dots with whiskers are ours with"
    " 95 % intervals, hollow where the mean lies outside. Every line has its own scale."
)


class Row(NamedTuple):
    """A figure with ours: values by seed, and whether it agrees with the paper (None: there is no
    interval).
    """

    figure: Figure
    values: list[float]
    ours: float
    agrees: bool | None


@dataclass(frozen=True)
class Report:
    """What one study's JSON says.

    Attributes:
        name: of the study.
        artefact: of the paper.
        rows: the published figures with ours.
        table: the study's own, with its control rows; empty without a result.
        problems: why the result cannot stand: missing, made with other settings, without a figure.
        missed: one line for every bar that it misses.
        path: the file; None where there is none.
        result: what is in it, where it can be read.
        passed_over: files of other folders that were left aside for it, each with the reason.
    """

    name: str
    artefact: Artefact
    rows: list[Row]
    table: str
    problems: list[str]
    missed: list[str]
    path: Path | None = None
    result: dict[str, Any] | None = None
    passed_over: tuple[str, ...] = ()


def report(name: str, *folders: Path) -> Report:
    """Reads the result of a study and judges it; whatever is wrong with the file is in the report,
    not raised.

    Args:
        name: of the study.
        folders: where to look, the first one first: a result of other settings than a full run's,
            or one that cannot be read, counts only where no folder has a better one.
    """
    paths = [path for folder in folders if (path := folder / f"{name}.json").exists()]
    if not paths:
        path = folders[0] / f"{name}.json"
        problem = f"{path} is missing. Make it: python -m grapnet.studies.{name} --json {path}"
        return Report(name, ARTEFACTS[name], [], "", [problem], [])
    found = [_judged(name, path) for path in paths]
    chosen = next((one for one in found if not one.problems), found[0])
    reasons = (f"{one.path}: {one.problems[0]}" for one in found[: found.index(chosen)])
    return replace(chosen, passed_over=tuple(reasons))


def _judged(name: str, path: Path) -> Report:
    artefact = ARTEFACTS[name]
    try:
        study, result = studies.registered(name), _read(path)
        other = differences(study.settings, result["settings"])
        problems = [f"made with other settings: {', '.join(other)}"] if other else []
        seeds = list(result["seeds"].values()) if "seeds" in result else [result]
    except (
        ImportError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        return Report(name, artefact, [], "", [f"{path} cannot be read: {_why(error)}"], [], path)
    rows = []
    for figure in artefact.figures:
        try:
            rows.append(_row(figure, seeds))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problems.append(f"{figure.name}: not in the result ({_why(error)})")
    table, lost = _told(study.table, result, "", "table")
    missed, unjudged = _told(study.missed, result, [], "bars")
    return Report(name, artefact, rows, table, problems + lost + unjudged, missed, path, result)


def markdown(
    reports: Sequence[Report], *, pictures: bool = False, plots: bool = False, sources: bool = False
) -> str:
    """Returns everything as one Markdown document.

    Args:
        reports: of the studies, in order.
        pictures: whether lines of SVG show published intervals and ours.
        plots: whether each study's own plot stands in it, as a line of SVG; needs matplotlib.
        sources: whether it says which file each result was read from.
    """
    parts = ["# The paper's figures beside ours", MEANING, _overview(reports)]
    for one in reports:
        parts += [f"## {one.artefact.title}", f"{one.artefact.words} {_answer(one)}"]
        parts += [_comparison(one.rows)] if one.rows else []
        bars = [bar for row in one.rows if (bar := _bar(row)) is not None]
        parts += [SEEN, picture(bars)] if bars and pictures else []
        parts += ["### With the controls", one.table] if one.table else []
        parts += [plot] if plots and (plot := _plot(one)) else []
        parts += [f"Result: {one.path}"] if one.path and sources else []
        lines = [*one.problems, *one.missed]
        parts += ["\n".join(f"- **MISSED** {_cell(line)}" for line in lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def differences(wanted: dict[str, Any], found: dict[str, Any], *, inside: str = "") -> list[str]:
    """Returns what of the settings a result was made with is not as wanted; where a machine keeps
    its data is left out.

    Args:
        wanted: of a full run, as JSON has them.
        found: of the result.
        inside: what to put before every name.

    Examples:
        >>> differences(
        ...     {"seeds": [1, 2], "regime": {"lr": 0.1}}, {"seeds": [1], "regime": {"lr": 0.2}}
        ... )
        ['seeds [1] instead of [1, 2]', 'regime.lr 0.2 instead of 0.1']
    """
    lines = []
    for key in {**wanted, **found}:
        one, other = wanted.get(key, "nothing"), found.get(key, "nothing")
        if isinstance(one, dict) and isinstance(other, dict):
            lines += differences(one, other, inside=f"{inside}{key}.")
        elif one != other and (key not in PLACES or "made-up" in (one, other)):
            lines.append(f"{inside}{key} {other} instead of {one}")
    return lines


def _plot(one: Report) -> str:
    """Returns the plot of a result on one line; nothing where the result is not of the study's
    form.
    """
    if one.result is None:
        return ""
    try:
        return inline(drawn(studies.registered(one.name).draw, one.result))
    except (LookupError, TypeError, ValueError, AttributeError):
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables of all studies; with --check the exit code says whether every bar was
    reached.
    """
    return as_command("tables", lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grapnet.studies.tables", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="FOLDER", help="where the JSON lie"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write them there as one page that needs nothing else",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 and name each bar that was missed"
    )
    given = parser.parse_args(arguments)
    reports = [report(name, given.results) for name in studies.NAMES]
    text = markdown(reports)
    print(text, end="")
    as_page = page(markdown(reports, pictures=True), "GrapNet: the paper's figures beside ours")
    for path, content in ((given.markdown, text), (given.html, as_page)):
        if path is not None:
            write_text(path, content)
    lines = (
        [f"{one.name}: {line}" for one in reports for line in [*one.problems, *one.missed]]
        if given.check
        else []
    )
    for line in lines:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if lines else 0


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"), parse_float=_sound, parse_int=_sound)


def _sound(text: str) -> float | int:
    """Returns a number of a result; raises ValueError for one whose square nothing can compute
    with.
    """
    number = float(text) if set(text) & set(".eE") else int(text)
    if abs(number) > LARGEST:
        raise ValueError(f"{text[:20]} is no number that a study measures")
    return number


def _row(figure: Figure, seeds: Sequence[dict[str, Any]]) -> Row:
    values = [figure.ours(numbers) for numbers in seeds]
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"{values} are no numbers")
    ours = max(values) if figure.largest else math.fsum(values) / len(values)
    if figure.published is None:
        return Row(figure, values, ours, None)
    low, high = figure.published
    if figure.exact:
        return Row(figure, values, ours, all(value == figure.paper for value in values))
    if figure.largest:
        # the paper prints two digits
        return Row(figure, values, ours, float(f"{ours:.1e}") <= high)
    low, mean, high = (round(number, figure.digits) for number in (low, ours, high))
    return Row(figure, values, ours, low <= mean <= high)


def _told(
    tell: Callable[[dict[str, Any]], Any], result: dict[str, Any], nothing: Any, what: str
) -> tuple[Any, Any]:
    """Returns what a study says of a result, and a problem where the result is not of its form."""
    try:
        return tell(result), []
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return nothing, [f"its {what} cannot be made from this result: {_why(error)}"]


def _overview(reports: Sequence[Report]) -> str:
    lines = [
        "| study | published intervals met | figures without one | bars |",
        "|---|---:|---:|---|",
    ]
    for one in reports:
        agree, of, without = counts(one)
        count = len(one.problems) + len(one.missed)
        bars = "all reached" if not count else "no result" if not one.table else f"{count} missed"
        lines.append(f"| {one.artefact.title} | {agree} of {of} | {without} | {bars} |")
    return "\n".join(lines)


def counts(one: Report) -> tuple[int, int, int]:
    """Returns how many figures meet the published interval, how many have one, and how many have
    none.
    """
    judged = [row.agrees for row in one.rows if row.agrees is not None]
    return sum(judged), len(judged), len(one.rows) - len(judged)


def _answer(one: Report) -> str:
    """Says in plain words how the result stands."""
    if not one.table:
        return "There is no result."
    agree, of, without = counts(one)
    missed = len(one.problems) + len(one.missed)
    told = f"Published intervals met: {agree} of {of}" + (
        f" ({without} more figures have none)" if without else ""
    )
    return f"{told}. Bars missed: {missed or 'none'}."


def _comparison(rows: Sequence[Row]) -> str:
    titles = (
        "| figure | paper | published interval | ours | 95 % interval | seeds | against the paper |"
    )
    lines = [titles, "|---|---:|---:|---:|---:|---:|---|"]
    for row in rows:
        figure = row.figure
        printed = [_number(replace(figure, digits=min(figure.digits, 2)), figure.paper)]
        printed += [] if figure.std is None else [f" ± {figure.std:.2f}"]
        printed += [] if figure.p is None else [f", p = {figure.p:.1e}"]
        verdict = {True: "pass", False: "**fail**", None: "–"}[row.agrees]
        cells = (
            figure.name,
            "".join(printed),
            _interval(figure),
            *_ours(row),
            f"{len(row.values)}",
            verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ours(row: Row) -> tuple[str, str]:
    """Returns our number with its deviation, and its confidence interval where there is one."""
    figure, values, shown = row.figure, row.values, _number(row.figure, row.ours)
    if len(values) < 2 or figure.largest or (figure.exact and row.agrees):
        return shown, "–"
    spread = paired(values, [0.0] * len(values))
    std = summary(values, population=figure.population).std
    p = "" if figure.p is None else f", p = {spread.p:.1e}"
    interval = f"[{_number(figure, spread.low)}, {_number(figure, spread.high)}]"
    return f"{shown} ± {std:.{figure.digits}f}{p}", interval


def _bar(row: Row) -> Bar | None:
    """Returns the line of a figure in the picture; None where either side has no interval."""
    figure, n = row.figure, len(row.values)
    if figure.published is None or figure.largest or figure.exact or n < 2:
        return None
    low, high = figure.published
    spread = paired(row.values, [0.0] * n)
    return Bar(
        figure.name,
        (low, figure.paper, high),
        (spread.low, row.ours, spread.high),
        bool(row.agrees),
    )


def _interval(figure: Figure) -> str:
    if figure.published is None:
        return "–"
    low, high = (_number(figure, bound) for bound in figure.published)
    return (
        f"at most {high}"
        if figure.largest
        else f"exactly {high}"
        if figure.exact
        else f"[{low}, {high}]"
    )


def _number(figure: Figure, value: float) -> str:
    if figure.largest:
        return f"{value:.1e}" if value else "0"
    return f"{value + 0.0:,.{figure.digits}f}"


def _cell(line: str) -> str:
    return line.replace("|", "\\|")


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    raise SystemExit(main())
