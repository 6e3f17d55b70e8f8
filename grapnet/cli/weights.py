"""State dicts of plain MLPs: which matrices they hold, and in which order these follow each other."""

import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .command import CommandError

_KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_MOST_TRIES = 100_000


@dataclass(frozen=True)
class Part:
    """One linear layer: its key without `.weight`, the matrix [out, in] and the bias [out] if it has one."""

    key: str
    weight: Tensor
    bias: Tensor | None


def read_weights(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a state dict by key; nothing in the file is run.

    Raises:
        CommandError: there is no such file, it is damaged, or it holds something else.
    """
    if not path.exists():
        raise CommandError(f"{path}: no such file")
    if path.is_dir():
        raise CommandError(f"{path} is a folder, not a file of weights")
    if not path.is_file():
        raise CommandError(f"{path} is no file of weights", "name a .safetensors or .pt file")
    if path.suffix not in _TORCH_ENDINGS:
        return _read_safetensors(path)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:  # torch.load compares no checksum
                    raise ValueError("a checksum is wrong")
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever damage makes of a pickle
        raise CommandError(
            f"{path}: is damaged, or holds more than tensors and plain data, which would be code to run",
            "save the state dict alone: torch.save(model.state_dict(), path)",
        ) from None
    state = _state_dict(found)
    if state is None:
        raise CommandError(f"{path} holds no state dict", "save one: torch.save(model.state_dict(), path)")
    return state


def find_chain(tensors: dict[str, Tensor], prefix: str, keys: Sequence[str] | None) -> list[Part]:
    """Returns the linear layers of a state dict in the order in which they run.

    The order is that of numbers in the keys when shapes fit in it; otherwise the one order in which they fit.

    Args:
        tensors: by key.
        prefix: what the keys to read begin with.
        keys: the layers in order, without `.weight`, when the file does not tell.

    Raises:
        CommandError: a tensor is no part of such a chain, or shapes fit in no order or in several; it names the keys.
    """
    mine = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    if not mine:
        raise CommandError(
            f"no key begins with {prefix!r}" if prefix else "the file holds no tensors", _listed(tensors)
        )
    parts = _parts(_unpruned(mine))
    if keys is not None:
        missing = [key for key in keys if key not in parts]
        if missing or len(set(keys)) != len(keys):
            raise CommandError(f"--keys: {missing[0] if missing else 'a name twice'!r} is no layer", _listed(parts))
        chain = [parts[key] for key in keys]
        _require_fit(chain)
        return chain
    chain = [parts[key] for key in sorted(parts, key=_natural)]
    if _first_misfit(chain) is None and _differ_by_numbers(list(parts)):
        return chain
    orders = _orders(list(parts.values()))
    if len(orders) > 1:
        raise CommandError(
            f"{', '.join(part.key for part in chain)} fit in several orders, and their names do not tell which",
            f"say it: --keys {','.join(part.key for part in orders[0])}",
        )
    if not orders:
        _require_fit(chain)
    return orders[0]


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            if "grapnet" in (file.metadata() or {}):
                raise CommandError(f"{path} is a GrapNet checkpoint already", "grapnet inspect looks at it")
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise CommandError(f"{path} is not a whole safetensors file ({str(error).splitlines()[0][:150]})") from None


def _state_dict(found: Any) -> dict[str, Tensor] | None:
    """Returns the state dict that something is, or the only one among its entries."""
    if not isinstance(found, dict):
        return None
    inside = [found] if _is_state_dict(found) else [value for value in found.values() if _is_state_dict(value)]
    return dict(inside[0]) if len(inside) == 1 else None


def _is_state_dict(found: Any) -> bool:
    is_dict = isinstance(found, dict) and bool(found)
    return is_dict and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items())


def _unpruned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors in which what torch.nn.utils.prune has split into two is one again."""
    whole = dict(tensors)
    for key in [key for key in tensors if key.endswith("_orig") and f"{key[:-5]}_mask" in tensors]:
        whole[key[:-5]] = whole.pop(key) * whole.pop(f"{key[:-5]}_mask")
    return whole


def _parts(tensors: dict[str, Tensor]) -> dict[str, Part]:
    """Returns every linear layer by key; raises CommandError for a tensor that belongs to none."""
    weights = {key.removesuffix("weight").rstrip("."): key for key, t in tensors.items() if _is_matrix(key, t)}
    parts, used = {}, set(weights.values())
    for stem, key in weights.items():
        bias_key = key.removesuffix("weight") + "bias"
        weight, bias = tensors[key], tensors.get(bias_key)
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise CommandError(
                f"{bias_key} has shape {list(bias.shape)}, and {key} {list(weight.shape)} needs [{weight.shape[0]}]"
            )
        used.add(bias_key)
        parts[stem] = Part(stem or key, weight, bias)
    for key, tensor in tensors.items():
        if key not in used:
            raise CommandError(
                f"{key} of shape {list(tensor.shape)} is no weight or bias of a linear layer, so this is no plain MLP",
                "--prefix reads a part of the file; gn.graft makes nets of the parts of any model",
            )
    if not parts:
        raise CommandError("the file holds no matrix called weight", _listed(tensors))
    _require_numbers({key: tensors[key] for key in used if key in tensors})
    return parts


def _is_matrix(key: str, tensor: Tensor) -> bool:
    return (key == "weight" or key.endswith(".weight")) and tensor.dim() == 2


def _require_numbers(tensors: dict[str, Tensor]) -> None:
    first = next(iter(tensors))
    for key, tensor in tensors.items():
        if tensor.dtype not in _KINDS:
            raise CommandError(f"{key} is of {tensor.dtype}, and weights are of {', '.join(map(str, _KINDS))}")
        if tensor.dtype != tensors[first].dtype:
            raise CommandError(f"{key} is of {tensor.dtype} and {first} of {tensors[first].dtype}; a net has one type")
        if not bool(torch.isfinite(tensor).all()):
            raise CommandError(f"{key} holds NaN or infinity")


def _require_fit(chain: Sequence[Part]) -> None:
    misfit = _first_misfit(chain)
    if misfit is not None:
        (a, b), (out, width) = misfit, (misfit[0].weight.shape[0], misfit[1].weight.shape[1])
        raise CommandError(
            f"{a.key} gives {out} values and {b.key} takes {width}; the shapes fit in no order",
            "--prefix reads a part of the file, --keys names the layers to take",
        )


def _first_misfit(chain: Sequence[Part]) -> tuple[Part, Part] | None:
    return next(((a, b) for a, b in pairwise(chain) if a.weight.shape[0] != b.weight.shape[1]), None)


def _orders(parts: list[Part]) -> list[list[Part]]:
    """Returns the orders in which every shape fits, two at most."""
    tries = iter(range(_MOST_TRIES))

    def extended(chain: list[Part], left: list[Part]) -> Iterator[list[Part]]:
        if not left:
            yield chain
        for n, part in enumerate(left):
            if (not chain or chain[-1].weight.shape[0] == part.weight.shape[1]) and next(tries, None) is not None:
                yield from extended([*chain, part], left[:n] + left[n + 1 :])

    return [order for order, _ in zip(extended([], parts), range(2), strict=False)]


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Returns what sorts keys with the numbers in them as numbers."""
    return [(0, int(text), "") if text.isdecimal() else (1, 0, text) for text in re.split(r"(\d+)", key) if text]


def _differ_by_numbers(keys: list[str]) -> bool:
    return len({re.sub(r"\d+", "#", key) for key in keys}) == 1


def _listed(named: Any) -> str:
    names = list(named)
    return "the keys are: " + ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
