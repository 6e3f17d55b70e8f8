"""Features of CIFAR-10 from a ResNet-18 of one's own torchvision, in the file that the Split
CIFAR-10 study reads.

`python -m grapnet.studies.cifar_features --out FILE.npz` runs it over all images; interrupted, it
goes on where it stopped. Then `GRAPNET_CIFAR_FEATURES=FILE.npz python -m
grapnet.studies.split_cifar` uses the file.
"""

import argparse
import hashlib
import importlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import grapnet as gn
from grapnet._atomic import atomic_write
from grapnet.data import load_cifar10, save_features

MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, by colour
PART = 2000  # images that are kept together when the run is interrupted


@dataclass(frozen=True)
class How:
    """How images go through a network: see `extract`."""

    batch: int = 100
    size: int = 224
    device: str = "cpu"


class BackboneError(gn.GrapNetError, RuntimeError):
    """There is no network to take features from."""


def extract(
    backbone: nn.Module, images: Tensor, *, batch: int = 100, size: int = 224, device: str = "cpu"
) -> Tensor:
    """Returns what a network makes of images, [n, d] float32 on the CPU, with all its layers in
    evaluation mode.

    The network is moved to the device and stays there; its layers' modes are as before afterwards.

    Args:
        backbone: maps images [b, 3, size, size] to features [b, d].
        images: [n, 3, height, width] uint8.
        batch: images that it gets at a time.
        size: to which they are resized, bilinearly; then their colours are normalised as ImageNet
            models want them.
        device: where it runs.

    Raises:
        ValueError: the images, the numbers or the network's output have another form.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3 or not len(images):
        raise ValueError(
            f"images are uint8 [n, 3, height, width], got {images.dtype} {list(images.shape)}"
        )
    if batch < 1 or size < 1:
        raise ValueError(f"batch and size are at least 1, got {batch} and {size}")
    modes = {module: module.training for module in backbone.modules()}
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, SPREAD))
    backbone.to(device).eval()
    found = []
    try:
        with torch.inference_mode():
            for some in images.split(batch):
                pixels = interpolate(
                    some.to(device).float() / 255, (size, size), mode="bilinear", antialias=True
                )
                rows = backbone((pixels - mean) / std)
                if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != len(some):
                    form = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
                    raise ValueError(
                        f"the network gives {form} for {len(some)} images; [{len(some)}, d] is"
                        " expected"
                    )
                found.append(rows.float().cpu())
    finally:
        for module, mode in modes.items():
            module.training = mode
    return torch.cat(found).clone()  # a plain tensor, which may be trained on


def extract_in_parts(
    backbone: nn.Module,
    images: Tensor,
    folder: Path,
    how: How,
    *,
    part: int = PART,
    progress: Callable[[int, int, int], object] | None = None,
) -> Tensor:
    """Returns what `extract` does, and keeps every part in `folder`, so that the next call does not
    compute it again.

    Parts are told apart by network, images and size; a damaged one is computed again.

    Args:
        backbone: see `extract`.
        images: see `extract`.
        folder: of the parts; made when it is missing, and left for the caller to remove.
        how: see `extract`.
        part: images a file.
        progress: gets, after every part, how many images are done, how many there are, and how many
            were computed.
    """
    key = _fingerprint(backbone, images, how.size)
    found, done, computed = [], 0, 0
    for number, some in enumerate(images.split(part)):
        path = folder / f"{key}-{part}-{number}.npy"
        rows = _kept(path, len(some))
        if rows is None:
            rows = extract(backbone, some, **asdict(how))
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial:
                np.save(partial, rows.numpy())
            computed += len(some)
        found.append(rows)
        done += len(some)
        if progress is not None:
            progress(done, len(images), computed)
    return torch.cat(found)


def resnet18(weights: str) -> tuple[nn.Module, str]:
    """Returns the user's ResNet-18 up to its last layer but one, and a line on whose weights it
    has.

    Args:
        weights: a name that torchvision knows, such as DEFAULT, which it downloads; or the path of
            a state dict.

    Raises:
        BackboneError: torchvision is missing or broken, or the weights are not those of a
            ResNet-18.
    """
    models = _torchvision()
    version = importlib.import_module("torchvision").__version__
    try:
        if Path(weights).is_file():
            net = models.resnet18(weights=None)
            load_weights(net, Path(weights))
            whose = f"weights of the file {Path(weights).name}"
        else:
            net = models.resnet18(weights=weights)
            whose = f"weights {weights}"
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise BackboneError(
            f"{weights} is no file and no name of weights that torchvision can load: {reason}"
        ) from error
    net.fc = nn.Identity()  # what came before the classes is what we are after
    return (
        net,
        (
            f"ResNet-18 of torchvision {version}, {whose}, SHA-256 of its parameters"
            f" {_digest(net)[:16]}"
        ),
    )


def load_weights(net: nn.Module, path: Path) -> None:
    """Loads a state dict, which may lack the last layer, from a file of torch or safetensors; it
    runs nothing in it.

    Raises:
        BackboneError: the file cannot be read, or holds parameters of another network.
    """
    try:
        if path.suffix == ".safetensors":
            state = importlib.import_module("safetensors.torch").load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever they make of a file that is something else
        raise BackboneError(
            f"{path} is no state dict, such as torch.save(net.state_dict(), FILE) writes"
        ) from error
    try:
        missing, unexpected = net.load_state_dict(state, strict=False)
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise BackboneError(f"{path} is not of {type(net).__name__}: {reason[:300]}") from error
    wrong = [*(name for name in missing if not name.startswith("fc.")), *unexpected]
    if wrong:
        raise BackboneError(
            f"{path} is not of {type(net).__name__}: {len(wrong)} names differ, such as"
            f" {min(wrong)}"
        )


def write_features(
    path: Path,
    backbone: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    how: How,
    *,
    whose: str,
    part: int = PART,
) -> None:
    """Writes the features of training and test images in the form of `grapnet.data.load_features`.

    Finished parts lie in `FILE.npz.parts` until the file is written.

    Args:
        path: of the file.
        backbone: see `extract`.
        train: images and their labels.
        test: images and their labels.
        how: see `extract`.
        whose: one line on the network and its weights, which the file keeps.
        part: see `extract_in_parts`.
    """
    folder = path.with_name(f"{path.name}.parts")
    x_train, x_test = (
        extract_in_parts(backbone, images, folder, how, part=part, progress=_told(name))
        for name, images in (("train", train[0]), ("test", test[0]))
    )
    about = f"{whose}; {how.size} px, bilinear, colours normalised as ImageNet models want them"
    save_features(
        path, x_train=x_train, y_train=train[1], x_test=x_test, y_test=test[1], about=about
    )
    shutil.rmtree(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the features and returns the exit status: 0, or 2 when something that it needs is not
    there.
    """
    parser = argparse.ArgumentParser(
        prog="python -m grapnet.studies.cifar_features", description=__doc__
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.npz", help="write them there"
    )
    parser.add_argument(
        "--weights",
        default="DEFAULT",
        metavar="NAME|PATH",
        help="torchvision's name, or a state dict",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="where CIFAR-10 is, when it is not found by itself",
    )
    parser.add_argument("--device", default="cpu", help="of torch, such as cuda")
    parser.add_argument("--batch", type=int, default=100, metavar="N", help="images at a time")
    parser.add_argument(
        "--size", type=int, default=224, metavar="PIXELS", help="to which images are resized"
    )
    given = parser.parse_args(arguments)
    if given.out.suffix != ".npz" or not given.out.absolute().parent.is_dir():
        parser.error(f"{given.out} must end in .npz and lie in a folder that exists")
    try:
        backbone, whose = resnet18(given.weights)
        train, test = (load_cifar10(part, given.data) for part in ("train", "test"))
        write_features(
            given.out,
            backbone,
            train,
            test,
            How(given.batch, given.size, given.device),
            whose=whose,
        )
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # which the errors of grapnet.data are, too
        print(error, file=sys.stderr)
        return 2
    print(given.out)
    return 0


