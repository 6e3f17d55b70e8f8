"""Optimizers whose Parameters are exchanged for others: the groups, their order and the state stay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grapnet.core.errors import OptimizerError
from grapnet.learning.optimizer_state import clean_value, first_state, is_average, per_coordinate, refuse_kind
from grapnet.learning.stale import forget, mark_followed, parameters_of, refuse_stale_state

from .linear import Carry

Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass(frozen=True, eq=False)
class Arrival:
    """A Parameter that takes the place of another, with what carries that one's state; None for a clean start."""

    parameter: nn.Parameter
    name: str
    carry: Carry | None


@dataclass(frozen=True, eq=False)
class Exchange:
    """A Parameter that leaves, and those that stand in its place; names start at the module both are found in."""

    parameter: nn.Parameter
    name: str
    arrivals: tuple[Arrival, ...]


def as_optimizers(optimizer: Optimizers) -> list[Optimizer]:
    """Returns one optimizer, several or none as a list."""
    found = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for one in found:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer= takes a torch.optim optimizer or several, not a {type(one).__name__}")
    return found


def prepare_exchange(optimizer: Optimizer, exchanges: Sequence[Exchange]) -> Callable[[], None]:
    """Computes an optimizer's groups and state with other Parameters; returns what puts them into effect.

    Raises:
        OptimizerError: it holds none of the Parameters, or state that is not one value a coordinate.
    """
    refuse_kind(optimizer)
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        raise OptimizerError("Muon steps on whole matrices, and relations are no matrix; train these with another one")
    refuse_stale_state(optimizer)
    leaving = {id(exchange.parameter): exchange for exchange in exchanges}
    if not any(id(parameter) in leaving for parameter in parameters_of(optimizer)):
        raise OptimizerError("this optimizer holds none of the parameters that are exchanged; leave out optimizer=")
    lists, states, gone = [], {}, []
    for group in optimizer.param_groups:
        lists.append(_exchanged(group, leaving))
        for parameter in group["params"]:
            exchange = leaving.get(id(parameter))
            if exchange is not None:
                gone.append(parameter)
                states |= {a.parameter: _state(optimizer, group, exchange, a) for a in exchange.arrivals}

    def install() -> None:
        for group, changed in zip(optimizer.param_groups, lists, strict=True):
            for key, items in changed.items():
                group[key][:] = items
        for parameter in gone:
            optimizer.state.pop(parameter, None)
        forget(optimizer, gone)
        optimizer.state.update({parameter: state for parameter, state in states.items() if state})
        mark_followed(optimizer, states)

    return install


def _exchanged(group: dict[str, Any], leaving: dict[int, Exchange]) -> dict[str, list[Any]]:
    """Returns a group's Parameters, and their names where it has them, with the arrivals in the leavers' places."""
    params, names = [], []
    old_names = group.get("param_names", [""] * len(group["params"]))
    for parameter, name in zip(group["params"], old_names, strict=True):
        exchange = leaving.get(id(parameter))
        if exchange is None:
            params.append(parameter)
            names.append(name)
            continue
        params += [arrival.parameter for arrival in exchange.arrivals]
        names += [name.removesuffix(exchange.name) + arrival.name for arrival in exchange.arrivals]
    return {"params": params, "param_names": names} if "param_names" in group else {"params": params}


def _state(optimizer: Optimizer, group: dict[str, Any], exchange: Exchange, arrival: Arrival) -> dict[str, Any]:
    """Returns the state of a Parameter that arrives."""
    old, new, carry = exchange.parameter, arrival.parameter, arrival.carry
    if carry is None:
        return first_state(optimizer, group, new.detach(), len(new))
    if not optimizer.state.get(old):
        return {}
    state = dict(optimizer.state[old])
    for key in per_coordinate(optimizer, old, exchange.name):
        value: Tensor = state[key]
        if is_average(optimizer, key):
            known = carry(torch.ones_like(value), 0.0) != 0
            state[key] = torch.where(known, carry(value, 0.0), new.detach())
        else:
            state[key] = carry(value, clean_value(optimizer, group, key))
    return state
