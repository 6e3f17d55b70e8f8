"""Small models with the structure of real ones, on which spaces are found and edited.

`MODELS` holds what must be editable, `REFUSED` what must be refused somewhere. A case is built anew
at each call, always with the same weights. Sizes differ from role to role wherever the structure
allows, so that no two axes match by accident.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations


@dataclass
class Case:
    """A model, a call of it, and what its spaces are known to be.

    The keys of `expected` hold names of modules, each of which stands for the axis that
    `output_axis` finds. An axis may hold several spaces, as heads × head_dim does:

    - `free`: in at least one of them nodes can be removed and added, and a removal is exact.
    - `normalised`: at least one is free, but under a norm: a removal changes the function.
    - `pinned`: adoption pins all of them.
    - `shared`: tuples of modules whose axes are the same.
    - `refused`: the removal of node 0 must raise and change nothing, pinned or not.
    - `hidden`: free by this call alone; layers that only a call of `further` runs touch it too.
    - `unseen`: parameters that the call does not read.
    - `operation`: names of the operations that the message of a refusal must contain.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    further: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = ()  # calls of another path

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Case":
        """Casts the model in place, and returns a case whose floating inputs are cast too."""
        return Case(
            model=self.model.to(device, dtype),
            inputs=_cast(self.inputs, dtype, device),
            kwargs=_cast(self.kwargs, dtype, device),
            expected=self.expected,
            further=_cast(self.further, dtype, device),
        )

    def call(self) -> Any:
        return self.model(*self.inputs, **self.kwargs)


def _cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(device, dtype)
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_cast(each, dtype, device) for each in value)
    if isinstance(value, dict):
        return {key: _cast(each, dtype, device) for key, each in value.items()}
    return value


def output_axis(model: nn.Module, name: str) -> tuple[str, int]:
    """Returns the tensor and the dimension that hold the output channels of a module.

    A name that is no module but a parameter stands for its first dimension.
    """
    if name in dict(model.named_parameters()):
        return name, 0
    module = model.get_submodule(name)
    if isinstance(module, nn.MultiheadAttention):
        return f"{name}.in_proj_weight", 0
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Embedding)
    if isinstance(module, transposed) or type(module).__name__ == "Conv1D":
        return f"{name}.weight", 1
    return f"{name}.weight", 0


MODELS: dict[str, Callable[[], Case]] = {}
REFUSED: dict[str, Callable[[], Case]] = {}


def seeded(build: Callable[[], Case]) -> Callable[[], Case]:
    """Returns a constructor that always draws the same case and leaves the generator alone."""

    @functools.wraps(build)
    def constructor() -> Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)  # with which no node of the first few of a space is dead
            case = build()
            disturb(case.model)
        return case

    return constructor


def editable(build: Callable[[], Case]) -> Callable[[], Case]:
    MODELS[build.__name__] = seeded(build)
    return MODELS[build.__name__]


def refused(build: Callable[[], Case]) -> Callable[[], Case]:
    REFUSED[build.__name__] = seeded(build)
    return REFUSED[build.__name__]


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Moves every bias, scale and statistic away from 0 and 1, so that each node matters.

    A rider of zeros or ones could be left behind by an edit without changing any output. Biases
    lean to the positive, which keeps units behind a ReLU alive; matrices drawn so small that they
    shrink their input are drawn again, or the signal would vanish on its way.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() <= 1 or parameter.numel() == max(parameter.shape):
            if name.endswith("weight") and parameter.abs().max() < 0.1:
                parameter.fill_(1.0)  # a norm that lets next to nothing through
            parameter.add_(torch.randn_like(parameter) * 0.2 + 0.2)
            continue
        deviation = 1.2 * parameter[0].numel() ** -0.5
        if parameter.std() < deviation:
            parameter.normal_(std=deviation)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.2)
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)


def images(channels: int = 3, side: int = 8) -> Tensor:
    return torch.randn(2, channels, side, side)


# Convolutional networks: chains and residual streams


