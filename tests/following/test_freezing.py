"""Frozen coordinates stay bit-identical under every optimizer, gradients flow through them, and
their state is gone.
"""

from collections.abc import Callable

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
    relations = [layer.outgoing() for layer in list(net.layers)[:-1]]
    state = net.state_dict()
    values = [r.weights for r in relations] + [layer.biases for layer in list(net.layers)[1:]]
    held = [r.frozen for r in relations]
    for number, layer in list(enumerate(net.layers))[1:]:
        held.append(torch.zeros(len(layer), dtype=torch.bool))
        held[-1][state[f"layers.{number}.frozen"].long()] = True
    return torch.cat(values).detach().clone(), torch.cat(held)


def state_bytes(optimizer: Optimizer) -> int:
    """Returns the memory of everything with one value per coordinate."""
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
    trainable = net.count().trainable
    memory = state_bytes(optimizer)
    count = ON_PAPER[how]
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
