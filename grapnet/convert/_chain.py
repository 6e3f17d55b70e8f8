"""Chains: modules read as linear parts in a row, each with the activation and the dropout that
follow it.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from grapnet.core._activation import setting_of
from grapnet.core._errors import ConversionError
from grapnet.core._graph import Graph
from grapnet.execution._modules import activation_name


@dataclass(frozen=True)
class Part:
    """One linear module of a chain, found under `path`, and what happens to its output."""

    path: str
    # the weight is [in, out], as in the Conv1D of GPT-2, instead of [out, in]
    transposed: bool = False
    activation: str = "identity"
    activation_path: str | None = None  # of the module that computes it
    dropout: float = 0.0  # after the activation
    dropout_path: str | None = None
    # the Dropout stands before the activation, which may be exchanged with it
    drops_first: bool = False


@dataclass(frozen=True)
class Chain:
    """How a module, the anchor, computes: linear parts in a row. All paths start at the anchor.

    Attributes:
        parts: in the order in which they run.
        place: where the net goes; "" is the anchor itself.
        emptied: what the net computes as well, so that an `nn.Identity` takes its place.
        dropout: of the input.
        dropout_path: of the module that drops it.
    """

    parts: tuple[Part, ...]
    place: str = ""
    emptied: tuple[str, ...] = ()
    dropout: float = 0.0
    dropout_path: str | None = None

    def has_depth_of(self, net: Graph) -> bool:
        """Returns whether a net has a transition for every part."""
        return len(self.parts) == len(net.transitions)

    def to_data(self) -> dict[str, Any]:
        """Returns the chain as plain data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Any) -> "Chain":
        """Returns the chain that `to_data` gave; raises ValueError for anything else."""
        try:
            parts = tuple(Part(**part) for part in data["parts"])
            return cls(**{**data, "parts": parts, "emptied": tuple(data["emptied"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a chain of parts ({error})") from None


def read_chain(module: nn.Module, name: str = "") -> Chain:
    """Returns an `nn.Linear`, or an `nn.Sequential` of Linear, activation, Dropout and Identity, as
    a chain.

    Args:
        module: what to read.
        name: of the module, for errors.

    Raises:
        ConversionError: a module inside is of another kind, or stands where no net could follow;
            the message names it.
    """
    if type(module) is nn.Linear:
        return Chain((Part(""),))
    if not _is_sequence(module):
        raise ConversionError(
            f"{_called(name)} ({type(module).__name__}) cannot become a net; an nn.Linear can, and"
            " an nn.Sequential of Linear, activation, Dropout and Identity modules. Its Linears"
            " become nets with only=nn.Linear; a feed-forward block, whose hidden units are then"
            " edited together, with gn.graft_ffn"
        )
    reading = _Reading(name)
    for path, step in _steps(module):
        reading.take(path, step)
    if not reading.parts:
        raise ConversionError(
            f"{_called(name)} holds no nn.Linear, so it has nothing to become a net"
        )
    return Chain(tuple(reading.parts), dropout=reading.dropout, dropout_path=reading.dropout_path)


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _steps(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields what a Sequential runs, those inside it taken apart, with their paths."""
    for name, child in module._modules.items():
        if child is not None and _is_sequence(child):
            yield from _steps(child, f"{prefix}{name}.")
        elif child is not None:
            yield prefix + name, child


class _Reading:
    """The parts found so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: list[Part] = []
        self.dropout = 0.0
        self.dropout_path = None

    def take(self, path: str, module: nn.Module) -> None:
        """Adds the next module of the row; raises ConversionError when it does not fit there."""
        where = f"{self.name}.{path}" if self.name else path
        if type(module) is nn.Linear:
            self.parts.append(Part(path))
        elif type(module) is nn.Dropout:
            self._drop(path, module.p, where)
        elif type(module) is not nn.Identity:
            self._activate(path, module, where)

    def _drop(self, path: str, probability: float, where: str) -> None:
        if (self.parts[-1].dropout if self.parts else self.dropout) > 0:
            if probability == 0:
                return
            raise ConversionError(
                f"{_called(where)} follows another Dropout; a layer of a net drops once. Join them"
            )
        if self.parts:
            first = self.parts[-1].activation_path is None
            self.parts[-1] = replace(
                self.parts[-1], dropout=probability, dropout_path=path, drops_first=first
            )
        else:
            self.dropout = probability
            self.dropout_path = path

    def _activate(self, path: str, module: nn.Module, where: str) -> None:
        activation = activation_name(module)
        if activation is None:
            raise ConversionError(
                f"{_called(where)} ({type(module).__name__}) is neither a plain nn.Linear nor an"
                " activation of nodes, which is a function of one number without parameters (a norm"
                " makes units depend on each other). Make nets of the Linears around it:"
                " gn.graft(model, nn.Linear), or register it: gn.execution.register_activation"
            )
        if not self.parts:
            raise ConversionError(
                f"{_called(where)} comes before the first nn.Linear, and sensory nodes pass their"
                " input on. Leave it before the net: nn.Sequential(activation,"
                " gn.from_module(rest))"
            )
        last = self.parts[-1]
        if last.activation != "identity":
            raise ConversionError(
                f"{_called(where)} follows another activation; a layer of a net has one"
            )
        if last.dropout and not commutes(activation):
            raise ConversionError(
                f"{_called(where)} follows a Dropout, and a net drops what comes out of the"
                f" activation; with {activation} that is not the same. Put the Dropout behind it"
            )
        self.parts[-1] = replace(last, activation=activation, activation_path=path)


def commutes(activation: str) -> bool:
    """Returns whether an activation may be applied before or after a dropout, which scales by 0
    or a positive number.
    """
    setting = setting_of(activation)
    return activation in ("relu", "leaky_relu") or (
        setting is not None and setting[0] == "leaky_relu"
    )


def _called(name: str) -> str:
    return repr(name) if name else "the module"
