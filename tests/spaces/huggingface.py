"""Tiny models of transformers from configurations alone, and full-size ones on the meta device.

`FAMILIES` has the shape of `tests.spaces.zoo.MODELS`. Roles have distinct sizes where a family
allows it: 3 heads of 8, a stream of 24, an MLP of 40, a vocabulary of 37, 7 tokens. `transformers`
is imported by the constructors, as its import takes seconds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.spaces.zoo import Case, seeded

FAMILIES: dict[str, Callable[[], Case]] = {}
FULL_SIZE: dict[str, Callable[[], Case]] = {}

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
WIDTHS = {"hidden_size": 24, "intermediate_size": 40}
ENCODER = {"num_hidden_layers": 2, "num_attention_heads": 3, **WIDTHS}
TEXT = {"vocab_size": 37, "max_position_embeddings": 32, **ENCODER, **TOKENS}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# 6 heads of queries over 2 of keys and values, so that rep is 3; heads times 8 is not the stream.
GROUPED = {
    **TEXT,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_cache": False,
}
# Some families know no head_dim: their heads divide the stream.
DIVIDED = {**GROUPED, "hidden_size": 48}
del DIVIDED["head_dim"]
VISION = {"image_size": 8, "patch_size": 4, "num_labels": 5, **ENCODER, **NO_DROPOUT}


def family(build: Callable[[], Case]) -> Callable[[], Case]:
    FAMILIES[build.__name__] = seeded(build)
    return FAMILIES[build.__name__]


def built(model: str, config: str, settings: dict[str, Any]) -> nn.Module:
    """Returns a model of transformers, by the names of its class and of its configuration."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def ids(length: int = 7) -> Tensor:
    return torch.randint(3, 37, (2, length))


def pictures(side: int = 8) -> Tensor:
    return torch.randn(2, 3, side, side)


# Encoders of text


@family
def bert() -> Case:
    model = built("BertForMaskedLM", "BertConfig", {**TEXT, **NO_DROPOUT})
    layer = "bert.encoder.layer.0"
    return Case(
        model,
        (ids(),),
        expected={
            "free": (
                f"{layer}.attention.self.query",
                f"{layer}.attention.self.value",
                f"{layer}.intermediate.dense",
            ),
            "normalised": ("bert.embeddings.word_embeddings", f"{layer}.output.dense"),
            "pinned": ("cls.predictions.decoder",),
        },
    )


@family
def roberta() -> Case:
    model = built("RobertaForSequenceClassification", "RobertaConfig", {**TEXT, **NO_DROPOUT})
    layer = "roberta.encoder.layer.1"
    return Case(
        model,
        (ids(),),
        {"attention_mask": torch.ones(2, 7, dtype=torch.long)},
        expected={
            "free": (f"{layer}.attention.self.key", f"{layer}.intermediate.dense"),
            "pinned": ("classifier.out_proj",),
        },
    )


@family
def distilbert() -> Case:
    settings = {
        "vocab_size": 37,
        "max_position_embeddings": 32,
        "dim": 24,
        "hidden_dim": 40,
        "n_layers": 2,
        "n_heads": 3,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": 2,
    }
    model = built("DistilBertForMaskedLM", "DistilBertConfig", settings)
    layer = "distilbert.transformer.layer.0"
    return Case(
        model,
        (ids(),),
        expected={"free": (f"{layer}.attention.q_lin", f"{layer}.ffn.lin1")},
    )


@family
def albert() -> Case:
    """One layer runs three times, so its spaces are shared by all depths."""
    settings = {**TEXT, **NO_DROPOUT, "embedding_size": 11, "num_hidden_layers": 3}
    model = built("AlbertForMaskedLM", "AlbertConfig", settings)
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    return Case(
        model,
        (ids(),),
        expected={"free": (f"{layer}.ffn", f"{layer}.attention.query")},
    )


