"""Small made-up files in the original formats of Fashion-MNIST and CIFAR-10."""

import gzip
import struct
from pathlib import Path

import numpy as np

from grapnet.data.cifar import BATCHES
from grapnet.data.fashion import FILES


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_fashion(folder: Path, *, packed: tuple[str, ...] = ("images",), first: int = 0) -> Path:
    """Writes five training and three test images whose pixels all equal `first`, kinds in `packed`
    as .gz.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for (part, kind), name in FILES.items():
        count = 5 if part == "train" else 3
        array = (
            np.arange(count, dtype=np.uint8)
            if kind == "labels"
            else np.full((count, 28, 28), first, np.uint8)
        )
        content = idx(array)
        path = folder / (f"{name}.gz" if kind in packed else name)
        path.write_bytes(gzip.compress(content, mtime=0) if kind in packed else content)
    return folder


def python2_batch(images: np.ndarray, labels: list[int], *, kind: bytes = b"u1") -> bytes:
    """Returns what Python 2 wrote for a batch: protocol 2, text as bytes, the array by its module
    of that time.
    """

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    content = images.tobytes()
    dtype = b"cnumpy\ndtype\n" + text(kind) + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN"
    dtype += number(-1) + number(-1) + b"K\x00tb"
    shape = number(images.shape[0]) + number(images.shape[1]) + b"\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    )
    array += (
        b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", len(content)) + content + b"tb"
    )
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    fields = (
        text(b"batch_label") + text(b"a batch") + text(b"labels") + listed + text(b"data") + array
    )
    return b"\x80\x02}(" + fields + b"u."


def cifar_arrays(name: str) -> tuple[np.ndarray, list[int]]:
    """Returns the two images and labels of a made-up batch, different for every batch."""
    number = [*BATCHES["train"], *BATCHES["test"]].index(name)
    images = np.random.default_rng(number).integers(0, 256, (2, 3072), dtype=np.uint8)
    return images, [number, 9 - number]


def write_cifar(folder: Path, *, binary: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*BATCHES["train"], *BATCHES["test"]):
        images, labels = cifar_arrays(name)
        if binary:
            records = np.concatenate([np.array(labels, np.uint8)[:, None], images], axis=1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        else:
            (folder / name).write_bytes(python2_batch(images, labels))
    return folder
