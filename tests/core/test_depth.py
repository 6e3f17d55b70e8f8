"""Layers of a net come and leave, and everything that belongs to the net follows."""

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
from grapnet.execution import register_activation

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
EXACT = [
    ("relu", None),
    ("relu6", None),
    ("identity", None),
    ("relu6", "relu"),
    ("sigmoid", "relu"),
    ("softplus", "relu"),
    ("relu", "leaky_relu(0.3)"),
    ("relu", "elu"),
    ("sigmoid", "relu6"),
    ("tanh", "identity"),
    ("gelu", "identity"),
]
INEXACT = [
    ("tanh", None),
    ("gelu", None),
    ("leaky_relu", None),
    ("sigmoid", None),
    ("relu", "tanh"),
    ("relu", "selu"),
    ("relu", "relu6"),
    ("tanh", "relu"),
    ("identity", "relu"),
]


def make(sizes: tuple[int, ...] = (4, 6, 5, 2), seed: int = 0, **settings: Any) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(seed)
    return gn.GrapNet(sizes, generator=generator, **settings)


def insert(net: gn.GrapNet, *args: Any, **settings: Any) -> gn.NodeSet:
    with net.edit(reason="deeper") as edit:
        return edit.insert_layer(*args, **settings)


def remove(net: gn.GrapNet, layer: Any) -> None:
    with net.edit(reason="shallower") as edit:
        edit.remove_layer(layer)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(X).square().sum().backward()
        optimizer.step()


def attached(net: gn.GrapNet, **settings: Any) -> Adam:
    optimizer = Adam(net.named_parameters(), lr=0.01)
    gn.attach(optimizer, net, **settings)
    train(net, optimizer)
    return optimizer


def everything(net: gn.GrapNet) -> list[Any]:
    """Returns structure and numbers of a net."""
    found: list[Any] = [net.sizes, net.ends]
    for layer in net.layers:
        found += [layer.uids.tolist(), layer.owners, layer.activations]
    for name, tensor in net.state_dict().items():
        found.append((name, tensor.tolist()))
    return found


@pytest.mark.parametrize("backend", ["auto", "dense", "reference", "sparse", "family"])
@pytest.mark.parametrize("init", ["identity", "net2deeper"])
def test_an_inserted_layer_changes_no_bit_and_leaves_with_every_bit(init: str, backend: str):
    net = make(density=0.7)
    net.execution.use(backend)
    before = everything(net)
    y = net(X)
    new = insert(net, 1, init=init, owner="deep")
    net.execution.use(backend)
    gn.check(net)
    assert net.sizes == [4, 6, 6, 5, 2]
    assert torch.equal(net(X), y)
    assert (
        new.uids.tolist() == net.layers[2].uids.tolist() == net.select(owner="deep").uids.tolist()
    )
    assert net.transitions[1].size == (6 if init == "identity" else 36)
    remove(net, 2)
    gn.check(net)
    assert everything(net) == before
    assert torch.equal(net(X), y)


@pytest.mark.parametrize(("before", "activation"), EXACT)
def test_activations_that_return_what_they_receive(before: str, activation: str | None):
    net = make(activation=before)
    y = net(X)
    new = insert(net, 1, activation=activation)
    assert torch.equal(net(X), y)
    assert set(new.activations) == {activation or before}


@pytest.mark.parametrize(("before", "activation"), INEXACT)
def test_activations_that_would_change_the_function_are_refused(
    before: str, activation: str | None
):
    net = make(activation=before)
    state = everything(net)
    with pytest.raises(gn.errors.EditError, match=activation or before):
        insert(net, 1, activation=activation)
    assert everything(net) == state
    assert net.version == 0
    # A control: they do change it.
    x = 100 * X
    y = net(x)
    insert(net, 1, activation="identity")
    assert torch.equal(net(x), y)
    with net.edit() as edit:
        edit.set_activation(net.layers[2], activation or before)
    assert not torch.equal(net(x), y)


