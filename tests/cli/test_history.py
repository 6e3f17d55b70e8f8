"""`grapnet history` and `grapnet diff`: the journal as it is, and every kind of difference between
two nets.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.cli.columns import WIDTH

Run = Callable[..., Any]  # the fixture `run`: (code, out, err)


def told(run: Run, *arguments: object, code: int = 0) -> dict:
    found = run(*arguments, "--json")
    assert (found.code, found.err) == (code, "")
    return json.loads(found.out)


def test_the_journal_is_told_in_order_with_what_can_be_undone(run: Run, checkpoint: Path) -> None:
    net, one = gn.load(checkpoint), told(run, "history", checkpoint)["nets"][""]
    assert [(c["version"], c["reason"], c["by"]) for c in one["commits"]] == [
        (commit.version, commit.reason, commit.by) for commit in net.history
    ]
    assert [c["counts"] for c in one["commits"]] == [
        commit.change.counts() for commit in net.history
    ]
    assert (one["undoable"], one["redoable"]) == ([5, 4, 3, 2, 1], [7])
    ways = {c["version"]: c["way_back"] for c in one["commits"]}
    assert ways == {n: f"undo --steps {6 - n}" for n in range(1, 6)} | {
        6: None,
        7: "redo --steps 1",
    }
    assert one["commits"][-1]["undoes"] == 6


def test_what_is_said_to_be_undone_first_is(run: Run, checkpoint: Path) -> None:
    first = told(run, "history", checkpoint)["nets"][""]["undoable"][0]
    assert gn.load(checkpoint).undo().undoes == first


def test_the_text_has_a_line_a_commit_and_fits_a_screen(run: Run, checkpoint: Path) -> None:
    lines = run("history", checkpoint).out.splitlines()
    assert lines[0] == "The net at version 7, 7 commits"
    assert lines[2].split() == [
        "1",
        "+3",
        "+9",
        "undo",
        "--steps",
        "5",
        "GrowHeads",
        "grow",
        "task",
        "0",
    ]
    assert lines[7].split() == ["6", "−6", "forget", "task", "1"]
    assert lines[-2:] == [
        "  5 commits can be undone: grapnet undo takes version 5 back",
        "  1 commit can be redone: grapnet redo takes version 7 back",
    ]
    detailed = run("history", checkpoint, "--details").out
    assert max(map(len, detailed.splitlines())) <= WIDTH
    assert "· remark 'a task began' task=2" in detailed
    assert "remark" not in "\n".join(lines)


def test_last_shows_only_the_latest(run: Run, checkpoint: Path) -> None:
    one = told(run, "history", checkpoint, "--last", 2)["nets"][""]
    assert ([c["version"] for c in one["commits"]], one["of"]) == ([6, 7], 7)
    assert len(told(run, "history", checkpoint, "--last", 99)["nets"][""]["commits"]) == 7
    code, _, err = run("history", checkpoint, "--last", 0)
    assert code == 2
    assert "--last" in err


def test_without_undo_data_the_file_says_so(run: Run, bare_checkpoint: Path) -> None:
    assert told(run, "history", bare_checkpoint)["nets"][""]["undoable"] == []
    assert (
        "none can be undone: gn.save(..., undo=True) keeps what that needs"
        in run("history", bare_checkpoint).out
    )


def test_a_commit_whose_details_are_gone_and_numbers_that_are_not_finite(
    run: Run, tmp_path: Path
) -> None:
    net = gn.GrapNet([4, 3])
    for _ in range(2):
        with net.edit() as edit:
            edit.cut(net.layers[0].outgoing().smallest(count=1))
            edit.remark("scores", mean=float("nan"))
    net.journal.undo_limit = net.journal.detail_limit = 0
    gn.save(tmp_path / "old", net)
    one = told(run, "history", tmp_path / "old")["nets"][""]
    assert [c["counts"]["relations_removed"] for c in one["commits"]] == [1, 1]
    # as in every other command: JSON has no NaN
    assert one["commits"][0]["operations"][-1]["mean"] is None
    assert "(no reason given)" in run("history", tmp_path / "old").out


def test_a_model_has_a_history_for_every_net(run: Run, model_checkpoint: Path) -> None:
    nets = told(run, "history", model_checkpoint)["nets"]
    assert {place: one["version"] for place, one in nets.items()} == {"0": 1, "2": 0}
    assert "nothing was edited" in run("history", model_checkpoint).out


def test_a_net_that_continues_another_is_told_by_its_commits(
    run: Run, checkpoint: Path, earlier_checkpoint: Path
) -> None:
    one = told(run, "diff", earlier_checkpoint, checkpoint, code=1)["nets"][""]
    assert one["lineage"] == "B continues A: 3 commits from version 4 to version 7"
    assert [c["reason"] for c in one["commits"]] == [
        "grow task 2",
        "forget task 1",
        "undo: forget task 1",
    ]
    diff = gn.load(checkpoint).diff(4)
    assert one["first"]["nodes_added"] == diff.nodes_added.tolist()
    assert sorted(one["first"]["relations_added"]) == sorted(diff.relations_added.tolist())
    assert one["first"]["nodes_removed"] == one["first"]["relations_removed"] == []
    back = told(run, "diff", checkpoint, earlier_checkpoint, code=1)["nets"][""]
    assert back["lineage"] == "A continues B: 3 commits from version 4 to version 7"
    assert back["first"]["nodes_removed"] == one["first"]["nodes_added"]


def test_equal_nets_are_equal_whatever_else_the_files_hold(
    run: Run, checkpoint: Path, bare_checkpoint: Path
) -> None:
    code, out, _ = run("diff", checkpoint, bare_checkpoint)
    assert code == 0
    assert "equal, bit for bit" in out
    assert "  optimizer: only in A" in out.splitlines()
    assert told(run, "diff", checkpoint, checkpoint)["equal"] is True


def test_what_stands_beside_the_nets_is_compared_by_name(run: Run, tmp_path: Path) -> None:
    net = gn.GrapNet([3, 2])
    extras = {
        "step": {"n": 3, "loss": float("nan")},
        "scales": torch.ones(2),
        "rng": torch.Generator(),
    }
    gn.save(tmp_path / "a", net, **extras)
    gn.save(
        tmp_path / "b",
        net,
        **extras | {"step": {"n": 4, "loss": float("nan")}, "scales": torch.tensor([1.0, 2])},
    )
    gn.save(tmp_path / "c", net, step=extras["step"], scales=[1, 1], more=0)
    states = {"step": ("differs", ["['n']"]), "scales": ("differs", [""]), "rng": ("equal", [])}
    found = told(run, "diff", tmp_path / "a", tmp_path / "b")["beside"]
    assert {name: (one["state"], one["values"]) for name, one in found.items()} == states
    lines = run("diff", tmp_path / "a", tmp_path / "c").out.splitlines()
    assert lines[-4:-2] == ["  step: equal", "  scales: differs ([0], [1])"]
    assert lines[-2:] == ["  rng: only in A", "  more: only in B"]


def test_the_history_says_which_way_coordinates_turned(run: Run, checkpoint: Path) -> None:
    net = gn.load(checkpoint)
    with net.edit(reason="let go") as edit:
        edit.unfreeze(net.select(owner="task-0").outgoing())
    gn.save(checkpoint, net)
    lines = run("history", checkpoint).out.splitlines()
    assert next(line for line in lines if "keep task 0" in line).split()[:3] == ["2", "3", "frozen"]
    assert lines[-2].split()[:3] == ["8", "3", "unfrozen"]
    commits = told(run, "history", checkpoint)["nets"][""]["commits"]
    assert [(c["version"], c["turned"]) for c in commits if c["turned"]] == [
        (2, "frozen"),
        (8, "unfrozen"),
    ]
    assert "coordinates_frozen 3" in repr(net.history[1])


def test_an_undo_turns_coordinates_the_other_way(run: Run, tmp_path: Path) -> None:
    net = gn.GrapNet([3, 2])
    gn.save(tmp_path / "before", net)
    with net.edit(reason="keep") as edit:
        edit.freeze(net.layers[0].outgoing())
    gn.save(tmp_path / "frozen", net, undo=True)
    for _ in range(2):
        net.undo()
        net.redo()
    gn.save(tmp_path / "net", net)
    ways = ["frozen", "unfrozen", "frozen", "unfrozen", "frozen"]
    assert [
        c["turned"] for c in told(run, "history", tmp_path / "net")["nets"][""]["commits"]
    ] == ways
    lines = run("diff", tmp_path / "frozen", tmp_path / "net").out.splitlines()
    assert [line.split()[2] for line in lines if line.split()[1:2] == ["6"]] == ways[1:]


def test_a_cut_that_was_undone_leaves_an_equal_net(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    net = gn.load(checkpoint)
    with net.edit(allow_dead=True) as edit:
        edit.cut(net.layers[1].outgoing())
    gn.save(tmp_path / "cut", net, undo=True)
    assert (
        told(run, "diff", checkpoint, tmp_path / "cut", code=1)["nets"][""]["differences"][
            "relations"
        ]["removed"]
        == 18
    )
    net.undo()
    gn.save(tmp_path / "undone", net)
    one = told(run, "diff", checkpoint, tmp_path / "undone")["nets"][""]
    assert one["lineage"].startswith("B continues A: 2 commits")


def freeze(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.freeze(net.select(owner="task-2"), incoming=False)


def rename(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.set_owner(net.select(owner="task-2"), None)


def bend(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.set_activation(net.layers[1][:2], "tanh")


def train(net: gn.GrapNet) -> None:
    relations = net.select(owner="task-1").outgoing()
    relations.weights = relations.weights.detach() + torch.tensor([0.5, 0, 0, -2.0, 0, 0])


def shift(net: gn.GrapNet) -> None:
    net.layers[2][0].bias = net.layers[2][0].bias + 1.5


def drop(net: gn.GrapNet) -> None:
    net.layers[1].dropout = 0.5


def attend(net: gn.GrapNet) -> None:
    net.execution.use("attention", transition=0)


def choose(net: gn.GrapNet) -> None:
    net.execution.use("dense")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            freeze,
            {
                "frozen relations": {"added": 3, "removed": 0},
                "frozen biases": {"added": 3, "removed": 0},
            },
        ),
        (rename, {"owners": {"changed": 3}}),
        (bend, {"activations": {"changed": 2}}),
        (train, {"weights": {"changed": 2, "largest": 2.0}}),
        (shift, {"biases": {"changed": 1, "largest": 1.5}}),
        (drop, {"dropout of layers": {"changed": 1}}),
        (
            attend,
            {
                "attention's columns": {"added": 2, "removed": 0, "changed": 0},
                "backends": {"changed": 1},
            },
        ),
        (choose, {"backends": {"changed": 2}}),
        (torch.nn.Module.double, {"data type": {"changed": 1}}),
    ],
)
def test_every_kind_of_change_is_found_and_no_other(
    run: Run,
    checkpoint: Path,
    tmp_path: Path,
    change: Callable[[gn.GrapNet], object],
    expected: dict,
) -> None:
    net = gn.load(checkpoint)
    change(net)
    gn.save(tmp_path / "changed", net)
    differences = told(run, "diff", checkpoint, tmp_path / "changed", code=1)["nets"][""][
        "differences"
    ]
    found = {
        what: {key: n for key, n in one.items() if n is not None}
        for what, one in differences.items()
    }
    differing = {what: one for what, one in found.items() if any(one.values())}
    assert differing == {what: pytest.approx(one, abs=1e-6) for what, one in expected.items()}
    out = run("diff", checkpoint, tmp_path / "changed").out
    assert all(what in out for what in expected)


def differing(run: Run, folder: Path, a: gn.GrapNet, b: gn.GrapNet) -> dict[str, dict]:
    """Returns what `diff` says of two nets, only where they differ."""
    gn.save(folder / "a", a)
    gn.save(folder / "b", b)
    alike = run("diff", folder / "a", folder / "b").code == 0
    differences = told(run, "diff", folder / "a", folder / "b", code=0 if alike else 1)["nets"][""][
        "differences"
    ]
    return {
        what: {key: n for key, n in one.items() if n}
        for what, one in differences.items()
        if any(one.values())
    }


def test_layers_without_nodes_are_compared_too(run: Run, tmp_path: Path) -> None:
    def made(*sizes: int, activation: list[str]) -> gn.GrapNet:
        wires = [([0, 1], [0, 0], [1.0, 2.0])] if sizes[1] else [([], [], [])]
        biases = [[0.0] * size for size in sizes[1:]]
        return gn.GrapNet.from_relations(
            sizes,
            [*wires, *([([], [], [])] * (len(sizes) - 2))],
            biases=biases,
            activation=activation,
        )

    relu, tanh = (made(4, 0, 2, activation=[name, "identity"]) for name in ("relu", "tanh"))
    assert differing(run, tmp_path, relu, tanh) == {"activation of layers": {"changed": 1}}
    short, long = (
        made(2, 1, activation=["identity"]),
        made(2, 1, 0, activation=["identity", "identity"]),
    )
    assert differing(run, tmp_path, short, long) == {"layers": {"added": 1}}
    assert differing(run, tmp_path, long, short) == {"layers": {"removed": 1}}


def test_attention_is_compared_bit_for_bit_and_with_what_newborn_nodes_draw(
    run: Run, tmp_path: Path
) -> None:
    def attending(key: float, bound: float = 1.0) -> gn.GrapNet:
        net = gn.GrapNet.from_relations([2, 1], [([0, 1], [0, 0], [1.0, 2.0])], biases=[[0.0]])
        net.execution.use("attention", keys=[1.0, key], queries=[1.0], bound=bound)
        return net

    broken = attending(0.0)
    with torch.no_grad():
        broken.columns["key_0"].value.fill_(float("nan"))
    assert differing(run, tmp_path, broken, broken) == {}
    assert differing(run, tmp_path, attending(0.0), attending(-0.0)) == {
        "attention's columns": {"changed": 1}
    }
    assert differing(run, tmp_path, attending(0.5), attending(0.5, bound=2.0)) == {
        "attention's columns": {"changed": 2}
    }
    assert differing(run, tmp_path, attending(0.5), attending(0.5).double()) == {
        "data type": {"changed": 1}
    }


def test_separate_nets_are_compared_by_uids_alone(run: Run, tmp_path: Path) -> None:
    pairs = {"a": ([0, 0, 1], [0, 1, 1]), "b": ([0, 0, 1], [1, 0, 0])}
    for name, (parents, children) in pairs.items():
        gn.save(
            tmp_path / name,
            gn.GrapNet.from_relations(
                [2, 2], [(parents, children, [1.0, 1.0, 1.0])], biases=[[0, 0]]
            ),
        )
    one = told(run, "diff", tmp_path / "a", tmp_path / "b", code=1)["nets"][""]
    assert (one["lineage"], one["commits"]) == ("separate histories", [])
    assert (one["first"]["relations_added"], one["first"]["relations_removed"]) == (
        [[1, 2]],
        [[1, 3]],
    )
    assert one["differences"]["order of children"]["changed"] == 1
    assert one["differences"]["weights"]["changed"] == 0


def test_histories_that_part_are_told_from_those_that_go_on(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    for n, name in enumerate(("left", "right"), 1):
        net = gn.load(checkpoint)
        with net.edit(reason=name) as edit:
            edit.cut(net.layers[0].outgoing().smallest(count=n))
        gn.save(tmp_path / name, net)
    one = told(run, "diff", tmp_path / "left", tmp_path / "right", code=1)["nets"][""]
    assert one["lineage"] == "their histories part after version 7"


def test_nets_of_models_are_compared_place_by_place(
    run: Run, model_checkpoint: Path, checkpoint: Path
) -> None:
    assert told(run, "diff", model_checkpoint, model_checkpoint)["equal"] is True
    nets = told(run, "diff", model_checkpoint, checkpoint, code=1)["nets"]
    assert {place: one["only_in"] for place, one in nets.items()} == {"0": "a", "2": "a", "": "b"}


@pytest.mark.parametrize("which", [0, 1])
def test_diff_is_refused_when_either_file_is_damaged(
    run: Run, checkpoint: Path, damaged_checkpoint: Path, which: int
) -> None:
    files = [checkpoint, checkpoint]
    files[which] = damaged_checkpoint
    code, out, err = run("diff", *files)
    assert (code, out) == (2, "")
    assert str(damaged_checkpoint) in err
