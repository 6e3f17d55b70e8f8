"""Tiny Transformers with random weights, in the middle of training."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def gpt2(hidden: int = 32, **more: Any) -> nn.Module:
    shape = {
        "vocab_size": 40,
        "n_embd": 16,
        "n_inner": hidden,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 32,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **TOKENS, **more))


def bert(hidden: int = 32, **more: Any) -> nn.Module:
    shape = {"vocab_size": 40, "intermediate_size": hidden, "max_position_embeddings": 32}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **shape, **more))


def vit(hidden: int = 32, **more: Any) -> nn.Module:
    shape = {"intermediate_size": hidden, "image_size": 8, "patch_size": 4, "num_labels": 5}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, **shape, **more))


def llama(hidden: int = 32, **more: Any) -> nn.Module:
    shape = {"vocab_size": 40, "intermediate_size": hidden, "max_position_embeddings": 32}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **shape, **TOKENS, **more)
    )


def phi3(hidden: int = 32, **more: Any) -> nn.Module:
    shape = {
        "vocab_size": 40,
        "intermediate_size": hidden,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, **shape, **TOKENS, **more))


MAKE: dict[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "bert": bert, "vit": vit, "llama": llama}
MORE = {"phi3": phi3}
BLOCKS = {
    "gpt2": ["transformer.h.0.mlp", "transformer.h.1.mlp"],
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "vit": ["vit.layers.0.mlp", "vit.layers.1.mlp"],
    "llama": ["model.layers.0.mlp", "model.layers.1.mlp"],
}


@dataclass
class Training:
    """A model with its optimizer and its data."""

    family: str
    model: Any
    optimizer: torch.optim.Optimizer
    batches: list[dict[str, Tensor]]

    def loss(self, number: int) -> Tensor:
        return self.model(**self.batches[number]).loss

    def step(self, number: int, seed: int = 0) -> Tensor:
        """Takes one step on a batch, with dropout drawn from a seed, and returns the loss."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        loss = self.loss(number)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def logits(self, number: int = 0) -> Tensor:
        was = self.model.training
        found = self.model.eval()(**self.batches[number]).logits
        self.model.train(was)
        return found

    def copy(self) -> "Training":
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        return Training(self.family, model, optimizer, self.batches)


def training(
    family: str, dtype: torch.dtype = torch.float64, steps: int = 2, **more: Any
) -> Training:
    """Returns a model of a family after two steps of AdamW."""
    torch.manual_seed(3)
    model = {**MAKE, **MORE}[family](**more).to(dtype).train()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(5)  # they are drawn so small that the blocks hardly matter
    result = Training(family, model, optimizer_of(model), batches(family, dtype))
    for number in range(steps):
        result.step(number)
    return result


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW with the usual two groups.

    Its eps is above the gradients that are zero but for rounding, such as that of the biases of
    attention keys: Adam would divide them by themselves.
    """
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)


def batches(
    family: str, dtype: torch.dtype = torch.float64, count: int = 4
) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        images = torch.randn(count, 3, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
        labels = torch.randint(5, (count, 3), generator=generator)
        return [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    ids = torch.randint(3, 40, (count, 3, 7), generator=generator)
    return [{"input_ids": each, "labels": each} for each in ids]
