"""Pruning a ResNet-18 on CIFAR-10 while it trains, beside Torch-Pruning.

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
- "dense": no cut.

Both pruners rank the channels of a space by the norm of all their weights and take the same share
of every space, and what Torch-Pruning leaves after a cut is the budget of ours.

Every seed chooses its learning rate with the dense net, on images of the training set that are held
out for that; the test images are for the results alone.

Torch-Pruning is measured where it is installed: `pip install --no-deps torch-pruning==1.6.1`.
"""

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from torch import nn

import grapnet as gn
from grapnet.rules import PruneNodes, RuleContext

from .cifar_training import (
    Descent,
    Learner,
    Pixels,
    Training,
    about_run,
    example,
    images_on,
    macs_of,
    paired_of,
    shape,
    split,
    summary_of,
    trained,
)
from .tables import grid, interval, spread

GOAL = 0.5  # points over Torch-Pruning
SLACK = 0.01  # how much more than its share of the multiply-adds the final size may have

Method = Literal[
    "dense",
    "small",
    "ours",
    "ours, another optimizer",
    "ours, same sizes",
    "Torch-Pruning",
]
PRUNERS: tuple[Method, ...] = (
    "ours",
    "ours, another optimizer",
    "ours, same sizes",
    "Torch-Pruning",
)


@dataclass(frozen=True)
class Settings(Training):
    """ResNet-18 of width 32, cut to a half and a quarter of its multiply-adds."""

    descents: tuple[Descent, ...] = (
        Descent("SGD", (0.2, 0.4, 0.8), 5e-4, ((0.5, 5), (0.25, 5), (0.25, 40))),
        Descent("AdamW", (1e-3, 3e-3), 0.05, ((0.25, 5),)),
    )
    first_cut: float = 0.2  # share of the steps before it
    last_cut: float = 0.6


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
    return found


def stages(settings: Settings) -> list[list[str]]:
    """Returns the names of what a seed runs: first what chooses the learning rates."""
    return [[run.name for run in trials(settings)], [run.name for run in runs(settings)]]


