"""torch's Transformer encoders run a fused kernel in evaluation, which reads weights instead of
calling modules.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def encoder(**settings) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()


def inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    padded = torch.zeros(3, 5, dtype=torch.bool)
    padded[1, 3:] = padded[2, 4:] = True
    return torch.randn(3, 5, 8, dtype=torch.float64, generator=draw), padded


def runs_fused(model: nn.Module) -> bool:
    """Says whether the padded places come out as zeros, which the fused kernel alone does."""
    x, padded = inputs()
    with torch.no_grad():
        return bool((model(x, src_key_padding_mask=padded)[padded] == 0).all())


@pytest.mark.parametrize(
    "where", ["*.linear?", "layers.1.linear2", "layers.0.linear1", nn.Linear], ids=str
)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_grafted_encoder_calls_its_nets(where, activation):
    model = encoder(activation=activation)
    dense = copy.deepcopy(model)
    x, padded = inputs()
    assert runs_fused(model)
    nets = gn.graft(model, where)
    with torch.no_grad():
        torch.testing.assert_close(model(x), dense(x), rtol=1e-12, atol=1e-12)
        mine, theirs = (one(x, src_key_padding_mask=padded) for one in (model, dense))
        torch.testing.assert_close(mine[~padded], theirs[~padded], rtol=1e-12, atol=1e-12)
    for net in nets.values():
        with net.edit(allow_dead=True) as edit:
            edit.cut(net.layers[0].outgoing())
    with torch.no_grad():
        assert not torch.allclose(model(x), dense(x))
        assert not torch.allclose(model(x, src_key_padding_mask=padded)[~padded], theirs[~padded])
    assert not runs_fused(model)


def test_ungraft_brings_the_fused_kernel_back():
    model = encoder()
    x, padded = inputs()
    with torch.no_grad():
        before = model(x), model(x, src_key_padding_mask=padded)
    settings = [vars(module).keys() for module in model.modules()]
    gn.graft(model, "*.linear?")
    gn.ungraft(model, "layers.0.*")
    assert not runs_fused(model)
    gn.ungraft(model)
    assert runs_fused(model)
    with torch.no_grad():
        assert torch.equal(model(x), before[0])
        assert torch.equal(model(x, src_key_padding_mask=padded), before[1])
    assert [vars(module).keys() for module in model.modules()] == settings


def test_a_layer_that_was_not_fused_stays_so():
    model = nn.TransformerEncoderLayer(8, 2, 16, activation=torch.tanh, batch_first=True).eval()
    assert model.activation_relu_or_gelu == 0
    gn.graft(model, nn.Linear)
    gn.ungraft(model)
    assert model.activation_relu_or_gelu == 0
