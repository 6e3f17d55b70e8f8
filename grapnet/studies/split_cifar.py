"""Split CIFAR-10 on the features of a frozen ResNet-18 (Table 3), with the heads and controls that
the paper lacks.

`python -m grapnet.studies.split_cifar --json FILE` writes what it finds. The features are read from
the file that GRAPNET_CIFAR_FEATURES names; `python -m grapnet.studies.cifar_features` makes such a
file. Those that ours were measured on are not torchvision's, on which the paper's numbers were, so
ours stand beside the paper's and are not expected to equal them.

What was tried (seeds 0, 1 and 20, before the settings were fixed): the paper says neither how long
its stream is nor how its features are scaled. With 500, 1,000 or 5,000 images a class, features as
they are or standardised and Adam at 1e-3 or 2e-3, its order of the four heads does not come out on
these features: the MLP or the linear head leads the grown ones. Random nodes need no scaling of the
features; 1,000 of them are level with ridge regression on the features themselves, 2,000 are ahead.
Sums in float64 give the same accuracy as in float32 (83.57 and 83.56, seed 20) and weigh twice as
much: replay given that many bytes (7,871 images, logit-adjusted and tuned) reached 83.33, and 82.12
with the bytes of the float32 sums (3,935 images).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import grapnet as gn
from grapnet.data import MissingDataError, load_features, standardise
from grapnet.learning import Batch, Task, TaskStream
from grapnet.rules import FreezeOwner, GrowForTask, Moment

from .command import Study, main
from .drawing import stream_bars
from .stream_heads import (
    Build,
    Choice,
    Head,
    Learner,
    Loss,
    compared,
    dense,
    markdown,
    replay_row,
    solved_rows,
    statistics_rows,
    trained,
    tuned_replay,
)

PAPER = {  # mean and standard deviation over five seeds, on torchvision's features
    "linear ER": {
        "parameters": 5_130,
        "task_local": (94.14, 0.47),
        "seen_class": (57.28, 2.29),
        "forgetting": (39.85, 3.85),
    },
    "MLP-256 ER": {
        "parameters": 133_898,
        "task_local": (94.74, 0.65),
        "seen_class": (67.07, 2.36),
        "forgetting": (30.66, 2.26),
    },
    "GrapNet frozen": {
        "parameters": 124_570,
        "task_local": (94.92, 0.72),
        "seen_class": (64.72, 3.07),
        "forgetting": (36.02, 3.12),
    },
    "GrapNet plastic": {
        "parameters": 124_570,
        "task_local": (95.14, 0.43),
        "seen_class": (70.88, 1.72),
        "forgetting": (28.26, 2.74),
    },
}
# of our closed form on the full stream, and of its lead over every head with replay
BAR, LARGEST_P = (
    82.5,
    1e-3,
)
STREAMS = {"few": "500 images a class", "full": "all 5,000 images a class"}
VARIABLE = "GRAPNET_CIFAR_FEATURES"  # of the environment: the path of the features
# of those that `NOTE` is about
SHA256 = "6cc6bee53f4e568c6476758bde7016461e39084909673019f866fb66e507fce6"
NOTE = (
    "Not torchvision's features: an ImageNet ResNet-18 whose batch-norm statistics come from a"
    " third party's fine-tuning, in 8 bits a value. The paper's numbers are from torchvision's."
)


@dataclass(frozen=True)
class Settings:
    """Table 3 and stronger heads, on 500 images a class and on all of them."""

    seeds: tuple[int, ...] = tuple(range(20, 30))
    features: str = ""  # path of their file; without it that of `VARIABLE`; or "made-up"
    few: int = 500  # images a class of the short stream
    # images a class that choices for the full stream are trained on; the others judge them
    trial: int = 2500
    judged: int = 10_000  # about how many of these do
    heads: tuple[Head, ...] = (  # solved for; the bar is about the first
        Head("silu", 2000, "float32"),
        Head("silu", 1000, "float32"),
        Head("silu", 3000, "float32", seeds=3),
    )
    ridges: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0)  # to choose from
    memory: int = 500  # images
    batch: int = 64  # of the stream and of the replay
    rate: float = 2e-3  # of Adam, for the paper's heads, as on Fashion-MNIST
    nodes: int = 48  # grown for every task
    # of Adam, for the tuned linear heads to choose from
    linear_rates: tuple[float, ...] = (
        2e-4,
        7e-4,
        2e-3,
    )
    dense_rates: tuple[float, ...] = (7e-5, 2e-4, 7e-4)  # those of the tuned MLPs
    grown_rates: tuple[float, ...] = (7e-4, 2e-3, 5e-3)  # those of the tuned GrapNets
    updates: tuple[int, ...] = (1, 4)  # a batch, for the tuned heads to choose from


FAST = Settings(
    seeds=(20, 21),
    features="made-up",
    few=8,
    trial=16,
    heads=(Head("silu", 64),),
    memory=20,
    linear_rates=(2e-3,),
    dense_rates=(7e-4,),
    grown_rates=(2e-3,),
    updates=(1,),
)


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns the rows of both streams, and what the features are."""
    train, test, about = features(settings.features, seed)
    most = int(train.y.bincount().min())
    inputs = {"as they are": (train, test), "standardised": _standardised(train, test)}
    found: dict[str, Any] = {}
    for name, count, trial in (("few", settings.few, settings.few), ("full", most, settings.trial)):
        choices = {
            title: _choice(settings, *parts, seed, count, trial) for title, parts in inputs.items()
        }
        plain = choices["as they are"]
        rows, first = {}, settings.heads[0]
        for head in settings.heads:
            if head.seeds is None or seed in settings.seeds[: head.seeds]:
                spread = train.x.shape[1] ** -0.5
                rows |= solved_rows(
                    plain, head, seed, settings.ridges, spread, others=head is first
                )
        rows |= statistics_rows(plain, settings.ridges)
        for title, build in _paper_heads(settings, train.x.shape[1], seed).items():
            how = {"memory": settings.memory, "rate": settings.rate, "updates": 1}
            rows[title] = replay_row(plain.stream, test, build, seed, loss="seen", **how)
        found[name] = rows | _tuned(settings, choices, seed, rows[first.name]["bytes"])
    return found | {"about": about}


