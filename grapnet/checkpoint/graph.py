"""A graph as tensors and a small document, and back."""

from typing import Any

import torch
from torch import Tensor

from grapnet.core.activation import ACTIVATIONS
from grapnet.core.errors import CheckpointError, InvariantError
from grapnet.core.invariants import check, check_wiring
from grapnet.core.labels import Labels
from grapnet.core.layer import Layer
from grapnet.core.relations import Topology, Transition
from grapnet.core.values import Coordinates
from grapnet.network import GrapNet

from .fields import Fields, entry, names, number

_FLOATS = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


def describe_graph(net: GrapNet, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Puts the graph's arrays into `tensors` and returns the rest of it as JSON."""
    layers = []
    for n, layer in enumerate(net.layers):
        owners, activations = layer.owner_names.compact(), layer.activation_names.compact()
        tensors[f"layers.{n}.uid"] = layer.uid
        tensors[f"layers.{n}.owner"], tensors[f"layers.{n}.activation"] = owners.codes, activations.codes
        layers.append(
            {
                "activation": layer.default_activation,
                "owners": list(owners.names) or [None],
                "activations": list(activations.names) or [layer.default_activation],
                "finite": layer.is_sensory or _is_finite(layer),
            }
        )
        if not layer.is_sensory:
            tensors[f"layers.{n}.bias"], tensors[f"layers.{n}.frozen"] = layer.values(), layer.frozen_at
    transitions = []
    for t, store in enumerate(net.transitions):
        tensors[f"transitions.{t}.ptr"], tensors[f"transitions.{t}.child"] = store.ptr, store.child
        tensors[f"transitions.{t}.weight"], tensors[f"transitions.{t}.frozen"] = store.values(), store.frozen_at
        transitions.append({"finite": _is_finite(store)})
    return {
        "version": net.version,
        "next_uid": net.next_uid,
        "dtype": str(net.transitions[0].weight.dtype),
        "layers": layers,
        "transitions": transitions,
    }


def rebuild_graph(document: Any, fields: Fields) -> GrapNet:
    """Returns the graph that `describe_graph` described; raises CheckpointError, naming the field, for anything else."""
    dtype = _FLOATS.get(entry(document, "dtype", str, "graph."))
    if dtype is None:
        raise CheckpointError(f"graph.dtype: {document['dtype'][:30]!r} is not a type of coordinates")
    described = entry(document, "layers", list, "graph.")
    wired = entry(document, "transitions", list, "graph.")
    if len(described) < 2 or len(wired) != len(described) - 1:
        raise CheckpointError(f"graph.transitions: {len(wired)} transitions do not fit {len(described)} layers")
    layers = [_layer(n, part, fields, dtype) for n, part in enumerate(described)]
    transitions = []
    for t, part in enumerate(wired):
        name, finite = f"transitions.{t}.", entry(part, "finite", bool, f"graph.transitions.{t}.")
        ptr, child = fields.tensor(name + "ptr", torch.int32), fields.tensor(name + "child", torch.int32)
        try:
            check_wiring(ptr, child, len(layers[t]), len(layers[t + 1]), name.rstrip("."))
        except InvariantError as error:
            raise CheckpointError(str(error)) from None
        values = _values(fields, name + "weight", dtype, len(child), finite)
        transitions.append(Transition(Topology(ptr, child, len(layers[t + 1])), values))
        transitions[-1].hold(fields.positions(name + "frozen", len(child)))
    net = GrapNet.from_parts(layers, transitions)
    net.version = number(document, "version", "graph.")
    net.next_uid = number(document, "next_uid", "graph.")
    try:
        check(net)
    except InvariantError as error:
        raise CheckpointError(f"graph: {error}") from None
    return net


def _layer(n: int, part: Any, fields: Fields, dtype: torch.dtype) -> Layer:
    name, where = f"layers.{n}.", f"graph.layers.{n}."
    uids = fields.tensor(name + "uid", torch.int64)
    biases = None
    if n > 0:
        biases = _values(fields, name + "bias", dtype, len(uids), entry(part, "finite", bool, where))
    default = entry(part, "activation", str, where)
    kinds = names(part, "activations", where)
    unknown = [kind for kind in (default, *kinds) if kind not in ACTIVATIONS]
    if unknown:
        raise CheckpointError(
            f"{where}activations: {str(unknown[0])[:40]!r} is unknown; gn.register_activation adds one"
        )
    layer = Layer(uids, biases, default)
    owners = _codes(fields, name + "owner", len(uids), names(part, "owners", where))
    layer.renew(uids, _codes(fields, name + "activation", len(uids), kinds), owners)
    if n > 0:
        layer.hold(fields.positions(name + "frozen", len(uids)))
    return layer


def _codes(fields: Fields, name: str, size: int, table: tuple[str | None, ...]) -> Labels:
    codes = fields.tensor(name, torch.int32, size)
    if size and (int(codes.min()) < 0 or int(codes.max()) >= len(table)):
        raise CheckpointError(f"{name}: a code is outside the table of {len(table)} names")
    return Labels(codes, table)


def _values(fields: Fields, name: str, dtype: torch.dtype, size: int, finite: bool) -> Tensor:
    values = fields.tensor(name, dtype, size)
    if finite and not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{name}: holds NaN or infinity, and was finite when it was saved")
    return values


def _is_finite(store: Coordinates) -> bool:
    return bool(torch.isfinite(store.values().detach()).all())
