"""One net in a file: its graph, its journal and the backends that run it."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grapnet._network import GrapNet
from grapnet.core._activation import is_activation
from grapnet.core._check import check, check_wiring
from grapnet.core._edit import LARGEST_UID
from grapnet.core._errors import CheckpointError, InvariantError
from grapnet.core._graph import Column, Graph
from grapnet.core._layer import Layer
from grapnet.core._transition import Topology, Transition, full_topology
from grapnet.execution._manager import AUTO, BACKENDS
from grapnet.execution._policy import column_places

from ._codec import Fields, entry, names, number
from ._journal import Kept, describe_journal, rebuild_journal

_FLOATS = {
    str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
_PIECE = 1 << 20  # numbers at a time, a multiple of 8: their bits take a byte each on the way


def describe_net(
    net: GrapNet, tensors: dict[str, Tensor], *, undo: bool, history: Kept
) -> dict[str, Any]:
    """Adds the arrays of a net to `tensors` and returns the rest as JSON; with `undo`, also what
    undo needs.
    """
    require_no_trial(net)
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


def require_no_trial(graph: Graph) -> None:
    """Raises CheckpointError while a trial is in effect."""
    if graph.version != (graph.history[-1].version if graph.history else 0):
        raise CheckpointError("graph.version: a trial is in effect; save after its block")


def rebuild_net(document: Any, fields: Fields) -> GrapNet:
    """Returns the net that `describe_net` described; raises CheckpointError, with the field, if it
    is invalid.
    """
    graph = entry(document, "graph", dict, "")
    net = rebuild_graph(graph, fields)
    journal = entry(document, "journal", dict, "")
    net.journal = rebuild_journal(journal, fields, net, net.version, net._next_uid)
    backends = entry(document, "execution", list, "")
    if len(backends) != len(net.transitions) or any(type(name) is not str for name in backends):
        raise CheckpointError("execution: expected the name of a backend for every transition")
    rebuild_columns(graph, fields, net, backends)
    switch_off(graph, net)
    net.execution._choose(backends)
    return net


def warn_of_unmet_choices(net: GrapNet) -> None:
    """Warns about every backend in a file that is not registered in this process."""
    for name in sorted(set(net.execution._unmet.values())):
        warnings.warn(
            f"the backend {name!r} of this file is not registered, so auto runs instead."
            " Call gn.execution.register_backend before loading, or call it now and then"
            f" net.execution.use({name!r})",
            stacklevel=3,  # the caller of gn.load
        )


def describe_graph(net: GrapNet, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Adds the arrays of the graph to `tensors` and returns the rest as JSON."""
    layers = []
    for n, layer in enumerate(net.layers):
        owners = layer._owner_names.compact()
        activations = layer._activation_names.compact()
        tensors[f"layers.{n}.uid"] = layer.uid
        tensors[f"layers.{n}.owner"] = owners.codes
        tensors[f"layers.{n}.activation"] = activations.codes
        layers.append(
            {
                "activation": layer.default_activation,
                "owners": list(owners.names) or [None],
                "activations": list(activations.names) or [layer.default_activation],
                "dropout": float(layer.dropout),
            }
        )
        if not layer.is_sensory:
            tensors[f"layers.{n}.bias"] = layer.values()
            tensors[f"layers.{n}.frozen"] = layer.frozen_at
    transitions = []
    for t, store in enumerate(net.transitions):
        # The wiring of a full transition follows from the sizes of its layers.
        is_full = store.topology.is_full
        if not is_full:
            tensors[f"transitions.{t}.ptr"] = store.ptr
            tensors[f"transitions.{t}.child"] = pack(store.child, store.n_children)
        tensors[f"transitions.{t}.weight"] = store.values()
        tensors[f"transitions.{t}.frozen"] = store.frozen_at
        transitions.append({"full": is_full})
    columns = []
    for name, column in net.columns.items():
        tensors[f"columns.{name}"] = column.values()
        columns.append({"name": name, "bound": column.bound})
    untrained = [name for name, parameter in net.named_parameters() if not parameter.requires_grad]
    return {
        "version": net.version,
        "next_uid": net._next_uid,
        "dtype": _common_dtype(net),
        "layers": layers,
        "transitions": transitions,
        "ends": [list(pair) for pair in net.ends],
        "columns": columns,
        "untrained": untrained,
    }


def rebuild_graph(document: Any, fields: Fields) -> GrapNet:
    """Returns the graph that `describe_graph` described; raises CheckpointError, with the field, if
    it is invalid.
    """
    dtype = _FLOATS.get(entry(document, "dtype", str, "graph."))
    if dtype is None:
        raise CheckpointError(
            f"graph.dtype: {document['dtype'][:30]!r} is not a type of coordinates"
        )
    version = number(document, "version", "graph.")
    next_uid = number(document, "next_uid", "graph.", LARGEST_UID)
    described = entry(document, "layers", list, "graph.")
    wired = entry(document, "transitions", list, "graph.")
    ends = _ends(document, len(described))
    if len(described) < 2 or len(wired) != len(ends):
        raise CheckpointError(
            f"graph.transitions: {len(wired)} transitions do not fit {len(described)} layers"
        )
    layers = [_layer(n, part, fields, dtype, next_uid) for n, part in enumerate(described)]
    transitions = []
    for t, (source, target) in enumerate(ends):
        sizes = (len(layers[source]), len(layers[target]))
        transitions.append(_transition(t, wired[t], fields, dtype, *sizes))
    net = GrapNet._from_parts(layers, transitions, ends)
    net.version = version
    net._next_uid = next_uid
    try:
        check(net)
    except InvariantError as error:
        raise CheckpointError(f"graph: {error}") from None
    return net


