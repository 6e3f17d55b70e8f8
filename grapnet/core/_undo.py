"""Undo, redo and replay: what takes a commit back or repeats it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from ._change import Change, TransitionChange, contains
from ._commit import Intent, commit, uid_after
from ._edit import Hold, require_nets
from ._errors import HistoryError
from ._journal import Commit, Joint, Journal
from ._sets import RelationSet
from ._transition import rewired, rows_after

if TYPE_CHECKING:
    from ._graph import Graph

Verb = Literal["undo", "redo"]


def undo(graph: "Graph", verb: Verb) -> Intent:
    """Returns what takes the last commit of a graph back, or with "redo" the last undo.

    Raises:
        HistoryError: there is none.
    """
    earlier = next_reversed(graph.journal, verb)
    reason = f"{verb}: {earlier.reason.removeprefix('undo: ').removeprefix('redo: ')}"
    receipt = Commit(
        graph.version + 1, reason, earlier.change.inverse(), undoes=earlier.version, kind=verb
    )
    return Intent(graph, receipt, graph.next_uid)


def undo_alone(graph: "Graph", verb: Verb, *, alone: bool) -> Commit:
    """Takes the last commit, or undo, of one graph back; its part of a joint transaction only
    `alone`.
    """
    graph.require_no_edit(verb)
    with Hold((graph,), verb):
        earlier = next_reversed(graph.journal, verb)
        if earlier.joint is not None and not alone:
            raise HistoryError(
                f"version {earlier.version} ({earlier.reason!r}) is part of a transaction over"
                f" {earlier.joint.parts} nets. Take it back in all of them:"
                f" gn.{verb}_together(...); or in this one alone: net.{verb}(alone=True)"
            )
        (receipt,) = commit([undo(graph, verb)])
    assert receipt is not None
    return receipt


def next_reversed(journal: Journal, verb: Verb) -> Commit:
    """Returns the commit that undo, or the undo that redo, takes back; raises HistoryError when
    there is none.
    """
    return journal.next_undo() if verb == "undo" else journal.next_redo()


def repeat(graph: "Graph", recorded: Commit) -> Intent:
    """Returns what repeats a commit of an equal graph.

    Raises:
        HistoryError: the graph is not like the one that the commit was made on.
    """
    change = recorded.change.to(graph.device)
    require_fit(graph, change, recorded.version)
    receipt = Commit(graph.version + 1, recorded.reason, change, recorded.by, recorded.operations)
    return Intent(graph, receipt, uid_after(graph, change))


def undo_together(*nets: "Graph") -> tuple[Commit, ...]:
    """Takes the last transaction over these nets back, in all of them or in none; see `net.undo()`.

    The nets are all that the transaction changed, in any order; one whose edit was empty is not
    among them.

    Returns:
        The receipt of every net; they are parts of one transaction again, which `redo_together`
        takes back.

    Raises:
        HistoryError: the last commits of the nets are not all the parts of one transaction; nothing
            was changed.
    """
    return _reverse_together(nets, "undo")


def redo_together(*nets: "Graph") -> tuple[Commit, ...]:
    """Takes the last `undo_together` of these nets back, in all of them or in none; see
    `net.redo()`.

    Returns:
        The receipt of every net.

    Raises:
        HistoryError: the last undos of the nets are not all the parts of one transaction; nothing
            was changed.
    """
    return _reverse_together(nets, "redo")


def _reverse_together(nets: "Sequence[Graph]", verb: Verb) -> tuple[Commit, ...]:
    require_nets(nets, f"{verb}_together")
    for net in nets:
        net.require_no_edit(verb)
    with Hold(nets, verb):
        intents = []
        for net, joint in zip(nets, _parts_of_one(nets, verb), strict=True):
            intent = undo(net, verb)
            intents.append(replace(intent, receipt=replace(intent.receipt, joint=joint)))
        return tuple(receipt for receipt in commit(intents) if receipt is not None)


def _parts_of_one(nets: "Sequence[Graph]", verb: Verb) -> list[Joint | None]:
    """Returns what the receipts of undo or redo carry; raises HistoryError unless they take one
    transaction back.
    """
    told, joints = [], []
    for n, net in enumerate(nets):
        try:
            commit = next_reversed(net.journal, verb)
        except HistoryError as error:
            raise HistoryError(
                f"net {n + 1} of {len(nets)}: {error}; nothing was changed"
            ) from None
        told.append(f"  net {n + 1}: {commit!r}")
        joints.append(commit.joint)
    whole = Joint.of(len(nets), joints[0] and joints[0].name)
    if set(joints) != set(whole):
        raise HistoryError(
            f"what {verb}_together would take back is not the whole of one transaction, and nothing"
            " was changed:\n"
            + "\n".join(told)
            + "\nGive exactly the nets that it changed, or take each back by itself:"
            f" net.{verb}(alone=True)"
        )
    fresh = Joint.of(len(nets))
    return [fresh[joint.part] if joint else None for joint in joints]


def require_fit(graph: "Graph", whole: Change, version: int) -> None:
    """Raises HistoryError when the change of a commit was not made on a graph like this one."""
    for number, change in whole.layers.items():
        if number >= len(graph.layers) or not change.fits(graph.layers[number].uid):
            raise HistoryError(
                f"commit {version} was made on another graph: layer {number} differs"
            )
    for t, change in whole.transitions.items():
        if t >= len(graph.transitions) or not _wires_fit(graph, t, change, whole):
            raise HistoryError(
                f"commit {version} was made on another graph: transition {t} differs"
            )


def _wires_fit(graph: "Graph", t: int, change: TransitionChange, whole: Change) -> bool:
    """Says whether what the change cuts is here, and what it connects is not."""
    store = graph.transitions[t]
    if change.index.old_size != store.size:
        return False
    cut = RelationSet(graph, {t: change.index.removed})
    if not torch.equal(cut.parents.int(), change.gone.parents) or not torch.equal(
        cut.children.int(), change.gone.children
    ):
        return False
    parents, children = (
        graph.layers[t].rows(change.born.parents),
        graph.layers[t + 1].rows(change.born.children),
    )
    newborn = [whole.layers[n].born.uids if n in whole.layers else None for n in (t, t + 1)]
    for rows, uids, fresh in (
        (parents, change.born.parents, newborn[0]),
        (children, change.born.children, newborn[1]),
    ):
        if bool((rows < 0).any()) and (
            fresh is None or not bool(torch.isin(uids[rows < 0], fresh).all())
        ):
            return False
    upper, lower = whole.layers.get(t), whole.layers.get(t + 1)
    after = rewired(graph, t, store.topology, upper, lower, change)
    owners = rows_after(graph, t, upper, change.born.parents)
    if not torch.equal(after.parents_at(change.index.inserted).cpu(), owners):
        return False
    both = (parents >= 0) & (children >= 0)
    found = store.topology.find(
        parents[both].to(graph.device), children[both].to(graph.device)
    ).int()
    return bool(((found < 0) | contains(change.index.removed, found)).all())
