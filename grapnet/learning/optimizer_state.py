"""The state of torch.optim optimizers, coordinate by coordinate: what follows an edit, what starts,
what cannot.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import ASGD, LBFGS, Adafactor, Adagrad, Optimizer, Rprop, SparseAdam

from grapnet.core.column import Column
from grapnet.core.errors import OptimizerError
from grapnet.core.remap import IndexMap

Newborn = Literal["zero", "mean"]

_REFUSED: dict[type[Optimizer], str] = {
    LBFGS: "LBFGS keeps one flat history over all parameters, which cannot follow an edit",
    Adafactor: (
        "Adafactor keeps averages over the rows and columns of a matrix, and relations are no"
        " matrix: what the ones that were cut have added to an average cannot be taken out of it"
    ),
    SparseAdam: "SparseAdam steps on sparse gradients only, and those of a GrapNet are dense",
}


def refuse_kind(optimizer: Optimizer) -> None:
    """Raises OptimizerError, with the reason, for an optimizer that cannot follow a net."""
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise OptimizerError(
                f"{reason}; use Adam, SGD or another that keeps one value a coordinate"
            )


def per_coordinate(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> list[str]:
    """Returns the state entries with one value a coordinate; raises for one that is neither that
    nor one number.

    A Parameter of a single coordinate cannot tell the two apart by shape; the optimizer's other
    Parameters can.
    """
    found = []
    for key, value in optimizer.state[parameter].items():
        if isinstance(value, Tensor) and value.numel() == 1 and value.shape != parameter.shape:
            continue
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            found += [] if value.numel() == 1 and _is_one_number(optimizer, key) else [key]
        elif isinstance(value, Tensor | list | tuple | dict):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise OptimizerError(
                f"the optimizer's {key!r} ({shape}) for {name} {list(parameter.shape)} is not one"
                " value a coordinate, so it cannot follow an edit; use another optimizer or make a"
                " new one after editing"
            )
    return found


def moved_state(
    optimizer: Optimizer,
    group: dict[str, Any],
    key: str,
    value: Tensor,
    index: IndexMap,
    newborn: Newborn,
) -> Tensor:
    """Returns one state tensor after an edit: survivors as they were, coordinates that come as
    `newborn` says.
    """
    survivors = index.old_size - len(index.removed)
    if newborn == "zero" or survivors == 0:
        return index.carry(value, clean_value(optimizer, group, key))
    moved = index.carry(value, 0.0)
    if len(index.inserted):
        moved.view(-1)[index.inserted.long()] = (moved.sum(dtype=torch.float64) / survivors).to(
            moved.dtype
        )
    return moved


def is_average(optimizer: Optimizer, key: str) -> bool:
    """Says whether a state entry is an average of the coordinate itself, so that a clean one is its
    present value.
    """
    return isinstance(optimizer, ASGD) and key == "ax"


def first_state(
    optimizer: Optimizer, group: dict[str, Any], example: Tensor, rows: int
) -> dict[str, Any]:
    """Returns the state before the first step of a Parameter of `rows` rows; Adagrad alone makes it
    ahead.
    """
    if not isinstance(optimizer, Adagrad):
        return {}
    accumulated = example.new_full((rows, *example.shape[1:]), group["initial_accumulator_value"])
    step = torch.zeros(
        (), dtype=torch.float32, device=accumulated.device if group.get("fused") else "cpu"
    )
    return {"step": step, "sum": accumulated}


def refuse_column(optimizer: Optimizer, column: Column) -> None:
    """Raises OptimizerError for an optimizer that cannot train a vector."""
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        raise OptimizerError(
            f"Muon trains matrices only, and {column.parameter_name} is a vector; use another"
            " for it"
        )


def lists_without(group: dict[str, Any], gone: set[int]) -> dict[str, list[Any]]:
    """Returns a group's Parameters, and their names where it has them, without some."""
    stays = [id(parameter) not in gone for parameter in group["params"]]
    lists = {key: group[key] for key in ("params", "param_names") if key in group}
    return {
        key: [item for item, kept in zip(items, stays, strict=True) if kept]
        for key, items in lists.items()
    }


def insert_column(
    lists: dict[str, list[Any]], column: Column, beside: nn.Parameter, mine: set[int]
) -> None:
    """Puts a column behind the net's last Parameter in a group, where `net.parameters()` would have
    had it.
    """
    params = lists["params"]
    place = 1 + max(n for n, parameter in enumerate(params) if id(parameter) in mine)
    if "param_names" in lists:
        name = lists["param_names"][
            next(n for n, parameter in enumerate(params) if parameter is beside)
        ]
        lists["param_names"].insert(place, name.removesuffix(column.beside) + column.parameter_name)
    params.insert(place, column.value)


def _is_one_number(optimizer: Optimizer, key: str) -> bool:
    """Says whether an entry is a single number also where the Parameter has several coordinates, or
    none.
    """
    for parameter, state in optimizer.state.items():
        value = state.get(key) if isinstance(parameter, Tensor) and parameter.numel() != 1 else None
        if isinstance(value, Tensor) and value.numel() == 1:
            return True
    return False


def clean_value(optimizer: Optimizer, group: dict[str, Any], key: str) -> float:
    """Returns what a state entry starts from."""
    if isinstance(optimizer, Rprop) and key == "step_size":
        return float(group["lr"])
    if isinstance(optimizer, Adagrad) and key == "sum":
        return float(group["initial_accumulator_value"])
    return 0.0
