"""Runs the studies: settings, then seeds, then one JSON, then Markdown beside the paper.

    python -m studies.run --fast                            # all of them, in seconds
    python -m studies.run localization --results results    # one in full, and its JSON
    python -m studies.run --read results --check            # every result, and the bars it misses

A study is a module of this folder with
- `Settings`, a frozen dataclass with a comment for each field, `seeds` among them, and `FAST`,
  settings that show in seconds that it works;
- `one_seed(settings, seed)`, the numbers of one seed as plain data;
- `summarise(settings, seeds)`, what the tables show, from the numbers by seed;
- `table(result)`, the result beside the paper as Markdown;
- `missed(result)`, one line for every bar that the result misses.

Where one seed takes long, `stages(settings)` and `one_part(settings, seed, part, found)` stand for
`one_seed`: lists of names of parts, of which each stage waits for the one before, and the numbers
of one part, given those of the earlier stages of its seed. Finished parts are kept, too.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import joblib
import numpy as np
import torch
from tqdm import tqdm

import grapnet as gn

from .paper import Artefact, Figure, published
from .statistics import paired, summary

STUDIES = (  # in the order of the paper
    "localization",
    "split_fashion",
    "closed_form",
    "closed_form_further",
    "split_cifar",
    "tabular",
    "execution_audit",
    "attention_audit",
    "mlp_equivalence",
    "one_vs_rest",
    "sifter",
    "tiny_transformer",
)
# not of the paper, and run only if named
FURTHER = (
    "sifter_shares",
    "closed_form_features",
    "prune_cifar",
    "rigl_cifar",
    "heads_and_layers",
    "growth",
    "one_shot",
    "one_shot_gpt",
)
CACHE = Path("build/studies")
INTERRUPTED = 130  # the exit code of Ctrl-C
PLACES = ("features",)  # settings that say where a machine keeps its data
MEANING = (
    "Ours is mean ± standard deviation over the seeds, with the 95 % confidence interval of the"
    " mean (Student's t); of rounding errors it is the largest. The published interval is the"
    " paper's confidence interval where it prints one, one of its standard deviations to either"
    " side of its mean where it prints that, the number itself for counts and zeros, and at most"
    " the number for rounding errors. A figure passes when ours lies in it."
)

Result = dict[str, Any]  # what the JSON of a study holds


def study(name: str) -> Any:
    """Returns the module of a study."""
    return importlib.import_module(f"studies.{name}")


def run(
    name: str,
    settings: Any = None,
    *,
    jobs: int | None = None,
    cache: Path | None = None,
    earlier: Result | None = None,
) -> Result:
    """Returns the result of a study, as its JSON holds it.

    Seeds run through `joblib.Parallel`, so `joblib.parallel_config` chooses where: processes of
    this machine by default, or a cluster through the back ends of dask and ray.

    Args:
        name: of the study.
        settings: of this run; those of a full run by default.
        jobs: how many seeds, or parts of seeds, run at a time, each on one thread; None leaves it
            to joblib.
        cache: a folder that keeps finished seeds, so that a run which was interrupted goes on with
            the others. Settings and versions tell them apart, not the code of a study.
        earlier: a result whose seeds are kept, so that only the others run.

    Raises:
        ValueError: the earlier result was made with other settings or versions.
    """
    if settings is None:
        settings = study(name).Settings()
    versions = {
        "grapnet": gn.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    memory = joblib.Memory(cache, verbose=0)
    start = time.perf_counter()
    result = {"study": name, "settings": asdict(settings), "versions": versions}
    seeds = getattr(settings, "seeds", (None,))
    by_seed: dict[Any, Any] = {}
    seconds = 0.0
    if earlier is not None:
        by_seed = _kept_seeds(earlier, _as_read(result), seeds)
        seconds = earlier["seconds"]
    missing = tuple(seed for seed in seeds if seed not in by_seed)
    if hasattr(study(name), "stages"):
        found = _staged(name, replace(settings, seeds=missing), versions, jobs, memory)
    else:
        compute = memory.cache(_numbers)
        calls = [joblib.delayed(compute)(name, settings, seed, versions) for seed in missing]
        found = _parallel(calls, name, "seeds", jobs)
    seconds = round(seconds + time.perf_counter() - start, 1)
    if seeds == (None,):
        return _as_read(result | found[0])
    by_seed.update(zip(missing, found, strict=True))
    by_seed = {seed: by_seed[seed] for seed in seeds}
    numbers = {"summary": study(name).summarise(settings, by_seed), "seeds": by_seed}
    return _as_read(result | {"seconds": seconds} | numbers)


def _kept_seeds(earlier: Result, wanted: Result, seeds: Sequence[Any]) -> dict[Any, Any]:
    """Returns the numbers of the seeds that an earlier result has."""
    found = differences(
        {**wanted["settings"], "versions": wanted["versions"], "seeds": None},
        {**earlier["settings"], "versions": earlier["versions"], "seeds": None},
    )
    if found:
        raise ValueError(f"the earlier result was made with other settings: {', '.join(found)}")
    return {seed: earlier["seeds"][str(seed)] for seed in seeds if str(seed) in earlier["seeds"]}


def _parallel(calls: Sequence[Any], name: str, unit: str, jobs: int | None) -> Any:
    """Returns what the calls return."""
    # Calls leave the list when they start, so the bar counts those that have started.
    waiting = tqdm(calls, name, unit=f" {unit} started")
    return joblib.Parallel(n_jobs=jobs, pre_dispatch="n_jobs")(waiting)


def _staged(
    name: str, settings: Any, versions: dict[str, str], jobs: int | None, memory: joblib.Memory
) -> list[dict[str, Any]]:
    """Returns the numbers of every seed by the names of its parts."""
    compute = memory.cache(_part)
    found: dict[int, dict[str, Any]] = {seed: {} for seed in settings.seeds}
    for stage in study(name).stages(settings):
        units = [(seed, part) for seed in settings.seeds for part in stage]
        calls = []
        for seed, part in units:
            # The other seeds do not tell parts apart, so that a run of more seeds has those of
            # fewer.
            alone = replace(settings, seeds=(seed,))
            calls.append(joblib.delayed(compute)(name, alone, part, dict(found[seed]), versions))
        numbers = _parallel(calls, name, "parts", jobs)
        for (seed, part), one in zip(units, numbers, strict=True):
            found[seed][part] = one
    return list(found.values())


def _part(
    name: str, settings: Any, part: str, found: dict[str, Any], versions: dict[str, str]
) -> Any:
    """Returns the numbers of one part of the only seed; see `_numbers`."""
    with _one_thread():
        return _as_read(study(name).one_part(settings, settings.seeds[0], part, found))


def _numbers(name: str, settings: Any, seed: int | None, versions: dict[str, str]) -> Any:
    """Returns the numbers of one seed; `versions` only tells cached ones apart."""
    with _one_thread():
        return _as_read(study(name).one_seed(settings, seed))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _as_read(content: Any) -> Any:
    return json.loads(json.dumps(content))


class Row(NamedTuple):
    """A published figure with ours: values by seed, and whether it agrees with the paper."""

    figure: Figure
    values: list[float]
    ours: float
    agrees: bool | None  # None: the paper prints no interval


@dataclass(frozen=True)
class Report:
    """What the result of one study shows.

    Attributes:
        name: of the study.
        artefact: of the paper.
        rows: the published figures with ours.
        table: the study's own, with its controls; empty without a result.
        problems: why the result cannot stand: missing, or made with other settings.
        missed: one line for every bar that it misses.
    """

    name: str
    artefact: Artefact
    rows: list[Row]
    table: str
    problems: list[str]
    missed: list[str]

    def counts(self) -> tuple[int, int, int]:
        """Returns how many figures meet the published interval, have one, and have none."""
        judged = [row.agrees for row in self.rows if row.agrees is not None]
        return sum(judged), len(judged), len(self.rows) - len(judged)


def recorded(folder: Path) -> list[str]:
    """Returns the studies that a folder of results is judged by: those of the paper, and others
    once they have a result there.
    """
    others = [name for name in FURTHER if (folder / f"{name}.json").exists()]
    return [*STUDIES, *others]


def report(name: str, folder: Path) -> Report:
    """Reads the result of a study in a folder and judges it."""
    path = folder / f"{name}.json"
    if not path.exists():
        problem = f"{path} is missing. Make it: python -m studies.run {name} --results {folder}"
        return Report(name, published(name), [], "", [problem], [])
    return report_of(json.loads(path.read_text(encoding="utf-8")))


def report_of(result: Result) -> Report:
    """Judges a result; only one with the settings of a full run is set beside the paper."""
    name = result["study"]
    artefact = published(name)
    module = study(name)
    problems = []
    rows = []
    other = differences(_as_read(asdict(module.Settings())), result["settings"])
    if other:
        problems.append(f"made with other settings: {', '.join(other)}")
    else:
        seeds = [result]
        if "seeds" in result:
            seeds = list(result["seeds"].values())
        rows = [judged(figure, seeds) for figure in artefact.figures.values()]
    return Report(name, artefact, rows, module.table(result), problems, module.missed(result))


def judged(figure: Figure, seeds: Sequence[dict[str, Any]]) -> Row:
    """Sets the numbers of the seeds beside a published figure."""
    values = [figure.measured(numbers) for numbers in seeds]
    ours = max(values) if figure.largest else fmean(values)
    if figure.published is None:
        return Row(figure, values, ours, None)
    low, high = figure.published
    if figure.exact:
        agrees = all(value == figure.paper for value in values)
    elif figure.largest:
        # The paper prints two digits of a rounding error.
        agrees = float(f"{ours:.1e}") <= high
    else:
        low, mean, high = (round(number, figure.digits) for number in (low, ours, high))
        agrees = low <= mean <= high
    return Row(figure, values, ours, agrees)


def differences(wanted: Result, found: Result, *, inside: str = "") -> list[str]:
    """Returns what of the settings of a result is not as wanted, except where its data lay.

    Examples:
        >>> differences({"seeds": [1, 2], "way": {"lr": 0.1}}, {"seeds": [1], "way": {"lr": 0.2}})
        ['seeds [1] instead of [1, 2]', 'way.lr 0.2 instead of 0.1']
    """
    lines = []
    for key in {**wanted, **found}:
        one = wanted.get(key, "nothing")
        other = found.get(key, "nothing")
        if isinstance(one, dict) and isinstance(other, dict):
            lines += differences(one, other, inside=f"{inside}{key}.")
        elif one != other and (key not in PLACES or "made-up" in (one, other)):
            lines.append(f"{inside}{key} {other} instead of {one}")
    return lines


def markdown(reports: Sequence[Report]) -> str:
    """Returns the paper's figures beside ours, with controls and missed bars, as Markdown."""
    parts = ["# The paper's figures beside ours", MEANING, overview(reports)]
    return "\n\n".join([*parts, *map(section, reports)]) + "\n"


