"""What an edit costs, beside one dense training step of the same rectangle; on a machine with CUDA,
what a commit costs there.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet import rules

from .huge import measure_huge
from .timing import Timed, interleaved, versions

BATCH = 256
OUTPUTS = 16
RECTANGLES = {  # relations of the first transition: parents × children
    "1e4": (100, 100),
    "1e5": (256, 400),
    "1e6": (1000, 1000),
    "4e6": (1024, 4096),
    "1e7": (2500, 4000),
}
# at 4e6, in dense steps
BARS = {
    "cut one": 0.3,
    "cut 10 %": 1.0,
    "add 64 nodes": 0.5,
    "freeze one node": 0.5,
}
# the same rectangle, always run by one backend
PLANS = {
    "4e6 dense": "dense",
    "4e6 sparse": "sparse",
}
PLAN_BARS = ("cut one", "cut 10 %")  # that hold whatever runs it
HUGE_BARS = {"peak_gib": 16.0, "bytes_per_relation_at_rest": 32.0}
# on CUDA, in milliseconds
CUDA_RECTANGLES = {"1024×4096": (1024, 4096), "8192×8192": (8192, 8192)}
CUDA_BARS = {
    "1024×4096": {"cut one": 2.0, "cut 10 %": 4.0},
    "8192×8192": {"cut one": 3.0, "cut 10 %": 30.0},
    "RigL": {"apply": 8.0},
}
RIGL_SIZES = (1024, 4096, 1024)
RIGL_DENSITY = 0.12  # a million relations


@dataclass
class Row:
    """One size of net."""

    relations: int
    plan: str
    dense_step_ms: float
    ratios: dict[str, float]  # each kind of commit, in dense steps
    milliseconds: dict[str, float]
    bytes_per_relation: float  # wiring, weights, gradients, Adam's state and the plan


def measure(*, fast: bool) -> dict[str, Any]:
    """Returns the whole table; `fast` leaves out the large nets and the bars."""
    if torch.cuda.is_available():
        return _measure_cuda(fast=fast)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        names = ["1e4", "1e5"] if fast else list(RECTANGLES)
        repeats = 3 if fast else 9
        rows = {
            name: asdict(_measure_rectangle(*RECTANGLES[name], "auto", repeats)) for name in names
        }
        for name, plan in PLANS.items():
            rectangle = RECTANGLES["1e4" if fast else "4e6"]
            rows[name] = asdict(_measure_rectangle(*rectangle, plan, repeats))
    finally:
        torch.set_num_threads(threads)
    huge = measure_huge(relations=10**6 if fast else 10**8)
    return {
        "benchmark": "edits",
        "settings": {"batch": BATCH, "threads": 1, "optimizer": "Adam"},
        "versions": _versions(),
        "rows": rows,
        "huge": huge,
    }


def _versions() -> dict[str, str]:
    return versions()


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    if "device" in result["settings"]:
        return _missed_on_cuda(result)
    for row, names in {"4e6": tuple(BARS), **dict.fromkeys(PLANS, PLAN_BARS)}.items():
        measured = result["rows"].get(row, {"relations": 0, "ratios": {}})
        for name in names:
            ratio = measured["ratios"].get(name)
            if measured["relations"] < 4 * 10**6 or ratio > BARS[name]:
                found.append(
                    f"{name} at {row}: {ratio} dense steps, the bar is {BARS[name]} at 4e6"
                    " relations"
                )
    for name, bar in HUGE_BARS.items():
        if result["huge"]["relations"] < 10**8 or result["huge"][name] > bar:
            found.append(
                f"{name} at {result['huge']['relations']:.0e} relations: {result['huge'][name]},"
                f" the bar is {bar}"
            )
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the result as text."""
    if "device" in result["settings"]:
        return markdown(result)
    head = f"{'relations':>10} {'plan':<7}{'dense step':>11}"
    lines = [f"{head} {' '.join(f'{name:>18}' for name in BARS)} {'bytes/relation':>15}"]
    for row in result["rows"].values():
        head = f"{row['relations']:>10,} {row['plan']:<7}{row['dense_step_ms']:>9.1f}ms"
        cells = " ".join(
            f"{row['ratios'][n]:>7.3f} ({row['milliseconds'][n]:>6.1f}ms)" for n in BARS
        )
        lines.append(f"{head} {cells} {row['bytes_per_relation']:>15.1f}")
    return (
        "\n".join(lines)
        + "\n\n"
        + "\n".join(f"{key}: {value}" for key, value in result["huge"].items())
    )


