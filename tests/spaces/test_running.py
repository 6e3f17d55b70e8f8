"""How opened weights run: every way gives the values and gradients of the rectangle."""

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import grapnet as gn
from grapnet.execution import _dense, _opened
from grapnet.rules import RuleManager, rigl
from grapnet.spaces import Adopted

READS = 192
WRITES = 256
LARGEST = 1e-12
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def matrix(kind: str) -> nn.Module:
    """Returns a module that multiplies with a matrix."""
    if kind == "Conv1D":
        from transformers.pytorch_utils import Conv1D

        made = Conv1D(WRITES, READS)
        nn.init.normal_(made.bias)
    else:
        made = nn.Linear(READS, WRITES, bias=kind == "Linear")
    return made.double()


def adopted(module: nn.Module, *rest: nn.Module, x: Tensor) -> Adopted:
    """Returns the graph of a model that begins with a module."""
    return gn.adopt(nn.Sequential(module, *rest), x)


def inputs(batch: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, *(shape or (READS,)), generator=generator, dtype=torch.float64)


def cut(net: Adopted, fraction: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with net.edit(reason="cut", allow_dead=True) as edit:
        edit.cut(net.relations("0").random(fraction=fraction, generator=generator))


def sparse_matrix(kind: str = "Linear") -> tuple[Any, Adopted]:
    """Returns a matrix of which nine tenths are cut, and its graph."""
    torch.manual_seed(0)
    module = matrix(kind)
    net = adopted(module, x=inputs(2))
    cut(net, 0.9)
    return module, net


def runs(net: Adopted, batch: int = 64, training: bool = True) -> str:
    return net.describe(batch, training=training)[0]["runs"]


def by_rectangle(module: Any, x: Tensor) -> Tensor:
    """Returns what a module computes, by torch's own operators over its weight."""
    if isinstance(module, nn.Linear):
        return F.linear(x, module.weight, module.bias)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module._conv_forward(x, module.weight, module.bias)
    return torch.addmm(module.bias, x.reshape(-1, x.shape[-1]), module.weight).view(
        *x.shape[:-1], module.nf
    )


def differences(module: Any, x: Tensor) -> list[float]:
    """Returns how far output and gradients are from those of the rectangle."""
    found = []
    for compute in (module, lambda given: by_rectangle(module, given)):
        given = x.clone().requires_grad_()
        z = compute(given)
        wanted = [given, *module.parameters()]
        dz = torch.sin(torch.arange(z.numel(), dtype=z.dtype)).view(z.shape)
        found.append([z.detach(), *torch.autograd.grad(z, wanted, dz)])
    return [float((one - other).abs().max()) for one, other in zip(*found, strict=True)]


def operators(function: Any) -> set[str]:
    """Returns the names of what runs, as the profiler sees it."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return {event.name for event in profiler.events() or ()}


DENSE = {"aten::linear", "aten::addmm", "aten::mm"}
KINDS = ("Linear", "Linear without bias", "Conv1D")


@pytest.mark.sparse
@pytest.mark.parametrize("batch", [1, 5, 64, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_matrix_equals_its_rectangle_through_edits(kind: str, batch: int) -> None:
    module, net = sparse_matrix(kind)
    x = inputs(batch)
    assert max(differences(module, x)) < LARGEST
    cut(net, 0.3, seed=1)
    assert max(differences(module, x)) < LARGEST
    with net.edit(reason="freeze") as edit:
        edit.freeze(net.relations("0").random(fraction=0.2))
    assert max(differences(module, x)) < LARGEST
    with net.edit(reason="connect") as edit:
        edit.connect(net.space("0", side="in")[:3], net.space("0")[:3], tensor="0.weight")
    assert max(differences(module, x)) < LARGEST
    for _ in range(3):
        net.undo()
        assert max(differences(module, x)) < LARGEST
    assert runs(net) == "sparse"
    net.undo()
    assert runs(net) == "plain"
    assert DENSE & operators(lambda: module(x))


class Conv1D(nn.Module):
    """Has the name of the class in transformers, and computes twice as much."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(READS, WRITES, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(WRITES, dtype=torch.float64))
        self.nf = WRITES

    def forward(self, x: Tensor) -> Tensor:
        return 2 * (x @ self.weight) + self.bias


def test_a_class_with_a_known_name_runs_its_own_forward_pass() -> None:
    torch.manual_seed(0)
    module = Conv1D()
    net = adopted(module, x=inputs(2))
    cut(net, 0.9)
    assert runs(net) == "rectangle"
    x = inputs(64)
    expected = 2 * by_rectangle(module, x) - module.bias
    torch.testing.assert_close(module(x), expected)


@pytest.mark.sparse
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_are_what_runs(kind: str) -> None:
    module, net = sparse_matrix(kind)
    x = inputs(64)
    names = operators(lambda: module(x).sum().backward())
    assert not DENSE & names
    assert {"_SumByChild", "_RelationSum"} & names
    with torch.no_grad():
        assert not DENSE & operators(lambda: module(x))
    # The weight of the module is still there to read, and relations that stay are few.
    assert int(module.weight.count_nonzero()) == round(READS * WRITES * 0.1)
    net.undo()
    assert DENSE & operators(lambda: module(x).sum().backward())


@pytest.mark.sparse
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_inputs_of_all_shapes(kind: str) -> None:
    module, _ = sparse_matrix(kind)
    for shape in ((3, 7, READS), (2, 1, 4, READS), (READS,), (0, READS)):
        x = inputs(1, *shape)[0]
        if kind == "Linear" or x.dim() > 1:
            assert module(x).shape == (*shape[:-1], WRITES)
            expected = by_rectangle(module, x)
            assert torch.allclose(module(x), expected, rtol=0, atol=LARGEST)
    columns = inputs(READS, 5).t()
    assert torch.allclose(module(columns), by_rectangle(module, columns), rtol=0, atol=LARGEST)
    with pytest.raises(RuntimeError):
        module(inputs(4, READS + 1))
    with pytest.raises(RuntimeError):
        module(inputs(4).float())


@pytest.mark.sparse
def test_a_dense_matrix_runs_as_a_rectangle() -> None:
    torch.manual_seed(0)
    module = matrix("Linear")
    net = adopted(module, x=inputs(2))
    cut(net, 0.1)
    assert runs(net, 512) == "rectangle"
    assert DENSE & operators(lambda: module(inputs(512)))
    assert max(differences(module, inputs(512))) == 0
    cut(net, 0.9)
    assert runs(net) == "sparse"


@pytest.mark.sparse
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_keeps_the_kernels(kind: str, dtype: torch.dtype) -> None:
    module, net = sparse_matrix(kind)
    cut(net, 0.9, seed=1)
    net.model.float()
    x = inputs(512).float().requires_grad_()
    exact = module(x)
    wanted = [x, *module.parameters()]
    expected = torch.autograd.grad(exact.sum(), wanted)
    for given in (x, x.to(dtype)):
        with torch.autocast("cpu", dtype=dtype):
            z = module(given)
            assert not DENSE & operators(lambda given=given: module(given))
        assert z.dtype == dtype
        torch.testing.assert_close(z.float(), exact, rtol=0.01, atol=0.01)
        found = torch.autograd.grad(z.sum(), wanted)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.3)
    assert module(x).dtype == torch.float32


