"""Sets one-shot pruning side by side with the published SparseGPT and Wanda, on the same weights.

`python -m tools.published_pruning --sparsegpt DIR --wanda DIR --json FILE` reads checkouts of
https://github.com/IST-DASLab/sparsegpt and https://github.com/locuslab/wanda, runs their own code
on the GPT of `studies.one_shot_gpt` on a CPU, and runs the library on a copy of it, with the same
calibration sequences. It compares which relations are left, their weights, and the perplexities on
held-out text, at half of the relations and at 2 of 4. Settings are those of the published code:
blocks of 128 columns, a damping of 0.01, a threshold a block for SparseGPT, a ranking for each
output for Wanda, and no column for the bias.

SparseGPT needs the inverse of a Gram matrix, which amplifies the rounding of float32: the published
code leaves other relations if the same calibration sequences come in another order. So there are
four kinds of rows of SparseGPT:

- In float64 each side computes everything by itself.
- In float32 with "the same sums", the library chooses and solves from the Gram matrices that the
  published code has summed, of inputs that the published code's own pruned model has computed. The
  damping, the inverse, the choice, and the weights are each side's own, in float32. How far the
  library's own sums of the same inputs are from these is measured beside it.
- In float32 each side computes everything by itself, and sums in an order of its own.
- The published code in two orders of the sequences says what rounding does to it alone.

It fails when perplexities differ in the first three digits, when sums differ by more than 1e-5, or
when less than 0.9995 of the relations agree. Where float32 sums are each side's own, SparseGPT may
differ in twice as many relations as between the two orders.
"""

import argparse
import contextlib
import copy
import importlib
import io
import json
import platform
import subprocess
import sys
import time
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad

from grapnet.rules import OBS, RuleContext, Wanda
from studies import one_shot_gpt as study

DIGITS = 3  # of a perplexity
LEAST = 0.9995  # of the relations agree: 1 in three digits
SUMS = 1e-5  # the most that the library's sums are from the published ones, relative


class Block(nn.Module):
    """A block of a GPT-2, called as those of Llama are."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
        """Returns what the block returns, in a tuple; its attention is causal by itself."""
        return (self.block(x),)


class AsLlama(nn.Module):
    """A GPT-2 with the names of Llama's parts that the published code of Wanda reads."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.gpt = model
        self.model: Any = nn.Module()
        self.model.layers = nn.ModuleList(Block(block) for block in model.transformer.h)
        self.config = model.config
        self.seqlen = model.config.n_positions
        self.hf_device_map: dict[str, Any] = {}

    def forward(self, tokens: Tensor) -> None:
        """Computes the stream, without the logits, which are not read here."""
        transformer = self.gpt.transformer
        x = transformer.wte(tokens) + transformer.wpe(torch.arange(tokens.shape[1]))
        for layer in self.model.layers:
            (x,) = layer(x, attention_mask=None, position_ids=None)


def with_linears(model: Any) -> Any:
    """Returns a copy whose projections are Linears, as the published code of Wanda expects."""
    found = copy.deepcopy(model)
    for name in study.projections(model):
        path, _, last = name.rpartition(".")
        old: Any = found.get_submodule(name)
        linear = nn.Linear(*old.weight.shape)
        linear.weight.data = old.weight.data.t().contiguous()
        linear.bias.data = old.bias.data.clone()
        setattr(found.get_submodule(path), last, linear)
    return found


def weights_of(model: Any) -> dict[str, Tensor]:
    """Returns the weights of the projections by their names, [out, in]."""
    found = {}
    for name in study.projections(model):
        module: Any = model.get_submodule(name)
        weight = module.weight.detach()
        if isinstance(module, transformers.Conv1D):
            weight = weight.t()
        found[name] = weight.clone()
    return found


