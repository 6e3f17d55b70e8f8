"""How much a sifter may cut: accuracy against the share of the relations that go, from 10 to 95 %.

The rule of the paper cuts the children that a family hardly moves with. Beside it stand two other
scores for the same cuts, the magnitude of the weights and random numbers, each alone, with repair,
and with repair and a refit, which give the relations that are left the weights that best keep what
the children received from the training rows. `grapnet.rules.repair` does so in the edit that cuts:
it solves every layer for what it received before. `grapnet.rules.refit` follows: it solves one
layer after the other, each with what the solved layers before it send.

The nets on Breast Cancer and Wine are those of Table 4 with 20 nodes in a family instead of 8 and
6, so that every share is a whole number of a family's children; on 7×7 Fashion-MNIST it is the net
of the sifter study. Settings are those of these two studies; splits and seeds are others. The
dampings of repairs and refits are chosen on training rows that are held out.
"""

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules import (
    CovarianceSifter,
    Recorder,
    Rule,
    RuleContext,
    gram_recorders,
    refit,
    repair,
)

from . import sifter, tabular
from .data import Images
from .learning import accuracy, train
from .sifter import RandomSifter, sift
from .statistics import paired, paired_splits, summary
from .tables import grid, spread

SCORES = {"covariance": "covariance (the paper's)", "weight": "magnitude", "random": "random"}
REPAIRED = " + repair"
REFITTED = " + refit"
ROWS = {  # in the order of the tables
    name + mended: title + mended
    for mended in ("", REPAIRED, REFITTED)
    for name, title in SCORES.items()
}
CONTRASTS = (  # which of two rows
    ("random + repair", "random"),
    ("covariance + repair", "random"),
    ("covariance + repair", "covariance"),
    ("weight + repair", "weight"),
    ("covariance + repair", "random + repair"),
    ("random + refit", "random"),
    ("covariance + refit", "covariance"),
    ("covariance + refit", "covariance + repair"),
    ("covariance", "random"),
    ("weight", "random"),
)
FASHION = "7×7 Fashion-MNIST"
SETS = (*tabular.LAYOUTS, FASHION)
SIGNIFICANT = 0.01  # the largest p that counts as one
REACHED = dict.fromkeys(tabular.LAYOUTS, 0.9)  # share from which mended nets have to be ahead
# of the two steps together; repair alone leaves what one layer misses to the next one
BARS = ("random + refit − random", "covariance + refit − covariance")


@dataclass(frozen=True)
class Settings:
    """Sifters alone, with repair and with a refit, in the middle of training."""

    shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    trained: tuple[float, ...] = (0.5, 0.8, 0.95)  # shares after which training goes on
    size: int = 20  # nodes of a family on the tabular sets, and its children
    # splits beside each seed's own; only after that one training goes on
    further: int = 4
    table: tabular.Settings = field(default_factory=tabular.Settings)
    images: sifter.Settings = field(default_factory=sifter.Settings)
    seeds: tuple[int, ...] = tuple(range(100, 110))


