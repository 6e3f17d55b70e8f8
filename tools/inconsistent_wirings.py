"""Hands many inconsistent wirings to every kernel and counts what became of them.

`python -m tools.inconsistent_wirings 10000 --json FILE` draws wirings, breaks each in a few places,
and calls every kernel and backend with it. A tensor ends, or begins, at a page that cannot be
touched, and the bytes on its other side are watched. A call that ends its process is a fault, and
another process goes on behind it.
"""

import argparse
import ctypes
import json
import mmap
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from grapnet.core._errors import PlanError
from grapnet.core._transition import Topology
from grapnet.execution import _native, _operators
from grapnet.execution._attention import AttentionPlan
from grapnet.execution._dense import Dense
from grapnet.execution._family import Family
from grapnet.execution._reference import Reference
from grapnet.execution._sparse import Sparse

PAGE = mmap.PAGESIZE
REGION = 64 * PAGE  # bytes, for one tensor
WATCHED = 0x5A
LARGEST = 2**31 - 1


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

    def copied(self, copy: "Callable[[Tensor], Tensor]") -> "Case":
        """Returns the same case in other memory."""
        tensors = {name: copy(getattr(self, name)) for name in (*INDICES, *NUMBERS)}
        return replace(self, **tensors)

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


INDICES = ("ptr", "child", "in_ptr", "entries", "removed", "wanted")
NUMBERS = ("x", "dz", "values", "bias")


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


def _backend(case: Case, backend: Any) -> Tensor:
    return backend.prepare(case.topology)(case.x, case.values, case.bias)


def _attend(case: Case) -> Tensor:
    key = torch.ones_like(case.x[:1]).view(-1)
    query = torch.ones_like(case.bias)
    return AttentionPlan(case.topology)(case.x, case.values, case.bias, key, query)


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
# Those of torch have errors of their own: any exception is an answer.
BACKENDS: dict[str, Callable[[Case], Any]] = {
    "backend reference": lambda case: _backend(case, Reference()),
    "backend dense": lambda case: _backend(case, Dense()),
    "backend family": lambda case: _backend(case, Family()),
    "backend sparse": lambda case: _backend(case, Sparse()),
    "backend attention": _attend,
}


def main() -> int:
    """Returns 1 when there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="how many wirings")
    parser.add_argument("--seed", type=int, default=0, help="of the first wiring")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    arguments = parser.parse_args()
    result = judge(range(arguments.seed, arguments.seed + arguments.count))
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if arguments.json:
        arguments.json.write_text(text)
    return int(bool(result["faults"]))


def judge(
    seeds: Sequence[int], kernels: Mapping[str, Callable[[Case], Any]] = KERNELS | BACKENDS
) -> dict[str, Any]:
    """Returns how often each kernel refused and computed, and the calls that were faults."""
    calls = [(seed, name) for seed in seeds for name in kernels]
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in kernels}
    faults: list[str] = []
    reached = 0
    while reached < len(calls):
        for outcome in _outcomes(calls[reached:], kernels):
            seed, name = calls[reached]
            reached += 1
            if outcome in ("refused", "computed"):
                outcomes[name][outcome] += 1
            else:
                outcomes[name]["fault"] += 1
                faults.append(f"{name}, seed {seed}: {outcome}")
    return {
        "wirings": len(seeds),
        "calls": len(calls),
        "outcomes": {name: dict(sorted(found.items())) for name, found in outcomes.items()},
        "faults": faults,
    }


def _outcomes(
    calls: Sequence[tuple[int, str]], kernels: Mapping[str, Callable[[Case], Any]]
) -> Iterator[str]:
    """Yields the outcomes of calls in another process, up to the one that ends it."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as answers:
                _answer(calls, kernels, answers)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    count = 0
    with os.fdopen(reading) as answers:
        for line in answers:
            count += 1
            yield line.rstrip("\n")
    _, status = os.waitpid(process, 0)
    if count < len(calls):
        ending = f"exit status {os.waitstatus_to_exitcode(status)}"
        if os.WIFSIGNALED(status):
            ending = signal.Signals(os.WTERMSIG(status)).name
        yield ending