@family
def electra() -> Case:
    settings = {**TEXT, **NO_DROPOUT, "embedding_size": 11}
    model = built("ElectraForPreTraining", "ElectraConfig", settings)
    layer = "electra.encoder.layer.0"
    return Case(
        model,
        (ids(),),
        expected={"free": (f"{layer}.intermediate.dense", f"{layer}.attention.self.query")},
    )


@family
def modernbert() -> Case:
    """A packed and gated MLP, packed qkv, and windows of attention in some layers."""
    settings = {
        **TEXT,
        "num_hidden_layers": 2,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "local_attention": 4,
        "cls_token_id": 0,
        "sep_token_id": 1,
        "reference_compile": False,
    }
    model = built("ModernBertForMaskedLM", "ModernBertConfig", settings)
    return Case(model, (ids(),), expected={"free": ("model.layers.0.mlp.Wi",)})


# Decoders of text


@family
def gpt2() -> Case:
    settings = {
        "vocab_size": 37,
        "n_embd": 24,
        "n_inner": 40,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        **TOKENS,
    }
    model = built("GPT2LMHeadModel", "GPT2Config", settings)
    return Case(
        model,
        (ids(),),
        expected={
            "free": ("transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc"),
            "normalised": ("transformer.wte", "transformer.h.0.mlp.c_proj"),
            "shared": (("transformer.wte", "transformer.wpe", "transformer.h.1.attn.c_proj"),),
            "pinned": ("lm_head",),
        },
    )


@family
def opt() -> Case:
    settings = {
        "vocab_size": 37,
        "hidden_size": 24,
        "ffn_dim": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 20,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "use_cache": False,
        **TOKENS,
    }
    model = built("OPTForCausalLM", "OPTConfig", settings)
    layer = "model.decoder.layers.0"
    return Case(
        model,
        (ids(),),
        expected={"free": (f"{layer}.fc1", f"{layer}.self_attn.q_proj")},
    )


