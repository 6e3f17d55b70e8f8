"""The journal in a file: the outline of every commit in columns, and details on request."""

import json
import math
from array import array
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grapnet.core._activation import is_activation
from grapnet.core._change import (
    Assignment,
    AttributeChange,
    Change,
    GridChange,
    Labels,
    LayerChange,
    NodeRecord,
    Pairs,
    Relabel,
    RelationCounts,
    TransitionChange,
)
from grapnet.core._coordinates import Shift, VectorChange
from grapnet.core._errors import CheckpointError
from grapnet.core._graph import Graph
from grapnet.core._grid import Grid
from grapnet.core._grid_map import CellMap, GridMap, RowMap
from grapnet.core._index_map import IndexMap, contains
from grapnet.core._journal import Commit, Journal, Outlines
from grapnet.core._opened import CUT, FROZEN, Pattern

from ._codec import LARGEST, Decoder, Encoder, Fields, Pool, PoolReader, entry, number

Kept = Literal["outline", "full"]

_RECORDS = (
    Change,
    LayerChange,
    TransitionChange,
    IndexMap,
    VectorChange,
    Shift,
    Assignment,
    NodeRecord,
    Pairs,
    Relabel,
    Labels,
    GridChange,
    GridMap,
    RowMap,
    Pattern,
    RelationCounts,
    AttributeChange,
)
_POOL = "journal.pool."


def describe_journal(
    journal: Journal, tensors: dict[str, Tensor], *, undo: bool, history: Kept
) -> dict[str, Any]:
    """Adds the arrays of the journal to `tensors` and returns the rest as JSON.

    Args:
        journal: the journal.
        tensors: receives the arrays.
        undo: whether to keep the values that undo and redo need, back to the last commit that has
            inserted or removed blocks of an adopted model.
        history: whether to keep the nodes and relations of every commit since then.
    """
    if history not in ("outline", "full"):
        raise ValueError(f'history is "outline" or "full", got {history!r}')
    undoable: list[int] = []
    redoable: list[int] = []
    if undo:
        undoable, redoable = journal._without_blocks()
    outlines = journal._outlines
    # Views of the columns, not copies: a long history costs no further memory.
    numbers = torch.from_numpy(np.frombuffer(outlines.numbers, dtype=np.int64))
    tensors["journal.numbers"] = numbers.view(-1, Outlines.WIDTH)
    tensors["journal.text"] = _bytes(outlines.text)
    reversible = {*undoable, *redoable}
    # Commits from before blocks came or left name tensors and spaces of another depth.
    start = 0
    for place, commit in journal._details.items():
        if commit.change.depth is not None:
            start = place + 1
    details = {}
    for place, commit in journal._details.items():
        if place in reversible:
            change = _as_written(commit.change)
        elif history == "full" and place >= start:
            change = _as_written(commit.change.without_values())
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


def rebuild_journal(
    document: Any, fields: Fields, graph: Graph, version: int, next_uid: int
) -> Journal:
    """Returns the journal of a file; raises CheckpointError, with the field, if it is invalid.

    Args:
        document: the part of the file.
        fields: the tensors of the file.
        graph: the graph that the journal is of, at any version.
        version: the version of the graph in the file.
        next_uid: the uid of the next node that an edit adds there.
    """
    entry(document, "undo", bool, "journal.")
    if entry(document, "history", str, "journal.") not in ("outline", "full"):
        raise CheckpointError('journal.history: expected "outline" or "full"')
    outlines = _outlines(fields, version)
    details: dict[int, Commit] = {}
    if "journal.details" in fields.tensors:
        details = _details(fields, outlines, graph, next_uid)
    stacks = {}
    for name in ("undoable", "redoable"):
        stacks[name] = list(entry(document, name, list, "journal."))
        for place in stacks[name]:
            commit = details.get(place) if type(place) is int else None
            if commit is None or not commit.change.has_values:
                raise CheckpointError(f"journal.{name}: names a commit that cannot be reverted")
    undo_limit = number(document, "undo_limit", "journal.")
    journal = Journal(undo_limit, number(document, "detail_limit", "journal."))
    journal._reinstate(outlines, details, **stacks)
    return journal


def _as_written(change: Change) -> Change:
    """Returns a change without what only its own session needs."""
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
    return Change(layers, transitions, change.tensors, change.attributes)


def _vector_only(vector: VectorChange, index: IndexMap) -> VectorChange:
    """Returns the change of a vector that moves by `index`, the object, so that it is written
    once.
    """
    kept = replace(vector, index=index)
    if vector.gone_values is None:
        # a shift reveals what was cut: the product of a weight and a bias
        kept = replace(kept, shift=None)
    return kept


def _outlines(fields: Fields, version: int) -> Outlines:
    """Returns the columns of a file for a version."""
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
    return outlines


