"""`grapnet`: finds the command, gives it what all commands share, and prints its outcome or one
clear error.
"""

import argparse
import errno
import importlib
import json
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

import grapnet as gn
from grapnet.streams import abandon_stdout, open_streams, printable

from .command import Command, CommandError, Outcome
from .suggestion import closest

GROUPS = {  # heading -> modules of this folder, each with one or more COMMANDS
    "See what it is": ("demo", "doctor"),
    "Look at a net": ("inspect", "history", "plot"),
    "Change a net": ("edit",),
    "Bring a net elsewhere": ("export", "convert"),
}
# exit codes: of what cannot be done, of Ctrl-C, of SIGTERM
WRONG, INTERRUPTED, TERMINATED = (
    2,
    130,
    143,
)
MOST_THREADS = 1024
TRACEBACK = (  # in the environment: errors that nobody expects show where they come from
    "GRAPNET_TRACEBACK"
)
# told in one line; all else is a bug
EXPECTED = (
    gn.GrapNetError,
    ImportError,
    OSError,
)
_ACCESS = "see who may read and write it and its folder: ls -ld"
_ROOM = (
    "make room, or choose another place; df -h tells what is left there, ulimit -f how large a file"
    " may be"
)
SYSTEM_HINTS = {  # by what the system says about a file
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: "that place can only be read; choose another one",
    errno.ENOSPC: _ROOM,
    errno.EFBIG: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.ENAMETOOLONG: "choose a shorter name",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    open_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    try:
        with _terminable():
            known = commands()
            if not words:
                parser(known).print_help()
                return WRONG
            given = _parsed(known, words)
            as_json = given.json
            _prepare(given)
            outcome = known[given.command].run(given)
            _tell(outcome, as_json=as_json)
    except KeyboardInterrupt:
        print("grapnet: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        abandon_stdout()
        return INTERRUPTED
    except CommandError as error:
        return _refuse(str(error), error.hint or _hint(error, words[0]), as_json=as_json)
    except EXPECTED as error:
        return _refuse(_one_line(error), _hint(error, words[0]), as_json=as_json)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        told = f"{type(error).__name__}: {_one_line(error)}"
        hint = f"{TRACEBACK}=1 shows where; if what you gave it is sound, this is a bug"
        return _refuse(told, hint, as_json=as_json)
    return outcome.code


def commands() -> dict[str, Command]:
    """Returns every command by name, in the order of `GROUPS`."""
    modules = [
        importlib.import_module(f"grapnet.cli.{name}")
        for names in GROUPS.values()
        for name in names
    ]
    return {command.name: command for module in modules for command in module.COMMANDS}


def parser(known: dict[str, Command]) -> argparse.ArgumentParser:
    """Returns the parser of all commands; its help is a table of contents."""
    listed = []
    for group in GROUPS:
        found = [command for command in known.values() if command.group == group]
        listed += (
            ["", f"{group}:", *(f"  {command.name:<10} {command.about}" for command in found)]
            if found
            else []
        )
    whole = _Parser(
        prog="grapnet",
        usage="grapnet COMMAND [options]",
        description="Neural networks whose structure is data you can edit while they train.",
        epilog="\n".join(
            [*listed[1:], "", "grapnet COMMAND --help tells its options and shows examples."]
        ),
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
        raise CommandError(message, f"{self.prog} --help tells what it takes")


def _parsed(known: dict[str, Command], words: Sequence[str]) -> argparse.Namespace:
    """Returns what the words ask for; raises CommandError, with what may have been meant, for what
    is not there.
    """
    if not words[0].startswith("-") and words[0] not in known:
        meant = closest(words[0], known)
        hint = f"did you mean grapnet {meant}? " if meant else ""
        raise CommandError(f"there is no command {words[0]!r}", f"{hint}grapnet --help lists them")
    given, others = parser(known).parse_known_args(words)
    if others:
        hint = f"grapnet {given.command} --help tells what it takes"
        if not others[0].startswith("-"):
            hint = f"several values are one word with commas, such as a,b; {hint}"
        raise CommandError(f"grapnet {given.command} takes no {' '.join(others)}", hint)
    return given


def _add_shared(part: argparse.ArgumentParser) -> None:
    shared = part.add_argument_group("of every command")
    shared.add_argument(
        "--json", action="store_true", help="print the outcome as JSON on standard output"
    )
    shared.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of all random numbers (default: 0)"
    )
    shared.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="where to compute: cpu, cuda, cuda:1 (default: cpu)",
    )
    shared.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="for computing on the CPU (default: what torch takes)",
    )


