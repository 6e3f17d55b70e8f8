"""A closed-form readout follows commits: nodes that leave, come or change, undo, trials and
failures.
"""

from typing import Any

import pytest
import torch

import grapnet as gn

from .readouts import SIZES, batch, hidden, is_solved, make_net, reference, shrink, watching


def test_nodes_that_leave_take_exactly_their_sums_along() -> None:
    net, (x, y) = make_net(density=0.6), batch()
    readout = watching(net)
    with net.edit() as edit:
        edit.cut(net.layers[1].outgoing().smallest(fraction=0.3))
        edit.remove_nodes(net.layers[1][[0, 4, 5]])
    assert readout.statistics.n_features == 9
    readout.solve()
    assert is_solved(net, hidden(net, x), y)
    more_x, more_y = batch(40, seed=5)
    readout.update(more_x, more_y)
    readout.solve()
    assert is_solved(net, hidden(net, torch.cat([x, more_x])), torch.cat([y, more_y]))


def test_children_that_come_had_targets_0_and_rows_are_labels() -> None:
    net, (x, y) = make_net(), batch()
    readout = watching(net)
    with net.edit() as edit:
        edit.connect(net.layers[1], edit.add_nodes(2, 1))
        edit.remove_nodes(net.layers[2][0], interface=True)
    readout.update(x[:20], torch.full((20,), 3))
    readout.solve()
    h = torch.cat([hidden(net, x), hidden(net, x[:20])])
    assert is_solved(net, h, torch.cat([y - 1, torch.full((20,), 3)]))


@pytest.mark.parametrize("change", ["born", "wired", "activation", "cascade"])
def test_nodes_without_a_past(change: str) -> None:
    net, (x, y) = make_net(sizes=[5, 6, 12, 4] if change == "cascade" else SIZES), batch()
    if change == "cascade":
        with net.edit() as edit:
            edit.cut(net.layers[1][2].outgoing(to=net.layers[2][2:]))
    readout = watching(net)
    last = len(net.layers) - 2
    with net.edit() as edit:
        if change == "born":
            born = edit.add_nodes(1, 2)
            edit.connect(net.layers[0], born)
            edit.connect(born, net.layers[2])
        elif change == "wired":
            edit.cut(net.layers[0][0].outgoing(to=net.layers[1][[1, 2]]))
        elif change == "activation":
            edit.set_activation(net.layers[1][[1, 2]], "relu")
        else:
            edit.cut(net.layers[0][0].outgoing(to=net.layers[1][2]))
    late = {"born": [12, 13], "wired": [1, 2], "activation": [1, 2], "cascade": [0, 1]}[change]
    assert readout.statistics.lacking is not None
    assert readout.statistics.lacking.nonzero().squeeze(1).tolist() == late
    before = net.layers[last].outgoing().weights.clone()
    with pytest.raises(gn.GrapNetError, match=f"{len(late)} nodes of layer {last} came"):
        readout.solve()
    assert torch.equal(net.layers[last].outgoing().weights, before)
    h = readout.features(x)
    readout.late_nodes = "leave out"
    weight, bias = readout.solve()
    kept = [row for row in range(h.shape[1]) if row not in late]
    assert not weight[:, late].any()
    for c in range(4):
        expected = reference(h[:, kept], (y == c).double())
        assert torch.allclose(weight[c, kept], expected[0], atol=1e-8)
        assert torch.allclose(bias[c], expected[1], atol=1e-8)
    readout.late_nodes = "silent"
    readout.update(x, y)
    silent = h.clone()
    silent[:, late] = 0
    weight = readout.solve().weight
    for c in range(4):
        expected = reference(torch.cat([silent, h]), torch.cat([y == c, y == c]).double())
        assert torch.allclose(weight[c], expected[0], atol=1e-8)
    readout.late_nodes = "refuse"
    readout.clear()
    readout.update(x, y)
    readout.solve()


def test_a_late_node_with_frozen_relations_cannot_be_left_out() -> None:
    net = make_net()
    readout = watching(net, late_nodes="leave out")
    with net.edit() as edit:
        edit.cut(net.layers[0][0].outgoing(to=net.layers[1][2]))
        edit.freeze(net.layers[1][2].outgoing())
    with pytest.raises(gn.GrapNetError, match="own frozen relations"):
        readout.solve()


