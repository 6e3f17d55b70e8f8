"""The transaction around an edit: when it commits, what a trial leaves, and what cannot be done
inside.
"""

from collections.abc import Callable

import pytest
import torch

import grapnet as gn
from tests.fingerprint import fingerprint


@pytest.fixture
def net() -> gn.GrapNet:
    return gn.GrapNet([4, 3, 2])


X = torch.linspace(-1, 1, 20).reshape(5, 4)


def test_an_edit_that_changes_nothing_commits_nothing(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.freeze(net.layers[1])
    before = fingerprint(net)
    with net.edit() as edit:
        pass
    assert edit.receipt is None
    with net.edit() as edit:
        edit.add_nodes(1, 0)
        edit.connect(net.layers[0][:0], net.layers[1])
        edit.cut(net.layers[0].outgoing()[:0])
        edit.remove_nodes([])
        edit.freeze(net.layers[1])  # as it is
        edit.unfreeze(net.layers[0].outgoing()[:0])
        edit.set_owner(net.layers[0], None)
        edit.set_activation(net.layers[1], "relu")
        edit.remove_orphans()
        assert edit.commit() is None
    assert fingerprint(net) == before


def test_commit_takes_effect_at_once_and_ends_the_edit(net: gn.GrapNet) -> None:
    with net.edit(reason="why", by="who") as edit:
        edit.cut(net.layers[0][0], slots=[0])
        receipt = edit.commit()
        assert (net.version, net.count().relations) == (1, 17)
        assert (receipt.version, receipt.reason, receipt.by) == (1, "why", "who")
        for operation in (
            edit.commit,
            edit.remove_orphans,
            lambda: edit.cut(net.layers[0].outgoing()),
        ):
            with pytest.raises(gn.errors.EditError, match="not open"):
                operation()
    assert (net.version, edit.receipt is receipt is net.history[-1]) == (1, True)


def test_the_receipt_says_what_was_asked_for_and_what_moved(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[1])
        new = edit.add_nodes(1, 1, owner="a")
        edit.connect(net.layers[0][3], new)
        edit.freeze(net.layers[1][0], incoming=False, outgoing=False)
    commit = net.history[-1]
    cut, add_nodes, connect, freeze = commit.operations
    assert cut == {"operation": "cut", "transition": 0, "relations": 1}
    assert (add_nodes["operation"], add_nodes["layer"], add_nodes["nodes"]) == ("add_nodes", 1, 1)
    assert connect == {
        "operation": "connect",
        "transition": 0,
        "relations": 1,
        "weights": "linear",
    }
    assert freeze == {
        "operation": "freeze",
        "nodes": 1,
        "incoming": False,
        "outgoing": False,
        "bias": True,
    }
    assert commit.change.counts() == {
        "nodes_added": 1,
        "nodes_removed": 0,
        "relations_added": 1,
        "relations_removed": 1,
        "coordinates_frozen_or_unfrozen": 1,
        "coordinates_assigned": 0,
        "blocks_added": 0,
        "blocks_removed": 0,
    }
    moved = {
        n: (m.old_size, m.new_size, m.removed.tolist(), m.inserted.tolist())
        for n, m in commit.parameters.items()
    }
    assert moved == {"layers.1.bias": (3, 3, [0], [2]), "transitions.0.weight": (12, 12, [1], [11])}
    assert commit.relations[0].carry(torch.arange(12), -1).tolist() == [0, *range(2, 12), -1]
    assert commit.nodes[1].inserted.tolist() == [3]


def test_training_inside_a_trial_stays_with_the_survivors(net: gn.GrapNet) -> None:
    """As documented, and as after undo: the trial takes the edit back, not what was learned
    meanwhile.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    node = net.layers[0][0]
    old = net.layers[0][0].W_alloc.tolist()
    with net.edit(trial=True) as edit:
        edit.cut(node, slots=[0])
        edit.commit()
        node.W_alloc = torch.tensor([[5.0, 6.0]])
        net(X).square().sum().backward()
        optimizer.step()
        trained = node.W_alloc.tolist()
    assert node.W_alloc.tolist() == [[old[0][0], *trained[0]]]
    assert net.version == 0


def test_a_trial_that_never_commits_or_raises_leaves_no_trace_either(net: gn.GrapNet) -> None:
    before = fingerprint(net)
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing())
    assert fingerprint(net) == before
    with pytest.raises(ZeroDivisionError):
        cut_everything_on_trial(net, then=lambda: 1 / 0)
    assert (net.version, net.count().relations) == (0, 18)
    with net.edit(allow_dead=True) as edit:
        edit.cut(net.layers[0].outgoing())
    assert net.version == 1


def test_running_an_uncommitted_trial_is_refused(net: gn.GrapNet) -> None:
    with net.edit(trial=True) as edit:
        net(X)  # nothing is waiting yet
        edit.cut(net.layers[0].outgoing())
        with pytest.raises(gn.errors.EditError, match=r"edit\.commit\(\)"):
            net(X)
        edit.commit()
        net(X)
    net(X)


def test_edits_do_not_nest_and_the_outer_one_goes_on(net: gn.GrapNet) -> None:
    with net.edit(reason="outer") as edit:
        edit.cut(net.layers[0][0], slots=[0])
        for forbidden in (net.undo, net.redo, lambda: net.replay([]), net.edit().__enter__):
            with pytest.raises(gn.errors.EditError, match="outer"):
                forbidden()
        edit.cut(net.layers[0][1], slots=[0])
    assert (net.version, net.count().relations) == (1, 16)


def test_a_state_dict_cannot_turn_frozen_bits_inside_an_edit(net: gn.GrapNet) -> None:
    free = net.state_dict()
    with net.edit() as edit:
        edit.freeze(net.layers[1])
    with net.edit(trial=True) as edit:
        edit.set_owner(net.layers[0], "a")
        edit.commit()
        with pytest.raises(gn.errors.EditError):
            net.load_state_dict(free)
    assert [commit.version for commit in net.history] == [net.version] == [1]


@pytest.mark.parametrize("commit", [lambda net: net.undo(), lambda net: net.edit().__enter__()])
def test_inference_mode_refuses_edits(
    net: gn.GrapNet, commit: Callable[[gn.GrapNet], object]
) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
    before = fingerprint(net)
    with torch.inference_mode(), pytest.raises(gn.errors.EditError, match="no_grad"):
        commit(net)
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
        with torch.inference_mode(), pytest.raises(gn.errors.EditError, match="no_grad"):
            edit.commit()
    assert fingerprint(net) == before
    with torch.no_grad(), net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
    net(X).sum().backward()
    assert net.transitions[0].weight.requires_grad


def test_an_edit_is_used_once_and_in_its_block(net: gn.GrapNet) -> None:
    edit = net.edit()
    with pytest.raises(gn.errors.EditError, match="not open"):
        edit.add_nodes(1, 1)
    with edit:
        edit.cut(net.layers[0][0], slots=[0])
    before = fingerprint(net)
    with pytest.raises(gn.errors.EditError), edit:
        pass
    assert fingerprint(net) == before


def test_an_edit_begins_when_its_block_does(net: gn.GrapNet) -> None:
    early = net.edit(reason="made first, entered second")
    with net.edit() as other:
        other.add_nodes(1, 1)
    with early:
        new = early.add_nodes(1, 1)
        early.connect(net.layers[0], new)
    gn.check(net)
    assert net.layers[1].uids.tolist() == [4, 5, 6, 9, 10]


def test_an_operation_that_raised_asks_for_nothing(net: gn.GrapNet) -> None:
    with net.edit(allow_dead=True) as edit:
        edit.cut(net.layers[1].incoming())
    before = fingerprint(net)
    with net.edit() as edit:
        for wrong in (
            lambda: edit.remove_orphans([1, 0]),
            lambda: edit.remove_nodes(net.select(layer=[1, 2])),
            lambda: edit.add_nodes(1, 2, bias=torch.zeros(3)),
            lambda: edit.connect(net.layers[0], net.layers[1], weights=torch.zeros(3, 4)),
            lambda: edit.set_owner([4, 99], "a"),
            lambda: edit.freeze([4, 99]),
        ):
            with pytest.raises((gn.errors.EditError, gn.errors.StaleNodeError)):
                wrong()
    assert fingerprint(net) == before


def cut_everything_on_trial(net: gn.GrapNet, then: Callable[[], object] = lambda: None) -> None:
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing())
        edit.commit()
        then()
