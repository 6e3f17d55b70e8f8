"""How fast a compiled transformer trains whose feed-forward blocks are nets or have opened weights,
beside its compiled original, and how often edits compile it again.
"""

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention

import grapnet as gn
from grapnet.spaces import dynamic_sizes

from .timing import times_faster, versions


@dataclass(frozen=True)
class Settings:
    """A model like GPT-2 small, in training."""

    blocks: int = 12
    width: int = 768
    heads: int = 12
    batch: int = 8
    tokens: int = 512
    repeats: int = 15
    compiler: str = "inductor"


FAST = Settings(blocks=1, width=32, heads=4, batch=2, tokens=8, repeats=2, compiler="eager")
# share cut -> speed relative to the compiled original
BARS = {0.0: 0.97, 0.5: 0.93, 0.9: 0.95}
EDITS = 20  # of every net, for the count
# model, share cut and sizes of each row
ROWS = (
    *(("grafted", cut, "constant") for cut in BARS),
    *(("adopted", cut, "constant") for cut in BARS if cut),
    ("grafted", 0.5, "variable"),
)


@dataclass(frozen=True)
class Row:
    """How fast a model trains: forward and backward under autocast."""

    model: str  # "grafted": the blocks are nets; "adopted": their weights are opened
    cut: float
    sizes: str  # "constant": compiled after the cut; "variable": inside dynamic_sizes, after edits
    times_faster: float
    compile_seconds: float
    graphs: int  # compiled in all
    output_error: float  # against the model that is not compiled, relative to the largest output


class Block(nn.Module):
    """A block of a transformer before whose parts stand norms."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [batch, tokens, width] with what attention and feed-forward add to it."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.ffn(self.norms[1](x))


def measure(*, fast: bool, only: str = "") -> dict[str, Any]:
    """Returns the rows whose names contain `only`, on the GPU where there is one.

    With `fast`, the model is small, and no bar counts.
    """
    settings = FAST if fast else Settings()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch._dynamo.reset()
    original = nn.Sequential(
        *(Block(settings.width, settings.heads) for _ in range(settings.blocks))
    ).to(device)
    x = torch.randn(settings.batch, settings.tokens, settings.width, device=device)
    plain = _step(_Counted(original, settings.compiler), x)
    rows = []
    for key in ROWS:
        if only in _name(*key):
            rows.append(asdict(_row(*key, original, plain, x, settings)))
    return {
        "benchmark": "compiled",
        "settings": {"device": device, **asdict(settings), "edits": EDITS, "only": only},
        "versions": versions(),
        "rows": rows,
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    settings = result["settings"]
    if settings["device"] != "cuda" or settings["width"] != Settings.width:
        found.append("the bars are for a GPU and the whole model")
    for row in result["rows"]:
        name = _name(row["model"], row["cut"], row["sizes"])
        if row["times_faster"] < BARS[row["cut"]]:
            found.append(
                f"{name}: {row['times_faster']:.2f} times the speed of the original, the bar is"
                f" {BARS[row['cut']]:.2f}"
            )
        if row["graphs"] > (1 if row["sizes"] == "constant" else 2):
            found.append(f"{name}: compiled {row['graphs']} times")
        if not row["output_error"] < 0.05:
            found.append(f"{name}: differs by {row['output_error']:.1e}")
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the result as the table that the documentation shows."""
    lines = [
        "| model | cut | sizes | speed relative to the compiled original | compiled | in |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['model']} | {row['cut']:.0%} | {row['sizes']} | {row['times_faster']:.2f}× |"
            f" {row['graphs']} times | {row['compile_seconds']:.0f} s |"
        )
    return "\n".join(lines)


def _name(model: str, cut: float, sizes: str) -> str:
    return f"{model}, {cut:.0%} cut, {sizes} sizes"


def _row(
    kind: str,
    cut: float,
    sizes: str,
    original: nn.Sequential,
    plain: Callable[[], object],
    x: Tensor,
    settings: Settings,
) -> Row:
    """Returns how fast one model trains beside the compiled original, `plain`."""
    model = _grafted(original, cut) if kind == "grafted" else _adopted(original, cut, x)
    run = _Counted(model, settings.compiler)
    step = _step(run, x)
    vary = dynamic_sizes() if sizes == "variable" else nullcontext()
    with vary:
        start = time.perf_counter()
        step()
        if sizes == "variable":
            # It is edited further.
            for number in range(EDITS):
                for module in model.modules():
                    if isinstance(module, gn.GrapNet):
                        _change(module, number)
                step()
        seconds = time.perf_counter() - start
        cases = {"original": plain, "model": step}
        faster = times_faster(cases, "original", repeats=settings.repeats, seconds=0.1)["model"]
        return Row(kind, cut, sizes, faster, seconds, run.graphs, _error(run, x))


class _Counted:
    """A compiled model that counts how often it is compiled."""

    def __init__(self, model: nn.Module, compiler: str) -> None:
        self.model = model
        self._counting = CompileCounterWithBackend(compiler)
        self._run = torch.compile(model, backend=self._counting, fullgraph=True)

    @property
    def graphs(self) -> int:
        """How often it was compiled."""
        return self._counting.frame_count

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x)


def _error(run: _Counted, x: Tensor) -> float:
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
        plain = run.model(x)
        # With gradients, as in training: evaluation is compiled by itself.
        with torch.enable_grad():
            mine = run(x).detach()
    return ((mine - plain).abs().max() / plain.abs().max()).item()


def _grafted(original: nn.Module, cut: float) -> nn.Module:
    """Returns a copy with nets in place of the feed-forward blocks, without their weakest
    relations.
    """
    model = copy.deepcopy(original)
    nets = gn.graft(model, "*.ffn")
    for net in nets.values():
        if cut:
            with net.edit(reason=f"cut {cut:.0%}") as edit:
                for layer in net.layers[:-1]:
                    edit.cut(layer.outgoing().smallest(fraction=cut))
    return model


def _adopted(original: nn.Module, cut: float, x: Tensor) -> nn.Module:
    """Returns a copy of which the weakest relations of the feed-forward blocks are cut."""
    model = copy.deepcopy(original)
    net = gn.adopt(model, x[:1, :8])
    with net.edit(reason=f"cut {cut:.0%}") as edit:
        for name, module in model.named_modules():
            if ".ffn." in name and isinstance(module, nn.Linear):
                edit.cut(net.relations(name).smallest(fraction=cut))
    return model


def _change(net: gn.GrapNet, number: int) -> None:
    """Commits an edit that changes the number of relations: the weakest leave or come back."""
    if number % 2:
        net.undo()
        return
    with net.edit(reason="change") as edit:
        edit.cut(net.layers[number // 2 % 2].outgoing().smallest(count=number + 1))


def _step(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = run(x).float().square().mean()
        loss.backward()

    return step
