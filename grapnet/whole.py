"""Files that are written whole or not at all, whatever ends the process."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """Gives a place to write a file to, and renames it to `path`, safely on disk, when the block
    ends well.

    Until the rename the previous file is untouched; afterwards nothing is raised, and the other one
    survives a crash, and a power cut too where the system can sync the folder. A link keeps
    pointing where it points: the file behind it is replaced, and the other one has its permissions.
    A process that is killed leaves at most a folder `.grapnet.….partial` beside it.

    Args:
        path: where the file goes, in a folder that is there.
        replace: whether it may take the place of another.

    Raises:
        FileNotFoundError: there is no such folder.
        IsADirectoryError: `path` is a folder.
        FileExistsError: there is such a file, perhaps since a moment ago, and `replace` is False.
        OSError: it is a device or a pipe, or the system says no; a previous file is as it was.
    """
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir():
        raise FileNotFoundError(
            f"there is no folder {str(place.parent)!r} to save into; make it first"
        )
    if place.is_dir():
        raise IsADirectoryError(f"{str(place)!r} is a folder; name a file in it")
    if place.exists() and not place.is_file():
        raise OSError(
            f"{str(place)!r} is a device, a pipe or a socket, and no file can take its place"
        )
    with partial_folder(place.parent, told=path) as folder:
        partial = folder / Path(path).name  # with the ending that was asked for
        yield partial
        there = place.is_file()  # its permissions, or what the umask allows
        partial.chmod(place.stat().st_mode & 0o777 if there else folder.stat().st_mode & 0o666)
        _sync(partial)
        (os.replace if replace else _give_name)(partial, place)
    # some mounts sync no folder, and one that may only be written into cannot be opened for it
    with suppress(OSError):
        _sync(place.parent)


@contextmanager
def partial_folder(beside: Path, *, told: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a folder for what is not whole yet, and takes it away with all that is in it when the
    block ends.

    Args:
        beside: the folder to make it in.
        told: what an error of the system names in place of this folder and its files, which nobody
            has asked for.
    """
    folder = beside / f".grapnet.{os.urandom(8).hex()}.partial"  # nobody else's has this name
    try:
        folder.mkdir()
        yield folder
    except OSError as error:
        if not str(error.filename).startswith(str(folder)):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(told)) from error
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:  # a signal may have ended the first
            shutil.rmtree(folder, ignore_errors=True)


def _give_name(partial: Path, place: Path) -> None:
    """Renames a file to a name that only one of those who want it can have."""
    try:
        os.link(partial, place)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: an empty file is the claim
        place.touch(exist_ok=False)
        try:
            os.replace(partial, place)
        finally:
            if partial.exists():  # it did not come to it
                place.unlink()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
