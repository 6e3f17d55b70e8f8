"""Models with nets inside: the places of the nets, and the state of everything else."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from grapnet._network import GrapNet
from grapnet.convert import describe_origin, place
from grapnet.convert._exchange import Exchange, refuse_stale_losses
from grapnet.convert._origin import describe_additions, match_names, match_places
from grapnet.core._commit import carry_out
from grapnet.core._coordinates import Decision
from grapnet.core._errors import CheckpointError
from grapnet.following._state import mark_replaced

from ._codec import Fields, decode, encode, entry, named
from ._extras import Target, remember_structure, restore_all, revert_all
from ._journal import Kept
from ._net import describe_net, rebuild_net, warn_of_unmet_choices

EXTRA = "_extra_state"  # what torch calls, in a state dict, the plain data of a module


def find_nets(model: nn.Module) -> dict[GrapNet, list[str]]:
    """Returns the nets in a model with all their names; "" is the model itself."""
    found: dict[GrapNet, list[str]] = {}
    seen: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, GrapNet) and not _is_under(name, seen):
            seen.add(name)
            found.setdefault(module, []).append(name)
    return found


def describe_model(
    model: nn.Module, tensors: dict[str, Tensor], *, undo: bool, history: Kept
) -> dict[str, Any]:
    """Adds the arrays of a model to `tensors` and returns the rest as JSON.

    Raises:
        CheckpointError: a part of a net is also used elsewhere in the model, a net has additions,
            or something is not data.
    """
    nets = find_nets(model)
    _refuse_shared_parts(model, nets)
    parts = []
    for n, (net, names) in enumerate(nets.items()):
        own: dict[str, Tensor] = {}
        refuse_additions(net, f"the net at {names[0]!r}")
        with named(f"nets.{n}."):
            part = describe_net(net, own, undo=undo, history=history)
        tensors |= {f"nets.{n}.{name}": tensor for name, tensor in own.items()}
        parts.append({"places": names, "origin": describe_origin(net), **part})
    places = [name for names in nets.values() for name in names]
    held = Rest(model, places).state_dict(keep_vars=True)
    state, ties = split_ties(held)
    return {
        "nets": parts,
        "state": {"tree": encode(state, "state", tensors), "ties": ties},
    }


def split_ties(held: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns values under their first names, and which other names mean which of these."""
    state = {}
    ties = {}
    first = dict[int, str]()
    for name, value in held.items():
        same = first.setdefault(id(value), name) if isinstance(value, Tensor) else name
        if same == name:
            state[name] = value
        else:
            ties[name] = same
    return state, ties


def refuse_additions(net: GrapNet, where: str) -> None:
    """Raises CheckpointError if a net has additions that a file cannot hold."""
    refusal = describe_additions(net, where)
    if refusal:
        raise CheckpointError(f"nets: {refusal}")


def read_places(document: dict[str, Any]) -> list[list[str]]:
    """Returns the names of each net of a file; [[""]] for a single net."""
    if "nets" not in document:
        return [[""]]
    parts = entry(document, "nets", list, "")
    places = [entry(part, "places", list, f"nets.{n}.") for n, part in enumerate(parts)]
    seen: set[str] = set()
    for n, names in enumerate(places):
        if not names:
            raise CheckpointError(f"nets.{n}.places: expected names in a model")
        for name in names:
            if type(name) is not str or not name or name in seen:
                raise CheckpointError(f"nets.{n}.places: expected names in a model, each once")
            seen.add(name)
    if not places or any(_is_under(name, seen) for name in seen):
        raise CheckpointError("nets: expected nets, none of them inside another")
    return places


def rebuild_part(document: dict[str, Any], n: int, fields: Fields) -> GrapNet:
    """Returns one of the nets of a file that holds a model."""
    with named(f"nets.{n}."):
        return rebuild_net(document["nets"][n], fields.under(f"nets.{n}."))


