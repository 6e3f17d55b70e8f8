"""gn.from_module and gn.graft: what is refused by name, with nothing changed."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import grapnet as gn

from .models import picture


def _hooked(register: str) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    getattr(module[1], register)(lambda *_: None)
    return module


def _tensor_hooked(register: str) -> nn.Linear:
    linear = nn.Linear(3, 3)
    getattr(linear.weight, register)(lambda _: None)
    return linear


def _replaced_forward() -> nn.Linear:
    linear = nn.Linear(3, 3)
    linear.forward = torch.abs
    return linear


def _shared_weight() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    return module


def _twice() -> nn.Sequential:
    linear = nn.Linear(3, 3)
    return nn.Sequential(linear, nn.ReLU(), linear)


def _masked_by_halves() -> nn.Linear:
    linear = nn.Linear(3, 3)
    nn.utils.prune.custom_from_mask(linear, "weight", torch.full((3, 3), 0.5))
    return linear


def _bias_as_a_buffer() -> nn.Linear:
    linear = nn.Linear(3, 3)
    del linear.bias
    linear.register_buffer("bias", torch.ones(3))
    return linear


def _with_a_buffer() -> nn.Linear:
    linear = nn.Linear(3, 3)
    linear.register_buffer("scale", torch.ones(3))
    return linear


def _old_weight_norm() -> nn.Linear:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(nn.Linear(3, 3))


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


def _parametrized() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 3))
    parametrize.register_parametrization(module[0], "weight", Halved())
    return module


def _row(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), *modules)


REFUSED = {
    "batch norm": (lambda: _row(nn.BatchNorm1d(3)), r"'1' \(BatchNorm1d\)"),
    "layer norm": (lambda: _row(nn.ReLU(), nn.LayerNorm(3)), r"'2' \(LayerNorm\)"),
    "nested norm": (
        lambda: _row(nn.Sequential(nn.ReLU(), nn.GroupNorm(1, 3))),
        r"'1.1' \(GroupNorm\)",
    ),
    "conv": (lambda: _row(nn.Conv1d(1, 1, 1)), r"'1' \(Conv1d\)"),
    "conv alone": (lambda: nn.Conv2d(1, 1, 1), r"the module \(Conv2d\)"),
    "softmax": (lambda: _row(nn.Softmax(-1)), r"'1' \(Softmax\)"),
    "prelu": (lambda: _row(nn.PReLU()), r"'1' \(PReLU\)"),
    "rrelu": (lambda: _row(nn.RReLU()), r"'1' \(RReLU\)"),
    "infinite elu": (lambda: _row(nn.ELU(float("inf"))), r"'1' \(ELU\)"),
    "softplus with a threshold": (lambda: _row(nn.Softplus(threshold=3)), r"'1' \(Softplus\)"),
    "other dropout": (lambda: _row(nn.AlphaDropout(0.1)), r"'1' \(AlphaDropout\)"),
    "bilinear": (lambda: nn.Bilinear(2, 2, 2), r"the module \(Bilinear\)"),
    "out_proj": (
        lambda: _row(nn.MultiheadAttention(4, 2).out_proj),
        r"'1' \(NonDynamicallyQuantizableLinear\)",
    ),
    "out_proj alone": (
        lambda: nn.MultiheadAttention(4, 2).out_proj,
        "NonDynamicallyQuantizableLinear",
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3)),
        r"'0' \(Embedding\)",
    ),
    "a net inside": (lambda: nn.Sequential(gn.GrapNet([3, 3])), r"'0' \(GrapNet\)"),
    "parametrized": (_parametrized, r"'0' \(ParametrizedLinear\)"),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 3)), "ParametrizedLinear"),
    "old weight norm": (_old_weight_norm, "weight_g, weight_v"),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
        "ParametrizedLinear",
    ),
    "old spectral norm": (
        lambda: _row(nn.utils.spectral_norm(nn.Linear(3, 3))),
        "weight of '1' is computed",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"'0' \(LazyLinear\)"),
    "forward hook": (lambda: _hooked("register_forward_hook"), "'1' has hooks"),
    "forward pre-hook": (lambda: _hooked("register_forward_pre_hook"), "'1' has hooks"),
    "backward hook": (lambda: _hooked("register_full_backward_hook"), "'1' has hooks"),
    "backward pre-hook": (lambda: _hooked("register_full_backward_pre_hook"), "'1' has hooks"),
    "state-dict hook": (lambda: _hooked("register_load_state_dict_post_hook"), "'1' has hooks"),
    "gradient hook": (lambda: _tensor_hooked("register_hook"), "weight of 'Linear' has hooks"),
    "hook after a gradient": (
        lambda: _tensor_hooked("register_post_accumulate_grad_hook"),
        "weight of 'Linear' has",
    ),
    "forward of its own": (_replaced_forward, "forward of its own"),
    "shared weight": (_shared_weight, "'0', '2' share a parameter"),
    "one linear twice": (_twice, "'0', '2' share a parameter"),
    "dropout before gelu": (lambda: _row(nn.Dropout(0.1), nn.GELU()), "'2' follows a Dropout"),
    "dropout before relu6": (lambda: _row(nn.Dropout(0.1), nn.ReLU6()), "'2' follows a Dropout"),
    "two dropouts": (lambda: _row(nn.Dropout(0.1), nn.Dropout(0.1)), "'2' follows another Dropout"),
    "two activations": (lambda: _row(nn.ReLU(), nn.Tanh()), "'2' follows another activation"),
    "activation first": (
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(3, 3)),
        "'0' comes before the first nn.Linear",
    ),
    "empty": (nn.Sequential, "holds no nn.Linear"),
    "dropout alone": (lambda: nn.Sequential(nn.Dropout(0.1)), "holds no nn.Linear"),
    "sizes that do not fit": (
        lambda: _row(nn.Linear(4, 2)),
        "'1' takes 4 inputs, and 3 come out before it",
    ),
    "dtypes": (
        lambda: _row(nn.Linear(3, 3).double()),
        "of several kinds: torch.float32 on cpu, torch.float64 on cpu",
    ),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), "on meta"),
    "complex": (lambda: nn.Linear(3, 3, dtype=torch.complex64), "torch.complex64"),
    "bias as a buffer": (_bias_as_a_buffer, "the bias of 'Linear' is computed from something else"),
    "a buffer": (_with_a_buffer, "'Linear' has buffers, which would be lost: scale"),
    "halves": (_masked_by_halves, "factors other than 0 and 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_with_nothing_changed(case):
    build, message = REFUSED[case]
    module = build()
    parameters = list(module.parameters()) or [nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters, momentum=0.9)
    before = picture(module, optimizer)
    with pytest.raises(gn.ConversionError, match=message):
        gn.from_module(module, optimizer)
    assert picture(module, optimizer) == before
    with pytest.raises(gn.ConversionError, match="inner"):
        gn.graft(nn.ModuleDict({"inner": module}), "inner", optimizer)
    assert picture(module, optimizer) == before


class Own(nn.Module):
    """An MLP with a forward of its own."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.act = activation

    def forward(self, x):
        return self.fc_out(self.act(self.fc_in(x)))


