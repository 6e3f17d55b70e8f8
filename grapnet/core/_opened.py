"""Opened tensors: Parameters of modules of which some cells are cut or frozen.

While all cells of a weight exist and can be trained, the Parameter is the weight. Once some are cut
or frozen, the same Parameter holds the free ones alone, and the module computes the weight from
them whenever it is read: 0 where a cell is cut, its value where it is frozen.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grapnet._torch import let_sizes_vary, untraced

from ._grid_map import RowMap
from ._index_map import IndexMap, map_of_sources

CUT = 0
FREE = 1
FROZEN = 2

# Where a module keeps what is opened of it, in its `__dict__`.
_OPENED = "_grapnet_opened"


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which cells of a tensor exist, and which of them are frozen.

    Attributes:
        shape: the shape of the tensor.
        width: how many consecutive cells form a row; the cells of a row are cut and frozen
            together, as those of a kernel are.
        kinds: CUT, FREE or FROZEN for every row, uint8, on the CPU.
    """

    shape: tuple[int, ...]
    width: int
    kinds: Tensor

    @classmethod
    def full(cls, shape: tuple[int, ...], width: int) -> "Pattern":
        """Returns the pattern of a tensor whose cells are all free."""
        rows = math.prod(shape) // width
        return cls(shape, width, torch.full((rows,), FREE, dtype=torch.uint8, device="cpu"))

    @cached_property
    def is_full(self) -> bool:
        """True if all cells are free, so that the tensor need not be opened."""
        return bool((self.kinds == FREE).all())

    @cached_property
    def is_free(self) -> Tensor:
        """One bool for each row that exists: True if it is free."""
        kinds = self.kinds.numpy()  # numpy selects by a mask many times as fast
        return torch.from_numpy(kinds[kinds != CUT] == FREE)

    @cached_property
    def n_cells(self) -> int:
        """The number of cells of the tensor."""
        return math.prod(self.shape)

    @property
    def n_free(self) -> int:
        """The number of free rows."""
        return int(self.is_free.sum())

    @property
    def content_shape(self) -> tuple[int, ...]:
        """The shape that the Parameter has: that of the tensor if all cells are free, else a
        matrix of rows, or a vector of cells if a row has one.
        """
        if self.is_full:
            return self.shape
        return (self.n_free, self.width) if self.width > 1 else (self.n_free,)

    def equals(self, other: "Pattern") -> bool:
        """Returns whether another pattern has the same rows."""
        if (self.shape, self.width) != (other.shape, other.width):
            return False
        return torch.equal(self.kinds, other.kinds)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pattern":
        return self


