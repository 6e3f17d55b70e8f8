"""Replay memories keep a fair sample, which is a matter of the seed and the rows alone, and resume
bit for bit.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import grapnet as gn
from grapnet.continual import BalancedMemory, Batch, ReservoirMemory

MEMORIES = [ReservoirMemory, BalancedMemory]


def rows(n: int, classes: int = 4, first: int = 0) -> tuple[Tensor, Tensor]:
    """Rows that are their own number, of classes in turns."""
    x = torch.arange(first, first + n)
    return x.float().unsqueeze(1), x % classes


def stored(memory: ReservoirMemory) -> list[float]:
    return [] if memory.content is None else memory.content.x.view(-1).tolist()


def equal(a: Batch, b: Batch) -> bool:
    pairs = zip(a, b, strict=True)
    return all(
        p is q if p is None or q is None else torch.equal(p, q) and p.dtype == q.dtype
        for p, q in pairs
    )


def algorithm_r(chances: list[float], capacity: int) -> list[int]:
    """Vitter's algorithm, word by word."""
    kept: list[int] = []
    for n, chance in enumerate(chances):
        if n < capacity:
            kept.append(n)
        elif (place := int(chance * (n + 1))) < capacity:
            kept[place] = n
    return kept


def test_the_reservoir_is_algorithm_r_on_the_draws_of_its_generator():
    memory = ReservoirMemory(5, seed=3)
    before = memory.state_dict()["storing"]
    memory.add(*rows(40))
    draws = torch.rand(
        40, dtype=torch.float64, generator=torch.Generator().set_state(before)
    ).tolist()
    assert stored(memory) == algorithm_r(draws, 5)


def test_within_a_class_the_balanced_memory_keeps_every_row_with_the_same_chance():
    # class 0 comes first and fills the memory, gives way to class 1, and goes on in the end
    times = 600
    found = Counter[int]()
    for seed in range(times):
        memory = BalancedMemory(8, seed=seed)
        memory.add(
            torch.arange(60).float().unsqueeze(1), torch.tensor([0] * 20 + [1] * 20 + [0] * 20)
        )
        assert memory.counts == {0: 4, 1: 4}
        found.update(int(row) for row in stored(memory))
    for members in ([*range(20), *range(40, 60)], range(20, 40)):
        share = 4 / len(members)
        n = len(members)
        square = sum(
            (found[row] - times * share) ** 2 / (times * share * (1 - share)) for row in members
        )
        assert 0.001 < stats.chi2.sf(square * (n - 1) / n, n - 1) < 0.999


