"""Known defects: every test marked as an expected failure states the behaviour that is wanted.

A mark is strict, so the change that cures a defect has to remove it. Tests without a mark are
controls: they show that the failure beside them comes from the defect and not from the set-up.

Run as a program, this file carries out one of PROGRAMS, which may end its process.
"""

import errno
import functools
import gc
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.autograd import forward_ad
from torch.optim import Optimizer

import grapnet as gn

PACKAGE = str(Path(gn.__file__).parent)
X = torch.linspace(-1, 1, 20).reshape(5, 4)
DID_NOT_RAISE = pytest.fail.Exception
TORCH_SCRIPTS = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
SPREAD = 5  # interrupts come at every fifth line that a call runs; 1 visits all of them


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class SetupError(Exception):
    """The premise of a test does not hold, so that its failure would mean nothing."""


def ensure(premise: bool) -> None:
    """Raises SetupError, which no mark in this file expects, where a premise does not hold."""
    if not premise:
        raise SetupError


def trained(backend: str = "reference") -> tuple[gn.GrapNet, Optimizer]:
    """Returns a small net with gradients, and its attached optimizer with state."""
    torch.manual_seed(0)
    net = gn.GrapNet([4, 3, 2])
    net.execution.use(backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    gn.attach(optimizer, net)
    net(X).square().sum().backward()
    optimizer.step()
    return net, optimizer


def exchange_one_relation(net: gn.GrapNet) -> None:
    """Cuts one relation and grows another, so that every Parameter keeps its size."""
    node = net.layers[0][0]
    with net.edit(reason="exchange") as edit:
        edit.cut(node, slots=[0])
        edit.connect(node, node.children[0], weights=0.7)  # a newborn in the last slot


def can_run(backend: str) -> bool:
    """Returns whether a backend runs here; the compiled one is not installed everywhere."""
    net = gn.GrapNet([2, 2])
    try:
        net.execution.use(backend)
    except gn.PlanError:
        return False
    return True


def run_program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs one of the PROGRAMS of this file in a process of its own, with the same library."""
    command = [sys.executable, __file__, name, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(PACKAGE).parent)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


# Line events: places inside of a call of the library where something happens


Place = tuple[str, int]  # a file of the library and a line in it


@functools.cache
def with_lines(path: str) -> frozenset[int]:
    """Returns the numbers of the lines of a file that open a `with` block."""
    lines = Path(path).read_text().splitlines()
    return frozenset(n for n, line in enumerate(lines, 1) if line.lstrip().startswith("with "))


class LineHook:
    """A trace function that calls `reached(number)` at every line event in the library's files.

    Leaving a `with` block is an event at its first line. It is left out: an error there would skip
    the `__exit__` of a context manager, such as `torch.no_grad()`, that is not the library's own.
    """

    def __init__(self, reached: Callable[[int], None]) -> None:
        self.reached = reached
        self.places: list[Place] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE):
            return None
        openings = with_lines(path)
        entered: set[int] = set()

        def local(frame: FrameType, event: str, argument: object) -> Any:
            line = frame.f_lineno
            if event != "line" or line in entered:
                return local
            if line in openings:
                entered.add(line)
            self.places.append((path, line))
            self.reached(len(self.places) - 1)
            return local

        return local


Traced = Callable[[gn.GrapNet, LineHook], None]  # sets the hook where the traced part begins


@contextmanager
def trace_kept() -> Iterator[None]:
    """Restores the trace function after the block, in which no garbage is collected."""
    previous = sys.gettrace()
    gc.disable()
    try:
        yield
    finally:
        sys.settrace(previous)
        gc.enable()


def lines_of(action: Traced, net: gn.GrapNet) -> list[int]:
    """Returns the numbers of the first and the last event at every line that `action` runs."""
    hook = LineHook(lambda number: None)
    with trace_kept():
        action(net, hook)
    first: dict[Place, int] = {}
    last: dict[Place, int] = {}
    for number, place in enumerate(hook.places):
        first.setdefault(place, number)
        last[place] = number
    return sorted({*first.values(), *last.values()})


def interrupt(
    action: Traced, net: gn.GrapNet, number: int, error: type[BaseException]
) -> tuple[Place, type[BaseException] | None]:
    """Raises `error` at one line event of `action`; returns the line and the error that left."""

    def reached(present: int) -> None:
        if present == number:
            raise error

    hook = LineHook(reached)
    raised = None
    with trace_kept():
        try:
            action(net, hook)
        except (Exception, error) as met:
            raised = type(met)  # the error itself would keep the frames of the call alive
    return hook.places[-1], raised


def observed(net: gn.GrapNet, optimizer: Optimizer) -> dict[str, Any]:
    """Returns everything that belongs to one version of a net, as plain data."""
    gn.check(net)
    found: dict[str, Any] = {
        "version": net.version,
        "commits": len(net.history),
        "sizes": net.sizes,
        "nodes": [layer.uids.tolist() for layer in net.layers],
        "output": net(X).tolist(),
    }
    for name, tensor in net.state_dict().items():
        found[name] = tensor.tolist()
    for name, parameter in net.named_parameters():
        found[f"{name} has a gradient"] = parameter.grad is not None
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.tolist()
        for key, value in optimizer.state[parameter].items():
            found[f"{key} of {name}"] = value.tolist()
    return found


FIRST_CALLS: list[Callable[[gn.GrapNet], object]] = [
    gn.check,
    lambda net: net(X),
    lambda net: net.state_dict(),
]


def outcomes(
    action: Traced, error: type[BaseException], spread: int
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields the place of every interrupt of a call, and what the calls after it found.

    The first of these calls differs from one interrupt to the next.
    """
    net, optimizer = trained()
    numbers = lines_of(action, net)
    for turn, number in enumerate(numbers[::-spread]):  # the last line is one of them
        net, optimizer = trained()
        place, raised = interrupt(action, net, number, error)
        ensure(torch.is_grad_enabled())
        try:
            FIRST_CALLS[turn % len(FIRST_CALLS)](net)
            found = observed(net, optimizer)
        except Exception as met:
            found = {"error": repr(met)}
        if raised is not error:
            found["left the call"] = raised
        yield place, found


# D1, cured: an interrupt in a commit; `tests/core/test_interrupts.py` has the other operations


def commit_an_edit(net: gn.GrapNet, hook: LineHook) -> None:
    with net.edit(reason="prune and grow") as edit:
        edit.cut(net.layers[0][1], slots=[0])
        new = edit.add_nodes(1, 1, bias=0.3)
        edit.connect(net.layers[0][:2], new, weights=0.5)
        sys.settrace(hook)  # the end of the block is the commit


def try_an_edit(net: gn.GrapNet, hook: LineHook) -> None:
    with net.edit(reason="try", trial=True) as edit:
        edit.cut(net.layers[0][1], slots=[0])
        sys.settrace(hook)
        edit.commit()


def open_and_leave_an_edit(net: gn.GrapNet, hook: LineHook) -> None:
    sys.settrace(hook)
    with net.edit(reason="empty"):
        pass


INTERRUPTS = pytest.mark.parametrize(
    ("error", "spread"),
    [(KeyboardInterrupt, SPREAD), (MemoryError, 4 * SPREAD)],
    ids=["interrupt", "memory"],
)


@INTERRUPTS
def test_an_interrupted_commit_leaves_one_version(error: type[BaseException], spread: int) -> None:
    before = observed(*trained())
    net, optimizer = trained()
    with trace_kept():
        commit_an_edit(net, LineHook(lambda number: None))
    after = observed(net, optimizer)
    found = list(outcomes(commit_an_edit, error, spread))
    ensure(any(outcome == before for _, outcome in found))
    ensure(any(outcome == after for _, outcome in found))
    torn = [place for place, outcome in found if outcome not in (before, after)]
    assert torn == []


@INTERRUPTS
def test_an_interrupted_trial_is_taken_back(error: type[BaseException], spread: int) -> None:
    before = observed(*trained())
    net, optimizer = trained()
    with trace_kept():
        try_an_edit(net, LineHook(lambda number: None))
    ensure(observed(net, optimizer) == before)
    found = list(outcomes(try_an_edit, error, spread))
    ensure(any(outcome == before for _, outcome in found))
    stayed = [place for place, outcome in found if outcome != before]
    assert stayed == []


def test_an_interrupt_leaves_no_edit_open() -> None:
    open_for_ever = []
    for number in lines_of(open_and_leave_an_edit, gn.GrapNet([3, 2])):
        net = gn.GrapNet([3, 2])
        place, _ = interrupt(open_and_leave_an_edit, net, number, KeyboardInterrupt)
        try:
            with net.edit():
                pass
        except gn.EditError:
            open_for_ever.append(place)
    assert open_for_ever == []


# D4: reading while another thread edits


ENDINGS = ["before", "after", "values of no version", "an error"]


def grow_and_cut(net: gn.GrapNet, hook: LineHook) -> None:
    with net.edit(reason="grow and cut") as edit:
        edit.cut(net.layers[0][0], slots=[0])
        new = edit.add_nodes(1, 3000, bias=0.25)
        edit.connect(net.layers[0], new, weights=0.125)
        edit.connect(new, net.layers[2], weights=0.001)
        sys.settrace(hook)


class Reader:
    """Runs forward passes, and names the version of the net that each of them saw."""

    def __init__(self, backend: str) -> None:
        self.x = X.double()
        twin = self._net(backend)
        with torch.no_grad():
            self.before = twin(self.x)
            self.numbers = lines_of(grow_and_cut, twin)
            twin.execution.use("reference")
            self.after = twin(self.x)
        self.net = self._net(backend)
        ensure(self.read() == "before")  # makes the plans that the twin had when it was edited

    def _net(self, backend: str) -> gn.GrapNet:
        torch.manual_seed(0)
        net = gn.GrapNet([4, 30, 2], density=0.5, dtype=torch.float64)
        net.execution.use(backend)
        return net

    def read(self) -> str:
        try:
            with torch.no_grad():
                output = self.net(self.x)
        except Exception:
            return "an error"
        if torch.allclose(output, self.before):
            return "before"
        if torch.allclose(output, self.after):
            return "after"
        return "values of no version"

    def read_in_a_thread(self) -> str:
        answers: list[str] = []
        thread = threading.Thread(target=lambda: answers.append(self.read()), daemon=True)
        thread.start()
        thread.join(timeout=30)  # of use only where the reader waits for the editor
        if not answers:
            return "no answer"
        return answers[0]

    def read_in_a_copy_of_the_process(self) -> str:
        """Returns what `read` does, or the signal that ended it; this process stays intact."""
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (2, 2))  # broken memory may loop for ever
            os._exit(ENDINGS.index(self.read()))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status)).name
        return ENDINGS[os.WEXITSTATUS(status)]

    def read_during_a_commit(self, read: Callable[[], str], last: int | None = None) -> list[str]:
        """Returns what `read` finds at the lines of a commit, or the last of them, and after it."""
        numbers = self.numbers
        if last is not None:
            numbers = numbers[-last:]
        wanted = set(numbers)
        found: list[str] = []

        def reached(number: int) -> None:
            if number in wanted and "no answer" not in found:
                found.append(read())

        with trace_kept():
            grow_and_cut(self.net, LineHook(reached))
        found.append(read())
        ensure(found[0] == "before")
        ensure("after" in found)
        return found


