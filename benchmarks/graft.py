"""What a training step of GPT-2-small's feed-forward block costs once it is a net, and once most of it is cut."""

import copy
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import grapnet as gn
from grapnet.integrations.transformers import graft_ffn

from .timing import threads, times_faster

WIDTH, HIDDEN = 768, 3072
TOKENS = 512
CUTS = (0.5, 0.8, 0.9, 0.95)
UNCUT_BAR = 1 / 1.05  # of the speed of the original
CUT_BAR = {0.9: 2.0}  # share cut -> times faster than the original


@dataclass(frozen=True)
class Row:
    """How fast one block trains: forward, backward with the gradient of the input, and a step of AdamW."""

    block: str
    cut: float
    relations: int
    times_faster: float
    error: float  # of the output, against the original block with the same weights at zero


def measure(*, fast: bool) -> dict[str, Any]:
    """Returns the whole table; `fast` shrinks the blocks and reaches no bar."""
    torch.manual_seed(0)
    width, hidden, tokens = (WIDTH // 16, HIDDEN // 16, TOKENS // 16) if fast else (WIDTH, HIDDEN, TOKENS)
    with threads(2):
        rows = [
            asdict(row)
            for name, make in blocks().items()
            for row in _measure(name, make(width, hidden), width, tokens, 3 if fast else 21)
        ]
    return {
        "benchmark": "graft",
        "settings": {"width": width, "hidden": hidden, "tokens": tokens, "threads": 2, "optimizer": "AdamW"},
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "grapnet": gn.__version__},
        "rows": rows,
    }


def blocks() -> dict[str, Callable[[int, int], nn.Module]]:
    """Returns what makes the block as Hugging Face has it, and as a stack of torch's own modules."""
    return {"transformers GPT2MLP": _gpt2, "torch Linear, GELU, Linear": _stack}


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    for row in result["rows"]:
        bar = UNCUT_BAR if row["cut"] == 0 else CUT_BAR.get(row["cut"], 0.0)
        if row["times_faster"] < bar:
            found.append(
                f"{row['block']}, {row['cut']:.0%} cut: {row['times_faster']:.2f} times the speed of the original, "
                f"the bar is {bar:.2f}"
            )
    if result["settings"]["width"] != WIDTH:
        found.append(f"the bars are for a block of {WIDTH}×{HIDDEN}")
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the result as the table that the documentation shows."""
    lines = ["| block | cut | relations | speed beside the original |", "|---|---:|---:|---:|"]
    for row in result["rows"]:
        lines.append(f"| {row['block']} | {row['cut']:.0%} | {row['relations']:,} | {row['times_faster']:.2f}× |")
    return "\n".join(lines)


def _measure(name: str, block: nn.Module, width: int, tokens: int, repeats: int) -> list[Row]:
    x = torch.randn(1, tokens, width).requires_grad_()
    nets = {cut: _grafted(block, cut) for cut in (0.0, *CUTS)}
    errors = {cut: _error(block, net, x) for cut, net in nets.items()}
    steps = {str(cut): _training_step(net, x) for cut, net in nets.items()}
    faster = times_faster({"original": _training_step(block, x), **steps}, "original", repeats=repeats, seconds=0.05)
    return [Row(name, cut, net.count().relations, faster[str(cut)], errors[cut]) for cut, net in nets.items()]


def _grafted(block: nn.Module, cut: float) -> gn.GrapNet:
    """Returns the net in place of a copy of the block, without the weakest relations of each of its transitions."""
    model = nn.ModuleDict({"ffn": copy.deepcopy(block)})
    net = next(iter(graft_ffn(model))).net if hasattr(block, "c_fc") else gn.graft(model, "ffn")["ffn"]
    with net.edit(reason=f"cut {cut:.0%}") as edit:
        for layer in net.layers[:-1]:
            edit.cut(layer.outgoing().smallest(fraction=cut))
    return net


def _training_step(block: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        x.grad = None
        block(x).square().mean().backward()
        optimizer.step()

    return step


@torch.no_grad()
def _error(block: nn.Module, net: gn.GrapNet, x: Tensor) -> float:
    """Returns the largest difference from the block with the cut weights at zero, in parts of the largest output."""
    twin, module = copy.deepcopy(block).eval(), net.to_module()
    matrices = [linear.weight for linear in module if isinstance(linear, nn.Linear)]
    linears = [one for one in twin.modules() if getattr(one, "weight", None) is not None]
    for linear, matrix in zip(linears, matrices, strict=True):
        linear.weight *= (matrix != 0) if isinstance(linear, nn.Linear) else (matrix != 0).t()
    expected = twin(x)
    found = net.eval()(x)
    net.train()
    return float((found - expected).abs().max() / expected.abs().max())


def _gpt2(width: int, hidden: int) -> nn.Module:
    """Returns the block of a GPT-2 from the library; its dropout of 0.1 is part of the step."""
    tokens = {"vocab_size": 8, "n_positions": 8, "bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(n_embd=width, n_inner=hidden, n_head=12, n_layer=1, **tokens)
    return transformers.GPT2Model(config).h[0].mlp.train()


def _stack(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width))
