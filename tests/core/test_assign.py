"""edit.assign on nets: values that are part of a transaction, and what follows them."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adam
from torch.optim.swa_utils import AveragedModel

import grapnet as gn

X = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
BACKENDS = ["reference", "dense", "family", "sparse"]


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([4, 5, 3], activation="tanh", density=0.8, dtype=torch.float64)


def attached(net: gn.GrapNet, kind: Callable[..., Any] = Adam, **options: Any) -> Any:
    optimizer = kind(net.parameters(), **{"lr": 0.05, **options})
    gn.attach(optimizer, net)
    return optimizer


def train(net: gn.GrapNet, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(X).square().sum().backward()
        optimizer.step()


def by_hand(net: gn.GrapNet) -> Tensor:
    """Returns the output of a net of three layers, computed with plain matrices."""
    hidden = X
    for number in (1, 2):
        layer = net.layers[number]
        matrix = torch.zeros(net.sizes[number - 1], net.sizes[number], dtype=torch.float64)
        transition = net.transitions[number - 1]
        parents = transition.topology.parents().long()
        matrix[parents, transition.child.long()] = transition.values().detach()
        hidden = hidden @ matrix + layer.biases.detach()
        if number == 1:
            hidden = hidden.tanh()
    return hidden


def snapshot(net: gn.GrapNet, optimizer: Any = None) -> dict[str, Any]:
    """Returns copies of everything that an edit may change."""
    found: dict[str, Any] = {"version": net.version, "history": repr(net.history)}
    found |= {name: value.clone() for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        found[f"gradient of {name}"] = copy.deepcopy(parameter.grad)
        if optimizer is not None:
            found |= {f"{k} of {name}": v for k, v in optimizer.state[parameter].items()}
    return copy.deepcopy(found)


def same(one: dict[str, Any], other: dict[str, Any], *without: str) -> bool:
    if one.keys() != other.keys():
        return False
    for name in one.keys() - set(without):
        if isinstance(one[name], Tensor):
            if not torch.equal(one[name], other[name]):
                return False
        elif one[name] != other[name]:
            return False
    return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_biases_get_the_values_and_undo_gives_every_bit_back(
    net: gn.GrapNet, backend: str
) -> None:
    net.execution.use(backend)
    optimizer = attached(net)
    train(net, optimizer)
    net(X).sum().backward()
    before = snapshot(net, optimizer)
    output = net(X)
    relations = net.layers[1].outgoing()
    with net.edit(reason="assign") as edit:
        edit.assign(relations, torch.arange(len(relations)))
        edit.assign(net.layers[1][2], -2.0)
        # In the order that the nodes are given in.
        edit.assign([net.layers[2][2], net.layers[1][4], net.layers[2][0]], [7.0, 8.0, 9.0])
        # Reads inside of the edit see the graph before it.
        assert torch.equal(net(X), output)
    assert torch.equal(relations.weights, torch.arange(len(relations), dtype=torch.float64))
    assert net.layers[1].biases[[2, 4]].tolist() == [-2.0, 8.0]
    assert net.layers[2].biases[[2, 0]].tolist() == [7.0, 9.0]
    assert torch.allclose(net(X), by_hand(net), rtol=0, atol=1e-12)
    assert not torch.allclose(net(X), output)
    # Gradients and optimizer state stay.
    after = snapshot(net, optimizer)
    changed = {"version", "history", "transitions.1.weight", "layers.1.bias", "layers.2.bias"}
    assert same(before, after, *changed)
    assert edit.receipt is not None
    assert edit.receipt.counts["coordinates_assigned"] == len(relations) + 4
    assert {one["operation"] for one in edit.receipt.operations} == {"assign"}
    receipt = net.undo()
    assert receipt.counts["coordinates_assigned"] == len(relations) + 4
    assert same(before, snapshot(net, optimizer), "version", "history")
    assert torch.equal(net(X), output)
    gn.check(net)


def test_undo_drops_the_training_of_assigned_coordinates_alone(net: gn.GrapNet) -> None:
    optimizer = attached(net)
    train(net, optimizer)
    chosen = net.layers[0].outgoing()[::2]
    others = net.layers[0].outgoing() - chosen
    old = chosen.weights.detach().clone()
    is_chosen = torch.zeros(net.transitions[0].size, dtype=torch.bool)
    is_chosen[::2] = True
    weight = net.transitions[0].weight
    moments = optimizer.state[weight]["exp_avg"].clone().flatten()
    with net.edit() as edit:
        edit.assign(chosen, old * 3)
    train(net, optimizer, 3)
    trained = others.weights.detach().clone()
    found = chosen.weights.detach().clone()
    present = optimizer.state[weight]["exp_avg"].clone().flatten()
    assert not torch.equal(found, old * 3)
    net.undo()
    assert torch.equal(chosen.weights, old)
    assert torch.equal(others.weights, trained)
    state = optimizer.state[weight]["exp_avg"].flatten()
    assert torch.equal(state[is_chosen], moments[is_chosen])
    assert torch.equal(state[~is_chosen], present[~is_chosen])
    # Redo writes back what undo has found.
    train(net, optimizer)
    net.redo()
    assert torch.equal(chosen.weights, found)
    assert torch.equal(optimizer.state[weight]["exp_avg"].flatten()[is_chosen], present[is_chosen])
    net.undo()
    assert not torch.equal(chosen.weights, old), "undo of a redo gives back what the redo found"


def test_state_that_came_after_the_assignment_is_clean_after_undo(net: gn.GrapNet) -> None:
    optimizer = attached(net)
    with net.edit() as edit:
        edit.assign(net.layers[2], 0.0)
    train(net, optimizer)
    net.undo()
    assert not optimizer.state[net.layers[2].parameter]["exp_avg"].any()
    assert optimizer.state[net.layers[1].parameter]["exp_avg"].any()


def test_cut_wins_over_assign(net: gn.GrapNet) -> None:
    node = net.layers[1][0]
    relations = net.layers[1].outgoing()
    leaving = len(node.outgoing())
    with net.edit() as edit:
        edit.assign(relations, 2.0)
        edit.cut(node.outgoing())
        edit.assign(net.layers[1], 1.5)
        edit.remove_nodes(net.layers[1][1])
    counts = net.history[-1].counts
    left = net.layers[1].outgoing()
    assert counts["coordinates_assigned"] == len(left) + 4
    assert len(left) < len(relations) - leaving
    assert set(left.weights.tolist()) == {2.0}
    with net.edit() as edit:
        edit.cut(left[:2])
        edit.assign(left[:2], 1.0)
    assert net.history[-1].counts["coordinates_assigned"] == 0
    net.undo()
    net.undo()
    assert torch.allclose(net(X), by_hand(net), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fold", [False, True])
def test_orphans_leave_their_constants_on_top_of_assigned_biases(
    net: gn.GrapNet, fold: bool
) -> None:
    node = net.layers[1][0]
    assert node.bias is not None
    before = snapshot(net)
    constant = node.bias.detach().tanh() * node.outgoing().weights.detach()
    expected = torch.full((3,), 4.0, dtype=torch.float64)
    for child, amount in zip(node.children, constant.tolist(), strict=True):
        expected[child.row] += amount * fold
    with net.edit() as edit:
        edit.cut(node.incoming())
        edit.remove_orphans(fold_bias=fold)
        edit.assign(net.layers[2], 4.0)
    assert torch.equal(net.layers[2].biases, expected)
    net.undo()
    assert same(before, snapshot(net), "version", "history")


def test_frozen_coordinates_are_assigned_only_where_the_edit_unfreezes_them(
    net: gn.GrapNet,
) -> None:
    optimizer = attached(net)
    train(net, optimizer)
    with net.edit() as edit:
        edit.freeze(net.layers[1][:2])
    # Freezing drops gradients.
    optimizer.zero_grad()
    before = snapshot(net, optimizer)
    for ask in (
        lambda edit: edit.assign(net.layers[1][0].outgoing()[:1], 1.0),
        lambda edit: edit.assign(net.layers[1], 1.0),
        # Freezing wins over unfreezing.
        lambda edit: (
            [verb(net.layers[1]) for verb in (edit.unfreeze, edit.freeze)]
            + [edit.assign(net.layers[1], 1.0)]
        ),
    ):
        with pytest.raises(gn.errors.FrozenError), net.edit() as edit:
            ask(edit)
        assert same(before, snapshot(net, optimizer))
    output = net(X)
    with net.edit() as edit:
        edit.assign(net.layers[1], 1.0)
        edit.assign(net.layers[1].outgoing(), 0.5)
        edit.unfreeze(net.layers[1][:1])
        edit.unfreeze(net.layers[1][1], outgoing=True, incoming=False)
        edit.freeze(net.layers[1][4])
    assert net.layers[1].biases.tolist() == [1.0] * 5
    assert net.layers[1][4].frozen
    assert torch.allclose(net(X), by_hand(net), rtol=0, atol=1e-12)
    net.undo()
    assert torch.equal(net(X), output)
    assert same(before, snapshot(net, optimizer), "version", "history")
    net.redo()
    assert net.layers[1].biases.tolist() == [1.0] * 5
    assert not net.layers[1][0].frozen


def test_what_is_impossible_leaves_everything_as_it_was(net: gn.GrapNet) -> None:
    optimizer = attached(net)
    train(net, optimizer)
    relations = net.layers[0].outgoing()
    before = snapshot(net, optimizer)

    class Reluctant:
        def prepare(self, graph: Any, commit: Any) -> Any:
            raise RuntimeError

    def refuse(edit: gn.Edit) -> None:
        edit.assign(relations, 1.0)
        net.follow(follower)

    follower = Reluctant()
    cases: list[tuple[type[Exception], Callable[[gn.Edit], object]]] = [
        (gn.errors.EditError, lambda edit: edit.assign(relations, [1.0, 2.0])),
        (gn.errors.EditError, lambda edit: edit.assign(relations, torch.nan)),
        (
            gn.errors.EditError,
            lambda edit: edit.assign(net.layers[2], torch.tensor([1.0, 2.0, torch.inf])),
        ),
        (gn.errors.EditError, lambda edit: edit.assign(net.layers[0], 1.0)),
        (gn.errors.EditError, lambda edit: edit.assign(edit.add_nodes(1, 1), 1.0)),
        (gn.errors.EditError, lambda edit: [edit.assign(relations[:2], 1.0) for _ in range(2)]),
        (gn.errors.EditError, lambda edit: edit.assign(net.layers[1].uids[[0, 0]], [1.0, 2.0])),
        (gn.errors.StaleNodeError, lambda edit: edit.assign([10**6], 1.0)),
        (TypeError, lambda edit: edit.assign("layers", 1.0)),
        (gn.errors.EditError, lambda edit: (edit.assign(relations, 1.0), edit.insert_layer(0))),
        (RuntimeError, refuse),
    ]
    for kind, ask in cases:
        with pytest.raises(kind), net.edit() as edit:
            ask(edit)
        assert same(before, snapshot(net, optimizer))
    net.unfollow(follower)
    # An assignment of nothing is no edit.
    with net.edit() as edit:
        edit.assign(relations[:0], [])
        edit.assign([], [])
    assert edit.receipt is None


def test_the_values_belong_to_the_edit(net: gn.GrapNet) -> None:
    values = torch.ones(3, dtype=torch.float64)
    with net.edit() as edit:
        edit.assign(net.layers[2], values)
        values.fill_(9.0)
    assert net.layers[2].biases.tolist() == [1.0] * 3
    # A number that is finite in another precision alone is refused.
    low = gn.GrapNet([2, 2])
    with pytest.raises(gn.errors.EditError), low.edit() as edit:
        edit.assign(low.layers[1], torch.tensor([1e300, 0.0], dtype=torch.float64))


def test_a_trial_is_reverted_with_its_values_and_state(net: gn.GrapNet) -> None:
    optimizer = attached(net)
    train(net, optimizer)
    net(X).sum().backward()
    before = snapshot(net, optimizer)
    output = net(X)
    with net.edit(trial=True) as edit:
        edit.assign(net.layers[0].outgoing(), 0.1)
        edit.assign(net.layers[2], 1.0)
        edit.cut(net.layers[1].outgoing()[:2])
        edit.commit()
        assert not torch.equal(net(X), output)
    assert same(before, snapshot(net, optimizer))


def test_joint_edits_assign_in_all_nets_or_in_none() -> None:
    torch.manual_seed(1)
    nets = [gn.GrapNet([3, 2]), gn.GrapNet([2, 4])]
    before = [snapshot(one) for one in nets]

    def assign_twice(edits: tuple[gn.Edit, ...]) -> None:
        for one in (0, 1, 1):
            edits[one].assign(nets[one].layers[1], 1.0)

    with pytest.raises(gn.errors.EditError), gn.edit(*nets) as edits:
        assign_twice(edits)
    assert all(same(a, snapshot(b)) for a, b in zip(before, nets, strict=True))
    with gn.edit(*nets) as edits:
        edits[0].assign(nets[0].layers[1], 1.0)
        edits[1].assign(nets[1].layers[1], 2.0)
    assert nets[0].layers[1].biases.tolist() == [1.0, 1.0]
    gn.undo(*nets)
    for a, b in zip(before, nets, strict=True):
        assert same(a, snapshot(b), "version", "history")
    gn.redo(*nets)
    assert nets[1].layers[1].biases.tolist() == [2.0] * 4


@pytest.mark.parametrize("kind", ["ASGD", "named"])
def test_copies_of_the_weights_in_an_optimizer_take_the_values(net: gn.GrapNet, kind: str) -> None:
    if kind == "ASGD":
        optimizer = attached(net, ASGD, t0=0)
        entry = "ax"
    else:
        optimizer = SGD(net.parameters(), lr=0.05)
        entry = "twin"
        for parameter in net.parameters():
            optimizer.state[parameter][entry] = parameter.detach().clone() + 0.5
        gn.attach(optimizer, net, copies=(entry,))
    train(net, optimizer, 5)
    weight = net.transitions[0].weight
    own = optimizer.state[weight][entry].clone()
    assert not torch.equal(own, weight.detach())
    with net.edit() as edit:
        edit.assign(net.layers[0].outgoing()[:6], 2.0)
    found = optimizer.state[weight][entry]
    assert found[:6].flatten().tolist() == [2.0] * 6
    assert torch.equal(found[6:], own[6:])
    net.undo()
    assert torch.equal(optimizer.state[weight][entry], own)


def test_an_averaged_copy_takes_the_values_and_gets_its_own_back(net: gn.GrapNet) -> None:
    averaged = AveragedModel(net)
    gn.attach(averaged, net)
    optimizer = attached(net)
    train(net, optimizer)
    averaged.update_parameters(net)
    train(net, optimizer)
    averaged.update_parameters(net)
    copied: Any = averaged.module
    before = snapshot(copied)
    with net.edit() as edit:
        edit.assign(net.layers[1], 3.0)
        edit.cut(net.layers[1].outgoing()[:1])
    assert copied.layers[1].biases.tolist() == [3.0] * 5
    assert copied.version == net.version
    net.undo()
    assert same(before, snapshot(copied), "version", "history")
    assert not torch.equal(copied.layers[1].biases, net.layers[1].biases)


def test_followed_tensors_and_recorded_readouts_notice(net: gn.GrapNet) -> None:
    entries = {name: torch.rand_like(p) for name, p in net.named_parameters()}
    followed = gn.follow(net, entries)
    with net.edit() as edit:
        edit.assign(net.layers[1].outgoing(), 1.0)
    for name, tensor in entries.items():
        assert torch.equal(followed[name], tensor)


def test_a_commit_is_repeated_on_an_equal_net_with_its_values(net: gn.GrapNet) -> None:
    other = copy.deepcopy(net)
    with net.edit() as edit:
        edit.assign(net.layers[0].outgoing(), 0.3)
        edit.remove_nodes(net.layers[1][0])
    other.replay(net.history)
    assert same(snapshot(net), snapshot(other))
    other.undo()
    net.undo()
    assert same(snapshot(net), snapshot(other))


@pytest.mark.parametrize("history", ["outline", "full"])
def test_files_keep_assignments_and_the_way_back(
    net: gn.GrapNet, tmp_path: Path, history: Any
) -> None:
    path = tmp_path / "net.safetensors"
    optimizer = attached(net)
    train(net, optimizer)
    output = net(X)
    before = snapshot(net, optimizer)
    with net.edit(reason="assign") as edit:
        edit.assign(net.layers[0].outgoing(), 0.3)
        edit.assign(net.layers[2], 0.4)
        edit.cut(net.layers[1].outgoing()[:2])
    gn.save(path, net, optimizer=optimizer, undo=True, history=history)
    loaded = gn.load(path)
    other = attached(loaded)
    gn.restore(path, optimizer=other)
    assert repr(loaded.history) == repr(net.history)
    assert loaded.history[-1].counts == edit.receipt.counts  # pyright: ignore[reportOptionalMemberAccess]
    for one, own in ((net, optimizer), (loaded, other)):
        one.undo()
        assert torch.equal(one(X), output)
        found = snapshot(one, own)
        without = {name for name in found if name.startswith("gradient")}
        assert same(before, found, "version", "history", *without)
        one.redo()
    assert same(snapshot(net), snapshot(loaded), *without)
    # Without the way back, a file knows how many there were.
    gn.save(path, net, history=history)
    assert gn.load(path).history[0].counts["coordinates_assigned"] == 16 + 3


def test_the_journal_forgets_values_and_keeps_the_count(net: gn.GrapNet) -> None:
    net.journal.undo_limit = 1
    other = copy.deepcopy(net)
    with net.edit() as edit:
        edit.assign(net.layers[2], 0.4)
    with net.edit() as edit:
        edit.set_owner(net.layers[1], "a")
    first = net.history[0]
    assert first.counts["coordinates_assigned"] == 3
    assert not first.change.has_values
    biases = net.layers[2].biases.tolist()
    other.replay(net.history)
    assert other.version == net.version
    assert other.layers[2].biases.tolist() != biases, "values that are gone are not repeated"


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions": torch.tensor([0, 3], dtype=torch.int32)},  # the first one leaves
        {"positions": torch.tensor([3, 2], dtype=torch.int32)},
        {"positions": torch.tensor([2, 99], dtype=torch.int32)},
        {"positions": torch.tensor([2], dtype=torch.int32)},
        {"positions": torch.tensor([2, 3])},
        {"before": None},
    ],
    ids=["leaves", "order", "range", "count", "type", "half"],
)
def test_a_file_with_an_impossible_assignment_is_refused(
    net: gn.GrapNet, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    path = tmp_path / "net.safetensors"
    relations = net.layers[0].outgoing()
    with net.edit() as edit:
        edit.cut(relations[:1])
        edit.assign(relations[2:4], 1.0)
    gn.save(path, net, undo=True)
    gn.load(path).undo()
    (place,) = net.journal.undoable
    commit = net.journal._details[place]
    wires = commit.change.transitions[0]
    assert wires.weights.assigned is not None
    forged = replace(wires.weights, assigned=replace(wires.weights.assigned, **wrong))
    change = replace(commit.change, transitions={0: replace(wires, weights=forged)})
    net.journal._details[place] = replace(commit, change=change)
    gn.save(path, net, undo=True)
    with pytest.raises(gn.errors.CheckpointError):
        gn.load(path)
