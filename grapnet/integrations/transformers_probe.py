"""What a feed-forward module computes, found out by running its forward with small stand-ins for
its Linears.

A probe runs on the CPU in double precision, in training and in eval mode, on numbers up to ten
million, with none of the module's weights; neither the module nor the random numbers of the program
change.
"""

import copy
import functools
import inspect
from collections import deque
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
# in double precision: the same formula with its constants written down to ten digits still agrees
_CLOSE = 1e-11
_POSITIONS = 64  # of the input, so that forwards that take it in chunks find whole ones
_FEATURES = 3  # of the input on which activations are told apart
_UNITS = 8  # hidden ones, in a probe


@dataclass(frozen=True)
class Reading:
    """A forward that is `second(activation(first(x)))`; the Dropouts are names of children."""

    activation: str
    between: str | None  # the Dropout after the activation
    after: str | None  # the Dropout after the second Linear


def read_forward(
    module: nn.Module, first: str, second: str | None, dropouts: Sequence[str]
) -> Reading | None:
    """Returns how a module computes, when a net can do just that; None for anything else.

    Dropout that is not a child of the module shows here, because the forward runs as in training as
    well.

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
        stand_ins = {
            first: _Affine(1, 0.5),
            between: _Affine(3, 0),
            second: _Affine(1, 7),
            after: _Affine(5, 0),
        }
        children = {name: one for name, one in stand_ins.items() if name is not None}
        found = _in_both_modes(
            lambda training, children=children: _run(module, children, x, training=training)
        )
        if found is None or found.shape != x.shape:
            return None
        activated = (found / (5 if after else 1) - (7 if second else 0)) / (3 if between else 1)
        activation = _same_as(activated, x + 0.5, names)
        if activation is not None:
            return Reading(activation, between, after)
    return None


def activation_of(function: Any) -> str | None:
    """Returns the activation of nodes that equals a function or a module, None when there is
    none.
    """
    if isinstance(function, nn.Module) and _holds_more(function, ()):
        return None
    z, names = _grid(), _named(function) if isinstance(function, nn.Module) else []

    def run(training: bool) -> Any:
        called = (
            copy.deepcopy(function).train(training) if isinstance(function, nn.Module) else function
        )
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return called(z.clone())

    found = _in_both_modes(run)
    return None if found is None or found.shape != z.shape else _same_as(found, z, names)


def why_units_are_bound(
    module: nn.Module, into: Mapping[str, int], out: str, width: int
) -> str | None:
    """Says why hidden units cannot be taken out of a module one by one; None when they can.

    Args:
        module: the module; its forward is the one that nets in place of its Linears would be called
            by.
        into: the children that compute the hidden units, and how many rows of each belong to one
            unit.
        out: the child that reads them.
        width: of the module's input and output.
    """
    generator = torch.Generator().manual_seed(0)
    x, reads = _normal(generator, 1, _POSITIONS, width), _normal(generator, width, _UNITS)
    makes = {name: _normal(generator, copies, _UNITS, width) for name, copies in into.items()}
    every = torch.arange(_UNITS, device="cpu")
    some, others = every[[0, 2, 3, 6]], every[[1, 4, 5, 7]]

    def without(made: Tensor, read: Tensor) -> Any:
        makers: dict[str, nn.Module] = {
            n: _Matrix(n, rows[:, made].flatten(0, 1)) for n, rows in makes.items()
        }
        reader = _Matrix(out, reads[:, read], None if len(made) == len(read) else read)
        return _run(module, {**makers, out: reader}, x, training=False)

    try:
        more = _required_arguments(type(module).forward)[2:]
        if more:
            return f"its forward needs {', '.join(map(repr, more))} beside its input"
        removed, unread, unlike = without(some, some), without(every, some), without(every, others)
    except _NoSuchAttributeError as error:
        return f"its forward reads {error}, which a net in that place does not have"
    except Exception as error:  # whatever a foreign forward does
        return (
            f"its forward does not run with nets in place of its Linears ({type(error).__name__}:"
            f" {error})"
        )
    if not isinstance(removed, Tensor) or not isinstance(unread, Tensor):
        return f"its forward returns {type(removed).__name__}, no tensor"
    if removed.shape != unread.shape or not torch.allclose(removed, unread, rtol=1e-9, atol=1e-9):
        return "its hidden units depend on each other between its Linears"
    return f"its output does not come from {out!r}" if torch.allclose(unread, unlike) else None


def computes_linear(module: nn.Linear) -> bool:
    """Says whether the forward of a class made from `nn.Linear` still multiplies by the weight and
    adds the bias.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = _normal(generator, 1, _POSITIONS, 4), _normal(generator, 3, 4)
    bias = None if module.bias is None else _normal(generator, 3)
    given = {"weight": weight, "bias": bias}
    found = _in_both_modes(
        lambda training: _run(module, {}, x, training=training, parameters=given)
    )
    expected = nn.functional.linear(x, weight, bias)
    return found is not None and found.shape == expected.shape and torch.allclose(found, expected)


