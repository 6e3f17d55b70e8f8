"""Sixteen more nodes, by every rule of growth, from the same trained net.

A net with a first hidden layer of 8 nodes learns Fashion-MNIST. Then this layer gets 16 nodes, by
each rule from the same weights, and the net is trained for a few steps more, on the same batches.
The loss on the test images is reported before the growth, right after it and after the training.

- "none": nothing grows;
- "zero": random incoming weights, outgoing weights of 0;
- "Net2Net": copies of nodes, which share their outgoing weights;
- "GradMax": incoming weights of 0, outgoing ones along the steepest gradient;
- "random": random weights on both sides;
- "TINY": the nodes that express what the layer below wants and cannot get by its own weights;
- "TINY, second layer": as many such nodes as there are for the second hidden layer, at most 16;
- "TINY, best place": such nodes in the layer where they promise most per parameter, with as many
  parameters as 16 nodes of the first layer have.

Statistics come from training images. Amplitudes are chosen on other images of the training set: of
TINY those right after the growth, of GradMax and of random weights those after the training.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import grapnet as gn
from grapnet.rules import GrowBest, GrowWidth, RuleContext, search_scale

from .data import Images, downsample, fashion_images, normalise
from .learning import accuracy
from .statistics import paired, summary
from .tables import grid

ARMS = (
    "none",
    "zero",
    "Net2Net",
    "GradMax",
    "random",
    "TINY",
    "TINY, second layer",
    "TINY, best place",
)
SAME = ("none", "zero", "Net2Net", "GradMax")  # leave the function as it is
TIMES = ("grown", "trained")
ROUNDING = 1e-4  # of a loss


@dataclass(frozen=True)
class Settings:
    """784-8-32-10 and Adam."""

    data: str = "fashion"  # or "made-up"
    square: int = 1  # side of the squares of pixels whose means are the inputs
    hidden: tuple[int, int] = (8, 32)
    nodes: int = 16  # that the first hidden layer gets
    held_out: int = 5_000  # training images that choose amplitudes
    rows: int = 20_000  # training images that statistics are of
    epochs: int = 3  # before the growth
    steps: int = 200  # after it
    batch: int = 128
    rate: float = 1e-3  # of Adam, which starts afresh after the growth in every arm
    scales: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)  # of GradMax and of random weights
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


FAST = Settings(
    data="made-up", square=4, hidden=(4, 12), nodes=8, held_out=160, rows=320, epochs=4, steps=20,
    batch=32, scales=(0.1, 1.0), seeds=(0, 1),
)  # fmt: skip

Growth = Callable[[gn.GrapNet], None]


@dataclass(frozen=True)
class Parts:
    """The images of one seed: to train on, to choose by, and to report."""

    train: Images
    held: Images
    test: Images


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns the losses of every arm before the growth, right after it and after the training."""
    parts = _split(settings, seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = [parts.train[0].shape[1], *settings.hidden, 10]
    net = gn.GrapNet(sizes, generator=generator)
    steps = settings.epochs * len(parts.train[0]) // settings.batch
    _train(net, parts.train, settings, steps, seed)
    found = {}
    for arm in ARMS:
        growths = _growths(settings, arm, net, parts, seed)
        tried = [_grown(settings, net, growth, parts, seed) for growth in growths]
        # A choice between several is made on held-out images.
        best = min(range(len(tried)), key=lambda number: tried[number]["held_out"])
        found[arm] = tried[best]
        if len(tried) > 1:
            found[arm]["scale"] = settings.scales[best]
    return found


def _split(settings: Settings, seed: int) -> Parts:
    (x, y), (test_x, test_y) = fashion_images(settings.data)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held = order[: settings.held_out]
    train = order[settings.held_out :]
    rows = normalise(downsample(x, settings.square))
    test = (normalise(downsample(test_x, settings.square)), test_y)
    return Parts((rows[train], y[train]), (rows[held], y[held]), test)


def _train(net: gn.GrapNet, images: Images, settings: Settings, steps: int, seed: int) -> None:
    """Takes some steps of another Adam, on batches that depend on the seed alone."""
    x, y = images
    optimizer = torch.optim.Adam(net.parameters(), settings.rate)
    gn.attach(optimizer, net)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        at = torch.randint(len(y), (settings.batch,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(net(x[at]), y[at]).backward()
        optimizer.step()
    gn.detach(optimizer, net)


def _loss(net: gn.GrapNet, images: Images) -> float:
    with torch.no_grad():
        return cross_entropy(net(images[0]), images[1]).item()


def _grown(
    settings: Settings, trained: gn.GrapNet, growth: Growth, parts: Parts, seed: int
) -> dict[str, Any]:
    """Returns the losses of a copy of the net around a growth."""
    net = copy.deepcopy(trained)
    before = _loss(net, parts.test)
    parameters = _parameters(net)
    growth(net)
    found: dict[str, Any] = {
        "before": before,
        "grown": _loss(net, parts.test),
        "sizes": net.sizes,
        "parameters": _parameters(net) - parameters,
    }
    _train(net, parts.train, settings, settings.steps, seed + 1000)
    found["trained"] = _loss(net, parts.test)
    found["accuracy"] = accuracy(net, parts.test)
    found["held_out"] = _loss(net, parts.held)
    return found


def _parameters(net: gn.GrapNet) -> int:
    return net.count().relations + sum(net.sizes[1:])


def _growths(
    settings: Settings, arm: str, net: gn.GrapNet, parts: Parts, seed: int
) -> Sequence[Growth]:
    """Returns what an arm does, or several forms of it to choose from."""
    if arm == "none":
        return [lambda net: None]
    if arm == "random":
        return [_random(settings, scale, seed) for scale in settings.scales]
    forms = {"zero": "zero_outgoing", "Net2Net": "net2net", "GradMax": "gradmax", "TINY": "tiny"}
    if arm == "TINY, best place":
        each = net.sizes[0] + net.sizes[2] + 1
        return [_ruled(settings, GrowBest(parameters=settings.nodes * each), parts, seed)]
    if arm == "TINY, second layer":
        return [_ruled(settings, GrowWidth(2, settings.nodes, init="tiny"), parts, seed)]
    init: Any = forms[arm]
    scales = [1.0]
    if arm == "GradMax":
        scales = list(settings.scales)
    found = []
    for scale in scales:
        rule = GrowWidth(1, settings.nodes, init=init, scale=scale)
        found.append(_ruled(settings, rule, parts, seed))
    return found


def _ruled(settings: Settings, rule: Any, parts: Parts, seed: int) -> Growth:
    """Returns a growth by a rule, with statistics of training images."""

    def grow(net: gn.GrapNet) -> None:
        recorders = {}
        if hasattr(rule, "recorders"):
            recorders = rule.recorders(net)
        _record(net, recorders, parts.train, settings)
        chosen = rule
        if isinstance(rule, GrowBest) or rule.init == "tiny":
            chosen = search_scale(rule, net, recorders, lambda: _loss(net, parts.held))
        with net.edit(generator=torch.Generator().manual_seed(seed)) as edit:
            chosen(net, edit, RuleContext(evidence=recorders))

    return grow


def _record(net: gn.GrapNet, recorders: dict[str, Any], images: Images, settings: Settings) -> None:
    """Lets recorders see backward passes over some images; the weights stay."""
    if not recorders:
        return
    for recorder in recorders.values():
        recorder.arm(net)
    x, y = (part[: settings.rows] for part in images)
    for rows, classes in zip(x.split(1000), y.split(1000), strict=True):
        cross_entropy(net(rows), classes).backward()
    for recorder in recorders.values():
        recorder.disarm()
    net.zero_grad()


def _random(settings: Settings, scale: float, seed: int) -> Growth:
    """Returns a growth by nodes with random weights on both sides."""

    def grow(net: gn.GrapNet) -> None:
        generator = torch.Generator().manual_seed(seed)
        weights = scale * torch.randn(settings.nodes, net.sizes[2], generator=generator)
        with net.edit(generator=generator) as edit:
            nodes = edit.add_nodes(1, settings.nodes)
            edit.connect(net.layers[0], nodes, weights="linear")
            edit.connect(nodes, net.layers[2], weights=weights / settings.nodes**0.5)

    return grow


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns the losses of every arm over the seeds, and how far TINY is below the others."""
    del settings
    rows = {}
    differences: dict[str, dict[str, Any]] = {when: {} for when in TIMES}
    for arm in ARMS:
        of = [numbers[arm] for numbers in seeds.values()]
        rows[arm] = {"parameters": sorted({one["parameters"] for one in of})}
        for what in ("before", *TIMES, "accuracy"):
            rows[arm][what] = summary([one[what] for one in of])
    for when in TIMES:
        tiny = [numbers["TINY"][when] for numbers in seeds.values()]
        for arm in ARMS:
            if arm != "TINY":
                other = [numbers[arm][when] for numbers in seeds.values()]
                differences[when][arm] = paired(tiny, other)._asdict()
    return {"rows": rows, "differences": differences}


def table(result: dict[str, Any]) -> str:
    """Returns the losses, and the differences between TINY and the others."""
    found = result["summary"]
    lines = []
    for arm, row in found["rows"].items():
        parameters = ", ".join(map(str, row["parameters"]))
        losses = [_spread(row[what]) for what in ("before", *TIMES)]
        mean, std, _ = row["accuracy"]
        lines.append([arm, parameters, *losses, f"{mean:.2f} ± {std:.2f}"])
    titles = ["growth", "parameters", "loss before", "right after", "after training", "accuracy"]
    differences = []
    for arm in found["differences"]["grown"]:
        of = [found["differences"][when][arm] for when in TIMES]
        differences.append([f"TINY − {arm}", *map(_interval, of)])
    second = ["difference of losses", "right after", "after training"]
    return grid(titles, lines) + "\n\n" + grid(second, differences)


def _spread(figure: Sequence[float]) -> str:
    return f"{figure[0]:.4f} ± {figure[1]:.4f}"


def _interval(difference: dict[str, Any]) -> str:
    low, high = difference["low"], difference["high"]
    return f"{difference['mean']:+.4f} [{low:.4f}, {high:.4f}], p = {difference['p']:.1e}"


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every seed and arm in which TINY is not the lowest right after the
    growth, and for every rule that should leave the function as it is and does not.
    """
    lines = []
    for seed, numbers in result["seeds"].items():
        for arm in SAME:
            moved = abs(numbers[arm]["grown"] - numbers[arm]["before"])
            if not moved <= ROUNDING:
                lines.append(f"seed {seed}: {arm} changes the loss by {moved:.1e}")
        for arm in (*SAME, "random"):
            if not numbers["TINY"]["grown"] < numbers[arm]["grown"]:
                lines.append(f"seed {seed}: TINY is not below {arm} right after the growth")
    return lines
