"""What an edit from the shell tells: numbers before and after, what is frozen, and who is left without children."""

import json

import grapnet as gn


def test_nodes_that_lose_their_last_child_are_told_with_the_command_that_removes_them(checkpoint, tmp_path, run):
    asked = ["cut", checkpoint, "--owner", "task-1"]
    told = run(*asked, "-o", tmp_path / "new").out.splitlines()
    said = "3 nodes of 'task-1' have no children left; grapnet remove FILE --owner task-1 takes them away"
    assert told.count(said) == 1
    data = json.loads(run(*asked, "--dry-run", "--json").out)
    assert data["childless"] == [{"owner": "task-1", "nodes": 3, "remove": "grapnet remove FILE --owner task-1"}]
    assert (data["effect"]["before"]["childless"], data["effect"]["after"]["childless"]) == (0, 3)
    words = data["childless"][0]["remove"].replace("FILE", str(tmp_path / "new")).split()[1:]
    assert run(*words, "--in-place").code == 0
    assert gn.load(tmp_path / "new").sizes == [6, 6, 3]
    # node 9 has one child, the nodes of task-1 two; the command would take away nodes that are heard
    part = json.loads(run("cut", checkpoint, "--node", 9, "--node", 12, "--dry-run", "--json").out)
    assert part["childless"] == [{"owner": n, "nodes": 1, "remove": None} for n in ("task-0", "task-1")]
    for others in (["cut", checkpoint, "--owner", "task-1", "--incoming"], ["remove", checkpoint, "--owner", "task-1"]):
        assert "children left" not in run(*others, "--dry-run").out
        assert json.loads(run(*others, "--dry-run", "--json").out)["childless"] == []


def test_the_command_that_removes_spares_what_cannot_be_removed(tmp_path, run):
    net = gn.GrapNet([2, 3, 2])
    with net.edit() as edit:
        edit.set_owner(net.select(), "all of it")
    gn.save(tmp_path / "old", net)
    done = run("cut", tmp_path / "old", "--transition", 1, "-o", tmp_path / "new")
    assert "grapnet remove FILE --owner 'all of it' --layer 1 takes them away" in done.out
    assert run("remove", tmp_path / "new", "--owner", "all of it", "--layer", 1, "--in-place").code == 0
    assert gn.load(tmp_path / "new").sizes == [2, 0, 2]


def test_the_summary_shows_what_is_frozen_only_where_something_is(checkpoint, tmp_path, run):
    gn.save(tmp_path / "free", gn.GrapNet([3, 2, 2]))
    free = run("cut", tmp_path / "free", "--node", 0, "--dry-run").out
    some = run("freeze", checkpoint, "--owner", "task-1", "--dry-run").out
    assert "frozen" not in free
    turned = [line for line in some.splitlines() if line.endswith("0 → 6")]
    assert [line.split()[:4] for line in turned] == [["relations", "0", "→", "1"]]
    assert "relations 0 → 1" in free
    assert "version 0 → 1" in free
