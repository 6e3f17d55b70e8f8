"""SpaceEdit: the verbs of a transaction on the spaces of a model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from grapnet.core._change import Change, LayerChange
from grapnet.core._commit import Draws, uid_after
from grapnet.core._edit import Edit, layer_number, rows_of
from grapnet.core._errors import EditError
from grapnet.core._grid_map import GridMap
from grapnet.core._index_map import as_tensor
from grapnet.core._node import GrapNode
from grapnet.core._opened import CUT, FROZEN, Pattern
from grapnet.core._resolve import Assigned, LayerDraft, Requests, checked_owner, union
from grapnet.core._sets import Nodes, NodeSet, RelationSet

from ._blocks import Asked, Insertion, Removal, container_of, place_in
from ._grouped import Channels
from ._rewiring import CellValues, Joined, Wish
from ._weights import leading_shape

if TYPE_CHECKING:
    from ._adopted import Adopted
    from ._space import Space

Start = Literal["alike", "zero"]


@dataclass(frozen=True)
class Growth:
    """How the weights of new nodes start."""

    readers: Start = "zero"
    writers: Start = "alike"
    values: Mapping[str, Tensor] = field(default_factory=dict)


class _OfNets:
    """A verb of the edits of nets, which tab completion does not show for an adopted model."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise EditError(self._message)


