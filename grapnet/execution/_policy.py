"""The Parameters of policies: how columns of the graph are declared, made, and read by plans."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from torch import Tensor

from grapnet.core._commit import Draws
from grapnet.core._coordinates import Vector
from grapnet.core._errors import PlanError
from grapnet.core._graph import Column, Graph, drawn
from grapnet.core._index_map import as_tensor

from ._plan import Backend, Side


def require_policy(policy: Any) -> None:
    """Raises TypeError for a class that the Policy protocol does not describe."""
    if not isinstance(getattr(policy, "not_a_sum", None), str):
        raise TypeError(
            f"the policy {policy.__name__} lacks a string `not_a_sum`: the reason why what relies"
            " on the sum cannot serve it"
        )
    columns = getattr(policy, "columns", None)
    if not isinstance(columns, Mapping) or not set(columns.values()) <= set(get_args(Side)):
        raise TypeError(
            f"`columns` of the policy {policy.__name__} maps the names of its Parameters to"
            f' "parents" or "children", got {columns!r}'
        )
    if fields(policy):
        raise TypeError(
            f"the policy {policy.__name__} has fields, but a file keeps only its name and its"
            " Parameters; make a Parameter of what changes the result"
        )


def column_places(
    graph: Graph, t: int, backend: Backend | type[Backend] | None
) -> dict[str, tuple[str, int]]:
    """Returns the name in `net.columns` and the layer of every Parameter that a backend has on a
    transition; none for a backend of the sum.
    """
    source, target = graph.ends[t]
    layers = {"parents": source, "children": target}
    sides = getattr(backend, "columns", {})
    return {name: (f"{name}_{t}", layers[side]) for name, side in sides.items()}


def present_columns(graph: Graph, t: int, backend: Backend | None) -> dict[str, Column]:
    """Returns the columns of the graph that belong to a backend on a transition."""
    places = column_places(graph, t, backend)
    return {name: graph.columns[column] for name, (column, _) in places.items()}


def start_columns(
    graph: Graph,
    t: int,
    backend: Backend | None,
    draws: Draws,
    *,
    bound: float | None = None,
    generator: torch.Generator | None = None,
    **start: Any,
) -> dict[str, Column]:
    """Returns columns for a backend that begins to run a transition.

    Args:
        graph: the net.
        t: the transition.
        backend: what is going to run it.
        draws: the random numbers of the choice.
        bound: of the numbers drawn from U(±bound), also for nodes born later; 1 by default.
        generator: source of the random numbers.
        start: values for some of the columns, which are drawn otherwise.
    """
    if bound is None:
        bound = 1.0
    if not 0 <= bound < float("inf"):
        raise PlanError(f"bound must be a non-negative number, got {bound}")
    example = graph.transitions[t].weight.detach()
    found = {}
    for name, (column, layer) in column_places(graph, t, backend).items():
        count = len(graph.layers[layer])
        given = start.get(name)
        if given is None:
            values = drawn(count, bound, example, draws.source(generator, graph.device))
        else:
            values = _checked(given, count, column, example)
        found[name] = Column(
            column, layer, values, beside=f"transitions.{t}.weight", bound=float(bound)
        )
    return found


def _checked(given: Any, count: int, name: str, example: Tensor) -> Tensor:
    values = as_tensor(given).detach().reshape(-1)
    if len(values) != count:
        raise PlanError(f"{name} needs {count} numbers, one per node, got {len(values)}")
    if not bool(torch.isfinite(values).all()):
        raise PlanError(f"the numbers for {name} must be finite")
    return values.to(example, copy=True)


@dataclass(frozen=True, eq=False)
class ColumnPlan:
    """A policy's plan together with the columns that it reads."""

    plan: Callable[..., Tensor]
    columns: Mapping[str, Column]
    # the version to read without gradients; None for the present one
    version: Mapping[str, Vector] | None

    @property
    def values_shape(self) -> tuple[int, ...]:
        """The shape in which the plan takes the values."""
        return getattr(self.plan, "values_shape", (-1,))

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        read = {}
        for name, column in self.columns.items():
            if self.version is None or torch.compiler.is_compiling():
                # a view outlives an edit of the Parameter
                read[name] = column.values().view(-1)
            else:
                read[name] = column._values_of(self.version[column.name])
        return self.plan(x, values, bias, **read)
