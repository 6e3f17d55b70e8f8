"""`grapnet demo`: prunes, repairs, cuts, undoes, grows and saves an ordinary network.

`tell` reads like a notebook: each chapter does one thing to the net, measures it before and after,
and checks what must hold. `Story` writes the report.
"""

from __future__ import annotations

import argparse
import base64
import copy
import html
import inspect
import json
import os
import platform
import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import grapnet as gn

from ._command import Cell, Command, Outcome, shown, table

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

# torch, scikit-learn and matplotlib are imported where they are used: --help needs none of them.

WIDTH = 512  # nodes of each hidden layer
RATE = 1e-3  # learning rate of AdamW
BATCH = 64
EPOCHS = 20
STEPS = 100  # training steps of which the fastest counts
DRAWS = 10  # random cuts that are compared
SUPPRESSED = 3  # the digit whose relations are cut
UNSEEN = 9  # the digit that comes later
# What to read next, and where.
GUIDES = (
    ("Prune a model of your own", "guides/prune.md"),
    ("Edit a whole model: channels, heads, blocks", "guides/whole-models.md"),
    ("Rules that prune, rewire and grow while a model trains", "guides/rules.md"),
    ("Save, resume, undo", "guides/save-resume-undo.md"),
    ("Export plain modules for serving", "guides/deploy.md"),
)


class Images(NamedTuple):
    """Images and what they show.

    Attributes:
        x: [images, 64].
        y: [images].
    """

    x: Tensor
    y: Tensor

    def where(self, rows: Tensor) -> Images:
        """Returns some of the images."""
        return Images(self.x[rows], self.y[rows])


