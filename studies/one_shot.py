"""Most of a trained net leaves in one shot, and what is left is not trained.

An MLP learns Fashion-MNIST. Then hidden nodes leave, or relations of the two hidden layers; the
relations of the output layer stay. Statistics come from training images, and no image of the test
set is seen before the accuracy is reported.

- nodes: random ones or those of the smallest norm (of activation and outgoing weights), without
  repair and with it; a column subset and elimination, with repair and with a refit after it;
- relations: random ones; the smallest and Wanda's, without repair and with it; the surgeon's (OBS),
  as its sweep leaves them and solved for once more; by alternating steps; and the smallest, with
  repair, and alternating steps, with a refit after them. A refit also changes the weights of the
  output layer, of which none is cut.

The pruned net is undone each time, and its logits are compared bit for bit. At the largest but one
share of relations, nets that are cut at random, by magnitude without repair and with it, and by
alternating steps are trained for one epoch more, as the dense net is.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules import OBS, MeanActivation, NodeNorm, PruneWeakest

from . import learning
from .data import Images, downsample, fashion_images, normalise
from .learning import accuracy
from .statistics import paired, summary
from .tables import grid, interval, spread

NODES = (
    "random",
    "norm",
    "random, repaired",
    "norm, repaired",
    "subset",
    "elimination",
    "subset, refitted",
    "elimination, refitted",
)
RELATIONS = (
    "random",
    "magnitude",
    "magnitude, repaired",
    "wanda",
    "wanda, repaired",
    "obs",
    "obs, solved",
    "alternating",
    "magnitude, refitted",
    "alternating, refitted",
)
TRAINED_ON = ("dense", "random", "magnitude", "magnitude, repaired", "alternating")
# The largest loss of accuracy in points, of the best criterion: by nodes and by relations.
BARS = {"nodes": (0.3, 0.7, 2.7), "relations": (0.7, 3.3, 9.5)}
TRAINED = 0.5  # points of alternating steps below the dense net after one more epoch


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
    learning.train(
        net, optimizer, train, batch=settings.batch, epochs=settings.epochs, order=generator
    )
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
    found["trained on"] = _trained_on(settings, net, optimizer, train, test, rows, seed)
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
    name, _, after = criterion.partition(", ")
    by: Any = name
    if name == "norm":
        by = Norm("rms")
    elif after == "solved":
        by = OBS(solve=True)
    settings: dict[str, Any] = {"generator": generator, "progress": False}
    is_repaired = after in ("repaired", "refitted")
    settings["refit"] = after == "refitted"
    if kind == "nodes":
        is_repaired = is_repaired or name in ("subset", "elimination")
        return gn.prune(net, [rows], nodes=share, by=by, repair=is_repaired, **settings)
    scope = "child" if name == "wanda" else "transition"
    rule = PruneWeakest(share, by=by, transitions=(0, 1), scope=scope)
    return gn.prune(net, [rows], relations=rule, repair=is_repaired, **settings)


def _trained_on(
    settings: Settings,
    net: gn.GrapNet,
    optimizer: torch.optim.Optimizer,
    train: Images,
    test: Images,
    rows: Tensor,
    seed: int,
) -> dict[str, float]:
    """Returns accuracies after one epoch more, on the same batches: of the dense net, and with
    relations cut.
    """
    share = settings.relations[-2]
    found = {"share": share}
    for criterion in TRAINED_ON:
        one = copy.deepcopy(net)
        own = torch.optim.Adam(one.parameters(), settings.rate)
        own.load_state_dict(optimizer.state_dict())
        gn.attach(own, one)
        if criterion != "dense":
            _pruned(one, rows, "relations", share, criterion, torch.Generator().manual_seed(seed))
        order = torch.Generator().manual_seed(seed)
        learning.train(one, own, train, batch=settings.batch, epochs=1, order=order)
        found[criterion] = accuracy(one, test)
    return found


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
    after = {name: [one["trained on"][name] for one in numbers] for name in TRAINED_ON}
    found["trained on"] = {}
    for name, reached in after.items():
        found["trained on"][name] = {
            "accuracy": summary(reached),
            "difference": paired(reached, after["dense"])._asdict(),
            "against alternating": paired(reached, after["alternating"])._asdict(),
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
    lines = []
    for name, one in found["trained on"].items():
        differences = [_difference(one[key]) for key in ("difference", "against alternating")]
        lines.append([name, spread(one["accuracy"]), *differences])
    titles = ("after one epoch more", "accuracy", "− dense", "− alternating")
    parts.append(grid(titles, lines))
    return "\n\n".join(parts)


def _difference(found: dict[str, Any]) -> str:
    """Returns a paired difference, or a dash for that of a net to itself."""
    if found["std"] == 0:
        return "–"
    return f"{interval(found)}, p = {found['p']:.1e}"


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that is missed: losses of the best criterion, accuracy after
    alternating steps and one epoch more, and undo.
    """
    lines = []
    found = result["summary"]
    for kind, bars in BARS.items():
        for (share, row), bar in zip(found[kind].items(), bars, strict=False):
            best = max(one["difference"]["mean"] for one in row.values())
            if not best >= -bar:
                lines.append(f"{kind}: {-best:.2f} points lost at {share}, at most {bar} allowed")
    after = found["trained on"]["alternating"]["difference"]["mean"]
    if not after >= -TRAINED:
        lines.append(f"trained on: {-after:.2f} points below the dense net, at most {TRAINED}")
    for seed, numbers in result["seeds"].items():
        if not numbers["undone bit for bit"]:
            lines.append(f"seed {seed}: logits differ after undo")
    return lines
