"""`grapnet demo`: see within a minute what an editable network is."""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

import torch

from .command import Command, CommandError, Outcome


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds where to write and how long to take."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        metavar="FOLDER",
        help="where to write (default: runs/demo)",
    )
    parser.add_argument(
        "--fast", action="store_true", help="fewer images, updates and seeds: a few seconds"
    )


def run(given: argparse.Namespace) -> Outcome:
    """Runs the demonstration; the code is 1 when something that it claims did not hold."""
    from grapnet.demo.display import Display
    from grapnet.demo.heads import FAST, Settings
    from grapnet.demo.run import CHECKPOINT
    from grapnet.demo.run import run as run_demo
    from grapnet.demo.words import summary

    for folder in (given.out, *given.out.parents):
        if folder.exists() and not folder.is_dir():
            raise CommandError(
                f"{folder} is a file, not a folder", "name a folder to write into: --out FOLDER"
            )
    threads = torch.get_num_threads()
    if given.threads is None:
        torch.set_num_threads(1)  # nets this small run faster on one
    try:
        with Display(sys.stderr) as display:
            settings = FAST if given.fast else Settings()
            numbers = run_demo(
                settings, given.out, seed=given.seed, device=given.device, display=display
            )
    finally:
        torch.set_num_threads(threads)
    text = (
        f"{summary(numbers)}\nnext: {called()} inspect {shlex.quote(str(given.out / CHECKPOINT))}"
    )
    return Outcome(text, numbers, code=0 if all(numbers["checks"].values()) else 1)


def called() -> str:
    """Returns how the shell calls this command line from here: `grapnet`, or by its path where that
    is not found.

    A virtual environment that is not activated has its `grapnet` beside the interpreter that runs.
    """
    beside, found = Path(sys.executable).with_name("grapnet"), shutil.which("grapnet")
    if found and os.path.realpath(found) == os.path.realpath(beside):
        return "grapnet"
    called, module = (beside, "") if beside.exists() else (Path(sys.executable), " -m grapnet")
    here = called.relative_to(Path.cwd()) if called.is_relative_to(Path.cwd()) else called
    return f"{shlex.quote(str(here))}{module}"


COMMANDS: tuple[Command, ...] = (
    Command(
        name="demo",
        about="grow, cut, undo, freeze, sift and save a digit classifier, and write a report",
        group="See what it is",
        configure=configure,
        run=run,
        examples=("demo", "demo --fast --out /tmp/demo", "demo --seed 7 --json"),
    ),
)
