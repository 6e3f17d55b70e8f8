"""The localization study cuts exactly what a task owns, sees what leaks elsewhere, and would name
what it missed.
"""

import copy
import json

import pytest
import torch

import grapnet as gn
from studies import localization
from studies.localization import FAST, ROWS, missed, summarise


def test_the_cut_takes_96_relations_from_storage_and_only_its_own_pair_loses(result):
    found = result["summary"]
    assert found["relations"] == [[49 * 240 + 5 * 96, 49 * 240 + 1440]]
    # references, coordinates, weights of a snapshot
    assert found["rows"]["owned"]["removed"] == [[96, 96, 96]]
    assert found["target_after"] == [[50.0, 50.0]]
    assert found["rows"]["owned"]["other_largest"] == 0
    # no logit of another pair either, but for rounding
    assert found["rows"]["owned"]["moved"] < 1e-4
    assert found["rows"]["owned"]["base"][0] > 75  # there was something to lose


def test_on_an_unbalanced_test_set_the_target_falls_to_the_share_of_one_class(result):
    after = result["summary"]["unbalanced_after"]
    assert len(after) > 1
    assert all(accuracy == share for accuracy, share in after)
    assert 50.0 not in [accuracy for accuracy, _ in after]
    # an odd class has about a quarter of the images of its partner
    assert all(min(abs(share - 80), abs(share - 20)) < 5 for _, share in after)


def test_the_shares_are_those_of_the_test_set_and_the_larger_bias():
    torch.manual_seed(0)
    net = gn.GrapNet([3, 4, 10])
    with torch.no_grad():
        net.layers[-1].biases = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 1, 1, 0])
    y = torch.arange(10).repeat_interleave(torch.arange(1, 11))
    found = localization._shares(net, (torch.zeros(len(y), 3), y))
    assert found == pytest.approx([100 / 3, 400 / 7, 500 / 11, 800 / 15, 900 / 19])


def test_the_controls_cut_as_much_and_do_not_isolate(result):
    rows = result["summary"]["rows"]
    assert (
        rows["random"]["removed"]
        == rows["grown_pair"]["removed"]
        == rows["grown_random"]["removed"]
        == [[96] * 3]
    )
    assert rows["grown_owned"]["removed"] == [[96 * n] * 3 for n in (1, 2, 3, 4, 5)]
    assert rows["random"]["other_largest"] > 0  # so a change of another pair would be seen
    assert rows["random"]["moved"] > 0.01
    assert rows["random"]["margin"][0] < rows["owned"]["margin"][0]
    leak = rows["grown_pair"]["after_by_task"]
    assert leak[4] == 50  # only the last task's nodes speak for the last pair
    assert max(leak[:4]) > 60
    assert rows["grown_owned"]["other_largest"] > 0


def test_undo_restores_every_head_and_a_seed_gives_the_same_numbers_again(result):
    cuts = [cut for numbers in result["seeds"].values() for cut in numbers["cuts"].values()]
    assert len(cuts) == 2 * len(ROWS)
    assert all(cut["restored"] == [True] * 5 for cut in cuts)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again = localization.one_seed(FAST, 21)
    finally:
        torch.set_num_threads(before)
    assert json.loads(json.dumps(again)) == result["seeds"]["21"]


@pytest.mark.parametrize(
    ("cut", "figure", "value", "named"),
    [
        ("owned", "removed", [95, 96, 96], "removed"),
        ("owned", "removed", [96, 96, 0], "removed"),
        ("random", "removed", [80, 80, 80], "control"),
        ("owned", "restored", False, "undo"),
        ("grown_pair", "restored", False, "undo"),
        ("owned", "after", [50.05, 90.0, 90.0, 90.0, 90.0], "target"),
    ],
)
def test_each_missed_bar_is_named(result, cut, figure, value, named):
    assert missed(result) == []
    worse = copy.deepcopy(result)
    worse["seeds"]["21"]["cuts"][cut][figure][0] = value
    worse["summary"] = json.loads(json.dumps(summarise(FAST, worse["seeds"])))
    (line,) = missed(worse)
    assert line.startswith(named)


def test_a_target_that_misses_its_share_on_the_unbalanced_set_is_named(result):
    worse = copy.deepcopy(result)
    worse["seeds"]["20"]["unbalanced"]["after"][2][2] += 0.05
    worse["summary"] = json.loads(json.dumps(summarise(FAST, worse["seeds"])))
    (line,) = missed(worse)
    assert line.startswith("unbalanced target")


def test_the_smallest_change_of_another_pair_is_a_miss(result):
    worse = copy.deepcopy(result)
    worse["seeds"]["20"]["cuts"]["owned"]["other_largest"] = 1e-9
    worse["summary"] = json.loads(json.dumps(summarise(FAST, worse["seeds"])))
    (line,) = missed(worse)
    assert line.startswith("other pairs")
