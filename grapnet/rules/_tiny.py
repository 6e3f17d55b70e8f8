"""TINY: new nodes that express what a layer cannot express by changing its own weights.

With x the inputs of the nodes to add, b what the layer below reads and v the desired update of its
sums, minus the gradient: the layer below can express the least squares fit of v by b, and the rest
is what new nodes are for. They are the leading singular vectors of S^(-1/2) N, where S is the
second moment of x and N the cross moment of x and the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from grapnet._network import GrapNet
from grapnet._torch import current_graph_task_id
from grapnet.core._activation import activation_function
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError, GrapNetError
from grapnet.core._index_map import IndexMap
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._space import Space

from ._gradients import BackwardRecorder, has_finite_product
from ._recorder import plainly
from ._rule import sources_of, targets_of
from ._steepest import readers_of, rises, why_not_steepest, writer_of
from ._taps import PASS, Tap, watch_taps

# Eigenvalues of S and singular values that count, as shares of the largest.
LEAST_EIGENVALUE = 1e-6
LEAST_SINGULAR_VALUE = 1e-3
# Eigenvalues of the second moment of a layer below which its nodes depend on each other.
DEPENDENT = 1e-12
# The share of the desired update that counts as nothing.
ROUNDING = 1e-9
# A number at which the slope of an activation is taken.
NEAR_ZERO = 2.0**-100


@dataclass(eq=False)
class ReaderMoments:
    """Sums over rows of products, for one layer or module below; the last of x and of b is 1.

    Attributes:
        rows: how many were seen.
        own: b bᵀ, [reads, reads].
        own_desired: b vᵀ, [reads, below].
        cross: x bᵀ, [above, reads].
        desired: x vᵀ, [above, below].
    """

    rows: int
    own: Tensor
    own_desired: Tensor
    cross: Tensor
    desired: Tensor

    @classmethod
    def of(cls, x: Tensor, b: Tensor, v: Tensor) -> ReaderMoments:
        """Returns those of some rows."""
        return cls(len(x), b.t() @ b, b.t() @ v, x.t() @ b, x.t() @ v)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the sums by name."""
        return {name: part for name, part in vars(self).items() if name != "rows"}

    def plus(self, other: ReaderMoments) -> ReaderMoments:
        """Returns the sums over the rows of both, where the other's are."""
        parts = {}
        for name, part in other.tensors().items():
            parts[name] = part + getattr(self, name).to(part.device)
        return ReaderMoments(self.rows + other.rows, **parts)


@dataclass(eq=False)
class Bottleneck:
    """What a BottleneckRecorder has seen.

    Attributes:
        inputs: Σ x xᵀ over the rows of all readers, [above, above] float64; None before the first.
        readers: the sums of each reader, by its number.
        count: how many backward passes there were.
        task: which of them was the last.
    """

    inputs: Tensor | None = None
    readers: dict[int, ReaderMoments] = field(default_factory=dict)
    count: int = 0
    task: int = -1

    def see(self, number: int, x: Tensor, b: Tensor, v: Tensor, task: int) -> None:
        """Adds the rows of a backward pass that reached one reader."""
        inputs = x.t() @ x
        if self.inputs is not None:
            inputs += self.inputs.to(inputs.device)
        self.inputs = inputs
        moments = ReaderMoments.of(x, b, v)
        if number in self.readers:
            moments = self.readers[number].plus(moments)
        self.readers = {**self.readers, number: moments}
        self.count += task != self.task
        self.task = task

    def carried(self, *indexes: IndexMap | None) -> Bottleneck:
        """Returns what is left after nodes have come or gone: nothing."""
        if all(index is None or index.is_identity for index in indexes):
            return self
        return Bottleneck()

    def copied(self) -> Bottleneck:
        """Returns an independent copy; its tensors are never written into."""
        return Bottleneck(self.inputs, dict(self.readers), self.count, self.task)

    def state_dict(self) -> dict[str, Any]:
        """Returns it as numbers and tensors."""
        readers = {}
        for number, moments in self.readers.items():
            readers[str(number)] = {"rows": moments.rows, **moments.tensors()}
        return {"count": self.count, "inputs": self.inputs, "readers": readers}


