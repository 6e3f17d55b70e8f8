"""Every optimizer, edited while it trains, equals plain Parameters whose slots are moved by hand,
to the last bit.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam

import grapnet as gn

from .plain import OPTIMIZERS, ByHand, Make, make_net, require_equal, rewire, swap_one, train


def start(make: Make, **settings: Any) -> tuple[gn.GrapNet, torch.optim.Optimizer, ByHand]:
    """Returns a net with an attached optimizer, and the same by hand, after three steps."""
    net = make_net()
    optimizer, hand = make(list(net.parameters())), ByHand(net, make)
    gn.attach(optimizer, net, **settings)
    train(net, optimizer, range(3))
    hand.train(range(3))
    require_equal(net, optimizer, hand)
    return net, optimizer, hand


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_edit_in_the_middle(kind: str) -> None:
    net, optimizer, hand = start(OPTIMIZERS[kind])
    reborn = rewire(net)
    hand.edit(net, reborn=reborn)
    require_equal(net, optimizer, hand)
    train(net, optimizer, range(3, 7))
    hand.train(range(3, 7))
    require_equal(net, optimizer, hand)


def test_the_reference_tells_relations_apart() -> None:
    net, optimizer, hand = start(OPTIMIZERS["adam"])
    rewire(net)
    hand.edit(net)  # as if 1 → 6 had survived
    with pytest.raises(AssertionError):
        require_equal(net, optimizer, hand)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_freezing_and_unfreezing(kind: str) -> None:
    net, optimizer, hand = start(OPTIMIZERS[kind])
    with net.edit(reason="freeze") as edit:
        edit.freeze(net.layers[1][0])
        edit.freeze(net.layers[2].outgoing()[::2])
    hand.edit(net)
    train(net, optimizer, range(3, 6))
    hand.train(range(3, 6))
    require_equal(net, optimizer, hand)
    with net.edit(reason="unfreeze") as edit:
        edit.unfreeze(net.layers[1][0], incoming=False)
        edit.unfreeze(net.layers[2].outgoing()[::4])
    hand.edit(net)  # what comes back starts clean
    train(net, optimizer, range(6, 9))
    hand.train(range(6, 9))
    require_equal(net, optimizer, hand)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_undo_and_redo(kind: str) -> None:
    net, optimizer, hand = start(OPTIMIZERS[kind])
    lost = [hand.slots()]  # by what the next commit takes away
    reborn = rewire(net)
    hand.edit(net, reborn=reborn)
    for verb in (net.undo, net.redo, net.undo):
        train(net, optimizer, range(3, 5))
        hand.train(range(3, 5))
        lost.append(hand.slots())
        verb()
        hand.edit(net, reborn=reborn, returning=lost[-2])
        require_equal(net, optimizer, hand)
    train(net, optimizer, range(5, 8))
    hand.train(range(5, 8))
    require_equal(net, optimizer, hand)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_renewing_survivors(kind: str) -> None:
    net, optimizer, hand = start(OPTIMIZERS[kind], survivors="renew")
    lost = hand.slots()
    for verb, returning in ((rewire, None), (gn.GrapNet.undo, lost)):
        verb(net)
        hand.edit(net, reborn={(1, 6)}, returning=returning, renew=True)
        train(net, optimizer, range(3, 6))
        hand.train(range(3, 6))
        require_equal(net, optimizer, hand)


def tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    """Returns the state with one value a coordinate."""
    values = optimizer.state[parameter].values()
    return [v for v in values if isinstance(v, Tensor) and v.dim() == parameter.dim()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_is_as_much_shorter_as_relations_were_cut(kind: str) -> None:
    net, optimizer, _ = start(OPTIMIZERS[kind])
    averaged = copy.deepcopy(net)
    gn.attach(averaged, net)
    weight, copied = net.transitions[0].weight, averaged.transitions[0].weight
    before = len(weight)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=7))
    state = tensors(optimizer, weight)
    assert state
    assert {len(weight), len(copied), *map(len, state)} == {before - 7}
    assert all(value.untyped_storage().nbytes() == (before - 7) * 8 for value in state)


@pytest.mark.parametrize("edit", [rewire, swap_one])
def test_one_that_did_not_follow_refuses_and_one_without_state_does_not(edit: Any) -> None:
    net = make_net()
    adam, plain = Adam(net.parameters()), SGD(net.parameters(), lr=0.1)
    train(net, adam, range(2))
    train(net, plain, range(2))
    edit(net)
    with pytest.raises(gn.OptimizerError, match=r"gn\.attach\(optimizer, net\)"):
        train(net, adam, range(1))
    train(net, plain, range(2))
