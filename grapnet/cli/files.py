"""Files named on the command line: read whole or refused, written whole or not at all, never over others by chance."""

import argparse
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grapnet as gn
from grapnet.whole import whole

from .command import CommandError

TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")  # of the files that torch.save writes


def add_file(
    parser: argparse.ArgumentParser, name: str = "file", about: str = "a checkpoint that gn.save wrote"
) -> None:
    """Adds a file to read to the arguments."""
    parser.add_argument(name, type=Path, metavar=name.upper(), help=about)


def add_output(parser: argparse.ArgumentParser, about: str) -> None:
    """Adds where to write to the options."""
    parser.add_argument("-o", "--output", type=Path, metavar="NEW", help=about)
    parser.add_argument("--force", action="store_true", help="write over NEW if it is there")


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
        raise _unreadable(path, str(error).splitlines()[0]) from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}", "see who may read it: ls -l") from None


def require_free(path: Path, *, force: bool) -> None:
    """Raises CommandError when a file to write is there already, or its folder is not."""
    if path.is_dir():
        raise CommandError(f"{path} is a folder", "name a file inside it")
    if path.exists() and not path.is_file():
        raise CommandError(f"{path} is a device, a pipe or a socket, not a file", "choose another name")
    if path.exists() and not force:
        raise _taken(path)
    if not path.parent.exists():
        raise CommandError(f"{path.parent}: no such folder", f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"{path.parent}: no file can be written into this folder", "choose another one: -o")
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


def _unreadable(path: Path, told: str) -> CommandError:
    """Returns the error of a file that is there and holds no net that can be read, of what CheckpointError told."""
    convert = f"for the plain weights of an MLP: grapnet convert {shlex.quote(str(path))}"
    if "was not written by gn.save" in told:
        return CommandError(f"{path} holds tensors, but no net: gn.save did not write it", convert)
    hint = "a file is read whole or not at all: use an earlier one"
    if told.startswith("container:"):
        hint = convert if path.suffix.lower() in TORCH_ENDINGS else hint
        return CommandError(f"{path} is no whole checkpoint: gn.save did not write it, or it is damaged", hint)
    return CommandError(f"{path}: {told}", hint)


def _taken(path: Path) -> CommandError:
    return CommandError(f"{path} exists already", "choose another name, or say --force to write over it")
