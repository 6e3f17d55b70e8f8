"""Tiles: which wirings come in tiles, and that the backend computes what the reference computes."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import grapnet as gn
from grapnet.execution import _tiles
from grapnet.rules import PruneWeakest, Rewire, RuleContext

from .figures import (
    differences,
    inputs,
    reference_of,
    require_close,
    require_reference,
    results,
    slope,
)
from .graphs import DEVICES, SHAPES, Wires, edited, full, shuffled, tiles
from .test_contract import second_order

# of a thread's first backward on CUDA
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
ways = pytest.mark.usefixtures("way")
devices = pytest.mark.parametrize("device", DEVICES)
# parents, children, tile: with smaller tiles at no border, at one, at both, and nothing else
SIZES = [
    (64, 96, 16),
    (40, 96, 16),
    (64, 70, 32),
    (128, 192, 64),
    (150, 200, 64),
    (200, 150, 128),
    (300, 10, 64),
    (10, 300, 64),
]
# the kernels on CUDA are for lower precision
DTYPES = {
    "cpu": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    "cuda": [torch.float32, torch.bfloat16, torch.float16],
}
EXACT = {"cpu": torch.float64, "cuda": torch.float32}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["products", "gather"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU run matrix products, or the compiled kernels, for tiles of every size."""
    share = 0.0 if request.param == "products" else 1.0
    monkeypatch.setattr(_tiles, "GATHERED", dict.fromkeys(_tiles.SIZES, share))


def net_of(wires: Wires, n_children: int, **options: Any) -> gn.GrapNet:
    parents = [parent for parent, children in enumerate(wires) for _ in children]
    children = [child for row in wires for child in row]
    generator = torch.Generator().manual_seed(7)
    return gn.GrapNet.from_relations(
        [len(wires), n_children], [(parents, children)], generator=generator, **options
    )


def tiled_net(
    sizes: tuple[int, int, int], density: float = 0.5, seed: int = 0, **options: Any
) -> gn.GrapNet:
    parents, children, tile = sizes
    net = net_of(tiles(parents, children, tile, density, seed), children, **options)
    net.execution.use("tiles")
    return net


