"""The search for absent relations with the largest gradients, against sorting them all."""

from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.core._errors import GrapNetError
from grapnet.execution import _native
from grapnet.rules import GradientRecorder
from grapnet.rules import _gradients as gradients

from .watched import armed, related, run, small_net


def brute_force(
    matrix: Tensor,
    free: Tensor,
    count: int | None = None,
    quotas: Tensor | None = None,
    end: int = 1,
) -> list[tuple[int, int]]:
    """Rows of the largest, by sorting everything: decreasing size, then parent, then child; no more
    of a child (end 1) or parent (end 0) than its quota.
    """
    pairs = [(-float(matrix[p, c].abs()), p, c) for p, c in free.nonzero().tolist()]
    chosen = []
    taken = torch.zeros(free.shape[end], dtype=torch.int64)
    for _, p, c in sorted(pairs):
        node = (p, c)[end]
        if quotas is None or taken[node] < quotas[node]:
            taken[node] += 1
            chosen.append((p, c))
    return chosen[:count]


def rows_of(
    net: gn.GrapNet, found: tuple[Tensor, Tensor, Tensor], t: int = 0
) -> list[tuple[int, int]]:
    rows = net.layers[t].rows(found[0]).tolist(), net.layers[t + 1].rows(found[1]).tolist()
    return list(zip(*rows, strict=True))


@pytest.fixture(params=["distinct", "ties", "zeros"])
def graded(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[gn.GrapNet, GradientRecorder]:
    """A net with gradients that differ, that are often equal, or that are mostly 0; searched in
    small chunks.
    """
    torch.manual_seed(1)
    net = gn.GrapNet([23, 17], density=0.4, dtype=torch.float64)
    recorder = armed(GradientRecorder(0), net)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 23, dtype=torch.float64, generator=generator)
    y = torch.randn(5, 17, dtype=torch.float64, generator=generator)
    if request.param != "distinct":
        x = x[:1].round()
        y = y[:1].round()
    if request.param == "zeros":
        x[:, 3:] = 0
    (net(x) * y).sum().backward()
    monkeypatch.setattr(gradients, "CELLS", 60)
    return net, recorder


@pytest.mark.parametrize("count", [0, 1, 7, 60, 10_000])
def test_the_largest_absent_are_found(
    graded: tuple[gn.GrapNet, GradientRecorder], count: int
) -> None:
    net, recorder = graded
    matrix = recorder.matrix()
    free = ~related(net, 0)
    found = recorder.largest_absent(count)
    assert rows_of(net, found) == brute_force(matrix, free, count)
    assert torch.allclose(
        found[2],
        matrix.abs()[[p for p, _ in rows_of(net, found)], [c for _, c in rows_of(net, found)]],
    )


@pytest.mark.parametrize(
    "missing",
    [pytest.param("", marks=pytest.mark.sparse), "the compiled kernels are not installed"],
)
@pytest.mark.parametrize("quota", ["some", "none", "all"])
@pytest.mark.parametrize("end", ["child", "parent"])
def test_the_largest_absent_of_every_node_are_found(
    graded: tuple[gn.GrapNet, GradientRecorder],
    end: str,
    quota: str,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_native, "missing", missing)
    net, recorder = graded
    matrix = recorder.matrix()
    free = ~related(net, 0)
    number = ["parent", "child"].index(end)
    some = torch.randint(0, 12, (net.sizes[number],), generator=torch.Generator().manual_seed(0))
    quotas = {"some": some, "none": some * 0, "all": some * 0 + 100}[quota]
    wanted: dict[str, Any] = {f"per_{end}": quotas}
    for count in (None, 9):
        found = rows_of(net, recorder.largest_absent(count, **wanted))
        assert found == brute_force(matrix, free, count, quotas, number)
    # unranked: by parent, then by child
    found = rows_of(net, recorder.largest_absent(ranked=False, **wanted))
    assert found == sorted(brute_force(matrix, free, None, quotas, number))


@pytest.mark.parametrize("sizes", [[4, 3], [4, 0, 3]])
def test_full_and_empty_transitions(sizes: list[int]) -> None:
    full = gn.GrapNet(sizes, dtype=torch.float64)
    recorder = armed(GradientRecorder(len(sizes) - 2), full)
    full(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert recorder.matrix().shape == (sizes[-2], 3)
    ones = torch.ones(sizes[-2]).long()
    for wanted in ({"count": 5}, {"per_child": torch.ones(3).long()}, {"per_parent": ones}):
        assert [len(part) for part in recorder.largest_absent(**wanted)] == [0, 0, 0]


def test_what_cannot_be_answered_is_refused() -> None:
    net = small_net((6, 9, 8, 3), density=0.6)
    recorder = armed(GradientRecorder(0), net)
    run(net)
    with pytest.raises(ValueError, match="count"):
        recorder.largest_absent()
    with pytest.raises(GrapNetError, match="54 cells"):
        recorder.matrix(most_cells=53)


def test_a_large_transition_is_searched_without_the_rectangle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([150, 1000], density=0.1)
    recorder = armed(GradientRecorder(0), net)
    largest = 0
    net(torch.randn(16, 150)).square().sum().backward()
    free = ~related(net, 0)
    matrix = recorder.matrix()
    by_parent = gradients.Absent.by_parent

    def measured(self: gradients.Absent) -> Any:
        nonlocal largest
        for offset, chunk, absent in by_parent(self):
            largest = max(largest, chunk.numel())
            yield offset, chunk, absent

    monkeypatch.setattr(gradients.Absent, "by_parent", measured)
    monkeypatch.setattr(gradients, "CELLS", 10_000)
    _, _, sizes = recorder.largest_absent(9_000)
    assert 0 < largest <= 10_000
    assert torch.allclose(sizes, matrix.abs()[free].sort(descending=True).values[:9_000])
