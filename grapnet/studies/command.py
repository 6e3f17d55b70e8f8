"""The command that every study is: seeds over processes, resumed where they stopped, one JSON, a table and a check."""

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import grapnet as gn

from .drawing import Draw, drawn, picture_path, save


@dataclass(frozen=True)
class Study:
    """One artefact of the paper.

    Attributes:
        name: of the study and of its JSON.
        settings: of a full run: a frozen dataclass with `seeds` among its fields.
        fast: of a run that shows in seconds that everything works.
        one_seed: computes the numbers of one seed, as plain data; a function of a module, for processes to import.
        summarise: computes what the table shows from the numbers by seed, as plain data.
        table: sets the result beside the paper's, as Markdown.
        missed: returns one line for every bar that a result misses.
        draw: draws a result, as its JSON has it, into axes of matplotlib; see `drawing` for the usual forms.
    """

    name: str
    settings: Any
    fast: Any
    one_seed: Callable[[Any, int], dict[str, Any]]
    summarise: Callable[[Any, dict[int, dict[str, Any]]], dict[str, Any]]
    table: Callable[[dict[str, Any]], str]
    missed: Callable[[dict[str, Any]], list[str]]
    draw: Draw


def run(study: Study, settings: Any, *, processes: int = 1, folder: Path | None = None) -> dict[str, Any]:
    """Returns the result of a study: settings, versions, seconds, the numbers of every seed, and their summary.

    Args:
        study: which.
        settings: of this run.
        processes: how many seeds run at a time, each on one thread.
        folder: where finished seeds are kept; those of the same settings and versions are not run again.
    """
    versions = {
        "grapnet": gn.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    kept = None if folder is None else folder / study.name / _fingerprint(asdict(settings), versions)
    found = {} if kept is None else {seed: _read(kept / f"{seed}.json") for seed in settings.seeds}
    found = {seed: numbers for seed, numbers in found.items() if numbers is not None}
    start, waiting = time.perf_counter(), [seed for seed in settings.seeds if seed not in found]
    for seed, numbers in _computed(study, settings, waiting, processes):
        found[seed] = numbers
        if kept is not None:
            _write(kept / f"{seed}.json", numbers)
        print(f"{study.name}: seed {seed} done, {len(found)} of {len(settings.seeds)}", file=sys.stderr, flush=True)
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


def main(study: Study, arguments: Sequence[str] | None = None) -> int:
    """Runs a study from the command line; with --check the exit code says whether every bar was reached."""
    parser = options(study.name, study.settings.__doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="seeds at a time")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="keep finished seeds there, and go on from them")
    given = parser.parse_args(arguments)
    settings = study.fast if given.fast else study.settings

    def made() -> dict[str, Any]:
        return run(study, settings, processes=given.processes, folder=given.resume)

    return told(study.name, given, made, table=study.table, missed=study.missed, draw=study.draw)


def options(name: str, about: str | None) -> argparse.ArgumentParser:
    """Returns the parser of what every study's command understands."""
    parser = argparse.ArgumentParser(prog=f"python -m grapnet.studies.{name}", description=about)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--fast", action="store_true", help="show in seconds that it works; reaches no bar")
    source.add_argument("--from", dest="source", type=Path, metavar="FILE", help="run nothing, read that result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--plot", type=picture_path, metavar="FILE", help="draw it there, as .png or .svg")
    parser.add_argument("--check", action="store_true", help="exit 1 and name each bar that was missed")
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
    """Makes or reads a result, prints and writes what the options ask for, and returns the exit code.

    It is 1 when --check found a missed bar, and 2 when --from names a file that is no result of this study.
    """
    if given.source is not None and given.json is not None:
        print("--from runs nothing, so there is nothing for --json to write", file=sys.stderr)
        return 2
    try:
        result = made() if given.source is None else _recalled(name, given.source)
        if given.json:
            _write(given.json, result)
        text, lines = table(result), missed(result) if given.check else []
        print(text)
        figure = drawn(draw, result) if given.plot else None
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        if given.source is None:
            raise
        kind = "" if isinstance(error, OSError) or type(error) is ValueError else f"{type(error).__name__}: "
        print(f"{given.source} is no result of {name} that can be read: {kind}{error}", file=sys.stderr)
        return 2
    if figure is not None:
        save(figure, given.plot)
    for line in lines:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if lines else 0


def _recalled(name: str, path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text())
    study = result.get("study") if isinstance(result, dict) else None
    if study != name:
        raise ValueError(f"it is one of {study}" if isinstance(study, str) else "it does not say of which study it is")
    return result


def _computed(study: Study, settings: Any, seeds: Sequence[int], processes: int) -> Any:
    """Yields (seed, numbers) as they are done."""
    one = functools.partial(_on_one_thread, study.one_seed, settings)
    if min(processes, len(seeds)) <= 1:
        yield from ((seed, one(seed)) for seed in seeds)
        return
    with ProcessPoolExecutor(min(processes, len(seeds)), multiprocessing.get_context("spawn")) as pool:
        running, failed = {pool.submit(one, seed): seed for seed in seeds}, []
        for done in as_completed(running):
            if done.exception() is None:
                yield running[done], done.result()
            else:
                failed.append(done)
    for done in failed[:1]:  # once what the others found is kept
        done.result()


def _on_one_thread(one_seed: Callable[[Any, int], dict[str, Any]], settings: Any, seed: int) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return json.loads(json.dumps(one_seed(settings, seed)))
    finally:
        torch.set_num_threads(before)


def _fingerprint(settings: dict[str, Any], versions: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([settings, versions], sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)
