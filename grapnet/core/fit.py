"""Whether a commit that was made on one graph can be repeated on another."""

from typing import TYPE_CHECKING

import torch

from .change import Change, TransitionChange
from .errors import HistoryError
from .journal import Commit
from .relation_set import RelationSet
from .remap import contains
from .transaction import rewired, rows_after

if TYPE_CHECKING:
    from .graph import Graph


def require_fit(graph: "Graph", commit: Commit) -> None:
    """Raises HistoryError when the commit was not made on a graph like this one."""
    for number, change in commit.change.layers.items():
        if number >= len(graph.layers) or not change.fits(graph.layers[number].uid):
            raise HistoryError(
                f"commit {commit.version} was made on another graph: layer {number} differs"
            )
    for t, change in commit.change.transitions.items():
        if t >= len(graph.transitions) or not _wires_fit(graph, t, change, commit.change):
            raise HistoryError(
                f"commit {commit.version} was made on another graph: transition {t} differs"
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
