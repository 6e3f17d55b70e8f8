"""CovarianceSifter and RemoveOrphans on adopted models."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import grapnet as gn
from grapnet.rules import (
    At,
    Budget,
    CovarianceSifter,
    PruneWeakest,
    RemoveOrphans,
    RuleContext,
    RuleManager,
    TensorCorrelationRecorder,
)
from grapnet.spaces import Space
from tests.spaces import huggingface, oracle, zoo
from tests.spaces.subjects import Subject, subject, zeros_of

EXACT = {"rtol": 0, "atol": 1e-12}


def made(name: str) -> Subject:
    if name in zoo.MODELS:
        return subject(zoo.MODELS[name]())
    return subject(huggingface.FAMILIES[name]())


def number_of(found: Subject, name: str) -> int:
    (t,) = found.net._named_transitions(name)
    return t


class Calls:
    """Keeps the inputs or outputs of modules."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        for path, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(self._hook(path))

    def _hook(self, path: str) -> Any:
        def take(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self.inputs.setdefault(path, []).append(args[0].detach().clone())
            self.outputs.setdefault(path, []).append(output.detach().clone())

        return take


def correlations(cells: Tensor, children: Tensor) -> Tensor:
    """Returns the correlations of two matrices of samples, [children, cells]."""
    cells = cells - cells.mean(0)
    children = children - children.mean(0)
    scale = torch.outer(children.norm(dim=0), cells.norm(dim=0))
    found = children.t() @ cells
    return torch.where(scale > 1e-9, found / scale.clamp(min=1e-300), 0.0)


# model, module, where its children are read, how
WEIGHTS = [
    ("resnet", "layer1.0.conv1", "layer1.0.conv2"),
    ("resnet", "layer1.0.conv2", "layer1.1.conv1"),
    ("resnet", "layer2.0.conv1", "layer2.0.conv2"),
    ("resnet", "layer2.0.downsample.0", "layer2.1.conv1"),
    ("resnet", "layer3.1.conv2", None),
    ("vit", "blocks.0.attn.proj", "blocks.0.fc1"),
    ("vit", "blocks.0.fc1", "blocks.0.fc2"),
    ("vit", "blocks.1.fc2", None),
    ("gpt2", "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"),
    ("gpt2", "transformer.h.0.mlp.c_proj", "transformer.h.1.attn.c_attn"),
    ("gpt2", "transformer.h.0.attn.c_attn", None),
]


@pytest.mark.parametrize(("name", "path", "reader"), WEIGHTS, ids=[one[1] for one in WEIGHTS])
def test_correlations_are_those_of_unfolded_inputs(
    name: str, path: str, reader: str | None
) -> None:
    found = made(name)
    module: Any = found.model.get_submodule(path)
    recorder = TensorCorrelationRecorder(found.net, number_of(found, path))
    recorder.arm(found.net)
    calls = Calls(found.model)

    def expected() -> Tensor:
        cells = []
        children = []
        afterwards = calls.outputs[path] if reader is None else calls.inputs[reader]
        for x, h in zip(calls.inputs[path], afterwards, strict=True):
            if isinstance(module, nn.Conv2d):
                unfolded = functional.unfold(
                    x, module.kernel_size, module.dilation, module.padding, module.stride
                )
                cells.append(unfolded.transpose(1, 2).flatten(0, 1))
                children.append(h.movedim(1, -1).flatten(0, -2))
            else:
                cells.append(x.flatten(0, -2))
                children.append(h.flatten(0, -2))
        result = correlations(torch.cat(cells), torch.cat(children))
        if type(module).__name__ == "Conv1D":
            return result.t()
        return result.view(module.weight.shape)

    for _ in range(2):
        found.step()
    torch.testing.assert_close(recorder.correlation(), expected(), **EXACT)
    strengths = recorder.strengths()
    weight = found.net.transitions[number_of(found, path)]
    rows, columns = weight._places()
    table = expected().movedim((weight.in_dim, weight.out_dim), (0, 1))
    for i in (0, len(rows) - 1):
        for j in (0, len(columns) - 1):
            block = table[rows[i]][:, columns[j]]
            torch.testing.assert_close(strengths[i, j], block.square().mean().sqrt(), **EXACT)
    # Cut relations are recorded like the others.
    with found.net.edit() as edit:
        edit.cut(found.net.relations(path).smallest(fraction=0.3))
    found.step()
    torch.testing.assert_close(recorder.correlation(), expected(), **EXACT)
    # Evidence follows the removal of nodes on both sides, and begins anew once some are added.
    before = recorder.correlation()
    sides = [found.net.spaces[n] for n in found.net.ends[number_of(found, path)]]
    free = [space for space in sides if not space.pins]
    maps = [(space, space.places()) for space in free]
    with found.net.edit() as edit:
        for space in free:
            edit.remove_nodes(space[[0]])
    kept = before
    for _, places in maps:
        for (tensor, dim), at in places.items():
            if tensor == weight.name:
                stay = [n for n in range(before.shape[dim]) if n not in at[0].tolist()]
                kept = kept.index_select(dim, torch.tensor(stay))
    torch.testing.assert_close(recorder.correlation(), kept, **EXACT)
    found.step()
    assert recorder.correlation().shape == weight.grid.shape
    state = recorder.state_dict()
    other = TensorCorrelationRecorder(found.net, number_of(found, path))
    other.load_state_dict(state)
    assert torch.equal(other.correlation(), recorder.correlation())
    with found.net.edit() as edit:
        edit.add_nodes(free[0], 1, readers="alike")
    assert recorder.count == 0
    calls.inputs.clear()
    calls.outputs.clear()
    found.step()
    torch.testing.assert_close(recorder.correlation(), expected(), **EXACT)


def test_a_constant_channel_has_correlations_of_exactly_0() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Softplus(), nn.Conv2d(6, 5, 3), nn.Flatten())
    with torch.no_grad():
        model[0].weight[:2] = 0
        model[0].bias[:2] = torch.tensor([1e6 / 3, -1.0])
    x = torch.randn(4, 3, 6, 6)
    net = gn.adopt(model, x[:2])
    recorder = TensorCorrelationRecorder(net, 1)
    recorder.arm(net)
    for _ in range(3):
        model(x)
    found = recorder.correlation()
    assert int(found[:, :2].count_nonzero()) == 0
    assert int((found[:, 2:] == 0).sum()) == 0


