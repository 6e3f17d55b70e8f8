"""Mutated checkpoint files: half of them damaged as they lie, half signed again so that only
validation is left.
"""

import copy
import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .files import DTYPES, build, parse

Document = dict[str, Any]
Tensors = dict[str, Tensor]
VALUES = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    7,
    2**31,
    2**53,
    2**64,
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
)
VALUES += (
    "",
    "relu",
    "torch.float64",
    "x" * 10_000,
    "\ud800",
    [],
    {},
    [0],
    [[]],
    [None],
    ["a", "a"],
    {"a": 1},
)
VALUES += (
    {"tensor": "layers.0.uid"},
    {"dict": [[[], 1]]},
    {"list": 5},
    {"array": None},
    {"tuple": [[]]},
)
NUMBERS = (-1, 0, 1, 2, 3, 5, 8, 40, 2**31 - 1, -(2**31))
FLOATS = (float("nan"), float("inf"), -0.0, 1e-40, 3.25)


@dataclass(frozen=True)
class Mutation:
    """A file, and what a net that loads from it must agree with."""

    label: str
    data: bytes
    document: Document | None  # None: it must be refused
    tensors: Tensors


def mutations(data: bytes, count: int, seed: int) -> Iterator[Mutation]:
    """Yields `count` mutations of a file, every second one signed again."""
    rng = random.Random(seed)
    document, tensors = parse(data)
    unfolded = copy.deepcopy(document)
    unfold_details(unfolded, rest := dict(tensors))
    written = json.dumps(unfolded)
    for n in range(count // 2):
        damage = DAMAGES[n % len(DAMAGES)]
        yield Mutation(f"{n}: {damage.__name__}", damage(rng, data), document, tensors)
        forge = FORGERIES[n % len(FORGERIES)]
        new_document, new_tensors = (
            json.loads(written),
            {name: t.clone() for name, t in rest.items()},
        )
        text = None
        while text is None:  # a draw may not apply, or change nothing
            detail, text = forge(rng, new_document, new_tensors)
        text = fold_details(text, new_tensors)
        yield Mutation(
            f"{n}: {forge.__name__} {detail}", build(text, new_tensors), _read(text), new_tensors
        )


def unfold_details(document: Document, tensors: Tensors) -> None:
    """Moves the details of journals from tensors into the document, where forgeries reach them."""
    for prefix, part in _parts(document):
        text = tensors.pop(f"{prefix}journal.details", None)
        if text is not None:
            part["journal"]["details"] = json.loads(bytes(text.tolist()))


def fold_details(text: str, tensors: Tensors) -> str:
    """Puts the details of journals back; returns the text of the document without them."""
    document = _read(text)
    if document is None:
        return text
    for prefix, part in _parts(document):
        journal = part.get("journal") if isinstance(part, dict) else None
        if isinstance(journal, dict) and "details" in journal:
            details = json.dumps(journal.pop("details"), separators=(",", ":")).encode()
            tensors[f"{prefix}journal.details"] = torch.tensor(list(details), dtype=torch.uint8)
    return json.dumps(document)


def _parts(document: Document) -> list[tuple[str, Any]]:
    """Returns the descriptions of the nets, with what the names of their tensors begin with."""
    if isinstance(document.get("nets"), list):
        return [(f"nets.{n}.", part) for n, part in enumerate(document["nets"])]
    return [("", document)]


def _read(text: str) -> Document | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


# Damage to the bytes of the file.


def flip_a_byte(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :]


def flip_many_bytes(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.randint(2, 30)):
        data = flip_a_byte(rng, data)
    return data


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.choice([0, 1, 7, 8, 9, len(data) - 1, rng.randrange(len(data))])]


def extend(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.choice([1, 8, 1000]))


def lie_about_the_header(rng: random.Random, data: bytes) -> bytes:
    size = rng.choice(
        [
            0,
            1,
            2**20,
            2**31,
            2**40,
            2**63,
            2**64 - 1,
            len(data),
            struct.unpack("<Q", data[:8])[0] - 1,
        ]
    )
    return struct.pack("<Q", size) + data[8:]


