"""Tests of repair on adopted models, beside least squares over the rows themselves."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import grapnet as gn
from grapnet.errors import EditError, StaleError
from grapnet.rules import CovarianceSifter, GramRecorder, RuleContext, gram_recorders, repair
from grapnet.spaces import Example


def watched(net, model: nn.Module, x: Tensor, *spaces: str) -> dict[str, GramRecorder]:
    """Returns recorders of what reads spaces, which have seen data."""
    found = gram_recorders(net, list(spaces))
    for recorder in found.values():
        recorder.arm(net)
    with torch.no_grad():
        model(x)
    for recorder in found.values():
        recorder.disarm()
    return found


def inputs_of(model: nn.Module, path: str, x: Tensor) -> Tensor:
    """Returns what a module gets."""
    found: list[Tensor] = []

    def note(module: object, args: tuple[Tensor, ...]) -> None:
        found.append(args[0].detach())

    hook = model.get_submodule(path).register_forward_pre_hook(note)
    with torch.no_grad():
        model(x)
    hook.remove()
    return found[0]


def matrix(module: Any) -> Tensor:
    """Returns the weight and the bias of a module, [out, in · kernel + 1]."""
    return torch.cat([module.weight.flatten(1), module.bias[:, None]], 1).detach()


def with_one(rows: Tensor) -> Tensor:
    rows = rows.reshape(-1, rows.shape[-1])
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def remove(net, evidence, *nodes, **settings):
    """Removes nodes and repairs."""
    with net.edit() as edit:
        for some in nodes:
            edit.remove_nodes(some)
        return repair(net, edit, evidence, **settings)


class Attention(nn.Module):
    """Attention of four heads of width 3, without a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 12)
        self.k = nn.Linear(6, 12)
        self.v = nn.Linear(6, 12)
        self.o = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for module in (self.q, self.k, self.v):
            parts.append(module(x).unflatten(-1, (-1, 3)).transpose(1, 2))
        h = functional.scaled_dot_product_attention(*parts)
        return self.o(h.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated block without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Linear(6, 8, bias=False)
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def test_a_gated_block_without_biases():
    torch.manual_seed(0)
    model = Gated().double()
    x = torch.randn(20, 5, 6).double()
    net = gn.adopt(model, x)
    rows = inputs_of(model, "down", x).reshape(-1, 8)
    target = rows @ model.down.weight.detach().t()
    evidence = watched(net, model, x, "gate")
    remove(net, evidence, net.space("gate")[[0, 3, 5]], damping=0.0)
    expected = torch.linalg.lstsq(rows[:, [1, 2, 4, 6, 7]], target).solution.t()
    torch.testing.assert_close(model.down.weight.detach(), expected, atol=1e-8, rtol=1e-8)
    assert model.down.bias is None


def test_heads_of_attention():
    torch.manual_seed(0)
    model = Attention().double()
    x = torch.randn(20, 7, 6).double()
    net = gn.adopt(model, x)
    (heads,) = [space for space in net.spaces if len(space) == 4]
    rows = with_one(inputs_of(model, "o", x))
    before = model(x).detach()
    target = before.reshape(-1, 5)
    evidence = watched(net, model, x, heads.name)
    (done,) = remove(net, evidence, heads[[1]], damping=0.0)
    stays = [0, 1, 2, 6, 7, 8, 9, 10, 11, 12]
    expected = torch.linalg.lstsq(rows[:, stays], target).solution.t()
    found = matrix(model.o)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)
    # What the report says is left is what is left.
    rest = (model(x).detach() - before).square().sum() / before.square().sum()
    assert done.left == pytest.approx(rest.item())
    net.undo()
    assert torch.equal(model(x).detach(), before)
    assert not evidence["o"].is_stale


def test_convolutions_behind_a_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1)
    )
    model.double().eval()
    x = torch.randn(20, 3, 9, 9).double()
    net = gn.adopt(model, x)
    before = model(x).detach()
    target = before.flatten(2).transpose(1, 2).reshape(-1, 4)
    cells = functional.unfold(inputs_of(model, "3", x), 3, stride=2, padding=1)
    rows = with_one(cells.transpose(1, 2))
    evidence = watched(net, model, x, "0")
    remove(net, evidence, net.space("0")[[0, 6]], damping=0.0)
    stays = [c * 9 + place for c in (1, 2, 3, 4, 5, 7) for place in range(9)] + [72]
    expected = torch.linalg.lstsq(rows[:, stays], target).solution.t()
    found = matrix(model[3])
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)
    net.undo()
    assert torch.equal(model(x).detach(), before)


