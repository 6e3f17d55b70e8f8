"""gn.check of a model: which module cannot run after an edit, with nothing changed."""

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn

from .models import picture


class Noisy(nn.Module):
    """Counts its calls in a buffer, in place and anew, and draws random numbers."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.calls = self.calls + 1
        return x + torch.rand(()) * 0


def grafted() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), Noisy(), nn.Linear(16, 3)
    )
    net = gn.graft(model, nn.Linear)["0"]
    with net.edit(reason="freeze some") as edit:
        edit.freeze(net.layers[0].outgoing()[:20])
    model[2].eval()
    return model


def test_a_check_changes_nothing():
    model = grafted()
    x = torch.randn(5, 8)
    before = picture(model)
    gn.check(model, x)
    assert picture(model) == before
    model(x)  # the same run without the check leaves traces
    assert picture(model) != before


def test_the_module_that_cannot_run_is_named_and_nothing_is_changed():
    model = grafted()
    x = torch.randn(5, 8)
    with model[0].edit(reason="narrower") as edit:
        edit.remove_nodes(model[0].layers[1][:4], interface=True)
    before = picture(model)
    with pytest.raises(gn.errors.EditError, match=r"'1' \(BatchNorm1d\).*\[5, 12\]") as raised:
        gn.check(model, x)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert picture(model) == before
    gn.check(model)  # the graphs themselves are right
    model[0].undo()
    gn.check(model, input=x)


def test_a_net_inside_of_a_model_is_checked():
    model = grafted()
    model[0]._next_uid = 3
    with pytest.raises(gn.errors.InvariantError):
        gn.check(model)
