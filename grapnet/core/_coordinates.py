"""Coordinates: a vector whose trainable part is a Parameter and whose frozen part is a buffer."""

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from grapnet._torch import (
    current_autograd_node,
    current_graph_task_id,
    next_sequence_number,
    sequence_number,
)

from ._change import Assignment, Shift, VectorChange
from ._errors import FrozenError, InvariantError, StaleTopologyError
from ._index_map import IndexMap, ascending, contains, empty_positions, flatnonzero, on_host


class Token:
    """An object equal only to itself: an equal token means that nothing moved in between."""

    __slots__ = ()


torch.serialization.add_safe_globals([Token])  # a Parameter has one, and torch.load would refuse it


def layout_of(parameter: Tensor) -> "Token | None":
    """Returns the token of a Parameter's coordinates, None if they never moved."""
    return getattr(parameter, "grapnet_layout", None)


class Vector(NamedTuple):
    """One complete version of a vector, readable without the module that holds it."""

    parameter: nn.Parameter  # whose content it is
    content: Tensor  # the trainable coordinates, in the memory of the Parameter
    frozen_values: Tensor
    frozen_at: Tensor  # [n_frozen] int32, sorted positions
    order: Tensor | None  # of (trainable, frozen) laid end to end, int32; None if nothing is frozen

    def values(self, shape: tuple[int, ...] | None) -> Tensor:
        """Returns every coordinate in order, without gradients; see `assemble`."""
        return assemble(self.content, self.frozen_values, self.order, shape)


def assemble(
    trainable: Tensor, frozen: Tensor, order: Tensor | None, shape: tuple[int, ...] | None
) -> Tensor:
    """Returns the trainable and the frozen coordinates in their common order; without a shape the
    trainable ones alone.
    """
    if shape is None:
        return trainable.view(-1)
    if order is None:
        if trainable.dim() == len(shape) == 1:
            return trainable
        return trainable.view(shape)
    return torch.cat([trainable.view(-1), frozen.view(-1)]).index_select(0, order).view(shape)


@dataclass(frozen=True, eq=False)
class PreparedVector:
    """A vector after a change, computed but not installed."""

    vector: Vector
    gradient: Tensor | None
    # with what leaves filled in; None for a vector that the commit does not touch
    change: VectorChange | None = None
    parameter_index: IndexMap | None = None  # how the Parameter's own coordinates move
    # where in the Parameter the assigned coordinates are that it has before and after the change
    assigned: Tensor | None = None


def prepare_vector(
    store: "Coordinates", change: VectorChange, returning: Tensor | None
) -> PreparedVector:
    """Computes the vector after `change` without modifying the present one; the change then has
    the values that leave. Coordinates that come to the Parameter get the gradients `returning`, or
    0.
    """
    index = change.index
    gradient = store.parameter.grad
    if gradient is not None:
        gradient = gradient.detach()
    trainable = store.parameter.detach()
    frozen = store.frozen_values
    born = _like(change.born_values, trainable, len(index.inserted))
    # not a slice: the journal would keep the whole old vector alive
    if index.removed.shape[0]:
        gone_values = store._read(index.removed).detach()
    else:
        gone_values = trainable.new_empty(0)
    change = replace(change, born_values=born.view(-1), gone_values=gone_values)
    if change.assigned is not None:
        change, trainable, frozen = _with_assigned(store, change, change.assigned)
    if not (store.frozen_at.shape[0] or change.flips.shape[0] or _any_frozen(change.born_frozen)):
        parameter_index = index
        frozen_at = store.frozen_at
        content = index.carry(trainable, born)
    else:
        crossing = _Crossing(store, change)
        parameter_index = crossing.parameter_index
        frozen_at = crossing.frozen_at
        thawed_values = frozen[torch.searchsorted(store.frozen_at, crossing.thawed_from)]
        froze_values = trainable[crossing.froze_from_place]
        content = parameter_index.carry(trainable, crossing.into_parameter(born, thawed_values))
        frozen = crossing.frozen_index.carry(frozen, crossing.into_frozen(born, froze_values))
    if gradient is not None:
        gradient = parameter_index.carry(gradient, 0.0 if returning is None else returning)
    if change.shift is not None:
        content = _shifted(content, change.shift, frozen_at)
    order = _assembly_order(len(content), frozen_at)
    vector = Vector(store.parameter, content, frozen, frozen_at, order)
    places = None
    if change.assigned is not None:
        at = change.assigned.positions
        at, _ = _parted(at, store._frozen_among(at))
        places = _among_free(at, store.frozen_at)
        # Coordinates that freeze leave the Parameter.
        places, _ = _parted(places, contains(parameter_index.removed, places))
    return PreparedVector(vector, gradient, change, parameter_index, places)


