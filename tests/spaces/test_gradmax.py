"""GrowWidth(init="gradmax") on adopted models, against an explicit SVD."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import grapnet as gn
from grapnet.core._errors import GrapNetError
from grapnet.rules import At, Budget, GrowWidth, RuleManager, SpaceGradientRecorder
from tests.spaces import huggingface, oracle, zoo
from tests.spaces.subjects import Subject, loss_of, subject

EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Fork(nn.Module):
    """A convolution that two others read, one of them in a coarser grid."""

    def __init__(self) -> None:
        super().__init__()
        self.above = nn.Conv2d(3, 5, 3, padding=1)
        self.left = nn.Conv2d(5, 4, 3, padding=1, stride=2)
        self.right = nn.Conv2d(5, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.softplus(self.above(x)) - functional.softplus(torch.zeros_like(x[:1, :1]))
        return self.left(h).flatten(1).square().sum(1) + self.right(h).flatten(1).sum(1)


def pair(above: nn.Module, activation: nn.Module, below: nn.Module) -> nn.Module:
    return nn.Sequential(above, activation, below, nn.Flatten(), nn.Tanh())


# the model, its input, the name of the space, the writer, the readers, the slope at 0
PAIRS: dict[str, Any] = {
    "linear": lambda: (
        pair(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 7)),
        torch.randn(9, 6),
        ("0", ["2"], 1.0),
    ),
    "tokens": lambda: (
        pair(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 7)),
        torch.randn(3, 4, 6),
        ("0", ["2"], 0.5),
    ),
    "padded": lambda: (
        pair(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3, padding=1)),
        torch.randn(4, 3, 7, 6),
        ("0", ["2"], 1.0),
    ),
    "strided": lambda: (
        pair(
            nn.Conv2d(3, 5, (3, 2), stride=2),
            nn.Tanh(),
            nn.Conv2d(5, 4, 3, stride=(2, 3), padding=(2, 1), dilation=(1, 2)),
        ),
        torch.randn(4, 3, 15, 14),
        ("0", ["2"], 1.0),
    ),
    "one dimension": lambda: (
        pair(nn.Conv1d(3, 5, 3, padding="same"), nn.ReLU(), nn.Conv1d(5, 4, 4, stride=3)),
        torch.randn(4, 3, 12),
        ("0", ["2"], 1.0),
    ),
    "three dimensions": lambda: (
        pair(nn.Conv3d(2, 3, 2), nn.ReLU(), nn.Conv3d(3, 2, 2, padding=1)),
        torch.randn(2, 2, 4, 5, 4),
        ("0", ["2"], 1.0),
    ),
    "fork": lambda: (Fork(), torch.randn(3, 3, 8, 9), ("above", ["left", "right"], 0.5)),
}


@pytest.fixture(params=sorted(PAIRS))
def case(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(1)
    model, x, names = PAIRS[request.param]()
    return model.double(), x.double(), names


def loss_on(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(2)
    output = model(x)
    return (output - torch.randn_like(output)).square().sum()


def widened_by_hand(model: nn.Module, x: Tensor, names: Any) -> Tensor:
    """Returns the gradient of the incoming weights of a new node as a linear map of its outgoing
    weights, [cells above, cells below]: by autograd, on a model with one node more.
    """
    writer, readers, _ = names
    above = copy.deepcopy(model.get_submodule(writer))
    columns = []
    for reader in readers:
        below = model.get_submodule(reader)
        cells = below.weight[:, 0].numel()
        for cell in range(cells):
            wider = copy.deepcopy(model)
            first: Any = wider.get_submodule(writer)
            first.weight = nn.Parameter(
                torch.cat([above.weight, torch.zeros_like(above.weight[:1])]).detach()
            )
            tiny = torch.full((1,), 2.0**-100, dtype=torch.float64)
            first.bias = nn.Parameter(torch.cat([above.bias.detach(), tiny]))
            for path in readers:
                module: Any = wider.get_submodule(path)
                extra = torch.zeros_like(module.weight[:, :1])
                if path == reader:
                    extra.view(-1)[cell] = 1e-6
                module.weight = nn.Parameter(torch.cat([module.weight, extra], 1).detach())
            loss_on(wider, x).backward()
            columns.append(first.weight.grad[-1].flatten() / 1e-6)
    return torch.stack(columns, 1)


def recorded(net: Any, model: nn.Module, space: str, x: Tensor) -> Tensor:
    recorder = SpaceGradientRecorder(net, space)
    recorder.arm(net)
    for _ in range(2):
        loss_on(model, x).backward()
    assert recorder.count == 2
    model.zero_grad()
    recorder.disarm()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return recorder.matrix()


def test_gradients_are_those_of_a_wider_model(case: Any) -> None:
    model, x, names = case
    expected = widened_by_hand(model, x, names) / names[2]
    net = gn.adopt(model, x[:2])
    matrix = recorded(net, model, names[0], x)
    assert matrix.shape == expected.shape
    torch.testing.assert_close(matrix, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(1, 0, 1), (1, 1, 1), (1, 2, 2)], ids=str
)
def test_outgoing_weights_are_the_leading_singular_vectors(
    stride: int, padding: int, dilation: int
) -> None:
    torch.manual_seed(0)
    below = nn.Conv2d(5, 4, 3, padding=padding, dilation=dilation)
    model = pair(nn.Conv2d(3, 5, 3, stride), nn.ReLU(), below).double()
    x = torch.randn(4, 3, 9, 9, dtype=torch.float64)
    net = gn.adopt(model, x[:2])
    # The matrix of the paper: unfolded inputs times unfolded gradients, the kernel turned around.
    gradients = []
    hook = below.register_full_backward_hook(lambda _, __, dz: gradients.append(dz[0]))
    manager = RuleManager()
    manager.add(GrowWidth("0", 3, "gradmax", scale=0.5, owner="new"))
    manager.start(net)
    loss_on(model, x).backward()
    hook.remove()
    turned = dilation * 2 - padding
    unfolded = functional.unfold(x, 3, stride=stride)  # [batch, 27, positions]
    back = functional.unfold(gradients[0], 3, dilation=dilation, padding=turned)
    back = back.view(4, 4, 9, -1).flip(2).flatten(1, 2)  # [batch, 36, positions]
    matrix = torch.einsum("bip,bop->io", unfolded, back)
    _, strength, directions = torch.linalg.svd(matrix)
    model.zero_grad()
    before = model(x)
    manager.apply(net, 0)
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)
    outgoing = below.weight[:, 5:].detach().transpose(0, 1).flatten(1)  # [3, 36]
    torch.testing.assert_close((outgoing @ directions[:3].t()).abs(), 0.5 * torch.eye(3).double())
    assert int(model[0].weight[5:].count_nonzero()) == 0
    assert 0 < model[0].bias[5:].max().item() < 1e-20
    assert net.space("0").owners[5:] == ["new"] * 3
    # No other outgoing weights of this norm have a larger gradient.
    loss_on(model, x).backward()
    norms = model[0].weight.grad[5:].flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, 0.5 * strength[:3], rtol=1e-9, atol=0)


def made(name: str) -> Subject:
    if name in zoo.MODELS:
        return subject(zoo.MODELS[name]())
    return subject(huggingface.FAMILIES[name]())


@pytest.mark.parametrize(
    ("name", "space"),
    [("vit", "blocks.0.fc1"), ("gpt2", "transformer.h.1.mlp.c_fc"), ("vgg", "8")],
    ids=["vit", "gpt2", "vgg"],
)
def test_a_model_grows_while_it_trains(name: str, space: str) -> None:
    found = made(name)
    nodes = found.net.space(space)
    size = len(nodes)
    manager = RuleManager()
    manager.add(GrowWidth(nodes, 2, "gradmax"), schedule=At(1))
    manager.start(found.net)
    found.step()
    assert manager.apply(found.net, 0) is None
    found.step()
    before = found.snapshot()
    outputs = found.outputs()
    preview = manager.apply(found.net, 1, dry_run=True)
    assert preview.spaces == {space: (size, size + 2)}
    assert oracle.same(before, found.snapshot()) == []
    commit = manager.apply(found.net, 1)
    assert commit is not None
    assert oracle.largest_difference(outputs, found.outputs()) < 1e-12
    gn.check(found.net)
    writer = found.net._grids()[nodes.writers[0]].parameter
    out_dim = {"gpt2": 1}.get(name, 0)
    loss_of(found.model, found.case).backward()
    born = writer.grad.movedim(out_dim, 0)[size:]
    assert bool((born.flatten(1).norm(dim=1) > 0).all())
    found.model.zero_grad()
    found.net.undo()
    assert oracle.same(before, found.snapshot()) == []
    found.net.redo()
    found.step()
    assert bool((writer.movedim(out_dim, 0)[size:] != 0).any())


def test_no_more_nodes_than_directions_or_than_a_budget_allows() -> None:
    torch.manual_seed(1)
    model, x, _ = PAIRS["linear"]()
    net = gn.adopt(model, x)
    manager = RuleManager()
    manager.add(GrowWidth("0", 100, "gradmax"))
    with manager.recording(net):
        loss_on(model, x).backward()
    manager.apply(net, 0)
    assert len(net.space("0")) == 5 + 2 * 6
    manager = RuleManager(budget=Budget(edits=2 * (6 + 7) + 1))
    manager.add(GrowWidth("0", 5, "gradmax"))
    with manager.recording(net):
        loss_on(model, x).backward()
    manager.apply(net, 1)
    assert len(net.space("0")) == 5 + 2 * 6 + 2


REFUSED = {
    "norm between": ("resnet", "layer1.0.conv1", "norm"),
    "several writers": ("resnet", "conv1", "one tensor"),
    "heads": ("vit", "blocks.0.attn.qkv#2", "positions"),
    "flatten between": ("vgg", "3", "shape"),
    "gate": ("gqa_decoder", None, "one tensor"),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_other_spaces_are_refused_with_the_reason(kind: str) -> None:
    name, space, word = REFUSED[kind]
    found = made(name)
    if space is None:
        space = next(one.name for one in found.free if len(one.writers) == 2)
    manager = RuleManager()
    manager.add(GrowWidth(space, 1, "gradmax"))
    with pytest.raises(gn.errors.EditError, match=word):
        manager.start(found.net)
    assert found.net.version == 0


@pytest.mark.parametrize("kind", ["sigmoid", "relu without bias"])
def test_activations_without_a_slope_at_0_are_refused(kind: str) -> None:
    above = nn.Linear(4, 5, bias=kind == "sigmoid")
    activation = nn.Sigmoid() if kind == "sigmoid" else nn.ReLU()
    model = pair(above, activation, nn.Linear(5, 3))
    x = torch.randn(6, 4)
    net = gn.adopt(model, x[:2])
    manager = RuleManager()
    manager.add(GrowWidth("0", 1, "gradmax"))
    with manager.recording(net):
        loss_on(model, x).backward()
    with pytest.raises(gn.errors.EditError, match="slope"):
        manager.apply(net, 0)
    assert net.version == 0
    # A GELU has one without a bias.
    model[1] = nn.GELU()
    net = gn.adopt(model, x[:2])
    manager = RuleManager()
    manager.add(GrowWidth("0", 1, "gradmax"))
    with manager.recording(net):
        loss_on(model, x).backward()
    before = model(x)
    manager.apply(net, 0)
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-6)


class Weighted(nn.Module):
    """A Linear whose nodes are weighted, token by token, before another reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.above = nn.Linear(4, 5)
        self.below = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.below(self.above(x).relu() * x.mean(2, keepdim=True))


