"""Sets `GrowWidth(init="tiny")` side by side with GroMo, on the same layers in float64.

`python -m tools.gromo --json FILE` gives GroMo and GrapNet networks with the same weights and rows,
lets both compute the best nodes to add to each hidden layer, with the same thresholds, and compares
the products of their outgoing and incoming weights, biases included, and the decreases of the loss
that they promise. It fails when one differs by more than 1e-5 of its largest number. GroMo has to
be importable; it is no requirement of the library.
"""

import argparse
import importlib
import importlib.metadata
import json
import platform
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.rules import BottleneckRecorder, GrowWidth, RuleContext
from grapnet.rules._tiny import LEAST_EIGENVALUE, LEAST_SINGULAR_VALUE

TOLERANCE = 1e-5  # of the largest number
ACTIVATIONS = {"relu": nn.ReLU, "selu": nn.SELU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class Case:
    """A network and rows, of which one hidden layer grows."""

    activation: str
    width: int  # of both hidden layers
    inputs: int
    outputs: int
    rows: int
    batches: int  # over which statistics are summed
    rank: int  # of the inputs: below `inputs`, the threshold of eigenvalues counts
    layer: int
    nodes: int
    seed: int


def cases() -> list[Case]:
    """Returns what is compared."""
    found = []
    for seed, activation in enumerate(ACTIVATIONS):
        for layer in (1, 2):
            found += [
                Case(activation, 7, 12, 5, 256, 1, 12, layer, 4, seed),
                Case(activation, 7, 12, 5, 240, 3, 12, layer, 4, seed),
                Case(activation, 16, 40, 10, 512, 2, 25, layer, 10, seed),
                Case(activation, 32, 64, 24, 2048, 4, 64, layer, 16, seed),
            ]
    return found


def rows_of(case: Case) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of a regression."""
    generator = torch.Generator().manual_seed(case.seed)
    draw = {"dtype": torch.float64, "generator": generator}
    x = torch.randn(case.rows, case.rank, **draw) @ torch.randn(case.rank, case.inputs, **draw)
    x = x / x.std() + 0.3
    teacher = torch.randn(case.inputs, case.outputs, **draw)
    return x, torch.sin(x @ teacher)


def stack_of(case: Case) -> nn.Sequential:
    """Returns the network as a stack of Linears."""
    torch.manual_seed(case.seed)
    activation = ACTIVATIONS[case.activation]
    return nn.Sequential(
        nn.Linear(case.inputs, case.width),
        activation(),
        nn.Linear(case.width, case.width),
        activation(),
        nn.Linear(case.width, case.outputs),
    ).double()


def grown_by_gromo(case: Case, least_singular_value: float) -> tuple[Tensor, float]:
    """Returns the product of new weights that GroMo computes, [below, above + 1], and what it
    promises.
    """
    module = importlib.import_module("gromo.containers.growing_mlp")
    activation = ACTIVATIONS[case.activation]()
    model = module.GrowingMLP(case.inputs, case.outputs, case.width, 2, activation).double()
    linears = [part for part in stack_of(case) if isinstance(part, nn.Linear)]
    for own, linear in zip(model.layers, linears, strict=True):
        own.layer.load_state_dict(linear.state_dict())
    grown = model.layers[case.layer]
    grown.init_computation()
    for x, y in zip(*(part.chunk(case.batches) for part in rows_of(case)), strict=True):
        model.zero_grad()
        # GroMo averages over samples what a loss that is a sum gives it.
        (model(x) - y).square().sum().backward()
        grown.update_computation()
    largest = torch.linalg.eigvalsh(grown.tensor_s_growth())[-1].item()
    grown.compute_optimal_updates(
        numerical_threshold=LEAST_EIGENVALUE * largest,
        statistical_threshold=least_singular_value,
        maximum_added_neurons=case.nodes,
        dtype=torch.float64,
        compute_delta=False,
    )
    incoming = grown.previous_module.extended_output_layer
    above = torch.cat([incoming.weight, incoming.bias[:, None]], 1).detach()
    product = grown.extended_input_layer.weight.detach() @ above
    return product, grown.new_neurons_fo_improvement.item()


def grown_by_rule(case: Case, form: str) -> tuple[Tensor, float, float]:
    """Returns the product of the weights that the rule has added, what it promises, and the
    smallest singular value that counts.

    Args:
        case: what grows.
        form: "net" for a GrapNet, "adopted" for the stack itself.
    """
    stack = stack_of(case)
    layer: Any = case.layer
    net: Any = gn.from_module(stack)
    model: nn.Module = net
    if form == "adopted":
        layer = str(2 * (case.layer - 1))
        net = gn.adopt(stack, rows_of(case)[0][:2])
        model = stack
    rule = GrowWidth(layer, case.nodes, init="tiny")
    recorders: dict[str, Any] = rule.recorders(net)
    (recorder,) = recorders.values()
    assert isinstance(recorder, BottleneckRecorder)
    recorder.arm(net)
    for x, y in zip(*(part.chunk(case.batches) for part in rows_of(case)), strict=True):
        (model(x) - y).square().sum(1).mean().backward()
    nodes = recorder.nodes()
    with net.edit() as edit:
        rule(net, edit, RuleContext(evidence=recorders))
    wide: Any = stack
    if form == "net":
        wide = net.to_module()
    linears = [part for part in wide if isinstance(part, nn.Linear)]
    above, below = linears[case.layer - 1 : case.layer + 1]
    incoming = torch.cat([above.weight, above.bias[:, None]], 1)[case.width :]
    product = (below.weight[:, case.width :] @ incoming).detach()
    promised = nodes.gains[: case.nodes].sum().item()
    strongest = float(torch.linalg.svdvals(nodes.outgoing)[0]) ** 2
    return product, promised, LEAST_SINGULAR_VALUE * strongest


def compare(case: Case, form: str) -> dict[str, Any]:
    """Returns the largest differences of one case, relative to the largest number."""
    ours, promised, least = grown_by_rule(case, form)
    theirs, improvement = grown_by_gromo(case, least)
    return {
        "form": form,
        **asdict(case),
        "product": float((ours - theirs).abs().max() / theirs.abs().max()),
        "promise": abs(promised - improvement) / improvement,
    }


def main(arguments: list[str] | None = None) -> int:
    """Compares all cases; returns 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the result")
    settings = parser.parse_args(arguments)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases():
            for form in ("net", "adopted"):
                found.append(compare(case, form))
    worst = {part: max(one[part] for one in found) for part in ("product", "promise")}
    result = {
        "versions": {
            "grapnet": gn.__version__,
            "gromo": importlib.metadata.version("gromo"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "tolerance": TOLERANCE,
        "worst": worst,
        "cases": found,
    }
    print(f"{len(found)} comparisons: products differ by {worst['product']:.1e} at most, promises")
    print(f"by {worst['promise']:.1e}, of their largest number")
    if settings.json is not None:
        settings.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(max(worst.values()) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
