"""`grapnet tune`: measures the backends on this machine, for `auto` to choose by."""

import argparse
import sys
import time
from typing import Any

from ._command import Cell, Command, CommandError, Outcome, table


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
    # Here, so that --help does not wait for torch.
    from grapnet import execution

    started = time.perf_counter()

    def report(size: str) -> None:
        taken = time.perf_counter() - started
        print(f"measured {size} after {taken:.0f} s", file=sys.stderr, flush=True)

    tuned = execution.tune(
        given.device,
        precisions=given.precision,
        sizes=[_size(text) for text in given.size or ()],
        batches=given.batch,
        report=report,
    )
    rows: list[list[Cell]] = []
    for one in tuned.tables:
        for backend in one["forward"]:
            shares = [_highest_share(one, mode, backend) for mode in ("forward", "training")]
            rows.append([one["precision"], backend, *shares])
    first = tuned.tables[0]
    measured = first["forward"]["sparse"]
    lines = [
        f"The share of the cells up to which a backend is faster than dense on {first['device']},"
        f" at batch {measured['batches'][-1]}, {measured['cells'][-1]:,} cells:",
        "",
        *table(["precision", "backend", "forward", "training"], rows),
        "",
        f"written to {tuned.path}",
    ]
    return Outcome("\n".join(lines), {"path": str(tuned.path), "tables": tuned.tables})


def _size(text: str) -> tuple[int, int]:
    parents, _, children = text.partition("x")
    if not (parents.isdecimal() and children.isdecimal()):
        raise CommandError(f"--size {text}: not a size", "write it as 256x1024")
    return int(parents), int(children)


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