@pytest.mark.parametrize("backend", ["reference", "dense", "family"])
def test_a_reader_beside_a_commit_finds_one_version(backend: str) -> None:
    reader = Reader(backend)
    found = reader.read_during_a_commit(reader.read_in_a_thread)
    assert set(found) == {"before", "after"}
    assert found[-1] == "after"


def program_reads_with_kernels() -> None:
    """Prints what copies of this process read at the last lines of a commit."""
    reader = Reader("sparse")
    found = reader.read_during_a_commit(reader.read_in_a_copy_of_the_process, last=250)
    print(json.dumps(found))


def test_a_reader_with_kernels_beside_a_commit_finds_one_version() -> None:
    if not can_run("sparse"):
        pytest.skip("the compiled kernels are not installed")
    done = run_program("reads_with_kernels")
    ensure(done.returncode == 0)
    found = json.loads(done.stdout)
    assert set(found) == {"before", "after"}
    assert found[-1] == "after"


# D5: optimizers that keep a copy of the weights


class Pulled(Optimizer):
    """SGD on a copy of the weights, which then move half-way towards the copy."""

    def __init__(self, parameters: Iterable[Tensor], name: str) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.name = name  # of the copy in the state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if self.name not in state:
                state[self.name] = parameter.clone()
            state[self.name].sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
            parameter.lerp_(state[self.name], 0.5)


