"""Training a ResNet-18 on CIFAR-10 for the studies that change it on the way."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import BasicBlock

from .data import Images, cifar10_images
from .statistics import Paired, Summary, paired, summary

MEAN = (0.4914, 0.4822, 0.4465)  # of the training pixels in [0, 1], by colour
SPREAD = (0.2470, 0.2435, 0.2616)
BORDER = 4  # pixels that a random crop may move an image by
SIDE = 32  # pixels
JUDGED = 2000  # images that are judged at a time


@dataclass(frozen=True)
class Training:
    """What all runs of a study have in common; its settings add what it compares."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    data: str = "cifar10"  # or "made-up"
    device: str = "cuda"
    precision: Literal["bfloat16", "float32"] = "bfloat16"  # of convolutions; Parameters: float32
    width: int = 32  # channels of the first of four stages, each twice as wide as the one before
    epochs: int = 12
    batch: int = 512
    held_out: int = 5000  # training images that settings are chosen on
    warm_up: float = 0.2  # share of the steps in which the learning rate rises; then a cosine


@dataclass(frozen=True)
class Descent:
    """An optimizer, and what a study compares with it."""

    name: Literal["SGD", "AdamW"]
    rates: tuple[float, ...]  # the largest learning rate of a run, to choose from
    decay: float  # of the weights
    # which share of the multiply-adds pruning leaves, and in how many cuts
    cuts: tuple[tuple[float, int], ...] = ()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns one over all Parameters; the loop sets its learning rate at every step."""
        if self.name == "AdamW":
            return torch.optim.AdamW(model.parameters(), weight_decay=self.decay)
        return torch.optim.SGD(
            model.parameters(), lr=0.0, momentum=0.9, nesterov=True, weight_decay=self.decay
        )


def trained(
    settings: Training,
    widths: Sequence[int],
    learner_of: Callable[[nn.Sequential, int], "Learner"],
    seed: int,
    rate: float,
    train: "Pixels",
    judged: "Pixels",
) -> dict[str, Any]:
    """Trains one net and returns its accuracy after every epoch, its size and the time it took.

    Args:
        settings: of the study.
        widths: of the four stages at the start.
        learner_of: returns what trains a model in a number of steps.
        seed: of the first weights and of the batches.
        rate: the largest learning rate.
        train: the images to learn from.
        judged: the images that the accuracy is measured on.
    """
    device = torch.device(settings.device)
    per_epoch = len(train.labels) // settings.batch
    steps = settings.epochs * per_epoch
    torch.manual_seed(seed)
    model = resnet18(widths).to(device)
    learner = learner_of(model, steps)
    generator = torch.Generator(device).manual_seed(seed)
    curve = []
    losses = []
    cutting = 0.0
    start = _now(device)
    step = 0
    for _ in range(settings.epochs):
        model.train()
        total = torch.zeros((), device=device)
        order = torch.randperm(len(train.labels), generator=generator, device=device)
        for number in range(per_epoch):
            if learner.cuts_at(step):
                before = _now(device)
                learner.cut(step)
                cutting += _now(device) - before
            for group in learner.optimizer.param_groups:
                group["lr"] = rate * warmth(step / steps, settings.warm_up)
            at = order[number * settings.batch : (number + 1) * settings.batch]
            x = train.cropped(at, generator)
            with _precision(settings):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), train.labels[at])
            learner.optimizer.zero_grad()
            loss.backward()
            learner.optimizer.step()
            learner.after(step)
            total += loss.detach()
            step += 1
        losses.append(round(float(total) / per_epoch, 4))
        curve.append(accuracy(settings, model, judged))
    seconds = _now(device) - start
    dense = macs_of(shape(settings.width, 0.0))
    return {
        "accuracy": curve[-1],
        "curve": curve,
        "loss": losses,
        "macs": round(macs(model) / dense, 5),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "channels": [part.out_channels for part in model.modules() if isinstance(part, nn.Conv2d)],
        "seconds": round(seconds, 2),
        "cut_seconds": round(cutting, 3),
    } | learner.about()


def warmth(progress: float, warm_up: float) -> float:
    """Returns the learning rate as a share of the largest: a line up, then a cosine to 0.

    Examples:
        >>> [round(warmth(progress, 0.2), 2) for progress in (0.0, 0.1, 0.2, 0.6, 1.0)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if progress < warm_up:
        return progress / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (progress - warm_up) / (1 - warm_up))


class Learner:
    """A model that trains as it is, and its optimizer; further ones change the model."""

    def __init__(self, model: nn.Module, descent: Descent) -> None:
        self.model = model
        self.descent = descent
        self.optimizer = descent.optimizer(model)

    def cuts_at(self, step: int) -> bool:
        """Returns whether `cut` is called before a step."""
        del step
        return False

    def cut(self, step: int) -> None:
        """Removes channels."""

    def after(self, step: int) -> None:
        """Changes the wiring after a step."""

    def about(self) -> dict[str, Any]:
        """Returns further numbers of the result."""
        return {}


def shape(width: int, ratio: float) -> list[int]:
    """Returns the widths of the four stages after Torch-Pruning has removed a share of each.

    Examples:
        >>> shape(32, 0.0), shape(32, 0.5)
        ([32, 64, 128, 256], [16, 32, 64, 128])
    """
    return [int(width * 2**stage * (1 - ratio)) for stage in range(4)]


