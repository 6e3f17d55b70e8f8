"""One net in a file: its graph, its journal and the backends that run it."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grapnet.core._activation import is_activation
from grapnet.core._check import check, check_wiring
from grapnet.core._coordinates import Coordinates
from grapnet.core._edit import LARGEST_UID
from grapnet.core._errors import CheckpointError, InvariantError
from grapnet.core._graph import Column
from grapnet.core._layer import Layer
from grapnet.core._transition import Topology, Transition, full_topology
from grapnet.execution.attention import Attention
from grapnet.network import GrapNet

from .codec import Fields, entry, names, number
from .journal import Kept, describe_journal, rebuild_journal, rehearse

_FLOATS = {
    str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
_PIECE = 1 << 20  # numbers at a time, a multiple of 8: their bits take a byte each on the way


def describe_net(
    net: GrapNet, tensors: dict[str, Tensor], *, undo: bool, history: Kept
) -> dict[str, Any]:
    """Puts a net's arrays into `tensors` and returns the rest of it as JSON; what undo needs only
    when asked for.
    """
    if net.version != (net.history[-1].version if net.history else 0):
        raise CheckpointError(
            "graph.version: a trial is in effect, and no journal leads to it; save after its block"
        )
    names: dict[int, str] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if names.setdefault(id(parameter), name) != name:
            raise CheckpointError(
                f"graph: {name} is the same Parameter as {names[id(parameter)]}; give each its own"
            )
    return {
        "graph": describe_graph(net, tensors),
        "journal": describe_journal(net.journal, tensors, undo=undo, history=history),
        "execution": net.execution.choices(),
    }


def rebuild_net(document: Any, fields: Fields) -> GrapNet:
    """Returns the net that `describe_net` described; raises CheckpointError, naming the field, for
    any other.
    """
    graph = entry(document, "graph", dict, "")
    net = rebuild_graph(graph, fields)
    net.journal = rebuild_journal(entry(document, "journal", dict, ""), fields, net)
    backends = entry(document, "execution", list, "")
    if len(backends) != len(net.transitions) or any(type(name) is not str for name in backends):
        raise CheckpointError("execution: expected the name of a backend for every transition")
    rebuild_columns(graph, fields, net, backends)
    switch_off(graph, net)
    net.execution.choose(backends)
    rehearse(net)
    return net


def warn_of_unmet_choices(net: GrapNet) -> None:
    """Warns of every backend that a net's file asks for and that nobody registered in this
    process.
    """
    for name in sorted(set(net.execution.unmet.values())):
        warnings.warn(
            f"this file asks for the backend {name!r}, which is not registered here, so auto runs"
            " in its place. Call gn.register_backend before loading; or call it now, and then"
            f" net.execution.use({name!r})",
            stacklevel=3,  # whoever called gn.load
        )


def describe_graph(net: GrapNet, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Puts the graph's arrays into `tensors` and returns the rest of it as JSON."""
    layers = []
    for n, layer in enumerate(net.layers):
        owners, activations = layer.owner_names.compact(), layer.activation_names.compact()
        tensors[f"layers.{n}.uid"] = layer.uid
        tensors[f"layers.{n}.owner"], tensors[f"layers.{n}.activation"] = (
            owners.codes,
            activations.codes,
        )
        layers.append(
            {
                "activation": layer.default_activation,
                "owners": list(owners.names) or [None],
                "activations": list(activations.names) or [layer.default_activation],
                "finite": layer.is_sensory or _is_finite(layer),
                **({"dropout": layer.dropout} if layer.dropout else {}),
            }
        )
        if not layer.is_sensory:
            tensors[f"layers.{n}.bias"], tensors[f"layers.{n}.frozen"] = (
                layer.values(),
                layer.frozen_at,
            )
    transitions = []
    for t, store in enumerate(net.transitions):
        # The wiring of a full transition follows from the sizes of its layers.
        is_full = store.topology.is_full
        if not is_full:
            tensors[f"transitions.{t}.ptr"] = store.ptr
            tensors[f"transitions.{t}.child"] = pack(store.child, store.n_children)
        tensors[f"transitions.{t}.weight"] = store.values()
        tensors[f"transitions.{t}.frozen"] = store.frozen_at
        transitions.append({"finite": _is_finite(store), "full": is_full})
    columns = []
    for name, column in net.columns.items():
        tensors[f"columns.{name}"] = column.values()
        columns.append({"name": name, "bound": column.bound, "finite": _is_finite(column)})
    untrained = [name for name, parameter in net.named_parameters() if not parameter.requires_grad]
    return {
        "version": net.version,
        "next_uid": net.next_uid,
        "dtype": _common_dtype(net),
        "layers": layers,
        "transitions": transitions,
        **({"columns": columns} if columns else {}),
        **({"untrained": untrained} if untrained else {}),
    }