def _like_llama(model: str, config: str, settings: dict[str, Any]) -> Case:
    """Returns a decoder of Llama's structure, whose layers have the same names."""
    layer = "model.layers.0"
    return Case(
        built(model, config, settings),
        (ids(),),
        expected={
            "free": (
                f"{layer}.self_attn.q_proj",
                f"{layer}.self_attn.k_proj",
                f"{layer}.self_attn.v_proj",
                f"{layer}.mlp.gate_proj",
            ),
            "normalised": ("model.embed_tokens", f"{layer}.mlp.down_proj"),
            "shared": (
                (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
                ("model.embed_tokens", f"{layer}.self_attn.o_proj", "model.norm"),
            ),
            "pinned": ("lm_head",),
        },
    )


@family
def llama() -> Case:
    return _like_llama("LlamaForCausalLM", "LlamaConfig", GROUPED)


@family
def qwen2() -> Case:
    return _like_llama("Qwen2ForCausalLM", "Qwen2Config", DIVIDED)


@family
def qwen3() -> Case:
    """Norms over each head of queries and of keys."""
    return _like_llama("Qwen3ForCausalLM", "Qwen3Config", GROUPED)


@family
def mistral() -> Case:
    settings = {**GROUPED, "sliding_window": 4}
    return _like_llama("MistralForCausalLM", "MistralConfig", settings)


@family
def gemma() -> Case:
    return _like_llama("GemmaForCausalLM", "GemmaConfig", GROUPED)


@family
def gemma2() -> Case:
    """Norms before and after each block, soft caps, and windows in every other layer."""
    settings = {**GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 8}
    return _like_llama("Gemma2ForCausalLM", "Gemma2Config", settings)


@family
def olmo2() -> Case:
    """Norms over all queries and all keys, and after each block only."""
    model = built("Olmo2ForCausalLM", "Olmo2Config", DIVIDED)
    return Case(
        model,
        (ids(),),
        expected={"free": ("model.layers.0.mlp.up_proj",), "pinned": ("lm_head",)},
    )


@family
def phi3() -> Case:
    """Queries, keys and values in one matrix, gate and up in another."""
    model = built("Phi3ForCausalLM", "Phi3Config", DIVIDED)
    layer = "model.layers.0"
    return Case(
        model,
        (ids(),),
        expected={
            "free": (f"{layer}.self_attn.qkv_proj", f"{layer}.mlp.gate_up_proj"),
            "normalised": ("model.embed_tokens",),
            "pinned": ("lm_head",),
        },
    )


@family
def gpt_neox() -> Case:
    """Queries, keys and values lie packed within each head; a quarter of a head rotates."""
    settings = {
        **TEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "use_cache": False,
    }
    model = built("GPTNeoXForCausalLM", "GPTNeoXConfig", settings)
    layer = "gpt_neox.layers.0"
    return Case(
        model,
        (ids(),),
        expected={"free": (f"{layer}.mlp.dense_h_to_4h",), "pinned": ("lm_head",)},
    )


@family
def falcon() -> Case:
    """ALiBi, and one head of keys and values for all queries."""
    settings = {
        "vocab_size": 37,
        "hidden_size": 24,
        "ffn_hidden_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "alibi": True,
        "use_cache": False,
        **TOKENS,
    }
    model = built("FalconForCausalLM", "FalconConfig", settings)
    return Case(model, (ids(),), expected={"free": ("transformer.h.0.mlp.dense_h_to_4h",)})


@family
def bloom() -> Case:
    settings = {
        "vocab_size": 37,
        "hidden_size": 24,
        "n_layer": 2,
        "n_head": 3,
        "use_cache": False,
        **TOKENS,
    }
    model = built("BloomForCausalLM", "BloomConfig", settings)
    return Case(model, (ids(),), expected={"free": ("transformer.h.0.mlp.dense_h_to_4h",)})


@family
def mixtral() -> Case:
    """Each token goes to 2 of 5 experts, whose weights are stacked."""
    settings = {**GROUPED, "num_local_experts": 5, "num_experts_per_tok": 2}
    settings["initializer_range"] = 0.2
    settings["experts_implementation"] = "eager"  # the grouped product knows no float64
    model = built("MixtralForCausalLM", "MixtralConfig", settings)
    return Case(
        model,
        (ids(),),
        expected={"free": ("model.layers.0.self_attn.q_proj",), "pinned": ("lm_head",)},
    )


@family
def mamba() -> Case:
    """A state space in place of attention; the packed x_proj is cut by three numbers."""
    settings = {
        "vocab_size": 37,
        "hidden_size": 12,
        "intermediate_size": 24,
        "state_size": 5,
        "num_hidden_layers": 2,
        "time_step_rank": 3,
        "residual_in_fp32": False,
        "use_cache": False,
        **TOKENS,
    }
    model = built("MambaModel", "MambaConfig", settings)
    return Case(model, (ids(),), expected={"free": ("layers.0.mixer.in_proj",)})


# Encoders with decoders, sound


@family
def t5() -> Case:
    """A bias by relative position, shared by all layers of a stack; the stream is tied."""
    settings = {
        "vocab_size": 37,
        "d_model": 20,
        "d_kv": 8,
        "d_ff": 40,
        "num_layers": 2,
        "num_heads": 3,
        "relative_attention_num_buckets": 11,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 2,
        "use_cache": False,
        **TOKENS,
    }
    model = built("T5ForConditionalGeneration", "T5Config", settings)
    return Case(
        model,
        (),
        {"input_ids": ids(), "decoder_input_ids": ids(5)},
        expected={
            "free": (
                "encoder.block.0.layer.1.DenseReluDense.wi",
                "encoder.block.0.layer.0.SelfAttention.q",
                "decoder.block.1.layer.1.EncDecAttention.v",
            ),
            "pinned": ("lm_head",),
        },
    )


@family
def bart() -> Case:
    settings = {
        "vocab_size": 37,
        "d_model": 24,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 44,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 1,
        "use_cache": False,
        **TOKENS,
    }
    model = built("BartForConditionalGeneration", "BartConfig", settings)
    return Case(
        model,
        (),
        {"input_ids": ids(), "decoder_input_ids": ids(5)},
        expected={
            "free": (
                "model.encoder.layers.0.fc1",
                "model.decoder.layers.0.fc1",
                "model.decoder.layers.1.encoder_attn.q_proj",
            ),
            "pinned": ("lm_head",),
        },
    )


@family
def whisper() -> Case:
    settings = {
        "vocab_size": 37,
        "num_mel_bins": 6,
        "d_model": 24,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 44,
        "max_source_positions": 9,
        "max_target_positions": 16,
        "decoder_start_token_id": 2,
        "begin_suppress_tokens": None,
        "use_cache": False,
        **TOKENS,
    }
    model = built("WhisperForConditionalGeneration", "WhisperConfig", settings)
    return Case(
        model,
        (),
        {"input_features": torch.randn(2, 6, 18), "decoder_input_ids": ids(5)},
        expected={
            "free": ("model.encoder.conv1", "model.encoder.layers.0.fc1"),
            "pinned": ("proj_out",),
        },
    )


@family
def wav2vec2() -> Case:
    """The convolution of positions is grouped and has a weight norm: that one is pinned."""
    settings = {
        **ENCODER,
        "vocab_size": 37,
        "conv_dim": (10, 14),
        "conv_kernel": (5, 3),
        "conv_stride": (4, 2),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "hidden_dropout": 0.0,
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "final_dropout": 0.0,
        "layerdrop": 0.0,
        "apply_spec_augment": False,
        **TOKENS,
    }
    model = built("Wav2Vec2ForCTC", "Wav2Vec2Config", settings)
    layer = "wav2vec2.encoder.layers.0"
    return Case(
        model,
        (torch.randn(2, 90),),
        expected={
            "free": (f"{layer}.feed_forward.intermediate_dense", f"{layer}.attention.q_proj"),
            "pinned": ("lm_head",),
            "unseen": ("wav2vec2.masked_spec_embed",),
        },
    )


# Images


@family
def vit() -> Case:
    model = built("ViTForImageClassification", "ViTConfig", VISION)
    layer = "vit.layers.0"
    return Case(
        model,
        (pictures(),),
        expected={
            "free": (f"{layer}.mlp.fc1", f"{layer}.attention.q_proj", f"{layer}.attention.v_proj"),
            "normalised": ("vit.embeddings.patch_embeddings.projection", f"{layer}.mlp.fc2"),
            "pinned": ("classifier",),
        },
    )


@family
def deit() -> Case:
    """Two heads, each over a token of its own."""
    model = built("DeiTForImageClassificationWithTeacher", "DeiTConfig", VISION)
    return Case(
        model,
        (pictures(),),
        expected={
            "free": ("deit.layers.0.mlp.fc1", "deit.layers.1.attention.q_proj"),
            "pinned": ("cls_classifier", "distillation_classifier"),
        },
    )


@family
def beit() -> Case:
    """Relative positions a head, a scale a channel, and keys without a bias."""
    settings = {**VISION, "drop_path_rate": 0.0, "use_relative_position_bias": True}
    model = built("BeitForImageClassification", "BeitConfig", settings)
    return Case(
        model,
        (pictures(),),
        expected={
            "free": ("beit.layers.0.mlp.fc1", "beit.layers.1.attention.v_proj"),
            "pinned": ("classifier",),
        },
    )


@family
def dinov2() -> Case:
    settings = {**VISION, "mlp_ratio": 2, "drop_path_rate": 0.0}
    del settings["intermediate_size"]
    model = built("Dinov2ForImageClassification", "Dinov2Config", settings)
    return Case(
        model,
        (pictures(),),
        expected={
            "free": ("dinov2.encoder.layer.0.mlp.fc1",),
            "pinned": ("classifier",),
            "unseen": ("dinov2.embeddings.mask_token",),
        },
    )


@family
def clip() -> Case:
    settings = {
        "projection_dim": 13,
        "text_config": {**TEXT, "hidden_size": 24, "intermediate_size": 40},
        "vision_config": {
            **ENCODER,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 44,
            "image_size": 8,
            "patch_size": 4,
        },
    }
    model = built("CLIPModel", "CLIPConfig", settings)
    text = ids()
    text[:, -1] = 1  # the end, whose state stands for the sentence
    return Case(
        model,
        (),
        {"input_ids": text, "pixel_values": pictures()},
        expected={
            "free": (
                "text_model.encoder.layers.0.mlp.fc1",
                "vision_model.encoder.layers.0.mlp.fc1",
            ),
        },
    )


@family
def swin() -> Case:
    """Shifted windows, and a merge that makes one patch of four."""
    settings = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 12,
        "depths": (2, 1),
        "num_heads": (2, 3),
        "window_size": 4,
        "mlp_ratio": 3.0,
        "drop_path_rate": 0.0,
        "num_labels": 5,
    }
    model = built("SwinForImageClassification", "SwinConfig", settings)
    return Case(
        model,
        (pictures(16),),
        expected={"free": ("swin.encoder.layers.0.blocks.1.mlp.fc1",), "pinned": ("classifier",)},
    )


