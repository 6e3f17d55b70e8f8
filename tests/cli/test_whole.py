"""Commands on files of adopted models: what they write and tell is what a session would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.spaces import differences
from tests.spaces import zoo
from tests.spaces.oracle import largest_difference, outputs_of

from .conftest import Ran

Run = Callable[..., Ran]


def restored(path: Path | str) -> tuple[zoo.Case, Any]:
    """Returns a fresh model with what a file has."""
    case = zoo.MODELS["vit"]()
    net = gn.adopt(case.model, *case.inputs)
    gn.restore(path, into=net)
    return case, net


def test_an_edited_file_is_what_the_edit_gives_in_a_session(folder: Path, run: Run) -> None:
    case, net = restored("whole.safetensors")
    with net.edit() as edit:
        edit.cut(net.relations("blocks.0.fc2").smallest(fraction=0.5))
        edit.set_owner(net.space("blocks.1.fc1"), "tail")
    words = ["whole.safetensors", "--module", "blocks.0.fc2", "--smallest", "0.5"]
    assert run("cut", *words, "-o", "cut.safetensors").code == 0
    owner = ["--space", "blocks.1.fc1", "--to", "tail"]
    assert run("set-owner", "cut.safetensors", *owner, "--in-place").code == 0
    assert differences(net, gn.open("cut.safetensors").adopted) == {}
    other, twin = restored("cut.safetensors")
    gn.check(twin)
    outputs = (outputs_of(case.model, case), outputs_of(other.model, case))
    assert largest_difference(*outputs) == 0
    assert (folder / "cut.safetensors").exists()


def test_kernels_of_groups_are_cut_in_a_file(folder: Path, run: Run) -> None:
    case = zoo.MODELS["grouped"]()
    net = gn.adopt(case.model, *case.inputs)
    gn.save("grouped.safetensors", net)
    with net.edit() as edit:
        edit.cut(net.relations("3").smallest(fraction=0.5))
    words = ["--module", "3", "--smallest", "0.5", "-o", "cut.safetensors"]
    assert run("cut", "grouped.safetensors", *words).code == 0
    assert differences(net, gn.open("cut.safetensors").adopted) == {}
    (row,) = json.loads(run("inspect", "cut.safetensors", "--json").out)["model"]["opened"]
    assert row["density"] == row["relations"] / row["of"] == 0.5
    assert (folder / "cut.safetensors").exists()


@pytest.mark.usefixtures("folder")
def test_undo_in_a_file_brings_back_nodes_and_the_state_of_the_optimizer(run: Run) -> None:
    assert run("undo", "whole.safetensors", "--steps", 3, "-o", "back.safetensors").code == 0
    file = gn.open("back.safetensors")
    for space in file.adopted.spaces:
        assert len(space) == space.first_size
    case, net = restored("back.safetensors")
    optimizer = torch.optim.Adam(case.model.parameters())
    gn.restore("back.safetensors", into=net, optimizer=optimizer)
    for parameter in case.model.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def test_remove_refuses_with_lines_that_do_it(folder: Path, run: Run) -> None:
    before = (folder / "whole.safetensors").read_bytes()
    ran = run("remove", "whole.safetensors", "--owner", "base", "-o", "small.safetensors")
    assert ran.code == 2
    assert (folder / "whole.safetensors").read_bytes() == before
    assert not (folder / "small.safetensors").exists()
    lines = [line.strip() for line in ran.err.splitlines() if line.startswith("  ")]
    assert len(lines) == 3
    case = zoo.MODELS["vit"]()
    names = {"gn": gn, "model": case.model, "x": case.inputs[0]}
    exec("\n".join(lines), names)
    small = gn.open("small.safetensors").adopted
    assert len(small.space("blocks.0.fc1")) == 6
    found = differences(gn.open("whole.safetensors").adopted, small)
    assert found["nodes of blocks.0.fc1"].removed == 4


@pytest.mark.usefixtures("folder")
def test_json_has_every_space_weight_and_number(run: Run) -> None:
    _, net = restored("whole.safetensors")
    found = json.loads(run("inspect", "whole.safetensors", "--json").out)
    assert found["kind"] == "whole model"
    model = found["model"]
    sizes = {space["space"]: space["nodes"] for space in model["spaces"]}
    assert sizes == {space.name: len(space) for space in net.spaces}
    (half,) = [row for row in model["opened"] if row["density"] < 1]
    assert (half["weight"], half["relations"], half["of"]) == ("blocks.1.fc2.weight", 330, 660)
    assert model["numbers"]["blocks.0.attn.num_heads"] == {"first": 3, "now": 2}
    commits = json.loads(run("history", "whole.safetensors", "--json").out)["nets"][""]["commits"]
    assert commits[3]["words"] == "−20 of blocks.1.fc1"
    difference = json.loads(run("diff", "first.safetensors", "whole.safetensors", "--json").out)
    assert not difference["equal"]
    cells = difference["nets"][""]["differences"]["cells of blocks.1.fc2.weight"]
    assert (cells["added"], cells["removed"]) == (0, 330)
    drawn = json.loads(run("plot", "whole.safetensors", "--json").out)
    assert (drawn["kind"], drawn["spaces"]) == ("spaces", sizes)
    assert Path(drawn["path"]).stat().st_size > 1000
