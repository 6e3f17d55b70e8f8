"""Trees of plain data and tensors, as JSON with the tensors set aside; nothing in them is code."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grapnet.core.errors import CheckpointError

_PLAIN = (type(None), bool, int, float, str)
_DEEPEST = 64


def encode(value: Any, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Returns `value` as JSON; its tensors go into `tensors` under names that start with `path`."""
    if depth > _DEEPEST:
        raise CheckpointError(f"{path}: nested more than {_DEEPEST} levels deep")
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value))
        return {"array": path}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        for key in value:
            if type(key) not in _PLAIN:
                raise CheckpointError(f"{path}: a key is a {type(key).__name__}; keys are numbers, strings or None")
        return {kind: [[key, encode(item, f"{path}.{key}", tensors, depth + 1)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(item, f"{path}.{n}", tensors, depth + 1) for n, item in enumerate(value)]}
    raise CheckpointError(
        f"{path}: a checkpoint holds numbers, strings, lists, dicts and tensors, not a {type(value).__name__}"
    )


def decode(tree: Any, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Returns what `encode` was given; raises CheckpointError, naming the place, for anything else."""
    if type(tree) in _PLAIN:
        return tree
    if depth > _DEEPEST or not isinstance(tree, dict) or len(tree) != 1:
        raise CheckpointError(f"{path}: not a tree of plain data")
    (kind, content), *_ = tree.items()
    if kind in ("tensor", "array"):
        if content != path or path not in tensors:
            raise CheckpointError(f"{path}: its tensor is missing")
        return tensors[path] if kind == "tensor" else tensors[path].numpy()
    if not isinstance(content, list):
        raise CheckpointError(f"{path}: not a tree of plain data")
    if kind in ("dict", "counter"):
        if any(not isinstance(i, list) or len(i) != 2 or type(i[0]) not in _PLAIN for i in content):
            raise CheckpointError(f"{path}: a dict is stored as pairs of key and value")
        items = {key: decode(item, f"{path}.{key}", tensors, depth + 1) for key, item in content}
        return Counter(items) if kind == "counter" else items
    if kind in ("list", "tuple"):
        entries = [decode(item, f"{path}.{n}", tensors, depth + 1) for n, item in enumerate(content)]
        return tuple(entries) if kind == "tuple" else entries
    raise CheckpointError(f"{path}: unknown kind {kind!r}")
