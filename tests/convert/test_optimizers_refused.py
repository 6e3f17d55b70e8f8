"""Optimizers that cannot go on with nets: refused, with nothing changed."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, SparseAdam
from torch.optim.lr_scheduler import LambdaLR

import grapnet as gn

from .models import make, picture, train

FFN = "blocks.*.ffn"


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.02, weight_decay=0.1)


def trained() -> tuple[nn.Module, AdamW]:
    """Returns a model in the middle of training, and its optimizer."""
    model = make()
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(3))
    return model, optimizer


def refused(kind: Any, model: nn.Module) -> Any:
    if kind is torch.optim.LBFGS:
        return kind(model.parameters())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return kind(matrices, lr=0.01)


REFUSED = [torch.optim.LBFGS, Adafactor, SparseAdam] + (
    [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []
)


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizers_that_cannot_follow_are_refused_with_nothing_changed(kind):
    model = make()
    good = adamw(model.parameters())
    train(model, good, range(2))
    bad = refused(kind, model)
    if kind not in (torch.optim.LBFGS, SparseAdam):
        bad.step()
    before = picture(model, good, bad)
    with pytest.raises(gn.OptimizerError, match=kind.__name__):
        gn.graft(model, FFN, [good, bad])
    assert picture(model, good, bad) == before
    with pytest.raises(gn.OptimizerError, match=kind.__name__):
        gn.from_module(model.head, [good, bad])
    assert picture(model, good, bad) == before
    gn.graft(model, FFN, good)
    before = picture(model, good, bad)
    with pytest.raises(gn.OptimizerError, match=kind.__name__):
        gn.ungraft(model, optimizer=[good, bad])
    assert picture(model, good, bad) == before


def test_an_optimizer_of_something_else_is_refused():
    model, optimizer = trained()
    stranger = Adam(make().parameters())
    schedule = LambdaLR(stranger, lambda _: 1.0)
    before = picture(model, optimizer, stranger)
    with pytest.raises(gn.OptimizerError, match="none of the parameters"):
        gn.graft(model, FFN, [optimizer, stranger])
    with pytest.raises(TypeError, match="LambdaLR"):
        gn.graft(model, FFN, [schedule])
    assert picture(model, optimizer, stranger) == before


def test_state_that_is_not_one_value_a_coordinate_is_refused():
    class Rows(SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p]["rows"] = torch.ones(len(p), 7)

    model = make()
    optimizer = Rows(model.parameters(), lr=0.1)
    optimizer.step()
    before = picture(model, optimizer)
    with pytest.raises(gn.OptimizerError, match="'rows'"):
        gn.graft(model, FFN, optimizer)
    assert picture(model, optimizer) == before


def test_an_optimizer_left_behind_by_an_edit_is_refused():
    model, optimizer = trained()
    nets = gn.graft(model, FFN, optimizer)
    net = nets["blocks.0.ffn"]
    gn.detach(optimizer, net)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=7))
    before = picture(model, optimizer)
    with pytest.raises(gn.OptimizerError, match="an edit has moved"):
        gn.ungraft(model, optimizer=optimizer)
    with pytest.raises(gn.OptimizerError, match="an edit has moved"):
        gn.graft(model, "head", optimizer)
    assert picture(model, optimizer) == before


def test_an_optimizer_of_replaced_parameters_is_refused_after_edits_elsewhere_too():
    net = gn.GrapNet([3, 4, 2])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    gn.graft(model, "1")
    before = model[0].weight.detach().clone()
    for _ in range(4):
        # Each edit moves the weights of one transition of another net.
        with net.edit() as edit:
            edit.cut(net.layers[0].outgoing()[:1])
        with pytest.raises(gn.OptimizerError):
            optimizer.step()
    assert torch.equal(model[0].weight, before)
