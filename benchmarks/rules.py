"""What applying a rule costs, beside a dense training step of the same sizes, and what it leaves of
the optimizer.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet import rules

from .contenders import training_step
from .timing import Timed, interleaved, versions

BATCH = 256
SIZES = (1024, 4096, 1024)
DENSITY = 0.12  # a million relations
RECURRING_BAR = 2.0  # dense training steps
ONE_OFF_BAR = 2.0  # seconds


@dataclass(frozen=True)
class Case:
    """A rule to apply again and again, each time taken back outside the clock."""

    rule: Any
    recurring: bool = True
    task: int | None = None
    full: bool = False  # on a net whose first transition is full
    grouped: bool = False  # on a net of families


@dataclass(frozen=True)
class Row:
    """What one `apply` costs."""

    rule: str
    recurring: bool
    relations: int
    cut: int
    connected: int
    seconds: float
    dense_steps: float


def cases() -> dict[str, Case]:
    """Returns the rules that are timed, by what the table calls them."""
    gradual = rules.GradualSchedule(0.95, begin=-10, end=1000, initial=1 - DENSITY)
    return {
        "PruneWeakest 1 %": Case(rules.PruneWeakest(0.01)),
        "PruneWeakest 1 % of every node": Case(rules.PruneWeakest(0.01, scope="owner")),
        "PruneWeakest, gradual": Case(rules.PruneWeakest(sparsity=gradual)),
        "RemoveOrphans": Case(rules.RemoveOrphans()),
        "Rewire, SET": Case(rules.Rewire(grow="random")),
        "Rewire, RigL": Case(rules.Rewire(grow="gradient", decay_until=10**6)),
        "Rewire, SRigL": Case(rules.Rewire(grow="gradient", decay_until=10**6, scope="child")),
        "GrowForTask": Case(
            rules.GrowForTask(nodes=64, classes_per_task=16), recurring=False, task=0
        ),
        "FreezeOwner": Case(rules.FreezeOwner("half"), recurring=False),
        "GrowWidth, zero outgoing": Case(rules.GrowWidth(layers=1, nodes=64), recurring=False),
        "GrowWidth, Net2Net": Case(
            rules.GrowWidth(layers=1, nodes=64, init="net2net"), recurring=False
        ),
        "GrowWidth, GradMax": Case(
            rules.GrowWidth(layers=1, nodes=64, init="gradmax"), recurring=False
        ),
        "CovarianceSifter": Case(
            rules.CovarianceSifter(transitions=(0,)), recurring=False, grouped=True
        ),
        "SplitIntoFamilies": Case(
            rules.SplitIntoFamilies(0, families=8), recurring=False, full=True
        ),
    }


def measure(*, fast: bool) -> dict[str, Any]:
    """Returns the whole table; `fast` shrinks the net and reaches no bar."""
    torch.manual_seed(0)
    sizes = tuple(size // 32 for size in SIZES) if fast else SIZES
    rows = [asdict(_measure(name, case, sizes, 2 if fast else 5)) for name, case in cases().items()]
    return {
        "benchmark": "rules",
        "settings": {
            "sizes": sizes,
            "batch": BATCH,
            "threads": torch.get_num_threads(),
            "optimizer": "Adam",
        },
        "versions": versions(),
        "rows": rows,
        "optimizer_bytes": _optimizer_bytes(sizes),
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    for row in result["rows"]:
        if row["relations"] < 10**6:
            found.append(
                f"{row['rule']} was measured at {row['relations']:,} relations, the bar is for a"
                " million"
            )
        elif row["recurring"] and row["dense_steps"] > RECURRING_BAR:
            found.append(
                f"{row['rule']}: {row['dense_steps']:.2f} dense steps, the bar is {RECURRING_BAR}"
            )
        elif not row["recurring"] and row["seconds"] > ONE_OFF_BAR:
            found.append(f"{row['rule']}: {row['seconds']:.2f} s, the bar is {ONE_OFF_BAR} s")
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the result as text."""
    return markdown(result) + "\n\noptimizer bytes: " + str(result["optimizer_bytes"])


