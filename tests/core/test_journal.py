"""The journal: history, diff, blame, undo, redo, replay, and how long values and details stay."""

import copy
import gc
import weakref
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch

import grapnet as gn
from tests.fingerprint import fingerprint


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([4, 3, 2], dtype=torch.float64)


def grow(net: gn.GrapNet, reason: str = "grow") -> gn.NodeSet:
    with net.edit(reason=reason, by="rule") as edit:
        new = edit.add_nodes(1, 2, owner="new")
        edit.connect(net.layers[0][:2], new)
        edit.connect(new, net.layers[2])
    return new


def cut(net: gn.GrapNet, row: int = 0, slot: int = 0) -> None:
    with net.edit(reason=f"cut {row} {slot}") as edit:
        edit.cut(net.layers[0][row], slots=[slot])


def train(net: gn.GrapNet, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(6, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()


def test_versions_reasons_and_authors(net: gn.GrapNet) -> None:
    grow(net)
    cut(net)
    net.undo()
    net.redo()
    assert [c.version for c in net.history] == [1, 2, 3, 4] == [*range(1, net.version + 1)]
    assert [c.reason for c in net.history] == ["grow", "cut 0 0", "undo: cut 0 0", "redo: cut 0 0"]
    assert [c.by for c in net.history[:2]] == ["rule", None]
    assert [c.undoes for c in net.history] == [None, None, 2, 3]
    assert "relations_removed 1" in repr(net.history[1])


def test_diff_in_both_directions_and_across_undo(net: gn.GrapNet) -> None:
    new = grow(net).uids.tolist()
    cut(net)
    with net.edit() as edit:
        edit.remove_nodes(new[:1])
    there = net.diff(0)
    back = net.diff(3, 0)
    assert there.nodes_added.tolist() == back.nodes_removed.tolist() == [new[1]]
    assert there.nodes_removed.tolist() == back.nodes_added.tolist() == []
    expected = [[0, new[1]], [1, new[1]], [new[1], 7], [new[1], 8]]
    assert there.relations_added.tolist() == back.relations_removed.tolist() == expected
    assert there.relations_removed.tolist() == back.relations_added.tolist() == [[0, 4]]
    assert net.diff(1, 2).relations_removed.tolist() == [[0, 4]]
    assert net.diff(2, 3).nodes_removed.tolist() == [new[0]]
    net.undo()
    net.undo()
    assert repr(net.diff(1)) == "Diff(nodes +0 -0, relations +0 -0)" == repr(net.diff(2, 2))
    with net.edit() as edit:  # cut and made again in one edit: another relation, the same pair
        edit.cut(net.layers[0][3].outgoing(to=[5]))
        edit.connect([3], [5])
    assert len(net.diff(5).relations_added) == len(net.diff(5).relations_removed) == 0


def test_blame_names_the_last_commit_that_made_or_cut(net: gn.GrapNet) -> None:
    assert net.blame(net.layers[0][0], net.layers[1][0]) is None
    new = grow(net)
    assert net.blame(new[0]) is net.history[0]
    assert net.blame(net.layers[0][1], new[1]).by == "rule"
    cut(net)
    assert net.blame(0, 4).reason == "cut 0 0"
    assert net.blame(0, 5) is None
    net.undo()
    assert net.blame(0, 4) is net.history[-1]
    with net.edit(reason="gone") as edit:
        edit.remove_nodes(new)
    assert (
        net.blame(new.uids[0]).reason == net.blame(net.layers[0][1], new.uids[1]).reason == "gone"
    )


def test_a_new_edit_clears_redo_and_a_trial_does_not(net: gn.GrapNet) -> None:
    cut(net, 0)
    net.undo()
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0][3], slots=[0])
        edit.commit()
    net.redo()
    net.undo()
    cut(net, 2)
    with pytest.raises(gn.errors.HistoryError):
        net.redo()
    net.undo()
    with pytest.raises(gn.errors.HistoryError):
        net.undo()


