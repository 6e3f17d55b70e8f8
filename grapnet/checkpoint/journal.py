"""The journal in a file: the outline of every commit in columns, and details on request."""

import copy
import json
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grapnet.core._change import (
    Change,
    IndexMap,
    Labels,
    LayerChange,
    NodeRecord,
    Pairs,
    Relabel,
    TransitionChange,
    contains,
)
from grapnet.core._check import check
from grapnet.core._coordinates import Shift, VectorChange
from grapnet.core._errors import CheckpointError
from grapnet.core._journal import Commit, Journal, Outlines
from grapnet.core._undo import Verb, next_reversed, require_fit, undo_alone
from grapnet.network import GrapNet

from .codec import LARGEST, Decoder, Encoder, Fields, Pool, PoolReader, entry, number

Kept = Literal["outline", "full"]

_RECORDS = (
    Change,
    LayerChange,
    TransitionChange,
    IndexMap,
    VectorChange,
    Shift,
    NodeRecord,
    Pairs,
    Relabel,
    Labels,
)
_POOL = "journal.pool."


def describe_journal(
    journal: Journal, tensors: dict[str, Tensor], *, undo: bool, history: Kept
) -> dict[str, Any]:
    """Puts the journal's arrays into `tensors` and returns the rest as JSON.

    Args:
        journal: the journal.
        tensors: receives the arrays.
        undo: whether to keep the values that undo and redo need.
        history: whether to keep which nodes and relations every commit was about.
    """
    if history not in ("outline", "full"):
        raise ValueError(f'history is "outline" or "full", got {history!r}')
    undoable = list(journal.undoable) if undo else []
    redoable = list(journal.redoable) if undo else []
    outlines = journal.outlines
    # Views of the columns, not copies: a long history costs no further memory.
    numbers = torch.from_numpy(np.frombuffer(outlines.numbers, dtype=np.int64))
    tensors["journal.numbers"] = numbers.view(-1, Outlines.WIDTH)
    tensors["journal.text"] = _bytes(outlines.text)
    reversible = {*undoable, *redoable}
    details = {}
    for place, commit in journal.details.items():
        if place in reversible:
            change = _without_gradients(commit.change)
        elif history == "full":
            change = _without_gradients(commit.change.without_values())
        else:
            continue
        details[place] = [change, list(commit.operations)]
    if details:
        pool = Pool()
        tree = Encoder(pool).encode(details, "journal.details")
        text = json.dumps(tree, separators=(",", ":")).encode()
        tensors["journal.details"] = _bytes(bytearray(text))
        tensors.update(pool.tensors(_POOL))
    return {
        "undo_limit": int(journal.undo_limit),
        "detail_limit": int(journal.detail_limit),
        "undo": undo,
        "history": history,
        "undoable": undoable,
        "redoable": redoable,
    }


def rebuild_journal(document: Any, fields: Fields, net: GrapNet) -> Journal:
    """Returns the journal that leads to `net`; raises CheckpointError, naming the field, when it
    cannot be one.
    """
    entry(document, "undo", bool, "journal.")
    if entry(document, "history", str, "journal.") not in ("outline", "full"):
        raise CheckpointError('journal.history: expected "outline" or "full"')
    outlines = _outlines(fields, net.version)
    details: dict[int, Commit] = {}
    if "journal.details" in fields.tensors:
        details = _details(fields, outlines, net)
    stacks = {}
    for name in ("undoable", "redoable"):
        stacks[name] = list(entry(document, name, list, "journal."))
        for place in stacks[name]:
            if type(place) is not int or place not in details:
                raise CheckpointError(f"journal.{name}: names a commit that cannot be taken back")
            if not details[place].change.has_values:
                raise CheckpointError(f"journal.{name}: names a commit that cannot be taken back")
    for place, commit in details.items():
        is_reversible = place in stacks["undoable"] or place in stacks["redoable"]
        if not is_reversible and _holds_values(commit.change):
            raise CheckpointError(f"journal.details[{place}]: holds values that no undo needs")
    undo_limit = number(document, "undo_limit", "journal.")
    journal = Journal(undo_limit, number(document, "detail_limit", "journal."))
    journal.reinstate(outlines, details, **stacks)
    return journal


