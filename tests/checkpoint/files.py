"""A checkpoint with something of everything in it, and the file format as a stranger would read and
write it.
"""

import copy
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

import grapnet as gn

Objects = dict[str, Any]
DTYPES = {
    "F32": torch.float32,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
}
NOTES = {
    "seen": [1, 2.5, None, True],
    "by task": {3: torch.arange(4.0), "3": torch.ones(2, dtype=torch.bool)},
}


def objects_for(net: gn.GrapNet) -> Objects:
    """Returns an optimizer, a scheduler and a generator for a net."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(5)
    return {"optimizer": optimizer, "scheduler": StepLR(optimizer, 3), "generator": generator}


def train(net: gn.GrapNet, objects: Objects, steps: int) -> list[float]:
    """Trains on batches out of the generator and returns the losses."""
    losses = []
    for _ in range(steps):
        x = torch.randn(8, net.sizes[0], generator=objects["generator"]).to(
            net.transitions[0].weight.dtype
        )
        loss = (net(x) - x[:, : net.sizes[-1]]).square().mean()
        objects["optimizer"].zero_grad()
        loss.backward()
        objects["optimizer"].step()
        objects["scheduler"].step()
        losses.append(loss.item())
    return losses


def edited_net(dtype: torch.dtype = torch.float32) -> tuple[gn.GrapNet, Objects]:
    """Returns a trained net with owners, several activations, frozen parts, and commits to undo and
    to redo.
    """
    generator = torch.Generator().manual_seed(1)
    net = gn.GrapNet(
        [6, 8, 5, 4],
        activation=["relu", "tanh", "identity"],
        density=0.7,
        dtype=dtype,
        generator=generator,
    )
    objects = objects_for(net)
    gn.attach(objects["optimizer"], net)
    train(net, objects, 3)
    with net.edit(reason="grow", by="test", generator=generator) as edit:
        grown = edit.add_nodes(1, 3, activation="gelu", owner="task 1")
        edit.connect(net.layers[0][:4], grown)
        edit.connect(grown, net.layers[2][1:], weights="alloc")
    train(net, objects, 2)
    with net.edit(reason="cut the weakest") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.2))
        edit.set_owner(net.layers[2][:2], "task ü")
        edit.set_activation(net.layers[2][2:4], "sigmoid")
    with net.edit(reason="freeze", by="test") as edit:
        edit.freeze(net.layers[1][:3])
        edit.freeze(net.layers[2].outgoing()[::3])
    with net.edit(reason="remove") as edit:
        edit.remove_nodes(net.layers[1][[1, 5, 9]])
        edit.unfreeze(net.layers[2].outgoing()[:4])
    with net.edit(reason="leave an orphan") as edit:
        edit.cut(net.layers[1][2].incoming())
    with net.edit(reason="fold it", by="test") as edit:
        edit.remove_orphans(fold_bias=True)
    train(net, objects, 2)
    with net.edit(reason="to be undone", generator=generator) as edit:
        edit.connect(edit.add_nodes(1, 1, owner="late"), net.layers[2][:2])
        edit.cut(net.layers[2].outgoing()[:3])
    net.undo()
    return net, objects


def write_example(path: Path) -> None:
    """Writes the checkpoint that is mutated."""
    net, objects = edited_net()
    net.layers[3].bias.requires_grad_(False)
    gn.save(path, net, undo=True, history="full", notes=copy.deepcopy(NOTES), **objects)


def parse(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the document and the tensors of a file."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    document = json.loads(header.pop("__metadata__")["grapnet"])
    return document, {
        name: _tensor(body[slice(*of["data_offsets"])], of) for name, of in header.items()
    }


def _tensor(data: bytes, described: dict[str, Any]) -> Tensor:
    dtype = DTYPES[described["dtype"]]
    shape = described["shape"]
    if data:
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return torch.empty(shape, dtype=dtype)


def build(text: str, tensors: dict[str, Tensor]) -> bytes:
    """Returns a file with a right digest, whatever the document and the tensors say."""
    contents = {name: _content(tensor) for name, tensor in tensors.items()}
    header: dict[str, Any] = {
        "__metadata__": {"grapnet": text, "sha256": _digest(text, tensors, contents)}
    }
    codes = {dtype: code for code, dtype in DTYPES.items()}
    start = 0
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        end = start + len(contents[name])
        header[name] = {
            "dtype": codes[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
        start = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([struct.pack("<Q", len(head)), head, *(contents[name] for name in names)])


def _content(tensor: Tensor) -> bytes:
    if tensor.numel():
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return b""


def _digest(text: str, tensors: dict[str, Tensor], contents: dict[str, bytes]) -> str:
    total = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode() + contents[name])
    return total.hexdigest()


def contents(objects: Objects) -> str:
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


def run_module(name: str, *arguments: object) -> Any:
    """Runs a module of this folder in a process of its own and returns the JSON that it prints."""
    command = [sys.executable, "-m", f"tests.checkpoint.{name}", *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
