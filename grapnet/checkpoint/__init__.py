"""Checkpoints: one file that holds graphs, their journals and whatever trains them, and no code."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grapnet.convert.origin import COMPILED
from grapnet.core.errors import CheckpointError
from grapnet.core.wording import with_article
from grapnet.network import GrapNet

from . import container
from .extras import (
    Target,
    describe_extra,
    read_extra,
    require_fit,
    restore_all,
    restore_slots,
    where,
)
from .fields import Fields, entry
from .history import Kept
from .model import (
    describe_model,
    find_nets,
    is_compiled_net,
    put_into,
    read_places,
    rebuild_part,
    refuse_additions,
)
from .net import describe_net, rebuild_net, warn_of_unmet_choices


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    /,
    *,
    undo: bool = False,
    history: Kept = "outline",
    **extras: Any,
) -> None:
    """Writes a net, or a model with nets inside, and any extras to one file, which replaces an
    earlier one once whole.

    Of every net the file holds the graph, the journal, the chosen backends and which Parameters do
    not train; of a model also where its nets stand, what `gn.ungraft` needs, and the state dict of
    everything beside them. A save that is killed leaves the earlier file as it was, and a folder
    `.grapnet.….partial` that the next save into that folder removes.

    Args:
        path: the file; its folder must exist. A link is followed.
        model: a GrapNet, compiled or not, which `gn.load` returns; or any module with nets inside,
            for `gn.restore(path, into=model)`.
        undo: also keep the cut weights that undo and redo need, and the state that attached
            optimizers had for them. By default the file holds nothing of a coordinate that was cut.
        history: "outline" keeps of every commit its version, reason, author and counts; "full" also
            keeps which nodes and relations it was about, which `diff`, `blame` and `replay` need.
        extras: anything to bring back: objects with `state_dict()` (optimizers, schedulers, rules,
            memories), `torch.Generator`s (`torch.default_generator` is the global one), or plain
            data and tensors.

    Raises:
        CheckpointError: something to save is not data, a trial is in effect, a part of a net is in
            the model by itself or in another net too, or a net has a forward, modules or buffers of
            its own; nothing was written.
        OptimizerError: an optimizer has not followed an edit; nothing was written.
        OSError: the file cannot be written; an earlier one is as it was.
    """
    if isinstance(path, nn.Module):
        raise TypeError("the path comes first: gn.save(path, net)")
    container.write(path, *content(model, extras, undo=undo, history=history))


def content(
    model: nn.Module, extras: Mapping[str, Any], *, undo: bool, history: Kept
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the document and the tensors of the file that `save` writes; raises as it does."""
    held = getattr(model, COMPILED, None)
    model = held if isinstance(held, GrapNet) else model  # torch.compile(net) is saved as the net
    nets = find_nets(model) if isinstance(model, nn.Module) else {}
    if not nets:
        raise TypeError(
            f"gn.save(path, model) saves a GrapNet or a model with nets inside; this {_kind(model)}"
            " has none"
        )
    tensors: dict[str, Tensor] = {}
    places = {names[0]: net for net, names in nets.items()}
    is_net = isinstance(model, GrapNet)
    if is_net:
        refuse_additions(model, "this net")
    with torch.no_grad():
        document = {
            "format": container.FORMAT,
            **(
                describe_net(model, tensors, undo=undo, history=history)
                if is_net
                else describe_model(model, tensors, undo=undo, history=history)
            ),
            "extras": {
                name: describe_extra(name, e, tensors, places, undo=undo)
                for name, e in extras.items()
            },
        }
    return document, tensors


