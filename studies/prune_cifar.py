"""Pruning a ResNet-18 on CIFAR-10 while it trains, beside Torch-Pruning, and RigL beside a static
wiring.

A dense net loses channels in several cuts during the training, until half or a quarter of its
multiply-adds are left. All methods take the same steps on the same batches from the same weights,
with the same schedule of learning rates:

- "ours": `gn.adopt`, `PruneNodes` to a budget at every cut, and the optimizer follows;
- "ours, another optimizer": the same, but every cut begins with another optimizer;
- "ours, same sizes": every space keeps as many channels as Torch-Pruning leaves it, and the
  optimizer follows;
- "Torch-Pruning": its MagnitudePruner, and another optimizer after every cut, because its cuts
  leave other Parameters;
- "small": the size that is left, from the start;
- "dense": no cut;
- "RigL" and "static": a tenth of the relations of all convolutions but the first.

Both pruners rank the channels of a space by the norm of all their weights and take the same share
of every space, and what Torch-Pruning leaves after a cut is the budget of ours.

Every seed chooses its learning rate with the dense net, on images of the training set that are held
out for that; the test images are for the results alone.

Torch-Pruning is measured where it is installed: `pip install --no-deps torch-pruning==1.6.1`.
"""

import functools
import importlib
import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import grapnet as gn
from benchmarks.models import BasicBlock
from grapnet.rules import PruneNodes, RuleContext, RuleManager, rigl

from .data import Images, cifar10_images
from .statistics import Paired, Summary, paired, summary
from .tables import grid, interval, spread

MEAN = (0.4914, 0.4822, 0.4465)  # of the training pixels in [0, 1], by colour
SPREAD = (0.2470, 0.2435, 0.2616)
BORDER = 4  # pixels that a random crop may move an image by
SIDE = 32  # pixels
JUDGED = 2000  # images that are judged at a time
GOAL = 0.5  # points over Torch-Pruning
SLACK = 0.01  # how much more than its share of the multiply-adds the final size may have

Method = Literal[
    "dense",
    "small",
    "ours",
    "ours, another optimizer",
    "ours, same sizes",
    "Torch-Pruning",
    "RigL",
    "static",
]
PRUNERS: tuple[Method, ...] = (
    "ours",
    "ours, another optimizer",
    "ours, same sizes",
    "Torch-Pruning",
)


@dataclass(frozen=True)
class Descent:
    """An optimizer, and what it is compared at."""

    name: Literal["SGD", "AdamW"]
    rates: tuple[float, ...]  # the largest learning rate of a run, to choose from
    decay: float  # of the weights
    # which share of the multiply-adds pruning leaves, and in how many cuts
    cuts: tuple[tuple[float, int], ...]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns one over all Parameters; the loop sets its learning rate at every step."""
        if self.name == "AdamW":
            return torch.optim.AdamW(model.parameters(), weight_decay=self.decay)
        return torch.optim.SGD(
            model.parameters(), lr=0.0, momentum=0.9, nesterov=True, weight_decay=self.decay
        )


@dataclass(frozen=True)
class Settings:
    """ResNet-18 of width 32, cut to a half and a quarter of its multiply-adds."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    data: str = "cifar10"  # or "made-up"
    device: str = "cuda"
    precision: Literal["bfloat16", "float32"] = "bfloat16"  # of convolutions; Parameters: float32
    width: int = 32  # channels of the first of four stages, each twice as wide as the one before
    epochs: int = 12
    batch: int = 512
    held_out: int = 5000  # training images that the learning rate is chosen on
    descents: tuple[Descent, ...] = (
        Descent("SGD", (0.2, 0.4, 0.8), 5e-4, ((0.5, 5), (0.25, 5), (0.25, 40))),
        Descent("AdamW", (1e-3, 3e-3), 0.05, ((0.25, 5),)),
    )
    warm_up: float = 0.2  # share of the steps in which the learning rate rises; then a cosine
    first_cut: float = 0.2  # share of the steps before it
    last_cut: float = 0.6
    sparsity: float = 0.9  # share of the relations that RigL and the static wiring lack
    rewire_every: int = 40  # steps, in the first three quarters


FAST = Settings(
    seeds=(0,),
    data="made-up",
    device="cpu",
    precision="float32",
    width=8,
    epochs=2,
    batch=32,
    held_out=32,
    descents=(Descent("SGD", (0.05, 0.1), 5e-4, ((0.5, 2),)),),
    rewire_every=2,
)


