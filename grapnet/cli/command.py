"""What a command of the command line is: a name, its options, and a function from options to an
outcome.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What a command found.

    Attributes:
        text: for people, on standard output.
        data: the same as plain data, which `--json` prints instead.
        code: the exit code: 0, or 1 where the command did its work and the answer is no.
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
        group: the heading that it is listed under, one of `main.GROUPS`.
        configure: adds its own options to its parser.
        run: does its work; raises `CommandError`, or an error of the library, when it cannot, and
            has then changed nothing.
        examples: lines of its --help, without `grapnet`.
    """

    name: str
    about: str
    group: str
    configure: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], Outcome]
    examples: tuple[str, ...] = ()


class CommandError(Exception):
    """A command cannot do what it was asked for, and has changed nothing.

    Args:
        message: what is wrong, in one line.
        hint: what to do about it, in one line.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