def section(one: Report) -> str:
    """Returns what the result of one study shows, as Markdown."""
    parts = [f"## {one.artefact.title}", f"{one.artefact.words} {_answer(one)}"]
    if one.rows:
        parts.append(_comparison(one.rows))
    if one.table:
        parts += ["### With the controls", one.table]
    lines = [line.replace("|", "\\|") for line in (*one.problems, *one.missed)]
    if lines:
        parts.append("\n".join(f"- **MISSED** {line}" for line in lines))
    return "\n\n".join(parts)


def overview(reports: Sequence[Report]) -> str:
    """Returns one line a study: how many figures came out, and whether its bars were reached."""
    lines = [
        "| study | published intervals met | figures without one | bars |",
        "|---|---:|---:|---|",
    ]
    for one in reports:
        agree, of, without = one.counts()
        count = len(one.problems) + len(one.missed)
        bars = f"{count} missed"
        if not count:
            bars = "all reached"
        elif not one.table:
            bars = "no result"
        lines.append(f"| {one.artefact.title} | {agree} of {of} | {without} | {bars} |")
    return "\n".join(lines)


def _answer(one: Report) -> str:
    if not one.table:
        return "There is no result."
    agree, of, without = one.counts()
    more = f" ({without} more figures have none)" if without else ""
    missed = len(one.problems) + len(one.missed)
    return f"Published intervals met: {agree} of {of}{more}. Bars missed: {missed or 'none'}."


