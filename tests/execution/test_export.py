"""Exports: what torch.export and ONNX make of a snapshot computes what the net computes, and
forgets what was cut.
"""

import io
import struct
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import grapnet as gn
from tests.rounding import SINGLE

# one worker: the first ONNX export of a process takes seconds
pytestmark = pytest.mark.xdist_group("export")

CLOSE = SINGLE  # of the largest value
MARK = 12345.678
PATTERN = struct.pack("<f", MARK)


def halved(z: Tensor) -> Tensor:
    return z / 2


gn.register_activation("test_export.halved", halved)


def full() -> gn.GrapNet:
    return gn.GrapNet([6, 5, 4, 3], activation="gelu")


def ragged() -> gn.GrapNet:
    return gn.GrapNet([6, 5, 4, 3], density=0.4)


def mixed() -> gn.GrapNet:
    net = gn.GrapNet([6, 5, 4, 3])
    with net.edit() as edit:
        edit.set_activation(net.layers[1][::2], "tanh")
        edit.set_activation(net.layers[1][1], "test_export.halved")
        edit.set_activation(net.layers[2], "softplus")
        edit.set_activation(net.layers[3][:1], "sigmoid")
    return net


def cut() -> gn.GrapNet:
    """Frozen and pruned, with a node that nobody leads to and one that leads nowhere."""
    net = gn.GrapNet([6, 5, 4, 3])
    with net.edit() as edit:
        edit.freeze(net.layers[1][1:3])
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.3))
        edit.cut(net.layers[1][0].incoming())
        edit.cut(net.layers[2][1].outgoing())
    return net


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


def in_program(net: gn.GrapNet) -> list[bool]:
    """Says whether the mark is in the tensors, and in the file, of an exported program."""
    program, file = program_of(net.snapshot(), net.sizes[0]), io.BytesIO()
    torch.export.save(program, file)
    held = [
        *program.state_dict.values(),
        *(c for c in program.constants.values() if isinstance(c, Tensor)),
    ]
    assert len(held) >= 2 * len(net.transitions)
    return [any(bool((tensor == MARK).any()) for tensor in held), PATTERN in file.getvalue()]


def in_onnx(net: gn.GrapNet, folder: Path) -> list[bool]:
    """Says whether the mark is in the initialisers, and in the bytes, of an ONNX file."""
    folder.mkdir()
    write_onnx(net.snapshot(), net.sizes[0], folder / "net.onnx")
    held = [
        numpy_helper.to_array(each) for each in onnx.load(folder / "net.onnx").graph.initializer
    ]
    assert len(held) >= 2 * len(net.transitions)
    # weights may lie beside the graph
    files = b"\n".join(path.read_bytes() for path in folder.iterdir())
    return [any(PATTERN in array.tobytes() for array in held), PATTERN in files]


@writes_onnx
def test_no_export_holds_a_cut_coordinate(tmp_path):
    net = gn.GrapNet([6, 5, 3])
    net.layers[0].outgoing()[7:8].weights = MARK
    assert in_program(net) + in_onnx(net, tmp_path / "before") == [True] * 4
    with net.edit(reason="forget") as edit:
        edit.cut(net.layers[0].outgoing()[7:8])
    assert in_program(net) + in_onnx(net, tmp_path / "after") == [False] * 4


@writes_onnx
def test_exporting_leaves_net_and_snapshot_as_they_are(tmp_path):
    net = mixed()
    snapshot, x = net.snapshot(), torch.randn(3, 6)
    expected = snapshot(x)
    program_of(snapshot, 6)
    write_onnx(snapshot, 6, tmp_path / "net.onnx")
    assert not snapshot.is_stale(net, exact=True)
    assert torch.equal(snapshot(x), expected)
