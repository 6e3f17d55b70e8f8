"""One-vs-rest on Fashion-MNIST at 28×28: ten tasks in sequence, each with nodes of its own that
freeze when it ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import grapnet as gn
from grapnet.continual import AccuracyMatrix, Evaluation, structural_drift
from grapnet.rules import FreezeOwner, GrowForTask, RuleContext

from .data import downsample, fashion_images
from .paper import published
from .statistics import paired, summary
from .tables import grid, interval, spread

PAPER = published("one_vs_rest")
PRINTED = {"frozen": "grown and frozen", "sequential": "sequential MLP"}

BARS = {"frozen": 3.0, "sequential": 5.0}  # points around the paper's accuracy
TASKS = 10
ROWS = {  # methods in the order of the table
    "frozen": "GrapNet, grown and frozen",
    "sequential": "sequential MLP with ten outputs",
    "renewed": "control: the MLP, Adam renewed at every task",
    "unfrozen": "control: grown, nothing frozen, Adam renewed",
    "momentum": "control: grown, nothing frozen, Adam kept",
    "separate": "control: ten separate dense nets",
}


@dataclass(frozen=True)
class Settings:
    """One class against the rest, ten times in sequence; what was frozen cannot be forgotten."""

    data: str = "fashion"  # or "made-up": images of the same shape that need no file
    each: int = 500  # positive and as many negative images that a task trains on
    nodes: int = 8  # that every task gets
    hidden: int = 64  # nodes of the sequential MLP, shared by all tasks
    batch: int = 32
    lr: float = 1e-2  # of Adam; every image is seen once
    seeds: tuple[int, ...] = tuple(range(20, 30))


FAST = replace(Settings(), data="made-up", each=64, seeds=(20, 21))


class Task(NamedTuple):
    """A class against the rest: as many images with it as without, to train on and to test."""

    number: int
    x: Tensor  # [2 · each, 784], pixels in [0, 1], in the order in which they come
    y: Tensor  # [2 · each], 1 where it is the class
    test_x: Tensor
    test_y: Tensor


class Learner(NamedTuple):
    """What a method does with a task: `begin`, then the updates, then `end`."""

    model: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    begin: Callable[[int], object]
    end: Callable[[int], object]


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns accuracy after the last task, accuracy when each task was just learnt, and
    forgetting, in per cent.
    """
    tasks = _tasks(settings, seed)
    found = {}
    for key, renew in (("sequential", False), ("renewed", True)):
        torch.manual_seed(seed)
        mlp = nn.Sequential(
            nn.Linear(784, settings.hidden), nn.ReLU(), nn.Linear(settings.hidden, TASKS)
        )
        found[key] = _plain(settings, tasks, mlp, renew=renew)
    found["frozen"] = _grown(settings, tasks, seed, survivors="renew", freeze=True)
    found["unfrozen"] = _grown(settings, tasks, seed, survivors="renew", freeze=False)
    found["momentum"] = _grown(settings, tasks, seed, survivors="keep", freeze=False)
    torch.manual_seed(seed)
    found["separate"] = _plain(settings, tasks, _SideBySide(settings.nodes), renew=True)
    return {key: found[key] for key in ROWS}