@editable
def vgg() -> Case:
    """A chain of convolutions whose head reads flattened maps of 2×2."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 10, 3, padding=1),
        nn.BatchNorm2d(10),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(10 * 4, 14),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.Linear(14, 5),
    )
    return Case(model, (images(),), expected={"free": ("0", "3", "8"), "pinned": ("11",)})


class BasicBlock(nn.Module):
    """Two convolutions around which the stream goes, by a projection where its width changes."""

    def __init__(self, inner: int, outer: int, stride: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, hidden, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.downsample is not None:
            x = self.downsample(x)
        return self.relu(y + x)


class Bottleneck(nn.Module):
    """Reduces, convolves (in groups, if asked), expands; a gate over the middle, if asked."""

    def __init__(
        self,
        inner: int,
        hidden: int,
        outer: int,
        stride: int = 1,
        groups: int = 1,
        squeeze: int | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.gate = nn.Identity()
        if squeeze is not None:
            self.gate = SqueezeExcite(hidden, squeeze, nn.ReLU(), nn.Sigmoid())
        self.conv3 = nn.Conv2d(hidden, outer, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outer)
        self.downsample = nn.Identity()
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.gate(functional.relu(self.bn2(self.conv2(y))))
        y = self.bn3(self.conv3(y))
        return functional.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """A stem, stages of blocks, a mean over the image and a head."""

    def __init__(self, stem: int, stages: list[list[nn.Module]], width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, stem, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        for number, blocks in enumerate(stages, start=1):
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
        self.n_stages = len(stages)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        for number in range(1, self.n_stages + 1):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


@editable
def resnet() -> Case:
    """Three stages of basic blocks; the streams of the later two begin with a projection."""
    stages = [
        [BasicBlock(6, 6, 1, 7), BasicBlock(6, 6, 1, 5)],
        [BasicBlock(6, 8, 2, 9), BasicBlock(8, 8, 1, 11)],
        [BasicBlock(8, 12, 2, 10), BasicBlock(12, 12, 1, 13)],
    ]
    return Case(
        ResNet(6, stages, 12),
        (images(),),
        expected={
            "free": ("conv1", "layer1.0.conv1", "layer2.0.conv1", "layer3.1.conv1", "layer3.1.bn2"),
            "shared": (
                ("conv1", "bn1", "layer1.0.conv2", "layer1.1.conv2"),
                ("layer2.0.conv2", "layer2.0.downsample.0", "layer2.1.conv2"),
                ("layer3.0.conv2", "layer3.0.downsample.1", "layer3.1.bn2"),
            ),
            "pinned": ("fc",),
        },
    )


@editable
def resnet_bottleneck() -> Case:
    stages = [
        [Bottleneck(6, 4, 10), Bottleneck(10, 5, 10)],
        [Bottleneck(10, 7, 14, 2), Bottleneck(14, 8, 14)],
    ]
    return Case(
        ResNet(6, stages, 14),
        (images(),),
        expected={
            "free": ("conv1", "layer1.0.conv1", "layer1.1.conv2", "layer2.1.conv3"),
            "shared": (("layer1.0.conv3", "layer1.0.downsample.0", "layer1.1.conv3"),),
            "pinned": ("fc",),
        },
    )


class WideBlock(nn.Module):
    """Norm before convolution, so that the first projection reads a normed stream."""

    def __init__(self, inner: int, outer: int, hidden: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv1 = nn.Conv2d(inner, hidden, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, outer, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inner, outer, 1, bias=False) if inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.relu(self.bn1(x))
        y = self.conv1(normed)
        y = self.conv2(self.dropout(functional.relu(self.bn2(y))))
        if self.shortcut is None:
            return x + y
        return self.shortcut(normed) + y


@editable
def wide_resnet() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1, bias=False),
        WideBlock(5, 16, 14),
        WideBlock(16, 16, 15),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    return Case(
        model,
        (images(side=6),),
        expected={
            "free": ("0", "1.conv1", "2.conv1", "2.conv2"),
            "shared": (("1.conv2", "1.shortcut", "2.conv2", "3"),),
            "pinned": ("7",),
        },
    )


# Depthwise and grouped convolutions, gates over channels


class SqueezeExcite(nn.Module):
    """Multiplies every channel by a number computed from the means of all."""

    def __init__(self, width: int, hidden: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(width, hidden, 1)
        self.fc2 = nn.Conv2d(hidden, width, 1)
        self.act = act
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        scale = functional.adaptive_avg_pool2d(x, 1)
        scale = self.fc2(self.act(self.fc1(scale)))
        return x * self.gate(scale)


class Inverted(nn.Module):
    """Expands, convolves each channel alone, projects; adds the input where the shapes agree."""

    def __init__(
        self,
        inner: int,
        hidden: int,
        outer: int,
        stride: int,
        act: Callable[[], nn.Module],
        gate: nn.Module | None = None,
        kernel: int = 3,
    ) -> None:
        super().__init__()
        self.expand = nn.Conv2d(inner, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.depthwise = nn.Conv2d(
            hidden, hidden, kernel, stride, kernel // 2, groups=hidden, bias=False
        )
        self.bn2 = nn.BatchNorm2d(hidden)
        self.gate = gate
        self.project = nn.Conv2d(hidden, outer, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outer)
        self.act = act()
        self.residual = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.expand(x)))
        y = self.act(self.bn2(self.depthwise(y)))
        if self.gate is not None:
            y = self.gate(y)
        y = self.bn3(self.project(y))
        if self.residual:
            return x + y
        return y


class MobileNet(nn.Module):
    """A stem, inverted residuals, a last convolution and a head over the mean of the image."""

    def __init__(
        self, blocks: list[nn.Module], stem: int, width: int, last: int, act: nn.Module
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem), act
        )
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(nn.Conv2d(width, last, 1, bias=False), nn.BatchNorm2d(last), act)
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(last, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.blocks(self.stem(x)))
        return self.classifier(x.mean([2, 3]))


@editable
def mobilenet_v2() -> Case:
    blocks: list[nn.Module] = [
        Inverted(6, 9, 8, 2, nn.ReLU6),
        Inverted(8, 13, 8, 1, nn.ReLU6),
        Inverted(8, 14, 10, 1, nn.ReLU6),
    ]
    return Case(
        MobileNet(blocks, 6, 10, 15, nn.ReLU6()),
        (images(),),
        expected={
            "free": ("stem.0", "blocks.0.expand", "blocks.1.project", "blocks.2.project", "last.0"),
            "shared": (
                ("blocks.1.expand", "blocks.1.bn1", "blocks.1.depthwise", "blocks.1.bn2"),
                ("blocks.0.project", "blocks.1.project"),
            ),
            "pinned": ("classifier.1",),
        },
    )


@editable
def mobilenet_v3() -> Case:
    gate = SqueezeExcite(13, 4, nn.ReLU(), nn.Hardsigmoid())
    blocks: list[nn.Module] = [
        Inverted(6, 9, 8, 2, nn.ReLU),
        Inverted(8, 13, 8, 1, nn.Hardswish, gate, kernel=5),
    ]
    return Case(
        MobileNet(blocks, 6, 8, 15, nn.Hardswish()),
        (images(),),
        expected={
            "free": ("blocks.1.expand", "blocks.1.gate.fc1", "blocks.1.project"),
            "shared": (("blocks.1.expand", "blocks.1.depthwise", "blocks.1.gate.fc2"),),
            "pinned": ("classifier.1",),
        },
    )


@editable
def efficientnet() -> Case:
    blocks: list[nn.Module] = [
        Inverted(6, 12, 7, 1, nn.SiLU, SqueezeExcite(12, 2, nn.SiLU(), nn.Sigmoid())),
        Inverted(7, 14, 7, 1, nn.SiLU, SqueezeExcite(14, 3, nn.SiLU(), nn.Sigmoid())),
        Inverted(7, 16, 10, 2, nn.SiLU, SqueezeExcite(16, 4, nn.SiLU(), nn.Sigmoid()), kernel=5),
    ]
    return Case(
        MobileNet(blocks, 6, 10, 18, nn.SiLU()),
        (images(),),
        expected={
            "free": ("stem.0", "blocks.0.expand", "blocks.1.gate.fc1", "blocks.2.project"),
            "shared": (
                ("blocks.0.project", "blocks.1.project"),
                ("blocks.2.expand", "blocks.2.depthwise", "blocks.2.gate.fc2"),
            ),
            "pinned": ("classifier.1",),
        },
    )


@editable
def resnext() -> Case:
    """Bottlenecks whose middle convolution has 3 and 4 groups."""
    stages = [
        [Bottleneck(6, 12, 10, groups=3), Bottleneck(10, 12, 10, groups=3)],
        [Bottleneck(10, 20, 14, 2, groups=4)],
    ]
    return Case(
        ResNet(6, stages, 14),
        (images(side=6),),
        expected={
            "free": ("conv1", "layer1.0.conv1", "layer1.1.conv2", "layer2.0.conv2", "layer1.1.bn3"),
            "shared": (("layer1.0.conv3", "layer1.1.conv3"),),
            "pinned": ("fc",),
        },
    )


@editable
def regnet() -> Case:
    """Groups of one width, and a gate over the grouped channels, as RegNetY has."""
    stages = [
        [Bottleneck(6, 8, 8, 2, groups=2, squeeze=3)],
        [Bottleneck(8, 12, 12, groups=3, squeeze=2), Bottleneck(12, 12, 12, groups=3, squeeze=5)],
    ]
    return Case(
        ResNet(6, stages, 12),
        (images(),),
        expected={
            "free": ("conv1", "layer1.0.conv1", "layer2.0.conv2", "layer2.1.gate.fc1"),
            "shared": (
                ("layer2.0.conv3", "layer2.1.conv3"),
                ("layer2.1.conv2", "layer2.1.bn2", "layer2.1.gate.fc2"),
            ),
            "pinned": ("fc",),
        },
    )


# Concatenations


class DenseLayer(nn.Module):
    """Adds new channels behind those it reads."""

    def __init__(self, inner: int, hidden: int, grown: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv1 = nn.Conv2d(inner, hidden, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, grown, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.relu(self.norm1(x)))
        y = self.conv2(functional.relu(self.norm2(y)))
        return torch.cat([x, y], 1)


@editable
def densenet() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        DenseLayer(6, 7, 4),
        DenseLayer(10, 8, 4),
        nn.BatchNorm2d(14),
        nn.ReLU(),
        nn.Conv2d(14, 9, 1, bias=False),
        nn.AvgPool2d(2),
        DenseLayer(9, 11, 5),
        nn.BatchNorm2d(14),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(14, 3),
    )
    return Case(
        model,
        (images(side=6),),
        expected={
            "free": ("0", "1.conv1", "1.conv2", "2.conv2", "5", "7.conv2"),
            "pinned": ("11",),
        },
    )


class UNet(nn.Module):
    """Two steps down, two up by transposed convolutions, each joined with the map it mirrors."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = self._block(3, 6)
        self.down2 = self._block(6, 8)
        self.middle = self._block(8, 12)
        self.up2 = nn.ConvTranspose2d(12, 9, 2, 2)
        self.join2 = self._block(9 + 8, 7)
        self.up1 = nn.ConvTranspose2d(7, 5, 2, 2)
        self.join1 = self._block(5 + 6, 4)
        self.out = nn.Conv2d(4, 2, 1)

    def _block(self, inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(functional.max_pool2d(a, 2))
        c = self.middle(functional.max_pool2d(b, 2))
        y = self.join2(torch.cat([self.up2(c), b], 1))
        y = self.join1(torch.cat([self.up1(y), a], 1))
        return self.out(y)


@editable
def unet() -> Case:
    return Case(
        UNet(),
        (images(),),
        expected={
            "free": ("down1.0", "down2.0", "middle.0", "up2", "join2.0", "up1", "join1.0"),
            "pinned": ("out",),
        },
    )


class Inception(nn.Module):
    """Four branches side by side; the second ends in two halves, the fourth pools."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inner, 3, 1)
        self.three = nn.Conv2d(inner, 5, 1)
        self.three_row = nn.Conv2d(5, 4, (1, 3), padding=(0, 1))
        self.three_column = nn.Conv2d(5, 6, (3, 1), padding=(1, 0))
        self.five = nn.Sequential(
            nn.Conv2d(inner, 4, 1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 7, 5, padding=2),
            nn.ReLU(),
        )
        self.pool = nn.Conv2d(inner, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        three = functional.relu(self.three(x))
        three = torch.cat([self.three_row(three), self.three_column(three)], 1)
        pooled = functional.avg_pool2d(x, 3, 1, 1)
        branches = [self.one(x), three, self.five(x), self.pool(pooled)]
        return torch.cat(branches, 1)


@editable
def inception() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        Inception(8),
        nn.BatchNorm2d(22),
        nn.SiLU(),
        Inception(22),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(22, 5),
    )
    free = ("0", "2.one", "2.three", "2.three_row", "2.three_column", "2.five.0", "2.five.3")
    return Case(
        model,
        (images(side=6),),
        expected={"free": (*free, "2.pool", "5.one", "5.three_column"), "pinned": ("8",)},
    )


class GoogLeNet(nn.Module):
    """A second head in the middle, which runs in training only and returns its own logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first = Inception(8)
        self.aux_conv = nn.Conv2d(22, 6, 1)
        self.aux_fc = nn.Linear(6 * 4, 5)
        self.second = Inception(22)
        self.fc = nn.Linear(22, 5)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = functional.relu(self.first(functional.relu(self.stem(x))))
        aux = None
        if self.training:
            aux = functional.relu(self.aux_conv(functional.adaptive_avg_pool2d(x, 2)))
            aux = self.aux_fc(torch.flatten(aux, 1))
        logits = self.fc(self.second(x).mean((2, 3)))
        if aux is None:
            return logits
        return logits, aux


@editable
def googlenet() -> Case:
    free = ("stem", "first.one", "first.five.3", "aux_conv", "second.three", "second.pool")
    return Case(GoogLeNet(), (images(side=6),), expected={"free": free, "pinned": ("fc", "aux_fc")})


# Norms over channels


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, LayerNorm over channels moved last, an MLP, a scale a channel."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.layer_scale = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.down(functional.gelu(self.up(y)))
        return x + self.layer_scale * y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image, by a permutation there and back."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.layer_norm(
            x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps
        )
        return x.permute(0, 3, 1, 2)


