"""Family: nodes with the same children form a block, and a block is one matrix product."""

import math
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from grapnet.core._transition import Topology

from . import _native
from ._changes import is_capturing
from ._dense import FullPlan
from ._plan import Plan, needs_plain_operations, sized
from ._reference import ReferencePlan, require_wiring

LARGE = 1 << 16  # activations from which it pays to write a product where it belongs
# members and children of a family from which a GPU's half-precision tiles are well filled
TILE = 64
# different sizes of families up to which compiled code multiplies block by block
MOST_TRACED = 4


@dataclass(frozen=True, eq=False)
class Families:
    """The families of equal size of one transition: which nodes, which children, where their values
    are.
    """

    members: Tensor  # [families, size] rows of the upper layer
    children: Tensor  # [families, degree] rows of the lower layer
    positions: Tensor  # [families, size, degree] int32, of the values

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of families, of members of each, and of children of each."""
        families, size, degree = self.positions.shape
        return families, size, degree


@dataclass(frozen=True)
class Family:
    """Computes one matrix product per family, all families of the same size at once."""

    name: ClassVar[str] = "family"

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Runs everything; without repeated children it is slow."""
        return []

    def prepare(self, topology: Topology) -> Plan:
        """Groups the nodes."""
        if topology.is_full:
            return FullPlan(topology, narrow=False)
        groups = find_families(topology)
        scatter = None
        if len(groups) > MOST_TRACED:
            scatter = ReferencePlan(topology)
        return FamilyPlan(topology, groups, scatter)


class FamilyPlan:
    """The blocks of one topology.

    Where every child is in one family and all families have one size, the block is the result.
    Otherwise the blocks stand feature by feature, so that each is whole rows to add, and so does
    the result, until `row_major` is called.

    Args:
        topology: the relations.
        groups: their families.
        scatter: computes the same in compiled code, where every number of blocks would be compiled
            by itself.
    """

    def __init__(
        self, topology: Topology, groups: list[Families], scatter: Plan | None = None
    ) -> None:
        self._scatter = scatter
        device = topology.child.device
        self._feature_major = True
        self._blocks = [_Block(families, topology) for families in groups]
        none = torch.empty(0, dtype=torch.int64, device=device)
        # of stacked rows
        self._target = torch.cat([none, *(families.children.reshape(-1) for families in groups)])
        rows = torch.arange(topology.n_children, device=device)
        self._in_order = torch.equal(self._target, rows)
        seen = torch.bincount(self._target, minlength=topology.n_children)
        self._once = bool((seen == 1).all())
        self._source = self._target.argsort() if self._once and not self._in_order else none

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        if self._scatter is not None and torch.compiler.is_compiling():
            return self._scatter(x, values, bias)
        if not self._blocks:
            return torch.addmm(bias, x[:, :0], values.view(0, bias.shape[0]))
        if self._in_order and len(self._blocks) == 1:
            return self._blocks[0].row_by_row(x, values, bias)
        # [messages, batch]
        stacked = torch.cat([block.by_feature(x, values) for block in self._blocks])
        if self._in_order:
            z = stacked
        elif self._once:
            z = stacked.index_select(0, self._source)
        else:
            zeros = stacked.new_zeros(bias.shape[0], len(x))
            z = zeros.index_add(0, self._target, stacked)
        z = (z + bias.to(z.dtype)[:, None]).t()
        return z if self._feature_major else z.contiguous()

    def row_major(self) -> "FamilyPlan":
        """Returns a plan over the same blocks whose result is contiguous."""
        twin = copy(self)
        twin._feature_major = False
        return twin


