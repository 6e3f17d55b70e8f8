"""Dynamic sparse training: RigL and SET at 90 % sparsity beside static random wiring and dense
networks, and RigL on tiles of 64 nodes a side beside static tiles.

`python -m examples.rigl` trains all of them on Fashion-MNIST (on the digits of scikit-learn with
`--data digits`) and prints a table; `--methods` names some of them, `--density` sets the share of
the relations, and `--time` measures a training step of each, in turns, as well. `--json FILE` keeps
the numbers after every run: the same command goes on with what is missing there.

Two controls have as many parameters as the sparse networks, in layers of fewer nodes without a
sparse wiring: "narrow dense" trains for as many epochs, "narrow dense, equal time" for as long as
RigL takes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import grapnet as gn
from grapnet.rules import RuleManager, rigl, set_rewiring
from studies.data import load_fashion
from studies.statistics import paired

LONGER = "narrow dense, equal time"
METHODS = ("dense", "narrow dense", LONGER, "static", "SET", "RigL", "static tiles", "RigL tiles")
CONTRASTS = (("RigL", "static"), ("RigL", "narrow dense"), ("RigL", LONGER))
# settings that may change from one run to the next that is kept in the same file
FREE = ("seeds", "device", "methods", "tile")
Split = tuple[Tensor, Tensor]


@dataclass
class Settings:
    """Networks of the same sizes, trained alike."""

    data: str = "fashion"  # or "digits", which come with scikit-learn
    hidden: tuple[int, ...] = (1024, 1024)
    # of the sparse ones, shared out over the transitions by Erdős–Rényi-kernel
    density: float = 0.1
    tile: int = 64  # nodes a side, of those whose relations come in tiles
    epochs: int = 30
    batch: int = 256
    learning_rate: float = 0.1  # at first; it goes down to 0 along a cosine
    momentum: float = 0.9
    weight_decay: float = 1e-4
    every: int = 100  # steps between two rewirings
    # of the relations that the first rewiring moves; it decays to 0 at three quarters of the run
    fraction: float = 0.3
    seeds: int = 5
    device: str = "cpu"
    methods: tuple[str, ...] = METHODS


def main(settings: Settings, path: Path | None = None) -> dict[str, Any]:
    """Trains every method with every seed and returns the test accuracies in per cent.

    Args:
        settings: of all runs.
        path: of a JSON file with the runs that are finished; it is written after each run.

    Raises:
        ValueError: if the file was made with other settings.
    """
    train, test = read(settings.data, settings.device)
    outcome: dict[str, Any] = {"settings": asdict(settings), "accuracy": {}}
    if path is not None and path.exists():
        outcome = json.loads(path.read_text())
        _refuse_other(outcome["settings"], settings)
    accuracies = outcome["accuracy"]
    devices = outcome.setdefault("devices", {})
    for method in accuracies:
        devices.setdefault(method, outcome["settings"]["device"])
    if LONGER in settings.methods and "narrow_epochs" not in outcome:
        outcome["narrow_epochs"] = epochs_of_equal_time(settings, train, test)
    for seed in range(settings.seeds):
        for method in settings.methods:
            found = accuracies.setdefault(method, [])
            if len(found) > seed:
                continue
            devices[method] = settings.device
            epochs = epochs_of(method, outcome)
            found.append(run(method, seed, train, test, replace(settings, epochs=epochs)))
            print(f"seed {seed} {method:>24}: {found[-1]:.2f}", flush=True)
            if path is not None:
                path.write_text(json.dumps(outcome, indent=1) + "\n")
    images = len(train[0])
    outcome["settings"]["seeds"] = max(map(len, accuracies.values()), default=0)
    outcome["parameters"] = {}
    for method in accuracies:
        net, _ = build(method, train[0].shape[1], 0, settings, images)
        outcome["parameters"][method] = sum(part.numel() for part in net.parameters())
    return outcome


def _refuse_other(found: dict[str, Any], settings: Settings) -> None:
    """Raises if runs of a file differ from others in more than seeds, device and methods."""
    wanted = json.loads(json.dumps(asdict(settings)))
    other = [key for key in wanted if key not in FREE and found[key] != wanted[key]]
    if other:
        raise ValueError(f"the file was made with other settings of {', '.join(other)}")


def epochs_of(method: str, outcome: dict[str, Any]) -> int:
    """Returns for how many epochs a method trains."""
    if method == LONGER:
        return outcome["narrow_epochs"]
    return outcome["settings"]["epochs"]


def epochs_of_equal_time(settings: Settings, train: Split, test: Split, turns: int = 5) -> int:
    """Returns how many epochs the narrow dense network trains in the time of RigL's.

    Both train for two epochs in every turn. The time is the processor's, which depends less on
    other work of the machine than the clock.
    """
    short = replace(settings, epochs=2)
    ratios = []
    for seed in range(turns):
        seconds = {}
        for method in ("narrow dense", "RigL"):
            start = time.process_time()
            run(method, seed, train, test, short)
            seconds[method] = time.process_time() - start
        ratios.append(seconds["RigL"] / seconds["narrow dense"])
    return max(1, round(settings.epochs * statistics.median(ratios)))


def run(method: str, seed: int, train: Split, test: Split, settings: Settings) -> float:
    """Trains one network and returns its test accuracy in per cent."""
    torch.manual_seed(seed)
    net, manager = build(method, train[0].shape[1], seed, settings, len(train[0]))
    optimizer = _optimizer(net, settings)
    if isinstance(net, gn.GrapNet):
        gn.attach(optimizer, net)
        manager.start(net)
    steps = settings.epochs * -(-len(train[0]) // settings.batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = 0
    relations = net.count().relations if isinstance(net, gn.GrapNet) else 0
    order = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(train[0]), generator=order).split(settings.batch):
            rows = rows.to(settings.device)
            optimizer.zero_grad()
            cross_entropy(net(train[0][rows]), train[1][rows]).backward()
            optimizer.step()
            scheduler.step()
            if isinstance(net, gn.GrapNet):
                manager.apply(net, step)
            step += 1
    # rewiring keeps their number
    assert not isinstance(net, gn.GrapNet) or net.count().relations == relations
    with torch.no_grad():
        return 100 * float((net(test[0]).argmax(1) == test[1]).double().mean())


def build(
    method: str, inputs: int, seed: int, settings: Settings, images: int
) -> tuple[nn.Module, RuleManager]:
    """Returns the network of a method, and the rules that rewire it."""
    sizes = [inputs, *settings.hidden, 10]
    manager = RuleManager(seed=seed)
    if method == "dense":
        return _dense(sizes).to(settings.device), manager
    if method.startswith("narrow"):
        width = narrow_width(sizes, settings.density)
        narrow = [inputs, *[width] * len(settings.hidden), 10]
        return _dense(narrow).to(settings.device), manager
    tile = None
    if method.endswith("tiles"):
        tile = settings.tile
    net = gn.GrapNet(
        sizes, density=settings.density, distribution="erk", tile=tile, device=settings.device
    )
    steps = settings.epochs * -(-images // settings.batch)
    often = {"every": settings.every, "fraction": settings.fraction, "stop": 0.75}
    if method == "SET":
        manager.add(set_rewiring(steps, **often))
    elif method.startswith("RigL"):
        manager.add(rigl(steps, tile=tile, **often))
    return net, manager


def _dense(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def narrow_width(sizes: Sequence[int], density: float) -> int:
    """Returns how many nodes a hidden layer of a dense network has that has at most as many
    parameters, biases included, as the sparse one; all its hidden layers are equal.

    Examples:
        >>> narrow_width([784, 1024, 1024, 10], 0.1)
        190
    """
    relations = sum(inputs * outputs for inputs, outputs in pairwise(sizes))
    allowed = density * relations + sum(sizes[1:])
    hidden = len(sizes) - 2

    def parameters(width: int) -> int:
        narrow = [sizes[0], *[width] * hidden, sizes[-1]]
        return sum((inputs + 1) * outputs for inputs, outputs in pairwise(narrow))

    width = 1
    while parameters(width + 1) <= allowed:
        width += 1
    return width


def _optimizer(net: nn.Module, settings: Settings) -> torch.optim.SGD:
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "momentum": settings.momentum,
        "weight_decay": settings.weight_decay,
    }
    return torch.optim.SGD(net.parameters(), nesterov=True, **options)


def read(data: str, device: str) -> tuple[Split, Split]:
    """Returns standardised training and test images as rows, with their labels."""
    if data == "digits":
        from sklearn.datasets import load_digits

        images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
        parts = [(images[400:], labels[400:]), (images[:400], labels[:400])]
    else:
        parts = [load_fashion("train"), load_fashion("test")]
    rows = [images.flatten(1).float() for images, _ in parts]
    mean = rows[0].mean()
    spread = rows[0].std()
    first, second = [
        (((r - mean) / spread).to(device), labels.to(device))
        for r, (_, labels) in zip(rows, parts, strict=True)
    ]
    return first, second


def times(settings: Settings, repeats: int = 5) -> dict[str, float]:
    """Returns how many times as fast as dense a training step of every method is, measured in
    turns.

    A turn is as many steps as lie between two rewirings, one of which falls into it.
    """
    train, _ = read(settings.data, settings.device)
    steps = {method: _step(method, train, settings) for method in settings.methods}
    taken: dict[str, list[float]] = {method: [] for method in settings.methods}
    for _ in range(repeats):
        for method, step in steps.items():
            start = time.perf_counter()
            for _ in range(settings.every):
                step()
            taken[method].append(time.perf_counter() - start)
    dense = taken["dense"]
    return {
        method: statistics.median(d / t for d, t in zip(dense, mine, strict=True))
        for method, mine in taken.items()
    }


def _step(method: str, train: Split, settings: Settings) -> Callable[[], None]:
    """Returns a training step with the rules in place; it has been done once, so that a rewiring
    ends every period.
    """
    net, manager = build(method, train[0].shape[1], 0, settings, len(train[0]))
    optimizer = _optimizer(net, settings)
    number = 0
    images = train[0][: settings.batch]
    labels = train[1][: settings.batch]
    if isinstance(net, gn.GrapNet):
        gn.attach(optimizer, net)
        manager.start(net)

    def step() -> None:
        nonlocal number
        optimizer.zero_grad()
        cross_entropy(net(images), labels).backward()
        optimizer.step()
        if isinstance(net, gn.GrapNet):
            manager.apply(net, number)
        number += 1

    step()
    return step


def table(result: dict[str, Any]) -> str:
    """Returns the result as the tables that the documentation shows: methods, then differences."""
    accuracy = result["accuracy"]
    faster = result.get("times_as_fast_as_dense", {})
    titles = "method | parameters | epochs | seeds | test accuracy | training step, times as fast"
    lines = [f"| {titles} |", "|---|---:|---:|---:|---:|---:|"]
    for method, found in accuracy.items():
        shown = f"{statistics.mean(found):.2f}"
        if len(found) > 1:
            shown += f" ± {statistics.stdev(found):.2f}"
        cells = [method, f"{result['parameters'][method]:,}", str(epochs_of(method, result))]
        cells.append(str(len(found)))
        cells.append(shown)
        cells.append(f"{faster[method]:.2f}" if method in faster else "")
        lines.append(f"| {' | '.join(cells)} |")
    differences = []
    for one, other in CONTRASTS:
        if one not in accuracy or other not in accuracy:
            continue
        count = min(len(accuracy[one]), len(accuracy[other]))
        if count > 1:
            difference = str(paired(accuracy[one][:count], accuracy[other][:count]))
        else:
            difference = f"{accuracy[one][0] - accuracy[other][0]:+.2f}, n = 1"
        differences.append(f"| {one} − {other} | {difference} |")
    if differences:
        lines += ["", "| difference in points | mean [95 %], p, seeds |", "|---|---:|"]
    return "\n".join(lines + differences)


def plot(result: dict[str, object], path: Path) -> None:
    """Draws every run's accuracy, and how fast a step is, as a picture; needs matplotlib."""
    from matplotlib.figure import Figure

    accuracy = result["accuracy"]
    faster = result["times_as_fast_as_dense"]
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    methods = list(accuracy)  # pyright: ignore[reportArgumentType]
    for row, method in enumerate(methods):
        found = accuracy[method]  # pyright: ignore[reportIndexIssue]
        left.plot(found, [row] * len(found), "o", color="tab:blue", alpha=0.5)
        left.plot([statistics.mean(found)], [row], "|", color="black", markersize=18)
        right.barh(row, faster[method], color="tab:blue")  # pyright: ignore[reportIndexIssue]
    for axes, label in (
        (left, "test accuracy, % (five seeds, mean)"),
        (right, "training step, times as fast as dense"),
    ):
        axes.set_yticks(range(len(methods)), methods)
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.set_xlabel(label)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", choices=("fashion", "digits"), default="fashion")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--density", type=float, default=Settings.density)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--time", action="store_true", help="also measure training steps, in turns")
    parser.add_argument(
        "--json",
        type=Path,
        help="where to write the result; runs that are there already are not repeated",
    )
    parser.add_argument("--plot", type=Path, help="where to draw the result")
    given = parser.parse_args()
    chosen = Settings(
        data=given.data,
        device=given.device,
        density=given.density,
        seeds=given.seeds,
        epochs=given.epochs,
        methods=tuple(given.methods),
    )
    outcome = main(chosen, given.json)
    if given.time:
        outcome["times_as_fast_as_dense"] = times(chosen)
        outcome["times_on"] = {
            "device": chosen.device,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
    print(table(outcome))
    if given.json:
        given.json.write_text(json.dumps(outcome, indent=1) + "\n")
    if given.plot:
        plot(outcome, given.plot)
