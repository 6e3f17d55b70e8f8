"""Streams give every method the same batches, and the loop over them is the one that anybody would
write.
"""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grapnet.continual import (
    DER,
    BalancedMemory,
    Batch,
    DERpp,
    ExperienceReplay,
    ReservoirMemory,
    Step,
    TaskStream,
    evaluate,
    train_on_stream,
)

TASKS = [(0, 1), (4, 2), (3, 5)]


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(6, (300,), generator=draw)
    return torch.randn(300, 4, generator=draw) + y.unsqueeze(1), y


def stream_of(data: tuple[Tensor, Tensor], seed: Any = 0, **settings: Any) -> TaskStream:
    return TaskStream(
        *data, **{"tasks": TASKS, "batch": 16, "per_class": 20, **settings}, seed=seed
    )


def linear() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Linear(4, 6)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_a_task_brings_its_classes_once(data):
    stream = stream_of(data)
    assert [task.number for task in stream] == [0, 1, 2]
    assert [task.classes for task in stream] == stream.classes == TASKS
    assert [task.seen for task in stream] == [(0, 1), (0, 1, 4, 2), (0, 1, 4, 2, 3, 5)]
    for task in stream:
        batches = list(task.batches)
        assert [len(batch.y) for batch in batches] == [16, 16, 8]
        assert len(task) == 3
        assert Counter(torch.cat([batch.y for batch in batches]).tolist()) == dict.fromkeys(
            task.classes, 20
        )
        assert torch.equal(torch.cat([batch.x for batch in batches]), task.content.x)
        assert torch.equal(data[0][task.rows], task.content.x)
        assert set(batches[0].y.tolist()) == set(task.classes)  # the classes are mixed
    rows = torch.cat([task.rows for task in stream])
    assert len(rows.unique()) == len(rows)


def test_the_seed_decides_the_subset_and_the_order(data):
    def rows(**settings: Any) -> list[list[int]]:
        return [task.rows.tolist() for task in stream_of(data, **settings)]

    torch.manual_seed(1)
    first = rows()
    torch.manual_seed(2)  # the global generator takes no part
    assert rows() == first
    assert rows(batch=7) == first
    other = rows(seed=1)
    assert [set(task) for task in other] != [set(task) for task in first]
    whole = rows(per_class=None)
    whole_of_other = rows(per_class=None, seed=1)
    assert [set(task) for task in whole] == [set(task) for task in whole_of_other]
    assert whole != whole_of_other
    reordered = rows(tasks=[TASKS[2], TASKS[0], TASKS[1]])
    # a class keeps its images
    assert [set(task) for task in reordered] == [set(first[n]) for n in (2, 0, 1)]


def test_a_number_of_tasks_shares_the_classes(data):
    assert stream_of(data, tasks=3).classes == [(0, 1), (2, 3), (4, 5)]
    with pytest.raises(ValueError, match="6 classes do not make 4 tasks"):
        stream_of(data, tasks=4)


def test_what_is_left_out_belongs_to_the_classes_and_was_not_shown(data):
    x, y = data
    stream = stream_of(data, tasks=TASKS[:2])
    shown = torch.cat([task.content.x for task in stream])
    left = stream.left_out
    of_stream = torch.isin(y, torch.tensor([0, 1, 2, 4]))
    assert len(left.y) + len(shown) == int(of_stream.sum())
    together = torch.cat([left.x, shown])
    assert torch.equal(
        together[together[:, 0].argsort()], x[of_stream][x[of_stream][:, 0].argsort()]
    )
    assert len(stream_of(data, per_class=None).left_out.y) == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tasks": [(0, 1), (1, 2)]}, "twice"),
        ({"per_class": 90}, "90"),
        ({"tasks": [(0, 9)], "per_class": None}, "class 9"),
    ],
)
def test_a_stream_that_cannot_be_is_refused(data, settings, named):
    with pytest.raises(ValueError, match=named):
        stream_of(data, **settings)


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("kind", [ReservoirMemory, BalancedMemory])
def test_the_loop_is_the_one_written_out(data, kind, updates):
    model = linear()
    by_hand = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    memory = kind(30, seed=2)
    objective = ExperienceReplay(0.5)
    run = train_on_stream(
        model,
        stream_of(data),
        objective,
        memory,
        optimizer,
        replay_batch=10,
        updates_per_batch=updates,
    )
    adam = torch.optim.Adam(by_hand.parameters(), lr=0.01)
    again = kind(30, seed=2)
    for task in stream_of(data):
        for current in task.batches:
            for _ in range(updates):
                replay = again.sample(10)
                adam.zero_grad()
                objective(by_hand, current, replay, task.seen).backward()
                adam.step()
            again.add(current.x, current.y)
    assert same(weights(model), weights(by_hand))
    assert not same(weights(model), weights(linear()))
    assert torch.equal(memory.content.x, again.content.x)
    assert run.updates == 9 * updates
    assert len(run.seconds) == 3
    assert min(run.seconds) > 0


