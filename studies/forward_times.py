"""Forward passes that take turns: a snapshot, and compiled relations, against slower ways to run
the same graph.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn

TURN = 0.01  # seconds that a case runs before the next one gets its turn, at least


def snapshot_ratios(sizes: Sequence[int], batch: int, rounds: int, seed: int) -> dict[str, Any]:
    """Returns how many times faster the snapshot of a full transition runs than what it was taken
    from.

    Beside it stand an `nn.Linear` of the same size, the largest difference from the reference, and
    the families.
    """
    torch.manual_seed(seed)
    net = gn.GrapNet(sizes)
    x = torch.randn(batch, sizes[0])
    by_reference = copy.deepcopy(net)
    snapshot = net.snapshot()
    by_reference.execution.use("reference")
    linear = nn.Linear(sizes[0], sizes[1])
    cases = {
        "snapshot": snapshot,
        "walk": net.walk,
        "reference": by_reference,
        "live net": net,
        "nn.Linear": linear,
    }
    found: dict[str, Any] = times_faster(cases, x, rounds)
    with torch.no_grad():
        found["difference"] = float((snapshot(x) - by_reference(x)).abs().max())
    return {**found, "families": len(net.execution.families(0))}


def compiled_ratios(
    sizes: Sequence[int], density: float, batch: int, rounds: int, seed: int
) -> dict[str, Any]:
    """Returns how many times faster compiled relations run; where they cannot, only why:
    `missing`.
    """
    torch.manual_seed(seed)
    net = gn.GrapNet(sizes, density=density)
    x = torch.randn(batch, sizes[0])
    refused = net.execution.describe(batch)[0]["refused"]
    if "sparse" in refused:
        return {"missing": "; ".join(refused["sparse"])}
    by_reference = copy.deepcopy(net)
    by_reference.execution.use("reference")
    net.execution.use("sparse")
    found = times_faster(
        {"compiled": net, "walk": by_reference.walk, "reference": by_reference}, x, rounds
    )
    with torch.no_grad():
        found["difference"] = float((net(x) - by_reference(x)).abs().max())
    return found


def times_faster(
    cases: Mapping[str, Callable[[Tensor], Tensor]], x: Tensor, rounds: int
) -> dict[str, float]:
    """Returns how many times faster the first case runs than each other: the median of the ratios
    within a round.
    """
    first, *others = cases
    with torch.no_grad():
        calls = {
            name: max(1, round(TURN / min(_seconds(case, x, 1) for _ in range(2))))
            for name, case in cases.items()
        }
        turns = [
            {name: _seconds(case, x, calls[name]) for name, case in cases.items()}
            for _ in range(rounds)
        ]
    return {name: median(one[name] / one[first] for one in turns) for name in others}


def _seconds(case: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        case(x)
    return (time.perf_counter() - start) / calls
