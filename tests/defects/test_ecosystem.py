"""Defects that show beside other parts of torch and other libraries.

Each test states the wanted behaviour and is expected to fail as long as the defect is there.
"""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.func import functional_call

import grapnet as gn


def require(holds: bool) -> None:
    """Fails the test when a control does not hold.

    An assertion would not do: it would count as the expected failure.
    """
    if not holds:
        pytest.fail("a control does not hold")


def require_sparse_kernels() -> None:
    """Skips the test where the compiled kernels were not built."""
    reason = "the sparse backend needs the compiled kernels"
    pytest.importorskip("grapnet.execution._kernels", reason=reason)


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def drawn_net(sizes: list[int], density: float, backend: str) -> gn.GrapNet:
    """Returns a net in double precision with random relations that runs on one backend."""
    generator = torch.Generator().manual_seed(0)
    net = gn.GrapNet(sizes, density=density, dtype=torch.float64, generator=generator)
    net.execution.use(backend)
    return net


RUN_AFTER_TO_EMPTY = """
import torch

import grapnet as gn

torch.manual_seed(0)
net = gn.GrapNet([32, 48, 8], density=0.5)
net.execution.use("sparse")
x = torch.randn(4, 32)
net(x)
print("ready", flush=True)
# Torch fills what to_empty leaves undefined, so that every run meets the same numbers.
torch.use_deterministic_algorithms(True)
net.to_empty(device="cpu")
torch.use_deterministic_algorithms(False)
net(x)
"""


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="P1: a forward pass after to_empty is a segmentation fault with the sparse kernels",
)
def test_a_forward_pass_after_to_empty_does_not_crash() -> None:
    require_sparse_kernels()
    command = [sys.executable, "-c", RUN_AFTER_TO_EMPTY]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    require(ran.stdout.startswith("ready"))
    assert ran.returncode == 0


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """Makes torch fill memory that is left undefined."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.xfail(
    strict=True,
    raises=gn.TopologyError,
    reason="P1: to_empty empties the wiring, so that the state dict of the same net does not fit",
)
def test_a_net_loads_its_own_state_dict_after_to_empty() -> None:
    net = drawn_net([6, 8, 3], 0.5, "reference")
    x = inputs(4, 6)
    expected = net(x)
    state = copy.deepcopy(net.state_dict())
    net.load_state_dict(state)
    require(torch.equal(net(x), expected))
    net.to_empty(device="cpu")
    net.load_state_dict(state)
    assert torch.equal(net(x), expected)


# Torch compiles decompositions with torch.jit.script when forward mode is first used.
LOADING_DECOMPOSITIONS = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def forward_tangent(function: Callable[..., Tensor], primal: Any, tangent: Any) -> Tensor | None:
    """Returns the tangent of a function in forward mode, or None where torch finds none."""
    with forward_ad.dual_level():
        if isinstance(primal, Mapping):
            dual = {name: forward_ad.make_dual(primal[name], tangent[name]) for name in primal}
        else:
            dual = forward_ad.make_dual(primal, tangent)
        return forward_ad.unpack_dual(function(dual)).tangent


@LOADING_DECOMPOSITIONS
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="P2: the sparse kernels drop the tangent of forward-mode differentiation in silence",
)
def test_forward_mode_of_the_sparse_backend_is_right_or_raises() -> None:
    require_sparse_kernels()
    net = drawn_net([6, 8, 3], 0.5, "sparse").requires_grad_(False)
    x = inputs(4, 6)
    direction = torch.ones_like(x)
    _, expected = torch.func.jvp(net, (x,), (direction,))
    net.execution.use("reference")
    reference = forward_tangent(net, x, direction)
    require(reference is not None and torch.allclose(reference, expected))

    net.execution.use("sparse")
    try:
        tangent = forward_tangent(net, x, direction)
    except (NotImplementedError, gn.GrapNetError):
        return
    assert tangent is not None
    torch.testing.assert_close(tangent, expected)


@LOADING_DECOMPOSITIONS
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="P2: the kernel that writes the rectangle of the dense backend drops tangents",
)
def test_forward_mode_of_the_dense_backend_is_right_or_raises() -> None:
    require_sparse_kernels()
    net = drawn_net([256, 256], 0.6, "dense").requires_grad_(False)
    x = inputs(4, 256)
    weights = {name: value.detach() for name, value in net.named_parameters()}
    directions = {name: torch.ones_like(value) for name, value in weights.items()}

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(net, parameters, (x,))

    _, expected = torch.func.jvp(outputs, (weights,), (directions,))
    net.execution.use("reference")
    reference = forward_tangent(outputs, weights, directions)
    require(reference is not None and torch.allclose(reference, expected))

    net.execution.use("dense")
    try:
        tangent = forward_tangent(outputs, weights, directions)
    except (NotImplementedError, gn.GrapNetError):
        return
    assert tangent is not None
    torch.testing.assert_close(tangent, expected)


def wired_net(parents: list[int], children: list[int]) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(len(parents) + parents[1])
    relations = [(parents, children)]
    return gn.GrapNet.from_relations([4, 3], relations, dtype=torch.float64, generator=generator)


def source_net() -> gn.GrapNet:
    return wired_net([0, 0, 1, 2, 3], [0, 1, 2, 0, 1])


def target_net(backend: str) -> gn.GrapNet:
    """Returns a net that has run once, as large as the source and wired differently."""
    net = wired_net([0, 1, 1, 3, 3], [2, 0, 1, 1, 2])
    net.execution.use(backend)
    require(computes_its_wiring(net))
    return net


def computes_its_wiring(net: gn.GrapNet) -> bool:
    """Returns whether the forward pass agrees with the walk along every relation."""
    x = inputs(5, 4)
    with torch.no_grad():
        return torch.allclose(net(x), net.walk(x))


@pytest.mark.parametrize("backend", ["reference", "dense", "family"])
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="P3: a forward follows the old wiring after the state dict was written in place",
)
def test_a_state_dict_written_in_place_leaves_forward_and_wiring_in_step(backend: str) -> None:
    source = source_net().state_dict()
    net = target_net(backend)
    for name, value in net.state_dict().items():
        value.copy_(source[name])
    assert computes_its_wiring(net)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="P3: a forward follows the old wiring after a distributed checkpoint was loaded",
)
def test_a_distributed_checkpoint_leaves_forward_and_wiring_in_step(tmp_path: Path) -> None:
    checkpoint.save(source_net().state_dict(), checkpoint_id=tmp_path)
    net = target_net("dense")
    checkpoint.load(net.state_dict(), checkpoint_id=tmp_path)
    assert computes_its_wiring(net)


def without_shared_entries(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns one entry of each address, as accelerate saves a state dict with safetensors."""
    kept: dict[int, str] = {}
    for name, value in state.items():
        kept.setdefault(value.untyped_storage().data_ptr(), name)
    return {name: state[name] for name in kept.values()}


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="P4: the empty entries of a state dict look like one shared tensor",
)
def test_no_two_entries_of_a_state_dict_look_shared() -> None:
    plain = nn.Linear(3, 2).state_dict()
    require(set(without_shared_entries(plain)) == set(plain))
    net = gn.GrapNet([4, 6, 2])
    state = net.state_dict()
    kept = without_shared_entries(state)
    assert set(kept) == set(state)
    copy.deepcopy(net).load_state_dict(kept)


