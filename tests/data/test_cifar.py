"""Reading CIFAR-10's batches: both versions agree, and a pickle cannot run anything."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from grapnet.data import DataError, MissingDataError, find_cifar10, load_cifar10
from grapnet.data.cifar import BATCHES
from tests.data.made_up import cifar_arrays, python2_batch, write_cifar


def test_both_versions_give_the_same_images(machine: Path) -> None:
    python = write_cifar(machine / "a/cifar-10-batches-py")
    binary = write_cifar(machine / "b/cifar-10-batches-bin", binary=True)
    assert find_cifar10(machine / "a") == python
    assert find_cifar10(machine / "b") == binary
    for part in ("train", "test"):
        images, labels = load_cifar10(part, machine / "a")
        expected = [cifar_arrays(name) for name in BATCHES[part]]
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (3, 32, 32)
        assert labels.tolist() == [label for _, some in expected for label in some]
        rows = np.concatenate([rows for rows, _ in expected])
        assert torch.equal(images.flatten(1), torch.from_numpy(rows))
        assert images[0, 1, 0, 2] == rows[0, 1024 + 2]  # the green plane follows the red one
        other = load_cifar10(part, binary)
        assert torch.equal(images, other[0])
        assert torch.equal(labels, other[1])
    with pytest.raises(ValueError, match="part is"):
        load_cifar10("validation", python)


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_batch_that_python_3_wrote_is_read(machine: Path, protocol: int) -> None:
    folder = write_cifar(machine / "mine")
    images, labels = cifar_arrays("test_batch")
    (folder / "test_batch").write_bytes(
        pickle.dumps({"data": images, "labels": labels}, protocol=protocol)
    )
    assert torch.equal(load_cifar10("test", folder)[0].flatten(1), torch.from_numpy(images))


def test_the_places_are_looked_at_in_order(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_cache = write_cifar(machine / "home/.cache/cifar-10-batches-py")
    assert find_cifar10() == in_cache
    write_cifar(machine / "work/data/cifar-10-batches-bin", binary=True)
    assert find_cifar10() == Path("data/cifar-10-batches-bin")
    named = write_cifar(machine / "named")
    monkeypatch.setenv("GRAPNET_DATA", str(named))
    assert find_cifar10() == named
    (named / "test_batch").unlink()
    assert find_cifar10() == Path("data/cifar-10-batches-bin")
    assert find_cifar10(machine / "home") is None


def test_without_the_batches_the_error_says_where_it_looked_and_how_to_get_them(
    machine: Path,
) -> None:
    binary = write_cifar(machine / "work/data/cifar-10-batches-bin", binary=True)
    (binary / "test_batch.bin").unlink()
    with pytest.raises(MissingDataError) as caught:
        load_cifar10("test")
    text = str(caught.value)
    assert "  data/cifar-10-batches-py (torchvision's layout)\n" in text
    assert "  data/cifar-10-batches-bin (torchvision's layout) lacks test_batch.bin\n" in text
    assert f"  {machine}/home/.cache/cifar-10-batches-py" in text
    assert "python -m grapnet.data cifar10 --download" in text
    other = pickle.loads(pickle.dumps(caught.value))  # as it comes from another process
    assert str(other) == text
    assert text.startswith(f"CIFAR-10 was not found; looked in {len(other.folders)} folders\n")
    assert all(f"\n  {line}" in text for line in (*other.folders, *other.commands))


class Runs:
    """Unpickles to the making of a folder."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("where", ["alone", "as labels", "beside"])
def test_a_pickle_that_would_run_something_is_refused(machine: Path, where: str) -> None:
    folder = write_cifar(machine / "mine")
    images, labels = cifar_arrays("test_batch")
    content = {
        "alone": Runs(),
        "as labels": {"data": images, "labels": Runs()},
        "beside": {"data": images, "labels": labels, "batch_label": Runs()},
    }[where]
    written = pickle.dumps(content, protocol=4)
    (folder / "test_batch").write_bytes(written)
    with pytest.raises(DataError, match=r"test_batch: it asks for \w+\.mkdir"):
        load_cifar10("test", folder)
    assert not Path("ran").exists()
    with pytest.raises(FileExistsError):  # what plain unpickling does
        [pickle.loads(written) for _ in range(2)]


@pytest.mark.parametrize(
    "written",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        # sets an attribute of a class
        b"cnumpy.core.multiarray\n_reconstruct\n(N}S'__setstate__'\nNstb.",
        b"cnumpy\nndarray\n)\x81.",  # an array without content
        b"\x80\x02}(U\x04datacnumpy\nndarray\n)\x81U\x06labels]u.",
        b"Pname\n.",
        b"\x80\x02K\x01.",
        b"\x80\x02}.",
        b"",
    ],
    ids=[
        "eval",
        "class attribute",
        "bare array",
        "bare array as data",
        "persistent",
        "number",
        "empty",
        "nothing",
    ],
)
def test_a_pickle_that_is_no_batch_is_refused(machine: Path, written: bytes) -> None:
    folder = write_cifar(machine / "mine")
    (folder / "test_batch").write_bytes(written)
    with pytest.raises(DataError, match="test_batch"):
        load_cifar10("test", folder)
    assert len(load_cifar10("train", folder)[0]) == 10


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (python2_batch(np.zeros((2, 3072), np.uint8), [0, 1])[:-100], "cannot be read"),
        (python2_batch(np.zeros((2, 3072), np.uint8), [0, 1, 2]), "3 labels"),
        (python2_batch(np.zeros((2, 3071), np.uint8), [0, 1]), r"\[2, 3071\]"),
        (python2_batch(np.zeros((2, 3072), np.uint8), [0, 10]), "0 to 9"),
        (python2_batch(np.zeros((2, 3072), np.uint8), [0, 1], kind=b"O8"), "one of bytes"),
    ],
)
def test_a_damaged_batch_is_refused(machine: Path, written: bytes, message: str) -> None:
    folder = write_cifar(machine / "mine")
    (folder / "test_batch").write_bytes(written)
    with pytest.raises(DataError, match=message):
        load_cifar10("test", folder)


@pytest.mark.parametrize(
    ("written", "message"),
    [(b"", "0 bytes"), (b"\x01" * 3072, "whole records"), (b"\x0a" * 3073, "class 10")],
)
def test_a_damaged_binary_batch_is_refused(machine: Path, written: bytes, message: str) -> None:
    folder = write_cifar(machine / "mine", binary=True)
    (folder / "test_batch.bin").write_bytes(written)
    with pytest.raises(DataError, match=message):
        load_cifar10("test", folder)
