"""Training and judging classifiers, as most of the studies do."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .data import Images


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Images,
    *,
    batch: int,
    epochs: int,
    order: torch.Generator | None = None,
) -> None:
    """Trains with cross-entropy, in another order of the images in every epoch.

    Args:
        model: returns logits, [batch, classes].
        optimizer: of its Parameters.
        images: rows and their classes.
        batch: how many rows are in a step.
        epochs: how often all images are seen.
        order: draws the orders; by default torch's own generator does.
    """
    x, y = images
    for _ in range(epochs):
        for rows in torch.randperm(len(y), generator=order).split(batch):
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor], images: Images) -> float:
    """Returns which percentage of the images a model classifies right."""
    x, y = images
    return 100 * float((model(x).argmax(1) == y).double().mean())