@contextlib.contextmanager
def checkout(folder: Path) -> Iterator[None]:
    """Imports from a checkout, without what its code needs a GPU or a download for."""
    datasets = types.ModuleType("datasets")
    datasets.load_dataset = None  # pyright: ignore[reportAttributeAccessIssue]
    known = set(sys.modules)
    with (
        mock.patch.object(sys, "path", [str(folder.resolve()), *sys.path]),
        mock.patch.dict(sys.modules, {"datasets": datasets}),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.empty_cache"),
        contextlib.redirect_stdout(io.StringIO()),
        torch.no_grad(),
    ):
        yield
    for name in set(sys.modules) - known:
        file = getattr(sys.modules[name], "__file__", None)
        # Both checkouts have modules of the same names.
        if file is not None and Path(file).is_relative_to(folder.resolve()):
            del sys.modules[name]


@contextlib.contextmanager
def precision_of(model: Any) -> Iterator[None]:
    """Lets code that asks for float32 compute in the precision of a model."""
    dtype = next(model.parameters()).dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)

    def as_model(tensor: Tensor) -> Tensor:
        return tensor.to(dtype)

    try:
        with mock.patch.object(Tensor, "float", as_model):
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class Sums:
    """The Gram matrices of what the projections read while the published code prunes a model.

    Attributes:
        published: those that it has summed, [in, in], by the name of the evidence in the library.
        apart: how far the library's own sums over the same passes are from each, relative.
    """

    published: dict[str, Tensor] = field(default_factory=dict)
    apart: list[float] = field(default_factory=list)

    def add(self, layer: Any, name: str, recorder: Any) -> None:
        """Takes in the sum of a layer of the published code, and that of a recorder beside it."""
        self.published[name] = layer.H.clone()
        # It takes twice the mean over sequences.
        own = recorder.gram[:-1, :-1] * (2 / layer.nsamples)
        self.apart.append(float((own - layer.H).norm() / own.norm()))


@dataclass(frozen=True)
class Summed:
    """Stands for a recorder that has seen such a Gram matrix, [in + 1, in + 1]."""

    gram: Tensor
    count: int = 1
    is_stale: bool = False


def published_sparsegpt(
    folder: Path,
    model: Any,
    tokens: Tensor,
    pattern: tuple[int, int] | None,
    sums: Sums | None = None,
) -> dict[str, Tensor]:
    """Returns the weights that SparseGPT's own class leaves, block by block as its scripts do.

    Args:
        folder: the checkout.
        model: the GPT, which stays as it is.
        tokens: the calibration sequences.
        pattern: how many of how many parents stay; None for a share.
        sums: takes in what is summed on the way.
    """
    model = copy.deepcopy(model)
    net = study.Projections(model).adopted()
    rules = study.block_rules(net, OBS(published=True), pattern)
    with checkout(folder), precision_of(model):
        kind = importlib.import_module("sparsegpt").SparseGPT
        stream = study.embedded(model, tokens)
        for block, rule in zip(model.transformer.h, rules, strict=True):
            found = {}
            hooks = []
            for module in block.modules():
                if isinstance(module, transformers.Conv1D):
                    found[module] = kind(module)
                    hooks.append(module.register_forward_hook(_passed_on(found[module])))
            recorders: dict[str, Any] = {}
            if sums is not None:
                recorders = rule.recorders(net)
            for recorder in recorders.values():
                recorder.arm(net)
            for one in stream:
                block(one[None])
            for hook in hooks:
                hook.remove()
            for name, recorder in recorders.items():
                recorder.disarm()
                assert sums is not None
                sums.add(found[recorder.reader.module(net)], name, recorder)
            n, m = pattern or (0, 0)
            for layer in found.values():
                # Their n is the number of weights that leave.
                layer.fasterprune(study.SHARE, prunen=m - n, prunem=m, percdamp=0.01, blocksize=128)
                layer.free()
            stream = torch.cat([block(one[None]) for one in stream])
    return weights_of(model)


def _passed_on(layer: Any) -> Callable[..., None]:
    """Returns a hook that lets a layer of the published code see inputs and outputs."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        layer.add_batch(inputs[0].data, output.data)

    return hook


def published_wanda(
    folder: Path, model: Any, tokens: Tensor, pattern: tuple[int, int] | None
) -> dict[str, Tensor]:
    """Returns the weights that Wanda's own `prune_wanda` leaves."""
    model = with_linears(model)
    n, m = pattern or (0, 0)
    given = types.SimpleNamespace(
        nsamples=len(tokens), seed=0, sparsity_ratio=study.SHARE, use_variant=False
    )
    with checkout(folder), precision_of(model):
        prune = importlib.import_module("lib.prune")
        loader = [(one[None],) for one in tokens]
        with mock.patch.object(prune, "get_loaders", return_value=(loader, None)):
            # Their n is the number of weights that leave.
            prune.prune_wanda(
                given, AsLlama(model), None, torch.device("cpu"), prune_n=m - n, prune_m=m
            )
    return weights_of(model)