@torch.inference_mode(False)  # what is made here is to be trained, whoever calls
def load(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> GrapNet:
    """Returns the net of a checkpoint, ready to train, run and edit.

    It warns of a chosen backend that is not registered in this process: `auto` runs in its place,
    and the name stays chosen, also in the next file.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged or not a checkpoint, and the message names the field;
            or it holds a model.
    """
    document, tensors = container.read(path)
    fields = Fields(tensors)
    is_model = "nets" in document
    if is_model and not is_compiled_net(document):
        raise CheckpointError(
            "nets: this file holds a model with nets inside, not one net. Make a model like it,"
            " then gn.restore(path, into=model)"
        )
    net = rebuild_part(document, 0, fields) if is_model else rebuild_net(document, fields)
    for name, part in entry(document, "extras", dict, "").items():
        read_extra(name, part, fields)
    fields.require_all_read()
    warn_of_unmet_choices(net)
    return net if device is None else net.to(device)


@torch.inference_mode(False)
def restore(
    path: str | os.PathLike[str], /, *, into: nn.Module | None = None, **objects: Any
) -> dict[str, Any]:
    """Puts what a checkpoint holds back into objects made like those that were saved, all of them
    or none.

    A model given as `into` gets nets in the places where the saved one had them, whatever stands
    there: the dense modules of a fresh model, of any shape and even on the meta device, or nets of
    any version. A net goes to the device and the dtype of what it replaces, and trains what that
    trains. Everything else is loaded by name and shape. Parameters beside the nets stay the same
    objects, those of the nets are others, so make the optimizer afterwards; one that holds those of
    before raises OptimizerError at its next step:

        gn.restore(path, into=model)
        optimizer = torch.optim.Adam(model.parameters())
        gn.restore(path, optimizer=optimizer)

    Args:
        path: the file.
        into: a model made like the saved one.
        objects: under the names they were saved by: objects with `load_state_dict()`, or
            `torch.Generator`s, of the class that was saved.

    Returns:
        The extras that were saved as plain data.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a name was not saved, a state does not fit its object, or a net to be
            replaced has hooks or something of its own, or is held by `torch.compile(net)`; nothing
            was changed.
    """
    document, tensors = container.read(path)
    extras, fields = entry(document, "extras", dict, ""), Fields(tensors)
    missing = [name for name in objects if name not in extras]
    if missing:
        saved = ", ".join(sorted(extras)) or "none"
        raise CheckpointError(
            f"{where(missing[0])}: not in this checkpoint, which holds {saved[:200]}"
        )
    found = {name: read_extra(name, part, fields) for name, part in extras.items()}
    if into is not None:
        _require_model(into, document, objects)
    for name, target in objects.items():
        require_fit(name, target, found[name])
    places = [names[0] for names in read_places(document)]
    targets = [Target(where(name), target, found[name].content) for name, target in objects.items()]
    if into is None:
        restore_all(targets)
    else:
        put_into(into, document, fields, targets)
    for name, target in objects.items():
        if isinstance(target, Optimizer):
            restore_slots(target, found[name], places)
    return {name: extra.content for name, extra in found.items() if extra.kind == "data"}


def _require_model(into: Any, document: dict[str, Any], objects: dict[str, Any]) -> None:
    """Raises when `into` cannot take what the file holds, or an object would be left with
    Parameters that are gone.
    """
    if not isinstance(into, nn.Module):
        raise TypeError(f"into= takes the model to put nets into, not {with_article(_kind(into))}")
    if "nets" not in document or is_compiled_net(document):
        raise CheckpointError(
            "graph: this file holds one net, not a model; gn.load(path) returns it"
        )
    if isinstance(into, GrapNet):
        raise CheckpointError(
            "nets: this file holds a model with nets inside; a net cannot be made into one. Give"
            " the model"
        )
    for name, target in objects.items():
        if isinstance(target, Optimizer) or isinstance(
            getattr(target, "optimizer", None), Optimizer
        ):
            raise CheckpointError(
                f"{where(name)}: its parameters would be replaced by those of the nets. First"
                " gn.restore(path, into=model), then make the optimizer over model.parameters(),"
                f" then gn.restore(path, {name}={name})"
            )


def _kind(value: Any) -> str:
    return type(value).__name__
