"""Precomputed features of images: a file of 8-bit values with a scale and a zero for every
coordinate.
"""

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from grapnet._atomic import atomic_write

from .errors import DataError, MissingDataError
from .places import user_path

# dimensions
_ARRAYS = {
    "q_train": 2,
    "q_test": 2,
    "scale": 1,
    "zero": 1,
    "y_train": 1,
    "y_test": 1,
}


@dataclass(frozen=True)
class Features:
    """Rows of features and their classes, and one line on where they come from."""

    x_train: Tensor  # [n, d] float32
    y_train: Tensor  # [n] int64
    x_test: Tensor  # [m, d] float32
    y_test: Tensor  # [m] int64
    # what the file says of itself, its name, sizes and SHA-256: put it beside every number
    about: str


def load_features(path: str | Path) -> Features:
    """Returns the features of an `.npz` file: feature = zero + scale · q.

    The file holds `q_train` [n, d] and `q_test` [m, d] uint8, `scale` and `zero` [d], `y_train` [n]
    and `y_test` [m] (whole numbers from 0), and may hold a text `about`. Nothing in it is
    unpickled.

    Raises:
        MissingDataError: there is no such file.
        DataError: it is damaged, lacks an array, or its arrays do not fit together.
    """
    path = user_path(path)
    if not path.is_file():
        raise MissingDataError(
            f"{path} is not a file; features are given by the path of their .npz file"
        )
    arrays, text = _read(path)
    _check(path, arrays)
    scale, zero = (torch.from_numpy(arrays[name].astype(np.float32)) for name in ("scale", "zero"))
    x_train, x_test = (
        torch.from_numpy(arrays[name]).float().mul_(scale).add_(zero)
        for name in ("q_train", "q_test")
    )
    y_train, y_test = (
        torch.from_numpy(arrays[name].astype(np.int64)) for name in ("y_train", "y_test")
    )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sizes = f"{len(x_train):,} + {len(x_test):,} rows of {len(scale)} features in 8 bits"
    about = "; ".join(part for part in (text, f"{path.name}: {sizes}, SHA-256 {digest}") if part)
    return Features(x_train, y_train, x_test, y_test, about)


def save_features(
    path: str | Path,
    *,
    x_train: Tensor,
    y_train: Tensor,
    x_test: Tensor,
    y_test: Tensor,
    about: str,
) -> Path:
    """Writes features in the form that `load_features` reads, each coordinate in 255 steps of its
    own range.

    The range is that of the training and test rows together, so a value returns within half a step.

    Raises:
        DataError: the tensors do not fit together or are not finite; nothing is written.
    """
    path = user_path(path)
    x = [rows.detach().cpu().float().numpy() for rows in (x_train, x_test)]
    if any(rows.ndim != 2 or not rows.size or not np.isfinite(rows).all() for rows in x):
        raise DataError(
            f"features are finite rows [n, d], got {list(x_train.shape)} and {list(x_test.shape)}"
        )
    if x[0].shape[1] != x[1].shape[1]:
        raise DataError(f"training rows have {x[0].shape[1]} features, test rows {x[1].shape[1]}")
    zero = np.minimum(x[0].min(0), x[1].min(0))  # [d]
    scale = (np.maximum(x[0].max(0), x[1].max(0)) - zero) / np.float32(255)
    steps = np.where(scale > 0, scale, np.float32(1))  # a constant coordinate is its zero
    q_train, q_test = (np.rint((rows - zero) / steps).clip(0, 255).astype(np.uint8) for rows in x)
    labels = {"y_train": y_train.cpu().numpy(), "y_test": y_test.cpu().numpy()}
    arrays = {"q_train": q_train, "q_test": q_test, "scale": scale, "zero": zero, **labels}
    _check(path, arrays)
    # numpy adds an ending to names without
    with (
        atomic_write(path) as partial,
        partial.open("wb") as file,
    ):
        np.savez_compressed(file, **arrays, about=np.array(about))
    return path


def _read(path: Path) -> tuple[dict[str, np.ndarray], str]:
    try:
        with path.open("rb") as stream:  # ours to close: np.load leaves a damaged file open
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(f"{path} is not an .npz file")
            if lacks := [name for name in _ARRAYS if name not in file.files]:
                raise DataError(
                    f"{path} lacks {', '.join(lacks)}; it has {', '.join(file.files) or 'nothing'}"
                )
            text = str(file["about"]) if "about" in file.files else ""
            return {name: file[name] for name in _ARRAYS}, text
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as features: {error}") from error


def _check(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Raises DataError for the first thing that does not fit."""
    for name, dimensions in _ARRAYS.items():
        array, whole = arrays[name], name.startswith("y")
        if array.ndim != dimensions or not array.size:
            raise DataError(
                f"{path}: {name} has shape {list(array.shape)}, {dimensions} dimensions are"
                " expected"
            )
        if array.dtype.kind not in ("ui" if whole else "uif"):
            raise DataError(
                f"{path}: {name} holds {array.dtype}, not {'whole ' if whole else ''}numbers"
            )
        if name.startswith("q") and array.dtype != np.uint8:
            raise DataError(f"{path}: {name} holds {array.dtype}, not uint8")
    width = arrays["q_train"].shape[1]
    for name in ("q_test", "scale", "zero"):
        if arrays[name].shape[-1] != width:
            raise DataError(
                f"{path}: q_train has {width} features, {name} has {arrays[name].shape[-1]}"
            )
    if not (
        np.isfinite(arrays["scale"]).all()
        and np.isfinite(arrays["zero"]).all()
        and (arrays["scale"] >= 0).all()
    ):
        raise DataError(f"{path}: scale and zero must be finite, and scale not negative")
    for part in ("train", "test"):
        rows, labels = arrays[f"q_{part}"], arrays[f"y_{part}"]
        if len(rows) != len(labels):
            raise DataError(f"{path}: {len(rows)} {part} rows for {len(labels)} labels")
        if (labels < 0).any():
            raise DataError(f"{path}: y_{part} has the negative label {labels.min()}")
