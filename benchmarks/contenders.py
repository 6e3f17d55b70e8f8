"""What the execution benchmark runs: training steps and forward passes of GrapNets and of their
contenders.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import prune

import grapnet as gn

Step = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """One transition to run: its size, how much of it exists, the batch, and whether the input
    wants gradients.
    """

    parents: int = 1024
    children: int = 4096
    batch: int = 256
    density: float = 1.0
    input_gradient: bool = True
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def cells_times_batch(self) -> int:
        """How many products the dense layer computes."""
        return self.parents * self.children * self.batch

    def data(self) -> tuple[Tensor, Tensor]:
        """Returns an input and a target."""
        where = {"device": self.device, "dtype": self.dtype}
        x = torch.randn(self.batch, self.parents, **where).requires_grad_(self.input_gradient)
        return x, torch.randn(self.batch, self.children, **where)

    def net(self, backend: str = "auto") -> gn.GrapNet:
        """Returns a net of this one transition, its relations drawn at random."""
        sizes = [self.parents, self.children]
        net = gn.GrapNet(sizes, density=self.density, device=self.device, dtype=self.dtype)
        net.execution.use(backend)
        return net


def grown_head(device: str = "cpu") -> gn.GrapNet:
    """Returns the paper's head after five tasks: 48 nodes a task, each leading to the classes seen
    by then.
    """
    relations = [(node, label) for node in range(240) for label in range(2 * (node // 48 + 1))]
    parents, children = torch.tensor(relations).T
    full = torch.cartesian_prod(torch.arange(49), torch.arange(240)).T
    return gn.GrapNet.from_relations(
        [49, 240, 10], [tuple(full), (parents, children)], device=device
    )


def family_net(work: Work, families: int, backend: str = "auto") -> gn.GrapNet:
    """Returns a net of equal families: every n-th of the parents leads to every n-th of the
    children.
    """
    upper = work.parents // families
    lower = work.children // families
    blocks = [
        torch.cartesian_prod(torch.arange(upper) + f * upper, torch.arange(lower) + f * lower)
        for f in range(families)
    ]
    parents, children = torch.cat(blocks).T
    sizes = [work.parents, work.children]
    net = gn.GrapNet.from_relations(
        sizes, [(parents, children)], device=work.device, dtype=work.dtype
    )
    net.execution.use(backend)
    return net


def tile_net(work: Work, tile: int, backend: str = "tiles") -> gn.GrapNet:
    """Returns a net of one transition whose relations come in tiles, drawn at random."""
    sizes = [work.parents, work.children]
    net = gn.GrapNet(sizes, density=work.density, tile=tile, device=work.device, dtype=work.dtype)
    net.execution.use(backend)
    return net


def linear(work: Work) -> nn.Linear:
    """Returns the dense layer of the same size."""
    return nn.Linear(work.parents, work.children, device=work.device, dtype=work.dtype)


def pruned_linear(work: Work) -> nn.Linear:
    """Returns the dense layer with a mask over its weights, as torch.nn.utils.prune keeps it."""
    layer = linear(work)
    prune.random_unstructured(layer, "weight", 1 - work.density)
    return layer


class CsrLinear(nn.Module):
    """A layer over torch's own sparse matrices: compressed rows, one a child, trained through their
    values.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        kept = torch.rand(work.children, work.parents, device=work.device) < work.density
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
            matrix = (
                torch.randn(work.children, work.parents, device=work.device) * kept
            ).to_sparse_csr()
        self.rows = matrix.crow_indices()
        self.columns = matrix.col_indices()
        self.shape = matrix.shape
        self.weight = nn.Parameter(matrix.values().to(work.dtype) / work.parents**0.5)
        self.bias = nn.Parameter(torch.zeros(work.children, device=work.device, dtype=work.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Computes the layer; torch gives a sparse matrix on the left of the product a backward."""
        matrix = torch.sparse_csr_tensor(
            self.rows, self.columns, self.weight, self.shape, check_invariants=False
        )
        return (matrix @ x.t()).t() + self.bias


def training_step(
    model: nn.Module, x: Tensor, target: Tensor, *, fused: bool | None = None
) -> Step:
    """Returns one step of Adam: forward, loss, backward, update; a GrapNet's optimizer follows its
    edits.
    """
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    if isinstance(model, gn.GrapNet):
        gn.attach(optimizer, model)
    loss = mse_loss if target.is_floating_point() else cross_entropy

    def step() -> None:
        optimizer.zero_grad()
        x.grad = None
        loss(model(x), target).backward()
        optimizer.step()

    return step


def autocast_step(model: nn.Module, x: Tensor, target: Tensor) -> Step:
    """Returns one step of Adam, the forward pass under autocast to bfloat16 on a CPU."""
    optimizer = torch.optim.Adam(model.parameters())
    if isinstance(model, gn.GrapNet):
        gn.attach(optimizer, model)

    def step() -> None:
        optimizer.zero_grad()
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        mse_loss(output.float(), target).backward()
        optimizer.step()

    return step


def transition_step(model: nn.Module, x: Tensor, gradient: Tensor) -> Step:
    """Returns forward and backward alone, for a gradient of the output that is given."""

    def step() -> None:
        model.zero_grad()
        x.grad = None
        model(x).backward(gradient)

    return step


def captured_step(model: nn.Module, x: Tensor, gradient: Tensor) -> Step:
    """Returns forward and backward as a CUDA graph, which the host launches as a whole."""
    step = transition_step(model, x, gradient)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    model.zero_grad()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).backward(gradient)
    return graph.replay


def backward_step(model: nn.Module, x: Tensor, target: Tensor) -> Step:
    """Returns forward, loss and backward without the update."""

    def step() -> None:
        model.zero_grad()
        x.grad = None
        mse_loss(model(x), target).backward()

    return step


def forward_pass(model: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    """Returns a forward pass without gradients."""

    def run() -> None:
        with torch.no_grad():
            model(x)

    return run
