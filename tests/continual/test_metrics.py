"""Accuracies, forgetting and drift, against counting by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.continual import AccuracyMatrix, Drift, Evaluation, evaluate, structural_drift

TASKS = [(0, 3), (1, 4), (2, 5)]


class Table(nn.Module):
    """Answers with the row of a table that the input names; in training mode it answers
    nonsense.
    """

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.inner = nn.Dropout()
        self.register_buffer("logits", logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[x] if not self.training else -self.logits[x]


@pytest.fixture
def table() -> tuple[Table, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return (
        Table(torch.randn(90, 6, generator=draw)),
        torch.arange(90),
        torch.randint(6, (90,), generator=draw),
    )


def counted(logits: Tensor, y: Tensor, classes: Any, answers: Any) -> tuple[int, int]:
    """How many images of `classes` there are, and of how many the largest logit among `answers` is
    the right one.
    """
    rows = [(z, t) for z, t in zip(logits.tolist(), y.tolist(), strict=True) if t in classes]
    return len(rows), sum(max(answers, key=lambda c: z[c]) == t for z, t in rows)


@pytest.mark.parametrize("batch", [1000, 7])
@pytest.mark.parametrize("upto", [1, 2, 3])
def test_accuracies_are_counted_over_seen_classes_and_within_tasks(table, upto, batch):
    model, x, y = table
    tasks = TASKS[:upto]
    seen = [c for classes in tasks for c in classes]
    found = evaluate(model, x, y, tasks, seen, batch=batch)
    totals = [counted(model.logits, y, classes, seen) for classes in tasks]
    assert found.seen == pytest.approx([right / n for n, right in totals])
    assert found.overall == pytest.approx(
        sum(right for _, right in totals) / sum(n for n, _ in totals)
    )
    local = [counted(model.logits, y, classes, classes) for classes in tasks]
    assert found.local == pytest.approx([right / n for n, right in local])
    assert evaluate(model, x, y, tasks) == found  # the seen classes are those of the tasks
    if upto > 1:
        assert max(found.seen) < min(found.local)


def test_more_seen_classes_than_those_evaluated_make_it_harder(table):
    model, x, y = table
    all_classes = range(6)
    n, right = counted(model.logits, y, TASKS[0], all_classes)
    found = evaluate(model, x, y, TASKS[:1], all_classes)
    assert found.overall == found.seen[0] == pytest.approx(right / n)
    assert found.overall < evaluate(model, x, y, TASKS[:1]).overall


def test_evaluation_uses_eval_mode_and_leaves_every_mode_as_it_was(table):
    model, x, y = table
    model.train()
    model.inner.eval()
    training = evaluate(model, x, y, TASKS)
    assert (model.training, model.inner.training) == (True, False)
    model.eval()
    assert evaluate(model, x, y, TASKS) == training
    # any function will do
    assert evaluate(lambda rows: model.logits[rows], x, y, TASKS) == training

    model.train()
    model.inner.eval()
    with pytest.raises(IndexError):
        evaluate(model, x + 90, y, TASKS)
    assert (model.training, model.inner.training) == (True, False)


@pytest.mark.parametrize(
    ("tasks", "seen", "named"), [([(0, 1)], [0, 2], "seen"), ([(7, 8)], None, r"\[7, 8\]")]
)
def test_tasks_that_cannot_be_evaluated_are_refused(table, tasks, seen, named):
    with pytest.raises(ValueError, match=named):
        evaluate(*table, tasks, seen)


def test_forgetting_is_best_earlier_minus_final_of_all_tasks_but_the_last():
    seen = [[0.9], [0.5, 0.8], [0.7, 0.9, 0.95], [0.3, 0.85, 0.6, 0.99]]
    matrix = AccuracyMatrix()
    for n, row in enumerate(seen):
        assert matrix.forgetting == 0 if n < 2 else matrix.forgetting > 0
        matrix.add(Evaluation(sum(row) / len(row), row, [0.9 + 0.01 * k for k in range(n + 1)]))
    assert matrix.forgetting == pytest.approx(((0.9 - 0.3) + (0.9 - 0.85) + (0.95 - 0.6)) / 3)
    assert matrix.seen_class == pytest.approx(sum(seen[-1]) / 4)
    assert matrix.task_local == pytest.approx(0.915)


def test_the_table_has_a_row_for_every_task_and_nothing_about_the_future():
    matrix = AccuracyMatrix()
    matrix.add(Evaluation(0.5, [0.5], [0.6]))
    matrix.add(Evaluation(0.8, [0.7, 0.9], [0.8, 1.0]))
    assert matrix.table().tolist()[1] == [0.7, 0.9]
    assert matrix.table("local").tolist()[1] == [0.8, 1.0]
    assert matrix.table()[0, 0] == 0.5
    assert math.isnan(matrix.table()[0, 1])


def test_rows_come_in_order():
    matrix = AccuracyMatrix()
    with pytest.raises(ValueError, match="no task"):
        _ = matrix.seen_class
    with pytest.raises(ValueError, match=r"1 tasks.* 2 "):
        matrix.add(Evaluation(0.5, [0.5, 0.5], [0.5, 0.5]))
    assert repr(matrix) == "AccuracyMatrix()"
    assert matrix.rows == []


def test_a_matrix_goes_through_a_checkpoint(tmp_path):
    rows = [
        Evaluation(0.9, [0.9], [0.9]),
        Evaluation(0.7, [0.6, 0.8], [0.8, 0.9]),
        Evaluation(0.5, [0.4] * 3, [0.5] * 3),
    ]
    whole = AccuracyMatrix()
    first = AccuracyMatrix()
    resumed = AccuracyMatrix()
    for row in rows:
        whole.add(row)
    for row in rows[:2]:
        first.add(row)
    gn.save(tmp_path / "file", gn.GrapNet([2, 2]), matrix=first)
    gn.restore(tmp_path / "file", matrix=resumed)
    resumed.add(rows[2])
    assert resumed == whole
    assert resumed.forgetting == whole.forgetting > 0

    wrong = whole.state_dict()
    wrong["rows"] = wrong["rows"][1:]
    with pytest.raises(ValueError, match="1 tasks"):
        resumed.load_state_dict(wrong)
    assert resumed == whole


def test_drift_is_the_largest_and_the_mean_change():
    before = [torch.tensor([[1.0], [2.0]]), torch.tensor([3.0])]
    after = [torch.tensor([[1.0], [1.5]]), torch.tensor([4.0])]
    assert structural_drift(before, after) == Drift(1.0, 0.5, 3)
    assert structural_drift(before, before) == Drift(0.0, 0.0, 3)
    assert structural_drift(before[1], after[1]) == Drift(1.0, 1.0, 1)
    tiny = torch.nextafter(before[1], torch.tensor(4.0))
    assert structural_drift(before[1], tiny).largest > 0  # one bit is a change


@pytest.mark.parametrize("after", [torch.zeros(2), [torch.zeros(3), torch.zeros(1)], []])
def test_drift_of_other_coordinates_is_refused(after):
    with pytest.raises(ValueError, match="coordinates"):
        structural_drift(torch.zeros(3), after)
