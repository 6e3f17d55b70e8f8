"""Reading Fashion-MNIST's files: found where they are, refused when damaged."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from grapnet.data import fashion
from grapnet.data.fashion import FILES, find_fashion, load_fashion


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with five training and three test images, some files packed."""
    rng = np.random.default_rng(0)
    for (part, kind), name in FILES.items():
        count = 5 if part == "train" else 3
        array = rng.integers(0, 10, (count, 28, 28) if kind == "images" else (count,), dtype=np.uint8)
        packed = kind == "images"
        content = gzip.compress(idx(array)) if packed else idx(array)
        (tmp_path / (f"{name}.gz" if packed else name)).write_bytes(content)
    monkeypatch.setenv("GRAPNET_DATA", str(tmp_path))
    return tmp_path


def test_the_files_are_found_and_read(folder: Path) -> None:
    assert find_fashion() == folder
    images, labels = load_fashion("train")
    assert (images.shape, images.dtype) == ((5, 28, 28), torch.uint8)
    assert (labels.shape, labels.dtype) == ((5,), torch.int64)
    assert len(load_fashion("test")[0]) == 3
    with pytest.raises(ValueError, match="part is"):
        load_fashion("validation")


def test_a_damaged_file_is_named(folder: Path) -> None:
    name = FILES["test", "labels"]
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    with pytest.raises(ValueError, match=name):
        load_fashion("test")
    load_fashion("train")


def test_without_the_files_the_error_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPNET_DATA", str(tmp_path))
    monkeypatch.setattr(fashion.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(fashion.sys, "base_prefix", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="t10k-images"):
        load_fashion("test", tmp_path)
