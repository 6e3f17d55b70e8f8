"""Graph: layers and transitions, and everything that reads or edits them."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._change import AttributeChange, Change, DepthChange
from ._commit import (
    Follower,
    Followers,
    commit,
    exchange_columns,
    require_editable,
    settle,
    uid_after,
    unsettled,
)
from ._coordinates import Coordinates, Token, VectorChange
from ._depth import deepened, with_way_back
from ._edit import Edit, Hold
from ._errors import EditError, HistoryError, StaleNodeError
from ._grid import Grid
from ._index_map import IndexMap, as_tensor
from ._journal import Commit, Diff, History, Journal
from ._layer import Layer, uid_behind
from ._node import GrapNode
from ._prepare import Intent, View
from ._resolve import draw
from ._sets import Nodes, NodeSet, as_uids
from ._transition import Transition
from ._undo import repeat, undo_alone


class Column(Coordinates):
    """A Parameter `value` with one coordinate per node of a layer, which follows every commit.

    It is registered under its name in `net.columns` by `Graph._set_columns`. A new node draws its
    coordinate from U(±bound). A node restored by undo gets its old coordinate, or 0 if it had none.

    Args:
        name: the key in `net.columns`.
        layer: the number of the layer.
        values: one per node of the layer.
        beside: the name of a Parameter; an attached optimizer puts both into one group.
        bound: the bound of the draw for new nodes.
    """

    value: torch.nn.Parameter

    def __init__(
        self, name: str, layer: int, values: Tensor, *, beside: str, bound: float = 1.0
    ) -> None:
        super().__init__("value", values)
        self.name = name
        self.layer = layer
        self.beside = beside
        self.bound = bound

    @property
    def parameter_name(self) -> str:
        """The name of its Parameter in `net.named_parameters()`."""
        return f"columns.{self.name}.value"

    def change(self, index: IndexMap, born: Tensor | None = None) -> VectorChange:
        """Returns its change when the rows of its layer move; new nodes get `born`, or 0."""
        return VectorChange.of_free(index.to(self.value.device), born)

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Returns coordinates for new nodes."""
        return drawn(count, self.bound, self.value.detach(), generator)

    @property
    def frozen(self) -> Tensor:
        """The positions of frozen coordinates, none; see `Transition.frozen`."""
        return self.frozen_at

    def extra_repr(self) -> str:
        return f"{self.size} nodes of layer {self.layer}"


