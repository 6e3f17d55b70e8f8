"""The sparse backend on a GPU: Triton kernels over feature-major activations. Imported only where
Triton is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd import Function

from grapnet.core._transition import Topology

from ._operators import plain_dots, plain_sum, plain_sum_to_parents, register, run
from ._plan import needs_plain_operations
from ._reference import ReferencePlan, require_wiring

RELATIONS = 16  # gathered at once
BATCH = 128  # samples of one program

_ops = torch.ops.grapnet


@triton.jit
def _gather_sum(
    x,
    values,
    bias,
    ptr,
    source,
    position,
    z,
    batch,
    WITH_BIAS: tl.constexpr,
    RELATIONS: tl.constexpr,
    BATCH: tl.constexpr,
    ACC: tl.constexpr,
):
    """z[j, :] = bias[j] + Σ_e values[position[e]] · x[source[e], :] over the relations e of list j,
    or without bias.
    """
    row = tl.program_id(0)
    samples = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    inside = samples < batch
    start = tl.load(ptr + row)
    stop = tl.load(ptr + row + 1)
    total = tl.zeros([BATCH], dtype=ACC)
    for first in range(start, stop, RELATIONS):
        e = first + tl.arange(0, RELATIONS)
        exists = e < stop
        origin = tl.load(source + e, mask=exists, other=0).to(tl.int64)
        weight = tl.load(
            values + tl.load(position + e, mask=exists, other=0), mask=exists, other=0
        ).to(ACC)
        rows = tl.load(
            x + origin[:, None] * batch + samples[None, :],
            mask=exists[:, None] & inside[None, :],
            other=0,
        )
        total += tl.sum(weight[:, None] * rows.to(ACC), axis=0)
    if WITH_BIAS:
        total += tl.load(bias + row).to(ACC)
    tl.store(z + row.to(tl.int64) * batch + samples, total.to(z.dtype.element_ty), mask=inside)


@triton.jit
def _dots(
    x,
    dz,
    parent,
    child,
    gradient,
    count,
    batch,
    RELATIONS: tl.constexpr,
    BATCH: tl.constexpr,
    ACC: tl.constexpr,
):
    """gradient[e] = Σ_b x[parent[e], b] · dz[child[e], b]."""
    e = tl.program_id(0) * RELATIONS + tl.arange(0, RELATIONS)
    exists = e < count
    upper = tl.load(parent + e, mask=exists, other=0).to(tl.int64) * batch
    lower = tl.load(child + e, mask=exists, other=0).to(tl.int64) * batch
    total = tl.zeros([RELATIONS], dtype=ACC)
    for first in range(0, batch, BATCH):
        samples = first + tl.arange(0, BATCH)
        inside = exists[:, None] & (samples < batch)[None, :]
        left = tl.load(x + upper[:, None] + samples[None, :], mask=inside, other=0).to(ACC)
        right = tl.load(dz + lower[:, None] + samples[None, :], mask=inside, other=0).to(ACC)
        total += tl.sum(left * right, axis=1)
    tl.store(gradient + e, total.to(gradient.dtype.element_ty), mask=exists)


class Wiring(NamedTuple):
    """The relations of a topology in two orders, all int32."""

    ptr: Tensor  # [n_parents + 1] where the relations of each parent begin
    child: Tensor  # [n_relations]
    parent: Tensor  # [n_relations]
    position: Tensor  # [n_relations] 0, 1, 2, …
    # the same in the order of the children
    in_ptr: Tensor
    in_parent: Tensor
    in_position: Tensor

    @classmethod
    def of(cls, topology: Topology) -> "Wiring":
        """Sorts the relations of a topology by child."""
        parent = topology.parents()
        order = topology.child.argsort(stable=True)
        counts = torch.bincount(topology.child, minlength=topology.n_children).cumsum(0)
        in_ptr = torch.cat([counts.new_zeros(1), counts]).int()
        position = torch.arange(
            topology.n_relations, dtype=torch.int32, device=topology.child.device
        )
        return cls(
            topology.ptr, topology.child, parent, position, in_ptr, parent[order], order.int()
        )


@dataclass(frozen=True, eq=False)
class GpuPlan:
    """The gather for one topology on a GPU: relations by child for the forward, by parent for the
    backward.

    Attributes:
        topology: the relations by parent.
        wiring: what the operators read.
        feature_major: whether the result is the transpose of a contiguous [n_children, batch].
    """

    topology: Topology
    wiring: Wiring
    feature_major: bool = True

    @classmethod
    def of(cls, topology: Topology) -> "GpuPlan":
        """Returns the plan of a topology; raises PlanError if that is damaged."""
        require_wiring(topology)
        return cls(topology, Wiring.of(topology))

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        if needs_plain_operations():
            return ReferencePlan(self.topology)(x, values, bias)
        if x.dtype != values.dtype:
            x = x.to(values.dtype)
        z = _sum(x.t().contiguous(), values, bias, self.wiring).t()
        return z if self.feature_major else z.contiguous()

    def row_major(self) -> "GpuPlan":
        """Returns a plan over the same arrays whose result is contiguous."""
        return replace(self, feature_major=False)


def _sum(x: Tensor, values: Tensor, bias: Tensor, wiring: Sequence[Tensor]) -> Tensor:
    """Returns the sums of the children, [n_children, batch], from x [n_parents, batch]."""
    return run(_ops.gpu_sum.default, _Sum, x, values, bias, *wiring)


def _sum_to_parents(dz: Tensor, values: Tensor, wiring: Sequence[Tensor]) -> Tensor:
    """Returns the gradient of the parents, [n_parents, batch], from dz [n_children, batch]."""
    return run(_ops.gpu_sum_to_parents.default, _SumToParents, dz, values, *wiring)


def _dots_of(x: Tensor, dz: Tensor, wiring: Sequence[Tensor]) -> Tensor:
    """Returns the gradient of the values, [n_relations]."""
    return run(_ops.gpu_dots.default, _DotsOf, x, dz, *wiring)


class _Sum(Function):
    @staticmethod
    def forward(x: Tensor, values: Tensor, bias: Tensor, *wiring: Tensor) -> Tensor:
        _, _, _, _, in_ptr, in_parent, in_position = wiring
        return _launch_sum(x, values, bias, in_ptr, in_parent, in_position)

    @staticmethod
    def plain(x: Tensor, values: Tensor, bias: Tensor, *wiring: Tensor) -> Tensor:
        return plain_sum(x.t(), values, bias, *wiring[:2]).t()

    @staticmethod
    def shape(x: Tensor, values: Tensor, bias: Tensor, *wiring: Tensor) -> Tensor:
        return x.new_empty(bias.shape[0], x.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, values, _, *wiring = inputs
        ctx.save_for_backward(x, values, *wiring)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dz,) = grads
        x, values, *wiring = ctx.saved_tensors
        for_x, for_values, for_bias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        if for_x:
            dx = _sum_to_parents(dz, values, wiring)
        if for_values:
            dw = _dots_of(x, dz, wiring)
        if for_bias:
            dbias = dz.sum(1)
        return dx, dw, dbias, *[None] * 7


class _SumToParents(Function):
    @staticmethod
    def forward(dz: Tensor, values: Tensor, *wiring: Tensor) -> Tensor:
        ptr, child, _, position, *_ = wiring
        return _launch_sum(dz, values, None, ptr, child, position)

    @staticmethod
    def plain(dz: Tensor, values: Tensor, *wiring: Tensor) -> Tensor:
        return plain_sum_to_parents(dz.t(), values, *wiring[:2]).t()

    @staticmethod
    def shape(dz: Tensor, values: Tensor, *wiring: Tensor) -> Tensor:
        return dz.new_empty(wiring[0].shape[0] - 1, dz.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (on_dx,) = grads
        dz, values, *wiring = ctx.saved_tensors
        on_dz = _sum(on_dx, values, dz.new_zeros(dz.shape[0]), wiring)
        return on_dz, _dots_of(on_dx, dz, wiring), *[None] * 7


class _DotsOf(Function):
    @staticmethod
    def forward(x: Tensor, dz: Tensor, *wiring: Tensor) -> Tensor:
        _, child, parent, *_ = wiring
        return _launch_dots(x, dz, parent, child)

    @staticmethod
    def plain(x: Tensor, dz: Tensor, *wiring: Tensor) -> Tensor:
        return plain_dots(x.t(), dz.t(), *wiring[:2]).to(x.dtype)

    @staticmethod
    def shape(x: Tensor, dz: Tensor, *wiring: Tensor) -> Tensor:
        return x.new_empty(wiring[1].shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (on_dw,) = grads
        x, dz, *wiring = ctx.saved_tensors
        on_dz = _sum(x, on_dw, dz.new_zeros(dz.shape[0]), wiring)
        return _sum_to_parents(dz, on_dw, wiring), on_dz, *[None] * 7


_WIRING = ", ".join(f"Tensor {name}" for name in Wiring._fields)

register(
    _Sum, "gpu_sum", f"Tensor x, Tensor values, Tensor bias, {_WIRING}", "Tensor", device="CUDA"
)
register(
    _SumToParents,
    "gpu_sum_to_parents",
    f"Tensor dz, Tensor values, {_WIRING}",
    "Tensor",
    device="CUDA",
)
register(_DotsOf, "gpu_dots", f"Tensor x, Tensor dz, {_WIRING}", "Tensor", device="CUDA")


def _launch_sum(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    ptr: Tensor,
    source: Tensor,
    position: Tensor,
) -> Tensor:
    rows = ptr.shape[0] - 1
    batch = x.shape[1]
    x = x.contiguous()
    values = values.contiguous()
    z = torch.empty(rows, batch, dtype=x.dtype, device=x.device)
    if z.numel():
        sizes: dict[str, Any] = {
            "RELATIONS": RELATIONS,
            "BATCH": BATCH,
            "ACC": _accumulator(values),
        }
        grid = (rows, triton.cdiv(batch, BATCH))
        _gather_sum[grid](  # pyright: ignore[reportIndexIssue]
            x,
            values,
            values if bias is None else bias.contiguous(),
            ptr,
            source,
            position,
            z,
            batch,
            bias is not None,
            **sizes,
        )
    return z


def _launch_dots(x: Tensor, dz: Tensor, parent: Tensor, child: Tensor) -> Tensor:
    count = child.shape[0]
    gradient = torch.empty(count, dtype=x.dtype, device=x.device)
    if count:
        sizes: dict[str, Any] = {
            "RELATIONS": RELATIONS,
            "BATCH": BATCH,
            "ACC": _accumulator(x),
        }
        _dots[(triton.cdiv(count, RELATIONS),)](  # pyright: ignore[reportIndexIssue]
            x.contiguous(), dz.contiguous(), parent, child, gradient, count, x.shape[1], **sizes
        )
    return gradient


def _accumulator(values: Tensor) -> Any:
    return tl.float64 if values.dtype == torch.float64 else tl.float32
