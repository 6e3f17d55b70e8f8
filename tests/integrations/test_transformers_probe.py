"""Blocks are run to see what they compute: in both modes, far out, and without a trace in the model
or the program.
"""

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.integrations.transformers import ffn_handles, graft_ffn

pytestmark = pytest.mark.xdist_group("transformers")


class Halving(nn.ReLU):
    """A ReLU in training, and something else in eval mode."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / (1 if self.training else 2)


class HalvingLinear(nn.Linear):
    """A Linear in training only."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / (1 if self.training else 2)


class Block(nn.Module):
    """A block whose forward is `how`."""

    def __init__(self, how: Any, activation: nn.Module) -> None:
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(8, 12), activation, nn.Linear(12, 8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def plain(block: Any, x: Tensor) -> Tensor:
    return block.out(block.act(block.fc(x)))


def halved(block: Any, x: Tensor) -> Tensor:
    return plain(block, x) / (1 if block.training else 2)


def clamped(most: float) -> Any:
    return lambda block, x: block.out(block.act(block.fc(x)).clamp(max=most))


def single(block: Any, x: Tensor) -> Tensor:
    return plain(block, x).to(torch.float32)


@pytest.mark.parametrize(
    ("how", "activation", "nets"),
    [
        (plain, nn.ReLU(), 1),
        (halved, nn.ReLU(), 2),
        (plain, Halving(), 2),
        (clamped(50), nn.ReLU(), 2),
        (clamped(65504), nn.GELU(), 2),
        (single, nn.ReLU(), 2),
    ],
    ids=[
        "plain",
        "half in eval",
        "half of the activation",
        "clamped",
        "clamped far out",
        "in another precision",
    ],
)
def test_a_block_computes_the_same_in_both_modes_and_far_out(
    how: Any, activation: nn.Module, nets: int
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"ffn": Block(how, activation)}).double()
    dense, x = (
        copy.deepcopy(model),
        torch.randn(4, 8).double() * 10 ** torch.arange(4)[:, None] * 300,
    )
    (handle,) = graft_ffn(model)
    assert len(handle.nets) == nets
    for training in (True, False):
        found, expected = (each.train(training)["ffn"](x) for each in (model, dense))
        assert torch.allclose(found, expected, rtol=1e-12, atol=0)


def test_layers_and_linears_that_change_with_the_mode_are_not_taken_for_others() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, activation=Halving(), batch_first=True)
    assert [len(handle.nets) for handle in graft_ffn(nn.Sequential(layer))] == [2]
    model = nn.ModuleDict({"ffn": nn.Sequential(nn.Linear(8, 12), nn.ReLU(), HalvingLinear(12, 8))})
    with pytest.raises(gn.ConversionError, match="no feed-forward block"):
        graft_ffn(model)


def test_the_random_numbers_of_the_program_go_on() -> None:
    activation = nn.LeakyReLU(0.0625)  # which nothing else in this process has asked for
    model = nn.ModuleDict({"ffn": nn.Sequential(nn.Linear(8, 12), activation, nn.Linear(12, 8))})
    state = torch.get_rng_state()
    (handle,) = graft_ffn(model)
    assert handle.hidden.activations[0] == "leaky_relu(0.0625)"
    assert torch.equal(torch.get_rng_state(), state)


class Counting(Block):
    """A block that writes down every call, wherever one could."""

    def __init__(self) -> None:
        super().__init__(plain, nn.GELU())
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(8, dtype=torch.float64))
        self.scale, self.pair = torch.ones(1, dtype=torch.float64), (torch.zeros(1), torch.zeros(1))
        self.seen: list[Any] = []
        self.by_shape: dict[str, list[Any]] = defaultdict(list)
        self.kinds: set[Any] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += 1
        self.scale.mul_(2)
        self.pair[0].add_(1)
        self.seen.append(x.shape)
        self.by_shape["all"].append(x.shape)
        self.kinds.add(x.dtype)
        return super().forward(x)


def test_what_a_module_keeps_is_not_written_to() -> None:
    block = Counting().double()
    block.by_shape["all"] = []
    model = nn.ModuleDict({"ffn": block})
    (handle,) = graft_ffn(model)
    ffn_handles(model)
    assert len(handle.nets) == 2
    assert (
        int(block.calls),
        float(block.total.sum()),
        float(block.scale),
        float(block.pair[0]),
    ) == (0, 0, 1, 0)
    assert (block.seen, dict(block.by_shape), block.kinds) == ([], {"all": []}, set())
    block(torch.zeros(2, 8).double())
    assert (int(block.calls), len(block.seen), len(block.by_shape["all"]), len(block.kinds)) == (
        1,
        1,
        1,
        1,
    )
