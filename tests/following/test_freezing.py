"""Frozen coordinates stay bit-identical under every optimizer, gradients flow through them, and
their state is gone.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import grapnet as gn

from .plain import OPTIMIZERS, batch, make_net, train

FREEZE: dict[str, Callable[[gn.GrapNet, gn.Edit], None]] = {
    "relations": lambda net, edit: edit.freeze(net.layers[1].outgoing()[::2]),
    "biases": lambda net, edit: edit.freeze(net.layers[2], incoming=False, outgoing=False),
    "nodes": lambda net, edit: edit.freeze(net.layers[1][:2]),
    "without incoming": lambda net, edit: edit.freeze(net.layers[1][:2], incoming=False),
    "without outgoing": lambda net, edit: edit.freeze(net.layers[1][:2], outgoing=False),
    "without bias": lambda net, edit: edit.freeze(net.layers[1][:2], bias=False),
    "owner": lambda net, edit: edit.freeze(net.select(owner="task-1")),
    "a whole layer": lambda net, edit: edit.freeze(net.layers[2]),
}


def owned_net() -> gn.GrapNet:
    """Returns a net with nodes of an owner and nothing frozen."""
    net = make_net()
    with net.edit() as edit:
        edit.unfreeze(net.select())
        edit.set_owner(net.layers[1][1:3], "task-1")
        edit.set_owner(net.layers[2][2], "task-1")
    return net


def coordinates(net: gn.GrapNet) -> tuple[Tensor, Tensor]:
    """Returns every value, relations first, and whether it is frozen."""
    relations, state = [layer.outgoing() for layer in list(net.layers)[:-1]], net.state_dict()
    values = [r.weights for r in relations] + [layer.biases for layer in list(net.layers)[1:]]
    held = [r.frozen for r in relations]
    for number, layer in list(enumerate(net.layers))[1:]:
        held.append(torch.zeros(len(layer), dtype=torch.bool))
        held[-1][state[f"layers.{number}.frozen"].long()] = True
    return torch.cat(values).detach().clone(), torch.cat(held)


def state_bytes(optimizer: Optimizer) -> int:
    """Returns the memory of everything with one value a coordinate."""
    values = [
        v
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, Tensor) and v.dim()
    ]
    return sum(v.untyped_storage().nbytes() for v in values)


ON_PAPER = {  # how many coordinates of `owned_net` freeze: 5-4-4-3 nodes, fully connected
    "relations": 8,
    "biases": 4,
    "nodes": 2 + 2 * 5 + 2 * 4,
    "without incoming": 2 + 2 * 4,
    "without outgoing": 2 + 2 * 5,
    "without bias": 2 * 5 + 2 * 4,
    "owner": 3 + (2 * 5 + 2 * 4) + (4 + 3) - 2,  # the two relations between them count once
    "a whole layer": 4 + 4 * 4 + 4 * 3,
}


@pytest.mark.parametrize("how", FREEZE)
def test_what_is_frozen_leaves_the_parameters_and_the_optimizer(how: str) -> None:
    net = owned_net()
    optimizer = AdamW(net.parameters(), amsgrad=True)
    gn.attach(optimizer, net)
    train(net, optimizer, range(2))
    trainable, memory, count = net.count().trainable, state_bytes(optimizer), ON_PAPER[how]
    with net.edit() as edit:
        FREEZE[how](net, edit)
    values, held = coordinates(net)
    assert net.count().frozen == int(held.sum()) == count
    assert net.count().trainable == sum(p.numel() for p in net.parameters()) == trainable - count
    # exp_avg, exp_avg_sq, max_exp_avg_sq in double precision
    assert state_bytes(optimizer) == memory - count * 3 * 8
    train(net, optimizer, range(2, 6))
    after, _ = coordinates(net)
    assert torch.equal(after[held], values[held])
    assert bool((after[~held] != values[~held]).all())
    with net.edit() as edit:
        edit.unfreeze(net.select())
    assert (net.count().trainable, net.count().frozen, state_bytes(optimizer)) == (
        trainable,
        0,
        memory,
    )
    for t, state in enumerate(optimizer.state[s.weight] for s in net.transitions):
        back = held[sum(len(s.weight) for s in list(net.transitions)[:t]) :][
            : len(net.transitions[t].weight)
        ]
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert bool((state[key][back] == 0).all())
            assert bool((state[key][~back] != 0).all())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_frozen_coordinates_stay_put_under_every_optimizer(kind: str) -> None:
    net = owned_net()
    optimizer = OPTIMIZERS[kind](list(net.parameters()))
    gn.attach(optimizer, net)
    parameters = list(net.parameters())
    for seed in range(12):
        if seed == 3:  # with momentum in every slot
            with net.edit() as edit:
                edit.freeze(net.select(owner="task-1"))
                edit.freeze(net.layers[2].outgoing()[::3])
            values, held = coordinates(net)
        optimizer.zero_grad()
        net(batch(seed)).square().sum().backward()
        nn.utils.clip_grad_norm_(parameters, 0.7)
        optimizer.step()
    after, _ = coordinates(net)
    assert torch.equal(after[held], values[held])
    moved = (after != values)[~held]
    # Muon has no biases, Rprop skips a turn
    assert bool(moved.all()) or kind.startswith(("muon", "rprop"))
    assert int(moved.sum()) > len(moved) // 2
    with net.edit() as edit:
        edit.unfreeze(net.select())
    train(net, optimizer, range(12, 15))
    last, _ = coordinates(net)
    assert int((last != after)[held].sum()) > int(held.sum()) // 2


def test_gradients_flow_through_frozen_coordinates() -> None:
    free, held = owned_net(), owned_net()
    with held.edit() as edit:
        edit.freeze(held.layers[2])
    gradients = []
    for net in (free, held):
        x = batch(0).requires_grad_()
        net(x).square().sum().backward()
        gradients.append((x.grad, net.transitions[0].weight.grad, net.layers[1].bias.grad))
    for first, second in zip(*gradients, strict=True):
        assert bool(second.ne(0).all())
        torch.testing.assert_close(first, second)
    assert held.layers[2].incoming().gradients is None or bool(
        (held.layers[2].incoming().gradients == 0).all()
    )


def clipped_steps(
    parameters: list[nn.Parameter],
    optimizer: Optimizer,
    loss: Callable[[int], Tensor],
    steps: int,
    hold: Any,
) -> None:
    """Trains with clipping; `hold` gets its turn before each step."""
    for step in range(steps):
        optimizer.zero_grad()
        loss(step % 5).backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        hold()
        optimizer.step()


def make_adamw(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=0.01, weight_decay=0.1, amsgrad=True)


def test_a_thousand_steps_of_adamw() -> None:
    net = owned_net()
    parameters = list(net.parameters())
    optimizer = make_adamw(parameters)
    gn.attach(optimizer, net)
    train(net, optimizer, range(3))
    with net.edit() as edit:
        edit.freeze(net.select(owner="task-1"))
    values, held = coordinates(net)
    clipped_steps(
        parameters, optimizer, lambda seed: net(batch(seed)).square().sum(), 1000, lambda: None
    )
    after, _ = coordinates(net)
    assert torch.equal(after[held], values[held])
    assert bool((after[~held] != values[~held]).all())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_zeroed_gradients_alone_hold_nothing(weight_decay: float) -> None:
    plain = owned_net().to_module()
    parameters = list(plain.parameters())
    optimizer = make_adamw(parameters)
    optimizer.param_groups[0]["weight_decay"] = weight_decay
    first = parameters[0]
    plain(batch(0)).square().sum().backward()
    optimizer.step()  # leaves momentum behind
    values = first.detach().clone()

    def hold() -> None:
        assert first.grad is not None
        first.grad[:2] = 0

    clipped_steps(parameters, optimizer, lambda seed: plain(batch(seed)).square().sum(), 20, hold)
    assert bool((first[:2] != values[:2]).all())
