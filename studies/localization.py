"""Localization (the paper's Table 1): cutting a task's relations takes that task away, and nothing
else.

What is left of the task is the share of one class. Without relations both of its outputs are their
biases, so that all images of the pair get the class of the larger one: 50 % of a balanced test set,
and another share of one that is not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.continual import (
    ExperienceReplay,
    ReservoirMemory,
    TaskStream,
    evaluate,
    seen_class_cross_entropy,
    train_on_stream,
)
from grapnet.rules import GrowForTask, RuleContext

from .data import Images, small_images
from .statistics import paired, summary
from .tables import grid, spread

TASKS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
CUTS = 96  # 48 nodes with a relation to each of two classes
THINNED = 4  # one of so many images of every odd class is left in the unbalanced test set
ROWS = {  # what is cut, in the order of the table
    "owned": "the task's 96 relations (the paper's cut)",
    "random": "96 relations drawn from all 480 (control)",
    "grown_pair": "R1 head: the task's 96 to its own pair",
    "grown_owned": "R1 head: all that the task owns",
    "grown_random": "R1 head: 96 drawn from all 1,440 (control)",
}

Choice = Callable[[gn.GrapNet, int], Any]  # the relations that a cut of a task takes


@dataclass(frozen=True)
class Settings:
    """Table 1: relations owned by one task are cut; its accuracy falls to the share of one class,
    and the others' stay.
    """

    data: str = "fashion"  # or "made-up": images of the same shape that need no file
    nodes: int = 48  # that every task gets
    per_class: int = 500  # training images
    epochs: int = 3  # of each task, alone, with cross-entropy over its pair
    batch: int = 64
    lr: float = 2e-3  # of Adam, renewed at every growth
    memory: int = 500  # images that the grown R1 head replays from; it sees every image once
    seeds: tuple[int, ...] = tuple(range(20, 30))


FAST = replace(Settings(), data="made-up", per_class=60, epochs=1, seeds=(20, 21))


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns the accuracies, in per cent, before and after every cut on both heads."""
    train, test = small_images(settings.data)
    apart = _apart(settings, train, seed)
    grown = _grown(settings, train, seed)
    audits: tuple[tuple[str, gn.GrapNet, Choice], ...] = (
        ("owned", apart, _owned),
        ("random", apart, _drawn(seed)),
        ("grown_pair", grown, _to_its_pair),
        ("grown_owned", grown, _owned),
        ("grown_random", grown, _drawn(seed)),
    )
    cuts = {key: _audit(net, test, choose) for key, net, choose in audits}
    return {
        "relations": {"apart": apart.count().relations, "grown": grown.count().relations},
        "base": {
            "apart": _accuracies(apart, test)["local"],
            "grown": _accuracies(grown, test)["local"],
        },
        "base_seen": _accuracies(grown, test)["overall"],
        "cuts": cuts,
        "share": _shares(apart, test),
        "unbalanced": _unbalanced(apart, test),
    }


def _shares(net: gn.GrapNet, test: Images) -> list[float]:
    """Returns for every task the share, in per cent, of the class that its pair gets by biases
    alone.
    """
    biases = net.layers[-1].biases.detach()
    found = []
    for pair in TASKS:
        counts = [int((test[1] == label).sum()) for label in pair]
        larger = int(biases[list(pair)].argmax())
        found.append(100 * (counts[larger] / sum(counts)))
    return found


def _unbalanced(net: gn.GrapNet, test: Images) -> dict[str, Any]:
    """Returns the paper's cut on test images of which every odd class has fewer, with the shares
    of the classes.
    """
    x, y = test
    kept = y % 2 == 0
    for label in range(1, 10, 2):
        rows = (y == label).nonzero().squeeze(1)
        kept[rows[::THINNED]] = True
    fewer = (x[kept], y[kept])
    return {"after": _audit(net, fewer, _owned)["after"], "share": _shares(net, fewer)}


def _apart(settings: Settings, train: Images, seed: int) -> gn.GrapNet:
    """Returns a head whose nodes speak for their task's two classes only, each task trained
    alone.
    """
    torch.manual_seed(seed)
    net = gn.GrapNet([49, 0, 10])
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.lr)
    # without momentum of earlier tasks, what has no gradient stays put
    gn.attach(optimizer, net, survivors="renew")
    grow = GrowForTask(nodes=settings.nodes, classes="own", classes_per_task=2)
    generator = torch.Generator().manual_seed(seed)
    stream = TaskStream(
        *train, tasks=TASKS, batch=settings.batch, seed=seed, per_class=settings.per_class
    )
    for task in stream:
        with net.edit(reason=f"nodes for task {task.number}", generator=generator) as edit:
            grow(net, edit, RuleContext(task=task.number))
        x, y = task.content[:2]
        for _ in range(settings.epochs):
            for rows in torch.randperm(len(y), generator=generator).split(settings.batch):
                optimizer.zero_grad()
                seen_class_cross_entropy(net(x[rows]), y[rows], task.classes).backward()
                optimizer.step()
    return net


