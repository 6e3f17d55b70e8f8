"""Two thousand mutated checkpoints: each loads to exactly what it says, or is refused in words that
name the field.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.referee import FIELDS

COUNT = 2000
pytestmark = [
    pytest.mark.xdist_group("mutations"),  # one worker, so that the referee runs once
    pytest.mark.timeout(1200),  # less than a minute of work, on however busy a machine
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs the referee in a process of its own: a crash is its exit code, and nothing else runs
    under its audit.
    """
    folder, root = tmp_path_factory.mktemp("mutations"), Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.checkpoint.referee", str(folder), str(COUNT), "7"]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_mutation_loads_to_what_it_says_or_is_refused(report):
    assert report["faults"] == []
    loads = {name: count for name, count in report["outcomes"].items() if "load" in name}
    assert sum(loads.values()) == COUNT
    # the mutations cover all three: as it was, as it says, refused
    assert min(loads.values()) > 20, loads


def test_every_part_of_a_file_was_found_wrong_at_least_once(report):
    assert report["fields"].keys() == set(FIELDS)


def test_no_mutation_takes_long_or_much_memory(report):
    assert report["grown"] < 200  # MiB over thousands of loads


def test_no_mutation_runs_or_imports_anything(report):
    assert report["forbidden"] == []
    assert report["control"], "the audit sees nothing"
