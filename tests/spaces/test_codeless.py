"""The graph of an adopted model in its file, without the code of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from tests.checkpoint.files import as_text, parse
from tests.spaces import zoo
from tests.spaces.test_files import (
    CHOSEN,
    FORGERIES,
    IN_JOURNAL,
    Forgery,
    adopt,
    differences,
    edited,
    forge,
    free,
    in_graph,
    in_space,
    nodes,
    saved_thin,
    train,
)

Net = Any


def spaces(net: Net) -> list[Any]:
    """Returns everything that a graph knows of its spaces and weights."""
    found: list[Any] = []
    for space in net.spaces:
        sides = (space.writers, space.readers, space.riders)
        found.append((*sides, space.verdict, space.pins, space.rows_per_node))
    for weight in net.transitions:
        ends = (weight.source, weight.target, weight.in_dim, weight.out_dim)
        found.append((weight.name, *ends, weight.size, len(weight.frozen_at)))
    return found


def cut_and_freeze(net: Net) -> None:
    with net.edit(reason="cut and freeze", by="test") as edit:
        edit.cut(net.select().outgoing().smallest(fraction=0.3))
        edit.freeze(free(net)[0][:2])
        edit.set_owner(free(net)[-1][1:], "others")


@pytest.mark.parametrize("name", CHOSEN)
def test_a_file_shows_the_graph_that_was_saved(name, tmp_path):
    _, net, optimizer = edited(name)
    cut_and_freeze(net)
    gn.save(tmp_path / "file", net, undo=True, optimizer=optimizer)
    file = gn.open(tmp_path / "file")
    found = file.adopted
    assert file.is_adopted
    assert nodes(found) == nodes(net)
    assert spaces(found) == spaces(net)
    assert print_of(found) == print_of(net)
    for weight in net.transitions:
        module = weight.name.rpartition(".")[0]
        assert found.space(module).name == net.space(module).name
    gn.check(found)


def print_of(net: Net) -> str:
    return str(net).partition("\nnot read")[0]


@pytest.mark.parametrize("name", CHOSEN)
def test_edits_of_a_file_are_those_of_a_session(name, tmp_path):
    case, net, optimizer = edited(name)
    gn.save(tmp_path / "file", net, undo=True, optimizer=optimizer, note=[3])
    file = gn.open(tmp_path / "file")
    for graph in (net, file.adopted):
        graph.undo()
        graph.undo()
        cut_and_freeze(graph)
    saved = file.save(tmp_path / "edited")
    assert saved.extras == {"optimizer": "followed", "note": "kept"}
    fresh = zoo.MODELS[name]()
    other = Adam(fresh.model.parameters())
    twin = adopt(fresh, other)
    assert gn.restore(tmp_path / "edited", into=twin, optimizer=other) == {"note": [3]}
    assert spaces(twin)[len(net.spaces) :] == spaces(net)[len(net.spaces) :]
    assert twin.version == net.version
    assert differences((case.model, optimizer), (fresh.model, other)) == []
    train(case, optimizer, 2)
    train(fresh, other, 2)
    for graph in (net, twin):
        graph.undo()
    assert differences((case.model, optimizer), (fresh.model, other)) == []


def test_what_needs_the_code_is_refused_and_changes_nothing(tmp_path):
    saved_thin(tmp_path / "file")
    file = gn.open(tmp_path / "file")
    net = file.adopted
    before = as_text(parse(file.to_bytes()))
    with pytest.raises(gn.errors.EditError, match="without the code"), net.edit() as edit:
        edit.remove_nodes(net.space("0")[:2])
    with pytest.raises(gn.errors.EditError, match="without the code"), net.edit() as edit:
        edit.add_nodes(net.space("0"), 2)
    with pytest.raises(gn.errors.EditError, match="without the code"):
        net(torch.randn(2, 6))
    with pytest.raises(gn.errors.EditError, match="without the code"):
        net.space("0").prove()
    assert as_text(parse(file.to_bytes())) == before


def test_an_average_follows_in_the_file(tmp_path):
    model, net, _ = saved_thin(tmp_path / "file")
    averaged = AveragedModel(model)
    gn.attach(averaged, net)
    gn.save(tmp_path / "file", net, undo=True, averaged=averaged)
    file = gn.open(tmp_path / "file")
    file.adopted.undo()
    assert file.save(tmp_path / "file").extras == {"averaged": "followed"}
    net.undo()
    restored = gn.open(tmp_path / "file").extras["averaged"]
    expected = averaged.state_dict()
    assert restored.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(restored[key], value)


def test_extra_states_and_fixed_parameters_stay(tmp_path):
    class Counting(nn.Linear):
        seen: Any = "nothing"

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    def make() -> Any:
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), Counting(5, 2))

    model = make()
    model[2].seen = 7
    model[0].bias.requires_grad_(False)
    net = gn.adopt(model, torch.randn(4, 3))
    gn.save(tmp_path / "file", net)
    file = gn.open(tmp_path / "file")
    trained = [name for name, p in file.adopted.named_parameters() if p.requires_grad]
    assert trained == [name for name, p in model.named_parameters() if p.requires_grad]
    buffers = [name for name, _ in file.adopted.named_buffers()]
    assert buffers == [name for name, _ in model.named_buffers()]
    cut_and_freeze(file.adopted)
    file.save()
    fresh = make()
    gn.restore(tmp_path / "file", into=fresh)
    assert fresh[2].seen == 7


def test_the_file_of_a_deeper_model_shows_its_blocks(tmp_path):
    case = zoo.MODELS["vit"]()
    net = adopt(case)
    with net.edit(reason="deeper") as edit:
        edit.insert("blocks", after=0)
    gn.save(tmp_path / "file", net, undo=True, history="full")
    found = gn.open(tmp_path / "file").adopted
    assert nodes(found) == nodes(net)
    assert spaces(found) == spaces(net)
    assert found.history[-1].counts["blocks_added"] == 1


def test_files_of_nets_have_no_adopted_model(tmp_path):
    gn.save(tmp_path / "file", gn.GrapNet([4, 3, 2]))
    file = gn.open(tmp_path / "file")
    assert not file.is_adopted
    with pytest.raises(gn.errors.CheckpointError, match="nets"):
        _ = file.adopted


OF_SPACES: dict[str, Forgery] = {
    "an unknown verdict": in_space(proof="certain"),
    "pins that are no texts": in_space(pins=[1]),
    "marks that are no list": in_space(marks=None),
    "a writer that is not there": in_space(writers=[["9.weight", 0]]),
    "a dimension that is not there": in_space(readers=[["2.weight", 2]]),
    "half a reader": in_space(readers=[["2.weight"]]),
    "a buffer that is not there": in_graph(buffers=["9.scale"]),
    "a fixed Parameter that is not there": in_graph(fixed=[["0.weight"]]),
}
# What only a model tells: whether a tensor or a number of a file is what it has there.
BY_MODEL = (
    "whole numbers",
    "a number without a module",
    "an attribute of no module",
    "an attribute that is no number",
)


ALL = {**FORGERIES, **OF_SPACES, **IN_JOURNAL}


@pytest.mark.parametrize("name", [name for name in ALL if name not in BY_MODEL])
def test_a_forged_file_is_refused(name: str, tmp_path: Path) -> None:
    saved_thin(tmp_path / "file")
    forge(tmp_path / "file", ALL[name])
    with pytest.raises(gn.errors.CheckpointError):
        _ = gn.open(tmp_path / "file").adopted


@pytest.mark.parametrize("name", OF_SPACES)
def test_a_forged_space_is_not_restored(name: str, tmp_path: Path) -> None:
    saved_thin(tmp_path / "file")
    forge(tmp_path / "file", OF_SPACES[name])
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(
            tmp_path / "file", into=nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        )
