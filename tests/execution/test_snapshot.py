"""Snapshots: what they hold and what they compute."""

import copy

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from tests.rounding import plain_bounds

from .snapped import (
    DEVICES,
    MARK,
    addresses,
    edited,
    every_graph,
    full,
    inputs,
    mixed,
    step,
    tensors,
)


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


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
def test_net_snapshot_module_and_matrix_network_agree_as_in_the_paper(activation):
    """16-32-8, batch 32, float32: values and weight gradients differ by what rounding may do."""
    net = gn.GrapNet([16, 32, 8], activation=activation)
    x = torch.randn(32, 16)
    slope = torch.randn(32, 8)
    middle = {"identity": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU}[activation]()
    plain = nn.Sequential(nn.Linear(16, 32), middle, nn.Linear(32, 8))
    with torch.no_grad():
        for t, linear in enumerate((plain[0], plain[2])):
            linear.weight.copy_(torch.cat([node.W_alloc for node in net.layers[t]]).T)
            linear.bias.copy_(net.layers[t + 1].biases)
    module = net.to_module()
    linears = [layer for layer in module if isinstance(layer, nn.Linear)]
    for model in (net, plain, module):
        model(x).backward(slope)
    allowed = plain_bounds(plain, x, slope)  # for each of the two that are compared
    for model in (net, module, net.snapshot()):
        assert (model(x) - plain(x)).abs().max() <= 2 * allowed["output"]
    for t, linear in enumerate((plain[0], plain[2])):
        of_net = net.transitions[t].weight.grad.view(linear.weight.T.shape).T
        for gradient in (of_net, linears[t].weight.grad):
            assert (gradient - linear.weight.grad).abs().max() <= 2 * allowed[f"∂{t}.weight"]


def test_modules_are_those_of_torch_where_it_has_one():
    names = ["relu", "gelu", "tanh", "sigmoid", "silu", "leaky_relu", "elu", "softplus", "identity"]
    net = gn.GrapNet([2] * 10, activation=names)
    classes = [
        type(module).__name__ for module in net.snapshot() if not isinstance(module, nn.Linear)
    ]
    assert classes == ["ReLU", "GELU", "Tanh", "Sigmoid", "SiLU", "LeakyReLU", "ELU", "Softplus"]
    plain = [
        module
        for module in net.to_module().modules()
        if type(module).__module__.startswith("grapnet")
    ]
    assert plain == []
    own = [
        type(module).__name__
        for module in mixed().snapshot()
        if type(module).__module__.startswith("grapnet")
    ]
    assert own == ["MixedActivation", "MixedActivation"]


def test_matrix_is_zero_where_no_relation_is():
    net = gn.GrapNet.from_relations(
        [2, 3], [([0, 1, 1], [2, 0, 1], [5.0, 6.0, 7.0])], biases=[[1.0, 2.0, 3.0]]
    )
    linear = net.snapshot()[0]
    assert linear.weight.tolist() == [[0, 6], [0, 7], [5, 0]]
    assert linear.bias.tolist() == [1, 2, 3]
    assert (linear.in_features, linear.out_features) == (2, 3)


@every_graph
def test_snapshot_is_detached_and_taking_it_changes_nothing(build):
    net = build(dtype=torch.float64)
    random, before = torch.get_rng_state(), copy.deepcopy(net.state_dict())
    snapshot = net.snapshot()
    assert torch.equal(torch.get_rng_state(), random)
    assert not snapshot.training
    assert not any(tensor.requires_grad for tensor in tensors(snapshot))
    assert {parameter.dtype for parameter in snapshot.parameters()} == {torch.float64}
    assert not addresses(snapshot) & addresses(net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert snapshot.version == net.version


@every_graph
@pytest.mark.parametrize("device", DEVICES)
def test_snapshot_lives_and_follows_where_the_net_is(build, device):
    net = build(dtype=torch.float64).to(device)
    serve, twin, x = (
        gn.SnapshotController(net),
        copy.deepcopy(net.snapshot()).cpu(),
        inputs(net, 5).to(device),
    )
    assert {tensor.device for tensor in tensors(serve.snapshot)} == {net.device}
    assert not twin.is_stale(net)
    step(torch.optim.Adam, fused=True)(net)
    torch.testing.assert_close(serve(x), net(x).detach(), rtol=0, atol=1e-12)
    assert (serve.refreshes, serve.rebuilds) == (1, 0)
    assert twin.is_stale(net)
    net.cpu()
    torch.testing.assert_close(serve(x.cpu()), net(x.cpu()).detach(), rtol=0, atol=1e-12)
    assert serve.rebuilds == (device != "cpu")


@every_graph
def test_module_trains_on_its_own(build):
    net = build()
    module, x, before = net.to_module(), inputs(net, 4), copy.deepcopy(net.state_dict())
    assert type(module) is nn.Sequential
    assert module.training
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in module.parameters())
    assert not addresses(module) & addresses(net)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(module(x), net(x))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_large_matrix_is_refused_and_the_message_says_what_to_do():
    net = gn.GrapNet([3, 2, 10])
    for make in (net.snapshot, net.to_module):
        with pytest.raises(
            gn.PlanError, match=r"transition 1 would hold 20 cells \(limit 19\) .* most_cells=20"
        ):
            make(most_cells=19)
        make(most_cells=20)
    serve = gn.SnapshotController(net, most_cells=20)
    edited(lambda net, edit: edit.add_nodes(2, 1))(net)
    with pytest.raises(gn.PlanError, match="22 cells"):
        serve(inputs(net, 1))
    wide = gn.GrapNet.from_relations([2**15, 2**14], [([0], [0])])
    with pytest.raises(gn.PlanError, match=r"536,870,912 cells .* 2\.0 GiB"):
        wide.snapshot()


def test_attention_is_refused_by_name(monkeypatch):
    net = full()
    serve, snapshot = gn.SnapshotController(net), net.snapshot()
    monkeypatch.setattr(net.execution, "choices", lambda: ["reference", "attention", "reference"])
    assert snapshot.is_stale(net)
    for attempt in (net.snapshot, net.to_module, serve.refresh, lambda: serve(inputs(net, 1))):
        with pytest.raises(gn.PlanError, match="transition 1 runs with attention"):
            attempt()


@pytest.mark.parametrize("density", [1.0, 0.5])
def test_no_snapshot_holds_a_cut_coordinate(density):
    net = gn.GrapNet([5, 4, 3], density=density)
    net.layers[0].outgoing()[3:4].weights = MARK
    serve, module = gn.SnapshotController(net), net.to_module()

    def holders() -> list[bool]:
        serve(inputs(net, 1))
        return [
            any(holds_mark(tensor) for tensor in tensors(m))
            for m in (serve.snapshot, net.snapshot(), net.to_module())
        ]

    assert holders() == [True] * 3
    edited(lambda net, edit: edit.cut(net.layers[0].outgoing()[3:4]))(net)
    assert holders() == [False] * 3
    # made once: it follows nothing
    assert any(holds_mark(tensor) for tensor in module.parameters())


def holds_mark(tensor: Tensor) -> bool:
    return bool((tensor == torch.tensor(MARK, dtype=tensor.dtype)).any())