def put_into(
    model: nn.Module, document: dict[str, Any], fields: Fields, targets: Sequence[Target]
) -> None:
    """Loads the nets and the state of a file into a model, and states into other objects, all or
    none.

    Args:
        model: a model like the saved one, with anything at the places of the nets.
        document: of the file.
        fields: its tensors; the extras have been read.
        targets: the objects, and the states for them.

    Raises:
        CheckpointError: something does not fit; nothing changes.
    """
    saved = read_places(document)
    here = match_places(list(chain.from_iterable(saved)), model)
    places = []
    for names in saved:
        places.append([here[name] for name in names])
    nets: dict[GrapNet, list[str]] = {}
    steps: list[Callable[[], None]] = []
    for n, (part, names) in enumerate(zip(document["nets"], places, strict=True)):
        net = rebuild_part(document, n, fields)
        with named(f"nets.{n}."):
            steps += _placements(model, names, net, part.get("origin"))
        nets[net] = names
    state, ties = read_state(entry(document, "state", dict, ""), fields)
    for net in nets:
        warn_of_unmet_choices(net)
    leaving = dict(model.named_parameters())
    taken = list(chain.from_iterable(places))
    undo = [remember_structure(model.modules())]
    decision = Decision()
    try:
        for step in steps:
            step()
        _require_places(model, nets)
        rest = Rest(model, taken)
        ties = rest.rename(state, ties)
        rest.require_fit(state, ties)
        restore_all([Target("state", rest, state, rest.modules()), *targets], undo)
        carry_out(_prepare_to_leave(model, leaving, decision), decision)
    except BaseException:
        if not decision.made:
            revert_all(undo)
        raise


class Rest:
    """Everything in a model except its nets, as one object with a state."""

    def __init__(self, model: nn.Module, places: Iterable[str]) -> None:
        self._model = model
        self._places = set(places)

    def state_dict(self, *, keep_vars: bool = False) -> Any:
        """Returns the state dict of the model without its nets."""
        state = self._model.state_dict(keep_vars=keep_vars)
        for name in [name for name in state if _is_under(name, self._places)]:
            del state[name]
        return state

    def modules(self) -> list[nn.Module]:
        """Returns the modules of the model that are neither a net nor inside one."""
        inside: set[nn.Module] = set()
        for module in self._model.modules():
            if isinstance(module, GrapNet):
                inside.update(module.modules())
        return [module for module in self._model.modules() if module not in inside]

    def load_state_dict(self, state: Any) -> None:
        """Loads a state that `require_fit` has checked."""
        # It keeps the versions of the modules.
        whole = self._model.state_dict()
        whole.clear()
        whole.update(state)
        self._model.load_state_dict(whole, strict=False)  # the nets are not in it

    def rename(self, state: dict[str, Any], ties: dict[str, str]) -> dict[str, str]:
        """Renames the values of a state to their names in the model, and returns the ties."""
        here = match_names(state, self.state_dict())
        for name, own in here.items():
            state[own] = state.pop(name)
        return {here[name]: here[same] for name, same in ties.items()}

    def require_fit(self, state: dict[str, Any], ties: dict[str, str]) -> None:
        """Raises CheckpointError if names, shapes or ties differ from the model."""
        held = self.state_dict(keep_vars=True)
        for name in sorted(held.keys() ^ state.keys()):
            owner = "model" if name in held else "file"
            raise CheckpointError(
                f"state[{name!r}]: only the {owner} has it; make the model as the saved one was"
                " made"
            )
        first: dict[int, str] = {}
        for name, value in held.items():
            if name.rpartition(".")[2] == EXTRA or not isinstance(value, Tensor):
                continue
            _require_shape(f"state[{name!r}]", value, state[name])
            same = first.setdefault(id(value), name)
            if state[same] is not state[name] and not torch.equal(state[same], state[name]):
                raise CheckpointError(
                    f"state[{name!r}]: is tied to {same!r} in the model, and was not when saved"
                )
        for name, same in ties.items():
            if isinstance(held[name], nn.Parameter) and held[name] is not held[same]:
                raise CheckpointError(
                    f"state[{name!r}]: was tied to {same!r} when saved; tie them in the model too"
                )


