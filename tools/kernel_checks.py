"""What it costs that the compiled kernels check every index that they follow.

`python -m tools.kernel_checks --json FILE` builds the kernels once more, without the checks, and
runs training steps of sparse nets with both in turn, in one process. It needs a C++ compiler and
nanobind, as building the library does.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import grapnet as gn
from benchmarks.timing import threads, times_faster
from grapnet.execution import _native

ROOT = Path(__file__).resolve().parent.parent
MOST = 1.02  # the bar: how long a step with checks may take, beside one without
SIZES = ([784, 1024, 1024, 10], [256, 512, 256])
DENSITIES = (0.05, 0.1, 0.3)
BATCHES = (1, 64)
# Every function of checks.h that looks at indices, up to its body, and what it returns instead.
_UNCHECKED = (
    ("inline bool is_partition(const std::int32_t* ptr, Index rows, Index size) {", "true"),
    ("bool has(std::int32_t number) const {", "true"),
    ("bool has_all(const std::int32_t* numbers, Index count) const {", "true"),
    ("inline bool has_vector(const std::int32_t* numbers) const {", "true"),
)


def main() -> int:
    """Returns 1 when the checks cost more than the bar."""
    parser = argparse.ArgumentParser(prog="python -m tools.kernel_checks", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(build(Path(folder)), chosen.repeats)
    mean = statistics.geometric_mean(rows.values())
    for name, ratio in rows.items():
        print(f"{name}: {ratio:.3f}")
    print(f"mean: {mean:.3f}, the bar is {MOST}")
    result = {
        "with checks ÷ without": rows,
        "mean": mean,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "variant": _native.variants()[0],
    }
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(mean > MOST)


def build(folder: Path) -> ModuleType:
    """Builds the kernels without checks in a folder and loads them beside the others."""
    sources = folder / "grapnet" / "execution" / "csrc"
    shutil.copytree(ROOT / "grapnet" / "execution" / "csrc", sources)
    shutil.copy(ROOT / "CMakeLists.txt", folder)
    checks = sources / "checks.h"
    checks.write_text(without_checks(checks.read_text()))
    nanobind = [sys.executable, "-m", "nanobind", "--cmake_dir"]
    place = subprocess.run(nanobind, check=True, capture_output=True, text=True).stdout.strip()
    options = [f"-Dnanobind_DIR={place}", f"-DPython_EXECUTABLE={sys.executable}"]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": programs}
    for command in (
        ["cmake", "-S", str(folder), "-B", str(folder / "build"), *options],
        ["cmake", "--build", str(folder / "build"), "-j"],
    ):
        subprocess.run(command, check=True, capture_output=True, env=environment)
    (library,) = (folder / "build").glob("_kernels*.so")
    loader = ExtensionFileLoader("_kernels", str(library))
    spec = importlib.util.spec_from_loader("_kernels", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def without_checks(text: str) -> str:
    """Returns the source of the checks with functions that find everything right."""
    for start, answer in _UNCHECKED:
        if text.count(start) != 1:
            raise ValueError(f"checks.h has no single function that begins with {start!r}")
        text = text.replace(start, f"{start} return {answer};")
    return text


def measure(unchecked: ModuleType, repeats: int) -> dict[str, float]:
    """Returns the time of training steps with the kernels of the library ÷ without checks."""
    checked = vars(_native)["_native"]
    found = {}
    torch.manual_seed(0)
    with threads(1):
        for sizes in SIZES:
            for density in DENSITIES:
                net = gn.GrapNet(sizes, density=density)
                net.execution.use("sparse")
                for batch in BATCHES:
                    x = torch.randn(batch, sizes[0])
                    step = partial(_step, net, x)
                    faster = times_faster(
                        {
                            "checked": partial(_with, checked, step),
                            "unchecked": partial(_with, unchecked, step),
                        },
                        "checked",
                        repeats=repeats,
                    )
                    name = f"{'-'.join(map(str, sizes))}, {density:.0%} dense, batch {batch}"
                    found[name] = faster["unchecked"]
    setattr(_native, "_native", checked)  # noqa: B010
    return found


def _with(kernels: ModuleType, step: Callable[[], None]) -> None:
    """Runs a step with one of the two builds."""
    setattr(_native, "_native", kernels)  # noqa: B010
    step()


def _step(net: gn.GrapNet, x: torch.Tensor) -> Any:
    net.zero_grad()
    net(x).square().mean().backward()


if __name__ == "__main__":
    raise SystemExit(main())
