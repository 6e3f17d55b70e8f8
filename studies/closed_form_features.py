"""What the closed-form head owes to its seed and to its features.

The seeds of `closed_form` are ten, and its streams are one data set at 7×7. This study repeats its
two heads with other seeds, and compares random nodes with ridge regression and a discriminant on
the features themselves, on features of other kinds: pixels, and the last hidden layer of a small
net that was trained on images which the stream does not show. Features of a ResNet-18 join them
where `GRAPNET_CIFAR_FEATURES` names a file of them (see `split_cifar`).

Settings are those of `closed_form`: 1,000 silu nodes, and a ridge that is chosen for every seed on
training images that were not learned.
"""

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from grapnet.continual import Batch

from . import closed_form, learning
from .data import load_features, small_images
from .split_cifar import VARIABLE
from .statistics import paired, summary
from .stream_heads import (
    Head,
    choice_of,
    solved_rows,
    statistics_rows,
)
from .tables import grid, interval, spread

FEATURES = {  # in the order of the table
    "7×7 Fashion-MNIST": "pixels",
    "7×7 Fashion-MNIST, learned": "64 nodes of a net trained on the other half of the images",
    "digits": "pixels of scikit-learn's digits",
    "digits, learned": "32 nodes of a net trained on the other half of the images",
    "CIFAR-10": "ResNet-18, where its file is",
}
FEW = Head("softplus", 210, "float32")
FULL = Head("silu", 1000, "float32")
NODES = Head("silu", 1000)
RIDGE = "ridge regression on the inputs"
DISCRIMINANT = "streaming LDA on the inputs"


@dataclass(frozen=True)
class Settings:
    """The closed form with other seeds, and on other features."""

    # none of those that `closed_form` reports or was looked at with
    seeds: tuple[int, ...] = tuple(range(100, 120))
    data: str = "fashion"  # or "made-up": patterns of the same shape, for a run without the images
    few: int = 500  # images a class of the streams, but for the full one and the digits
    # images a class of the full stream that choices are made with; the others judge them
    trial: int = 3000
    digits: int = 50  # images a class of the stream of digits
    judged: int = 10_000  # at most about how many images judge choices
    few_head: Head = FEW
    full_head: Head = FULL
    head: Head = NODES  # on every kind of features
    ridges: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0, 1000.0)  # to choose from
    epochs: int = 5  # of the nets whose nodes are features
    rate: float = 2e-3  # of their Adam
    batch: int = 64
    features: str = ""  # a file of features of CIFAR-10; by default GRAPNET_CIFAR_FEATURES, if set


FAST = Settings(
    seeds=(100, 101),
    data="made-up",
    few=20,
    trial=40,
    digits=20,
    few_head=Head("softplus", 24, "float32"),
    full_head=Head("silu", 32, "float32"),
    head=Head("silu", 64),
    epochs=2,
    features="none",
)


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns the accuracies of the two heads of `closed_form`, and those on every kind of
    features.
    """
    train, test = (Batch(*images) for images in small_images(settings.data))
    most = int(train.y.bincount().min())
    streams = {
        "few": (settings.few_head, settings.few, settings.few),
        "full": (settings.full_head, most, settings.trial),
    }
    ridges = closed_form.Settings().ridges
    heads = {}
    for name, (head, count, trial) in streams.items():
        how = {"batch": settings.batch, "seed": seed, "judged": settings.judged}
        choice = choice_of(train, test, counts=(count, trial), **how)
        rows = solved_rows(choice, head, seed, ridges, 2 / 7, others=False)
        heads[name] = rows[head.name]["seen_class"]
    features = {
        name: _on_features(settings, seed, *found)
        for name, found in _features(settings, train, test, seed).items()
    }
    return {"heads": heads, "features": features}


def _on_features(
    settings: Settings, seed: int, train: Batch, test: Batch, count: int
) -> dict[str, float]:
    """Returns the accuracies of random nodes, and of closed forms on the features."""
    how = {"batch": settings.batch, "seed": seed, "judged": settings.judged}
    choice = choice_of(train, test, counts=(count, count), **how)
    inputs = train.x.shape[1]
    head = settings.head
    # the norm of a node's incoming weights is 2, as on 7×7 pixels
    nodes = solved_rows(choice, head, seed, settings.ridges, 2 / inputs**0.5, others=False)
    plain = statistics_rows(choice, settings.ridges)
    return {
        "nodes": nodes[head.name]["seen_class"],
        "ridge": plain[RIDGE]["seen_class"],
        "discriminant": plain[DISCRIMINANT]["seen_class"],
    }


def _features(
    settings: Settings, train: Batch, test: Batch, seed: int
) -> dict[str, tuple[Batch, Batch, int]]:
    """Returns training and test features of every kind that there is, and how many a class a
    stream shows.
    """
    digits, digits_test = _digits()
    found = {
        "7×7 Fashion-MNIST": (train, test, settings.few),
        "7×7 Fashion-MNIST, learned": (*_learned(settings, train, test, 64, seed), settings.few),
        "digits": (digits, digits_test, settings.digits),
        "digits, learned": (
            *_learned(settings, digits, digits_test, 32, seed),
            settings.digits // 2,
        ),
    }
    if (cifar := _cifar(settings.features)) is not None:
        found["CIFAR-10"] = (*cifar, settings.few)
    return found


def _digits() -> tuple[Batch, Batch]:
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = images.float() / 16 - 0.3
    held = torch.arange(len(labels)) % 3 == 0
    return Batch(x[~held], labels[~held].long()), Batch(x[held], labels[held].long())


def _learned(
    settings: Settings, train: Batch, test: Batch, nodes: int, seed: int
) -> tuple[Batch, Batch]:
    """Returns what a net makes of one half of the training images, and of the test images, that
    was trained on the other half.
    """
    torch.manual_seed(seed)
    half = torch.randperm(len(train.y)) % 2 == 0
    inputs = train.x.shape[1]
    encoder = nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, nodes), nn.ReLU())
    model = nn.Sequential(encoder, nn.Linear(nodes, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.rate)
    learning.train(
        model,
        optimizer,
        (train.x[half], train.y[half]),
        batch=settings.batch,
        epochs=settings.epochs,
    )
    with torch.no_grad():
        ours = _unit(encoder(train.x[~half]), encoder(test.x))
    return Batch(ours[0], train.y[~half]), Batch(ours[1], test.y)


def _unit(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Returns features divided by the root of their mean square, one number for all."""
    scale = train.square().mean().sqrt()
    return train / scale, test / scale


