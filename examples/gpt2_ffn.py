"""GPT-2 with editable feed-forward blocks: train, graft in mid-training, prune by half, go on,
save, restore, ungraft.

`python -m examples.gpt2_ffn` does it with a tiny GPT-2 with random weights on synthetic text, in a
few seconds.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.convert import ffn_handles, graft_ffn
from grapnet.integrations._extra import require

TEXT = "the graph is the network, and the network is data that you can edit while it trains. "


@dataclass
class Settings:
    """A model of two layers that learns one sentence, letter by letter."""

    width: int = 32
    hidden: int = 128  # of every feed-forward block
    steps: int = 100  # before the graft, and again after the cut
    batch: int = 8
    length: int = 32  # letters of a sequence
    fraction: float = 0.5  # of the relations that are cut
    units: int = 16  # hidden units that are removed from every block as well
    seed: int = 0


def main(settings: Settings, path: Path) -> dict[str, object]:
    """Runs it all, with the checkpoint at `path`, and returns what happened."""
    torch.manual_seed(settings.seed)
    letters = sorted(set(TEXT))
    text = torch.tensor([letters.index(letter) for letter in TEXT * 2])
    model = build(len(letters), settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = {"at first": train(model, optimizer, text, settings)}

    handles = graft_ffn(model, optimizer=optimizer)  # the optimizer goes on with its moments
    for handle in handles:
        handle.remove_hidden(
            handle.importance().argsort()[: settings.units], reason="weakest units"
        )
        with handle.net.edit(reason="prune by magnitude") as edit:
            for layer in handle.net.layers[:-1]:
                edit.cut(layer.outgoing().smallest(fraction=settings.fraction))
    losses["after the cut"] = train(model, optimizer, text, settings)

    gn.save(path, model, optimizer=optimizer)
    restored = build(len(letters), settings)  # dense blocks, over which the file puts the nets
    gn.restore(path, into=restored)
    sequence = text[None, : settings.length]
    same = torch.equal(restored.eval()(sequence).logits, model.eval()(sequence).logits)
    relations = sum(
        net.count().relations for handle in ffn_handles(restored) for net in handle.nets
    )
    written = continued(restored, text[:8], letters)
    gn.ungraft(restored)
    return {
        "losses": losses,
        "relations": relations,
        "restored_bit_for_bit": same,
        "text": written,
        "hidden": restored.transformer.h[0].mlp.c_fc.nf,  # pyright: ignore
    }


def build(n_letters: int, settings: Settings) -> nn.Module:
    """Returns a tiny GPT-2 with random weights."""
    transformers = require("transformers", "transformers")
    shape = {
        "n_embd": settings.width,
        "n_inner": settings.hidden,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
    }
    tokens = {"vocab_size": n_letters, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **tokens))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, settings: Settings
) -> float:
    """Trains for some steps on random pieces of the text and returns the last loss."""
    loss = torch.zeros(())
    for _ in range(settings.steps):
        starts = torch.randint(len(text) - settings.length, (settings.batch,))
        sequences = torch.stack(
            [text[start : start + settings.length] for start in starts.tolist()]
        )
        optimizer.zero_grad()
        loss = model.train()(input_ids=sequences, labels=sequences).loss
        loss.backward()
        optimizer.step()
    return round(float(loss.detach()), 3)


def continued(model: nn.Module, prompt: Tensor, letters: list[str]) -> str:
    """Returns a prompt and how the model goes on, the likeliest letter each time."""
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    ids = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **settings)  # pyright: ignore
    return "".join(letters[number] for number in ids[0].tolist())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, value in main(
            Settings(steps=given.steps), Path(folder) / "gpt2.safetensors"
        ).items():
            print(f"{name}: {value}")
