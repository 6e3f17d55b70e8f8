"""CIFAR-10 from its original batches, of the Python or the binary version."""

import shutil
import tarfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .batches import read_binary, read_pickle
from .download import Report, Source, fetch, place, staging
from .errors import DownloadError
from .places import Place, default_root, missing, places, present, user_path

BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
CIFAR10 = Source(
    "https://www.cs.toronto.edu/~kriz",
    {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
)
_PYTHON, _BINARY = "cifar-10-batches-py", "cifar-10-batches-bin"
_NAMES = (*BATCHES["train"], *BATCHES["test"])
_COMMANDS = (
    "python -m grapnet.data cifar10 --download data",
    "export GRAPNET_DATA=FOLDER  # the folder where you keep them",
)


def find_cifar10(folder: str | Path | None = None) -> Path | None:
    """Returns the folder with the six batches of either version, or None.

    Args:
        folder: the only place to look; without it `GRAPNET_DATA`, then torchvision's layout below
            the usual folders, then `share/datasets` of the system prefixes.
    """
    return next((candidate.folder for candidate in _places(folder) if not candidate.lacks), None)


def load_cifar10(
    part: str, folder: str | Path | None = None, *, download: bool = False, source: Source = CIFAR10
) -> tuple[Tensor, Tensor]:
    """Returns the images [n, 3, 32, 32] uint8 and the labels [n] int64 of "train" or "test", in the
    original order.

    The Python version's batches are pickles; they are read without giving them a way to run
    anything.

    Args:
        part: "train" or "test".
        folder: where to look, see `find_cifar10`.
        download: fetches the batches from `source` when they are not found, into `folder`, or else
            `GRAPNET_DATA`, or else the user's cache.

    Raises:
        MissingDataError: no folder has them; the message lists the folders and says how to get
            them.
        DataError: a batch is damaged, or holds what no batch holds.
        DownloadError: the download failed; nothing was left behind.
    """
    if part not in BATCHES:
        raise ValueError(f'part is "train" or "test", got {part!r}')
    found = find_cifar10(folder)
    if found is None and download:
        found = download_cifar10(folder or default_root(), source=source)
    if found is None:
        raise missing("CIFAR-10", _places(folder), [*_NAMES, "or each as .bin"], _COMMANDS)
    binary = not all(present(found, name) for name in _NAMES)
    batches = [
        read_binary(found / f"{name}.bin") if binary else read_pickle(found / name)
        for name in BATCHES[part]
    ]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return torch.from_numpy(images).view(-1, 3, 32, 32), torch.from_numpy(labels)


def download_cifar10(
    folder: str | Path, *, source: Source = CIFAR10, report: Report | None = None
) -> Path:
    """Downloads the Python version into `folder`/cifar-10-batches-py, where torchvision finds it
    too, and returns it.

    The archive itself is not kept, and nothing but the batches and their description is taken out
    of it.
    """
    target = user_path(folder) / _PYTHON
    names = (*_NAMES, "batches.meta")  # which torchvision wants
    with staging(target) as stage:
        fetch(source, stage, report)
        for archive in source.md5:
            _unpack(stage / archive, names, stage)
        place(stage, names, target)
    return target


def _places(folder: str | Path | None) -> list[Place]:
    """Returns the folders in order, each as the version of which it has more files."""
    python = places(folder, [_PYTHON, _BINARY], _NAMES)
    binary = places(folder, [_PYTHON, _BINARY], [f"{name}.bin" for name in _NAMES])
    return [
        one if len(one.has) >= len(other.has) else other
        for one, other in zip(python, binary, strict=True)
    ]


def _unpack(archive: Path, names: tuple[str, ...], folder: Path) -> None:
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for name in names:
                content = tar.extractfile(tar.getmember(f"{_PYTHON}/{name}"))
                if content is None:
                    raise tarfile.TarError(f"{name} is not a file")
                with content, (folder / name).open("wb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, KeyError, EOFError, zlib.error) as error:
        raise DownloadError(
            f"{archive.name} cannot be unpacked, nothing was kept: {error}"
        ) from error
