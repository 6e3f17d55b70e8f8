"""refresh_statistics: the running statistics of BatchNorm, estimated again after a cut."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grapnet._torch import BatchNorm, pytree
from grapnet.core._evaluating import evaluating

from ._discovery import Example

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def refresh_statistics(
    model: nn.Module, batches: Iterable[Any], *, momentum: float | None = None
) -> None:
    """Estimates the running statistics of all BatchNorm layers of a model again.

    The model runs on every batch without gradients. Only BatchNorm is in training mode: dropout is
    off, and other layers do not change. Afterwards every module has its
    previous mode and momentum. If a batch raises, the statistics are unchanged.

    Args:
        model: any model; it need not be adopted.
        batches: what the model is called with: a tensor; a tuple or list, of which the first entry
            is passed, as a DataLoader returns it; a dict, which is passed by name; or an
            `Example(args, kwargs)`. Tensors are moved to the device of the model.
        momentum: None for the average over all batches. A number updates the present statistics
            instead, by a moving average as in training.

    Raises:
        ValueError: there are no batches, or the model has no BatchNorm with running statistics.

    Examples:
        >>> import grapnet as gn
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).eval()
        >>> refresh_statistics(model, [torch.randn(16, 4) for _ in range(5)])
        >>> int(model[1].num_batches_tracked), model[1].training
        (5, False)
    """
    norms: list[Any] = [part for part in model.modules() if _has_statistics(part)]
    if not norms:
        raise ValueError("the model has no BatchNorm with running statistics")
    device = norms[0].running_mean.device
    momenta = [norm.momentum for norm in norms]
    before = []
    for norm in norms:
        before.append([getattr(norm, name).clone() for name in _STATISTICS])
    count = 0
    done = False
    try:
        with evaluating(model), torch.no_grad():
            for norm in norms:
                norm.training = True
                norm.momentum = momentum
                if momentum is None:
                    norm.reset_running_stats()
            for batch in batches:
                args, kwargs = call_of(batch, device)
                model(*args, **kwargs)
                count += 1
        if count == 0:
            raise ValueError("refresh_statistics needs at least one batch; an iterator runs once")
        done = True
    finally:
        for norm, kept, old in zip(norms, momenta, before, strict=True):
            norm.momentum = kept
            if not done:
                for name, content in zip(_STATISTICS, old, strict=True):
                    getattr(norm, name).copy_(content)


def _has_statistics(part: nn.Module) -> bool:
    return isinstance(part, BatchNorm) and part.running_mean is not None


def require_repeatable(batches: Iterable[Any]) -> None:
    """Raises TypeError for batches that can be run only once, or only row by row."""
    if isinstance(batches, Iterator | Tensor):
        raise TypeError(
            "batches are a list or a DataLoader: an iterator ends after the first layer, and a"
            " tensor would be run row by row"
        )


def call_of(batch: Any, device: torch.device) -> Example:
    """Returns the arguments of a model for one batch, on a device."""
    if isinstance(batch, Example):
        call = batch
    elif isinstance(batch, Mapping):
        call = Example((), dict(batch))
    elif isinstance(batch, tuple | list):
        call = Example((batch[0],))
    else:
        call = Example((batch,))

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return value

    return Example(*pytree.tree_map(move, tuple(call)))