@editable
def convnext() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 2, 2),
        ChannelNorm(6),
        ConvNeXtBlock(6, 13),
        ConvNeXtBlock(6, 11),
        ChannelNorm(6),
        nn.Conv2d(6, 9, 2, 2),
        ConvNeXtBlock(9, 17),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(9),
        nn.Linear(9, 5),
    )
    return Case(
        model,
        (images(),),
        expected={
            "free": ("2.up", "3.up", "6.up"),
            "normalised": ("0", "2.down", "5", "6.depthwise"),
            "shared": (
                ("0", "1", "2.depthwise", "2.norm", "2.down", "2.layer_scale", "3.down", "4"),
                ("5", "6.down", "6.layer_scale", "9"),
            ),
            "pinned": ("10",),
        },
    )


@editable
def groupnorm() -> Case:
    """Norms over groups of channels: whole groups, or as many channels of each, may leave."""
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.Conv2d(12, 10, 3, padding=1),
        nn.GroupNorm(5, 10),
        nn.ReLU(),
        nn.Conv2d(10, 7, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(7, 4),
    )
    return Case(
        model,
        (images(side=6),),
        expected={
            "free": ("6",),
            "normalised": ("0", "3"),
            "shared": (("0", "1"), ("3", "4")),
            "pinned": ("10",),
        },
    )


