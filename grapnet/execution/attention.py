"""Attention: a policy in which every node weighs its parents' messages before it adds them up.

    a_bij = softmax over the parents i of j of h_bi k_i q_j        z_bj = b_j + Σ_i a_bij h_bi w_ij

The keys k (one an upper node) and queries q (one a lower node) are columns of the two layers.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grapnet.core._change import as_tensor
from grapnet.core._commit import Draws
from grapnet.core._coordinates import Vector
from grapnet.core._errors import PlanError
from grapnet.core._graph import Column, Graph, drawn
from grapnet.core._transition import Topology

from . import reference


@dataclass(frozen=True, eq=False)
class Attention:
    """The policy on one transition, with the Parameters that are its own."""

    name: ClassVar[str] = "attention"
    options: ClassVar[tuple[str, ...]] = ("keys", "queries", "bound", "generator")

    key: Column
    query: Column

    @classmethod
    def on(
        cls,
        graph: Graph,
        t: int,
        draws: Draws,
        *,
        keys: Any = None,
        queries: Any = None,
        bound: float | None = None,
        generator: torch.Generator | None = None,
    ) -> "Attention":
        """Makes the policy of a transition; keys and queries that it has already stay, unless an
        option says other.

        Args:
            graph: the net.
            t: the transition.
            draws: the random numbers of the choice.
            keys: one number an upper node; drawn from U(±bound) when left out.
            queries: one number a lower node; drawn likewise.
            bound: of what is drawn, and of what newborn nodes will draw; 1 by default.
            generator: source of the random numbers.
        """
        names = cls.names(t)
        if keys is queries is bound is generator is None and all(
            name in graph.columns for name in names
        ):
            return cls(*(graph.columns[name] for name in names))
        bound = 1.0 if bound is None else float(bound)
        if not 0 <= bound < float("inf"):
            raise PlanError(f"bound is a number that is not negative, got {bound}")
        beside, columns = f"transitions.{t}.weight", []
        example = graph.transitions[t].weight.detach()
        for name, layer, given in zip(names, (t, t + 1), (keys, queries), strict=True):
            count = len(graph.layers[layer])
            values = (
                drawn(count, bound, example, draws.source(generator, graph.device))
                if given is None
                else _checked(given, count, name, example)
            )
            columns.append(Column(name, layer, values, beside=beside, bound=bound))
        return cls(*columns)

    @staticmethod
    def names(t: int) -> tuple[str, str]:
        """Returns what the columns for a transition are called."""
        return f"key_{t}", f"query_{t}"

    @property
    def columns(self) -> tuple[Column, Column]:
        """The Parameters that the policy brings to the net."""
        return self.key, self.query

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Runs everything."""
        return []

    def prepare(self, topology: Topology) -> "AttentionPlan":
        """Returns a plan that reads the keys and queries as they are when it runs."""
        return AttentionPlan(topology, self.key, self.query)