def markdown(result: dict[str, Any]) -> str:
    """Returns the ratios as the table of docs/performance.md; on CUDA the milliseconds."""
    if "device" in result["settings"]:
        return _markdown_of_cuda(result)
    lines = ["| relations | plan | " + " | ".join(BARS) + " |", "|---:|---|" + "---:|" * len(BARS)]
    for row in result["rows"].values():
        cells = " | ".join(f"{row['ratios'][name]:.2f}" for name in BARS)
        lines.append(f"| {row['relations']:,} | {row['plan']} | {cells} |")
    return "\n".join(lines)


def _measure_rectangle(parents: int, children: int, plan: str, repeats: int) -> Row:
    net, optimizer = _net_with_adam_state(parents, children)
    net.execution.use(plan, transition=0)
    net.execution.plan(0, BATCH)  # in use from here on, so every commit makes it again
    commits = _commits(net)
    for name, (edit, _) in commits.items():
        _check_commit(net, optimizer, name, edit)
    cases = {"dense step": Timed(_dense_step(parents, children))}
    for name, (edit, choose) in commits.items():
        cases[name] = _timed_commit(net, edit, choose)
    seconds = interleaved(cases, repeats)
    dense = seconds.pop("dense step")
    held = [
        t
        for p in net.parameters()
        for t in (p, p.grad, *optimizer.state[p].values())
        if t is not None
    ]
    held += [*net.buffers(), *_own_tensors(net.execution.plan(0, BATCH).plan)]
    for transition in net.transitions:
        held += [transition.topology.ptr, transition.topology.child]
    size = sum(t.numel() * t.element_size() for t in held) / net.count().relations
    return Row(
        relations=parents * children,
        plan=plan,
        dense_step_ms=dense * 1e3,
        ratios={name: round(s / dense, 4) for name, s in seconds.items()},
        milliseconds={name: round(s * 1e3, 3) for name, s in seconds.items()},
        bytes_per_relation=round(size, 2),
    )


def _own_tensors(plan: Any) -> list[Tensor]:
    """Returns the tensors that a plan holds beside the wiring itself."""
    held = [part for part in vars(plan).values() if not hasattr(part, "n_relations")]
    return [
        t
        for part in held
        for t in (part if isinstance(part, tuple) else [part])
        if isinstance(t, Tensor)
    ]


def _net_with_adam_state(
    parents: int, children: int, device: str = "cpu"
) -> tuple[gn.GrapNet, torch.optim.Optimizer]:
    net = gn.GrapNet([parents, children, OUTPUTS], device=device)
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return net, optimizer


