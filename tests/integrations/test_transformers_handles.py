"""Hidden units of feed-forward blocks are removed from all nets that share them, or from none."""

from typing import Any

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.convert import ffn_handles, graft_ffn
from tests.integrations.tiny_transformers import MAKE, Training, training

pytestmark = pytest.mark.xdist_group("transformers")

FAMILIES = sorted(MAKE)
GONE = [1, 2, 17, 30]
KEPT = [row for row in range(32) if row not in GONE]
LINEARS = {  # which dimension of which weight counts hidden units, in the first block
    "gpt2": ({"transformer.h.0.mlp.c_fc": 1}, {"transformer.h.0.mlp.c_proj": 0}),
    "bert": (
        {"bert.encoder.layer.0.intermediate.dense": 0},
        {"bert.encoder.layer.0.output.dense": 1},
    ),
    "vit": ({"vit.layers.0.mlp.fc1": 0}, {"vit.layers.0.mlp.fc2": 1}),
    "llama": (
        {"model.layers.0.mlp.gate_proj": 0, "model.layers.0.mlp.up_proj": 0},
        {"model.layers.0.mlp.down_proj": 1},
    ),
}


def without_units(family: str, model: nn.Module) -> None:
    """Deletes the weights of hidden units in a dense model."""
    makers, readers = LINEARS[family]
    for name, dimension in {**makers, **readers}.items():
        linear: Any = model.get_submodule(name)
        linear.weight = nn.Parameter(
            linear.weight.detach().index_select(dimension, torch.tensor(KEPT))
        )
        if name in makers and linear.bias is not None:
            linear.bias = nn.Parameter(linear.bias.detach()[KEPT])
        if name in makers and hasattr(linear, "nf"):
            linear.nf = len(KEPT)


def grafted(family: str, **more: Any) -> tuple[Training, Any]:
    run = training(family, **more)
    return run, graft_ffn(run.model, optimizer=run.optimizer)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_removed_units_are_gone_as_from_a_dense_model(family: str) -> None:
    dense = training(family)
    run, handle = grafted(family)
    before = run.logits()
    commits = handle.remove_hidden(GONE, reason="too many", by="me")
    without_units(family, dense.model)
    assert torch.allclose(run.logits(), dense.logits(), rtol=0, atol=1e-12)
    assert not torch.allclose(run.logits(), before, atol=1e-6)
    assert len(handle.hidden) == 28
    assert [(commit.reason, commit.by) for commit in commits] == [("too many", "me")] * len(
        handle.nets
    )
    state = run.optimizer.state[handle.nets[0].transitions[0].weight]
    assert state["exp_avg"].shape == (16 * 28, 1)
    run.step(2)
    gn.ungraft(run.model, optimizer=run.optimizer)
    shapes = {name: tensor.shape for name, tensor in dense.model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in run.model.state_dict().items()} == shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_returns_them_with_their_moments(family: str) -> None:
    run, handle = grafted(family)
    expected = run.copy()
    handle.remove_hidden(GONE)
    shorter = run.logits()
    receipts = handle.undo()
    assert len(receipts) == len(handle.nets)
    assert torch.equal(run.logits(), expected.logits())
    handle.redo()
    assert torch.equal(run.logits(), shorter)
    handle.undo()
    for number in (2, 3):
        assert torch.equal(run.step(number), expected.step(number))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_units_are_named_by_row_by_bool_or_by_node(family: str) -> None:
    marks = torch.zeros(32, dtype=torch.bool)
    marks[GONE] = True
    run, handle = grafted(family, steps=0)
    handle.remove_hidden(GONE)
    expected = run.logits()
    handle.undo()
    for units in (
        torch.tensor(GONE),
        [row - 32 for row in GONE],
        marks,
        handle.hidden[GONE],
        handle.nets[-1].select(layer=-2, where=lambda nodes: marks),
    ):
        handle.remove_hidden(units)
        assert torch.equal(run.logits(), expected)
        handle.undo()
    assert handle.remove_hidden(handle.hidden[5])[0].reason == "remove hidden units"
    assert handle.remove_hidden([]) == ()
    assert len(handle.hidden) == 31


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_is_no_hidden_unit_is_refused(family: str) -> None:
    _, handle = grafted(family, steps=0)
    _, other = grafted(family, steps=0)
    versions = [net.version for net in handle.nets]
    for units in ([0, 32], torch.ones(31, dtype=torch.bool), [0.5]):
        with pytest.raises(IndexError):
            handle.remove_hidden(units)
    for nodes in (other.hidden[:2], handle.nets[0].layers[0][:2]):
        with pytest.raises(gn.errors.EditError):
            handle.remove_hidden(nodes)
    gone = handle.hidden[:1]
    handle.remove_hidden(gone)
    with pytest.raises(gn.errors.StaleNodeError):
        handle.remove_hidden(gone)
    handle.undo()
    assert [net.version for net in handle.nets] == [version + 2 for version in versions]


