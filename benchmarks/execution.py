"""How fast the graph runs: ratios measured side by side in one process, after checking the
results.
"""

import copy
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn

from . import auto
from .contenders import (
    CsrLinear,
    Step,
    Work,
    autocast_step,
    captured_step,
    family_net,
    forward_pass,
    grown_head,
    linear,
    pruned_linear,
    tile_net,
    training_step,
    transition_step,
)
from .timing import threads, times_faster, versions

# density: faster than dense with input gradient, the goal, and the bar without input gradient
SPARSE_BARS = {
    0.1: (3.5, 5.0, 2.5),
    0.05: (6.0, 10.0, 4.5),
    0.01: (15.0, 40.0, 12.0),
}
# density: faster than dense under autocast to bfloat16, and than the same net in float32
HALF_BARS = {
    0.1: (2.5, 0.85),
    0.01: (7.0, 0.9),
}
# density of tiles of 64: faster than dense on CUDA, forward and backward in a graph, and the goal
TILE_BARS = {
    0.2: (2.5, 3.3),
    0.1: (4.5, 6.5),
    0.05: (7.0, 10.0),
}
MOST_MESSAGES = 2**26  # batch × relations that a result is checked with
LEVEL = 1 / 1.05  # "never slower by more than 5 %"


@dataclass(frozen=True)
class Row:
    """One comparison: `work` runs `faster` times as fast as `against`."""

    work: str
    against: str
    faster: float
    must: float | None = None
    goal: float | None = None
    threads: int = 1
    note: str = ""


def measure(*, fast: bool) -> dict[str, Any]:
    """Returns every comparison for this machine: its GPU when it has one, otherwise its CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows = list(_on_cuda(fast) if device == "cuda" else _on_cpu(fast))
    return {
        "benchmark": "execution",
        "settings": {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "fast": fast,
            "omp_wait_policy": os.environ["OMP_WAIT_POLICY"],
        },
        "versions": versions(),
        "rows": [asdict(row) for row in rows],
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    short = [
        row for row in result["rows"] if row["must"] is not None and row["faster"] < row["must"]
    ]
    lines = [
        f"{r['work']} against {r['against']}: {r['faster']:.2f}, the bar is {r['must']:.2f}"
        for r in short
    ]
    return lines + (
        ["these are small sizes, which reach no bar"] if result["settings"]["fast"] else []
    )


def table(result: dict[str, Any]) -> str:
    """Returns the result as text."""
    lines = [f"{'work':<64} {'against':<28} {'threads':>7} {'faster':>8} {'must':>6} {'goal':>6}"]
    for r in result["rows"]:
        bars = " ".join(f"{r[key]:>6.2f}" if r[key] else " " * 6 for key in ("must", "goal"))
        lines.append(
            f"{r['work']:<64} {r['against']:<28} {r['threads']:>7} {r['faster']:>8.2f} {bars}"
            f" {r['note']}"
        )
    return "\n".join(lines)


def markdown(result: dict[str, Any]) -> str:
    """Returns the comparisons as the table that the documentation shows, and those of `auto` in one
    line.
    """
    lines = ["| work | against | threads | times as fast | at least |", "|---|---|---:|---:|---:|"]
    autos = [r for r in result["rows"] if r["work"].startswith("auto")]
    for r in result["rows"]:
        if r not in autos:
            bar = f"{r['must']:.2f}" if r["must"] else ""
            lines.append(
                f"| {r['work']} | {r['against']} | {r['threads']} | {r['faster']:.2f} | {bar} |"
            )
    ratios = [r["faster"] for r in autos]
    others = sum(not r["note"].startswith("the same") for r in autos)
    summary = (
        f"`auto` against the `dense` backend at {len(autos)} points ({others} of them run by"
        " another backend): "
    )
    return (
        "\n".join(lines)
        + f"\n\n{summary}{min(ratios):.2f} times as fast at worst, {max(ratios):.1f} at best."
    )


def _on_cpu(fast: bool) -> Iterator[Row]:
    for count in (1, 2):
        with threads(count):
            yield from _sparse_training(fast, count)
            yield from _tiles(Work(*_small(fast)), fast, count)
    with threads(1):
        yield from _grown_head(fast)
        yield from _full(Work(*_small(fast)), fast)
        yield from _batch_of_one(fast)
        yield from _families(Work(*_small(fast)), {8: (4.0, 7.0)}, fast)
        yield from _dynamic_training(fast)
        yield from _sparse_against_reference(fast)
        yield from _snapshot(fast)
        yield from _half_training(fast)
        yield from _auto("cpu", fast)


def _on_cuda(fast: bool) -> Iterator[Row]:
    small = Work(*_small(fast), device="cuda")
    large = Work(4096, 16384, 4096, device="cuda", dtype=torch.bfloat16)
    large = replace(large, parents=256, children=512, batch=64) if fast else large
    yield from _full(small, fast)
    yield from _full(large, fast)
    yield from _families(large, {8: (5.5, None), 16: (9.0, None)}, fast)
    yield from _tiles(large, fast)
    yield from _auto("cuda", fast)


def _small(fast: bool) -> tuple[int, int]:
    return (64, 128) if fast else (1024, 4096)


def _repeats(fast: bool, count: int) -> int:
    return 2 if fast else count


def _grown_head(fast: bool) -> Iterator[Row]:
    """The paper's head, live, against a larger dense one."""
    x = torch.randn(64, 49)
    labels = torch.randint(0, 10, (64,))
    for name, fused in {"Adam": None, "fused Adam": True}.items():
        mlp = nn.Sequential(nn.Linear(49, 256), nn.ReLU(), nn.Linear(256, 10))
        net = grown_head()
        _check(net, x)
        cases = {
            "dense": training_step(mlp, x, labels, fused=fused),
            "net": training_step(net, x, labels, fused=fused),
        }
        ratio = times_faster(cases, "dense", repeats=_repeats(fast, 151))["net"]
        yield Row(
            f"grown head 49-240-10, training step, {name}",
            "nn.Linear 49-256-10",
            ratio,
            1 / 1.15,
            1.0,
        )


