"""Checkpoints: one file that holds a graph, its journal and whatever trains it, and no code."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from grapnet.core.errors import CheckpointError
from grapnet.network import GrapNet

from . import container
from .extras import describe_extra, read_extra, require_fit, restore_all, where
from .fields import Fields, entry
from .graph import describe_graph, rebuild_columns, rebuild_graph
from .history import describe_journal, rebuild_journal


def save(path: str | os.PathLike[str], net: GrapNet, *, undo: bool = False, **extras: Any) -> None:
    """Writes a net, its journal and any extras to one file, in place of an earlier one only once it is whole.

    A save that is killed leaves the earlier file as it was, and a folder `.grapnet.….partial` that can be deleted.

    Args:
        path: the file; its folder must exist. A link is followed.
        net: the net.
        undo: also keep the cut weights that undo and redo need, and the state that attached optimizers had for them. By
            default the file holds nothing of a coordinate that was cut.
        extras: anything to bring back: objects with `state_dict()` (optimizers, schedulers, rules, memories),
            `torch.Generator`s (`torch.default_generator` is the global one), or plain data and tensors.

    Raises:
        CheckpointError: an extra holds something that is not data, or a trial is in effect; nothing was written.
        OptimizerError: an optimizer has not followed an edit; nothing was written.
        OSError: the file cannot be written; an earlier one is as it was.
    """
    if isinstance(path, nn.Module):
        raise TypeError("the path comes first: gn.save(path, net)")
    if net.version != (net.history[-1].version if net.history else 0):
        raise CheckpointError("graph.version: a trial is in effect, and no journal leads to it; save after its block")
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        document = {
            "format": container.FORMAT,
            "graph": describe_graph(net, tensors),
            "journal": describe_journal(net.journal, tensors, undo=undo),
            "execution": net.execution.choices(),
            "extras": {
                name: describe_extra(name, extra, tensors, net if undo else None) for name, extra in extras.items()
            },
        }
    container.write(path, document, tensors)


@torch.inference_mode(False)  # what is made here is to be trained, whoever calls
def load(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> GrapNet:
    """Returns the net of a checkpoint, ready to train, run and edit.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged or not a checkpoint; the message names the field.
    """
    document, tensors = container.read(path)
    fields = Fields(tensors)
    graph = entry(document, "graph", dict, "")
    net = rebuild_graph(graph, fields)
    net.journal = rebuild_journal(entry(document, "journal", dict, ""), fields, net)
    backends = entry(document, "execution", list, "")
    if len(backends) != len(net.transitions) or any(type(name) is not str for name in backends):
        raise CheckpointError("execution: expected the name of a backend for every transition")
    rebuild_columns(graph, fields, net, backends)
    net.execution.choose(backends)
    for name, part in entry(document, "extras", dict, "").items():
        read_extra(name, part, fields)
    fields.require_all_read()
    return net if device is None else net.to(device)


@torch.inference_mode(False)
def restore(path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
    """Puts the extras of a checkpoint back into objects made like those that were saved, all of them or none.

    Args:
        path: the file.
        objects: under the names they were saved by: objects with `load_state_dict()`, or `torch.Generator`s, of the
            class that was saved.

    Returns:
        The extras that were saved as plain data.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a name was not saved, or a state does not fit its object; nothing was changed.
    """
    document, tensors = container.read(path)
    extras, fields = entry(document, "extras", dict, ""), Fields(tensors)
    missing = [name for name in objects if name not in extras]
    if missing:
        saved = ", ".join(sorted(extras)) or "none"
        raise CheckpointError(f"{where(missing[0])}: not in this checkpoint, which holds {saved[:200]}")
    found = {name: read_extra(name, part, fields) for name, part in extras.items()}
    for name, target in objects.items():
        require_fit(name, target, found[name])
    restore_all(objects, found)
    return {name: extra.content for name, extra in found.items() if extra.kind == "data"}
