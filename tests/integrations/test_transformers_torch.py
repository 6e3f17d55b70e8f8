"""torch's own Transformer layers: their feed-forward blocks become nets, in the fused eval mode as
well.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import grapnet as gn
from grapnet.convert import Projections, ffn_handles, graft_ffn

pytestmark = [
    pytest.mark.xdist_group("transformers"),
    pytest.mark.filterwarnings(
        "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning"),
]


def encoder(**more: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64, **more)
    return nn.TransformerEncoder(layer, num_layers=2)


def batch() -> Tensor:
    return torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        ("relu", "relu"),
        ("gelu", "gelu"),
        (nn.SiLU(), "silu"),
        (torch.tanh, "tanh"),
    ],
    ids=["relu", "gelu", "silu", "tanh"],
)
def test_training_goes_on_as_it_would_have(activation: Any, name: str) -> None:
    dense = encoder(activation=activation, dropout=0.25).train()
    optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-3, eps=1e-6)
    step(dense, optimizer)
    model, moments = copy.deepcopy((dense, optimizer))
    handles = graft_ffn(model, optimizer=moments)
    assert [handle.net.layers[1].dropout for handle in handles] == [0.25, 0.25]
    assert handles[0].hidden.activations[0] == name
    for _ in range(2):
        assert torch.allclose(step(model, moments), step(dense, optimizer), rtol=0, atol=1e-12)
    gn.ungraft(model, optimizer=moments)
    assert list(model.state_dict()) == list(dense.state_dict())
    for one, other in zip(model.parameters(), dense.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-12)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    torch.manual_seed(7)
    optimizer.zero_grad()
    loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_encoder_and_decoder_are_cut_saved_and_restored(tmp_path: Any) -> None:
    shape = {"dim_feedforward": 32, "batch_first": True, "dtype": torch.float64}
    model = nn.Transformer(16, 2, 1, 2, **shape).eval()
    before = model(batch(), batch())
    handles = graft_ffn(model)
    assert [handle.name for handle in handles] == [
        "encoder.layers.0",
        "decoder.layers.0",
        "decoder.layers.1",
    ]
    assert torch.allclose(model(batch(), batch()), before, rtol=0, atol=1e-12)
    for handle in handles:
        handle.remove_hidden(range(20))
    gn.save(tmp_path / "model.safetensors", model)
    again = nn.Transformer(16, 2, 1, 2, **{**shape, "dim_feedforward": 8}).eval()
    gn.restore(tmp_path / "model.safetensors", into=again)
    assert [len(handle.hidden) for handle in ffn_handles(again)] == [12, 12, 12]
    assert torch.equal(again(batch(), batch()), model(batch(), batch()))
    gn.ungraft(again)
    assert {name: tensor.shape for name, tensor in again.state_dict().items()} == {
        name: tensor.shape
        for name, tensor in nn.Transformer(16, 2, 1, 2, **{**shape, "dim_feedforward": 12})
        .state_dict()
        .items()
    }


class Scaled(nn.TransformerEncoderLayer):
    """A layer whose block is not torch's."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return 0.5 * self.dropout2(self.linear2(functional.relu(self.linear1(x))))


def sine(**more: Any) -> nn.TransformerEncoderLayer:
    """A layer with an activation that no node has."""
    return nn.TransformerEncoderLayer(activation=torch.sin, **more)


@pytest.mark.parametrize("make", [Scaled, sine])
def test_a_layer_that_computes_something_else_is_named_by_hand(make: Any) -> None:
    torch.manual_seed(0)
    layer = make(d_model=16, nhead=2, dim_feedforward=32, batch_first=True, dtype=torch.float64)
    model = nn.Sequential(layer).eval()
    expected = model(batch())
    with pytest.raises(gn.errors.ConversionError):
        graft_ffn(model)
    projections = {"TransformerEncoderLayer": Projections(("linear1",), "linear2")}
    (handle,) = graft_ffn(model, projections=projections)
    assert [net.sizes for net in handle.nets] == [[16, 32], [32, 16]]
    assert torch.allclose(model(batch()), expected, rtol=0, atol=1e-12)