def _full(work: Work, fast: bool) -> Iterator[Row]:
    (x, target) = work.data()
    net = work.net()
    _check(net, x)
    cases = {"dense": training_step(linear(work), x, target), "net": training_step(net, x, target)}
    ratio = times_faster(cases, "dense", repeats=_repeats(fast, 25))["net"]
    yield Row(f"full {_size(work)}, training step", "nn.Linear", ratio, LEVEL, 1.0)
    if work.device == "cuda":
        yield _captured(f"full {_size(work)}", linear(work), net, x, target, LEVEL)


def _sparse_training(fast: bool, count: int) -> Iterator[Row]:
    """Training with relations cut at random, against dense, torch's sparse matrices and masks."""
    for density in (0.2, *SPARSE_BARS):
        for wanted in (True, False):
            work = Work(*_small(fast), density=density, input_gradient=wanted)
            (x, target) = work.data()
            net = work.net("sparse")
            _check(net, x)
            cases: dict[str, Step] = {"nn.Linear": training_step(linear(work), x, target)}
            cases["net"] = training_step(net, x, target)
            cases["torch.sparse CSR"] = training_step(CsrLinear(work), x, target)
            cases["nn.utils.prune"] = training_step(pruned_linear(work), x, target)
            times = times_faster(
                cases, "nn.Linear", repeats=_repeats(fast, 9), seconds=0.01 if fast else 0.1
            )
            name = f"{_size(work)}, training step{'' if wanted else ' without input gradient'}"
            must, goal, alone = SPARSE_BARS.get(density, (None, None, None))
            bars = (must, goal) if wanted else (alone, None)
            yield Row(name, "nn.Linear", times["net"], *bars, threads=count)
            yield Row(
                name, "torch.sparse CSR", times["net"] / times["torch.sparse CSR"], 1.0, 3.0, count
            )
            yield Row(
                name, "nn.utils.prune", times["net"] / times["nn.utils.prune"], 1.0, None, count
            )


def _half_training(fast: bool) -> Iterator[Row]:
    """Training under autocast to bfloat16, against dense and against the same net in float32."""
    for density, (must, level) in HALF_BARS.items():
        work = Work(*_small(fast), density=density)
        x, target = work.data()
        net = work.net("sparse")
        half = x.detach().bfloat16().requires_grad_()
        cases = {
            "nn.Linear": autocast_step(linear(work), half, target),
            "net": autocast_step(copy.deepcopy(net), half, target),
            "float32": training_step(net, x, target),
        }
        times = times_faster(
            cases, "nn.Linear", repeats=_repeats(fast, 9), seconds=0.01 if fast else 0.1
        )
        name = f"{_size(work)} under autocast to bfloat16, training step"
        yield Row(name, "nn.Linear under autocast", times["net"], must)
        yield Row(name, "the same net in float32", times["net"] / times["float32"], level)


