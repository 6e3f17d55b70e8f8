"""Ctrl-C ends a study and its processes, keeps the seeds that are done, and the same command goes
on from them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grapnet.studies.command import run

from .made_up import STUDY, Settings

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
from dataclasses import replace
from grapnet.studies.command import main
from tests.studies.made_up import STUDY, Settings
study = replace(STUDY, settings=Settings(trace=sys.argv[1]))
raise SystemExit(main(study, ["--processes", "2", "--resume", sys.argv[2], "--log", sys.argv[3]]))
"""
AS_A_SEED_IS_KEPT = """
import os, signal, sys
def interrupt(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("1.json"):
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
"""


def wait_until(true: Callable[[], bool], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def alive(group: int) -> bool:
    """Returns whether any process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupted_study_leaves_no_process_and_goes_on_from_its_seeds(tmp_path):
    trace, kept, log = tmp_path / "trace", tmp_path / "kept", tmp_path / "log.jsonl"
    trace.mkdir()
    (trace / "wait 4").write_text("never")
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, trace, kept, log],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # a group of its own, which gets Ctrl-C as a whole, as from a terminal
        start_new_session=True,
    )
    try:
        assert wait_until(lambda: len(list(kept.rglob("*.json"))) == 2 and (trace / "4").exists())
        os.killpg(started.pid, signal.SIGINT)
        out, err = started.communicate(timeout=60)
        assert wait_until(lambda: not alive(started.pid), 30)
    finally:
        if alive(started.pid):
            os.killpg(started.pid, signal.SIGKILL)
    assert (started.returncode, out) == (130, "")
    assert (
        err.splitlines()[-1]
        == f"made_up: interrupted after 2 of 3 seeds, kept in {kept}; the same command goes on from"
        " them"
    )
    assert "Traceback" not in err
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(event["event"], event["done"]) for event in events] == [
        ("begin", 0),
        ("advance", 1),
        ("advance", 2),
        ("interrupted", 2),
    ]
    (trace / "wait 4").unlink()
    settings = Settings(trace=str(trace))
    result = run(STUDY, settings, folder=kept)
    assert {path.name: path.read_text() for path in trace.iterdir()} == {
        "7": "ran\n",
        "1": "ran\n",
        "4": "ran\n" * 2,
    }
    assert result["seeds"] == run(STUDY, settings)["seeds"]


def test_ctrl_c_as_a_seed_is_kept_waits_until_it_is_counted(tmp_path):
    trace, kept, log = tmp_path / "trace", tmp_path / "kept", tmp_path / "log.jsonl"
    trace.mkdir()
    program = AS_A_SEED_IS_KEPT + PROGRAM.replace('"--processes", "2"', '"--processes", "1"')
    done = subprocess.run(
        [sys.executable, "-c", program, trace, kept, log], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].startswith(
        f"made_up: interrupted after 2 of 3 seeds, kept in {kept}"
    )
    assert sorted(path.name for path in kept.rglob("*.json")) == ["1.json", "7.json"]
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["done"]) == ("interrupted", 2)
    assert sorted(path.name for path in trace.iterdir()) == ["1", "7"]


def test_a_study_runs_in_a_thread_where_signals_cannot_be_held_back(tmp_path):
    with ThreadPoolExecutor(1) as thread:
        there = thread.submit(run, STUDY, Settings(), folder=tmp_path).result()
    assert there["seeds"] == run(STUDY, Settings())["seeds"]
