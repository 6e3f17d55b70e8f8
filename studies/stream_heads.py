"""Heads on a class-incremental stream: solved, discriminant, replayed and trained offline, each as
a row of numbers.

Every head is given the same `Choice`: its settings are chosen on training images that it was not
trained on.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.continual import (
    AccuracyMatrix,
    Batch,
    ClosedFormReadout,
    ExperienceReplay,
    GramStatistics,
    ReservoirMemory,
    Task,
    TaskStream,
    evaluate,
    linear_discriminant,
    nearest_class_mean,
    train_on_stream,
)

from .learning import accuracy, train
from .statistics import paired, summary
from .tables import grid, interval

TASKS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
Loss = Literal["seen", "adjusted"]


@dataclass(frozen=True)
class Head:
    """One layer of random nodes and how its sums are kept."""

    activation: str
    nodes: int
    sums: Literal["float32", "float64"] = "float64"
    seeds: int | None = None  # only the first so many seeds, where one takes long

    @property
    def name(self) -> str:
        """How the tables call it."""
        return f"closed form, {self.nodes} {self.activation} nodes, {self.sums} sums"


class Choice(NamedTuple):
    """A stream to learn, and one with images left out of it to choose settings on."""

    stream: TaskStream
    trial: TaskStream
    held_out: Batch
    test: Batch


def choice_of(
    train: Batch, test: Batch, *, batch: int, seed: int, counts: tuple[int, int], judged: int
) -> Choice:
    """Returns a stream, and a trial stream whose left-out images judge settings.

    Args:
        train: the training images.
        test: the test images.
        batch: of both streams.
        seed: of both streams.
        counts: images a class of the stream and of the trial.
        judged: about how many left-out images are kept.
    """
    stream, trial = (
        TaskStream(train.x, train.y, tasks=TASKS, batch=batch, seed=seed, per_class=count)
        for count in counts
    )
    left = trial.left_out
    thin = max(1, len(left.y) // judged)
    return Choice(stream, trial, Batch(left.x[::thin], left.y[::thin]), test)


def random_net(
    inputs: int, head: Head, seed: int, *, spread: float, classes: int = 10
) -> gn.GrapNet:
    """Returns a net with fixed random hidden nodes and outgoing relations of weight 0, to be solved
    for.
    """
    generator = torch.Generator().manual_seed(9000 + seed)
    weights = torch.randn(inputs, head.nodes, generator=generator) * spread
    biases = torch.randn(head.nodes, generator=generator)
    net = gn.GrapNet.from_relations(
        [inputs, head.nodes, classes],
        [
            (*_pairs(inputs, head.nodes), weights.flatten()),
            (*_pairs(head.nodes, classes), torch.zeros(head.nodes * classes)),
        ],
        biases=[biases, torch.zeros(classes)],
        activation=[head.activation, "identity"],
    )
    with net.edit(reason="fix the random nodes") as edit:
        edit.freeze(net.layers[1], outgoing=False)
    return net


def solved_rows(
    choice: Choice,
    head: Head,
    seed: int,
    ridges: Sequence[float],
    spread: float,
    *,
    others: bool = True,
) -> dict[str, dict[str, Any]]:
    """Returns the row of a head that is solved after every task, and, with `others`, of a
    discriminant on its nodes.
    """
    inputs = choice.held_out.x.shape[1]
    net = random_net(inputs, head, seed, spread=spread)
    dtype = getattr(torch, head.sums)
    readout = ClosedFormReadout(net, dtype=dtype)
    for task in choice.trial:
        take_in(readout, task.content)
    features = readout.features(choice.held_out.x)
    solutions = {ridge: readout.statistics.solve(ridge) for ridge in ridges}
    ridge = max(ridges, key=lambda r: accuracy(solutions[r], (features, choice.held_out.y)))
    readout = ClosedFormReadout(net, ridge=ridge, dtype=dtype)
    matrix = AccuracyMatrix()
    seconds = 0.0
    for task in choice.stream:
        start = time.perf_counter()
        take_in(readout, task.content)  # sums do not depend on how a stream comes in batches
        readout.solve()
        seconds += time.perf_counter() - start
        matrix.add(evaluate(net, choice.test.x, choice.test.y, TASKS[: task.number + 1], task.seen))
    statistics = readout.statistics
    stored = {"numbers": statistics.numbers, "bytes": statistics.bytes, "images": 0}
    extra = {"parameters": _count(net), "seconds": seconds, "chosen": {"ridge": ridge}}
    rows = {head.name: measured(matrix) | stored | extra}
    if others:
        features = readout.features(choice.test.x)
        for name, solution in _discriminants(statistics).items():
            score = accuracy(solution, (features, choice.test.y))
            rows[f"{name} on {head.nodes} {head.activation} nodes, {head.sums} sums"] = {
                "seen_class": score
            } | stored
    return rows


def statistics_rows(choice: Choice, ridges: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Returns the rows of the closed forms on the inputs themselves."""
    inputs = choice.test.x.shape[1]
    held_out = (choice.held_out.x, choice.held_out.y)
    test = (choice.test.x, choice.test.y)
    trial = GramStatistics(inputs, 10)
    statistics = GramStatistics(inputs, 10)
    for sums, stream in ((trial, choice.trial), (statistics, choice.stream)):
        for task in stream:
            sums.add(task.content.x, task.content.y)
    solutions = {ridge: trial.solve(ridge, standardize=True) for ridge in ridges}
    ridge = max(ridges, key=lambda r: accuracy(solutions[r], held_out))
    stored = {"numbers": statistics.numbers, "bytes": statistics.bytes, "images": 0}
    found = _discriminants(statistics) | {
        "ridge regression": statistics.solve(ridge, standardize=True)
    }
    rows: dict[str, dict[str, Any]] = {}
    for name, solution in found.items():
        rows[f"{name} on the inputs"] = {"seen_class": accuracy(solution, test)} | stored
    rows["ridge regression on the inputs"]["chosen"] = {"ridge": ridge}
    return rows


