"""Sets `gn.adopt` side by side with Torch-Pruning, on models of torchvision and on its own nets.

`python -m tools.torch_pruning --checkout DIR --json FILE` adopts every model, halves all spaces in
one edit and makes a step of SGD, and does the same with Torch-Pruning at a ratio of 0.5. Then it
removes a third of the nodes of some spaces, in float64, and compares the outputs with those of a
copy whose readers of these nodes are 0. It fails when a removal that is called exact differs, when
a halved model cannot be trained, and when the shares of parameters left differ for no known reason.

Torch-Pruning's nets are read from `DIR/tests`, a checkout of its repository; without one they are
left out. Times are those of a busy machine unless `--jobs 1` is given.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.spaces import Adopted, Space
from tests.spaces.oracle import flattened, largest_difference, outputs_of, silenced
from tests.spaces.subjects import zeros_of
from tests.spaces.zoo import Case

SIZE = 64  # of images
# name -> the size of its images, where it is another one
SIZES = {"inception_v3": 96, "swin_t": 224}
# name -> arguments of torchvision
MODELS: dict[str, dict[str, Any]] = {
    # The slowest come first.
    "swin_t": {},
    "vit_b_16": {"image_size": SIZE},
    "vgg11_bn": {},
    "alexnet": {},
    "resnet18": {},
    "resnet50": {},
    "wide_resnet50_2": {},
    "resnext50_32x4d": {},
    "densenet121": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "efficientnet_b0": {},
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
    "squeezenet1_1": {},
    "mnasnet1_0": {},
    "regnet_y_400mf": {},
    "shufflenet_v2_x1_0": {},
    "convnext_tiny": {},
}


@dataclass(frozen=True)
class OwnNet:
    """A net of one of Torch-Pruning's test files, with the arguments and inputs of that file."""

    kind: str
    arguments: tuple[Any, ...]
    inputs: tuple[tuple[int, ...], ...]  # shapes without the batch
    outputs: tuple[str, ...]  # modules that write the outputs, which Torch-Pruning has to ignore


# name of a file, without "test_" -> its net
OWN: dict[str, OwnNet] = {
    "cascaded_concat": OwnNet("Net", (10,), ((10, 7, 7),), ("output",)),
    "concat": OwnNet("widedeep", (32,), ((32,),), ("lin2",)),
    "concat_split": OwnNet("Net", (10,), ((10, 7, 7),), ("block2.0",)),
    "split": OwnNet("Net", (128,), ((128, 7, 7),), ("block2_1.0", "block2_2.0")),
    "non_feature_dim_cat": OwnNet("Net", (512,), ((512, 7, 7),), ("conv2",)),
    "reshape": OwnNet("Net", (), ((512,),), ("final",)),
    "single_channel_output": OwnNet("Model", (), ((3, 224, 224),), ("conv3",)),
    "dependency_lenet": OwnNet("Model", (), ((1, 28, 28),), ("fc3",)),
    "fully_connected_layers": OwnNet("FullyConnectedNet", (128, 10, 256), ((128,),), ("fc3",)),
    "multiple_inputs_and_outputs": OwnNet(
        "FullyConnectedNet", ([128, 64], [32, 32]), ((128,), (64,)), ("fc1", "fc2", "fc3")
    ),
    "customized_layer": OwnNet("FullyConnectedNet", (128, 10, 256), ((128,),), ("fc2",)),
    "unused_parameters": OwnNet("FullyConnectedNet", (128, 10, 256), ((128,),), ("fc2",)),
}
# name -> why another share of parameters is left
KNOWN: dict[str, str] = {
    "resnext50_32x4d": "groups are halved beside the channels in a group",
    "regnet_y_400mf": "groups are halved beside the channels in a group",
    "concat": "of 3 nodes 2 stay, and 1 in Torch-Pruning",
    "concat_split": "Torch-Pruning leaves block1.3 whole, a part of which is an output",
    "split": "Torch-Pruning leaves block1.3 whole, whose channels are split",
    "reshape": "Torch-Pruning leaves Linear whole, whose features become channels",
}
# name -> how the names of the spaces end that can be halved together: the hidden layers. The stream
# and the heads depend on each other through numbers that are not found.
PARTLY = {"vit_b_16": ".mlp.0", "swin_t": ".mlp.0"}
MOST_APART = 0.005  # between the shares of parameters left
TOLERANCE = 1e-10  # of an output, relative to its largest value
MOST_SPACES = 6  # of a model, of which nodes are removed
BATCH = 2


