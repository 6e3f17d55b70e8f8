"""Heads and layers of a GPT: removed by score while it is fine-tuned, against removal at random.

A GPT-2 of Hugging Face learns the bytes of Python's own standard library, the modules that come
with the interpreter that runs this (PSF licence), so that every machine has the data. Whole files
are held out: one tenth for choices of settings, one tenth for the numbers reported here. A quarter
of the layers and then a third of the heads that are left leave in several edits during fine-tuning,
and the optimizer follows. Every arm starts from the same trained model and takes the same steps on
the same batches.

The score of a layer is the loss of the model without it, in a trial; that of a head is
|∂loss/∂gate| (`grapnet.integrations.transformers.scores`). Both are computed on batches of the
training files.
"""

import copy
import hashlib
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import grapnet as gn
import grapnet.integrations.transformers as hf
from grapnet.rules import PruneNodes, RuleContext
from grapnet.spaces import Adopted, Space

from .statistics import paired, summary
from .tables import grid, interval, spread

ARMS = ("no edit", "by score", "at random")
# Folders of the standard library that are not text of programs, or not part of it.
_LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
_BYTES = 256


@dataclass(frozen=True)
class Settings:
    """A byte-level GPT-2 of 14 million Parameters."""

    width: int = 384
    layers: int = 8
    heads: int = 6  # of each layer
    length: int = 256  # of a sequence, in bytes
    batch: int = 64
    steps: int = 1000  # of training, before anything is removed
    tuning: int = 300  # steps of fine-tuning, in which parts leave
    lr: float = 1e-3  # of training, after 100 steps of warming up
    tuning_lr: float = 5e-4  # at the start of fine-tuning; it falls to 0 as a cosine
    layers_removed: float = 1 / 4
    heads_removed: float = 1 / 3  # of those in the layers that are left
    edits: int = 4  # in which the heads leave
    scored: int = 8  # batches that scores are computed on
    windows: int = 2048  # of the held-out files that perplexity is measured on
    reads: str = "test"  # the split that is reported; "validation" to choose settings
    most_bytes: int | None = None  # of every split; None takes all
    device: str = "auto"  # "cuda" where there is one
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


