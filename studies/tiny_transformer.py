"""The Tiny Transformer audit: an FFN becomes a net, trains as it would have, and then loses
relations for good.

It is one run without seeds.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import grapnet as gn

from .learning import train
from .paper import published
from .tables import grid

PAPER = published("tiny_transformer")

# The largest differences that are rounding. In float32 two orders of an FFN's sums, over 16 and
# over 32 products of numbers around one, may be that far apart.
_SINGLE = (16 + 32 + 2) * 2.0**-23
BARS = {
    "float32": {"ffn_forward": _SINGLE, "logits": _SINGLE, "ffn_gradients": _SINGLE},
    "float64": {
        "ffn_forward": 1e-12,
        "logits": 1e-12,
        "ffn_gradients": 1e-12,
        "other_gradients": 1e-12,
    },
}


@dataclass(frozen=True)
class Settings:
    """The sizes of the paper; the task is our own, because its text does not say which it was."""

    width: int = 16
    hidden: int = 32  # of the FFN: 2 · 16 · 32 = 1,024 relations
    heads: int = 2
    length: int = 8
    tokens: int = 8  # a sequence is positive when its first token comes again
    train: int = 1024
    test: int = 256
    epochs: int = 12
    batch: int = 64
    lr: float = 5e-3
    cut: int = 32
    seed: int = 0


FAST = Settings(train=256, epochs=2)


class TinyTransformer(nn.Module):
    """One block of self-attention and FFN over embedded tokens, and a readout of the first
    position.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        hidden = settings.hidden
        self.embed = nn.Embedding(settings.tokens, width)
        self.position = nn.Parameter(torch.randn(settings.length, width) / 10)
        self.attention = nn.MultiheadAttention(width, settings.heads, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.ffn: nn.Module = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )
        self.readout = nn.Linear(width, 2)

    def attended(self, tokens: Tensor) -> Tensor:
        """Returns what the FFN gets, [batch, length, width]."""
        h = self.embed(tokens) + self.position
        return self.norms[0](h + self.attention(h, h, h, need_weights=False)[0])

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of tokens [batch, length]."""
        h = self.attended(tokens)
        return self.readout(self.norms[1](h + self.ffn(h))[:, 0])


def one_seed(settings: Settings, seed: int | None) -> dict[str, Any]:
    """Returns every figure of the audit; its only seed is one of the settings."""
    data = _data(settings)
    return {
        "exact": {name: _compare(settings, data, dtype) for name, dtype in _DTYPES.items()},
        "training": _train_both(settings, data),
        "cut": _cut(settings, data),
    }


_DTYPES = {"float32": torch.float32, "float64": torch.float64}
Data = tuple[Tensor, Tensor, Tensor, Tensor]  # tokens and labels to train on, and to test on


def _data(settings: Settings) -> Data:
    generator = torch.Generator().manual_seed(settings.seed)
    tokens = torch.randint(
        settings.tokens, (settings.train + settings.test, settings.length), generator=generator
    )
    labels = (tokens[:, 1:] == tokens[:, :1]).any(1).long()
    return (
        tokens[: settings.train],
        labels[: settings.train],
        tokens[settings.train :],
        labels[settings.train :],
    )


def _models(settings: Settings, dtype: torch.dtype) -> tuple[TinyTransformer, TinyTransformer]:
    """Returns a Transformer, and a copy of it whose FFN is a net."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        dense = TinyTransformer(settings).to(dtype)
    grafted = copy.deepcopy(dense)
    gn.graft(grafted, "ffn")
    return dense, grafted


def _compare(settings: Settings, data: Data, dtype: torch.dtype) -> dict[str, float]:
    """Returns the largest differences between the two before any training."""
    dense, grafted = _models(settings, dtype)
    tokens, labels = data[2:]
    h = dense.attended(tokens).detach()
    found = {"ffn_forward": _largest(dense.ffn(h), grafted.ffn(h))}
    outputs = [model(tokens) for model in (dense, grafted)]
    found["logits"] = _largest(*outputs)
    for output in outputs:
        cross_entropy(output, labels).backward()
    plain = gn.ungraft(grafted)["ffn"]
    ours, theirs = (
        {name: p.grad for name, p in model.named_parameters()} for model in (grafted, dense)
    )
    assert plain is grafted.ffn
    for kind in ("ffn_gradients", "other_gradients"):
        names = [name for name in theirs if name.startswith("ffn.") == (kind == "ffn_gradients")]
        found[kind] = max(_largest(ours[name], theirs[name]) for name in names)
    return found


def _train_both(settings: Settings, data: Data) -> dict[str, Any]:
    """Returns what both reach from the same weights, on the same batches, in float64."""
    found = {}
    models = _models(settings, torch.float64)
    for name, model in zip(("dense", "grafted"), models, strict=True):
        _train(model, settings, data)
        with torch.no_grad():
            found[name] = model(data[2])
    right = {name: int((logits.argmax(1) == data[3]).sum()) for name, logits in found.items()}
    return {
        "right": right,
        "of": settings.test,
        "accuracy": {name: count / settings.test for name, count in right.items()},
        "same_predictions": bool(torch.equal(*(logits.argmax(1) for logits in found.values()))),
        "logits": _largest(*found.values()),
    }


