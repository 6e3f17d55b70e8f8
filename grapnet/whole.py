"""Files that are written whole or not at all, whatever ends the process."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# What systems answer that cannot sync a folder, or cannot open one that is for writing only.
_CANNOT_SYNC = (
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EBADF,
    errno.EACCES,
    errno.EPERM,
)


@contextmanager
def whole(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """Gives a place to write a file to, and renames it to `path`, safely on disk, when the block
    ends well.

    Until the rename the previous file is untouched; afterwards the other one survives a crash, and
    a power cut too where the system can sync the folder. A link keeps pointing where it points: the
    file behind it is replaced, and the other one has its permissions. A process that is killed
    leaves at most a folder `.grapnet.….partial` beside it, which the next one removes.

    Args:
        path: where the file goes, in a folder that is there.
        replace: whether it may take the place of another.

    Raises:
        FileNotFoundError: there is no such folder.
        IsADirectoryError: `path` is a folder.
        FileExistsError: there is such a file, perhaps since a moment ago, and `replace` is False.
        OSError: it is a device or a pipe, or the system says no; a previous file is as it was,
            unless the folder failed to sync after the rename.
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
    _sync_folder(place.parent)


@contextmanager
def partial_folder(beside: Path, *, told: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a folder for what is not whole yet, and takes it away with all that is in it when the
    block ends; takes away those of processes that are gone, too.

    Args:
        beside: the folder to make it in.
        told: what an error of the system names in place of this folder and its files, which nobody
            has asked for.
    """
    folder = beside / f".grapnet.{os.urandom(8).hex()}.partial"  # nobody else's has this name
    handle = None
    try:
        while handle is None:
            folder.mkdir()
            handle = _lock(folder)
        _remove_abandoned(beside)
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
            if handle is not None:
                os.close(handle)


def _lock(folder: Path) -> int | None:
    """Returns an open folder that is locked until it is closed or the process ends.

    Returns None when another process, which took the folder for abandoned before it was locked, has
    removed it. Where the system has no such locks, folders are neither locked nor removed.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if _take_lock(handle, wait=True) and not folder.exists():
        os.close(handle)
        return None
    return handle


def _remove_abandoned(beside: Path) -> None:
    """Removes the folders that no running process has locked."""
    for folder in beside.glob(".grapnet.*.partial"):
        try:
            handle = os.open(folder, os.O_RDONLY)
        except OSError:  # somebody else's, or gone by now
            continue
        try:
            if _take_lock(handle, wait=False):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


def _take_lock(handle: int, *, wait: bool) -> bool:
    """Locks an open folder, and returns whether that was possible."""
    if fcntl is None:
        return False
    mode = fcntl.LOCK_EX
    if not wait:
        mode |= fcntl.LOCK_NB
    try:
        fcntl.flock(handle, mode)
    except OSError:  # locked by another, or the file system has no locks
        return False
    return True


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


def _sync_folder(folder: Path) -> None:
    """Brings a rename to the disk, where the system can do that."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