def test_positions_that_are_weighted_are_refused() -> None:
    model = Weighted()
    x = torch.randn(3, 6, 4)
    net = gn.adopt(model, x[:2])
    manager = RuleManager()
    manager.add(GrowWidth("above", 1, "gradmax"))
    with manager.recording(net):
        loss_on(model, x).backward()
    with pytest.raises(gn.errors.EditError, match="positions"):
        manager.apply(net, 0)
    assert net.version == 0


def test_neighbours_and_removals_in_the_same_edit_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(7, 4)
    net = gn.adopt(model, x[:2])
    manager = RuleManager()
    manager.add(GrowWidth(("0", "2"), 1, "gradmax"))
    with manager.recording(net):
        loss_on(model, x).backward()
    with pytest.raises(gn.errors.EditError, match="one after the other"):
        manager.apply(net, 0)
    manager = RuleManager()
    manager.add(lambda net, edit, context: edit.remove_nodes(net.space("2")[:1]), name="remove")
    manager.add(GrowWidth("0", 1, "gradmax"))
    with manager.recording(net):
        loss_on(model, x).backward()
    with pytest.raises(gn.errors.EditError, match="removes nodes"):
        manager.apply(net, 0)
    assert net.version == 0


def test_evidence_begins_anew_with_other_nodes_and_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    found = made("vit")
    manager = RuleManager()
    manager.add(GrowWidth("blocks.0.fc1", 2, "gradmax"), schedule=At(5))
    with manager.recording(found.net):
        found.step()
    gn.save(path, found.net, optimizer=found.optimizer, rules=manager)
    second = made("vit")
    other = RuleManager()
    other.add(GrowWidth("blocks.0.fc1", 2, "gradmax"), schedule=At(5))
    gn.restore(path, into=second.net, optimizer=second.optimizer, rules=other)
    for one, own in ((found, manager), (second, other)):
        own.apply(one.net, 5)
        assert len(one.net.space("blocks.0.fc1")) == 33
    weights = [one.model.get_submodule("blocks.0.fc2").weight for one in (found, second)]
    assert torch.equal(weights[0], weights[1])
    recorder = SpaceGradientRecorder(found.net, "blocks.0.fc1")
    recorder.arm(found.net)
    found.step()
    # The space itself may change, what is beside it not.
    with found.net.edit() as edit:
        edit.remove_nodes(found.net.space("blocks.0.fc1")[:3])
    assert recorder.count == 1
    with found.net.edit() as edit:
        edit.remove_nodes(found.net.space("patch_embed")[:2])
    assert recorder.count == 0
    found.step()
    assert recorder.matrix().shape == (18, 18)


