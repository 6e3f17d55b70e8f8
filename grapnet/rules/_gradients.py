"""Recorders of the gradient of every relation of a transition, present or absent."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from grapnet._torch import current_graph_task_id
from grapnet.core._errors import GrapNetError
from grapnet.core._graph import Graph
from grapnet.core._index_map import (
    IndexMap,
    as_tensor,
    first_in_order,
    flatnonzero,
    kth_smallest,
    on_host,
)
from grapnet.core._opened import watch
from grapnet.core._transition import Topology, block_sizes
from grapnet.execution import _native
from grapnet.execution._plan import in_transform
from grapnet.spaces._adopted import Adopted

from ._budget import largest_of_each
from ._recorder import E, NetRecorder, plainly
from ._rule import Recorder, require_net

MOST_CELLS = 2**26  # of a matrix
# of the rectangle that are computed at a time: fewer rows make the matrix product slower
CELLS = 2**22
PRESENT = -1.0  # where a relation is: below every |gradient|


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

    def parents(self, rows: slice) -> Tensor:
        """Returns the gradients of all relations from some upper nodes, [rows, n_lower]."""
        return self._product(rows, by_child=False)

    def children(self, rows: slice) -> Tensor:
        """Returns the gradients of all relations to some lower nodes, [rows, n_upper]."""
        return self._product(rows, by_child=True)

    def _product(self, rows: slice, *, by_child: bool) -> Tensor:
        known = self.matrix
        if known is not None:
            known = (known.t() if by_child else known)[rows]
        if not self.factors:
            assert known is not None, "nothing was seen"
            return known.contiguous().div(self.count)
        h, dz = self.joined()
        if by_child:
            product = dz[:, rows].t() @ h
        else:
            product = h[:, rows].t() @ dz
        if known is not None:
            product += known
        return product.div_(self.count)

    def at(self, parents: Tensor, children: Tensor) -> Tensor:
        """Returns the gradients of pairs of rows."""
        if self.matrix is None:
            found = self.factors[0][0].new_zeros(len(parents))
        else:
            found = self.matrix[parents, children]
        if self.factors:
            h, dz = (factor.t().contiguous() for factor in self.joined())  # [n, batch]
            step = max(1, CELLS // 16 // max(1, h.shape[1]))
            for start in range(0, len(parents), step):
                some = slice(start, start + step)
                found[some] += torch.linalg.vecdot(h[parents[some]], dz[children[some]])
        return found / self.count

    def to(self, device: torch.device) -> "OuterProducts":
        """Returns them on a device."""
        tensors = [*(h for h, _ in self.factors), self.matrix]
        if all(tensor is None or tensor.device == device for tensor in tensors):
            return self
        factors = [(h.to(device), dz.to(device)) for h, dz in self.factors]
        matrix = None if self.matrix is None else self.matrix.to(device)
        return OuterProducts(self.shape, self.count, self.task, factors, matrix)

    def carried(self, *indexes: IndexMap | None) -> "OuterProducts":
        """Returns them after rows moved; newborn nodes have gradients of 0."""
        upper, lower = indexes
        factors = [(_moved(h, upper), _moved(dz, lower)) for h, dz in self.factors]
        matrix = self.matrix
        if matrix is not None and upper is not None:
            matrix = upper.carry(matrix)
        if matrix is not None:
            matrix = _moved(matrix, lower)
        n_parents, n_children = self.shape
        if upper is not None:
            n_parents = upper.new_size
        if lower is not None:
            n_children = lower.new_size
        return OuterProducts((n_parents, n_children), self.count, self.task, factors, matrix)

    def copied(self) -> "OuterProducts":
        """Returns an independent copy; factors are never written into."""
        matrix = None if self.matrix is None else self.matrix.clone()
        return OuterProducts(self.shape, self.count, self.task, list(self.factors), matrix)

    def state_dict(self) -> dict[str, Any]:
        """Returns them as numbers and tensors."""
        h, dz = self.joined() if self.factors else (None, None)
        return {"count": self.count, "h": h, "dz": dz, "matrix": self.matrix}


def has_finite_product(h: Tensor, dz: Tensor) -> bool:
    """Returns whether hᵀ·dz is finite, by a bound on its largest number."""
    if not h.numel() or not dz.numel():
        return True
    return bool((h.abs().amax() * dz.abs().amax() * len(h)).isfinite())


def _moved(factor: Tensor, index: IndexMap | None) -> Tensor:
    """Returns a matrix after its columns moved."""
    return factor if index is None else index.carry(factor.t()).t().contiguous()


class BackwardRecorder(NetRecorder[E]):
    """A recorder of backward passes, which leaves out gradients that are not finite."""

    def __init__(self, layers: tuple[int | str, ...], window: int) -> None:
        super().__init__(layers, window)
        self.left_out = 0  # how many gradients, since clear(), were not finite

    @property
    def count(self) -> int:
        """How many backward passes were seen."""
        evidence: Any = self._evidence
        return 0 if evidence is None else evidence.count

    def clear(self) -> None:
        """Forgets what it has seen."""
        super().clear()
        self.left_out = 0

    def _receiver(self, *seen: Any) -> Callable[[Tensor], None]:
        """Returns a tensor hook that records a gradient, together with what the forward pass has
        seen.

        It does nothing once the net was edited or the recorder disarmed.
        """
        reference = weakref.ref(self)
        structure = self.net._structure
        armed = self._release

        def receive(gradient: Tensor) -> None:
            recorder = reference()
            if recorder is None or recorder._release is not armed or not recorder.armed:
                return
            if recorder.net._structure is structure:
                recorder._record(gradient.detach(), *seen)

        return receive

    @abstractmethod
    def _record(self, gradient: Tensor, *seen: Any) -> None: ...


class GradientRecorder(BackwardRecorder[OuterProducts]):
    """Records g_ij = Σ h_i · dL/dz_j over the batch for all pairs of an upper and a lower node.

    h is the output of the upper layer and z the input of the lower nodes, bias included. For a
    present relation this is the gradient of its weight; if a policy runs the transition, it is the
    gradient for the plain sum. It is averaged over the recorded backward passes; for a node that
    was added meanwhile, earlier passes count as 0. A GradScaler scales all of them alike. Forward
    passes from before an edit or before `arm` do not count. Gradients that are not finite are left
    out and counted (`left_out`).

    Args:
        upper: the layer of the parents.
        lower: the layer of the children, below it; the next one by default.
        window: the number of steps that it records before its rule is due.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([3, 2], density=0.5)
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
        self.upper = upper
        self.lower = lower
        self._h: Tensor | None = None  # of the upper layer in the pass under way

    def of(self, parents: Any, children: Any) -> Tensor:
        """Returns the gradients of pairs: uids of parents and, aligned with them, of children."""
        seen = self._here()
        device = self.net.device
        rows = []
        for layer, given in zip(self._numbers(self.net), (parents, children), strict=True):
            uids = as_tensor(given).reshape(-1).to("cpu", torch.int64).contiguous()
            rows.append(self.net._rows(layer, uids).to(device).long())
        with plainly(device):
            return seen.at(*rows)

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
        per_parent: Tensor | None = None,
        ranked: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the absent relations with the largest |gradient|.

        Returns uids of parents, uids of children and |gradients|. Equals of the lowest parent row,
        then of the lowest child row come first. There may be fewer than asked for.

        Args:
            count: how many; of those that `per_child` or `per_parent` lets through, if it is given.
            per_child: how many of each child, [n_lower]; or
            per_parent: how many of each parent, [n_upper].
            ranked: the largest first; otherwise by parent and then by child, which is quicker.

        Raises:
            GrapNetError: nothing was seen.
        """
        parents, children, sizes = self._largest_absent_rows(
            count, per_child=per_child, per_parent=per_parent, ranked=ranked
        )
        upper = self.net.layers[self.upper].uid
        lower = self.net.layers[self.lower].uid
        return upper[parents.cpu()], lower[children.cpu()], sizes

    def _largest_absent_rows(
        self,
        count: int | None,
        *,
        per_child: Tensor | None = None,
        per_parent: Tensor | None = None,
        ranked: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what `largest_absent` does, as rows on the device of the net."""
        net = self.net
        t = net.between(self.upper, self.lower)
        topology = None
        if t is not None:
            topology = net.transitions[t].topology
        absent = Absent(self._here(), topology)
        cells, sizes = _largest(absent, count, per_child, per_parent, ranked, net.device)
        n_lower = max(1, absent.gradients.shape[1])
        return cells // n_lower, cells % n_lower, sizes

    def of_tiles(self, tile: int) -> Tensor:
        """Returns the root mean square of the gradients of every tile, [blocks of upper nodes,
        blocks of lower nodes].
        """
        with plainly(self.net.device):
            return _of_tiles(self._here(), tile)

    def _here(self) -> OuterProducts:
        """Returns the evidence where the net is."""
        return self._seen().to(self.net.device)

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        require_net(net, "GradientRecorder")
        # The results of all transitions to a layer are added up, so all have the gradient of z.
        last = net.entering(self.lower)[-1]
        return [net.layers[self.upper], net.transitions[last]]

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        if place == 0:
            self._h = output.detach()
            # The caller may write into the input.
            if self.upper == 0:
                self._h = self._h.clone()
            return
        h = self._h
        self._h = None
        if output.requires_grad and h is not None and len(h) == len(output):
            output.register_hook(self._receiver(h))

    def _record(self, gradient: Tensor, *seen: Any) -> None:
        dz = gradient
        (h,) = seen
        dtype = torch.promote_types(torch.promote_types(h.dtype, dz.dtype), torch.float32)
        with plainly(dz.device):
            h = h.to(dtype)
            dz = dz.to(dtype, copy=True)
            if not has_finite_product(h, dz):
                self.left_out += 1
                return
            products = self._writable(lambda: OuterProducts((h.shape[1], dz.shape[1])))
            products.see(h, dz, current_graph_task_id())

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> OuterProducts:
        restored = OuterProducts((sizes[0], sizes[1]), seen["count"])
        if seen["h"] is not None:
            restored.factors = [(seen["h"].clone(), seen["dz"].clone())]
        if seen["matrix"] is not None:
            restored.matrix = seen["matrix"].clone()
        return restored

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_h": None}