def test_undo_and_redo_bring_back_what_was_seen() -> None:
    net, (x, y) = make_net(), batch()
    readout = watching(net, late_nodes="leave out")
    first = readout.solve()
    shrink(net)
    smaller = readout.solve()
    net.undo()
    assert all(map(torch.equal, readout.solve(), first))
    net.redo()
    assert all(map(torch.equal, readout.solve(), smaller))
    net.undo()
    readout.update(x[:10], y[:10])  # everything has its whole past again
    readout.late_nodes = "refuse"
    readout.solve()
    assert is_solved(net, hidden(net, torch.cat([x, x[:10]])), torch.cat([y, y[:10]]))


def test_what_returns_after_more_was_seen_has_no_past() -> None:
    net, (x, y) = make_net(), batch()
    readout = watching(net)
    shrink(net)
    with pytest.raises(ValueError, match="labels"):
        readout.update(x[:10], y[:10] + 7)
    readout.update(x[:10], y[:10])
    net.undo()
    assert readout.statistics.lacking is not None
    assert readout.statistics.lacking.tolist() == [130, 130, 0, 0, 130, 0, 0, 0, 0, 0, 0, 0]


def test_a_refused_batch_and_a_failed_commit_leave_the_way_back() -> None:
    net, (x, y) = make_net(), batch()
    readout = watching(net)
    before = readout.solve()

    class Refusal:
        def prepare(self, graph: Any, commit: Any) -> Any:
            raise RuntimeError("no")

    refusal = Refusal()
    net.follow(refusal)
    with pytest.raises(RuntimeError, match="no"):
        shrink(net)
    assert all(map(torch.equal, readout.solve(), before))
    net.unfollow(refusal)
    shrink(net)
    with pytest.raises(ValueError, match="labels"):
        readout.update(x, y + 7)
    net.undo()
    assert all(map(torch.equal, readout.solve(), before))


def test_a_trial_leaves_no_trace() -> None:
    net, (x, y) = make_net(), batch()
    readout = watching(net)
    before = readout.solve()
    for remove, clear in ((True, False), (False, False), (True, True)):
        with net.edit(trial=True) as edit:
            edit.remove_nodes(net.layers[1][:3]) if remove else edit.cut(
                net.layers[1][0].outgoing()
            )
            edit.commit()
            if clear:
                readout.clear()
            readout.update(x[:50], y[:50])
            readout.solve()
            assert readout.statistics.count == (50 if clear else 170)
        assert readout.statistics.count == (0 if clear else 120)
        assert readout.statistics.n_features == 12
        if not clear:
            assert all(map(torch.equal, readout.solve(), before))
    readout.update(x, y)
    assert all(
        torch.allclose(a, b, atol=1e-10) for a, b in zip(readout.solve(), before, strict=True)
    )


def test_nodes_that_were_trained_below_it_may_leave_again() -> None:
    net = make_net()
    readout = watching(net)
    before = readout.solve()
    with net.edit() as edit:
        born = edit.add_nodes(1, 2)
        edit.connect(net.layers[0], born)
    with torch.no_grad():
        born.incoming().weights = born.incoming().weights + 1
    with pytest.raises(gn.GrapNetError, match="other values"):
        readout.solve()
    net.undo()
    assert all(map(torch.equal, readout.solve(), before))
    with torch.no_grad():
        net.layers[1][0].incoming().weights = net.layers[1][0].incoming().weights + 1
    with pytest.raises(gn.GrapNetError, match="other values"):
        readout.solve()


def test_one_that_comes_inside_a_trial_has_seen_nothing_after_it() -> None:
    net, (x, y) = make_net(), batch()
    with net.edit(trial=True) as edit:
        edit.remove_nodes(net.layers[1][0])
        edit.commit()
        readout = watching(net)
        assert readout.statistics.count == 120
    assert readout.statistics.count == 0
    assert readout.statistics.n_features == 12
    readout.update(x, y)
    readout.solve()
    assert is_solved(net, hidden(net, x), y)
