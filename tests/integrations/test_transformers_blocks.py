"""Feed-forward blocks of other models are found by what they do; what a net cannot take over is
left or refused.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import grapnet as gn
from grapnet.integrations.transformers import ffn_handles, graft_ffn
from tests.integrations.tiny_transformers import SIZES, TOKENS, gpt2, phi3
from tests.rounding import SINGLE

pytestmark = pytest.mark.xdist_group("transformers")

TEXT = {**SIZES, "vocab_size": 40, "intermediate_size": 32, **TOKENS}
SMALL = {"vocab_size": 40, "d_model": 16, **TOKENS}
BART = {
    **SMALL,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16}
T5 = {**SMALL, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8, "decoder_start_token_id": 0}


def opt() -> nn.Module:
    shape = {
        "ffn_dim": 32,
        "word_embed_proj_dim": 16,
        "max_position_embeddings": 16,
        "vocab_size": 40,
    }
    return transformers.OPTForCausalLM(transformers.OPTConfig(**SIZES, **shape, **TOKENS))


def bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**BART, **HEADS, activation_dropout=0.3)
    )


def t5(**more: Any) -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **more))


def distilbert() -> nn.Module:
    shape = {
        "vocab_size": 40,
        "dim": 16,
        "hidden_dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "pad_token_id": 0,
    }
    return transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**shape))


def falcon() -> nn.Module:
    shape = {**SIZES, "vocab_size": 40, "ffn_hidden_size": 32}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**shape, **TOKENS))


def roberta() -> nn.Module:
    return transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**TEXT, max_position_embeddings=16)
    )


def gemma() -> nn.Module:
    return transformers.GemmaForCausalLM(
        transformers.GemmaConfig(**TEXT, num_key_value_heads=2, head_dim=8)
    )


def bloom() -> nn.Module:
    return transformers.BloomModel(
        transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=40)
    )


def mpt() -> nn.Module:
    return transformers.MptModel(
        transformers.MptConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=40)
    )


KINDS = {  # how many blocks, how many nets each is, and their activations
    "opt": (opt, 2, 2, None),
    "bart": (bart, 2, 2, None),
    "t5": (t5, 2, 1, "relu"),
    "distilbert": (distilbert, 2, 1, "gelu"),
    "phi3": (phi3, 2, 2, None),
    "falcon": (falcon, 2, 1, "gelu"),  # whose Linears have a forward of their own
    "roberta": (roberta, 2, 1, "gelu"),
    "gemma": (gemma, 2, 3, None),
    "relu2": (lambda: gpt2(activation_function="relu2"), 2, 2, None),  # nodes have no squares
    "gelu_fast": (lambda: gpt2(activation_function="gelu_fast"), 2, 1, "gelu_tanh"),
    "quick_gelu": (lambda: gpt2(activation_function="quick_gelu"), 2, 1, "quick_gelu"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_block_computes_and_drops_stays(kind: str) -> None:
    make, blocks, nets, activation = KINDS[kind]
    torch.manual_seed(0)
    model = make().double().train()
    dense, ids = copy.deepcopy(model), torch.randint(3, 40, (2, 8))
    expected_keys = list(model.state_dict())
    handles = graft_ffn(model)
    assert [len(handle.nets) for handle in handles] == [nets] * blocks
    assert [len(handle.hidden) for handle in handles] == [32] * blocks
    assert activation is None or handles[0].hidden.activations == [activation] * 32
    losses = []
    for each in (model, dense):
        torch.manual_seed(5)
        losses.append(each(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    assert torch.allclose(*losses, rtol=0, atol=1e-12)
    assert [handle.name for handle in ffn_handles(model)] == [handle.name for handle in handles]
    removed = copy.deepcopy(model)
    for handle in ffn_handles(removed):
        handle.remove_hidden([0, 9])
        assert len(handle.hidden) == 30
    assert bool(removed(input_ids=ids, labels=ids).loss.isfinite())
    gn.ungraft(model)
    assert list(model.state_dict()) == expected_keys
    gradients = {name: parameter.grad for name, parameter in dense.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=0, atol=1e-12), name


def test_units_of_a_packed_matrix_are_two_rows_each() -> None:
    model = phi3().double().eval()
    dense, ids = copy.deepcopy(model), torch.arange(3, 9)[None]
    handle, _ = graft_ffn(model)
    handle.remove_hidden([3, 31])
    assert [net.sizes for net in handle.nets] == [[16, 60], [30, 16]]
    with torch.no_grad():
        dense.model.layers[0].mlp.down_proj.weight[:, [3, 31]] = 0
        assert torch.allclose(model(ids).logits, dense(ids).logits, rtol=0, atol=1e-12)
    with pytest.raises(gn.EditError, match="gate and up in one matrix"):
        handle.add_hidden(1)


def test_what_cannot_become_nets_is_named() -> None:
    model = t5(feed_forward_proj="gated-gelu")
    with pytest.raises(
        gn.ConversionError,
        match=(
            r"DenseReluDense' \(T5DenseGatedActDense\) cannot .*: its forward reads wo\.weight, w"
        ),
    ):
        graft_ffn(model)
    assert ffn_handles(model) == []
    for other in (bloom(), mpt()):
        with pytest.raises(
            gn.ConversionError,
            match=r"MLP\) cannot become nets: its forward needs 'residual' beside its",
        ):
            graft_ffn(other)
    with pytest.raises(
        gn.ConversionError, match="this Linear has no feed-forward block that is known: two Linears"
    ):
        graft_ffn(nn.Linear(3, 3))


class Block(nn.Module):
    """A feed-forward block in one's own hand; `kind` says what its forward does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc, self.out = nn.Linear(8, 12), nn.Linear(12, 8)
        self.act, self.drop, self.norm = nn.GELU(), nn.Dropout(0.5), nn.Identity()
        if kind == "normed":
            self.norm = nn.LayerNorm(12)
        elif kind == "sampled":
            self.norm = nn.AlphaDropout(0.3)
        elif kind == "scaled":
            self.scale = nn.Parameter(torch.ones(8))
        elif kind == "learned":
            self.act = nn.PReLU(init=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "between" | "learned":
                return self.out(self.drop(self.act(self.fc(x))))
            case "behind":
                return self.drop(self.out(self.act(self.fc(x))))
            case "functional":
                return functional.dropout(self.out(functional.silu(self.fc(x))), 0.5, self.training)
            case "residual":
                return x + self.out(self.act(self.fc(x)))
            case "normed" | "sampled":
                return self.out(self.norm(self.act(self.fc(x))))
            case "scaled":
                return self.scale * self.out(self.act(self.fc(x)))
            case _:
                return self.out(functional.softmax(self.fc(x), -1))


@pytest.mark.parametrize(
    ("kind", "dropouts"),
    [
        ("between", [0, 0.5, 0]),
        ("behind", [0, 0, 0.5]),
        ("functional", None),
        ("residual", None),
        ("sampled", None),
        ("scaled", None),  # by 1, so that only the parameter shows it
        ("learned", None),  # a slope that is that of leaky_relu, so far
    ],
)
def test_a_block_of_ones_own_is_run_to_see_what_it_does(
    kind: str, dropouts: list[float] | None
) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"ffn": Block(kind)}).double(), torch.randn(2, 5, 8).double()
    dense, state = copy.deepcopy(model), torch.get_rng_state()
    (handle,) = graft_ffn(model)
    kept = {name for name, _ in dense.named_parameters() if "fc" not in name and "out" not in name}
    assert kept <= {name for name, _ in model.named_parameters()}
    assert torch.equal(torch.get_rng_state(), state)
    if dropouts is None:
        assert len(handle.nets) == 2
    else:
        assert [layer.dropout for layer in handle.net.layers] == dropouts
    for training in (True, False):
        results = []
        for each in (model.train(training), dense.train(training)):
            torch.manual_seed(1)
            results.append(each["ffn"](x))
        assert torch.allclose(*results, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["normed", "softmax"])
