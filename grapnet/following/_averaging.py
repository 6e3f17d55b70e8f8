"""Averaged copies of a net (EMA, SWA), which go through the commits of the net."""

import copy as copying
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from grapnet.core._change import (
    Change,
    LayerChange,
    NodeRecord,
    Shift,
    TransitionChange,
    VectorChange,
)
from grapnet.core._commit import require_editable, uid_after
from grapnet.core._errors import OptimizerError
from grapnet.core._graph import Column, Graph
from grapnet.core._index_map import IndexMap, contains, empty_positions, flatnonzero
from grapnet.core._journal import Commit, Journal
from grapnet.core._opened import same_pattern
from grapnet.core._prepare import Intent, prepare
from grapnet.core._resolve import folded_constants


class CopyFollower:
    """Applies the commits of one net to one copy and its journal."""

    follows_depth = True

    def __init__(self, copy: Graph, net: Graph) -> None:
        self.copy = weakref.ref(copy)
        self.net = weakref.ref(net)
        self._trial: Commit | None = None  # what the trial in effect did to the copy

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Prepares the commit on the copy; raises, before anything changes, if that is
        impossible.
        """
        copy = self.copy()
        if copy is None:
            return lambda: None
        copy._require_no_edit("let a copy follow the net")
        require_editable(copy)
        if copy.version != graph.version:
            raise OptimizerError(
                f"this copy is at version {copy.version} and the net at {graph.version}: it was"
                " edited directly, or a follower failed at the end of a trial. Detach it,"
                " gn.detach(copy, net), and attach a new copy"
            )
        receipt = Commit(
            commit.version,
            commit.reason,
            self._change(copy, commit),
            commit.by,
            commit.operations,
            undoes=commit.undoes,
            joint=commit.joint,
            kind=commit.kind,
            is_staged=commit.is_staged,
        )
        intent = Intent(copy, receipt, uid_after(copy, receipt.change))
        done, installs = prepare(intent, commit.decision)
        trial = None
        if commit.kind == "trial":
            trial = done
        limit = graph.journal.undo_limit

        def install() -> None:
            copy.journal.undo_limit = limit
            self._trial = trial
            for step in installs:
                step()

        return install

    def prepare_columns(
        self, graph: Graph, coming: Sequence[Column], leaving: Sequence[Column]
    ) -> Callable[[], None]:
        """Raises OptimizerError: a copy cannot follow Parameters of a policy."""
        raise OptimizerError(
            "a copy follows this net and cannot follow the Parameters of a policy."
            " Detach it first, gn.detach(copy, net), then attach a new copy"
        )

    def _change(self, copy: Graph, commit: Commit) -> Change:
        """Returns the change of the net with the values of the copy, where biases are folded or a
        commit is reverted.
        """
        if commit.undoes is None:
            if commit.change.depth is not None:
                return replace(commit.change, depth=copy._same_depth(commit.change.depth))
            return _with_own_constants(copy, commit.change)
        if commit.ends_trial:
            own = self._trial
        else:
            own = copy.journal._at(commit.undoes)
        if own is None or not own.change.has_values:
            return commit.change
        back = own.change.inverse()
        if commit.change.depth is not None:
            return back
        if _moves_alike(back, commit.change):
            return back
        return commit.change


def way_back(journal: Journal) -> tuple[list[int], list[int]]:
    """Returns the versions that undo and redo would revert, the next one last."""
    version = journal._outlines.version
    undoable = [version(place) for place in journal.undoable]
    redoable = [version(place) for place in journal.redoable]
    return undoable, redoable


def _with_own_constants(copy: Graph, change: Change) -> Change:
    """Returns a change in which nodes without parents contribute the constants of the copy, not of
    the net.
    """
    layers = dict(change.layers)
    shifts: dict[int, Tensor] = {}
    for n, upper in sorted(change.layers.items()):
        for t, relations in (upper.folded or {}).items():
            target = copy.transitions[t].target
            shifts[target] = folded_constants(
                copy, t, relations.to(copy.device), shifts.get(n), shifts.get(target)
            )
            layers[target] = _shifted(copy, target, change.layers.get(target), shifts[target])
    return replace(change, layers=layers)


def _shifted(copy: Graph, number: int, change: LayerChange | None, shift: Tensor) -> LayerChange:
    """Returns the change of a layer (None: none) with `shift` added to the trainable biases that
    stay.
    """
    layer = copy.layers[number]
    if change is None:
        change = _untouched(copy, number)
    assert change.biases is not None
    biases = change.biases.to(copy.device)
    rows = flatnonzero(shift != 0)
    rows = rows[~contains(biases.index.removed, rows) & ~layer._frozen_bits(rows)]
    positions = biases.index.new_positions(rows)
    free = ~contains(biases.flips, positions)
    if biases.assigned is not None:
        # The value of the net has its constants.
        free &= ~contains(biases.assigned.positions, rows)
    rows = rows[free]
    before = layer._read(rows).detach()
    own = None
    if len(rows):
        own = Shift(positions[free], before, before + shift[rows.long()])
    return replace(change, biases=replace(biases, shift=own))


def _untouched(copy: Graph, number: int) -> LayerChange:
    layer = copy.layers[number]
    none = empty_positions()
    index = IndexMap(len(layer), len(layer), none, none)
    no_nodes = NodeRecord(
        layer.uid[:0], layer._owner_names.select(none), layer._activation_names.select(none)
    )
    return LayerChange(index, no_nodes, no_nodes, VectorChange.of_free(index.to(copy.device)))


def _moves_alike(one: Change, other: Change) -> bool:
    """Returns whether two changes move the same rows and relations."""
    return _moves_same(one.layers, other.layers) and _moves_same(one.transitions, other.transitions)


def _moves_same(
    one: Mapping[int, LayerChange | TransitionChange],
    other: Mapping[int, LayerChange | TransitionChange],
) -> bool:
    for n in one.keys() | other.keys():
        if n not in one or n not in other:
            # A copy may fold where the net has 0.
            alone = one.get(n) or other[n]
            if not alone.index.is_identity:
                return False
            continue
        mine = one[n].index
        theirs = other[n].index
        is_same = mine.old_size == theirs.old_size and equal(mine.removed, theirs.removed)
        if not is_same or not equal(mine.inserted, theirs.inserted):
            return False
        if not equal(_uids_born(one[n]), _uids_born(other[n])):
            return False
    return True


def _uids_born(change: LayerChange | TransitionChange) -> Tensor:
    """Returns the uids of the new nodes, or of both ends of the new relations."""
    if isinstance(change, LayerChange):
        return change.born.uids
    return torch.cat([change.born.parents, change.born.children])


def equal(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are equal, whatever their devices."""
    return torch.equal(one.to(other.device), other)


