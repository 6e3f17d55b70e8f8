"""Half of the relations of a GPT leave in one shot: random, magnitude, Wanda, OBS.

A GPT-2 of Hugging Face with 10.8 million Parameters learns the bytes of Python's own standard
library (`heads_and_layers.load`), with whole files held out. Then half of the weights of every
projection of its blocks leave, anywhere or so that 2 of 4 consecutive parents of a child stay, and
nothing is trained afterwards. Blocks are pruned one after the other, each in one edit, with what
they receive from the blocks that are pruned already, as SparseGPT does. The calibration sequences
come from the training files.

In the graph of the whole model a relation of an attention has all numbers between a node and a
head. SparseGPT and Wanda choose single weights, so the graph here is that of the projections alone,
each with an input of its own.

`tools/published_pruning.py` compares with the published implementations of SparseGPT and Wanda on
the same weights.
"""

import copy
import functools
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from tqdm import tqdm

import grapnet as gn
from grapnet.rules import OBS, Magnitude, PruneWeakest, Random, RuleContext, Wanda
from grapnet.spaces import Adopted

from .heads_and_layers import load
from .statistics import paired, summary
from .tables import grid, interval

_BYTES = 256
TRAINED = Path("build/one_shot_gpt")
SHARE = 0.5  # of the relations leaves
# name -> how many of how many parents stay; None: any half of the relations leaves
PATTERNS: dict[str, tuple[int, int] | None] = {"50 %": None, "2:4": (2, 4)}
METHODS = ("random", "magnitude", "Wanda", "OBS")


@dataclass(frozen=True)
class Training:
    """A byte-level GPT-2 of 10.8 million Parameters, and how it is trained."""

    width: int = 384
    layers: int = 6
    heads: int = 6  # of each layer
    length: int = 128  # of a sequence, in bytes
    batch: int = 16
    steps: int = 4000
    warm_up: int = 100  # steps
    cool_down: int = 800  # steps at the end, in which the rate falls to 0
    lr: float = 1e-3  # between them
    seed: int = 0
    most_bytes: int | None = None  # of every split; None takes all
    keep_every: int = 200  # steps between the checkpoints of a training that goes on


@dataclass(frozen=True)
class Settings:
    """Half of the weights of all projections leave in one shot."""

    training: Training = field(default_factory=Training)
    calibration: int = 128  # sequences of the training files
    windows: int = 128  # of the held-out files that perplexity is measured on
    reads: str = "test"  # the split that is reported; "validation" to choose settings
    keeps: bool = True  # the trained model and its checkpoints in build/one_shot_gpt
    seeds: tuple[int, ...] = (0, 1, 2)  # of the calibration sequences and the random choice


FAST = Settings(
    training=Training(
        width=48,
        layers=2,
        heads=3,
        length=32,
        steps=40,
        warm_up=5,
        cool_down=10,
        most_bytes=100_000,
    ),
    calibration=16,
    windows=32,
    keeps=False,
    seeds=(0, 1),
)


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


def trained(training: Training, text: Tensor, folder: Path | None) -> Any:
    """Returns the trained model; a folder keeps it, and an interrupted training goes on."""
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
    return model.eval()


def _lr(training: Training, step: int) -> float:
    """Returns the rate of a step: it rises, stays, and falls."""
    rising = (step + 1) / training.warm_up
    falling = (training.steps - step) / training.cool_down
    return training.lr * min(1.0, rising, falling)