class _SideBySide(nn.Module):
    """A dense net for every task, each with one output; with Adam renewed at every task they share
    nothing.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(784, nodes), nn.ReLU(), nn.Linear(nodes, 1))
            for _ in range(TASKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([net(x) for net in self.nets], 1)  # [batch, nets]


def _tasks(settings: Settings, seed: int) -> list[Task]:
    """Returns the ten tasks of a seed, the same for every method; tests hold all images of the
    class.
    """
    (images, y), (test_images, test_y) = fashion_images(settings.data)
    found = []
    for number in range(TASKS):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        rows = _balanced(y == number, settings.each, generator)
        test_rows = _balanced(test_y == number, int((test_y == number).sum()), generator)
        parts = (
            part
            for pixels, labels, at in ((images, y, rows), (test_images, test_y, test_rows))
            for part in (downsample(pixels[at], 1), (labels[at] == number).float())
        )
        found.append(Task(number, *parts))
    return found


def _balanced(positive: Tensor, each: int, generator: torch.Generator) -> Tensor:
    """Returns the rows of `each` images with the class and `each` without, mixed."""
    kinds = [at.nonzero().flatten() for at in (positive, ~positive)]
    rows = torch.cat([at[torch.randperm(len(at), generator=generator)[:each]] for at in kinds])
    return rows[torch.randperm(len(rows), generator=generator)]


def _plain(
    settings: Settings, tasks: Sequence[Task], model: nn.Module, *, renew: bool
) -> dict[str, Any]:
    """Returns the figures of a model whose parts are all there from the start."""
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)

    def begin(task: int) -> None:
        if renew:
            optimizer.state.clear()

    figures = _run(settings, tasks, Learner(model, optimizer, begin, lambda task: None))
    return {**figures, "parameters": sum(p.numel() for p in model.parameters())}


def _grown(
    settings: Settings,
    tasks: Sequence[Task],
    seed: int,
    *,
    survivors: Literal["keep", "renew"],
    freeze: bool,
) -> dict[str, Any]:
    """Returns the figures of a net that grows nodes for every task, and how far the coordinates of
    old ones moved.
    """
    torch.manual_seed(seed)
    net = gn.GrapNet([784, 0, TASKS])
    with net.edit(reason="an output a task") as edit:
        for number in range(TASKS):
            # its bias freezes with the task
            edit.set_owner(net.layers[2][number : number + 1], f"task-{number}")
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.lr)
    gn.attach(optimizer, net, survivors=survivors)
    grow = GrowForTask(nodes=settings.nodes, classes="own", classes_per_task=1)
    generator = torch.Generator().manual_seed(seed)
    kept = {}

    def begin(task: int) -> None:
        with net.edit(reason=f"nodes for task {task}", generator=generator) as edit:
            grow(net, edit, RuleContext(task=task))

    def end(task: int) -> None:
        kept[task] = [part.detach().clone() for part in _coordinates(net, task)]
        if freeze:
            with net.edit(reason=f"task {task} ended") as edit:
                FreezeOwner()(net, edit, RuleContext(task=task))

    figures = _run(settings, tasks, Learner(net, optimizer, begin, end))
    drift = max(
        structural_drift(then, _coordinates(net, task)).largest for task, then in kept.items()
    )
    return {**figures, "parameters": net.count().relations + net.count().biases, "drift": drift}


def _coordinates(net: gn.GrapNet, task: int) -> list[Tensor]:
    nodes = net.select(layer=1, owner=f"task-{task}")
    biases = [nodes.biases, net.layers[2].biases[task : task + 1]]
    return [nodes.incoming().weights, nodes.outgoing().weights, *biases]


def _run(settings: Settings, tasks: Sequence[Task], learner: Learner) -> dict[str, Any]:
    """Trains on task after task, each once through, and tests all tasks so far after each."""
    matrix = AccuracyMatrix()
    for task in tasks:
        learner.begin(task.number)
        for x, y in zip(task.x.split(settings.batch), task.y.split(settings.batch), strict=True):
            learner.optimizer.zero_grad()
            binary_cross_entropy_with_logits(learner.model(x)[:, task.number], y).backward()
            learner.optimizer.step()
        learner.end(task.number)
        shares = [_share(learner.model, old) for old in tasks[: task.number + 1]]
        matrix.add(Evaluation(fmean(shares), shares, shares))
    learnt = [row.seen[-1] for row in matrix.rows]
    final = matrix.rows[-1].seen
    changes = [abs(row.seen[n] - final[n]) for row in matrix.rows for n in range(len(row.seen))]
    # of any task since it was learnt: gains cannot hide losses here
    return {
        "accuracy": 100 * matrix.seen_class,
        "learnt": 100 * fmean(learnt),
        "forgetting": 100 * matrix.forgetting,
        "largest_change": (100 * max(changes)),
        "by_task": [100 * share for share in final],
    }


def _share(model: Callable[[Tensor], Tensor], task: Task) -> float:
    with torch.no_grad():
        yes = model(task.test_x)[:, task.number] > 0
    return float((yes == task.test_y.bool()).double().mean())


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns mean and standard deviation over the seeds for every method, and the largest
    forgetting and drift.
    """
    rows: dict[str, dict[str, Any]] = {}
    for key in ROWS:
        runs = [run[key] for run in seeds.values()]
        rows[key] = {"parameters": sorted({run["parameters"] for run in runs})}
        for figure in ("accuracy", "learnt", "forgetting"):
            rows[key][figure] = list(summary([run[figure] for run in runs])[:2])
        rows[key]["largest_forgetting"] = max(abs(run["forgetting"]) for run in runs)
        rows[key]["largest_change"] = max(run["largest_change"] for run in runs)
        if "drift" in runs[0]:
            rows[key]["largest_drift"] = max(run["drift"] for run in runs)
    contrasts = {
        f"frozen − {key}": paired(
            *([run[one]["accuracy"] for run in seeds.values()] for one in ("frozen", key))
        )
        for key in ("sequential", "separate")
    }
    return {
        "n": len(seeds),
        "rows": rows,
        "contrasts": {key: value._asdict() for key, value in contrasts.items()},
    }


def table(result: dict[str, Any]) -> str:
    """Returns every method beside the paper's figures."""
    found = result["summary"]
    rows = []
    for key, name in ROWS.items():
        row = found["rows"][key]
        cells = [name, f"{row['parameters'][0]:,}"]
        words = {"accuracy": "final average accuracy", "forgetting": "forgetting"}
        for figure in words:
            cells.append(spread(row[figure]))
            if key in PRINTED:
                cells.append(f"{PAPER[f'{PRINTED[key]}: {words[figure]}']:.2f}")
            else:
                cells.append("–")
        cells.append(f"{row['largest_drift']:.1e}" if "largest_drift" in row else "–")
        rows.append(cells)
    method = f"method, {found['n']} seeds"
    titles = (method, "parameters", "accuracy", "paper", "forgetting", "paper", "largest drift")
    lines = [
        f"{key}: {interval(contrast)}, p = {contrast['p']:.1e}."
        for key, contrast in found["contrasts"].items()
    ]
    lines.append(
        "Nothing is shared, so nothing is forgotten: ten separate dense nets forget as little, and"
        " without freezing the old nodes move only where Adam keeps their momentum."
    )
    return grid(titles, rows) + "\n\n" + "\n".join(lines)


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    rows = result["summary"]["rows"]
    lines = []
    for key, bar in BARS.items():
        accuracy = rows[key]["accuracy"][0]
        paper = PAPER[f"{PRINTED[key]}: final average accuracy"]
        if not abs(accuracy - paper) <= bar:
            lines.append(f"{key}: accuracy {accuracy:.2f}, the bar is {paper} ± {bar:.0f}")
    if rows["frozen"]["largest_forgetting"] != 0:
        lines.append(
            f"forgetting: {rows['frozen']['largest_forgetting']:.2f} when frozen, the bar is"
            " exactly 0.00"
        )
    if rows["frozen"]["largest_change"] != 0:
        lines.append(
            f"change: a frozen task moved by {rows['frozen']['largest_change']:.2f}, the bar is"
            " exactly 0.00"
        )
    if rows["frozen"]["largest_drift"] != 0:
        lines.append(f"drift: a frozen coordinate moved by {rows['frozen']['largest_drift']:.1e}")
    return lines
