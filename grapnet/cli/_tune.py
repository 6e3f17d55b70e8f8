"""`grapnet tune`: measures the backends on this machine, for `auto` to choose by."""

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from ._command import Cell, Command, CommandError, Outcome, table

if TYPE_CHECKING:
    from grapnet.execution._tune import Grid

_PRECISIONS = {
    "cpu": ("float32", "bfloat16"),
    "cuda": ("float32", "tf32", "bfloat16", "float16"),
}


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        action="append",
        metavar="NAME",
        help="float64, float32, tf32, bfloat16 or float16; may be repeated (default: float32 and"
        " bfloat16, on CUDA tf32 and float16, too)",
    )
    parser.add_argument(
        "--size",
        action="append",
        metavar="PxC",
        help="parents x children of a transition to measure; may be repeated (default: from 64x64"
        " to 1024x4096, on CUDA to 4096x16384)",
    )
    parser.add_argument(
        "--batch",
        action="append",
        type=int,
        metavar="N",
        help="a batch size to measure; may be repeated (default: 1 to 512, on CUDA to 2048)",
    )


def _run(given: argparse.Namespace) -> Outcome:
    from grapnet.execution._tune import GRIDS, PRECISIONS, tune_grid

    device = given.device
    if device.type not in GRIDS:
        raise CommandError(
            f"the backends are not measured on {device.type}", "tune on cpu or on cuda"
        )
    precisions = given.precision or _PRECISIONS[device.type]
    known = [name for name in PRECISIONS if name != "tf32" or device.type == "cuda"]
    for name in precisions:
        if name not in known:
            raise CommandError(
                f"--precision {name}: no such precision on {device.type}",
                f"known are {', '.join(known)}",
            )
    grid = _grid(given, GRIDS[device.type])
    started = time.perf_counter()

    def report(size: str) -> None:
        taken = time.perf_counter() - started
        print(f"measured {size} after {taken:.0f} s", file=sys.stderr, flush=True)

    path, tables = tune_grid(device, precisions, grid, report)
    rows: list[list[Cell]] = []
    for one in tables:
        for backend in grid.shares:
            shares = [_highest_share(one, mode, backend) for mode in ("forward", "training")]
            rows.append([one["precision"], backend, *shares])
    titles = ["precision", "backend", "forward", "training"]
    lines = [
        f"The share of relations up to which a backend is faster than dense on"
        f" {tables[0]['device']}, {grid.sizes[-1][0]}×{grid.sizes[-1][1]},"
        f" batch {grid.batches[-1]}:",
        "",
        *table(titles, rows),
        "",
        f"written to {path}",
    ]
    return Outcome("\n".join(lines), {"path": str(path), "tables": tables})


def _grid(given: argparse.Namespace, default: "Grid") -> "Grid":
    from dataclasses import replace

    sizes = []
    for text in given.size or ():
        parents, _, children = text.partition("x")
        if not (parents.isdecimal() and children.isdecimal() and int(parents) and int(children)):
            raise CommandError(f"--size {text}: not a size", "write it as 256x1024")
        sizes.append((int(parents), int(children)))
    if any(batch < 1 for batch in given.batch or ()):
        raise CommandError("--batch: at least 1", "grapnet tune --batch 256")
    return replace(
        default,
        sizes=sorted(set(sizes), key=lambda size: size[0] * size[1]) or default.sizes,
        batches=sorted(set(given.batch or ())) or default.batches,
    )


def _highest_share(one: dict[str, Any], mode: str, backend: str) -> float | None:
    """Returns the largest measured share at which a backend takes less time than dense, for the
    largest size and batch; None if there is none.
    """
    measured = one[mode][backend]
    found = None
    for share, row in zip(measured["shares"], measured["ratios"][-1], strict=True):
        if row[-1] < 1:
            found = share
    return found


COMMANDS = (
    Command(
        "tune",
        "measure the backends on this machine, for `auto` to choose by",
        "See what it is",
        _configure,
        _run,
        ("tune", "tune --device cuda --precision bfloat16", "tune --size 768x3072 --batch 256"),
    ),
)
