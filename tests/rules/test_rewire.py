"""Rewire: what is dropped, what is grown, and that the number of relations stays what it was."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules import (
    Budget,
    Recorder,
    Rewire,
    RuleContext,
    RuleManager,
    rigl,
    set_rewiring,
)

from .own_rules import seen_evidence

RULES = {
    "SET": Rewire(),
    "RigL": Rewire(grow="gradient", decay_until=100),
    "SRigL": Rewire(grow="gradient", fan_in="constant"),
    "random constant": Rewire(fan_in="constant", weights="linear"),
}


def sparse_net(sizes: list[int], density: float = 0.3, seed: int = 0) -> gn.GrapNet:
    return gn.GrapNet(
        sizes, density=density, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def seen(net: gn.GrapNet, rule: Rewire) -> dict[str, Recorder]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(16, net.sizes[0], generator=draw, dtype=torch.float64)
    return seen_evidence(net, rule, x)


def rewire(
    net: gn.GrapNet,
    rule: Rewire,
    *,
    seed: int = 2,
    evidence: Mapping[str, Any] | None = None,
    **now: Any,
) -> gn.Commit | None:
    """Runs the rule in an edit of its own and returns the receipt."""
    evidence = seen(net, rule) if evidence is None else evidence
    with net.edit(reason="rewire", generator=torch.Generator().manual_seed(seed)) as edit:
        rule(net, edit, RuleContext(evidence=evidence, **now))
        assert edit.receipt is None
    return edit.receipt


def pairs(net: gn.GrapNet, t: int) -> set[tuple[int, int]]:
    relations = net.layers[t].outgoing()
    return set(zip(relations.parents.tolist(), relations.children.tolist(), strict=True))


def rectangle(net: gn.GrapNet, t: int, values: Tensor, elsewhere: float) -> Tensor:
    """Returns one value for each relation of a transition as [parents, children]."""
    topology = net.transitions[t].topology
    cells = torch.full((topology.n_parents, topology.n_children), elsewhere, dtype=torch.float64)
    cells[topology.parents().long(), topology.child.long()] = values.detach().double()
    return cells


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("density", [0.05, 0.3, 0.9, 0.99])
def test_every_transition_keeps_its_number_of_relations(rule: Rewire, density: float) -> None:
    net = sparse_net([20, 30, 10], density)
    before = [t.size for t in net.transitions]
    fan_in = [t.topology.fan_in() for t in net.transitions]
    for step in range(3):
        known = [pairs(net, t) for t in range(2)]
        receipt = rewire(net, rule, step=step, seed=step)
        assert [t.size for t in net.transitions] == before
        if rule.fan_in == "constant":
            assert all(map(torch.equal, fan_in, (t.topology.fan_in() for t in net.transitions)))
        for t, change in receipt.change.transitions.items() if receipt else ():
            born = set(
                zip(change.born.parents.tolist(), change.born.children.tolist(), strict=True)
            )
            assert born.isdisjoint(known[t])  # what was there, dropped or not, is not grown
            assert len(born) == len(change.gone) == len(known[t] - pairs(net, t))
    assert net.version == 3
    gn.check(net)


def test_the_weakest_go_and_random_absent_ones_come() -> None:
    net = sparse_net([20, 30, 10])
    strengths = [net.layers[t].outgoing().weights.detach().abs() for t in range(2)]
    receipt = rewire(net, Rewire(fraction=0.25))
    assert receipt is not None
    for t, strength in enumerate(strengths):
        gone = receipt.change.transitions[t].weights.gone_values.abs().sort().values
        assert torch.equal(gone.view(-1), strength.sort().values[: round(0.25 * len(strength))])
        born = receipt.change.transitions[t].weights.born_values
        assert len(born) == len(gone)
        assert not born.any()


def test_random_growth_takes_all_absent_pairs_alike() -> None:
    # 100 parents: the first 50 are related to every second child, the others to none. All that are
    # left are dropped but one of each child, since these are outputs, and as many are grown.
    parents = torch.arange(50).repeat_interleave(100)
    children = (torch.arange(100) * 2).repeat(50)
    net = gn.GrapNet.from_relations([100, 200], [(parents, children)])
    with net.edit() as edit:  # owners' lists out of order
        edit.cut(net.layers[0].outgoing()[torch.arange(0, 5000, 7)])
    receipt = rewire(net, Rewire(fraction=1.0))
    assert receipt is not None
    born = receipt.change.transitions[0].born
    grown = torch.zeros(100, 200)
    grown[born.parents.long(), born.children.long() - 100] = 1
    assert grown.sum() == len(born.parents) == len(receipt.change.transitions[0].gone) == 4185
    chance = 4185 / (100 * 200 - 4285)
    for region, absent in (
        (grown[:50], 50 * 200 - 4285),
        (grown[50:], 50 * 200),
        (grown[50:, 1::2], 5000),
    ):
        deviation = math.sqrt(absent * chance * (1 - chance))
        assert abs(float(region.sum()) - absent * chance) < 4 * deviation


def test_constant_fan_in_grows_parents_of_each_child_alike() -> None:
    # One child with 300 of 1,000 parents, all of them among the first 500.
    net = gn.GrapNet.from_relations(
        [1000, 2], [(torch.arange(300), torch.zeros(300, dtype=torch.int64))]
    )
    receipt = rewire(net, Rewire(fraction=1.0, fan_in="constant"))
    assert receipt is not None
    born = receipt.change.transitions[0].born
    assert len(set(born.parents.tolist())) == 300
    assert born.children.unique().tolist() == [1000]
    assert int(born.parents.min()) >= 300
    assert abs(int((born.parents < 650).sum()) - 150) < 4 * math.sqrt(300 * 0.25)


def test_a_rectangle_is_never_built_for_random_growth() -> None:
    net = sparse_net([200_000, 100_000], density=1e-6)  # 2·10^10 pairs, 20,000 relations
    for rule in (Rewire(), Rewire(fan_in="constant", fraction=1.0)):
        rewire(net, rule)
        assert net.count().relations == 20_000
    assert net.version == 2


def test_gradient_growth_takes_the_absent_pairs_with_the_largest_gradients() -> None:
    net = sparse_net([20, 30, 10])
    rule = Rewire(grow="gradient", fraction=0.2)
    evidence: Any = seen(net, rule)
    expected = []
    for t in range(2):
        gradients = evidence[f"gradients of transition {t}"].matrix().abs()
        gradients[rectangle(net, t, torch.ones(net.transitions[t].size), 0) > 0] = -1
        largest = gradients.flatten().topk(round(0.2 * net.transitions[t].size))
        expected.append(set(largest.indices.tolist()))
    receipt = rewire(net, rule, evidence=evidence)
    assert receipt is not None
    for t, change in receipt.change.transitions.items():
        rows = net.layers[t].rows(change.born.parents)
        columns = net.layers[t + 1].rows(change.born.children)
        assert set((rows * net.sizes[t + 1] + columns).tolist()) == expected[t]
    remark = receipt.operations[2]
    assert remark["operation"] == "remark"
    assert remark["smallest_grown_gradient"] > 0 < remark["largest_dropped_weight"]
    assert Rewire().recorders(net) == {}


@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_constant_fan_in_compares_the_relations_of_each_child(grow: Any) -> None:
    net = sparse_net([20, 30], 0.4)
    rule = Rewire(grow=grow, fan_in="constant", fraction=0.3)
    strength = rectangle(net, 0, net.layers[0].outgoing().weights.abs(), torch.inf)
    evidence: Any = seen(net, rule)
    fan_in = net.transitions[0].topology.fan_in()
    quotas = (fan_in.double() * 0.3).round().long()
    limits = strength.sort(dim=0).values[(quotas - 1).clamp(min=0), torch.arange(30)]
    weakest = (strength <= limits) & (quotas > 0)
    if grow == "gradient":
        gradients = evidence["gradients of transition 0"].matrix().abs()
        gradients[strength.isfinite()] = -1
        least = gradients.sort(dim=0, descending=True).values[
            (quotas - 1).clamp(min=0), torch.arange(30)
        ]
        best = (gradients >= least) & (quotas > 0)
    receipt = rewire(net, rule, evidence=evidence)
    assert receipt is not None
    for record, cells in (
        (receipt.change.transitions[0].gone, weakest),
        (receipt.change.transitions[0].born, None),
    ):
        found = torch.zeros(20, 30, dtype=torch.bool)
        found[record.parents.long(), record.children.long() - 20] = True
        assert torch.equal(found.sum(0), quotas)
        if cells is not None:
            assert torch.equal(found, cells)
        elif grow == "gradient":
            assert torch.equal(found, best)
    assert torch.equal(net.transitions[0].topology.fan_in(), fan_in)


def test_the_fraction_goes_down_along_a_cosine() -> None:
    rule = Rewire(fraction=0.4, decay_until=100)
    assert [round(rule.fraction_at(step), 6) for step in (0, 50, 100, 5000)] == [0.4, 0.2, 0.0, 0.0]
    assert rule.fraction_at(25) == pytest.approx(0.2 * (1 + math.cos(math.pi / 4)))
    assert Rewire(fraction=0.4).fraction_at(10**6) == 0.4
    net = sparse_net([20, 50], 0.2)
    receipts = [rewire(net, rule, step=step) for step in (0, 50, 99, 100, 101)]
    assert [r and len(r.change.transitions[0].gone) for r in receipts] == [80, 40, None, None, None]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_budget_of_edits_is_shared_out_and_kept_to_the_last_relation(rule: Rewire) -> None:
    net = sparse_net([20, 30, 10])
    sizes = [t.size for t in net.transitions]
    for edits in (0, 1, 7, 40):
        receipt = rewire(net, rule, budget=Budget(edits=edits))
        gone = [len(c.gone) for c in receipt.change.transitions.values()] if receipt else []
        assert sum(gone) == edits
        assert [t.size for t in net.transitions] == sizes
    assert len(gone) == 2  # both transitions


@pytest.mark.parametrize("fan_in", ["free", "constant"])
def test_what_the_edit_cuts_already_counts_for_those_floors_and_is_not_dropped_again(
    fan_in: Any,
) -> None:
    net = sparse_net([20, 30], 0.4)
    before = net.transitions[0].topology
    with net.edit(generator=torch.Generator().manual_seed(0)) as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=10))
        earlier = edit.cuts
        Rewire(fraction=0.9, fan_in=fan_in)(
            net, edit, RuleContext(budget=Budget(parents=4, children=5))
        )
        dropped = edit.cuts - earlier
        gone = edit.cuts
        assert len(dropped) == len(gone) - 10 == edit.n_connections > 0
        left = before.fan_in() - torch.bincount(net.layers[1].rows(gone.children), minlength=30)
        assert int(left[net.layers[1].rows(dropped.children).long()].min()) >= 4
        left = before.degrees - torch.bincount(net.layers[0].rows(gone.parents), minlength=20)
        assert int(left[net.layers[0].rows(dropped.parents).long()].min()) >= 5
    assert net.transitions[0].size == before.n_relations - 10


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_frozen_relations_are_never_dropped_and_do_not_count(rule: Rewire) -> None:
    net = sparse_net([20, 30])
    with net.edit() as edit:
        edit.freeze(net.layers[0].outgoing().smallest(count=100))
    held = net.layers[0].outgoing()
    held = held[held.frozen]
    known = set(zip(held.parents.tolist(), held.children.tolist(), strict=True))
    bits = held.weights.clone()
    receipt = rewire(net, rule)
    assert receipt is not None
    if rule.fan_in == "free":
        assert len(receipt.change.transitions[0].gone) == round(0.3 * 80)
    held = net.layers[0].outgoing()
    held = held[held.frozen]
    assert set(zip(held.parents.tolist(), held.children.tolist(), strict=True)) == known
    assert torch.equal(held.weights, bits)
    with net.edit() as edit:
        edit.freeze(net.layers[0].outgoing())
    assert rewire(net, rule, evidence=seen(net, rule) if rule.grow == "random" else {}) is None


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_full_transition_is_left_alone_and_one_gap_takes_one_relation(rule: Rewire) -> None:
    net = sparse_net([6, 5], density=1.0)
    assert rewire(net, rule) is None
    with net.edit() as edit:
        edit.cut(net.layers[0][2].outgoing(slots=3))
    receipt = rewire(net, rule)
    assert receipt is not None
    born = receipt.change.transitions[0].born
    assert (born.parents.tolist(), born.children.tolist()) == ([2], [9])
    assert net.count().relations == 29


def test_grown_relations_start_as_told() -> None:
    for weights in ("zero", "linear"):
        net = sparse_net([40, 30])
        receipt = rewire(net, Rewire(weights=weights))
        assert receipt is not None
        values = receipt.change.transitions[0].weights.born_values
        assert bool(values.any()) == (weights == "linear")
        assert float(values.abs().max()) < 1


def test_only_the_given_transitions_are_rewired() -> None:
    net = sparse_net([20, 30, 10])
    for given, expected in (((1,), [1]), (-2, [0]), ([1, -1], [1])):
        receipt = rewire(net, Rewire(transitions=given))  # pyright: ignore[reportArgumentType]
        assert receipt is not None
        assert list(receipt.change.transitions) == expected


def test_rules_with_schedules_rewire_until_the_end_that_is_said_once() -> None:
    steep = rigl(steps=100, every=10, fraction=0.5)
    assert [step for step in range(200) if steep.schedule.is_due(step, None)] == [
        *range(10, 80, 10)
    ]
    assert steep.rule.fraction_at(74) > 0 == steep.rule.fraction_at(75)
    net = sparse_net([20, 30, 10])
    manager = RuleManager()
    assert manager.add(set_rewiring(steps=30, every=10)) == "Rewire"
    manager.add(rigl(steps=30, every=10, fan_in="constant"), name="RigL")
    manager.start(net)
    for step in range(60):
        net(torch.randn(8, 20, dtype=net.transitions[0].weight.dtype)).square().sum().backward()
        manager.apply(net, step)
    assert [commit.by for commit in net.history] == ["Rewire, RigL", "Rewire, RigL", "Rewire"]
