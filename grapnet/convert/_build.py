"""A net out of a chain, and the weights of the chain's modules out of a net."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from grapnet._network import GrapNet
from grapnet.core._coordinates import Coordinates
from grapnet.core._errors import ConversionError
from grapnet.core._index_map import flatnonzero
from grapnet.core._layer import Layer
from grapnet.core._transition import (
    Transition,
    full_topology,
    require_countable,
    topology_from_pairs,
)
from grapnet.execution._modules import has_no_bias

from ._chain import Chain
from ._exchange import Arrival, Carry, Exchange
from ._origin import find, joined, require_no_hooks

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """What a linear module holds: the Parameters that are trained, and which of their entries are
    pruned away.
    """

    weight: nn.Parameter  # [out, in], or [in, out] when transposed
    bias: nn.Parameter | None
    transposed: bool
    kept_weights: Tensor | None = None  # what torch.nn.utils.prune has left, None for everything
    kept_biases: Tensor | None = None

    @property
    def names(self) -> tuple[str, str]:
        """What the module calls the two Parameters."""
        pruned = self.kept_weights is not None, self.kept_biases is not None
        return "weight_orig" if pruned[0] else "weight", "bias_orig" if pruned[1] else "bias"

    @property
    def matrix(self) -> Tensor:
        """The weights as [in, out], pruned ones zero."""
        return self._in_first(
            self.weight if self.kept_weights is None else self.weight * self.kept_weights
        )

    @property
    def kept(self) -> Tensor | None:
        """Which entries of the matrix are left, None for all of them."""
        return None if self.kept_weights is None else self._in_first(self.kept_weights != 0)

    def _in_first(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if self.transposed else tensor.detach().t()


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
    layers = [Layer(uids[0], None, "identity")]
    transitions = []
    exchanges = []
    layers[0].dropout = chain.dropout
    for t, (part, one) in enumerate(zip(chain.parts, weights, strict=True)):
        transition, carry = build_transition(one, drop_zeros)
        # The layers before are built, so its number is their count.
        number = len(layers)
        layer, carry_bias = build_layer(one, uids[number], part.activation)
        layer.dropout = part.dropout
        weight_place = joined(chain.place, f"transitions.{t}.weight")
        bias_place = joined(chain.place, f"layers.{number}.bias")
        relations = Arrival(transition.weight, weight_place, carry)
        biases = Arrival(layer.parameter, bias_place, carry_bias)
        weight_name, bias_name = (joined(part.path, kind) for kind in one.names)
        if one.bias is None:
            exchanges.append(Exchange(one.weight, weight_name, (relations, biases)))
        else:
            exchanges.append(Exchange(one.weight, weight_name, (relations,)))
            exchanges.append(Exchange(one.bias, bias_name, (biases,)))
        layers.append(layer)
        transitions.append(transition)
    net = GrapNet._from_parts(layers, transitions)
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
        linears: modules with `weight` and `bias`, one a transition, not used elsewhere; one with
            a bias keeps it.
        chain: where they stand, and which of them are transposed.
        most_cells: as for `net.to_module()`.
    """
    matrices = [
        module for module in net.to_module(most_cells=most_cells) if isinstance(module, nn.Linear)
    ]
    exchanges = []
    for t, (linear, matrix, part) in enumerate(zip(linears, matrices, chain.parts, strict=True)):
        transition = net.transitions[t]
        layer = net.layers[transition.target]
        if part.transposed:
            content = matrix.weight.detach().t().contiguous()
        else:
            content = matrix.weight.detach()
        weight = nn.Parameter(content, requires_grad=transition.weight.requires_grad)
        bias = None
        if linear.bias is not None or (layer.size > 0 and not has_no_bias(layer)):
            bias = nn.Parameter(
                layer.values().detach().clone(), requires_grad=layer.parameter.requires_grad
            )
        linear.register_parameter("weight", weight)
        linear.register_parameter("bias", bias)
        _set_sizes(linear, matrix.in_features, matrix.out_features)
        weight_place = joined(chain.place, f"transitions.{t}.weight")
        bias_place = joined(chain.place, f"layers.{transition.target}.bias")
        shape = (len(transition.ptr) - 1, transition.n_children)
        # where in a matrix [in, out] every relation stands, [n_relations] int64
        cells = transition.topology.parents().long() * transition.n_children + transition.child
        carry = carry_back(transition, shape, cells, part.transposed)
        arrival = Arrival(weight, joined(part.path, "weight"), carry)
        exchanges.append(Exchange(transition.weight, weight_place, (arrival,)))
        biases = []
        if bias is not None:
            rows = torch.arange(layer.size, device=layer.frozen_at.device)
            carry = carry_back(layer, (layer.size,), rows, False)
            biases.append(Arrival(bias, joined(part.path, "bias"), carry))
        exchanges.append(Exchange(layer.parameter, bias_place, tuple(biases)))
    for exchange in exchanges:
        gradient = exchange.parameter.grad
        for arrival in exchange.arrivals:
            if gradient is not None:
                arrival.parameter.grad = arrival.carry(gradient, 0.0)
    return exchanges


