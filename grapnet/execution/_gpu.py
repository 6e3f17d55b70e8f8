"""The sparse backend on a GPU: Triton kernels over feature-major activations. Imported only where
Triton is.
"""

from copy import copy
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd import Function

from grapnet.core._transition import Topology

from ._plan import needs_plain_operations
from ._reference import ReferencePlan, require_wiring

RELATIONS = 16  # gathered at once
BATCH = 128  # samples of one program


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


class GpuPlan:
    """The gather for one topology on a GPU: relations by child for the forward, by parent for the
    backward.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._feature_major = True
        require_wiring(topology)
        self.parent = topology.parents()
        order = topology.child.argsort(stable=True)
        self.in_position = order.int()
        self.in_parent = self.parent[order]
        counts = torch.bincount(topology.child, minlength=topology.n_children).cumsum(0)
        self.in_ptr = torch.cat([counts.new_zeros(1), counts]).int()
        self.position = torch.arange(
            topology.n_relations, dtype=torch.int32, device=topology.child.device
        )

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        if needs_plain_operations():
            return ReferencePlan(self.topology)(x, values, bias)
        if x.dtype != values.dtype:
            x = x.to(values.dtype)
        z = _RelationSum.apply(x.t().contiguous(), values, bias, self).t()
        return z if self._feature_major else z.contiguous()

    def row_major(self) -> "GpuPlan":
        """Returns a plan over the same arrays whose result is contiguous."""
        twin = copy(self)
        twin._feature_major = False
        return twin

    def gathered(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Returns the sums of the children, [n_children, batch], from x [n_parents, batch]."""
        return _launch_sum(
            x, values, bias, self.in_ptr, self.in_parent, self.in_position, self.topology.n_children
        )

    def scattered(self, dz: Tensor, values: Tensor) -> Tensor:
        """Returns the gradient of the parents, [n_parents, batch], from dz [n_children, batch]."""
        topology = self.topology
        return _launch_sum(
            dz, values, None, topology.ptr, topology.child, self.position, topology.n_parents
        )

    def dots(self, x: Tensor, dz: Tensor, values: Tensor) -> Tensor:
        """Returns the gradient of the values, [n_relations]."""
        gradient = torch.empty_like(values)
        count = len(values)
        if count:
            sizes: dict[str, Any] = {
                "RELATIONS": RELATIONS,
                "BATCH": BATCH,
                "ACC": _accumulator(values),
            }
            _dots[(triton.cdiv(count, RELATIONS),)](  # pyright: ignore[reportIndexIssue]
                x, dz, self.parent, self.topology.child, gradient, count, x.shape[1], **sizes
            )
        return gradient


class _RelationSum(Function):
    """The sum with its gradients; with a second derivative, the first uses plain operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor, plan: GpuPlan) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.plan = plan
        return plan.gathered(x, values, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, values = ctx.saved_tensors
        dz = gradients[0].contiguous()
        plan = ctx.plan
        for_x, for_values, for_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled() or needs_plain_operations(dz):
            return *_plain_gradients(plan, x, values, dz, (for_x, for_values)), dz.sum(1), None
        return (
            plan.scattered(dz, values) if for_x else None,
            plan.dots(x, dz, values) if for_values else None,
            dz.sum(1) if for_bias else None,
            None,
        )


def _plain_gradients(
    plan: GpuPlan, x: Tensor, values: Tensor, dz: Tensor, wanted: tuple[bool, bool]
) -> list[Tensor | None]:
    """Returns the gradients for x and the values as operations that have derivatives themselves."""
    inputs = [given for given, want in zip((x, values), wanted, strict=True) if want]
    if not inputs:
        return [None, None]
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        bias = values.new_zeros(plan.topology.n_children)
        z = ReferencePlan(plan.topology)(x.t(), values, bias).t()
        found = iter(torch.autograd.grad(z, inputs, dz, create_graph=create_graph))
    return [next(found) if want else None for want in wanted]


def _launch_sum(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    ptr: Tensor,
    source: Tensor,
    position: Tensor,
    rows: int,
) -> Tensor:
    batch = x.shape[1]
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
            values if bias is None else bias,
            ptr,
            source,
            position,
            z,
            batch,
            bias is not None,
            **sizes,
        )
    return z


def _accumulator(values: Tensor) -> Any:
    return tl.float64 if values.dtype == torch.float64 else tl.float32