FAST = Settings(
    width=24,
    layers=3,
    heads=3,
    length=32,
    batch=8,
    steps=40,
    tuning=16,
    edits=2,
    scored=1,
    windows=32,
    most_bytes=100_000,
    device="cpu",
    seeds=(0, 1),
)


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns the perplexities of all arms, and whether undo and `generate` hold."""
    start = time.perf_counter()
    device = _device(settings)
    data, about = load(settings.most_bytes)
    data = {split: text.to(device) for split, text in data.items()}
    trained = _trained(settings, data, seed, device)
    found: dict[str, Any] = {
        "data": about,
        "machine": {"device": _name(device), "transformers": transformers.__version__},
        "trained": {"perplexity": trained.perplexity(), "parameters": trained.parameters()},
        "at once": {},
        "arms": {},
    }
    for arm in ARMS[1:]:
        found["at once"][arm] = _at_once(trained.copied(), arm, seed)
    for arm in ARMS:
        found["arms"][arm] = _tuned(trained.copied(), arm, seed)
    found["seconds"] = round(time.perf_counter() - start, 1)
    return found


def load(most_bytes: int | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the bytes of the training, validation and test files as [n] uint8, and a description
    of them: at most so many of each.

    The name of a file decides where it belongs, so that a machine with another version of Python
    holds out the same files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if _LEFT_OUT.isdisjoint(name.parts):
            number = hashlib.sha256(name.as_posix().encode()).digest()[0] % 10
            split = {0: "test", 1: "validation"}.get(number, "train")
            parts[split].append(path.read_bytes())
    about: dict[str, Any] = {"source": "the standard library of Python, PSF licence"}
    texts = {}
    for split, files in parts.items():
        text = b"\n".join(files)[:most_bytes]
        texts[split] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        digest = hashlib.sha256(text).hexdigest()
        about[split] = {"files": len(files), "bytes": len(text), "sha256": digest}
    return texts, about


def _device(settings: Settings) -> torch.device:
    if settings.device != "auto":
        return torch.device(settings.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def _loss(model: Any, tokens: Tensor) -> Tensor:
    """Returns the loss of every byte but the first, given those before it."""
    logits = model(tokens).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """A model in training, with its optimizer and its data.

    Attributes:
        model: the GPT.
        optimizer: an AdamW.
    """

    def __init__(self, settings: Settings, data: dict[str, Tensor], device: torch.device) -> None:
        self.settings = settings
        self._data = data
        self._device = device
        config = transformers.GPT2Config(
            vocab_size=_BYTES,
            n_positions=settings.length,
            n_embd=settings.width,
            n_layer=settings.layers,
            n_head=settings.heads,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model: Any = transformers.GPT2LMHeadModel(config)
        self.model.to(device)
        self.optimizer = AdamW(self.model.parameters(), lr=settings.lr, weight_decay=0.01)

    def copied(self) -> "Training":
        """Returns an independent copy."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other.optimizer = AdamW(other.model.parameters(), lr=self.settings.lr, weight_decay=0.01)
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return other

    def adopted(self) -> Adopted:
        """Returns the model as a graph, whose edits the optimizer follows."""
        example = torch.zeros(2, 8, dtype=torch.long, device=self._device)
        return gn.adopt(self.model, example, optimizer=self.optimizer)

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Yields sequences from random places of the training files, [batch, length], for ever."""
        generator = torch.Generator().manual_seed(seed)
        text = self._data["train"]
        reach = torch.arange(self.settings.length, device=self._device)
        while True:
            starts = torch.randint(
                len(text) - self.settings.length, (self.settings.batch,), generator=generator
            )
            yield text[starts.to(self._device)[:, None] + reach].long()

    def step(self, tokens: Tensor, lr: float) -> None:
        """Trains on a batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        self.optimizer.zero_grad()
        is_gpu = self._device.type == "cuda"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=is_gpu):
            loss = _loss(self.model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def loss(self, tokens: Tensor) -> float:
        """Returns the loss of sequences, without training on them."""
        self.model.eval()
        with torch.no_grad():
            return float(_loss(self.model, tokens))

    def perplexity(self) -> float:
        """Returns the perplexity of a byte in the held-out files."""
        text = self._data[self.settings.reads]
        length = self.settings.length
        starts = torch.linspace(0, len(text) - length, self.settings.windows).long()
        reach = torch.arange(length)
        losses = []
        for some in starts.split(self.settings.batch):
            tokens = text[(some[:, None] + reach).to(text.device)].long()
            losses.append(self.loss(tokens) * len(some))
        return math.exp(sum(losses) / len(starts))

    def parameters(self) -> int:
        """Returns the number of Parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def logits(self) -> Tensor:
        """Returns the logits of some held-out bytes."""
        text = self._data[self.settings.reads]
        tokens = text[: 4 * self.settings.length].long().view(4, -1)
        self.model.eval()
        with torch.no_grad():
            return self.model(tokens).logits

    def prompt(self) -> Tensor:
        """Returns the first bytes of the held-out files, [1, length / 4]."""
        return self._data[self.settings.reads][: self.settings.length // 4].long()[None]


def _trained(
    settings: Settings, data: dict[str, Tensor], seed: int, device: torch.device
) -> Training:
    torch.manual_seed(seed)
    training = Training(settings, data, device)
    batches = training.batches(seed)
    for number in range(settings.steps):
        training.step(next(batches), settings.lr * min(1.0, (number + 1) / 100))
    return training


class Removal:
    """What leaves next: by score, or at random."""

    def __init__(self, training: Training, net: Adopted, arm: str, seed: int) -> None:
        self._training = training
        self._net = net
        self._by_score = arm == "by score"
        self._generator = torch.Generator().manual_seed(1000 + seed)
        self._batches = training.batches(2000 + seed)

    def layer(self) -> None:
        """Removes a layer: the one without which the loss is smallest."""
        layers = hf.layers(self._net)
        if self._by_score:
            tokens = self._tokens()
            losses = [self._loss_without(layer, tokens) for layer in layers]
            chosen = losses.index(min(losses))
        else:
            chosen = int(torch.randint(len(layers), (), generator=self._generator))
        with self._net.edit(reason="a layer") as edit:
            edit.remove(layers[chosen].container, layers[chosen].index)

    def _loss_without(self, layer: hf.TransformerLayer, tokens: list[Tensor]) -> float:
        with self._net.edit(reason="what is it for?", trial=True) as edit:
            edit.remove(layer.container, layer.index)
            edit.commit()
            return sum(self._training.loss(some) for some in tokens)

    def heads(self, count: int) -> None:
        """Removes heads: the weakest of all layers, of which each keeps one."""
        spaces = [layer.heads for layer in hf.layers(self._net)]
        total = sum(len(space) for space in spaces)
        rule = PruneNodes(
            fraction=count / total, scope="model", spaces=spaces, keep=1, by=self._scores()
        )
        with self._net.edit(reason="heads") as edit:
            rule(self._net, edit, RuleContext())

    def _scores(self) -> Callable[[Adopted, Space, Any], Tensor]:
        """Returns the criterion: one number per head of a layer."""
        if not self._by_score:
            return lambda net, heads, evidence: torch.rand(len(heads), generator=self._generator)
        scores = hf.scores(self._net, self._tokens(), _loss)
        return lambda net, heads, evidence: scores.nodes[heads]

    def _tokens(self) -> list[Tensor]:
        return [next(self._batches) for _ in range(self._training.settings.scored)]


def _counts(settings: Settings) -> tuple[int, int]:
    """Returns how many layers and how many heads leave."""
    layers = round(settings.layers * settings.layers_removed)
    heads = round((settings.layers - layers) * settings.heads * settings.heads_removed)
    return layers, heads


def _at_once(training: Training, arm: str, seed: int) -> dict[str, Any]:
    """Removes everything without training, and undoes it."""
    net = training.adopted()
    layers, heads = _counts(training.settings)
    before = training.logits()
    moments = _moments(training)
    removal = Removal(training, net, arm, seed)
    for _ in range(layers):
        removal.layer()
    removal.heads(heads)
    perplexity = training.perplexity()
    changed = not torch.equal(training.logits(), before)
    for _ in range(layers + 1):
        net.undo()
    after = _moments(training)
    return {
        "perplexity": perplexity,
        "changed": changed,
        "same logits after undo": bool(torch.equal(training.logits(), before)),
        "same optimizer after undo": all(
            bool(torch.equal(one, other)) for one, other in zip(moments, after, strict=True)
        ),
    }


def _moments(training: Training) -> list[Tensor]:
    found = []
    for parameter in training.model.parameters():
        found.append(training.optimizer.state[parameter]["exp_avg_sq"].clone())
    return found


def _tuned(training: Training, arm: str, seed: int) -> dict[str, Any]:
    """Fine-tunes, with removals in the first half of the steps."""
    settings = training.settings
    net = training.adopted()
    layers, heads = _counts(settings)
    removal = Removal(training, net, arm, seed)
    # Layers leave first, then heads: in step number → how many heads, 0 for a layer.
    due: dict[int, int] = {}
    if arm != "no edit":
        rounds = layers + settings.edits
        for number in range(rounds):
            count = 0
            if number >= layers:
                done = number - layers
                count = heads * (done + 1) // settings.edits - heads * done // settings.edits
            due[settings.tuning * number // (2 * rounds)] = count
    batches = training.batches(500 + seed)
    for number in range(settings.tuning):
        if due.get(number) == 0:
            removal.layer()
        elif number in due:
            removal.heads(due[number])
        lr = settings.tuning_lr * (1 + math.cos(math.pi * number / settings.tuning)) / 2
        training.step(next(batches), lr)
    found = {
        "perplexity": training.perplexity(),
        "parameters": training.parameters(),
        "layers": len(hf.layers(net)),
        "heads": [len(layer.heads) for layer in hf.layers(net)],
        "edits": len(net.history),
    }
    return found | _generated(training)


def _generated(training: Training) -> dict[str, Any]:
    """Continues a text with and without a cache of keys and values, in float64."""
    model = copy.deepcopy(training.model).double().eval()
    model.generation_config.pad_token_id = 0
    texts = []
    for use_cache in (True, False):
        count = training.settings.length // 4
        text = model.generate(
            training.prompt(), max_new_tokens=count, do_sample=False, use_cache=use_cache
        )
        texts.append(text[0].tolist())
    written = bytes(texts[0]).decode("utf-8", "replace")
    return {"same text with a cache": texts[0] == texts[1], "text": written}


def summarise(settings: Settings, seeds: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Returns means over the seeds, and the differences between the arms."""
    rows = list(seeds.values())

    def values(*way: str) -> list[float]:
        found: list[Any] = rows
        for key in way:
            found = [row[key] for row in found]
        return found

    found: dict[str, Any] = {"trained": summary(values("trained", "perplexity"))}
    for stage in ("at once", "arms"):
        arms = [arm for arm in ARMS if arm in rows[0][stage]]
        found[stage] = {arm: summary(values(stage, arm, "perplexity")) for arm in arms}
        difference = paired(
            values(stage, "by score", "perplexity"), values(stage, "at random", "perplexity")
        )
        found[f"{stage}, score - random"] = difference._asdict()
    kept = paired(values("arms", "by score", "perplexity"), values("arms", "no edit", "perplexity"))
    found["score - no edit"] = kept._asdict()
    return found


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    layers, heads = _counts(Settings(**result["settings"]))
    sizes = result["settings"]["layers"] - layers
    left = sizes * result["settings"]["heads"] - heads
    for seed, row in result["seeds"].items():
        for arm, one in row["at once"].items():
            for key in ("same logits after undo", "same optimizer after undo", "changed"):
                if not one[key]:
                    found.append(f"{key}: not so with seed {seed}, {arm}")
        for arm, one in row["arms"].items():
            if not one["same text with a cache"]:
                found.append(f"generate: another text with a cache, seed {seed}, {arm}")
            if arm != "no edit" and (one["layers"], sum(one["heads"])) != (sizes, left):
                found.append(
                    f"sizes: {one['layers']} layers and {sum(one['heads'])} heads are left with"
                    f" seed {seed}, {arm}, instead of {sizes} and {left}"
                )
    for stage in ("at once", "arms"):
        difference = result["summary"][f"{stage}, score - random"]
        if not difference["high"] < 0:
            found.append(
                f"perplexity, {stage}: by score - at random is {interval(difference)}, not below 0"
            )
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the perplexities as a table."""
    means = result["summary"]
    first = next(iter(result["seeds"].values()))
    rows = []
    for arm in ARMS:
        one = first["arms"][arm]
        at_once = "–"
        if arm in means["at once"]:
            at_once = spread(means["at once"][arm])
        rows.append(
            (
                arm,
                f"{one['layers']}",
                f"{sum(one['heads'])}",
                f"{one['parameters']:,}",
                at_once,
                spread(means["arms"][arm]),
            )
        )
    titles = ("removal", "layers", "heads", "Parameters", "perplexity right after", "fine-tuned")
    lines = [
        grid(titles, rows),
        "",
        f"Before fine-tuning the perplexity of a byte is {spread(means['trained'])}. By score - at"
        f" random: {interval(means['at once, score - random'])} right after,"
        f" {interval(means['arms, score - random'])} fine-tuned; by score - no edit:"
        f" {interval(means['score - no edit'])}.",
        "",
        _by_seed(result),
        "",
        f"Measured with {first['machine']['device']}, transformers"
        f" {first['machine']['transformers']}.",
    ]
    return "\n".join(lines)


def _by_seed(result: dict[str, Any]) -> str:
    """Returns the perplexities of every seed as a table."""
    rows = []
    for seed, found in result["seeds"].items():
        cells = []
        for stage in ("at once", "arms"):
            for arm in ("by score", "at random"):
                cells.append(f"{found[stage][arm]['perplexity']:.2f}")
        rows.append((seed, *cells))
    titles = ("seed", "by score, right after", "at random", "by score, fine-tuned", "at random")
    return grid(titles, rows)