class _Affine(nn.Module):
    """Stands in for a Linear or a Dropout, element by element."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift
        # forwards ask for its dtype
        self.weight = torch.empty(0, dtype=torch.float64, device="cpu")

    def forward(self, z: Tensor) -> Tensor:
        if z.shape[-1] != _FEATURES:
            raise ValueError("a net reads the last dimension, and this is another one")
        return self.scale * z + self.shift


class _NoSuchAttributeError(AttributeError):
    """A forward asked for something that a Linear has and a net has not."""


class _Matrix(nn.Module):
    """Stands in for a net in place of a Linear, and like a net has no `weight`; it may read some
    columns only.
    """

    def __init__(self, name: str, matrix: Tensor, columns: Tensor | None = None) -> None:
        super().__init__()
        self.name, self.matrix, self.columns = name, matrix, columns

    def __getattr__(self, attribute: str) -> Any:
        raise _NoSuchAttributeError(f"{self.name}.{attribute}")

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.columns is None else x[..., self.columns]) @ self.matrix.t()


def _in_both_modes(run: Callable[[bool], Any]) -> Tensor | None:
    """Returns what comes out in training and in eval mode; None where that differs, fails, or is
    single precision.
    """
    try:
        found, calm = run(True), run(False)
    except Exception:  # whatever a foreign forward does with an input that it did not expect
        return None
    doubles = all(isinstance(one, Tensor) and one.dtype == torch.float64 for one in (found, calm))
    return found if doubles and torch.equal(found, calm) else None


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments that a function cannot do without."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.kind not in several]


def _run(
    module: nn.Module,
    stand_ins: Mapping[str, nn.Module],
    x: Tensor,
    *,
    training: bool,
    parameters: Mapping[str, Tensor | None] | None = None,
) -> Any:
    """Returns the forward of a module whose children, and parameters if given, are stand-ins or
    copies of its own.
    """
    given = dict(parameters or {})
    children = {
        name: stand_ins[name] if name in stand_ins else _copied(c, training)
        for name, c in module._modules.items()
    }
    own = {
        name: _own(value)
        for name, value in vars(module).items()
        if name not in ("_modules", "_parameters")
    }
    held = {name: _own(value) for name, value in module._parameters.items() if name not in given}
    twin = object.__new__(type(module))
    vars(twin).update(
        {**own, "_modules": children, "_parameters": {**held, **given}, "training": training}
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return type(module).forward(twin, x.clone())


def _copied(child: nn.Module | None, training: bool) -> nn.Module | None:
    return None if child is None else copy.deepcopy(child).cpu().double().train(training)


def _own(value: Any) -> Any:
    """Returns copies of tensors, in double precision on the CPU, and of containers with what they
    hold.
    """
    if isinstance(value, Tensor):
        copied = value.detach().cpu().clone()
        return copied.double() if copied.is_floating_point() else copied
    if isinstance(value, dict | list | deque):
        copied = copy.copy(value)
        for place in list(copied) if isinstance(copied, dict) else range(len(copied)):
            copied[place] = _own(copied[place])
        return copied
    if type(value) is tuple:
        return tuple(map(_own, value))
    return copy.copy(value) if isinstance(value, set) else value


def _holds_more(module: nn.Module, linears: Sequence[str | None]) -> bool:
    """Says whether a module has parameters or buffers outside of its Linears."""
    held = [*module._parameters.values(), *module._buffers.values()]
    for name, child in module.named_children():
        held += [] if name in linears else [*child.parameters(), *child.buffers()]
    return any(tensor is not None for tensor in held)


def _grid() -> Tensor:
    kind = {"dtype": torch.float64, "device": "cpu"}
    far = torch.logspace(1.4, 7, _POSITIONS, **kind)  # from 25 on, where a clamp may wait
    near = torch.linspace(-20, 20, 2 * _POSITIONS * (_FEATURES - 1), **kind)
    return torch.cat([-far, near, far]).view(2, _POSITIONS, _FEATURES)


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
        return [
            read_chain(nn.Sequential(nn.Linear(1, 1, device="meta"), module)).parts[-1].activation
        ]
    except gn.ConversionError:
        return []


def _same_as(found: Tensor, z: Tensor, names: Sequence[str]) -> str | None:
    for name in (*names, *_ACTIVATIONS):
        if torch.allclose(found, _nodes(name)(z), rtol=1e-13, atol=_CLOSE):
            return name
    return None


@functools.cache
def _nodes(activation: str) -> Callable[[Tensor], Tensor]:
    """Returns what a node with this activation computes of its input."""
    relation = [([0], [0], [1.0])]
    generator = torch.Generator().manual_seed(0)  # a net draws, even when all it gets is given
    kind = {
        "activation": [activation],
        "device": "cpu",
        "dtype": torch.float64,
        "generator": generator,
    }
    net = gn.GrapNet.from_relations([1, 1], relation, biases=[[0.0]], **kind)
    return lambda z: net(z.reshape(-1, 1)).detach().reshape(z.shape)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
