"""Random programs on adopted models against hand-edited ones, and proof that they notice errors."""

from typing import Any

import pytest
import torch
from hypothesis import Phase

import grapnet as gn
from grapnet.core._grid_map import GridMap
from grapnet.spaces import Adopted
from tests.spaces import programs

SHARDS = 6
PROGRAMS = 50  # 300 in all
STEPS = 8  # of a program at most; `make soak` runs 10,000 programs of up to 20


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_programs_agree_with_hand_edited_models(shard: int) -> None:
    programs.run_programs(shard, PROGRAMS, stateful_step_count=STEPS)


def shift_values(self: GridMap, old: torch.Tensor, *born: Any) -> torch.Tensor:
    """Carries survivors one place further."""
    return carry(self, old, *born).roll(1, 0)


def take_other_values(self: GridMap, old: torch.Tensor) -> torch.Tensor:
    """Keeps other values for undo than those that leave."""
    return take(self, old).roll(1, 0)


def forget_a_buffer(self: Adopted, *args: Any) -> dict[str, GridMap]:
    """Leaves running variances as they are."""
    found = maps_of(self, *args)
    return {name: index for name, index in found.items() if not name.endswith("running_var")}


carry = GridMap.carry
take = GridMap.take
maps_of = Adopted._maps_of
BROKEN = {
    "carry": (GridMap, shift_values),
    "take": (GridMap, take_other_values),
    "_maps_of": (Adopted, forget_a_buffer),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_programs_notice_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in programs.MODELS:
        programs.adopted(model)  # which are proved before anything is broken
    holder, broken = BROKEN[name]
    monkeypatch.setattr(holder, name, broken)
    with pytest.raises((AssertionError, IndexError, RuntimeError, gn.errors.GrapNetError)):
        programs.run_programs(0, PROGRAMS, phases=[Phase.generate], stateful_step_count=STEPS)
