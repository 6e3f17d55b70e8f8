"""What the commands print of whole models: files that `gn.save` wrote of adopted models."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._command import Cell, CommandError, counted, few, table, table_of

if TYPE_CHECKING:
    from pathlib import Path

    from grapnet import Commit
    from grapnet.spaces import Adopted, Space

LONGEST = 56  # characters of the name of a space or tensor
_MOST = 6  # spaces or tensors that one line names


def summary(net: "Adopted") -> str:
    """Returns a model in one line."""
    count = net.count()
    spaces = counted(len(net.spaces), "space")
    nodes = counted(count.nodes, "node")
    parameters = counted(len(list(net.parameters())), "Parameter")
    numbers = f"{count.parameters:,} numbers in {parameters}"
    return f"whole model ({spaces}, {nodes}, {numbers}, version {net.version:,})"


def census(net: "Adopted") -> dict[str, Any]:
    """Returns the facts about a model that are in its file."""
    count = net.count()
    tensors = [*net.parameters(), *net.buffers()]
    numbers = {}
    for name, (first, now) in net.numbers.items():
        numbers[name] = {"first": first, "now": now}
    return {
        "version": net.version,
        "commits": len(net.history),
        "undoable": len(net.journal.undoable),
        "redoable": len(net.journal.redoable),
        "dtype": few(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})),
        "trainable": count.trainable,
        "frozen": count.frozen,
        "tensors": len(tensors),
        "bytes": count.bytes,
        "numbers": numbers,
        "spaces": [_space(space) for space in net.spaces],
        "opened": _opened(net),
        "owners": owner_rows(net),
    }


def _space(space: "Space") -> dict[str, Any]:
    verdict = str(space.verdict)
    if space.pins:
        verdict = f"pinned: {space.pins[0]}"
    return {
        "space": space.name,
        "nodes": len(space),
        "adopted_with": space.first_size,
        "rows_per_node": space.rows_per_node,
        "writers": len(space.writers),
        "readers": len(space.readers),
        "riders": len(space.riders),
        "verdict": verdict,
    }


def _opened(net: "Adopted") -> list[dict[str, Any]]:
    """Returns the weights of which relations are cut or frozen."""
    rows = []
    for weight in net.transitions:
        if weight.density == 1 and len(weight.frozen_at) == 0:
            continue
        rows.append(
            {
                "weight": weight.name,
                "relations": weight.size,
                "of": weight.n_parents * weight.reach,
                "density": weight.density,
                "frozen": len(weight.frozen_at),
            }
        )
    return rows


def owner_rows(net: "Adopted", wanted: str | None = None) -> list[dict[str, Any]]:
    """Returns the number of nodes of every owner, or of one owner, a row for each space."""
    rows = []
    for space in net.spaces:
        for owner, count in Counter(space.owners).items():
            if owner is not None and wanted in (None, owner):
                rows.append({"owner": owner, "space": space.name, "nodes": count})
    return rows


def about(found: Mapping[str, Any], way_back: str) -> list[str]:
    """Returns the lines about a model that `census` has described."""
    sizes = f"{found['bytes']:,} bytes in {counted(found['tensors'], 'tensor')}, {found['dtype']}"
    facts: list[list[Cell]] = [
        ["version", f"{found['version']:,}{way_back}"],
        ["parameters", f"{found['trainable']:,} trainable, {found['frozen']:,} frozen"],
        ["memory", sizes],
    ]
    if found["numbers"]:
        changed = Counter(name.rpartition(".")[2] for name in found["numbers"])
        listed = [f"{name} of {counted(count, 'module')}" for name, count in changed.items()]
        facts.append(["followed", few(listed)])
    lines = ["", f"The model: {counted(len(found['spaces']), 'space')}"]
    lines += table(["", ""], facts)[1:]
    lines += ["", "Spaces", *_space_table(found["spaces"])]
    if found["opened"]:
        lines += ["", "Opened weights", *table_of(found["opened"], longest=LONGEST)]
    if found["owners"]:
        lines += ["", "Owners", *table_of(found["owners"], longest=LONGEST)]
    return lines


def _space_table(spaces: list[dict[str, Any]]) -> list[str]:
    rows: list[list[Cell]] = []
    for space in spaces:
        nodes = f"{space['nodes']:,}"
        if space["adopted_with"] != space["nodes"]:
            nodes += f" of {space['adopted_with']:,}"
        if space["rows_per_node"] > 1:
            nodes += f" × {space['rows_per_node']:,}"
        sides = [space["writers"], space["readers"], space["riders"]]
        rows.append([space["space"], nodes, *sides, space["verdict"]])
    titles = ["space", "nodes", "writers", "readers", "riders", "verdict"]
    return table(titles, rows, longest=LONGEST)


def words(net: "Adopted", commit: "Commit") -> str:
    """Returns what a commit did, in words of spaces and tensors; only the kinds of its operations
    where the file has no more of it.
    """
    if commit.undoes is not None:
        return f"back to before {commit.undoes:,}"
    counts: dict[str, int | None] = {}
    for operation in commit.operations:
        text, count = _phrase(net, operation)
        earlier = counts.get(text)
        if text and count is not None and earlier is not None:
            count += earlier
        if text:
            counts[text] = count
    parts = []
    for text, count in counts.items():
        parts.append(text if count is None else text.replace("#", f"{count:,}", 1))
    return few(parts, _MOST)


def _phrase(net: "Adopted", operation: Mapping[str, Any]) -> tuple[str, int | None]:
    """Returns an operation in words, with # in the place of a count."""
    kind = str(operation["operation"])
    layer = operation.get("layer")
    if isinstance(layer, int) and layer < len(net.spaces):
        name = net.spaces[layer].name
        verb = {"remove_nodes": "−# of", "add_nodes": "+# in"}.get(kind)
        if verb is None:
            verb = f"{kind.replace('_', ' ')} of # in"
        return f"{verb} {name}", int(operation["nodes"])
    t = operation.get("transition")
    tensor = operation.get("tensor")
    if isinstance(t, int) and t < len(net.transitions):
        tensor = net.transitions[t].name
    if tensor is not None:
        count = operation.get("relations", operation.get("cells"))
        if count is None:
            return f"{kind} {tensor}", None
        return f"{kind} # in {tensor}", int(count)
    if kind == "insert" and "after" in operation:
        return f"insert behind {_path(operation['path'], operation['after'])}", None
    if kind == "remove" and "index" in operation:
        return f"remove {_path(operation['path'], operation['index'])}", None
    if kind in ("freeze", "unfreeze") and "nodes" in operation:
        return f"{kind} # nodes", int(operation["nodes"])
    if kind == "remark":
        return "", None
    return kind.replace("_", " "), None


