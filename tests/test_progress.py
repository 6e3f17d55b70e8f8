"""Long work tells how far it is: on a terminal, in plain lines, in a log that outlives the process,
to TensorBoard.
"""

import errno
import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from grapnet.demo.display import Display
from grapnet.progress import Progress


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time

    def pass_(self, seconds: float) -> None:
        self.time += seconds


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        """What the rows of the terminal show in the end."""
        return [row.rpartition("\r\x1b[K")[2] for row in self.getvalue().split("\n")]


class Closed(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.fixture(autouse=True)
def _terminal_that_can(monkeypatch) -> None:
    """What a stream that says it is a terminal can do is the same wherever the tests run."""
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def silent(total: int, clock: Clock, **options) -> Progress:
    return Progress(total, "work", stream=io.StringIO(), clock=clock, **options)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_time_left_follows_from_the_units_that_are_done(clock):
    progress = silent(10, clock)
    assert progress.left is None
    clock.pass_(30)
    assert progress.left is None  # nothing has ended, so nothing is known
    progress.advance()
    assert progress.left == pytest.approx(9 * 30)
    clock.pass_(10)
    progress.advance()
    assert progress.left == pytest.approx(8 * 20)
    clock.pass_(5)
    assert progress.left == pytest.approx(8 * 20 - 5)  # it runs down while the third is worked on
    progress.advance(8)
    assert progress.left == 0


def test_units_that_were_done_before_say_nothing_about_the_others(clock):
    progress = silent(10, clock)
    progress.skip(6)
    assert (progress.done, progress.left) == (6, None)
    clock.pass_(20)
    progress.advance()
    assert progress.left == pytest.approx(3 * 20)  # and not 3 · 20 / 7


def test_a_unit_that_takes_longer_than_the_others_raises_the_time_left(clock):
    progress = silent(4, clock)
    clock.pass_(10)
    progress.advance()
    clock.pass_(10)
    assert progress.left == pytest.approx(20)
    clock.pass_(20)
    # two units after this one, of (10 + 30) / 2 seconds
    assert progress.left == pytest.approx(2 * 20)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_units_that_run_together_are_reckoned_with(clock, workers):
    """Units of 40 to 80 seconds, each begun by the first worker that is free: soon the time left is
    right to one.
    """
    free, ends = [clock.time] * workers, []
    for unit in range(16):
        worker = free.index(min(free))
        free[worker] += 40 + 10 * (unit * 7 % 5)
        ends.append(free[worker])
    progress = silent(16, clock, workers=workers)
    for done, end in enumerate(sorted(ends), start=1):
        clock.time = end
        progress.advance()
        if done >= 5:  # the first to end are the short ones
            assert progress.left == pytest.approx(max(ends) - end, abs=80)
    assert progress.left == 0


def test_units_that_end_in_bursts_are_not_taken_for_the_only_ones(clock):
    alone, together = silent(10, clock), silent(10, clock, workers=2)
    clock.pass_(60)
    for progress in (alone, together):
        progress.advance()
    assert alone.left == pytest.approx(540)
    # the second ends at once, and then come four more bursts
    assert together.left == pytest.approx(4 * 60)


def test_elsewhere_than_on_a_terminal_plain_lines_come_now_and_then(clock):
    stream = io.StringIO()
    with Progress(100, "sweep", stream=stream, clock=clock) as progress:
        for _ in range(100):
            clock.pass_(0.5)
            progress.advance(note="loss 0.1")
    told = stream.getvalue().splitlines()
    assert told[0] == "sweep: 1 of 100, about 0:50 left, 0:00 so far, 2.0 a second, loss 0.1"
    assert told[1] == "sweep: 11 of 100, about 0:44 left, 0:06 so far, 2.0 a second, loss 0.1"
    assert told[-1] == "sweep: 100 of 100, 0:50 so far, 2.0 a second, loss 0.1"
    assert len(told) == 11
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_on_which_nothing_can_be_written_over_gets_plain_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with Progress(2, "sweep", stream=terminal, clock=clock) as progress:
        progress.advance(2)
    assert terminal.getvalue() == "sweep: 2 of 2, 0:00 so far\n"
    assert not Display(terminal).live  # one test for both
    monkeypatch.setenv("TERM", "xterm")
    assert Display(terminal).live


def test_long_times_and_slow_units_are_told_in_hours(clock):
    progress = silent(3, clock)
    clock.pass_(5400)
    progress.advance()
    assert str(progress) == "work: 1 of 3, about 3:00:00 left, 1:30:00 so far, 0.7 an hour"


def test_a_terminal_shows_one_line_that_is_written_over(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    with Progress(4, "sweep", stream=terminal, clock=clock, refresh=None) as progress:
        assert terminal.shown == ["[--------------------] sweep: 0 of 4, 0:00 so far"]
        for _ in range(3):
            clock.pass_(10)
            progress.advance()
        assert terminal.shown == [
            "[###############-----] sweep: 3 of 4, about 0:10 left, 0:30 so far, 6.0 a minute"
        ]
    assert terminal.getvalue().count("\n") == 1  # the last thing that is written
    assert terminal.getvalue().endswith("\n")


@pytest.mark.parametrize("columns", [1, 4, 20, 40, 60, 80, 200])
def test_the_line_never_wraps(clock, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    with Progress(
        1000, "a study of some length", stream=terminal, clock=clock, refresh=None
    ) as progress:
        for n in range(20):
            clock.pass_(7)
            progress.advance(note=f"unit {n} " + "x" * 30)
    rows = terminal.getvalue().replace("\n", "").split("\r\x1b[K")
    assert max(map(len, rows)) <= max(columns - 1, 3)
    assert rows[-1].startswith("[") == (columns == 200)
    if columns == 40:
        assert rows[-1] == "a study of some length: 20 of 1000, ..."


def test_the_line_of_a_terminal_goes_on_while_no_unit_ends(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    terminal, deadline = Terminal(), time.monotonic() + 10
    with Progress(2, "sweep", stream=terminal, clock=clock, refresh=0.001):
        clock.pass_(65)
        while "0 of 2, 1:05 so far" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.001)
    assert "0 of 2, 1:05 so far" in terminal.getvalue()
    before = terminal.getvalue()
    time.sleep(0.02)
    assert terminal.getvalue() == before  # once it has ended, nothing is drawn
    assert before.endswith("\n")


def test_an_interruption_leaves_a_whole_line_and_is_logged(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    progress = Progress(
        3, "sweep", log=tmp_path / "log.jsonl", stream=terminal, clock=clock, refresh=None
    )
    progress.advance()
    with pytest.raises(KeyboardInterrupt), progress:
        raise KeyboardInterrupt
    assert terminal.shown[-1] == ""
    assert "sweep: 1 of 3" in terminal.shown[-2]
    assert [line["event"] for line in lines(tmp_path / "log.jsonl")] == [
        "begin",
        "advance",
        "interrupted",
    ]


def test_a_reader_that_goes_away_ends_the_display_and_not_the_work(clock):
    with Progress(2, "sweep", stream=Closed(), clock=clock) as progress:
        progress.advance()
        progress.advance()
    assert progress.done == 2


def test_every_event_is_a_line_of_the_log(clock, tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    with silent(3, clock, log=path) as progress:
        progress.skip(1, "kept")
        clock.pass_(2.5)
        progress.advance(
            note="second", values={"loss": 0.25, "name": "a", "bad": float("nan"), "n": 3}
        )
        assert len(lines(path)) == 3  # while the work goes on
    begin, skip, advance, end = lines(path)
    assert set(advance) == {"time", "event", "title", "done", "total", "seconds", "note", "values"}
    assert advance["values"] == {"loss": 0.25, "name": "a", "bad": None, "n": 3}  # JSON has no NaN
    assert (advance["title"], advance["done"], advance["total"], advance["seconds"]) == (
        "work",
        2,
        3,
        2.5,
    )
    assert [line["event"] for line in (begin, skip, advance, end)] == [
        "begin",
        "skip",
        "advance",
        "end",
    ]
    assert begin["time"] <= advance["time"] <= end["time"]


def test_a_log_is_appended_to_and_half_a_line_is_ended_first(clock, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "begin"}\n{"event": "adv')
    with silent(1, clock, log=path):
        pass
    first, torn, *others = path.read_text().splitlines()
    assert (first, torn) == ('{"event": "begin"}', '{"event": "adv')
    assert [json.loads(line)["event"] for line in others] == ["begin", "end"]


def test_a_log_that_cannot_be_written_is_refused_before_the_work_and_nothing_is_begun(
    clock, tmp_path
):
    running = threading.active_count()
    with pytest.raises(IsADirectoryError):
        silent(1, clock, log=tmp_path, tensorboard=tmp_path / "board")
    assert threading.active_count() == running
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_tensorboard_cannot_use_leaves_no_log_open(clock, tmp_path):
    (tmp_path / "board").write_text("taken")
    with warnings.catch_warnings(record=True, action="always") as told:
        with pytest.raises(OSError, match="board"):
            silent(1, clock, log=tmp_path / "log.jsonl", tensorboard=tmp_path / "board")
        gc.collect()  # which tells of files that nobody has closed
    assert told == []


def test_a_number_that_no_float_holds_is_none(clock, tmp_path):
    with silent(1, clock, log=tmp_path / "log.jsonl", tensorboard=tmp_path / "board") as progress:
        progress.advance(values={"large": 10**400, "larger": -(10**5000), "whole": 10**30})
    assert lines(tmp_path / "log.jsonl")[1]["values"] == {
        "large": None,
        "larger": None,
        "whole": 10**30,
    }


@pytest.mark.parametrize("log", ["log.jsonl", None])
def test_units_that_end_after_it_was_closed_are_only_counted(clock, tmp_path, log):
    stream = io.StringIO()
    progress = Progress(3, "work", stream=stream, clock=clock, log=log and tmp_path / log)
    progress.advance()
    progress.close()
    told = stream.getvalue()
    progress.advance(values={"loss": 0.5})
    progress.skip(1)
    assert (progress.done, progress.left) == (3, 0)
    assert stream.getvalue() == told
    if log:
        assert [line["event"] for line in lines(tmp_path / log)] == ["begin", "advance", "end"]


PROGRAM = """
import importlib.util, io, os, pathlib, signal, sys
spec = importlib.util.spec_from_file_location("progress", sys.argv[1])
progress = importlib.util.module_from_spec(spec)
spec.loader.exec_module(progress)
work = progress.Progress(9, "work", log=pathlib.Path(sys.argv[2]), stream=io.StringIO())
work.advance(values={"n": 1})
work.advance(values={"n": 2})
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"grapnet", "torch", "numpy", "tensorboard"}
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_keeps_its_lines_and_needs_no_library(tmp_path):
    source = Path(sys.modules[Progress.__module__].__file__ or "")
    path = tmp_path / "log.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, source, path], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert [line["values"] for line in lines(path)] == [{}, {"n": 1}, {"n": 2}]


def test_tensorboard_gets_every_number(clock, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with silent(2, clock, tensorboard=tmp_path / "board") as progress:
        progress.advance(values={"loss": 0.5, "name": "a"})
        progress.advance(values={"loss": 0.25, "bad": float("inf")})
    found = EventAccumulator(str(tmp_path / "board")).Reload()
    assert found.Tags()["scalars"] == ["work/loss"]
    assert [(event.step, event.value) for event in found.Scalars("work/loss")] == [
        (1, 0.5),
        (2, 0.25),
    ]


def test_without_tensorboard_it_says_what_to_install(clock, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as where it is not installed
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    log = tmp_path / "log.jsonl"
    with pytest.raises(
        ImportError, match=r'not installed. Run: pip install "grapnet\[tensorboard\]"'
    ):
        silent(2, clock, tensorboard=tmp_path / "board", log=log)
    assert os.listdir(tmp_path) == []
    with silent(2, clock, log=log) as progress:  # all else works without it
        progress.advance(2)
