"""gn.check: a whole graph passes, and each broken invariant is found and named."""

from collections.abc import Callable

import pytest
import torch

import grapnet as gn


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
    setattr(store, name, tensor)


def fill(index: int | slice, value: int) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.__setitem__(index, value)


BREAKS: dict[str, tuple[Callable[[gn.GrapNet], object], str]] = {
    "a child of another layer": (lambda n: put(n.transitions[0], "child", fill(0, 7)), r"transition 0.*7 of 3"),
    "a negative child": (lambda n: put(n.transitions[0], "child", fill(0, -1)), r"transition 0.*-1"),
    "a child twice": (lambda n: put(n.transitions[0], "child", fill(slice(2, 4), 1)), "transition 0.*twice"),
    "ptr decreases": (lambda n: put(n.transitions[1], "ptr", fill(1, 5)), "transition 1: ptr decreases"),
    "ptr ends early": (lambda n: put(n.transitions[1], "ptr", fill(-1, 5)), "transition 1.*0 to 6"),
    "ptr of another type": (lambda n: setattr(n.transitions[1], "ptr", n.transitions[1].ptr.long()), "int32"),
    "ptr too long": (
        lambda n: setattr(n.transitions[1], "ptr", torch.tensor([0, 2, 4, 6, 6]).int()),
        "5 entries for 3",
    ),
    "children miscounted": (lambda n: setattr(n.transitions[1], "n_children", 3), "transition 1.*number of children"),
    "frozen twice": (lambda n: put(n.transitions[0], "frozen_at", fill(1, 0)), "transition 0.*ascending"),
    "frozen outside": (lambda n: put(n.transitions[0], "frozen_at", fill(-1, 99)), r"transition 0.*outside"),
    "a frozen value lost": (
        lambda n: setattr(n.layers[1], "frozen_values", torch.zeros(1)),
        "layer 1: 1 frozen",
    ),
    "a weight lost": (
        lambda n: setattr(n.transitions[1].weight, "data", torch.zeros(1, 1)),
        "transition 1.*coordinates",
    ),
    "a uid twice": (lambda n: put(n.layers[1], "uid", fill(0, 3)), "uid names two nodes"),
    "uids out of order": (lambda n: put(n.layers[1], "uid", fill(0, 6)), "layer 1.*ascending"),
    "a uid to come": (lambda n: setattr(n, "next_uid", 8), r"next_uid \(8\)"),
    "a node without a name": (
        lambda n: put(n.layers[2], "uid", lambda t: t.resize_(1)),
        "layer 2: 2 .* for 1",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_invariant_is_named(net: gn.GrapNet, name: str) -> None:
    gn.check(net)
    change, words = BREAKS[name]
    change(net)
    with pytest.raises(gn.InvariantError, match=words) as caught:
        gn.check(net)
    assert isinstance(caught.value, AssertionError)


def test_a_gradient_of_another_shape_is_named(net: gn.GrapNet) -> None:
    weight = net.transitions[1].weight
    gradient = weight.grad
    weight.grad = None
    content = weight.data
    weight.data = torch.zeros(1, 1)
    weight.grad = torch.zeros(1, 1)
    weight.data = content
    with pytest.raises(gn.InvariantError, match="transition 1: the gradient"):
        gn.check(net)
    weight.grad = gradient
    gn.check(net)


@pytest.mark.parametrize("sizes", [[1, 1], [0, 0], [3, 0, 2], [5, 4, 3, 2]], ids=str)
def test_a_whole_graph_passes(sizes: list[int]) -> None:
    gn.check(gn.GrapNet(sizes))
    gn.check(gn.GrapNet(sizes, density=0.5))