@family
def segformer() -> Case:
    """Attention over a reduced image, depthwise MLPs, and a decoder that joins all stages."""
    settings = {
        "num_encoder_blocks": 2,
        "depths": (1, 1),
        "sr_ratios": (2, 1),
        "hidden_sizes": (8, 18),
        "patch_sizes": (3, 3),
        "strides": (2, 2),
        "num_attention_heads": (2, 3),
        "mlp_ratios": (2, 3),
        "decoder_hidden_size": 11,
        "classifier_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
        "num_labels": 5,
    }
    model = built("SegformerForSemanticSegmentation", "SegformerConfig", settings)
    return Case(
        model,
        (pictures(16),),
        expected={
            "free": ("segformer.stages.0.blocks.0.mlp.fc1", "decode_head.linear_fuse"),
            "pinned": ("decode_head.classifier",),
        },
    )


@family
def mobilevit() -> Case:
    settings = {
        "image_size": 32,
        "hidden_sizes": (12, 15, 18),
        "neck_hidden_sizes": (4, 5, 6, 7, 8, 9, 20),
        "num_attention_heads": 3,
        "expand_ratio": 2.0,
        "hidden_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
        "num_labels": 5,
    }
    model = built("MobileViTForImageClassification", "MobileViTConfig", settings)
    return Case(
        model,
        (pictures(32),),
        expected={
            "free": ("mobilevit.conv_stem.convolution", "mobilevit.conv_1x1_exp.convolution"),
            "pinned": ("classifier",),
        },
    )


