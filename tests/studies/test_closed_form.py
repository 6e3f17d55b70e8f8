"""The study of the solved head runs, counts what is stored, chooses on held-out images, and names a
missed bar.
"""

import copy

import pytest

from grapnet.continual import Batch, GramStatistics, TaskStream
from studies.closed_form import FAST, STORED, Settings, missed
from studies.data import small_images
from studies.stream_heads import TASKS, Choice, dense, trained, tuned_replay


@pytest.fixture
def reached(result) -> dict:
    """A result that looks like a full run in which every bar is reached."""
    found = copy.deepcopy(result)
    for stream, score in (("few", 80.0), ("full", 84.0)):
        ours(found, stream)["seen_class"]["mean"] = score
    return found


def ours(result: dict, stream: str) -> dict:
    return next(iter(result["summary"][stream].values()))


def test_a_fast_run_has_every_row_of_both_streams(result):
    for stream, heads in (("few", FAST.few_heads), ("full", FAST.full_heads)):
        rows = result["summary"][stream]
        assert next(iter(rows)) == heads[0].name
        assert {head.name for head in heads} <= rows.keys()
        for words in (
            "ER,",
            "logit-adjusted ER,",
            "offline",
            "streaming LDA on the",
            "nearest class mean on the",
        ):
            assert any(name.startswith(words) for name in rows)
        assert all(0 < row["seen_class"]["mean"] <= 100 for row in rows.values())
    assert result["summary"]["full"][FAST.full_heads[-1].name]["seen_class"]["n"] == 1


def test_the_head_stores_sums_and_no_image(result):
    row = ours(result, "few")
    nodes = FAST.few_heads[0].nodes
    assert row["images"] == 0
    assert row["numbers"] == (nodes + 1) * (nodes + 2) // 2 + 10 * (nodes + 1)
    assert row["bytes"] == 4 * row["numbers"]
    assert ours(result, "full")["bytes"] == 8 * ours(result, "full")["numbers"]


def test_the_first_head_of_a_full_run_fits_into_the_numbers_of_the_replay_memory():
    first = Settings().few_heads[0]
    assert GramStatistics(first.nodes, 10).numbers == 24_476 <= STORED == 49 * Settings().memory
    assert GramStatistics(first.nodes + 1, 10).numbers > STORED


def test_replay_with_as_many_bytes_stores_as_many_as_images_allow(result):
    rows = result["summary"]["full"]
    (row,) = (
        row for name, row in rows.items() if name.startswith("ER,") and "as many bytes" in name
    )
    assert 0 <= ours(result, "full")["bytes"] - row["bytes"] < 49 * 4 + 8
    assert row["parameters"] == ours(result, "full")["parameters"]  # as many nodes


def test_settings_are_chosen_by_the_held_out_images_alone():
    train, test = (Batch(*images) for images in small_images("made-up"))
    stream = TaskStream(train.x, train.y, tasks=TASKS, batch=16, seed=0, per_class=30)
    left = stream.left_out
    how = {"loss": "adjusted", "memory": 50, "rates": (1e-7, 1e-2), "updates": (4,)}

    def rate(held_out: Batch, test: Batch) -> float:
        choices = {"one": Choice(stream, stream, held_out, test)}
        row = tuned_replay(choices, lambda rate: trained(dense(49, 16), rate), 0, **how)
        return row["chosen"]["rate"]

    wrong = (left.y + 1) % 10
    assert rate(left, test) == rate(left, Batch(test.x, (test.y + 1) % 10)) == 1e-2
    assert rate(Batch(left.x, wrong), test) == 1e-7  # where learning hurts


@pytest.mark.parametrize(
    ("stream", "key", "value", "named"),
    [
        ("few", "seen_class", {"mean": 79.99}, "the bar is 80.00"),
        ("full", "seen_class", {"mean": float("nan")}, "the bar is 84.00"),
        ("few", "numbers", 24_501, "24,501 numbers"),
        ("full", "images", 1, "to store none"),
    ],
)
def test_each_missed_bar_is_named(reached, stream, key, value, named):
    assert missed(reached) == []
    ours(reached, stream)[key] = value
    (line,) = missed(reached)
    assert line.startswith(stream)
    assert named in line