class SpaceEdit(Edit):
    """A `with net.edit(...) as edit:` block on an adopted model.

    Nodes are added, removed, frozen and given owners; every tensor that has them follows. Single
    relations are cut, connected and frozen. Whole blocks are inserted and removed, in edits of
    their own.
    """

    graph: "Adopted"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._growths: dict[int, Growth] = {}
        self._wishes: dict[str, Wish] = {}
        self._blocks: list[Asked] = []
        # rows of parents and children to connect, by transition
        self._joined: dict[int, list[tuple[Tensor, Tensor]]] = {}
        # spaces whose nodes without parents leave, and whether those without children do, too
        self._orphaned: dict[int, bool] = {}
        # those of them that were not named
        self._unnamed: set[int] = set()

    def insert(
        self,
        path: str,
        *,
        after: int,
        state: Literal["clean", "copy"] = "clean",
        owner: str | None = None,
    ) -> None:
        """Inserts a copy of a block behind it, which changes nothing until it is trained.

        The copy has the weights of the block, except for those that write the stream last: they
        are 0, biases included, so that the output of the model stays the same to the bit. Counters
        and indices of the model, such as `num_hidden_layers` and `layer_idx`, follow. An edit that
        inserts blocks does nothing else; indices are those from before the edit.

        Args:
            path: an nn.Sequential or nn.ModuleList in the model, such as "transformer.h".
            after: the index of the block to copy; negative ones count from the end.
            state: how attached optimizers start for the Parameters of the copy: "clean", or with a
                "copy" of the state for the copied block. Either way they are in its groups.
            owner: a tag for the nodes that come with the copy.

        Raises:
            EditError: there is no such block, or it reads another space than it writes. At the end
                of the edit: the model would not run with another block, or would not be the same.
        """
        container = container_of(self.graph.model, path)
        index = place_in(container, path, after)
        if state not in ("clean", "copy"):
            raise EditError(f'state is "clean" or "copy", got {state!r}')
        checked_owner(owner)
        self._note("insert", path=path, after=index, state=state, owner=owner)
        self._blocks.append(Insertion(path, index, state == "copy", owner))

    def remove(self, path: str, index: int) -> None:
        """Removes a block that reads the space that it writes, as a residual block does.

        Counters and indices follow, and undo brings back the same block, with the state of
        attached optimizers; see `insert`.

        Args:
            path: an nn.Sequential or nn.ModuleList in the model.
            index: the index of the block; negative ones count from the end.

        Raises:
            EditError: there is no such block, it reads another space than it writes, or it is the
                only one. At the end of the edit: the model would not run without it.
        """
        container = container_of(self.graph.model, path)
        index = place_in(container, path, index)
        self._note("remove", path=path, index=index)
        self._blocks.append(Removal(path, index))

    def add_nodes(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        layer: "Space | int",
        count: int,
        *,
        owner: str | None = None,
        readers: Start = "zero",
        writers: Start = "alike",
        values: Mapping[str, Tensor] | None = None,
    ) -> NodeSet:
        """Adds nodes at the end of a space and returns them.

        By default the weights that read them are 0, so that the function of the model stays. Where
        it would not, because activations alone read them or because the size of the space is also
        a number in the formula, this raises EditError. A norm over the nodes changes all the same.

        Args:
            layer: the space, or its number.
            count: how many.
            owner: a tag to select them by.
            readers: "zero", or "alike" to draw them as uniformly and as widely as the present
                weights of the tensor.
            writers: the same for the weights that compute the nodes. Other entries, such as biases
                and running statistics, start from the mean of the present ones.
            values: the new entries of some tensors, by name, instead: a tensor of the shape of the
                Parameter or buffer, with only the new positions on the axis of the space.
        """
        number = layer_number(self.graph, layer)
        self._require_free([number])
        for name, start in (("readers", readers), ("writers", writers)):
            if start not in ("alike", "zero"):
                raise EditError(f'{name} is "alike" or "zero", got {start!r}')
        space = self.graph.spaces[number]
        if number in self._growths:
            raise EditError(f"this edit adds nodes to {space.name} twice; add all of them at once")
        if readers == "zero" and not space.readers:
            raise EditError(
                f"no tensor of the model reads the nodes of {space.name}, so that new ones change"
                ' its function; add them nevertheless with readers="alike"'
            )
        nodes = self._add_nodes(number, count, "identity", owner, None)
        self._growths[number] = Growth(readers, writers, dict(values or {}))
        return nodes

    def remove_nodes(self, nodes: Nodes, *, interface: bool = False) -> None:
        """Removes nodes from every tensor that has them.

        Args:
            nodes: the nodes to remove.
            interface: must be True to remove nodes that the model returns, which changes the width
                of its output.

        Raises:
            EditError: the space is pinned, or would be left without nodes.
        """
        found = self._rows(nodes)
        numbers = list(found)
        if interface:
            numbers = [n for n in numbers if self.graph.layers[n].pins != ("output",)]
        self._require_free(numbers)
        self._remove_rows(found)

    def _one_layer(self, nodes: Nodes, role: str) -> tuple[int, Tensor]:
        # Pairs may name a node several times, which only uids can, and channels can be related.
        if isinstance(nodes, Tensor | NodeSet | GrapNode):
            found = rows_of(self.graph, self._requests, nodes)
            if len(found) == 1:
                return next(iter(found.items()))
        return super()._one_layer(nodes, role)

    def _rows(self, nodes: Nodes) -> dict[int, Tensor]:
        # A uid counts the nodes of all spaces, and is easily taken for a row of one.
        if not isinstance(nodes, NodeSet | GrapNode):
            raise EditError(
                "nodes of an adopted model are given as such, space[[0, 1]] or space.weakest(...),"
                f" not as {type(nodes).__name__}"
            )
        found = super()._rows(nodes)
        for number in found:
            layer = self.graph.layers[number]
            if isinstance(layer, Channels):
                raise EditError(f"{layer.name} are channels, not nodes: {layer.pins[0]}")
        return found

    def _require_free(self, numbers: Any) -> None:
        for number in numbers:
            space = self.graph.layers[number]
            if space.pins:
                raise EditError(
                    f"the nodes of {space.name} cannot be added or removed: {space.pins[0]}"
                )

    def _require_silence(self) -> None:
        """Raises EditError where new nodes whose readers are 0 change the function nevertheless."""
        silent = [
            self.graph.spaces[n] for n, growth in self._growths.items() if growth.readers == "zero"
        ]
        self.graph.prove(silent)
        for space in silent:
            if space.verdict == "differs":
                raise EditError(
                    f"the size of {space.name} is also a number in the formula, so that new nodes"
                    ' change the function of the model; add them nevertheless with readers="alike"'
                )

    def connect(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        parents: Nodes,
        children: Nodes,
        *,
        tensor: str | None = None,
        pairs: Literal["all", "aligned"] = "all",
        weights: Literal["linear", "zero"] | Tensor | float = "linear",
        transition: int | None = None,
    ) -> None:
        """Connects relations that were cut.

        Args:
            parents: nodes of one space.
            children: nodes of one space, of which a tensor has relations to the parents.
            tensor: the module or the tensor, where several lead from one space to the other.
            pairs: "all" relates every parent to every child; "aligned" relates the first to the
                first, and so on.
            weights: "linear" (the distribution of nn.Linear for the inputs of a child), "zero", one
                number, or a tensor of [relations, numbers of a relation].
            transition: the number of the tensor in `net.transitions`, instead of its name.
        """
        source, parent_rows = self._one_layer(parents, "parents")
        target, child_rows = self._one_layer(children, "children")
        if len(parent_rows) == 0 or len(child_rows) == 0:
            return
        t = self._transition_between(source, target, tensor, transition)
        weight = self.graph.transitions[t]
        if pairs == "all":
            count = len(child_rows)
            child_rows = child_rows.repeat(len(parent_rows))
            parent_rows = parent_rows.repeat_interleave(count)
        elif len(parent_rows) != len(child_rows):
            raise EditError(
                f"aligned pairs need as many parents as children, got {len(parent_rows)} and"
                f" {len(child_rows)}"
            )
        if bool((parent_rows >= len(self.graph.layers[source])).any()) or bool(
            (child_rows >= len(self.graph.layers[target])).any()
        ):
            raise EditError("new nodes of a model have all of their relations; cut some later")
        rows = weight.rows(parent_rows.long(), child_rows.long())
        bound = max(weight.inputs_of_a_child, 1) ** -0.5
        numbers = None
        if not isinstance(weights, str):
            numbers = torch.as_tensor(weights).detach()
            if numbers.numel() not in (1, len(rows) * weight._payload):
                raise EditError(
                    f"{len(rows)} relations of {weight._payload} numbers each need one weight or"
                    f" {len(rows) * weight._payload}, got {numbers.numel()}"
                )
        elif weights == "zero":
            numbers = torch.zeros(1)
        elif weights != "linear":
            raise EditError(f'weights are "linear", "zero" or numbers, got {weights!r}')
        self._note("connect", tensor=weight.name, relations=len(rows))
        wish = self._wish(weight.name)
        wish.connect.append(Joined(rows, numbers, bound))
        wish.count(added=len(rows))
        self._joined.setdefault(t, []).append((parent_rows.long(), child_rows.long()))

    def _transition_between(
        self, source: int, target: int, tensor: str | None, transition: int | None
    ) -> int:
        """Returns the number of the tensor that leads from one space to another."""
        found = []
        for t, ends in enumerate(self.graph.ends):
            is_meant = transition in (None, t)
            if tensor is not None and t not in self.graph._named_transitions(tensor):
                is_meant = False
            if ends == (source, target) and is_meant:
                found.append(t)
        if len(found) == 1:
            return found[0]
        layers = self.graph.layers
        spaces = f"{layers[source].name} to {layers[target].name}"
        if not found:
            raise EditError(f"no tensor leads from {spaces}")
        names = ", ".join(self.graph.transitions[t].name for t in found)
        raise EditError(f"several tensors lead from {spaces}: {names}; say which with tensor=")

    @property
    def n_connections(self) -> int:
        """The number of relations that this edit connects so far, those of new nodes included."""
        new = {}
        for number, asked in self._requests.newborns.items():
            new[number] = sum(len(one.uids) for one in asked)
        total = self._relations_of(new)
        for asked in self._joined.values():
            total += sum(len(parents) for parents, _ in asked)
        return total

    def _relations_of(self, new: Mapping[int, int]) -> int:
        """Returns how many relations come with new nodes, given their number by space."""
        before = [len(space) for space in self.graph.spaces]
        after = [size + new.get(number, 0) for number, size in enumerate(before)]
        weights = self.graph.transitions
        return sum(weight.possible(after) - weight.possible(before) for weight in weights)

    @property
    def connections(self) -> tuple[Tensor, Tensor]:
        """The uids of the parents and children of the relations that this edit connects so far,
        without those of new nodes.
        """
        self._require_open()
        none = torch.empty(0, dtype=torch.int64)
        parents = [none]
        children = [none]
        for t in sorted(self._joined):
            weight = self.graph.transitions[t]
            upper, lower = self._connected_rows(t)
            parents.append(self.graph.layers[weight.source].uid[upper])
            children.append(self.graph.layers[weight.target].uid[lower])
        return torch.cat(parents), torch.cat(children)

    def _connected_rows(self, t: int) -> tuple[Tensor, Tensor]:
        none = torch.empty(0, dtype=torch.int64)
        asked = self._joined.get(t, ())
        parents = torch.cat([none, *(upper for upper, _ in asked)])
        children = torch.cat([none, *(lower for _, lower in asked)])
        return parents, children

    def _set_frozen(
        self, verb: str, what: RelationSet | Nodes, incoming: bool, outgoing: bool, bias: bool
    ) -> None:
        if isinstance(what, RelationSet):
            super()._set_frozen(verb, what, incoming, outgoing, bias)
            return
        kinds = {"writer": incoming, "reader": outgoing, "rider": bias}
        found = self._rows(self._existing(what))
        count = sum(len(rows) for rows in found.values())
        self._note(verb, nodes=count, incoming=incoming, outgoing=outgoing, bias=bias)
        for number, rows in found.items():
            space = self.graph.spaces[number]
            for (name, dim), at in space.places().items():
                grid = self.graph._grids()[name]
                if grid.is_parameter and kinds[self.graph._role(space, name, dim)]:
                    table = torch.arange(len(self.graph._pattern_of(name).kinds))
                    table = table.view(leading_shape(self.graph._pattern_of(name)))
                    chosen = table.index_select(dim, at[rows.long()].reshape(-1)).reshape(-1)
                    wish = self._wish(name)
                    getattr(wish, verb).append(chosen)
                    wish.count(frozen_or_unfrozen=len(rows))

    def assign(self, what: nn.Parameter | RelationSet, values: Any) -> None:
        """Gives a Parameter of the model, or relations, other numbers when the edit commits.

        Optimizers, copies, undo and redo follow as for nets, see `Edit.assign`. Numbers of nodes
        and relations that leave in the same edit are not used; new nodes get none.

        Args:
            what: a Parameter of the model, tied ones as any of their modules has them; or
                relations. Where relations were cut or frozen, `module.weight` is computed:
                `dict(model.named_parameters())[name]` is the Parameter.
            values: a tensor of the present shape of the Parameter. Where relations were cut, of the
                shape of `module.weight`, in which the numbers of missing ones are not used, and
                those of frozen ones have to stay as they are. For relations [n] or [n, numbers of a
                relation], in the order of `relations.weights`; or one number for all.

        Raises:
            EditError: the values have another shape, or the Parameter is not in the model. At the
                end of the edit: a number is assigned twice, or a value is not finite.
            FrozenError: at the end of the edit, if a frozen number would change and this edit does
                not unfreeze it.
        """
        self._require_open()
        if isinstance(what, nn.Parameter):
            name = self._name_of(what)
            shape = self.graph._grids()[name].shape
            numbers = as_tensor(values).detach()
            if tuple(numbers.shape) != shape:
                raise EditError(
                    f"the values for {name} have the shape {list(shape)}, got {list(numbers.shape)}"
                )
            self._assign(name, torch.arange(numbers.numel()), numbers.reshape(-1).clone())
            return
        if not isinstance(what, RelationSet):
            raise TypeError(
                "assign takes a Parameter of the model, as model.named_parameters() returns it, or"
                f" a RelationSet, not {type(what).__name__}"
            )
        found = self._positions(what)
        cells = {}
        for t, at in found.items():
            weight = self.graph.transitions[t]
            width = weight._pattern().width
            # [relations, rows per relation, cells per row]
            rows = weight.rows(*weight._ends(at.cpu()))[:, :, None]
            cells[t] = (rows * width + torch.arange(width)).reshape(-1)
        counts = [len(own) for own in cells.values()]
        numbers = as_tensor(values).detach().reshape(-1)
        if len(numbers) not in (1, sum(counts)):
            raise EditError(
                f"these {len(what)} relations need {sum(counts)} values (or one for all), got"
                f" {len(numbers)}"
            )
        for (t, own), part in zip(
            cells.items(), numbers.expand(sum(counts)).split(counts), strict=True
        ):
            self._assign(self.graph.transitions[t].name, own, part.clone())
            self._requests.assign_relations[t].append(Assigned(found[t], part))

    def _assign(self, name: str, cells: Tensor, values: Tensor) -> None:
        """Gives cells of a tensor, by their positions in the vector of all of them, other
        numbers.
        """
        self._note("assign", tensor=name, cells=len(cells))
        device = self.graph._grids()[name].tensor.device
        self._wish(name).assign.append(CellValues(cells, values.to(device)))

    def _name_of(self, parameter: nn.Parameter) -> str:
        """Returns the name of a Parameter of the model; raises EditError if there is none."""
        for name, grid in self.graph._stores().items():
            if grid.parameter is parameter:
                return name
        raise EditError("the Parameter to assign is not one of this model")

    def _fill(self, name: str, pattern: Pattern) -> None:
        """Connects all cells of a tensor that are cut, with 0, and makes frozen ones free."""
        self._note("close", tensor=name)
        cut = (pattern.kinds == CUT).nonzero()
        wish = self._wish(name)
        wish.connect.append(Joined(cut, torch.zeros(1), 0.0))
        wish.unfreeze.append((pattern.kinds == FROZEN).nonzero().flatten())

    def _wish(self, name: str) -> Wish:
        """Returns what the edit asks of a tensor so far."""
        return self._wishes.setdefault(name, Wish())

    def _all_wishes(self) -> dict[str, Wish]:
        """Returns what the edit asks of tensors, relations included."""
        wishes = {name: replace(wish) for name, wish in self._wishes.items()}
        asked = self._requests
        for kind, requests in (
            ("cut", asked.cuts),
            ("freeze", asked.freeze_relations),
            ("unfreeze", asked.unfreeze_relations),
        ):
            for t, parts in requests.items():
                weight = self.graph.transitions[t]
                at = union(parts, self.graph.device).cpu()
                wish = wishes.setdefault(weight.name, Wish())
                rows = weight.rows(*weight._ends(at)).reshape(-1)
                setattr(wish, kind, [*getattr(wish, kind), rows])
                if kind == "cut":
                    wish.count(removed=len(at))
                else:
                    wish.count(frozen_or_unfrozen=len(at))
        return wishes

    def _require_alive(self) -> None:
        """Raises EditError if cuts take the last relation that leads to a space, or the last parent
        of an output. Nodes that lose their parents with other nodes are not looked at.
        """
        graph = self.graph
        cuts = {t: union(asked, graph.device) for t, asked in self._requests.cuts.items()}
        for number in sorted({graph.transitions[t].target for t in cuts}):
            entering = graph.entering(number)
            left = sum(graph.transitions[t].size - len(cuts.get(t, ())) for t in entering)
            left += sum(len(self._connected_rows(t)[0]) for t in entering)
            name = graph.layers[number].name
            if left == 0:
                raise EditError(
                    f"this edit takes the last relation that leads to {name};"
                    " pass allow_dead=True to do so nevertheless"
                )
            if graph._is_output(number):
                count = self._outputs_without_parents(number, cuts)
                if count:
                    raise EditError(
                        f"this edit takes the last parent of {count} outputs ({name});"
                        " pass allow_dead=True to do so nevertheless"
                    )

    def _outputs_without_parents(self, number: int, cuts: Mapping[int, Tensor]) -> int:
        """Returns how many nodes of a space lose their last parent."""
        graph = self.graph
        size = len(graph.layers[number])
        before = torch.zeros(size, dtype=torch.int64)
        after = torch.zeros(size, dtype=torch.int64)
        for t in graph.entering(number):
            topology = graph.transitions[t].topology
            before += topology.fan_in().cpu()
            if t in cuts:
                lost = topology.child[cuts[t].long()]
                after -= torch.bincount(lost.cpu(), minlength=size)
            after += torch.bincount(self._connected_rows(t)[1], minlength=size)
        return int(((before > 0) & (before + after <= 0)).sum())

    def remove_orphans(
        self,
        layers: "Space | int | str | Iterable[Space | int | str] | None" = None,
        *,
        fold_bias: bool = False,
        childless: bool = False,
    ) -> None:
        """Removes, when the edit commits, nodes without parents, and those that this leaves
        without; a space keeps at least one node.

        Args:
            layers: spaces, their names or numbers; by default all from which nodes can be removed
                exactly.
            fold_bias: must be False: what orphans send passes through the code of the model.
            childless: also remove nodes that no relation leads away from. Nothing reads them, so
                that the function of the model stays.

        Raises:
            EditError: a space is pinned, or tensors write it that hold no relations.
        """
        if fold_bias:
            raise EditError(
                "fold_bias=True works on nets: what nodes without parents send passes through the"
                " code of an adopted model"
            )
        if layers is None:
            numbers = self.graph._orphanages()
            self._unnamed.update(numbers)
        else:
            numbers = self._numbers_of(layers)
            self._unnamed.difference_update(numbers)
        self._note("remove_orphans", layers=numbers, fold_bias=False, childless=childless)
        for number in numbers:
            self._orphaned[number] = self._orphaned.get(number, False) or childless

    def _numbers_of(self, layers: "Space | int | str | Iterable[Space | int | str]") -> list[int]:
        """Returns the numbers of spaces that can have orphans; raises EditError for others."""
        # A space is a set of nodes, and so could be taken for several.
        if isinstance(layers, int | str | NodeSet):
            layers = (layers,)
        numbers = []
        for layer in layers:
            if isinstance(layer, str):
                layer = self.graph.space(layer)
            numbers.append(layer_number(self.graph, layer))
        self._require_free(numbers)
        for number in numbers:
            space = self.graph.spaces[number]
            if not self.graph._has_known_parents(number):
                raise EditError(
                    f"{space.name} has no orphans: it is written by tensors that hold no relations"
                )
        return numbers

    def _orphans(self, spaces: Mapping[int, bool]) -> dict[int, Tensor]:
        """Returns the rows of the nodes that leave because they have no parents, by space.

        A node that leaves takes its relations with it, so that others may follow.

        Args:
            spaces: whose nodes leave, and whether those without children do, too.
        """
        graph = self.graph
        gone = {}
        for number, asked in self._requests.removals.items():
            gone[number] = torch.zeros(len(graph.spaces[number]), dtype=torch.bool)
            rows = torch.cat(asked).long()
            gone[number][rows[rows < len(gone[number])]] = True
        found: dict[int, Tensor] = {}
        relations: dict[int, tuple[Tensor, Tensor]] = {}
        searching = True
        while searching:
            searching = False
            for number, childless in spaces.items():
                size = len(graph.spaces[number])
                gone.setdefault(number, torch.zeros(size, dtype=torch.bool))
                lonely = self._are_alone(number, gone, relations, parents=True)
                if childless and graph._has_known_children(number):
                    lonely |= self._are_alone(number, gone, relations, parents=False)
                lonely &= ~gone[number]
                # A space keeps a node.
                if bool((lonely | gone[number]).all()):
                    lonely[int((~gone[number]).int().argmax())] = False
                if bool(lonely.any()):
                    searching = True
                    gone[number] = gone[number] | lonely
                    found[number] = found.get(number, torch.zeros_like(lonely)) | lonely
        return {number: marks.nonzero().flatten().int() for number, marks in found.items()}

    def _are_alone(
        self,
        number: int,
        gone: Mapping[int, Tensor],
        relations: dict[int, tuple[Tensor, Tensor]],
        *,
        parents: bool,
    ) -> Tensor:
        """Returns which nodes of a space will have no parents, or no children, [nodes] bool.

        Args:
            number: the space.
            gone: which nodes of spaces leave.
            relations: the rows of the parents and children that tensors will relate; what is
                missing is added.
            parents: whether parents are looked for, or children.
        """
        graph = self.graph
        counts = torch.zeros(len(graph.spaces[number]), dtype=torch.int64)
        for t in graph.entering(number) if parents else graph.leaving(number):
            weight = graph.transitions[t]
            far = weight.source if parents else weight.target
            # New nodes have all of their relations.
            counts += sum(len(born.uids) for born in self._requests.newborns.get(far, ()))
            if weight.grid.opened is None and t not in self._requests.cuts:
                # A tensor that has all of its relations is not wired, which would take long.
                counts += len(graph.spaces[far])
                if far in gone:
                    counts -= int(gone[far].sum())
                continue
            if t not in relations:
                relations[t] = self._relations_after(t)
            upper, lower = relations[t]
            near_rows, far_rows = (lower, upper) if parents else (upper, lower)
            if far in gone:
                near_rows = near_rows[~gone[far][far_rows]]
            counts += torch.bincount(near_rows, minlength=len(counts))
        return counts == 0

    def _relations_after(self, t: int) -> tuple[Tensor, Tensor]:
        """Returns the rows of the parents and children of the relations of present nodes that a
        tensor will have.
        """
        topology = self.graph.transitions[t].topology.to(torch.device("cpu"))
        stays = torch.ones(topology.n_relations, dtype=torch.bool)
        for asked in self._requests.cuts.get(t, ()):
            stays[asked.cpu().long()] = False
        upper, lower = self._connected_rows(t)
        parents = torch.cat([topology.parents().long()[stays], upper])
        children = torch.cat([topology.child.long()[stays], lower])
        return parents, children

    def _with_orphans(self) -> Requests:
        """Returns the requests with the removal of orphans.

        Spaces that were not named, and of which a removal turns out not to be exact, keep theirs.
        """
        if not self._orphaned:
            return self._requests
        found = self._orphans(self._orphaned)
        spaces = self.graph.spaces
        self.graph.prove([spaces[number] for number in found])
        inexact = {n for n in self._unnamed if spaces[n].verdict == "differs"}
        if inexact & found.keys():
            exact = {n: own for n, own in self._orphaned.items() if n not in inexact}
            found = self._orphans(exact)
        removals = dict(self._requests.removals)
        for number, rows in found.items():
            removals[number] = [*removals.get(number, ()), rows]
        return replace(self._requests, removals=removals)

    insert_layer: Any = _OfNets("use edit.insert for an adopted model")
    remove_layer: Any = _OfNets("use edit.remove for an adopted model")
    insert_skip: Any = _OfNets("the skips of an adopted model are in its own code")
    remove_skip: Any = _OfNets("the skips of an adopted model are in its own code")
    set_activation: Any = _OfNets("the activations of an adopted model are in its own code")

    def __dir__(self) -> list[str]:
        verbs = vars(SpaceEdit)
        return [n for n in super().__dir__() if not isinstance(verbs.get(n), _OfNets)]

    def _resolved(self, draws: Draws) -> Change:
        change = Change(self._changed_nodes(), {})
        if not self.allow_dead:
            self._require_alive()
        wishes = self._all_wishes()
        if self._blocks:
            if wishes or self._growths or not change.is_empty:
                raise EditError(
                    "an edit that inserts or removes blocks does nothing else; change nodes and"
                    " relations in another edit"
                )
            change = self.graph._deepened(self._blocks)
            self._next_uid = uid_after(self.graph, change)
            return change
        generator = None
        if self._growths or any(wish.connect for wish in wishes.values()):
            generator = draws.source(self.generator, self.graph.device)
        if self._growths:
            self._require_silence()
        return self.graph._completed(change, self._growths, wishes, generator)

    def _changed_nodes(self) -> dict[int, LayerChange]:
        """Returns how the nodes of spaces change; relations are changed in tensors."""
        requests = self._with_orphans()
        asked = {*requests.newborns, *requests.removals, *requests.namings}
        found = {}
        for number in sorted(asked):
            part = LayerDraft(self.graph, requests, number).change(requests, None)
            if part.index.new_size == 0:
                raise EditError(f"this edit removes every node of {self.graph.spaces[number].name}")
            if not part.is_empty:
                found[number] = part
        return found


