"""Encoders in front of a net: gradients reach them as they would through plain modules, and edits
leave them alone.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import grapnet as gn

WIDTH = 8  # of what every encoder gives: one coordinate a sensory node


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


class Attention(nn.Module):
    """One query, which is learned, over all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[
            0
        ].squeeze(1)


class Pooled(nn.Module):
    """torch's transformer, and the mean over positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1)


def cnn() -> tuple[nn.Module, Tensor]:
    pool = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten())
    return pool, torch.randn(12, 1, 8, 8)


def resnet() -> tuple[nn.Module, Tensor]:
    stem = nn.Sequential(
        nn.Conv2d(1, WIDTH, 3),
        Residual(WIDTH),
        Residual(WIDTH),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return stem, torch.randn(12, 1, 8, 8)


def attention() -> tuple[nn.Module, Tensor]:
    return Attention(WIDTH), torch.randn(12, 5, WIDTH)


def transformer() -> tuple[nn.Module, Tensor]:
    return Pooled(WIDTH), torch.randn(12, 5, WIDTH)


ENCODERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    build.__name__: build for build in (cnn, resnet, attention, transformer)
}
every_encoder = pytest.mark.parametrize("build", ENCODERS.values(), ids=ENCODERS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def composed(build: Callable[[], tuple[nn.Module, Tensor]]) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Returns encoder and net as one model, with inputs and classes."""
    encoder, x = build()
    return nn.Sequential(encoder, gn.GrapNet([WIDTH, 10, 3])), x, torch.randint(3, (len(x),))


def cut_and_grow(net: gn.GrapNet) -> None:
    with net.edit(reason="cut and grow") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.3))
        grown = edit.add_nodes(1, 2)
        edit.connect(net.layers[0], grown)
        edit.connect(grown, net.layers[2])


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@every_encoder
@pytest.mark.parametrize("edited", [False, True], ids=["full", "edited"])
def test_gradients_reach_the_encoder_as_through_plain_modules(build, edited):
    model, x, y = composed(build)
    if edited:
        cut_and_grow(model[1])
    model.double()
    x = x.double().requires_grad_()
    cross_entropy(model(x), y).backward()
    mine, into = {name: p.grad for name, p in model[0].named_parameters()}, x.grad
    model.zero_grad()
    x.grad = None
    cross_entropy(nn.Sequential(model[0], model[1].to_module())(x), y).backward()
    assert mine
    for name, parameter in model[0].named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=0, atol=1e-12, msg=name)
    torch.testing.assert_close(into, x.grad, rtol=0, atol=1e-12)
    assert float(into.abs().max()) > 1e-6


@every_encoder
def test_encoder_and_net_train_on_through_edits(build):
    model, x, y = composed(build)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    gn.attach(optimizer, model[1])
    losses, encoder = [], list(model[0].parameters())
    for step in range(40):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step in (10, 20):
            before, moments = (
                state(model[0]),
                [optimizer.state[p]["exp_avg"].clone() for p in encoder],
            )
            cut_and_grow(model[1])
            assert all(
                torch.equal(before[name], value) for name, value in model[0].state_dict().items()
            )
            assert all(
                torch.equal(m, optimizer.state[p]["exp_avg"])
                for m, p in zip(moments, encoder, strict=True)
            )
    assert losses[-1] < 0.7 * losses[0]
    assert all(a is b for a, b in zip(encoder, model[0].parameters(), strict=True))
    assert [len(optimizer.state[p]["exp_avg"]) for p in model[1].parameters()] == [
        len(p) for p in model[1].parameters()
    ]
    gn.check(model[1])


@every_encoder
def test_a_frozen_encoder_stays_as_it_is(build):
    model, x, y = composed(build)
    model[0].requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1
    )
    gn.attach(optimizer, model[1])
    before, losses = state(model[0]), []
    for step in range(30):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 10:
            cut_and_grow(model[1])
    assert losses[-1] < losses[0]
    assert all(torch.equal(before[name], value) for name, value in model[0].state_dict().items())
    assert all(parameter.grad is None for parameter in model[0].parameters())
    assert all(parameter.grad is not None for parameter in model[1].parameters())


def test_an_encoder_that_is_not_frozen_would_be_noticed():
    model, x, y = composed(resnet)
    model[0].requires_grad_(False)  # in training, BatchNorm goes on counting
    before = state(model[0])
    cross_entropy(model(x), y).backward()
    assert not all(
        torch.equal(before[name], value) for name, value in model[0].state_dict().items()
    )


@every_encoder
def test_autocast_trains_both(build):
    model, x, y = composed(build)
    cut_and_grow(model[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gn.attach(optimizer, model[1])
    expected = model(x)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
            loss = cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        cut_and_grow(model[1])
    assert (output - expected).abs().max() < 0.5
    assert all(
        p.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in model[0].parameters()
    )


@every_encoder
def test_a_snapshot_of_the_whole_model_computes_what_it_computes(build):
    model, x, _ = composed(build)
    cut_and_grow(model[1])
    model.eval()
    torch.testing.assert_close(gn.snapshot(model)(x), model(x).detach(), rtol=0, atol=1e-5)
