"""What a feed-forward module computes, found out by running its forward with small stand-ins for its Linears.

A probe runs on the CPU in double precision, with none of the module's weights; neither the module nor the random
numbers of the program change.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.convert import read_chain

_ACTIVATIONS = (
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "relu",
    "silu",
    "relu6",
    "mish",
    "hardswish",
    "tanh",
    "sigmoid",
    "leaky_relu",
    "elu",
    "selu",
    "softplus",
    "identity",
)
_CLOSE = 1e-11  # in double precision: the same formula with its constants written down to ten digits still agrees
_POSITIONS = 64  # of the input, so that forwards that take it in chunks find whole ones
_FEATURES = 3  # of the input on which activations are told apart
_UNITS = 8  # hidden ones, in a probe


@dataclass(frozen=True)
class Reading:
    """A forward that is `second(activation(first(x)))`; the Dropouts are names of children."""

    activation: str
    between: str | None  # the Dropout after the activation
    after: str | None  # the Dropout after the second Linear


def read_forward(module: nn.Module, first: str, second: str | None, dropouts: Sequence[str]) -> Reading | None:
    """Returns how a module computes, when a net can do just that; None for anything else.

    Dropout that is not a child of the module shows here, because the forward runs as in training.

    Args:
        module: the module.
        first: the child that takes the input.
        second: the child that gives the output; None where the activation does.
        dropouts: those of its children that are Dropouts.
    """
    if "forward" in vars(module) or _holds_more(module, (first, second)):
        return None  # nobody would call or train that any more
    x = _grid()
    names = [name for child in module.children() for name in _named(child)]
    for between, after in _roles(dropouts):
        stand_ins = {first: _Affine(1, 0.5), between: _Affine(3, 0), second: _Affine(1, 7), after: _Affine(5, 0)}
        try:
            found = _run(module, {name: one for name, one in stand_ins.items() if name is not None}, x, training=True)
        except Exception:  # whatever a foreign forward does with an input that it did not expect
            return None
        if not isinstance(found, Tensor) or found.shape != x.shape:
            return None
        activated = (found / (5 if after else 1) - (7 if second else 0)) / (3 if between else 1)
        activation = _same_as(activated, x + 0.5, names)
        if activation is not None:
            return Reading(activation, between, after)
    return None


def activation_of(function: Any) -> str | None:
    """Returns the activation of nodes that equals a function or a module, None when there is none."""
    z, names = _grid(), []
    if isinstance(function, nn.Module):
        if _holds_more(function, ()):
            return None
        names, function = _named(function), copy.deepcopy(function).train()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = function(z.clone())
    except Exception:  # whatever a foreign function does
        return None
    return _same_as(found, z, names) if isinstance(found, Tensor) and found.shape == z.shape else None


def why_units_are_bound(module: nn.Module, into: Mapping[str, int], out: str, width: int) -> str | None:
    """Says why hidden units cannot be taken out of a module one by one; None when they can.

    Args:
        module: the module; its forward is the one that nets in place of its Linears would be called by.
        into: the children that compute the hidden units, and how many rows of each belong to one unit.
        out: the child that reads them.
        width: of the module's input and output.
    """
    generator = torch.Generator().manual_seed(0)
    x, reads = _normal(generator, 1, _POSITIONS, width), _normal(generator, width, _UNITS)
    makes = {name: _normal(generator, copies, _UNITS, width) for name, copies in into.items()}
    every = torch.arange(_UNITS, device="cpu")
    some, others = every[[0, 2, 3, 6]], every[[1, 4, 5, 7]]

    def without(made: Tensor, read: Tensor) -> Any:
        makers: dict[str, nn.Module] = {name: _Matrix(rows[:, made].flatten(0, 1)) for name, rows in makes.items()}
        reader = _Matrix(reads[:, read], None if len(made) == len(read) else read)
        return _run(module, {**makers, out: reader}, x, training=False)

    try:
        removed, unread, unlike = without(some, some), without(every, some), without(every, others)
    except Exception as error:  # whatever a foreign forward does
        return f"its forward does not run with nets in place of its Linears ({type(error).__name__}: {error})"
    if not isinstance(removed, Tensor) or not isinstance(unread, Tensor):
        return f"its forward returns a {type(removed).__name__}"
    if removed.shape != unread.shape or not torch.allclose(removed, unread, rtol=1e-9, atol=1e-9):
        return "its hidden units depend on each other between its Linears"
    return f"its output does not come from {out!r}" if torch.allclose(unread, unlike) else None


def computes_linear(module: nn.Linear) -> bool:
    """Says whether the forward of a class made from `nn.Linear` still multiplies by the weight and adds the bias."""
    generator = torch.Generator().manual_seed(0)
    x, weight = _normal(generator, 1, _POSITIONS, 4), _normal(generator, 3, 4)
    bias = None if module.bias is None else _normal(generator, 3)
    try:
        found = _run(module, {}, x, training=True, parameters={"weight": weight, "bias": bias})
    except Exception:  # whatever a foreign forward does
        return False
    expected = nn.functional.linear(x, weight, bias)
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected)


class _Affine(nn.Module):
    """Stands in for a Linear or a Dropout, element by element."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift
        self.weight = torch.empty(0, dtype=torch.float64, device="cpu")  # forwards ask for its dtype

    def forward(self, z: Tensor) -> Tensor:
        if z.shape[-1] != _FEATURES:
            raise ValueError("a net reads the last dimension, and this is another one")
        return self.scale * z + self.shift


