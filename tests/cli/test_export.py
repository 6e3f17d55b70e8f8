"""Exported nets compute what the net computes, are whole files, and nothing is written when
something is wrong.
"""

import json
import os
import re
import zipfile
from pathlib import Path

import networkx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import grapnet as gn
from tests.rounding import SINGLE

from .edited import content
from .full_disk import no_file_beyond

# one worker: the first ONNX export of a process takes seconds
pytestmark = pytest.mark.xdist_group("export")


def test_onnx(checkpoint, tmp_path, run):
    done = run("export", checkpoint, "--to", "onnx", "--json")
    told = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert told["written"] == str(tmp_path / "net.onnx")
    assert told["difference"] < SINGLE
    assert told["bytes"] == (tmp_path / "net.onnx").stat().st_size
    session = onnxruntime.InferenceSession(
        tmp_path / "net.onnx", providers=["CPUExecutionProvider"]
    )
    net, x = gn.load(checkpoint), torch.randn(1, 6)
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), net(x).detach(), rtol=0, atol=SINGLE)
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "net.onnx"}


def test_a_torch_program_needs_torch_alone(checkpoint, tmp_path, run):
    done = run("export", checkpoint, "--to", "torch", "-o", tmp_path / "net.pt2")
    assert (done.code, done.err) == (0, "")
    assert "largest difference on 7 random inputs: " in done.out
    program = torch.export.load(tmp_path / "net.pt2").module()
    net = gn.load(checkpoint)
    for batch in (1, 5):
        x = torch.randn(batch, 6)
        torch.testing.assert_close(program(x), net(x), rtol=0, atol=SINGLE)
    with zipfile.ZipFile(tmp_path / "net.pt2") as archive:
        assert not any(b"grapnet" in archive.read(name) for name in archive.namelist())


def test_onnx_in_half_precision_is_checked(tmp_path, run):
    gn.save(tmp_path / "net.safetensors", gn.GrapNet([6, 9, 3], dtype=torch.float16))
    told = json.loads(run("export", tmp_path / "net.safetensors", "--to", "onnx", "--json").out)
    assert told["unchecked"] is None
    assert told["difference"] < 1e-2


def test_onnx_that_no_cpu_runs_is_written_and_the_way_round_told(tmp_path, run):
    gn.save(tmp_path / "net.safetensors", gn.GrapNet([6, 9, 3], dtype=torch.bfloat16))
    done = run("export", tmp_path / "net.safetensors", "--to", "onnx")
    assert (done.code, done.err) == (0, "")
    assert (
        "not checked: onnxruntime does not run bfloat16 on a CPU; use the file on another"
        " device, or " in done.out
    )
    assert done.out.endswith("save it in float32 first: gn.save(new, gn.load(file).float())\n")
    gn.save(tmp_path / "new", gn.load(tmp_path / "net.safetensors").float())
    done = run("export", tmp_path / "new", "--to", "onnx")
    assert "largest difference on 7 random inputs: " in done.out


def test_onnx_that_is_no_valid_file_is_not_written(tmp_path, run):
    gn.save(
        tmp_path / "net.safetensors", gn.GrapNet([4, 3, 2], activation="elu", dtype=torch.bfloat16)
    )
    done = run("export", tmp_path / "net.safetensors", "--to", "onnx")
    assert (done.code, done.out) == (2, "")
    first, hint = done.err.splitlines()
    assert first.startswith("grapnet: onnxruntime does not take this net: ")
    assert hint.startswith("hint: save it in float32 first")
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


@pytest.mark.parametrize("kind", ["onnx", "torch", "graphml", "safetensors-dense"])
def test_a_full_disk_is_told_of_the_path_that_was_given(kind, tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gn.save("net.safetensors", gn.GrapNet([30, 40]))
    before = content(tmp_path)
    with no_file_beyond(1000):
        done = run("export", "net.safetensors", "--to", kind, "-o", "new")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(
        r"grapnet: new could not be written \(.*File too large.*\)\nhint: make room, .*\n", done.err
    )
    assert content(tmp_path) == before


def test_graphml_and_matrices(checkpoint, tmp_path, run):
    assert json.loads(run("export", checkpoint, "--to", "graphml", "--json").out)["difference"] == 0
    graph = networkx.read_graphml(tmp_path / "net.graphml")
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (18, 36)
    assert (
        json.loads(run("export", checkpoint, "--to", "safetensors-dense", "--json").out)[
            "difference"
        ]
        < SINGLE
    )
    mlp, net, x = (
        nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)),
        gn.load(checkpoint),
        torch.randn(4, 6),
    )
    mlp.load_state_dict(load_file(tmp_path / "net.dense.safetensors"))
    torch.testing.assert_close(mlp(x), net(x), rtol=0, atol=SINGLE)
    done = run(
        "convert", tmp_path / "net.dense.safetensors", "--drop-zeros", "-o", tmp_path / "back"
    )
    assert done.code == 0
    assert gn.load(tmp_path / "back").count().relations == 36


def test_a_net_of_a_model(model_checkpoint, tmp_path, run):
    done = run("export", model_checkpoint, "--to", "graphml", "-o", tmp_path / "new")
    assert (done.code, done.err.splitlines()[1]) == (2, "hint: say --net, one of: 0, 2")
    done = run("export", model_checkpoint, "--to", "safetensors-dense", "--net", "0", "--json")
    told = json.loads(done.out)
    assert (done.code, told["sizes"]) == (0, [8, 6, 4])
    assert "GELU" in done.out or told["difference"] < SINGLE


