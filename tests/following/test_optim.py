"""gn.attach: optimizer state follows edits coordinate by coordinate, and whatever cannot follow
says so.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

import grapnet as gn

from .plain import rewire, swap_one

Make = Callable[[Any], Optimizer]

FOLLOW: dict[str, Make] = {
    "adam": lambda p: Adam(p, lr=0.01),
    "adam foreach": lambda p: Adam(p, lr=0.01, foreach=True),
    "adam fused": lambda p: Adam(p, lr=0.01, fused=True),
    "adam amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "sgd momentum": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "adagrad": lambda p: Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
}
CLEAN = {"adagrad": 0.1}  # what a coordinate's state starts from, where that is not 0


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    net = gn.GrapNet([5, 4, 4, 3], activation="tanh", dtype=torch.float64)
    with net.edit() as edit:
        edit.freeze(net.layers[1][1].outgoing(slots=[0, 2]))
        edit.freeze(net.layers[2][3], incoming=False, outgoing=False)
    return net


def backward(net: gn.GrapNet, seed: int = 0) -> None:
    net.zero_grad()
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    net(x).square().sum().backward()


def train(net: gn.GrapNet, optimizer: Optimizer, steps: int = 3) -> None:
    for seed in range(steps):
        backward(net, seed)
        optimizer.step()


def attached(net: gn.GrapNet, make: Make, **settings: Any) -> Optimizer:
    """An optimizer that follows the net and has taken some steps."""
    optimizer = make(net.parameters())
    gn.attach(optimizer, net, **settings)
    train(net, optimizer)
    return optimizer


def coordinates(net: gn.GrapNet) -> dict[str, list[Any]]:
    """Returns who each trainable coordinate is, parameter by parameter, by uids alone."""
    names: dict[str, list[Any]] = {}
    for t, layer in enumerate(list(net.layers)[:-1]):
        r = layer.outgoing()
        names[f"transitions.{t}.weight"] = list(
            zip(r.parents.tolist(), r.children.tolist(), strict=True)
        )
        names[f"layers.{t + 1}.bias"] = net.layers[t + 1].uids.tolist()
    for name, keys in names.items():
        frozen = set(net.state_dict()[f"{name.rsplit('.', 1)[0]}.frozen"].tolist())
        names[name] = [key for place, key in enumerate(keys) if place not in frozen]
    return names


def hand_carried(old: list[Any], new: list[Any], values: Tensor, clean: float) -> Tensor:
    """Moves values one by one to where their owner stands now."""
    moved = values.new_full((len(new), *values.shape[1:]), clean)
    for place, key in enumerate(new):
        if key in old and key != (1, 6):
            moved[place] = values[old.index(key)]
    return moved


def snapshot(net: gn.GrapNet, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    return {name: copy.deepcopy(optimizer.state[p]) for name, p in net.named_parameters()}


@pytest.mark.parametrize("kind", FOLLOW)
@pytest.mark.parametrize("between", ["steps", "backward and step"])
def test_the_next_steps_are_those_of_a_hand_indexed_optimizer(
    net: gn.GrapNet, kind: str, between: str
) -> None:
    optimizer = attached(net, FOLLOW[kind])
    if between == "backward and step":
        backward(net, 9)
    before, slots = coordinates(net), snapshot(net, optimizer)
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    rewire(net)
    after, twin = coordinates(net), copy.deepcopy(net)
    fresh = FOLLOW[kind](twin.parameters())
    for name, p in twin.named_parameters():
        p.grad = hand_carried(before[name], after[name], gradients[name], 0.0)
        assert torch.equal(net.get_parameter(name).grad, p.grad)
        for key, value in slots[name].items():
            whole = isinstance(value, Tensor) and value.shape == gradients[name].shape
            moved = (
                hand_carried(before[name], after[name], value, CLEAN.get(kind, 0.0))
                if whole
                else value
            )
            fresh.state[p][key] = moved
    if between == "backward and step":
        optimizer.step()
        fresh.step()
    train(net, optimizer)
    train(twin, fresh)
    for name, p in net.named_parameters():
        assert torch.equal(p, twin.get_parameter(name)), name


@pytest.mark.parametrize("kind", FOLLOW)
def test_undo_brings_every_slot_back(net: gn.GrapNet, kind: str) -> None:
    optimizer = attached(net, FOLLOW[kind])
    slots, values = (
        snapshot(net, optimizer),
        {n: p.detach().clone() for n, p in net.named_parameters()},
    )
    rewire(net)
    net.undo()
    for name, state in snapshot(net, optimizer).items():
        assert state.keys() == slots[name].keys()
        assert all(
            torch.equal(torch.as_tensor(v), torch.as_tensor(slots[name][k]))
            for k, v in state.items()
        ), name
        assert torch.equal(net.get_parameter(name), values[name])
    net.redo()
    train(net, optimizer)


@pytest.mark.parametrize("kind", ["adam", "sgd momentum", "rmsprop"])
def test_renew_starts_all_state_afresh(net: gn.GrapNet, kind: str) -> None:
    optimizer = attached(net, FOLLOW[kind], survivors="renew")
    rewire(net)
    twin = copy.deepcopy(net)
    train(net, optimizer)
    attached(twin, FOLLOW[kind])
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))


def test_the_first_update_of_a_newborn_under_adam(net: gn.GrapNet) -> None:
    optimizer = attached(net, lambda p: Adam(p, lr=0.01, eps=0.0))
    train(net, optimizer, 17)
    with net.edit() as edit:
        edit.cut(net.layers[0][1].outgoing(to=[6]))
        edit.connect(net.layers[0][1], [6])
    born, old = net.layers[0][1].outgoing(to=[6]), net.layers[0][1].outgoing(to=[6]).weights.item()
    backward(net)
    optimizer.step()
    size = 0.01 * 0.1 / (1 - 0.9**21) * (1 - 0.999**21) ** 0.5 / 0.001**0.5
    assert abs(born.weights.item() - old) == pytest.approx(size, rel=1e-9)


@pytest.mark.parametrize(
    "edit", [rewire, swap_one, lambda n: (swap_one(n), n.undo())], ids=["sizes", "equal", "undone"]
)
@pytest.mark.parametrize("kind", [*FOLLOW])
def test_an_optimizer_that_did_not_follow_refuses_to_step(
    net: gn.GrapNet, kind: str, edit: Any
) -> None:
    optimizer = FOLLOW[kind](net.parameters())
    train(net, optimizer)
    edit(net)
    backward(net)
    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        with pytest.raises(gn.OptimizerError, match=r"gn\.attach\(optimizer, net\)"):
            optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(net.parameters(), before, strict=True))
    train(net, FOLLOW[kind](net.parameters()))  # one made after the edit steps


def test_one_without_state_or_without_moved_coordinates_just_steps(net: gn.GrapNet) -> None:
    plain, adam = SGD(net.parameters(), lr=0.01), Adam(net.parameters())
    train(net, plain)
    rewire(net)
    train(net, plain)
    train(net, adam)
    with net.edit() as edit:
        edit.set_owner(net.layers[1], "a")
        edit.set_activation(net.layers[1], "relu")
    train(net, adam)
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing())
        edit.commit()
    train(net, adam)  # everything is as it was
    swap_one(gn.GrapNet([5, 4, 4, 3]))
    train(net, adam)  # another net's edits are another net's


def test_state_that_was_loaded_or_copied_is_known_to_be_old(net: gn.GrapNet) -> None:
    source = Adam(net.parameters())
    train(net, source)
    loaded = Adam(net.parameters())
    loaded.load_state_dict(source.state_dict())
    twin, copied = copy.deepcopy((net, source))
    swap_one(net)
    swap_one(twin)
    for graph, optimizer in ((net, loaded), (twin, copied)):
        backward(graph)
        with pytest.raises(
            gn.OptimizerError,
            match="is a copy of one that was, or has loaded a state dict of before",
        ):
            optimizer.step()


def test_an_attached_optimizer_that_loads_a_state_of_before_an_edit_says_so(
    net: gn.GrapNet,
) -> None:
    optimizer = attached(net, Adam)
    train(net, optimizer)
    earlier = copy.deepcopy(optimizer.state_dict())
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=2))
    later = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(earlier)
    backward(net)
    with pytest.raises(gn.OptimizerError, match="loaded a state dict of before the edit"):
        optimizer.step()
    optimizer.load_state_dict(later)
    train(net, optimizer)


def test_one_that_was_left_behind_goes_on_from_a_file_of_after_the_edit(
    net: gn.GrapNet, tmp_path: Path
) -> None:
    optimizer, late = attached(net, Adam), Adam(net.parameters())
    train(net, optimizer)
    train(net, late)
    swap_one(net)
    gn.save(tmp_path / "after", net, optimizer=optimizer)
    backward(net)
    with pytest.raises(
        gn.OptimizerError, match=r"gn\.restore\(path, optimizer=optimizer\) of a file saved after"
    ):
        late.step()
    gn.restore(tmp_path / "after", optimizer=late)
    gn.attach(late, net)
    train(net, late)


def test_detaching_and_attaching_late(net: gn.GrapNet) -> None:
    optimizer = attached(net, Adam)
    gn.attach(optimizer, net)  # twice is once
    rewire(net)
    train(net, optimizer)
    gn.detach(optimizer, net)
    swap_one(net)
    with pytest.raises(gn.OptimizerError):
        gn.attach(optimizer, net)
    backward(net)
    with pytest.raises(gn.OptimizerError):
        optimizer.step()


def test_attach_refuses_what_it_cannot_serve(net: gn.GrapNet) -> None:
    foreign = Adam(gn.GrapNet([2, 2]).parameters())
    with pytest.raises(gn.OptimizerError, match="no parameter of the net"):
        gn.attach(foreign, net)
    adam = Adam(net.parameters())
    with pytest.raises(ValueError, match="drop"):
        gn.attach(adam, net, survivors="drop")


def test_lbfgs_cannot_follow_and_says_so(net: gn.GrapNet) -> None:
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    closure = lambda: (backward(net), net(torch.ones(1, 5, dtype=torch.float64)).sum())[1]  # noqa: E731
    optimizer.step(closure)
    with pytest.raises(gn.OptimizerError, match="LBFGS"):
        gn.attach(optimizer, net)
    with net.edit() as edit:  # moves a parameter other than the one its state hangs on
        edit.cut(net.layers[2][0], slots=[0])
        edit.connect(net.layers[2][0], net.layers[3][0])
    with pytest.raises(gn.OptimizerError):
        optimizer.step(closure)


def test_several_groups_optimizers_and_a_scheduler(net: gn.GrapNet) -> None:
    biases, weights = (
        [layer.bias for layer in net.layers if layer.index],
        [t.weight for t in net.transitions],
    )
    first = AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights[:2]}], lr=0.01)
    second = SGD(weights[2:], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)
    gn.attach(first, net)
    gn.attach(second, net)
    for _ in range(2):
        train(net, first, 1)
        train(net, second, 1)
        schedule.step()
        with net.edit() as edit:
            edit.cut(net.layers[0][0], slots=[0])
            edit.cut(net.layers[2][1], slots=[0])
        assert [len(second.state[p]["momentum_buffer"]) for p in weights[2:]] == [
            len(p) for p in weights[2:]
        ]
    assert first.param_groups[1]["lr"] == 0.0025
    assert set(first.state) == {*biases, *weights[:2]}


def test_frozen_coordinates_do_not_move_a_bit(net: gn.GrapNet) -> None:
    optimizer = attached(net, lambda p: AdamW(p, lr=0.1, weight_decay=0.5))
    control = copy.deepcopy(net)
    with net.edit() as edit:
        edit.freeze(net.layers[1][:2])
    nodes = net.layers[1][:2]
    held = torch.cat([nodes.biases, nodes.incoming().weights, nodes.outgoing().weights]).detach()
    train(net, optimizer, 100)
    assert torch.equal(
        torch.cat([nodes.biases, nodes.incoming().weights, nodes.outgoing().weights]), held
    )
    adam = attached(control, lambda p: AdamW(p, lr=0.1, weight_decay=0.5))
    before = control.layers[1].biases.detach()
    control.zero_grad(set_to_none=False)
    adam.step()
    # a gradient of zero alone does not hold a weight
    assert not torch.equal(control.layers[1].biases, before)


def test_neither_the_net_nor_the_optimizer_keeps_the_other_alive(net: gn.GrapNet) -> None:
    optimizer = attached(net, Adam)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
