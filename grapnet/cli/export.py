"""export: a net as ONNX, as a torch program, as GraphML or as plain matrices, checked against the
net.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import grapnet as gn

from . import formats
from .agreement import largest_difference, require_agreement, told_of_overflow
from .command import Command, CommandError, Outcome
from .files import add_file, add_output, require_free, writing
from .opened import open_net

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        ending: of its name.
        write: writes a net, a part of whose inputs it gets as an example, and returns what runs the
            file; or why it cannot be run here.
    """

    ending: str
    write: Callable[[gn.GrapNet, Tensor, Path], Run | str]


FORMATS = {
    "onnx": Format(".onnx", formats.write_onnx),
    "torch": Format(".pt2", formats.write_program),
    "graphml": Format(".graphml", formats.write_graph),
    "safetensors-dense": Format(".dense.safetensors", formats.write_matrices),
}


def _configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--to", choices=FORMATS, required=True, help="the kind of file")
    add_output(parser, "where to write it (default: beside FILE)")
    parser.add_argument("--net", metavar="PLACE", help="which net of a model that has several")


def _run(given: argparse.Namespace) -> Outcome:
    kind = FORMATS[given.to]
    output = (
        given.output
        or given.file.parent / f"{given.file.name.removesuffix('.safetensors')}{kind.ending}"
    )
    net = open_net(given.file, given.net).eval()
    require_free(output, force=given.force)
    inputs = torch.randn(7, net.sizes[0], dtype=net.execution.dtype)
    with writing(output, force=given.force) as partial:
        with _named(output):
            run = kind.write(net, inputs[:2], partial)
        difference, overflow = None, ""
        if not isinstance(run, str):
            with torch.no_grad():
                expected = net(inputs)
                difference = largest_difference(run(inputs), expected)
            require_agreement(
                difference, expected, f"what {given.to} computes", "nothing was written"
            )
            overflow = told_of_overflow(expected)
    told = f"not checked: {run}"
    if difference is not None:
        told = f"largest difference on 7 random inputs: {difference:.3g}{overflow}"
    size = output.stat().st_size
    text = f"wrote {output} ({size:,} bytes) from {net!r}\n{told}"
    data = {
        "file": str(given.file),
        "to": given.to,
        "written": str(output),
        "bytes": size,
        "sizes": net.sizes,
        "version": net.version,
        "difference": difference,
        "unchecked": run if isinstance(run, str) else None,
    }
    return Outcome(text, data)


@contextmanager
def _named(output: Path) -> Iterator[None]:
    """Names the file that was asked for where the system names none, as of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        told = f"{output} could not be written ({error.strerror or error})"
        raise CommandError(told, "make room, or choose another folder: -o") from error


COMMANDS: tuple[Command, ...] = (
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