FAST = replace(
    Settings(),
    shares=(0.2, 0.8),
    trained=(0.8,),
    further=1,
    table=tabular.FAST,
    images=sifter.FAST,
    seeds=(100, 101),
)


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns for every set the accuracies without an edit, and those of all rows by share."""
    found: dict[str, Any] = {}
    count = len(Settings().seeds)
    for name, layout in tabular.LAYOUTS.items():
        wide = replace(layout, size=settings.size)
        splits = []
        for number in range(settings.further + 1):
            split = seed + count * number
            train, test = tabular.split(settings.table, wide, split)
            net = tabular.family_net(wide, train, split)
            half = settings.table.epochs // 2
            plan = Plan(train, test, settings.table.batch, settings.table.lr, split)
            later = settings.table.epochs - half if number == 0 else 0
            splits.append(_curves(settings, net, plan, half, later))
        found[name] = splits
    train, test = sifter.images_of(settings.images, seed)
    plan = Plan(train, test, settings.images.batch, settings.images.lr, seed)
    net = sifter.family_net(settings.images, seed)
    found[FASHION] = [_curves(settings, net, plan, settings.images.before, settings.images.after)]
    return found


@dataclass(frozen=True)
class Plan:
    """What a net is trained and tested on, and how."""

    train: Images
    test: Images
    batch: int
    lr: float
    seed: int


def _curves(
    settings: Settings, net: gn.GrapNet, plan: Plan, before: int, after: int
) -> dict[str, Any]:
    """Returns accuracies in per cent before the edit and, by row and share, right after it and
    after training on.
    """
    _train(net, plan, before)
    trained = copy.deepcopy(net)
    _train(trained, plan, after)
    whole = net.count().relations
    edited: dict[str, list[float]] = {row: [] for row in ROWS}
    later: dict[str, list[float]] = {row: [] for row in ROWS}
    left = []
    for share in settings.shares:
        pruned = net
        for row in ROWS:
            pruned = copy.deepcopy(net)
            cut(pruned, row, share, plan.train[0], plan.seed)
            edited[row].append(accuracy(pruned, plan.test))
            if after and share in settings.trained:
                _train(pruned, plan, after)
                later[row].append(accuracy(pruned, plan.test))
        left.append(pruned.count().relations / whole)
    found = {
        "before": accuracy(net, plan.test),
        "edited": edited,
        "relations_left": left,
    }
    if after:
        found |= {"none": accuracy(trained, plan.test), "after": later}
    return found


def cut(net: gn.GrapNet, row: str, share: float, x: Tensor, seed: int) -> None:
    """Cuts a share of the relations of families as a row of the tables says, and mends the net."""
    original = copy.deepcopy(net)
    score, _, mended = row.partition(" + ")
    rule = _rule(score, share)
    if mended:
        rule = Repaired(rule)
    sift(rule, x, seed=seed)(net, torch.optim.SGD(net.parameters()))
    if row.endswith(REFITTED):
        refit(net, original, [x])


@dataclass(frozen=True)
class Repaired:
    """A rule that repairs in the same edit what another one cuts."""

    rule: Any

    def recorders(self, net: gn.GrapNet) -> dict[str, Recorder]:
        """Returns those of the rule and of the repair."""
        found: dict[str, Recorder] = dict(gram_recorders(net))
        if hasattr(self.rule, "recorders"):
            found.update(self.rule.recorders(net))
        return found

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        """Lets the rule write its cuts, and repairs."""
        self.rule(net, edit, context)
        repair(net, edit, context.evidence)


def _rule(name: str, share: float) -> Rule:
    if name == "random":
        return RandomSifter(CovarianceSifter(fraction=share))
    if name == "weight":
        return CovarianceSifter(fraction=share, by="magnitude")
    return CovarianceSifter(fraction=share)


def _train(net: gn.GrapNet, plan: Plan, epochs: int) -> None:
    """Trains with an Adam of its own, as after an edit of the paper."""
    optimizer = torch.optim.Adam(net.parameters(), lr=plan.lr)
    order = torch.Generator().manual_seed(plan.seed)
    train(net, optimizer, plan.train, batch=plan.batch, epochs=epochs, order=order)


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns means of every row by share, the differences of rows, and from which share on they
    are significant.
    """
    found: dict[str, Any] = {"n": len(seeds), "sets": {}}
    for name in SETS:
        splits = [split for numbers in seeds.values() for split in numbers[name]]
        first = [numbers[name][0] for numbers in seeds.values()]
        one: dict[str, Any] = {
            "splits": len(splits),
            "before": summary([split["before"] for split in splits])[:2],
            "none": summary([split["none"] for split in first])[:2],
            "edited": _means(splits, "edited", len(settings.shares)),
            "after": _means(first, "after", len(settings.trained)),
            "left": [
                sum(split["relations_left"][place] for split in splits) / len(splits)
                for place in range(len(settings.shares))
            ],
        }
        test = None if name == FASHION else settings.table.test
        one["contrasts"] = {}
        for a, b in CONTRASTS:
            right = [
                _compared(splits, "edited", a, b, place, test)
                for place in range(len(settings.shares))
            ]
            later = [
                _compared(first, "after", a, b, place, test)
                for place in range(len(settings.trained))
            ]
            one["contrasts"][f"{a} − {b}"] = {
                "edited": right,
                "after": later,
                "from": _significant_from(settings.shares, right, "p"),
                "corrected_from": _significant_from(settings.shares, right, "corrected_p"),
            }
        found["sets"][name] = one
    return found


def _means(splits: Sequence[dict[str, Any]], when: str, count: int) -> dict[str, Any]:
    return {
        row: [summary([split[when][row][place] for split in splits])[:2] for place in range(count)]
        for row in ROWS
    }


def _compared(
    splits: Sequence[dict[str, Any]], when: str, a: str, b: str, place: int, test: float | None
) -> dict[str, Any]:
    ours = [split[when][a][place] for split in splits]
    other = [split[when][b][place] for split in splits]
    found = paired(ours, other)
    corrected = found
    if test is not None:
        corrected = paired_splits(ours, other, test=test)
    return found._asdict() | {"corrected_p": corrected.p}


