"""Measures what `auto` chooses by: the time of every backend, as a share of dense's, over a grid of
transitions.
"""

import copy
import json
import math
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import grapnet as gn

from .contenders import Step, Work, backward_step, family_net, forward_pass
from .timing import threads, times_faster

COSTS = Path(__file__).parents[1] / "grapnet/execution/costs.json"
SIZES = {
    "cpu": ((64, 64), (256, 256), (1024, 1024), (1024, 4096)),
    "cuda": ((256, 256), (1024, 1024), (1024, 4096), (4096, 4096), (4096, 16384)),
}
SHARES = {
    "sparse": (0.002, 0.005, 0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 0.9),
    "family": (1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2),  # of as many equal families
}
BATCHES = (1, 8, 32, 128, 512, 2048)
# batch × relations, above which the reference is not measured: it has lost long before
MOST_MESSAGES = 2**27
LOST = 100.0  # the ratio that is noted for it then


def measure(*, fast: bool) -> dict[str, Any]:
    """Returns the tables of this machine's device, beside those of other devices that are on
    file.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    devices = json.loads(COSTS.read_text())["devices"] if COSTS.exists() else {}
    with threads(1 if device == "cpu" else torch.get_num_threads()):
        devices[device] = _tables(device, fast)
    devices[device]["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
    command = "python -m benchmarks.run costs --json grapnet/execution/costs.json"
    return {"command": command, "devices": devices}


def missed(result: dict[str, Any]) -> list[str]:
    """Has no bars of its own: the execution benchmark judges what `auto` makes of the tables."""
    return []


def table(result: dict[str, Any]) -> str:
    """Returns the measured ratios as text."""
    lines = []
    for device, modes in result["devices"].items():
        for mode, backends in modes.items():
            for name, t in backends.items() if mode != "versions" else ():
                for i, cells in enumerate(t["cells"]):
                    for j, share in enumerate(t["shares"]):
                        ratios = " ".join(f"{ratio:7.3f}" for ratio in t["ratios"][i][j])
                        lines.append(
                            f"{device} {mode:<8} {name:<9} {cells:>9} cells, {share:6.1%}: {ratios}"
                        )
    return "\n".join(lines)


def _tables(device: str, fast: bool) -> dict[str, Any]:
    sizes = SIZES[device][:2] if fast else SIZES[device]
    batches = BATCHES[:2] if fast else BATCHES
    tables: dict[str, Any] = {"forward": {}, "training": {}}
    for name, shares in {
        "sparse": SHARES["sparse"],
        "reference": SHARES["sparse"],
        "family": SHARES["family"],
    }.items():
        for mode in ("forward", "training"):
            axes = {
                "cells": [a * b for a, b in sizes],
                "shares": list(shares),
                "batches": list(batches),
            }
            tables[mode][name] = {
                **axes,
                "ratios": [[[1.0] * len(batches) for _ in shares] for _ in sizes],
            }
    for i, (parents, children) in enumerate(sizes):
        work = Work(parents, children, device=device)
        for kind, shares in SHARES.items():
            for j, share in enumerate(shares):
                nets = _nets(work, kind, share)
                for k, batch in enumerate(batches):
                    for mode, ratios in _ratios(replace(work, batch=batch), nets, fast).items():
                        for name, ratio in ratios.items():
                            tables[mode][name]["ratios"][i][j][k] = float(f"{ratio:.3g}")
    return tables


def _nets(work: Work, kind: str, share: float) -> dict[str, gn.GrapNet]:
    """Returns one net under every backend that is compared at this kind of transition."""
    if kind == "family":
        net = family_net(work, round(1 / share))
        names = ("dense", "family")
    else:
        net = replace(work, density=share).net()
        names = ("dense", "sparse", "reference")
    nets = {name: copy.deepcopy(net) for name in names}
    for name, other in nets.items():
        other.execution.use(name)
    return nets


def _ratios(work: Work, nets: dict[str, gn.GrapNet], fast: bool) -> dict[str, dict[str, float]]:
    """Returns, for both modes, the time of every backend as a share of dense's."""
    x, target = work.data()
    relations = nets["dense"].count().relations
    lost = work.batch * relations > MOST_MESSAGES
    steps: dict[str, Callable[[gn.GrapNet], Step]] = {
        "forward": lambda net: forward_pass(net, x),
        "training": lambda net: backward_step(net, x, target),
    }
    found: dict[str, dict[str, float]] = {}
    for mode, step in steps.items():
        cases = {
            name: step(net) for name, net in nets.items() if not (lost and name == "reference")
        }
        faster = times_faster(cases, "dense", repeats=2 if fast else 5, seconds=0.005)
        found[mode] = {name: 1 / ratio for name, ratio in faster.items() if name != "dense"}
        if lost and "reference" in nets:
            found[mode]["reference"] = LOST
    assert all(math.isfinite(ratio) for ratios in found.values() for ratio in ratios.values())
    return found