@dataclass(frozen=True)
class Run:
    """One training, the unit that is kept when a study is interrupted."""

    method: Method
    descent: Descent
    share: float = 1.0  # of the multiply-adds that are left
    cuts: int = 0
    rate: float | None = None  # of a trial on held-out images; the others use the best of those

    @property
    def name(self) -> str:
        """What the result calls it."""
        words = [f"{self.method}, {self.descent.name}"]
        if self.share < 1:
            words.append(f"{100 * self.share:g} % of the MACs")
        if self.cuts:
            words.append(f"{self.cuts} cuts")
        if self.rate is not None:
            words.append(f"held out, rate {self.rate:g}")
        return ", ".join(words)


def trials(settings: Settings) -> list[Run]:
    """Returns the runs that choose the learning rates."""
    found = []
    for descent in settings.descents:
        found += [Run("dense", descent, rate=rate) for rate in descent.rates]
    return found


def runs(settings: Settings) -> list[Run]:
    """Returns the runs of the result, without Torch-Pruning where it is not installed."""
    found = []
    for descent in settings.descents:
        found.append(Run("dense", descent))
        for share, cuts in descent.cuts:
            for method in PRUNERS:
                if method != "Torch-Pruning" or has_torch_pruning():
                    found.append(Run(method, descent, share, cuts))
        for share in dict.fromkeys(share for share, _ in descent.cuts):
            found.append(Run("small", descent, share))
    first = settings.descents[0]
    return [*found, Run("RigL", first), Run("static", first)]


def stages(settings: Settings) -> list[list[str]]:
    """Returns the names of what a seed runs: first what chooses the learning rates."""
    return [[run.name for run in trials(settings)], [run.name for run in runs(settings)]]


