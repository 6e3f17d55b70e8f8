"""`grapnet doctor`: what this machine has for GrapNet, and whether what should work does."""

import argparse
import os
import platform
import re
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

import grapnet as gn
from grapnet.execution import native

from .checkup import check_up, runnable, small_net
from .columns import WIDTH
from .command import Command, Outcome

OURS = ("test", "lint", "docs")  # extras for work on the library itself


@dataclass(frozen=True)
class Finding:
    """What was found about one thing.

    Attributes:
        section: the heading it is told under.
        name: what was looked at.
        state: "ok", "absent" for something optional that is not there, or "failed" for what should
            work and does not.
        told: what was found.
    """

    section: str
    name: str
    state: str
    told: str


def _configure(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: `doctor` has only the options of all commands."""


def _run(given: argparse.Namespace) -> Outcome:
    found = [one for look in (_library, _machine, _gpu, _extras) for one in look()]
    started = time.perf_counter()
    found += list(_self_check(given.device))
    seconds = time.perf_counter() - started
    failed = [one for one in found if one.state == "failed"]
    absent = [one for one in found if one.state == "absent"]
    end = (
        f"{len(failed)} of {len(found)} failed: {', '.join(one.name for one in failed)}"
        if failed
        else "healthy"
    )
    optional = (
        f"; optional and not there: {', '.join(one.name for one in absent)}" if absent else ""
    )
    lines = [
        *_lines(found),
        "",
        f"{end} (self-check: {seconds:.2f} s){optional}",
    ]
    data: dict[str, Any] = {
        "healthy": not failed,
        "findings": [asdict(one) for one in found],
        "seconds": seconds,
    }
    return Outcome("\n".join(lines), data, code=1 if failed else 0)


def _lines(found: list[Finding]) -> list[str]:
    lines = []
    for section in dict.fromkeys(one.section for one in found):
        lines += ["", section]
        for one in (one for one in found if one.section == section):
            sign = {"ok": "ok", "absent": "–", "failed": "FAILED"}[one.state]
            start = f"  {sign:<6}  {one.name:<17}  "
            rest = " " * len(start)
            lines += textwrap.wrap(
                one.told,
                WIDTH,
                initial_indent=start,
                subsequent_indent=rest,
                break_long_words=False,
            )
    return lines[1:]


def _library() -> Iterator[Finding]:
    yield Finding("Library", "grapnet", "ok", gn.__version__)
    cuda = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "ROCm"
        if torch.version.hip
        else "CPU only"
    )
    yield Finding("Library", "torch", "ok", f"{torch.__version__}, built for {cuda}")
    yield Finding(
        "Library",
        "python",
        "ok",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    )
    if native.missing:
        yield Finding("Library", "compiled kernels", "absent", native.missing)
    else:
        yield Finding(
            "Library",
            "compiled kernels",
            "ok",
            f"variants this CPU runs: {', '.join(native.variants())}",
        )


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    features = torch.backends.cpu.get_cpu_capability()
    yield Finding("Machine", "CPU", "ok", f"torch uses {features}; {cores} cores for this process")
    yield Finding(
        "Machine", "threads", "ok", f"torch computes with {torch.get_num_threads()} (--threads N)"
    )


def _gpu() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        why = (
            "torch was built without CUDA" if torch.version.cuda is None else "torch sees no device"
        )
        yield Finding("GPU", "CUDA", "absent", why)
    else:
        told = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
        yield _tried("GPU", "CUDA", told, _computes)
    if find_spec("triton") is None:
        yield Finding(
            "GPU",
            "Triton",
            "absent",
            "the sparse backend needs it on GPUs; CUDA builds of torch bring it",
        )
    elif not torch.cuda.is_available():
        yield Finding("GPU", "Triton", "absent", f"{_version('triton')}, of no use without a GPU")
    else:
        yield _tried("GPU", "Triton", _version("triton"), _triton_runs)


def _extras() -> Iterator[Finding]:
    """Tells of every extra in the metadata of the installed package."""
    wanted = defaultdict[str, list[str]](list)
    try:
        required = metadata.requires("grapnet") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "Extras", "grapnet", "absent", "runs from a source tree; install it: pip install -e ."
        )
        return
    for line in required:
        named = re.fullmatch(r"([\w.-]+)[^;]*;.*extra == [\"']([\w-]+)[\"'].*", line)
        if named and named[2] not in OURS:
            wanted[named[2]].append(named[1])
    for extra, names in wanted.items():
        versions = {name: _version(name) for name in names}
        lacks = [name for name, version in versions.items() if not version]
        told = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        missing = f'lacks {", ".join(lacks)}. Run: pip install "grapnet[{extra}]"'
        yield Finding("Extras", extra, "absent" if lacks else "ok", missing if lacks else told)


def _self_check(device: torch.device) -> Iterator[Finding]:
    found = check_up(device)
    told = dict.fromkeys(found, "as it should")
    if not found["backends agree"]:
        backends = ", ".join(runnable(small_net(device)))
        told["backends agree"] = (
            f"{backends}: values with Algorithm 1 node by node, gradients with the reference"
        )
    for name, wrong in found.items():
        yield Finding(
            f"Self-check on {device}", name, "failed" if wrong else "ok", wrong or told[name]
        )


def _tried(section: str, name: str, told: str, work: Callable[[], str]) -> Finding:
    """Returns how a tiny computation went, which says what is wrong or nothing."""
    try:
        wrong = work()
    except Exception as error:  # a driver may fail in any way
        wrong = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return Finding(
        section,
        name,
        "failed" if wrong else "ok",
        f"{told}: {wrong}" if wrong else f"{told}, computes",
    )


def _computes() -> str:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    return (
        ""
        if (x @ x.t()).cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]]
        else "a product of matrices is wrong"
    )


def _triton_runs() -> str:
    net = small_net(torch.device("cuda"))
    x = torch.ones(3, 8, dtype=torch.float64, device="cuda")
    with torch.no_grad():
        net.execution.use("reference")
        expected = net(x)
        net.execution.use("sparse")
        found = net(x)
    return (
        "" if torch.allclose(found, expected) else "the sparse backend differs from the reference"
    )


def _version(name: str) -> str:
    """Returns the version of an installed package, or nothing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


COMMANDS: tuple[Command, ...] = (
    Command(
        "doctor",
        "torch, CPU, GPU, kernels and extras of this machine, and a self-check",
        "See what it is",
        _configure,
        _run,
        ("doctor", "doctor --device cuda"),
    ),
)
