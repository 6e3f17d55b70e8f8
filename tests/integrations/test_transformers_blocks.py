"""Every known family of feed-forward blocks becomes nets and modules again; others are named by
hand.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import grapnet as gn
from grapnet.convert import Projections, ffn_handles, graft_ffn
from grapnet.convert._ffn import FAMILIES
from tests.integrations.tiny_transformers import SIZES, TOKENS, gpt2, llama, phi3

pytestmark = [
    pytest.mark.xdist_group("transformers"),
    # by the model of DeBERTa
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

TEXT = {
    **TOKENS,
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
IMAGE = {**SIZES, "num_hidden_layers": 1, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
SMALL = {**TOKENS, "vocab_size": 40, "d_model": 16}
SEQUENCES = {
    **SMALL,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
WHISPER = {**SEQUENCES, "num_mel_bins": 4, "max_source_positions": 8}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_inner": 32, "n_layer": 1, "n_head": 2, **TOKENS}
T5 = {**SMALL, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
XLNET = {"vocab_size": 40, "d_model": 16, "d_inner": 32, "n_layer": 1, "n_head": 2}
DISTILBERT = {"vocab_size": 40, "dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2}
# how many nets a block of a class becomes, and a model with such blocks
FAMILY_MODELS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "GPT2MLP": (1, "GPT2", GPT2),
    "T5DenseActDense": (1, "T5", T5),
    "FFN": (1, "DistilBert", DISTILBERT),
    "ViTMLP": (1, "ViT", IMAGE),
    "DeiTMLP": (1, "DeiT", IMAGE),
    "Dinov2MLP": (1, "Dinov2", {**IMAGE, "mlp_ratio": 2}),
    "CLIPMLP": (1, "CLIPVision", IMAGE),
    "SiglipMLP": (1, "SiglipVision", {**IMAGE, "vision_use_head": False}),
    "PhiMLP": (1, "Phi", TEXT),
    "GPTNeoXMLP": (1, "GPTNeoX", TEXT),
    "FalconMLP": (1, "Falcon", {**TEXT, "ffn_hidden_size": 32}),
    "BertLayer": (1, "Bert", TEXT),
    "RobertaLayer": (1, "Roberta", TEXT),
    "XLMRobertaLayer": (1, "XLMRoberta", TEXT),
    "ElectraLayer": (1, "Electra", {**TEXT, "embedding_size": 16}),
    "DebertaLayer": (1, "Deberta", TEXT),
    "DebertaV2Layer": (1, "DebertaV2", TEXT),
    "LlamaMLP": (3, "Llama", GROUPED),
    "MistralMLP": (3, "Mistral", GROUPED),
    "Qwen2MLP": (3, "Qwen2", GROUPED),
    "Qwen3MLP": (3, "Qwen3", GROUPED),
    "GemmaMLP": (3, "Gemma", GROUPED),
    "Gemma2MLP": (3, "Gemma2", GROUPED),
    "Gemma3MLP": (3, "Gemma3Text", GROUPED),
    "Phi3MLP": (2, "Phi3", {**TEXT, "num_key_value_heads": 2}),
    "ModernBertMLP": (2, "ModernBert", {**TEXT, "mlp_dropout": 0.2}),
    "OPTDecoderLayer": (2, "OPT", {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16}),
    "BartEncoderLayer": (2, "Bart", {**SEQUENCES, "max_position_embeddings": 16}),
    "WhisperEncoderLayer": (2, "Whisper", WHISPER),
    "AlbertLayer": (2, "Albert", {**TEXT, "embedding_size": 16}),
    "XLNetFeedForward": (2, "XLNet", XLNET),
    "EsmLayer": (2, "Esm", TEXT),
}
# in the same models as the encoder layers, or of torch: see test_transformers_torch.py
ELSEWHERE = {"BartDecoderLayer", "WhisperDecoderLayer"}
ELSEWHERE |= {"TransformerEncoderLayer", "TransformerDecoderLayer"}


def family_model(name: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Returns a model in training mode and what it takes."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}Model")(config).double().train()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.2)  # large enough for the blocks to matter
    ids = torch.randint(3, 40, (2, 8))
    if "image_size" in settings:
        return model, {"pixel_values": torch.randn(2, 3, 8, 8).double()}
    if name == "Whisper":
        features = torch.randn(2, 4, 16).double()
        return model, {"input_features": features, "decoder_input_ids": ids}
    if name in ("T5", "Bart"):
        return model, {"input_ids": ids, "decoder_input_ids": ids}
    return model, {"input_ids": ids}


def run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Returns the output of one backward pass, with dropout drawn from a seed."""
    torch.manual_seed(5)
    output = model(**inputs)[0]
    weights = torch.linspace(-1, 1, output.numel()).double().view_as(output)
    (weights * output).mean().backward()
    return output.detach()


def require_same(model: nn.Module, dense: nn.Module) -> None:
    """Requires equal weights and gradients."""
    expected = dict(dense.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        if expected[name].grad is not None:
            assert torch.allclose(parameter.grad, expected[name].grad, rtol=0, atol=1e-12), name


def test_every_family_has_a_model_here() -> None:
    assert set(FAMILY_MODELS) | ELSEWHERE == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILY_MODELS)
def test_a_family_becomes_nets_and_modules_again(family: str) -> None:
    count, name, settings = FAMILY_MODELS[family]
    model, inputs = family_model(name, settings)
    assert family in {type(module).__name__ for module in model.modules()}
    dense = copy.deepcopy(model)
    handles = graft_ffn(model)
    assert {len(handle.nets) for handle in handles} == {count}
    assert {len(handle.hidden) for handle in handles} == {32}
    assert torch.allclose(run(model, inputs), run(dense, inputs), rtol=0, atol=1e-12)
    assert [handle.name for handle in ffn_handles(model)] == [handle.name for handle in handles]
    smaller = copy.deepcopy(model)
    for handle in ffn_handles(smaller):
        handle.remove_hidden([0, 9])
        assert len(handle.hidden) == 30
    assert bool(run(smaller, inputs).isfinite().all())
    gn.ungraft(model)
    require_same(model, dense)


