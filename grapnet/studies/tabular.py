"""Tabular covariance editing (the paper's Table 4): the weakest children go, and the accuracy
stays.

`python -m grapnet.studies.tabular --json FILE` writes what it finds beside the paper's figures.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

import grapnet as gn
from grapnet.data import standardise
from grapnet.integrations.extra import require
from grapnet.learning import paired, summary
from grapnet.rules import CovarianceSifter

from .command import Study, main
from .drawing import Group, Row, dots, spread
from .sifter import Data, RandomSifter, family_pairs, full_pairs, keep, renew, sift, trained_around

PAPER = {
    "Breast Cancer": {
        "none": (96.49, 1.52),
        "covariance": (96.73, 1.20),
        "relations": (1536, 352),
        "nodes": (96, 32),
    },
    "Wine": {
        "none": (98.89, 0.91),
        "covariance": (98.89, 0.91),
        "relations": (504, 162),
        "nodes": (54, 18),
    },
}
SPLITS = 5
REACH = 1.0  # points that a mean may lie from the paper's
ROWS = {  # in the order of the table
    "none": "no edit",
    "renewed": "no edit, Adam renewed (control)",
    "covariance": "covariance edit",
    "random": "random edit of the same size (control)",
}
CONTRASTS = {  # which of two rows, when
    "covariance − no edit": ("covariance", "none", "after"),
    "covariance − random": ("covariance", "random", "after"),
    "random − no edit": ("random", "none", "after"),
    "renewed − no edit": ("renewed", "none", "after"),
    "covariance − random, right after the edit": ("covariance", "random", "edited"),
}


@dataclass(frozen=True)
class Layout:
    """A data set of scikit-learn, and three hidden layers in families whose children are the next
    layer's families.
    """

    loader: str  # in sklearn.datasets
    families: int
    size: int  # nodes of a family, and its children


LAYOUTS = {"Breast Cancer": Layout("load_breast_cancer", 4, 8), "Wine": Layout("load_wine", 3, 6)}


@dataclass(frozen=True)
class Settings:
    """Table 4: half-way through training, families lose the children they hardly move with; orphans
    go with them.
    """

    fraction: float = 0.5  # of every family's children, in both hidden to hidden transitions
    test: float = 0.3  # of the rows, as many of every class
    epochs: int = 40
    batch: int = 32
    lr: float = 1e-2  # of Adam, renewed at the edit
    # splits beside each seed's own, for differences that five splits cannot resolve
    further: int = 9
    seeds: tuple[int, ...] = tuple(range(SPLITS))


FAST = replace(Settings(), epochs=4, further=0, seeds=(0, 1))


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns accuracies and counts of every row on the seed's split, and the accuracies on its
    further splits.
    """
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        later = [
            _one_split(settings, layout, seed + SPLITS * number)
            for number in range(1, settings.further + 1)
        ]
        further = {
            row: {when: [one[row][when] for one in later] for when in ("edited", "after")}
            for row in ROWS
        }
        found[name] = {**_one_split(settings, layout, seed), "further": further}
    return found


def _one_split(settings: Settings, layout: Layout, seed: int) -> dict[str, Any]:
    """Returns the accuracies and counts of every row, all from one net on one split."""
    train, test = _split(settings, layout, seed)
    sifter = CovarianceSifter(fraction=settings.fraction)
    changes = {
        "none": keep,
        "renewed": renew,
        "covariance": sift(sifter, train[0], seed=seed),
        "random": sift(RandomSifter(sifter), train[0], seed=seed),
    }
    half = settings.epochs // 2
    return {
        row: trained_around(
            _net(layout, train, seed),
            train,
            test,
            change,
            epochs=(half, settings.epochs - half),
            batch=settings.batch,
            lr=settings.lr,
            seed=seed,
        )
        for row, change in changes.items()
    }


def _split(settings: Settings, layout: Layout, seed: int) -> tuple[Data, Data]:
    """Returns rows to train on and to test on, standardised by the former."""
    content = getattr(require("sklearn.datasets", "studies"), layout.loader)()
    parts = require("sklearn.model_selection", "studies").train_test_split(
        content.data,
        content.target,
        test_size=settings.test,
        stratify=content.target,
        random_state=seed,
    )
    x_train, x_test, y_train, y_test = map(torch.from_numpy, parts)
    x_train, x_test = (x.float() for x in standardise(x_train, x_test))
    return (x_train, y_train.long()), (x_test, y_test.long())


