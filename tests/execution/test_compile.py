"""torch.compile: equal values and gradients, no recompilation while weights change, one after an
edit.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import grapnet as gn

from .figures import inputs, reference_of, require_close, results
from .graphs import BACKEND_NAMES, EDITS, SHAPES, edited

COMPILERS = {"many families": "eager", "families in order": "aot_eager", "partly frozen": "eager"}

backends = pytest.mark.parametrize("backend", BACKEND_NAMES)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Counting:
    """A compiler that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: GraphModule, example: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return make_boxed_func(graph.forward)


def require_equal(compiled: gn.GrapNet, net: gn.GrapNet, batch: int = 4) -> None:
    """Asserts that the compiled net computes what the reference computes."""
    x = inputs(net, batch)
    require_close(results(net, x, compiled), results(reference_of(net), x))


@pytest.mark.parametrize("shape", COMPILERS)
@backends
def test_a_compiled_net_computes_the_same(backend: str, shape: str) -> None:
    net = SHAPES[shape].build()
    net.execution.use(backend)
    require_equal(torch.compile(net, backend=COMPILERS[shape]), net)


@backends
def test_one_graph_without_breaks_once_plans_are_made(backend: str) -> None:
    net = SHAPES["families in order"].build()
    net.execution.use(backend)
    net(inputs(net, 4))
    counting = Counting()
    compiled = torch.compile(
        net, backend=aot_autograd(fw_compiler=counting, bw_compiler=Counting()), fullgraph=True
    )
    assert torch.allclose(compiled(inputs(net, 4)), net(inputs(net, 4)), atol=1e-12)
    assert counting.graphs == 1


@backends
def test_steps_do_not_recompile_and_edits_do_once(backend: str) -> None:
    net = SHAPES["one family"].build()
    net.execution.use(backend)
    x = inputs(net, 4)
    net(x)
    counting = Counting()
    compiled = torch.compile(
        net, backend=aot_autograd(fw_compiler=counting, bw_compiler=Counting())
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    gn.attach(optimizer, net)
    for edit in (None, "cut_one", "rewire", "undo"):
        if edit == "undo":
            net.undo()
        elif edit:
            edited(net, EDITS[edit])
        before = counting.graphs
        train(compiled, optimizer, x, steps=1)
        first = counting.graphs - before
        before = counting.graphs
        train(compiled, optimizer, x, steps=4)
        assert counting.graphs == before, (
            f"{edit}: {counting.graphs - before} graphs made while only weights changed"
        )
        assert first == 1 or (edit in ("rewire", "undo") and first == 0), (
            f"{edit}: {first} graphs made"
        )
        require_equal(compiled, net)


def train(compiled: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(x).square().sum().backward()
        optimizer.step()


@backends
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_edits_than_dynamo_recompiles(backend: str) -> None:
    """Past its limit torch runs the net as it is, which is right all the same."""
    net = SHAPES["full"].build()
    net.execution.use(backend)
    compiled = torch.compile(net, backend="eager")
    for _ in range(4):
        require_equal(compiled, net)
        edited(net, EDITS["cut_one"])
    require_equal(compiled, net)


@pytest.mark.parametrize("backend", BACKEND_NAMES[:-1])
def test_batches_of_any_size(backend: str) -> None:
    net = SHAPES["families in order"].build()
    net.execution.use(backend)
    compiled = torch.compile(net, backend="eager")
    for batch in (4, 1, 4):
        require_equal(compiled, net, batch)
    x = inputs(net, 2, 3)
    assert torch.allclose(compiled(x), net(x), atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(compiled(x[0]), net(x[0]), atol=1e-12)
    with torch.inference_mode():
        assert torch.allclose(compiled(x[0]), net(x[0]), atol=1e-12)


@pytest.mark.parametrize("backend", ["family", "sparse"])
def test_a_choice_made_after_compiling_is_followed(backend: str) -> None:
    net = SHAPES["one family"].build()
    compiled = torch.compile(net, backend="eager")
    require_equal(compiled, net)
    net.execution.use(backend)
    require_equal(compiled, net)
    net.execution.use("reference", 0)
    require_equal(compiled, net)


def test_who_compiles_nothing_does_not_wait_for_the_compiler() -> None:
    program = (
        "import sys, torch, grapnet as gn; from grapnet.rules import ActivationRecorder\n"
        "net = gn.GrapNet([4, 3, 2]); recorder = ActivationRecorder(1); recorder.bind(net)\n"
        "net(torch.ones(2, 4)); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
