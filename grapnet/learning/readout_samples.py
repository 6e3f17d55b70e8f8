"""Samples: a batch for a linear readout, checked before it goes into a sum for ever."""

from typing import NamedTuple

import torch
from torch import Tensor


class Samples(NamedTuple):
    """A batch of features with a constant behind them, and what they should lead to."""

    features: Tensor  # [n, n_features + 1] float64, the last column is 1
    labels: Tensor | None  # [n] int64, or None where targets were given
    given: Tensor | None  # [n, n_outputs] float64 targets
    n_outputs: int

    @classmethod
    def of(cls, h: Tensor, y: Tensor, n_features: int, n_outputs: int) -> "Samples":
        """Returns features [..., n_features] with labels [...] or targets [..., n_outputs].

        Raises:
            ValueError: shapes do not fit, a label is none of the outputs, or a number is not
                finite.
        """
        if not h.dim() or h.shape[-1] != n_features:
            raise ValueError(f"features are of shape [..., {n_features}], got {list(h.shape)}")
        count = h.shape[:-1].numel()
        features, labels, given = h.double().reshape(count, n_features), None, None
        if y.shape == h.shape[:-1] and not y.is_floating_point():
            labels = y.reshape(count).long()
            outside = labels[(labels < 0) | (labels >= n_outputs)]
            if len(outside):
                raise ValueError(f"labels are 0 to {n_outputs - 1}, got {outside[:5].tolist()}")
        elif y.shape == (*h.shape[:-1], n_outputs):
            given = y.double().reshape(count, n_outputs)
        else:
            raise ValueError(
                f"features of shape {list(h.shape)} go with whole-number labels"
                f" {list(h.shape[:-1])} or targets [..., {n_outputs}], got y of shape"
                f" {list(y.shape)} and {y.dtype}"
            )
        if not all(bool(part.isfinite().all()) for part in (features, given) if part is not None):
            raise ValueError(
                "features or targets hold numbers that are not finite; one would spoil all sums for"
                " ever"
            )
        return cls(
            torch.cat([features, features.new_ones(count, 1)], dim=1), labels, given, n_outputs
        )

    def targets(self) -> Tensor:
        """Returns the targets [n, n_outputs], one-hot where labels were given."""
        if self.labels is None:
            assert self.given is not None
            return self.given
        found = self.features.new_zeros(len(self.labels), self.n_outputs)
        return found.scatter_(1, self.labels[:, None], 1.0)
