"""Reads nets in several threads while one thread edits them, and judges every read.

`python -m tools.readers --reads 100000 --edits 10000 --json FILE` runs every phase of every backend
in a process of its own, so that a crash is counted. Without training each output must be bit-equal
to the output of one version that was in effect during the read; with training each coordinate must
have a value that it had during the read.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import grapnet as gn

ROOT = Path(__file__).parents[1]
BACKENDS = ("reference", "dense", "family", "sparse", "auto", "attention")
ACTIVATIONS = ("relu", "tanh", "gelu", "sigmoid", "identity")
# Seconds after which Python lets another thread run; it is 0.005 otherwise.
SWITCH_INTERVAL = 1e-6
# Mean seconds between two reads of a thread; without a pause the editor would hardly ever run.
PAUSE = 1e-3
# States between two comparisons of the recorded output with the walk along all relations.
AUDIT = 25


@dataclass(frozen=True)
class State:
    """What a net computed at one moment: the output of every reader's input."""

    commit: int  # how often the version had changed; training makes states of the same commit
    outputs: tuple[np.ndarray, ...]


def is_one_version(states: Sequence[State], reader: int, output: np.ndarray) -> bool:
    """Returns whether an output is bit-equal to that of one state."""
    found = output.tobytes()
    return any(state.outputs[reader].tobytes() == found for state in states)


def is_within_range(states: Sequence[State], reader: int, output: np.ndarray) -> bool:
    """Returns whether each coordinate of an output has a value that it had during the read.

    A version keeps its wiring and frozen parts; its trainable weights are whatever training writes,
    also after the next commit, where that leaves them in their memory (as cutting a frozen relation
    does).
    """
    known = [state.outputs[reader] for state in states]
    alike = [one for one in known if one.shape == output.shape]
    return bool(alike) and bool((np.stack(alike) == output).any(0).all())


def explain(states: Sequence[State], reader: int, output: np.ndarray) -> dict[str, Any]:
    """Returns the commits of the states that a read may show, and for every coordinate of its
    output the places of the states that have its value.
    """
    places: list[list[int]] = [[] for _ in range(output.size)]
    for place, state in enumerate(states):
        known = state.outputs[reader]
        if known.shape == output.shape:
            for coordinate in np.flatnonzero(known.ravel() == output.ravel()):
                places[coordinate].append(place)
    return {"commits": [state.commit for state in states], "places": places}


Judge = Callable[[Sequence[State], int, np.ndarray], bool]


@dataclass(frozen=True)
class Read:
    """An output, and the numbers of the first and the last state that it may show."""

    first: int
    last: int
    output: np.ndarray


@dataclass
class Tally:
    """What came of the reads of one thread."""

    reads: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)  # of wrong reads


def summary(error: Exception) -> str:
    """Returns the type and the text of an error, without the numbers in it."""
    return re.sub(r"\d+", "#", f"{type(error).__name__}: {str(error)[:120]}")


class Watched:
    """A net, its inputs, and what it computed at every version."""

    def __init__(self, net: gn.GrapNet, inputs: Sequence[Tensor]) -> None:
        self.net = net
        self.inputs = inputs
        self.states: list[State] = []
        self.version = net.version
        self.commits = 0

    def output(self, reader: int) -> np.ndarray:
        """Returns what the net computes for a reader; every second one uses inference_mode."""
        mode = torch.inference_mode() if reader % 2 else torch.no_grad()
        with mode:
            return self.net(self.inputs[reader]).numpy()

    def note(self) -> None:
        """Records the present state, which a commit or a training step has brought."""
        if self.net.version != self.version:
            self.version = self.net.version
            self.commits += 1
        outputs = tuple(self.output(reader) for reader in range(len(self.inputs)))
        # Training writes into the weights, and an output may be a view of them.
        self.states.append(State(self.commits, tuple(output.copy() for output in outputs)))

    def audit(self) -> bool:
        """Returns whether the net is sound and computes what its relations say."""
        gn.check(self.net)
        if self.net.execution.policies():
            return True
        x = self.inputs[0]
        with torch.no_grad():
            return torch.allclose(self.net(x), self.net.walk(x), atol=1e-5)


