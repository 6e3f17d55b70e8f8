"""Streams give every method the same batches, and the loop over them is the one that anybody would
write.
"""

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.continual.losses import DER, DERpp, ExperienceReplay
from grapnet.continual.memories import BalancedMemory, Batch, ReservoirMemory
from grapnet.continual.metrics import evaluate
from grapnet.continual.streams import Step, Task, TaskStream, train_on_stream
from grapnet.rules import FreezeOwner, GrowForTask, Moment

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
    whole, whole_of_other = rows(per_class=None), rows(per_class=None, seed=1)
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
        ({"tasks": [(0, 1), (1, 2)]}, "no class comes twice"),
        ({"tasks": [(0, 1), ()]}, "every task has classes"),
        ({"tasks": []}, "every task has classes"),
        ({"tasks": [(0, -1)]}, "numbers from 0 to"),
        ({"tasks": [(0, 2**63)]}, "numbers from 0 to"),
        ({"per_class": 90}, "class 0 has .* fewer than the 90"),
        ({"tasks": [(0, 9)], "per_class": None}, "class 9 has 0 rows"),
        ({"batch": 0}, "batch is a whole number, at least 1"),
        ({"batch": 2.5}, "batch is a whole number, at least 1, got 2.5"),
        ({"per_class": 0}, "per_class is a whole number, at least 1"),
        ({"seed": None}, "seed is a whole number, at least 0, got None"),
    ],
)
def test_a_stream_that_cannot_be_is_refused(data, settings, named):
    with pytest.raises(ValueError, match=named):
        stream_of(data, **settings)


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("kind", [ReservoirMemory, BalancedMemory])
def test_the_loop_is_the_one_written_out(data, kind, updates):
    model, by_hand = linear(), linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    memory, objective = kind(30, seed=2), ExperienceReplay(0.5)
    run = train_on_stream(
        model,
        stream_of(data),
        objective,
        memory,
        optimizer,
        replay_batch=10,
        updates_per_batch=updates,
    )
    adam, again = torch.optim.Adam(by_hand.parameters(), lr=0.01), kind(30, seed=2)
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