def markdown(result: dict[str, Any]) -> str:
    """Returns the rows as the table that the documentation shows."""
    lines = [
        "| rule | relations | cut | connected | seconds | dense steps |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        counts = " | ".join(f"{row[key]:,}" for key in ("relations", "cut", "connected"))
        lines.append(
            f"| {row['rule']} | {counts} | {row['seconds']:.3f} | {row['dense_steps']:.2f} |"
        )
    return "\n".join(lines)


def _measure(name: str, case: Case, sizes: tuple[int, ...], repeats: int) -> Row:
    net = _net(case, sizes)
    x = torch.randn(BATCH, sizes[0])
    target = torch.randn(BATCH, sizes[-1])
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    manager = rules.RuleManager()
    manager.add(case.rule, schedule=rules.Every(1))
    manager.start(net)
    relations = net.count().relations
    commits = []
    step = 0

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), target).backward()
        optimizer.step()

    def apply() -> None:
        nonlocal step
        commits.append(manager.apply(net, step, task=case.task))
        step += 1

    def take_back() -> None:
        if commits.pop() is not None:
            net.undo()

    counts = _counts(train, apply, commits)
    take_back()
    gn.check(net)
    dense = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2]))
    timed = {
        "dense": Timed(training_step(dense, x, target)),
        "apply": Timed(apply, before=train, after=take_back),
    }
    seconds = interleaved(timed, repeats)
    return Row(
        name,
        case.recurring,
        relations,
        *counts,
        seconds["apply"],
        seconds["apply"] / seconds["dense"],
    )


def _counts(
    train: Callable[[], None], apply: Callable[[], None], commits: list[gn.Commit | None]
) -> tuple[int, int]:
    """Applies the rule once and returns how many relations it cut and connected."""
    train()
    apply()
    moved = [] if commits[-1] is None else commits[-1].relations.values()
    return sum(len(index.removed) for index in moved), sum(len(index.inserted) for index in moved)


def _net(case: Case, sizes: tuple[int, ...]) -> gn.GrapNet:
    """Returns a net of the sizes with about a million relations; half of its hidden nodes belong to
    "half".
    """
    parents, hidden, outputs = sizes
    if case.full or case.grouped:
        share = 8 if case.grouped else 1
        blocks = [
            torch.cartesian_prod(torch.arange(b, parents, share), torch.arange(b, hidden, share))
            for b in range(share)
        ]
        below = torch.cartesian_prod(torch.arange(hidden), torch.arange(outputs // 8))
        net = gn.GrapNet.from_relations(sizes, [tuple(torch.cat(blocks).T), tuple(below.T)])
    else:
        net = gn.GrapNet(sizes, density=DENSITY)
    with net.edit("name the owners") as edit:
        edit.set_owner(net.layers[1][: hidden // 2], "half")
    return net


def _optimizer_bytes(sizes: tuple[int, ...]) -> dict[str, int]:
    """Returns the bytes of Adam's state at first, with half of the nodes frozen, and a quarter of
    the relations cut.
    """
    net = _net(Case(None), sizes)
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    nn.functional.mse_loss(net(torch.randn(8, sizes[0])), torch.randn(8, sizes[-1])).backward()
    optimizer.step()
    found = {"at first": _state_bytes(optimizer)}
    manager = rules.RuleManager()
    manager.add(rules.FreezeOwner("half"), schedule=rules.At(0))
    manager.add(rules.PruneWeakest(0.25), schedule=rules.At(1))
    for step, name in enumerate(("half of the nodes frozen", "a quarter of the relations cut")):
        manager.apply(net, step)
        found[name] = _state_bytes(optimizer)
    return found


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    held = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum(value.numel() * value.element_size() for value in held)
