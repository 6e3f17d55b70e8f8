"""Mutated files of a model with nets: each is put into a model as it says, or refused by a field's
name.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn

from .models import content
from .mutations import mutations
from .referee import FIELDS, as_text

COUNT, SEED = 90, 3


class Small(nn.Module):
    """A grafted Linear under two names, behind a Linear whose weight is tied to another's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.again = nn.ModuleList([nn.Linear(3, 3)])
        self.net = self.again[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.again[0](self.net(self.second(self.first(x))))


def edited() -> Small:
    model = Small()
    gn.graft(model, "net")
    with model.net.edit(reason="cut") as edit:
        edit.cut(model.net.layers[0].outgoing()[[1, 4]])
        edit.freeze(model.net.layers[1][:1])
    return model


def test_every_mutation_is_put_in_as_it_says_or_refused(tmp_path):
    path, mutated = tmp_path / "run", tmp_path / "mutated"
    gn.save(path, edited(), undo=True, notes={"a": [1, torch.ones(2)]})
    fresh, fields, outcomes = Small(), set(), {"refused": 0, "put in": 0}
    for mutation in mutations(path.read_bytes(), COUNT, seed=SEED):
        mutated.write_bytes(mutation.data)
        before = content(fresh)
        try:
            gn.restore(mutated, into=fresh)
        except gn.CheckpointError as error:
            fields.add(str(error).split(":")[0].split(".")[0].split("[")[0])
            outcomes["refused"] += 1
            assert content(fresh) == before, mutation.label
            continue
        assert mutation.document is not None
        outcomes["put in"] += 1
        require_agreement(fresh, mutation.document, mutation.tensors)
    assert {"nets", "state", "container"} <= fields <= {*FIELDS, "nets", "state"}
    assert min(outcomes.values()) > COUNT // 12, outcomes


def require_agreement(model: Small, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Asserts that a model holds exactly what a file says."""
    (part,) = document["nets"]
    assert sorted(part["places"]) == ["again.0", "net"]
    assert model.net is model.again[0]
    gn.check(model.net)
    assert (model.net.version, model.net.next_uid) == (
        part["graph"]["version"],
        part["graph"]["next_uid"],
    )
    assert as_text(model.net.transitions[0].values().detach()) == as_text(
        tensors["nets.0.transitions.0.weight"]
    )
    assert model.second.weight is model.first.weight
    for name in ("weight", "bias"):
        told = tensors[f"state['first.{name}']"]  # of any type, as load_state_dict takes it
        assert as_text(getattr(model.first, name).detach()) == as_text(told.float())
    assert copy.deepcopy(model).double()(torch.zeros(2, 3, dtype=torch.float64)).shape == (2, 3)
