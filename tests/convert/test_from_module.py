"""gn.from_module: what a stack of plain modules becomes, and the way back."""

import pytest
import torch
from torch import nn

import grapnet as gn

from .models import picture

ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.ReLU6(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.SiLU(),
    nn.SiLU(inplace=True),
    nn.Mish(),
    nn.Hardswish(),
    nn.LeakyReLU(),
    nn.LeakyReLU(0.2, inplace=True),
    nn.LeakyReLU(1 / 3),
    nn.ELU(),
    nn.ELU(0.5),
    nn.SELU(),
    nn.Softplus(),
    nn.Softplus(beta=2),
    nn.Identity(),
]


def stack() -> nn.Sequential:
    """Returns a stack with a bit of everything, nested."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Dropout(0.1),
        nn.Linear(6, 8),
        nn.Identity(),
        nn.Sequential(
            nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Sequential(nn.Linear(8, 7, bias=False))
        ),
        nn.Dropout(0.2),
        nn.ReLU(inplace=True),
        nn.Linear(7, 3),
        nn.Dropout(0.0),
    )


def require_equal(module: nn.Module, net: gn.GrapNet, *, tolerance: float = 1e-12) -> None:
    """Asserts equal outputs, input gradients and parameter gradients, with the same numbers
    dropped.
    """
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    x = torch.randn(2, 5, linears[0].in_features, generator=torch.Generator().manual_seed(1)).to(
        linears[0].weight
    )
    mine = x.clone().requires_grad_()
    theirs = x.clone().requires_grad_()
    module.zero_grad()
    outputs = []
    for run, given in ((net, mine), (module, theirs)):
        torch.manual_seed(2)
        outputs.append(run(given))
        outputs[-1].square().sum().backward()
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(outputs[0], outputs[1], **close)
    torch.testing.assert_close(mine.grad, theirs.grad, **close)
    for transition, layer, linear in zip(
        net.transitions, list(net.layers)[1:], linears, strict=True
    ):
        if linear.weight.requires_grad:
            torch.testing.assert_close(
                transition.weight.grad.view(linear.weight.t().shape).t(),
                linear.weight.grad,
                **close,
            )
        if linear.bias is not None and linear.bias.requires_grad:
            torch.testing.assert_close(layer.bias.grad, linear.bias.grad, **close)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_becomes_a_net_and_a_linear_again(bias):
    linear = nn.Linear(4, 3, bias=bias, dtype=torch.float64)
    net = gn.from_module(linear)
    gn.check(net)
    assert net.sizes == [4, 3]
    assert net.count().relations == 12
    assert net.count().frozen == (0 if bias else 3)
    require_equal(linear, net)
    (back,) = net.to_module()
    assert repr(back) == repr(linear)
    assert all(
        torch.equal(back.state_dict()[key], value) for key, value in linear.state_dict().items()
    )


@pytest.mark.parametrize("training", [True, False])
def test_a_nested_stack_computes_the_same_in_both_modes(training):
    module = stack().double().train(training)
    net = gn.from_module(module)
    gn.check(net)
    assert net.training == training
    assert net.sizes == [6, 8, 7, 3]
    assert [layer.dropout for layer in net.layers] == [0.1, 0.3, 0.2, 0.0]
    require_equal(module, net)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_every_activation_computes_the_same_there_and_back(activation):
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(5, 6), activation, nn.Linear(6, 2)).double()
    net = gn.from_module(module)
    require_equal(module, net)
    back = net.to_module()
    x = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(back(x), module(x), rtol=1e-12, atol=1e-12)


def test_activations_with_other_numbers_are_told_apart():
    nets = [
        gn.from_module(nn.Sequential(nn.Linear(1, 1), activation)) for activation in ACTIVATIONS
    ]
    names = [net.layers[1].activations[0] for net in nets]
    assert len(set(names)) == len(ACTIVATIONS) - 2  # two differ from others by inplace alone
    assert {"leaky_relu(0.2)", "elu(0.5)", "softplus(2.0)", "gelu_tanh"} <= set(names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    module = stack().eval().to(dtype)
    net = gn.from_module(module)
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}
    require_equal(module, net, tolerance=1e-5 if dtype == torch.float32 else 0.05)


def test_the_module_itself_stays_and_shares_nothing():
    module = stack()
    before = picture(module)
    net = gn.from_module(module)
    assert picture(module) == before
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    assert picture(module) == before


def test_flags_and_gradients_are_carried():
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))
    module[0].bias.requires_grad_(False)
    module(torch.randn(3, 4)).sum().backward()
    net = gn.from_module(module)
    assert net.transitions[0].weight.requires_grad
    assert not net.layers[1].bias.requires_grad
    assert torch.equal(net.transitions[0].weight.grad.view(4, 5), module[0].weight.grad.t())
    assert torch.equal(net.transitions[1].weight.grad.view(5, 2), module[2].weight.grad.t())
    assert net.layers[1].bias.grad is None
    assert net.transitions[0].weight.grad.data_ptr() != module[0].weight.grad.data_ptr()


@pytest.mark.parametrize("bias", [True, False])
def test_what_needs_no_gradient_asks_for_none(bias):
    net = gn.from_module(nn.Linear(4, 3, bias=bias).requires_grad_(False))
    assert not net(torch.randn(2, 4)).requires_grad


def test_a_dropout_in_another_mode_keeps_it():
    module = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.ReLU(), nn.Linear(50, 2))
    module[1].eval()
    net = gn.from_module(module)
    x = torch.randn(3, 4)
    torch.testing.assert_close(net(x), module(x))
    assert not torch.equal(net.train()(x), module(x))


def test_a_class_of_sequential_is_one_unless_it_runs_otherwise():
    class Stack(nn.Sequential):
        pass

    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    assert gn.from_module(Stack(nn.Linear(2, 2))).sizes == [2, 2]
    with pytest.raises(gn.errors.ConversionError, match="Twice"):
        gn.from_module(Twice(nn.Linear(2, 2)))


def test_a_registered_activation_goes_there_and_back():
    gn.execution.register_activation("cubed", _cubed)
    net = gn.GrapNet([3, 4, 2], activation="cubed")
    again = gn.from_module(net.to_module())
    assert again.layers[1].activations == ["cubed"] * 4
    x = torch.randn(5, 3)
    torch.testing.assert_close(again(x), net(x))


def _cubed(z: torch.Tensor) -> torch.Tensor:
    return z**3


def test_with_the_optimizer_a_loss_of_before_is_refused():
    module = stack()
    x = torch.randn(3, 6)
    optimizer = torch.optim.SGD(module.parameters())
    loss = module(x).sum()
    gn.from_module(module)
    loss.backward(retain_graph=True)  # the module is trained on
    gn.from_module(module, optimizer)
    with pytest.raises(
        gn.errors.StaleTopologyError, match=r"before gn\.from_module exchanged the parameters"
    ):
        loss.backward()
    module(x).sum().backward()
