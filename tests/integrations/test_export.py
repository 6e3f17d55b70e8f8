"""Models with nets inside, exported: their snapshots compute what they compute, in torch,
torch.export and ONNX.
"""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.rules import ActivationRecorder

pytestmark = [
    # one worker: the first ONNX export of a process takes seconds
    pytest.mark.xdist_group("export"),
    # torch.onnx copies a tree spec in a way that torch itself deprecates; nothing a caller could do
    # differently.
    pytest.mark.filterwarnings(
        r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"
    ),
]

CLOSE = 1e-5
BATCH = torch.export.Dim("batch")


class Block(nn.Module):
    """A transformer layer of one's own: attention, and a net as its position-wise FFN."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.ffn = gn.GrapNet([width, hidden, width], activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.ffn(self.second(x))


class Tied(nn.Module):
    """One net in two places, and one Parameter of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = gn.GrapNet([4, 3, 4])
        self.scale = self.same = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.first(x) * self.scale) * self.same


def prune(net: gn.GrapNet) -> None:
    with net.edit(reason="half of it", allow_dead=True) as edit:
        for layer in net.layers[:-1]:
            edit.cut(layer.outgoing().smallest(fraction=0.5))
        edit.set_activation(net.layers[-1][:2], "tanh")


def convolutional() -> tuple[nn.Module, Tensor]:
    net = gn.GrapNet([72, 8, 3])
    prune(net)
    norm = nn.BatchNorm2d(2)
    norm(torch.randn(8, 2, 5, 5))  # statistics of its own
    return nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Flatten(), nn.Dropout(0.5), net), torch.randn(
        4, 1, 8, 8
    )


def transformer() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(4, 8), Block(8, 16))
    prune(model[1].ffn)
    return model, torch.randn(3, 5, 4)


def tied() -> tuple[nn.Module, Tensor]:
    model = Tied()
    prune(model.first)
    return model, torch.randn(4, 4)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    build.__name__: build for build in (convolutional, transformer, tied)
}
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def run_onnx(model: nn.Module, example: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
    """Writes a model with a free batch size and returns what onnxruntime makes of it."""
    torch.onnx.export(
        model, (example,), path, dynamo=True, dynamic_shapes=({0: BATCH},), verbose=False
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def assert_close(output: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(output, expected.detach(), rtol=0, atol=CLOSE)


@every_model
def test_a_snapshot_computes_what_the_model_computes(build):
    model, x = build()
    expected = model.eval()(x)
    model.train()
    plain = gn.snapshot(model)
    assert_close(plain(x), expected)
    assert model.training
    assert not any(isinstance(module, gn.GrapNet) or module.training for module in plain.modules())
    assert not any(parameter.requires_grad for parameter in plain.parameters())
    mine = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    assert not any(each.data_ptr() in mine for each in (*plain.parameters(), *plain.buffers()))


@every_model
def test_exported_programs_and_onnx_files_of_models_after_cuts_run_at_any_batch(build, tmp_path):
    model, x = build()
    model.eval()
    plain = gn.snapshot(model)
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: BATCH},)).module()
    run = run_onnx(plain, x, tmp_path / "model.onnx")
    for batch in (1, 7):
        other = torch.randn(batch, *x.shape[1:])
        assert_close(program(other), model(other))
        assert_close(run(other), model(other))


@pytest.mark.sparse
def test_a_live_net_is_exported_with_its_parameters():
    net = gn.GrapNet([6, 9, 5, 3])
    prune(net)
    net.execution.use("sparse")
    program = torch.export.export(
        net, (torch.randn(4, net.sizes[0]),), dynamic_shapes=({0: BATCH},)
    ).module()
    assert [name for name, _ in program.named_parameters()] == [
        name for name, _ in net.named_parameters()
    ]
    x = torch.randn(33, net.sizes[0])
    expected = net(x)
    assert_close(program(x), expected)
    program(x).sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(program.parameters(), net.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)
    assert net.execution.choices() == ["sparse"] * len(net.transitions)


