"""Loads and restores mutated checkpoints in a process of its own, under an audit, and reports what
happened as JSON.

python -m tests.checkpoint.referee FOLDER COUNT SEED
"""

import copy
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grapnet as gn

from .files import edited_net, objects_for, parse, write_example
from .mutations import Document, Mutation, Tensors, mutations

FIELDS = (
    "container",
    "metadata",
    "sha256",
    "format",
    "graph",
    "layers",
    "transitions",
    "journal",
    "execution",
    "extras",
)
ROOM = 512 * 2**20  # bytes to allocate at most
FORBIDDEN = (
    "import",
    "exec",
    "compile",
    "code.__new__",
    "marshal.",
    "pickle.",
    "ctypes.",
    "os.system",
    "os.exec",
)
FORBIDDEN += (
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.",
    "socket.",
    "os.remove",
    "os.rename",
    "os.mkdir",
)


class Referee:
    """Judges one mutation after the other."""

    def __init__(self, example: Path, path: Path) -> None:
        self.path, self.rng = path, random.Random(3)
        self.outcomes: Counter[str] = Counter()
        self.fields: Counter[str] = Counter()  # that refusals named
        self.faults, self.forbidden = [], []
        self.watching = False
        self.graph = graph_of(*parse(example.read_bytes()))
        self.net, objects = edited_net()
        self.states = {
            name: copy.deepcopy(objects[name].state_dict()) for name in ("optimizer", "scheduler")
        }
        self.objects, self.before = self._objects()
        sys.addaudithook(self._audit)

    def judge(self, mutation: Mutation) -> None:
        """Loads and restores one mutated file; notes what is wrong with how that went."""
        self.path.write_bytes(mutation.data)
        try:
            net = self.watched(lambda: gn.load(self.path))
            if net is None:
                self.outcomes["refused to load"] += 1
            else:
                assert mutation.document is not None, "loaded, and its document is no document"
                graph = graph_of(mutation.document, mutation.tensors)
                self.outcomes[
                    "loaded as it was" if graph == self.graph else "loaded as it says"
                ] += 1
                require_agreement(net, mutation.document, mutation.tensors)
                # the same way back is walked once
                if graph != self.graph or self.outcomes["loaded as it was"] == 1:
                    require_way_back(net)
            self._restore(mutation)
        except Exception as error:
            self.faults.append(f"{mutation.label}: {type(error).__name__}: {error}"[:500])
            # so that the next mutation is judged by itself
            self.objects, self.before = self._objects()

    def watched(self, act: Callable[[], Any]) -> Any:
        """Returns what `act` returns, or None when it refused the file in the way it should."""
        found = None
        refusal = None
        self.watching = True
        try:
            found = act()
        except gn.CheckpointError as error:
            refusal = error
        finally:
            self.watching = False
        if refusal is not None:
            self._inspect(refusal)
        return found

    def _inspect(self, refusal: gn.CheckpointError) -> None:
        field = str(refusal).split(":")[0].split(".")[0].split("[")[0]
        assert field in FIELDS, f"the message names no field: {refusal}"
        self.fields[field] += 1
        cause: BaseException | None = refusal
        while cause is not None:
            assert not isinstance(cause, MemoryError), f"it tried to allocate: {cause}"
            assert "alloc" not in str(cause), f"it tried to allocate: {cause}"
            cause = cause.__cause__

    def _restore(self, mutation: Mutation) -> None:
        names = list(self.objects)
        self.rng.shuffle(names)
        objects = {name: self.objects[name] for name in names}
        data = self.watched(lambda: gn.restore(self.path, **objects))
        self.outcomes["refused to restore" if data is None else "restored"] += 1
        if data is None:
            assert contents(self.objects) == self.before, "a refused restore changed an object"
            return
        self.objects, self.before = self._objects()
        assert mutation.document is not None
        extras = mutation.document["extras"]
        told = {name: plain(part["tree"], mutation.tensors) for name, part in extras.items()}
        assert as_text(data) == as_text(
            {name: told[name] for name in told if extras[name]["kind"] == "data"}
        )
        # it does not keep what it does not use
        expected = torch.Generator().set_state(told["generator"]).get_state()
        assert torch.equal(objects["generator"].get_state(), expected)
        kept = vars(objects["scheduler"])
        assert all(as_text(kept[key]) == as_text(value) for key, value in told["scheduler"].items())

    def _objects(self) -> tuple[dict[str, Any], str]:
        """Returns objects in the middle of a training, and what they hold; refused restores leave
        them for the next.
        """
        objects = objects_for(self.net)
        for name, state in self.states.items():
            objects[name].load_state_dict(copy.deepcopy(state))
        return objects, contents(objects)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.watching and event.startswith(FORBIDDEN):
            self.forbidden.append(f"{event} {arguments}"[:200])


def graph_of(document: Document, tensors: Tensors) -> str:
    """Returns what a file says about the net and its journal, as text."""
    arrays = {name: tensor for name, tensor in tensors.items() if not name.startswith("extras")}
    return as_text([document.get("graph"), document.get("journal"), arrays])