def _significant_from(
    shares: Sequence[float], right: Sequence[dict[str, Any]], p: str
) -> float | None:
    """Returns the smallest share from which on all differences are positive and significant."""
    found = None
    for share, one in zip(reversed(shares), reversed(right), strict=True):
        if not (one["mean"] > 0 and one[p] < SIGNIFICANT):
            break
        found = share
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the curves right after the edit, what training on makes of them, and from where
    differences are significant.
    """
    shares = _percentages(result["settings"]["shares"])
    trained = _percentages(result["settings"]["trained"])
    parts = []
    verdicts = []
    for name, one in result["summary"]["sets"].items():
        title = f"{name}, {one['splits']} runs, before {spread(one['before'])}"
        parts += [f"**{title}.** Accuracy right after the cut:", curves(result, name)]
        rows = []
        for row, words in ROWS.items():
            rows.append((words, *(spread(pair) for pair in one["after"][row])))
        count = result["summary"]["n"]
        parts += [
            f"After training on, {count} runs; without a cut {spread(one['none'])}:",
            grid(("cut", *trained), rows),
        ]
        for contrast, found in one["contrasts"].items():
            cells = [
                f"{found['edited'][place]['mean']:+.1f} (p = {found['edited'][place]['p']:.0e})"
                for place in _shown(result["settings"])
            ]
            starts = [_start(found[key]) for key in ("from", "corrected_from")]
            verdicts.append((name, contrast, *starts, *cells))
    at = [shares[place] for place in _shown(result["settings"])]
    starts = (f"p < {SIGNIFICANT:g} from", "corrected, from")
    titles = ("set", "difference in points", *starts, *at)
    parts.append(grid(titles, verdicts, left=2))
    parts.append(
        "Tests are paired t-tests over the runs. They are about these data sets: splits are drawn"
        " from the same rows. The corrected resampled t-test (Nadeau and Bengio) is about other"
        " rows of their kind, and counts all that differs between runs as if it came from the"
        " rows they share, initial weights and drawn cuts as well; no number of splits makes its p"
        " small."
    )
    return "\n\n".join(parts)


def _start(share: float | None) -> str:
    return "nowhere" if share is None else f"{100 * share:g} %"


def curves(result: dict[str, Any], name: str) -> str:
    """Returns the accuracies of a set right after the cut, by share."""
    edited = result["summary"]["sets"][name]["edited"]
    rows = []
    for row, words in ROWS.items():
        rows.append((words, *(f"{mean:.1f}" for mean, _ in edited[row])))
    return grid(("cut", *_percentages(result["settings"]["shares"])), rows)


def _percentages(shares: Sequence[float]) -> list[str]:
    return [f"{100 * share:g} %" for share in shares]


def _shown(settings: dict[str, Any]) -> list[int]:
    """Returns the places of the shares whose differences the table shows."""
    return [place for place, share in enumerate(settings["shares"]) if share in settings["trained"]]


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    lines = []
    for name, share in REACHED.items():
        for contrast in BARS:
            start = result["summary"]["sets"][name]["contrasts"][contrast]["from"]
            if start is None or start > share:
                lines.append(
                    f"{name}: {contrast} is significant from: {_start(start)}, the bar is"
                    f" {_start(share)} at most"
                )
    return lines


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws accuracy right after the cut against the share, one picture a set; needs matplotlib."""
    from matplotlib.figure import Figure

    shares = [100 * share for share in result["settings"]["shares"]]
    colours = dict(zip(SCORES, ("tab:blue", "tab:green", "tab:gray"), strict=True))
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    for axes, (name, one) in zip(
        figure.subplots(1, len(SETS)), result["summary"]["sets"].items(), strict=True
    ):
        for row, words in ROWS.items():
            score, _, mended = row.partition(" + ")
            style = {"": ":", "repair": "--", "refit": "-"}[mended]
            means = [mean for mean, _ in one["edited"][row]]
            colour = colours[score]
            axes.plot(shares, means, style, color=colour, label=words)
        axes.axhline(one["before"][0], color="black", linewidth=0.5)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("relations of families cut, %")
    figure.axes[0].set_ylabel("accuracy without training, %")
    lines = figure.axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right", fontsize=8)  # pyright: ignore[reportArgumentType]
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    source, target = sys.argv[1:]  # a result, and where to draw it
    plot(json.loads(Path(source).read_text(encoding="utf-8")), Path(target))
