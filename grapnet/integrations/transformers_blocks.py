"""The feed-forward blocks of a model, found by what their modules are made of and what their
forwards do.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

import grapnet as gn
from grapnet.convert import Chain, Part

from .transformers_probe import activation_of, computes_linear, read_forward, why_units_are_bound

_TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# in layers with attention
_PAIRS = (
    ("fc1", "fc2"),
    ("linear1", "linear2"),
    ("lin1", "lin2"),
    ("ffn", "ffn_output"),
)

LOOKED_FOR = (
    "two Linears (or Conv1Ds) of one module, from its width to the hidden one and back, as in"
    " GPT-2's and ViT's mlp; three, with a gate, as in Llama's; a layer with `intermediate` and"
    " `output`, as BERT's; one with fc1 and fc2, as OPT's; torch's own TransformerEncoderLayer and"
    " TransformerDecoderLayer"
)


@dataclass(frozen=True, eq=False)
class Block:
    """One feed-forward block: one net that holds its hidden units, or several nets that share them.

    Attributes:
        name: in the model.
        places: the names of its nets; of several the last one reads the hidden units that the
            others compute.
        chains: what becomes these nets, by the names of the anchors; None when they are nets
            already.
        refusal: why it cannot become nets, None when it can.
        packed: whether the first of two nets has two nodes for every hidden unit.
    """

    name: str
    places: tuple[str, ...] = ()
    chains: Mapping[str, Chain] | None = None
    refusal: str | None = None
    packed: bool = False


def blocks_of(model: nn.Module) -> list[Block]:
    """Returns the feed-forward blocks of a model in the order of its modules, with those that are
    nets already.
    """
    found = (_read(name, module) for name, module in model.named_modules())
    return [block for block in found if block is not None]


def _read(name: str, module: nn.Module) -> Block | None:
    if isinstance(module, gn.GrapNet):
        return _from_net(name, module)
    return (
        _torch_layer(name, module)
        or _layer_in_two(name, module)
        or _one_module(name, module)
        or _layer(name, module)
    )


def _from_net(name: str, net: gn.GrapNet) -> Block | None:
    """Returns the block that one net stands for, None when it stands for something else."""
    if net.origin is None or len(net.origin.chain.parts) != 2 or net.sizes[0] != net.sizes[-1]:
        return None
    return Block(name.removesuffix(net.origin.chain.place).removesuffix("."), (name,))


def _torch_layer(name: str, module: nn.Module) -> Block | None:
    """Reads torch's encoder and decoder layers: linear2(dropout(activation(linear1(x))))."""
    kind = next((kind for kind in _TORCH_LAYERS if isinstance(module, kind)), None)
    if kind is None or getattr(type(module), "_ff_block", None) is not kind._ff_block:
        return None
    layer: Any = module
    activation = activation_of(layer.activation)
    plain = type(layer.dropout) is nn.Dropout and all(
        _is_linear(one) for one in (layer.linear1, layer.linear2)
    )
    if activation is None or not plain:
        return None
    first = Part("linear1", False, activation, "activation", float(layer.dropout.p), "dropout")
    chain = Chain(
        (first, Part("linear2")), place="linear1", emptied=("activation", "dropout", "linear2")
    )
    return Block(name, (_joined(name, "linear1"),), {name: chain})


def _layer_in_two(name: str, module: nn.Module) -> Block | None:
    """Reads layers like BERT's: `intermediate` is a Linear and the activation, and `output` begins
    with the other.
    """
    inner, outer = (module._modules.get(part) for part in ("intermediate", "output"))
    if (
        inner is None
        or outer is None
        or isinstance(inner, gn.GrapNet)
        or isinstance(outer, gn.GrapNet)
    ):
        return None
    firsts, seconds = _linears(inner), _linears(outer)
    if len(firsts) != 1 or len(seconds) != 1:
        return None
    first, second = next(iter(firsts)), next(iter(seconds))
    if firsts[first] != seconds[second][::-1]:
        return None
    paths = _joined("intermediate", first), _joined("output", second)
    reading = (
        read_forward(inner, first, None, []) if _is_linear(inner.get_submodule(first)) else None
    )
    if reading is None or not _is_linear(outer.get_submodule(second)):
        return _bound(name, module, inner, seconds[second]) or _apart(name, module, paths)
    activation_path = _joined("intermediate", path) if (path := _activation_path(inner)) else None
    parts = _part(module, paths[0], reading.activation, activation_path), _part(module, paths[1])
    chain = Chain(parts, place="intermediate", emptied=(paths[1],))
    return Block(name, (_joined(name, "intermediate"),), {name: chain})


def _one_module(name: str, module: nn.Module) -> Block | None:
    """Reads a module that is a feed-forward block and nothing else, with a gate or without."""
    linears = _linears(module)
    others = {n: child for n, child in module.named_children() if n not in linears}
    if len(linears) not in (2, 3) or any(
        True for child in others.values() for _ in child.children()
    ):
        return None
    dropouts = [n for n, child in others.items() if type(child) is nn.Dropout]
    activation_path, refusal = _activation_path(module), None
    for into, out in _roles(linears):
        hidden, width = linears[out]
        if activation_path is None and hidden == width:
            continue  # the queries, keys and values of an attention look like this
        dense = all(_is_linear(module.get_submodule(n)) for n in linears)
        if dense and list(into.values()) == [1]:
            first = next(iter(into))
            reading = read_forward(module, first, out, dropouts)
            if reading is not None:
                parts = (
                    _part(module, first, reading.activation, activation_path, reading.between),
                    _part(module, out, dropout_path=reading.after),
                )
                return Block(name, (name,), {name: Chain(parts)}) if name else _alone(module)
        refusal = why_units_are_bound(module, into, out, width)
        if refusal is None:
            return replace(_apart(name, module, (*into, out)), packed=2 in into.values())
    if refusal is None or activation_path is None:
        return None
    return _refused(name, module, refusal)


