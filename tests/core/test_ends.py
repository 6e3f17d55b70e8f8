"""Transitions know the layers they lead from and to, and several may enter or leave a layer."""

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.continual import ClosedFormReadout
from grapnet.core._layer import Layer
from grapnet.core._transition import Transition, full_topology
from grapnet.rules import (
    Every,
    GradientRecorder,
    GrowWidth,
    PruneWeakest,
    RemoveOrphans,
    Rewire,
    RuleContext,
    RuleManager,
)
from tests.checkpoint.files import build, parse
from tests.execution.attended import by_reference, difference
from tests.execution.graphs import SUMS

SKIP = ((0, 1), (1, 2), (0, 2))
# Every layer but the last leads to two others, and the transitions are in no order.
MANY = ((2, 3), (0, 2), (1, 3), (0, 1), (1, 2))


def net_with(
    sizes: Sequence[int], ends: Sequence[tuple[int, int]], activation: str = "tanh"
) -> gn.GrapNet:
    """Returns a float64 net with all relations that its transitions have room for."""
    generator = torch.Generator().manual_seed(3)
    layers = []
    start = 0
    for number, size in enumerate(sizes):
        biases = None
        if number > 0:
            biases = torch.randn(size, generator=generator, dtype=torch.float64)
        name = activation
        if number in (0, len(sizes) - 1):
            name = "identity"
        layers.append(Layer(torch.arange(start, start + size), biases, name))
        start += size
    transitions = []
    for source, target in ends:
        topology = full_topology(sizes[source], sizes[target], torch.device("cpu"))
        weights = torch.randn(topology.n_relations, generator=generator, dtype=torch.float64)
        transitions.append(Transition(topology, weights))
    return gn.GrapNet._from_parts(layers, transitions, ends)


def matrix(transition: Transition) -> Tensor:
    topology = transition.topology
    dense = torch.zeros(topology.n_parents, topology.n_children, dtype=torch.float64)
    places = (topology.parents().long(), topology.child.long())
    return dense.index_put(places, transition.values())


def expected(net: gn.GrapNet, x: Tensor) -> Tensor:
    """Returns what the net computes, by dense matrices."""
    outputs = [x]
    for number in range(1, len(net.layers)):
        z = net.layers[number].values().expand(len(x), -1)
        for transition in net.transitions:
            if transition.target == number:
                z = z + outputs[transition.source] @ matrix(transition)
        if number < len(net.layers) - 1:
            z = torch.tanh(z)
        outputs.append(z)
    return outputs[-1]


def inputs(net: gn.GrapNet, count: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(count, net.sizes[0], generator=generator, dtype=torch.float64)


def require_right(net: gn.GrapNet) -> None:
    gn.check(net)
    x = inputs(net)
    wanted = expected(net, x)
    torch.testing.assert_close(net(x), wanted)
    torch.testing.assert_close(net.walk(x), wanted)
    with torch.no_grad():
        torch.testing.assert_close(net(x), wanted)


def test_a_net_of_sizes_is_a_chain() -> None:
    net = gn.GrapNet([4, 3, 2, 2])
    assert net.ends == [(0, 1), (1, 2), (2, 3)]
    assert net.is_chain
    assert [net.entering(n) for n in range(4)] == [[], [0], [1], [2]]
    assert [net.leaving(n) for n in range(4)] == [[0], [1], [2], []]
    assert net.between(1, 2) == 1
    assert net.between(0, 2) is None


@pytest.mark.parametrize("backend", ["auto", *SUMS])
def test_a_layer_adds_up_what_all_transitions_bring(backend: str) -> None:
    net = net_with([3, 4, 3, 2], MANY)
    net.execution.use(backend)
    require_right(net)
    x = inputs(net)
    parameters = list(net.parameters())
    wanted = torch.autograd.grad(expected(net, x).square().sum(), parameters)
    found = torch.autograd.grad(net(x).square().sum(), parameters)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def require_attention(net: gn.GrapNet) -> None:
    gn.check(net)
    x = inputs(net)
    assert difference(net, x) <= 1e-12
    assert not torch.allclose(net(x), expected(net, x))
    with torch.no_grad():
        torch.testing.assert_close(net(x), by_reference(net, x))


def test_a_layer_adds_up_what_a_policy_computes_for_each_transition() -> None:
    net = net_with([3, 4, 3, 2], MANY)
    net.execution.use("attention", generator=torch.Generator().manual_seed(5))
    require_attention(net)
    before = net(inputs(net))
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][1])
        new = edit.add_nodes(2, 2)
        edit.connect(net.layers[0], new)
        edit.connect(new, net.layers[3])
    require_attention(net)
    net.undo()
    require_attention(net)
    assert torch.equal(net(inputs(net)), before)