def features(path: str, seed: int) -> tuple[Batch, Batch, str]:
    """Returns the training and test features and where they come from; "made-up" gives noisy class
    means.
    """
    if path == "made-up":
        # a model of this seed would be drawn like the means
        generator = torch.Generator().manual_seed(10_000 + seed)
        means, parts = torch.rand(10, 512, generator=generator), []
        for count in (24, 10):  # a class
            y = torch.arange(10).repeat_interleave(count)
            parts.append(
                Batch((means[y] + torch.randn(len(y), 512, generator=generator)).relu(), y)
            )
        return parts[0], parts[1], "made-up features"
    path = path or os.environ.get(VARIABLE, "")
    if not Path(path).is_file():
        wrong = f"{path} is no file of CIFAR-10 features" if path else f"{VARIABLE} is not set"
        error = MissingDataError(
            f"{wrong}; python -m grapnet.studies.cifar_features makes such a file"
        )
        error.commands = (
            "python -m grapnet.studies.cifar_features --out features.npz",
            f"export {VARIABLE}=FILE.npz",
        )
        raise error
    found = load_features(path)
    return Batch(found.x_train, found.y_train), Batch(found.x_test, found.y_test), found.about


def grown(inputs: int, nodes: int, seed: int, rate: float, *, frozen: bool) -> Learner:
    """Returns the paper's head: nodes grown for every task, related to the classes seen by then."""
    net = gn.GrapNet([inputs, 0, 10])
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    gn.attach(optimizer, net, survivors="renew")
    grow, freeze = GrowForTask(layer=1, nodes=nodes, classes_per_task=2), FreezeOwner()
    generator = torch.Generator().manual_seed(seed)

    def before_task(task: Task) -> None:
        with net.edit(reason="grow for a task", generator=generator) as edit:
            grow(net, edit, Moment(task=task.number))

    def after_task(task: Task) -> None:
        with net.edit(reason="freeze its nodes") as edit:
            freeze(net, edit, Moment(task=task.number))

    return Learner(net, optimizer, before_task, after_task if frozen else None)


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns mean and spread of every row of both streams, and our closed form against each."""
    found = {
        name: compared([numbers[name] for numbers in seeds.values()], settings.heads[0].name)
        for name in STREAMS
    }
    about = next(iter(seeds.values()))["about"]
    made_up = (
        "Made-up features: these numbers say nothing about CIFAR-10."
        if settings.features == "made-up"
        else ""
    )
    return found | {"about": about, "note": NOTE if SHA256 in about else made_up}


def table(result: dict[str, Any]) -> str:
    """Returns one Markdown table a stream, and the paper's."""
    summary, lines = result["summary"], []
    whose = "features that are not torchvision's" if summary["note"] == NOTE else "features"
    for stream, title in STREAMS.items():
        lines += [
            f"### Split CIFAR-10, {whose}, one pass over {title}",
            "",
            *markdown(summary[stream]),
            "",
        ]
    lines += [f"### Paper's Table 3 beside the same heads on {whose}", ""]
    lines += [
        "| head | parameters | measure | paper | ours, few | ours, full |",
        "|---|---|---|---|---|---|",
    ]
    for name, printed in PAPER.items():
        for measure in ("task_local", "seen_class", "forgetting"):
            mean, std = printed[measure]
            ours = [summary[stream][name][measure] for stream in STREAMS]
            cells = " | ".join(f"{found['mean']:.2f} ± {found['std']:.2f}" for found in ours)
            lines.append(
                f"| {name} | {summary['full'][name]['parameters']:,} | {measure} | {mean} ± {std} |"
                f" {cells} |"
            )
    lines += ["", *(line for line in (summary["note"], summary["about"]) if line)]
    return "\n".join(lines)


