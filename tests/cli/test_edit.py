"""Edits from the shell: they do what the same edit does in Python, to all that a file holds, or
nothing at all.
"""

import json

import pytest
import torch

import grapnet as gn
from grapnet.learning import ReservoirMemory
from grapnet.rules import lamp_scores

from .edited import assert_same_states, content, read_optimizer, values


def test_a_cut_does_what_python_does_and_the_optimizer_follows(checkpoint, tmp_path, run):
    expected = gn.load(checkpoint)
    optimizer = torch.optim.Adam(expected.parameters())
    gn.restore(checkpoint, optimizer=optimizer)
    gn.attach(optimizer, expected)
    with expected.edit(reason="forget it") as edit:
        edit.cut(expected.select(owner="task-1").outgoing())
    done = run(
        "cut",
        checkpoint,
        "--owner",
        "task-1",
        "--reason",
        "forget it",
        "-o",
        tmp_path / "cut.safetensors",
    )
    assert (done.code, done.err) == (0, "")
    net, states = read_optimizer(tmp_path / "cut.safetensors")
    assert all(
        torch.equal(a, b) for a, b in zip(net.parameters(), expected.parameters(), strict=True)
    )
    assert_same_states(
        states, {name: optimizer.state[p] for name, p in expected.named_parameters()}
    )
    assert len(states["transitions.1.weight"]["exp_avg"]) == 9  # of 18, 3 are frozen and 6 are gone
    assert (net.history[-1].reason, net.history[-1].by, net.version) == (
        "forget it",
        "grapnet cut",
        8,
    )
    assert [commit.reason for commit in net.history[:-1]] == [
        c.reason for c in expected.history[:-1]
    ]


def test_everything_else_in_the_file_stays(checkpoint, tmp_path, run):
    new = tmp_path / "new.safetensors"
    assert run("cut", checkpoint, "--owner", "task-1", "-o", new).code == 0
    found = []
    for path in (checkpoint, new):
        memory, random = ReservoirMemory(4, seed=9), torch.Generator()
        data = gn.restore(path, memory=memory, rng=random)
        found.append(
            (memory.state_dict()["content"]["x"].tolist(), random.get_state().tolist(), data)
        )
    assert found[0] == found[1]
    assert found[0][2] == {"note": {"step": 3}}


def test_a_dry_run_writes_nothing_and_tells_the_numbers_of_the_real_one(checkpoint, tmp_path, run):
    before = content(tmp_path)
    asked = ["cut", checkpoint, "--owner", "task-1", "--both", "--json"]
    told = json.loads(run(*asked, "--dry-run").out)
    assert content(tmp_path) == before
    real = json.loads(run(*asked, "-o", tmp_path / "new.safetensors").out)
    assert told.pop("dry_run") is True
    assert real.pop("dry_run") is False
    assert (told.pop("written"), real.pop("written")) == (None, str(tmp_path / "new.safetensors"))
    assert told == real
    net, effect = gn.load(tmp_path / "new.safetensors"), real["effect"]
    assert effect["removed"] == [6, 6]
    assert effect["added"] == [0, 0]
    assert effect["after"]["relations"] == [t.size for t in net.transitions] == [12, 12]
    assert (effect["before"]["orphans"], effect["after"]["orphans"]) == (0, 3)
    assert effect["after"]["bytes"] == net.count().bytes < effect["before"]["bytes"]
    text = run("cut", checkpoint, "--owner", "task-1", "--dry-run").out
    assert "dry run of cut" in text
    assert "nothing was written" in text
    assert "optimizer followed" in text


