"""Sifting of solved nodes by loss: the choice is the one that trying every removal makes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.continual import ClosedFormReadout, GramStatistics

RIDGE = 0.5


def made_up(features: int = 12, outputs: int = 3, count: int = 60) -> tuple[Tensor, Tensor]:
    """Features that depend on one another, and targets that need some of them."""
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(features, features, generator=generator, dtype=torch.float64)
    h = torch.randn(count, features, generator=generator, dtype=torch.float64) @ mixed
    # of other sizes, so that small weights are not those of needless features
    h = (h.tanh() + 0.3) * torch.logspace(-1, 1, features, dtype=torch.float64)
    useful = torch.randn(features, outputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    return h, (h / h.std(0)) @ useful + 0.1 * noise


def loss(h: Tensor, y: Tensor, penalties: Tensor) -> float:
    """Returns the least Σ |W h + b − y|² + Σ penalty · W², by plain least squares."""
    rows = torch.cat([h, h.new_ones(len(h), 1)], 1)
    # penalties as rows of their own, with targets 0
    below = torch.cat([penalties.sqrt().diag(), h.new_zeros(len(penalties), 1)], 1)
    left = torch.cat([rows, below])
    right = torch.cat([y, y.new_zeros(len(penalties), y.shape[1])])
    solution = torch.linalg.lstsq(left, right).solution
    return float((left @ solution - right).square().sum())


def tried_out(h: Tensor, y: Tensor, penalties: Tensor, count: int) -> list[int]:
    """Returns the features that leave one by one, each the one whose removal costs least."""
    left = list(range(h.shape[1]))
    for _ in range(count):
        costs = {}
        for feature in left:
            rest = [other for other in left if other != feature]
            costs[feature] = loss(h[:, rest], y, penalties[rest])
        left.remove(min(costs, key=costs.__getitem__))
    return sorted(set(range(h.shape[1])) - set(left))


def sums(h: Tensor, y: Tensor) -> GramStatistics:
    statistics = GramStatistics(h.shape[1], y.shape[1])
    statistics.add(h, y)
    return statistics


@pytest.mark.parametrize("standardize", [False, True])
def test_one_by_one_it_is_the_choice_of_trying_every_removal(standardize: bool) -> None:
    h, y = made_up()
    penalties = torch.full((12,), RIDGE, dtype=torch.float64)
    if standardize:
        penalties = penalties * h.var(0, correction=0)
    expected = tried_out(h, y, penalties, 5)
    found = sums(h, y).weakest(5, ridge=RIDGE, steps=5, standardize=standardize)
    assert found.tolist() == expected
    # a control: the smallest weights are others
    weight = torch.linalg.lstsq(h, y).solution.norm(dim=1)
    assert sorted(weight.argsort()[:5].tolist()) != expected


def test_fewer_steps_choose_as_many_and_none_is_none() -> None:
    h, y = made_up()
    assert len(sums(h, y).weakest(5, ridge=RIDGE, steps=2)) == 5
    assert sums(h, y).weakest(0).tolist() == []
    assert sums(h, y).weakest(12, steps=3).tolist() == list(range(12))


@pytest.mark.parametrize(("count", "steps"), [(-1, 1), (13, 1), (3, 0)])
def test_wrong_counts_are_refused(count: int, steps: int) -> None:
    h, y = made_up()
    with pytest.raises(ValueError, match=r"count|steps"):
        sums(h, y).weakest(count, steps=steps)


def test_children_with_other_parents_are_judged_over_their_own() -> None:
    h, y = made_up(features=8)
    exists = torch.ones(8, 3, dtype=torch.bool)
    exists[[0, 1, 2], 0] = False
    exists[[5, 6], 2] = False
    parents, children = exists.nonzero(as_tuple=True)
    net = gn.GrapNet.from_relations([8, 3], [(parents, children)], dtype=torch.float64)
    readout = ClosedFormReadout(net, 0, ridge=RIDGE)
    readout.update(h, y)
    costs = {}
    for feature in range(8):
        costs[feature] = 0.0
        for output in range(3):
            own = [n for n in range(8) if exists[n, output]]
            rest = [n for n in own if n != feature]
            penalties = torch.full((8,), RIDGE, dtype=torch.float64)
            after = loss(h[:, rest], y[:, [output]], penalties[rest])
            costs[feature] += after - loss(h[:, own], y[:, [output]], penalties[own])
    expected = min(costs, key=costs.__getitem__)
    assert readout.weakest(1).uids.tolist() == [net.layers[0].uids[expected]]


def solved(frozen: Sequence[int] = (), **options: Any) -> tuple[ClosedFormReadout, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    net = gn.GrapNet([5, 12, 3], activation="tanh", dtype=torch.float64, generator=generator)
    with net.edit(reason="fix") as edit:
        edit.freeze(net.layers[1], outgoing=False)
        if frozen:
            edit.freeze(
                net.select(
                    where=lambda nodes: torch.isin(nodes.uids, torch.tensor(frozen))
                ).outgoing()
            )
    readout = ClosedFormReadout(net, ridge=RIDGE, **options)
    x = torch.randn(80, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(80, 3, generator=generator, dtype=torch.float64) + x[:, :3].sin()
    readout.update(x, y)
    return readout, x, y


def test_a_readout_names_its_weakest_nodes_and_solves_without_them() -> None:
    readout, x, y = solved()
    net = readout.net
    h = readout.features(x)
    nodes = readout.weakest(4, steps=4)
    expected = tried_out(h, y, torch.full((12,), RIDGE, dtype=torch.float64), 4)
    assert nodes.uids.tolist() == net.layers[1].uids[expected].tolist()
    assert net.version == 1  # nothing was edited or written
    with net.edit(reason="sift") as edit:
        edit.remove_nodes(nodes)
    readout.solve()
    rest = sorted(set(range(12)) - set(expected))
    penalties = torch.full((8,), RIDGE, dtype=torch.float64)
    weights = net.layers[1].outgoing().weights.detach()
    lost = float((net(x) - y).square().sum().detach() + RIDGE * weights.square().sum())
    assert lost == pytest.approx(loss(h[:, rest], y, penalties))


def test_nodes_with_frozen_relations_stay() -> None:
    free, _, _ = solved()
    weakest = free.weakest(2).uids.tolist()
    held, _, _ = solved(frozen=weakest)
    assert not set(held.weakest(10).uids.tolist()) & set(weakest)
    with pytest.raises(ValueError, match="10 features"):
        held.weakest(11)


def test_nodes_that_came_late_are_not_judged() -> None:
    readout, x, y = solved(late_nodes="leave out")
    net = readout.net
    with net.edit(reason="grow") as edit:
        grown = edit.add_nodes(1, 2)
        edit.connect(net.layers[0], grown)
        edit.connect(grown, net.layers[2])
    readout.update(x, y)
    late = net.layers[1].uids[-2:].tolist()
    assert not set(readout.weakest(12).uids.tolist()) & set(late)
    readout.late_nodes = "refuse"
    with pytest.raises(gn.errors.GrapNetError, match="2 nodes"):
        readout.weakest(1)