def one_part(
    settings: Settings, seed: int, part: str, found: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the numbers of one run.

    Args:
        settings: of the study.
        seed: of the first weights and of the batches.
        part: the name of the run.
        found: what the trials of the seed found.
    """
    run = next(run for run in (*trials(settings), *runs(settings)) if run.name == part)
    train, test = images_on(settings.data, settings.device)
    rate = run.rate
    if rate is None:
        rate = chosen_rate(settings, run.descent, found)
    else:
        train, test = split(train, settings.held_out, seed)
    about = about_run(settings, rate)
    if run.method == "Torch-Pruning":
        about["version"] = metadata.version("torch-pruning")
    return about | trained_run(settings, run, seed, rate, train, test)


def chosen_rate(
    settings: Settings, descent: Descent, found: Mapping[str, Mapping[str, Any]]
) -> float:
    """Returns the learning rate with which the dense net was best on held-out images."""
    tried = [run for run in trials(settings) if run.descent == descent]
    best = max(tried, key=lambda run: found[run.name]["accuracy"])
    assert best.rate is not None
    return best.rate


def trained_run(
    settings: Settings, run: Run, seed: int, rate: float, train: Pixels, judged: Pixels
) -> dict[str, Any]:
    """Returns the numbers of a run with a learning rate."""
    widths = shape(settings.width, 0.0)
    if run.method == "small":
        widths = shape(settings.width, final_ratio(settings.width, run.share))
    learner_of = functools.partial(_learner, settings, run)
    return trained(settings, widths, learner_of, seed, rate, train, judged)


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
        self.net = gn.adopt(model, example(model))
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
            example(model),
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


def _learner(settings: Settings, run: Run, model: nn.Module, steps: int) -> Learner:
    descent = run.descent
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


def summarise(settings: Settings, seeds: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns every run over the seeds, and the differences that the study is about."""
    numbers = list(seeds.values())
    rows = {}
    for name in numbers[0]:
        of = [one[name] for one in numbers]
        rows[name] = {
            "accuracy": summary_of([row["accuracy"] for row in of]),
            "macs": summary_of([row["macs"] for row in of]),
            "parameters": round(sum(row["parameters"] for row in of) / len(of)),
            "rates": sorted({row["rate"] for row in of}),
            "seconds": summary_of([row["seconds"] for row in of]),
            "cut_seconds": summary_of([row["cut_seconds"] for row in of]),
        }
    differences = {}
    sizes = [(descent, *size) for descent in settings.descents for size in descent.cuts]
    for one, other in itertools.chain.from_iterable(contrasts(*size) for size in sizes):
        if one.name in rows and other.name in rows:
            a = [found[one.name]["accuracy"] for found in numbers]
            b = [found[other.name]["accuracy"] for found in numbers]
            differences[f"{one.name} − {other.name}"] = paired_of(a, b)._asdict()
    return {"rows": rows, "differences": differences}


def contrasts(descent: Descent, share: float, cuts: int) -> list[tuple[Run, Run]]:
    """Returns the pairs of runs that are compared at a size, Torch-Pruning first."""
    ours, anew, same, theirs = (Run(method, descent, share, cuts) for method in PRUNERS)
    small = Run("small", descent, share)
    dense = Run("dense", descent)
    return [(ours, theirs), (same, theirs), (ours, anew), (ours, small), (ours, dense)]


def table(result: dict[str, Any]) -> str:
    """Returns the runs, their differences, and the accuracy after every epoch."""
    rows = result["summary"]["rows"]
    lines = []
    curves = []
    for name, row in rows.items():
        share = f"{100 * row['macs'][0]:.1f} %"
        rates = ", ".join(f"{rate:g}" for rate in row["rates"])
        size = f"{row['parameters']:,}"
        lines.append([name, spread(row["accuracy"]), share, size, rates])
        of_seeds = [found[name]["curve"] for found in result["seeds"].values()]
        means = [sum(epoch) / len(epoch) for epoch in zip(*of_seeds, strict=True)]
        curves.append([name, *(f"{mean:.1f}" for mean in means)])
    parts = [grid(["run", "accuracy", "MACs", "parameters", "rate"], lines)]
    parts.append(_differences(result))
    parts.append(f"The bar is not to fall behind Torch-Pruning; the goal was +{GOAL} points.")
    parts.append(_conditions(result))
    epochs = [str(number + 1) for number in range(len(curves[0]) - 1)]
    parts.append(grid(["accuracy after epoch", *epochs], curves))
    return "\n\n".join(parts)


def _conditions(result: dict[str, Any]) -> str:
    """Returns the number of seeds, and where and beside what they were measured."""
    seeds = result["seeds"].values()
    devices = {row["device"] for one in seeds for row in one.values()}
    rivals = {
        f"Torch-Pruning {row['version']}"
        for one in seeds
        for row in one.values()
        if "version" in row
    }
    known = ", ".join(sorted(devices) + sorted(rivals))
    return f"Seeds: {len(seeds)}. Measured with {known}."


def _differences(result: dict[str, Any]) -> str:
    """Returns the differences as a table: a row for every size, a column for every pair."""
    known = result["summary"]["differences"]
    titles = ["points, and 95 % interval"]
    lines = []
    for descent in _as_settings(result["settings"]).descents:
        for share, cuts in descent.cuts:
            pairs = contrasts(descent, share, cuts)
            titles[1:] = [f"{one.method} − {other.method}" for one, other in pairs]
            line = [f"{descent.name}, {100 * share:g} % of the MACs, {cuts} cuts"]
            for one, other in pairs:
                found = known.get(f"{one.name} − {other.name}")
                line.append("–" if found is None else interval(found))
            lines.append(line)
    return grid(titles, lines)


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every comparison with Torch-Pruning that is missing, or in which ours
    has more multiply-adds, or is below it in the mean.
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
            if not lead["mean"] >= 0:
                lines.append(f"{ours}: {interval(lead)} points over Torch-Pruning")
    return lines


def _as_settings(read: Mapping[str, Any]) -> Settings:
    """Returns settings as JSON holds them."""
    descents = []
    for one in read["descents"]:
        cuts = tuple((share, count) for share, count in one["cuts"])
        descents.append(Descent(**{**one, "rates": tuple(one["rates"]), "cuts": cuts}))
    return Settings(**{**read, "seeds": tuple(read["seeds"]), "descents": tuple(descents)})


def has_torch_pruning() -> bool:
    """Returns whether Torch-Pruning itself can be imported, and not our package of that name."""
    try:
        spec = importlib.util.find_spec("torch_pruning")
    except ValueError:
        return False
    return spec is not None and spec.name == "torch_pruning"
