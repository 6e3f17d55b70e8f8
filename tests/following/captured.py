"""Models that train with captured steps, each beside a twin that trains with a plain loop."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import grapnet as gn

FEATURES = 12
CLASSES = 5


def small_net(device: str, backend: str = "auto") -> gn.GrapNet:
    """Returns a net with dropout in which some relations are absent."""
    net = gn.GrapNet([FEATURES, 24, CLASSES], density=0.7, device=device)
    net.layers[1].dropout = 0.2
    net.execution.use(backend)
    return net


class Grafted(nn.Module):
    """Plain modules with a net among them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16, device=device)
        self.norm = nn.BatchNorm1d(16, device=device)
        self.head = gn.GrapNet([16, 10, CLASSES], density=0.7, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).relu())


def plain_model(device: str) -> nn.Module:
    """Returns a model without nets."""
    stack = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.3))
    return stack.append(nn.Linear(16, CLASSES)).to(device)


def batch(seed: int, device: str, rows: int = 32) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (rows,), generator=generator)
    return x.to(device), y.to(device)


class Twins:
    """Two equal models: the first trains with a captured step, the second with a plain loop.

    Args:
        model: the model.
        optimize: makes an optimizer of Parameters.
        clip: the largest norm of the gradients.
        scale: makes a GradScaler.
        autocast: the dtype of mixed precision.
    """

    def __init__(
        self,
        model: nn.Module,
        optimize: Callable[[Any], Optimizer],
        *,
        clip: float | None = None,
        scale: Callable[[], torch.amp.GradScaler] | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.models = [model, copy.deepcopy(model)]
        self.optimizers = [optimize(one.parameters()) for one in self.models]
        self.scalers: list[torch.amp.GradScaler | None] = [None, None]
        if scale is not None:
            self.scalers = [scale(), scale()]
        self._clip = clip
        self._autocast = autocast
        self.device = next(model.parameters()).device.type
        for one, optimizer in zip(self.models, self.optimizers, strict=True):
            if any(isinstance(module, gn.GrapNet) for module in one.modules()):
                gn.attach(optimizer, one)
        self.step = gn.capture(
            lambda x, y: self._loss(0, x, y),
            model,
            self.optimizers[0],
            after_backward=None if clip is None else lambda: self._clipped(0),
            scaler=self.scalers[0],
        )
        self.seed = 0

    def _loss(self, number: int, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device, self._autocast, enabled=self._autocast is not None):
            return cross_entropy(self.models[number](x), y)

    def _clipped(self, number: int) -> None:
        assert self._clip is not None
        nn.utils.clip_grad_norm_(self.models[number].parameters(), self._clip)

    def plain_step(self, x: Tensor, y: Tensor) -> Tensor:
        """Makes the step of the second model, as a user writes it."""
        optimizer = self.optimizers[1]
        scaler = self.scalers[1]
        optimizer.zero_grad()
        loss = self._loss(1, x, y)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        if self._clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            self._clipped(1)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    def both(self, rows: int = 32) -> tuple[Tensor, Tensor]:
        """Lets both models take a step with the same batch and the same random numbers; returns
        both losses.
        """
        self.seed += 1
        x, y = batch(self.seed, self.device, rows)
        torch.manual_seed(self.seed)
        captured = self.step(x, y)
        assert isinstance(captured, Tensor)
        torch.manual_seed(self.seed)
        return captured, self.plain_step(x, y)

    def train(self, steps: int, *, rtol: float = 0.0) -> None:
        """Takes steps, and compares losses, weights, gradients, buffers and optimizer state."""
        for _ in range(steps):
            torch.testing.assert_close(*self.both(), rtol=rtol, atol=rtol / 10)
        self.compare(rtol=rtol)

    def compare(self, *, rtol: float = 0.0) -> None:
        """Compares weights, gradients, buffers and optimizer state."""

        def close(one: Any, other: Any, name: str) -> None:
            torch.testing.assert_close(
                one, other, rtol=10 * rtol, atol=rtol, msg=lambda text: f"{name}: {text}"
            )

        captured, plain = self.models
        for (name, one), other in zip(captured.named_parameters(), plain.parameters(), strict=True):
            close(one, other, name)
            close(one.grad, other.grad, f"the gradient of {name}")
            state = self.optimizers[0].state[one]
            for entry, value in self.optimizers[1].state[other].items():
                own = torch.as_tensor(state[entry]).cpu()
                close(own, torch.as_tensor(value).cpu(), f"{entry} of {name}")
        for one, other in zip(captured.buffers(), plain.buffers(), strict=True):
            close(one, other, "a buffer")

    def edit(self, operate: Callable[[Any], None]) -> None:
        """Does the same to both models."""
        for model in self.models:
            operate(model)