def test_an_activation_of_the_user_is_behind_nothing():
    register_activation("twice", lambda z: 2 * z)
    net = make()
    with pytest.raises(gn.errors.EditError, match="twice"):
        insert(net, 1, activation="twice")


def test_relu6_behind_dropout_is_refused():
    net = make(activation="relu6")
    net.layers[1].dropout = 0.5
    with pytest.raises(gn.errors.EditError, match="dropout"):
        insert(net, 1)
    relu = make()
    relu.layers[1].dropout = 0.5
    torch.manual_seed(0)
    y = relu(X)
    insert(relu, 1)
    torch.manual_seed(0)
    assert torch.equal(relu(X), y)


def test_nodes_keep_their_own_activations():
    net = make()
    with net.edit() as edit:
        edit.set_activation(net.layers[1][2], "identity")
    y = net(X)
    new = insert(net, 1)
    assert new.activations == net.layers[1].activations
    assert torch.equal(net(X), y)


def test_surplus_nodes_receive_everything_and_have_no_children_yet():
    net = make(dtype=torch.float64)
    x = X.double()
    y = net(x)
    new = insert(net, 1, 9)
    assert net.sizes == [4, 6, 9, 5, 2]
    torch.testing.assert_close(net(x), y, rtol=0, atol=1e-14)
    surplus = new[6:]
    assert len(surplus.incoming()) == 3 * 6
    assert len(surplus.outgoing()) == 0
    assert bool((surplus.incoming().weights != 0).all())
    with net.edit() as edit:
        edit.connect(surplus, net.layers[3], weights="zero")
    torch.testing.assert_close(net(x), y, rtol=0, atol=1e-14)
    net(x).square().sum().backward()
    assert bool((surplus.outgoing().gradients != 0).any())
    # With children the surplus nodes count.
    state = everything(net)
    with pytest.raises(gn.errors.EditError, match="9 and 6"):
        remove(net, 2)
    assert everything(net) == state
    net.undo()
    remove(net, 2)
    torch.testing.assert_close(net(x), y, rtol=0, atol=1e-14)


def test_a_removed_layer_passes_its_relations_on_row_by_row():
    net = make((4, 5, 5, 2))
    leaving = net.layers[2].outgoing().weights.detach().clone()
    first = net.transitions[0].weight
    last = net.transitions[2].weight
    remove(net, net.layers[2])
    assert net.sizes == [4, 5, 2]
    assert net.transitions[0].weight is first
    assert net.transitions[1].weight is last
    assert torch.equal(net.layers[1].outgoing().weights, leaving)
    assert net.layers[1].outgoing().parents.unique().tolist() == net.layers[1].uids.tolist()


