"""State dicts of plain MLPs: which linear layers they hold, and in which order these follow each
other.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from grapnet.core.relations import MOST_RELATIONS

from .command import CommandError

_KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# a tensor that is no plain array, and what to do
_ODD: tuple[tuple[Callable[[Tensor], bool], str, str], ...] = (
    (lambda tensor: tensor.is_quantized, "is quantized", "save tensor.dequantize() in its place"),
    (
        lambda tensor: tensor.is_nested,
        "is a nested tensor",
        "save the tensors in it under keys of their own",
    ),
    (
        lambda tensor: tensor.is_meta,
        "is on the meta device and holds no numbers",
        "save a model that has its weights",
    ),
    (
        lambda tensor: tensor.layout is not torch.strided,
        "is a sparse tensor",
        "save tensor.to_dense() in its place; --drop-zeros then leaves the zeros out",
    ),
)
# how the key of a part of a weight looks that is computed from several, and what makes it one again
_SPLIT = (
    (
        r"(^|\.)parametrizations\.",
        "torch.nn.utils.parametrize.remove_parametrizations(module, name)",
    ),
    (r"(^|\.)(weight|bias)_g$", "torch.nn.utils.remove_weight_norm(module)"),
    (r"(^|\.)(weight|bias)_u$", "torch.nn.utils.remove_spectral_norm(module)"),
)


@dataclass(frozen=True)
class Part:
    """One linear layer: its key without `.weight`, the matrix [out, in] and the bias [out] if it
    has one.
    """

    key: str
    weight: Tensor
    bias: Tensor | None

    @property
    def gives(self) -> int:
        """How many values come out."""
        return self.weight.shape[0]

    @property
    def takes(self) -> int:
        """How many values go in."""
        return self.weight.shape[1]


def find_chain(tensors: dict[str, Tensor], prefix: str, keys: Sequence[str] | None) -> list[Part]:
    """Returns the linear layers of a state dict in the order in which they run.

    The order is that of numbers in the keys when shapes fit in it; otherwise the one order in which
    they fit.

    Args:
        tensors: by key.
        prefix: what the keys to read begin with.
        keys: the layers to take, in order and without `.weight`; all of them in an order of their
            own without it.

    Raises:
        CommandError: a tensor is no part of such a chain, or shapes fit in no order or in several;
            it names the keys.
    """
    mine = {
        key.removeprefix(prefix): tensor
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }
    if not mine:
        raise CommandError(
            f"no key begins with {prefix!r}" if prefix else "the file holds no tensors",
            f"the keys are: {few(tensors)}",
        )
    if keys is not None:
        _require_layers(keys, mine)
        mine = {key: tensor for key, tensor in mine.items() if _layer_of(key) in keys}
    _require_arrays(mine)
    parts = _parts(_unpruned(mine))
    if keys is not None:
        return _chosen(parts, keys)
    chain, given = [parts[key] for key in sorted(parts, key=_natural)], list(parts.values())
    if _are_numbered(parts) and _first_misfit(chain) is None:
        return chain
    found, is_only = fitting_order(given if _first_misfit(given) is None else chain)
    if found is None:
        raise _misfit(chain, "the shapes fit in no order")
    if not is_only:
        raise CommandError(
            f"{few(parts)} fit in several orders, and their names do not tell which",
            f"say it: --keys {','.join(part.key for part in found)}",
        )
    return found


def has_layers(tensors: dict[str, Tensor]) -> bool:
    """Says whether there is a linear layer among tensors, which need not all belong to one."""
    return bool(_layers(tensors))


def left_out(tensors: Iterable[str], prefix: str, chain: Sequence[Part]) -> list[str]:
    """Returns the keys of a state dict that belong to none of the layers that were taken."""
    taken = {part.key for part in chain}
    return [
        key
        for key in tensors
        if not key.startswith(prefix) or _layer_of(key.removeprefix(prefix)) not in taken
    ]


def fitting_order(parts: Sequence[Part]) -> tuple[list[Part] | None, bool]:
    """Returns an order in which every shape fits, the given one if it does, and whether it is the
    only one.

    Parts are steps from one width to another, so such an order is a trail that takes every step
    once. Whether one is left can be told from the steps without walking them, so that many equal
    shapes take no longer than others.
    """
    chain: list[Part] = []
    left, is_only = list(parts), True
    while left:
        fitting = (
            n
            for n, part in enumerate(left)
            if (not chain or chain[-1].gives == part.takes)
            and _has_trail(part.gives, left[:n] + left[n + 1 :])
        )
        n = next(fitting, None)
        if n is None:
            return None, False
        is_only = is_only and next(fitting, None) is None
        chain.append(left.pop(n))
    return chain, is_only


def _has_trail(width: int, parts: Sequence[Part]) -> bool:
    """Says whether parts can run one after the other, in some order, on `width` values."""
    surplus, after = Counter({width: -1}), dict[int, set[int]]()
    for part in parts:
        surplus[part.takes] += 1
        surplus[part.gives] -= 1
        after.setdefault(part.takes, set()).add(part.gives)
    # all but the last width is taken as often as given
    if [count for count in surplus.values() if count] != [-1]:
        return False
    reached, waiting = {width}, [width]
    while waiting:
        further = after.get(waiting.pop(), set()) - reached
        reached |= further
        waiting += further
    return after.keys() <= reached


def _require_layers(keys: Sequence[str], tensors: dict[str, Tensor]) -> None:
    """Raises CommandError when `--keys` names a layer twice, or something that is no linear
    layer.
    """
    layers = _layers(tensors)
    if not layers:
        raise _foreign(tensors, ())
    for n, key in enumerate(keys):
        if key not in layers:
            listed = [one for one in dict.fromkeys(map(_layer_of, tensors)) if one in layers]
            raise CommandError(
                f"--keys: {key!r} is no linear layer", f"the layers are: {few(listed)}"
            )
        if key in keys[:n]:
            once = ",".join(dict.fromkeys(keys))
            raise CommandError(
                f"--keys names {key!r} twice, and a layer runs once",
                f"leave one out: --keys {once}",
            )


def _layers(tensors: dict[str, Tensor]) -> set[str]:
    return {
        _layer_of(key)
        for key, tensor in tensors.items()
        if _is_matrix(key.removesuffix("_orig"), tensor)
    }


def _layer_of(key: str) -> str:
    """Returns the layer that a tensor belongs to, `weight` where it has no name of its own."""
    return key.rpartition(".")[0] or "weight"


def _chosen(parts: dict[str, Part], keys: Sequence[str]) -> list[Part]:
    """Returns the layers that `--keys` names."""
    chain = [parts[key] for key in keys]
    if _first_misfit(chain) is not None:
        raise _misfit(chain, "--keys wants them in this order")
    return chain


def _require_arrays(tensors: dict[str, Tensor]) -> None:
    """Raises CommandError for a tensor that is more, or less, than an array of numbers."""
    for key, tensor in tensors.items():
        for is_so, told, hint in _ODD:
            if is_so(tensor):
                raise CommandError(f"{key} {told}, and weights are plain arrays", hint)
        if max(tensor.numel(), *tensor.shape, 0) > MOST_RELATIONS:
            raise CommandError(
                f"{key} has shape {list(tensor.shape)}, and a net counts nodes and relations up to"
                f" {MOST_RELATIONS:,}"
            )


def _unpruned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors in which what torch.nn.utils.prune has split into two is one again."""
    whole = dict(tensors)
    for key in [key.removesuffix("_orig") for key in tensors if key.endswith("_orig")]:
        values, kept = tensors[f"{key}_orig"], tensors.get(f"{key}_mask")
        if kept is None:
            continue
        if key in tensors:
            raise CommandError(
                f"{key} stands beside {key}_orig and {key}_mask, which make the same tensor",
                "save either: torch.nn.utils.prune.remove(module, name) leaves one",
            )
        if kept.shape != values.shape:
            raise CommandError(
                f"{key}_mask has shape {list(kept.shape)}, and {key}_orig {list(values.shape)};"
                " they have to be equal",
                "torch.nn.utils.prune.remove(module, name) before saving leaves the pruned values"
                " alone",
            )
        whole[key] = whole.pop(f"{key}_orig") * whole.pop(f"{key}_mask").to(values.dtype)
    return whole