def resnet18(widths: Sequence[int]) -> nn.Sequential:
    """Returns ResNet-18 for images of 32×32, with stages of these widths."""
    first, *_, last = widths
    parts: list[nn.Module] = [nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first)]
    parts.append(nn.ReLU())
    inputs = first
    for stage, width in enumerate(widths):
        for block in range(2):
            stride = 2 if stage and block == 0 else 1
            parts.append(BasicBlock(inputs, width, stride))
            inputs = width
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10)]
    return nn.Sequential(*parts)


def macs(model: nn.Sequential) -> int:
    """Returns the multiply-adds of convolutions and of the head for one image."""
    total = 0
    side = SIDE
    for part in model:
        if isinstance(part, BasicBlock):
            side //= part.conv1.stride[0]
        for layer in part.modules():
            if isinstance(layer, nn.Conv2d):
                total += side**2 * layer.weight.numel()
            elif isinstance(layer, nn.Linear):
                total += layer.weight.numel()
    return total


def macs_of(widths: Sequence[int]) -> int:
    """Returns those of a net with stages of these widths."""
    with torch.device("meta"):
        return macs(resnet18(widths))


@dataclass(frozen=True, eq=False)
class Pixels:
    """Images with a reflected border, and their classes."""

    bordered: Tensor  # [n, 3, 40, 40] uint8
    labels: Tensor  # [n] int64

    def cropped(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Returns images moved and mirrored at random, [batch, 3, 32, 32]."""
        device = rows.device
        count = len(rows)
        at = torch.arange(SIDE, device=device)
        moved = torch.randint(2 * BORDER + 1, (2, count, 1), generator=generator, device=device)
        mirrored = torch.rand(count, 1, generator=generator, device=device) < 0.5
        down = moved[0] + at  # [batch, 32]
        across = moved[1] + torch.where(mirrored, SIDE - 1 - at, at)
        colour = torch.arange(3, device=device)
        found = self.bordered[
            rows[:, None, None, None],
            colour[None, :, None, None],
            down[:, None, :, None],
            across[:, None, None, :],
        ]
        return _normalised(found)

    def plain(self, rows: slice) -> Tensor:
        """Returns images as they are, [batch, 3, 32, 32]."""
        inside = slice(BORDER, BORDER + SIDE)
        return _normalised(self.bordered[rows, :, inside, inside])


def _normalised(pixels: Tensor) -> Tensor:
    mean = torch.tensor(MEAN, device=pixels.device)[:, None, None]
    deviation = torch.tensor(SPREAD, device=pixels.device)[:, None, None]
    found = (pixels.float() / 255 - mean) / deviation
    if not found.is_cuda:
        # On CPUs without AVX-512, torch 2.13 writes out of bounds in the backward pass of
        # pointwise convolutions with strides, an odd number of channels and this layout.
        return found
    return found.contiguous(memory_format=torch.channels_last)


@functools.cache
def images_on(data: str, device: str) -> tuple[Pixels, Pixels]:
    """Returns the training and the test images on the device; a process reads them once."""
    train, test = cifar10_images(data)
    return _bordered(train, device), _bordered(test, device)


def _bordered(images: Images, device: str) -> Pixels:
    pixels, labels = images
    at = torch.arange(-BORDER, SIDE + BORDER).abs()
    at = torch.where(at >= SIDE, 2 * (SIDE - 1) - at, at)
    bordered = pixels.to(device)[:, :, at.to(device)][:, :, :, at.to(device)]
    return Pixels(bordered, labels.to(device))


def split(train: Pixels, held_out: int, seed: int) -> tuple[Pixels, Pixels]:
    """Returns training images without some, and those."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train.labels), generator=generator).to(train.labels.device)
    rest = order[held_out:]
    held = order[:held_out]
    return (
        Pixels(train.bordered[rest], train.labels[rest]),
        Pixels(train.bordered[held], train.labels[held]),
    )


@torch.no_grad()
def accuracy(settings: Training, model: nn.Module, images: Pixels) -> float:
    """Returns which percentage of the images is classified right, in evaluation mode."""
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=images.labels.device)
    for start in range(0, len(images.labels), JUDGED):
        rows = slice(start, start + JUDGED)
        with _precision(settings):
            logits = model(images.plain(rows))
        right += (logits.argmax(1) == images.labels[rows]).sum()
    return round(100 * int(right) / len(images.labels), 4)


def about_run(settings: Training, rate: float) -> dict[str, Any]:
    """Returns the learning rate of a run and the device that it ran on."""
    device = settings.device
    if device != "cpu":
        device = torch.cuda.get_device_name(device)
    return {"rate": rate, "device": device}


def example(model: nn.Module) -> Tensor:
    """Returns an input for a model, on its device."""
    like = next(model.parameters())
    return like.new_zeros(1, 3, SIDE, SIDE)


def _precision(settings: Training) -> torch.autocast:
    enabled = settings.precision == "bfloat16"
    return torch.autocast(settings.device.partition(":")[0], torch.bfloat16, enabled=enabled)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def summary_of(values: Sequence[float]) -> Summary:
    """Returns `summary`; a single value has no deviation."""
    if len(values) == 1:
        return Summary(values[0], 0.0, 1)
    return summary(values)


def paired_of(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Returns `paired`; a single difference has no deviation and shows nothing."""
    if len(a) == 1:
        difference = a[0] - b[0]
        return Paired(difference, 0.0, difference, difference, 1.0, 1)
    return paired(a, b)