def _keep(path: Path, state: dict[str, Any], steps: int) -> None:
    """Writes a checkpoint whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state | {"steps": steps}, partial)
    partial.replace(path)


def perplexity(model: Any, text: Tensor, windows: int, length: int) -> float:
    """Returns the perplexity of a byte, over windows that are spread over a text."""
    starts = torch.linspace(0, len(text) - length, windows).long()
    total = 0.0
    with torch.no_grad():
        for some in starts.split(16):
            tokens = text[some[:, None] + torch.arange(length)].long()
            total += float(loss_of(model, tokens)) * len(some)
    return math.exp(total / len(starts))


def projections(model: Any) -> list[str]:
    """Returns the names of the modules that are pruned: the matrices of the blocks."""
    kinds = (nn.Linear, transformers.Conv1D)
    found = []
    for name, module in model.transformer.h.named_modules():
        if isinstance(module, kinds):
            found.append(f"transformer.h.{name}")
    return found


class Projections(nn.Module):
    """The projections of a GPT, each of which reads an input of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList()
        for block in model.transformer.h:
            matrices = [one for one in block.modules() if isinstance(one, transformers.Conv1D)]
            self.blocks.append(nn.ModuleList(matrices))

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """Returns what each of them makes of its input."""
        return [module(x) for module, x in zip(self._modules_in_order(), inputs, strict=True)]

    def adopted(self) -> Adopted:
        """Returns their graph, in which every weight is a relation."""
        inputs = [torch.zeros(2, module.nx) for module in self._modules_in_order()]
        return gn.adopt(self, *inputs)

    def names(self, block: int) -> list[str]:
        """Returns the names of the projections of a block in the graph."""
        return [f"blocks.{block}.{number}" for number in range(len(self.blocks[block]))]

    def _modules_in_order(self) -> list[Any]:
        return [module for block in self.blocks for module in block]


def embedded(model: Any, tokens: Tensor) -> Tensor:
    """Returns what the first block receives, [sequences, length, width]."""
    places = torch.arange(tokens.shape[1])
    return model.transformer.wte(tokens) + model.transformer.wpe(places)


def rules_of(net: Adopted, method: str, pattern: tuple[int, int] | None) -> list[PruneWeakest]:
    """Returns one rule a block for a method of the study.

    Wanda ranks for each child, as published; the others rank within a projection.
    """
    criteria: dict[str, Any] = {
        "random": Random(),
        "magnitude": Magnitude(),
        "Wanda": Wanda(),
        "OBS": OBS(),
    }
    return block_rules(net, criteria[method], pattern)


def block_rules(
    net: Adopted, criterion: Any, pattern: tuple[int, int] | None
) -> list[PruneWeakest]:
    """Returns one rule a block, which halves each of its projections by a criterion."""
    projected: Any = net.model
    rules = []
    for block in range(len(projected.blocks)):
        names = projected.names(block)
        if pattern is not None:
            rule = PruneWeakest(pattern=pattern, by=criterion, transitions=names)
        elif isinstance(criterion, Wanda):
            rule = PruneWeakest(SHARE, by=criterion, transitions=names, scope="child")
        else:
            rule = PruneWeakest(
                SHARE, by=criterion, transitions=names, scope="transition", compare="score"
            )
        rules.append(rule)
    return rules


@torch.no_grad()
def prune(
    model: Any, net: Adopted, rules: Sequence[PruneWeakest], tokens: Tensor, seed: int
) -> None:
    """Prunes the blocks of a model one after the other, each in one edit.

    Args:
        model: the GPT.
        net: the graph of its projections.
        rules: one for each block.
        tokens: the calibration sequences, [sequences, length].
        seed: of random choices.
    """
    generator = torch.Generator().manual_seed(seed)
    stream = embedded(model, tokens)
    for number, (block, rule) in enumerate(zip(model.transformer.h, rules, strict=True)):
        recorders = rule.recorders(net)
        for recorder in recorders.values():
            recorder.arm(net)
        if recorders:
            _passed(block, stream)
        for recorder in recorders.values():
            recorder.disarm()
        with net.edit(reason=f"block {number}", generator=generator) as edit:
            rule(net, edit, RuleContext(evidence=recorders))
        stream = _passed(block, stream)


def _passed(block: nn.Module, stream: Tensor) -> Tensor:
    """Returns what a block makes of the stream, some sequences at a time."""
    return torch.cat([block(some) for some in stream.split(16)])


def stages(settings: Settings) -> list[list[str]]:
    """Returns the parts of a seed: the training, which all others wait for, and the methods."""
    parts = []
    for pattern in PATTERNS:
        parts += [f"{method}, {pattern}" for method in METHODS]
    return [["dense"], parts]


@functools.cache
def _prepared(training: Training, keeps: bool) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """Returns the trained model, the texts, and a description of them, once a process."""
    texts, about = load(training.most_bytes)
    folder = None
    if keeps:
        folder = TRAINED
    return trained(training, texts["train"], folder), texts, about


