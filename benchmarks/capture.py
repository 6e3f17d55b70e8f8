"""How fast captured training steps are: nets against dense layers, each step as one CUDA graph."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import cross_entropy, mse_loss

import grapnet as gn

from .contenders import Step, Work, grown_head, linear, training_step
from .timing import times_faster, versions

CUTS = (0.5, 0.9)
# parents, children, batch -> for each cut: the bar and the goal
SHAPES = {
    (768, 3072, 4096): ((0.90, 1.0), (0.92, 1.15)),
    (4096, 16384, 256): ((0.92, 1.0), (1.0, 1.3)),
    (4096, 16384, 4096): ((0.92, 1.0), (1.0, 1.15)),
    (8192, 8192, 256): ((0.92, 1.0), (1.0, 1.3)),
    (8192, 8192, 4096): ((0.92, 1.0), (1.0, 1.15)),
}
MIXED = {(4096, 16384, 4096): ((1.05, 1.2), (1.20, 1.35))}
# Between a net and a dense layer with the same weights, relative to the largest result.
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Row:
    """One comparison: `work` runs `faster` times as fast as `against`."""

    work: str
    against: str
    faster: float
    must: float
    goal: float
    # of the output or the loss, against dense layers with the same weights
    error: float
    largest_error: float


def measure(*, fast: bool, only: str = "") -> dict[str, Any]:
    """Returns every comparison whose name contains `only`.

    Without a GPU the steps run eagerly, and with `fast` the sizes are small: no bar counts then.
    """
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name, compare in _comparisons(device, fast).items():
        if only in name:
            rows += [asdict(row) for row in compare()]
            if device == "cuda":
                torch.cuda.empty_cache()
    return {
        "benchmark": "capture",
        "settings": {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "fast": fast,
            "only": only,
        },
        "versions": versions(),
        "rows": rows,
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    if result["settings"]["device"] == "cpu" or result["settings"]["fast"]:
        found.append("the bars are for the sizes of the table, captured on a GPU")
    for row in result["rows"]:
        name = f"{row['work']} against {row['against']}"
        if not row["error"] <= row["largest_error"]:
            found.append(f"{name}: differs by {row['error']:.1e}")
        if row["faster"] < row["must"]:
            found.append(f"{name}: {row['faster']:.2f}, the bar is {row['must']:.2f}")
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the result as the table that the documentation shows."""
    lines = ["| work | against | times as fast | at least |", "|---|---|---:|---:|"]
    for row in result["rows"]:
        lines.append(
            f"| {row['work']} | {row['against']} | {row['faster']:.2f} | {row['must']:.2f} |"
        )
    return "\n".join(lines)


def _comparisons(device: str, fast: bool) -> dict[str, Callable[[], Iterator[Row]]]:
    """Returns what measures the rows, by name."""
    found: dict[str, Callable[[], Iterator[Row]]] = {}
    for optimizer, fused in {"Adam": None, "fused Adam": True}.items():
        found[f"head, {optimizer}"] = lambda name=optimizer, fused=fused: _head(
            device, fast, name, fused
        )
    for shape, bars in SHAPES.items():
        found[f"bfloat16 {_size(shape)}"] = lambda shape=shape, bars=bars: _transition(
            device, fast, shape, bars, _given_gradient, torch.bfloat16
        )
    for shape, bars in MIXED.items():
        found[f"autocast {_size(shape)}"] = lambda shape=shape, bars=bars: _transition(
            device, fast, shape, bars, _mixed_loss, torch.float32
        )
    return found


def _size(shape: tuple[int, int, int]) -> str:
    return f"{shape[0]}×{shape[1]}, batch {shape[2]}"


def _head(device: str, fast: bool, optimizer: str, fused: bool | None) -> Iterator[Row]:
    """The paper's head against a larger dense one, eager and captured."""
    x = torch.randn(64, 49, device=device)
    labels = torch.randint(10, (64,), device=device)
    net = grown_head(device)
    mlp = nn.Sequential(nn.Linear(49, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    error = _difference(net(x), net.to_module()(x))
    cases = {
        "eager": training_step(mlp, x, labels, fused=fused),
        "captured": _captured_head(mlp, x, labels, fused),
        "net": _captured_head(net, x, labels, fused),
    }
    bars = {"eager": (10.0, 18.0), "captured": (0.8, 1.0)}
    for against, (must, goal) in bars.items():
        pair = {against: cases[against], "net": cases["net"]}
        faster = times_faster(pair, against, repeats=3 if fast else 31)["net"]
        yield Row(
            f"head 49-240-10, captured, {optimizer}",
            f"nn.Linear 49-256-10, {against}",
            faster,
            must,
            goal,
            error,
            LARGEST_ERROR[torch.float32],
        )


def _captured_head(model: nn.Module, x: Tensor, labels: Tensor, fused: bool | None) -> Step:
    """Returns a captured step that gets its batch as a loop over data does."""
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    if isinstance(model, gn.GrapNet):
        gn.attach(optimizer, model)
    step = gn.capture(lambda x, y: cross_entropy(model(x), y), model, optimizer)
    return _recorded(lambda: step(x, labels))


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _transition(
    device: str,
    fast: bool,
    shape: tuple[int, int, int],
    bars: tuple[tuple[float, float], ...],
    loss: Loss,
    dtype: torch.dtype,
) -> Iterator[Row]:
    """A transition of which relations are cut against a dense layer, with AdamW."""
    if fast:
        shape = (shape[0] // 32, shape[1] // 32, shape[2] // 64)
    kind = "bfloat16" if loss is _given_gradient else "float32, autocast"
    for cut, (must, goal) in zip(CUTS, bars, strict=True):
        work = Work(*shape, density=1 - cut, device=device, dtype=dtype)
        x, target = work.data()
        net = work.net()
        error = _error(net, x, target, loss)
        cases = {
            "linear": _captured(linear(work), x, target, loss),
            "net": _captured(net, x, target, loss),
        }
        faster = times_faster(cases, "linear", repeats=3 if fast else 11, seconds=0.05)["net"]
        yield Row(
            f"{_size(shape)}, {cut:.0%} cut, {kind}, AdamW",
            "nn.Linear, captured",
            faster,
            must,
            goal,
            error,
            LARGEST_ERROR[torch.bfloat16],
        )


def _captured(model: nn.Module, x: Tensor, target: Tensor, loss: Loss) -> Step:
    """Returns a captured step with a gradient of the input, as a layer inside of a model has."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if isinstance(model, gn.GrapNet):
        gn.attach(optimizer, model)
    return _recorded(
        gn.capture(lambda: loss(model, x.detach().requires_grad_(), target), model, optimizer)
    )


def _recorded(step: Step) -> Step:
    """Returns a step after the calls in which it is recorded."""
    for _ in range(3):
        step()
    return step


class _Given(Function):
    """A loss of 0 whose gradient is given, so that it takes no time of its own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return z.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.saved_tensors[0], None


def _given_gradient(model: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    return _Given.apply(model(x), gradient)


def _mixed_loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return mse_loss(model(x), target)


def _error(net: gn.GrapNet, x: Tensor, target: Tensor, loss: Loss) -> float:
    """Returns how much a net and dense layers with the same weights differ: in their losses, or in
    their outputs where the loss is given.
    """
    with torch.no_grad():
        dense = net.to_module(most_cells=2**30)
        if loss is _given_gradient:
            return _difference(net(x), dense(x))
        return _difference(loss(net, x, target), loss(dense, x, target))


@torch.no_grad()
def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
