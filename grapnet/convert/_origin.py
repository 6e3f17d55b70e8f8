"""The modules that a net replaced, kept without weights so that ungraft can restore them."""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod

from grapnet._network import GrapNet
from grapnet._torch import COMPILED, accumulation_hooks, gradient_hooks, module_hooks
from grapnet.core._errors import ConversionError

from ._chain import Chain

# torch's fused Transformer encoder reads the weights of its Linears instead of calling them: what
# turns it off, and to what
_SWITCHES: dict[type[nn.Module], tuple[str, object]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_KEPT = "_before_graft"


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
    return None if net._origin is None else net._origin.chain.to_data()


def place(model: nn.Module, name: str, net: GrapNet, described: Any) -> Callable[[], None]:
    """Prepares to put a net into a model, over whatever stands there; returns what does it.

    The net takes over the device, the dtype, the mode and, Parameter by Parameter, the
    `requires_grad` of that; where no Parameters stand it keeps its own.

    Args:
        model: a model like the one the net was found in.
        name: of the net in it.
        net: the net.
        described: what `describe_origin` returned; weights and shapes of what stands there are
            not needed.

    Raises:
        ConversionError: the model has no such place, or other modules there, or a net with hooks or
            with something of its own that this one would not have, or `torch.compile` holds what
            stands there.
        ValueError: `described` is not what `describe_origin` returns.
    """
    chain = None if described is None else Chain.from_data(described)
    # After layers have come or left, none stands for one linear module.
    is_as_grafted = chain is None or chain.has_depth_of(net)
    if chain is not None and not is_as_grafted and not net.journal._outlines.has_blocks:
        raise ConversionError(
            f"a net of {len(net.transitions)} transitions stands for no {len(chain.parts)} linear"
            " parts"
        )
    present = find(model, name)
    require_not_compiled(model, present, name)
    if isinstance(present, GrapNet):
        refusal = describe_additions(present, f"the net at {name!r}")
        if refusal:
            raise ConversionError(refusal)
        for inner, module in present.named_modules():
            require_no_hooks(module, joined(name, inner))
    linears: list[nn.Module] = []
    install = partial(_install, model, present, net, None)
    if chain is not None:
        anchor_name = _anchor_name(name, chain.place)
        if not isinstance(present, GrapNet):
            anchor = find(model, anchor_name)
            paths = (chain.place, *chain.emptied)
            replaced = {path: find(anchor, path, anchor_name) for path in paths}
            linears = _find_linears(chain, replaced, anchor_name)
            install = prepare_graft(model, anchor_name, chain, net)
        elif present._origin is not None:
            _find_linears(chain, present._origin.replaced, anchor_name)
            origin = Origin(chain, present._origin.replaced)
            install = partial(_install, model, present, net, origin)
    if not is_as_grafted:
        linears = []
    _copy_settings(net, present, model, linears)
    return install


def describe_additions(net: GrapNet, where: str) -> str:
    """Returns which forward, modules, Parameters or buffers a net has beside its graph, which no
    file holds; empty for a plain one.

    Args:
        net: the net.
        where: what to call it.
    """
    if type(net).forward is not GrapNet.forward or "forward" in vars(net):
        return f"{where} ({type(net).__name__}) has a forward of its own, which would be lost"
    expected = {"layers", "transitions", "columns", "bias", "weight", "value", "frozen_values"}
    for name, part in net.named_modules():
        # the numbers of the layers and the names of the columns
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            continue
        added = {*part._modules, *part._parameters, *part._buffers} - expected
        if added:
            return f"{where} has {joined(name, min(added))} beside its graph, which would be lost"
    return ""


def _find_linears(chain: Chain, replaced: dict[str, Any], name: str) -> list[nn.Module]:
    """Returns the linear modules of a chain; raises ConversionError when something it names is not
    what it was.
    """
    paths = [chain.dropout_path]
    for part in chain.parts:
        paths += [part.dropout_path, part.activation_path]
    for path in paths:
        if path is not None:
            find_replaced(replaced, path, name)
    linears = []
    for part in chain.parts:
        linear = find_replaced(replaced, part.path, name)
        held = getattr(linear, "_parameters", {})
        # None in a module whose weights are in a net
        weight = held.get("weight", held.get("weight_orig"))
        is_matrix = weight is None or (not is_lazy(weight) and weight.dim() == 2)
        if not is_matrix or not held.keys() & {"weight", "weight_orig"}:
            kind = type(linear).__name__
            raise ConversionError(
                f"{joined(name, part.path)!r} ({kind}) is not what the net stands for"
            )
        linears.append(linear)
    return linears


def find_replaced(replaced: dict[str, Any], path: str, name: str = "") -> Any:
    """Returns what stands under a path from the anchor, among the modules that were replaced."""
    for start, module in replaced.items():
        if path == start or start == "" or path.startswith(f"{start}."):
            inner = path.removeprefix(start).removeprefix(".")
            return find(module, inner, joined(name, start))
    raise ConversionError(f"{joined(name, path)!r} is in none of the modules that were replaced")


def _copy_settings(
    net: GrapNet, present: nn.Module, model: nn.Module, linears: Sequence[nn.Module]
) -> None:
    """Copies the device, the dtype, the mode and `requires_grad` of what a net replaces."""
    parameters = dict(present.named_parameters())
    around = (*parameters.values(), *present.buffers(), *model.parameters(), *model.buffers())
    dtypes = {parameter.dtype for parameter in parameters.values() if parameter.is_floating_point()}
    device = next((tensor.device for tensor in around if not tensor.is_meta), None)
    net.to(device=device, dtype=dtypes.pop() if len(dtypes) == 1 else None).train(present.training)
    trained = any(parameter.requires_grad for parameter in parameters.values()) or not parameters
    for t, linear in enumerate(linears):
        bias = f"layers.{net.transitions[t].target}.bias"
        for kind, name in (("weight", f"transitions.{t}.weight"), ("bias", bias)):
            parameter = linear._parameters.get(kind, linear._parameters.get(f"{kind}_orig"))
            if parameter is not None:
                parameters[name] = parameter
    for name, parameter in net.named_parameters() if parameters else ():
        found = parameters.get(name)
        parameter.requires_grad_(trained if found is None else found.requires_grad)


def prepare_graft(model: nn.Module, name: str, chain: Chain, net: GrapNet) -> Callable[[], None]:
    """Prepares to put a net in place of the modules of a chain that starts at the module called
    `name`.
    """
    anchor = find(model, name)
    linears = [find(anchor, part.path, name) for part in chain.parts]
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


def _install(model: nn.Module, present: nn.Module, net: GrapNet, origin: Origin | None) -> None:
    put_everywhere(model, present, net)
    net._origin = origin
    set_fast_paths(model)


def set_fast_paths(model: nn.Module) -> None:
    """Turns the fused kernel off in encoders with a net inside, which then call it, and back on in
    the others.
    """
    for module in model.modules():
        for kind, (switch, off) in _SWITCHES.items():
            if isinstance(module, kind) and hasattr(module, switch):
                inside = any(isinstance(part, GrapNet) for part in module.modules())
                if inside:
                    vars(module).setdefault(_KEPT, getattr(module, switch))
                    setattr(module, switch, off)
                elif _KEPT in vars(module):
                    setattr(module, switch, vars(module)[_KEPT])
                    del vars(module)[_KEPT]


def require_no_hooks(module: nn.Module, where: str) -> None:
    """Raises ConversionError for a module with hooks, which would not be called any more; those of
    pruning and of recorders do not count.
    """
    registered: list[dict[int, Any] | None] = [*module_hooks(module)]
    for parameter in module.parameters(recurse=False):
        registered += [gradient_hooks(parameter), accumulation_hooks(parameter)]
    for hooks in registered:
        for hook in (hooks or {}).values():
            is_ours = str(getattr(hook, "__module__", "")).startswith("grapnet.")
            if not is_ours and not isinstance(hook, BasePruningMethod):
                raise ConversionError(
                    f"{where!r} has hooks, which would be lost; remove them, and register them on"
                    " the net"
                )
    if "forward" in vars(module):
        raise ConversionError(f"{where!r} has a forward of its own, put in place of its class's")


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
    found = []
    for owner in model.modules():
        for step, child in owner._modules.items():
            if child is module:
                found.append((owner, step))
    return found


def require_not_compiled(model: nn.Module, module: nn.Module, name: str) -> None:
    """Raises ConversionError when `torch.compile` holds a module: it would keep running that
    module after a replacement.
    """
    if any(step == COMPILED for _, step in owners_of(model, module)):
        raise ConversionError(
            f"{name!r} was compiled by torch.compile(part), which would keep running the"
            " module that it was given; put the part itself there, and compile it afterwards"
        )


def match_names(names: Iterable[str], present: Collection[str]) -> dict[str, str]:
    """Returns which present name means the same as each of `names`: steps into
    `torch.compile(part)` do not count.

    A name that no present one matches stands for itself, and all of them do when two would match
    the same one.
    """
    plain = {_without_compiled(name): name for name in present}
    own = set(present)
    found = {}
    for name in names:
        found[name] = name
        if name not in own:
            found[name] = plain.get(_without_compiled(name), name)
    if len(set(found.values())) < len(found):
        return {name: name for name in found}
    return found


def match_places(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Returns what a model calls the places of nets; nothing but a module inside it is a place."""
    return match_names(names, [name for name in module_names(model) if name])


def module_names(model: nn.Module) -> list[str]:
    """Returns every name of every module in a model, without those of the wrappers that
    `torch.compile` makes.
    """
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        if COMPILED not in module._modules:
            found.append(name)
    return found


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
    """Returns a module of the same class and settings that has no weights; an empty bias stands
    for one that was there.
    """
    empty = type(linear).__new__(type(linear))
    nn.Module.__init__(empty)
    empty.training = linear.training
    for key, value in vars(linear).items():
        # pruning keeps the weights it computes as plain attributes
        if key not in vars(empty) and key not in ("weight", "bias"):
            vars(empty)[key] = value
    bias = None
    if any(linear._parameters.get(name) is not None for name in ("bias", "bias_orig")):
        bias = nn.Parameter(torch.empty(0, device="cpu"))
    empty.register_parameter("weight", None)
    empty.register_parameter("bias", bias)
    return empty
