"""The command that every study is: seeds over processes, resumed where they stopped, one JSON, a
table and a check.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import grapnet as gn
from grapnet._atomic import atomic_write
from grapnet.plot import save
from grapnet.progress import Progress
from grapnet.streams import open_streams

from .drawing import Draw, drawn, picture_path
from .interrupts import held_back
from .workers import computed

INTERRUPTED = 130  # the exit code of Ctrl-C


@dataclass(frozen=True)
class Study:
    """One artefact of the paper.

    Attributes:
        name: of the study and of its JSON.
        settings: of a full run: a frozen dataclass with `seeds` among its fields.
        fast: of a run that shows in seconds that everything works.
        one_seed: computes the numbers of one seed, as plain data; a function of a module, for
            processes to import.
        summarise: computes what the table shows from the numbers by seed, as plain data.
        table: sets the result beside the paper's, as Markdown.
        missed: returns one line for every bar that a result misses.
        draw: draws a result, as its JSON has it, into axes of matplotlib; see `drawing` for the
            usual forms.
    """

    name: str
    settings: Any
    fast: Any
    one_seed: Callable[[Any, int], dict[str, Any]]
    summarise: Callable[[Any, dict[int, dict[str, Any]]], dict[str, Any]]
    table: Callable[[dict[str, Any]], str]
    missed: Callable[[dict[str, Any]], list[str]]
    draw: Draw


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while seeds were running; it says what is kept and how to go on."""


def run(
    study: Study,
    settings: Any,
    *,
    processes: int = 1,
    folder: Path | None = None,
    fresh: bool = False,
    log: Path | None = None,
    tensorboard: Path | None = None,
) -> dict[str, Any]:
    """Returns the result of a study: settings, versions, seconds, the numbers of every seed, and
    their summary.

    Args:
        study: which.
        settings: of this run.
        processes: how many seeds run at a time, each on one thread.
        folder: where finished seeds are kept; those of the same settings and versions are not run
            again.
        fresh: whether those that are kept are removed first.
        log: a file to which every finished seed appends a line of JSON.
        tensorboard: a folder for TensorBoard, where every number of a seed is a curve over the
            finished seeds.

    Raises:
        Interrupted: on Ctrl-C, once the processes have ended.
    """
    versions = present_versions()
    kept = (
        None if folder is None else folder / study.name / _fingerprint(asdict(settings), versions)
    )
    if kept is not None and fresh:
        _remove(kept)
    found = (
        {}
        if kept is None
        else {seed: _read(kept / f"{seed}.json", study.name, seed) for seed in settings.seeds}
    )
    found = {seed: numbers for seed, numbers in found.items() if numbers is not None}
    start, waiting = time.perf_counter(), [seed for seed in settings.seeds if seed not in found]
    several = min(processes, len(waiting))
    try:
        with Progress(
            len(settings.seeds), study.name, log=log, tensorboard=tensorboard, workers=several
        ) as progress:
            progress.skip(len(found), f"{len(found)} of them kept in {folder}")
            for seed, numbers in computed(study.one_seed, settings, waiting, processes):
                with held_back():
                    if kept is not None:
                        write_json(
                            kept / f"{seed}.json",
                            {"study": study.name, "seed": seed, "numbers": numbers},
                        )
                    found[seed] = numbers
                    progress.advance(
                        note=f"seed {seed} done", values={"seed": seed, **_numbers(numbers)}
                    )
    except KeyboardInterrupt:
        told = f"{study.name}: interrupted after {len(found)} of {len(settings.seeds)} seeds"
        raise Interrupted(f"{told}, {_how_to_go_on(folder, fresh=fresh)}") from None
    ordered = {seed: found[seed] for seed in settings.seeds}
    result = {
        "study": study.name,
        "settings": asdict(settings),
        "versions": versions,
        "seconds": round(time.perf_counter() - start, 1),
        "summary": study.summarise(settings, ordered),
        "seeds": ordered,
    }
    return json.loads(json.dumps(result))  # as a reader of the file has it


