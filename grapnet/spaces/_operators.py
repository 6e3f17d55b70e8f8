"""The rules of torch's own operators: how each relates the axes of its tensors.

Every rule takes `(typing, func, args, kwargs, out)` and returns the axes of each result, as
`register_rule` explains. Operators with torch's tag `pointwise` need none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._axes import (
    EMPTY,
    UNIT,
    Axis,
    Leaf,
    Stuck,
    cut,
    factored,
    find,
    mark,
    pin,
    product_of,
    slice_of,
    sum_of,
)
from ._typing import (
    CONTRACTED,
    EQUAL_PARTS,
    EXTREME,
    NORMALISED,
    POSITIONS,
    SCALED,
    SOFTMAX,
    SUMMED,
    Operator,
    Rule,
    Typing,
    broadcast,
    elementwise,
    model_line,
    pinned,
    register_rule,
    tensors_in,
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Axes = list[list[Axis]]


def rule(names: str, *, view: bool = False) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of operators of torch.

    Args:
        names: Their names, with spaces between them.
        view: Whether they look at no number, but return some of them in another layout.
    """

    def register(function: Rule) -> Rule:
        for name in names.split():
            register_rule(f"aten::{name}", function, view=view)
        return function

    return register


def name_of(func: Operator) -> str:
    """Returns the name of an operator without its namespace and the underscore of in place."""
    return func._schema.name.removeprefix("aten::").rstrip("_")


def argument(args: Args, kwargs: Kwargs, index: int, name: str, default: Any = None) -> Any:
    """Returns an argument by its place or its name; trailing defaults are not passed on."""
    if len(args) > index:
        return args[index]
    return kwargs.get(name, default)


def unused(tensors: Iterable[Tensor]) -> Axes:
    """Returns axes for results that only a backward pass reads."""
    return [pinned(tensor.shape, "saved for the backward pass") for tensor in tensors]


# Operators that compute element by element and have no tag for it.
rule("""
    bernoulli cauchy celu complex _conj_physical copy dropout elu empty_like exponential fill
    full_like _fused_dropout geometric hardshrink hardsigmoid hardswish hardtanh leaky_relu
    log_normal log_sigmoid_forward masked_fill mish native_dropout _neg_view normal ones_like polar
    _prelu_kernel rand_like randint_like randn_like random resolve_conj resolve_neg
    rrelu_with_noise selu softplus softshrink uniform where zero zeros_like
""")(elementwise)


