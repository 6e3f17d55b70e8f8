"""`grapnet inspect`: what a checkpoint holds."""

import argparse
from typing import Any

import grapnet as gn

from .census import MOST_RELATIONS, census, census_of_owner
from .columns import Cell, counted, in_bytes, pairs, table
from .command import Command, CommandError, Outcome
from .contents import Contents, read_contents, title
from .files import add_file
from .selection import require_owner


def _configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--owner", metavar="NAME", help="tell only of the nodes of one owner")
    parser.add_argument(
        "--batch",
        type=int,
        default=256,
        metavar="N",
        help="samples at once, for the choice of backends (default: 256)",
    )


def _run(given: argparse.Namespace) -> Outcome:
    if given.batch < 1:
        raise CommandError(
            f"--batch is a whole number, at least 1, got {given.batch}", "leave it out for 256"
        )
    contents = read_contents(given.file, given.device)
    lines, data = _file(contents, with_extras=given.owner is None)
    data["nets"] = {}
    for place, net in _owned(contents, given.owner).items():
        if given.owner is None:
            told = census(net, given.batch)
            lines += ["", *_whole(contents, place, net, told, given.batch)]
        else:
            told = census_of_owner(net, given.owner)
            lines += ["", *_narrowed(place, told)]
        data["nets"][place] = told | {"also_at": contents.also_at[place]}
    return Outcome("\n".join(lines), data)


def _owned(contents: Contents, owner: str | None) -> dict[str, gn.GrapNet]:
    """Returns the nets to tell of; raises CommandError when no net has that owner."""
    if owner is None:
        return contents.nets
    require_owner(
        owner, dict.fromkeys(name for net in contents.nets.values() for name in net.owners)
    )
    return {place: net for place, net in contents.nets.items() if owner in net.owners}


def _file(contents: Contents, *, with_extras: bool) -> tuple[list[str], dict[str, Any]]:
    kept = [*contents.extras, *([contents.beside] if contents.beside else [])]
    what = f"a model with {counted(len(contents.nets), 'net')}" if contents.is_model else "one net"
    lines = [
        str(contents.path),
        f"  {what}, {in_bytes(contents.bytes)}, checkpoint format {contents.format}",
    ]
    if kept and with_extras:
        rows: list[list[Cell]] = [[one.name, one.bytes or None, one.made_by] for one in kept]
        lines += ["", "Beside the nets" if contents.is_model else "Beside the net"]
        lines += table(["name", "bytes", "what it is"], rows)
    return lines, {
        "file": str(contents.path),
        "bytes": contents.bytes,
        "format": contents.format,
        "kind": "model" if contents.is_model else "net",
        "extras": {
            one.name: {"saved_from": one.made_by, "bytes": one.bytes} for one in contents.extras
        },
        "beside": (
            contents.beside and {"holds": contents.beside.made_by, "bytes": contents.beside.bytes}
        ),
    }


def _whole(
    contents: Contents, place: str, net: gn.GrapNet, told: dict[str, Any], batch: int
) -> list[str]:
    also = f" (also at {', '.join(contents.also_at[place])})" if contents.also_at[place] else ""
    way_back = f"{told['undoable']:,} can be undone, {told['redoable']:,} redone"
    if told["commits"] and not told["undoable"] and not told["redoable"]:
        way_back = "none can be undone: gn.save(..., undo=True) keeps what that needs"
    memory = told["bytes"]
    facts = {
        "version": (
            f"{told['version']:,}: {counted(told['commits'], 'commit')}, {way_back}"
            if told["commits"]
            else "0: no edits"
        ),
        "parameters": (
            f"{told['parameters']:,} trainable, {told['frozen']:,} frozen, {told['dtype']}"
        ),
        "memory": (
            f"{in_bytes(memory['coordinates'])} of values and {in_bytes(memory['wiring'])} of"
            " wiring"
        ),
        "one sample": f"{told['flops']:,} floating-point operations forward",
    }
    lines = [f"The {title(place)}: {'-'.join(map(str, told['sizes']))}{also}", *pairs(facts)]
    lines += ["", "Layers", *_table_of_layers(told["layers"])]
    lines += ["", "Relations", *_table_of_relations(told["transitions"])]
    if net.owners:
        lines += ["", "Owners", *_table_of_owners(told["owners"])]
    return [
        *lines,
        "",
        f"Backends at batch {batch:,} on {net.device}",
        *_backends(told["backends"]),
    ]


