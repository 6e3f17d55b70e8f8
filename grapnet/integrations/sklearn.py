"""GrapNetClassifier and GrapNetRegressor: nets as scikit-learn estimators, to be edited once they
are fitted.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from grapnet.rules import RuleManager

from .extra import require
from .sklearn_estimator import GrapNetEstimator, unchanged_on_error
from .sklearn_training import Samples

try:
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets, unique_labels
except ModuleNotFoundError:
    require("sklearn", "sklearn")
    raise


class GrapNetClassifier(ClassifierMixin, GrapNetEstimator):
    """A classifier whose net has one output node a class, and can be edited afterwards: `net_`.

    Equal data and an equal `random_state` give equal nets, and torch's global random state is left
    alone. A `fit` that raises leaves the estimator as it was; a `partial_fit` that raises keeps the
    steps that it made.

    Args:
        hidden_layer_sizes: how many nodes each hidden layer has; none for a linear model.
        activation: of the hidden nodes, or one name for every layer after the sensory one.
        density: the share of all possible relations to start with.
        distribution: "uniform" or "erk", how that share is spread over the transitions.
        dropout: the probability with which a hidden node says 0 in training.
        optimizer: "adam", "adamw", "sgd" (Nesterov momentum 0.9), or what makes one when called
            with groups of Parameters and `lr`, such as `torch.optim.RMSprop`.
        learning_rate: its step size.
        weight_decay: its weight decay; biases are spared.
        batch_size: samples a training step, at most.
        max_epochs: how often `fit` goes over the data.
        early_stopping: whether `fit` holds out samples and stops when their loss does not fall. The
            net stays as it is then: going back to an earlier one could undo what rules did.
        validation_fraction: the share of samples to hold out.
        n_iter_no_change: after how many epochs without improvement to stop.
        tol: what counts as an improvement.
        rules: what changes the structure while it trains: a sequence of rules or pairs (rule,
            schedule), of which every fit takes copies; or a `RuleManager` that has not worked yet,
            with names and budgets, to be copied. Schedules count training steps, of which an epoch
            has n_samples / batch_size, rounded up.
        execution: a backend for all transitions ("auto", "dense", "sparse", "family", "attention",
            …), or one for each.
        dtype: "float32" or "float64"; None computes in what the features are: float32 in float32,
            all else in float64.
        device: where to train.
        random_state: an int for repeatable results.
        verbose: 1 prints a line an epoch.
        class_weight: a dict from class to weight; "balanced" weighs classes by the inverse of their
            frequency.

    Attributes:
        classes_: the labels, in the order of the output nodes.
        net_, optimizer_, rules_: the net, the optimizer that follows it, and the manager of the
        rules. n_iter_, n_steps_: how many epochs and steps were trained.
        loss_curve_: the mean loss of every epoch; `validation_loss_curve_` with early stopping.
        n_features_in_, feature_names_in_: the features seen.

    Examples:
        >>> from sklearn.datasets import load_iris
        >>> from grapnet.rules import At, PruneWeakest
        >>> x, y = load_iris(return_X_y=True)
        >>> model = GrapNetClassifier(
        ...     (32,), rules=[(PruneWeakest(0.5), At(50))], random_state=0
        ... ).fit(x, y)
        >>> model.net_, model.score(x, y) > 0.9
        (GrapNet(4-32-3, 112 relations, 0 frozen, version 1), True)
        >>> with model.net_.edit(reason="without the weakest ten") as edit:
        ...     edit.cut(model.net_.layers[0].outgoing().smallest(count=10))
        >>> model.partial_fit(x, y).net_.count().relations
        102
    """

    classes_: np.ndarray

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
        class_weight: dict[Any, float] | str | None = None,
    ) -> None:
        super().__init__(
            hidden_layer_sizes,
            activation=activation,
            density=density,
            distribution=distribution,
            dropout=dropout,
            optimizer=optimizer,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            batch_size=batch_size,
            max_epochs=max_epochs,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
            tol=tol,
            rules=rules,
            execution=execution,
            dtype=dtype,
            device=device,
            random_state=random_state,
            verbose=verbose,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains a net of its own; what was fitted before is left behind.

        Args:
            X: [n_samples, n_features], an array, a data frame or a sparse matrix.
            y: the class of every sample.
            sample_weight: how much each sample counts beside the others.
        """
        with unchanged_on_error(self):
            x, y = self._read(X, y, reset=True)
            check_classification_targets(y)
            self.classes_, labels = np.unique(y, return_inverse=True)
            self._fit(
                x,
                labels,
                self._weights_of(x, labels, sample_weight),
                len(self.classes_),
                cross_entropies,
            )
        return self

    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Any = None,
        sample_weight: Any = None,
        *,
        task: Any = None,
    ) -> Self:
        """Goes over the samples once, with the net as it is: trained, edited, or made by the first
        call.

        Args:
            X: as for `fit`.
            y: as for `fit`.
            classes: all classes there will be; needed in the first call.
            sample_weight: as for `fit`, beside the other samples of this call.
            task: what ends with these samples, for rules with `EveryTask`.
        """
        first = not hasattr(self, "training_")
        with unchanged_on_error(self):
            if first and classes is None:
                raise ValueError(
                    "classes must be passed on the first call to partial_fit: all labels there"
                    " will be"
                )
            if self.class_weight == "balanced":
                raise ValueError(
                    'class_weight="balanced" needs all data at once, and partial_fit has a part.'
                    ' Give the weights: dict(zip(classes, compute_class_weight("balanced",'
                    " classes=classes, y=y)))"
                )
            x, y = self._read(X, y, reset=first)
            check_classification_targets(y)
            if first:
                self.classes_ = unique_labels(classes)
                self._begin(x, len(self.classes_))
            elif classes is not None and not np.array_equal(unique_labels(classes), self.classes_):
                raise ValueError(
                    f"classes are {classes} here, and were {self.classes_} in the first call"
                )
            labels = self._labels(y)
            samples = Samples(x, labels, self._weights_of(x, labels, sample_weight), self.net_)
            self._epoch(samples, cross_entropies, task)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Returns the most probable class of every sample."""
        places = self._outputs(X).argmax(1).numpy()
        return self.classes_[places]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns the probability of every class, [n_samples, n_classes], in the order of
        `classes_`.
        """
        return self._outputs(X).softmax(1).numpy()

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Returns the logarithms of the probabilities."""
        return self._outputs(X).log_softmax(1).numpy()

    def _labels(self, y: np.ndarray) -> np.ndarray:
        """Returns the places of labels in `classes_`; raises ValueError for labels that are not
        there.
        """
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(
                f"y contains labels {unknown} that are not among the classes {self.classes_} of the"
                " first call. Name all classes there: partial_fit(X, y, classes=…)"
            )
        return np.searchsorted(self.classes_, y)

    def _weights_of(self, x: Any, labels: np.ndarray, sample_weight: Any) -> np.ndarray | None:
        """Returns the weights of the samples, those of their classes included."""
        weights = self._weights(x, sample_weight)
        if self.class_weight is None:
            return weights
        of_classes = compute_class_weight(
            self.class_weight, classes=self.classes_, y=self.classes_[labels]
        )
        return of_classes[labels] * (1 if weights is None else weights)


class GrapNetRegressor(RegressorMixin, GrapNetEstimator):
    """A regressor with squared error, whose net has one output node a target and can be edited
    afterwards: `net_`.

    Targets are learned as they are: scale them when they are large, for instance with
    `TransformedTargetRegressor`. All parameters and attributes are those of `GrapNetClassifier`,
    except `class_weight` and `classes_`.

    Examples:
        >>> x = np.linspace(-2, 2, 200).reshape(-1, 1)
        >>> model = GrapNetRegressor((32,), learning_rate=0.02, random_state=0).fit(
        ...     x, np.sin(x[:, 0])
        ... )
        >>> model.score(x, np.sin(x[:, 0])) > 0.95
        True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains a net of its own; what was fitted before is left behind.

        Args:
            X: [n_samples, n_features], an array, a data frame or a sparse matrix.
            y: [n_samples] or [n_samples, n_targets]; predictions have the same shape.
            sample_weight: how much each sample counts beside the others.
        """
        with unchanged_on_error(self):
            x, targets = self._read_both(X, y, reset=True)
            self._fit(x, targets, self._weights(x, sample_weight), targets.shape[1], squared_errors)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None, *, task: Any = None) -> Self:
        """Goes over the samples once, with the net as it is: trained, edited, or made by the first
        call.

        Args:
            X: as for `fit`.
            y: as for `fit`.
            sample_weight: as for `fit`, beside the other samples of this call.
            task: what ends with these samples, for rules with `EveryTask`.
        """
        first = not hasattr(self, "training_")
        with unchanged_on_error(self):
            x, targets = self._read_both(X, y, reset=first)
            if first:
                self._begin(x, targets.shape[1])
            samples = Samples(x, targets, self._weights(x, sample_weight), self.net_)
            self._epoch(samples, squared_errors, task)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Returns the predicted target of every sample, or its targets."""
        outputs = self._outputs(X).numpy()
        return outputs[:, 0] if self._one_target else outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _read_both(self, x: Any, y: Any, *, reset: bool) -> tuple[Any, np.ndarray]:
        """Returns checked features and targets [n_samples, n_targets]."""
        x, y = self._read(x, y, reset=reset, multi_output=True, y_numeric=True)
        y = y.toarray() if hasattr(y, "toarray") else y
        if reset:
            self._one_target = y.ndim == 1
        targets = y.reshape(len(y), -1).astype(np.float64)
        if not reset and targets.shape[1] != self.training_.ends[1]:
            raise ValueError(
                f"y has {targets.shape[1]} targets, and the first call had {self.training_.ends[1]}"
            )
        return x, targets


def cross_entropies(outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of every sample: outputs [n, n_classes], labels [n] -> [n]."""
    return cross_entropy(outputs, labels, reduction="none")


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean squared error of every sample: both [n, n_targets] -> [n]."""
    return (outputs - targets).square().mean(1)
