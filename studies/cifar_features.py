"""Features of CIFAR-10 from torchvision's ResNet-18, in the file that `split_cifar` reads.

`python -m studies.cifar_features --out FILE.npz` runs it over all images; interrupted, it goes on
where it stopped. Then set `GRAPNET_CIFAR_FEATURES=FILE.npz` and run the study.
"""

import argparse
import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from tqdm import tqdm

from .data import Images, load_cifar10, save_features

MEAN = (0.485, 0.456, 0.406)  # of ImageNet's pixels, by colour
SPREAD = (0.229, 0.224, 0.225)
PART = 2000  # images that are cached together


@dataclass(frozen=True)
class How:
    """How images go through a network."""

    batch: int = 100  # images at a time
    size: int = 224  # pixels to which they are resized, bilinearly
    device: str = "cpu"


def extract(backbone: nn.Module, images: Tensor, how: How) -> Tensor:
    """Returns what a network computes from images, [n, d] float32 on the CPU.

    The network is moved to the device and put into evaluation mode.

    Args:
        backbone: maps images [b, 3, size, size], normalised as ImageNet models expect, to [b, d].
        images: [n, 3, height, width] uint8.
        how: batch, size and device.
    """
    mean = torch.tensor(MEAN, device=how.device).view(3, 1, 1)
    spread = torch.tensor(SPREAD, device=how.device).view(3, 1, 1)
    backbone.to(how.device).eval()
    found = []
    with torch.no_grad():
        for some in images.split(how.batch):
            pixels = some.to(how.device).float() / 255
            resized = interpolate(pixels, (how.size, how.size), mode="bilinear", antialias=True)
            found.append(backbone((resized - mean) / spread).float().cpu())
    return torch.cat(found)


def write_features(
    path: Path, backbone: nn.Module, train: Images, test: Images, how: How, *, source: str
) -> None:
    """Writes the features of training and test images for `studies.data.load_features`.

    Finished parts are cached in `FILE.npz.parts`, which may be removed afterwards.

    Args:
        path: of the file.
        backbone: see `extract`.
        train: images and their classes.
        test: images and their classes.
        how: see `extract`.
        source: one line on the network and its weights, which the file keeps.
    """
    memory = joblib.Memory(path.with_name(f"{path.name}.parts"), verbose=0)
    # Parts are distinguished by the network's weights, the images and their size.
    cached: Any = memory.cache(_part, ignore=["backbone", "how"])
    digest = weights_digest(backbone)
    rows = []
    for images, _ in (train, test):
        parts = [
            cached(backbone, how, digest, how.size, part.numpy())
            for part in tqdm(images.split(PART), unit_scale=PART, unit="images")
        ]
        rows.append(torch.from_numpy(np.concatenate(parts)))
    about = f"{source}; {how.size} px, bilinear, colours normalised as ImageNet models want them"
    save_features(path, (rows[0], train[1]), (rows[1], test[1]), about)


def _part(backbone: nn.Module, how: How, digest: str, size: int, images: np.ndarray) -> np.ndarray:
    return extract(backbone, torch.from_numpy(images), how).numpy()


def resnet18(weights: str) -> tuple[nn.Module, str]:
    """Returns torchvision's ResNet-18 without its last layer, and a line on its weights.

    Args:
        weights: a name that torchvision knows, such as DEFAULT, which it downloads; or the path of
            a state dict, which is read without running anything in it.
    """
    models = importlib.import_module("torchvision.models")
    version = importlib.import_module("torchvision").__version__
    if Path(weights).is_file():
        net = models.resnet18(weights=None)
        net.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        source = f"weights of the file {Path(weights).name}"
    else:
        net = models.resnet18(weights=weights)
        source = f"weights {weights}"
    net.fc = nn.Identity()
    digest = weights_digest(net)[:16]
    return net, f"ResNet-18 of torchvision {version}, {source}, SHA-256 of its parameters {digest}"


def weights_digest(net: nn.Module) -> str:
    """Returns the SHA-256 of the state dict of a network."""
    known = hashlib.sha256()
    for name, value in net.state_dict().items():
        known.update(name.encode())
        known.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return known.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the features."""
    parser = argparse.ArgumentParser(prog="python -m studies.cifar_features", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="the file")
    parser.add_argument(
        "--weights", default="DEFAULT", metavar="NAME|PATH", help="torchvision's, or a state dict"
    )
    parser.add_argument("--data", metavar="FOLDER", help="where CIFAR-10 is")
    parser.add_argument("--device", default="cpu", help="of torch, such as cuda")
    parser.add_argument("--batch", type=int, default=100, metavar="N", help="images at a time")
    parser.add_argument("--size", type=int, default=224, metavar="PIXELS", help="of the images")
    given = parser.parse_args(arguments)
    train = load_cifar10("train", given.data)
    test = load_cifar10("test", given.data)
    backbone, source = resnet18(given.weights)
    how = How(given.batch, given.size, given.device)
    write_features(given.out, backbone, train, test, how, source=source)
    print(given.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