def test_the_linears_of_an_own_class_are_grafted_instead():
    model, x = Own(nn.Tanh()), torch.randn(6, 4)
    with pytest.raises(gn.ConversionError, match=r"Own.*gn\.graft\(model, nn\.Linear\)"):
        gn.from_module(model)
    with pytest.raises(gn.ConversionError, match="'a'"):
        gn.graft(nn.ModuleDict({"a": model}), "a")
    expected = model(x)
    assert list(gn.graft(model, nn.Linear)) == ["fc_in", "fc_out"]
    torch.testing.assert_close(model(x), expected)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="state dict"):
        gn.from_module(nn.Linear(3, 4).state_dict())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="int"):
        gn.from_module(3)  # pyright: ignore[reportArgumentType]


def test_an_unknown_activation_becomes_one_of_nodes():
    stack, x = nn.Sequential(nn.Linear(3, 4), nn.Softsign(), nn.Linear(4, 2)), torch.randn(5, 3)
    with pytest.raises(gn.ConversionError, match=r"'1' \(Softsign\).*gn\.register_activation"):
        gn.from_module(stack)
    gn.register_activation("softsign", nn.functional.softsign)
    net = gn.from_module(nn.Sequential(stack[0], nn.Identity(), stack[2]))
    with net.edit() as edit:
        edit.set_activation(net.layers[1], "softsign")
    torch.testing.assert_close(net(x), stack(x))
