"""GramRecorder: what the readers of a layer or of a space receive, as a matrix of products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grapnet.core._change import Change, VectorChange
from grapnet.core._errors import EditError, GrapNetError
from grapnet.core._graph import Graph
from grapnet.core._index_map import IndexMap, flatnonzero
from grapnet.core._layer import LiveNodes
from grapnet.execution._changes import count_steps, state_of
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._axes import atoms_of
from grapnet.spaces._space import Space
from grapnet.spaces._typing import CONTRACTED

from ._activations import is_new
from ._cells import Linear, cells, linear_of, why_not_linear, with_batch
from ._correlations import Sides
from ._recorder import NetRecorder, layer_of, plainly
from ._rule import as_names
from ._taps import Tap, called_before, paths_of, watch_taps


class TooManyNumbers(GrapNetError):
    """A Gram matrix has more numbers than a recorder may keep."""


# Columns of which the products with all columns before them are computed at a time: only one half
# of a symmetric matrix is computed.
STRIPE = 384
# Blocks of rows of a pass, of which some are held out.
BLOCKS = 50
# Numbers of the input of a convolution that are laid out by cells at a time.
CELLS = 2**24
_LOADED = "it was loaded or copied, so that the weights may be others"


class Origin(Protocol):
    """Where rows come from, and what they depend on."""

    @property
    def width(self) -> int:
        """The number of columns, without the constant 1."""
        ...

    def staying(self, indexes: Sequence[IndexMap | None]) -> Tensor:
        """Returns the columns that stay when nodes leave, int64 on the CPU."""
        ...

    def moved(self, indexes: Sequence[IndexMap | None]) -> Origin:
        """Returns the origin after nodes have come or left."""
        ...

    def why_stale(self, change: Change) -> str:
        """Returns why rows are others after a change; empty if they are not."""
        ...

    def stores(self, net: Any) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Returns the Parameters that rows depend on, each with frozen values beside it."""
        ...


