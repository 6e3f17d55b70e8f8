"""Values as JSON with their tensors set aside, and back; nothing in a file is code."""

import contextlib
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grapnet.core._change import Labels
from grapnet.core._errors import CheckpointError

LARGEST = 2**53
_PLAIN = (type(None), bool, int, float, str)
_DEEPEST = 64


class Named:
    """Stores every tensor of a tree in `tensors`, under its path."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def put(self, path: str, tensor: Tensor) -> str:
        """Takes a tensor; its reference is its name."""
        if path in self._tensors:
            raise CheckpointError(f"{path}: names two tensors")
        self._tensors[path] = tensor
        return path


class Pool:
    """Concatenates the tensors of a tree, one vector per dtype."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Tensor]] = {}

    def put(self, path: str, tensor: Tensor) -> list[Any]:
        """Takes a tensor; its reference is its type and its shape."""
        kind = str(tensor.dtype).removeprefix("torch.")
        self._pieces.setdefault(kind, []).append(tensor.detach().cpu().reshape(-1))
        return [kind, *tensor.shape]

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Returns the vectors, by the name of their type behind `prefix`."""
        return {prefix + kind: torch.cat(pieces) for kind, pieces in self._pieces.items()}


class PoolReader:
    """Reads the tensors of a `Pool` in the order in which they were put there."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors  # by the name of their type
        self._read = dict.fromkeys(tensors, 0)

    def take(self, path: str, reference: Any) -> Tensor:
        """Returns the next tensor of a type and shape."""
        if type(reference) is not list or not reference or type(reference[0]) is not str:
            raise CheckpointError(f"{path}: expected the type and the shape of a tensor")
        kind, *shape = reference
        pool = self._tensors.get(kind)
        if pool is None or pool.dim() != 1 or str(pool.dtype) != f"torch.{kind}":
            raise CheckpointError(f"{path}: there are no values of the type {kind[:30]}")
        start = self._read[kind]
        size = 1
        for length in shape:
            if type(length) is not int or not 0 <= length <= len(pool):
                raise CheckpointError(f"{path}: expected the type and the shape of a tensor")
            size *= length
        if start + size > len(pool):
            raise CheckpointError(f"{path}: {kind} holds too few values")
        self._read[kind] = start + size
        # a copy, so that it does not keep the whole vector alive
        return pool[start : start + size].reshape(shape).clone()