@dataclass(frozen=True, eq=False)
class Opened:
    """An opened tensor, except for its free cells, which are in the Parameter."""

    pattern: Pattern
    frozen_values: Tensor  # [frozen rows, width]
    _scratch: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    # how modules run with it, made by `grapnet.execution`
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    def whole(self, content: Tensor) -> Tensor:
        """Returns the tensor with `content` in its free rows; differentiable."""
        written = _execution.write(self, content)
        if written is not None:
            return written
        at = self.free_at(content.device)
        if len(self.frozen_values):
            rows = self._frozen_rows(content).index_copy(0, at, self._in_rows(content))
        else:
            # On a GPU, where launches bound this, zeros cost less than a copy of them.
            zeros = content.new_zeros(len(self.pattern.kinds), self.pattern.width)
            rows = zeros.index_copy_(0, at, self._in_rows(content))
        return rows.view(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor.

        A trace reads it from a tensor without numbers: the integers of the pattern would be
        constants of compiled code.
        """
        if not torch.compiler.is_compiling():
            return self.pattern.shape
        return self._sizes().shape[:-1]

    def _sizes(self) -> Tensor:
        """Returns a tensor without numbers that has the shape and a dimension of size 0."""
        if "sizes" not in self._scratch:
            sizes = torch.empty(*self.pattern.shape, 0, device="cpu")
            # The first two are those of nodes, the others those of a kernel.
            let_sizes_vary(sizes, dims=2)
            self._scratch["sizes"] = sizes
        return self._scratch["sizes"]

    def prepare(self, content: Tensor, modules: Iterable[nn.Module]) -> None:
        """Computes what forward passes keep, so that no compiled one traces it.

        Args:
            content: the Parameter, or a tensor of its kind.
            modules: those that are going to run with it.
        """
        let_sizes_vary(self.pattern.kinds)
        let_sizes_vary(self.free_at(content.device))
        let_sizes_vary(self.frozen_values, dims=1)
        self._sizes()
        if len(self.frozen_values):
            self._frozen_rows(content)
        self.numbers(content)
        for tensor in self._scratch.values():
            if tensor.dim() == 2:
                let_sizes_vary(tensor, dims=1)
        for module in modules:
            _execution.prepare(module, self, content)

    def numbers(self, content: Tensor) -> Tensor:
        """Returns the rows that exist, free and frozen ones in their order; differentiable.

        Without frozen rows it is `content`, or a view of it.
        """
        given = self._in_rows(content)
        if len(self.frozen_values) == 0:
            return given
        key = ("live", content.device, content.dtype)
        if key not in self._scratch:
            is_free = self.pattern.is_free.to(content.device)
            rows = torch.zeros(
                (len(is_free), self.pattern.width), dtype=content.dtype, device=content.device
            )
            rows[~is_free] = self.frozen_values.to(content)
            self._scratch[key] = rows
            self._scratch["live at", content.device] = is_free.nonzero().squeeze(1)
        return self._scratch[key].index_copy(0, self._scratch["live at", content.device], given)

    def _in_rows(self, content: Tensor) -> Tensor:
        # Where launches bound a forward pass, as on a GPU, a view that is not needed costs time.
        if content.dim() == 2:
            return content
        return content.view(-1, self.pattern.width)

    def live(self, content: Tensor) -> Tensor:
        """Returns a copy of the rows that exist, without gradients."""
        return self.numbers(content.detach()).clone()

    def free_at(self, device: torch.device) -> Tensor:
        """Returns the free rows, int64."""
        key = ("free", device)
        if key not in self._scratch:
            free = np.flatnonzero(self.pattern.kinds.numpy() == FREE)
            self._scratch[key] = torch.from_numpy(free).to(device)
        return self._scratch[key]

    def _frozen_rows(self, like: Tensor) -> Tensor:
        """Returns all rows, with 0 in the cut and in the free ones; not to be written to."""
        key = ("frozen", like.device, like.dtype)
        if key not in self._scratch:
            shape = len(self.pattern.kinds), self.pattern.width
            rows = torch.zeros(shape, dtype=like.dtype, device=like.device)
            at = torch.from_numpy(np.flatnonzero(self.pattern.kinds.numpy() == FROZEN))
            rows[at.to(like.device)] = self.frozen_values.to(like)
            self._scratch[key] = rows
        return self._scratch[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Opened":
        return Opened(self.pattern, self.frozen_values)

    def __reduce__(self) -> tuple[Any, ...]:
        return Opened, (self.pattern, self.frozen_values)


torch.serialization.add_safe_globals([Pattern, Opened])


class Execution:
    """How modules run with opened tensors: here as they are, with the tensor that `Opened.whole`
    computes.

    `grapnet.execution` provides faster ways.
    """

    def write(self, opened: Opened, content: Tensor) -> Tensor | None:
        """Returns the tensor that `Opened.whole` is asked for; None to let it compute it."""

    def prepare(self, module: nn.Module, opened: Opened, content: Tensor) -> None:
        """Makes the plans of a module whose `weight` is going to be opened."""

    def forward_of(self, plain: type[nn.Module]) -> Callable[..., Any] | None:
        """Returns the forward pass of modules of a class whose `weight` is opened; None for the
        class's own.
        """


_execution = Execution()


def run_by(execution: Execution) -> None:
    """Lets opened tensors run in other ways; modules that are opened already keep theirs."""
    global _execution
    _execution = execution


def opened_of(module: nn.Module, name: str) -> Opened | None:
    """Returns what is opened of a Parameter of a module; None if all of its cells are free."""
    opened = module.__dict__.get(_OPENED)
    return None if opened is None else opened.get(name)


def opens_any(modules: Iterable[nn.Module]) -> bool:
    """Returns whether a Parameter of one of the modules is opened."""
    return any(_OPENED in module.__dict__ for module in modules)


def same_pattern(one: Opened | None, other: Opened | None) -> bool:
    """Returns whether the same cells of two tensors are cut and frozen."""
    if one is None or other is None:
        return one is other
    return one.pattern.equals(other.pattern)


def opened_in(model: nn.Module) -> dict[int, Opened]:
    """Returns what is opened in a model, by the ids of the Parameters."""
    found = {}
    for module in model.modules():
        for name, opened in vars(module).get(_OPENED, {}).items():
            found[id(module._parameters[name])] = opened
    return found


def set_opened(module: nn.Module, name: str, opened: Opened | None) -> None:
    """Makes a module compute one of its Parameters from the free cells, or read it as it is.

    An interrupt may leave one half of it; the same call again completes it.
    """
    held = dict(vars(module).get(_OPENED, {}))
    held.pop(name, None)
    if opened is not None:
        held[name] = opened
    plain = plain_class(module)
    if opened is not None:
        parameter = module._parameters.get(name)
        if parameter is not None:
            let_sizes_vary(parameter, dims=1)
    if held:
        vars(module)[_OPENED] = held
        module.__class__ = _class_of(plain, tuple(sorted(held)))
    else:
        vars(module).pop(_OPENED, None)
        module.__class__ = plain


def plain_class(module: nn.Module) -> type:
    """Returns the class that a module has, or had before one of its Parameters was opened."""
    return getattr(type(module), "_grapnet_plain", type(module))


def close_copies(model: nn.Module) -> None:
    """Makes the modules of a copy, whose Parameters have all cells, read them as they are."""
    for module in model.modules():
        for name in vars(module).get(_OPENED, {}):
            set_opened(module, name, None)


# What looks at the tensors that modules compute, by the ids of their Parameters.
_watchers: dict[int, list[Callable[[Tensor], None]]] = {}


def watch(parameter: nn.Parameter, see: Callable[[Tensor], None]) -> Callable[[], None]:
    """Calls `see` with every tensor that a module computes from an opened Parameter; returns the
    function that ends this.

    A Parameter that has all of its cells is not computed, so that nothing is called.
    """
    _watchers.setdefault(id(parameter), []).append(see)
    return partial(_unwatch, id(parameter), see)


def is_watched(content: Tensor) -> bool:
    """Returns whether something looks at the tensor that is computed from a Parameter."""
    return bool(_watchers) and id(content) in _watchers


def _unwatch(number: int, see: Callable[[Tensor], None]) -> None:
    left = [other for other in _watchers.get(number, ()) if other is not see]
    if left:
        _watchers[number] = left
    else:
        _watchers.pop(number, None)


@untraced
def _show(content: Tensor, whole: Tensor) -> None:
    for see in _watchers.get(id(content), ()):
        see(whole)


_classes: dict[tuple[type, tuple[str, ...]], type] = {}


def _class_of(plain: type, names: tuple[str, ...]) -> type:
    """Returns the class of modules some of whose Parameters are opened."""
    key = (plain, names)
    if key not in _classes:
        body: dict[str, Any] = {name: _weight(name) for name in names}
        body |= {
            "_grapnet_plain": plain,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__reduce_ex__": _reduced,
        }
        forward = _execution.forward_of(plain)
        if forward is not None and "weight" in names:
            body["forward"] = forward
        _classes[key] = type(plain.__name__, (plain,), body)
    return _classes[key]


def _weight(name: str) -> property:
    def read(module: nn.Module) -> Any:
        content = module._parameters[name]
        assert content is not None
        whole = vars(module)[_OPENED][name].whole(content)
        if _watchers:
            _show(content, whole)
        return whole

    return property(read)


def _reduced(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    plain = plain_class(module)
    names = tuple(vars(module)[_OPENED])
    return _restored, (plain, names), vars(module)


def _restored(plain: type, names: tuple[str, ...]) -> Any:
    """Returns an empty module of the class that `_class_of` makes; pickle and copy fill it."""
    kind: Any = _class_of(plain, tuple(sorted(names)))
    return kind.__new__(kind)


def parameter_map(before: Pattern, after: Pattern, live: IndexMap) -> RowMap:
    """Returns how the Parameter moves when the rows that exist do.

    Args:
        before: the pattern before the commit.
        after: the pattern after it.
        live: how the rows that exist move.
    """
    # for every row after: which of the rows before it is, -1 for none
    source = np.full(live.new_size, -1, dtype=np.int64)
    cpu = torch.device("cpu")
    source[live.stays(cpu).numpy()] = live.survivors(cpu).numpy()
    was_free = before.is_free.numpy()
    # The last entry is for rows that were not there.
    rank = np.append(np.where(was_free, np.cumsum(was_free) - 1, -1), -1)
    place = rank[source[after.is_free.numpy()]]
    rows = map_of_sources(place, int(was_free.sum()))
    return RowMap(before.content_shape, after.content_shape, before.width, rows)


def holders_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Returns the modules that have each Parameter, and its name there, by its id."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, name))
    return found