@dataclass(frozen=True, eq=False)
class OptimalNodes:
    """Nodes to add to a layer or a space, the most useful first.

    Attributes:
        incoming: the weights from each node above and, last, the bias, [nodes, above + 1].
        outgoing: the weights to each node below, reader after reader, [nodes, below].
        gains: by how much each node lowers the loss, to first order and for an amplitude of 1.
    """

    incoming: Tensor
    outgoing: Tensor
    gains: Tensor

    def __len__(self) -> int:
        return len(self.gains)

    def scaled(self, count: int, amplitude: float) -> OptimalNodes:
        """Returns the first nodes, the product of whose weights is multiplied by an amplitude."""
        root = amplitude**0.5
        return OptimalNodes(
            self.incoming[:count] * root, self.outgoing[:count] * root, self.gains[:count]
        )


def optimal_nodes(
    inputs: Tensor,
    readers: Sequence[ReaderMoments],
    available: Sequence[Tensor],
    *,
    has_bias: bool = True,
    slope: float = 1.0,
) -> OptimalNodes:
    """Returns the nodes that express most of what the readers cannot.

    A pair of incoming and outgoing weights may change its sign without changing their product. The
    sign is the one with which the node is active for the mean input.

    Args:
        inputs: Σ x xᵀ, [above, above], the last of x being 1.
        readers: the moments of every layer or module below.
        available: which numbers each reader can change, [reads, below] bool.
        has_bias: whether new nodes have a bias.
        slope: of the activation at 0.
    """
    rows = sum(moments.rows for moments in readers)
    second = inputs / rows
    parts = []
    for moments, own in zip(readers, available, strict=True):
        rest = moments.desired - moments.cross @ _expressible(moments, own.to(inputs.device))
        parts.append(rest / moments.rows)
    cross = torch.cat(parts, 1)  # N, [above, below]
    desired = torch.cat([moments.desired / moments.rows for moments in readers], 1)
    mean = second[:, -1]
    if not has_bias:
        second = second[:-1, :-1]
        cross = cross[:-1]
        desired = desired[:-1]
    values, vectors = torch.linalg.eigh(second)
    kept = values > LEAST_EIGENVALUE * values[-1]
    root = vectors[:, kept] * values[kept].rsqrt() @ vectors[:, kept].t()  # S^(-1/2)
    left, strength, right = torch.linalg.svd(root @ cross, full_matrices=False)
    least = LEAST_SINGULAR_VALUE * strength[:1].sum()
    # What is left of a desired update that the readers express is rounding.
    least = torch.maximum(least, ROUNDING * torch.linalg.norm(root @ desired))
    found = int((strength > least).sum())
    shares = strength[:found].sqrt()
    incoming = (root @ left[:, :found] * shares).t()
    outgoing = right[:found] * shares[:, None]
    signs = torch.where(incoming @ mean[: incoming.shape[1]] < 0, -1.0, 1.0)[:, None]
    incoming = incoming * signs
    if not has_bias:
        incoming = nn.functional.pad(incoming, (0, 1))
    return OptimalNodes(incoming, outgoing * signs, abs(slope) * strength[:found] ** 2)


def _expressible(moments: ReaderMoments, available: Tensor) -> Tensor:
    """Returns the change of its weights with which a reader comes nearest to the desired update,
    [reads, below].

    Children that can change the same weights are solved together.
    """
    found = torch.zeros_like(moments.own_desired)
    patterns, which = available.unique(dim=1, return_inverse=True)
    for number, pattern in enumerate(patterns.unbind(1)):
        at = pattern.nonzero().flatten()
        columns = (which == number).nonzero().flatten()
        own = moments.own[at][:, at]
        inverse = torch.linalg.pinv(own, rtol=DEPENDENT, hermitian=True)
        found[at[:, None], columns] = inverse @ moments.own_desired[at][:, columns]
    return found


