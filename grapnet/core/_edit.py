"""Edit: the verbs of a transaction, and the nodes, relations and layers that they name."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
import torch
from torch import Tensor

from ._change import Change
from ._commit import Draws, commit, settle, unsettled
from ._depth import (
    Asked,
    LayerBefore,
    LayerRemoval,
    SkipInsertion,
    SkipRemoval,
    WantedLayer,
    deepened,
)
from ._errors import EditError
from ._index_map import as_positions, as_tensor, ascending, contains
from ._journal import Commit
from ._layer import Layer, LiveNodes
from ._prepare import Intent
from ._resolve import (
    Assigned,
    Connection,
    Drafts,
    Initial,
    Naming,
    Newborns,
    Requests,
    checked_activation,
    checked_initial,
    checked_owner,
    checked_values,
    require_alive,
    resolve,
    union,
)
from ._sets import Nodes, NodeSet, RelationSet, as_node_set, as_uids

if TYPE_CHECKING:
    from ._graph import Graph
    from ._node import GrapNode


def layer_number(graph: "Graph", layer: Any) -> int:
    """Returns the number of a layer, which is given itself or as a number counted from the sensory
    one; raises EditError if it does not exist.
    """
    count = len(graph._own_layers)
    if isinstance(layer, LiveNodes) and layer.graph is graph:
        return layer.index
    if not isinstance(layer, int | np.integer) or not -count <= layer < count:
        raise EditError(f"the graph has layers 0 to {count - 1}, got layer {layer!r}")
    return int(layer) % count


def hidden_layers(graph: "Graph", layers: Any) -> list[int]:
    """Returns the numbers of hidden layers, of all of them for None; raises EditError for one that
    is not hidden.
    """
    hidden = range(1, len(graph.layers) - 1)
    if layers is None:
        return list(hidden)
    numbers = [
        layer_number(graph, n)
        for n in ([layers] if isinstance(layers, int | np.integer) else layers)
    ]
    outside = [number for number in numbers if number not in hidden]
    if outside:
        raise EditError(f"layers {outside} are not hidden, so they have no orphans")
    return numbers


def positions_of(graph: "Graph", relations: RelationSet | Any, slots: Any) -> dict[int, Tensor]:
    """Returns the positions of relations by transition; with `slots`, `relations` is the node that
    owns them.
    """
    if slots is not None:
        if not hasattr(relations, "uid"):
            raise TypeError(f"slots= are those of one GrapNode, got {type(relations).__name__}")
        relations = cast("GrapNode", relations).outgoing(slots=slots)
    if not isinstance(relations, RelationSet):
        raise TypeError(
            "relations are given as a RelationSet (node.outgoing(), net.select(...).incoming()), "
            f"not as {type(relations).__name__}"
        )
    if relations.graph is not graph:
        raise EditError("the relations belong to another graph")
    found = relations._positions_by_transition()
    return {t: as_positions(at, graph.device) for t, at in found.items()}


def rows_of(graph: "Graph", requests: Requests, nodes: Nodes) -> dict[int, Tensor]:
    """Returns rows by layer, the nodes that the requests add counted after the present ones."""
    if isinstance(nodes, LiveNodes) and nodes.graph is graph:
        return {nodes.index: ascending(len(nodes), torch.device("cpu"))} if len(nodes) else {}
    found: dict[int, Tensor] = {}
    if isinstance(nodes, NodeSet) and nodes.graph is graph:
        found = {
            n: requests.rows(graph.layers[n], n, uids) for n, uids in nodes._uids_by_layer.items()
        }
        if not any((rows.numpy() < 0).any() for rows in found.values()):
            return found
    left = as_uids(graph, nodes)
    found = {}
    for number, layer in enumerate(graph.layers):
        rows = requests.rows(layer, number, left)
        here = rows >= 0
        if len(left) and bool(here.all()):
            found[number] = rows
            return found
        if bool(here.any()):
            found[number] = rows[here]
            left = left[~here]
    if len(left):
        graph._locate(int(left[0]))
    return found


LARGEST_UID = 2**31 - 1


class Statement:
    """The `with` statement around one edit, or around several that commit together.

    Python looks up `__exit__` first, then calls `__enter__`, executes the block, and calls what it
    has looked up. The statement alone refers to that function, so that a weak reference shows
    whether the statement still runs: an interrupt before the first line of `__exit__` ends it, too.
    """

    def __init__(self, edits: "tuple[Edit, ...]") -> None:
        self.edits: tuple[Edit, ...] = edits
        self._exit: weakref.ref[Any] | None = None
        self._thread = threading.get_ident()
        self._was_entered = False
        self._was_left = False

    @property
    def is_running(self) -> bool:
        """True from the beginning of the statement to its end."""
        if not self._was_entered or self._was_left:
            return False
        return self._exit is None or self._exit() is not None

    @property
    def is_running_here(self) -> bool:
        """True while it runs, for the thread that entered it."""
        return self.is_running and self._thread == threading.get_ident()

    def enter(self) -> None:
        """Opens the edits, all or none."""
        if self._was_entered:
            raise EditError("this edit was used already; open another one with net.edit()")
        try:
            self._thread = threading.get_ident()
            self._was_entered = True
            for edit in self.edits:
                edit._begin()
        except BaseException:
            self._was_left = True
            raise

    def commit(self) -> None:
        """Commits the edits; they take no further operation."""
        for edit in self.edits:
            edit._end()
        commit(self.edits)

    def exit_of(self, manager: Any) -> Callable[..., None]:
        """Returns a new `__exit__` of a context manager, of which it keeps a weak reference."""
        found = partial(_exit, manager)
        self._exit = weakref.ref(found)
        return found

    def leave(self, failed: bool) -> None:
        """Commits open edits, unless the block failed or is a trial, and reverts a trial."""
        first = self.edits[0]
        try:
            if first._open and not failed and not first.trial:
                self.commit()
        finally:
            self._was_left = True
            for edit in self.edits:
                edit._end()
                edit.graph._close_edit(edit)
            # An edit and its statement refer to each other, and would wait for the garbage
            # collector.
            self.edits = ()
            if unsettled:
                settle()


class Exit:
    """`__exit__` of a context manager that has a `_statement`."""

    def __get__(self, manager: Any, kind: type) -> Callable[..., None]:
        # contextlib.ExitStack asks the class, and holds the manager.
        if manager is None:
            return _exit
        return manager._statement.exit_of(manager)


def _exit(manager: Any, kind: type[BaseException] | None, *_: object) -> None:
    manager._statement.leave(kind is not None)


class Edit:
    """A `with net.edit(...) as edit:` block.

    Inside the block every read, slot and node set refers to the graph before the edit. The end of
    the block validates and commits everything; an error leaves graph, Parameters, version and
    followers unchanged.
    """

    # whether what it computes waits outside of the memory of the model
    _is_staged = False

    def __init__(
        self,
        graph: "Graph",
        reason: str,
        by: str | None,
        trial: bool,
        generator: torch.Generator | None,
        allow_dead: bool,
    ) -> None:
        self.reason = reason
        self.by = by
        self.trial = trial
        self.allow_dead = allow_dead
        self.generator = generator
        self.receipt: Commit | None = None
        self.graph = graph
        self._requests = Requests()
        self._depth: list[WantedLayer | LayerRemoval | SkipInsertion | SkipRemoval] = []
        self._operations: list[dict[str, Any]] = []
        self._next_uid = 0
        self._open = False
        self._statement = Statement((self,))

    def add_nodes(
        self,
        layer: int | Layer,
        count: int,
        *,
        activation: str | None = None,
        owner: str | None = None,
        bias: Initial | float | None = "linear",
    ) -> NodeSet:
        """Adds nodes at the end of a layer and returns them; they can be connected in this edit.

        Args:
            layer: the layer, or its number; negative numbers count from the output.
            count: how many.
            activation: the name of an activation; that of the layer by default.
            owner: a tag to select them by.
            bias: "linear" (the distribution of nn.Linear for the fan-in), "alloc" or "zero" (0), or
                values; None for a bias that is zero and frozen.
        """
        number = layer_number(self.graph, layer)
        store = self.graph.layers[number]
        if activation is not None and store.is_sensory:
            raise EditError("sensory nodes have no activation")
        activation = store.default_activation if activation is None else activation
        checked_activation(activation)
        given = bias if isinstance(bias, str | None) else as_tensor(bias)
        initial = None if given is None else checked_initial(given, count, "biases")
        return self._add_nodes(number, count, activation, owner, initial)

    def _add_nodes(
        self, number: int, count: int, activation: str, owner: str | None, initial: Initial | None
    ) -> NodeSet:
        """Adds nodes at the end of a layer, with an activation and biases that were checked."""
        if not isinstance(count, int | np.integer) or count < 0:
            raise EditError(f"count must be a non-negative integer, got {count!r}")
        checked_owner(owner)
        self._require_uids(count)
        count = int(count)
        uids = torch.arange(self._next_uid, self._next_uid + count, device="cpu")
        self._note("add_nodes", layer=number, nodes=count, owner=owner, activation=activation)
        self._next_uid += count
        self._requests.newborns[number].append(Newborns(uids, activation, owner, initial))
        return NodeSet(self.graph, {number: uids})

    def remove_nodes(self, nodes: Nodes, *, interface: bool = False) -> None:
        """Removes nodes with their outgoing and incoming relations.

        Args:
            nodes: the nodes to remove.
            interface: must be True to remove sensory or output nodes, which changes the net's input
                or output width.
        """
        found = self._rows(nodes)
        for number in found:
            if number in (0, len(self.graph.layers) - 1) and not interface:
                kind = "sensory" if number == 0 else "output"
                raise EditError(
                    f"{len(found[number])} of the nodes to remove are {kind} nodes; use"
                    " interface=True to remove them"
                )
        self._remove_rows(found)

    def _remove_rows(self, found: dict[int, Tensor]) -> None:
        for number, rows in found.items():
            self._note("remove_nodes", layer=number, nodes=len(rows))
            self._requests.removals[number].append(rows)

    def connect(
        self,
        parents: Nodes,
        children: Nodes,
        *,
        pairs: Literal["all", "aligned"] = "all",
        weights: Initial | float = "linear",
        transition: int | None = None,
    ) -> None:
        """Adds relations from parents to children; each goes to the end of its owner's list.

        Args:
            parents: nodes of one layer.
            children: nodes of a layer that a transition leads to from there.
            pairs: "all" relates every parent to every child; "aligned" relates the first to the
                first, and so on.
            weights: "linear" (the distribution of nn.Linear for the child's fan-in), "alloc"
                (uniform in ±1/√(relations its owner gains in this edit)), "zero", or values:
                [parents, children] for "all", one per pair for "aligned".
            transition: the number of the transition; the two layers determine it, too.
        """
        if pairs not in ("all", "aligned"):
            raise EditError(f'pairs is "all" or "aligned", got {pairs!r}')
        upper, parent_rows = self._one_layer(parents, "parents")
        lower, child_rows = self._one_layer(children, "children")
        if pairs == "aligned" and len(parent_rows) != len(child_rows):
            raise EditError(
                f"aligned pairs need as many parents as children, got {len(parent_rows)} and"
                f" {len(child_rows)}"
            )
        if len(parent_rows) == 0 or len(child_rows) == 0:
            return
        t = self.graph.between(upper, lower)
        if t is None or transition not in (None, t):
            which = "no transition"
            if transition is not None:
                which = f"another transition than {transition}"
            hint = ""
            if t is None and lower > upper + 1:
                hint = f". Insert one in an edit before: edit.insert_skip({upper}, {lower})"
            raise EditError(f"{which} leads from layer {upper} to layer {lower}{hint}")
        if not isinstance(weights, str):
            weights = as_tensor(weights)
        distinct = False
        if pairs == "all":
            distinct = _all_differ(parent_rows) and _all_differ(child_rows)
            shape = (len(parent_rows), len(child_rows))
            if isinstance(weights, Tensor) and weights.dim() == 2 and tuple(weights.shape) != shape:
                raise EditError(
                    f"weights for all pairs have shape {list(shape)}, got {list(weights.shape)}"
                )
            # numpy: a tenth of torch's time
            parent_rows = torch.from_numpy(parent_rows.numpy().repeat(shape[1]))
            child_rows = child_rows.expand(shape).reshape(-1)
        initial = checked_initial(weights, len(parent_rows), "relations")
        given = weights if isinstance(weights, str) else "given"
        self._note("connect", transition=t, relations=len(parent_rows), weights=given)
        self._requests.connections[t].append(Connection(parent_rows, child_rows, initial, distinct))

    def _connect_rows(
        self, t: int, parents: Tensor, children: Tensor, weights: str, *, absent: bool
    ) -> None:
        """Adds relations of one transition, given by rows of present nodes that are aligned.

        Args:
            t: the transition.
            parents: rows of its parents, on the CPU or on the device of the relations.
            children: as many rows of its children, there.
            weights: the name of an initialization.
            absent: whether the pairs are known to be absent, and ascend by parent and then by
                child, so that none is requested twice.
        """
        initial = checked_initial(weights, len(parents), "relations")
        self._note("connect", transition=t, relations=len(parents), weights=weights)
        if len(parents):
            connection = Connection(parents.int(), children.int(), initial, absent, absent)
            self._requests.connections[t].append(connection)

    def insert_layer(
        self,
        after: int | Layer,
        size: int | None = None,
        *,
        init: Literal["identity", "net2deeper"] = "identity",
        activation: str | None = None,
        owner: str | None = None,
    ) -> NodeSet:
        """Inserts a hidden layer that returns what it receives, and returns its nodes.

        Every node of the layer before gets one new node behind it, with a relation of weight 1
        between the two and bias 0, which takes over its children and the weights for them: the
        function of the net stays the same. That needs an activation that returns what the layer
        before returns: "identity" behind any other, "relu" behind itself, "relu6", "sigmoid" and
        "softplus", likewise "leaky_relu" and "elu" (with any number), and "relu6" behind itself
        and "sigmoid". All others are refused.

        The new Parameters are in the groups of those of the next layer in attached optimizers,
        with clean state. Layers and transitions behind the new one get higher numbers; Parameters
        and modules stay the same objects. An edit that inserts or removes layers does nothing else;
        numbers of layers are those from before the edit.

        Args:
            after: the layer to insert behind, or its number; negative ones count from the output.
                Several layers behind one come in the order of the calls.
            size: the number of new nodes, by default as many as the layer before has. Nodes beyond
                that have relations from every node of the layer before, weights and biases like
                those of nn.Linear, and no children, so that they do not change the function.
                Connect them in another edit; weights="zero" keeps the function.
            init: "identity" adds no relations but those of weight 1; "net2deeper" connects every
                node to every node of the layer before, with weights of 0 beside them, as Net2Net
                does.
            activation: the activation of the new nodes; by default each has that of the node
                before it.
            owner: a tag to select them by.

        Raises:
            EditError: the layer is the last one, the size is too small, or the activation would
                change the function.
        """
        number = layer_number(self.graph, after)
        if self.graph._is_output(number):
            raise EditError("a layer is inserted between two layers, got the last layer")
        if init not in ("identity", "net2deeper"):
            raise EditError(f'init is "identity" or "net2deeper", got {init!r}')
        checked_owner(owner)
        before = self._layer_before(number)
        count = before.size if size is None else size
        if not isinstance(count, int | np.integer) or count < before.size:
            raise EditError(
                f"a layer behind {before.size} nodes has at least as many, got size={count!r}"
            )
        count = int(count)
        self._require_uids(count)
        uids = torch.arange(self._next_uid, self._next_uid + count, device="cpu")
        wanted = WantedLayer.of(number, before, uids, init=init, activation=activation, owner=owner)
        self._note(
            "insert_layer", after=number, nodes=count, init=init, activation=activation, owner=owner
        )
        self._next_uid += count
        self._depth.append(wanted)
        return NodeSet(self.graph, {number + 1: uids})

    def remove_layer(self, layer: int | Layer) -> None:
        """Removes a hidden layer with its nodes, biases and the relations that enter it.

        The relations that leave it pass on to the layer before, row by row. Behind `insert_layer`
        that gives back every bit, as long as the new layer was not trained; any other layer leaves
        with what it computed, as a block of a residual network does. Undo brings back the same
        Parameters, with the state of attached optimizers; see `insert_layer`.

        Args:
            layer: the layer, or its number; negative ones count from the output.

        Raises:
            EditError: the layer is not hidden. At the end of the edit: the layer before it does not
                have as many nodes; nodes without children at the end of the layer do not count.
        """
        number = layer_number(self.graph, layer)
        if number == 0 or self.graph._is_output(number):
            kind = "sensory layer" if number == 0 else "last layer"
            raise EditError(f"only hidden layers are removed, got the {kind}")
        self._note("remove_layer", layer=number)
        self._depth.append(LayerRemoval(number))

    def insert_skip(self, source: int | Layer, target: int | Layer) -> None:
        """Inserts a transition that skips layers, without relations; the function stays.

        Other edits connect nodes of the two layers: a layer adds up what all transitions bring.
        The transition gets the last number. Its Parameter is in the group of the last transition
        in attached optimizers. An edit that inserts skips changes no nodes and relations; see
        `insert_layer`.

        Args:
            source: the layer that it leads from, or its number; negative ones count from the
                output.
            target: a layer behind the next one.

        Raises:
            EditError: the target is not behind the layer after the source, or there is such a
                transition.
        """
        ends = self._skip_ends(source, target)
        if self.graph.between(*ends) is not None:
            raise EditError(f"a transition leads from layer {ends[0]} to layer {ends[1]} already")
        self._note("insert_skip", source=ends[0], target=ends[1])
        self._depth.append(SkipInsertion.empty(self.graph, *ends))

    def remove_skip(self, source: int | Layer, target: int | Layer) -> None:
        """Removes a transition that skips layers, with its relations; see `insert_skip`.

        Raises:
            EditError: there is no such transition, or it leads to the next layer.
        """
        ends = self._skip_ends(source, target)
        if self.graph.between(*ends) is None:
            raise EditError(f"no transition leads from layer {ends[0]} to layer {ends[1]}")
        self._note("remove_skip", source=ends[0], target=ends[1])
        self._depth.append(SkipRemoval(*ends))

    def _skip_ends(self, source: int | Layer, target: int | Layer) -> tuple[int, int]:
        ends = (layer_number(self.graph, source), layer_number(self.graph, target))
        if ends[1] <= ends[0] + 1:
            raise EditError(
                f"a skip leads over at least one layer, got layer {ends[0]} to layer {ends[1]}"
            )
        return ends

    def _layer_before(self, number: int) -> LayerBefore:
        """Returns what the next layer that this edit inserts behind a layer receives."""
        for one in reversed(self._depth):
            if isinstance(one, WantedLayer) and one.after == number:
                return one.as_layer_before()
        return LayerBefore.of(self.graph.layers[number])

    def cut(self, relations: RelationSet | Any, *, slots: Any = None) -> None:
        """Removes relations with their coordinates; the nodes stay.

        Args:
            relations: a RelationSet, or one GrapNode together with `slots`.
            slots: positions in that node's list of children.
        """
        for t, positions in self._positions(relations, slots).items():
            self._note("cut", transition=t, relations=len(positions))
            self._requests.cuts[t].append(positions)

    @property
    def cuts(self) -> RelationSet:
        """The relations that this edit cuts so far, without those of removed nodes."""
        self._require_open()
        return RelationSet(
            self.graph, {t: union(at, self.graph.device) for t, at in self._requests.cuts.items()}
        )

    def keep(self, relations: RelationSet) -> None:
        """Withdraws the cuts of this edit that are in `relations`; other operations remain."""
        for t, positions in self._positions(relations).items():
            asked = union(self._requests.cuts.get(t, []), self.graph.device)
            kept = contains(positions, asked)
            if bool(kept.any()):
                self._note("keep", transition=t, relations=int(kept.sum()))
                self._requests.cuts[t] = [asked[~kept]]

    @property
    def assigned_relations(self) -> RelationSet:
        """The relations that this edit assigns so far."""
        self._require_open()
        found = {}
        for t, asked in self._requests.assign_relations.items():
            found[t] = union([one.positions for one in asked], self.graph.device)
        return RelationSet(self.graph, found)

    @property
    def n_connections(self) -> int:
        """The number of relations that this edit connects so far."""
        return sum(len(c.parents) for asked in self._requests.connections.values() for c in asked)

    @property
    def connections(self) -> tuple[Tensor, Tensor]:
        """The uids of the parents and children of the relations that this edit connects so far."""
        self._require_open()
        return self._requests.connected_uids(self.graph)

    def _connected_rows(self, t: int) -> tuple[Tensor, Tensor]:
        """Returns the rows of the parents and children that this edit connects so far in one
        transition; nodes that it adds are counted after the present ones.
        """
        none = torch.empty(0, dtype=torch.int32, device="cpu")
        asked = self._requests.connections.get(t, ())
        parents = torch.cat([none, *(connection.parents.cpu() for connection in asked)])
        children = torch.cat([none, *(connection.children.cpu() for connection in asked)])
        return parents.long(), children.long()

    @property
    def removals(self) -> NodeSet:
        """The nodes that this edit removes so far, without orphans and nodes that it adds."""
        self._require_open()
        return NodeSet(self.graph, self._requests.removed_uids(self.graph.layers))

    def _drafts(self) -> Drafts:
        """Returns what this edit adds and removes so far, orphans included."""
        self._require_open()
        return Drafts.of(self.graph, self._requests)

    def remark(self, text: str, **details: str | float | bool | None) -> None:
        """Writes a remark into the journal, such as the rule and its scores. It changes nothing
        else.

        Args:
            text: the remark.
            details: plain values by name.
        """
        for name, value in {"text": text, **details}.items():
            if not isinstance(value, str | int | float | bool | None):
                raise EditError(f"a remark holds text, numbers and None, got {name}={value!r}")
        self._note("remark", text=text, **details)

    def freeze(
        self,
        what: RelationSet | Nodes,
        *,
        incoming: bool = True,
        outgoing: bool = True,
        bias: bool = True,
    ) -> None:
        """Freezes relations, or nodes with their bias, incoming and outgoing relations (each
        optional).
        """
        self._set_frozen("freeze", what, incoming, outgoing, bias)

    def unfreeze(
        self,
        what: RelationSet | Nodes,
        *,
        incoming: bool = True,
        outgoing: bool = True,
        bias: bool = True,
    ) -> None:
        """Makes relations, or nodes with their bias and relations, trainable again, with clean
        optimizer state.
        """
        self._set_frozen("unfreeze", what, incoming, outgoing, bias)

    def assign(self, what: RelationSet | Nodes, values: Any) -> None:
        """Gives relations other weights, or nodes other biases, when the edit commits.

        Attached optimizers keep the state of assigned coordinates; entries that are copies of the
        weights take the values, and so do averaged copies of the net. Gradients stay. Undo writes
        the values from before the edit back, which drops what training has changed since, and
        gives optimizers the state of these coordinates from then; its receipt counts them. Redo
        writes back what undo has found. All other coordinates keep their training.

        A relation or node that the same edit removes is not assigned. What orphans leave to a bias
        (`remove_orphans`) is added to the value that it is assigned.

        Args:
            what: relations, or nodes.
            values: one per relation, in the order of `relations.weights`, or one per node, in the
                order in which the nodes are given; or one number for all.

        Raises:
            EditError: there are too few values or too many, one is not finite, or a node is sensory
                or added in this edit. At the end of the edit: a coordinate is assigned twice.
            FrozenError: at the end of the edit, if a coordinate is frozen and this edit does not
                unfreeze it.

        Examples:
            >>> import grapnet as gn
            >>> net = gn.GrapNet([2, 1])
            >>> with net.edit(reason="start from a known function") as edit:
            ...     edit.assign(net.layers[0].outgoing(), [0.5, -0.5])
            ...     edit.assign(net.layers[1], 0.0)
            >>> net(torch.tensor([[3.0, 1.0]])).item()
            1.0
        """
        self._require_open()
        example = self.graph.transitions[0].parameter.detach()
        if isinstance(what, RelationSet):
            found = self._positions(what)
            numbers = checked_values(values, len(what), example, "relations")
            counts = [len(at) for at in found.values()]
            for (t, at), own in zip(found.items(), numbers.split(counts), strict=True):
                self._note("assign", transition=t, relations=len(at))
                self._requests.assign_relations[t].append(Assigned(at, own))
            return
        # In the order that they are given in, which a NodeSet of several layers does not keep.
        uids = as_uids(self.graph, self._existing(what))
        numbers = checked_values(values, len(uids), example, "biases")
        for number, rows in self._rows(uids).items():
            if self.graph.layers[number].is_sensory:
                raise EditError("sensory nodes have no bias to assign")
            is_here = self.graph.layers[number].rows(uids) >= 0
            own = numbers[is_here.to(numbers.device)]
            self._note("assign", layer=number, nodes=len(rows))
            self._requests.assign_biases[number].append(Assigned(rows, own))

    def remove_orphans(self, layers: Any = None, *, fold_bias: bool = False) -> None:
        """Removes, when the edit commits, hidden nodes without parents, and those that this leaves
        without.

        Args:
            layers: numbers of hidden layers, all of them by default.
            fold_bias: add an orphan's constant φ(bias)·weight to its children's biases, so that the
                function stays.
        """
        numbers = hidden_layers(self.graph, layers)
        for number in numbers:
            self._requests.orphans[number] = self._requests.orphans.get(number, False) or fold_bias
        self._note("remove_orphans", layers=numbers, fold_bias=fold_bias)

    def set_activation(self, nodes: Nodes, activation: str) -> None:
        """Gives nodes another activation."""
        checked_activation(activation)
        if 0 in self._rows(nodes):
            raise EditError("sensory nodes have no activation")
        self._name("activations", nodes, activation)

    def set_owner(self, nodes: Nodes, owner: str | None) -> None:
        """Tags nodes with an owner, or with None."""
        checked_owner(owner)
        self._name("owners", nodes, owner)

    def commit(self) -> Commit | None:
        """Commits before the block ends; in a trial this applies its operations.

        Returns None if nothing changes. No further operation can be added. The edits of
        `gn.edit` commit at once: in a trial when one of them commits, otherwise when the
        block ends.

        Raises:
            EditError: this is one of several edits that commit together, outside a trial.
        """
        self._require_open()
        if len(self._statement.edits) > 1 and not self.trial:
            raise EditError(
                "the edits of gn.edit(...) commit at once, when its block ends; leave out"
                " commit(), or use trial=True to apply them here and revert them at the end"
            )
        self._statement.commit()
        return self.receipt

    def _begin(self) -> None:
        """Makes this the open edit of its graph."""
        self.graph._open_edit(self)
        self._next_uid = self.graph._next_uid
        self._open = True

    def _end(self) -> None:
        """Closes the edit for further operations."""
        self._open = False

    @property
    def is_open(self) -> bool:
        """True while it accepts operations."""
        return self._open

    @property
    def _is_waiting(self) -> bool:
        """True while the edit holds operations that have not taken effect."""
        return bool(self._operations)

    def _resolve(self, draws: Draws) -> Intent | None:
        """Returns the resolved operations, or None if they change nothing.

        Raises:
            EditError: they conflict, or disconnect an output where that is not allowed.
        """
        change = self._resolved(draws)
        if change.is_empty:
            return None
        receipt = Commit(
            self.graph.version + 1,
            self.reason,
            change,
            self.by,
            tuple(self._operations),
            is_staged=self._is_staged,
        )
        if self.trial:
            receipt = replace(receipt, kind="trial")
        return Intent(self.graph, receipt, self._next_uid)

    def _resolved(self, draws: Draws) -> Change:
        """Returns what the operations change."""
        generator = None
        if self._requests.newborns or self._requests.connections:
            generator = draws.source(self.generator, self.graph.device)
        change = resolve(self.graph, self._requests, generator)
        if self._depth:
            if not change.is_empty:
                raise EditError(
                    "an edit that inserts or removes layers or skips does nothing else; change"
                    " nodes and relations in another edit"
                )
            return self._deepened(draws)
        if not self.allow_dead:
            require_alive(self.graph, change)
        return change

    def _deepened(self, draws: Draws) -> Change:
        """Returns the change that inserts and removes layers."""
        if self.graph.columns:
            names = ", ".join(self.graph.columns)
            raise EditError(
                "layers do not come or leave while a policy has Parameters of its own"
                f' ({names}). Choose a backend of the sum first: net.execution.use("auto")'
            )
        asked: list[Asked] = []
        example = self.graph.transitions[0].weight.detach()
        for one in self._depth:
            if isinstance(one, WantedLayer):
                source = None
                if one.has_surplus:
                    source = draws.source(self.generator, self.graph.device)
                asked.append(one.insertion(example, source))
            else:
                asked.append(one)
        return Change({}, {}, depth=deepened(self.graph, asked))

    def _take_receipt(self, receipt: Commit | None) -> None:
        """Notes that the operations took effect."""
        self.receipt = receipt
        self._operations = []

    def __enter__(self) -> Self:
        self._statement.enter()
        return self

    __exit__ = Exit()

    def _set_frozen(
        self, verb: str, what: RelationSet | Nodes, incoming: bool, outgoing: bool, bias: bool
    ) -> None:
        relations, biases = (
            (self._requests.freeze_relations, self._requests.freeze_biases)
            if verb == "freeze"
            else (self._requests.unfreeze_relations, self._requests.unfreeze_biases)
        )
        if isinstance(what, RelationSet):
            if not (incoming and outgoing and bias):
                raise EditError(
                    f"incoming=, outgoing= and bias= select what to {verb} of nodes; omit them for"
                    " a RelationSet"
                )
            for t, positions in self._positions(what).items():
                self._note(verb, transition=t, relations=len(positions))
                relations[t].append(positions)
            return
        self._require_open()
        nodes = as_node_set(self.graph, self._existing(what))
        chosen = [nodes.incoming()] * incoming + [nodes.outgoing()] * outgoing
        rows = nodes._rows_by_layer()
        self._note(verb, nodes=len(nodes), incoming=incoming, outgoing=outgoing, bias=bias)
        for part in chosen:
            for t, positions in self._positions(part).items():
                relations[t].append(positions)
        for number in rows if bias else ():
            if not self.graph.layers[number].is_sensory:
                biases[number].append(rows[number])

    def _name(self, kind: str, nodes: Nodes, name: str | None) -> None:
        for number, rows in self._rows(nodes).items():
            self._note(f"set_{kind[:-1]}", layer=number, nodes=len(rows), name=name)
            self._requests.namings[number].append(Naming(kind, rows, name))

    def _positions(self, relations: RelationSet | Any, slots: Any = None) -> dict[int, Tensor]:
        self._require_open()
        return positions_of(self.graph, relations, slots)

    def _rows(self, nodes: Nodes) -> dict[int, Tensor]:
        self._require_open()
        return rows_of(self.graph, self._requests, nodes)

    def _one_layer(self, nodes: Nodes, role: str) -> tuple[int, Tensor]:
        found = self._rows(nodes)
        if len(found) > 1:
            raise EditError(
                f"the {role} of one connect() are in one layer, got nodes of layers {sorted(found)}"
            )
        return next(iter(found.items()), (0, torch.empty(0, dtype=torch.int32, device="cpu")))

    def _existing(self, nodes: Nodes) -> Nodes:
        uids = as_uids(self.graph, nodes)
        if bool(((uids >= self.graph._next_uid) & (uids < self._next_uid)).any()):
            raise EditError(
                "nodes added in this edit cannot be frozen, unfrozen or assigned in it; do that in"
                " the next one"
            )
        return nodes

    def _note(self, operation: str, **details: Any) -> None:
        self._require_open()
        self._operations.append({"operation": operation, **details})

    def _require_uids(self, count: int) -> None:
        if self._next_uid + count > LARGEST_UID:
            raise EditError(f"a graph has at most {LARGEST_UID:,} nodes over its lifetime")

    def _require_open(self) -> None:
        if not self._open:
            raise EditError(
                "this edit is not open: use it inside its own `with net.edit(...) as edit:` block,"
                " before commit()"
            )


def _all_differ(rows: Tensor) -> bool:
    numbers = rows.numpy()
    return bool((numbers[1:] > numbers[:-1]).all()) or len(np.unique(numbers)) == len(numbers)


def edit(
    *nets: "Graph",
    reason: str = "",
    by: str | None = None,
    trial: bool = False,
    generator: torch.Generator | None = None,
    allow_dead: bool | None = None,
) -> "_Together":
    """Opens one transaction over several nets: `with gn.edit(gate, up, down) as (g, u,
    d):`.

    The end of the block validates and prepares everything in every net, followers included, before
    any of them changes; an error leaves all of them and the random numbers unchanged. A net whose
    edit is empty commits nothing. The commits of the others are parts of one transaction
    (`commit.joint`), which `gn.undo` reverts.

    Args:
        nets: the nets; each has its own edit, in this order.
        reason: why, for the journal of every net.
        by: which rule or person edits.
        trial: revert all edits when the block ends, as `net.edit(trial=True)` does. `commit()` of
            any of the edits applies all of them.
        generator: source of the random numbers for new weights; the generator of the device by
            default.
        allow_dead: as for `net.edit`.

    Raises:
        EditError: a net is given twice or has an open edit, or an operation is impossible; nothing
            changes.

    Examples:
        >>> import grapnet as gn
        >>> up, down = gn.GrapNet([4, 8]), gn.GrapNet([8, 4])
        >>> with gn.edit(up, down, reason="remove three hidden units") as (first, second):
        ...     first.remove_nodes(up.layers[1][:3], interface=True)
        ...     second.remove_nodes(down.layers[0][:3], interface=True)
        >>> up.sizes, down.sizes
        ([4, 5], [5, 4])
        >>> receipts = gn.undo(up, down)
        >>> up.sizes, down.sizes
        ([4, 8], [8, 4])
    """
    require_nets(nets, "edit")
    edits = tuple(
        net.edit(reason, by=by, trial=trial, generator=generator, allow_dead=allow_dead)
        for net in nets
    )
    return _Together(edits)


class _Together:
    """The `with` statement of `gn.edit`."""

    def __init__(self, edits: tuple[Edit, ...]) -> None:
        self._statement = Statement(edits)
        for edit in edits:
            edit._statement = self._statement

    def __enter__(self) -> tuple[Edit, ...]:
        self._statement.enter()
        return self._statement.edits

    __exit__ = Exit()


class Hold(_Together):
    """Blocks edits of graphs while something else changes them."""

    def __init__(self, nets: "Sequence[Graph]", reason: str) -> None:
        super().__init__(tuple(net.edit(reason) for net in nets))

    def __enter__(self) -> tuple[Edit, ...]:
        edits = super().__enter__()
        for edit in edits:
            edit._end()
        return edits


def require_nets(nets: "Sequence[Graph]", verb: str) -> None:
    """Raises unless there are nets, each given once."""
    from ._graph import Graph

    if not nets:
        raise EditError(f"{verb} takes the nets one by one, got none: gn.{verb}(first, second)")
    for n, net in enumerate(nets):
        if not isinstance(net, Graph):
            raise TypeError(
                f"{verb} takes the nets one by one, gn.{verb}(*nets), got {type(net).__name__}"
            )
        again = next(m for m, other in enumerate(nets) if other is net)
        if again < n:
            raise EditError(
                f"{verb} was given one net twice, as number {again + 1} and {n + 1}; name each net"
                " once"
            )
