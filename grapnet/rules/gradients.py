"""GradientRecorder: the gradient that every relation of a transition has or would have, present or
absent.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id  # pyright: ignore[reportAttributeAccessIssue]

from grapnet.core._errors import CheckpointError, GrapNetError
from grapnet.core._index_map import as_tensor
from grapnet.core._sets import RelationSet
from grapnet.network import GrapNet

from .absent import Absent, first_largest, largest_among, largest_of_all, largest_of_each
from .outer_products import CELLS, OuterProducts, has_finite_product
from .watcher import Watcher, checked, plainly

MOST_CELLS = 2**26  # of a matrix


class GradientRecorder(Watcher[OuterProducts]):
    """Records g_ij = Σ over the batch of h_i · dL/dz_j for every pair of an upper and a lower node,
    related or not.

    h is what the upper layer says and z what the lower nodes receive. For a relation of the net
    that is the gradient of its weight, wherever the transition is a sum (attention weighs the
    messages; g_ij is then that of the sum). It is averaged over the backward passes seen, of which
    one may go through several forward passes. For a node that came meanwhile, passes before it
    count as 0. Under a GradScaler all are scaled alike. Forward passes of before an edit, and of
    before it was armed, do not count. What is not finite is left out (`left_out`), and a pass in
    which nothing else was seen does not count.

    Args:
        upper: the layer of the parents.
        lower: the layer of the children, below it; the next one by default.
        window: how many steps before its rule is due it watches.

    Examples:
        >>> net = GrapNet([3, 2], density=0.5)
        >>> recorder = GradientRecorder(0)
        >>> recorder.arm(net)
        >>> net(torch.tensor([[1.0, 0.0, 2.0]])).sum().backward()
        >>> recorder.matrix().tolist()
        [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]
    """

    def __init__(self, upper: int, lower: int | None = None, *, window: int = 1) -> None:
        lower = upper + 1 if lower is None else lower
        super().__init__((upper, lower), window)
        if lower <= upper:
            raise ValueError(
                f"relations lead to a layer further down, got upper={upper}, lower={lower}"
            )
        self.upper, self.lower = upper, lower
        self._said: Tensor | None = None  # by the upper layer in the pass under way
        self.left_out = 0  # how many gradients, since clear(), were not finite

    @property
    def count(self) -> int:
        """How many backward passes were seen."""
        return 0 if self._evidence is None else self._evidence.count

    def clear(self) -> None:
        """Forgets what it has seen."""
        super().clear()
        self.left_out = 0

    def of(self, parents: Any, children: Any) -> Tensor:
        """Returns the gradients of pairs: uids of parents and, aligned with them, of children."""
        seen, rows = self._here(), self._rows(parents, children)
        with plainly(rows[0].device):
            return seen.at(*rows)

    def of_relations(self, relations: RelationSet) -> Tensor:
        """Returns the gradients of relations of the transition from `upper` to `lower`."""
        seen, positions = self._here(), self._positions(relations)
        topology = self.net.transitions[self.upper].topology
        with plainly(positions.device):
            return seen.at(
                topology.parents_at(positions).long(),
                topology.child.index_select(0, positions).long(),
            )

    def matrix(self, *, most_cells: int = MOST_CELLS) -> Tensor:
        """Returns the gradients of all pairs, [n_upper, n_lower]; raises GrapNetError when they are
        too many.
        """
        seen = self._here()
        if seen.shape[0] * seen.shape[1] > most_cells:
            raise GrapNetError(
                f"the matrix would hold {seen.shape[0] * seen.shape[1]:,} cells (limit"
                f" {most_cells:,}); ask for pairs with of(parents, children), or raise most_cells="
            )
        with plainly(self.net.device):
            return seen.parents(slice(None))

    def largest_absent(
        self,
        count: int | None = None,
        *,
        per_child: Tensor | None = None,
        exclude: RelationSet | None = None,
        candidates: tuple[Any, Any] | None = None,
        ranked: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the absent relations with the largest |gradient|: uids of parents and of
        children, |gradients|.

        Equals of the lowest parent row, then of the lowest child row come first. There may be fewer
        than asked for.

        Args:
            count: how many; of those that `per_child` lets through, when both are given.
            per_child: how many of each child, [n_lower].
            exclude: relations of the transition that do not count as present, such as those about
                to be cut; they can be among what is returned.
            candidates: uids of parents and, aligned with them, of children: only among these pairs.
            ranked: the largest first; otherwise by parent and then by child, which is quicker.

        Raises:
            GrapNetError: nothing was seen, or the sum of what was is not finite.
        """
        seen = self._here()
        if count is None and per_child is None:
            raise ValueError("say how many relations: count=, or per_child= for each child")
        if count is not None and count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if not seen.is_finite():
            raise GrapNetError(
                "a recorded gradient is not finite; clear() this recorder and record another pass"
            )
        quotas = None if per_child is None else self._quotas(per_child)
        net = self.net
        topology = net.transitions[self.upper].topology if self.lower == self.upper + 1 else None
        absent = Absent(seen, topology, None if exclude is None else self._positions(exclude))
        with plainly(net.device):
            if candidates is not None:
                cells, sizes = largest_among(absent, *self._rows(*candidates), count, quotas)
            elif quotas is not None:
                cells, sizes = largest_of_each(absent, quotas, CELLS)
            else:
                cells, sizes = largest_of_all(absent, count or 0, CELLS)
            if ranked:
                order = sizes.argsort(descending=True, stable=True)[:count]
                cells, sizes = cells[order], sizes[order]
            elif count is not None and len(cells) > count:
                best = first_largest(sizes, count)
                cells, sizes = cells.index_select(0, best), sizes.index_select(0, best)
            cells = cells.cpu()
        n_lower = max(1, seen.shape[1])
        return (
            net.layers[self.upper].uid[cells // n_lower],
            net.layers[self.lower].uid[cells % n_lower],
            sizes,
        )

    def _seen(self) -> OuterProducts:
        if self._evidence is None and self.left_out:
            raise GrapNetError(
                f"this GradientRecorder has left out all {self.left_out} gradients that it was"
                " shown, which were not finite; lower the scale of the loss and record another"
                " pass"
            )
        return super()._seen()

    def _here(self) -> OuterProducts:
        """Returns the evidence where the net is."""
        return self._seen().to(self.net.device)

    def _rows(self, parents: Any, children: Any) -> tuple[Tensor, Tensor]:
        """Returns the rows of aligned pairs of uids, where the gradients are."""
        uids = [
            as_tensor(given).reshape(-1).to("cpu", torch.int64).contiguous()
            for given in (parents, children)
        ]
        if len(uids[0]) != len(uids[1]):
            raise ValueError(
                f"pairs are aligned: got {len(uids[0])} parents for {len(uids[1])} children"
            )
        net = self.net
        upper, lower = (
            net.rows(n, u).to(net.device).long() for n, u in zip(self._layers, uids, strict=True)
        )
        return upper, lower

    def _positions(self, relations: RelationSet) -> Tensor:
        """Returns where relations stand in the transition; raises ValueError when they are of
        another one.
        """
        found, net = relations.positions_by_transition(), self.net
        if (
            relations.graph is not net
            or self.lower != self.upper + 1
            or found.keys() - {self.upper}
        ):
            raise ValueError(
                f"this recorder is about relations from layer {self.upper} to layer {self.lower} of"
                f" its net, got {relations!r}{'' if relations.graph is net else ' of another net'}"
            )
        at = found.get(self.upper, range(0))
        if isinstance(at, Tensor):
            return at
        return torch.arange(at.start, at.stop, dtype=torch.int32, device=net.device)

    def _quotas(self, per_child: Tensor) -> Tensor:
        quotas, size = as_tensor(per_child).reshape(-1), len(self.net.layers[self.lower])
        if (
            len(quotas) != size
            or quotas.dtype.is_floating_point
            or (size and int(quotas.min()) < 0)
        ):
            raise ValueError(
                f"per_child holds one whole number, not negative, for each of the {size} children"
            )
        return quotas.to(self.net.device, torch.int64)

    def _modules(self, net: GrapNet) -> Sequence[nn.Module]:
        return [net.transitions[t] for t in sorted({self.upper, self.lower - 1})]

    def _hear(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        if place == 0:
            said = args[0].detach()
            # the input belongs to whoever gave it
            self._said = said.clone() if self.upper == 0 else said
        if place == 0 and self.lower > self.upper + 1:
            return
        said, self._said = self._said, None
        if output.requires_grad and said is not None and len(said) == len(output):
            output.register_hook(self._receiver(said))

    def _receiver(self, said: Tensor) -> Any:
        """Returns the tensor hook that takes in dL/dz, unless the net was edited or the recorder
        disarmed meanwhile.
        """
        reference, structure, armed = weakref.ref(self), self.net.structure, self._release

        def receive(gradient: Tensor) -> None:
            recorder = reference()
            if recorder is None or recorder._release is not armed or not recorder.armed:
                return
            if recorder.net.structure is structure:
                recorder._record(said, gradient.detach())

        return receive

    def _record(self, said: Tensor, received: Tensor) -> None:
        dtype = torch.promote_types(torch.promote_types(said.dtype, received.dtype), torch.float32)
        with plainly(received.device):
            said, received = said.to(dtype), received.to(dtype, copy=True)
            if not has_finite_product(said, received):
                self.left_out += 1
                return
            self._writable(lambda: OuterProducts((said.shape[1], received.shape[1])))
            seen = self._evidence = self._seen().to(received.device)
            seen.see(said, received, _current_graph_task_id())

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> OuterProducts:
        count, said, received, matrix = (
            seen.get(name) for name in ("count", "said", "received", "matrix")
        )
        if not isinstance(count, int) or count < 1 or (said is None and matrix is None):
            raise CheckpointError(
                "the state of a GradientRecorder holds a count, and factors or a matrix"
            )
        restored = OuterProducts((sizes[0], sizes[1]), count)
        if said is not None:
            batch = len(said) if isinstance(said, Tensor) and said.dim() else 0
            factors = [
                checked(f, [batch, n], None, "a factor")
                for f, n in zip((said, received), sizes, strict=True)
            ]
            restored.factors = [(factors[0], factors[1])]
        restored.matrix = None if matrix is None else checked(matrix, sizes, None, "matrix")
        return restored

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_said": None}
