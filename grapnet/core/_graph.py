"""Graph: layers and transitions, and everything that reads or edits them."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._change import Change, IndexMap, as_tensor
from ._commit import (
    Follower,
    Followers,
    Intent,
    View,
    commit,
    exchange_columns,
    require_editable,
    settle,
    uid_after,
    unsettled,
)
from ._coordinates import Coordinates, Token, VectorChange
from ._edit import Edit, Hold
from ._errors import EditError, HistoryError, StaleNodeError
from ._journal import Commit, Diff, History, Journal
from ._layer import Layer
from ._node import GrapNode
from ._resolve import draw
from ._sets import Nodes, NodeSet, as_uids
from ._transition import Transition
from ._undo import repeat, undo_alone


class Column(Coordinates):
    """A Parameter `value` with one coordinate a node of a layer, which follows every commit of that
    layer.

    It is registered under its name in `net.columns` by `Graph.set_columns`. A newborn node draws
    its coordinate from U(±bound); one that returns by undo gets what it had, or 0 when it left
    before the column came.

    Args:
        name: what `net.columns` calls it.
        layer: the number of the layer.
        values: one a node of the layer.
        beside: the name of the Parameter that it is trained with; an attached optimizer puts both
            into one group.
        bound: of the draw for newborn nodes.
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
        """What `net.named_parameters()` calls its Parameter."""
        return f"columns.{self.name}.value"

    def change(self, index: IndexMap, born: Tensor | None = None) -> VectorChange:
        """Returns what it goes through when the rows of its layer move; nodes come with `born`, or
        with 0.
        """
        return VectorChange.of_free(index.to(self.value.device), born)

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Returns coordinates for newborn nodes."""
        return drawn(count, self.bound, self.value.detach(), generator)

    @property
    def frozen(self) -> Tensor:
        """The positions of frozen coordinates, none, as the state dict has them."""
        return self.frozen_at

    def extra_repr(self) -> str:
        return f"{self.size} nodes of layer {self.layer}"


def drawn(count: int, bound: float, example: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns `count` numbers of U(±bound) in the type of `example`, where `example` is."""
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


def _settled(store: str, name: str) -> Any:
    """Returns an attribute that completes what an interrupt has left before it is read.

    It is kept under `name` in the `__dict__` of the graph, or there in the dict called `store`.
    """

    def read(graph: "Graph") -> Any:
        if unsettled:
            settle()
        return graph.__dict__[store][name] if store else graph.__dict__[name]

    def write(graph: "Graph", value: Any) -> None:
        graph.__dict__[name] = value

    return property(read, None if store else write)


