"""ClosedFormReadout: outgoing relations in closed form, over sparse and frozen wiring, through
commits and files.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.continual.readout import ClosedFormReadout, GramStatistics

from .readouts import batch, hidden, is_solved, make_net, matrix, reference, shrink, watching


@pytest.mark.parametrize("density", [1.0, 0.5])
def test_every_output_solves_over_its_own_parents(density: float) -> None:
    net, (x, y) = make_net(density=density), batch()
    incoming, count = matrix(net, 0), net.count()
    readout = watching(net)
    assert not is_solved(net, hidden(net, x), y)
    weight, bias = readout.solve()
    assert is_solved(net, hidden(net, x), y)
    assert torch.equal(weight.T, matrix(net, 1))
    assert torch.equal(bias, net.layers[2].biases.detach())
    assert torch.equal(matrix(net, 0), incoming)
    assert (net.count(), net.version) == (count, 0)
    assert torch.allclose(net(x), hidden(net, x) @ weight.T + bias, atol=1e-10)


def test_it_learns_and_shuffled_labels_do_not() -> None:
    net, (x, y) = make_net(sizes=[5, 80, 4], dtype=torch.float32), batch(800)
    test_x, test_y = batch(400, seed=1)
    readout = ClosedFormReadout(net, ridge=0.1)
    for labels, least, most in (
        (y, 0.8, 1.0),
        (y[torch.randperm(800, generator=torch.manual_seed(0))], 0.0, 0.4),
    ):
        readout.clear()
        readout.update(x.float(), labels)
        readout.solve()
        assert least < (net(test_x.float()).argmax(1) == test_y).float().mean() < most


def test_frozen_relations_and_biases_stay_and_what_they_explain_is_taken_away() -> None:
    net, (x, y) = make_net(density=0.7), batch()
    relations = net.layers[1].outgoing()
    frozen = torch.arange(len(relations)) % 3 == 0
    with net.edit() as edit:
        edit.freeze(relations[frozen])
        edit.freeze(net.layers[2][1], incoming=False, outgoing=False)
    held, bias = relations[frozen].weights.clone(), net.layers[2][1].bias.item()
    watching(net).solve()
    assert torch.equal(relations[frozen].weights, held)
    assert net.layers[2][1].bias.item() == bias
    h, weights, biases = hidden(net, x), matrix(net, 1), net.layers[2].biases.detach()
    for c, uid in enumerate(net.layers[2].uids):
        mine = relations.children == uid
        free, fixed = (
            net.layers[1].rows(relations.parents[mine & bits]).long() for bits in (~frozen, frozen)
        )
        target = (y == c).double() - h[:, fixed] @ weights[fixed, c]
        if c == 1:
            rows, eye = h[:, free], torch.eye(len(free), dtype=torch.float64)
            expected = (
                torch.linalg.solve(rows.T @ rows + eye, rows.T @ (target - bias)),
                torch.tensor(bias),
            )
        else:
            expected = reference(h[:, free], target)
        assert torch.allclose(weights[free, c], expected[0], atol=1e-8)
        assert torch.allclose(biases[c], expected[1].double(), atol=1e-8)


def test_features_are_without_dropout_and_can_be_given() -> None:
    net, (x, y) = make_net(), batch()
    net.layers[1].dropout = 0.5
    readout, given = watching(net), ClosedFormReadout(net)
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
    net, (x, _) = make_net(sizes=[5, 6, 7, 3]), batch()
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
    for layer in (3, -1, -5):
        with pytest.raises(ValueError, match="layers with outgoing relations are 0 to 2"):
            ClosedFormReadout(net, layer)


@pytest.mark.parametrize("per_class", [False, True])
def test_samples_and_classes_that_leave_were_never_seen(per_class: bool) -> None:
    net, (x, y) = make_net(density=0.5), batch()
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


def test_features_that_have_changed_are_refused() -> None:
    net, (x, y) = make_net(), batch()
    readout = watching(net)
    readout.solve()
    optimizer = torch.optim.Adam([net.transitions[1].weight], lr=0.1)
    net(x).square().sum().backward()
    optimizer.step()
    readout.solve()  # what it solves for may be trained
    net.layers[0][2].W_alloc = net.layers[0][2].W_alloc + 1e-3
    for call in (readout.solve, lambda: readout.update(x, y)):
        with pytest.raises(gn.GrapNetError, match="lead to layer 1 have other values"):
            call()
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
    with pytest.raises(gn.GrapNetError, match="lead to layer 1 have other values"):
        readout.solve()
    readout.clear()
    readout.update(x, y)
    readout.solve()
    assert is_solved(net, hidden(net, x), y)


def test_refusals() -> None:
    net = make_net()
    cases: list[tuple[str, Any]] = [("ridge", -1.0), ("ridge", torch.nan), ("late_nodes", "zero")]
    for name, value in cases:
        with pytest.raises(ValueError, match=name):
            ClosedFormReadout(net, **{name: value})
    with pytest.raises(gn.GrapNetError, match="nothing was seen"):
        ClosedFormReadout(net).solve()
    readout = watching(net)
    copied = copy.deepcopy(readout)
    with copied.net.edit() as edit:
        edit.remove_nodes(copied.net.layers[1][0])
    with pytest.raises(gn.GrapNetError, match="has not followed"):
        copied.solve()
    readout.solve()
    net.execution.use("attention", transition=1)
    with pytest.raises(gn.GrapNetError, match="attention"):
        readout.solve()


@pytest.mark.parametrize("per_class", [False, True])
def test_a_checkpoint_brings_it_back(tmp_path: Path, per_class: bool) -> None:
    net, (x, y) = make_net(density=0.5), batch()
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
    before = restored.state_dict()
    other = ClosedFormReadout(make_net(), per_class=per_class)
    for target in (
        restored,
        other,
        ClosedFormReadout(gn.load(tmp_path / "net"), 0, per_class=per_class),
    ):
        with pytest.raises(gn.CheckpointError, match="readout"):
            gn.restore(tmp_path / "net", readout=target)
    for bad in (
        {},
        {**before, "below": None},
        {**before, "uids": []},
        {**before, "statistics": {}},
    ):
        with pytest.raises(gn.CheckpointError):
            restored.load_state_dict(bad)
    assert restored.statistics.count == 140


def test_many_sparse_outputs_share_factorisations() -> None:
    """Outputs with equal parents, whatever the order of their relations, come out as one solve of
    the statistics.
    """
    parents, children = torch.meshgrid(torch.arange(12), torch.arange(40), indexing="ij")
    wired = (parents // 6 == children % 2) | (children == 39)
    net = gn.GrapNet.from_relations(
        [5, 12, 40],
        [
            (torch.arange(5).repeat_interleave(12), torch.arange(12).repeat(5)),
            (parents[wired], children[wired]),
        ],
        activation="tanh",
        dtype=torch.float64,
        generator=torch.manual_seed(0),
    )
    x, target = (
        batch()[0],
        torch.randn(120, 40, dtype=torch.float64, generator=torch.manual_seed(1)),
    )
    readout = ClosedFormReadout(net, ridge=0.3)
    readout.update(x, target)
    weight = readout.solve().weight
    for some, columns in (
        ([0, 1, 2, 3, 4, 5], range(0, 38, 2)),
        ([6, 7, 8, 9, 10, 11], range(1, 39, 2)),
    ):
        statistics = GramStatistics(6, len(columns))
        statistics.add(hidden(net, x)[:, some], target[:, list(columns)])
        assert torch.allclose(
            weight[list(columns)][:, some], statistics.solve(0.3).weight, atol=1e-10
        )
    assert (weight != 0).sum() == net.layers[1].outgoing().weights.numel()