@dataclass(frozen=True)
class LayerOrigin:
    """The activations of a layer of a net.

    Attributes:
        layer: the number of the layer.
        width: its size.
        above: the numbers of the layers that it depends on.
        entering: the numbers of the transitions that lead to it or to one of them, with the layer
            that each leads to.
    """

    layer: int
    width: int
    above: frozenset[int]
    entering: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, net: Graph, layer: int) -> LayerOrigin:
        """Returns that of a layer."""
        above: set[int] = set()
        entering: list[tuple[int, int]] = []
        waiting = [layer]
        while waiting:
            target = waiting.pop()
            for t in net.entering(target):
                entering.append((t, target))
                source = net.ends[t][0]
                if source not in above:
                    above.add(source)
                    waiting.append(source)
        return cls(layer, len(net.layers[layer]), frozenset(above), tuple(entering))

    def staying(self, indexes: Sequence[IndexMap | None]) -> Tensor:
        """Returns the columns that stay when nodes leave."""
        (index,) = indexes
        stays = torch.ones(self.width, dtype=torch.bool)
        if index is not None:
            stays[index.removed.cpu().long()] = False
        return stays.nonzero().squeeze(1)

    def moved(self, indexes: Sequence[IndexMap | None]) -> LayerOrigin:
        """Returns the origin after nodes have come or left."""
        (index,) = indexes
        if index is None:
            return self
        return replace(self, width=index.new_size)

    def why_stale(self, change: Change) -> str:
        """Returns why rows are others after a change; empty if they are not."""
        for number in sorted({self.layer, *self.above}):
            part = change.layers.get(number)
            if part is None:
                continue
            if number == self.layer and len(part.index.inserted):
                return f"nodes were added to layer {number}"
            if number != self.layer and not part.index.is_identity:
                return f"nodes of layer {number} came or left"
            if part.activations is not None:
                return f"nodes of layer {number} have other activations"
            if part.biases is not None and _is_assigned(part.biases):
                return f"biases of layer {number} were assigned"
        for t, target in self.entering:
            part = change.transitions.get(t)
            if part is None:
                continue
            if _is_assigned(part.weights):
                return f"relations to layer {target} were assigned"
            # Relations leave with the nodes of the layer itself.
            gone = part.gone.children.cpu().long()
            if target in change.layers and target == self.layer:
                left = change.layers[target].gone.uids
                gone = gone[~torch.isin(gone, left)]
            if len(gone) or len(part.born):
                return f"relations to layer {target} were cut or connected"
        return ""

    def stores(self, net: Any) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Returns the Parameters that rows depend on, each with frozen values beside it."""
        found = [net.transitions[t] for t, _ in self.entering]
        for number in sorted({self.layer, *self.above}):
            if not net.layers[number].is_sensory:
                found.append(net.layers[number])
            found.extend(net._columns_of(number).values())
        return [(store.parameter, store.frozen_values) for store in found]


def _is_assigned(change: VectorChange) -> bool:
    """Returns whether a change gives coordinates that stay other values."""
    return change.shift is not None or change.assigned is not None


@dataclass(frozen=True)
class ReaderOrigin:
    """The cells that a module of an adopted model sums over.

    Attributes:
        reader: the module.
        kernel: the number of places of its kernel, 1 of a Linear.
        sides: the axes of its weight, with the spaces of its input.
        layers: the numbers of these spaces.
        tensors: the names of the tensors that are read before it.
        above: the numbers of the other spaces that these tensors have.
        returning: those of its own spaces whose nodes are also read before it, or under a norm.
    """

    reader: Linear
    kernel: int
    sides: Sides
    layers: tuple[int, ...]
    tensors: frozenset[str]
    above: frozenset[int]
    returning: frozenset[int]
    width: int

    @classmethod
    def of(cls, net: Adopted, reader: Linear) -> ReaderOrigin:
        """Returns that of a reader."""
        axes = net._typed.axes[reader.name]
        axis = axes[1 - reader.out_dim]
        layers = []
        for number, space in enumerate(net.spaces):
            if space._atom in atoms_of(axis):
                layers.append(number)
        atoms = tuple(net.spaces[number]._atom for number in layers)
        sides = Sides(axes[reader.out_dim], axis, atoms, tuple(net._atom_sizes()))
        tensors = called_before(net, reader.path)
        above = set()
        returning = set()
        for number, space in enumerate(net.spaces):
            is_mixed = any(mark.startswith("normalised") for mark in space._marks)
            is_read = any(name in tensors for name in space.readers)
            if number in layers:
                if is_mixed or is_read or CONTRACTED in space._marks:
                    returning.add(number)
            elif any(name in tensors for name, _ in space._members):
                above.add(number)
        shape = reader.canonical(net._grids()[reader.name].whole).shape
        return cls(
            reader,
            math.prod(shape[2:]),
            sides,
            tuple(layers),
            tensors,
            frozenset(above),
            frozenset(returning),
            math.prod(shape[1:]),
        )

    def staying(self, indexes: Sequence[IndexMap | None]) -> Tensor:
        """Returns the columns that stay when nodes leave."""
        stays = self.sides.staying(self.sides.parents, indexes)
        return (stays[:, None] * self.kernel + torch.arange(self.kernel)).reshape(-1)

    def moved(self, indexes: Sequence[IndexMap | None]) -> ReaderOrigin:
        """Returns the origin after nodes have come or left."""
        sides = self.sides.sized([index and index.new_size for index in indexes])
        # The sizes say how many positions there are.
        width = len(sides.staying(sides.parents, [None] * len(indexes))) * self.kernel
        return replace(self, sides=sides, width=width)

    def why_stale(self, change: Change) -> str:
        """Returns why rows are others after a change; empty if they are not."""
        for number, part in change.layers.items():
            if part.index.is_identity:
                continue
            if number in self.layers and len(part.index.inserted):
                return f"nodes were added to space {number}"
            if number in self.above or number in self.returning:
                return f"nodes of space {number} came or left, which is read before"
        for name, part in change.tensors.items():
            if name not in self.tensors:
                continue
            if part.relations.added or part.relations.removed:
                return f"relations of {name} were cut or connected"
            if part.assigned is not None:
                return f"{name} was assigned"
        return ""

    def stores(self, net: Any) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Returns the Parameters that rows depend on, each with frozen values beside it."""
        found = []
        for name, grid in net._stores().items():
            if name in self.tensors:
                opened = grid.opened
                found.append((grid.parameter, None if opened is None else opened.frozen_values))
        return found


