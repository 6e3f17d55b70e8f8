"""Raises errors inside of operations and counts what the next public call finds.

`python -m tools.interrupts 10000 --signals 1000 --json FILE` interrupts edits, undo, redo, trials,
replays, joint edits, grafts and restores, of nets and of adopted models, at random lines and at
random times. Afterwards a world has to be all of before or all of after; see
`tests/core/injection.py`.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.core.injection import (
    OPERATIONS,
    Finding,
    Injection,
    Task,
    run_controls,
    run_task,
    spread,
)

FAILED = ("torn", "stuck", "wrong")
SHOWN = 40  # failures that are printed


def main() -> int:
    """Returns 1 when a world was found that is neither before nor after."""
    parser = argparse.ArgumentParser(prog="python -m tools.interrupts", description=__doc__)
    parser.add_argument("count", type=int, help="how many errors at random lines and times")
    parser.add_argument("--signals", type=int, default=0, help="how many signals beside them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", metavar="TEXT", help="operations with this in a name")
    parser.add_argument("--rounds", type=int, default=2, help="worlds for each operation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    chosen = parser.parse_args()
    names = [name for name in OPERATIONS if chosen.only in name]
    todo = spread(chosen.count, chosen.signals, chosen.seed, names, chosen.rounds)
    result = judge(todo, chosen.jobs)
    result["seed"] = chosen.seed
    summary = {key: value for key, value in result.items() if key != "failures"}
    print(json.dumps(summary, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(result["verdicts"].get(verdict) for verdict in FAILED))


def judge(tasks: Sequence[Task], jobs: int) -> dict[str, Any]:
    """Returns the counts of all injections."""
    # The processes to come fork, which is not safe where torch runs several threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.perf_counter()
    tally = Tally()
    shown = 0
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        controls = pool.apply_async(run_controls)
        for found in pool.imap_unordered(run_task, tasks):
            for injection, finding in found:
                tally.add(injection, finding)
            for failure in tally.failures[shown:SHOWN]:
                print(json.dumps(failure), flush=True)
            shown = len(tally.failures)
        result = tally.result()
        result["controls"] = controls.get()
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


class Tally:
    """Counts of many injections."""

    def __init__(self) -> None:
        self.verdicts: Counter[str] = Counter()
        self.ways: dict[str, Counter[str]] = {}
        self.operations: dict[str, Counter[str]] = {}
        self.torn_at: Counter[str] = Counter()
        self.no_grad_left: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.lines: set[str] = set()
        self.failures: list[dict[str, Any]] = []

    def add(self, injection: Injection, finding: Finding) -> None:
        """Counts one injection."""
        verdict = finding.verdict
        self.ways.setdefault(injection.way, Counter())[verdict] += 1
        if verdict == "missed":
            return
        self.verdicts[verdict] += 1
        self.operations.setdefault(injection.operation, Counter())[verdict] += 1
        self.lines.add(finding.place)
        if finding.no_grad_left:
            self.no_grad_left[finding.place] += 1
        if finding.lost:
            self.lost[f"{finding.place} ({injection.way}): {finding.raised}"] += 1
        if verdict in FAILED:
            self.torn_at[finding.place] += 1
            self.failures.append(
                {
                    "verdict": verdict,
                    "place": finding.place,
                    "operation": injection.operation,
                    "seed": injection.seed,
                    "way": injection.way,
                    "event": injection.event,
                    "error": injection.error.__name__,
                    "error kept": injection.keep,
                    "raised": finding.raised,
                    "next call": injection.call,
                    "parts": finding.parts[:12],
                }
            )

    def result(self) -> dict[str, Any]:
        """Returns the counts as plain data."""
        library = [place for place in self.lines if place.startswith("grapnet")]
        return {
            "injections": self.verdicts.total(),
            "verdicts": dict(sorted(self.verdicts.items())),
            "ways": {way: dict(sorted(counts.items())) for way, counts in self.ways.items()},
            "operations": {
                name: dict(sorted(counts.items()))
                for name, counts in sorted(self.operations.items())
            },
            "lines of the library": len(library),
            "failures by place": dict(self.torn_at.most_common()),
            "no_grad left by torch": dict(self.no_grad_left.most_common()),
            "other errors raised": dict(self.lost.most_common()),
            "failures": self.failures,
        }


if __name__ == "__main__":
    raise SystemExit(main())