def test_channels_behind_a_flatten():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3))
    model.double()
    x = torch.randn(200, 2, 5, 5).double()
    net = gn.adopt(model, x)
    rows = with_one(inputs_of(model, "3", x))
    target = model(x).detach()
    evidence = watched(net, model, x, "0")
    remove(net, evidence, net.space("0")[[1]], damping=0.0)
    stays = [*range(9), *range(18, 37)]
    expected = torch.linalg.lstsq(rows[:, stays], target).solution.t()
    found = matrix(model[3])
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)


def test_cut_and_frozen_relations():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 5)).double()
    x = torch.randn(100, 4).double()
    net = gn.adopt(model, x)
    space = net.space("0")
    with net.edit() as edit:
        edit.cut(space[[0, 1]].outgoing(to=net.space("2")[[0, 2]]))
        edit.freeze(space[[2]].outgoing())
    before = matrix(model[2])
    absent = before == 0
    assert int(absent.sum()) == 4
    rows = with_one(inputs_of(model, "2", x))
    leaving = torch.zeros(5, 10, dtype=torch.bool)
    leaving[:, 3] = True
    leaving[1, [4, 5]] = True
    evidence = watched(net, model, x, "0")
    with net.edit() as edit:
        edit.remove_nodes(space[[3]])
        edit.cut(space[[4, 5]].outgoing(to=net.space("2")[[1]]))
        repair(net, edit, evidence, damping=0.0)
    free = ~(absent | leaving)
    free[:, 2] = False
    found = matrix(model[2])
    stays = [0, 1, 2, *range(4, 10)]
    for child in range(5):
        missing = rows @ torch.where(leaving[child], before[child], 0)
        expected = torch.where(leaving[child], 0, before[child])
        expected[free[child]] += torch.linalg.lstsq(rows[:, free[child]], missing).solution
        torch.testing.assert_close(found[child], expected[stays], atol=1e-8, rtol=1e-8)
    assert torch.equal(found[:, 2], before[:, 2])
    assert int((found == 0).sum()) == 6


@pytest.mark.parametrize("repairs", [True, False])
def test_orphans_leave_the_least_squares_of_their_readers(repairs):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3)]
    model = nn.Sequential(*layers).double()
    x = torch.randn(100, 4).double()
    net = gn.adopt(model, x)
    first = net.space("0")
    second = net.space("2")
    expected = []
    for path, stays in (("2", [2, 3, 4, 5, 6, 7, 8, 9]), ("4", [0, 1, 2, 3, 4, 6])):
        rows = with_one(inputs_of(model, path, x))
        target = rows @ matrix(model.get_submodule(path)).t()
        expected.append(torch.linalg.lstsq(rows[:, stays], target).solution.t())
    evidence = watched(net, model, x, "0", "2")
    with net.edit() as edit:
        edit.cut(first[[0, 1]].incoming())
        # Node 5 is left with parents that leave.
        edit.cut(first[2:].outgoing(to=second[[5]]))
        edit.remove_orphans()
        if repairs:
            done = repair(net, edit, evidence, damping=0.0)
            assert [one.children for one in done] == [5, 3]
    assert (len(first), len(second)) == (7, 5)
    expected[0] = expected[0][:5]
    for path, best in zip(("2", "4"), expected, strict=True):
        found = matrix(model.get_submodule(path))
        assert torch.allclose(found, best, atol=1e-8, rtol=1e-8) == repairs


def test_orphans_of_a_sifter_are_repaired_as_removed_nodes_are():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(8, 3, 1)).double().eval()
    x = torch.randn(20, 2, 7, 7).double()
    net = gn.adopt(model, x)
    sifter = CovarianceSifter(transitions=["2"])
    evidence = {**sifter.recorders(net), **gram_recorders(net)}
    for recorder in evidence.values():
        recorder.arm(net)
    before = model(x).detach()
    for recorder in evidence.values():
        recorder.disarm()
    space = net.space("2")
    outputs = []
    for repairs in (False, True):
        with net.edit() as edit:
            sifter(net, edit, RuleContext(evidence=evidence))
            if repairs:
                (done,) = repair(net, edit, evidence)
                assert done.children == 3
        outputs.append(model(x).detach())
        assert len(space) == 4
        assert edit.receipt is not None
        gone = edit.receipt.change.layers[space.index].index.removed
        net.undo()
        remove(net, evidence, space[gone])
        removed = model(x).detach()
        net.undo()
    sifted, repaired = outputs
    assert torch.equal(repaired, removed)
    assert (repaired - before).square().sum() < (sifted - before).square().sum()


