"""The live display: one line that is written over on a terminal, and one plain line a result
anywhere else.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from grapnet.progress import can_write_over

_CLEAR = "\r\x1b[2K"  # to the beginning of the line, and empty it
_BAR = 20  # characters


class Display:
    """Shows where a run stands.

    Args:
        stream: where to write, usually `sys.stderr`.
        live: whether a line can be written over; by default where the stream is a terminal that
            can.
        pause: seconds between two versions of the live line.

    Examples:
        >>> import sys
        >>> with Display(sys.stdout, live=False) as display:
        ...     display.show(lambda: "half-way")
        ...     display.keep("done")
        done
    """

    def __init__(self, stream: TextIO, *, live: bool | None = None, pause: float = 0.1) -> None:
        self._stream, self._pause, self._shown_at = stream, pause, float("-inf")
        self.live = can_write_over(stream) if live is None else live
        self._on_screen = False

    def show(self, line: Callable[[], str]) -> None:
        """Puts a line in the place of the live one; it is only asked for when it is shown."""
        if not self.live or time.monotonic() < self._shown_at + self._pause:
            return
        # a line that wraps could not be written over
        width = shutil.get_terminal_size().columns - 1
        self._write(_CLEAR + line()[:width])
        self._on_screen, self._shown_at = True, time.monotonic()

    def keep(self, line: str) -> None:
        """Writes a line that stays, above the live one."""
        self.clear()
        self._write(line + "\n")

    def clear(self) -> None:
        """Takes the live line away."""
        if self._on_screen:
            self._write(_CLEAR)
        self._on_screen = False

    def bar(self, share: float) -> str:
        """Returns a bar that is full for a share of 1."""
        full = round(_BAR * min(max(share, 0.0), 1.0))
        return self._readable("█" * full + "░" * (_BAR - full), "#" * full + "-" * (_BAR - full))

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _readable(self, wanted: str, plain: str) -> str:
        try:
            wanted.encode(self._stream.encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return plain
        return wanted

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a reader who went away ends the display, not the work
            self._stream.write(self._readable(text, text.encode("ascii", "replace").decode()))
            self._stream.flush()