class Reader(threading.Thread):
    """Runs forward passes until it is stopped, and judges each as soon as that is possible."""

    def __init__(self, watched: Sequence[Watched], number: int, judge: Judge) -> None:
        super().__init__(daemon=True)
        self.watched = watched
        self.number = number
        self.judge = judge
        self.tallies = [Tally() for _ in watched]
        self.pending: list[list[Read]] = [[] for _ in watched]
        self.rng = random.Random(number)
        self.stopped = False

    @property
    def reads(self) -> int:
        """How many reads have ended."""
        return sum(tally.reads for tally in self.tallies)

    def run(self) -> None:
        """Reads one net after the other."""
        while not self.stopped:
            for which in range(len(self.watched)):
                time.sleep(2 * PAUSE * self.rng.random())
                self.read(which)
                self.settle(which)

    def read(self, which: int) -> None:
        """Runs one forward pass."""
        watched = self.watched[which]
        tally = self.tallies[which]
        first = len(watched.states) - 1
        try:
            output = watched.output(self.number).copy()
        except Exception as error:
            tally.errors[summary(error)] += 1
            output = None
        # A state that is not recorded yet may be in effect; this will be its number.
        last = len(watched.states)
        tally.reads += 1
        if output is not None:
            self.pending[which].append(Read(first, last, output))

    def settle(self, which: int) -> None:
        """Judges the reads whose states have all been recorded."""
        states = self.watched[which].states
        waiting = self.pending[which]
        while waiting and waiting[0].last < len(states):
            read = waiting.pop(0)
            shown = states[read.first : read.last + 1]
            if not self.judge(shown, self.number, read.output):
                tally = self.tallies[which]
                tally.wrong += 1
                tally.examples.append(explain(shown, self.number, read.output))


# Random edits

Operation = Callable[[random.Random, gn.GrapNet, gn.Edit], None]


def some(rng: random.Random, count: int, most: int) -> list[int]:
    """Draws up to `most` of the first `count` numbers."""
    return sorted(rng.sample(range(count), min(count, rng.randint(1, most))))


