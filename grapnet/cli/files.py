"""Files named on the command line: read whole or refused, written whole or not at all, never over
others by chance.
"""

import argparse
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

import grapnet as gn
from grapnet._atomic import atomic_write
from grapnet.checkpoint import container

from .command import CommandError

TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")  # of the files that torch.save writes


def add_file(
    parser: argparse.ArgumentParser,
    name: str = "file",
    about: str = "a checkpoint that gn.save wrote",
) -> None:
    """Adds a file to read to the arguments."""
    parser.add_argument(name, type=Path, metavar=name.upper(), help=about)


def add_output(parser: argparse.ArgumentParser, about: str) -> None:
    """Adds where to write to the options."""
    parser.add_argument("-o", "--output", type=_place, metavar="NEW", help=about)
    parser.add_argument("--force", action="store_true", help="write over NEW if it is there")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Reads a checkpoint inside its block; CommandError names the file and says why it holds none
    that can be read.
    """
    if not path.exists():
        raise CommandError(
            f"{path}: no such file", "gn.save(path, net) writes one; grapnet demo writes runs/demo/"
        )
    if path.is_dir():
        raise CommandError(f"{path} is a folder, not a checkpoint", "name the file inside it")
    if not path.is_file():
        raise CommandError(
            f"{path} is no file, and a checkpoint is read from a file, not from a pipe",
            "write it to a file, and name that",
        )
    try:
        yield
    except gn.CheckpointError as error:
        raise _unreadable(path, str(error).splitlines()[0]) from None


def require_free(path: Path, *, force: bool) -> None:
    """Raises CommandError when a file to write is there already or write-protected, or its folder
    is no place for it.

    A file that nobody may write to is protected from root too, whom the system lets write to it.
    """
    if path.is_dir():
        raise CommandError(f"{path} is a folder", "name a file inside it")
    if path.exists() and not path.is_file():
        raise CommandError(
            f"{path} is a device, a pipe or a socket, not a file", "choose another name"
        )
    if path.exists() and not force:
        raise _taken(path)
    place = Path(os.path.realpath(path))
    if place.is_symlink():
        raise CommandError(f"{path} is a link that leads back to itself", "choose another name")
    folder = place.parent if path.is_symlink() else path.parent  # a link is written through
    if not folder.exists():
        raise CommandError(f"{folder}: no such folder", f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CommandError(
            f"{folder}: no file can be written into this folder", "choose another one: -o"
        )
    if path.exists() and not (os.access(path, os.W_OK) and path.stat().st_mode & 0o222):
        raise CommandError(
            f"{path} is write-protected",
            f"chmod u+w {shlex.quote(str(path))}, or choose another name: -o",
        )


@contextmanager
def writing(path: Path, *, force: bool) -> Iterator[Path]:
    """Gives a place to write a file to, and puts it at `path` when the block ends well; otherwise
    it is gone.

    Args:
        path: where the file goes; see `require_free`, which says before the work what is wrong with
            it.
        force: whether it may take the place of another.

    Raises:
        CommandError: somebody else has written `path` meanwhile, and may keep it.
    """
    with _told_if_taken(path), atomic_write(path, replace=force) as partial:
        yield partial


def write_checkpoint(
    path: Path, document: dict[str, Any], tensors: dict[str, Tensor], *, force: bool
) -> None:
    """Writes a checkpoint to a path that the command line names; see `writing`."""
    with _told_if_taken(path):
        container.write(path, document, tensors, replace=force)


def _place(word: str) -> Path:
    """Returns where to write; `-` is refused as a word, as its path is that of a file called so."""
    if word == "-":
        raise CommandError(
            "-o - names no file, and nothing is written to standard output",
            "name a file; ./- is one",
        )
    return Path(word)


@contextmanager
def _told_if_taken(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise _taken(path) from None


def _unreadable(path: Path, told: str) -> CommandError:
    """Returns the error of a file that is there and holds no net that can be read, of what
    CheckpointError told.
    """
    convert = f"for the plain weights of an MLP: grapnet convert {shlex.quote(str(path))}"
    if "was not written by gn.save" in told:
        return CommandError(f"{path} holds tensors, but no net: gn.save did not write it", convert)
    hint = "a file is read whole or not at all: use an earlier one"
    if told.startswith("container:"):
        hint = convert if path.suffix.lower() in TORCH_ENDINGS else hint
        return CommandError(
            f"{path} is no whole checkpoint: gn.save did not write it, or it is damaged", hint
        )
    return CommandError(f"{path}: {told}", hint)


def _taken(path: Path) -> CommandError:
    return CommandError(
        f"{path} exists already", "choose another name, or say --force to write over it"
    )
