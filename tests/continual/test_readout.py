"""ClosedFormReadout: outgoing relations in closed form, over sparse and frozen wiring, through
commits and files.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.continual import ClosedFormReadout

SIZES = [5, 12, 4]


def make_net(
    *, density: float = 1.0, sizes: list[int] | None = None, dtype: torch.dtype = torch.float64
) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(3)
    return gn.GrapNet(
        sizes or SIZES, density=density, activation="tanh", dtype=dtype, generator=generator
    )


def batch(n: int = 120, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return x, 2 * (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()


def watching(net: gn.GrapNet, **settings: Any) -> ClosedFormReadout:
    readout = ClosedFormReadout(net, **settings)
    for x, y in zip(*(part.split(25) for part in batch()), strict=True):
        readout.update(x, y)
    return readout


def hidden(net: gn.GrapNet, x: Tensor) -> Tensor:
    """Returns what layer 1 says, computed from a dense matrix."""
    return torch.tanh(x @ matrix(net, 0) + net.layers[1].biases.detach())


def matrix(net: gn.GrapNet, layer: int) -> Tensor:
    relations = net.layers[layer].outgoing()
    (upper, lower) = net.layers[layer : layer + 2]
    found = torch.zeros(len(upper), len(lower), dtype=torch.float64)
    found[upper.rows(relations.parents).long(), lower.rows(relations.children).long()] = (
        relations.weights.detach()
    )
    return found


def reference(h: Tensor, y: Tensor, ridge: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns weights and bias of one output by the centred normal equations."""
    centred = h - h.mean(0)
    eye = torch.eye(h.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(centred.T @ centred + ridge * eye, centred.T @ (y - y.mean()))
    return weight, y.mean() - h.mean(0) @ weight


def is_solved(net: gn.GrapNet, h: Tensor, y: Tensor, tolerance: float = 1e-8) -> bool:
    """Says whether every output has what the reference gives over its own parents."""
    weights = matrix(net, 1)
    biases = net.layers[2].biases.detach()
    relations = net.layers[1].outgoing()
    for c, uid in enumerate(net.layers[2].uids):
        parents = net.layers[1].rows(relations.parents[relations.children == uid]).long()
        weight, bias = reference(h[:, parents], (y == c).double())
        if not torch.allclose(weights[parents, c], weight, rtol=0, atol=tolerance):
            return False
        if not torch.allclose(biases[c], bias, rtol=0, atol=tolerance):
            return False
    return True


def shrink(net: gn.GrapNet) -> None:
    with net.edit(reason="shrink") as edit:
        edit.remove_nodes(net.layers[1][[1, 4]])
        edit.cut(net.layers[0][0].outgoing(to=net.layers[1][0]))


@pytest.mark.parametrize("density", [1.0, 0.5])
def test_every_output_solves_over_its_own_parents(density: float) -> None:
    net = make_net(density=density)
    (x, y) = batch()
    incoming = matrix(net, 0)
    count = net.count()
    readout = watching(net)
    assert not is_solved(net, hidden(net, x), y)
    weight, bias = readout.solve()
    assert is_solved(net, hidden(net, x), y)
    assert torch.equal(weight.T, matrix(net, 1))
    assert torch.equal(bias, net.layers[2].biases.detach())
    assert torch.equal(matrix(net, 0), incoming)
    assert (net.count(), net.version) == (count, 0)
    assert torch.allclose(net(x), hidden(net, x) @ weight.T + bias, atol=1e-10)


def test_frozen_relations_and_biases_stay_and_what_they_explain_is_taken_away() -> None:
    net = make_net(density=0.7)
    (x, y) = batch()
    relations = net.layers[1].outgoing()
    frozen = torch.arange(len(relations)) % 3 == 0
    with net.edit() as edit:
        edit.freeze(relations[frozen])
        edit.freeze(net.layers[2][1], incoming=False, outgoing=False)
    held = relations[frozen].weights.clone()
    bias = net.layers[2][1].bias.item()
    watching(net).solve()
    assert torch.equal(relations[frozen].weights, held)
    assert net.layers[2][1].bias.item() == bias
    h = hidden(net, x)
    weights = matrix(net, 1)
    biases = net.layers[2].biases.detach()
    for c, uid in enumerate(net.layers[2].uids):
        mine = relations.children == uid
        free, fixed = (
            net.layers[1].rows(relations.parents[mine & bits]).long() for bits in (~frozen, frozen)
        )
        target = (y == c).double() - h[:, fixed] @ weights[fixed, c]
        if c == 1:
            rows = h[:, free]
            eye = torch.eye(len(free), dtype=torch.float64)
            expected = (
                torch.linalg.solve(rows.T @ rows + eye, rows.T @ (target - bias)),
                torch.tensor(bias),
            )
        else:
            expected = reference(h[:, free], target)
        assert torch.allclose(weights[free, c], expected[0], atol=1e-8)
        assert torch.allclose(biases[c], expected[1].double(), atol=1e-8)


def test_features_are_without_dropout_and_can_be_given() -> None:
    net = make_net()
    (x, y) = batch()
    net.layers[1].dropout = 0.5
    readout = watching(net)
    given = ClosedFormReadout(net)
    assert net.training
    assert all(module.training for module in net.modules())
    assert torch.allclose(
        readout.features(x.view(4, 30, 5)), hidden(net, x).view(4, 30, 12), atol=1e-12
    )
    given.add(hidden(net, x), y)
    assert all(
        torch.allclose(a, b, atol=1e-9) for a, b in zip(given.solve(), readout.solve(), strict=True)
    )
    assert not net.layers[1]._forward_hooks


def test_a_layer_in_the_middle_and_the_sensory_one() -> None:
    net = make_net(sizes=[5, 6, 7, 3])
    (x, _) = batch()
    target = torch.randn(120, 7, dtype=torch.float64, generator=torch.manual_seed(0))
    readout = ClosedFormReadout(net, 1)
    readout.update(x, target)
    weight, bias = readout.solve()
    for c in range(7):
        expected = reference(hidden(net, x), target[:, c])
        assert torch.allclose(weight[c], expected[0], atol=1e-8)
        assert torch.allclose(bias[c], expected[1], atol=1e-8)
    sensory = ClosedFormReadout(net, 0)
    sensory.update(x, target[:, :6])
    assert torch.allclose(sensory.solve().weight[0], reference(x, target[:, 0])[0], atol=1e-8)
    with pytest.raises(ValueError, match="layer -1"):
        ClosedFormReadout(net, -1)


@pytest.mark.parametrize("per_class", [False, True])
def test_samples_and_classes_that_leave_were_never_seen(per_class: bool) -> None:
    net = make_net(density=0.5)
    (x, y) = batch()
    readout = watching(net, per_class=per_class)
    readout.downdate(x[:30], y[:30])
    readout.solve()
    h = hidden(net, x)
    assert is_solved(net, h[30:], y[30:])
    others = y[30:] != 2
    if per_class:
        readout.forget(2)
    else:
        readout.downdate(x[30:][~others], y[30:][~others])
    assert is_solved(net, h[30:], y[30:])  # until it is solved again
    readout.solve()
    assert is_solved(net, h[30:][others], y[30:][others])


@pytest.mark.parametrize("way", ["own batches", "kept features", "mixed batches"])
def test_a_forgotten_class_leaves_no_bit_where_features_do_not_depend_on_it(way: str) -> None:
    generator = torch.Generator().manual_seed(0)
    net = gn.GrapNet([49, 120, 5], activation="silu", generator=generator)  # float32
    x = torch.randn(300, 49, generator=generator)
    y = torch.randint(5, (300,), generator=generator)
    solutions = []
    for sees_it in (True, False):
        readout = ClosedFormReadout(net, ridge=1e-2, per_class=True)
        features = readout.features(x)
        groups = torch.arange(300).split(37)
        if way == "own batches":
            groups = [(y == label).nonzero().squeeze(1) for label in range(5)]
        for rows in groups:
            chosen = rows if sees_it else rows[y[rows] != 2]
            if way == "kept features":
                readout.add(features[chosen], y[chosen])
            elif len(chosen):
                readout.update(x[chosen], y[chosen])
        if sees_it:
            saw = readout.solve().weight.clone()
            readout.forget(2)
        solutions.append(readout.solve())
    apart = max(float((a - b).abs().max()) for a, b in zip(*solutions, strict=True))
    assert float((saw - solutions[0].weight).abs().max()) > 0.01  # it was there
    if way == "mixed batches":
        # A product of fewer rows may round differently.
        assert apart < 1e-6
    else:
        assert apart == 0


def test_features_that_have_changed_are_refused() -> None:
    net = make_net()
    (x, y) = batch()
    readout = watching(net)
    readout.solve()
    optimizer = torch.optim.Adam([net.transitions[1].weight], lr=0.1)
    net(x).square().sum().backward()
    optimizer.step()
    readout.solve()  # what it solves for may be trained
    net.layers[0][2].W_alloc = net.layers[0][2].W_alloc + 1e-3
    for call in (readout.solve, lambda: readout.update(x, y)):
        with pytest.raises(gn.errors.GrapNetError):
            call()
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
    with pytest.raises(gn.errors.GrapNetError):
        readout.solve()
    readout.clear()
    readout.update(x, y)
    readout.solve()
    assert is_solved(net, hidden(net, x), y)


def test_refusals() -> None:
    net = make_net()
    wrong: Any = "zero"
    with pytest.raises(ValueError, match="late_nodes"):
        ClosedFormReadout(net, late_nodes=wrong)
    with pytest.raises(gn.errors.GrapNetError, match="add samples"):
        ClosedFormReadout(net).solve()
    readout = watching(net)
    copied = copy.deepcopy(readout)
    with copied.net.edit() as edit:
        edit.remove_nodes(copied.net.layers[1][0])
    with pytest.raises(gn.errors.GrapNetError, match="has not followed"):
        copied.solve()
    readout.solve()


@pytest.mark.parametrize("per_class", [False, True])
def test_a_checkpoint_brings_it_back(tmp_path: Path, per_class: bool) -> None:
    net = make_net(density=0.5)
    (x, y) = batch()
    readout = watching(net, per_class=per_class, late_nodes="leave out")
    shrink(net)
    gn.save(tmp_path / "net", net, readout=readout)
    loaded = gn.load(tmp_path / "net")
    restored = ClosedFormReadout(loaded, per_class=per_class, late_nodes="leave out")
    gn.restore(tmp_path / "net", readout=restored)
    for each in (readout, restored):
        each.update(x[:20], y[:20])
    assert all(map(torch.equal, readout.solve(), restored.solve()))
    assert torch.equal(net(x), loaded(x))
    with loaded.edit() as edit:
        edit.remove_nodes(loaded.layers[1][0])
    other = ClosedFormReadout(make_net(), per_class=per_class)
    for target in (
        restored,
        other,
        ClosedFormReadout(gn.load(tmp_path / "net"), 0, per_class=per_class),
    ):
        with pytest.raises(gn.errors.CheckpointError, match="readout"):
            gn.restore(tmp_path / "net", readout=target)
    assert restored.statistics.count == 140


def test_nodes_that_leave_take_exactly_their_sums_along() -> None:
    net = make_net(density=0.6)
    (x, y) = batch()
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
    net = make_net()
    (x, y) = batch()
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
    net = make_net(sizes=[5, 6, 12, 4] if change == "cascade" else SIZES)
    (x, y) = batch()
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
    with pytest.raises(gn.errors.GrapNetError):
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
    with pytest.raises(gn.errors.GrapNetError, match="own frozen relations"):
        readout.solve()


def test_undo_and_redo_bring_back_what_was_seen() -> None:
    net = make_net()
    (x, y) = batch()
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
    net = make_net()
    (x, y) = batch()
    readout = watching(net)
    shrink(net)
    readout.update(x[:10], y[:10])
    net.undo()
    assert readout.statistics.lacking is not None
    assert readout.statistics.lacking.tolist() == [130, 130, 0, 0, 130, 0, 0, 0, 0, 0, 0, 0]


def test_a_refused_batch_and_a_failed_commit_leave_the_way_back() -> None:
    net = make_net()
    (x, y) = batch()
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
    net = make_net()
    (x, y) = batch()
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
    with net.edit(trial=True) as edit:
        edit.remove_nodes(net.layers[1][0])
        edit.commit()
        late = watching(net)
        assert late.statistics.count == 120
    assert (late.statistics.count, late.statistics.n_features) == (0, 12)
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
    with pytest.raises(gn.errors.GrapNetError):
        readout.solve()
    net.undo()
    assert all(map(torch.equal, readout.solve(), before))
    with torch.no_grad():
        net.layers[1][0].incoming().weights = net.layers[1][0].incoming().weights + 1
    with pytest.raises(gn.errors.GrapNetError):
        readout.solve()


@pytest.mark.parametrize("density", [1.0, 0.6])
def test_an_edit_assigns_what_is_solved_for_those_that_stay(density: float) -> None:
    nets = [make_net(density=density), make_net(density=density)]
    before = nets[0](batch()[0])
    for inside, net in zip((True, False), nets, strict=True):
        with net.edit() as edit:
            edit.freeze(net.layers[1][[2]].outgoing())
        readout = watching(net)
        with net.edit(reason="narrow") as edit:
            edit.remove_nodes(net.layers[1][[0, 5, 7]])
            edit.cut(net.layers[1][[1, 3]].outgoing().smallest(count=3))
            if inside:
                readout.solve(edit)
        if not inside:
            readout.solve()
    one, other = nets
    torch.testing.assert_close(matrix(one, 1), matrix(other, 1), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(one.layers[2].biases, other.layers[2].biases)
    one.undo()
    assert torch.equal(one(batch()[0]), before)


@pytest.mark.parametrize("fold_bias", [False, True])
def test_orphans_leave_what_an_edit_solves(fold_bias: bool) -> None:
    nets = [make_net(), make_net()]
    for inside, net in zip((True, False), nets, strict=True):
        readout = watching(net)
        with net.edit(reason="narrow") as edit:
            edit.cut(net.layers[1][[0, 5, 7]].incoming())
            edit.remove_orphans(fold_bias=fold_bias)
            if inside:
                readout.solve(edit)
        if not inside:
            readout.solve()
    one, other = nets
    torch.testing.assert_close(matrix(one, 1), matrix(other, 1), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(one.layers[2].biases, other.layers[2].biases)
