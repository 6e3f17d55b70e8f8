"""What processes tell each other about a graph: its commits as bytes, and a digest of its
structure.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grapnet.core.change import Change, LayerChange, NodeRecord, Pairs, Relabel, TransitionChange
from grapnet.core.errors import HistoryError
from grapnet.core.graph import Graph
from grapnet.core.journal import Commit
from grapnet.core.labels import Labels
from grapnet.core.remap import IndexMap
from grapnet.core.vector import Shift, VectorChange
from grapnet.core.wording import with_article


@dataclass(frozen=True, eq=False)
class Sent:
    """One commit on its way to other processes, and how many commits its graph kept for undo at the
    time.
    """

    commit: Commit
    undo_limit: int


@dataclass(frozen=True, eq=False)
class Letter:
    """What other processes need to repeat what happened to one graph."""

    sent: list[Sent]
    next_uid: int
    undo_limit: int


_PARTS = (
    Change,
    LayerChange,
    TransitionChange,
    NodeRecord,
    Relabel,
    Pairs,
    VectorChange,
    Shift,
    IndexMap,
    Labels,
)
_KINDS = {kind.__name__: kind for kind in (Letter, Sent, Commit, *_PARTS)}
# tensors by identity, so that what two parts share travels once
_Found = dict[int, tuple[int, Tensor]]
_PLAIN = (type(None), bool, int, float, str)
_NUMBERS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.bool,
    )
}


class Outbox:
    """Keeps the commits of one graph, with the values they brought, until they have been sent;
    trials leave none.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.sent: list[Sent] = []
        graph.follow(self)

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Makes the commit ready to be sent; see `Follower`."""
        if commit.ends_trial:
            return lambda: self.sent.__delitem__(-1)
        sent = Sent(_outgoing(commit), graph.journal.undo_limit)
        return lambda: self.sent.append(sent)

    def letter(self) -> Letter:
        """Returns what the other processes are to repeat."""
        return Letter(self.sent, self.graph.next_uid, self.graph.journal.undo_limit)


def repeat(graph: Graph, letter: Letter) -> None:
    """Carries out on a graph what an equal one in another process went through, undo and redo as
    such.

    So attached optimizers get back, from their own process, the state that restored coordinates
    had.

    Raises:
        HistoryError: the graph was not equal; the commits before the one that is named were carried
            out.
    """
    journal = graph.journal
    for sent in letter.sent:
        commit, journal.undo_limit = sent.commit, sent.undo_limit
        if commit.undoes is None:
            graph.replay([commit])
        elif journal.undoable and journal.next_undo().version == commit.undoes:
            graph.undo(alone=True)
        elif journal.redoable and journal.next_redo().version == commit.undoes:
            graph.redo(alone=True)
        else:
            raise HistoryError(
                f"commit {commit.version} ({commit.reason!r}) takes back commit {commit.undoes}, "
                "of which this process no longer keeps the values"
            )
    graph.next_uid, journal.undo_limit = letter.next_uid, letter.undo_limit


def digest(graphs: Sequence[Graph]) -> str:
    """Returns the SHA-256 of graphs' structure: versions, uids, owners, activations, wiring, what
    is frozen.
    """
    total = hashlib.sha256()
    for graph in graphs:
        _add_structure(total, graph)
    return total.hexdigest()


def pack(value: Any) -> Tensor:
    """Returns commits, and whatever they are made of, as one uint8 tensor: their shape as JSON,
    then the numbers.
    """
    found: _Found = {}
    tree = _described(value, found)
    tensors = [tensor for _, tensor in found.values()]
    table = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    text = json.dumps([tree, table], separators=(",", ":")).encode()
    parts = [len(text).to_bytes(8, "little"), text]
    head = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    return torch.cat([head, *map(_bytes, tensors)])


def unpack(message: Tensor) -> Any:
    """Returns what `pack` was given, its tensors on the CPU; makes nothing but plain data and parts
    of commits.
    """
    message = message.cpu()
    start = 8 + int.from_bytes(message[:8].numpy().tobytes(), "little")
    tree, table = json.loads(message[8:start].numpy().tobytes())
    tensors = []
    for name, shape in table:
        dtype = _NUMBERS[name]
        stop = start + int(np.prod(shape)) * dtype.itemsize
        # a copy begins where dtype may
        tensors.append(message[start:stop].clone().view(dtype).reshape(shape))
        start = stop
    return _built(tree, tensors)


def _outgoing(commit: Commit) -> Commit:
    """Returns a commit as it is sent: with the values that came; each process has those that went
    by itself.
    """
    if commit.undoes is not None:
        return Commit(commit.version, commit.reason, Change({}, {}), undoes=commit.undoes)
    layers = {
        n: replace(
            c,
            biases=c.biases and _arriving(c.biases),
            columns={k: _arriving(v) for k, v in c.columns.items()},
        )
        for n, c in commit.change.layers.items()
    }
    wires = {
        t: replace(c, weights=_arriving(c.weights)) for t, c in commit.change.transitions.items()
    }
    return Commit(
        commit.version, commit.reason, Change(layers, wires), commit.by, commit.operations
    )


def _arriving(vector: VectorChange) -> VectorChange:
    return replace(
        vector, gone_values=None, born_gradients=None, gone_gradients=None, flip_gradients=None
    )


def _described(value: Any, tensors: _Found) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return {"tensor": tensors.setdefault(id(value), (len(tensors), value))[0]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_described(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {
            "dict": [
                [_described(key, tensors), _described(item, tensors)] for key, item in value.items()
            ]
        }
    name = type(value).__name__
    if not is_dataclass(value) or _KINDS.get(name) is not type(value):
        raise TypeError(f"commits hold plain data and tensors, not {with_article(name)}")
    held = {f.name: getattr(value, f.name) for f in fields(value) if not f.name.startswith("_")}
    return {name: {key: _described(item, tensors) for key, item in held.items()}}


def _built(tree: Any, tensors: list[Tensor]) -> Any:
    if type(tree) in _PLAIN:
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        items = [_built(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {_built(key, tensors): _built(item, tensors) for key, item in content}
    return _KINDS[kind](**{key: _built(item, tensors) for key, item in content.items()})


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # one entry or none may have any stride and still count as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _add_structure(total: "hashlib._Hash", graph: Graph) -> None:
    total.update(f"\ngraph of version {graph.version}, next uid {graph.next_uid}\n".encode())
    for layer in graph.layers:
        _add(total, "layer", layer.uid)
        for column in (layer.owner_names, layer.activation_names):
            for name, rows in sorted(column.kinds(), key=lambda kind: str(kind[0])):
                _add(total, repr(name), rows)
    for transition in graph.transitions:
        _add(total, "transition", transition.ptr, transition.child)
    for name, buffer in graph.named_buffers():
        if name.endswith("frozen_at"):
            _add(total, name, buffer)
    for name, parameter in graph.named_parameters():
        total.update(
            f"{name} {parameter.dtype} {list(parameter.shape)} {parameter.requires_grad}".encode()
        )


def _add(total: "hashlib._Hash", title: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        total.update(f"\n{title} {len(tensor)}\n".encode())
        if len(tensor):
            total.update(_bytes(tensor).numpy().data)
