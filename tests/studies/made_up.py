"""A study of nothing: cheap seeds that leave a trace when they run, and fail when asked to."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grapnet.studies.command import Study
from grapnet.studies.drawing import Group, Row, Value, dots


@dataclass(frozen=True)
class Settings:
    """Sums of random numbers, no paper's table."""

    size: int = 5
    # a folder: a seed appends a line to its file there when it runs, and fails if `fail <seed>` is
    # in it
    trace: str = ""
    first_waits: float = 0.0  # seconds: of the first seed, so that others are done before it
    seeds: tuple[int, ...] = (7, 1, 4)


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns a sum, and on how many threads it was made."""
    if settings.trace:
        _leave_trace(Path(settings.trace), seed)
    numbers = torch.randn(
        settings.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return {"sum": float(numbers.sum()), "threads": torch.get_num_threads(), "pair": (seed, -seed)}


def _leave_trace(folder: Path, seed: int) -> None:
    with (folder / str(seed)).open("a") as file:
        file.write("ran\n")
    if (folder / f"fail {seed}").exists():
        raise RuntimeError(f"seed {seed} was told to fail")
    deadline = time.monotonic() + 120
    # until the seed it names is there
    while (folder / f"wait {seed}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for waiting in folder.glob("wait *"):
        if waiting.read_text() == str(seed):
            waiting.unlink()


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean of the sums, and the seeds in the order in which they came."""
    return {"mean": sum(row["sum"] for row in seeds.values()) / len(seeds), "order": list(seeds)}


def table(result: dict[str, Any]) -> str:
    """Returns one row a seed."""
    rows = [f"| {seed} | {row['sum']:.2f} |" for seed, row in result["seeds"].items()]
    return "\n".join(["| seed | sum |", "|---|---:|", *rows])


def missed(result: dict[str, Any]) -> list[str]:
    """Returns a line where fewer than five numbers were summed."""
    size = result["settings"]["size"]
    return [] if size >= 5 else [f"size: {size} numbers, the bar is 5"]


def draw(result: dict[str, Any], axes: Any) -> None:
    """Draws one dot a seed."""
    rows = [
        Row(f"seed {seed}", {"sum": Value(row["sum"])}) for seed, row in result["seeds"].items()
    ]
    dots(axes, [Group("", rows)], title="Sums", label="sum")


STUDY = Study(
    "made_up", Settings(), Settings(size=2, seeds=(7,)), one_seed, summarise, table, missed, draw
)