class Encoder:
    """Turns trees of plain data, tensors and records into JSON.

    A record is an object of a dataclass: its name and its fields in order. One that occurs again
    is written once.
    """

    def __init__(self, sink: Named | Pool) -> None:
        self._sink = sink
        self._numbers: dict[int, int] = {}  # of the records so far, by id

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Returns `value` as JSON; its tensors go to the sink under paths like `path['key'][0]`."""
        if depth > _DEEPEST:
            raise CheckpointError(f"{path}: nested more than {_DEEPEST} levels deep")
        value = _plain(value)
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor | np.ndarray):
            kind, tensor = _as_tensor(value, path)
            return {kind: self._sink.put(path, tensor)}
        if isinstance(value, Mapping):
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: self._pairs(value, path, depth)}
        if isinstance(value, list | tuple):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: self._items(value, path, depth)}
        if is_dataclass(value) and not isinstance(value, type):
            return self._record(value, path, depth)
        raise CheckpointError(
            f"{path}: a checkpoint holds numbers, strings, lists, dicts and tensors, not"
            f" {type(value).__name__}"
            + ("; give it under a name of its own" if hasattr(value, "state_dict") else "")
        )

    def _pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        pairs = []
        for key, item in value.items():
            key = _plain(key)
            if type(key) not in _PLAIN:
                raise CheckpointError(
                    f"{path}: a key is of type {type(key).__name__}; keys are numbers, strings or"
                    " None"
                )
            pairs.append([key, self.encode(item, f"{path}[{key!r}]", depth + 1)])
        return pairs

    def _items(self, value: Sequence[Any], path: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]

    def _record(self, value: Any, path: str, depth: int) -> Any:
        if id(value) in self._numbers:
            return {"again": self._numbers[id(value)]}
        content = []
        for name in _field_names(type(value)):
            item = getattr(value, name)
            content.append(self.encode(item, f"{path}.{name}", depth + 1))
        self._numbers[id(value)] = len(self._numbers)
        return {"record": [type(value).__name__, *content]}


class Decoder:
    """Turns what `Encoder` made back into values; raises CheckpointError, naming the place, for
    anything else.

    Args:
        source: gives the tensors.
        records: the dataclasses that the tree may name.
    """

    def __init__(self, source: "Fields | PoolReader", records: Sequence[type] = ()) -> None:
        self._source = source
        self._classes = {kind.__name__: kind for kind in records}
        self._records: list[Any] = []

    def decode(self, tree: Any, path: str, depth: int = 0) -> Any:
        """Returns the value of a tree."""
        if type(tree) in _PLAIN:
            return tree
        if depth > _DEEPEST or not isinstance(tree, dict) or len(tree) != 1:
            raise CheckpointError(f"{path}: not a tree of plain data")
        ((kind, content),) = tree.items()
        if kind in ("tensor", "array", "complex"):
            return _from_tensor(kind, self._source.take(path, content), path)
        if kind == "again":
            return self._again(content, path)
        if not isinstance(content, list):
            raise CheckpointError(f"{path}: not a tree of plain data")
        if kind == "record":
            return self._record(content, path, depth)
        if kind in ("list", "tuple"):
            items = [self.decode(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(content)]
            return tuple(items) if kind == "tuple" else items
        if kind in ("dict", "counter"):
            items = self._pairs(content, path, depth)
            return Counter(items) if kind == "counter" else items
        raise CheckpointError(f"{path}: not a tree of plain data")

    def _pairs(self, content: list[Any], path: str, depth: int) -> dict[Any, Any]:
        items = {}
        for pair in content:
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in _PLAIN:
                raise CheckpointError(f"{path}: a dict is stored as pairs of key and value")
            key, item = pair
            if key in items:
                raise CheckpointError(f"{path}: holds the key {str(key)[:30]!r} twice")
            items[key] = self.decode(item, f"{path}[{key!r}]", depth + 1)
        return items

    def _record(self, content: list[Any], path: str, depth: int) -> Any:
        kind = self._classes.get(str(content[0])) if content else None
        if kind is None:
            raise CheckpointError(f"{path}: not a record that is known here")
        names = _field_names(kind)
        if len(names) != len(content) - 1:
            raise CheckpointError(f"{path}: a {kind.__name__} has {len(names)} fields")
        hints = typing.get_type_hints(kind)
        values = {}
        for name, part in zip(names, content[1:], strict=True):
            values[name] = self.decode(part, f"{path}.{name}", depth + 1)
            if not _is(values[name], hints[name]):
                raise CheckpointError(f"{path}.{name}: expected {hints[name]}")
        record = kind(**values)
        self._records.append(record)
        return record

    def _again(self, number: Any, path: str) -> Any:
        if type(number) is not int or not 0 <= number < len(self._records):
            raise CheckpointError(f"{path}: refers to a record that is not there")
        return self._records[number]


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Returns plain data as JSON; adds its tensors to `tensors` under names that begin with
    `path`.
    """
    return Encoder(Named(tensors)).encode(value, path)


def decode(tree: Any, path: str, fields: "Fields") -> Any:
    """Returns the value that was encoded; raises CheckpointError, with the path, for anything
    else.
    """
    return Decoder(fields).decode(tree, path)


