"""The compiled kernels of the sparse and dense backends, as differentiable operators of torch.

`torch.compile` and dispatch modes see the operators `torch.ops.grapnet.*`; eager code reaches the
same kernels directly, which saves 20 microseconds per call. Derivatives of every order exist. For
`torch.func`, batched backwards and forward-mode AD, which need rules that the kernels lack, plain
operations of torch compute the same.

Each operator is one class: `forward` runs the kernel, `plain` the operations of torch, `shape`
returns an empty result for a trace, and `backward` calls other operators of this file.

Activations and their gradients have one dtype. Values and biases have it too, or that of the sums,
which is float32 for bfloat16 and float16; so have the gradients of both.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from grapnet._torch import is_in_torch_dispatch_mode
from grapnet.core._transition import Topology

from . import _native
from ._plan import needs_plain_operations

# four tensors: ptr and child of a topology, and its relations by child, in_ptr and entries
Wiring = Sequence[Tensor]

# messages (batch × relations) that plain operations make at once
_CELLS = 1 << 20
# samples up to which a gradient costs less than to move its values into another order
_FEW = 16
_PLAIN = {Tensor, torch.nn.Parameter}

_ops = torch.ops.grapnet


def relation_sum(
    x: Tensor, values: Tensor, bias: Tensor, wiring: Wiring, row_major: bool
) -> Tensor:
    """Returns z[b, j] = bias[j] + Σ_i x[b, i] · w_ij, [batch, n_children], row by row or feature by
    feature.
    """
    return run(_ops.relation_sum.default, _RelationSum, x, values, bias, row_major, *wiring)


class Orders(NamedTuple):
    """Relations in two orders: by parent, the children of each in order, and by child, as the rows
    of the weight of an `nn.Linear` have them.
    """

    ptr: Tensor
    child: Tensor
    in_ptr: Tensor
    entries: Tensor
    parent: Tensor  # of each relation by child, [n_relations] int32
    back: Tensor  # the entries of the opposite wiring, from the children to their parents
    by_parent: Tensor  # where each relation by parent is in the order by child, [n_relations] int32
    by_child: Tensor  # where each relation by child is in the order by parent, [n_relations] int32

    @classmethod
    def of(cls, wiring: Wiring, opposite: Wiring) -> "Orders":
        """Returns the orders of a wiring and of the same relations as if they led from the children
        to their parents.
        """
        ptr, child, in_ptr, entries = wiring
        _, parent, _, back = opposite
        by_parent = _places(in_ptr, back)
        by_child = _places(ptr, entries)
        return cls(ptr, child, in_ptr, entries, parent, back, by_parent, by_child)


def _places(ptr: Tensor, entries: Tensor) -> Tensor:
    """Returns where each relation by child is in the order by parent, [n_relations] int32."""
    # An entry has a parent in its upper half, without a sign, and a slot in the lower.
    bits = 4 * entries.element_size()
    entries = entries.long()
    parent = (entries >> bits) & ((1 << bits) - 1)
    slot = entries & ((1 << bits) - 1)
    return ptr[parent] + slot.int()


def sum_by_child(
    x: Tensor, values: Tensor, bias: Tensor, orders: Orders, row_major: bool
) -> Tensor:
    """Returns what `relation_sum` does for values in the order of their children.

    Args:
        x: the activations, [batch, n_parents].
        values: one per relation.
        bias: one per child.
        orders: the relations.
        row_major: whether the result is laid out row by row.
    """
    return run(_ops.sum_by_child.default, _SumByChild, x, values, bias, row_major, *orders)


def relation_gradients(
    x: Tensor, dz: Tensor, values: Tensor, wiring: Wiring
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `relation_sum` for x, in the layout of x, for the values and for the
    bias.
    """
    return run(_ops.relation_gradients.default, _RelationGradients, x, dz, values, *wiring)


def input_gradient(dz: Tensor, values: Tensor, wiring: Wiring, row_major: bool) -> Tensor:
    """Returns the gradient of `relation_sum` for x alone."""
    return run(_ops.input_gradient.default, _InputGradient, dz, values, row_major, *wiring)