def test_a_model_with_live_nets_is_exported_at_any_batch_and_length(tmp_path):
    model, x = transformer()
    length = torch.export.Dim("length")
    program = torch.export.export(
        model.eval(), (x,), dynamic_shapes=({0: BATCH, 1: length},)
    ).module()
    other = torch.randn(2, 9, 4)
    assert_close(program(other), model(other))
    net = model[1].ffn
    x = torch.randn(33, 8)
    assert_close(run_onnx(net, torch.randn(4, 8), tmp_path / "net.onnx")(x), net(x))


@pytest.mark.filterwarnings(
    "ignore:You are using the legacy TorchScript-based ONNX export:DeprecationWarning"
)
@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.trace.*` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_cannot_see_a_live_net_is_refused_and_takes_its_snapshot(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), gn.GrapNet([4, 5, 2], density=0.5)).eval()
    x = torch.randn(2, 3)
    plain = gn.snapshot(model)
    path = tmp_path / "old.onnx"
    with pytest.raises(gn.errors.PlanError, match=r"gn\.snapshot\(model\)"):
        torch.onnx.export(model, (x,), path, dynamo=False)
    with pytest.raises(gn.errors.PlanError, match=r"gn\.snapshot"):
        torch.jit.trace(lambda h: model[1](h), torch.randn(2, 4))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="PlanError"):
        torch.export.export(model, (x,), strict=True)
    torch.onnx.export(plain, (x,), path, dynamo=False)
    assert_close(torch.jit.trace(plain, x)(x), model(x))
    assert_close(torch.export.export(plain, (x,), strict=True).module()(x), model(x))
    assert_close(torch.export.export(model, (x,)).module()(x), model(x))


def test_what_is_shared_in_the_model_is_shared_in_the_snapshot():
    plain = gn.snapshot(tied()[0])
    assert plain.first is plain.again
    assert plain.scale is plain.same


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1)


def halve(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.5))


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"
)
def test_torch_transformer_layers_find_the_weights_they_read_in_eval_mode():
    model = encoder()
    x = torch.randn(3, 5, 8)
    for layer in model.layers:
        layer.linear1, layer.linear2 = gn.from_module(layer.linear1), gn.GrapNet([16, 8])  # by hand
        halve(layer.linear1)
    # in training the layers call their parts and read no weights
    plain = gn.snapshot(model)
    expected = model(x)
    assert type(plain.layers[0].linear1) is nn.Linear
    assert_close(plain(x), expected)
    assert_close(plain(x, src_key_padding_mask=torch.zeros(3, 5, dtype=torch.bool)), expected)


def test_a_model_that_cannot_be_taken_says_why_and_which_net():
    model, x = transformer()
    expected = model.eval()(x)
    with pytest.raises(gn.errors.PlanError, match=r"1\.ffn: .*128.*100"):
        gn.snapshot(model, most_cells=100)
    model[1].ffn.execution.use("attention", transition=1)
    with pytest.raises(gn.errors.PlanError, match=r"1\.ffn: transition 1"):
        gn.snapshot(model)
    model[1].ffn.execution.use("auto")
    assert_close(gn.snapshot(model)(x), expected)
    bent = nn.ModuleDict(
        {"net": type("Bent", (gn.GrapNet,), {"forward": lambda self, x: x})([2, 1])}
    )
    with pytest.raises(gn.errors.PlanError, match="net: Bent"):
        gn.snapshot(bent)
    net = model[1].ffn
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing())
        with pytest.raises(gn.errors.EditError, match=r"1\.ffn: "):
            gn.snapshot(model)


@pytest.mark.parametrize("part", ["head", "head.layers.1", "head.transitions.0"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_a_plain_module_would_leave_out_are_refused_by_name(part, register):
    model = nn.Sequential(OrderedDict(body=nn.Linear(3, 4), head=gn.GrapNet([4, 5, 2])))
    recorder = ActivationRecorder(1)
    recorder.arm(model.head)
    x = torch.randn(2, 3)
    assert_close(gn.snapshot(model)(x), model(x))  # recorders only watch
    hook = getattr(model.get_submodule(part), register)(lambda *_: None)
    with pytest.raises(gn.errors.PlanError, match=f"^{re.escape(part)} has forward hooks"):
        gn.snapshot(model)
    hook.remove()
    gn.snapshot(copy.deepcopy(model))
    assert recorder.count == 2