def one_part(
    settings: Settings, seed: int, part: str, found: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the numbers of one run.

    Args:
        settings: of the study.
        seed: of the first weights, of the batches and of the wiring.
        part: the name of the run.
        found: what the trials of the seed found.
    """
    run = next(run for run in (*trials(settings), *runs(settings)) if run.name == part)
    train, test = _images(settings.data, settings.device)
    rate = run.rate
    if rate is None:
        rate = chosen_rate(settings, run.descent, found)
    else:
        train, test = _split(train, settings.held_out, seed)
    numbers = trained(settings, run, seed, rate, train, test)
    about = {"rate": rate, "device": settings.device}
    if settings.device != "cpu":
        about["device"] = torch.cuda.get_device_name(settings.device)
    if run.method == "Torch-Pruning":
        about["version"] = metadata.version("torch-pruning")
    return about | numbers


def chosen_rate(
    settings: Settings, descent: Descent, found: Mapping[str, Mapping[str, Any]]
) -> float:
    """Returns the learning rate with which the dense net was best on held-out images."""
    tried = [run for run in trials(settings) if run.descent == descent]
    best = max(tried, key=lambda run: found[run.name]["accuracy"])
    assert best.rate is not None
    return best.rate


def trained(
    settings: Settings, run: Run, seed: int, rate: float, train: "Pixels", judged: "Pixels"
) -> dict[str, Any]:
    """Trains one net and returns its accuracy after every epoch, its size and the time it took."""
    device = torch.device(settings.device)
    per_epoch = len(train.labels) // settings.batch
    steps = settings.epochs * per_epoch
    widths = shape(settings.width, 0.0)
    if run.method == "small":
        widths = shape(settings.width, final_ratio(settings.width, run.share))
    torch.manual_seed(seed)
    model = resnet18(widths).to(device)
    learner = _learner(settings, run, model, steps, seed)
    generator = torch.Generator(device).manual_seed(seed)
    curve = []
    losses = []
    cutting = 0.0
    start = _now(device)
    step = 0
    for _ in range(settings.epochs):
        model.train()
        total = torch.zeros((), device=device)
        order = torch.randperm(len(train.labels), generator=generator, device=device)
        for number in range(per_epoch):
            if learner.cuts_at(step):
                before = _now(device)
                learner.cut(step)
                cutting += _now(device) - before
            for group in learner.optimizer.param_groups:
                group["lr"] = rate * warmth(step / steps, settings.warm_up)
            at = order[number * settings.batch : (number + 1) * settings.batch]
            x = train.cropped(at, generator)
            with _precision(settings):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), train.labels[at])
            learner.optimizer.zero_grad()
            loss.backward()
            learner.optimizer.step()
            learner.after(step)
            total += loss.detach()
            step += 1
        losses.append(round(float(total) / per_epoch, 4))
        curve.append(accuracy(settings, model, judged))
    seconds = _now(device) - start
    dense = macs_of(shape(settings.width, 0.0))
    return {
        "accuracy": curve[-1],
        "curve": curve,
        "loss": losses,
        "macs": round(macs(model) / dense, 5),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "channels": [part.out_channels for part in model.modules() if isinstance(part, nn.Conv2d)],
        "seconds": round(seconds, 2),
        "cut_seconds": round(cutting, 3),
    }


def warmth(progress: float, warm_up: float) -> float:
    """Returns the learning rate as a share of the largest: a line up, then a cosine to 0.

    Examples:
        >>> [round(warmth(progress, 0.2), 2) for progress in (0.0, 0.1, 0.2, 0.6, 1.0)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if progress < warm_up:
        return progress / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (progress - warm_up) / (1 - warm_up))


class Learner:
    """A model that trains as it is, and its optimizer; further ones change the model."""

    def __init__(self, model: nn.Module, descent: Descent) -> None:
        self.model = model
        self.descent = descent
        self.optimizer = descent.optimizer(model)

    def cuts_at(self, step: int) -> bool:
        """Returns whether `cut` is called before a step."""
        del step
        return False

    def cut(self, step: int) -> None:
        """Removes channels."""

    def after(self, step: int) -> None:
        """Changes the wiring after a step."""


class Ours(Learner):
    """Removes the weakest channels of an adopted model.

    Args:
        model: plain, on its device.
        descent: makes the optimizer.
        widths: of the four stages after each cut, by the step before which it is.
        method: "ours" removes as few channels as leave no more multiply-adds than these widths
            have, and "ours, same sizes" leaves these widths. The optimizer follows, except with
            "ours, another optimizer".
    """

    def __init__(
        self, model: nn.Module, descent: Descent, widths: Mapping[int, list[int]], method: Method
    ) -> None:
        super().__init__(model, descent)
        self.widths = widths
        self.method = method
        self.net = gn.adopt(model, _example(model))
        if method != "ours, another optimizer":
            gn.attach(self.optimizer, self.net)
        free = [space for space in self.net.spaces if not space.pins]
        self.stages = sorted({len(space) for space in free})  # widths of the dense net
        self.stage_of = {space: self.stages.index(len(space)) for space in free}

    def cuts_at(self, step: int) -> bool:
        """Returns whether there are other widths for a step."""
        return step in self.widths

    def cut(self, step: int) -> None:
        """Removes channels, in one edit."""
        widths = self.widths[step]
        with self.net.edit(reason=f"cut before step {step}") as edit:
            if self.method == "ours, same sizes":
                for space, stage in self.stage_of.items():
                    edit.remove_nodes(space.weakest(count=len(space) - widths[stage]))
            else:
                PruneNodes(macs=macs_of(widths))(self.net, edit, RuleContext(step=step))
        if self.method == "ours, another optimizer":
            self.optimizer = self.descent.optimizer(self.model)


class TorchPruning(Learner):
    """Removes the weakest channels with Torch-Pruning and takes another optimizer after that.

    Args:
        model: plain, on its device.
        descent: makes the optimizers.
        steps: the steps before which there are cuts.
        ratio: the share of the channels of every space that all cuts together remove.
    """

    def __init__(
        self, model: nn.Module, descent: Descent, steps: Sequence[int], ratio: float
    ) -> None:
        super().__init__(model, descent)
        tp: Any = importlib.import_module("torch_pruning")
        self.steps = frozenset(steps)
        *_, head = model.children()
        # The sum of the squares of all weights of a channel, biases included, as `Space.norms` has
        # it; a ranking inside of a space does not change with a root or a factor.
        importance = tp.importance.GroupMagnitudeImportance(p=2, bias=True)
        self.pruner = tp.pruner.MagnitudePruner(
            model,
            _example(model),
            importance=importance,
            global_pruning=False,
            pruning_ratio=ratio,
            iterative_steps=len(steps),
            ignored_layers=[head],
        )

    def cuts_at(self, step: int) -> bool:
        """Returns whether there is a cut before a step."""
        return step in self.steps

    def cut(self, step: int) -> None:
        """Removes the same share of the channels of every space."""
        del step
        self.pruner.step()
        self.optimizer = self.descent.optimizer(self.model)


class Sparse(Learner):
    """Has a random part of the relations of all convolutions but the first, and may rewire them.

    Args:
        model: plain, on its device.
        descent: makes the optimizer, which follows.
        sparsity: the share of the relations of every convolution that is cut at the start.
        seed: of the wiring.
        steps: of the training; with None the wiring stays.
        every: steps between two rewirings.
    """

    def __init__(
        self,
        model: nn.Module,
        descent: Descent,
        sparsity: float,
        seed: int,
        *,
        steps: int | None,
        every: int,
    ) -> None:
        super().__init__(model, descent)
        self.net = gn.adopt(model, _example(model), optimizer=self.optimizer)
        names = [name for name, part in model.named_modules() if isinstance(part, nn.Conv2d)]
        names = names[1:]
        generator = torch.Generator().manual_seed(seed)
        with self.net.edit(reason="a random wiring") as edit:
            for name in names:
                relations = self.net.relations(name)
                order = torch.randperm(len(relations), generator=generator)
                edit.cut(relations[order[: round(sparsity * len(relations))].sort().values])
        self.manager = RuleManager()
        if steps is not None:
            self.manager.add(rigl(steps, every=every, transitions=names))
        self.manager.start(self.net)

    def after(self, step: int) -> None:
        """Rewires where the rule is due."""
        self.manager.apply(self.net, step)


def _learner(settings: Settings, run: Run, model: nn.Module, steps: int, seed: int) -> Learner:
    descent = run.descent
    if run.method in ("RigL", "static"):
        rewired = steps if run.method == "RigL" else None
        every = settings.rewire_every
        return Sparse(model, descent, settings.sparsity, seed, steps=rewired, every=every)
    if run.method not in PRUNERS:
        return Learner(model, descent)
    at = cut_steps(settings, run.cuts, steps)
    ratio = final_ratio(settings.width, run.share)
    if run.method == "Torch-Pruning":
        return TorchPruning(model, descent, at, ratio)
    widths = {}
    for number, step in enumerate(at, 1):
        # Torch-Pruning's own schedule: the share that has gone grows by the same amount every time.
        widths[step] = shape(settings.width, ratio * number / len(at))
    return Ours(model, descent, widths, run.method)


def cut_steps(settings: Settings, cuts: int, steps: int) -> list[int]:
    """Returns the steps before which there are cuts, at equal distances."""
    first = settings.first_cut * steps
    last = settings.last_cut * steps
    between = (last - first) / max(1, cuts - 1)
    found = [round(first + between * number) for number in range(cuts)]
    if len(set(found)) < cuts:
        raise ValueError(f"{steps} steps are too few for {cuts} cuts")
    return found


def shape(width: int, ratio: float) -> list[int]:
    """Returns the widths of the four stages after Torch-Pruning has removed a share of each.

    Examples:
        >>> shape(32, 0.0), shape(32, 0.5)
        ([32, 64, 128, 256], [16, 32, 64, 128])
    """
    return [int(width * 2**stage * (1 - ratio)) for stage in range(4)]


@functools.cache
def final_ratio(width: int, share: float) -> float:
    """Returns which share of the channels goes, in steps of a thousandth, so that this share of the
    multiply-adds is left, or up to `SLACK` of it more.

    Examples:
        >>> final_ratio(32, 0.25)
        0.493
    """
    dense = macs_of(shape(width, 0.0))
    for thousandths in range(1000):
        ratio = thousandths / 1000
        if macs_of(shape(width, ratio)) <= (1 + SLACK) * share * dense:
            return ratio
    raise ValueError(f"no width leaves {share:.0%} of the multiply-adds")


def resnet18(widths: Sequence[int]) -> nn.Sequential:
    """Returns ResNet-18 for images of 32×32, with stages of these widths."""
    first, *_, last = widths
    parts: list[nn.Module] = [nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first)]
    parts.append(nn.ReLU())
    inputs = first
    for stage, width in enumerate(widths):
        for block in range(2):
            stride = 2 if stage and block == 0 else 1
            parts.append(BasicBlock(inputs, width, stride))
            inputs = width
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10)]
    return nn.Sequential(*parts)


