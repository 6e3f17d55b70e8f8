"""Data sets are found where they lie, downloaded only on request and with their hashes, and read
as they were written.
"""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import avg_pool2d

from studies import data


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data, in whose folder `work` the test runs."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GRAPNET_DATA", raising=False)
    monkeypatch.setattr(data, "SYSTEM", tmp_path / "system")
    return tmp_path


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def fashion_content() -> dict[str, bytes]:
    """The four files of Fashion-MNIST with five training and three test images."""
    found = {}
    for start, count in (("train", 5), ("t10k", 3)):
        images = np.arange(count * 784, dtype=np.uint8).reshape(count, 28, 28)
        found[f"{start}-images-idx3-ubyte"] = idx(images)
        found[f"{start}-labels-idx1-ubyte"] = idx(np.arange(count, dtype=np.uint8))
    return found


def write_fashion(folder: Path, *, packed: bool = False) -> Path:
    folder.mkdir(parents=True)
    for name, content in fashion_content().items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


def cifar_records(number: int) -> np.ndarray:
    """Two records of a batch: a label, then the red, green and blue planes."""
    records = np.random.default_rng(number).integers(0, 256, (2, 3073), dtype=np.uint8)
    records[:, 0] = (number, 9 - number)
    return records


def write_cifar(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate([*data.CIFAR_FILES["train"], *data.CIFAR_FILES["test"]]):
        (folder / name).write_bytes(cifar_records(number).tobytes())
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_fashion_is_read_packed_or_not(machine: Path, packed: bool) -> None:
    folder = write_fashion(machine / "mine", packed=packed)
    images, labels = data.load_fashion("train", folder)
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert torch.equal(images.flatten(), (torch.arange(5 * 784) % 256).to(torch.uint8))
    assert labels.tolist() == [0, 1, 2, 3, 4]
    assert data.load_fashion("test", folder)[0].shape == (3, 28, 28)


def test_cifar_is_read_from_the_binary_version(machine: Path) -> None:
    folder = write_cifar(machine / "mine")
    images, labels = data.load_cifar10("train", folder)
    assert images.shape == (10, 3, 32, 32)
    assert labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    # the green plane of the second image of the third batch, row by row
    green = cifar_records(2)[1, 1 + 1024 : 1 + 2048].reshape(32, 32)
    assert np.array_equal(images[5, 1].numpy(), green)
    assert data.load_cifar10("test", folder)[1].tolist() == [5, 4]


def test_sets_are_found_in_order_and_guessed_folders_only_by_their_name(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match="FashionMNIST/raw") as error:
        data.find_fashion()
    assert "python -m studies.data fashion --download data" in str(error.value)
    write_fashion(machine / "work/datasets")  # might be MNIST: the names are the same
    with pytest.raises(FileNotFoundError):
        data.find_fashion()
    guessed = write_fashion(machine / "work/data/FashionMNIST/raw")
    assert data.find_fashion().resolve() == guessed
    named = write_fashion(machine / "named", packed=True)
    monkeypatch.setenv("GRAPNET_DATA", str(machine / "named"))
    assert data.find_fashion() == named
    asked = write_fashion(machine / "asked/fashion-mnist")
    assert data.find_fashion(machine / "asked") == asked
    with pytest.raises(FileNotFoundError):
        data.find_fashion(machine / "home")  # a folder that was asked for is the only one
    (named / "t10k-labels-idx1-ubyte.gz").unlink()
    assert data.find_fashion().resolve() == guessed


def test_squares_are_averaged_to_49_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (3, 28, 28), generator=generator, dtype=torch.uint8)
    rows = data.downsample(x)
    assert (rows.shape, rows.dtype) == ((3, 49), torch.float32)
    assert torch.allclose(rows, avg_pool2d(x[:, None].float() / 255, 4).flatten(1))
    assert torch.equal(data.downsample(x, 1), x.float().flatten(1) / 255)


