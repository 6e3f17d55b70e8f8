"""layer.dropout: what nodes say in training, and what never sees it."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.rules import ActivationRecorder


def net_and_module(**dropouts: float) -> tuple[gn.GrapNet, nn.Sequential]:
    """Returns a net, and plain modules with the same weights and an nn.Dropout after each of its
    layers.
    """
    net = gn.GrapNet(
        [6, 8, 4],
        activation="tanh",
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
    )
    plain = [part for part in net.to_module() if isinstance(part, nn.Linear)]
    chances = [dropouts.get(name, 0.0) for name in ("sensory", "hidden", "output")]
    for layer, chance in zip(net.layers, chances, strict=True):
        layer.dropout = chance
    drops = [nn.Dropout(chance) for chance in chances]
    return net, nn.Sequential(drops[0], plain[0], nn.Tanh(), drops[1], plain[1], drops[2])


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "dropouts",
    [{"sensory": 0.3}, {"hidden": 0.5}, {"output": 0.2}, {"sensory": 0.1, "hidden": 0.9}],
)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,)], ids=str)
def test_the_same_seed_drops_what_nn_dropout_drops(dropouts, shape):
    net, module = net_and_module(**dropouts)
    x = batch(*shape)
    plain = module.eval()(x)
    torch.testing.assert_close(net.eval()(x), plain)
    outputs = []
    for one in (net.train(), module.train()):
        torch.manual_seed(3)
        outputs.append(one(x))
    torch.testing.assert_close(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], plain)


def test_nothing_is_dropped_at_zero_and_everything_at_one():
    net, _ = net_and_module(hidden=1.0)
    x = batch(5, 6)
    torch.testing.assert_close(net(x), net.layers[2].biases.expand(5, 4))
    state = torch.get_rng_state()
    net.layers[1].dropout = 0
    torch.testing.assert_close(net(x), net.eval()(x))
    assert torch.equal(torch.get_rng_state(), state)  # no number was drawn
    assert isinstance(net.layers[1].dropout, float)


@pytest.mark.parametrize("chance", [-0.1, 1.5, float("nan"), float("inf")])
def test_what_is_no_probability_is_refused(chance):
    net, _ = net_and_module(hidden=0.25)
    with pytest.raises(ValueError, match="between 0 and 1"):
        net.layers[1].dropout = chance
    assert net.layers[1].dropout == 0.25


def through_a_file(net: gn.GrapNet, folder: Path) -> gn.GrapNet:
    gn.save(folder / "net", net)
    return gn.load(folder / "net")


def through_an_edit(net: gn.GrapNet, folder: Path) -> gn.GrapNet:
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][[0, 1]])
        edit.connect(net.layers[0], edit.add_nodes(1, 3))
    assert net.layers[1].dropout == 0.5
    net.undo()
    net.load_state_dict(net.state_dict())
    return net


WAYS: dict[str, Callable[[gn.GrapNet, Path], nn.Module]] = {
    "copy": lambda net, folder: copy.deepcopy(net),
    "pickle": lambda net, folder: pickle.loads(pickle.dumps(net)),
    "file": through_a_file,
    "edit": through_an_edit,
    "module": lambda net, folder: net.to_module(),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_stays_through_copies_files_edits_and_modules(way, tmp_path):
    net, _ = net_and_module(sensory=0.1, hidden=0.5)
    torch.manual_seed(3)
    expected = net(batch(50, 6))
    other = WAYS[way](net, tmp_path)
    torch.manual_seed(3)
    torch.testing.assert_close(other(batch(50, 6)), expected)
    if way in ("copy", "pickle"):
        other.layers[1].dropout = 0.0
        assert net.layers[1].dropout == 0.5


def test_a_snapshot_has_none():
    net, _ = net_and_module(sensory=0.1, hidden=0.5)
    snapshot = net.snapshot()
    assert not [part for part in snapshot.modules() if isinstance(part, nn.Dropout)]
    torch.testing.assert_close(snapshot(batch(5, 6)), net.eval()(batch(5, 6)))


@pytest.mark.parametrize("backend", ["reference", "dense", "sparse", "family"])
def test_every_backend_drops(backend):
    net, _ = net_and_module(hidden=0.5)
    net.execution.use(backend)
    torch.manual_seed(3)
    # the output is linear, so it keeps its mean
    outputs = net(batch(4, 6).repeat(2000, 1)).view(2000, 4, 4)
    torch.testing.assert_close(outputs.mean(0), net.eval()(batch(4, 6)), rtol=0, atol=0.1)
    assert bool((outputs.std(0) > 0.05).all())


def test_a_recorder_hears_what_the_nodes_say_and_changes_nothing():
    net, module = net_and_module(sensory=0.2, hidden=0.5)
    x = batch(200, 6)
    recorders = [ActivationRecorder(0), ActivationRecorder(1)]
    torch.manual_seed(3)
    expected = net(x)
    for recorder in recorders:
        recorder.arm(net)
    torch.manual_seed(3)
    assert torch.equal(net(x), expected)
    torch.manual_seed(3)
    outputs = [module[0](x)]
    outputs.append(module[:4][1:](outputs[0]))
    for recorder, h in zip(recorders, outputs, strict=True):
        torch.testing.assert_close(recorder.mean, h.mean(0).detach())
        assert 0.1 < float((h == 0).double().mean()) < 0.6
