"""The long random test: `python -m tests.soak --json results/soak.json` runs the machine's programs
by the thousand.

With `--spaces` they are programs on adopted models. With `--matrix` every edit of the matrix runs
on every space of every model, those of transformers included.
"""

import argparse
import functools
import json
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

CHUNK = 50  # programs from one seed
EVERY = 500  # programs between two lines of progress
FAILURES = (Exception, pytest.fail.Exception)  # the second is no Exception


class Outcome(NamedTuple):
    """What the programs of one seed came to."""

    counts: Counter[str]
    failure: str  # empty when all went well


def run_chunk(seed: int) -> Outcome:
    """Runs the programs of one seed in this process."""
    from tests import machine

    return _run(seed, machine.run_programs, machine.GraphMachine.counts)


def run_spaces_chunk(seed: int) -> Outcome:
    """Runs the programs of one seed on adopted models in this process."""
    from tests.spaces import programs

    return _run(seed, programs.run_programs, programs.SpaceMachine.counts)


def _run(seed: int, run_programs: Callable[[int, int], None], counts: Counter[str]) -> Outcome:
    import torch

    torch.set_num_threads(1)
    counts.clear()
    failure = ""
    try:
        run_programs(seed, CHUNK)
    except FAILURES:
        failure = f"seed {seed}\n{traceback.format_exc()}"
    return Outcome(Counter(counts), failure)


def run_model(name: str, device: str) -> Outcome:
    """Runs the matrix of edits on one model in this process."""
    import torch

    from tests.spaces import matrix
    from tests.spaces.subjects import subject

    torch.set_num_threads(1)
    if device == "cuda":
        # The comparisons are to the bit.
        torch.use_deterministic_algorithms(True, warn_only=True)
    counts: Counter[str] = Counter()
    failure = ""
    try:
        for run in (matrix.removals, matrix.additions, matrix.relations):
            for outcome in run(subject(matrix.CASES[name](), device=device)):
                counts[outcome.verdict] += 1
    except FAILURES:
        failure = f"{name}\n{traceback.format_exc()}"
    return Outcome(counts, failure)


def run_matrix(processes: int, device: str, seconds: float) -> dict[str, object]:
    """Runs the matrix of edits on all models, or on as many as the time allows, and returns the
    report.
    """
    from tests.spaces import matrix

    start = time.perf_counter()
    counts: Counter[str] = Counter()
    failures = []
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    run = functools.partial(run_model, device=device)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        done = 0
        found = pool.imap_unordered(run, matrix.CASES)
        while done < len(matrix.CASES):
            try:
                outcome = found.next(max(0.0, start + seconds - time.perf_counter()))
            except multiprocessing.TimeoutError:
                break
            done += 1
            counts += outcome.counts
            if outcome.failure:
                failures.append(outcome.failure)
                print(outcome.failure, flush=True)
        pool.terminate()
    return {
        "models": done,
        "of_models": len(matrix.CASES),
        "device": device,
        "edits": dict(sorted(counts.items())),
        "seconds": round(time.perf_counter() - start, 1),
        "failures": len(failures),
        "first_failure": failures[0] if failures else None,
        "processes": processes,
        "versions": _versions(),
    }


def soak(
    programs: int,
    processes: int,
    seed: int,
    seconds: float,
    run: Callable[[int], Outcome],
) -> dict[str, object]:
    """Runs at least so many programs, or as many as the time allows, and returns the report."""
    start = time.perf_counter()
    counts: Counter[str] = Counter()
    failures = []
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        seeds = (seed * 1_000_000 + number for number in range(2 * (programs // CHUNK + processes)))
        for outcome in pool.imap_unordered(run, seeds):
            shown = counts["programs"] // EVERY
            counts += outcome.counts
            if outcome.failure:
                failures.append(outcome.failure)
            if counts["programs"] // EVERY > shown:
                print(f"{dict(counts)}, {len(failures)} failures", flush=True)
            if counts["programs"] >= programs or time.perf_counter() > start + seconds:
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
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    import hypothesis
    import torch

    import grapnet

    return {
        "torch": torch.__version__,
        "hypothesis": hypothesis.__version__,
        "grapnet": grapnet.__version__,
    }


def main() -> int:
    """Reads the command line, runs, writes the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the report")
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--spaces", action="store_true", help="run programs on adopted models")
    kind.add_argument("--matrix", action="store_true", help="run the matrix of adopted models")
    parser.add_argument("--device", default="cpu", help="of the models of the matrix")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after this")
    chosen = parser.parse_args()
    if chosen.matrix:
        report = run_matrix(chosen.processes, chosen.device, chosen.seconds)
        amount = f"{report['models']} of {report['of_models']} models"
    else:
        run = run_spaces_chunk if chosen.spaces else run_chunk
        report = soak(chosen.programs, chosen.processes, chosen.seed, chosen.seconds, run)
        amount = f"{report['programs']:,} programs"
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{amount} in {report['seconds']} s, {report['failures']} failures: {chosen.json}")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
