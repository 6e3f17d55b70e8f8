"""The rectangle that the dense backend keeps on CUDA: when it is written, and what its backward
passes refuse. The same states run on a CPU, where operations of torch stand in for the kernels.
"""

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import grapnet as gn
from grapnet.execution import _dense, _live

from .figures import inputs, require_reference, results
from .graphs import DEVICES, EDITS, SHAPES, edited

# of a thread's first backward on CUDA
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
devices = pytest.mark.parametrize("device", DEVICES)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def _on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dense, "KEPT_ON", {"cpu", "cuda"})
    monkeypatch.setattr(_live, "SMALL", 0)  # the kernels write all matrices
    torch.manual_seed(0)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collects the rectangles that are written, one entry a write."""
    written = []
    write = _live.Layout.write

    def note(layout: _live.Layout, rectangle: Tensor, values: Tensor) -> None:
        written.append(rectangle)
        write(layout, rectangle, values)

    monkeypatch.setattr(_live.Layout, "write", note)
    return written


def half_net(device: str = "cpu", dtype: torch.dtype = torch.float64) -> gn.GrapNet:
    """Returns a net with one transition, of which half of the relations exist."""
    generator = torch.Generator().manual_seed(0)
    net = gn.GrapNet([9, 40], density=0.5, device=device, dtype=dtype, generator=generator)
    net.execution.use("dense")
    return net


def matrix_of(net: gn.GrapNet) -> Tensor:
    """Returns what the net computes for every unit vector, without its bias."""
    with torch.no_grad():
        eye = torch.eye(9, device=net.device, dtype=net.transitions[0].weight.dtype)
        return net(eye) - net.layers[1].biases


def wanted_matrix(net: gn.GrapNet) -> Tensor:
    twin = copy.deepcopy(net)
    twin.execution.use("reference")
    return matrix_of(twin)


def require_current(net: gn.GrapNet) -> None:
    torch.testing.assert_close(matrix_of(net), wanted_matrix(net))


@devices
def test_cuts_one_after_the_other_leave_the_cells_of_the_wiring(device: str) -> None:
    net = half_net(device)
    require_current(net)
    for count in (1, 60, 7):
        relations = net.layers[0].outgoing()
        chosen = torch.randperm(len(relations))[:count].sort().values
        with net.edit(reason="cut", allow_dead=True) as edit:
            edit.cut(relations[chosen])
        topology = net.transitions[0].topology
        found = _live.LivePlan(topology).cells
        moved = net.execution.plan(0).plan._cells  # pyright: ignore[reportAttributeAccessIssue]
        for name, cells in found._asdict().items():
            if cells is None:
                assert getattr(moved, name) is None
            else:
                assert torch.equal(getattr(moved, name), cells), name
        require_current(net)
    net.undo()
    require_current(net)


@devices
def test_a_pass_without_gradients_writes_only_after_a_change(
    device: str, writes: list[Tensor]
) -> None:
    net = half_net(device)
    weight = net.transitions[0].weight
    require_current(net)
    require_current(net)
    assert len(writes) == 1
    with torch.no_grad():
        weight.mul_(2)
    require_current(net)
    assert len(writes) == 2
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    require_current(net)
    weight.data = weight.data * 3
    require_current(net)
    assert len(writes) == 4
    assert len({written.data_ptr() for written in writes}) == 1


@devices
def test_plain_operations_write_a_small_matrix_and_keep_none(
    device: str, writes: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = half_net(device)
    x = inputs(net, 4)
    net(x).sum().backward()
    by_kernel = net.transitions[0].weight.grad
    assert (len(writes), net.execution.describe()[0]["kept_bytes"] > 0) == (1, True)
    net = half_net(device)
    monkeypatch.setattr(_live, "SMALL", 9 * 40)
    net(x).sum().backward()
    torch.testing.assert_close(net.transitions[0].weight.grad, by_kernel)
    require_current(net)
    net.transitions[0].weight.data.mul_(2)  # nothing that is kept could be out of date
    require_current(net)
    assert (len(writes), net.execution.describe()[0]["kept_bytes"]) == (1, 0)


@devices
def test_a_pass_with_gradients_always_writes_into_the_same_memory(
    device: str, writes: list[Tensor]
) -> None:
    net = half_net(device)
    x = inputs(net, 4)
    for _ in range(3):
        net(x).sum().backward()
    assert len(writes) == 3
    assert len({written.data_ptr() for written in writes}) == 1
    require_current(net)
    assert len(writes) == 3


@devices
def test_writes_past_autograd_need_refresh_without_gradients_only(device: str) -> None:
    net = half_net(device)
    require_current(net)
    net.transitions[0].weight.data.mul_(2)
    assert not torch.allclose(matrix_of(net), wanted_matrix(net))
    net.execution.refresh()
    require_current(net)
    net.transitions[0].weight.data.mul_(2)
    with torch.enable_grad():
        net(inputs(net, 1))
    require_current(net)


class Uncounted(torch.optim.SGD):
    """Steps as fused kernels do: torch does not count that the Parameters change."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad)


