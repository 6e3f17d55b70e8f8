"""Losses over seen classes and the replay objectives, against their published formulas written out
row by row.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grapnet.continual import (
    DER,
    ERACE,
    Batch,
    DERpp,
    ExperienceReplay,
    logit_adjusted_cross_entropy,
    seen_class_cross_entropy,
)

SEEN = (4, 0, 3)


def entropy(
    logits: list[float], target: int, classes: Any, shift: dict[int, float] | None = None
) -> float:
    """-log softmax of one row over some classes, in plain Python."""
    scores = {c: logits[c] + (shift or {}).get(c, 0.0) for c in classes}
    return math.log(sum(math.exp(score) for score in scores.values())) - scores[target]


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def log_shares(*weighted: tuple[Tensor, float]) -> dict[int, float]:
    """log of the class frequencies of labels, each batch weighing as much as it does in the
    objective.
    """
    shares: dict[int, float] = {}
    for labels, weight in weighted:
        for label in labels.tolist():
            shares[label] = shares.get(label, 0.0) + weight / len(labels)
    total = sum(shares.values())
    return {c: math.log(shares[c] / total) if c in shares else -math.inf for c in SEEN}


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).double()


@pytest.fixture
def batches() -> tuple[Batch, Batch]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(11, 3, generator=draw, dtype=torch.float64)
    stored = torch.randn(4, 5, generator=draw, dtype=torch.float64)
    return Batch(x[:7], torch.tensor([3, 0, 3, 3, 0, 3, 3])), Batch(
        x[7:], torch.tensor([4, 4, 0, 4]), stored
    )


def rows(model: nn.Module, batch: Batch) -> list[tuple[list[float], int]]:
    return list(zip(model(batch.x).tolist(), batch.y.tolist(), strict=True))


def test_seen_class_cross_entropy_is_a_softmax_over_the_seen_columns(model, batches):
    logits = model(batches[0].x)
    y = batches[0].y
    wanted = [entropy(z, t, SEEN) for z, t in rows(model, batches[0])]
    for seen in (SEEN, torch.tensor([0, 3, 4])):
        found = seen_class_cross_entropy(logits, y, seen).item()
        assert found == pytest.approx(mean(wanted), abs=1e-12)
    each = seen_class_cross_entropy(logits, y, SEEN, reduction="none")
    assert each.tolist() == pytest.approx(wanted, abs=1e-12)
    # over all columns it is another number
    assert nn.functional.cross_entropy(logits, y).item() > mean(wanted) + 0.1


def test_columns_of_other_classes_get_no_gradient(model, batches):
    logits = model(batches[0].x).detach().requires_grad_()
    seen_class_cross_entropy(logits, batches[0].y, SEEN).backward()
    assert (logits.grad[:, [1, 2]] == 0).all()
    assert (logits.grad[:, [0, 3, 4]] != 0).all()


@pytest.mark.parametrize("target", [1, -1, 5])
def test_a_target_that_was_not_seen_is_refused(model, batches, target):
    y = batches[0].y.clone()
    y[2] = target
    with pytest.raises(ValueError, match=rf"\[{target}\]"):
        seen_class_cross_entropy(model(batches[0].x), y, SEEN)


@pytest.mark.parametrize("seen", [(), (0, 3, 3), (0, 3, 5), (-1, 0, 3)])
def test_seen_names_different_classes_of_the_logits(model, batches, seen):
    with pytest.raises(ValueError, match="seen"):
        seen_class_cross_entropy(model(batches[0].x), batches[0].y, seen)


@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_logit_adjustment_adds_tau_log_frequency(model, batches, tau):
    counts = torch.tensor([10.0, 99.0, 0.0, 30.0, 60.0])
    shift = {0: tau * math.log(0.1), 3: tau * math.log(0.3), 4: tau * math.log(0.6)}
    wanted = mean(entropy(z, t, SEEN, shift) for z, t in rows(model, batches[0]))
    logits = model(batches[0].x)
    y = batches[0].y
    assert logit_adjusted_cross_entropy(logits, y, SEEN, counts, tau=tau).item() == pytest.approx(
        wanted, abs=1e-12
    )
    tenfold = logit_adjusted_cross_entropy(logits, y, SEEN, (10 * counts).long(), tau=tau)
    assert tenfold.item() == pytest.approx(wanted, abs=1e-12)


def test_a_class_that_was_never_counted_takes_no_part(model, batches):
    logits = model(batches[0].x).detach().requires_grad_()
    loss = logit_adjusted_cross_entropy(logits, batches[0].y, SEEN, torch.tensor([2, 0, 0, 2, 0]))
    assert loss.item() == pytest.approx(
        seen_class_cross_entropy(logits, batches[0].y, [0, 3]).item(), abs=1e-12
    )
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[:, 4] == 0).all()


@pytest.mark.parametrize("counts", [[2, 0, 0, 0, 1], [2, 0, 0, 3, -1]])
def test_counts_that_cannot_be_are_refused(model, batches, counts):
    with pytest.raises(ValueError, match="counts"):
        logit_adjusted_cross_entropy(model(batches[0].x), batches[0].y, SEEN, torch.tensor(counts))


def reference(objective: Any, model: nn.Module, current: Batch, replay: Batch) -> float:
    """The published formulas, row by row."""
    adjusted = objective.loss == "adjusted"
    tau = objective.tau

    def ce(batch: Batch, classes: Any, *weighted: tuple[Tensor, float]) -> float:
        shift = {c: tau * s for c, s in log_shares(*weighted).items()} if adjusted else None
        return mean(entropy(z, t, classes, shift) for z, t in rows(model, batch))

    def dark() -> float:
        pairs = zip(model(replay.x).tolist(), replay.logits.tolist(), strict=True)
        return mean((a - b) ** 2 for z, kept in pairs for a, b in zip(z, kept, strict=True))

    alone = (current.y, 1.0)
    again = (replay.y, 1.0)
    match objective:
        case ExperienceReplay(weight=weight):
            both = (alone, (replay.y, weight))
            return ce(current, SEEN, *both) + weight * ce(replay, SEEN, *both)
        case DER(alpha=alpha):
            return ce(current, SEEN, alone) + alpha * dark()
        case DERpp(alpha=alpha, beta=beta):
            both = (alone, (replay.y, beta))
            return ce(current, SEEN, *both) + alpha * dark() + beta * ce(replay, SEEN, *both)
        case ERACE(weight=weight):
            return ce(current, {0, 3}, alone) + weight * ce(replay, SEEN, again)
    raise AssertionError(objective)


OBJECTIVES = [
    ExperienceReplay(),
    ExperienceReplay(0.3),
    DER(0.7),
    DERpp(0.2, 0.6),
    ERACE(),
    ERACE(2.0),
]


@pytest.mark.parametrize("loss", ["seen", "adjusted"])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_objectives_are_their_published_formulas(model, batches, objective, loss):
    objective = replace(objective, loss=loss, tau=0.8)
    assert objective(model, *batches, SEEN).item() == pytest.approx(
        reference(objective, model, *batches), abs=1e-12
    )


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_without_replay_the_current_batch_is_left(model, batches, objective):
    classes = (0, 3) if isinstance(objective, ERACE) else SEEN
    wanted = seen_class_cross_entropy(model(batches[0].x), batches[0].y, classes).item()
    assert objective(model, batches[0], None, SEEN).item() == pytest.approx(wanted, abs=1e-12)


def test_er_ace_leaves_old_classes_alone_where_er_pushes_them_down(model, batches):
    def gradient(objective: Any) -> Tensor:
        model.zero_grad()
        objective(model, batches[0], None, SEEN).backward()
        return model[2].bias.grad

    assert gradient(ERACE())[4] == 0
    assert gradient(ExperienceReplay())[4] > 0.01


def test_an_unknown_loss_is_refused(model, batches):
    with pytest.raises(ValueError, match="loss"):
        ExperienceReplay(loss="sene")(model, *batches, SEEN)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("objective", [DER(1.0), DERpp(1.0, 1.0)], ids=str)
def test_dark_replay_needs_stored_logits(model, batches, objective):
    with pytest.raises(ValueError, match="no stored logits"):
        objective(model, batches[0], Batch(*batches[1][:2]), SEEN)