def ours(
    criterion: Any, model: Any, tokens: Tensor, pattern: tuple[int, int] | None
) -> dict[str, Tensor]:
    """Returns the weights that the library leaves."""
    model = copy.deepcopy(model)
    net = study.Projections(model).adopted()
    study.prune(model, net, study.block_rules(net, criterion, pattern), tokens, seed=0)
    return weights_of(model)


def ours_of(
    sums: Sums, model: Any, tokens: Tensor, pattern: tuple[int, int] | None
) -> dict[str, Tensor]:
    """Returns the weights that the library leaves, given the sums of the published code.

    The weights of a block are those of the trained model until it is pruned, so that nothing else
    depends on the blocks before it.
    """
    model = copy.deepcopy(model)
    net = study.Projections(model).adopted()
    for rule in study.block_rules(net, OBS(published=True), pattern):
        evidence = {}
        for name in rule.recorders(net):
            # No bias compensates; its row and column are not read.
            evidence[name] = Summed(pad(sums.published[name], (0, 1, 0, 1)))
        with net.edit() as edit:
            rule(net, edit, RuleContext(evidence=evidence))
    return weights_of(model)


def compared(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Any]:
    """Returns on what share of the relations two results agree, and how far weights differ."""
    relations = 0
    agreed = 0
    left = {"ours": 0, "published": 0}
    lowest = 1.0
    apart = 0.0
    size = 0.0
    for name, ours_here in one.items():
        theirs = other[name]
        same = (ours_here != 0) == (theirs != 0)
        relations += same.numel()
        agreed += int(same.sum())
        lowest = min(lowest, float(same.double().mean()))
        left["ours"] += int((ours_here != 0).sum())
        left["published"] += int((theirs != 0).sum())
        apart += float((ours_here - theirs).double().square().sum())
        size += float(theirs.double().square().sum())
    return {
        "relations": relations,
        "kept": left,
        "share that agrees": agreed / relations,
        "lowest share of a projection": lowest,
        "difference of the weights, relative": (apart / size) ** 0.5,
    }


def failures(found: dict[str, Any]) -> list[str]:
    """Returns one line for every comparison that fails."""
    lines = []
    for name, one in found.items():
        if "perplexity" not in one:
            continue
        least = LEAST
        noise = found.get(f"{name}, published in two orders")
        if noise is not None:
            # Both sides round, and so do both orders.
            least = min(LEAST, 1 - 2 * (1 - noise["share that agrees"]))
        if one["share that agrees"] < least:
            lines.append(f"{name}: {one['share that agrees']:.6f} of the relations agree")
        apart = one.get("difference of the sums, relative", 0.0)
        if apart > SUMS:
            lines.append(f"{name}: sums differ by {apart:.1e}")
        a, b = (f"{one['perplexity'][side]:.{DIGITS}g}" for side in ("ours", "published"))
        if a != b:
            lines.append(f"{name}: perplexities {a} and {b}")
    return lines


def _as_read(content: Any) -> Any:
    return json.loads(json.dumps(content))


