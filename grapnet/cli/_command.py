"""What the commands share: outcomes and errors, tables, and the files they read and write."""

import argparse
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grapnet as gn
from grapnet._atomic import atomic_write

if TYPE_CHECKING:
    from torch import Tensor

    from grapnet.checkpoint import Archive
    from grapnet.spaces import Adopted

WIDTH = 100  # characters of a line
_LONGEST = 32  # characters of a text in a column that others follow
_NUMBER = re.compile(r"([+−-]?[\d,.]+(e[+-]\d+)?( %)? ?)+|[–-]|")

Cell = int | float | str | None


@dataclass(frozen=True)
class Outcome:
    """What a command found.

    Attributes:
        text: for people, on standard output.
        data: the same as plain data, which `--json` prints instead.
        code: the exit code: 0, or 1 if the command ran and the answer is no.
    """

    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    code: int = 0


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: what follows `grapnet`.
        about: what it does, in one line of `grapnet --help`.
        group: the heading of `grapnet --help` that lists it.
        configure: adds its own options to its parser.
        run: runs it; raises `CommandError`, or an error of the library, before it changes anything.
        examples: lines of its --help, without `grapnet`.
    """

    name: str
    about: str
    group: str
    configure: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], Outcome]
    examples: tuple[str, ...] = ()


class CommandError(Exception):
    """A command is impossible; nothing has changed.

    Args:
        message: what is wrong, in one line.
        hint: what to do about it, in one line.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def table(
    titles: Sequence[str], rows: Sequence[Sequence[Cell]], *, longest: int = _LONGEST
) -> list[str]:
    """Returns lines of aligned columns, none wider than `WIDTH`.

    Whole numbers are counts and get thousands separators; other numbers are shares and are shown in
    per cent; None is a dash. Numbers are right-aligned; a last column of texts is wrapped, others
    are shortened to `longest` characters. A column of zeros and empty texts is omitted.

    Examples:
        >>> rows = [["hidden", 12345, 0.5], ["output", 10, None]]
        >>> print(*table(["layer", "nodes", "frozen"], rows), sep="\\n")
          layer    nodes  frozen
          hidden  12,345  50.0 %
          output      10       –
    """
    columns: list[list[str]] = []
    for number, title in enumerate(titles):
        cells = [shown(row[number]) for row in rows]
        if number < len(titles) - 1:
            cells = [_shortened(cell, longest) for cell in cells]
        if any(row[number] not in (0, "") for row in rows):
            columns.append(_aligned(title, cells))
    lines = []
    for *first, last in zip(*columns, strict=True):
        start = "  " + "".join(f"{cell}  " for cell in first)
        line = (start + last).rstrip()
        if len(line) <= WIDTH:
            lines.append(line)
            continue
        lines += textwrap.wrap(
            last,
            max(WIDTH, len(start) + 20),
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_on_hyphens=False,
        )
    return lines


def table_of(rows: Sequence[Mapping[str, Any]], *, longest: int = _LONGEST) -> list[str]:
    """Returns a table of data, whose keys are the titles."""
    titles = [key.replace("_", " ") for key in rows[0]]
    return table(titles, [list(row.values()) for row in rows], longest=longest)


def shown(cell: Cell) -> str:
    """Returns a cell of a table as text."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return " ".join(cell.split())
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{100 * cell:.1f} %"


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    return text[: longest - 1] + "…"


def _aligned(title: str, cells: list[str]) -> list[str]:
    width = max(map(len, [title, *cells]))
    if all(_NUMBER.fullmatch(cell) for cell in cells):
        return [cell.rjust(width) for cell in [title, *cells]]
    return [cell.ljust(width) for cell in [title, *cells]]


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun.

    Examples:
        >>> counted(1, "relation"), counted(1200, "relation")
        ('1 relation', '1,200 relations')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def few(names: Iterable[str], most: int = 12) -> str:
    """Returns the first names of many, with commas between them."""
    listed = list(names)
    if len(listed) > most:
        listed[most:] = ["…"]
    return ", ".join(listed)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class without one."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def plain(value: Any) -> Any:
    """Returns data as JSON can hold it: tensors and arrays as lists, None for NaN and infinity."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int | float | str | None):
        return value
    return str(value)


