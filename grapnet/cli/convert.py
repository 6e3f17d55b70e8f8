"""convert: the weights of a plain MLP become a GrapNet checkpoint, checked against the plain
computation.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import grapnet as gn
from grapnet.checkpoint import content
from grapnet.core.activation import activation_function
from grapnet.execution.modules import NamedActivation

from .agreement import largest_difference, require_agreement, told_of_overflow
from .command import Command, CommandError, Outcome
from .files import add_file, add_output, require_free, write_checkpoint
from .layers import Part, few, find_chain, left_out
from .weights import Weights, read_weights


def _configure(parser: argparse.ArgumentParser) -> None:
    add_file(
        parser, about="a state dict: .safetensors, or .pt/.pth, which is read without running code"
    )
    add_output(parser, "where to write the checkpoint (default: FILE with .grapnet.safetensors)")
    parser.add_argument(
        "--activation",
        metavar="A[,B,...]",
        help=(
            "of all hidden layers, or one name for each: relu,tanh; files do not tell (default:"
            " relu)"
        ),
    )
    parser.add_argument(
        "--drop-zeros", action="store_true", help="leave weights that are zero out of the graph"
    )
    parser.add_argument(
        "--prefix", default="", metavar="TEXT", help="read only keys that begin so, such as head."
    )
    parser.add_argument(
        "--keys",
        metavar="A,B,...",
        help="the layers to take, in order: fc_in,fc_out (default: all, as they fit)",
    )


def _run(given: argparse.Namespace) -> Outcome:
    names = [
        name.strip()
        for name in ("relu" if given.activation is None else given.activation).split(",")
    ]
    _require_known(names)
    keys = None if given.keys is None else given.keys.split(",")
    weights = read_weights(given.file, given.prefix, keys)
    prefix = weights.prefix_inside(given.prefix)
    chain = find_chain(
        weights.tensors, prefix, None if keys is None else weights.keys_inside(keys, given.prefix)
    )
    activations = _one_each(names, chain[:-1])
    output = given.output or given.file.with_name(f"{given.file.stem}.grapnet.safetensors")
    require_free(output, force=given.force)
    net = gn.from_module(_module(chain, activations), drop_zeros=given.drop_zeros).eval()
    inputs = torch.randn(7, net.sizes[0], dtype=chain[0].weight.dtype)
    with torch.no_grad():
        expected = _computed(chain, activations, inputs)
        difference = largest_difference(net(inputs), expected)
    require_agreement(difference, expected, "the plain computation", "nothing was written")
    write_checkpoint(output, *content(net, {}, undo=False, history="outline"), force=given.force)
    lines, data = _told(chain, activations, net, given)
    lines = [*_read(weights), *lines]
    others = left_out(weights.tensors, prefix, chain)
    if others:
        lines.append(
            f"left out: {few(others)}; where these take part between the layers above, a norm say, "
            "this net is not what the model computes"
        )
    agreed = (
        "largest difference from these matrices, on 7 random inputs:"
        f" {difference:.3g}{told_of_overflow(expected)}"
    )
    found = {
        "file": str(given.file),
        "written": str(output),
        "under": weights.under or None,
        **data,
    }
    return Outcome(
        "\n".join([f"wrote {output}: {net!r}", *lines, agreed]),
        {
            **found,
            "left_out": others,
            "no_tensors": weights.no_tensors,
            "beside": weights.beside,
            "difference": difference,
        },
    )


def _require_known(activations: Sequence[str]) -> None:
    for name in activations:
        try:
            activation_function(name)
        except ValueError as error:
            wrong, _, known = str(error).rpartition("; ")
            raise CommandError(f"--activation: {wrong}", known) from None


def _one_each(names: list[str], hidden: Sequence[Part]) -> list[str]:
    """Returns one activation a hidden layer."""
    if len(names) == 1:
        return names * len(hidden)
    if len(names) != len(hidden):
        behind = f", behind {', '.join(part.key for part in hidden)}" if hidden else ""
        raise CommandError(
            f"--activation names {len(names)} activations, and the number of hidden layers is"
            f" {len(hidden)}{behind}",
            "give one name for all of them, or one for each with commas between",
        )
    return names


def _module(chain: Sequence[Part], activations: Sequence[str]) -> nn.Sequential:
    modules: list[nn.Module] = []
    for part, activation in zip(chain, [*activations, "identity"], strict=True):
        # draws nothing, and warns of no empty matrix
        linear = nn.Linear(1, 1, part.bias is not None, device="meta")
        linear.in_features, linear.out_features = part.takes, part.gives
        linear.weight = nn.Parameter(part.weight.detach())
        if part.bias is not None:
            linear.bias = nn.Parameter(part.bias.detach())
        modules += [linear, NamedActivation(activation)]
    return nn.Sequential(*modules)


def _computed(chain: Sequence[Part], activations: Sequence[str], x: Tensor) -> Tensor:
    """Returns what the weights compute as plain matrices."""
    for part, activation in zip(chain, [*activations, "identity"], strict=True):
        x = activation_function(activation)(functional.linear(x, part.weight, part.bias))
    return x


def _read(weights: Weights) -> list[str]:
    """Returns what of a file was read, for people."""
    lines = [f"read the state dict under {weights.under!r}"] if weights.under else []
    if weights.beside:
        lines[0] += (
            f", and nothing under {few(list(map(repr, weights.beside)))}, where there is no linear"
            " layer"
        )
    return lines + (
        [f"left out, as these are no tensors of a state dict: {few(weights.no_tensors)}"]
        if weights.no_tensors
        else []
    )


def _told(
    chain: Sequence[Part], activations: Sequence[str], net: gn.GrapNet, given: argparse.Namespace
) -> tuple[list[str], dict[str, Any]]:
    """Returns what was found in the file, for people and as data."""
    cells = sum(part.weight.numel() for part in chain)
    zeros = sum(int((part.weight == 0).sum()) for part in chain)
    fate = "left out" if given.drop_zeros else "kept as relations; --drop-zeros leaves them out"
    lines = []
    for part, transition, activation in zip(
        chain, net.transitions, [*activations, None], strict=True
    ):
        bias = "bias" if part.bias is not None else "no bias"
        then = f", then {activation}" if activation else ""
        lines.append(
            f"  {part.key}: {part.takes} -> {part.gives}, {transition.size:,} relations,"
            f" {bias}{then}"
        )
    lines += [f"{zeros:,} of {cells:,} weights are zero, {fate}"] if zeros else []
    if activations and given.activation is None:
        lines.append(
            "hidden activation: relu, as the file does not say (--activation A[,B,...] for another)"
        )
    data = {
        "keys": [part.key for part in chain],
        "sizes": net.sizes,
        "activations": list(activations),
        "relations": net.count().relations,
        "weights": cells,
        "zeros": zeros,
        "zeros_dropped": given.drop_zeros,
    }
    return lines, data


COMMANDS: tuple[Command, ...] = (
    Command(
        "convert",
        "makes a checkpoint of the weights of a plain MLP, and checks it",
        "Bring a net elsewhere",
        _configure,
        _run,
        (
            "convert mlp.safetensors -o converted.safetensors",
            "convert pruned.pt --activation gelu --drop-zeros -o sparse.safetensors",
            "convert deep.pt --activation relu,tanh -o deep.safetensors",
            "convert cnn.pt --prefix classifier. -o head.safetensors",
            "convert cnn.pt --keys classifier.1,classifier.4 -o part.safetensors",
        ),
    ),
)