def _grown(settings: Settings, train: Images, seed: int) -> gn.GrapNet:
    """Returns the plastic head of Table 2: nodes relate to every class seen so far, trained in one
    pass with replay.
    """
    torch.manual_seed(seed)
    net = gn.GrapNet([49, 0, 10])
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.lr)
    gn.attach(optimizer, net, survivors="renew")
    grow = GrowForTask(nodes=settings.nodes, classes_per_task=2)
    generator = torch.Generator().manual_seed(seed)

    def before_task(task: Any) -> None:
        with net.edit(reason=f"nodes for task {task.number}", generator=generator) as edit:
            grow(net, edit, RuleContext(task=task.number))

    stream = TaskStream(
        *train, tasks=TASKS, batch=settings.batch, seed=seed, per_class=settings.per_class
    )
    memory = ReservoirMemory(settings.memory, seed=seed)
    train_on_stream(
        net,
        stream,
        ExperienceReplay(),
        memory,
        optimizer,
        replay_batch=settings.batch,
        before_task=before_task,
    )
    return net


def _owned(net: gn.GrapNet, task: int) -> Any:
    return net.select(layer=1, owner=f"task-{task}").outgoing()


def _to_its_pair(net: gn.GrapNet, task: int) -> Any:
    return _owned(net, task) & net.layers[2][list(TASKS[task])].incoming()


def _drawn(seed: int) -> Choice:
    """Returns a choice of as many output relations as the paper cuts, whoever owns them."""
    generator = torch.Generator().manual_seed(seed)

    def choose(net: gn.GrapNet, task: int) -> Any:
        relations = net.layers[1].outgoing()
        wanted = len(_to_its_pair(net, task))
        return relations[torch.randperm(len(relations), generator=generator)[:wanted]]

    return choose


def _audit(net: gn.GrapNet, test: Images, choose: Choice) -> dict[str, Any]:
    """Returns what each task's cut removed from storage, the accuracies after it, and whether undo
    restored the net.
    """
    found: dict[str, list[Any]] = {
        key: [] for key in ("removed", "after", "moved", "seen_drop", "restored")
    }
    before = _accuracies(net, test)
    stored = _stored(net)
    logits = _logits(net, test)
    for task in range(len(TASKS)):
        with net.edit(reason=f"audit of task {task}", allow_dead=True) as edit:
            edit.cut(choose(net, task))
        left = _stored(net)
        after = _accuracies(net, test)
        others = [number for n, pair in enumerate(TASKS) if n != task for number in pair]
        found["removed"].append([was - has for was, has in zip(stored, left, strict=True)])
        found["after"].append(after["local"])
        found["moved"].append(float((_logits(net, test) - logits)[:, others].abs().max()))
        found["seen_drop"].append(before["overall"] - after["overall"])
        net.undo()
        found["restored"].append(
            _accuracies(net, test) == before and torch.equal(_logits(net, test), logits)
        )
    target = []
    other = []
    largest = 0.0
    for task, after in enumerate(found["after"]):
        drops = [was - has for was, has in zip(before["local"], after, strict=True)]
        target.append(drops.pop(task))
        other.append(fmean(drops))
        largest = max(largest, *map(abs, drops))
    return {**found, "target": target, "other": other, "other_largest": largest}


def _stored(net: gn.GrapNet) -> list[int]:
    """Returns how many relations the graph holds: child references, coordinates, and weights of a
    dense snapshot.
    """
    weights = sum(transition.weight.numel() for transition in net.transitions)
    dense = sum(
        int(part.weight.count_nonzero())
        for part in net.snapshot()
        if isinstance(part, torch.nn.Linear)
    )
    return [sum(len(transition.child) for transition in net.transitions), weights, dense]


def _accuracies(net: gn.GrapNet, test: Images) -> dict[str, Any]:
    found = evaluate(net, *test, TASKS)
    return {"local": [100 * share for share in found.local], "overall": 100 * found.overall}


