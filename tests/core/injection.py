"""Raises an error inside of an operation and judges what the next public call finds.

Every injection happens in a forked process, so that it starts from the very same world as the
operation that ran through, and so that whatever it destroys is gone afterwards.
"""

import contextlib
import ctypes
import functools
import gc
import os
import pickle
import random
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import grapnet as gn

from . import worlds
from .worlds import CALLS, OPERATIONS, Sight, World

PACKAGE = str(Path(gn.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
NARROW = (PACKAGE,)
WIDE = (PACKAGE, TORCH, contextlib.__file__)
PATIENCE = 20  # seconds after which a process counts as stuck
SHARES = {"lines": 0.5, "lines of torch as well": 0.3, "asynchronous": 0.2}


class Stop(BaseException):
    """An error that no handler expects."""


ERRORS: list[type[BaseException]] = [KeyboardInterrupt, MemoryError, Stop]


# Where and when errors are raised


@functools.cache
def with_lines(path: str) -> frozenset[int]:
    """Returns the numbers of the lines of a file that open a `with` block."""
    lines = Path(path).read_text().splitlines()
    return frozenset(n for n, line in enumerate(lines, 1) if line.lstrip().startswith("with "))


class Tracer:
    """Notes the line events in some files, and raises an error at one of them.

    Leaving a `with` block is an event at its first line. It is left out: no signal arrives there,
    and an error would skip the `__exit__` of a context manager.
    """

    def __init__(
        self, roots: tuple[str, ...], at: int | None = None, error: type[BaseException] = Stop
    ) -> None:
        self.roots = roots
        self.at = at
        self.error = error
        self.count = 0
        self.places: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(self.roots):
            return None
        openings = with_lines(path)
        entered: set[int] = set()

        def local(frame: FrameType, event: str, argument: object) -> Any:
            line = frame.f_lineno
            if event != "line" or line in entered:
                return local
            if line in openings:
                entered.add(line)
            self.count += 1
            if self.at is None:
                self.places.append(f"{path}:{line}")
            elif self.count - 1 == self.at:
                self.places.append(f"{path}:{line}")
                raise self.error
            return local

        return local

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Traces nothing in a block."""
        present = sys.gettrace()
        sys.settrace(None)
        yield
        sys.settrace(present)


class Alarm:
    """Raises an error in the main thread some time after it was set."""

    def __init__(self, way: str, delay: float, error: type[BaseException]) -> None:
        self.way = way
        self.delay = delay
        self.error = error
        # No threading.Event: a handler that sets one hangs where the main thread waits for it.
        self.sent = False
        self.main = threading.main_thread().ident

    def set(self) -> None:
        # Otherwise the thread below waits up to 5 ms, longer than most operations run.
        sys.setswitchinterval(1e-5)
        if self.way == "timer":
            signal.signal(signal.SIGALRM, self._on_timer)
            signal.setitimer(signal.ITIMER_REAL, max(self.delay, 1e-6))
        else:
            threading.Thread(target=self._wait, daemon=True).start()

    def _on_timer(self, number: int, frame: FrameType | None) -> None:
        self.sent = True
        raise KeyboardInterrupt

    def _wait(self) -> None:
        time.sleep(self.delay)
        if self.way == "signal":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(self.main), ctypes.py_object(self.error))
        self.sent = True


@dataclass(frozen=True)
class Injection:
    """One error: how it comes, where or when, and the call that comes after it."""

    operation: str
    seed: int
    way: str  # "lines", "lines of torch as well", "asynchronous", "signal" or "timer"
    error: type[BaseException]
    call: str
    keep: bool  # keep the error, and with it all frames that it passed
    event: int = 0
    delay: float = 0.0


@dataclass
class Finding:
    """What became of an injection."""

    verdict: str  # before, after, between, torn, stuck, wrong, or missed: came too late
    place: str = ""
    parts: list[str] = field(default_factory=list)  # what belongs to neither state
    raised: str = ""
    no_grad_left: bool = False  # torch.no_grad was interrupted itself
    lost: bool = False  # another error was raised in place of the one that was injected


# Processes


def in_child(work: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Returns what `work` returns in a forked process; None where that crashes or hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(work(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    data = b""
    deadline = time.monotonic() + patience
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = pipe.read(1 << 20)
            if not part:
                break
            data += part
        else:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return pickle.loads(data) if status == 0 else None


# The judge


class Case:
    """One operation on one world, with what is seen of it before and after."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.name = name
        self.seed = seed
        self.operation = OPERATIONS[name]
        self.world = self.operation.make(folder, seed)
        self.world.kept["seed"] = seed
        self.operation.setup(self.world)
        gc.collect()
        gc.disable()
        self._twins: dict[str, dict[str, Sight]] = {}
        self._traced: dict[tuple[str, ...], list[str]] = {}

    def _time(self) -> float:
        start = time.perf_counter()
        self.operation.act(self.world)
        return time.perf_counter() - start

    @functools.cached_property
    def duration(self) -> float:
        """How many seconds the operation takes in a forked process."""
        return in_child(self._time)

    def _places(self, roots: tuple[str, ...]) -> list[str]:
        if roots not in self._traced:
            self._traced[roots] = in_child(lambda: self._trace(roots)) or []
        return self._traced[roots]

    def _trace(self, roots: tuple[str, ...]) -> list[str]:
        tracer = Tracer(roots)
        worlds.untraced = tracer.paused
        sys.settrace(tracer)
        self.operation.act(self.world)
        sys.settrace(None)
        return tracer.places

    def twins(self, call: str) -> dict[str, Sight]:
        """Returns what is seen of worlds that nothing interrupts, by the state they are in."""
        found = self._twins.get(call)
        if found is None:
            acts: dict[str, Callable[[World], None]] = {"before": lambda world: None}
            acts["after"] = self.operation.act
            for number, stage in enumerate(self.operation.stages):
                acts[f"between {number}"] = stage
            found = {}
            for state, act in acts.items():
                found[state] = in_child(functools.partial(self._see, act, call))
                if found[state] is None:
                    raise RuntimeError(f"{self.name!r} does not run without an interrupt")
            self._twins[call] = found
        return found

    def _see(self, act: Callable[[World], None], call: str) -> Sight:
        act(self.world)
        return worlds.look(self.world, call)

    def draw(self, way: str, rng: random.Random, calls: list[str]) -> Injection:
        """Draws an injection that one of the calls comes after."""
        call = rng.choice(calls)
        keep = rng.random() < 0.5
        error = rng.choice(ERRORS)
        if way in ("signal", "timer"):
            error = KeyboardInterrupt
        if way in ("lines", "lines of torch as well"):
            places = self._places(NARROW if way == "lines" else WIDE)
            event = rng.randrange(len(places))
            if rng.random() < 0.5:
                # Lines in loops run often; every line is to be reached as well.
                place = rng.choice(sorted(set(places)))
                event = rng.choice([n for n, one in enumerate(places) if one == place])
            return Injection(self.name, self.seed, way, error, call, keep, event=event)
        delay = rng.uniform(0, 1.2 * self.duration)
        return Injection(self.name, self.seed, way, error, call, keep, delay=delay)

    def judge_state(self, change: Callable[[World], None], call: str = "forward") -> Finding:
        """Compares a world after a change of it, in a process of its own."""
        twins = self.twins(call)
        return in_child(lambda: compare(self._see(change, call), twins))

    def judge(self, injection: Injection) -> Finding:
        """Carries out an injection in a process of its own."""
        twins = self.twins(injection.call)
        finding = in_child(lambda: self._inject(injection, twins))
        return Finding("stuck", "the process hung or crashed") if finding is None else finding

    def _inject(self, injection: Injection, twins: dict[str, Sight]) -> Finding:
        if injection.way in ("lines", "lines of torch as well"):
            place, error, finished = self._at_line(injection)
        else:
            place, error, finished = self._at_time(injection)
            if finished:
                return Finding("missed")
        no_grad_left = not torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        raised = _described(error).replace(str(self.world.folder), "…")
        foreign = error is not None and not _comes_from(error, injection.error)
        if not injection.keep:
            error = None
        sight = worlds.look(self.world, injection.call)
        finding = compare(sight, twins, self.operation.loose)
        finding.place = _short(place)
        finding.raised = raised
        finding.no_grad_left = no_grad_left
        # C code may lose an error that arrives while it calls Python, and raise one of its own.
        finding.lost = foreign
        del error
        return finding

    def _at_line(self, injection: Injection) -> tuple[str, BaseException | None, bool]:
        roots = NARROW if injection.way == "lines" else WIDE
        tracer = Tracer(roots, injection.event, injection.error)
        worlds.untraced = tracer.paused
        caught = None
        sys.settrace(tracer)
        try:
            self.operation.act(self.world)
        except BaseException as error:
            caught = error
        finally:
            sys.settrace(None)
        place = tracer.places[0] if tracer.places else "not reached"
        return place, caught, caught is None

    def _at_time(self, injection: Injection) -> tuple[str, BaseException | None, bool]:
        alarm = Alarm(injection.way, injection.delay, injection.error)
        finished = False
        caught = None
        try:
            alarm.set()
            self.operation.act(self.world)
            finished = True
            # The error may be on its way, or was raised where Python ignores it.
            for _ in range(10_000):
                if alarm.sent:
                    break
                time.sleep(1e-4)
            for _ in range(100):
                time.sleep(1e-4)
        except BaseException as error:
            caught = error
        return _last_place(caught), caught, finished


def compare(
    sight: Sight, twins: dict[str, Sight], loose: Callable[[str], bool] = lambda name: False
) -> Finding:
    """Returns which of its twins a world equals, or which of its parts equal neither."""
    nearest: list[str] | None = None
    for state, twin in twins.items():
        if sight == twin:
            return Finding(state.split()[0])
        parts = _differing(sight, twin)
        if nearest is None or len(parts) < len(nearest):
            nearest = parts
    assert nearest is not None
    mixed = _mixed(sight, twins, loose)
    if mixed:
        return Finding("between")
    if str(sight.later["edit"]).startswith("EditError"):
        return Finding("stuck", parts=nearest)
    if all(part.startswith("later: ") for part in nearest):
        return Finding("wrong", parts=nearest)
    return Finding("torn", parts=nearest)


def _differing(sight: Sight, twin: Sight) -> list[str]:
    parts = [] if sight.answer == twin.answer else ["answer"]
    for name in sorted({*sight.state, *twin.state}):
        if sight.state.get(name) != twin.state.get(name):
            parts.append(_shown(name, sight.state.get(name)))
    for name in sorted({*sight.later, *twin.later}):
        if sight.later.get(name) != twin.later.get(name):
            parts.append("later: " + _shown(name, sight.later.get(name)))
    return parts


def _mixed(sight: Sight, twins: dict[str, Sight], loose: Callable[[str], bool]) -> bool:
    """Returns whether all that differs from one twin are parts that may be of any of them."""
    for twin in twins.values():
        names = {name for name in sight.state if sight.state[name] != twin.state.get(name)}
        if names and all(loose(name) for name in names) and sight.later["edit"] is None:
            return sight.later["check"] is None
    return False


def _shown(name: str, value: Any) -> str:
    return f"{name} ({value[:160]})" if isinstance(value, str) else name


def _described(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"[:200]


def _comes_from(error: BaseException, kind: type[BaseException]) -> bool:
    """Returns whether an error is of a kind or was raised while one was handled."""
    seen = error
    while seen is not None:
        if isinstance(seen, kind):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _short(place: str) -> str:
    for root in (PACKAGE, TORCH, contextlib.__file__):
        place = place.removeprefix(str(Path(root).parent) + os.sep)
    return place


def _last_place(error: BaseException | None) -> str:
    """Returns the innermost line of the library that an error passed."""
    found = "outside of the library"
    trace = None if error is None else error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path.startswith(WIDE):
            found = f"{path}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


# Many injections


@dataclass(frozen=True)
class Task:
    """Injections into one operation on one world: how many of each way."""

    operation: str
    seed: int
    counts: dict[str, int]
    calls: int = 3  # how many of the next public calls to choose from


def run_task(task: Task) -> list[tuple[Injection, Finding]]:
    """Makes the injections of a task; those that came too late are among them."""
    try:
        return _run_task(task)
    except Exception as error:
        injection = Injection(task.operation, task.seed, "none", type(error), "none", False)
        return [(injection, Finding("wrong", "the operation itself", [repr(error)]))]


def _run_task(task: Task) -> list[tuple[Injection, Finding]]:
    torch.set_num_threads(1)
    rng = random.Random(f"{task.operation} {task.seed}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        case = Case(task.operation, task.seed, Path(folder))
        calls = rng.sample(list(CALLS), task.calls)
        for way, count in task.counts.items():
            if case.operation.trains and not way.startswith("lines"):
                continue
            arrived = 0
            for _ in range(3 * count):
                if arrived == count:
                    break
                injection = case.draw(way, rng, calls)
                finding = case.judge(injection)
                found.append((injection, finding))
                arrived += finding.verdict != "missed"
    gc.enable()
    return found


def spread(injections: int, signals: int, seed: int, names: list[str], rounds: int) -> list[Task]:
    """Spreads injections and signals evenly over operations, each on `rounds` worlds."""
    pairs = [(name, seed * 100 + turn) for turn in range(rounds) for name in names]
    left = {way: round(injections * share) for way, share in SHARES.items()}
    left["signal"] = signals // 2
    left["timer"] = signals - signals // 2
    found = []
    for number, (name, world) in enumerate(pairs):
        counts = {}
        for way in left:
            counts[way] = -(-left[way] // (len(pairs) - number))
            if OPERATIONS[name].trains and not way.startswith("lines"):
                counts[way] = 0
            left[way] -= counts[way]
        found.append(Task(name, world, counts))
    return found


def run_controls() -> dict[str, str]:
    """Returns what the judge finds in worlds that were torn on purpose, and in two clean ones."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        case = Case("edit: prune and grow", 0, Path(folder))
        found = {name: case.judge_state(tear).verdict for name, tear in CONTROLS.items()}
    gc.enable()
    return found


def _open_edit(world: World) -> None:
    world.kept["open"] = world.net.edit().__enter__()


def _start_trial(world: World) -> None:
    world.kept["open"] = world.net.edit(trial=True).__enter__()
    worlds.prune_and_grow(world.net, world.kept["open"])
    world.kept["open"].commit()


def _lose_moments(world: World) -> None:
    state = next(iter(world.optimizers[0].state.values()))
    state["exp_avg"].zero_()


def _lose_gradient(world: World) -> None:
    next(world.net.parameters()).grad = None


def _draw_numbers(world: World) -> None:
    torch.rand(1)


def _commit_one_net_of_two(world: World) -> None:
    worlds.edit_net(world)
    with world.nets[1].edit(reason="other") as edit:
        worlds.cut(world.nets[1], edit)


CONTROLS: dict[str, Callable[[World], None]] = {
    "nothing": lambda world: None,
    "all": worlds.edit_net,
    "an open edit": _open_edit,
    "a trial in effect": _start_trial,
    "an optimizer without moments": _lose_moments,
    "a Parameter without gradient": _lose_gradient,
    "random numbers drawn": _draw_numbers,
    "an edit of another net": _commit_one_net_of_two,
}
