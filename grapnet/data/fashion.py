"""Fashion-MNIST from the four original idx files, wherever this machine keeps them."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .download import Report, Source, fetch, place, staging
from .errors import DataError
from .places import Place, default_root, missing, places, present, user_path

FILES = {
    ("train", "images"): "train-images-idx3-ubyte",
    ("train", "labels"): "train-labels-idx1-ubyte",
    ("test", "images"): "t10k-images-idx3-ubyte",
    ("test", "labels"): "t10k-labels-idx1-ubyte",
}
FASHION = Source(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
)
_DOWNLOADED = "FashionMNIST/raw"  # torchvision's layout
_LAYOUTS = (_DOWNLOADED, "fashion-mnist")
_SIZES = {"images": (28, 28), "labels": ()}  # of one
_COMMANDS = (
    "sudo apt install dataset-fashion-mnist",
    "python -m grapnet.data fashion --download data",
    "export GRAPNET_DATA=FOLDER  # the folder where you keep them",
)


def find_fashion(folder: str | Path | None = None) -> Path | None:
    """Returns the folder with the four files, or None.

    Args:
        folder: the only place to look; without it `GRAPNET_DATA`, then torchvision's layout below
            the usual folders, then `share/datasets` of the system prefixes.
    """
    return next((candidate.folder for candidate in _places(folder) if not candidate.lacks), None)


def load_fashion(
    part: str, folder: str | Path | None = None, *, download: bool = False, source: Source = FASHION
) -> tuple[Tensor, Tensor]:
    """Returns the images [n, 28, 28] uint8 and the labels [n] int64 of "train" or "test".

    Args:
        part: "train" or "test".
        folder: where to look, see `find_fashion`.
        download: fetches the files from `source` when they are not found, into `folder`, or else
            `GRAPNET_DATA`, or else the user's cache.

    Raises:
        MissingDataError: no folder has them; the message lists the folders and says how to get
            them.
        DataError: a file is damaged.
        DownloadError: the download failed; nothing was left behind.
    """
    if part not in ("train", "test"):
        raise ValueError(f'part is "train" or "test", got {part!r}')
    found = find_fashion(folder)
    if found is None and download:
        found = download_fashion(folder or default_root(), source=source)
    if found is None:
        raise missing("Fashion-MNIST", _places(folder), list(FILES.values()), _COMMANDS)
    images, labels = (
        _read(found, FILES[part, kind], _SIZES[kind]) for kind in ("images", "labels")
    )
    if len(images) != len(labels):
        raise DataError(f"{found} holds {len(images)} {part} images and {len(labels)} labels")
    if (labels > 9).any():
        raise DataError(
            f"{found / FILES[part, 'labels']} names class {labels.max()}; the classes are 0 to 9"
        )
    return images, labels.long()


def download_fashion(
    folder: str | Path, *, source: Source = FASHION, report: Report | None = None
) -> Path:
    """Downloads the four files into `folder`/FashionMNIST/raw, where torchvision finds them too,
    and returns it.
    """
    target = user_path(folder) / _DOWNLOADED
    with staging(target) as stage:
        fetch(source, stage, report)
        place(stage, source.md5, target)
    return target


def _places(folder: str | Path | None) -> list[Place]:
    return places(folder, _LAYOUTS, list(FILES.values()), packed=True)


def _read(folder: Path, name: str, one: tuple[int, ...]) -> Tensor:
    """Returns the array of an idx file: 0, 0, 8 for uint8, the number of dimensions, their sizes,
    the data.
    """
    path = present(folder, name, packed=True)
    if path is None:
        raise DataError(f"{folder} has no {name}: it went away while it was read")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from error
    dimensions = 1 + len(one)
    head = 4 + 4 * dimensions
    sizes = np.frombuffer(content, ">u4", dimensions, 4).tolist() if len(content) >= head else []
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) != head + int(
        np.prod(sizes, dtype=np.int64)
    ):
        raise DataError(f"{path} is not an idx file of {dimensions} dimensions, or was cut short")
    if tuple(sizes[1:]) != one:
        raise DataError(
            f"{path} holds images of {sizes[1]}×{sizes[2]} pixels; Fashion-MNIST's are 28×28"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(sizes).copy())
