"""Optimizers whose Parameters are exchanged for others: the groups, their order and the state
stay.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grapnet.core._coordinates import Decision, refuse_old_backwards, replace_content
from grapnet.core._errors import OptimizerError
from grapnet.following._state import (
    clean_value,
    forget,
    is_copy,
    mark_followed,
    parameters_of,
    per_coordinate,
    refuse_kind,
    refuse_stale_state,
    with_entries,
)

Optimizers = Optimizer | Sequence[Optimizer] | None
# of one value per coordinate: as another Parameter has it, and a float elsewhere
Carry = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True, eq=False)
class Arrival:
    """A Parameter that takes the place of another, with what carries that one's state."""

    parameter: nn.Parameter
    name: str
    carry: Carry


@dataclass(frozen=True, eq=False)
class Exchange:
    """A Parameter that leaves, and those that stand in its place; names start at the module both
    are found in.
    """

    parameter: nn.Parameter
    name: str
    arrivals: tuple[Arrival, ...]


def as_optimizers(optimizer: Optimizers) -> list[Optimizer]:
    """Returns one optimizer, several or none as a list."""
    if optimizer is None:
        return []
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    return list(optimizer)


@torch.inference_mode(False)  # optimizers write into the state
@torch.no_grad()
def prepare_exchange(
    optimizer: Optimizer,
    exchanges: Sequence[Exchange],
    homes: Sequence[Sequence[nn.Parameter]],
    order: Sequence[nn.Parameter],
) -> Callable[[], None]:
    """Computes an optimizer's groups and state with other Parameters; returns what puts them into
    effect.

    Args:
        optimizer: the optimizer.
        exchanges: which Parameters leave, and which arrive.
        homes: the Parameters of every module that arrives, in its order. Those in the same group
            are put into that order, in which an optimizer made for the changed model would have
            them.
        order: all Parameters of the model as it is, in its order.

    Raises:
        OptimizerError: it holds none of the Parameters, or state that is not one value a
            coordinate.
    """
    refuse_kind(optimizer)
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        raise OptimizerError(
            "Muon steps on whole matrices, and relations are no matrix; train these with"
            " another one"
        )
    refuse_stale_state(optimizer)
    leaving = {id(exchange.parameter): exchange for exchange in exchanges}
    if not any(id(parameter) in leaving for parameter in parameters_of(optimizer)):
        raise OptimizerError(
            "this optimizer holds none of the parameters that are exchanged; leave out optimizer="
        )
    ranks = {id(parameter): rank for rank, parameter in enumerate(order)}
    members = [_exchanged(group, leaving, ranks) for group in optimizer.param_groups]
    _gather_vectors(optimizer, members, exchanges)
    for group in members:
        _sort(group, homes)
    states = {}
    gone = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            exchange = leaving.get(id(parameter))
            if exchange is not None:
                gone.append(parameter)
                states |= {
                    a.parameter: _state(optimizer, group, exchange, a) for a in exchange.arrivals
                }

    def install() -> None:
        for group, found in zip(optimizer.param_groups, members, strict=True):
            lists = {"params": [m.parameter for m in found], "param_names": [m.name for m in found]}
            for key in lists.keys() & group.keys():
                group[key][:] = lists[key]
        for parameter in gone:
            optimizer.state.pop(parameter, None)
        forget(optimizer, gone)
        optimizer.state.update({parameter: state for parameter, state in states.items() if state})
        mark_followed(optimizer, states)

    return install


@torch.inference_mode(False)
def refuse_stale_losses(
    exchanges: Sequence[Exchange], verb: str, decision: Decision
) -> list[Callable[[], None]]:
    """Lets a backward pass raise after the exchange if its loss was computed before it.

    Its gradients would reach no optimizer. The Parameters that leave remain usable in forward
    passes after the exchange.

    Returns:
        The assignments that belong to the exchange.
    """
    installs: list[Callable[[], None]] = []
    message = (
        f"this loss was computed before gn.{verb} exchanged the parameters that it depends on, and"
        " its gradients would reach no optimizer. Compute it again"
    )
    parameters = [exchange.parameter for exchange in exchanges]
    parameters = [parameter for parameter in parameters if not parameter.is_inference()]
    refuse_old_backwards(parameters, message, decision)
    for parameter in parameters:
        content = parameter.detach()
        installs.append(partial(replace_content, parameter, content, parameter.grad))
    return installs


