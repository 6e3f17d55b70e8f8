"""refresh_statistics: BatchNorm after a cut, and nothing else."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import grapnet as gn
from grapnet.spaces import Example, refresh_statistics
from tests.spaces import oracle, zoo


def model_with(*, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(dropout), nn.Linear(5, 4), nn.BatchNorm1d(4)
    )


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 6, generator=generator) + number for number in range(count)]


def test_the_statistics_are_the_average_over_all_batches() -> None:
    model = model_with(dropout=0.5).eval()
    norm: Any = model[1]
    refresh_statistics(model, batches())
    hidden = [model[0](x).detach() for x in batches()]
    means = torch.stack([h.mean(0) for h in hidden])
    variances = torch.stack([h.var(0) for h in hidden])
    torch.testing.assert_close(norm.running_mean, means.mean(0))
    torch.testing.assert_close(norm.running_var, variances.mean(0))
    assert int(norm.num_batches_tracked) == 4
    # Dropout is off, so a second pass sees the same numbers.
    first = norm.running_mean.clone()
    last = model[4].running_mean.clone()
    refresh_statistics(model, batches())
    assert torch.equal(norm.running_mean, first)
    assert torch.equal(model[4].running_mean, last)


def test_without_other_layers_of_two_modes_it_equals_update_bn() -> None:
    one = model_with()
    other = model_with()
    refresh_statistics(one, batches())
    update_bn(batches(), other)
    assert oracle.same(*map(_contents, (one, other))) == []


def _contents(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_modes_momenta_and_gradients_stay() -> None:
    model = model_with(dropout=0.3).train()
    model[1].eval()
    norm: Any = model[4]
    norm.momentum = 0.25
    modes = [part.training for part in model.modules()]
    state = torch.get_rng_state()
    refresh_statistics(model, batches())
    assert [part.training for part in model.modules()] == modes
    assert norm.momentum == 0.25
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_momentum_moves_the_present_statistics() -> None:
    model = model_with()
    norm: Any = model[1]
    norm.running_mean.fill_(3.0)
    (x,) = batches(1)
    refresh_statistics(model, [x], momentum=0.5)
    torch.testing.assert_close(norm.running_mean, 1.5 + 0.5 * model[0](x).detach().mean(0))
    assert norm.momentum == 0.1


def broken() -> Iterator[Tensor]:
    yield from batches(2)
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (broken, OSError),
        (lambda: [*batches(2), torch.randn(3, 7)], RuntimeError),
        (lambda: [*batches(2), torch.randn(1, 6)], ValueError),
        (lambda: [], ValueError),
    ],
    ids=["data", "shape", "one sample", "no batch"],
)
def test_everything_is_as_before_when_a_batch_raises(given: Any, error: Any) -> None:
    model = model_with(dropout=0.5).train()
    refresh_statistics(model, batches(3))
    before = oracle.snapshot(model)
    with pytest.raises(error):
        refresh_statistics(model, given())
    assert oracle.same(before, oracle.snapshot(model)) == []


def test_a_model_without_running_statistics_is_refused() -> None:
    for model in (nn.Linear(6, 2), nn.BatchNorm1d(6, track_running_stats=False)):
        with pytest.raises(ValueError, match="BatchNorm"):
            refresh_statistics(model, batches())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return self.norm(x + shift)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, torch.zeros(len(x))),
        lambda x: [x],
        lambda x: {"x": x},
        lambda x: Example((x,), {"shift": 0.0}),
    ],
    ids=["tensor", "tuple", "list", "dict", "example"],
)
def test_batches_may_come_as_a_loader_returns_them(wrap: Any) -> None:
    model = Named()
    refresh_statistics(model, [wrap(x) for x in batches()])
    torch.testing.assert_close(model.norm.running_mean, torch.stack(batches()).mean((0, 1)))


def test_it_follows_a_cut_of_an_adopted_model() -> None:
    case = zoo.MODELS["resnet"]()
    net = gn.adopt(case.model, *case.inputs)
    with net.edit() as edit:
        for space in net.spaces:
            if not space.pins:
                edit.remove_nodes(space.weakest(fraction=0.3))
    plain = copy.deepcopy(case.model)
    update_bn([case.inputs[0]], plain)
    refresh_statistics(net, [case.inputs[0]])
    assert oracle.same(*map(_contents, (case.model, plain))) == []
    assert len(net.history) == 1
    net.undo()
    gn.check(net)
