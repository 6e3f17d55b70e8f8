"""Rewiring a sparse ResNet-18 on CIFAR-10 while it trains, beside a static wiring and a narrow
dense net.

A tenth of the relations of all convolutions but the first is left, at random; a relation is a
kernel. All methods take the same steps on the same batches, with the same schedule of learning
rates:

- "static": the wiring stays;
- "SET": the weakest kernels go, and as many others come at random;
- "RigL": the kernels with the largest gradients come;
- "SRigL": the same, but every channel keeps its number of kernels (`scope="child"`);
- "narrow": a dense net of at most as many parameters, from the start;
- "dense": all relations.

Each of "static", "narrow" and "dense" chooses its learning rate on images of the training set that
are held out for that. The rewired nets have the rate of "static", and each method then chooses the
steps between two rewirings on the same images. The test images are for the results alone.

Why "SRigL" and the numbers of the wiring are here: in single runs on a GPU, RigL with a rewiring
every 40 of 1,164 steps reached 83.1 and 83.9 %, the static wiring 86.1 and 87.5 %, and the loss of
RigL was above from the first epoch to the last. The rewirings were right: a test compares those of
every convolution with a dense twin. BatchNorm behind a convolution makes a channel's gradients
larger the smaller its weights are, so the largest gradients of a convolution are those of few
channels. In 116 steps with batches of 64 images, a rewiring every 4 steps, one seed, the tenth of
the channels that grew most had 60 to 100 % of the grown kernels, and at random 18 %. The loss over
the last 16 steps was 1.89 with RigL, 1.78 with the static wiring, 1.78 with SRigL and 1.74 with
SET; with a rewiring every 20 steps it was 1.81 with RigL. That the next rewiring drops most of the
grown kernels does not explain it: so it does with SET. On scikit-learn's digits (400 steps, five
seeds, a small net with BatchNorm), a rewiring every 20 steps left 33 % of the channels without a
kernel instead of 9 %, with 95.7 % instead of 97.1 % right; SRigL had 97.5 %. From an interval of 40
steps on, RigL was not below the static wiring.
"""

import bisect
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.rules import RuleManager, Scheduled, rigl, set_rewiring

from .cifar_training import (
    Descent,
    Learner,
    Training,
    about_run,
    example,
    images_on,
    paired_of,
    resnet18,
    shape,
    split,
    summary_of,
    trained,
)
from .tables import grid, interval, spread

STOP = 0.75  # the share of the steps after which no method rewires

Method = Literal["dense", "narrow", "static", "SET", "RigL", "SRigL"]
METHODS: tuple[Method, ...] = ("dense", "narrow", "static", "SET", "RigL", "SRigL")
RATED: tuple[Method, ...] = ("dense", "narrow", "static")  # choose their own learning rate
REWIRED: tuple[Method, ...] = ("SET", "RigL", "SRigL")  # choose their own interval
BY_GRADIENT: tuple[Method, ...] = ("RigL", "SRigL")
WIRING = {  # what a sparse run says of its kernels, and the titles
    "starved": "channels without a kernel",
    "uneven": "deviation of kernels a channel",
    "survived": "grown kernels that the next rewiring keeps",
}

SGD = Descent("SGD", (0.2, 0.4, 0.8), 5e-4)


@dataclass(frozen=True)
class Settings(Training):
    """ResNet-18 of width 32 with a tenth of its kernels."""

    descent: Descent = SGD
    sparsity: float = 0.9  # share of the relations that are cut at the start
    fraction: float = 0.3  # share of the others that the first rewirings replace
    intervals: tuple[int, ...] = (40, 100, 200)  # steps between two rewirings, to choose from


FAST = Settings(
    seeds=(0,),
    data="made-up",
    device="cpu",
    precision="float32",
    width=8,
    epochs=2,
    batch=32,
    held_out=32,
    descent=Descent("SGD", (0.1,), 5e-4),
    intervals=(2,),
)


@dataclass(frozen=True)
class Run:
    """One training, the unit that is kept when a study is interrupted."""

    method: Method
    rate: float | None = None  # of a trial of the learning rate
    every: int | None = None  # steps between rewirings of a trial of the interval

    @property
    def name(self) -> str:
        """What the result calls it."""
        if self.rate is not None:
            return f"{self.method}, held out, rate {self.rate:g}"
        if self.every is not None:
            return f"{self.method}, held out, every {self.every} steps"
        return self.method

    @property
    def is_trial(self) -> bool:
        """True if it is judged on held-out images."""
        return self.rate is not None or self.every is not None


def rate_trials(settings: Settings) -> list[Run]:
    """Returns the runs that choose the learning rates."""
    found = []
    for method in RATED:
        found += [Run(method, rate=rate) for rate in settings.descent.rates]
    return found


def interval_trials(settings: Settings) -> list[Run]:
    """Returns the runs that choose the intervals."""
    found = []
    for method in REWIRED:
        found += [Run(method, every=every) for every in settings.intervals]
    return found