def test_sets_and_handles_span_the_transitions() -> None:
    net = net_with([3, 4, 2], SKIP)
    assert len(net.layers[0].outgoing()) == 3 * 4 + 3 * 2
    assert len(net.layers[2].incoming()) == 4 * 2 + 3 * 2
    assert len(net.layers[0].outgoing(to=net.layers[2])) == 3 * 2
    node = net.layers[0][1]
    assert node.degree == 6
    assert node.children.uids.tolist() == [3, 4, 5, 6, 7, 8]
    assert net.layers[2][0].parents.uids.tolist() == [3, 4, 5, 6, 0, 1, 2]
    weights = [matrix(net.transitions[0])[1], matrix(net.transitions[2])[1]]
    assert torch.equal(node.W_alloc, torch.cat(weights)[None])
    node.W_alloc = torch.arange(6.0)
    assert node.W_alloc.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert matrix(net.transitions[2])[1].tolist() == [4, 5]


def test_a_node_is_frozen_when_both_of_its_ways_out_are() -> None:
    net = net_with([3, 4, 2], SKIP)
    node = net.layers[0][0]
    with net.edit() as edit:
        edit.freeze(node.outgoing(to=net.layers[1]))
    assert not node.frozen
    with net.edit() as edit:
        edit.freeze(node.outgoing(to=net.layers[2]))
    assert node.frozen


