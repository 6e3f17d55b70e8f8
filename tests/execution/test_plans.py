"""Plans through edits: an old one is refused, a cut coordinate is in none, and a moved one is as a
fresh one.
"""

import gc
import zipfile
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn

from .figures import inputs, reference_of
from .graphs import BACKEND_NAMES, DEVICES, EDITS, SHAPES, edited, runs_with

backends = pytest.mark.parametrize("backend", BACKEND_NAMES)
devices = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize(
    "edit", ["cut_one", "cut_tenth", "add_nodes", "remove_nodes", "rewire", "renew"]
)
@pytest.mark.parametrize("shape", ["full", "full, shuffled", "ragged", "many families"])
@backends
@devices
def test_a_plan_kept_from_before_an_edit_is_refused(
    backend: str, shape: str, edit: str, device: str
) -> None:
    net = SHAPES[shape].build(device=device)
    if not runs_with(net, backend):
        return
    x = inputs(net, 4)
    stores = list(net.transitions)
    plans = [net.execution.plan(t, batch=4) for t in range(len(stores))]

    def by_hand() -> Tensor:
        h = x
        for plan, store, layer in zip(plans, net.transitions, net.layers[1:], strict=True):
            h = layer(plan(h, store.values(), layer.values()))
        return h

    equal = torch.equal if device == "cpu" else torch.allclose  # a GPU adds in any order
    assert equal(by_hand(), net(x))  # the control: before the edit it runs
    edited(net, EDITS["freeze"])
    assert equal(by_hand(), net(x))  # freezing moves no relation
    old = [store._structure for store in stores]
    edited(net, EDITS[edit])
    moved = [store._structure is not token for store, token in zip(stores, old, strict=True)]
    assert any(moved) or (shape, edit) in {("full", "rewire"), ("full, shuffled", "rewire")}
    for plan, store, moves in zip(plans, stores, moved, strict=True):
        given = (x.new_zeros(4, len(store.ptr) - 1), store.values(), x.new_zeros(store.n_children))
        if moves:
            with pytest.raises(gn.errors.StaleTopologyError, match=r"net\.execution\.plan"):
                plan(*given)
        else:
            plan(*given)
    if any(moved):
        net.undo()
        with pytest.raises(gn.errors.StaleTopologyError):
            by_hand()  # an undo brings the relations back, in other arrays
    plans = [net.execution.plan(t, batch=4) for t in range(len(stores))]
    assert equal(by_hand(), net(x))


def held_by(root: object) -> list[Tensor]:
    """Returns every tensor that an object leads to, short of the graph and of modules."""
    found: list[Tensor] = []
    seen = set()
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type | nn.Module | ModuleType):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found.append(thing)
            waiting.append(thing.grad_fn)
        elif isinstance(thing, FunctionType):
            waiting += thing.__closure__ or ()
        else:
            waiting += gc.get_referents(thing)
    return found


