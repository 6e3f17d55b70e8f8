"""What a transition costs: which backend is expected to be the fastest, from measurements.

Measurements are tables by kind of device and by precision, which come with the library, or were
made on this machine by `net.execution.tune` and `grapnet tune` and are kept in a cache folder.
"""

import json
import math
import os
import platform
import sys
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from grapnet._atomic import atomic_write
from grapnet.core._transition import Topology

from . import _native
from ._family import group_members
from ._tiles import find_tiles

MODES = ("forward", "training")
CACHE = "GRAPNET_CACHE"  # in the environment: the folder of what `tune` measures
# a batch is treated like the next of these, a larger one like the last
BATCHES = tuple(2**n for n in range(13))
# another backend than dense must be expected to take less of its time than this: what is expected
# is off by up to a sixth, since tables know no other properties of a transition than its size
MARGIN = {
    "cpu": 0.82,
    "cuda": 0.7,
}
# the same by measurements of another device of the kind
FOREIGN_MARGIN = {
    "cpu": 0.75,
    "cuda": 0.5,
}
# the same by measurements of the transition itself
POINT_MARGIN = 0.93
NEAR = 1.15  # numbers of relations of which one stands for the other have at most this ratio
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
        products = self.n_relations
        if backend == "family":
            products = self.products
        elif backend == "tiles":
            # The costs are those of tiles of 64; smaller ones are slower.
            tiling = find_tiles(self.topology)
            if tiling is None or tiling.size < 64:
                products = 0
        return products / max(self.cells, 1)


def batch_class(batch: int) -> int:
    """Returns the measured batch size to use for `batch`."""
    for bound in BATCHES:
        if batch <= bound:
            return bound
    return BATCHES[-1]


@dataclass(frozen=True, eq=False)
class Table:
    """What was measured in one precision, as it is in a file: by mode and backend the ratios of its
    times to those of dense, [cells][share][batch].
    """

    data: dict[str, Any]

    @cached_property
    def logarithms(self) -> dict[str, Any]:
        """Logarithms of the ratios, and of where they were measured, by mode and backend."""
        return {mode: _logarithms(self.data[mode]) for mode in MODES}


class Why(NamedTuple):
    """Why a backend was chosen.

    Attributes:
        text: the reason, if it is no comparison of times.
        ratios: the expected time of every backend, that of dense being 1.
        source: where these come from.
    """

    text: str = ""
    ratios: Mapping[str, float] = {}
    source: str = "not needed"

    def in_words(self, batch: int) -> str:
        """Returns the reason as a sentence."""
        if self.text:
            return self.text
        ascending = sorted(self.ratios.items(), key=lambda item: item[1])
        listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ascending)
        if listed:
            return f"times expected at batch {batch}, dense being 1: {listed}"
        return "no other backend was measured that can run it"


_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def precision(device: str, dtype: torch.dtype) -> str:
    """Returns the precision in which matrices of a dtype are multiplied at this moment: the name of
    a dtype, "tf32", or "bf32" for float32 that a CPU multiplies as bfloat16.
    """
    if dtype == torch.float32 and device in MARGIN:
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        else:
            return _float32_precision(device)
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _float32_precision(device: str) -> str:
    matmul = torch.backends.cuda.matmul
    if torch.compiler.is_compiling():
        # the one setting that torch.compile reads and watches
        return "tf32" if device == "cuda" and matmul.allow_tf32 else "float32"
    try:
        setting = torch.get_float32_matmul_precision()
    except RuntimeError:
        # set for one kind of device, which torch has allowed since 2.9
        known = {"tf32": "high", "bf16": "medium"}
        backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
        setting = known.get(backend.matmul.fp32_precision, "highest")
    if device == "cuda":
        return "float32" if setting == "highest" else "tf32"
    return "bf32" if setting == "medium" else "float32"


def kind_of(device: str) -> str:
    """Returns the kind of a type of device that tables are for; CPUs differ by their vectors."""
    if device != "cpu":
        return device
    # What runs is limited by torch and by our kernels, whichever can do less.
    able = torch.backends.cpu.get_cpu_capability().lower()
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"cpu {platform.machine()} {able}"
    vectors = ("baseline", "avx2", "avx512")
    if able not in vectors:
        able = "baseline"
    if not _native.missing:
        able = min(able, _native.variant(), key=vectors.index)
    return f"cpu {able}"