def stages(settings: Settings) -> list[list[str]]:
    """Returns the names of what a seed runs: rates, intervals, and the runs of the result."""
    results = [Run(method) for method in METHODS]
    parts = (rate_trials(settings), interval_trials(settings), results)
    return [[run.name for run in stage] for stage in parts]


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
    results = [Run(method) for method in METHODS]
    known = (*rate_trials(settings), *interval_trials(settings), *results)
    run = next(run for run in known if run.name == part)
    train, judged = images_on(settings.data, settings.device)
    if run.is_trial:
        train, judged = split(train, settings.held_out, seed)
    rate = run.rate
    if rate is None:
        rate = chosen_rate(settings, run.method, found)
    about = about_run(settings, rate)
    every = run.every
    if run.method in REWIRED:
        if every is None:
            every = chosen_interval(settings, run.method, found)
        about["every"] = every
    widths = shape(settings.width, 0.0)
    if run.method == "narrow":
        widths = narrow_widths(settings.width, settings.sparsity)
    learner_of = functools.partial(_learner, settings, run.method, every, seed)
    return about | trained(settings, widths, learner_of, seed, rate, train, judged)


def chosen_rate(
    settings: Settings, method: Method, found: Mapping[str, Mapping[str, Any]]
) -> float:
    """Returns the learning rate with which a method was best on held-out images; rewired nets take
    that of the static wiring.
    """
    if method in REWIRED:
        method = "static"
    tried = [run for run in rate_trials(settings) if run.method == method]
    best = max(tried, key=lambda run: found[run.name]["accuracy"])
    assert best.rate is not None
    return best.rate


def chosen_interval(
    settings: Settings, method: Method, found: Mapping[str, Mapping[str, Any]]
) -> int:
    """Returns the steps between two rewirings with which a method was best on held-out images."""
    tried = [run for run in interval_trials(settings) if run.method == method]
    best = max(tried, key=lambda run: found[run.name]["accuracy"])
    assert best.every is not None
    return best.every


class Sparse(Learner):
    """Has a random part of the relations of all convolutions but the first, and may rewire them.

    Args:
        model: plain, on its device.
        settings: has the optimizer, which follows, and the share of relations to cut.
        seed: of the wiring, and of what SET grows.
        rule: rewires; without one the wiring stays.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, seed: int, rule: Scheduled | None
    ) -> None:
        super().__init__(model, settings.descent)
        self.net = gn.adopt(model, example(model), optimizer=self.optimizer)
        generator = torch.Generator().manual_seed(seed)
        with self.net.edit(reason="a random wiring") as edit:
            for name in rewired(model):
                relations = self.net.relations(name)
                order = torch.randperm(len(relations), generator=generator)
                count = round(settings.sparsity * len(relations))
                edit.cut(relations[order[:count].sort().values])
        self.manager = RuleManager(seed=seed)
        if rule is not None:
            self.manager.add(rule)
        self.manager.start(self.net)
        self.wiring = self._kernels()
        self.grown: dict[str, Tensor] = {}  # by the last rewiring
        self.counted = 0  # kernels that a rewiring other than the last grew
        self.kept = 0  # those of them that the next one kept

    def after(self, step: int) -> None:
        """Rewires where the rule is due, and counts the grown kernels that are kept."""
        version = self.net.version
        self.manager.apply(self.net, step)
        if self.net.version == version:
            return
        now = self._kernels()
        for name, kernels in now.items():
            if name in self.grown:
                self.counted += len(self.grown[name])
                self.kept += int(torch.isin(self.grown[name], kernels).sum())
            self.grown[name] = kernels[~torch.isin(kernels, self.wiring[name])]
        self.wiring = now

    def about(self) -> dict[str, Any]:
        """Returns the share of the channels that have no kernel left, the deviation of the number
        of kernels of a channel as a share of their mean, and the share of grown kernels that the
        next rewiring keeps.
        """
        shares = []
        for name, convolution in rewired(self.model).items():
            channels = self.net.relations(name).children.cpu()
            count = torch.unique(channels, return_counts=True)[1].double()
            # The channels that have no kernel are not among the relations.
            without = count.new_zeros(convolution.out_channels - len(count))
            shares.append(torch.cat([count, without]) / count.sum() * convolution.out_channels)
        every = torch.cat(shares)
        found = {
            "starved": round(float((every == 0).double().mean()), 4),
            "uneven": round(float(every.std()), 4),
        }
        if self.counted:
            found["survived"] = round(self.kept / self.counted, 4)
        return found

    def _kernels(self) -> dict[str, Tensor]:
        """Returns the kernels of each convolution as numbers."""
        found = {}
        for name, convolution in rewired(self.model).items():
            relations = self.net.relations(name)
            parents = relations.parents.cpu()
            found[name] = parents * convolution.out_channels + relations.children.cpu()
        return found


def rewired(model: nn.Module) -> dict[str, nn.Conv2d]:
    """Returns all convolutions but the first by their names."""
    found = {name: part for name, part in model.named_modules() if isinstance(part, nn.Conv2d)}
    first = next(iter(found))
    return {name: part for name, part in found.items() if name != first}


def _learner(
    settings: Settings,
    method: Method,
    every: int | None,
    seed: int,
    model: nn.Module,
    steps: int,
) -> Learner:
    if method in ("dense", "narrow"):
        return Learner(model, settings.descent)
    rule = None
    if every is not None:
        rule = _rewiring(settings, method, every, steps, list(rewired(model)))
    return Sparse(model, settings, seed, rule)


def _rewiring(
    settings: Settings, method: Method, every: int, steps: int, names: list[str]
) -> Scheduled:
    common: dict[str, Any] = {
        "every": every,
        "fraction": settings.fraction,
        "stop": STOP,
        "transitions": names,
    }
    if method == "SET":
        return set_rewiring(steps, **common)
    scope = "child" if method == "SRigL" else "transition"
    return rigl(steps, scope=scope, **common)


def sparse_parameters(width: int, sparsity: float) -> int:
    """Returns the number of Parameters that are left of a net once its relations are cut."""
    with torch.device("meta"):
        model = resnet18(shape(width, 0.0))
    total = sum(parameter.numel() for parameter in model.parameters())
    for convolution in rewired(model).values():
        height, width = convolution.kernel_size
        kernels = convolution.in_channels * convolution.out_channels
        total -= round(sparsity * kernels) * height * width
    return total


@functools.cache
def narrow_widths(width: int, sparsity: float) -> list[int]:
    """Returns the widths of the largest dense net that has at most as many parameters as the
    sparse one; all stages are narrower by the same share, in steps of a thousandth.

    Examples:
        >>> narrow_widths(32, 0.9)
        [10, 20, 40, 81]
    """
    most = sparse_parameters(width, sparsity)
    # The parameters become fewer along the shares, as far as there is a channel in every stage.
    shares = [thousandths / 1000 for thousandths in range(1001 - math.ceil(1000 / width))]
    at = bisect.bisect_left(shares, -most, key=lambda gone: -dense_parameters(shape(width, gone)))
    if at == len(shares):
        raise ValueError(f"no dense net has as few as {most:,} parameters")
    return shape(width, shares[at])


def dense_parameters(widths: list[int]) -> int:
    """Returns the number of parameters of a net with stages of these widths."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in resnet18(widths).parameters())