def cut_slots(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.cut(net.layers[0][0], slots=[0, 5])


def cut_the_skip(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.cut(net.layers[0].outgoing(to=net.layers[2]))


def reconnect_the_skip(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.cut(net.layers[0].outgoing(to=net.layers[2]))
    edit.connect(net.layers[0], net.layers[2][1])


def remove_hidden(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.remove_nodes(net.layers[1][1])


def remove_sensory(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.remove_nodes(net.layers[0][2], interface=True)


def remove_output(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.remove_nodes(net.layers[2][0], interface=True)


def add_everywhere(net: gn.GrapNet, edit: gn.Edit) -> None:
    hidden = edit.add_nodes(1, 2)
    output = edit.add_nodes(2, 1)
    edit.connect(net.layers[0], hidden)
    edit.connect(hidden, net.layers[2])
    edit.connect(net.layers[0], output)


VERBS = [
    cut_slots,
    cut_the_skip,
    reconnect_the_skip,
    remove_hidden,
    remove_sensory,
    remove_output,
    add_everywhere,
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_edits_undo_and_replay(verb: Callable[[gn.GrapNet, gn.Edit], None]) -> None:
    net = net_with([3, 4, 2], SKIP)
    other = copy.deepcopy(net)
    before = net(inputs(net))
    with net.edit() as edit:
        verb(net, edit)
    require_right(net)
    other.replay(net.history)
    require_right(other)
    assert torch.equal(other(inputs(net)), net(inputs(net)))
    after = net(inputs(net))
    net.undo()
    require_right(net)
    assert torch.equal(net(inputs(net)), before)
    net.redo()
    assert torch.equal(net(inputs(net)), after)


def test_nodes_are_connected_only_where_a_transition_leads() -> None:
    net = net_with([3, 4, 3, 2], MANY)
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.connect(net.layers[0], net.layers[3])
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.connect(net.layers[2], net.layers[1])
    assert net.version == 0


def test_newborn_weights_count_the_parents_of_all_transitions() -> None:
    net = net_with([100, 3, 20], SKIP)
    with net.edit() as edit:
        edit.cut(net.layers[1].outgoing())
    with net.edit(generator=torch.Generator().manual_seed(0)) as edit:
        edit.connect(net.layers[1], net.layers[2], weights="linear")
    drawn = net.layers[1].outgoing().weights.abs().max()
    # Of 60 draws the largest is close to the bound; of three parents alone it would be 0.58.
    assert 0.8 / 103**0.5 < drawn <= 1 / 103**0.5


def test_an_orphan_has_no_parent_in_any_transition() -> None:
    net = net_with([3, 2, 4, 2], ((0, 1), (1, 2), (0, 2), (2, 3)))
    with net.edit() as edit:
        edit.cut(net.layers[2].incoming(of=net.layers[1]))
        RemoveOrphans()(net, edit, RuleContext())
    assert net.sizes == [3, 2, 4, 2]
    with net.edit() as edit:
        edit.cut(net.layers[2][0].incoming())
        RemoveOrphans()(net, edit, RuleContext())
    assert net.sizes == [3, 2, 3, 2]
    require_right(net)


def test_orphans_leave_their_constants_over_every_way_out() -> None:
    net = net_with([3, 4, 3, 2], MANY)
    with net.edit() as edit:
        edit.cut(net.layers[1][1:3].incoming())
    average = torch.optim.swa_utils.AveragedModel(net)
    gn.attach(average, net)
    before = net(inputs(net))
    with net.edit() as edit:
        edit.remove_orphans(fold_bias=True)
    assert net.sizes == [3, 2, 3, 2]
    require_right(net)
    torch.testing.assert_close(net(inputs(net)), before)
    torch.testing.assert_close(average(inputs(net)), before)


def test_a_layer_dies_only_with_its_last_transition() -> None:
    net = net_with([3, 4, 2], SKIP)
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.cut(net.layers[2].incoming())
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.cut(net.layers[2][1].incoming())
    assert net.version == 0
    with net.edit() as edit:
        edit.cut(net.layers[2].incoming(of=net.layers[1]))
    with net.edit() as edit:
        edit.cut(net.layers[2][1].incoming(of=net.layers[0][:2]))
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.cut(net.layers[2][1].incoming())
    require_right(net)


def test_copies_pickles_and_files_keep_the_ends(tmp_path: Path) -> None:
    net = net_with([3, 4, 3, 2], MANY)
    with net.edit() as edit:
        edit.cut(net.layers[0][0].outgoing())
    gn.save(tmp_path / "net.safetensors", net)
    copies = [
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        gn.load(tmp_path / "net.safetensors"),
    ]
    for other in copies:
        assert other.ends == list(MANY)
        require_right(other)
        assert torch.equal(other(inputs(net)), net(inputs(net)))
        with other.edit() as edit:
            edit.remove_nodes(other.layers[2][0])
        require_right(other)


@pytest.mark.parametrize(
    "ends",
    [
        7,
        [[0, 1], [1, 2]],
        [[0, 1], [1, 2], [0, 3]],
        [[0, 1], [1, 2], [2, 0]],
        [[0, 1], [1, 2], [0, "2"]],
        [[0, 1], [0, 1], [1, 2]],
    ],
)
def test_a_file_with_other_ends_is_refused(tmp_path: Path, ends: object) -> None:
    gn.save(tmp_path / "net.safetensors", net_with([3, 4, 2], SKIP))
    document, tensors = parse((tmp_path / "net.safetensors").read_bytes())
    assert document["graph"]["ends"] == [list(pair) for pair in SKIP]
    document["graph"]["ends"] = ends
    (tmp_path / "other.safetensors").write_bytes(build(json.dumps(document), tensors))
    with pytest.raises(gn.errors.CheckpointError):
        gn.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    "ends",
    [
        ((0, 1), (1, 2), (2, 1)),
        ((0, 1), (1, 2), (1, 2)),
        ((0, 1), (0, 1), (1, 2)),
    ],
)
def test_check_refuses_other_ends(ends: tuple[tuple[int, int], ...]) -> None:
    net = net_with([3, 4, 2], SKIP)
    gn.check(net)
    for transition, (source, target) in zip(net.transitions, ends, strict=True):
        transition.source = source
        transition.target = target
    with pytest.raises(gn.errors.InvariantError):
        gn.check(net)


def test_matrices_in_a_row_stand_only_for_a_chain() -> None:
    net = net_with([3, 4, 2], SKIP)
    with pytest.raises(gn.errors.PlanError):
        net.snapshot()
    with pytest.raises(gn.errors.PlanError):
        net.to_module()


@pytest.mark.parametrize("init", ["zero_outgoing", "net2net"])
def test_a_wider_layer_computes_the_same(init: Literal["zero_outgoing", "net2net"]) -> None:
    net = net_with([3, 4, 3, 2], MANY)
    before = net(inputs(net))
    with net.edit(generator=torch.Generator().manual_seed(0)) as edit:
        GrowWidth(layers=1, nodes=3, init=init)(net, edit, RuleContext())
    assert net.sizes == [3, 7, 3, 2]
    require_right(net)
    torch.testing.assert_close(net(inputs(net)), before)
    new = net.layers[1][4:]
    assert len(new.outgoing()) == 3 * (3 + 2)


def test_rules_work_on_every_transition() -> None:
    net = net_with([3, 4, 3, 2], MANY)
    count = net.count().relations
    with net.edit() as edit:
        PruneWeakest(fraction=0.5, compare="lamp")(net, edit, RuleContext())
    assert net.count().relations == count - round(0.5 * count)
    manager = RuleManager()
    manager.add(Rewire(fraction=0.5, grow="gradient"), schedule=Every(1))
    manager.start(net)
    net(inputs(net)).square().sum().backward()
    manager.apply(net, 1)
    assert net.count().relations == count - round(0.5 * count)
    assert net.history[-1].counts["relations_added"] > 0
    require_right(net)


@pytest.mark.parametrize(
    ("ends", "upper", "lower"),
    [
        (MANY, 0, 2),
        (MANY, 0, 3),
        # The first transition that leaves the upper layer runs after the lower layer.
        (((0, 3), (0, 1), (1, 2), (2, 3)), 0, 2),
    ],
)
def test_gradients_of_pairs_are_recorded_across_other_layers(
    ends: tuple[tuple[int, int], ...], upper: int, lower: int
) -> None:
    net = net_with([3, 4, 3, 2], ends)
    recorder = GradientRecorder(upper, lower)
    recorder.arm(net)
    x = inputs(net)
    received = []
    last = net.transitions[net.entering(lower)[-1]]
    last.register_forward_hook(lambda module, args, output: received.append(output))
    loss = net(x).square().sum()
    received[0].retain_grad()
    loss.backward()
    torch.testing.assert_close(recorder.matrix(), x.t() @ received[0].grad)


def test_a_closed_form_needs_one_way_out_and_one_way_in() -> None:
    net = net_with([3, 4, 3, 2], ((0, 1), (0, 2), (1, 2), (2, 3)))
    for layer in (0, 1):
        with pytest.raises(ValueError, match=f"layer {layer}"):
            ClosedFormReadout(net, layer)
    readout = ClosedFormReadout(net)
    x = inputs(net, 40)
    readout.update(x, torch.arange(40) % 2)
    with net.edit() as edit:
        edit.cut(net.layers[0][0].outgoing(to=net.layers[2][1]))
    # The node whose parents changed has no past, the others have.
    lacking = readout.statistics.lacking
    assert lacking is not None
    assert lacking.gt(0).tolist() == [False, True, False]
