"""Attention: a policy in which every node weighs the messages of its parents before adding them.

    a_bij = softmax over the parents i of j of h_bi k_i q_j        z_bj = b_j + Σ_i a_bij h_bi w_ij

The keys k (one per parent) and queries q (one per child) are columns of the two layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grapnet.core._transition import Topology

from . import _reference
from ._plan import Side


@dataclass(frozen=True)
class Attention:
    """The policy; a key belongs to a parent, a query to a child."""

    name: ClassVar[str] = "attention"
    columns: ClassVar[Mapping[str, Side]] = {"key": "parents", "query": "children"}
    not_a_sum: ClassVar[str] = "every relation changes the shares of the others"

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Runs everything."""
        return []

    def prepare(self, topology: Topology) -> Callable[..., Tensor]:
        """Returns the plan for a topology."""
        return AttentionPlan(topology)


class AttentionPlan:
    """The segment softmax for one topology, in pieces, without a matrix of parents × children."""

    def __init__(self, topology: Topology) -> None:
        _reference.require_wiring(topology)
        self.topology = topology
        self._parents = None
        if topology.n_relations <= _reference.CELLS:
            self._parents = topology.parents()
        self._alone = topology.fan_in() == 0  # children without a parent

    def __call__(
        self, x: Tensor, values: Tensor, bias: Tensor, key: Tensor, query: Tensor
    ) -> Tensor:
        """Returns z [batch, n_children]; two passes over the relations, one for the largest score
        of each child.

        What is subtracted from the scores does not change the result, so no gradient flows through
        it. The pieces of the second pass are made again in the backward, not kept.
        """
        size = max(1, _reference.CELLS // max(1, len(x)))
        pieces = list(values.split(size))
        keyed = x * key  # [batch, n_parents]
        with torch.no_grad():
            most = keyed.new_full((len(x), bias.shape[0]), -torch.inf)
            for number, piece in enumerate(pieces):
                _, children, scores = self._scores(keyed, query, number * size, len(piece))
                most = most.to(scores.dtype).scatter_reduce(1, children, scores, "amax")
        if len(pieces) == 1:
            above, below = self._sums(x, keyed, values, query, most, 0)
        else:
            above = below = most.new_zeros(())
            for number, piece in enumerate(pieces):
                more = _reference.made_again(
                    self._sums, x, keyed, piece, query, most, number * size
                )
                above = above + more[0]
                below = below + more[1]
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
        return _received(children, messages, most), _received(children, shares, most)

    def _scores(
        self, keyed: Tensor, query: Tensor, start: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the parents of some relations, their children [batch, relations], and their
        scores.
        """
        stop = start + count
        if self._parents is None:
            parents = self.topology.parents(start, stop)
        else:
            parents = self._parents[start:stop]
        children = self.topology.child[start:stop]
        scores = keyed.index_select(1, parents) * query.index_select(0, children)
        return parents, children.long().expand(len(keyed), -1), scores


def _received(children: Tensor, sent: Tensor, like: Tensor) -> Tensor:
    """Returns the sums of what children receive, in the shape of a tensor."""
    return sent.new_zeros(like.shape).scatter_add(1, children, sent)
