"""Two nets side by side: nodes by uid, relations by the uids of their ends, and whether one
continues the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch

import grapnet as gn
from grapnet.core.column import Column
from grapnet.core.layer import Layer
from grapnet.core.relations import Transition

from .columns import counted


class Difference(NamedTuple):
    """How many of a kind are only in the second net, only in the first, or differ in both, and by
    how much at most.
    """

    added: int | None = None
    removed: int | None = None
    changed: int | None = None
    largest: float | None = None


@dataclass(frozen=True, eq=False)
class Comparison:
    """What differs between two nets, and the commits that lead from one to the other.

    Histories count for nothing in `is_equal`: a net whose cut was undone is equal to the one
    before.
    """

    nodes_added: np.ndarray  # [n] uids
    nodes_removed: np.ndarray
    relations_added: np.ndarray  # [n, 2] uids of parent and child
    relations_removed: np.ndarray
    differences: dict[str, Difference]
    lineage: str
    commits: tuple[gn.Commit, ...]

    @property
    def is_equal(self) -> bool:
        """True when nothing differs."""
        return not any(any(one[:3]) for one in self.differences.values())


def compare(a: gn.GrapNet, b: gn.GrapNet) -> Comparison:
    """Returns what differs between two nets on the CPU."""
    (mine, uids), (others, other_uids) = _nodes(a), _nodes(b)
    kept, at, other_at = np.intersect1d(mine, others, assume_unique=True, return_indices=True)
    pairs, other_pairs = _pairs(a), _pairs(b)
    _, slot, other_slot = np.intersect1d(
        pairs, other_pairs, assume_unique=True, return_indices=True
    )
    came, went = _others(other_pairs, other_slot), _others(pairs, slot)
    differences = {
        "layers": _counts(len(a.layers), len(b.layers)),
        "nodes": Difference(len(others) - len(kept), len(mine) - len(kept)),
        "relations": Difference(len(came), len(went)),
        "weights": _values(_weights(a)[slot], _weights(b)[other_slot]),
        "biases": _values(_biases(a)[at], _biases(b)[other_at]),
        "frozen relations": _turned(
            _frozen(a.transitions)[slot], _frozen(b.transitions)[other_slot]
        ),
        "frozen biases": _turned(_frozen(a.layers)[at], _frozen(b.layers)[other_at]),
        "owners": Difference(
            changed=_renamed(_names(a, "owner_names")[at], _names(b, "owner_names")[other_at])
        ),
        "activations": Difference(
            changed=_renamed(
                _names(a, "activation_names")[at], _names(b, "activation_names")[other_at]
            )
        ),
        "activation of layers": _unequal(
            *([x.default_activation for x in net.layers] for net in (a, b))
        ),
        "dropout of layers": _unequal(*([x.dropout for x in net.layers] for net in (a, b))),
        "order of children": Difference(
            changed=_reordered(pairs[np.sort(slot)], other_pairs[np.sort(other_slot)])
        ),
        "attention's columns": _columns(a, b),
        "backends": _unequal(a.execution.choices(), b.execution.choices()),
        "data type": Difference(changed=int(a.execution.dtype != b.execution.dtype)),
    }
    lineage, commits = _lineage(a, b, came, went)
    nodes = _others(other_uids, other_at), _others(uids, at)
    return Comparison(*nodes, _ends(came), _ends(went), differences, lineage, commits)


def _lineage(
    a: gn.GrapNet, b: gn.GrapNet, came: np.ndarray, went: np.ndarray
) -> tuple[str, tuple[gn.Commit, ...]]:
    """Says how the histories are related; also returns the commits of the longer one that the other
    has not.
    """
    together = list(zip(a.history, b.history, strict=False))
    same = sum(1 for _ in takewhile(lambda pair: _is_same(*pair), together))
    longer, shorter, names = (
        (b, a, ("B", "A")) if len(b.history) >= len(a.history) else (a, b, ("A", "B"))
    )
    if same < len(together):
        return _parted(same, a), ()
    added, removed = (came, went) if longer is b else (went, came)
    if not _leads_there(longer, shorter, added, removed):
        return "separate histories", ()
    if len(a.history) == len(b.history):
        return f"both stand at version {a.version:,} of the same history", ()
    between = longer.history[len(shorter.history) :]
    told = (
        f"{counted(len(between), 'commit')} from version {shorter.version:,} to version"
        f" {longer.version:,}"
    )
    return f"{names[0]} continues {names[1]}: {told}", between


def _parted(same: int, net: gn.GrapNet) -> str:
    return (
        f"their histories part after version {net.history[same - 1].version:,}"
        if same
        else "separate histories"
    )


def _leads_there(
    longer: gn.GrapNet, shorter: gn.GrapNet, added: np.ndarray, removed: np.ndarray
) -> bool:
    """Says whether the journal of one net tells exactly the relations that differ from the
    other.
    """
    try:
        told = longer.diff(shorter.version)
    except gn.HistoryError:  # the journal no longer keeps them; the commits before are the same
        return bool(shorter.history)
    keys = [
        pairs[:, 0] << 32 | pairs[:, 1] for pairs in (told.relations_added, told.relations_removed)
    ]
    return all(
        np.array_equal(np.sort(key.numpy()), found)
        for key, found in zip(keys, (added, removed), strict=True)
    )


def _is_same(one: gn.Commit, other: gn.Commit) -> bool:
    if one.counts != other.counts:
        return False
    return (one.version, one.reason, one.by, one.undoes) == (
        other.version,
        other.reason,
        other.by,
        other.undoes,
    )


def _nodes(net: gn.GrapNet) -> tuple[np.ndarray, np.ndarray]:
    """Returns a key of layer and uid for every node, and its uid."""
    uids = torch.cat([layer.uid for layer in net.layers])
    layers = torch.arange(len(net.layers)).repeat_interleave(torch.tensor(net.sizes))
    return (layers << 48 | uids).numpy(), uids.numpy()


def _pairs(net: gn.GrapNet) -> np.ndarray:
    """Returns the uids of both ends of every relation in one key, parent first."""
    wirings = list(zip(net.layers, net.transitions, net.layers[1:], strict=False))
    parents = torch.cat([upper.uid[store.topology.parents().long()] for upper, store, _ in wirings])
    children = torch.cat([lower.uid[store.child.long()] for _, store, lower in wirings])
    return (parents << 32 | children).numpy()


def _others(items: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns, sorted, the items that do not stand at any of the places."""
    return np.sort(np.delete(items, at))


