"""A long journal keeps the details of its latest commits, and says so where an older one is asked
for.
"""

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch

import grapnet as gn


@pytest.fixture
def net() -> gn.GrapNet:
    """A net that was rewired twenty times, with room for the details of few commits."""
    torch.manual_seed(0)
    net = gn.GrapNet([20, 30, 5])
    net.journal.undo_limit = 3
    for step in range(20):
        with net.edit(reason=f"rewire {step}") as edit:
            edit.cut(net.layers[0].outgoing().smallest(count=20))
            edit.connect(net.layers[1][:2], edit.add_nodes(2, 1))
    net.journal.detail_limit = 70_000
    return net


def test_the_oldest_details_go_first_and_the_rest_stays(net: gn.GrapNet) -> None:
    kept = [commit.has_details for commit in net.history]
    assert kept == sorted(kept)
    assert 3 < sum(kept) < 20
    assert sum(commit.change.detail_bytes for commit in net.history) <= 70_000
    assert [commit.reason for commit in net.history] == [f"rewire {step}" for step in range(20)]
    assert net.history[0].counts["relations_removed"] == 20
    assert net.history[0].operations[0] == {"operation": "cut"}


def test_what_undo_needs_is_kept_whatever_the_limit(net: gn.GrapNet) -> None:
    net.journal.detail_limit = 0
    assert sum(commit.has_details for commit in net.history) == 3
    relations = net.count().relations
    for _ in range(3):
        net.undo()
    assert net.count().relations == relations + 3 * 18
    with pytest.raises(gn.HistoryError, match="nothing to undo"):
        net.undo()
    gn.check(net)


def test_older_versions_are_refused_by_name(net: gn.GrapNet) -> None:
    assert len(net.diff(18).relations_removed) == 40
    with pytest.raises(gn.HistoryError, match=r"version 1 .*detail_limit"):
        net.diff(0)
    with pytest.raises(gn.HistoryError, match="detail_limit"):
        copy.deepcopy(net).replay(net.history)
    newest, oldest = net.layers[2][-1], net.layers[2][5]
    assert net.blame(newest) is net.history[-1]
    with pytest.raises(gn.HistoryError, match="detail_limit"):
        net.blame(oldest)  # grown by a commit that no longer says so
    with pytest.raises(ValueError, match="negative"):
        net.journal.detail_limit = -1


def test_a_removed_node_is_reported_missing_all_the_same(net: gn.GrapNet) -> None:
    with net.edit(reason="drop it") as edit:
        edit.remove_nodes(net.layers[1][0])
    net.journal.undo_limit = 0
    net.journal.detail_limit = 0
    with pytest.raises(gn.StaleNodeError, match="no node of this graph"):
        net.node(20)


def test_a_checkpoint_holds_what_the_journal_holds(net: gn.GrapNet, tmp_path: Path) -> None:
    gn.save(tmp_path / "net.gn", net, undo=True, history="full")
    loaded = gn.load(tmp_path / "net.gn")
    assert [c.has_details for c in loaded.history] == [c.has_details for c in net.history]
    assert loaded.journal.detail_limit == 70_000
    loaded.undo()
    net.undo()
    assert torch.equal(loaded(torch.ones(1, 20)), net(torch.ones(1, 20)))


def tensors_in(part: object) -> Iterator[torch.Tensor]:
    """Returns every tensor of a commit, however deep."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, dict):
        yield from (tensor for item in part.values() for tensor in tensors_in(item))
    elif is_dataclass(part):
        yield from (tensor for f in fields(part) for tensor in tensors_in(getattr(part, f.name)))


def test_a_commit_keeps_no_more_memory_than_it_tells_of() -> None:
    net = gn.GrapNet([40, 300, 4])
    net(torch.ones(2, 40)).sum().backward()
    with net.edit(reason="grow") as edit:
        nodes = edit.add_nodes(1, 1, owner="one")
        edit.connect(net.layers[0][:3], nodes)
        edit.connect(nodes, net.layers[2])
    with net.edit(reason="cut") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.01))
    with net.edit(reason="leave") as edit:
        edit.remove_nodes(net.layers[1][:2])
        edit.set_owner(net.layers[1][5:9], "some")
    for commit in net.history:
        found = list(tensors_in(commit.change))
        assert len(found) > 10
        for tensor in found:
            # a slice would keep the whole alive
            assert tensor.untyped_storage().nbytes() <= max(tensor.nbytes, 64)


def test_names_of_newborns_that_leave_at_once_leave_no_trace() -> None:
    net = gn.GrapNet([4, 3, 2])
    with net.edit(reason="come and go") as edit:
        edit.add_nodes(1, 1)
        edit.remove_nodes(edit.add_nodes(1, 1, owner="gone", activation="tanh"))
    with net.edit(reason="one comes, and none of another name") as edit:
        edit.add_nodes(1, 1)
        edit.add_nodes(1, 0, owner="nobody", activation="gelu")
    assert set(net.layers[1].owner_names.names) == {None}
    assert set(net.layers[1].activation_names.names) == {"relu"}


def test_an_outline_keeps_author_reason_time_and_counts() -> None:
    net = gn.GrapNet([4, 3, 2])
    net.journal.undo_limit = 0
    with net.edit(reason="weak ü", by="a rule") as edit:
        edit.cut(net.layers[0].outgoing()[:2])
        edit.freeze(net.layers[1].outgoing()[:1])
    whole = net.history[0]
    net.journal.detail_limit = 0
    outline = net.history[0]
    assert whole.has_details
    assert not outline.has_details
    assert (outline.version, outline.reason, outline.by) == (1, "weak ü", "a rule")
    assert outline.counts == whole.counts
    assert outline.time == pytest.approx(whole.time, abs=1e-5)
    assert [operation["operation"] for operation in outline.operations] == ["cut", "freeze"]
