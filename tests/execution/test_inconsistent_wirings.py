"""Inconsistent wirings: every kernel and backend refuses them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from grapnet.core._errors import PlanError
from grapnet.core._transition import Topology
from grapnet.execution import _native, _operators
from grapnet.execution._dense import Dense
from grapnet.execution._family import Family
from grapnet.execution._reference import Reference
from grapnet.execution._sparse import Sparse


@dataclass
class Case:
    """One wiring, broken or not, and the numbers to run over it."""

    ptr: Tensor
    child: Tensor
    in_ptr: Tensor
    entries: Tensor
    removed: Tensor
    wanted: Tensor
    n_children: int
    x: Tensor
    dz: Tensor
    values: Tensor
    bias: Tensor
    row_major: bool

    @property
    def topology(self) -> Topology:
        """The relations by parent."""
        return Topology(self.ptr, self.child, self.n_children)

    @property
    def order(self) -> _native.ByChild:
        """The relations by child."""
        return _native.ByChild(self.in_ptr, self.entries)

    @property
    def wiring(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a sum reads."""
        return self.ptr, self.child, self.in_ptr, self.entries


def _gradients(case: Case, *, inputs: bool, weights: bool) -> Any:
    x = case.x if weights else None
    values = case.values if inputs else None
    return _native.gradients(x, case.dz, values, case.ptr, case.child, case.in_ptr, case.row_major)


def _sum_by_child(case: Case) -> Tensor:
    """Sums over the opposite wiring, whose values come in the order of their children."""
    bias = torch.ones_like(case.x[:1]).view(-1)
    wiring = (case.in_ptr, case.ptr, case.child)
    return _native.sum_by_child(case.dz, case.values, bias, *wiring, case.row_major)


def _shifted(case: Case) -> _native.Shifted:
    """Returns the activations of the children as channels that are read from one place."""
    batch = len(case.dz)
    numbers = case.dz.t().contiguous().view(-1)
    return _native.Shifted(numbers, torch.zeros(1, dtype=torch.int32), batch, batch)


def _rectangle(case: Case, transposed: bool) -> Tensor:
    shape = _native.rectangle_shape(case.ptr, case.n_children, transposed)
    return case.values.new_empty(max(0, shape[0]), max(0, shape[1])).fill_(1)


KERNELS: dict[str, Callable[[Case], Any]] = {
    "order_by_child": lambda case: _native.order_by_child(case.topology),
    "order_without": lambda case: _native.order_without(case.order, case.topology, case.removed),
    "family_hashes": lambda case: _native.family_hashes(case.ptr, case.child),
    "largest_of_rows": lambda case: _native.largest_of_rows(
        case.values, case.ptr, case.wanted, -0.5
    ),
    "relation_sum": lambda case: _operators.relation_sum(
        case.x, case.values, case.bias, case.wiring, case.row_major
    ),
    "sum_over_own_wiring": lambda case: _native.sum_over_own_wiring(
        case.x, case.values, case.bias, case.wiring, case.row_major
    ),
    "relation_gradients": lambda case: _gradients(case, inputs=True, weights=True),
    "input_gradient": lambda case: _gradients(case, inputs=True, weights=False),
    "weight_gradient": lambda case: _gradients(case, inputs=False, weights=True),
    "sum_by_child": lambda case: _sum_by_child(case),
    "sum over own wiring by child": lambda case: _native.sum_over_own_wiring(
        case.x, case.values, case.bias, case.wiring, case.row_major, by_child=True
    ),
    "sum_of_shifted": lambda case: _native.sum_of_shifted(
        _shifted(case), case.values, None, case.ptr, case.child
    ),
    "weights_of_shifted": lambda case: _native.weights_of_shifted(
        _shifted(case), case.x.t(), case.ptr, case.child
    ),
    "fill rows": lambda case: _native.fill(
        case.values, case.ptr, case.child, case.n_children, False
    ),
    "fill columns": lambda case: _native.fill(
        case.values, case.ptr, case.child, case.n_children, True
    ),
    "fill kernels": lambda case: _native.fill(
        case.values.unsqueeze(1).repeat(1, 3), case.ptr, case.child, case.n_children, False
    ),
    "pick kernels": lambda case: _native.pick(
        _rectangle(case, False).unsqueeze(2).repeat(1, 1, 3), case.ptr, case.child, False
    ),
    "pick rows": lambda case: _native.pick(_rectangle(case, False), case.ptr, case.child, False),
    "pick columns": lambda case: _native.pick(_rectangle(case, True), case.ptr, case.child, True),
}


def sound_case(batch: int) -> Case:
    torch.manual_seed(0)
    related = torch.rand(20, 30) < 0.5
    ptr = torch.cat([torch.zeros(1), related.sum(1).cumsum(0)]).int()
    child = related.nonzero()[:, 1].int()
    order = _native.order_by_child(Topology(ptr, child, 30))
    return Case(
        ptr=ptr,
        child=child,
        in_ptr=order.in_ptr,
        entries=order.entries,
        removed=torch.tensor([3, 17], dtype=torch.int32),
        wanted=torch.full((20,), 2),
        n_children=30,
        x=torch.randn(batch, 20),
        dz=torch.randn(batch, 30),
        values=torch.randn(len(child)),
        bias=torch.randn(30),
        row_major=True,
    )


