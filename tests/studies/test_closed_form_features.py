"""The study of other seeds and features: seeds are none that were reported before, and encoders
never see the images of the stream.
"""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grapnet.continual import Batch
from studies import closed_form, closed_form_features, closed_form_further, split_cifar
from studies.closed_form_features import FAST, FEATURES, Settings, missed, one_seed
from studies.data import save_features


def test_a_fast_run_has_both_heads_and_every_kind_of_features_that_needs_no_file(result):
    found = result["summary"]
    assert list(found["heads"]) == ["few", "full"]
    assert list(found["features"]) == [name for name in FEATURES if name != "CIFAR-10"]
    for one in found["features"].values():
        assert 20 < one["nodes"][0] <= 100
        assert one["nodes − ridge"]["mean"] == pytest.approx(one["nodes"][0] - one["ridge"][0])


def test_its_seeds_are_none_of_those_that_were_reported() -> None:
    others = {*closed_form.Settings().seeds, *closed_form_further.Settings().seeds}
    others |= {*split_cifar.Settings().seeds, *range(20)}
    assert not others & set(Settings().seeds)
    assert closed_form.Settings().few_heads[0] == Settings().few_head
    assert closed_form.Settings().full_heads[0] == Settings().full_head


def test_an_encoder_is_trained_on_images_that_the_stream_does_not_show() -> None:
    train, test = _made_up()
    generator = torch.Generator().manual_seed(0)
    labels = train.y[torch.randperm(len(train.y), generator=generator)]
    plain, _ = closed_form_features._learned(FAST, train, test, 4, 0)
    half = len(train.y) // 2
    assert (len(plain.y), plain.x.shape[1]) == (half, 4)
    # Other labels of the images that the stream shows leave the features as they are.
    torch.manual_seed(0)
    shown = torch.randperm(len(train.y)) % 2 == 1
    changed = torch.where(shown, labels, train.y)
    again, _ = closed_form_features._learned(FAST, Batch(train.x, changed), test, 4, 0)
    assert torch.equal(again.x, plain.x)
    # Other labels of the others change them.
    changed = torch.where(shown, train.y, labels)
    other, _ = closed_form_features._learned(FAST, Batch(train.x, changed), test, 4, 0)
    assert not torch.equal(other.x, plain.x)


def test_a_file_of_features_joins_the_others(tmp_path: Path, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(600) % 10
    x = torch.randn(600, 6, generator=generator) + y[:, None]
    path = tmp_path / "features.npz"
    save_features(path, (x[:500], y[:500]), (x[500:], y[500:]), "made up")
    monkeypatch.setenv(split_cifar.VARIABLE, str(path))
    found = one_seed(replace(FAST, features=""), 100)
    assert list(found["features"]) == list(FEATURES)
    monkeypatch.delenv(split_cifar.VARIABLE)
    closed_form_features._cifar.cache_clear()
    assert "CIFAR-10" not in closed_form_features._features(
        replace(FAST, features=""), *_made_up(), 100
    )


def _made_up() -> tuple[Batch, Batch]:
    train, test = closed_form_features.small_images("made-up")
    return Batch(*train), Batch(*test)


def test_a_kind_of_features_that_is_missing_is_named(result):
    assert missed(result) == []
    worse = copy.deepcopy(result)
    del worse["summary"]["features"]["digits"]
    (line,) = missed(worse)
    assert "digits" in line