def test_a_model_is_sifted_like_the_net_of_the_same_weights() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 3)).double()
    net = gn.from_module(copy.deepcopy(model))
    x = torch.randn(64, 5, dtype=torch.float64)
    adopted = gn.adopt(model, x[:2])
    rule = CovarianceSifter(fraction=0.4)
    # The second transition has families, made by the same cuts in both.
    with net.edit() as edit, adopted.edit() as other:
        edit.cut(net.layers[1][:6].outgoing(to=net.layers[2][:5]))
        edit.cut(net.layers[1][6:].outgoing(to=net.layers[2][5:]))
        relations = adopted.relations("2")
        upper = adopted.space("0").rows(relations.parents) < 6
        lower = adopted.space("2").rows(relations.children) < 5
        other.cut(relations[upper == lower])
    for graph in (net, adopted):
        manager = RuleManager()
        manager.add(rule)
        with manager.recording(graph):
            graph(x)
        manager.apply(graph, 0)
    assert adopted.space("0").uids.shape == net.layers[1].uids.shape
    assert [len(adopted.space(name)) for name in ("2", "4")] == net.sizes[2:4]
    assert net.sizes[2] < 10
    torch.testing.assert_close(model(x), net(x), **EXACT)
    for t in range(4):
        assert adopted.transitions[t].size == net.transitions[t].size


@pytest.mark.parametrize("name", ["resnet", "vit", "gpt2"])
def test_a_model_is_sifted_while_it_trains(name: str) -> None:
    found = made(name)
    manager = RuleManager()
    manager.add(CovarianceSifter(fraction=0.3, window=2), schedule=At(2))
    manager.start(found.net)
    sizes = found.net.sizes
    for step in range(2):
        found.step()
        assert manager.apply(found.net, step) is None
    found.step()
    before = found.snapshot()
    preview = manager.apply(found.net, 2, dry_run=True)
    assert oracle.same(before, found.snapshot()) == []
    commit = manager.apply(found.net, 2)
    assert commit is not None
    assert preview.after.relations == found.net.count().relations
    gn.check(found.net)
    # Every hidden space that one tensor writes has lost its share, the others none of their nodes
    # or those that no tensor wrote any more.
    shrunk = 0
    for space, size in zip(found.net.spaces, sizes, strict=True):
        entering = found.net.entering(space.index)
        if space.verdict == "exact" and len(entering) == 1 and space.rows_per_node == 1:
            source = found.net.spaces[found.net.ends[entering[0]][0]]
            if not source.pins:
                assert len(space) == size - int(0.3 * size + 1e-9)
                shrunk += 1
    assert shrunk >= 2
    found.step()
    found.net.undo()
    assert found.net.sizes == sizes
    found.step()
    assert not any(module._forward_pre_hooks for module in found.model.modules())


