"""A graft or an ungraft that fails anywhere leaves the model and its optimizers bit-identical."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import grapnet as gn

from .models import backward, make, picture, train


class Refuses(SGD):
    """Holds state that no coordinate has, of one Parameter."""

    def spoil(self, parameter: nn.Parameter) -> None:
        self.state[parameter]["whole"] = torch.zeros(5, 5, 5)


def trained() -> tuple[nn.Module, AdamW]:
    model = make()
    optimizer = AdamW(model.named_parameters(), lr=0.02)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    backward(model, 2)
    return model, optimizer


def hook_the_last(model: nn.Module) -> None:
    model.head.register_forward_hook(lambda *_: None)


def tie_the_last(model: nn.Module) -> None:
    model.other = nn.Linear(6, 3)
    model.other.bias = model.head.bias


def normalize_the_last(model: nn.Module) -> None:
    model.head = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()


def move_the_last(model: nn.Module) -> None:
    model.head.bias = nn.Parameter(model.head.bias.detach().float())


@pytest.mark.parametrize("spoil", [hook_the_last, tie_the_last, normalize_the_last, move_the_last])
def test_a_graft_that_fails_in_its_last_match(spoil):
    model, optimizer = trained()
    spoil(model)
    before = picture(model, optimizer)
    with pytest.raises(gn.errors.ConversionError, match="head"):
        gn.graft(model, lambda name, _: name.endswith("ffn") or name == "head", optimizer)
    assert picture(model, optimizer) == before
    gn.graft(model, "blocks.*.ffn", optimizer)  # the others are as they were


def test_an_optimizer_that_fails_after_others_were_prepared():
    model, optimizer = trained()
    second = Refuses(model.parameters(), lr=0.1)
    second.spoil(model.blocks[1].ffn[3].weight)
    before = picture(model, optimizer, second)
    with pytest.raises(gn.errors.OptimizerError, match=r"'whole' \(\[5, 5, 5\]\) for 3\.weight"):
        gn.graft(model, "blocks.*.ffn", [optimizer, second])
    assert picture(model, optimizer, second) == before
    with pytest.raises(gn.errors.OptimizerError, match="'whole'"):
        gn.from_module(model.blocks[1].ffn, [optimizer, second])
    assert picture(model, optimizer, second) == before


def test_an_ungraft_that_fails_in_its_last_net_or_in_an_optimizer():
    model, optimizer = trained()
    second = Refuses(model.parameters(), lr=0.1)
    nets = gn.graft(model, "blocks.*.ffn", [optimizer, second])
    last = nets["blocks.1.ffn"]
    second.spoil(last.transitions[1].weight)
    before = picture(model, optimizer, second)
    with pytest.raises(gn.errors.OptimizerError, match=r"'whole' .* for transitions\.1\.weight"):
        gn.ungraft(model, optimizer=[optimizer, second])
    assert picture(model, optimizer, second) == before
    last.layers[2].dropout = 0.5
    before = picture(model, optimizer, second)
    with pytest.raises(gn.errors.ConversionError, match="blocks"):
        gn.ungraft(model, optimizer=optimizer)
    assert picture(model, optimizer, second) == before
    last.layers[2].dropout = 0.0
    with last.edit() as edit:  # the good optimizer still follows
        edit.cut(last.layers[0].outgoing().smallest(count=3))
    gn.ungraft(model, optimizer=optimizer)
    train(model, optimizer, [3])


def test_the_pictures_see_a_change():
    model, optimizer = trained()
    before = picture(model, optimizer)
    assert picture(model, optimizer) == before
    gn.graft(model, "blocks.*.ffn", optimizer)
    gn.ungraft(model, optimizer=optimizer)
    assert picture(model, optimizer) != before  # other objects, though every number is the same