def _table_of_layers(layers: list[dict[str, Any]]) -> list[str]:
    rows: list[list[Cell]] = []
    for layer in layers:
        names = ", ".join(
            f"{name} {count:,}" if len(layer["activations"]) > 1 else name
            for name, count in layer["activations"].items()
        )
        share = layer["frozen_biases"] / layer["biases"] if layer["biases"] else None
        rows.append(
            [
                layer["layer"],
                layer["nodes"],
                _uids(layer["first_and_last_uid"], layer["nodes"]),
                layer["dropout"] or None,
                share,
                names,
            ]
        )
    return _sparing(
        ["layer", "nodes", "uids", "dropout", "biases frozen", "activation"], rows, 3, 4
    )


def _table_of_relations(transitions: list[dict[str, Any]]) -> list[str]:
    rows: list[list[Cell]] = []
    for one in transitions:
        share = one["frozen"] / one["relations"] if one["relations"] else None
        rows.append([_place(one), one["relations"], one["density"], share, _families(one)])
    return _sparing(
        ["layers", "relations", "density", "frozen", "families: nodes × children in common"],
        rows,
        3,
    )


def _table_of_owners(owners: dict[str, dict[str, int]]) -> list[str]:
    rows: list[list[Cell]] = []
    for name, one in owners.items():
        share = one["frozen"] / one["outgoing"] if one["outgoing"] else None
        rows.append([_shown(name), one["nodes"], one["outgoing"], share, one["incoming"]])
    return _sparing(["owner", "nodes", "relations owned", "frozen of these", "received"], rows, 3)


def _sparing(titles: list[str], rows: list[list[Cell]], *spared: int) -> list[str]:
    """Returns a table without those of the columns `spared` that have nothing to say in any row."""
    kept = [n for n in range(len(titles)) if n not in spared or any(row[n] for row in rows)]
    return table([titles[n] for n in kept], [[row[n] for n in kept] for row in rows])


def _uids(ascending: list[int], nodes: int) -> str | None:
    """Returns the uids of nodes of a layer, of which at least the first and the last are given."""
    if not ascending:
        return None
    first, last = ascending[0], ascending[-1]
    told = f"{first}" if first == last else f"{first} to {last}"
    return told if last - first + 1 == nodes else f"{told}, with gaps"


def _place(one: dict[str, Any]) -> str:
    return f"{one['transition']} → {one['transition'] + 1}"


def _families(one: dict[str, Any]) -> str:
    """Returns the largest families of a transition; nodes whose children nobody else has are
    none.
    """
    if one["families"] is None:
        return f"not looked for above {MOST_RELATIONS:,} relations"
    large = [family for family in one["largest_families"] if family["members"] > 1]
    counts = [f"{f['families']:,} of " if f["families"] > 1 else "" for f in large]
    blocks = [
        f"{count}{f['members']:,} × {f['children']:,}"
        for count, f in zip(counts, large, strict=True)
    ]
    others = one["families"] - sum(family["families"] for family in large)
    return ", ".join(blocks) + (f", {others:,} others" if others else "") if large else "none"


def _backends(backends: list[dict[str, Any]]) -> list[str]:
    rows: list[list[Cell]] = []
    for one in backends:
        rows.append([_place(one), one["chosen"], one["runs"], one["why"]])
        for name, reasons in one["refused"].items():
            rows.append(["", "", f"not {name}", "; ".join(reasons)])
    return table(["layers", "asked for", "runs", "why"], rows)


def _narrowed(place: str, told: dict[str, Any]) -> list[str]:
    head = f"{_shown(told['owner'])} in the {title(place)}: {counted(told['nodes'], 'node')}"
    layers: list[list[Cell]] = [
        [
            one["layer"],
            f"{one['nodes']:,} of {one['of']:,}",
            _uids(one["uids"], one["nodes"]),
            one["frozen_biases"],
            ", ".join(one["activations"]),
        ]
        for one in told["layers"]
    ]
    wires: list[list[Cell]] = []
    for one in told["transitions"]:
        sides = [f"to {_shown(name)} {count:,}" for name, count in one["to"].items()]
        sides += [f"from {_shown(name)} {count:,}" for name, count in one["from"].items()]
        wires.append(
            [_place(one), one["outgoing"], one["incoming"], one["frozen"], ", ".join(sides)]
        )
    lines = [
        head,
        *_sparing(["layer", "nodes", "uids", "biases frozen", "activation"], layers, 3),
        "",
        "Relations",
    ]
    return lines + _sparing(["layers", "owned", "received", "frozen", "with"], wires, 3)


def _shown(owner: str) -> str:
    """Returns the name of an owner, in quotes where nothing of it would be seen."""
    return owner if owner.strip() else repr(owner)


COMMANDS: tuple[Command, ...] = (
    Command(
        "inspect",
        "layers, relations, owners, memory and backends of a checkpoint",
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