def _require_fit(weights: Sequence[LinearWeights], called: Sequence[str]) -> None:
    """Raises ConversionError when matrices do not follow each other, or are of different kinds."""
    kinds = {(one.weight.dtype, one.weight.device) for one in weights}
    kinds |= {(one.bias.dtype, one.bias.device) for one in weights if one.bias is not None}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ConversionError(
            f"the parameters of {', '.join(map(repr, called))} are of several kinds: {found}"
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


def read_weights(module: nn.Module, where: str, *, transposed: bool) -> LinearWeights:
    """Returns the Parameters of a linear module; raises ConversionError, naming it, when they are
    no plain matrix.
    """
    held = {}
    kept = {}
    for name in ("weight", "bias"):
        kept[name] = module._buffers.get(f"{name}_mask")
        held[name] = module._parameters.get(name if kept[name] is None else f"{name}_orig")
        if held[name] is None and getattr(module, name, None) is not None:
            raise ConversionError(f"the {name} of {where!r} is computed from something else")
    known = {"weight", "weight_orig", "weight_mask", "bias", "bias_orig", "bias_mask"}
    others = {*module._parameters, *module._buffers} - known
    weight = held["weight"]
    if others or weight is None:
        raise ConversionError(
            f"{where!r} has other parameters or buffers than weight and bias: {sorted(others)}"
        )
    if is_lazy(weight):
        raise ConversionError(f"{where!r} does not know its shape yet; run the model once first")
    if weight.dim() != 2 or weight.dtype not in _FLOATS or weight.is_meta:
        raise ConversionError(
            f"{where!r} has a weight of {weight.dtype} {list(weight.shape)} on {weight.device}"
        )
    for name, parameter in held.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            kind = type(parameter).__name__
            raise ConversionError(f"the {name} of {where!r} is no plain nn.Parameter but {kind}")
        mask = kept[name]
        if mask is not None and not bool(((mask == 0) | (mask == 1)).all()):
            raise ConversionError(
                f"the {name} of {where!r} is pruned by factors other than 0 and 1"
            )
    require_countable(weight.numel(), f"the net for {where!r}", ConversionError)
    return LinearWeights(weight, held["bias"], transposed, kept["weight"], kept["bias"])


def build_transition(weights: LinearWeights, drop_zeros: bool) -> tuple[Transition, Carry]:
    """Returns the relations of a matrix, and what carries whatever has the shape of its weight."""
    # Both are [in, out].
    matrix = weights.matrix
    kept = weights.kept
    n_parents, n_children = matrix.shape
    if drop_zeros:
        parents, children = (rows.cpu() for rows in matrix.nonzero(as_tuple=True))
        topology = topology_from_pairs(parents, children, n_parents, n_children, matrix.device)
        cells = (parents * n_children + children).to(matrix.device)
    else:
        topology = full_topology(n_parents, n_children, matrix.device)
        cells = None
    values = matrix.reshape(-1)
    if cells is not None:
        values = values[cells]
    transition = Transition(topology, values.clone())
    if cells is None and kept is not None:
        transition._hold(flatnonzero(~kept.reshape(-1)))
        cells = flatnonzero(kept.reshape(-1)).long()
    _keep_flags(transition, weights.weight)
    transposed = weights.transposed

    def carry(tensor: Tensor, rest: float = 0.0) -> Tensor:
        if not transposed:
            tensor = tensor.t()
        flat = tensor.reshape(-1)
        if cells is None:
            return flat.clone().view(-1, 1)
        return flat[cells].view(-1, 1)

    _carry_gradient(transition.weight, weights.weight, carry)
    return transition, carry


def build_layer(weights: LinearWeights, uids: Tensor, activation: str) -> tuple[Layer, Carry]:
    """Returns the nodes that a matrix leads to, and what carries whatever has the shape of its
    bias.

    Without a bias theirs are zero and frozen, like those that were pruned away.
    """
    bias = weights.bias
    kept = weights.kept_biases
    if bias is None:
        layer = Layer(uids, weights.weight.new_zeros(len(uids)).detach(), activation)
        layer._hold(torch.arange(len(uids), dtype=torch.int32, device=weights.weight.device))
        _keep_flags(layer, weights.weight)
        return layer, lambda tensor, rest=0.0: tensor.new_full((0,), rest)  # no bias is trainable
    layer = Layer(uids, (bias if kept is None else bias * kept).detach().clone(), activation)
    cells = None if kept is None else flatnonzero(kept != 0).long()
    if kept is not None:
        layer._hold(flatnonzero(kept == 0))
    _keep_flags(layer, bias)

    def carry(tensor: Tensor, rest: float = 0.0) -> Tensor:
        return tensor.clone() if cells is None else tensor[cells]

    _carry_gradient(layer.parameter, bias, carry)
    return layer, carry


def carry_back(
    store: Coordinates, shape: tuple[int, ...], cells: Tensor, transposed: bool
) -> Carry:
    """Returns what carries a value a trainable coordinate into a tensor of a module; `rest` stands
    everywhere else.

    Args:
        store: the transition or the layer.
        shape: [in, out] of a matrix, [out] of a bias.
        cells: where in that shape every coordinate stands, frozen ones included.
        transposed: whether the module keeps a matrix as [in, out].
    """
    free = torch.ones(store.size, dtype=torch.bool, device=cells.device)
    free[store.frozen_at.long()] = False
    places = cells[free]

    def carry(tensor: Tensor, rest: float) -> Tensor:
        whole = tensor.new_full(shape, rest)
        whole.view(-1)[places] = tensor.reshape(-1)
        return whole if len(shape) == 1 or transposed else whole.t().contiguous()

    return carry


def _keep_flags(store: Coordinates, parameter: nn.Parameter) -> None:
    store.parameter.requires_grad_(parameter.requires_grad)


def _carry_gradient(parameter: nn.Parameter, old: nn.Parameter, carry: Carry) -> None:
    if old.grad is not None:
        parameter.grad = carry(old.grad, 0.0)
