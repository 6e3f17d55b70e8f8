"""Recorders of activations against numpy, over batches cut anyhow, on every backend and in every
mode.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import grapnet as gn
from grapnet.core._errors import GrapNetError
from grapnet.rules import ActivationRecorder, CovarianceRecorder, GradientRecorder, Recorder
from tests.execution.graphs import POLICIES, SUMS
from tests.rules.watched import MAKE, armed, batch, close, equal, outputs_of, run, seen, small_net


@pytest.fixture
def net() -> gn.GrapNet:
    return small_net()


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_streams_what_one_pass_over_all_samples_gives(
    net: gn.GrapNet, layer: int, dtype: torch.dtype
) -> None:
    net.to(dtype)
    recorder = armed(ActivationRecorder(layer), net)
    x = batch(net, 61)
    for part in x.split([1, 20, 0, 33, 7]):
        net(part)
    h = outputs_of(net, x)[layer]
    assert recorder.count == 61
    assert recorder.counts.tolist() == [61] * h.shape[1]
    assert close(recorder.mean, h.mean(0), net)
    assert close(recorder.variance, h.var(0), net)
    assert close(recorder.firing_rate, (h > 0).mean(0), net)


@pytest.mark.parametrize("ends", [(0, None), (1, 2), (1, 1), (0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_covariance_is_that_of_one_pass(
    net: gn.GrapNet, ends: tuple[int, int | None], dtype: torch.dtype
) -> None:
    net.to(dtype)
    recorder = armed(CovarianceRecorder(*ends), net)
    x = batch(net, 61)
    for part in x.split([13, 1, 0, 40, 7]):
        net(part)
    upper, lower = (outputs_of(net, x)[n] for n in (recorder.upper, recorder.lower))
    expected = (upper - upper.mean(0)).T @ (lower - lower.mean(0)) / len(x)
    scale = np.outer(upper.std(0), lower.std(0))
    assert recorder.count == 61
    assert close(recorder.covariance(), expected, net)
    assert close(
        recorder.correlation(), np.divide(expected, scale, where=scale > 0, out=0 * scale), net
    )


@pytest.mark.parametrize("constant", [0.1, 1e9 / 3, -7e-30])
def test_what_never_changes_has_variance_and_correlation_of_exactly_zero(
    net: gn.GrapNet, constant: float
) -> None:
    activations = armed(ActivationRecorder(0), net)
    pairs = armed(CovarianceRecorder(0), net)
    x = batch(net, 999)
    x[:, 2] = constant
    for part in x.split([31, 300, 668]):
        net(part)
    assert activations.variance[2] == 0
    assert activations.mean[2] == constant
    assert (pairs.correlation()[2] == 0).all()
    assert (pairs.covariance()[2] == 0).all()
    assert pairs.correlation()[[0, 1, 3, 4]].abs().sum() > 0
    plain = x[:, 2].square().mean() - x[:, 2].mean().square()
    assert plain != 0 or constant < 0  # a textbook formula does not give 0


def test_a_large_mean_cancels_nothing(net: gn.GrapNet) -> None:
    recorder = armed(ActivationRecorder(0), net)
    x = batch(net, 500) + 1e9
    pairs = armed(CovarianceRecorder(0, 0), net)
    for part in x.split(77):
        net(part)
    assert np.allclose(recorder.variance, x.numpy().var(0), rtol=1e-6)
    assert np.allclose(pairs.correlation(), np.corrcoef(x.numpy().T), rtol=1e-6)
    assert not np.allclose(x.square().mean(0) - x.mean(0).square(), x.numpy().var(0), rtol=0.1)


@pytest.mark.parametrize("backend", [*SUMS, *POLICIES, "auto"])
def test_every_backend_is_seen_with_leading_dimensions(net: gn.GrapNet, backend: str) -> None:
    net.execution.use(backend)
    layers = [armed(ActivationRecorder(n), net) for n in range(4)]
    pairs = armed(CovarianceRecorder(0, 3), net)
    x = batch(net, 24)
    y = net(x.view(2, 3, 4, 5))
    assert [recorder.count for recorder in (*layers, pairs)] == [24] * 5
    assert close(layers[0].mean, x.numpy().mean(0), net)
    assert close(layers[3].mean, y.detach().view(24, 3).numpy().mean(0), net)
    expected = np.cov(x.numpy().T, y.detach().view(24, 3).numpy().T, bias=True)[:5, 5:]
    assert close(pairs.covariance(), expected, net)
    if backend not in POLICIES:
        assert close(layers[2].variance, outputs_of(net, x)[2].var(0), net)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_every_mode_is_seen(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([5, 7, 3])
    recorder = armed(ActivationRecorder(1), net)
    pairs = armed(CovarianceRecorder(0, 1), net)
    for seed in range(2):
        with mode():
            net(batch(net, seed=seed))
        net(batch(net, seed=seed))
    h = np.concatenate([outputs_of(net, batch(net, seed=seed))[1] for seed in range(2)])
    assert recorder.count == pairs.count == 160
    assert np.allclose(recorder.mean, h.mean(0), atol=0.01)
    assert recorder.mean.dtype == pairs.covariance().dtype == torch.float64
    assert not recorder.mean.is_inference()
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
    run(net)


def test_samples_that_checkpointing_computes_again_count_once(net: gn.GrapNet) -> None:
    recorder = armed(ActivationRecorder(1), net)
    for again in (False, True):
        out = checkpoint(net, batch(net).requires_grad_(), use_reentrant=again)
        assert isinstance(out, Tensor)
        out.sum().backward()
    assert recorder.count == 80


def test_transforms_are_not_seen(net: gn.GrapNet) -> None:
    recorders = [armed(make(), net) for make in MAKE.values()]
    torch.func.vmap(net)(batch(net))
    torch.func.grad(lambda x: net(x).sum())(batch(net))
    assert [recorder.count for recorder in recorders] == [0, 0, 0]


@pytest.mark.parametrize("early", [True, False], ids=["armed before compiling", "armed later"])
def test_a_compiled_net_is_seen(net: gn.GrapNet, early: bool) -> None:
    torch._dynamo.reset()  # what other tests have compiled counts, too
    recorders = [armed(make(), net) for make in MAKE.values() if early]
    counting = CompileCounterWithBackend("eager")
    compiled = torch.compile(net, backend=counting)
    x = batch(net)
    compiled(x).sum().backward()
    recorders = recorders or [armed(make(), net) for make in MAKE.values()]
    compiled(x).sum().backward()
    for recorder in recorders:
        recorder.disarm()
    compiled(x).sum().backward()
    assert [recorder.count for recorder in recorders] == ([80, 80, 2] if early else [40, 40, 1])
    assert close(recorders[0].mean, outputs_of(net, x)[1].mean(0), net)
    assert counting.frame_count == 1  # the net that is not watched
    again = armed(MAKE["activations"](), net)
    compiled(x)
    again.disarm()
    compiled(x)
    assert (again.count, counting.frame_count) == (40, 1)


@pytest.mark.parametrize("early", [True, False], ids=["armed before compiling", "armed later"])
def test_one_graph_cannot_be_watched_and_says_so(net: gn.GrapNet, early: bool) -> None:
    recorder = MAKE["activations"]()
    if early:
        recorder.arm(net)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    x = batch(net)
    if not early:
        compiled(x)
        recorder.arm(net)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="recorder of grapnet is armed"):
        compiled(x)
    recorder.disarm()
    assert torch.allclose(compiled(x), net(x))


@pytest.mark.parametrize("kind", MAKE)
def test_it_watches_only_while_it_is_armed(net: gn.GrapNet, kind: str) -> None:
    recorder = MAKE[kind]()
    assert isinstance(recorder, Recorder)
    assert (recorder.window, recorder.armed) == (1, False)
    run(net)
    recorder.arm(net)
    recorder.arm(net)  # twice is once
    run(net)
    assert f"count={recorder.count}, watching" in repr(recorder)
    recorder.disarm()
    recorder.disarm()
    run(net)
    once = seen(recorder)
    assert recorder.count == (1 if kind == "gradients" else 40)
    assert not any(module._forward_hooks for module in net.modules())
    recorder.arm(net)
    assert equal(seen(recorder), once)
    recorder.clear()
    assert recorder.count == 0
    run(net)
    assert equal(seen(recorder), once)  # and starts anew


@pytest.mark.parametrize("kind", MAKE)
def test_before_anything_is_seen_it_says_what_to_do(net: gn.GrapNet, kind: str) -> None:
    recorder = armed(MAKE[kind](), net)
    reads = {
        "activations": lambda: recorder.mean,
        "covariances": lambda: recorder.correlation(),
        "gradients": lambda: recorder.largest_absent(1),
    }
    with pytest.raises(GrapNetError, match="seen nothing"):
        reads[kind]()
    run(net)
    reads[kind]()
    with pytest.raises(GrapNetError, match="another net"):
        recorder.arm(gn.GrapNet([5, 7, 4, 3]))
    recorder.disarm()
    with pytest.raises(GrapNetError, match="clear"):
        recorder.arm(gn.GrapNet([5, 7, 4, 3]))
    recorder.clear()
    recorder.arm(other := gn.GrapNet([5, 7, 4, 3]))
    run(other)
    assert recorder.count > 0


def test_wrong_settings_are_named(net: gn.GrapNet) -> None:
    for make in (
        lambda: ActivationRecorder(-1),
        lambda: CovarianceRecorder(0, window=0),
        lambda: GradientRecorder(1, 1),
    ):
        with pytest.raises(ValueError, match="got"):
            make()
    with pytest.raises(ValueError, match="layers 0 to 3"):
        GradientRecorder(3).arm(net)
    with pytest.raises(GrapNetError, match="most_cells"):
        CovarianceRecorder(0, most_cells=34).arm(net)
    CovarianceRecorder(0, most_cells=35).arm(net)