def summarise(settings: Settings, seeds: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns every run over the seeds, and the differences that the study is about."""
    del settings
    numbers = list(seeds.values())
    rows = {}
    for name in numbers[0]:
        of = [one[name] for one in numbers]
        rows[name] = {
            "accuracy": summary_of([row["accuracy"] for row in of]),
            "parameters": round(sum(row["parameters"] for row in of) / len(of)),
            "rates": sorted({row["rate"] for row in of}),
            "intervals": sorted({row["every"] for row in of if "every" in row}),
            "seconds": summary_of([row["seconds"] for row in of]),
        }
        for key in WIRING:
            if key in of[0]:
                rows[name][key] = summary_of([row[key] for row in of])
    differences = {}
    for one, other in contrasts():
        a = [found[one]["accuracy"] for found in numbers]
        b = [found[other]["accuracy"] for found in numbers]
        differences[f"{one} − {other}"] = paired_of(a, b)._asdict()
    return {"rows": rows, "differences": differences}


def contrasts() -> list[tuple[Method, Method]]:
    """Returns the pairs of methods that are compared."""
    found: list[tuple[Method, Method]] = [(method, "static") for method in REWIRED]
    found.append(("SRigL", "RigL"))
    sparse: tuple[Method, ...] = ("static", *REWIRED)
    return [*found, *((method, "narrow") for method in sparse), ("static", "dense")]


def table(result: dict[str, Any]) -> str:
    """Returns the runs and their differences."""
    lines = []
    for name, row in result["summary"]["rows"].items():
        rates = ", ".join(f"{rate:g}" for rate in row["rates"])
        intervals = ", ".join(str(every) for every in row["intervals"]) or "–"
        size = f"{row['parameters']:,}"
        wiring = []
        for key in WIRING:
            wiring.append(f"{100 * row[key][0]:.1f} %" if key in row else "–")
        lines.append([name, spread(row["accuracy"]), size, rates, intervals, *wiring])
    titles = ["run", "accuracy", "parameters", "rate", "interval", *WIRING.values()]
    parts = [grid(titles, lines)]
    pairs = [[name, interval(one)] for name, one in result["summary"]["differences"].items()]
    parts.append(grid(["difference in points", "mean and 95 % interval"], pairs))
    parts.append("The bar is that growth by gradients does not fall behind the static wiring.")
    return "\n\n".join(parts)


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every growth by gradients that is below the static wiring."""
    lines = []
    for method in BY_GRADIENT:
        lead = result["summary"]["differences"][f"{method} − static"]
        if not lead["mean"] >= 0:
            lines.append(f"{method}: {interval(lead)} points over the static wiring")
    return lines
