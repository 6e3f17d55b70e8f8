"""`grapnet demo`: grows, cuts, undoes, freezes, sifts, runs and saves one network.

`tell` reads like a notebook: each chapter does one thing to the net, measures it before and after,
and checks what must hold. `Story` writes the report.
"""

import argparse
import base64
import html
import json
import platform
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import grapnet as gn

from ._command import Command, Outcome

# torch, scikit-learn and matplotlib are imported where they are used: --help needs none of them.

TASKS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))  # the digits of each task, in order of arrival
NODES = 32  # hidden nodes that each task adds
RATE = 2e-3  # learning rate of Adam


def load(device: Any) -> tuple[Any, Any]:
    """Returns the digits of scikit-learn, (x, y) to train on and (x, y) to test on."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images / 16 - 0.3, dtype=torch.float32, device=device)  # [1797, 64]
    y = torch.as_tensor(labels, device=device)
    train, test = train_test_split(range(len(y)), test_size=0.3, random_state=0, stratify=labels)
    return (x[train], y[train]), (x[test], y[test])


def grow(net: Any, task: Any) -> None:
    """Adds the nodes of a task: they see all pixels and lead to the two digits of the task."""
    with net.edit("grow for {} and {}".format(*task.classes), by="demo") as edit:
        nodes = edit.add_nodes(1, NODES, owner=f"task-{task.number + 1}", bias="zero")
        edit.connect(net.layers[0], nodes, weights="alloc")
        edit.connect(nodes, net.layers[2][list(task.classes)], weights="alloc")


def tell(story: "Story", train: Any, test: Any, seed: int) -> None:
    """Runs all chapters with digits to train on and to test on."""
    import torch
    from torch import Tensor

    from grapnet import plot
    from grapnet.continual import (
        AccuracyMatrix,
        ExperienceReplay,
        ReservoirMemory,
        TaskStream,
        evaluate,
        train_on_stream,
    )
    from grapnet.rules import CovarianceSifter, PruneWeakest

    x, y = test
    torch.manual_seed(seed)
    net = gn.GrapNet([64, 0, 10], device=x.device)
    scores = []  # for the timeline: version of the net, accuracy

    def look(tasks: int = 5) -> dict[str, Any]:
        found = evaluate(net, x, y, TASKS[:tasks])
        scores.append((net.version, found.overall))
        count = net.count()
        row: dict[str, Any] = {
            "hidden": net.sizes[1],
            "relations": count.relations,
            "frozen": count.frozen,
        }
        row["all"] = found.overall
        for number, share in enumerate(found.local, 1):
            row[f"task-{number}"] = share
        return row

    def logits(model: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.no_grad():
            return model(x)

    # 1. Grow: the net starts without hidden nodes, and every task adds its own.
    matrix = AccuracyMatrix()
    rows = {}

    def after_task(task: Any) -> None:
        matrix.add(evaluate(net, x, y, TASKS[: task.number + 1]))
        rows[f"after task-{task.number + 1}"] = look(task.number + 1)
        print(f"task-{task.number + 1}: accuracy {matrix.seen_class:.1%}, {net!r}", file=sys.stderr)

    optimizer = torch.optim.Adam(net.parameters(), RATE)
    gn.attach(optimizer, net)  # its moments follow every edit
    memory = ReservoirMemory(100, seed=seed)
    train_on_stream(
        net,
        TaskStream(*train, tasks=TASKS, batch=10, seed=seed),
        ExperienceReplay(),
        memory,
        optimizer,
        replay_batch=10,
        updates_per_batch=4,
        before_task=partial(grow, net),
        after_task=after_task,
    )
    story.chapter(
        "Grow",
        "Five tasks of two digits come one after the other, and a few earlier images are replayed."
        f" Each task adds {NODES} hidden nodes. The table has the net after every task, its"
        " accuracy among all digits seen so far, and that between the two digits of each task.",
        rows,
        forgetting=matrix.forgetting,
    )
    story.draw(
        "accuracy_matrix",
        plot.accuracy_matrix(matrix, tasks=[f"{a}, {b}" for a, b in TASKS]),
        "Accuracy on each pair of digits, among all digits seen so far, after every task.",
    )

    # 2. Cut: without relations from the pixels task-3 is blind, and no other task uses its nodes.
    def state() -> list[Tensor]:
        tensors = [logits(net), *net.parameters()]
        for parameter in net.parameters():
            moments = optimizer.state[parameter]
            tensors += [moments["exp_avg"], moments["exp_avg_sq"]]
        return [tensor.detach().clone() for tensor in tensors]

    before = look()
    kept = state()
    with net.edit("blind task-3", by="demo") as edit:
        edit.cut(net.select(owner="task-3").incoming())
    after = look()
    net.undo()
    undone = look()
    story.chapter(
        "Cut",
        "All relations from the pixels to the nodes of task-3 are cut. Then undo brings them back,"
        " with their weights and with Adam's moments.",
        {"before": before, "after the cut": after, "after undo": undone},
    )
    changed = [name for name in before if name.startswith("task") and before[name] != after[name]]
    restored = all(torch.equal(old, new) for old, new in zip(kept, state(), strict=True))
    story.check("only the cut task changed", changed == ["task-3"])
    story.check("undo brought logits, weights and Adam's moments back bit for bit", restored)

    # 3. Freeze: frozen coordinates leave the Parameter, so no optimizer can move them.
    def coordinates(owner: str) -> Tensor:
        nodes = net.select(owner=owner)
        parts = [nodes.incoming().weights, nodes.outgoing().weights, nodes.biases]
        return torch.cat(parts).detach().clone()

    with net.edit("keep task-1 as it is", by="demo") as edit:
        edit.freeze(net.select(owner="task-1"))
    before = look()
    frozen = coordinates("task-1")
    free = coordinates("task-2")
    all_digits = TaskStream(*train, tasks=1, batch=10, seed=seed)
    train_on_stream(net, all_digits, ExperienceReplay(), None, optimizer)
    frozen_moved = float((coordinates("task-1") - frozen).abs().max())
    free_moved = float((coordinates("task-2") - free).abs().max())
    story.chapter(
        "Freeze",
        f"The {len(frozen):,} coordinates of task-1 are frozen, and the net trains on all digits at"
        f" once. They move by {frozen_moved:g}, those of task-2 by up to {free_moved:.3f}.",
        {"frozen": before, "trained on": look()},
        moved=[frozen_moved, free_moved],
    )
    story.check("frozen coordinates did not move, others did", frozen_moved == 0 < free_moved)

    # 4. Sift: two rules edit in one commit, which a dry run announces.
    manager = gn.rules.RuleManager(seed=seed)
    manager.add(CovarianceSifter(transitions=(0,), fraction=0.25))
    manager.add(PruneWeakest(transitions=0, fraction=0.5))
    with manager.recording(net), torch.no_grad():
        net(train[0])
    announced = manager.apply(net, dry_run=True).cut
    before = look()
    manager.apply(net)
    sifted = look()
    cut = before["relations"] - sifted["relations"]
    moments = sum(optimizer.state[parameter]["exp_avg"].numel() for parameter in net.parameters())
    story.check("the sift cut what its dry run announced", cut == announced)
    story.check("Adam's moments followed the sift", moments == net.count().trainable)
    train_on_stream(net, all_digits, ExperienceReplay(), None, optimizer)
    story.chapter(
        "Sift",
        "CovarianceSifter removes a quarter of the hidden nodes, and PruneWeakest cuts the weaker"
        " relations from the pixels. Training goes on with the same Adam.",
        {"before": before, "sifted": sifted, "trained on": look()},
    )
    story.draw(
        "graph",
        plot.graph(net, cut_since=net.version - 1),
        "The net at the end: boxes are the nodes of a task, bands their relations. Hatched bands"
        " are frozen, dotted lines stand for what the sift cut.",
    )

    # 5. Run: every backend, and plain modules, compute the same sums in another order.
    walked = logits(net.walk)
    largest = float(walked.abs().max())
    differences = {"snapshot": float((logits(net.snapshot()) - walked).abs().max())}
    for name in ("reference", "dense", "family", "sparse", "auto"):
        try:
            net.execution.use(name)
        except gn.errors.PlanError:  # sparse, where grapnet was installed without a compiler
            continue
        differences[name] = float((logits(net) - walked).abs().max())
    story.chapter(
        "Run",
        "The net runs on every backend and as a snapshot of plain modules. The table has the"
        " largest difference of each from a walk from node to node, whose logits reach"
        f" {largest:.1f}.",
        {name: {"difference": f"{value:.1e}"} for name, value in differences.items()},
        largest_difference=max(differences.values()),
        largest_logit=largest,
    )
    agree = max(differences.values()) <= 1e-5 * largest
    story.check("all ways to run the net agree", agree)

    # 6. Save: one file has the net, its journal, what undo needs, the optimizer and the memory.
    path = story.folder / "digits.safetensors"
    gn.save(path, net, undo=True, optimizer=optimizer, memory=memory)
    loaded = gn.load(path, device=x.device)
    story.check("the loaded net is equal", torch.equal(logits(loaded), logits(net)))
    loaded.undo()
    relations = [net.count().relations, loaded.count().relations]
    commits = {}
    for commit in net.history:
        added = commit.counts["relations_added"]
        removed = commit.counts["relations_removed"]
        commits[str(commit.version)] = {"reason": commit.reason, "added": added, "removed": removed}
    story.chapter(
        "Save",
        f"The file has {path.stat().st_size:,} bytes. A copy is loaded from it, and undo in the"
        f" copy takes the sift back: it has {relations[1]:,} relations, the original"
        f" {relations[0]:,}. The table is the journal, as the file keeps it.",
        commits,
        bytes=path.stat().st_size,
        undone=relations[1],
    )
    alone = relations == [sifted["relations"], before["relations"]]
    story.check("undo in the copy left the original alone", alone)
    story.draw(
        "timeline",
        plot.timeline(net, scores),
        "Accuracy among the digits seen so far, by version; upright lines are training.",
    )


PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GrapNet: the demonstration</title>
<style>
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
pre { overflow-x: auto; }
img { max-width: 100%; }
</style>
</head>
<body>
<h1>A network that is edited while it learns</h1>
<p>GrapNet on the 1,797 handwritten digits that ship with scikit-learn. Every number here was
measured in this run. What was checked:</p>
<ul>$checks</ul>
$chapters
</body>
</html>
""")


