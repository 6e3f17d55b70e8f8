"""What `auto` makes of its measurements: its time beside that of dense, at seeded points of shape,
density, precision, batch and mode.
"""

import copy
import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import grapnet as gn

from .contenders import Step, Work, family_net, forward_pass, transition_step
from .timing import threads, times_faster

POINTS = 200
LEVEL = 0.95
REPEATS = 3  # a point is missed if every one of so many measurements misses it
PRECISIONS = {
    "cpu": ("float32", "bfloat16", "bfloat16 autocast"),
    "cuda": ("float32", "tf32", "bfloat16", "bfloat16 autocast"),
}
# the largest numbers of parents and children, of samples, and of products that are computed
LARGEST = {
    "cpu": (2048, 512, 2**29),
    "cuda": (8192, 4096, 2**37),
}


@dataclass(frozen=True)
class Point:
    """One transition to run in one way; `families` is 0 for relations at random places."""

    parents: int
    children: int
    density: float
    families: int
    batch: int
    precision: str
    training: bool

    def __str__(self) -> str:
        what = f"{self.density:.1%}"
        if self.families:
            what = f"{self.families} families"
        mode = "forward and backward" if self.training else "forward"
        return (
            f"{self.parents}×{self.children}, {what}, batch {self.batch}, {self.precision}, {mode}"
        )


def drawn_points(device: str, count: int = POINTS, seed: int = 0) -> list[Point]:
    """Draws points; the first ones are the same for every count."""
    draw = random.Random(seed)
    nodes, samples, products = LARGEST[device]
    found = []
    while len(found) < count:
        families = draw.choice((0, 0, 0, 0, 4, 16))
        # multiples of 16, as families of equal sizes need them
        parents, children = (16 * round(2 ** draw.uniform(1, math.log2(nodes / 16))) for _ in "ab")
        point = Point(
            parents,
            children,
            1 / families if families else 2 ** draw.uniform(-9, -0.1),
            families,
            round(2 ** draw.uniform(0, math.log2(samples))),
            draw.choice(PRECISIONS[device]),
            draw.random() < 0.5,
        )
        if point.parents * point.children * point.batch <= products:
            found.append(point)
    return found


def measure(*, fast: bool, points: int | None = None) -> dict[str, Any]:
    """Returns the ratio at every point, or at the first `points` of them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = points or (4 if fast else POINTS)
    with threads(1 if device == "cpu" else torch.get_num_threads()):
        rows = list(rows_of(drawn_points(device, count), device, fast))
    return {
        "benchmark": "auto",
        "settings": {"device": device, "points": count, "fast": fast},
        "versions": {"torch": torch.__version__, "grapnet": gn.__version__},
        "rows": rows,
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every point at which `auto` is slower than dense."""
    lines = []
    for row in result["rows"]:
        if row["faster"] < LEVEL:
            lines.append(
                f"{row['name']}: {row['faster']:.2f} with {row['runs']}, control"
                f" {row['control']:.2f}"
            )
    return lines


def table(result: dict[str, Any]) -> str:
    """Returns the result as text."""
    lines = []
    for row in result["rows"]:
        lines.append(
            f"{row['name']:<72} {row['runs']:<7} {row['faster']:7.2f}  control {row['control']:.2f}"
        )
    measured = [row["faster"] for row in result["rows"] if row["runs"] != "dense"]
    if measured:
        lines.append(
            f"{len(result['rows'])} points, {len(measured)} run by another backend: at worst"
            f" {min(measured):.2f}, at best {max(measured):.1f} times as fast as dense"
        )
    return "\n".join(lines)


def rows_of(chosen: list[Point], device: str, fast: bool) -> Iterator[dict[str, Any]]:
    """Yields the comparison at every point; where `auto` picks dense there is nothing to
    compare.
    """
    for point in chosen:
        with _precision(point.precision, device) as dtype:
            work = Work(
                point.parents,
                point.children,
                point.batch,
                point.density,
                device=device,
                dtype=dtype,
            )
            yield _row(point, work, fast)


def _row(point: Point, work: Work, fast: bool) -> dict[str, Any]:
    net = family_net(work, point.families) if point.families else work.net()
    runs = "dense"
    with _autocast(point, work.device):
        (described,) = net.execution.describe(point.batch, training=point.training)
        runs = described["runs"]
    row = {**asdict(point), "name": str(point), "runs": runs, "costs": described["costs"]}
    if runs == "dense":
        return {**row, "faster": 1.0, "control": 1.0}
    dense = copy.deepcopy(net)
    dense.execution.use("dense")
    nets = {"dense": dense, "auto": net, "control": copy.deepcopy(dense)}
    x, target = replace(work, input_gradient=point.training).data()
    with _autocast(point, work.device):
        cases: dict[str, Step] = {}
        for name, one in nets.items():
            if point.training:
                cases[name] = transition_step(one, x, target.to(one(x).dtype))
            else:
                cases[name] = forward_pass(one, x)
        found = []
        for _ in range(REPEATS):
            times = times_faster(cases, "dense", repeats=2 if fast else 7, seconds=0.005)
            found.append((times["auto"], times["control"]))
            if times["auto"] >= LEVEL:
                break
    faster, control = max(found)
    return {**row, "faster": faster, "control": control}


def _autocast(point: Point, device: str) -> AbstractContextManager[Any]:
    if point.precision.endswith("autocast"):
        return torch.autocast(device, torch.bfloat16)
    return nullcontext()


@contextmanager
def _precision(name: str, device: str) -> Iterator[torch.dtype]:
    """Sets how float32 is multiplied, and yields the dtype of the weights."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield torch.bfloat16 if name == "bfloat16" else torch.float32
    finally:
        torch.set_float32_matmul_precision(before)
