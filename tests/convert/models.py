"""Dense models, training steps and bitwise pictures that the tests of conversion share."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.fingerprint import Same, as_bytes


class Block(nn.Module):
    """A residual block around a feed-forward stack, with a norm outside of it."""

    def __init__(self, width: int = 6, hidden: int = 9, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Model(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(seed: int = 0) -> Model:
    """Returns a model in double precision."""
    torch.manual_seed(seed)
    return Model().double()


def batch(seed: int, width: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Returns 16 samples and their classes."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(16, width, generator=draw, dtype=dtype), torch.randint(
        3, (16,), generator=draw
    )


def backward(model: nn.Module, seed: int, width: int = 5) -> float:
    """Adds the gradients of one batch; what is dropped depends on the seed alone."""
    x, y = batch(seed, width)
    torch.manual_seed(seed)
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


def train(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    seeds: Iterable[int],
    width: int = 5,
) -> None:
    """Takes one step per seed."""
    several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for seed in seeds:
        for optimizer in several:
            optimizer.zero_grad()
        backward(model, seed, width)
        for optimizer in several:
            optimizer.step()


def twin(model: Any, *optimizers: Optimizer) -> tuple[Any, ...]:
    """Returns copies of a model and of its optimizers; `load_state_dict` would give NAdam's numbers
    another dtype.
    """
    other, *followers = copy.deepcopy((model, *optimizers))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.grad = None if mine.grad is None else mine.grad.clone()
    return other, *followers


def difference(one: nn.Module, other: nn.Module) -> float:
    """Returns by how much two state dicts of the same keys differ."""
    mine = one.state_dict()
    theirs = other.state_dict()
    assert list(mine) == list(theirs)
    return max(float((mine[key] - theirs[key]).abs().max()) for key in mine)


def picture(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    """Returns contents as bytes and objects by identity: two equal pictures mean that nothing
    changed.
    """
    found: dict[str, Any] = {"random": as_bytes(torch.get_rng_state())}
    for name, module in model.named_modules(remove_duplicate=False):
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
        found[f"module {name}"] = (
            Same(module),
            plain,
            {k: Same(v) for k, v in module._modules.items()},
        )
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        found[f"hooks {name}"] = [Same(hook) for hook in hooks]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = (
            Same(parameter),
            _content(parameter),
            parameter.requires_grad,
            _content(parameter.grad),
        )
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[name] = Same(buffer), _content(buffer)
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            found[f"group {number} {place}"] = (
                Same(group),
                copy.copy(settings),
                [Same(p) for p in group["params"]],
            )
        for parameter, state in optimizer.state.items():
            known = {
                key: (Same(value), _content(value))
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
            found[f"state {number} {id(parameter)}"] = Same(parameter), list(state), known
    return found


def _content(value: Tensor | None) -> Any:
    if value is None or value.is_meta or type(value) is nn.UninitializedParameter:
        return None
    return as_bytes(value)