def cut(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Cuts a few relations of one transition, as long as it has many."""
    relations = net.layers[rng.randrange(len(net.transitions))].outgoing()
    if len(relations) > 8:
        edit.cut(relations[some(rng, len(relations), 4)])


def grow(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Connects a node with some of the nodes that are not its children."""
    source, target = rng.choice(net.ends)
    parent = net.layers[source][rng.randrange(len(net.layers[source]))]
    present = {child.uid for child in parent.children}
    absent = [uid for uid in net.layers[target].uids.tolist() if uid not in present]
    if absent:
        edit.connect(parent, rng.sample(absent, min(len(absent), 3)))


def exchange(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Cuts a relation and grows it again, so that no size changes."""
    number = rng.randrange(len(net.transitions))
    owners = [node for node in net.layers[number] if len(node.children)]
    if owners:
        node = rng.choice(owners)
        edit.cut(node, slots=[0])
        edit.connect(node, node.children[0])


def add_nodes(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Adds nodes to a layer, connected on both sides."""
    number = rng.randrange(1, len(net.layers))
    if len(net.layers[number]) < 2 * len(net.layers[0]):
        added = edit.add_nodes(number, rng.randint(1, 2), activation=rng.choice(ACTIVATIONS))
        for source, target in net.ends:
            if target == number:
                edit.connect(net.layers[source], added)
            elif source == number:
                edit.connect(added, net.layers[target])


def remove_nodes(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Removes nodes of a layer, as long as it has many."""
    number = rng.randrange(1, len(net.layers))
    layer = net.layers[number]
    if len(layer) > 4:
        edit.remove_nodes(layer[some(rng, len(layer), 2)], interface=True)


def remove_orphans(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Makes a hidden node an orphan and removes it."""
    if len(net.layers) > 2 and len(net.layers[1]) > 4:
        edit.cut(net.layers[1][0].incoming())
        edit.remove_orphans()


def freeze(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Freezes nodes."""
    layer = rng.choice(net.layers[1:])
    edit.freeze(layer[some(rng, len(layer), 3)], outgoing=rng.random() < 0.5)


def unfreeze(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Makes nodes trainable again."""
    layer = rng.choice(net.layers[1:])
    edit.unfreeze(layer[some(rng, len(layer), 3)])


def freeze_relations(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Freezes or unfreezes a few relations."""
    relations = rng.choice(net.layers[:-1]).outgoing()
    verb = rng.choice([edit.freeze, edit.unfreeze])
    verb(relations[some(rng, len(relations), 4)])


def set_activation(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Gives nodes another activation."""
    layer = rng.choice(net.layers[1:])
    edit.set_activation(layer[some(rng, len(layer), 3)], rng.choice(ACTIVATIONS))


def set_owner(rng: random.Random, net: gn.GrapNet, edit: gn.Edit) -> None:
    """Tags a layer."""
    edit.set_owner(net.layers[1], rng.choice(["a", "b"]))


OPERATIONS: tuple[Operation, ...] = (
    cut,
    grow,
    exchange,
    add_nodes,
    remove_nodes,
    remove_orphans,
    freeze,
    unfreeze,
    freeze_relations,
    set_activation,
    set_owner,
)
# Those that leave the nodes and biases alone, so that an output is one bias and one weight.
RELATIONS: tuple[Operation, ...] = (cut, grow, exchange, freeze_relations)


class Abandoned(Exception):
    """Raised inside of an edit that is not to happen."""


class Editor:
    """Edits one or several nets at random, and records what they compute after every commit."""

    def __init__(self, watched: Sequence[Watched], operations: Sequence[Operation], seed: int):
        self.rng = random.Random(seed)
        self.watched = watched
        self.nets = [each.net for each in watched]
        self.operations = operations
        self.edits = 0
        self.unsound = 0

    def note(self) -> None:
        """Records all nets after a commit."""
        for watched in self.watched:
            watched.note()
        if len(self.watched[0].states) % AUDIT == 0 and not all(w.audit() for w in self.watched):
            self.unsound += 1

    def step(self) -> None:
        """Makes one edit, undo, redo or trial, or begins one that is not carried out."""
        way = self.rng.choices(
            [self.commit, self.try_out, self.undo, self.redo, self.wait, self.abandon],
            weights=[10, 3, 4, 2, 1, 1],
        )[0]
        # What a random edit cannot do, such as undoing what was never done, is no edit.
        with contextlib.suppress(
            Abandoned, gn.errors.EditError, gn.errors.HistoryError, gn.errors.FrozenError
        ):
            way()
            self.edits += 1
        self.note()

    def open(self, *, trial: bool) -> Any:
        """Opens an edit of every net."""
        return gn.edit(*self.nets, reason="random", trial=trial, allow_dead=True)

    def ask(self, edits: Sequence[gn.Edit]) -> None:
        """Asks every edit for an operation."""
        for net, edit in zip(self.nets, edits, strict=True):
            self.rng.choice(self.operations)(self.rng, net, edit)

    def commit(self) -> None:
        """Commits an edit of all nets, or of one of them."""
        if self.rng.random() < 0.5:
            with self.open(trial=False) as edits:
                self.ask(edits)
        else:
            net = self.rng.choice(self.nets)
            with net.edit(reason="random", allow_dead=True) as edit:
                self.rng.choice(self.operations)(self.rng, net, edit)

    def try_out(self) -> None:
        """Makes a trial that takes effect for a while."""
        with self.open(trial=True) as edits:
            self.ask(edits)
            edits[0].commit()
            self.note()
            time.sleep(0)

    def wait(self) -> None:
        """Makes a trial that never takes effect."""
        with self.open(trial=True) as edits:
            self.ask(edits)
            time.sleep(1e-4)

    def abandon(self) -> None:
        """Leaves an edit by an error."""
        with self.open(trial=False) as edits:
            self.ask(edits)
            time.sleep(1e-4)
            raise Abandoned

    def undo(self) -> None:
        """Takes a commit back, in all nets that it changed."""
        self.reverse("undo")

    def redo(self) -> None:
        """Takes an undo back, in all nets that it changed."""
        self.reverse("redo")

    def reverse(self, verb: str) -> None:
        """Takes something back in all nets together, or else in one of them."""
        try:
            getattr(gn, verb)(*self.nets)
        except gn.errors.HistoryError:
            getattr(self.rng.choice(self.nets), verb)(alone=True)


# Phases: one set of nets, readers and edits each


def made_net(backend: str, sizes: Sequence[int], density: float, seed: int) -> gn.GrapNet:
    """Returns a net with mixed activations that runs on one backend."""
    generator = torch.Generator().manual_seed(seed)
    net = gn.GrapNet(sizes, density=density, generator=generator)
    net.execution.use(backend)
    with net.edit(reason="prepare") as edit:
        edit.set_activation(net.layers[1][:2], "tanh")
        edit.freeze(net.layers[1][1:3])
    return net


def inputs_of(width: int) -> list[Tensor]:
    """Returns the inputs of the readers."""
    generator = torch.Generator().manual_seed(0)
    batches = [(3, width), (3, width), (2, 1, width)]
    return [torch.randn(shape, generator=generator) for shape in batches]


@contextlib.contextmanager
def readers_of(watched: Sequence[Watched], judge: Judge) -> Iterator[list[Reader]]:
    """Runs readers during the block, and judges all of their reads at its end."""
    for each in watched:
        each.note()
    readers = [Reader(watched, number, judge) for number in range(len(watched[0].inputs))]
    for reader in readers:
        reader.start()
    try:
        yield readers
    finally:
        for reader in readers:
            reader.stopped = True
        for reader in readers:
            reader.join()
        for which, each in enumerate(watched):
            each.note()
            for reader in readers:
                reader.settle(which)


def report(readers: Sequence[Reader], editor: Editor) -> dict[str, Any]:
    """Returns the counts of a phase."""
    tallies = [tally for reader in readers for tally in reader.tallies]
    errors: Counter[str] = Counter()
    examples: list[dict[str, Any]] = []
    for tally in tallies:
        errors.update(tally.errors)
        examples += tally.examples
    return {
        "reads": sum(tally.reads for tally in tallies),
        "edits": editor.edits,
        "states": sum(len(watched.states) for watched in editor.watched),
        "wrong": sum(tally.wrong for tally in tallies),
        "unsound": editor.unsound,
        "raised": errors.total(),
        "errors": dict(errors.most_common(8)),
        "examples": examples[:2],
    }


def run_beside(
    watched: Sequence[Watched], operations: Sequence[Operation], reads: int, edits: int
) -> dict[str, Any]:
    """Edits nets without training them, until there were enough reads and edits."""
    editor = Editor(watched, operations, seed=edits)
    with readers_of(watched, is_one_version) as readers:
        while editor.edits < edits or sum(reader.reads for reader in readers) < reads:
            editor.step()
    return report(readers, editor)


def wiring_sizes(backend: str) -> tuple[list[int], float]:
    """Returns sizes and density; those for auto are large enough that it uses the kernels."""
    if backend == "auto":
        return [64, 96, 5], 0.05
    return [6, 10, 5], 0.6


def plain(backend: str, reads: int, edits: int) -> dict[str, Any]:
    """Reads one net that all kinds of edits change."""
    sizes, density = wiring_sizes(backend)
    watched = Watched(made_net(backend, sizes, density, seed=1), inputs_of(sizes[0]))
    return run_beside([watched], OPERATIONS, reads, edits)


def hooked(backend: str, reads: int, edits: int) -> dict[str, Any]:
    """Reads one net whose layers and transitions have forward hooks."""
    sizes, density = wiring_sizes(backend)
    net = made_net(backend, sizes, density, seed=2)

    def double(module: torch.nn.Module, arguments: Any, output: Tensor) -> Tensor:
        return 2 * output

    for module in (net.layers[1], net.transitions[1]):
        module.register_forward_hook(double)
    watched = Watched(net, inputs_of(sizes[0]))
    # The walk along the relations knows nothing of hooks.
    watched.audit = lambda: gn.check(net) is None
    return run_beside([watched], OPERATIONS, reads, edits)


def joint(backend: str, reads: int, edits: int) -> dict[str, Any]:
    """Reads two nets, one by one, that are edited together."""
    nets = [made_net(backend, [5, 8, 4], 0.6, seed) for seed in (3, 4)]
    watched = [Watched(net, inputs_of(5)) for net in nets]
    return run_beside(watched, OPERATIONS, reads, edits)


def training(backend: str, reads: int, edits: int) -> dict[str, Any]:
    """Reads one transition that is trained between its edits.

    Every row of the input has a single 1, so that an output is one bias plus one weight, however a
    backend adds; the biases stay as they are.
    """
    generator = torch.Generator().manual_seed(5)
    net = gn.GrapNet([6, 5], density=0.6, generator=generator)
    net.execution.use(backend)
    optimizer = torch.optim.SGD([net.transitions[0].weight], lr=0.01, momentum=0.9)
    gn.attach(optimizer, net)
    x = torch.randn(16, 6, generator=generator)
    target = torch.randn(16, 5, generator=generator)
    watched = Watched(net, [torch.eye(6)] * 3)
    editor = Editor([watched], RELATIONS, seed=edits)

    def train() -> None:
        optimizer.zero_grad()
        (net(x) - target).square().mean().backward()
        optimizer.step()

    # The first step of an optimizer imports much of torch.
    train()
    with readers_of([watched], is_within_range) as readers:
        while editor.edits < edits or sum(reader.reads for reader in readers) < reads:
            for _ in range(editor.rng.randint(0, 2)):
                train()
                watched.note()
            editor.step()
    return report(readers, editor)


def opening(backend: str, reads: int, edits: int) -> dict[str, Any]:
    """Lets four threads open edits of one net: only one of them can have one open at a time."""
    return run_rivals(backend, edits, undo=False)


def undoing(backend: str, reads: int, edits: int) -> dict[str, Any]:
    """Lets four threads open edits of one net and undo the edits of each other."""
    return run_rivals(backend, edits, undo=True)


def run_rivals(backend: str, edits: int, *, undo: bool) -> dict[str, Any]:
    """Lets four threads change one net, and compares its version with what they committed."""
    net = made_net(backend, [6, 10, 5], 0.6, seed=6)
    start = net.version
    inside: list[int] = []
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()

    def change(number: int, turn: int) -> None:
        with net.edit(reason="own") as edit:
            inside.append(number)
            time.sleep(0)
            if inside != [number]:
                counts["overlaps"] += 1
            edit.set_owner(net.layers[1], f"{number} {turn}")
            inside.remove(number)

    def work(number: int) -> None:
        # A counter of its own: adding to a common one is no single step.
        mine: Counter[str] = Counter()
        for turn in range(edits):
            try:
                if undo and turn % 2:
                    net.undo()
                else:
                    change(number, turn)
            except gn.errors.EditError:
                mine["refused"] += 1
            except gn.errors.HistoryError:
                mine["nothing to undo"] += 1
            except Exception as error:
                errors[summary(error)] += 1
            else:
                mine["commits"] += 1
        tallies.append(mine)

    tallies: list[Counter[str]] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine in tallies:
        counts.update(mine)
    gn.check(net)
    return {
        "attempts": 4 * edits,
        "edits": counts["commits"],
        "refused": counts["refused"],
        "wrong": counts["overlaps"],
        "unsound": abs(net.version - start - counts["commits"]),
        "raised": errors.total(),
        "errors": dict(errors.most_common(8)),
    }


@dataclass(frozen=True)
class Phase:
    """A part of the reads and edits of one backend."""

    run: Callable[[str, int, int], dict[str, Any]]
    share: float


PHASES = {
    "plain": Phase(plain, 0.4),
    "hooked": Phase(hooked, 0.2),
    "joint": Phase(joint, 0.2),
    "training": Phase(training, 0.2),
    "opening": Phase(opening, 0.1),
    "undoing": Phase(undoing, 0.1),
}


def phases_of(backend: str) -> list[str]:
    """Returns the phases of a backend; an output of attention is no single weight."""
    return [name for name in PHASES if (backend, name) != ("attention", "training")]


# Processes


def run_phase(backend: str, name: str, reads: int, edits: int) -> dict[str, Any]:
    """Runs one phase in this process."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL)
    share = PHASES[name].share
    start = time.perf_counter()
    found = PHASES[name].run(backend, round(share * reads), round(share * edits))
    found["seconds"] = round(time.perf_counter() - start, 1)
    return found


def ending(code: int) -> str:
    """Returns how a process ended."""
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def judge_phase(
    backend: str, name: str, reads: int, edits: int, seconds: float = 1800
) -> dict[str, Any]:
    """Returns what one phase found in a process of its own, or how it ended that process."""
    command = [sys.executable, "-m", "tools.readers", "--reads", str(reads)]
    command += ["--edits", str(edits), "--backends", backend, "--phase", name]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
    if process.returncode != 0:
        return {"crash": ending(process.returncode), "text": errors[-1000:]}
    return json.loads(output)


def faults_of(phase: dict[str, Any]) -> int:
    """Returns how many reads or edits of a phase went wrong; a crash is one."""
    if "crash" in phase:
        return 1
    return phase["wrong"] + phase["unsound"] + phase["raised"]


def judge(backends: Sequence[str], reads: int, edits: int, jobs: int = 1) -> dict[str, Any]:
    """Returns the counts of all backends, and of all together."""
    calls = {}
    with ThreadPoolExecutor(jobs) as pool:
        for backend in backends:
            for name in phases_of(backend):
                calls[backend, name] = pool.submit(judge_phase, backend, name, reads, edits)
    found: dict[str, dict[str, Any]] = {}
    for (backend, name), call in calls.items():
        found.setdefault(backend, {})[name] = call.result()
    phases = [phase for each in found.values() for phase in each.values()]
    return {
        "reads": sum(phase.get("reads", 0) for phase in phases),
        "edits": sum(phase.get("edits", 0) for phase in phases),
        "crashes": sum("crash" in phase for phase in phases),
        "faults": sum(faults_of(phase) for phase in phases),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "backends": found,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 when a read was wrong or raised, an edit was not refused, or a process crashed."""
    parser = argparse.ArgumentParser(prog="python -m tools.readers", description=__doc__)
    parser.add_argument("--reads", type=int, default=100_000, help="for each backend")
    parser.add_argument("--edits", type=int, default=10_000, help="for each backend")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.phase is not None:
        (backend,) = options.backends
        found = run_phase(backend, options.phase, options.reads, options.edits)
        print(json.dumps(found))
        return 0
    result = judge(options.backends, options.reads, options.edits, options.jobs)
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(result["faults"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
