"""Undo, redo and replay of commits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from ._change import Change, TransitionChange
from ._commit import commit, uid_after
from ._edit import Hold, require_nets
from ._errors import HistoryError
from ._index_map import contains
from ._journal import Commit, Joint, Journal
from ._prepare import Intent
from ._sets import RelationSet
from ._transition import rewired, rows_after

if TYPE_CHECKING:
    from ._graph import Graph

Verb = Literal["undo", "redo"]


def reversal(graph: "Graph", verb: Verb) -> Intent:
    """Returns the intent that reverts the last commit of a graph, or with "redo" the last undo.

    Raises:
        HistoryError: there is none, or it came from a file and does not fit the graph.
    """
    earlier = next_reversed(graph.journal, verb)
    change = earlier.change.inverse()
    if earlier.version in graph.journal._loaded:
        require_fit(graph, change.to(graph.device), earlier.version)
    reason = f"{verb}: {earlier.reason.removeprefix('undo: ').removeprefix('redo: ')}"
    receipt = Commit(graph.version + 1, reason, change, undoes=earlier.version, kind=verb)
    return Intent(graph, receipt, graph._next_uid)


def undo_alone(graph: "Graph", verb: Verb, *, alone: bool) -> Commit:
    """Reverts the last commit, or undo, of one graph; a part of a joint transaction only if
    `alone`.
    """
    graph._require_no_edit(verb)
    with Hold((graph,), verb):
        earlier = next_reversed(graph.journal, verb)
        if earlier.joint is not None and not alone:
            raise HistoryError(
                f"version {earlier.version} ({earlier.reason!r}) is part of a transaction over"
                f" {earlier.joint.parts} nets. Revert it in all of them, gn.{verb}(...),"
                f" or in this one only, net.{verb}(alone=True)"
            )
        (receipt,) = commit([reversal(graph, verb)])
    assert receipt is not None
    return receipt


def next_reversed(journal: Journal, verb: Verb) -> Commit:
    """Returns the commit that undo reverts, or the undo that redo reverts; raises HistoryError if
    there is none.
    """
    return journal._next_undo() if verb == "undo" else journal._next_redo()


def repeat(graph: "Graph", recorded: Commit) -> Intent:
    """Returns the intent that repeats a commit of an equal graph.

    Raises:
        HistoryError: the graph differs from the one that the commit was made on.
    """
    change = recorded.change.to(graph.device)
    require_fit(graph, change, recorded.version)
    if change.depth is not None:
        change = replace(change, depth=graph._same_depth(change.depth))
    receipt = Commit(graph.version + 1, recorded.reason, change, recorded.by, recorded.operations)
    return Intent(graph, receipt, uid_after(graph, change))


def undo(*nets: "Graph") -> tuple[Commit, ...]:
    """Reverts the last transaction over these nets, in all of them or in none; see `net.undo()`.

    Pass all nets that the transaction changed, in any order, without those whose edit was empty.

    Returns:
        The commit of every net; together they are one transaction, which `gn.redo` reverts.

    Raises:
        HistoryError: the last commits of the nets are not all the parts of one transaction; nothing
            was changed.
    """
    return _reverse(nets, "undo")


def redo(*nets: "Graph") -> tuple[Commit, ...]:
    """Reverts the last `gn.undo` of these nets, in all of them or in none; see `net.redo()`.

    Returns:
        The receipt of every net.

    Raises:
        HistoryError: the last undos of the nets are not all the parts of one transaction; nothing
            was changed.
    """
    return _reverse(nets, "redo")


def _reverse(nets: "Sequence[Graph]", verb: Verb) -> tuple[Commit, ...]:
    require_nets(nets, verb)
    for net in nets:
        net._require_no_edit(verb)
    with Hold(nets, verb):
        intents = []
        for net, joint in zip(nets, _parts_of_one(nets, verb), strict=True):
            intent = reversal(net, verb)
            intents.append(replace(intent, receipt=replace(intent.receipt, joint=joint)))
        return tuple(receipt for receipt in commit(intents) if receipt is not None)


def _parts_of_one(nets: "Sequence[Graph]", verb: Verb) -> list[Joint | None]:
    """Returns the joint parts of undo or redo; raises HistoryError unless they revert one
    transaction.
    """
    listed = []
    joints = []
    for n, net in enumerate(nets):
        try:
            commit = next_reversed(net.journal, verb)
        except HistoryError as error:
            raise HistoryError(
                f"net {n + 1} of {len(nets)}: {error}; nothing was changed"
            ) from None
        listed.append(f"  net {n + 1}: {commit!r}")
        joints.append(commit.joint)
    whole = Joint.of(len(nets), joints[0] and joints[0].name)
    if set(joints) != set(whole):
        raise HistoryError(
            f"gn.{verb} needs the last commits of all nets of one transaction; nothing was"
            " changed:\n"
            + "\n".join(listed)
            + "\nPass exactly the nets that it changed, or revert each alone:"
            f" net.{verb}(alone=True)"
        )
    fresh = Joint.of(len(nets))
    return [fresh[joint.part] if joint else None for joint in joints]


def require_fit(graph: "Graph", whole: Change, version: int) -> None:
    """Raises HistoryError if the change of a commit was made on a different graph."""
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
    misfit = graph._misfit(whole)
    if misfit:
        raise HistoryError(f"commit {version} was made on another graph: {misfit} differs")


def _wires_fit(graph: "Graph", t: int, change: TransitionChange, whole: Change) -> bool:
    """Returns whether what the change cuts exists, and what it connects does not."""
    store = graph.transitions[t]
    if change.index.old_size != store.size:
        return False
    cut = RelationSet(graph, {t: change.index.removed})
    gone = change.gone.to(torch.device("cpu"))
    if not torch.equal(cut.parents.int(), gone.parents) or not torch.equal(
        cut.children.int(), gone.children
    ):
        return False
    parents = graph.layers[store.source].rows(change.born.parents)
    children = graph.layers[store.target].rows(change.born.children)
    upper = whole.layers.get(store.source)
    lower = whole.layers.get(store.target)
    for rows, uids, layer in (
        (parents, change.born.parents, upper),
        (children, change.born.children, lower),
    ):
        if bool((rows < 0).any()) and (
            layer is None or not bool(torch.isin(uids[rows < 0].cpu(), layer.born.uids).all())
        ):
            return False
    after = rewired(graph, store, upper, lower, change)
    owners = rows_after(graph, store.source, upper, change.born.parents)
    if not torch.equal(after.parents_at(change.index.inserted), owners):
        return False
    both = (parents >= 0) & (children >= 0)
    found = store.topology.find(parents[both], children[both]).int()
    return bool(((found < 0) | contains(change.index.removed, found)).all())
