"""Undo and redo: the last commit of a graph taken back, as a commit of its own."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from .errors import HistoryError
from .journal import Commit, Joint, Journal
from .transaction import prepare_commit

if TYPE_CHECKING:
    from .graph import Graph

Verb = Literal["undo", "redo"]


def reverse(graph: "Graph", verb: Verb, *, alone: bool) -> Commit:
    """Takes the last commit, or undo, of one graph back; its part of a joint transaction only
    `alone`.
    """
    graph.require_no_edit(verb)
    earlier = next_reversed(graph.journal, verb)
    if earlier.joint is not None and not alone:
        raise HistoryError(
            f"version {earlier.version} ({earlier.reason!r}) is part of a transaction over"
            f" {earlier.joint.parts} nets. Take it back in all of them: gn.{verb}_together(...); or"
            f" in this one alone: net.{verb}(alone=True)"
        )
    commit, install = prepare_reversal(graph, verb)
    install()
    return commit


def next_reversed(journal: Journal, verb: Verb) -> Commit:
    """Returns the commit that undo, or the undo that redo, takes back; raises HistoryError when
    there is none.
    """
    return journal.next_undo() if verb == "undo" else journal.next_redo()


def prepare_reversal(
    graph: "Graph", verb: Verb, joint: Joint | None = None
) -> tuple[Commit, Callable[[], None]]:
    """Does all of an undo or redo that can fail; returns its receipt and what puts it into
    effect.
    """
    earlier = next_reversed(graph.journal, verb)
    reason = f"{verb}: {earlier.reason.removeprefix('undo: ').removeprefix('redo: ')}"
    receipt = Commit(
        graph.version + 1, reason, earlier.change.inverse(), undoes=earlier.version, joint=joint
    )
    commit, swap = prepare_commit(graph, receipt)

    def install() -> None:
        swap()
        record = graph.journal.record_undo if verb == "undo" else graph.journal.record_redo
        record(commit)

    return commit, install
