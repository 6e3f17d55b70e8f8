"""Checkpoints of models with nets inside: all of it returns, whatever stands at the places of the
nets, or nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import grapnet as gn

from .files import as_text, parse
from .models import (
    Counting,
    Tied,
    content,
    conv,
    conv_with_net,
    edit,
    nets_in,
    train,
    trained,
    values,
)

PLACEHOLDERS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 4)),
    "another shape": lambda: nn.Linear(48, 3, bias=False),
    "meta": lambda: nn.Linear(48, 4, device="meta"),
    "nothing": nn.Identity,
    "a net": lambda: gn.GrapNet([48, 30, 2]),
    "an edited net": lambda: conv_with_net()[0][1],
}


@pytest.mark.parametrize("there", PLACEHOLDERS)
def test_training_goes_on_bit_for_bit_whatever_stood_there(tmp_path, there):
    model, optimizer = conv_with_net()
    gn.save(tmp_path / "run", model, optimizer=optimizer, epoch=3)
    fresh = conv(PLACEHOLDERS[there]())
    kept = dict(fresh[0].named_parameters())
    assert gn.restore(tmp_path / "run", into=fresh) == {"epoch": 3}
    assert values(fresh) == values(model)
    assert fresh[0][4].seen == model[0][4].seen == 5
    assert all(p is kept[name] for name, p in fresh[0].named_parameters())
    gn.check(fresh[1])
    resumed = torch.optim.Adam(fresh.parameters(), lr=0.5)
    gn.restore(tmp_path / "run", optimizer=resumed)
    gn.attach(resumed, fresh[1])
    assert train(fresh, resumed, 2, seed=3) == train(model, optimizer, 2, seed=3)
    edit(fresh[1]), edit(model[1])
    assert train(fresh, resumed, 2, seed=4) == train(model, optimizer, 2, seed=4)
    assert values(fresh) == values(model)
    assert as_text(resumed.state_dict()) == as_text(optimizer.state_dict())


def test_several_shared_and_tied_parts_return_as_they_were(tmp_path):
    model, _ = trained(Tied())
    gn.save(tmp_path / "run", model)
    fresh = Tied()
    gn.restore(tmp_path / "run", into=fresh)
    assert values(fresh) == values(model)
    assert fresh.first is fresh.again["first"]
    assert fresh.first is not fresh.second
    assert fresh.out.weight is fresh.embedding.weight
    assert [net.history[0].reason for net in nets_in(fresh)] == ["edit 0", "edit 1"]
    assert len(list(fresh.parameters())) == len(list(model.parameters()))


def test_what_is_tied_is_written_once(tmp_path):
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = gn.GrapNet([2, 2])
            self.one = nn.Linear(100, 100)
            self.other = nn.Linear(100, 100)

    apart = Wide()
    tied = Wide()
    tied.other.weight = tied.one.weight
    for name, model in (("apart", apart), ("tied", tied)):
        gn.save(tmp_path / name, model)
    saved = (tmp_path / "apart").stat().st_size - (tmp_path / "tied").stat().st_size
    assert 39_000 < saved < 41_000


@pytest.mark.parametrize("attach_first", [True, False])
def test_undo_gives_every_net_its_own_optimizer_state_back(tmp_path, attach_first):
    ends = []
    for interrupted in (False, True):
        torch.manual_seed(5)
        model, optimizer = trained(Tied())
        if interrupted:
            gn.save(tmp_path / "run", model, undo=True, optimizer=optimizer)
            model = Tied()
            gn.restore(tmp_path / "run", into=model)
            optimizer = torch.optim.Adam(model.parameters())
            for net in nets_in(model) if attach_first else ():
                gn.attach(optimizer, net)
            gn.restore(tmp_path / "run", optimizer=optimizer)
            for net in nets_in(model):
                gn.attach(optimizer, net)
        losses = []
        for net in nets_in(model):
            net.undo()
            losses += train(model, optimizer, 1, seed=6)
        ends.append((losses, values(model), as_text(optimizer.state_dict())))
    assert ends[0] == ends[1]


def test_a_net_becomes_like_what_it_replaces(tmp_path):
    gn.save(tmp_path / "run", conv_with_net()[0], undo=True)
    fresh = conv().double()
    fresh[1].requires_grad_(False).eval()
    gn.restore(tmp_path / "run", into=fresh)
    assert {p.dtype for p in fresh.parameters()} == {torch.float64}
    assert not any(p.requires_grad for p in fresh[1].parameters())
    assert all(p.requires_grad for p in fresh[0].parameters())
    assert fresh.training
    assert not fresh[1].training
    fresh[1].undo()
    gn.check(fresh[1])
    assert fresh(torch.zeros(2, 1, 6, 6, dtype=torch.float64)).shape == (2, 4)


def test_grafted_modules_return_and_can_be_taken_out_again(tmp_path):
    model = conv()
    expected = model(torch.ones(2, 1, 6, 6))
    gn.graft(model, "1")
    edit(model[1])
    gn.save(tmp_path / "run", model)
    fresh = conv()
    gn.restore(tmp_path / "run", into=fresh)
    model.eval(), fresh.eval()
    assert torch.equal(fresh(torch.ones(2, 1, 6, 6)), model(torch.ones(2, 1, 6, 6)))
    gn.ungraft(model), gn.ungraft(fresh)
    assert values(fresh) == values(model)
    assert [type(module) for module in fresh[1]] == [nn.Linear, nn.Tanh, nn.Linear]
    assert fresh[1][0].out_features == 10
    assert fresh(torch.ones(2, 1, 6, 6)).shape == expected.shape


def test_other_objects_return_in_the_same_call(tmp_path):
    model, _ = conv_with_net()
    generator = torch.Generator().manual_seed(3)
    rules = gn.rules.RuleManager()
    gn.save(tmp_path / "run", model, generator=generator, rules=rules, notes={"a": torch.arange(3)})
    other = torch.Generator()
    fresh = conv()
    data = gn.restore(tmp_path / "run", into=fresh, generator=other, rules=gn.rules.RuleManager())
    assert torch.equal(data["notes"]["a"], torch.arange(3))
    assert torch.equal(other.get_state(), generator.get_state())
    assert values(fresh) == values(model)


def changed(change: Callable[[nn.Module], Any]) -> nn.Module:
    model = conv()
    return change(model) or model


class Stubborn(Counting):
    """Takes no count but its own."""

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state["seen"]:
            raise ValueError("no")


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Conv2d(1, 3, 3)


def stubborn(model: nn.Module) -> None:
    model[0][4] = Stubborn()


MISFITS: dict[str, Callable[[nn.Module], Any]] = {
    "no such place": lambda m: nn.Sequential(m[0]),
    "missing parameter": lambda m: m[0].register_parameter("more", nn.Parameter(torch.ones(2))),
    "unknown parameter": lambda m: m[0][0].register_parameter("bias", None),
    "wrong name": lambda m: m[0].add_module("5", m[0]._modules.pop("1")),
    "wrong shape": lambda m: m[0].__setitem__(0, nn.Conv2d(1, 3, 1)),
    "meta": lambda m: m[0].to("meta") and None,
    "inference": lambda m: m[0].__setitem__(0, in_inference_mode()),
    "lazy": lambda m: m[0].__setitem__(0, nn.LazyConv2d(3, 3)),
    "tied": lambda m: setattr(m[0][1], "bias", m[0][1].weight),
    "a state that is refused": stubborn,
    "shared place": lambda m: nn.Sequential(m[0], m[1], m[1]),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_leaves_the_model_as_it_was(tmp_path, misfit):
    model, _ = conv_with_net()
    gn.save(tmp_path / "run", model, generator=torch.Generator().manual_seed(3))
    other = changed(MISFITS[misfit])
    generator = torch.Generator()
    if misfit not in ("meta", "lazy"):
        before = content(other)
    held = dict(other.named_modules())
    state = generator.get_state()
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "run", into=other, generator=generator)
    assert dict(other.named_modules()) == held
    assert torch.equal(generator.get_state(), state)
    if misfit not in ("meta", "lazy"):
        assert content(other) == before


def test_weights_that_were_tied_must_be_tied(tmp_path):
    gn.save(tmp_path / "run", Tied())
    fresh = Tied()
    fresh.out.weight = nn.Parameter(fresh.out.weight.detach().clone())
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "run", into=fresh)


def test_optimizers_come_after_the_model(tmp_path):
    model, optimizer = conv_with_net()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    gn.save(tmp_path / "run", model, optimizer=optimizer, scheduler=scheduler)
    fresh = conv(gn.GrapNet([48, 8, 4]))
    edit(fresh[1])
    before = content(fresh)
    stale = torch.optim.Adam(fresh.parameters())
    for name, made in (
        ("optimizer", stale),
        ("scheduler", torch.optim.lr_scheduler.StepLR(stale, 3)),
    ):
        with pytest.raises(gn.errors.CheckpointError):
            gn.restore(tmp_path / "run", into=fresh, **{name: made})
    assert content(fresh) == before


def test_a_net_and_a_model_are_told_apart(tmp_path):
    model, _ = conv_with_net()
    gn.save(tmp_path / "model", model)
    gn.save(tmp_path / "net", model[1])
    with pytest.raises(gn.errors.CheckpointError):
        gn.load(tmp_path / "model")
    for into in (conv(), gn.GrapNet([48, 8, 4])):
        with pytest.raises(gn.errors.CheckpointError):
            gn.restore(tmp_path / "net", into=into)
    with pytest.raises(gn.errors.CheckpointError, match="nets: "):
        gn.restore(tmp_path / "model", into=gn.GrapNet([48, 8, 4]))
    for nothing in (nn.Linear(2, 2), None):
        with pytest.raises(TypeError, match="none of them"):
            gn.save(tmp_path / "none", nothing)


def test_a_model_that_cannot_be_saved_is_refused_by_name(tmp_path):
    model = conv(gn.GrapNet([48, 8, 4]))
    model.layer = model[1].layers[1]
    with pytest.raises(gn.errors.CheckpointError):
        gn.save(tmp_path / "run", model)
    model = conv(gn.GrapNet([48, 8, 4]))
    model.weights = nn.ParameterList([model[1].transitions[0].weight])
    with pytest.raises(gn.errors.CheckpointError):
        gn.save(tmp_path / "run", model)
    model = conv(gn.GrapNet([48, 8, 4]))
    model[0][4].get_extra_state = lambda: {"seen": object()}
    with pytest.raises(
        gn.errors.CheckpointError, match=r"^state\['0\.4\._extra_state'\]\['seen'\]: "
    ):
        gn.save(tmp_path / "run", model)
    model = conv(gn.GrapNet([48, 8, 4]))
    with model[1].edit(trial=True) as trial:
        trial.cut(model[1].layers[0].outgoing()[:2])
        trial.commit()
        with pytest.raises(gn.errors.CheckpointError, match=r"^nets\.0\.graph\.version: a trial"):
            gn.save(tmp_path / "run", model)
    assert list(tmp_path.iterdir()) == []


def test_the_fields_of_a_file_of_a_net(tmp_path: Path):
    gn.save(tmp_path / "net", gn.GrapNet([3, 2]), epoch=1)
    document, tensors = parse((tmp_path / "net").read_bytes())
    assert list(document) == ["format", "graph", "journal", "execution", "extras"]
    assert document["format"] == 1
    assert {name.split(".")[0] for name in tensors} == {
        "layers",
        "transitions",
        "journal",
    }
