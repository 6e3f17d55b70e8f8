"""Every optimizer, edited while it trains, equals plain Parameters whose slots are moved by hand,
to the last bit.
"""

from typing import Any

import pytest
import torch

import grapnet as gn

from .plain import OPTIMIZERS, ByHand, Make, make_net, require_equal, rewire, train


def start(make: Make, **settings: Any) -> tuple[gn.GrapNet, torch.optim.Optimizer, ByHand]:
    """Returns a net with an attached optimizer, and the same by hand, after three steps."""
    net = make_net()
    optimizer = make(list(net.parameters()))
    hand = ByHand(net, make)
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
