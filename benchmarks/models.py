"""What it costs to adopt a whole model and to edit it, in training steps and beside Torch-Pruning.

Torch-Pruning is measured where it is installed: `pip install --no-deps torch-pruning==1.6.1`.
"""

import copy
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import grapnet as gn

from .timing import Timed, finish, interleaved, threads, times_faster, versions

BATCH = 32
TOKENS = 512
# the feed-forward block of GPT-2-small
MATRICES = ((768, 3072), (3072, 768))
BLOCKS = 4
# name -> the largest value that reaches the bar
BARS = {
    "other operators after adopting": 0,
    "halved ÷ plain model of that size": 1.01,
    "adopt ResNet-18, s": 0.15,
    "adopt GPT-2, s": 0.8,
    "adopt Llama-3-8B without weights, s": 3.0,
    "remove 10 % of a space, sizes foreseen before, steps": 0.03,
    "remove 10 % of a space, steps": 0.13,
    "remove 10 % of a space, s": 0.04,
    "halve DenseNet-121 ÷ Torch-Pruning": 0.5,
    "convolutions with half of their relations ÷ nn.Conv2d": 1.05,
    "convolutions with 10 % of their relations ÷ nn.Conv2d": 0.8,
    "convolutions of 4 blocks of channels ÷ nn.Conv2d": 0.6,
    # as fast as the graft, and 3 % for noise
    "Linear 768×3072 with 10 % of its relations ÷ graft, training step": 1.03,
    "Linear 768×3072 with 10 % of its relations ÷ graft, without gradients": 1.03,
    "Linear 3072×768 with 10 % of its relations ÷ graft, training step": 1.03,
    "Linear 3072×768 with 10 % of its relations ÷ graft, without gradients": 1.03,
}
GPU_BARS = {
    "other operators after adopting": 0,
    "adopted ÷ plain model, captured": 1.01,
    "halved ÷ plain model of that size, captured": 1.01,
    "remove 10 % of a space, sizes foreseen before, steps": 0.5,
    "convolutions with half of their relations ÷ nn.Conv2d": 1.25,
    "convolutions with half of their relations ÷ nn.Conv2d, captured": 1.25,
    "peak memory, normal, ÷ weights and state": 2.0,
    "peak memory, low, ÷ weights and state": 1.3,
}


def measure(*, fast: bool) -> dict[str, Any]:
    """Returns the whole table, on the GPU where there is one; `fast` shrinks the models and reaches
    no bar.
    """
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 4 if fast else 64
    repeats = 2 if fast else 9
    rows: dict[str, float] = {}
    with threads(1):
        rows["other operators after adopting"] = _other_operators(width, device)
        rows |= _halved(width, device, repeats)
        rows["adopt ResNet-18, s"] = _adopt_time(lambda: resnet18(width), images(2), repeats)
        rows |= _edit_times(width, device, repeats)
        rows |= _cut_at_random("half", 0.5, width, device, repeats)
        if device == "cpu":
            rows |= _cut_at_random("10 %", 0.9, width, device, repeats)
            rows |= _blocks(width, repeats)
            rows |= _matrices(fast)
        rows |= _transformers(fast)
        rows |= _densenet(fast)
        if device == "cuda":
            rows |= _captured(width, repeats)
            for memory in ("normal", "low"):
                rows[f"peak memory, {memory}, ÷ weights and state"] = _peak_memory(fast, memory)
    return {
        "benchmark": "models",
        "settings": {"device": device, "batch": BATCH, "width": width, "threads": 1},
        "versions": versions(),
        "rows": rows,
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Returns one line for every bar that the result misses."""
    found = []
    if result["settings"]["width"] != 64:
        found.append("the bars are for models of full size")
    bars = BARS
    if result["settings"]["device"] != "cpu":
        bars = GPU_BARS
    for name, bar in bars.items():
        value = result["rows"].get(name)
        if value is None:
            found.append(f"{name}: not measured")
        elif not value <= bar:
            found.append(f"{name}: {value:.3f}, the bar is {bar}")
    return found


def table(result: dict[str, Any]) -> str:
    """Returns the result as the table that the documentation shows."""
    bars = BARS if result["settings"]["device"] == "cpu" else GPU_BARS
    lines = ["| | measured | bar |", "|---|---:|---:|"]
    for name, value in result["rows"].items():
        lines.append(f"| {name} | {value:.3f} | {bars.get(name, '')} |")
    return "\n".join(lines)


def images(count: int = BATCH, device: str = "cpu") -> Tensor:
    """Returns random images of CIFAR's size."""
    return torch.randn(count, 3, 32, 32, device=device)


class BasicBlock(nn.Module):
    """Two convolutions beside the stream, which a projection widens where it must."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != width:
            projection = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the stream after the block."""
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y))
        if self.downsample is not None:
            x = self.downsample(x)
        return (x + y).relu()


