"""The results of common operators for tensors without contents, from the shapes of their inputs.

torch itself answers for every other operator, and wherever a rule here returns None: for layouts
that are not standard, for mixed types and for shapes that do not fit. It answers for these too, but
takes several times as long, and most operations of a large model are of these few kinds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grapnet._torch import Fakes

Operator = Any
# Gets a function that makes a result, and the arguments of the operator. Returns the results, or
# None where torch is to be asked.
ResultRule = Callable[..., Any]

_aten = torch.ops.aten
_RULES: dict[Operator, ResultRule] = {}
# Operators that return views of their first argument, which torch makes without looking further.
_VIEWS = frozenset(
    (
        _aten.expand.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.dim,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten._unsafe_view.default,
    )
)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _rule(*operators: Operator) -> Callable[[ResultRule], ResultRule]:
    """Registers a function as the rule of operators."""

    def register(function: ResultRule) -> ResultRule:
        for operator in operators:
            _RULES[operator] = function
        return function

    return register


class Results:
    """Makes the results of operators for tensors without contents.

    Args:
        fakes: These tensors.
    """

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes

    def of(
        self, func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Any]
    ) -> Any:
        """Returns what an operator returns; None if that is not known here.

        Args:
            func: The operator.
            args: Its arguments.
            kwargs: Its arguments by name.
            inputs: The tensors among both.
        """
        if func is _aten.empty.memory_format:
            return self._empty(args, kwargs)
        rule = _RULES.get(func)
        if (rule is None and func not in _VIEWS) or kwargs or not inputs:
            return None
        device = getattr(inputs[0], "fake_device", None)
        for tensor in inputs:
            if not self._fakes.has(tensor) or tensor.fake_device != device:
                return None
        if rule is None:
            return self._fakes.views(func, args)
        return rule(self._new, *args)

    def _empty(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns what `torch.empty` returns: every batch norm makes such a tensor."""
        device = kwargs.get("device")
        dtype = kwargs.get("dtype")
        if device is None or device.type == "meta" or dtype is None:
            return None
        if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("memory_format"):
            return None
        return self._fakes.new(device, dtype, args[0])

    def _new(self, like: Any, shape: Sequence[int], stride: Sequence[int] | None = None) -> Tensor:
        """Returns a tensor of the kind of another."""
        return self._fakes.new(like.fake_device, like.dtype, shape, stride)


def _is_standard(tensor: Tensor) -> bool:
    """Returns whether the strides of a tensor are those of a new one."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _is_kept(tensor: Tensor) -> bool:
    """Returns whether an operation by element returns the strides of its input."""
    if _is_standard(tensor):
        return True
    layout = _CHANNELS_LAST.get(tensor.dim())
    # A dimension of size 1 leaves the strides of the others ambiguous.
    return (
        layout is not None and 1 not in tensor.shape and tensor.is_contiguous(memory_format=layout)
    )


@_rule(
    _aten.relu.default,
    _aten.neg.default,
    _aten.tanh.default,
    _aten.sigmoid.default,
    _aten.silu.default,
    _aten.gelu.default,
    _aten.rsqrt.default,
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.mul.Tensor,
    _aten.div.Tensor,
    _aten.pow.Tensor_Scalar,
)
def _by_element(new: Any, x: Any, *others: Any) -> Any:
    """Works on floating tensors of one shape, and on numbers."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or not _is_kept(x):
        return None
    for other in others:
        if isinstance(other, Tensor):
            if other.dtype != x.dtype or other.shape != x.shape or other.stride() != x.stride():
                return None
        elif type(other) not in (int, float):
            return None
    return new(x, x.shape, x.stride())


@_rule(torch.ops.prim.device.default)
def _device(new: Any, x: Any) -> Any:
    return x.fake_device


@_rule(_aten.add_.Tensor)
def _add_in_place(new: Any, x: Tensor, other: Any) -> Any:
    """Counts, as a batch norm does the batches that it has seen."""
    if type(other) is int and x.dtype != torch.bool:
        return x
    return None


