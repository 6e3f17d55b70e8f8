"""cut, freeze, unfreeze, remove, prune, set-owner, undo, redo: edits of a checkpoint from the
shell.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Literal

import grapnet as gn
from grapnet.rules import Moment, PruneWeakest

from .columns import counted
from .command import Command, CommandError
from .editing import Act, add_shared, run_edit
from .selection import (
    Selection,
    add_node_options,
    add_relation_options,
    require_rank,
    require_share,
)

_SCOPES: dict[str, Literal["global", "transition"]] = {
    "global": "global",
    "per-transition": "transition",
}


def _add_cut(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    add_node_options(parser)
    add_relation_options(
        parser, "those that the nodes own, unless another side is named; frozen ones are cut too"
    )
    _add_orphans(parser)


def _cut(net: gn.GrapNet, edit: gn.Edit, given: argparse.Namespace) -> None:
    chosen = Selection.of(given)
    chosen.require_some()
    relations = chosen.chosen_relations(net, "outgoing")
    if len(relations):
        edit.cut(relations)
        _remove_orphans(edit, given)


def _add_freeze(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    add_node_options(parser)
    add_relation_options(
        parser,
        "without these options all that belongs to the nodes: biases and relations of both sides",
    )


def _turn(net: gn.GrapNet, edit: gn.Edit, given: argparse.Namespace, *, freeze: bool) -> None:
    chosen, turn = Selection.of(given), edit.freeze if freeze else edit.unfreeze
    chosen.require_some()
    relations = chosen.names_relations or chosen.side is not None
    what = chosen.chosen_relations(net, "both") if relations else chosen.chosen_nodes(net)
    if len(what):
        turn(what)


def _add_remove(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    add_node_options(parser, childless=True)
    _add_orphans(parser)


def _remove(net: gn.GrapNet, edit: gn.Edit, given: argparse.Namespace) -> None:
    chosen = Selection.of(given)
    if not given.orphans:
        chosen.require_nodes()
    if chosen.names_nodes:
        nodes = chosen.chosen_nodes(net)
        _require_hidden(nodes, len(net.layers) - 1, chosen)
        if len(nodes):
            edit.remove_nodes(nodes)
    _remove_orphans(edit, given)


def _require_hidden(nodes: gn.NodeSet, last: int, chosen: Selection) -> None:
    """Raises CommandError for sensory and output nodes, with the way to the hidden ones among those
    chosen.
    """
    uids = {number: found.tolist() for number, found in nodes.uids_by_layer.items() if len(found)}
    for number, kind in ((0, "sensory"), (last, "output")):
        if number not in uids:
            continue
        count, first = len(uids[number]), uids[number][0]
        told = (
            f"node {first} is one of the {kind} nodes"
            if count == 1
            else f"{count:,} of these are {kind} nodes"
        )
        hidden = [f"--layer {n}" for n in uids if n not in (0, last)]
        hint = (
            "only hidden nodes are removed from the shell; in Python, edit.remove_nodes(nodes,"
            " interface=True)"
        )
        if hidden and not (chosen.layers or chosen.nodes):
            hint = f"name a hidden layer besides: {' '.join(hidden)}"
        raise CommandError(
            f"{told}, of layer {number}, and without {'it' if count == 1 else 'them'} the net "
            f"{'takes' if number == 0 else 'gives'} something else",
            hint,
        )


def _add_prune(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    parser.add_argument(
        "--fraction", type=float, required=True, metavar="F", help="the share of relations to cut"
    )
    parser.add_argument(
        "--scope",
        choices=_SCOPES,
        default="global",
        help="rank all together, or each transition alone (default: global)",
    )
    told = (
        "prune here only (repeatable); of an owner or a layer: grapnet cut FILE --owner NAME"
        " --smallest F"
    )
    parser.add_argument("--transition", action="append", type=int, metavar="T", help=told)
    _add_orphans(parser)


def _prune(net: gn.GrapNet, edit: gn.Edit, given: argparse.Namespace) -> None:
    require_share("fraction", given.fraction)
    count = len(net.transitions)
    for t in given.transition or ():
        if not -count <= t < count:
            raise CommandError(f"there is no transition {t}", f"transitions are 0 to {count - 1}")
    transitions = tuple(sorted({t % count for t in given.transition})) if given.transition else None
    free = net.select(layer=transitions or range(count)).outgoing()
    require_rank(free[~free.frozen])
    scope = _SCOPES[given.scope]
    rule = PruneWeakest(fraction=given.fraction, transitions=transitions, scope=scope)
    rule(net, edit, Moment())
    _remove_orphans(edit, given)


def _add_set_owner(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    name = parser.add_mutually_exclusive_group(required=True)
    name.add_argument("--to", metavar="NAME", help="the owner that the nodes get")
    name.add_argument("--none", action="store_true", help="take their owner away")
    add_node_options(parser)


def _set_owner(net: gn.GrapNet, edit: gn.Edit, given: argparse.Namespace) -> None:
    if given.to == "":
        raise CommandError("--to names no owner", "--none takes the owner away")
    chosen = Selection.of(given)
    chosen.require_nodes()
    nodes = chosen.chosen_nodes(net)
    owner = None if given.none else given.to
    others = nodes[[n for n, present in enumerate(nodes.owners) if present != owner]]
    if len(others):
        edit.set_owner(others, owner)


def _add_steps(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, reason=False)
    parser.add_argument(
        "--steps", type=int, default=1, metavar="N", help="how many commits (default: 1)"
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="also where a commit is one part of a transaction over several nets",
    )


def _steps(net: gn.GrapNet, given: argparse.Namespace, *, verb: str) -> None:
    if given.steps < 1:
        raise CommandError(f"--steps is a whole number, at least 1, got {given.steps}")
    journal = net.journal
    if journal.commits and not journal.undoable and not journal.redoable:
        listed = counted(len(journal.commits), "commit")
        raise CommandError(
            f"there is nothing to {verb}: {given.file} was saved without undo=True; it lists"
            f" {listed} and keeps nothing that {verb} needs",
            "save it with gn.save(..., undo=True); of an edit from the shell, --undo keeps it",
        )
    for done in range(given.steps):
        try:
            net.undo(alone=given.alone) if verb == "undo" else net.redo(alone=given.alone)
        except gn.HistoryError as error:
            hint = (
                "grapnet history FILE lists the commits; a file keeps what undo needs with"
                " gn.save(..., undo=True)"
            )
            if "transaction over" in str(error):
                hint = "--alone takes it back in this net and leaves the other nets as they are"
            elif done:
                hint = (
                    f"--steps {done} goes as far as it can; grapnet history FILE lists the commits"
                )
            told, past = str(error).splitlines()[0], "undone" if verb == "undo" else "redone"
            can = f"{done} of {given.steps} steps can be {past}; then: " if given.steps > 1 else ""
            raise CommandError(f"{can}{told}", hint) from None


def _add_orphans(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--orphans",
        action="store_true",
        help="then remove hidden nodes without parents, with all they own",
    )
    parser.add_argument(
        "--allow-dead",
        action="store_true",
        help="also take the last relation of a transition or the last parent of an output",
    )


def _remove_orphans(edit: gn.Edit, given: argparse.Namespace) -> None:
    if given.orphans:
        edit.remove_orphans()


def _inside_edit(
    verb: str, write: Callable[[gn.GrapNet, gn.Edit, argparse.Namespace], None]
) -> Act:
    """Returns what makes one commit of what `write` asks for."""

    def act(net: gn.GrapNet, given: argparse.Namespace) -> None:
        reason = given.reason if given.reason is not None else f"{verb} {_told(given)}".strip()
        allowed = getattr(given, "allow_dead", False)
        try:
            with net.edit(reason=reason, by=f"grapnet {verb}", allow_dead=allowed) as edit:
                write(net, edit, given)
        except gn.EditError as error:
            if "allow_dead" not in str(error):
                raise
            hint = "cut less, or say --allow-dead"
            raise CommandError(str(error).splitlines()[0], hint) from None

    return act


def _told(given: argparse.Namespace) -> str:
    """Returns the options that say what to do, for the journal."""
    parts = [str(Selection.of(given))]
    values = {name: getattr(given, name, None) for name in ("fraction", "scope", "to")}
    parts += [f"--{name} {value}" for name, value in values.items() if value is not None]
    parts += [f"--{name}" for name in ("none", "orphans") if getattr(given, name, False)]
    return " ".join(part for part in parts if part)


def _command(
    name: str, about: str, configure: Callable[..., object], act: Act, *examples: str
) -> Command:
    return Command(name, about, "Change a net", configure, partial(run_edit, name, act), examples)


COMMANDS: tuple[Command, ...] = (
    _command(
        "cut",
        "cuts relations: of an owner, of nodes, the weakest, or one by one",
        _add_cut,
        _inside_edit("cut", _cut),
        "cut net.safetensors --owner task-1 --both --dry-run",
        "cut net.safetensors --owner task-1 -o unheard.safetensors",
        "cut net.safetensors --owner task-1 --incoming -o orphaned.safetensors",
        "cut net.safetensors --transition 0 --smallest 0.2 --orphans -o smaller.safetensors",
    ),
    _command(
        "freeze",
        "freezes nodes with all that belongs to them, or relations",
        _add_freeze,
        _inside_edit("freeze", partial(_turn, freeze=True)),
        "freeze net.safetensors --owner task-1 -o frozen.safetensors",
    ),
    _command(
        "unfreeze",
        "makes nodes or relations trainable again",
        _add_freeze,
        _inside_edit("unfreeze", partial(_turn, freeze=False)),
        "unfreeze frozen.safetensors --all --in-place",
    ),
    _command(
        "remove",
        "removes hidden nodes with their relations: by name, orphans, or those without children",
        _add_remove,
        _inside_edit("remove", _remove),
        "remove net.safetensors --owner task-1 --layer 1 -o without-1.safetensors",
        "remove unheard.safetensors --childless --in-place",
        "remove orphaned.safetensors --orphans --in-place",
    ),
    _command(
        "prune",
        "cuts a share of the relations, those of smallest |weight|; frozen ones never",
        _add_prune,
        _inside_edit("prune", _prune),
        "prune net.safetensors --fraction 0.5 --scope per-transition -o half.safetensors",
    ),
    _command(
        "set-owner",
        "tags nodes with an owner",
        _add_set_owner,
        _inside_edit("set-owner", _set_owner),
        "set-owner net.safetensors --layer 1 --to base -o tagged.safetensors",
    ),
    _command(
        "undo",
        "takes the last commits back, as far as the file keeps what that needs",
        _add_steps,
        partial(_steps, verb="undo"),
        "undo net.safetensors -o earlier.safetensors",
        "undo half.safetensors --steps 2 --dry-run",
    ),
    _command(
        "redo",
        "takes the last undo back",
        _add_steps,
        partial(_steps, verb="redo"),
        "redo earlier.safetensors --in-place",
    ),
)
