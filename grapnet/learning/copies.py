"""CopyFollower: takes a copy of a net, and its journal, through the net's commits."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grapnet.core.change import Change, LayerChange, NodeRecord, TransitionChange
from grapnet.core.column import Column
from grapnet.core.errors import OptimizerError
from grapnet.core.graph import Graph
from grapnet.core.journal import Commit, Journal
from grapnet.core.remap import IndexMap, contains, empty_positions, flatnonzero
from grapnet.core.resolve import folded_constants
from grapnet.core.transaction import prepare_commit
from grapnet.core.vector import Shift, VectorChange


class CopyFollower:
    """Takes one copy through the commits of one net, and its journal too."""

    def __init__(self, copy: Graph, net: Graph) -> None:
        self.copy = weakref.ref(copy)
        self.net = weakref.ref(net)
        self._trial: Commit | None = None  # what the trial in effect did to the copy

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Prepares the commit on the copy; raises, before anything has changed, when the copy
        cannot go through it.
        """
        copy = self.copy()
        if copy is None:
            return lambda: None
        copy.require_no_edit("let a copy follow the net")
        if copy.version != graph.version:
            raise OptimizerError(
                f"this copy is at version {copy.version} and the net at {graph.version}: it was"
                " edited by itself, or a follower failed at the end of a trial. Detach it:"
                " gn.detach(copy, net); and attach a new copy"
            )
        kind, change = _kind(graph, commit), self._change(copy, commit)
        receipt = Commit(
            commit.version,
            commit.reason,
            change,
            commit.by,
            commit.operations,
            undoes=commit.undoes,
            joint=commit.joint,
        )
        done, swap = prepare_commit(copy, receipt)
        born = [int(c.born.uids[-1]) + 1 for c in change.layers.values() if len(c.born)]

        def install() -> None:
            swap()
            copy.next_uid = max([copy.next_uid, *born])
            self._trial = done if kind == "trial" else None
            copy.journal.undo_limit = graph.journal.undo_limit
            if kind in _RECORD:
                _RECORD[kind](copy.journal, done)

        return install

    def prepare_columns(
        self, graph: Graph, coming: Sequence[Column], leaving: Sequence[Column]
    ) -> Callable[[], None]:
        """Raises OptimizerError: a copy does not learn by itself with which backend the net is to
        run.
        """
        raise OptimizerError(
            "a copy follows this net and cannot take Parameters that come or leave with a backend."
            " Detach it first: gn.detach(copy, net); then attach a new copy"
        )

    def _change(self, copy: Graph, commit: Commit) -> Change:
        """Returns the net's change, with the copy's own values where it folds biases or takes
        another commit back.
        """
        if commit.undoes is None:
            return _with_own_constants(copy, commit.change)
        own = self._trial if commit.ends_trial else copy.journal.at(commit.undoes)
        if own is None or not own.change.has_values:
            return commit.change
        back = own.change.inverse(with_gradients=commit.ends_trial)
        return back if _moves_alike(back, commit.change) else commit.change


_RECORD = {"edit": Journal.record, "undo": Journal.record_undo, "redo": Journal.record_redo}


def _kind(graph: Graph, commit: Commit) -> str:
    """Says what a commit that is being prepared is: "edit", "undo", "redo", "trial" or the "end" of
    one.
    """
    if commit.undoes is None:
        return "trial" if graph.open_trial else "edit"
    if commit.ends_trial:
        return "end"
    undoable, redoable = way_back(graph.journal)
    if undoable[-1:] == [commit.undoes]:
        return "undo"
    return "redo" if redoable[-1:] == [commit.undoes] else "edit"


def way_back(journal: Journal) -> tuple[list[int], list[int]]:
    """Returns the versions that undo, and redo, would take back, the next one last."""
    version = journal.outlines.version
    undoable = [version(place) for place in journal.undoable]
    redoable = [version(place) for place in journal.redoable]
    return undoable, redoable


@torch.no_grad()
def _with_own_constants(copy: Graph, change: Change) -> Change:
    """Returns a change in which parentless nodes leave what they send in the copy, not what in the
    net.
    """
    layers, shifts = dict(change.layers), dict[int, Tensor]()
    for n, upper in sorted(change.layers.items()):
        if upper.folded is not None:
            shifts[n + 1] = folded_constants(copy, n, upper.folded.to(copy.device), shifts.get(n))
            layers[n + 1] = _shifted(copy, n + 1, change.layers.get(n + 1), shifts[n + 1])
    return replace(change, layers=layers)


def _shifted(copy: Graph, number: int, change: LayerChange | None, shift: Tensor) -> LayerChange:
    """Returns what happens to a layer (None: nothing) with `shift` added to the biases that stay
    and are trainable.
    """
    layer, change = copy.layers[number], change or _untouched(copy, number)
    assert change.biases is not None
    biases = change.biases.to(copy.device)
    rows = flatnonzero(shift != 0)
    rows = rows[~contains(biases.index.removed, rows) & ~layer.frozen_bits(rows)]
    positions = biases.index.new_positions(rows)
    free = ~contains(biases.flips, positions)
    rows, positions = rows[free], positions[free]
    before = layer.read(rows)
    own = Shift(positions, before, before + shift[rows.long()]) if len(rows) else None
    return replace(change, biases=replace(biases, shift=own))


def _untouched(copy: Graph, number: int) -> LayerChange:
    layer, none = copy.layers[number], empty_positions()
    index = IndexMap(len(layer), len(layer), none, none)
    nobody = NodeRecord(
        layer.uid[:0], layer.owner_names.select(none), layer.activation_names.select(none)
    )
    return LayerChange(index, nobody, nobody, VectorChange.of_free(index.to(copy.device)))


def _moves_alike(one: Change, other: Change) -> bool:
    """Says whether two changes move the same rows and relations."""
    return _moves_same(one.layers, other.layers) and _moves_same(one.transitions, other.transitions)


def _moves_same(
    one: Mapping[int, LayerChange | TransitionChange],
    other: Mapping[int, LayerChange | TransitionChange],
) -> bool:
    # a copy may fold where the net has 0
    alone = [(one.get(n) or other[n]).index for n in one.keys() ^ other.keys()]
    pairs = [(one[n].index, other[n].index) for n in one.keys() & other.keys()]
    return all(index.is_identity for index in alone) and all(
        a.old_size == b.old_size and equal(a.removed, b.removed) and equal(a.inserted, b.inserted)
        for a, b in pairs
    )


def equal(one: Tensor, other: Tensor) -> bool:
    """Says whether two tensors are equal, wherever they are."""
    return torch.equal(one.to(other.device), other)
