"""The journal as tensors and JSON, and back."""

from dataclasses import asdict, replace
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor

from grapnet.core.change import Change, LayerChange, NodeRecord, Pairs, Relabel, TransitionChange
from grapnet.core.errors import CheckpointError
from grapnet.core.journal import Commit, Joint, Journal
from grapnet.core.labels import Labels
from grapnet.core.remap import IndexMap, contains
from grapnet.core.vector import Shift, VectorChange
from grapnet.network import GrapNet

from .fields import LARGEST, Fields, entry, names, number
from .rewind import Rewind
from .tree import decode, encode

Kept = Literal["outline", "full"]


def describe_journal(
    journal: Journal, tensors: dict[str, Tensor], *, undo: bool, history: Kept
) -> dict[str, Any]:
    """Puts the journal's arrays into `tensors` and returns the rest as JSON; what undo needs only
    when asked for.
    """
    undoable = journal.undoable if undo else []
    redoable = journal.redoable if undo else []
    commits = []
    for place, commit in enumerate(journal.commits):
        can_go_back = place in undoable or place in redoable
        if not can_go_back and history == "outline":
            commit = commit.outline()
        elif not can_go_back:
            commit = commit.summary()
        commits.append(_describe_commit(commit, f"journal.{place}.", tensors))
    return {
        "undo_limit": journal.undo_limit,
        "detail_limit": journal.detail_limit,
        "undo": undo,
        "history": history,
        "commits": commits,
        "undoable": undoable,
        "redoable": redoable,
    }


def _describe_commit(commit: Commit, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "version": commit.version,
        "reason": str(commit.reason),
        "by": None if commit.by is None else str(commit.by),
        "undoes": commit.undoes,
    }
    if commit.joint is not None:
        described["joint"] = asdict(commit.joint)
    operations = list(commit.operations)
    if not commit.has_details:
        operations = [_outline_operation(item) for item in operations]
    described["operations"] = encode(operations, f"{name}operations", tensors)
    if not commit.has_details:
        described["counts"] = commit.counts
        return described
    described["layers"] = {
        str(k): _put_layer(c, f"{name}layers.{k}.", tensors)
        for k, c in commit.change.layers.items()
    }
    described["transitions"] = {
        str(k): _put_wires(c, f"{name}transitions.{k}.", tensors)
        for k, c in commit.change.transitions.items()
    }
    return described