def change_the_header(rng: random.Random, data: bytes) -> bytes:
    """Changes what the container says about one tensor, and leaves digest and content alone."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    described = header[rng.choice([name for name in header if name != "__metadata__"])]
    described[rng.choice(list(described))] = rng.choice(
        [
            [0, 2**62],
            [2**62, 4],
            [-1, 4],
            [2**32, 2**32],
            [],
            [4, 0],
            [0] * 200,
            [2**64, 0],
            *DTYPES,
            "F4",
            "C64",
            "Q",
            5,
            None,
        ]
    )
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data[8 + size :]


def zero_a_block(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]


def move_a_block(rng: random.Random, data: bytes) -> bytes:
    at, to = rng.randrange(8, len(data) - 64), rng.randrange(8, len(data) - 64)
    return data[:at] + data[to : to + 64] + data[at + 64 :]


DAMAGES = [
    flip_a_byte,
    flip_a_byte,
    flip_many_bytes,
    truncate,
    extend,
    lie_about_the_header,
    change_the_header,
]
DAMAGES += [zero_a_block, move_a_block]


# Forgeries: changed content under a right digest. Each returns what it did and the document's text,
# None for nothing.

Forged = tuple[str, str | None]


def _some_tensor(rng: random.Random, tensors: Tensors) -> str:
    """Returns the name of a tensor of any net, of its journal, of an extra or of the rest of a
    model.
    """
    parts = {name: re.sub(r"^nets\.\d+\.", "", name) for name in tensors}
    kinds = ("layers", "transitions", "journal", "journal", "extras", "state")
    groups = [[name for name, part in parts.items() if part.startswith(kind)] for kind in kinds]
    return rng.choice(rng.choice([group for group in groups if group]))


def change_an_entry(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    name = _some_tensor(rng, tensors)
    flat = tensors[name].reshape(-1)
    if len(flat) == 0:
        return name, None
    at = rng.randrange(len(flat))
    if flat.dtype == torch.bool:
        flat[at] = not flat[at]
    elif flat.dtype.is_floating_point:
        flat[at] = rng.choice(FLOATS)
    else:
        number = rng.choice([*NUMBERS, int(flat[at]) + 1, int(flat[at]) - 1, len(flat), 2**40])
        if not torch.iinfo(flat.dtype).min <= number <= torch.iinfo(flat.dtype).max:
            return name, None
        flat[at] = number
    return f"{name}[{at}] = {flat[at].item()}", json.dumps(document)


def repeat_an_entry(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    name = _some_tensor(rng, tensors)
    flat = tensors[name].reshape(-1)
    if len(flat) < 2:
        return name, None
    at = rng.randrange(1, len(flat))
    flat[at] = flat[at - 1].clone()
    return f"{name}[{at}]", json.dumps(document)


def change_a_length(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    name, how = _some_tensor(rng, tensors), rng.choice(["shorter", "longer", "empty", "double"])
    flat = tensors[name].reshape(-1)
    tensors[name] = {
        "shorter": flat[:-1],
        "longer": torch.cat([flat, flat[-1:]]),
        "empty": flat[:0],
    }.get(how, torch.cat([flat, flat]))
    return f"{name} {how}", json.dumps(document)


def change_a_type(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    name, dtype = _some_tensor(rng, tensors), rng.choice(list(DTYPES.values()))
    tensors[name] = tensors[name].to(dtype)
    return f"{name} {dtype}", json.dumps(document)


def change_a_shape(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    name = _some_tensor(rng, tensors)
    flat = tensors[name].reshape(-1)
    tensors[name] = rng.choice(
        [flat.reshape(-1, 1), flat.reshape(1, -1), flat.sum().to(flat.dtype), flat.flip(0)]
    )
    return f"{name} {list(tensors[name].shape)}", json.dumps(document)


def swap_tensors(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    one, other = _some_tensor(rng, tensors), _some_tensor(rng, tensors)
    alike = [name for name in tensors if tensors[name].dtype == tensors[one].dtype and name != one]
    other = rng.choice(alike) if alike and rng.random() < 0.7 else other
    tensors[one], tensors[other] = tensors[other], tensors[one]
    return f"{one} {other}", json.dumps(document)


def lose_or_invent_a_tensor(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    name = _some_tensor(rng, tensors)
    other = rng.choice(["layers.9.uid", "extras.more", "x", name + "x"])
    tensors[other] = tensors.pop(name) if rng.random() < 0.5 else tensors[name].clone()
    return f"{name} {other}", json.dumps(document)


def wrap_around(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    """Puts in numbers whose differences overflow, so that a careless test for ascending order is
    content.
    """
    name = _some_tensor(rng, tensors)
    flat = tensors[name].reshape(-1)
    if flat.dtype not in (torch.int32, torch.int64) or len(flat) < 2:
        return name, None
    least, most = torch.iinfo(flat.dtype).min, torch.iinfo(flat.dtype).max
    if len(flat) < 5:
        flat[-1] = least + int(flat[0].clamp(min=0))
    else:
        flat[1:4] = torch.tensor([most, least, -1], dtype=flat.dtype)
    return name, json.dumps(document)


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    found = [path] if path else []
    for key, child in children:
        found += _places(child, (*path, key))
    return found


def _some_place(rng: random.Random, document: Document) -> tuple[Any, Any, str]:
    """Returns the container and the key of some value in the document, and its name."""
    part = rng.choice(
        [*document, *(part for part in ("journal", "graph", "nets", "nets") if part in document)]
    )
    place = rng.choice([(part, *path) for path in _places(document[part])] + [(part,)])
    node: Any = document
    for key in place[:-1]:
        node = node[key]
    return node, place[-1], ".".join(map(str, place))


def replace_a_field(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    node, key, name = _some_place(rng, document)
    node[key] = rng.choice(VALUES)
    return f"{name} = {str(node[key])[:30]}", json.dumps(document)


def nudge_a_number(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    node, key, name = _some_place(rng, document)
    if type(node[key]) is not int:
        return name, None
    node[key] += rng.choice([-2, -1, 1, 2, 100])
    return f"{name} = {node[key]}", json.dumps(document)


def drop_a_field(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    node, key, name = _some_place(rng, document)
    del node[key]
    return name, json.dumps(document)


def repeat_or_swap_fields(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    node, key, name = _some_place(rng, document)
    other, place, source = _some_place(rng, document)
    node[key] = copy.deepcopy(other[place])
    return f"{name} from {source}", json.dumps(document)


def reorder_a_list(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    node, key, name = _some_place(rng, document)
    if not isinstance(node[key], list) or len(node[key]) < 1:
        return name, None
    node[key] = rng.choice(
        [node[key][::-1], node[key] * 2, node[key][1:], node[key][-1:] + node[key][:-1]]
    )
    return name, json.dumps(document)


def break_a_stack(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    journal = rng.choice(document.get("nets", [document]))["journal"]
    name, count = rng.choice(["undoable", "redoable"]), 8
    journal[name] = [rng.randrange(-1, count + 1) for _ in range(rng.randint(0, 5))]
    return f"{name} = {journal[name]}", json.dumps(document)


def nest_deeply(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    node, key, name = _some_place(rng, document)
    depth, node[key] = rng.choice([70, 900, 100_000]), "HERE"
    opening, closing = rng.choice([("[", "]"), ('{"list":[', "]}"), ('{"dict":[["k",', "]]}")])
    return f"{name} {depth}", json.dumps(document).replace(
        '"HERE"', opening * depth + "1" + closing * depth
    )


def spoil_the_text(rng: random.Random, document: Document, tensors: Tensors) -> Forged:
    text = json.dumps(document)
    at = rng.randrange(len(text))
    options = [
        text[:at],
        text[:at] + rng.choice('{}[]",:0-e') + text[at + 1 :],
        "null",
        "[]",
        "{}",
        "",
        "9" * 5000,
    ]
    return str(at), rng.choice(
        [*options, text.replace("1", "9" * 5000, 1), text.replace(":", ":\x00", 1)]
    )


FORGERIES: list[Callable[[random.Random, Document, Tensors], Forged]] = [change_an_entry] * 4 + [
    replace_a_field
] * 3
FORGERIES += [
    repeat_an_entry,
    change_a_length,
    change_a_type,
    change_a_shape,
    swap_tensors,
    lose_or_invent_a_tensor,
]
FORGERIES += [
    wrap_around,
    nudge_a_number,
    drop_a_field,
    repeat_or_swap_fields,
    reorder_a_list,
    break_a_stack,
]
FORGERIES += [nest_deeply, spoil_the_text]
