"""The journal: history, diff, blame, undo and redo, replay, and how long values are kept."""

import copy
import gc
import weakref

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


def wiring(net: gn.GrapNet) -> list[torch.Tensor]:
    return [part for t in net.transitions for part in (t.ptr, t.child)] + [
        layer.uids for layer in net.layers
    ]


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


def test_the_history_is_a_sequence_that_prints_a_commit_a_line(net: gn.GrapNet) -> None:
    assert repr(net.history) == "History()"
    assert len(net.history) == 0
    grow(net)
    cut(net)
    history = net.history
    assert repr(history).splitlines() == [
        "History(",
        "  Commit(version=1, 'grow', by rule: nodes_added 2, relations_added 8)",
        "  Commit(version=2, 'cut 0 0': relations_removed 1)",
        ")",
    ]
    assert repr(history[-1:]).splitlines()[1:-1] == [
        "  Commit(version=2, 'cut 0 0': relations_removed 1)"
    ]
    assert (len(history), history[0], [*history]) == (2, net.history[0], [history[0], history[1]])
    assert list(history) == [history[0], history[1]]


def test_diff_in_both_directions_and_across_undo(net: gn.GrapNet) -> None:
    new = grow(net).uids.tolist()
    cut(net)
    with net.edit() as edit:
        edit.remove_nodes(new[:1])
    there, back = net.diff(0), net.diff(3, 0)
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


def test_undo_keeps_present_weights_and_returns_cut_ones_as_they_were(net: gn.GrapNet) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    gn.attach(optimizer, net)
    train(net, optimizer, 3)
    node, old = net.layers[0][1], net.layers[0][1].W_alloc.detach().clone()
    bias, wired = net.layers[1][2].bias.item(), wiring(net)
    slots = {k: v.clone() for k, v in optimizer.state[net.transitions[0].weight].items()}
    with net.edit(reason="both") as edit:
        edit.cut(node, slots=[0])
        edit.remove_nodes(net.layers[1][2])
    train(net, optimizer, 3)
    present = node.W_alloc.detach().clone()
    momentum = optimizer.state[net.transitions[0].weight]["exp_avg"].clone()
    step = optimizer.state[net.transitions[0].weight]["step"].item()
    net.undo()
    assert all(torch.equal(a, b) for a, b in zip(wiring(net), wired, strict=True))
    assert node.W_alloc[0, 0] == old[0, 0]
    assert node.W_alloc[0, 2] == old[0, 2]
    assert node.W_alloc[0, 1] == present[0, 0] != old[0, 1]
    assert net.layers[1][2].bias.item() == bias
    state = optimizer.state[net.transitions[0].weight]
    assert state["step"].item() == step == 6
    survivors = torch.tensor([k for k in range(12) if k % 3 != 2 and k != 3])
    restored = torch.tensor([k for k in range(12) if k % 3 == 2 or k == 3])
    assert torch.equal(state["exp_avg"][survivors], momentum)
    assert torch.equal(state["exp_avg"][restored], slots["exp_avg"][restored])
    assert torch.equal(state["exp_avg_sq"][restored], slots["exp_avg_sq"][restored])
    assert net.layers[0].outgoing().gradients[restored].abs().sum() == 0
    train(net, optimizer)


def test_redo_returns_what_undo_took_as_it_was_then(net: gn.GrapNet) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    gn.attach(optimizer, net)
    new = grow(net)
    train(net, optimizer, 3)
    trained = [
        new.incoming().weights.tolist(),
        new.outgoing().weights.tolist(),
        new.biases.tolist(),
    ]
    buffer = optimizer.state[net.layers[1].bias]["momentum_buffer"][3:].clone()
    with net.edit() as edit:
        edit.freeze(new[:1])
    net.undo()
    net.undo()
    with pytest.raises(gn.StaleNodeError, match="undo: grow"):
        new.incoming()
    train(net, optimizer)
    net.redo()
    assert [
        new.incoming().weights.tolist(),
        new.outgoing().weights.tolist(),
        new.biases.tolist(),
    ] == trained
    assert torch.equal(optimizer.state[net.layers[1].bias]["momentum_buffer"][3:], buffer)
    assert new.owners == ["new", "new"]
    assert not new.frozen.any()
    net.redo()
    assert new.frozen.tolist() == [True, False]
    with pytest.raises(gn.HistoryError, match="redo"):
        net.redo()
    gn.check(net)