def _outline_operation(operation: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts of an operation that are a name, a number or a choice."""
    kinds = (str, int, float, bool, NoneType)
    return {key: value for key, value in operation.items() if type(value) in kinds}


def rebuild_journal(document: Any, fields: Fields, net: GrapNet) -> Journal:
    """Returns the journal that leads to `net`; raises CheckpointError, naming the field, when it
    cannot be one.
    """
    where = "journal."
    keeps_undo(document)
    kept_history(document)
    parts = entry(document, "commits", list, where)
    commits = [_commit(part, f"{where}{n}.", fields, net) for n, part in enumerate(parts)]
    _check_chain(commits, net)
    stacks = {}
    for name in ("undoable", "redoable"):
        stacks[name] = stack = entry(document, name, list, where)
        if any(
            type(p) is not int or not 0 <= p < len(commits) or not _can_go_back(commits[p])
            for p in stack
        ):
            raise CheckpointError(f"{where}{name}: names a commit that cannot be taken back")
        if stack:
            past = Rewind(net)
            for place in reversed(stack):
                past.take_back(commits[place], f"{where}{place}.")
            past.require_no_twins()
    journal = Journal(
        number(document, "undo_limit", where), number(document, "detail_limit", where)
    )
    journal.reinstate(commits, **stacks)
    return journal


def keeps_undo(document: Any) -> bool | None:
    """Says whether a journal was described with what undo needs; None for one of before the field
    was written.
    """
    return entry(document, "undo", bool, "journal.") if "undo" in document else None


def kept_history(document: Any) -> Kept:
    """Returns how much of every commit a journal was described with."""
    found = entry(document, "history", str, "journal.")
    if found not in ("outline", "full"):
        raise CheckpointError('journal.history: expected "outline" or "full"')
    return found


def _can_go_back(commit: Commit) -> bool:
    return commit.has_details and commit.change.has_values


def _check_chain(commits: list[Commit], net: GrapNet) -> None:
    """Walks the sizes back from the net to its beginning; every commit must fit the next one."""
    rows, relations, version = list(net.sizes), [t.size for t in net.transitions], net.version
    known = True
    if version != (commits[-1].version if commits else 0):
        raise CheckpointError(f"journal.commits: do not lead to version {version}")
    for n in range(len(commits) - 1, -1, -1):
        commit = commits[n]
        if not 0 < commit.version <= version:
            raise CheckpointError(
                f"journal.{n}.version: {commit.version} does not come before {version + 1}"
            )
        version = commit.version - 1
        known = known and commit.has_details  # nobody knows the sizes before one that has none
        if not known:
            continue
        for sizes, indices, kind in (
            (rows, commit.nodes, "layers"),
            (relations, commit.relations, "transitions"),
        ):
            for k, index in indices.items():
                if index.new_size != sizes[k]:
                    raise CheckpointError(
                        f"journal.{n}.{kind}.{k}: leads to {index.new_size} entries where"
                        f" {sizes[k]} follow"
                    )
                sizes[k] = index.old_size


def _commit(part: Any, where: str, fields: Fields, net: GrapNet) -> Commit:
    # These two find out whether the part is a dict at all.
    version = number(part, "version", where)
    reason = entry(part, "reason", str, where)
    undoes, by = part.get("undoes"), part.get("by")
    if undoes is not None and (type(undoes) is not int or not 0 < undoes <= LARGEST):
        raise CheckpointError(f"{where}undoes: expected a version")
    if by is not None and type(by) is not str:
        raise CheckpointError(f"{where}by: expected a name")
    operations = decode(part.get("operations"), f"{where}operations", fields)
    if not isinstance(operations, list) or any(not isinstance(item, dict) for item in operations):
        raise CheckpointError(f"{where}operations: expected a list of operations")
    joint = _joint(part, where)
    if "counts" in part:
        return Commit(
            version,
            reason,
            Change({}, {}),
            by,
            tuple(operations),
            undoes=undoes,
            joint=joint,
            outlined=_counts(part, where),
        )
    layers = entry(part, "layers", dict, where)
    transitions = entry(part, "transitions", dict, where)
    change = Change(
        {
            _key(k, len(net.layers), f"{where}layers."): _layer(
                c, f"{where}layers.{k}.", fields, net.next_uid, sensory=k == "0"
            )
            for k, c in layers.items()
        },
        {
            _key(k, len(net.transitions), f"{where}transitions."): _wires(
                c, f"{where}transitions.{k}.", fields, net.next_uid
            )
            for k, c in transitions.items()
        },
    )
    return Commit(version, reason, change, by, tuple(operations), undoes=undoes, joint=joint)


def _counts(part: Any, where: str) -> dict[str, int]:
    found = entry(part, "counts", dict, where)
    names = Change({}, {}).counts().keys()
    if found.keys() != names:
        raise CheckpointError(f"{where}counts: expected {', '.join(names)}")
    return {name: number(found, name, f"{where}counts.") for name in names}


def _joint(part: Any, where: str) -> Joint | None:
    if "joint" not in part:
        return None
    found, where = entry(part, "joint", dict, where), f"{where}joint."
    joint = Joint(
        entry(found, "name", str, where),
        number(found, "part", where),
        number(found, "parts", where),
    )
    if not joint.name or not joint.part < joint.parts or joint.parts < 2:
        raise CheckpointError(
            f"{where}part: {joint.part} of {joint.parts} is no part of a transaction over several"
            " nets"
        )
    return joint


def _key(text: str, count: int, where: str) -> int:
    if not text.isdecimal() or str(int(text[:9])) != text or int(text) >= count:
        raise CheckpointError(f"{where}{text[:20]}: there is no such part")
    return int(text)


def _put_index(index: IndexMap, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors[name + "removed"], tensors[name + "inserted"] = index.removed, index.inserted
    return {"old_size": index.old_size, "new_size": index.new_size}


def _index(part: Any, name: str, fields: Fields) -> IndexMap:
    old, new = number(part, "old_size", name), number(part, "new_size", name)
    removed, inserted = (
        fields.positions(old, name + "removed"),
        fields.positions(new, name + "inserted"),
    )
    if old - len(removed) != new - len(inserted):
        raise CheckpointError(
            f"{name}new_size: {new} does not follow from {old}, {len(removed)} gone and"
            f" {len(inserted)} born"
        )
    return IndexMap(old, new, removed, inserted)


def _put_vector(vector: VectorChange, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors[name + "born_frozen"], tensors[name + "gone_frozen"] = (
        vector.born_frozen,
        vector.gone_frozen,
    )
    tensors[name + "flips"] = vector.flips
    if vector.gone_values is None or vector.born_values is None:
        # a shift tells what was cut: the product of a weight and a bias
        return {
            "values": False,
            "shift": False,
        }
    tensors[name + "born_values"], tensors[name + "gone_values"] = (
        vector.born_values,
        vector.gone_values,
    )
    if vector.shift is not None:
        tensors[name + "shift"] = vector.shift.positions
        tensors[name + "shift_before"], tensors[name + "shift_after"] = (
            vector.shift.before,
            vector.shift.after,
        )
    return {"values": True, "shift": vector.shift is not None}


def _vector(part: Any, name: str, fields: Fields, index: IndexMap) -> VectorChange:
    born, gone = len(index.inserted), len(index.removed)
    values, shift = entry(part, "values", bool, name), None
    if entry(part, "shift", bool, name):
        positions = _survivors(fields, name + "shift", index)
        shift = Shift(
            positions,
            *(_floats(fields, name + f"shift_{k}", len(positions)) for k in ("before", "after")),
        )
    return VectorChange(
        index,
        born_frozen=fields.vector(name + "born_frozen", torch.bool, born),
        gone_frozen=fields.vector(name + "gone_frozen", torch.bool, gone),
        flips=_survivors(fields, name + "flips", index),
        born_values=_floats(fields, name + "born_values", born) if values else None,
        gone_values=_floats(fields, name + "gone_values", gone) if values else None,
        shift=shift,
    )


def _survivors(fields: Fields, name: str, index: IndexMap) -> Tensor:
    found = fields.positions(index.new_size, name)
    if bool(contains(index.inserted, found).any()):
        raise CheckpointError(f"{name}: names what the same commit brought")
    return found


def _floats(fields: Fields, name: str, size: int) -> Tensor:
    found = fields.any(name)
    if not found.dtype.is_floating_point or found.dim() != 1 or len(found) != size:
        raise CheckpointError(
            f"{name}: expected {size} values, found {found.dtype} {list(found.shape)}"
        )
    return found


def _put_wires(change: TransitionChange, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    for side, pairs in (("born", change.born), ("gone", change.gone)):
        tensors[f"{name}{side}_parents"], tensors[f"{name}{side}_children"] = (
            pairs.parents,
            pairs.children,
        )
    return {**_put_index(change.index, name, tensors), **_put_vector(change.weights, name, tensors)}


def _wires(part: Any, name: str, fields: Fields, next_uid: int) -> TransitionChange:
    index = _index(part, name, fields)
    pairs = {}
    for side, size in (("born", len(index.inserted)), ("gone", len(index.removed))):
        ends = (
            fields.below(next_uid, f"{name}{side}_{end}", torch.int32, size)
            for end in ("parents", "children")
        )
        pairs[side] = Pairs(*ends)
    return TransitionChange(index, pairs["born"], pairs["gone"], _vector(part, name, fields, index))


def _put_layer(change: LayerChange, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    record: dict[str, Any] = _put_index(change.index, name, tensors)
    for side, nodes in (("born", change.born), ("gone", change.gone)):
        tensors[f"{name}{side}_uids"] = nodes.uids
        record |= _put_labels(nodes.owners, name, f"{side}_owners", tensors)
        record |= _put_labels(nodes.activations, name, f"{side}_activations", tensors)
    for kind, relabel in (("owners", change.owners), ("activations", change.activations)):
        record[f"renames_{kind}"] = relabel is not None
        if relabel is not None:
            tensors[f"{name}{kind}_rows"] = relabel.rows
            record |= _put_labels(relabel.before, name, f"{kind}_before", tensors)
            record |= _put_labels(relabel.after, name, f"{kind}_after", tensors)
    for column, vector in change.columns.items():
        for side, values in (("born", vector.born_values), ("gone", vector.gone_values)):
            assert values is not None  # a summary has no columns
            tensors[f"{name}columns.{column}.{side}"] = values
    record |= {"columns": list(change.columns)} if change.columns else {}
    return (
        record if change.biases is None else {**record, **_put_vector(change.biases, name, tensors)}
    )


def _layer(part: Any, name: str, fields: Fields, next_uid: int, *, sensory: bool) -> LayerChange:
    index = _index(part, name, fields)
    nodes = {
        side: NodeRecord(
            fields.below(next_uid, f"{name}{side}_uids", torch.int64, size),
            _labels(part, f"{side}_owners", name, fields, size),
            _labels(part, f"{side}_activations", name, fields, size),
        )
        for side, size in (("born", len(index.inserted)), ("gone", len(index.removed)))
    }
    renames: dict[str, Relabel | None] = {}
    for kind in ("owners", "activations"):
        renames[kind] = None
        if entry(part, f"renames_{kind}", bool, name):
            rows = _survivors(fields, f"{name}{kind}_rows", index)
            columns = (
                _labels(part, f"{kind}_{when}", name, fields, len(rows))
                for when in ("before", "after")
            )
            renames[kind] = Relabel(rows, *columns)
    biases = None if sensory else _vector(part, name, fields, index)
    columns = {column: _column(column, name, fields, index) for column in _column_names(part, name)}
    return LayerChange(
        index,
        nodes["born"],
        nodes["gone"],
        biases,
        renames["owners"],
        renames["activations"],
        columns,
    )


def _column_names(part: Any, name: str) -> tuple[str, ...]:
    found = names(part, "columns", name) if "columns" in part else ()
    if None in found:
        raise CheckpointError(f"{name}columns: expected names")
    return tuple(column for column in found if column is not None)


def _column(column: str, name: str, fields: Fields, index: IndexMap) -> VectorChange:
    born = _floats(fields, f"{name}columns.{column}.born", len(index.inserted))
    gone = _floats(fields, f"{name}columns.{column}.gone", len(index.removed))
    return replace(VectorChange.of_free(index, born), gone_values=gone)


def _put_labels(labels: Labels, name: str, key: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    labels = labels.compact()
    tensors[name + key] = labels.codes
    return {key: list(labels.names) or [None]}


def _labels(part: Any, key: str, name: str, fields: Fields, size: int) -> Labels:
    return fields.labels(names(part, key, name), name + key, size)
