"""One net in a file: its graph, its journal and the backends that run it."""

import warnings
from typing import Any

from torch import Tensor

from grapnet.core.errors import CheckpointError
from grapnet.network import GrapNet

from .fields import Fields, entry
from .graph import describe_graph, rebuild_columns, rebuild_graph, switch_off
from .history import Kept, describe_journal, rebuild_journal


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
            stacklevel=4,  # whoever called gn.load
        )
