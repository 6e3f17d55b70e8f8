"""gn.capture where it runs eagerly: on a CPU, a captured step is the function with its backward
pass and the step of the optimizer.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR

import grapnet as gn
from grapnet.errors import CaptureError, OptimizerError
from tests.following.captured import FEATURES, Grafted, Twins, batch, plain_model, small_net

MODELS = {"net": small_net, "grafted": Grafted, "plain": plain_model}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_step_is_the_loop_that_a_user_writes(model: str, clip: float | None) -> None:
    twins = Twins(MODELS[model]("cpu"), adam, clip=clip)
    twins.train(5)
    assert twins.step.describe()["eager"] == 5


def test_clipping_comes_between_the_backward_pass_and_the_step() -> None:
    twins = Twins(small_net("cpu"), adam, clip=0.1)
    twins.both()
    squares = [p.grad.square().sum() for p in twins.models[0].parameters() if p.grad is not None]
    torch.testing.assert_close(sum(squares), torch.tensor(0.01), rtol=1e-4, atol=0.0)


def test_steps_go_on_through_edits() -> None:
    twins = Twins(small_net("cpu"), adam)

    def cut(net: gn.GrapNet) -> None:
        with net.edit(reason="cut") as edit:
            edit.cut(net.layers[0].outgoing().smallest(count=9))

    def undo(net: gn.GrapNet) -> None:
        net.undo()

    twins.train(3)
    twins.edit(cut)
    twins.train(3)
    twins.edit(undo)
    twins.train(3)


def test_gradients_do_not_add_up() -> None:
    net = small_net("cpu").eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    step = gn.capture(lambda x, y: cross_entropy(net(x), y), net, optimizer)
    step(*batch(0, "cpu"))
    first = net.transitions[0].weight.grad
    assert first is not None
    first = first.clone()
    step(*batch(0, "cpu"))
    assert torch.equal(first, net.transitions[0].weight.grad)


def test_all_results_are_returned_without_their_gradients() -> None:
    net = small_net("cpu")

    def function(batch: dict[str, Tensor], *, weight: float) -> tuple[Tensor, Tensor]:
        logits = net(batch["x"])
        return weight * cross_entropy(logits, batch["y"]), logits

    step = gn.capture(function, net, adam(net.parameters()))
    x, y = batch(0, "cpu")
    loss, logits = step({"x": x, "y": y}, weight=0.5)
    assert logits.shape == (32, 5)
    assert not loss.requires_grad
    assert not logits.requires_grad


@pytest.mark.parametrize("returned", [None, 1.0, (), [torch.ones(())], (torch.ones(()), 1.0)])
def test_other_results_than_tensors_are_refused(returned: object) -> None:
    net = small_net("cpu")
    before = net.transitions[0].weight.clone()
    step = gn.capture(lambda x: returned, net, adam(net.parameters()))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=type(returned).__name__):
        step(torch.ones(1, FEATURES))
    assert torch.equal(net.transitions[0].weight, before)


def test_a_batch_of_unknown_objects_is_refused() -> None:
    net = small_net("cpu")
    step = gn.capture(lambda x: net(x.values).sum(), net, adam(net.parameters()))

    class Rows:
        values = torch.ones(1, FEATURES)

    with pytest.raises(TypeError, match="Rows"):
        step(Rows())
    assert step.describe()["eager"] == 0


@pytest.mark.parametrize("name", ["LBFGS", "Adagrad", "SparseAdam", "Adafactor"])
def test_optimizers_that_need_the_host_are_refused_by_name(name: str) -> None:
    net = small_net("cpu")
    optimizer = getattr(torch.optim, name)(net.parameters())
    with pytest.raises(OptimizerError, match=name):
        gn.capture(lambda x: net(x).sum(), net, optimizer)


CAPTURED = ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Rprop"]


@pytest.mark.parametrize("name", [*CAPTURED, "SGD"])
def test_optimizers_of_torch_that_can_be_captured_are_taken(name: str) -> None:
    net = small_net("cpu")
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01)
    step = gn.capture(lambda x: net(x).sum(), net, optimizer)
    before = net.transitions[0].weight.detach().clone()
    step(torch.ones(1, FEATURES))
    assert not torch.equal(net.transitions[0].weight, before)


def test_subclasses_with_a_step_of_their_own_are_refused_unless_they_can_be_captured() -> None:
    class Renamed(torch.optim.SGD):
        pass

    class Counting(torch.optim.SGD):
        def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().step(closure)

    net = small_net("cpu")
    gn.capture(lambda x: net(x).sum(), net, Renamed(net.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="Counting"):
        gn.capture(lambda x: net(x).sum(), net, Counting(net.parameters(), lr=0.1))


def test_an_optimizer_that_wraps_another_is_refused() -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, inner.defaults)
            self.inner = inner

    net = small_net("cpu")
    with pytest.raises(OptimizerError, match="Lookahead"):
        gn.capture(lambda x: net(x).sum(), net, Lookahead(adam(net.parameters())))


def test_a_model_that_is_wrapped_for_several_processes_is_refused() -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    net = small_net("cpu")
    with pytest.raises(CaptureError, match="DistributedDataParallel"):
        gn.capture(lambda x: net(x).sum(), DistributedDataParallel(net), adam(net.parameters()))


def test_an_error_leaves_weights_gradients_and_optimizer_as_they_were() -> None:
    twins = Twins(small_net("cpu"), adam)
    twins.train(2)
    net = twins.models[0]
    before = [p.detach().clone() for p in net.parameters()]
    gradients = [p.grad for p in net.parameters()]
    with pytest.raises(IndexError):
        twins.step(torch.ones(2, FEATURES), torch.tensor([0, 99]))
    for p, weight, gradient in zip(net.parameters(), before, gradients, strict=True):
        assert torch.equal(p, weight)
        assert p.grad is gradient
    twins.train(2)


def test_a_scaler_goes_on_after_an_error_in_between() -> None:
    net = small_net("cpu").eval()
    optimizer = adam(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen: list[float] = []

    def look() -> None:
        gradient = net.transitions[0].weight.grad
        assert gradient is not None
        seen.append(float(gradient.norm()))
        if len(seen) == 1:
            raise KeyError

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(net(x), y)

    step = gn.capture(loss_of, net, optimizer, after_backward=look, scaler=scaler)
    with pytest.raises(KeyError):
        step(*batch(0, "cpu"))
    step(*batch(0, "cpu"))
    # The function sees gradients of the loss itself, both times.
    norm = seen[1]
    assert seen[0] == pytest.approx(norm, rel=1e-6)
    # The control: gradients of the scaled loss are others.
    net.zero_grad()
    (8 * loss_of(*batch(0, "cpu"))).backward()
    seen.append(0.0)
    look()
    assert seen[-1] > 4 * norm


def test_a_cpu_leaves_the_settings_of_the_optimizer_alone() -> None:
    net = small_net("cpu")
    optimizer = adam(net.parameters())
    scheduler = ExponentialLR(optimizer, 0.5)
    step = gn.capture(lambda x, y: cross_entropy(net(x), y), net, optimizer)
    step(*batch(0, "cpu"))
    scheduler.step()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["capturable"], group["fused"]) == (0.01, False, None)


def test_an_optimizer_with_a_tensor_as_learning_rate_is_saved_and_restored(
    tmp_path: Path,
) -> None:
    net = small_net("cpu")
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.03), foreach=False)
    gn.attach(optimizer, net)
    step = gn.capture(lambda x, y: cross_entropy(net(x), y), net, optimizer)
    step(*batch(0, "cpu"))
    gn.save(tmp_path / "net", net, optimizer=optimizer)
    other = gn.load(tmp_path / "net")
    again = torch.optim.Adam(other.parameters(), lr=0.5)
    gn.restore(tmp_path / "net", optimizer=again)
    assert float(again.param_groups[0]["lr"]) == pytest.approx(0.03)