@pytest.mark.parametrize(
    ("options", "removed"),
    [
        ("--owner task-1", [0, 6]),
        ("--owner task-1 --incoming", [6, 0]),
        ("--owner task-1 --both", [6, 6]),
        ("--owner task-1 --owner task-2", [0, 9]),
        ("--owner task-0 --owner task-1 --node 9", [0, 3]),
        ("--layer 0", [18, 0]),
        ("--layer 1 --owner task-1", [0, 6]),
        ("--layer -1 --incoming", [0, 18]),
        ("--transition 0", [18, 0]),
        ("--transition 0 --transition 1", [18, 18]),
        ("--owner task-1 --both --transition 0", [6, 0]),
        ("--node 0", [3, 0]),
        ("--relation 0:9 --relation 0:10", [2, 0]),
        ("--node 0 --relation 0:9 --relation 1:9", [1, 0]),
        ("--transition 1 --smallest 0.5", [0, 9]),
        ("--owner task-2 --incoming --smallest 0.34", [2, 0]),
        ("--all", [18, 18]),
    ],
)
def test_options_of_one_kind_add_up_and_different_ones_narrow(
    bare_checkpoint, run, options, removed
):
    done = run("cut", bare_checkpoint, *options.split(), "--allow-dead", "--dry-run", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["effect"]["removed"] == removed


@pytest.mark.parametrize(
    "words", ["cut --transition 0", "prune --fraction 1", "remove --layer 1"], ids=str
)
def test_no_layer_dies_unless_it_is_allowed(bare_checkpoint, tmp_path, run, words):
    command, *options = words.split()
    new = tmp_path / "new"
    for where in (["--dry-run"], ["-o", new]):
        done = run(command, bare_checkpoint, *options, *where)
        assert done.code == 2
        assert "--allow-dead" in done.err
    assert not new.exists()
    assert run(command, bare_checkpoint, *options, "--allow-dead", "-o", new).code == 0
    assert min(t.size for t in gn.load(new).transitions) == 0


def test_the_smallest_are_the_smallest_of_what_is_selected(checkpoint, tmp_path, run):
    weakest = gn.load(checkpoint).select(owner="task-1").outgoing().smallest(count=2)
    pairs = set(zip(weakest.parents.tolist(), weakest.children.tolist(), strict=True))
    run("cut", checkpoint, "--owner", "task-1", "--smallest", "0.34", "-o", tmp_path / "new")
    gone = gn.load(tmp_path / "new").diff(7, 8).relations_removed
    assert {tuple(pair) for pair in gone.tolist()} == pairs


def test_undo_and_redo_bring_weights_and_moments_back_bit_for_bit(checkpoint, tmp_path, run):
    path = tmp_path / "new.safetensors"
    assert run("cut", checkpoint, "--owner", "task-1", "--both", "--orphans", "-o", path).code == 0
    cut = read_optimizer(path)
    assert run("undo", path, "--in-place").code == 0
    (net, states), (first, moments) = read_optimizer(path), read_optimizer(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), first.parameters(), strict=True))
    assert_same_states(states, moments)
    # of relations that were gone
    assert states["transitions.0.weight"]["exp_avg"][6:12].abs().max() > 0
    assert run("redo", path, "--in-place").code == 0
    net, states = read_optimizer(path)
    assert all(
        torch.equal(a, b) for a, b in zip(net.parameters(), cut[0].parameters(), strict=True)
    )
    assert_same_states(states, cut[1])
    assert (net.version, net.sizes) == (10, [6, 6, 3])
    done = run("undo", path, "--steps", 3, "--json", "-o", tmp_path / "older")
    # the cut; then the undo of "forget task 1" is a pair that has left the way back; then the
    # growth of task 2
    assert (done.code, gn.load(tmp_path / "older").version) == (0, 13)


def test_undo_is_kept_as_in_the_file_or_as_asked(checkpoint, bare_checkpoint, tmp_path, run):
    for path, options, kept in [
        (checkpoint, [], True),
        (checkpoint, ["--no-undo"], False),
        (bare_checkpoint, [], False),
        (bare_checkpoint, ["--undo"], True),
    ]:
        done = run(
            "cut", path, "--owner", "task-1", "-o", tmp_path / "new", "--force", "--json", *options
        )
        assert json.loads(done.out)["undo"] is kept
        assert bool(gn.load(tmp_path / "new").journal.undoable) is kept
        back = run("undo", tmp_path / "new", "--dry-run")
        assert back.code == (0 if kept else 2)
        assert (
            kept
            or f"there is nothing to undo: {tmp_path / 'new'} was saved without undo=True"
            in back.err
        )
    run("cut", checkpoint, "--owner", "task-1", "--no-undo", "-o", tmp_path / "first")
    again = run("cut", tmp_path / "first", "--owner", "task-2", "--dry-run", "--json")
    assert json.loads(again.out)["undo"] is False


