"""kill -9 at random moments of saves loses neither the previous checkpoint nor one that was
acknowledged.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS, CONTROLS = 200, 60
pytestmark = [
    pytest.mark.xdist_group("crash"),  # one worker, so that the harness runs once
    pytest.mark.timeout(900),  # a quarter of a minute of work, on however busy a machine
]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Runs the harness in a process of its own, which forks; this one may have threads."""
    folder, root = tmp_path_factory.mktemp("crash"), Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "tests.checkpoint.crash",
        str(folder),
        str(KILLS),
        str(CONTROLS),
    ]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_no_kill_loses_a_checkpoint(counts):
    found = counts["gn"]
    assert found["kills"] == KILLS
    assert found["left a partial file"] > 0  # the kill came in the middle of writing
    assert found["after acknowledged saves"] > 0  # and had something to lose
    assert (
        found["unreadable"]
        == found["lost an acknowledged save"]
        == found["not one of the two it can be"]
        == 0
    )


def test_the_same_kills_do_hurt_torch_save(counts):
    found = counts["torch"]
    assert found["kills"] == CONTROLS
    assert found["after acknowledged saves"] > 0
    assert found["unreadable"] > 0
