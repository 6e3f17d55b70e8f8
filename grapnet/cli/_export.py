"""`grapnet export`: a net as ONNX, a torch program, GraphML or plain matrices, checked."""

import argparse
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grapnet as gn

from . import _whole as whole
from ._command import (
    Command,
    CommandError,
    Outcome,
    add_file,
    add_output,
    add_place,
    first_line,
    largest_difference,
    open_file,
    place_of,
    require_free,
    writing,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    # What runs an exported file, or why it cannot be run here.
    Run = Callable[[Tensor], Tensor] | str

ENDINGS = {
    "onnx": ".onnx",
    "torch": ".pt2",
    "graphml": ".graphml",
    "safetensors-dense": ".dense.safetensors",
}
_MOST_READ_BACK = 200_000  # relations of a GraphML file that is read again to check it: seconds


def _configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--to", choices=ENDINGS, required=True, help="the kind of file")
    add_output(parser, "where to write it (default: beside FILE)")
    add_place(parser)


def _run(given: argparse.Namespace) -> Outcome:
    import torch

    name = given.file.name.removesuffix(".safetensors") + ENDINGS[given.to]
    output = given.output or given.file.with_name(name)
    file = open_file(given.file)
    if file.is_adopted:
        raise whole.needs_code(
            given.file,
            "a whole model cannot be exported from its file: the code of the model runs it",
            'torch.onnx.export(net.model, (x,), "model.onnx")',
        )
    net = file.nets[place_of(file, given.net)].eval()
    require_free(output, force=given.force)
    inputs = torch.randn(7, net.sizes[0], dtype=net.execution.dtype)
    difference = None
    with writing(output, force=given.force) as partial:
        try:
            with _quiet():
                run = _WRITERS[given.to](net, inputs[:2], partial)
        except (gn.errors.GrapNetError, CommandError, ImportError, OSError):
            raise
        except Exception as error:  # the exporters have no common class of errors
            raise CommandError(
                f"cannot export this net to {given.to}: {first_line(error)}"
            ) from error
        if not isinstance(run, str):
            with torch.no_grad():
                difference = largest_difference(run(inputs), net(inputs))
    checked = f"not checked: {run}"
    if difference is not None:
        checked = f"largest difference on 7 random inputs: {difference:.3g}"
    data = {
        "file": str(given.file),
        "to": given.to,
        "written": str(output),
        "bytes": output.stat().st_size,
        "sizes": net.sizes,
        "version": net.version,
        "difference": difference,
        "unchecked": run if isinstance(run, str) else None,
    }
    return Outcome(f"wrote {output} ({data['bytes']:,} bytes) from {net!r}\n{checked}", data)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings of torch's exporters about their internals."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _write_onnx(net: "gn.GrapNet", example: "Tensor", path: Path) -> "Run":
    """Writes a snapshot as ONNX with a free batch size."""
    import torch

    from grapnet.integrations._extra import require

    require("onnx", "export")
    require("onnxscript", "export")
    torch.onnx.export(
        _plain(net),
        (example,),
        path,
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
        verbose=False,
    )
    if importlib.util.find_spec("onnxruntime") is None:
        return 'onnxruntime is not installed; pip install "grapnet[export]"'
    if example.dtype == torch.bfloat16:
        return "onnxruntime does not run bfloat16 on a CPU"
    session = require("onnxruntime", "export").InferenceSession(
        path.read_bytes(), providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def _write_program(net: "gn.GrapNet", example: "Tensor", path: Path) -> "Run":
    """Writes a snapshot as a program of torch.export, which loads without grapnet."""
    import torch

    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(_plain(net), (example,), dynamic_shapes=shapes)
    # Through memory: torch ends the process when a disk is full.
    content = io.BytesIO()
    torch.export.save(program, content)
    path.write_bytes(content.getbuffer())
    return torch.export.load(path).module()


def _write_graph(net: "gn.GrapNet", example: "Tensor", path: Path) -> "Run":
    """Writes the graph as GraphML."""
    from grapnet.integrations._extra import require
    from grapnet.integrations.networkx import from_networkx, write_graphml

    write_graphml(net, path)
    if net.count().relations > _MOST_READ_BACK:
        return f"reading more than {_MOST_READ_BACK:,} relations takes long"
    graph = require("networkx", "networkx").read_graphml(path)
    return from_networkx(graph, dtype=example.dtype).eval()


def _write_matrices(net: "gn.GrapNet", example: "Tensor", path: Path) -> "Run":
    """Writes the state dict of a snapshot, as of an `nn.Sequential`, to plain safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    plain = _plain(net)
    state = {name: tensor.contiguous() for name, tensor in plain.state_dict().items()}
    try:
        save_file(state, path, metadata={"format": "pt", "modules": repr(plain)})
    except SafetensorError as error:  # a full disk is one
        raise OSError(str(error)) from error
    plain.load_state_dict(load_file(path))
    return plain


def _plain(net: "gn.GrapNet") -> "nn.Sequential":
    """Returns a snapshot as a plain nn.Sequential, whose class a file can name anywhere."""
    from torch import nn

    return nn.Sequential(*gn.snapshot(net)).eval()


_WRITERS = {
    "onnx": _write_onnx,
    "torch": _write_program,
    "graphml": _write_graph,
    "safetensors-dense": _write_matrices,
}

COMMANDS = (
    Command(
        "export",
        "writes a net as ONNX, a torch program, GraphML or plain matrices, and checks it",
        "Bring a net elsewhere",
        _configure,
        _run,
        (
            "export net.safetensors --to onnx",
            "export net.safetensors --to torch -o net.pt2",
            "export model.safetensors --net 2 --to graphml",
        ),
    ),
)