def _comparison(rows: Sequence[Row]) -> str:
    titles = "figure | paper | published interval | ours | 95 % interval | seeds"
    lines = [f"| {titles} | against the paper |", "|---|---:|---:|---:|---:|---:|---|"]
    for row in rows:
        figure = row.figure
        printed = _number(replace(figure, digits=min(figure.digits, 2)), figure.paper)
        if figure.std is not None:
            printed += f" ± {figure.std:.2f}"
        if figure.p is not None:
            printed += f", p = {figure.p:.1e}"
        ours, interval = _ours(row)
        verdict = {True: "pass", False: "**fail**", None: "–"}[row.agrees]
        cells = (figure.name, printed, _interval(figure), ours, interval, f"{len(row.values)}")
        lines.append(f"| {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)


def _ours(row: Row) -> tuple[str, str]:
    """Returns our number with its deviation, and its confidence interval where there is one."""
    figure = row.figure
    shown = _number(figure, row.ours)
    if len(row.values) < 2 or figure.largest or (figure.exact and row.agrees):
        return shown, "–"
    spread = paired(row.values, [0.0] * len(row.values))
    std = summary(row.values, population=figure.population).std
    shown += f" ± {std:.{figure.digits}f}"
    if figure.p is not None:
        shown += f", p = {spread.p:.1e}"
    return shown, f"[{_number(figure, spread.low)}, {_number(figure, spread.high)}]"


def _interval(figure: Figure) -> str:
    if figure.published is None:
        return "–"
    low, high = (_number(figure, bound) for bound in figure.published)
    if figure.largest:
        return f"at most {high}"
    if figure.exact:
        return f"exactly {high}"
    return f"[{low}, {high}]"


def _number(figure: Figure, value: float) -> str:
    if figure.largest:
        return f"{value:.1e}" if value else "0"
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{value + 0.0:,.{figure.digits}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs or reads studies; with --check the exit code is 1 where a bar was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "studies",
        nargs="*",
        metavar="STUDY",
        help=f"by default {', '.join(STUDIES)}; run only if named: {', '.join(FURTHER)}",
    )
    parser.add_argument(
        "--fast", action="store_true", help="show in seconds that it works; reaches no bar"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="only the first N; reaches no bar")
    parser.add_argument("--jobs", type=int, metavar="N", help="seeds at a time; one a core")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="write one JSON a study")
    parser.add_argument(
        "--extend",
        action="store_true",
        help="keep the seeds that --results has, and run the others",
    )
    parser.add_argument(
        "--read",
        type=Path,
        metavar="FOLDER",
        help="run nothing: set the results there beside the paper; by default all that it has",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write what is printed")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar was missed")
    given = parser.parse_args(arguments)
    known = (*STUDIES, *FURTHER)
    if unknown := [name for name in given.studies if name not in known]:
        parser.error(f"there is no study {unknown[0]!r}; there are {', '.join(known)}")
    if given.read:
        reports = [report(name, given.read) for name in given.studies or recorded(given.read)]
        text = markdown(reports)
        print(text, end="")
    else:
        try:
            reports = list(_run_all(given.studies or STUDIES, given))
        except KeyboardInterrupt:
            print(f"interrupted; finished seeds of full runs are in {CACHE}", file=sys.stderr)
            return INTERRUPTED
        text = markdown(reports)
    if given.markdown:
        _write(given.markdown, text)
    if not given.check:
        return 0
    failed = [one for one in reports if one.problems or one.missed]
    for one in failed:
        for line in (*one.problems, *one.missed):
            print(f"MISSED {one.name}: {line}", file=sys.stderr)
    return int(bool(failed))


def _run_all(names: Sequence[str], given: argparse.Namespace) -> Iterator[Report]:
    """Runs studies one after the other, and writes and prints what each found."""
    for name in names:
        module = study(name)
        if given.fast:
            # A fast run takes less time than starting processes.
            settings = module.FAST
            jobs = given.jobs or 1
            cache = None
        else:
            settings = module.Settings()
            jobs = given.jobs or os.cpu_count()
            cache = CACHE
        if given.seeds is not None and hasattr(settings, "seeds"):
            settings = replace(settings, seeds=settings.seeds[: given.seeds])
        path = None
        earlier = None
        if given.results:
            path = given.results / f"{name}.json"
        if given.extend and path is not None and path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
        result = run(name, settings, jobs=jobs, cache=cache, earlier=earlier)
        if path is not None:
            _write(path, json.dumps(result, indent=1) + "\n")
        found = report_of(result)
        print(section(found), end="\n\n", flush=True)
        yield found


def _write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    # The processes of joblib import this module by its name.
    from studies.run import main as imported

    raise SystemExit(imported())
