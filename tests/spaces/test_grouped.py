"""Relations in convolutions with groups: one kernel each, between channels of one group."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet import plot, rules
from grapnet.rules import (
    Budget,
    CovarianceSifter,
    PruneWeakest,
    RemoveOrphans,
    Rewire,
    RuleManager,
    SRigL,
)
from grapnet.spaces import Adopted
from tests.spaces import matrix, oracle, zoo
from tests.spaces.subjects import Subject, subject
from tests.spaces.zoo import Case

LAYERS = {
    "groups": nn.Conv2d(8, 12, 3, groups=4),
    "depthwise": nn.Conv2d(8, 8, 3, groups=8, dilation=2),
    "several of one": nn.Conv2d(8, 16, 1, groups=8),
    "one of several": nn.Conv2d(8, 4, 3, groups=4, padding=1, padding_mode="circular"),
    "transposed": nn.ConvTranspose2d(8, 12, 2, 2, groups=4),
    "transposed depthwise": nn.ConvTranspose2d(8, 8, 2, groups=8),
    "signal": nn.Conv1d(8, 8, 3, groups=2, padding=1),
    "volume": nn.Conv3d(8, 8, 2, groups=4),
}
POINTWISE = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


def found_for(name: str) -> Subject:
    """Returns a model of which module 1 is one of the layers."""
    layer: Any = copy.deepcopy(LAYERS[name])
    torch.manual_seed(0)
    kind = POINTWISE[layer.weight.dim()]
    model = nn.Sequential(kind(3, 8, 1), layer, nn.Tanh(), kind(layer.out_channels, 5, 1))
    return subject(Case(model, (torch.randn(2, 3, *[6] * (layer.weight.dim() - 2)),)))


def weight_of(net: Adopted, name: str = "1.weight") -> Any:
    (weight,) = [weight for weight in net.transitions if weight.name == name]
    return weight


def group_of(rows: Tensor, channels: int, groups: int) -> Tensor:
    return rows // (channels // groups)


@pytest.mark.parametrize("name", LAYERS)
def test_every_kernel_is_a_relation_between_channels_of_one_group(name: str) -> None:
    found = found_for(name)
    module: Any = found.model.get_submodule("1")
    relations = found.net.relations("1")
    cells = module.weight[0, 0].numel()
    assert relations.weights.numel() == module.weight.numel()
    assert len(relations) * cells == module.weight.numel()
    weight = weight_of(found.net)
    assert weight.density == 1
    topology = weight.topology
    assert (topology.n_parents, topology.n_children) == (module.in_channels, module.out_channels)
    above = group_of(topology.parents(), module.in_channels, module.groups)
    below = group_of(topology.child, module.out_channels, module.groups)
    assert torch.equal(above, below)


@pytest.mark.parametrize("name", LAYERS)
def test_cut_and_frozen_kernels_equal_a_mask(name: str) -> None:
    found = found_for(name)
    outcomes = matrix.relations(found)
    assert [outcome.space for outcome in outcomes] == ["0.weight", "1.weight", "3.weight"]
    assert all(outcome.effect > 0 for outcome in outcomes)
    gn.check(found.net)


@pytest.mark.parametrize("name", LAYERS)
def test_cut_kernels_are_connected_again(name: str) -> None:
    found = found_for(name)
    net = found.net
    module: Any = found.model.get_submodule("1")
    whole = module.weight.detach().clone()
    weakest = net.relations("1").smallest(fraction=0.5)
    ends = (weakest.parents, weakest.children)
    numbers = weakest.weights.detach().clone()
    with net.edit(reason="cut") as edit:
        edit.cut(weakest)
    assert int((module.weight == 0).sum()) == numbers.numel()
    assert weight_of(net).density == 0.5
    with net.edit(reason="connect") as edit:
        edit.connect(*ends, pairs="aligned", weights=numbers)
    assert torch.equal(module.weight, whole)
    assert type(module) is type(LAYERS[name])


def test_channels_of_different_groups_are_not_connected() -> None:
    found = found_for("groups")
    weight = weight_of(found.net)
    parents = found.net.layers[weight.source]
    children = found.net.layers[weight.target]
    with found.net.edit(reason="cut") as edit:
        edit.cut(found.net.relations("1"))
        edit.allow_dead = True
    before = found.snapshot()
    with pytest.raises(gn.errors.EditError), found.net.edit() as edit:
        edit.connect(parents[0], children[3])
    assert oracle.same(before, found.snapshot()) == []
    with found.net.edit() as edit:
        edit.connect(parents[0], children[2])
    assert len(found.net.relations("1")) == 1


def test_channels_come_and_leave_with_the_nodes_of_their_spaces() -> None:
    found = found_for("groups")
    net = found.net
    parents = net.layers[weight_of(net).source]
    uids = parents.uid
    for verb in ("remove_nodes", "freeze"):
        with pytest.raises(gn.errors.EditError), net.edit() as edit:
            getattr(edit, verb)(parents[:2])
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.set_owner(parents[:2], "mine")
    with net.edit(reason="a group") as edit:
        edit.remove_nodes(net.space("0")[1])
    # the two channels of the second group
    assert parents.uid.tolist() == [*uids[:2].tolist(), *uids[4:].tolist()]
    assert net.count().nodes == sum(len(space) for space in net.spaces)
    with pytest.raises(gn.errors.StaleNodeError):
        net.node(int(uids[2]))
    assert net.node(int(uids[4])).uid == int(uids[4])


@pytest.mark.parametrize("name", ["groups", "depthwise", "transposed"])
def test_nodes_leave_and_come_beside_cut_kernels(name: str) -> None:
    found = found_for(name)
    net = found.net
    module: Any = found.model.get_submodule("1")
    with net.edit(reason="cut") as edit:
        edit.cut(net.relations("1").smallest(fraction=0.25))
    space = net.space("0")
    before = found.snapshot()
    outputs = found.outputs()
    with net.edit(reason="grow") as edit:
        edit.add_nodes(space, 2)
    assert module.groups == len(space)
    assert oracle.largest_difference(outputs, found.outputs()) < 1e-12
    with net.edit(reason="shrink") as edit:
        edit.remove_nodes(space[:2])
    gn.check(net)
    net.undo()
    net.undo()
    assert oracle.same(before, found.snapshot()) == []


def test_rules_prune_kernels_of_groups_by_what_is_possible() -> None:
    found = found_for("groups")
    net = found.net
    manager = RuleManager()
    manager.add(PruneWeakest(transitions="1", sparsity=0.5, scope="child"))
    manager.apply(net, 0)
    topology = weight_of(net).topology
    assert set(topology.fan_in().tolist()) == {1}
    manager = RuleManager()
    manager.add(PruneWeakest(sparsity=0.75, scope="transition"))
    manager.apply(net, 0)
    assert weight_of(net).density == 0.25


def test_patterns_lie_inside_of_a_group() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 8, 3, groups=2), nn.Conv2d(8, 4, 1))
    net = gn.adopt(model, torch.randn(2, 3, 5, 5))
    manager = RuleManager()
    manager.add(PruneWeakest(transitions="1", pattern=(2, 4)))
    manager.apply(net, 0)
    exists = model[1].weight.flatten(2).norm(dim=2) > 0
    assert set(exists.unflatten(1, (2, 4)).sum(2).flatten().tolist()) == {2}


@pytest.mark.parametrize("rule", [Rewire, SRigL])
def test_rewiring_leaves_groups_as_they_are(rule: Any) -> None:
    found = found_for("groups")
    net = found.net
    with net.edit(reason="cut") as edit:
        edit.cut(net.relations("0").smallest(fraction=0.5))
        edit.cut(net.relations("1").smallest(fraction=0.5))
    before = weight_of(net).topology.child
    manager = RuleManager()
    manager.add(rule(fraction=0.3))
    manager.start(net)
    found.step()
    assert manager.apply(net, 0) is not None
    assert torch.equal(before, weight_of(net).topology.child)
    named = RuleManager()
    named.add(rule(transitions="1"))

    def rewire() -> None:
        named.start(net)
        found.step()
        named.apply(net, 0)

    with pytest.raises(gn.errors.EditError):
        rewire()


def table_of(net: Adopted, of_relations: Tensor) -> Tensor:
    """Returns one number per kernel of module 1 in the layout of its weight, [rows, columns]."""
    weight = weight_of(net)
    module: Any = net.model.get_submodule("1")
    table = torch.full(module.weight.shape[:2], torch.nan, dtype=torch.float64)
    parents = weight.topology.parents().long()
    children = weight.topology.child.long()
    per_group = (module.in_channels // module.groups, module.out_channels // module.groups)
    if isinstance(module, nn.ConvTranspose2d):
        table[parents, children % per_group[1]] = of_relations.double()
    else:
        table[children, parents % per_group[0]] = of_relations.double()
    return table


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


@pytest.mark.parametrize("name", LAYERS)
def test_criteria_score_the_kernels_of_groups(name: str) -> None:
    found = found_for(name)
    net = found.net
    model: Any = found.model
    weight = model[1].weight
    (x,) = found.case.inputs
    relations = net.relations("1")
    magnitude = weight.detach().flatten(2).norm(dim=2)
    scores = rules.Magnitude().score(net, relations, {})
    torch.testing.assert_close(table_of(net, scores), magnitude)
    # the gradient, as for Taylor and SNIP
    weights = [model[0].weight, weight, model[3].weight]
    gradients = torch.autograd.grad(loss_of(model, x), weights, create_graph=True)
    taylor = (weight * gradients[1]).flatten(2).sum(2).abs().detach()
    recorders = rules.Taylor().recorders(net, relations)
    for recorder in recorders.values():
        recorder.arm(net)
    loss_of(model, x).backward()
    torch.testing.assert_close(
        table_of(net, rules.Taylor().score(net, relations, recorders)), taylor
    )
    snip = (weight * gradients[1]).abs().flatten(2).sum(2).detach()
    scores = rules.SNIP([x], loss_of).score(net, relations)
    assert len(scores) == len(relations)
    torch.testing.assert_close(table_of(net, scores), snip)
    product = sum((own * own.detach()).sum() for own in gradients)
    (curvature,) = torch.autograd.grad(product, [weight])
    grasp = (weight * curvature).flatten(2).sum(2).detach()
    scores = rules.GraSP([x], loss_of).score(net, relations)
    torch.testing.assert_close(table_of(net, scores), grasp)


@pytest.mark.parametrize("name", LAYERS)
def test_synaptic_flow_passes_through_groups(name: str) -> None:
    found = found_for(name)
    positive = copy.deepcopy(found.model)
    with torch.no_grad():
        for parameter in positive.parameters():
            parameter.abs_()
    (x,) = found.case.inputs
    module: Any = positive.get_submodule("1")
    (gradient,) = torch.autograd.grad(positive(torch.ones_like(x)).sum(), [module.weight])
    flow = (module.weight * gradient).detach().flatten(2).sum(2)
    scores = rules.SynFlow(0.5, rounds=1).score(found.net, found.net.relations("1"))
    places = table_of(found.net, scores)
    # the flow of the others is computed anew without these
    half = flow.numel() // 2
    assert torch.equal(places.flatten().argsort()[:half], flow.flatten().argsort()[:half])


@pytest.mark.parametrize("by", ["wanda", "fisher", "obs", "alternating", "correlation"])
@pytest.mark.parametrize("name", ["groups", "depthwise", "transposed"])
def test_criteria_that_record_cells_leave_groups_out(name: str, by: str) -> None:
    found = found_for(name)
    net = found.net
    kernels = len(net.relations("1"))
    manager = RuleManager(allow_dead=True)
    manager.add(PruneWeakest(fraction=0.5, by=by))
    with manager.recording(net):
        loss_of(found.model, *found.case.inputs).backward()
    manager.apply(net)
    assert len(net.relations("1")) == kernels
    assert len(net.relations("3")) < 5 * len(net.layers[weight_of(net, "3.weight").source])
    named = PruneWeakest(fraction=0.5, by=by, transitions="1")
    with pytest.raises(gn.errors.EditError, match=r"1\.weight"):
        named.recorders(net)


@pytest.mark.parametrize("name", LAYERS)
def test_a_sifter_cuts_kernels_of_groups_by_scores_and_leaves_them_out_by_correlation(
    name: str,
) -> None:
    found = found_for(name)
    net = found.net
    kernels = len(net.relations("1"))
    manager = RuleManager()
    manager.add(CovarianceSifter())
    manager.start(net)
    found.step()
    manager.apply(net)
    assert len(net.relations("1")) == kernels
    degrees = weight_of(net).topology.degrees
    manager = RuleManager()
    manager.add(CovarianceSifter("1", by="magnitude"))
    manager.apply(net)
    cut = degrees - weight_of(net).topology.degrees
    assert torch.equal(cut, degrees // 2)


@pytest.mark.parametrize("name", ["depthwise", "one of several", "several of one"])
def test_kernels_of_groups_are_no_parents_and_children_of_nodes(name: str) -> None:
    found = found_for(name)
    net = found.net
    space = net.space("0")
    groups = len(space)
    entering = space[:1].incoming()
    assert len(entering) == len(entering & net.relations("0"))
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.cut(net.relations("0"))
    manager = RuleManager()
    manager.add(PruneWeakest(transitions="0", sparsity=1.0), budget=Budget(parents=1))
    assert manager.apply(net, dry_run=True).cut == len(net.relations("0")) - groups
    with net.edit(reason="no parents") as edit:
        edit.cut(space[:1].incoming())
    manager = RuleManager()
    manager.add(RemoveOrphans())
    manager.apply(net)
    assert len(space) == groups - 1
    module: Any = net.model.get_submodule("1")
    assert module.groups == groups - 1
    with net.edit(reason="freeze") as edit:
        edit.freeze(space[:2], bias=False)
    assert space[:2].frozen.tolist() == [True, True]


@pytest.mark.parametrize("name", LAYERS)
def test_connected_kernels_are_drawn_for_the_inputs_of_their_group(name: str) -> None:
    found = found_for(name)
    net = found.net
    module: Any = found.model.get_submodule("1")
    kernels = net.relations("1")
    ends = (kernels.parents, kernels.children)
    with net.edit(reason="cut", allow_dead=True) as edit:
        edit.cut(kernels)
    with net.edit(reason="connect") as edit:
        edit.connect(*ends, pairs="aligned", weights="linear")
    inputs = module.in_channels // module.groups * module.weight[0, 0].numel()
    largest = float(module.weight.detach().abs().max()) * inputs**0.5
    assert 0.85 < largest <= 1


def test_new_nodes_count_the_kernels_of_both_sides() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 1)
            self.same = nn.Conv2d(8, 8, 1, groups=4)
            self.last = nn.Conv2d(8, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(h + self.same(h))

    found = subject(Case(Residual(), (torch.randn(2, 3, 4, 4),)))
    assert all(outcome.effect > 0 for outcome in matrix.relations(found))
    net = found.net
    (inside,) = [space for space in net.spaces if len(space) == 2]
    before = net.count().relations
    with net.edit(reason="grow", trial=True) as edit:
        edit.add_nodes(inside, 2)
        asked = edit.n_connections
        edit.commit()
        born = net.count().relations - before
    # every group has kernels between all of its channels
    assert asked == born == 4 * (4 * 4 - 2 * 2)


def test_rewiring_leaves_convolutions_out_that_have_one_group_left() -> None:
    found = found_for("groups")
    net = found.net
    with net.edit(reason="one group") as edit:
        edit.remove_nodes(net.space("0")[1:])
        edit.cut(net.relations("3").smallest(fraction=0.5))
    with net.edit(reason="cut") as edit:
        edit.cut(net.relations("1").smallest(fraction=0.5))
    before = weight_of(net).topology.child
    for rule in (Rewire(fraction=0.3), SRigL(fraction=0.3)):
        manager = RuleManager()
        manager.add(rule)
        manager.start(net)
        found.step()
        manager.apply(net, 0)
        assert torch.equal(before, weight_of(net).topology.child)


def test_numbers_of_layers_are_those_of_spaces() -> None:
    net = found_for("groups").net
    assert len(net.layers) > len(net.spaces)
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.add_nodes(len(net.spaces), 1)
    assert f"{net.count().nodes} nodes" in plot.spaces(net).get_title()


def test_a_large_vocabulary_stops_no_edit_beside_channels_of_three_spaces() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(2**20 + 1, 8)
            self.linear = nn.Linear(8, 8)
            self.two = nn.Conv1d(8, 8, 1, groups=2)
            self.four = nn.Conv1d(8, 8, 1, groups=4)
            self.last = nn.Conv1d(8, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(self.words(x)).transpose(1, 2)
            return self.last(self.four(self.two(h)))

    model = Words()
    net = gn.adopt(model, torch.randint(99, (2, 5)))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    gn.attach(averaged, net)
    with net.edit(reason="a group") as edit:
        edit.remove_nodes(net.space("linear")[1])
    assert model.two.groups == 1
    assert averaged.module.two.groups == 1


def test_files_and_copies_have_the_relations_that_are_left(tmp_path: Path) -> None:
    found = found_for("groups")
    net = found.net
    with net.edit(reason="cut") as edit:
        edit.cut(net.relations("1").smallest(fraction=0.5))
        edit.freeze(net.relations("1")[:4])
    gn.save(tmp_path / "file", net, undo=True)
    file = gn.open(tmp_path / "file").adopted
    assert len(file.relations("1")) == len(net.relations("1"))
    assert torch.equal(file.relations("1").weights, net.relations("1").weights)
    assert torch.equal(file.relations("1").frozen, net.relations("1").frozen)
    assert torch.equal(file.relations("1").children, net.relations("1").children)
    twin = copy.deepcopy(net)
    assert torch.equal(twin.relations("1").parents, net.relations("1").parents)
    again = subject(found.case).net
    gn.restore(tmp_path / "file", into=again)
    assert torch.equal(again.relations("1").weights, net.relations("1").weights)
    file.undo()
    assert len(file.relations("1")) == 24


def test_a_mobile_net_is_pruned_with_its_depthwise_kernels() -> None:
    found = subject(zoo.MODELS["mobilenet_v2"]())
    depthwise = [weight for weight in found.net.transitions if weight._n_groups > 1]
    assert depthwise
    manager = RuleManager()
    manager.add(PruneWeakest(fraction=0.5, scope="transition"))
    manager.apply(found.net, 0)
    for weight in depthwise:
        assert weight.size == weight._n_groups - round(0.5 * weight._n_groups)
    outputs = found.outputs()
    assert all(bool(output.isfinite().all()) for output in outputs)