class BottleneckRecorder(BackwardRecorder[Bottleneck]):
    """Records what the best nodes to add to a layer, or to a space, are computed from (TINY).

    These are second moments, in float64: of the inputs of the nodes to add, of what the layers
    below read, and of both with the desired update, which is minus the gradient of their sums. The
    gradient is multiplied with the number of rows of the pass, so that for a loss that is a mean
    over rows it is the gradient of the loss of a row; `amplitude` makes up for other losses. Nodes
    that come or go in one of the layers let it begin anew. Forward passes from before an edit or
    before `arm` do not count. Gradients that are not finite are left out and counted (`left_out`).

    Args:
        net: the net, or the adopted model.
        layer: the number of a hidden layer; or a space, or its name: one Linear writes it, Linears
            read it, and only an activation lies between.
        window: the number of steps that it records before its rule is due.

    Raises:
        EditError: the layer is not hidden, or the space is of another kind.

    Examples:
        >>> import grapnet as gn
        >>> generator = torch.Generator().manual_seed(1)
        >>> net = gn.GrapNet([4, 3, 2], generator=generator)
        >>> recorder = BottleneckRecorder(net, 1)
        >>> recorder.arm(net)
        >>> net(torch.randn(8, 4, generator=generator)).square().mean().backward()
        >>> nodes = recorder.nodes()
        >>> nodes.incoming.shape, nodes.outgoing.shape
        (torch.Size([2, 5]), torch.Size([2, 2]))
    """

    def __init__(
        self, net: GrapNet | Adopted, layer: int | str | Space, *, window: int = 1
    ) -> None:
        self._sources: list[int] = []
        # of each reader: the numbers of the layers that it reads
        self._reads: list[list[int]] = []
        self._targets: list[int] = []
        self._writer: Any = None
        self._readers: list[Any] = []
        if isinstance(net, Adopted):
            space = layer
            if not isinstance(space, Space):
                space = net.space(str(layer))
            self.layer = space.name
            layers = self._look_at_space(net, space)
        else:
            assert isinstance(layer, int)
            self.layer = layer
            layers = self._look_at_layer(net, layer)
        super().__init__(tuple(layers), window)
        # what was computed last: from which moments, at which version of the net
        self._known: tuple[Tensor, int, OptimalNodes] | None = None
        self._forget()

    def nodes(self) -> OptimalNodes:
        """Returns the best nodes to add.

        Raises:
            GrapNetError: nothing was seen since nodes came or went beside the layer.
            EditError: the activation does not pass through 0 with a slope.
        """
        seen = self._seen()
        n_readers = max(len(self._targets), len(self._readers))
        if seen.inputs is None or len(seen.readers) < n_readers:
            raise GrapNetError(
                "this BottleneckRecorder has not seen a backward pass through all that reads"
                f" {self.layer!r} since nodes came or went beside it"
            )
        net: Any = self.net
        if self._known is not None:
            inputs, version, nodes = self._known
            if inputs is seen.inputs and version == net.version:
                return nodes
        nodes = self._computed(net, seen.inputs, [seen.readers[n] for n in range(n_readers)])
        self._known = (seen.inputs, net.version, nodes)
        return nodes

    def _computed(self, net: Any, inputs: Tensor, readers: Sequence[ReaderMoments]) -> OptimalNodes:
        has_bias = True
        if isinstance(net, Adopted):
            space = net.space(str(self.layer))
            available = [_available_in(net, reader) for reader in self._readers]
            slope = _slope_behind(net, space)
            has_bias = self._writer.module(net).bias is not None
        else:
            available = [_available_to(net, target) for target in self._targets]
            slope = _slope_of(net.layers[self.layer].default_activation)
        with plainly(inputs.device):
            return optimal_nodes(inputs, readers, available, has_bias=has_bias, slope=slope)

    def _look_at_layer(self, net: GrapNet, layer: int) -> list[int]:
        """Finds the neighbours of a layer; returns all layers that moments are of."""
        last = len(net.layers) - 1
        if not 0 < layer < last:
            raise EditError(f"only hidden layers, 1 to {last - 1}, grow; got {layer}")
        self._sources = sources_of(net, layer)
        self._targets = targets_of(net, layer)
        self._reads = [sources_of(net, target) for target in self._targets]
        return sorted({*self._above(), *self._targets})

    def _look_at_space(self, net: Adopted, space: Space) -> list[int]:
        """Finds the modules beside a space; returns all spaces that moments are of."""
        problem = why_not_optimal(net, space)
        if problem:
            raise EditError(f"TINY cannot grow {space.name}: {problem}")
        self._writer = writer_of(net, space)
        self._readers = readers_of(net, space)
        tensors = {*space.writers, *space.readers}
        layers = []
        for number, other in enumerate(net.spaces):
            if any(name in tensors for name, _ in other._members):
                layers.append(number)
        return layers

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        self._forget()
        if not isinstance(net, Adopted):
            return super()._watch(net)
        taps = [PASS, Tap(self._writer.path, "in", -1, ())]
        for reader in self._readers:
            taps.append(Tap(reader.path, "in", -1, ()))
            taps.append(Tap(reader.path, "out", -1, ()))
        return watch_taps(self, net, taps)

    def _modules(self, net: Any) -> Sequence[nn.Module]:
        modules: list[nn.Module] = [net.layers[number] for number in self._above()]
        for target in self._targets:
            # The results of all transitions to a layer are added up, so all have the gradient.
            modules.append(net.transitions[net.entering(target)[-1]])
        return modules

    def _above(self) -> list[int]:
        """Returns the layers of a net whose outputs are recorded."""
        return sorted(set(self._sources).union(*self._reads))

    def _forget(self) -> None:
        # outputs of layers of a net in the pass under way
        self._outputs: dict[int, Tensor] = {}
        # of each reader of a space: inputs of the writer, and its own, that are not used yet
        self._inputs: list[list[Tensor]] = [[] for _ in self._readers]
        self._own: list[list[Tensor]] = [[] for _ in self._readers]

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        above = self._above()
        if place < len(above):
            # The caller may write into the input of the net.
            self._outputs[above[place]] = output.detach().clone()
            return
        number = place - len(above)
        x = self._joined(self._sources)
        b = self._joined(self._reads[number])
        if output.requires_grad and x is not None and b is not None and len(x) == len(output):
            output.register_hook(self._receiver(number, x, b))

    def _joined(self, layers: list[int]) -> Tensor | None:
        """Returns the outputs of some layers beside each other; None if one is missing."""
        parts = [self._outputs[number] for number in layers if number in self._outputs]
        if len(parts) < len(layers):
            return None
        return torch.cat(parts, 1)

    def _tapped(self, place: int, tensor: Tensor) -> None:
        """Takes in the input of the writer, and then the input and output of each reader."""
        if place == 0:
            self._forget()
            return
        if not torch.is_grad_enabled():
            return
        if place == 1:
            x = tensor.detach().clone()
            for waiting in self._inputs:
                waiting.append(x)
            return
        number, is_output = divmod(place - 2, 2)
        if not is_output:
            self._own[number].append(tensor.detach().clone())
            return
        if self._inputs[number] and self._own[number] and tensor.requires_grad:
            x = self._inputs[number].pop(0)
            b = self._own[number].pop(0)
            tensor.register_hook(self._receiver(number, x, b))

    def _record(self, gradient: Tensor, *seen: Any) -> None:
        number, x, b = seen
        if gradient.dim() > 1:
            x, b, gradient = (part.flatten(0, -2) for part in (x, b, gradient))
        else:
            x, b, gradient = (part[None] for part in (x, b, gradient))
        with plainly(gradient.device):
            if not has_finite_product(torch.cat([x, b], 1), gradient):
                self.left_out += 1
                return
            one = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
            x = torch.cat([x.double(), one], 1)
            b = torch.cat([b.double(), one], 1)
            desired = gradient.double() * -len(gradient)
            self._writable(Bottleneck).see(number, x, b, desired, current_graph_task_id())

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> Bottleneck:
        readers = {}
        for number, moments in seen["readers"].items():
            readers[int(number)] = ReaderMoments(**moments)
        return Bottleneck(seen["inputs"], readers, seen["count"])

    def __getstate__(self) -> dict[str, Any]:
        empty = [[] for _ in self._readers]
        own = {
            "_outputs": {},
            "_inputs": empty,
            "_own": [[] for _ in self._readers],
            "_known": None,
        }
        return {**super().__getstate__(), **own}


