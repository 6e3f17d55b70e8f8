"""Models with nets inside, exported: their snapshots compute what they compute, in torch,
torch.export and ONNX.
"""

import copy
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as prune_module

import grapnet as gn
from grapnet.rules import ActivationRecorder

from .exported import (
    ACTIVATIONS,
    MODELS,
    SideBySide,
    convolutional,
    prune,
    random_net,
    tied,
    transformer,
)

pytestmark = [
    # one worker: the first ONNX export of a process takes seconds
    pytest.mark.xdist_group("export"),
    # torch.onnx copies a tree spec in a way that torch itself deprecates; nothing a caller could do
    # differently.
    pytest.mark.filterwarnings(
        r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"
    ),
]

GUIDE = Path(__file__).parents[2] / "docs/guides/compose.md"
CLOSE = 1e-5
SEEDS = [range(start, start + 5) for start in range(0, 20, 5)]
BATCH = torch.export.Dim("batch")
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


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_onnx_equals_torch_on_twenty_randomly_edited_nets(seeds, tmp_path):
    side = SideBySide([random_net(seed) for seed in seeds])
    path, examples = tmp_path / "nets.onnx", side.inputs(4)
    free = (tuple({0: torch.export.Dim(f"batch_{n}")} for n in range(len(examples))),)
    torch.onnx.export(
        gn.snapshot(side), examples, path, dynamo=True, dynamic_shapes=free, verbose=False
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    for batch in (1, 33):
        xs = side.inputs(batch)
        outputs = session.run(None, {name: x.numpy() for name, x in zip(names, xs, strict=True)})
        for output, expected in zip(outputs, side(*xs), strict=True):
            assert_close(torch.from_numpy(output), expected)


def test_the_random_nets_are_various():
    nets = [random_net(seed) for seeds in SEEDS for seed in seeds]
    assert {len(net.layers) for net in nets} == {2, 3, 4}
    kinds = [{name for layer in net.layers[1:] for name in layer.activations} for net in nets]
    assert set().union(*kinds) == set(ACTIVATIONS)
    assert sum(len(found) > 1 for found in kinds) > 15
    assert all(net.version == 4 and net.count().frozen for net in nets)
    assert all(net(torch.randn(4, net.sizes[0])).std() > 0.01 for net in nets)


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
@pytest.mark.parametrize("seed", [3, 4, 11])
def test_a_live_net_is_exported_with_its_parameters(seed):
    net = random_net(seed)
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
    net, x = model[1].ffn, torch.randn(33, 8)
    assert_close(run_onnx(net, torch.randn(4, 8), tmp_path / "net.onnx")(x), net(x))


def test_the_program_of_a_copy_goes_on_when_the_net_is_edited():
    net, x = random_net(4), torch.randn(3, random_net(4).sizes[0])
    program = torch.export.export(copy.deepcopy(net), (x,)).module()
    expected = net(x)
    prune(net)
    assert_close(program(x), expected)
    assert_close(torch.export.export(net, (x,)).module()(x), net(x))
    assert not torch.allclose(net(x), expected, atol=1e-3)


def test_a_live_net_that_attends_is_not_exported():
    net = gn.GrapNet([4, 3, 2])
    net.execution.use("attention", transition=1)
    with pytest.raises(
        gn.PlanError, match="transition 1 runs with attention, which is not exported"
    ):
        torch.export.export(net, (torch.randn(2, 4),))
    net.execution.use("auto")
    torch.export.export(net, (torch.randn(2, 4),))


@pytest.mark.filterwarnings(
    "ignore:You are using the legacy TorchScript-based ONNX export:DeprecationWarning"
)
@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.trace.*` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_cannot_see_a_live_net_is_refused_and_takes_its_snapshot(tmp_path):
    model, x = (
        nn.Sequential(nn.Linear(3, 4), gn.GrapNet([4, 5, 2], density=0.5)).eval(),
        torch.randn(2, 3),
    )
    plain, path = gn.snapshot(model), tmp_path / "old.onnx"
    with pytest.raises(
        gn.PlanError, match=r"dynamo=False.*Trace a snapshot instead: gn\.snapshot\(model\)"
    ):
        torch.onnx.export(model, (x,), path, dynamo=False)
    with pytest.raises(gn.PlanError, match="Trace a snapshot instead"):
        torch.jit.trace(lambda h: model[1](h), torch.randn(2, 4))
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"PlanError\('a net is not exported with strict=True"
    ):
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


def test_a_grafted_transformer_is_exported_after_cuts(tmp_path):
    model, x = encoder(), torch.randn(3, 5, 8)
    for net in gn.graft(model, "layers.*.linear[12]").values():
        halve(net)
    expected = model.eval()(x)
    plain = gn.snapshot(model)
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: BATCH},)).module()
    for run in (plain, program, run_onnx(plain, x, tmp_path / "encoder.onnx")):
        assert_close(run(x), expected)
    dense = encoder().eval()
    # the plain copy has the names that torch's own model has
    dense.load_state_dict(plain.state_dict())
    assert_close(dense(x), expected)
    assert [int(layer.linear1.weight.count_nonzero()) for layer in dense.layers] == [64]


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"
)
def test_torch_transformer_layers_find_the_weights_they_read_in_eval_mode():
    model, x = encoder(), torch.randn(3, 5, 8)
    for layer in model.layers:
        layer.linear1, layer.linear2 = gn.from_module(layer.linear1), gn.GrapNet([16, 8])  # by hand
        halve(layer.linear1)
    # in training the layers call their parts and read no weights
    plain, expected = (
        gn.snapshot(model),
        model(x),
    )
    assert type(plain.layers[0].linear1) is nn.Linear
    assert_close(plain(x), expected)
    assert_close(plain(x, src_key_padding_mask=torch.zeros(3, 5, dtype=torch.bool)), expected)


def test_a_net_by_itself_gives_its_own_snapshot():
    net = gn.GrapNet([4, 3])
    taken = gn.snapshot(net)
    assert (type(taken), taken.version, len(taken)) == (type(net.snapshot()), 0, 1)
    assert not taken.is_stale(net)


def test_a_snapshot_inside_a_model_knows_when_its_net_went_on():
    model, _ = convolutional()
    plain = gn.snapshot(model)
    assert not plain[-1].is_stale(model[-1])
    with model[-1].edit() as edit:
        edit.cut(model[-1].layers[0].outgoing().smallest(count=1))
    assert plain[-1].is_stale(model[-1])


def test_copies_and_files_of_a_snapshot_need_no_net():
    model, x = transformer()
    plain = gn.snapshot(model)
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert torch.equal(other(x), plain(x))
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    assert torch.load(file).keys() == plain.state_dict().keys()


def test_a_model_with_results_of_a_forward_pass_is_copied():
    model, x = convolutional()
    prune_module.l1_unstructured(model[0], "weight", 0.5)  # leaves a computed `weight` behind
    model[1].seen = model[0](x)
    plain = gn.snapshot(model)
    assert_close(plain(x), model.eval()(x))
    assert (plain[1].seen.grad_fn, plain[0].weight.requires_grad) == (None, False)


def test_inference_mode_and_double_precision():
    model = nn.Sequential(
        nn.Linear(3, 4, dtype=torch.float64), gn.GrapNet([4, 5, 2], dtype=torch.float64)
    )
    x = torch.randn(2, 3, dtype=torch.float64)
    with torch.inference_mode():
        plain = gn.snapshot(model)
    assert not any(parameter.is_inference() for parameter in plain.parameters())
    torch.testing.assert_close(plain(x), model(x).detach(), rtol=0, atol=1e-14)


def test_gradients_optimizers_and_hooks_stay_with_the_model():
    model, x = convolutional()
    optimizer = torch.optim.Adam(model.parameters())
    gn.attach(optimizer, model[-1])
    model(x).sum().backward()
    optimizer.step()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("of the encoder"))
    model[-1].register_full_backward_hook(lambda *_: calls.append("of the net"))
    plain = gn.snapshot(model)
    plain(x)
    assert calls == ["of the encoder"]
    assert all(parameter.grad is None for parameter in plain.parameters())
    prune(model[-1])
    model(x).sum().backward()
    optimizer.step()


def test_a_model_that_cannot_be_taken_says_why_and_which_net():
    with pytest.raises(ValueError, match="this Sequential has no GrapNet among its modules"):
        gn.snapshot(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"taken of an nn\.Module, got list"):
        gn.snapshot([gn.GrapNet([2, 1])])
    model, x = transformer()
    expected = model.eval()(x)
    with pytest.raises(
        gn.PlanError, match=r"1\.ffn: the matrix of transition 0 would hold 128 cells \(limit 100\)"
    ):
        gn.snapshot(model, most_cells=100)
    model[1].ffn.execution.use("attention", transition=1)
    with pytest.raises(
        gn.PlanError,
        match=r"1\.ffn: transition 1 runs with attention, which no matrix can stand for",
    ):
        gn.snapshot(model)
    model[1].ffn.execution.use("auto")
    assert_close(gn.snapshot(model)(x), expected)
    bent = nn.ModuleDict(
        {"net": type("Bent", (gn.GrapNet,), {"forward": lambda self, x: x})([2, 1])}
    )
    with pytest.raises(gn.PlanError, match="net: Bent has a forward of its own"):
        gn.snapshot(bent)
    net = model[1].ffn
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing())
        with pytest.raises(gn.EditError, match=r"1\.ffn: .*not taken effect yet"):
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
    with pytest.raises(gn.PlanError, match=f"^{re.escape(part)}: there are forward hooks"):
        gn.snapshot(model)
    hook.remove()
    gn.snapshot(copy.deepcopy(model))
    assert recorder.count == 2


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, GUIDE.name, "exec"), names)
    assert len(blocks) == 5
    assert {path.name for path in tmp_path.iterdir()} >= {"model.onnx", "net.graphml"}
    assert "Snapshot(" in capsys.readouterr().out
