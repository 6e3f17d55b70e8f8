"""Models with nets inside: where the nets stand, and the state of everything beside them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from grapnet.convert import describe_origin, place
from grapnet.convert.additions import describe_additions
from grapnet.convert.exchange import Exchange, prepare_farewell
from grapnet.convert.origin import match_names, match_places, module_names
from grapnet.core._commit import carry_out
from grapnet.core._coordinates import Decision
from grapnet.core._errors import CheckpointError
from grapnet.following.optimizers import mark_replaced
from grapnet.network import GrapNet

from .codec import Fields, decode, encode, entry, named
from .extras import Target, go_back_all, restore_all
from .journal import Kept
from .net import describe_net, rebuild_net, warn_of_unmet_choices
from .rollback import remember_structure

EXTRA = "_extra_state"  # what torch calls, in a state dict, the plain data of a module
_VERSIONS = (int, str, type(None))  # what modules give as their `_version`


def find_nets(model: nn.Module) -> dict[GrapNet, list[str]]:
    """Returns the nets in a model, each with every name under which it is found; "" is the model
    itself.
    """
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
    """Puts the arrays of a model into `tensors` and returns the rest of it as JSON.

    Raises:
        CheckpointError: a part of a net belongs to the model or to another net as well, a net has
            something of its own that is not its graph, or something is not data.
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
    held = Rest(model, [name for names in nets.values() for name in names]).state_dict(
        keep_vars=True
    )
    state, ties, first = {}, {}, dict[int, str]()
    for name, value in held.items():
        same = first.setdefault(id(value), name) if isinstance(value, Tensor) else name
        if same == name:
            state[name] = value
        else:
            ties[name] = same
    versions = {name: part.get("version") for name, part in getattr(held, "_metadata", {}).items()}
    for name, version in versions.items():
        if type(version) not in _VERSIONS:
            raise CheckpointError(
                f"state.versions: that of {name!r} is of type {type(version).__name__}"
            )
    versions = {name: version for name, version in versions.items() if version != 1}
    return {
        "nets": parts,
        "state": {"tree": encode(state, "state", tensors), "ties": ties, "versions": versions},
    }


def refuse_additions(net: GrapNet, where: str) -> None:
    """Raises CheckpointError when a net has something of its own that a file does not hold."""
    told = describe_additions(net, where)
    if told:
        raise CheckpointError(f"nets: {told}")


def read_places(document: dict[str, Any]) -> list[list[str]]:
    """Returns where each net of a file stands; [[""]] when the file holds a net and no model."""
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
    own = fields.under(f"nets.{n}.")
    with named(f"nets.{n}."):
        net = rebuild_net(document["nets"][n], own)
        own.require_all_read()
    return net


def put_into(
    model: nn.Module, document: dict[str, Any], fields: Fields, targets: Sequence[Target]
) -> None:
    """Gives a model the nets and the state of a file, and other objects theirs, all of it or
    nothing.

    Args:
        model: made like the saved one, with anything at the places of the nets.
        document: of the file.
        fields: its tensors; the extras have been read.
        targets: the objects, and the states for them.

    Raises:
        CheckpointError: the file holds no such model, or something does not fit; nothing was
            changed.
    """
    saved = read_places(document)
    here = match_places([name for names in saved for name in names], model)
    places = [[here[name] for name in names] for names in saved]
    nets: dict[GrapNet, list[str]] = {}
    steps: list[Callable[[], None]] = []
    for n, (part, names) in enumerate(zip(document["nets"], places, strict=True)):
        net = rebuild_part(document, n, fields)
        with named(f"nets.{n}."):
            steps += _placements(model, names, net, part.get("origin"))
        nets[net] = names
    state, ties = _read_state(entry(document, "state", dict, ""), model, fields)
    fields.require_all_read()
    for net in nets:
        warn_of_unmet_choices(net)
    leaving = dict(model.named_parameters())
    taken = [name for names in places for name in names]
    undo = [remember_structure(model.modules())]
    decision = Decision()
    try:
        _take(steps)
        _require_places(model, nets)
        rest = Rest(model, taken)
        ties = rest.rename(state, ties)
        rest.require_fit(state, ties)
        restore_all([Target("state", rest, state, rest.modules()), *targets], undo)
        carry_out(_prepare_to_leave(model, leaving, decision), decision)
    except BaseException:
        if not decision.made:
            go_back_all(undo)
        raise


