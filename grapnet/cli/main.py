"""`grapnet`: finds the command, gives it what all commands share, and prints its outcome or one clear error."""

import argparse
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

import grapnet as gn
from grapnet.data import MissingDataError

from .command import Command, CommandError, Outcome

GROUPS = {  # heading -> modules of this folder, each with one or more COMMANDS
    "See what it is": ("demo", "doctor"),
    "Look at a net": ("inspect", "history", "plot"),
    "Change a net": ("edit",),
    "Bring a net elsewhere": ("export", "convert"),
    "The paper's studies": ("study", "report"),
}
FAILED, WRONG, INTERRUPTED = 1, 2, 130  # exit codes: of an answer that is no, of what cannot be done, of Ctrl-C
TRACEBACK = "GRAPNET_TRACEBACK"  # in the environment: errors that nobody expects show where they come from
EXPECTED = (gn.GrapNetError, MissingDataError, ImportError, OSError)  # told in one line; all else is a bug


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # so that no name of a node ends a command half-way
    known = commands()
    whole = parser(known)
    if not (sys.argv[1:] if arguments is None else arguments):
        whole.print_help()
        return WRONG
    given = whole.parse_args(arguments)
    try:
        _prepare(given)
        outcome = known[given.command].run(given)
        _tell(outcome, as_json=given.json)
    except KeyboardInterrupt:
        print("grapnet: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the end of Python writes nowhere
        return INTERRUPTED
    except CommandError as error:
        return _refuse(str(error), error.hint or _hint(error, given.command))
    except EXPECTED as error:
        return _refuse(_one_line(error), _hint(error, given.command))
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        told = f"{type(error).__name__}: {_one_line(error)}"
        return _refuse(told, f"{TRACEBACK}=1 shows where; if what you gave it is sound, this is a bug")
    return outcome.code


def commands() -> dict[str, Command]:
    """Returns every command by name, in the order of `GROUPS`."""
    modules = [importlib.import_module(f"grapnet.cli.{name}") for names in GROUPS.values() for name in names]
    return {command.name: command for module in modules for command in module.COMMANDS}


def parser(known: dict[str, Command]) -> argparse.ArgumentParser:
    """Returns the parser of all commands; its help is a table of contents."""
    listed = []
    for group in GROUPS:
        found = [command for command in known.values() if command.group == group]
        listed += ["", f"{group}:", *(f"  {command.name:<10} {command.about}" for command in found)] if found else []
    whole = _Parser(
        prog="grapnet",
        usage="grapnet COMMAND [options]",
        description="Neural networks whose structure is data you can edit while they train.",
        epilog="\n".join([*listed[1:], "", "grapnet COMMAND --help tells its options and shows examples."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"grapnet {gn.__version__}")
    parts = whole.add_subparsers(
        prog="grapnet", dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for command in known.values():
        shown = "\n".join(f"  grapnet {line}" for line in command.examples)
        part = parts.add_parser(
            command.name,
            description=command.about,
            epilog=f"examples:\n{shown}" if shown else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.configure(part)
        _add_shared(part)
    return whole


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line and a hint, like everything else here."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(_refuse(message, f"{self.prog} --help tells what it takes"))


def _add_shared(part: argparse.ArgumentParser) -> None:
    shared = part.add_argument_group("of every command")
    shared.add_argument("--json", action="store_true", help="print the outcome as JSON on standard output")
    shared.add_argument("--seed", type=int, default=0, metavar="N", help="of all random numbers (default: 0)")
    shared.add_argument(
        "--device", default="cpu", metavar="NAME", help="where to compute: cpu, cuda, cuda:1 (default: cpu)"
    )
    shared.add_argument("--threads", type=int, metavar="N", help="for computing on the CPU (default: what torch takes)")


def _prepare(given: argparse.Namespace) -> None:
    """Checks and puts into effect what all commands share."""
    if given.threads is not None and given.threads < 1:
        raise CommandError(
            f"--threads is a whole number, at least 1, got {given.threads}", "leave it out for what torch takes"
        )
    if not 0 <= given.seed < 2**63:
        raise CommandError(f"--seed lies between 0 and 2^63 - 1, got {given.seed}", "leave it out for 0")
    has = "grapnet doctor says what this machine has"
    try:
        device = torch.empty(0, device=given.device).device
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device {given.device} cannot be used: {_one_line(error)}", has) from None
    if device.type == "meta":
        raise CommandError("--device meta cannot be used: it holds no numbers", has)
    given.device = device
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)


def _tell(outcome: Outcome, *, as_json: bool) -> None:
    if sys.stdout is None:  # closed by the shell: >&-
        return
    try:
        print(json.dumps(outcome.data, indent=1, allow_nan=False) if as_json else outcome.text)
        sys.stdout.flush()  # so that a reader who has left is noticed here
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"standard output cannot be written ({error.strerror}); the work itself was done") from None


def _refuse(message: str, hint: str) -> int:
    if sys.stderr is not None:
        print(f"grapnet: {_printable(message)}", file=sys.stderr)
        print(f"hint: {_printable(hint)}", file=sys.stderr)
    return WRONG


def _printable(text: str) -> str:
    """Returns a text whose control characters, but for the ends of lines of a list, are written out."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _hint(error: BaseException, command: str) -> str:
    """Returns what to do about an error that does not say so itself, or of which only the first line is told."""
    if isinstance(error, MissingDataError):
        return "grapnet doctor lists the folders that were looked at, and what provides the data"
    if isinstance(error, ImportError):
        return "grapnet doctor lists what is installed and what is not"
    return f"grapnet {command} --help tells what it takes"


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    raise SystemExit(main())
