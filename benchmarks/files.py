"""How large files are beside the nets in them, and what a long history costs."""

import os
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch

import grapnet as gn

from .timing import versions

SIZES = [784, 1024, 1024, 10]
REWIRINGS = 60
COMMITS = (10_000, 100_000)
# the largest value of every row
BARS = {
    "full: file / dense weights": 1.02,
    "90 % cut: file / the same wiring made so": 1.05,
    "rewired: file / the same wiring made so": 1.1,
    "wiring at 10 % density: bytes a relation": 1.5,
    "10,000 commits: CPU seconds of a save": 0.2,
    "100,000 commits: CPU seconds of a save": 1.0,
    "10,000 commits: bytes a commit in memory at the peak of a save": 300,
    "100,000 commits: bytes a commit in memory at the peak of a save": 300,
    "10,000 commits: bytes a commit in the file": 300,
    "100,000 commits: bytes a commit in the file": 300,
}


def measure(*, fast: bool) -> dict[str, Any]:
    """Returns one number for every row of `BARS`; `fast` uses small nets and short histories, under
    other names.
    """
    torch.manual_seed(0)
    sizes = SIZES
    rewirings = REWIRINGS
    commits = COMMITS
    if fast:
        sizes = [40, 60, 10]
        rewirings = 3
        commits = (50,)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.safetensors")
        rows |= _of_wirings(sizes, rewirings, path)
        for count in commits:
            rows |= _of_histories(count, path)
    return {
        "benchmark": "files",
        "settings": {"sizes": sizes, "rewirings": rewirings, "commits": list(commits)},
        "versions": versions(),
        "rows": rows,
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    lines = []
    for name, bar in BARS.items():
        found = result["rows"].get(name)
        if found is None:
            lines.append(f"{name}: not measured")
        elif found > bar:
            lines.append(f"{name}: {found:.4g}, the bar is {bar}")
    return lines


def table(result: dict[str, Any]) -> str:
    """Returns the result as a table."""
    lines = ["| | measured | bar |", "|---|---:|---:|"]
    for name, found in result["rows"].items():
        lines.append(f"| {name} | {found:.4g} | {BARS.get(name, '')} |")
    return "\n".join(lines)


def _of_wirings(sizes: list[int], rewirings: int, path: Path) -> dict[str, float]:
    rows = {}
    net = gn.GrapNet(sizes)
    dense = sum(parameter.nbytes for parameter in net.parameters())
    rows["full: file / dense weights"] = _bytes(net, path) / dense
    with net.edit(reason="cut nine tenths of every transition") as edit:
        for layer in net.layers[:-1]:
            edit.cut(layer.outgoing().smallest(fraction=0.9))
    ratio = _bytes(net, path) / _bytes(made_like(net), path)
    rows["90 % cut: file / the same wiring made so"] = ratio
    # What the file of a net without relations holds is not wiring.
    rest = _bytes(gn.GrapNet(sizes, density=0), path)
    relations = net.count().relations
    weights = sum(transition.weight.nbytes for transition in net.transitions)
    wiring = _bytes(made_like(net), path) - rest - weights
    rows["wiring at 10 % density: bytes a relation"] = wiring / relations
    net = gn.GrapNet(sizes, density=0.1)
    manager = gn.rules.RuleManager(seed=0)
    manager.add(gn.rules.Rewire(fraction=0.3))
    for step in range(rewirings):
        manager.apply(net, step)
    ratio = _bytes(net, path) / _bytes(made_like(net), path)
    rows["rewired: file / the same wiring made so"] = ratio
    return rows


def _of_histories(count: int, path: Path) -> dict[str, float]:
    """Measures a net with a long history of which only the outline is kept."""
    net = gn.GrapNet([8, 6, 4])
    net.journal.undo_limit = 1
    net.journal.detail_limit = 0
    before = _bytes(net, path)
    tracemalloc.start()
    for step in range(count):
        with net.edit(reason=f"rename at step {step * 100}", by="a rule") as edit:
            edit.set_owner(net.layers[1][0], f"owner {step % 2}")
    size = _bytes(net, path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    start = time.process_time()
    gn.save(path, net)
    seconds = time.process_time() - start
    return {
        f"{count:,} commits: CPU seconds of a save": seconds,
        f"{count:,} commits: bytes a commit in memory at the peak of a save": peak / count,
        f"{count:,} commits: bytes a commit in the file": (size - before) / count,
    }


def made_like(net: gn.GrapNet) -> gn.GrapNet:
    """Returns a net without history that has the relations, weights and biases of another."""
    relations = []
    biases = []
    for layer, following in zip(net.layers[:-1], net.layers[1:], strict=True):
        outgoing = layer.outgoing()
        parents = outgoing.parents - layer.uids[0]
        children = outgoing.children - following.uids[0]
        relations.append((parents, children, outgoing.weights.detach()))
        biases.append(following.biases.detach())
    return gn.GrapNet.from_relations(net.sizes, relations, biases=biases)


def _bytes(net: gn.GrapNet, path: Path) -> int:
    gn.save(path, net)
    return os.stat(path).st_size
