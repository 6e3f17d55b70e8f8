"""`grapnet doctor`: what this machine has for GrapNet, and a self-check."""

import argparse
import os
import platform
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grapnet as gn

from ._command import Cell, Command, Outcome, first_line, table

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OURS = ("test", "lint", "docs")  # extras for work on the library itself
_BACKENDS = ("reference", "dense", "family", "sparse")
_TOLERANCE = 1e-10  # of sums of a few dozen float64 products in another order


class Finding(NamedTuple):
    """One finding, below the heading of its section."""

    section: str
    name: str
    state: str  # "ok", "absent" for something optional, or "failed"
    text: str


def _run(given: argparse.Namespace) -> Outcome:
    found = [*_library(), *_gpu(), *_extras()]
    started = time.perf_counter()
    for name, check in _CHECKS.items():
        found.append(_tried(f"Self-check on {given.device}", name, "works", check, given.device))
    seconds = time.perf_counter() - started
    lines = []
    for section in dict.fromkeys(one.section for one in found):
        rows: list[list[Cell]] = []
        for one in found:
            if one.section == section:
                rows.append([one.state, one.name, one.text])
        lines += [section, *table(["", "", ""], rows)[1:], ""]
    failed = [one.name for one in found if one.state == "failed"]
    summary = "healthy"
    if failed:
        summary = f"failed: {', '.join(failed)}"
    lines.append(f"{summary}; self-check in {seconds:.1f} s")
    data = {
        "healthy": not failed,
        "findings": [one._asdict() for one in found],
        "seconds": seconds,
    }
    return Outcome("\n".join(lines), data, code=int(bool(failed)))


def _library() -> Iterator[Finding]:
    import torch

    section = "Library"
    yield Finding(section, "grapnet", "ok", gn.__version__)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Finding(section, "torch", "ok", f"{torch.__version__}, {build}")
    system = f"{platform.system()} {platform.machine()}"
    yield Finding(section, "python", "ok", f"{platform.python_version()} on {system}")
    cores = os.cpu_count()
    threads = torch.get_num_threads()
    features = torch.backends.cpu.get_cpu_capability()
    yield Finding(section, "CPU", "ok", f"{features}, {cores} cores, {threads} threads of torch")
    try:
        import_module("grapnet.execution._kernels")
    except ImportError as error:
        yield Finding(section, "compiled kernels", "absent", first_line(error))
    else:
        yield Finding(section, "compiled kernels", "ok", "installed")


def _gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "CUDA", "absent", "torch finds no device")
        return
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    yield _tried("GPU", "CUDA", ", ".join(names), _check_backends, torch.device("cuda"))


def _extras() -> Iterator[Finding]:
    """Yields what is installed of every extra in the metadata of the package."""
    required = metadata.requires("grapnet") or []
    missing = defaultdict[str, list[str]](list)
    for line in required:
        named = re.fullmatch(r"([\w.-]+)[^;]*;.*extra == [\"']([\w-]+)[\"'].*", line)
        if named and named[2] not in _OURS:
            missing[named[2]] += []
            try:
                metadata.version(named[1])
            except metadata.PackageNotFoundError:
                missing[named[2]].append(named[1])
    for extra, names in missing.items():
        if names:
            text = f'lacks {", ".join(names)}: pip install "grapnet[{extra}]"'
            yield Finding("Extras", extra, "absent", text)
        else:
            yield Finding("Extras", extra, "ok", "installed")


def _tried(
    section: str,
    name: str,
    text: str,
    check: "Callable[[torch.device], None]",
    device: "torch.device",
) -> Finding:
    """Returns how a small computation went."""
    try:
        check(device)
    except Exception as error:  # a broken installation fails in any way
        return Finding(section, name, "failed", f"{type(error).__name__}: {first_line(error)}")
    return Finding(section, name, "ok", text)


def _small_net(device: "torch.device") -> "gn.GrapNet":
    """Returns a net with shared children, with none, and with frozen relations."""
    import torch

    generator = torch.Generator().manual_seed(0)
    net = gn.GrapNet([8, 6, 4], dtype=torch.float64, device=device, generator=generator)
    with net.edit(reason="thin out and grow") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.6))
        nodes = edit.add_nodes(1, 3, owner="grown")
        edit.connect(net.layers[0][:2], nodes)
        edit.connect(nodes, net.layers[2])
        edit.freeze(net.layers[1][:2])
    gn.check(net)
    return net


def _check_editing(device: "torch.device") -> None:
    """Trains, cuts, undoes, trains on, saves and loads."""
    import torch

    net = _small_net(device)
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)

    def step() -> None:
        net(torch.ones(2, 8, dtype=torch.float64, device=device)).sum().backward()
        # A step raises when the optimizer did not follow the edits before it.
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = _tensors(net)
    with net.edit(reason="cut what was grown") as edit:
        edit.cut(net.select(owner="grown").outgoing())
    net.undo()
    gn.check(net)
    torch.testing.assert_close(_tensors(net), before, rtol=0, atol=0)
    step()
    with tempfile.TemporaryDirectory(prefix="grapnet-") as folder:
        path = Path(folder) / "net.safetensors"
        gn.save(path, net)
        loaded = gn.load(path, device=device)
    torch.testing.assert_close(_tensors(loaded), _tensors(net), rtol=0, atol=0)


def _check_backends(device: "torch.device") -> None:
    import torch

    net = _small_net(device)
    x = torch.linspace(-1, 1, 5 * 8, dtype=torch.float64, device=device).view(5, 8)
    parameters = list(net.parameters())
    net.execution.use("reference")
    gradients = torch.autograd.grad(net(x).square().sum(), parameters)
    with torch.no_grad():
        expected = net.walk(x)
    refused = {name for row in net.execution.describe() for name in row["refused"]}
    for name in set(_BACKENDS) - refused:
        net.execution.use(name)
        output = net(x)
        found = torch.autograd.grad(output.square().sum(), parameters)
        torch.testing.assert_close(output, expected, rtol=0, atol=_TOLERANCE)
        torch.testing.assert_close(found, gradients, rtol=0, atol=_TOLERANCE)


def _tensors(net: "gn.GrapNet") -> "dict[str, Tensor]":
    import torch

    state = net.state_dict()
    return {name: v.clone() for name, v in state.items() if isinstance(v, torch.Tensor)}


_CHECKS: "dict[str, Callable[[torch.device], None]]" = {
    "edit, train, undo, save": _check_editing,
    "backends agree": _check_backends,
}

COMMANDS = (
    Command(
        "doctor",
        "torch, CPU, GPU, kernels and extras of this machine, and a self-check",
        "See what it is",
        lambda parser: None,
        _run,
        ("doctor", "doctor --device cuda", "doctor --json"),
    ),
)