class Refusing:
    """A follower that lets nothing happen to a net."""

    def prepare(self, net: gn.GrapNet, commit: gn.Commit) -> Any:
        raise gn.errors.EditError("not this one")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_fault_in_one_net_leaves_all_of_them(which: int) -> None:
    run, handle = grafted("llama")
    expected = run.copy()
    refusing = Refusing()
    handle.nets[which].follow(refusing)
    with pytest.raises(gn.errors.EditError, match="not this one"):
        handle.remove_hidden(GONE)
    assert [net.version for net in handle.nets] == [0, 0, 0]
    assert torch.equal(run.logits(), expected.logits())
    for number in (2, 3):
        assert torch.equal(run.step(number), expected.step(number))
    del refusing
    handle.remove_hidden(GONE)
    assert [net.sizes for net in handle.nets] == [[16, 28], [16, 28], [28, 16]]


def test_nets_that_went_separate_ways_are_told_apart() -> None:
    _, handle = grafted("llama", steps=0)
    gate = handle.nets[0]
    with gate.edit(reason="alone") as edit:
        edit.remove_nodes(gate.layers[1][:2], interface=True)
    with pytest.raises(gn.errors.EditError, match="30, 32, 32"):
        handle.remove_hidden([0])
    gate.undo()
    handle.remove_hidden([0])
    with pytest.raises(AttributeError, match="3 nets"):
        _ = handle.net


@pytest.mark.parametrize("family", FAMILIES)
def test_added_units_change_nothing_at_first_and_learn(family: str) -> None:
    run, handle = grafted(family)
    keys = list(training(family, steps=0).model.state_dict())
    before = run.logits()
    handle.add_hidden(3, owner="more", reason="too few")
    assert len(handle.hidden) == 35
    assert handle.hidden.owners[-4:] == [None, "more", "more", "more"]
    assert torch.allclose(run.logits(), before, rtol=0, atol=1e-12)
    run.step(2)
    run.step(3)
    assert bool((handle.hidden[-3:].outgoing().weights != 0).all())
    logits = run.logits()
    gn.ungraft(run.model, optimizer=run.optimizer)
    assert list(run.model.state_dict()) == keys, "what had no bias has none"
    assert torch.allclose(run.logits(), logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_all_units_can_go(family: str) -> None:
    run, handle = grafted(family)
    with pytest.raises(gn.errors.EditError):
        handle.remove_hidden(torch.ones(32, dtype=torch.bool))
    assert len(handle.hidden) == 32
    handle.remove_hidden(torch.ones(32, dtype=torch.bool), allow_dead=True)
    assert len(handle.hidden) == len(handle.importance()) == 0
    assert [len(each.hidden) for each in ffn_handles(run.model)] == [0, 32]
    assert handle.remove_hidden([]) == ()
    assert bool(run.step(2).isfinite())
    handle.undo()
    assert len(handle.hidden) == 32


def test_one_unit_stays_where_what_comes_back_could_not_run_without() -> None:
    run, handle = grafted("gpt2")
    with pytest.raises(gn.errors.EditError):
        handle.remove_hidden(range(32), allow_dead=True)
    assert handle.net.version == 0
    handle.remove_hidden(range(1, 32))
    logits = run.logits()
    gn.ungraft(run.model, optimizer=run.optimizer)
    assert torch.allclose(run.logits(), logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_an_emptied_block_grows_again(family: str) -> None:
    run, handle = grafted(family)
    keys = list(training(family, steps=0).model.state_dict())
    handle.remove_hidden(range(32), allow_dead=True)
    handle.add_hidden(3, outgoing="linear")
    run.step(2)
    gn.ungraft(run.model, optimizer=run.optimizer)
    assert list(run.model.state_dict()) == keys


@pytest.mark.parametrize("family", ["gpt2", "llama", "phi3"])
def test_importance_is_what_loops_say_of_the_matrices_before_and_after_cuts(family: str) -> None:
    run, handle = grafted(family)
    assert torch.allclose(handle.importance(), importance_of_matrices(handle), rtol=1e-12, atol=0)
    assert not handle.importance().requires_grad
    handle.remove_hidden(GONE)
    with gn.edit(*handle.nets) as edits:
        for net, edit in zip(handle.nets, edits, strict=True):
            for layer in net.layers[:-1]:
                edit.cut(layer.outgoing().smallest(fraction=0.6))
        edits[-1].cut(handle.hidden[5].as_set().outgoing())
        edits[0].freeze(handle.nets[0].layers[0].outgoing().largest(count=7))
    found = handle.importance()
    assert found.shape == (28,)
    assert found.dtype == torch.float64
    assert torch.allclose(found, importance_of_matrices(handle), rtol=1e-12, atol=0)
    assert found[5] == 0
    assert int((found == 0).sum()) == 1
    handle.remove_hidden(found < found.median())
    assert len(handle.hidden) == 15
    run.step(2)


def importance_of_matrices(handle: Any) -> torch.Tensor:
    """Returns the same from dense matrices, unit by unit."""
    plain = [
        module for net in handle.nets for module in net.to_module() if isinstance(module, nn.Linear)
    ]
    *makers, reader = [module.weight.detach() for module in plain]
    count = len(handle.hidden)
    found = []
    for unit in range(count):
        number = reader[:, unit].norm()
        for matrix in makers:
            for row in range(unit, len(matrix), count):
                number = number * matrix[row].norm()
        found.append(number)
    return torch.stack(found)