@pytest.mark.xfail(
    strict=True,
    raises=AttributeError,
    reason="P5: the state dict has entries that are no attributes of their module",
)
def test_distributed_checkpoints_read_the_state_dict_of_a_net() -> None:
    require(set(get_model_state_dict(nn.Linear(3, 2))) == {"weight", "bias"})
    net = gn.GrapNet([4, 6, 2])
    expected = net.state_dict()
    state = get_model_state_dict(net)
    assert set(state) == set(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value)


class WrappedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer as accelerate's `prepare` does: it is one, and the inner one steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def step(net: gn.GrapNet, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def steps_after_a_cut(net: gn.GrapNet, optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer that has taken a step takes another one after a cut."""
    step(net, optimizer)
    with net.edit(reason="cut half") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.5))
    try:
        step(net, optimizer)
    except gn.OptimizerError:
        return False
    return True


def test_an_optimizer_that_wraps_another_follows_edits() -> None:
    net = gn.GrapNet([4, 6, 2])
    wrapped = WrappedOptimizer(torch.optim.Adam(net.parameters()))
    gn.attach(wrapped.optimizer, net)
    require(steps_after_a_cut(net, wrapped))

    net = gn.GrapNet([4, 6, 2])
    wrapped = WrappedOptimizer(torch.optim.Adam(net.parameters()))
    gn.attach(wrapped, net)
    assert steps_after_a_cut(net, wrapped)
    weight = net.transitions[0].weight
    assert wrapped.state[weight]["exp_avg"].shape == weight.shape == (12, 1)


