"""Auto: the backend that measurements of similar transitions let expect to be fastest."""

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from grapnet.core.relations import Topology

from .family import group_members

BATCHES = tuple(2**n for n in range(13))  # a batch is treated like the next of these, a larger one like the last
MARGIN = {"cpu": 0.93, "cuda": 0.5}  # another backend than dense must be expected to take less of its time than this
MOST_DEGREES = 64  # a transition with more different numbers of children is not searched for families
MOST_SHARE = 0.6  # nor is one in which more of the rectangle exists
MOST_BLOCKS = 4  # families of more different sizes than this are left to other backends


@dataclass(frozen=True)
class Shape:
    """What the time of running a transition depends on."""

    cells: int  # parents × children
    n_relations: int
    full: bool
    products: int  # cells inside families, where there are few sizes of family; 0 otherwise

    @classmethod
    def of(cls, topology: Topology) -> "Shape":
        """Returns the shape of a topology; families are looked for only where the degrees allow a few large ones."""
        cells, groups = topology.n_parents * topology.n_children, []
        if topology.n_relations <= MOST_SHARE * cells and len(topology.degrees.unique()) <= MOST_DEGREES:
            groups = group_members(topology)
        blocks = [members.numel() * degree for members, degree in groups] if len(groups) <= MOST_BLOCKS else []
        return cls(cells, topology.n_relations, topology.is_full, sum(blocks))

    def share(self, backend: str) -> float:
        """Returns how much of the rectangle a backend computes; 0 when it is out of the question."""
        return (self.products if backend == "family" else self.n_relations) / max(self.cells, 1)


def batch_class(batch: int) -> int:
    """Returns the batch size whose choice serves `batch`."""
    for bound in BATCHES:
        if batch <= bound:
            return bound
    return BATCHES[-1]


def fastest(shape: Shape, names: Sequence[str], *, device: str, batch: int, training: bool) -> tuple[str, str]:
    """Returns the name of the backend to run, of those that can, and why."""
    if shape.full:
        return "dense", "every relation exists"
    tables = _measurements().get(device, {}).get("training" if training else "forward", {})
    if not tables:
        return "dense" if "dense" in names else "reference", f"no measurements for {device}"
    ratios = {
        name: _between(tables[name], shape.cells, share, batch)
        for name in names
        if name in tables and (share := shape.share(name)) > 0
    }
    best = min(ratios, key=lambda name: ratios[name], default="reference")
    if "dense" in names and ratios.get(best, 1.0) > MARGIN[device]:
        best = "dense"
    said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(ratios.items(), key=lambda item: item[1]))
    return best, f"times expected at batch {batch}, dense being 1: {said}" if said else "it has no relations"


def _between(table: dict[str, Any], cells: float, share: float, batch: float) -> float:
    """Returns the ratio of two times between the measured ones, on logarithmic axes; outside, that at the border."""
    ratios: Any = table["ratios"]  # [cells][share][batch]
    weights = [_weights(table[axis], at) for axis, at in (("cells", cells), ("shares", share), ("batches", batch))]
    total = 0.0
    for i, a in weights[0]:
        for j, b in weights[1]:
            for k, c in weights[2]:
                total += a * b * c * math.log(ratios[i][j][k])
    return math.exp(total)


def _weights(axis: Sequence[float], at: float) -> list[tuple[int, float]]:
    """Returns the two neighbours of a point on an axis and how much each counts."""
    at = min(max(at, axis[0]), axis[-1])
    upper = min(bisect_right(axis, at), len(axis) - 1)
    low, high = math.log(axis[upper - 1]), math.log(axis[upper])
    share = (math.log(at) - low) / (high - low)
    return [(upper - 1, 1 - share), (upper, share)]


@cache
def _measurements() -> dict[str, Any]:
    """Returns the measured ratios by device, mode and backend; the file names the command that measures them again."""
    return json.loads(files("grapnet.execution").joinpath("costs.json").read_text())["devices"]