def test_a_reader_in_the_layout_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = transformers.pytorch_utils.Conv1D
    model = nn.Sequential(kind(8, 4), nn.GELU(), kind(3, 8)).double()
    x = torch.randn(50, 4).double()
    net = gn.adopt(model, x)
    rows = with_one(inputs_of(model, "2", x))
    target = model(x).detach()
    evidence = watched(net, model, x, "0")
    remove(net, evidence, net.space("0")[[2, 3]], damping=0.0)
    expected = torch.linalg.lstsq(rows[:, [0, 1, 4, 5, 6, 7, 8]], target).solution
    last: Any = model[2]
    found = torch.cat([last.weight, last.bias[None]], 0).detach()
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)


class Stream(nn.Module):
    """A stream under a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class Weighed(nn.Module):
    """A softmax over the nodes of a space, so that those that stay change with those that leave."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).softmax(-1))


@pytest.mark.parametrize(("kind", "verdict"), [(Stream, "normalised"), (Weighed, "unproved")])
def test_nodes_that_change_with_others_are_refused_before_anything_compared_them(kind, verdict):
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(40, 4)
    net = gn.adopt(model, x)
    space = net.space("first")
    assert space.verdict == verdict
    recorder = GramRecorder("first", at="last")
    recorder.arm(net)
    before = model(x).detach()
    with pytest.raises(EditError):
        remove(net, recorder, space[[0]])
    assert torch.equal(model(x).detach(), before)
    assert net.version == 0
    with pytest.raises(EditError):
        gram_recorders(gn.adopt(kind(), x), "first")


def test_relations_behind_a_norm_are_repaired():
    torch.manual_seed(0)
    model = Stream()
    x = torch.randn(40, 4)
    net = gn.adopt(model, x)
    recorder = GramRecorder("first", at="last")
    recorder.arm(net)
    model(x)
    cut = net.space("first")[[0]].outgoing(to=net.space("last"))
    with net.edit() as edit:
        edit.cut(cut)
        (done,) = repair(net, edit, recorder)
    assert done.left < done.lost


def test_stale_and_missing_evidence_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 5)).double()
    x = torch.randn(30, 4).double()
    net = gn.adopt(model, x)
    evidence = watched(net, model, x, "0")
    with pytest.raises(EditError):
        remove(net, [], net.space("0")[[0]])
    with torch.no_grad():
        first: Any = model[0]
        first.weight.mul_(2)
    before = model(x).detach()
    with pytest.raises(StaleError):
        remove(net, evidence, net.space("0")[[0]])
    assert net.version == 0
    assert torch.equal(model(x).detach(), before)


def test_weights_that_are_not_trained_stay_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 5)).double()
    x = torch.randn(30, 4).double()
    net = gn.adopt(model, x)
    last: Any = model[2]
    last.weight.requires_grad_(False)
    before = matrix(last)
    evidence = watched(net, model, x, "0")
    remove(net, evidence, net.space("0")[[0]])
    assert torch.equal(matrix(last)[:, :-1], before[:, 1:-1])
    assert not torch.equal(matrix(last)[:, -1], before[:, -1])


class Rounds(nn.Module):
    """A block on a stream that is run so many times."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.up = nn.Linear(4, 9)
        self.down = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = x + self.down(self.up(x).relu())
        return x


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_is_left_is_not_known_of_a_module_that_is_called_again(rounds):
    torch.manual_seed(0)
    model = Rounds(rounds).double()
    x = torch.randn(40, 4).double()
    # Passes for several examples are no calls of one pass.
    net = gn.adopt(model, x[:1], examples=[Example((x[:2],))])
    evidence = watched(net, model, x, "up")
    (done,) = remove(net, evidence, net.space("up")[[0, 1]], damping=0.0)
    assert 0 < done.lost < 1
    assert math.isnan(done.left) == (rounds == 2)
