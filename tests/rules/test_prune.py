"""PruneWeakest and GradualSchedule: exact counts, the right relations, and what is never cut."""

from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.rules import (
    Budget,
    Every,
    GradualSchedule,
    PruneWeakest,
    RuleContext,
    RuleManager,
    gradual_pruning,
    lamp_scores,
)


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([12, 20, 10, 4])  # 240 + 200 + 40 relations


def prune(net: gn.GrapNet, rule: PruneWeakest, *, allow_dead: bool = False, **given: Any) -> None:
    with net.edit(allow_dead=allow_dead) as edit:
        rule(net, edit, RuleContext(**given))
    gn.check(net)


def relations(net: gn.GrapNet) -> list[int]:
    return [transition.size for transition in net.transitions]


def test_a_fraction_of_the_present_relations_goes_at_every_call(net: gn.GrapNet) -> None:
    everything = net.select().outgoing()
    bound = everything.weights.abs().sort().values[119].item()
    for left in (360, 270):
        prune(net, PruneWeakest(fraction=0.25, compare="score"))
        assert sum(relations(net)) == left
        if left == 360:
            assert net.select().outgoing().weights.abs().min() > bound
    assert len(set(relations(net))) == 3


def test_sparsity_is_the_share_of_absent_relations_and_nothing_grows(net: gn.GrapNet) -> None:
    prune(net, PruneWeakest(sparsity=0.9))
    assert sum(relations(net)) == 48
    version = net.version
    for sparsity in (0.9, 0.5, 0.0):
        prune(net, PruneWeakest(sparsity=sparsity))
    assert (net.version, sum(relations(net))) == (version, 48)
    with pytest.raises(gn.errors.EditError):
        prune(net, PruneWeakest(sparsity=1.0))
    assert sum(relations(net)) == 48
    prune(net, PruneWeakest(sparsity=1.0), allow_dead=True)
    assert sum(relations(net)) == 0


def literal_lamp(weights: list[float]) -> list[float]:
    """Returns w² divided by the sum of w² over what is not smaller; of equals, the later ones."""
    ranked = sorted(range(len(weights)), key=lambda n: abs(weights[n]))
    scores = [0.0] * len(weights)
    for place, n in enumerate(ranked):
        scores[n] = weights[n] ** 2 / sum(weights[m] ** 2 for m in ranked[place:])
    return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lamp_scores_are_those_of_its_definition(net: gn.GrapNet, dtype: torch.dtype) -> None:
    net = net.to(dtype)
    with torch.no_grad():
        net.transitions[1].weight[:5] = 0.2
        net.transitions[1].weight[5:9] = 0.0
    expected = []
    for transition in net.transitions:
        expected += literal_lamp(transition.weight.detach().double().flatten().tolist())
    found = lamp_scores(net.select().outgoing())
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert lamp_scores(net.select().outgoing().smallest(count=0)).shape == (0,)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e3, 1e18])
def test_the_scale_of_a_transition_does_not_count(net: gn.GrapNet, scale: float) -> None:
    everything = net.select().outgoing()
    before = lamp_scores(everything)
    with torch.no_grad():
        net.transitions[0].weight *= scale
        net.transitions[2].weight /= scale
    assert torch.allclose(lamp_scores(everything), before, rtol=1e-5, atol=0)
    with torch.no_grad():
        net.transitions[1].weight.zero_()
    prune(net, PruneWeakest(fraction=474 / 480))
    assert relations(net) == [1, 1, 4]  # no transition is emptied before the others


@pytest.mark.parametrize("sizes", [[64, 128, 10], [784, 512, 512, 10]], ids=str)
@pytest.mark.parametrize("fraction", [0.9, 0.95, 0.99])
def test_outputs_of_a_fresh_net_keep_parents(sizes: list[int], fraction: float) -> None:
    torch.manual_seed(1)
    net = gn.GrapNet(sizes)
    before = net.count().relations
    prune(net, PruneWeakest(fraction=fraction))
    assert net.count().relations == before - round(fraction * before)
    assert net.transitions[-1].topology.fan_in().min() > 0
    # 95 relations are too few for every output of the small net to reach the input.
    if before * (1 - fraction) > 100:
        with torch.no_grad():
            assert bool((net(torch.randn(64, sizes[0])).std(dim=0) > 0).all())