class Graph(nn.Module):
    """The canonical graph: the only place where topology and coordinates live.

    `version` grows by one with every commit. `followers` are told of every commit before it
    happens.
    """

    layers: Sequence[Layer] = _settled("_modules", "layers")
    transitions: Sequence[Transition] = _settled("_modules", "transitions")
    columns: dict[str, Column] = _settled("_modules", "columns")
    version: int = _settled("", "_version")
    next_uid: int = _settled("", "_next_uid")
    journal: Journal = _settled("", "_journal")
    structure: Token = _settled("", "_structure")  # changes with every commit

    def __init__(self, layers: Sequence[Layer], transitions: Sequence[Transition]) -> None:
        super().__init__()
        self._modules["layers"] = nn.ModuleList(layers)
        self._modules["transitions"] = nn.ModuleList(transitions)
        self._modules["columns"] = nn.ModuleDict()
        self.version = 0
        self.structure = Token()
        self.next_uid = 1 + max((int(layer.uid[-1]) for layer in layers if len(layer)), default=-1)
        self.journal = Journal()
        self.followers = Followers()
        self._edit: Edit | None = None
        self._bind()

    @property
    def device(self) -> torch.device:
        """Where the coordinates and the wiring are."""
        return self.transitions[0].place

    @property
    def sizes(self) -> list[int]:
        """How many nodes each layer has."""
        return [len(layer) for layer in self.layers]

    def node(self, uid: int) -> GrapNode:
        """Returns the node called `uid`; raises StaleNodeError when it is not in the graph."""
        self.locate(uid)
        return GrapNode(self, uid)

    def find(self, uid: int) -> tuple[int, int] | None:
        """Returns (layer, row) of a node, or None when it is not in the graph."""
        if not 0 <= uid < self.next_uid:  # also where torch has no number so large
            return None
        wanted = torch.tensor([uid], device="cpu")
        for number, layer in enumerate(self.layers):
            row = int(layer.rows(wanted))
            if row >= 0:
                return number, row
        return None

    def locate(self, uid: int) -> tuple[int, int]:
        """Returns (layer, row) of a node; raises StaleNodeError, saying what became of it, when it
        is gone.
        """
        place = self.find(uid)
        if place is not None:
            return place
        commit = self.journal.last_touch_of_node(uid, removal=True)
        if commit is None:
            raise StaleNodeError(
                f"no node of this graph has uid {uid}; the graph is at version {self.version}"
            )
        number = next(
            n for n, c in commit.change.layers.items() if bool((c.gone.uids == uid).any())
        )
        raise StaleNodeError(
            f"node {uid} of layer {number} was removed by commit {commit.version}"
            f" ({commit.reason!r}); the graph is at version {self.version}"
        )

    def rows(self, number: int, uids: Tensor) -> Tensor:
        """Returns the rows of nodes of one layer; raises StaleNodeError when one is gone."""
        rows = self.layers[number].rows(uids)
        missing = uids[rows < 0]
        if len(missing):
            self.locate(int(missing[0]))
            raise StaleNodeError(f"node {int(missing[0])} is not in layer {number}")
        return rows

    @property
    def owners(self) -> list[str]:
        """The tags that nodes have, in the order of the layers."""
        named = (name for layer in self.layers for name in layer.owner_names.compact().names)
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
            where: gets the NodeSet chosen so far and returns one bool a node.

        Raises:
            ValueError: there is no such layer, or no node of the graph has the tag; `net.owners`
                has those there are.
        """
        count = len(self.layers)
        numbers = (
            range(count)
            if layer is None
            else [layer]
            if isinstance(layer, int | np.integer)
            else list(layer)
        )
        if any(not -count <= n < count for n in numbers):
            raise ValueError(f"the graph has layers 0 to {count - 1}, got layer={layer!r}")
        if isinstance(owner, str) and owner not in self.owners:
            told = ", ".join(map(repr, self.owners[:12])) + (", …" if len(self.owners) > 12 else "")
            raise ValueError(f"no node has the owner {owner!r}; owners are: {told or 'none'}")
        found = {}
        for number in sorted({n % count for n in numbers}):
            chosen = self.layers[number]
            found[int(number)] = (
                chosen.uid if owner is ... else chosen.uid[chosen.owner_names.where(owner).long()]
            )
        nodes = NodeSet(self, found)
        return nodes if where is None else nodes[as_tensor(where(nodes)).to("cpu", torch.bool)]

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
            reason: why; it stands in the journal.
            by: which rule or person edits.
            trial: take the edit back when the block ends. Call `edit.commit()` inside it to see the
                effect. Training inside the block is not taken back: survivors keep the weights they
                have at its end, as after undo.
            generator: source of the random numbers for newborn weights.
            allow_dead: commit even if a transition loses its last relation or an output its last
                parent, which raises EditError otherwise. By default only a trial may do so.
        """
        if allow_dead is None:
            allow_dead = trial
        return Edit(self, reason, by, trial, generator, allow_dead)

    @property
    def history(self) -> History:
        """Every commit, the oldest first; trials leave none."""
        return self.journal.commits

    def undo(self, *, alone: bool = False) -> Commit:
        """Takes the last commit back, as a commit of its own.

        Survivors keep their present weights; what was cut returns as it was when it was cut.

        Args:
            alone: take back only this net's part of a transaction over several nets, so that they
                go separate ways; `gn.undo_together` takes back all of it.

        Raises:
            HistoryError: there is nothing to undo, or it is part of a transaction over several
                nets.
        """
        return undo_alone(self, "undo", alone=alone)

    def redo(self, *, alone: bool = False) -> Commit:
        """Takes the last undo back, as a commit of its own; see `undo` for `alone`, and
        `gn.redo_together`.
        """
        return undo_alone(self, "redo", alone=alone)

    def replay(self, commits: Iterable[Commit]) -> None:
        """Repeats the commits of an equal graph on this one, in order; the topology comes out
        bit-identical.

        Newborn coordinates take the recorded values, or 0 where the journal no longer keeps them.
        What was part of a transaction over several nets is a commit of this net alone. Each commit
        is a transaction of its own: one that does not fit raises, and those before it stand.
        """
        self.require_no_edit("replay")
        with Hold((self,), "replay"):
            commits = list(commits)
            self.journal.require_details(commits)
            for recorded in commits:
                commit([repeat(self, recorded)])

    def diff(self, first: int, last: int | None = None) -> Diff:
        """Returns which nodes and relations differ between two versions (the present one by
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
        """Returns the commit that last made or cut a relation, or added or removed a node; None if
        none did.
        """
        first = int(as_uids(self, parent))
        if child is None:
            found = self.journal.last_touch_of_node(first)
            kinds = ("nodes_added", "nodes_removed")
        else:
            found = self.journal.last_touch(first, int(as_uids(self, child)))
            kinds = ("relations_added", "relations_removed")
        # A later commit without details may have touched it, too.
        start = 0 if found is None else found.version
        later = self.journal.between(start, self.version)
        self.journal.require_details(c for c in later if any(c.counts[kind] for kind in kinds))
        return found

    def follow(self, follower: Follower) -> None:
        """Tells `follower` of every commit to come, for as long as something else keeps it
        alive.
        """
        self.followers.add(follower)

    def unfollow(self, follower: Follower) -> None:
        """Stops telling `follower`."""
        self.followers.discard(follower)

    def columns_of(self, number: int) -> dict[str, Column]:
        """Returns the columns that ride with a layer, by name."""
        return {name: column for name, column in self.columns.items() if column.layer == number}

    def set_columns(
        self, wanted: Sequence[Column], then: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Makes `wanted` the columns of the graph: others leave, with their place in attached
        optimizers. The assignments in `then` are part of it.

        Raises:
            EditError: while an edit is open; nothing was changed.
            OptimizerError: an attached optimizer cannot take one; nothing was changed.
        """
        exchange_columns(self, wanted, then)

    def install_columns(self, columns: dict[str, Column]) -> None:
        """Puts prepared columns in place."""
        vars(self._modules["columns"])["_modules"] = columns

    def stores(self) -> dict[str, Coordinates]:
        """Returns what holds the coordinates, by the names of the Parameters."""
        found: dict[str, Coordinates] = {}
        for n, layer in enumerate(self.layers):
            if not layer.is_sensory:
                found[f"layers.{n}.bias"] = layer
        for t, transition in enumerate(self.transitions):
            found[f"transitions.{t}.weight"] = transition
        for column in self.columns.values():
            found[column.parameter_name] = column
        return found

    def view(self) -> View:
        """Returns all that a forward pass reads at present."""
        return View(
            tuple(layer.roster for layer in self.layers),
            tuple(None if layer.is_sensory else layer.vector for layer in self.layers),
            tuple(transition.topology for transition in self.transitions),
            tuple(transition.vector for transition in self.transitions),
            {name: column.vector for name, column in self.columns.items()},
        )

    def count(self) -> Count:
        """Returns how large the graph is."""
        relations = sum(t.size for t in self.transitions)
        biased = [layer for layer in self.layers if not layer.is_sensory]
        biases = sum(layer.size for layer in biased)
        frozen = sum(len(store.frozen_at) for store in (*self.transitions, *biased))
        tensors = [
            x
            for t in self.transitions
            for x in (t.weight, t.frozen_values, t.frozen_at, t.ptr, t.child)
        ]
        tensors += [
            x for layer in biased for x in (layer.parameter, layer.frozen_values, layer.frozen_at)
        ]
        tensors += [column.value for column in self.columns.values()]
        return Count(
            nodes=sum(self.sizes),
            relations=relations,
            biases=biases,
            trainable=relations + biases + sum(c.size for c in self.columns.values()) - frozen,
            frozen=frozen,
            bytes=sum(x.numel() * x.element_size() for x in tensors),
            flops=2 * relations + biases,
        )

    def write_all(self, assignments: Sequence[tuple[Coordinates, Tensor | slice, Tensor]]) -> None:
        """Assigns coordinates of several vectors, or of none when one of them is frozen."""
        for store, positions, _ in assignments:
            store.require_free(positions)
        for store, positions, values in assignments:
            store.write(positions, values)

    def open_edit(self, edit: Edit) -> None:
        """Marks `edit` as the one open edit."""
        require_editable(self)
        with _opening:
            self.require_no_edit("open an edit")
            vars(self)["_edit"] = edit

    def close_edit(self, edit: Edit) -> None:
        """Lets go of an edit whose block is over."""
        if self._edit is edit:
            vars(self)["_edit"] = None

    @property
    def open_trial(self) -> bool:
        """True in the block of a trial that waits for its `commit()`."""
        edit = self._edit
        return edit is not None and edit.trial and edit.is_waiting and edit.block.is_running_here

    def commit_change(self, change: Change, reason: str) -> None:
        """Carries out a resolved change and writes it into the journal."""
        with Hold((self,), reason):
            receipt = Commit(self.version + 1, reason, change)
            commit([Intent(self, receipt, uid_after(self, change))])

    def require_no_edit(self, verb: str) -> None:
        """Raises EditError while an edit is open."""
        if unsettled:
            settle()
        if self._edit is not None and self._edit.block.is_running:
            raise EditError(
                f"cannot {verb} while an edit ({self._edit.reason!r}) is open; leave its block"
                " first"
            )

    def _bind(self) -> None:
        for layer in self.layers:
            if not layer.is_bound:
                layer.bind(self)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module` does; `parameters()` and its like read the modules through it."""
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
        return {**self.__dict__, "_edit": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()


# so that of two threads that open an edit at the same time one is refused
_opening = threading.Lock()
