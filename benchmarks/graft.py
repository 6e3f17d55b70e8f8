"""What a training step of GPT-2-small's feed-forward block costs once it is a net, and once most of
it is cut.
"""

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn

from .timing import threads, times_faster, versions

WIDTH = 768
HIDDEN = 3072
TOKENS = 512
CUTS = (0.5, 0.8, 0.9, 0.95)
UNCUT_BAR = 1 / 1.05  # of the speed of the original
CUT_BAR = {0.9: 2.0}  # share cut -> times faster than the original
LARGEST_ERROR = 1e-5


@dataclass(frozen=True)
class Row:
    """How fast one block trains: forward, backward with the gradient of the input, and a step of
    AdamW.
    """

    block: str
    cut: float
    relations: int
    times_faster: float
    output_error: float  # against the original block with the same weights at zero
    # of the weights after a step of AdamW in the middle of training, against the same
    step_error: float


def measure(*, fast: bool) -> dict[str, Any]:
    """Returns the whole table, on the GPU where there is one; `fast` shrinks the blocks and reaches
    no bar.
    """
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, hidden, tokens = (
        (WIDTH // 16, HIDDEN // 16, TOKENS // 16) if fast else (WIDTH, HIDDEN, TOKENS)
    )
    settings = {"device": device, "width": width, "hidden": hidden, "tokens": tokens, "threads": 2}
    with threads(2):
        rows = [
            asdict(row)
            for name, make in blocks().items()
            for row in _measure(
                name, make(width, hidden).to(device), width, tokens, 3 if fast else 21
            )
        ]
    return {
        "benchmark": "graft",
        "settings": settings,
        "versions": versions(),
        "rows": rows,
    }


def blocks() -> dict[str, Callable[[int, int], nn.Module]]:
    """Returns what makes the block as a stack of torch's own modules, and as Hugging Face has it
    where it is there.
    """
    if importlib.util.find_spec("transformers"):
        hugging_face = {"transformers GPT2MLP": _gpt2}
    else:
        hugging_face = {}
    return {"torch Linear, GELU, Linear": _stack, **hugging_face}


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    if result["settings"]["device"] != "cpu" or result["settings"]["width"] != WIDTH:
        found.append(f"the bars are for a block of {WIDTH}×{HIDDEN} on a CPU")
    for row in result["rows"]:
        error = max(row["output_error"], row["step_error"])
        if not error <= LARGEST_ERROR:
            found.append(
                f"{row['block']}, {row['cut']:.0%} cut: differs by {error:.1e}, rounding is"
                f" {LARGEST_ERROR}"
            )
        bar = UNCUT_BAR if row["cut"] == 0 else CUT_BAR.get(row["cut"], 0.0)
        if row["times_faster"] < bar:
            found.append(
                f"{row['block']}, {row['cut']:.0%} cut: {row['times_faster']:.2f} times the speed"
                f" of the original, the bar is {bar:.2f}"
            )
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the result as the table that the documentation shows."""
    lines = ["| block | cut | relations | speed relative to the original |", "|---|---:|---:|---:|"]
    for row in result["rows"]:
        lines.append(
            f"| {row['block']} | {row['cut']:.0%} | {row['relations']:,} |"
            f" {row['times_faster']:.2f}× |"
        )
    return "\n".join(lines)


def _measure(name: str, block: nn.Module, width: int, tokens: int, repeats: int) -> list[Row]:
    x = torch.randn(1, tokens, width, device=next(block.parameters()).device).requires_grad_()
    nets = {cut: _grafted(block, cut) for cut in (0.0, *CUTS)}
    errors = {
        cut: (_output_error(block, net, x), _step_error(block, cut, x)) for cut, net in nets.items()
    }
    steps = {str(cut): _training_step(net, x) for cut, net in nets.items()}
    faster = times_faster(
        {"original": _training_step(block, x), **steps}, "original", repeats=repeats, seconds=0.05
    )
    return [
        Row(name, cut, net.count().relations, faster[str(cut)], *errors[cut])
        for cut, net in nets.items()
    ]


def _grafted(
    block: nn.Module, cut: float, optimizer: torch.optim.Optimizer | None = None
) -> gn.GrapNet:
    """Returns the net in place of a block, without the weakest relations of each of its
    transitions.

    With an optimizer it is that of the block, otherwise the block is copied first.
    """
    model = nn.ModuleDict({"ffn": copy.deepcopy(block) if optimizer is None else block})
    if _is_hugging_face(block):
        from grapnet.convert import graft_ffn

        graft_ffn(model, optimizer=optimizer)
    else:
        gn.graft(model, "ffn", optimizer=optimizer)
    net = model["ffn"]
    assert isinstance(net, gn.GrapNet)
    with net.edit(reason=f"cut {cut:.0%}") as edit:
        for layer in net.layers[:-1]:
            edit.cut(layer.outgoing().smallest(fraction=cut))
    return net


def _training_step(
    block: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    optimizer = optimizer or torch.optim.AdamW(block.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        x.grad = None
        block(x).square().mean().backward()
        optimizer.step()

    return step


@torch.no_grad()
def _output_error(block: nn.Module, net: gn.GrapNet, x: Tensor) -> float:
    """Returns the largest difference from the block with the cut weights at zero, in parts of the
    largest output.
    """
    twin = copy.deepcopy(block).eval()
    for weight, matrix in zip(_weights(twin), _matrices(net), strict=True):
        weight *= matrix != 0
    expected = twin(x)
    found = net.eval()(x)
    net.train()
    return _difference(found, expected)


def _step_error(block: nn.Module, cut: float, x: Tensor) -> float:
    """Returns how far apart the weights are when both, after two steps of the block, lose some and
    take one more.
    """
    twins = [copy.deepcopy(block).eval() for _ in range(2)]
    optimizers = [torch.optim.AdamW(twin.parameters(), lr=1e-3) for twin in twins]
    for twin, optimizer in zip(twins, optimizers, strict=True):
        for _ in range(2):
            _training_step(twin, x, optimizer)()
    net = _grafted(twins[1], cut, optimizers[1])
    kept = [matrix != 0 for matrix in _matrices(net)]
    with torch.no_grad():
        for weight, there in zip(_weights(twins[0]), kept, strict=True):
            weight *= there
    _training_step(twins[0], x, optimizers[0])()
    _training_step(net, x, optimizers[1])()
    pairs = zip(_matrices(net), _weights(twins[0]), kept, strict=True)
    return max(_difference(matrix, weight.detach() * there) for matrix, weight, there in pairs)


def _weights(block: nn.Module) -> list[nn.Parameter]:
    """Returns the matrices of a block, [out, in] in a stack and [in, out] in one of Hugging
    Face's.
    """
    return [parameter for parameter in block.parameters() if parameter.dim() == 2]


def _matrices(net: gn.GrapNet) -> list[Tensor]:
    """Returns the matrices that a net stands for, the way the block has them that it was made
    of.
    """
    matrices = [
        linear.weight.detach() for linear in net.to_module() if isinstance(linear, nn.Linear)
    ]
    transposed = net._origin.chain.parts[0].transposed
    return [matrix.t() if transposed else matrix for matrix in matrices]


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _is_hugging_face(block: nn.Module) -> bool:
    return hasattr(block, "c_fc")


def _gpt2(width: int, hidden: int) -> nn.Module:
    """Returns the block of a GPT-2 from the library; its dropout of 0.1 is part of the step."""
    import transformers

    tokens = {"vocab_size": 8, "n_positions": 8, "bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(n_embd=width, n_inner=hidden, n_head=12, n_layer=1, **tokens)
    return transformers.GPT2Model(config).get_submodule("h.0.mlp").train()


def _stack(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width))
