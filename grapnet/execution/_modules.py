"""A graph as plain torch modules: one nn.Linear per transition, and the activations of the next
layer.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grapnet.core._activation import activation_function, adjusted_name, is_activation, setting_of
from grapnet.core._errors import EditError, PlanError
from grapnet.core._graph import Graph
from grapnet.core._layer import Layer
from grapnet.core._transition import Transition

from ._manager import Execution

MOST_CELLS = 2**28  # of one matrix: 1 GiB in float32
PIECE = 1 << 18  # relations written at once; larger pieces leave the cache

MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "softplus": nn.Softplus,
    "identity": nn.Identity,
}

# kind of a name with a number -> its module, and what it sets
_ADJUSTED: dict[str, tuple[type[nn.Module], str]] = {
    "leaky_relu": (nn.LeakyReLU, "negative_slope"),
    "elu": (nn.ELU, "alpha"),
    "softplus": (nn.Softplus, "beta"),
}


class Net(Protocol):
    """The parts of a GrapNet that a snapshot reads: its graph and its backends."""

    execution: Execution


class NamedActivation(nn.Module):
    """Runs a registered activation without a torch module; a file holds its name, not the
    function.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._function = activation_function(name)

    def forward(self, z: Tensor) -> Tensor:
        """Applies the function to every element."""
        return self._function(z)

    def extra_repr(self) -> str:
        return self.name

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._function = activation_function(self.name)


