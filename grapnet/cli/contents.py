"""What a checkpoint holds, all of it: its nets by their place, and whatever was saved beside
them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.checkpoint import container
from grapnet.checkpoint.extras import read_extra, where
from grapnet.checkpoint.fields import Fields, entry, named
from grapnet.checkpoint.model import read_places
from grapnet.checkpoint.net import rebuild_net
from grapnet.checkpoint.tree import decode

from .columns import counted
from .files import reading


@dataclass(frozen=True)
class Kept:
    """Something that was saved beside the nets: its name, the class it was of, the bytes of its
    tensors, and itself.
    """

    name: str
    made_by: str
    bytes: int
    content: Any = field(repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class Contents:
    """A checkpoint that was read whole."""

    path: Path
    format: int
    bytes: int  # of the file
    # by the first place at which each stands; "" where the file holds one net and no model
    nets: dict[str, gn.GrapNet]
    also_at: dict[str, list[str]]  # the other places of a net
    extras: list[Kept]
    beside: Kept | None  # the rest of a model

    @property
    def is_model(self) -> bool:
        """True for a model with nets inside."""
        return self.beside is not None


@torch.inference_mode(False)
def read_contents(path: Path, device: torch.device | str = "cpu") -> Contents:
    """Returns everything in a checkpoint, of a net or of a model; raises CommandError when it
    cannot be read whole.
    """
    with reading(path):
        document, tensors = container.read(path)
        fields = Fields(tensors)
        places, nets = read_places(document), {}
        if "nets" in document:
            for n, (part, names) in enumerate(zip(document["nets"], places, strict=True)):
                own = fields.under(f"nets.{n}.")
                with named(f"nets.{n}."):
                    nets[names[0]] = rebuild_net(part, own)
                    own.require_all_read()
            beside = _beside(entry(document, "state", dict, ""), fields)
        else:
            nets[""], beside = rebuild_net(document, fields), None
        extras = [
            _kept(name, part, fields) for name, part in entry(document, "extras", dict, "").items()
        ]
        fields.require_all_read()
    also_at = {names[0]: names[1:] for names in places}
    nets = {place: net.to(device) for place, net in nets.items()}
    return Contents(path, container.FORMAT, path.stat().st_size, nets, also_at, extras, beside)


def title(place: str) -> str:
    """Returns what a net is called in what is told about it."""
    return f"net at {place!r}" if place else "net"


def _beside(part: dict[str, Any], fields: Fields) -> Kept:
    """Returns the part of a model that is no net."""
    state = decode(part.get("tree"), "state", fields)
    if type(state) is not dict:
        raise gn.CheckpointError("state.tree: expected values by name")
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    values = sum(tensor.numel() for tensor in tensors)
    told = f"{counted(values, 'value')} under {counted(len(state), 'name')}"
    return Kept("rest of the model", told, _bytes(tensors), state)


def _kept(name: str, part: Any, fields: Fields) -> Kept:
    extra, prefix = read_extra(name, part, fields), where(name)
    mine = [
        t
        for key, t in fields.tensors.items()
        if key == prefix or key.startswith((f"{prefix}[", f"{prefix}."))
    ]
    return Kept(
        name, "plain data" if extra.kind == "data" else extra.made_by, _bytes(mine), extra.content
    )


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
