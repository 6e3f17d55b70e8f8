"""The long random test: `python -m tests.soak --json results/soak.json` runs the machine's programs
by the thousand.
"""

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

CHUNK = 100  # programs from one seed
TELL = 500  # programs between two lines of progress


class Outcome(NamedTuple):
    """What the programs of one seed came to."""

    counts: Counter[str]
    failure: str  # empty when all went well


def run_chunk(seed: int) -> Outcome:
    """Runs the programs of one seed in this process."""
    import torch

    from tests.machine import GraphMachine, run_programs

    torch.set_num_threads(1)
    GraphMachine.counts.clear()
    failure = ""
    try:
        run_programs(seed, CHUNK)
    except Exception:
        failure = f"seed {seed}\n{traceback.format_exc()}"
    return Outcome(Counter(GraphMachine.counts), failure)


def soak(programs: int, processes: int, seed: int) -> dict[str, object]:
    """Runs at least so many programs and returns the report."""
    import hypothesis
    import torch

    import grapnet

    start = time.perf_counter()
    counts: Counter[str] = Counter()
    failures = []
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        seeds = (seed * 1_000_000 + number for number in range(2 * (programs // CHUNK + processes)))
        for outcome in pool.imap_unordered(run_chunk, seeds):
            told = counts["programs"] // TELL
            counts += outcome.counts
            if outcome.failure:
                failures.append(outcome.failure)
            if counts["programs"] // TELL > told:
                print(f"{dict(counts)}, {len(failures)} failures", flush=True)
            if counts["programs"] >= programs:
                break
        pool.terminate()
    return {
        "programs": counts["programs"],
        "actions": counts["actions"],
        "operations": counts["operations"],
        "states_compared": counts["states compared"],
        "seconds": round(time.perf_counter() - start, 1),
        "failures": len(failures),
        "first_failure": failures[0] if failures else None,
        "seed": seed,
        "processes": processes,
        "versions": {
            "torch": torch.__version__,
            "hypothesis": hypothesis.__version__,
            "grapnet": grapnet.__version__,
        },
    }


def main() -> int:
    """Reads the command line, runs, writes the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the report")
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    report = soak(chosen.programs, chosen.processes, chosen.seed)
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"{report['programs']:,} programs in {report['seconds']} s, {report['failures']} failures:"
        f" {chosen.json}"
    )
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