def test_budgets_and_frozen_relations_spare_children() -> None:
    found = made("resnet")
    rule = CovarianceSifter("layer1.0.conv2", fraction=0.5)
    children = found.net.space("conv1")
    with found.net.edit() as edit:
        edit.freeze(children[:2].incoming())
    manager = RuleManager(budget=Budget(edits=7))
    manager.add(rule)
    with manager.recording(found.net):
        found.outputs()
    manager.apply(found.net, 0)
    # A child of the family costs 7 relations, one from each member.
    relations = found.net.relations("layer1.0.conv2")
    assert len(relations) == 42 - 7
    gone = set(children.uids.tolist()) - set(relations.children.tolist())
    assert len(gone) == 1
    assert not gone & set(children[:2].uids.tolist())


def test_what_cannot_be_recorded_is_refused_by_name() -> None:
    found = made("gpt2")
    with pytest.raises(gn.errors.EditError):
        CovarianceSifter("transformer.wte").recorders(found.net)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ConvTranspose2d(6, 5, 3), nn.Conv2d(5, 2, 1)
    )
    net = gn.adopt(convolutions, torch.randn(2, 3, 8, 8))
    with pytest.raises(gn.errors.EditError):
        CovarianceSifter("1").recorders(net)
    assert CovarianceSifter().recorders(net) == {}
    with net.edit() as edit, pytest.raises(gn.errors.EditError):
        CovarianceSifter("0")(net, edit, RuleContext())


def silenced(found: Subject, space: Space, rows: list[int]) -> list[Tensor]:
    """Returns what the model would return if nothing read some nodes."""
    kept = copy.deepcopy(found.model)
    for (name, dim), at in zeros_of(space, rows).items():
        tensor = dict(kept.named_parameters())[name]
        if tensor.shape != found.net._grids()[name].shape:
            raise AssertionError("the reader is opened")
        with torch.no_grad():
            tensor.index_fill_(dim, torch.tensor(at), 0.0)
    return oracle.outputs_of(kept, found.case)


@pytest.mark.parametrize("name", ["resnet", "vit", "gpt2"])
def test_nodes_without_parents_leave(name: str) -> None:
    found = made(name)
    path = {"resnet": "layer1.0.conv1", "vit": "blocks.0.fc1", "gpt2": "transformer.h.0.mlp.c_fc"}
    space = found.net.space(path[name])
    uids = space.uids
    expected = silenced(found, space, [1, 3])
    before = found.snapshot()
    with found.net.edit() as edit:
        edit.cut(space[[1, 3]].incoming())
    assert len(space) == len(uids)
    manager = RuleManager()
    manager.add(RemoveOrphans())
    preview = manager.apply(found.net, 0, dry_run=True)
    assert preview.nodes == -2
    commit = manager.apply(found.net, 0)
    assert commit is not None
    remarks = [o for o in commit.operations if o["operation"] == "remark"]
    assert remarks[-1]["orphans"] == 2
    assert set(uids.tolist()) - set(space.uids.tolist()) == set(uids[[1, 3]].tolist())
    assert oracle.largest_difference(found.outputs(), expected) < 1e-12
    assert manager.apply(found.net, 1) is None
    gn.check(found.net)
    for _ in range(2):
        found.net.undo()
    assert oracle.same(before, found.snapshot()) == []
    found.net.redo()
    found.net.redo()
    found.step()


