"""gn.check: a whole graph passes, and each broken invariant is found and named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    place(store, name, tensor)


def place(store: Any, name: str, value: Any) -> None:
    """Puts something else into the record that a store keeps it in."""
    if name in ("ptr", "child", "n_children"):
        store.__dict__["_topology"] = replace(store.topology, **{name: value})
    elif name == "uid":
        store.__dict__["_roster"] = store.roster._replace(uids=value)
    else:
        store.__dict__["_vector"] = store.vector._replace(**{name: value})


def fill(index: int | slice, value: int) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.__setitem__(index, value)


BREAKS: dict[str, tuple[Callable[[gn.GrapNet], object], str]] = {
    "a child of another layer": (
        lambda n: put(n.transitions[0], "child", fill(0, 7)),
        r"transition 0.*7 of 3",
    ),
    "a negative child": (
        lambda n: put(n.transitions[0], "child", fill(0, -1)),
        r"transition 0.*-1",
    ),
    "a child twice": (
        lambda n: put(n.transitions[0], "child", fill(slice(2, 4), 1)),
        "transition 0.*twice",
    ),
    "ptr decreases": (
        lambda n: put(n.transitions[1], "ptr", fill(1, 5)),
        "transition 1: ptr decreases",
    ),
    "ptr ends early": (lambda n: put(n.transitions[1], "ptr", fill(-1, 5)), "transition 1.*0 to 6"),
    "ptr of another type": (
        lambda n: place(n.transitions[1], "ptr", n.transitions[1].ptr.long()),
        "int32",
    ),
    "ptr too long": (
        lambda n: place(n.transitions[1], "ptr", torch.tensor([0, 2, 4, 6, 6]).int()),
        "5 entries for 3",
    ),
    "children miscounted": (
        lambda n: place(n.transitions[1], "n_children", 3),
        "transition 1.*number of children",
    ),
    "frozen twice": (
        lambda n: put(n.transitions[0], "frozen_at", fill(1, 0)),
        "transition 0.*ascending",
    ),
    "frozen outside": (
        lambda n: put(n.transitions[0], "frozen_at", fill(-1, 99)),
        r"transition 0.*outside",
    ),
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


class Sorts(TorchDispatchMode):
    """Counts how often something as long as `size` is sorted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "sort" in str(func) and len(args[0]) == self.size
        return func(*args, **(kwargs or {}))


def shuffled() -> gn.GrapNet:
    """Returns a net whose first node names its children from the last to the first."""
    parents, children = torch.arange(40).repeat_interleave(30), torch.arange(30).repeat(40)
    children[:30] = children[:30].flip(0)
    return gn.GrapNet.from_relations([40, 30], [(parents, children)])


@pytest.mark.parametrize(
    ("make", "expected"), [(lambda: gn.GrapNet([40, 30]), 0), (shuffled, 1)], ids=["full", "odd"]
)
def test_relations_are_sorted_only_where_they_are_out_of_order_and_once(
    tmp_path: Path, make: Callable[[], gn.GrapNet], expected: int
) -> None:
    net = make()
    gn.save(tmp_path / "net", net)
    with Sorts(1200) as sorts:
        gn.check(net)
    assert sorts.count == expected
    with Sorts(1200) as sorts:
        gn.load(tmp_path / "net")
    assert sorts.count == expected


@pytest.mark.parametrize("rows", [(0, 1), (0, 29), (1170, 1199), (30, 59), (600, 601)], ids=str)
@pytest.mark.parametrize("make", [lambda: gn.GrapNet([40, 30]), shuffled], ids=["full", "odd"])
def test_a_child_twice_is_found_anywhere(
    make: Callable[[], gn.GrapNet], rows: tuple[int, int]
) -> None:
    net = make()
    gn.check(net)
    child = net.transitions[0].child
    child[rows[1]] = child[rows[0]].clone()
    with pytest.raises(gn.InvariantError, match="twice"):
        gn.check(net)


def test_neighbours_and_nodes_without_children_may_have_equal_children() -> None:
    gn.check(gn.GrapNet.from_relations([5, 3], [([1, 1, 3, 3], [0, 2, 2, 1])]))
    gn.check(gn.GrapNet.from_relations([5, 3], [([0, 1, 2], [2, 2, 2])]))
    gn.check(gn.GrapNet.from_relations([5, 3], [([4], [2])]))