REFUSED = {
    "behind the last layer": lambda edit: edit.insert_layer(-1),
    "no such layer": lambda edit: edit.insert_layer(7),
    "too small": lambda edit: edit.insert_layer(1, 5),
    "half a node": lambda edit: edit.insert_layer(1, 6.5),
    "unknown init": lambda edit: edit.insert_layer(1, init="zero"),
    "no owner": lambda edit: edit.insert_layer(1, owner=3),
    "the sensory layer": lambda edit: edit.remove_layer(0),
    "the last layer": lambda edit: edit.remove_layer(-1),
    "other sizes": lambda edit: edit.remove_layer(2),
    "a node as well": lambda edit: (edit.insert_layer(1, 8), edit.add_nodes(1, 1)),
    "an owner as well": lambda edit: (edit.set_owner([5], "a"), edit.insert_layer(1)),
    "behind a layer that leaves": lambda edit: (edit.remove_layer(1), edit.insert_layer(1)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_leave_everything_as_it_was(what: str):
    net = make()
    optimizer = attached(net)
    state = everything(net)
    random = torch.get_rng_state()
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        REFUSED[what](edit)
    assert everything(net) == state
    assert net.version == 0
    assert len(optimizer.param_groups[0]["params"]) == 6
    assert torch.equal(torch.get_rng_state(), random)


def test_a_policy_with_parameters_is_named():
    net = make()
    net.execution.use("attention", transition=1)
    with pytest.raises(gn.errors.EditError, match="key_1"):
        insert(net, 1)
    net.execution.use("auto")
    insert(net, 1)


def test_several_layers_in_one_edit():
    net = make((4, 6, 5, 5, 2))
    expected = copy.deepcopy(net)
    remove(expected, 3)
    y = expected(X)
    with net.edit() as edit:
        first = edit.insert_layer(1)
        second = edit.insert_layer(1, init="net2deeper")
        edit.remove_layer(3)
        edit.insert_layer(0)
    assert net.sizes == [4, 4, 6, 6, 6, 5, 2]
    assert first.uids.tolist() == net.layers[3].uids.tolist()
    assert second.uids.tolist() == net.layers[4].uids.tolist()
    assert torch.equal(net(X), y)
    gn.check(net)
    net.undo()
    assert net.sizes == [4, 6, 5, 5, 2]
    net.redo()
    assert torch.equal(net(X), y)


def test_handles_stay_with_their_nodes():
    net = make()
    layers = net.layers
    hidden = net.layers[2]
    nodes = net.layers[2][1:3]
    both = net.select(layer=[1, 2])
    node = net.layers[3][0]
    relations = net.layers[2].outgoing()
    biases = nodes.biases.detach().clone()
    new = insert(net, 0)
    assert net.layers is layers
    assert hidden.index == 3
    assert torch.equal(nodes.biases, biases)
    assert nodes.incoming().parents.unique().tolist() == net.layers[2].uids.tolist()
    assert len(both) == 11
    assert (node.layer, node.row) == (4, 0)
    with pytest.raises(gn.errors.StaleRelationsError):
        relations.weights  # noqa: B018
    gone = new[0]
    layer = net.layers[1]
    remove(net, 1)
    for read in (lambda: gone.bias, lambda: new.biases, lambda: net.node(gone.uid)):
        with pytest.raises(gn.errors.StaleNodeError, match=r"layers\.1"):
            read()
    with pytest.raises(gn.errors.StaleNodeError):
        layer.index  # noqa: B018
    net.undo()
    assert gone.bias is not None
    assert layer.index == 1


def test_parameters_come_beside_their_neighbours_with_clean_state():
    net = make()
    model = nn.Sequential(nn.Identity(), net)
    named = list(model.named_parameters())
    groups = [
        {"params": [(name, p) for name, p in named if p.dim() == 1], "lr": 0.02},
        {"params": [(name, p) for name, p in named if p.dim() == 2], "lr": 0.01},
    ]
    optimizer = Adam(groups)
    gn.attach(optimizer, net)
    train(net, optimizer)
    kept = {p: copy.deepcopy(optimizer.state[p]) for p in net.parameters()}
    insert(net, 0)
    insert(net, 2)
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names[0] == [f"1.layers.{n}.bias" for n in range(1, 6)]
    assert names[1] == [f"1.transitions.{t}.weight" for t in range(5)]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, net.parameters(), strict=True))
    for p, state in kept.items():
        for entry, value in state.items():
            assert torch.equal(optimizer.state[p][entry], value)
    new = [net.layers[1].bias, net.transitions[0].weight]
    assert not any(optimizer.state.get(p) for p in new)
    train(net, optimizer, 3)
    assert [int(optimizer.state[p]["step"]) for p in new] == [3, 3]
    assert int(optimizer.state[net.transitions[1].weight]["step"]) == 5
    # They leave with undo, and come back with their state.
    state = copy.deepcopy(optimizer.state[net.layers[3].bias])
    bias = net.layers[3].bias
    net.undo()
    assert bias not in optimizer.state
    assert names[0] == [f"1.layers.{n}.bias" for n in range(1, 5)]
    train(net, optimizer)
    net.redo()
    assert net.layers[3].bias is bias
    for entry, value in state.items():
        assert torch.equal(optimizer.state[bias][entry], value)
    train(net, optimizer)