def test_methods_get_the_same_batches_and_replays_whatever_the_model(data):
    given: dict[str, list[Batch | None]] = {}

    def watched(name: str) -> Any:
        def objective(model: Any, current: Batch, replay: Batch | None, seen: Any) -> Tensor:
            given.setdefault(name, []).extend([current, replay])
            return ExperienceReplay()(model, current, replay, seen)

        return objective

    wide = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 6))
    for name, model in (("linear", linear()), ("wide", wide)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_on_stream(
            model, stream_of(data), watched(name), ReservoirMemory(30, seed=2), optimizer
        )
    assert given["linear"][1] is None  # nothing is in the memory before the first batch
    for a, b in zip(given["linear"], given["wide"], strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or (torch.equal(a.x, b.x) and torch.equal(a.y, b.y))


def test_without_a_memory_nothing_is_replayed(data):
    model, by_hand = linear(), linear()
    train_on_stream(
        model,
        stream_of(data),
        ExperienceReplay(),
        None,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    sgd = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for task in stream_of(data):
        for current in task.batches:
            sgd.zero_grad()
            ExperienceReplay()(by_hand, current, None, task.seen).backward()
            sgd.step()
    assert same(weights(model), weights(by_hand))


@pytest.mark.parametrize("objective", [DER(0.5), DERpp(0.5, 1.0)], ids=str)
def test_dark_replay_stores_the_logits_from_before_the_update(data, objective):
    model, expected = linear(), []
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
    model, memory = linear(), ReservoirMemory(30, seed=0)

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


def test_a_net_grows_and_freezes_in_the_hooks(data):
    net = gn.GrapNet([4, 0, 6])
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    gn.attach(optimizer, net, survivors="renew")
    grow = GrowForTask(layer=1, nodes=5, outputs=dict(enumerate(TASKS)))

    def edit(rule: Any) -> Any:
        def hook(task: Task) -> None:
            with net.edit(generator=torch.Generator().manual_seed(task.number)) as edit:
                rule(net, edit, Moment(task=task.number))

        return hook

    train_on_stream(
        net,
        stream_of(data),
        ExperienceReplay(),
        ReservoirMemory(30, seed=0),
        optimizer,
        before_task=edit(grow),
        after_task=edit(FreezeOwner()),
    )
    assert net.sizes == [4, 15, 6]
    assert net.count().trainable == 6  # the biases of the outputs
    gn.check(net)


@pytest.mark.parametrize("settings", [{"updates_per_batch": 0}, {"replay_batch": 0}])
def test_a_loop_without_updates_is_refused(data, settings):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="at least 1"):
        train_on_stream(model, stream_of(data), ExperienceReplay(), None, optimizer, **settings)


@pytest.mark.parametrize(
    ("labels", "error", "named"),
    [
        (lambda y: y.bool(), TypeError, r"y holds class numbers, which are whole, got torch.bool"),
        (
            lambda y: y.to(torch.uint16),
            TypeError,
            r"y holds class numbers, which are whole, got torch.uint16",
        ),
        (
            lambda y: y.float(),
            TypeError,
            r"y holds class numbers, which are whole, got torch.float32; y.long\(\)",
        ),
        (lambda y: y.numpy(), TypeError, r"y is a tensor, got ndarray; torch.as_tensor\(y\)"),
        (lambda y: y.tolist(), TypeError, "y is a tensor, got list"),
        (lambda y: torch.nn.functional.one_hot(y), ValueError, r"one-hot rows take y.argmax\(1\)"),
        (lambda y: y[:-1], ValueError, "an example is one row of each part, got x"),
        (lambda y: y[0], ValueError, r"one class number an example, got \[\]"),
    ],
)
def test_labels_are_class_numbers_in_a_tensor(data, labels, error, named):
    x, y = data
    with pytest.raises(error, match=named):
        TaskStream(x, labels(y), tasks=2, batch=4, seed=0)
    with pytest.raises(error, match=named):
        ReservoirMemory(5, seed=0).add(x, labels(y))
    with pytest.raises(error, match=named):
        evaluate(torch.nn.Linear(x.shape[1], 6), x, labels(y), [(0, 1)])


@pytest.mark.parametrize("tasks", [2.0, [0, 1], "01", None, [(0.5, 1)]])
def test_classes_come_in_groups(data, tasks):
    with pytest.raises(
        TypeError, match=r"in groups, such as \[\(0, 1\), \(2, 3\)\] or stream.classes, got"
    ):
        stream_of(data, tasks=tasks)
    assert (
        len(stream_of(data, tasks=np.int64(2)))
        == len(stream_of(data, tasks=torch.tensor([[0, 1], [2, 3]])))
        == 2
    )


def test_what_is_easily_mixed_up_is_refused(data):
    model, stream = torch.nn.Linear(data[0].shape[1], 6), stream_of(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong, named in (
        ((stream[0], ExperienceReplay(), None), r"a list of tasks: \[task\]"),
        ((stream, ExperienceReplay, None), "an objective is an object"),
        ((stream, ExperienceReplay(), 100), "a memory has add and sample, .* got 100"),
    ):
        with pytest.raises(TypeError, match=named):
            train_on_stream(model, *wrong, optimizer)
    before = weights(model)
    for objective in (DER(0.5), DERpp(0.5, 1.0)):
        with pytest.raises(
            ValueError, match=rf"{type(objective).__name__} compares with logits .* give a memory"
        ):
            train_on_stream(model, stream, objective, None, optimizer)
    assert same(weights(model), before)


def test_streams_and_tasks_print_as_one_short_line(data):
    stream = stream_of(data, tasks=[(0, 1), (2, 3)], per_class=5, batch=4)
    assert repr(stream) == "TaskStream(tasks=2, classes=4, samples=20, batch=4)"
    assert (
        repr(stream[1]) == "Task(number=1, classes=(2, 3), seen=(0, 1, 2, 3), samples=10, batch=4)"
    )
