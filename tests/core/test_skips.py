"""Nets in which relations skip layers: built, edited, saved and exported through public names."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from grapnet import plot
from grapnet.integrations.networkx import from_networkx, to_networkx

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIZES = (4, 6, 5, 3)
SKIPS = ((0, 2), (1, 3))
BACKENDS = ["auto", "reference", "dense", "family", "sparse"]


def make(skips: Any = SKIPS, **settings: Any) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(0)
    return gn.GrapNet(SIZES, skips=skips, generator=generator, dtype=torch.float64, **settings)


def matrix(net: gn.GrapNet, source: int, target: int) -> Tensor:
    """Returns the weights between two layers, [parents, children]."""
    relations = net.layers[source].outgoing(to=net.layers[target])
    dense = torch.zeros(len(net.layers[source]), len(net.layers[target]), dtype=torch.float64)
    rows = net.layers[source].rows(relations.parents).long()
    columns = net.layers[target].rows(relations.children).long()
    return dense.index_put((rows, columns), relations.weights)


def computed(net: gn.GrapNet, x: Tensor) -> Tensor:
    """Returns what the net must return: every layer adds up what enters."""
    outputs = [x]
    for number in range(1, len(net.layers)):
        z = net.layers[number].biases.expand(len(x), -1)
        for source in range(number):
            if net.between(source, number) is not None:
                z = z + outputs[source] @ matrix(net, source, number)
        if number < len(net.layers) - 1:
            z = torch.relu(z)
        outputs.append(z)
    return outputs[-1]


def require_right(net: gn.GrapNet) -> None:
    gn.check(net)
    torch.testing.assert_close(net(X), computed(net, X))


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        net(X).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("density", [1.0, 0.5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_adds_up_what_enters(backend: str, density: float):
    net = make(density=density)
    net.execution.use(backend)
    assert net.ends == [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3)]
    require_right(net)
    torch.testing.assert_close(net.walk(X), net(X))
    parameters = list(net.parameters())
    wanted = torch.autograd.grad(computed(net, X).square().sum(), parameters)
    found = torch.autograd.grad(net(X).square().sum(), parameters)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing(to=net.layers[2]).smallest(fraction=0.5))
        edit.freeze(net.layers[1].outgoing(to=net.layers[3]).largest(count=3))
    require_right(net)


def test_a_net_without_skips_draws_what_it_always_drew():
    plain = gn.GrapNet([4, 3, 2], generator=torch.Generator().manual_seed(0))
    with_none = gn.GrapNet([4, 3, 2], skips=(), generator=torch.Generator().manual_seed(0))
    assert plain.is_chain
    for one, other in zip(plain.parameters(), with_none.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_start_small_enough_for_all_parents():
    net = gn.GrapNet([300, 5, 200], skips=[(0, 2)], generator=torch.Generator().manual_seed(0))
    bound = 1 / 305**0.5
    for relations in (net.layers[1].outgoing(), net.layers[0].outgoing(to=net.layers[2])):
        assert 0.95 * bound < relations.weights.detach().abs().max() <= bound
    assert net.layers[2].biases.detach().abs().max() <= bound


def test_erk_gives_skips_their_share():
    net = gn.GrapNet([50, 20, 10], skips=[(0, 2)], density=0.3, distribution="erk")
    assert net.count().relations == pytest.approx(0.3 * (1000 + 200 + 500), abs=2)
    assert net.transitions[1].density > net.transitions[2].density > net.transitions[0].density


def test_exact_relations():
    net = gn.GrapNet.from_relations(
        [2, 1, 2],
        [([0, 1], [0, 0], [1.0, 2.0]), ([0], [1], [3.0])],
        skips={(0, 2): ([1, 0], [0, 1], [4.0, 5.0])},
        biases=[[0.0], [0.0, 0.0]],
        activation="relu",
    )
    y = net(torch.tensor([[1.0, 10.0]]))
    assert y.tolist() == [[40.0, 3.0 * 21.0 + 5.0]]
    assert net.layers[0][0].children.uids.tolist() == [2, 4]


@pytest.mark.parametrize("skips", [[(0, 1)], [(2, 0)], [(0, 4)], [(-1, 2)], [(0, 2), (0, 2)]])
def test_skips_lead_over_a_layer(skips: list[tuple[int, int]]):
    with pytest.raises(ValueError, match="skips"):
        make(skips)


def test_the_text_names_the_target():
    text = str(make())
    assert "transition 3 to layer 2: Transition(4→5" in text
    assert "transition 4 to layer 3: Transition(6→3" in text


def test_skips_come_empty_and_are_connected_afterwards():
    net = make(())
    y = net(X)
    with pytest.raises(gn.errors.EditError, match=r"insert_skip\(0, 2\)"), net.edit() as edit:
        edit.connect(net.layers[0], net.layers[2])
    with net.edit(reason="skip") as edit:
        edit.insert_skip(0, 2)
        edit.insert_skip(net.layers[1], -1)
    assert net.ends[3:] == list(SKIPS)
    assert torch.equal(net(X), y)
    with net.edit() as edit:
        edit.connect(net.layers[0], net.layers[2], weights="zero")
        edit.connect(net.layers[1], net.layers[3])
    require_right(net)
    net(X).square().sum().backward()
    assert bool(net.layers[0].outgoing(to=net.layers[2]).gradients.any())
    deep = net(X)
    net.undo()
    net.undo()
    assert net.is_chain
    assert torch.equal(net(X), y)
    net.redo()
    net.redo()
    assert torch.equal(net(X), deep)
    require_right(net)


def test_a_skip_leaves_with_its_relations():
    net = make()
    before = net(X)
    with net.edit() as edit:
        edit.remove_skip(0, 2)
    assert net.ends == [(0, 1), (1, 2), (2, 3), (1, 3)]
    require_right(net)
    diff = net.diff(0)
    assert len(diff.relations_removed) == 4 * 5
    assert len(diff.nodes_removed) == 0
    assert net.history[-1].counts["blocks_removed"] == 1
    net.undo()
    assert net.ends == [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3)]
    assert torch.equal(net(X), before)


def test_refusals():
    net = make([(0, 2)])
    refused = [
        lambda edit: edit.insert_skip(0, 2),
        lambda edit: edit.insert_skip(0, 1),
        lambda edit: edit.insert_skip(2, 0),
        lambda edit: edit.remove_skip(1, 3),
        lambda edit: edit.remove_skip(1, 2),
        lambda edit: (edit.insert_skip(1, 3), edit.insert_skip(1, 3)),
        lambda edit: (edit.insert_skip(1, 3), edit.add_nodes(1, 1)),
    ]
    for ask in refused:
        with pytest.raises(gn.errors.EditError), net.edit() as edit:
            ask(edit)
    assert net.version == 0
    same = gn.GrapNet([4, 4, 4, 2], skips=[(0, 2)])
    with pytest.raises(gn.errors.EditError, match=r"remove_skip\(0, 2\)"), same.edit() as edit:
        edit.remove_layer(2)
    with pytest.raises(gn.errors.EditError, match="two transitions"), same.edit() as edit:
        edit.remove_layer(1)


def test_optimizers_follow():
    net = make(())
    optimizer = Adam(net.named_parameters(), lr=0.01)
    gn.attach(optimizer, net)
    train(net, optimizer)
    with net.edit() as edit:
        edit.insert_skip(0, 2)
        edit.insert_skip(0, 3)
    group = optimizer.param_groups[0]
    assert all(a is b for a, b in zip(group["params"], net.parameters(), strict=True))
    assert group["param_names"] == [name for name, _ in net.named_parameters()]
    with net.edit() as edit:
        edit.connect(net.layers[0], net.layers[2], weights="zero")
        edit.connect(net.layers[0][:2], net.layers[3], weights="zero")
    train(net, optimizer)
    weight = net.transitions[3].weight
    moments = optimizer.state[weight]["exp_avg"].clone()
    assert bool(moments.any())
    with net.edit() as edit:
        edit.remove_skip(0, 2)
    assert weight not in optimizer.state
    train(net, optimizer)
    net.undo()
    assert net.transitions[3].weight is weight
    assert torch.equal(optimizer.state[weight]["exp_avg"], moments)
    assert all(a is b for a, b in zip(group["params"], net.parameters(), strict=True))
    train(net, optimizer)
    require_right(net)


def test_copies_replay_and_files(tmp_path: Path):
    net = make(())
    twin = copy.deepcopy(net)
    averaged = AveragedModel(net)
    gn.attach(averaged, net)
    with net.edit() as edit:
        edit.insert_skip(0, 2)
        edit.insert_skip(1, 3)
    with net.edit() as edit:
        edit.connect(net.layers[0], net.layers[2])
        edit.connect(net.layers[1], net.layers[3])
    with net.edit() as edit:
        edit.remove_skip(0, 2)
    net.undo()
    twin.replay(pickle.loads(pickle.dumps(list(net.history))))
    gn.save(tmp_path / "net.gn", net)
    others = [twin, averaged.module, gn.load(tmp_path / "net.gn"), copy.deepcopy(net)]
    for other in others:
        assert other.ends == net.ends
        require_right(other)
        assert torch.equal(other(X), net(X))
    with pytest.raises(gn.errors.OptimizerError, match="transitions between"):
        gn.attach(make(()), net)


def test_layers_come_and_leave_beside_skips():
    net = make()
    y = net(X)
    with net.edit() as edit:
        edit.insert_layer(1)
    assert net.ends == [(0, 1), (1, 2), (2, 3), (3, 4), (0, 3), (1, 4)]
    assert torch.equal(net(X), y)
    require_right(net)
    with net.edit() as edit:
        edit.remove_layer(2)
        edit.insert_layer(0)
        edit.insert_skip(0, 4)
    assert net.ends == [(0, 1), (1, 2), (2, 3), (3, 4), (0, 3), (2, 4), (0, 4)]
    torch.testing.assert_close(net(X), y)
    net.undo()
    net.undo()
    assert torch.equal(net(X), y)
    assert net.ends == make().ends


def test_a_trial_leaves_no_skip_behind():
    net = make([(0, 2)])
    relations = net.layers[0].outgoing()
    y = net(X)
    with net.edit(trial=True) as edit:
        edit.remove_skip(0, 2)
        edit.insert_skip(1, 3)
        edit.commit()
        assert net.ends[-1] == (1, 3)
        assert not torch.equal(net(X), y)
    assert net.ends[-1] == (0, 2)
    assert torch.equal(net(X), y)
    assert len(relations.weights) == 4 * 6 + 4 * 5


def test_rules_and_recorders():
    net = make()
    recorder = gn.rules.ActivationRecorder(2)
    recorder.arm(net)
    z = net(X)
    h = computed_hidden(net, 2)
    torch.testing.assert_close(recorder.mean.to(h), h.mean(0))
    recorder.disarm()
    recorder.clear()
    manager = gn.rules.RuleManager()
    manager.add(gn.rules.PruneWeakest(fraction=0.3), schedule=gn.rules.Every(1))
    before = net.count().relations
    manager.apply(net, 1)
    assert net.count().relations == before - round(0.3 * before)
    assert len(net.layers[0].outgoing(to=net.layers[2])) < 20
    require_right(net)
    assert z.shape == net(X).shape


def computed_hidden(net: gn.GrapNet, number: int) -> Tensor:
    """Returns what a hidden layer returns, through a hook."""
    seen = []
    handle = net.layers[number].register_forward_hook(lambda *parts: seen.append(parts[2]))
    net(X)
    handle.remove()
    return seen[0].detach()


def test_export_and_what_refuses_by_name():
    net = make()
    exported = torch.export.export(net, (X,))
    torch.testing.assert_close(exported.module()(X), net(X))
    for call in (net.snapshot, net.to_module):
        with pytest.raises(gn.errors.PlanError, match=r"\(0, 2\)"):
            call()
    compiled = torch.compile(net, backend="eager")
    torch.testing.assert_close(compiled(X), net(X))


def test_networkx_and_back():
    net = make()
    graph = to_networkx(net)
    assert graph.number_of_edges() == net.count().relations
    other = from_networkx(graph, dtype=torch.float64)
    assert other.ends == net.ends
    torch.testing.assert_close(other(X), net(X))


def test_a_picture_has_the_lines_that_skip():
    net = make([(0, 2)])
    ax = plot.graph(net)
    lines = 0
    for collection in ax.collections:
        if hasattr(collection, "get_segments"):
            for segment in collection.get_segments():
                lines += segment[-1][0] - segment[0][0] == 2
    assert lines == 4 * 5


def test_a_state_dict_from_before_a_transition_came_is_refused_and_loads_nothing() -> None:
    net = make(skips=((0, 2),))
    saved = copy.deepcopy(net.state_dict())
    for tensor in saved.values():
        if tensor.is_floating_point():
            tensor += 1
    with net.edit() as edit:
        edit.insert_skip(1, 3)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(gn.errors.TopologyError):
        net.load_state_dict(saved)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