def test_an_optimizer_that_renews_starts_afresh():
    net = make()
    optimizer = attached(net, survivors="renew")
    insert(net, 1)
    for p in net.parameters():
        assert not optimizer.state.get(p)
    train(net, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with net.edit(trial=True) as edit:
        edit.remove_layer(2)
        edit.commit()
    after = optimizer.state_dict()
    assert repr(before) == repr(after)


def test_an_optimizer_that_is_not_attached_is_refused():
    net = make()
    optimizer = Adam(net.parameters())
    train(net, optimizer)
    insert(net, 1)
    net(X).sum().backward()
    with pytest.raises(gn.errors.OptimizerError):
        optimizer.step()


def test_undo_and_redo_bring_back_what_training_left():
    net = make()
    optimizer = attached(net)
    insert(net, 1, init="net2deeper")
    with net.edit() as edit:
        edit.freeze(net.layers[2][0])
        edit.cut(net.layers[1].outgoing().smallest(count=3))
    train(net, optimizer)
    deep = everything(net)
    y = net(X)
    layer = net.layers[2]
    net.undo()
    net.undo()
    assert net.sizes == [4, 6, 5, 2]
    net.redo()
    net.redo()
    assert net.layers[2] is layer
    # Coordinates that were cut return from the journal, survivors as they are.
    assert everything(net) == deep
    assert torch.equal(net(X), y)
    gn.check(net)


def test_an_old_backward_pass_is_refused():
    net = make()
    old = net(X).sum()
    insert(net, 1)
    with pytest.raises(gn.errors.StaleTopologyError):
        old.backward()
    deep = net(X).sum()
    net.undo()
    with pytest.raises(gn.errors.StaleTopologyError):
        deep.backward()
    net.redo()
    net(X).sum().backward()


def test_a_trial_leaves_nothing_behind():
    net = make()
    optimizer = attached(net)
    net(X).sum().backward()
    relations = net.layers[2].outgoing()
    state = everything(net)
    gradients = [p.grad.clone() for p in net.parameters()]
    moments = copy.deepcopy(optimizer.state_dict())
    history = len(net.history)
    with net.edit(trial=True) as edit:
        edit.insert_layer(1, 8)
        edit.commit()
        assert net.sizes == [4, 6, 8, 5, 2]
        assert len(optimizer.param_groups[0]["params"]) == 8
        net(X)
    assert everything(net) == state
    assert len(net.history) == history
    assert repr(optimizer.state_dict()) == repr(moments)
    for p, gradient in zip(net.parameters(), gradients, strict=True):
        assert torch.equal(p.grad, gradient)
    assert len(relations.weights) == 10  # selected before, still valid
    optimizer.step()


def test_diff_blame_and_history_tell_what_happened():
    net = make()
    old = net.layers[1][0]
    child = net.layers[2][3]
    new = insert(net, 1)
    commit = net.history[-1]
    assert commit.counts["blocks_added"] == 1
    assert commit.operations[0]["operation"] == "insert_layer"
    diff = net.diff(0)
    assert diff.nodes_added.tolist() == new.uids.tolist()
    pairs = {tuple(pair) for pair in diff.relations_added.tolist()}
    assert (old.uid, new[0].uid) in pairs
    assert (new[0].uid, child.uid) in pairs
    assert (old.uid, child.uid) in {tuple(pair) for pair in diff.relations_removed.tolist()}
    assert net.blame(new[0]) is net.blame(new[0], child) is net.blame(old, child) is commit
    remove(net, 2)
    diff = net.diff(0)
    assert [len(part) for part in vars(diff).values()] == [0, 0, 0, 0]


def test_replay_gives_an_equal_net():
    net = make()
    twin = copy.deepcopy(net)
    optimizer = attached(net)
    insert(net, 1, 8, init="net2deeper")
    with net.edit() as edit:
        edit.connect(net.layers[2][6:], net.layers[3])
        edit.freeze(net.layers[2][0])
    train(net, optimizer)
    net.undo()
    net.undo()
    net.redo()
    insert(net, 0)
    remove(net, 1)
    net.undo()
    twin.replay(pickle.loads(pickle.dumps(list(net.history))))
    assert [layer.uids.tolist() for layer in twin.layers] == [
        layer.uids.tolist() for layer in net.layers
    ]
    for one, other in zip(twin.transitions, net.transitions, strict=True):
        assert torch.equal(one.ptr, other.ptr)
        assert torch.equal(one.child, other.child)
        assert torch.equal(one.frozen_at, other.frozen_at)
    other = make((4, 6, 6, 2))
    with pytest.raises(gn.errors.HistoryError):
        other.replay(net.history[:1])
    assert other.version == 0


def test_a_copy_has_its_own_layers():
    net = make()
    attached(net)
    insert(net, 1)
    remove(net, 2)
    twin = copy.deepcopy(net)
    twin.undo()
    twin.undo()
    twin.redo()
    assert twin.sizes == [4, 6, 6, 5, 2]
    assert torch.equal(twin(X), net(X))
    net.undo()
    mine = {id(p) for p in net.parameters()}
    assert not mine & {id(p) for p in twin.parameters()}
    with torch.no_grad():
        twin.transitions[1].weight.zero_()
    assert not torch.equal(twin(X), net(X))
    pickled = pickle.loads(pickle.dumps(net))
    assert torch.equal(pickled(X), net(X))
    with pytest.raises(gn.errors.HistoryError):
        pickled.undo()


def test_averaged_copies_follow():
    net = make()
    optimizer = attached(net)
    averaged = AveragedModel(net)
    gn.attach(averaged, net)
    averaged.update_parameters(net)
    y = averaged(X)
    insert(net, 1)
    assert torch.equal(averaged(X), y)
    train(net, optimizer)
    averaged.update_parameters(net)
    deep = averaged(X)
    remove(net, 2)
    train(net, optimizer)
    averaged.update_parameters(net)
    net.undo()
    gn.check(averaged.module)
    assert averaged.module.sizes == net.sizes == [4, 6, 6, 5, 2]
    assert deep.shape == averaged(X).shape
    averaged.update_parameters(net)
    net.undo()
    assert averaged.module.sizes == [4, 6, 5, 2]


def test_files_hold_the_net_at_its_depth(tmp_path: Path):
    net = make()
    optimizer = attached(net)
    insert(net, 0)
    insert(net, 2, 7)
    train(net, optimizer)
    with net.edit() as edit:
        edit.cut(net.layers[1].outgoing().smallest(count=2))
    path = tmp_path / "deep.gn"
    gn.save(path, net, optimizer=optimizer, undo=True, history="full")
    loaded = gn.load(path)
    assert everything(loaded) == everything(net)
    other = Adam(loaded.parameters())
    gn.restore(path, optimizer=other)
    gn.attach(other, loaded)
    for mine, theirs in zip(net.parameters(), loaded.parameters(), strict=True):
        for entry, value in optimizer.state[mine].items():
            assert torch.equal(other.state[theirs][entry], value)
    loaded.undo()
    net.undo()
    assert everything(loaded) == everything(net)
    # A file keeps no layers that have left, nor how to take them away.
    with pytest.raises(gn.errors.HistoryError):
        loaded.undo()
    train(net, optimizer)
    train(loaded, other)
    for layer in range(1, 5):
        torch.testing.assert_close(loaded.layers[layer].biases, net.layers[layer].biases)


def test_backends_stay_with_their_transitions():
    net = make()
    net.execution.use("reference", transition=1)
    net.execution.use("dense", transition=2)
    net(X)
    insert(net, 1)
    assert net.execution.choices() == ["auto", "auto", "reference", "dense"]
    plan = net.execution.plan(3)
    remove(net, 2)
    assert net.execution.choices() == ["auto", "reference", "dense"]
    net.undo()
    assert net.execution.choices() == ["auto", "auto", "reference", "dense"]
    assert plan.store is net.transitions[3]


def test_a_layer_that_comes_back_is_where_the_net_is():
    net = make()
    insert(net, 1)
    net.undo()
    net.double()
    net.eval()
    net.redo()
    assert net(X.double()).dtype == torch.float64
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    assert not net.layers[2].training


def test_recorders_are_named_and_can_let_go():
    net = make()
    recorder = gn.rules.ActivationRecorder(1)
    recorder.arm(net)
    net(X)
    with pytest.raises(gn.errors.EditError, match="ActivationRecorder"):
        insert(net, 0)
    recorder.disarm()
    with pytest.raises(gn.errors.EditError, match="ActivationRecorder"):
        insert(net, 0)
    recorder.clear()
    insert(net, 0)
    recorder.arm(net)
    net(X)
    assert len(recorder.mean) == 4


def test_export_and_snapshot_have_the_layer():
    net = make()
    insert(net, 1)
    assert len([m for m in net.snapshot() if isinstance(m, nn.Linear)]) == 4
    torch.testing.assert_close(net.snapshot()(X), net(X))
    torch.testing.assert_close(net.to_module()(X), net(X))
    assert torch.equal(net.walk(X), net.walk(X))


def test_a_layer_of_a_net_that_is_not_trained_is_not_trained():
    net = make()
    net.requires_grad_(False)
    net.transitions[2].weight.requires_grad_(True)
    insert(net, 1)
    insert(net, 3)
    assert not net.transitions[1].weight.requires_grad
    assert net.transitions[3].weight.requires_grad
    assert not net.layers[4].bias.requires_grad


def test_empty_layers():
    net = gn.GrapNet([3, 0, 2])
    x = torch.randn(2, 3)
    y = net(x)
    insert(net, 1)
    insert(net, 1, 2)
    assert net.sizes == [3, 0, 2, 0, 2]
    assert torch.equal(net(x), y)


def outputs(net: gn.GrapNet) -> Tensor:
    return net(X).detach()


def test_joint_edits_change_the_depth_of_several_nets():
    one = make()
    two = make(seed=1)
    before = [outputs(one), outputs(two)]
    with gn.edit(one, two) as (first, second):
        first.insert_layer(1)
        second.insert_layer(2)
    assert (one.sizes, two.sizes) == ([4, 6, 6, 5, 2], [4, 6, 5, 5, 2])
    assert torch.equal(outputs(one), before[0])
    gn.undo(one, two)
    assert one.sizes == two.sizes == [4, 6, 5, 2]
    with pytest.raises(gn.errors.EditError), gn.edit(one, two) as edits:
        edits[0].insert_layer(1), edits[1].remove_layer(1)
    assert one.sizes == [4, 6, 5, 2]


def test_a_grafted_net_changes_its_depth(tmp_path: Path):
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        head = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        return nn.Sequential(nn.Identity(), head)

    model = made()
    y = model(X)
    net = gn.graft(model, "1")["1"]
    insert(net, 1)
    assert torch.equal(model(X), y)
    with pytest.raises(gn.errors.ConversionError, match="come or left"):
        gn.ungraft(model)
    path = tmp_path / "model.gn"
    gn.save(path, model)
    for other in (made(), copy.deepcopy(model)):
        gn.restore(path, into=other)
        assert other[1].sizes == [4, 6, 6, 2]
        assert torch.equal(other(X), y)
    remove(net, 2)
    assert isinstance(gn.ungraft(model)["1"], nn.Sequential)
    assert torch.equal(model(X), y)


def test_an_opened_checkpoint_is_named(tmp_path: Path):
    net = make()
    gn.save(tmp_path / "net.gn", net, optimizer=attached(net))
    checkpoint = gn.open(tmp_path / "net.gn")
    with pytest.raises(gn.errors.EditError, match=r"gn\.open"):
        insert(checkpoint.net, 1)