def _parts(tensors: dict[str, Tensor]) -> dict[str, Part]:
    """Returns every linear layer by key; raises CommandError for a tensor that belongs to none."""
    weights = {
        key.removesuffix(".weight"): key
        for key, tensor in tensors.items()
        if _is_matrix(key, tensor)
    }
    parts, used = {}, set(weights.values())
    for stem, key in weights.items():
        bias_key = key.removesuffix("weight") + "bias"
        weight, bias = tensors[key], tensors.get(bias_key)
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise CommandError(
                f"{bias_key} has shape {list(bias.shape)}, and {key} {list(weight.shape)} needs"
                f" [{weight.shape[0]}]"
            )
        used.add(bias_key)
        parts[stem] = Part(stem, weight, bias)
    others = {key: tensor for key, tensor in tensors.items() if key not in used}
    if others:
        raise _foreign(others, list(parts))
    _require_numbers(tensors)
    return parts


def _foreign(tensors: dict[str, Tensor], layers: Sequence[str]) -> CommandError:
    """Returns the error of tensors that belong to no linear layer, beside those that do."""
    for pattern, remedy in _SPLIT:
        for key in tensors:
            if re.search(pattern, key):
                return CommandError(
                    f"{key} is one part of a parametrized weight, and a plain MLP holds the weight"
                    " itself",
                    f"{remedy} of every such layer before saving leaves the weight",
                )
    matrix = next((key for key, tensor in tensors.items() if tensor.dim() == 2), None)
    if matrix is not None and not layers:
        return CommandError(
            f"{matrix} of shape {list(tensors[matrix].shape)} is not known for a linear layer's:"
            " keys have to end in .weight and .bias",
            "if it is one, rename the keys before saving: fc1.weight for a matrix [out, in],"
            " fc1.bias for its bias",
        )
    key, tensor = next(iter(tensors.items()))
    some = ",".join([*layers[:4], *["..."] * (len(layers) > 4)])
    alone = (
        f"; --keys {some} takes these layers alone, without what runs between them, --prefix those"
        " that begin so"
    )
    return CommandError(
        f"{key} of shape {list(tensor.shape)} is no weight or bias of a linear layer, so this is no"
        " plain MLP",
        "gn.graft(model, nn.Linear) in Python makes nets of the linear layers and leaves the rest,"
        f" norms say, in the model{alone if layers else ''}",
    )


