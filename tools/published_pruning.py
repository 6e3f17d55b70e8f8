"""Sets one-shot pruning side by side with the published SparseGPT and Wanda, on the same weights.

`python -m tools.published_pruning --sparsegpt DIR --wanda DIR --json FILE` reads checkouts of
https://github.com/IST-DASLab/sparsegpt and https://github.com/locuslab/wanda, runs their own code
on the GPT of `studies.one_shot_gpt` on a CPU, and runs the library on a copy of it, with the same
calibration sequences. It compares which relations are left, their weights, and the perplexities
on held-out text, at half of the relations and at 2 of 4. It fails when the share of relations on
which both agree, or the perplexities, differ in the first three digits.

Settings are those of the published code: blocks of 128 columns, a damping of 0.01, a threshold a
block for SparseGPT, and a ranking for each output for Wanda, without a column for the bias.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from grapnet.rules import OBS, Wanda
from studies import one_shot_gpt as study

DIGITS = 3


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
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Block(block) for block in model.transformer.h)
        self.config = model.config
        self.seqlen = model.config.n_positions
        self.hf_device_map: dict[str, Any] = {}

    def forward(self, tokens: Tensor) -> None:
        """Computes the stream, without the logits, which nobody reads here."""
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
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
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
        if file is not None and Path(file).is_relative_to(folder):
            del sys.modules[name]


def published_sparsegpt(
    folder: Path, model: Any, tokens: Tensor, pattern: tuple[int, int] | None
) -> dict[str, Tensor]:
    """Returns the weights that SparseGPT's own class leaves, block by block as its scripts do."""
    model = copy.deepcopy(model)
    with checkout(folder):
        kind = importlib.import_module("sparsegpt").SparseGPT
        stream = study.embedded(model, tokens)
        for block in model.transformer.h:
            found = {}
            hooks = []
            for module in block.modules():
                if isinstance(module, transformers.Conv1D):
                    found[module] = kind(module)
                    hooks.append(module.register_forward_hook(_passed_on(found[module])))
            for one in stream:
                block(one[None])
            for hook in hooks:
                hook.remove()
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
    with checkout(folder):
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


def perplexity_with(weights: dict[str, Tensor], model: Any, text: Tensor, windows: int) -> float:
    """Returns the perplexity of a plain copy of a model that has these weights."""
    model = copy.deepcopy(model)
    for name, weight in weights.items():
        model.get_submodule(name).weight.data = weight.t().contiguous()
    return study.perplexity(model, text, windows, model.config.n_positions)


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
    """Returns one line for every comparison that fails in the first three digits."""
    lines = []
    for name, one in found.items():
        if round(one["share that agrees"], DIGITS) < 1:
            lines.append(f"{name}: {one['share that agrees']:.6f} of the relations agree")
        a, b = (f"{one['perplexity'][side]:.{DIGITS}g}" for side in ("ours", "published"))
        if a != b:
            lines.append(f"{name}: perplexities {a} and {b}")
    return lines


def commit_of(folder: Path) -> str:
    """Returns the commit of a checkout, or "unknown" where there is no git."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def main() -> int:
    """Compares, writes the JSON, and returns 1 where a comparison fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sparsegpt", type=Path, required=True, metavar="DIR")
    parser.add_argument("--wanda", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--fast", action="store_true", help="the model of the fast study")
    given = parser.parse_args()
    settings = study.Settings()
    folder = study.TRAINED
    if given.fast:
        settings = study.FAST
        folder = None
    texts, about = study.load(settings.training.most_bytes)
    model = study.trained(settings.training, texts["train"], folder)
    length = settings.training.length
    tokens = study.sequences(texts["train"], settings.calibration, length, seed=0)
    text = texts[settings.reads]
    sides: dict[str, tuple[Any, Callable[..., dict[str, Tensor]], Path]] = {
        "SparseGPT": (OBS(), published_sparsegpt, given.sparsegpt),
        "Wanda": (Wanda(), published_wanda, given.wanda),
    }
    found: dict[str, Any] = {}
    for method, (criterion, published, where) in sides.items():
        for pattern, groups in study.PATTERNS.items():
            start = time.perf_counter()
            theirs = published(where, model, tokens, groups)
            middle = time.perf_counter()
            mine = ours(criterion, model, tokens, groups)
            end = time.perf_counter()
            one = compared(mine, theirs)
            one["perplexity"] = {
                "ours": perplexity_with(mine, model, text, settings.windows),
                "published": perplexity_with(theirs, model, text, settings.windows),
            }
            one["seconds"] = {
                "ours": round(end - middle, 1),
                "published": round(middle - start, 1),
            }
            found[f"{method}, {pattern}"] = one
            print(f"{method}, {pattern}: {one}", flush=True)
    lines = failures(found)
    content = {
        "settings": asdict(settings),
        "data": about,
        "commits": {name: commit_of(where) for name, (_, _, where) in sides.items()},
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "dense": study.perplexity(model, text, settings.windows, length),
        "compared": found,
        "failures": lines,
    }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for line in lines:
        print("FAILED", line)
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