@_rule(_aten.cat.default)
def _cat(new: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    rank = first.dim()
    if not -rank <= dim < rank:
        return None
    dim %= rank
    shape = list(first.shape)
    shape[dim] = 0
    for tensor in tensors:
        if tensor.dim() != rank or tensor.dtype != first.dtype or not _is_standard(tensor):
            return None
        if tensor.shape[:dim] != first.shape[:dim]:
            return None
        if tensor.shape[dim + 1 :] != first.shape[dim + 1 :]:
            return None
        shape[dim] += tensor.shape[dim]
    return new(first, shape)


@_rule(_aten.mean.dim)
def _mean(new: Any, x: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Any:
    if not dims or not x.is_floating_point() or not _is_standard(x) or 0 in x.shape:
        return None
    rank = x.dim()
    reduced = {dim % rank for dim in dims if -rank <= dim < rank}
    if len(reduced) != len(dims):
        return None
    shape = []
    for dim, size in enumerate(x.shape):
        if dim not in reduced:
            shape.append(size)
        elif keepdim:
            shape.append(1)
    return new(x, shape)


@_rule(_aten.mm.default)
def _matrix_product(new: Any, left: Tensor, right: Tensor) -> Any:
    """[n, k] times [k, m]."""
    if left.dim() != 2 or right.dim() != 2 or left.dtype != right.dtype:
        return None
    if left.shape[1] != right.shape[0]:
        return None
    return new(left, (left.shape[0], right.shape[1]))


@_rule(_aten.addmm.default)
def _added_product(new: Any, added: Tensor, left: Tensor, right: Tensor) -> Any:
    """The same, and a vector [m] or a matrix is added."""
    if added.dtype != left.dtype or added.dim() > 2:
        return None
    product = _matrix_product(new, left, right)
    if product is None or added.shape != product.shape[2 - added.dim() :]:
        return None
    return product


@_rule(_aten.convolution.default)
def _convolution(
    new: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """[batch, channels, *positions]; the weight is [out, in / groups, *kernel]."""
    spatial = x.dim() - 2
    if transposed or spatial not in (1, 2, 3) or weight.dim() != x.dim():
        return None
    if not x.is_floating_point() or x.dtype != weight.dtype or 0 in x.shape or 0 in weight.shape:
        return None
    if not _is_standard(x) or not _is_standard(weight):
        return None
    channels = weight.shape[0]
    if x.shape[1] != weight.shape[1] * groups or channels % groups:
        return None
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (channels,)):
        return None
    if not len(stride) == len(padding) == len(dilation) == spatial:
        return None
    if min(stride) < 1 or min(padding) < 0 or min(dilation) < 1:
        return None
    shape = [x.shape[0], channels]
    for dim in range(spatial):
        covered = dilation[dim] * (weight.shape[dim + 2] - 1) + 1
        room = x.shape[dim + 2] + 2 * padding[dim] - covered
        if room < 0:
            return None
        shape.append(room // stride[dim] + 1)
    return new(x, shape)


@_rule(_aten.native_batch_norm.default)
def _batch_norm(
    new: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    is_training: bool,
    *numbers: float,
) -> Any:
    """The result, and what a backward pass would need: two vectors, empty ones in evaluation.

    Nothing reads these two here, so one tensor stands for both.
    """
    channels = x.shape[1:2]
    for vector in (weight, bias, mean, variance):
        # torch would let one channel pass for all of them here, but not in a real batch norm.
        if vector is not None and vector.shape != channels:
            raise RuntimeError(
                f"a batch norm of {list(vector.shape)} channels got an input of {list(channels)}"
            )
    if x.dim() < 2 or not x.is_floating_point() or not _is_kept(x):
        return None
    length = (0,)
    if is_training:
        length = channels
    saved = new(x, length)
    return new(x, x.shape, x.stride()), saved, saved
