"""How far long work is: a line with the time left, JSON lines that outlive the process, and
TensorBoard when asked.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TextIO

_BAR = 20  # cells of the bar on a terminal


class Progress:
    """Tells how many units of long work are done and how long the rest will take.

    On a terminal that is one line, which is written over and never wraps; elsewhere, and where TERM
    is "dumb", it is a plain line now and then. A stream that cannot be written to any more, such as
    a closed pipe, ends the display and not the work.

    Args:
        total: how many units there are.
        title: of the work.
        log: a file to which one JSON object a line is appended for every event, at once: a process
            that is killed loses none of them. The keys are time, event, title, done, total,
            seconds, note and values.
        tensorboard: a folder for TensorBoard, in which every number among the values is a curve
            over the units.
        workers: how many units are worked on at a time.
        stream: where to tell it; None is standard error.
        every: seconds between two plain lines; the first and the last are always told.
        refresh: seconds after which the line on a terminal is brought up to date while no unit
            ends; None is never.
        clock: the seconds since some moment.

    Raises:
        ImportError: if TensorBoard is asked for and not installed.
        OSError: if the log or TensorBoard's folder cannot be written to; neither is open then.

    Examples:
        >>> with Progress(3, "epochs", stream=sys.stdout, clock=lambda: 0.0) as progress:
        ...     progress.advance(3, note="loss 0.1", values={"loss": 0.1})
        epochs: 3 of 3, 0:00 so far, loss 0.1
    """

    def __init__(
        self,
        total: int,
        title: str,
        *,
        log: Path | None = None,
        tensorboard: Path | None = None,
        workers: int = 1,
        stream: TextIO | None = None,
        every: float = 5.0,
        refresh: float | None = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.title, self.done = total, title, 0
        self._workers, self._every, self._clock, self._note = max(1, workers), every, clock, ""
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._terminal = can_write_over(self._stream)
        self._start = self._last = clock()
        # units that took their time, unlike those that were skipped, and how much
        self._computed, self._spent = (
            0,
            0.0,
        )
        # when the units that are worked on began, the oldest first
        self._begun = deque([self._start] * self._workers)
        self._told: float | None = None  # when the last plain line was written
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._log, self._curves = _opened(log, tensorboard)
        self._record("begin", "", {})
        if self._terminal:
            self._draw()
            if refresh is not None:
                threading.Thread(target=self._keep_drawing, args=(refresh,), daemon=True).start()

    def skip(self, count: int, note: str = "") -> None:
        """Counts units that were done before, which say nothing about how long the others take."""
        if count:
            self._move(count, "skip", note, {})

    def advance(
        self, count: int = 1, *, note: str = "", values: Mapping[str, Any] | None = None
    ) -> None:
        """Counts units as done; once it is closed, it only counts them.

        Args:
            count: how many.
            note: a few words on the last of them, for the line.
            values: what they gave, for the log and for TensorBoard.
        """
        with self._lock:
            self._last = self._clock()
            for waiting in range(
                self.total - self.done - 1, self.total - self.done - 1 - count, -1
            ):
                self._computed += 1
                if self._begun:  # whichever it was: the sum of all is the same
                    self._spent += self._last - self._begun.popleft()
                if waiting > len(self._begun):
                    self._begun.append(self._last)  # its worker takes the next
            self._move(count, "advance", note, values or {})

    @property
    def seconds(self) -> float:
        """The time since the work began."""
        return self._clock() - self._start

    @property
    def left(self) -> float | None:
        """How many seconds the rest will take; None while nothing is known about it.

        It rests on how long the units took that were worked on. One that takes longer than they did
        counts as one of them, so that it raises what is expected of the others.
        """
        waiting = self.total - self.done
        if waiting <= 0:
            return 0.0
        if not self._computed:
            return None
        ages = [self._clock() - begun for begun in self._begun][:waiting]
        each = self._spent / self._computed
        if ages and ages[0] > each:
            each = (self._spent + ages[0]) / (self._computed + 1)
        begun = [max(0.0, each - age) for age in ages]
        return max(*begun, (each * (waiting - len(begun)) + sum(begun)) / self._workers, 0.0)

    def close(self, event: str = "end") -> None:
        """Ends the display with a whole line and closes the files; more calls do nothing.

        Units that are counted later are told nobody: the log ends here.

        Args:
            event: how it ended, for the log.
        """
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            if self._terminal:
                self._draw()
                self._write("\n")
            self._record(event, "", {})
            for file in (self._log, self._curves):
                if file is not None:
                    file.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close("end" if kind is None else "interrupted" if interrupted else "failed")

    def __str__(self) -> str:
        """Returns the line."""
        return ", ".join(self._parts())

    def _parts(self) -> list[str]:
        """Returns what the line says, the most important first."""
        left, parts = self.left, [f"{self.title}: {self.done} of {self.total}"]
        if self.done < self.total and left is not None:
            parts.append("almost done" if left < 0.5 else f"about {_span(left)} left")
        parts.append(f"{_span(self.seconds)} so far")
        if self._computed and self._last > self._start:
            parts.append(_rate(self._computed / (self._last - self._start)))
        return [*parts, *([self._note] if self._note else [])]

    def _move(self, count: int, event: str, note: str, values: Mapping[str, Any]) -> None:
        with self._lock:
            self.done += count
            self._note = note
            if self._ended.is_set():
                return
            self._record(event, note, values)
            clock = self._clock()
            if self._terminal:
                self._draw()
            elif self._told is None or clock - self._told >= self._every or self.done >= self.total:
                self._told = clock
                self._write(f"{self}\n")

    def _record(self, event: str, note: str, values: Mapping[str, Any]) -> None:
        plain = {key: _plain(value) for key, value in values.items()}
        if self._log is not None:
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "event": event,
                "title": self.title,
                "done": self.done,
                "total": self.total,
                "seconds": round(self.seconds, 3),
                "note": note,
                "values": plain,
            }
            # unbuffered: in the system's hands once it returns
            self._log.write(f"{json.dumps(line)}\n".encode())
        if self._curves is not None:
            for key, value in plain.items():
                if isinstance(value, int | float):
                    self._curves.add_scalar(f"{self.title}/{key}", value, self.done)
            self._curves.flush()

    def _draw(self) -> None:
        """Writes the line over itself, cut to what the terminal shows in one row."""
        share = min(1.0, self.done / self.total) if self.total else 1.0
        filled = int(_BAR * share)
        width = _columns(self._stream) - 1
        text = str(self)
        if len(text) + _BAR + 3 <= width:
            text = f"[{'#' * filled}{'-' * (_BAR - filled)}] {text}"
        self._write(f"\r\x1b[K{text if len(text) <= width else text[: max(0, width - 3)] + '...'}")

    def _keep_drawing(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            with self._lock:
                if not self._ended.is_set():
                    self._draw()

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


def can_write_over(stream: TextIO | None) -> bool:
    """Says whether a line of a stream can be written over: on a terminal that has more than plain
    lines.
    """
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def _opened(log: Path | None, tensorboard: Path | None) -> tuple[IO[bytes] | None, Any]:
    """Opens the log and what writes for TensorBoard; neither is open when it raises."""
    make_writer = None if tensorboard is None else _summary_writer()
    file = None if log is None else _appending(log)  # first: the other starts a thread
    try:
        return file, None if make_writer is None else make_writer(str(tensorboard))
    except BaseException:
        if file is not None:
            file.close()
        raise


def _appending(path: Path) -> IO[bytes]:
    """Opens a log for whole lines: half a line, of a machine that lost power, is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab", buffering=0)
    if file.tell():
        with path.open("rb") as written:
            written.seek(-1, os.SEEK_END)
            if written.read(1) != b"\n":
                file.write(b"\n")
    return file


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "tensorboard":
            raise  # it is there, and something that it needs is not
        raise ImportError(
            "this needs tensorboard, which is not installed. Run: pip install"
            ' "grapnet[tensorboard]"',
            name="tensorboard",
        ) from None
    return SummaryWriter


