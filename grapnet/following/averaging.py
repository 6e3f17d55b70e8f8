"""Averaged copies of a net (EMA, SWA): each goes through the commits of its net."""

import copy as copying
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from grapnet.core._change import (
    Change,
    IndexMap,
    LayerChange,
    NodeRecord,
    Shift,
    TransitionChange,
    VectorChange,
    contains,
    empty_positions,
    flatnonzero,
)
from grapnet.core._commit import Intent, prepare, require_editable, uid_after
from grapnet.core._coordinates import Coordinates
from grapnet.core._errors import OptimizerError
from grapnet.core._graph import Column, Graph
from grapnet.core._journal import Commit, Journal
from grapnet.core._resolve import folded_constants


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
        require_editable(copy)
        if copy.version != graph.version:
            raise OptimizerError(
                f"this copy is at version {copy.version} and the net at {graph.version}: it was"
                " edited by itself, or a follower failed at the end of a trial. Detach it:"
                " gn.detach(copy, net); and attach a new copy"
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


def way_back(journal: Journal) -> tuple[list[int], list[int]]:
    """Returns the versions that undo, and redo, would take back, the next one last."""
    version = journal.outlines.version
    undoable = [version(place) for place in journal.undoable]
    redoable = [version(place) for place in journal.redoable]
    return undoable, redoable


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
    before = layer.read(rows).detach()
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


_following: "weakref.WeakKeyDictionary[Graph, list[CopyFollower]]" = weakref.WeakKeyDictionary()
_compared: "weakref.WeakKeyDictionary[AveragedModel, tuple[int, int]]" = weakref.WeakKeyDictionary()


def attach_copy(module: nn.Module, net: Graph) -> None:
    """Makes the copy of `net` that `module` is, or holds, go through the commits of `net`.

    Where the copy's journal has not gone the same way, it takes over the net's, so that `gn.save`
    can write the copy.
    """
    for part in module.modules():
        if isinstance(part, AveragedModel):
            _refuse_averaged_wiring(part)
    copy = find_copy(module, net)
    detach_copy(copy, net)
    if copy.version != net.version or way_back(copy.journal) != way_back(net.journal):
        copy.journal, copy.version, copy.next_uid = (
            copying.deepcopy(net.journal),
            net.version,
            net.next_uid,
        )
    follower = CopyFollower(copy, net)
    _following.setdefault(copy, []).append(follower)
    net.follow(follower)


def detach_copy(module: nn.Module, net: Graph) -> None:
    """Makes the copies that `module` is, or holds, no longer follow `net`."""
    for copy in _graphs(module):
        for follower in _following.get(copy, []):
            if follower.net() is net:
                net.unfollow(follower)
        _following[copy] = [f for f in _following.get(copy, []) if f.net() is not net]


def find_copy(module: nn.Module, net: Graph) -> Graph:
    """Returns the one graph in `module` that has the nodes and relations of `net`; raises
    OptimizerError otherwise.
    """
    found = _graphs(module)
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
        reason = f" ({differences[0]})" if len(found) == 1 else ""
        what = (
            f"none of the {len(found)} nets in this module is a copy of the net{reason}"
            if found
            else ""
        )
        raise OptimizerError(
            f"{what or 'this module holds no GrapNet'}. Copy the net and attach the copy before"
            " editing: averaged = AveragedModel(net); gn.attach(averaged, net)"
        )
    return copies[0]


def difference(copy: Graph, net: Graph) -> str:
    """Says in which nodes, relations or frozen coordinates two nets differ; empty when in none."""
    if copy.sizes != net.sizes:
        return f"it has layers of {copy.sizes} nodes where the net has {net.sizes}"
    if copy.columns.keys() != net.columns.keys():
        return f"it has the columns {list(copy.columns)} where the net has {list(net.columns)}"
    for n, (mine, other) in enumerate(zip(copy.layers, net.layers, strict=True)):
        if not equal(mine.uid, other.uid):
            return f"layer {n} has other nodes"
        if n and not equal(mine.frozen_at, other.frozen_at):
            return f"other biases of layer {n} are frozen"
    for t, (mine, other) in enumerate(zip(copy.transitions, net.transitions, strict=True)):
        if not equal(mine.ptr, other.ptr) or not equal(mine.child, other.child):
            return f"transition {t} has other relations"
        if not equal(mine.frozen_at, other.frozen_at):
            return f"other relations of transition {t} are frozen"
    return ""


def _graphs(module: nn.Module) -> list[Graph]:
    return [part for part in module.modules() if isinstance(part, Graph)]


def _refuse_averaged_wiring(averaged: AveragedModel) -> None:
    if averaged.use_buffers:
        raise OptimizerError(
            "this AveragedModel averages buffers, and the wiring of a net is in buffers, where"
            " rounding breaks it. Make it with use_buffers=False"
        )


def refuse_left_behind(averaged: AveragedModel, model: nn.Module) -> None:
    """Raises OptimizerError when coordinates of a net in `model` have moved and its copy has not
    followed.

    Costs one comparison if no net was edited since the last call.
    """
    seen = (Coordinates.layout_changes, id(model))
    if _compared.get(averaged) == seen:
        return
    for copy, net in zip(_graphs(averaged.module), _graphs(model), strict=False):
        _refuse_averaged_wiring(averaged)
        if not _has_followed(copy, net):
            raise OptimizerError(
                f"this averaged copy is at version {copy.version} and has not followed the net to"
                f" {net.version}. Attach it before editing: gn.attach(averaged, net); or make a new"
                " one now"
            )
    _compared[averaged] = seen


def _has_followed(copy: Graph, net: Graph) -> bool:
    if copy.version == net.version:
        return any(f.net() is net for f in _following.get(copy, [])) or not difference(copy, net)
    missed = net.journal.between(copy.version, net.version)
    has_moved = any(any(commit.counts.values()) for commit in missed)
    return not has_moved and not difference(copy, net)


def _guarded(
    update: Callable[[AveragedModel, nn.Module], None],
) -> Callable[[AveragedModel, nn.Module], None]:
    """Wraps the one method through which averages are taken.

    Frozen coordinates are averaged too, by the same rule: they are buffers, which torch would copy
        from the model.
    """

    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        refuse_left_behind(self, model)
        frozen = [] if self.use_buffers or self.n_averaged == 0 else _frozen_values(self.module)
        if not frozen:
            return update(self, model)
        held = AveragedModel(_listed(frozen), avg_fn=self.avg_fn, multi_avg_fn=self.multi_avg_fn)
        held.n_averaged = self.n_averaged.clone()
        update(self, model)
        update(held, _listed(frozen))  # which hold the model's by now
        with torch.no_grad():
            for values, average in zip(frozen, held.parameters(), strict=True):
                values.copy_(average)

    return update_parameters


def _frozen_values(module: nn.Module) -> list[Tensor]:
    stores = [part for part in module.modules() if isinstance(part, Coordinates) and part.size]
    return [store.frozen_values for store in stores if len(store.frozen_at)]


def _listed(tensors: list[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in tensors)


# torch has no hook for it, and as many relations grown as cut would be averaged with those of
# others in silence.
AveragedModel.update_parameters = _guarded(AveragedModel.update_parameters)  # pyright: ignore[reportAttributeAccessIssue]
