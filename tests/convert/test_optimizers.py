"""Optimizers through graft and ungraft: the next steps are those of the dense model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingLR

import grapnet as gn
from tests.following.plain import OPTIMIZERS

from .models import backward, difference, make, picture, train, twin

FOREACH = ("sgd momentum", "adam amsgrad", "nadam", "asgd", "rprop")
LEFT_OUT = {f"{name} foreach" for name in OPTIMIZERS if name not in FOREACH} | {"muon"}
PLAIN = {name: build for name, build in OPTIMIZERS.items() if name not in LEFT_OUT}
FFN = "blocks.*.ffn"
CLOSE = 1e-12  # steps of 0.02 in double precision; an update that goes wrong differs by 1e-3


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.02, weight_decay=0.1)


def trained(build: Any = adamw, named: bool = False) -> tuple[nn.Module, Any]:
    """Returns a model in the middle of training, and its optimizer."""
    model = make()
    optimizer = build(model.named_parameters() if named else model.parameters())
    train(model, optimizer, range(3))
    return model, optimizer


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_the_next_steps_are_those_of_the_dense_model(name):
    model, optimizer = trained(PLAIN[name])
    dense, other = twin(model, optimizer)
    gn.graft(model, FFN, optimizer)
    gn.graft(model, nn.Linear, optimizer)
    assert not [module for module in model.modules() if isinstance(module, nn.Linear)]
    train(model, optimizer, range(3, 6))
    train(dense, other, range(3, 6))
    gn.ungraft(model, optimizer=optimizer)
    assert difference(model, dense) < CLOSE
    train(model, optimizer, range(6, 8))
    train(dense, other, range(6, 8))
    assert difference(model, dense) < CLOSE


@pytest.mark.parametrize("verb", ["graft", "ungraft"])
def test_an_optimizer_that_was_not_given_refuses_to_go_on(verb, tmp_path):
    model, optimizer = trained()
    if verb == "graft":
        gn.graft(model, FFN)
    else:
        gn.graft(model, FFN, optimizer)
        gn.ungraft(model, "blocks.0.*")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(gn.errors.OptimizerError):
        train(model, optimizer, range(3, 4))
    if verb == "ungraft":
        with pytest.raises(gn.errors.OptimizerError):
            gn.save(tmp_path / "model.safetensors", model, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, torch.optim.Adam(model.parameters()), range(3, 5))  # another one trains it


def test_an_optimizer_is_attached_to_every_net_of_a_model():
    model, _ = trained()
    nets = gn.graft(model, FFN)
    first = next(iter(nets.values()))
    optimizer = Adam([p for p in model.parameters() if all(p is not q for q in first.parameters())])
    gn.attach(optimizer, model)  # the first net is not its own
    train(model, optimizer, range(2))
    for net in nets.values():
        with net.edit() as edit:
            edit.cut(net.layers[0].outgoing().smallest(fraction=0.5))
    train(model, optimizer, range(2, 3))
    gn.detach(optimizer, model)
    with nets[list(nets)[1]].edit() as edit:
        edit.cut(nets[list(nets)[1]].layers[0].outgoing().smallest(fraction=0.5))
    with pytest.raises(gn.errors.OptimizerError):
        train(model, optimizer, range(3, 4))


def by_dimension(model: nn.Module) -> AdamW:
    named = list(model.named_parameters())
    return AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.2, "lr": 0.01},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.02,
    )


def test_groups_keep_their_settings_order_and_members():
    model = make()
    optimizer = by_dimension(model)
    train(model, optimizer, range(2))
    dense, other = twin(model, optimizer)
    settings = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    groups = optimizer.param_groups
    lists = [group["params"] for group in optimizer.param_groups]
    nets = gn.graft(model, lambda name, _: name.endswith("ffn") or name == "head", optimizer)
    assert [{k: v for k, v in group.items() if k != "params"} for group in groups] == settings
    assert all(
        group["params"] is members
        for group, members in zip(optimizer.param_groups, lists, strict=True)
    )
    ids = [{id(p) for p in members} for members in lists]
    for net in nets.values():
        assert all(id(transition.weight) in ids[0] for transition in net.transitions)
    assert id(nets["head"].layers[1].bias) in ids[1]
    train(model, optimizer, range(2, 5))
    train(dense, other, range(2, 5))
    gn.ungraft(model, optimizer=optimizer)
    assert difference(model, dense) < CLOSE
    by_name = dict(model.named_parameters())
    expected = [
        [n for n, p in dense.named_parameters() if any(p is q for q in g["params"])]
        for g in other.param_groups
    ]
    assert [
        [n for n, p in by_name.items() if any(p is q for q in members)] for members in lists
    ] == expected


def test_parameters_with_names():
    model, optimizer = trained(named=True)
    before = list(optimizer.param_groups[0]["param_names"])
    gn.graft(model, FFN, optimizer)
    group = optimizer.param_groups[0]
    assert len(group["param_names"]) == len(group["params"]) == len(before) + 2
    # in the order of an optimizer made for the grafted model
    for name, p, (own, q) in zip(
        group["param_names"], group["params"], model.named_parameters(), strict=True
    ):
        assert name == own
        assert p is q
    gn.ungraft(model, optimizer=optimizer)
    assert group["param_names"] == before


def test_names_of_ones_own_are_kept_in_front():
    linear = nn.Linear(2, 2)
    optimizer = Adam([("mine", linear.weight), ("other", linear.bias)])
    gn.from_module(linear, optimizer)
    assert optimizer.param_groups[0]["param_names"] == [
        "other.layers.1.bias",
        "mine.transitions.0.weight",
    ]


def test_several_optimizers_share_a_model():
    def build(model):
        weights = [p for p in model.parameters() if p.dim() == 2]
        return SGD(weights, lr=0.05, momentum=0.9), Adam(
            [p for p in model.parameters() if p.dim() < 2], lr=0.02
        )

    model = make()
    optimizers = build(model)
    train(model, optimizers, range(3))
    dense, *others = twin(model, *optimizers)
    nets = gn.graft(model, FFN, optimizers)
    train(model, optimizers, range(3, 5))
    train(dense, others, range(3, 5))
    net = next(iter(nets.values()))
    with net.edit() as edit:  # both follow
        edit.cut(net.layers[0][0], slots=[0])
    net.undo()
    train(model, optimizers, [5])
    train(dense, others, [5])
    gn.ungraft(model, optimizer=optimizers)
    assert difference(model, dense) < CLOSE


def test_an_optimizer_of_a_part_goes_on_with_that_part():
    model = make()
    optimizer = Adam(model.blocks[0].parameters(), lr=0.02)
    train(model, optimizer, range(2))
    nets = gn.graft(model, FFN, optimizer)
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert all(id(p) in held for p in nets["blocks.0.ffn"].parameters())
    assert not any(id(p) in held for p in nets["blocks.1.ffn"].parameters())
    with nets["blocks.1.ffn"].edit() as edit:
        edit.cut(nets["blocks.1.ffn"].layers[0].outgoing().smallest(count=3))
    train(model, optimizer, range(2, 4))


def test_schedulers_go_on():
    runs = []
    for grafted in (False, True):
        model = make()
        optimizer = adamw(model.parameters())
        scheduler = CosineAnnealingLR(optimizer, 10)
        for step in range(6):
            if grafted and step == 2:
                gn.graft(model, FFN, optimizer)
            if grafted and step == 4:
                gn.ungraft(model, optimizer=optimizer)
            train(model, optimizer, [step])
            scheduler.step()
        runs.append((model, optimizer.param_groups[0]["lr"]))
    assert runs[0][1] == runs[1][1] != 0.02
    assert difference(runs[0][0], runs[1][0]) < CLOSE


def test_gradients_are_accumulated_across_graft_and_ungraft():
    model, optimizer = trained()
    dense, other = twin(model, optimizer)
    for one, opt in ((model, optimizer), (dense, other)):
        opt.zero_grad()
        backward(one, 10)
    gn.graft(model, FFN, optimizer)
    backward(model, 11)
    backward(dense, 11)
    gn.ungraft(model, optimizer=optimizer)
    backward(model, 12)
    backward(dense, 12)
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14, msg=name)
    optimizer.step()
    other.step()
    assert difference(model, dense) < CLOSE


def test_a_grafted_model_is_resumed_with_an_optimizer_made_for_it(tmp_path):
    model, optimizer = trained()
    net = gn.graft(model, FFN, optimizer)["blocks.0.ffn"]
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][[1, 2]])
    gn.save(tmp_path / "model", model, optimizer=optimizer)
    other = make(1)
    gn.restore(tmp_path / "model", into=other)
    fresh = adamw(other.parameters())
    gn.restore(tmp_path / "model", optimizer=fresh)
    train(model, optimizer, range(3, 5))
    train(other, fresh, range(3, 5))
    gn.ungraft(model, optimizer=optimizer)
    gn.ungraft(other, optimizer=fresh)
    train(model, optimizer, [5])
    train(other, fresh, [5])
    assert difference(model, other) == 0


def refused(kind: Any, model: nn.Module) -> Any:
    if kind is torch.optim.LBFGS:
        return kind(model.parameters())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return kind(matrices, lr=0.01)


REFUSED = [torch.optim.LBFGS, Adafactor, SparseAdam] + (
    [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []
)


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizers_that_cannot_follow_are_refused_with_nothing_changed(kind):
    model = make()
    good = adamw(model.parameters())
    train(model, good, range(2))
    bad = refused(kind, model)
    if kind not in (torch.optim.LBFGS, SparseAdam):
        bad.step()
    before = picture(model, good, bad)
    with pytest.raises(gn.errors.OptimizerError, match=kind.__name__):
        gn.graft(model, FFN, [good, bad])
    assert picture(model, good, bad) == before
    with pytest.raises(gn.errors.OptimizerError, match=kind.__name__):
        gn.from_module(model.head, [good, bad])
    assert picture(model, good, bad) == before
    gn.graft(model, FFN, good)
    before = picture(model, good, bad)
    with pytest.raises(gn.errors.OptimizerError, match=kind.__name__):
        gn.ungraft(model, optimizer=[good, bad])
    assert picture(model, good, bad) == before


def test_an_optimizer_left_behind_by_an_edit_is_refused():
    model, optimizer = trained()
    nets = gn.graft(model, FFN, optimizer)
    net = nets["blocks.0.ffn"]
    gn.detach(optimizer, net)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=7))
    before = picture(model, optimizer)
    with pytest.raises(gn.errors.OptimizerError):
        gn.ungraft(model, optimizer=optimizer)
    with pytest.raises(gn.errors.OptimizerError):
        gn.graft(model, "head", optimizer)
    assert picture(model, optimizer) == before


def test_an_optimizer_of_replaced_parameters_is_refused_after_edits_elsewhere_too():
    net = gn.GrapNet([3, 4, 2])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    gn.graft(model, "1")
    before = model[0].weight.detach().clone()
    for _ in range(4):
        # Each edit moves the weights of one transition of another net.
        with net.edit() as edit:
            edit.cut(net.layers[0].outgoing()[:1])
        with pytest.raises(gn.errors.OptimizerError):
            optimizer.step()
    assert torch.equal(model[0].weight, before)