@family
def resnet() -> Case:
    settings = {
        "embedding_size": 6,
        "hidden_sizes": (12, 20),
        "depths": (1, 2),
        "num_labels": 5,
    }
    model = built("ResNetForImageClassification", "ResNetConfig", settings)
    return Case(
        model,
        (pictures(16),),
        expected={
            "free": ("resnet.embedder.embedder.convolution",),
            "pinned": ("classifier.1",),
        },
    )


@family
def convnext() -> Case:
    settings = {
        "patch_size": 2,
        "num_stages": 2,
        "hidden_sizes": (6, 10),
        "depths": (1, 2),
        "layer_scale_init_value": 0.5,
        "num_labels": 5,
    }
    model = built("ConvNextForImageClassification", "ConvNextConfig", settings)
    return Case(
        model,
        (pictures(),),
        expected={
            "free": ("convnext.encoder.stages.0.layers.0.pwconv1",),
            "normalised": ("convnext.embeddings.patch_embeddings",),
            "pinned": ("classifier",),
        },
    )


@family
def convnextv2() -> Case:
    """A norm over the hidden units of the MLP, by their length over the image."""
    settings = {
        "patch_size": 2,
        "num_stages": 2,
        "hidden_sizes": (6, 10),
        "depths": (1, 1),
        "num_labels": 5,
    }
    model = built("ConvNextV2ForImageClassification", "ConvNextV2Config", settings)
    return Case(
        model,
        (pictures(),),
        expected={
            "normalised": (
                "convnextv2.embeddings.patch_embeddings",
                "convnextv2.encoder.stages.0.layers.0.pwconv1",
            ),
            "pinned": ("classifier",),
        },
    )