@pytest.mark.parametrize("objective", [DER(0.5), DERpp(0.5, 1.0)], ids=str)
def test_dark_replay_stores_the_logits_from_before_the_update(data, objective):
    model = linear()
    expected = []
    memory = ReservoirMemory(1000, seed=0)  # keeps everything, in order

    def watch(net: nn.Module, current: Batch, replay: Batch | None, seen: Any) -> Tensor:
        expected.append(net(current.x).detach())
        return objective(net, current, replay, seen)

    watch.keeps_logits = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_on_stream(model, stream_of(data), watch, memory, optimizer)
    assert torch.equal(memory.content.logits, torch.cat(expected))
    other = ReservoirMemory(1000, seed=0)
    train_on_stream(model, stream_of(data), ExperienceReplay(), other, optimizer)
    assert other.content.logits is None


def test_hooks_are_called_in_their_places(data):
    calls: list[Any] = []
    model = linear()
    memory = ReservoirMemory(30, seed=0)

    def after_step(step: Step) -> None:
        assert not step.loss.requires_grad
        calls.append((step.number, step.task.number))

    train_on_stream(
        model,
        stream_of(data),
        ExperienceReplay(),
        memory,
        torch.optim.SGD(model.parameters(), lr=0.1),
        before_task=lambda task: calls.append(("before", task.number, memory.offered)),
        after_step=after_step,
        after_task=lambda task: calls.append(("after", task.number, memory.offered)),
    )
    wanted: list[Any] = []
    for n in range(3):
        wanted += [
            ("before", n, 40 * n),
            *((3 * n + k, n) for k in range(3)),
            ("after", n, 40 * n + 40),
        ]
    assert calls == wanted


def test_a_run_that_stopped_after_a_task_goes_on_as_if_it_had_not(data):
    def parts() -> tuple[nn.Module, torch.optim.Optimizer, ReservoirMemory]:
        model = linear()
        return model, torch.optim.Adam(model.parameters(), lr=0.01), ReservoirMemory(30, seed=2)

    model, optimizer, memory = parts()
    train_on_stream(model, stream_of(data), ExperienceReplay(), memory, optimizer)
    first, adam, kept = parts()
    train_on_stream(first, stream_of(data)[:2], ExperienceReplay(), kept, adam)
    saved = copy.deepcopy([part.state_dict() for part in (first, adam, kept)])
    second, adam, kept = parts()
    for part, state in zip((second, adam, kept), saved, strict=True):
        part.load_state_dict(state)
    train_on_stream(second, stream_of(data)[2:], ExperienceReplay(), kept, adam)
    assert same(weights(second), weights(model))
    assert not same(weights(second), weights(first))


def test_an_example_is_one_row_and_one_class_number(data):
    x, y = data
    for labels in (torch.nn.functional.one_hot(y), y[:-1]):
        with pytest.raises(ValueError, match="example"):
            TaskStream(x, labels, tasks=2, batch=4, seed=0)
        with pytest.raises(ValueError, match="example"):
            ReservoirMemory(5, seed=0).add(x, labels)
        with pytest.raises(ValueError, match="example"):
            evaluate(torch.nn.Linear(x.shape[1], 6), x, labels, [(0, 1)])


def test_dark_replay_without_a_memory_is_refused(data):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="memory"):
        train_on_stream(model, stream_of(data), DER(0.5), None, optimizer)
