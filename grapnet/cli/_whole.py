"""What the commands print of whole models: files that `gn.save` wrote of adopted models."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._command import Cell, CommandError, counted, few, table, table_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from grapnet import Commit
    from grapnet.core._grid import Grid
    from grapnet.core._grid_map import GridMap
    from grapnet.spaces import Adopted, Space

LONGEST = 56  # characters of the name of a space or tensor
_MOST = 6  # spaces or tensors that one line names
# Kinds of numbers in a tensor; the last is in one of two models only, with its node.
_CUT = 0
_FREE = 1
_ABSENT = 3


def summary(net: "Adopted") -> str:
    """Returns a model in one line."""
    trainable, frozen = net._count_numbers()
    spaces = counted(len(net.spaces), "space")
    nodes = counted(sum(net.sizes), "node")
    numbers = f"{trainable + frozen:,} numbers in {counted(len(net._stores()), 'Parameter')}"
    return f"whole model ({spaces}, {nodes}, {numbers}, version {net.version:,})"


def census(net: "Adopted") -> dict[str, Any]:
    """Returns the facts about a model that its file tells."""
    trainable, frozen = net._count_numbers()
    tensors = [grid.tensor for grid in net._grids().values()]
    numbers = []
    for (module, name), first in net._first_numbers.items():
        now = net._attribute(module, name)
        if now != first:
            numbers.append({"module": module, "name": name, "first": first, "now": now})
    return {
        "version": net.version,
        "commits": len(net.history),
        "undoable": len(net.journal.undoable),
        "redoable": len(net.journal.redoable),
        "dtype": few(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})),
        "trainable": trainable,
        "frozen": frozen,
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "numbers": numbers,
        "spaces": [_space(net, space) for space in net.spaces],
        "opened": _opened(net),
        "owners": owner_rows(net),
    }


def _space(net: "Adopted", space: "Space") -> dict[str, Any]:
    verdict = str(space.verdict)
    if space.pins:
        verdict = f"pinned: {space.pins[0]}"
    return {
        "space": space.name,
        "nodes": len(space),
        "adopted_with": net._typed.atoms[space._atom].size,
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
        if weight.grid.opened is None:
            continue
        rows.append(
            {
                "weight": weight.name,
                "relations": weight.size,
                "of": weight.n_parents * weight.n_children,
                "density": weight.density,
                "frozen": len(weight.frozen_at),
            }
        )
    return rows


def owner_rows(net: "Adopted", wanted: str | None = None) -> list[dict[str, Any]]:
    """Returns which nodes have which owner, or one owner, a row for each space."""
    rows = []
    for space in net.spaces:
        for owner, count in Counter(space._owner_names).items():
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
        changed = Counter(one["name"] for one in found["numbers"])
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
    """Returns what differs between two models, by what it is; empty if nothing does."""
    differences: dict[str, dict[str, Any]] = {}
    partners = _partners(a, b)
    for space in b.spaces:
        if not any(space is partner for partner in partners.values()):
            differences[f"space {space.name}"] = _counts(added=1)
    for space in a.spaces:
        if space.name in partners:
            differences |= _compared_spaces(space, partners[space.name])
        else:
            differences[f"space {space.name}"] = _counts(removed=1)
    differences |= _compared_tensors(a, b)
    if a._typed.axes != b._typed.axes:
        return differences
    keys = {*a._first_numbers, *b._first_numbers}
    numbers = [key for key in sorted(keys) if a._attribute(*key) != b._attribute(*key)]
    if numbers:
        differences["numbers of modules"] = _counts(changed=len(numbers))
        paths = [".".join(key).lstrip(".") for key in numbers]
        differences["numbers of modules"]["first_changed"] = paths[: _MOST + 1]
    return differences


def _partners(a: "Adopted", b: "Adopted") -> "dict[str, Space]":
    """Returns for each space of a model the same one of another, by its name: the one that has
    nodes of it, whatever it is called there, or the one of that name.
    """
    by_uid = {}
    for space in b.spaces:
        by_uid |= dict.fromkeys(space.uid.tolist(), space)
    found: dict[str, Space] = {}
    for space in a.spaces:
        shared = [by_uid[uid] for uid in space.uid.tolist() if uid in by_uid]
        if shared:
            found[space.name] = shared[0]
    taken = set(map(id, found.values()))
    by_name = {space.name: space for space in b.spaces if id(space) not in taken}
    for space in a.spaces:
        if space.name not in found and space.name in by_name:
            found[space.name] = by_name[space.name]
    return found


def _compared_spaces(mine: "Space", other: "Space") -> dict[str, dict[str, Any]]:
    import torch

    found: dict[str, dict[str, Any]] = {}
    if mine.name != other.name:
        found[f"space {mine.name}, now {other.name}"] = _counts(changed=1)
    gone = mine.uid[~torch.isin(mine.uid, other.uid)]
    come = other.uid[~torch.isin(other.uid, mine.uid)]
    if len(gone) or len(come):
        counts = _counts(added=len(come), removed=len(gone))
        counts["first_added"] = [str(uid) for uid in come[: _MOST + 1].tolist()]
        counts["first_removed"] = [str(uid) for uid in gone[: _MOST + 1].tolist()]
        found[f"nodes of {other.name}"] = counts
    owners = dict(zip(other.uid.tolist(), other._owner_names, strict=True))
    turned = 0
    for uid, owner in zip(mine.uid.tolist(), mine._owner_names, strict=True):
        turned += uid in owners and owners[uid] != owner
    if turned:
        found[f"owners of {other.name}"] = _counts(changed=turned)
    return found


def _compared_tensors(a: "Adopted", b: "Adopted") -> dict[str, dict[str, Any]]:
    """Returns which tensors differ, and how much where both models have a number."""
    ours = a._grids()
    theirs = b._grids()
    if a._typed.axes != b._typed.axes:
        # After an edit of blocks, a tensor has the name that another had before.
        removed = [name for name in ours if name not in theirs]
        added = [name for name in theirs if name not in ours]
        found = _counts(added=len(added), removed=len(removed), changed=1)
        found["first_added"] = added[: _MOST + 1]
        found["first_removed"] = removed[: _MOST + 1]
        found["first_changed"] = ["other axes, so values are not compared"]
        return {"tensors": found}
    differences: dict[str, dict[str, Any]] = {}
    maps = _maps_between(a, b)
    values = _counts()
    names = []
    for name, grid in ours.items():
        numbers = grid.whole
        kinds = _kinds(grid)
        if name in maps:
            numbers = maps[name].carry(numbers)
            kinds = maps[name].carry(kinds, _ABSENT)
        others = _kinds(theirs[name])
        differences |= _compared_kinds(name, kinds, others)
        is_shared = (kinds != _CUT) & (kinds != _ABSENT) & (others != _CUT)
        largest = _largest_change(numbers[is_shared], theirs[name].whole[is_shared], values)
        if largest is not None:
            names.append(name)
            values["largest"] = max(values["largest"] or 0.0, largest)
    if names:
        values["first_changed"] = names[: _MOST + 1]
        differences[f"numbers in {counted(len(names), 'tensor')}"] = values
    return differences


def _maps_between(a: "Adopted", b: "Adopted") -> "dict[str, GridMap]":
    """Returns how tensors move from one model to another of the same axes, by the uids of nodes."""
    import torch

    from grapnet.core._index_map import IndexMap

    moved = {}
    for mine, other in zip(a.spaces, b.spaces, strict=True):
        gone = (~torch.isin(mine.uid, other.uid)).nonzero().flatten().int()
        come = (~torch.isin(other.uid, mine.uid)).nonzero().flatten().int()
        if len(gone) or len(come):
            moved[mine._atom] = IndexMap(len(mine), len(other), gone, come)
    return a._maps_of(moved, a._atom_sizes(), b._atom_sizes())


def _kinds(grid: "Grid") -> "Tensor":
    """Returns for every number of a tensor whether it is cut, free or frozen."""
    import torch

    if grid.opened is None:
        return torch.full(grid.shape, _FREE, dtype=torch.uint8)
    pattern = grid.opened.pattern
    return pattern.kinds.repeat_interleave(pattern.width).view(pattern.shape)


def _compared_kinds(name: str, kinds: "Tensor", others: "Tensor") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    is_shared = kinds != _ABSENT
    was_cut = is_shared & (kinds == _CUT)
    is_cut = is_shared & (others == _CUT)
    added = int((was_cut & ~is_cut).sum())
    removed = int((is_cut & ~was_cut).sum())
    if added or removed:
        found[f"cells of {name}"] = _counts(added=added, removed=removed)
    turned = is_shared & ~was_cut & ~is_cut & (kinds != others)
    if turned.any():
        found[f"frozen in {name}"] = _counts(changed=int(turned.sum()))
    return found


def _largest_change(first: "Tensor", second: "Tensor", values: dict[str, Any]) -> float | None:
    """Adds the number of values that differ; returns the largest finite change, None without."""
    import torch

    # Bit for bit, so that NaN equals itself and 0 differs from -0.
    first = first.double()
    second = second.double()
    differs = first.view(torch.int64) != second.view(torch.int64)
    if not differs.any():
        return None
    values["changed"] += int(differs.sum())
    changes = (first - second).abs()[differs]
    return float(changes[changes.isfinite()].amax()) if changes.isfinite().any() else 0.0


def _counts(added: int = 0, removed: int = 0, changed: int = 0) -> dict[str, Any]:
    return {"added": added, "removed": removed, "changed": changed, "largest": None}


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
        "frozen": net._count_numbers()[1],
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
