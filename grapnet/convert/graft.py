"""gn.from_module and gn.graft: plain modules become nets, in the middle of training."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from grapnet.core._commit import carry_out
from grapnet.core._coordinates import Decision
from grapnet.core._errors import ConversionError
from grapnet.following.optimizers import attach, mark_replaced, parameters_of
from grapnet.network import GrapNet

from .build import build_net
from .chain import Chain, read_chain
from .exchange import Optimizers, as_optimizers, prepare_exchange, prepare_farewell
from .matching import Where, matches
from .origin import find, joined, owners_of, prepare_graft, require_not_compiled


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
        TypeError: it is no module, such as a state dict, which does not say which activations there
            are.

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
    _require_module(module)
    net, exchanges = build_net(module, read_chain(module), "", drop_zeros)
    optimizers = as_optimizers(optimizer)
    homes, order = [list(net.parameters())], list(module.parameters())
    decision = Decision()
    installs = [prepare_exchange(one, exchanges, homes, order) for one in optimizers]
    if optimizers:
        installs += prepare_farewell(exchanges, "from_module", decision)
    installs.append(partial(_attach, optimizers, [net]))
    carry_out(installs, decision)
    return net


def graft(
    model: nn.Module, where: Where, optimizer: Optimizers = None, *, drop_zeros: bool = False
) -> dict[str, GrapNet]:
    """Replaces submodules of a model, in place, by nets that compute the same; returns the nets by
    name.

    The other modules, their Parameters and their state-dict keys stay. A backward from a loss of
    before raises StaleTopologyError. `gn.ungraft` is the way back.

    Args:
        model: any model. A module that stands under several names is replaced under all of them.
        where: a pattern on names such as "layers.*.ffn" (`*` matches dots as well), a type (exactly
            this one, so that Linears which compute their weight are passed over), a predicate of
            name and module, or several of these. Of nested matches the outermost counts.
        optimizer: as for `from_module`; the next step equals, to rounding, the one it would have
            taken.
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
    chains = {name: read_chain(module, name) for name, module in matches(model, where).items()}
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
    optimizers, nets, exchanges, installs = as_optimizers(optimizer), {}, [], []
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
    installs += prepare_farewell(exchanges, "graft", decision)
    leaving = [exchange.parameter for exchange in exchanges]
    installs.append(partial(mark_replaced, leaving, "graft"))
    installs.append(partial(_attach, optimizers, list(nets.values())))
    carry_out(installs, decision)
    return nets


def _require_alone(model: nn.Module, anchor: nn.Module, name: str, chain: Chain) -> None:
    """Raises ConversionError when something else uses what the net would take over."""
    require_not_compiled(model, find(anchor, chain.place, name), joined(name, chain.place))
    linears = [find(anchor, part.path, name) for part in chain.parts]
    mine = [parameter for linear in linears for parameter in linear.parameters(recurse=False)]
    for other_name, module in model.named_modules():
        shared = [key for key, p in module._parameters.items() if any(p is one for one in mine)]
        if shared and not any(module is linear for linear in linears):
            raise ConversionError(
                f"{name!r} shares its {shared[0]} with {other_name!r}, and a net's relations are"
                " its own; leave it out"
            )
    mine += [buffer for linear in linears for buffer in linear.buffers(recurse=False)]
    for path in (chain.place, *chain.emptied):
        module = find(anchor, path, name)
        own = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
        if any(not any(tensor is one for one in mine) for tensor in own):
            raise ConversionError(
                f"{joined(name, path)!r} has parameters or buffers that its linear parts do not"
                " have"
            )
    left = _left(model, anchor, chain)
    for part, linear in zip(chain.parts, linears, strict=True):
        if any(linear is module for module in left):
            raise ConversionError(
                f"{joined(name, part.path)!r} stands in several places of the model; leave it out"
            )


def _left(model: nn.Module, anchor: nn.Module, chain: Chain) -> list[nn.Module]:
    """Returns the modules that can still be reached once the net of a chain has taken its place."""
    taken = {(id(owner), step) for owner, step in owners_of(model, find(anchor, chain.place))}
    for path in chain.emptied:
        before, _, step = path.rpartition(".")
        taken.add((id(find(anchor, before)), step))
    found, waiting = {id(model): model}, [model]
    while waiting:
        owner = waiting.pop()
        for step, child in owner._modules.items():
            if child is not None and id(child) not in found and (id(owner), step) not in taken:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def _require_module(module: object) -> None:
    """Raises TypeError for what is no module."""
    if isinstance(module, Mapping):
        raise TypeError(
            "a state dict has weights and no activations. Build the module they belong to, load it,"
            " and give that: gn.from_module(module); or tell the shell the activations: grapnet"
            " convert FILE --activation relu"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"gn.from_module takes a module, got {type(module).__name__}")


def _attach(optimizers: Sequence[Optimizer], nets: Sequence[GrapNet]) -> None:
    for optimizer in optimizers:
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        for net in nets:
            if any(id(parameter) in held for parameter in net.parameters()):
                attach(optimizer, net)
