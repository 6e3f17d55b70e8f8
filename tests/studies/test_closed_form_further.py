"""The study of further heads runs; sifting keeps the survivors' sums, and takes what the readout
needs least.
"""

import copy

import pytest
import torch

from grapnet.continual import Batch, ClosedFormReadout, GramStatistics, linear_discriminant
from studies.closed_form_further import AT_RANDOM, FAST, ROWS, SIFTED, WAYS, missed
from studies.data import small_images
from studies.further_heads import (
    EstimatedPast,
    compressed,
    differences,
    half_learned,
    quadratic_discriminant,
    remove,
    replace,
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


def test_survivors_carry_over_what_they_would_have_without_the_nodes_that_were_sifted_out(
    readout, samples
):
    rows, net = torch.tensor([1, 4, 5, 11]), readout.net
    before = readout.statistics.gram()
    remove(net, rows)
    readout.update(samples.x[1::2], samples.y[1::2])
    never = ClosedFormReadout(net)
    never.update(samples.x, samples.y)
    for ours, theirs in (
        (readout.statistics.gram(), never.statistics.gram()),
        (readout.statistics.cross(), never.statistics.cross()),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-8)
    # the nodes that stay are not the first ones
    assert not torch.allclose(before[:9, :9], readout.statistics.gram())
    assert readout.statistics.lacking is None
    assert torch.allclose(readout.solve().weight, never.solve().weight, atol=1e-8)


def test_the_nodes_that_go_are_those_whose_removal_makes_the_loss_grow_least(readout):
    gram, cross, left = readout.statistics.gram(), readout.statistics.cross(), list(range(13))
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


def test_a_window_is_a_square_of_the_picture(samples):
    net = windows(HEAD, samples, 0, width=3)
    assert len(net.layers[1].incoming()) == 9 * HEAD.nodes
    rows = [net.layers[1][3].parents[k].uid for k in range(9)]
    corner = min(rows)
    assert sorted(rows) == [corner + 7 * down + right for down in range(3) for right in range(3)]


def test_the_past_fitted_by_survivors_is_exact_for_a_node_that_equals_one(readout, samples):
    """A grown node that says what a survivor says has missed exactly the survivor's sums; silence
    denies it.
    """
    net = readout.net
    relations = net.layers[1][7].incoming()
    weights, bias = (
        relations.weights.detach()[:, None].clone(),
        net.layers[1].biases[7:8].detach().clone(),
    )
    stored, sums = Batch(samples.x[:40], samples.y[:40]), {}
    for way in ("silent", "survivors"):
        copied = copy.deepcopy(net)
        ours = ClosedFormReadout(copied, late_nodes="silent")
        ours.update(samples.x[::2], samples.y[::2])
        past = EstimatedPast(ours, way)
        replace(copied, torch.tensor([2]), weights, bias)
        past.replaced(torch.tensor([2]), stored)
        sums[way] = past.sums()
    gram, cross = sums["survivors"]
    # 7 before a node above it left
    torch.testing.assert_close(gram[11, :11], gram[6, :11], rtol=1e-2, atol=1.0)
    torch.testing.assert_close(cross[11], cross[6], rtol=1e-2, atol=1.0)
    assert float(gram[11, 11]) > 0.9 * float(gram[6, 6])
    assert sums["silent"][0][11].abs().sum() == 0
    assert float(torch.linalg.eigvalsh(gram).min()) > -1e-6  # still a sum of squares


def test_a_quadratic_discriminant_tells_classes_of_one_mean_apart_where_a_linear_one_cannot():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(400) % 2
    x = torch.randn(400, 3, generator=generator) * torch.where(y == 0, 0.3, 3.0)[:, None]
    apart, together = GramStatistics(3, 2, per_class=True), GramStatistics(3, 2)
    for sums in (apart, together):
        sums.add(x, y)
    right = [
        (logits(x).argmax(1) == y).double().mean()
        for logits in (quadratic_discriminant(apart), linear_discriminant(together))
    ]
    assert right[0] > 0.9 > 0.7 > right[1]


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
