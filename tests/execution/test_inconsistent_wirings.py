"""Inconsistent wirings: every kernel and backend refuses them, or stays within its memory."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grapnet.core._errors import PlanError
from grapnet.core._transition import Topology
from grapnet.execution import _native
from grapnet.execution._dense import Dense
from grapnet.execution._family import Family
from grapnet.execution._reference import Reference
from grapnet.execution._sparse import Sparse
from tools.inconsistent_wirings import KERNELS, Case

ROOT = Path(__file__).parents[2]

# A process with threads should not fork, so the judge gets one of its own.
FAULTY = """
import ctypes, json
from tools.inconsistent_wirings import judge

def write_beside(case):
    ctypes.memset(case.values.data_ptr() - 1, 0, 1)
    ctypes.memset(case.values.data_ptr() + 4 * len(case.values), 0, 1)

def give_up(case):
    raise KeyError("child")

print(json.dumps(judge(range(6), {"writes": write_beside, "raises": give_up})))
"""


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


@pytest.mark.sparse
def test_no_kernel_leaves_its_memory() -> None:
    command = [sys.executable, "-m", "tools.inconsistent_wirings", "150", "--seed", "100000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.sparse
def test_faults_are_counted() -> None:
    command = [sys.executable, "-c", FAULTY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["outcomes"] == {"writes": {"fault": 6}, "raises": {"fault": 6}}
    assert len(found["faults"]) == 12