def _layer(name: str, module: nn.Module) -> Block | None:
    """Reads a layer that holds the two Linears beside its attention; what its forward does between
    them stays there.
    """
    linears = _linears(module)
    for first, second in _PAIRS:
        if first in linears and second in linears and linears[first] == linears[second][::-1]:
            return _bound(name, module, module, linears[second]) or _apart(
                name, module, (first, second)
            )
    return None


def _bound(name: str, module: nn.Module, inner: nn.Module, widths: tuple[int, int]) -> Block | None:
    """Returns a refusal when a child of `inner` has a parameter for every hidden unit, such as a
    LayerNorm of them.
    """
    hidden, width = widths
    for path, child in inner.named_children():
        own = () if path in _linears(inner) or hidden == width else child.parameters(recurse=False)
        if any(parameter.shape == (hidden,) for parameter in own):
            return _refused(name, module, f"{path!r} has a parameter for every hidden unit")
    return None


def _alone(module: nn.Module) -> Block:
    kind = type(module).__name__
    return Block(
        "",
        refusal=(
            f"this {kind} is a block itself and cannot be replaced in place; give the model it"
            " is in"
        ),
    )


def _refused(name: str, module: nn.Module, why: str) -> Block:
    return Block(name, refusal=f"{name!r} ({type(module).__name__}) cannot become nets: {why}")


def _apart(name: str, module: nn.Module, paths: tuple[str, ...]) -> Block:
    """Returns the block in which every Linear is a net of its own, called by the forward that is
    there.
    """
    places = tuple(_joined(name, path) for path in paths)
    modules = [module.get_submodule(path) for path in paths]
    nets = [isinstance(one, gn.GrapNet) for one in modules]
    if all(nets):
        return Block(name, places)
    if any(nets):
        some = ", ".join(repr(place) for place, is_net in zip(places, nets, strict=True) if is_net)
        return _refused(
            name, module, f"{some} is a net already, and the rest is not; gn.ungraft it first"
        )
    parts = {
        place: Part("", _is_transposed(one)) for place, one in zip(places, modules, strict=True)
    }
    return Block(name, places, {place: Chain((part,)) for place, part in parts.items()})


def _roles(linears: dict[str, tuple[int, int]]) -> Iterator[tuple[dict[str, int], str]]:
    """Yields which Linears may compute the hidden units, with their rows for each, and which may
    read them.
    """
    for out in reversed(linears):
        hidden, width = linears[out]
        into = {
            name: made // hidden if hidden else 1
            for name, (_, made) in linears.items()
            if name != out
        }
        fit = all(linears[name] == (width, copies * hidden) for name, copies in into.items())
        if fit and list(into.values()) in ([1], [2], [1, 1]):
            yield into, out
            # an emptied block does not show how many rows a unit has
            if hidden == 0 and len(into) == 1:
                yield dict.fromkeys(into, 2), out


def _linears(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Returns the children that are Linears, Conv1Ds or nets that stand for one, with their widths
    (in, out).
    """
    found = {}
    for name, child in module.named_children():
        if isinstance(child, gn.GrapNet):
            if child.origin is not None and len(child.origin.chain.parts) == 1:
                found[name] = (child.sizes[0], child.sizes[-1])
        elif _is_linear(child):
            rows, columns = _matrix(child).shape
            found[name] = (rows, columns) if _is_transposed(child) else (columns, rows)
    return found


def _is_linear(module: nn.Module) -> bool:
    """Says whether a module is an `nn.Linear`, or a Conv1D of Hugging Face, whose matrix is a
    Parameter.
    """
    weight = _matrix(module)
    if weight is None or is_lazy(weight) or weight.dim() != 2 or "forward" in vars(module):
        return False
    if type(module).forward is nn.Linear.forward or _is_transposed(module):
        return True
    return (
        isinstance(module, nn.Linear) and "weight" in module._parameters and computes_linear(module)
    )


def _matrix(module: nn.Module) -> Any:
    """Returns the weight of a Linear, the one from before where torch.nn.utils.prune keeps it."""
    return module._parameters.get("weight", module._parameters.get("weight_orig"))


def _is_transposed(module: nn.Module) -> bool:
    """Says whether a module is a Conv1D, whose weight is [in, out]; whoever has one has imported
    its library.
    """
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and type(module) is library.Conv1D


def _activation_path(module: nn.Module) -> str | None:
    """Returns the only child that may be an activation: it has no parameters, and is no Dropout."""
    paths = [
        name
        for name, child in module.named_children()
        if not isinstance(child, nn.Dropout | nn.Identity | gn.GrapNet)
        and not any(True for _ in child.parameters())
        and not any(True for _ in child.buffers())
    ]
    return paths[0] if len(paths) == 1 else None


def _part(
    module: nn.Module,
    path: str,
    activation: str = "identity",
    activation_path: str | None = None,
    dropout_path: str | None = None,
) -> Part:
    dropout = 0.0
    if dropout_path is not None:
        dropout = float(getattr(module.get_submodule(dropout_path), "p"))  # noqa: B009
    transposed = _is_transposed(module.get_submodule(path))
    return Part(path, transposed, activation, activation_path, dropout, dropout_path)


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)