def falling(ptr: Tensor) -> None:
    ptr[4] = ptr[9]


def too_long(ptr: Tensor) -> None:
    ptr[-1] += 1


def negative(child: Tensor) -> None:
    child[5] = -1


def too_large(child: Tensor) -> None:
    child[-1] = 30


def of_no_parent(entries: Tensor) -> None:
    entries[7] = 20 << 16


def of_no_slot(entries: Tensor) -> None:
    entries[-1] |= 0xFFFF


LISTS = [*KERNELS]
OWN_ORDER = "sum over own wiring by child"
OTHERS = {"family_hashes", "largest_of_rows", "order_without", OWN_ORDER}
CHILDREN = sorted({*KERNELS} - OTHERS)
BY_CHILD = ["relation_sum", "sum_over_own_wiring"]
WITHOUT_VALUES = {
    "family_hashes",
    "order_by_child",
    "order_without",
    "pick columns",
    "pick kernels",
    "pick rows",
    "weight_gradient",
    "weights_of_shifted",
}
DAMAGES = [
    *((name, "ptr", damage) for name in LISTS for damage in (falling, too_long)),
    *((name, "child", damage) for name in CHILDREN for damage in (negative, too_large)),
    *((name, "in_ptr", damage) for name in BY_CHILD for damage in (falling, too_long)),
    *((name, "entries", damage) for name in BY_CHILD for damage in (of_no_parent, of_no_slot)),
    *((OWN_ORDER, "in_ptr", damage) for damage in (falling, too_long)),
    (OWN_ORDER, "entries", of_no_parent),
]


def reads(name: str, vector: str, batch: int) -> bool:
    """Says whether a kernel follows an index vector: sums go by parent up to 16 samples."""
    if name in BY_CHILD and vector != "ptr":
        return (vector == "child") == (batch <= 16)
    return True


@pytest.mark.sparse
@pytest.mark.parametrize("batch", [1, 9, 70])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "vector", "damage"), DAMAGES, ids=lambda part: getattr(part, "__name__", part)
)
def test_a_kernel_refuses_what_leads_out_of_its_buffers(
    name: str,
    vector: str,
    damage: Callable[[Tensor], None],
    threads: int,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    case = sound_case(batch)
    KERNELS[name](case)
    damage(getattr(case, vector))
    if reads(name, vector, batch):
        with pytest.raises(PlanError):
            KERNELS[name](case)
    else:
        KERNELS[name](case)


@pytest.mark.sparse
@pytest.mark.parametrize("name", sorted({*KERNELS} - WITHOUT_VALUES))
def test_a_kernel_refuses_fewer_values_than_relations(name: str) -> None:
    case = sound_case(9)
    KERNELS[name](case)
    case.values = case.values[:-1]
    with pytest.raises(PlanError):
        KERNELS[name](case)


@pytest.mark.sparse
@pytest.mark.parametrize("removed", [[3, 3], [17, 3], [-1], [10**6]], ids=str)
def test_an_order_loses_only_relations_that_exist(removed: list[int]) -> None:
    case = sound_case(1)
    with pytest.raises(PlanError):
        _native.order_without(case.order, case.topology, torch.tensor(removed, dtype=torch.int32))


@pytest.mark.sparse
@pytest.mark.parametrize("vector", ["child", "in_ptr", "entries"])
def test_an_order_is_carried_only_over_its_own_wiring(vector: str) -> None:
    case = sound_case(1)
    getattr(case, vector).fill_(10**6)
    with pytest.raises(PlanError):
        _native.order_without(case.order, case.topology, case.removed)


@pytest.mark.parametrize("damage", [falling, too_long])
@pytest.mark.parametrize("backend", [Reference(), Dense(), Family()], ids=lambda b: b.name)
def test_a_backend_refuses_lists_that_overlap(
    backend: Any, damage: Callable[[Tensor], None]
) -> None:
    ptr = torch.arange(0, 60, 5, dtype=torch.int32)
    child = torch.arange(5, dtype=torch.int32).repeat(11)
    backend.prepare(Topology(ptr, child, 7))
    damage(ptr)
    with pytest.raises((PlanError, IndexError, RuntimeError)):
        backend.prepare(Topology(ptr, child, 7))


@pytest.mark.sparse
def test_a_plan_whose_wiring_is_emptied_refuses_to_run() -> None:
    case = sound_case(4)
    plan = Sparse().prepare(case.topology)
    plan(case.x, case.values, case.bias)
    case.child.fill_(2**31 - 1)
    with pytest.raises(PlanError), torch.no_grad():
        plan(case.x, case.values, case.bias)