class Rest:
    """Everything in a model beside its nets, as one object with a state."""

    def __init__(self, model: nn.Module, places: Iterable[str]) -> None:
        self._model, self._places = model, set(places)

    def state_dict(self, *, keep_vars: bool = False) -> Any:
        """Returns the state dict of the model without its nets."""
        state = self._model.state_dict(keep_vars=keep_vars)
        for name in [name for name in state if _is_under(name, self._places)]:
            del state[name]
        return state

    def modules(self) -> list[nn.Module]:
        """Returns the modules of the model that are neither a net nor inside one."""
        inside = {
            id(part)
            for m in self._model.modules()
            if isinstance(m, GrapNet)
            for part in m.modules()
        }
        return [module for module in self._model.modules() if id(module) not in inside]

    def load_state_dict(self, state: Any) -> None:
        """Loads a state that `require_fit` has seen."""
        self._model.load_state_dict(state, strict=False)  # the nets are not in it

    def rename(self, state: dict[str, Any], ties: dict[str, str]) -> dict[str, str]:
        """Gives the values of a state the names that they have in the model, and returns the ties
        by these.
        """
        here = match_names(state, self.state_dict())
        for name, own in here.items():
            state[own] = state.pop(name)
        return {here[name]: here[same] for name, same in ties.items()}

    def require_fit(self, state: dict[str, Any], ties: dict[str, str]) -> None:
        """Raises CheckpointError, naming it, for what differs in name, shape or ties from the
        model.
        """
        held = self.state_dict(keep_vars=True)
        for name in sorted(held.keys() ^ state.keys()):
            told = (
                "the model has it, the file has not"
                if name in held
                else "the file has it, the model has not"
            )
            raise CheckpointError(
                f"state[{name!r}]: {told}; make the model as the saved one was made"
            )
        first: dict[int, str] = {}
        for name, value in held.items():
            if name.rpartition(".")[2] == EXTRA:
                self._require_taker(name)
                continue
            if not isinstance(value, Tensor):
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

    def _require_taker(self, name: str) -> None:
        """Raises CheckpointError when a module gives an extra state and takes none, which torch
        would pass over.
        """
        owner = self._model.get_submodule(name.removesuffix(EXTRA).removesuffix("."))
        if type(owner).set_extra_state is nn.Module.set_extra_state:
            raise CheckpointError(
                f"state[{name!r}]: {type(owner).__name__} has no set_extra_state() to take it"
            )


def _require_shape(where: str, value: Tensor, told: Any) -> None:
    if is_lazy(value):
        raise CheckpointError(
            f"{where}: has no shape in the model yet; run a batch through it first"
        )
    if value.is_inference():
        raise CheckpointError(
            f"{where}: was made under inference_mode and can never change; make the model outside"
            " of it"
        )
    if value.is_meta:
        raise CheckpointError(
            f"{where}: is on the meta device; give it memory first: model.to_empty(device=...)"
        )
    if value.layout != torch.strided:
        raise CheckpointError(
            f"{where}: is a {value.layout} tensor in the model, and files hold dense ones"
        )
    if not isinstance(told, Tensor) or told.shape != value.shape:
        found = f"shape {list(told.shape)}" if isinstance(told, Tensor) else type(told).__name__
        raise CheckpointError(
            f"{where}: was saved as {found}, and the model has {list(value.shape)}"
        )


