"""The texts of every command: `golden/COMMAND.txt` lists commands with all that they print.

`pytest tests/cli/test_golden.py --renew` writes the files again, after a look at the difference.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from grapnet.cli._main import commands

from .conftest import Ran

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))
# What depends on the machine, or on the version of torch: times, and sizes of files.
VARYING = (
    r"\d{4}-\d\d-\d\d \d\d:\d\d",
    r"[\d,]+(?= bytes)",
    r"(?<=compact: )[\d,]+",
    r"(?<=\d )\d+\.\d\d|(?<=sparse |family )\d+\.\d\d|(?<=reference )\d+\.\d\d",
    r"(?<=bytes of the file).*",
    r"(?m)(?<=^  values ).*|(?<=^  wiring ).*|(?<=^  journal).*|(?<=^  model ).*|(?<=^  extras ).*",
)


def without_varying(text: str) -> str:
    """Returns a text with all digits that vary replaced by a sign."""
    text = re.sub(r"(?<=inputs: )[\d.e+-]+", "(rounding)", text)
    # Other tests register activations of their own.
    text = re.sub(r"(?<=known are ).*", "(activations)", text)
    for pattern in VARYING:
        text = re.sub(pattern, lambda found: re.sub(r"\d", "#", found[0]), text)
    return text


def record(run: Callable[..., Ran], lines: list[str]) -> str:
    """Returns command lines with what they print and their exit codes."""
    parts = []
    for line in lines:
        ran = run(*shlex.split(line.removeprefix("$ grapnet")))
        parts.append(f"{line}\n{ran.out}{ran.err}[exit {ran.code}]\n")
    return without_varying("\n".join(parts))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_command_prints_what_its_golden_file_has(
    path: Path, run: Callable[..., Ran], pytestconfig: pytest.Config
) -> None:
    expected = path.read_text(encoding="utf-8")
    lines = [line for line in expected.splitlines() if line.startswith("$ grapnet")]
    printed = record(run, lines)
    if pytestconfig.getoption("--renew", default=False):
        path.write_text(printed, encoding="utf-8")
    else:
        assert printed == expected


def test_every_command_has_a_golden_file() -> None:
    elsewhere = {"demo", "doctor", "tune"}  # they print what differs from machine to machine
    assert {path.stem for path in GOLDEN} == {"main", *commands()} - elsewhere
