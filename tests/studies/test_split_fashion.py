"""Table 2's study runs, counts exactly, trains its controls as their names say, and names each bar
that it misses.
"""

import copy

import pytest
import torch

from grapnet.continual import TaskStream
from studies import split_fashion as study
from studies.data import small_images
from studies.split_fashion import Head, Learner, Regime, learned

from .conftest import set_at


@pytest.fixture(scope="module")
def stream() -> TaskStream:
    train, _ = small_images("made-up")
    return TaskStream(*train, tasks=Regime().tasks, batch=20, seed=0, per_class=20)


@pytest.fixture
def reached(result) -> dict:
    """A result that reaches every bar."""
    result = copy.deepcopy(result)
    found = result["summary"]
    for name in (study.DENSE, study.FROZEN, study.PLASTIC):
        found["rows"][name]["seen_class"] = [study.PAPER[f"{name}: seen-class"] + 2.9, 1.0]
    found["contrasts"]["seen-class, reservoir"] |= {"mean": 12.0, "p": 1e-5}
    found["time"] |= {"tasks": [1.29] * 5, "stream": 1.14}
    return result


def test_a_fast_run_has_all_that_the_tables_show_and_the_exact_parameter_counts(result):
    found = result["summary"]
    assert [row["parameters"] for row in found["rows"].values()] == [
        [3850],
        [15370],
        [15370],
        [13450],
        [13450],
        [13450],
    ]
    assert list(found["rows"]) == list(study.ROWS)
    assert {len(ways) for ways in found["controls"].values()} == {4}
    assert len(found["controls"]) == 4
    assert found["controls"]["dense-256"][study.KEPT] == found["adam"][study.DENSE]["seen_class"]
    assert found["controls"]["GrapNet"][study.RENEWED] == found["adam"][study.PLASTIC]["seen_class"]
    assert found["initials"]["dense-256"]["linear"] == found["rows"][study.DENSE]["seen_class"]
    assert found["initials"]["GrapNet"]["grapnet"] == found["rows"][study.PLASTIC]["seen_class"]
    assert found["rows"][study.DENSE]["seen_class"] != found["adam"][study.DENSE]["seen_class"]
    assert list(found["contrasts"]) == list(study.PAPER_CONTRASTS)
    assert len(found["time"]["tasks"]) == 5
    text = study.table(result)
    assert found["sentence"] in text
    assert "(63.16 ± 3.20)" in text


def test_the_first_table_is_of_plain_sgd_and_the_regime_that_is_nearer_is_counted(result):
    assert result["settings"]["regime"]["optimizer"] == "sgd"
    found = result["summary"]
    assert list(found["nearer"]) == list(study.ROWS)
    for name, far in found["nearer"].items():
        printed = study.PAPER[f"{name}: seen-class"]
        assert far["SGD"] == pytest.approx(abs(found["rows"][name]["seen_class"][0] - printed))
        assert far["Adam"] == pytest.approx(abs(found["adam"][name]["seen_class"][0] - printed))


def test_frozen_nodes_do_not_move_and_plastic_ones_do(result):
    drift = {name: row["drift"] for name, row in result["summary"]["rows"].items()}
    assert drift[study.FROZEN] == 0
    assert drift[study.PLASTIC] > 0


def test_the_same_seed_gives_the_same_numbers_apart_from_the_time(stream):
    _, test = small_images("made-up")
    once, again, other = (
        learned(study.GROWN, Regime(), stream, test, seed) | {"seconds": 0} for seed in (5, 5, 6)
    )
    assert once == again
    assert once != other


def test_every_head_gets_the_same_images_and_the_same_replay(stream):
    learners = [Learner(head, Regime(capacity=40), 3) for head in (Head("dense"), study.GROWN)]
    other = Learner(Head("dense"), Regime(capacity=40), 4)
    for learner in (*learners, other):
        learner.learn(stream)
    samples = [learner.memory.sample(16) for learner in (*learners, other)]
    assert torch.equal(samples[0].x, samples[1].x)
    assert not torch.equal(samples[0].x, samples[2].x)


def test_the_controls_have_the_relations_that_their_names_say(stream):
    final = Learner(Head("final"), Regime(), 0)
    assert final.parameters == 13450
    related = Learner(Head("related"), Regime(), 0)
    grown = Learner(Head("grown"), Regime(), 0)
    for learner in (related, grown):
        learner.learn(stream)
    of = [len(learner.model.layers[1].outgoing()) for learner in (final, grown, related)]
    assert of == [1440, 1440, 240 * 10]


@pytest.mark.parametrize("topology", ["dense", "final", "related", "grown"])
def test_a_kept_adam_counts_on_and_a_renewed_one_starts_again_with_every_task(stream, topology):
    adam = Regime(optimizer="adam", lr=2e-3)
    for renewed, steps in ((False, 10), (True, 2)):
        learner = Learner(Head(topology, renewed=renewed), adam, 0)
        learner.learn(stream)  # 5 tasks of 2 batches
        assert {int(state["step"]) for state in learner.optimizer.state.values()} == {steps}


def test_the_learning_rate_is_chosen_on_images_left_out_and_not_on_test_images(result):
    seeds = {int(seed): copy.deepcopy(numbers) for seed, numbers in result["seeds"].items()}
    for numbers in seeds.values():
        numbers["tuned"]["GrapNet plastic"] = {"0.002": [60.0, 10.0], "0.008": [50.0, 90.0]}
    assert study.summarise(study.FAST, seeds)["tuned"]["GrapNet plastic"] == {
        "rate": 0.002,
        "seen_class": (10.0, 0.0),
    }


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("rows", study.DENSE, "seen_class"), [48.0, 1.0], study.DENSE),
        (("rows", study.FROZEN, "seen_class"), [57.5, 1.0], study.FROZEN),
        (("rows", study.PLASTIC, "seen_class"), [float("nan"), 1.0], study.PLASTIC),
        (("rows", study.PLASTIC, "parameters"), [13451], "parameters"),
        (("rows", study.FROZEN, "drift"), 1e-9, "drift"),
        (("contrasts", "seen-class, reservoir", "mean"), 8.0, "plastic − dense"),
        (("contrasts", "seen-class, reservoir", "p"), 1e-4, "plastic − dense"),
        (("time", "tasks"), [1.2, 1.2, 1.31, 1.2, 1.2], "time of task 3"),
        (("time", "stream"), 1.16, "time over the stream"),
    ],
)
def test_each_missed_bar_is_named(reached, place, value, named):
    assert study.missed(reached) == []
    set_at(reached["summary"], place, value)
    (line,) = study.missed(reached)
    assert line.startswith(named)