def _with_assigned(
    store: "Coordinates", change: VectorChange, assigned: Assignment
) -> tuple[VectorChange, Tensor, Tensor]:
    """Returns a change with the values that its assignment finds, and copies of the trainable and
    the frozen coordinates with those that it assigns.
    """
    trainable = store.parameter.detach()
    frozen = store.frozen_values
    if assigned.after is None:
        # A commit of which the journal has dropped the values repeats its structure alone.
        return replace(change, assigned=None), trainable, frozen
    at = assigned.positions
    after = assigned.after.to(trainable)
    before = store._read(at).detach()
    assigned = Assignment(at, after, before)
    held = store._frozen_among(at)
    free_at, held_at = _parted(at, held)
    free_values, held_values = _parted(after, held)
    trainable = trainable.clone()
    trainable.view(-1).index_copy_(0, _among_free(free_at, store.frozen_at).long(), free_values)
    if held_at.shape[0]:
        frozen = frozen.clone()
        rank = torch.searchsorted(store.frozen_at, held_at)
        frozen.view(-1).index_copy_(0, rank, held_values)
    return replace(change, assigned=assigned), trainable, frozen


class _Crossing:
    """The coordinates that a change moves into and out of the Parameter and the frozen buffer.

    Positions named `…_from` are in the old vector, all others in the new one.
    """

    def __init__(self, store: "Coordinates", change: VectorChange) -> None:
        index = change.index
        # frozen and staying
        held = store.frozen_at
        if index.removed.shape[0]:
            held, _ = _parted(held, contains(index.removed, held))
        held = index.new_positions(held)
        self.melts = contains(held, change.flips)
        froze, thawed = _parted(change.flips, self.melts)
        self._born_frozen = change.born_frozen
        born_free, born_held = _parted(index.inserted, change.born_frozen)
        if change.flips.shape[0]:
            held, _ = _parted(held, contains(change.flips, held))
        self.frozen_at = torch.cat([held, froze, born_held]).sort().values
        self.thawed_from = index.old_positions(thawed)
        froze_from = index.old_positions(froze)
        self.froze_from_place = _among_free(froze_from, store.frozen_at).long()

        gone_free, gone_held = _parted(index.removed, store._frozen_among(index.removed))
        to_parameter, self._parameter_order = torch.cat([born_free, thawed]).sort()
        to_frozen, self._frozen_order = torch.cat([born_held, froze]).sort()
        leaves_parameter = torch.cat([gone_free, froze_from]).sort().values
        leaves_frozen = torch.cat([gone_held, self.thawed_from]).sort().values
        free = len(store.parameter)
        self.parameter_index = IndexMap(
            free,
            free - len(leaves_parameter) + len(to_parameter),
            _among_free(leaves_parameter, store.frozen_at),
            _among_free(to_parameter, self.frozen_at),
        )
        self.frozen_index = IndexMap(
            len(store.frozen_at),
            len(self.frozen_at),
            torch.searchsorted(store.frozen_at, leaves_frozen, out_int32=True),
            torch.searchsorted(self.frozen_at, to_frozen, out_int32=True),
        )

    def into_parameter(self, born: Tensor, thawed: Tensor) -> Tensor:
        """Returns what is added to the Parameter, in the order of its new positions."""
        born_free, _ = _parted(born, self._born_frozen)
        return torch.cat([born_free, thawed])[self._parameter_order]

    def into_frozen(self, born: Tensor, froze: Tensor) -> Tensor:
        """Returns what is added to the frozen buffer, in the order of its new positions."""
        _, born_held = _parted(born, self._born_frozen)
        return torch.cat([born_held, froze])[self._frozen_order]