def rebuild_graph(document: Any, fields: Fields) -> GrapNet:
    """Returns the graph that `describe_graph` described; raises CheckpointError, naming the field,
    for any other.
    """
    dtype = _FLOATS.get(entry(document, "dtype", str, "graph."))
    if dtype is None:
        raise CheckpointError(
            f"graph.dtype: {document['dtype'][:30]!r} is not a type of coordinates"
        )
    version, next_uid = (
        number(document, "version", "graph."),
        number(document, "next_uid", "graph.", LARGEST_UID),
    )
    described = entry(document, "layers", list, "graph.")
    wired = entry(document, "transitions", list, "graph.")
    if len(described) < 2 or len(wired) != len(described) - 1:
        raise CheckpointError(
            f"graph.transitions: {len(wired)} transitions do not fit {len(described)} layers"
        )
    layers = [_layer(n, part, fields, dtype, next_uid) for n, part in enumerate(described)]
    transitions = [
        _transition(t, part, fields, dtype, len(layers[t]), len(layers[t + 1]))
        for t, part in enumerate(wired)
    ]
    net = GrapNet.from_parts(layers, transitions)
    net.version, net.next_uid = version, next_uid
    try:
        check(net)
    except InvariantError as error:
        raise CheckpointError(f"graph: {error}") from None
    return net


def rebuild_columns(document: Any, fields: Fields, net: GrapNet, choices: Sequence[str]) -> None:
    """Gives the net the columns that its policies need; raises CheckpointError when the file holds
    others.
    """
    attended = [t for t, name in enumerate(choices) if name == Attention.name]
    places = {name: (t, t + side) for t in attended for side, name in enumerate(Attention.names(t))}
    parts = entry(document, "columns", list, "graph.") if "columns" in document else []
    found = [entry(part, "name", str, f"graph.columns.{n}.") for n, part in enumerate(parts)]
    if sorted(found) != sorted(places):
        told = ", ".join(found) or "none"
        raise CheckpointError(
            f"graph.columns: {told[:100]} where execution needs {', '.join(places) or 'none'}"
        )
    columns = []
    for n, (name, part) in enumerate(zip(found, parts, strict=True)):
        where, (t, layer) = f"graph.columns.{n}.", places[name]
        bound, finite = entry(part, "bound", float, where), entry(part, "finite", bool, where)
        if not 0 <= bound < float("inf"):
            raise CheckpointError(f"{where}bound: expected a number that is not negative")
        values = _values(
            fields,
            f"columns.{name}",
            net.transitions[t].weight.dtype,
            len(net.layers[layer]),
            finite,
        )
        columns.append(Column(name, layer, values, beside=f"transitions.{t}.weight", bound=bound))
    net.set_columns(columns)


def switch_off(document: Any, net: GrapNet) -> None:
    """Takes `requires_grad` from the Parameters that did not train; raises CheckpointError when the
    net has no such.
    """
    parameters = dict(net.named_parameters())
    untrained = entry(document, "untrained", list, "graph.") if "untrained" in document else []
    unknown = any(type(name) is not str or name not in parameters for name in untrained)
    if unknown or len(set(untrained)) < len(untrained):
        raise CheckpointError("graph.untrained: expected names of Parameters, each once")
    for name in untrained:
        parameters[name].requires_grad_(False)


def _transition(
    t: int, part: Any, fields: Fields, dtype: torch.dtype, n_parents: int, n_children: int
) -> Transition:
    name = f"transitions.{t}."
    finite = entry(part, "finite", bool, f"graph.{name}")
    if entry(part, "full", bool, f"graph.{name}"):
        # The weights come first: the file holds as many as the wiring is going to have relations.
        values = _values(fields, name + "weight", dtype, n_parents * n_children, finite)
        topology = full_topology(n_parents, n_children, torch.device("cpu"))
    else:
        values = _values(fields, name + "weight", dtype, None, finite)
        topology = _wiring(name, fields, len(values), n_parents, n_children)
    transition = Transition(topology, values)
    transition.hold(fields.positions(topology.n_relations, name + "frozen"))
    return transition


