"""Extraction: what a network makes of resized, normalised images, in parts or not, and what stops
it.
"""

import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import interpolate

from grapnet.data import load_features
from grapnet.studies.cifar_features import (
    BackboneError,
    How,
    extract,
    extract_in_parts,
    load_weights,
    main,
    resnet18,
    write_features,
)

HOW = How(batch=4, size=12)


class Counting(nn.Module):
    """A small network whose batch norm and dropout would show if it ran in training mode; it counts
    its images.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(3, 5, 3)
            self.fc = nn.Linear(5, 2)
        self.norm, self.drop, self.seen = nn.BatchNorm2d(5), nn.Dropout(0.5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.drop(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(
        256, (10, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )


def expected(net: nn.Module, images: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the features of a network in evaluation mode, all images at once."""
    x = interpolate(images / 255, (size, size), mode="bilinear", antialias=True)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    net.eval()
    with torch.no_grad():
        return net((x - mean[:, None, None]) / std[:, None, None])


def test_features_are_what_the_network_makes_of_resized_normalised_images(images):
    found = extract(Counting(), images, batch=4, size=12)
    assert (found.shape, found.dtype, found.is_inference()) == ((10, 5), torch.float32, False)
    torch.testing.assert_close(found, expected(Counting(), images, 12))
    assert not torch.allclose(found, expected(Counting(), images, 8))  # the size matters
    # the batch does not
    torch.testing.assert_close(found, extract(Counting(), images, batch=10, size=12))


def test_the_network_keeps_its_modes_and_statistics(images):
    net = Counting()
    net.train()
    net.norm.eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    extract(net, images, size=12)
    assert (net.training, net.drop.training, net.norm.training) == (True, True, False)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"images": torch.zeros(2, 3, 8, 8)},
            r"images are uint8 .*, got torch.float32 \[2, 3, 8, 8\]",
        ),
        ({"images": torch.zeros(2, 8, 8, 3, dtype=torch.uint8)}, r"got torch.uint8 \[2, 8, 8, 3\]"),
        ({"images": torch.zeros(0, 3, 8, 8, dtype=torch.uint8)}, r"\[0, 3, 8, 8\]"),
        ({"batch": 0}, "at least 1, got 0 and 12"),
        ({"size": 0}, "at least 1, got 4 and 0"),
        (
            {"backbone": nn.Conv2d(3, 5, 3)},
            r"the network gives \[4, 5, 10, 10\] for 4 images; \[4, d\] is expected",
        ),
    ],
)
def test_other_forms_are_refused(images, changed, named):
    given = {"backbone": Counting(), "images": images, "batch": 4, "size": 12, **changed}
    with pytest.raises(ValueError, match=named):
        extract(given.pop("backbone"), given.pop("images"), **given)


def test_a_resumed_run_gives_what_an_uninterrupted_one_gives(images, tmp_path):
    whole = extract_in_parts(Counting(), images, tmp_path / "whole", HOW, part=3)
    torch.testing.assert_close(whole, extract(Counting(), images, batch=4, size=12))

    def stop(done: int, of: int, computed: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract_in_parts(Counting(), images, tmp_path / "parts", HOW, part=3, progress=stop)
    net, told = Counting(), []
    resumed = extract_in_parts(
        net, images, tmp_path / "parts", HOW, part=3, progress=lambda *of: told.append(of)
    )
    assert torch.equal(resumed, whole)
    assert net.seen == 4  # of ten: six were there
    assert told == [(3, 10, 0), (6, 10, 0), (9, 10, 3), (10, 10, 4)]


def test_parts_of_another_network_other_images_or_another_size_are_not_taken(images, tmp_path):
    extract_in_parts(Counting(), images, tmp_path, HOW, part=5)
    for net, pixels, size in (
        (Counting(1), images, 12),
        (Counting(), images.flip(0), 12),
        (Counting(), images, 10),
    ):
        found = extract_in_parts(net, pixels, tmp_path, How(batch=4, size=size), part=5)
        assert net.seen == 10
        torch.testing.assert_close(found, expected(net, pixels, size))


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:90], lambda whole: b"", lambda whole: whole[:-8]]
)
def test_a_damaged_part_is_computed_again(images, tmp_path, damage):
    whole = extract_in_parts(Counting(), images, tmp_path, HOW, part=5)
    first = sorted(tmp_path.iterdir())[0]
    first.write_bytes(damage(first.read_bytes()))
    net = Counting()
    assert torch.equal(extract_in_parts(net, images, tmp_path, HOW, part=5), whole)
    assert net.seen == 5