def _require_shape(where: str, value: Tensor, saved: Any) -> None:
    """Raises CheckpointError when a tensor of the model cannot take what was saved."""
    require_writable(where, value)
    if not isinstance(saved, Tensor) or saved.shape != value.shape:
        found = list(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
        raise CheckpointError(
            f"{where}: was saved as {found}, and the model has {list(value.shape)}"
        )


def require_writable(where: str, value: Tensor) -> None:
    """Raises CheckpointError when a tensor of the model cannot be given other values."""
    if is_lazy(value) or value.is_meta or value.is_inference() or value.layout != torch.strided:
        raise CheckpointError(
            f"{where}: cannot be written in the model: it is lazy, on the meta device, sparse or"
            " made under inference_mode"
        )


def read_state(part: dict[str, Any], fields: Fields) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the state of a model by name, and which of its names were tied to which other."""
    state = decode(part.get("tree"), "state", fields)
    ties = entry(part, "ties", dict, "state.")
    if type(state) is not dict or any(type(name) is not str for name in state):
        raise CheckpointError("state.tree: expected values by name")
    if any(
        name in state or type(same) is not str or same not in state for name, same in ties.items()
    ):
        raise CheckpointError("state.ties: expected names of other values")
    return {**state, **{name: state[same] for name, same in ties.items()}}, ties


def _placements(
    model: nn.Module, names: list[str], net: GrapNet, origin: Any
) -> list[Callable[[], None]]:
    """Adapts a net to what it replaces, and returns the function that installs it."""
    try:
        return [place(model, name, net, origin) for name in names]
    except Exception as error:  # whatever a description trips over that is not of this model
        raise CheckpointError(
            f"places: the net at {names[0]!r} does not fit this model ({error})"
        ) from error


def _require_places(model: nn.Module, nets: dict[GrapNet, list[str]]) -> None:
    """Raises CheckpointError if a net has other names than in the saved model, because modules are
    shared differently.
    """
    found = find_nets(model)
    for n, (net, names) in enumerate(nets.items()):
        if sorted(found.get(net, [])) != sorted(names):
            raise CheckpointError(
                f"nets.{n}.places: this net was saved at {names}, and would be at"
                f" {found.get(net, [])} in this model; the two models share modules differently"
            )


def _prepare_to_leave(
    model: nn.Module, earlier: dict[str, nn.Parameter], decision: Decision
) -> list[Callable[[], None]]:
    """Returns the function that makes losses and optimizers with replaced Parameters raise."""
    present = {id(parameter) for parameter in model.parameters()}
    leaving = {
        name: parameter for name, parameter in earlier.items() if id(parameter) not in present
    }
    plain = {name: p for name, p in leaving.items() if type(p) is nn.Parameter and p.requires_grad}
    exchanges = [Exchange(parameter, name, ()) for name, parameter in plain.items()]
    installs = refuse_stale_losses(exchanges, "restore", decision)
    installs.append(partial(mark_replaced, list(leaving.values()), "restore"))
    return installs


def _refuse_shared_parts(model: nn.Module, nets: dict[GrapNet, list[str]]) -> None:
    """Raises CheckpointError if a layer or Parameter of a net is also used elsewhere in the model,
    or in another net.
    """
    first = {}
    for names in nets.values():
        first |= dict.fromkeys(names, names[0])
    owners: dict[int, str] = {}  # the place of the net that a part belongs to, or ""
    for name, module in model.named_modules(remove_duplicate=False):
        owner = first.get(name, "")
        for net_name in first:
            if name.startswith(f"{net_name}."):
                owner = first[net_name]
        for part in (module, *module.parameters(recurse=False)):
            other = owners.setdefault(id(part), owner)
            if other != owner:
                raise CheckpointError(
                    f"nets: the {type(part).__name__} at {name!r} is also a part of the net at"
                    f" {other or owner!r}, which a file cannot represent. Use one net in both"
                    " places, or separate them"
                )


def _is_under(name: str, places: set[str]) -> bool:
    """Returns whether a name is inside one of the places."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in places for n in range(1, len(parts)))