def _ends(keys: np.ndarray) -> np.ndarray:
    return np.stack([keys >> 32, keys & 0xFFFFFFFF], axis=1)


def _weights(net: gn.GrapNet) -> np.ndarray:
    return torch.cat([store.values().detach().double() for store in net.transitions]).numpy()


def _biases(net: gn.GrapNet) -> np.ndarray:
    """Returns the bias of every node, 0 for sensory ones."""
    parts = [
        torch.zeros(len(x)).double() if x.is_sensory else x.values().detach().double()
        for x in net.layers
    ]
    return torch.cat(parts).numpy()


def _frozen(stores: Iterable[Transition | Layer]) -> np.ndarray:
    """Says for every coordinate whether it is frozen; a sensory node counts as one that is not."""
    parts = []
    for store in stores:
        sensory = isinstance(store, Layer) and store.is_sensory
        bits = torch.zeros(len(store) if isinstance(store, Layer) else store.size, dtype=torch.bool)
        if not sensory:
            bits[store.frozen_at.long()] = True
        parts.append(bits)
    return torch.cat(parts).numpy()


def _names(net: gn.GrapNet, column: str) -> np.ndarray:
    """Returns one name a node; None, of a node without owner, is told from every text."""
    return np.array([name for layer in net.layers for name in getattr(layer, column)], dtype=object)


def _values(first: np.ndarray, second: np.ndarray) -> Difference:
    # bit for bit, so that NaN equals itself and 0 is not -0
    differs = first.view(np.int64) != second.view(np.int64)
    if not differs.any():
        return Difference(changed=0)
    with np.errstate(invalid="ignore"):  # infinity less itself
        changes = np.abs(second[differs] - first[differs])
    return Difference(changed=int(differs.sum()), largest=float(changes.max()))


def _turned(first: np.ndarray, second: np.ndarray) -> Difference:
    return Difference(int((second & ~first).sum()), int((first & ~second).sum()))


def _renamed(first: np.ndarray, second: np.ndarray) -> int:
    return int((first != second).sum())


def _unequal(first: Sequence[float | str], second: Sequence[float | str]) -> Difference:
    return Difference(changed=sum(x != y for x, y in zip(first, second, strict=False)))


def _counts(first: int, second: int) -> Difference:
    return Difference(max(second - first, 0), max(first - second, 0))


def _reordered(first: np.ndarray, second: np.ndarray) -> int:
    """Returns how many nodes have those children that both nets know in another order."""
    return len(np.unique(first[first != second] >> 32))


def _columns(a: gn.GrapNet, b: gn.GrapNet) -> Difference:
    mine, others = dict(a.columns.items()), dict(b.columns.items())
    both = mine.keys() & others.keys()
    changed = sum(not _is_like(mine[name], others[name]) for name in both)
    return Difference(len(others.keys() - both), len(mine.keys() - both), changed)


def _is_like(one: Column, other: Column) -> bool:
    """Says whether two columns hold the same numbers, bit for bit, and draw newborn nodes' from the
    same range.
    """
    first, second = (
        column.values().detach().double().numpy().view(np.int64) for column in (one, other)
    )
    return one.bound == other.bound and np.array_equal(first, second)
