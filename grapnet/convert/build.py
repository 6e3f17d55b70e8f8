"""A net out of a chain, and the weights of the chain's modules out of a net."""

from collections.abc import Sequence

import torch
from torch import nn

from grapnet.core._errors import ConversionError
from grapnet.core._layer import Layer
from grapnet.core._transition import Transition
from grapnet.execution.modules import has_no_bias
from grapnet.network import GrapNet

from .chain import Chain
from .exchange import Arrival, Exchange
from .linear import (
    Carry,
    LinearWeights,
    build_layer,
    build_transition,
    carry_back,
    cells_of,
    read_weights,
    require_no_hooks,
)
from .origin import find, joined


@torch.inference_mode(False)
@torch.no_grad()
def build_net(
    anchor: nn.Module, chain: Chain, name: str, drop_zeros: bool
) -> tuple[GrapNet, list[Exchange]]:
    """Returns a net that computes what a chain computes, and what an optimizer has to exchange for
    its Parameters.

    Args:
        anchor: the module that the chain's paths start at.
        chain: how it computes.
        name: of the anchor, for errors.
        drop_zeros: leave weights that are zero out of the graph.
    """
    linears = [find(anchor, part.path, name) for part in chain.parts]
    called = [
        joined(name, part.path) or type(linear).__name__
        for part, linear in zip(chain.parts, linears, strict=True)
    ]
    weights = [
        read_weights(linear, where, transposed=part.transposed)
        for linear, where, part in zip(linears, called, chain.parts, strict=True)
    ]
    _require_fit(weights, called)
    for path in {chain.place, *chain.emptied}:
        replaced = find(anchor, path, name)
        for inner, module in replaced.named_modules() if isinstance(replaced, nn.Module) else ():
            require_no_hooks(module, joined(name, path, inner) or type(module).__name__)
    sizes = [weights[0].matrix.shape[0], *(one.matrix.shape[1] for one in weights)]
    uids = torch.arange(sum(sizes), device="cpu").split(sizes)
    layers, transitions, exchanges = [Layer(uids[0], None, "identity")], [], []
    layers[0].dropout = chain.dropout
    for t, (part, one) in enumerate(zip(chain.parts, weights, strict=True)):
        transition, carry = build_transition(one, drop_zeros)
        layer, carry_bias = build_layer(one, uids[t + 1], part.activation)
        layer.dropout = part.dropout
        names = (
            joined(chain.place, f"transitions.{t}.weight"),
            joined(chain.place, f"layers.{t + 1}.bias"),
        )
        relations = Arrival(transition.weight, names[0], carry)
        biases = Arrival(layer.parameter, names[1], carry_bias)
        weight_name, bias_name = (joined(part.path, kind) for kind in one.names)
        if one.bias is None:
            exchanges.append(Exchange(one.weight, weight_name, (relations, biases)))
        else:
            exchanges.append(Exchange(one.weight, weight_name, (relations,)))
            exchanges.append(Exchange(one.bias, bias_name, (biases,)))
        layers.append(layer)
        transitions.append(transition)
    net = GrapNet.from_parts(layers, transitions)
    net.train(linears[0].training)
    for layer, path in zip(
        layers, [chain.dropout_path, *(part.dropout_path for part in chain.parts)], strict=True
    ):
        if path is not None:  # a Dropout may be in another mode than what is around it
            layer.train(find(anchor, path, name).training)
    return net, exchanges


@torch.inference_mode(False)
@torch.no_grad()
def fill_linears(
    net: GrapNet, linears: Sequence[nn.Module], chain: Chain, most_cells: int
) -> list[Exchange]:
    """Gives the present coordinates of a net to linear modules, and returns the exchange for an
    optimizer.

    Args:
        net: the net.
        linears: modules with `weight` and `bias`, one a transition, which nobody uses yet; one with
            a bias keeps it.
        chain: where they stand, and which of them are transposed.
        most_cells: as for `net.to_module()`.
    """
    matrices = [
        module for module in net.to_module(most_cells=most_cells) if isinstance(module, nn.Linear)
    ]
    exchanges = []
    for t, (linear, matrix, part) in enumerate(zip(linears, matrices, chain.parts, strict=True)):
        transition, layer = net.transitions[t], net.layers[t + 1]
        content = (
            matrix.weight.detach().t().contiguous() if part.transposed else matrix.weight.detach()
        )
        weight = nn.Parameter(content, requires_grad=transition.weight.requires_grad)
        bias = None
        if linear.bias is not None or (layer.size > 0 and not has_no_bias(layer)):
            bias = nn.Parameter(
                layer.values().detach().clone(), requires_grad=layer.parameter.requires_grad
            )
        linear.register_parameter("weight", weight)
        linear.register_parameter("bias", bias)
        _set_sizes(linear, matrix.in_features, matrix.out_features)
        names = (
            joined(chain.place, f"transitions.{t}.weight"),
            joined(chain.place, f"layers.{t + 1}.bias"),
        )
        arrival = Arrival(
            weight, joined(part.path, "weight"), _carry_back_matrix(transition, part.transposed)
        )
        exchanges.append(Exchange(transition.weight, names[0], (arrival,)))
        biases = (
            []
            if bias is None
            else [Arrival(bias, joined(part.path, "bias"), _carry_back_biases(layer))]
        )
        exchanges.append(Exchange(layer.parameter, names[1], tuple(biases)))
    _carry_gradients(exchanges)
    return exchanges


def _carry_back_matrix(transition: Transition, transposed: bool) -> Carry:
    shape = (len(transition.ptr) - 1, transition.n_children)
    return carry_back(transition, shape, cells_of(transition), transposed)


def _carry_back_biases(layer: Layer) -> Carry:
    return carry_back(
        layer, (layer.size,), torch.arange(layer.size, device=layer.frozen_at.device), False
    )


def _carry_gradients(exchanges: Sequence[Exchange]) -> None:
    for exchange in exchanges:
        for arrival in exchange.arrivals:
            if exchange.parameter.grad is not None:
                arrival.parameter.grad = arrival.carry(exchange.parameter.grad, 0.0)


def _require_fit(weights: Sequence[LinearWeights], called: Sequence[str]) -> None:
    """Raises ConversionError when matrices do not follow each other, or are of different kinds."""
    kinds = {(one.weight.dtype, one.weight.device) for one in weights}
    kinds |= {(one.bias.dtype, one.bias.device) for one in weights if one.bias is not None}
    if len(kinds) > 1:
        told = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ConversionError(
            f"the parameters of {', '.join(map(repr, called))} are of several kinds: {told}"
        )
    for above, below, where in zip(weights, weights[1:], called[1:], strict=False):
        if above.matrix.shape[1] != below.matrix.shape[0]:
            raise ConversionError(
                f"{where!r} takes {below.matrix.shape[0]} inputs, and {above.matrix.shape[1]} come"
                " out before it"
            )
    parameters = [one.weight for one in weights] + [
        one.bias for one in weights if one.bias is not None
    ]
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise ConversionError(
            f"{', '.join(map(repr, called))} share a parameter, and relations of a net are not"
            " shared"
        )


def _set_sizes(linear: nn.Module, n_in: int, n_out: int) -> None:
    for names, size in ((("in_features", "nx"), n_in), (("out_features", "nf"), n_out)):
        for name in names:
            if name in vars(linear):
                setattr(linear, name, size)
