"""Random programs of edits and training against the oracle, and proof that they notice an
off-by-one.
"""

from dataclasses import replace

import pytest
from hypothesis import Phase

import grapnet as gn
from grapnet.core._depth import WantedLayer
from grapnet.core._index_map import IndexMap
from tests.machine import run_programs

SHARDS, PROGRAMS = 10, 30  # 300 programs in all
STEPS = 12  # of a program at most; `make soak` runs 10,000 programs of up to 20


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_programs_agree_with_the_oracle(shard):
    run_programs(shard, PROGRAMS, stateful_step_count=STEPS)


def shift_positions(index, old):
    """Finds survivors one place further once something was removed."""
    found = new_positions(index, old)
    return (found + 1).clamp(max=index.new_size - 1) if len(index.removed) else found


def shift_values(index, old, born=0):
    """Carries survivors one place further once something was removed."""
    carried = carry(index, old, born)
    return carried.roll(1, 0) if len(index.removed) else carried


new_positions = IndexMap.new_positions
carry = IndexMap.carry
BROKEN = {"new_positions": shift_positions, "carry": shift_values}


@pytest.mark.parametrize("name", BROKEN)
def test_the_machine_notices_an_off_by_one(name, monkeypatch):
    monkeypatch.setattr(IndexMap, name, BROKEN[name])
    with pytest.raises((AssertionError, LookupError, RuntimeError, gn.errors.GrapNetError)):
        run_programs(0, PROGRAMS, phases=[Phase.generate], stateful_step_count=STEPS)


def test_the_machine_notices_layers_that_are_wired_wrongly(monkeypatch):
    def shifted(wanted, device):
        topology = wiring(wanted, device)
        return replace(topology, child=topology.child.roll(1))

    wiring = WantedLayer._topology
    monkeypatch.setattr(WantedLayer, "_topology", shifted)
    with pytest.raises((AssertionError, gn.errors.GrapNetError)):
        run_programs(0, PROGRAMS, phases=[Phase.generate], stateful_step_count=STEPS)