@dataclass(frozen=True)
class Task:
    """One measurement of one model, in a process of its own."""

    part: str
    name: str
    device: str
    checkout: Path | None
    seed: int


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode, its inputs, and the modules that write its outputs."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: list[nn.Module]


def main() -> int:
    """Returns 1 when a row has a problem."""
    parser = argparse.ArgumentParser(prog="python -m tools.torch_pruning", description=__doc__)
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="of Torch-Pruning, for tests/")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=120, help="seconds for each measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    chosen = parser.parse_args()
    names = list(MODELS)
    if chosen.checkout:
        names += OWN
    names = chosen.models or names
    unknown = set(names) - {*MODELS, *OWN}
    if unknown:
        parser.error(f"no such models: {', '.join(sorted(unknown))}")

    # Children that are spawned read it as they import torch.
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.perf_counter()
    tasks = []
    for name in names:
        for part in PARTS:
            tasks.append(Task(part, name, chosen.device, chosen.checkout, chosen.seed))
    rows = measure(tasks, chosen.jobs, chosen.limit)
    result = {
        "rows": rows,
        "settings": {"device": chosen.device, "jobs": chosen.jobs, "seed": chosen.seed},
        "versions": _versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(table(rows))
    print(summary(rows))
    failed = False
    for row in rows:
        for problem in row["problems"]:
            failed = True
            print(f"{row['name']}: {problem}")
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(failed)


def measure(tasks: Sequence[Task], jobs: int, limit: float) -> list[dict[str, Any]]:
    """Returns a row per model, in order; a measurement that fails leaves its error in it."""
    futures: list[Future[dict[str, Any]]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for task in tasks:
            futures.append(pool.submit(_limited, task, limit))
    rows: dict[str, dict[str, Any]] = {}
    for task, future in zip(tasks, futures, strict=True):
        row = rows.setdefault(task.name, {"name": task.name})
        row[task.part] = future.result()
    for row in rows.values():
        row["problems"] = problems(row)
    return list(rows.values())


def _limited(task: Task, limit: float) -> dict[str, Any]:
    """Runs a measurement in a process of its own, which is killed when its time is over."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, task), daemon=True)
    process.start()
    # Without this copy of it, the end of the process ends the wait.
    sender.close()
    found: dict[str, Any] = {"error": f"over {limit:g} s"}
    try:
        if receiver.poll(limit):
            found = receiver.recv()
    except EOFError:
        process.join()
        found = {"error": f"the process ended with {process.exitcode}"}
    process.kill()
    process.join()
    outcome = found.get("error", "done")
    print(f"{task.name}, {task.part}: {outcome}", file=sys.stderr, flush=True)
    return found


def _send(sender: Connection, task: Task) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        torch.manual_seed(task.seed)
        found = PARTS[task.part](subject_of(task), task)
    except Exception as error:
        found = {"error": _error(error)}
    sender.send(found)


def _error(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def subject_of(task: Task) -> Subject:
    """Returns a model of torchvision, or one of Torch-Pruning's own nets."""
    if task.checkout is not None:
        # Torch-Pruning itself comes from there where it is not installed.
        sys.path.append(str(task.checkout))
    if task.name in OWN:
        assert task.checkout is not None, "Torch-Pruning's own nets need --checkout"
        return own_net(task.name, task.checkout)
    from torchvision import models  # pyright: ignore[reportMissingImports]

    model = models.get_model(task.name, weights=None, **MODELS[task.name])
    size = SIZES.get(task.name, SIZE)
    classifiers: list[nn.Module] = []
    for module in model.modules():
        width = getattr(module, "out_features", None) or getattr(module, "out_channels", None)
        if width == 1000:
            classifiers.append(module)
    return Subject(model.eval(), (torch.randn(BATCH, 3, size, size),), classifiers)


def own_net(name: str, checkout: Path) -> Subject:
    """Returns the net of one of Torch-Pruning's test files."""
    net = OWN[name]
    spec = importlib.util.spec_from_file_location(
        f"torch_pruning_{name}", checkout / f"tests/test_{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = getattr(module, net.kind)(*net.arguments)
    for parameter in model.parameters():
        # Some files leave memory as it was.
        nn.init.normal_(parameter, std=0.1)
    inputs = tuple(torch.randn(BATCH, *shape) for shape in net.inputs)
    return Subject(model.eval(), inputs, [model.get_submodule(path) for path in net.outputs])


def halving(subject: Subject, task: Task) -> dict[str, Any]:
    """Adopts a model, removes half of the nodes of every space, and makes a training step."""
    model, inputs = _placed(subject, task.device)
    # The first adoption imports parts of torch.
    gn.adopt(nn.Linear(2, 2), torch.randn(1, 2))
    clock = _Clock(task.device)
    net = gn.adopt(model, *inputs)
    found: dict[str, Any] = {"adopt_s": clock.lap()}
    found["spaces"] = len(net.spaces)
    found["editable"] = sum(not space.pins for space in net.spaces)
    found["pins"] = dict(Counter(pin for space in net.spaces for pin in space.pins))
    before = _parameters(model)
    clock.lap()
    found["halved"] = halve(net, PARTLY.get(task.name, ""))
    found["halve_s"] = clock.lap()
    found["verdicts"] = dict(Counter(space.verdict for space in net.spaces))
    found["left"] = _parameters(model) / before
    found["step"] = _tried(lambda: step(model, inputs))
    return found


def halve(net: Adopted, suffix: str = "") -> int:
    """Removes half of the nodes of every space in one edit; returns how many spaces that were.

    Args:
        net: an adopted model.
        suffix: how the names of the spaces end; all by default.
    """
    count = 0
    with net.edit(reason="halve") as edit:
        for space in net.spaces:
            if not space.pins and space.name.endswith(suffix):
                edit.remove_nodes(space[: len(space) // 2])
                count += 1
    return count


def pruning(subject: Subject, task: Task) -> dict[str, Any]:
    """Prunes a model with Torch-Pruning at a ratio of 0.5, and makes a training step."""
    # As a statement, pyright takes it for this file.
    peer: Any = importlib.import_module("torch_pruning")
    model, inputs = _placed(subject, task.device)
    before = _parameters(model)
    clock = _Clock(task.device)
    pruner = peer.pruner.MetaPruner(
        model,
        inputs,
        importance=peer.importance.MagnitudeImportance(),
        pruning_ratio=0.5,
        ignored_layers=subject.outputs,
    )
    found: dict[str, Any] = {"build_s": clock.lap()}
    pruner.step()
    found["halve_s"] = clock.lap()
    found["left"] = _parameters(model) / before
    found["step"] = _tried(lambda: step(model, inputs))
    return found


def exactness(subject: Subject, task: Task) -> dict[str, Any]:
    """Removes nodes of some spaces of a model in float64, and compares each time."""
    model = subject.model.double()
    inputs = tuple(x.double() for x in subject.inputs)
    settle(model, inputs)
    outcomes = removals(model, inputs, most=MOST_SPACES, seed=task.seed)
    return {
        "counts": dict(Counter(outcome.kind for outcome in outcomes)),
        "removals": [vars(outcome) for outcome in outcomes],
    }


@dataclass(frozen=True)
class Removal:
    """What removing a third of the nodes of a space did, relative to the largest output."""

    space: str
    # "equal", "different", "without effect", "under a norm", "refused", or another verdict
    kind: str
    error: float | None = None  # from the model whose readers are 0
    effect: float | None = None  # of setting the readers to 0


def removals(
    model: nn.Module, inputs: tuple[Tensor, ...], *, most: int, seed: int
) -> list[Removal]:
    """Removes a third of the nodes of at most so many spaces, each from the whole model.

    Args:
        model: a model in float64, in evaluation mode, which is the same afterwards.
        inputs: what it is called with.
        most: how many spaces, spread evenly over those that can be edited.
        seed: of the choice of spaces and of nodes.
    """
    net = gn.adopt(model, *inputs)
    generator = random.Random(seed)
    free = [space for space in net.spaces if not space.pins]
    count = min(most, len(free))
    outcomes = []
    for n in range(count):
        first = n * len(free) // count
        last = (n + 1) * len(free) // count
        space = free[generator.randrange(first, last)]
        rows = generator.sample(range(len(space)), max(1, len(space) // 3))
        outcomes.append(_removal(net, space, sorted(rows), Case(model, inputs)))
    return outcomes


def _removal(net: Adopted, space: Space, rows: list[int], case: Case) -> Removal:
    whole = outputs_of(case.model, case)
    silent = outputs_of(silenced(case.model, zeros_of(space, rows)), case)
    try:
        with net.edit(reason="compare") as edit:
            edit.remove_nodes(space[rows])
    except gn.errors.EditError:
        return Removal(space.name, "refused")
    smaller = outputs_of(case.model, case)
    verdict = space.verdict
    net.undo()
    error = _apart(smaller, silent)
    effect = _apart(whole, silent)
    kind: str = verdict
    if verdict == "exact":
        kind = "different"
        if error <= TOLERANCE:
            kind = "equal" if effect > TOLERANCE else "without effect"
    if verdict == "normalised":
        kind = "under a norm"
    return Removal(space.name, kind, error, effect)


def _apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest difference of outputs, relative to the largest value of each."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        scale = max(other.abs().max().item(), torch.finfo(torch.float64).tiny)
        worst = max(worst, largest_difference([one], [other]) / scale)
    return worst


def settle(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Lets every node have an effect on the outputs.

    Parameters that are all but 0 are drawn; every BatchNorm gets the statistics of the inputs.
    """
    for parameter in model.parameters():
        if parameter.abs().max() < 1e-3:
            nn.init.normal_(parameter, std=0.1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
    model.train()
    with torch.no_grad():
        model(*inputs)
    model.eval()


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Makes one step of SGD in training mode; raises ValueError if the loss is not finite."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = torch.zeros((), device=inputs[0].device)
    for output in flattened(model(*inputs)):
        loss = loss + output.square().mean()
    if not loss.isfinite():
        raise ValueError(f"the loss is {loss.item()}")
    loss.backward()
    optimizer.step()


def _placed(subject: Subject, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns a model and its inputs on a device, after a first forward pass there."""
    model = subject.model.to(device)
    inputs = tuple(x.to(device) for x in subject.inputs)
    with torch.no_grad():
        model(*inputs)
    return model, inputs


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _tried(run: Callable[[], None]) -> str:
    """Returns "runs", or the error."""
    try:
        run()
    except Exception as error:
        return _error(error)
    return "runs"


class _Clock:
    """Seconds between laps, with all work of a GPU done."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._last = 0.0
        self.lap()

    def lap(self) -> float:
        """Returns the seconds since the last lap."""
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()
        before = self._last
        self._last = time.perf_counter()
        return self._last - before


PARTS: dict[str, Callable[[Subject, Task], dict[str, Any]]] = {
    "ours": halving,
    "exact": exactness,
    "theirs": pruning,
}


def problems(row: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a row; nothing that Torch-Pruning alone cannot do is."""
    ours = row["ours"]
    exact = row["exact"]
    theirs = row["theirs"]
    found = []
    if "error" in ours:
        found.append(f"not halved: {ours['error']}")
    elif ours["step"] != "runs":
        found.append(f"no step after halving: {ours['step']}")
    if "error" in exact:
        found.append(f"nothing compared: {exact['error']}")
    for removal in exact.get("removals", ()):
        if removal["kind"] == "different":
            found.append(f"{removal['space']} is called exact, differs by {removal['error']:.1e}")
    if _runs(ours) and _runs(theirs) and row["name"] not in {*KNOWN, *PARTLY}:
        apart = abs(ours["left"] - theirs["left"])
        if apart > MOST_APART:
            found.append(f"{ours['left']:.4f} of the parameters left, not {theirs['left']:.4f}")
    return found


def _runs(part: dict[str, Any]) -> bool:
    return part.get("step") == "runs"


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown."""
    lines = [
        "| model | adopt, s | halve, s | exact / normalised / other / pinned | left | step"
        " | Torch-Pruning: build, s | halve, s | left | step"
        " | removals equal | different | under a norm | refused | other | |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        ours = row["ours"]
        theirs = row["theirs"]
        counts = row["exact"].get("counts", {})
        named = ("equal", "different", "under a norm", "refused")
        other = sum(count for kind, count in counts.items() if kind not in named)
        cells = [row["name"], _number(ours, "adopt_s"), _number(ours, "halve_s")]
        cells += [_verdicts(ours), _number(ours, "left", 4), _outcome(ours)]
        cells += [_number(theirs, "build_s"), _number(theirs, "halve_s")]
        cells += [_number(theirs, "left", 4), _outcome(theirs)]
        cells += [str(counts.get(kind, 0)) for kind in named]
        cells += [str(other), _remark(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(part: dict[str, Any], key: str, digits: int = 2) -> str:
    if key not in part:
        return "–"
    return f"{part[key]:.{digits}f}"


def _verdicts(ours: dict[str, Any]) -> str:
    verdicts = Counter(ours.get("verdicts", {}))
    shown = [verdicts.pop(name, 0) for name in ("exact", "normalised", "pinned")]
    return f"{shown[0]} / {shown[1]} / {verdicts.total()} / {shown[2]}"


def _outcome(part: dict[str, Any]) -> str:
    """Returns "runs", or the name of the error."""
    outcome = part.get("error") or part["step"]
    return outcome.partition(":")[0]


def _remark(row: dict[str, Any]) -> str:
    remarks = []
    if row["name"] in KNOWN:
        remarks.append(KNOWN[row["name"]])
    if row["name"] in PARTLY and "halved" in row["ours"]:
        halved = row["ours"]["halved"]
        remarks.append(f"only {halved} of {row['ours']['editable']} spaces halved")
    return "; ".join(remarks)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the totals in a sentence each."""
    kinds: Counter[str] = Counter()
    halved = 0
    pruned = 0
    alike = 0
    for row in rows:
        kinds.update(row["exact"].get("counts", {}))
        halved += _runs(row["ours"])
        pruned += _runs(row["theirs"])
        if _runs(row["ours"]) and _runs(row["theirs"]):
            alike += abs(row["ours"]["left"] - row["theirs"]["left"]) <= MOST_APART
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return (
        f"\n{len(rows)} models: {halved} train after halving, {pruned} after Torch-Pruning;"
        f" {alike} have the same share of parameters left.\n"
        f"{kinds.total()} removals: {counts}.\n"
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "grapnet": gn.__version__}
    for name in ("torch", "torchvision", "torch-pruning"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    raise SystemExit(main())
