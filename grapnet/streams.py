"""Standard output and error: they take whatever is written to them, and no name of a node commands
the terminal.
"""

import codecs
import io
import os
import sys

# of our own texts, in ASCII
_SIGNS = {
    "→": "->",
    "×": "x",
    "–": "-",
    "−": "-",
    "…": "...",
    "φ": "phi",
    "≥": ">=",
}


def open_streams() -> None:
    """Makes standard output and error take whatever is written to them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, >&-; the other one is no place for it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as Python runs)
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            # so that no name of a node ends a command half-way
            stream.reconfigure(errors="grapnet")


def abandon_stdout() -> None:
    """Lets the end of Python write what standard output did not take nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """Returns a text whose control characters, but for the ends of lines of a list, are written
    out.
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Spells what an encoding does not have: our own signs in ASCII, anything else by its
    number.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    told = error.object[error.start : error.end]
    return "".join(
        _SIGNS.get(c) or c.encode("ascii", "backslashreplace").decode() for c in told
    ), error.end


codecs.register_error("grapnet", _spelled)