def test_the_file_is_one_that_the_study_reads(images, tmp_path, capsys):
    path, labels = tmp_path / "features.npz", torch.arange(10)
    write_features(
        path,
        Counting(),
        (images, labels),
        (images[:4], labels[:4]),
        HOW,
        whose="a small network",
        part=4,
    )
    found = load_features(path)
    x = expected(Counting(), images, 12)
    step = (x.max(0).values - x.min(0).values) / 255
    assert bool(((found.x_train - x).abs() <= step / 2 + 1e-6).all())
    assert found.x_test.shape == (4, 5)
    assert found.y_train.tolist() == list(range(10))
    assert "a small network; 12 px" in found.about
    assert [path.name for path in tmp_path.iterdir()] == ["features.npz"]  # the parts are gone
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" images")[0] for line in lines] == [
        "train: 4 of 10",
        "train: 8 of 10",
        "train: 10 of 10",
        "test: 4 of 4",
    ]
    assert all(line.endswith(" s left") for line in lines)


def test_weights_come_from_a_file_which_may_lack_the_last_layer(tmp_path):
    source, net = Counting(1), Counting(0)
    state = {
        name: value for name, value in source.state_dict().items() if not name.startswith("fc.")
    }
    torch.save(state, tmp_path / "weights.pt")
    load_weights(net, tmp_path / "weights.pt")
    assert torch.equal(net.conv.weight, source.conv.weight)
    assert torch.equal(net.fc.weight, Counting(0).fc.weight)
    torch.save({**state, "conv2.weight": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(
        BackboneError, match=r"other\.pt is not of Counting: 1 names differ, such as conv2\.weight"
    ):
        load_weights(net, tmp_path / "other.pt")
    torch.save({**state, "conv.weight": torch.zeros(1)}, tmp_path / "wide.pt")
    with pytest.raises(
        BackboneError, match=r"wide\.pt is not of Counting: .* size mismatch for conv\.weight"
    ):
        load_weights(net, tmp_path / "wide.pt")
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    load_weights(net, tmp_path / "weights.safetensors")
    assert torch.equal(net.fc.weight, source.fc.weight)
    (tmp_path / "torn.pt").write_bytes((tmp_path / "weights.pt").read_bytes()[:300])
    with pytest.raises(BackboneError, match=r"torn\.pt is no state dict, such as torch\.save"):
        load_weights(net, tmp_path / "torn.pt")


def test_without_torchvision_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as where it is not installed
    assert main(["--out", str(tmp_path / "features.npz")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "this needs torchvision, which is not installed. Install the torchvision that goes with"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (
            "raise RuntimeError('operator torchvision::nms\\ndoes not exist')",
            "RuntimeError: operator torchvision::nms does",
        ),
        (
            "import a_part_that_nobody_has",
            "ModuleNotFoundError: No module named 'a_part_that_nobody_has'",
        ),
    ],
)
def test_a_torchvision_that_does_not_import_is_reported(
    tmp_path, monkeypatch, capsys, content, named
):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    assert main(["--out", str(tmp_path / "features.npz")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"torchvision is installed and cannot be imported ({named}")
    with pytest.raises(BackboneError, match="Install the torchvision that goes with torch"):
        resnet18("DEFAULT")


@pytest.mark.parametrize("out", ["features.pt", "missing/features.npz"])
def test_a_place_that_cannot_be_written_is_refused_first(tmp_path, capsys, out):
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path / out)])
    assert "must end in .npz and lie in a folder that exists" in capsys.readouterr().err