def weight_gradient(x: Tensor, dz: Tensor, wiring: Wiring) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `relation_sum` for the values and for the bias alone."""
    return run(_ops.weight_gradient.default, _WeightGradient, x, dz, *wiring)


def fill(values: Tensor, ptr: Tensor, child: Tensor, n_children: int, transposed: bool) -> Tensor:
    """Returns the values as a rectangle, [n_parents, n_children] or transposed, 0 where there is no
    relation; those of several numbers, [n_relations, width], as [n_parents, n_children, width].
    """
    return run(_ops.fill.default, _Fill, values, ptr, child, n_children, transposed)


def pick(rectangle: Tensor, ptr: Tensor, child: Tensor, transposed: bool) -> Tensor:
    """Returns the values of the relations from a rectangle, [n_parents, n_children] or
    transposed.
    """
    return run(_ops.pick.default, _Pick, rectangle, ptr, child, transposed)


def run(operator: Any, function: Any, *inputs: Any) -> Any:
    """Runs an operator the cheapest way: by the dispatcher only where a trace needs it."""
    tensors = [given for given in inputs if isinstance(given, Tensor)]
    # the wiring, which comes last, is never batched
    if needs_plain_operations(*tensors[:3]):
        return function.plain(*inputs)
    if is_watched(*tensors):
        return operator(*inputs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return function.apply(*inputs)
    return function.forward(*inputs)


def is_watched(*tensors: Tensor) -> bool:
    """Returns whether a trace, a dispatch mode or a subclass of Tensor intercepts the
    operators.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return True
    return not _PLAIN.issuperset(map(type, tensors))


