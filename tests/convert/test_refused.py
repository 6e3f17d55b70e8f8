"""gn.from_module and gn.graft: what is refused by name, with nothing changed."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import grapnet as gn

from .models import picture


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


def _with_a_buffer() -> nn.Linear:
    linear = nn.Linear(3, 3)
    linear.register_buffer("scale", torch.ones(3))
    return linear


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


def _parametrized() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 3))
    parametrize.register_parametrization(module[0], "weight", Halved())
    return module


def _row(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), *modules)


def _hooked(register: str) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    getattr(module[1], register)(lambda *_: None)
    return module


def _tensor_hooked(register: str) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    getattr(module[1].weight, register)(lambda _: None)
    return module


# what is refused, and the name of the module inside that is the reason
REFUSED = {
    "batch norm": (lambda: _row(nn.BatchNorm1d(3)), "1"),
    "nested norm": (lambda: _row(nn.Sequential(nn.ReLU(), nn.GroupNorm(1, 3))), "1.1"),
    "conv": (lambda: _row(nn.Conv1d(1, 1, 1)), "1"),
    "bilinear": (lambda: nn.Bilinear(2, 2, 2), ""),
    "prelu": (lambda: _row(nn.PReLU()), "1"),
    "rrelu": (lambda: _row(nn.RReLU()), "1"),
    "infinite elu": (lambda: _row(nn.ELU(float("inf"))), "1"),
    "softplus with a threshold": (lambda: _row(nn.Softplus(threshold=3)), "1"),
    "other dropout": (lambda: _row(nn.AlphaDropout(0.1)), "1"),
    "out_proj": (lambda: _row(nn.MultiheadAttention(4, 2).out_proj), "1"),
    "embedding": (lambda: nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3)), "0"),
    "a net inside": (lambda: nn.Sequential(gn.GrapNet([3, 3])), "0"),
    "parametrized": (_parametrized, "0"),
    "old spectral norm": (lambda: _row(nn.utils.spectral_norm(nn.Linear(3, 3))), "1"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "0"),
    "forward hook": (lambda: _hooked("register_forward_hook"), "1"),
    "backward pre-hook": (lambda: _hooked("register_full_backward_pre_hook"), "1"),
    "state-dict hook": (lambda: _hooked("register_load_state_dict_post_hook"), "1"),
    "gradient hook": (lambda: _tensor_hooked("register_hook"), "1"),
    "hook after a gradient": (lambda: _tensor_hooked("register_post_accumulate_grad_hook"), "1"),
    "forward of its own": (_replaced_forward, ""),
    "shared weight": (_shared_weight, "0"),
    "one linear twice": (_twice, "0"),
    "dropout before gelu": (lambda: _row(nn.Dropout(0.1), nn.GELU()), "2"),
    "two dropouts": (lambda: _row(nn.Dropout(0.1), nn.Dropout(0.1)), "2"),
    "two activations": (lambda: _row(nn.ReLU(), nn.Tanh()), "2"),
    "activation first": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), "0"),
    "sizes that do not fit": (lambda: _row(nn.Linear(4, 2)), "1"),
    "dtypes": (lambda: _row(nn.Linear(3, 3).double()), "1"),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), ""),
    "complex": (lambda: nn.Linear(3, 3, dtype=torch.complex64), ""),
    "a buffer": (_with_a_buffer, ""),
    "halves": (_masked_by_halves, ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_with_nothing_changed(case):
    build, inside = REFUSED[case]
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    before = picture(module, optimizer)
    with pytest.raises(gn.errors.ConversionError):
        gn.from_module(module, optimizer)
    assert picture(module, optimizer) == before
    name = re.escape(f"'inner.{inside}".removesuffix("."))
    with pytest.raises(gn.errors.ConversionError, match=name):
        gn.graft(nn.ModuleDict({"inner": module}), "inner", optimizer)
    assert picture(module, optimizer) == before


@pytest.mark.parametrize("module", [nn.Sequential(), nn.Linear(3, 4).state_dict()])
def test_what_has_no_linear_is_refused(module):
    with pytest.raises(gn.errors.ConversionError):
        gn.from_module(module)