def _net(layout: Layout, train: Data, seed: int) -> gn.GrapNet:
    """Returns a net that runs its hidden to hidden transitions family by family, before the edit
    and after it.
    """
    inputs, width, classes = (
        train[0].shape[1],
        layout.families * layout.size,
        int(train[1].max()) + 1,
    )
    hidden = family_pairs(width, layout.families, layout.size)
    wiring = [full_pairs(inputs, width), hidden, hidden, full_pairs(width, classes)]
    generator = torch.Generator().manual_seed(seed)
    net = gn.GrapNet.from_relations(
        [inputs, width, width, width, classes], wiring, generator=generator
    )
    for transition in (1, 2):
        net.execution.use("family", transition=transition)
    return net


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns mean and population standard deviation of every row, its counts, and differences over
    all splits.
    """
    found: dict[str, Any] = {
        "n": len(seeds),
        "splits": len(seeds) * (1 + settings.further),
        "sets": {},
    }
    for name in LAYOUTS:
        runs = [numbers[name] for numbers in seeds.values()]
        rows = {
            row: {
                **{
                    when: list(summary([run[row][when] for run in runs], population=True)[:2])
                    for when in ("before", "edited", "after")
                },
                **{
                    what: sorted({tuple(run[row][what]) for run in runs})
                    for what in ("relations", "nodes")
                },
            }
            for row in ROWS
        }
        contrasts = {
            title: paired(_all_splits(runs, one, when), _all_splits(runs, other, when))._asdict()
            for title, (one, other, when) in CONTRASTS.items()
        }
        found["sets"][name] = {"rows": rows, "contrasts": contrasts}
    return found


def _all_splits(runs: list[dict[str, Any]], row: str, when: str) -> list[float]:
    return list(chain.from_iterable([run[row][when], *run["further"][row][when]] for run in runs))


def table(result: dict[str, Any]) -> str:
    """Returns the paper's figures beside ours, then the differences between rows over all
    splits.
    """
    found = result["summary"]
    lines = [
        (
            f"| data set, {found['n']} splits | run | accuracy | paper | right after edit |"
            " relations / nodes removed |"
        ),
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, one in found["sets"].items():
        for row, title in ROWS.items():
            figures, published = one["rows"][row], PAPER[name].get(row)
            paper = "–" if published is None else _shown(published)
            removed = f"{_removed(figures['relations'])} / {_removed(figures['nodes'])}"
            accuracies = f"{_shown(figures['after'])} | {paper} | {_shown(figures['edited'])}"
            lines.append(f"| {name} | {title} | {accuracies} | {removed} |")
    lines += [
        "",
        f"| difference in points, {found['splits']} splits | data set | mean [95 %] | p |",
    ]
    lines.append("|---|---|---:|---:|")
    for name, one in found["sets"].items():
        for title, pair in one["contrasts"].items():
            mean = f"{pair['mean'] + 0.0:+.2f} [{pair['low']:.2f}, {pair['high']:.2f}]"
            lines.append(f"| {title} | {name} | {mean} | {pair['p']:.1e} |")
    lines += [
        "",
        (
            "Standard deviations are the population's, as in the paper. Splits share rows, so the"
            " intervals are narrower than those of independent samples would be."
        ),
    ]
    return "\n".join(lines)


def _shown(figure: tuple[float, ...] | list[float]) -> str:
    return f"{figure[0]:.2f} ± {figure[1]:.2f}"


def _removed(counts: list[list[int]]) -> str:
    return ", ".join(f"{before - after} of {before:,}" for before, after in counts)


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    settings, lines = result["settings"], []
    if len(settings["seeds"]) < SPLITS or settings["epochs"] < STUDY.settings.epochs:
        lines.append(
            f"settings: {len(settings['seeds'])} splits, {settings['epochs']} epochs; the bars are"
            f" for {SPLITS} and 40"
        )
    for name, one in result["summary"]["sets"].items():
        for row in ("covariance", "random"):
            for what in ("relations", "nodes"):
                before, removed = PAPER[name][what]
                if one["rows"][row][what] != [[before, before - removed]]:
                    found = _removed(one["rows"][row][what])
                    lines.append(
                        f"{name}: {row} removed {found} {what}, the bar is {removed} of {before:,}"
                    )
        for row in ("none", "covariance"):
            ours, paper = one["rows"][row]["after"][0], PAPER[name][row][0]
            if not abs(ours - paper) <= REACH:
                lines.append(
                    f"{name}: {ROWS[row]} reaches {ours:.2f}, the bar is {paper} ± {REACH}"
                )
    return lines


def draw(result: dict[str, Any], axes: Any) -> None:
    """Draws the accuracies around the edit, the final ones over the paper's."""
    groups = []
    for name, one in result["summary"]["sets"].items():
        rows = []
        for row, words in ROWS.items():
            figures, published = one["rows"][row], PAPER[name].get(row)
            values = {
                "before the edit": spread(figures["before"]),
                "right after it": spread(figures["edited"]),
                "after training on": spread(figures["after"]),
            }
            note = f"{_removed(figures['relations'])} relations cut"
            rows.append(Row(words, values, [] if published is None else [spread(published)], note))
        groups.append(Group(name, rows))
    changes = [
        one["contrasts"]["covariance − no edit"]["mean"]
        for one in result["summary"]["sets"].values()
    ]
    points = " and ".join(f"{change + 0.0:+.2f}" for change in changes)
    title = (
        f"Half of every family's children go; after training on: {points} points against no edit"
    )
    dots(
        axes,
        groups,
        title=title,
        label="test accuracy in per cent, ± standard deviation",
        limits=(None, 101),
    )


STUDY = Study("tabular", Settings(), FAST, one_seed, summarise, table, missed, draw)

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
