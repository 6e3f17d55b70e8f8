"""Keys and queries through whatever happens to a net: edits, undo, trials, copies and files."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import grapnet as gn
from tests.checkpoint.files import build, parse
from tests.execution.attended import dense_attention, difference, step, trained
from tests.execution.figures import inputs
from tests.fingerprint import as_bytes, fingerprint


def coordinates(
    net: gn.GrapNet, optimizer: torch.optim.Optimizer, name: str
) -> dict[str, dict[int, float]]:
    """Returns value, gradient and optimizer slots of a column, by the uid of the node."""
    column = net.columns[name]
    uids = net.layers[column.layer].uids.tolist()
    state = optimizer.state[column.value]
    assert column.value.grad is not None
    found = {
        "value": column.value,
        "grad": column.value.grad,
        **{k: v for k, v in state.items() if v.dim()},
    }
    return {key: dict(zip(uids, values.tolist(), strict=True)) for key, values in found.items()}


def test_keys_and_queries_follow_nodes_and_come_back() -> None:
    net, optimizer = trained()
    objects = dict(net.named_parameters())
    before = {name: coordinates(net, optimizer, name) for name in net.columns}
    gone = net.layers[1].uids[[1, 3]].tolist()
    with net.edit(generator=torch.Generator().manual_seed(4)) as edit:
        edit.remove_nodes(net.layers[1][[1, 3]])
        new = edit.add_nodes(1, 2)
        edit.connect(net.layers[0], new)
        edit.connect(new, net.layers[2])
    gn.check(net)
    assert dict(net.named_parameters()).keys() == objects.keys()
    assert all(p is objects[name] for name, p in net.named_parameters())
    assert {"columns.query_0.value", "columns.key_1.value"} <= net.history[-1].parameters.keys()
    assert "columns.key_0.value" not in net.history[-1].parameters
    for name in ("query_0", "key_1"):
        after = coordinates(net, optimizer, name)
        for key, values in after.items():
            born = {uid: values.pop(uid) for uid in new.uids.tolist()}
            assert values == {
                uid: old for uid, old in before[name][key].items() if uid not in gone
            }, (name, key)
            assert all(
                (0 < abs(number) <= 1) if key == "value" else number == 0
                for number in born.values()
            )
    assert difference(net, inputs(net, 9)) <= 1e-12
    net.undo()
    gn.check(net)
    for name in net.columns:
        returned = coordinates(net, optimizer, name)
        if name in ("query_0", "key_1"):  # the gradients of removed nodes do not return
            returned["grad"] |= {uid: before[name]["grad"][uid] for uid in gone}
        assert returned == before[name], name
    assert difference(net, inputs(net, 9)) <= 1e-12
    net.redo()
    assert net.columns["query_0"].value[3:].abs().min() > 0  # what was born comes back as it was
    step(net, optimizer)
    assert difference(net, inputs(net, 9)) <= 1e-12


def test_a_trial_and_a_refused_edit_leave_every_bit() -> None:
    net, optimizer = trained()
    before = as_bytes(net.columns["key_1"].value)
    with net.edit(trial=True) as edit:
        edit.remove_nodes(net.layers[1][:2])
        edit.commit()
        assert len(net.columns["key_1"].value) == 3
        with pytest.raises(gn.errors.EditError):
            net.execution.use("auto")
    assert as_bytes(net.columns["key_1"].value) == before
    assert net.execution.choices() == ["attention", "attention"]
    optimizer.state[net.columns["key_1"].value]["odd"] = torch.zeros(2, 3)
    unchanged = fingerprint(net, optimizer)
    with pytest.raises(gn.errors.OptimizerError, match=r"columns\.key_1\.value"):
        grow(net)
    assert fingerprint(net, optimizer) == unchanged


def test_undo_of_what_came_before_attention_and_replay() -> None:
    net = gn.GrapNet([4, 5, 3], dtype=torch.float64)
    twin = copy.deepcopy(net)
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][2])
    net.execution.use("attention", transition=1)
    keys = net.columns["key_1"].value.tolist()
    with net.edit() as edit:
        edit.connect(edit.add_nodes(1, 1), net.layers[2])
    grown = net.columns["key_1"].value.tolist()
    recorded = net.history
    net.undo()
    net.undo()
    # it had none when it left
    assert net.columns["key_1"].value.tolist() == [
        *keys[:2],
        0.0,
        *keys[2:],
    ]
    assert difference_of_last(net) <= 1e-12
    net.execution.use("auto")
    net.redo()
    net.redo()
    gn.check(net)
    twin.execution.use("attention", transition=1, key=torch.ones(5), query=torch.ones(3))
    twin.replay(recorded)
    assert twin.columns["key_1"].value.tolist() == [1, 1, 1, 1, grown[-1]]


def difference_of_last(net: gn.GrapNet) -> float:
    transition = net.transitions[1]
    x = torch.linspace(-1, 1, 2 * net.sizes[1], dtype=torch.float64).view(2, -1)
    key = net.columns["key_1"].value
    query = net.columns["query_1"].value
    bias = net.layers[2].biases
    expected = dense_attention(x, transition.values(), key, query, transition.topology, bias)
    return float(
        (net.execution.plan(1)(x, transition.values(), bias) - expected).detach().abs().max()
    )


def same(one: gn.GrapNet, other: gn.GrapNet) -> None:
    x = inputs(one, 9)
    mine = one.state_dict()
    theirs = other.state_dict()
    assert one.execution.choices() == other.execution.choices()
    assert list(mine) == list(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert torch.equal(one(x), other(x))


def test_state_dicts() -> None:
    net, _ = trained()
    state = copy.deepcopy(net.state_dict())
    other = copy.deepcopy(net)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.load_state_dict(state)
    same(net, other)
    before = fingerprint(other)
    with pytest.raises(gn.errors.TopologyError, match=r"columns\.key_1\.value has 4 coordinates"):
        other.load_state_dict({**state, "columns.key_1.value": torch.zeros(4)})
    assert fingerprint(other) == before
    other.execution.use("auto")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*columns\.key_0\.value"):
        other.load_state_dict(state)
    other.execution.use("attention")
    with pytest.raises(RuntimeError, match=r"Missing key.*columns\.key_0\.value"):
        other.load_state_dict(
            {name: value for name, value in state.items() if "columns" not in name}
        )


def test_a_file_brings_back_everything(tmp_path: Any) -> None:
    net, optimizer = trained()
    net.execution.use("auto", transition=0)  # and back: their order is that of coming
    net.execution.use("attention", transition=0, bound=0.25)
    step(net, optimizer)
    with net.edit(generator=torch.Generator().manual_seed(1)) as edit:
        edit.remove_nodes(net.layers[1][[0, 2]])
        edit.connect(edit.add_nodes(1, 1), net.layers[2])
    step(net, optimizer)
    gn.save(tmp_path / "net", net, undo=True, optimizer=optimizer)
    loaded = gn.load(tmp_path / "net")
    other = torch.optim.Adam(loaded.parameters(), lr=0.01)
    gn.restore(tmp_path / "net", optimizer=other)
    gn.attach(other, loaded)
    same(net, loaded)
    assert list(loaded.columns) == ["key_1", "query_1", "key_0", "query_0"]
    assert {column.bound for column in loaded.columns.values()} == {0.25, 1.0}
    for action in (lambda n: n.undo(), lambda n: None, lambda n: n.redo(), grow):
        for either in (net, loaded):
            torch.manual_seed(5)
            action(either)
        gn.check(loaded)
        same(net, loaded)
        assert step(net, optimizer) == step(loaded, other)
        for name in net.columns:
            assert coordinates(net, optimizer, name) == coordinates(loaded, other, name)
    gn.save(tmp_path / "plain", net)
    assert not [
        name
        for name in parse((tmp_path / "plain").read_bytes())[1]
        if "journal" in name and "columns" in name
    ]
    same(gn.load(tmp_path / "plain"), net)


def grow(net: gn.GrapNet) -> None:
    """Adds two nodes."""
    with net.edit() as edit:
        edit.connect(net.layers[0], edit.add_nodes(1, 2))


FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "no choice": lambda graph, tensors: graph["columns"].pop(),
    "a column twice": lambda graph, tensors: graph["columns"].append(graph["columns"][0]),
    "a negative bound": lambda graph, tensors: graph["columns"][0].update(bound=-1.0),
    "no columns": lambda graph, tensors: graph.pop("columns"),
    "too few keys": lambda graph, tensors: tensors.update(
        {"columns.key_1": tensors["columns.key_1"][:2]}
    ),
    "no keys": lambda graph, tensors: tensors.pop("columns.key_1"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_file_with_other_columns_is_refused(forgery: str, tmp_path: Path) -> None:
    net, _ = trained()
    gn.save(tmp_path / "net", net)
    document, tensors = parse((tmp_path / "net").read_bytes())
    FORGERIES[forgery](document["graph"], tensors)
    (tmp_path / "forged").write_bytes(build(json.dumps(document), tensors))
    with pytest.raises(gn.errors.CheckpointError, match="columns"):
        gn.load(tmp_path / "forged")