def present_versions() -> dict[str, str]:
    """Returns what a result was made with."""
    return {
        "grapnet": gn.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def forget(result: dict[str, Any], folder: Path) -> None:
    """Removes the finished seeds of a result, once it is written down; those of other settings
    stay.
    """
    _remove(folder / result["study"] / _fingerprint(result["settings"], result["versions"]))


def with_seeds(settings: Any, count: int | None) -> Any:
    """Returns the settings with the first `count` of their seeds, at least two, without which
    nothing has a spread.
    """
    if count is None:
        return settings
    if count < 2:
        raise ValueError(
            f"a study needs at least 2 seeds, without which nothing has a spread, got {count}"
        )
    return replace(settings, seeds=settings.seeds[:count])


def seeds_missed(wanted: Sequence[int], result: dict[str, Any]) -> list[str]:
    """Returns a line where a result has fewer seeds than a full run: whatever it shows, it reaches
    no bar.

    Args:
        wanted: the seeds of a full run.
        result: as its JSON has it.
    """
    count = len(result["settings"].get("seeds", wanted))
    return (
        []
        if count >= len(wanted)
        else [f"seeds: {count} of {len(wanted)}; the bars are for all of them"]
    )


def as_command(name: str, work: Callable[[], int]) -> int:
    """Does the work of a command and returns its exit code; on Ctrl-C it says so in one line and
    returns `INTERRUPTED`.

    Standard output and error take whatever the work writes to them, in any encoding.
    """
    open_streams()
    try:
        return work()
    except KeyboardInterrupt as interrupted:
        print(str(interrupted) or f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def main(study: Study, arguments: Sequence[str] | None = None) -> int:
    """Runs a study from the command line; with --check the exit code says whether every bar was
    reached.
    """
    return as_command(study.name, lambda: _main(study, arguments))


def _main(study: Study, arguments: Sequence[str] | None) -> int:
    parser = options(study.name, study.settings.__doc__)
    parser.add_argument(
        "--seeds", type=_seed_count, metavar="N", help="only the first N seeds; reaches no bar"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="seeds at a time"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="keep finished seeds there, and go on from them",
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="append a line of JSON there for every seed"
    )
    parser.add_argument(
        "--tensorboard", type=Path, metavar="FOLDER", help="write the numbers of the seeds there"
    )
    given = parser.parse_args(arguments)
    settings = with_seeds(study.fast if given.fast else study.settings, given.seeds)

    def made() -> dict[str, Any]:
        how = {"processes": given.processes, "folder": given.resume, "log": given.log}
        return run(study, settings, tensorboard=given.tensorboard, **how)

    wanted = study.settings.seeds

    def table(result: dict[str, Any]) -> str:
        return "\n\n".join(
            [study.table(result), *(f"MISSED {line}." for line in seeds_missed(wanted, result))]
        )

    def missed(result: dict[str, Any]) -> list[str]:
        return [*seeds_missed(wanted, result), *study.missed(result)]

    return told(study.name, given, made, table=table, missed=missed, draw=study.draw)


def options(name: str, about: str | None) -> argparse.ArgumentParser:
    """Returns the parser of what every study's command understands."""
    parser = argparse.ArgumentParser(prog=f"python -m grapnet.studies.{name}", description=about)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--fast", action="store_true", help="show in seconds that it works; reaches no bar"
    )
    source.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="run nothing, read that result"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--plot", type=picture_path, metavar="FILE", help="draw it there, as .png, .svg or .pdf"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 and name each bar that was missed"
    )
    return parser


def told(
    name: str,
    given: argparse.Namespace,
    made: Callable[[], dict[str, Any]],
    *,
    table: Callable[[dict[str, Any]], str],
    missed: Callable[[dict[str, Any]], list[str]],
    draw: Draw,
) -> int:
    """Makes or reads a result, prints and writes what the options ask for, and returns the exit
    code.

    It is 1 when --check found a missed bar, and 2 when --from names a file that is no result of
    this study.
    """
    if given.source is not None and given.json is not None:
        print("--from runs nothing, so there is nothing for --json to write", file=sys.stderr)
        return 2
    try:
        with _judging(name, given.source):
            result = made() if given.source is None else _recalled(name, given.source)
            if given.json:
                write_json(given.json, result)
            text, lines = table(result), missed(result) if given.check else []
        print(text)
        with _judging(name, given.source):
            figure = drawn(draw, result) if given.plot else None
    except _NoResultError as error:
        print(error, file=sys.stderr)
        return 2
    if figure is not None:
        given.plot.parent.mkdir(parents=True, exist_ok=True)
        save(figure, given.plot)
    for line in lines:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if lines else 0


class _NoResultError(Exception):
    """A file is no result of a study that can be read."""


@contextmanager
def _judging(name: str, source: Path | None) -> Iterator[None]:
    """Makes _NoResultError of what goes wrong inside, where a file is read; what is made here fails
    as it does.
    """
    try:
        yield
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        if source is None:
            raise
        kind = (
            ""
            if isinstance(error, OSError) or type(error) is ValueError
            else f"{type(error).__name__}: "
        )
        raise _NoResultError(
            f"{source} is no result of {name} that can be read: {kind}{error}"
        ) from None


def _recalled(name: str, path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text(encoding="utf-8"))
    study = result.get("study") if isinstance(result, dict) else None
    if study != name:
        raise ValueError(
            f"it is one of {study}"
            if isinstance(study, str)
            else "it does not say of which study it is"
        )
    return result


def _seed_count(text: str) -> int:
    count = int(text)
    if count < 2:
        raise argparse.ArgumentTypeError(
            f"at least 2, without which nothing has a spread, got {count}"
        )
    return count


def _how_to_go_on(folder: Path | None, *, fresh: bool) -> str:
    if folder is None:
        return "and none is kept; --resume FOLDER keeps them"
    return (
        f"kept in {folder}; the same command{' without --fresh' if fresh else ''} goes on from them"
    )


def _numbers(found: Any, inside: str = "") -> dict[str, float]:
    """Returns every single number of a seed by its path.

    Examples:
        >>> _numbers({"rows": {"dense": {"seen": 51.0, "name": "d"}}, "pair": [1, 2]})
        {'rows/dense/seen': 51.0}
    """
    flat = {}
    for key, value in found.items():
        if isinstance(value, dict):
            flat |= _numbers(value, f"{inside}{key}/")
        elif isinstance(value, int | float):
            flat[f"{inside}{key}"] = value
    return flat


def _fingerprint(settings: dict[str, Any], versions: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([settings, versions], sort_keys=True).encode()).hexdigest()[
        :16
    ]


def _remove(kept: Path) -> None:
    """Removes the files of one run's seeds, and the folders that are empty then."""
    for path in kept.glob("*.json"):
        path.unlink()
    for folder in (kept, *kept.parents[:2]):  # of the settings, of the study, of all studies
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _read(path: Path, study: str, seed: int) -> dict[str, Any] | None:
    """Returns the numbers of a seed that is kept; None where there are none, or something else was
    written there.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or (found.get("study"), found.get("seed")) != (study, seed):
        return None
    numbers = found.get("numbers")
    return numbers if isinstance(numbers, dict) and numbers else None


def write_json(path: Path, content: Any) -> None:
    """Writes a file of JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file of text, whole or not at all, in UTF-8 whatever the machine prefers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")
