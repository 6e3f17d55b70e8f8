"""Edits of a checkpoint: cut, freeze, unfreeze, remove, prune, set-owner, undo, redo, compact."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grapnet as gn

from . import _whole as whole
from ._command import (
    Cell,
    Command,
    CommandError,
    Outcome,
    add_file,
    add_output,
    add_place,
    few,
    first_line,
    graphs_of,
    open_file,
    place_of,
    positive,
    require_free,
    table,
    title,
)

if TYPE_CHECKING:
    from torch import Tensor

    from grapnet.checkpoint import Archive
    from grapnet.spaces import Adopted

_NODES = ("owner", "layer", "space", "node", "all")
_RELATIONS = ("transition", "module", "relation", "smallest")
# Options that the journal repeats where --reason gives no other text.
_REPEATED = (
    *("owner", "layer", "space", "node", "all", "childless", "side", "transition", "module"),
    *(
        "relation",
        "smallest",
        "fraction",
        "pattern",
        "by",
        "scope",
        "compare",
        "seed",
        "to",
        "none",
    ),
    "orphans",
)

Act = Callable[["gn.GrapNet | Adopted", argparse.Namespace], None]


def _add_destination(parser: argparse.ArgumentParser) -> None:
    """Adds the file, and where to write the edited one."""
    add_file(parser)
    add_output(parser, "where to write the edited checkpoint")
    parser.add_argument("--in-place", action="store_true", help="replace FILE")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would happen, and write nothing"
    )


def _add_shared(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all edits have."""
    _add_destination(parser)
    parser.add_argument(
        "--reason", metavar="TEXT", help="why, for the journal (default: the options)"
    )
    add_place(parser)
    kept = parser.add_argument_group("what NEW keeps", "(default: what FILE keeps)")
    kept.add_argument(
        "--undo",
        action=argparse.BooleanOptionalAction,
        help="what undo needs, cut weights included",
    )
    kept.add_argument(
        "--history",
        choices=("outline", "full"),
        help="keep the nodes and relations of each commit, or only their numbers",
    )
    kept.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="NAME",
        help="omit an extra from the new file (repeatable)",
    )
    kept.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="NAME",
        help="keep an extra unchanged that cannot follow the edit (repeatable)",
    )


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose nodes."""
    group = parser.add_argument_group(
        "which nodes", "repeating an option widens the selection, different options narrow it"
    )
    group.add_argument("--owner", action="append", metavar="NAME", help="nodes of an owner")
    group.add_argument(
        "--layer", action="append", type=int, metavar="N", help="nodes of a layer; 0 is the input"
    )
    group.add_argument(
        "--space", action="append", metavar="NAME", help="nodes of a space of a whole model"
    )
    group.add_argument("--node", action="append", type=int, metavar="UID", help="a node, by uid")
    group.add_argument("--all", action="store_true", help="all nodes")


def _add_relations(parser: argparse.ArgumentParser, about: str) -> None:
    """Adds the options that choose relations of nodes; `about` describes the default."""
    group = parser.add_argument_group("which of their relations", about)
    side = group.add_mutually_exclusive_group()
    for name, meaning in (
        ("outgoing", "those the nodes own"),
        ("incoming", "those that lead to them"),
        ("both", "both"),
    ):
        side.add_argument(f"--{name}", dest="side", action="store_const", const=name, help=meaning)
    group.add_argument(
        "--transition", action="append", type=int, metavar="T", help="relations from layer T"
    )
    group.add_argument(
        "--module",
        action="append",
        metavar="NAME",
        help="relations that a module or tensor of a whole model holds",
    )
    group.add_argument(
        "--relation", action="append", metavar="PARENT:CHILD", help="one relation, by uids"
    )
    group.add_argument(
        "--smallest", type=_share, metavar="F", help="only the share with the smallest |weight|"
    )


def _add_losses(parser: argparse.ArgumentParser) -> None:
    """Adds the options of edits that remove relations."""
    parser.add_argument(
        "--orphans",
        action="store_true",
        help="then remove hidden nodes without parents",
    )
    parser.add_argument(
        "--allow-dead",
        action="store_true",
        help="allow removing the last relation of a transition or the last parent of an output",
    )


def _share(text: str) -> float:
    """Reads a share on the command line."""
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


def _pattern(text: str) -> str:
    """Reads a pattern on the command line."""
    kept, _, of = text.partition(":")
    if not (kept.isdigit() and of.isdigit() and int(kept) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text} is not a pattern KEPT:OF, such as 2:4")
    return text


def _chosen_nodes(net: "gn.GrapNet | Adopted", given: argparse.Namespace) -> "gn.NodeSet":
    """Returns the nodes that the options name; all nodes where they name none."""
    import torch

    nodes = net.select(layer=given.layer)
    if given.space:
        nodes &= net.select(layer=[_space(net, name) for name in given.space])
    if given.owner:
        owned = net.select(owner=given.owner[0])
        for owner in given.owner[1:]:
            owned |= net.select(owner=owner)
        nodes &= owned
    if given.node:
        uids = [net.node(uid).uid for uid in given.node]
        nodes = nodes[torch.isin(nodes.uids, torch.tensor(uids))]
    return nodes


def _chosen_relations(
    net: "gn.GrapNet | Adopted", given: argparse.Namespace, default: str
) -> "gn.RelationSet":
    """Returns the relations that the options name, of the `default` side if they name none."""
    nodes = _chosen_nodes(net, given)
    side = given.side or default
    if not (given.layer or given.space or given.owner or given.node or given.side):
        # Nodes would leave out kernels of convolutions with groups, which lead between channels.
        found = gn.RelationSet.of(net, range(len(net.transitions)))
    elif side == "outgoing":
        found = nodes.outgoing()
    elif side == "incoming":
        found = nodes.incoming()
    else:
        found = nodes.outgoing() | nodes.incoming()
    if given.transition:
        found &= net.select(layer=given.transition).outgoing()
    if given.module:
        held = _relations_of(net, given.module[0])
        for name in given.module[1:]:
            held |= _relations_of(net, name)
        found &= held
    if given.relation:
        named = [_relation(net, text) for text in given.relation]
        for other in named[1:]:
            named[0] |= other
        found &= named[0]
    if given.smallest is not None:
        found = found.smallest(fraction=given.smallest)
    return found


def _space(net: "gn.GrapNet | Adopted", name: str) -> int:
    """Returns the number of the space that `--space` names."""
    spaces = [space.name for space in _whole_model(net, "--space").spaces]
    if name not in spaces:
        raise CommandError(f"--space {name}: no such space", f"spaces are: {few(spaces)}")
    return spaces.index(name)


def _relations_of(net: "gn.GrapNet | Adopted", name: str) -> "gn.RelationSet":
    """Returns the relations that `--module` names."""
    model = _whole_model(net, "--module")
    try:
        return model.relations(name)
    except KeyError:
        held = dict.fromkeys(weight.name for weight in model.transitions)
        raise CommandError(
            f"--module {name}: no module or tensor that holds relations",
            f"those that do are: {few(held)}",
        ) from None


def _whole_model(net: "gn.GrapNet | Adopted", option: str) -> "Adopted":
    if isinstance(net, gn.GrapNet):
        raise CommandError(f"{option} is for whole models", "a net has --layer and --transition")
    return cast("Adopted", net)


def _names(given: argparse.Namespace, *options: str) -> bool:
    """Returns whether one of some options is given."""
    return any(getattr(given, option) not in (None, False) for option in options)


def _require_selection(given: argparse.Namespace, *options: str) -> None:
    if not _names(given, *options):
        listed = ", ".join(f"--{option}" for option in options)
        raise CommandError("nothing is selected", f"add one of {listed}")


def _relation(net: "gn.GrapNet | Adopted", text: str) -> "gn.RelationSet":
    """Returns the relation that `PARENT:CHILD` names."""
    try:
        parent, child = map(int, text.split(":"))
    except ValueError:
        raise CommandError(
            f"--relation {text}: expected PARENT:CHILD, two uids", "for example --relation 3:61"
        ) from None
    found = net.node(parent).outgoing(to=net.node(child))
    if not len(found):
        raise CommandError(f"--relation {text}: node {parent} owns no relation to node {child}")
    return found


def _unused_nodes(net: "gn.GrapNet") -> "Tensor":
    """Returns the uids of hidden nodes that have no children, or only such children."""
    import torch

    unused = torch.empty(0, dtype=torch.int64)
    for layer in reversed(net.layers[1:-1]):
        relations = layer.outgoing()
        used = relations.parents[~torch.isin(relations.children, unused)]
        unused = torch.cat([unused, layer.uids[~torch.isin(layer.uids, used)]])
    return unused


def _add_cut(parser: argparse.ArgumentParser) -> None:
    _add_shared(parser)
    _add_nodes(parser)
    _add_relations(parser, "by default those that the nodes own; frozen ones are cut, too")
    _add_losses(parser)


def _cut(net: "gn.GrapNet | Adopted", edit: "gn.Edit", given: argparse.Namespace) -> None:
    _require_selection(given, *_NODES, *_RELATIONS)
    relations = _chosen_relations(net, given, "outgoing")
    if len(relations):
        edit.cut(relations)
        if given.orphans:
            edit.remove_orphans()


def _add_freeze(parser: argparse.ArgumentParser) -> None:
    _add_shared(parser)
    _add_nodes(parser)
    _add_relations(parser, "without these options biases and relations of both sides")


def _set_frozen(
    net: "gn.GrapNet | Adopted", edit: "gn.Edit", given: argparse.Namespace, *, frozen: bool
) -> None:
    _require_selection(given, *_NODES, *_RELATIONS)
    if _names(given, "side", *_RELATIONS):
        what = _chosen_relations(net, given, "both")
    else:
        what = _chosen_nodes(net, given)
    if len(what):
        change = edit.freeze if frozen else edit.unfreeze
        change(what)


def _add_remove(parser: argparse.ArgumentParser) -> None:
    _add_shared(parser)
    _add_nodes(parser)
    parser.add_argument(
        "--childless",
        action="store_true",
        help="hidden nodes without children, or with such children only; no output changes",
    )
    _add_losses(parser)


def _remove(net: "gn.GrapNet | Adopted", edit: "gn.Edit", given: argparse.Namespace) -> None:
    import torch

    if not isinstance(net, gn.GrapNet):
        raise whole.needs_code(
            given.file,
            "nodes of a whole model cannot be removed in its file: only the code of the model tells"
            " which of its numbers follow, such as num_heads",
            _removal(given),
            f'gn.save("{given.output or given.file}", net)',
        )
    _require_selection(given, *_NODES, "childless", "orphans")
    if _names(given, *_NODES, "childless"):
        nodes = _chosen_nodes(net, given)
        if given.childless:
            nodes = nodes[torch.isin(nodes.uids, _unused_nodes(net))]
        ends = sorted({0, len(net.layers) - 1} & nodes._uids_by_layer.keys())
        if ends:
            raise CommandError(
                f"layer {ends[0]} is an input or output of the net, and its nodes stay",
                "choose hidden nodes with --layer; in Python edit.remove_nodes(..., interface=True)"
                " removes any",
            )
        if len(nodes):
            edit.remove_nodes(nodes)
    if given.orphans:
        edit.remove_orphans()


def _removal(given: argparse.Namespace) -> str:
    """Returns the options of a removal as a line of Python."""
    nodes = 'net.space("NAME").weakest(fraction=0.5)'
    if given.space:
        nodes = f'net.space("{given.space[0]}")'
        if given.owner:
            nodes += f' & net.select(owner="{given.owner[0]}")'
    elif given.owner:
        nodes = f'net.select(owner="{given.owner[0]}")'
    elif given.node:
        nodes = f"net.node({given.node[0]})"
    reason = given.reason or _options(given)
    return f'with net.edit(reason="{reason}") as edit: edit.remove_nodes({nodes})'


def _add_prune(parser: argparse.ArgumentParser) -> None:
    _add_shared(parser)
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument(
        "--fraction", type=_share, metavar="F", help="the share of relations to cut"
    )
    amount.add_argument(
        "--pattern",
        type=_pattern,
        metavar="KEPT:OF",
        help="keep so many of every OF successive parents of a node, as 2:4",
    )
    parser.add_argument(
        "--by",
        choices=("magnitude", "random"),
        help="the criterion (default: magnitude); others need data: gn.rules.PruneWeakest",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of --by random (default: 0)")
    parser.add_argument(
        "--scope",
        choices=("child", "owner", "transition", "model"),
        help="what is ranked together: the parents of a node, the children of a node, a transition,"
        " or everything (default: that of the criterion)",
    )
    parser.add_argument(
        "--compare",
        choices=("lamp", "mean", "score"),
        help="how weights of several transitions compare (default: that of the criterion)",
    )
    parser.add_argument(
        "--transition", action="append", type=int, metavar="T", help="only here (repeatable)"
    )
    parser.add_argument(
        "--module", action="append", metavar="NAME", help="only here, in a whole model (repeatable)"
    )
    _add_losses(parser)


def _prune(net: "gn.GrapNet | Adopted", edit: "gn.Edit", given: argparse.Namespace) -> None:
    options: dict[str, Any] = {}
    if given.transition:
        options["transitions"] = tuple(given.transition)
    if given.module:
        for name in given.module:
            _relations_of(net, name)
        options["transitions"] = tuple(given.module)
    if given.pattern is not None:
        options["pattern"] = tuple(map(int, given.pattern.split(":")))
    for name in ("fraction", "by", "scope", "compare"):
        if getattr(given, name) is not None:
            options[name] = getattr(given, name)
    if given.by == "random":
        options["by"] = gn.rules.Random(given.seed or 0)
    elif given.seed is not None:
        raise CommandError("--seed is for --by random")
    rule = gn.rules.PruneWeakest(**options)
    rule(net, edit, gn.rules.RuleContext())
    if given.orphans:
        edit.remove_orphans()


def _add_set_owner(parser: argparse.ArgumentParser) -> None:
    _add_shared(parser)
    name = parser.add_mutually_exclusive_group(required=True)
    name.add_argument("--to", metavar="NAME", help="the owner that the nodes get")
    name.add_argument("--none", action="store_true", help="remove the owner")
    _add_nodes(parser)


def _set_owner(net: "gn.GrapNet | Adopted", edit: "gn.Edit", given: argparse.Namespace) -> None:
    _require_selection(given, *_NODES)
    nodes = _chosen_nodes(net, given)
    others = [n for n, owner in enumerate(nodes.owners) if owner != given.to]
    if others:
        edit.set_owner(nodes[others], given.to)


def _add_steps(parser: argparse.ArgumentParser) -> None:
    _add_shared(parser)
    parser.add_argument(
        "--steps", type=positive, default=1, metavar="N", help="how many commits (default: 1)"
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="also revert one part of a transaction over several nets",
    )


def _step(net: "gn.GrapNet | Adopted", given: argparse.Namespace) -> None:
    step = net.undo if given.command == "undo" else net.redo
    for _ in range(given.steps):
        step(alone=given.alone)


def _transaction(
    net: "gn.GrapNet | Adopted",
    given: argparse.Namespace,
    *,
    write: "Callable[[gn.GrapNet | Adopted, gn.Edit, argparse.Namespace], None]",
) -> None:
    """Commits the operations of `write`."""
    reason = given.reason
    if reason is None:
        reason = _options(given)
    allow_dead = getattr(given, "allow_dead", False)
    with net.edit(reason, by=f"grapnet {given.command}", allow_dead=allow_dead) as edit:
        write(net, edit, given)


def _options(given: argparse.Namespace) -> str:
    """Returns the command with the options that name what to do."""
    words = [given.command]
    for name in _REPEATED:
        value = getattr(given, name, None)
        if name == "side" and value is not None:
            words.append(f"--{value}")
        elif value is True:
            words.append(f"--{name}")
        elif isinstance(value, list):
            words += [f"--{name} {item}" for item in value]
        elif value is not None and value is not False:
            words.append(f"--{name} {value}")
    return " ".join(words)


def _run(given: argparse.Namespace, *, act: Act) -> Outcome:
    """Edits a net of a file and writes another file, or only prints what would happen."""
    output = _destination(given)
    file = open_file(given.file)
    place = place_of(file, given.net)
    net = graphs_of(file)[place]
    before = _counts(net) | {"file_bytes": file.nbytes}
    act(net, given)
    if net.version == before["version"]:
        text = f"{given.command} changes nothing in {given.file}; nothing was written"
        return Outcome(text, {"command": given.command, "changed": False, "written": None}, code=1)
    gn.check(net)
    size, extras = _save(file, given, output)
    data = {
        "command": given.command,
        "file": str(given.file),
        "net": place,
        "changed": True,
        "reason": net.history[-1].reason,
        "before": before,
        "after": _counts(net) | {"file_bytes": size},
        "extras": extras,
        "written": output and str(output),
    }
    return Outcome("\n".join(_lines(net, data)), data)


def _destination(given: argparse.Namespace) -> Path | None:
    """Returns where to write, None for a dry run."""
    if given.dry_run:
        return None
    if given.output is not None and given.in_place:
        raise CommandError("-o and --in-place exclude each other", "use one of them")
    if given.in_place:
        return given.file
    if given.output is None:
        raise CommandError("no output", "add -o NEW, --in-place or --dry-run")
    require_free(given.output, force=given.force)
    return given.output


def _save(
    file: "Archive", given: argparse.Namespace, output: Path | None
) -> tuple[int, dict[str, str]]:
    """Writes a file, if there is a path; returns its size and the fate of the extras."""
    options = {name: getattr(given, name) for name in ("undo", "history", "drop", "keep")}
    try:
        if output is None:
            saved = file.preview(**options)
        else:
            saved = file.save(output, replace=given.force or output == given.file, **options)
    except (gn.errors.CheckpointError, gn.errors.OptimizerError) as error:
        raise CommandError(
            first_line(error), "--drop NAME removes an extra, --keep NAME keeps it unchanged"
        ) from None
    return saved.nbytes, dict(saved.extras)


def _counts(net: "gn.GrapNet | Adopted") -> dict[str, Any]:
    import torch

    if not isinstance(net, gn.GrapNet):
        return whole.sizes_of(net)
    orphans = 0
    childless = 0
    for layer in net.layers[1:-1]:
        orphans += int((~torch.isin(layer.uids, layer.incoming().children)).sum())
        childless += int((~torch.isin(layer.uids, layer.outgoing().parents)).sum())
    return {
        "version": net.version,
        "nodes": net.sizes,
        "relations": [transition.size for transition in net.transitions],
        "frozen": net.count().frozen,
        "orphans": orphans,
        "childless": childless,
        "owners": {owner: len(net.select(owner=owner)) for owner in net.owners},
    }


def _lines(net: "gn.GrapNet | Adopted", data: dict[str, Any]) -> list[str]:
    before = data["before"]
    after = data["after"]
    if isinstance(net, gn.GrapNet):
        rows = _size_rows(net, before, after)
    else:
        rows = whole.size_rows(before, after)
    rows = [row for row in rows if row[1] != row[2]]
    rows.append(["bytes of the file", before["file_bytes"], after["file_bytes"]])
    versions = f"version {before['version']:,} → {after['version']:,}"
    lines = [
        f"{data['command']}: {data['reason']!r}, {versions}",
        *table(["", "before", "after"], rows, longest=whole.LONGEST),
    ]
    if data["extras"]:
        extras = [f"{name} {state}" for name, state in data["extras"].items()]
        lines.append(f"beside the {title('', net)}: {few(extras)}")
    if after.get("childless", 0) > before.get("childless", 0):
        lines.append("grapnet remove FILE --childless removes the hidden nodes without children")
    return [*lines, _written(data)]


def _size_rows(
    net: "gn.GrapNet", before: dict[str, Any], after: dict[str, Any]
) -> list[list[Cell]]:
    """Returns the sizes of a net before and after an edit."""
    rows: list[list[Cell]] = []
    for number in range(len(after["nodes"])):
        rows.append([f"nodes of layer {number}", before["nodes"][number], after["nodes"][number]])
    for t, (source, target) in enumerate(net.ends):
        counts = [before["relations"][t], after["relations"][t]]
        rows.append([f"relations {source} → {target}", *counts])
    for what in ("frozen", "orphans", "childless"):
        rows.append([what, before[what], after[what]])
    for owner in dict.fromkeys([*before["owners"], *after["owners"]]):
        counts = [before["owners"].get(owner, 0), after["owners"].get(owner, 0)]
        rows.append([f"nodes of {owner}", *counts])
    return rows


def _written(data: dict[str, Any]) -> str:
    if data["written"] is None:
        return "dry run: nothing was written"
    return f"wrote {data['written']}"


def _add_compact(parser: argparse.ArgumentParser) -> None:
    _add_destination(parser)
    parser.set_defaults(undo=False, history="outline", drop=[], keep=[])


def _compact(given: argparse.Namespace) -> Outcome:
    output = _destination(given)
    file = open_file(given.file)
    before = file.nbytes
    after, _ = _save(file, given, output)
    data = {
        "command": "compact",
        "file": str(given.file),
        "before": {"file_bytes": before},
        "after": {"file_bytes": after},
        "written": output and str(output),
    }
    return Outcome(f"compact: {before:,} → {after:,} bytes\n{_written(data)}", data)


def _command(
    name: str, about: str, configure: Callable[..., object], act: Act, *examples: str
) -> Command:
    return Command(name, about, "Change a net", configure, partial(_run, act=act), examples)


COMMANDS = (
    _command(
        "cut",
        "cuts relations: of an owner, of nodes, the weakest, or one by one",
        _add_cut,
        partial(_transaction, write=_cut),
        "cut net.safetensors --owner task-1 --both --dry-run",
        "cut net.safetensors --owner task-1 -o unheard.safetensors",
        "cut net.safetensors --owner task-1 --incoming -o orphaned.safetensors",
        "cut net.safetensors --transition 0 --smallest 0.2 --orphans -o smaller.safetensors",
    ),
    _command(
        "freeze",
        "freezes nodes with all that belongs to them, or relations",
        _add_freeze,
        partial(_transaction, write=partial(_set_frozen, frozen=True)),
        "freeze net.safetensors --owner task-1 -o frozen.safetensors",
    ),
    _command(
        "unfreeze",
        "makes nodes or relations trainable again",
        _add_freeze,
        partial(_transaction, write=partial(_set_frozen, frozen=False)),
        "unfreeze frozen.safetensors --all --in-place",
    ),
    _command(
        "remove",
        "removes hidden nodes with their relations: by name, orphans, or those without children",
        _add_remove,
        partial(_transaction, write=_remove),
        "remove net.safetensors --owner task-1 --layer 1 -o without-1.safetensors",
        "remove unheard.safetensors --childless --in-place",
        "remove orphaned.safetensors --orphans --in-place",
    ),
    _command(
        "prune",
        "cuts the weakest relations, a share or a pattern of them; frozen ones never",
        _add_prune,
        partial(_transaction, write=_prune),
        "prune net.safetensors --fraction 0.5 --scope transition -o half.safetensors",
        "prune net.safetensors --pattern 2:4 --by magnitude --in-place",
    ),
    _command(
        "set-owner",
        "gives nodes an owner",
        _add_set_owner,
        partial(_transaction, write=_set_owner),
        "set-owner net.safetensors --layer 1 --to base -o tagged.safetensors",
    ),
    _command(
        "undo",
        "takes the last commits back, as far as the file keeps what that needs",
        _add_steps,
        _step,
        "undo net.safetensors -o back.safetensors",
        "undo half.safetensors --steps 2 --dry-run",
    ),
    _command(
        "redo",
        "takes the last undo back",
        _add_steps,
        _step,
        "redo back.safetensors --in-place",
    ),
    Command(
        "compact",
        "writes a checkpoint without what undo needs, and with the outline of its history only",
        "Change a net",
        _add_compact,
        _compact,
        ("compact net.safetensors -o small.safetensors", "compact small.safetensors --dry-run"),
    ),
)