@editable
def instancenorm() -> Case:
    """Each channel is normed over its own image, so that removing another changes nothing."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.InstanceNorm2d(6, affine=True),
        nn.ReLU(),
        nn.Conv2d(6, 3, 3, padding=1),
    )
    return Case(
        model,
        (images(side=6),),
        expected={"free": ("0", "3"), "shared": (("0", "1"), ("3", "4")), "pinned": ("6",)},
    )


# One and three dimensions, and none


@editable
def conv1d() -> Case:
    model = nn.Sequential(
        nn.Conv1d(2, 6, 5, 2, 2),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Conv1d(6, 9, 3, padding=2, dilation=2),
        nn.LeakyReLU(0.1),
        nn.MaxPool1d(2),
        nn.ConvTranspose1d(9, 5, 2, 2),
        nn.PReLU(5),
        nn.Flatten(),
        nn.Linear(5 * 8, 4),
    )
    return Case(
        model,
        (torch.randn(2, 2, 16),),
        expected={"free": ("0", "3", "6"), "shared": (("6", "7"),), "pinned": ("9",)},
    )


@editable
def grouped() -> Case:
    """Groups of several channels, of one, one that makes several, and transposed ones."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1, groups=4),
        nn.LeakyReLU(0.1),
        nn.Conv2d(12, 12, 3, padding=2, dilation=2, groups=12),
        nn.LeakyReLU(0.1),
        nn.Conv2d(12, 24, 1, groups=12, bias=False),
        nn.LeakyReLU(0.1),
        nn.ConvTranspose2d(24, 8, 2, 2, groups=4),
        nn.LeakyReLU(0.1),
        nn.Conv2d(8, 5, 1),
    )
    return Case(
        model,
        (images(),),
        expected={"free": ("0", "3", "7", "9"), "pinned": ("11",)},
    )


@editable
def conv3d() -> Case:
    model = nn.Sequential(
        nn.Conv3d(2, 5, 3, padding=1),
        nn.BatchNorm3d(5),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(5, 7, (1, 3, 3), padding=(0, 1, 1)),
        nn.Conv3d(7, 6, (3, 1, 1), padding=(1, 0, 0)),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )
    return Case(
        model,
        (torch.randn(2, 2, 4, 4, 4),),
        expected={"free": ("0", "4", "5"), "pinned": ("9",)},
    )


@editable
def mlp() -> Case:
    model = nn.Sequential(
        nn.Linear(7, 12),
        nn.ReLU(),
        nn.BatchNorm1d(12),
        nn.Linear(12, 9, bias=False),
        nn.Tanh(),
        nn.Linear(9, 4),
    )
    return Case(
        model,
        (torch.randn(6, 7),),
        expected={"free": ("0", "3"), "shared": (("0", "2"),), "pinned": ("5",)},
    )


class MixerBlock(nn.Module):
    """An MLP over patches, then one over channels."""

    def __init__(self, patches: int, width: int, over_patches: int, over_channels: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.patches1 = nn.Linear(patches, over_patches)
        self.patches2 = nn.Linear(over_patches, patches)
        self.norm2 = nn.LayerNorm(width)
        self.channels1 = nn.Linear(width, over_channels)
        self.channels2 = nn.Linear(over_channels, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x).transpose(1, 2)  # [batch, width, patches]
        y = self.patches2(functional.gelu(self.patches1(y)))
        x = x + y.transpose(1, 2)
        y = self.channels2(functional.gelu(self.channels1(self.norm2(x))))
        return x + y


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(4, 10, 7, 13), MixerBlock(4, 10, 6, 15))
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)  # [batch, patches, width]
        return self.head(self.norm(self.blocks(x)).mean(1))


@editable
def mixer() -> Case:
    return Case(
        Mixer(),
        (images(),),
        expected={
            "free": ("blocks.0.patches1", "blocks.0.channels1", "blocks.1.channels1"),
            "normalised": ("stem", "blocks.1.channels2"),
            "shared": (("stem", "blocks.0.channels2", "blocks.1.channels2", "norm"),),
            "pinned": ("blocks.0.patches2", "head"),
        },
    )


