"""Illegal operations: each raises the right error and leaves everything bit-identical."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import grapnet as gn
from tests.fingerprint import fingerprint

Operation = Callable[[gn.GrapNet, gn.Edit], object]
OTHER = gn.GrapNet([4, 3, 3, 2])


def name_twice(kind: str, first: Any, second: Any) -> Operation:
    def operation(net: gn.GrapNet, edit: gn.Edit) -> None:
        setter = getattr(edit, f"set_{kind}")
        setter(net.layers[1][:2], first)
        setter(net.layers[1][1:], second)

    return operation


def connect_a_removed_parent(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.remove_nodes(net.layers[1][1])
    edit.connect(net.layers[1][1], edit.add_nodes(2, 1))


def connect_a_removed_child(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.remove_nodes(net.layers[1][1])
    edit.connect(edit.add_nodes(0, 1), net.layers[1][1])


def connect_newborns(weights: Any) -> Operation:
    """Returns an operation that connects two new sensory nodes with the three nodes of layer 1."""
    return lambda n, e: e.connect(e.add_nodes(0, 2), n.layers[1], weights=weights)


REFUSED: dict[str, Operation] = {
    "skip a layer": lambda n, e: e.connect(n.layers[0], n.layers[2]),
    "backwards": lambda n, e: e.connect(n.layers[2], n.layers[1]),
    "same layer": lambda n, e: e.connect(n.layers[1][0], n.layers[1][1]),
    "from the output": lambda n, e: e.connect(n.layers[3], n.layers[0]),
    "parents of two layers": lambda n, e: e.connect(n.select(layer=[0, 1]), n.layers[1]),
    "existing relation": lambda n, e: e.connect(n.layers[0][2], n.layers[1][1]),
    "twice in one call": lambda n, e: e.connect([1, 1], n.layers[1][2]),
    "pairs": lambda n, e: e.connect(n.layers[0], n.layers[1], pairs="some"),
    "aligned counts": lambda n, e: e.connect(n.layers[0], n.layers[1], pairs="aligned"),
    "aligned with none": lambda n, e: e.connect(n.layers[0], [], pairs="aligned"),
    "number of weights": connect_newborns(torch.zeros(5)),
    "transposed weights": connect_newborns(np.zeros((3, 2))),
    "initialisation": connect_newborns("xavier"),
    "NaN": connect_newborns(float("nan")),
    "infinite bias": lambda n, e: e.add_nodes(1, 1, bias=float("inf")),
    "parent removed here": connect_a_removed_parent,
    "child removed here": connect_a_removed_child,
    "sensory nodes": lambda n, e: e.remove_nodes(n.layers[0][:2]),
    "output nodes": lambda n, e: e.remove_nodes(n.layers[3]),
    "negative count": lambda n, e: e.add_nodes(1, -1),
    "half a node": lambda n, e: e.add_nodes(1, 2.5),
    "no such layer": lambda n, e: e.add_nodes(4, 1),
    "too many nodes": lambda n, e: e.add_nodes(1, 2**31),
    "bias count": lambda n, e: e.add_nodes(1, 2, bias=[1.0, 2.0, 3.0]),
    "bias name": lambda n, e: e.add_nodes(1, 2, bias="normal"),
    "activation": lambda n, e: e.add_nodes(1, 1, activation="rleu"),
    "set activation": lambda n, e: e.set_activation(n.layers[1], "rleu"),
    "sensory activation": lambda n, e: e.set_activation(n.layers[0], "relu"),
    "owner": lambda n, e: e.set_owner(n.layers[1], 3),
    "newborn's owner": lambda n, e: e.add_nodes(1, 1, owner=3),
    "two owners": name_twice("owner", "a", "b"),
    "an owner and none": name_twice("owner", "a", None),
    "two activations": name_twice("activation", "tanh", "gelu"),
    "slot": lambda n, e: e.cut(n.layers[0][1], slots=[1, 9]),
    "cut another net's": lambda n, e: e.cut(OTHER.select().outgoing()),
    "freeze another net's": lambda n, e: e.freeze(OTHER.select().outgoing()),
    "freeze a newborn": lambda n, e: e.freeze(e.add_nodes(1, 1)),
    "freeze the first newborn": lambda n, e: e.freeze([n._next_uid]),
    "parts of relations": lambda n, e: e.freeze(n.layers[0].outgoing(), bias=False),
    "orphans of layer 0": lambda n, e: e.remove_orphans([1, 0]),
    "orphans of layer 9": lambda n, e: e.remove_orphans(9),
}
STALE: dict[str, Operation] = {
    "dangling child": lambda n, e: e.connect(n.layers[0], [99]),
    "removed node": lambda n, e: e.freeze([12]),
    "remove it again": lambda n, e: e.remove_nodes([12]),
    "freeze an unknown uid": lambda n, e: e.freeze([999]),
}
OTHERS: dict[str, tuple[Operation, type[Exception]]] = {
    "slots of a set": (lambda n, e: e.cut(n.layers[0].outgoing(), slots=[0]), TypeError),
    "cut nodes": (lambda n, e: e.cut(n.layers[0]), TypeError),
    "node of another net": (lambda n, e: e.remove_nodes(OTHER.node(4)), ValueError),
    "set of another net": (lambda n, e: e.set_owner(OTHER.select(), "a"), ValueError),
    "stale relations": (lambda n, e: e.cut(old_relations(n)), gn.errors.StaleRelationsError),
    "a string of nodes": (lambda n, e: e.remove_nodes("all"), TypeError),
    "fractions of nodes": (lambda n, e: e.remove_nodes(torch.tensor([4.0])), TypeError),
    "a mask of nodes": (lambda n, e: e.remove_nodes([False, True]), TypeError),
}
TABLE = {name: (operation, gn.errors.EditError) for name, operation in REFUSED.items()}
TABLE |= {name: (operation, gn.errors.StaleNodeError) for name, operation in STALE.items()}
TABLE |= OTHERS


def old_relations(net: gn.GrapNet) -> gn.RelationSet:
    return net.__dict__["old relations"]


@pytest.fixture
def trained() -> tuple[gn.GrapNet, torch.optim.Optimizer]:
    """A net at version 2, partly frozen, with gradients, an attached optimizer, and node 12 added
    and removed.
    """
    torch.manual_seed(0)
    net = gn.GrapNet([4, 3, 3, 2])
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    net.__dict__["old relations"] = net.layers[0].outgoing()[:2]
    with net.edit(reason="come") as edit:
        edit.connect(net.layers[0], edit.add_nodes(1, 1))
        edit.freeze(net.layers[2][0])
    with net.edit(reason="gone") as edit:
        edit.remove_nodes([12])
    net(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return net, optimizer


def attempt(net: gn.GrapNet, operation: Operation) -> None:
    """An edit of which everything but `operation` is legal."""
    with net.edit(reason="attempt") as edit:
        edit.set_owner(net.layers[3], "output")
        new = edit.add_nodes(2, 2, owner="new")
        edit.connect(net.layers[1][0], new)
        edit.cut(net.layers[2][2], slots=[1])
        operation(net, edit)
        edit.freeze(net.layers[1][2], incoming=False)


@pytest.mark.parametrize("name", TABLE)
def test_an_illegal_operation_leaves_everything_bit_identical(name: str, trained: Any) -> None:
    operation, error = TABLE[name]
    net, optimizer = trained
    loss = net(torch.ones(2, 4)).sum()
    before = fingerprint(net, optimizer)
    random = torch.get_rng_state()
    with pytest.raises(error):
        attempt(net, operation)
    assert fingerprint(net, optimizer) == before
    assert torch.equal(torch.get_rng_state(), random)
    # A refused edit makes no forward pass old.
    loss.backward()
    attempt(net, lambda net, edit: None)
    assert net.version == 3
    gn.check(net)


def test_the_fingerprint_notices_every_kind_of_change(trained: Any) -> None:
    """Negative control: a check of equality is worth what it would notice."""
    net, optimizer = trained
    weight = net.transitions[1].weight
    bias = net.layers[1].bias
    changes: dict[str, Callable[[], object]] = {
        "a weight": lambda: weight.data[0].add_(1),
        "a gradient": lambda: bias.grad[1].add_(1),
        "optimizer state": lambda: optimizer.state[bias]["exp_avg"][0].add_(1),
        "a frozen value": lambda: net.transitions[1].frozen_values[0].add_(1),
        "the next uid": lambda: setattr(net, "_next_uid", net._next_uid + 1),
        "a plan": lambda: net.execution.use("reference", 0),
        "the parameter object": lambda: setattr(
            net.layers[1], "bias", torch.nn.Parameter(bias.data)
        ),
        "the journal": net.journal.undoable.pop,
    }
    for name, change in changes.items():
        before = fingerprint(net, optimizer)
        assert fingerprint(net, optimizer) == before
        change()
        assert fingerprint(net, optimizer) != before, name


UNBUILT: list[tuple[Callable[[], object], str]] = [
    (lambda: gn.GrapNet([3]), "[3]"),
    (lambda: gn.GrapNet([3, -1]), "[3, -1]"),
    (lambda: gn.GrapNet([3, 2], density=1.5), "1.5"),
    (lambda: gn.GrapNet([3, 2], density=float("nan")), "nan"),
    (lambda: gn.GrapNet([3, 2], distribution="normal"), "'normal'"),
    (lambda: gn.GrapNet([3, 2, 1], activation="rleu"), "'rleu'"),
    (lambda: gn.GrapNet([3, 2, 1], activation=["relu"]), "got 1"),
    (lambda: gn.GrapNet.from_relations([2, 2], []), "for 0"),
    (lambda: gn.GrapNet.from_relations([2, 2], [([0],)]), "transition 0"),
    (lambda: gn.GrapNet.from_relations([2, 2], [([0, 1], [0])]), "2 parents"),
    (lambda: gn.GrapNet.from_relations([2, 3], [([0, 2], [0, 1])]), "[2]"),
    (lambda: gn.GrapNet.from_relations([2, 3], [([0, 1], [0, -1])]), "[-1]"),
    (lambda: gn.GrapNet.from_relations([2, 3], [([1, 1], [2, 2])]), "row 1 to row 2"),
    (lambda: gn.GrapNet.from_relations([2, 3], [([1, 0], [2, 2], [1.0])]), "got 1"),
    (lambda: gn.GrapNet.from_relations([2, 3], [([], [])], biases=[[1.0]]), "got 1"),
]


@pytest.mark.parametrize(("build", "value"), UNBUILT)
def test_a_net_that_cannot_be_built_is_refused(build: Callable[[], object], value: str) -> None:
    with pytest.raises(ValueError, match=re.escape(value)):
        build()


@pytest.mark.parametrize(
    "read", [lambda n: n.diff(3), lambda n: n.diff(-1), lambda n: n.redo(), lambda n: n.diff(0, 7)]
)
def test_history_that_does_not_exist_is_refused(
    trained: Any, read: Callable[[gn.GrapNet], object]
) -> None:
    net, optimizer = trained
    before = fingerprint(net, optimizer)
    with pytest.raises(gn.errors.HistoryError):
        read(net)
    assert fingerprint(net, optimizer) == before
