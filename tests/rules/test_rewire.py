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
    lamp_scores,
    rigl,
    set_rewiring,
)

from .own_rules import seen_evidence

RULES = {
    "SET": Rewire(),
    "RigL": Rewire(grow="gradient", decay_until=100),
    "SRigL": Rewire(grow="gradient", scope="child"),
    "random constant": Rewire(scope="child", weights="linear"),
    "by owner": Rewire(scope="owner"),
    "RigL by owner": Rewire(grow="gradient", scope="owner"),
    "model": Rewire(scope="model"),
    "RigL of the model": Rewire(grow="gradient", scope="model"),
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
    degrees = [t.topology.degrees.clone() for t in net.transitions]
    for step in range(3):
        known = [pairs(net, t) for t in range(2)]
        receipt = rewire(net, rule, step=step, seed=step)
        after = [t.size for t in net.transitions]
        assert sum(after) == sum(before)
        if rule.scope != "model":
            assert after == before
        if rule.scope == "child":
            assert all(map(torch.equal, fan_in, (t.topology.fan_in() for t in net.transitions)))
        if rule.scope == "owner":
            assert all(map(torch.equal, degrees, (t.topology.degrees for t in net.transitions)))
        for t, change in receipt.change.transitions.items() if receipt else ():
            born = set(
                zip(change.born.parents.tolist(), change.born.children.tolist(), strict=True)
            )
            assert born.isdisjoint(known[t])  # what was there, dropped or not, is not grown
            assert len(change.gone) == len(known[t] - pairs(net, t))
            if rule.scope != "model":
                assert len(born) == len(change.gone)
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
    receipt = rewire(net, Rewire(fraction=1.0, scope="child"))
    assert receipt is not None
    born = receipt.change.transitions[0].born
    assert len(set(born.parents.tolist())) == 300
    assert born.children.unique().tolist() == [1000]
    assert int(born.parents.min()) >= 300
    assert abs(int((born.parents < 650).sum()) - 150) < 4 * math.sqrt(300 * 0.25)


def test_a_rectangle_is_never_built_for_random_growth() -> None:
    net = sparse_net([200_000, 100_000], density=1e-6)  # 2·10^10 pairs, 20,000 relations
    for rule in (Rewire(), Rewire(scope="child", fraction=1.0)):
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
    rule = Rewire(grow=grow, scope="child", fraction=0.3)
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


@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_owners_drop_their_weakest_and_grow_as_many_of_their_own(grow: Any) -> None:
    net = sparse_net([20, 30], 0.4)
    rule = Rewire(grow=grow, scope="owner", fraction=0.3)
    evidence: Any = seen(net, rule)
    degrees = net.transitions[0].topology.degrees.long()
    quotas = (degrees.double() * 0.3).round().long()
    expected: set[tuple[int, int]] = set()
    for node, quota in zip(net.layers[0], quotas.tolist(), strict=True):
        own = node.outgoing().smallest(count=quota)
        expected |= set(zip(own.parents.tolist(), own.children.tolist(), strict=True))
    before = pairs(net, 0)
    receipt = rewire(net, rule, evidence=evidence)
    assert receipt is not None
    gone = receipt.change.transitions[0].gone
    assert set(zip(gone.parents.tolist(), gone.children.tolist(), strict=True)) == expected
    assert torch.equal(net.transitions[0].topology.degrees.long(), degrees)
    if grow == "gradient":
        gradients = evidence["gradients of transition 0"].matrix().abs()
        for row, quota in enumerate(quotas.tolist()):
            absent = [child for child in range(30) if (row, 20 + child) not in before]
            absent.sort(key=lambda child: -float(gradients[row, child]))
            born = {child - 20 for parent, child in pairs(net, 0) - before if parent == row}
            assert born == set(absent[:quota])


def test_an_owner_does_not_take_the_last_parent_of_an_output() -> None:
    # Each output has one parent, which owns another relation that is stronger.
    net = gn.GrapNet.from_relations([2, 3, 2], [([0, 1], [0, 1]), ([0, 0, 1], [0, 1, 0])])
    net.layers[1].outgoing().weights = torch.tensor([3.0, 1.0, 2.0])
    rewire(net, Rewire(transitions=1, scope="owner", fraction=0.5))
    assert (2, 6) in pairs(net, 1)


def uneven_net() -> gn.GrapNet:
    """Returns a net whose first transition has small weights, and whose second has large ones."""
    net = sparse_net([6, 8, 5], 0.5)
    for t, scale in ((0, 0.01), (1, 10.0)):
        relations = net.layers[t].outgoing()
        relations.weights = scale * torch.linspace(1, 2, len(relations), dtype=torch.float64)
    return net


def test_the_scope_model_ranks_all_weights_together() -> None:
    def dropped(rule: Rewire) -> list[int]:
        net = uneven_net()
        assert [t.size for t in net.transitions] == [24, 20]
        receipt = rewire(net, rule)
        assert receipt is not None
        assert net.count().relations == 44
        changes = receipt.change.transitions
        return [len(changes[t].gone) if t in changes else 0 for t in (0, 1)]

    # 11 of 44; as they are, all of the smallest are in the first transition
    assert dropped(Rewire(fraction=0.25, scope="model", compare="score")) == [11, 0]
    assert dropped(Rewire(fraction=0.25, scope="transition")) == [6, 5]
    relations = uneven_net().select().outgoing()
    weak = relations.smallest(fraction=0.25, key=lamp_scores(relations))
    in_first = int((weak.parents < 6).sum())
    assert 0 < in_first < 11
    assert dropped(Rewire(fraction=0.25, scope="model")) == [in_first, 11 - in_first]


def test_the_scope_model_grows_the_largest_gradients_of_all_transitions() -> None:
    net = uneven_net()
    rule = Rewire(grow="gradient", fraction=0.25, scope="model")
    evidence: Any = seen(net, rule)
    before = [pairs(net, t) for t in range(2)]
    ranked = []
    for t, first, second in ((0, 0, 6), (1, 6, 14)):
        gradients = evidence[f"gradients of transition {t}"].matrix().abs()
        for parent, row in enumerate(gradients.tolist()):
            for child, size in enumerate(row):
                if (parent + first, child + second) not in before[t]:
                    ranked.append((size, t, parent + first, child + second))
    ranked.sort(reverse=True)
    expected = {entry[1:] for entry in ranked[:11]}
    rewire(net, rule, evidence=evidence)
    grown = {(t, *pair) for t in range(2) for pair in pairs(net, t) - before[t]}
    assert grown == expected
    # Transitions trade relations, which the scope "transition" never does.
    assert [t.size for t in net.transitions] != [24, 20]


def test_the_scope_model_grows_all_absent_pairs_alike() -> None:
    # 5,000 and 500 absent pairs: a tenth of what is grown belongs to the smaller transition.
    counts = torch.zeros(2)
    for seed in range(20):
        net = gn.GrapNet([100, 100, 10], density=0.5, generator=torch.Generator().manual_seed(seed))
        receipt = rewire(net, Rewire(scope="model", fraction=0.1), seed=seed)
        assert receipt is not None
        for t, change in receipt.change.transitions.items():
            counts[t] += len(change.born)
    assert int(counts.sum()) == 20 * 550
    chance = 1 / 11
    deviation = math.sqrt(20 * 550 * chance * (1 - chance))
    assert abs(float(counts[1]) - 1000) < 4 * deviation


def test_every_transition_keeps_what_keep_asks_for() -> None:
    for keep, left in ((0, 1), (10, 10), (0.25, 12)):
        net = uneven_net()
        rule = Rewire(fraction=0.6, scope="model", compare="score", keep=keep)
        receipt = rewire(net, rule)
        assert receipt is not None
        assert 24 - len(receipt.change.transitions[0].gone) == left
        assert net.count().relations == 44


def test_full_transitions_do_not_take_part_in_the_scope_model() -> None:
    net = gn.GrapNet([6, 8, 8, 5], dtype=torch.float64)
    with net.edit() as edit:
        edit.cut(net.layers[1].outgoing().smallest(count=20))
    receipt = rewire(net, Rewire(fraction=0.9, scope="model", compare="score"))
    assert receipt is not None
    assert list(receipt.change.transitions) == [1]
    assert [t.size for t in net.transitions] == [48, 44, 40]


def test_outputs_of_all_transitions_keep_their_last_parent() -> None:
    net = gn.GrapNet([6, 5, 4], density=0.7, dtype=torch.float64, skips=[(0, 2)])
    for scope in ("transition", "owner", "model"):
        for seed in range(5):
            with net.edit(generator=torch.Generator().manual_seed(seed), trial=True) as edit:
                Rewire(fraction=1.0, scope=scope, compare="score")(net, edit, RuleContext())
                stays = net.layers[2].incoming() - edit.cuts
                assert set(stays.children.tolist()) == set(net.layers[2].uid.tolist())


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
        assert net.count().relations == sum(sizes)
    assert len(gone) == 2  # both transitions


@pytest.mark.parametrize("scope", ["transition", "child", "owner", "model"])
def test_what_the_edit_cuts_already_counts_for_those_floors_and_is_not_dropped_again(
    scope: Any,
) -> None:
    net = sparse_net([20, 30], 0.4)
    before = net.transitions[0].topology
    with net.edit(generator=torch.Generator().manual_seed(0)) as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=10))
        earlier = edit.cuts
        Rewire(fraction=0.9, scope=scope)(
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
    if rule.scope in ("transition", "model"):
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
    manager.add(rigl(steps=30, every=10, scope="child"), name="RigL")
    manager.start(net)
    for step in range(60):
        net(torch.randn(8, 20, dtype=net.transitions[0].weight.dtype)).square().sum().backward()
        manager.apply(net, step)
    assert [commit.by for commit in net.history] == ["Rewire, RigL", "Rewire, RigL", "Rewire"]


def test_a_net_without_transitions_to_rewire_does_not_change() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    model.requires_grad_(False)
    net = gn.adopt(model, torch.randn(2, 4))
    for rule in (Rewire(scope="model"), Rewire(scope="model", tile=16)):
        with net.edit() as edit:
            rule(net, edit, RuleContext())
    assert net.version == 0