def one_part(settings: Settings, seed: int, part: str, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the perplexity of the trained model, or of one that a method has pruned."""
    model, texts, about = _prepared(settings.training, settings.keeps)
    model = copy.deepcopy(model)
    text = texts[settings.reads]
    length = settings.training.length
    if part == "dense":
        return {
            "data": about,
            "transformers": transformers.__version__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "perplexity": perplexity(model, text, settings.windows, length),
        }
    start = time.perf_counter()
    method, pattern = part.split(", ")
    net = Projections(model).adopted()
    before = _logits(model, text, length)
    relations = net.count().relations
    tokens = sequences(texts["train"], settings.calibration, length, seed)
    prune(model, net, rules_of(net, method, PATTERNS[pattern]), tokens, seed)
    numbers: dict[str, Any] = {
        "seconds": round(time.perf_counter() - start, 1),
        "perplexity": perplexity(model, text, settings.windows, length),
        "kept": net.count().relations / relations,
        "most of a group": _most_of_a_group(net),
        "changed": not torch.equal(_logits(model, text, length), before),
    }
    for _ in model.transformer.h:
        net.undo()
    numbers["same logits after undo"] = torch.equal(_logits(model, text, length), before)
    return numbers


@torch.no_grad()
def _logits(model: Any, text: Tensor, length: int) -> Tensor:
    """Returns the logits of some held-out bytes."""
    return model(text[: 4 * length].long().view(4, -1)).logits


def _most_of_a_group(net: Adopted) -> int:
    """Returns the largest number of relations that a child has to 4 consecutive parents."""
    most = 0
    projected: Any = net.model
    for block in projected.blocks:
        for module in block:
            present = module.weight.detach() != 0  # [in, out]
            groups = present.view(-1, 4, present.shape[1]).sum(1)
            most = max(most, int(groups.max()))
    return most


def summarise(settings: Settings, seeds: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Returns means over the seeds, the order of the methods, and OBS beside the others."""
    rows = list(seeds.values())
    found: dict[str, Any] = {"dense": rows[0]["dense"]["perplexity"]}
    for pattern in PATTERNS:
        values = {}
        for method in METHODS:
            values[method] = [row[f"{method}, {pattern}"]["perplexity"] for row in rows]
        means = {method: summary(some) for method, some in values.items()}
        one: dict[str, Any] = {"perplexity": means}
        one["order"] = sorted(METHODS, key=lambda method: means[method].mean)
        for method in METHODS[:-1]:
            one[f"OBS - {method}"] = paired(values["OBS"], values[method])._asdict()
        found[pattern] = one
    return found


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    for seed, row in result["seeds"].items():
        for name, one in row.items():
            if name == "dense":
                continue
            # SparseGPT's thresholds, and shares that are no whole numbers, round.
            if abs(one["kept"] - (1 - SHARE)) > 1e-3:
                found.append(f"kept: {one['kept']:.4f} with seed {seed}, {name}")
            if name.endswith("2:4") and one["most of a group"] > 2:
                found.append(f"pattern: {one['most of a group']} of 4 with seed {seed}, {name}")
            for key in ("changed", "same logits after undo"):
                if not one[key]:
                    found.append(f"{key}: not so with seed {seed}, {name}")
    for pattern in PATTERNS:
        one = result["summary"][pattern]
        for method in METHODS[:-1]:
            if not one[f"OBS - {method}"]["high"] < 0:
                found.append(
                    f"perplexity, {pattern}: OBS - {method} is {interval(one[f'OBS - {method}'])},"
                    " not below 0"
                )
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the perplexities as a table."""
    means = result["summary"]
    rows = []
    for method in METHODS:
        cells = []
        for pattern in PATTERNS:
            mean, std, _ = means[pattern]["perplexity"][method]
            cells.append(f"{mean:.3f} ± {std:.3f}")
        rows.append((method, *cells))
    first = next(iter(result["seeds"].values()))["dense"]
    lines = [grid(("method", *PATTERNS), rows), ""]
    for pattern in PATTERNS:
        order = " < ".join(means[pattern]["order"])
        lines.append(f"Order of the perplexities at {pattern}: {order}.")
    lines.append(
        f"The dense model with {first['parameters']:,} Parameters has a perplexity of"
        f" {means['dense']:.3f} a byte. Deviations are those over calibration sequences and random"
        " choices; the model is the same."
    )
    return "\n".join(lines)