def drawn(count: int, bound: float, example: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns `count` draws of U(±bound) with the dtype and device of `example`."""
    return draw("linear", torch.ones(count, device=example.device), example, generator) * bound


@dataclass(frozen=True)
class Count:
    """The size of a graph."""

    nodes: int
    relations: int
    biases: int
    trainable: int  # columns included
    frozen: int
    bytes: int  # coordinates and wiring
    flops: int  # of one forward pass of one sample: a multiply and an add a relation, an add a bias

    @property
    def parameters(self) -> int:
        """The number of coordinates, trainable or frozen."""
        return self.trainable + self.frozen

    @property
    def macs(self) -> int:
        """The multiply-adds of the forward pass."""
        return (self.flops - self.biases) // 2


def _settled(store: str, name: str) -> Any:
    """Returns an attribute that completes interrupted commits before it is read.

    It is kept under `name` in the `__dict__` of the graph, or there in the dict called `store`.
    """

    def read(graph: "Graph") -> Any:
        if unsettled:
            settle()
        return graph.__dict__[store][name] if store else graph.__dict__[name]

    def write(graph: "Graph", value: Any) -> None:
        graph.__dict__[name] = value

    return property(read, None if store else write)


def chain_ends(n_layers: int) -> list[tuple[int, int]]:
    """Returns the ends of the transitions of a chain: every layer leads to the one after it."""
    return list(pairwise(range(n_layers)))


class Graph(nn.Module):
    """The canonical graph: the only place where topology and coordinates live.

    A transition leads from any layer to any later one; several may enter or leave a layer.
    `version` grows by one with every commit, which calls everything that follows the graph first.

    Args:
        layers: the sensory layer first, the outputs last.
        transitions: the relations between them.
        ends: the numbers of the layers that each transition leads from and to; by default every
            layer leads to the one after it.
    """

    layers: Sequence[Layer] = _settled("_modules", "layers")
    transitions: Sequence[Transition] = _settled("_modules", "transitions")
    columns: dict[str, Column] = _settled("_modules", "columns")
    version: int = _settled("", "_version")
    _next_uid: int = _settled("", "_next_uid")
    journal: Journal = _settled("", "_journal")
    _structure: Token = _settled("", "_structure")  # changes with every commit

    def __init__(
        self,
        layers: Sequence[Layer],
        transitions: Sequence[Transition],
        ends: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__()
        if ends is None:
            ends = chain_ends(len(layers))
        for transition, (source, target) in zip(transitions, ends, strict=True):
            transition.source = source
            transition.target = target
        self._modules["layers"] = nn.ModuleList(layers)
        self._modules["transitions"] = nn.ModuleList(transitions)
        self._modules["columns"] = nn.ModuleDict()
        self.version = 0
        self._structure = Token()
        self._next_uid = uid_behind(layers)
        self.journal = Journal()
        self._followers = Followers()
        self._edit: Edit | None = None
        self._bind()

    @property
    def device(self) -> torch.device:
        """Where the coordinates and the wiring are."""
        return self.transitions[0]._device

    @property
    def _own_layers(self) -> Sequence[Layer]:
        """The layers whose nodes are nodes of this graph alone: of a net, all of them."""
        return self.layers

    @property
    def sizes(self) -> list[int]:
        """How many nodes each layer has."""
        return [len(layer) for layer in self.layers]

    def entering(self, layer: int) -> list[int]:
        """Returns the numbers of the transitions that lead to a layer."""
        return [t for t, transition in enumerate(self.transitions) if transition.target == layer]

    def leaving(self, layer: int) -> list[int]:
        """Returns the numbers of the transitions that lead away from a layer."""
        return [t for t, transition in enumerate(self.transitions) if transition.source == layer]

    def between(self, source: int, target: int) -> int | None:
        """Returns the number of the transition from one layer to another, None if there is none."""
        for t, ends in enumerate(self.ends):
            if ends == (source, target):
                return t
        return None

    @property
    def ends(self) -> list[tuple[int, int]]:
        """The numbers of the layers that each transition leads from and to."""
        return [(transition.source, transition.target) for transition in self.transitions]

    def _is_output(self, layer: int) -> bool:
        """Returns whether the nodes of a layer are outputs."""
        return layer == len(self.layers) - 1

    def _named_transitions(self, name: str) -> list[int]:
        """Returns the numbers of the transitions that a module or tensor of an adopted model holds;
        those of a net have no names.
        """
        return []

    def _trainable_transitions(self) -> Sequence[int]:
        """Returns the numbers of the transitions that training changes: all of a net."""
        return range(len(self.transitions))

    @property
    def is_chain(self) -> bool:
        """True when every layer leads to the one after it, and to no other."""
        return self.ends == chain_ends(len(self.layers))

    def node(self, uid: int) -> GrapNode:
        """Returns the node called `uid`; raises StaleNodeError when it is not in the graph."""
        self._locate(uid)
        return GrapNode(self, uid)

    def _find(self, uid: int) -> tuple[int, int] | None:
        """Returns (layer, row) of a node, or None when it is not in the graph."""
        if not 0 <= uid < self._next_uid:  # also where torch has no number so large
            return None
        wanted = torch.tensor([uid], device="cpu")
        for number, layer in enumerate(self.layers):
            row = int(layer.rows(wanted))
            if row >= 0:
                return number, row
        return None

    def _locate(self, uid: int) -> tuple[int, int]:
        """Returns (layer, row) of a node; raises StaleNodeError with the commit that removed it."""
        place = self._find(uid)
        if place is not None:
            return place
        commit = self.journal._last_touch_of_node(uid, removal=True)
        if commit is None:
            raise StaleNodeError(
                f"no node of this graph has uid {uid}; the graph is at version {self.version}"
            )
        where = ""
        for number, change in commit.change.layers.items():
            if bool((change.gone.uids == uid).any()):
                where = f" of layer {number}"
        if commit.change.depth is not None:
            where = f" of {' or '.join(commit.change.depth.left)}"
        raise StaleNodeError(
            f"node {uid}{where} was removed by commit {commit.version}"
            f" ({commit.reason!r}); the graph is at version {self.version}"
        )

    def _by_layer(self, uids: dict[int, Tensor]) -> dict[int, Tensor]:
        """Returns nodes by the numbers that their layers have at present; these change when layers
        or blocks come or leave.
        """
        layers = self.layers
        found: dict[int, list[Tensor]] = {}
        has_moved = False
        for number, nodes in uids.items():
            if number < len(layers) and int(layers[number].rows(nodes[:1])) >= 0:
                found.setdefault(number, []).append(nodes)
                continue
            # The first node has left, or the layer has another number.
            place = self._find(int(nodes[0]))
            present = min(number, len(layers) - 1)
            if place is not None:
                present = place[0]
            has_moved = has_moved or present != number
            found.setdefault(present, []).append(nodes)
        if not has_moved:
            return uids
        return {number: torch.cat(parts) for number, parts in sorted(found.items())}

    def _rows(self, number: int, uids: Tensor) -> Tensor:
        """Returns the rows of nodes of one layer; raises StaleNodeError when one is gone."""
        rows = self.layers[number].rows(uids)
        missing = uids[rows < 0]
        if len(missing):
            self._locate(int(missing[0]))
            raise StaleNodeError(f"node {int(missing[0])} is not in layer {number}")
        return rows

    @property
    def owners(self) -> list[str]:
        """The tags that nodes have, in the order of the layers."""
        named = (name for layer in self._own_layers for name in layer._owner_names.compact().names)
        return [name for name in dict.fromkeys(named) if name is not None]

    def select(
        self,
        *,
        layer: int | Iterable[int] | None = None,
        owner: str | EllipsisType | None = ...,
        where: Callable[[NodeSet], Tensor] | None = None,
    ) -> NodeSet:
        """Returns the nodes of some layers, of one owner, for which `where(nodes)` is true.

        Args:
            layer: a number or several; all layers by default, negative numbers count from the
                output.
            owner: a tag, or None for nodes without one; any owner by default.
            where: takes the NodeSet selected so far and returns one bool per node.

        Raises:
            ValueError: the layer does not exist, or no node has the tag (`net.owners` lists them).
        """
        count = len(self._own_layers)
        if layer is None:
            numbers = range(count)
        elif isinstance(layer, int | np.integer):
            numbers = [layer]
        else:
            numbers = list(layer)
        if any(not -count <= n < count for n in numbers):
            raise ValueError(f"the graph has layers 0 to {count - 1}, got layer={layer!r}")
        if isinstance(owner, str) and owner not in self.owners:
            listed = ", ".join(map(repr, self.owners[:12]))
            if len(self.owners) > 12:
                listed += ", …"
            raise ValueError(f"no node has the owner {owner!r}; owners are: {listed or 'none'}")
        found = {}
        for number in sorted({n % count for n in numbers}):
            chosen = self.layers[number]
            uids = chosen.uid
            if owner is not ...:
                uids = uids[chosen._owner_names.where(owner).long()]
            found[int(number)] = uids
        nodes = NodeSet(self, found)
        if where is None:
            return nodes
        return nodes[as_tensor(where(nodes)).to("cpu", torch.bool)]

    def edit(
        self,
        reason: str = "",
        *,
        by: str | None = None,
        trial: bool = False,
        generator: torch.Generator | None = None,
        allow_dead: bool | None = None,
    ) -> Edit:
        """Opens a transaction: `with net.edit(reason="…") as edit:`.

        Args:
            reason: why, for the journal.
            by: which rule or person edits.
            trial: revert the edit when the block ends. Call `edit.commit()` inside it to apply it.
                Training inside the block is not reverted.
            generator: source of the random numbers for new weights.
            allow_dead: commit even if a transition loses its last relation or an output its last
                parent. Otherwise this raises EditError, except in a trial.
        """
        if allow_dead is None:
            allow_dead = trial
        return Edit(self, reason, by, trial, generator, allow_dead)

    @property
    def history(self) -> History:
        """Every commit, oldest first, without trials."""
        return self.journal.commits

    def undo(self, *, alone: bool = False) -> Commit:
        """Reverts the last commit, in a new commit.

        Survivors keep their current weights; cut relations return with their weights at the cut.

        Args:
            alone: revert only this net's part of a transaction over several nets;
                `gn.undo` reverts all of it.

        Raises:
            HistoryError: there is nothing to undo, or it is part of a transaction over several
                nets.
        """
        return undo_alone(self, "undo", alone=alone)

    def redo(self, *, alone: bool = False) -> Commit:
        """Reverts the last undo, in a new commit; see `undo` for `alone`, and
        `gn.redo`.
        """
        return undo_alone(self, "redo", alone=alone)

    def replay(self, commits: Iterable[Commit]) -> None:
        """Repeats the commits of an equal graph on this one, in order; the topology becomes
        bit-identical.

        New coordinates get the recorded values, or 0 if the journal no longer has them. A part of a
        transaction over several nets becomes a commit of this net. Each commit is a separate
        transaction: if one does not fit, it raises, and those before it remain.
        """
        self._require_no_edit("replay")
        with Hold((self,), "replay"):
            commits = list(commits)
            self.journal._require_details(commits)
            for recorded in commits:
                commit([repeat(self, recorded)])

    def diff(self, first: int, last: int | None = None) -> Diff:
        """Returns the nodes and relations that differ between two versions (the current one by
        default).
        """
        last = self.version if last is None else last
        for version in (first, last):
            if not 0 <= version <= self.version:
                raise HistoryError(
                    f"the graph is at version {self.version}, so there is no version {version}"
                )
        return self.journal.diff(first, last)

    def blame(self, parent: Nodes, child: Nodes | None = None) -> Commit | None:
        """Returns the commit that last added or removed a relation or a node, or None."""
        first = int(as_uids(self, parent))
        if child is None:
            found = self.journal._last_touch_of_node(first)
            kinds = ("nodes_added", "nodes_removed")
        else:
            found = self.journal._last_touch(first, int(as_uids(self, child)))
            kinds = ("relations_added", "relations_removed")
        # A later commit without details may have touched it, too.
        start = 0 if found is None else found.version
        later = self.journal._between(start, self.version)
        self.journal._require_details(c for c in later if any(c.counts[kind] for kind in kinds))
        return found

    def follow(self, follower: Follower) -> None:
        """Calls `follower` for every commit, as long as something else keeps it alive."""
        self._followers.add(follower)

    def unfollow(self, follower: Follower) -> None:
        """Stops calling `follower`."""
        self._followers.discard(follower)

    def _columns_of(self, number: int) -> dict[str, Column]:
        """Returns the columns of a layer, by name."""
        return {name: column for name, column in self.columns.items() if column.layer == number}

    def _set_columns(
        self, wanted: Sequence[Column], then: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Makes `wanted` the columns of the graph and removes others, also from attached
        optimizers. The assignments in `then` belong to the same transaction.

        Raises:
            EditError: an edit is open; nothing changes.
            OptimizerError: an attached optimizer cannot take a column; nothing changes.
        """
        exchange_columns(self, wanted, then)

    def _install_columns(self, columns: dict[str, Column]) -> None:
        """Puts prepared columns in place."""
        vars(self._modules["columns"])["_modules"] = columns

    def _stores(self) -> Mapping[str, Coordinates | Grid]:
        """Returns the stores of the coordinates, by the names of the Parameters."""
        found: dict[str, Coordinates | Grid] = {}
        for n, layer in enumerate(self.layers):
            if not layer.is_sensory:
                found[f"layers.{n}.bias"] = layer
        for t, transition in enumerate(self._wired):
            found[f"transitions.{t}.weight"] = transition
        for column in self.columns.values():
            found[column.parameter_name] = column
        return found

    def _view(self) -> View:
        """Returns everything that a forward pass reads."""
        return View(
            tuple(layer._roster for layer in self._own_layers),
            tuple(layer.vector if layer._has_biases else None for layer in self._own_layers),
            tuple(transition.topology for transition in self._wired),
            tuple(transition.vector for transition in self._wired),
            {name: column.vector for name, column in self.columns.items()},
            {},
            tuple((transition.source, transition.target) for transition in self._wired),
        )

    @property
    def _wired(self) -> Sequence[Transition]:
        """The transitions that hold coordinates; those of an adopted model are in its tensors."""
        return self.transitions

    def _grids(self) -> dict[str, Grid]:
        """Returns the tensors of an adopted model, by name; a net has none."""
        return {}

    def _copies_in(self, module: nn.Module) -> "list[Graph]":
        """Returns the graphs in a module that may be copies of this one, or this one itself."""
        return [part for part in module.modules() if isinstance(part, Graph)]

    def _check_tensors(self) -> None:
        """Raises InvariantError if the tensors of an adopted model do not fit its spaces."""

    def _attribute(self, path: str, name: str) -> Any:
        """Returns an attribute of a module of an adopted model; None if there is none."""
        return None

    def _prepare_attribute(self, change: AttributeChange) -> Callable[[], None]:
        """Returns the assignment of a number of a module of an adopted model."""
        module = self.get_submodule(change.module)
        return partial(setattr, module, change.name, change.after)

    def _prepare_depth(self, change: DepthChange) -> list[Callable[[], None]]:
        """Returns the assignments that insert and remove layers, or blocks of an adopted model."""
        arrangement = self._own_build(change)
        return arrangement.prepare(self)

    def _own_build(self, change: DepthChange) -> Any:
        """Returns what a change of depth installs; raises HistoryError if it belongs to another
        graph.
        """
        build = change.after
        if build is None or build.net() is not self:
            raise HistoryError(
                "this commit has inserted or removed blocks or layers of the graph that it was"
                " made on, and copies do not have them. Undo it there, and detach copies that were"
                " attached since: gn.detach(copy, net)"
            )
        return build

    def _completed_depth(self, change: DepthChange) -> DepthChange:
        """Returns a change of depth with the operations that revert it."""
        self._own_build(change)
        return with_way_back(change)

    def _view_at_depth(self, change: DepthChange, view: View) -> View:
        """Returns what forward passes read after a change of depth."""
        return change.after.view(self, view)

    def _same_depth(self, change: DepthChange) -> DepthChange:
        """Returns the change that does to a copy of a model what another does to the model."""
        return deepened(self, change.asked)

    def _misfit(self, change: Change) -> str:
        """Returns what of the graph a change does not fit, beside layers and transitions that it
        changes one by one; empty if it fits.
        """
        if change.depth is None:
            return ""
        for layer in self.layers:
            if bool((layer.rows(change.depth.born) >= 0).any()):
                return "one of its nodes"
        try:
            own = self._same_depth(change.depth)
        except (EditError, IndexError):
            return "its depth"
        for mine, other in (
            (own.born, change.depth.born),
            (own.gone, change.depth.gone),
            (own.relations_born.parents, change.depth.relations_born.parents),
            (own.relations_born.children, change.depth.relations_born.children),
            (own.relations_gone.parents, change.depth.relations_gone.parents),
            (own.relations_gone.children, change.depth.relations_gone.children),
        ):
            if not torch.equal(mine, other):
                return "its depth"
        return ""

    def count(self) -> Count:
        """Returns the size of the graph."""
        relations = sum(t.size for t in self.transitions)
        biased = [layer for layer in self.layers if not layer.is_sensory]
        biases = sum(layer.size for layer in biased)
        frozen = sum(len(store.frozen_at) for store in (*self.transitions, *biased))
        tensors = [column.value for column in self.columns.values()]
        for t in self.transitions:
            tensors += [t.weight, t.frozen_values, t.frozen_at, t.ptr, t.child]
        for layer in biased:
            tensors += [layer.parameter, layer.frozen_values, layer.frozen_at]
        return Count(
            nodes=sum(self.sizes),
            relations=relations,
            biases=biases,
            trainable=relations + biases + sum(c.size for c in self.columns.values()) - frozen,
            frozen=frozen,
            bytes=sum(x.numel() * x.element_size() for x in tensors),
            flops=2 * relations + biases,
        )

    def _write_all(self, assignments: Sequence[tuple[Coordinates, Tensor | slice, Tensor]]) -> None:
        """Assigns coordinates of several vectors, or of none if one is frozen."""
        for store, positions, _ in assignments:
            store._require_free(positions)
        for store, positions, values in assignments:
            store._write(positions, values)

    def _open_edit(self, edit: Edit) -> None:
        """Marks `edit` as the one open edit."""
        require_editable(self)
        with _opening:
            self._require_no_edit("open an edit")
            vars(self)["_edit"] = edit

    def _close_edit(self, edit: Edit) -> None:
        """Releases an edit whose block has ended."""
        if self._edit is edit:
            vars(self)["_edit"] = None

    @property
    def _open_trial(self) -> bool:
        """True in the block of a trial that waits for its `commit()`."""
        edit = self._edit
        return (
            edit is not None and edit.trial and edit._is_waiting and edit._statement.is_running_here
        )

    def _commit_change(self, change: Change, reason: str) -> None:
        """Carries out a resolved change and writes it into the journal."""
        with Hold((self,), reason):
            receipt = Commit(self.version + 1, reason, change)
            commit([Intent(self, receipt, uid_after(self, change))])

    def _require_no_edit(self, verb: str) -> None:
        """Raises EditError while an edit is open."""
        if unsettled:
            settle()
        if self._edit is not None and self._edit._statement.is_running:
            raise EditError(
                f"cannot {verb} while an edit ({self._edit.reason!r}) is open; leave its block"
                " first"
            )

    def _bind(self) -> None:
        for layer in self.layers:
            if not layer._is_bound:
                layer._bind(self)

    def __dir__(self) -> list[str]:
        # What is a property here and a module inside is listed once.
        return sorted({*super().__dir__()})

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Does what `nn.Module` does; `parameters()` and similar methods use it."""
        if unsettled:
            settle()
        return super().named_modules(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if unsettled:
            settle()
        super()._save_to_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        if unsettled:
            settle()
        # torch leaves out what `compile()` made, which would run the net that was copied
        return {**super().__getstate__(), "_edit": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()


# so that of two threads that open an edit at the same time one is refused
_opening = threading.Lock()