@rule(
    "alias clone _conj contiguous detach lift lift_fresh lift_fresh_copy _to_copy",
    view=True,
)
def copied(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    typing.comes_from(out, args[0], [(dim,) for dim in range(out.dim())])
    return [typing.of(args[0])]


@rule("""
    empty zeros ones full scalar_tensor rand randn randint new_zeros new_ones new_empty new_full
    empty_strided new_empty_strided empty_permuted
""")
def uniform(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """Made of nothing: all indices are alike, so the size may change with what it meets."""
    axes: list[Axis] = []
    for size in out.shape:
        axis = EMPTY
        if size:
            axis = Leaf(size)
        axes.append(axis)
    return [axes]


@rule("""
    arange linspace logspace eye randperm tril_indices triu_indices hann_window hamming_window
""")
def numbered(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """Made of nothing, and the value depends on the index: removing one would renumber others."""
    return [pinned(out.shape, f"numbered by {name_of(func)}")]


# Rearrangements move whole dimensions. Each takes the arguments, a list with one item for each
# dimension of the input, and the item of an inserted dimension; it returns those of the output.
# Items are axes, or the numbers of dimensions.
Items = list[Any]


def _transposed(args: Args, items: Items, new: Any) -> Items:
    moved = list(items)
    if len(items) > 1:
        first, second = args[1:3]
        moved[first], moved[second] = moved[second], moved[first]
    return moved


def _unsqueezed(args: Args, items: Items, new: Any) -> Items:
    at = args[1] % (len(items) + 1)
    return [*items[:at], new, *items[at:]]


def _without(args: Args, items: Items, new: Any) -> Items:
    dim = 0
    if len(args) > 1:
        dim = args[1] % len(items)
    return [*items[:dim], *items[dim + 1 :]]


_REARRANGEMENTS: dict[str, Callable[[Args, Items, Any], Items]] = {
    "t": lambda args, items, new: items[::-1],
    "numpy_T": lambda args, items, new: items[::-1],
    "transpose": _transposed,
    "swapaxes": _transposed,
    "swapdims": _transposed,
    "permute": lambda args, items, new: [items[dim] for dim in args[1]],
    "unsqueeze": _unsqueezed,
    "select": _without,
    "unbind": _without,
}


@rule(" ".join((*_REARRANGEMENTS, *(f"{name}_copy" for name in _REARRANGEMENTS))), view=True)
def rearranged(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    name = name_of(func).removesuffix("_copy")
    move = _REARRANGEMENTS[name]
    axes = typing.of(args[0])
    if name in ("select", "unbind"):
        dim = argument(args, kwargs, 1, "dim", 0)
        pin(axes[dim], "its indices are taken by number")
    dims = move(args, [(dim,) for dim in range(len(axes))], ())
    results = tensors_in(out)
    for result in results:
        typing.comes_from(result, args[0], dims)
    return [move(args, axes, UNIT) for _ in results]


@rule("squeeze squeeze_copy", view=True)
def squeeze(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    axes = typing.of(args[0])
    chosen = _dims(argument(args, kwargs, 1, "dim"), len(axes))
    kept = [dim for dim, axis in enumerate(axes) if dim not in chosen or axis.size != 1]
    typing.comes_from(out, args[0], [(dim,) for dim in kept])
    return [[axes[dim] for dim in kept]]


@rule("view _unsafe_view reshape _reshape_alias _reshape_copy view_copy", view=True)
def view(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """Takes factors from the left until each dimension of the result is full."""
    axes = typing.of(args[0])
    shape = tuple(out.shape)
    if shape == tuple(axis.size for axis in axes):
        typing.comes_from(out, args[0], [(dim,) for dim in range(len(axes))])
        return [axes]
    if 0 in shape or func._overloadname == "dtype":
        raise Stuck(f"{list(args[0].shape)} viewed as {list(shape)}")
    # (axis, its dimension in the input), the next one last
    waiting = [(axis, dim) for dim, axis in enumerate(axes) if axis.size != 1][::-1]
    result: list[Axis] = []
    sources: list[list[int]] = []
    for size in shape:
        taken: list[Axis] = []
        dims: list[int] = []
        missing = size
        while missing > 1:
            axis, dim = waiting.pop()
            dims.append(dim)
            if axis.size > missing:
                axis, rest = factored(axis, missing)
                waiting.append((rest, dim))
            elif missing % axis.size:
                raise Stuck(f"{list(args[0].shape)} viewed as {list(shape)}")
            taken.append(axis)
            missing //= axis.size
        result.append(product_of(taken))
        sources.append(dims)
    typing.comes_from(out, args[0], sources)
    return [[find(axis) for axis in result]]


@rule("expand expand_copy", view=True)
def expand(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    axes = typing.of(args[0])
    added = out.dim() - len(axes)
    dims = [()] * added + [(dim,) for dim in range(len(axes))]
    typing.comes_from(out, args[0], dims)
    result: list[Axis] = [Leaf(size) for size in out.shape[:added]]
    for axis, size in zip(axes, out.shape[added:], strict=True):
        if axis.size != size:
            axis = Leaf(size)
        result.append(axis)
    return [result]


@rule("repeat")
def repeat(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    axes = typing.of(args[0])
    axes = [UNIT] * (out.dim() - len(axes)) + axes
    result: list[Axis] = []
    for axis, size in zip(axes, out.shape, strict=True):
        if axis.size == 0:
            axis = Leaf(0)
        elif axis.size != size:
            axis = product_of((Leaf(size // axis.size), axis))
        result.append(axis)
    return [result]


@rule("repeat_interleave")
def repeat_interleave(
    typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor
) -> Axes:
    if func._overloadname != "self_int":
        raise Stuck("repeated by a tensor")
    axes = typing.of(args[0])
    dim = argument(args, kwargs, 2, "dim")
    if dim is None:
        return [[product_of((*axes, Leaf(args[1])))]]
    axes[dim] = product_of((axes[dim], Leaf(args[1])))
    return [axes]


@rule("cat concatenate")
def cat(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    dim = argument(args, kwargs, 1, "dim", 0) % out.dim()
    # Empty tensors of one dimension may be joined to anything.
    rows = [typing.of(tensor) for tensor in args[0] if tensor.dim() == out.dim()]
    for other in rows[1:]:
        for at in range(out.dim()):
            if at != dim:
                typing.same(rows[0][at], other[at])
    axes = [find(axis) for axis in rows[0]]
    axes[dim] = sum_of(row[dim] for row in rows)
    return [axes]


@rule("stack")
def stack(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    dim = argument(args, kwargs, 1, "dim", 0) % out.dim()
    rows = [typing.of(tensor) for tensor in args[0]]
    for other in rows[1:]:
        for a, b in zip(rows[0], other, strict=True):
            typing.same(a, b)
    axes = [find(axis) for axis in rows[0]]
    axes[dim:dim] = pinned([len(rows)], "tensors stacked by number")
    return [axes]


def _parts(axes: list[Axis], dim: int, sizes: Iterable[int]) -> Axes:
    """Returns the axes of consecutive ranges along a dimension."""
    rows: Axes = []
    rest = axes[dim]
    for size in sizes:
        part, rest = cut(rest, size)
        rows.append([*axes[:dim], part, *axes[dim + 1 :]])
    return [[find(axis) for axis in row] for row in rows]


@rule(
    """
    split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk split_copy
    split_with_sizes_copy
""",
    view=True,
)
def split(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    axes = typing.of(args[0])
    dim = argument(args, kwargs, 2, "dim", 0) % len(axes)
    for part in out:
        typing.comes_from(part, args[0], [(at,) for at in range(len(axes))])
    rows = _parts(axes, dim, [part.shape[dim] for part in out])
    if "with_sizes" not in name_of(func):
        mark(axes[dim], EQUAL_PARTS)
    return rows


@rule("slice slice_copy narrow", view=True)
def slice_(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    axes = typing.of(args[0])
    dim = argument(args, kwargs, 1, "dim", 0) % len(axes)
    size = axes[dim].size
    typing.comes_from(out, args[0], [(at,) for at in range(len(axes))])
    if out.shape[dim] == size:
        return [axes]
    start = argument(args, kwargs, 2, "start", 0) or 0
    step = argument(args, kwargs, 4, "step", 1)
    if start < 0:
        start += size
    start = min(max(start, 0), size)
    if step == 1:
        axes[dim] = slice_of(axes[dim], start, start + out.shape[dim])
        return [axes]
    if size % step or start >= step or out.shape[dim] != size // step:
        raise Stuck(f"every {step}th index of {size} from {start} to some end")
    axes[dim], inner = factored(axes[dim], size // step)
    pin(inner, f"every {step}th index is taken")
    return [axes]


def contract(
    typing: Typing,
    left: Tensor,
    left_dims: tuple[int, int | None],
    right: Tensor,
    right_dims: tuple[int, int | None],
) -> None:
    """Unifies the axes over which two tensors are multiplied and summed.

    Args:
        typing: The typing.
        left: A tensor.
        left_dims: Its dimension that is summed over, and that of what it makes; a vector makes
            nothing.
        right: The other tensor.
        right_dims: The same for that one.
    """
    axis = typing.of(left)[left_dims[0]]
    typing.same(axis, typing.of(right)[right_dims[0]])
    by_parameter = False
    for tensor, (inward, outward) in ((left, left_dims), (right, right_dims)):
        if typing.reads(tensor, inward):
            by_parameter = True
            if outward is not None:
                typing.writes(tensor, outward)
    if not by_parameter:
        mark(axis, CONTRACTED)


@rule("""
    mm bmm matmul addmm baddbmm addbmm _addmm_activation linear mv addmv dot vdot
""")
def matrix_product(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """[batch, n, k] times [batch, k, m]; the weight of `linear` is [m, k], and a vector is [k].

    The first argument of those with "add", and the third of `linear`, is added.
    """
    name = name_of(func)
    added: Sequence[Any] = args[2:3]
    left, right = args[:2]
    if "add" in name:
        added = args[:1]
        left, right = args[1:3]
    left_dims = (-1, None if left.dim() == 1 else -2)
    right_dims = (-2, -1)
    if right.dim() == 1:
        right_dims = (-1, None)
    elif name == "linear":
        right_dims = (-1, -2)
    contract(typing, left, left_dims, right, right_dims)
    axes = typing.of(left)[:-1]
    columns = typing.of(right)
    if right.dim() > 2:
        for a, b in zip(axes[:-1], columns[:-2], strict=True):
            typing.same(a, b)
    if right_dims[1] is not None:
        axes.append(columns[right_dims[1]])
    if name == "addbmm":
        mark(axes.pop(0), SUMMED)
    rows = [typing.of(tensor) for tensor in tensors_in(added)]
    return [broadcast(typing, [axes, *rows], out.shape)]


@rule("_grouped_mm")
def grouped_product(
    typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor
) -> Axes:
    """[rows, k] times [experts, k, m], where runs of rows belong to one expert each."""
    if args[0].dim() != 2 or args[1].dim() != 3:
        raise Stuck("groups of columns")
    pin(typing.of(args[1])[0], "chosen by number")
    contract(typing, args[0], (-1, -2), args[1], (-2, -1))
    return [[typing.of(args[0])[0], typing.of(args[1])[2]]]


@rule("""
    convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution
""")
def convolution(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """[batch, channels, *positions]; the weight is [out, in / groups, *kernel].

    Of a transposed convolution it is [in, out / groups, *kernel].
    """
    if len(args) < 9:
        raise Stuck("a convolution with other arguments")
    weight = args[1]
    bias = args[2]
    transposed = args[6]
    x = typing.of(args[0])
    w = typing.of(weight)
    for axis in (*x[2:], *w[2:]):
        pin(axis, POSITIONS)
    # The first dimension of the weight is groups·channels; the second holds one group's. Groups
    # pass through: what is contracted and what is made lies inside of one.
    group, inside = factored(w[0], args[8])
    if args[8] > 1:
        typing.in_groups(weight)
    whole = product_of((group, w[1]))
    if transposed:
        typing.same(x[1], w[0])
        contracted = inside
        made = whole
        by_parameter = typing.reads(weight, 0, inside)
        typing.writes(weight, 1, w[1])
    else:
        typing.same(x[1], whole)
        contracted = w[1]
        made = w[0]
        by_parameter = typing.reads(weight, 1, w[1])
        typing.writes(weight, 0, inside)
    if not by_parameter:
        mark(contracted, CONTRACTED)
    if bias is not None:
        typing.same(typing.of(bias)[0], find(made))
    return [[x[0], find(made), *pinned(out.shape[2:], POSITIONS)]]


def carry_riders(typing: Typing, axes: Sequence[Axis], riders: Iterable[Any]) -> None:
    """Unifies axes with those of the weights and statistics of a norm, where it has them."""
    for rider in riders:
        if isinstance(rider, Tensor):
            for a, b in zip(axes, typing.of(rider), strict=True):
                typing.same(a, b)


@rule("""
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    _native_batch_norm_legit_functional cudnn_batch_norm miopen_batch_norm _batch_norm_with_update
    _batch_norm_no_update _batch_norm_with_update_functional
""")
def batch_norm(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    x = typing.of(args[0])
    carry_riders(typing, x[1:2], args[1:5])
    rows: Axes = [x]
    for result in tensors_in(out)[1:]:
        if tuple(result.shape) == (x[1].size,):
            rows.append([x[1]])
        else:
            rows.extend(unused([result]))
    return rows


@rule("native_layer_norm layer_norm _fused_rms_norm rms_norm")
def layer_norm(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    x = typing.of(args[0])
    normalised = x[len(x) - len(args[1]) :]
    carry_riders(typing, normalised, args[2:4])
    for axis in normalised:
        mark(axis, NORMALISED)
    return [x, *unused(tensors_in(out)[1:])]


@rule("native_group_norm group_norm")
def group_norm(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    """A whole group can be taken away exactly; the channels of a group are normalised over."""
    x = typing.of(args[0])
    if name_of(func) == "native_group_norm":
        riders = args[1:3]
        groups = args[6]
    else:
        riders = args[2:4]
        groups = args[1]
    carry_riders(typing, x[1:2], riders)
    _, inside = factored(x[1], groups)
    mark(inside, NORMALISED)
    return [x, *unused(tensors_in(out)[1:])]


@rule("embedding _embedding_bag _embedding_bag_forward_only")
def embedding(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    rows, columns = typing.of(args[0])
    pin(rows, "looked up by number")
    typing.reads(args[0], 0)
    typing.writes(args[0], 1)
    first, *others = tensors_in(out)
    places = typing.of(args[1])
    if "bag" in name_of(func):
        places = pinned(first.shape[:1], POSITIONS)
    return [[*places, columns], *unused(others)]


@rule("""
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
    _scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention
""")
def attention(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    """Queries [..., heads, n, d], keys [..., heads, m, d], values [..., heads, m, e]."""
    q, k, v = (typing.of(tensor) for tensor in args[:3])
    for a, b in zip(k[:-1], v[:-1], strict=True):
        typing.same(a, b)
    typing.same(q[-1], k[-1])
    for at in range(len(q) - 2):
        if q[at].size == k[at].size:
            typing.same(q[at], k[at])
        else:
            # Grouped queries: each head of the keys serves several neighbours of the queries.
            group, _ = factored(q[at], k[at].size)
            typing.same(group, k[at])
    for axis in (q[-1], k[-2]):
        mark(axis, CONTRACTED)
    mark(k[-2], SOFTMAX)
    if kwargs.get("scale") is None:
        mark(q[-1], SCALED)
    causal = kwargs.get("is_causal", False) or any(value is True for value in args[3:])
    if causal:
        pin(q[-2], POSITIONS)
        pin(k[-2], POSITIONS)
    scores = [*q[:-1], k[-2]]
    # The only other tensor is a mask or a bias, which may have heads of its own.
    for added in (*tensors_in(args[3:]), *tensors_in(kwargs)):
        broadcast(typing, [scores, typing.of(added)], [axis.size for axis in scores])
    return [[find(axis) for axis in (*q[:-1], v[-1])], *unused(tensors_in(out)[1:])]


def _dims(given: Any, rank: int) -> list[int]:
    """Returns dimensions as a list, counted from the first; none given are all."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    if not isinstance(given, (list, tuple)) or not given:
        return list(range(rank))
    return [dim % max(rank, 1) for dim in given]


_REDUCTIONS = {
    **dict.fromkeys(("mean", "var", "std", "var_mean", "std_mean", "nanmean"), NORMALISED),
    **dict.fromkeys(("linalg_vector_norm", "norm", "logsumexp"), NORMALISED),
    **dict.fromkeys(("sum", "nansum", "prod", "count_nonzero", "any", "all"), SUMMED),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin", "median"), EXTREME),
    **dict.fromkeys(("nanmedian", "kthvalue", "aminmax"), EXTREME),
}


@rule(" ".join(_REDUCTIONS))
def reduction(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    name = name_of(func)
    x = typing.of(args[0])
    if name in ("max", "min") and func._overloadname in ("other", "out"):
        return elementwise(typing, func, args, kwargs, out)
    index = 1
    if name in ("linalg_vector_norm", "norm", "kthvalue"):
        index = 2
    dims = _dims(argument(args, kwargs, index, "dim"), len(x))
    for dim in dims:
        mark(x[dim], _REDUCTIONS[name])
    rows: Axes = []
    for result in tensors_in(out):
        if result.dim() == len(x):
            rows.append([UNIT if dim in dims else axis for dim, axis in enumerate(x)])
        else:
            rows.append([axis for dim, axis in enumerate(x) if dim not in dims])
        if _REDUCTIONS[name] == EXTREME and not result.is_floating_point():
            for dim in dims:
                typing.holds_indices(result, x[dim])
    return rows


@rule("_softmax softmax _log_softmax log_softmax _safe_softmax")
def softmax(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    x = typing.of(args[0])
    if x:
        mark(x[args[1]], SOFTMAX)
    return [x]


@rule("""
    cumsum cumprod logcumsumexp cummax cummin _cummax_helper sort topk roll flip tril triu _fft_r2c
    _fft_c2r _fft_c2c renorm index_fill
""")
def order_matters(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    """Indices are compared, moved or mixed by their number: the axes concerned are pinned."""
    name = name_of(func)
    x = typing.of(args[0])
    if name in ("tril", "triu"):
        given: Any = [-2, -1]
    elif name in ("topk", "renorm"):
        given = argument(args, kwargs, 2, "dim", -1)
    elif name == "roll":
        given = argument(args, kwargs, 2, "dims")
    elif name == "sort":
        given = kwargs.get("dim", -1)
        for value in args[1:]:
            if type(value) is int:
                given = value
    else:
        given = argument(args, kwargs, 1, "dim")
    dims: list[int] = []
    if x:
        dims = _dims(given, len(x))
    for dim in dims:
        pin(x[dim], f"{name} over it at {model_line()}")
    rows: Axes = []
    for result in tensors_in(out):
        row = list(x)
        for dim in dims:
            if result.shape[dim] != x[dim].size:
                row[dim] = pinned([result.shape[dim]], f"{name} over it")[0]
        rows.append(row)
    return rows


_SPATIAL = re.compile(r"([123])d")


@rule("""
    max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d
    max_pool2d max_pool3d mkldnn_max_pool2d fractional_max_pool2d fractional_max_pool3d max_unpool2d
    max_unpool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d
""")
def over_positions(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    """Works on the last one, two or three dimensions, and on each channel alone."""
    found = _SPATIAL.search(name_of(func))
    assert found is not None
    x = typing.of(args[0])
    first = len(x) - int(found[1])
    for axis in x[first:]:
        pin(axis, POSITIONS)
    rows: Axes = []
    for result in tensors_in(out):
        rows.append([*x[:first], *pinned(result.shape[first:], POSITIONS)])
    return rows


@rule("grid_sampler_2d grid_sampler_3d cudnn_grid_sampler")
def grid_sampler(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    x = typing.of(args[0])
    grid = typing.of(args[1])
    typing.same(x[0], grid[0])
    for axis in (*x[2:], *grid[1:]):
        pin(axis, POSITIONS)
    return [[*x[:2], *pinned(out.shape[2:], POSITIONS)]]


@rule("constant_pad_nd")
def constant_pad(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    x = typing.of(args[0])
    widths = args[1]
    for pair in range(len(widths) // 2):
        dim = len(x) - 1 - pair
        before, after = widths[2 * pair : 2 * pair + 2]
        kept = slice_of(x[dim], max(-before, 0), x[dim].size - max(-after, 0))
        ends = pinned([max(before, 0), max(after, 0)], "padding")
        x[dim] = sum_of((ends[0], kept, ends[1]))
    return [x]


@rule("pixel_unshuffle im2col")
def folded(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """[..., channels, height, width] to [..., channels·cells, *positions]."""
    x = typing.of(args[0])
    at = len(x) - 3
    cells = pinned([out.shape[at] // x[at].size], POSITIONS)
    return [[*x[:at], product_of((x[at], *cells)), *pinned(out.shape[at + 1 :], POSITIONS)]]


@rule("pixel_shuffle col2im")
def unfolded(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """[..., channels·cells, *positions] to [..., channels, height, width]."""
    x = typing.of(args[0])
    at = out.dim() - 3
    channels, cells = factored(x[at], out.shape[at])
    pin(cells, POSITIONS)
    return [[*x[:at], channels, *pinned(out.shape[at + 1 :], POSITIONS)]]


@rule("channel_shuffle native_channel_shuffle")
def channel_shuffle(
    typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor
) -> Axes:
    x = typing.of(args[0])
    group, inside = factored(x[1], args[1])
    x[1] = product_of((inside, group))
    return [x]


@rule("unfold")
def unfold(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    x = typing.of(args[0])
    dim = args[1] % len(x)
    pin(x[dim], "windows over it")
    x[dim], window = pinned([out.shape[dim], out.shape[-1]], "windows over it")
    return [[*x, window]]


@rule("as_strided as_strided_copy")
def as_strided(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    if args[0].shape != out.shape or args[0].stride() != out.stride():
        raise Stuck(f"{list(args[0].shape)} strided as {list(out.shape)}")
    return [typing.of(args[0])]


@rule("view_as_complex")
def view_as_complex(
    typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor
) -> Axes:
    x = typing.of(args[0])
    pin(x[-1], "real and imaginary part")
    return [x[:-1]]


@rule("view_as_real")
def view_as_real(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    return [[*typing.of(args[0]), *pinned([2], "real and imaginary part")]]


@rule("glu")
def glu(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    axes = typing.of(args[0])
    dim = argument(args, kwargs, 1, "dim", -1) % len(axes)
    first, second = _parts(axes, dim, [out.shape[dim]] * 2)
    mark(axes[dim], EQUAL_PARTS)
    typing.same(first[dim], second[dim])
    return [[find(axis) for axis in first]]


def _indexed(typing: Typing, x: list[Axis], indices: Sequence[Tensor | None]) -> list[Axis]:
    """Returns the axes of `x[indices]`: the indexed ones are pinned, the others stay what they are.

    The dimensions of the indices, for which UNIT stands, take the place of the first one, or come
    first when another dimension lies between them. A mask takes as many dimensions as it has, and
    makes one.
    """
    why = f"indexed by a tensor at {model_line()}"
    kept: list[Axis] = []
    # The number of kept dimensions before each index.
    places: list[int] = []
    added = 0
    dim = 0
    for index in indices:
        if index is None:
            kept.append(x[dim])
            dim += 1
            continue
        width = 1
        makes = index.dim()
        if index.dtype in (torch.bool, torch.uint8):
            width = index.dim()
            makes = 1
        for axis in (*x[dim : dim + width], *typing.of(index)):
            pin(axis, why)
        places.append(len(kept))
        added = max(added, makes)
        dim += width
    kept.extend(x[dim:])
    first = 0
    if len(set(places)) == 1:
        first = places[0]
    return [*kept[:first], *[UNIT] * added, *kept[first:]]


@rule("index _unsafe_index index_select")
def index(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    x = typing.of(args[0])
    indices = args[1]
    if name_of(func) == "index_select":
        if not x:
            return [x]
        indices = [*[None] * (args[1] % len(x)), args[2]]
    axes = _indexed(typing, x, indices)
    for at, size in enumerate(out.shape):
        if axes[at] is UNIT or axes[at].size != size:
            axes[at] = pinned([size], f"indexed by a tensor at {model_line()}")[0]
    return [axes]


@rule("index_put _index_put_impl _unsafe_index_put")
def index_put(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """Values are broadcast to what `x[indices]` would be."""
    x = typing.of(args[0])
    values = typing.of(args[2])
    axes = _indexed(typing, x, args[1])
    for back in range(-min(len(axes), len(values)), 0):
        if axes[back] is UNIT:
            pin(values[back], "put by a tensor of indices")
        elif axes[back].size == values[back].size:
            typing.same(axes[back], values[back])
    return [x]


@rule("gather scatter scatter_add scatter_reduce")
def along(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """Takes from, or puts into, one dimension by index; in the others places are the same.

    Where the index is smaller than the tensor, it covers the first places.
    """
    dim = args[1] % max(args[0].dim(), 1)
    why = f"indexed by a tensor at {model_line()}"
    axes = typing.of(args[0])
    at = typing.of(args[2])
    rows = [axes]
    if len(args) > 3 and isinstance(args[3], Tensor) and args[3].dim():
        rows.append(typing.of(args[3]))
    for row in rows:
        for other in range(len(row)):
            if other == dim:
                pin(row[other], why)
                pin(at[other], why)
            else:
                typing.same(slice_of(row[other], 0, at[other].size), at[other])
    if name_of(func) == "gather":
        return [[find(axis) for axis in at]]
    return [[find(axis) for axis in axes]]


@rule("index_add index_copy index_reduce")
def index_add(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """Adds [..., k, ...] to chosen indices of one dimension."""
    axes = typing.of(args[0])
    source = typing.of(args[3])
    why = f"indexed by a tensor at {model_line()}"
    for axis in typing.of(args[2]):
        pin(axis, why)
    for dim, (a, b) in enumerate(zip(axes, source, strict=True)):
        if dim == args[1] % len(axes):
            pin(a, why)
            pin(b, why)
        else:
            typing.same(a, b)
    return [[find(axis) for axis in axes]]


@rule("bucketize isin")
def looked_up(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    """Each element of the first argument is looked for in the second."""
    for axis in typing.of(args[1]):
        pin(axis, "looked through")
    return [typing.of(args[0])]


@rule("nonzero _local_scalar_dense")
def nonzero(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    for axis in typing.of(args[0]):
        pin(axis, f"its indices are values at {model_line()}")
    return [pinned(result.shape, "indices") for result in tensors_in(out)]


@rule("nll_loss_forward nll_loss2d_forward")
def nll_loss(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Any) -> Axes:
    for tensor in tensors_in(args):
        for axis in typing.of(tensor):
            pin(axis, "classes of a loss")
    return [pinned(result.shape, "a loss") for result in tensors_in(out)]


@rule("""
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div soft_margin_loss
""")
def loss(typing: Typing, func: Operator, args: Args, kwargs: Kwargs, out: Tensor) -> Axes:
    rows = [typing.of(tensor) for tensor in tensors_in(args)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors_in(args)))
    axes = broadcast(typing, rows, shape)
    if out.dim() == len(axes):
        return [axes]
    for axis in axes:
        mark(axis, NORMALISED)
    return [[]]