@family
def regnet() -> Case:
    settings = {
        "embedding_size": 6,
        "hidden_sizes": (8, 12),
        "depths": (1, 2),
        "groups_width": 4,
        "layer_type": "y",
        "num_labels": 5,
    }
    model = built("RegNetForImageClassification", "RegNetConfig", settings)
    return Case(
        model,
        (pictures(16),),
        expected={
            "free": (
                "regnet.encoder.stages.0.layers.0.layer.1.convolution",
                "regnet.encoder.stages.0.layers.0.layer.2.attention.0",
            ),
            "pinned": ("classifier.1",),
        },
    )


@family
def mobilenet_v2() -> Case:
    settings = {
        "depth_multiplier": 0.25,
        "depth_divisible_by": 2,
        "min_depth": 4,
        "finegrained_output": False,  # which would make the last layer 1280 wide
        "image_size": 16,
        "num_labels": 5,
        "classifier_dropout_prob": 0.0,
    }
    model = built("MobileNetV2ForImageClassification", "MobileNetV2Config", settings)
    return Case(
        model,
        (pictures(16),),
        expected={
            "free": (
                "mobilenet_v2.layer.0.expand_1x1.convolution",
                "mobilenet_v2.layer.0.reduce_1x1.convolution",
            ),
            "pinned": ("classifier",),
        },
    )


# Full size, on the meta device: shapes without memory


def full_size(build: Callable[[], Case]) -> Callable[[], Case]:
    """Registers a constructor that runs on the meta device."""

    def constructor() -> Case:
        with torch.device("meta"):
            return build()

    FULL_SIZE[build.__name__] = constructor
    return constructor


def _text_at_full_size(model: str, config: str, **settings: Any) -> Case:
    tokens = torch.zeros(1, 16, dtype=torch.long)
    # A mask of four dimensions is used as it is; what makes one from less asks for values.
    mask = torch.zeros(1, 1, 16, 16)
    return Case(built(model, config, settings), (tokens,), {"attention_mask": mask})


def _image_at_full_size(model: str, config: str, **settings: Any) -> Case:
    return Case(built(model, config, settings), (torch.zeros(2, 3, 224, 224),))


@full_size
def gpt2_124m() -> Case:
    return _text_at_full_size("GPT2LMHeadModel", "GPT2Config", use_cache=False)


@full_size
def bert_base() -> Case:
    return _text_at_full_size("BertForMaskedLM", "BertConfig")


@full_size
def vit_b_16() -> Case:
    return _image_at_full_size("ViTForImageClassification", "ViTConfig", num_labels=1000)


@full_size
def resnet_50() -> Case:
    return _image_at_full_size("ResNetForImageClassification", "ResNetConfig", num_labels=1000)


@full_size
def llama_3_8b() -> Case:
    return _text_at_full_size(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )


@full_size
def qwen3_8b() -> Case:
    return _text_at_full_size(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        use_cache=False,
    )


@full_size
def mixtral_8x7b() -> Case:
    """All experts by one batched product: the other ways ask which expert has which token."""
    return _text_at_full_size(
        "MixtralForCausalLM", "MixtralConfig", use_cache=False, experts_implementation="batched_mm"
    )


@full_size
def swin_t() -> Case:
    return _image_at_full_size("SwinForImageClassification", "SwinConfig", num_labels=1000)


@full_size
def swin_b() -> Case:
    return _image_at_full_size(
        "SwinForImageClassification",
        "SwinConfig",
        embed_dim=128,
        depths=(2, 2, 18, 2),
        num_heads=(4, 8, 16, 32),
        num_labels=1000,
    )


@full_size
def convnext_b() -> Case:
    return _image_at_full_size(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        hidden_sizes=(128, 256, 512, 1024),
        depths=(3, 3, 27, 3),
        num_labels=1000,
    )
