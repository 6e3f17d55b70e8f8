"""Measures what `auto` chooses by: the time of every backend as a share of dense's."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grapnet.core._transition import Topology, random_tiles

from ._costs import (
    MODES,
    Shape,
    batch_class,
    device_name,
    keep,
    kind_of,
    precision,
)
from ._dense import Dense
from ._family import Family
from ._plan import Backend, Plan
from ._sparse import Sparse
from ._tiles import Tiles

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend for backend in (Dense, Sparse, Family, Tiles)
}
# how many rounds, and seconds of every case in each
ROUNDS = {"cpu": 5, "cuda": 3}
SECONDS = {"cpu": 0.003, "cuda": 0.002}
LOST = 3.0  # times the time of dense: denser transitions are not measured
# seconds of a call: batches that are expected to take longer are not measured, and taken to cost
# what smaller ones do
MOST_SECONDS = {"cpu": 0.5, "cuda": 0.05}
PRECISIONS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_USUAL = {
    "cpu": ("float32", "bfloat16"),
    "cuda": ("float32", "tf32", "bfloat16", "float16"),
}


@dataclass(frozen=True)
class Grid:
    """The transitions that are measured for a table.

    Attributes:
        sizes: parents and children, in ascending order of their products.
        shares: by backend the shares of the rectangle that it computes, ascending.
        batches: the numbers of samples, ascending.
    """

    sizes: Sequence[tuple[int, int]]
    batches: Sequence[int]
    shares: Mapping[str, Sequence[float]]


FAMILIES = (1 / 32, 1 / 8, 1 / 2)  # the shares of as many equal families
TILES = (0.05, 0.1, 0.2, 0.5)
GRIDS = {
    "cpu": Grid(
        ((64, 64), (256, 256), (1024, 1024), (1024, 4096)),
        (1, 8, 32, 128, 512),
        {
            "sparse": (0.002, 0.01, 0.05, 0.1, 0.2, 0.4, 0.9),
            "family": FAMILIES,
            "tiles": TILES,
        },
    ),
    "cuda": Grid(
        ((256, 256), (1024, 1024), (1024, 4096), (4096, 4096), (4096, 16384)),
        (1, 32, 256, 2048),
        {"sparse": (0.002, 0.01, 0.05, 0.2, 0.5), "family": FAMILIES, "tiles": TILES},
    ),
}


def tune_transitions(topologies: Sequence[Topology], dtype: torch.dtype, batch: int) -> None:
    """Measures transitions at a batch size in the precision that is set, and keeps the answer."""
    if not topologies or batch == 0:
        return
    device = topologies[0].child.device
    points = []
    for topology in topologies:
        plans = _plans(topology, dtype)
        if Dense.name not in plans or len(plans) == 1:
            continue  # there is nothing to compare
        x = _drawn(device, batch, topology.n_parents).to(dtype)
        for training in (False, True):
            ratios = _ratios(_times(plans, topology, x, training))
            points.append(
                {
                    "size": [topology.n_parents, topology.n_children],
                    "relations": topology.n_relations,
                    "precision": precision(device.type, dtype),
                    "batch": batch_class(batch),
                    "training": training,
                    "ratios": ratios,
                    "date": date.today().isoformat(),
                }
            )
    keep(device.type, {}, points)


class Tuned(NamedTuple):
    """What `tune` has measured.

    Attributes:
        tables: one per precision: by mode and backend the ratios of its times to those of dense,
            by the number of cells, their share and the batch.
        path: the file that keeps them; None if they are not kept.
    """

    tables: list[dict[str, Any]]
    path: Path | None


def tune(
    device: str | torch.device = "cpu",
    *,
    precisions: Sequence[str] | None = None,
    sizes: Sequence[tuple[int, int]] | None = None,
    batches: Sequence[int] | None = None,
    is_kept: bool = True,
    seconds: float = math.inf,
    report: Callable[[str], object] = lambda line: None,
) -> Tuned:
    """Measures the backends over a grid of transitions, for "auto" to select by.

    `net.execution.tune(x)` measures the transitions of one net instead.

    Args:
        device: cpu or cuda.
        precisions: "float64", "float32", "tf32", "bfloat16" or "float16"; by default float32 and
            bfloat16, on CUDA also tf32 and float16.
        sizes: the numbers of parents and children of transitions.
        batches: the numbers of samples.
        is_kept: whether the answer replaces what is known of this machine, in this process and in
            the cache folder.
        seconds: when to stop; what is not measured then is left to dense.
        report: receives a line when a size is done.

    Raises:
        ValueError: there is no such precision on the device, or nothing to measure there.
        OSError: the answer cannot be written. It holds in this process.
    """
    device = torch.device(device)
    if device.type not in GRIDS:
        raise ValueError(f"backends are measured on {' and '.join(GRIDS)}, not on {device.type}")
    grid = GRIDS[device.type]
    chosen = precisions or _USUAL[device.type]
    known = [name for name in PRECISIONS if name != "tf32" or device.type == "cuda"]
    for name in chosen:
        if name not in known:
            raise ValueError(f"{name!r} is no precision of {device.type}: {', '.join(known)}")
    if sizes:
        grid = replace(grid, sizes=sorted(set(sizes), key=math.prod))
    if batches:
        grid = replace(grid, batches=sorted(set(batches)))
    if min(grid.batches) < 1 or min(map(min, grid.sizes)) < 1:
        raise ValueError("sizes and batches are at least 1")
    tables = measured_tables(device, chosen, grid, report=report, seconds=seconds)
    path = None
    if is_kept:
        path = keep(device.type, {table["precision"]: table for table in tables}, [])
    return Tuned(tables, path)


def measured_tables(
    device: torch.device,
    precisions: Sequence[str],
    grid: Grid,
    *,
    report: Callable[[str], object] = lambda line: None,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Returns one table per precision.

    A transition is made once and measured in every precision and at every batch size. What has lost
    clearly with few relations, or would take long, gets the ratio of its neighbour.

    Args:
        device: the device.
        precisions: their names.
        grid: what to measure.
        report: receives a line when a size is done.
        seconds: when to stop; what is not measured then is left to dense.
    """
    end = time.perf_counter() + seconds
    tables = [_empty_table(device, name, grid) for name in precisions]
    for i, (parents, children) in enumerate(grid.sizes):
        for backend, shares in grid.shares.items():
            for j, share in enumerate(shares):
                open_tables = [table for table in tables if not _has_lost(table, backend, i, j)]
                if not open_tables or time.perf_counter() > end:
                    continue
                topology = MAKERS[backend](parents, children, share, device)
                for table in open_tables:
                    _measure_row(table, topology, backend, (i, j), grid.batches)
        report(f"{parents}×{children}")
    for table in tables:
        for mode in MODES:
            for backend in grid.shares:
                _fill_gaps(table[mode][backend]["ratios"])
    return tables