def load(device: Any) -> tuple[Images, Images]:
    """Returns the digits of scikit-learn to train on, and those to test on."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images / 16 - 0.3, dtype=torch.float32, device=device)  # [1797, 64]
    y = torch.as_tensor(labels, device=device)
    train, test = train_test_split(range(len(y)), test_size=0.3, random_state=0, stratify=labels)
    return Images(x[train], y[train]), Images(x[test], y[test])


def step(model: nn.Module, optimizer: Optimizer, images: Images) -> None:
    """Makes one training step."""
    from torch.nn.functional import cross_entropy

    optimizer.zero_grad()
    cross_entropy(model(images.x), images.y).backward()
    optimizer.step()


def train(model: nn.Module, optimizer: Optimizer, images: Images, epochs: int) -> None:
    """Trains in the ordinary way; the order of the images is the same in every call."""
    import torch

    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(images.y), generator=order).split(BATCH):
            step(model, optimizer, images.where(rows))


def accuracy(model: Callable[[Tensor], Tensor], images: Images) -> float:
    """Returns the share of the images that are recognised."""
    import torch

    with torch.no_grad():
        return float((model(images.x).argmax(1) == images.y).float().mean())


def state_bytes(optimizer: Optimizer) -> int:
    """Returns how much an optimizer stores."""
    found = 0
    for state in optimizer.state.values():
        found += sum(value.nbytes for value in state.values())
    return found


def step_seconds(models: Sequence[nn.Module], images: Images) -> list[float]:
    """Returns the time of the fastest training step of each model.

    The models take turns, so that other work on the machine slows all of them.
    """
    from torch.optim import AdamW

    optimizers = [AdamW(model.parameters(), RATE) for model in models]
    found = [float("inf")] * len(models)
    for _ in range(STEPS):
        for number, model in enumerate(models):
            began = time.perf_counter()
            step(model, optimizers[number], images)
            found[number] = min(found[number], time.perf_counter() - began)
    return found


def prune(net: gn.GrapNet, x: Tensor, *, repair: bool) -> None:
    """Removes three of four hidden nodes, with a few images to look at."""
    import torch

    from grapnet.rules import GramRecorder
    from grapnet.rules._least_squares import choose_damping, column_subset, repaired

    for layer in (1, 2):
        r = GramRecorder(layer)
        r.arm(net)
        with torch.no_grad():
            net(x)
        r.disarm()
        rel = net.layers[layer].outgoing()
        P = len(net.layers[layer])
        C = len(net.layers[layer + 1])
        w = rel.weights.detach().double().reshape(P, C).t()
        b = net.layers[layer + 1].biases.detach().double()
        w = torch.cat([w, b[:, None]], 1)
        stay = torch.zeros(P, dtype=torch.bool)
        stay[column_subset(r.gram, w[:, :-1].norm(dim=0), P // 4)] = True
        gone = torch.cat([~stay, torch.tensor([False])])
        with net.edit("prune", by="demo") as edit:
            edit.remove_nodes(net.layers[layer][(~stay).nonzero().squeeze(1)])
            if repair:
                d = choose_damping(w, r.gram, r.held_out_gram, gone)
                new = repaired(w, r.gram, gone, d)
                edit.assign(rel, new[:, :-1].t().reshape(-1, 1).float())
                edit.assign(net.layers[layer + 1], new[:, -1].float())


def localise(net: gn.GrapNet, images: Tensor, digit: int) -> gn.RelationSet:
    """Returns the fewest relations without which no image of a digit is recognised.

    They are taken by what they add to the logit of the digit, on average over its images.
    """
    recorder = gn.rules.ActivationRecorder(2)
    recorder.arm(net)
    net(images)
    recorder.disarm()
    relations = net.layers[3][digit].incoming()
    added = recorder.mean * relations.weights
    for count in range(1, len(relations)):
        chosen = relations.largest(count=count, key=added)
        with net.edit("are these enough?", trial=True) as edit:
            edit.cut(chosen)
            edit.commit()
            recognised = net(images).argmax(1) == digit
        if not recognised.any():
            return chosen
    return relations


def grow(net: gn.GrapNet) -> None:
    """Adds an output with hidden nodes of its own; everything that is there is frozen."""
    owner = f"digit {UNSEEN}"
    with net.edit(f"grow for {owner}", by="demo") as edit:
        edit.freeze(net.select())
        first = edit.add_nodes(1, 16, owner=owner)
        second = edit.add_nodes(2, 16, owner=owner)
        output = edit.add_nodes(3, 1, owner=owner)
        edit.connect(net.layers[0], first)
        edit.connect(net.layers[1], second)
        edit.connect(net.layers[2], output)
        edit.connect(first, second)
        edit.connect(second, output)


def resume(path: Path, device: Any) -> tuple[gn.GrapNet, Optimizer]:
    """Returns the net of a file, and an optimizer that goes on where the saved one was."""
    from torch.optim import AdamW

    net = gn.load(path, device=device)
    optimizer = AdamW(net.parameters(), RATE)
    gn.restore(path, optimizer=optimizer)
    gn.attach(optimizer, net)
    return net, optimizer


def tell(story: Story, learn: Images, test: Images) -> None:
    """Runs all chapters with images to train on and images to test on."""
    seen = learn.where(learn.y != UNSEEN)
    held = test.where(test.y != UNSEEN)
    plain, net, optimizer = tell_training(story, seen, held)
    tell_pruning(story, net, optimizer, plain, seen, held)
    tell_cutting(story, net, optimizer, seen, held)
    tell_growing(story, net, optimizer, learn, test)
    tell_saving(story, net, optimizer, learn, test)


def tell_training(story: Story, seen: Images, held: Images) -> Any:
    """Trains plain modules, and makes a net of them; returns both and the optimizer."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Linear(64, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 9),
    ).to(seen.x.device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    train(model, optimizer, seen, EPOCHS)
    plain = copy.deepcopy(model)
    net = gn.from_module(model, optimizer=optimizer)
    with torch.no_grad():
        difference = float((net(held.x) - plain(held.x)).abs().max())
    rows = {}
    for name, trained in (("nn.Sequential", plain), ("the same as a net", net)):
        rows[name] = {
            "parameters": sum(parameter.numel() for parameter in trained.parameters()),
            "training images": accuracy(trained, seen),
            "test images": accuracy(trained, held),
        }
    story.chapter(
        "Train an ordinary network",
        f"An nn.Sequential, 64-{WIDTH}-{WIDTH}-9 with ReLU, learns the digits 0 to 8 with AdamW in"
        f" {EPOCHS} epochs; no {UNSEEN} is among its images. gn.from_module makes a net of it, and"
        " AdamW goes on with its state. All accuracies below are of test images, which take no part"
        " in training or in any choice.",
        rows,
        difference=difference,
    )
    story.check("the net computes what the modules computed", difference < 1e-4)
    return plain, net, optimizer


def tell_pruning(
    story: Story,
    net: gn.GrapNet,
    optimizer: Optimizer,
    plain: nn.Module,
    seen: Images,
    held: Images,
) -> None:
    """Removes most hidden nodes, with repair and without, and measures what that saves."""

    def look(net: gn.GrapNet) -> dict[str, Any]:
        count = net.count().parameters
        hidden = sum(net.sizes[1:-1])
        return {"hidden nodes": hidden, "parameters": count, "accuracy": accuracy(net, held)}

    def measure() -> dict[str, int]:
        path = story.folder / "size.safetensors"
        gn.save(path, net, optimizer=optimizer)
        found = {
            "parameters": net.count().parameters,
            "optimizer state": state_bytes(optimizer),
            "file with optimizer": path.stat().st_size,
        }
        path.unlink()
        return found

    before = look(net)
    large = measure()
    unrepaired = copy.deepcopy(net)
    prune(unrepaired, seen.x, repair=False)
    prune(net, seen.x, repair=True)
    cut = look(unrepaired)
    repaired = look(net)
    story.chapter(
        "Remove 75 % of its hidden nodes",
        "Three of four nodes leave each hidden layer, and nothing is trained afterwards. Without"
        " repair the other weights stay as they are. With repair the same edit gives them the"
        " values that keep best, by least squares, what the next layer received.",
        {"before": before, "removed, no repair": cut, "removed and repaired": repaired},
        code=prune,
    )
    kept = repaired["accuracy"] >= before["accuracy"] - 0.02
    story.check("with repair, 75 % of the nodes cost at most 2 points of accuracy", kept)
    story.check("without repair, they cost more", cut["accuracy"] < repaired["accuracy"])

    small = measure()
    seconds = step_seconds([plain, copy.deepcopy(net)], seen.where(slice(BATCH)))
    rows = {}
    for name, old in large.items():
        unit = "bytes" * (name != "parameters")
        rows[name] = _compared(old, small[name], unit)
    rows["training step"] = _compared(1e6 * seconds[0], 1e6 * seconds[1], "µs")
    story.chapter(
        "Everything gets smaller",
        "The removed weights are gone, not set to 0: from the net, from the file, and from AdamW,"
        " which keeps the moments of the others. The step is the fastest of"
        f" {STEPS}, {BATCH} images each, on one thread; nn.Sequential and the pruned net took"
        " turns.",
        rows,
        step_seconds=seconds,
    )
    moments = sum(optimizer.state[parameter]["exp_avg"].numel() for parameter in net.parameters())
    story.check("AdamW has moments for exactly the weights left", moments == small["parameters"])
    for name in ("optimizer state", "file with optimizer"):
        story.check(f"{name}: less than a fifth", small[name] < large[name] / 5)
    story.check("the training step takes less time", seconds[1] < seconds[0])


def _compared(before: float, after: float, unit: str) -> dict[str, str]:
    return {
        "before": f"{before:,.0f} {unit}".strip(),
        "after": f"{after:,.0f} {unit}".strip(),
        "ratio": f"{before / after:.1f} ×",
    }


def tell_cutting(
    story: Story, net: gn.GrapNet, optimizer: Optimizer, seen: Images, held: Images
) -> None:
    """Cuts the relations of one digit, beside random ones, and undoes it."""
    import torch

    train(net, optimizer, seen, 1)
    name = f"digit {SUPPRESSED}"
    of_digit = held.y == SUPPRESSED
    others = [digit for digit in range(9) if digit != SUPPRESSED]

    def logits() -> Tensor:
        # A walk adds up relation by relation; a matrix product may add in another order once the
        # wiring is another.
        with torch.no_grad():
            return net.walk(held.x)

    start = logits()

    def look() -> dict[str, Any]:
        right = logits().argmax(1) == held.y
        return {
            name: float(right[of_digit].float().mean()),
            "other digits": float(right[~of_digit].float().mean()),
            "change of other logits": float((logits() - start)[:, others].abs().max()),
        }

    def state() -> list[Tensor]:
        tensors = [logits(), *net.parameters()]
        for parameter in net.parameters():
            tensors += optimizer.state[parameter].values()
        return [tensor.detach().clone() for tensor in tensors]

    def tried(relations: gn.RelationSet, count: int) -> dict[str, Any]:
        found = []
        for _ in range(DRAWS):
            with net.edit("a random cut", trial=True) as edit:
                edit.cut(relations[torch.randperm(len(relations))[:count]])
                edit.commit()
                found.append(look())
        return {key: sum(row[key] for row in found) / DRAWS for key in found[0]}

    before = look()
    kept = state()
    chosen = localise(net, seen.x[seen.y == SUPPRESSED], SUPPRESSED)
    count = len(chosen)
    relations = net.layers[3].incoming()
    same = tried(net.layers[3][SUPPRESSED].incoming(), count)
    anywhere = tried(relations, count)
    with net.edit(f"suppress {name}", by="demo") as edit:
        edit.cut(chosen)
    cut = look()
    net.undo()
    rows = {
        "before": before,
        f"the {count} of {name}": cut,
        f"{count} random ones to {name}": same,
        f"{count} random ones": anywhere,
        "after undo": look(),
    }
    shown_rows = {}
    for label, row in rows.items():
        change = f"{row['change of other logits']:.3g}"
        shown_rows[label] = {**row, "change of other logits": change}
    story.chapter(
        "Find one class, cut it, undo it",
        f"The net trained one more epoch. Trials then found the {count} of the"
        f" {len(relations):,} relations to the outputs without which no training image of"
        f" {name} is recognised. They are cut. As controls, as many random relations are cut, to"
        f" the output of {name} and to any output (means of {DRAWS} trials). This suppresses an"
        f" answer; the hidden layers still know {name}.",
        shown_rows,
        code=localise,
        relations=count,
    )
    restored = all(torch.equal(old, new) for old, new in zip(kept, state(), strict=True))
    story.check(f"without its {count} relations, {name} is not recognised", cut[name] < 0.1)
    story.check(
        "the logits of all other digits are the same, bit for bit",
        cut["change of other logits"] == 0,
    )
    story.check("as many random relations do not do that", min(same[name], anywhere[name]) > 0.5)
    story.check("undo brought logits, weights and AdamW's moments back bit for bit", restored)


def tell_growing(
    story: Story, net: gn.GrapNet, optimizer: Optimizer, learn: Images, test: Images
) -> None:
    """Grows an output for a digit that the net has never seen."""
    import torch

    from grapnet import plot

    name = f"digit {UNSEEN}"
    known = test.where(test.y != UNSEEN)
    unseen = test.where(test.y == UNSEEN)

    def look() -> dict[str, Any]:
        count = net.count()
        return {
            "trainable": count.trainable,
            "frozen": count.frozen,
            "digits 0 to 8": accuracy(net, known),
            name: accuracy(net, unseen),
            "all": accuracy(net, test),
        }

    def old_logits() -> Tensor:
        with torch.no_grad():
            return net.walk(test.x)[:, :UNSEEN]

    before = look()
    start = old_logits()
    grow(net)
    grown = look()
    train(net, optimizer, learn, EPOCHS)
    after = look()
    story.chapter(
        "Grow a class that it has never seen",
        f"One edit freezes all that is there and adds an output for {name}, with 16 nodes in each"
        " hidden layer. The new nodes see the old ones, and only the new output sees them. The same"
        f" AdamW trains on all ten digits; a {UNSEEN} can only be told by the new output.",
        {"before": before, "grown": grown, "trained": after},
        code=grow,
    )
    unchanged = torch.equal(old_logits(), start)
    story.check(f"more than 80 % of the images of {name} are recognised", after[name] > 0.8)
    story.check("the logits of the old digits are the same, bit for bit", unchanged)
    story.draw(
        "graph",
        lambda: plot.graph(net),
        "The net: a box is a group of nodes, a band their relations. What is frozen is hatched.",
    )


def tell_saving(
    story: Story, net: gn.GrapNet, optimizer: Optimizer, learn: Images, test: Images
) -> None:
    """Saves the net, loads it, and trains both on."""
    import torch

    path = story.folder / "digits.safetensors"
    gn.save(path, net, optimizer=optimizer, undo=True)
    again, follower = resume(path, test.x.device)
    with torch.no_grad():
        equal = torch.equal(again(test.x), net(test.x))
    moments = state_bytes(follower)
    for trained, own in ((net, optimizer), (again, follower)):
        train(trained, own, learn, 1)
    pairs = zip(net.parameters(), again.parameters(), strict=True)
    resumed = all(torch.equal(here, there) for here, there in pairs)
    rows = {}
    for commit in again.history:
        counts = commit.counts
        rows[str(commit.version)] = {
            "reason": commit.reason,
            "relations added": counts["relations_added"],
            "removed": counts["relations_removed"],
        }
    story.chapter(
        "Save and resume",
        f"One file without code, {path.stat().st_size:,} bytes, has the net, AdamW's {moments:,}"
        " bytes of state, and what undo needs. A net and an AdamW made from it train on beside the"
        " originals. The table is the journal in the file.",
        rows,
        code=resume,
        bytes=path.stat().st_size,
    )
    story.check("the loaded net returns the same bits", equal)
    story.check("after one more epoch both have the same weights, bit for bit", resumed)


PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GrapNet: the demonstration</title>
<style>
:root { color-scheme: light dark; --ground: #fff; --card: #f4f6f8; --ink: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --bar: #bfe0f5; --good: #1a7f37; --bad: #cf222e; --link: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --card: #1d222a; --ink: #e6e8eb;
  --soft: #9aa4b0; --line: #39424e; --bar: #1d4a68; --good: #4ac26b; --bad: #ff7a70;
  --link: #6cb6ff; } }
* { box-sizing: border-box; }
body { max-width: 80rem; margin: 0 auto; padding: 1.5rem; font: 16px/1.5 system-ui, sans-serif;
  background: var(--ground); color: var(--ink); }
h1 { line-height: 1.2; margin: 0 0 .5rem; }
h2 { line-height: 1.25; margin: 0 0 .5rem; }
p { margin: 0 0 .75rem; }
a { color: var(--link); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 1rem;
  margin: 1.25rem 0; }
.tiles div { background: var(--card); border-radius: .5rem; padding: .75rem 1rem; color: var(--soft);
  font-size: .9rem; }
.tiles b { display: block; font-size: 1.5rem; line-height: 1.3; color: var(--ink); }
section { display: grid; grid-template-columns: minmax(0, 1fr); gap: .5rem 2.5rem;
  border-top: 1px solid var(--line); padding: 1.5rem 0; }
@media (min-width: 60rem) { section { grid-template-columns: minmax(0, 5fr) minmax(0, 6fr); } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 600; vertical-align: bottom; color: var(--soft); font-size: .9rem; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child, .words { text-align: left; }
.share { background: linear-gradient(var(--bar) 0 0) no-repeat left / var(--share) 70%; }
ul.checks { list-style: none; padding: 0; margin: 0 0 .75rem; }
.checks li { padding-left: 1.5rem; text-indent: -1.5rem; }
.checks b { display: inline-block; width: 1.5rem; text-indent: 0; color: var(--good); }
.checks .failed b { color: var(--bad); }
summary { cursor: pointer; color: var(--link); }
pre { overflow-x: auto; background: var(--card); border-radius: .5rem; padding: .75rem 1rem;
  font-size: .85rem; line-height: 1.45; margin: .5rem 0 0; }
figure { margin: 1rem 0 0; }
img { width: 100%; height: auto; border-radius: .5rem; }
figcaption { color: var(--soft); font-size: .9rem; }
@media (max-width: 30rem) { body { padding: 1rem; } th, td { padding: .3rem .25rem; }
  table { font-size: .85rem; } th { font-size: .8rem; } }
</style>
</head>
<body>
<h1>A network that is edited while it learns</h1>
<p>GrapNet on the 1,797 handwritten digits that come with scikit-learn. Every number was measured
in this run, $seconds s on $machine, and every claim is a check that can fail.</p>
<div class="tiles">$tiles</div>
$chapters
<section><div><h2>What to try next</h2><ul>$next</ul></div>
<div><p>The file of this run, from the shell:</p><pre>$commands</pre></div></section>
</body>
</html>
""")


@dataclass
class Chapter:
    """One thing that is done to the net.

    Attributes:
        title: its title.
        text: what is done.
        rows: a table: what each row has under each title of a column.
        code: the function that does it; None if there is none worth reading.
        numbers: further numbers of `demo.json`.
        checks: what must hold, and whether it did.
        picture: HTML of a picture, or nothing.
    """

    title: str
    text: str
    rows: dict[str, dict[str, Cell]]
    code: Callable[..., Any] | None
    numbers: dict[str, Any]
    checks: dict[str, bool] = field(default_factory=dict)
    picture: str = ""

    def lines(self) -> list[str]:
        """Returns it for a terminal."""
        titles = list(next(iter(self.rows.values())))
        cells = [[label, *row.values()] for label, row in self.rows.items()]
        marked = [f"  {_mark(held)} {claim}" for claim, held in self.checks.items()]
        return [self.title, *textwrap.wrap(self.text, 98), *table(["", *titles], cells), *marked]

    def html(self, number: int) -> str:
        """Returns it for the page: words on the left, the table on the right."""
        left = [f"<h2>{number}. {_escaped(self.title)}</h2>", f"<p>{_escaped(self.text)}</p>"]
        left.append('<ul class="checks">')
        for claim, held in self.checks.items():
            kind = "held" if held else "failed"
            left.append(f'<li class="{kind}"><b>{_mark(held)}</b>{_escaped(claim)}</li>')
        left.append("</ul>")
        if self.code is not None:
            source = html.escape(inspect.getsource(self.code))
            left.append(f"<details><summary>The code</summary><pre>{source}</pre></details>")
        right = ['<div class="scroll"><table>', "<tr><th></th>"]
        right += [f"<th>{_escaped(title)}</th>" for title in next(iter(self.rows.values()))]
        for label, row in self.rows.items():
            right.append(f"</tr><tr><td>{_escaped(label)}</td>")
            right += [_html_cell(cell) for cell in row.values()]
        right.append(f"</tr></table></div>{self.picture}")
        return f"<section><div>{''.join(left)}</div><div>{''.join(right)}</div></section>"


def _mark(held: bool) -> str:
    return "✓" if held else "✗"


def _escaped(text: str) -> str:
    """Returns HTML in which a number and its unit stay on one line."""
    return re.sub(r"(?<=\d) (?=[%×]|bytes|µs|points|s )", "\u00a0", html.escape(text))


def _html_cell(cell: Cell) -> str:
    """Returns a cell of a table; a share has a bar behind it."""
    text = _escaped(shown(cell)).replace(" ", "\u00a0")
    if isinstance(cell, float):
        return f'<td class="share" style="--share: {cell:.1%}">{text}</td>'
    if isinstance(cell, str) and not cell[:1].isdigit():
        return f'<td class="words">{_escaped(cell)}</td>'
    return f"<td>{text}</td>"


class Story:
    """The chapters, as text, as HTML and as the numbers of `demo.json`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chapters: list[Chapter] = []
        self.tiles: list[str] = []

    @property
    def checks(self) -> dict[str, bool]:
        """What must hold, and whether it did."""
        found = {}
        for chapter in self.chapters:
            found.update(chapter.checks)
        return found

    def chapter(
        self,
        title: str,
        text: str,
        rows: dict[str, dict[str, Cell]],
        code: Callable[..., Any] | None = None,
        **numbers: Any,
    ) -> None:
        """Adds a chapter with a table."""
        self.chapters.append(Chapter(title, text, rows, code, numbers))
        print(f"{title}: done", file=sys.stderr)

    def check(self, claim: str, held: bool) -> None:
        """Records whether a claim of the last chapter held."""
        self.chapters[-1].checks[claim] = held

    def tile(self, number: str, meaning: str) -> None:
        """Adds a number to the top of the page."""
        self.tiles.append(f"<div><b>{_escaped(number)}</b>{_escaped(meaning)}</div>")

    def draw(self, name: str, drawn: Callable[[], Any], caption: str) -> None:
        """Adds a picture to the last chapter, for light and for dark screens."""
        from grapnet import plot

        sources = {}
        for theme in ("light", "dark"):
            with plot.theme(theme):
                path = plot.save(drawn(), self.folder / f"{name}-{theme}.png")
            data = base64.b64encode(path.read_bytes()).decode()
            sources[theme] = f"data:image/png;base64,{data}"
        self.chapters[-1].picture = (
            '<figure><picture><source media="(prefers-color-scheme: dark)"'
            f' srcset="{sources["dark"]}"><img src="{sources["light"]}" alt="">'
            f"</picture><figcaption>{_escaped(caption)}</figcaption></figure>"
        )

    def data(self) -> dict[str, Any]:
        """Returns all numbers."""
        found = {}
        for chapter in self.chapters:
            found[chapter.title] = {"rows": chapter.rows, **chapter.numbers}
        return {"checks": self.checks, "chapters": found}

    def write(self, data: dict[str, Any]) -> None:
        """Writes `report.html` and `demo.json`."""
        checks = self.checks.values()
        self.tile(f"{sum(checks)} of {len(checks)}", "checks held")
        chapters = [chapter.html(n) for n, chapter in enumerate(self.chapters, 1)]
        page = PAGE.substitute(
            seconds=f"{data['seconds']:.0f}",
            machine=f"{os.cpu_count()} cores",
            tiles="".join(self.tiles),
            chapters="\n".join(chapters),
            next=self._guides(),
            commands=html.escape("\n".join(_commands(self.folder))),
        )
        (self.folder / "report.html").write_text(page, encoding="utf-8")
        text = json.dumps(data, indent=1, allow_nan=False)
        (self.folder / "demo.json").write_text(text + "\n", encoding="utf-8")

    def _guides(self) -> str:
        """Returns links to the documentation beside the library, or the names of its pages."""
        documents = Path(__file__).resolve().parents[2] / "docs"
        items = []
        for title, name in GUIDES:
            item = f"{title}: docs/{name}"
            if (documents / name).is_file():
                place = os.path.relpath(documents / name, self.folder.resolve())
                item = f'<a href="{html.escape(Path(place).as_posix())}">{title}</a>'
            items.append(f"<li>{item}</li>")
        return "".join(items)


def _commands(folder: Path) -> list[str]:
    """Returns what to run next."""
    program = f"{sys.executable} -m grapnet"
    path = folder / "digits.safetensors"
    return [
        f"{program} inspect {path}",
        f"{program} history {path} --details",
        f"{program} undo {path} -o {folder / 'nine-digits.safetensors'}",
    ]


def run(given: argparse.Namespace) -> Outcome:
    """Runs the demonstration; the exit code is 1 when a check fails."""
    import torch

    from grapnet.integrations._extra import require

    for module in ("sklearn", "matplotlib"):
        require(module, "demo")
    began = time.perf_counter()
    torch.set_num_threads(1)  # nets this small run faster on one
    torch.manual_seed(given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    story = Story(given.out)
    tell(story, *load(given.device))
    data = story.data()
    data["versions"] = {
        "grapnet": gn.__version__,
        "torch": torch.__version__,
        "scikit-learn": version("scikit-learn"),
        "python": platform.python_version(),
    }
    data["settings"] = {"seed": given.seed, "device": str(given.device)}
    data["seconds"] = time.perf_counter() - began
    story.write(data)
    lines = []
    for chapter in story.chapters:
        lines += [*chapter.lines(), ""]
    held = list(story.checks.values())
    lines += [
        f"{sum(held)} of {len(held)} checks held",
        f"{given.out / 'report.html'} shows it all",
        f"next: {_commands(given.out)[0]}",
    ]
    return Outcome("\n".join(lines), data, code=int(not all(held)))


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
        about="prune, repair, cut, undo, grow and save a digit classifier, and write a report",
        group="See what it is",
        configure=configure,
        run=run,
        examples=("demo", "demo --out /tmp/demo", "demo --seed 7 --json"),
    ),
)
