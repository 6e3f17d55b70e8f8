"""Whatever was edited, undone and redone, the file of it loads, and undo and redo go on as in the
saved net.
"""

import copy
import random
from contextlib import suppress
from typing import Any

import pytest
import torch

import grapnet as gn

from .test_roundtrip import content


def some(rng: random.Random, items: Any, share: float) -> Any:
    return items[torch.tensor([rng.random() < share for _ in range(len(items))], dtype=torch.bool)]


def add(net: gn.GrapNet, edit: gn.Edit, rng: random.Random) -> None:
    number = rng.randrange(len(net.layers))
    kind, owner = rng.choice([None, "tanh", "gelu"]), rng.choice([None, "a", "b"])
    new = edit.add_nodes(
        number, rng.randint(1, 3), owner=owner, activation=kind if number else None
    )
    if number:
        edit.connect(some(rng, net.layers[number - 1], 0.6), new)
    if number + 1 < len(net.layers):
        edit.connect(new, some(rng, net.layers[number + 1], 0.6))


def turn(net: gn.GrapNet, edit: gn.Edit, rng: random.Random) -> None:
    verb, layer = rng.choice([edit.freeze, edit.unfreeze]), rng.choice(list(net.layers))
    if rng.random() < 0.5:
        verb(some(rng, layer.outgoing(), 0.4))
    else:
        verb(some(rng, layer, 0.4), incoming=rng.random() < 0.5, outgoing=rng.random() < 0.5)


def operate(net: gn.GrapNet, edit: gn.Edit, rng: random.Random) -> None:
    """Adds one random operation to an edit."""
    layers = list(net.layers)
    rng.choice(
        [
            lambda: add(net, edit, rng),
            lambda: turn(net, edit, rng),
            lambda: edit.cut(some(rng, rng.choice(layers).outgoing(), 0.5 * rng.random())),
            lambda: edit.remove_nodes(some(rng, rng.choice(layers[1:-1]), 0.3)),
            lambda: edit.set_owner(
                some(rng, rng.choice(layers), 0.4), rng.choice([None, "x", "y"])
            ),
            lambda: edit.set_activation(
                some(rng, rng.choice(layers[1:]), 0.4), rng.choice(["relu", "tanh"])
            ),
            lambda: edit.remove_orphans(fold_bias=rng.random() < 0.5),
        ]
    )()


def random_net(rng: random.Random) -> gn.GrapNet:
    """Returns a net after some edits, undos and redos, with weights that have moved since."""
    net = gn.GrapNet([rng.randint(0, 5) for _ in range(rng.randint(3, 5))], density=rng.random())
    if rng.random() < 0.3:
        net.journal.undo_limit = rng.randint(0, 4)
    for _ in range(rng.randint(1, 20)):
        # operations that exclude each other; nothing left to undo
        with suppress(gn.EditError, gn.HistoryError):
            if rng.random() < 0.65:
                with net.edit(reason=f"{rng.random():.3f}") as edit:
                    for _ in range(rng.randint(1, 3)):
                        operate(net, edit, rng)
            else:
                rng.choice([net.undo, net.undo, net.redo])()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter))
    return net


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_return_and_go_on(tmp_path, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    net = random_net(rng)
    for undo in (False, True):
        gn.save(tmp_path / "net", net, undo=undo, history="full")
        loaded = gn.load(tmp_path / "net")
        assert content(loaded) == content(net)
    net = copy.deepcopy(net)
    for verb in ["undo"] * 17 + ["redo"] * 20 + ["undo"] * 3:
        try:
            getattr(net, verb)()
        except gn.HistoryError:
            continue
        getattr(loaded, verb)()
        gn.check(loaded)
    assert content(loaded) == content(net)