def optimizer_of(kind: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "uncounted":
        return Uncounted(parameters, lr=0.1)
    return torch.optim.AdamW(parameters, lr=0.1, fused=kind == "fused")


optimizers = pytest.mark.parametrize("kind", ["plain", "fused", "uncounted"])


@optimizers
@devices
def test_a_pass_after_a_step_reads_the_weights_of_then(device: str, kind: str) -> None:
    net = half_net(device)
    optimizer = optimizer_of(kind, net.parameters())
    for _ in range(2):
        net(inputs(net, 4)).square().sum().backward()
        optimizer.step()
        require_current(net)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@devices
def test_a_pass_after_a_compiled_step_reads_the_weights_of_then(device: str) -> None:
    net = half_net(device)
    # a step that torch does not count either
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        net(inputs(net, 4)).square().sum().backward()
        step()
        require_current(net)


@optimizers
@devices
def test_a_step_between_forward_and_backward_raises(device: str, kind: str) -> None:
    net = half_net(device)
    optimizer = optimizer_of(kind, net.parameters())
    x = inputs(net, 4).requires_grad_()
    net(x).sum().backward()
    loss = net(x).sum()
    optimizer.step()
    with pytest.raises(RuntimeError):
        loss.backward()
    # nothing stays broken
    net(x).sum().backward()


@devices
def test_the_step_of_another_net_changes_nothing(device: str, writes: list[Tensor]) -> None:
    net = half_net(device)
    other = half_net(device)
    optimizer = optimizer_of("uncounted", other.parameters())
    x = inputs(net, 4).requires_grad_()
    other(x).sum().backward()
    loss = net(x).sum()
    optimizer.step()
    loss.backward()
    require_current(net)
    assert len(writes) == 2


@devices
@pytest.mark.parametrize("needs_x", [False, True])
def test_raises_where_a_linear_raises(device: str, needs_x: bool) -> None:
    net = half_net(device)
    linear = nn.Linear(9, 40, device=device, dtype=torch.float64)
    for module in (net, linear):
        x = inputs(net, 4).requires_grad_(needs_x)
        loss = module(x).sum()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        if needs_x:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


@devices
def test_a_frozen_module_raises_too(device: str) -> None:
    net = half_net(device).requires_grad_(False)
    x = inputs(net, 4).requires_grad_()
    loss = net(x).sum()
    with torch.no_grad():
        net.transitions[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@devices
def test_two_passes_before_one_backward(device: str) -> None:
    net = half_net(device)
    first, second = inputs(net, 2, 4)
    (net(first).square().sum() + net(second).square().sum()).backward()
    found = net.transitions[0].weight.grad
    net.zero_grad()
    net(first).square().sum().backward()
    net(second).square().sum().backward()
    torch.testing.assert_close(found, net.transitions[0].weight.grad)


@devices
def test_other_parameters_do_not_disturb_a_pass(device: str) -> None:
    net = half_net(device)
    x = inputs(net, 4).requires_grad_()
    (wanted,) = torch.autograd.grad(net(x).square().sum(), x)
    loss = net(x).square().sum()
    doubled = {name: 2 * parameter for name, parameter in net.named_parameters()}
    other = torch.func.functional_call(net, doubled, (x,))
    torch.testing.assert_close(other, 2 * net(x))
    (found,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, wanted)


@devices
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(device: str, reentrant: bool, writes: list[Tensor]) -> None:
    net = half_net(device)
    x = inputs(net, 4).requires_grad_()
    wanted = results(net, x)

    def run(x: Tensor) -> Tensor:
        return checkpoint(net, x, use_reentrant=reentrant)

    if reentrant:
        run(x).backward(torch.ones(4, 40, device=device, dtype=x.dtype))
        net.zero_grad()
    else:
        found = results(net, x, run)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor)
    require_current(net)
    # The passes of the backward, in another thread on CUDA, kept no memory of their own.
    assert len({written.data_ptr() for written in writes}) == 1


@devices
def test_saved_tensors_that_hooks_moved_are_used(device: str) -> None:
    net = half_net(device)
    x = inputs(net, 4).requires_grad_()
    (wanted,) = torch.autograd.grad(net(x).square().sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        loss = net(x).square().sum()
    with torch.no_grad():
        net.transitions[0].weight.mul_(2)
    net(x)
    (found,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, wanted)


@devices
@pytest.mark.parametrize("shape", ["ragged", "partly frozen", "frozen whole", "many families"])
def test_second_derivatives(device: str, shape: str) -> None:
    net = SHAPES[shape].build(device=device)
    reference = copy.deepcopy(net)
    net.execution.use("dense")
    reference.execution.use("reference")
    second = []
    for module in (net, reference):
        x = inputs(net, 3).requires_grad_()
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        named = [parameter for parameter in module.parameters() if parameter.numel()]
        second.append(torch.autograd.grad(dx.square().sum(), [x, *named], allow_unused=True))
    for found, wanted in zip(*second, strict=True):
        if wanted is not None:
            torch.testing.assert_close(found, wanted)


@devices
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("shape", ["ragged", "partly frozen", "full, shuffled"])
def test_follows_edits(device: str, shape: str, edit: str) -> None:
    net = SHAPES[shape].build(device=device)
    net.execution.use("dense")
    x = inputs(net, 4)
    with torch.no_grad():
        net(x)
    version = net.version
    edited(net, EDITS[edit])
    require_reference(net, x)
    if net.version > version:
        net.undo()
        require_reference(net, x)


@devices
def test_frozen_values_that_load_are_seen(device: str, writes: list[Tensor]) -> None:
    net = half_net(device)
    with net.edit() as edit:
        edit.freeze(net.layers[0].outgoing()[::2])
    require_current(net)
    state = {name: entry.clone() for name, entry in net.state_dict().items()}
    state["transitions.0.weight"] *= 2
    net.load_state_dict(state)
    require_current(net)
    assert len(writes) == 2


@devices
def test_kept_memory_is_described_and_not_saved(device: str) -> None:
    net = half_net(device, torch.float32)
    assert net.execution.describe()[0]["kept_bytes"] == 0
    before = set(net.state_dict())
    net(inputs(net, 4))
    assert net.execution.describe()[0]["kept_bytes"] == 9 * 40 * 4
    with torch.autocast(device, torch.bfloat16):
        net(inputs(net, 4))
    assert net.execution.describe()[0]["kept_bytes"] == 9 * 40 * (4 + 2)
    assert set(net.state_dict()) == before
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
    assert net.execution.describe()[0]["kept_bytes"] == 0


@devices
def test_kept_memory_leaves_with_an_edit(device: str, writes: list[Tensor]) -> None:
    net = half_net(device)
    gc.collect()
    gc.disable()
    try:
        net(inputs(net, 4)).sum().backward()
        (kept,) = map(weakref.ref, writes)
        writes.clear()
        assert kept() is not None
        with net.edit() as edit:
            edit.cut(net.layers[0][0], slots=[0])
        assert kept() is None
    finally:
        gc.enable()


@devices
def test_autocast_computes_as_a_linear_does(device: str) -> None:
    net = half_net(device, torch.float32)
    linear = nn.Linear(9, 40, device=device)
    with torch.no_grad():
        linear.weight.copy_(matrix_of(net).t())
        linear.bias.copy_(net.layers[1].biases)
    x = inputs(net, 64)
    found = []
    for module in (net, linear):
        with torch.autocast(device, torch.bfloat16):
            z = module(x)
        assert z.dtype == torch.bfloat16
        z.float().square().sum().backward()
        found.append(z.float())
    torch.testing.assert_close(*found)
    (gradient,) = [p.grad for p in net.transitions[0].parameters()]
    assert gradient is not None
    assert linear.weight.grad is not None
    topology = net.transitions[0].topology
    cells = linear.weight.grad[topology.child.long(), topology.parents().long()]
    torch.testing.assert_close(gradient.view(-1), cells, rtol=0.02, atol=0.02)


@devices
def test_readers_in_other_threads_have_their_own(device: str, writes: list[Tensor]) -> None:
    net = half_net(device)
    net(inputs(net, 4))
    require_current(net)
    found = []

    def read() -> None:
        found.append(matrix_of(net))
        found.append(matrix_of(net))

    for _ in range(2):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    for matrix in found:
        torch.testing.assert_close(matrix, wanted_matrix(net))
    # one of the thread that trains, and one write of each reader into memory of its own
    assert len(writes) == 3
    assert writes[0] is not writes[1]
    assert writes[0] is not writes[2]
    writes.clear()
    found.clear()
    # The memory of a thread leaves with it.
    assert net.execution.describe()[0]["kept_bytes"] == 9 * 40 * 8


@devices
def test_inference_mode_leaves_a_net_that_can_train(device: str) -> None:
    net = half_net(device)
    with torch.inference_mode():
        net(inputs(net, 4))
    x = inputs(net, 4).requires_grad_()
    net(x).sum().backward()
    require_current(net)


@devices
def test_a_plan_takes_all_values(device: str) -> None:
    net = SHAPES["partly frozen"].build(device=device)
    net.execution.use("dense")
    x = inputs(net, 4)
    store = net.transitions[0]
    z = net.execution.plan(0)(x, store.values(), net.layers[1].biases)
    reference = copy.deepcopy(net)
    reference.execution.use("reference")
    wanted = reference.execution.plan(0)(x, store.values(), net.layers[1].biases)
    torch.testing.assert_close(z, wanted)


def written_by_operator(
    values: Tensor, cells: _live.Cells, held: Tensor | None, frozen: _live.Cells | None
) -> tuple[Tensor, ...]:
    """Returns what the operator that compiled code runs is called with, for 10 rows of 7 cells."""
    rest = [None] * 3 if frozen is None else frozen[1:]
    return (values, *cells, held, *rest, 10, 7, values.dtype)


@devices
def test_the_operator_passes_the_checks_of_torch(device: str) -> None:
    cell_of = torch.tensor([5, 2, 30, 31, 64, 7], dtype=torch.int32, device=device)
    values = torch.randn(6, dtype=torch.float64, device=device, requires_grad=True)
    held = torch.randn(2, dtype=torch.float64, device=device)
    every = _live.Cells.of(cell_of, 70)
    free = _live.Cells.of(cell_of[2:], 70)
    frozen = _live.Cells.of(cell_of[:2], 70)
    for arguments in (
        written_by_operator(values, every, None, None),
        written_by_operator(values.detach()[2:].requires_grad_(), free, held, frozen),
    ):
        torch.library.opcheck(_live.rectangle_operator, arguments)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 69, 70])
