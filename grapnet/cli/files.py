"""Files named on the command line: read whole or refused, written whole or not at all, never over others by chance."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import grapnet as gn
from grapnet.whole import whole

from .command import CommandError


def add_file(
    parser: argparse.ArgumentParser, name: str = "file", about: str = "a checkpoint that gn.save wrote"
) -> None:
    """Adds a file to read to the arguments."""
    parser.add_argument(name, type=Path, metavar=name.upper(), help=about)


def add_output(parser: argparse.ArgumentParser, about: str) -> None:
    """Adds where to write to the options."""
    parser.add_argument("-o", "--output", type=Path, metavar="NEW", help=about)
    parser.add_argument("--force", action="store_true", help="write over NEW if it is there")


def load_net(path: Path, device: torch.device | str = "cpu") -> gn.GrapNet:
    """Returns the net of a checkpoint; raises CommandError, naming the file, when there is none that can be read."""
    with reading(path):
        return gn.load(path).to(device)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Reads a checkpoint inside its block; CommandError names the file and says why it cannot be read."""
    if not path.exists():
        raise CommandError(f"{path}: no such file", "gn.save(path, net) writes one; grapnet demo writes runs/demo/")
    if path.is_dir():
        raise CommandError(f"{path} is a folder, not a checkpoint", "name the file inside it")
    try:
        yield
    except gn.CheckpointError as error:
        told = str(error).splitlines()[0]
        if told.startswith("nets: this file holds a model"):
            hint = "grapnet inspect, history and diff read models; in Python, gn.restore(path, into=model)"
            raise CommandError(f"{path} holds a model with nets inside, not one net", hint) from None
        hint = "a file is read whole or not at all: use an earlier one"
        if ("grapnet" in told and "was not written by" in told) or path.suffix in (".pt", ".pth"):
            hint = "for the plain weights of an MLP: grapnet convert"
        raise CommandError(told if str(path) in told else f"{path}: {told}", hint) from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}", "see who may read it: ls -l") from None


def require_free(path: Path, *, force: bool) -> None:
    """Raises CommandError when a file to write is there already, or its folder is not."""
    if path.is_dir():
        raise CommandError(f"{path} is a folder", "name a file inside it")
    if path.exists() and not force:
        raise _taken(path)
    if not path.parent.exists():
        raise CommandError(f"{path.parent}: no such folder", f"mkdir -p {path.parent}")
    if os.path.islink(os.path.realpath(path)):
        raise CommandError(f"{path} is a link that leads back to itself", "choose another name")


@contextmanager
def writing(path: Path, *, force: bool) -> Iterator[Path]:
    """Gives a place to write a file to, and puts it at `path` when the block ends well; otherwise it is gone.

    Args:
        path: where the file goes; see `require_free`, which says before the work what is wrong with it.
        force: whether it may take the place of another.

    Raises:
        CommandError: somebody else has written `path` meanwhile, and may keep it.
    """
    try:
        with whole(path, replace=force) as partial:
            yield partial
    except FileExistsError:
        raise _taken(path) from None


def _taken(path: Path) -> CommandError:
    return CommandError(f"{path} exists already", "choose another name, or say --force to write over it")
