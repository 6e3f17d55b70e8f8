"""gn.ungraft: nets become plain modules again, those that they were grafted onto where there were
any.
"""

import copy
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from grapnet.core._commit import carry_out
from grapnet.core._coordinates import Decision
from grapnet.core._errors import ConversionError, PlanError
from grapnet.core._graph import Graph
from grapnet.core._journal import Commit
from grapnet.core._layer import Layer
from grapnet.execution.modules import MOST_CELLS, activation_module
from grapnet.following.optimizers import detach, mark_replaced
from grapnet.network import GrapNet

from .build import fill_linears
from .chain import Chain, Part, commutes, read_chain
from .exchange import Optimizers, as_optimizers, prepare_exchange, prepare_farewell
from .fastpath import set_fast_paths
from .matching import Where, matching_nets
from .origin import Origin, find, put, put_everywhere, require_not_compiled

# a graph does not keep its followers
_left: "weakref.WeakKeyDictionary[GrapNet, _Left]" = weakref.WeakKeyDictionary()


def ungraft(
    model: nn.Module,
    where: Where | None = None,
    optimizer: Optimizers = None,
    *,
    most_cells: int = MOST_CELLS,
) -> dict[str, nn.Module]:
    """Puts plain modules back in place of nets, with the weights and shapes that the nets have by
    then.

    A net that `gn.graft` put there becomes the modules that it replaced, under their own state-dict
    keys; any other becomes its `net.to_module()`. Where a relation is missing the matrix is zero,
    and trains again from there. The first edit of a net that was taken out warns that it does not
    reach the model.

    Args:
        model: the model; to keep it, give a deep copy.
        where: which nets, as for `graft`; all of them when left out.
        optimizer: one, or several, that go on with the plain Parameters; what was cut or frozen
            starts with clean state.
        most_cells: as for `net.to_module()`.

    Returns:
        The plain modules by name, where the nets stood.

    Raises:
        ConversionError: no net matches, or the modules of then cannot compute what a net computes;
            nothing was changed.
    """
    nets, optimizers = matching_nets(model, where), as_optimizers(optimizer)
    if "" in nets:
        raise ConversionError(
            "the model is a net itself and cannot be replaced in place; take net.to_module()"
        )
    exchanges, homes, installs, plain = [], [], [], {}
    for name, net in nets.items():
        require_not_compiled(model, net, name)
        try:
            chain, replaced = _skeletons(net, name, most_cells)
            linears = [_find(replaced, part.path) for part in chain.parts]
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
    installs += prepare_farewell(exchanges, "ungraft", decision)
    leaving = [exchange.parameter for exchange in exchanges]
    installs.append(partial(mark_replaced, leaving, "ungraft"))
    for net in nets.values():
        installs += [partial(detach, one, net) for one in optimizers]
        installs.append(partial(net.follow, _left.setdefault(net, _Left())))
    installs.append(partial(set_fast_paths, model))
    carry_out(installs, decision)
    return plain


class _Left:
    """Warns at the first commit of a net that has left its model."""

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Warns, before anything has changed."""
        warnings.warn(
            "gn.ungraft has taken this net out of its model, so edits of it do not change the"
            " model. Edit before gn.ungraft, or gn.graft again and edit the net that it returns",
            stacklevel=2,
        )
        return lambda: graph.unfollow(self)


def _skeletons(net: GrapNet, name: str, most_cells: int) -> tuple[Chain, dict[str, nn.Module]]:
    """Returns the chain to go back to, and its modules by path from the anchor, without weights."""
    origin: Origin | None = net.origin
    if origin is None:
        module = net.to_module(most_cells=most_cells)
        plain = module[0] if len(module) == 1 else module
        return replace(read_chain(plain), place=""), {"": plain}
    for part, size in zip(origin.chain.parts, net.sizes, strict=False):
        if part.transposed and size == 0:
            raise ConversionError(
                f"{name!r} has a layer without nodes, and {part.path!r} cannot run on that; add a"
                " node"
            )
    replaced = copy.deepcopy(origin.replaced)
    for layer, part in zip(net.layers, [None, *origin.chain.parts], strict=True):
        _set_dropout(replaced, origin.chain, part, layer.dropout, name)
        if part is not None:
            _set_activation(replaced, part, layer, name)
    return origin.chain, replaced


def _set_activation(replaced: dict[str, nn.Module], part: Part, layer: Layer, name: str) -> None:
    """Puts the activation that a layer has by now in place of the one of then."""
    kinds = [str(kind) for kind, _ in layer.activation_names.kinds()]
    if (
        part.drops_first
        and layer.dropout
        and not all(kind == "identity" or commutes(kind) for kind in kinds)
    ):
        raise ConversionError(
            f"layer {layer.index} of {name!r} drops what comes out of {', '.join(kinds)}, and the"
            " Dropout of then stands before the activation; take net.to_module()"
        )
    if kinds in ([part.activation], []):
        return
    if part.activation_path is None:
        raise ConversionError(
            f"layer {layer.index} of {name!r} has an activation, and there was none in the modules"
            " of then; take net.to_module()"
        )
    _replace(replaced, part.activation_path, activation_module(layer) or nn.Identity())


def _set_dropout(
    replaced: dict[str, nn.Module], chain: Chain, part: Part | None, probability: float, name: str
) -> None:
    """Gives the Dropout of then the probability that a layer has by now."""
    then, path = (
        (chain.dropout, chain.dropout_path) if part is None else (part.dropout, part.dropout_path)
    )
    if probability == then:
        return
    if path is None:
        raise ConversionError(
            f"a layer of {name!r} has dropout, and there was none in the modules of then; take"
            " net.to_module()"
        )
    setattr(_find(replaced, path), "p", probability)  # noqa: B010 (typed as a tensor or module)


def _set_modes(replaced: dict[str, nn.Module], chain: Chain, net: GrapNet) -> None:
    """Puts the modules into the mode of the net, and every Dropout into that of its layer."""
    for module in replaced.values():
        if isinstance(module, nn.Module):
            module.train(net.training)
    paths = [chain.dropout_path, *(part.dropout_path for part in chain.parts)]
    for layer, path in zip(net.layers, paths, strict=True):
        if path is not None:
            _find(replaced, path).train(layer.training)


def _find(replaced: dict[str, nn.Module], path: str) -> nn.Module:
    """Returns what stands under a path from the anchor, among the modules that were replaced."""
    for start, module in replaced.items():
        if path == start or start == "" or path.startswith(f"{start}."):
            return find(module, path.removeprefix(start).removeprefix("."))
    raise ConversionError(f"{path!r} is in none of the modules that were replaced")


def _replace(replaced: dict[str, nn.Module], path: str, module: nn.Module) -> None:
    if path in replaced:
        replaced[path] = module
    else:
        before, _, step = path.rpartition(".")
        put(_find(replaced, before), step, module)


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