@pytest.mark.parametrize("scope", ["model", "transition"])
@pytest.mark.parametrize("equal", [False, True], ids=["drawn", "equal"])
def test_the_strongest_parent_of_each_output_goes_last(equal: bool, scope: Any) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([6, 20])
    if equal:
        net.layers[0].outgoing().weights = 0.5
    weights = net.transitions[0].weight.detach().view(6, 20).abs()
    prune(net, PruneWeakest(fraction=100 / 120, scope=scope))
    assert net.transitions[0].topology.fan_in().tolist() == [1] * 20
    left = net.layers[0].outgoing()
    by_output = left.weights.detach().abs()[left.children.argsort()]
    assert torch.equal(by_output, weights.max(dim=0).values)
    with pytest.raises(gn.errors.EditError):
        prune(net, PruneWeakest(fraction=0.1, scope=scope))


def test_magnitudes_of_different_scales_empty_a_transition() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([64, 128, 10])
    with pytest.raises(gn.errors.EditError):
        prune(net, PruneWeakest(fraction=0.9, compare="score"))
    assert net.version == 0
    prune(net, PruneWeakest(fraction=0.9, compare="score", scope="transition"))
    assert relations(net) == [819, 128]


@pytest.mark.parametrize(
    ("share", "left"), [({"fraction": 0.5}, [120, 100, 20]), ({"sparsity": 0.9}, [24, 20, 4])]
)
def test_every_transition_can_have_its_own_share(
    net: gn.GrapNet, share: dict[str, Any], left: list[int]
) -> None:
    weakest = net.layers[1].outgoing().weights.abs().sort().values
    prune(net, PruneWeakest(**share, scope="transition"))
    assert relations(net) == left
    assert net.layers[1].outgoing().weights.abs().min() == weakest[200 - left[1]]


@pytest.mark.parametrize(
    ("share", "left"), [({"fraction": 0.3}, [14, 7, 3]), ({"sparsity": 0.75}, [5, 2, 1])]
)
def test_every_node_can_have_its_own_share(
    net: gn.GrapNet, share: dict[str, Any], left: list[int]
) -> None:
    expected = {
        n.uid: n.W_alloc.detach().abs().sort(descending=True).values
        for n in net.select(layer=[0, 1, 2])
    }
    prune(net, PruneWeakest(**share, scope="owner"))
    for number, degree in enumerate(left):
        for node in net.layers[number]:
            assert torch.equal(
                node.W_alloc.abs().sort(descending=True).values, expected[node.uid][:, :degree]
            )


def test_only_the_chosen_transitions_are_touched(net: gn.GrapNet) -> None:
    prune(net, PruneWeakest(sparsity=0.5, transitions=[0, -1]))
    assert relations(net)[1] == 200
    assert relations(net)[0] + relations(net)[2] == 140
    prune(net, PruneWeakest(fraction=0.5, transitions=1))
    assert relations(net)[1] == 100


@pytest.mark.parametrize("scope", ["model", "transition", "owner", "child"])
def test_frozen_relations_are_never_cut(net: gn.GrapNet, scope: Any) -> None:
    with net.edit() as edit:
        edit.freeze(net.select().outgoing().smallest(fraction=0.4))
    frozen = [
        net.layers[n].outgoing()[net.layers[n].outgoing().frozen].weights.clone() for n in range(3)
    ]
    cut = 120
    if scope in ("owner", "child"):
        cut = 0
        for node in net.select():
            own = node.outgoing() if scope == "owner" else node.incoming()
            cut += min(round(0.25 * len(own)), int((~own.frozen).sum()))
    prune(net, PruneWeakest(fraction=0.25, scope=scope))
    assert sum(relations(net)) == 480 - cut
    prune(net, PruneWeakest(sparsity=1.0, scope=scope))
    after = [net.layers[n].outgoing().weights for n in range(3)]
    assert all(map(torch.equal, after, frozen))
    assert net.count().frozen == sum(relations(net)) == 192


