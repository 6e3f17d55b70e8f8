"""Origins: what a net stands in place of, kept without weights so that it can be put back."""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from grapnet.core._errors import ConversionError
from grapnet.network import GrapNet

from .additions import describe_additions, describe_hooks
from .chain import Chain
from .fastpath import set_fast_paths

COMPILED = "_orig_mod"  # the name under which torch.compile(part) holds the part


@dataclass(frozen=True, eq=False)
class Origin:
    """The chain that a net was made of, and the modules that stood there, whose linear parts are
    empty.
    """

    chain: Chain
    # by path from the anchor: modules, or functions that a module had as attributes
    replaced: dict[str, Any]


def describe_origin(net: GrapNet) -> dict[str, Any] | None:
    """Returns, as plain data, which chain of modules a net stands for; None when it was not
    grafted.
    """
    return None if net.origin is None else net.origin.chain.to_data()


def place(model: nn.Module, name: str, net: GrapNet, described: Any) -> Callable[[], None]:
    """Prepares to put a net into a model, over whatever stands there; returns what does it.

    The net takes over the device, the dtype, the mode and, Parameter by Parameter, the
    `requires_grad` of that; where no Parameters stand it keeps its own.

    Args:
        model: a model like the one the net was found in.
        name: of the net in it.
        net: the net.
        described: what `describe_origin` said of it; weights and shapes of what stands there are
            not needed.

    Raises:
        ConversionError: the model has no such place, or other modules there, or a net with hooks or
            with something of its own that this one would not have, or `torch.compile` holds what
            stands there.
        ValueError: `described` says nothing that `describe_origin` could have said.
    """
    chain = None if described is None else Chain.from_data(described)
    if chain is not None and len(chain.parts) != len(net.transitions):
        raise ConversionError(
            f"a net of {len(net.transitions)} transitions stands for no {len(chain.parts)} linear"
            " parts"
        )
    present, linears = find(model, name), []
    if not isinstance(present, nn.Module):
        raise ConversionError(
            f"{name!r} ({type(present).__name__}) is no module, and a net goes in place of one"
        )
    require_not_compiled(model, present, name)
    anchor_name = name if chain is None else _anchor_name(name, chain.place)
    if isinstance(present, GrapNet):
        refusal = describe_additions(present, f"the net at {name!r}") or describe_hooks(
            present, f"the net at {name!r}"
        )
        if refusal:
            raise ConversionError(refusal)
        origin = (
            None
            if chain is None or present.origin is None
            else Origin(chain, present.origin.replaced)
        )
        if origin is not None:
            _find_linears(origin.chain, origin.replaced, anchor_name)
        install = partial(_install, model, present, net, origin)
    elif chain is None:
        install = partial(_install, model, present, net, None)
    else:
        anchor = find(model, anchor_name)
        replaced = {path: find(anchor, path, anchor_name) for path in (chain.place, *chain.emptied)}
        linears = _find_linears(chain, replaced, anchor_name)
        install = prepare_graft(model, anchor_name, chain, net)
    _resemble(net, present, model, linears)
    return install


def _find_linears(chain: Chain, replaced: dict[str, Any], name: str) -> list[nn.Module]:
    """Returns the linear modules of a chain; raises ConversionError when something it names is not
    what it was.
    """
    if replaced.keys() != {chain.place, *chain.emptied}:
        raise ConversionError(
            f"the net at {joined(name, chain.place)!r} stands for other modules:"
            f" {', '.join(replaced)}"
        )
    linears = [part.path for part in chain.parts]
    drops = [
        path for step in (chain, *chain.parts) for path in [step.dropout_path] if path is not None
    ]
    found = {}
    for path in (
        *linears,
        *drops,
        *(part.activation_path for part in chain.parts if part.activation_path is not None),
    ):
        start = next(
            (s for s in replaced if path == s or s == "" or path.startswith(f"{s}.")), None
        )
        if start is None:
            raise ConversionError(
                f"{joined(name, path)!r} is in none of the modules that the net stands for"
            )
        found[path] = find(
            replaced[start], path.removeprefix(start).removeprefix("."), joined(name, start)
        )
    for path in linears:
        if not getattr(found[path], "_parameters", {}).keys() & {"weight", "weight_orig"}:
            kind = type(found[path]).__name__
            raise ConversionError(
                f"{joined(name, path)!r} ({kind}) is not the linear module that the net stands for"
            )
    for path in drops:
        if not isinstance(getattr(found[path], "p", None), float | int):
            kind = type(found[path]).__name__
            raise ConversionError(
                f"{joined(name, path)!r} ({kind}) is not the Dropout that the net stands for"
            )
    return [found[path] for path in linears]


def _resemble(
    net: GrapNet, present: nn.Module, model: nn.Module, linears: Sequence[nn.Module]
) -> None:
    """Gives a net the device, the dtype, the mode and the `requires_grad` of what it replaces."""
    parameters = dict(present.named_parameters())
    around = (*parameters.values(), *present.buffers(), *model.parameters(), *model.buffers())
    dtypes = {parameter.dtype for parameter in parameters.values() if parameter.is_floating_point()}
    device = next((tensor.device for tensor in around if not tensor.is_meta), None)
    net.to(device=device, dtype=dtypes.pop() if len(dtypes) == 1 else None).train(present.training)
    trained = any(parameter.requires_grad for parameter in parameters.values()) or not parameters
    for t, linear in enumerate(linears):
        for kind, name in (("weight", f"transitions.{t}.weight"), ("bias", f"layers.{t + 1}.bias")):
            parameter = linear._parameters.get(kind, linear._parameters.get(f"{kind}_orig"))
            parameters |= {} if parameter is None else {name: parameter}
    for name, parameter in net.named_parameters() if parameters else ():
        parameter.requires_grad_(parameters[name].requires_grad if name in parameters else trained)