def test_units_that_depend_on_each_other_are_refused(kind: str) -> None:
    model = nn.ModuleDict({"good": Block("between"), "bad": Block(kind)})
    with pytest.raises(gn.ConversionError, match=r"'bad' \(Block\) cannot become nets: its"):
        graft_ffn(model)
    assert ffn_handles(model) == []
    assert [handle.name for handle in graft_ffn(model, layers=[0])] == ["good"]


class Mixer(nn.Module):
    """Mixes positions, not features."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x.transpose(1, 2)))).transpose(1, 2)


def test_a_block_that_turns_its_input_is_refused() -> None:
    with pytest.raises(
        gn.ConversionError, match=r"'mixer' \(Mixer\) cannot become nets: its forward does not run"
    ):
        graft_ffn(nn.ModuleDict({"mixer": Mixer()}))


class Halved(nn.Linear):
    """No Linear any more."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / 2


def test_a_linear_that_computes_something_else_is_none() -> None:
    model = nn.ModuleDict({"ffn": nn.Sequential(nn.Linear(8, 12), nn.ReLU(), Halved(12, 8))})
    with pytest.raises(gn.ConversionError, match="no feed-forward block"):
        graft_ffn(model)


def test_a_sequential_is_a_block_and_a_head_is_none() -> None:
    ffn = nn.Sequential(nn.Linear(8, 12), nn.LeakyReLU(0.3), nn.Linear(12, 8), nn.Dropout(0.1))
    head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model = nn.ModuleDict({"ffn": ffn, "head": head, "attention": nn.MultiheadAttention(8, 2)})
    (handle,) = graft_ffn(model)
    assert handle.name == "ffn"
    assert handle.hidden.activations[0] == "leaky_relu(0.3)"
    gn.graft(model, "head")
    assert [found.name for found in ffn_handles(model)] == ["ffn"]


def test_the_model_itself_is_not_replaced() -> None:
    with pytest.raises(
        gn.ConversionError, match="this Block is a block itself and cannot be replaced in place"
    ):
        graft_ffn(Block("between"))
    (handle,) = graft_ffn(Block("residual"))  # whose Linears are nets
    assert handle.name == ""


def test_zeros_are_dropped_when_asked() -> None:
    model = nn.ModuleDict({"ffn": Block("between")})
    with torch.no_grad():
        model["ffn"].fc.weight[:6] = 0
    (handle,) = graft_ffn(copy.deepcopy(model), drop_zeros=True)
    assert handle.net.count().relations == 6 * 8 + 12 * 8
    assert graft_ffn(model)[0].net.count().relations == 12 * 8 + 12 * 8


def test_a_forward_of_one_module_alone_goes_on_being_called() -> None:
    model = nn.ModuleDict({"ffn": Block("between")}).eval()
    own, x = model["ffn"].forward, torch.randn(2, 8)
    model["ffn"].forward = lambda x: own(x) + 1
    expected = model["ffn"](x)
    (handle,) = graft_ffn(model)
    assert len(handle.nets) == 2
    assert torch.allclose(model["ffn"](x), expected, atol=SINGLE)


def test_a_block_with_a_net_inside_already_is_refused() -> None:
    model = gemma()
    gn.graft(model, "*.0.mlp.up_proj")
    with pytest.raises(
        gn.ConversionError,
        match=r"'model\.layers\.0\.mlp\.up_proj' is a net already, and the rest is",
    ):
        graft_ffn(model)
    assert [handle.name for handle in graft_ffn(model, [1])] == ["model.layers.1.mlp"]
