"""GramStatistics against solutions on all samples at once; what leaves it; class means and
discriminants from it.
"""

import io
from typing import Any

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn

from grapnet.continual import GramStatistics, linear_discriminant, nearest_class_mean
from grapnet.core._errors import CheckpointError, GrapNetError

CLASSES = 4


def samples(n: int = 200, features: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns features that are scaled and shifted differently, and labels they say something
    about.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=generator)
    centres = torch.randn(CLASSES, features, generator=generator, dtype=torch.float64)
    h = centres[y] + torch.randn(n, features, generator=generator, dtype=torch.float64)
    return h * torch.linspace(0.1, 5, features, dtype=torch.float64) + 2, y


def one_hot(y: Tensor) -> Tensor:
    return nn.functional.one_hot(y, CLASSES).double()


def direct(h: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Returns the ridge solution by least squares on rows that pull the weights, and not the bias,
    to 0.
    """
    n = h.shape[1]
    pull = torch.cat(
        [torch.eye(n, dtype=torch.float64) * ridge**0.5, torch.zeros(n, 1, dtype=torch.float64)],
        dim=1,
    )
    rows = torch.cat([torch.cat([h, torch.ones(len(h), 1, dtype=torch.float64)], dim=1), pull])
    found = torch.linalg.lstsq(
        rows, torch.cat([y, torch.zeros(n, y.shape[1], dtype=torch.float64)])
    ).solution
    return found[:-1].T, found[-1]


def seen(h: Tensor, y: Tensor, *, batch: int = 32, **settings: Any) -> GramStatistics:
    statistics = GramStatistics(h.shape[1], CLASSES, **settings)
    for some, targets in zip(h.split(batch), y.split(batch), strict=True):
        statistics.add(some, targets)
    return statistics


def close(some: Any, others: Any, tolerance: float = 1e-8) -> bool:
    return all(
        torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("features", [0, 1, 2, 7, 8])
@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("ridge", [1.0, 1e-3, 100.0])
def test_it_equals_the_solution_on_all_samples_at_once(
    features: int, per_class: bool, ridge: float
) -> None:
    h, y = samples(features=features)
    found = seen(h, y, per_class=per_class).solve(ridge)
    assert close(found, direct(h, one_hot(y), ridge))
    assert features == 0 or not close(found, direct(h, one_hot(y), 2 * ridge))


def test_any_targets_and_leading_dimensions() -> None:
    h, _ = samples(features=5)
    y = torch.randn(200, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    statistics = GramStatistics(5, CLASSES)
    statistics.add(h.view(10, 20, 5), y.view(10, 20, CLASSES))
    assert close(statistics.solve(0.5), direct(h, y, 0.5))
    h32 = h.float()
    weight, bias = seen(h32, y).solve(0.5)
    assert weight.dtype == torch.float64
    assert close((weight, bias), direct(h32.double(), y, 0.5))
    solution = statistics.solve(0.5)
    assert torch.allclose(solution(h), h @ solution.weight.T + solution.bias)


def test_neither_order_nor_batches_matter() -> None:
    h, y = samples()
    by_class = y.argsort(stable=True)
    found = seen(h, y, batch=200).solve()
    assert close(found, seen(h[by_class], y[by_class], batch=3).solve(), 1e-11)
    first = seen(h[:50], y[:50])
    second = seen(h[50:], y[50:])
    first.merge(second)
    assert close(found, first.solve(), 1e-11)
    assert not close(found, second.solve())


def test_standardizing_equals_ridge_on_standardized_features() -> None:
    h, y = samples()
    h[:, 3] = 5.0  # a constant has no deviation to divide by
    deviation = h.std(0, correction=0)
    deviation[3] = 1.0
    weight, bias = direct((h - h.mean(0)) / deviation, one_hot(y), 3.0)
    found = seen(h, y).solve(3.0, standardize=True)
    assert close(found, (weight / deviation, bias - (weight / deviation) @ h.mean(0)))
    assert not close(found, seen(h, y).solve(3.0))


@pytest.mark.parametrize("per_class", [False, True])
def test_a_batch_that_leaves_was_never_seen(per_class: bool) -> None:
    h, y = samples()
    statistics = seen(h, y, per_class=per_class)
    assert not close(statistics.solve(), seen(h[60:], y[60:]).solve())
    statistics.remove(h[:60], y[:60])
    assert statistics.count == 140
    assert close(statistics.solve(), seen(h[60:], y[60:]).solve())
    statistics.remove(h[60:], y[60:])
    assert statistics.count == 0
    assert not statistics.gram().any()
    assert not statistics.cross().any()


def test_a_class_that_is_forgotten_was_never_seen() -> None:
    h, y = samples()
    others = y != 2
    apart = seen(h, y, per_class=True)
    together = seen(h, y)
    never = seen(h[others], y[others])
    apart.forget(2)
    together.remove(h[y == 2], y[y == 2])
    assert close(apart.solve(), never.solve())
    assert close(together.solve(), never.solve())
    bitwise = GramStatistics(7, CLASSES, per_class=True)
    for some, labels in zip(h.split(32), y.split(32), strict=True):
        bitwise.add(some[labels != 2], labels[labels != 2])
    assert all(map(torch.equal, apart.solve(), bitwise.solve()))
    with pytest.raises(GrapNetError, match="per_class=True"):
        together.forget(1)


def test_numbers_and_bytes_are_what_is_stored() -> None:
    h, y = samples(features=6)
    plain = seen(h, y)
    apart = seen(h, y, per_class=True)
    assert plain.numbers == 7 * 8 // 2 + 7 * CLASSES
    assert plain.bytes == 8 * plain.numbers
    assert apart.numbers == CLASSES * (7 * 8 // 2)

    def stored(value: Any) -> int:
        tensors = value.values() if isinstance(value, dict) else []
        return value.numel() if isinstance(value, Tensor) else sum(map(stored, tensors))

    assert [stored(s.state_dict()) for s in (plain, apart)] == [plain.numbers, apart.numbers]
    assert GramStatistics(210, 10).numbers == 24_476


@pytest.mark.parametrize("per_class", [False, True])
def test_sums_kept_in_float32_take_half_the_bytes_and_lose_its_digits(per_class: bool) -> None:
    h, y = samples()
    whole = seen(h, y, per_class=per_class)
    half = seen(h, y, per_class=per_class, dtype=torch.float32)
    assert (half.numbers, 2 * half.bytes) == (whole.numbers, whole.bytes)
    assert close(half.solve(), whole.solve(), 1e-4)
    assert not close(half.solve(), whole.solve(), 1e-12)
    assert half.copied().dtype == half.rearranged(torch.arange(3)).dtype == torch.float32
    half.remove(h[:60], y[:60])
    assert close(half.solve(), seen(h[60:], y[60:]).solve(), 1e-4)
    assert half.solve().weight.dtype == torch.float64
    late = half.rearranged(torch.tensor([0, -1]))
    assert late.bytes == 4 * (late.numbers - 2) + 16


def test_other_features_and_outputs() -> None:
    h, y = samples()
    statistics = seen(h, y)
    kept = torch.tensor([5, 0, 3])
    fewer = statistics.rearranged(kept)
    assert close(fewer.solve(), seen(h[:, kept], y).solve(), 1e-11)
    assert fewer.lacking is None
    assert fewer.numbers < statistics.numbers
    more = statistics.rearranged(torch.tensor([5, -1, 0, 3]), torch.tensor([0, 1, 2, 3, -1]))
    padded = torch.cat([h[:, [5]], torch.zeros(200, 1), h[:, [0, 3]]], dim=1)
    weight, bias = more.solve()
    expected = seen(padded, y).solve()
    assert close((weight[:4], bias[:4]), expected, 1e-11)
    assert not weight[4].any()
    assert more.lacking is not None
    assert more.lacking.tolist() == [0, 200, 0, 0]
    again = more.rearranged(torch.tensor([1, -1, 2]))
    assert again.lacking is not None
    assert again.lacking.tolist() == [200, 200, 0]
    assert more.class_counts.tolist() == [*y.bincount().tolist(), 0]
    with pytest.raises(GrapNetError):
        more.remove(padded[:1], y[:1])


@pytest.mark.parametrize("per_class", [False, True])
def test_a_file_of_its_state(per_class: bool) -> None:
    h, y = samples()
    statistics = seen(h, y, per_class=per_class)
    file = io.BytesIO()
    torch.save(statistics.state_dict(), file)
    file.seek(0)
    restored = GramStatistics(7, CLASSES, per_class=per_class)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert all(map(torch.equal, restored.solve(), statistics.solve()))
    restored.add(h, y)
    assert statistics.count == 200
    before = restored.solve()
    state = statistics.state_dict()
    for wrong in ({"sizes": [8, CLASSES]}, {"per_class": not per_class}):
        with pytest.raises(CheckpointError):
            restored.load_state_dict({**state, **wrong})
    assert all(map(torch.equal, restored.solve(), before))


def test_what_is_refused_changes_nothing() -> None:
    h, y = samples()
    statistics = seen(h, y)
    before = statistics.state_dict()
    nan = h.clone()
    nan[3, 3] = torch.nan
    for some, labels in ((h[:, :6], y), (h, y[:5]), (h, y + 1), (nan, y), (h, y.double())):
        for verb in (statistics.add, statistics.remove):
            with pytest.raises(ValueError, match=r"features|labels"):
                verb(some, labels)
    few = y == 0
    for some, labels in ((h.repeat(2, 1), y.repeat(2)), (h[few].repeat(2, 1), y[few].repeat(2))):
        with pytest.raises(ValueError, match=str(len(some))):
            statistics.remove(some, labels)
    with pytest.raises(ValueError, match="labels"):
        GramStatistics(7, CLASSES, per_class=True).add(h, one_hot(y))
    with pytest.raises(ValueError, match=r"\(6, "):
        statistics.merge(GramStatistics(6, CLASSES))
    with pytest.raises(GrapNetError, match="add samples"):
        GramStatistics(7, CLASSES).solve()
    assert torch.equal(before["cross"], statistics.state_dict()["cross"])
    assert all(
        torch.equal(before["sums"][0][name], x)
        for name, x in statistics.state_dict()["sums"][0].items()
    )


def test_a_singular_matrix_is_solved_and_said() -> None:
    h, y = samples()
    twice = torch.cat([h, h[:, :1]], dim=1)
    with pytest.warns(RuntimeWarning, match="singular in float64"):
        weight, bias = seen(twice, y).solve(0.0)
    expected = direct(h, one_hot(y), 0.0)
    assert torch.allclose(twice @ weight.T + bias, h @ expected[0].T + expected[1], atol=1e-4)
    seen(twice, y).solve(1e-6)  # warns of nothing


def test_the_nearest_class_mean() -> None:
    h, y = samples()
    present = y != 3
    h = h[present]
    y = y[present]
    means = torch.stack([h[y == c].mean(0) for c in range(3)])
    expected = torch.cdist(h, means).argmin(1)
    solution = nearest_class_mean(seen(h, y))
    assert torch.equal(solution(h).argmax(1), expected)
    assert (solution.bias == -torch.inf).tolist() == [False, False, False, True]
    scaled = torch.cdist(h / h.std(0), means / h.std(0)).argmin(1)
    assert torch.equal(nearest_class_mean(seen(h, y), standardize=True)(h).argmax(1), scaled)
    assert not torch.equal(expected, scaled)


@pytest.mark.parametrize("per_class", [False, True])
def test_the_linear_discriminant_is_scikit_learns(per_class: bool) -> None:
    h, y = samples()
    reference = LinearDiscriminantAnalysis(solver="lsqr").fit(h.numpy(), y.numpy())
    solution = linear_discriminant(seen(h, y, per_class=per_class), shrinkage=0.0)
    scores = torch.from_numpy(reference.decision_function(h.numpy()))
    assert torch.allclose(solution(h) - solution(h)[:, :1], scores - scores[:, :1], atol=1e-8)
    equal = linear_discriminant(seen(h, y), shrinkage=0.0, priors=False)
    assert torch.allclose(equal.bias + (y.bincount() / len(y)).log(), solution.bias, atol=1e-6)
    spherical = linear_discriminant(seen(h, y), shrinkage=1.0, priors=False)
    assert torch.equal(spherical(h).argmax(1), nearest_class_mean(seen(h, y))(h).argmax(1))


def test_heads_that_need_classes_refuse_other_targets() -> None:
    h, y = samples()
    statistics = seen(h, y)
    statistics.add(h, one_hot(y))
    lost = seen(h, y).rearranged(torch.arange(7), torch.tensor([0, 1, 3]))
    for other in (statistics, lost):
        for head in (nearest_class_mean, linear_discriminant):
            with pytest.raises(GrapNetError, match="class"):
                head(other)
    apart = seen(h, y, per_class=True).rearranged(torch.arange(7), torch.tensor([0, 1, 3]))
    assert apart.class_counts.tolist() == y.bincount()[[0, 1, 3]].tolist()
    with pytest.raises(GrapNetError):
        nearest_class_mean(GramStatistics(7, CLASSES))