class _Block:
    """Families of one size as a batched matrix product."""

    def __init__(self, families: Families, topology: Topology) -> None:
        places = families.positions.reshape(-1)
        first = int(places[0])
        # where the values begin, and how many families, members and children there are
        self._sizes = sized(first, *families.shape, device=places.device)
        self._is_all = len(places) == topology.n_relations
        # None: the values, or the parents, are taken as they stand
        self._places = None
        self._members = None
        in_a_row = torch.arange(len(places), dtype=places.dtype, device=places.device)
        if not torch.equal(places, first + in_a_row):
            self._places = places
        rows = families.members.reshape(-1)
        if not torch.equal(rows, torch.arange(topology.n_parents, device=rows.device)):
            self._members = rows

    def row_by_row(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Returns the messages with the biases of their children, [batch, families · degree]."""
        x, values = self._gathered(x, values)
        plain = (
            needs_plain_operations()
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled(x.device.type)
        )
        shape = self._sizes.shape[1:4]
        if x.numel() >= LARGE and not plain:
            return _BlockProduct.apply(x, values, bias, shape)
        families, size, degree = shape
        bias = bias.view(families, 1, degree)
        z = torch.baddbmm(bias, _split(x, families, size), values.view(shape))
        return z.transpose(0, 1).reshape(len(x), families * degree)

    def by_feature(self, x: Tensor, values: Tensor) -> Tensor:
        """Returns the messages, [families · degree, batch]."""
        x, values = self._gathered(x, values)
        _, families, size, degree, _ = self._sizes.shape
        weights = values.view(families, size, degree).transpose(1, 2)
        z = torch.bmm(weights, _split(x, families, size).transpose(1, 2))
        return z.view(families * degree, len(x))

    def _gathered(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the activations of the members, [batch, families · size], and their values,
        family by family.
        """
        if self._places is not None:
            values = values.index_select(0, self._places)
        elif not self._is_all:
            first, *shape, _ = self._sizes.shape
            values = values[first : first + math.prod(shape)]
        if self._members is not None:
            x = x.index_select(1, self._members)
        return x, values


class _BlockProduct(Function):
    """The batched product, written directly into [batch, families · degree] without a copy.

    On large blocks the copies of result and gradient cost as much as the products themselves.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, bias: Tensor, shape: tuple[int, int, int]
    ) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.shape = shape
        families, size, degree = shape
        z = x.new_empty(len(x), families * degree)
        blocks = _split(z, families, degree)
        if x.is_cuda and x.element_size() == 2 and min(size, degree) >= TILE and _has_triton():
            # baddbmm writes the biases first, which takes as long as the product
            from ._gpu_blocks import block_product

            block_product(x, values, bias, shape, z)
        else:
            bias = bias.view(families, 1, degree)
            torch.baddbmm(bias, _split(x, families, size), values.view(shape), out=blocks)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, values = ctx.saved_tensors
        (dz,) = gradients
        families, size, degree = ctx.shape
        received = _split(dz, families, degree)
        weights = values.view(ctx.shape).transpose(1, 2)
        for_x, for_values, for_bias, _ = ctx.needs_input_grad
        dx = dv = db = None
        if for_x and (torch.is_grad_enabled() or needs_plain_operations(dz)):
            # only the plain product has derivatives and rules of its own
            dx = torch.bmm(received, weights).transpose(0, 1).reshape(x.shape)
        elif for_x:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            torch.bmm(received, weights, out=_split(dx, families, size))
        if for_values:
            dv = torch.bmm(_split(x, families, size).transpose(1, 2), received).view(-1)
        if for_bias:
            db = _column_sums(dz)
        return dx, dv, db, None


def _column_sums(dz: Tensor) -> Tensor:
    """Returns the sums over the batch; a GPU's matrix units read half precision faster than its
    reduction does.
    """
    if dz.is_cuda and dz.element_size() == 2 and not torch.is_grad_enabled():
        if is_capturing(dz):
            return torch.mv(dz.t(), dz.new_ones(len(dz)))
        return torch.mv(dz.t(), _ones(len(dz), dz.dtype, dz.device))
    return dz.sum(0)


@lru_cache(maxsize=4)
def _ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns ones that every stream can read: launches bound small passes on a GPU."""
    ones = torch.ones(count, dtype=dtype, device=device)
    torch.cuda.current_stream(device).synchronize()
    return ones


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _split(x: Tensor, families: int, n: int) -> Tensor:
    """Returns a view of [batch, families · n] as [families, batch, n]."""
    return x.view(len(x), families, n).transpose(0, 1)


def find_families(topology: Topology) -> list[Families]:
    """Returns the families of a transition, those of equal size together; a node without children
    has none.
    """
    require_wiring(topology)
    return [_families(topology, members, degree) for members, degree in group_members(topology)]


def group_members(topology: Topology) -> list[tuple[Tensor, int]]:
    """Returns, for every size of family, the rows of their members [families, size], and how many
    children each has.
    """
    degrees = topology.degrees.long()
    rows = (degrees > 0).nonzero().view(-1)
    if len(rows) == 0:
        return []
    _, family = torch.unique(
        torch.stack([degrees, _set_hashes(topology)])[:, rows], dim=1, return_inverse=True
    )
    order = family.argsort(stable=True)
    rows = rows[order]
    sizes = torch.bincount(family)
    starts = sizes.cumsum(0) - sizes
    by_first = rows[starts].argsort()
    sizes = sizes[by_first]
    starts = starts[by_first]
    shapes = torch.stack([sizes, degrees[rows[starts]]], dim=1)
    groups = []
    for size, degree in shapes.unique(dim=0).tolist():
        of_shape = (shapes == torch.tensor([size, degree], device=rows.device)).all(dim=1)
        members = rows[starts[of_shape].unsqueeze(1) + torch.arange(size, device=rows.device)]
        groups.append((members, degree))
    return sorted(groups, key=lambda group: int(group[0][0, 0]))


def _families(topology: Topology, members: Tensor, degree: int) -> Families:
    """Returns families of given members, with the children of each in one order."""
    slots = torch.arange(degree, dtype=torch.int32, device=members.device)
    positions = topology.ptr[members].unsqueeze(-1) + slots  # [families, size, degree]
    children = topology.child[positions.long()]
    if not bool((children == children[:, :1]).all()):  # the same children in different orders
        children, order = children.sort(dim=-1)
        positions = positions.gather(-1, order)
    assert bool((children == children[:, :1]).all()), "two child sets share a hash"
    return Families(members, children[:, 0].long(), positions)


def _set_hashes(topology: Topology) -> Tensor:
    """Returns a number for every parent that depends on which children it has, not on their
    order.
    """
    if topology.child.device.type == "cpu" and not _native.missing:
        return _native.family_hashes(topology.ptr, topology.child)
    mixed = (
        torch.arange(1, topology.n_children + 1, device=topology.child.device) * -0x61C8864680B583EB
    )
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):  # as in splitmix64
        mixed = (mixed ^ (mixed >> shift)) * factor  # all of it wraps around, as it may
    total = torch.cat(
        [mixed.new_zeros(1), (mixed ^ (mixed >> 31)).index_select(0, topology.child).cumsum(0)]
    )
    return total[topology.ptr.long()].diff()
