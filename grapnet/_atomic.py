"""Atomic writes: a file is either complete or absent, even if the process is killed."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# The errors of systems that cannot sync a folder, or cannot open one that is for writing only.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM)


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """Yields a path to write to, and moves that file to `path` when the block succeeds.

    The file is synced to disk before it takes the place of an earlier one, whose permissions it
    gets. A link stays a link, and the file behind it is replaced. A killed process leaves at most a
    folder `.grapnet.….partial`, which the next write into the same folder removes.

    Raises:
        FileExistsError: `path` exists and `replace` is False.
        OSError: the folder of `path` does not exist, `path` is not a regular file, or it cannot be
            written. An earlier file is unchanged, unless the folder failed to sync after the move.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"the folder {str(target.parent)!r} does not exist; create it first"
        )
    if target.is_dir():
        raise IsADirectoryError(f"{str(target)!r} is a folder; name a file in it")
    if target.exists() and not target.is_file():
        raise OSError(f"{str(target)!r} is a device, a pipe or a socket")
    with _partial_folder(target.parent, path) as folder:
        partial = folder / Path(path).name
        yield partial
        # The folder was made with the permissions that the umask allows.
        mode = folder.stat().st_mode & 0o666
        if target.is_file():
            mode = target.stat().st_mode & 0o777
        partial.chmod(mode)
        _sync(partial)
        if replace:
            os.replace(partial, target)
        else:
            _move_to_free_name(partial, target)
    try:
        _sync(target.parent)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


@contextmanager
def _partial_folder(beside: Path, path: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a folder for unfinished files, and removes it with its content after the block.

    Removes those of processes that are gone, too. Errors of the system about files inside name
    `path` instead.
    """
    folder = beside / f".grapnet.{os.urandom(8).hex()}.partial"
    with ExitStack() as locks:
        try:
            _remove_abandoned(beside)
            # Another process may remove the folder before it is locked.
            while not folder.exists():
                folder.mkdir()
                locks.enter_context(_lock(folder))
            yield folder
        except OSError as error:
            if not str(error.filename).startswith(str(folder)):
                raise
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(beside: Path) -> None:
    """Removes the partial folders that no running process has locked."""
    for folder in beside.glob(".grapnet.*.partial"):
        with _lock(folder, wait=False) as abandoned:
            if abandoned:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Locks a folder for the block, and yields whether the system and other processes let it.

    A lock ends with its process. Windows and some file systems have none.
    """
    with ExitStack() as stack:
        locked = False
        if fcntl is not None:
            with suppress(OSError):
                handle = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, handle)
                mode = fcntl.LOCK_EX
                if not wait:
                    mode |= fcntl.LOCK_NB
                fcntl.flock(handle, mode)
                locked = True
        yield locked


def _move_to_free_name(partial: Path, target: Path) -> None:
    """Renames a file; of several processes that want the same name, only one gets it."""
    try:
        os.link(partial, target)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links: the process that creates the empty file may replace it.
        target.touch(exist_ok=False)
        os.replace(partial, target)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