def test_without_undo_the_file_holds_nothing_of_what_was_cut(checkpoint, tmp_path, run):
    weights = gn.load(checkpoint).select(owner="task-1").outgoing().weights.detach()
    moments = read_optimizer(checkpoint)[1]["transitions.1.weight"]["exp_avg"].flatten()
    gone = [value.numpy().tobytes() for value in (*weights, *moments) if value != 0]
    for option in ("--undo", "--no-undo"):
        words = ["--transition", 1, "--allow-dead", option]
        run("cut", checkpoint, *words, "-o", tmp_path / option)
    assert all(value in (tmp_path / "--undo").read_bytes() for value in gone)
    assert not any(value in (tmp_path / "--no-undo").read_bytes() for value in gone)


def test_freeze_and_unfreeze(checkpoint, tmp_path, run):
    path = tmp_path / "new.safetensors"
    done = run("freeze", checkpoint, "--owner", "task-1", "-o", path, "--json")
    after = json.loads(done.out)["effect"]["after"]
    assert (after["frozen_biases"], after["frozen_relations"]) == ([0, 3, 0], [6, 9])
    net, states = read_optimizer(path)
    assert net.select(owner="task-1").frozen.all()
    assert len(states["transitions.0.weight"]["exp_avg"]) == 12
    run("unfreeze", path, "--all", "--in-place")
    assert gn.load(path).count().frozen == 0
    run("freeze", path, "--owner", "task-1", "--incoming", "--in-place")
    net = gn.load(path)
    assert (net.count().frozen, net.select(owner="task-1").incoming().frozen.all().item()) == (
        6,
        True,
    )
    done = run("freeze", path, "--transition", "0", "--smallest", "0.5", "--dry-run", "--json")
    assert json.loads(done.out)["effect"]["after"]["frozen_biases"] == [0, 0, 0]


def test_remove_nodes_and_orphans(checkpoint, tmp_path, run):
    path = tmp_path / "new.safetensors"
    assert run("remove", checkpoint, "--owner", "task-1", "-o", path).code == 0
    assert gn.load(path).sizes == [6, 6, 3]
    assert (
        run("cut", checkpoint, "--owner", "task-2", "--incoming", "-o", path, "--force").code == 0
    )
    assert gn.load(path).sizes == [6, 9, 3]
    assert run("remove", path, "--orphans", "--in-place").code == 0
    net = gn.load(path)
    assert (net.sizes, "task-2" in net.owners) == ([6, 6, 3], False)
    assert run("remove", path, "--orphans", "--in-place").code == 1


@pytest.mark.parametrize(("scope", "removed"), [("per-transition", [9, 9]), ("global", None)])
def test_prune_cuts_the_weakest(checkpoint, tmp_path, run, scope, removed):
    done = run(
        "prune", checkpoint, "--fraction", 0.5, "--scope", scope, "-o", tmp_path / "new", "--json"
    )
    told = json.loads(done.out)["effect"]["removed"]
    before, after = gn.load(checkpoint), gn.load(tmp_path / "new")
    assert sum(told) == 18
    assert removed is None or told == removed
    assert after.count().frozen == before.count().frozen == 3
    if scope == "global":
        relations = before.select().outgoing()
        scores = lamp_scores(relations)[~relations.frozen]
        weakest = relations[~relations.frozen].smallest(count=18, key=scores)
        left = relations - weakest
        assert torch.equal(after.select().outgoing().weights, left.weights)
    done = run("prune", checkpoint, "--fraction", 0.5, "--transition", 0, "--dry-run", "--json")
    assert json.loads(done.out)["effect"]["removed"] == [9, 0]


def test_set_owner(checkpoint, tmp_path, run):
    path = tmp_path / "new.safetensors"
    assert (
        run(
            "set-owner", checkpoint, "--owner", "task-1", "--node", 12, "--to", "mine", "-o", path
        ).code
        == 0
    )
    assert gn.load(path).node(12).owner == "mine"
    assert run("set-owner", path, "--node", 12, "--to", "mine", "--in-place").code == 1
    assert run("set-owner", path, "--all", "--none", "--in-place").code == 0
    assert set(gn.load(path).select().owners) == {None}


def test_a_reason_of_its_own_names_every_value_that_was_given(checkpoint, tmp_path, run):
    path = tmp_path / "new.safetensors"
    assert run("cut", checkpoint, "--owner", "task-2", "--incoming", "-o", path).code == 0
    assert run("prune", path, "--fraction", 0, "--orphans", "--in-place").code == 0
    assert gn.load(path).history[-1].reason == "prune --fraction 0.0 --scope global --orphans"