@functools.cache
def _cifar(path: str) -> tuple[Batch, Batch] | None:
    """Returns the features of CIFAR-10, or None where no file is named."""
    path = path or os.environ.get(VARIABLE, "none")
    if path == "none":
        return None
    found = load_features(path)
    x, x_test = _unit(found.x_train, found.x_test)
    return Batch(x, found.y_train), Batch(x_test, found.y_test)


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns the deviation over these seeds beside that of the reported ones, and the differences
    on every kind of features.
    """
    runs = list(seeds.values())
    heads = {}
    for name in ("few", "full"):
        values = [run["heads"][name] for run in runs]
        heads[name] = summary(values)._asdict() | {"range": [min(values), max(values)]}
    features = {}
    for name in FEATURES:
        if name not in runs[0]["features"]:
            continue
        values = {
            key: [run["features"][name][key] for run in runs]
            for key in ("nodes", "ridge", "discriminant")
        }
        features[name] = {key: summary(found)[:2] for key, found in values.items()} | {
            "nodes − ridge": paired(values["nodes"], values["ridge"])._asdict(),
            "nodes − discriminant": paired(values["nodes"], values["discriminant"])._asdict(),
        }
    return {"n": len(runs), "heads": heads, "features": features}


def table(result: dict[str, Any]) -> str:
    """Returns the spread over the seeds, then random nodes beside closed forms on the features."""
    found = result["summary"]
    heads = []
    for name, one in found["heads"].items():
        settings = result["settings"][f"{name}_head"]
        low, high = one["range"]
        title = Head(settings["activation"], settings["nodes"], settings["sums"]).name
        cells = (f"{one['mean']:.2f} ± {one['std']:.2f}", f"{low:.2f} to {high:.2f}")
        heads.append((title, closed_form.STREAMS[name], *cells))
    features = []
    for name, one in found["features"].items():
        accuracies = [spread(one[key]) for key in ("nodes", "ridge", "discriminant")]
        gains = []
        for other in ("ridge", "discriminant"):
            gain = one[f"nodes − {other}"]
            gains.append(f"{interval(gain)}, p = {gain['p']:.1e}")
        features.append((name, FEATURES[name], *accuracies, *gains))
    nodes = f"{result['settings']['head']['nodes']:,} random nodes"
    titles = ("features", "what they are", nodes, "ridge on the features", "streaming LDA on them")
    return "\n\n".join(
        [
            grid(("head", "stream", f"seen-class, {found['n']} seeds", "range"), heads, left=2),
            grid((*titles, "nodes − ridge", "nodes − LDA"), features, left=2),
        ]
    )


def missed(result: dict[str, Any]) -> list[str]:
    """Returns a line for every kind of features that is missing, except those that need a file."""
    found = result["summary"]["features"]
    return [
        f"there is no row for {name}"
        for name in FEATURES
        if name != "CIFAR-10" and name not in found
    ]