@pytest.mark.sparse
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_in_half_precision_run_by_kernels(kind: str, dtype: torch.dtype) -> None:
    module, net = sparse_matrix(kind)
    cut(net, 0.9, seed=1)
    net.model.to(dtype)
    x = inputs(512).to(dtype)
    assert not DENSE & operators(lambda: module(x))
    z = module(x)
    assert z.dtype == dtype
    exact = by_rectangle(copy.deepcopy(module).double(), x.double())
    torch.testing.assert_close(z.double(), exact, rtol=0.01, atol=0.01)


@pytest.mark.sparse
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_transforms_of_torch(kind: str) -> None:
    module, net = sparse_matrix(kind)
    x = inputs(64)
    parameters = {name: tensor.detach() for name, tensor in module.named_parameters()}

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, given, (x,)).square().sum()

    by_rectangle(module, x).square().sum().backward()
    expected = module._parameters["weight"].grad
    found = grad(loss)(parameters, x)["weight"]
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    rows = x.unsqueeze(1)
    each = vmap(grad(loss), in_dims=(None, 0))(parameters, rows)["weight"]
    assert torch.allclose(each.sum(0), expected, rtol=1e-12, atol=1e-12)
    with warnings.catch_warnings():
        # The first use of forward-mode AD makes torch script its rules.
        warnings.simplefilter("ignore", DeprecationWarning)
        _, tangent = jvp(module, (x,), (torch.cos(x),))
    plain = torch.cos(x) @ (module.weight.t() if kind == "Linear" else module.weight)
    assert torch.allclose(tangent, plain, rtol=0, atol=LARGEST)
    assert net.version == 1


