"""`grapnet demo`: prunes, repairs, cuts, undoes, grows and saves an ordinary network.

`run_chapters` reads like a notebook: each chapter does one thing to the net, measures it before and
after, and checks what must hold.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grapnet as gn

from ._command import Cell, Command, Outcome, shown
from ._report import Chapter, draw, write

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

# torch, scikit-learn and matplotlib are imported where they are used: --help needs none of them.

OPENING = (
    "For a trained PyTorch network that is too large, or that has to lose or learn a class.",
    "GrapNet edits it in place while its optimizer goes on; here on 1,797 handwritten digits.",
)

WIDTH = 512  # nodes of each hidden layer
RATE = 1e-3  # learning rate of AdamW
BATCH = 64
EPOCHS = 20
STEPS = 100  # training steps of which the fastest counts
SHARES = (0.75, 0.9)  # of the hidden nodes that leave; the net goes on with the first
DRAWS = 10  # random cuts that are compared
SUPPRESSED = 3  # the digit whose relations are cut
UNSEEN = 9  # the digit that comes later


class Images(NamedTuple):
    """Images and what they show.

    Attributes:
        x: [images, 64].
        y: [images].
    """

    x: Tensor
    y: Tensor

    def where(self, rows: Tensor | slice) -> Images:
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


def mlp(widths: Sequence[int], images: Images) -> tuple[nn.Sequential, Optimizer]:
    """Returns a plain network with ReLUs that was trained from scratch, and its optimizer."""
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(images.x.device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    train(model, optimizer, images, EPOCHS)
    return model, optimizer


def accuracy(model: nn.Module, images: Images) -> float:
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


def same_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Returns whether tensors are equal, one by one."""
    import torch

    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def sizes(folder: Path, net: gn.GrapNet, optimizer: Optimizer) -> dict[str, int]:
    """Returns the number of parameters, and the bytes of the optimizer and of a file with both."""
    path = folder / "size.safetensors"
    gn.save(path, net, optimizer=optimizer)
    found = {
        "parameters": net.count().parameters,
        "optimizer state": state_bytes(optimizer),
        "file with optimizer": path.stat().st_size,
    }
    path.unlink()
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


def prune(net: gn.GrapNet, images: Tensor, share: float, *, repair: bool) -> None:
    """Removes a share of the hidden nodes: those that the others can best make up for."""
    batches = images.split(256)
    gn.prune(net, batches, nodes=share, by="elimination", repair=repair, progress=False)


