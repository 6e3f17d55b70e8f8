"""Fashion-MNIST from the four original idx files, wherever this machine keeps them."""

import gzip
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILES = {
    ("train", "images"): "train-images-idx3-ubyte",
    ("train", "labels"): "train-labels-idx1-ubyte",
    ("test", "images"): "t10k-images-idx3-ubyte",
    ("test", "labels"): "t10k-labels-idx1-ubyte",
}
_SHAPES = {"images": 3, "labels": 1}  # dimensions


def find_fashion() -> Path | None:
    """Returns the folder with the files, or None: `GRAPNET_DATA`, then `share/datasets` of the system prefixes."""
    given = os.environ.get("GRAPNET_DATA")
    folders = [Path(given), Path(given) / "fashion-mnist"] if given else []
    folders += [Path(prefix) / "share/datasets/fashion-mnist" for prefix in (sys.prefix, sys.base_prefix, "/usr")]
    return next((folder for folder in folders if all(_file(folder, name) for name in FILES.values())), None)


def load_fashion(part: str, folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """Returns the images [n, 28, 28] uint8 and the labels [n] int64 of "train" or "test".

    Raises:
        FileNotFoundError: no folder has them; the message says how to get them.
        ValueError: a file is damaged.
    """
    if part not in ("train", "test"):
        raise ValueError(f'part is "train" or "test", got {part!r}')
    folder = folder or find_fashion()
    if folder is None:
        raise FileNotFoundError(
            "Fashion-MNIST is not on this machine. Put its four idx files into a folder and name it in GRAPNET_DATA, "
            "or install the Debian package dataset-fashion-mnist"
        )
    images, labels = (_read(folder, FILES[part, kind], _SHAPES[kind]) for kind in ("images", "labels"))
    if len(images) != len(labels):
        raise ValueError(f"{folder} holds {len(images)} {part} images and {len(labels)} labels")
    return images, labels.long()


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read(folder: Path, name: str, dimensions: int) -> Tensor:
    """Returns the array of an idx file: 0, 0, 8 for uint8, the number of dimensions, their sizes, the data."""
    path = _file(folder, name)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {name}")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    head = 4 + 4 * dimensions
    sizes = np.frombuffer(content, ">u4", dimensions, 4) if len(content) >= head else ()
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) != head + int(np.prod(sizes, dtype=np.int64)):
        raise ValueError(f"{path.name} is not an idx file of {dimensions} dimensions")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(sizes).copy())
