"""GradientRecorder: the gradient of every relation of a transition, present or absent."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id  # pyright: ignore[reportAttributeAccessIssue]

from grapnet.core._errors import CheckpointError, GrapNetError
from grapnet.core._index_map import IndexMap, as_tensor
from grapnet.core._sets import RelationSet
from grapnet.network import GrapNet

from .absent import Absent, first_largest, largest_among, largest_of_all, largest_of_each
from .watcher import Watcher, checked, plainly

MOST_CELLS = 2**26  # of a matrix
# of the rectangle that are computed at a time: fewer rows make the matrix product slower
CELLS = 2**22
GATHER = 256  # a gradient alone costs as much as this many in a matrix product


@dataclass(eq=False)
class OuterProducts:
    """Sums over backward passes of hᵀ·dz, as the factors or, where that is smaller, as the
    product.
    """

    shape: tuple[int, int]  # n_upper, n_lower
    count: int = 0
    task: int = -1  # which backward pass was the last
    # h [batch, n_upper], dz [batch, n_lower]
    factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    matrix: Tensor | None = None  # [n_upper, n_lower], of factors that are not kept

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "task": -1}  # another process numbers its passes anew

    def see(self, h: Tensor, dz: Tensor, task: int) -> None:
        """Adds the two factors of a backward pass; several of the same pass count once."""
        here = self.to(h.device)
        self.factors = [*here.factors, (h, dz)]
        self.matrix = here.matrix
        self.count += task != self.task
        self.task = task
        samples = sum(len(part) for part, _ in self.factors)
        if samples * sum(self.shape) > self.shape[0] * self.shape[1]:
            h, dz = self.joined()
            if self.matrix is None:
                self.matrix = h.new_zeros(self.shape)
            self.matrix = self.matrix.to(h).addmm_(h.t(), dz)
            self.factors = []

    def joined(self) -> tuple[Tensor, Tensor]:
        """Returns the factors of all passes, one after the other."""
        if len(self.factors) > 1:
            h, dz = (torch.cat(parts) for parts in zip(*self.factors, strict=True))
            self.factors = [(h, dz)]
        return self.factors[0]

    def parents(self, rows: Tensor | slice) -> Tensor:
        """Returns the gradients of all relations from some upper nodes, [rows, n_lower]."""
        known = None if self.matrix is None else self.matrix[rows]
        if self.factors:
            h, dz = self.joined()
            product = h[:, rows].t() @ dz
            return (product if known is None else product.add_(known)).div_(self.count)
        assert known is not None, "nothing was seen"
        return known / self.count

    def children(self, rows: slice) -> Tensor:
        """Returns the gradients of all relations to some lower nodes, [rows, n_upper]."""
        known = None if self.matrix is None else self.matrix[:, rows].t()
        if self.factors:
            h, dz = self.joined()
            product = dz[:, rows].t() @ h
            return (product if known is None else product.add_(known)).div_(self.count)
        assert known is not None, "nothing was seen"
        return known.contiguous().div(self.count)

    def at(self, parents: Tensor, children: Tensor) -> Tensor:
        """Returns the gradients of pairs of rows."""
        if not self.factors and self.matrix is not None:
            return self.matrix[parents, children] / self.count
        owners, place = parents.unique(return_inverse=True)
        found = self.factors[0][0].new_empty(len(parents))
        if len(owners) * self.shape[1] > GATHER * len(parents):
            self._gather(parents, children, found)
            return found
        place, order = place.sort()
        step = max(1, CELLS // max(1, self.shape[1]))
        for start in range(0, len(owners), step):
            first, last = torch.searchsorted(
                place, torch.tensor([start, start + step], device=place.device)
            ).tolist()
            cells, chosen = self.parents(owners[start : start + step]), order[first:last]
            found[chosen] = cells[place[first:last] - start, children[chosen]]
        return found

    def _gather(self, parents: Tensor, children: Tensor, found: Tensor) -> None:
        """Computes the gradients of pairs one by one."""
        h, dz = (factor.t().contiguous() for factor in self.joined())  # [n, batch]
        step = max(1, CELLS // 16 // max(1, h.shape[1]))
        for start in range(0, len(parents), step):
            p, c = parents[start : start + step], children[start : start + step]
            part = torch.linalg.vecdot(h.index_select(0, p), dz.index_select(0, c))
            found[start : start + step] = (
                part if self.matrix is None else part + self.matrix[p, c]
            ) / self.count

    def to(self, device: torch.device) -> "OuterProducts":
        """Returns them on a device."""
        tensors = [*(h for h, _ in self.factors), self.matrix]
        if all(tensor is None or tensor.device == device for tensor in tensors):
            return self
        factors = [(h.to(device), dz.to(device)) for h, dz in self.factors]
        matrix = None if self.matrix is None else self.matrix.to(device)
        return OuterProducts(self.shape, self.count, self.task, factors, matrix)

    def is_finite(self) -> bool:
        """Returns whether every number is finite."""
        tensors = [factor for pair in self.factors for factor in pair]
        tensors += [] if self.matrix is None else [self.matrix]
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def carried(self, *indexes: IndexMap | None) -> "OuterProducts":
        """Returns them after rows moved; newborn nodes have gradients of 0."""
        upper, lower = indexes
        factors = [(_moved(h, upper), _moved(dz, lower)) for h, dz in self.factors]
        matrix = self.matrix if upper is None or self.matrix is None else upper.carry(self.matrix)
        matrix = None if matrix is None else _moved(matrix, lower)
        sizes = [
            size if i is None else i.new_size for size, i in zip(self.shape, indexes, strict=True)
        ]
        return OuterProducts((sizes[0], sizes[1]), self.count, self.task, factors, matrix)

    def copied(self) -> "OuterProducts":
        """Returns an independent copy; factors are never written into."""
        matrix = None if self.matrix is None else self.matrix.clone()
        return OuterProducts(self.shape, self.count, self.task, list(self.factors), matrix)

    def state_dict(self) -> dict[str, Any]:
        """Returns them as numbers and tensors."""
        h, dz = self.joined() if self.factors else (None, None)
        return {"count": self.count, "h": h, "dz": dz, "matrix": self.matrix}


def has_finite_product(h: Tensor, dz: Tensor) -> bool:
    """Returns whether every number of hᵀ·dz is finite; computes it only where a sum could
    overflow.
    """
    if not h.numel() or not dz.numel():
        return True
    largest_h = h.abs().amax()
    largest_dz = dz.abs().amax()
    bounds = torch.stack([largest_h, largest_dz, largest_h * largest_dz * len(h)])
    *factors, bound = bounds.isfinite().tolist()
    if bound or not all(factors):
        return bound
    step = max(1, CELLS // dz.shape[1])
    return all(bool((rows.t() @ dz).isfinite().all()) for rows in h.split(step, dim=1))


def _moved(factor: Tensor, index: IndexMap | None) -> Tensor:
    """Returns a matrix after its columns moved."""
    return factor if index is None else index.carry(factor.t()).t().contiguous()


class GradientRecorder(Watcher[OuterProducts]):
    """Records g_ij = Σ over the batch of h_i · dL/dz_j for every pair of an upper and a lower node,
    related or not.

    h is the output of the upper layer and z the input of the lower nodes, bias included. For a
    relation of the net that is the gradient of its weight, wherever the transition is a sum
    (attention weighs the messages; g_ij is then that of the sum). It is averaged over the backward
    passes seen, of which one may go through several forward passes. For a node that came meanwhile,
    passes before it count as 0. Under a GradScaler all are scaled alike. Forward passes from before
    an edit, and from before it was armed, do not count. What is not finite is left out
    (`left_out`), and a pass in which nothing else was seen does not count.

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
        self._h: Tensor | None = None  # of the upper layer in the pass under way
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
            raise ValueError("give the number of relations: count=, or per_child= for each child")
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

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        if place == 0:
            h = args[0].detach()
            # the input belongs to whoever gave it
            self._h = h.clone() if self.upper == 0 else h
        if place == 0 and self.lower > self.upper + 1:
            return
        h, self._h = self._h, None
        if output.requires_grad and h is not None and len(h) == len(output):
            output.register_hook(self._receiver(h))

    def _receiver(self, h: Tensor) -> Any:
        """Returns the tensor hook that takes in dL/dz, unless the net was edited or the recorder
        disarmed meanwhile.
        """
        reference, structure, armed = weakref.ref(self), self.net.structure, self._release

        def receive(gradient: Tensor) -> None:
            recorder = reference()
            if recorder is None or recorder._release is not armed or not recorder.armed:
                return
            if recorder.net.structure is structure:
                recorder._record(h, gradient.detach())

        return receive

    def _record(self, h: Tensor, dz: Tensor) -> None:
        dtype = torch.promote_types(torch.promote_types(h.dtype, dz.dtype), torch.float32)
        with plainly(dz.device):
            h, dz = h.to(dtype), dz.to(dtype, copy=True)
            if not has_finite_product(h, dz):
                self.left_out += 1
                return
            seen = self._writable(lambda: OuterProducts((h.shape[1], dz.shape[1])))
            seen.see(h, dz, _current_graph_task_id())

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> OuterProducts:
        count, h, dz, matrix = (seen.get(name) for name in ("count", "h", "dz", "matrix"))
        if not isinstance(count, int) or count < 1 or (h is None and matrix is None):
            raise CheckpointError(
                "the state of a GradientRecorder holds a count, and factors or a matrix"
            )
        restored = OuterProducts((sizes[0], sizes[1]), count)
        if h is not None:
            batch = len(h) if isinstance(h, Tensor) and h.dim() else 0
            factors = [
                checked(f, [batch, n], None, "a factor")
                for f, n in zip((h, dz), sizes, strict=True)
            ]
            restored.factors = [(factors[0], factors[1])]
        restored.matrix = None if matrix is None else checked(matrix, sizes, None, "matrix")
        return restored

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_h": None}
