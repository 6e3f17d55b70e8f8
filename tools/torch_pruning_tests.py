"""Runs Torch-Pruning's own test files on GrapNet, unchanged.

`python -m tools.torch_pruning_tests --checkout DIR [--json FILE]` runs every `DIR/tests/test_*.py`
in a process of its own, with `grapnet.integrations.torch_pruning` under the name torch_pruning. A
file with test functions is imported and its functions are called, as pytest does; any other runs as
a script. The exit code is the number of files that fail.

Models that the files ask for with `pretrained=True` start from random weights, as nothing can be
downloaded; all that a file asks for are drawn alike. Where torchvision comes without its compiled
operators, names without a function take their place, which is enough for models that classify.
"""

import argparse
import ast
import functools
import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch

from grapnet.integrations import torch_pruning

LINES = 5  # of what a script prints last
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def main() -> int:
    """Runs all files, prints a line for each, and returns how many fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, help="a checkout of Torch-Pruning")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for each file")
    parser.add_argument("--only", nargs="*", help="names of files, such as test_load")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    parser.add_argument("--run", type=Path, help="one file, which runs in this process")
    options = parser.parse_args()
    if options.run is not None:
        run(options.run)
        return 0
    if options.checkout is None:
        parser.error("--checkout is missing")
    paths = sorted((options.checkout / "tests").glob("test_*.py"))
    if options.only:
        paths = [path for path in paths if path.stem in options.only]
    results = []
    with ThreadPool(options.jobs) as pool:
        for result in pool.imap_unordered(functools.partial(run_apart, limit=options.limit), paths):
            results.append(result)
            results.sort(key=lambda result: result["file"])
            mark = "passed" if result["passed"] else "FAILED"
            line = f"{mark}  {result['seconds']:7.1f} s  {result['file']}  {result['problem']}"
            print(line, flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(summary(results), indent=1) + "\n")
    failed = sum(not result["passed"] for result in results)
    print(f"{len(results) - failed} of {len(results)} files pass")
    return failed


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the results of all files, with the versions that they belong to."""
    return {
        "passed": sum(result["passed"] for result in results),
        "files": results,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def run_apart(path: Path, limit: float) -> dict[str, Any]:
    """Runs a file in a process of its own, and returns what came of it."""
    command = [sys.executable, "-m", "tools.torch_pruning_tests", "--run", str(path.resolve())]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        code = None
        printed = []
        problem = f"not done after {limit:.0f} seconds"
    else:
        code = done.returncode
        printed = done.stdout.strip().splitlines()[-LINES:]
        problem = ""
        if code:
            problem = last_line(done.stderr) or f"exit code {code}"
    return {
        "file": path.name,
        "passed": code == 0,
        "functions": functions_of(path),
        # A script says here what it did, such as which models it has pruned.
        "printed": [] if functions_of(path) else [line.strip() for line in printed],
        "seconds": round(time.perf_counter() - start, 1),
        "problem": problem,
    }


def last_line(text: str) -> str:
    """Returns the last line of a text, which names the error of a traceback."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def functions_of(path: Path) -> list[str]:
    """Returns the names of the test functions of a file."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            found.append(node.name)
    return found


def run(path: Path) -> None:
    """Runs a file in this process, in an empty folder."""
    torch_pruning.install()
    prepare_torchvision()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        names = functions_of(path)
        if not names:
            runpy.run_path(str(path), run_name="__main__")
            return
        found = runpy.run_path(str(path), run_name=path.stem)
        for name in names:
            found[name]()


def prepare_torchvision() -> None:
    """Makes torchvision importable and its models start from random weights; does nothing where it
    is not installed.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        models = importlib.import_module("torchvision.models")
    except RuntimeError:
        # Its compiled operators do not fit to this torch.
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in OPERATORS:
            library.define(operator)
        # The names last as long as the library does.
        globals()["_library"] = library
        models = importlib.import_module("torchvision.models")
    for module in [models, *_modules_in(models)]:
        for name in models.list_models():
            if hasattr(module, name):
                setattr(module, name, without_weights(getattr(module, name)))


def _modules_in(package: Any) -> list[Any]:
    """Returns the modules that lie directly in a package and are imported."""
    prefix = f"{package.__name__}."
    return [module for name, module in sys.modules.items() if name.startswith(prefix)]


def without_weights(build: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes the same model, with random weights; always the same ones if it
    is asked for trained weights.
    """

    @functools.wraps(build)
    def built(*args: Any, pretrained: bool = False, weights: Any = None, **kwargs: Any) -> Any:
        if not pretrained and weights is None:
            return build(*args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build(*args, **kwargs)

    return built


if __name__ == "__main__":
    sys.exit(main())
