"""The dispatch mode that types a running model: each operation unifies the axes of its tensors.

An operation's rule gives the axes of what it returns. An operation without a rule, or whose rule is
stuck, pins every axis that it touches, with its name and the line of the model that called it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grapnet._torch import TorchDispatchMode, fake_tensor_logger

from ._axes import EMPTY, Axis, Leaf, Stuck, find, leaves, pin, unify
from ._results import Results

Operator = Any
Rule = Callable[
    ["Typing", Operator, tuple[Any, ...], dict[str, Any], Any], Sequence[Sequence[Axis]]
]

# What `mark` notes, and what it means for a removal of nodes. Nodes without one of these marks,
# or with the last two only, can be removed exactly: what their readers made of them is gone.
NORMALISED = "normalised over"
SOFTMAX = "softmax over"
SUMMED = "summed over"
EXTREME = "maximum or minimum over"
SCALED = "scaled by its size"
# Two activations are contracted over it, as queries and keys: no tensor of the model reads it.
CONTRACTED = "contracted without a parameter"
EQUAL_PARTS = "cut into equal parts"

POSITIONS = "positions of the data"
OUTSIDE = "a tensor outside of parameters and buffers"

_RULES: dict[str, Rule] = {}
# Rules of operators that return the same numbers in another order or layout, or some of them.
_VIEWS: set[Rule] = set()
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LAYERS = os.path.join(_TORCH, "nn", "")
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
# What `_place_of` returned for files.
_PLACES: dict[str, str] = {}


class _Quiet(logging.Filter, threading.local):
    """Drops what torch logs when shapes do not fit: here that is an answer, not an error."""

    on = False

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.on


quiet = _Quiet()
logging.getLogger(fake_tensor_logger).addFilter(quiet)


def register_rule(operator: str, rule: Rule, *, view: bool = False) -> None:
    """Sets how an operator's axes are typed, for operators of one's own.

    A rule is called after the operator ran, once a call, as `rule(typing, func, args, kwargs,
    out)`: `func` is the `OpOverload`, `args` and `kwargs` are what it got, `out` is what it
    returned. It returns a list of axes, one per dimension, for each tensor of `out` in order.

    A rule has these parts of `typing` at hand:

    - `typing.of(tensor)`: a list of the axes of a tensor, one per dimension.
    - `typing.same(a, b)`: two axes have the same indices in the same order.
    - `typing.reads(tensor, dim)`, `typing.writes(tensor, dim)`: the operator contracts an axis of
      a tensor, or makes the nodes of one; noted where the tensor is a parameter.
    - `pin(axis, why)` of `grapnet.spaces`: the size of this axis cannot change.

    A rule raises `Stuck` when it does not know; then all axes of the call are pinned.

    Args:
        operator: A name with its namespace, as `"my::op"`; operators of torch are `"aten::op"`.
        rule: The rule, for all overloads of the operator.
        view: Whether the operator looks at no number, but returns some of them in another layout.
            A part of a parameter that only such operators get counts as unseen.

    Example:
        >>> def rotated(typing, func, args, kwargs, out):
        ...     return [typing.of(args[0])]
        >>> register_rule("my::rotate", rotated)
    """
    _RULES[operator] = rule
    if view:
        _VIEWS.add(rule)


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in the arguments or results of an operator."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, (list, tuple)):
        for item in tree:
            if isinstance(item, Tensor):
                found.append(item)
            elif isinstance(item, (list, tuple)):
                found.extend(tensors_in(item))
    elif isinstance(tree, dict):
        for item in tree.values():
            found.extend(tensors_in(item))
    return found


def model_line() -> str:
    """Returns file and line of the innermost frame that is not in torch or in GrapNet.

    Where modules of torch are called by GrapNet itself, the innermost line of torch.nn is returned.
    """
    frame: Any = sys._getframe(1)
    inside = "?"
    while frame is not None:
        name = frame.f_code.co_filename
        place = _PLACES.get(name)
        if place is None:
            place = _PLACES[name] = _place_of(name)
        if place == "model":
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        if place == "grapnet":
            if frame.f_code.co_name == "forward":
                return inside
        elif place == "layers" and inside == "?":
            inside = f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return inside


def _place_of(name: str) -> str:
    """Returns to what a file belongs: "model", "grapnet", "torch", or "layers" for torch.nn."""
    if name.startswith(_OWN):
        return "grapnet"
    if not name.startswith(_TORCH):
        return "model"
    if name.startswith(_LAYERS) and not name.endswith("module.py"):
        return "layers"
    return "torch"


class Typing(TorchDispatchMode):
    """Types the tensors of every operation that runs under it.

    Attributes:
        named: The axes of every parameter and buffer.
        unknown: Operations without a rule, as "aten::foo at file.py:123", each once.
        read: Names of the parameters and buffers that an operation got.
        scalars: Numbers that operations computed with, in order.
        read_dims: For a name and its dimensions, the axes that operations contract there.
        written_dims: For a name and its dimensions, the axes that operations make there.
        grouped: Names of the parameters and buffers that are weights of convolutions in groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, Sequence[Axis]] = {}
        self.unknown: dict[str, None] = {}
        self.read: set[str] = set()
        self.scalars: list[float] = []
        self.read_dims: dict[tuple[str, tuple[int, ...]], list[Axis]] = {}
        self.written_dims: dict[tuple[str, tuple[int, ...]], list[Axis]] = {}
        self.grouped: set[str] = set()
        self.operation = ""
        # Set while tensors without contents are typed.
        self.results: Results | None = None
        # Keyed by id; `_kept` keeps the tensors alive, so that no id is used twice.
        self._axes: dict[int, Sequence[Axis]] = {}
        self._kept: list[Tensor] = []
        self._names: dict[int, str] = {}
        self._outside: dict[int, str] = {}
        # For views and copies of a parameter: its name and, for each dimension, which of the
        # parameter's dimensions it comes from.
        self._origins: dict[int, tuple[str, list[tuple[int, ...]]]] = {}
        # Tensors whose values are indices on an axis, as argmax returns.
        self._indices: dict[int, Axis] = {}
        # Tensors that an operation other than a view got.
        self._consumed: set[int] = set()
        # (number of the last leaf that a line of the model made, file and line), ascending.
        self._lines: list[tuple[int, str]] = [(Leaf.made, "")]
        self._rules: dict[Operator, Rule | None] = {}

    def attach(self, named: Mapping[str, Tensor], outside: Mapping[int, str]) -> None:
        """Gives tensors of a model their axes: the same for the same name in every twin.

        Args:
            named: Parameters and buffers.
            outside: Names of other tensors that the model holds, by id.
        """
        self._outside.update(outside)
        for name, tensor in named.items():
            axes = self.named.get(name)
            if axes is None:
                axes = list(map(Leaf, tensor.shape))
                self.named[name] = axes
                self._lines.append((Leaf.made, ""))
            elif [axis.size for axis in axes] != list(tensor.shape):
                why = f"{name} changes its shape from run to run"
                for axis in axes:
                    pin(axis, why)
                axes = pinned(tensor.shape, why)
            self._set(tensor, axes)
            self._names[id(tensor)] = name
            self._origins[id(tensor)] = (name, [(dim,) for dim in range(tensor.dim())])

    def give(self, tensor: Tensor, why: str) -> None:
        """Gives a tensor of the caller axes that are pinned."""
        self._set(tensor, pinned(tensor.shape, why))
        self._lines.append((Leaf.made, ""))

    def has(self, tensor: Tensor) -> bool:
        """Returns whether a tensor was seen."""
        return id(tensor) in self._axes

    def of(self, tensor: Tensor) -> list[Axis]:
        """Returns the axes of a tensor, one per dimension."""
        axes = self._axes.get(id(tensor))
        if axes is None:
            name = self._outside.get(id(tensor))
            if name is None:
                why = f"{OUTSIDE}, at {model_line()}"
            else:
                why = f"{OUTSIDE}: {name}"
            axes = pinned(tensor.shape, why)
            self._set(tensor, axes)
        return [find(axis) for axis in axes]

    def same(self, a: Axis, b: Axis) -> None:
        """Makes two axes the same; pins both, with the lines in conflict, when they cannot be."""
        if a is b:
            return
        try:
            unify(a, b)
        except Stuck as error:
            self._refuse((a, b), f"{self.operation}: {error}")

    def reads(self, tensor: Tensor, dim: int, axis: Axis | None = None) -> bool:
        """Notes that an operation contracts a dimension of a tensor, or a part `axis` of it.

        Returns:
            Whether the tensor is a parameter or buffer, or a view or copy of one.
        """
        return self._note(self.read_dims, tensor, dim, axis)

    def writes(self, tensor: Tensor, dim: int, axis: Axis | None = None) -> bool:
        """Notes that an operation makes nodes along a dimension, or a part `axis` of it."""
        return self._note(self.written_dims, tensor, dim, axis)

    def in_groups(self, weight: Tensor) -> None:
        """Notes that a tensor is the weight of a convolution in groups, whose first dimension has
        the groups outermost.
        """
        name = self._names.get(id(weight))
        if name is not None:
            self.grouped.add(name)

    def comes_from(self, tensor: Tensor, source: Tensor, dims: Sequence[Iterable[int]]) -> None:
        """Notes that a tensor is a view or copy of another.

        Args:
            tensor: The view or copy.
            source: What it was made of.
            dims: For each dimension of `tensor` those of `source` that it comes from.
        """
        origin = self._origins.get(id(source))
        if origin is None:
            return
        name, before = origin
        after: list[tuple[int, ...]] = []
        for sources in dims:
            joined: list[int] = []
            for dim in sources:
                joined.extend(before[dim])
            after.append(tuple(joined))
        self._origins[id(tensor)] = (name, after)

    def holds_indices(self, tensor: Tensor, axis: Axis) -> None:
        """Notes that a tensor holds indices on an axis; operations that read it pin the axis."""
        self._indices[id(tensor)] = axis

    def seen(self) -> set[Leaf]:
        """Returns the leaves of all tensors that an operation other than a view got."""
        axes: set[Axis] = set()
        for key in self._consumed:
            axes.update(self._axes.get(key, ()))
        found: set[Leaf] = set()
        for axis in axes:
            found.update(leaves(axis))
        return found

    def refine(self, tensor: Tensor, other: Tensor, why: str) -> None:
        """Makes the axes of two tensors the same, or pins both where the shapes differ."""
        if tensor.shape == other.shape:
            self.operation = why
            for a, b in zip(self.of(tensor), self.of(other), strict=True):
                self.same(a, b)
            return
        for axis in (*self.of(tensor), *self.of(other)):
            pin(axis, why)

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in(args)
        if kwargs:
            inputs.extend(tensors_in(kwargs))
        out = None
        if self.results is not None:
            out = self.results.of(func, args, kwargs, inputs)
        if out is None:
            out = func(*args, **kwargs)
        for tensor in inputs:
            name = self._names.get(id(tensor))
            if name is not None:
                self.read.add(name)
        if self._indices:
            self._pin_indices(inputs)
        results = tensors_in(out)
        if results:
            self._type(func, args, kwargs, out, inputs, results)
        elif inputs and _acts_unseen(func):
            self._without_rule(inputs, [], f"no rule for {func._schema.name}")
        return out

    def _type(
        self,
        func: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[Tensor],
        results: list[Tensor],
    ) -> None:
        """Gives the results of an operation their axes."""
        made = Leaf.made
        name = func._schema.name
        self.operation = name
        if func in self._rules:
            rule = self._rules[func]
        else:
            rule = self._rules[func] = rule_of(func)
        if rule not in _VIEWS:
            self._consumed.update(map(id, inputs))
            self._note_scalars(rule, args, kwargs)
        if rule is None:
            typed = self._without_rule(inputs, results, f"no rule for {name}")
        else:
            try:
                typed = rule(self, func, args, kwargs, out)
                _check_sizes(typed, results)
            except Stuck as error:
                axes = [axis for tensor in inputs for axis in self.of(tensor)]
                why = self._refuse(axes, f"{name}: {error}")
                typed = [pinned(result.shape, why) for result in results]
            except Exception as error:
                # Arguments that the rule does not foresee: as good as no rule.
                why = f"the rule for {name} raises {type(error).__name__}"
                typed = self._without_rule(inputs, results, why)
        self._assign(func, inputs, results, typed)
        if Leaf.made != made:
            self._lines.append((Leaf.made, model_line()))

    def _note_scalars(
        self, rule: Rule | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Notes floating numbers and, of operations by element, whole ones: elsewhere those are
        sizes and dimensions."""
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind is float or (kind is int and rule is elementwise):
                self.scalars.append(value)

    def _assign(
        self,
        func: Operator,
        inputs: list[Tensor],
        results: list[Tensor],
        typed: Sequence[Sequence[Axis]],
    ) -> None:
        """Sets the axes of results; those of a tensor written in place must stay what they were."""
        before = {id(tensor) for tensor in inputs}
        changes_shape = torch.Tag.inplace_view in func.tags
        for tensor, axes in zip(results, typed, strict=True):
            if id(tensor) in before and not changes_shape:
                for old, new in zip(self.of(tensor), axes, strict=True):
                    self.same(old, new)
            else:
                self._set(tensor, axes)

    def _without_rule(
        self, inputs: Iterable[Tensor], results: Iterable[Tensor], reason: str
    ) -> list[list[Axis]]:
        """Pins the axes of inputs; returns axes for the results that are pinned as well."""
        why = f"{reason} at {model_line()}"
        self.unknown[why.removeprefix("no rule for ")] = None
        for tensor in inputs:
            for axis in self.of(tensor):
                pin(axis, why)
        return [pinned(result.shape, why) for result in results]

    def _refuse(self, axes: Sequence[Axis], reason: str) -> str:
        """Pins axes that contradict each other, with this line and those that shaped them."""
        here = model_line()
        lines: dict[str, None] = {}
        for axis in axes:
            for leaf in leaves(axis):
                line = self._line_of(leaf)
                if line not in (None, here):
                    lines[line] = None
        why = f"{reason} at {here}"
        if lines:
            why = f"{why}, against {', '.join(lines)}"
        for axis in axes:
            pin(axis, why)
        return why

    def _line_of(self, leaf: Leaf) -> str | None:
        """Returns the line of the model whose operation made a leaf."""
        at = bisect_left(self._lines, (leaf.number, ""))
        if at == len(self._lines):
            return None
        return self._lines[at][1] or None

    def _set(self, tensor: Tensor, axes: Sequence[Axis]) -> None:
        self._axes[id(tensor)] = axes
        self._kept.append(tensor)

    def _note(
        self,
        notes: dict[tuple[str, tuple[int, ...]], list[Axis]],
        tensor: Tensor,
        dim: int,
        axis: Axis | None,
    ) -> bool:
        origin = self._origins.get(id(tensor))
        if origin is None:
            return False
        name, dims = origin
        if axis is None:
            axis = self._axes[id(tensor)][dim]
        notes.setdefault((name, dims[dim]), []).append(axis)
        return True

    def _pin_indices(self, inputs: list[Tensor]) -> None:
        for tensor in inputs:
            axis = self._indices.get(id(tensor))
            if axis is not None:
                pin(axis, f"its indices are values, read at {model_line()}")


def _acts_unseen(func: Operator) -> bool:
    """Returns whether an operator that returns no tensor does more than answer a question."""
    return func.namespace not in ("aten", "prim", "prims") or func._schema.is_mutable


def _check_sizes(typed: Sequence[Sequence[Axis]], results: Sequence[Tensor]) -> None:
    """Raises ValueError when the axes that a rule gave do not fit the results."""
    for axes, result in zip(typed, results, strict=True):
        if [axis.size for axis in axes] != list(result.shape):
            raise ValueError(f"axes {list(axes)} for a shape of {list(result.shape)}")


def pinned(shape: Iterable[int], why: str) -> list[Axis]:
    """Returns axes that no edit may change."""
    axes: list[Axis] = []
    for size in shape:
        axis = EMPTY
        if size:
            axis = Leaf(size)
            axis.pins = (why,)
        axes.append(axis)
    return axes


def rule_of(func: Operator) -> Rule | None:
    """Returns the rule of an operator: its own, that of its out-of-place form, or elementwise."""
    name = func._schema.name
    rule = _RULES.get(name) or _RULES.get(name.rstrip("_"))
    if rule is None and torch.Tag.pointwise in func.tags:
        return elementwise
    return rule


def elementwise(
    typing: Typing, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> list[list[Axis]]:
    """The rule of operations that compute each element of the result from those at its place."""
    inputs = tensors_in(args)
    if kwargs:
        inputs.extend(tensors_in(kwargs))
    results = tensors_in(out)
    axes = broadcast(typing, [typing.of(tensor) for tensor in inputs], results[0].shape)
    return [axes] * len(results)


def broadcast(typing: Typing, rows: Sequence[Sequence[Axis]], shape: Sequence[int]) -> list[Axis]:
    """Unifies axes that broadcasting lays over each other, and returns those of the result.

    Dimensions are aligned at the last one. An axis of size 1 that is stretched binds nothing.
    """
    axes: list[Axis] = []
    for back in range(-len(shape), 0):
        size = shape[back]
        chosen: Axis | None = None
        for row in rows:
            if len(row) < -back or row[back].size != size:
                continue
            if chosen is None:
                chosen = row[back]
            else:
                typing.same(chosen, row[back])
        if chosen is None:
            chosen = Leaf(size)
        axes.append(chosen)
    return axes
