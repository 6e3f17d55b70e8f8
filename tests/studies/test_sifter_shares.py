"""The study of shares: cuts are of the same size whatever scores them, repair and refits are of the
same cuts, and misses are named.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

import grapnet as gn
from studies import sifter, sifter_shares, tabular
from studies.sifter_shares import FAST, ROWS, missed, summarise
from studies.statistics import paired, paired_splits


def made_up_net() -> tuple[gn.GrapNet, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(120, 13, generator=generator)
    layout = tabular.Layout("load_wine", 3, 10)
    return tabular.family_net(layout, (x, torch.arange(120) % 3), 5), x


def test_a_fast_run_has_every_row_at_every_share(result):
    for name in sifter_shares.SETS:
        one = result["summary"]["sets"][name]
        assert list(one["edited"]) == list(ROWS)
        assert {len(means) for means in one["edited"].values()} == {len(FAST.shares)}
        assert {len(means) for means in one["after"].values()} == {len(FAST.trained)}
        # more leaves where more is to be cut
        assert one["left"][1] < one["left"][0] < 1


def test_repair_loses_less_than_the_same_cut_without_it(result):
    one = result["summary"]["sets"]["Wine"]["edited"]
    for score in sifter_shares.SCORES:
        assert one[f"{score} + repair"][1][0] > one[score][1][0]


@pytest.mark.parametrize("score", ["random", "weight"])
def test_other_scores_cut_as_many_relations_and_other_ones(score):
    left = []
    for name in ("covariance", score):
        net, x = made_up_net()
        rule = sifter_shares._rule(name, 0.4)
        sifter.sift(rule, x, seed=0)(net, torch.optim.SGD(net.parameters()))
        assert net.sizes == [13, 30, 18, 18, 3]
        left.append(net.layers[2].uids.tolist())
    assert left[0] != left[1]


def test_magnitudes_cut_the_children_with_the_smallest_weights():
    net, x = made_up_net()
    weights = net.transitions[1].topology.parents().long(), net.transitions[1].child.long()
    dense = torch.zeros(30, 30)
    dense[weights] = net.transitions[1].weight.detach().squeeze(1).abs()
    # [family, child of it]
    means = torch.stack(
        [dense[10 * f : 10 * f + 10, 10 * f : 10 * f + 10].mean(0) for f in range(3)]
    )
    kept = means.topk(6, dim=1).indices.sort(1).values + 10 * torch.arange(3)[:, None]
    uids = net.layers[2].uids[kept.flatten()]
    sifter.sift(sifter_shares._rule("weight", 0.4), x, seed=0)(
        net, torch.optim.SGD(net.parameters())
    )
    assert torch.equal(net.layers[2].uids, uids)


@pytest.mark.parametrize("score", sifter_shares.SCORES)
def test_repair_is_of_the_same_cuts_and_keeps_more_of_the_outputs(score):
    net, x = made_up_net()
    before = net(x).detach()
    cut = sifter_shares._rule(score, 0.4)
    errors = []
    uids = []
    for rule in (cut, sifter_shares.Repaired(cut)):
        other, _ = made_up_net()
        sifter.sift(rule, x, seed=3)(other, torch.optim.SGD(other.parameters()))
        errors.append(float((other(x).detach() - before).square().sum()))
        uids.append(torch.cat([layer.uids for layer in other.layers]))
    assert torch.equal(*uids)
    assert errors[1] < 0.5 * errors[0]


def test_a_refit_is_of_the_same_cuts_and_keeps_more_of_the_outputs_than_repair():
    one, x = made_up_net()
    plan = sifter_shares.Plan((x, torch.arange(120) % 3), (x, torch.arange(120) % 3), 32, 0.01, 3)
    found = sifter_shares._curves(replace(FAST, shares=(0.8,)), one, plan, before=0, after=0)
    # All rows are of cuts of one size.
    assert len(found["relations_left"]) == 1
    errors = []
    for mended in ("", sifter_shares.REPAIRED, sifter_shares.REFITTED):
        net, _ = made_up_net()
        original = copy.deepcopy(net)
        sifter_shares.cut(net, "covariance" + mended, 0.8, x, seed=3)
        errors.append(float((net(x) - original(x)).detach().square().sum()))
    assert errors[2] < errors[1] < errors[0]


def test_the_corrected_test_is_the_plain_one_where_no_rows_are_shared():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(12, generator=generator).tolist()
    b = torch.randn(12, generator=generator).tolist()
    assert paired_splits(a, b, test=0.0) == pytest.approx(paired(a, b))
    wider = paired_splits(a, b, test=0.3)
    differences = torch.tensor(a).double() - torch.tensor(b).double()
    error = float(differences.std()) * (1 / 12 + 0.3 / 0.7) ** 0.5
    expected = 2 * stats.t.sf(abs(float(differences.mean())) / error, 11)
    assert wider.p == pytest.approx(expected, rel=1e-5)
    assert wider.high - wider.low > paired(a, b).high - paired(a, b).low


def test_significance_counts_from_the_share_after_which_it_holds_to_the_end():
    shares = (0.1, 0.5, 0.9)
    good = {"mean": 1.0, "p": 0.001, "corrected_p": 0.02}
    bad = {"mean": 1.0, "p": 0.02}
    behind = {"mean": -1.0, "p": 0.001}

    def start(shares, right, p="p"):
        return sifter_shares._significant_from(shares, right, p)

    assert start(shares, [good, good, good]) == 0.1
    assert start(shares, [good, good, good], "corrected_p") is None
    assert start(shares, [good, bad, good]) == 0.9
    assert start(shares, [good, good, bad]) is None
    assert start(shares, [behind, good, good]) == 0.5


def test_each_missed_bar_is_named(result):
    worse = copy.deepcopy(result)
    for name in sifter_shares.REACHED:
        for one in worse["summary"]["sets"][name]["contrasts"].values():
            one["from"] = 0.9
    assert missed(worse) == []
    worse["summary"]["sets"]["Wine"]["contrasts"]["random + refit − random"]["from"] = 0.95
    (line,) = missed(worse)
    assert line.startswith("Wine")


def test_the_summary_is_that_of_the_seeds(result):
    again = json.loads(json.dumps(summarise(FAST, result["seeds"])))
    assert again == result["summary"]


def test_the_picture_is_drawn(result, tmp_path: Path):
    sifter_shares.plot(result, tmp_path / "shares.png")
    assert (tmp_path / "shares.png").stat().st_size > 1000
