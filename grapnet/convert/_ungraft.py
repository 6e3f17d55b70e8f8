"""Turns nets back into the modules they replaced, or into new ones."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any, overload

from torch import nn

from grapnet._network import GrapNet
from grapnet.core._commit import carry_out
from grapnet.core._coordinates import Decision
from grapnet.core._errors import ConversionError, PlanError
from grapnet.core._layer import Layer
from grapnet.execution._modules import MOST_CELLS, activation_module
from grapnet.following._optimizers import OptimizerFollower, detach
from grapnet.following._state import drop_layouts, mark_replaced
from grapnet.spaces import Adopted
from grapnet.spaces._adopted import find_adopted

from ._build import fill_linears
from ._chain import Chain, Part, commutes, read_chain
from ._config import sync_config
from ._exchange import Optimizers, as_optimizers, prepare_exchange, refuse_stale_losses
from ._matching import Where, matching_nets
from ._origin import (
    Origin,
    find,
    find_replaced,
    put,
    put_everywhere,
    require_not_compiled,
    set_fast_paths,
)


@overload
def ungraft(model: Adopted) -> nn.Module: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def ungraft(
    model: nn.Module,
    where: Where | None = None,
    optimizer: Optimizers = None,
    *,
    most_cells: int = MOST_CELLS,
) -> dict[str, nn.Module]: ...
def ungraft(
    model: nn.Module,
    where: Where | None = None,
    optimizer: Optimizers = None,
    *,
    most_cells: int = MOST_CELLS,
) -> dict[str, nn.Module] | nn.Module:
    """Puts plain modules back in place of nets, with the weights and shapes that the nets have by
    then.

    A net that `gn.graft` put there becomes the modules that it replaced, under their own state-dict
    keys; any other becomes its `net.to_module()`. Where a relation is missing the matrix is zero,
    and trains again from there. Edits of a net that was taken out do not reach the model.

    An adopted model stays as it is, except that relations which were cut are 0 from then on, and
    train again, as frozen ones do. Its graph ends: further edits raise EditError, and optimizers go
    on with the same Parameters. If it has a Hugging Face `config`, the numbers there are set to
    the sizes that the layers have, so that `save_pretrained` and `from_pretrained` work.

    Args:
        model: the model; to keep it, give a deep copy. Or an adopted model, or its graph.
        where: which nets, as for `graft`; all of them when left out.
        optimizer: one, or several, that go on with the plain Parameters; what was cut or frozen
            starts with clean state.
        most_cells: as for `net.to_module()`.

    Returns:
        The plain modules by name, where the nets stood; of an adopted model, the model itself.

    Raises:
        ConversionError: no net matches, or the original modules cannot compute what a net computes;
            nothing was changed.
        EditError: no config describes an adopted Hugging Face model, as where layers differ; the
            message names them, and nothing was changed. The model runs and trains nevertheless.
    """
    net = find_adopted(model)
    if net is not None:
        return _end_adoption(net)
    nets = matching_nets(model, where)
    optimizers = as_optimizers(optimizer)
    if "" in nets:
        raise ConversionError(
            "the model is a net itself and cannot be replaced in place; take net.to_module()"
        )
    exchanges = []
    homes = []
    installs = []
    plain = {}
    for name, net in nets.items():
        require_not_compiled(model, net, name)
        try:
            chain, replaced = _skeletons(net, name, most_cells)
            linears = [find_replaced(replaced, part.path) for part in chain.parts]
            exchanges += fill_linears(net, linears, chain, most_cells)
        except PlanError as error:
            raise ConversionError(f"{name!r} cannot become plain modules: {error}") from None
        plain[name] = replaced[chain.place]
        modules = [module for module in replaced.values() if isinstance(module, nn.Module)]
        homes.append([parameter for module in modules for parameter in module.parameters()])
        _set_modes(replaced, chain, net)
        place = name.removesuffix(chain.place).removesuffix(".") if chain.place else name
        installs.append(partial(_put_back, model, find(model, place), net, chain, replaced))
    installs += [
        prepare_exchange(one, exchanges, homes, list(model.parameters())) for one in optimizers
    ]
    decision = Decision()
    installs += refuse_stale_losses(exchanges, "ungraft", decision)
    leaving = [exchange.parameter for exchange in exchanges]
    installs.append(partial(mark_replaced, leaving, "ungraft"))
    for net in nets.values():
        installs += [partial(detach, one, net) for one in optimizers]
    installs.append(partial(set_fast_paths, model))
    carry_out(installs, decision)
    return plain


def _end_adoption(net: Adopted) -> nn.Module:
    """Removes the graph from an adopted model, and returns the model."""
    net._require_no_edit("ungraft")
    sync_config(net)
    net._close_tensors()
    for follower in net._followers._alive():
        optimizer = None
        if isinstance(follower, OptimizerFollower):
            optimizer = follower.optimizer()
        if optimizer is not None:
            detach(optimizer, net)
        net.unfollow(follower)
    drop_layouts(net.parameters())
    net._end()
    return net.model


def _skeletons(net: GrapNet, name: str, most_cells: int) -> tuple[Chain, dict[str, nn.Module]]:
    """Returns the chain to go back to, and its modules by path from the anchor, without weights."""
    origin: Origin | None = net._origin
    if origin is None:
        module = net.to_module(most_cells=most_cells)
        plain = module[0] if len(module) == 1 else module
        return replace(read_chain(plain), place=""), {"": plain}
    if not origin.chain.has_depth_of(net):
        raise ConversionError(
            f"layers or skips of {name!r} have come or left since the graft, so that the modules"
            " that it replaced do not stand for it; take net.to_module()"
        )
    replaced = copy.deepcopy(origin.replaced)
    # The input may be dropped too; the first step stands for it.
    for layer, step in zip(net.layers, [origin.chain, *origin.chain.parts], strict=True):
        _set_dropout(replaced, step, layer.dropout, name)
        if isinstance(step, Part):
            _set_activation(replaced, step, layer, name)
    return origin.chain, replaced


def _set_activation(replaced: dict[str, nn.Module], part: Part, layer: Layer, name: str) -> None:
    """Puts the current activation of a layer in place of the original one."""
    kinds = [str(kind) for kind, _ in layer._activation_names.kinds()]
    if (
        part.drops_first
        and layer.dropout
        and not all(kind == "identity" or commutes(kind) for kind in kinds)
    ):
        raise ConversionError(
            f"layer {layer.index} of {name!r} drops what comes out of {', '.join(kinds)}, and the"
            " original Dropout stands before the activation; take net.to_module()"
        )
    if kinds in ([part.activation], []):
        return
    if part.activation_path is None:
        raise ConversionError(
            f"layer {layer.index} of {name!r} has an activation, and the original modules have"
            " none; take net.to_module()"
        )
    _replace(replaced, part.activation_path, activation_module(layer) or nn.Identity())


def _set_dropout(
    replaced: dict[str, nn.Module], step: Chain | Part, probability: float, name: str
) -> None:
    """Gives the original Dropout the current probability of a layer."""
    if probability == step.dropout:
        return
    if step.dropout_path is None:
        raise ConversionError(
            f"a layer of {name!r} has dropout, and the original modules have none; take"
            " net.to_module()"
        )
    dropout: Any = find_replaced(replaced, step.dropout_path)
    dropout.p = probability


def _set_modes(replaced: dict[str, nn.Module], chain: Chain, net: GrapNet) -> None:
    """Puts the modules into the mode of the net, and every Dropout into that of its layer."""
    for module in replaced.values():
        if isinstance(module, nn.Module):
            module.train(net.training)
    paths = [chain.dropout_path, *(part.dropout_path for part in chain.parts)]
    for layer, path in zip(net.layers, paths, strict=True):
        if path is not None:
            find_replaced(replaced, path).train(layer.training)


def _replace(replaced: dict[str, nn.Module], path: str, module: nn.Module) -> None:
    if path in replaced:
        replaced[path] = module
    else:
        before, _, step = path.rpartition(".")
        put(find_replaced(replaced, before), step, module)


def _put_back(
    model: nn.Module,
    anchor: nn.Module,
    net: GrapNet,
    chain: Chain,
    replaced: dict[str, nn.Module],
) -> None:
    for path in chain.emptied:
        put(anchor, path, replaced[path])
    put_everywhere(model, net, replaced[chain.place])