def batched_gradients(net: gn.GrapNet) -> tuple[Tensor, ...]:
    """Returns the gradients of three output directions in one batched call."""
    x = inputs(4, 6).requires_grad_()
    directions = inputs(3, 4, 3)
    wanted = [x, *net.parameters()]
    return torch.autograd.grad(net(x), wanted, directions, is_grads_batched=True)


def vectorized_jacobian(net: gn.GrapNet) -> tuple[Tensor, ...]:
    """Returns the derivatives of all outputs by the input."""
    return (torch.autograd.functional.jacobian(net, inputs(4, 6), vectorize=True),)


@pytest.mark.parametrize("differentiate", [batched_gradients, vectorized_jacobian])
@pytest.mark.xfail(
    strict=True,
    raises=RuntimeError,
    reason="P7: batched gradients fail inside torch with the sparse backend",
)
def test_batched_gradients_of_the_sparse_backend_are_right_or_refused(
    differentiate: Callable[[gn.GrapNet], tuple[Tensor, ...]],
) -> None:
    require_sparse_kernels()
    net = drawn_net([6, 8, 3], 0.5, "reference")
    expected = differentiate(net)
    net.execution.use("sparse")
    net(inputs(4, 6)).sum().backward()
    try:
        gradients = differentiate(net)
    except gn.GrapNetError:
        return
    torch.testing.assert_close(gradients, expected)


def attach_is_refused(optimizer: torch.optim.Optimizer, net: gn.GrapNet) -> bool:
    """Returns whether the library refuses to attach an optimizer."""
    try:
        gn.attach(optimizer, net)
    except gn.GrapNetError:
        return True
    return False


@pytest.fixture
def sharded_net() -> Iterator[gn.GrapNet]:
    """A net that FSDP shards over one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = gn.GrapNet([4, 6, 2])
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        yield net
    finally:
        dist.destroy_process_group()


def test_attaching_to_a_sharded_net_is_refused(sharded_net: gn.GrapNet) -> None:
    optimizer = torch.optim.SGD(sharded_net.parameters(), lr=0.1)
    step(sharded_net, optimizer)
    assert attach_is_refused(optimizer, sharded_net)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="P8: an edit of a sharded net fails by accident, inside torch",
)
def test_an_edit_of_a_sharded_net_is_refused(sharded_net: gn.GrapNet) -> None:
    relations = sharded_net.layers[0].outgoing()[:12]
    error = None
    try:
        with sharded_net.edit(reason="cut half") as edit:
            edit.cut(relations)
    except (gn.GrapNetError, RuntimeError) as caught:
        error = caught
    require(error is not None)
    require(sharded_net.version == 0)
    assert isinstance(error, gn.GrapNetError)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="P10: no public function lets a tensor with one entry for each coordinate follow edits",
)
def test_tensors_with_one_entry_for_each_coordinate_follow_an_edit() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([3, 4, 2])
    # Entries that equal the weights show where each of them goes.
    importances = {name: value.detach().clone() for name, value in net.named_parameters()}
    require(all(bool(value.ne(0).all()) for value in importances.values()))
    counts = {name: value.numel() for name, value in importances.items()}
    assert hasattr(gn, "follow")
    followed = gn.follow(net, importances)
    with net.edit(reason="grow two nodes") as edit:
        grown = edit.add_nodes(1, 2)
        edit.connect(net.layers[0], grown)
        edit.connect(grown, net.layers[2])
    for name, weight in net.named_parameters():
        survivors = followed[name] != 0
        assert followed[name].shape == weight.shape
        assert int(survivors.sum()) == counts[name]
        assert torch.equal(followed[name][survivors], weight.detach()[survivors])


def test_attaching_an_optimizer_with_moments_of_another_shape_is_refused() -> None:
    edited = gn.GrapNet([4, 6, 2])
    optimizer = torch.optim.AdamW(edited.parameters(), fused=True)
    gn.attach(optimizer, edited)
    require(steps_after_a_cut(edited, optimizer))

    net = gn.GrapNet([4, 6, 2])
    resumed = torch.optim.AdamW(net.parameters(), fused=True)
    resumed.load_state_dict(optimizer.state_dict())
    weight = net.transitions[0].weight
    require(resumed.state[weight]["exp_avg"].shape != weight.shape)
    # No step is taken: it would write outside of the moments.
    assert attach_is_refused(resumed, net)
