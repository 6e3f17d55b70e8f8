"""`grapnet history` and `grapnet diff`: what happened to a net, and what differs between two
checkpoints.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

import grapnet as gn

from .beside import compare_beside
from .columns import Cell, counted, plain, table
from .command import Command, CommandError, Outcome
from .comparison import Comparison, compare
from .contents import Contents, read_contents, title
from .files import add_file

_SHOWN = 6  # nodes or relations that are named as examples on a screen
_LISTED = 1000  # of them in JSON


def _configure_history(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--last", type=int, metavar="N", help="only the last N commits")
    parser.add_argument(
        "--details", action="store_true", help="also the operations and remarks of every commit"
    )


def _run_history(given: argparse.Namespace) -> Outcome:
    if given.last is not None and given.last < 1:
        raise CommandError(
            f"--last is a whole number, at least 1, got {given.last}",
            "leave it out for all commits",
        )
    contents = read_contents(given.file)
    lines, data = [], {}
    for place, net in contents.nets.items():
        commits = net.history[-given.last :] if given.last else net.history
        ways, turned = _ways_back(net), _turned(net.history)
        lines += [
            f"The {title(place)} at version {net.version:,}, {counted(len(net.history), 'commit')}"
        ]
        if len(commits) < len(net.history):
            lines[-1] += f", the last {len(commits):,}"
        lines += [*_commits(commits, ways, turned, details=given.details), *_outlook(net), ""]
        data[place] = {
            "version": net.version,
            "commits": [
                _as_data(commit, ways.get(commit.version), turned[commit.version])
                for commit in commits
            ],
            "of": len(net.history),
            "undoable": [net.history[n].version for n in reversed(net.journal.undoable)],
            "redoable": [net.history[n].version for n in reversed(net.journal.redoable)],
        }
    return Outcome("\n".join(lines[:-1]), {"file": str(given.file), "nets": data})


def _ways_back(net: gn.GrapNet) -> dict[int, str]:
    """Returns, by version, the command that takes a commit back, with those after it."""
    journal, found = net.journal, {}
    for verb, stack in (("undo", journal.undoable), ("redo", journal.redoable)):
        found |= {
            journal.commits[place].version: f"{verb} --steps {n}"
            for n, place in enumerate(reversed(stack), 1)
        }
    return found


def _turned(history: Sequence[gn.Commit]) -> dict[int, str | None]:
    """Returns, by version, whether coordinates were frozen or unfrozen; an undo turns them the
    other way.
    """
    found: dict[int, str | None] = {}
    other = {"frozen": "unfrozen", "unfrozen": "frozen", None: None}
    for commit in history:
        found[commit.version] = (
            commit.turned if commit.undoes is None else other[found.get(commit.undoes)]
        )
    return found


def _commits(
    commits: Sequence[gn.Commit],
    ways: dict[int, str],
    turned: dict[int, str | None],
    *,
    details: bool,
) -> list[str]:
    if not commits:
        return []
    rows: list[list[Cell]] = []
    for commit in commits:
        counts = commit.counts
        nodes, relations = (
            _signed(counts[f"{what}_added"], counts[f"{what}_removed"])
            for what in ("nodes", "relations")
        )
        coordinates = ""
        if counts["coordinates_turned"]:
            coordinates = (
                f"{counts['coordinates_turned']:,} {turned[commit.version] or ''}".rstrip()
            )
        way = ways.get(commit.version, "")
        rows.append(
            [commit.version, nodes, relations, coordinates, way, commit.by or "", _reason(commit)]
        )
        if details:
            rows += [_detail(operation) for operation in commit.operations]
    titles = ["version", "nodes", "relations", "(un)frozen", "way back", "by", "reason"]
    used = [n for n in range(len(titles)) if n in (0, 6) or any(row[n] for row in rows)]
    return table([titles[n] for n in used], [[row[n] for n in used] for row in rows])


def _detail(operation: dict[str, Any]) -> list[Cell]:
    told = {name: value for name, value in operation.items() if name not in ("operation", "text")}
    parts = [
        f"{name}={value:,}" if type(value) is int else f"{name}={value}"
        for name, value in told.items()
    ]
    text = f"{operation['text']!r} " if "text" in operation else ""
    return ["", "", "", "", "", "", f"· {operation['operation']} {text}{', '.join(parts)}"]


def _signed(added: int, removed: int) -> str:
    return " ".join([f"+{added:,}"] * bool(added) + [f"−{removed:,}"] * bool(removed))


def _reason(commit: gn.Commit) -> str:
    joint = f" (part {commit.joint.part + 1} of {commit.joint.parts})" if commit.joint else ""
    return f"{commit.reason or '(no reason given)'}{joint}"


def _outlook(net: gn.GrapNet) -> list[str]:
    """Says what undo and redo would do."""
    journal = net.journal
    if not journal.commits:
        return ["  nothing was edited"]
    if not journal.undoable and not journal.redoable:
        return ["  none can be undone: gn.save(..., undo=True) keeps what that needs"]
    told = []
    for verb, done, stack in (
        ("undo", "undone", journal.undoable),
        ("redo", "redone", journal.redoable),
    ):
        if stack:
            first = journal.commits[stack[-1]].version
            told.append(
                f"  {counted(len(stack), 'commit')} can be {done}: grapnet {verb} takes version"
                f" {first:,} back"
            )
    return told


def _as_data(commit: gn.Commit, way: str | None, turned: str | None) -> dict[str, Any]:
    joint = commit.joint and {
        "name": commit.joint.name,
        "part": commit.joint.part,
        "parts": commit.joint.parts,
    }
    return {
        "version": commit.version,
        "reason": commit.reason,
        "by": commit.by,
        "undoes": commit.undoes,
        "joint": joint,
        "counts": commit.counts,
        "turned": turned,
        "operations": plain(commit.operations),
        "way_back": way,
    }


def _configure_diff(parser: argparse.ArgumentParser) -> None:
    add_file(parser, "a", "a checkpoint")
    add_file(parser, "b", "another one")


def _run_diff(given: argparse.Namespace) -> Outcome:
    a, b = read_contents(given.a), read_contents(given.b)
    data: dict[str, Any] = {"a": str(given.a), "b": str(given.b), "nets": {}}
    lines = [f"A  {given.a}", f"B  {given.b}"]
    for place in dict.fromkeys([*a.nets, *b.nets]):
        told, found = _compared(a, b, place)
        lines += ["", *told]
        data["nets"][place] = found
    beside = compare_beside(
        *([*one.extras, *([one.beside] if one.beside else [])] for one in (a, b))
    )
    lines += ["", "Beside the nets, which does not count for the exit code"] if beside else []
    lines += [f"  {name}: {one}" for name, one in beside.items()]
    data["beside"] = {name: one._asdict() for name, one in beside.items()}
    equal = all(one["equal"] for one in data["nets"].values())
    return Outcome("\n".join(lines), {"equal": equal, **data}, code=0 if equal else 1)


def _compared(a: Contents, b: Contents, place: str) -> tuple[list[str], dict[str, Any]]:
    for one, other, side in ((a, b, "B"), (b, a, "A")):
        if place not in one.nets:
            told = f"The {title(place)} is only in {side}: {other.nets[place]!r}"
            return [told], {"equal": False, "only_in": side.lower()}
    first, second = a.nets[place], b.nets[place]
    found = compare(first, second)
    lines = [f"The {title(place)}", f"  A  {first!r}", f"  B  {second!r}", f"  {found.lineage}"]
    turned = _turned(max(first.history, second.history, key=len))
    lines += _commits(found.commits, {}, turned, details=False)
    if found.is_equal:
        lines += ["  nodes, relations, names, settings and values are equal, bit for bit"]
    else:
        lines += ["", *_differences(found)]
        lines += _examples(found)
    return lines, _comparison_data(found, turned)


def _differences(found: Comparison) -> list[str]:
    rows: list[list[Cell]] = []
    for what, one in found.differences.items():
        if any(one[:3]):
            largest = "" if one.largest is None else f"{one.largest:.3g}"
            rows.append([what, *("" if count is None else count for count in one[:3]), largest])
    return table(["what", "added", "removed", "changed", "largest change"], rows)


def _examples(found: Comparison) -> list[str]:
    """Names the first few nodes and relations that came and went, by uid."""
    lines = []
    for what, uids in _listed(found).items():
        some = [
            "→".join(map(str, uid)) if isinstance(uid, list) else str(uid)
            for uid in uids[:_SHOWN].tolist()
        ]
        if some:
            more = ", …" if len(uids) > len(some) else ""
            lines.append(f"  {what.replace('_', ' ')}, by uid: {', '.join(some)}{more}")
    return lines


def _listed(found: Comparison) -> dict[str, np.ndarray]:
    return {
        "nodes_added": found.nodes_added,
        "nodes_removed": found.nodes_removed,
        "relations_added": found.relations_added,
        "relations_removed": found.relations_removed,
    }


def _comparison_data(found: Comparison, turned: dict[int, str | None]) -> dict[str, Any]:
    return {
        "equal": found.is_equal,
        "lineage": found.lineage,
        "commits": [_as_data(commit, None, turned[commit.version]) for commit in found.commits],
        "differences": plain({what: one._asdict() for what, one in found.differences.items()}),
        "first": {name: uids[:_LISTED].tolist() for name, uids in _listed(found).items()},
    }


COMMANDS: tuple[Command, ...] = (
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
