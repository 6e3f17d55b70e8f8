"""The heads of the Split Fashion-MNIST study: dense, grown, and the controls in between, each over
the same stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.continual import (
    AccuracyMatrix,
    BalancedMemory,
    ExperienceReplay,
    ReservoirMemory,
    Task,
    TaskStream,
    evaluate,
    structural_drift,
    train_on_stream,
)
from grapnet.rules import FreezeOwner, GrowForTask, Moment

from .data import Images


@dataclass(frozen=True)
class Regime:
    """What all heads of a table share."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 2e-3
    batch: int = 64
    replay_batch: int = 64
    capacity: int = 500  # images in the memory
    nodes: int = 48  # grown for every task
    tasks: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))

    @property
    def outputs(self) -> dict[int, tuple[int, ...]]:
        """The classes of every task, by its number."""
        return dict(enumerate(self.tasks))


@dataclass(frozen=True)
class Head:
    """One row of a table.

    Attributes:
        topology: "dense"; "final" has all nodes and relations of the grown head from the start;
            "related" grows, and relates the nodes of earlier tasks to the classes of the coming one
            as well; "grown" is the paper's.
        width: hidden nodes of a dense head.
        initial: "linear" draws what nn.Linear draws; "grapnet" draws U(±1/√(relations the owner
            gains in a growth)), with zero biases, and a dense head gets the same scales by fifths
            of its layer.
        renewed: whether the optimizer starts afresh with every task.
        frozen: whether the nodes of earlier tasks stay as they are.
        memory: how images enter the memory.
    """

    topology: Literal["dense", "final", "related", "grown"]
    width: int = 256
    initial: Literal["linear", "grapnet"] = "linear"
    renewed: bool = False
    frozen: bool = False
    memory: Literal["reservoir", "balanced"] = "reservoir"


class Learner:
    """A head with its optimizer and memory, on its way through a stream."""

    def __init__(
        self, head: Head, regime: Regime, seed: int, *, inputs: int = 49, classes: int = 10
    ) -> None:
        torch.manual_seed(seed)
        self.head = head
        self.regime = regime
        self.memory = (ReservoirMemory if head.memory == "reservoir" else BalancedMemory)(
            regime.capacity, seed=seed
        )
        self.generator = torch.Generator().manual_seed(seed)
        scale = "linear" if head.initial == "linear" else "alloc"
        self.grow = GrowForTask(
            layer=1, nodes=regime.nodes, outputs=regime.outputs, weights=scale, bias=scale
        )
        if head.topology == "dense":
            self.model = nn.Sequential(
                nn.Linear(inputs, head.width), nn.ReLU(), nn.Linear(head.width, classes)
            )
            if head.initial == "grapnet":
                _draw_as_grown(self.model, regime)
        else:
            self.model = gn.GrapNet([inputs, 0, classes])
        if head.topology == "final":
            for number in range(len(regime.tasks)):
                self._change(number)
        adam = regime.optimizer == "adam"
        self.optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(
            self.model.parameters(), lr=regime.lr
        )
        if head.topology in ("related", "grown"):
            gn.attach(self.optimizer, self.model, survivors="renew" if head.renewed else "keep")

    def learn(self, tasks: Iterable[Task]) -> list[float]:
        """Trains on these tasks and returns the seconds of each; growing and freezing are in
        them.
        """
        run = train_on_stream(
            self.model,
            tasks,
            ExperienceReplay(),
            self.memory,
            self.optimizer,
            replay_batch=self.regime.replay_batch,
            before_task=self._before,
        )
        return run.seconds

    @property
    def parameters(self) -> int:
        """How many weights and biases there are, frozen ones included."""
        if isinstance(self.model, gn.GrapNet):
            count = self.model.count()
            return count.trainable + count.frozen
        return sum(parameter.numel() for parameter in self.model.parameters())

    def nodes_of(self, task: int) -> list[Tensor]:
        """Returns copies of the relations to and from the nodes of a task, and of their biases."""
        if not isinstance(self.model, gn.GrapNet):
            return []
        nodes = self.model.select(owner=self.grow.tag.replace("{task}", str(task)))
        parts = (nodes.incoming().weights, nodes.outgoing().weights, nodes.biases)
        return [part.detach().clone() for part in parts]

    def _before(self, task: Task) -> None:
        if self.head.topology in ("dense", "final"):
            if self.head.renewed:
                self.optimizer.state.clear()
        else:
            self._change(task.number)

    def _change(self, number: int) -> None:
        """Grows for a task, and freezes what the one before has learnt, in one transaction."""
        net = self.model
        head = self.head
        assert isinstance(net, gn.GrapNet)
        with net.edit(reason=f"task {number}", generator=self.generator) as edit:
            if head.frozen and number:
                FreezeOwner()(net, edit, Moment(task=number - 1))
            if head.topology == "related" and number:
                edit.connect(
                    net.layers[1],
                    net.layers[2].uid[list(self.regime.tasks[number])],
                    weights=self.grow.weights,
                )
            self.grow(net, edit, Moment(task=number))


