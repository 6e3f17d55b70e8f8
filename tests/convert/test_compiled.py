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
    optimizer, before = torch.optim.Adam(model.parameters()), picture(model)
    with pytest.raises(
        gn.ConversionError,
        match=r"'1\._orig_mod' was compiled by torch\.compile\(part\).*afterwards",
    ):
        gn.graft(model, where, optimizer)
    assert picture(model) == before
    model[1] = model[1]._orig_mod  # as the error says
    gn.graft(model, nn.Sequential)


def test_a_module_that_is_compiled_under_another_name_is_not_grafted():
    part = stack()
    model = nn.ModuleDict({"plain": part, "fast": wrapped(part)})
    with pytest.raises(gn.ConversionError, match="'plain' was compiled"):
        gn.graft(model, "plain")
    assert model["plain"] is part


def test_all_of_a_compiled_model_is_not_grafted():
    model = wrapped(stack())
    before = picture(model)
    with pytest.raises(
        gn.ConversionError, match=r"all that torch\.compile\(model\) was given.*before.*from_module"
    ):
        gn.graft(model, nn.Sequential)
    assert picture(model) == before
    wrapped(gn.from_module(model._orig_mod))  # as the error says


@pytest.mark.parametrize("grafted", [True, False])
def test_a_compiled_net_is_not_ungrafted(grafted):
    model = nn.Sequential(nn.Linear(4, 12), stack() if grafted else gn.GrapNet([12, 6, 2]))
    if grafted:
        gn.graft(model, nn.Sequential)
    net = model[1]
    model[1] = wrapped(net)
    before = picture(model)
    with pytest.raises(gn.ConversionError, match=r"'1\._orig_mod' was compiled by torch\.compile"):
        gn.ungraft(model)
    assert picture(model) == before
    model[1] = net
    assert list(gn.ungraft(model)) == ["1"]


@torch.no_grad()
def test_what_a_compiled_part_holds_further_inside_is_replaced():
    model, x = nn.Sequential(nn.Linear(4, 12), wrapped(stack())), torch.ones(3, 4)
    before = model(x)
    net = gn.graft(model, "1._orig_mod.2")["1._orig_mod.2"]
    torch.testing.assert_close(model(x), before)
    with net.edit(allow_dead=True) as edit:
        edit.cut(net.layers[0].outgoing())
    torch.testing.assert_close(model(x), net.layers[1].bias.expand(3, 2))