@dataclass(eq=False)
class Products:
    """What a GramRecorder has seen: sums of products of columns, of which the lower halves count.

    Attributes:
        origin: where the rows come from.
        sums: over the rows to solve for, [columns + 1, columns + 1] float64.
        held: the same over the rows that are held out; None if none are.
        rows: how many rows both have together.
        writes: the number of writes to Parameters that the rows came after.
        stale: why the rows are out of date; empty if they are not.
        spare: memory for rows that are copied while a recorder is armed.
    """

    origin: Origin
    sums: Tensor
    held: Tensor | None
    rows: int
    writes: int
    stale: str = ""
    spare: Tensor | None = None

    @classmethod
    def none(cls, origin: Origin, has_held: bool, writes: int) -> Products:
        """Returns those of no rows."""
        size = origin.width + 1
        sums = torch.zeros(size, size, dtype=torch.float64)
        held = torch.zeros_like(sums) if has_held else None
        return cls(origin, sums, held, 0, writes)

    def see(self, h: Tensor, share: float) -> Tensor | None:
        """Adds rows [rows, columns], of which a share is held out.

        Returns:
            Which rows are held out, one bool each on the CPU; None if none are.
        """
        if self.sums.device != h.device:
            self.sums = self.sums.to(h.device)
            self.held = None if self.held is None else self.held.to(h.device)
        if h.dtype != torch.float64:
            h = h.float()
        first = self.rows
        self.rows += len(h)
        if self.held is None:
            _add_products(self.sums, h)
            return None
        is_held = _are_held_out(first, len(h), share)
        _add_products(self.sums, self._selected(h, ~is_held))
        _add_products(self.held, self._selected(h, is_held))
        return is_held

    def _selected(self, h: Tensor, marks: Tensor) -> Tensor:
        """Returns a copy of the marked rows, until the next one.

        New memory would take longer to touch for the first time than the copy itself.
        """
        at = flatnonzero(marks).long().to(h.device)
        size = len(at) * h.shape[1]
        spare = self.spare
        if spare is None or len(spare) < size or (spare.dtype, spare.device) != (h.dtype, h.device):
            spare = self.spare = h.new_empty(size)
        return torch.index_select(h, 0, at, out=spare[:size].view(len(at), h.shape[1]))

    def after(self, change: Change) -> Products:
        """Returns it after a change of the net, its columns as they were."""
        if self.stale:
            return self
        return replace(self, stale=self.origin.why_stale(change))

    def carried(self, *indexes: IndexMap | None) -> Products:
        """Returns it after nodes have come or left; it is stale once some have come."""
        if self.stale or any(index is not None and len(index.inserted) for index in indexes):
            nothing = self.sums.new_zeros(0, 0)
            return replace(self, sums=nothing, held=nothing)
        origin = self.origin.moved(indexes)
        stays = self.origin.staying(indexes)
        stays = torch.cat([stays, torch.tensor([self.origin.width])]).to(self.sums.device)
        held = self.held
        if held is not None:
            held = held[stays][:, stays]
        return replace(self, origin=origin, sums=self.sums[stays][:, stays], held=held)

    def copied(self) -> Products:
        """Returns an independent copy."""
        held = None if self.held is None else self.held.clone()
        return replace(self, sums=self.sums.clone(), held=held, spare=None)

    def state_dict(self) -> dict[str, Any]:
        """Returns it as numbers and tensors."""
        return {"sums": self.sums, "held": self.held, "rows": self.rows, "stale": self.stale}