def test_standardising_uses_the_training_rows_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    train = torch.randn(50, 3, generator=generator, dtype=torch.float64) * 4 + 7
    test = torch.randn(20, 3, generator=generator, dtype=torch.float64) * 4 + 7
    train[:, 2] = test[:, 2] = 5.0
    rows, others = data.standardise(train, test)
    assert torch.allclose(rows.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    expected = (test[:, :2] - train[:, :2].mean(0)) / train[:, :2].std(0, correction=0)
    assert torch.allclose(others[:, :2], expected)
    assert (others[:, 2] == 0).all()


def test_features_are_zero_plus_scale_times_q(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    arrays = {
        "q_train": np.array([[0, 255], [10, 20], [1, 2]], np.uint8),
        "q_test": np.array([[3, 4]], np.uint8),
        "scale": np.array([0.5, 0.25], np.float32),
        "zero": np.array([0.0, 2.0], np.float32),
        "y_train": np.array([0, 1, 1], np.uint8),
        "y_test": np.array([1], np.uint8),
    }
    np.savez_compressed(path, **arrays)
    features = data.load_features(path)
    assert features.x_train.tolist() == [[0.0, 65.75], [5.0, 7.0], [0.5, 2.5]]
    assert features.x_test.tolist() == [[1.5, 3.0]]
    assert features.x_train.dtype == torch.float32
    assert (features.y_train.tolist(), features.y_test.tolist()) == ([0, 1, 1], [1])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert features.about == f"some.npz: 3 + 1 rows of 2 features in 8 bits, SHA-256 {digest}"
    np.savez(path, **{**arrays, "zero": np.array([{}, {}], object)})
    with pytest.raises(ValueError, match="pickle"):
        data.load_features(path)


def test_saved_features_return_within_half_a_step(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x_train = torch.randn(40, 5, generator=generator) * torch.arange(5) - 3
    x_test = torch.randn(20, 5, generator=generator) * torch.arange(5) - 3
    train = (x_train, torch.arange(40) % 10)
    test = (x_test, torch.arange(20) % 10)
    path = tmp_path / "mine.npz"
    data.save_features(path, train, test, "made up")
    features = data.load_features(path)
    both = torch.cat([x_train, x_test])
    step = (both.amax(0) - both.amin(0)) / 255
    assert ((features.x_train - x_train).abs() <= step / 2 + 1e-5).all()
    assert ((features.x_test - x_test).abs() <= step / 2 + 1e-5).all()
    assert (features.x_train[:, 0] == -3).all()  # a constant coordinate is exact
    assert torch.equal(features.y_test, test[1])
    assert features.about.startswith("made up; mine.npz: 40 + 20 rows of 5 features")
    with pytest.raises(ValueError, match="finite"):
        data.save_features(path, (x_train * torch.inf, train[1]), test, "")
    assert [file.name for file in tmp_path.iterdir()] == ["mine.npz"]


def test_the_package_of_npm_becomes_the_binary_version(machine, capsys):
    package = machine / "package"
    package.mkdir()
    draw = np.random.default_rng(0)
    images = {}
    for part, names in data.CIFAR_FILES.items():
        labels = draw.integers(0, 10, 2 * len(names))
        (package / f"{part}_lables.json").write_text(str(labels.tolist()))
        pixels = draw.integers(0, 256, (2 * len(names), 32, 32, 3), dtype=np.uint8)
        for name, batch in zip(names, np.split(pixels, len(names)), strict=True):
            # A line of pixels is an image.
            Image.fromarray(batch.reshape(2, 1024, 3)).save((package / name).with_suffix(".png"))
        images[part] = (pixels, labels)
    given = ["cifar10", "--package", str(package), "--download", str(machine / "data")]
    assert data.main(given) == 0
    folder = machine / "data" / "cifar-10-batches-bin"
    assert capsys.readouterr().out == f"{folder}\n"
    for part, (pixels, labels) in images.items():
        x, y = data.load_cifar10(part, folder)
        assert torch.equal(x, torch.from_numpy(pixels).permute(0, 3, 1, 2))
        assert y.tolist() == labels.tolist()
    with pytest.raises(SystemExit):
        data.main(["fashion", "--package", str(package), "--download", "data"])