class _Member(NamedTuple):
    """A Parameter in a group, and the rank in the model of the one that it is or takes the place
    of.
    """

    parameter: nn.Parameter
    name: str
    rank: float


def _exchanged(
    group: dict[str, Any], leaving: dict[int, Exchange], ranks: dict[int, int]
) -> list[_Member]:
    """Returns the members of a group, with arrivals in place of exchanged Parameters."""
    members: list[_Member] = []
    names = group.get("param_names", [""] * len(group["params"]))
    for parameter, name in zip(group["params"], names, strict=True):
        exchange = leaving.get(id(parameter))
        rank = ranks.get(id(parameter), math.inf)
        if exchange is None:
            members.append(_Member(parameter, name, rank))
            continue
        before = name.removesuffix(exchange.name) if name.endswith(exchange.name) else f"{name}."
        members += [
            _Member(arrival.parameter, before + arrival.name, rank) for arrival in exchange.arrivals
        ]
    return members


def _gather_vectors(
    optimizer: Optimizer, members: list[list[_Member]], exchanges: Sequence[Exchange]
) -> None:
    """Moves the biases of Linears that had none to the group of the vectors, where there is one.

    Groups are often made by dimension, matrices that decay and vectors that do not, and will be
    again.
    """
    added = {id(arrival.parameter) for exchange in exchanges for arrival in exchange.arrivals[1:]}
    only = [_holds_vectors_alone(group["params"]) for group in optimizer.param_groups]
    if not any(only):
        return
    home = members[only.index(True)]
    for group in members:
        if group is not home:
            moved = [member for member in group if id(member.parameter) in added]
            group[:] = [member for member in group if id(member.parameter) not in added]
            for member in moved:
                behind = [n for n, other in enumerate(home) if other.rank > member.rank]
                home.insert(min(behind, default=len(home)), member)


def _holds_vectors_alone(parameters: Sequence[nn.Parameter]) -> bool:
    """Returns whether Parameters, at least one, all have fewer than two dimensions."""
    return bool(parameters) and all(parameter.dim() < 2 for parameter in parameters)


def _sort(members: list[_Member], homes: Sequence[Sequence[nn.Parameter]]) -> None:
    """Puts those that arrive with one module into its order, in the places that they have
    together.
    """
    for home in homes:
        ranks = {id(parameter): rank for rank, parameter in enumerate(home)}
        places = [place for place, member in enumerate(members) if id(member.parameter) in ranks]
        ordered = sorted(
            (members[place] for place in places), key=lambda member: ranks[id(member.parameter)]
        )
        for place, member in zip(places, ordered, strict=True):
            members[place] = member


def _state(
    optimizer: Optimizer, group: dict[str, Any], exchange: Exchange, arrival: Arrival
) -> dict[str, Any]:
    """Returns the state of a Parameter that arrives."""
    old = exchange.parameter
    if not optimizer.state.get(old):
        return {}
    moved = {}
    for entry, value in per_coordinate(optimizer, old, exchange.name).items():
        if is_copy(optimizer, entry):
            known = arrival.carry(torch.ones_like(value), 0.0) != 0
            weights = arrival.parameter.detach()
            moved[entry] = torch.where(known, arrival.carry(value, 0.0), weights)
        else:
            moved[entry] = arrival.carry(value, clean_value(optimizer, group, entry))
    # Several may arrive for one that leaves, and each has numbers of its own, as its step.
    return copy.deepcopy(with_entries(optimizer.state[old], moved))
