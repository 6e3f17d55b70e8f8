"""The program that runs optimizers through edits, and the table that it makes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam

from tools.optimizers import Make, of_parameters, outcome, table

ROOT = Path(__file__).parent.parent.parent
RESULTS = json.loads((ROOT / "tools/results/optimizers.json").read_text())


def test_the_documentation_shows_the_last_results() -> None:
    assert table(RESULTS) in (ROOT / "docs/guides/optimizers.md").read_text()


def test_no_optimizer_of_the_last_run_was_silently_wrong() -> None:
    counts = RESULTS["counts"]
    assert counts.keys() <= {"follows", "refused", "not run"}
    assert counts["follows"] + counts["refused"] >= 80
    assert RESULTS["counts of torch"] == {"follows": 173, "refused": 19}


def test_entries_look_like_copies_exactly_where_they_are_copies() -> None:
    compared = 0
    for kinds in RESULTS["packages"].values():
        for kind in kinds.values():
            if "near" in kind:
                assert kind["near"] == kind["copies"]
                compared += 1
    assert compared >= 80


_elsewhere: dict[int, Tensor] = {}


class Elsewhere(SGD):
    """SGD with momentum that nobody can find."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            momentum = _elsewhere.setdefault(id(parameter), torch.zeros(1000))
            part = momentum[: parameter.numel()].view_as(parameter)
            part.mul_(0.9).add_(parameter.grad)
            parameter.sub_(part, alpha=0.01)


@pytest.mark.parametrize(
    ("make", "status"),
    [
        (of_parameters(Adam, lr=0.01), "follows"),
        (of_parameters(torch.optim.Adafactor), "refused"),
        (of_parameters(Elsewhere, lr=0.01), "SILENT"),
    ],
    ids=["follows", "refused", "silent"],
)
def test_each_outcome_is_found(make: Make, status: str) -> None:
    assert outcome("Tried", [make])["status"] == status