def _logits(net: gn.GrapNet, test: Images) -> Tensor:
    with torch.no_grad():
        return net(test[0])  # [n, 10]


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns mean and standard deviation over the seeds of every figure of the table, and the
    exact claims.
    """
    runs = list(seeds.values())
    rows: dict[str, dict[str, Any]] = {}
    for key in ROWS:
        cuts = [run["cuts"][key] for run in runs]
        target, other = ([fmean(cut[name]) for cut in cuts] for name in ("target", "other"))
        margin = [one - rest for one, rest in zip(target, other, strict=True)]
        head = "grown" if key.startswith("grown") else "apart"
        rows[key] = {
            "removed": sorted({tuple(removed) for cut in cuts for removed in cut["removed"]}),
            "base": summary([fmean(run["base"][head]) for run in runs])[:2],
            "after": summary([fmean(_own(cut)) for cut in cuts])[:2],
            "after_by_task": [fmean(values) for values in zip(*map(_own, cuts), strict=True)],
            "target": summary(target)[:2],
            "other": summary(other)[:2],
            "margin": summary(margin)[:2],
            "p": paired(target, other).p,
            "other_largest": max(cut["other_largest"] for cut in cuts),
            "moved": max(max(cut["moved"]) for cut in cuts),
            "seen_drop": summary([fmean(cut["seen_drop"]) for cut in cuts])[:2],
            "restored": all(all(cut["restored"]) for cut in cuts),
        }
    relations = sorted({tuple(run["relations"].values()) for run in runs})
    return {
        "n": len(runs),
        "relations": relations,
        "target_after": _by_share(runs, [run["cuts"]["owned"] for run in runs]),
        "unbalanced_after": _by_share(
            [run["unbalanced"] for run in runs], [run["unbalanced"] for run in runs]
        ),
        "rows": rows,
    }


def _by_share(shares: list[dict[str, Any]], cuts: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    """Returns every accuracy of a pair after its cut with the share of the class that it gets."""
    found = set()
    for share, cut in zip(shares, cuts, strict=True):
        found |= set(zip(_own(cut), share["share"], strict=True))
    return sorted(found)


def _own(cut: dict[str, Any]) -> list[float]:
    """Returns the accuracy of every task's pair after that task's cut."""
    return [row[task] for task, row in enumerate(cut["after"])]


def table(result: dict[str, Any]) -> str:
    """Returns every cut with its controls."""
    found = result["summary"]["rows"]
    rows = []
    for key, name in ROWS.items():
        row = found[key]
        counts = sorted({removed[0] for removed in row["removed"]})
        size = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        drops = [spread(row[figure]) for figure in ("after", "target", "other")]
        largest = f"{row['other_largest']:.2f}"
        rows.append((name, size, *drops, largest, spread(row["seen_drop"])))
    titles = (
        "cut of a task",
        "relations",
        "target pair after",
        "its drop",
        "other pairs' drop",
        "largest",
        "seen-class drop",
    )
    restored = all(row["restored"] for row in found.values())
    by_task = ", ".join(f"{accuracy:.2f}" for accuracy in found["grown_pair"]["after_by_task"])
    left = sorted({after for after, _ in result["summary"]["unbalanced_after"]})
    shares = ", ".join(f"{after:.2f}" for after in left)
    note = (
        "What is left of a pair is the share of the class with the larger bias: with one of"
        f" {THINNED} images of every odd class in the test set {shares}.\n\n"
        f"Undo restored every accuracy and logit bit for bit: {'yes' if restored else 'NO'}."
        " Isolation comes from the wiring: nodes that speak for one pair only can be cut"
        " without touching the others. On the grown head the nodes of later tasks speak for"
        " old classes too, so a pair without its own task's relations keeps (task by task)"
        f" {by_task}, and cutting all that a task owns changes earlier pairs by up to"
        f" {found['grown_owned']['other_largest']:.2f} points."
    )
    return f"{grid(titles, rows)}\n\n{note}"


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = result["summary"]
    owned = found["rows"]["owned"]
    lines = []
    if owned["removed"] != [[CUTS] * 3]:
        lines.append(
            f"removed: {owned['removed']} references, coordinates and weights a task, the bar is"
            f" {CUTS} each"
        )
    for name, key in (("target", "target_after"), ("unbalanced target", "unbalanced_after")):
        for after, share in found[key]:
            if after != share:
                lines.append(
                    f"{name}: a pair is at {after:.2f} after its cut, the bar is the share of one"
                    f" class, {share:.2f}"
                )
    if owned["other_largest"] != 0:
        lines.append(
            f"other pairs: one changed by {owned['other_largest']:.2f}, the bar is exactly 0.00"
        )
    if found["rows"]["random"]["removed"] != [[CUTS] * 3]:
        lines.append(
            f"control: the random cut removed {found['rows']['random']['removed']}, not {CUTS}"
        )
    lines += [
        f"undo: {ROWS[key]} was not restored"
        for key, row in found["rows"].items()
        if not row["restored"]
    ]
    return lines