@pytest.mark.sparse
@pytest.mark.parametrize("batch", [3, 20])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_derivatives_of_derivatives(kind: str, batch: int) -> None:
    module, _ = sparse_matrix(kind)
    x = inputs(batch).requires_grad_()
    results = []
    for compute in (module, lambda given: by_rectangle(module, given)):
        (dx,) = torch.autograd.grad(compute(x).pow(3).sum(), x, create_graph=True)
        wanted = [x, *module.parameters()]
        results.append(torch.autograd.grad(dx.square().sum(), wanted))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    z = module(x)
    many = torch.eye(5, dtype=z.dtype).unsqueeze(1).expand(5, batch, 5)
    found = torch.autograd.grad(z[:, :5], x, many, is_grads_batched=True, retain_graph=True)
    for n in range(5):
        (alone,) = torch.autograd.grad(z[:, n].sum(), x, retain_graph=True)
        assert torch.allclose(found[0][n], alone)


@pytest.mark.sparse
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_a_compiled_model_has_the_kernels_in_one_graph(kind: str) -> None:
    module, net = sparse_matrix(kind)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    x = inputs(64)
    compiled = torch.compile(net.model, backend=backend, fullgraph=True)
    difference = compiled(x) - by_rectangle(module, x)
    assert difference.abs().max() < LARGEST
    targets = {str(node.target) for node in graphs[0].graph.nodes}
    assert {"grapnet.sum_by_child.default", "grapnet.relation_sum.default"} & targets
    exported = torch.export.export(net.model, (x,)).module()
    assert (exported(x) - by_rectangle(module, x)).abs().max() < LARGEST


@pytest.mark.sparse
def test_copies_and_files_run_as_well(tmp_path: Path) -> None:
    module, net = sparse_matrix()
    x = inputs(64)
    double = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    gn.save(tmp_path / "model.grap", net)
    other = adopted(matrix("Linear"), x=x[:2])
    gn.restore(tmp_path / "model.grap", into=other)
    for copied in (double, loaded, other.model[0]):
        assert torch.equal(copied(x), module(x))
        assert not DENSE & operators(lambda: copied(x))  # noqa: B023


@pytest.mark.sparse
def test_a_rule_sees_gradients_of_relations_that_were_cut() -> None:
    module, net = sparse_matrix()
    x = inputs(64)
    manager = RuleManager()
    manager.add(rigl(steps=10, every=2, fraction=0.5))
    manager.start(net)
    wired = net.relations("0").children
    seen = []
    for number in range(4):
        module.zero_grad()
        seen.append(bool(DENSE & operators(lambda: module(x).square().sum().backward())))
        manager.apply(net, number)
    # Only passes before the rule need the gradients of all relations.
    assert True in seen
    assert False in seen
    assert len(net.relations("0")) == len(wired)
    assert not torch.equal(net.relations("0").children, wired)
    assert max(differences(module, x)) < LARGEST


def test_families_run_by_their_blocks() -> None:
    torch.manual_seed(0)
    module = nn.Linear(512, 1024).double()
    x = inputs(256, 512)
    net = adopted(module, x=x[:2])
    parents = torch.randperm(512) % 4
    children = torch.randperm(1024) % 4
    with net.edit(reason="four families") as edit:
        for n in range(4):
            strangers = net.space("0")[(children != n).nonzero().squeeze(1)]
            members = net.space("0", side="in")[(parents == n).nonzero().squeeze(1)]
            edit.cut(members.outgoing(to=strangers))
    assert runs(net, 256) == "family"
    assert max(differences(module, x)) < LARGEST
    names = operators(lambda: module(x))
    assert "aten::linear" not in names
    assert {"aten::bmm", "aten::baddbmm"} & names


