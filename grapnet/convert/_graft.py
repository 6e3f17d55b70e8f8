"""gn.from_module and gn.graft: plain modules become nets, in the middle of training."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from grapnet._network import GrapNet
from grapnet.core._commit import carry_out
from grapnet.core._coordinates import Decision
from grapnet.core._errors import ConversionError
from grapnet.following._optimizers import attach
from grapnet.following._state import mark_replaced, parameters_of

from ._build import build_net
from ._chain import Chain, read_chain
from ._exchange import Exchange, Optimizers, as_optimizers, prepare_exchange, refuse_stale_losses
from ._matching import Where, is_inside, matches
from ._origin import find, joined, prepare_graft, require_not_compiled


def from_module(
    module: nn.Module, optimizer: Optimizers = None, *, drop_zeros: bool = False
) -> GrapNet:
    """Returns a net that computes what a stack of plain modules computes; the module itself stays
    as it is.

    Args:
        module: an `nn.Linear`, or an `nn.Sequential` of Linear, activation, Dropout and Identity
            modules, nested or not. A Linear without bias becomes nodes whose biases are zero and
            frozen. What `torch.nn.utils.prune` has pruned away is zero and frozen, too, unless it
            is dropped.
        optimizer: one, or several, that train the module: they go on with the net's Parameters, in
            the same groups and with the same state, and follow its edits (`gn.attach`).
        drop_zeros: leave weights that are zero out of the graph, pruned or not.

    Raises:
        ConversionError: a module inside is of another kind; the message names it.
        OptimizerError: an optimizer holds none of the parameters, or state that cannot be carried;
            nothing was changed.

    Examples:
        >>> import torch
        >>> import grapnet as gn
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        >>> net = gn.from_module(mlp, optimizer=torch.optim.Adam(mlp.parameters()))
        >>> net
        GrapNet(8-16-4, 192 relations, 0 frozen, version 0)
        >>> net.to_module()
        Sequential(
          (0): Linear(in_features=8, out_features=16, bias=True)
          (1): ReLU()
          (2): Dropout(p=0.1, inplace=False)
          (3): Linear(in_features=16, out_features=4, bias=True)
        )
    """
    net, exchanges = build_net(module, read_chain(module), "", drop_zeros)
    optimizers = as_optimizers(optimizer)
    homes = [list(net.parameters())]
    order = list(module.parameters())
    decision = Decision()
    installs = [prepare_exchange(one, exchanges, homes, order) for one in optimizers]
    if optimizers:
        installs += refuse_stale_losses(exchanges, "from_module", decision)
    installs.append(partial(_attach, optimizers, [net]))
    carry_out(installs, decision)
    return net


def graft(
    model: nn.Module,
    where: Where,
    optimizer: Optimizers = None,
    *,
    only: type[nn.Module] | None = None,
    skip: str | Collection[str] = (),
    drop_zeros: bool = False,
) -> dict[str, GrapNet]:
    """Replaces submodules of a model, in place, by nets that compute the same; returns the nets by
    name.

    The other modules, their Parameters and their state-dict keys stay. A backward from an earlier
    loss raises StaleTopologyError. `gn.ungraft` is the way back.

    Args:
        model: any model. A module that stands under several names is replaced under all of them.
        where: a pattern on names such as "layers.*.ffn" (`*` matches dots as well), a type (exactly
            this one, so that Linears which compute their weight are passed over), a predicate of
            name and module, or several of these, any of which may match. Modules without
            Parameters, such as Dropout, are passed over. Of nested matches the outermost counts.
        optimizer: as for `from_module`; the next step equals, to rounding, the one it would have
            taken.
        only: a type that a match has to be of, exactly: `graft(model, "*.attn.*", only=nn.Linear)`.
        skip: names or patterns of modules that stay, with everything inside of them. A module that
            holds one of them does not become a net either.
        drop_zeros: as for `from_module`.

    Raises:
        ConversionError: nothing matches, or a match cannot become a net; the message names it.
            Nothing was changed.
        OptimizerError: as for `from_module`. An optimizer that is not given and holds parameters
            which have left the model raises it at its next step.

    Examples:
        >>> import torch
        >>> import grapnet as gn
        >>> model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(12, 4))
        >>> nets = gn.graft(model, nn.Linear, optimizer=torch.optim.Adam(model.parameters()))
        >>> nets
        {'2': GrapNet(12-4, 48 relations, 0 frozen, version 0)}
        >>> with model[2].edit(reason="halve") as edit:
        ...     edit.cut(model[2].layers[0].outgoing().smallest(fraction=0.5))
        >>> gn.ungraft(model)
        {'2': Linear(in_features=12, out_features=4, bias=True)}
    """
    chains = {
        name: read_chain(module, name) for name, module in matches(model, where, only, skip).items()
    }
    return graft_chains(model, chains, optimizer, drop_zeros=drop_zeros)


def graft_chains(
    model: nn.Module,
    chains: Mapping[str, Chain],
    optimizer: Optimizers = None,
    *,
    drop_zeros: bool = False,
) -> dict[str, GrapNet]:
    """Replaces, in place, modules that were read as chains, by the names of their anchors; see
    `graft`.
    """
    optimizers = as_optimizers(optimizer)
    nets: dict[str, GrapNet] = {}
    exchanges: list[Exchange] = []
    installs: list[Callable[[], None]] = []
    for name, chain in chains.items():
        anchor = find(model, name)
        net, exchanged = build_net(anchor, chain, name, drop_zeros)
        installs.append(prepare_graft(model, name, chain, net))
        _require_alone(model, anchor, name, chain)
        nets[joined(name, chain.place)] = net
        exchanges += exchanged
    homes = [list(net.parameters()) for net in nets.values()]
    installs += [
        prepare_exchange(one, exchanges, homes, list(model.parameters())) for one in optimizers
    ]
    decision = Decision()
    installs += refuse_stale_losses(exchanges, "graft", decision)
    leaving = [exchange.parameter for exchange in exchanges]
    installs.append(partial(mark_replaced, leaving, "graft"))
    installs.append(partial(_attach, optimizers, list(nets.values())))
    carry_out(installs, decision)
    return nets


def _require_alone(model: nn.Module, anchor: nn.Module, name: str, chain: Chain) -> None:
    """Raises ConversionError when something else uses what the net would take over."""
    require_not_compiled(model, find(anchor, chain.place, name), joined(name, chain.place))
    linears = [find(anchor, part.path, name) for part in chain.parts]
    mine = _tensors(linears)
    for other_name, module in model.named_modules():
        if module in linears:
            continue
        for key, parameter in module._parameters.items():
            if id(parameter) in mine and parameter is not None:
                raise ConversionError(
                    f"{name!r} shares its {key} with {other_name!r}, and a net's relations are its"
                    f' own. Leave it out: skip=["{name}"]'
                )
    for path in (chain.place, *chain.emptied):
        module = find(anchor, path, name)
        if isinstance(module, nn.Module) and not _tensors(module.modules()) <= mine:
            raise ConversionError(
                f"{joined(name, path)!r} has parameters or buffers that its linear parts do not"
                " have"
            )
    there = dict(model.named_modules(remove_duplicate=False))
    present = find(anchor, chain.place)
    replaced = [other for other, module in there.items() if module is present]
    for other, module in there.items():
        if module is anchor:
            replaced += [joined(other, path) for path in chain.emptied]
    for other, module in there.items():
        if module in linears and not is_inside(other, replaced):
            path = chain.parts[linears.index(module)].path
            raise ConversionError(
                f"{joined(name, path)!r} stands in several places of the model. Leave it out:"
                f' skip=["{name}"]'
            )


def _tensors(modules: Iterable[nn.Module]) -> set[int]:
    """Returns which tensors modules hold themselves."""
    found: set[int] = set()
    for module in modules:
        found |= {id(tensor) for tensor in module.parameters(recurse=False)}
        found |= {id(tensor) for tensor in module.buffers(recurse=False)}
    return found


def _attach(optimizers: Sequence[Optimizer], nets: Sequence[GrapNet]) -> None:
    for optimizer in optimizers:
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        for net in nets:
            if any(id(parameter) in held for parameter in net.parameters()):
                attach(optimizer, net)