@pytest.mark.parametrize("scope", ["model", "transition", "owner", "child"])
def test_budgets_hold(net: gn.GrapNet, scope: Any) -> None:
    rule = PruneWeakest(sparsity=0.95, scope=scope)
    prune(net, rule, budget=Budget(edits=7))
    assert sum(relations(net)) == 480 - 7
    prune(net, rule, budget=Budget(parents=2, children=1))
    for transition in net.transitions:
        assert transition.topology.fan_in().min() >= 2
        assert transition.topology.degrees.min() >= 1
    assert sum(relations(net)) < 150
    net.undo()
    prune(net, rule, allow_dead=True)
    # it does not hold by itself
    assert any(int(t.topology.fan_in().min()) < 2 for t in net.transitions)


def test_the_ramp_is_zhu_and_guptas() -> None:
    ramp = GradualSchedule(final=0.8, begin=10, end=30, initial=0.2)
    for step in range(10, 31):
        expected = 0.8 + (0.2 - 0.8) * (1 - (step - 10) / 20) ** 3
        assert ramp.sparsity(step) == pytest.approx(expected, abs=1e-15)
    assert (ramp.sparsity(9), ramp.sparsity(30), ramp.sparsity(10**9)) == (0.0, 0.8, 0.8)


@pytest.mark.parametrize("scope", ["model", "transition", "owner", "child"])
def test_a_run_under_the_ramp_ends_at_the_final_sparsity(scope: Any) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([30, 50, 10])
    manager = RuleManager()
    ramp = GradualSchedule(final=0.9, begin=4, end=40)
    manager.add(PruneWeakest(sparsity=ramp, scope=scope), schedule=Every(4))
    left = []
    for step in range(49):
        manager.apply(net, step)
        left.append(net.count().relations)
        if scope in ("model", "transition") and step % 4 == 0:
            assert abs(left[-1] - 2000 * (1 - ramp.sparsity(step))) <= (
                1 if scope == "model" else 2
            )
    assert left[:8] == [2000] * 8  # up to step 4 the ramp asks for nothing, and 8 is the next
    assert left == sorted(left, reverse=True)
    assert left[40:] == [200] * 9
    # a node of few relations has fewer to lose
    assert len(net.history) == (7 if scope in ("owner", "child") else 9)


@pytest.mark.parametrize(("steps", "every", "start"), [(40, 4, 0), (41, 7, 3)])
def test_gradual_pruning_reaches_its_sparsity_in_the_steps_it_is_given(
    net: gn.GrapNet, steps: int, every: int, start: int
) -> None:
    manager = RuleManager()
    manager.add(gradual_pruning(steps, 0.8, every=every, start=start))
    counts = []
    for step in range(steps):
        manager.apply(net, step)
        counts.append(net.count().relations)
    assert counts[-1] == 480 * 0.2
    assert counts[int(0.75 * steps)] == counts[-1] < counts[start + every] < counts[0]


def test_gradual_pruning_takes_the_settings_of_its_rule() -> None:
    def largest_first(net: gn.GrapNet, relations: gn.RelationSet, evidence: Any) -> torch.Tensor:
        return -relations.strengths

    net = gn.GrapNet([8, 12, 6])
    weakest = net.layers[0].outgoing().smallest(count=60)
    pairs = set(zip(weakest.parents.tolist(), weakest.children.tolist(), strict=True))
    manager = RuleManager()
    manager.add(gradual_pruning(40, 0.5, every=10, by=largest_first, keep=60, transitions=0))
    for step in range(40):
        manager.apply(net, step)
    left = net.layers[0].outgoing()
    assert set(zip(left.parents.tolist(), left.children.tolist(), strict=True)) == pairs
    with pytest.raises(TypeError):
        gradual_pruning(40, 0.5, every=10, sparsness=0.5)


def test_gradual_pruning_ranks_in_the_scope_that_it_is_given() -> None:
    for scope in ("owner", "transition"):
        net = gn.GrapNet([8, 12, 6])
        manager = RuleManager()
        manager.add(gradual_pruning(40, 0.5, every=10, scope=scope))
        for step in range(40):
            manager.apply(net, step)
        assert [t.size for t in net.transitions] == [48, 36]
        degrees = torch.cat([t.topology.degrees for t in net.transitions]).unique()
        assert (len(degrees) == 2) == (scope == "owner")