def fastest(
    shape: Shape, names: Sequence[str], *, device: str, precision: str, batch: int, training: bool
) -> tuple[str, Why]:
    """Returns the backend to run, and why.

    Args:
        shape: the transition.
        names: the backends to choose from.
        device: the type of the device.
        precision: the name of the one in which it is multiplied.
        batch: the number of samples.
        training: whether gradients are computed.
    """
    if shape.full:
        return "dense", Why("every relation exists")
    found = _point(shape, device, precision, batch, training)
    if found is None:
        found = _grid(shape, names, device, precision, batch, training)
    if found is None:
        name = next((name for name in ("dense", "sparse") if name in names), "reference")
        unknown = f"{kind_of(device)} in {precision}"
        source = "not measured; net.execution.tune(x) measures on this machine"
        return name, Why(f"no measurements for {unknown}", {}, source)
    known, source, margin = found
    ratios = {name: ratio for name, ratio in known.items() if name in names}
    best = min(ratios, key=lambda name: ratios[name], default="reference")
    if "dense" in names and ratios.get(best, 1.0) > margin:
        best = "dense"
    return best, Why("", ratios, source)


def _point(
    shape: Shape, device: str, precision: str, batch: int, training: bool
) -> tuple[dict[str, float], str, float] | None:
    """Returns what was measured on this machine for a transition like this one, or None."""
    if device not in MARGIN:
        return None
    size = (shape.topology.n_parents, shape.topology.n_children)
    for point in reversed(tuned(device)["points"]):
        alike = (
            tuple(point["size"]) == size
            and point["precision"] == precision
            and point["batch"] == batch_class(batch)
            and point["training"] == training
        )
        least, most = sorted((point["relations"], max(shape.n_relations, 1)))
        if not alike or most > NEAR * least:
            continue
        ratios = point["ratios"]
        if "family" in ratios and shape.share("family") == 0:
            continue
        return ratios, f"tuned here on {point['date']} with this transition", POINT_MARGIN
    return None


def _grid(
    shape: Shape, names: Sequence[str], device: str, precision: str, batch: int, training: bool
) -> tuple[dict[str, float], str, float] | None:
    """Returns what to expect from a table, or None if there is none."""
    if device not in MARGIN:
        return None
    margin = MARGIN[device]
    table = tuned(device)["tables"].get(precision)
    if table is not None:
        source = f"tuned here on {table.data['date']}"
    else:
        kind = kind_of(device)
        table = shipped().get((kind, precision))
        if table is None:
            return None
        measured_on = table.data["device"]
        source = f"shipped table for {kind} in {precision}, measured on {measured_on}"
        if measured_on != device_name(device):
            margin = FOREIGN_MARGIN[device]
    tables = table.logarithms["training" if training else "forward"]
    ratios = {}
    for name in names:
        if name not in tables:
            continue
        # Families are only looked for where they can be worth it.
        is_option = name != "family" or _least(tables[name], shape.cells, batch) <= margin
        if "dense" in names and not is_option:
            continue
        share = shape.share(name)
        # Far fewer cells than were measured lie in many small families.
        if share > 0 and (name != "family" or share > math.exp(tables[name]["shares"][0]) / 2):
            ratios[name] = _between(tables[name], shape.cells, share, batch)
    return ratios, source, margin


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
    if len(axis) == 1:
        return [(0, 1.0)]
    place = min(max(math.log(max(at, 1e-9)), axis[0]), axis[-1])
    upper = min(bisect_right(axis, place), len(axis) - 1)
    share = (place - axis[upper - 1]) / (axis[upper] - axis[upper - 1])
    return [(upper - 1, 1 - share), (upper, share)] if share else [(upper - 1, 1.0)]


@cache
def shipped() -> dict[tuple[str, str], Table]:
    """Returns the tables that come with the library, by kind of device and precision.

    The file names the command that measures them again.
    """
    found = json.loads(files("grapnet.execution").joinpath("costs.json").read_text())["tables"]
    return {(table["kind"], table["precision"]): Table(table) for table in found}


