"""Most of a trained net leaves in one shot, and what is left is not trained.

An MLP learns Fashion-MNIST. Then hidden nodes leave, or relations of the two hidden layers; the
relations of the output layer stay. Statistics come from training images, and no image of the test
set is seen before the accuracy is reported.

- nodes: random ones or those of the smallest norm (of activation and outgoing weights), without
  repair and with it; a column subset with repair; and elimination with repair;
- relations: random ones; the smallest and Wanda's, without repair and with it; the surgeon's (OBS);
  and by alternating steps.

The pruned net is undone each time, and its logits are compared bit for bit. At the largest but one
share of relations, it is also trained for one epoch more, beside the dense net.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules import MeanActivation, NodeNorm, PruneWeakest

from . import learning
from .data import Images, downsample, fashion_images, normalise
from .learning import accuracy
from .statistics import paired, summary
from .tables import grid, interval, spread

NODES = ("random", "norm", "random, repaired", "norm, repaired", "subset", "elimination")
RELATIONS = (
    "random",
    "magnitude",
    "magnitude, repaired",
    "wanda",
    "wanda, repaired",
    "obs",
    "alternating",
)
# The largest loss of accuracy in points, of the best criterion: by nodes and by relations.
BARS = {"nodes": (0.3, 0.7, 2.7), "relations": (0.7, 3.3, 9.5)}
TRAINED = 0.5  # points below the dense net after one more epoch


@dataclass(frozen=True)
class Settings:
    """784-512-512-10 and Adam."""

    data: str = "fashion"  # or "made-up"
    square: int = 1  # side of the squares of pixels whose means are the inputs
    hidden: tuple[int, int] = (512, 512)
    nodes: tuple[float, ...] = (0.5, 0.75, 0.9)  # shares that leave
    relations: tuple[float, ...] = (0.8, 0.9, 0.95)
    rows: int = 4096  # training images that statistics are of
    epochs: int = 4
    batch: int = 128
    rate: float = 1e-3
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)


FAST = Settings(
    data="made-up", square=4, hidden=(32, 24), nodes=(0.5,), relations=(0.5, 0.8), rows=256,
    epochs=6, batch=32, seeds=(0, 1),
)  # fmt: skip


def one_seed(settings: Settings, seed: int) -> dict[str, Any]:
    """Returns the accuracy of every criterion at every share, and after one epoch of training."""
    train, test = _images(settings)
    generator = torch.Generator().manual_seed(seed)
    net = gn.GrapNet([train[0].shape[1], *settings.hidden, 10], generator=generator)
    optimizer = torch.optim.Adam(net.parameters(), settings.rate)
    gn.attach(optimizer, net)
    learn = partial(learning.train, images=train, batch=settings.batch)
    learn(net, optimizer, epochs=settings.epochs, order=generator)
    order = torch.randperm(len(train[0]), generator=generator)
    rows = train[0][order[: settings.rows]]
    found: dict[str, Any] = {"dense": accuracy(net, test), "nodes": {}, "relations": {}}
    undone = True
    for kind, shares, criteria in (
        ("nodes", settings.nodes, NODES),
        ("relations", settings.relations, RELATIONS),
    ):
        for share in shares:
            of_share = found[kind][str(share)] = {}
            for criterion in criteria:
                before = _logits(net, test)
                pruning = _pruned(net, rows, kind, share, criterion, generator)
                of_share[criterion] = accuracy(net, test)
                pruning.undo()
                undone &= torch.equal(before, _logits(net, test))
    found["undone bit for bit"] = undone
    found["trained on"] = _trained_on(settings, net, optimizer, learn, test, rows, seed)
    return found


def _images(settings: Settings) -> tuple[Images, Images]:
    (x, y), (test_x, test_y) = fashion_images(settings.data)
    rows = normalise(downsample(x, settings.square))
    return (rows, y), (normalise(downsample(test_x, settings.square)), test_y)


def _logits(net: gn.GrapNet, images: Images) -> Tensor:
    with torch.no_grad():
        return net(images[0])


class Norm(MeanActivation):
    """‖activation‖·‖outgoing weights‖."""

    def score(self, net: Any, candidates: Any, evidence: Any, /) -> Tensor:
        """Returns the product of every node."""
        weights = NodeNorm("outgoing").score(net, candidates, evidence)
        return super().score(net, candidates, evidence) * weights


def _pruned(
    net: gn.GrapNet,
    rows: Tensor,
    kind: str,
    share: float,
    criterion: str,
    generator: torch.Generator,
) -> Any:
    """Prunes a net and returns the way back."""
    name, _, repaired = criterion.partition(", ")
    by: Any = Norm("rms") if name == "norm" else name
    settings: dict[str, Any] = {"generator": generator, "progress": False}
    if kind == "nodes":
        is_repaired = bool(repaired) or name in ("subset", "elimination")
        return gn.prune(net, [rows], nodes=share, by=by, repair=is_repaired, **settings)
    scope = "child" if by == "wanda" else "transition"
    rule = PruneWeakest(share, by=by, transitions=(0, 1), scope=scope)
    return gn.prune(net, [rows], relations=rule, repair=bool(repaired), **settings)


def _trained_on(
    settings: Settings,
    net: gn.GrapNet,
    optimizer: torch.optim.Optimizer,
    learn: Callable[..., None],
    test: Images,
    rows: Tensor,
    seed: int,
) -> dict[str, float]:
    """Returns accuracies after one epoch more: of the dense net, and with relations cut."""
    share = settings.relations[-2]
    dense = copy.deepcopy(net)
    other = torch.optim.Adam(dense.parameters(), settings.rate)
    other.load_state_dict(optimizer.state_dict())
    learn(dense, other, epochs=1, order=torch.Generator().manual_seed(seed))
    _pruned(net, rows, "relations", share, "alternating", torch.Generator().manual_seed(seed))
    learn(net, optimizer, epochs=1, order=torch.Generator().manual_seed(seed))
    return {"share": share, "dense": accuracy(dense, test), "pruned": accuracy(net, test)}


def summarise(settings: Settings, seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns the accuracies over the seeds, and what each criterion loses."""
    numbers = list(seeds.values())
    dense = [one["dense"] for one in numbers]
    found: dict[str, Any] = {"dense": summary(dense)}
    for kind, criteria in (("nodes", NODES), ("relations", RELATIONS)):
        rows: dict[str, Any] = {}
        for share in getattr(settings, kind):
            rows[str(share)] = {}
            for criterion in criteria:
                reached = [one[kind][str(share)][criterion] for one in numbers]
                rows[str(share)][criterion] = {
                    "accuracy": summary(reached),
                    "difference": paired(reached, dense)._asdict(),
                }
        found[kind] = rows
    after = [one["trained on"] for one in numbers]
    found["trained on"] = {
        "dense": summary([one["dense"] for one in after]),
        "pruned": summary([one["pruned"] for one in after]),
        "difference": paired(
            [one["pruned"] for one in after], [one["dense"] for one in after]
        )._asdict(),
    }
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the accuracies of every criterion at every share."""
    found = result["summary"]
    parts = [f"Dense: {spread(found['dense'])}"]
    for kind in ("nodes", "relations"):
        lines = []
        criteria: list[str] = []
        for share, row in found[kind].items():
            criteria = list(row)
            cells = [spread(one["accuracy"]) for one in row.values()]
            lines.append([f"{float(share):.0%}", *cells])
        parts.append(grid([f"{kind} that leave", *criteria], lines))
    after = found["trained on"]
    difference = after["difference"]
    parts.append(
        f"After one epoch more: dense {spread(after['dense'])}, pruned"
        f" {spread(after['pruned'])}, difference {interval(difference)}"
    )
    return "\n\n".join(parts)


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that is missed: losses of the best criterion, accuracy after
    one epoch more, and undo.
    """
    lines = []
    found = result["summary"]
    for kind, bars in BARS.items():
        for (share, row), bar in zip(found[kind].items(), bars, strict=False):
            best = max(one["difference"]["mean"] for one in row.values())
            if not best >= -bar:
                lines.append(f"{kind}: {-best:.2f} points lost at {share}, at most {bar} allowed")
    after = found["trained on"]["difference"]["mean"]
    if not after >= -TRAINED:
        lines.append(f"trained on: {-after:.2f} points below the dense net, at most {TRAINED}")
    for seed, numbers in result["seeds"].items():
        if not numbers["undone bit for bit"]:
            lines.append(f"seed {seed}: logits differ after undo")
    return lines