class MixedActivation(nn.Module):
    """Runs a layer with different activations: one call per kind, then the rows in order."""

    order: Tensor

    def __init__(self, kinds: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(_function_module(name) for name, _ in kinds)
        for number, (_, rows) in enumerate(kinds):
            self.register_buffer(f"rows_{number}", rows)
        self.register_buffer("order", torch.cat([rows for _, rows in kinds]).argsort())

    def forward(self, z: Tensor) -> Tensor:
        """Applies to every column of z [..., n] the activation of its node."""
        parts = [
            kind(z.index_select(-1, self.get_buffer(f"rows_{n}")))
            for n, kind in enumerate(self.kinds)
        ]
        return torch.cat(parts, dim=-1).index_select(-1, self.order)


@torch.inference_mode(False)
@torch.no_grad()
def build(net: Net, most_cells: int, *, trainable: bool) -> list[nn.Module]:
    """Returns the modules of the net in order; raises PlanError, before making any, when one would
    be too large.
    """
    graph = net.execution._graph
    refuse(net, most_cells)
    modules: list[nn.Module] = _dropouts(graph.layers[0]) if trainable else []
    for transition, layer in zip(graph.transitions, computed_layers(graph), strict=True):
        activation = activation_module(layer)
        modules += [_linear(transition, layer, trainable)] + (
            [] if activation is None else [activation]
        )
        modules += _dropouts(layer) if trainable else []
    return modules


def _linear(transition: Transition, layer: Layer, trainable: bool) -> nn.Linear:
    linear = nn.Linear(1, 1, device="meta")  # draws no random numbers, and warns of no empty matrix
    linear.in_features = len(transition.ptr) - 1
    linear.out_features = transition.n_children
    for name, shape in (
        ("weight", (linear.out_features, linear.in_features)),
        ("bias", (linear.out_features,)),
    ):
        zeros = torch.zeros(shape, dtype=transition.weight.dtype, device=transition.weight.device)
        setattr(linear, name, nn.Parameter(zeros, requires_grad=trainable))
    write(linear, transition, layer)
    if trainable and has_no_bias(layer):
        linear.bias = None  # pyright: ignore[reportAttributeAccessIssue]
    return linear


def has_no_bias(layer: Layer) -> bool:
    """Returns whether every bias is zero and frozen, which represents an `nn.Linear` without
    bias.
    """
    return len(layer.frozen_at) == layer.size > 0 and not bool(layer.frozen_values.any())


def _dropouts(layer: Layer) -> list[nn.Module]:
    return [nn.Dropout(layer.dropout)] if layer.dropout else []


def refuse(net: Net, most_cells: int) -> None:
    """Raises if matrices cannot or should not represent the net."""
    graph = net.execution._graph
    require_in_effect(graph)
    if not graph.is_chain:
        skips = [ends for ends in graph.ends if ends[1] != ends[0] + 1]
        raise PlanError(
            f"this net has transitions that skip layers, {skips}, and a stack of modules stands"
            " only for a net in which every layer leads to the next. Export the net itself:"
            " torch.export.export(net, (x,)), torch.onnx.export(net, (x,), dynamo=True)"
        )
    net.execution.require_sum("a snapshot or module")
    for t, transition in enumerate(graph.transitions):
        cells = (len(transition.ptr) - 1) * transition.n_children
        if cells > most_cells:
            size = cells * transition.weight.element_size() / 2**30
            raise PlanError(
                f"the matrix of transition {t} would hold {cells:,} cells (limit {most_cells:,})"
                f" for {transition.size:,} relations. Run the net itself, or, with {size:,.1f} GiB"
                f" of memory, pass most_cells={cells}"
            )


def require_in_effect(graph: Graph) -> None:
    """Raises while a trial waits for its commit, as a forward pass of the net does."""
    if graph._open_trial:
        raise EditError(
            "the operations of this trial are not applied yet; call edit.commit() before a snapshot"
        )


def computed_layers(graph: Graph) -> list[Layer]:
    """Returns the layer that each transition leads to."""
    return [graph.layers[transition.target] for transition in graph.transitions]


def _cells(transition: Transition) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields (children, parents, values) of the relations, in pieces."""
    topology = transition.topology
    values = transition.values()
    for start in range(0, topology.n_relations, PIECE):
        stop = min(start + PIECE, topology.n_relations)
        yield topology.child[start:stop], topology.parents(start, stop), values[start:stop]


def write(linear: nn.Linear, transition: Transition, layer: Layer) -> None:
    """Writes the coordinates into a matrix with zeros for absent relations."""
    for children, parents, values in _cells(transition):
        linear.weight[children, parents] = values
    linear.bias.copy_(layer.values())


def is_written(linear: nn.Module | None, transition: Transition, layer: Layer) -> bool:
    """Returns whether a module is the matrix of this transition, with zeros for absent
    relations.
    """
    shape = (transition.n_children, len(transition.ptr) - 1)
    if (
        not isinstance(linear, nn.Linear)
        or linear.weight.shape != shape
        or linear.weight.dtype != transition.weight.dtype
    ):
        return False
    weight = linear.weight
    nonzero = 0
    for children, parents, values in _cells(transition):
        children, parents, values = (part.to(weight.device) for part in (children, parents, values))
        if not torch.equal(weight[children, parents], values):
            return False
        nonzero += int(values.count_nonzero())
    return int(weight.count_nonzero()) == nonzero and torch.equal(
        linear.bias, layer.values().to(weight)
    )


def activation_module(layer: Layer) -> nn.Module | None:
    """Returns the module that applies a layer's activations, None where there is nothing to
    apply.
    """
    kinds = [
        (str(name), rows.long().to(layer.frozen_at.device))
        for name, rows in layer._activation_names.kinds()
    ]
    if not kinds or [name for name, _ in kinds] == ["identity"]:
        return None
    return _function_module(kinds[0][0]) if len(kinds) == 1 else MixedActivation(kinds)


def _function_module(name: str) -> nn.Module:
    setting = setting_of(name)
    if setting is not None:
        kind, attribute = _ADJUSTED[setting[0]]
        return kind(**{attribute: setting[1]})
    return MODULES[name]() if name in MODULES else NamedActivation(name)


def activation_name(module: nn.Module) -> str | None:
    """Returns the activation that a module computes, None when nodes cannot have it."""
    if isinstance(module, NamedActivation):
        return module.name
    for kind, (cls, attribute) in _ADJUSTED.items():
        if type(module) is cls and _settings(module) != _settings(MODULES[kind]()):
            name = adjusted_name(kind, getattr(module, attribute))
            if is_activation(name) and _settings(module) == _settings(_function_module(name)):
                return name
            return None
    for name, make in MODULES.items():
        if _settings(make()) == _settings(module):
            return name
    return None


def _settings(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
    """Returns the class and settings of an activation, without `inplace`."""
    return type(module), {
        k: v for k, v in vars(module).items() if k[0] != "_" and k not in ("training", "inplace")
    }


def same_activation(one: nn.Module | None, other: nn.Module) -> bool:
    """Returns whether two activation modules are equal."""
    if one is None or repr(one) != repr(other):
        return False
    return all(
        torch.equal(a, b.to(a.device)) for a, b in zip(one.buffers(), other.buffers(), strict=True)
    )
