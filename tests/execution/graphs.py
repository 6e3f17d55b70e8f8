"""Shapes of graph as data: who has which children, in which order; and edits that every shape goes
through.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch

import grapnet as gn
from grapnet.execution._manager import BACKENDS

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
POLICIES = sorted(name for name, kind in BACKENDS.items() if hasattr(kind, "not_a_sum"))
# those that run every wiring; test_tiles.py has the contract of the other one
SUMS = sorted(set(BACKENDS) - set(POLICIES) - {"tiles"})
BACKEND_NAMES = [*sorted(set(SUMS) - {"reference"}), "auto"]

Wires = list[list[int]]  # the children of every parent, in the order of its slots


@dataclass(frozen=True)
class Shape:
    """One shape of graph: three layers or more, and what is between them."""

    sizes: Sequence[int]
    wires: Sequence[Wires]
    activation: str | Sequence[str] = "tanh"
    # an edit that belongs to the shape
    prepare: Callable[[gn.GrapNet, gn.Edit], object] | None = None

    def build(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> gn.GrapNet:
        """Returns a net of this shape; the same numbers on every device."""
        relations = []
        for lists in self.wires:
            parents = [parent for parent, children in enumerate(lists) for _ in children]
            relations.append((parents, [child for children in lists for child in children]))
        generator = torch.Generator().manual_seed(7)
        options = {
            "activation": self.activation,
            "dtype": dtype,
            "device": device,
            "generator": generator,
        }
        net = gn.GrapNet.from_relations(self.sizes, relations, **options)
        if self.prepare is not None:
            with net.edit(reason="shape") as edit:
                self.prepare(net, edit)
        return net


def full(n_parents: int, n_children: int) -> Wires:
    return [list(range(n_children)) for _ in range(n_parents)]


def shuffled(wires: Wires, seed: int = 0) -> Wires:
    """Returns the same relations with every node's children in an order of its own."""
    chance = Random(seed)
    return [chance.sample(children, len(children)) for children in wires]


def scattered(wires: Wires, seed: int = 0) -> Wires:
    """Returns the same families with their members far apart."""
    return Random(seed).sample(wires, len(wires))