def test_undo_and_redo_walk_back_and_forth_many_times(net: gn.GrapNet) -> None:
    states = [net.state_dict()]
    for action in (
        lambda: grow(net),
        lambda: cut(net, 1),
        lambda: cut(net, 2, 1),
        lambda: grow(net, "again"),
    ):
        action()
        states.append(net.state_dict())
    for _ in range(3):
        for state in states[-2::-1]:
            net.undo()
            assert same_state(net.state_dict(), state)
        for state in states[1:]:
            net.redo()
            assert same_state(net.state_dict(), state)
    assert (net.version, len(net.history)) == (4 + 3 * 8, 28)


def test_a_trial_between_commit_and_undo_does_not_matter(net: gn.GrapNet) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    train(net, optimizer)
    slots = optimizer.state[net.transitions[0].weight]["exp_avg"].clone()
    with net.edit() as edit:
        edit.cut(net.layers[0][:2].outgoing())
    for _ in range(2):
        with net.edit(trial=True) as edit:
            edit.cut(net.layers[0][2], slots=[1])
            edit.connect(net.layers[0][0], net.layers[1])
            edit.commit()
    net.undo()
    assert torch.equal(optimizer.state[net.transitions[0].weight]["exp_avg"], slots)


def test_a_new_edit_clears_redo_and_a_trial_does_not(net: gn.GrapNet) -> None:
    cut(net, 0)
    cut(net, 1)
    net.undo()
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0][3], slots=[0])
        edit.commit()
    net.redo()
    net.undo()
    cut(net, 2)
    with pytest.raises(gn.HistoryError, match="nothing to redo"):
        net.redo()
    net.undo()
    net.undo()
    with pytest.raises(gn.HistoryError, match="nothing to undo"):
        net.undo()
    assert net.count().relations == 18


def test_sixteen_commits_can_be_undone_and_the_limit_can_be_set(net: gn.GrapNet) -> None:
    assert net.journal.undo_limit == 16
    for number in range(20):
        with net.edit(reason=f"{number}") as edit:
            edit.set_owner(net.layers[0], f"{number}")
    net.journal.undo_limit = 18
    assert [net.undo().reason for _ in range(16)] == [f"undo: {n}" for n in range(19, 3, -1)]
    with pytest.raises(gn.HistoryError, match="18"):
        net.undo()
    assert net.layers[0].owners == ["3"] * 4
    net.journal.undo_limit = 2
    net.redo()
    net.redo()
    with pytest.raises(gn.HistoryError):
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
        held.append([weakref.ref(t) for t in (values.gone_values, values.gone_gradients)])
        del edit, values
    grow(net)
    gc.collect()
    alive = [{reference() is not None for reference in row} for row in held]
    assert alive == ([{False}] * 4 if limit == 0 else [{False}] * 2 + [{True}] * 2)
    # the summary stays
    assert [c.change.counts()["relations_removed"] for c in net.history[:4]] == [3] * 4
    assert len(net.diff(0).relations_removed) == 12


def test_replay_onto_an_equal_graph_is_bit_identical(net: gn.GrapNet) -> None:
    start = copy.deepcopy(net)
    new = grow(net)
    cut(net, 1, 1)
    with net.edit(reason="more") as edit:
        edit.remove_nodes(new[:1])
        edit.freeze(net.layers[1][1])
        edit.set_activation(new[1:], "tanh")
        edit.connect(net.layers[0][2:], new[1:])
    net.undo()
    net.redo()
    start.replay(net.history)
    assert all(torch.equal(a, b) for a, b in zip(wiring(start), wiring(net), strict=True))
    assert same_state(start.state_dict(), net.state_dict())
    assert [(c.version, c.reason, c.by) for c in start.history] == [
        (c.version, c.reason, c.by) for c in net.history
    ]
    assert (start.layers[1].owners, start.layers[1].activations) == (
        net.layers[1].owners,
        net.layers[1].activations,
    )
    assert start.next_uid == net.next_uid
    gn.check(start)
    start.undo()  # and the two go their own ways
    assert net.layers[1][1].frozen


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
    made, graph = (
        gn.GrapNet.from_relations([2, 2], [([0, 1], [0, 1])]),
        gn.GrapNet.from_relations([2, 2], other),
    )
    verb, parent, child = edit
    with made.edit(allow_dead=True) as opened:
        if verb == "cut":
            opened.cut(made.layers[0][parent].outgoing(to=made.layers[1][child]))
        else:
            opened.connect(made.layers[0][parent], made.layers[1][child])
    before = fingerprint(graph)
    with pytest.raises(gn.HistoryError, match="commit 1"):
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
        with pytest.raises(gn.HistoryError, match="commit"):
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


def same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