def train(net: gn.GrapNet, optimizer: Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(X).square().sum().backward()
        optimizer.step()


def newborn_after_idle_steps(
    optimizer_of: Callable[[gn.GrapNet], Optimizer], copies: tuple[str, ...] | None = None
) -> float:
    """Returns a weight that came with 0.7, after three steps without any gradient."""
    torch.manual_seed(0)
    net = gn.GrapNet([4, 3, 2])
    optimizer = optimizer_of(net)
    gn.attach(optimizer, net, copies=copies)
    train(net, optimizer)
    exchange_one_relation(net)
    for _ in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return float(net.layers[0][0].W_alloc[0, -1].detach())


@pytest.mark.parametrize(("name", "copies"), [("z", ("z",)), ("x0", None)])
def test_a_copy_of_the_weights_starts_at_the_newborn_weight(
    name: str, copies: tuple[str, ...] | None
) -> None:
    newborn = newborn_after_idle_steps(lambda net: Pulled(net.parameters(), name), copies)
    assert newborn == pytest.approx(0.7)


def test_an_unknown_copy_of_the_weights_follows_or_is_refused() -> None:
    try:
        newborn = newborn_after_idle_steps(lambda net: Pulled(net.parameters(), "anchor"))
    except gn.OptimizerError:
        return
    assert newborn == pytest.approx(0.7)


def test_a_newborn_weight_without_a_gradient_stays_under_plain_sgd() -> None:
    newborn = newborn_after_idle_steps(lambda net: torch.optim.SGD(net.parameters(), lr=0.01))
    assert newborn == pytest.approx(0.7)


# D6: optimizer state that no check sees


class Nested(Optimizer):
    """SGD with two momenta, as AggMo has them, which the state holds in a list or a dict."""

    def __init__(self, parameters: Iterable[Tensor], kind: type) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "momenta" not in state:
                pairs = [(beta, torch.zeros_like(parameter)) for beta in (0.0, 0.9)]
                state["momenta"] = self.kind(pairs)
            for beta, momentum in dict(state["momenta"]).items():
                momentum.mul_(beta).add_(parameter.grad)
                parameter.sub_(momentum, alpha=self.param_groups[0]["lr"] / 2)


class Flat(Optimizer):
    """SGD with the momentum of all Parameters in one vector, an attribute of the optimizer."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.sizes = [parameter.numel() for parameter in self.param_groups[0]["params"]]
        self.momentum = torch.zeros(sum(self.sizes))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        parameters = self.param_groups[0]["params"]
        gradients = [parameter.grad.flatten() for parameter in parameters]
        self.momentum.mul_(0.9).add_(torch.cat(gradients))
        for parameter, part in zip(parameters, self.momentum.split(self.sizes), strict=True):
            parameter.sub_(part.view_as(parameter), alpha=self.param_groups[0]["lr"])


def step_after_an_edit(net: gn.GrapNet, optimizer: Optimizer) -> None:
    train(net, optimizer)
    exchange_one_relation(net)
    train(net, optimizer, steps=1)


@pytest.mark.parametrize("kind", [list, dict])
def test_nested_state_that_has_not_followed_an_edit_raises(kind: type) -> None:
    net = gn.GrapNet([4, 3, 2])
    with pytest.raises(gn.OptimizerError):
        step_after_an_edit(net, Nested(net.parameters(), kind))


def test_plain_state_that_has_not_followed_an_edit_raises() -> None:
    net = gn.GrapNet([4, 3, 2])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    with pytest.raises(gn.OptimizerError):
        step_after_an_edit(net, optimizer)


def test_an_attached_optimizer_with_hidden_state_is_refused_or_warned_of() -> None:
    net = gn.GrapNet([4, 3, 2])
    optimizer = Flat(net.parameters())
    refused = False
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            gn.attach(optimizer, net)
            step_after_an_edit(net, optimizer)
        except gn.OptimizerError:
            refused = True
    assert refused or warned


def test_an_attached_optimizer_without_any_state_is_neither() -> None:
    net = gn.GrapNet([4, 3, 2])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    gn.attach(optimizer, net)
    step_after_an_edit(net, optimizer)  # a warning is an error here


@TORCH_SCRIPTS
def test_an_optimizer_in_the_backward_pass_goes_on_or_is_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward  # takes a second

    net = gn.GrapNet([4, 3, 2])
    weight = net.transitions[1].weight
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    start = weight.detach().clone()
    net(X).square().sum().backward()
    ensure(not torch.equal(weight, start))
    try:
        exchange_one_relation(net)
        edited = weight.detach().clone()
        net(X).square().sum().backward()
    except gn.GrapNetError:
        return
    assert not torch.equal(weight, edited)


# D7: a long history


def rename_a_node(net: gn.GrapNet, times: int) -> None:
    for number in range(times):
        with net.edit(reason="rename") as edit:
            edit.set_owner(net.layers[1][0], f"owner {number % 2}")


def names_and_header(path: Path, net: gn.GrapNet) -> tuple[int, int]:
    """Returns how many tensors a file holds, and the bytes of their names and the metadata."""
    gn.save(path, net)
    with safe_open(path, framework="pt") as file:
        tensors = len(list(file.keys()))
    header = int.from_bytes(path.read_bytes()[:8], "little")
    return tensors, header


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """How many tensors and bytes of header a commit adds to a file, over 200 commits."""
    path = tmp_path_factory.mktemp("history") / "net.safetensors"
    net = gn.GrapNet([4, 3, 2])
    rename_a_node(net, times=100)
    tensors, header = names_and_header(path, net)
    rename_a_node(net, times=200)
    more_tensors, more_header = names_and_header(path, net)
    ensure(len(gn.load(path).history) == 300)
    return (more_tensors - tensors) / 200, (more_header - header) / 200


def test_a_commit_adds_no_tensors_to_later_files(growth: tuple[float, float]) -> None:
    tensors, _ = growth
    assert tensors == 0


def test_a_file_has_room_for_a_long_history(growth: tuple[float, float]) -> None:
    _, header = growth
    assert header < 500  # bytes: a header of 100 MB then holds 200,000 commits


# D9: inputs that are not finite


ZERO_TIMES_INFINITY = pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="D9: absent relations are multiplied by 0, so that an infinite input reaches all nodes",
)


@pytest.mark.parametrize(
    "backend",
    [
        "reference",
        "family",
        "sparse",
        pytest.param("dense", marks=ZERO_TIMES_INFINITY),
        pytest.param("auto", marks=ZERO_TIMES_INFINITY),
    ],
)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_input_reaches_only_nodes_with_a_path_from_it(backend: str, value: float) -> None:
    if not can_run(backend):
        pytest.skip("the compiled kernels are not installed")
    net = gn.GrapNet([64, 64])
    with net.edit(reason="no path from the first to the last") as edit:
        edit.cut(net.layers[0][0], slots=[63])
    net.execution.use(backend)
    if backend == "auto":
        ensure(net.execution.describe(batch=256, training=False)[0]["runs"] == "dense")
    x = torch.ones(256, 64)
    x[:, 0] = value
    with torch.no_grad():
        output = net(x)
    ensure(not output[:, :63].isfinite().any())
    assert output[:, 63].isfinite().all()


# D10: what killed saves leave


def program_killed_save(path: str) -> None:
    """Kills its own process in the middle of a save."""
    os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    gn.save(path, gn.GrapNet([4, 3]))


def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    done = run_program("killed_save", str(path))
    ensure(done.returncode == -signal.SIGKILL)
    ensure(not path.exists())
    ensure(len(os.listdir(tmp_path)) == 1)
    gn.save(path, gn.GrapNet([4, 3]))
    assert os.listdir(tmp_path) == [path.name]


def test_a_save_leaves_one_that_still_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first.safetensors"
    second = tmp_path / "second.safetensors"
    sync = os.fsync

    def save_another(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        gn.save(second, gn.GrapNet([4, 3]))
        sync(handle)

    monkeypatch.setattr(os, "fsync", save_another)
    gn.save(first, gn.GrapNet([5, 2]))
    assert gn.load(first).sizes == [5, 2]
    assert gn.load(second).sizes == [4, 3]


# D11: uids and trials


def test_an_edit_that_is_refused_uses_up_no_uids() -> None:
    net = gn.GrapNet([4, 3, 2])
    next_uid = net.next_uid
    with pytest.raises(gn.EditError):
        add_nodes_and_fail(net)
    with net.edit() as edit:
        new = edit.add_nodes(1, 1)
    assert new.uids.tolist() == [next_uid]


def add_nodes_and_fail(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.add_nodes(1, 5)
        edit.add_nodes(1, -1)


# D12: a folder that cannot be synced


def refuse_to_sync_folders(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    sync = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuse)


def test_a_save_raises_when_its_name_may_not_be_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_sync_folders(monkeypatch, errno.EIO)
    raised = None
    try:
        gn.save(tmp_path / "net.safetensors", gn.GrapNet([4, 3]))
    except OSError as error:
        raised = error.errno
    assert raised == errno.EIO


def test_a_save_takes_a_mount_that_syncs_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_sync_folders(monkeypatch, errno.EINVAL)
    gn.save(tmp_path / "net.safetensors", gn.GrapNet([4, 3]))
    assert gn.load(tmp_path / "net.safetensors").sizes == [4, 3]


# D13: forward-mode differentiation


@pytest.mark.parametrize(
    "backend",
    [
        "dense",
        "family",
        pytest.param(
            "sparse",
            marks=pytest.mark.xfail(
                strict=True,
                raises=NotImplementedError,
                reason="D13: the sparse backend has no forward-mode derivative",
            ),
        ),
    ],
)
@TORCH_SCRIPTS
def test_a_forward_mode_derivative_is_that_of_the_reference(backend: str) -> None:
    if not can_run(backend):
        pytest.skip("the compiled kernels are not installed")
    torch.manual_seed(0)
    net = gn.GrapNet([4, 3, 2], density=0.7, dtype=torch.float64)
    tangents = []
    for name in ("reference", backend):
        net.execution.use(name)
        with forward_ad.dual_level():
            x = forward_ad.make_dual(X.double(), X.double().cos())
            tangents.append(forward_ad.unpack_dual(net(x)).tangent)
    expected, tangent = tangents
    assert torch.allclose(tangent, expected)


# D14: optimizer state in a file that does not fit the optimizer


def without_rate(state: dict[str, Any]) -> None:
    del state["param_groups"][0]["lr"]


def without_betas(state: dict[str, Any]) -> None:
    del state["param_groups"][0]["betas"]


def without_eps(state: dict[str, Any]) -> None:
    del state["param_groups"][0]["eps"]


def of_another_length(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = torch.zeros(13)


def of_one_number(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = torch.zeros(1)


def without_average(state: dict[str, Any]) -> None:
    del state["state"][0]["exp_avg_sq"]


def unchanged(state: dict[str, Any]) -> None:
    pass


def saved_with_another_state(
    path: Path, monkeypatch: pytest.MonkeyPatch, alter: Callable[[dict[str, Any]], None]
) -> None:
    """Writes a checkpoint with a right digest, whose optimizer state was altered."""
    net = gn.GrapNet([4, 3, 2])
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer)
    state = optimizer.state_dict()
    alter(state)
    monkeypatch.setattr(optimizer, "state_dict", lambda: state)
    gn.save(path, net, optimizer=optimizer)


@pytest.mark.parametrize(
    "alter",
    [without_rate, without_betas, without_eps, of_another_length, of_one_number, without_average],
)
def test_a_state_that_does_not_fit_the_optimizer_is_not_restored(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alter: Callable[[dict[str, Any]], None],
) -> None:
    path = tmp_path / "net.safetensors"
    saved_with_another_state(path, monkeypatch, alter)
    net = gn.load(path)
    optimizer = torch.optim.Adam(net.parameters())
    with pytest.raises(gn.CheckpointError):
        gn.restore(path, optimizer=optimizer)
    assert optimizer.state == {}
    train(net, optimizer)


def test_a_state_that_fits_the_optimizer_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.safetensors"
    saved_with_another_state(path, monkeypatch, unchanged)
    net = gn.load(path)
    optimizer = torch.optim.Adam(net.parameters())
    gn.restore(path, optimizer=optimizer)
    assert float(optimizer.state[net.transitions[0].weight]["step"]) == 3
    train(net, optimizer)


# What may end its process


PROGRAMS = {
    "reads_with_kernels": program_reads_with_kernels,
    "killed_save": program_killed_save,
}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)  # a forked copy has no other threads
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