def _prepare(given: argparse.Namespace) -> None:
    """Checks and puts into effect what all commands share."""
    if given.threads is not None and not 1 <= given.threads <= MOST_THREADS:
        raise CommandError(
            f"--threads lies between 1 and {MOST_THREADS}, got {given.threads}",
            "leave it out for what torch takes",
        )
    if not 0 <= given.seed < 2**63:
        raise CommandError(
            f"--seed lies between 0 and 2^63 - 1, got {given.seed}", "leave it out for 0"
        )
    has = "grapnet doctor says what this machine has"
    try:
        # about devices of old, which are refused all the same
        with warnings.catch_warnings(action="ignore"):
            device = torch.empty(0, device=given.device).device
    except (RuntimeError, AssertionError, ImportError) as error:
        why = _one_line(error).partition(". ")[0]  # torch goes on with all that it could have used
        raise CommandError(f"--device {given.device} cannot be used: {why}", has) from None
    # torch counts devices in 8 bits, where 256 is 0
    if str(torch.device(given.device)) != given.device:
        raise CommandError(f"--device {given.device} cannot be used: there is no such device", has)
    if device.type == "meta":
        raise CommandError("--device meta cannot be used: it holds no numbers", has)
    given.device = device
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)


@contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM end what runs inside as an exception does, so that nothing half-written
    stays.
    """
    asked = []

    def end(number: int, frame: object) -> NoReturn:
        # once is enough: what is half-written is being taken away
        signal.signal(number, signal.SIG_IGN)
        asked.append(number)
        raise SystemExit(TERMINATED)

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Exception:
        if asked:  # torch's exporters make another error of it
            raise SystemExit(TERMINATED) from None
        raise
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _tell(outcome: Outcome, *, as_json: bool) -> None:
    try:
        print(
            json.dumps(outcome.data, indent=1, allow_nan=False)
            if as_json
            else printable(outcome.text)
        )
        sys.stdout.flush()  # so that a reader who has left is noticed here
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        told = f"standard output cannot be written ({error.strerror}); the work itself was done"
        raise CommandError(told, "send it elsewhere: > FILE") from None


def _refuse(message: str, hint: str, *, as_json: bool) -> int:
    print(f"grapnet: {printable(message)}", file=sys.stderr)
    print(f"hint: {printable(hint)}", file=sys.stderr)
    if as_json:
        try:
            print(json.dumps({"error": message, "hint": hint}, indent=1), flush=True)
        except OSError:
            abandon_stdout()
    return WRONG


def _hint(error: BaseException, command: str) -> str:
    """Returns what to do about an error that does not say so itself, or of which only the first
    line is told.
    """
    if isinstance(error, ImportError):
        return "grapnet doctor lists what is installed and what is not"
    if isinstance(error, OSError) and _number(error) in SYSTEM_HINTS:
        return SYSTEM_HINTS[_number(error)]
    return f"grapnet {command} --help tells what it takes"


def _number(error: OSError) -> int:
    """Returns the number of the system's error, which safetensors tells in words alone; 0 where
    there is none.
    """
    told = re.search(r"\(os error (\d+)\)", str(error))
    return error.errno or (int(told[1]) if told else 0)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    raise SystemExit(main())
