"""The activations that nodes name: their functions, their names with numbers, and their modules."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import grapnet as gn

MODULES = {
    "identity": nn.Identity(),
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "silu": nn.SiLU(),
    "mish": nn.Mish(),
    "hardswish": nn.Hardswish(),
    "leaky_relu": nn.LeakyReLU(),
    "elu": nn.ELU(),
    "selu": nn.SELU(),
    "softplus": nn.Softplus(),
    "leaky_relu(0.2)": nn.LeakyReLU(0.2),
    "leaky_relu(0)": nn.LeakyReLU(0.0),
    "leaky_relu(-1e-05)": nn.LeakyReLU(-1e-5),
    "elu(0.5)": nn.ELU(0.5),
    "softplus(2.0)": nn.Softplus(2.0),
    "softplus(2)": nn.Softplus(2.0),
}
Z = torch.linspace(-8, 8, 65, dtype=torch.float64)


def net_with(name: str) -> gn.GrapNet:
    """Returns a net of one relation of weight 1, whose output node has the activation."""
    return gn.GrapNet.from_relations(
        [1, 1], [([0], [0], [1.0])], biases=[[0.0]], activation=[name], dtype=torch.float64
    )


@pytest.mark.parametrize("name", MODULES)
def test_a_node_computes_what_the_module_computes(name):
    net = net_with(name)
    module = MODULES[name]
    mine, theirs = (Z.clone().view(-1, 1).requires_grad_() for _ in range(2))
    outputs = net(mine), module(theirs)
    torch.testing.assert_close(*outputs, rtol=1e-14, atol=1e-14)
    for output in outputs:
        output.sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(net.walk(Z.view(-1, 1)), outputs[0])


def test_quick_gelu_is_the_one_of_clip():
    torch.testing.assert_close(
        net_with("quick_gelu")(Z.view(-1, 1)).view(-1), Z * torch.sigmoid(1.702 * Z)
    )
    assert not torch.allclose(
        net_with("quick_gelu")(Z.view(-1, 1)).view(-1), functional.gelu(Z), atol=0.01
    )


@pytest.mark.parametrize("name", [*MODULES, "quick_gelu"])
def test_to_module_and_back_keeps_the_function(name):
    net = net_with(name)
    again = gn.from_module(net.to_module())
    torch.testing.assert_close(again(Z.view(-1, 1)), net(Z.view(-1, 1)), rtol=0, atol=0)
    torch.testing.assert_close(net.snapshot()(Z.view(-1, 1)), net(Z.view(-1, 1)))


@pytest.mark.parametrize("name", ["leaky_relu(0.2)", "softplus(2.0)", "quick_gelu", "hardswish"])
def test_a_checkpoint_and_an_edit_take_the_name(name, tmp_path):
    net = gn.GrapNet([3, 4, 2])
    with net.edit() as edit:
        edit.set_activation(net.layers[1][[0, 2]], name)
    assert net.layers[1].activations == [name, "relu", name, "relu"]
    gn.save(tmp_path / "net", net)
    other = gn.load(tmp_path / "net")
    assert other.layers[1].activations == net.layers[1].activations
    x = torch.randn(5, 3)
    assert torch.equal(other(x), net(x))


WRONG = ["nothing", "", "relu(0.1)", "leaky_relu()", "leaky_relu(nan)", "leaky_relu(0.1", None]


@pytest.mark.parametrize("name", WRONG, ids=repr)
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="activation"):
        gn.GrapNet([2, 2], activation=[name])
    net = gn.GrapNet([2, 2])
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.set_activation(net.layers[1], name)
    assert net.version == 0
    assert net.layers[1].activations == ["identity"] * 2


def test_a_name_of_ones_own():
    gn.execution.register_activation("wave", torch.sin)
    gn.execution.register_activation("wave", torch.sin)
    with pytest.raises(ValueError, match="'wave' exists already"):
        gn.execution.register_activation("wave", torch.cos)
    torch.testing.assert_close(net_with("wave")(Z.view(-1, 1)).view(-1), Z.sin())
    torch.testing.assert_close(net_with("wave").to_module()(Z.view(-1, 1)).view(-1), Z.sin())