def macs(model: nn.Sequential) -> int:
    """Returns the multiply-adds of convolutions and of the head for one image."""
    total = 0
    side = SIDE
    for part in model:
        if isinstance(part, BasicBlock):
            side //= part.conv1.stride[0]
        for layer in part.modules():
            if isinstance(layer, nn.Conv2d):
                total += side**2 * layer.weight.numel()
            elif isinstance(layer, nn.Linear):
                total += layer.weight.numel()
    return total


def macs_of(widths: Sequence[int]) -> int:
    """Returns those of a net with stages of these widths."""
    with torch.device("meta"):
        return macs(resnet18(widths))


@dataclass(frozen=True, eq=False)
class Pixels:
    """Images with a reflected border, and their classes."""

    bordered: Tensor  # [n, 3, 40, 40] uint8
    labels: Tensor  # [n] int64

    def cropped(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Returns images moved and mirrored at random, [batch, 3, 32, 32]."""
        device = rows.device
        count = len(rows)
        at = torch.arange(SIDE, device=device)
        moved = torch.randint(2 * BORDER + 1, (2, count, 1), generator=generator, device=device)
        mirrored = torch.rand(count, 1, generator=generator, device=device) < 0.5
        down = moved[0] + at  # [batch, 32]
        across = moved[1] + torch.where(mirrored, SIDE - 1 - at, at)
        colour = torch.arange(3, device=device)
        found = self.bordered[
            rows[:, None, None, None],
            colour[None, :, None, None],
            down[:, None, :, None],
            across[:, None, None, :],
        ]
        return _normalised(found)

    def plain(self, rows: slice) -> Tensor:
        """Returns images as they are, [batch, 3, 32, 32]."""
        inside = slice(BORDER, BORDER + SIDE)
        return _normalised(self.bordered[rows, :, inside, inside])


def _normalised(pixels: Tensor) -> Tensor:
    mean = torch.tensor(MEAN, device=pixels.device)[:, None, None]
    deviation = torch.tensor(SPREAD, device=pixels.device)[:, None, None]
    found = (pixels.float() / 255 - mean) / deviation
    return found.contiguous(memory_format=torch.channels_last)


@functools.cache
def _images(data: str, device: str) -> tuple[Pixels, Pixels]:
    """Returns the training and the test images on the device; a process reads them once."""
    train, test = cifar10_images(data)
    return _bordered(train, device), _bordered(test, device)


def _bordered(images: Images, device: str) -> Pixels:
    pixels, labels = images
    at = torch.arange(-BORDER, SIDE + BORDER).abs()
    at = torch.where(at >= SIDE, 2 * (SIDE - 1) - at, at)
    bordered = pixels.to(device)[:, :, at.to(device)][:, :, :, at.to(device)]
    return Pixels(bordered, labels.to(device))


def _split(train: Pixels, held_out: int, seed: int) -> tuple[Pixels, Pixels]:
    """Returns training images without some, and those."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train.labels), generator=generator).to(train.labels.device)
    rest = order[held_out:]
    held = order[:held_out]
    return (
        Pixels(train.bordered[rest], train.labels[rest]),
        Pixels(train.bordered[held], train.labels[held]),
    )


@torch.no_grad()
def accuracy(settings: Settings, model: nn.Module, images: Pixels) -> float:
    """Returns which percentage of the images is classified right, in evaluation mode."""
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=images.labels.device)
    for start in range(0, len(images.labels), JUDGED):
        rows = slice(start, start + JUDGED)
        with _precision(settings):
            logits = model(images.plain(rows))
        right += (logits.argmax(1) == images.labels[rows]).sum()
    return round(100 * int(right) / len(images.labels), 4)