def _holds_values(change: Change) -> bool:
    vectors = [layer.biases for layer in change.layers.values() if layer.biases is not None]
    vectors += [wires.weights for wires in change.transitions.values()]
    for layer in change.layers.values():
        vectors += layer.columns.values()
    return any(vector.gone_values is not None for vector in vectors)


def rehearse(net: GrapNet) -> None:
    """Takes back and repeats on a copy of the net whatever its journal can; raises CheckpointError
    when that fails.

    Only a file that somebody wrote by hand fails here: its digest is right, and its commits do not
    fit the net.
    """
    if not net.journal.undoable and not net.journal.redoable:
        return
    twin = copy.deepcopy(net)
    verbs: tuple[Verb, ...] = ("redo", "undo", "redo")
    for verb in verbs:
        try:
            while getattr(twin.journal, f"{verb}able"):
                commit = next_reversed(twin.journal, verb)
                require_fit(twin, commit.change.inverse(), commit.version)
                undo_alone(twin, verb, alone=True)
                check(twin)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"journal.{verb}able: {verb} fails ({reason})") from error


def _without_gradients(change: Change) -> Change:
    """Returns a change without what only the end of a trial needs."""
    layers = {}
    for n, layer in change.layers.items():
        columns = {}
        for name, vector in layer.columns.items():
            columns[name] = _vector_only(vector, layer.index)
        biases = None
        if layer.biases is not None:
            biases = _vector_only(layer.biases, layer.index)
        layers[n] = replace(layer, biases=biases, columns=columns, folded=None)
    transitions = {
        t: replace(wires, weights=_vector_only(wires.weights, wires.index), wiring=None)
        for t, wires in change.transitions.items()
    }
    return Change(layers, transitions)


def _vector_only(vector: VectorChange, index: IndexMap) -> VectorChange:
    """Returns the change of a vector that moves by `index`, the object, so that it is written
    once.
    """
    kept = replace(
        vector, index=index, born_gradients=None, gone_gradients=None, flip_gradients=None
    )
    if vector.gone_values is None:
        # a shift tells what was cut: the product of a weight and a bias
        kept = replace(kept, shift=None)
    return kept


def _outlines(fields: Fields, version: int) -> Outlines:
    """Returns the columns of a file that lead to a version."""
    numbers = fields.any("journal.numbers")
    if numbers.dtype != torch.int64 or numbers.shape[1:] != (Outlines.WIDTH,):
        raise CheckpointError("journal.numbers: expected a row of whole numbers for every commit")
    text = fields.vector("journal.text", torch.uint8)
    rows = numbers.numpy()
    versions = np.concatenate([[0], rows[:, 0]])
    ends = np.concatenate([[0], rows[:, -1]])
    if (np.diff(versions) <= 0).any() or versions[-1] != version:
        raise CheckpointError(f"journal.numbers: the versions do not lead to {version}")
    if (np.diff(ends) < 0).any() or ends[-1] != len(text):
        raise CheckpointError("journal.numbers: the texts do not follow each other")
    if (rows < 0).any() or (rows > LARGEST).any():
        raise CheckpointError(f"journal.numbers: expected numbers from 0 to {LARGEST}")
    outlines = Outlines()
    outlines.numbers = array("q", rows.tobytes())
    outlines.text = bytearray(text.numpy().tobytes())
    for place in range(len(outlines)):
        _check_text(outlines.text[ends[place] : ends[place + 1]], f"journal.text[{place}]")
    return outlines


