"""CovarianceSifter: the paper's counts on its layouts, planted targets, families, budgets."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules import (
    Budget,
    CovarianceSifter,
    RuleContext,
)

from .own_rules import seen_evidence


def family_pairs(families: int, size: int, degree: int) -> tuple[Tensor, Tensor]:
    """Returns the rows of a transition in equal families with children of their own."""
    parents = torch.arange(families * size).repeat_interleave(degree)
    return parents, (parents // size) * degree + torch.arange(degree).repeat(families * size)


def full_pairs(n_parents: int, n_children: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n_parents).repeat_interleave(n_children), torch.arange(n_children).repeat(
        n_parents
    )


def tabular_net(inputs: int, width: int, outputs: int, families: int, seed: int = 0) -> gn.GrapNet:
    """Returns three hidden layers with families between them, full transitions at both ends."""
    hidden = family_pairs(families, width // families, width // families)
    wiring = [full_pairs(inputs, width), hidden, hidden, full_pairs(width, outputs)]
    generator = torch.Generator().manual_seed(seed)
    return gn.GrapNet.from_relations(
        [inputs, width, width, width, outputs], wiring, generator=generator
    )


def sift(
    net: gn.GrapNet,
    rule: CovarianceSifter,
    evidence: Mapping[str, Any],
    budget: Budget | None = None,
) -> None:
    with net.edit(reason="sift") as edit:
        rule(net, edit, RuleContext(budget=budget or Budget(), evidence=evidence))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("layout", "relations", "nodes"),
    [((30, 32, 2, 4), (1536, 352), (96, 32)), ((13, 18, 3, 3), (504, 162), (54, 18))],
    ids=["breast cancer", "wine"],
)
def test_the_papers_layouts_lose_the_papers_numbers(
    layout: tuple[int, int, int, int], relations: tuple[int, int], nodes: tuple[int, int], seed: int
) -> None:
    net = tabular_net(*layout, seed=seed)
    rule = CovarianceSifter()
    first = net.layers[0].outgoing()
    last = net.layers[3].outgoing()
    before = first.weights.clone(), len(last)
    assert (net.count().relations, sum(net.sizes[1:-1])) == (relations[0], nodes[0])
    sift(
        net,
        rule,
        seen_evidence(
            net, rule, torch.randn(50, layout[0], generator=torch.Generator().manual_seed(seed))
        ),
    )
    assert net.count().relations == relations[0] - relations[1]
    assert sum(net.sizes[1:-1]) == nodes[0] - nodes[1]
    size = layout[1] // layout[3]
    assert net.sizes == [layout[0], layout[1], layout[1] // 2, layout[1] // 2, layout[2]]
    # the first transition is as it was
    assert torch.equal(net.layers[0].outgoing().weights, before[0])
    # outputs lost removed nodes only
    assert net.layers[3].outgoing().children.bincount().max() == layout[1] // 2
    assert [f.block for f in net.execution.families(1)] == [(size, size // 2)] * layout[3]
    assert [f.block for f in net.execution.families(2)] == [(size // 2, size // 2)] * layout[3]
    cuts = [o for o in net.history[-1].operations if o["operation"] == "cut"]
    expected = [(t, layout[1] * size // 2) for t in (1, 2)]
    assert [(o["transition"], o["relations"]) for o in cuts] == expected
    remarks = [o for o in net.history[-1].operations if o["operation"] == "remark"]
    assert [(o["transition"], o["relations"]) for o in remarks] == expected
    assert all(0 <= o["mean_score"] <= o["largest_score"] <= 1 for o in remarks)
    gn.check(net)


@pytest.mark.parametrize("kind", ["constant", "independent"])
def test_targets_that_do_not_move_with_their_family_are_cut(kind: str) -> None:
    # Two families of 4 hidden nodes, each with 4 children of its own; all say positive things, so
    # that ReLU is linear. Every member says its family's signal. A planted target listens to what
    # no member says.
    generator = torch.Generator().manual_seed(1)
    net = tabular_net(4, 8, 2, 2)
    for layer in (1, 2, 3):
        net.layers[layer].biases = torch.tensor(10.0)
    for t, scale in ((0, 0.0), (1, 0.5), (2, 0.5)):
        net.layers[t].outgoing().weights = torch.tensor(scale)
    for family in range(2):
        net.layers[0][family].outgoing(
            to=net.layers[1][family * 4 : family * 4 + 4]
        ).weights = torch.tensor(1.0)
    planted = [net.layers[2][row].uid for row in (1, 2, 4, 7)]
    incoming = net.layers[2][[1, 2, 4, 7]].incoming()
    if kind == "constant":
        incoming.weights = torch.tensor(0.0)
    else:  # the sum over the members of a family cancels, their own noise does not
        incoming.weights = torch.tensor([1.0, -1.0, 1.0, -1.0]).repeat_interleave(2).repeat(2)
        net.layers[0][2].outgoing().weights = torch.tensor([0.01, -0.01]).repeat(4)
    rule = CovarianceSifter(transitions=(1,))
    evidence = seen_evidence(net, rule, torch.randn(500, 4, generator=generator))
    kept_uids = [node.uid for node in net.layers[2] if node.uid not in planted]
    sift(net, rule, evidence)
    assert net.layers[2].uid.tolist() == kept_uids
    assert net.sizes == [4, 8, 4, 8, 2]


def test_every_node_of_a_ragged_transition_is_a_family_of_one() -> None:
    # Three hidden nodes with 3, 2 and 1 children; a half, rounded down, is 1, 1 and 0 of them.
    wiring = [full_pairs(3, 3), ([0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 2]), full_pairs(3, 2)]
    net = gn.GrapNet.from_relations([3, 3, 3, 2], wiring, activation="identity")
    rule = CovarianceSifter()
    recorders = seen_evidence(net, rule, torch.randn(200, 3))
    scores = recorders["correlation of transition 1"].correlation().abs()  # pyright: ignore[reportAttributeAccessIssue]
    weakest = {(0, int(scores[0].argmin())), (1, int(scores[1, :2].argmin()))}
    pairs = {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 2)}
    first = net.layers[1].uid[0]
    second = net.layers[2].uid[0]
    sift(net, rule, recorders)
    left = net.layers[1].outgoing()
    assert (
        set(zip((left.parents - first).tolist(), (left.children - second).tolist(), strict=True))
        == pairs - weakest
    )


def test_targets_with_a_frozen_relation_stay_and_others_go_instead() -> None:
    net = tabular_net(6, 8, 2, 2)
    rule = CovarianceSifter(transitions=1)
    with net.edit() as edit:
        edit.freeze(net.layers[1][0].outgoing(slots=[0, 1]))
    held = net.layers[1][0].children[:2]
    uids = [node.uid for node in held]
    frozen = net.layers[1][0].W_alloc[0, :2].clone()
    sift(net, rule, seen_evidence(net, rule, torch.randn(40, 6)))
    assert net.sizes == [6, 8, 4, 8, 2]
    assert [node.uid for node in net.layers[1][0].children] == uids
    assert torch.equal(net.layers[1][0].W_alloc[0], frozen)
    assert [f.block for f in net.execution.families(1)] == [(4, 2), (4, 2)]


def test_budgets_spare_whole_targets() -> None:
    rule = CovarianceSifter()

    def sifted(budget: Budget) -> gn.GrapNet:
        net = tabular_net(6, 8, 2, 2, seed=4)
        evidence = seen_evidence(
            net, rule, torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
        )
        with net.edit() as edit:
            rule(net, edit, RuleContext(budget=budget, evidence=evidence))
            cuts.append(len(edit.cuts))
        return net

    cuts: list[int] = []
    for edits, expected in ((None, 32), (31, 28), (12, 12), (4, 4), (3, 0), (0, 0)):
        net = sifted(Budget(edits=edits))
        assert cuts[-1] == expected
        assert sum(net.sizes) == 32 - expected // 4
    assert net.version == 0  # nothing was cut, so nothing was committed
    # a target loses its only family, or none
    assert sifted(Budget(parents=1)).sizes == [6, 8, 8, 8, 2]
    assert cuts[-1] == 0
    net = sifted(Budget(children=3))
    assert [f.block for f in net.execution.families(1)] == [(4, 3), (4, 3)]
    assert cuts[-1] == 16


def test_a_child_of_several_families_keeps_the_parents_that_a_budget_wants() -> None:
    # All 6 hidden nodes have other children: families of one; every child has 5 parents.
    pairs = [(i, j) for i in range(6) for j in range(6) if i != j]
    wiring = [full_pairs(4, 6), tuple(zip(*pairs, strict=True)), full_pairs(6, 2)]
    net = gn.GrapNet.from_relations([4, 6, 6, 2], wiring)
    rule = CovarianceSifter(fraction=0.8)
    sift(net, rule, seen_evidence(net, rule, torch.randn(60, 4)), Budget(parents=3))
    fan_in = net.transitions[1].topology.fan_in()
    assert net.sizes == [4, 6, 6, 2]
    assert int(fan_in.min()) == 3
    assert int(net.transitions[1].topology.degrees.min()) >= 1


def test_a_given_transition_and_what_it_orphans_further_down() -> None:
    # 0 → 1 is full; hidden nodes 2 and 3 have parent 0 alone and one child each.
    wiring = [full_pairs(2, 1), ([0, 0], [0, 1]), ([0, 1], [0, 1]), full_pairs(2, 1)]
    net = gn.GrapNet.from_relations([2, 1, 2, 2, 1], wiring, activation="identity")
    rule = CovarianceSifter(transitions=(-3,), fraction=0.5)
    sift(net, rule, seen_evidence(net, rule, torch.randn(20, 2)))
    assert net.sizes == [2, 1, 1, 1, 1]
    gn.check(net)


def test_nodes_without_children_and_empty_transitions_have_nothing_to_cut() -> None:
    for wiring in (([], []), ([1, 1, 1, 1], [0, 1, 2, 3])):
        net = gn.GrapNet.from_relations([2, 3, 4, 1], [full_pairs(2, 3), wiring, full_pairs(4, 1)])
        rule = CovarianceSifter()
        sift(net, rule, seen_evidence(net, rule, torch.randn(20, 2)))
        assert net.sizes == [2, 3, 2 if wiring[0] else 4, 1]
        assert net.layers[1][1].degree == (2 if wiring[0] else 0)
    shallow = gn.GrapNet([3, 4, 2])
    assert rule.recorders(shallow) == {}
    sift(shallow, rule, {})
    assert shallow.version == 0


def planted_net() -> gn.GrapNet:
    """Returns two transitions between hidden layers, in two families each, whose weights grow from
    family to family: 1 to 8 for the children of the first, and 4.5 to 36 for those of the second.
    """
    net = tabular_net(6, 8, 2, 2)
    for t, scale in ((1, 1.0), (2, 4.5)):
        relations = net.layers[t].outgoing()
        rows = net.layers[t + 1].rows(relations.children)
        relations.weights = scale * (rows + 1.0)
    return net


@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        ({}, [[0, 1, 4, 5], [0, 1, 4, 5]]),
        ({"scope": "transition"}, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        ({"scope": "model", "compare": "score"}, [[0, 1, 2, 3, 4, 5, 6], [0]]),
        # Divided by their means, both transitions have the same scores.
        ({"scope": "model", "compare": "mean"}, [[0, 1, 2, 3], [0, 1, 2, 3]]),
    ],
)
def test_a_scope_says_which_children_are_ranked_together(
    settings: dict[str, Any], cut: list[list[int]]
) -> None:
    net = planted_net()
    rule = CovarianceSifter(by="magnitude", **settings)
    with net.edit() as edit:
        rule(net, edit, RuleContext())
        gone = edit.cuts
        found = []
        for layer in (2, 3):
            uids = net.layers[layer].uid
            found.append(torch.isin(uids, gone.children).nonzero().view(-1).tolist())
        assert len(gone) == 4 * sum(map(len, cut))
        assert found == cut


def test_each_child_loses_the_same_share_of_its_families() -> None:
    # Three families of one node, one of which leads to the first two children alone.
    wiring = [
        full_pairs(4, 3),
        ([0, 0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 0, 2]),
        full_pairs(3, 2),
    ]
    net = gn.GrapNet.from_relations([4, 3, 3, 2], wiring)
    relations = net.layers[1].outgoing()
    relations.weights = torch.tensor([1.0, 9.0, 5.0, 2.0, 3.0, 4.0, 6.0])
    with net.edit() as edit:
        CovarianceSifter(by="magnitude", scope="child")(net, edit, RuleContext())
        # the weakest of the three families of child 0, and of the two of the others
        cut = edit.cuts
        assert net.layers[1].rows(cut.parents).tolist() == [0, 0, 1]
        assert net.layers[2].rows(cut.children).tolist() == [0, 2, 1]


@pytest.mark.parametrize("scope", ["child", "owner", "transition", "model"])
@pytest.mark.parametrize("keep", [21, 0.36])
def test_a_sifter_keeps_relations_of_each_transition(scope: Any, keep: float) -> None:
    net = planted_net()
    rule = CovarianceSifter(fraction=1.0, by="magnitude", scope=scope, keep=keep)
    with net.edit() as edit:
        rule(net, edit, RuleContext())
        # of 32 relations two whole targets of four leave
        cut = [len(edit.cuts & net.layers[t].outgoing()) for t in (1, 2)]
    assert cut == [8, 8]


def test_budgets_hold_in_every_scope() -> None:
    for scope in ("owner", "transition", "model"):
        counts = []
        for budget in (Budget(children=2), Budget(edits=9), Budget(parents=1)):
            net = planted_net()
            rule = CovarianceSifter(fraction=0.9, by="magnitude", scope=scope)
            with net.edit() as edit:
                rule(net, edit, RuleContext(budget=budget))
                left = net.select(layer=(1, 2)).outgoing() - edit.cuts
                counts.append(len(edit.cuts))
                if budget.children:
                    owned = left.parents.unique(return_counts=True)[1]
                    assert owned.tolist() == [2] * 16
        # a target loses its only family, or none
        assert counts == [32, 8, 0]


def test_frozen_targets_stay_in_every_scope() -> None:
    for scope in ("owner", "transition", "model"):
        net = planted_net()
        with net.edit() as edit:
            edit.freeze(net.layers[1][0].outgoing(slots=0))
        first = net.layers[2].uid[0]
        with net.edit() as edit:
            CovarianceSifter(by="magnitude", scope=scope)(net, edit, RuleContext())
            assert len(edit.cuts) == 32
            assert int(first) not in edit.cuts.children.tolist()