_following: "weakref.WeakKeyDictionary[Graph, list[CopyFollower]]" = weakref.WeakKeyDictionary()


def attach_copy(module: nn.Module, net: Graph) -> None:
    """Makes the copy of `net` in `module` follow the commits of `net`.

    If the journals differ, the copy adopts that of the net, so that `gn.save` can write it.
    """
    copy = find_copy(module, net)
    detach_copy(copy, net)
    if copy.version != net.version or way_back(copy.journal) != way_back(net.journal):
        copy.journal = copying.deepcopy(net.journal)
        copy.version = net.version
        copy._next_uid = net._next_uid
    follower = CopyFollower(copy, net)
    _following.setdefault(copy, []).append(follower)
    net.follow(follower)


def detach_copy(module: nn.Module, net: Graph) -> None:
    """Stops the copies in `module` from following `net`."""
    for copy in net._copies_in(module):
        for follower in _following.get(copy, []):
            if follower.net() is net:
                net.unfollow(follower)
        _following[copy] = [f for f in _following.get(copy, []) if f.net() is not net]


def find_copy(module: nn.Module, net: Graph) -> Graph:
    """Returns the one graph in `module` that has the nodes and relations of `net`; raises
    OptimizerError otherwise.
    """
    found = net._copies_in(module)
    if any(graph is net for graph in found):
        raise OptimizerError(
            "this module holds the net itself, not a copy of it; copy it first: copy.deepcopy(net)"
        )
    differences = [difference(graph, net) for graph in found]
    copies = [graph for graph, reason in zip(found, differences, strict=True) if not reason]
    if len(copies) > 1:
        raise OptimizerError(
            f"{len(copies)} nets in this module are wired like the net; attach the copy itself: "
            "gn.attach(averaged.module.head, net)"
        )
    if not copies:
        what = "this module holds no copy of the net"
        if found:
            reasons = "; ".join(differences)
            what = f"this module holds no copy of the net ({reasons})"
        raise OptimizerError(
            f"{what}. Copy the net and attach the copy before editing:"
            " averaged = AveragedModel(net); gn.attach(averaged, net)"
        )
    return copies[0]


def difference(copy: Graph, net: Graph) -> str:
    """Returns in which nodes, relations or frozen coordinates two nets differ; empty for none."""
    if copy.sizes != net.sizes:
        return f"it has layers of {copy.sizes} nodes where the net has {net.sizes}"
    if net._wired and copy.ends != net.ends:
        return f"it has transitions between the layers {copy.ends} where the net has {net.ends}"
    if copy.columns.keys() != net.columns.keys():
        return f"it has the columns {list(copy.columns)} where the net has {list(net.columns)}"
    pairs = zip(copy._own_layers, net._own_layers, strict=True)
    for n, (mine, other) in enumerate(pairs):
        if not equal(mine.uid, other.uid):
            return f"layer {n} has other nodes"
        if mine._has_biases and not equal(mine.frozen_at, other.frozen_at):
            return f"other biases of layer {n} are frozen"
    for t, (mine, other) in enumerate(zip(copy._wired, net._wired, strict=True)):
        if not equal(mine.ptr, other.ptr) or not equal(mine.child, other.child):
            return f"transition {t} has other relations"
        if not equal(mine.frozen_at, other.frozen_at):
            return f"other relations of transition {t} are frozen"
    for name, grid in net._grids().items():
        if not same_pattern(grid.opened, copy._grids()[name].opened):
            return f"other relations of {name} are cut or frozen"
    return ""