def _answer(
    calls: Sequence[tuple[int, str]], kernels: Mapping[str, Callable[[Case], Any]], answers: Any
) -> None:
    _limit_memory()
    memory = Memory()
    variants = _native.variants()
    plain = lru_cache(maxsize=1)(drawn_case)
    for seed, name in calls:
        draw = random.Random(f"{seed} {name}")
        _native.use_variant(draw.choice(variants))
        memory.at_end = draw.random() < 0.75
        threads = draw.choice((1, 1, 2))
        case = plain(seed).copied(memory.copy)
        with _guarded_outputs(memory), mock.patch("torch.get_num_threads", lambda n=threads: n):
            outcome = _outcome(kernels[name], case, strict=name not in BACKENDS)
        del case
        if not memory.release():
            outcome = "wrote beside a tensor"
        print(outcome, file=answers, flush=True)


def _limit_memory() -> None:
    """Lets this process have a little more memory than it has: a huge index is no reason to take
    what others need.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * PAGE + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _outcome(kernel: Callable[[Case], Any], case: Case, strict: bool) -> str:
    try:
        with torch.no_grad():
            kernel(case)
    except PlanError:
        return "refused"
    except Exception as error:
        strict |= isinstance(error, MemoryError) or "can't allocate" in str(error)
        return f"{type(error).__name__}: {error}" if strict else "refused"
    return "computed"


@contextmanager
def _guarded_outputs(memory: "Memory") -> Iterator[None]:
    """Lets the kernels write into guarded memory."""

    def new_empty(like: Tensor, *size: Any, dtype: torch.dtype | None = None) -> Tensor:
        if len(size) == 1 and not isinstance(size[0], int):
            size = tuple(size[0])
        return memory.empty(size, dtype or like.dtype)

    def room(like: Tensor, rows: int) -> Tensor:
        return memory.empty((rows, *like.shape[1:]), like.dtype)

    with (
        mock.patch.object(Tensor, "new_empty", new_empty),
        mock.patch.object(_native, "room", room),
    ):
        yield


class Memory:
    """Regions between two pages that cannot be touched, one for each tensor."""

    def __init__(self, regions: int = 48) -> None:
        self.at_end = True  # where in its region a tensor lies
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        )
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._free = [self._region() for _ in range(regions)]
        self._used: list[tuple[int, int, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a guarded tensor, filled with NaN or -1; an ordinary one where it has no room."""
        ordinary = torch.empty(tuple(shape), dtype=dtype)
        size = ordinary.numel() * ordinary.element_size()
        if not 0 < size <= REGION or not self._free:
            return ordinary
        region = self._free.pop()
        start = region
        if self.at_end:
            start = region + REGION - size
        self._used.append((region, start, size))
        for beside, length in _beside(region, start, size):
            ctypes.memset(beside, WATCHED, length)
        ctypes.memset(start, 0xFF, size)
        content = (ctypes.c_char * size).from_address(start)
        return torch.frombuffer(content, dtype=dtype).view(tuple(shape))

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a guarded copy in the same layout."""
        if tensor.dim() == 2 and _native.is_by_feature(tensor):
            return self.copy(tensor.t()).t()
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def release(self) -> bool:
        """Takes all regions back; returns whether nothing was written beside the tensors."""
        clean = True
        for region, start, size in self._used:
            for beside, length in _beside(region, start, size):
                clean &= ctypes.string_at(beside, length).count(WATCHED) == length
            self._free.append(region)
        self._used.clear()
        return clean

    def _region(self) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = self._libc.mmap(None, REGION + 2 * PAGE, 0, flags, -1, 0) + PAGE
        if self._libc.mprotect(start, REGION, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
        return start


def _beside(region: int, start: int, size: int) -> list[tuple[int, int]]:
    """Returns the address and length of the bytes to watch on both sides of a tensor."""
    before = min(PAGE, start - region)
    after = min(PAGE, region + REGION - start - size)
    return [(start - before, before), (start + size, after)]


def drawn_case(seed: int) -> Case:
    """Draws a wiring, breaks it in one to three places, and draws numbers of lengths that fit."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    topology = _drawn_topology(draw)
    order = _native.order_by_child(topology)
    n_relations = topology.n_relations
    indices = {
        "ptr": topology.ptr,
        "child": topology.child,
        "in_ptr": order.in_ptr,
        "entries": order.entries,
        "removed": torch.randperm(n_relations)[: draw.randint(0, 6)].sort().values.int(),
        "wanted": torch.randint(0, 9, (topology.n_parents,)),
    }
    if draw.random() < 0.1 and len(order.entries):
        # entries of the other width
        parents = topology.parents().long()
        slots = torch.arange(n_relations)
        indices["entries"] = (parents << 32 | slots - topology.ptr[parents])[
            topology.child.argsort(stable=True)
        ]
    n_children = topology.n_children
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = draw.choice((*INDICES, "n_children", "another wiring"))
        if name == "n_children":
            n_children = max(0, n_children + draw.choice((-9, -1, 1, 9)))
        elif name == "another wiring":
            other = _drawn_topology(draw)
            indices[draw.choice(("ptr", "child"))] = draw.choice((other.ptr, other.child))
        else:
            indices[name] = _broken(indices[name].clone(), draw)
    batch = draw.choice((0, 1, 1, 2, 5, 16, 17, 40, 300))
    dtype = draw.choice((torch.float32, torch.float64))
    n_parents = len(indices["ptr"]) - 1
    if draw.random() < 0.5:
        # as in a plan, which takes the number of children from the order
        n_children = max(0, len(indices["in_ptr"]) - 1)
    lengths = [(batch, n_parents), (batch, n_children), (len(indices["child"]),), (n_children,)]
    numbers = {}
    for name, shape in zip(NUMBERS, lengths, strict=True):
        shape = [max(0, length) for length in shape]
        numbers[name] = torch.randn(shape, dtype=dtype)
        if len(shape) == 2 and draw.random() < 0.5:
            numbers[name] = numbers[name].t().contiguous().t()
    return Case(**indices, **numbers, n_children=n_children, row_major=draw.random() < 0.5)


