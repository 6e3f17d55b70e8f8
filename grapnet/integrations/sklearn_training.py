"""What the estimators train: a net, an optimizer that follows it, and rules that change it, over
mini-batches.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

import grapnet as gn
from grapnet.rules import RuleManager

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs [n, n_outputs] and n targets -> [n]
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}
_ADVICE = (
    "Lower learning_rate, or scale the features (and, for regression, the targets), for instance"
    " with StandardScaler"
)
ROWS_AT_ONCE = 8192  # of a prediction, so that its memory does not grow with the data


class Samples:
    """Features, targets and weights, of which `batch` puts some rows where the net is.

    Args:
        x: [n, n_features], an array or a CSR matrix, whose rows are made dense a batch at a time.
        targets: n labels, or [n, n_outputs] numbers.
        weights: of the samples, or None; only their ratios count.
        net: the net that they are for.
    """

    def __init__(
        self, x: Any, targets: np.ndarray, weights: np.ndarray | None, net: gn.GrapNet
    ) -> None:
        if weights is not None:
            present = weights > 0
            if not present.any():
                raise ValueError("all sample weights are zero, which leaves nothing to learn from")
            if not present.all():
                x, targets, weights = x[present], targets[present], weights[present]
            weights = weights / weights.mean()
        whole = np.issubdtype(targets.dtype, np.integer)
        self._dtype = net.transitions[0].weight.dtype
        self._x = x if hasattr(x, "toarray") else tensor_of(x, self._dtype).to(net.device)
        self._targets = torch.as_tensor(
            targets, dtype=torch.int64 if whole else self._dtype, device=net.device
        )
        self._weights = (
            None
            if weights is None
            else torch.as_tensor(weights, dtype=self._dtype, device=net.device)
        )

    def __len__(self) -> int:
        return len(self._targets)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns features, targets and weights of some rows."""
        there = rows.to(self._targets.device)
        if isinstance(self._x, Tensor):
            x = self._x[there]
        else:
            x = tensor_of(self._x[rows.numpy()].toarray(), self._dtype).to(there.device)
        return x, self._targets[there], None if self._weights is None else self._weights[there]