class Story:
    """The chapters, as text, as HTML and as the numbers of `demo.json`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text: list[str] = []
        self.page: list[str] = []
        self.numbers: dict[str, Any] = {"checks": {}}

    def chapter(self, title: str, text: str, rows: dict[str, Any], **numbers: Any) -> None:
        """Adds a chapter with a table; its last row has all columns."""
        from ._command import table

        titles = list(list(rows.values())[-1])
        cells = []
        for label, row in rows.items():
            cells.append([label, *(row.get(title) for title in titles)])
        lines = table(["", *titles], cells)
        self.text += [title, *textwrap.wrap(text, 98), *lines, ""]
        shown = html.escape("\n".join(lines))
        self.page.append(f"<h2>{title}</h2>\n<p>{html.escape(text)}</p>\n<pre>{shown}</pre>")
        self.numbers[title.lower()] = {"rows": rows, **numbers}
        print(f"{title}: done", file=sys.stderr)

    def check(self, claim: str, held: bool) -> None:
        """Records whether a claim held."""
        self.numbers["checks"][claim] = held

    def draw(self, name: str, axes: Any, caption: str) -> None:
        """Adds a picture, as a file and in the page."""
        from grapnet import plot

        path = plot.save(axes, self.folder / f"{name}.png")
        source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        caption = html.escape(caption)
        self.page.append(f'<img src="{source}" alt="{caption}"><p>{caption}</p>')

    def write(self) -> None:
        """Writes `report.html` and `demo.json`."""
        items = []
        for claim, held in self.numbers["checks"].items():
            mark = {True: "✓", False: "✗ NOT:"}[held]
            items.append(f"<li>{mark} {html.escape(claim)}</li>")
        page = PAGE.substitute(checks="\n".join(items), chapters="\n".join(self.page))
        (self.folder / "report.html").write_text(page, encoding="utf-8")
        text = json.dumps(self.numbers, indent=1, allow_nan=False)
        (self.folder / "demo.json").write_text(text + "\n", encoding="utf-8")


def run(given: argparse.Namespace) -> Outcome:
    """Runs the demonstration; the exit code is 1 when a check fails."""
    import torch

    from grapnet.integrations._extra import require

    for module in ("sklearn", "matplotlib"):
        require(module, "demo")
    began = time.perf_counter()
    torch.set_num_threads(1)  # nets this small run faster on one
    given.out.mkdir(parents=True, exist_ok=True)
    story = Story(given.out)
    train, test = load(given.device)
    tell(story, train, test, given.seed)
    story.numbers["versions"] = {
        "grapnet": gn.__version__,
        "torch": torch.__version__,
        "scikit-learn": version("scikit-learn"),
        "python": platform.python_version(),
    }
    story.numbers["settings"] = {"seed": given.seed, "device": str(given.device)}
    story.numbers["seconds"] = time.perf_counter() - began
    story.write()
    checks = story.numbers["checks"]
    failed = [claim for claim, held in checks.items() if not held]
    lines = [
        *story.text,
        f"{len(checks) - len(failed)} of {len(checks)} checks held",
        *(f"  NOT: {claim}" for claim in failed),
        f"{given.out / 'report.html'} shows it all",
        f"next: {sys.executable} -m grapnet inspect {given.out / 'digits.safetensors'}",
    ]
    return Outcome("\n".join(lines), story.numbers, code=int(bool(failed)))


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds where to write, and the seed."""
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of all random numbers (default: 0)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        metavar="FOLDER",
        help="where to write (default: runs/demo)",
    )


COMMANDS: tuple[Command, ...] = (
    Command(
        name="demo",
        about="grow, cut, undo, freeze, sift and save a digit classifier, and write a report",
        group="See what it is",
        configure=configure,
        run=run,
        examples=("demo", "demo --out /tmp/demo", "demo --seed 7 --json"),
    ),
)