def blocks(net: Adopted, module: Any, count: int, *, shuffled: bool) -> None:
    """Cuts all relations of a convolution between different blocks of channels."""
    reads = torch.arange(module.in_channels) // (module.in_channels // count)
    writes = torch.arange(module.out_channels) // (module.out_channels // count)
    if shuffled:
        generator = torch.Generator().manual_seed(1)
        reads = reads[torch.randperm(len(reads), generator=generator)]
        writes = writes[torch.randperm(len(writes), generator=generator)]
    keep(net, writes[:, None] == reads)


def keep(net: Adopted, kernels: torch.Tensor) -> None:
    """Cuts all relations of a convolution but those of some kernels, [written, read]."""
    relations = net.relations("0")
    rows = net.space("0", side="in").uids.tolist()
    columns = net.space("0").uids.tolist()
    parents = torch.tensor([rows.index(uid) for uid in relations.parents.tolist()])
    children = torch.tensor([columns.index(uid) for uid in relations.children.tolist()])
    with net.edit(reason="blocks") as edit:
        edit.cut(relations[~kernels[children, parents]])


CONVOLUTIONS = {
    "1d": (nn.Conv1d(32, 64, 5, padding=2), (30,)),
    "2d": (nn.Conv2d(32, 64, 3, padding=1), (9, 9)),
    "2d, strided, dilated, no bias": (
        nn.Conv2d(32, 64, 3, stride=2, dilation=2, bias=False),
        (15, 15),
    ),
    "2d, same": (nn.Conv2d(32, 64, 3, padding="same"), (9, 9)),
    "3d": (nn.Conv3d(32, 32, 3, padding=1), (5, 5, 5)),
}


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_of_blocks_runs_in_groups(name: str, shuffled: bool) -> None:
    torch.manual_seed(0)
    module, size = CONVOLUTIONS[name]
    module = copy.deepcopy(module).double()
    x = inputs(3, 32, *size)
    net = adopted(module, x=x)
    blocks(net, module, 4, shuffled=shuffled)
    assert runs(net, 500) == "grouped"
    assert max(differences(module, x)) < LARGEST
    (z,) = [module(x[:1])]
    assert torch.allclose(module(x[0]), z[0], rtol=0, atol=LARGEST)
    with net.edit(reason="freeze") as edit:
        edit.freeze(net.relations("0").random(fraction=0.3))
    assert runs(net, 500) == "grouped"
    assert max(differences(module, x)) < LARGEST
    cut(net, 0.05)
    assert runs(net, 500) == "rectangle"
    assert max(differences(module, x)) == 0
    net.undo()
    net.undo()
    assert runs(net, 500) == "grouped"
    assert max(differences(module, x)) < LARGEST
    net.undo()
    assert runs(net, 500) == "plain"