def _empty_table(device: torch.device, name: str, grid: Grid) -> dict[str, Any]:
    table: dict[str, Any] = {
        "kind": kind_of(device.type),
        "precision": name,
        "device": device_name(device.type),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
    }
    for mode in MODES:
        table[mode] = {}
        for backend, shares in grid.shares.items():
            ratios = [[[None] * len(grid.batches) for _ in shares] for _ in grid.sizes]
            table[mode][backend] = {
                "cells": [parents * children for parents, children in grid.sizes],
                "shares": list(shares),
                "batches": list(grid.batches),
                "ratios": ratios,
            }
    return table


def _has_lost(table: dict[str, Any], backend: str, i: int, j: int) -> bool:
    """Returns whether a backend was clearly slower than dense with the next smaller share."""
    if j == 0:
        return False
    found = []
    for mode in MODES:
        found += table[mode][backend]["ratios"][i][j - 1]
    known = [ratio for ratio in found if ratio is not None]
    return not known or min(known) > LOST


def _measure_row(
    table: dict[str, Any],
    topology: Topology,
    backend: str,
    place: tuple[int, int],
    batches: Sequence[int],
) -> None:
    """Measures one transition at all batch sizes, in the precision of a table."""
    i, j = place
    device = topology.child.device
    dtype = PRECISIONS[table["precision"]]
    plans = _plans(topology, dtype, (Dense.name, backend))
    if len(plans) < 2:
        return
    each = 0.0  # seconds that a sample takes at most
    with _multiplying_in(table["precision"]):
        for k, batch in enumerate(batches):
            if batch * each > MOST_SECONDS[device.type]:
                break
            x = _drawn(device, batch, topology.n_parents).to(dtype)
            for mode in MODES:
                times = _times(plans, topology, x, mode == "training")
                each = max(times.values()) / batch
                table[mode][backend]["ratios"][i][j][k] = _ratios(times)[backend]


def _fill_gaps(ratios: list[list[list[float | None]]]) -> None:
    """Gives every point that was not measured the ratio of the one before: at fewer samples, else
    with fewer relations; and 1 to those that have none.
    """
    for rows in ratios:
        for j, row in enumerate(rows):
            for k, ratio in enumerate(row):
                if ratio is None and k > 0:
                    row[k] = row[k - 1]
                elif ratio is None and j > 0:
                    row[k] = rows[j - 1][k]
                elif ratio is None:
                    row[k] = 1.0


