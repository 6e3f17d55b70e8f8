"""The study of heads and layers runs, keeps its data apart, and would name what it missed."""

import copy

import pytest
import torch

from studies import heads_and_layers

from .conftest import set_at


def without_comparisons(result: dict) -> list[str]:
    """Returns the bars that are missed, without those that a fast run is too short for."""
    return [line for line in heads_and_layers.missed(result) if not line.startswith("perplexity")]


def test_a_fast_run_removes_undoes_and_generates(result):
    assert without_comparisons(result) == []
    seed = result["seeds"]["0"]
    sizes = {arm: (one["layers"], sum(one["heads"])) for arm, one in seed["arms"].items()}
    assert sizes == {"no edit": (3, 9), "by score": (2, 4), "at random": (2, 4)}
    assert seed["arms"]["by score"]["parameters"] == seed["arms"]["at random"]["parameters"]
    assert seed["arms"]["by score"]["edits"] == 3
    # It has learned something, and goes on learning.
    assert seed["trained"]["perplexity"] < 256
    for one in seed["arms"].values():
        assert one["perplexity"] < seed["trained"]["perplexity"]
    assert "by score" in heads_and_layers.table(result)


def test_files_are_held_out_whole_and_named_by_their_hash(result):
    texts, about = heads_and_layers.load(None)
    assert {len(texts[split]) == about[split]["bytes"] for split in texts} == {True}
    assert about["train"]["files"] > 5 * about["test"]["files"] > 0
    again, _ = heads_and_layers.load(None)
    assert all(torch.equal(texts[split], again[split]) for split in texts)
    fast = result["seeds"]["0"]["data"]
    assert fast["test"]["bytes"] == heads_and_layers.FAST.most_bytes
    assert len({fast[split]["sha256"] for split in texts}) == 3


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("at once", "by score", "same logits after undo"), False, "same logits after undo"),
        (("at once", "at random", "same optimizer after undo"), False, "same optimizer"),
        (("at once", "at random", "changed"), False, "changed"),
        (("arms", "by score", "same text with a cache"), False, "generate"),
        (("arms", "at random", "layers"), 3, "sizes"),
        (("arms", "by score", "heads"), [2, 3], "sizes"),
    ],
)
def test_each_missed_bar_is_named(result, place, value, named):
    worse = copy.deepcopy(result)
    set_at(worse, ("seeds", "1", *place), value)
    (line,) = without_comparisons(worse)
    assert line.startswith(named)


@pytest.mark.parametrize("stage", ["at once", "arms"])
def test_a_score_must_be_better_than_chance(result, stage):
    other = copy.deepcopy(result)
    for name in ("at once", "arms"):
        set_at(other, ("summary", f"{name}, score - random", "high"), -0.01)
    assert heads_and_layers.missed(other) == []
    set_at(other, ("summary", f"{stage}, score - random", "high"), 0.01)
    (line,) = heads_and_layers.missed(other)
    assert line.startswith(f"perplexity, {stage}")
