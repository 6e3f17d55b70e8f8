"""Checkpoints: one file that holds a graph, its journal and whatever trains it, and no code."""

import copy
import os
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from grapnet.core.errors import CheckpointError
from grapnet.learning.optim import mark_followed
from grapnet.network import GrapNet

from . import container
from .fields import Fields, entry
from .graph import describe_graph, rebuild_graph
from .history import describe_journal, rebuild_journal
from .tree import decode, encode


def save(path: str | os.PathLike[str], net: GrapNet, *, undo: bool = False, **extras: Any) -> None:
    """Writes a net, its journal and any extras to one file, in place of an earlier one only once it is whole.

    Args:
        path: the file; its folder must exist.
        net: the net.
        undo: also keep the cut weights that undo and redo need. By default the file holds no coordinate that was cut.
        extras: anything to bring back: objects with `state_dict()` (optimizers, schedulers, rules, memories),
            `torch.Generator`s (`torch.default_generator` is the global one), or plain data and tensors.

    Raises:
        CheckpointError: an extra holds something that is not data; nothing was written.
    """
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        document = {
            "format": container.FORMAT,
            "graph": describe_graph(net, tensors),
            "journal": describe_journal(net.journal, tensors, undo=undo),
            "execution": net.execution.choices(),
            "extras": {name: _describe_extra(value, f"extras.{name}", tensors) for name, value in extras.items()},
        }
    container.write(path, document, tensors)


def load(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> GrapNet:
    """Returns the net of a checkpoint, ready to train, run and edit.

    Raises:
        CheckpointError: the file is damaged or not a checkpoint; the message names the field.
    """
    document, tensors = container.read(path)
    fields = Fields(tensors)
    net = rebuild_graph(entry(document, "graph", dict, ""), fields)
    net.journal = rebuild_journal(entry(document, "journal", dict, ""), fields, net)
    net.execution.choose(entry(document, "execution", list, ""))
    extras = entry(document, "extras", dict, "")
    unknown = [name for name in tensors if name not in fields.read and not name.startswith("extras.")]
    if unknown:
        raise CheckpointError(f"{unknown[0]}: the document does not mention this tensor")
    for name, part in extras.items():
        _read_extra(part, name, tensors)
    return net if device is None else net.to(device)


def restore(path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
    """Puts the extras of a checkpoint back into objects made like those that were saved, all of them or none.

    Args:
        path: the file.
        objects: under the names they were saved by: objects with `load_state_dict()`, or `torch.Generator`s.

    Returns:
        The extras that were saved as plain data.

    Raises:
        CheckpointError: a name was not saved, or a state does not fit its object; nothing was changed.
    """
    document, tensors = container.read(path)
    extras = entry(document, "extras", dict, "")
    missing = [name for name in objects if name not in extras]
    if missing:
        saved = ", ".join(sorted(extras)) or "none"
        raise CheckpointError(f"extras.{missing[0]}: not in this checkpoint, which holds {saved}")
    found = {name: _read_extra(part, name, tensors) for name, part in extras.items()}
    for name, target in objects.items():
        _check_extra(target, extras[name], name)
    done: list[tuple[Any, Any]] = []
    try:
        for name, target in objects.items():
            done.append((target, copy.deepcopy(_state(target))))
            _set_state(target, found[name])
    except Exception as error:
        for target, state in reversed(done):
            _set_state(target, state)
        raise CheckpointError(f"extras.{name}: its state does not fit the object ({error})") from error
    return {name: value for name, value in found.items() if extras[name]["kind"] == "data"}


def _describe_extra(value: Any, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    kind = "generator" if isinstance(value, torch.Generator) else "state" if hasattr(value, "state_dict") else "data"
    shapes = (
        [list(p.shape) for group in value.param_groups for p in group["params"]]
        if isinstance(value, Optimizer)
        else None
    )
    return {"kind": kind, "shapes": shapes, "tree": encode(_state(value) if kind != "data" else value, path, tensors)}


def _read_extra(part: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    where = f"extras.{name}"
    if entry(part, "kind", str, f"{where}.") not in ("generator", "state", "data") or "tree" not in part:
        raise CheckpointError(f"{where}.kind: unknown")
    return decode(part["tree"], where, tensors)


def _check_extra(target: Any, part: Any, name: str) -> None:
    kind = "generator" if isinstance(target, torch.Generator) else "state"
    if kind == "state" and not hasattr(target, "load_state_dict"):
        raise TypeError(
            f"{name}= takes an object with load_state_dict() or a torch.Generator, not a {type(target).__name__}"
        )
    if part["kind"] != kind:
        raise CheckpointError(f"extras.{name}: was saved as {part['kind']}, not as {kind}")
    if isinstance(target, Optimizer):
        shapes = [list(p.shape) for group in target.param_groups for p in group["params"]]
        if shapes != part.get("shapes"):
            raise CheckpointError(
                f"extras.{name}: was saved for parameters of shapes {part.get('shapes')}, the optimizer has {shapes}"
            )


def _state(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _set_state(target: Any, state: Any) -> None:
    if isinstance(target, torch.Generator):
        target.set_state(state)
        return
    target.load_state_dict(state)
    if isinstance(target, Optimizer):
        mark_followed(target)