@contextmanager
def _multiplying_in(name: str) -> Iterator[None]:
    """Lets torch multiply float32 as a precision demands."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _plans(
    topology: Topology, dtype: torch.dtype, names: Sequence[str] = tuple(BACKENDS)
) -> dict[str, Plan]:
    """Returns the plans of the backends that can run a transition; families only if it has some."""
    plans = {}
    shape = Shape.of(topology)
    for name in names:
        backend = BACKENDS[name]()
        if not backend.refusals(topology, dtype) and (name != "family" or shape.products):
            plan = backend.prepare(topology)
            if hasattr(plan, "row_major"):
                plan = plan.row_major()  # pyright: ignore[reportAttributeAccessIssue]
            plans[name] = plan
    return plans


def _ratios(times: dict[str, float]) -> dict[str, float]:
    """Returns the time of every backend as a share of dense's, in three digits."""
    base = times[Dense.name]
    return {
        name: float(f"{taken / base:.3g}") for name, taken in times.items() if name != Dense.name
    }


def _times(
    plans: Mapping[str, Plan], topology: Topology, x: Tensor, training: bool
) -> dict[str, float]:
    """Returns the seconds that every plan takes."""
    values = _drawn(x.device, topology.n_relations).to(x.dtype)
    bias = _drawn(x.device, topology.n_children).to(x.dtype)
    given = [tensor.requires_grad_(training) for tensor in (x.detach(), values, bias)]
    steps = {}
    for name, plan in plans.items():
        steps[name] = _step(plan, given, training)
    return interleaved(steps, x.device)


def _drawn(device: torch.device, *size: int) -> Tensor:
    """Returns random numbers that take none from the generators of torch."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*size, generator=generator, device=device)


def _step(plan: Plan, given: Sequence[Tensor], training: bool) -> Callable[[], object]:
    """Returns a forward pass, or forward and backward."""
    x, values, bias = given
    with torch.no_grad():
        z = plan(x, values, bias)
    gradient = torch.ones_like(z)

    def forward() -> None:
        with torch.no_grad():
            plan(x, values, bias)

    def both() -> None:
        torch.autograd.grad(plan(x, values, bias), given, gradient)

    return both if training else forward


def interleaved(
    steps: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, float]:
    """Returns the seconds that a call of every function takes, in the best of some rounds.

    The functions take turns, so that whatever else a machine does disturbs all of them alike.
    """
    counts = {}
    for name, step in steps.items():
        step()  # compiles what has to be compiled
        once = _seconds(step, 1, device)
        counts[name] = max(1, min(200, round(SECONDS[device.type] / max(once, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS[device.type]):
        for name, step in steps.items():
            times[name].append(_seconds(step, counts[name], device) / counts[name])
    return {name: min(taken) for name, taken in times.items()}


def _seconds(step: Callable[[], object], count: int, device: torch.device) -> float:
    clock = time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        clock = time.thread_time  # does not run while other processes do
    start = clock()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def _scattered(parents: int, children: int, share: float, device: torch.device) -> Topology:
    """Returns relations at random places, equally many from every parent."""
    each = max(1, round(share * children))
    # of random numbers the places of the smallest, in ascending order, [parents, each]
    drawn = _drawn(device, parents, children).topk(each, largest=False).indices
    child = drawn.sort(1).values.int()
    return _from_lists(child, children)


def _in_families(parents: int, children: int, share: float, device: torch.device) -> Topology:
    """Returns equal families, so many that they take a share of the rectangle."""
    count = round(1 / share)
    size = parents // count
    each = children // count
    family = (torch.arange(parents, device=device) // max(1, size)).clamp_(max=count - 1)
    child = family[:, None] * each + torch.arange(each, device=device)
    return _from_lists(child.int(), children)


def _in_tiles(parents: int, children: int, share: float, device: torch.device) -> Topology:
    """Returns tiles of 64 at random places."""
    generator = torch.Generator().manual_seed(0)
    return random_tiles(parents, children, share, 64, device, generator)


def _from_lists(child: Tensor, n_children: int) -> Topology:
    parents, each = child.shape
    ptr = torch.arange(parents + 1, device=child.device).mul_(each).int()
    return Topology(ptr, child.reshape(-1), n_children)


MAKERS: dict[str, Callable[[int, int, float, torch.device], Topology]] = {
    "sparse": _scattered,
    "family": _in_families,
    "tiles": _in_tiles,
}