def resnet18(width: int = 64) -> nn.Sequential:
    """Returns ResNet-18 for images of 32×32."""
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)]
    parts.append(nn.ReLU())
    inputs = width
    for stage in range(4):
        for block in range(2):
            stride = 2 if stage and block == 0 else 1
            parts.append(BasicBlock(inputs, width * 2**stage, stride))
            inputs = width * 2**stage
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    return nn.Sequential(*parts)


class DenseLayer(nn.Module):
    """Puts new channels behind those that it reads."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the channels that it read and the new ones."""
        y = self.conv1(self.norm1(x).relu())
        return torch.cat([x, self.conv2(self.norm2(y).relu())], 1)


def densenet121(growth: int = 32, blocks: tuple[int, ...] = (6, 12, 24, 16)) -> nn.Sequential:
    """Returns DenseNet-121 for images of 32×32."""
    width = 2 * growth
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
    for n, count in enumerate(blocks):
        for _ in range(count):
            parts.append(DenseLayer(width, growth))
            width += growth
        parts += [nn.BatchNorm2d(width), nn.ReLU()]
        if n + 1 < len(blocks):
            parts += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*parts)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _other_operators(width: int, device: str) -> float:
    """Returns how many operators of a training step differ after a model was adopted."""
    model = resnet18(width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    step = _step(model, optimizer, images(2, device))
    step()
    before = _operators(step)
    classes = [type(module) for module in model.modules()]
    net = gn.adopt(model, images(2, device), optimizer=optimizer)
    after = _operators(step)
    assert classes == [type(module) for module in net.model.modules()]
    pairs = zip(before, after, strict=False)
    return float(sum(one != other for one, other in pairs) + abs(len(before) - len(after)))


def _operators(step: Callable[[], None]) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    names = [event.name for event in profiler.events() or ()]
    return [name for name in names if name.startswith("aten::")]


def _halve(model: nn.Module, x: Tensor) -> None:
    """Adopts a model and removes half of the nodes of every space that can be edited."""
    net = gn.adopt(model, x)
    with net.edit(reason="halve") as edit:
        for space in net.spaces:
            if not space.pins:
                edit.remove_nodes(space[: len(space) // 2])


def _halved(width: int, device: str, repeats: int) -> dict[str, float]:
    """Returns the time of a step after halving all of ResNet-18, beside a plain one of that
    size.
    """
    x = images(device=device)
    halved = resnet18(width).to(device)
    _halve(halved, x[:2])
    plain = resnet18(width // 2).to(device)
    steps = {}
    for name, model in (("plain", plain), ("halved", halved)):
        steps[name] = _step(model, torch.optim.Adam(model.parameters()), x)
    faster = times_faster(steps, "plain", repeats=repeats)
    return {"halved ÷ plain model of that size": 1 / faster["halved"]}


def _adopt_time(make: Callable[[], nn.Module], x: Tensor, repeats: int) -> float:
    """Returns the median seconds of adopting a model."""
    taken = []
    for _ in range(repeats + 1):
        model = make()
        start = time.perf_counter()
        gn.adopt(model, x)
        taken.append(time.perf_counter() - start)
    # The first run imports parts of torch.
    return statistics.median(taken[1:])


def _edit_times(width: int, device: str, repeats: int) -> dict[str, float]:
    """Returns what removing 10 % of the widest stream costs with Adam attached."""
    model = resnet18(width).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    step = _step(model, optimizer, images(device=device))
    step()
    net = gn.adopt(model, images(2, device), optimizer=optimizer)
    space = net.space("9.conv2")
    count = len(space) // 10
    sizes = iter(range(count, count + repeats + 2))

    def remove(nodes: int) -> None:
        with net.edit(reason="thinner") as edit:
            edit.remove_nodes(space[:nodes])
        finish()

    remove(count - 1)
    net.undo()
    cases = {
        "step": Timed(step),
        # Every edit has a size of its own, which the gate has not seen.
        "edit": Timed(lambda: remove(next(sizes)), after=net.undo),
        "again": Timed(lambda: remove(count), after=net.undo),
    }
    taken = interleaved(cases, repeats)
    name = "remove 10 % of a space"
    return {
        f"{name}, sizes foreseen before, steps": taken["again"] / taken["step"],
        f"{name}, steps": taken["edit"] / taken["step"],
        f"{name}, s": taken["edit"],
    }


def _cut_at_random(
    left: str, fraction: float, width: int, device: str, repeats: int
) -> dict[str, float]:
    """Returns the time of a training step of convolutions that have lost a fraction of their
    relations, beside whole ones: the geometric mean over the four shapes of ResNet-18, and the
    largest. On a GPU also that of a step with Adam which is captured: launches bound the other one.
    """
    ratios = []
    captured = []
    for stage in range(4):
        size = 32 // 2**stage
        channels = width * 2**stage
        count = BATCH if device == "cpu" else 4 * BATCH
        x = torch.randn(count, channels, size, size, device=device)
        whole = _two_convolutions(channels).to(device)
        cut = _two_convolutions(channels).to(device)
        net = gn.adopt(cut, x[:1])
        with net.edit(reason="cut", allow_dead=True) as edit:
            edit.cut(net.relations("0").random(fraction=fraction))
        steps = {}
        for name, model in (("whole", whole), ("cut", cut)):
            steps[name] = partial(_backward, model[0], x)
        ratios.append(1 / times_faster(steps, "whole", repeats=repeats)["cut"])
        if device == "cuda":
            replays = {"whole": _captured_step(whole[0], x), "cut": _captured_step(cut[0], x)}
            captured.append(1 / times_faster(replays, "whole", repeats=repeats)["cut"])
    name = f"convolutions with {left} of their relations ÷ nn.Conv2d"
    rows = {name: statistics.geometric_mean(ratios), f"{name}, largest": max(ratios)}
    if captured:
        rows[f"{name}, captured"] = statistics.geometric_mean(captured)
    return rows


def _blocks(width: int, repeats: int) -> dict[str, float]:
    """Returns the time of a training step of convolutions whose channels form blocks in no order,
    beside whole ones: the geometric mean over the four shapes of ResNet-18, and the largest.
    """
    ratios = []
    for stage in range(4):
        size = 32 // 2**stage
        channels = width * 2**stage
        x = torch.randn(BATCH, channels, size, size)
        whole = _two_convolutions(channels)
        cut = _two_convolutions(channels)
        net = gn.adopt(cut, x[:1])
        reads = torch.randperm(channels) % BLOCKS
        writes = torch.randperm(channels) % BLOCKS
        with net.edit(reason="blocks") as edit:
            for block in range(BLOCKS):
                members = net.space("0", side="in")[(reads == block).nonzero().squeeze(1)]
                strangers = net.space("0")[(writes != block).nonzero().squeeze(1)]
                edit.cut(members.outgoing(to=strangers))
        steps = {}
        for name, model in (("whole", whole), ("cut", cut)):
            steps[name] = partial(_backward, model[0], x)
        ratios.append(1 / times_faster(steps, "whole", repeats=repeats)["cut"])
    name = f"convolutions of {BLOCKS} blocks of channels ÷ nn.Conv2d"
    return {name: statistics.geometric_mean(ratios), f"{name}, largest": max(ratios)}


def _matrices(fast: bool) -> dict[str, float]:
    """Returns the times of matrices of which nine tenths are cut, in an adopted model beside a
    graft, and beside the whole ones.
    """
    found = {}
    for reads, writes in MATRICES:
        if fast:
            reads, writes = reads // 16, writes // 16
        x = torch.randn(TOKENS // 16 if fast else TOKENS, reads, requires_grad=True)
        whole = nn.Linear(reads, writes)
        opened = copy.deepcopy(whole)
        net = gn.adopt(nn.Sequential(opened), x[:1].detach())
        with net.edit(reason="cut", allow_dead=True) as edit:
            edit.cut(net.relations("0").smallest(fraction=0.9))
        grafted = nn.ModuleDict({"part": nn.Sequential(copy.deepcopy(whole))})
        gn.graft(grafted, "part")
        part: Any = grafted["part"]
        with part.edit(reason="cut", allow_dead=True) as edit:
            edit.cut(part.layers[0].outgoing().smallest(fraction=0.9))
        models = {"whole": whole, "opened": opened, "graft": part}
        name = f"Linear {reads}×{writes} with 10 % of its relations"
        for mode, run in (("training step", _both_gradients), ("without gradients", _forward)):
            runs = {key: partial(run, model, x) for key, model in models.items()}
            faster = times_faster(runs, "graft", repeats=3 if fast else 31, seconds=0.05)
            found[f"{name} ÷ graft, {mode}"] = 1 / faster["opened"]
            found[f"{name} ÷ nn.Linear, {mode}"] = faster["whole"] / faster["opened"]
    return found


def _both_gradients(model: nn.Module, x: Tensor) -> None:
    x.grad = None
    _backward(model, x)


@torch.no_grad()
def _forward(model: nn.Module, x: Tensor) -> None:
    model(x)


def _two_convolutions(channels: int) -> nn.Sequential:
    first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    return nn.Sequential(first, nn.Conv2d(channels, 2, 1))


def _backward(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def _captured(width: int, repeats: int) -> dict[str, float]:
    """Returns the times of captured training steps: of an adopted model beside a plain one, and of
    a halved one beside a plain one of that size.
    """
    x = images(device="cuda")
    models = {}
    for name, size in (("plain", width), ("adopted", width), ("halved", width)):
        models[name] = resnet18(size).to("cuda")
    models["small"] = resnet18(width // 2).to("cuda")
    net = gn.adopt(models["adopted"], x[:2])
    _halve(models["halved"], x[:2])
    steps = {name: _captured_step(model, x) for name, model in models.items()}
    faster = times_faster(steps, "plain", repeats=3 * repeats)
    del net
    return {
        "adopted ÷ plain model, captured": 1 / faster["adopted"],
        "halved ÷ plain model of that size, captured": faster["small"] / faster["halved"],
    }


def _captured_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Returns a training step as one CUDA graph."""
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    step = _step(model, optimizer, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
        optimizer.step()
    held = (graph, model, optimizer, x)  # the graph writes into their memory

    def replay() -> None:
        held[0].replay()

    return replay


class _Wide(nn.Module):
    """A hidden layer beside the stream."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the stream after the block."""
        return x + self.down(self.up(x).relu())


def _peak_memory(fast: bool, memory: Literal["normal", "low"]) -> float:
    """Returns the memory that removing 10 % of the stream of a model of 10⁹ Parameters takes at
    most, in weights and state of Adam.
    """
    width, hidden, blocks = (64, 256, 2) if fast else (2048, 8192, 30)
    with torch.device("cuda"):
        parts = [_Wide(width, hidden) for _ in range(blocks)]
        model = nn.Sequential(nn.Linear(16, width), *parts, nn.Linear(width, 4))
        x = torch.randn(2, 16)
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer, x)()
    optimizer.zero_grad()
    net = gn.adopt(model, x, optimizer=optimizer)
    stream = net.space("0")
    stream.prove()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with net.edit(reason="thinner", memory=memory) as edit:
        edit.remove_nodes(stream[: len(stream) // 10])
    return torch.cuda.max_memory_allocated() / before


def _transformers(fast: bool) -> dict[str, float]:
    """Returns how long it takes to adopt models of Hugging Face, where it is installed."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    import transformers

    layers = 1 if fast else None
    ids = torch.randint(100, (1, 16))
    gpt2 = transformers.GPT2Config(n_layer=layers or 12)
    llama = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers or 32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        models = {
            "adopt GPT-2, s": transformers.GPT2LMHeadModel(gpt2),
            "adopt Llama-3-8B without weights, s": transformers.LlamaForCausalLM(llama),
        }
    found = {}
    for name, model in models.items():
        # A mask of four dimensions, as transformers looks at the values of others.
        mask = torch.zeros(1, 1, 16, 16, device="meta")
        taken = []
        for _ in range(2):
            start = time.perf_counter()
            gn.adopt(model, ids.to("meta"), attention_mask=mask, use_cache=False)
            taken.append(time.perf_counter() - start)
        found[name] = min(taken)
    return found


def _densenet(fast: bool) -> dict[str, float]:
    """Returns the seconds of adopting and halving DenseNet-121, and the ratio to Torch-Pruning."""
    model = densenet121(4, (2, 2)) if fast else densenet121()
    other = copy.deepcopy(model)
    x = images(1)
    start = time.perf_counter()
    _halve(model, x)
    taken = time.perf_counter() - start
    rows = {"halve DenseNet-121, s": taken}
    if importlib.util.find_spec("torch_pruning"):
        import torch_pruning  # pyright: ignore[reportMissingImports]

        start = time.perf_counter()
        pruner = torch_pruning.pruner.MetaPruner(
            other,
            x,
            importance=torch_pruning.importance.MagnitudeImportance(),
            pruning_ratio=0.5,
            ignored_layers=[other[-1]],
        )
        pruner.step()
        rows["halve DenseNet-121 ÷ Torch-Pruning"] = taken / (time.perf_counter() - start)
    return rows
