"""The Tiny Transformer audit runs, reaches its bars, and would name what it missed."""

import copy

import pytest

from studies import tiny_transformer

from .conftest import set_at


def test_a_fast_run_reaches_every_bar(result):
    assert tiny_transformer.missed(result) == []
    assert result["cut"]["before"] == 1024
    assert set(result["cut"]["left"].values()) == {992}
    assert {"storage", "gradient", "optimizer exp_avg", "snapshot", "family plan"} <= set(
        result["cut"]["left"]
    )


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("exact", "float32", "logits"), 1e-5, "logits"),
        (("exact", "float64", "other_gradients"), 2e-12, "other_gradients"),
        (("exact", "float64", "ffn_forward"), float("nan"), "ffn_forward"),
        (("training", "same_predictions"), False, "accuracy"),
        (("cut", "left", "gradient"), 1024, "gradient"),
        (("cut", "backend_errors", "sparse"), 1e-3, "sparse"),
    ],
)
def test_each_missed_bar_is_named(result, place, value, named):
    worse = copy.deepcopy(result)
    set_at(worse, place, value)
    (line,) = tiny_transformer.missed(worse)
    assert line.startswith(named)
