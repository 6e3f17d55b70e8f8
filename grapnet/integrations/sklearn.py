"""GrapNetClassifier and GrapNetRegressor: scikit-learn estimators with an editable net."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import grapnet as gn
from grapnet.rules import RuleManager

from ._extra import require

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets, unique_labels
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ModuleNotFoundError:
    require("sklearn", "sklearn")
    raise

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs [n, n_outputs] and n targets -> [n]
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
ROWS_AT_ONCE = 8192  # of a prediction, so that its memory does not grow with the data


class _Samples:
    """Features, targets and weights, of which `batch` moves some rows to the device of the net.

    Args:
        x: [n, n_features], an array or a CSR matrix, whose rows become dense a batch at a time.
        targets: n labels, or [n, n_outputs] numbers.
        weights: of the samples, or None; only their ratios count.
        net: the net to train.
    """

    def __init__(
        self, x: Any, targets: np.ndarray, weights: np.ndarray | None, net: gn.GrapNet
    ) -> None:
        self._net = net
        self._weights = None
        if weights is not None:
            # scikit-learn expects a weight of zero to equal an absent sample.
            present = weights > 0
            if not present.any():
                raise ValueError("all sample weights are zero")
            x = x[present]
            targets = targets[present]
            weights = weights[present]
            self._weights = _tensor(weights / weights.mean(), net)
        self._x = x
        if not hasattr(x, "toarray"):
            self._x = _tensor(x, net)
        if np.issubdtype(targets.dtype, np.integer):
            self._targets = torch.as_tensor(targets, dtype=torch.int64, device=net.device)
        else:
            self._targets = _tensor(targets, net)

    def __len__(self) -> int:
        return len(self._targets)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns features, targets and weights of some rows."""
        there = rows.to(self._targets.device)
        if isinstance(self._x, Tensor):
            x = self._x[there]
        else:
            x = _tensor(self._x[rows.numpy()], self._net)
        if self._weights is None:
            return x, self._targets[there], None
        return x, self._targets[there], self._weights[there]


def _tensor(array: Any, net: gn.GrapNet) -> Tensor:
    """Returns an array or a CSR matrix as a tensor like the weights of a net."""
    if hasattr(array, "toarray"):
        array = array.toarray()
    writable = np.require(array, requirements=["C", "W"])
    return torch.from_numpy(writable).to(net.device, net.transitions[0].weight.dtype)