@pytest.mark.parametrize(
    ("function", "activation"),
    [
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_accurate", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_python", "gelu"),
        ("quick_gelu", "quick_gelu"),
        ("silu", "silu"),
        ("mish", "mish"),
        ("leaky_relu", "leaky_relu"),
        ("relu2", None),  # nodes have no squares
    ],
)
def test_activations_are_those_of_the_config(function: str, activation: str | None) -> None:
    torch.manual_seed(0)
    model = gpt2(activation_function=function).double()
    inputs = {"input_ids": torch.randint(3, 40, (2, 8))}
    dense = copy.deepcopy(model)
    handles = graft_ffn(model)
    if activation is None:
        assert [len(handle.nets) for handle in handles] == [2, 2]
    else:
        assert handles[0].hidden.activations == [activation] * 32
    assert torch.allclose(run(model, inputs), run(dense, inputs), rtol=0, atol=1e-12)
    gn.ungraft(model)
    require_same(model, dense)


def test_units_of_a_packed_matrix_are_two_rows_each() -> None:
    model = phi3().double().eval()
    dense = copy.deepcopy(model)
    ids = torch.arange(3, 9)[None]
    handle, _ = graft_ffn(model)
    handle.remove_hidden([3, 31])
    assert [net.sizes for net in handle.nets] == [[16, 60], [30, 16]]
    with torch.no_grad():
        dense.model.layers[0].mlp.down_proj.weight[:, [3, 31]] = 0
        assert torch.allclose(model(ids).logits, dense(ids).logits, rtol=0, atol=1e-12)
    with pytest.raises(gn.errors.EditError):
        handle.add_hidden(1)


class Block(nn.Module):
    """A feed-forward block that GrapNet does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.up(x))))


@pytest.mark.parametrize(
    ("projections", "nets"),
    [
        (Projections(("up",), "down", activation="act", dropout="drop"), 1),
        (Projections(("up",), "down"), 2),
    ],
)
def test_blocks_of_ones_own_are_named_by_hand(projections: Projections, nets: int) -> None:
    model = nn.ModuleDict({"ffn": Block()}).double()
    dense = copy.deepcopy(model)
    x = torch.randn(2, 5, 8).double()
    with pytest.raises(gn.errors.ConversionError, match="projections="):
        graft_ffn(model)
    (handle,) = graft_ffn(model, projections={"Block": projections})
    assert len(handle.nets) == nets
    (again,) = ffn_handles(model, projections={"Block": projections})
    assert again.nets == handle.nets
    outputs = []
    for each in (model, dense):
        torch.manual_seed(1)
        outputs.append(each["ffn"](x))
    assert torch.allclose(*outputs, rtol=0, atol=1e-12)
    gn.ungraft(model)
    require_same(model, dense)


class Normed(transformers.models.gpt2.modeling_gpt2.GPT2MLP):
    """A known block with a forward of its own, in which hidden units depend on each other."""

    def forward(self, hidden_states: Any) -> Any:
        hidden = self.act(self.c_fc(hidden_states))
        return self.c_proj(functional.layer_norm(hidden, hidden.shape[-1:]))


def test_a_subclass_is_known_while_it_inherits_the_forward() -> None:
    class Renamed(transformers.models.gpt2.modeling_gpt2.GPT2MLP):
        """A known block that inherits its forward."""

    config = gpt2().config
    model = nn.ModuleDict({"good": Renamed(32, config), "bad": Normed(32, config)})
    assert [handle.name for handle in graft_ffn(model)] == ["good"]


class Halved(nn.Linear):
    """No Linear any more."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def test_a_projection_or_activation_that_is_not_plain_is_refused() -> None:
    model = llama()
    model.model.layers[0].mlp.up_proj = Halved(16, 32)
    with pytest.raises(gn.errors.ConversionError, match=r"layers\.0\.mlp\.up_proj.*Halved"):
        graft_ffn(model)
    assert ffn_handles(model) == []
    assert [handle.name for handle in graft_ffn(model, [1])] == ["model.layers.1.mlp"]
    model = gpt2()
    model.transformer.h[1].mlp.act = nn.Softmax(-1)
    with pytest.raises(gn.errors.ConversionError, match=r"h\.1\.mlp.*Softmax"):
        graft_ffn(model)


def test_a_block_with_a_net_inside_already_is_refused() -> None:
    model = llama()
    gn.graft(model, "*.0.mlp.up_proj")
    with pytest.raises(gn.errors.ConversionError, match=r"'model\.layers\.0\.mlp'"):
        graft_ffn(model)
    assert [handle.name for handle in graft_ffn(model, [1])] == ["model.layers.1.mlp"]


def test_a_sequential_is_a_block_and_a_head_is_none() -> None:
    ffn = nn.Sequential(nn.Linear(8, 12), nn.LeakyReLU(0.3), nn.Linear(12, 8), nn.Dropout(0.1))
    head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model = nn.ModuleDict({"head": head, "attention": nn.MultiheadAttention(8, 2)})
    model["outer"] = nn.Sequential(ffn)
    (handle,) = graft_ffn(model)
    assert handle.name == "outer.0"
    assert handle.hidden.activations[0] == "leaky_relu(0.3)"
    gn.graft(model, "head")
    assert [found.name for found in ffn_handles(model)] == ["outer.0"]
