"""Trees of plain data and tensors, as JSON with the tensors set aside; nothing in them is code."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grapnet.core.errors import CheckpointError
from grapnet.core.wording import with_article

from .fields import Fields

_PLAIN = (type(None), bool, int, float, str)
_DEEPEST = 64


def encode(value: Any, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Returns `value` as JSON; its tensors go into `tensors` under names like `path['key'][0]`, one
    name for each.
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"{path}: nested more than {_DEEPEST} levels deep")
    value = _plain(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor | np.ndarray):
        if path in tensors:
            raise CheckpointError(f"{path}: names two tensors")
        kind, tensors[path] = _as_tensor(value, path)
        return {kind: path}
    if isinstance(value, Mapping):
        kind, pairs = "counter" if isinstance(value, Counter) else "dict", []
        for key, item in ((_plain(key), item) for key, item in value.items()):
            if type(key) not in _PLAIN:
                kind = with_article(type(key).__name__)
                raise CheckpointError(f"{path}: a key is {kind}; keys are numbers, strings or None")
            pairs.append([key, encode(item, f"{path}[{key!r}]", tensors, depth + 1)])
        return {kind: pairs}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {
            kind: [encode(item, f"{path}[{n}]", tensors, depth + 1) for n, item in enumerate(value)]
        }
    kind = with_article(type(value).__name__)
    raise CheckpointError(
        f"{path}: a checkpoint holds numbers, strings, lists, dicts and tensors, not {kind}"
        + ("; give it under a name of its own" if hasattr(value, "state_dict") else "")
    )


def decode(tree: Any, path: str, fields: Fields, depth: int = 0) -> Any:
    """Returns what `encode` was given; raises CheckpointError, naming the place, for anything
    else.
    """
    if type(tree) in _PLAIN:
        return tree
    if depth > _DEEPEST or not isinstance(tree, dict) or len(tree) != 1:
        raise CheckpointError(f"{path}: not a tree of plain data")
    (kind, content), *_ = tree.items()
    if kind in ("tensor", "array", "complex"):
        if content != path:
            raise CheckpointError(
                f"{path}: expected the tensor of this name, found {repr(content)[:60]}"
            )
        return _from_tensor(kind, fields.any(path), path)
    if kind not in ("dict", "counter", "list", "tuple") or not isinstance(content, list):
        raise CheckpointError(f"{path}: not a tree of plain data")
    if kind in ("list", "tuple"):
        entries = [
            decode(item, f"{path}[{n}]", fields, depth + 1) for n, item in enumerate(content)
        ]
        return tuple(entries) if kind == "tuple" else entries
    if any(not isinstance(i, list) or len(i) != 2 or type(i[0]) not in _PLAIN for i in content):
        raise CheckpointError(f"{path}: a dict is stored as pairs of key and value")
    items = {key: decode(item, f"{path}[{key!r}]", fields, depth + 1) for key, item in content}
    return Counter(items) if kind == "counter" else items


def _plain(value: Any) -> Any:
    """Returns a numpy number as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _as_tensor(value: "Tensor | np.ndarray", path: str) -> tuple[str, Tensor]:
    if isinstance(value, Tensor):
        if value.is_complex():
            return "complex", torch.view_as_real(value.detach().resolve_conj())
        return "tensor", value
    if type(value) is not np.ndarray or value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        kind = with_article(type(value).__name__)
        raise CheckpointError(
            f"{path}: a checkpoint holds plain arrays of numbers, not {kind} of {value.dtype}"
        )
    native = value.dtype.newbyteorder("=")
    return "array", torch.from_numpy(np.array(value, dtype=native, order="C"))


def _from_tensor(kind: str, tensor: Tensor, path: str) -> Any:
    try:
        return {"tensor": lambda t: t, "array": Tensor.numpy, "complex": torch.view_as_complex}[
            kind
        ](tensor)
    except (TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: a tensor of {tensor.dtype} {list(tensor.shape)} is no {kind}"
        ) from error
