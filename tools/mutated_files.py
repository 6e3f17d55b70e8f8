"""Loads many mutated checkpoints in parallel and counts what became of them.

`python -m tools.mutated_files 20000 --jobs 16 --json FILE` starts one referee
(`tests/checkpoint/referee.py`) per job, each with a seed of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Returns 1 when a file was loaded wrongly, a process ended, or something was executed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="how many files")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    arguments = parser.parse_args()
    result = judge(arguments.count, arguments.jobs)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(result["faults"] or result["crashes"] or result["executed"]))


def judge(count: int, jobs: int) -> dict[str, Any]:
    """Returns the counts of all referees together."""
    share = -(-count // (2 * jobs)) * 2
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for job in range(jobs):
            own = Path(folder, str(job))
            own.mkdir()
            command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.referee"]
            command += [str(own), str(share), str(1000 + job)]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
            )
            processes.append(process)
        outputs = [process.communicate()[0] for process in processes]
    outcomes: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    faults: list[str] = []
    executed: list[str] = []
    crashes = 0
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            crashes += 1
            continue
        report = json.loads(output)
        outcomes.update(report["outcomes"])
        fields.update(report["fields"])
        faults += report["faults"]
        executed += report["forbidden"]
    return {
        "files": share * jobs,
        "outcomes": dict(sorted(outcomes.items())),
        "fields": dict(sorted(fields.items())),
        "faults": faults,
        "executed": executed,
        "crashes": crashes,
    }


if __name__ == "__main__":
    raise SystemExit(main())