def require_agreement(net: gn.GrapNet, document: Document, tensors: Tensors) -> None:
    """Asserts that a net is exactly what a file says."""
    gn.check(net)
    net(torch.zeros(2, net.sizes[0], dtype=net.transitions[0].weight.dtype))
    assert (net.version, net.next_uid) == (
        document["graph"]["version"],
        document["graph"]["next_uid"],
    )
    state = net.state_dict()
    for n, layer in enumerate(net.layers):
        described, name = document["graph"]["layers"][n], f"layers.{n}."
        same(layer.uids, tensors[name + "uid"])
        assert layer.owners == [
            described["owners"][code] for code in tensors[name + "owner"].tolist()
        ]
        assert layer.activations == [
            described["activations"][code] for code in tensors[name + "activation"].tolist()
        ]
        for key in ("bias", "frozen") if n else ():
            same(state[name + key], tensors[name + key])
    for t in range(len(net.transitions)):
        described = document["graph"]["transitions"][t]
        assert not described["full"] or net.transitions[t].topology.is_full
        if not described["full"]:
            packed = tensors[f"transitions.{t}.child"].tolist()
            children = net.transitions[t].child.tolist()
            assert children == unpacked(packed, net.sizes[t + 1], len(children))
        for key in ("weight", "frozen") if described["full"] else ("ptr", "weight", "frozen"):
            same(state[f"transitions.{t}.{key}"].reshape(-1), tensors[f"transitions.{t}.{key}"])
    told = document["graph"].get("untrained", [])
    assert sorted(told) == sorted(
        name for name, parameter in net.named_parameters() if not parameter.requires_grad
    )
    require_same_journal(net, document["journal"], tensors)


def require_same_journal(net: gn.GrapNet, journal: Document, tensors: Tensors) -> None:
    """Asserts that a net has exactly the commits that a file says."""
    numbers = tensors["journal.numbers"].tolist()
    text = bytes(tensors["journal.text"].tolist())
    assert len(net.history) == len(numbers)
    start = 0
    for commit, row in zip(net.history, numbers, strict=True):
        reason, by, _, _ = json.loads(text[start : row[-1]])
        start = row[-1]
        assert (commit.version, commit.undoes or 0) == (row[0], row[2])
        assert (commit.reason, commit.by) == (reason, by)
        assert list(commit.counts.values()) == row[3:-1]
    # A net that lets go of nothing writes the same details again.
    if journal["undo_limit"] < len(numbers) or journal["detail_limit"] < 2**20:
        return
    undo = bool(journal["undoable"] or journal["redoable"])
    written = gn.Archive.of(net, undo=undo, history="full").to_bytes()
    _, again = parse(written)
    if undo and "journal.details" in tensors:
        assert details_of(again) == details_of(tensors)


def details_of(tensors: Tensors) -> str:
    """Returns the details of a journal as text, with the numbers that they refer to."""
    details = json.loads(bytes(tensors["journal.details"].tolist()))
    pools = {name: t for name, t in tensors.items() if name.startswith("journal.pool.")}
    return as_text([details, dict(sorted(pools.items()))])


def unpacked(packed: list[int], limit: int, count: int) -> list[int]:
    """Returns numbers below `limit` that lie in bytes, the highest bit first."""
    width = max(limit - 1, 0).bit_length()
    bits = "".join(f"{byte:08b}" for byte in packed)
    assert len(packed) == -(-count * width // 8)
    return [int(bits[n * width : (n + 1) * width] or "0", 2) for n in range(count)]


def require_way_back(net: gn.GrapNet) -> None:
    """Asserts that undo and redo go all the way and back, and raise nothing but HistoryError."""
    trail = []
    for verb in (net.redo, net.undo, net.redo):
        for _ in range(40):
            try:
                verb()
            except gn.HistoryError:
                break
            gn.check(net)
        trail.append(
            [layer.uids.tolist() for layer in net.layers]
            + [t.child.tolist() for t in net.transitions]
        )
    assert trail[0] == trail[2]


def contents(objects: dict[str, Any]) -> str:
    """Returns everything that the objects hold, as text."""
    stateful = {
        name: value.state_dict() for name, value in objects.items() if hasattr(value, "state_dict")
    }
    return as_text([stateful, objects["generator"].get_state()])


def as_text(tree: Any) -> str:
    """Returns a tree as text that tells tensors apart bit for bit, and NaN not from itself."""
    if isinstance(tree, Tensor):
        flat = tree.clone(memory_format=torch.contiguous_format).reshape(-1)
        return f"{tree.dtype}{list(tree.shape)}{flat.view(torch.uint8).numpy().tobytes().hex()}"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {as_text(item)}" for key, item in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return f"{type(tree).__name__}({', '.join(map(as_text, tree))})"
    return repr(tree)


def plain(tree: Any, tensors: Tensors) -> Any:
    """Returns what a tree of a document stands for."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind in ("tensor", "array", "complex"):
        found = tensors[content]
        return {
            "tensor": lambda: found,
            "array": found.numpy,
            "complex": lambda: torch.view_as_complex(found),
        }[kind]()
    if kind in ("dict", "counter"):
        items = {key: plain(item, tensors) for key, item in content}
        return Counter(items) if kind == "counter" else items
    return {"list": list, "tuple": tuple}[kind](plain(item, tensors) for item in content)


def same(found: Tensor, told: Tensor) -> None:
    """Asserts that two tensors are equal bit for bit."""
    assert as_text(found.detach()) == as_text(told)


def main(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Judges `count` mutations and returns the report."""
    example = folder / "example.ckpt"
    write_example(example)
    objects = objects_for(gn.load(example))
    gn.restore(example, **objects)
    referee = Referee(example, folder / "mutated.ckpt")
    # most ways to fail have been seen once
    for mutation in mutations(example.read_bytes(), 60, seed + 1):
        referee.judge(mutation)
    for counted in (referee.outcomes, referee.fields, referee.forbidden):
        counted.clear()
    referee.watched(lambda: compile("1", "", "eval"))
    control = list(referee.forbidden)
    referee.forbidden.clear()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, mapped + ROOM))
    for mutation in mutations(example.read_bytes(), count, seed):
        referee.judge(mutation)
    return {
        "outcomes": dict(referee.outcomes),
        "fields": dict(referee.fields),
        "grown": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) / 1024,  # MiB
        "faults": referee.faults,
        "forbidden": referee.forbidden,
        "control": control,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
