"""The study of further heads runs; sifting keeps the survivors' sums, and takes what the readout
needs least.
"""

import copy

import pytest
import torch

from grapnet.continual import Batch, ClosedFormReadout, GramStatistics
from studies.closed_form_further import AT_RANDOM, FAST, ROWS, SIFTED, WAYS, missed
from studies.data import small_images
from studies.further_heads import (
    compressed,
    differences,
    half_learned,
    weakest,
    windows,
)
from studies.stream_heads import Head, random_net

HEAD = Head("softplus", 12)


@pytest.fixture(scope="module")
def samples() -> Batch:
    (x, y), _ = small_images("made-up")
    return Batch(x.double(), y)


@pytest.fixture
def readout(samples) -> ClosedFormReadout:
    """A readout of twelve random nodes that has seen half of the samples."""
    found = ClosedFormReadout(random_net(49, HEAD, 0, spread=2 / 7).double(), late_nodes="silent")
    found.update(samples.x[::2], samples.y[::2])
    return found


@pytest.fixture
def reached(result) -> dict:
    """A result that looks like a full run in which sifting leads."""
    found = copy.deepcopy(result)
    for stream in ("few", "full"):
        for row in found["summary"][stream].values():
            row["seen_class"]["mean"] = 80.0
        found["summary"][stream][SIFTED]["seen_class"]["mean"] = 81.0
    return found


def loss(gram: torch.Tensor, cross: torch.Tensor, ridge: float) -> float:
    """The least ridge loss, up to what does not depend on the features."""
    system = gram.clone()
    system.diagonal()[:-1] += ridge
    return -float((cross * torch.linalg.solve(system, cross)).sum())


def test_a_fast_run_has_every_row_of_both_streams(result):
    for stream, head in zip(("few", "full"), FAST.head, strict=True):
        rows = result["summary"][stream]
        assert list(rows) == [head.name, *ROWS]
        assert all(0 < row["seen_class"]["mean"] <= 100 for row in rows.values())
        plain = next(iter(rows.values()))
        assert rows[SIFTED]["numbers"] == rows[AT_RANDOM]["numbers"] == plain["numbers"]
        assert plain["images"] == rows[SIFTED]["images"] == 0
        assert rows[WAYS["survivors"]]["images"] == FAST.memory
    sizes = [GramStatistics(start, 10).numbers for start in FAST.start]
    assert list(result["summary"]["at first"].values()) == sizes


def test_the_nodes_that_go_are_those_whose_removal_makes_the_loss_grow_least(readout):
    gram = readout.statistics.gram()
    cross = readout.statistics.cross()
    left = list(range(13))
    for _ in range(5):
        tried = {}
        for node in left[:-1]:
            rest = torch.tensor([other for other in left if other != node])
            tried[node] = loss(gram[rest][:, rest], cross[rest], 0.5)
        left.remove(min(tried, key=tried.__getitem__))
    gone = weakest(gram, cross, 0.5, 5, steps=5)
    assert gone.tolist() == sorted(set(range(12)) - set(left))
    assert weakest(gram, cross, 0.5, 0, steps=5).tolist() == []
    assert len(weakest(gram, cross, 0.5, 5, steps=2)) == 5
    assert readout.statistics.weakest(5, ridge=0.5, steps=5).tolist() == gone.tolist()


@pytest.mark.parametrize("draw", [windows, differences, half_learned, compressed])
def test_other_nodes_are_as_many_fixed_and_leave_sums_of_the_same_size(draw, samples):
    samples = Batch(samples.x.float(), samples.y)
    first = Batch(samples.x[samples.y < 2], samples.y[samples.y < 2])
    net, again, other = (draw(HEAD, first, seed) for seed in (0, 0, 1))
    assert net.sizes[-2:] == [HEAD.nodes, 10]
    assert bool(net.layers[-2].incoming().frozen.all())
    assert not bool(net.layers[-2].outgoing().frozen.any())
    assert torch.equal(net.layers[-2].incoming().weights, again.layers[-2].incoming().weights)
    assert (
        net.layers[-2].incoming().weights.tolist() != other.layers[-2].incoming().weights.tolist()
    )
    readout = ClosedFormReadout(net)
    readout.update(samples.x, samples.y)
    readout.solve()
    assert readout.statistics.numbers == GramStatistics(HEAD.nodes, 10).numbers
    assert (net(samples.x).argmax(1) == samples.y).double().mean() > 0.3


def test_what_is_missing_or_does_not_lead_is_named(reached):
    assert missed(reached) == []
    few, full = (reached["summary"][stream] for stream in ("few", "full"))
    few[AT_RANDOM]["seen_class"]["mean"] = 81.5
    full[next(iter(full))]["seen_class"]["mean"] = float("nan")
    del full[WAYS["silent"]]
    lines = missed(reached)
    assert [line.split(":")[0] for line in lines] == ["few", "full", "full"]
    assert "no row" in lines[1]
    assert "81.00" in lines[0]
    assert "81.50" in lines[0]
