"""The contract of the backends: every one, on every shape of graph, computes what the reference
computes.
"""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import grapnet as gn
from grapnet.execution import _dense, _family, _reference
from grapnet.execution._manager import BACKENDS
from tests.rounding import plain_bounds

from .figures import (
    BATCHES,
    differences,
    inputs,
    reference_of,
    require_close,
    require_reference,
    results,
    slope,
)
from .graphs import BACKEND_NAMES, DEVICES, EDITS, SHAPES, cut_and_grow, edited, runs_with

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
EDITED = [
    "full",
    "ragged",
    "empty hidden layer",
    "one family",
    "families of one size, out of order",
    "many families",
    "partly frozen",
]
ACTIVATIONS = {"identity": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU}

backends = pytest.mark.parametrize("backend", BACKEND_NAMES)
# of a thread's first backward on CUDA
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
devices = pytest.mark.parametrize("device", DEVICES)
shapes = pytest.mark.parametrize("shape", SHAPES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.sparse
def test_every_backend_is_there_and_runs_on_this_cpu() -> None:
    """A machine that tests has the compiled extension: a backend without it is a failure, not a
    skip.
    """
    assert set(BACKENDS) >= {"reference", "dense", "family", "sparse", "tiles"}
    topology = SHAPES["tiles"].build().transitions[0].topology
    refusals = {
        (n, d): BACKENDS[n]().refusals(topology, DTYPES[d]) for n in BACKENDS for d in DTYPES
    }
    assert not any(refusals.values()), refusals


@shapes
@devices
def test_the_reference_is_the_walk_of_the_paper(shape: str, device: str) -> None:
    net = SHAPES[shape].build(device=device)
    net.execution.use("reference")
    x = inputs(net, 3)
    assert torch.allclose(net(x), net.walk(x), atol=1e-12, rtol=0)


@dtypes
@shapes
@backends
@devices
def test_matches_the_reference_before_and_after_edits(
    backend: str, shape: str, dtype: str, device: str
) -> None:
    net = SHAPES[shape].build(DTYPES[dtype], device)
    if not runs_with(net, backend):
        return
    batches = [inputs(net, size) for size in BATCHES]
    require_reference(net, *batches)
    before = [results(reference_of(net), x.double()) for x in batches]
    edited(net, cut_and_grow)
    # so that plans are made at the smallest and at the largest
    require_reference(net, *reversed(batches))
    net.undo()
    require_reference(net, *batches)
    for x, wanted in zip(batches, before, strict=True):
        require_close(results(reference_of(net), x.double()), wanted)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("shape", EDITED)
@pytest.mark.parametrize("backend", BACKEND_NAMES[:-1])  # auto runs one of these
@devices
def test_matches_the_reference_through_every_edit(
    backend: str, shape: str, edit: str, device: str
) -> None:
    net = SHAPES[shape].build(device=device)
    if not runs_with(net, backend):
        return
    x = inputs(net, 4)
    version = net.version
    before = results(net, x)
    with net.edit(trial=True) as trial:
        EDITS[edit](net, trial)
        trial.commit()
        require_reference(net, x)
    require_close(results(net, x), before)
    edited(net, EDITS[edit])
    require_reference(net, x)
    if net.version == version:
        return  # this shape has nothing to cut, remove or freeze
    edited(net, EDITS["cut_one"])
    edited(net, EDITS["rewire"])  # two commits without a forward pass in between
    require_reference(net, x)
    for _ in range(net.version - version):
        net.undo()
    require_close(results(net, x), before)
    net.redo()
    require_reference(net, x)


@shapes
@backends
def test_reads_no_memory_that_it_did_not_write(backend: str, shape: str, full_of_nan: None) -> None:
    net = SHAPES[shape].build()
    net.execution.use(backend)
    for batch in BATCHES[:2]:
        require_reference(net, inputs(net, batch))


@pytest.fixture
def full_of_nan() -> Iterator[None]:
    """Lets torch fill memory that is allocated but not written with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def twins(activation: str, device: str, dtype: torch.dtype) -> tuple[gn.GrapNet, nn.Sequential]:
    """Returns a net and an MLP of 16-32-8, the net's weights copied from the dense layers."""
    mlp = nn.Sequential(nn.Linear(16, 32), ACTIVATIONS[activation](), nn.Linear(32, 8)).to(
        device, dtype
    )
    net = gn.GrapNet([16, 32, 8], activation=activation, device=device, dtype=dtype)
    for t, linear in enumerate(mlp[::2]):
        for node in net.layers[t]:
            node.W_alloc = linear.weight[:, node.row]
        net.layers[t + 1].biases = linear.bias.detach()
    return net, mlp


def mlp_results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Returns the output of a net or an MLP, and the gradients in the MLP's layout."""
    output = model(x)
    output.backward(slope(output) / output.numel())
    found = {"output": output.detach()}
    if isinstance(model, gn.GrapNet):
        for t, store in enumerate(model.transitions):
            found[f"∂{t}.weight"] = store.weight.grad.view(-1, store.n_children).t()
            found[f"∂{t}.bias"] = model.layers[t + 1].bias.grad
        return found
    for t, linear in enumerate(model[::2]):
        found[f"∂{t}.weight"] = linear.weight.grad
        found[f"∂{t}.bias"] = linear.bias.grad
    return found


@pytest.mark.parametrize("activation", ACTIVATIONS)
@backends
@devices
def test_a_full_net_is_the_mlp(backend: str, activation: str, device: str) -> None:
    """16-32-8, batch 32: at most 1e-14 in float64, and what rounding may do in float32."""
    torch.manual_seed(0)
    net, mlp = twins(activation, device, torch.float32)
    exact = copy.deepcopy(net).double()
    if not runs_with(net, backend):
        return
    exact.execution.use(backend)
    x = torch.randn(32, 16, device=device)
    right = mlp_results(copy.deepcopy(mlp).double(), x.double())
    for name, off, _ in differences(mlp_results(exact, x.double()), right):
        assert off <= 1e-14, name
    allowed = plain_bounds(mlp, x, slope(right["output"]) / right["output"].numel())
    for name, off, _ in differences(mlp_results(net, x), right):
        assert off <= allowed[name], name


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numbers_of_half_the_digits_are_not_within_the_bounds(activation: str) -> None:
    """The control of the bounds on rounding: weights in float16 are outside of them."""
    net, mlp = twins(activation, "cpu", torch.float32)
    x = torch.randn(32, 16)
    right = mlp_results(copy.deepcopy(mlp).double(), x.double())
    allowed = plain_bounds(mlp, x, slope(right["output"]) / right["output"].numel())
    for t in range(2):
        spoiled = copy.deepcopy(net)
        relations = spoiled.layers[t].outgoing()
        relations.weights = relations.weights.half().float()
        found = {name: off for name, off, _ in differences(mlp_results(spoiled, x), right)}
        assert found["output"] > allowed["output"]


@shapes
@backends
@devices
def test_the_gradients_of_gradients(backend: str, shape: str, device: str) -> None:
    net = SHAPES[shape].build(device=device)
    if not runs_with(net, backend):
        return
    x = inputs(net, 3)
    require_close(second_order(net, x), second_order(reference_of(net), x))


def second_order(net: gn.GrapNet, x: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of a mixture of all first gradients."""
    x = x.detach().requires_grad_()
    named = {"x": x, **dict(net.named_parameters())}
    first = torch.autograd.grad(net(x).square().sum(), list(named.values()), create_graph=True)
    mixture = sum((g * torch.linspace(-1, 1, g.numel()).to(g).view(g.shape)).sum() for g in first)
    second = torch.autograd.grad(mixture, list(named.values()), materialize_grads=True)
    return dict(zip(named, second, strict=True))


# Torch compiles decompositions with torch.jit.script when forward mode is first used, and warns of
# operations that a batched backward runs one by one.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@backends
def test_derivatives_are_those_of_small_differences(
    backend: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward, batched backward and forward mode, of the first and second order."""
    if large:
        # as for transitions and batches from which kernels write rectangles and blocks
        monkeypatch.setattr(_dense, "LARGE", 0)
        monkeypatch.setattr(_family, "LARGE", 0)
    net = SHAPES["families in order"].build()
    net.execution.use(backend)
    parameters = dict(net.named_parameters())
    x = inputs(net, 2).requires_grad_()

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(net, dict(zip(parameters, values, strict=True)), (x,))

    given = (x, *(p.detach().clone().requires_grad_() for p in parameters.values()))
    assert torch.autograd.gradcheck(
        run,
        given,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )
    assert torch.autograd.gradgradcheck(
        run, given, check_batched_grad=True, check_fwd_over_rev=True
    )


WANTED: dict[str, Callable[[str], bool]] = {
    "x": lambda name: name == "x",
    "weights": lambda name: name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
    "x and biases": lambda name: not name.endswith("weight"),
    "the last transition": lambda name: name == "transitions.1.weight",
    "the first transition": lambda name: name == "transitions.0.weight",
}


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("shape", ["full", "ragged", "many families", "partly frozen"])
@backends
@devices
def test_gradients_of_a_part(backend: str, shape: str, wanted: str, device: str) -> None:
    net = SHAPES[shape].build(device=device)
    if not runs_with(net, backend):
        return
    x = inputs(net, 5)
    expected = results(reference_of(net), x)
    named = {"x": x.requires_grad_(), **dict(net.named_parameters())}
    for name, tensor in named.items():
        tensor.requires_grad_(WANTED[wanted](name))
    output = net(x)
    output.backward(slope(output))
    for name, tensor in named.items():
        assert (tensor.grad is not None) == WANTED[wanted](name), name
        if tensor.grad is not None:
            require_close({name: tensor.grad}, {name: expected[f"∂{name}"]})


@pytest.mark.parametrize("leading", [[], [5], [2, 3], [0], [2, 0], [2, 1, 3]], ids=str)
@pytest.mark.parametrize("shape", ["full", "ragged", "one family", "many families", "no relation"])
@backends
@devices
def test_any_leading_dimensions(backend: str, shape: str, leading: list[int], device: str) -> None:
    net = SHAPES[shape].build(device=device)
    if not runs_with(net, backend):
        return
    x = inputs(net, *leading)
    assert net(x).shape == (*leading, len(net.layers[-1]))
    require_reference(net, x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "feature-major": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row for all": lambda x: x[:1].expand(len(x), -1),
    "off its start": lambda x: torch.cat([x[:1], x])[1:],
    "a slice of columns": lambda x: torch.cat([x, x], dim=1)[:, x.shape[1] :],
    "a slice of features": lambda x: torch.cat([x, x]).t().contiguous().t()[len(x) :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["full", "full, wide", "ragged", "many families", "random 1 %"])
@backends
@devices
def test_any_layout_in_memory(backend: str, shape: str, layout: str, device: str) -> None:
    net = SHAPES[shape].build(device=device)
    if not runs_with(net, backend):
        return
    plain = inputs(net, 9)
    x = LAYOUTS[layout](plain)
    plain = x.contiguous()
    require_close(results(net, x), results(reference_of(net), plain))
    x = x.detach().requires_grad_()
    net(x).sum().backward()  # the gradient that arrives is one number, expanded
    twin = reference_of(net)
    plain = plain.detach().requires_grad_()
    twin(plain).sum().backward()
    pairs = zip([x, *net.parameters()], [plain, *twin.parameters()], strict=True)
    found = {str(n): (a.grad, b.grad) for n, (a, b) in enumerate(pairs)}
    require_close({n: a for n, (a, _) in found.items()}, {n: b for n, (_, b) in found.items()})
    require_close({"out": net(x.t().contiguous().t())}, {"out": twin(plain)})


@pytest.mark.parametrize(
    "shape", ["full", "full, wide", "ragged", "one family", "many families", "partly frozen"]
)
@backends
@devices
def test_autocast_is_as_close_as_it_is_for_linear_layers(
    backend: str, shape: str, device: str
) -> None:
    net = SHAPES[shape].build(torch.float32, device)
    if not runs_with(net, backend):
        return
    modules = net.to_module()
    x = inputs(net, 64)
    expected = results(reference_of(net), x.double())
    with torch.autocast(device, dtype=torch.bfloat16):
        found = results(net, x)
        theirs = modules(x)
    assert (found["output"] - expected["output"]).abs().max() <= 2 * (
        theirs - expected["output"]
    ).abs().max() + 1e-3
    for name, gradient in found.items():
        assert name == "output" or gradient.dtype == torch.float32
        assert (gradient - expected[name]).abs().max() <= 0.04 * expected[name].abs().max(), name
    with torch.autocast(device, dtype=torch.bfloat16):
        assert net(x.bfloat16()).shape == theirs.shape  # what an encoder under autocast hands on


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@backends
def test_half_precision_runs_or_is_refused(backend: str, dtype: torch.dtype) -> None:
    net = SHAPES["many families"].build(dtype)
    if any(backend in row["refused"] for row in net.execution.describe()):
        with pytest.raises(gn.errors.PlanError, match=str(dtype)[6:]):
            net.execution.use(backend)
        return
    net.execution.use(backend)
    x = inputs(net, 8)
    found = results(net, x)
    expected = results(reference_of(net), x.double())
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        assert (tensor - expected[name]).abs().max() <= 0.05 * expected[name].abs().max(), name


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("backend", ["reference", *BACKEND_NAMES])
def test_a_number_that_is_not_finite_stays_on_its_paths_or_the_backend_is_finite_only(
    backend: str, value: float
) -> None:
    net = gn.GrapNet([64, 64])
    net.execution.use(backend)
    (row,) = net.execution.describe(batch=256, training=False)
    assert not row["finite_only"]  # while every relation exists
    edited(net, lambda net, edit: edit.cut(net.layers[0][0], slots=[63]))
    (row,) = net.execution.describe(batch=256, training=False)
    assert row["finite_only"] == (backend in ("dense", "auto"))
    x = torch.ones(256, 64)
    x[:, 0] = value
    with torch.no_grad():
        output = net(x)
    assert not output[:, :63].isfinite().any()
    assert bool(output[:, 63].isfinite().all()) != row["finite_only"]


@pytest.mark.parametrize("shape", ["full", "ragged"])
@backends
def test_what_leaves_a_net_is_row_major(backend: str, shape: str) -> None:
    net = SHAPES[shape].build()
    net.execution.use(backend)
    assert net(inputs(net, 3)).is_contiguous()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@backends
def test_forward_mode_works_where_nothing_requires_a_gradient(
    backend: str, large: bool, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(_dense, "LARGE", 0)
        monkeypatch.setattr(_family, "LARGE", 0)
    net = SHAPES["families in order"].build().requires_grad_(False)
    net.execution.use(backend)
    x = inputs(net, 4)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        output = net(forward_ad.make_dual(x, x.cos()))
        tangent = forward_ad.unpack_dual(output).tangent
    assert tangent is not None
    slope = (net(x + 1e-6 * x.cos()) - net(x - 1e-6 * x.cos())) / 2e-6
    torch.testing.assert_close(tangent, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cells", [1, 7, 30])
def test_the_reference_in_pieces_is_the_reference(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = SHAPES["ragged"].build()
    net.execution.use("reference")
    x = inputs(net, 3)
    first = results(net, x)
    second = second_order(net, x)
    pieces = []
    again = _reference.checkpoint
    monkeypatch.setattr(_reference, "CELLS", cells)
    monkeypatch.setattr(
        _reference, "checkpoint", lambda *a, **k: pieces.append(a) or again(*a, **k)
    )
    net = reference_of(net)  # with plans of its own
    require_close(results(net, x), first)
    require_close(second_order(net, x), second)
    with torch.no_grad():
        require_close({"output": net(x)}, {"output": first["output"]})
    assert len(pieces) >= 2 * 2  # it did run in pieces
