"""Half of the relations of a GPT leave in one shot, without training afterwards.

A GPT-2 of Hugging Face with 10.8 million Parameters learns the bytes of Python's own standard
library (`heads_and_layers.load`), with whole files held out.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from tqdm import tqdm

from .heads_and_layers import load

_BYTES = 256
TRAINED = Path("build/one_shot_gpt")


@dataclass(frozen=True)
class Training:
    """A byte-level GPT-2 of 10.8 million Parameters, and how it is trained."""

    width: int = 384
    layers: int = 6
    heads: int = 6  # of each layer
    length: int = 128  # of a sequence, in bytes
    batch: int = 8
    steps: int = 2400
    warm_up: int = 100  # steps
    lr: float = 1e-3  # after warming up; it falls to a tenth as a cosine
    seed: int = 0
    most_bytes: int | None = None  # of every split; None takes all
    keep_every: int = 50  # steps between the checkpoints of a training that goes on


def model_of(training: Training) -> Any:
    """Returns an untrained model."""
    config = transformers.GPT2Config(
        vocab_size=_BYTES,
        n_positions=training.length,
        n_embd=training.width,
        n_layer=training.layers,
        n_head=training.heads,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(training.seed)
    return transformers.GPT2LMHeadModel(config)


def sequences(text: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Returns sequences from random places of a text, [count, length]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length)].long()


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Returns the loss of every byte but the first, given those before it."""
    logits = model(tokens).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def trained(training: Training, text: Tensor, folder: Path | None = TRAINED) -> Any:
    """Returns the trained model; a folder keeps it, and a training that was interrupted goes on."""
    model = model_of(training)
    optimizer = AdamW(model.parameters(), lr=training.lr, weight_decay=0.01)
    start = 0
    path = None
    if folder is not None:
        name = hashlib.sha256(json.dumps(asdict(training)).encode()).hexdigest()[:12]
        path = folder / f"{name}.pt"
        if path.exists():
            kept = torch.load(path)
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            start = kept["steps"]
    model.train()
    for step in tqdm(range(start, training.steps), "training", mininterval=10):
        for group in optimizer.param_groups:
            group["lr"] = _lr(training, step)
        # Every step has a seed of its own, so that a training that goes on sees the same batches.
        tokens = sequences(text, training.batch, training.length, 1_000_000 + step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        if path is not None and (done % training.keep_every == 0 or done == training.steps):
            _keep(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, done)
            tqdm.write(f"step {done}: loss {float(loss.detach()):.3f}")
    return model.eval()


def _lr(training: Training, step: int) -> float:
    """Returns the rate of a step: it rises, and falls to a tenth as a cosine."""
    if step < training.warm_up:
        return training.lr * (step + 1) / training.warm_up
    share = (step - training.warm_up) / (training.steps - training.warm_up)
    return training.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)


def _keep(path: Path, state: dict[str, Any], steps: int) -> None:
    """Writes a checkpoint whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state | {"steps": steps}, partial)
    partial.replace(path)