def random_wires(n_parents: int, n_children: int, density: float, seed: int = 0) -> Wires:
    chance = Random(seed)
    cells = chance.sample(range(n_parents * n_children), round(density * n_parents * n_children))
    wires: Wires = [[] for _ in range(n_parents)]
    for cell in cells:
        wires[cell // n_children].append(cell % n_children)
    return wires


def tiles(n_parents: int, n_children: int, tile: int, density: float, seed: int = 0) -> Wires:
    """Returns blocks of nodes that are connected fully or not at all, those of the children in any
    order.
    """
    chance = Random(seed)
    blocks = [list(range(n_children))[first : first + tile] for first in range(0, n_children, tile)]
    wires: Wires = []
    for first in range(0, n_parents, tile):
        count = round(density * len(blocks) + chance.random() - 0.5)
        chosen = chance.sample(blocks, count)
        children = [child for block in chosen for child in block]
        wires += [list(children) for _ in range(min(tile, n_parents - first))]
    return wires


def families(*blocks: tuple[int, list[int]]) -> Wires:
    """Returns, for every (members, children), so many nodes with these children."""
    return [list(children) for members, children in blocks for _ in range(members)]


def mix_activations(net: gn.GrapNet, edit: gn.Edit) -> None:
    for start, name in enumerate(("gelu", "sigmoid", "identity")):
        edit.set_activation(net.layers[1][start::4], name)
    edit.set_activation(net.layers[2][::2], "softplus")


def freeze_some(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.freeze(net.layers[1][1:3])
    edit.freeze(net.layers[0].outgoing()[::3])


SHAPES: dict[str, Shape] = {
    "full": Shape([6, 5, 4], [full(6, 5), full(5, 4)]),
    "full, wide": Shape([9, 20, 17], [full(9, 20), full(20, 17)]),
    "full, shuffled": Shape([6, 5, 4], [shuffled(full(6, 5)), shuffled(full(5, 4))]),
    "one node a layer": Shape([1, 1, 1], [full(1, 1), full(1, 1)]),
    "ragged": Shape(
        [6, 19, 5], [[list(range(k, 3 * k)) for k in range(6)], shuffled(random_wires(19, 5, 0.5))]
    ),
    "childless": Shape(
        [6, 5, 4], [[[0, 1], [], [4, 2], [], [], []], [[], [], [2, 0], [], [3, 1, 0]]]
    ),
    "parentless": Shape([5, 6, 5], [[[1, 3]] * 5, [[0], [0, 4], [4], [0], [4, 0], [0]]]),
    "no relation": Shape([4, 3, 2], [[[]] * 4, [[]] * 3]),
    "a transition without relations": Shape([4, 3, 5, 2], [full(4, 3), [[]] * 3, full(5, 2)]),
    "empty hidden layer": Shape([3, 0, 2], [full(3, 0), full(0, 2)]),
    "empty input": Shape([0, 3, 2], [full(0, 3), full(3, 2)]),
    "empty output": Shape([3, 2, 0], [full(3, 2), full(2, 0)]),
    "one family": Shape([7, 9, 4], [[[1, 3, 4, 8]] * 7, shuffled([[0, 1, 3]] * 9)]),
    "one family and the childless": Shape(
        [7, 5, 3], [[[2, 0], []] * 3 + [[0, 2]], families((4, [1, 0]), (1, []))]
    ),
    "families in order": Shape(
        [6, 6, 5], [families((3, [0, 1, 2]), (3, [3, 4, 5])), families((4, [0, 1]), (2, [2, 3, 4]))]
    ),
    "families of one size, out of order": Shape(
        [8, 6, 6],
        [families((4, [5, 1, 3]), (4, [0, 4, 2])), scattered(families((3, [4, 1]), (3, [2, 0])))],
    ),
    "many families": Shape(
        [24, 30, 12],
        [
            shuffled(
                scattered(
                    families((5, [0, 2, 4]), (5, [9, 8, 7]), (3, [1]), (7, [20, 3, 29, 2]), (4, []))
                )
            ),
            shuffled(scattered(families(*[(3, [k, k + 1, k + 2]) for k in range(10)]))),
        ],
    ),
    "grown head": Shape(
        [49, 240, 10],
        [random_wires(49, 240, 0.1), [list(range(2 * (k // 48) + 2)) for k in range(240)]],
        "relu",
    ),
    "random 1 %": Shape(
        [200, 300, 20], [random_wires(200, 300, 0.01), random_wires(300, 20, 0.05)]
    ),
    "tiles": Shape([40, 70, 20], [tiles(40, 70, 16, 0.5), tiles(70, 20, 16, 0.5)]),
    "mixed activations": Shape(
        [7, 9, 4],
        [random_wires(7, 9, 0.6), random_wires(9, 4, 0.8)],
        "relu",
        prepare=mix_activations,
    ),
    "partly frozen": Shape(
        [7, 6, 5], [shuffled(full(7, 6)), random_wires(6, 5, 0.6)], prepare=freeze_some
    ),
    "frozen whole": Shape(
        [4, 3, 2],
        [full(4, 3), [[1], [0, 1], []]],
        prepare=lambda net, edit: edit.freeze(net.select()),
    ),
}


def cut_one(net: gn.GrapNet, edit: gn.Edit) -> None:
    for layer in net.layers[:-1]:
        edit.cut(layer.outgoing()[1:2])


def cut_tenth(net: gn.GrapNet, edit: gn.Edit) -> None:
    for layer in net.layers[:-1]:
        edit.cut(layer.outgoing()[::10])


def add_nodes(net: gn.GrapNet, edit: gn.Edit) -> None:
    new = edit.add_nodes(1, 3)
    edit.connect(net.layers[0][1:], new)
    edit.connect(new, net.layers[2][::2])


def cut_and_grow(net: gn.GrapNet, edit: gn.Edit) -> None:
    cut_tenth(net, edit)
    add_nodes(net, edit)


def remove_nodes(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.remove_nodes(net.layers[1][::3])


def rewire(net: gn.GrapNet, edit: gn.Edit) -> None:
    """Moves one relation of a node to another child: as many relations as before, and as many a
    node.
    """
    for upper, lower in zip(net.layers, net.layers[1:], strict=False):
        for node in upper:
            free = sorted(set(range(len(lower))) - {child.row for child in node.children})
            if len(node.children) and free:
                edit.cut(node, slots=[0])
                edit.connect(node, lower[free[-1]], weights=0.25)
                break


def renew(net: gn.GrapNet, edit: gn.Edit) -> None:
    """Cuts relations and connects the same pairs: only the order of the slots changes."""
    for layer in net.layers[:-1]:
        for node in layer[:2]:
            if len(node.children) > 1:
                child = node.children[0]
                edit.cut(node, slots=[0])
                edit.connect(node, child, weights=0.5)


def freeze(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.freeze(net.layers[1][::2])


EDITS: dict[str, Callable[[gn.GrapNet, gn.Edit], None]] = {
    function.__name__: function
    for function in (cut_one, cut_tenth, add_nodes, remove_nodes, rewire, renew, freeze)
}


def edited(net: gn.GrapNet, operate: Callable[[gn.GrapNet, gn.Edit], object]) -> None:
    """Commits one edit."""
    with net.edit(reason="test", allow_dead=True) as edit:
        operate(net, edit)


def runs_with(net: gn.GrapNet, backend: str) -> bool:
    """Chooses a backend; where it refuses the device, asserts that it says so, and returns
    False.
    """
    reasons = [
        reason for row in net.execution.describe() for reason in row["refused"].get(backend, [])
    ]
    if not reasons:
        net.execution.use(backend)
        return True
    assert net.device.type != "cpu", (
        f"{backend} must run on the CPU of every machine that tests: {reasons}"
    )
    before = net.execution.choices()
    with pytest.raises(gn.errors.PlanError, match=re.escape(reasons[0])):
        net.execution.use(backend)
    assert net.execution.choices() == before
    return False