def _pieces(batch: int, ptr: Tensor, child: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields the relations in pieces: where they are, their parents and their children."""
    parents = Topology(ptr, child, 0).parents()
    size = max(1, _CELLS // max(1, batch))
    for start in range(0, len(child), size):
        here = slice(start, start + size)
        yield here, parents[here], child[here]


def plain_sum(x: Tensor, values: Tensor, bias: Tensor, ptr: Tensor, child: Tensor) -> Tensor:
    """Returns the sums of the children, [batch, n_children], by operations of torch."""
    given = x.to(_native.sums_dtype(x.dtype))
    values = values.to(given.dtype)
    z = bias.to(given.dtype).expand(len(x), -1)
    for here, parents, children in _pieces(len(x), ptr, child):
        z = z.index_add(1, children, given.index_select(1, parents) * values[here])
    return z.to(x.dtype)


def plain_sum_to_parents(dz: Tensor, values: Tensor, ptr: Tensor, child: Tensor) -> Tensor:
    """Returns the sums of the parents, [batch, n_parents], by operations of torch."""
    given = dz.to(_native.sums_dtype(dz.dtype))
    values = values.to(given.dtype)
    dx = given.new_zeros(len(dz), len(ptr) - 1)
    for here, parents, children in _pieces(len(dz), ptr, child):
        dx = dx.index_add(1, parents, given.index_select(1, children) * values[here])
    return dx.to(dz.dtype)


def plain_dots(x: Tensor, dz: Tensor, ptr: Tensor, child: Tensor) -> Tensor:
    """Returns Σ_b x[b, i] · dz[b, j] for every relation, in the dtype of the sums, by operations of
    torch.
    """
    x = x.to(_native.sums_dtype(x.dtype))
    dz = dz.to(x.dtype)
    parts = [dz.new_zeros(0)]
    for _, parents, children in _pieces(len(x), ptr, child):
        parts.append((x.index_select(1, parents) * dz.index_select(1, children)).sum(0))
    return torch.cat(parts)


def _gradients(
    x: Tensor, dz: Tensor, values: Tensor, wiring: Wiring, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of `relation_sum` that are needed, by as few kernels as possible."""
    needs_x, needs_values, needs_bias = needed[:3]
    dx = dw = dbias = None
    if needs_x and needs_values:
        dx, dw, dbias = relation_gradients(x, dz, values, wiring)
    elif needs_values:
        dw, dbias = weight_gradient(x, dz, wiring)
    elif needs_x:
        dx = input_gradient(dz, values, wiring, row_major=not _native.is_by_feature(x))
    if needs_bias and dbias is None:
        dbias = _sum_over_batch(dz)
    return dx, dw, dbias


def _sum_over_batch(dz: Tensor) -> Tensor:
    """Returns the gradient of a bias, in the dtype of the sums."""
    return dz.sum(0, dtype=_native.sums_dtype(dz.dtype))


def _as(dtype: torch.dtype, gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to(dtype)


def _cells(ptr: Tensor, child: Tensor, n_children: int) -> Tensor:
    """Returns where each relation is in a rectangle of one row per parent, [n_relations] int32."""
    return Topology(ptr, child, n_children).parents() * n_children + child


class _RelationSum(Function):
    @staticmethod
    def forward(x: Tensor, values: Tensor, bias: Tensor, row_major: bool, *wiring: Any) -> Tensor:
        _native.require_readable(*wiring)
        return _native.sum_over_own_wiring(x, values, bias, wiring, row_major)

    @staticmethod
    def plain(x: Tensor, values: Tensor, bias: Tensor, row_major: bool, *wiring: Tensor) -> Tensor:
        return plain_sum(x, values, bias, *wiring[:2])

    @staticmethod
    def shape(x: Tensor, values: Tensor, bias: Tensor, row_major: bool, *wiring: Tensor) -> Tensor:
        return _native.empty_activations(x, x.shape[0], bias.shape[0], row_major)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, values, bias, _, *wiring = inputs
        ctx.bias_dtype = bias.dtype
        ctx.save_for_backward(x, values, *wiring)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dz,) = grads
        x, values, *wiring = ctx.saved_tensors
        dx, dw, dbias = _gradients(x, dz, values, wiring, ctx.needs_input_grad)
        return dx, _as(values.dtype, dw), _as(ctx.bias_dtype, dbias), *[None] * 5


class _SumByChild(_RelationSum):
    @staticmethod
    def forward(x: Tensor, values: Tensor, bias: Tensor, row_major: bool, *orders: Any) -> Tensor:
        ptr, _, in_ptr, _, parent, *_ = orders
        if x.shape[0] > _FEW:
            _native.require_readable(*orders[:4])
            return _native.sum_over_own_wiring(x, values, bias, orders[:4], row_major, True)
        return _native.sum_by_child(x, values, bias, ptr, in_ptr, parent, row_major)

    @staticmethod
    def plain(x: Tensor, values: Tensor, bias: Tensor, row_major: bool, *orders: Tensor) -> Tensor:
        *wiring, _, _, by_parent, _ = orders
        values = values.index_select(0, by_parent)
        return _RelationSum.plain(x, values, bias, row_major, *wiring)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dz,) = grads
        x, values, *wiring, parent, back, by_parent, by_child = ctx.saved_tensors
        ptr, _, in_ptr, _ = wiring
        needs_x, needs_values, needs_bias = ctx.needs_input_grad[:3]
        if x.shape[0] <= _FEW:
            dx = dw = dbias = None
            # Another order of the values would take longer than the gradients.
            opposite = (in_ptr, parent, ptr, back)
            if needs_x:
                zeros = x.new_zeros(x.shape[1])
                dx = relation_sum(dz, values, zeros, opposite, not _native.is_by_feature(x))
            if needs_values:
                dw, _ = weight_gradient(dz, x, opposite)
            if needs_bias:
                dbias = _sum_over_batch(dz)
            return dx, _as(values.dtype, dw), _as(ctx.bias_dtype, dbias), *[None] * 9
        if needs_x:
            values = values.index_select(0, by_parent)
        dx, dw, dbias = _gradients(x, dz, values, wiring, ctx.needs_input_grad)
        if dw is not None:
            dw = dw.index_select(0, by_child)
        return dx, _as(values.dtype, dw), _as(ctx.bias_dtype, dbias), *[None] * 9