def _is_matrix(key: str, tensor: Tensor) -> bool:
    return (key == "weight" or key.endswith(".weight")) and tensor.dim() == 2


def _require_numbers(tensors: dict[str, Tensor]) -> None:
    first = next(iter(tensors))
    one_type = "save it in one type: model.float().state_dict()"
    for key, tensor in tensors.items():
        if tensor.dtype not in _KINDS:
            raise CommandError(
                f"{key} is of {tensor.dtype}, and weights are of {', '.join(map(str, _KINDS))}",
                one_type,
            )
        if tensor.dtype != tensors[first].dtype:
            raise CommandError(
                f"{key} is of {tensor.dtype} and {first} of {tensors[first].dtype}; a net has one"
                " type",
                one_type,
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CommandError(
                f"{key} holds NaN or infinity", "use a file from before the training went wrong"
            )


def _misfit(chain: Sequence[Part], state: str) -> CommandError:
    misfit = _first_misfit(chain)
    assert misfit is not None
    a, b = misfit
    return CommandError(
        f"{a.key} gives {a.gives} values and {b.key} takes {b.takes}; {state}",
        "--prefix reads a part of the file, --keys names the layers to take",
    )


def _first_misfit(chain: Sequence[Part]) -> tuple[Part, Part] | None:
    return next(((a, b) for a, b in pairwise(chain) if a.gives != b.takes), None)


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Returns what sorts keys with the numbers in them as numbers, however long these are."""
    pieces = [piece for piece in re.split(r"(\d+)", key) if piece]
    digits = [
        "".join(str(unicodedata.decimal(c, "")) for c in piece).lstrip("0") for piece in pieces
    ]
    return [
        (0, len(number), number) if piece.isdecimal() else (1, 0, piece)
        for piece, number in zip(pieces, digits, strict=True)
    ]


def _are_numbered(keys: Collection[str]) -> bool:
    """Says whether keys are one name with a number that is another in each, so that 1 and 01 do not
    both occur.
    """
    is_one_name = len({re.sub(r"\d+", "#", key) for key in keys}) == 1
    return is_one_name and len({tuple(_natural(key)) for key in keys}) == len(keys)


def few(names: Collection[str]) -> str:
    """Returns the first names of many."""
    return ", ".join(list(names)[:12]) + (", ..." if len(names) > 12 else "")
