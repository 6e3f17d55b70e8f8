"""One net in numbers: layers, relations, families, owners, memory and backends, as plain data."""

from collections import Counter
from typing import Any, TypeVar

import torch
from torch import Tensor

import grapnet as gn
from grapnet.core.relations import Transition
from grapnet.execution.family import find_families

from .columns import plain

MOST_RELATIONS = 2_000_000  # of a transition in which families are looked for
_BLOCKS = 3  # sizes of families that are told

Owners = tuple[str | None, ...]  # None is nobody
Count = TypeVar("Count")


def census(net: gn.GrapNet, batch: int) -> dict[str, Any]:
    """Returns what there is to know about a net without running it.

    Args:
        net: the net.
        batch: the number of samples at which backends are chosen.
    """
    count, kept = net.count(), net.journal
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return {
        "sizes": net.sizes,
        "version": net.version,
        "commits": len(net.history),
        "undoable": len(kept.undoable),
        "redoable": len(kept.redoable),
        "dtype": str(net.execution.dtype).removeprefix("torch."),
        "relations": count.relations,
        "biases": count.biases,
        "frozen": count.frozen,
        "trainable": count.trainable,
        "parameters": parameters,
        "flops": count.flops,
        "bytes": _memory(net),
        "layers": [_layer(net, n) for n in range(len(net.layers))],
        "transitions": [_transition(store, t) for t, store in enumerate(net.transitions)],
        "owners": _owners(net),
        "backends": plain(net.execution.describe(batch)),
    }


def census_of_owner(net: gn.GrapNet, owner: str) -> dict[str, Any]:
    """Returns where the nodes of one owner are and whom they are related to."""
    nodes = net.select(owner=owner)
    layers, transitions = [], []
    for n, uids in nodes.uids_by_layer.items():
        mine = net.select(layer=n, owner=owner)
        biases = (
            0
            if n == 0
            else int(net.layers[n].frozen_bits(mine.rows_by_layer()[n].to(net.device)).sum())
        )
        names = dict(Counter(mine.activations))
        layers.append(
            {"layer": n, "nodes": len(uids), "of": len(net.layers[n]), "activations": names}
        )
        layers[-1]["uids"] = uids.tolist()
        layers[-1]["frozen_biases"] = biases
    coded, nobody = _owner_codes(net), _nobody(net)
    for t, store in enumerate(net.transitions):
        (upper, names), (lower, others) = coded[t], coded[t + 1]
        parents, children = (
            upper[store.topology.parents().long().cpu()],
            lower[store.child.long().cpu()],
        )
        leaving = (
            parents == names.index(owner)
            if owner in names
            else torch.zeros_like(parents, dtype=torch.bool)
        )
        coming = children == others.index(owner) if owner in others else torch.zeros_like(leaving)
        frozen = _frozen_bits(store)
        if bool((leaving | coming).any()):
            transitions.append(
                {
                    "transition": t,
                    "outgoing": int(leaving.sum()),
                    "incoming": int(coming.sum()),
                    "frozen": int((frozen & (leaving | coming)).sum()),
                    "to": _named(_by_owner(children[leaving], others), nobody),
                    "from": _named(_by_owner(parents[coming], names), nobody),
                }
            )
    return {"owner": owner, "nodes": len(nodes), "layers": layers, "transitions": transitions}


def _layer(net: gn.GrapNet, n: int) -> dict[str, Any]:
    layer = net.layers[n]
    kinds = {str(name): len(rows) for name, rows in layer.activation_names.kinds()}
    frozen = 0 if layer.is_sensory else len(layer.frozen_at)
    biases = 0 if layer.is_sensory else layer.size
    return {
        "layer": n,
        "nodes": len(layer),
        "first_and_last_uid": layer.uid[[0, -1]].tolist() if len(layer) else [],
        "activations": kinds or {layer.default_activation: 0},
        "dropout": layer.dropout,
        "biases": biases,
        "frozen_biases": frozen,
    }


