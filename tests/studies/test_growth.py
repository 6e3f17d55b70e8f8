"""The study of growth: every arm starts from one net, sizes are equal, and misses are named."""

import copy

from studies import growth
from studies.growth import ARMS, FAST, SAME


def test_arms_start_alike_and_grow_as_many_parameters(result):
    for numbers in result["seeds"].values():
        assert list(numbers) == list(ARMS)
        assert len({numbers[arm]["before"] for arm in ARMS}) == 1
        each = 49 + FAST.hidden[1] + 1
        for arm in ARMS[1:-2]:
            assert numbers[arm]["parameters"] == FAST.nodes * each
            assert numbers[arm]["sizes"][1] == FAST.hidden[0] + FAST.nodes
        assert 0 < numbers["TINY, best place"]["parameters"] <= FAST.nodes * each
        assert numbers["none"]["parameters"] == 0
        assert numbers["TINY, second layer"]["sizes"][1] == FAST.hidden[0]
        assert FAST.hidden[1] < numbers["TINY, second layer"]["sizes"][2] < FAST.hidden[1] + 10
        assert len({numbers[arm]["trained"] for arm in ARMS[:-1]}) == len(ARMS) - 1


def test_rules_that_keep_the_function_do_and_tiny_lowers_the_loss(result):
    for numbers in result["seeds"].values():
        for arm in SAME:
            assert abs(numbers[arm]["grown"] - numbers[arm]["before"]) < growth.ROUNDING
        assert numbers["TINY"]["grown"] < numbers["none"]["grown"]


def test_scales_are_the_best_on_held_out_images(monkeypatch):
    tried = {}

    def grown(settings, net, change, parts, seed):
        tried[change] = len(tried)
        return {"held_out": -len(tried), "grown": 0.0}

    monkeypatch.setattr(growth, "_grown", grown)
    found = growth.one_seed(FAST, 0)
    assert found["GradMax"]["scale"] == found["random"]["scale"] == FAST.scales[-1]
    assert "scale" not in found["TINY"]
    assert len(tried) == len(ARMS) + 2 * (len(FAST.scales) - 1)


def test_misses_are_named(result):
    assert growth.missed(result) == []
    worse = copy.deepcopy(result)
    worse["seeds"]["0"]["TINY"]["grown"] = 99.0
    worse["seeds"]["1"]["Net2Net"]["grown"] += 0.1
    assert len(growth.missed(worse)) == len(SAME) + 2
    assert growth.table(worse).count("\n") > len(ARMS)
