"""Precomputed features: zero + scale · q, checked before use."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grapnet.data import DataError, MissingDataError, load_features, save_features


def arrays() -> dict[str, Any]:
    return {
        "q_train": np.array([[0, 255], [10, 20], [1, 2]], np.uint8),
        "q_test": np.array([[3, 4]], np.uint8),
        "scale": np.array([0.5, 0.25], np.float32),
        "zero": np.array([0.0, 2.0], np.float32),
        "y_train": np.array([0, 1, 1], np.uint8),
        "y_test": np.array([1], np.uint8),
    }


def test_features_are_zero_plus_scale_times_q(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez_compressed(path, **arrays())
    features = load_features(str(path))
    assert features.x_train.tolist() == [[0.0, 65.75], [5.0, 7.0], [0.5, 2.5]]
    assert features.x_test.tolist() == [[1.5, 3.0]]
    assert features.x_train.dtype == features.x_test.dtype == torch.float32
    assert (features.y_train.tolist(), features.y_test.tolist()) == ([0, 1, 1], [1])
    assert features.y_train.dtype == features.y_test.dtype == torch.int64
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert features.about == f"some.npz: 3 + 1 rows of 2 features in 8 bits, SHA-256 {digest}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "lacks scale; it has q_train, q_test, zero, y_train, y_test"),
        ({"q_train": np.zeros((3, 2), np.float32)}, "q_train holds float32, not uint8"),
        ({"q_test": np.zeros((1, 3), np.uint8)}, "q_train has 2 features, q_test has 3"),
        ({"zero": np.zeros(3, np.float32)}, "zero has 3"),
        ({"zero": np.array([0, np.nan], np.float32)}, "finite"),
        ({"scale": np.array([1, -1], np.float32)}, "not negative"),
        ({"scale": np.ones((2, 1), np.float32)}, r"scale has shape \[2, 1\]"),
        ({"scale": np.array(["a", "b"])}, "scale holds <U1"),
        ({"y_train": np.zeros(4, np.uint8)}, "3 train rows for 4 labels"),
        ({"y_test": np.zeros(1, np.float32)}, "y_test holds float32, not whole numbers"),
        ({"y_test": np.array([-1])}, "negative label -1"),
        (
            {"q_test": np.zeros((0, 2), np.uint8), "y_test": np.zeros(0, np.uint8)},
            "q_test has shape",
        ),
        ({"zero": np.array([{}, {}], object)}, "cannot be read"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "some.npz"
    np.savez(
        path, **{name: array for name, array in {**arrays(), **change}.items() if array is not None}
    )
    with pytest.raises(DataError, match=message):
        load_features(path)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    with pytest.raises(MissingDataError, match="is not a file"):
        load_features(path)
    np.savez(path, **arrays())
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(bytes([0, 255, 10, 20, 1, 2]))] ^= 1
    for content in (b"", b"text", whole[:-30], bytes(damaged)):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            load_features(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"is not an \.npz"):
        load_features(tmp_path / "one.npy")


def test_saved_features_return_within_half_a_step(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x_train, x_test = (
        torch.randn(n, 5, generator=generator) * torch.arange(5) - 3 for n in (40, 20)
    )
    y_train, y_test = torch.arange(40) % 10, torch.arange(20) % 10
    path = tmp_path / "mine.npz"
    save_features(
        path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, about="made up"
    )
    features = load_features(path)
    both = torch.cat([x_train, x_test])
    step = (both.amax(0) - both.amin(0)) / 255
    assert ((features.x_train - x_train).abs() <= step / 2 + 1e-5).all()
    assert ((features.x_test - x_test).abs() <= step / 2 + 1e-5).all()
    assert (features.x_train[:, 0] == -3).all()  # a constant coordinate is exact
    assert torch.equal(features.y_train, y_train)
    assert torch.equal(features.y_test, y_test)
    assert features.about.startswith("made up; mine.npz: 40 + 20 rows of 5 features")
    assert [file.name for file in tmp_path.iterdir()] == ["mine.npz"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_test": torch.zeros(2, 4)}, "3 features, test rows 4"),
        ({"x_train": torch.full((4, 3), torch.inf)}, "finite"),
        ({"x_train": torch.zeros(4)}, "rows"),
        ({"y_train": torch.zeros(5, dtype=torch.int64)}, "4 train rows for 5 labels"),
        ({"y_train": torch.zeros(4)}, "whole numbers"),
    ],
)
def test_features_that_do_not_fit_are_not_written(
    tmp_path: Path, change: dict, message: str
) -> None:
    labels = {
        "y_train": torch.zeros(4, dtype=torch.int64),
        "y_test": torch.zeros(2, dtype=torch.int64),
    }
    rows = {"x_train": torch.zeros(4, 3), "x_test": torch.zeros(2, 3)}
    with pytest.raises(DataError, match=message):
        save_features(tmp_path / "mine.npz", **{**rows, **labels, **change}, about="")
    assert list(tmp_path.iterdir()) == []
