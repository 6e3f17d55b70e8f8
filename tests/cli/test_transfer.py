"""Exported and converted files compute what the net or the plain model computes."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import networkx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import grapnet as gn
import grapnet.cli._export
from grapnet.integrations.networkx import from_networkx
from tests.rounding import SINGLE

from .conftest import Ran, plain_mlp

Run = Callable[..., Ran]
NET = Path("net.safetensors")

# One worker: the first ONNX export of a process takes seconds.
pytestmark = [pytest.mark.xdist_group("export"), pytest.mark.usefixtures("folder")]


def run_onnx(path: Path, x: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(output)


def run_program(path: Path, x: torch.Tensor) -> torch.Tensor:
    with zipfile.ZipFile(path) as archive:
        assert not any(b"grapnet" in archive.read(name) for name in archive.namelist())
    return torch.export.load(path).module()(x)


def run_graph(path: Path, x: torch.Tensor) -> torch.Tensor:
    return from_networkx(networkx.read_graphml(path))(x)


def run_matrices(path: Path, x: torch.Tensor) -> torch.Tensor:
    plain = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    plain.load_state_dict(load_file(path))
    return plain(x)


@pytest.mark.parametrize(
    ("kind", "ending", "compute"),
    [
        ("onnx", ".onnx", run_onnx),
        ("torch", ".pt2", run_program),
        ("graphml", ".graphml", run_graph),
        ("safetensors-dense", ".dense.safetensors", run_matrices),
    ],
)
def test_an_exported_file_computes_what_the_net_does(
    kind: str, ending: str, compute: Callable[[Path, torch.Tensor], torch.Tensor], run: Run
) -> None:
    done = run("export", NET, "--to", kind, "--json")
    assert (done.code, done.err) == (0, "")
    outcome = json.loads(done.out)
    path = Path(f"net{ending}")
    assert outcome["written"] == str(path)
    assert outcome["bytes"] == path.stat().st_size
    assert outcome["difference"] < SINGLE
    net = gn.load(NET)
    for batch in (1, 5):
        x = torch.randn(batch, 6)
        with torch.no_grad():
            torch.testing.assert_close(compute(path, x), net(x), rtol=0, atol=SINGLE)


def test_an_export_that_computes_something_else_is_not_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(net: gn.GrapNet, example: torch.Tensor, path: Path) -> Callable:
        path.write_text("wrong")
        return lambda x: net(x) + 0.01

    monkeypatch.setitem(grapnet.cli._export._WRITERS, "torch", write)
    done = run("export", NET, "--to", "torch")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 2)
    assert not Path("net.pt2").exists()


def test_half_precision_and_dropout_are_exported_for_inference(run: Run) -> None:
    net = gn.GrapNet([6, 9, 3], dtype=torch.float16)
    net.layers[1].dropout = 0.5
    gn.save(NET, net)
    done = run("export", NET, "--to", "onnx", "--json")
    assert json.loads(done.out)["unchecked"] is None


def converted(run: Run, model: nn.Sequential, *options: str) -> gn.GrapNet:
    """Converts the weights of a model and asserts that the net computes the same."""
    save_file(model.state_dict(), "weights.safetensors")
    words = ["convert", "weights.safetensors", *options, "-o", "new.safetensors", "--force"]
    done = run(*words, "--json")
    assert (done.code, done.err) == (0, "")
    net = gn.load("new.safetensors")
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, net.sizes[0], dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x), rtol=0, atol=SINGLE)
    assert json.loads(done.out)["difference"] < SINGLE
    return net


def test_plain_weights_become_a_net_that_computes_the_same(run: Run) -> None:
    converted(run, plain_mlp())
    converted(run, plain_mlp().double())
    converted(run, nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2)), "--activation=gelu")
    layers = [nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)]
    net = converted(run, nn.Sequential(*layers), "--activation", "relu,tanh")
    assert net.sizes == [5, 4, 4, 2]
    # The tenth layer runs after the second.
    deep = []
    for _ in range(6):
        deep += [nn.Linear(3, 3), nn.ReLU()]
    assert len(converted(run, nn.Sequential(*deep[:-1])).layers) == 7


def test_zeros_are_dropped_when_asked(run: Run) -> None:
    model = plain_mlp()
    with torch.no_grad():
        model[0].weight[:, :2] = 0
    assert converted(run, model).count().relations == 5 * 8 + 8 * 3
    assert converted(run, model, "--drop-zeros").count().relations == 3 * 8 + 8 * 3


def test_a_pruned_model_is_converted_with_its_mask(run: Run) -> None:
    words = ["pruned.safetensors", "--drop-zeros", "-o", "new.safetensors"]
    assert run("convert", *words).code == 0
    assert gn.load("new.safetensors").count().relations == 20 + 24


def test_layers_are_taken_out_of_a_larger_checkpoint(run: Run) -> None:
    body = nn.Conv2d(3, 4, 3)
    head = plain_mlp()
    model = nn.ModuleDict({"body": body, "head": head, "norm": nn.LayerNorm(3)})
    torch.save({"model": model.state_dict(), "epoch": 3}, "model.pt")
    refused = run("convert", "model.pt", "-o", "new.safetensors")
    assert (refused.code, Path("new.safetensors").exists()) == (2, False)
    x = torch.randn(4, 5)
    for options in (["--keys", "head.0,head.2"], ["--prefix", "model.head."]):
        assert run("convert", "model.pt", *options, "-o", "new.safetensors", "--force").code == 0
        torch.testing.assert_close(gn.load("new.safetensors")(x), head(x))
    torch.save({"model": head.state_dict(), "ema": plain_mlp().state_dict()}, "two.pt")
    assert run("convert", "two.pt", "-o", "two.safetensors").code == 2
    assert run("convert", "two.pt", "--prefix", "ema.", "-o", "two.safetensors").code == 0


def test_a_file_that_would_run_code_is_not_read(run: Run) -> None:
    torch.save(plain_mlp(), "code.pt")
    done = run("convert", "code.pt", "-o", "new.safetensors")
    assert (done.code, done.err.count("\n")) == (2, 2)
    assert not Path("new.safetensors").exists()


@pytest.mark.parametrize(
    "kind", ["graph", "adjacency", "timeline", "degrees", "weights", "deletion"]
)
def test_every_kind_of_picture_is_drawn(kind: str, run: Run) -> None:
    done = run("plot", NET, "--kind", kind, "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["relations"] == 36
    assert Path(f"net-{kind}.png").read_bytes().startswith(b"\x89PNG")
