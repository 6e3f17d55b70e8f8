"""`python -m benchmarks.run NAME`: checks, times, prints, and writes JSON."""

import argparse
import importlib
import json
import sys
from pathlib import Path

# modules, each imported only when it runs
BENCHMARKS = (
    "auto",
    "capture",
    "compiled",
    "costs",
    "edits",
    "execution",
    "files",
    "graft",
    "models",
    "repair",
    "rules",
)


def main() -> int:
    """Runs one benchmark; with --check the exit code says whether every bar was reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 and name each bar that was missed"
    )
    parser.add_argument(
        "--fast", action="store_true", help="small sizes only: shows that it runs, reaches no bar"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="capture, compiled: measure the rows with this text in their names",
    )
    parser.add_argument("--points", type=int, metavar="N", help="auto: the first N points alone")
    parser.add_argument("--seconds", type=float, metavar="S", help="costs: stop after S seconds")
    arguments = parser.parse_args()
    benchmark = importlib.import_module(f".{arguments.name}", __package__)
    limits = {
        "only": arguments.only,
        "points": arguments.points,
        "seconds": arguments.seconds,
    }
    given = {name: limit for name, limit in limits.items() if limit is not None}
    result = benchmark.measure(fast=arguments.fast, **given)
    print(benchmark.table(result))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    missed = benchmark.missed(result) if arguments.check else []
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