@dataclass(eq=False)
class Training:
    """One net in training, from one call to the next; a copy, pickled or not, goes on alike.

    Attributes:
        net: the net, in evaluation mode except while it trains.
        optimizer: attached to it.
        rules: applied behind every step.
        generator: source of the order of the samples and of what dropout drops.
        ends: how many sensory and output nodes the data ask for.
        steps: how many steps were made; the number of the next.
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
        # what follows a net holds it weakly, and stays behind when it is copied
        self.__post_init__()

    def epoch(self, samples: Samples, loss: Loss, batch_size: int, task: Any = None) -> float:
        """Goes over the samples once, in random order, and returns their mean loss.

        Args:
            samples: what to learn.
            loss: of each sample.
            batch_size: samples a step.
            task: what ends with the last step, for rules that go by tasks.
        """
        self._require_ends()
        batches = torch.randperm(len(samples), generator=self.generator).split(batch_size)
        total = torch.zeros((), device=self.net.device, dtype=torch.float64)
        dropping = self._dropping()
        self.net.train()
        try:
            for number, rows in enumerate(batches, start=1):
                total += len(rows) * self._step(samples, rows, loss, dropping)
                with dropping:  # rules may run the net
                    self.rules.apply(
                        self.net, self.steps, task=task if number == len(batches) else None
                    )
                self.steps += 1
        finally:
            self.net.eval()
        mean = float(total) / len(samples)
        if not np.isfinite(mean):
            raise ValueError(f"the loss is {mean} after {self.steps} steps. {_ADVICE}")
        self._require_finite(samples.batch(batches[-1])[0])
        return mean

    def _step(
        self, samples: Samples, rows: Tensor, loss: Loss, dropping: AbstractContextManager[Any]
    ) -> Tensor:
        x, targets, weights = samples.batch(rows)
        self.optimizer.zero_grad()
        with dropping:
            outputs = self.net(x)
        losses = loss(outputs, targets)
        mean = (losses if weights is None else losses * weights).mean()
        mean.backward()
        self.optimizer.step()
        return mean.detach()

    def _dropping(self) -> AbstractContextManager[Any]:
        """Gives dropout, where there is some, its random numbers for one epoch."""
        drops = any(layer.dropout for layer in self.net.layers)
        return _DroppingFrom(self.generator, self.net.device) if drops else nullcontext()

    @torch.no_grad()
    def loss(self, samples: Samples, loss: Loss) -> float:
        """Returns the mean loss of samples that are not learned from."""
        total = 0.0
        with self._predicting() as net:
            for rows in torch.arange(len(samples)).split(ROWS_AT_ONCE):
                x, targets, weights = samples.batch(rows)
                losses = loss(net(x), targets)
                total += float((losses if weights is None else losses * weights).sum())
        return total / len(samples)

    @torch.no_grad()
    def outputs(self, x: Any) -> Tensor:
        """Returns what the net computes for x [n, n_features], an array or a CSR matrix: [n,
        n_outputs] on the CPU.
        """
        self._require_ends()
        parts = []
        with self._predicting() as net:
            for start in range(0, x.shape[0], ROWS_AT_ONCE):
                rows = x[start : start + ROWS_AT_ONCE]
                rows = rows.toarray() if hasattr(rows, "toarray") else rows
                parts.append(
                    net(tensor_of(rows, net.transitions[0].weight.dtype).to(net.device)).cpu()
                )
        return torch.cat(parts)

    @contextmanager
    def _predicting(self) -> Iterator[gn.GrapNet]:
        """Gives the net without dropout; no recorder takes predictions for training data."""
        net, training = self.net, self.net.training
        net.eval()
        try:
            with self.rules.pausing():
                yield net
        finally:
            net.train(training)

    @torch.no_grad()
    def _require_finite(self, x: Tensor) -> None:
        """Raises ValueError when the last step, after which no loss was computed, went too far."""
        with self._predicting() as net:
            outputs = net(x)
        if not all(bool(numbers.isfinite().all()) for numbers in (outputs, *self.net.parameters())):
            raise ValueError(
                f"the net computes numbers that are not finite after {self.steps} steps. {_ADVICE}"
            )

    def _require_ends(self) -> None:
        found = self.net.sizes[0], self.net.sizes[-1]
        if found != self.ends:
            raise ValueError(
                f"net_ has {found[0]} sensory and {found[1]} output nodes, and the data need"
                f" {self.ends[0]} and {self.ends[1]}: a feature or a class each. Cut relations"
                " instead, or call fit for other data; net_.undo() takes the last edit back"
            )


def tensor_of(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Returns an array as a tensor, without copying it where torch can share it."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(dtype)


def make_optimizer(
    net: gn.GrapNet, kind: str | Callable[..., Optimizer], learning_rate: float, weight_decay: float
) -> Optimizer:
    """Returns an optimizer of all Parameters, with weight decay for weights and none for biases.

    Args:
        net: whose Parameters.
        kind: "adam", "adamw", "sgd" (Nesterov momentum 0.9), or what makes one: called with groups
            and `lr`.
        learning_rate: the step size.
        weight_decay: of the weights.
    """
    if isinstance(kind, str) and kind not in OPTIMIZERS:
        raise ValueError(
            f"optimizer is {', '.join(map(repr, OPTIMIZERS))} or what makes one, got {kind!r}"
        )
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    groups = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    return (OPTIMIZERS[kind] if isinstance(kind, str) else kind)(groups, lr=learning_rate)


def make_manager(rules: Sequence[Any] | RuleManager | None, seed: int) -> RuleManager:
    """Returns a manager with copies of rules, so that no fit changes what the user gave.

    Args:
        rules: each a rule or a pair (rule, schedule); or a manager that has not worked yet, to be
            copied.
        seed: of the manager's generator; a given manager has its own.
    """
    if isinstance(rules, RuleManager):
        if rules.state_dict()["next_step"] is not None:
            raise ValueError(
                "rules is a RuleManager that has worked on a net already; give one that has only"
                " rules"
            )
        return copy.deepcopy(rules)
    if not (rules is None or isinstance(rules, Sequence)):
        raise TypeError(
            "rules is a sequence of rules or of pairs (rule, schedule), or a RuleManager; got"
            f" {rules!r}"
        )
    manager = RuleManager(seed=seed)
    for given in rules or ():
        pair = tuple(given) if isinstance(given, tuple | list) else (given,)
        if not 1 <= len(pair) <= 2:
            raise ValueError(
                f"one of the rules is a rule or a pair (rule, schedule), got {given!r}"
            )
        manager.inject(copy.deepcopy(pair[0]), **({"schedule": pair[1]} if len(pair) == 2 else {}))
    return manager


def run_with(net: gn.GrapNet, execution: str | Sequence[str], generator: torch.Generator) -> None:
    """Chooses a backend for all transitions, or one for each."""
    names = [execution] * len(net.transitions) if isinstance(execution, str) else list(execution)
    if len(names) != len(net.transitions):
        raise ValueError(
            f"execution names one backend, or one for each of {len(net.transitions)} transitions,"
            f" got {execution!r}"
        )
    for t, name in enumerate(names):
        net.execution.use(name, t, **({"generator": generator} if name == "attention" else {}))


class _DroppingFrom(TorchFunctionMode):
    """Makes dropout, which knows only torch's global random state, draw from a generator, in this
    thread alone.

    Threads that train beside each other, or draw numbers of their own, then neither wait for one
    another nor change what is dropped here.
    """

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        super().__init__()
        seed = int(torch.randint(2**62, (), generator=generator))
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._drop if func is dropout else func)(*args, **(kwargs or {}))

    def _drop(self, h: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        if not training:
            return h
        kept = torch.empty_like(h).bernoulli_(1 - p, generator=self._generator)
        return h * (kept if p == 1 else kept.div_(1 - p))