@dataclass(eq=False)
class _Training:
    """One net in training, from one call to the next; a copy, pickled or not, continues alike.

    Attributes:
        net: the net, in evaluation mode except while it trains.
        optimizer: attached to it.
        rules: applied after every step.
        generator: source of the order of the samples and of dropout.
        ends: the numbers of sensory and of output nodes that the data need.
        steps: the number of steps made, and the number of the next.
    """

    net: gn.GrapNet
    optimizer: Optimizer
    rules: RuleManager
    generator: torch.Generator
    ends: tuple[int, int]
    steps: int = 0

    def __post_init__(self) -> None:
        self.net.eval()
        gn.attach(self.optimizer, self.net)
        self.rules.start(self.net, self.steps)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # Followers hold a net weakly, and are not copied with it.
        self.__post_init__()

    def epoch(self, samples: _Samples, loss: Loss, batch_size: int, task: Any = None) -> float:
        """Trains on the samples once, in random order, and returns their mean loss.

        Args:
            samples: the training data.
            loss: of each sample.
            batch_size: samples per step.
            task: the task that ends with the last step, for rules that go by tasks.
        """
        self._require_ends()
        batches = torch.randperm(len(samples), generator=self.generator).split(batch_size)
        total = torch.zeros((), device=self.net.device, dtype=torch.float64)
        self.net.train()
        try:
            with self._own_random_state():
                for number, rows in enumerate(batches, start=1):
                    total += len(rows) * self._step(samples, rows, loss)
                    ended = task if number == len(batches) else None
                    self.rules.apply(self.net, self.steps, task=ended)
                    self.steps += 1
        finally:
            self.net.eval()
        mean = float(total) / len(samples)
        if not np.isfinite(mean):
            raise ValueError(
                f"the loss is {mean} after {self.steps} steps. Lower learning_rate, or scale the"
                " features and targets"
            )
        return mean

    def _step(self, samples: _Samples, rows: Tensor, loss: Loss) -> Tensor:
        x, targets, weights = samples.batch(rows)
        self.optimizer.zero_grad()
        mean = _weighted(loss(self.net(x), targets), weights).mean()
        mean.backward()
        self.optimizer.step()
        return mean.detach()

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """Makes dropout draw from the generator; torch's random state is restored at the end."""
        seed = int(torch.randint(2**62, (), generator=self.generator))
        device = self.net.device
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type):
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.get_device_module(device).manual_seed(seed)
            yield

    @torch.no_grad()
    def loss(self, samples: _Samples, loss: Loss) -> float:
        """Returns the mean loss of samples that are not trained on."""
        total = 0.0
        with self._predicting() as net:
            for rows in torch.arange(len(samples)).split(ROWS_AT_ONCE):
                x, targets, weights = samples.batch(rows)
                total += float(_weighted(loss(net(x), targets), weights).sum())
        return total / len(samples)

    @torch.no_grad()
    def outputs(self, x: Any) -> Tensor:
        """Returns the outputs, [n, n_outputs] on the CPU, for an array or a CSR matrix."""
        self._require_ends()
        parts = []
        with self._predicting() as net:
            for start in range(0, x.shape[0], ROWS_AT_ONCE):
                parts.append(net(_tensor(x[start : start + ROWS_AT_ONCE], net)).cpu())
        return torch.cat(parts)

    @contextmanager
    def _predicting(self) -> Iterator[gn.GrapNet]:
        """Gives the net without dropout; recorders of rules do not see predictions."""
        training = self.net.training
        self.net.eval()
        try:
            with self.rules.pausing():
                yield self.net
        finally:
            self.net.train(training)

    def _require_ends(self) -> None:
        found = self.net.sizes[0], self.net.sizes[-1]
        if found != self.ends:
            raise ValueError(
                f"net_ has {found[0]} sensory and {found[1]} output nodes, and the data need"
                f" {self.ends[0]} and {self.ends[1]}, one per feature and class. Cut relations"
                " instead, or call fit for other data; net_.undo() reverts the last edit"
            )


