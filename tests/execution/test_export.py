"""Exports: what torch.export and ONNX make of a snapshot computes what the net computes."""

from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from tests.rounding import SINGLE

from .snapped import cut, full, mixed, ragged

# one worker: the first ONNX export of a process takes seconds
pytestmark = pytest.mark.xdist_group("export")

CLOSE = SINGLE  # of the largest value


GRAPHS = {build.__name__: build for build in (full, ragged, mixed, cut)}
# torch.onnx copies a tree spec in a way that torch itself deprecates; nothing a caller could do
# differently.
writes_onnx = pytest.mark.filterwarnings(
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"
)
every_graph = pytest.mark.parametrize("build", GRAPHS.values(), ids=GRAPHS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def program_of(snapshot: nn.Module, width: int) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    return torch.export.export(snapshot, (torch.randn(4, width),), dynamic_shapes=({0: batch},))


def write_onnx(snapshot: nn.Module, width: int, path: Path) -> None:
    batch = torch.export.Dim("batch")
    example = (torch.randn(4, width),)
    torch.onnx.export(
        snapshot, example, path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False
    )


def run_onnx(path: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [output] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(output)


def assert_close(output: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(output, expected, rtol=0, atol=CLOSE * float(expected.abs().max()))


@every_graph
def test_exported_program_computes_what_the_net_computes_at_any_batch(build):
    net = build()
    program = program_of(net.snapshot(), net.sizes[0])
    for batch in (1, 4, 33):
        x = torch.randn(batch, net.sizes[0])
        assert_close(program.module()(x), net(x).detach())


@writes_onnx
@every_graph
def test_onnx_file_computes_what_the_net_computes_at_any_batch(build, tmp_path):
    net = build()
    write_onnx(net.snapshot(), net.sizes[0], tmp_path / "net.onnx")
    for batch in (1, 4, 33):
        x = torch.randn(batch, net.sizes[0])
        assert_close(run_onnx(tmp_path / "net.onnx", x), net(x).detach())


def test_trainable_module_and_empty_layer_are_exported_too():
    net = gn.GrapNet.from_relations([3, 0, 2], [([], []), ([], [])], biases=[[], [0.5, -1.5]])
    for model in (net.snapshot(), net.to_module()):
        output = program_of(model, 3).module()(torch.randn(7, 3))
        assert output.tolist() == [[0.5, -1.5]] * 7