def _torchvision() -> ModuleType:
    fits = (
        f"Install the torchvision that goes with torch {torch.__version__}, or take features that"
        " somebody made: "
    )
    fits += "set GRAPNET_CIFAR_FEATURES to their file"
    try:
        importlib.import_module("torchvision")
        return importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        if error.name == "torchvision":
            raise BackboneError(
                f"this needs torchvision, which is not installed. {fits}"
            ) from error
        broken = error
    except (
        Exception
    ) as error:  # such as a RuntimeError of a torchvision that was built for another torch
        broken = error
    reason = " ".join(f"{type(broken).__name__}: {broken}".split())
    raise BackboneError(
        f"torchvision is installed and cannot be imported ({reason}). {fits}"
    ) from broken


def _told(name: str) -> Callable[[int, int, int], None]:
    start = time.perf_counter()

    def progress(done: int, of: int, computed: int) -> None:
        left = (of - done) * (time.perf_counter() - start) / computed if computed else 0.0
        words = f"about {left:,.0f} s left" if computed else "found from an earlier run"
        print(f"{name}: {done:,} of {of:,} images, {words}", file=sys.stderr, flush=True)

    return progress


def _kept(path: Path, count: int) -> Tensor | None:
    try:
        rows = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = rows.ndim == 2 and len(rows) == count and rows.dtype == np.float32
    return torch.from_numpy(rows) if whole else None


def _fingerprint(backbone: nn.Module, images: Tensor, size: int) -> str:
    known = hashlib.sha256(f"{backbone} {size} {list(images.shape)} {_digest(backbone)}".encode())
    known.update(images.contiguous().cpu().numpy().data)
    return known.hexdigest()[:16]


def _digest(net: nn.Module) -> str:
    known = hashlib.sha256()
    for name, value in net.state_dict().items():
        known.update(name.encode())
        known.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return known.hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