def _weighted(losses: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return losses
    return losses * weights


class _FittedEstimator(BaseEstimator):
    """The attributes of an estimator that was fitted."""

    training_: _Training
    classes_: np.ndarray
    loss_curve_: list[float]
    validation_loss_curve_: list[float]
    n_features_in_: int

    @property
    def net_(self) -> gn.GrapNet:
        """The fitted net, which can be edited, run and saved."""
        return self.training_.net

    @property
    def optimizer_(self) -> Optimizer:
        """The optimizer, which follows every edit of `net_`."""
        return self.training_.optimizer

    @property
    def rules_(self) -> RuleManager:
        """The manager of the rules; add or disable some between two calls of `partial_fit`."""
        return self.training_.rules

    @property
    def n_iter_(self) -> int:
        """The number of epochs trained; every `partial_fit` is one."""
        return len(self.loss_curve_)

    @property
    def n_steps_(self) -> int:
        """The number of training steps, which schedules of rules count."""
        return self.training_.steps

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


# The dataclass writes an `__init__` of plain assignments, as scikit-learn expects it.
@dataclass(eq=False, repr=False)
class _NetEstimator(_FittedEstimator):
    """A net that is fitted; `GrapNetClassifier` documents the parameters."""

    hidden_layer_sizes: int | Sequence[int] = (100,)
    _: KW_ONLY
    activation: str | Sequence[str] = "relu"
    density: float = 1.0
    distribution: str = "uniform"
    dropout: float = 0.0
    optimizer: str | Callable[..., Optimizer] = "adam"
    learning_rate: float = 0.003
    weight_decay: float = 0.0
    batch_size: int = 200
    max_epochs: int = 100
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    tol: float = 1e-4
    rules: Sequence[Any] | RuleManager | None = None
    execution: str | Sequence[str] = "auto"
    dtype: str | None = None
    device: str = "cpu"
    random_state: Any = None
    verbose: int = 0

    def _read(self, x: Any, y: Any = "no_validation", *, reset: bool, **options: Any) -> Any:
        """Returns checked features, and targets when there are some.

        Features of float32 stay, all others become float64.
        """
        dtypes = (np.float64, np.float32)
        return validate_data(self, x, y, reset=reset, accept_sparse="csr", dtype=dtypes, **options)

    def _weights(self, x: Any, sample_weight: Any) -> np.ndarray | None:
        """Returns checked weights of the samples, or None when all weigh the same."""
        if sample_weight is None:
            return None
        return _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)

    def _begin(self, x: Any, n_outputs: int) -> np.random.RandomState:
        """Makes net, optimizer and rules for data like these; returns the random state."""
        sizes: Any = self.hidden_layer_sizes
        if not isinstance(sizes, Iterable):
            sizes = [sizes]
        random = check_random_state(self.random_state)
        net_seed, rules_seed = random.randint(np.iinfo(np.int32).max, size=2).tolist()
        generator = torch.Generator().manual_seed(net_seed)
        net = gn.GrapNet(
            [x.shape[1], *sizes, n_outputs],
            activation=self.activation,
            density=self.density,
            distribution=self.distribution,  # pyright: ignore[reportArgumentType]
            device=self.device,
            dtype=DTYPES[self.dtype or str(x.dtype)],
            generator=generator,
        )
        for layer in net.layers[1:-1]:
            layer.dropout = self.dropout
        _choose_backends(net, self.execution, generator)
        optimizer = self._make_optimizer(net)
        manager = _make_manager(self.rules, rules_seed)
        self.training_ = _Training(net, optimizer, manager, generator, (x.shape[1], n_outputs))
        self.loss_curve_ = []
        vars(self).pop("validation_loss_curve_", None)
        return random

    def _make_optimizer(self, net: gn.GrapNet) -> Optimizer:
        """Returns an optimizer with weight decay for weights and none for biases."""
        make = self.optimizer
        if isinstance(make, str):
            if make not in OPTIMIZERS:
                raise ValueError(f"optimizer is one of {list(OPTIMIZERS)}, got {make!r}")
            make = OPTIMIZERS[make]
        weights = [p for p in net.parameters() if p.dim() > 1]
        biases = [p for p in net.parameters() if p.dim() == 1]
        groups = [
            {"params": weights, "weight_decay": self.weight_decay},
            {"params": biases, "weight_decay": 0.0},
        ]
        return make(groups, lr=self.learning_rate)

    def _fit(
        self, x: Any, targets: np.ndarray, weights: np.ndarray | None, n_outputs: int, loss: Loss
    ) -> None:
        """Trains a new net, and warns of rules that were scheduled after the last step."""
        random = self._begin(x, n_outputs)
        if self.early_stopping:
            self._train_until_it_stops(x, targets, weights, loss, random)
        else:
            samples = _Samples(x, targets, weights, self.net_)
            for _ in range(self.max_epochs):
                self._epoch(samples, loss)
        left = self.rules_.never_due(self.n_steps_)
        if left:
            warnings.warn(
                f"rules were never due: {', '.join(left)}. The fit made {self.n_steps_} steps,"
                " numbered from 0, and schedules count steps, not epochs",
                stacklevel=3,
            )

    def _train_until_it_stops(
        self,
        x: Any,
        targets: np.ndarray,
        weights: np.ndarray | None,
        loss: Loss,
        random: np.random.RandomState,
    ) -> None:
        """Trains until the loss of held-out samples no longer falls, or for `max_epochs`."""
        labels = targets if np.issubdtype(targets.dtype, np.integer) else None
        parts = []
        for rows in train_test_split(
            np.arange(x.shape[0]),
            test_size=self.validation_fraction,
            stratify=labels,
            random_state=random,
        ):
            chosen = None if weights is None else weights[rows]
            parts.append(_Samples(x[rows], targets[rows], chosen, self.net_))
        learned, held = parts
        self.validation_loss_curve_ = []
        best = np.inf
        since = 0
        while len(self.loss_curve_) < self.max_epochs and since < self.n_iter_no_change:
            self._epoch(learned, loss)
            found = self.training_.loss(held, loss)
            self.validation_loss_curve_.append(found)
            since += 1
            if found < best - self.tol:
                since = 0
            best = min(best, found)

    def _epoch(self, samples: _Samples, loss: Loss, task: Any = None) -> None:
        self.loss_curve_.append(self.training_.epoch(samples, loss, self.batch_size, task))
        if self.verbose:
            relations = self.net_.count().relations
            print(f"epoch {self.n_iter_}: loss {self.loss_curve_[-1]:.6f}, {relations:,} relations")

    def _outputs(self, x: Any) -> Tensor:
        """Returns the outputs of the net, [n, n_outputs]."""
        check_is_fitted(self)
        return self.training_.outputs(self._read(x, reset=False))

    @contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """Restores the attributes when the block raises."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise


def _make_manager(rules: Sequence[Any] | RuleManager | None, seed: int) -> RuleManager:
    """Returns a manager with copies of rules, so that no fit changes those of the user."""
    if isinstance(rules, RuleManager):
        if rules.state_dict()["next_step"] is not None:
            raise ValueError("rules is a RuleManager that was used already")
        return copy.deepcopy(rules)
    manager = RuleManager(seed=seed)
    for given in rules or ():
        if isinstance(given, tuple | list):
            rule, schedule = given
            manager.add(copy.deepcopy(rule), schedule=schedule)
        else:
            manager.add(copy.deepcopy(given))
    return manager


def _choose_backends(
    net: gn.GrapNet, execution: str | Sequence[str], generator: torch.Generator
) -> None:
    """Chooses a backend for all transitions, or one for each."""
    names = execution
    if isinstance(names, str):
        names = [names] * len(net.transitions)
    for t, name in zip(range(len(net.transitions)), names, strict=True):
        net.execution.use(name, t, generator=generator)


@dataclass(eq=False, repr=False, kw_only=True)
class GrapNetClassifier(ClassifierMixin, _NetEstimator):
    """A classifier with an editable net, `net_`, that has one output node per class.

    Equal data and an equal `random_state` give equal nets, and torch's global random state is not
    used. A `fit` that raises leaves the estimator unchanged; a `partial_fit` that raises keeps its
    steps.

    Args:
        hidden_layer_sizes: the number of nodes of each hidden layer; empty for a linear model.
        activation: of the hidden nodes, or a name for every layer after the sensory one.
        density: the share of possible relations that exist at first.
        distribution: how they are distributed over the transitions, "uniform" or "erk".
        dropout: the probability with which the output of a hidden node is 0 in training.
        optimizer: "adam", "adamw", "sgd" (Nesterov momentum 0.9), or a callable that takes groups
            of Parameters and `lr`, such as `torch.optim.RMSprop`.
        learning_rate: its step size.
        weight_decay: its weight decay; biases are spared.
        batch_size: the largest number of samples per step.
        max_epochs: the number of epochs of `fit`, at most.
        early_stopping: whether `fit` holds out samples and stops when their loss does not fall. It
            keeps the last net; an earlier one could undo what rules did.
        validation_fraction: the share of samples to hold out.
        n_iter_no_change: after how many epochs without improvement to stop.
        tol: what counts as an improvement.
        rules: rules that change the structure during training: a sequence of rules or pairs (rule,
            schedule), or an unused `RuleManager`. Every fit copies them. Schedules count training
            steps, of which an epoch has n_samples / batch_size, rounded up.
        execution: a backend for all transitions ("auto", "dense", "sparse", "family", "attention",
            …), or one for each.
        dtype: "float32" or "float64"; None computes float32 features in float32, all others in
            float64.
        device: the device to train on.
        random_state: an int for repeatable results.
        verbose: 1 prints a line per epoch.
        class_weight: a dict from class to weight; "balanced" weighs classes by the inverse of their
            frequency.

    Attributes:
        classes_: the labels, in the order of the output nodes.
        net_, optimizer_, rules_: the net, its optimizer, and the manager of the rules.
        n_iter_, n_steps_: the numbers of epochs and of steps trained.
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

    class_weight: dict[Any, float] | str | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains a new net.

        Args:
            X: [n_samples, n_features], an array, a data frame or a sparse matrix.
            y: the class of every sample.
            sample_weight: the weight of every sample, relative to the others.
        """
        with self._unchanged_on_error():
            x, y = self._read(X, y, reset=True)
            check_classification_targets(y)
            self.classes_, labels = np.unique(y, return_inverse=True)
            weights = self._weights_of(x, labels, sample_weight)
            self._fit(x, labels, weights, len(self.classes_), _cross_entropies)
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
        """Trains one epoch with the net as it is: trained, edited, or made by the first call.

        Args:
            X: as for `fit`.
            y: as for `fit`.
            classes: all classes there will be; needed in the first call.
            sample_weight: as for `fit`, relative to the other samples of this call.
            task: the task that ends with these samples, for rules with `EveryTask`.
        """
        first = not hasattr(self, "training_")
        with self._unchanged_on_error():
            if first and classes is None:
                raise ValueError("classes must be passed on the first call to partial_fit")
            if self.class_weight == "balanced":
                raise ValueError(
                    'class_weight="balanced" needs all data at once, and partial_fit has a part;'
                    " give a dict of weights"
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
            samples = _Samples(x, labels, self._weights_of(x, labels, sample_weight), self.net_)
            self._epoch(samples, _cross_entropies, task)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Returns the most probable class of every sample."""
        places = self._outputs(X).argmax(1).numpy()
        return self.classes_[places]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns the probabilities, [n_samples, n_classes], in the order of `classes_`."""
        return self._outputs(X).softmax(1).numpy()

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Returns the logarithms of the probabilities."""
        return self._outputs(X).log_softmax(1).numpy()

    def _labels(self, y: np.ndarray) -> np.ndarray:
        """Returns the places of labels in `classes_`."""
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
        if weights is None:
            return of_classes[labels]
        return of_classes[labels] * weights


