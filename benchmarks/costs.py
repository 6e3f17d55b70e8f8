"""Measures what `auto` chooses by: the time of every backend, as a share of dense's, over a grid of
transitions, in every precision.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch

from grapnet import execution

from .timing import threads

COSTS = Path(__file__).parents[1] / "grapnet/execution/costs.json"
PRECISIONS = {
    "cpu": ("float32", "bfloat16", "float16", "float64"),
    "cuda": ("float32", "tf32", "bfloat16", "float16"),
}
SMALL = {"sizes": ((16, 16), (32, 32)), "batches": (1, 8)}


def measure(*, fast: bool, seconds: float = math.inf) -> dict[str, Any]:
    """Returns the tables of this machine's device, beside those of other kinds that are on file.

    What is not measured after some seconds is left to dense.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precisions = PRECISIONS[device]
    sizes: dict[str, Any] = {}
    if fast:
        precisions = precisions[:2]
        sizes = SMALL
    with threads(1 if device == "cpu" else torch.get_num_threads()):
        found = execution.tune(
            device, precisions=precisions, is_kept=False, seconds=seconds, report=print, **sizes
        )
    tables = list(found.tables)
    measured = [_place(table) for table in tables]
    for table in json.loads(COSTS.read_text())["tables"]:
        if _place(table) not in measured:
            tables.append(table)
    command = "python -m benchmarks.run costs --json grapnet/execution/costs.json"
    return {"command": command, "tables": sorted(tables, key=_place)}


def missed(result: dict[str, Any]) -> list[str]:
    """Has no bars of its own: the execution benchmark judges what `auto` makes of the tables."""
    return []


def table(result: dict[str, Any]) -> str:
    """Returns the measured ratios as text."""
    lines = []
    for one in result["tables"]:
        for mode in ("forward", "training"):
            for backend, t in one[mode].items():
                for cells, rows in zip(t["cells"], t["ratios"], strict=True):
                    for share, row in zip(t["shares"], rows, strict=True):
                        ratios = " ".join(f"{ratio:7.3f}" for ratio in row)
                        lines.append(
                            f"{one['kind']} {one['precision']:<8} {mode:<8} {backend:<7}"
                            f" {cells:>9} cells, {share:6.1%}: {ratios}"
                        )
    return "\n".join(lines)


def _place(table: dict[str, Any]) -> tuple[str, str]:
    return table["kind"], table["precision"]