def test_nothing_matched_is_told_and_nothing_is_written(checkpoint, tmp_path, run):
    before = content(tmp_path)
    for asked in (
        ["cut", checkpoint, "--layer", 2],
        ["cut", checkpoint, "--owner", "task-1", "--layer", 0],
        ["unfreeze", checkpoint, "--owner", "task-2"],
        ["prune", checkpoint, "--fraction", 0],
    ):
        done = run(*asked, "-o", tmp_path / "new")
        assert (done.code, done.out.count("\n"), done.err) == (1, 1, "")
        assert "nothing matched" in done.out
        assert json.loads(run(*asked, "--dry-run", "--json").out)["changed"] is False
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("asked", "message", "hint"),
    [
        (
            "cut FILE --owner task-9 -o NEW",
            "no node has the owner 'task-9'",
            "owners are: task-0, task-1, task-2",
        ),
        (
            "cut FILE --owner tsk-1 -o NEW",
            "no node has the owner 'tsk-1'",
            "did you mean 'task-1'?",
        ),
        ("cut FILE --owner zzz -o NEW", "no node has the owner 'zzz'", "hint: owners are:"),
        ("cut FILE -o NEW", "nothing says what to edit", "--owner NAME"),
        ("cut FILE --owner task-1", "nothing says where to write", "--dry-run"),
        ("cut FILE --owner task-1 -o NEW --in-place", "two places", "leave one out"),
        ("cut FILE --owner task-1 -o FILE", "is the file to edit", "--in-place"),
        ("cut FILE --owner task-1 -o EARLIER", "exists already", "--force"),
        ("cut FILE --owner task-1 -o FOLDER/none/new", "no such folder", "mkdir"),
        ("cut FILE --layer 3 -o NEW", "no layer 3", "layers are 0 to 2"),
        ("cut FILE --transition 2 -o NEW", "no transition 2", "transitions are 0 to 1"),
        ("cut FILE --node 99 -o NEW", "no node 99", "grapnet inspect FILE tells the uids"),
        (f"cut FILE --node {10**17} -o NEW", f"no node {10**17}", "grapnet inspect"),
        (f"cut FILE --node {2**70} -o NEW", f"'{2**70}' is no uid", "cut --help"),
        (f"cut FILE --node {'9' * 5000} -o NEW", f"'{'9' * 36}…' is no uid", "cut --help"),
        ("cut FILE --node x -o NEW", "'x' is no uid", "cut --help"),
        (
            f"cut FILE --relation {'9' * 5000}:9 -o NEW",
            f"--relation {'9' * 36}…: expected PARENT:CHILD",
            "3:61",
        ),
        (f"cut FILE --relation 0:{10**17} -o NEW", f"no node {10**17}", "grapnet inspect"),
        (
            "cut BROKEN --all --smallest 0.5 -o NEW",
            "1 weight of these relations cannot be ranked: NaN, at 0:3",
            "0:3",
        ),
        (
            "prune BROKEN --fraction 0.5 -o NEW",
            "1 weight of these relations cannot be ranked: NaN, at 0:3",
            "0:3",
        ),
        (
            "cut FILE --relation 0:17 -o NEW",
            "node 0 owns no relation to node 17",
            "one layer to the next",
        ),
        ("cut FILE --relation 0-17 -o NEW", "expected PARENT:CHILD", "3:61"),
        (
            "cut FILE --all --smallest -1 -o NEW",
            "--smallest is a share between 0 and 1, got -1",
            "0.3 for 30 %",
        ),
        (
            "cut FILE --all --drop nothing -o NEW",
            "--drop nothing: not in",
            "optimizer, memory, rng, note",
        ),
        (
            "cut FILE --all --drop note --keep note -o NEW",
            "--drop note and --keep note contradict",
            "leave one out",
        ),
        ("set-owner FILE --all --to= -o NEW", "--to names no owner", "--none"),
        ("cut FILE --all --net head -o NEW", "one net and no model", "leave out --net"),
        ("cut FILE --all --device tpu9 -o NEW", "--device tpu9 cannot be used", "doctor"),
        ("cut MISSING --all -o NEW", "no such file", "gn.save"),
        ("cut DAMAGED --all -o NEW", "damaged.safetensors: sha256", "an earlier one"),
        ("cut FOLDER --all -o NEW", "is a folder", ""),
        ("remove FILE --owner task-1 --layer 0 --node 0 --node 1 --all --layer 2 -o NEW", "", ""),
        (
            "remove FILE --layer 2 -o NEW",
            "3 of these are output nodes, of layer 2",
            "interface=True",
        ),
        (
            "remove FILE --node 3 -o NEW",
            "node 3 is one of the sensory nodes, of layer 0",
            "interface=True",
        ),
        (
            "remove FILE --all -o NEW",
            "6 of these are sensory nodes",
            "name a hidden layer besides: --layer 1",
        ),
        ("remove FILE -o NEW", "nothing says which nodes", "--owner"),
        (
            "prune FILE --fraction 30 -o NEW",
            "--fraction is a share between 0 and 1, got 30",
            "--fraction 0.3 for 30 %",
        ),
        (
            "undo FILE --steps 99 -o NEW",
            "5 of 99 steps can be undone; then: there is nothing to undo",
            "--steps 5",
        ),
        ("undo FILE --steps 0 -o NEW", "at least 1", ""),
        ("redo EARLIER -o NEW", "grapnet: there is nothing to redo", "history"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    checkpoint, earlier_checkpoint, damaged_checkpoint, tmp_path, run, asked, message, hint
):
    names = {
        "FILE": checkpoint,
        "DAMAGED": damaged_checkpoint,
        "MISSING": tmp_path / "missing",
        "NEW": tmp_path / "new",
        "EARLIER": earlier_checkpoint,
        "BROKEN": tmp_path / "broken",
    }
    broken = gn.GrapNet([3, 2])
    with torch.no_grad():
        broken.transitions[0].weight[0] = float("nan")
    gn.save(names["BROKEN"], broken)
    before = content(tmp_path)
    words = [names.get(word, word.replace("FOLDER", str(tmp_path))) for word in asked.split()]
    done = run(*words)
    if not message:
        assert done.code == 1  # layers 0 and 2 hold none of that owner
    else:
        lines = done.err.splitlines()
        assert (done.code, done.out) == (2, "")
        assert lines[0].startswith("grapnet: ")
        assert message in lines[0]
        assert len(lines) == (2 if hint else len(lines)) <= 2
        assert hint in lines[-1]
    assert content(tmp_path) == before


def test_relations_that_are_not_ranked_may_be_broken(tmp_path, run):
    net = gn.GrapNet([3, 2])
    with torch.no_grad():
        net.transitions[0].weight[0] = float("nan")
    gn.save(tmp_path / "broken", net)
    assert run("cut", tmp_path / "broken", "--relation", "0:3", "-o", tmp_path / "mended").code == 0
    assert run("prune", tmp_path / "mended", "--fraction", 0.5, "--dry-run").code == 0
    with net.edit() as edit:
        edit.freeze(net.node(0).outgoing())
    gn.save(tmp_path / "frozen", net)
    # it ranks what it may cut
    assert run("prune", tmp_path / "frozen", "--fraction", 0.5, "--dry-run").code == 0


def test_what_somebody_else_writes_meanwhile_stays(checkpoint, tmp_path, run, monkeypatch):
    new, check = tmp_path / "new", gn.check

    def check_slowly(net: gn.GrapNet) -> None:
        check(net)
        new.write_text("theirs")  # once -o has been found free

    monkeypatch.setattr(gn, "check", check_slowly)
    done = run("cut", checkpoint, "--owner", "task-1", "-o", new)
    assert (done.code, new.read_text()) == (2, "theirs")
    assert "exists already" in done.err
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    done = run("cut", checkpoint, "--owner", "task-1", "-o", loop)
    assert (done.code, loop.is_symlink(), "leads back to itself" in done.err) == (2, True, True)
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "new", "loop"}


def test_in_place_and_force_write_over_and_nothing_else_is_left(checkpoint, tmp_path, run):
    first = values(gn.load(checkpoint))
    assert run("cut", checkpoint, "--node", 0, "-o", tmp_path / "new").code == 0
    assert run("cut", checkpoint, "--node", 1, "-o", tmp_path / "new", "--force").code == 0
    assert all(torch.equal(a, b) for a, b in zip(values(gn.load(checkpoint)), first, strict=True))
    assert gn.load(tmp_path / "new").node(0).degree == 3
    assert run("cut", checkpoint, "--node", 0, "--in-place").code == 0
    assert gn.load(checkpoint).node(0).degree == 0
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "new"}