def require_near(net: gn.GrapNet, batch: int) -> None:
    """Asserts that a net computes what its reference computes, to what its dtype allows."""
    x = inputs(net, batch)
    found = results(net, x)
    wanted = results(reference_of(net), x.double())
    dtype = net.transitions[0].weight.dtype
    allowed = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 4e-3}.get(dtype, 3e-2)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    for name, off, largest in differences(found, wanted):
        assert off <= allowed * largest, name


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("sizes", [(256, 256), (256, 200), (200, 300), (129, 260)])
def test_tiles_are_found_with_their_size(sizes: tuple[int, int], tile: int) -> None:
    wires = tiles(*sizes, tile, 0.5)
    net = net_of(wires, sizes[1])
    found = net.execution.tiles(0)
    assert found is not None
    assert found.size == net.execution.describe()[0]["tile"] == tile
    assert found.present.shape == (-(-sizes[0] // tile), -(-sizes[1] // tile))
    for row, blocks in enumerate(found.present):
        children = [c for c in range(sizes[1]) if blocks[c // tile]]
        assert sorted(wires[row * tile]) == children


def nearly(change: Callable[[Wires], object]) -> Wires:
    wires = tiles(64, 96, 16, 0.5)
    change(wires)
    return wires


NOT_TILED = {
    "one relation less": nearly(lambda wires: wires[20].pop()),
    "one block less for one parent": nearly(lambda wires: wires[20].__delitem__(slice(16))),
    "one relation elsewhere": nearly(
        lambda wires: wires[20].__setitem__(3, min(set(range(96)) - set(wires[20])))
    ),
    "two children in another order": nearly(
        lambda wires: wires[20].__setitem__(slice(2), wires[20][1::-1])
    ),
    "blocks in another order for one parent": nearly(
        lambda wires: wires.__setitem__(20, wires[20][16:] + wires[20][:16])
    ),
    "blocks that begin in between": [list(range(8, 40)) for _ in range(64)],
    "blocks of 8": [list(range(row // 8 * 8, row // 8 * 8 + 8)) for row in range(64)],
    "half a block, which the next parents continue": [
        list(range(row // 16 * 8, row // 16 * 8 + 8)) for row in range(64)
    ],
    "an unsorted full one": shuffled(full(32, 96)),
}


@pytest.mark.parametrize("wires", NOT_TILED.values(), ids=NOT_TILED)
def test_what_does_not_come_in_tiles_is_refused_by_name(wires: Wires) -> None:
    net = net_of(wires, 96)
    assert net.execution.tiles(0) is None
    (row,) = net.execution.describe()
    assert row["tile"] is None
    (reason,) = row["refused"]["tiles"]
    with pytest.raises(gn.errors.PlanError, match=re.escape(reason)):
        net.execution.use("tiles")
    assert net.execution.choices() == ["auto"]


@pytest.mark.sparse
@pytest.mark.parametrize("share", [0.4, 0.6])
def test_the_kernels_run_up_to_a_share_of_the_rectangle(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "GATHERED", dict.fromkeys(_tiles.SIZES, share))
    net = tiled_net((64, 64, 16), density=0.5)
    x = inputs(net, 20)
    net(x)
    with torch.profiler.profile() as profiler:
        net(x).sum().backward()
    names = {event.name for event in profiler.events() or ()}
    assert ("_RelationSum" in names) == (share > 0.5)
    assert ("_TileSum" in names) == (share < 0.5)


def test_damaged_wirings_have_no_tiles() -> None:
    topology = net_of(tiles(64, 96, 16, 0.5), 96).transitions[0].topology
    for position, value in ((0, -16), (17, 96), (5, 5000)):
        child = topology.child.clone()
        child[position] = value
        damaged = type(topology)(topology.ptr, child, 96)
        assert _tiles.find_tiles(damaged) is None
    ptr = topology.ptr.clone()
    ptr[16] += 16
    assert _tiles.find_tiles(type(topology)(ptr, topology.child, 96)) is None
    assert _tiles.find_tiles(topology) is not None


@ways
@pytest.mark.parametrize("batch", [1, 7, 128, 130])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@devices
def test_matches_the_reference(device: str, sizes: tuple[int, int, int], batch: int) -> None:
    for dtype in DTYPES[device]:
        for density in (0.2, 0.7):
            require_near(tiled_net(sizes, density, device=device, dtype=dtype), batch)


@ways
@devices
def test_blocks_without_relations_get_their_biases(device: str) -> None:
    """A few tiles in the middle: most blocks of parents and of children have none."""
    rows = [[*range(32, 48)] if 16 <= row < 32 else [] for row in range(80)]
    net = net_of(rows, 96, device=device, dtype=EXACT[device])
    net.execution.use("tiles")
    require_near(net, 33)
    x = inputs(net, 3)
    assert torch.equal(net(x)[:, :32], net.layers[1].biases[:32].expand(3, -1))


@ways
def test_no_relations_and_no_samples() -> None:
    net = net_of([[] for _ in range(20)], 30)
    net.execution.use("tiles")
    require_near(net, 3)
    net = tiled_net((64, 96, 16))
    x = torch.zeros(0, 64, requires_grad=True)
    net(x).sum().backward()
    assert not net.transitions[0].weight.grad.any()


def prune_tiles(net: gn.GrapNet, edit: gn.Edit) -> None:
    PruneWeakest(0.3, tile=16)(net, edit, RuleContext())


def move_tiles(net: gn.GrapNet, edit: gn.Edit) -> None:
    Rewire(fraction=0.5, tile=16, weights="linear")(net, edit, RuleContext())


def freeze_some(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.freeze(net.layers[0].outgoing()[:5])


EDITS = {"prune": prune_tiles, "move": move_tiles, "freeze": freeze_some}


@ways
@pytest.mark.parametrize("edit", EDITS)
def test_matches_the_reference_through_edits(edit: str) -> None:
    net = SHAPES["tiles"].build()
    net.execution.use("tiles")
    x = inputs(net, 7)
    before = results(net, x)
    with net.edit(trial=True) as trial:
        EDITS[edit](net, trial)
        trial.commit()
        require_reference(net, x)
    require_close(results(net, x), before)
    edited(net, EDITS[edit])
    require_reference(net, x)
    edited(net, EDITS["move"])
    edited(net, EDITS["prune"])  # two commits without a forward pass in between
    require_reference(net, x)
    for _ in range(net.version):
        net.undo()
    require_close(results(net, x), before)
    net.redo()
    require_reference(net, x)


def test_an_edit_that_breaks_tiles_is_refused_where_the_backend_was_chosen() -> None:
    net = SHAPES["tiles"].build()
    net.execution.use("tiles", 0)
    with pytest.raises(gn.errors.PlanError, match="tiles cannot run transition 0"):
        edited(net, lambda net, edit: edit.cut(net.layers[0][0], slots=[0]))
    assert net.version == 0
    net.execution.use("auto")
    edited(net, lambda net, edit: edit.cut(net.layers[0][0], slots=[0]))
    assert net.execution.tiles(0) is None
    net.undo()
    assert net.execution.tiles(0) is not None


@ways
@pytest.mark.parametrize("kind", ["steps", "one row for all", "feature-major"])
@devices
def test_any_layout_in_memory(device: str, kind: str) -> None:
    net = tiled_net((64, 70, 16), device=device, dtype=EXACT[device])
    plain = inputs(net, 6)
    layouts = {
        "steps": plain.repeat_interleave(2, 1)[:, ::2],
        "one row for all": plain[:1].expand(6, -1),
        "feature-major": plain.t().contiguous().t(),
    }
    x = layouts[kind].detach().requires_grad_()
    net(x).sum().backward()  # the gradient that arrives is one number, expanded
    twin = reference_of(net)
    same = x.detach().double().contiguous().requires_grad_()
    twin(same).sum().backward()
    torch.testing.assert_close(x.grad.double(), same.grad, rtol=1e-5, atol=1e-5)
    found = net.transitions[0].weight.grad.double()
    torch.testing.assert_close(found, twin.transitions[0].weight.grad, rtol=1e-5, atol=1e-5)


@ways
@devices
def test_the_gradients_of_gradients(device: str) -> None:
    net = SHAPES["tiles"].build(EXACT[device], device)
    net.execution.use("tiles")
    x = inputs(net, 3)
    found = second_order(net, x)
    wanted = second_order(reference_of(net), x.double())
    for name, tensor in found.items():
        off = float((tensor.double() - wanted[name]).abs().max())
        assert off <= (1e-12 if device == "cpu" else 1e-3 * float(wanted[name].abs().max())), name


@ways
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_derivatives_are_those_of_small_differences() -> None:
    """Backward, batched backward and forward mode, of the first and second order."""
    net = tiled_net((18, 20, 16), 1 / 2, dtype=torch.float64)
    parameters = dict(net.named_parameters())
    x = inputs(net, 2).requires_grad_()

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, dict(zip(parameters, values, strict=True)), (x,))

    given = (x, *(p.detach().clone().requires_grad_() for p in parameters.values()))
    options = {"fast_mode": True}
    assert torch.autograd.gradcheck(
        run, given, check_forward_ad=True, check_batched_grad=True, **options
    )
    assert torch.autograd.gradgradcheck(
        run, given, check_batched_grad=True, check_fwd_over_rev=True, **options
    )


@ways
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_transforms_and_forward_mode_run_plain_operations() -> None:
    net = tiled_net((64, 70, 16), dtype=torch.float64)
    twin = reference_of(net)
    x = inputs(net, 4)
    require_close({"": torch.func.jacrev(net)(x)}, {"": torch.func.jacrev(twin)(x)})
    require_close({"": torch.func.vmap(net)(x[:, None])}, {"": twin(x)[:, None]})
    with torch.device("meta"):
        elsewhere = torch.func.vmap(net)(x[:, None])
    assert torch.equal(elsewhere, torch.func.vmap(net)(x[:, None]))
    with forward_ad.dual_level():
        output = net(forward_ad.make_dual(x, x.cos()))
        tangent = forward_ad.unpack_dual(output).tangent
    expected = (twin(x + 1e-6 * x.cos()) - twin(x - 1e-6 * x.cos())) / 2e-6
    torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=1e-6)


@devices
def test_operators_keep_the_rules_of_torch(device: str) -> None:
    net = tiled_net((40, 70, 16), device=device, dtype=EXACT[device])
    tiling = _tiles.find_tiles(net.transitions[0].topology)
    assert tiling is not None
    wiring = _tiles._wiring(tiling, net.device)
    values = net.transitions[0].weight.detach().view(-1).requires_grad_()
    bias = net.layers[1].biases.detach().requires_grad_()
    x = inputs(net, 3).requires_grad_()
    dz = slope(net(x)).requires_grad_()
    calls = {
        "tile_sum": (x, values, bias),
        "tile_input_gradient": (dz, values, 40),
        "tile_weight_gradient": (x, dz, len(values)),
    }
    for name, given in calls.items():
        operator = getattr(torch.ops.grapnet, name).default
        torch.library.opcheck(operator, (*given, 16, *wiring))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@ways
@devices
def test_a_compiled_net_is_one_graph_and_computes_the_same(device: str) -> None:
    torch._dynamo.reset()
    net = SHAPES["tiles"].build(EXACT[device], device)
    net.execution.use("tiles")
    x = inputs(net, 4)
    net(x)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = results(net, x, compiled)
    wanted = results(net, x)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name])
    torch._dynamo.reset()


@devices
def test_autocast_is_as_close_as_it_is_for_linear_layers(device: str) -> None:
    net = SHAPES["tiles"].build(torch.float32, device)
    net.execution.use("tiles")
    modules = net.to_module()
    x = inputs(net, 64)
    expected = results(reference_of(net), x.double())
    with torch.autocast(device, dtype=torch.bfloat16):
        found = results(net, x)
        theirs = modules(x)
    assert found["output"].dtype == theirs.dtype
    off = (theirs - expected["output"]).abs().max()
    assert (found["output"] - expected["output"]).abs().max() <= 2 * off + 1e-3
    for name, gradient in found.items():
        assert name == "output" or gradient.dtype == torch.float32
        assert (gradient - expected[name]).abs().max() <= 0.04 * expected[name].abs().max(), name


@ways
def test_numbers_that_are_not_finite_stay_on_their_paths() -> None:
    net = tiled_net((64, 96, 16))
    x = torch.ones(5, 64)
    x[:, 0] = torch.inf
    reached = torch.zeros(96, dtype=torch.bool)
    reached[net.transitions[0].topology.child[: int(net.transitions[0].ptr[1])].long()] = True
    output = net(x)
    assert not output[:, reached].isfinite().any()
    assert output[:, ~reached].isfinite().all()


def test_copies_and_files_keep_the_choice(tmp_path: Any) -> None:
    net = SHAPES["tiles"].build()
    net.execution.use("tiles")
    gn.save(tmp_path / "net.gn", net)
    for other in (copy.deepcopy(net), gn.load(tmp_path / "net.gn")):
        assert other.execution.choices() == ["tiles", "tiles"]
        require_reference(other, inputs(net, 3))


def test_a_full_transition_runs_as_one_matrix() -> None:
    net = gn.GrapNet([20, 30])
    net.execution.use("tiles")
    require_near(net, 3)
    edited(net, partial(_cut_first))
    assert net.execution.describe()[0]["runs"] == "tiles"
    require_near(net, 3)


def _cut_first(net: gn.GrapNet, edit: gn.Edit) -> None:
    """Cuts the tile of the first 16 parents and children."""
    for node in net.layers[0][:16]:
        edit.cut(node, slots=range(16))