def _check_text(text: bytearray, where: str) -> None:
    """Raises CheckpointError when a row's text is not what `Outlines` writes."""
    try:
        reason, by, operations, joint = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{where}: not the outline of a commit") from error
    is_right = type(reason) is str and isinstance(by, str | None) and type(operations) is list
    if not is_right or any(type(operation) not in (str, dict) for operation in operations):
        raise CheckpointError(f"{where}: expected a reason, an author and kinds of operations")
    if joint is None:
        return
    if type(joint) is not list or [type(item) for item in joint] != [str, int, int]:
        raise CheckpointError(f"{where}: expected a part of a joint transaction")
    name, part, parts = joint
    if not name or not 0 <= part < parts or parts < 2:
        raise CheckpointError(f"{where}: {part} of {parts} is no part of a joint transaction")


def _details(fields: Fields, outlines: Outlines, net: GrapNet) -> dict[int, Commit]:
    """Returns the commits of which the file holds more than the outline, by their places."""
    text = fields.vector("journal.details", torch.uint8).numpy().tobytes()
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("journal.details: not JSON") from error
    reader = PoolReader(fields.under(_POOL).tensors)
    found = Decoder(reader, _RECORDS).decode(tree, "journal.details")
    reader.require_all_read(_POOL)
    if type(found) is not dict or any(type(place) is not int for place in found):
        raise CheckpointError("journal.details: expected commits by place")
    if sorted(found) != list(found) or not all(0 <= place < len(outlines) for place in found):
        raise CheckpointError("journal.details: expected places of commits in order")
    details = {}
    for place, part in found.items():
        where = f"journal.details[{place}]"
        if type(part) is not list or len(part) != 2 or type(part[0]) is not Change:
            raise CheckpointError(f"{where}: expected a change and its operations")
        change, operations = part
        if type(operations) is not list or any(type(item) is not dict for item in operations):
            raise CheckpointError(f"{where}: expected a list of operations")
        _Checks(net).change(change, where)
        outline = outlines.commit(place)
        if change.counts() != outline.counts:
            raise CheckpointError(f"{where}: its counts are not those of the outline")
        details[place] = replace(
            outline, change=change, operations=tuple(operations), outlined=None
        )
    return details


class _Checks:
    """Checks that every index and length inside a change is possible in a net."""

    def __init__(self, net: GrapNet) -> None:
        self._layers = len(net.layers)
        self._next_uid = net.next_uid

    def change(self, change: Change, where: str) -> None:
        for n, layer in change.layers.items():
            _require(0 <= n < self._layers, f"{where}.layers[{n}]", "there is no such layer")
            self._layer(n, layer, f"{where}.layers[{n}]")
        for t, wires in change.transitions.items():
            name = f"{where}.transitions[{t}]"
            _require(0 <= t < self._layers - 1, name, "there is no such transition")
            _index(wires.index, name)
            _require(wires.weights.index is wires.index, name, "its weights move otherwise")
            _require(wires.wiring is None, name, "a journal keeps no wiring")
            _vector(wires.weights, f"{name}.weights")
            self._pairs(wires.born, len(wires.index.inserted), f"{name}.born")
            self._pairs(wires.gone, len(wires.index.removed), f"{name}.gone")

    def _layer(self, n: int, layer: LayerChange, where: str) -> None:
        _index(layer.index, where)
        self._nodes(layer.born, len(layer.index.inserted), f"{where}.born")
        self._nodes(layer.gone, len(layer.index.removed), f"{where}.gone")
        _require((layer.biases is None) == (n == 0), where, "only the sensory layer has no biases")
        _require(layer.folded is None, where, "a journal keeps no folded relations")
        vectors: Mapping[str, VectorChange] = layer.columns
        if layer.biases is not None:
            vectors = {**layer.columns, "biases": layer.biases}
        for name, vector in vectors.items():
            _require(vector.index is layer.index, f"{where}.{name}", "moves otherwise")
            _vector(vector, f"{where}.{name}")
        for name, relabel in (("owners", layer.owners), ("activations", layer.activations)):
            if relabel is not None:
                _survivors(relabel.rows, layer.index, f"{where}.{name}")
                _labels(relabel.before, len(relabel.rows), f"{where}.{name}.before")
                _labels(relabel.after, len(relabel.rows), f"{where}.{name}.after")

    def _nodes(self, nodes: NodeRecord, size: int, where: str) -> None:
        _numbers(nodes.uids, torch.int64, size, self._next_uid, where)
        _labels(nodes.owners, size, f"{where}.owners")
        _labels(nodes.activations, size, f"{where}.activations")

    def _pairs(self, pairs: Pairs, size: int, where: str) -> None:
        _numbers(pairs.parents, torch.int32, size, self._next_uid, where)
        _numbers(pairs.children, torch.int32, size, self._next_uid, where)


