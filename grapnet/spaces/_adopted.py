"""gn.adopt: a whole model as one editable graph of spaces."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from grapnet._torch import uncompiled
from grapnet.core._change import AttributeChange, Change, DepthChange, GridChange, LayerChange
from grapnet.core._commit import require_editable, settle, unsettled
from grapnet.core._errors import EditError, InvariantError
from grapnet.core._graph import Count, Graph
from grapnet.core._grid import Grid, named_grids
from grapnet.core._grid_map import GridMap
from grapnet.core._index_map import IndexMap
from grapnet.core._layer import uid_behind
from grapnet.core._opened import Pattern, opens_any, same_pattern
from grapnet.core._prepare import View
from grapnet.core._sets import RelationSet
from grapnet.execution._opened import describe as describe_opened
from grapnet.following._optimizers import attach

from ._axes import Expression, atoms_of, covered, size_of
from ._blocks import Asked
from ._costs import Costs, measured
from ._depth import deepened
from ._discovery import Example, Twin, Typed, discover, discover_twin
from ._edit import Growth, SpaceEdit, values_of_newborns
from ._gates import Gates, submodule
from ._grouped import Channels, relations_of
from ._probe import probe
from ._rewiring import Wish, assignment_of, rewired
from ._space import Space, spaces_of

# The adopted graphs that are alive, by the id of their models.
_adopted: "weakref.WeakValueDictionary[int, Adopted]" = weakref.WeakValueDictionary()


class Adopted(Graph):
    """A model seen as one graph: its spaces are the layers, its tensors connect them.

    The model itself stays as it is: its classes, state-dict keys, hooks and forward. Its
    transitions are in the Parameters of the model.
    """

    _spaces: Sequence[Space] = ()
    # the ends of relations in convolutions with groups, which are layers behind the spaces
    _channels: Sequence[Channels] = ()

    def __init__(self, model: nn.Module, typed: Typed, gates: Gates) -> None:
        super().__init__([], [], ends=[])
        self._spaces = spaces_of(typed)
        self._next_uid = uid_behind(self._spaces)
        self._bind()
        self._modules["model"] = model
        self._typed = typed
        self._grids_held = named_grids(model)
        self._weights, self._channels = relations_of(self, typed, self.spaces)
        self._gates = gates
        # The model when its tensors were last found where they belong.
        self._seen = _Seen([], [None])
        self._costs: Costs | None = None
        # Numbers of modules that edits have changed, as they were at adoption.
        self._first_numbers: dict[tuple[str, str], Any] = {}
        self._has_ended = False
        # What the shapes of tensors were last computed from, and the shapes.
        self._shapes: tuple[Typed | None, list[int], dict[str, tuple[int, ...]]] = (None, [], {})
        # Graphs over copies of the model, which hold them for as long as this graph lives.
        self._copies: weakref.WeakKeyDictionary[nn.Module, Adopted] = weakref.WeakKeyDictionary()

    @property
    def model(self) -> nn.Module:
        """The adopted model."""
        model = self._modules["model"]
        assert model is not None
        return model

    @property
    def spaces(self) -> list[Space]:
        """All spaces of the model, pinned ones included."""
        if unsettled:
            settle()
        return list(self._spaces)

    @property
    def _own_layers(self) -> Sequence[Any]:
        return self.spaces

    @property
    def layers(self) -> Sequence[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The spaces, and behind them the channels that convolutions with groups relate."""
        return [*self.spaces, *self._channels]

    def _find(self, uid: int) -> tuple[int, int] | None:
        if uid >= 0:
            return super()._find(uid)
        wanted = torch.tensor([uid], device="cpu")
        for channels in self._channels:
            row = int(channels.rows(wanted))
            if row >= 0:
                return channels.index, row
        return None

    @property
    def transitions(self) -> Sequence[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The relations between spaces, one `Weight` for every tensor that reads one space and
        writes another.
        """
        if unsettled:
            settle()
        return self._weights

    @property
    def _wired(self) -> Sequence[Any]:
        return ()

    @property
    def device(self) -> torch.device:
        """The device of the first Parameter."""
        for grid in self._grids_held.values():
            return grid.tensor.device
        return torch.device("cpu")

    def space(self, name: str, *, side: Literal["out", "in"] = "out") -> Space:
        """Returns a space by its own name, or by the name of a module or of a tensor that has it.

        Args:
            name: the name of a space (`print(net)` lists them), the path of a module, or the name
                of a Parameter or buffer.
            side: whether the space of the module's output is meant, or that of its first input.

        Raises:
            KeyError: nothing has this name, or it has no space.
        """
        own = [space for space in self.spaces if space.name == name]
        if own and side == "out":
            return own[0]
        typed = self._typed
        if side == "out":
            axes = typed.outputs.get(name)
        else:
            axes = typed.inputs.get(name)
        if axes is None:
            axes = typed.axes.get(name)
        if axes is None:
            raise KeyError(
                f"{name!r} is the name of no space or tensor, nor of a module that ran in the"
                " examples with one output"
            )
        by_atom = {space._atom: space for space in self.spaces}
        found = []
        for axis in axes:
            found += [by_atom[atom] for atom in atoms_of(axis) if atom in by_atom]
        # The nodes that can be edited come first, then the outermost.
        found.sort(key=lambda space: bool(space.pins))
        if not found:
            raise KeyError(f"{name!r} has no axis of nodes on this side")
        return found[0]

    def relations(self, name: str) -> RelationSet:
        """Returns the relations that a module or a tensor holds.

        Args:
            name: the path of a module, such as "layer1.0.conv2", or the name of a Parameter.

        Raises:
            KeyError: nothing has this name, or it holds no relations.
        """
        found = self._named_transitions(name)
        if not found:
            raise KeyError(f"{name!r} is no module or tensor that holds relations")
        return RelationSet.of(self, found)

    def _named_transitions(self, name: str) -> list[int]:
        found = []
        for t, weight in enumerate(self.transitions):
            if name in (weight.name, weight.name.rpartition(".")[0]):
                found.append(t)
        return found

    def _trainable_transitions(self) -> Sequence[int]:
        return [t for t, weight in enumerate(self.transitions) if weight.is_trainable]

    def _is_output(self, layer: int) -> bool:
        return "output" in self.layers[layer].pins

    def _orphanages(self) -> list[int]:
        """Returns the numbers of the spaces whose nodes can be without parents, and can then leave
        exactly: all tensors that write them hold relations.
        """
        found = []
        for number, space in enumerate(self.spaces):
            if space.verdict in ("exact", "unproved") and self._has_known_parents(number):
                found.append(number)
        return found

    def _has_known_parents(self, number: int) -> bool:
        """Returns whether all tensors that write a space, at least one, hold relations to it."""
        writers = self.spaces[number].writers
        holding = {self.transitions[t].name for t in self.entering(number)}
        return len(writers) > 0 and holding.issuperset(writers)

    def _has_known_children(self, number: int) -> bool:
        """Returns whether all tensors that read a space, at least one, hold relations from it."""
        readers = self.spaces[number].readers
        holding = {self.transitions[t].name for t in self.leaving(number)}
        return len(readers) > 0 and holding.issuperset(readers)

    def describe(self, batch: int = 256, *, training: bool = True) -> list[dict[str, Any]]:
        """Returns how every module runs with the relations that it holds, and why.

        `runs` is "plain" while all relations of a weight exist, and otherwise "sparse", "family",
        "grouped", or "rectangle": the module's own forward pass with a weight of zeros where
        relations were cut.

        Args:
            batch: the number of samples of a matrix product, or of positions of a convolution.
            training: whether gradients are computed.
        """
        paths = {module: path for path, module in self.model.named_modules()}
        rows = []
        for number, weight in enumerate(self.transitions):
            for module, name in weight.grid.holders:
                runs, why = describe_opened(module, name, batch, training=training)
                rows.append(
                    {
                        "transition": number,
                        "module": paths[module],
                        "relations": weight.size,
                        "runs": runs,
                        "why": why,
                    }
                )
        return rows

    def count(self) -> Count:
        """Returns the size of the model.

        A relation counts as one, whatever the number of its weights. `flops` are two for each
        multiply-add of the matrix products, convolutions and attentions in a forward pass of the
        first example, with the batch that it has.
        """
        trainable = 0
        frozen = 0
        for grid in self._stores().values():
            frozen += grid.n_frozen
            if grid.parameter.requires_grad:
                trainable += grid.parameter.numel()
            else:
                frozen += grid.parameter.numel()
        tensors = [grid.tensor for grid in self._grids_held.values()]
        return Count(
            nodes=sum(len(space) for space in self.spaces),
            relations=sum(weight.size for weight in self.transitions),
            biases=0,
            trainable=trainable,
            frozen=frozen,
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            flops=2 * self._macs(),
        )

    def _macs(self) -> int:
        return self._current_costs().macs(self._atom_sizes())

    def _current_costs(self) -> Costs:
        """Returns what the model costs as a function of its sizes; found when first asked for."""
        sizes = self._atom_sizes()
        if self._costs is None or not self._costs.holds_for(sizes):
            self._costs = measured(self)
        return self._costs

    def prove(self, spaces: Iterable[Space]) -> None:
        """Compares values for spaces whose verdict is "unproved", all of them at once."""
        self._probe({space: np.arange(len(space))[1::3] for space in spaces if len(space) > 1})

    def _probe(self, rows: Mapping[Space, np.ndarray]) -> None:
        """Does the same, by removing these rows from copies of the model."""
        unproved = {space: own for space, own in rows.items() if space.verdict == "unproved"}
        if unproved:
            probe(self, unproved)

    def edit(
        self,
        reason: str = "",
        *,
        by: str | None = None,
        trial: bool = False,
        generator: torch.Generator | None = None,
        allow_dead: bool | None = None,
        memory: Literal["normal", "low"] = "normal",
    ) -> SpaceEdit:
        """Opens a transaction; see `GrapNet.edit`.

        Args:
            reason: why, for the journal.
            by: which rule or person edits.
            trial: revert the edit when the block ends.
            generator: source of the random numbers for new weights.
            allow_dead: commit even if a space loses its last incoming relation, or an output its
                last parent; see `GrapNet.edit`.
            memory: "normal" computes all changed tensors and their optimizer state beside the
                present ones, which takes twice the memory. "low" lets them wait in the memory of
                the CPU, or in a temporary file if the model is there, and takes longer.
        """
        if memory not in ("normal", "low"):
            raise ValueError(f'memory is "normal" or "low", got {memory!r}')
        if allow_dead is None:
            allow_dead = trial
        edit = SpaceEdit(self, reason, by, trial, generator, allow_dead)
        edit._is_staged = memory == "low"
        return edit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self.model(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the Parameters of the model, under the names that they have there."""
        if unsettled:
            settle()
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers of the model, under the names that they have there."""
        if unsettled:
            settle()
        return self.model.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict of the model."""
        if unsettled:
            settle()
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict of the model."""
        if unsettled:
            settle()
        return self.model.load_state_dict(state_dict, *args, **kwargs)

    def _grids(self) -> dict[str, Grid]:
        return self._grids_held

    def _stores(self) -> dict[str, Grid]:
        return {name: grid for name, grid in self._grids_held.items() if grid.is_parameter}

    def _attribute(self, path: str, name: str) -> Any:
        try:
            return vars(self.model.get_submodule(path)).get(name)
        except AttributeError:
            return None

    def _prepare_attribute(self, change: AttributeChange) -> Callable[[], None]:
        module = submodule(self.model, change.module)
        self._first_numbers.setdefault((change.module, change.name), getattr(module, change.name))
        return partial(setattr, module, change.name, change.after)

    def _prepare_depth(self, change: DepthChange) -> list[Callable[[], None]]:
        return self._own_build(change).installs()

    def _completed_depth(self, change: DepthChange) -> DepthChange:
        return change

    def _view_at_depth(self, change: DepthChange, view: View) -> View:
        renamed = change.renamed
        contents = {renamed.get(name, name): tensor for name, tensor in view.contents.items()}
        return view._replace(contents=contents)

    def _deepened(self, asked: Sequence[Asked]) -> Change:
        """Returns the change that inserts and removes blocks; see `SpaceEdit.insert`."""
        return Change({}, {}, depth=deepened(self, asked))

    def _same_depth(self, change: DepthChange) -> DepthChange:
        own = deepened(self, change.asked)
        # As everywhere in copies, what comes has the values of the model.
        for mine, other in zip(own.coming, change.coming, strict=True):
            mine.parameter.data.copy_(other.parameter.data)
        return own

    def _discovered(self, model: nn.Module) -> Typed:
        """Returns the axes of a model that takes the same examples."""
        return _with_other_paths(model, discover(model, self._gates.examples))

    def _discovered_twin(self, model: nn.Module, twin: Twin) -> Typed:
        """Returns the axes of a twin of such a model, which may have other sizes."""
        examples = [twin.imitate(example) for example in self._gates.examples]
        typed = discover_twin(twin, examples, modes=self._typed.modes)
        typed = replace(typed, notes=self._typed.notes, needs_contents=self._typed.needs_contents)
        return _with_other_paths(model, typed)

    def _misfit(self, change: Change) -> str:
        if change.depth is not None:
            return "its depth"
        maps = self._maps(change.layers, self._atom_sizes(), self._atom_sizes(change.layers))
        grids = self._grids_held
        for name in maps:
            if name not in change.tensors:
                return name
        for name, part in change.tensors.items():
            if name not in grids:
                return name
            opened = grids[name].opened
            if isinstance(part.index, GridMap):
                # A tensor of which cells are assigned alone stays as it is.
                still = GridMap(grids[name].shape, {})
                if opened is not None or not maps.get(name, still).equals(part.index):
                    return name
            elif part.before is None:
                if opened is not None:
                    return name
            elif opened is None or not opened.pattern.equals(part.before):
                return name
        for attribute in change.attributes:
            module = self.model.get_submodule(attribute.module)
            if getattr(module, attribute.name) != attribute.before:
                return f"{attribute.module}.{attribute.name}"
        return ""

    def _require_no_edit(self, verb: str) -> None:
        if self._has_ended:
            raise EditError(
                f"cannot {verb}: this graph has ended, as the model was released or adopted again"
            )
        super()._require_no_edit(verb)

    def _end(self) -> None:
        """Ends the graph; the model stays as it is."""
        self._has_ended = True
        if _adopted.get(id(self.model)) is self:
            del _adopted[id(self.model)]

    def _copies_in(self, module: nn.Module) -> list[Graph]:
        """Returns graphs over the copies of the model in a module, each made once."""
        if any(part is self.model for part in module.modules()):
            return [self]
        found: list[Graph] = []
        for part in module.modules():
            if part in self._copies:
                found.append(self._copies[part])
            elif type(part) is type(self.model) and self._is_alike(part):
                self._copies[part] = self._graph_over(part)
                found.append(self._copies[part])
        return found

    def _is_alike(self, model: nn.Module) -> bool:
        """Returns whether a model has tensors of the same names and shapes."""
        grids = named_grids(model)
        if grids.keys() != self._grids_held.keys():
            return False
        for name, grid in grids.items():
            held = self._grids_held[name]
            if grid.shape != held.shape or not same_pattern(grid.opened, held.opened):
                return False
        return True

    def _graph_over(self, model: nn.Module) -> "Adopted":
        """Returns a graph with the same spaces and nodes over a copy of the model."""
        copy = Adopted(model, self._typed, self._gates)
        for mine, other in zip(self.spaces, copy.spaces, strict=True):
            other._enrol(mine._roster)
        copy._next_uid = self._next_uid
        copy._first_numbers = dict(self._first_numbers)
        return copy

    def _open_edit(self, edit: Any) -> None:
        self._require_same_tensors()
        super()._open_edit(edit)

    def _require_same_tensors(self) -> None:
        """Raises EditError if the tensors of the model are others than those that were adopted."""
        problem = self._difference()
        if problem:
            raise EditError(f"{problem}. The model was changed outside of an edit; adopt it again")

    def _difference(self) -> str:
        """Returns how the tensors of the model differ from its spaces; empty if they do not."""
        if not self._seen.is_same():
            problem = self._other_places()
            if problem:
                return problem
            self._seen = _Seen.of(self.model)
        shapes = self._expected_shapes()
        has_opened = opens_any(self._seen.modules)
        for name, grid in self._grids_held.items():
            shape = grid.tensor.shape
            opened = grid.opened if has_opened else None
            if opened is not None:
                if shape != opened.pattern.content_shape:
                    return f"{name} has other relations than were left after the last edit"
                shape = opened.pattern.shape
            if shape != shapes.get(name, shape):
                return f"{name} has the shape {list(shape)}, its spaces {list(shapes[name])}"
        return ""

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape that the sizes of spaces give to every tensor."""
        sizes = self._atom_sizes()
        typed, known, shapes = self._shapes
        if typed is not self._typed or known != sizes:
            shapes = {}
            for name, axes in self._typed.axes.items():
                shapes[name] = tuple([size_of(axis, sizes) for axis in axes])
            self._shapes = (self._typed, sizes, shapes)
        return shapes

    def _other_places(self) -> str:
        """Returns how the tensors differ in place from those at adoption; empty if they do not."""
        present = named_grids(self.model)
        if present.keys() != self._grids_held.keys():
            other = sorted(present.keys() ^ self._grids_held.keys())
            return f"the model has other tensors than when it was adopted: {', '.join(other[:3])}"
        for name, grid in present.items():
            held = self._grids_held[name]
            if grid.module is not held.module or grid.name != held.name:
                return f"{name} belongs to another module than when the model was adopted"
        return ""

    def _check_tensors(self) -> None:
        problem = self._difference()
        if problem:
            raise InvariantError(problem)

    def _atom_sizes(self, change: Mapping[int, LayerChange] | None = None) -> list[int]:
        """Returns the size of every atom, at present or after a change of spaces."""
        sizes = self._typed.sizes()
        spaces = self.spaces
        for space in spaces:
            sizes[space._atom] = len(space)
        for number, part in (change or {}).items():
            sizes[spaces[number]._atom] = part.index.new_size
        return sizes

    def _role(self, space: Space, name: str, dim: int) -> Literal["reader", "writer", "rider"]:
        """Returns what an axis of a tensor has to do with a space; one that is read and written,
        as that of a tied embedding, counts as read.
        """
        if (name, dim) in self._typed.readers.get(space._atom, ()):
            return "reader"
        if (name, dim) in self._typed.writers.get(space._atom, ()):
            return "writer"
        return "rider"

    def _maps(
        self, layers: Mapping[int, LayerChange], before: list[int], after: list[int]
    ) -> dict[str, GridMap]:
        """Returns how every tensor moves when the nodes of spaces do."""
        moved = {}
        spaces = self.spaces
        for number, change in layers.items():
            if not change.index.is_identity:
                moved[spaces[number]._atom] = change.index
        return self._maps_of(moved, before, after)

    def _maps_of(
        self, moved: Mapping[int, IndexMap], before: list[int], after: list[int]
    ) -> dict[str, GridMap]:
        """Returns how every tensor moves when the nodes of atoms do."""
        members: dict[str, dict[int, Expression]] = {}
        for space in self.spaces:
            if space._atom in moved:
                for (name, dim), expression in space._members.items():
                    members.setdefault(name, {})[dim] = expression
        found: dict[str, GridMap] = {}
        masks = _masks(moved)
        # Tensors that have the same axis share its map, and those that are alike all of it.
        maps: dict[Expression, IndexMap] = {}
        alike: dict[object, GridMap] = {}
        for name, expressions in self._typed.axes.items():
            if name not in members:
                continue
            axes = {}
            for dim, expression in sorted(members[name].items()):
                if expression not in maps:
                    maps[expression] = _axis_map(expression, masks, before, after)
                axes[dim] = maps[expression]
            shape = tuple([size_of(expression, before) for expression in expressions])
            key = (shape, *axes.items())
            if key not in alike:
                alike[key] = GridMap(shape, axes)
            found[name] = alike[key]
        return found

    def _completed(
        self,
        change: Change,
        growths: Mapping[int, Growth],
        wishes: Mapping[str, Wish],
        generator: torch.Generator | None,
    ) -> Change:
        """Returns a change of spaces with the tensors and attributes that follow it.

        Args:
            change: of the nodes.
            growths: how the weights of new nodes start, by space.
            wishes: the relations to cut, connect, freeze, unfreeze and assign, by tensor.
            generator: source of random numbers.

        Raises:
            EditError: the model cannot run with the new sizes; nothing was changed.
        """
        before = self._atom_sizes()
        after = self._atom_sizes(change.layers)
        maps = self._maps(change.layers, before, after)
        attributes: Sequence[AttributeChange] = ()
        if maps:
            attributes = self._foreseen(change, before, after)
        tensors = {}
        for name in (*maps, *(name for name in wishes if name not in maps)):
            index = maps.get(name)
            born = None
            if index is not None and index.n_born:
                born = values_of_newborns(self, name, index, change.layers, growths, generator)
            grid = self._grids_held[name]
            wish = wishes.get(name, Wish())
            if grid.opened is None and wish.moves_none:
                moves = index or GridMap(grid.shape, {})
                assigned = assignment_of(name, grid, moves, wish.assign)
                if index is not None or assigned is not None:
                    tensors[name] = GridChange(moves, born_values=born, assigned=assigned)
                continue
            found = rewired(self, name, wish, index, born, generator)
            if found is not None:
                tensors[name] = found
        return replace(change, tensors=tensors, attributes=tuple(attributes))

    def _foreseen(
        self, change: Change, before: list[int], after: list[int]
    ) -> Sequence[AttributeChange]:
        """Returns the numbers of modules that follow a change of spaces, after the model was run
        with the new sizes, and values were compared.
        """
        spaces = self.spaces
        changed = [spaces[n] for n, part in change.layers.items() if not part.index.is_identity]
        attributes = self._gates.foresee(self.model, changed, before, after)
        # Where an operation computes with another number, an earlier comparison does not hold.
        if self._gates.has_other_numbers(after):
            for space in changed:
                space._proof = "unproved"
        # A removal is compared as it is.
        removed = {n: part.index.removed.numpy() for n, part in change.layers.items()}
        self._probe({spaces[n]: rows for n, rows in removed.items() if len(rows)})
        return attributes

    def _close_tensors(self) -> None:
        """Makes every tensor one that has all of its cells: 0 where they were cut."""
        with self.edit(reason="close") as edit:
            for name, grid in self._stores().items():
                if grid.opened is not None:
                    edit._fill(name, grid.opened.pattern)

    def _pattern_of(self, name: str) -> Pattern:
        """Returns which cells of a tensor exist, and which are frozen."""
        grid = self._grids_held[name]
        if grid.opened is not None:
            return grid.opened.pattern
        axes = self._typed.axes[name]
        # The dimensions behind the last one that has nodes, such as those of a kernel.
        atoms = {space._atom for space in self.spaces}
        having = [dim for dim, axis in enumerate(axes) if atoms & set(atoms_of(axis))]
        inside = grid.shape[max(having, default=len(axes) - 1) + 1 :]
        return Pattern.full(grid.shape, math.prod(inside))

    @property
    def numbers(self) -> dict[str, tuple[Any, Any]]:
        """Numbers of modules that followed edits, such as "blocks.0.attn.num_heads": those at
        adoption, and the present ones.
        """
        found = {}
        for (path, name), first in self._first_numbers.items():
            now = self._attribute(path, name)
            if now != first:
                found[f"{path}.{name}".lstrip(".")] = (first, now)
        return found

    @property
    def unseen(self) -> tuple[str, ...]:
        """Names of the Parameters that no example reads; they keep their sizes."""
        parameters = dict(self.model.named_parameters())
        return tuple(name for name in self._typed.unread if name in parameters)

    def __repr__(self) -> str:
        text = table(self.spaces)
        if self.unseen:
            text += (
                f"\nnot read by the examples, so they keep their sizes: {', '.join(self.unseen)}"
            )
        return text

    __str__ = __repr__

    def __getstate__(self) -> dict[str, Any]:
        nothing = {"_copies": None, "_weights": None, "_channels": (), "_seen": _Seen([], [None])}
        return {**super().__getstate__(), **nothing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._copies = weakref.WeakKeyDictionary()
        self._weights, self._channels = relations_of(self, self._typed, self.spaces)


def table(spaces: Iterable[Space]) -> str:
    """Returns spaces as lines of text: name, nodes, writers and readers, riders, verdict.

    Nodes of several rows each, such as heads, are shown as nodes × rows.
    """
    rows = [("space", "nodes", "writers → readers", "riders", "verdict")]
    for space in spaces:
        verdict = space.verdict
        if space.pins:
            verdict = f"pinned: {space.pins[0]}"
        flow = f"{_shown(space.writers)} → {_shown(space.readers)}"
        nodes = str(len(space))
        if space.rows_per_node > 1:
            nodes += f" × {space.rows_per_node}"
        rows.append((space.name, nodes, flow, str(len(space.riders)), verdict))
    widths = []
    for column in range(4):
        widths.append(max(len(row[column]) for row in rows))
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    return "\n".join(lines)


def _shown(names: tuple[str, ...]) -> str:
    if not names:
        return "–"
    if len(names) == 1:
        return names[0].removesuffix(".weight")
    return f"{names[0].removesuffix('.weight')} and {len(names) - 1} more"


class _Masks(NamedTuple):
    """Which indices of some atoms leave, and which come: one bool for each of them."""

    leaving: dict[int, NDArray[np.bool_]]
    coming: dict[int, NDArray[np.bool_]]


def _masks(moved: Mapping[int, IndexMap]) -> _Masks:
    masks = _Masks({}, {})
    for atom, index in moved.items():
        leaving = np.zeros(index.old_size, np.bool_)
        leaving[index.removed.numpy()] = True
        masks.leaving[atom] = leaving
        coming = np.zeros(index.new_size, np.bool_)
        coming[index.inserted.numpy()] = True
        masks.coming[atom] = coming
    return masks


def _axis_map(
    expression: Expression, masks: _Masks, before: list[int], after: list[int]
) -> IndexMap:
    """Returns how the positions of one axis move when the nodes of some atoms do."""
    removed = np.flatnonzero(covered(expression, masks.leaving, before))
    inserted = np.flatnonzero(covered(expression, masks.coming, after))
    return IndexMap(
        size_of(expression, before),
        size_of(expression, after),
        torch.from_numpy(removed.astype(np.int32)),
        torch.from_numpy(inserted.astype(np.int32)),
    )


class _Seen(NamedTuple):
    """The modules of a model, with everything that they held at some time."""

    modules: list[nn.Module]
    held: list[Any]

    @classmethod
    def of(cls, model: nn.Module) -> "_Seen":
        """Returns what a model holds."""
        modules = list(model.modules())
        return cls(modules, _held_by(modules))

    def is_same(self) -> bool:
        """Returns whether the modules hold the same Parameters, buffers and modules as then."""
        held = _held_by(self.modules)
        return len(held) == len(self.held) and all(map(is_, held, self.held))


def _held_by(modules: Iterable[nn.Module]) -> list[Any]:
    held: list[Any] = []
    for module in modules:
        held += module._parameters.values()
        held += module._buffers.values()
        held += module._modules.values()
    return held


def adopt(
    model: nn.Module,
    *inputs: Any,
    examples: Iterable[Example] = (),
    optimizer: Optimizer | None = None,
    **keywords: Any,
) -> Adopted:
    """Returns a model as one editable graph of spaces; the model itself is not changed.

    A space is a set of nodes that tensors share: the channels between two convolutions, the stream
    of a residual network, the heads of an attention. `adopt` runs a twin of the model on tensors
    without contents, in training and in evaluation mode, and follows every axis of every tensor
    through all operations. What it does not understand is pinned, with the line of the model's
    code: it stays as it is.

    An edit adds or removes nodes of spaces in all of their tensors at once, and numbers such as
    `num_heads` follow. Parameters stay the same objects. Keep the returned graph for as long as the
    model is edited; `gn.adopted(model)` finds it again.

    Args:
        model: any model whose forward pass runs on the inputs.
        *inputs: what the model is called with; a small batch will do.
        examples: further calls of the model, for paths that the first does not take.
        optimizer: an optimizer of the model, which then follows every edit; see `gn.attach`.
        **keywords: what the model is called with, by name.

    Raises:
        EditError: the model contains nets, shares Parameters with another adopted one, or its
            Parameters cannot be edited. A graph that the model had before ends.

    Examples:
        >>> import grapnet as gn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
        >>> net = gn.adopt(model, torch.randn(2, 3, 9, 9))
        >>> with net.edit(reason="thinner") as edit:
        ...     edit.remove_nodes(net.space("0").weakest(count=3))
        >>> model[2].weight.shape
        torch.Size([4, 5, 3, 3])
        >>> commit = net.undo()
        >>> model[2].weight.shape
        torch.Size([4, 8, 3, 3])
    """
    # torch.compile(model) is adopted as the model.
    model = uncompiled(model)
    for path, module in model.named_modules():
        if isinstance(module, Graph):
            where = f"at {path!r}" if path else "itself"
            raise EditError(
                f"the model is a net or contains one ({where}), which has its own edits"
            )
    _require_no_other_graph(model)
    calls = [Example(inputs, keywords), *examples]
    for call in calls:
        if not isinstance(call, Example) or not isinstance(call.args, tuple):
            raise TypeError(
                f"an example is Example((x, y), {{'flag': True}}), with a tuple of arguments, got"
                f" {type(call).__name__} of {type(call[0]).__name__}"
            )
    typed = _with_other_paths(model, discover(model, calls))
    net = Adopted(model, typed, Gates(model, typed, calls))
    require_editable(net)
    earlier = find_adopted(model)
    if earlier is not None:
        earlier._end()
    _adopted[id(model)] = net
    if optimizer is not None:
        attach(optimizer, net)
    return net


def _require_no_other_graph(model: nn.Module) -> None:
    """Raises EditError if a part of a model, or a model around it, is adopted."""
    mine = {id(parameter) for parameter in model.parameters()}
    for other in list(_adopted.values()):
        if other.model is model or other._has_ended:
            continue
        if any(id(parameter) in mine for parameter in other.model.parameters()):
            raise EditError(
                f"this {type(model).__name__} shares Parameters with an adopted"
                f" {type(other.model).__name__}; edit that one, or end it with gn.ungraft"
            )


def _with_other_paths(model: nn.Module, typed: Typed) -> Typed:
    """Pins what Parameters of another path may share, where the model chooses a path by values.

    No operation tells which axes these Parameters share, so all of their size are pinned.
    """
    if not typed.needs_contents:
        return typed
    parameters = dict(model.named_parameters())
    sizes: dict[int, str] = {}
    for name in typed.unread:
        if name in parameters:
            sizes |= dict.fromkeys(parameters[name].shape, name)
    atoms = list(typed.atoms)
    for number, atom in enumerate(atoms):
        if atom.size in sizes and not atom.pins:
            why = f"the model looks at values, and {sizes[atom.size]} was not read in the example"
            atoms[number] = replace(atom, pins=(why,))
    return replace(typed, atoms=tuple(atoms))


def adopted(model: nn.Module) -> Adopted:
    """Returns the graph of an adopted model; raises KeyError if it was not adopted."""
    net = find_adopted(model)
    if net is None:
        raise KeyError(
            "this model was not adopted, or its graph is gone; keep what gn.adopt returns"
        )
    return net


def find_adopted(model: nn.Module) -> Adopted | None:
    """Returns the graph of an adopted model, compiled or not, or a graph itself; None for any
    other model.
    """
    model = uncompiled(model)
    if isinstance(model, Adopted):
        return model
    net = _adopted.get(id(model))
    return net if net is not None and net.model is model else None
