"""kill -9 at random moments of saves loses neither the previous checkpoint nor one that was
acknowledged.
"""

import pytest

from .files import run_module

KILLS = 200


@pytest.mark.timeout(900)  # a quarter of a minute of work, on however busy a machine
def test_no_kill_loses_a_checkpoint(tmp_path):
    # In a process of its own, which forks; this one may have threads.
    found = run_module("crash", tmp_path, KILLS)
    assert found["kills"] == KILLS
    assert found["left a partial file"] > 0  # the kill came in the middle of writing
    assert found["after acknowledged saves"] > 0  # and had something to lose
    assert found["unreadable"] == 0
    assert found["lost an acknowledged save"] == 0
    assert found["not one of the two it can be"] == 0