def summarise(settings: Settings, seeds: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns every run over the seeds, and the differences that the study is about."""
    numbers = list(seeds.values())
    rows = {}
    for name in numbers[0]:
        of = [one[name] for one in numbers]
        rows[name] = {
            "accuracy": _summary([row["accuracy"] for row in of]),
            "macs": _summary([row["macs"] for row in of]),
            "parameters": round(sum(row["parameters"] for row in of) / len(of)),
            "rates": sorted({row["rate"] for row in of}),
            "seconds": _summary([row["seconds"] for row in of]),
            "cut_seconds": _summary([row["cut_seconds"] for row in of]),
        }
    differences = {}
    for one, other in contrasts(settings):
        if one.name in rows and other.name in rows:
            a = [found[one.name]["accuracy"] for found in numbers]
            b = [found[other.name]["accuracy"] for found in numbers]
            differences[f"{one.name} − {other.name}"] = _paired(a, b)._asdict()
    return {"rows": rows, "differences": differences}


def contrasts(settings: Settings) -> list[tuple[Run, Run]]:
    """Returns the pairs of runs that are compared, Torch-Pruning first."""
    found = []
    for descent in settings.descents:
        for share, cuts in descent.cuts:
            ours, anew, same, theirs = (Run(method, descent, share, cuts) for method in PRUNERS)
            found += [(ours, theirs), (same, theirs), (ours, anew)]
            found.append((ours, Run("small", descent, share)))
            found.append((ours, Run("dense", descent)))
    first = settings.descents[0]
    return [*found, (Run("RigL", first), Run("static", first))]


def table(result: dict[str, Any]) -> str:
    """Returns the runs, their differences, and the accuracy after every epoch."""
    rows = result["summary"]["rows"]
    lines = []
    curves = []
    for name, row in rows.items():
        share = f"{100 * row['macs'][0]:.1f} %"
        rates = ", ".join(f"{rate:g}" for rate in row["rates"])
        times = [f"{row[key][0]:.1f}" for key in ("seconds", "cut_seconds")]
        size = f"{row['parameters']:,}"
        lines.append([name, spread(row["accuracy"]), share, size, rates, *times])
        of_seeds = [found[name]["curve"] for found in result["seeds"].values()]
        means = [sum(epoch) / len(epoch) for epoch in zip(*of_seeds, strict=True)]
        curves.append([name, *(f"{mean:.1f}" for mean in means)])
    titles = ["run", "accuracy", "MACs", "parameters", "rate", "seconds", "of these in cuts"]
    parts = [grid(titles, lines)]
    pairs = [[name, interval(one)] for name, one in result["summary"]["differences"].items()]
    parts.append(grid(["difference in points", "mean and 95 % interval"], pairs))
    parts.append(f"The bar is not to fall behind Torch-Pruning; the goal was +{GOAL} points.")
    epochs = [str(number + 1) for number in range(len(curves[0]) - 1)]
    parts.append(grid(["accuracy after epoch", *epochs], curves))
    return "\n\n".join(parts)


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every comparison with Torch-Pruning that is missing, or in which ours
    has more multiply-adds, or is below it over the whole interval.
    """
    settings = _as_settings(result["settings"])
    rows = result["summary"]["rows"]
    lines = []
    for descent in settings.descents:
        for share, cuts in descent.cuts:
            ours = Run("ours", descent, share, cuts).name
            theirs = Run("Torch-Pruning", descent, share, cuts).name
            if theirs not in rows:
                lines.append(f"{theirs}: not measured")
                continue
            left = rows[ours]["macs"][0]
            if not left <= rows[theirs]["macs"][0]:
                lines.append(f"{ours}: {left:.2%} of the MACs, more than Torch-Pruning")
            lead = result["summary"]["differences"][f"{ours} − {theirs}"]
            if not lead["high"] >= 0:
                lines.append(f"{ours}: {interval(lead)} points over Torch-Pruning")
    return lines


def _as_settings(read: Mapping[str, Any]) -> Settings:
    """Returns settings as JSON holds them."""
    descents = []
    for one in read["descents"]:
        cuts = tuple((share, count) for share, count in one["cuts"])
        descents.append(Descent(**{**one, "rates": tuple(one["rates"]), "cuts": cuts}))
    return Settings(**{**read, "seeds": tuple(read["seeds"]), "descents": tuple(descents)})


def _summary(values: Sequence[float]) -> Summary:
    if len(values) == 1:
        return Summary(values[0], 0.0, 1)
    return summary(values)


def _paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    if len(a) == 1:
        difference = a[0] - b[0]
        return Paired(difference, 0.0, difference, difference, 1.0, 1)
    return paired(a, b)


def has_torch_pruning() -> bool:
    """Returns whether Torch-Pruning itself can be imported, and not our package of that name."""
    try:
        spec = importlib.util.find_spec("torch_pruning")
    except ValueError:
        return False
    return spec is not None and spec.name == "torch_pruning"


def _example(model: nn.Module) -> Tensor:
    return torch.zeros(1, 3, SIDE, SIDE, device=next(model.parameters()).device)


def _precision(settings: Settings) -> torch.autocast:
    enabled = settings.precision == "bfloat16"
    return torch.autocast(settings.device.partition(":")[0], torch.bfloat16, enabled=enabled)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
