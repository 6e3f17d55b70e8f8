"""Budgets: what may be cut and connected, and what a node keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.execution import _native
from grapnet.rules import Budget, weakest_within
from grapnet.rules._budget import enforce, largest_of_each


def ragged(seed: int = 0) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(seed)
    net = gn.GrapNet([20, 16, 12], density=0.4, generator=generator)
    # node 0 of layer 1 has a single parent, and the last sensory node no child
    with net.edit() as edit:
        edit.cut(net.layers[1][0].incoming()[1:])
        edit.cut(net.layers[0][19].outgoing())
    return net


def degrees(net: gn.GrapNet, gone: gn.RelationSet) -> list[Tensor]:
    """Returns how many parents and children every node has, by uid, once `gone` is cut."""
    left = net.select().outgoing() - gone
    return [torch.bincount(ends, minlength=net._next_uid) for ends in (left.children, left.parents)]


def keeps_within(net: gn.GrapNet, gone: gn.RelationSet, budget: Budget) -> bool:
    for end, least in enumerate((budget.parents, budget.children)):
        before = degrees(net, gone[:0])[end]
        if not bool((degrees(net, gone)[end] >= before.clamp(max=least)).all()):
            return False
    return True


def test_a_key_that_is_no_number_is_refused() -> None:
    net = gn.GrapNet([4, 3])
    relations = net.layers[0].outgoing()
    for budget in (Budget(), Budget(parents=1)):
        with pytest.raises(ValueError, match="NaN"):
            weakest_within(net, relations, 1, budget, torch.full((12,), float("nan")))
    assert len(weakest_within(net, relations[:0], 5, Budget(parents=1))) == 0
    assert len(weakest_within(net, relations, 5, Budget(parents=1), relations.weights > 0)) == 5


@pytest.mark.parametrize("kernels", [True, False])
def test_the_largest_of_each_are_what_sorting_every_node_gives(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(_native, "missing", "the compiled kernels are not installed")
    draw = torch.Generator().manual_seed(0)
    for _ in range(300):
        nodes = torch.randint(0, 6, (30,), generator=draw)
        keys = torch.randint(0, 9, (30,), generator=draw).float()  # many equals
        quota = torch.randint(0, 9, (6,), generator=draw)
        expected = torch.zeros(30, dtype=torch.bool)
        for node in range(6):
            at = (nodes == node).nonzero().view(-1)
            order = keys[at].argsort(descending=True, stable=True)
            expected[at[order[: quota[node]]]] = True
        assert torch.equal(largest_of_each(keys, nodes, quota), expected)


def test_the_tighter_of_two_budgets() -> None:
    assert Budget(edits=5, parents=2).tightened(Budget(edits=9, children=1)) == Budget(5, 2, 1)
    assert Budget().tightened(Budget(edits=0)) == Budget(edits=0)
    assert Budget(edits=3).tightened(None) == Budget(edits=3)


def test_without_minima_the_weakest_are_the_smallest() -> None:
    net = ragged()
    relations = net.select().outgoing()
    for count in (0, 1, 17, 10**6):
        found = weakest_within(net, relations, count, Budget())
        expected = relations.smallest(count=count)
        assert len(found - expected) == len(expected - found) == 0
    assert len(weakest_within(net, relations, 17, Budget(edits=5))) == 5
    score = torch.rand(len(relations))
    found = weakest_within(net, relations, 9, Budget(), score)
    assert len(found - relations.smallest(count=9, key=score)) == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "budget",
    [Budget(parents=1), Budget(children=3), Budget(parents=2, children=2), Budget(5, 4, 4)],
)
@pytest.mark.parametrize("count", [10, 60, 10**6])
def test_every_node_keeps_its_minimum(seed: int, budget: Budget, count: int) -> None:
    net = ragged(seed)
    relations = net.select().outgoing()
    found = weakest_within(net, relations, count, budget)
    assert keeps_within(net, found, budget)
    assert len(found) <= min(count, len(relations) if budget.edits is None else budget.edits)
    if count > len(relations):
        assert not keeps_within(net, relations.smallest(count=count), budget)  # it did matter
    part = relations[::2]
    assert len(weakest_within(net, part, count, budget) - part) == 0
    assert keeps_within(net, weakest_within(net, part, count, budget), budget)


@pytest.mark.parametrize("count", [1, 30, 60, 90, 10**6])
@pytest.mark.parametrize("end", ["parents", "children"])
def test_with_one_minimum_it_is_greedy_from_the_weakest(count: int, end: str) -> None:
    net = ragged(1)
    relations = net.select().outgoing()
    nodes = (relations.children if end == "parents" else relations.parents).tolist()
    left = {uid: max(nodes.count(uid) - 2, 0) for uid in nodes}
    expected: list[int] = []
    for place in relations.weights.detach().abs().argsort().tolist():
        if left[nodes[place]] > 0 and len(expected) < count:
            left[nodes[place]] -= 1
            expected.append(place)
    found = weakest_within(net, relations, count, Budget(**{end: 2}))
    assert sorted(found.weights.tolist()) == sorted(relations.weights[expected].tolist())


def test_frozen_relations_stay() -> None:
    net = gn.GrapNet([4, 3])
    with net.edit() as edit:
        edit.freeze(net.layers[0].outgoing().smallest(count=5))
    relations = net.layers[0].outgoing()
    assert not bool(weakest_within(net, relations, 99, Budget()).frozen.any())
    assert len(weakest_within(net, relations, 99, Budget())) == 7
    chosen = weakest_within(net, relations, 99, Budget(parents=1), relations.weights.detach())
    assert not bool(chosen.frozen.any())
    assert keeps_within(net, chosen, Budget(parents=1))


def enforced(
    net: gn.GrapNet, asked: gn.RelationSet, budget: Budget, **given: Any
) -> gn.RelationSet:
    with net.edit(trial=True) as edit:
        edit.cut(asked)
        limits = {"settled": net.select().outgoing()[:0], "cuts": budget.edits, **given}
        enforce(net, edit, budget, connections=None, **limits)
        return edit.cuts


def test_cuts_beyond_the_budget_are_taken_back_strongest_first() -> None:
    net = ragged()
    asked = net.select().outgoing()[::3]
    found = enforced(net, asked, Budget(edits=7))
    assert sorted(found.weights.tolist()) == sorted(asked.smallest(count=7).weights.tolist())
    assert len(enforced(net, asked, Budget(edits=0))) == 0
    assert len(enforced(net, asked, Budget(edits=len(asked)))) == len(asked)
    assert len(enforced(net, asked, Budget())) == len(asked)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "budget",
    [Budget(parents=1), Budget(children=3), Budget(parents=2, children=2), Budget(9, 2, 2)],
)
def test_cuts_that_leave_a_node_too_little_are_taken_back(seed: int, budget: Budget) -> None:
    net = ragged(seed)
    everything = net.select().outgoing()
    found = enforced(net, everything, budget)
    assert keeps_within(net, found, budget)
    assert not keeps_within(net, everything, budget)
    assert len(found) > 0
    parents = degrees(net, found)[0][net.layers[2].uids]
    if budget == Budget(parents=1):
        assert parents.tolist() == [1] * 12  # no more than necessary, and the strongest one
        for node in net.layers[2]:
            kept = node.incoming() - found
            assert kept.weights.abs().item() == node.incoming().weights.abs().max().item()


def test_settled_cuts_stand_and_are_not_counted() -> None:
    net = gn.GrapNet([4, 3])
    relations = net.layers[0].outgoing()
    first = relations.largest(count=4)
    then = relations.smallest(count=6)
    found = enforced(net, first | then, Budget(edits=3), settled=first)
    assert len(first - found) == 0
    assert torch.equal((found - first).weights, then.smallest(count=3).weights)
    child = net.layers[1][0].incoming()
    found = enforced(net, child, Budget(parents=1), settled=child[:3])
    assert len(found) == 3
    assert len(child[:3] - found) == 0
