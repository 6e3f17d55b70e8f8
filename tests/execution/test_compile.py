"""torch.compile: one graph without breaks for every backend, equal values and gradients, and one
compilation more when sizes change for the first time.
"""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import grapnet as gn
from grapnet.spaces import dynamic_sizes
from tests.rounding import bounds

from .figures import differences, inputs, reference_of, require_close, results, slope
from .graphs import BACKEND_NAMES, DEVICES, EDITS, SHAPES, edited, runs_with

ALL = [*BACKEND_NAMES, "reference"]
# The compiler of each shape: every shape where there is a GPU, a few of them on a CPU alone.
COMPILERS = {
    "many families": "eager",
    "families in order": "aot_eager",
    "partly frozen": "aot_eager",
    "ragged": "eager",
}
if torch.cuda.is_available():
    COMPILERS = {name: COMPILERS.get(name, "aot_eager") for name in SHAPES}

backends = pytest.mark.parametrize("backend", ALL)
devices = pytest.mark.parametrize("device", DEVICES)
# of a thread's first backward on CUDA
pytestmark = [
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    # of torch's own modules, when inductor is imported
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def require_equal(
    compiled: Callable[[Tensor], Tensor], net: gn.GrapNet, batch: int = 4, leading: int = 1
) -> None:
    """Asserts that the compiled net computes what the reference computes."""
    x = inputs(net, *[1] * (leading - 1), batch)
    require_close(results(net, x, compiled), results(reference_of(net), x))


def compiled(model: Any, backend: Any = "eager") -> Any:
    """Returns a model compiled as one graph."""
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.parametrize("shape", COMPILERS)
@backends
@devices
def test_a_fresh_net_is_one_graph(backend: str, shape: str, device: str) -> None:
    net = SHAPES[shape].build(device=device)
    if not runs_with(net, backend):
        return
    require_equal(compiled(net, COMPILERS[shape]), net)
    if shape == "ragged":
        edited(net, EDITS["cut_one"])
        require_equal(compiled(net), net)


def test_a_copy_of_a_net_that_was_compiled_in_place_runs_itself() -> None:
    net = gn.GrapNet([4, 8, 3])
    x = torch.randn(5, 4)
    net.compile(backend="eager")
    before = net(x).detach()
    double = copy.deepcopy(net)
    with double.edit() as edit:
        edit.remove_nodes(double.layers[1][:4])
    assert not torch.allclose(double(x), before)
    assert torch.equal(net(x), before)


@backends
@devices
def test_training_evaluation_and_autocast(backend: str, device: str) -> None:
    net = SHAPES["families in order"].build(torch.float32, device)
    if not runs_with(net, backend):
        return
    run = compiled(net, "aot_eager")
    x = inputs(net, 4)
    for training in (True, False):
        net.train(training)
        with torch.set_grad_enabled(training):
            assert torch.allclose(run(x), net(x), atol=1e-6)
    with torch.inference_mode():
        assert torch.allclose(run(x), net(x), atol=1e-6)
    with torch.autocast(device, torch.bfloat16):
        output = run(x)
        plain = net(x)
    assert output.dtype == plain.dtype
    assert torch.allclose(output, plain, atol=0.05)
    output.float().sum().backward()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients_of(net))


# of TensorFloat32, where it is not enabled
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("backend", ALL if torch.cuda.is_available() else ["auto"])
@devices
def test_inductor(backend: str, device: str) -> None:
    net = gn.GrapNet([12, 40, 6], density=0.4, device=device)
    net.execution.use(backend)
    run = compiled(net, "inductor")
    x = inputs(net, 8)
    with dynamic_sizes():
        for _ in range(3):
            found = results(net, x, run)
            allowed = bounds(net, x, slope(found["output"]))
            for name, off, _ in differences(found, results(reference_of(net), x.double())):
                assert off <= 4 * allowed[name], f"{name} is off by {off:.2e}"
            edited(net, EDITS["cut_tenth"])


class Block(nn.Module):
    """A residual block with a net inside, as in a transformer."""

    def __init__(self, backend: str, device: str, density: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, device=device)
        self.net = gn.GrapNet([6, 9, 6], density=density, activation="gelu", device=device)
        self.net.execution.use(backend)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(self.norm(x))


def stack(backend: str, device: str, count: int, density: float = 1.0) -> nn.Sequential:
    return nn.Sequential(*(Block(backend, device, density) for _ in range(count)))


def grafted(device: str, count: int) -> nn.Sequential:
    """Returns a stack of feed-forward blocks that nets have replaced."""
    blocks = []
    for _ in range(count):
        block = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))
        blocks.append(nn.Sequential(nn.LayerNorm(6), nn.Sequential(block)))
    model = nn.Sequential(*blocks).to(device)
    gn.graft(model, [f"{n}.1.0" for n in range(count)])
    return model