def learned(
    head: Head, regime: Regime, stream: Iterable[Task], test: Images, seed: int
) -> dict[str, float]:
    """Returns what one head reaches on a stream, in per cent, with its parameters, seconds and
    drift.

    The drift is the largest change of any coordinate of a node since the task that it was grown for
    ended; it counts the coordinates that were there, and is 0 for heads that do not grow.
    """
    learner = Learner(head, regime, seed)
    matrix = AccuracyMatrix()
    seconds = 0.0
    drift = 0.0
    then = []
    grows = head.topology == "grown"
    for task in stream:
        seconds += sum(learner.learn([task]))
        matrix.add(evaluate(learner.model, *test, regime.tasks[: task.number + 1], task.seen))
        then.append(learner.nodes_of(task.number) if grows else [])
    if grows:
        drift = max(
            structural_drift(old, learner.nodes_of(number)).largest
            for number, old in enumerate(then)
        )
    return {
        "parameters": learner.parameters,
        "task_local": 100 * matrix.task_local,
        "seen_class": 100 * matrix.seen_class,
        "forgetting": 100 * matrix.forgetting,
        "seconds": seconds,
        "drift": drift,
    }


def by_rate(
    head: Head, regime: Regime, rates: Iterable[float], stream: TaskStream, test: Images, seed: int
) -> dict[str, tuple[float, float]]:
    """Returns the seen-class accuracy on training images that the stream leaves out, and on test,
    by learning rate.
    """
    found = {}
    for rate in rates:
        learner = Learner(head, replace(regime, lr=rate), seed)
        learner.learn(stream)
        left_out, tested = (
            evaluate(learner.model, x, y, regime.tasks) for x, y in (stream.left_out[:2], test)
        )
        found[f"{rate:g}"] = (100 * left_out.overall, 100 * tested.overall)
    return found


def in_turns(
    heads: tuple[Head, Head], regime: Regime, stream: TaskStream, seed: int, turns: int
) -> dict[str, list[float] | float]:
    """Compares the training time of a dense and a grown head, task by task in turns in this
    process.

    Who goes first alternates; a turn before the counted ones pays for what a process does once.
    Returned are the median seconds of every task, the median of the turns' ratios (grown to dense)
    at every task, and that over the stream.
    """
    seconds = torch.zeros(turns + 1, 2, len(stream), dtype=torch.float64)
    for turn in range(turns + 1):
        pair = [Learner(head, regime, seed) for head in heads]
        for task in stream:
            for which in (0, 1) if (turn + task.number) % 2 else (1, 0):
                seconds[turn, which, task.number] = sum(pair[which].learn([task]))
    dense, grown = seconds[1:].unbind(1)  # [turns, tasks] each
    return {
        "dense": dense.median(0).values.tolist(),
        "grown": grown.median(0).values.tolist(),
        "ratios": (grown / dense).median(0).values.tolist(),
        "stream": float((grown.sum(1) / dense.sum(1)).median()),
    }


def _draw_as_grown(model: nn.Sequential, regime: Regime) -> None:
    """Gives a dense head the scales of a grown one: incoming 1/√48, outgoing 1/√2 to 1/√10 by
    fifths of its layer.
    """
    above = model[0]
    below = model[2]
    tasks = len(regime.tasks)
    assert isinstance(above, nn.Linear)
    assert isinstance(below, nn.Linear)
    # classes that a task's nodes relate to
    seen = torch.tensor([len(classes) for classes in regime.tasks]).cumsum(0)
    fifth = torch.arange(below.in_features) * tasks // below.in_features  # [width], of the layer
    with torch.no_grad():
        above.weight.uniform_(-1, 1).mul_(regime.nodes**-0.5)
        below.weight.uniform_(-1, 1).mul_(seen[fifth].float().rsqrt())  # [classes, width] · [width]
        above.bias.zero_()
        below.bias.zero_()
