"""`grapnet history` and `grapnet diff`: the edits of a net, and what differs between two files."""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import grapnet as gn

from . import _whole as whole
from ._command import (
    Cell,
    Command,
    Outcome,
    add_file,
    counted,
    few,
    graphs_of,
    open_file,
    plain,
    positive,
    table,
    title,
)

if TYPE_CHECKING:
    import numpy as np

    from grapnet.checkpoint import Archive
    from grapnet.spaces import Adopted

_SHOWN = 6  # nodes or relations that are named as examples


def _configure_history(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--last", type=positive, metavar="N", help="only the last N commits")
    parser.add_argument(
        "--details", action="store_true", help="also the operations and remarks of every commit"
    )


def _run_history(given: argparse.Namespace) -> Outcome:
    lines = []
    data = {}
    for place, net in graphs_of(open_file(given.file)).items():
        commits = net.history
        if given.last is not None:
            commits = commits[-given.last :]
        ways = _ways_back(net)
        shown = f"{len(commits):,} of {counted(len(net.history), 'commit')}"
        lines += [f"The {title(place, net)} at version {net.version:,}: {shown}"]
        lines += [*_commits(commits, ways), _outlook(net), ""]
        if commits and not isinstance(net, gn.GrapNet):
            lines += ["In words", *_words(net, commits)]
            if not all(commit.has_details for commit in commits):
                lines += ['  gn.save(..., history="full") keeps which spaces and tensors']
            lines += [""]
        if given.details and commits:
            lines += ["Operations", *_operations(commits), ""]
        data[place] = {
            "version": net.version,
            "commits": [_as_data(net, commit, ways.get(commit.version)) for commit in commits],
            "of": len(net.history),
        }
    return Outcome("\n".join(lines[:-1]), {"file": str(given.file), "nets": data})


def _ways_back(net: "gn.GrapNet | Adopted") -> dict[int, str]:
    """Returns the command that reverts each commit and those after it, by version."""
    journal = net.journal
    found = {}
    for verb, stack in (("undo", journal.undoable), ("redo", journal.redoable)):
        for steps, place in enumerate(reversed(stack), 1):
            found[journal.commits[place].version] = f"{verb} --steps {steps}"
    return found


def _outlook(net: "gn.GrapNet | Adopted") -> str:
    journal = net.journal
    if not journal.commits:
        return "  nothing was edited"
    if not journal.undoable and not journal.redoable:
        return "  none can be undone: gn.save(..., undo=True) keeps what that needs"
    return f"  {len(journal.undoable):,} can be undone, {len(journal.redoable):,} redone"


def _commits(commits: "Sequence[gn.Commit]", ways: dict[int, str]) -> list[str]:
    if not commits:
        return []
    rows: list[list[Cell]] = []
    for commit in commits:
        counts = commit.counts
        frozen = ""
        if counts["coordinates_frozen_or_unfrozen"]:
            count = counts["coordinates_frozen_or_unfrozen"]
            frozen = f"{count:,} {commit.frozen_or_unfrozen or ''}"
        reason = commit.reason or "(no reason given)"
        if commit.joint is not None:
            reason += f" (part {commit.joint.part + 1} of {commit.joint.parts})"
        rows.append(
            [
                commit.version,
                time.strftime("%Y-%m-%d %H:%M", time.localtime(commit.time)),
                _signed(counts["nodes_added"], counts["nodes_removed"]),
                _signed(counts["relations_added"], counts["relations_removed"]),
                _signed(counts["blocks_added"], counts["blocks_removed"]),
                frozen,
                counts["coordinates_assigned"],
                ways.get(commit.version, ""),
                commit.by or "",
                reason,
            ]
        )
    titles = ["version", "time", "nodes", "relations", "blocks", "(un)frozen", "assigned"]
    return table([*titles, "way back", "by", "reason"], rows)


def _words(net: "Adopted", commits: "Sequence[gn.Commit]") -> list[str]:
    rows: list[list[Cell]] = [[commit.version, whole.words(net, commit)] for commit in commits]
    return table(["version", "what it did"], rows)


def _operations(commits: "Sequence[gn.Commit]") -> list[str]:
    rows: list[list[Cell]] = []
    for commit in commits:
        for operation in commit.operations:
            words = [f"{name}={value}" for name, value in operation.items()]
            rows.append([commit.version, " ".join(words).removeprefix("operation=")])
    return table(["version", "operation"], rows)


def _signed(added: int, removed: int) -> str:
    parts = []
    if added:
        parts.append(f"+{added:,}")
    if removed:
        parts.append(f"−{removed:,}")
    return " ".join(parts)


def _as_data(
    net: "gn.GrapNet | Adopted", commit: "gn.Commit", way: str | None = None
) -> dict[str, Any]:
    joint = commit.joint and {"part": commit.joint.part, "parts": commit.joint.parts}
    words = None
    if not isinstance(net, gn.GrapNet):
        words = whole.words(net, commit)
    return {
        "version": commit.version,
        "time": commit.time,
        "reason": commit.reason,
        "by": commit.by,
        "undoes": commit.undoes,
        "joint": joint,
        "counts": commit.counts,
        "operations": plain(commit.operations),
        "words": words,
        "way_back": way,
    }


def _configure_diff(parser: argparse.ArgumentParser) -> None:
    add_file(parser, "a", "a checkpoint")
    add_file(parser, "b", "another one")


def _run_diff(given: argparse.Namespace) -> Outcome:
    a = open_file(given.a)
    b = open_file(given.b)
    data: dict[str, Any] = {"a": str(given.a), "b": str(given.b), "nets": {}}
    lines = [f"A  {given.a}", f"B  {given.b}"]
    ours = graphs_of(a)
    theirs = graphs_of(b)
    for place in dict.fromkeys([*ours, *theirs]):
        found = _compared(ours.get(place), theirs.get(place))
        data["nets"][place] = found
        heading = title(place, ours.get(place, theirs.get(place)))
        lines += ["", f"The {heading}", *_about_difference(found)]
    data["beside"] = _compared_extras(a, b)
    if data["beside"]:
        lines += ["", "Beside the nets, which does not count for the exit code"]
        lines += [f"  {name}: {state}" for name, state in data["beside"].items()]
    equal = all(one["equal"] for one in data["nets"].values())
    return Outcome("\n".join(lines), {"equal": equal, **data}, code=int(not equal))


def _compared(a: "gn.GrapNet | Adopted | None", b: "gn.GrapNet | Adopted | None") -> dict[str, Any]:
    """Returns what differs between two nets or models.

    Histories do not count: a net whose cut was undone is equal to the net before the cut.
    """
    if a is None or b is None:
        if a is not None:
            return {"equal": False, "only_in": "a", "a": _summary(a)}
        assert b is not None
        return {"equal": False, "only_in": "b", "b": _summary(b)}
    if isinstance(a, gn.GrapNet) and isinstance(b, gn.GrapNet):
        differences = _compared_nets(a, b)
    elif isinstance(a, gn.GrapNet) or isinstance(b, gn.GrapNet):
        differences = {"kind": {"added": 0, "removed": 0, "changed": 1, "largest": None}}
    else:
        differences = whole.compared(a, b)
    shared = _shared_commits(a, b)
    ours = a.history[shared:]
    theirs = b.history[shared:]
    lineage = f"{counted(shared, 'commit')} in common"
    lineage += f"; A has {len(ours):,} more, B has {len(theirs):,} more"
    return {
        "equal": not differences,
        "a": _summary(a),
        "b": _summary(b),
        "lineage": lineage,
        "commits": {
            "a": [_as_data(a, commit) for commit in ours],
            "b": [_as_data(b, commit) for commit in theirs],
        },
        "differences": plain(differences),
    }


def _summary(net: "gn.GrapNet | Adopted") -> str:
    if isinstance(net, gn.GrapNet):
        return repr(net)
    return whole.summary(net)


def _compared_nets(a: "gn.GrapNet", b: "gn.GrapNet") -> dict[str, Any]:
    differences = {}
    others = _columns(b)
    for what, column in _columns(a).items():
        counts = _compared_columns(column, others[what])
        if counts["added"] or counts["removed"] or counts["changed"]:
            differences[what] = counts
    return differences


class _Column(NamedTuple):
    """One value for each node or relation of a net, or for the net itself."""

    keys: "np.ndarray"  # [n] int64, another one for every row
    values: "np.ndarray"  # [n]
    kind: str = ""  # "node" or "relation" where rows of one net alone are a difference


def _columns(net: "gn.GrapNet") -> dict[str, _Column]:
    """Returns everything in a net except its history."""
    import numpy as np
    import torch

    nodes = net.select()
    layers = torch.arange(len(net.layers)).repeat_interleave(torch.tensor(net.sizes))
    # Sensory nodes have no bias: 0, and not frozen.
    biases = torch.zeros(len(nodes), dtype=torch.float64)
    frozen = torch.zeros(len(nodes), dtype=torch.bool)
    for number, layer in enumerate(net.layers[1:], 1):
        biases[layers == number] = layer.biases.detach().double()
        frozen[(layers == number).nonzero().flatten()[layer.frozen_at.long()]] = True
    relations = net.select().outgoing()
    node_keys = nodes.uids.numpy()
    relation_keys = (relations.parents << 32 | relations.children).numpy()
    columns = {
        "nodes": _Column(node_keys, layers.numpy(), "node"),
        "biases": _Column(node_keys, biases.numpy()),
        "frozen biases": _Column(node_keys, frozen.numpy()),
        "owners": _Column(node_keys, np.array(nodes.owners, dtype=object)),
        "activations": _Column(node_keys, np.array(nodes.activations, dtype=object)),
        "relations": _Column(relation_keys, np.zeros(len(relations)), "relation"),
        "weights": _Column(relation_keys, relations.weights.detach().double().numpy()),
        "frozen relations": _Column(relation_keys, relations.frozen.numpy()),
    }
    own = [column.value.tolist() for column in net.columns.values()]
    settings = {
        "activation of layers": [layer.default_activation for layer in net.layers],
        "dropout of layers": [layer.dropout for layer in net.layers],
        "backends": net.execution.choices(),
        "data type": net.execution.dtype,
        "Parameters of policies": own,
    }
    for name, value in settings.items():
        columns[name] = _Column(np.zeros(1, dtype=np.int64), np.array([repr(value)], dtype=object))
    return columns


def _compared_columns(a: _Column, b: _Column) -> dict[str, Any]:
    import numpy as np

    _, at, other_at = np.intersect1d(a.keys, b.keys, assume_unique=True, return_indices=True)
    first = a.values[at]
    second = b.values[other_at]
    differs = first != second
    largest = None
    if first.dtype == np.float64:
        # Bit for bit, so that NaN equals itself and 0 differs from -0.
        differs = first.view(np.int64) != second.view(np.int64)
        with np.errstate(invalid="ignore"):
            changes = np.abs(second[differs] - first[differs])
        largest = float(changes.max()) if len(changes) else None
    counts = {"added": 0, "removed": 0, "changed": int(differs.sum()), "largest": largest}
    if a.kind:
        added = np.delete(b.keys, other_at)
        removed = np.delete(a.keys, at)
        counts["added"] = len(added)
        counts["removed"] = len(removed)
        counts["first_added"] = _uids(added, a.kind)
        counts["first_removed"] = _uids(removed, a.kind)
        # The order of children is part of the graph.
        counts["changed"] += int((a.keys[np.sort(at)] != b.keys[np.sort(other_at)]).sum())
    return counts


def _uids(keys: "np.ndarray", kind: str) -> list[str]:
    found = keys[: _SHOWN + 1].tolist()
    if kind == "node":
        return [str(key) for key in found]
    return [f"{key >> 32}→{key & 0xFFFFFFFF}" for key in found]


def _shared_commits(a: "gn.GrapNet | Adopted", b: "gn.GrapNet | Adopted") -> int:
    """Returns how many commits at their start two histories share."""
    shared = 0
    for one, other in zip(a.history, b.history, strict=False):
        # One of the files may have the outline of its history only.
        if (one.version, one.time, one.reason) != (other.version, other.time, other.reason):
            break
        shared += 1
    return shared


def _about_difference(found: dict[str, Any]) -> list[str]:
    if "only_in" in found:
        return [f"  only in {found['only_in'].upper()}: {found[found['only_in']]}"]
    lines = [f"  A  {found['a']}", f"  B  {found['b']}", f"  {found['lineage']}"]
    for side, commits in found["commits"].items():
        for commit in commits:
            line = f"    {side.upper()} at {commit['version']:,}: {commit['reason']}"
            if commit["words"]:
                line += f" ({commit['words']})"
            lines.append(line)
    if found["equal"]:
        return [*lines, "  nodes, relations, names, settings and values are equal, bit for bit"]
    rows: list[list[Cell]] = []
    examples = []
    for what, counts in found["differences"].items():
        largest = counts["largest"]
        row = [counts[key] or "" for key in ("added", "removed", "changed")]
        rows.append([what, *row, "" if largest is None else f"{largest:.3g}"])
        for way in ("added", "removed", "changed"):
            named = counts.get(f"first_{way}")
            if counts[way] and named:
                kind = ", by uid" if _is_uid(named[0]) else ""
                examples.append(f"  {what} {way}{kind}: {few(named, _SHOWN)}")
    titles = ["what", "added", "removed", "changed", "largest change"]
    return [*lines, "", *table(titles, rows, longest=whole.LONGEST), *examples]


def _is_uid(name: str) -> bool:
    return name.replace("→", "").isdigit()


def _compared_extras(a: "Archive", b: "Archive") -> dict[str, str]:
    """Returns, by name, whether extras are equal."""
    ours = dict(a.extras)
    theirs = dict(b.extras)
    if a.is_model and b.is_model and not (a.is_adopted or b.is_adopted):
        ours["rest of the model"] = a.rest
        theirs["rest of the model"] = b.rest
    found = {}
    for name in dict.fromkeys([*ours, *theirs]):
        found[name] = "differs"
        if name not in theirs:
            found[name] = "only in A"
        elif name not in ours:
            found[name] = "only in B"
        elif a.kinds.get(name) == b.kinds.get(name) and _same(ours[name], theirs[name]):
            found[name] = "equal"
    return found


def _same(a: Any, b: Any) -> bool:
    """Returns whether two trees of plain data and tensors are equal."""
    import numpy as np
    import torch

    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor | np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        first = torch.as_tensor(a)
        second = torch.as_tensor(b)
        both_nan = (first != first) & (second != second)
        return bool(((first == second) | both_nan).all())
    return repr(a) == repr(b)


COMMANDS = (
    Command(
        "history",
        "the journal of a checkpoint: what was edited, why, and what can be undone",
        "Look at a net",
        _configure_history,
        _run_history,
        ("history net.safetensors --last 5", "history net.safetensors --details"),
    ),
    Command(
        "diff",
        "what differs between two checkpoints: exit code 1 if anything in their nets, else 0",
        "Look at a net",
        _configure_diff,
        _run_diff,
        ("diff net.safetensors half.safetensors",),
    ),
)
