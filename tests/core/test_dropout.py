"""layer.dropout: what nodes say in training, and what never sees it."""

import copy
import pickle

import numpy as np
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


def test_gradients_are_those_of_nn_dropout():
    net, module = net_and_module(sensory=0.3, hidden=0.5)
    for one in (net, module):
        torch.manual_seed(3)
        one(batch(5, 6)).square().sum().backward()
    assert torch.allclose(net.transitions[0].weight.grad.view(6, 8).t(), module[1].weight.grad)
    assert torch.allclose(net.layers[2].bias.grad, module[4].bias.grad)


@pytest.mark.parametrize("wrong", ["a", "0.5", None, [0.1]], ids=repr)
def test_what_is_no_number_is_refused(wrong):
    layer = gn.GrapNet([2, 2]).layers[0]
    layer.dropout = 0.25
    with pytest.raises(TypeError, match="dropout is a number between 0 and 1, got"):
        layer.dropout = wrong
    layer.dropout = np.float32(layer.dropout)
    assert layer.dropout == 0.25


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


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"]
)
def test_copies_have_it_and_can_have_another(copied):
    net, _ = net_and_module(sensory=0.1, hidden=0.5)
    other = copied(net)
    assert [layer.dropout for layer in other.layers] == [0.1, 0.5, 0.0]
    other.layers[1].dropout = 0.0
    assert net.layers[1].dropout == 0.5


def test_a_checkpoint_has_it(tmp_path):
    net, _ = net_and_module(sensory=0.1, hidden=0.5)
    gn.save(tmp_path / "net", net)
    other = gn.load(tmp_path / "net")
    assert [layer.dropout for layer in other.layers] == [0.1, 0.5, 0.0]
    outputs = []
    for one in (net, other):
        torch.manual_seed(3)
        outputs.append(one(batch(5, 6)))
    assert torch.equal(outputs[0], outputs[1])


def test_to_module_has_it_and_a_snapshot_has_not():
    net, _ = net_and_module(sensory=0.1, hidden=0.5)
    module = net.to_module()
    assert [part.p for part in module if isinstance(part, nn.Dropout)] == [0.1, 0.5]
    outputs = []
    for one in (net, module):
        torch.manual_seed(3)
        outputs.append(one(batch(5, 6)))
    torch.testing.assert_close(outputs[0], outputs[1])
    snapshot = net.snapshot()
    assert not [part for part in snapshot.modules() if isinstance(part, nn.Dropout)]
    torch.testing.assert_close(snapshot(batch(5, 6)), net.eval()(batch(5, 6)))


def test_it_stays_through_edits_undo_and_a_state_dict():
    net, _ = net_and_module(hidden=0.5)
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][[0, 1]])
        edit.connect(net.layers[0], edit.add_nodes(1, 3))
    assert net.layers[1].dropout == 0.5
    net.undo()
    assert net.layers[1].dropout == 0.5
    torch.manual_seed(3)
    assert int((net(batch(50, 6)) != net.eval()(batch(50, 6))).sum()) > 100
    net.load_state_dict(net.state_dict())
    assert net.layers[1].dropout == 0.5


@pytest.mark.parametrize("backend", ["reference", "dense", "sparse", "family"])
def test_every_backend_drops(backend):
    net, _ = net_and_module(hidden=0.5)
    net.execution.use(backend)
    torch.manual_seed(3)
    # the output is linear, so it keeps its mean
    outputs = net(batch(4, 6).repeat(2000, 1)).view(2000, 4, 4)
    torch.testing.assert_close(outputs.mean(0), net.eval()(batch(4, 6)), rtol=0, atol=0.1)
    assert bool((outputs.std(0) > 0.05).all())


def test_mixed_activations_are_dropped_alike():
    net, _ = net_and_module(hidden=0.5)
    with net.edit() as edit:
        edit.set_activation(net.layers[1][::2], "relu")
    module = net.to_module()
    outputs = []
    for one in (net, module):
        torch.manual_seed(3)
        outputs.append(one(batch(5, 6)))
    torch.testing.assert_close(outputs[0], outputs[1])


def test_a_recorder_hears_what_the_nodes_say_and_changes_nothing():
    net, module = net_and_module(sensory=0.2, hidden=0.5)
    x, recorders = batch(200, 6), [ActivationRecorder(0), ActivationRecorder(1)]
    torch.manual_seed(3)
    expected = net(x)
    for recorder in recorders:
        recorder.arm(net)
    torch.manual_seed(3)
    assert torch.equal(net(x), expected)
    torch.manual_seed(3)
    said = [module[0](x)]
    said.append(module[:4][1:](said[0]))
    for recorder, h in zip(recorders, said, strict=True):
        torch.testing.assert_close(recorder.mean, h.mean(0).detach())
        assert 0.1 < float((h == 0).double().mean()) < 0.6


def test_a_recorder_in_evaluation_hears_nothing_dropped():
    net, module = net_and_module(hidden=0.5)
    recorder = ActivationRecorder(1)
    recorder.arm(net.eval())
    net(batch(20, 6))
    torch.testing.assert_close(recorder.mean, module.eval()[:3](batch(20, 6)).mean(0).detach())