def _available_to(net: GrapNet, target: int) -> Tensor:
    """Returns which weights and biases of a layer of a net can change, [reads, below] bool."""
    parts = []
    for t in net.entering(target):
        transition = net.transitions[t]
        topology = transition.topology
        part = torch.zeros(
            len(net.layers[transition.source]), topology.n_children, dtype=torch.bool
        )
        free = torch.ones(topology.n_relations, dtype=torch.bool)
        free[transition.frozen_at.cpu().long()] = False
        part[topology.parents().cpu().long(), topology.child.cpu().long()] = free
        parts.append(part)
    layer = net.layers[target]
    rows = torch.arange(len(layer), dtype=torch.int32, device=net.device)
    biases = ~layer._frozen_bits(rows).cpu()
    return torch.cat([*parts, biases[None]])


def _available_in(net: Adopted, reader: Any) -> Tensor:
    """Returns which weights and biases of a Linear can change, [reads, below] bool."""
    module = reader.module(net)
    out_features, in_features = reader.canonical(net._grids()[reader.name].whole).shape
    free = torch.full((in_features + 1, out_features), True)
    free[:-1] = net._grids()[reader.name].parameter.requires_grad
    free[-1] = module.bias is not None and module.bias.requires_grad
    return free


def _slope_of(activation: str) -> float:
    """Returns the slope of an activation above 0; raises EditError if it is not 0 there."""
    z = torch.tensor(NEAR_ZERO, dtype=torch.float64, device="cpu", requires_grad=True)
    with torch.enable_grad():
        h = activation_function(activation)(z)
        (slope,) = torch.autograd.grad(h, z)
    return _required_slope(h.item(), slope, repr(activation))