def _ends(document: Any, n_layers: int) -> list[tuple[int, int]]:
    """Returns the layers that each transition leads from and to."""
    ends = []
    for pair in entry(document, "ends", list, "graph."):
        if not isinstance(pair, list) or len(pair) != 2 or any(type(n) is not int for n in pair):
            raise CheckpointError("graph.ends: expected two layers for every transition")
        source, target = pair
        if not 0 <= source < target < n_layers:
            raise CheckpointError(f"graph.ends: no transition leads from {source} to {target}")
        ends.append((source, target))
    return ends


def rebuild_columns(document: Any, fields: Fields, net: GrapNet, choices: Sequence[str]) -> None:
    """Adds the columns that the policies of the net need; raises CheckpointError if the file has
    others.
    """
    places = {}
    for t, choice in enumerate(choices):
        for name, layer in column_places(net, t, BACKENDS.get(choice)).values():
            places[name] = (t, layer)
    parts = entry(document, "columns", list, "graph.")
    found = [entry(part, "name", str, f"graph.columns.{n}.") for n, part in enumerate(parts)]
    if sorted(found) != sorted(places):
        unknown = sorted(set(choices) - {AUTO, *BACKENDS})
        raise CheckpointError(
            f"graph.columns: found {found}, where execution needs {list(places)}; backends that are"
            f" not registered: {unknown}"
        )
    columns = []
    for n, (name, part) in enumerate(zip(found, parts, strict=True)):
        where = f"graph.columns.{n}."
        t, layer = places[name]
        bound = entry(part, "bound", float, where)
        if not 0 <= bound < float("inf"):
            raise CheckpointError(f"{where}bound: expected a number that is not negative")
        dtype = net.transitions[t].weight.dtype
        values = fields.vector(f"columns.{name}", dtype, len(net.layers[layer]))
        columns.append(Column(name, layer, values, beside=f"transitions.{t}.weight", bound=bound))
    net._set_columns(columns)


def switch_off(document: Any, net: GrapNet) -> None:
    """Clears `requires_grad` of the listed Parameters; raises CheckpointError for unknown names."""
    parameters = dict(net.named_parameters())
    untrained = entry(document, "untrained", list, "graph.")
    unknown = any(type(name) is not str or name not in parameters for name in untrained)
    if unknown or len(set(untrained)) < len(untrained):
        raise CheckpointError("graph.untrained: expected names of Parameters, each once")
    for name in untrained:
        parameters[name].requires_grad_(False)


def _transition(
    t: int, part: Any, fields: Fields, dtype: torch.dtype, n_parents: int, n_children: int
) -> Transition:
    name = f"transitions.{t}."
    if entry(part, "full", bool, f"graph.{name}"):
        # The weights come first: the file holds as many as the wiring is going to have relations.
        values = fields.vector(name + "weight", dtype, n_parents * n_children)
        topology = full_topology(n_parents, n_children, torch.device("cpu"))
    else:
        values = fields.vector(name + "weight", dtype)
        topology = _wiring(name, fields, len(values), n_parents, n_children)
    transition = Transition(topology, values)
    transition._hold(fields.positions(topology.n_relations, name + "frozen"))
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
    name = f"layers.{n}."
    where = f"graph.layers.{n}."
    uids = fields.below(next_uid, name + "uid", torch.int64)
    biases = None
    if n > 0:
        biases = fields.vector(name + "bias", dtype, len(uids))
    default = entry(part, "activation", str, where)
    kinds = names(part, "activations", where)
    unknown = [kind for kind in (default, *kinds) if not is_activation(kind)]
    if unknown:
        raise CheckpointError(
            f"{where}activations: {str(unknown[0])[:40]!r} is unknown;"
            " gn.execution.register_activation adds one"
        )
    layer = Layer(uids, biases, default)
    dropout = entry(part, "dropout", float, where)
    if not 0 <= dropout <= 1:
        raise CheckpointError(f"{where}dropout: expected a probability")
    layer.dropout = dropout
    activations = fields.labels(kinds, name + "activation", len(uids))
    layer._renew(
        uids, activations, fields.labels(names(part, "owners", where), name + "owner", len(uids))
    )
    if n > 0:
        layer._hold(fields.positions(len(uids), name + "frozen"))
    return layer


def _common_dtype(net: GrapNet) -> str:
    """Returns the dtype of all coordinates; raises CheckpointError if they differ."""
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
        limit: the exclusive upper bound.
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
    """Returns the `count` numbers that `pack` has packed, int32; damaged bytes may give numbers
    above `limit`.
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
    """Returns the number of bytes of `count` packed numbers."""
    return (count * len(_shifts(limit)) + 7) // 8


def _shifts(limit: int) -> np.ndarray:
    """Returns the bit positions of a number below `limit`, highest first."""
    return np.arange(max(limit - 1, 0).bit_length(), dtype=np.int32)[::-1]
