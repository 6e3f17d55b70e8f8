"""What an edit from the shell tells: numbers before and after, what is frozen, and who is left
without children.
"""

import json

import torch

import grapnet as gn


def test_nodes_that_lose_their_last_child_are_told_with_the_command_that_removes_them(
    checkpoint, tmp_path, run
):
    asked = ["cut", checkpoint, "--owner", "task-1"]
    told = run(*asked, "-o", tmp_path / "new").out.splitlines()
    said = "3 nodes of 'task-1' have no children left (uids 12, 13, 14)"
    assert told.count(f"{said}; grapnet remove FILE --childless takes them away") == 1
    data = json.loads(run(*asked, "--dry-run", "--json").out)
    assert data["childless"] == {
        "uids": [12, 13, 14],
        "owners": [{"owner": "task-1", "nodes": 3}],
        "remove": "grapnet remove FILE --childless",
        "others": 0,
    }
    assert (data["effect"]["before"]["childless"], data["effect"]["after"]["childless"]) == (0, 3)
    words = data["childless"]["remove"].replace("FILE", str(tmp_path / "new")).split()[1:]
    assert run(*words, "--in-place").code == 0
    assert gn.load(tmp_path / "new").sizes == [6, 6, 3]
    for others in (
        ["cut", checkpoint, "--owner", "task-1", "--incoming"],
        ["remove", checkpoint, "--owner", "task-1"],
    ):
        assert "children left" not in run(*others, "--dry-run").out
        assert json.loads(run(*others, "--dry-run", "--json").out)["childless"] is None


def test_nodes_that_nobody_hears_are_removed_with_those_that_only_they_hear_and_no_output_changes(
    tmp_path, run
):
    torch.manual_seed(0)
    net, x = gn.GrapNet([2, 3, 3, 2]), torch.randn(5, 2)
    first, second = net.layers[1], net.layers[2]  # uids 2 to 4 and 5 to 7
    with net.edit() as edit:
        edit.cut(second[0].outgoing())
        # its only child is unheard
        edit.cut(first[0].outgoing(to=second[1]) | first[0].outgoing(to=second[2]))
    gn.save(tmp_path / "old", net)
    done = run("cut", tmp_path / "old", "--node", 6, "-o", tmp_path / "new")
    said = "1 node has no children left (uid 6); grapnet remove FILE --childless takes it away"
    assert f"{said}, and 2 more that nobody hears" in done.out.splitlines()
    heard = gn.load(tmp_path / "new")(x)
    assert (
        run("remove", tmp_path / "new", "--childless", "--layer", 2, "-o", tmp_path / "part").code
        == 0
    )
    assert gn.load(tmp_path / "part").sizes == [2, 3, 1, 2]
    assert run("remove", tmp_path / "new", "--childless", "--in-place").code == 0
    net = gn.load(tmp_path / "new")
    assert net.sizes == [2, 2, 1, 2]
    torch.testing.assert_close(net(x), heard)
    ran = run("remove", tmp_path / "new", "--childless", "--dry-run")
    assert (ran.code, ran.out.split(",")[0]) == (1, "nothing matched")


def test_another_owner_is_told_and_counts_that_stay_are_not(checkpoint, tmp_path, run):
    asked = ["set-owner", checkpoint, "--layer", 1, "--to", "task-0"]
    owners = [f"owner of 3 nodes: 'task-{n}' → 'task-0'" for n in (1, 2)]
    for more in (["--dry-run"], ["-o", tmp_path / "new"]):
        head, *lines = run(*asked, *more).out.splitlines()
        assert head.endswith("version 7 → 8")
        assert lines[:2] == owners
        assert lines[2].startswith("extras:")
    changes = [{"before": f"task-{n}", "after": "task-0", "nodes": 3} for n in (1, 2)]
    assert json.loads(run(*asked, "--dry-run", "--json").out)["effect"]["owners"] == changes
    back = json.loads(run("undo", tmp_path / "new", "--dry-run", "--json").out)["effect"]["owners"]
    assert back == [{"before": one["after"], "after": one["before"], "nodes": 3} for one in changes]
    none = run("set-owner", checkpoint, "--owner", "task-1", "--none", "--dry-run").out
    assert "owner of 3 nodes: 'task-1' → none" in none.splitlines()
    removed = json.loads(run("remove", checkpoint, "--owner", "task-1", "--dry-run", "--json").out)
    assert removed["effect"]["owners"] == []  # who is gone has no other owner


def test_the_summary_shows_what_is_frozen_only_where_something_is(checkpoint, tmp_path, run):
    gn.save(tmp_path / "free", gn.GrapNet([3, 2, 2]))
    free = run("cut", tmp_path / "free", "--node", 0, "--dry-run").out
    some = run("freeze", checkpoint, "--owner", "task-1", "--dry-run").out
    assert "frozen" not in free
    turned = [line for line in some.splitlines() if line.endswith("0 → 6")]
    assert [line.split()[:4] for line in turned] == [["relations", "0", "→", "1"]]
    assert "relations 0 → 1" in free
    assert "version 0 → 1" in free


def test_state_that_freezing_leaves_out_and_that_starts_clean_is_told_and_undo_brings_it_back(
    checkpoint, bare_checkpoint, tmp_path, run
):
    frozen, freed, back = (tmp_path / name for name in ("frozen", "freed", "back"))
    ran = run("freeze", checkpoint, "--owner", "task-1", "-o", frozen)
    count = 3 + 6 + 6  # biases, relations of both sides
    said = (
        f"  optimizer: the state of {count} frozen coordinates is left out; undo of this edit"
        " brings it back"
    )
    assert said in ran.out.splitlines()
    asked = ["unfreeze", frozen, "--owner", "task-1", "-o", freed]
    assert json.loads(run(*asked, "--json").out)["optimizer_state"] == {
        "optimizer": {"left_out": 0, "clean": count}
    }
    assert (
        f"  optimizer: state starts clean for {count} coordinates"
        in run(*asked, "--force").out.splitlines()
    )
    assert "clean" not in run("undo", frozen, "-o", back).out
    for other, state in ((freed, "differs"), (back, "equal")):
        ran = run("diff", checkpoint, other, "--json")
        assert (ran.code, json.loads(ran.out)["beside"]["optimizer"]["state"]) == (0, state)
    cut = run("cut", checkpoint, "--owner", "task-1", "--dry-run").out
    bare = run("freeze", bare_checkpoint, "--owner", "task-1", "--dry-run").out
    assert "state of" not in cut
    assert "state of" not in bare