@pytest.mark.parametrize("is_ordered", [True, False])
@devices
def test_the_operator_writes_what_plain_operations_write(
    device: str, is_ordered: bool, count: int
) -> None:
    cell_of = torch.randperm(70)[:count].int()
    if is_ordered:
        cell_of = cell_of.sort().values
    n_frozen = count // 3
    cells = _live.Cells.of(cell_of[n_frozen:].to(device), 70)
    frozen = _live.Cells.of(cell_of[:n_frozen].to(device), 70)
    values = torch.randn(count - n_frozen, dtype=torch.float64, device=device, requires_grad=True)
    held = torch.randn(n_frozen, dtype=torch.float64, device=device)
    # A cell that is read at a wrong place would show.
    factors = torch.randn(10, 7, dtype=torch.float64, device=device)

    matrix = _live.rectangle_operator(*written_by_operator(values, cells, held, frozen))
    wanted = _live.Layout(cells, held, frozen).plain(values, 10, 7, torch.float64)
    assert torch.equal(matrix, wanted)
    (gradient,) = torch.autograd.grad((matrix * factors).sum(), values)
    (wanted_gradient,) = torch.autograd.grad((wanted * factors).sum(), values)
    assert torch.equal(gradient, wanted_gradient)


@pytest.mark.parametrize("shape", ["ragged", "partly frozen"])
@devices
def test_compiles_whole(device: str, shape: str) -> None:
    net = SHAPES[shape].build(device=device)
    net.execution.use("dense")
    x = inputs(net, 4)
    net(x)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    wanted = results(net, x)
    found = results(net, x, compiled)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor)


