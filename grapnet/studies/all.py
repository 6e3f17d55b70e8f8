"""Every study of the package, and the command that runs them one after the other.

`python -m grapnet.studies.all --fast` shows in seconds that all of them work; without --fast it
makes the results.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import command, tiny_transformer
from .drawing import Draw

NAMES = (  # in the order of the paper
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


@dataclass(frozen=True)
class Registered:
    """What a study offers to those who run or read all of them.

    Attributes:
        name: of its module and of its JSON.
        about: what it does, in one line.
        settings: of a full run, as its JSON has them.
        table: sets a result beside the paper's, as Markdown.
        missed: returns one line for every bar that a result misses.
        draw: draws a result into axes of matplotlib.
        run: writes its JSON and prints its table; gets whether to be fast, the file, and what the
            command passes on.
        made: returns a result; gets whether to be fast, how many seeds to run (None: all) and what
            `command.run` takes.
    """

    name: str
    about: str
    settings: dict[str, Any]
    table: Callable[[dict[str, Any]], str]
    missed: Callable[[dict[str, Any]], list[str]]
    draw: Draw
    run: Callable[[bool, Path | None, Sequence[str]], int]
    made: Callable[..., dict[str, Any]]


def registered(name: str) -> Registered:
    """Returns a study by name."""
    if name not in NAMES:
        raise ValueError(f"there is no study {name!r}; there are {', '.join(NAMES)}")
    if name == "tiny_transformer":
        return _TINY_TRANSFORMER
    study: command.Study = importlib.import_module(f"grapnet.studies.{name}").STUDY

    def run(fast: bool, path: Path | None, arguments: Sequence[str]) -> int:
        written = [] if path is None else ["--json", str(path)]
        return command.main(study, [*(["--fast"] if fast else []), *written, *arguments])

    def made(fast: bool, seeds: int | None = None, **how: Any) -> dict[str, Any]:
        return command.run(
            study, command.with_seeds(study.fast if fast else study.settings, seeds), **how
        )

    about, settings = _summary(study.settings), _as_read(study.settings)
    return Registered(name, about, settings, study.table, study.missed, study.draw, run, made)


def _run_tiny_transformer(fast: bool, path: Path | None, arguments: Sequence[str]) -> int:
    """Runs the one study that has no seeds, so that nothing can be resumed or spread over
    processes.
    """
    written = [] if path is None else ["--json", str(path)]
    drawn = arguments[arguments.index("--plot") :][:2] if "--plot" in arguments else []
    return tiny_transformer.main([*(["--fast"] if fast else []), *written, *drawn])


def _made_tiny_transformer(fast: bool, seeds: int | None = None, **how: Any) -> dict[str, Any]:
    """Makes the result of the one study that has no seeds; `how` finds nothing to spread, keep or
    follow.
    """
    settings = tiny_transformer.FAST if fast else tiny_transformer.Settings()
    return json.loads(json.dumps(tiny_transformer.run(settings)))


def _summary(documented: Any) -> str:
    paragraph = (documented.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(paragraph.split())


def _as_read(settings: Any) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(settings)))


_TINY_TRANSFORMER = Registered(
    "tiny_transformer",
    _summary(tiny_transformer),
    _as_read(tiny_transformer.Settings()),
    tiny_transformer.table,
    tiny_transformer.missed,
    tiny_transformer.draw,
    _run_tiny_transformer,
    _made_tiny_transformer,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the studies one after the other and says how long each took; see --help."""
    return command.as_command("all", lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grapnet.studies.all", description=__doc__)
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help=f"all when none is named: {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--fast", action="store_true", help="show in seconds that they work, in this one process"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="write one JSON a study there"
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw one SVG a study there")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="seeds at a time"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="keep finished seeds there, and go on from them",
    )
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.studies if name not in NAMES]:
        parser.error(f"there is no study {unknown[0]!r}; there are {', '.join(NAMES)}")
    passed_on = ["--processes", "1" if given.fast else str(given.processes)]
    passed_on += [] if given.resume is None else ["--resume", str(given.resume)]
    start = time.perf_counter()
    for name in given.studies or NAMES:
        begun = time.perf_counter()
        print(f"\n## {name}\n", flush=True)
        drawn = [] if given.plots is None else ["--plot", str(given.plots / f"{name}.svg")]
        path = given.results and given.results / f"{name}.json"
        if registered(name).run(given.fast, path, [*passed_on, *drawn]) == command.INTERRUPTED:
            return command.INTERRUPTED
        print(f"{name}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    print(f"all: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