class Twice(nn.Module):
    """Calls a Linear twice; another reads both results, or their sum."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.above = nn.Linear(4, 5)
        self.below = nn.Linear(5, 3)
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        first = self.above(x).relu()
        second = self.above(x.flip(0) + 1).relu()
        if self.together:
            return self.below(first + second).exp()
        return (self.below(first) * self.below(second)).exp()


def test_modules_that_are_called_twice() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    for together in (False, True):
        model = Twice(together).double()
        expected = widened_by_hand(model, x, ("above", ["below"], 1.0))
        net = gn.adopt(model, x[:2])
        recorder = SpaceGradientRecorder(net, "above")
        recorder.arm(net)
        loss_on(model, x).backward()
        if together:
            with pytest.raises(GrapNetError):
                recorder.matrix()
        else:
            scale = float(expected.abs().max())
            torch.testing.assert_close(recorder.matrix(), expected, rtol=1e-6, atol=1e-6 * scale)


def test_a_pass_from_before_an_edit_or_with_infinite_gradients_does_not_count() -> None:
    model, x, _ = PAIRS["padded"]()
    net = gn.adopt(model, x[:2])
    recorder = SpaceGradientRecorder(net, "0")
    recorder.arm(net)
    (loss_on(model, x) * float("inf")).backward()
    assert (recorder.count, recorder.left_out) == (0, 1)
    with torch.no_grad():
        model(x)
    loss_on(model, x).backward()
    assert recorder.count == 1
    recorder.disarm()
    loss_on(model, x).backward()
    assert recorder.count == 1