def _columns(stream: TextIO | None) -> int:
    """Returns how wide a terminal is: what COLUMNS says, or else the terminal itself."""
    if stream is not None and "COLUMNS" not in os.environ:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return os.get_terminal_size(stream.fileno()).columns or 80
    return shutil.get_terminal_size().columns


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it; what is no finite number, or larger than a float can be, is
    none.
    """
    if isinstance(value, bool | str) or value is None:
        return value
    try:
        number = float(value)
    except OverflowError:
        return None
    except (TypeError, ValueError):
        return str(value)
    if not math.isfinite(number):
        return None
    return value if isinstance(value, int) else number


def _span(seconds: float) -> str:
    """Returns a time in minutes and seconds, with hours where there are some.

    Examples:
        >>> _span(61.4), _span(3725)
        ('1:01', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _rate(speed: float) -> str:
    """Returns units a second, or a minute or an hour where that is easier to read.

    Examples:
        >>> _rate(12.0), _rate(0.05), _rate(1 / 1800)
        ('12.0 a second', '3.0 a minute', '2.0 an hour')
    """
    for words, seconds in (("a second", 1), ("a minute", 60)):
        if speed * seconds >= 1:
            return f"{speed * seconds:.1f} {words}"
    return f"{speed * 3600:.1f} an hour"