def _batch_of_one(fast: bool) -> Iterator[Row]:
    for density, must, goal in ((0.1, 1.6, 3.4), (0.05, 3.3, None)):
        work = Work(
            *((64, 128) if fast else (768, 3072)), batch=1, density=density, input_gradient=False
        )
        (x, _) = work.data()
        net = work.net()
        _check(net, x)
        cases = {"dense": forward_pass(linear(work), x), "net": forward_pass(net, x)}
        ratio = times_faster(cases, "dense", repeats=_repeats(fast, 51))["net"]
        yield Row(f"{_size(work)}, forward", "nn.Linear", ratio, must, goal)


def _families(work: Work, bars: dict[int, tuple[float, float | None]], fast: bool) -> Iterator[Row]:
    x, target = work.data()
    for count, (must, goal) in bars.items():
        # On a GPU nothing but float32 was measured, so that "auto" runs others as "dense".
        on_cuda = work.device == "cuda"
        net = family_net(work, count, "family" if on_cuda else "auto")
        dense = linear(work)
        _check(net, x)
        times = {"dense": training_step(dense, x, target), "net": training_step(net, x, target)}
        ratio = times_faster(times, "dense", repeats=_repeats(fast, 15), seconds=0.1)["net"]
        name = f"{count} families of {_size(work)}"
        note = _runs(net, work.batch)[0]
        # where the loss takes as long as the transition, which is judged without it
        bar, aim = (None, None) if on_cuda else (must, goal)
        yield Row(f"{name}, training step", "nn.Linear", ratio, bar, aim, note=note)
        times = {"dense": transition_step(dense, x, target), "net": transition_step(net, x, target)}
        ratio = times_faster(times, "dense", repeats=_repeats(fast, 15), seconds=0.1)["net"]
        yield Row(f"{name}, forward and backward", "nn.Linear", ratio, note=note)
        if on_cuda:
            yield _captured(name, dense, net, x, target, must)


def _tiles(work: Work, fast: bool, count: int = 1) -> Iterator[Row]:
    """Relations that come in tiles, drawn at random."""
    x, target = work.data()
    dense = linear(work)
    for tile in (16,) if fast else (64, 128):
        for density, (must, goal) in TILE_BARS.items():
            case = replace(work, density=density)
            net = tile_net(case, tile)
            _check(net, x)
            name = f"tiles of {tile}, {_size(case)}"
            if work.device == "cuda":
                bars = (must, goal) if tile == 64 else (None, None)
                yield _captured(name, dense, net, x, target, *bars)
                continue
            times = {
                "dense": training_step(dense, x, target),
                "net": training_step(net, x, target),
            }
            ratio = times_faster(times, "dense", repeats=_repeats(fast, 9))["net"]
            yield Row(f"{name}, training step", "nn.Linear", ratio, 1.0, threads=count)


def _captured(
    name: str,
    dense: nn.Module,
    net: gn.GrapNet,
    x: Tensor,
    target: Tensor,
    must: float | None,
    goal: float | None = None,
) -> Row:
    """The same without the time that Python takes to launch it, which on a GPU can be longer than
    the work itself.
    """
    times = {"dense": captured_step(dense, x, target), "net": captured_step(net, x, target)}
    ratio = times_faster(times, "dense", repeats=15, seconds=0.1)["net"]
    return Row(f"{name}, forward and backward in a CUDA graph", "nn.Linear", ratio, must, goal)


def _dynamic_training(fast: bool) -> Iterator[Row]:
    """Twenty-five steps and an edit, which is undone: what training looks like while rules are at
    work.
    """
    x = torch.randn(64, 49)
    labels = torch.randint(0, 10, (64,))

    def trained(net: gn.GrapNet, model: Any) -> Step:
        optimizer = torch.optim.Adam(net.parameters())
        gn.attach(optimizer, net)

        def block() -> None:
            for _ in range(1 if fast else 25):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), labels).backward()
                optimizer.step()
            with net.edit(reason="one relation") as edit:
                edit.cut(net.layers[1][0], slots=[0])
            net.undo()

        return block

    start = grown_head()
    nets = {name: copy.deepcopy(start) for name in ("reference", "family", "walk")}
    for name in ("reference", "family"):
        nets[name].execution.use(name)
        _check(nets[name], x)
    cases = {name: trained(net, net.walk if name == "walk" else net) for name, net in nets.items()}
    times = times_faster(cases, "walk", repeats=_repeats(fast, 5), seconds=0.0)
    work = "family, dynamic training of the grown head"
    yield Row(
        work,
        "reference",
        times["family"] / times["reference"],
        2.0,
        note="paper 1.75 over its reference path",
    )
    yield Row(work, "literal walk", times["family"], 10.0)


