"""What recording Gram matrices adds to a forward pass, and how long a layer takes to repair."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import grapnet as gn
from grapnet import rules

from .timing import Timed, interleaved, versions

BATCH = 4096
SIZES = (768, 3072, 768)
ROWS = 256  # of a pass, for the subsample
ALL_BAR = 2.2  # times the pass without
SOME_BAR = 1.15  # times the pass without
SOLVE_BAR = 4.0  # seconds


@dataclass(frozen=True)
class Row:
    """One thing that was timed.

    A pass is compared with the pass without recording (`times`). A repair takes seconds of the
    processor, all threads together, which other programs do not change.
    """

    what: str
    columns: int
    seconds: float
    times: float | None
    bar: float


def measure(*, fast: bool) -> dict[str, Any]:
    """Returns the whole table; `fast` shrinks the net and reaches no bar."""
    torch.manual_seed(0)
    scale = 16 if fast else 1
    sizes = tuple(size // scale for size in SIZES)
    repeats = 2 if fast else 5
    rows = [*_passes(sizes, BATCH // scale, repeats), *_solves(sizes, BATCH // scale, repeats)]
    return {
        "benchmark": "repair",
        "settings": {
            "sizes": sizes,
            "batch": BATCH // scale,
            "rows": ROWS // scale,
            "threads": torch.get_num_threads(),
        },
        "versions": versions(),
        "rows": [asdict(row) for row in rows],
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    for row in result["rows"]:
        if row["columns"] < SIZES[1]:
            found.append(
                f"{row['what']} was measured at {row['columns']:,} nodes, the bar is for"
                f" {SIZES[1]:,}"
            )
        elif row["times"] is None and row["seconds"] > row["bar"]:
            found.append(f"{row['what']}: {row['seconds']:.2f} s, the bar is {row['bar']} s")
        elif row["times"] is not None and row["times"] > row["bar"]:
            found.append(
                f"{row['what']}: {row['times']:.2f} times a pass without, the bar is {row['bar']}"
            )
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the result as the table that the documentation shows."""
    lines = ["| what | nodes | seconds | times a pass without |", "|---|---:|---:|---:|"]
    for row in result["rows"]:
        times = "" if row["times"] is None else f"{row['times']:.2f}"
        lines.append(f"| {row['what']} | {row['columns']:,} | {row['seconds']:.3f} | {times} |")
    return "\n".join(lines)


def _passes(sizes: tuple[int, ...], batch: int, repeats: int) -> list[Row]:
    """Times forward passes without gradients, with and without a recorder."""
    net = gn.GrapNet(sizes)
    x = torch.randn(batch, sizes[0])
    whole = rules.GramRecorder(1)
    some = rules.GramRecorder(1, rows=max(1, batch * ROWS // BATCH))

    def run() -> None:
        with torch.no_grad():
            net(x)

    timed = {"without": Timed(run)}
    for name, recorder in (("all", whole), ("some", some)):
        timed[name] = Timed(run, before=lambda r=recorder: r.arm(net), after=recorder.disarm)
    seconds = interleaved(timed, repeats)
    base = seconds["without"]
    return [
        Row("a pass, all rows recorded", sizes[1], seconds["all"], seconds["all"] / base, ALL_BAR),
        Row(
            f"a pass, {some.rows} of {batch} rows recorded",
            sizes[1],
            seconds["some"],
            seconds["some"] / base,
            SOME_BAR,
        ),
    ]


def _solves(sizes: tuple[int, ...], batch: int, repeats: int) -> list[Row]:
    """Times the repair of an edit that removes half of a layer; the edit itself is not made."""
    net = gn.GrapNet(sizes)
    recorder = rules.GramRecorder(1)
    recorder.arm(net)
    with torch.no_grad():
        net(torch.randn(batch, sizes[0]))
    recorder.disarm()
    found = []
    for name, damping in (("given", 1e-4), ("chosen", None)):

        def solve(damping: float | None = damping) -> None:
            with net.edit(trial=True) as edit:
                edit.remove_nodes(net.layers[1][: sizes[1] // 2])
                rules.repair(net, edit, recorder, damping=damping)

        seconds = _processor_seconds(solve, max(2, repeats // 2))
        what = f"repair, half of the layer leaving, damping {name}"
        found.append(Row(what, sizes[1], seconds, None, SOLVE_BAR))
    return found


def _processor_seconds(run: Callable[[], None], repeats: int) -> float:
    """Returns the median of some runs, after one that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken[1:])