def commit_of(folder: Path) -> str:
    """Returns the commit of a checkout, or "unknown" where there is no git."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


class Comparison:
    """A trained model with calibration sequences, on which both sides run."""

    def __init__(self, settings: study.Settings, folder: Path | None) -> None:
        self.settings = settings
        self.texts, self.about = study.load(settings.training.most_bytes)
        self.model = study.trained(settings.training, self.texts["train"], folder)
        self.tokens = study.sequences(
            self.texts["train"], settings.calibration, settings.training.length, seed=0
        )

    def perplexity(self, weights: dict[str, Tensor]) -> float:
        """Returns the perplexity of the model with other weights, in float32."""
        model = copy.deepcopy(self.model)
        for name, weight in weights.items():
            model.get_submodule(name).weight.data = weight.t().contiguous().float()
        return study.perplexity(
            model,
            self.texts[self.settings.reads],
            self.settings.windows,
            self.settings.training.length,
        )

    def rows(
        self, sparsegpt: Path, wanda: Path, done: Collection[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the comparisons by name, except those that are done."""
        sides = {
            "SparseGPT": (OBS(published=True), published_sparsegpt, sparsegpt),
            "Wanda": (Wanda(), published_wanda, wanda),
        }
        runs = (
            ("SparseGPT", torch.float32),
            ("Wanda", torch.float32),
            ("SparseGPT", torch.float64),
        )
        for method, dtype in runs:
            criterion, published, folder = sides[method]
            model = copy.deepcopy(self.model).to(dtype)
            for pattern, groups in study.PATTERNS.items():
                name = f"{method}, {pattern}, {str(dtype).removeprefix('torch.')}"
                if name not in done:
                    theirs = partial(published, folder, model, self.tokens, groups)
                    mine = partial(ours, criterion, model, self.tokens, groups)
                    yield name, self._compared(mine, theirs)
        for pattern, groups in study.PATTERNS.items():
            name = f"SparseGPT, {pattern}, float32, the same sums"
            if name not in done:
                sums = Sums()
                given = (self.model, self.tokens, groups)
                row = self._compared(
                    partial(ours_of, sums, *given),
                    partial(published_sparsegpt, sparsegpt, *given, sums),
                )
                # The library's recorders have run beside the published code.
                del row["seconds"]
                yield name, row | {"difference of the sums, relative": max(sums.apart)}
        for pattern, groups in study.PATTERNS.items():
            name = f"SparseGPT, {pattern}, float32, published in two orders"
            if name not in done:
                one = published_sparsegpt(sparsegpt, self.model, self.tokens, groups)
                other = published_sparsegpt(sparsegpt, self.model, self.tokens.flip(0), groups)
                yield name, compared(one, other)

    def _compared(
        self, ours: Callable[[], dict[str, Tensor]], published: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Any]:
        """Runs both sides, and returns how they differ and how long they took."""
        start = time.perf_counter()
        theirs = published()
        middle = time.perf_counter()
        mine = ours()
        end = time.perf_counter()
        found = compared(mine, theirs)
        found["perplexity"] = {
            "ours": self.perplexity(mine),
            "published": self.perplexity(theirs),
        }
        found["seconds"] = {
            "ours": round(end - middle, 1),
            "published": round(middle - start, 1),
        }
        return found


def main() -> int:
    """Compares, and returns 1 where a comparison fails.

    The JSON is written after each of them; a run that was interrupted goes on with the others.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sparsegpt", type=Path, required=True, metavar="DIR")
    parser.add_argument("--wanda", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--fast", action="store_true", help="the model of the fast study")
    parser.add_argument("--steps", type=int, help="train the model for so many steps (4000)")
    given = parser.parse_args()
    settings = study.FAST if given.fast else study.Settings()
    if given.steps is not None:
        settings = replace(settings, training=replace(settings.training, steps=given.steps))
    comparison = Comparison(settings, study.TRAINED if settings.keeps else None)
    content: dict[str, Any] = {
        "settings": asdict(comparison.settings),
        "data": comparison.about,
        "commits": {"sparsegpt": commit_of(given.sparsegpt), "wanda": commit_of(given.wanda)},
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "dense": comparison.perplexity({}),
        "compared": {},
    }
    if given.json.exists():
        kept = json.loads(given.json.read_text(encoding="utf-8"))
        if all(kept[key] == _as_read(content[key]) for key in ("settings", "commits", "versions")):
            content["compared"] = kept["compared"]
    given.json.parent.mkdir(parents=True, exist_ok=True)
    done = set(content["compared"])
    for name, one in comparison.rows(given.sparsegpt, given.wanda, done):
        content["compared"][name] = one
        content["failures"] = failures(content["compared"])
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {one}", flush=True)
    lines = failures(content["compared"])
    for line in lines:
        print("FAILED", line)
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
