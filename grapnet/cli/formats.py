"""The files that a net is exported to; each writer returns what runs the file it wrote, or why that
cannot be run.
"""

import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.integrations.extra import require

from .command import CommandError

_LARGEST_ONNX = 2**31 - 2**20  # bytes: a protocol buffer ends at 2 GiB
# relations of a GraphML file that is read again to check it: some seconds
_MOST_READ_BACK = 200_000
_IN_FLOAT32 = "save it in float32 first: gn.save(new, gn.load(file).float())"
_CPU = "CPUExecutionProvider"

Run = Callable[[Tensor], Tensor]


def write_onnx(net: gn.GrapNet, example: Tensor, path: Path) -> Run | str:
    """Writes a snapshot as ONNX with a free batch size."""
    for module in ("onnx", "onnxscript"):
        require(module, "export")
    plain = _plain(net)
    size = sum(p.numel() * p.element_size() for p in plain.parameters())
    if size > _LARGEST_ONNX:
        raise CommandError(
            f"the matrices hold {size:,} bytes, and an ONNX file {_LARGEST_ONNX:,}",
            "use --to torch",
        )
    with _exporting("ONNX"):
        torch.onnx.export(
            plain,
            (example,),
            path,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=False,
            verbose=False,
        )
    if importlib.util.find_spec("onnxruntime") is None:
        return 'onnxruntime is not installed; pip install "grapnet[export]"'
    missing = require("onnxruntime.capi.onnxruntime_pybind11_state", "export").NotImplemented
    with _exporting("onnxruntime", hint=_IN_FLOAT32 if example.dtype.itemsize < 4 else ""):
        try:
            session = require("onnxruntime", "export").InferenceSession(
                path.read_bytes(), providers=[_CPU]
            )
        except missing:
            kind = str(example.dtype).removeprefix("torch.")
            return (
                f"onnxruntime does not run {kind} on a CPU; use the file on another device, or"
                f" {_IN_FLOAT32}"
            )
    if example.dtype == torch.bfloat16:
        return "numpy has no bfloat16 to run it with"
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def write_program(net: gn.GrapNet, example: Tensor, path: Path) -> Run | str:
    """Writes a snapshot as a program of torch.export with a free batch size; loading it needs torch
    alone.
    """
    with _exporting("torch.export"):
        program = torch.export.export(
            _plain(net), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},)
        )
        written = io.BytesIO()  # torch ends the process when a disk is full
        torch.export.save(program, written)
        path.write_bytes(written.getbuffer())
        return torch.export.load(path).module()


def write_graph(net: gn.GrapNet, example: Tensor, path: Path) -> Run | str:
    """Writes the graph as GraphML."""
    from grapnet.integrations.networkx import from_networkx, write_graphml

    try:
        write_graphml(net, path)
    except ValueError as error:  # a name that XML cannot hold
        raise CommandError(str(error), "grapnet set-owner gives nodes another owner") from None
    if net.count().relations > _MOST_READ_BACK:
        return f"it has more than {_MOST_READ_BACK:,} relations, which take long to read"
    graph = require("networkx", "networkx").read_graphml(path)
    return from_networkx(graph, dtype=example.dtype).eval()


def write_matrices(net: gn.GrapNet, example: Tensor, path: Path) -> Run | str:
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


def _plain(net: gn.GrapNet) -> nn.Sequential:
    """Returns a snapshot as a plain nn.Sequential, whose class a file can name anywhere."""
    return nn.Sequential(*gn.snapshot(net)).eval()


@contextmanager
def _exporting(what: str, *, hint: str = "") -> Iterator[None]:
    """Tells what torch could not do in one line; its warnings are about its own insides."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (gn.GrapNetError, ImportError, OSError):
        raise
    except Exception as error:  # torch gives no common class to what its exporters trip over
        told = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CommandError(f"{what} does not take this net: {told[:200]}", hint) from error
    finally:
        logging.disable(level)
