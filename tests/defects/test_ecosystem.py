"""Defects that show beside other parts of torch and other libraries.

Each test states the wanted behaviour and is expected to fail as long as the defect is there.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
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


def test_tensors_with_one_entry_for_each_coordinate_follow_an_edit() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([3, 4, 2])
    # Entries that equal the weights show where each of them goes.
    importances = {name: value.detach().clone() for name, value in net.named_parameters()}
    require(all(bool(value.ne(0).all()) for value in importances.values()))
    counts = {name: value.numel() for name, value in importances.items()}
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
