"""What a transition costs: which backend is expected to be the fastest, from measurements."""

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from grapnet.core._transition import Topology

from ._family import group_members

# a batch is treated like the next of these, a larger one like the last
BATCHES = tuple(2**n for n in range(13))
# another backend than dense must be expected to take less of its time than this
MARGIN = {
    "cpu": 0.93,
    "cuda": 0.5,
}
# a transition with more different numbers of children is not searched for families
MOST_DEGREES = 64
MOST_SHARE = 0.6  # nor is one in which more of the rectangle exists
MOST_BLOCKS = 4  # families of more different sizes than this are left to other backends


@dataclass(frozen=True)
class Shape:
    """The properties of a transition that determine its running time."""

    cells: int  # parents × children
    n_relations: int
    full: bool
    topology: Topology = field(repr=False, compare=False)

    @classmethod
    def of(cls, topology: Topology) -> "Shape":
        """Returns the shape of a topology."""
        return cls(
            topology.n_parents * topology.n_children,
            topology.n_relations,
            topology.is_full,
            topology,
        )

    @cached_property
    def products(self) -> int:
        """Cells inside families, where there are few sizes of family, looked for only where degrees
        allow it; or 0.
        """
        topology = self.topology
        groups = []
        if (
            topology.n_relations <= MOST_SHARE * self.cells
            and len(topology.degrees.unique()) <= MOST_DEGREES
        ):
            groups = group_members(topology)
        if len(groups) <= MOST_BLOCKS:
            return sum(members.numel() * degree for members, degree in groups)
        return 0

    def share(self, backend: str) -> float:
        """Returns the share of the matrix that a backend computes; 0 if it is not an option."""
        return (self.products if backend == "family" else self.n_relations) / max(self.cells, 1)


def batch_class(batch: int) -> int:
    """Returns the measured batch size to use for `batch`."""
    for bound in BATCHES:
        if batch <= bound:
            return bound
    return BATCHES[-1]


def fastest(
    shape: Shape, names: Sequence[str], *, device: str, batch: int, training: bool
) -> tuple[str, str | dict[str, float]]:
    """Returns the backend to run and the reason: text, or the expected times of the others."""
    if shape.full:
        return "dense", "every relation exists"
    tables = _measurements().get(device, {}).get("training" if training else "forward", {})
    if not tables:
        return "dense" if "dense" in names else "reference", f"no measurements for {device}"
    ratios = {
        name: _between(tables[name], shape.cells, share, batch)
        for name in names
        if name in tables
        and (
            name != "family"
            or "dense" not in names
            or _least(tables[name], shape.cells, batch) <= MARGIN[device]
        )
        and (share := shape.share(name)) > 0
    }
    best = min(ratios, key=lambda name: ratios[name], default="reference")
    if "dense" in names and ratios.get(best, 1.0) > MARGIN[device]:
        best = "dense"
    return best, ratios


def in_words(why: str | dict[str, float], batch: int) -> str:
    """Returns as a sentence why `fastest` has chosen."""
    if isinstance(why, str):
        return why
    said = ", ".join(
        f"{name} {ratio:.2f}" for name, ratio in sorted(why.items(), key=lambda item: item[1])
    )
    if said:
        return f"times expected at batch {batch}, dense being 1: {said}"
    return "it has no relations"


def _between(table: dict[str, Any], cells: float, share: float, batch: float) -> float:
    """Returns the ratio of two times between the measured ones, on logarithmic axes; outside, that
    at the border.
    """
    ratios: Any = table["ratios"]  # logarithms, [cells][share][batch]
    weights = [
        _weights(table[axis], at)
        for axis, at in (("cells", cells), ("shares", share), ("batches", batch))
    ]
    total = 0.0
    for i, a in weights[0]:
        for j, b in weights[1]:
            for k, c in weights[2]:
                total += a * b * c * ratios[i][j][k]
    return math.exp(total)


def _least(table: dict[str, Any], cells: float, batch: float) -> float:
    """Returns a ratio of two times that no share of the rectangle is expected to fall below."""
    near = [
        [n for n, _ in _weights(table[axis], at)]
        for axis, at in (("cells", cells), ("batches", batch))
    ]
    return math.exp(min(row[k] for i in near[0] for row in table["ratios"][i] for k in near[1]))


def _weights(axis: Sequence[float], at: float) -> list[tuple[int, float]]:
    """Returns the two neighbours of a point on an axis of logarithms and how much each counts."""
    place = min(max(math.log(max(at, 1e-9)), axis[0]), axis[-1])
    upper = min(bisect_right(axis, place), len(axis) - 1)
    share = (place - axis[upper - 1]) / (axis[upper] - axis[upper - 1])
    return [(upper - 1, 1 - share), (upper, share)] if share else [(upper - 1, 1.0)]


@cache
def _measurements() -> dict[str, Any]:
    """Returns logarithms of the measured ratios and of where they were measured, by device, mode
    and backend.

    The file names the command that measures them again.
    """
    found = json.loads(files("grapnet.execution").joinpath("costs.json").read_text())["devices"]
    return {
        device: {
            mode: _logarithms(measured[mode])
            for mode in ("forward", "training")
            if mode in measured
        }
        for device, measured in found.items()
    }


def _logarithms(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _logarithms(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_logarithms(item) for item in tree]
    return math.log(tree)
