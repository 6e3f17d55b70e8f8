"""A file does not care what `torch.compile` wraps, in the saved model or in the other; only wrapped
nets stay put.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import grapnet as gn

from .files import as_text
from .models import content


def wrapped(part: nn.Module) -> nn.Module:
    return torch.compile(part, backend="eager")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), gn.GrapNet([4, 3]), nn.BatchNorm1d(3))


def with_part(n: int) -> nn.Module:
    made = model()
    made[n] = wrapped(made[n])
    return made


def tied() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), gn.GrapNet([3, 2]))
    made[1].weight = made[0].weight
    return made


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "all, then nothing": (lambda: wrapped(model()), model),
    "nothing, then all": (model, lambda: wrapped(model())),
    "a part, then nothing": (lambda: with_part(2), model),
    "nothing, then a part": (model, lambda: with_part(2)),
    "a part, then another": (lambda: with_part(0), lambda: with_part(2)),
    "all and a net, then nothing": (lambda: wrapped(with_part(1)), model),
    "a net, then all": (lambda: with_part(1), lambda: wrapped(model())),
    "inside, then not": (lambda: nn.Sequential(wrapped(model())), lambda: nn.Sequential(model())),
    "tied, then all": (tied, lambda: wrapped(tied())),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_does_not_matter_which_of_two_models_is_compiled(tmp_path: Path, way: str) -> None:
    saved, fresh = (make() for make in WAYS[way])
    optimizer = torch.optim.SGD(saved.parameters(), 0.1, momentum=0.9)
    for parameter in saved.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    gn.save(tmp_path / "run", saved, undo=True, optimizer=optimizer)
    gn.restore(tmp_path / "run", into=fresh)
    again = torch.optim.SGD(fresh.parameters(), 0.1, momentum=0.9)
    gn.restore(tmp_path / "run", optimizer=again)
    assert as_text(list(fresh.parameters())) == as_text(list(saved.parameters()))
    assert as_text(list(fresh.buffers())) == as_text(list(saved.buffers()))
    assert as_text(again.state_dict()) == as_text(optimizer.state_dict())


def test_a_net_that_torch_compile_holds_is_not_replaced(tmp_path):
    saved = model()
    fresh = model()
    plain = model()
    net = saved[1]
    saved[1] = wrapped(net)
    fresh[1] = wrapped(fresh[1])
    gn.save(tmp_path / "run", saved)
    before = content(fresh)
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "run", into=fresh)
    assert content(fresh) == before
    gn.restore(tmp_path / "run", into=plain)  # to be compiled afterwards
    assert as_text(dict(plain[1].state_dict())) == as_text(dict(net.state_dict()))


def test_a_compiled_net_is_saved_as_the_net(tmp_path):
    net = gn.GrapNet([4, 3])
    optimizer = torch.optim.Adam(net.parameters())
    gn.save(tmp_path / "run", wrapped(net), undo=True, optimizer=optimizer)
    loaded = gn.load(tmp_path / "run")
    gn.restore(tmp_path / "run", optimizer=torch.optim.Adam(loaded.parameters()))
    assert as_text(dict(loaded.state_dict())) == as_text(dict(net.state_dict()))