def values_of_newborns(
    net: "Adopted",
    name: str,
    index: GridMap,
    layers: Mapping[int, LayerChange],
    growths: Mapping[int, Growth],
    generator: torch.Generator | None,
) -> Tensor:
    """Returns the cells that come into a tensor, as one vector.

    A tensor may read one growing space and write another: cells of new readers are set last, so
    that new nodes that are read stay silent.
    """
    tensor = net._grids()[name].whole
    new = index.carry(tensor, 0.0)
    silent: list[tuple[int, Tensor]] = []
    for dim, axis in index.axes.items():
        if axis.n_born == 0:
            continue
        at = axis.inserted.to(new.device).long()
        for number, growth in growths.items():
            space = net.spaces[number]
            if (name, dim) not in space._members:
                continue
            role = net._role(space, name, dim)
            start: Any = "mean"
            if role == "reader":
                start = growth.readers
            elif role == "writer":
                start = growth.writers
            if name in growth.values:
                given = growth.values[name].to(new)
                shape = list(new.shape)
                shape[dim] = len(at)
                if list(given.shape) != shape:
                    raise EditError(
                        f"the new entries of {name} have the shape {shape}, got {list(given.shape)}"
                    )
                new.index_copy_(dim, at, given)
            elif start == "alike":
                new.index_copy_(dim, at, _alike(tensor, new.index_select(dim, at), generator))
            elif start == "mean":
                mean = tensor.mean(dim, keepdim=True, dtype=_mean_dtype(tensor)).to(new)
                # The other axes of the tensor may change in the same edit.
                others = {other: index.axes[other] for other in index.axes if other != dim}
                mean = GridMap(tuple(mean.shape), others).carry(mean)
                new.index_copy_(dim, at, mean.expand_as(new.index_select(dim, at)))
            else:
                silent.append((dim, at))
    for dim, at in silent:
        new.index_fill_(dim, at, 0.0)
    return index.inverse().take(new)


def _alike(tensor: Tensor, block: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns numbers of the shape of `block`, uniform and as wide as the entries of a tensor."""
    spread = tensor.double().std(correction=0).item() if tensor.numel() > 1 else 0.0
    device = block.device if generator is None else generator.device
    numbers = torch.empty(block.shape, dtype=block.dtype, device=device)
    numbers.uniform_(-1, 1, generator=generator)
    return numbers.to(block.device) * (3**0.5 * spread)


def _mean_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.is_floating_point():
        return tensor.dtype
    return torch.float64