def _are_held_out(first: int, count: int, share: float) -> Tensor:
    """Returns which rows of a pass are held out, one bool each: blocks of consecutive rows, spread
    over the pass, because rows that follow each other can be of one image or text, and all rows of
    a class can do so.

    Args:
        first: how many rows came before.
        count: the number of rows.
        share: of the rows to hold out.
    """
    size = max(1, count // BLOCKS)
    block = torch.arange(first, first + count, dtype=torch.float64, device="cpu")
    block = (block / size).floor()
    # One block of every cycle, at a place that looks random: at the same one it could always be the
    # same position of a sample.
    cycle = (block * share).floor()
    start = (cycle / share).ceil()
    length = ((cycle + 1) / share).ceil() - start
    place = (length - 1 - (cycle.long() * 2654435761 % 2**32 >> 16)).remainder(length)
    return block == start + place


def _add_products(sums: Tensor, h: Tensor) -> None:
    """Adds [h, 1]ᵀ [h, 1] to the lower half of a matrix, for rows h [rows, n]."""
    width = h.shape[1]
    for start in range(0, width, STRIPE):
        stop = min(start + STRIPE, width)
        sums[start:stop, :stop] += h[:, start:stop].t() @ h[:, :stop]
    sums[width, :width] += h.sum(0)
    sums[width, width] += len(h)


def _symmetric(sums: Tensor) -> Tensor:
    lower = sums.tril()
    return lower + lower.tril(-1).t()


class GramRecorder(NetRecorder[Products]):
    """Records the Gram matrix of what the readers of a layer or of a space receive.

    That is `Σ [h, 1]ᵀ [h, 1]` over rows h, with a constant 1 for the bias: all that least squares
    need to know of the rows. A share of the rows goes to a second matrix instead, by which a
    damping can be chosen. The two are 2·(n + 1)² numbers of 8 bytes. Products of float32 rows are
    float32 and are added up in float64.

    Every forward pass counts. In a net, rows are the activations of the layer. In an adopted model,
    they are what one module that reads the space multiplies with its weight: every token is a row,
    and of a convolution every position that the kernel comes to, with a column for each cell of the
    kernel, channel by channel.

    Evidence follows the removal of nodes in the layer. It is stale (`is_stale`) once rows would be
    others: nodes are added to the layer, something before it is edited or assigned, or a Parameter
    before it is written, as by a training step. Rows that are recorded after that replace the
    earlier ones. Writes through `parameter.data`, and to buffers, are not noticed.

    Args:
        layer: the number of the layer; 0 is the input of the net. Of an adopted model, the space or
            its name.
        at: the module of an adopted model that reads the space; needed if there are several.
        window: the number of steps that it records before its rule is due.
        held_out: the share of the rows that go to the second matrix, spread over each pass.
        rows: how many rows of a pass are recorded at most, evenly spaced; all by default.
        most_cells: the largest number of numbers of both matrices; `arm` raises GrapNetError for
            more.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([2, 3])
        >>> recorder = GramRecorder(0, held_out=0.5)
        >>> recorder.arm(net)
        >>> _ = net(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> recorder.count, recorder.gram.tolist()
        (2, [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]])
        >>> recorder.held_out_gram.tolist()
        [[9.0, 12.0, 3.0], [12.0, 16.0, 4.0], [3.0, 4.0, 1.0]]
    """

    def __init__(
        self,
        layer: int | str | LiveNodes,
        *,
        at: str | None = None,
        window: int = 1,
        held_out: float = 0.2,
        rows: int | None = None,
        most_cells: int = 2**27,
    ) -> None:
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out is a share from 0 to below 1, got {held_out}")
        if rows is not None and rows < 1:
            raise ValueError(f"rows is at least 1, got {rows}")
        names = as_names(layer)
        assert names
        super().__init__((names[0],), window)
        self.layer = names[0]
        self.at = at
        self.held_out = held_out
        self.rows = rows
        self.most_cells = most_cells
        self._origin: Origin | None = None
        # how often Parameters before the layer were written, as far as that was noticed, and what
        # they were then; None if that is not known
        self._writes = 0
        self._states: list[Any] | None = None

    @property
    def count(self) -> int:
        """How many rows were recorded."""
        return 0 if self._evidence is None else self._evidence.rows

    @property
    def gram(self) -> Tensor:
        """The Gram matrix of the rows that are not held out, [n + 1, n + 1] float64."""
        return _symmetric(self._current().sums)

    @property
    def held_out_gram(self) -> Tensor | None:
        """The Gram matrix of the rows that are held out; None if `held_out` is 0."""
        held = self._current().held
        return None if held is None else _symmetric(held)

    @property
    def total(self) -> Tensor:
        """The Gram matrix of all rows."""
        seen = self._current()
        if seen.held is None:
            return _symmetric(seen.sums)
        return _symmetric(seen.sums + seen.held)

    @property
    def is_stale(self) -> bool:
        """True if the rows were recorded before something that they depend on changed."""
        return bool(self.stale_reason)

    @property
    def stale_reason(self) -> str:
        """Why it is stale; empty if it is not, or has seen nothing."""
        seen = self._evidence
        if seen is None:
            return ""
        if seen.stale:
            return seen.stale
        if self._states is None:
            return _LOADED
        self._notice_writes()
        if seen.writes != self._writes:
            return "weights before it were written, as by a training step"
        return ""

    @property
    def reader(self) -> Linear | None:
        """The module of an adopted model whose input it records; None for a net."""
        return getattr(self._origin, "reader", None)

    def bind(self, net: Graph) -> None:
        """Follows the commits of a net without recording it.

        Raises:
            GrapNetError: it watches another net, or holds evidence about nodes of another net.
            EditError: the space has no reader that can be recorded, or several and `at` is missing.
        """
        if self._alive() is net:
            super().bind(net)
            return
        before = (self._origin, self._layers)
        origin = origin_of(net, self.layer, self.at)
        if isinstance(net, Adopted) and isinstance(origin, ReaderOrigin):
            self._layers = tuple(net.spaces[number].name for number in origin.layers)
        self._origin = origin
        try:
            super().bind(net)
        except Exception:
            self._origin, self._layers = before
            raise

    def arm(self, net: Graph) -> None:
        """Starts recording a net; raises GrapNetError if the matrices have too many numbers."""
        if self.armed and self.net is net:
            return
        origin = origin_of(net, self.layer, self.at)
        matrices = 2 if self.held_out else 1
        numbers = matrices * (origin.width + 1) ** 2
        if numbers > self.most_cells:
            raise GrapNetError(
                f"{origin.width:,} columns of {self.layer!r} need {numbers:,} numbers (limit"
                f" {self.most_cells:,}); raise most_cells= if there is memory for 8 bytes each, or"
                " leave out the second matrix with held_out=0"
            )
        super().arm(net)

    def disarm(self) -> None:
        """Stops watching and keeps what it has seen."""
        super().disarm()
        if self._evidence is not None:
            self._evidence.spare = None

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        origin = self._origin
        if isinstance(origin, ReaderOrigin):
            inputs = tuple(net._typed.inputs[origin.reader.path])
            return watch_taps(self, net, [Tap(origin.reader.path, "in", -1, inputs)])
        return super()._watch(net)

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        return [net.layers[layer_of(net, self.layer)]]

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        if is_new(output):
            with plainly(output.device):
                self._take(output.detach())

    def _tapped(self, place: int, tensor: Tensor) -> None:
        """Takes in the input of the reader."""
        if is_new(tensor):
            with plainly(tensor.device):
                self._take(tensor.detach())

    def _take(self, tensor: Tensor) -> None:
        """Takes in the activations of the layer, or the input of the reader, of one call."""
        for rows, _ in self._parts(tensor):
            self._see(rows)

    def _parts(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor | slice]]:
        """Yields the rows of one call that are recorded, [rows, columns], and which of its rows
        these are.
        """
        origin = self._origin
        if isinstance(origin, ReaderOrigin):
            net: Any = self.net
            module = origin.reader.module(net)
            yield from _laid_out(module, tensor, origin.kernel, self.rows)
        else:
            rows = tensor.reshape(-1, tensor.shape[-1])
            at = _spaced(len(rows), self.rows)
            yield rows[at], at

    def _see(self, h: Tensor) -> Tensor | None:
        """Adds rows; returns which of them are held out, None if none are."""
        self._notice_writes()
        seen = self._writable(self._nothing)
        if seen.stale or seen.writes != self._writes:
            nothing = self._nothing()
            vars(seen).update(vars(nothing))
        return seen.see(h, self.held_out)

    def _nothing(self) -> Products:
        net = self.net
        origin = origin_of(net, self.layer, self.at)
        return Products.none(origin, self.held_out > 0, self._writes)

    def _current(self) -> Products:
        seen = self._seen()
        if len(seen.sums) == 0:
            raise GrapNetError(
                f"this GramRecorder has recorded nothing since {seen.stale}; run data through the"
                " net while it is armed"
            )
        if not bool(seen.sums.diagonal().isfinite().all()):
            raise GrapNetError(
                f"the rows that were recorded of {self.layer!r} have NaN or infinity in them;"
                " `clear()` it and record others"
            )
        return seen

    def _present_states(self) -> list[Any]:
        """Returns numbers that differ once a Parameter before the layer was written."""
        found = []
        net = self._alive()
        if net is None or self._origin is None:
            return found
        for parameter, frozen in self._origin.stores(net):
            count_steps(parameter)
            found.append((id(parameter), state_of(parameter, frozen)))
        return found

    def _notice_writes(self) -> None:
        present = self._present_states()
        # Writes to some Parameters are not counted.
        is_unknown = any(state is None for _, state in present)
        if present != self._states or is_unknown:
            self._writes += 1
        self._states = present

    def _before_commit(self) -> None:
        if self._states is not None:
            self._notice_writes()

    def _after_commit(self) -> None:
        if self._states is not None:
            self._states = self._present_states()

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> Products:
        held = seen["held"]
        if held is not None:
            held = held.clone()
        # What it depends on is not asked: it is stale, and what is recorded next replaces it.
        origin = LayerOrigin(0, len(seen["sums"]) - 1, frozenset(), ())
        stale = seen["stale"] or _LOADED
        return Products(origin, seen["sums"].clone(), held, seen["rows"], self._writes, stale)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_states": None}


