"""GrowWidth: the function stays, the new nodes are what they should be, and they learn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules import (
    Budget,
    GradientRecorder,
    GrowWidth,
    RuleContext,
    RuleManager,
)
from grapnet.rules._widen import steepest_directions

SILENT = GrowWidth(layers=1, nodes=5)
COPIES = GrowWidth(layers=1, nodes=9, init="net2net")
STEEP = GrowWidth(layers=1, nodes=4, init="gradmax")


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([6, 5, 4, 3], dtype=torch.float64)


def inputs(count: int = 16, width: int = 6) -> Tensor:
    return torch.randn(
        count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )


def gradients(net: gn.GrapNet, layer: int = 1) -> GradientRecorder:
    """Returns what a recorder saw of one backward pass."""
    recorder = GradientRecorder(layer - 1, layer + 1)
    recorder.arm(net)
    net(inputs(width=net.sizes[0])).square().sum().backward()
    net.zero_grad()
    recorder.disarm()
    return recorder


def widen(net: gn.GrapNet, rule: GrowWidth, *, seed: int = 0, **given: Any) -> gn.NodeSet:
    """Applies the rule and returns the nodes that it added."""
    (layer,) = rule.layers
    before = net.layers[layer].uids
    if rule.init == "gradmax":
        given.setdefault("evidence", dict.fromkeys(rule.recorders(net), gradients(net, layer)))
    with net.edit(generator=torch.Generator().manual_seed(seed)) as edit:
        rule(net, edit, RuleContext(**given))
    gn.check(net)
    return net.select(layer=layer, where=lambda nodes: ~torch.isin(nodes.uids, before))


def values(net: gn.GrapNet) -> list[Tensor]:
    return [
        *(t.values().detach().clone() for t in net.transitions),
        *(x.biases.detach().clone() for x in net.layers[1:]),
    ]


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh", "leaky_relu"])
@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize(
    "rule", [SILENT, COPIES, replace(COPIES, noise=0.9), replace(COPIES, split=False), STEEP]
)
def test_the_function_stays_and_undo_brings_everything_back(
    rule: GrowWidth, layer: int, activation: str
) -> None:
    torch.manual_seed(1)
    net = gn.GrapNet([6, 5, 4, 3], activation=activation, dtype=torch.float64, density=0.8)
    x = inputs()
    before = values(net)
    output = net(x)
    children = [node.children.uids.tolist() for node in net.select()]
    new = widen(net, replace(rule, layers=layer))
    assert len(new) == rule.nodes
    assert (net(x) - output).abs().max() <= 1e-12
    net.undo()
    assert all(map(torch.equal, values(net), before))
    assert [node.children.uids.tolist() for node in net.select()] == children


def test_silent_nodes_hear_everything_and_say_nothing(net: gn.GrapNet) -> None:
    new = widen(net, replace(SILENT, owner="late"))
    assert (len(new.incoming()), len(new.outgoing()), new.owners) == (5 * 6, 5 * 4, ["late"] * 5)
    assert new.outgoing().weights.abs().max() == 0
    assert new.incoming().weights.abs().min() > 0
    assert new.incoming().weights.abs().max() <= 6**-0.5
    net(inputs()).square().sum().backward()
    assert new.outgoing().gradients.abs().max() > 0


def test_copies_are_like_their_originals(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[1][3].incoming()[:2])
        edit.set_owner(net.layers[1][:2], "a")
        edit.set_activation(net.layers[1][1:3], "tanh")
    layer = net.layers[1][:5]
    known = [
        (n.parents.uids.tolist(), n.bias.item(), n.activation, n.owner)
        for n in layer
        if n.bias is not None
    ]
    outgoing = layer.outgoing().weights.clone()
    new = widen(net, replace(COPIES, nodes=30))
    x = inputs()
    found = [
        (n.parents.uids.tolist(), n.bias.item(), n.activation, n.owner)
        for n in new
        if n.bias is not None
    ]
    assert set(map(str, found)) == set(map(str, known))  # all five were drawn
    originals = torch.tensor([known.index(copy) for copy in found])
    for original, copy in zip(originals.tolist(), new, strict=True):
        assert torch.equal(copy.incoming().weights, layer[original].incoming().weights)
        assert sorted(copy.children.uids.tolist()) == sorted(layer[original].children.uids.tolist())
    groups = torch.cat([torch.arange(5), originals])
    sums = torch.zeros(5, 4, dtype=torch.float64)
    for group, node in zip(groups.tolist(), [*layer, *new], strict=True):
        order = node.children.uids.argsort()
        sums[group] += node.W_alloc.detach()[0, order]
    assert torch.allclose(sums.flatten(), outgoing, rtol=0, atol=1e-14)
    assert net(x).isfinite().all()


def test_noise_makes_shares_uneven_and_without_it_they_are_equal(net: gn.GrapNet) -> None:
    once = gn.GrapNet([6, 1, 4], dtype=torch.float64)
    whole = once.layers[1][0].W_alloc.detach().clone()
    widen(once, replace(COPIES, nodes=3, noise=0.0))
    assert torch.allclose(
        once.layers[1].outgoing().weights.view(4, 4), whole / 4, rtol=0, atol=1e-15
    )
    other = gn.GrapNet([6, 1, 4], dtype=torch.float64)
    whole = other.layers[1][0].W_alloc.detach().clone()
    widen(other, replace(COPIES, nodes=3, noise=0.2))
    shares = other.layers[1].outgoing().weights.detach().view(4, 4) / whole
    assert 0.8 / 4.8 <= shares.min() < 0.24
    assert 0.26 < shares.max() <= 1.2 / 3.6


def test_the_optimizer_keeps_what_originals_had(net: gn.GrapNet) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    net(inputs()).square().sum().backward()
    optimizer.step()
    old = net.layers[1][:5]
    incoming = optimizer.state[net.transitions[0].weight]["exp_avg"].clone()
    outgoing = optimizer.state[net.transitions[1].weight]["exp_avg"].clone()
    for rule in (COPIES, replace(COPIES, split=False)):
        new = widen(net, rule)
        state = optimizer.state[net.transitions[0].weight]["exp_avg"].flatten()
        of_old = torch.isin(net.layers[0].outgoing().children, old.uids)
        assert torch.equal(state[of_old], incoming.flatten())
        assert state[~of_old].abs().max() == 0
        state = optimizer.state[net.transitions[1].weight]["exp_avg"].flatten()
        assert state[torch.isin(net.layers[1].outgoing().parents, new.uids)].abs().max() == 0
        assert torch.equal(state[:20], outgoing.flatten())
        net.undo()
        assert torch.equal(optimizer.state[net.transitions[1].weight]["exp_avg"], outgoing)


@pytest.mark.parametrize(
    "protect",
    [
        lambda edit, layer: edit.freeze(layer),
        lambda edit, layer: edit.freeze(layer.outgoing()[::3]),
    ],
)
def test_frozen_relations_are_neither_cut_nor_changed(
    net: gn.GrapNet, protect: Callable[..., None]
) -> None:
    with net.edit() as edit:
        protect(edit, net.layers[1])
    held = net.layers[1].outgoing()[net.layers[1].outgoing().frozen]
    before = held.weights.clone()
    pairs = (held.parents, held.children)
    output = net(inputs())
    widen(net, replace(COPIES, nodes=20))
    held = net.layers[1].outgoing()[net.layers[1].outgoing().frozen]
    assert torch.equal(held.weights, before)
    assert torch.equal(held.parents, pairs[0])
    assert torch.equal(held.children, pairs[1])
    assert (net(inputs()) - output).abs().max() <= 1e-12
    # copies of one frozen node differ
    assert len(net.layers[1].outgoing().weights[20:].unique()) > 20


@pytest.mark.parametrize(
    "budget", [Budget(children=1), Budget(parents=3), Budget(parents=2, children=3, edits=90)]
)
def test_the_manager_has_nothing_to_take_back(net: gn.GrapNet, budget: Budget) -> None:
    manager = RuleManager(budget=budget)
    output = net(inputs())
    manager.add(COPIES)
    assert manager.apply(net, 0) is not None
    assert net.sizes[1] > 5
    assert (net(inputs()) - output).abs().max() <= 1e-12


@pytest.mark.parametrize("least", [1, 2])
def test_beside_a_rule_that_cuts_it_shares_nothing_that_must_stay(
    net: gn.GrapNet, least: int
) -> None:
    def cut_strongest(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        edit.cut(net.layers[1].outgoing().largest(count=8))

    manager = RuleManager(budget=Budget(parents=least, children=least))
    manager.add(cut_strongest)
    manager.add(COPIES)
    # a cut that is taken back would leave a relation that is connected again
    assert manager.apply(net, 0) is not None
    assert net.sizes[1] == 14
    gn.check(net)


@pytest.mark.parametrize(("edits", "silent"), [(0, 0), (9, 0), (10, 1), (39, 3), (10**6, 5)])
def test_a_budget_of_edits_grows_fewer_nodes_each_of_them_whole(
    net: gn.GrapNet, edits: int, silent: int
) -> None:
    for rule in (SILENT, replace(STEEP, nodes=5)):
        assert len(widen(net, rule, budget=Budget(edits=edits))) == silent
        net.undo() if silent else None
    before = net.count().relations
    manager = RuleManager()
    manager.add(COPIES, budget=Budget(edits=edits))
    commit = manager.apply(net, 0)
    copies = net.sizes[1] - 5
    assert net.count().relations == before + 10 * copies
    if commit is not None:
        change = commit.change.transitions
        assert sum(len(c.index.inserted) for c in change.values()) <= edits
    assert copies == {0: 0, 9: 0, 10: 1, 39: 3, 10**6: 9}[edits]


def test_steep_nodes_hear_nothing_and_get_the_largest_gradient(net: gn.GrapNet) -> None:
    matrix = gradients(net).matrix()
    strength = torch.linalg.svdvals(matrix)
    new = widen(net, replace(STEEP, scale=0.5))
    assert new.incoming().weights.abs().max() == 0
    directions = new.outgoing().weights.detach().view(4, 4)
    assert torch.allclose(
        directions @ directions.T, 0.25 * torch.eye(4, dtype=torch.float64), atol=1e-12
    )
    net(inputs()).square().sum().backward()
    norms = new.incoming().gradients.view(6, 4).norm(dim=0)
    # also for ReLU: every one of them listens
    assert torch.allclose(norms, 0.5 * strength, rtol=1e-9)
    net.undo()
    random = torch.randn(500, 4, dtype=torch.float64)
    random = 0.5 * random / random.norm(dim=1, keepdim=True)
    assert (random @ matrix.T).norm(dim=1).max() <= 0.5 * strength[0]


def test_directions_come_with_both_signs_and_then_no_more(net: gn.GrapNet) -> None:
    matrix = torch.randn(6, 4, dtype=torch.float64)
    found = steepest_directions(matrix)
    assert found.shape == (8, 4)
    assert torch.equal(found[4:], -found[:4])
    # a step makes them speak for positive inputs
    assert bool((-(matrix @ found[:4].T)).sum(0).gt(0).all())
    assert steepest_directions(torch.ones(6, 4)).shape == (2, 4)
    assert steepest_directions(torch.zeros(6, 4)).shape == (0, 4)
    new = widen(net, replace(STEEP, nodes=50))
    assert len(new) == 2 * 4


@pytest.mark.parametrize("init", ["zero_outgoing", "net2net", "gradmax"])
def test_several_layers_are_widened_within_one_budget(net: gn.GrapNet, init: Any) -> None:
    manager = RuleManager(budget=Budget(edits=60))
    manager.add(GrowWidth(layers=(1, -2), nodes=3, init=init))
    x = inputs()
    output = net(x).detach()
    with manager.recording(net):
        net(x).square().sum().backward()
    commit = manager.apply(net)
    assert commit is not None
    assert (net(x) - output).abs().max() <= 1e-12
    grown = [size - before for size, before in zip(net.sizes, [6, 5, 4, 3], strict=True)]
    assert grown == [0, 3, 3, 0]


@pytest.mark.parametrize(
    ("rule", "sizes", "activation"),
    [
        (replace(SILENT, layers=0), [6, 5, 4], "relu"),
        (replace(SILENT, layers=-1), [6, 5, 4], "relu"),
        (replace(SILENT, layers=(1, 4)), [6, 5, 4], "relu"),
        (COPIES, [6, 0, 4], "relu"),
        (STEEP, [6, 5, 4], "sigmoid"),
        (STEEP, [6, 5, 4], "softplus"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(
    rule: GrowWidth, sizes: list[int], activation: str
) -> None:
    net = gn.GrapNet(sizes, activation=activation, dtype=torch.float64)
    evidence = {"gradients across layer 1": gradients(net)}
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        rule(net, edit, RuleContext(evidence=evidence))
    assert (net.version, net.sizes) == (0, sizes)
