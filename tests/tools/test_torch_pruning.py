"""The comparison with Torch-Pruning: what it counts, and what it calls a problem."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from tools.torch_pruning import KNOWN, halve, problems, removals, settle, step, table


class Net(nn.Module):
    """A space between convolutions, one under a norm, and one whose size is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 9, 3)
        self.layer_norm = nn.LayerNorm(9)
        self.third = nn.Linear(9, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.norm(self.first(x)).relu()).mean((2, 3))
        x = self.third(self.layer_norm(x)).relu()
        return self.head(x) / x.shape[1]


def toy() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Net().double()
    inputs = (torch.randn(2, 3, 7, 7, dtype=torch.float64),)
    settle(model, inputs)
    return model, inputs


def test_removals_are_compared_with_readers_of_zero_and_undone() -> None:
    model, inputs = toy()
    before = copy.deepcopy(model.state_dict())
    outcomes = removals(model, inputs, most=6, seed=0)
    kinds = {outcome.space: outcome.kind for outcome in outcomes}
    assert kinds == {"first": "equal", "second": "under a norm", "third": "differs"}
    assert all(outcome.effect is not None and outcome.effect > 1e-6 for outcome in outcomes)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_the_spaces_are_spread_and_chosen_by_the_seed() -> None:
    layers = [nn.Linear(4, 4) for _ in range(9)]
    model = nn.Sequential(*layers).double()
    inputs = (torch.randn(2, 4, dtype=torch.float64),)
    chosen = []
    for seed in (0, 0, 1):
        outcomes = removals(model, inputs, most=4, seed=seed)
        chosen.append([outcome.space for outcome in outcomes])
    assert chosen[0] == chosen[1]
    assert chosen[0] != chosen[2]
    # Eight spaces in four stretches: one of each.
    assert [int(name) // 2 for name in chosen[0]] == [0, 1, 2, 3]


def test_a_halved_model_trains() -> None:
    model, inputs = toy()
    net = gn.adopt(model, *inputs)
    assert halve(net) == 3
    assert Counter(len(space) for space in net.spaces if not space.pins) == {3: 1, 5: 1, 6: 1}
    with pytest.raises(RuntimeError):
        step(model, (inputs[0].float(),))
    step(model, inputs)


def row(**changes: Any) -> dict[str, Any]:
    part = {"left": 0.25, "step": "runs"}
    exact = {"counts": {"equal": 1}, "removals": [{"space": "a", "kind": "equal", "error": 0.0}]}
    found = {"name": "resnet18", "ours": part, "exact": exact, "theirs": part}
    return {**found, **changes}


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 0),
        ({"ours": {"left": 0.26, "step": "runs"}}, 1),
        ({"ours": {"left": 0.26, "step": "runs"}, "name": next(iter(KNOWN))}, 0),
        ({"ours": {"left": 0.25, "step": "RuntimeError: shapes"}}, 1),
        ({"ours": {"error": "EditError: refused"}}, 1),
        ({"exact": {"error": "over 150 s"}}, 1),
        ({"exact": {"removals": [{"space": "a", "kind": "different", "error": 0.1}]}}, 1),
        ({"theirs": {"error": "ZeroDivisionError: by zero"}}, 0),
        ({"theirs": {"left": 0.5, "step": "RuntimeError: shapes"}}, 0),
    ],
)
def test_problems_are_what_we_do_wrong(changes: dict[str, Any], count: int) -> None:
    assert len(problems(row(**changes))) == count


def test_the_table_has_a_line_per_model_whatever_is_missing() -> None:
    rows = [row(), row(ours={"error": "over 150 s"}, exact={"error": "over 150 s"})]
    lines = table(rows).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
