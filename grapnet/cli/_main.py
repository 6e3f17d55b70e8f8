"""`grapnet`: finds the command, runs it, and prints its outcome or one clear error."""

import argparse
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import grapnet as gn

from ._command import Command, CommandError, Outcome, first_line

# Modules of this folder, each with one or more COMMANDS; none imports torch before it runs.
MODULES = ("demo", "doctor", "tune", "inspect", "history", "plot", "edit", "export", "convert")
WRONG = 2  # exit code: an error
INTERRUPTED = 130  # exit code: Ctrl-C, or a closed pipe
TRACEBACK = "GRAPNET_TRACEBACK"  # in the environment: unexpected errors show where they come from


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    if arguments is None:
        arguments = sys.argv[1:]
    words = list(arguments)
    for stream in (sys.stdout, sys.stderr):
        # A terminal without Unicode shows the number of a character in its place.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        outcome = _run(words)
        _print(outcome, as_json="--json" in words)
        return outcome.code
    except KeyboardInterrupt:
        print("grapnet: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output at its end, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except Exception as error:
        if os.environ.get(TRACEBACK) and not isinstance(error, CommandError):
            raise
        message, hint = _explained(error, words)
        print(f"grapnet: {_printable(message)}", file=sys.stderr)
        print(f"hint: {_printable(hint)}", file=sys.stderr)
        if "--json" in words:
            print(json.dumps({"error": message, "hint": hint}, indent=1))
        return WRONG


def commands() -> dict[str, Command]:
    """Returns every command by name."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"grapnet.cli._{name}")
        found |= {command.name: command for command in module.COMMANDS}
    return found


def parser(known: dict[str, Command]) -> argparse.ArgumentParser:
    """Returns the parser of all commands; its help is a table of contents."""
    groups: dict[str, list[str]] = {}
    for command in known.values():
        line = f"  {command.name:<10} {command.about}"
        groups.setdefault(command.group, []).append(line)
    listed = [f"{group}:\n{chr(10).join(lines)}\n" for group, lines in groups.items()]
    whole = _Parser(
        prog="grapnet",
        usage="grapnet COMMAND [options]",
        description="Neural networks whose structure is data you can edit while they train.",
        epilog="\n".join([*listed, "grapnet COMMAND --help lists its options and examples."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"grapnet {gn.__version__}")
    parts = whole.add_subparsers(
        prog="grapnet", dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for command in known.values():
        examples = "\n".join(f"  grapnet {line}" for line in command.examples)
        part = parts.add_parser(
            command.name,
            description=command.about,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.configure(part)
        part.add_argument("--json", action="store_true", help="print the outcome as JSON")
        part.add_argument(
            "--device",
            default="cpu",
            metavar="NAME",
            help="where to compute: cpu, cuda, cuda:1 (default: cpu)",
        )
    return whole


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are CommandErrors."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(message)


def _run(words: list[str]) -> Outcome:
    known = commands()
    if not words:
        return Outcome(parser(known).format_help().rstrip(), code=WRONG)
    if not words[0].startswith("-") and words[0] not in known:
        raise CommandError(f"unknown command {words[0]!r}", "grapnet --help lists the commands")
    given = parser(known).parse_args(words)
    # Here, so that --help does not wait for torch.
    import torch

    try:
        given.device = torch.empty(0, device=given.device).device
    except (RuntimeError, AssertionError) as error:
        why = first_line(error).partition(". ")[0]
        raise CommandError(
            f"--device {given.device} cannot be used: {why}",
            "grapnet doctor lists what this machine has",
        ) from None
    torch.manual_seed(0)
    return known[given.command].run(given)


def _print(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        text = json.dumps(outcome.data, indent=1, allow_nan=False)
    else:
        text = _printable(outcome.text)
    # Flushed here, so that a closed pipe is noticed here.
    print(text, flush=True)


def _printable(text: str) -> str:
    """Returns a text with control characters escaped, so that a name cannot control the
    terminal.
    """
    shown = []
    for character in text:
        if not character.isprintable() and character != "\n":
            character = character.encode("unicode_escape").decode()
        shown.append(character)
    return "".join(shown)


def _explained(error: Exception, words: list[str]) -> tuple[str, str]:
    """Returns the message and the hint, one line each."""
    options = " ".join(["grapnet", *words[:1], "--help lists the options"])
    if isinstance(error, CommandError):
        return str(error), error.hint or options
    if isinstance(error, OSError):
        message = first_line(error)
        if error.filename is not None and error.strerror:
            message = f"{error.filename}: {error.strerror}"
        return message, "check the path, its permissions (ls -ld) and the free space (df -h)"
    if isinstance(error, ImportError):
        return first_line(error), "grapnet doctor lists what is installed"
    if isinstance(error, gn.errors.GrapNetError | ValueError):
        return first_line(error), options
    message = f"{type(error).__name__}: {first_line(error)}"
    return message, f"{TRACEBACK}=1 shows where; if the input is sound, this is a bug"


if __name__ == "__main__":
    raise SystemExit(main())