def _parted(entries: Tensor, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the entries whose bit is not set, and those whose bit is; None: no bit is set."""
    if bits is None or bits.shape[0] == 0:
        return entries, entries[:0]
    if on_host(entries.device):
        return entries[~bits], entries[bits]
    # A device counts once, not for each of the two.
    sorted_bits, order = bits.sort(stable=True)
    first = bits.shape[0] - int(sorted_bits.sum())
    return entries.index_select(0, order[:first]), entries.index_select(0, order[first:])


def _any_frozen(bits: Tensor | None) -> bool:
    return bits is not None and bool(bits.any())


def _among_free(positions: Tensor, frozen_at: Tensor) -> Tensor:
    """Returns the positions of trainable coordinates in the Parameter."""
    return positions - torch.searchsorted(frozen_at, positions, out_int32=True)


def _like(values: Tensor | None, example: Tensor, count: int) -> Tensor:
    """Returns `values` (zeros when None) in the dtype, device and trailing shape of `example`."""
    if values is None:
        return example.new_zeros((count, *example.shape[1:]))
    return values.to(example).reshape(count, *example.shape[1:])


def _assembly_order(free: int, frozen_at: Tensor) -> Tensor | None:
    """Returns the position of each coordinate in the concatenation (trainable, frozen); None if
    nothing is frozen.
    """
    if len(frozen_at) == 0:
        return None
    places = ascending(free + len(frozen_at), frozen_at.device)
    index = IndexMap(free, len(places), empty_positions(frozen_at.device), frozen_at)
    return index.carry(places[:free], places[free:])


def _shifted(content: Tensor, shift: Shift, frozen_at: Tensor) -> Tensor:
    place = _among_free(shift.positions, frozen_at).long()
    content = content.clone()
    content[place] = Shift(
        shift.positions, shift.before.to(content), shift.after.to(content)
    ).apply(content[place])
    return content


class Coordinates(nn.Module):
    """A module with one vector of coordinates, trainable or frozen one by one.

    The trainable coordinates are a Parameter registered under `name`. The frozen ones are in a
    buffer, so no optimizer, decay or clipping affects them. `values()` returns both in order.
    """

    frozen_values: Tensor
    vector: Vector  # the present version
    # how often any Parameter's coordinates moved, in all graphs of the process
    _layout_changes: ClassVar[int] = 0

    def __init__(self, name: str, values: Tensor | None) -> None:
        super().__init__()
        self._vector_name = name
        self._reads_before: dict[_Thread, int] = {}
        self.register_parameter(name, None if values is None else nn.Parameter(values))
        if values is None:
            return
        none = values.new_empty((0, *values.shape[1:]))
        self.register_buffer("frozen_values", none, persistent=False)
        self.vector = Vector(
            self.parameter, self.parameter.data, none, empty_positions(values.device), None
        )

    @property
    def frozen_at(self) -> Tensor:
        """The sorted positions of the frozen coordinates, [n_frozen] int32."""
        return self.vector.frozen_at

    @property
    def _device(self) -> torch.device:
        """The device of the positions: that of the Parameter, unless it is the meta device."""
        return self.vector.frozen_at.device

    @property
    def parameter(self) -> nn.Parameter:
        """The trainable coordinates."""
        try:
            parameter = self._parameters[self._vector_name]
        except KeyError:
            raise self._taken_away() from None
        assert parameter is not None
        return parameter

    @property
    def size(self) -> int:
        """The number of coordinates, trainable and frozen."""
        try:
            parameter = self._parameters[self._vector_name]
        except KeyError:
            raise self._taken_away() from None
        return 0 if parameter is None else parameter.shape[0] + self.frozen_at.shape[0]

    def values(self, shape: tuple[int, ...] | None = (-1,)) -> Tensor:
        """Returns every coordinate in order, live and differentiable, as a 1-D tensor or in another
        shape; without a shape the trainable ones alone.
        """
        try:
            # past nn.Module's lookup
            parameter = self._parameters[self._vector_name]
        except KeyError:
            raise self._taken_away() from None
        assert parameter is not None
        self._watch_run()
        frozen: Any = self._buffers["frozen_values"]
        return assemble(parameter, frozen, self.vector.order, shape)

    def _trainable(self, start: int, stop: int) -> Tensor:
        """Returns a range of coordinates, live and differentiable, where none is frozen."""
        self._watch_run()
        return self.parameter[start:stop].view(-1)

    def _watch_run(self) -> None:
        """Raises StaleTopologyError where a backward reads the coordinates of another version than
        its forward pass did (reentrant checkpointing runs that pass again).
        """
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled():
            require_first_run(self._reads_before)
        else:
            note_read()

    def _values_of(self, vector: Vector, shape: tuple[int, ...] | None = (-1,)) -> Tensor:
        """Returns the coordinates of one version, without gradients, also while an edit in another
        thread puts the next version in place.

        Another Parameter or other memory under the name (`functional_call`, an assigned `.data`)
        takes precedence.
        """
        parameter = self._parameters.get(self._vector_name)
        if parameter is not vector.parameter:
            return self.values(shape)
        # In this order: a commit replaces `vector` before it touches the Parameter.
        is_other = vector.parameter.data_ptr() != vector.content.data_ptr()
        if is_other and self.vector is vector:
            return self.values(shape)
        return vector.values(shape)

    def _is_assembled_in_order(self) -> bool:
        """Returns whether `values()` puts every frozen coordinate in its position."""
        order = self.vector.order
        if order is None or len(self.frozen_at) == 0:
            return order is None and len(self.frozen_at) == 0
        free = len(self.parameter)
        held = order >= free
        ranks = torch.arange(max(free, len(self.frozen_at)), device=held.device)
        return (
            torch.equal(flatnonzero(held), self.frozen_at)
            and torch.equal(order[held].long() - free, ranks[: len(self.frozen_at)])
            and torch.equal(order[~held].long(), ranks[:free])
        )

    def _read(self, positions: Tensor) -> Tensor:
        """Returns the coordinates at `positions`, live and differentiable."""
        self._watch_run()
        trainable = self.parameter.view(-1)
        frozen = self.frozen_values.view(-1)
        if frozen.shape[0] == 0:
            return trainable.index_select(0, positions)
        rank = torch.searchsorted(self.frozen_at, positions, out_int32=True)
        held = frozen.index_select(0, rank.clamp(max=len(frozen) - 1))
        if len(trainable) == 0:
            return held
        free = trainable.index_select(0, (positions - rank).clamp(max=len(trainable) - 1))
        return torch.where(self._frozen_bits(positions), held, free)

    def _write(self, positions: Tensor | slice, new: Tensor) -> None:
        """Assigns trainable coordinates; raises FrozenError before writing if one is frozen."""
        self._require_free(positions)
        flat = self.parameter.view(-1)
        place = positions if len(self.frozen_at) == 0 else self._place(self._listed(positions))
        with torch.no_grad():
            flat[place.long() if isinstance(place, Tensor) else place] = new.to(flat)

    def _require_free(self, positions: Tensor | slice) -> None:
        """Raises FrozenError if one of the coordinates is frozen."""
        if len(self.frozen_at) == 0:
            return
        held = self._frozen_bits(self._listed(positions))
        if bool(held.any()):
            raise FrozenError(
                f"{int(held.sum())} of the {len(held)} coordinates to assign are frozen; unfreeze"
                " them in an edit first"
            )

    def _gradients(self, positions: Tensor) -> Tensor | None:
        """Returns the gradients at `positions` (0 where frozen), or None if there are none yet."""
        gradient = self.parameter.grad
        if gradient is not None:
            gradient = gradient.detach()
        if gradient is None:
            return None if len(self.parameter) else self.frozen_values.new_zeros(len(positions))
        return self._free_numbers(gradient, positions)

    def _free_numbers(self, content: Tensor, positions: Tensor) -> Tensor:
        """Returns what a tensor of the shape of the Parameter has at `positions`, 0 where they are
        frozen.
        """
        if len(self.frozen_at) == 0:
            return content.view(-1).index_select(0, positions)
        found = content.new_zeros(len(positions))
        free = ~self._frozen_bits(positions)
        found[free] = content.view(-1)[self._place(positions[free]).long()]
        return found

    def _frozen_bits(self, positions: Tensor) -> Tensor:
        """Returns one bool per position: True if it is frozen."""
        return contains(self.frozen_at, positions)

    def _frozen_among(self, positions: Tensor) -> Tensor | None:
        """Returns the same, or None if nothing is frozen."""
        if self.frozen_at.shape[0] == 0 or positions.shape[0] == 0:
            return None
        return self._frozen_bits(positions)

    def _prepare(
        self, change: VectorChange | None, returning: Tensor | None = None
    ) -> PreparedVector:
        """Computes the vector after `change` without touching the present one, see
        `prepare_vector`; without a change it is another version of the same content.
        """
        if change is not None:
            return prepare_vector(self, change, returning)
        vector = self.vector._replace(content=self.parameter.data)
        return PreparedVector(vector, self.parameter.grad)

    def _install(
        self, prepared: PreparedVector, layout: "Token | None", reads: "dict[_Thread, int]"
    ) -> None:
        """Installs a prepared vector; the Parameter stays the same object, and gets `layout` if it
        moved. `reads` are the reads without gradients until then, see `last_reads`.
        """
        self._reads_before = reads
        # First, so that a reader of the earlier version keeps to it; see `_values_of`.
        self.vector = prepared.vector
        replace_content(prepared.vector.parameter, prepared.vector.content, prepared.gradient)
        index = prepared.parameter_index
        if index is not None and not index.is_identity:
            parameter: Any = prepared.vector.parameter
            parameter.grapnet_layout = layout
            Coordinates._layout_changes += 1
        self.frozen_values = prepared.vector.frozen_values

    def _hold(self, positions: Tensor) -> None:
        """Makes `positions` the frozen ones of a vector that is just being built and has none
        yet.
        """
        if len(positions) == 0:
            return
        none = empty_positions(positions.device)
        index = IndexMap(self.size, self.size, none, none)
        self._install(self._prepare(VectorChange(index, None, None, positions)), None, {})

    def _differs_from(self, state: Mapping[str, Any], prefix: str) -> str:
        """Returns how a state dict differs from this vector; empty if it fits."""
        values = state.get(prefix + self._vector_name)
        if values is not None and values.numel() != self.size:
            return (
                f"{prefix}{self._vector_name} has {values.numel()} coordinates where this graph has"
                f" {self.size}"
            )
        return ""

    def _apply(self, *args: Any, **kwargs: Any) -> "Coordinates":
        """Positions go where the Parameter goes; on the meta device, which holds no numbers, they
        stay where they were.
        """
        super()._apply(*args, **kwargs)
        if self._parameters.get(self._vector_name) is not None:
            self._renew_vector(self.vector.frozen_at, self.vector.order)
        return self

    def _renew_vector(self, frozen_at: Tensor, order: Tensor | None) -> None:
        parameter = self.parameter
        place = frozen_at.device if parameter.is_meta else parameter.device
        if order is not None:
            order = order.to(place)
        self.vector = Vector(
            parameter, parameter.data, self.frozen_values, frozen_at.to(place), order
        )

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_reads_before": {}}
        if "vector" in state:
            state["vector"] = (self.vector.frozen_at, self.vector.order)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "vector" in state:
            self._renew_vector(*state["vector"])

    def _state(self) -> dict[str, Tensor]:
        """Returns the entries of a state dict: all values in order, and which are frozen."""
        if self._parameters[self._vector_name] is None:
            return {}
        values = self.parameter
        if len(self.frozen_at):
            values = self.values().view(-1, *self.parameter.shape[1:])
        return {self._vector_name: values, "frozen": self.frozen_at}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Writes the values, which share the memory of the Parameter as those of every module do
        (unless some are frozen), and copies of everything else.
        """
        for name, tensor in self._state().items():
            if keep_vars:
                destination[prefix + name] = tensor
            elif tensor.numel() == 0:
                destination[prefix + name] = _own_empty(tensor)
            elif name == self._vector_name:
                destination[prefix + name] = tensor.detach()
            else:
                destination[prefix + name] = tensor.clone()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Reads the values into the present partition; the graph has adopted the frozen bits
        before.
        """
        expected = [prefix + name for name in self._state()]
        missing_keys += [key for key in expected if key not in state_dict]
        unexpected_keys += [
            key for key in state_dict if strict and key.startswith(prefix) and key not in expected
        ]
        difference = self._differs_from(state_dict, prefix)
        values = state_dict.get(prefix + self._vector_name)
        if difference:
            error_msgs.append(difference)
        elif expected and values is not None:
            with torch.no_grad():
                values = values.to(self.parameter).reshape(self.size, *self.parameter.shape[1:])
                free = torch.ones(self.size, dtype=torch.bool, device=values.device)
                free[self.frozen_at.long()] = False
                self.parameter.copy_(values[free] if len(self.frozen_at) else values)
                self.frozen_values.copy_(values[~free])

    def _taken_away(self) -> InvariantError:
        return InvariantError(
            f"the Parameter {self._vector_name!r} was taken out of this {type(self).__name__}, as"
            " prune, weight_norm and parametrize of torch.nn.utils do; a net holds its coordinates"
            " itself. Take that back (prune.remove, remove_weight_norm, remove_parametrizations)"
            " and cut relations in an edit instead"
        )

    def _place(self, positions: Tensor) -> Tensor:
        """Returns where trainable positions are in the Parameter."""
        return positions - torch.searchsorted(self.frozen_at, positions, out_int32=True)

    def _listed(self, positions: Tensor | slice) -> Tensor:
        if isinstance(positions, Tensor):
            return positions
        return torch.arange(
            positions.start, positions.stop, dtype=torch.int32, device=self.frozen_at.device
        )


def replace_content(parameter: nn.Parameter, content: Tensor, gradient: Tensor | None) -> None:
    """Replaces the content of a Parameter, by one of any length, and keeps the object.

    Assigning `.data` once would leave the old gradient accumulator in place, with the old shape,
    while a loss is alive. Passing through another dtype makes autograd drop it.
    """
    other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
    parameter.grad = None
    parameter.data = _nothing(other, content.device)
    parameter.data = content
    parameter.grad = gradient


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the empty tensor that Parameters pass through."""
    return torch.empty(0, dtype=dtype, device=device)


class Decision:
    """Whether a transaction took effect: `made` is the one assignment that decides it."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made = False


def refuse_old_backwards(
    parameters: Sequence[nn.Parameter], message: str, decision: Decision
) -> None:
    """Makes every backward pass raise that reaches one of the Parameters through an earlier forward
    pass, after the transaction is decided.
    """

    def refuse(_: object) -> None:
        if decision.made:
            raise StaleTopologyError(message)

    # Not inside a context that an interrupt at its end would leave on.
    if torch.is_grad_enabled():
        accumulators = _accumulators(parameters)
    else:
        with torch.enable_grad():
            accumulators = _accumulators(parameters)
    for accumulator in accumulators:
        accumulator.register_prehook(refuse)


def _accumulators(parameters: Sequence[nn.Parameter]) -> list[Node]:
    """Returns the gradient accumulators of Parameters, which their forward passes share."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    views = [_view(parameter) for parameter in parameters if not parameter.requires_grad]
    if trained:
        views.append(_Joined.apply(*trained))
    found = []
    for view in views:
        assert view.grad_fn is not None
        found += [accumulator for accumulator, _ in view.grad_fn.next_functions]
    return found


class _Joined(torch.autograd.Function):
    """A node behind any number of tensors, which takes a quarter of the time of one for each."""

    @staticmethod
    def forward(_: Any, *tensors: Tensor) -> Tensor:
        """Returns an empty tensor."""
        return tensors[0].new_empty(0)


def _view(parameter: nn.Parameter) -> Tensor:
    """Returns a view that has a gradient function of a Parameter that requires no gradient at
    present: it may have required one when an older graph was made.
    """
    # `map` runs the three calls without returning to Python code, where an interrupt could leave
    # the gradient switched on.
    calls = (
        partial(parameter.requires_grad_, True),
        partial(parameter.view_as, parameter),
        partial(parameter.requires_grad_, False),
    )
    return tuple(map(partial.__call__, calls))[1]


class _Thread:
    """The last read without gradients in one thread: the number of its next autograd node then."""

    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number = 0


_local = threading.local()
_threads: "weakref.WeakSet[_Thread]" = weakref.WeakSet()


def note_read() -> None:
    """Notes a read without gradients, which may be the first run of a checkpointed function.

    Autograd numbers the nodes of each thread separately.
    """
    thread = getattr(_local, "thread", None)
    if thread is None:
        thread = _Thread()
        _threads.add(thread)
        _local.thread = thread
    thread.number = next_sequence_number()


def last_reads() -> dict[_Thread, int]:
    """Returns the last read of every thread. A checkpoint that runs for the first time after it has
    a node of at least this number, an earlier one a node of a smaller number.
    """
    return {thread: thread.number for thread in list(_threads)}


def require_first_run(before: dict[_Thread, int]) -> None:
    """Raises StaleTopologyError if a backward pass repeats a function that first ran before the
    reads in `before`.

    Only autograd functions written in Python repeat something; a hook of another node runs a new
    forward pass.
    """
    if current_graph_task_id() == -1:
        return
    node = current_autograd_node()
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return
    thread: Any = getattr(_local, "thread", None)
    if sequence_number(node) < before.get(thread, 0):
        raise StaleTopologyError(
            "this backward runs a forward pass again (activation checkpointing), and the net was"
            " edited since. Edit after optimizer.step()"
        )


def _own_empty(tensor: Tensor) -> Tensor:
    """Returns an empty tensor like another one, with its own memory: without any, all empty entries
    of a state dict look like one shared tensor.
    """
    if tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16:
        return tensor.new_zeros((1, *tensor.shape[1:]))[:0]
    return torch.from_numpy(np.empty(tensor.shape, tensor.detach().numpy().dtype))


def values_after(store: Coordinates, change: VectorChange | None) -> Tensor:
    """Returns every value of a vector after a change (None: no change), frozen ones included."""
    values = store.values().detach()
    if change is None:
        return values
    if change.assigned is not None and change.assigned.after is not None:
        values = values.index_copy(
            0, change.assigned.positions.long(), change.assigned.after.to(values)
        )
    born = change.born_values
    if born is None:
        born = values.new_zeros(len(change.index.inserted))
    moved = change.index.carry(values, born)
    if change.shift is not None:
        at = change.shift.positions.long()
        shift = Shift(at, change.shift.before.to(values), change.shift.after.to(values))
        moved = moved.index_copy(0, at, shift.apply(moved[at]))
    return moved
