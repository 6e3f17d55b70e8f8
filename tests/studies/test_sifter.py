"""The sifter study: exactly 200 relations go and no node, the control differs in its scores alone,
misses are named.
"""

import copy

import pytest
import torch

import grapnet as gn
from grapnet.rules import Budget, CovarianceSifter
from studies import sifter

from .conftest import set_at


def net_and_rows() -> tuple[gn.GrapNet, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    wiring = [sifter.full_pairs(49, 50), sifter.family_pairs(50, 5, 20), sifter.full_pairs(50, 10)]
    net = gn.GrapNet.from_relations([49, 50, 50, 10], wiring, generator=generator)
    return net, torch.randn(80, 49, generator=generator)


def pairs(net: gn.GrapNet) -> set[tuple[int, int]]:
    relations = net.layers[1].outgoing()
    return set(zip(relations.parents.tolist(), relations.children.tolist(), strict=True))


def test_a_fast_run_cuts_200_relations_and_no_node(result):
    rows = result["summary"]["rows"]
    assert list(rows) == list(sifter.ROWS)
    assert rows["none"]["relations"] == rows["renewed"]["relations"] == [[3950, 3950]]
    for row in ("covariance", "random"):
        assert rows[row]["relations"] == [[3950, 3750]]
        assert rows[row]["nodes"] == [[100, 100]]
    for (before, left), (_, nodes) in zip(
        rows["unbounded"]["relations"], rows["unbounded"]["nodes"], strict=True
    ):
        assert before - left == 200 + 10 * (100 - nodes)  # an orphan takes its ten relations along


def test_every_row_is_the_same_run_up_to_the_edit(result):
    for numbers in result["seeds"].values():
        assert len({row["before"] for row in numbers.values()}) == 1
        assert numbers["none"]["edited"] == numbers["none"]["before"]
        assert len({row["edited"] for row in numbers.values()}) > 1


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("rows", "covariance", "relations"), [[3950, 3740]], "relations: covariance"),
        (("rows", "random", "relations"), [[3950, 3760]], "relations: random"),
        (("rows", "covariance", "nodes"), [[100, 99]], "nodes: covariance"),
        (("contrasts", "after − before", "mean"), -0.51, "accuracy: after − before"),
        (
            ("contrasts", "sifter − no edit, at the end", "mean"),
            float("nan"),
            "accuracy: sifter − no edit",
        ),
    ],
)
def test_each_missed_bar_is_named(result, place, value, named):
    assert sifter.missed(result) == []
    reached = copy.deepcopy(result)
    set_at(reached["summary"], place, value)
    (line,) = sifter.missed(reached)
    assert line.startswith(named)


@pytest.mark.parametrize("random", [False, True], ids=["covariance", "random"])
def test_families_stay_families_and_seeds_matter_to_the_control_alone(random: bool):
    rule = CovarianceSifter(fraction=0.4)
    left = []
    for seed in (0, 0, 1):
        net, x = net_and_rows()
        whole = pairs(net)
        optimizer = torch.optim.Adam(net.parameters())
        change = sifter.sift(
            sifter.RandomSifter(rule) if random else rule,
            x,
            seed=seed,
            budget=Budget(edits=200, parents=1),
        )
        change(net, optimizer)
        assert len(whole - pairs(net)) == 200
        assert len(net.execution.families(1)) == 5
        assert net.sizes == [49, 50, 50, 10]
        left.append(pairs(net))
    assert left[0] == left[1]
    assert (left[0] != left[2]) == random