def _commits(
    net: gn.GrapNet,
) -> dict[str, tuple[Callable[[gn.Edit, Any], None], Callable[[], Any]]]:
    """Returns the kinds of commit: what it does, and what is chosen for it outside the clock."""

    def choose(count: int) -> gn.RelationSet:
        relations = net.layers[0].outgoing()
        return relations[torch.randperm(len(relations), device=net.device)[:count]]

    def add(edit: gn.Edit, _: Any) -> None:
        nodes = edit.add_nodes(1, 64)
        edit.connect(net.layers[0], nodes)
        edit.connect(nodes, net.layers[2])

    tenth = len(net.layers[0].outgoing()) // 10
    return {
        "cut one": (lambda edit, chosen: edit.cut(chosen), lambda: choose(1)),
        "cut 10 %": (lambda edit, chosen: edit.cut(chosen), lambda: choose(tenth)),
        "add 64 nodes": (add, lambda: None),
        "freeze one node": (
            lambda edit, chosen: edit.freeze(chosen),
            lambda: net.layers[1][len(net.layers[1]) // 2],
        ),
    }


def _timed_commit(
    net: gn.GrapNet, operate: Callable[[gn.Edit, Any], None], choose: Callable[[], Any]
) -> Timed:
    chosen: list[Any] = []

    def run() -> None:
        with net.edit() as edit:
            operate(edit, chosen[-1])
        net.execution.plan(0, BATCH)

    return Timed(run, before=lambda: chosen.append(choose()), after=net.undo)


def _check_commit(
    net: gn.GrapNet,
    optimizer: torch.optim.Optimizer,
    name: str,
    operate: Callable[[gn.Edit, Any], None],
) -> None:
    """Raises unless the commit keeps the invariants and the optimizer's state, and undo brings
    everything back.
    """
    _, choose = _commits(net)[name]
    weight = net.transitions[0].weight
    before = [weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()]
    with net.edit() as edit:
        operate(edit, choose())
    gn.check(net)
    if optimizer.state[weight]["exp_avg"].shape != weight.shape:
        raise AssertionError(f"{name}: Adam's state did not follow")
    net.undo()
    for old, new in zip(before, [weight.detach(), optimizer.state[weight]["exp_avg"]], strict=True):
        if not torch.equal(old, new):
            raise AssertionError(f"{name}: undo did not bring everything back")


def _dense_step(parents: int, children: int) -> Callable[[], None]:
    layer = nn.Linear(parents, children)
    optimizer = torch.optim.Adam(layer.parameters())
    x = torch.randn(BATCH, parents)
    target = torch.randn(BATCH, children)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(layer(x), target).backward()
        optimizer.step()

    return step


@dataclass
class CudaRow:
    """Commits of one net on CUDA."""

    relations: int
    step_ms: float  # a training step of the net
    milliseconds: dict[str, float]  # until the device has done everything
    waits: dict[str, int]  # how often the host waits for the device in one of them


def _measure_cuda(*, fast: bool) -> dict[str, Any]:
    """Returns what commits cost on CUDA, right after a training step."""
    repeats = 3 if fast else 15
    rows = {}
    for name, (parents, children) in CUDA_RECTANGLES.items():
        if fast:
            parents, children = (parents // 64, children // 64)
        rows[name] = asdict(_measure_cuts_on_cuda(parents, children, repeats))
    sizes = tuple(size // 64 if fast else size for size in RIGL_SIZES)
    rows["RigL"] = asdict(_measure_rigl_on_cuda(sizes, repeats))
    return {
        "benchmark": "edits",
        "settings": {
            "batch": BATCH,
            "device": torch.cuda.get_device_name(),
            "optimizer": "Adam",
        },
        "versions": _versions(),
        "rows": rows,
    }


def _measure_cuts_on_cuda(parents: int, children: int, repeats: int) -> CudaRow:
    net, optimizer = _net_with_adam_state(parents, children, "cuda")
    step = _training_step(net, optimizer)
    commits = _commits(net)
    cases = {"step": Timed(step)}
    waits = {}
    for name in CUDA_BARS["1024×4096"]:
        edit, choose = commits[name]
        step()
        _check_commit(net, optimizer, name, edit)
        chosen: list[Any] = []

        def run(edit: Callable[..., None] = edit, chosen: list[Any] = chosen) -> None:
            with net.edit() as opened:
                edit(opened, chosen.pop())

        def before(choose: Callable[[], Any] = choose, chosen: list[Any] = chosen) -> None:
            step()
            chosen.append(choose())

        before()
        waits[name] = _waits(run)
        net.undo()
        cases[name] = Timed(run, before, net.undo)
    seconds = interleaved(cases, repeats)
    return _cuda_row(net, seconds, waits)


def _measure_rigl_on_cuda(sizes: tuple[int, ...], repeats: int) -> CudaRow:
    net = gn.GrapNet(sizes, density=RIGL_DENSITY, device="cuda")
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    train = _training_step(net, optimizer)
    manager = rules.RuleManager()
    rewire = rules.Rewire(fraction=0.3, grow="gradient")
    manager.add(rewire, schedule=rules.Every(1))
    manager.start(net)
    steps = iter(range(10**6))

    def apply() -> None:
        receipt = manager.apply(net, next(steps))
        assert receipt is not None

    train()
    waits = {"apply": _waits(apply)}
    gn.check(net)
    net.undo()
    seconds = interleaved({"apply": Timed(apply, train, net.undo), "step": Timed(train)}, repeats)
    return _cuda_row(net, seconds, waits)


def _cuda_row(net: gn.GrapNet, seconds: dict[str, float], waits: dict[str, int]) -> CudaRow:
    milliseconds = {name: round(s * 1e3, 3) for name, s in seconds.items()}
    step = milliseconds.pop("step")
    return CudaRow(net.count().relations, step, milliseconds, waits)


def _waits(run: Callable[[], None]) -> int:
    """Returns how often the host waits for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in found)


def _missed_on_cuda(result: dict[str, Any]) -> list[str]:
    found = []
    for row, bars in CUDA_BARS.items():
        measured = result["rows"][row]
        for name, bar in bars.items():
            taken = measured["milliseconds"][name]
            if measured["relations"] < 10**6 or taken > bar:
                found.append(
                    f"{name} at {row} on CUDA: {taken} ms with {measured['relations']:,}"
                    f" relations, the bar is {bar} ms"
                )
    return found


def _markdown_of_cuda(result: dict[str, Any]) -> str:
    lines = [
        "| net | relations | training step | commit | milliseconds | waits for the device |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for row, measured in result["rows"].items():
        for name, taken in measured["milliseconds"].items():
            lines.append(
                f"| {row} | {measured['relations']:,} | {measured['step_ms']:.2f} ms | {name}"
                f" | {taken:.2f} | {measured['waits'][name]} |"
            )
    return "\n".join(lines)


def _training_step(net: gn.GrapNet, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    x = torch.randn(BATCH, net.sizes[0], device=net.device)
    target = torch.randn(BATCH, net.sizes[-1], device=net.device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), target).backward()
        optimizer.step()

    return step
