"""Reading Fashion-MNIST's files: found where they are, refused when damaged."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from grapnet.data import DataError, MissingDataError, find_fashion, load_fashion
from grapnet.data.fashion import FILES
from tests.data.made_up import idx, write_fashion


def test_the_files_are_found_and_read(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_fashion(machine / "mine")
    monkeypatch.setenv("GRAPNET_DATA", str(folder))
    assert find_fashion() == folder
    images, labels = load_fashion("train")
    assert (images.shape, images.dtype) == ((5, 28, 28), torch.uint8)
    assert (labels.tolist(), labels.dtype) == ([0, 1, 2, 3, 4], torch.int64)
    assert len(load_fashion("test")[0]) == 3
    with pytest.raises(ValueError, match="part is"):
        load_fashion("validation")


def test_the_places_are_looked_at_in_order(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = machine / "home"
    folders = [
        write_fashion(machine / "usr/share/datasets/fashion-mnist", first=1),
        write_fashion(home / ".cache/FashionMNIST/raw", first=2),
        write_fashion(home / "data/FashionMNIST/raw", packed=(), first=3),
        write_fashion(machine / "work/data/FashionMNIST/raw", packed=("images", "labels"), first=4),
        write_fashion(machine / "named/FashionMNIST/raw", first=5),
        write_fashion(machine / "explicit", first=6),
    ]
    monkeypatch.setenv("GRAPNET_DATA", str(machine / "named"))
    assert load_fashion("test", folders[5])[0].unique().tolist() == [6]
    for first in (5, 4, 3, 2, 1):
        assert load_fashion("test")[0].unique().tolist() == [first]
        for path in folders[first - 1].iterdir():
            path.unlink()
    assert find_fashion() is None
    assert find_fashion(str(folders[5])) == folders[5]


def test_an_explicit_folder_is_the_only_one(machine: Path) -> None:
    write_fashion(machine / "usr/share/datasets/fashion-mnist")
    (machine / "empty").mkdir()
    assert find_fashion() is not None
    assert find_fashion(machine / "empty") is None
    with pytest.raises(MissingDataError, match="empty"):
        load_fashion("test", machine / "empty")


def test_a_guessed_folder_is_not_read_directly_because_digits_have_the_same_file_names(
    machine: Path,
) -> None:
    write_fashion(machine / "work/data")
    write_fashion(machine / "work/data/MNIST/raw")
    assert find_fashion() is None
    assert find_fashion("data") == Path("data")


def test_a_folder_that_lacks_a_file_does_not_count(machine: Path) -> None:
    folder = write_fashion(machine / "work/data/FashionMNIST/raw")
    (folder / FILES["test", "labels"]).unlink()
    whole = write_fashion(machine / "usr/share/datasets/fashion-mnist")
    assert find_fashion() == whole


def test_without_the_files_the_error_says_where_it_looked_and_how_to_get_them(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPNET_DATA", str(machine / "named"))
    partly = write_fashion(machine / "home/data/FashionMNIST/raw")
    (partly / f"{FILES['test', 'images']}.gz").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        load_fashion("test")
    text = str(caught.value)
    assert f"  {machine}/named (GRAPNET_DATA)\n" in text
    assert "  data/FashionMNIST/raw (torchvision's layout)\n" in text
    assert f"  {partly} (torchvision's layout) lacks t10k-images-idx3-ubyte\n" in text
    assert f"  {machine}/usr/share/datasets/fashion-mnist (a system package)\n" in text
    assert "apt install dataset-fashion-mnist" in text
    assert "python -m grapnet.data fashion --download" in text


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("labels", idx(np.arange(3, dtype=np.uint8))[:-1], "cut short"),
        ("labels", b"", "cut short"),
        ("labels", idx(np.array([0, 1, 10], np.uint8)), "class 10"),
        ("labels", idx(np.arange(2, dtype=np.uint8)), "3 test images and 2 labels"),
        ("images", gzip.compress(idx(np.zeros((3, 28, 27), np.uint8)), mtime=0), "28×27 pixels"),
        (
            "images",
            gzip.compress(idx(np.zeros((3, 28, 28), np.uint8)), mtime=0)[:-9],
            "cannot be unpacked",
        ),
        ("images", b"no gzip", "cannot be unpacked"),
    ],
)
def test_a_damaged_file_is_refused(machine: Path, part: str, content: bytes, message: str) -> None:
    folder = write_fashion(machine / "mine")
    name = FILES["test", part] + (".gz" if part == "images" else "")
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_fashion("test", folder)
    load_fashion("train", folder)
