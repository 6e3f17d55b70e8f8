"""`grapnet inspect`: what it tells agrees with the net, fits a screen, and reads models as well as
nets.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.cli import census
from grapnet.cli.columns import WIDTH, table

Run = Callable[..., Any]  # the fixture `run`: (code, out, err)


def inspected(run: Run, *arguments: object) -> dict:
    code, out, err = run("inspect", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_numbers_are_those_of_the_net(run: Run, checkpoint: Path) -> None:
    net, told = gn.load(checkpoint), inspected(run, checkpoint)
    assert (told["bytes"], told["kind"], told["format"]) == (checkpoint.stat().st_size, "net", 1)
    one, count = told["nets"][""], net.count()
    assert (one["sizes"], one["version"], one["commits"]) == ([6, 9, 3], 7, 7)
    assert (one["undoable"], one["redoable"]) == (5, 1)
    assert (one["relations"], one["biases"], one["frozen"], one["flops"]) == (
        36,
        12,
        3,
        count.flops,
    )
    assert one["parameters"] == one["trainable"] == sum(p.numel() for p in net.parameters()) == 45
    assert (
        one["bytes"]["total"] == count.bytes == one["bytes"]["coordinates"] + one["bytes"]["wiring"]
    )
    assert one["bytes"]["coordinates"] == 48 * 4
    assert [layer["activations"] for layer in one["layers"]] == [
        {"identity": 6},
        {"relu": 9},
        {"identity": 3},
    ]


def test_density_frozen_share_and_families_of_every_transition(run: Run, checkpoint: Path) -> None:
    first, second = inspected(run, checkpoint)["nets"][""]["transitions"]
    assert (first["relations"], first["density"], first["frozen"]) == (18, 18 / 54, 0)
    assert (second["relations"], second["density"], second["frozen"]) == (18, 18 / 27, 3)
    assert (first["families"], first["largest_families"]) == (
        3,
        [{"families": 3, "members": 2, "children": 3}],
    )
    assert (second["families"], len(second["largest_families"])) == (3, 3)
    out = run("inspect", checkpoint).out
    assert "0 → 1          18   33.3 %   0.0 %  3 of 2 × 3\n" in out
    assert "1 → 2          18   66.7 %  16.7 %  3 × 3, 3 × 2, 3 × 1\n" in out


def test_families_are_nodes_with_the_same_children_and_single_nodes_are_none(
    run: Run, tmp_path: Path
) -> None:
    wired = {0: [0, 1, 2, 3], 1: [0], 2: [0], 3: [1]}  # of four parents, two have the same child
    pairs = [(parent, child) for parent, children in wired.items() for child in children]
    for name, kept, told in (
        ("some", pairs, "2 × 1, 2 others"),
        ("no", [p for p in pairs if p[0] != 2], "none"),
    ):
        parents, children = torch.tensor(kept).T
        gn.save(tmp_path / name, gn.GrapNet.from_relations([4, 4], [(parents, children)]))
        told_of = next(
            line for line in run("inspect", tmp_path / name).out.splitlines() if "0 → 1" in line
        )
        assert told_of.endswith(f" {told}")


def test_families_are_not_looked_for_among_very_many_relations(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(census, "MOST_RELATIONS", 17)
    assert [one["families"] for one in inspected(run, checkpoint)["nets"][""]["transitions"]] == [
        None,
        None,
    ]
    assert "not looked for above" in run("inspect", checkpoint).out


def test_owners_sum_up_to_the_net(run: Run, checkpoint: Path) -> None:
    net, owners = gn.load(checkpoint), inspected(run, checkpoint)["nets"][""]["owners"]
    assert list(owners) == ["(none)", "task-0", "task-1", "task-2"]
    assert [
        sum(one[key] for one in owners.values()) for key in ("nodes", "outgoing", "incoming")
    ] == [18, 36, 36]
    for name in ("task-0", "task-1", "task-2"):
        nodes = net.select(owner=name)
        outgoing = nodes.outgoing()
        expected = [len(nodes), len(outgoing), len(nodes.incoming()), int(outgoing.frozen.sum())]
        assert list(owners[name].values()) == expected
    assert owners["task-0"]["frozen"] == 3


def test_one_owner_is_told_of_alone(run: Run, checkpoint: Path) -> None:
    told = inspected(run, checkpoint, "--owner", "task-0")["nets"][""]
    assert told["layers"] == [
        {
            "layer": 1,
            "nodes": 3,
            "of": 9,
            "activations": {"relu": 3},
            "uids": [9, 10, 11],
            "frozen_biases": 0,
        }
    ]
    into, out_of = told["transitions"]
    assert (into["incoming"], into["outgoing"], into["from"], into["to"]) == (
        6,
        0,
        {"(none)": 6},
        {},
    )
    assert (out_of["incoming"], out_of["outgoing"], out_of["frozen"], out_of["to"]) == (
        0,
        9,
        3,
        {"(none)": 9},
    )
    other = inspected(run, checkpoint, "--owner", "task-1")["nets"][""]["transitions"][1]
    assert (other["outgoing"], other["frozen"]) == (6, 0)
    out = run("inspect", checkpoint, "--owner", "task-0").out
    assert "task-0 in the net: 3 nodes" in out
    assert "task-1" not in out


def test_an_owner_may_be_called_like_nobody_or_like_nothing(run: Run, tmp_path: Path) -> None:
    net = gn.GrapNet([3, 6, 2])
    with net.edit() as edit:
        edit.set_owner(net.layers[1][:1], "(none)")
        edit.set_owner(net.layers[1][1:3], "")
        edit.freeze(net.layers[1][1:3].outgoing())
    gn.save(tmp_path / "net", net)
    owners = inspected(run, tmp_path / "net")["nets"][""]["owners"]
    assert {name: list(one.values()) for name, one in owners.items()} == {
        "((none))": [8, 18 + 6, 9 + 12, 0],
        "(none)": [1, 2, 3, 0],
        "": [2, 4, 6, 4],
    }
    for owner, nodes in (("(none)", 1), ("", 2)):
        into, out_of = inspected(run, tmp_path / "net", "--owner", owner)["nets"][""]["transitions"]
        assert (into["incoming"], into["from"]) == (3 * nodes, {"((none))": 3 * nodes})
        assert (out_of["outgoing"], out_of["to"]) == (2 * nodes, {"((none))": 2 * nodes})
    assert "\n  ''            2" in run("inspect", tmp_path / "net").out
    assert "'' in the net: 2 nodes" in run("inspect", tmp_path / "net", "--owner", "").out


def test_an_unknown_owner_is_refused_with_those_that_are_there(run: Run, checkpoint: Path) -> None:
    code, out, err = run("inspect", checkpoint, "--owner", "task-9")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "grapnet: no node has the owner 'task-9'",
        "hint: did you mean 'task-2'? owners are: task-0, task-1, task-2",
    ]


def test_uids_are_told_and_columns_without_content_are_not(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    layers = inspected(run, checkpoint)["nets"][""]["layers"]
    assert [layer["first_and_last_uid"] for layer in layers] == [[0, 5], [9, 17], [6, 8]]
    run("remove", checkpoint, "--node", 12, "-o", tmp_path / "gap")
    out = run("inspect", tmp_path / "gap").out
    assert "1      8  9 to 17, with gaps  relu" in out
    assert "dropout" not in out
    assert "biases frozen" not in out
    assert "frozen of these" in out  # relations of task-0 are
    gn.save(tmp_path / "free", gn.GrapNet([4, 1, 2]))
    free = run("inspect", tmp_path / "free").out
    assert "1      1  4       relu" in free
    assert free.count("frozen") == 1  # that none is


def test_what_else_the_file_holds(run: Run, checkpoint: Path, bare_checkpoint: Path) -> None:
    extras = inspected(run, checkpoint)["extras"]
    assert {name: one["saved_from"] for name, one in extras.items()} == {
        "optimizer": "Adam",
        "memory": "ReservoirMemory",
        "rng": "Generator",
        "note": "plain data",
    }
    assert extras["rng"]["bytes"] == torch.get_rng_state().numel()
    assert "5 can be undone, 1 redone" in run("inspect", checkpoint).out
    assert inspected(run, bare_checkpoint)["extras"] == {}
    assert "none can be undone: gn.save(..., undo=True)" in run("inspect", bare_checkpoint).out


def test_backends_follow_the_batch_and_say_why(run: Run, checkpoint: Path) -> None:
    net = gn.load(checkpoint)
    for batch in (1, 4096):
        told = inspected(run, checkpoint, "--batch", batch)["nets"][""]["backends"]
        assert told == net.execution.describe(batch)
        assert f"batch {batch}" in told[0]["why"]
    assert run("inspect", checkpoint, "--batch", 0).code == 2


def test_a_model_lists_every_net_by_its_place(run: Run, model_checkpoint: Path) -> None:
    told = inspected(run, model_checkpoint)
    assert (told["kind"], list(told["nets"])) == ("model", ["0", "2"])
    assert [net["sizes"] for net in told["nets"].values()] == [[8, 6, 4], [4, 2]]
    assert told["nets"]["0"]["transitions"][0]["density"] == 0.5
    assert told["beside"] == {"holds": "8 values under 2 names", "bytes": 32}
    out = run("inspect", model_checkpoint).out
    assert "The net at '0': 8-6-4" in out
    assert "The net at '2': 4-2" in out


def test_a_net_in_two_places_is_told_of_once(run: Run, tmp_path: Path) -> None:
    net = gn.GrapNet([3, 3])
    gn.save(tmp_path / "twice", nn.Sequential(net, nn.ReLU(), net))
    nets = inspected(run, tmp_path / "twice")["nets"]
    assert {place: one["also_at"] for place, one in nets.items()} == {"0": ["2"]}


def test_every_line_fits_a_screen_and_numbers_stand_to_the_right(run: Run, tmp_path: Path) -> None:
    net = gn.GrapNet([1500, 20, 3], density=0.05, generator=torch.Generator().manual_seed(0))
    net.layers[1].dropout = 0.25
    with net.edit() as edit:
        edit.set_owner(
            net.layers[1][:7],
            "an owner with a name that is much longer than any column should be wide",
        )
        edit.set_activation(net.layers[1][3:5], "tanh")
        edit.freeze(net.layers[1][:2])
    extras: dict[str, Any] = {"a_name_that_goes_on_and_on_" * 3: [1, 2]}
    gn.save(tmp_path / "wide", net, **extras)
    out = run("inspect", tmp_path / "wide").out
    assert max(len(line) for line in out.splitlines()[1:]) <= WIDTH
    assert "      1     20  1500 to 1519   25.0 %         10.0 %  relu 18, tanh 2" in out
    assert " 1,500" in out
    lines = run("inspect", tmp_path / "wide", "--owner", net.layers[1][0].owner).out.splitlines()
    # the heading has the whole name
    assert max(len(line) for line in lines[1:] if "in the net:" not in line) <= WIDTH


def test_a_table_wraps_its_last_column_only() -> None:
    lines = table(["n", "why"], [[1, "word " * 40], [12345, "short"]])
    assert max(map(len, lines)) <= WIDTH
    assert [line[:10] for line in lines] == [
        "       n  ",
        "       1  ",
        " " * 10,
        " " * 10,
        "  12,345  ",
    ]


def test_an_empty_net_can_be_looked_at(run: Run, tmp_path: Path) -> None:
    gn.save(tmp_path / "empty", gn.GrapNet([4, 0, 2]))
    one = inspected(run, tmp_path / "empty")["nets"][""]
    assert [t["density"] for t in one["transitions"]] == [0.0, 0.0]
    assert run("inspect", tmp_path / "empty").code == 0


def test_attention_and_its_parameters_are_told(run: Run, tmp_path: Path) -> None:
    net = gn.GrapNet([4, 3, 2])
    net.execution.use("attention", transition=0)
    gn.save(tmp_path / "attending", net)
    one = inspected(run, tmp_path / "attending")["nets"][""]
    assert one["backends"][0]["runs"] == "attention"
    assert (
        one["parameters"]
        == sum(p.numel() for p in net.parameters())
        > net.count().relations + net.count().biases
    )
