"""Edits from the shell are the edits of Python, and a file is written whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import grapnet as gn

from .conftest import Ran, model_of_nets, train
from .full_disk import no_file_beyond

Run = Callable[..., Ran]
NET = Path("net.safetensors")
NEW = Path("new.safetensors")


def read(path: Path) -> tuple[gn.GrapNet, dict[str, dict]]:
    """Returns the net of a file and the state of its optimizer by the names of Parameters."""
    file = gn.open(path)
    optimizer = torch.optim.Adam(file.net.parameters())
    file.load(optimizer=optimizer)
    return file.net, {name: optimizer.state[p] for name, p in file.net.named_parameters()}


def read_attached(path: Path) -> tuple[gn.GrapNet, torch.optim.Adam]:
    """Returns the net of a file with its optimizer, ready for an edit in Python."""
    net = gn.load(path)
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    gn.restore(path, optimizer=optimizer)
    return net, optimizer


def assert_same_nets(a: gn.GrapNet, b: gn.GrapNet) -> None:
    state = b.state_dict()
    for name, value in a.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, state[name]), name
    assert a.select().owners == b.select().owners


def assert_same_states(a: dict[str, dict], b: dict[str, dict]) -> None:
    assert a.keys() == b.keys()
    for name, state in a.items():
        assert state.keys() == b[name].keys()
        for key, value in state.items():
            assert torch.equal(value, b[name][key]), (name, key)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def task_1(net: gn.GrapNet) -> gn.NodeSet:
    return net.select(owner="task-1")


EDITS = {
    "cut --owner task-1": lambda net, edit: edit.cut(task_1(net).outgoing()),
    "cut --owner task-1 --incoming --orphans": lambda net, edit: (
        edit.cut(task_1(net).incoming()),
        edit.remove_orphans(),
    ),
    "cut --owner task-1 --layer 1 --both": lambda net, edit: edit.cut(
        task_1(net).outgoing() | task_1(net).incoming()
    ),
    "cut --owner task-1 --owner task-2 --smallest 0.5": lambda net, edit: edit.cut(
        (task_1(net) | net.select(owner="task-2")).outgoing().smallest(fraction=0.5)
    ),
    "cut --transition 0 --smallest 0.5": lambda net, edit: edit.cut(
        net.layers[0].outgoing().smallest(fraction=0.5)
    ),
    "cut --node 9 --relation 9:6": lambda net, edit: edit.cut(net.node(9).outgoing(to=net.node(6))),
    "freeze --owner task-1": lambda net, edit: edit.freeze(task_1(net)),
    "freeze --transition 0": lambda net, edit: edit.freeze(net.layers[0].outgoing()),
    "freeze --owner task-1 --incoming": lambda net, edit: edit.freeze(task_1(net).incoming()),
    "unfreeze --all": lambda net, edit: edit.unfreeze(net.select()),
    "remove --owner task-1": lambda net, edit: edit.remove_nodes(task_1(net)),
    "remove --node 9 --node 12": lambda net, edit: edit.remove_nodes([9, 12]),
    "prune --fraction 0.3 --scope transition": lambda net, edit: gn.rules.PruneWeakest(
        fraction=0.3, scope="transition"
    )(net, edit, gn.rules.RuleContext()),
    "prune --transition 0 --pattern 1:2": lambda net, edit: gn.rules.PruneWeakest(
        pattern=(1, 2), transitions=0
    )(net, edit, gn.rules.RuleContext()),
    "prune --fraction 0.3 --by random --scope child --seed 3": lambda net, edit: (
        gn.rules.PruneWeakest(fraction=0.3, by=gn.rules.Random(3), scope="child")(
            net, edit, gn.rules.RuleContext()
        )
    ),
    "set-owner --owner task-1 --to x": lambda net, edit: edit.set_owner(task_1(net), "x"),
    "set-owner --owner task-1 --none": lambda net, edit: edit.set_owner(task_1(net), None),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("words", EDITS)
def test_an_edit_is_that_of_python_and_the_optimizer_follows_bit_for_bit(
    words: str, run: Run
) -> None:
    before = NET.read_bytes()
    verb, *options = words.split()
    done = run(verb, NET, *options, "-o", NEW, "--json")
    assert (done.code, done.err) == (0, "")
    net, optimizer = read_attached(NET)
    with net.edit() as edit:
        EDITS[words](net, edit)
    edited, states = read(NEW)
    gn.check(edited)
    assert_same_nets(edited, net)
    expected = {name: optimizer.state[p] for name, p in net.named_parameters()}
    assert_same_states(states, expected)
    assert NET.read_bytes() == before
    outcome = json.loads(done.out)
    assert outcome["before"]["file_bytes"] == NET.stat().st_size
    assert outcome["after"]["file_bytes"] == NEW.stat().st_size
    assert outcome["after"]["version"] == edited.version == 8
    assert sum(outcome["after"]["relations"]) == edited.count().relations
    assert outcome["after"]["frozen"] == edited.count().frozen
    commit = edited.history[-1]
    assert (commit.reason, commit.by) == (words, f"grapnet {verb}")


@pytest.mark.usefixtures("folder")
def test_what_an_edit_does_not_touch_stays(run: Run) -> None:
    assert run("cut", NET, "--owner", "task-1", "-o", NEW).code == 0
    before = gn.open(NET)
    after = gn.open(NEW)
    assert after.extras["note"] == before.extras["note"] == {"step": 3}
    assert torch.equal(after.extras["rng"], before.extras["rng"])
    assert list(after.kinds) == list(before.kinds)
    assert (after.undo, after.history) == (before.undo, before.history) == (True, "full")


def test_a_dry_run_has_the_numbers_of_the_real_one_and_writes_nothing(
    folder: Path, run: Run
) -> None:
    before = content(folder)
    words = ["prune", NET, "--fraction", "0.3", "--json"]
    dry = json.loads(run(*words, "--dry-run").out)
    assert content(folder) == before
    real = json.loads(run(*words, "-o", NEW).out)
    assert dry | {"written": str(NEW)} == real


@pytest.mark.usefixtures("folder")
def test_undo_and_redo_bring_weights_and_moments_back_bit_for_bit(run: Run) -> None:
    net, states = read(NET)
    assert run("cut", NET, "--owner", "task-1", "--both", "-o", NEW).code == 0
    cut, cut_states = read(NEW)
    assert run("undo", NEW, "--in-place").code == 0
    back, back_states = read(NEW)
    assert_same_nets(back, net)
    assert_same_states(back_states, states)
    assert run("redo", NEW, "--in-place").code == 0
    again, again_states = read(NEW)
    assert_same_nets(again, cut)
    assert_same_states(again_states, cut_states)
    assert run("undo", NEW, "--steps", 2, "--in-place").code == 0
    assert read(NEW)[0].count().relations == 27


@pytest.mark.usefixtures("folder")
def test_undo_and_history_are_kept_as_in_the_file_or_as_asked(run: Run) -> None:
    words = ["--owner", "task-1", "-o", NEW, "--force"]
    assert run("cut", NET, *words, "--no-undo", "--history", "outline").code == 0
    file = gn.open(NEW)
    assert (file.undo, file.history) == (False, "outline")
    assert not file.net.journal.undoable
    assert run("cut", "bare.safetensors", *words).code == 0
    assert not gn.open(NEW).undo
    assert run("cut", "bare.safetensors", *words, "--undo").code == 0
    assert run("undo", NEW, "--in-place").code == 0
    assert_same_nets(gn.load(NEW), gn.load("bare.safetensors"))


@pytest.mark.usefixtures("folder")
def test_compact_makes_a_file_small_and_keeps_net_and_extras(run: Run) -> None:
    net, states = read(NET)
    size = NET.stat().st_size
    done = json.loads(run("compact", NET, "-o", NEW, "--json").out)
    assert done["before"]["file_bytes"] == size == NET.stat().st_size
    assert done["after"]["file_bytes"] == NEW.stat().st_size < 0.75 * size
    small, small_states = read(NEW)
    assert_same_nets(small, net)
    assert_same_states(small_states, states)
    assert [commit.reason for commit in small.history] == [c.reason for c in net.history]
    assert run("compact", NET, "--in-place").code == 0
    assert NET.stat().st_size == NEW.stat().st_size


def test_a_pruned_file_is_smaller(folder: Path, run: Run) -> None:
    gn.save(folder / "full.safetensors", gn.GrapNet([64, 128, 32]))
    words = ["--fraction", 0.8, "--scope", "transition", "-o", NEW, "--json"]
    done = json.loads(run("prune", "full.safetensors", *words).out)
    assert done["after"]["file_bytes"] < 0.5 * done["before"]["file_bytes"]


def test_what_cannot_follow_stops_the_edit_unless_dropped_or_kept(folder: Path, run: Run) -> None:
    net = gn.GrapNet([5, 4, 3])
    optimizer = torch.optim.LBFGS(net.parameters())
    optimizer.step(lambda: net(torch.ones(2, 5)).square().sum())
    gn.save(NET, net, opt=optimizer, scores=torch.zeros(20))
    before = content(folder)
    words = ["cut", NET, "--transition", 0, "--smallest", 0.5, "-o", NEW]
    for dropped in ([], ["--drop", "opt"], ["--drop", "scores"]):
        refused = run(*words, *dropped)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 2)
        assert content(folder) == before
    done = json.loads(run(*words, "--drop", "opt", "--keep", "scores", "--json").out)
    assert done["extras"] == {"opt": "dropped", "scores": "kept"}
    assert list(gn.open(NEW).extras) == ["scores"]


@pytest.mark.usefixtures("folder")
def test_a_net_of_a_model_is_edited_and_the_rest_stays(run: Run) -> None:
    model = model_of_nets()
    optimizer = torch.optim.Adam(model.parameters())
    gn.attach(optimizer, model)
    train(model, optimizer, 8)
    gn.save(NET, model, optimizer=optimizer, epoch=3)
    words = ["cut", NET, "--net", "0", "--all", "--smallest", 0.2, "-o", NEW, "--json"]
    assert json.loads(run(*words).out)["extras"] == {"optimizer": "followed", "epoch": "kept"}
    net = model.get_submodule("0")
    assert isinstance(net, gn.GrapNet)
    with net.edit() as edit:
        edit.cut(net.select().outgoing().smallest(fraction=0.2))
    again = model_of_nets()
    assert gn.restore(NEW, into=again) == {"epoch": 3}
    other = torch.optim.Adam(again.parameters())
    gn.restore(NEW, optimizer=other)
    x = torch.randn(5, 8)
    for each, its in ((model, optimizer), (again, other)):
        its.zero_grad()
        each(x).square().sum().backward()
        its.step()
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("folder")
def test_a_part_of_a_joint_transaction_is_undone_only_alone(run: Run) -> None:
    nets = gn.GrapNet([4, 4]), gn.GrapNet([4, 2])
    with gn.edit(*nets, reason="both") as edits:
        for net, edit in zip(nets, edits, strict=True):
            edit.cut(net.layers[0].outgoing().smallest(count=3))
    gn.save(NET, nn.Sequential(*nets), undo=True)
    assert run("undo", NET, "--net", "0", "-o", NEW).code == 2
    assert not NEW.exists()
    assert run("undo", NET, "--net", "0", "--alone", "-o", NEW).code == 0
    assert [net.count().relations for net in gn.open(NEW).nets.values()] == [16, 5]


def test_childless_nodes_go_with_those_that_have_only_such_children(folder: Path, run: Run) -> None:
    net = gn.GrapNet([3, 4, 4, 2])
    x = torch.randn(5, 3)
    with net.edit() as edit:
        edit.cut(net.layers[2][:2].outgoing())
        edit.cut(net.layers[1][:1].outgoing(to=net.layers[2][2:]))
    gn.save(NET, net)
    assert run("remove", NET, "--childless", "-o", NEW).code == 0
    smaller = gn.load(NEW)
    assert smaller.sizes == [3, 3, 2, 2]
    torch.testing.assert_close(smaller(x), net(x))


def test_a_full_disk_leaves_everything_as_it_was(folder: Path, run: Run) -> None:
    before = content(folder)
    for words in (
        ["cut", NET, "--owner", "task-1", "-o", NEW],
        ["cut", NET, "--owner", "task-1", "--in-place"],
        ["compact", NET, "--in-place"],
        ["export", NET, "--to", "safetensors-dense"],
        ["convert", "mlp.pt", "-o", NEW],
    ):
        with no_file_beyond(100):
            done = run(*words)
        assert (done.code, done.err.count("\n")) == (2, 2)
        assert content(folder) == before


def test_another_file_is_not_written_over_without_force(folder: Path, run: Run) -> None:
    NEW.write_text("precious")
    before = content(folder)
    for words in (
        ["cut", NET, "--owner", "task-1"],
        ["compact", NET],
        ["export", NET, "--to", "safetensors-dense"],
        ["convert", "mlp.pt"],
        ["plot", NET],
    ):
        output = NEW
        if words[0] == "plot":
            output = folder / "picture.png"
            output.write_text("precious")
            before = content(folder)
        refused = run(*words, "-o", output)
        assert refused.code == 2
        assert content(folder) == before
        assert run(*words, "-o", output, "--force").code == 0
        output.write_text("precious")
        before = content(folder)
