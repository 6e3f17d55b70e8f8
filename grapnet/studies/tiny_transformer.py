"""The Tiny Transformer audit: an FFN becomes a net, trains as it would have, and then loses
relations for good.

`python -m grapnet.studies.tiny_transformer --json FILE` writes what it finds beside the paper's
figures.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import grapnet as gn

from .command import as_command, options, present_versions, told
from .drawing import Group, Row, Value, differences, dots

PAPER = {
    "ffn_forward": 1.2e-7,
    "logits": 6.0e-8,
    "ffn_gradients": 7.5e-9,
    "accuracy": 0.9336,
    "relations": 1024,
    "relations_left": 992,
}

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
        width, hidden = settings.width, settings.hidden
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


def run(settings: Settings) -> dict[str, Any]:
    """Returns every figure of the audit."""
    data = _data(settings)
    exact = {name: _compare(settings, data, dtype) for name, dtype in _DTYPES.items()}
    trained = _train_both(settings, data)
    return {
        "study": "tiny_transformer",
        "settings": asdict(settings),
        "versions": present_versions(),
        "paper": PAPER,
        "exact": exact,
        "training": trained,
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
    for _ in range(settings.epochs):
        for rows in torch.randperm(settings.train, generator=generator).split(settings.batch):
            optimizer.zero_grad()
            cross_entropy(model(data[0][rows]), data[1][rows]).backward()
            optimizer.step()


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
    h, errors = dense.attended(data[2]).detach(), {}
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the audit, prints it beside the paper's figures and writes it; see --help."""
    return as_command("tiny_transformer", lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    given = options("tiny_transformer", __doc__).parse_args(arguments)
    settings = FAST if given.fast else Settings()
    return told(
        "tiny_transformer", given, lambda: run(settings), table=table, missed=missed, draw=draw
    )


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
    if result["cut"]["before"] != PAPER["relations"] or left != PAPER["relations_left"]:
        found.append(
            f"relations: {result['cut']['before']} before and {left} after, the paper has 1,024"
            " and 992"
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
    exact, training, left = result["exact"], result["training"], result["cut"]["left"]
    lines = ["| figure | float32 | float64 | paper |", "|---|---:|---:|---:|"]
    for key, name in (
        ("ffn_forward", "FFN forward"),
        ("logits", "logits"),
        ("ffn_gradients", "FFN gradients"),
    ):
        lines.append(
            f"| {name} | {exact['float32'][key]:.1e} | {exact['float64'][key]:.1e} |"
            f" {PAPER[key]:.1e} |"
        )
    dense, grafted = (f"{training['accuracy'][name]:.2%}" for name in ("dense", "grafted"))
    lines.append(
        f"| test accuracy, dense and grafted | | {dense}, {grafted} | {PAPER['accuracy']:.2%},"
        " both |"
    )
    found = " or ".join(sorted({str(count) for count in left.values()}))
    lines.append(
        f"| relations left of {result['cut']['before']} | | {found} | {PAPER['relations_left']} |"
    )
    return "\n".join(lines)


def draw(result: dict[str, Any], axes: Any) -> None:
    """Draws the largest differences between the FFN and its net, and says what training and the cut
    gave.
    """
    names = {"ffn_forward": "FFN forward", "logits": "logits", "ffn_gradients": "FFN gradients"}
    rows = []
    for key, name in {**names, "other_gradients": "other gradients"}.items():
        values = {dtype: Value(result["exact"][dtype][key]) for dtype in ("float64", "float32")}
        rows.append(Row(name, values, [Value(PAPER[key])] if key in PAPER else []))
    cut, accuracy = result["cut"], result["training"]["accuracy"]
    errors = [
        Row(f"run by {name}", {"float64": Value(error)})
        for name, error in cut["backend_errors"].items()
    ]
    left = " or ".join(sorted({f"{count:,}" for count in cut["left"].values()}))
    title = (
        f"Test accuracy {accuracy['grafted']:.2%} with the FFN as a net, {accuracy['dense']:.2%}"
        " dense; after the "
    )
    title += f"cut {left} of {cut['before']:,} relations are left, wherever they are counted"
    bars = {f"bar of {dtype}": bars["logits"] for dtype, bars in BARS.items()}
    groups = [
        Group("net against dense FFN, untrained", rows, bars),
        Group("after the cut, against reference", errors),
    ]
    dots(axes, groups, title=title, label="largest difference")
    differences(axes)


if __name__ == "__main__":
    raise SystemExit(main())