def test_counts_of_a_full_balanced_memory_differ_by_at_most_one():
    labels = [c for c in range(5) for _ in range(60)]
    memory = BalancedMemory(23, seed=0)
    for batch in torch.tensor(labels).split(10):
        memory.add(torch.zeros(len(batch), 1), batch)
        share = -(-23 // (int(batch.max()) + 1))
        if all(labels[: memory.offered].count(c) >= share for c in range(int(batch.max()) + 1)):
            assert max(memory.counts.values()) - min(memory.counts.values()) <= 1
    assert sorted(memory.counts.values()) == [4, 4, 5, 5, 5]
    balanced = BalancedMemory(23, seed=0)
    balanced.add(torch.zeros(300, 1), torch.tensor([0] * 280 + [1] * 20))
    assert sorted(balanced.counts.values()) == [11, 12]


@pytest.mark.parametrize("kind", MEMORIES)
def test_what_is_stored_depends_on_the_rows_and_the_seed_alone(kind: Any):
    once = kind(9, seed=1)
    cut = kind(9, seed=1)
    other = kind(9, seed=2)
    x, y = rows(200)
    once.add(x, y)
    other.add(x, y)
    draw = random.Random(0)
    start = 0
    while start < 200:
        size = draw.choice([1, 2, 17, 33])
        cut.add(x[start : start + size], y[start : start + size], None)
        cut.sample(draw.choice([1, 5]))  # takes no draw from storing
        torch.rand(3)  # nor does the global generator matter
        start += size
    assert stored(once) == stored(cut)
    assert stored(once) != stored(other)
    assert once.offered == cut.offered == 200


@pytest.mark.parametrize("kind", MEMORIES)
def test_rows_keep_their_parts_together(kind: Any):
    memory = kind(20, seed=0)
    for first in range(0, 300, 50):
        x, y = rows(50, first=first)
        memory.add(x, y, torch.cat([x, -x], 1))
    for batch in (memory.content, memory.sample(8)):
        assert torch.equal(batch.x.view(-1).long() % 4, batch.y)
        assert torch.equal(batch.logits, torch.cat([batch.x, -batch.x], 1))
    assert memory.counts == dict(sorted(Counter(memory.content.y.tolist()).items()))


@pytest.mark.parametrize("kind", MEMORIES)
def test_samples_are_different_rows_and_cover_the_memory(kind: Any):
    memory = kind(12, seed=0)
    assert memory.sample(4) is None
    memory.add(*rows(3))
    assert sorted(memory.sample(8).x.view(-1).tolist()) == [0, 1, 2]  # all there are
    memory.add(*rows(60, first=3))
    found = Counter()
    for _ in range(600):
        batch = memory.sample(4).x.view(-1).tolist()
        assert len(set(batch)) == 4
        found.update(batch)
    assert set(found) == set(stored(memory))
    square = sum((found[row] - 200) ** 2 / (200 * 2 / 3) for row in found) * 11 / 12
    assert 0.001 < stats.chi2.sf(square, 11) < 0.999


@pytest.mark.parametrize("kind", MEMORIES)
def test_stored_rows_are_copies_without_a_graph(kind: Any):
    memory = kind(4, seed=0)
    x = torch.ones(2, 3, requires_grad=True)
    logits = 2 * x
    memory.add(x, torch.tensor([0, 1]), logits)
    with torch.no_grad():
        x.zero_()
    assert (memory.content.x == 1).all()
    assert not memory.sample(2).x.requires_grad
    assert not memory.sample(2).logits.requires_grad


def test_numbers_and_bytes_are_those_of_the_rows_that_are_there():
    memory = ReservoirMemory(500, seed=0)
    assert (memory.numbers, memory.bytes, len(memory)) == (0, 0, 0)
    memory.add(torch.zeros(10, 49), torch.zeros(10, dtype=torch.long))
    assert (memory.numbers, memory.bytes) == (490, 10 * (49 * 4 + 8))
    memory.add(torch.zeros(990, 49), torch.zeros(990, dtype=torch.long))
    assert (memory.numbers, memory.bytes) == (24_500, 500 * (49 * 4 + 8))
    bytewise = ReservoirMemory(500, seed=0)
    bytewise.add(
        torch.zeros(600, 7, 7, dtype=torch.uint8),
        torch.zeros(600, dtype=torch.uint8),
        torch.zeros(600, 10),
    )
    assert (bytewise.numbers, bytewise.bytes) == (24_500 + 5_000, 500 * (49 + 1 + 40))
    assert bytewise.sample(3).x.dtype == torch.uint8


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("n", [0, 5, 80])
def test_a_memory_that_loads_a_state_goes_on_bit_for_bit(kind: Any, n: int, tmp_path: Path):
    memory = kind(9, seed=1)
    again = kind(9, seed=77)
    again.add(*rows(30, first=500), torch.zeros(30, 2))
    if n:
        memory.add(*rows(n), torch.randn(n, 6))
        memory.sample(3)
    net = gn.GrapNet([1, 2, 4])
    gn.save(tmp_path / "net.gn", net, memory=memory)
    gn.restore(tmp_path / "net.gn", memory=again)
    assert (len(again), again.offered, again.numbers, again.bytes) == (
        len(memory),
        n,
        memory.numbers,
        memory.bytes,
    )
    for m in (memory, again):
        m.add(*rows(40, first=n), torch.ones(40, 6))
    assert equal(memory.content, again.content)
    assert all(equal(memory.sample(4), again.sample(4)) for _ in range(3))
    assert not equal(memory.sample(4), memory.sample(4))


def test_a_state_is_a_copy():
    memory = ReservoirMemory(3, seed=0)
    memory.add(*rows(3))
    state = memory.state_dict()
    memory.add(*rows(90, first=3))
    assert state["content"]["x"].view(-1).tolist() == [0, 1, 2]
    memory.load_state_dict(state)
    memory.add(*rows(90, first=3))
    assert state["content"]["x"].view(-1).tolist() == [0, 1, 2]


def test_a_state_of_another_capacity_is_refused_and_changes_nothing():
    memory = BalancedMemory(9, seed=0)
    memory.add(*rows(20))
    before = memory.state_dict()
    with pytest.raises(ValueError, match="capacity 10"):
        memory.load_state_dict(BalancedMemory(10, seed=5).state_dict())
    after = memory.state_dict()
    assert all(torch.equal(before["content"][k], after["content"][k]) for k in before["content"])
    assert torch.equal(before["storing"], after["storing"])
    assert before["offered"] == after["offered"]


@pytest.mark.parametrize(
    ("x", "y", "logits", "named"),
    [
        (torch.zeros(3, 1), torch.zeros(2).long(), None, r"\[2\]"),
        (torch.zeros(3, 2), torch.zeros(3).long(), None, r"x \[2\]"),
        (torch.zeros(3, 1), torch.zeros(3).long(), torch.zeros(3, 4), r"logits \[4\]"),
        (torch.zeros(3, 1), torch.zeros(3).long(), torch.zeros(2, 4), r"\[2, 4\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_drawn(
    x: Tensor, y: Tensor, logits: Any, named: str
):
    memory = ReservoirMemory(5, seed=0)
    untouched = ReservoirMemory(5, seed=0)
    for m in (memory, untouched):
        m.add(*rows(9))
    with pytest.raises(ValueError, match=named):
        memory.add(x, y, logits)
    for m in (memory, untouched):
        m.add(*rows(30))
    assert stored(memory) == stored(untouched)
