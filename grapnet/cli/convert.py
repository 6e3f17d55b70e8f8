"""convert: the weights of a plain MLP become a GrapNet checkpoint, checked against the plain computation."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

import grapnet as gn
from grapnet.core.activation import activation_function
from grapnet.execution.modules import NamedActivation

from .agreement import largest_difference, require_agreement
from .command import Command, CommandError, Outcome
from .files import add_file, add_output, require_free
from .weights import Part, find_chain, read_weights


def _configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser, about="a state dict: .safetensors, or .pt/.pth, which is read without running code")
    add_output(parser, "where to write the checkpoint (default: FILE with .grapnet.safetensors)")
    parser.add_argument(
        "--activation", default="relu", metavar="NAME", help="of the hidden layers; files do not tell (default: relu)"
    )
    parser.add_argument("--drop-zeros", action="store_true", help="leave weights that are zero out of the graph")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="read only keys that begin so, such as head.")
    parser.add_argument(
        "--keys", metavar="A,B,...", help="the layers in order, where the file does not tell: fc_in,fc_out"
    )


def _run(given: argparse.Namespace) -> Outcome:
    output = given.output or given.file.with_name(f"{given.file.stem}.grapnet.safetensors")
    try:
        activation_function(given.activation)
    except ValueError as error:
        raise CommandError(f"--activation: {error}") from None
    chain = find_chain(read_weights(given.file), given.prefix, given.keys.split(",") if given.keys else None)
    require_free(output, force=given.force)
    net = gn.from_module(_module(chain, given.activation), drop_zeros=given.drop_zeros).eval()
    inputs = torch.randn(7, net.sizes[0], dtype=chain[0].weight.dtype)
    with torch.no_grad():
        expected = _computed(chain, given.activation, inputs)
        difference = largest_difference(net(inputs), expected)
    require_agreement(difference, expected, "the plain computation", "nothing was written")
    gn.save(output, net)
    return _told(given, chain, net, difference, str(output))


def _module(chain: list[Part], activation: str) -> nn.Sequential:
    modules: list[nn.Module] = []
    for part in chain:
        linear = nn.Linear(*reversed(part.weight.shape), bias=part.bias is not None, dtype=part.weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(part.weight)
            if part.bias is not None:
                linear.bias.copy_(part.bias)
        modules += [linear, NamedActivation(activation)]
    return nn.Sequential(*modules[:-1])


def _computed(chain: list[Part], activation: str, x: Tensor) -> Tensor:
    """Returns what the weights compute as plain matrices."""
    function = activation_function(activation)
    for part in chain[:-1]:
        x = function(functional.linear(x, part.weight, part.bias))
    return functional.linear(x, chain[-1].weight, chain[-1].bias)


def _told(given: argparse.Namespace, chain: list[Part], net: gn.GrapNet, difference: float, output: str) -> Outcome:
    cells = sum(part.weight.numel() for part in chain)
    zeros = sum(int((part.weight == 0).sum()) for part in chain)
    fate = "left out" if given.drop_zeros else "kept as relations; --drop-zeros leaves them out"
    lines = [f"wrote {output}: {net!r}"]
    for t, part in enumerate(chain):
        bias = "bias" if part.bias is not None else "no bias"
        lines.append(
            f"  {part.key}: {net.sizes[t]} -> {net.sizes[t + 1]}, {net.transitions[t].size:,} relations, {bias}"
        )
    lines += [f"{zeros:,} of {cells:,} weights are zero, {fate}"] if zeros else []
    lines.append(f"hidden activation: {given.activation}, which the file does not say (--activation NAME for another)")
    lines.append(f"largest difference from these matrices with it, on 7 random inputs: {difference:.3g}")
    data = {
        "file": str(given.file),
        "written": output,
        "keys": [part.key for part in chain],
        "sizes": net.sizes,
        "activation": given.activation,
        "relations": net.count().relations,
        "weights": cells,
        "zeros": zeros,
        "zeros_dropped": given.drop_zeros,
        "difference": difference,
    }
    return Outcome("\n".join(lines), data)


COMMANDS: tuple[Command, ...] = (
    Command(
        "convert",
        "makes a checkpoint of the weights of a plain MLP, and checks it",
        "Bring a net elsewhere",
        _configure,
        _run,
        (
            "convert mlp.safetensors -o net.safetensors",
            "convert pruned.pt --activation gelu --drop-zeros -o net.safetensors",
            "convert model.safetensors --prefix classifier. -o head.safetensors",
        ),
    ),
)