def test_the_journal_of_a_copy_has_a_limit_of_its_own(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
    copied = copy.deepcopy(net)
    copied.journal.undo_limit = 0
    assert copied.history[-1].change.transitions[0].weights.gone_values is None
    assert net.history[-1].change.transitions[0].weights.gone_values is not None


def test_sixteen_commits_can_be_undone_and_the_limit_can_be_set(net: gn.GrapNet) -> None:
    assert net.journal.undo_limit == 16
    for number in range(20):
        with net.edit(reason=f"{number}") as edit:
            edit.set_owner(net.layers[0], f"{number}")
    net.journal.undo_limit = 18
    assert [net.undo().reason for _ in range(16)] == [f"undo: {n}" for n in range(19, 3, -1)]
    with pytest.raises(gn.errors.HistoryError, match="18"):
        net.undo()
    assert net.layers[0].owners == ["3"] * 4
    net.journal.undo_limit = 2
    net.redo()
    net.redo()
    with pytest.raises(gn.errors.HistoryError):
        net.redo()
    assert len(net.history) == 38
    with pytest.raises(ValueError, match="-1"):
        net.journal.undo_limit = -1


@pytest.mark.parametrize("limit", [0, 3])
def test_what_can_no_longer_be_undone_is_really_let_go(net: gn.GrapNet, limit: int) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    net.journal.undo_limit = limit
    held = []
    for row in range(4):
        train(net, optimizer)
        with net.edit(allow_dead=True) as edit:
            edit.cut(net.layers[0][row].outgoing())
        values = edit.receipt.change.transitions[0].weights
        held.append(weakref.ref(values.gone_values))
        del edit, values
    grow(net)
    gc.collect()
    alive = [reference() is not None for reference in held]
    assert alive == ([False] * 4 if limit == 0 else [False] * 2 + [True] * 2)
    # the summary stays
    assert [c.change.counts()["relations_removed"] for c in net.history[:4]] == [3] * 4
    assert len(net.diff(0).relations_removed) == 12


def test_replay_onto_an_equal_graph_is_bit_identical(net: gn.GrapNet) -> None:
    start = copy.deepcopy(net)
    new = grow(net)
    with net.edit(reason="more") as edit:
        edit.remove_nodes(new[:1])
        edit.freeze(net.layers[1][1])
        edit.set_activation(new[1:], "tanh")
        edit.connect(net.layers[0][2:], new[1:])
    net.undo()
    net.redo()
    start.replay(net.history)
    for one, other in zip(start.state_dict().values(), net.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert [(c.version, c.reason, c.by) for c in start.history] == [
        (c.version, c.reason, c.by) for c in net.history
    ]
    assert start.layers[1].owners == net.layers[1].owners
    assert start.layers[1].activations == net.layers[1].activations
    assert start._next_uid == net._next_uid


@pytest.mark.parametrize(
    ("other", "edit"),
    [
        ([([1, 1], [0, 1])], ("connect", 0, 1)),  # the owner's list ends elsewhere
        ([([1, 0], [0, 1])], ("connect", 0, 1)),  # the relation exists
        ([([0, 1], [1, 0])], ("cut", 1, 1)),  # the relation does not
        ([([0, 1, 1], [0, 0, 1])], ("connect", 0, 1)),  # one more relation
    ],
    ids=str,
)
def test_replay_refuses_a_different_graph(
    other: list[tuple[list[int], ...]], edit: tuple[str, int, int]
) -> None:
    made = gn.GrapNet.from_relations([2, 2], [([0, 1], [0, 1])])
    graph = gn.GrapNet.from_relations([2, 2], other)
    verb, parent, child = edit
    with made.edit(allow_dead=True) as opened:
        if verb == "cut":
            opened.cut(made.layers[0][parent].outgoing(to=made.layers[1][child]))
        else:
            opened.connect(made.layers[0][parent], made.layers[1][child])
    before = fingerprint(graph)
    with pytest.raises(gn.errors.HistoryError, match="commit 1"):
        graph.replay(made.history)
    assert fingerprint(graph) == before


def test_replay_refuses_other_layers(net: gn.GrapNet) -> None:
    new = grow(net)
    with net.edit() as edit:
        edit.remove_nodes(new[:1])
    for graph in (
        gn.GrapNet([4, 3]),
        gn.GrapNet([4, 4, 2], dtype=torch.float64),
        copy.deepcopy(net),
    ):
        before = fingerprint(graph)
        with pytest.raises(gn.errors.HistoryError, match="commit"):
            graph.replay(net.history)
        assert fingerprint(graph) == before


def test_a_copy_that_folds_what_its_net_does_not_comes_back_from_a_file(
    net: gn.GrapNet, tmp_path
) -> None:
    twin = copy.deepcopy(net)
    gn.attach(twin, net)
    # Without parents the node sends relu(bias): 0 in the net, 1 in the copy.
    net.layers[1][0].bias = -1.0
    twin.layers[1][0].bias = 1.0
    before = twin.layers[2].biases.detach().clone()
    with net.edit() as edit:
        edit.cut(net.layers[1][0].incoming())
        edit.remove_orphans(fold_bias=True)
    assert not torch.equal(twin.layers[2].biases, before)
    gn.save(tmp_path / "twin.gn", twin, undo=True)
    loaded = gn.load(tmp_path / "twin.gn")
    assert torch.equal(loaded.layers[2].biases, twin.layers[2].biases)
    loaded.undo()
    assert torch.equal(loaded.layers[2].biases, before)


# Details of older commits


@pytest.fixture
def rewired() -> gn.GrapNet:
    """A net that was rewired twenty times, with room for the details of few commits."""
    torch.manual_seed(0)
    rewired = gn.GrapNet([20, 30, 5])
    rewired.journal.undo_limit = 3
    for step in range(20):
        with rewired.edit(reason=f"rewire {step}") as edit:
            edit.cut(rewired.layers[0].outgoing().smallest(count=20))
            edit.connect(rewired.layers[1][:2], edit.add_nodes(2, 1))
    rewired.journal.detail_limit = 70_000
    return rewired


def test_the_oldest_details_go_first_and_the_rest_stays(rewired: gn.GrapNet) -> None:
    kept = [commit.has_details for commit in rewired.history]
    assert kept == sorted(kept)
    assert 3 < sum(kept) < 20
    assert sum(commit.change.detail_bytes for commit in rewired.history) <= 70_000
    assert [commit.reason for commit in rewired.history] == [f"rewire {step}" for step in range(20)]
    assert rewired.history[0].counts["relations_removed"] == 20
    assert rewired.history[0].operations[0] == {"operation": "cut"}


def test_details_of_large_commits_count_with_all_of_their_bytes() -> None:
    net = gn.GrapNet([60, 300, 2], density=1)
    net.journal.undo_limit = 1
    net.journal.detail_limit = 100_000
    for _ in range(5):
        with net.edit() as edit:
            edit.cut(net.layers[0].outgoing().smallest(count=3000))
    sizes = [commit.change.detail_bytes for commit in net.history if commit.has_details]
    assert min(sizes) > 30_000
    assert sum(sizes) <= 100_000


def test_an_outline_has_the_time_of_its_commit(net: gn.GrapNet) -> None:
    for _ in range(2):
        grow(net)
    times = [commit.time for commit in net.history]
    net.journal.undo_limit = 0
    net.journal.detail_limit = 0
    assert not any(commit.has_details for commit in net.history)
    assert [commit.time for commit in net.history] == pytest.approx(times, abs=1e-5)


def test_what_undo_needs_is_kept_whatever_the_limit(rewired: gn.GrapNet) -> None:
    rewired.journal.detail_limit = 0
    assert sum(commit.has_details for commit in rewired.history) == 3
    relations = rewired.count().relations
    for _ in range(3):
        rewired.undo()
    assert rewired.count().relations == relations + 3 * 18
    with pytest.raises(gn.errors.HistoryError, match="nothing to undo"):
        rewired.undo()
    gn.check(rewired)


def test_older_versions_are_refused_by_name(rewired: gn.GrapNet) -> None:
    assert len(rewired.diff(18).relations_removed) == 40
    with pytest.raises(gn.errors.HistoryError, match=r"version 1 .*detail_limit"):
        rewired.diff(0)
    with pytest.raises(gn.errors.HistoryError, match="detail_limit"):
        copy.deepcopy(rewired).replay(rewired.history)
    newest = rewired.layers[2][-1]
    oldest = rewired.layers[2][5]
    assert rewired.blame(newest) is rewired.history[-1]
    with pytest.raises(gn.errors.HistoryError, match="detail_limit"):
        rewired.blame(oldest)  # grown by a commit that no longer says so
    with pytest.raises(ValueError, match="negative"):
        rewired.journal.detail_limit = -1


def test_a_removed_node_is_reported_missing_all_the_same(rewired: gn.GrapNet) -> None:
    with rewired.edit(reason="drop it") as edit:
        edit.remove_nodes(rewired.layers[1][0])
    rewired.journal.undo_limit = 0
    rewired.journal.detail_limit = 0
    with pytest.raises(gn.errors.StaleNodeError):
        rewired.node(20)


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