def _path(container: str, index: int) -> str:
    return f"{container}.{index}".lstrip(".")


def compared(a: "Adopted", b: "Adopted") -> dict[str, dict[str, Any]]:
    """Returns what differs between two models, by what it is."""
    from grapnet.spaces import differences

    found = {}
    for what, difference in differences(a, b).items():
        found[what] = {
            "added": difference.added,
            "removed": difference.removed,
            "changed": difference.changed,
            "largest": difference.largest,
            "first_added": list(difference.names_added[: _MOST + 1]),
            "first_removed": list(difference.names_removed[: _MOST + 1]),
            "first_changed": list(difference.names_changed[: _MOST + 1]),
        }
    return found


def sizes_of(net: "Adopted") -> dict[str, Any]:
    """Returns the sizes that an edit of a file can change, to be compared before and after it."""
    relations = {}
    for weight in net.transitions:
        relations[weight.name] = relations.get(weight.name, 0) + weight.size
    owners: Counter[str] = Counter()
    for row in owner_rows(net):
        owners[row["owner"]] += row["nodes"]
    return {
        "version": net.version,
        "nodes": {space.name: len(space) for space in net.spaces},
        "relations": relations,
        "frozen": net.count().frozen,
        "owners": dict(owners),
    }


def size_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[list[Cell]]:
    """Returns the sizes before and after an edit."""
    rows: list[list[Cell]] = []
    for part in ("nodes", "relations"):
        for name in after[part]:
            rows.append([f"{part} of {name}", before[part].get(name, 0), after[part][name]])
    rows.append(["frozen numbers", before["frozen"], after["frozen"]])
    for owner in dict.fromkeys([*before["owners"], *after["owners"]]):
        counts = [before["owners"].get(owner, 0), after["owners"].get(owner, 0)]
        rows.append([f"nodes of {owner}", *counts])
    return rows


def needs_code(path: "Path", why: str, *lines: str) -> CommandError:
    """Returns the error of a command that cannot work without the code of a model.

    Args:
        path: the file.
        why: the message.
        lines: what does it in Python, where `net` is the adopted model.
    """
    restore = f'net = gn.adopt(model, x); gn.restore("{path}", into=net)'
    return CommandError(
        why, "\n  ".join(["with the code of the model, in Python:", restore, *lines])
    )
