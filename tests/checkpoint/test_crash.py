"""kill -9 at random moments of saves loses neither the previous checkpoint nor one that was acknowledged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # a quarter of a minute of work, on however busy a machine


def killed(folder: Path, kills: int, library: str) -> dict[str, int]:
    """Runs the harness in a process of its own, which forks; this one may have threads."""
    command = [sys.executable, "-m", "tests.checkpoint.crash", str(folder), str(kills), library]
    root, environment = Path(__file__).parents[2], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_no_kill_loses_a_checkpoint(tmp_path):
    counts = killed(tmp_path, 200, "gn")
    assert counts["kills"] == 200
    assert counts["left a partial file"] > 40  # the kill came in the middle of writing
    assert counts["after acknowledged saves"] > 40  # and had something to lose
    assert counts["unreadable"] == counts["lost an acknowledged save"] == counts["not one of the two it can be"] == 0


def test_the_same_kills_do_hurt_torch_save(tmp_path):
    counts = killed(tmp_path, 60, "torch")
    assert counts["after acknowledged saves"] > 10
    assert counts["unreadable"] > 5