def _spaced(count: int, most: int | None) -> Tensor | slice:
    """Returns which of some rows are recorded."""
    if most is None or most >= count:
        return slice(None)
    return torch.arange(most) * count // most


def _laid_out(
    module: nn.Module, x: Tensor, kernel: int, most: int | None
) -> Iterator[tuple[Tensor, Tensor | slice]]:
    """Yields what the numbers of a weight are multiplied with, [rows, in · kernel], in parts, and
    which rows of the call these are.
    """
    if kernel == 1:
        (rows,) = cells(module, x)
        at = _spaced(len(rows), most)
        yield rows[at], at
        return
    x = with_batch(module, x)
    step = max(1, CELLS // max(1, x[0].numel() * kernel))
    start = 0
    for part in x.split(step):
        share = None
        if most is not None:
            share = math.ceil(most * len(part) / len(x))
        places = []
        count = 0
        for rows in cells(module, part):
            count = len(rows)
            places.append(rows[_spaced(count, share)])
        at = _spaced(count, share)
        if isinstance(at, slice):
            at = slice(start, start + count)
        else:
            at = start + at
        yield torch.stack(places, 2).flatten(1), at
        start += count


def origin_of(net: Graph, layer: int | str, at: str | None) -> Origin:
    """Returns where the rows of a layer, or of a reader of a space, come from.

    Raises:
        EditError: no reader can be recorded, or there are several and `at` is missing.
    """
    number = layer_of(net, layer)
    if not isinstance(net, Adopted):
        return LayerOrigin.of(net, number)
    return ReaderOrigin.of(net, reader_of(net, net.spaces[number], at))


def limit_matrices(net: Graph, recorder: GramRecorder, most_cells: int | None) -> None:
    """Makes a recorder keep to a number of numbers; its own limit if it is None.

    Where there is no room for a second matrix, no rows are held out.

    Raises:
        TooManyNumbers: one matrix has more numbers.
    """
    if most_cells is not None:
        recorder.most_cells = most_cells
    width = origin_of(net, recorder.layer, recorder.at).width
    numbers = (width + 1) ** 2
    if numbers > recorder.most_cells:
        raise TooManyNumbers(
            f"the Gram matrix for {width:,} columns of {recorder.layer!r} has {numbers:,} numbers"
            f" (limit {recorder.most_cells:,}); raise most_cells= if there is memory for 8 bytes"
            " each"
        )
    if 2 * numbers > recorder.most_cells:
        recorder.held_out = 0.0


def reader_of(net: Adopted, space: Space, at: str | None = None) -> Linear:
    """Returns the module that reads a space.

    Raises:
        EditError: there is none that can be recorded, or there are several and `at` is missing.
    """
    found = []
    for name in space.readers:
        if at is None or at in paths_of(net, [name]):
            found.append(name)
    if not found:
        where = f" at {at!r}" if at is not None else ""
        raise EditError(f"no module reads the nodes of {space.name}{where}")
    if len(found) > 1:
        paths = ", ".join(paths_of(net, found))
        raise EditError(
            f"several modules read the nodes of {space.name}: {paths}; name one of them with at="
        )
    problem = why_not_linear(net, found[0])
    if problem:
        raise EditError(f"what reads {space.name} cannot be recorded: {problem}")
    return linear_of(net, found[0])