def _require(holds: bool, where: str, otherwise: str) -> None:
    if not holds:
        raise CheckpointError(f"{where}: {otherwise}")


def _numbers(
    found: Tensor, dtype: torch.dtype, size: int, limit: int, where: str, *, ascending: bool = False
) -> None:
    """Raises CheckpointError unless `found` holds `size` numbers from 0 to `limit` - 1."""
    _require(found.dtype == dtype and found.shape == (size,), where, f"expected {size} {dtype}")
    if size:
        _require(int(found.min()) >= 0, where, "a number is negative")
        _require(int(found.max()) < limit, where, f"a number is not below {limit}")
    _require(not ascending or not bool((found.diff() <= 0).any()), where, "not in order")


def _index(index: IndexMap, where: str) -> None:
    removed = index.removed
    inserted = index.inserted
    for size in (index.old_size, index.new_size):
        _require(0 <= size <= LARGEST, where, "a size is negative or too large")
    _numbers(removed, torch.int32, removed.numel(), index.old_size, where, ascending=True)
    _numbers(inserted, torch.int32, inserted.numel(), index.new_size, where, ascending=True)
    _require(
        index.old_size - len(removed) == index.new_size - len(inserted),
        where,
        f"{index.new_size} does not follow from {index.old_size}, {len(removed)} gone and"
        f" {len(inserted)} born",
    )


def _survivors(rows: Tensor, index: IndexMap, where: str) -> None:
    """Raises CheckpointError unless `rows` are positions, in order, of what was there before."""
    _numbers(rows, torch.int32, rows.numel(), index.new_size, where, ascending=True)
    _require(not bool(contains(index.inserted, rows).any()), where, "names what the commit brought")


def _vector(vector: VectorChange, where: str) -> None:
    born = len(vector.index.inserted)
    gone = len(vector.index.removed)
    for found, size in ((vector.born_frozen, born), (vector.gone_frozen, gone)):
        _require(
            found.dtype == torch.bool and found.shape == (size,), where, f"expected {size} bits"
        )
    _survivors(vector.flips, vector.index, f"{where}.flips")
    gradients = (vector.born_gradients, vector.gone_gradients, vector.flip_gradients)
    _require(gradients == (None, None, None), where, "a journal keeps no gradients")
    if vector.born_values is None or vector.gone_values is None:
        both = vector.born_values is None and vector.gone_values is None
        _require(both and vector.shift is None, where, "holds one half of its values")
        return
    _floats(vector.born_values, born, where)
    _floats(vector.gone_values, gone, where)
    if vector.shift is not None:
        _survivors(vector.shift.positions, vector.index, f"{where}.shift")
        _floats(vector.shift.before, len(vector.shift.positions), f"{where}.shift")
        _floats(vector.shift.after, len(vector.shift.positions), f"{where}.shift")


def _floats(found: Tensor, size: int, where: str) -> None:
    is_right = found.dtype.is_floating_point and found.shape == (size,)
    _require(is_right, where, f"expected {size} values")


def _labels(labels: Labels, size: int, where: str) -> None:
    _numbers(labels.codes, torch.int32, size, len(labels.names), where)
    _require(len(set(labels.names)) == len(labels.names), where, "a name occurs twice")


def _bytes(content: bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8))