def _logarithms(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _logarithms(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_logarithms(item) for item in tree]
    return math.log(tree)


def cache_folder() -> Path:
    """Returns the folder in which measurements of this machine are kept.

    It is `$GRAPNET_CACHE`, or the usual folder of the system for such files.
    """
    if os.environ.get(CACHE):
        return Path(os.environ[CACHE])
    home = Path.home()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local or home / "AppData" / "Local") / "grapnet" / "Cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "grapnet"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "grapnet"


def tuned(device: str) -> dict[str, Any]:
    """Returns what was measured on this machine: tables by precision, and points."""
    key = _key(device)
    if key not in _known:
        _known[key] = _read(_tuned_path(device), device)
    return _known[key]


def keep(
    device: str, tables: Mapping[str, dict[str, Any]], points: Sequence[Mapping[str, Any]]
) -> Path:
    """Adds measurements of this machine to those that are kept, and returns the path of the file.

    Tables replace those of the same precision, and points those of the same transition.

    Raises:
        OSError: the file cannot be written. The measurements hold in this process.
    """
    path = _tuned_path(device)
    before = tuned(device)
    places = [_place(point) for point in points]
    kept = [point for point in before["points"] if _place(point) not in places]
    after = {
        "machine": _machine(device),
        "tables": before["tables"] | {name: Table(data) for name, data in tables.items()},
        "points": [*kept, *points],
    }
    _known[_key(device)] = after
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(after, default=lambda table: table.data)
    with atomic_write(path) as partial:
        partial.write_text(text)
    return path


def _place(point: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        *point["size"],
        point["relations"],
        point["precision"],
        point["batch"],
        point["training"],
    )


# Every choice of a backend looks here, so that paths are put together only to read the files.
_known: dict[tuple[str | None, ...], dict[str, Any]] = {}


def _key(device: str) -> tuple[str | None, ...]:
    """Returns what determines the file of a device while this process runs."""
    folders = os.environ.get(CACHE), os.environ.get("XDG_CACHE_HOME")
    return kind_of(device), torch.__version__, *folders


def _read(path: Path, device: str) -> dict[str, Any]:
    """Returns the contents of a file of measurements; nothing if it is not one."""
    try:
        return _measurements_in(json.loads(path.read_text()), device)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        warnings.warn(
            f"{path} is ignored, it has no measurements of this machine ({error!r});"
            " `grapnet tune` writes it again",
            stacklevel=3,
        )
    return {"tables": {}, "points": []}


def _measurements_in(found: Any, device: str) -> dict[str, Any]:
    """Returns what `tuned` does from the contents of a file; raises if that is something else."""
    if found["machine"] != _machine(device):
        raise ValueError("it is of another one")
    tables = {name: Table(data) for name, data in found["tables"].items()}
    for table in tables.values():
        for mode in MODES:
            for one in table.logarithms[mode].values():
                axes = [len(one[axis]) for axis in ("cells", "shares", "batches")]
                if torch.tensor(one["ratios"]).shape != tuple(axes):
                    raise ValueError("a table has gaps")
    for point in found["points"]:
        _place(point)
        _logarithms(point["ratios"])
    dates = [entry["date"] for entry in (*found["tables"].values(), *found["points"])]
    if not all(isinstance(date, str) for date in dates):
        raise ValueError("a date is missing")
    return {"machine": found["machine"], "tables": tables, "points": found["points"]}


def _tuned_path(device: str) -> Path:
    machine = _machine(device)
    number = zlib.crc32(json.dumps(machine).encode())
    return cache_folder() / f"costs-{machine['kind'].replace(' ', '-')}-{number:08x}.json"


def _machine(device: str) -> dict[str, str]:
    """Returns what measurements depend on: if it changes, they are made anew."""
    return {
        "kind": kind_of(device),
        "name": device_name(device),
        "torch": torch.__version__,
        "kernels": _kernels_version(),
    }


@cache
def device_name(device: str) -> str:
    """Returns the name of a device by its manufacturer."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def _kernels_version() -> str:
    """Returns the version of the library, and a number of its compiled kernels."""
    try:
        found = metadata.version("grapnet")
    except metadata.PackageNotFoundError:
        found = "unknown"
    path = _native.path()
    if path is not None:
        found += f"-{zlib.crc32(path.read_bytes()):08x}"
    return found