def _train(
    model: TinyTransformer,
    settings: Settings,
    data: Data,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=settings.lr)
    generator = torch.Generator().manual_seed(settings.seed)
    train(model, optimizer, data[:2], batch=settings.batch, epochs=settings.epochs, order=generator)


def _cut(settings: Settings, data: Data) -> dict[str, Any]:
    """Returns how many relations are left, wherever a relation can be counted, after the weakest
    were cut.
    """
    dense, _ = _models(settings, torch.float64)
    optimizer = torch.optim.Adam(dense.parameters(), lr=settings.lr)
    _train(dense, replace(settings, epochs=1), data, optimizer)
    net = gn.graft(dense, "ffn", optimizer=optimizer)["ffn"]
    before = net.count().relations
    with net.edit(reason="the weakest relations") as edit:
        edit.cut(net.select().outgoing().smallest(count=settings.cut))
    _train(dense, replace(settings, epochs=1), data, optimizer)  # and it goes on training
    weights = [transition.weight for transition in net.transitions]
    views = {"storage": sum(len(transition.child) for transition in net.transitions)}
    views["parameters"] = sum(weight.numel() for weight in weights)
    views["gradient"] = sum(weight.grad.numel() for weight in weights if weight.grad is not None)
    for key in ("exp_avg", "exp_avg_sq"):
        views[f"optimizer {key}"] = sum(optimizer.state[weight][key].numel() for weight in weights)
    views["snapshot"] = sum(
        int((m.weight != 0).sum()) for m in net.snapshot() if isinstance(m, nn.Linear)
    )
    h = dense.attended(data[2]).detach()
    errors = {}
    net.execution.use("reference")
    expected = net(h)
    refused = {name for row in net.execution.describe() for name in row["refused"]}
    for backend in ("reference", "dense", "family", "sparse"):
        if backend in refused:
            continue
        net.execution.use(backend)
        views[f"{backend} plan"] = sum(
            row["relations"] for row in net.execution.describe() if row["runs"] == backend
        )
        errors[backend] = _largest(net(h), expected)
        views[f"{backend} gradient"] = _moved_by(net, h)
    return {"before": before, "left": views, "backend_errors": errors}


def _moved_by(net: gn.GrapNet, h: Tensor) -> int:
    """Returns for how many relations a backward pass finds a gradient."""
    weights = [transition.weight for transition in net.transitions]
    return sum(int((g != 0).sum()) for g in torch.autograd.grad(net(h).square().sum(), weights))


def _largest(one: Tensor | None, other: Tensor | None) -> float:
    assert one is not None
    assert other is not None
    return float((one - other).detach().abs().max())


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    for dtype, bars in BARS.items():
        for key, bar in bars.items():
            if not result["exact"][dtype][key] <= bar:
                found.append(
                    f"{key} in {dtype} differ by {result['exact'][dtype][key]:.1e}, the bar is"
                    f" {bar:.1e}"
                )
    right = result["training"]["right"]
    if right["dense"] != right["grafted"] or not result["training"]["same_predictions"]:
        found.append(
            f"accuracy: {right['dense']} right answers before, {right['grafted']} with the net"
        )
    left = result["cut"]["before"] - result["settings"]["cut"]
    wanted = (PAPER["relations before"], PAPER["relations after the cut"])
    if (result["cut"]["before"], left) != wanted:
        found.append(
            f"relations: {result['cut']['before']} before and {left} after, the paper has"
            f" {wanted[0]} and {wanted[1]}"
        )
    found += [
        f"{view} holds {n} relations of {left}"
        for view, n in result["cut"]["left"].items()
        if n != left
    ]
    for backend, error in result["cut"]["backend_errors"].items():
        if not error <= 1e-12:
            found.append(f"{backend} differs from the reference by {error:.1e}")
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the figures as a table, ours beside the paper's."""
    exact = result["exact"]
    names = {"ffn_forward": "FFN forward", "logits": "logits", "ffn_gradients": "FFN gradients"}
    rows = []
    for key, name in names.items():
        ours = [f"{exact[dtype][key]:.1e}" for dtype in _DTYPES]
        rows.append((name, *ours, f"{PAPER[f'{name}, largest difference']:.1e}"))
    reached = result["training"]["accuracy"]
    rows.append(
        (
            "test accuracy, dense and grafted",
            "",
            f"{reached['dense']:.2%}, {reached['grafted']:.2%}",
            f"{PAPER['test accuracy, dense']:.2f}%, both",
        )
    )
    left = " or ".join(sorted({str(count) for count in result["cut"]["left"].values()}))
    before = f"relations left of {result['cut']['before']}"
    rows.append((before, "", left, f"{PAPER['relations after the cut']}"))
    return grid(("figure", "float32", "float64", "paper"), rows)