def localise(net: gn.GrapNet, images: Tensor, digit: int) -> gn.RelationSet:
    """Returns relations without which no image of a digit is recognised.

    They are as many as needed of those that add most to the logit of the digit, on average.
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


def run_chapters(folder: Path, learn: Images, test: Images) -> Iterator[Chapter]:
    """Yields the chapters; each goes on with the net and the optimizer of those before it."""
    seen = learn.where(learn.y != UNSEEN)
    held = test.where(test.y != UNSEEN)
    plain, optimizer = mlp([64, WIDTH, WIDTH, 9], seen)
    before = copy.deepcopy(plain)
    net = gn.from_module(plain, optimizer=optimizer)
    yield tell_training(before, net, seen, held)
    large = sizes(folder, net, optimizer)
    yield tell_pruning(net, seen, held)
    yield tell_sizes(large, sizes(folder, net, optimizer), before, net, optimizer, seen)
    train(net, optimizer, seen, 1)
    yield tell_cutting(net, optimizer, seen, held)
    yield tell_growing(folder, net, optimizer, learn, test)
    yield tell_saving(folder, net, optimizer, learn, test)


def tell_training(before: nn.Module, net: gn.GrapNet, seen: Images, held: Images) -> Chapter:
    """Compares the trained modules with the net that was made of them."""
    import torch

    with torch.no_grad():
        difference = float((net(held.x) - before(held.x)).abs().max())
    rows = {}
    for name, trained in (("nn.Sequential", before), ("the same as a net", net)):
        rows[name] = {
            "parameters": sum(parameter.numel() for parameter in trained.parameters()),
            "training images": accuracy(trained, seen),
            "test images": accuracy(trained, held),
        }
    return Chapter(
        "Train an ordinary network",
        f"An nn.Sequential, 64-{WIDTH}-{WIDTH}-9 with ReLU, learns the digits 0 to 8 with AdamW in"
        f" {EPOCHS} epochs; no {UNSEEN} is among its images. gn.from_module makes a net of it, and"
        " AdamW goes on with its state. All accuracies below are of test images, which take no part"
        " in training or in any choice.",
        rows,
        numbers={"difference": difference},
        checks={"the net computes what the modules computed": difference < 1e-4},
    )


def tell_pruning(net: gn.GrapNet, seen: Images, held: Images) -> Chapter:
    """Removes most hidden nodes, beside copies without repair and small nets from scratch."""
    before = accuracy(net, held)
    rows = {"before": _pruned(net, before, before, None)}
    found = []
    for share in SHARES:
        cut = copy.deepcopy(net)
        prune(cut, seen.x, share, repair=False)
        repaired = copy.deepcopy(net)
        prune(repaired, seen.x, share, repair=True)
        # The control: as small from the start, and trained for as long.
        scratch, _ = mlp(repaired.sizes, seen)
        found.append([accuracy(one, held) for one in (cut, repaired, scratch)])
        rows[f"{100 * share:.0f} % removed"] = _pruned(repaired, *found[-1])
    prune(net, seen.x, SHARES[0], repair=True)
    (_, most, _), (least_cut, least, _) = found
    return Chapter(
        "Remove 75 % of its hidden nodes",
        "Three of four nodes leave each hidden layer, and nothing is trained afterwards. Without"
        " repair the other weights stay as they are. With repair the same edit gives them the"
        " values that keep best, by least squares, what the next layer received. The control is a"
        f" network of that size from the start, trained from scratch in {EPOCHS} epochs. The net"
        " goes on with 75 % removed and repaired; the last row is a copy.",
        rows,
        prune,
        {"accuracy": [before, *found]},
        {
            "with repair, 75 % of the nodes cost at most 2 points": most >= before - 0.02,
            "with repair, 90 % cost at most 4 points": least >= before - 0.04,
            "without repair, 90 % cost at least 5 points": least_cut <= before - 0.05,
        },
        {
            "accuracy after removing 75 % of the hidden nodes, without training": (
                f"{100 * before:.1f} → {shown(most)}"
            )
        },
    )


def _pruned(net: gn.GrapNet, cut: float, repaired: float, scratch: float | None) -> dict[str, Cell]:
    return {
        "hidden nodes": sum(net.sizes[1:-1]),
        "parameters": net.count().parameters,
        "not repaired": cut,
        "repaired": repaired,
        "from scratch": scratch,
    }


def tell_sizes(
    large: dict[str, int],
    small: dict[str, int],
    before: nn.Module,
    net: gn.GrapNet,
    optimizer: Optimizer,
    seen: Images,
) -> Chapter:
    """Compares what the net needs before and after the removal."""
    seconds = step_seconds([before, copy.deepcopy(net)], seen.where(slice(BATCH)))
    rows = {"parameters": _compared(large["parameters"], small["parameters"])}
    for name in ("optimizer state", "file with optimizer"):
        rows[name] = _compared(large[name] / 1000, small[name] / 1000, " kB")
    rows["training step"] = _compared(1e6 * seconds[0], 1e6 * seconds[1], " µs")
    moments = sum(optimizer.state[parameter]["exp_avg"].numel() for parameter in net.parameters())
    return Chapter(
        "Everything gets smaller",
        "The removed weights are gone, not set to 0: from the net, from the file, and from AdamW,"
        " which keeps the moments of the others. The step is the fastest of"
        f" {STEPS}, {BATCH} images each, on one thread; nn.Sequential and the pruned net took"
        " turns.",
        rows,
        numbers={"before": large, "after": small, "step_seconds": seconds},
        checks={
            "AdamW has moments for exactly the weights left": moments == small["parameters"],
            "optimizer state: less than a fifth": (
                small["optimizer state"] < large["optimizer state"] / 5
            ),
            "file with optimizer: less than a fifth": (
                small["file with optimizer"] < large["file with optimizer"] / 5
            ),
            "the training step takes less time": seconds[1] < seconds[0],
        },
        tiles={
            "fewer parameters": rows["parameters"]["ratio"],
            "as fast in a training step": rows["training step"]["ratio"],
        },
    )


def _compared(before: float, after: float, unit: str = "") -> dict[str, str]:
    return {
        "before": f"{before:,.0f}{unit}",
        "after": f"{after:,.0f}{unit}",
        "ratio": f"{before / after:.1f} ×",
    }


def tell_cutting(net: gn.GrapNet, optimizer: Optimizer, seen: Images, held: Images) -> Chapter:
    """Cuts the relations of one digit, beside random ones, and undoes it."""
    import torch

    name = f"digit {SUPPRESSED}"
    of_digit = held.y == SUPPRESSED
    others = [digit for digit in range(9) if digit != SUPPRESSED]

    def look(logits: Tensor, start: Tensor) -> dict[str, float]:
        right = (logits.argmax(1) == held.y).float()
        return {
            name: float(right[of_digit].mean()),
            "other digits": float(right[~of_digit].mean()),
            "change of other logits": float((logits - start)[:, others].abs().max()),
        }

    def random_cuts(relations: gn.RelationSet) -> dict[str, float]:
        """Returns the means over trials that cut as many relations."""
        found = []
        for _ in range(DRAWS):
            drawn = torch.randperm(len(relations))[: len(chosen)]
            with net.edit("a random cut", trial=True) as edit:
                edit.cut(relations[drawn])
                edit.commit()
                found.append(look(net(held.x), start))
        return {key: sum(row[key] for row in found) / DRAWS for key in found[0]}

    def state() -> list[Tensor]:
        tensors = [net(held.x), *net.parameters()]
        for parameter in net.parameters():
            tensors += optimizer.state[parameter].values()
        return [tensor.detach().clone() for tensor in tensors]

    chosen = localise(net, seen.x[seen.y == SUPPRESSED], SUPPRESSED)
    count = len(chosen)
    relations = net.layers[3].incoming()
    kept = state()
    with torch.no_grad():
        start = net(held.x)
        # A walk adds up relation by relation. A matrix product may add in another order once the
        # wiring is another.
        walked = net.walk(held.x)
        before = look(start, start)
        same = random_cuts(net.layers[3][SUPPRESSED].incoming())
        anywhere = random_cuts(relations)
        with net.edit(f"suppress {name}", by="demo") as edit:
            edit.cut(chosen)
        cut = look(net.walk(held.x), walked)
        net.undo()
        undone = look(net(held.x), start)
    restored = same_bits(kept, state())
    rows = {
        "before": before,
        f"{count} localised": cut,
        f"{count} random, of {name}": same,
        f"{count} random, of all": anywhere,
        "after undo": undone,
    }
    cells = {}
    for label, row in rows.items():
        change = f"{row['change of other logits']:.2g}"
        cells[label] = {**row, "change of other logits": change}
    return Chapter(
        "Find one class, cut it, undo it",
        f"The net trains one more epoch. Of the {len(relations):,} relations to the outputs, trials"
        f" then find {count} without which no training image of {name} is recognised, and an edit"
        " cuts them. The controls cut as many random relations of the"
        f" output of {name}, and of all outputs (means of {DRAWS} trials). This suppresses an"
        f" answer; the hidden layers still know {name}.",
        cells,
        localise,
        {"relations": count},
        {
            f"fewer than 10 % of the images of {name} are recognised": cut[name] < 0.1,
            "the logits of all other digits stay the same, bit for bit": (
                cut["change of other logits"] == 0
            ),
            "random cuts of that size leave more than half": min(same[name], anywhere[name]) > 0.5,
            "undo restores logits, weights and AdamW's moments, bit for bit": restored,
        },
        {
            f"of {name} are recognised, before and after a cut of {count} relations": (
                f"{100 * before[name]:.1f} → {shown(cut[name])}"
            )
        },
    )


def tell_growing(
    folder: Path, net: gn.GrapNet, optimizer: Optimizer, learn: Images, test: Images
) -> Chapter:
    """Grows an output for a digit that the net has never seen."""
    import torch

    name = f"digit {UNSEEN}"

    def look() -> dict[str, Cell]:
        count = net.count()
        return {
            "trainable": count.trainable,
            "frozen": count.frozen,
            "digits 0 to 8": accuracy(net, test.where(test.y != UNSEEN)),
            name: accuracy(net, test.where(test.y == UNSEEN)),
            "all": accuracy(net, test),
        }

    def old_logits() -> Tensor:
        with torch.no_grad():
            return net.walk(test.x)[:, :UNSEEN]

    rows = {"before": look()}
    start = old_logits()
    grow(net)
    rows["grown"] = look()
    train(net, optimizer, learn, EPOCHS)
    rows["trained"] = look()
    learned = accuracy(net, test.where(test.y == UNSEEN))
    return Chapter(
        "Grow a class that it has never seen",
        f"One edit freezes all that is there and adds an output for {name}, with 16 nodes in each"
        " hidden layer. The new nodes see the old ones, and only the new output sees them. The same"
        f" AdamW trains on all ten digits; a {UNSEEN} can only be recognized by the new output.",
        rows,
        grow,
        checks={
            f"more than 80 % of the images of {name} are recognised": learned > 0.8,
            "the logits of the old digits are the same, bit for bit": (
                torch.equal(old_logits(), start)
            ),
        },
        tiles={f"of {name}, a class that is grown later": f"0 → {shown(learned)}"},
        picture=draw(
            net,
            folder,
            "A box is a group of nodes, a band their relations; hatched ones are frozen.",
        ),
    )


def tell_saving(
    folder: Path, net: gn.GrapNet, optimizer: Optimizer, learn: Images, test: Images
) -> Chapter:
    """Saves the net, loads it, and trains both on."""
    import torch

    path = folder / "digits.safetensors"
    gn.save(path, net, optimizer=optimizer)
    again, follower = resume(path, test.x.device)
    with torch.no_grad():
        equal = torch.equal(again(test.x), net(test.x))
    moments = state_bytes(follower)
    for trained, own in ((net, optimizer), (again, follower)):
        train(trained, own, learn, 1)
    rows = {}
    for commit in again.history:
        counts = commit.counts
        rows[str(commit.version)] = {
            "reason": commit.reason,
            "relations added": counts["relations_added"],
            "removed": counts["relations_removed"],
        }
    size = path.stat().st_size
    return Chapter(
        "Save and resume",
        f"One file of {size:,} bytes, without code, holds the net, the state of"
        f" AdamW ({moments:,} bytes, only of what is not frozen) and the journal shown here. A"
        " net and an AdamW made from it train on beside the originals.",
        rows,
        resume,
        {"bytes": size},
        {
            "the loaded net returns the same bits": equal,
            "after one more epoch both have the same weights, bit for bit": (
                same_bits(list(net.parameters()), list(again.parameters()))
            ),
        },
    )


def _commands(folder: Path) -> list[str]:
    """Returns what to run next."""
    program = Path(sys.executable)
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    path = folder / "digits.safetensors"
    cut = f"cut {path} --owner 'digit {UNSEEN}' --dry-run -o {folder / 'cut.safetensors'}"
    words = (f"inspect {path}", f"history {path}", cut)
    return [f"{program} -m grapnet {word}" for word in words]


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
    chapters = []
    for chapter in run_chapters(given.out, *load(given.device)):
        print(f"{chapter.title}: done", file=sys.stderr)
        chapters.append(chapter)
    checks: dict[str, bool] = {}
    for chapter in chapters:
        checks |= chapter.checks
    data = {
        "checks": checks,
        "chapters": {one.title: {"rows": one.rows, **one.numbers} for one in chapters},
        "versions": {
            "grapnet": gn.__version__,
            "torch": torch.__version__,
            "scikit-learn": version("scikit-learn"),
            "python": platform.python_version(),
        },
        "settings": {"seed": given.seed, "device": str(given.device)},
        "seconds": time.perf_counter() - began,
    }
    commands = _commands(given.out)
    write(given.out, " ".join(OPENING), chapters, data, commands)
    lines = [*OPENING, ""]
    for chapter in chapters:
        lines += [*chapter.lines(), ""]
    lines += [
        f"{sum(checks.values())} of {len(checks)} checks held",
        f"{given.out / 'report.html'} shows it all",
        f"next: {commands[0]}",
    ]
    return Outcome("\n".join(lines), data, code=int(not all(checks.values())))


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
