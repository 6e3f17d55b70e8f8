"""The attention audit runs, finds rounding and nothing else, deletes five relations, and would name
what it missed.
"""

import copy

import pytest
import torch

import grapnet as gn
from studies import attention_audit
from tests.execution.attended import dense_attention

from .conftest import set_at


@pytest.fixture
def reached(result) -> dict:
    """A result as a full run would have it."""
    result = copy.deepcopy(result)
    result["summary"]["training"]["attention"]["before"]["mean"] = 34.0
    result["summary"]["training"]["attention"]["after"]["mean"] = 92.0
    return result


def test_a_fast_run_finds_rounding(result):
    assert all(line.startswith("student") for line in attention_audit.missed(result))


def test_five_relations_leave_and_all_gradients_are_there(result):
    assert result["summary"]["relations"] == [[140, 135]]
    for seed in result["seeds"].values():
        for audit in seed["audit"].values():
            assert audit["relations"] == [140, 135]
            assert audit["before"]["largest"] != audit["after"]["largest"]  # the cut took effect
            assert min(audit["after"]["largest"].values()) > 0


def test_students_answer_64_rows_and_the_control_learns_something(result):
    for seed in result["seeds"].values():
        assert seed["training"].keys() == {"attention", "sum"}
        assert (seed["training"]["attention"]["after"] * 64 / 100).is_integer()
    learnt = result["summary"]["training"]["sum"]
    assert learnt["train"]["mean"] > learnt["before"]["mean"] + 10


def test_the_rectangle_of_the_study_is_that_of_the_library():
    generator = torch.Generator().manual_seed(0)
    net = gn.GrapNet([7, 5], density=0.8, dtype=torch.float64, generator=generator)
    net.execution.use("attention", bound=2.0, generator=generator)
    x = torch.randn(9, 7, dtype=torch.float64, generator=generator)
    keys = net.columns["key_0"].value
    queries = net.columns["query_0"].value
    store = net.transitions[0]
    expected = dense_attention(
        x, store.values(), keys, queries, store.topology, net.layers[1].biases
    )
    assert torch.allclose(attention_audit.dense_attention(net, x), expected, rtol=0, atol=1e-14)
    with torch.no_grad():
        keys[0] += 1e-3
    assert not torch.allclose(attention_audit.dense_attention(net, x), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("audit", "float32", "after", "key"), 2e-6, "key after the cuts in float32"),
        (("audit", "float64", "before", "forward"), float("nan"), "forward before the cuts"),
        (("audit", "float64", "smallest gradient"), 0.0, "gradients in float64"),
        (("relations",), [[140, 136]], "relations: 140 became 136"),
        (("training", "attention", "before", "mean"), 40.0, "student before"),
        (("training", "attention", "after", "mean"), 91.9, "student after"),
    ],
)
def test_each_missed_bar_is_named(reached, place, value, named):
    assert attention_audit.missed(reached) == []
    set_at(reached["summary"], place, value)
    (line,) = attention_audit.missed(reached)
    assert line.startswith(named)
