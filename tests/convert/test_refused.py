"""gn.from_module and gn.graft: what is refused by name, with nothing changed."""

import re

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
    "batch norm": (lambda: _row(nn.BatchNorm1d(3)), "'1' is a BatchNorm1d, whose statistics"),
    "layer norm": (lambda: _row(nn.ReLU(), nn.LayerNorm(3)), "'2' is a LayerNorm"),
    "nested norm": (
        lambda: _row(nn.Sequential(nn.ReLU(), nn.GroupNorm(1, 3))),
        "'1.1' is a GroupNorm",
    ),
    "conv": (lambda: _row(nn.Conv1d(1, 1, 1)), "'1' is a Conv1d"),
    "conv alone": (lambda: nn.Conv2d(1, 1, 1), "the module is a Conv2d"),
    "softmax": (lambda: _row(nn.Softmax(-1)), "'1' is a Softmax, neither"),
    "prelu": (lambda: _row(nn.PReLU()), "'1' is a PReLU"),
    "rrelu": (lambda: _row(nn.RReLU()), "'1' is an RReLU"),
    "infinite elu": (lambda: _row(nn.ELU(float("inf"))), "'1' is an ELU"),
    "softplus with a threshold": (lambda: _row(nn.Softplus(threshold=3)), "'1' is a Softplus"),
    "other dropout": (lambda: _row(nn.AlphaDropout(0.1)), "'1' is an AlphaDropout"),
    "bilinear": (lambda: nn.Bilinear(2, 2, 2), "the module is a Bilinear"),
    "out_proj": (
        lambda: _row(nn.MultiheadAttention(4, 2).out_proj),
        "'1' is a NonDynamicallyQuantizableLinear",
    ),
    "out_proj alone": (
        lambda: nn.MultiheadAttention(4, 2).out_proj,
        "is a NonDynamicallyQuantizableLinear",
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3)),
        "'0' is an Embedding",
    ),
    "a net inside": (lambda: nn.Sequential(gn.GrapNet([3, 3])), "'0' is a GrapNet"),
    "parametrized": (_parametrized, "'0' is a ParametrizedLinear"),
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
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "'0' is a LazyLinear"),
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
    """An MLP whose forward nobody can read."""

    def __init__(self, activation: nn.Module | None, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.act, self.inner = activation, inner

    def forward(self, x):
        return self.fc_out((self.act or nn.ReLU())(self.fc_in(x)))


@pytest.mark.parametrize("activation", [None, nn.Tanh()])
def test_an_own_class_is_told_how_to_become_a_net(activation):
    model, x = Own(activation), torch.randn(6, 4)
    with pytest.raises(gn.ConversionError, match="is an Own") as refused:
        gn.from_module(model)
    told = re.findall(r"gn\.\w+\(.*?\)(?=, or|$)", str(refused.value))
    between = "nn.ReLU()" if activation is None else "model.act"
    assert told == [
        f"gn.from_module(nn.Sequential(model.fc_in, {between}, model.fc_out))",
        "gn.graft(model, nn.Linear)",
    ]
    expected = model(x)
    torch.testing.assert_close(eval(told[0])(x), expected)
    assert list(eval(told[1])) == ["fc_in", "fc_out"]
    torch.testing.assert_close(model(x), expected)


class Reordered(nn.Module):
    """Its Linears do not run in the order in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(5, 3), nn.Linear(4, 5)


class OddlyNamed(nn.Module):
    """Its children have names that Python does not take as attributes."""

    def __init__(self) -> None:
        super().__init__()
        for name, linear in {
            "class": nn.Linear(4, 5),
            "a-b": nn.Linear(5, 5),
            "0": nn.Linear(5, 3),
        }.items():
            self.add_module(name, linear)


def test_what_an_own_class_is_told_can_be_run():
    with pytest.raises(gn.ConversionError, match="is a Reordered") as refused:
        gn.from_module(Reordered())
    assert "nn.Sequential(" not in str(refused.value).partition(". ")[2]
    model = OddlyNamed()
    with pytest.raises(gn.ConversionError, match="is an OddlyNamed") as refused:
        gn.from_module(model)
    told = re.findall(r"gn\.from_module\(.*\)(?=, or)", str(refused.value))
    assert eval(told[0]).sizes == [4, 5, 5, 3]


def test_an_own_class_that_holds_more_or_stands_in_a_model_is_grafted():
    with pytest.raises(
        gn.ConversionError, match=r"Make nets of the Linears in it: gn\.graft\(model, nn\.Linear\)"
    ):
        gn.from_module(Own(None, nn.Conv1d(1, 1, 1)))
    with pytest.raises(
        gn.ConversionError, match=r'gn\.graft\(model, \["a\.fc_in", "a\.fc_out"\]\)'
    ):
        gn.graft(nn.ModuleDict({"a": Own(None)}), "a")


@pytest.mark.parametrize(
    ("stack", "way"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), "a net of the modules after it"),
        (lambda: _row(nn.LogSoftmax(-1)), "nets of the modules before it and after it"),
        (lambda: _row(nn.Conv1d(1, 1, 1)), "nets of the modules before it and after it"),
        (lambda: _row(nn.RReLU()), "nets of the modules before it and after it"),
    ],
)
def test_what_is_no_activation_is_left_outside(stack, way):
    with pytest.raises(gn.ConversionError) as refused:
        gn.from_module(stack())
    assert (
        f"Leave it outside: make {way}, or of every Linear around it: gn.graft(model, nn.Linear)"
        in str(refused.value)
    )
    assert "register_activation" not in str(refused.value)


def test_what_is_no_module_is_told_to_become_one():
    with pytest.raises(
        TypeError, match=r"no activations\. Build the module .*grapnet convert FILE"
    ):
        gn.from_module(nn.Linear(3, 4).state_dict())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="takes a module, not an int"):
        gn.from_module(3)  # pyright: ignore[reportArgumentType]


def test_an_own_activation_with_a_name_that_is_taken_is_told_another():
    stack = nn.Sequential(nn.Linear(3, 4), type("GELU", (Halved,), {})(), nn.Linear(4, 2))
    with pytest.raises(
        gn.ConversionError, match=r'gn\.register_activation\("own_gelu", function\)'
    ):
        gn.from_module(stack)


def test_an_unknown_activation_is_told_how_to_become_one_of_nodes():
    stack, x = nn.Sequential(nn.Linear(3, 4), nn.Softsign(), nn.Linear(4, 2)), torch.randn(5, 3)
    with pytest.raises(gn.ConversionError) as refused:
        gn.from_module(stack)
    for way in (
        'gn.register_activation("softsign", function)',
        'edit.set_activation(net.layers[1], "softsign")',
    ):
        assert way in str(refused.value)
    gn.register_activation("softsign", nn.functional.softsign)
    net = gn.from_module(nn.Sequential(stack[0], nn.Identity(), stack[2]))
    with net.edit() as edit:
        edit.set_activation(net.layers[1], "softsign")
    torch.testing.assert_close(net(x), stack(x))