def prepare_graft(model: nn.Module, name: str, chain: Chain, net: GrapNet) -> Callable[[], None]:
    """Prepares to put a net in place of the modules of a chain that starts at the module called
    `name`.
    """
    anchor = find(model, name)
    linears = [find(anchor, part.path, name) for part in chain.parts]
    for part, linear in zip(chain.parts, linears, strict=True):
        if not _is_linear(linear):
            place = joined(name, part.path)
            raise ConversionError(
                f"{place!r} ({type(linear).__name__}) is not the linear module that the net stands"
                " for"
            )
    emptied = {id(linear): _without_weights(linear) for linear in linears}
    paths = [chain.place, *chain.emptied]
    replaced = {path: copy.deepcopy(find(anchor, path, name), dict(emptied)) for path in paths}
    at = joined(name, chain.place)
    if at == "":
        raise ConversionError(
            "the model itself cannot be replaced in place; use gn.from_module(model)"
        )

    present = find(model, at)
    origin = Origin(chain, replaced)

    def install() -> None:
        for path in chain.emptied:
            put(anchor, path, nn.Identity())
        _install(model, present, net, origin)

    return install


def _is_linear(module: Any) -> bool:
    """Says whether a module holds a matrix, pruned or not."""
    held = module._parameters if isinstance(module, nn.Module) else {}
    weight = held.get("weight", held.get("weight_orig"))
    return weight is not None and not is_lazy(weight) and weight.dim() == 2


def _install(model: nn.Module, present: nn.Module, net: GrapNet, origin: Origin | None) -> None:
    put_everywhere(model, present, net)
    net.origin = origin
    set_fast_paths(model)


def find(module: Any, path: str, where: str = "") -> Any:
    """Returns what stands under a path of attributes; raises ConversionError when nothing does."""
    found = module
    for step in path.split(".") if path else ():
        found = getattr(found, step, None)
        if found is None:
            raise ConversionError(
                f"there is nothing called {joined(where, path)!r} in this {type(module).__name__}"
            )
    return found


def put(module: nn.Module, path: str, value: Any) -> None:
    """Puts something in place of what stands under a path: a module, or a function that a module
    has.
    """
    before, _, step = path.rpartition(".")
    owner = find(module, before)
    if isinstance(value, nn.Module) and step in owner._modules:
        owner._modules[step] = value
    else:
        if hasattr(owner, step):
            delattr(owner, step)
        setattr(owner, step, value)


def put_everywhere(model: nn.Module, present: nn.Module, module: nn.Module) -> None:
    """Puts a module in place of another one, under every name that this one has."""
    for owner, step in owners_of(model, present):
        owner._modules[step] = module


def owners_of(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns every module that has this one, and under which name."""
    return [
        (owner, step)
        for owner in model.modules()
        for step, child in owner._modules.items()
        if child is module
    ]


def require_not_compiled(model: nn.Module, module: nn.Module, name: str) -> None:
    """Raises ConversionError when `torch.compile` holds a module: it would go on with that,
    whatever replaces it.
    """
    if any(step == COMPILED for _, step in owners_of(model, module)):
        if name == COMPILED:
            raise ConversionError(
                f"{name!r} is all that torch.compile(model) was given, and it would go on with"
                " that; do this to the model before torch.compile. gn.from_module(model) makes one"
                " net of all of it"
            )
        raise ConversionError(
            f"{name!r} was compiled by torch.compile(part), which would go on with the module that"
            " it was given; put the part itself where its compiled wrapper stands, and compile it"
            " afterwards, or in place: part.compile()"
        )


def match_names(names: Iterable[str], present: Collection[str]) -> dict[str, str]:
    """Returns which present name means the same as each of `names`: steps into
    `torch.compile(part)` do not count.

    A name that no present one matches stands for itself, and all of them do when two would match
    the same one.
    """
    own, plain = set(present), {_without_compiled(name): name for name in present}
    found = {
        name: name if name in own else plain.get(_without_compiled(name), name) for name in names
    }
    return found if len(set(found.values())) == len(found) else {name: name for name in found}


def match_places(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Returns what a model calls the places of nets; nothing but a module inside it is a place."""
    return match_names(names, [name for name in module_names(model) if name])


def module_names(model: nn.Module) -> list[str]:
    """Returns every name of every module in a model, without those of the wrappers that
    `torch.compile` makes.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    wrappers = {
        before for before, _, step in (name.rpartition(".") for name in names) if step == COMPILED
    }
    return [name for name in names if name not in wrappers]


def _without_compiled(name: str) -> str:
    return ".".join(step for step in name.split(".") if step != COMPILED)


def joined(*names: str) -> str:
    """Returns names and paths as one name."""
    return ".".join(name for name in names if name)


def _anchor_name(name: str, path: str) -> str:
    if path and name != path and not name.endswith("." + path):
        raise ConversionError(f"{name!r} does not end in {path!r}, where its chain has the net")
    return name.removesuffix(path).removesuffix(".") if path else name


def _without_weights(linear: nn.Module) -> nn.Module:
    """Returns a module of the same class and settings that has no weights; an empty bias says that
    there was one.
    """
    empty = type(linear).__new__(type(linear))
    nn.Module.__init__(empty)
    empty.training = linear.training
    settings = {key: value for key, value in vars(linear).items() if key not in vars(empty)}
    vars(empty).update(
        {key: value for key, value in settings.items() if key not in ("weight", "bias")}
    )
    empty.register_parameter("weight", None)
    has_bias = any(linear._parameters.get(name) is not None for name in ("bias", "bias_orig"))
    empty.register_parameter(
        "bias", nn.Parameter(torch.empty(0, device="cpu")) if has_bias else None
    )
    return empty
