"""The weights of linear modules as coordinates, and coordinates as weights again."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod

from grapnet.core._change import flatnonzero
from grapnet.core._coordinates import Coordinates
from grapnet.core._errors import ConversionError
from grapnet.core._layer import Layer
from grapnet.core._transition import (
    Transition,
    full_topology,
    require_countable,
    topology_from_pairs,
)

Carry = Callable[
    [Tensor, float], Tensor
]  # of one value a coordinate: as another Parameter has it, and a float elsewhere
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


def read_weights(module: nn.Module, where: str, *, transposed: bool) -> LinearWeights:
    """Returns the Parameters of a linear module; raises ConversionError, naming it, when they are
    no plain matrix.
    """
    names = set(module._parameters)
    pruned = {name.removesuffix("_orig") for name in names if name.endswith("_orig")}
    if not {name.removesuffix("_orig") for name in names} <= {"weight", "bias"}:
        raise ConversionError(
            f"{where!r} has parameters other than weight and bias: {', '.join(sorted(names))}"
        )
    held = {
        name: module._parameters.get(f"{name}_orig" if name in pruned else name)
        for name in ("weight", "bias")
    }
    kept = {name: module._buffers.get(f"{name}_mask") for name in pruned}
    weight, bias = held["weight"], held["bias"]
    for name, parameter in held.items():
        is_absent = name == "bias" and getattr(module, name, None) is None
        if (parameter is None and not is_absent) or (name in pruned and kept[name] is None):
            raise ConversionError(
                f"the {name} of {where!r} is computed from something else; remove that first"
            )
    others = set(module._buffers) - {f"{name}_mask" for name in pruned}
    if others:
        raise ConversionError(
            f"{where!r} has buffers, which would be lost: {', '.join(sorted(others))}"
        )
    assert weight is not None
    if is_lazy(weight):
        raise ConversionError(f"{where!r} does not know its shape yet; run the model once first")
    if (
        weight.dim() != 2
        or weight.dtype not in _FLOATS
        or weight.is_meta
        or (bias is not None and bias.dim() != 1)
    ):
        raise ConversionError(
            f"{where!r} has a weight of {weight.dtype} {list(weight.shape)} on {weight.device}"
        )
    for name, parameter in held.items():
        if parameter is not None:
            _require_plain(parameter, f"the {name} of {where!r}")
    for name, entries in kept.items():
        if not bool(((entries == 0) | (entries == 1)).all()):
            raise ConversionError(
                f"the {name} of {where!r} is pruned by factors other than 0 and 1; remove that"
                " first"
            )
    require_countable(weight.numel(), f"the net for {where!r}", ConversionError)
    return LinearWeights(weight, bias, transposed, kept.get("weight"), kept.get("bias"))


def require_no_hooks(module: nn.Module, where: str) -> None:
    """Raises ConversionError for a module with hooks, which nobody would call any more; pruning's
    own do not count.
    """
    lists = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    lists += (
        module._state_dict_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    )
    before = [
        hook
        for hook in module._forward_pre_hooks.values()
        if not isinstance(hook, BasePruningMethod)
    ]
    if before or any(lists):
        raise ConversionError(
            f"{where!r} has hooks, which would be lost; remove them, and register them on the net"
        )
    if "forward" in vars(module):
        raise ConversionError(
            f"{where!r} has a forward of its own, put in place of its class's; remove that first"
        )


def _require_plain(parameter: nn.Parameter, what: str) -> None:
    """Raises ConversionError for a Parameter that is more than its numbers."""
    if type(parameter) is not nn.Parameter:
        raise ConversionError(f"{what} is no plain nn.Parameter but {type(parameter).__name__}")
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ConversionError(
            f"{what} has hooks, which would be lost; remove them, and register them on the net's"
        )


def build_transition(weights: LinearWeights, drop_zeros: bool) -> tuple[Transition, Carry]:
    """Returns the relations of a matrix, and what carries whatever has the shape of its weight."""
    matrix, kept = weights.matrix, weights.kept  # [in, out]
    n_parents, n_children = matrix.shape
    if drop_zeros:
        parents, children = (rows.cpu() for rows in matrix.nonzero(as_tuple=True))
        topology = topology_from_pairs(parents, children, n_parents, n_children, matrix.device)
        cells = (parents * n_children + children).to(matrix.device)
    else:
        topology, cells = full_topology(n_parents, n_children, matrix.device), None
    values = matrix.reshape(-1) if cells is None else matrix.reshape(-1)[cells]
    transition = Transition(topology, values.clone())
    if cells is None and kept is not None:
        transition.hold(flatnonzero(~kept.reshape(-1)))
        cells = flatnonzero(kept.reshape(-1)).long()
    _keep_flags(transition, weights.weight)
    transposed = weights.transposed

    def carry(tensor: Tensor, rest: float = 0.0) -> Tensor:
        flat = (tensor if transposed else tensor.t()).reshape(-1)
        return (flat.clone() if cells is None else flat[cells]).view(-1, 1)

    _carry_gradient(transition.weight, weights.weight, carry)
    return transition, carry


def build_layer(weights: LinearWeights, uids: Tensor, activation: str) -> tuple[Layer, Carry]:
    """Returns the nodes that a matrix leads to, and what carries whatever has the shape of its
    bias.

    Without a bias theirs are zero and frozen, like those that were pruned away.
    """
    bias, kept = weights.bias, weights.kept_biases
    if bias is None:
        layer = Layer(uids, weights.weight.new_zeros(len(uids)).detach(), activation)
        layer.hold(torch.arange(len(uids), dtype=torch.int32, device=weights.weight.device))
        _keep_flags(layer, weights.weight)
        return layer, lambda tensor, rest=0.0: tensor.new_full((0,), rest)  # no bias is trainable
    layer = Layer(uids, (bias if kept is None else bias * kept).detach().clone(), activation)
    cells = None if kept is None else flatnonzero(kept != 0).long()
    if kept is not None:
        layer.hold(flatnonzero(kept == 0))
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


def cells_of(transition: Transition) -> Tensor:
    """Returns where in a matrix [in, out] every relation stands, [n_relations] int64."""
    return transition.topology.parents().long() * transition.n_children + transition.child


def _keep_flags(store: Coordinates, parameter: nn.Parameter) -> None:
    store.parameter.requires_grad_(parameter.requires_grad)


def _carry_gradient(parameter: nn.Parameter, old: nn.Parameter, carry: Carry) -> None:
    if old.grad is not None:
        parameter.grad = carry(old.grad, 0.0)