class GrapNetRegressor(RegressorMixin, _NetEstimator):
    """A regressor with squared error and an editable net, `net_`, that has one output node per
    target.

    Scale large targets, for example with `TransformedTargetRegressor`. All parameters and
    attributes are those of `GrapNetClassifier`, except `class_weight` and `classes_`.

    Examples:
        >>> x = np.linspace(-2, 2, 200).reshape(-1, 1)
        >>> model = GrapNetRegressor((32,), learning_rate=0.02, random_state=0).fit(
        ...     x, np.sin(x[:, 0])
        ... )
        >>> model.score(x, np.sin(x[:, 0])) > 0.95
        True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains a new net.

        Args:
            X: [n_samples, n_features], an array, a data frame or a sparse matrix.
            y: [n_samples] or [n_samples, n_targets]; predictions have the same shape.
            sample_weight: the weight of every sample, relative to the others.
        """
        with self._unchanged_on_error():
            x, targets = self._read_both(X, y, reset=True)
            self._fit(
                x, targets, self._weights(x, sample_weight), targets.shape[1], _squared_errors
            )
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None, *, task: Any = None) -> Self:
        """Trains one epoch with the net as it is: trained, edited, or made by the first call.

        Args:
            X: as for `fit`.
            y: as for `fit`.
            sample_weight: as for `fit`, relative to the other samples of this call.
            task: the task that ends with these samples, for rules with `EveryTask`.
        """
        first = not hasattr(self, "training_")
        with self._unchanged_on_error():
            x, targets = self._read_both(X, y, reset=first)
            if first:
                self._begin(x, targets.shape[1])
            samples = _Samples(x, targets, self._weights(x, sample_weight), self.net_)
            self._epoch(samples, _squared_errors, task)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Returns the predicted target of every sample, or its targets."""
        outputs = self._outputs(X).numpy()
        if self._one_target:
            return outputs[:, 0]
        return outputs

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


def _cross_entropies(outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of every sample: outputs [n, n_classes], labels [n] -> [n]."""
    return cross_entropy(outputs, labels, reduction="none")


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean squared error of every sample: both [n, n_targets] -> [n]."""
    return (outputs - targets).square().mean(1)
