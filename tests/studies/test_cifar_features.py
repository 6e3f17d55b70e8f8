"""Features of images: computed as an ImageNet model expects, part by part, and not twice."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from studies import cifar_features
from studies.cifar_features import How, extract, weights_digest, write_features
from studies.data import load_features


class Counting(nn.Module):
    """Three features an image, and how many images came by."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x.mean((2, 3)) * self.scale


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return x, torch.arange(count) % 10


def test_an_interrupted_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar_features, "PART", 4)
    train = images(10, 0)
    test = images(4, 1)
    path = tmp_path / "features.npz"

    class Interrupted(Counting):
        def forward(self, x: Tensor) -> Tensor:
            if self.seen >= 8:
                raise KeyboardInterrupt
            return super().forward(x)

    with pytest.raises(KeyboardInterrupt):
        write_features(path, Interrupted(), train, test, How(size=32), source="counting")
    assert not path.exists()
    network = Counting()
    write_features(path, network, train, test, How(size=32), source="counting")
    assert network.seen == 14 - 8
    found = load_features(path)
    assert found.about.startswith("counting; 32 px, bilinear")
    expected = extract(Counting(), train[0], How(size=32))
    assert np.allclose(found.x_train, expected, atol=0.01)
    with torch.no_grad():
        network.scale.mul_(2)
    network.seen = 0
    write_features(path, network, train, test, How(size=32), source="other weights")
    assert network.seen == 14
    assert weights_digest(network) != weights_digest(Counting())
