"""gn.check: a whole graph passes, and each broken invariant is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.core._change import Labels


@pytest.fixture
def net() -> gn.GrapNet:
    net = gn.GrapNet([4, 3, 2])
    with net.edit() as edit:
        edit.freeze(net.layers[1][:2])
        edit.cut(net.layers[0][0], slots=[1])
    net(torch.ones(1, 4)).sum().backward()
    return net


def put(store: object, name: str, change: Callable[[torch.Tensor], object]) -> None:
    """Puts a changed copy of a tensor in place."""
    tensor = getattr(store, name).clone()
    change(tensor)
    place(store, name, tensor)


def place(store: Any, name: str, value: Any) -> None:
    """Puts something else into the record that a store keeps it in."""
    if name in ("ptr", "child", "n_children"):
        store.__dict__["topology"] = replace(store.topology, **{name: value})
    elif name in ("uid", "activations"):
        field = {"uid": "uids"}.get(name, name)
        store.__dict__["_roster"] = store._roster._replace(**{field: value})
    else:
        store.__dict__["vector"] = store.vector._replace(**{name: value})


def fill(index: int | slice, value: int) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.__setitem__(index, value)


def nobody(size: int) -> Labels:
    return Labels.uniform("nobody", size)


BREAKS: dict[str, Callable[[gn.GrapNet], object]] = {
    "a child of another layer": lambda n: put(n.transitions[0], "child", fill(0, 7)),
    "a child just outside": lambda n: put(n.transitions[0], "child", fill(1, 3)),
    "a negative child": lambda n: put(n.transitions[0], "child", fill(0, -1)),
    "a child twice": lambda n: put(n.transitions[0], "child", fill(slice(2, 4), 1)),
    "ptr decreases": lambda n: put(n.transitions[1], "ptr", fill(1, 5)),
    "ptr ends early": lambda n: put(n.transitions[1], "ptr", fill(-1, 5)),
    "ptr of another type": lambda n: place(n.transitions[1], "ptr", n.transitions[1].ptr.long()),
    "ptr too long": lambda n: place(n.transitions[1], "ptr", torch.tensor([0, 2, 4, 6, 6]).int()),
    "children miscounted": lambda n: place(n.transitions[1], "n_children", 3),
    "frozen twice": lambda n: put(n.transitions[0], "frozen_at", fill(1, 0)),
    "frozen outside": lambda n: put(n.transitions[0], "frozen_at", fill(-1, 99)),
    "a frozen value lost": lambda n: setattr(n.layers[1], "frozen_values", torch.zeros(1)),
    "a weight lost": lambda n: setattr(n.transitions[1].weight, "data", torch.zeros(1, 1)),
    "a uid twice": lambda n: put(n.layers[1], "uid", fill(0, 3)),
    "uids out of order": lambda n: put(n.layers[1], "uid", lambda u: u.copy_(u.flip(0))),
    "a uid to come": lambda n: setattr(n, "_next_uid", 8),
    "an activation of nobody": lambda n: place(n.layers[1], "activations", nobody(3)),
    "a node without a name": lambda n: put(n.layers[2], "uid", lambda uids: uids.resize_(1)),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_invariant_is_found(net: gn.GrapNet, name: str) -> None:
    gn.check(net)
    BREAKS[name](net)
    with pytest.raises(gn.errors.InvariantError):
        gn.check(net)


def test_a_gradient_of_another_shape_is_named(net: gn.GrapNet) -> None:
    weight = net.transitions[1].weight
    gradient = weight.grad
    weight.grad = None
    content = weight.data
    weight.data = torch.zeros(1, 1)
    weight.grad = torch.zeros(1, 1)
    weight.data = content
    with pytest.raises(gn.errors.InvariantError):
        gn.check(net)
    weight.grad = gradient
    gn.check(net)


def shuffled() -> gn.GrapNet:
    """Returns a net whose first node names its children from the last to the first."""
    parents = torch.arange(40).repeat_interleave(30)
    children = torch.arange(30).repeat(40)
    children[:30] = children[:30].flip(0)
    return gn.GrapNet.from_relations([40, 30], [(parents, children)])


@pytest.mark.parametrize("rows", [(0, 1), (0, 29), (1170, 1199), (30, 59), (600, 601)], ids=str)
@pytest.mark.parametrize("make", [lambda: gn.GrapNet([40, 30]), shuffled], ids=["full", "odd"])
def test_a_child_twice_is_found_anywhere(
    make: Callable[[], gn.GrapNet], rows: tuple[int, int]
) -> None:
    net = make()
    gn.check(net)
    child = net.transitions[0].child
    child[rows[1]] = child[rows[0]].clone()
    with pytest.raises(gn.errors.InvariantError):
        gn.check(net)


def test_neighbours_and_nodes_without_children_may_have_equal_children() -> None:
    gn.check(gn.GrapNet.from_relations([5, 3], [([1, 1, 3, 3], [0, 2, 2, 1])]))
    gn.check(gn.GrapNet.from_relations([5, 3], [([0, 1, 2], [2, 2, 2])]))
    gn.check(gn.GrapNet.from_relations([5, 3], [([4], [2])]))
