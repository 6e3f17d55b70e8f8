"""Loads and restores mutated checkpoints in a process of its own, under an audit, and reports what
happened as JSON.

python -m tests.checkpoint.referee FOLDER COUNT SEED
"""

import copy
import json
import random
import resource
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grapnet as gn

from .files import DTYPES, as_text, build, contents, edited_net, objects_for, parse, write_example

FIELDS = {
    *("container", "metadata", "sha256", "format", "execution", "extras"),
    *("graph", "layers", "transitions", "journal"),
}
ROOM = 512 * 2**20  # bytes to allocate at most
FORBIDDEN = (
    *("import", "exec", "compile", "code.__new__", "marshal.", "pickle.", "ctypes."),
    *("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.", "socket."),
    *("os.remove", "os.rename", "os.mkdir"),
)
VALUES = (
    *(None, True, -1, 0, 2, 2**31, 2**64, 10**400, 0.5, float("nan"), "", "relu", "x" * 10_000),
    *([], {}, [None], ["a", "a"], {"tensor": "layers.0.uid"}, {"dict": [[[], 1]]}, {"list": 5}),
)
NUMBERS = (-1, 0, 1, 3, 8, 40, 2**31 - 1, -(2**31), 2**63 - 1)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Returns the bytes of a file after a flip, a loss, an addition or a lie about the header."""
    at = rng.randrange(len(data))
    flipped = data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :]
    size = rng.choice([0, 1, 2**20, 2**40, 2**64 - 1, len(data)])
    return rng.choice(
        [
            flipped,
            data[:at],
            data[: rng.choice([0, 7, 8, 9, len(data) - 1])],
            data + rng.randbytes(rng.choice([1, 1000])),
            data[:at] + rng.randbytes(len(data[at : at + 512])) + data[at + 512 :],
            struct.pack("<Q", size) + data[8:],
        ]
    )


def forged(rng: random.Random, document: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """Returns a file with a right digest after a change of a tensor or of a value of the
    document.
    """
    name = rng.choice(list(tensors))
    change = rng.choice([change_entry, change_entry, change_form, None, None, None])
    if change is not None:
        tensors[name] = change(rng, tensors[name])
    elif rng.random() < 0.1:
        tensors[name + "x"] = tensors.pop(name)
    elif rng.random() < 0.1:
        depth = rng.choice([70, 100_000])
        text = json.dumps({**document, "extras": "HERE"})
        return build(text.replace('"HERE"', "[" * depth + "]" * depth), tensors)
    else:
        change_value(rng, document, tensors)
    return build(json.dumps(document), tensors)


def change_entry(rng: random.Random, tensor: Tensor) -> Tensor:
    """Changes one entry, so that numbers leave their range and their order."""
    flat = tensor.reshape(-1)
    if len(flat):
        at = rng.randrange(len(flat))
        if flat.dtype.is_floating_point:
            flat[at] = float("nan")
        elif flat.dtype == torch.bool:
            flat[at] = not flat[at]
        else:
            limits = torch.iinfo(flat.dtype)
            number = rng.choice([*NUMBERS, int(flat[at]) + 1, int(flat[at - 1])])
            flat[at] = min(max(number, limits.min), limits.max)
    return tensor


def change_form(rng: random.Random, tensor: Tensor) -> Tensor:
    """Changes the length, the type or the shape."""
    flat = tensor.reshape(-1)
    dtype = rng.choice(list(DTYPES.values()))
    return rng.choice(
        [flat[:-1], torch.cat([flat, flat[-1:]]), flat[:0], flat.view(-1, 1), tensor.to(dtype)]
    )


def change_value(rng: random.Random, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Replaces, drops or copies a value of the document or of the details of its journal."""
    details = json.loads(bytes(tensors["journal.details"].tolist()))
    tree = rng.choice([document, document["journal"], document["graph"], details])
    node, key = rng.choice(rng.choice([places(tree), [(document, key) for key in document]]))
    how = rng.randrange(4)
    if how == 0:
        del node[key]
    elif how == 1:
        other, place = rng.choice(places(tree))
        node[key] = copy.deepcopy(other[place])
    elif how == 2 and type(node[key]) is int:
        node[key] += rng.choice([-1, 1, 100])
    else:
        node[key] = rng.choice(VALUES)
    tensors["journal.details"] = torch.tensor(list(json.dumps(details).encode()), dtype=torch.uint8)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Returns every container in a tree with each of its keys."""
    if not isinstance(node, dict | list):
        return []
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    found = [(node, key) for key in keys]
    for key in keys:
        found += places(node[key])
    return found


class Referee:
    """Judges one file after the other."""

    def __init__(self, example: Path, path: Path) -> None:
        self.path = path
        self.original = as_text(dict(gn.load(example).state_dict()))
        self.outcomes: Counter[str] = Counter()
        self.fields: Counter[str] = Counter()  # that refusals named
        self.faults: list[str] = []
        self.forbidden: list[str] = []
        self.watching = False
        self.net, objects = edited_net()
        self.states = {name: objects[name].state_dict() for name in ("optimizer", "scheduler")}
        sys.addaudithook(self._audit)

    def judge(self, data: bytes, *, is_damaged: bool) -> None:
        """Loads and restores one mutated file; notes what is wrong with how that went."""
        self.path.write_bytes(data)
        try:
            net = self.watched(lambda: gn.load(self.path))
            self.outcomes["refused to load" if net is None else "loaded"] += 1
            if net is not None:
                if is_damaged:
                    assert as_text(dict(net.state_dict())) == self.original
                require_sound(net)
            self._restore()
        except Exception as error:
            self.faults.append(f"{type(error).__name__}: {error}"[:500])

    def watched(self, act: Callable[[], Any]) -> Any:
        """Returns what `act` returns, or None when it refused the file in the way it should."""
        self.watching = True
        try:
            return act()
        except gn.errors.CheckpointError as error:
            refusal = error
        finally:
            self.watching = False
        field = str(refusal).split(":")[0].split(".")[0].split("[")[0]
        assert field in FIELDS, f"the message names no field: {refusal}"
        self.fields[field] += 1
        assert not isinstance(refusal.__cause__, MemoryError), f"it tried to allocate: {refusal}"
        return None

    def _restore(self) -> None:
        objects = objects_for(self.net)
        for name, state in self.states.items():
            objects[name].load_state_dict(copy.deepcopy(state))
        before = contents(objects)
        data = self.watched(lambda: gn.restore(self.path, **objects))
        self.outcomes["refused to restore" if data is None else "restored"] += 1
        if data is None:
            assert contents(objects) == before, "a refused restore changed an object"

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.watching and event.startswith(FORBIDDEN):
            self.forbidden.append(f"{event} {arguments}"[:200])


def require_sound(net: gn.GrapNet) -> None:
    """Asserts that a net runs, and that undo and redo work or raise HistoryError."""
    for verb in (net.redo, net.undo, net.redo):
        for _ in range(40):
            gn.check(net)
            net(torch.zeros(2, net.sizes[0], dtype=net.transitions[0].weight.dtype))
            try:
                verb()
            except gn.errors.HistoryError:
                break


def main(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Judges `count` mutations, every second one signed again, and returns the report."""
    example = folder / "example.ckpt"
    write_example(example)
    data = example.read_bytes()
    gn.restore(example, **objects_for(gn.load(example)))
    referee = Referee(example, folder / "mutated.ckpt")
    rng = random.Random(seed)
    for n in range(60 + count):
        if n == 60:
            # most ways to fail have been seen once, and have imported what they need
            for counted in (referee.outcomes, referee.fields, referee.forbidden):
                counted.clear()
            referee.watched(lambda: compile("1", "", "eval"))
            control = list(referee.forbidden)
            referee.forbidden.clear()
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, mapped + ROOM))
        if n % 2:
            referee.judge(damaged(rng, data), is_damaged=True)
        else:
            referee.judge(forged(rng, *parse(data)), is_damaged=False)
    return {
        "outcomes": dict(referee.outcomes),
        "fields": dict(referee.fields),
        "faults": referee.faults,
        "forbidden": referee.forbidden,
        "control": control,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