def test_cuts_of_the_same_edit_count_and_removal_cascades() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    net = gn.adopt(model, torch.randn(2, 4))
    first = net.space("0")
    second = net.space("2")
    with net.edit() as edit:
        # Node 0 of the second space has one parent, which loses its own.
        edit.cut(second[[0]].incoming() - first[[0]].outgoing())
        edit.cut(first[[0]].incoming())
        edit.remove_orphans()
    assert net.sizes[first.index] == 5
    assert net.sizes[second.index] == 4
    net.undo()
    with net.edit() as edit:
        edit.cut(first[[0, 1]].incoming())
    with net.edit() as edit:
        edit.connect(net.space("0", side="in")[:1], first[[0]])
        edit.remove_orphans()
    # One of the two has been connected again.
    assert len(first) == 5
    net.undo()
    net.undo()
    with net.edit() as edit:
        edit.cut(second[[0]].incoming() - first[[0]].outgoing())
        edit.remove_nodes(first[[0]])
        edit.remove_orphans(second)
    assert (len(first), len(second)) == (5, 4)
    net.undo()
    # Nothing is built for tensors that have all of their relations.
    assert net.transitions[2]._made is None
    with net.edit() as edit:
        # New nodes have all of their relations.
        edit.cut(second[[0]].incoming())
        edit.add_nodes(first, 1)
        edit.remove_orphans()
    assert (len(first), len(second)) == (7, 5)


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_nodes_without_children_leave_the_function_as_it_is(name: str) -> None:
    found = made(name)
    path = {"resnet": "layer1.0.conv1", "vit": "blocks.0.fc1"}[name]
    space = found.net.space(path)
    size = len(space)
    with found.net.edit() as edit:
        edit.cut(space[[0, 2]].outgoing())
    outputs = found.outputs()
    manager = RuleManager()
    manager.add(RemoveOrphans(layers=path))
    assert manager.apply(found.net, 0) is None
    manager.replace("RemoveOrphans", RemoveOrphans(layers=path, childless=True))
    assert manager.apply(found.net, 0) is not None
    assert len(space) == size - 2
    assert oracle.largest_difference(found.outputs(), outputs) < 1e-12
    found.step()


def test_a_sparse_model_loses_what_nothing_writes_or_reads() -> None:
    found = made("resnet")
    manager = RuleManager()
    manager.add(PruneWeakest(sparsity=0.8, compare="score"))
    manager.add(RemoveOrphans(childless=True))
    nodes = found.net.count().nodes
    manager.apply(found.net, 0)
    assert found.net.count().nodes < nodes
    manager = RuleManager()
    manager.add(RemoveOrphans(childless=True))
    assert manager.apply(found.net, 1) is None
    for number in found.net._orphanages():
        fan_in = torch.zeros(found.net.sizes[number], dtype=torch.int64)
        for t in found.net.entering(number):
            fan_in += found.net.transitions[t].topology.fan_in()
        assert int(fan_in.min()) > 0
    gn.check(found.net)
    found.step()


def test_orphans_of_streams_and_pinned_spaces_stay() -> None:
    found = made("vit")
    stream = found.net.space("patch_embed")
    size = len(stream)
    with found.net.edit() as edit:
        edit.cut(stream[[4]].incoming())
    manager = RuleManager()
    manager.add(RemoveOrphans())
    # A norm is taken over the stream, so that its nodes leave only if it is named.
    assert manager.apply(found.net, 0) is None
    manager.replace("RemoveOrphans", RemoveOrphans(layers=stream))
    manager.apply(found.net, 0)
    assert len(stream) == size - 1
    for rule in (RemoveOrphans(layers="head"), RemoveOrphans(fold_bias=True)):
        manager.replace("RemoveOrphans", rule)
        with pytest.raises(gn.errors.EditError):
            manager.apply(found.net, 0)
    net = gn.GrapNet([3, 4, 2])
    with net.edit() as edit, pytest.raises(gn.errors.EditError):
        RemoveOrphans(childless=True)(net, edit, RuleContext())


def test_a_space_keeps_a_node_and_an_edit_that_fails_changes_nothing() -> None:
    found = made("resnet")
    space = found.net.space("layer1.0.conv1")
    before = found.snapshot()

    def cut_and_remove(net: Any, edit: Any, context: RuleContext) -> None:
        edit.cut(space.incoming())
        edit.remove_orphans()

    manager = RuleManager()
    manager.add(cut_and_remove)
    with pytest.raises(gn.errors.EditError):
        manager.apply(found.net, 0)
    assert oracle.same(before, found.snapshot()) == []
    manager.allow_dead = True
    manager.apply(found.net, 0)
    assert len(space) == 1
    found.step()
