"""Images as inputs: averaged, flattened, normalised."""

import pytest
import torch
from torch.nn.functional import avg_pool2d

from grapnet.data import FASHION_MEAN, FASHION_SPREAD, downsample, normalise, standardise


def images(*shape: int) -> torch.Tensor:
    return torch.randint(
        0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )


def test_squares_are_averaged_to_49_inputs() -> None:
    x = images(3, 28, 28)
    rows = downsample(x, 4)
    assert (rows.shape, rows.dtype) == ((3, 49), torch.float32)
    assert torch.allclose(rows, avg_pool2d(x[:, None].float() / 255, 4).flatten(1))
    # row 1, column 2
    assert rows[1, 7 + 2] == pytest.approx(float(x[1, 4:8, 8:12].float().mean()) / 255)
    assert torch.equal(downsample(x), rows)


def test_channels_stay_apart_and_floats_keep_their_range() -> None:
    x = images(2, 3, 32, 32)
    assert torch.allclose(downsample(x, 8), avg_pool2d(x.float() / 255, 8).flatten(1))
    assert torch.equal(downsample(x.double(), 1), x.double().flatten(1))
    assert torch.equal(downsample(x, 1), x.float().flatten(1) / 255)


@pytest.mark.parametrize(
    ("shape", "factor"), [((2, 28, 28), 3), ((2, 28, 27), 4), ((2, 28, 28), 0), ((28, 28), 4)]
)
def test_squares_that_do_not_fit_are_refused(shape: tuple[int, ...], factor: int) -> None:
    with pytest.raises(ValueError, match=r"pixels|shape"):
        downsample(images(*shape), factor)


def test_the_papers_normalisation() -> None:
    x = torch.tensor([[0.0, 1.0], [FASHION_MEAN, FASHION_MEAN + FASHION_SPREAD]])
    assert torch.allclose(
        normalise(x), torch.tensor([[-0.2860 / 0.3530, 0.7140 / 0.3530], [0.0, 1.0]])
    )
    assert torch.equal(
        normalise(x, 0.5, torch.tensor([1.0, 2.0])), (x - 0.5) / torch.tensor([1.0, 2.0])
    )
    with pytest.raises(ValueError, match=r"torch\.uint8"):
        normalise(images(1, 4))
    with pytest.raises(ValueError, match="not positive"):
        normalise(x, 0.0, torch.tensor([1.0, 0.0]))


def test_standardising_uses_the_training_rows_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    train, test = (
        torch.randn(n, 3, generator=generator, dtype=torch.float64) * 4 + 7 for n in (50, 20)
    )
    train[:, 2] = test[:, 2] = 5.0
    rows, others = standardise(train, test)
    assert torch.allclose(rows.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(
        rows.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    )
    expected = (test[:, :2] - train[:, :2].mean(0)) / train[:, :2].std(0, correction=0)
    assert torch.allclose(others[:, :2], expected)
    assert (others[:, 2] == 0).all()
    assert rows.dtype == torch.float64
