"""MLP equivalence: stacks of dense layers, copied into nets, compute and learn what they did."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn

from .paper import published
from .statistics import merged
from .tables import grid

# "up to", across linear, ReLU and GELU MLPs, whose sizes the paper does not print
PAPER = published("mlp_equivalence")["values relation by relation, largest difference"]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
ACTIVATIONS = {"linear": nn.Identity, "ReLU": nn.ReLU, "GELU": nn.GELU}
# A snapshot, the last one, is detached: it has no gradients.
PATHS = ("auto", "reference", "family", "walk", "snapshot")
GRADIENTS = ("weights", "biases", "inputs")


@dataclass(frozen=True)
class Settings:
    """Copies MLPs into nets by gn.from_module and compares values and gradients, whatever runs the
    nets.
    """

    # of the MLPs
    sizes: tuple[tuple[int, ...], ...] = (
        (49, 64, 10),
        (16, 32, 16),
        (12, 24, 24, 6),
    )
    batch: int = 64  # inputs from N(0, 1)
    seeds: tuple[int, ...] = tuple(range(10))  # of weights and inputs
    fast: bool = False  # what the tests run: it reaches no bar


FAST = Settings(sizes=((6, 8, 3),), batch=8, seeds=(0, 1), fast=True)


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns the largest differences of one seed: dtype, activation, path, then values and
    gradients.
    """
    found: dict[str, dict[str, Any]] = {dtype: {} for dtype in DTYPES}
    for dtype in DTYPES:
        for activation in ACTIVATIONS:
            by_size = [
                _compare(mlp(sizes, activation, dtype, seed), settings.batch, seed)
                for sizes in settings.sizes
            ]
            found[dtype][activation] = merged(by_size, max)
    return found


def mlp(sizes: tuple[int, ...], activation: str, dtype: str, seed: int) -> nn.Sequential:
    """Returns an MLP as torch draws it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    modules = [module for layer in layers for module in (layer, ACTIVATIONS[activation]())]
    return nn.Sequential(*modules[:-1]).to(DTYPES[dtype])


def _compare(dense: nn.Sequential, batch: int, seed: int) -> dict[str, dict[str, float]]:
    """Returns how far the net is from its MLP, for everything that can run it, and how large the
    MLP's numbers are.
    """
    net = gn.from_module(dense)
    linears = [module for module in dense if isinstance(module, nn.Linear)]
    generator = torch.Generator().manual_seed(seed)
    example = linears[0].weight
    x = torch.randn(batch, linears[0].in_features, generator=generator, dtype=torch.float64).to(
        example
    )
    target = torch.randn(
        batch, linears[-1].out_features, generator=generator, dtype=torch.float64
    ).to(example)
    values, inputs = _step(dense, x, target)
    expected = {
        "values": values,
        "weights": torch.cat(
            [linear.weight.grad.flatten() for linear in linears if linear.weight.grad is not None]
        ),
        "biases": torch.cat(
            [linear.bias.grad for linear in linears if linear.bias.grad is not None]
        ),
        "inputs": inputs,
    }
    found = {"MLP": {kind: float(numbers.abs().max()) for kind, numbers in expected.items()}}
    for path in PATHS[:-1]:
        net.execution.use("auto" if path == "walk" else path)
        net.zero_grad()
        got, inputs = _step(net.walk if path == "walk" else net, x, target)
        ours = {"values": got, **_gradients(net), "inputs": inputs}
        found[path] = {kind: _largest(ours[kind], numbers) for kind, numbers in expected.items()}
    found["snapshot"] = {"values": _largest(net.snapshot()(x), values)}
    return found


def _step(model: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output and the gradient of the inputs, after a backward of the mean square of
    what is missing.
    """
    x = x.clone().requires_grad_()
    output = model(x)
    (output - target).square().mean().backward()
    assert x.grad is not None
    return output.detach(), x.grad


def _gradients(net: gn.GrapNet) -> dict[str, Tensor]:
    """Returns the gradients of a net in the order of the MLP's: every matrix [out, in], by the
    nodes' names.
    """
    weights = []
    biases = []
    for upper, lower in pairwise(net.layers):
        relations = upper.outgoing()
        matrix = relations.gradients.new_zeros(len(lower), len(upper))
        rows = lower.rows(relations.children).long()
        columns = upper.rows(relations.parents).long()
        weights.append(matrix.index_put((rows, columns), relations.gradients).flatten())
        assert lower.bias is not None
        assert lower.bias.grad is not None
        biases.append(lower.bias.grad)
    return {"weights": torch.cat(weights), "biases": torch.cat(biases)}


def _largest(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns the largest differences over all seeds, in the form of one seed."""
    return merged(list(seeds.values()), max)


def bar(result: dict[str, Any], dtype: str, activation: str, kind: str) -> float:
    """Returns the largest difference that is rounding: what two orders of the same sums may make.

    A sum of n numbers ends up about √n roundings, of half a unit in the last place each, away from
    the exact one (Higham and Mary, 2019, who call more than a few times that unlikely). With two
    sums that is √n units, which add up layer by layer; gradients have the layers twice, and the sum
    over the batch. A unit is that of the largest number. So the bar does not depend on the order in
    which the BLAS of a machine adds, as a fixed one would.
    """
    units = 0.0
    for sizes in result["settings"]["sizes"]:
        forward = sum((parents + 1) ** 0.5 for parents in sizes[:-1])
        back = sum(children**0.5 for children in sizes[1:])
        units = max(units, forward if kind == "values" else forward + back)
    if kind != "values":
        units += result["settings"]["batch"] ** 0.5
    largest = result["summary"][dtype][activation]["MLP"][kind]
    return units * torch.finfo(DTYPES[dtype]).eps * largest


def table(result: dict[str, Any]) -> str:
    """Returns the largest differences as a table, ours beside the paper's, and what the check
    allows.
    """
    titles = ["MLP", "run by"]
    for dtype in DTYPES:
        titles += [f"values, {dtype}", f"gradients, {dtype}"]
    rows = []
    for activation in ACTIVATIONS:
        for path in PATHS:
            cells = [_cell(result["summary"][dtype][activation][path]) for dtype in DTYPES]
            rows.append((activation, path, *cells, f"{PAPER:.1e}"))
    allowed = [
        max(bar(result, dtype, activation, "values") for activation in ACTIVATIONS)
        for dtype in DTYPES
    ]
    named = [f"{most:.1e} in {dtype}" for most, dtype in zip(allowed, DTYPES, strict=True)]
    note = (
        "The bars are what rounding can make of sums in another order, by the depth and width of"
        f" the MLPs: for values {' and '.join(named)}."
        f" The paper's {PAPER:.1e} is no bar here; what is set beside the paper is judged"
        " by it."
    )
    return f"{grid((*titles, 'paper'), rows, left=2)}\n\n{note}"


def _cell(found: dict[str, float]) -> str:
    gradients = [found[kind] for kind in GRADIENTS if kind in found]
    return f"{found['values']:.1e} | " + (f"{max(gradients):.1e}" if gradients else "–")


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    lines = []
    for dtype in DTYPES:
        for activation, paths in result["summary"][dtype].items():
            for path in PATHS:
                for kind, difference in paths[path].items():
                    allowed = bar(result, dtype, activation, kind)
                    if not difference <= allowed:
                        place = f"{kind} of {activation} MLPs run by {path} in {dtype}"
                        lines.append(
                            f"{place} differ by {difference:.1e}, the bar is {allowed:.1e}"
                        )
    return lines
