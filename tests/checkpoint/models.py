"""Models with nets inside, trained and edited, and what they hold as text."""

from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn

from .files import as_text


class Counting(nn.Module):
    """Counts batches outside of any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        return x

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "by": ("plain", 1.5)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Tied(nn.Module):
    """Two nets, one of them used twice, and an embedding whose weight is also the output's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.first = gn.GrapNet([6, 5, 6], activation="tanh")
        self.second = gn.GrapNet([6, 4, 6])
        self.again = nn.ModuleDict({"first": self.first})
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.embedding(x)))
        return self.out(self.again["first"](x))


def conv(head: nn.Module | None = None) -> nn.Sequential:
    """Returns an encoder and a head: dense, or what is given."""
    encoder = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), Counting()
    )
    return nn.Sequential(
        encoder, head or nn.Sequential(nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 4))
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    """Trains on random batches and returns the losses."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        is_tied = hasattr(model, "embedding")
        if is_tied:
            x = torch.randint(7, (8, 3), generator=generator)
        else:
            x = torch.randn(8, 1, 6, 6, generator=generator)
        loss = (model(x) - 0.5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def edit(net: gn.GrapNet, reason: str = "test") -> None:
    """Cuts, grows and freezes a little of everything."""
    with net.edit(reason=reason, generator=torch.Generator().manual_seed(1)) as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=5))
        edit.connect(edit.add_nodes(1, 2, owner=reason), net.layers[2][:3])
        edit.freeze(net.layers[1][:1])


def nets_in(model: nn.Module) -> list[gn.GrapNet]:
    """Returns the nets of a model, each once."""
    return [module for module in model.modules() if isinstance(module, gn.GrapNet)]


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model whose nets were edited in the middle of training, and its optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for net in nets_in(model):
        gn.attach(optimizer, net)
    train(model, optimizer, 3, seed=1)
    for n, net in enumerate(nets_in(model)):
        edit(net, f"edit {n}")
    train(model, optimizer, 2, seed=2)
    return model, optimizer


def conv_with_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns an encoder with a net behind it, and the optimizer of both."""
    return trained(conv(gn.GrapNet([48, 8, 4], activation="tanh")))


def content(model: nn.Module) -> str:
    """Returns everything a model holds and is, as text that is equal only bit for bit."""
    nets = [
        (net.version, net._next_uid, [repr(commit) for commit in net.history])
        for net in nets_in(model)
    ]
    modules = [
        (name, id(module), module.training)
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    parameters = [
        (name, id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)
    ]
    return as_text([dict(model.state_dict()), nets, modules, parameters])


def values(model: nn.Module) -> str:
    """Returns the state dict of a model as text."""
    return as_text(dict(model.state_dict()))