def _drawn_topology(draw: random.Random) -> Topology:
    n_parents = draw.choice((0, 1, 7, 40, 90))
    n_children = draw.choice((1, 5, 33, 80))
    density = draw.choice((0.05, 0.3, 0.9))
    related = torch.rand(n_parents, n_children) < density
    ptr = torch.cat([torch.zeros(1), related.sum(1).cumsum(0)]).int()
    child = related.nonzero()[:, 1].int()
    return Topology(ptr, child, n_children)


def _broken(index: Tensor, draw: random.Random) -> Tensor:
    """Returns an index vector with a wrong length or wrong numbers."""
    way = draw.randrange(8)
    if way == 0:
        return index[: draw.randint(0, len(index))].clone()
    if way == 1:
        return torch.cat([index, index[: draw.randint(0, 9)]])
    if len(index) == 0:
        return index.new_ones(draw.randint(0, 3))
    if way == 2:
        return torch.randint(-(2**31), LARGEST, index.shape).to(index.dtype)
    if way == 3:
        return index[torch.randperm(len(index))].clone()
    if way == 4:
        return index.fill_(draw.choice((0, -1, LARGEST, -LARGEST - 1, 0x5A5A5A5A)))
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(index))
        number = int(index[place])
        wrong = (-1, number + 1, number - 1, number + 1000, number ^ (1 << draw.randrange(31)))
        wrong = draw.choice((*wrong, LARGEST, -LARGEST - 1, number | 1 << 16, number | 7 << 16))
        index[place] = max(-LARGEST - 1, min(LARGEST, wrong))
    return index


if __name__ == "__main__":
    raise SystemExit(main())
