"""Images as the studies feed them to a net: averaged down, flattened, normalised."""

import torch
from torch import Tensor

FASHION_MEAN, FASHION_SPREAD = 0.2860, 0.3530  # of Fashion-MNIST's training pixels in [0, 1]


def downsample(images: Tensor, factor: int = 4) -> Tensor:
    """Returns the means of `factor` × `factor` squares as rows [n, inputs]; 28×28 by 4 gives 49.

    Args:
        images: [n, height, width] or [n, channels, height, width]; uint8 is taken as 0 to 255 and
            brought to [0, 1].
        factor: the side of a square, which divides height and width; 1 only flattens.

    Raises:
        ValueError: the squares do not fit into the images.

    Examples:
        >>> downsample(torch.full((1, 28, 28), 255, dtype=torch.uint8)).shape
        torch.Size([1, 49])
    """
    if images.ndim not in (3, 4):
        raise ValueError(
            "images have shape [n, height, width] or [n, channels, height, width], got"
            f" {list(images.shape)}"
        )
    height, width = images.shape[-2:]
    if factor < 1 or height % factor or width % factor:
        raise ValueError(f"squares of side {factor} do not fill images of {height}×{width} pixels")
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images
    squares = pixels.unflatten(-2, (height // factor, factor)).unflatten(
        -1, (width // factor, factor)
    )
    return squares.mean((-3, -1)).flatten(1)  # [n, channels · height/factor · width/factor]


def normalise(
    x: Tensor, mean: float | Tensor = FASHION_MEAN, spread: float | Tensor = FASHION_SPREAD
) -> Tensor:
    """Returns (x − mean) / spread, by default with the paper's numbers for Fashion-MNIST in [0, 1].

    Raises:
        ValueError: `x` holds bytes, whose range is not [0, 1], or a spread is not positive.

    Examples:
        >>> normalise(torch.tensor([0.2860, 0.6390]))
        tensor([0., 1.])
    """
    if not x.is_floating_point():
        raise ValueError(
            f"normalise expects floating-point values, got {x.dtype}. Convert first:"
            " downsample(images, 1)"
        )
    if not bool((torch.as_tensor(spread) > 0).all()):
        raise ValueError(
            "a spread is not positive; standardise() leaves constant coordinates alone"
        )
    return (x - mean) / spread


def standardise(train: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Returns all rows with each coordinate's mean and population spread over the training rows
    taken out.

    A coordinate that is constant over the training rows is only centred.

    Examples:
        >>> train, test = standardise(
        ...     torch.tensor([[0.0, 5.0], [2.0, 5.0]]), torch.tensor([[3.0, 5.0]])
        ... )
        >>> train.tolist(), test.tolist()
        ([[-1.0, 0.0], [1.0, 0.0]], [[2.0, 0.0]])
    """
    mean, spread = train.mean(0), train.std(0, correction=0)  # [d]
    spread = torch.where(spread > 0, spread, 1.0)
    return tuple(normalise(rows, mean, spread) for rows in (train, *others))