# Attention


class PackedAttention(nn.Module):
    """Queries, keys and values of one Linear, reshaped to (3, heads, head_dim) as timm does."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.qkv = nn.Linear(width, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, length, head_dim]
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        y = (weights @ v).transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim)
        return self.proj(y)


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = PackedAttention(width, heads, head_dim)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """Patches, a class token, positions, two blocks; the head reads the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 20, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 20) * 0.3)
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 20) * 0.3)
        self.blocks = nn.Sequential(ViTBlock(20, 3, 8, 31), ViTBlock(20, 3, 8, 33))
        self.norm = nn.LayerNorm(20)
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)  # [batch, patches, width]
        token = self.cls_token.expand(x.shape[0], -1, -1)
        x = torch.cat([token, x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


@editable
def vit() -> Case:
    return Case(
        ViT(),
        (images(),),
        expected={
            "free": ("blocks.0.attn.qkv", "blocks.0.fc1", "blocks.1.attn.qkv", "blocks.1.fc1"),
            "normalised": ("patch_embed", "blocks.0.attn.proj", "blocks.1.fc2"),
            "shared": (("patch_embed", "blocks.0.attn.proj", "blocks.0.fc2", "blocks.1.fc2"),),
            "pinned": ("head",),
        },
    )


class Encoder(nn.Module):
    """Torch's own encoder layers around nn.MultiheadAttention, norm after and norm first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 24)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                24, 3, hidden, dropout=0.0, batch_first=True, norm_first=norm_first
            )
            for hidden, norm_first in ((31, False), (37, True))
        )
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.head(x.mean(1))


@editable
def multihead_encoder() -> Case:
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return Case(
        Encoder(),
        (torch.randn(2, 5, 7),),
        {"padding": padding},
        expected={
            "free": ("layers.0.self_attn", "layers.0.linear1", "layers.1.linear1"),
            "normalised": ("embed", "layers.0.linear2"),
            "shared": (("embed", "layers.0.linear2", "layers.0.norm1", "layers.1.norm2"),),
            "pinned": ("head",),
        },
    )


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class GroupedQueryAttention(nn.Module):
    """Several query heads read one head of keys and values; positions by rotation."""

    inv_freq: Tensor

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.num_kv_heads = kv_heads
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        powers = torch.arange(0, head_dim, 2) / head_dim
        self.register_buffer("inv_freq", 100.0**-powers, persistent=False)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos + turned * sin

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        positions = torch.arange(length, device=x.device, dtype=self.inv_freq.dtype)
        angles = torch.outer(positions, self.inv_freq)
        angles = torch.cat([angles, angles], -1)  # [length, head_dim]
        q = self._rotate(q, angles.cos(), angles.sin())
        k = self._rotate(k, angles.cos(), angles.sin())
        repeats = self.num_heads // self.num_kv_heads
        k = self._repeated(k, repeats)
        v = self._repeated(v, repeats)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim)
        return self.o_proj(y)

    def _repeated(self, x: Tensor, repeats: int) -> Tensor:
        batch, heads, length, head_dim = x.shape
        x = x[:, :, None].expand(batch, heads, repeats, length, head_dim)
        return x.reshape(batch, heads * repeats, length, head_dim)


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(width)
        self.attn = GroupedQueryAttention(width, heads=6, kv_heads=2, head_dim=8)
        self.post_norm = RMSNorm(width)
        self.mlp = GatedMLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 20)
        self.layers = nn.ModuleList([DecoderLayer(20, 27), DecoderLayer(20, 29)])
        self.norm = RMSNorm(20)
        self.head = nn.Linear(20, 37, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@editable
def gqa_decoder() -> Case:
    """As Llama: 6 query heads over 2 of keys and values, rotated positions, a gated MLP."""
    return Case(
        Decoder(),
        (torch.randint(37, (2, 5)),),
        expected={
            "free": (
                "layers.0.attn.q_proj",
                "layers.0.attn.k_proj",
                "layers.1.attn.v_proj",
                "layers.0.mlp.gate_proj",
            ),
            "normalised": ("embed", "layers.1.mlp.down_proj"),
            "shared": (
                ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
                ("embed", "layers.0.attn.o_proj", "layers.0.input_norm", "layers.1.mlp.down_proj"),
            ),
            "pinned": ("head",),
        },
    )


class GPTBlock(nn.Module):
    """Packed queries, keys and values, split by a number kept beside them."""

    bias: Tensor

    def __init__(self, width: int, heads: int, hidden: int, context: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = width // heads
        self.split_size = width
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, hidden)
        self.c_out = nn.Linear(hidden, width)
        mask = torch.tril(torch.ones(context, context, dtype=torch.bool))
        self.register_buffer("bias", mask[None, None])

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.c_attn(x).split(self.split_size, dim=2)
        shape = (batch, length, self.num_heads, self.head_dim)
        q = q.view(shape).transpose(1, 2)
        k = k.view(shape).transpose(1, 2)
        v = v.view(shape).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        scores = scores.masked_fill(~self.bias[:, :, :length, :length], float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.c_proj(y.contiguous().view(batch, length, self.num_heads * self.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.ln_1(x))
        return x + self.c_out(functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Embeddings of words and places; the head is the word embedding itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(37, 24)
        self.wpe = nn.Embedding(9, 24)
        self.h = nn.ModuleList([GPTBlock(24, 3, 41, 9), GPTBlock(24, 3, 43, 9)])
        self.ln_f = nn.LayerNorm(24)
        self.lm_head = nn.Linear(24, 37, bias=False)
        nn.init.normal_(self.wte.weight, std=0.3)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.wte(ids) + self.wpe(places)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@editable
def gpt_tied() -> Case:
    return Case(
        GPT(),
        (torch.randint(37, (2, 6)),),
        expected={
            "free": ("h.0.c_attn", "h.0.c_fc", "h.1.c_attn", "h.1.c_fc"),
            "normalised": ("wte", "h.0.c_out"),
            "shared": (("wte", "wpe", "h.0.c_proj", "h.0.c_out", "h.1.c_out", "ln_f"),),
            "pinned": ("lm_head",),
        },
    )


# Broadcasts, rearrangements, shared and several ends


class MaskNet(nn.Module):
    """A mask of one channel multiplies all channels (Torch-Pruning's issue 510)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Conv2d(3, 6, 1)
        self.mask = nn.Conv2d(6, 1, 1)
        self.body = nn.Conv2d(3, 10, 3, padding=1)
        self.out = nn.Conv2d(10, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.sigmoid(self.mask(functional.relu(self.hidden(x))))
        return self.out(mask * self.body(x)).mean((2, 3))


@editable
def broadcast_mask() -> Case:
    return Case(
        MaskNet(), (images(side=6),), expected={"free": ("hidden", "body"), "pinned": ("out",)}
    )


@editable
def pixel_shuffle() -> Case:
    """Super-resolution: each output channel is made of four input channels."""
    model = nn.Sequential(
        nn.Conv2d(3, 9, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(9, 5 * 4, 3, padding=1),
        nn.PixelShuffle(2),
        nn.PReLU(5),
        nn.Conv2d(5, 3, 3, padding=1),
    )
    return Case(model, (images(side=4),), expected={"free": ("0", "2"), "pinned": ("5",)})


class Autoencoder(nn.Module):
    """Down to a vector and up again; the decoder unflattens with an inferred channel count."""

    def __init__(self) -> None:
        super().__init__()
        self.encode1 = nn.Conv2d(3, 7, 3, 2, 1)
        self.encode2 = nn.Conv2d(7, 9, 3, 2, 1)
        self.code = nn.Linear(9 * 4, 6)
        self.uncode = nn.Linear(6, 8 * 4)
        self.decode2 = nn.ConvTranspose2d(8, 5, 4, 2, 1)
        self.norm = nn.BatchNorm2d(5)
        self.decode1 = nn.ConvTranspose2d(5, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.encode2(functional.relu(self.encode1(x))))
        code = torch.tanh(self.code(torch.flatten(x, 1)))
        y = functional.relu(self.uncode(code)).view(x.shape[0], -1, 2, 2)
        y = functional.relu(self.norm(self.decode2(y)))
        return torch.sigmoid(self.decode1(y))


@editable
def autoencoder() -> Case:
    return Case(
        Autoencoder(),
        (images(),),
        expected={
            "free": ("encode1", "encode2", "code", "uncode", "decode2"),
            "pinned": ("decode1",),
        },
    )


class Siamese(nn.Module):
    """One trunk runs on both images; the head reads how their codes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 4, 11),
        )
        self.head = nn.Linear(11, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        difference = (self.trunk(left) - self.trunk(right)).abs()
        return self.head(difference).squeeze(1)


@editable
def siamese() -> Case:
    return Case(
        Siamese(),
        (images(), images()),
        expected={"free": ("trunk.0", "trunk.3", "trunk.6"), "pinned": ("head",)},
    )


class TwoEnds(nn.Module):
    """An image and a vector in, logits and a number out, by a trunk that sums both."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 8, 3, padding=1)
        self.vector = nn.Linear(5, 8)
        self.trunk = nn.Linear(8, 11)
        self.logits = nn.Linear(11, 4)
        self.number = nn.Linear(11, 1)

    def forward(self, image: Tensor, *, vector: Tensor) -> dict[str, Any]:
        image_code = functional.relu(self.image(image)).mean((2, 3))
        code = functional.relu(self.trunk(image_code + self.vector(vector)))
        return {"logits": self.logits(code), "further": [self.number(code).squeeze(1)]}


@editable
def two_inputs_two_outputs() -> Case:
    return Case(
        TwoEnds(),
        (images(side=6),),
        {"vector": torch.randn(2, 5)},
        expected={
            "free": ("image", "trunk"),
            "shared": (("image", "vector"),),
            "pinned": ("logits",),
        },
    )


class Scaled(nn.Module):
    """Parameters that belong to no layer: a scale a channel, and a bias added by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 9, 3, padding=1, bias=False)
        self.scale = nn.Parameter(torch.ones(9, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, 9, 1, 1))
        self.temperature = nn.Parameter(torch.ones(()))
        self.weight = nn.Parameter(torch.randn(4, 9) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv(x) * self.scale + self.shift)
        return torch.einsum("bc,oc->bo", x.mean((2, 3)), self.weight) * self.temperature


@editable
def bare_parameter() -> Case:
    return Case(
        Scaled(),
        (images(side=6),),
        expected={"free": ("conv",), "shared": (("conv", "scale"),), "pinned": ("weight",)},
    )


class StraightThrough(torch.autograd.Function):
    """Rounds, and hands gradients through; torch's own operations do the work."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1)
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(StraightThrough.apply(self.conv(x)).mean((2, 3)))


@editable
def straight_through() -> Case:
    """An autograd.Function whose inside is visible, and so typed like any other code."""
    return Case(Rounded(), (images(side=6),), expected={"free": ("conv",), "pinned": ("head",)})


# Nets in the manner of Torch-Pruning's tests


class CascadedConcat(nn.Module):
    """Concatenations of concatenations, in which one tensor appears twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(3, 5, 3, padding=1)
        self.c = nn.Conv2d(9, 6, 1)
        self.norm = nn.BatchNorm2d(4 + 5 + 6 + 4)
        self.d = nn.Conv2d(4 + 5 + 6 + 4, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        pair = torch.cat([a, self.b(x)], 1)
        c = functional.relu(self.c(pair))
        return self.d(self.norm(torch.cat([torch.cat([pair, c], 1), a], 1)))


@editable
def cascaded_concat() -> Case:
    return Case(
        CascadedConcat(), (images(side=5),), expected={"free": ("a", "b", "c"), "pinned": ("d",)}
    )


class ConcatSplit(nn.Module):
    """Two maps joined, normed together, and taken apart where they were joined."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(10)
        self.to_a = nn.Conv2d(4, 5, 1)
        self.to_b = nn.Conv2d(6, 5, 1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(x)
        joined = functional.relu(self.norm(torch.cat([a, b], 1)))
        a, b = torch.split(joined, [a.shape[1], b.shape[1]], 1)
        return self.head((self.to_a(a) + self.to_b(b)).mean((2, 3)))


@editable
def concat_split() -> Case:
    return Case(
        ConcatSplit(),
        (images(side=5),),
        expected={
            "free": ("a", "b", "to_a"),
            "shared": (("to_a", "to_b"),),
            "pinned": ("head",),
        },
    )


class SpatialConcat(nn.Module):
    """Concatenations of rows of the image and of samples: both maps have the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 7, 3, padding=1)
        self.b = nn.Conv2d(3, 7, 1)
        self.c = nn.Conv2d(7, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.a(x), self.b(x)], dim=2)
        samples = torch.cat([rows, rows * 2], dim=0)
        return self.c(functional.relu(samples)).mean((2, 3))


@editable
def non_feature_concat() -> Case:
    return Case(
        SpatialConcat(),
        (images(side=5),),
        expected={"free": ("a",), "shared": (("a", "b"),), "pinned": ("c",)},
    )


class Reshaped(nn.Module):
    """Channels through views, permutations and a flatten in which they come last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1)
        self.inner = nn.Linear(7, 8)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        batch, channels, height, width = x.shape
        x = x.view(batch, channels, height * width).permute(0, 2, 1)
        x = functional.relu(self.inner(x)).unsqueeze(0).squeeze(0)
        return self.head(x.reshape(batch, -1))


@editable
def reshape() -> Case:
    return Case(
        Reshaped(), (images(side=4),), expected={"free": ("conv", "inner"), "pinned": ("head",)}
    )


class SingleChannel(nn.Module):
    """A map of one channel is added to a wide one, and is also an output."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Conv2d(8, 1, 1)
        self.next = nn.Conv2d(8, 6, 1)
        self.out = nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = functional.relu(self.wide(x))
        one = self.one(wide)
        return self.out(self.next(wide) + one), one


@editable
def single_channel_output() -> Case:
    return Case(SingleChannel(), (images(side=5),), expected={"free": ("wide", "next")})


class FullyConnected(nn.Module):
    """Linear layers over tensors of two and three dimensions, with a residual between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 10)
        self.fc2 = nn.Linear(10, 13)
        self.fc3 = nn.Linear(13, 10)
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x))
        x = x + self.fc3(torch.relu(self.fc2(x)))
        return self.out(x.sum(1))


@editable
def fully_connected() -> Case:
    return Case(
        FullyConnected(),
        (torch.randn(2, 4, 6),),
        expected={
            "free": ("fc1", "fc2"),
            "shared": (("fc1", "fc3"),),
            "pinned": ("out",),
        },
    )


class ManyEnds(nn.Module):
    """Three vectors in, each with its own layer, and three outputs, one of them a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 8)
        self.b = nn.Linear(4, 8)
        self.c = nn.Linear(5, 6)
        self.joined = nn.Linear(14, 9)
        self.shown = nn.Linear(9, 7)
        self.out1 = nn.Linear(7, 2)
        self.out2 = nn.Linear(9, 3)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, list[Tensor]]:
        both = torch.relu(self.a(a) * self.b(b))
        joined = torch.relu(self.joined(torch.cat([both, self.c(c)], 1)))
        shown = self.shown(joined)
        return self.out1(shown), [self.out2(joined), shown]


@editable
def multiple_inputs_and_outputs() -> Case:
    return Case(
        ManyEnds(),
        (torch.randn(3, 3), torch.randn(3, 4), torch.randn(3, 5)),
        expected={
            "free": ("a", "c", "joined"),
            "shared": (("a", "b"),),
            "pinned": ("shown", "out1", "out2"),
        },
    )


class Unused(nn.Module):
    """A layer and a parameter that no call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 8)
        self.unused = nn.Linear(8, 8)
        self.bare = nn.Parameter(torch.randn(8))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.used(x)))