@dataclass(eq=False)
class TensorGradients:
    """The sum over backward passes of the gradient of a tensor."""

    total: Tensor | None = None
    count: int = 0
    task: int = -1  # which backward pass was the last

    def see(self, gradient: Tensor, task: int) -> None:
        """Adds a gradient; several of the same pass count once."""
        if self.total is None:
            self.total = torch.zeros_like(gradient)
        self.total = self.total.to(gradient).add_(gradient)
        self.count += task != self.task
        self.task = task

    def carried(self, *indexes: IndexMap | None) -> "TensorGradients":
        """Returns what is left after nodes have come or gone: nothing."""
        if all(index is None or index.is_identity for index in indexes):
            return self
        return TensorGradients()

    def copied(self) -> "TensorGradients":
        """Returns an independent copy."""
        total = None if self.total is None else self.total.clone()
        return TensorGradients(total, self.count, self.task)

    def state_dict(self) -> dict[str, Any]:
        """Returns it as numbers and tensors."""
        return {"count": self.count, "total": self.total}


class TensorGradientRecorder(BackwardRecorder[TensorGradients]):
    """Records the gradient of a tensor of an adopted model, also where relations were cut.

    It is averaged over the recorded backward passes, and starts over when nodes are added or
    removed. Where relations were cut, forward passes from before an edit or before `arm` do not
    count. Gradients that are not finite are left out and counted (`left_out`).

    Args:
        net: the adopted model.
        transition: the number of the tensor in `net.transitions`.
        window: the number of steps that it records before its rule is due.

    Examples:
        >>> import grapnet as gn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
        >>> net = gn.adopt(model, torch.randn(2, 3, 9, 9))
        >>> with net.edit() as edit:
        ...     edit.cut(net.relations("1").smallest(fraction=0.5))
        >>> recorder = TensorGradientRecorder(net, 1)
        >>> recorder.arm(net)
        >>> model(torch.randn(2, 3, 9, 9)).sum().backward()
        >>> model[1]._parameters["weight"].grad.shape, recorder.gradient().shape
        (torch.Size([16, 9]), torch.Size([4, 8, 3, 3]))
    """

    def __init__(self, net: Adopted, transition: int, *, window: int = 1) -> None:
        # all spaces whose nodes the tensor has on one of its axes
        name = net.transitions[transition].name
        layers = []
        for number, space in enumerate(net.spaces):
            if any(tensor == name for tensor, _ in space._members):
                layers.append(number)
        super().__init__(tuple(layers), window)
        self.transition = transition

    def gradient(self) -> Tensor:
        """Returns the gradient of the tensor, cells of relations that were cut included."""
        seen = self._seen()
        if seen.total is None:
            raise GrapNetError(
                "this TensorGradientRecorder has seen nothing since the nodes of its tensor changed"
            )
        return seen.total / seen.count

    def largest_absent(
        self,
        count: int | None = None,
        *,
        per_child: Tensor | None = None,
        per_parent: Tensor | None = None,
        ranked: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the absent relations with the largest |gradient|, as
        `GradientRecorder.largest_absent` does; of several numbers it is the norm.
        """
        net = self.net
        weight: Any = net.transitions[self.transition]
        with plainly(net.device):
            norms = weight.norms(self.gradient()).to(net.device)
        absent = Absent(Rectangle(norms), weight.topology)
        cells, sizes = _largest(absent, count, per_child, per_parent, ranked, net.device)
        cells = cells.cpu()
        parents = net.layers[weight.source].uid[cells // norms.shape[1]]
        children = net.layers[weight.target].uid[cells % norms.shape[1]]
        return parents, children, sizes

    def of_tiles(self, tile: int) -> Tensor:
        """Returns the root mean square of the gradients of every tile, as
        `GradientRecorder.of_tiles` does.
        """
        net = self.net
        weight: Any = net.transitions[self.transition]
        with plainly(net.device):
            norms = weight.norms(self.gradient()).to(net.device)
            return _of_tiles(Rectangle(norms), tile)

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        parameter = net.transitions[self.transition].grid.parameter
        taps = _Taps(self)
        # A tensor that has all of its cells is the Parameter itself, any other one is computed.
        plain = parameter.register_hook(taps.receive_plain)
        return [plain.remove, watch(parameter, taps.see_whole)]

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        return ()

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        """Does nothing: no forward call is watched."""

    def _record(self, gradient: Tensor, *seen: Any) -> None:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        with plainly(gradient.device):
            gradient = gradient.to(dtype)
            if not bool(gradient.isfinite().all()):
                self.left_out += 1
                return
            self._writable(TensorGradients).see(gradient, current_graph_task_id())

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> TensorGradients:
        total = None if seen["total"] is None else seen["total"].clone()
        return TensorGradients(total, seen["count"])


class _Taps:
    """The hooks of a TensorGradientRecorder, which they do not keep alive."""

    def __init__(self, recorder: TensorGradientRecorder) -> None:
        self._recorder = weakref.ref(recorder)

    def receive_plain(self, gradient: Tensor) -> None:
        """Takes in the gradient of a Parameter that has all of its cells."""
        recorder = self._recorder()
        if recorder is None or not recorder.armed:
            return
        weight: Any = recorder.net.transitions[recorder.transition]
        if weight.grid.opened is None:
            recorder._record(gradient.detach())

    def see_whole(self, whole: Tensor) -> None:
        """Registers the recorder for the gradient of a tensor that a module has computed."""
        recorder = self._recorder()
        if recorder is None or not recorder.armed or in_transform():
            return
        if torch.is_grad_enabled() and whole.requires_grad:
            whole.register_hook(recorder._receiver())


def gradient_recorder(net: Graph, transition: int, window: int) -> Recorder:
    """Returns a recorder of the gradients of all relations of a transition, absent ones included:
    it has `largest_absent`.
    """
    if isinstance(net, Adopted):
        return TensorGradientRecorder(net, transition, window=window)
    source, target = net.ends[transition]
    return GradientRecorder(source, target, window=window)


@dataclass(frozen=True, eq=False)
class Rectangle:
    """The |gradients| of all pairs as a matrix, read as `OuterProducts` are."""

    matrix: Tensor  # [n_upper, n_lower]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of upper and lower nodes."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def parents(self, rows: slice) -> Tensor:
        """Returns a copy of the entries of some upper nodes, [rows, n_lower]."""
        return self.matrix[rows].clone(memory_format=torch.contiguous_format)

    def children(self, rows: slice) -> Tensor:
        """Returns a copy of the entries of some lower nodes, [rows, n_upper]."""
        return self.matrix[:, rows].t().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class Absent:
    """The |gradients| of a rectangle, with PRESENT where a relation is."""

    gradients: OuterProducts | Rectangle
    topology: Topology | None  # None: no relation is there

    def by_parent(self) -> Iterator[tuple[int, Tensor, int]]:
        """Yields some upper nodes' |gradients| at a time, flat: the number of their first pair,
        the numbers, and how many of these pairs are absent.
        """
        n_upper, n_lower = self.gradients.shape
        step = max(1, CELLS // max(1, n_lower))
        for start in range(0, n_upper if n_lower else 0, step):
            stop = min(start + step, n_upper)
            sizes = self.gradients.parents(slice(start, stop)).abs_().view(-1)
            n_present = 0
            if self.topology is not None:
                child = self.topology.child
                if stop - start == n_upper:
                    rows = self.topology.parents().long()
                else:
                    first, last = self.topology.ptr[[start, stop]].tolist()
                    rows = self.topology.parents(first, last).long() - start
                    child = child[first:last]
                n_present = len(child)
                present = rows * n_lower + child
                sizes.index_fill_(0, present, PRESENT)
            yield start * n_lower, sizes, len(sizes) - n_present

    def by_child(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields some lower nodes' |gradients| at a time, [rows, n_upper], and which rows they
        are.
        """
        n_upper, n_lower = self.gradients.shape
        step = max(1, CELLS // max(1, n_upper))
        for start in range(0, n_lower if n_upper else 0, step):
            rows = slice(start, min(start + step, n_lower))
            sizes = self.gradients.children(rows).abs_()
            if self.topology is not None:
                child = self.topology.child
                upper = self.topology.parents()
                if rows.stop - start < n_lower:
                    inside = flatnonzero((child >= start) & (child < rows.stop))
                    child = child.index_select(0, inside)
                    upper = upper.index_select(0, inside)
                sizes.view(-1).index_fill_(0, (child.long() - start) * n_upper + upper, PRESENT)
            yield rows, sizes


def _of_tiles(gradients: OuterProducts | Rectangle, tile: int) -> Tensor:
    """Returns the root mean square of every tile of a rectangle, some blocks of upper nodes at a
    time.
    """
    n_upper, n_lower = gradients.shape
    upper = block_sizes(n_upper, tile)
    lower = block_sizes(n_lower, tile)
    found = [gradients.parents(slice(0, 0)).new_zeros(0, len(lower))]
    step = max(1, CELLS // max(1, n_lower * tile)) * tile
    for start in range(0, n_upper, step):
        squares = gradients.parents(slice(start, min(start + step, n_upper))).square_()
        squares = pad(squares, (0, -n_lower % tile, 0, -len(squares) % tile))
        found.append(squares.view(-1, tile, len(lower), tile).sum((1, 3)))
    areas = (upper[:, None] * lower).to(found[0].device)
    return (torch.cat(found) / areas).sqrt_()


def _largest(
    absent: Absent,
    count: int | None,
    per_child: Tensor | None,
    per_parent: Tensor | None,
    ranked: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Returns the absent pairs that `GradientRecorder.largest_absent` describes, by number, and
    their |gradients|.
    """
    if count is None and per_child is None and per_parent is None:
        raise ValueError("give the number of relations: count=, per_child= or per_parent=")
    with plainly(device):
        if per_child is not None:
            quotas = as_tensor(per_child).to(device, torch.int64)
            cells, sizes = largest_of_children(absent, quotas)
        elif per_parent is not None:
            quotas = as_tensor(per_parent).to(device, torch.int64)
            cells, sizes = largest_of_parents(absent, quotas)
        else:
            cells, sizes = largest_of_all(absent, count or 0)
        if ranked:
            order = sizes.argsort(descending=True, stable=True)[:count]
            cells = cells[order]
            sizes = sizes[order]
        elif count is not None and len(cells) > count:
            best = first_in_order(sizes, count, largest=True)
            cells = cells.index_select(0, best)
            sizes = sizes.index_select(0, best)
        return cells, sizes


def largest_of_all(absent: Absent, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` absent pairs with the largest |gradients|, by number, and those.

    The number of a pair is parent row · n_lower + child row. A running best of `count` pairs lets
    every further chunk bring only what beats its last.
    """
    if count == 0 or 0 in absent.gradients.shape:
        return _none(absent)
    numbers: Tensor | None = None
    sizes: Tensor | None = None
    least = PRESENT
    for offset, chunk, n_absent in absent.by_parent():
        if on_host(chunk.device):
            found = _beyond(chunk, least, count, is_first=sizes is None)
        else:
            found = first_in_order(chunk, min(count, n_absent), largest=True)
        further = chunk.index_select(0, found)
        if numbers is None or sizes is None:
            numbers = found.long() + offset
            sizes = further
        else:
            numbers = torch.cat([numbers, found.long() + offset])
            sizes = torch.cat([sizes, further])
        if len(sizes) > count:
            best = first_in_order(sizes, count, largest=True)
            numbers = numbers.index_select(0, best)
            sizes = sizes.index_select(0, best)
        if len(sizes) == count and on_host(chunk.device):
            least = float(sizes.amin())
    assert numbers is not None
    assert sizes is not None
    return numbers, sizes


def _beyond(sizes: Tensor, least: float, count: int, *, is_first: bool) -> Tensor:
    """Returns the positions of the sizes beyond `least`; of the first chunk as few of them as
    contain the `count` largest.
    """
    if is_first:
        found = flatnonzero(sizes > max(least, _low_bar(sizes, count)))
        # Otherwise the bar was too high.
        if len(found) >= count:
            return found
    return flatnonzero(sizes > least)


def _low_bar(sizes: Tensor, count: int) -> float:
    """Returns a value that `count` of the sizes, and few more, most likely exceed.

    It looks at every 64th of them.
    """
    sample = sizes[::64].contiguous()
    expected = count / max(1, len(sizes)) * len(sample)
    rank = int(expected + 5 * expected**0.5) + 8  # five standard deviations on the safe side
    if rank > len(sample):
        return PRESENT
    return float(kth_smallest(sample, len(sample) - rank + 1))


def largest_of_children(absent: Absent, quotas: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same for every child, as many as its quota."""
    n_upper, n_lower = absent.gradients.shape
    none = _none(absent)
    numbers = [none[0]]
    sizes = [none[1]]
    for rows, chunk in absent.by_child():
        found = _largest_of_rows(chunk, quotas[rows])
        numbers.append((found % n_upper).long() * n_lower + found // n_upper + rows.start)
        sizes.append(chunk.view(-1).index_select(0, found))
    order = torch.cat(numbers).argsort()
    return torch.cat(numbers)[order], torch.cat(sizes)[order]


def largest_of_parents(absent: Absent, quotas: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same for every parent, as many as its quota."""
    n_lower = absent.gradients.shape[1]
    none = _none(absent)
    numbers = [none[0]]
    sizes = [none[1]]
    for offset, chunk, _ in absent.by_parent():
        rows = chunk.view(-1, n_lower)
        first = offset // n_lower
        found = _largest_of_rows(rows, quotas[first : first + len(rows)]).sort().values
        numbers.append(found.long() + offset)
        sizes.append(chunk.index_select(0, found))
    return torch.cat(numbers), torch.cat(sizes)


def _largest_of_rows(sizes: Tensor, quotas: Tensor) -> Tensor:
    """Returns the positions of the largest absent entries of every row of [rows, n], counted
    through all rows.
    """
    n = sizes.shape[1]
    flat = sizes.view(-1)
    wanted = quotas.clamp(max=n)
    if _native.reads(sizes):
        ptr = torch.arange(0, sizes.numel() + 1, n, dtype=torch.int32, device="cpu")
        return _native.largest_of_rows(flat, ptr, wanted, least=0)
    of_row = torch.arange(len(sizes), device=sizes.device).repeat_interleave(n)
    chosen = largest_of_each(flat, of_row, wanted)
    return flatnonzero(chosen & (flat > PRESENT))


def _none(absent: Absent) -> tuple[Tensor, Tensor]:
    sizes = absent.gradients.parents(slice(0, 0)).reshape(-1)
    return sizes.long(), sizes
