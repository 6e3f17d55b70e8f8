"""VectorChange: what one commit does to one vector of coordinates, and the vector it leads to."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .remap import IndexMap, ascending, contains, empty_positions

if TYPE_CHECKING:
    from .values import Coordinates


@dataclass(frozen=True, eq=False)
class Shift:
    """Values that a commit itself changes: `before` becomes `after` at `positions` (in the new
    vector).
    """

    positions: Tensor  # [n] int32
    before: Tensor
    after: Tensor

    def apply(self, current: Tensor) -> Tensor:
        """Returns `after` where the value is still `before`, and adds the difference where it has
        moved on.
        """
        return torch.where(current == self.before, self.after, current + (self.after - self.before))


@dataclass(frozen=True, eq=False)
class VectorChange:
    """What one commit does to one vector, in both directions.

    The values are None once the journal no longer keeps them; everything else stays.
    """

    index: IndexMap
    born_frozen: Tensor  # [inserted] bool
    gone_frozen: Tensor  # [removed] bool
    flips: Tensor  # sorted int32 positions in the new vector: survivors whose frozen bit turns
    born_values: Tensor | None = None  # [inserted]
    gone_values: Tensor | None = None  # [removed]
    born_gradients: Tensor | None = None  # [inserted], only when a trial is taken back
    gone_gradients: Tensor | None = None  # [removed]
    # [flips]: what freezing takes away, and the end of a trial gives back
    flip_gradients: Tensor | None = None
    shift: Shift | None = None

    @classmethod
    def of_free(cls, index: IndexMap, born: Tensor | None = None) -> "VectorChange":
        """Returns the change of a vector without frozen coordinates; what comes has the values
        `born`, or 0.
        """
        born_frozen, gone_frozen = (
            torch.zeros_like(at, dtype=torch.bool) for at in (index.inserted, index.removed)
        )
        return cls(index, born_frozen, gone_frozen, flips=index.removed[:0], born_values=born)

    def inverse(self, *, with_gradients: bool) -> "VectorChange":
        """Returns the change that leads back."""
        shift = self.shift
        return VectorChange(
            self.index.inverse(),
            born_frozen=self.gone_frozen,
            gone_frozen=self.born_frozen,
            flips=self.index.old_positions(self.flips),
            born_values=self.gone_values,
            born_gradients=self.gone_gradients if with_gradients else None,
            flip_gradients=self.flip_gradients if with_gradients else None,
            shift=shift
            and Shift(self.index.old_positions(shift.positions), shift.after, shift.before),
        )

    def to(self, device: torch.device) -> "VectorChange":
        """Returns the change on the device of the net, which may have moved since the change was
        made.
        """
        if self.flips.device == device:
            return self
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        moved |= {
            name: value.to(device)
            for name, value in moved.items()
            if isinstance(value, Tensor | IndexMap)
        }
        shift = self.shift and Shift(
            *(getattr(self.shift, f.name).to(device) for f in fields(Shift))
        )
        return VectorChange(**{**moved, "shift": shift})

    def without_values(self) -> "VectorChange":
        """Returns the change as the journal keeps it for ever."""
        gradients = {"born_gradients": None, "gone_gradients": None, "flip_gradients": None}
        return replace(self, born_values=None, gone_values=None, **gradients)


@dataclass(frozen=True, eq=False)
class PreparedVector:
    """The content a vector will have, computed and not yet put in place."""

    change: VectorChange  # with what leaves filled in
    parameter_index: IndexMap  # how the Parameter's own coordinates move
    content: Tensor
    gradient: Tensor | None
    frozen_values: Tensor
    frozen_at: Tensor
    order: Tensor | None  # see Coordinates.values


def prepare_vector(store: "Coordinates", change: VectorChange) -> PreparedVector:
    """Computes the vector that `change` leads to, without touching the present one."""
    index, gradient = change.index, store.parameter.grad
    trainable, frozen = store.parameter.detach(), store.frozen_values
    born = _like(change.born_values, trainable, len(index.inserted))
    born_gradient = _like(change.born_gradients, trainable, len(index.inserted))
    # not a slice: the journal would keep the whole old vector alive
    gone_values = trainable.new_empty(0)
    gone_gradients = None if gradient is None else gradient.new_empty(0)
    if index.removed.shape[0]:
        gone_values, gone_gradients = (
            store.read(index.removed).detach(),
            store.gradients(index.removed),
        )
    change = replace(
        change, born_values=born.view(-1), gone_values=gone_values, gone_gradients=gone_gradients
    )
    if not (store.frozen_at.shape[0] or change.flips.shape[0] or bool(change.born_frozen.any())):
        parameter_index, frozen_at = index, store.frozen_at
        content = index.carry(trainable, born)
        gradient = None if gradient is None else index.carry(gradient, born_gradient)
    else:
        crossing = _Crossing(store, change)
        parameter_index, frozen_at = crossing.parameter_index, crossing.frozen_at
        thawed_values = frozen[torch.searchsorted(store.frozen_at, crossing.thawed_from)]
        froze_values = trainable[crossing.froze_from_place]
        content = parameter_index.carry(trainable, crossing.into_parameter(born, thawed_values))
        frozen = crossing.frozen_index.carry(frozen, crossing.into_frozen(born, froze_values))
        if gradient is not None:
            flip_gradient = _like(change.flip_gradients, trainable, len(change.flips))
            taken = torch.zeros_like(flip_gradient)
            taken[~crossing.melts] = gradient[crossing.froze_from_place]
            change = replace(change, flip_gradients=taken.view(-1))
            returning = crossing.into_parameter(born_gradient, flip_gradient[crossing.melts])
            gradient = parameter_index.carry(gradient, returning)
    if change.shift is not None:
        content = _shifted(content, change.shift, frozen_at)
    order = _assembly_order(len(content), frozen_at)
    return PreparedVector(change, parameter_index, content, gradient, frozen, frozen_at, order)


class _Crossing:
    """Which coordinates a change moves into and out of the Parameter and the frozen buffer.

    Positions named `…_from` are in the old vector, all others in the new one.
    """

    def __init__(self, store: "Coordinates", change: VectorChange) -> None:
        index = change.index
        # frozen and staying
        held = index.new_positions(store.frozen_at[~contains(index.removed, store.frozen_at)])
        self._born_frozen = change.born_frozen
        self.melts = contains(held, change.flips)
        thawed, froze = change.flips[self.melts], change.flips[~self.melts]
        born_held, born_free = (
            index.inserted[change.born_frozen],
            index.inserted[~change.born_frozen],
        )
        self.frozen_at = (
            torch.cat([held[~contains(change.flips, held)], froze, born_held]).sort().values
        )
        self.thawed_from, froze_from = index.old_positions(thawed), index.old_positions(froze)
        self.froze_from_place = _among_free(froze_from, store.frozen_at).long()

        was_frozen = store.frozen_bits(index.removed)
        to_parameter, self._parameter_order = torch.cat([born_free, thawed]).sort()
        to_frozen, self._frozen_order = torch.cat([born_held, froze]).sort()
        leaves_parameter = torch.cat([index.removed[~was_frozen], froze_from]).sort().values
        leaves_frozen = torch.cat([index.removed[was_frozen], self.thawed_from]).sort().values
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
        """Returns what comes into the Parameter, in the order of its new positions."""
        return torch.cat([born[~self._born_frozen], thawed])[self._parameter_order]

    def into_frozen(self, born: Tensor, froze: Tensor) -> Tensor:
        """Returns what comes into the frozen buffer, in the order of its new positions."""
        return torch.cat([born[self._born_frozen], froze])[self._frozen_order]


def _among_free(positions: Tensor, frozen_at: Tensor) -> Tensor:
    """Returns where trainable positions stand among the trainable ones alone."""
    return positions - torch.searchsorted(frozen_at, positions, out_int32=True)


def _like(values: Tensor | None, example: Tensor, count: int) -> Tensor:
    """Returns `values` (zeros when None) in the dtype, device and trailing shape of `example`."""
    if values is None:
        return example.new_zeros((count, *example.shape[1:]))
    return values.to(example).reshape(count, *example.shape[1:])


def _assembly_order(free: int, frozen_at: Tensor) -> Tensor | None:
    """Returns where each coordinate stands in (trainable, frozen) laid end to end; None when
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
