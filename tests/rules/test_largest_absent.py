"""The search for absent relations with the largest gradients, against sorting them all."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.core._errors import GrapNetError
from grapnet.execution import native
from grapnet.rules import Moment, Rewire, absent, gradients
from grapnet.rules.gradients import GradientRecorder

from .patchy import F64, armed, batch, patchy_net, related, run


@pytest.fixture
def net() -> gn.GrapNet:
    return patchy_net()


def brute_force(
    matrix: Tensor, free: Tensor, count: int | None = None, per_child: Tensor | None = None
) -> list[tuple[int, int]]:
    """Rows of the largest, by sorting everything: decreasing size, then parent, then child."""
    pairs = [(-float(matrix[p, c].abs()), p, c) for p, c in free.nonzero().tolist()]
    chosen, taken = [], torch.zeros(free.shape[1], dtype=torch.int64)
    for _, p, c in sorted(pairs):
        if per_child is None or taken[c] < per_child[c]:
            taken[c] += 1
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
    net = gn.GrapNet([23, 17], density=0.4, dtype=F64)
    recorder, generator = armed(GradientRecorder(0), net), torch.Generator().manual_seed(2)
    x, y = (
        torch.randn(5, 23, dtype=F64, generator=generator),
        torch.randn(5, 17, dtype=F64, generator=generator),
    )
    if request.param != "distinct":
        x, y = x[:1].round(), y[:1].round()
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
    matrix, free = recorder.matrix(), ~related(net, 0)
    found = recorder.largest_absent(count)
    assert rows_of(net, found) == brute_force(matrix, free, count)
    assert torch.allclose(
        found[2],
        matrix.abs()[[p for p, _ in rows_of(net, found)], [c for _, c in rows_of(net, found)]],
    )
    cut = net.layers[0].outgoing()[::2]
    free[net.layers[0].rows(cut.parents).long(), net.layers[1].rows(cut.children).long()] = True
    assert rows_of(net, recorder.largest_absent(count, exclude=cut)) == brute_force(
        matrix, free, count
    )


@pytest.mark.parametrize(
    "missing",
    [pytest.param("", marks=pytest.mark.sparse), "the compiled kernels are not installed"],
)
@pytest.mark.parametrize("quota", ["some", "none", "all"])
def test_the_largest_absent_of_every_child_are_found(
    graded: tuple[gn.GrapNet, GradientRecorder],
    quota: str,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "missing", missing)
    net, recorder = graded
    matrix, free = recorder.matrix(), ~related(net, 0)
    some = torch.randint(0, 12, (17,), generator=torch.Generator().manual_seed(0))
    quotas = {"some": some, "none": some * 0, "all": some * 0 + 100}[quota]
    assert rows_of(net, recorder.largest_absent(per_child=quotas)) == brute_force(
        matrix, free, None, quotas
    )
    assert rows_of(net, recorder.largest_absent(9, per_child=quotas)) == brute_force(
        matrix, free, 9, quotas
    )
    cut = net.layers[0].outgoing()[1::3]
    free[net.layers[0].rows(cut.parents).long(), net.layers[1].rows(cut.children).long()] = True
    found = recorder.largest_absent(per_child=quotas, exclude=cut)
    assert rows_of(net, found) == brute_force(matrix, free, None, quotas)


def test_the_search_can_be_limited_to_candidates(
    graded: tuple[gn.GrapNet, GradientRecorder],
) -> None:
    net, recorder = graded
    generator = torch.Generator().manual_seed(5)
    # some twice, some present
    rows = [torch.randint(0, n, (150,), generator=generator) for n in (23, 17)]
    uids = net.layers[0].uid[rows[0]], net.layers[1].uid[rows[1]]
    matrix, free = recorder.matrix(), torch.zeros(23, 17, dtype=torch.bool)
    free[rows[0], rows[1]] = True
    free &= ~related(net, 0)
    quotas = torch.randint(0, 6, (17,), generator=generator)
    for count in (0, 5, 30, 1000):
        assert rows_of(net, recorder.largest_absent(count, candidates=uids)) == brute_force(
            matrix, free, count
        )
    found = recorder.largest_absent(per_child=quotas, candidates=uids)
    assert rows_of(net, found) == brute_force(matrix, free, None, quotas)
    assert len(recorder.largest_absent(3, candidates=(uids[0][:0], uids[1][:0]))[0]) == 0
    present = net.layers[0].outgoing()
    assert len(recorder.largest_absent(3, candidates=(present.parents, present.children))[0]) == 0
    again = recorder.largest_absent(
        3, candidates=(present.parents, present.children), exclude=present
    )
    assert rows_of(net, again) == brute_force(matrix, related(net, 0), 3)


@pytest.mark.sparse
@pytest.mark.parametrize("rounded", [False, True])
def test_relations_are_exchanged_alike_without_the_kernels(
    rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wirings = []
    for missing in ("", "the compiled kernels are not installed"):
        torch.manual_seed(3)
        net = gn.GrapNet([23, 17, 9], density=0.4)
        if rounded:
            relations = net.layers[0].outgoing()
            relations.weights = (relations.weights.detach() * 4).round() / 4
        rule = Rewire(grow="gradient", fan_in="constant", fraction=0.4)
        evidence = rule.recorders(net)
        for recorder in evidence.values():
            recorder.arm(net)
        net(torch.randn(1 if rounded else 5, 23)).square().sum().backward()
        monkeypatch.setattr(native, "missing", missing)
        before = related(net, 0)
        with net.edit() as edit:
            rule(net, edit, Moment(evidence=evidence))
        monkeypatch.undo()
        wirings.append(related(net, 0))
        assert torch.equal(wirings[-1].sum(0), before.sum(0))
        assert not torch.equal(wirings[-1], before)
    assert torch.equal(*wirings)


def test_what_is_found_can_be_connected(net: gn.GrapNet) -> None:
    recorder = armed(GradientRecorder(1), net)
    run(net)
    parents, children, sizes = recorder.largest_absent(10)
    assert (sizes.diff() <= 0).all()
    with net.edit() as edit:
        edit.connect(parents, children, pairs="aligned", weights="zero")
    assert torch.equal(recorder.of(parents, children).abs(), sizes)
    assert not set(zip(parents.tolist(), children.tolist(), strict=True)) & {
        (p, c)
        for p, c, _ in zip(*(part.tolist() for part in recorder.largest_absent(99)), strict=True)
    }


def test_full_and_empty_transitions(net: gn.GrapNet) -> None:
    full = gn.GrapNet([4, 3], dtype=F64)
    recorder = armed(GradientRecorder(0), full)
    full(torch.ones(2, 4, dtype=F64)).sum().backward()
    assert [len(part) for part in recorder.largest_absent(5)] == [0, 0, 0]
    assert [len(part) for part in recorder.largest_absent(per_child=torch.ones(3).long())] == [
        0,
        0,
        0,
    ]
    assert len(recorder.largest_absent(5, exclude=full.layers[0].outgoing()[:2])[0]) == 2
    hollow = gn.GrapNet([4, 0, 3], dtype=F64)
    recorder = armed(GradientRecorder(1), hollow)
    hollow(torch.ones(2, 4, dtype=F64)).sum().backward()
    assert recorder.matrix().shape == (0, 3)
    assert [len(part) for part in recorder.largest_absent(5)] == [0, 0, 0]
    assert [len(part) for part in recorder.largest_absent(per_child=torch.ones(3).long())] == [
        0,
        0,
        0,
    ]


def test_wrong_questions_are_named(net: gn.GrapNet) -> None:
    recorder = armed(GradientRecorder(0), net)
    run(net)
    with pytest.raises(ValueError, match="count="):
        recorder.largest_absent()
    with pytest.raises(ValueError, match="negative"):
        recorder.largest_absent(-1)
    for quotas in (torch.ones(8).long(), torch.ones(9), -torch.ones(9).long()):
        with pytest.raises(ValueError, match="9 children"):
            recorder.largest_absent(per_child=quotas)
    with pytest.raises(ValueError, match="aligned"):
        recorder.of([0, 1], [6])
    with pytest.raises(ValueError, match="layer 0 to layer 1"):
        recorder.of_relations(net.layers[1].outgoing())
    twin = copy.deepcopy(net)
    with pytest.raises(ValueError, match="another net"):
        recorder.of_relations(twin.layers[0].outgoing())
    with pytest.raises(GrapNetError, match=r"54 cells \(limit 53\)"):
        recorder.matrix(most_cells=53)
    recorder.clear()
    (net(batch()).sum() * float("nan")).backward()
    with pytest.raises(GrapNetError, match="not finite"):
        recorder.largest_absent(3)


def test_a_large_transition_is_searched_without_the_rectangle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([150, 1000], density=0.1)
    recorder, largest = armed(GradientRecorder(0), net), 0
    net(torch.randn(16, 150)).square().sum().backward()
    free, matrix = ~related(net, 0), recorder.matrix()
    by_parent = absent.Absent.by_parent

    def measured(self: absent.Absent, cells: int) -> Any:
        nonlocal largest
        for offset, chunk in by_parent(self, cells):
            largest = max(largest, chunk.numel())
            yield offset, chunk

    monkeypatch.setattr(absent.Absent, "by_parent", measured)
    monkeypatch.setattr(gradients, "CELLS", 10_000)
    _, _, sizes = recorder.largest_absent(9_000)
    assert 0 < largest <= 10_000
    assert torch.allclose(sizes, matrix.abs()[free].sort(descending=True).values[:9_000])