@editable
def unused_parameters() -> Case:
    return Case(
        Unused(),
        (torch.randn(3, 5),),
        expected={
            "free": ("used",),
            "pinned": ("unused", "bare", "out"),
            "unseen": ("unused.weight", "unused.bias", "bare"),
        },
    )


# What must be refused


def _shuffled(x: Tensor, groups: int) -> Tensor:
    batch, channels, height, width = x.shape
    x = x.view(batch, groups, channels // groups, height, width).transpose(1, 2)
    return x.reshape(batch, channels, height, width)


class ShuffleUnit(nn.Module):
    """Half of the channels pass, half are convolved, and both are interleaved."""

    def __init__(self, half: int, hidden: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(half, hidden, 1)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.expand = nn.Conv2d(hidden, half, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed, x = x.chunk(2, dim=1)
        x = self.expand(self.depthwise(functional.relu(self.reduce(x))))
        return _shuffled(torch.cat([passed, x], 1), 2)


@refused
def shufflenet() -> Case:
    """The interleaved stream is refused; the inside of a unit and the last layer are not."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        ShuffleUnit(4, 5),
        ShuffleUnit(4, 7),
        nn.Conv2d(8, 9, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(9, 4),
    )
    return Case(
        model,
        (images(side=5),),
        expected={
            "free": ("1.reduce", "2.reduce", "3"),
            "pinned": ("1.expand", "2.expand", "7"),
            "refused": ("0",),
        },
    )


@refused
def weight_norm() -> Case:
    """The weight of the first layer is computed from two parameters at each call."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, 8)),
        nn.ReLU(),
        nn.Linear(8, 7),
        nn.ReLU(),
        nn.Linear(7, 3),
    )
    originals = (
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    )
    return Case(
        model,
        (torch.randn(3, 5),),
        expected={"free": ("2",), "pinned": originals, "operation": ("_weight_norm_interface",)},
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.lstm = nn.LSTM(6, 7, batch_first=True)
        self.hidden = nn.Linear(7, 9)
        self.out = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.embed(x))
        return self.out(torch.relu(self.hidden(y[:, -1])))


@refused
def lstm() -> Case:
    """What goes into and comes out of the recurrence is refused, the layer behind it is not."""
    return Case(
        Recurrent(),
        (torch.randn(2, 4, 5),),
        expected={
            "free": ("hidden",),
            "pinned": ("embed", "lstm.weight_ih_l0", "lstm.weight_hh_l0", "out"),
        },
    )


class Routed(nn.Module):
    """The data decide which of two experts runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 8)
        self.router = nn.Linear(5, 1)
        self.positive = nn.Linear(8, 6)
        self.negative = nn.Linear(8, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.trunk(x))
        if self.router(x).mean().item() > 0:
            hidden = self.positive(hidden)
        else:
            hidden = self.negative(hidden)
        return self.out(torch.relu(hidden))


@refused
def data_dependent() -> Case:
    """The call runs one expert; the other reads `trunk` too, and `.item()` betrays it."""
    model = Routed()
    nn.init.constant_(model.router.weight, 2.0)
    x = torch.rand(3, 5)
    return Case(
        model,
        (x,),
        expected={
            "pinned": ("negative", "out"),
            "refused": ("trunk", "positive"),
            "unseen": ("negative.weight", "negative.bias"),
        },
        further=(((-x,), {}),),
    )


class ByNumpy(torch.autograd.Function):
    """Doubles outside of torch, so that no operation connects the input with the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Applied(nn.Module):
    """A function of no parameters between two layers, and a third layer behind them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(5, 8)
        self.function = function
        self.after = nn.Linear(8, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.before(x))
        return self.out(torch.relu(self.after(x)))


@refused
def custom_function() -> Case:
    return Case(
        Applied(ByNumpy.apply),
        (torch.randn(3, 5),),
        expected={"free": ("after",), "pinned": ("before", "out")},
    )


@functools.cache
def _unknown_operator() -> Callable[[Tensor], Tensor]:
    """Registers `grapnet_tests::triple` once: an operator of which no rule is known."""

    @torch.library.custom_op("grapnet_tests::triple", mutates_args=())
    def triple(x: Tensor) -> Tensor:
        return x * 3

    @triple.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    triple.register_autograd(_triple_backward)
    return triple


def _triple_backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 3


@refused
def custom_operator() -> Case:
    return Case(
        Applied(Triple()),
        (torch.randn(3, 5),),
        expected={"free": ("after",), "pinned": ("before", "out"), "operation": ("triple",)},
    )


class Triple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _unknown_operator()(x)


class HardSplit(nn.Module):
    """The number 8 in the code says where the channels part."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 13, 3, padding=1)
        self.first = nn.Conv2d(8, 6, 1)
        self.rest = nn.Conv2d(5, 6, 1)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv(x))
        y = self.first(x[:, :8]) + self.rest(x[:, 8:])
        return self.out(y.mean((2, 3)))


@refused
def hard_split() -> Case:
    """Nothing is wrong until a node of the first eight leaves: then the code takes another."""
    return Case(
        HardSplit(),
        (images(side=5),),
        expected={
            "free": ("first",),
            "shared": (("first", "rest"),),
            "refused": ("conv",),
            "pinned": ("out",),
        },
    )


class Permuted(nn.Module):
    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.register_buffer("order", torch.randperm(8))
        self.next = nn.Conv2d(8, 6, 1)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv(x))[:, self.order]
        return self.out(functional.relu(self.next(x)).mean((2, 3)))