def test_dropout_is_off_in_what_is_exported(tmp_path, run):
    net = gn.GrapNet([4, 8, 2])
    net.layers[1].dropout = 0.5
    gn.save(tmp_path / "net.safetensors", net)
    assert (
        json.loads(run("export", tmp_path / "net.safetensors", "--to", "torch", "--json").out)[
            "difference"
        ]
        < SINGLE
    )


def test_outputs_that_overflow_are_counted(tmp_path, run):
    net = gn.GrapNet([4, 2, 3])
    with net.edit(allow_dead=True) as edit:
        edit.cut(net.layers[1].outgoing())
        edit.connect(net.layers[1], net.layers[2][:1], weights=3e38)
    net.layers[1].bias.data.fill_(100.0)
    gn.save(tmp_path / "net.safetensors", net)
    done = run("export", tmp_path / "net.safetensors", "--to", "torch")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("but 7 of 21 outputs are NaN or infinite, here and there alike\n")


def test_the_check_would_find_a_difference(checkpoint, tmp_path, run, monkeypatch):
    from grapnet.cli import export, formats

    def write_others(net: gn.GrapNet, example: torch.Tensor, path: Path) -> formats.Run:
        save_file({"weight": torch.zeros(1)}, path)
        return lambda x: net(x) + 0.01

    monkeypatch.setitem(export.FORMATS, "torch", export.Format(".pt2", write_others))
    before = content(tmp_path)
    done = run("export", checkpoint, "--to", "torch")
    assert (done.code, done.out) == (2, "")
    assert "differs from the net by 0.01" in done.err
    assert "nothing was written" in done.err
    assert content(tmp_path) == before


def test_what_came_into_being_meanwhile_is_not_written_over(checkpoint, tmp_path, run, monkeypatch):
    from grapnet.cli import export, formats

    def write_late(net: gn.GrapNet, example: torch.Tensor, path: Path) -> str:
        (tmp_path / "new").write_text("of another")
        return formats.write_matrices(net, example, path)

    monkeypatch.setitem(export.FORMATS, "torch", export.Format(".pt2", write_late))
    done = run("export", checkpoint, "--to", "torch", "-o", tmp_path / "new")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"grapnet: {tmp_path / 'new'} exists already\n")
    assert content(tmp_path) == {"net.safetensors": checkpoint.read_bytes(), "new": b"of another"}
    assert run("export", checkpoint, "--to", "torch", "-o", tmp_path / "new", "--force").code == 0
    assert len(load_file(tmp_path / "new")) == 4


def test_a_link_is_written_through_and_a_loop_of_links_refused(checkpoint, tmp_path, run):
    for name, target in (("link", "behind"), ("one", "two"), ("two", "one")):
        (tmp_path / name).symlink_to(target)
    assert run("export", checkpoint, "--to", "safetensors-dense", "-o", tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert len(load_file(tmp_path / "behind")) == 4
    done = run("export", checkpoint, "--to", "safetensors-dense", "-o", tmp_path / "one", "--force")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"grapnet: {tmp_path / 'one'} is a link that leads back to itself\n")


def test_a_pipe_is_not_replaced_by_a_file(checkpoint, tmp_path, run):
    os.mkfifo(tmp_path / "pipe")
    done = run(
        "export", checkpoint, "--to", "safetensors-dense", "-o", tmp_path / "pipe", "--force"
    )
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        f"grapnet: {tmp_path / 'pipe'} is a device, a pipe or a socket, not a file\n"
    )
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("strange", ["\x1b", "\x00", "\ud800"])
def test_an_owner_that_xml_cannot_hold_is_told(tmp_path, run, strange):
    net = gn.GrapNet([3, 2])
    with net.edit(reason="name") as edit:
        edit.set_owner(net.layers[0], f"a{strange}b")
    gn.save(tmp_path / "net.safetensors", net)
    done = run("export", tmp_path / "net.safetensors", "--to", "graphml")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(
        r"grapnet: node \d+ has the owner 'a\\\w+b', which no XML file can hold; .*\nhint: .*\n",
        done.err,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


def test_bad_input_is_one_line_and_changes_nothing(
    checkpoint, damaged_checkpoint, missing_checkpoint, tmp_path, run
):
    attending, net = tmp_path / "attending.safetensors", gn.GrapNet([4, 3, 2])
    net.execution.use("attention", transition=1)
    gn.save(attending, net)
    (tmp_path / "taken").write_text("mine")
    before = content(tmp_path)
    for asked, message in (
        ([missing_checkpoint], "no such file"),
        ([damaged_checkpoint], "damaged.safetensors: sha256"),
        ([tmp_path], "is a folder"),
        ([""], "is a folder"),
        ([checkpoint, "-o", tmp_path / "taken"], "exists already"),
        ([checkpoint, "-o", tmp_path / "none" / "new"], "no such folder"),
        ([checkpoint, "--net", "head"], "one net and no model"),
        ([checkpoint, "--device", "tpu9"], "--device tpu9 cannot be used"),
        ([attending], "attention"),
    ):
        done = run("export", *asked, "--to", "torch")
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("grapnet: ")
        assert done.err.count("\n") <= 2
        assert message in done.err.splitlines()[0]
    assert content(tmp_path) == before
    assert run("export", checkpoint, "--to", "tflite").code == 2