def _sparse_against_reference(fast: bool) -> Iterator[Row]:
    work = Work(*_small(fast), density=0.1)
    (x, _) = work.data()
    net = work.net("sparse")
    other = copy.deepcopy(net)
    other.execution.use("reference")
    cases = {"reference": forward_pass(other, x), "sparse": forward_pass(net, x)}
    ratio = times_faster(cases, "reference", repeats=_repeats(fast, 9))["sparse"]
    yield Row(f"sparse, {_size(work)}, forward", "reference", ratio, 2.7, 10.0, note="paper 2.68")


def _snapshot(fast: bool) -> Iterator[Row]:
    work = Work(*((8, 16) if fast else (128, 512)), batch=64)
    (x, _) = work.data()
    net = work.net()
    snapshot = net.snapshot()
    torch.testing.assert_close(snapshot(x), net(x))
    cases = {"walk": forward_pass(net.walk, x), "snapshot": forward_pass(snapshot, x)}
    ratio = times_faster(cases, "walk", repeats=_repeats(fast, 5))["snapshot"]
    yield Row(
        f"snapshot, full {_size(work)}, forward", "literal walk", ratio, 38.0, note="paper 38.1"
    )
    cases = {"linear": forward_pass(linear(work), x), "snapshot": forward_pass(snapshot, x)}
    ratio = times_faster(cases, "linear", repeats=_repeats(fast, 51))["snapshot"]
    yield Row(f"snapshot, full {_size(work)}, forward", "nn.Linear", ratio, LEVEL, 1.0)


def _auto(device: str, fast: bool) -> Iterator[Row]:
    """Auto against dense at seeded points; where it picks dense there is nothing to compare."""
    for found in auto.rows_of(auto.drawn_points(device, 4 if fast else auto.POINTS), device, fast):
        note = found["runs"]
        if note == "dense":
            note = "the same plan, not measured"
        name = f"auto, {found['name']}"
        yield Row(name, "dense backend", found["faster"], auto.LEVEL, 1.0, note=note)


def _check(net: gn.GrapNet, x: Tensor) -> None:
    """Raises unless the backends that run this batch compute what the reference does, gradients
    included.

    Only so many of its rows are compared as the reference runs in reasonable time.
    """
    rows = max(1, min(len(x), MOST_MESSAGES // net.count().relations))
    results = []
    for chosen in (_runs(net, len(x)), ["reference"] * len(net.transitions)):
        model = copy.deepcopy(net)
        for t, name in enumerate(chosen):
            model.execution.use(name, t)
        if x.dtype == torch.bfloat16 and chosen[0] == "reference":
            model = model.float()  # a sum of many messages in bfloat16 is no yardstick
        given = x[:rows].detach().to(model.transitions[0].weight.dtype, copy=True).requires_grad_()
        output = model(given)
        gradients = torch.autograd.grad(
            output.float().square().mean(), [given, *model.parameters()]
        )
        results.append([output, *gradients])
    tolerance = 2e-2 if x.dtype == torch.bfloat16 else 1e-5
    for got, expected in zip(*results, strict=True):
        largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
        difference = float((got - expected).detach().abs().max()) if expected.numel() else 0.0
        if not difference <= tolerance * largest:
            raise AssertionError(
                f"{net!r} differs from its reference by {difference} where values reach {largest}"
            )


def _size(work: Work) -> str:
    share = "" if work.density == 1 else f" at {work.density:.1%}"
    return (
        f"{work.parents}×{work.children}{share}, batch {work.batch},"
        f" {str(work.dtype).removeprefix('torch.')}"
    )


def _runs(net: gn.GrapNet, batch: int, *, training: bool = True) -> list[str]:
    """Returns the names of the backends that run a net's transitions at a batch size."""
    return [row["runs"] for row in net.execution.describe(batch, training=training)]
