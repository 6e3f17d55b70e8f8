"""What an open edit says about itself: the cuts asked for, those kept after all, and remarks."""

import pytest
import torch

import grapnet as gn


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([4, 5, 3])


def test_cuts_are_listed_once_and_can_be_kept(net: gn.GrapNet) -> None:
    weakest = net.layers[0].outgoing().smallest(count=6)
    with net.edit() as edit:
        assert len(edit.cuts) == 0
        edit.cut(weakest)
        edit.cut(weakest.smallest(count=2))
        edit.cut(net.layers[1][0].outgoing())
        assert len(edit.cuts) == 9
        edit.keep(weakest.largest(count=4))
        edit.keep(net.layers[1][1].outgoing())  # nobody asked to cut these
        assert torch.equal(
            edit.cuts.weights[:2].abs().sort().values, weakest.weights.abs().sort().values[:2]
        )
    assert net.count().relations == 4 * 5 + 5 * 3 - 5
    operations = [dict(operation) for operation in net.history[-1].operations]
    assert {"operation": "keep", "transition": 0, "relations": 4} in operations


def test_keeping_every_cut_leaves_nothing_to_commit(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing())
        edit.keep(net.layers[0].outgoing())
    assert net.version == 0


def test_keeping_does_not_save_what_leaves_with_its_node(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
        edit.keep(net.layers[1][0].outgoing())
    assert net.count().relations == 4 * 4 + 4 * 3


def test_connections_are_counted(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        assert edit.n_connections == 0
        edit.connect(net.layers[0], edit.add_nodes(1, 2))
        assert edit.n_connections == 8


def test_a_remark_stands_in_the_journal_and_changes_nothing(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.remark("only talking", score=0.5)
    assert net.version == 0
    with net.edit("prune") as edit:
        edit.remark("the weakest went", largest=0.25, rule="PruneWeakest")
        edit.cut(net.layers[0].outgoing().smallest(count=1))
    said = net.history[-1].operations[0]
    assert said == {
        "operation": "remark",
        "text": "the weakest went",
        "largest": 0.25,
        "rule": "PruneWeakest",
    }
    with net.edit() as edit, pytest.raises(gn.EditError, match="scores"):
        edit.remark("no tensors", scores=torch.ones(3))


def test_remarks_come_back_from_a_checkpoint(net: gn.GrapNet, tmp_path) -> None:
    with net.edit() as edit:
        edit.remark("why", score=1.5, frozen=None)
        edit.cut(net.layers[0].outgoing().smallest(count=1))
    gn.save(tmp_path / "net.gn", net)
    said = gn.load(tmp_path / "net.gn").history[-1].operations
    assert said == (net.history[-1].operations[0], {"operation": "cut"})


@pytest.mark.parametrize("part", ["incoming", "outgoing", "bias"])
def test_what_to_freeze_of_a_node_is_true_or_false(net: gn.GrapNet, part: str) -> None:
    with net.edit() as edit, pytest.raises(gn.EditError, match="True or False"):
        edit.freeze(net.layers[1], **{part: "no"})
    assert net.version == 0
