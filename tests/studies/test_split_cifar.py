"""The Split CIFAR-10 study runs without its features, has the paper's sizes, and names what it
missed.
"""

import copy

import pytest
import torch

from studies.data import save_features
from studies.split_cifar import FAST, HEADS, features, missed


@pytest.fixture
def reached(result) -> dict:
    """A result that looks like a full run in which every bar is reached."""
    found = copy.deepcopy(result)
    rows = found["summary"]["full"]
    rows[FAST.heads[0].name]["seen_class"]["mean"] = 82.5
    for row in rows.values():
        if row["ahead"]:
            row["ahead"] |= {"mean": 1.0, "p": 1e-4}
    return found


def test_the_heads_have_the_parameters_of_the_paper(result):
    for stream in ("few", "full"):
        rows = result["summary"][stream]
        assert {name: rows[name]["parameters"] for name in HEADS} == {
            "linear ER": 5_130,
            "MLP-256 ER": 133_898,
            "GrapNet frozen": 124_570,
            "GrapNet plastic": 124_570,
        }


def test_a_fast_run_has_the_controls(result):
    rows = result["summary"]["full"]
    assert next(iter(rows)) == FAST.heads[0].name
    for words in (
        "ridge regression on the inputs",
        "streaming LDA on the inputs",
        "nearest class mean on the inputs",
    ):
        assert rows[words]["images"] == 0
    tuned = {name: row for name, row in rows.items() if "tuned" in name}
    assert len(tuned) == 7
    assert all(row["images"] > 0 and row["chosen"] for row in tuned.values())
    (equal,) = (row for name, row in tuned.items() if "as many bytes" in name)
    assert 0 <= rows[FAST.heads[0].name]["bytes"] - equal["bytes"] < 512 * 4 + 8


def test_features_come_from_the_environment_and_are_named(tmp_path, monkeypatch):
    train, test, _ = features("made-up", 0)
    path = tmp_path / "some.npz"
    save_features(path, train[:2], test[:2], "made here")
    monkeypatch.setenv("GRAPNET_CIFAR_FEATURES", str(path))
    found, _, about = features("", 0)
    assert torch.allclose(found.x, train.x, atol=0.03)
    assert about.startswith("made here; some.npz")
    monkeypatch.delenv("GRAPNET_CIFAR_FEATURES")
    with pytest.raises(FileNotFoundError, match="GRAPNET_CIFAR_FEATURES"):
        features("", 0)


@pytest.mark.parametrize(
    ("row", "key", "value", "named"),
    [
        (FAST.heads[0].name, "seen_class", {"mean": 82.49}, "the bar is 82.50"),
        ("GrapNet plastic", "ahead", {"mean": -1.0, "p": 1e-9}, "GrapNet plastic is -1.00 below"),
        ("linear ER", "ahead", {"mean": 1.0, "p": 2e-3}, "p = 2.0e-03"),
        ("GrapNet frozen", "parameters", 10, "GrapNet frozen has 10 parameters"),
    ],
)
def test_each_missed_bar_is_named(reached, row, key, value, named):
    assert missed(reached) == []
    reached["summary"]["full"][row][key] = value
    (line,) = missed(reached)
    assert named in line