def _details(fields: Fields, outlines: Outlines, graph: Graph, next_uid: int) -> dict[int, Commit]:
    """Returns the commits with details, by position."""
    text = fields.vector("journal.details", torch.uint8).numpy().tobytes()
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("journal.details: not JSON") from error
    reader = PoolReader(fields.under(_POOL).tensors)
    found = Decoder(reader, _RECORDS).decode(tree, "journal.details")
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
        _check_change(change, graph, next_uid, where)
        try:
            outline = outlines.commit(place)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"journal.text: commit {place} cannot be read") from error
        details[place] = replace(
            outline, change=change, operations=tuple(operations), outlined=None
        )
    return details


def _check_change(change: Change, graph: Graph, next_uid: int, where: str) -> None:
    """Raises CheckpointError if an index or a length inside a change is impossible in a graph."""
    for n, layer in change.layers.items():
        at = f"{where}.layers[{n}]"
        _require(0 <= n < len(graph.layers), at, "the layer does not exist")
        _check_layer(layer, next_uid, at)
        has_biases = graph.layers[n]._has_biases
        _require((layer.biases is not None) == has_biases, at, "its biases do not fit the layer")
    for t, wires in change.transitions.items():
        at = f"{where}.transitions[{t}]"
        _require(0 <= t < len(graph.transitions), at, "the transition does not exist")
        _require(wires.wiring is None, at, "a journal keeps no wiring")
        _check_index(wires.index, at)
        _check_vector(wires.weights, wires.index, f"{at}.weights")
        for pairs, places in (
            (wires.born, wires.index.inserted),
            (wires.gone, wires.index.removed),
        ):
            _numbers(pairs.parents, torch.int32, len(places), next_uid, at)
            _numbers(pairs.children, torch.int32, len(places), next_uid, at)
    grids = graph._grids()
    for name, grid in change.tensors.items():
        at = f"{where}.tensors[{name!r}]"
        _require(name in grids, at, "the tensor does not exist")
        _check_grid(grid, grids[name], at)
    for attribute in change.attributes:
        at = f"{where}.attributes"
        numbers = (attribute.before, attribute.after)
        _require(all(map(is_number, numbers)), at, "expected whole numbers")
        known = graph._attribute(attribute.module, attribute.name)
        _require(is_number(known), at, "the attribute does not exist")


def is_number(value: Any) -> bool:
    """Returns whether a value is one that edits give to attributes: a whole number, or a tuple of
    such.
    """
    if type(value) is tuple:
        return all(type(item) is int for item in value)
    return type(value) is int


def _check_grid(grid: GridChange, store: Grid, where: str) -> None:
    index = grid.index
    tensor = store.tensor
    if isinstance(index, RowMap):
        _check_rows(grid, index, len(store.shape), where)
    else:
        _check_axes(grid, index, len(store.shape), where)
    if grid.born_values is None or grid.gone_values is None:
        both = grid.born_values is None and grid.gone_values is None
        _require(both, where, "holds one half of its values")
        _check_assigned(grid.assigned, index, where, has_values=False)
        return
    _check_assigned(grid.assigned, index, where, has_values=True)
    for found, size in (
        (grid.born_values, index.n_born),
        (grid.gone_values, index.old_size - index.n_survivors),
    ):
        is_alike = found.is_floating_point() == tensor.is_floating_point()
        _require(is_alike and found.shape == (size,), where, f"expected {size} values")


def _check_axes(grid: GridChange, index: GridMap, dims: int, where: str) -> None:
    """Raises CheckpointError if the axes of a tensor of so many dimensions cannot move so."""
    _require(len(index.shape) == dims, where, f"expected {dims} dimensions")
    for size in index.shape:
        _require(0 <= size <= LARGEST, where, "a size is negative or too large")
    _require(list(index.axes) == sorted(index.axes), where, "the dimensions are not in order")
    for dim, axis in index.axes.items():
        _require(0 <= dim < dims, where, "the dimension does not exist")
        _check_index(axis, where)
        _require(axis.old_size == index.shape[dim], where, "an axis has another size")
    patterns = (grid.before, grid.after)
    _require(patterns == (None, None), where, "a tensor of which cells are cut moves by rows")


def _check_rows(grid: GridChange, index: RowMap, dims: int, where: str) -> None:
    """Raises CheckpointError if a map cannot move the rows of a tensor with `dims` dimensions."""
    _check_index(index.rows, where)
    _require(index.width > 0, where, "a row has no cells")
    for pattern, shape, rows in (
        (grid.before, index.shape, index.rows.old_size),
        (grid.after, index.new_shape, index.rows.new_size),
    ):
        _require(math.prod(shape) == rows * index.width, where, "the rows do not fit the shape")
        if pattern is None:
            _require(len(shape) == dims, where, f"expected {dims} dimensions")
            continue
        check_pattern(pattern, dims, where)
        _require(pattern.width == index.width, where, "rows have another width")
        live = int((pattern.kinds != CUT).sum())
        _require(shape == (live, pattern.width), where, "other rows exist")