class AttentionPlan:
    """The segment softmax for one topology: some relations at a time, and never a rectangle of
    parents × children.
    """

    def __init__(self, topology: Topology, key: Column, query: Column) -> None:
        reference.require_wiring(topology)
        self.topology, self.key, self.query = topology, key, query
        self._parents = None
        if topology.n_relations <= reference.CELLS:
            self._parents = topology.parents()
        self._alone = topology.fan_in() == 0  # children without a parent
        # the version to read, in place of the present one
        self._version: tuple[Vector, Vector] | None = None

    def reading(self, columns: dict[str, Vector]) -> "AttentionPlan":
        """Returns the plan for reading one version of the keys and queries without gradients."""
        plan = copy(self)
        plan._version = (columns[self.key.name], columns[self.query.name])
        return plan

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        if self._version is None or torch.compiler.is_compiling():
            # views outlive an edit of the Parameter
            key = self.key.values().view(-1)
            query = self.query.values().view(-1)
        else:
            key = self.key.values_of(self._version[0])
            query = self.query.values_of(self._version[1])
        return self.attend(x, values, key, query, bias)

    def attend(self, x: Tensor, values: Tensor, key: Tensor, query: Tensor, bias: Tensor) -> Tensor:
        """Returns z [batch, n_children]; two passes over the relations, one for the largest score
        of each child.

        What is subtracted from the scores does not change the result, so no gradient flows through
        it. The pieces of the second pass are made again in the backward, not kept.
        """
        size = max(1, reference.CELLS // max(1, len(x)))
        pieces = list(values.split(size))
        keyed = x * key  # [batch, n_parents]
        with torch.no_grad():
            most = keyed.new_full((len(x), self.topology.n_children), -torch.inf)
            for number, piece in enumerate(pieces):
                _, children, scores = self._scores(keyed, query, number * size, len(piece))
                most = most.to(scores.dtype).scatter_reduce(1, children, scores, "amax")
        if len(pieces) == 1:
            above, below = self._sums(x, keyed, values, query, most, 0)
        else:
            above = below = most.new_zeros(())
            for number, piece in enumerate(pieces):
                arguments = (x, keyed, piece, query, most, number * size)
                more = checkpoint(
                    self._sums, *arguments, use_reentrant=False, preserve_rng_state=False
                )
                above, below = above + more[0], below + more[1]
        return above / below.masked_fill(self._alone, 1) + bias

    def _sums(
        self, x: Tensor, keyed: Tensor, values: Tensor, query: Tensor, most: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        """Returns Σ exp(score) h w and Σ exp(score) over the relations from `start` on, both
        [batch, n_children].
        """
        parents, children, scores = self._scores(keyed, query, start, len(values))
        shares = (scores - most.gather(1, children)).exp()  # [batch, relations], at most 1
        messages = shares * x.index_select(1, parents) * values
        return self._received(children, messages), self._received(children, shares)

    def _scores(
        self, keyed: Tensor, query: Tensor, start: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the parents of some relations, their children [batch, relations], and their
        scores.
        """
        stop = start + count
        parents = (
            self.topology.parents(start, stop)
            if self._parents is None
            else self._parents[start:stop]
        )
        children = self.topology.child[start:stop]
        scores = keyed.index_select(1, parents) * query.index_select(0, children)
        return parents, children.long().expand(len(keyed), -1), scores

    def _received(self, children: Tensor, sent: Tensor) -> Tensor:
        return sent.new_zeros(len(sent), self.topology.n_children).scatter_add(1, children, sent)


def dense_attention(
    x: Tensor, values: Tensor, key: Tensor, query: Tensor, topology: Topology, bias: Tensor
) -> Tensor:
    """Returns what attention is, with every pair of a rectangle and -inf where there is no
    relation: for audits.

    Args:
        x: what the upper nodes say, [batch, n_parents].
        values: the weights in the order of the relations.
        key: one an upper node.
        query: one a lower node.
        topology: the relations.
        bias: one a lower node.
    """
    pairs = topology.parents().long(), topology.child.long()
    related = torch.zeros(
        topology.n_parents, topology.n_children, dtype=torch.bool, device=x.device
    )
    related[pairs] = True
    weights = values.new_zeros(related.shape).index_put(pairs, values)
    scores = x[:, :, None] * key[:, None] * query  # [batch, n_parents, n_children]
    shares = scores.masked_fill(~related, -torch.inf).softmax(1).masked_fill(~related, 0)
    return (shares * x[:, :, None] * weights).sum(1) + bias


def _checked(given: Any, count: int, name: str, example: Tensor) -> Tensor:
    values = as_tensor(given).detach().reshape(-1)
    if len(values) != count:
        raise PlanError(f"{name} needs {count} numbers, one a node, got {len(values)}")
    if not bool(torch.isfinite(values).all()):
        raise PlanError(f"the numbers for {name} must be finite")
    return values.to(example, copy=True)