class _RelationGradients(Function):
    @staticmethod
    def forward(
        x: Tensor, dz: Tensor, values: Tensor, *wiring: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ptr, child, in_ptr, _ = wiring
        return _native.gradients(x, dz, values, ptr, child, in_ptr, not _native.is_by_feature(x))

    @staticmethod
    def plain(
        x: Tensor, dz: Tensor, values: Tensor, *wiring: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx = _InputGradient.plain(dz, values, True, *wiring)
        return dx, *_WeightGradient.plain(x, dz, *wiring)

    @staticmethod
    def shape(
        x: Tensor, dz: Tensor, values: Tensor, *wiring: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx = _InputGradient.shape(dz, values, not _native.is_by_feature(x), *wiring)
        return dx, *_WeightGradient.shape(x, dz, *wiring)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, dz, values, *wiring = ctx.saved_tensors
        on_dx, on_dw, on_dbias = grads
        row_major = not _native.is_by_feature(dz)
        on_x = input_gradient(dz, on_dw, wiring, row_major=not _native.is_by_feature(x))
        on_dz = relation_sum(on_dx, values, on_dbias, wiring, row_major)
        on_dz = on_dz + relation_sum(x, on_dw, torch.zeros_like(on_dbias), wiring, row_major)
        on_values, _ = weight_gradient(on_dx, dz, wiring)
        return on_x, on_dz, _as(values.dtype, on_values), None, None, None, None


class _InputGradient(Function):
    @staticmethod
    def forward(dz: Tensor, values: Tensor, row_major: bool, *wiring: Tensor) -> Tensor:
        ptr, child, in_ptr, _ = wiring
        return _native.gradients(None, dz, values, ptr, child, in_ptr, row_major)[0]

    @staticmethod
    def plain(dz: Tensor, values: Tensor, row_major: bool, *wiring: Tensor) -> Tensor:
        return plain_sum_to_parents(dz, values, *wiring[:2])

    @staticmethod
    def shape(dz: Tensor, values: Tensor, row_major: bool, *wiring: Tensor) -> Tensor:
        n_parents = wiring[0].shape[0] - 1
        return _native.empty_activations(dz, dz.shape[0], n_parents, row_major)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        dz, values, _, *wiring = inputs
        ctx.save_for_backward(dz, values, *wiring)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (on_dx,) = grads
        dz, values, *wiring = ctx.saved_tensors
        zeros = dz.new_zeros(dz.shape[1])
        row_major = not _native.is_by_feature(dz)
        on_dz = relation_sum(on_dx, values, zeros, wiring, row_major)
        on_values, _ = weight_gradient(on_dx, dz, wiring)
        return on_dz, _as(values.dtype, on_values), None, None, None, None, None


class _WeightGradient(Function):
    @staticmethod
    def forward(x: Tensor, dz: Tensor, *wiring: Tensor) -> tuple[Tensor, Tensor]:
        ptr, child, in_ptr, _ = wiring
        return _native.gradients(x, dz, None, ptr, child, in_ptr, True)[1:]

    @staticmethod
    def plain(x: Tensor, dz: Tensor, *wiring: Tensor) -> tuple[Tensor, Tensor]:
        return plain_dots(x, dz, *wiring[:2]), _sum_over_batch(dz)

    @staticmethod
    def shape(x: Tensor, dz: Tensor, *wiring: Tensor) -> tuple[Tensor, Tensor]:
        n_relations = wiring[1].shape[0]
        dtype = _native.sums_dtype(dz.dtype)
        return dz.new_empty(n_relations, dtype=dtype), dz.new_empty(dz.shape[1], dtype=dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        on_dw, on_dbias = grads
        x, dz, *wiring = ctx.saved_tensors
        on_x = input_gradient(dz, on_dw, wiring, row_major=not _native.is_by_feature(x))
        on_dz = relation_sum(x, on_dw, on_dbias, wiring, row_major=not _native.is_by_feature(dz))
        return on_x, on_dz, None, None, None, None


class _Fill(Function):
    forward = staticmethod(_native.fill)

    @staticmethod
    def plain(
        values: Tensor, ptr: Tensor, child: Tensor, n_children: int, transposed: bool
    ) -> Tensor:
        n_parents = len(ptr) - 1
        cells = _cells(ptr, child, n_children)
        zeros = values.new_zeros(n_parents * n_children, *values.shape[1:])
        rectangle = zeros.index_add(0, cells, values)
        rectangle = rectangle.view(n_parents, n_children, *values.shape[1:])
        return rectangle.t() if transposed else rectangle

    @staticmethod
    def shape(
        values: Tensor, ptr: Tensor, child: Tensor, n_children: int, transposed: bool
    ) -> Tensor:
        shape = _native.rectangle_shape(ptr, n_children, transposed)
        return values.new_empty(*shape, *values.shape[1:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ptr, child, _, ctx.transposed = inputs
        ctx.save_for_backward(ptr, child)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return pick(grads[0], *ctx.saved_tensors, transposed=ctx.transposed), None, None, None, None


class _Pick(Function):
    forward = staticmethod(_native.pick)

    @staticmethod
    def plain(rectangle: Tensor, ptr: Tensor, child: Tensor, transposed: bool) -> Tensor:
        by_parent = rectangle.t() if transposed else rectangle
        cells = _cells(ptr, child, by_parent.shape[1])
        cells_of = by_parent.reshape(-1, *by_parent.shape[2:])
        return cells_of.index_select(0, cells)

    @staticmethod
    def shape(rectangle: Tensor, ptr: Tensor, child: Tensor, transposed: bool) -> Tensor:
        return rectangle.new_empty(child.shape[0], *rectangle.shape[2:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        rectangle, ptr, child, ctx.transposed = inputs
        ctx.n_children = rectangle.shape[0 if ctx.transposed else 1]
        ctx.save_for_backward(ptr, child)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ptr, child = ctx.saved_tensors
        return fill(grads[0], ptr, child, ctx.n_children, ctx.transposed), None, None, None


_library = torch.library.Library("grapnet", "DEF")


def register(function: Any, name: str, given: str, returned: str, *, device: str = "CPU") -> None:
    """Makes an operator of torch from a Function, whose kernel is for one kind of device."""
    _library.define(f"{name}({given}) -> {returned}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function.forward, device)
    torch.library.register_fake(f"grapnet::{name}", function.shape, lib=_library)
    torch.library.register_autograd(
        f"grapnet::{name}", function.backward, setup_context=function.setup_context, lib=_library
    )


_WIRING = "Tensor ptr, Tensor child, Tensor in_ptr, Tensor entries"

register(
    _RelationSum,
    "relation_sum",
    f"Tensor x, Tensor values, Tensor bias, bool row_major, {_WIRING}",
    "Tensor",
)
register(
    _SumByChild,
    "sum_by_child",
    f"Tensor x, Tensor values, Tensor bias, bool row_major, {_WIRING}, Tensor parent, Tensor back,"
    " Tensor by_parent, Tensor by_child",
    "Tensor",
)
register(
    _RelationGradients,
    "relation_gradients",
    f"Tensor x, Tensor dz, Tensor values, {_WIRING}",
    "(Tensor, Tensor, Tensor)",
)
register(
    _InputGradient,
    "input_gradient",
    f"Tensor dz, Tensor values, bool row_major, {_WIRING}",
    "Tensor",
)
register(_WeightGradient, "weight_gradient", f"Tensor x, Tensor dz, {_WIRING}", "(Tensor, Tensor)")
register(
    _Fill,
    "fill",
    "Tensor values, Tensor ptr, Tensor child, SymInt n_children, bool transposed",
    "Tensor",
)
register(_Pick, "pick", "Tensor rectangle, Tensor ptr, Tensor child, bool transposed", "Tensor")
