"""A net of 10^8 relations: built, edited, run and trained in a process of its own, whose memory is
watched.
"""

import ctypes
import gc
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch

import grapnet as gn


def measure_huge(relations: int) -> dict[str, Any]:
    """Returns the seconds of each step, the peak memory and the bytes a relation costs at rest."""
    side = round(relations**0.5)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.huge", str(side)],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def run(side: int) -> dict[str, Any]:
    """Builds, edits, runs and trains a net of side × side relations."""
    _warm_up()
    start_kib = _resident_kib()
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        seconds[name] = round(time.perf_counter() - clock, 2)
        clock = time.perf_counter()

    net = gn.GrapNet([side, side])
    relations = net.count().relations
    lap("build")
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    with torch.no_grad():
        for batch in (1, 32):
            net(torch.randn(batch, side))
            lap(f"forward at batch {batch}")
    net(torch.randn(1, side)).square().mean().backward()
    lap("forward and backward at batch 1")
    optimizer.step()
    lap("Adam step")
    net(torch.randn(32, side)).square().mean().backward()
    lap("forward and backward at batch 32")
    net.journal.undo_limit = 1
    with net.edit("cut the weakest hundredth") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.01))
    lap("select and cut 1 %")
    with net.edit("grow") as edit:
        edit.connect(net.layers[0], edit.add_nodes(1, 4))
    lap("add 4 nodes and connect")
    optimizer.step()
    lap("Adam step after the edits")
    assert (
        optimizer.state[net.transitions[0].weight]["exp_avg"].shape
        == net.transitions[0].weight.shape
    )
    gn.check(net)
    lap("check")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for itself is not the net's
    left = net.count().relations
    return {
        "relations": relations,
        "relations_after_edits": left,
        "seconds": seconds,
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "bytes_per_relation_at_rest": round((_resident_kib() - start_kib) * 1024 / left, 2),
    }


def _warm_up() -> None:
    """Loads what torch loads lazily, so that it is not counted."""
    net = gn.GrapNet([8, 8])
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    net(torch.randn(1, 8)).sum().backward()
    optimizer.step()
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=1))


def _resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
