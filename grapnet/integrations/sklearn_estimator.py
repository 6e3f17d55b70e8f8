"""What the estimators share: parameters, one way to train for `fit` and `partial_fit`, and a net to
edit in between.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

import grapnet as gn
from grapnet.rules import RuleManager

from .extra import require
from .sklearn_training import Loss, Samples, Training, make_manager, make_optimizer, run_with

try:
    from sklearn.base import BaseEstimator
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ModuleNotFoundError:
    require("sklearn", "sklearn")
    raise

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class GrapNetEstimator(BaseEstimator):
    """A net that is fitted; `GrapNetClassifier` says what the parameters mean."""

    training_: Training
    loss_curve_: list[float]
    validation_loss_curve_: list[float]
    n_features_in_: int

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (100,),
        *,
        activation: str | Sequence[str] = "relu",
        density: float = 1.0,
        distribution: str = "uniform",
        dropout: float = 0.0,
        optimizer: str | Callable[..., Optimizer] = "adam",
        learning_rate: float = 0.003,
        weight_decay: float = 0.0,
        batch_size: int = 200,
        max_epochs: int = 100,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-4,
        rules: Sequence[Any] | RuleManager | None = None,
        execution: str | Sequence[str] = "auto",
        dtype: str | None = None,
        device: str = "cpu",
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.density = density
        self.distribution = distribution
        self.dropout = dropout
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.rules = rules
        self.execution = execution
        self.dtype = dtype
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    @property
    def net_(self) -> gn.GrapNet:
        """The fitted net: edit it, run it, save it; `partial_fit` and `predict` go on with what you
        made of it.
        """
        return self.training_.net

    @property
    def optimizer_(self) -> Optimizer:
        """The optimizer, which follows every edit of `net_`."""
        return self.training_.optimizer

    @property
    def rules_(self) -> RuleManager:
        """The manager of the rules: inject, replace or disable some between two calls of
        `partial_fit`.
        """
        return self.training_.rules

    @property
    def n_iter_(self) -> int:
        """How many epochs were trained; every `partial_fit` is one."""
        return len(self.loss_curve_)

    @property
    def n_steps_(self) -> int:
        """How many training steps were made, which is what schedules of rules count."""
        return self.training_.steps

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _read(self, x: Any, y: Any = "no_validation", *, reset: bool, **options: Any) -> Any:
        """Returns checked features, and targets when there are some; float32 stays, all else
        becomes float64.
        """
        return validate_data(
            self, x, y, reset=reset, accept_sparse="csr", dtype=(np.float64, np.float32), **options
        )

    def _weights(self, x: Any, sample_weight: Any) -> np.ndarray | None:
        """Returns checked weights of the samples, or None when all weigh the same."""
        if sample_weight is None:
            return None
        weights = _check_sample_weight(sample_weight, x, dtype=np.float64)
        if (weights < 0).any():
            raise ValueError(f"sample_weight holds negative numbers, the smallest {weights.min()}")
        return weights

    def _begin(self, x: Any, n_outputs: int) -> np.random.RandomState:
        """Makes net, optimizer and rules for data like these; returns the source of random
        numbers.
        """
        hidden = self._checked_parameters()
        random = check_random_state(self.random_state)
        of_net, of_rules = (int(seed) for seed in random.randint(np.iinfo(np.int32).max, size=2))
        generator = torch.Generator().manual_seed(of_net)
        net = gn.GrapNet(
            [x.shape[1], *hidden, n_outputs],
            activation=self.activation,
            density=self.density,
            distribution=self.distribution,  # pyright: ignore[reportArgumentType]
            device=self.device,
            dtype=_DTYPES[str(x.dtype) if self.dtype is None else self.dtype],
            generator=generator,
        )
        for layer in list(net.layers)[1:-1]:
            layer.dropout = self.dropout
        run_with(net, self.execution, generator)
        optimizer = make_optimizer(net, self.optimizer, self.learning_rate, self.weight_decay)
        self.training_ = Training(
            net, optimizer, make_manager(self.rules, of_rules), generator, (x.shape[1], n_outputs)
        )
        self.loss_curve_ = []
        vars(self).pop("validation_loss_curve_", None)
        return random

    def _fit(
        self, x: Any, targets: np.ndarray, weights: np.ndarray | None, n_outputs: int, loss: Loss
    ) -> None:
        """Trains a net of its own, and warns of rules that were scheduled behind the last step."""
        self._train(x, targets, weights, n_outputs, loss)
        left = self.rules_.never_due(self.n_steps_)
        if left:
            warnings.warn(
                f"rules were never due: {', '.join(left)}. The fit made {self.n_steps_} steps,"
                " numbered from 0, and schedules count steps, not epochs",
                stacklevel=3,
            )

    def _train(
        self, x: Any, targets: np.ndarray, weights: np.ndarray | None, n_outputs: int, loss: Loss
    ) -> None:
        """Trains for `max_epochs`, or until the loss of held-out samples stops to fall."""
        random = self._begin(x, n_outputs)
        if not self.early_stopping:
            samples = Samples(x, targets, weights, self.net_)
            for _ in range(self.max_epochs):
                self._epoch(samples, loss)
            return
        labels = targets if np.issubdtype(targets.dtype, np.integer) else None
        parts = train_test_split(
            np.arange(x.shape[0]),
            test_size=self.validation_fraction,
            stratify=labels,
            random_state=random,
        )
        learned, held = (
            Samples(x[rows], targets[rows], None if weights is None else weights[rows], self.net_)
            for rows in parts
        )
        self.validation_loss_curve_, best, since = [], np.inf, 0
        while len(self.loss_curve_) < self.max_epochs and since < self.n_iter_no_change:
            self._epoch(learned, loss)
            self.validation_loss_curve_.append(self.training_.loss(held, loss))
            since = 0 if self.validation_loss_curve_[-1] < best - self.tol else since + 1
            best = min(best, self.validation_loss_curve_[-1])

    def _epoch(self, samples: Samples, loss: Loss, task: Any = None) -> None:
        self.loss_curve_.append(self.training_.epoch(samples, loss, int(self.batch_size), task))
        if self.verbose:
            relations = self.net_.count().relations
            print(f"epoch {self.n_iter_}: loss {self.loss_curve_[-1]:.6f}, {relations:,} relations")

    def _outputs(self, x: Any) -> Tensor:
        """Returns what the net computes, [n, n_outputs]."""
        check_is_fitted(self)
        return self.training_.outputs(self._read(x, reset=False))

    def _checked_parameters(self) -> list[int]:
        """Returns the sizes of the hidden layers; raises ValueError for parameters that nothing
        else checks.
        """
        given: Any = self.hidden_layer_sizes
        hidden = list(given) if isinstance(given, Iterable) else [given]
        for size in hidden:
            _require_number("hidden_layer_sizes", size, Integral, 0)
        for name in ("batch_size", "max_epochs", "n_iter_no_change"):
            _require_number(name, getattr(self, name), Integral, 1)
        _require_number("learning_rate", self.learning_rate, Real, 0, above=True)
        _require_number("weight_decay", self.weight_decay, Real, 0)
        if not isinstance(self.validation_fraction, Real) or not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction lies between 0 and 1, got {self.validation_fraction!r}"
            )
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(
                f'dtype is None (as the features are), "float32" or "float64", got {self.dtype!r}'
            )
        return [int(size) for size in hidden]


@contextmanager
def unchanged_on_error(estimator: GrapNetEstimator) -> Iterator[None]:
    """Gives an estimator the attributes back that it had when the block raises."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


def _require_number(
    name: str, value: Any, kind: type, least: float, *, above: bool = False
) -> None:
    """Raises ValueError for a parameter that is no number of a kind, or too small."""
    if (
        not isinstance(value, kind)
        or isinstance(value, bool)
        or not (value > least if above else value >= least)
    ):
        what = "whole numbers" if kind is Integral else "numbers"
        raise ValueError(
            f"{name} takes {what} {'above' if above else 'from'} {least}, got {value!r}"
        )
