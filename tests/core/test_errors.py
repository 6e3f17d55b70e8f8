"""Illegal operations: each raises the right error, names the offending values, and leaves
everything bit-identical.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import grapnet as gn
from tests.fingerprint import fingerprint

Operation = Callable[[gn.GrapNet, gn.Edit], object]


@dataclass(frozen=True)
class Illegal:
    """One row of the table."""

    name: str
    operation: Operation
    words: str  # of the message, as a pattern
    error: type[Exception] = gn.EditError


OTHER = gn.GrapNet([4, 3, 3, 2])


def cut_and_use(net: gn.GrapNet, edit: gn.Edit) -> None:
    stale = old_relations(net)
    edit.cut(stale)


def name_twice(kind: str, first: Any, second: Any) -> Operation:
    def operation(net: gn.GrapNet, edit: gn.Edit) -> None:
        setter = getattr(edit, f"set_{kind}")
        setter(net.layers[1][:2], first)
        setter(net.layers[1][1:], second)

    return operation


def connect_removed(role: str) -> Operation:
    def operation(net: gn.GrapNet, edit: gn.Edit) -> None:
        edit.remove_nodes(net.layers[1][1])
        new = edit.add_nodes(2 if role == "parent" else 0, 1)
        edit.connect(net.layers[1][1], new) if role == "parent" else edit.connect(
            new, net.layers[1][1]
        )

    return operation


TABLE = [
    Illegal("skip a layer", lambda n, e: e.connect(n.layers[0], n.layers[2]), "layer 0 to layer 2"),
    Illegal("backwards", lambda n, e: e.connect(n.layers[2], n.layers[1]), "layer 2 to layer 1"),
    Illegal(
        "same layer", lambda n, e: e.connect(n.layers[1][0], n.layers[1][1]), "layer 1 to layer 1"
    ),
    Illegal(
        "from the output", lambda n, e: e.connect(n.layers[3], n.layers[0]), "layer 3 to layer 0"
    ),
    Illegal(
        "parents of two layers",
        lambda n, e: e.connect(n.select(layer=[0, 1]), n.layers[1]),
        r"parents.*\[0, 1\]",
    ),
    Illegal(
        "existing relation",
        lambda n, e: e.connect(n.layers[0][2], n.layers[1][1]),
        r"node 2 .*node 5 .*exists",
    ),
    Illegal(
        "twice in one call",
        lambda n, e: e.connect([1, 1], n.layers[1][2]),
        r"node 1 .*node 6 .*twice",
    ),
    Illegal("pairs", lambda n, e: e.connect(n.layers[0], n.layers[1], pairs="some"), "'some'"),
    Illegal(
        "aligned counts",
        lambda n, e: e.connect(n.layers[0], n.layers[1], pairs="aligned"),
        "4 and 3",
    ),
    Illegal(
        "aligned with none", lambda n, e: e.connect(n.layers[0], [], pairs="aligned"), "4 and 0"
    ),
    Illegal(
        "weights",
        lambda n, e: e.connect(e.add_nodes(0, 2), n.layers[1], weights=torch.zeros(5)),
        "6.*got 5",
    ),
    Illegal(
        "transposed",
        lambda n, e: e.connect(e.add_nodes(0, 2), n.layers[1], weights=np.zeros((3, 2))),
        r"\[2, 3\]",
    ),
    Illegal(
        "initialisation",
        lambda n, e: e.connect(e.add_nodes(0, 1), n.layers[1], weights="xavier"),
        "'xavier'",
    ),
    Illegal(
        "NaN",
        lambda n, e: e.connect(e.add_nodes(0, 1), n.layers[1], weights=float("nan")),
        "finite",
    ),
    Illegal("infinite bias", lambda n, e: e.add_nodes(1, 1, bias=float("inf")), "finite"),
    Illegal("dangling child", lambda n, e: e.connect(n.layers[0], [99]), "99", gn.StaleNodeError),
    Illegal(
        "parent removed here", connect_removed("parent"), r"node 5 .*removed in this edit.*parent"
    ),
    Illegal(
        "child removed here", connect_removed("child"), r"node 5 .*removed in this edit.*child"
    ),
    Illegal(
        "sensory nodes", lambda n, e: e.remove_nodes(n.layers[0][:2]), "2 .*sensory.*interface=True"
    ),
    Illegal("output nodes", lambda n, e: e.remove_nodes(n.layers[3]), "2 .*output.*interface=True"),
    Illegal("negative count", lambda n, e: e.add_nodes(1, -1), "-1"),
    Illegal("half a node", lambda n, e: e.add_nodes(1, 2.5), "2.5"),
    Illegal("no such layer", lambda n, e: e.add_nodes(4, 1), "layers 0 to 3.*4"),
    Illegal("too many nodes", lambda n, e: e.add_nodes(1, 2**31), "2,147,483,647"),
    Illegal("bias count", lambda n, e: e.add_nodes(1, 2, bias=[1.0, 2.0, 3.0]), "2 .*got 3"),
    Illegal("bias name", lambda n, e: e.add_nodes(1, 2, bias="normal"), "'normal'"),
    Illegal("activation", lambda n, e: e.add_nodes(1, 1, activation="rleu"), "'rleu'.*relu"),
    Illegal("set activation", lambda n, e: e.set_activation(n.layers[1], "rleu"), "'rleu'.*relu"),
    Illegal("sensory activation", lambda n, e: e.set_activation(n.layers[0], "relu"), "sensory"),
    Illegal("owner", lambda n, e: e.set_owner(n.layers[1], 3), "3"),
    Illegal("newborn's owner", lambda n, e: e.add_nodes(1, 1, owner=3), "3"),
    Illegal("two owners", name_twice("owner", "a", "b"), "node 5 .*'a' and 'b'"),
    Illegal("an owner and none", name_twice("owner", "a", None), "node 5 .*'a' and None"),
    Illegal(
        "two activations", name_twice("activation", "tanh", "gelu"), "node 5 .*'tanh' and 'gelu'"
    ),
    Illegal(
        "slot", lambda n, e: e.cut(n.layers[0][1], slots=[1, 9]), r"uid=1\) owns 3 relations.*\[9\]"
    ),
    Illegal(
        "slots of a set",
        lambda n, e: e.cut(n.layers[0].outgoing(), slots=[0]),
        "RelationSet",
        TypeError,
    ),
    Illegal("cut nodes", lambda n, e: e.cut(n.layers[0]), "RelationSet.*Layer", TypeError),
    Illegal("cut another net's", lambda n, e: e.cut(OTHER.select().outgoing()), "another graph"),
    Illegal(
        "freeze another net's", lambda n, e: e.freeze(OTHER.select().outgoing()), "another graph"
    ),
    Illegal(
        "node of another net", lambda n, e: e.remove_nodes(OTHER.node(4)), "another", ValueError
    ),
    Illegal(
        "set of another net", lambda n, e: e.set_owner(OTHER.select(), "a"), "another", ValueError
    ),
    Illegal(
        "stale relations",
        cut_and_use,
        "transition 0.*version 2.*select them again",
        gn.StaleRelationsError,
    ),
    Illegal(
        "removed node",
        lambda n, e: e.freeze([12]),
        r"node 12 .*commit 2 \('gone'\)",
        gn.StaleNodeError,
    ),
    Illegal(
        "remove it again",
        lambda n, e: e.remove_nodes([12]),
        r"node 12 .*commit 2",
        gn.StaleNodeError,
    ),
    Illegal("freeze a newborn", lambda n, e: e.freeze(e.add_nodes(1, 1)), "added in this edit"),
    Illegal("freeze the first newborn", lambda n, e: e.freeze([n.next_uid]), "added in this edit"),
    Illegal("freeze nobody", lambda n, e: e.freeze([999]), "999", gn.StaleNodeError),
    Illegal(
        "parts of relations", lambda n, e: e.freeze(n.layers[0].outgoing(), bias=False), "bias="
    ),
    Illegal("orphans of layer 0", lambda n, e: e.remove_orphans([1, 0]), "0.*not hidden"),
    Illegal("orphans of layer 9", lambda n, e: e.remove_orphans(9), "9"),
    Illegal("a string of nodes", lambda n, e: e.remove_nodes("all"), "str", TypeError),
    Illegal(
        "fractions of nodes", lambda n, e: e.remove_nodes(torch.tensor([4.0])), "float32", TypeError
    ),
    Illegal("a mask of nodes", lambda n, e: e.remove_nodes([False, True]), "bool", TypeError),
]


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


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_an_illegal_operation_leaves_everything_bit_identical(row: Illegal, trained: Any) -> None:
    net, optimizer = trained
    loss = net(torch.ones(2, 4)).sum()
    before, random = fingerprint(net, optimizer), torch.get_rng_state()
    with pytest.raises(row.error, match=f"(?s){row.words}") as caught:
        attempt(net, row.operation)
    assert not isinstance(caught.value, AssertionError | AttributeError)
    assert fingerprint(net, optimizer) == before
    assert torch.equal(torch.get_rng_state(), random)
    loss.backward()  # a refused edit makes no forward pass old
    attempt(net, lambda net, edit: None)
    assert net.version == 3
    gn.check(net)


def test_the_fingerprint_notices_every_kind_of_change(trained: Any) -> None:
    """Negative control: a check of equality is worth what it would notice."""
    net, optimizer = trained
    weight, bias = net.transitions[1].weight, net.layers[1].bias
    changes: dict[str, Callable[[], object]] = {
        "a weight": lambda: weight.data[0].add_(1),
        "a gradient": lambda: bias.grad[1].add_(1),
        "optimizer state": lambda: optimizer.state[bias]["exp_avg"][0].add_(1),
        "a frozen value": lambda: net.transitions[1].frozen_values[0].add_(1),
        "the next uid": lambda: setattr(net, "next_uid", net.next_uid + 1),
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


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: gn.GrapNet([3]), r"\[3\]"),
        (lambda: gn.GrapNet([3, -1]), r"\[3, -1\]"),
        (lambda: gn.GrapNet([3, 2], density=1.5), "1.5"),
        (lambda: gn.GrapNet([3, 2], density=float("nan")), "nan"),
        (lambda: gn.GrapNet([3, 2], distribution="normal"), "'normal'"),
        (lambda: gn.GrapNet([3, 2, 1], activation="rleu"), "'rleu'"),
        (lambda: gn.GrapNet([3, 2, 1], activation=["relu"]), "2 activations, got 1"),
        (lambda: gn.GrapNet.from_relations([2, 2], []), "1 transitions, got relations for 0"),
        (lambda: gn.GrapNet.from_relations([2, 2], [([0],)]), "transition 0"),
        (lambda: gn.GrapNet.from_relations([2, 2], [([0, 1], [0])]), "2 parents for 1 children"),
        (lambda: gn.GrapNet.from_relations([2, 3], [([0, 2], [0, 1])]), r"parents .*0 to 1.*\[2\]"),
        (
            lambda: gn.GrapNet.from_relations([2, 3], [([0, 1], [0, -1])]),
            r"children .*0 to 2.*\[-1\]",
        ),
        (lambda: gn.GrapNet.from_relations([2, 3], [([1, 1], [2, 2])]), "row 1 to row 2 twice"),
        (
            lambda: gn.GrapNet.from_relations([2, 3], [([1, 0], [2, 2], [1.0])]),
            "2 weights of transition 0.*got 1",
        ),
        (
            lambda: gn.GrapNet.from_relations([2, 3], [([], [])], biases=[[1.0]]),
            "3 biases of layer 1.*got 1",
        ),
    ],
)
def test_a_net_that_cannot_be_built_says_why(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(
    "read", [lambda n: n.diff(3), lambda n: n.diff(-1), lambda n: n.redo(), lambda n: n.diff(0, 7)]
)
def test_history_that_does_not_exist_is_refused(
    trained: Any, read: Callable[[gn.GrapNet], object]
) -> None:
    net, optimizer = trained
    before = fingerprint(net, optimizer)
    with pytest.raises(gn.HistoryError, match=r"version|nothing to redo"):
        read(net)
    assert fingerprint(net, optimizer) == before