class _Matrix(nn.Module):
    """Stands in for a net in place of a Linear, and like a net has no `weight`; it may read some columns only."""

    def __init__(self, matrix: Tensor, columns: Tensor | None = None) -> None:
        super().__init__()
        self.matrix, self.columns = matrix, columns

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.columns is None else x[..., self.columns]) @ self.matrix.t()


def _run(
    module: nn.Module,
    stand_ins: Mapping[str, nn.Module],
    x: Tensor,
    *,
    training: bool,
    parameters: Mapping[str, Tensor | None] | None = None,
) -> Any:
    """Returns the forward of a module whose children, and parameters if given, are stand-ins or copies of its own."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    children = {
        name: stand_ins[name] if name in stand_ins else _copied(c, training) for name, c in module._modules.items()
    }
    vars(twin).update(_modules=children, training=training)
    for kind in ("_parameters", "_buffers"):
        own = vars(module)[kind].items()
        vars(twin)[kind] = {
            n: t if t is None or not t.is_floating_point() else t.detach().cpu().double() for n, t in own
        }
    vars(twin)["_parameters"].update(parameters or {})
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return type(module).forward(twin, x.clone())


def _copied(child: nn.Module | None, training: bool) -> nn.Module | None:
    return None if child is None else copy.deepcopy(child).cpu().double().train(training)


def _holds_more(module: nn.Module, linears: Sequence[str | None]) -> bool:
    """Says whether a module has parameters or buffers outside of its Linears."""
    held = [*module._parameters.values(), *module._buffers.values()]
    for name, child in module.named_children():
        held += [] if name in linears else [*child.parameters(), *child.buffers()]
    return any(tensor is not None for tensor in held)


def _grid() -> Tensor:
    numbers = torch.linspace(-20, 20, 2 * _POSITIONS * _FEATURES, dtype=torch.float64, device="cpu")
    return numbers.view(2, _POSITIONS, _FEATURES)


def _roles(dropouts: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """Yields which Dropout may stand between the Linears and which behind them."""
    if len(dropouts) == 2:
        yield dropouts[0], dropouts[1]
        yield dropouts[1], dropouts[0]
    elif len(dropouts) == 1:
        yield dropouts[0], None
        yield None, dropouts[0]
    elif not dropouts:
        yield None, None


def _named(module: nn.Module) -> list[str]:
    """Returns the activation of a torch module, its number included, as for "leaky_relu(0.2)"."""
    try:
        return [read_chain(nn.Sequential(nn.Linear(1, 1, device="meta"), module)).parts[-1].activation]
    except gn.ConversionError:
        return []


def _same_as(found: Tensor, z: Tensor, names: Sequence[str]) -> str | None:
    for name in (*names, *_ACTIVATIONS):
        if torch.allclose(found, _nodes(name)(z), rtol=0, atol=_CLOSE):
            return name
    return None


@functools.cache
def _nodes(activation: str) -> Callable[[Tensor], Tensor]:
    """Returns what a node with this activation computes of its input."""
    relation = [([0], [0], [1.0])]
    kind = {"activation": [activation], "device": "cpu", "dtype": torch.float64}
    net = gn.GrapNet.from_relations([1, 1], relation, biases=[[0.0]], **kind)
    return lambda z: net(z.reshape(-1, 1)).detach().reshape(z.shape)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
