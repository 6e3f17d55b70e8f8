"""SRigL: equal numbers of parents, ablation of nodes, and what is dropped and grown, by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.rules import Budget, Every, RuleContext, RuleManager, SRigL, srigl


def table(net: Any, t: int, values: Tensor) -> Tensor:
    """Returns one value per relation as [children, parents], 0 elsewhere."""
    topology = net.transitions[t].topology
    found = torch.zeros(topology.n_children, topology.n_parents, dtype=values.dtype)
    found[topology.child.long(), topology.parents().long()] = values
    return found


def recorded(net: Any, rule: SRigL, seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    recorders = rule.recorders(net)
    for recorder in recorders.values():
        recorder.arm(net)
    net(torch.randn(32, net.sizes[0]))[:, :2].square().sum().backward()
    return recorders


def sparse_net() -> gn.GrapNet:
    torch.manual_seed(0)
    net = gn.GrapNet([16, 12, 4], density=0.25)
    with torch.no_grad():
        # Two nodes with weak relations and children with small gradients.
        for node in net.layers[1][:2]:
            relations = node.incoming()
            relations.weights = relations.weights * 1e-3
            out = node.outgoing()
            out.weights = out.weights * 1e-6
    return net


def expected_wiring(net: gn.GrapNet, gradient: Tensor, rule: SRigL) -> tuple[list[int], Tensor]:
    """Returns the children of transition 0 that leave, and the wiring of the others, [children,
    parents], step by step as published.
    """
    size = table(net, 0, net.layers[0].outgoing().weights.detach().abs())
    present = table(net, 0, torch.ones(net.transitions[0].size)) > 0
    gradient = gradient.abs()
    total = int(present.sum())
    dropped = int(rule.fraction * total)
    n_children, n_parents = present.shape
    cells = [(c, p) for c in range(n_children) for p in range(n_parents)]
    strongest = sorted((x for x in cells if present[x]), key=lambda x: -size[x])
    steepest = sorted((x for x in cells if not present[x]), key=lambda x: -gradient[x])
    salient = strongest[: total - dropped] + steepest[:dropped]
    counts = [sum(c == child for c, _ in salient) for child in range(n_children)]
    least = 0
    if rule.salient:
        least = max(1, int(rule.salient * (total // n_children)))
    needed = max(1, math.ceil(total / n_parents))
    gone = sorted((c for c in range(n_children) if counts[c] < least), key=lambda c: counts[c])
    gone = gone[: n_children - needed]
    stay = [c for c in range(n_children) if c not in gone]
    fan_in = min(n_parents, total // len(stay))
    kept = [x for x in strongest if x[0] in stay][: total - dropped]
    found = torch.zeros_like(present)
    for child in stay:
        own = [x for x in kept if x[0] == child][:fan_in]
        more = [x for x in steepest if x[0] == child][: fan_in - len(own)]
        for cell in own + more:
            found[cell] = True
    return sorted(gone), found[stay]


@pytest.mark.parametrize("salient", [0.0, 0.3, 0.9])
def test_a_transition_is_rewired_as_published(salient: float) -> None:
    net = sparse_net()
    rule = SRigL(transitions=0, salient=salient)
    evidence = recorded(net, rule)
    gradient = evidence["gradients of transition 0"].matrix().t()
    gone, wiring = expected_wiring(net, gradient, rule)
    uids = net.layers[1].uids
    with net.edit() as edit:
        rule(net, edit, RuleContext(evidence=evidence))
    gn.check(net)
    stays = [row for row in range(12) if row not in gone]
    assert torch.equal(net.layers[1].uids, uids[stays])
    assert torch.equal(table(net, 0, torch.ones(net.transitions[0].size)) > 0, wiring)
    assert (len(gone) > 0) == (salient > 0)
    assert len(net.transitions[0].topology.fan_in().unique()) == 1


def test_weights_that_stay_are_kept_and_grown_ones_are_zero() -> None:
    net = sparse_net()
    rule = SRigL(transitions=0)
    evidence = recorded(net, rule)
    before = net.layers[0].outgoing()
    weights = dict(
        zip(
            zip(before.parents.tolist(), before.children.tolist(), strict=True),
            before.weights.tolist(),
            strict=True,
        )
    )
    with net.edit() as edit:
        rule(net, edit, RuleContext(evidence=evidence))
    after = net.layers[0].outgoing()
    pairs = zip(after.parents.tolist(), after.children.tolist(), strict=True)
    for pair, weight in zip(pairs, after.weights.tolist(), strict=True):
        assert weight == weights.get(pair, 0.0)


def test_nodes_that_may_not_leave_stay() -> None:
    net = sparse_net()
    weak = net.layers[1][0]
    relation = weak.incoming()[:1]
    with net.edit() as edit:
        edit.freeze(relation)
    rule = SRigL(salient=0.9)
    evidence = recorded(net, rule)
    with net.edit() as edit:
        rule(net, edit, RuleContext(evidence=evidence))
    assert weak.uid in net.layers[1].uids.tolist()
    assert net.count().frozen == 1
    assert net.sizes[2] == 4  # outputs
    assert net.sizes[1] < 12


def test_removed_nodes_hand_their_relations_to_the_others_of_the_next_transition() -> None:
    net = sparse_net()
    before = [transition.size for transition in net.transitions]
    rule = SRigL(salient=0.5)
    evidence = recorded(net, rule)
    with net.edit() as edit:
        rule(net, edit, RuleContext(evidence=evidence))
    gn.check(net)
    for t, transition in enumerate(net.transitions):
        fan_in = transition.topology.fan_in().unique()
        assert len(fan_in) == 1
        most = min(transition.topology.n_parents, before[t] // transition.n_children)
        assert int(fan_in) == most


def test_a_run_keeps_the_fan_in_constant_and_a_budget_stops_it() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([16, 24, 4], density=0.3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    gn.attach(optimizer, net)
    manager = RuleManager()
    manager.add(srigl(40, every=10))
    manager.start(net)
    x = torch.randn(64, 16)
    y = torch.randint(4, (64,))
    for step in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        manager.apply(net, step)
    assert len(net.history) >= 2
    for transition in net.transitions:
        assert len(transition.topology.fan_in().unique()) == 1
    tight = gn.GrapNet([16, 24, 4], density=0.3)
    limited = RuleManager(budget=Budget(edits=3))
    limited.add(SRigL(salient=0), schedule=Every(1))
    with limited.recording(tight):
        nn.functional.cross_entropy(tight(x), y).backward()
    commit = limited.apply(tight)
    assert commit is None or max(commit.counts.values()) <= 3


def test_an_adopted_model_loses_channels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 12, 3), nn.ReLU(), nn.Conv2d(12, 4, 3)
    )
    x = torch.randn(4, 3, 9, 9)
    net = gn.adopt(model, x)
    with net.edit() as edit:
        edit.cut(
            net.relations("2").random(fraction=0.7, generator=torch.Generator().manual_seed(0))
        )
    with torch.no_grad():
        weak = net.space("2")[:3]
        gone = weak.uids.tolist()
        relations = weak.incoming()
        relations.weights = relations.weights * 1e-4
        out = weak.outgoing()
        out.weights = out.weights * 1e-6
    manager = RuleManager()
    manager.add(SRigL(transitions="2", salient=0.5))
    with manager.recording(net):
        model(x).square().sum().backward()
    manager.apply(net)
    left = net.space("2").uids.tolist()
    assert not set(gone) & set(left)
    assert len(left) <= 9
    assert model[2].weight.shape[0] == model[4].weight.shape[1] == len(left)
    (t,) = net._named_transitions("2")
    assert len(net.transitions[t].topology.fan_in().unique()) == 1
