"""`grapnet inspect`: what a checkpoint holds."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

import grapnet as gn

from . import _whole as whole
from ._command import (
    Cell,
    Command,
    CommandError,
    Outcome,
    add_file,
    counted,
    few,
    open_file,
    plain,
    positive,
    table,
    table_of,
    title,
)

if TYPE_CHECKING:
    from grapnet.checkpoint import Archive
    from grapnet.spaces import Adopted


def _configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--owner", metavar="NAME", help="only the nodes of one owner")
    parser.add_argument(
        "--batch",
        type=positive,
        default=256,
        metavar="N",
        help="batch size for the choice of backends (default: 256)",
    )


def _run(given: argparse.Namespace) -> Outcome:
    file = open_file(given.file)
    data: dict[str, Any] = {
        "file": str(given.file),
        "bytes": file.nbytes,
        "sizes": dict(file.sizes),
        "kind": _kind(file),
        "undo": file.undo,
        "history": file.history,
        "extras": dict(file.kinds),
        "nets": {},
    }
    undo = "kept" if file.undo else "not kept"
    content = "a whole model" if file.is_adopted else counted(len(file.nets), "net")
    lines = [
        f"{given.file}: {content}, {file.nbytes:,} bytes",
        f"  undo: {undo}; history: {file.history}",
    ]
    if given.owner is None:
        lines += _about_file(data)
    if file.is_adopted:
        found = _census_of_model(file.adopted, given.owner)
        data["model"] = found
        if given.owner is None:
            lines += whole.about(found, _way_back(found))
        else:
            lines += ["", f"{given.owner} in the model", *table_of(found["owners"])]
        return Outcome("\n".join(lines), data)
    for place, net in file.nets.items():
        if given.owner is None:
            found = _census(net.to(given.device), given.batch)
            lines += _about_net(place, found, given.batch)
            data["nets"][place] = found
        elif given.owner in net.owners:
            found = _census_of_owner(net, given.owner)
            shown = [{**row, "uids": _range(row["uids"])} for row in found]
            lines += ["", f"{given.owner} in the {title(place)}", *table_of(shown)]
            data["nets"][place] = found
    if not data["nets"]:
        owners = [owner for net in file.nets.values() for owner in net.owners]
        raise CommandError(f"no node has the owner {given.owner!r}", f"owners are: {few(owners)}")
    return Outcome("\n".join(lines), data)


def _about_file(data: dict[str, Any]) -> list[str]:
    rows: list[list[Cell]] = [[part, size] for part, size in data["sizes"].items() if size]
    lines = ["", "Parts of the file", *table(["part", "bytes"], rows)]
    if data["extras"]:
        what = "net" if data["kind"] == "net" else "model"
        rows = [[name, kind] for name, kind in data["extras"].items()]
        lines += ["", f"Beside the {what}", *table(["name", "what it is"], rows)]
    return lines


def _census(net: "gn.GrapNet", batch: int) -> dict[str, Any]:
    """Returns the facts about a net that can be known without running it."""
    count = net.count()
    return {
        "sizes": net.sizes,
        "version": net.version,
        "commits": len(net.history),
        "undoable": len(net.journal.undoable),
        "redoable": len(net.journal.redoable),
        "dtype": str(net.execution.dtype).removeprefix("torch."),
        "relations": count.relations,
        "biases": count.biases,
        "frozen": count.frozen,
        "trainable": count.trainable,
        "flops": count.flops,
        "bytes": count.bytes,
        "layers": [_layer(net, number) for number in range(len(net.layers))],
        "transitions": [_transition(net, t) for t in range(len(net.transitions))],
        "owners": [_owner(net, owner) for owner in [*net.owners, None]],
        "backends": plain(net.execution.describe(batch)),
    }


def _layer(net: "gn.GrapNet", number: int) -> dict[str, Any]:
    layer = net.layers[number]
    return {
        "layer": number,
        "nodes": len(layer),
        "uids": _range(layer.uids.tolist()),
        "dropout": layer.dropout,
        "biases_frozen": len(layer.frozen_at) if number > 0 else 0,
        "activation": _activations(layer) or layer.default_activation,
    }


def _transition(net: "gn.GrapNet", t: int) -> dict[str, Any]:
    transition = net.transitions[t]
    return {
        "layers": f"{transition.source} → {transition.target}",
        "relations": transition.size,
        "density": transition.density,
        "frozen": len(transition.frozen_at),
    }


def _owner(net: "gn.GrapNet", owner: str | None) -> dict[str, Any]:
    nodes = net.select(owner=owner)
    outgoing = nodes.outgoing()
    return {
        "owner": owner,
        "nodes": len(nodes),
        "outgoing": len(outgoing),
        "incoming": len(nodes.incoming()),
        "outgoing_frozen": int(outgoing.frozen.sum()),
    }


def _kind(file: "Archive") -> str:
    if file.is_adopted:
        return "whole model"
    return "model" if file.is_model else "net"


def _census_of_model(net: "Adopted", owner: str | None) -> dict[str, Any]:
    """Returns the facts about a whole model, or which nodes of it one owner has."""
    if owner is None:
        return plain(whole.census(net))
    rows = whole.owner_rows(net, owner)
    if not rows:
        owners = {row["owner"]: None for row in whole.owner_rows(net)}
        raise CommandError(f"no node has the owner {owner!r}", f"owners are: {few(owners)}")
    return {"owners": rows}


def _way_back(found: dict[str, Any]) -> str:
    if found["undoable"] or found["redoable"]:
        return f"; {found['undoable']:,} can be undone, {found['redoable']:,} redone"
    if found["commits"]:
        return "; none can be undone: gn.save(..., undo=True) keeps what that needs"
    return ""


def _about_net(place: str, found: dict[str, Any], batch: int) -> list[str]:
    facts: list[list[Cell]] = [
        ["version", f"{found['version']:,}{_way_back(found)}"],
        ["parameters", f"{found['trainable']:,} trainable, {found['frozen']:,} frozen"],
        ["memory", f"{found['bytes']:,} bytes, {found['dtype']}"],
        ["one sample", f"{found['flops']:,} floating-point operations forward"],
    ]
    lines = ["", f"The {title(place)}: {'-'.join(map(str, found['sizes']))}"]
    lines += table(["", ""], facts)[1:]
    lines += ["", "Layers", *table_of(found["layers"])]
    lines += ["", "Relations", *table_of(found["transitions"])]
    if len(found["owners"]) > 1:
        lines += ["", "Owners", *table_of(found["owners"])]
    rows: list[list[Cell]] = []
    for one in found["backends"]:
        layers = found["transitions"][one["transition"]]["layers"]
        rows.append([layers, one["chosen"], one["runs"], one["why"]])
        for name, reasons in one["refused"].items():
            rows.append(["", "", f"not {name}", "; ".join(reasons)])
    lines += ["", f"Backends at batch {batch:,}"]
    return lines + table(["layers", "chosen", "runs", "why"], rows)


def _census_of_owner(net: "gn.GrapNet", owner: str) -> list[dict[str, Any]]:
    """Returns where the nodes of one owner are, a row for each layer."""
    rows = []
    for number, uids in net.select(owner=owner)._uids_by_layer.items():
        nodes = net.select(layer=number, owner=owner)
        outgoing = nodes.outgoing()
        incoming = nodes.incoming()
        row = {
            "layer": number,
            "nodes": len(nodes),
            "uids": uids.tolist(),
            "outgoing": len(outgoing),
            "incoming": len(incoming),
            "frozen": int((outgoing | incoming).frozen.sum()),
            "activation": _activations(nodes),
        }
        rows.append(row)
    return rows


def _activations(nodes: "gn.NodeSet") -> str:
    counts = Counter(nodes.activations)
    if len(counts) == 1:
        return next(iter(counts))
    return few(f"{name} {count:,}" for name, count in counts.items())


def _range(uids: list[int]) -> str:
    """Returns ascending uids as text."""
    if len(uids) < 2:
        return few(map(str, uids))
    gaps = "" if uids[-1] - uids[0] + 1 == len(uids) else ", with gaps"
    return f"{uids[0]} to {uids[-1]}{gaps}"


COMMANDS = (
    Command(
        "inspect",
        "size, layers or spaces, relations, owners and backends of a checkpoint",
        "Look at a net",
        _configure,
        _run,
        (
            "inspect runs/demo/digits.safetensors",
            "inspect net.safetensors --owner task-1",
            "inspect net.safetensors --json",
        ),
    ),
)