def _slope_behind(net: Adopted, space: Space) -> float:
    """Returns the slope above 0 of what lies between the writer of a space and its readers."""
    slopes = []
    for value, slope in rises(net, space, NEAR_ZERO):
        slopes.append(_required_slope(value, slope, f"that of {space.name}"))
    return min(slopes)


def _required_slope(value: float, slope: Tensor, activation: str) -> float:
    least = float(slope.abs().min())
    if abs(value) > 1e3 * NEAR_ZERO or least == 0:
        raise EditError(
            f"TINY needs an activation that passes through 0 with a slope, and {activation} does"
            ' not; use init="zero_outgoing"'
        )
    return least


def why_not_optimal(net: Adopted, space: Space) -> str:
    """Returns why TINY is not defined for a space; empty if it is."""
    problem = why_not_steepest(net, space)
    if problem:
        return problem
    for name in (*space.writers, *space.readers):
        grid = net._grids()[name]
        if len(grid.shape) != 2:
            return f"{name} belongs to a convolution, and Linears must write and read it"
        if grid.opened is not None:
            return f"relations of {name} were cut or frozen one by one"
    return ""


def require_no_removals(edit: Any) -> None:
    """Raises EditError if the edit removes nodes, of which moments know nothing."""
    if len(edit.removals):
        raise EditError(
            "TINY grows a net as it is, and this edit removes nodes; let the rules be due at"
            " different steps"
        )


def add_to_layer(
    net: GrapNet, edit: Edit, number: int, nodes: OptimalNodes, owner: str | None
) -> None:
    """Adds nodes to a layer of a net, with relations to all nodes above and below."""
    edit.remark(
        f"widens layer {number} by {len(nodes)} optimal nodes", layer=number, nodes=len(nodes)
    )
    if len(nodes) == 0:
        return
    new = edit.add_nodes(number, len(nodes), owner=owner, bias=nodes.incoming[:, -1])
    sources = sources_of(net, number)
    widths = [len(net.layers[source]) for source in sources]
    for source, part in zip(sources, nodes.incoming[:, :-1].split(widths, 1), strict=True):
        edit.connect(net.layers[source], new, weights=part.t())
    targets = targets_of(net, number)
    widths = [len(net.layers[target]) for target in targets]
    for target, part in zip(targets, nodes.outgoing.split(widths, 1), strict=True):
        edit.connect(new, net.layers[target], weights=part)


def add_to_space(
    net: Adopted, edit: Any, space: Space, nodes: OptimalNodes, owner: str | None
) -> None:
    """Adds nodes to a space of an adopted model."""
    edit.remark(
        f"widens {space.name} by {len(nodes)} optimal nodes", space=space.name, nodes=len(nodes)
    )
    if len(nodes) == 0:
        return
    writer = writer_of(net, space)
    values = {writer.name: writer.native(nodes.incoming[:, :-1]).contiguous()}
    for name in space.riders:
        values[name] = nodes.incoming[:, -1]
    readers = readers_of(net, space)
    widths = [reader.canonical(net._grids()[reader.name].whole).shape[0] for reader in readers]
    for reader, part in zip(readers, nodes.outgoing.split(widths, 1), strict=True):
        values[reader.name] = reader.native(part.t()).contiguous()
    edit.add_nodes(space, len(nodes), owner=owner, readers="alike", values=values)