def nets_in(model: nn.Module) -> list[gn.GrapNet]:
    return [module for module in model.modules() if isinstance(module, gn.GrapNet)]


def change(net: gn.GrapNet, number: int) -> None:
    """Commits one of several edits: cut, grow, connect and remove, or undo."""
    hidden = net.layers[1]
    if number % 5 == 4:
        net.undo()
        return
    with net.edit(reason="change", allow_dead=True) as edit:
        if number % 5 == 3:
            edit.remove_nodes(hidden[:1])
            return
        for layer in net.layers[:2]:
            edit.cut(layer.outgoing()[:2])
        if number % 5 == 1:
            born = edit.add_nodes(1, 3)
            edit.connect(net.layers[0], born)
            edit.connect(born, net.layers[2][:2])


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Returns copies of all gradients."""
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.clone())
    return found


def require_same_step(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """Asserts that a compiled model computes the outputs and gradients of the model itself."""
    gradients = []
    outputs = []
    for forward in (run, model):
        model.zero_grad()
        outputs.append(forward(x))
        outputs[-1].square().sum().backward()
        gradients.append(gradients_of(model))
    assert torch.allclose(*outputs, atol=1e-4)
    for mine, plain in zip(*gradients, strict=True):
        assert torch.allclose(mine, plain, atol=1e-3, rtol=1e-3)


@devices
def test_twelve_grafted_nets_are_compiled_once_more(device: str) -> None:
    model = grafted(device, 12)
    nets = nets_in(model)
    optimizer = torch.optim.Adam(model.parameters())
    for net in nets:
        gn.attach(optimizer, net)
    counting = CompileCounterWithBackend("eager")
    run = compiled(model, counting)
    x = torch.randn(3, 4, 6, device=device)
    counts = []
    with dynamic_sizes():
        for number in range(20):
            run(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(counting.frame_count)
            for net in nets:
                change(net, number)
        require_same_step(run, model, x)
    assert counts == [1] + [2] * 19
    assert not counters["graph_break"]


# A backend may compile again, as `family` does where families change in number; these do not.
@pytest.mark.parametrize("backend", ["auto", "dense", "reference", "sparse"])
@devices
def test_an_edit_of_one_net_is_the_first_of_all(backend: str, device: str) -> None:
    """One net after the other is edited, and the model runs after each edit."""
    model = stack(backend, device, 2, density=0.7)
    counting = CompileCounterWithBackend("eager")
    run = compiled(model, counting)
    x = torch.randn(3, 4, 6, device=device)
    counts = []
    with dynamic_sizes():
        for number in range(4):
            for net in nets_in(model):
                run(x)
                counts.append(counting.frame_count)
                change(net, number)
                change(net, number)  # two commits without a forward pass between them
        require_same_step(run, model, x)
    assert counts == [1] + [2] * (len(counts) - 1)


@devices
def test_families_that_keep_their_number(device: str) -> None:
    net = SHAPES["families of one size, out of order"].build(device=device)
    net.execution.use("family")
    counting = CompileCounterWithBackend("aot_eager")
    run = compiled(net, counting)
    counts = []
    with dynamic_sizes():
        for _ in range(3):
            require_equal(run, net)
            counts.append(counting.frame_count)
            # One parent leaves both families of the first transition.
            with net.edit(reason="fewer") as edit:
                edit.remove_nodes(net.layers[0][[0, -1]], interface=True)
    assert counts == [1, 2, 2]


@devices
def test_families_of_many_sizes_are_one_kind(device: str) -> None:
    net = SHAPES["grown head"].build(device=device)
    net.execution.use("family")
    counting = CompileCounterWithBackend("eager")
    run = compiled(net, counting)
    counts = []
    with dynamic_sizes():
        for _ in range(4):
            require_equal(run, net)
            counts.append(counting.frame_count)
            edited(net, EDITS["cut_one"])
    assert counts == [1, 2, 2, 2]


def test_nets_share_what_is_compiled_for_one_of_them() -> None:
    """Compiled one by one, as blocks often are, nets do not exhaust the limit of torch."""
    counting = CompileCounterWithBackend("eager")
    run = compiled(lambda net, x: net(x), counting)
    nets = nets_in(stack("dense", "cpu", 12, density=0.5))
    x = torch.randn(3, 6)
    with dynamic_sizes():
        for number, net in enumerate(nets):
            change(net, number % 3)
            expected = net(x)  # makes the plan, which compiled code looks for
            assert torch.allclose(run(net, x), expected, atol=1e-5)
    assert counting.frame_count <= 3


def test_another_kind_of_plan_is_compiled_again() -> None:
    model = stack("auto", "cpu", 2)
    counting = CompileCounterWithBackend("eager")
    run = compiled(model, counting)
    first, second = nets_in(model)
    x = torch.randn(3, 4, 6)
    counts = []
    with dynamic_sizes():
        for net in (None, first, first, second, second, first):
            if net is not None:
                edited(net, EDITS["cut_one"])
            run(x)
            counts.append(counting.frame_count)
    # the first relation that a full net loses
    assert counts == [1, 2, 2, 3, 3, 3]


def test_without_the_context_every_size_is_compiled() -> None:
    """What the context is for."""
    net = SHAPES["full"].build()
    counting = CompileCounterWithBackend("eager")
    run = compiled(net, counting)
    for _ in range(4):
        require_equal(run, net)
        edited(net, EDITS["cut_one"])
    assert counting.frame_count == 4


@backends
def test_steps_do_not_recompile(backend: str) -> None:
    net = SHAPES["one family"].build()
    net.execution.use(backend)
    x = inputs(net, 4)
    counting = CompileCounterWithBackend("eager")
    run = compiled(net, counting)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        run(x).square().sum().backward()
        optimizer.step()
    net.to("cpu")  # where it is
    run(x)
    assert counting.frame_count == 1
    require_equal(run, net)


@pytest.mark.parametrize("backend", BACKEND_NAMES[:-1])
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_edits_than_dynamo_recompiles(backend: str) -> None:
    """Past its limit torch runs the net as it is, which is right all the same."""
    net = SHAPES["full"].build()
    net.execution.use(backend)
    run = torch.compile(net, backend="eager")
    for _ in range(4):
        require_equal(run, net)
        edited(net, EDITS["cut_one"])
    require_equal(run, net)


@pytest.mark.parametrize("backend", BACKEND_NAMES[:-1])
def test_batches_of_any_size(backend: str) -> None:
    net = SHAPES["families in order"].build()
    net.execution.use(backend)
    run = compiled(net)
    for batch in (4, 1, 4):
        require_equal(run, net, batch)
    x = inputs(net, 2, 3)
    assert torch.allclose(run(x), net(x), atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(run(x[0]), net(x[0]), atol=1e-12)


def test_a_chosen_backend_serves_all_batches_with_one_graph() -> None:
    net = SHAPES["ragged"].build()
    net.execution.use("dense")
    counting = CompileCounterWithBackend("eager")
    run = compiled(net, counting)
    for batch in (3, 50, 7, 700, 9000):
        run(inputs(net, batch))
    assert counting.frame_count == 2


@pytest.mark.parametrize("backend", ["family", "sparse"])
def test_a_choice_made_after_compiling_is_followed(backend: str) -> None:
    net = SHAPES["one family"].build()
    run = compiled(net)
    require_equal(run, net)
    net.execution.use(backend)
    require_equal(run, net)
    net.execution.use("reference", 0)
    require_equal(run, net)


def test_skips_and_frozen_coordinates() -> None:
    net = gn.GrapNet([5, 7, 6, 3], skips=[(0, 2), (1, 3)], density=0.8, dtype=torch.float64)
    run = compiled(net)
    with dynamic_sizes():
        for _ in range(3):
            require_equal(run, net)
            edited(net, lambda net, edit: edit.freeze(net.layers[0].outgoing()[:3]))


def test_attention_is_one_graph() -> None:
    net = SHAPES["ragged"].build()
    net.execution.use("attention")
    x = inputs(net, 4)
    run = compiled(net)
    with dynamic_sizes():
        for _ in range(2):
            assert torch.allclose(run(x), net(x), atol=1e-12)
            edited(net, EDITS["add_nodes"])
        assert torch.allclose(run(x), net(x), atol=1e-12)


def test_a_backward_after_an_edit_raises() -> None:
    model = stack("auto", "cpu", 1, density=0.5)
    run = compiled(model, "aot_eager")
    with dynamic_sizes():
        for _ in range(2):
            loss = run(torch.randn(3, 4, 6)).sum()
            change(nets_in(model)[0], 0)
            with pytest.raises(gn.errors.StaleTopologyError):
                loss.backward()


def test_who_compiles_nothing_does_not_wait_for_the_compiler() -> None:
    program = (
        "import sys, torch, grapnet as gn; from grapnet.rules import ActivationRecorder\n"
        "net = gn.GrapNet([4, 3, 2]); recorder = ActivationRecorder(1); recorder.bind(net)\n"
        "net(torch.ones(2, 4)); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
