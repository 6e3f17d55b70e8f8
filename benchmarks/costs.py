"""Measures what `auto` chooses by: the time of every backend, as a share of dense's, over a grid of
transitions, in every precision.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch

from grapnet.execution._tune import GRIDS, Grid, measured_tables

from .timing import threads

COSTS = Path(__file__).parents[1] / "grapnet/execution/costs.json"
PRECISIONS = {
    "cpu": ("float32", "bfloat16", "float16", "float64"),
    "cuda": ("float32", "tf32", "bfloat16", "float16"),
}
SMALL = Grid(((16, 16), (32, 32)), (1, 8), {"sparse": (0.05, 0.5), "family": (0.25, 0.5)})


def measure(*, fast: bool, seconds: float = math.inf) -> dict[str, Any]:
    """Returns the tables of this machine's device, beside those of other kinds that are on file.

    What is not measured after some seconds is left to dense.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    grid = SMALL if fast else GRIDS[device.type]
    precisions = PRECISIONS[device.type][:2] if fast else PRECISIONS[device.type]
    with threads(1 if device.type == "cpu" else torch.get_num_threads()):
        tables = measured_tables(device, precisions, grid, report=print, seconds=seconds)
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