def stored_bytes(tensor: Tensor) -> bytes:
    """Returns everything in the memory that a tensor is a part of."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.detach().untyped_storage()
    )
    return whole.cpu().numpy().tobytes()


@pytest.mark.parametrize(
    "shape", ["full", "full, wide", "ragged", "one family", "many families", "grown head"]
)
@backends
@devices
def test_after_a_cut_no_plan_holds_the_coordinate(backend: str, shape: str, device: str) -> None:
    # of other tests; held, so no id recurs
    others = {id(t): t for t in tensors_alive()} if shape == "ragged" else {}
    net = SHAPES[shape].build(device=device)
    if not runs_with(net, backend):
        return
    net.journal.undo_limit = 0  # what undo would need is kept on purpose
    planted = plant(net)
    for batch in (1, 256):
        net(inputs(net, batch)).sum().backward()
    # the control: it is found where it is
    assert planted in stored_bytes(net.transitions[1].weight)
    counts = {store.size for store in net.transitions}
    edited(net, cut_planted)
    counts -= {store.size for store in net.transitions}
    for ran in (False, True):
        held = held_by(net.execution)
        # a plan holds no weights but the matrices that it keeps; beside it stand those that the net
        # has at present
        live = {tensor.data_ptr() for tensor in (*net.parameters(), *net.buffers())}
        floats = [tensor for tensor in held if tensor.is_floating_point()]
        kept = {id(tensor): tensor.nbytes for tensor in floats if tensor.data_ptr() not in live}
        assert sum(kept.values()) == sum(row["kept_bytes"] for row in net.execution.describe())
        assert not any(
            planted in stored_bytes(tensor) for tensor in [*held, *net.parameters(), *net.buffers()]
        )
        # nor anything else as long as the old relations
        assert not any(tensor.numel() in counts for tensor in held if id(tensor) not in kept)
        if not ran:
            net(inputs(net, 1)).sum().backward()
    if shape == "ragged":
        mine = [tensor for tensor in tensors_alive() if id(tensor) not in others]
        assert not any(planted in stored_bytes(tensor) for tensor in mine)


def tensors_alive() -> list[Tensor]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return [tensor for tensor in tensors if tensor.layout == torch.strided]


def test_after_a_cut_no_snapshot_and_no_file_holds_the_coordinate(tmp_path: Path) -> None:
    net = SHAPES["ragged"].build()
    net.journal.undo_limit = 0
    planted = plant(net)
    for stage in ("before", "after"):
        snapshot = net.snapshot()
        paths = [tmp_path / f"{stage} {kind}" for kind in ("snapshot", "export.pt2", "net")]
        torch.save(snapshot, paths[0])
        torch.export.save(torch.export.export(snapshot, (inputs(net, 2),)), paths[1])
        gn.save(paths[2], net)
        found = [planted in stored_bytes(tensor) for tensor in snapshot.state_dict().values()]
        found += [planted in content for path in paths for content in unpacked(path)]
        assert sum(found) == (4 if stage == "before" else 0)  # the control, then the test
        edited(net, cut_planted)


def unpacked(path: Path) -> list[bytes]:
    """Returns what a file holds, each member of an archive by itself."""
    if not zipfile.is_zipfile(path):
        return [path.read_bytes()]
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist()]


def cut_planted(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.cut(net.layers[0].outgoing()[:1])
    edit.cut(net.layers[1].outgoing().largest(count=1))


def plant(net: gn.GrapNet) -> bytes:
    """Writes a number found nowhere else into a relation of the second transition, and returns its
    bytes.
    """
    mark = torch.tensor(1234.56789012345, dtype=torch.float64)
    node = next(node for node in net.layers[1] if len(node.children) > 1)
    node.outgoing(slots=[1]).weights = mark
    return mark.numpy().tobytes()


@pytest.mark.parametrize("shape", ["full", "ragged", "many families", "partly frozen"])
@backends
@devices
def test_a_plan_after_edits_holds_what_a_fresh_one_holds(
    backend: str, shape: str, device: str
) -> None:
    """Moved or made again, a plan is that of the present relations: nothing more, nothing less."""
    net = SHAPES[shape].build(device=device)
    if not runs_with(net, backend):
        return
    for edit in ("cut_one", "rewire", "add_nodes", "renew", "cut_tenth", "remove_nodes"):
        net(inputs(net, 3))
        edited(net, EDITS[edit])
        fresh = reference_of(net)
        fresh.execution.use(backend)
        for model in (net, fresh):
            model(inputs(net, 3))
        assert contents(net.execution) == contents(fresh.execution), edit


def contents(execution: object) -> list[tuple[Any, ...]]:
    return sorted((str(t.dtype), tuple(t.shape), t.cpu().tolist()) for t in held_by(execution))


@pytest.mark.sparse
def test_kernels_hand_activations_on_feature_by_feature() -> None:
    net = gn.GrapNet([20, 16, 5], density=0.5)
    seen = []
    net.layers[1].register_forward_hook(lambda layer, args, h: seen.append(h))
    net.execution.use("sparse")
    net(torch.randn(8, 20))
    # A reader that is no kernel takes rows.
    net.execution.use("dense", 1)
    net(torch.randn(8, 20))
    assert [h.is_contiguous() for h in seen] == [False, True]
    assert seen[0].t().is_contiguous()
