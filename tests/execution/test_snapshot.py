"""Snapshots and plain modules of a net: what they compute, and whether the net went on since."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import grapnet as gn

from .graphs import DEVICES
from .snapped import addresses, cut, every_graph, full, inputs, mixed, ragged, tensors


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@every_graph
@pytest.mark.parametrize("batch", [(), (7,), (2, 3), (0,)], ids=str)
def test_snapshot_and_module_compute_what_the_net_computes(build, batch):
    net = build(dtype=torch.float64)
    x = inputs(net, *batch)
    for model in (net.snapshot(), net.to_module()):
        torch.testing.assert_close(model(x), net(x), rtol=0, atol=1e-12)


def own_modules(model: nn.Sequential) -> list[str]:
    kinds = [type(module) for module in model]
    return [kind.__name__ for kind in kinds if kind.__module__.startswith("grapnet")]


def test_modules_are_those_of_torch_where_it_has_one():
    names = ["relu", "gelu", "tanh", "sigmoid", "silu", "leaky_relu", "elu", "softplus", "identity"]
    net = gn.GrapNet([2] * 10, activation=names)
    classes = [
        type(module).__name__ for module in net.snapshot() if not isinstance(module, nn.Linear)
    ]
    assert classes == ["ReLU", "GELU", "Tanh", "Sigmoid", "SiLU", "LeakyReLU", "ELU", "Softplus"]
    assert own_modules(net.to_module()) == []
    assert own_modules(mixed().snapshot()) == ["MixedActivation", "MixedActivation"]


def test_matrix_is_zero_where_no_relation_is():
    net = gn.GrapNet.from_relations(
        [2, 3], [([0, 1, 1], [2, 0, 1], [5.0, 6.0, 7.0])], biases=[[1.0, 2.0, 3.0]]
    )
    linear = net.snapshot()[0]
    assert linear.weight.tolist() == [[0, 6], [0, 7], [5, 0]]
    assert linear.bias.tolist() == [1, 2, 3]
    assert (linear.in_features, linear.out_features) == (2, 3)


@pytest.mark.parametrize("device", DEVICES)
@every_graph
def test_snapshot_is_detached_and_taking_it_changes_nothing(build, device):
    net = build(dtype=torch.float64).to(device)
    random = torch.get_rng_state()
    before = copy.deepcopy(net.state_dict())
    snapshot = net.snapshot()
    assert torch.equal(torch.get_rng_state(), random)
    assert not snapshot.training
    assert not any(tensor.requires_grad for tensor in tensors(snapshot))
    assert {parameter.dtype for parameter in snapshot.parameters()} == {torch.float64}
    assert {tensor.device for tensor in tensors(snapshot)} == {net.device}
    assert not addresses(snapshot) & addresses(net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert snapshot.version == net.version
    assert not snapshot.cpu().is_stale(net)


@every_graph
def test_module_trains_on_its_own(build):
    net = build()
    module = net.to_module()
    x = inputs(net, 4)
    before = copy.deepcopy(net.state_dict())
    assert type(module) is nn.Sequential
    assert module.training
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in module.parameters())
    assert not addresses(module) & addresses(net)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(module(x), net(x))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_net_that_skips_layers_is_refused_and_its_skips_are_named():
    net = gn.GrapNet([3, 4, 5, 2], skips=[(0, 2), (1, 3)])
    for make in (net.snapshot, net.to_module):
        with pytest.raises(gn.errors.PlanError, match=r"\[\(0, 2\), \(1, 3\)\]"):
            make()


def test_large_matrix_is_refused_unless_allowed():
    net = gn.GrapNet([3, 2, 10])
    for make in (net.snapshot, net.to_module):
        with pytest.raises(gn.errors.PlanError, match=r"transition 1 .* 20 cells .*most_cells=20"):
            make(most_cells=19)
        make(most_cells=20)
    wide = gn.GrapNet.from_relations([2**15, 2**14], [([0], [0])])
    with pytest.raises(gn.errors.PlanError, match=r"536,870,912 cells .* 2\.0 GiB"):
        wide.snapshot()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_snapshot_is_quantised_and_a_live_net_is_passed_over():
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    net = gn.GrapNet([16, 64, 4])
    x = torch.randn(8, 16)
    expected = net(x).detach()
    assert torch.equal(quantize(net, {nn.Linear})(x), expected)
    quantised = quantize(net.snapshot(), {nn.Linear})
    assert not isinstance(quantised[0], nn.Linear)
    assert 0 < (quantised(x) - expected).abs().max() / expected.abs().max() < 0.05


# Staleness


def edited(operate: Callable[[gn.GrapNet, gn.Edit], object]) -> Callable[[gn.GrapNet], None]:
    def change(net: gn.GrapNet) -> None:
        with net.edit() as edit:
            operate(net, edit)

    return change


def load_frozen_alone(net: gn.GrapNet) -> None:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["transitions.0.weight"][state["transitions.0.frozen"].long()] += 1
    net.load_state_dict(state)


def write_in_place(net: gn.GrapNet) -> None:
    with torch.no_grad():
        net.transitions[1].weight.mul_(2)


def write_a_bias(net: gn.GrapNet) -> None:
    with torch.inference_mode():
        net.layers[1].bias.add_(1)


CHANGES: dict[str, Callable[[gn.GrapNet], object]] = {
    "cut": edited(lambda net, edit: edit.cut(net.layers[0][0].outgoing())),
    "activation": edited(lambda net, edit: edit.set_activation(net.layers[1][0], "elu")),
    "freeze": edited(lambda net, edit: edit.freeze(net.layers[2][0])),
    "undo": lambda net: net.undo(),
    "load frozen alone": load_frozen_alone,
    "in place": write_in_place,
    "bias": write_a_bias,
    "data": lambda net: net.transitions[0].weight.data.add_(1),
    "double": lambda net: net.double(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_makes_it_stale(change):
    net = cut()
    snapshot = net.snapshot()
    assert not snapshot.is_stale(net)
    change(net)
    assert snapshot.is_stale(net)
    assert not net.snapshot().is_stale(net)


def test_version_number_that_comes_back_does_not_make_it_fresh():
    net = full()
    with net.edit(trial=True) as edit:
        edit.set_activation(net.layers[1], "tanh")
        edit.commit()
        snapshot = net.snapshot()
    assert snapshot.is_stale(net)
    CHANGES["activation"](net)  # moves no coordinate
    assert snapshot.version == net.version
    assert snapshot.is_stale(net)


def test_what_changes_nothing_leaves_it_fresh():
    net = cut()
    snapshot = net.snapshot()
    net(inputs(net, 4).requires_grad_()).sum().backward()
    net.zero_grad()
    with net.edit(reason="nothing"):
        pass
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0][0].outgoing())
        edit.commit()
    net.transitions[0].weight = nn.Parameter(net.transitions[0].weight.data)
    assert not snapshot.is_stale(net)


def through_a_file(snapshot: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(snapshot, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@every_graph
@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_copy_compares_what_it_holds(build, copied):
    net = build()
    twin = copied(net.snapshot())
    assert twin.version == net.version
    assert not twin.is_stale(net)
    assert not twin.is_stale(copy.deepcopy(net))
    net.layers[-1].biases = 9.0
    assert twin.is_stale(net)


def test_snapshot_with_other_modules_or_of_another_net_is_stale():
    net = mixed()
    changed = [net.snapshot() for _ in range(6)]
    changed[0].append(nn.ReLU())
    changed[1].pop(-1)
    changed[2][1].order.copy_(changed[2][1].order.flip(0))
    changed[3][0].weight.mul_(-1)
    changed[4][3] = nn.Tanh()
    changed[5].double()
    assert [snapshot.is_stale(net) for snapshot in changed] == [True] * 6
    sparse = ragged()
    twin = sparse.snapshot()
    twin[0].weight[twin[0].weight == 0] = 1.0  # where no relation is
    assert twin.is_stale(sparse)
    assert net.snapshot()[:2].is_stale(net)
    assert net.snapshot()[:2].version is None
    assert full().snapshot().is_stale(full())
    assert full().snapshot().is_stale(gn.GrapNet([6, 3]))


def test_trial_that_waits_has_no_snapshot():
    net = full()
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0][0].outgoing())
        for attempt in (net.snapshot, net.to_module):
            with pytest.raises(gn.errors.EditError):
                attempt()
        edit.commit()
        assert net.snapshot()[0].weight[:, 0].count_nonzero() == 0
