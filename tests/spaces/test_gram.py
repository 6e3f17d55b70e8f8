"""Tests of the recorder of Gram matrices on adopted models."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import grapnet as gn
from grapnet.errors import EditError
from grapnet.rules import GramRecorder


def with_one(rows: Tensor) -> Tensor:
    """Returns rows with a constant 1 at the end, in float64."""
    rows = rows.detach().double().reshape(-1, rows.shape[-1])
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def recorded(net, model: nn.Module, x: Tensor, space: str, **settings) -> GramRecorder:
    """Returns a recorder that has seen one pass."""
    recorder = GramRecorder(space, **settings)
    recorder.arm(net)
    with torch.no_grad():
        model(x)
    recorder.disarm()
    return recorder


class Gated(nn.Module):
    """A gated block of a transformer, without its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Linear(6, 8, bias=False)
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return functional.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.hidden(x))


def gated() -> tuple[Gated, Tensor]:
    torch.manual_seed(0)
    return Gated().double(), torch.randn(3, 5, 6).double()


def convolutions() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1)
    )
    return model.double().eval(), torch.randn(5, 3, 9, 9).double()


def test_a_reader_of_tokens():
    model, x = gated()
    net = gn.adopt(model, x)
    recorder = recorded(net, model, x, "gate")
    h = with_one(model.hidden(x))
    torch.testing.assert_close(recorder.total, h.t() @ h)
    assert recorder.count == 15
    with net.edit() as edit:
        edit.remove_nodes(net.space("gate")[[0, 3, 5]])
    h = h[:, [1, 2, 4, 6, 7, 8]]
    torch.testing.assert_close(recorder.total, h.t() @ h)
    assert not recorder.is_stale
    net.undo()
    assert recorder.gram.shape == (9, 9)
    assert not recorder.is_stale


@pytest.mark.parametrize("rows", [None, 20])
def test_a_convolution_as_unfolded_inputs(rows):
    model, x = convolutions()
    net = gn.adopt(model, x)
    recorder = recorded(net, model, x, "0", rows=rows)
    cells = functional.unfold(model[:3](x), 3, stride=2, padding=1).transpose(1, 2)
    h = with_one(cells)
    if rows is not None:
        h = h[torch.arange(20) * len(h) // 20]
    torch.testing.assert_close(recorder.total, h.t() @ h)
    with net.edit() as edit:
        edit.remove_nodes(net.space("0")[[1, 3]])
    stays = [c * 9 + place for c in (0, 2, 4, 5, 6, 7) for place in range(9)] + [72]
    h = h[:, stays]
    torch.testing.assert_close(recorder.total, h.t() @ h)
    assert not recorder.is_stale


def test_a_reader_behind_a_flatten_follows_channels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3))
    model.double()
    x = torch.randn(6, 2, 5, 5).double()
    net = gn.adopt(model, x)
    recorder = recorded(net, model, x, "0")
    h = with_one(model[:3](x))
    torch.testing.assert_close(recorder.total, h.t() @ h)
    with net.edit() as edit:
        edit.remove_nodes(net.space("0")[[1]])
    stays = [*range(9), *range(18, 37)]
    h = h[:, stays]
    torch.testing.assert_close(recorder.total, h.t() @ h)


def test_a_module_that_is_called_from_elsewhere():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    net = gn.adopt(model, torch.randn(2, 4).double())
    recorder = GramRecorder("0:in", at="0")
    recorder.arm(net)
    x = torch.randn(7, 4).double()
    model[0](x)
    h = with_one(x)
    torch.testing.assert_close(recorder.total, h.t() @ h)
    assert recorder.reader is not None
    assert recorder.reader.name == "0.weight"


def test_what_is_read_before_makes_it_stale():
    model, x = gated()
    net = gn.adopt(model, x)
    recorder = recorded(net, model, x, "gate")
    with torch.no_grad():
        model.down.weight.mul_(2)
    assert not recorder.is_stale
    with torch.no_grad():
        model.norm.bias.add_(1)
    assert recorder.is_stale
    recorder = recorded(net, model, x, "gate")
    assert not recorder.is_stale
    optimizer = torch.optim.AdamW([model.up.weight], fused=True)
    model(x).sum().backward()
    optimizer.step()
    assert recorder.is_stale


def test_growth_and_edits_before_make_it_stale_and_undo_does_not():
    torch.manual_seed(0)
    layers = (nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    model = nn.Sequential(*layers).double()
    x = torch.randn(9, 4).double()
    net = gn.adopt(model, x)
    recorder = recorded(net, model, x, "2")
    before = recorder.gram
    with net.edit() as edit:
        edit.remove_nodes(net.space("0")[[0]])
    assert recorder.is_stale
    net.undo()
    assert not recorder.is_stale
    with net.edit() as edit:
        edit.add_nodes(net.space("2"), 2)
    assert recorder.is_stale
    net.undo()
    assert not recorder.is_stale
    relations = net.space("0").outgoing()
    with net.edit() as edit:
        edit.cut(relations.smallest(count=2))
    assert recorder.is_stale
    net.undo()
    assert not recorder.is_stale
    parameters = dict(model.named_parameters())
    with net.edit() as edit:
        edit.assign(parameters["2.bias"], torch.zeros(6))
    assert recorder.is_stale
    net.undo()
    assert not recorder.is_stale
    with net.edit() as edit:
        edit.assign(parameters["4.bias"], torch.zeros(3))
        edit.cut(net.space("2").outgoing().smallest(count=2))
    assert not recorder.is_stale
    assert torch.equal(recorder.gram, before)


def test_several_readers_need_a_name():
    model, x = gated()
    net = gn.adopt(model, x)
    name = net.space("gate").readers[0]
    assert name == "down.weight"
    stream = next(space for space in net.spaces if "gate.weight" in space.readers)
    with pytest.raises(EditError):
        GramRecorder(stream.name).arm(net)
    recorder = recorded(net, model, x, stream.name, at="up")
    h = with_one(model.norm(x))
    torch.testing.assert_close(recorder.total, h.t() @ h)
    with pytest.raises(EditError):
        GramRecorder(stream.name, at="norm").arm(net)


def test_grouped_convolutions_are_refused():
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, groups=2))
    net = gn.adopt(model, torch.randn(1, 2, 5, 5))
    for space in net.spaces:
        if "1.weight" in space.readers:
            with pytest.raises(EditError):
                GramRecorder(space.name).arm(net)
            break
    else:
        pytest.fail("no space is read by the grouped convolution")