@refused
def permuted_channels() -> Case:
    return Case(
        Permuted(),
        (images(side=5),),
        expected={"free": ("next",), "pinned": ("conv", "out"), "operation": ("index",)},
    )


class TwoPaths(nn.Module):
    """A flag decides which layers read the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 8)
        self.short = nn.Linear(8, 6)
        self.deep = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 6))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor, deep: bool = False) -> Tensor:
        x = torch.relu(self.trunk(x))
        if deep:
            x = self.deep(x)
        else:
            x = self.short(x)
        return self.out(torch.relu(x))


@refused
def two_paths() -> Case:
    """The layers of the other path are unseen; they read `trunk` and write what `short` does.

    One call cannot show that, nor tell it from `unused_parameters`: it takes both calls.
    """
    x = torch.randn(3, 5)
    return Case(
        TwoPaths(),
        (x,),
        {"deep": False},
        expected={
            "pinned": ("deep.0", "deep.2", "out"),
            "hidden": ("trunk", "short"),
            "unseen": ("deep.0.weight", "deep.0.bias", "deep.2.weight", "deep.2.bias"),
        },
        further=(((x,), {"deep": True}),),
    )


class PlainTensor(nn.Module):
    """A scale a channel that is neither a parameter nor a buffer: an edit could not reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.scale = torch.linspace(0.5, 1.5, 8).view(8, 1, 1)
        self.next = nn.Conv2d(8, 6, 1)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv(x)) * self.scale
        return self.out(functional.relu(self.next(x)).mean((2, 3)))


@refused
def plain_tensor() -> Case:
    return Case(
        PlainTensor(),
        (images(side=5),),
        expected={"free": ("next",), "pinned": ("conv", "out")},
    )


class Flipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.next = nn.Conv2d(8, 6, 1)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv(x)).flip(1)
        return self.out(functional.relu(self.next(x)).mean((2, 3)))


@refused
def flipped_channels() -> Case:
    return Case(
        Flipped(),
        (images(side=5),),
        expected={"free": ("next",), "pinned": ("conv", "out"), "operation": ("flip",)},
    )