def _groups(function: Any) -> list[int]:
    """Returns the groups of the convolutions that run."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    found = []
    for event in profiler.events() or ():
        if event.name == "aten::conv2d":
            x, weight = event.input_shapes[:2]
            found.append(x[1] // weight[1])
    return found


def test_groups_are_what_runs() -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(64, 64, 3).double()
    x = inputs(4, 64, 16, 16)
    net = adopted(module, x=x)
    assert _groups(lambda: module(x)) == [1]
    blocks(net, module, 8, shuffled=False)
    assert _groups(lambda: module(x)) == [8]
    assert max(differences(module, x)) < LARGEST
    # A kernel less, and the channels form blocks no more.
    with net.edit(reason="one") as edit:
        edit.cut(net.relations("0")[:1])
    assert _groups(lambda: module(x)) == [1]


@pytest.mark.parametrize("starts", [(0, 0, 0, 16), (0, 0, 8, 8)], ids=["unequal", "overlapping"])
def test_other_blocks_are_no_groups(starts: tuple[int, ...]) -> None:
    """Every channel that is written reads 16 of 32, from where its quarter starts."""
    torch.manual_seed(0)
    module = nn.Conv2d(32, 64, 3, padding=1).double()
    x = inputs(4, 32, 16, 16)
    net = adopted(module, x=x)
    start = torch.tensor(starts).repeat_interleave(16)[:, None]
    read = torch.arange(32)
    keep(net, (start <= read) & (read < start + 16))
    assert _groups(lambda: module(x)) == [1]
    assert max(differences(module, x)) == 0


def test_convolutions_in_groups_under_transforms_autocast_and_compile() -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(32, 32, 3, padding=1).double()
    x = inputs(4, 32, 12, 12)
    net = adopted(module, x=x)
    blocks(net, module, 4, shuffled=True)
    expected = by_rectangle(module, x).detach()
    parameters = {name: tensor.detach() for name, tensor in module.named_parameters()}
    each = vmap(lambda one: functional_call(module, parameters, (one,)))(x.unsqueeze(1))
    assert torch.allclose(each.squeeze(1), expected, rtol=0, atol=LARGEST)
    compiled = torch.compile(net.model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), expected, rtol=0, atol=LARGEST)
    given = x.clone().requires_grad_()
    results = []
    for compute in (module, lambda given: by_rectangle(module, given)):
        (dx,) = torch.autograd.grad(compute(given).pow(3).sum(), given, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), module._parameters["weight"])[0])
    assert torch.allclose(*results, rtol=1e-12, atol=1e-12)
    net.model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x.float()).dtype == torch.bfloat16


def test_small_groups_and_circular_padding_run_as_rectangles() -> None:
    torch.manual_seed(0)
    circular = nn.Conv2d(32, 32, 3, padding=1, padding_mode="circular").double()
    pointwise = nn.Conv2d(32, 32, 1).double()
    for module, count in ((circular, 4), (pointwise, 16)):
        x = inputs(4, 32, 8, 8)
        net = adopted(module, x=x)
        blocks(net, module, count, shuffled=False)
        assert _groups(lambda: module(x)) == [1]  # noqa: B023
        assert max(differences(module, x)) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("live", [False, True], ids=["", "as on CUDA"])
@pytest.mark.parametrize("frozen", [0.0, 0.25])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_large_weight_is_written_as_a_mask_would(
    kernel: int, frozen: float, live: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dense, "KEPT_ON", {"cpu", "cuda"} if live else {})
    monkeypatch.setattr(_opened, "_LARGE_ON_DEVICE", 0)
    torch.manual_seed(0)
    channels = 192
    module = nn.Conv2d(channels, channels, kernel, padding=kernel // 2).double().to(device)
    x = inputs(2, channels, 4, 4).to(device)
    net = adopted(module, x=x)
    whole = module.weight.detach().clone()
    cut(net, 0.5)
    there = module.weight.detach() != 0
    assert torch.equal(module.weight, whole * there)
    if frozen:
        with net.edit(reason="freeze") as edit:
            edit.freeze(net.relations("0").random(fraction=frozen))
    masked = (whole * there).requires_grad_()
    F.conv2d(x, masked, module.bias, padding=kernel // 2).square().sum().backward()
    module.zero_grad()
    module(x).square().sum().backward()
    content = module._parameters["weight"]
    free = content.detach().clone()
    with torch.no_grad():
        content.zero_()
        was_free = (module.weight == 0) & there
        content.copy_(free)
    assert torch.equal(module.weight, whole * there)
    gradient = masked.grad[was_free]
    assert torch.allclose(content.grad.view(-1), gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.sparse
@pytest.mark.parametrize(("channels", "by_kernel"), [(16, False), (192, True)])
def test_a_compiled_kernel_writes_large_weights_alone(channels: int, by_kernel: bool) -> None:
    module = nn.Conv2d(channels, channels, 3).double()
    net = adopted(module, x=inputs(2, channels, 4, 4))
    cut(net, 0.5)
    names = operators(lambda: module.weight.sum().backward())
    assert ("_Fill" in names) == by_kernel


SCATTERED = {
    "1d": (nn.Conv1d(64, 96, 5, padding=2), (500,)),
    "2d": (nn.Conv2d(64, 64, 3, padding=1), (16, 16)),
    "2d, pointwise, no bias": (nn.Conv2d(256, 256, 1, bias=False), (16, 16)),
    "2d, dilated, not padded": (nn.Conv2d(64, 64, (3, 2), dilation=(2, 1)), (22, 17)),
    "2d, padded more": (nn.Conv2d(64, 64, (1, 3), padding=(0, 2)), (24, 30)),
    "3d": (nn.Conv3d(32, 32, 3, padding=1), (8, 8, 8)),
}


@pytest.mark.sparse
@pytest.mark.parametrize("name", SCATTERED)
def test_a_convolution_of_few_kernels_equals_its_rectangle_through_edits(name: str) -> None:
    torch.manual_seed(0)
    module, size = SCATTERED[name]
    module = copy.deepcopy(module).double()
    x = inputs(4, module.in_channels, *size)
    net = adopted(module, x=x[:1])
    cut(net, 0.9)
    assert runs(net, 4000) == "sparse"
    names = operators(lambda: module(x).sum().backward())
    assert "_Convolved" in names
    assert "aten::convolution" not in names
    assert max(differences(module, x)) < LARGEST
    with net.edit(reason="freeze") as edit:
        edit.freeze(net.relations("0").random(fraction=0.3))
    assert max(differences(module, x)) < LARGEST
    cut(net, 0.3, seed=1)
    assert max(differences(module, x)) < LARGEST
    assert "_Convolved" in operators(lambda: module(x))
    # One image, and images that are not laid out in order.
    turned = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.allclose(module(turned), module(x), rtol=0, atol=LARGEST)
    assert torch.allclose(module(x[0]), module(x)[0], rtol=0, atol=LARGEST)
    with torch.no_grad():
        assert torch.allclose(module(x), by_rectangle(module, x), rtol=0, atol=LARGEST)
    for _ in range(3):
        net.undo()
    assert runs(net) == "plain"
    assert "aten::convolution" in operators(lambda: module(x))


@pytest.mark.sparse
def test_few_kernels_under_transforms_autocast_compile_and_higher_derivatives() -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(64, 64, 3, padding=1).double()
    x = inputs(4, 64, 16, 16)
    net = adopted(module, x=x[:1])
    cut(net, 0.9)
    expected = by_rectangle(module, x).detach()
    parameters = {name: tensor.detach() for name, tensor in module.named_parameters()}
    each = vmap(lambda one: functional_call(module, parameters, (one,)))(x.unsqueeze(1))
    assert torch.allclose(each.squeeze(1), expected, rtol=0, atol=LARGEST)
    compiled = torch.compile(net.model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), expected, rtol=0, atol=LARGEST)
    given = x.clone().requires_grad_()
    results = []
    for compute in (module, lambda given: by_rectangle(module, given)):
        (dx,) = torch.autograd.grad(compute(given).pow(3).sum(), given, create_graph=True)
        wanted = [given, *module.parameters()]
        results.append(torch.autograd.grad(dx.square().sum(), wanted))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    many = torch.randn(3, *expected.shape, dtype=torch.float64)
    (found,) = torch.autograd.grad(module(given), given, many, is_grads_batched=True)
    (alone,) = torch.autograd.grad(module(given), given, many[1])
    assert torch.allclose(found[1], alone, rtol=0, atol=LARGEST)
    net.model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x.float()).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        module(x)


@pytest.mark.sparse
def test_few_kernels_with_strides_or_at_few_positions_run_as_rectangles() -> None:
    torch.manual_seed(0)
    strided = nn.Conv2d(64, 64, 3, stride=2).double()
    small = nn.Conv2d(64, 64, 3, padding=1).double()
    for module, size in ((strided, 16), (small, 2)):
        x = inputs(4, 64, size, size)
        net = adopted(module, x=x[:1])
        cut(net, 0.9)
        assert "aten::convolution" in operators(lambda: module(x))  # noqa: B023
        assert max(differences(module, x)) == 0