@on_cuda
def test_streams_wait_for_the_write() -> None:
    net = half_net("cuda", torch.float32)
    wanted = wanted_matrix(net)
    net(inputs(net, 1))
    side = torch.cuda.Stream()
    for _ in range(10):
        # The write of the first stream is queued behind a long wait.
        with torch.no_grad():
            net.transitions[0].weight.mul_(2)
            wanted = wanted * 2
            torch.cuda._sleep(10_000_000)
            matrix_of(net)
            ready = torch.cuda.Event()
            with torch.cuda.stream(side):
                found = matrix_of(net)
                ready.record(side)
        torch.cuda.current_stream().wait_event(ready)
        torch.testing.assert_close(found, wanted)
        with torch.no_grad():
            net.transitions[0].weight.div_(2)
        wanted = wanted / 2


@on_cuda
def test_a_captured_step_trains_as_an_eager_one() -> None:
    net = half_net("cuda", torch.float32)
    twin = copy.deepcopy(net)
    x = inputs(net, 8)
    losses = []
    for module in (net, twin):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, fused=True, capturable=True)

        def step(module: gn.GrapNet = module, optimizer: torch.optim.AdamW = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        if module is net:
            losses.append([step().item() for _ in range(8)])
            continue
        found = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found += [step().item() for _ in range(3)]
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        # The capture itself computes nothing.
        for _ in range(5):
            graph.replay()
            found.append(loss.item())
            # A pass beside the graph reads what the replay has written.
            require_current(module)
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
