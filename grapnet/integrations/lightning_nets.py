"""Nets inside a module, in and out of a checkpoint that somebody else writes: a dict of plain data
and tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.convert import describe_origin, place
from grapnet.convert.origin import match_names, match_places

KEY = "grapnet"  # under which a checkpoint holds the nets


def nets_in(module: nn.Module) -> dict[str, gn.GrapNet]:
    """Returns the nets anywhere inside a module by the names where they stand; one that stands
    twice comes once.

    Examples:
        >>> list(nets_in(nn.ModuleDict({"encoder": nn.Linear(8, 4), "head": gn.GrapNet([4, 2])})))
        ['head']
    """
    return {name: part for name, part in module.named_modules() if isinstance(part, gn.GrapNet)}


def save_nets(
    module: nn.Module, checkpoint: dict[str, Any], rules: Mapping[str, gn.RuleManager] | None = None
) -> None:
    """Puts the nets of a module into a checkpoint as they are wired, each as the bytes of a file of
    `gn.save`.

    Args:
        module: the module.
        checkpoint: the dict, which `torch.load(…, weights_only=True)` reads.
        rules: managers by the names of nets, whose state goes with them.

    Raises:
        CheckpointError: a trial is in effect, a net has a forward, modules or buffers of its own,
            two nets share a Parameter, or the state of a rule is not data; the checkpoint is as it
            was.
    """
    managers, parts = rules or {}, []
    _require_apart(nets_in(module))
    for name, net in nets_in(module).items():
        extras = {"rules": managers[name]} if name in managers else {}
        parts.append(
            {
                "name": name,
                "origin": describe_origin(net),
                "rules": bool(extras),
                "file": _pack(name, net, extras),
            }
        )
    checkpoint[KEY] = parts


def load_nets(module: nn.Module, checkpoint: Mapping[str, Any]) -> dict[str, gn.GrapNet]:
    """Puts the nets of a checkpoint back where they stood, whatever shape stands there, and returns
    them by name.

    They are other objects than those that stood there, with other Parameters, and take over device,
    mode and `requires_grad`. A net that was grafted goes over the dense modules too. A checkpoint
    without nets changes nothing. Where the saved module had compiled parts and this one has not, or
    the other way round, the names in the checkpoint's own `state_dict` become those of this module.

    Raises:
        CheckpointError: a net is damaged, or cannot be put where it stood; the module is as it was.
        ConversionError: the module has other parts where a net stood, a net with hooks or something
            of its own that would be lost, or a part compiled by `torch.compile(part)`; the module
            is as it was.
    """
    found: dict[str, gn.GrapNet] = {}
    installs: list[Callable[[], None]] = []
    parts = checkpoint.get(KEY, [])
    here = match_places([part["name"] for part in parts], module)
    for part in parts:
        name = here[part["name"]]
        found[name] = net = _unpack(part["file"]).net
        installs.append(place(module, name, net, part["origin"]))
    for install in installs:
        install()
    state = checkpoint.get("state_dict", {})
    for name, own in match_names(state, module.state_dict()).items() if parts else ():
        state[own] = state.pop(name)
    return found


def load_rules(checkpoint: Mapping[str, Any], rules: Mapping[str, gn.RuleManager]) -> None:
    """Gives managers, by the names of their nets, the state they had; one that was not saved starts
    afresh.

    Raises:
        CheckpointError: the rules are not those that were saved.
    """
    parts = [part for part in checkpoint.get(KEY, []) if part["rules"]]
    here = match_names([part["name"] for part in parts], rules.keys())
    for part in parts:
        manager = rules.get(here[part["name"]])
        if manager is not None:
            _unpack(part["file"]).load(rules=manager)


def _require_apart(nets: Mapping[str, gn.GrapNet]) -> None:
    """Raises CheckpointError when two nets share a Parameter, of which each would come back with
    its own.
    """
    owners: dict[int, str] = {}
    for name, net in nets.items():
        for parameter in net.parameters():
            if owners.setdefault(id(parameter), name) != name:
                raise gn.CheckpointError(
                    f"the nets at {owners[id(parameter)]!r} and {name!r} share a Parameter"
                )


def _pack(name: str, net: gn.GrapNet, extras: dict[str, Any]) -> Tensor:
    """Returns what `gn.save` writes, [bytes] uint8."""
    try:
        data = gn.Archive.of(net, **extras).to_bytes()
    except gn.CheckpointError as error:
        raise gn.CheckpointError(f"{name}: {error}") from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpack(data: Tensor) -> gn.Archive:
    """Returns the archive that `_pack` packed."""
    return gn.open(data.cpu().numpy().tobytes())
