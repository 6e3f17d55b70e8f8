"""A thousand mutated checkpoints: each loads to a sound net, or is refused with the name of a
field.
"""

from typing import Any

import pytest

from .files import run_module
from .referee import FIELDS

COUNT = 1000
pytestmark = [
    pytest.mark.xdist_group("mutations"),  # one worker, so that the referee runs once
    pytest.mark.timeout(1200),  # less than a minute of work, on however busy a machine
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs the referee in a process of its own: a crash is its exit code, and nothing else runs
    under its audit.
    """
    return run_module("referee", tmp_path_factory.mktemp("mutations"), COUNT, 7)


def test_every_mutation_loads_soundly_or_is_refused(report):
    assert report["faults"] == []
    loads = {name: count for name, count in report["outcomes"].items() if "load" in name}
    assert sum(loads.values()) == COUNT
    assert min(loads.values()) > 20, loads
    assert report["fields"].keys() == FIELDS  # every part of a file was found wrong


def test_no_mutation_runs_or_imports_anything(report):
    assert report["forbidden"] == []
    assert report["control"], "the audit sees nothing"