class Fields:
    """The tensors of one checkpoint; every read checks dtype and shape, and errors name the
    field.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def any(self, name: str) -> Tensor:
        """Returns a tensor of any type and shape."""
        if name not in self.tensors:
            raise CheckpointError(f"{name}: missing")
        return self.tensors[name]

    def take(self, path: str, reference: Any) -> Tensor:
        """Returns the tensor that a tree refers to at `path`, by the same name."""
        if reference != path:
            raise CheckpointError(
                f"{path}: expected the tensor of this name, found {repr(reference)[:60]}"
            )
        return self.any(path)

    def vector(self, name: str, dtype: torch.dtype, size: int | None = None) -> Tensor:
        """Returns a vector of a given dtype and, optionally, length."""
        tensor = self.any(name)
        if tensor.dtype != dtype or tensor.dim() != 1:
            raise CheckpointError(
                f"{name}: expected a vector of {dtype}, found {tensor.dtype} {list(tensor.shape)}"
            )
        if size is not None and len(tensor) != size:
            raise CheckpointError(f"{name}: expected {size} entries, found {len(tensor)}")
        return tensor

    def below(self, limit: int, name: str, dtype: torch.dtype, size: int | None = None) -> Tensor:
        """Returns a vector of integers from 0 to `limit` - 1."""
        found = self.vector(name, dtype, size)
        if len(found) and (int(found.min()) < 0 or int(found.max()) >= limit):
            raise CheckpointError(f"{name}: expected numbers from 0 to {limit - 1}")
        return found

    def positions(self, limit: int, name: str) -> Tensor:
        """Returns ascending int32 positions below `limit`."""
        found = self.below(limit, name, torch.int32)
        if bool((found.diff() <= 0).any()):
            raise CheckpointError(f"{name}: expected ascending positions")
        return found

    def labels(self, table: tuple[str | None, ...], name: str, size: int) -> Labels:
        """Returns `size` names out of a table."""
        return Labels(self.below(len(table), name, torch.int32, size), table)

    def under(self, prefix: str) -> "Fields":
        """Returns the tensors whose names begin with `prefix`, by the rest of their names."""
        mine = {}
        for name, tensor in self.tensors.items():
            if name.startswith(prefix):
                mine[name.removeprefix(prefix)] = tensor
        return Fields(mine)


@contextlib.contextmanager
def named(prefix: str) -> Iterator[None]:
    """Adds `prefix` to the field of a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{prefix}{error}") from error.__cause__


def entry(document: Any, name: str, kind: type, where: str) -> Any:
    """Returns one entry of a JSON object, of exactly one type."""
    if not isinstance(document, dict) or name not in document:
        raise CheckpointError(f"{where}{name}: missing")
    value = document[name]
    if type(value) is not kind:
        raise CheckpointError(
            f"{where}{name}: expected {kind.__name__}, found {type(value).__name__}"
        )
    return value


def number(document: Any, name: str, where: str, most: int = LARGEST) -> int:
    """Returns an integer from 0 to `most`."""
    value = entry(document, name, int, where)
    if not 0 <= value <= most:
        raise CheckpointError(f"{where}{name}: expected a number from 0 to {most}")
    return value


def names(document: Any, name: str, where: str) -> tuple[str | None, ...]:
    """Returns a table of distinct names, None allowed."""
    found: Sequence[Any] = entry(document, name, list, where)
    if (
        any(not isinstance(item, str | None) for item in found)
        or len(set(found)) != len(found)
        or not found
    ):
        raise CheckpointError(f"{where}{name}: expected distinct names")
    return tuple(found)


def _field_names(kind: type) -> list[str]:
    """Returns the fields of a record that are written: those whose names have no underscore."""
    return [field.name for field in fields_of(kind) if not field.name.startswith("_")]


def _is(value: Any, hint: Any) -> bool:
    """Returns whether a value matches a type hint."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_is(value, choice) for choice in arguments)
    if origin is dict:
        key, item = arguments
        return type(value) is dict and all(_is(k, key) and _is(v, item) for k, v in value.items())
    if origin is tuple:
        return type(value) is tuple and all(_is(item, arguments[0]) for item in value)
    if hint is int:
        return type(value) is int
    return hint is typing.Any or isinstance(value, hint)


def _plain(value: Any) -> Any:
    """Returns a numpy number as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _as_tensor(value: "Tensor | np.ndarray", path: str) -> tuple[str, Tensor]:
    if isinstance(value, Tensor):
        if value.is_complex():
            return "complex", torch.view_as_real(value.detach().resolve_conj())
        return "tensor", value
    if type(value) is not np.ndarray or value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise CheckpointError(
            f"{path}: a checkpoint holds plain arrays of numbers, not {type(value).__name__} of"
            f" {value.dtype}"
        )
    native = value.dtype.newbyteorder("=")
    return "array", torch.from_numpy(np.array(value, dtype=native, order="C"))


def _from_tensor(kind: str, tensor: Tensor, path: str) -> Any:
    if kind == "tensor":
        return tensor
    try:
        return tensor.numpy() if kind == "array" else torch.view_as_complex(tensor)
    except (TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: a tensor of {tensor.dtype} {list(tensor.shape)} is no {kind}"
        ) from error
