"""GradientRecorder against the gradients of a net that has every relation, on every backend."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.core._errors import GrapNetError, StaleNodeError, StaleTopologyError
from grapnet.rules import At, GradientRecorder, GrowWidth, Rewire, RuleManager
from tests.execution.graphs import SUMS
from tests.rounding import SINGLE

from .watched import armed, batch, of_relations, related, run, small_net


@pytest.fixture
def net() -> gn.GrapNet:
    return small_net((6, 9, 8, 3), density=0.6)


def filled_up(net: gn.GrapNet, t: int) -> gn.GrapNet:
    """A copy in which every absent relation of a transition exists, with weight 0."""
    twin = copy.deepcopy(net)
    with twin.edit() as edit:
        for parent in twin.layers[t]:
            there = {child.uid for child in parent.children}
            missing = [child for child in twin.layers[t + 1].uids.tolist() if child not in there]
            if missing:
                edit.connect(parent, missing, weights=0.0)
    twin.zero_grad()
    return twin


def expected(net: gn.GrapNet, t: int, run: Callable[[gn.GrapNet], Any] = run) -> Tensor:
    """The gradient of every relation, present or not, [n_upper, n_lower]: that of the net that has
    them all.
    """
    twin = filled_up(net, t)
    run(twin)
    relations = twin.layers[t].outgoing()
    matrix = torch.zeros(len(twin.layers[t]), len(twin.layers[t + 1]), dtype=torch.float64)
    rows = (
        twin.layers[t].rows(relations.parents).long(),
        twin.layers[t + 1].rows(relations.children).long(),
    )
    matrix[rows] = relations.gradients.double()
    return matrix


@pytest.mark.parametrize("backend", [*SUMS, "auto"])
@pytest.mark.parametrize("t", range(3))
def test_it_is_the_gradient_of_every_relation_present_or_absent(
    net: gn.GrapNet, t: int, backend: str
) -> None:
    net.execution.use(backend)
    recorder = armed(GradientRecorder(t), net)
    run(net)
    relations = net.layers[t].outgoing()
    assert recorder.count == 1
    assert torch.allclose(
        of_relations(recorder, relations), net.transitions[t].weight.grad.view(-1)
    )
    assert torch.allclose(recorder.matrix(), expected(net, t))
    assert recorder.matrix()[~related(net, t)].abs().max() > 0.01


@pytest.mark.parametrize("size", [1, 40], ids=["factors", "matrix"])  # what is smaller is kept
def test_all_ways_to_ask_agree(net: gn.GrapNet, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grapnet.rules._gradients.CELLS", 160)  # several chunks
    recorder = armed(GradientRecorder(0), net)
    run(net, size)
    assert (recorder.state_dict()["evidence"]["matrix"] is None) == (size == 1)
    whole = recorder.matrix()
    parents = net.layers[0].uid.repeat_interleave(9)
    children = net.layers[1].uid.repeat(6)
    mixed = torch.randperm(len(parents), generator=torch.Generator().manual_seed(0))
    for chosen in (mixed, mixed[:2], mixed[:0]):
        found = recorder.of(parents[chosen], children[chosen])
        assert torch.allclose(found, whole.view(-1)[chosen])
    some = net.layers[0].outgoing()[::3]
    assert torch.allclose(of_relations(recorder, some), some.gradients)


def test_the_layers_may_lie_apart(net: gn.GrapNet) -> None:
    recorder = armed(GradientRecorder(0, 2), net)
    outputs = []
    received = []
    net.transitions[1].register_forward_hook(
        lambda _, args, z: received.append(z.register_hook(received.append))
    )
    net.layers[0].register_forward_hook(lambda _, args, h: outputs.append(h))
    run(net)
    assert torch.allclose(recorder.matrix(), outputs[0].t() @ received[-1])
    chosen = recorder.largest_absent(5)
    assert torch.allclose(
        chosen[2], recorder.matrix().abs().view(-1).sort(descending=True).values[:5]
    )


def test_under_attention_it_is_that_of_the_sum(net: gn.GrapNet) -> None:
    net.execution.use("attention", transition=0)
    recorder = armed(GradientRecorder(0), net)
    received = []
    net.transitions[0].register_forward_hook(
        lambda _, args, z: received.append(z.register_hook(received.append))
    )
    run(net)
    assert torch.allclose(recorder.matrix(), batch(net).t() @ received[-1])
    assert not torch.allclose(
        of_relations(recorder, net.layers[0].outgoing()), net.layers[0].outgoing().gradients
    )


def test_leading_dimensions_and_single_samples(net: gn.GrapNet) -> None:
    recorder = armed(GradientRecorder(1), net)
    net(batch(net, 12).view(2, 3, 2, 6)).square().sum().backward()
    assert torch.allclose(recorder.matrix(), expected(net, 1, lambda n: run(n, 12)))
    recorder.clear()
    net.zero_grad(set_to_none=False)
    run(net, 1)
    before = recorder.matrix()
    assert torch.allclose(before, expected(net, 1, lambda n: run(n, 1)))
    net.zero_grad(set_to_none=False)  # whose memory the bias's gradient is, with one sample
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(7.0)
    assert torch.equal(recorder.matrix(), before)


def test_an_input_that_is_written_over_later_does_no_harm(net: gn.GrapNet) -> None:
    recorder = armed(GradientRecorder(0), net)
    x = batch(net, 2)
    net(x).square().sum().backward()
    x.fill_(0)
    assert torch.allclose(recorder.matrix(), expected(net, 0, lambda n: run(n, 2)))


@pytest.mark.parametrize("sizes", [(2, 1), (40, 30)], ids=["factors", "matrix"])
def test_it_averages_over_backward_passes(net: gn.GrapNet, sizes: tuple[int, int]) -> None:
    recorder = armed(GradientRecorder(0), net)
    parts = [expected(net, 0, lambda n, s=s, i=i: run(n, s, i)) for i, s in enumerate(sizes)]
    for number, size in enumerate(sizes):
        run(net, size, number)  # gradients accumulate in .grad, which is the sum
    assert recorder.count == 2
    assert torch.allclose(recorder.matrix(), (parts[0] + parts[1]) / 2)
    assert torch.allclose(
        of_relations(recorder, net.layers[0].outgoing()), net.layers[0].outgoing().gradients / 2
    )
    recorder.clear()
    losses = [net(batch(net, size, number)).square().sum() for number, size in enumerate(sizes)]
    torch.stack(losses).sum().backward()
    assert recorder.count == 1  # several forward passes, one backward
    assert torch.allclose(recorder.matrix(), parts[0] + parts[1])
    loss = net(batch(net, sizes[0], 0)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert recorder.count == 3


def test_many_passes_take_no_more_memory_than_two_matrices(net: gn.GrapNet) -> None:
    recorder = armed(GradientRecorder(0), net)
    for _ in range(20):
        run(net, 3)
        state = recorder.state_dict()["evidence"]
        assert (
            sum(value.numel() for value in state.values() if isinstance(value, Tensor)) <= 2 * 6 * 9
        )
    assert torch.allclose(recorder.matrix(), expected(net, 0, lambda n: run(n, 3)))


def test_what_has_no_backward_is_not_recorded(net: gn.GrapNet) -> None:
    recorder = armed(GradientRecorder(0), net)
    with torch.no_grad():
        net(batch(net))
    net(batch(net))
    late = net(batch(net)).sum()
    recorder.disarm()
    late.backward()
    recorder.arm(net)
    assert recorder.count == 0
    early = net(batch(net)).sum()
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
    with pytest.raises(StaleTopologyError):
        early.backward()
    assert recorder.count == 0
    run(net)
    assert recorder.count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_is_recorded_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([6, 9, 3])
    recorder = armed(GradientRecorder(1), net)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = net(batch(net)).square().sum()
        loss.backward()
        found = recorder.matrix()
        chosen = of_relations(recorder, net.layers[1].outgoing())
    assert found.dtype == chosen.dtype == torch.float32
    tolerance = SINGLE if dtype == torch.float32 else 0.05
    assert torch.allclose(
        chosen, net.layers[1].outgoing().gradients, rtol=tolerance, atol=tolerance
    )
    half = gn.GrapNet([6, 9, 3], dtype=torch.bfloat16)
    recorder = armed(GradientRecorder(0), half)
    run(half)
    assert recorder.matrix().dtype == torch.float32


def test_frozen_relations_have_the_gradient_they_would_have(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.freeze(net.layers[0].outgoing()[::2])
    recorder = armed(GradientRecorder(0), net)
    run(net)
    found = of_relations(recorder, net.layers[0].outgoing())
    frozen = net.layers[0].outgoing().frozen
    assert torch.allclose(found[~frozen], net.layers[0].outgoing().gradients[~frozen])
    assert found[frozen].abs().min() > 0


def test_gradients_move_with_the_nodes(net: gn.GrapNet) -> None:
    for size in (1, 40):  # factors and matrix
        recorder = armed(GradientRecorder(0), net)
        run(net, size)
        before = recorder.matrix()
        uids = (net.layers[0].uid, net.layers[1].uid)
        with net.edit() as edit:
            edit.cut(net.layers[0].outgoing()[::4])
            edit.remove_nodes(net.layers[1][[0, 2]])
            new = edit.add_nodes(1, 2)
        kept = torch.isin(uids[1], net.layers[1].uid)
        assert torch.equal(recorder.matrix()[:, :-2], before[:, kept])
        assert (recorder.matrix()[:, -2:] == 0).all()
        assert torch.equal(
            recorder.of(uids[0], new.uids[:1].expand(6)), torch.zeros(6, dtype=torch.float64)
        )
        with pytest.raises(StaleNodeError):
            recorder.of(uids[0][:1], uids[1][:1])
        run(net, size, seed=1)
        assert torch.allclose(
            recorder.matrix()[:, -2:], expected(net, 0, lambda n, s=size: run(n, s, 1))[:, -2:] / 2
        )
        net.undo()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_passes_that_are_not_finite_are_left_out(net: gn.GrapNet, wrong: float) -> None:
    recorder = armed(GradientRecorder(0), net)
    (net(batch(net)).sum() * wrong).backward()
    assert (recorder.count, recorder.left_out) == (0, 1)
    run(net, 4, 1)
    (net(batch(net)).sum() * wrong).backward()
    assert (recorder.count, recorder.left_out) == (1, 2)
    assert torch.allclose(recorder.matrix(), expected(net, 0, lambda n: run(n, 4, 1)))
    recorder.clear()
    assert recorder.left_out == 0
    with pytest.raises(GrapNetError, match="seen nothing"):
        recorder.matrix()


@pytest.mark.parametrize(
    "rule",
    [Rewire(grow="gradient", window=4), GrowWidth(1, 2, "gradmax")],
    ids=["rewire", "gradmax"],
)
def test_rules_go_by_the_finite_passes_under_a_scaler(rule: Any) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([6, 8, 3], density=0.5)
    manager = RuleManager()
    manager.add(rule, schedule=At(0))
    manager.start(net)
    for scale in (float("inf"), 1.0, float("inf")):
        (net(batch(net, 8, 0)).square().sum() * scale).backward()
    assert manager.apply(net, 0) is not None
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())
    manager.add(rule, name="late", schedule=At(1))
    (net(batch(net, 8, 1)).square().sum() * float("inf")).backward()
    with pytest.raises(GrapNetError, match=r"'late' is due.*finite"):
        manager.apply(net, 1)