def _read_state(
    part: dict[str, Any], model: nn.Module, fields: Fields
) -> tuple[Any, dict[str, str]]:
    """Returns the state as `load_state_dict` takes it, and which of its names were tied to which
    other.
    """
    if "tree" not in part:
        raise CheckpointError("state.tree: missing")
    state, ties = decode(part["tree"], "state", fields), entry(part, "ties", dict, "state.")
    if type(state) is not dict or any(type(name) is not str for name in state):
        raise CheckpointError("state.tree: expected values by name")
    if any(
        name in state or type(same) is not str or same not in state for name, same in ties.items()
    ):
        raise CheckpointError("state.ties: expected names of other values")
    versions = entry(part, "versions", dict, "state.")
    if any(type(version) not in _VERSIONS for version in versions.values()):
        raise CheckpointError("state.versions: expected numbers or texts by name")
    whole = OrderedDict({**state, **{name: state[same] for name, same in ties.items()}})
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    here = match_names(versions, module_names(model))
    told = {here[name]: version for name, version in versions.items()}
    whole._metadata = {name: {"version": told.get(name, 1)} for name in names}  # pyright: ignore[reportAttributeAccessIssue]
    return whole, ties


def _placements(
    model: nn.Module, names: list[str], net: GrapNet, origin: Any
) -> list[Callable[[], None]]:
    """Makes a net like what it is to replace, and returns what puts it there."""
    try:
        return [place(model, name, net, origin) for name in names]
    except Exception as error:  # whatever a description trips over that is not of this model
        raise CheckpointError(
            f"places: the net that stood at {names[0]!r} has no place here ({error})"
        ) from error


def _take(steps: Sequence[Callable[[], None]]) -> None:
    try:
        for step in steps:
            step()
    except Exception as error:
        raise CheckpointError(f"nets: cannot be put into this model ({error!r})") from error


def _require_places(model: nn.Module, nets: dict[GrapNet, list[str]]) -> None:
    """Raises CheckpointError when a net has not come to stand where it stood: modules are shared in
    another way.
    """
    found = find_nets(model)
    for n, (net, names) in enumerate(nets.items()):
        if sorted(found.get(net, [])) != sorted(names):
            raise CheckpointError(
                f"nets.{n}.places: this net stood at {names}, and this model would have it at"
                f" {found.get(net, [])}; one module stands in several places of one of the two"
                " models"
            )


def _prepare_to_leave(
    model: nn.Module, earlier: dict[str, nn.Parameter], decision: Decision
) -> list[Callable[[], None]]:
    """Returns what makes losses and optimizers refuse that depend on Parameters which have left the
    model.
    """
    present = {id(parameter) for parameter in model.parameters()}
    leaving = {
        name: parameter for name, parameter in earlier.items() if id(parameter) not in present
    }
    plain = {name: p for name, p in leaving.items() if type(p) is nn.Parameter and p.requires_grad}
    exchanges = [Exchange(parameter, name, ()) for name, parameter in plain.items()]
    installs = prepare_farewell(exchanges, "restore", decision)
    installs.append(partial(mark_replaced, list(leaving.values()), "restore"))
    return installs


def _refuse_shared_parts(model: nn.Module, nets: dict[GrapNet, list[str]]) -> None:
    """Raises CheckpointError when a layer or a Parameter of a net is in the model by itself, or in
    another net.
    """
    places = {name for names in nets.values() for name in names}
    parts: dict[int, GrapNet] = {}
    for net, names in nets.items():
        for part in (*net.modules(), *net.parameters()):
            other = parts.setdefault(id(part), net)
            if other is not net:
                raise CheckpointError(
                    f"nets: the nets at {nets[other][0]!r} and {names[0]!r} share a"
                    f" {type(part).__name__}, and each would come back with its own. Use one net in"
                    " both places, or give each its own"
                )
    for name, module in model.named_modules(remove_duplicate=False):
        if name in places or _is_under(name, places):
            continue
        for part in (module, *module.parameters(recurse=False)):
            if id(part) in parts:
                net = nets[parts[id(part)]][0]
                raise CheckpointError(
                    f"nets: a part of the net at {net!r} is also in the model by itself, at"
                    f" {name!r}"
                )


def _is_under(name: str, places: set[str]) -> bool:
    """Says whether a name is of something inside one of the places."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in places for n in range(1, len(parts)))