def _wiring(
    name: str, fields: Fields, n_relations: int, n_parents: int, n_children: int
) -> Topology:
    size = packed_size(n_relations, n_children)
    child = unpack(fields.vector(name + "child", torch.uint8, size), n_relations, n_children)
    ptr = fields.below(n_relations + 1, name + "ptr", torch.int32, n_parents + 1)
    try:
        # `check` looks for the rest
        check_wiring(ptr, child, n_parents, n_children, name.rstrip("."), distinct=False)
    except InvariantError as error:
        raise CheckpointError(str(error)) from None
    return Topology(ptr, child, n_children)


def _layer(n: int, part: Any, fields: Fields, dtype: torch.dtype, next_uid: int) -> Layer:
    name, where = f"layers.{n}.", f"graph.layers.{n}."
    uids = fields.below(next_uid, name + "uid", torch.int64)
    biases = None
    if n > 0:
        biases = _values(
            fields, name + "bias", dtype, len(uids), entry(part, "finite", bool, where)
        )
    default = entry(part, "activation", str, where)
    kinds = names(part, "activations", where)
    unknown = [kind for kind in (default, *kinds) if not is_activation(kind)]
    if unknown:
        raise CheckpointError(
            f"{where}activations: {str(unknown[0])[:40]!r} is unknown; gn.register_activation"
            " adds one"
        )
    layer = Layer(uids, biases, default)
    dropout = entry(part, "dropout", float, where) if "dropout" in part else 0.0
    if not 0 <= dropout <= 1:
        raise CheckpointError(f"{where}dropout: expected a probability")
    layer.dropout = dropout
    activations = fields.labels(kinds, name + "activation", len(uids))
    layer.renew(
        uids, activations, fields.labels(names(part, "owners", where), name + "owner", len(uids))
    )
    if n > 0:
        layer.hold(fields.positions(len(uids), name + "frozen"))
    return layer


def _values(
    fields: Fields, name: str, dtype: torch.dtype, size: int | None, finite: bool
) -> Tensor:
    values = fields.vector(name, dtype, size)
    if finite and not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{name}: holds NaN or infinity, and was finite when it was saved")
    return values


def _is_finite(store: Coordinates) -> bool:
    return bool(torch.isfinite(store.values().detach()).all())


def _common_dtype(net: GrapNet) -> str:
    """Returns the one type of all coordinates; raises CheckpointError for a mixture, which could
    not be loaded.
    """
    found = sorted({str(parameter.dtype) for parameter in net.parameters()})
    if len(found) != 1 or found[0] not in _FLOATS:
        raise CheckpointError(
            f"graph.dtype: a net is saved in one of {', '.join(_FLOATS)}, this one is {found}"
        )
    return found[0]


def pack(numbers: Tensor, limit: int) -> Tensor:
    """Returns numbers from 0 to `limit` - 1 as bytes, number after number, the highest bit first.

    Args:
        numbers: whole numbers, [n].
        limit: what all of them are below.
    """
    shifts = _shifts(limit)
    given = numbers.detach().cpu().numpy()
    pieces = [np.empty(0, dtype=np.uint8)]
    for start in range(0, len(given), _PIECE):
        piece = given[start : start + _PIECE]
        # [n, bits of a number]
        bits = (piece[:, None] >> shifts) & 1
        pieces.append(np.packbits(bits.astype(np.uint8).reshape(-1)))
    return torch.from_numpy(np.concatenate(pieces))


def unpack(packed: Tensor, count: int, limit: int) -> Tensor:
    """Returns the `count` numbers that `pack` has packed, int32; some may not be below `limit` if
    the bytes are others.
    """
    shifts = _shifts(limit)
    given = packed.numpy()
    numbers = np.zeros(count, dtype=np.int32)
    for start in range(0, count, _PIECE):
        stop = min(count, start + _PIECE)
        first = start * len(shifts) // 8
        last = first + packed_size(stop - start, limit)
        bits = np.unpackbits(given[first:last], count=(stop - start) * len(shifts))
        bits = bits.reshape(stop - start, len(shifts))
        for column, shift in zip(bits.T, shifts, strict=True):
            numbers[start:stop] |= column.astype(np.int32) << shift
    return torch.from_numpy(numbers)


def packed_size(count: int, limit: int) -> int:
    """Returns how many bytes `pack` makes of `count` numbers."""
    return (count * len(_shifts(limit)) + 7) // 8


def _shifts(limit: int) -> np.ndarray:
    """Returns the places of the bits of a number below `limit`, the highest first."""
    return np.arange(max(limit - 1, 0).bit_length(), dtype=np.int32)[::-1]
