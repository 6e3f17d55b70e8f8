"""A part that `torch.compile(part)` holds cannot be replaced: the wrapper would go on with the
module it was given.
"""

import pytest
import torch
from torch import nn

import grapnet as gn

from .models import picture


def wrapped(part: nn.Module) -> nn.Module:
    return torch.compile(part, backend="eager")


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("where", [nn.Sequential, "1._orig_mod", "*"])
def test_a_compiled_part_is_not_grafted(where):
    model = nn.Sequential(nn.Linear(4, 12), wrapped(stack()))
    # what comes before it is left alone too
    where = where if where != "*" else [nn.Linear, "1._orig_mod"]
    optimizer = torch.optim.Adam(model.parameters())
    before = picture(model)
    with pytest.raises(gn.errors.ConversionError, match=r"'1\._orig_mod'"):
        gn.graft(model, where, optimizer)
    assert picture(model) == before
    model[1] = model[1]._orig_mod  # as the error says
    gn.graft(model, nn.Sequential)


def test_a_module_that_is_compiled_under_another_name_is_not_grafted():
    part = stack()
    model = nn.ModuleDict({"plain": part, "fast": wrapped(part)})
    with pytest.raises(gn.errors.ConversionError, match="'plain'"):
        gn.graft(model, "plain")
    assert model["plain"] is part


@pytest.mark.parametrize("grafted", [True, False])
def test_a_compiled_net_is_not_ungrafted(grafted):
    model = nn.Sequential(nn.Linear(4, 12), stack() if grafted else gn.GrapNet([12, 6, 2]))
    if grafted:
        gn.graft(model, nn.Sequential)
    net = model[1]
    model[1] = wrapped(net)
    before = picture(model)
    with pytest.raises(gn.errors.ConversionError, match=r"'1\._orig_mod'"):
        gn.ungraft(model)
    assert picture(model) == before
    model[1] = net
    assert list(gn.ungraft(model)) == ["1"]