def missed(result: dict[str, Any]) -> list[str]:
    """Returns a line for every bar that the result misses."""
    settings = result["settings"]
    if settings["features"] == "made-up" or len(settings["seeds"]) < 10:
        return [
            "this was a fast run or one of few seeds: the bars are about ten seeds of CIFAR-10"
            " features"
        ]
    rows, lines = result["summary"]["full"], []
    name, ours = next(iter(rows.items()))
    if not ours["seen_class"]["mean"] >= BAR:
        lines.append(f"{name} reaches {ours['seen_class']['mean']:.2f}, the bar is {BAR:.2f}")
    for other, row in rows.items():
        ahead = row["ahead"]
        if row["images"] and not (ahead["mean"] > 0 and ahead["p"] < LARGEST_P):
            lines.append(f"{other} is {ahead['mean']:.2f} below {name} with p = {ahead['p']:.1e}")
    for title, printed in PAPER.items():
        if rows[title]["parameters"] != printed["parameters"]:
            lines.append(
                f"{title} has {rows[title]['parameters']:,} parameters, the paper's"
                f" {printed['parameters']:,}"
            )
    return lines


def _standardised(train: Batch, test: Batch) -> tuple[Batch, Batch]:
    """Returns inputs scaled by the whole training set, which a stream does not know: a gift to the
    tuned heads.
    """
    one, other = standardise(train.x, test.x)
    return Batch(one, train.y), Batch(other, test.y)


def _choice(
    settings: Settings, train: Batch, test: Batch, seed: int, count: int, trial: int
) -> Choice:
    stream, short = (
        TaskStream(train.x, train.y, tasks=5, batch=settings.batch, seed=seed, per_class=n)
        for n in (count, trial)
    )
    left = short.left_out
    thin = max(1, len(left.y) // settings.judged)
    return Choice(stream, short, Batch(left.x[::thin], left.y[::thin]), test)


def _paper_heads(settings: Settings, inputs: int, seed: int) -> dict[str, Build]:
    """Returns the heads of Table 3, by the names in `PAPER`."""
    return {
        "linear ER": lambda rate: trained(nn.Linear(inputs, 10), rate),
        "MLP-256 ER": lambda rate: trained(dense(inputs, 256), rate),
        "GrapNet frozen": lambda rate: grown(inputs, settings.nodes, seed, rate, frozen=True),
        "GrapNet plastic": lambda rate: grown(inputs, settings.nodes, seed, rate, frozen=False),
    }


def _tuned(
    settings: Settings, choices: dict[str, Choice], seed: int, stored: int
) -> dict[str, dict[str, Any]]:
    """Returns the rows of replay with all choices made on held-out images; one stores as many bytes
    as our head.
    """
    test, heads = (
        choices["as they are"].test,
        _paper_heads(settings, choices["as they are"].test.x.shape[1], seed),
    )
    as_many = stored // ((test.x.nbytes + test.y.nbytes) // len(test.y))
    rows: list[tuple[str, Loss, int, str]] = [
        (name, loss, settings.memory, f"{settings.memory:,} images")
        for name in ("linear ER", "MLP-256 ER", "GrapNet plastic")
        for loss in ("seen", "adjusted")
    ]
    rows.append(("MLP-256 ER", "adjusted", as_many, "as many bytes as the closed form"))
    rates = {
        "linear ER": settings.linear_rates,
        "MLP-256 ER": settings.dense_rates,
        "GrapNet plastic": settings.grown_rates,
    }
    titles = {"seen": "tuned", "adjusted": "tuned and logit-adjusted"}
    found = {}
    for name, loss, memory, words in rows:
        grid = {"rates": rates[name], "updates": settings.updates}
        row = tuned_replay(choices, heads[name], seed, loss=loss, memory=memory, **grid)
        found[f"{name}, {titles[loss]}, {words}"] = row
    return found


def draw(result: dict[str, Any], axes: Any) -> None:
    """Draws the seen-class accuracy of every head on both streams, what it stores, and the paper's
    where it has one.
    """
    found = result["summary"]
    printed = {name: row["seen_class"] for name, row in PAPER.items()}
    name, ours = next(iter(found["full"].items()))
    others = [row["seen_class"]["mean"] for row in found["full"].values() if row["images"]]
    title = (
        f"{name}: {ours['seen_class']['mean']:.1f} on all images, the best head with replay"
        f" {max(others):.1f}"
    )
    title += " (features that are not torchvision's)" if found["note"] == NOTE else ""
    stream_bars(
        axes,
        {words: found[stream] for stream, words in STREAMS.items()},
        title=title,
        lines={STREAMS["full"]: {"bar": BAR}},
        papers={STREAMS["few"]: printed, STREAMS["full"]: printed},
    )


STUDY = Study("split_cifar", Settings(), FAST, one_seed, summarise, table, missed, draw)

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
