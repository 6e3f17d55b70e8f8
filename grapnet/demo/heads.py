"""The heads of the demonstration: two that grow, two dense ones to compare them with, and one
stream for all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.integrations.extra import require
from grapnet.learning import (
    ExperienceReplay,
    ReservoirMemory,
    Step,
    Task,
    TaskStream,
    train_on_stream,
)
from grapnet.rules import GrowForTask, Moment

TASKS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))  # digits, in the order in which they come
PIXELS, CLASSES = 64, 10

Kind = Literal["dense", "control", "own", "seen"]
HEADS: dict[Kind, str] = {
    "dense": "dense, as PyTorch makes it",
    "control": "dense, same initial scale, renewed Adam",
    "own": "grown, related to own digits",
    "seen": "grown, related to all seen digits",
}


@dataclass(frozen=True)
class Settings:
    """What the demonstration runs: one setting for all heads.

    It was chosen among five because all heads have learnt well with it. With fewer updates, as in
    FAST, the dense head of the same initial scale is well ahead of the grown ones.
    """

    nodes: int = 32  # hidden nodes that every task gets
    memory: int = 100  # images that are kept to be replayed
    batch: int = 10  # images of the stream, and as many replayed ones, in an update
    updates: int = 4  # that every batch gets
    lr: float = 2e-3  # of Adam
    seeds: int = 5  # of the comparison, counted from --seed
    cut_task: int = 3  # whose relations are cut and given back
    frozen_task: int = 1  # whose nodes are frozen
    epochs: int = 3  # over all digits, after the sift
    sifted_nodes: float = 0.25  # the share that CovarianceSifter takes
    sifted_relations: float = 0.5  # the share of pixel relations that PruneWeakest takes
    per_class: int | None = None  # training images of every digit; all without


FAST = Settings(updates=2, seeds=2, epochs=2, per_class=60)


class Digits(NamedTuple):
    """Images as rows of 64 numbers, and what digits they are."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_digits(device: torch.device) -> Digits:
    """Returns the 1,797 digits that ship with scikit-learn, 30 in 100 of them to test on, always
    the same.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    datasets, selection = (
        require(f"sklearn.{part}", "demo") for part in ("datasets", "model_selection")
    )
    images, labels = datasets.load_digits(return_X_y=True)
    parts = selection.train_test_split(
        images / 16 - 0.3, labels, test_size=0.3, random_state=0, stratify=labels
    )
    x, test_x, y, test_y = (torch.as_tensor(part, device=device) for part in parts)
    return Digits(x.float(), y, test_x.float(), test_y)


class Learner:
    """A head with its optimizer and memory, on its way through the stream."""

    def __init__(self, kind: Kind, settings: Settings, digits: Digits, seed: int) -> None:
        torch.manual_seed(seed)
        self.settings, self.memory = settings, ReservoirMemory(settings.memory, seed=seed)
        self.stream = TaskStream(
            digits.x,
            digits.y,
            tasks=TASKS,
            batch=settings.batch,
            seed=seed,
            per_class=settings.per_class,
        )
        self._generator = torch.Generator().manual_seed(seed)
        # empty unless it is grown
        self.net = gn.GrapNet([PIXELS, 0, CLASSES], device=digits.x.device)
        grows = kind in ("own", "seen")
        self.model = (
            self.net if grows else _dense(settings, digits.x.device, scaled=kind == "control")
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.lr)
        self._before: Callable[[Task], None] | None = None
        if grows:
            gn.attach(self.optimizer, self.net, survivors="renew")
            self._grow = GrowForTask(
                layer=1,
                nodes=settings.nodes,
                classes="own" if kind == "own" else "seen",
                classes_per_task=2,
                first_task=1,
            )
            self._before = self._make_room
        elif kind == "control":
            self._before = lambda task: self.optimizer.state.clear()

    @property
    def parameters(self) -> int:
        """How many weights and biases there are."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def learn(
        self,
        after_step: Callable[[Step], object] | None = None,
        after_task: Callable[[Task], object] | None = None,
    ) -> float:
        """Goes through the stream once and returns the seconds that it took, evaluation left
        out.
        """
        run = train_on_stream(
            self.model,
            self.stream,
            ExperienceReplay(),
            self.memory,
            self.optimizer,
            replay_batch=self.settings.batch,
            updates_per_batch=self.settings.updates,
            before_task=self._before,
            after_step=after_step,
            after_task=after_task,
        )
        return sum(run.seconds)

    def _make_room(self, task: Task) -> None:
        classes = " and ".join(map(str, task.classes))
        with self.net.edit(
            f"grow for {classes}", by="GrowForTask", generator=self._generator
        ) as edit:
            self._grow(self.net, edit, Moment(task=task.number + 1))


def owner_of(task: int) -> str:
    """Returns what the nodes of a task, counted from 1, are tagged with."""
    return f"task-{task}"


def _dense(settings: Settings, device: torch.device, *, scaled: bool) -> nn.Sequential:
    """Returns a dense head with about as many parameters as the grown one that relates to its own
    digits.

    Scaled, its weights and biases are drawn as `GrowForTask` draws those of that head:
    U(±1/√(relations that an owner gains)), which are `nodes` for a pixel and two for a hidden node,
    and biases of zero.
    """
    grown = len(TASKS) * settings.nodes * (PIXELS + 2 + 1) + CLASSES
    width = round((grown - CLASSES) / (PIXELS + CLASSES + 1))
    first, last = nn.Linear(PIXELS, width), nn.Linear(width, CLASSES)
    if scaled:
        for layer, gained in ((first, settings.nodes), (last, 2)):
            nn.init.uniform_(layer.weight, -(gained**-0.5), gained**-0.5)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.ReLU(), last).to(device)