class Learner(NamedTuple):
    """A model that a stream trains, its optimizer, and what happens to it before and after every
    task.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    before_task: Callable[[Task], object] | None = None
    after_task: Callable[[Task], object] | None = None


Build = Callable[[float], Learner]  # from a learning rate


def trained(model: nn.Module, rate: float) -> Learner:
    """Returns a model with one Adam for the whole stream."""
    return Learner(model, torch.optim.Adam(model.parameters(), lr=rate))


def replay_row(
    stream: TaskStream,
    test: Batch,
    build: Build,
    seed: int,
    *,
    memory: int,
    rate: float,
    updates: int,
    loss: Loss,
) -> dict[str, Any]:
    """Returns the row of a model that is trained with replay from a reservoir."""
    torch.manual_seed(seed)
    learner = build(rate)
    kept = ReservoirMemory(memory, seed=seed)
    matrix = AccuracyMatrix()

    def after_task(task: Task) -> None:
        matrix.add(evaluate(learner.model, test.x, test.y, TASKS[: task.number + 1], task.seen))
        if learner.after_task is not None:
            learner.after_task(task)

    run = train_on_stream(
        learner.model,
        stream,
        ExperienceReplay(loss=loss),
        kept,
        learner.optimizer,
        replay_batch=stream[0].batch,
        updates_per_batch=updates,
        before_task=learner.before_task,
        after_task=after_task,
    )
    stored = {"numbers": kept.numbers, "bytes": kept.bytes, "images": len(kept)}
    extra = {
        "parameters": _count(learner.model),
        "updates": run.updates,
        "seconds": sum(run.seconds),
    }
    return measured(matrix) | stored | extra


def tuned_replay(
    choices: Mapping[str, Choice],
    build: Build,
    seed: int,
    *,
    loss: Loss,
    memory: int,
    rates: Sequence[float],
    updates: Sequence[int],
) -> dict[str, Any]:
    """Returns the row of replay with what did best on held-out images: inputs, learning rate and
    updates a batch.

    Args:
        choices: the same stream with its inputs in several forms, by name.
        build: makes the model.
        seed: of the model and the memory.
        loss: of `ExperienceReplay`.
        memory: how many images are stored.
        rates: the learning rates to choose from.
        updates: the updates a batch to choose from.
    """

    def row(name: str, rate: float, count: int, *, trial: bool) -> dict[str, Any]:
        chosen = choices[name]
        stream, test = (chosen.trial, chosen.held_out) if trial else (chosen.stream, chosen.test)
        return replay_row(
            stream, test, build, seed, memory=memory, rate=rate, updates=count, loss=loss
        )

    options = [(name, rate, count) for name in choices for rate in rates for count in updates]
    best = max(options, key=lambda option: row(*option, trial=True)["seen_class"])
    named = {"inputs": best[0]} if len(choices) > 1 else {}
    return row(*best, trial=False) | {"chosen": named | {"rate": best[1], "updates": best[2]}}


def joint_row(
    choice: Choice,
    build: Callable[[], nn.Module],
    seed: int,
    *,
    rates: Sequence[float],
    epochs: int,
    least: int,
) -> dict[str, Any]:
    """Returns the row of training on all images at once, again and again, with the best learning
    rate.
    """

    def learnt(stream: TaskStream, test: Batch, rate: float) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = build()
        batch = 2 * stream[0].batch
        x = torch.cat([task.content.x for task in stream])
        y = torch.cat([task.content.y for task in stream])
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        rounds = max(epochs, -(-least * batch // len(y)))
        train(model, optimizer, (x, y), batch=batch, epochs=rounds)
        found = evaluate(model, test.x, test.y, TASKS)
        return {
            "seen_class": 100 * found.overall,
            "images": len(y),
            "numbers": x.numel(),
            "bytes": x.nbytes + y.nbytes,
        }

    best = max(rates, key=lambda rate: learnt(choice.trial, choice.held_out, rate)["seen_class"])
    return learnt(choice.stream, choice.test, best) | {"chosen": {"rate": best}}


def dense(
    inputs: int, nodes: int, activation: Callable[[], nn.Module] = nn.ReLU, classes: int = 10
) -> nn.Module:
    """Returns a net with one hidden layer, drawn like `nn.Linear` draws."""
    return nn.Sequential(nn.Linear(inputs, nodes), activation(), nn.Linear(nodes, classes))


def compared(seeds: Sequence[dict[str, dict[str, Any]]], ours: str) -> dict[str, dict[str, Any]]:
    """Returns, for every row, its means over the seeds that have it and how far the row `ours` lies
    above it.
    """
    found = {}
    for name in seeds[0]:
        rows = [(rows[name], rows[ours]["seen_class"]) for rows in seeds if name in rows]
        means = {}
        for measure in ("seen_class", "task_local", "forgetting", "seconds"):
            values = [row[measure] for row, _ in rows if measure in row]
            if values:
                means[measure] = summary(values, population=len(values) < 2)._asdict()
        first = rows[0][0]
        kept = {
            key: first[key]
            for key in ("numbers", "bytes", "images", "parameters", "updates")
            if key in first
        }
        chosen = Counter(
            ", ".join(f"{k} {v}" for k, v in row.get("chosen", {}).items()) for row, _ in rows
        )
        scores = [row["seen_class"] for row, _ in rows]
        ahead = None
        if name != ours and len(rows) > 1:
            ahead = paired([own for _, own in rows], scores)._asdict()
        found[name] = means | kept | {"chosen": dict(chosen), "ahead": ahead}
    return found


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the rows as a table."""
    lines = []
    for name, row in rows.items():
        score = row["seen_class"]
        ahead = row["ahead"]
        cells = [name, f"{score['mean']:.2f} ± {score['std']:.2f}"]
        cells.append(f"{row['forgetting']['mean']:.2f}" if "forgetting" in row else "–")
        cells += [f"{row[key]:,}" for key in ("numbers", "bytes", "images")]
        cells.append(f"{row['seconds']['mean']:.1f}" if "seconds" in row else "–")
        cells.append(f"{score['n']}")
        cells.append(max(row["chosen"], key=row["chosen"].__getitem__) or "–")
        cells.append("–" if ahead is None else f"{interval(ahead)}, p = {ahead['p']:.1e}")
        lines.append(cells)
    titles = (
        "head",
        "seen-class",
        "forgetting",
        "numbers stored",
        "bytes",
        "images stored",
        "seconds",
        "seeds",
        "most often chosen",
        "ours ahead by",
    )
    return grid(titles, lines, left=len(titles))


def take_in(readout: ClosedFormReadout, content: Batch) -> None:
    """Updates a readout in pieces; its sums do not depend on how a stream comes in batches."""
    for x, y in zip(content.x.split(1024), content.y.split(1024), strict=True):
        readout.update(x, y)


def _discriminants(statistics: GramStatistics) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "streaming LDA": linear_discriminant(statistics),
        "nearest class mean": nearest_class_mean(statistics),
        "nearest standardised class mean": nearest_class_mean(statistics, standardize=True),
    }


def measured(matrix: AccuracyMatrix) -> dict[str, Any]:
    """Returns the accuracies of a stream in per cent."""
    return {
        name: 100 * getattr(matrix, name) for name in ("seen_class", "task_local", "forgetting")
    }


def _pairs(parents: int, children: int) -> tuple[Tensor, Tensor]:
    return torch.arange(parents).repeat_interleave(children), torch.arange(children).repeat(parents)


def _count(model: nn.Module) -> int:
    """Returns how many parameters a model has, frozen ones included, which a net keeps outside of
    `parameters()`.
    """
    if isinstance(model, gn.GrapNet):
        return model.count().trainable + model.count().frozen
    return sum(parameter.numel() for parameter in model.parameters())