def positive(text: str) -> int:
    """Reads a whole number on the command line that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def add_file(
    parser: argparse.ArgumentParser,
    name: str = "file",
    about: str = "a checkpoint that gn.save wrote",
) -> None:
    """Adds a file to read to the arguments."""
    parser.add_argument(name, type=Path, metavar=name.upper(), help=about)


def add_output(parser: argparse.ArgumentParser, about: str) -> None:
    """Adds where to write to the options."""
    parser.add_argument("-o", "--output", type=Path, metavar="NEW", help=about)
    parser.add_argument("--force", action="store_true", help="replace NEW if it exists")


def add_place(parser: argparse.ArgumentParser) -> None:
    """Adds the choice of one net of a model to the options."""
    parser.add_argument("--net", metavar="PLACE", help="which net of a model that has several")


def open_file(path: Path) -> "Archive":
    """Returns a checkpoint; raises CommandError if it cannot be read."""
    try:
        file = gn.open(path)
        # Nets are made and checked on first access.
        _ = graphs_of(file)
    except FileNotFoundError:
        raise CommandError(
            f"{path}: no such file", "gn.save(path, net) writes one; grapnet demo writes runs/demo/"
        ) from None
    except gn.errors.CheckpointError as error:
        raise CommandError(
            f"{path}: {first_line(error).partition('. ')[0]}",
            "use an earlier file; for the plain weights of an MLP:"
            f" grapnet convert {shlex.quote(str(path))}",
        ) from None
    return file


def graphs_of(file: "Archive") -> "Mapping[str, gn.GrapNet | Adopted]":
    """Returns the nets of a file by place, or its adopted model."""
    if file.is_adopted:
        return {"": file.adopted}
    return file.nets


def place_of(file: "Archive", wanted: str | None) -> str:
    """Returns the place of the net that `--net` names, or of the only one without it."""
    places = list(graphs_of(file))
    if wanted is None and len(places) == 1:
        return places[0]
    listed = few(repr(place) for place in places)
    if wanted is None:
        raise CommandError(f"this file holds {len(places)} nets", f"choose with --net: {listed}")
    if wanted not in places:
        raise CommandError(f"--net {wanted}: no such net", f"the nets of this file are: {listed}")
    return wanted


def title(place: str, graph: object = None) -> str:
    """Returns the name of a net, or of an adopted model, in texts."""
    if hasattr(graph, "spaces"):
        return "model"
    if place:
        return f"net at {place!r}"
    return "net"


def largest_difference(output: "Tensor", expected: "Tensor") -> float:
    """Returns the largest |difference| between two outputs.

    Raises:
        CommandError: they differ by more than rounding explains.
    """
    import torch

    wanted = expected.double()
    largest = float((output.double() - wanted).abs().max())
    limit = torch.finfo(expected.dtype).eps ** 0.5 * (1 + float(wanted.abs().max()))
    if not largest <= limit:
        raise CommandError(
            f"the outputs differ by {largest:.3g}, more than rounding explains; nothing was written"
        )
    return largest


def require_free(path: Path, *, force: bool) -> None:
    """Raises CommandError, before any work, if a file cannot be written."""
    if path.exists() and not force:
        raise _exists(path)
    if not path.parent.is_dir():
        raise CommandError(f"{path.parent}: no such folder", f"mkdir -p {path.parent}")


@contextmanager
def writing(path: Path, *, force: bool) -> Iterator[Path]:
    """Yields a path to write to, and renames the file to `path` when the block succeeds.

    Raises:
        CommandError: another program has written `path` meanwhile, and `force` is False.
    """
    try:
        with atomic_write(path, replace=force) as partial:
            yield partial
    except FileExistsError:
        raise _exists(path) from None


def _exists(path: Path) -> CommandError:
    return CommandError(f"{path} exists already", "choose another name, or write over it: --force")
