"""`grapnet convert`: makes a checkpoint of the weights of a plain MLP, and checks it."""

import argparse
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grapnet as gn

from ._command import (
    Command,
    CommandError,
    Outcome,
    add_file,
    add_output,
    counted,
    few,
    largest_difference,
    require_free,
    writing,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")  # of the files that torch.save writes


def _configure(parser: argparse.ArgumentParser) -> None:
    add_file(
        parser, about="a state dict: .safetensors, or .pt/.pth, which is read without running code"
    )
    add_output(parser, "where to write the checkpoint (default: FILE with .grapnet.safetensors)")
    parser.add_argument(
        "--activation",
        default="relu",
        metavar="A[,B,...]",
        help="activation of all hidden layers, or one for each: relu,tanh (default: relu)",
    )
    parser.add_argument("--drop-zeros", action="store_true", help="drop weights that are zero")
    parser.add_argument(
        "--prefix", metavar="TEXT", help="read only keys with this prefix, such as head."
    )
    parser.add_argument(
        "--keys",
        metavar="A,B,...",
        help="the layers to take, in order: fc_in,fc_out (default: all, by their numbers)",
    )


def _run(given: argparse.Namespace) -> Outcome:
    import torch

    output = given.output or given.file.with_name(f"{given.file.stem}.grapnet.safetensors")
    require_free(output, force=given.force)
    prefix, state = _chosen(_read(given.file), given.prefix)
    state = _unpruned(state)
    layers = _layers(state, given.keys)
    activations = _activations(given.activation, len(layers) - 1)
    module = _module(state, layers, activations)
    net = gn.from_module(module, drop_zeros=given.drop_zeros).eval()
    inputs = torch.randn(7, net.sizes[0], dtype=next(net.parameters()).dtype)
    with torch.no_grad():
        difference = largest_difference(net(inputs), module(inputs))
    with writing(output, force=given.force) as partial:
        gn.save(partial, net)
    taken = {f"{layer}{part}" for layer in layers for part in ("weight", "bias")}
    left_out = [key for key in state if key not in taken]
    data = {
        "file": str(given.file),
        "written": str(output),
        "prefix": prefix,
        "keys": [layer.removesuffix(".") for layer in layers],
        "sizes": net.sizes,
        "activations": activations,
        "relations": net.count().relations,
        "zeros": sum(int((state[f"{layer}weight"] == 0).sum()) for layer in layers),
        "zeros_dropped": given.drop_zeros,
        "left_out": left_out,
        "difference": difference,
    }
    lines = [
        f"wrote {output}: {net!r}",
        f"layers: {few(data['keys'])}; hidden activations: {few(activations) or 'none'}",
    ]
    if data["zeros"] and not given.drop_zeros:
        lines.append(f"{data['zeros']:,} weights are zero; --drop-zeros leaves them out")
    if left_out:
        lines.append(f"left out: {few(left_out)}; if these run between the layers, the net differs")
    lines.append(f"largest difference from these matrices on 7 random inputs: {difference:.3g}")
    return Outcome("\n".join(lines), data)


def _read(path: Path) -> "dict[str, dict[str, Tensor]]":
    """Returns every dict of tensors in a file by the prefix of its keys; runs no code."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix.lower() not in _TORCH_ENDINGS:
        try:
            return {"": load_file(path)}
        except SafetensorError:
            raise CommandError(
                f"{path} is not a complete safetensors file",
                f"if torch.save wrote it, its name has to end in {', '.join(_TORCH_ENDINGS)}",
            ) from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # damage to a pickle raises anything
        raise CommandError(
            f"{path} is damaged, or contains more than tensors and plain data",
            "save the state dict alone: torch.save(model.state_dict(), path)",
        ) from None
    found: dict[str, dict[str, Tensor]] = {}
    _collect(content, "", found)
    return found


def _collect(content: Any, prefix: str, found: "dict[str, dict[str, Tensor]]") -> None:
    """Adds a dict of tensors, and those inside it, to `found`."""
    import torch

    if not isinstance(content, dict):
        return
    for key, value in content.items():
        if isinstance(value, torch.Tensor):
            found.setdefault(prefix, {})[str(key)] = value
        _collect(value, f"{prefix}{key}.", found)


def _chosen(
    found: "dict[str, dict[str, Tensor]]", prefix: str | None
) -> "tuple[str, dict[str, Tensor]]":
    """Returns the state dict behind a prefix; without one, the only dict that holds a matrix."""
    places = []
    for place, tensors in found.items():
        if any(_is_matrix(key, tensor) for key, tensor in tensors.items()):
            places.append(place)
    if prefix is not None or not places:
        prefix = prefix or ""
        state = {}
        for place, tensors in found.items():
            for key, tensor in tensors.items():
                if f"{place}{key}".startswith(prefix):
                    state[f"{place}{key}".removeprefix(prefix)] = tensor
        return prefix, state
    if len(places) > 1:
        choices = " or ".join(f"--prefix {place}" for place in places if place)
        raise CommandError(f"the file holds {len(places)} state dicts", f"choose one: {choices}")
    return places[0], found[places[0]]


def _is_matrix(key: str, tensor: "Tensor") -> bool:
    last = key.rpartition(".")[2].removesuffix("_orig")
    return last == "weight" and tensor.dim() == 2


def _unpruned(state: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """Returns a state dict with the weights of torch.nn.utils.prune multiplied by their masks."""
    whole = dict(state)
    for key in state:
        name = key.removesuffix("_orig")
        if name != key and f"{name}_mask" in state:
            whole[name] = whole.pop(key) * whole.pop(f"{name}_mask")
    return whole


def _layers(state: "dict[str, Tensor]", keys: str | None) -> list[str]:
    """Returns the names of the linear layers, each with its dot, in the order in which they run."""
    found = [key.removesuffix("weight") for key in state if _is_matrix(key, state[key])]
    listed = few(layer.removesuffix(".") for layer in found)
    if not found:
        raise CommandError("no linear layer here", f"the keys are: {few(state) or 'none'}")
    if keys is not None:
        layers = [f"{key}." for key in keys.split(",")]
        for layer in layers:
            if layer not in found:
                raise CommandError(f"--keys: no linear layer {layer[:-1]}", f"layers are: {listed}")
    else:
        layers = sorted(found, key=_natural)
        others = [key for key in state if not key.startswith(tuple(found))]
        if others:
            raise CommandError(
                f"{others[0]} of shape {list(state[others[0]].shape)} belongs to no linear layer",
                "in Python gn.graft(model, nn.Linear) takes any model; --keys A,B selects layers"
                f" of: {listed}",
            )
    for first, second in pairwise(layers):
        gives = len(state[f"{first}weight"])
        takes = state[f"{second}weight"].shape[1]
        if gives != takes:
            raise CommandError(
                f"{first}weight gives {gives} values and {second}weight takes {takes}",
                f"name the layers in the order in which they run: --keys A,B,... of {listed}",
            )
    return layers


def _natural(key: str) -> list[tuple[int, str]]:
    """Sorts keys with the numbers in them as numbers."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", key)]


def _activations(names: str, hidden: int) -> list[str]:
    """Returns one activation for each hidden layer."""
    activations = names.split(",")
    if len(activations) == 1:
        return activations * hidden
    if len(activations) != hidden:
        raise CommandError(
            f"--activation names {len(activations)} for {counted(hidden, 'hidden layer')}",
            "give one for all of them, or one for each",
        )
    return activations


def _module(
    state: "dict[str, Tensor]", layers: list[str], activations: list[str]
) -> "nn.Sequential":
    """Returns the plain model that the matrices make."""
    from torch import nn

    modules = []
    for layer, activation in zip(layers, [*activations, "identity"], strict=True):
        weight = state[f"{layer}weight"]
        bias = state.get(f"{layer}bias")
        linear = nn.Linear(*reversed(weight.shape), bias=bias is not None, dtype=weight.dtype)
        linear.weight = nn.Parameter(weight)
        if bias is not None:
            linear.bias = nn.Parameter(bias)
        # A snapshot has the activation as a plain module.
        modules += [linear, gn.snapshot(gn.GrapNet([1, 1, 1], activation=activation))[1]]
    return nn.Sequential(*modules[:-1])


COMMANDS = (
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