def check_pattern(pattern: Pattern, dims: int, where: str) -> None:
    """Raises CheckpointError if a tensor of so many dimensions cannot have a pattern."""
    kinds = pattern.kinds
    _require(len(pattern.shape) == dims, where, f"expected {dims} dimensions")
    sizes = all(type(size) is int and 0 <= size <= LARGEST for size in pattern.shape)
    _require(sizes and type(pattern.width) is int, where, "a size is negative or too large")
    is_vector = kinds.dtype == torch.uint8 and kinds.dim() == 1
    _require(is_vector and pattern.width > 0, where, "expected one kind for every row")
    cells = math.prod(pattern.shape)
    _require(len(kinds) * pattern.width == cells, where, "expected one kind for every row")
    _require(bool((kinds <= FROZEN).all()), where, "a row is neither cut nor free nor frozen")
    # A row is made of whole dimensions.
    inside = 1
    for size in reversed(pattern.shape):
        if inside == pattern.width:
            break
        inside *= size
    _require(inside == pattern.width, where, "a row is no block of cells")
    _require(not pattern.is_full, where, "a tensor whose cells are all free has no pattern")


def _check_layer(layer: LayerChange, n_uids: int, where: str) -> None:
    _require(layer.folded is None, where, "a journal keeps no folded relations")
    _check_index(layer.index, where)
    for nodes, rows in ((layer.born, layer.index.inserted), (layer.gone, layer.index.removed)):
        _numbers(nodes.uids, torch.int64, len(rows), n_uids, where)
        _check_labels(nodes.owners, len(rows), f"{where}.owners")
        _check_labels(nodes.activations, len(rows), f"{where}.activations")
        _check_activations(nodes.activations, f"{where}.activations")
    if layer.biases is not None:
        _check_vector(layer.biases, layer.index, f"{where}.biases")
    for name, vector in layer.columns.items():
        _check_vector(vector, layer.index, f"{where}.{name}")
    for relabel in (layer.owners, layer.activations):
        if relabel is not None:
            _check_survivors(relabel.rows, layer.index, where)
            _check_labels(relabel.before, len(relabel.rows), where)
            _check_labels(relabel.after, len(relabel.rows), where)
    if layer.activations is not None:
        _check_activations(layer.activations.before, f"{where}.activations")
        _check_activations(layer.activations.after, f"{where}.activations")


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


def _check_index(index: IndexMap, where: str) -> None:
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


def _check_survivors(rows: Tensor, index: IndexMap, where: str) -> None:
    """Raises CheckpointError unless `rows` are ascending positions of survivors."""
    _numbers(rows, torch.int32, rows.numel(), index.new_size, where, ascending=True)
    _require(
        not bool(contains(index.inserted, rows).any()), where, "refers to what the commit added"
    )


def _check_vector(vector: VectorChange, index: IndexMap, where: str) -> None:
    _require(vector.index is index, where, "moves otherwise")
    born = len(vector.index.inserted)
    gone = len(vector.index.removed)
    for found, size in ((vector.born_frozen, born), (vector.gone_frozen, gone)):
        fits = found is None or (found.dtype == torch.bool and found.shape == (size,))
        _require(fits, where, f"expected {size} bits")
    _check_survivors(vector.flips, vector.index, f"{where}.flips")
    if vector.born_values is None or vector.gone_values is None:
        both = vector.born_values is None and vector.gone_values is None
        _require(both and vector.shift is None, where, "holds one half of its values")
        _check_assigned(vector.assigned, index, where, has_values=False)
        return
    _floats(vector.born_values, born, where)
    _floats(vector.gone_values, gone, where)
    _check_assigned(vector.assigned, index, where, has_values=True)
    if vector.shift is not None:
        _check_survivors(vector.shift.positions, vector.index, f"{where}.shift")
        _floats(vector.shift.before, len(vector.shift.positions), f"{where}.shift")
        _floats(vector.shift.after, len(vector.shift.positions), f"{where}.shift")


def _check_assigned(
    assigned: Assignment | None, index: CellMap, where: str, *, has_values: bool
) -> None:
    """Raises CheckpointError unless coordinates that stay are assigned, with values or without."""
    if assigned is None:
        return
    where = f"{where}.assigned"
    positions = assigned.positions
    size = positions.numel()
    _numbers(positions, torch.int32, size, index.old_size, where, ascending=True)
    _require(not bool(index.are_gone(positions).any()), where, "refers to what leaves")
    for values in (assigned.before, assigned.after):
        _require((values is not None) == has_values, where, "holds one half of its values")
        if values is not None:
            _floats(values, size, where)


def _floats(found: Tensor, size: int, where: str) -> None:
    is_right = found.dtype.is_floating_point and found.shape == (size,)
    _require(is_right, where, f"expected {size} values")


def _check_labels(labels: Labels, size: int, where: str) -> None:
    _numbers(labels.codes, torch.int32, size, len(labels.names), where)
    _require(len(set(labels.names)) == len(labels.names), where, "a name occurs twice")


def _check_activations(labels: Labels, where: str) -> None:
    """Raises CheckpointError for an unknown activation, which undo would give to nodes."""
    for name in labels.names:
        _require(is_activation(name), where, f"{str(name)[:40]!r} is unknown")


def _bytes(content: bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8))