def _transition(store: Transition, t: int) -> dict[str, Any]:
    topology, cells = store.topology, store.topology.n_parents * store.n_children
    found = {
        "transition": t,
        "parents": topology.n_parents,
        "children": store.n_children,
        "relations": store.size,
        "density": store.size / cells if cells else 0.0,
        "frozen": len(store.frozen_at),
        "families": None,
        "largest_families": [],
    }
    if store.size <= MOST_RELATIONS:
        shapes = sorted((group.shape for group in find_families(topology)), key=_rank)
        found["families"] = sum(families for families, _, _ in shapes)
        found["largest_families"] = [
            {"families": families, "members": members, "children": children}
            for families, members, children in shapes[:_BLOCKS]
        ]
    return found


def _rank(shape: tuple[int, int, int]) -> tuple[bool, int]:
    """Puts large families before small ones, and those of a single node last."""
    _, members, children = shape
    return members == 1, -members * children


def _owners(net: gn.GrapNet) -> dict[str, dict[str, int]]:
    """Returns, by owner, how many nodes there are, and how many relations these own and receive."""
    found: dict[str | None, dict[str, int]] = {}
    coded = _owner_codes(net)
    for codes, names in coded:
        for owner, count in _by_owner(codes, names).items():
            entry = found.setdefault(owner, {"nodes": 0, "outgoing": 0, "incoming": 0, "frozen": 0})
            entry["nodes"] += count
    for t, store in enumerate(net.transitions):
        (upper, names), (lower, others) = coded[t], coded[t + 1]
        frozen = upper[store.topology.parents_at(store.frozen_at).long().cpu()]
        counts = {
            "outgoing": _weighed(upper, names, store.topology.degrees.cpu()),
            "incoming": _weighed(lower, others, store.topology.fan_in().cpu()),
            "frozen": _by_owner(frozen, names),
        }
        for key, by_owner in counts.items():
            for owner, count in by_owner.items():
                found[owner][key] += count
    return _named(found, _nobody(net))


def _owner_codes(net: gn.GrapNet) -> list[tuple[Tensor, Owners]]:
    """Returns for every layer the code of each node's owner, [n] int64, and the owner that each
    code stands for.
    """
    return [(layer.owner_names.codes.long(), layer.owner_names.names) for layer in net.layers]


def _nobody(net: gn.GrapNet) -> str:
    """Returns what nodes without owner are listed under: "(none)", in more brackets where an owner
    is called that.
    """
    word, owners = "(none)", set(net.owners)
    while word in owners:
        word = f"({word})"
    return word


def _named(by_owner: dict[str | None, Count], nobody: str) -> dict[str, Count]:
    """Returns the same by name, as JSON can hold it."""
    return {nobody if owner is None else owner: count for owner, count in by_owner.items()}


def _by_owner(codes: Tensor, names: Owners) -> dict[str | None, int]:
    counts = torch.bincount(codes, minlength=len(names)).tolist()
    return {name: count for name, count in zip(names, counts, strict=True) if count}


def _weighed(codes: Tensor, names: Owners, weights: Tensor) -> dict[str | None, int]:
    """Returns the sum of whole numbers, one a node, by owner."""
    sums = torch.zeros(len(names), dtype=torch.int64).index_add_(0, codes, weights.long()).tolist()
    return {name: total for name, total in zip(names, sums, strict=True) if total}


def _frozen_bits(store: Transition) -> Tensor:
    bits = torch.zeros(store.size, dtype=torch.bool)
    bits[store.frozen_at.long().cpu()] = True
    return bits


def _memory(net: gn.GrapNet) -> dict[str, int]:
    biased = [layer for layer in net.layers if not layer.is_sensory]
    stores = [*net.transitions, *biased]
    coordinates = [x for store in stores for x in (store.parameter, store.frozen_values)]
    coordinates += [column.value for column in net.columns.values()]
    total = net.count().bytes
    held = sum(x.numel() * x.element_size() for x in coordinates)
    return {"coordinates": held, "wiring": total - held, "total": total}
