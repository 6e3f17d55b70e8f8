"""Rules on adopted models: PruneWeakest, Rewire, FreezeOwner and GrowWidth, with one manager.

Other rules and recorders have files of their own: test_sifting, test_gradmax, test_recorders.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.core._sets import RelationSet
from grapnet.rules import (
    At,
    Budget,
    Every,
    FreezeOwner,
    GrowForTask,
    GrowWidth,
    PruneNodes,
    PruneWeakest,
    Rewire,
    RuleManager,
    SplitIntoFamilies,
    TensorGradientRecorder,
    gradual_pruning,
    rigl,
)
from grapnet.spaces import Space
from tests.spaces import oracle, zoo
from tests.spaces.subjects import Subject, loss_of, same_bits, subject

MODELS = ["resnet", "vit"]


@pytest.fixture(params=MODELS)
def found(request: pytest.FixtureRequest) -> Subject:
    return subject(zoo.MODELS[request.param]())


def managed(*rules: Any, **keywords: Any) -> RuleManager:
    manager = RuleManager(**keywords)
    for rule in rules:
        manager.add(rule)
    return manager


def sizes(found: Subject) -> list[int]:
    return [weight.size for weight in found.net.transitions]


def every_relation(found: Subject) -> RelationSet:
    return RelationSet.of(found.net, range(len(found.net.transitions)))


def wholes(found: Subject) -> dict[str, Tensor]:
    """Returns what the modules compute with, 0 where a relation was cut."""
    return {name: grid.whole.clone() for name, grid in found.net._stores().items()}


def states(found: Subject) -> dict[str, Tensor]:
    """Returns the first moments of Adam in the shape of the tensors, NaN where a cell is cut."""
    result = {}
    for name, grid in found.net._stores().items():
        moment = found.optimizer.state[grid.parameter]["exp_avg"]
        opened = grid.opened
        if opened is not None:
            spread = torch.full((len(opened.pattern.kinds), opened.pattern.width), torch.nan)
            spread = spread.to(moment)
            spread[opened.free_at(moment.device)] = moment.view(-1, opened.pattern.width)
            moment = spread.view(opened.pattern.shape)
        result[name] = moment.clone()
    return result


def norms_by_hand(found: Subject, t: int, whole: Tensor) -> Tensor:
    """Returns the norm of every relation, [parents, children], node by node."""
    weight = found.net.transitions[t]
    reads, writes = weight._places()
    table = whole.movedim((weight.in_dim, weight.out_dim), (0, 1))
    result = torch.empty(len(reads), len(writes), dtype=torch.float64)
    for i, rows in enumerate(reads):
        for j, columns in enumerate(writes):
            result[i, j] = table[rows][:, columns].double().norm()
    return result


def related(found: Subject, t: int) -> Tensor:
    """Returns which relations exist, [parents, children]."""
    topology = found.net.transitions[t].topology
    marks = torch.zeros(topology.n_parents, topology.n_children, dtype=torch.bool)
    marks[topology.parents().long(), topology.child.long()] = True
    return marks


def test_strengths_are_the_norms_of_all_numbers_of_a_relation(found: Subject) -> None:
    with found.net.edit() as edit:
        edit.cut(every_relation(found).random(fraction=0.2))
    for t, weight in enumerate(found.net.transitions):
        expected = norms_by_hand(found, t, weight.grid.whole)[related(found, t)]
        relations = RelationSet.of(found.net, [t])
        torch.testing.assert_close(relations.strengths, expected)
        half = relations[::2]
        torch.testing.assert_close(half.strengths, expected[::2])


@pytest.mark.parametrize("compare", ["lamp", "score"])
def test_a_model_is_pruned_to_a_sparsity_over_all_of_it(found: Subject, compare: Any) -> None:
    total = sum(sizes(found))
    strengths = every_relation(found).strengths
    before = states(found)
    rule = PruneWeakest(sparsity=0.4, compare=compare)
    commit = managed(rule).apply(found.net, 0)
    assert commit is not None
    assert sum(sizes(found)) == total - round(0.4 * total)
    assert commit.counts["relations_removed"] == round(0.4 * total)
    if compare == "score":
        left = every_relation(found).strengths
        limit = strengths.sort().values[round(0.4 * total)]
        assert left.min() >= limit
    # Adam goes on where a relation stays, with the same bits.
    for name, after in states(found).items():
        kept = ~after.isnan()
        assert same_bits(after[kept], before[name][kept])
    found.step()
    assert managed(rule).apply(found.net, 1) is None


@pytest.mark.parametrize("scope", ["transition", "owner", "child"])
def test_every_tensor_or_node_loses_its_share(found: Subject, scope: Any) -> None:
    before = sizes(found)
    managed(PruneWeakest(fraction=0.5, scope=scope)).apply(found.net, 0)
    for t, (size, weight) in enumerate(zip(before, found.net.transitions, strict=True)):
        if scope == "transition":
            assert weight.size == size - round(0.5 * size), t
        elif scope == "child":
            parents = weight.n_parents
            assert set(weight.topology.fan_in().tolist()) == {parents - round(0.5 * parents)}, t
        else:
            children = weight.n_children
            degrees = weight.topology.degrees
            assert set(degrees.tolist()) == {children - round(0.5 * children)}, t


def test_only_the_named_tensors_are_pruned(found: Subject) -> None:
    weight = found.net.transitions[1]
    module = weight.name.rpartition(".")[0]
    before = sizes(found)
    managed(PruneWeakest(fraction=0.5, transitions=module)).apply(found.net, 0)
    named = {t for t, one in enumerate(found.net.transitions) if one.name.startswith(module + ".")}
    for t, (size, after) in enumerate(zip(before, sizes(found), strict=True)):
        assert (after < size) == (t in named)
        # Nothing is built for the others.
        assert (found.net.transitions[t]._made is not None) == (t in named)
    with pytest.raises(gn.errors.EditError):
        managed(PruneWeakest(fraction=0.5, transitions="nothing")).apply(found.net, 1)


def test_tensors_without_gradients_and_frozen_relations_stay(found: Subject) -> None:
    still = found.net.transitions[0]
    still.grid.parameter.requires_grad_(False)
    frozen = found.net.transitions[1]
    with found.net.edit() as edit:
        edit.freeze(found.net.relations(frozen.name))
    managed(PruneWeakest(fraction=0.3)).apply(found.net, 0)
    assert still.density == frozen.density == 1
    with pytest.raises(gn.errors.EditError):
        managed(PruneWeakest(fraction=0.3, transitions=0)).apply(found.net, 1)


def test_budgets_hold_over_the_whole_model(found: Subject) -> None:
    before = sum(sizes(found))
    manager = managed(PruneWeakest(fraction=0.5), budget=Budget(edits=17, parents=2))
    manager.apply(found.net, 0)
    assert sum(sizes(found)) == before - 17
    manager = managed(PruneWeakest(fraction=0.97), budget=Budget(parents=2, children=1))
    manager.apply(found.net, 1)
    for number, space in enumerate(found.net.spaces):
        parents = torch.zeros(len(space), dtype=torch.int64)
        children = torch.zeros(len(space), dtype=torch.int64)
        for weight in found.net.transitions:
            if weight.target == number:
                parents += weight.topology.fan_in()
            if weight.source == number:
                children += weight.topology.degrees
        if found.net.entering(number):
            assert parents.min() >= 2
        if found.net.leaving(number):
            assert children.min() >= 1


def test_the_last_relation_of_a_space_stays_unless_it_may_go(found: Subject) -> None:
    before = found.snapshot()
    outputs = [n for n in range(len(found.net.spaces)) if found.net._is_output(n)]
    (number,) = outputs
    (t,) = found.net.entering(number)
    rule = PruneWeakest(fraction=1.0, transitions=t, compare="score")
    with pytest.raises(gn.errors.EditError):
        managed(rule).apply(found.net, 0)
    assert oracle.same(before, found.snapshot()) == []
    managed(rule, allow_dead=True).apply(found.net, 0)
    assert found.net.transitions[t].size == 0


def test_gradual_pruning_reaches_its_sparsity_while_the_model_trains(found: Subject) -> None:
    total = sum(sizes(found))
    manager = RuleManager()
    manager.add(gradual_pruning(8, 0.6, every=2))
    seen = []
    for step in range(8):
        found.step()
        manager.apply(found.net, step)
        seen.append(1 - sum(sizes(found)) / total)
    assert seen == sorted(seen)
    assert sum(sizes(found)) == total - round(0.6 * total)


def test_set_draws_absent_relations_from_the_generator(found: Subject) -> None:
    with found.net.edit(generator=torch.Generator().manual_seed(3)) as edit:
        edit.cut(every_relation(found).random(fraction=0.5, generator=torch.Generator()))
    before = sizes(found)
    marks = [related(found, t) for t in range(len(before))]
    drawn = []
    for seed in (0, 0, 1):
        managed(Rewire(fraction=0.3), seed=seed).apply(found.net, 0)
        assert sizes(found) == before
        grown = [related(found, t) & ~marks[t] for t in range(len(before))]
        for t, grid in enumerate(weight.grid for weight in found.net.transitions):
            norms = norms_by_hand(found, t, grid.whole)
            assert int(norms[grown[t]].count_nonzero()) == 0
            dropped = marks[t] & ~related(found, t)
            absent = int((~marks[t]).sum())
            assert int(dropped.sum()) == min(round(0.3 * before[t]), absent)
        drawn.append(torch.cat([part.flatten() for part in grown]))
        found.step()
        found.net.undo()
        for t, part in enumerate(marks):
            assert torch.equal(related(found, t), part)
    assert int(drawn[0].sum()) > 0
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def dense_gradients(found: Subject) -> dict[str, Tensor]:
    """Returns the gradients of a plain copy of the model, whose cut cells are numbers 0."""
    fresh = dense_copy(found)
    fresh.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loss_of(fresh, found.case).backward()
    return {
        name: parameter.grad
        for name, parameter in fresh.named_parameters()
        if parameter.grad is not None
    }


def dense_copy(found: Subject) -> nn.Module:
    name = next(n for n in MODELS if type(zoo.MODELS[n]().model) is plain_type(found.model))
    fresh = zoo.MODELS[name]().to(torch.float64).model
    contents = {**dict(found.model.named_buffers()), **wholes(found)}
    fresh.load_state_dict(contents, strict=False)
    return fresh


def plain_type(model: nn.Module) -> type:
    return getattr(type(model), "_grapnet_plain", type(model))


@pytest.mark.parametrize("scope", ["transition", "child", "owner", "model"])
def test_rigl_grows_what_has_the_largest_gradients(found: Subject, scope: Any) -> None:
    with found.net.edit() as edit:
        edit.cut(every_relation(found).random(fraction=0.5, generator=torch.Generator()))
    found.step()
    count = len(found.net.transitions)
    marks = [related(found, t) for t in range(count)]
    manager = managed(Rewire(fraction=0.3, grow="gradient", scope=scope))
    manager.start(found.net)
    gradients = dense_gradients(found)
    before = states(found)
    found.model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loss_of(found.model, found.case).backward()
    found.model.eval()
    manager.apply(found.net, 0)
    sizes = []
    least = torch.inf
    most = 0.0
    for t, weight in enumerate(found.net.transitions):
        norms = norms_by_hand(found, t, gradients[weight.name])
        present = related(found, t)
        grown = present & ~marks[t]
        left = ~present & ~marks[t]
        sizes.append((int(grown.sum()), int((marks[t] & ~present).sum())))
        least = min([least, *norms[grown].tolist()])
        most = max([most, *norms[left].tolist()])
        if scope == "model":
            continue
        assert sizes[-1][0] == sizes[-1][1] > 0
        if scope == "transition":
            assert norms[grown].min() >= norms[left].max() * (1 - 1e-9)
            continue
        by_node = 0 if scope == "child" else 1
        assert torch.equal(present.sum(by_node), marks[t].sum(by_node))
        for node in range(norms.shape[1 - by_node]):
            mine = norms.select(1 - by_node, node)
            own = grown.select(1 - by_node, node)
            others = left.select(1 - by_node, node)
            if own.any() and others.any():
                assert mine[own].min() >= mine[others].max() * (1 - 1e-9)
    if scope == "model":
        # Transitions trade relations, and the largest of all were grown.
        assert sum(grown for grown, _ in sizes) == sum(dropped for _, dropped in sizes) > 0
        assert any(grown != dropped for grown, dropped in sizes)
        assert least >= most * (1 - 1e-9)
    # Relations that stay keep their state; grown ones start without.
    after = states(found)
    for t, weight in enumerate(found.net.transitions):
        stays = norms_by_hand(found, t, before[weight.name]).isfinite()
        stays &= related(found, t) & marks[t]
        moments = after[weight.name]
        kept = ~moments.isnan() & ~before[weight.name].isnan()
        assert same_bits(moments[kept], before[weight.name][kept])
        grown = related(found, t) & ~marks[t]
        assert int(norms_by_hand(found, t, moments)[grown].count_nonzero()) == 0
    found.model.zero_grad()
    found.step()
    found.net.undo()
    for t, part in enumerate(marks):
        assert torch.equal(related(found, t), part)


def test_the_gradients_are_averaged_over_a_window(found: Subject) -> None:
    t = 1
    weight = found.net.transitions[t]
    recorder = TensorGradientRecorder(found.net, t, window=2)
    recorder.arm(found.net)
    total = torch.zeros_like(weight.grid.whole)
    for passes in (1, 2):
        expected = dense_gradients(found)[weight.name]
        found.step()
        assert recorder.count == passes
        total = total + expected
    torch.testing.assert_close(recorder.gradient(), total / 2)
    with found.net.edit() as edit:
        edit.cut(found.net.relations(weight.name).smallest(fraction=0.5))
    expected = dense_gradients(found)[weight.name]
    found.step()
    torch.testing.assert_close(recorder.gradient(), (total + expected) / 3)
    with torch.no_grad():
        found.outputs()
    copied = copy.deepcopy(found.model)
    loss_of(copied, found.case).backward()
    assert recorder.count == 3
    state = recorder.state_dict()
    other = TensorGradientRecorder(found.net, t)
    other.load_state_dict(state)
    assert torch.equal(other.gradient(), recorder.gradient())
    recorder.disarm()
    found.step()
    assert recorder.count == 3
    recorder.clear()
    assert recorder.count == 0


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_a_compiled_model_are_recorded(found: Subject) -> None:
    managed(PruneWeakest(fraction=0.5)).apply(found.net, 0)
    recorder = TensorGradientRecorder(found.net, 1)
    expected = dense_gradients(found)[found.net.transitions[1].name]
    torch._dynamo.reset()
    compiled = torch.compile(found.model.train(), backend="eager")
    for armed in (False, True):
        if armed:
            recorder.arm(found.net)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss_of(compiled, found.case).backward()
    # Other tests compile the same code, and torch counts how often.
    torch._dynamo.reset()
    assert recorder.count == 1
    torch.testing.assert_close(recorder.gradient(), expected)


def test_a_dry_run_changes_nothing(found: Subject) -> None:
    with found.net.edit() as edit:
        edit.cut(every_relation(found).random(fraction=0.3, generator=torch.Generator()))
    manager = managed(
        PruneWeakest(fraction=0.1), Rewire(fraction=0.2, grow="gradient"), Rewire(fraction=0.1)
    )
    manager.start(found.net)
    found.step()
    before = found.snapshot()
    total = sum(sizes(found))
    preview = manager.apply(found.net, 0, dry_run=True)
    assert oracle.same(before, found.snapshot()) == []
    assert preview.before.relations == total
    assert preview.after.relations == total - round(0.1 * total)
    assert preview.relations == preview.connected - preview.cut
    assert "relations" in str(preview)
    commit = manager.apply(found.net, 0)
    assert commit is not None
    assert commit.counts["relations_removed"] == preview.cut
    assert sum(sizes(found)) == preview.after.relations
    found.net.undo()
    assert oracle.same(before, found.snapshot()) == []


def test_one_manager_prunes_nodes_and_relations_and_rewires(found: Subject) -> None:
    manager = RuleManager()
    manager.add(PruneNodes(fraction=0.2), schedule=At(1))
    manager.add(PruneWeakest(sparsity=0.3), schedule=Every(2))
    manager.add(rigl(20, every=2))
    manager.start(found.net)
    for step in range(7):
        found.step()
        manager.apply(found.net, step)
        gn.check(found.net)
    assert {commit.by for commit in found.net.history} >= {
        "PruneWeakest",
        "PruneNodes",
        "PruneWeakest, Rewire",
    }
    before = found.snapshot()
    rng = manager._generator.get_state()
    manager.add(lambda net, edit, context: 1 / 0, name="broken")
    with pytest.raises(ZeroDivisionError):
        manager.apply(found.net, 7)
    assert oracle.same(before, found.snapshot()) == []
    assert torch.equal(manager._generator.get_state(), rng)


def test_the_nodes_of_an_owner_are_frozen(found: Subject) -> None:
    space = next(space for space in found.free if space.readers)
    with found.net.edit() as edit:
        edit.set_owner(space[:2], "task-7")
    before = wholes(found)
    managed(FreezeOwner()).apply(found.net, 0, task=7)
    for _ in range(2):
        found.step()
    after = wholes(found)
    moved = 0
    for (name, dim), at in space.places().items():
        if name in after:
            held = at[:2].reshape(-1)
            now = after[name].index_select(dim, held)
            assert same_bits(now, before[name].index_select(dim, held))
            moved += int((after[name] != before[name]).sum())
    assert moved > 0
    with pytest.raises(gn.errors.EditError):
        managed(FreezeOwner("nobody")).apply(found.net, 1)


def exact_spaces(found: Subject) -> list[Space]:
    """Returns the spaces that can be widened without changing the function of the model."""
    found.net.prove(found.free)
    return [space for space in found.free if space.verdict == "exact" and space.readers]


@pytest.mark.parametrize("name", ["resnet", "vit", "densenet", "gqa_decoder"])
@pytest.mark.parametrize(
    "settings",
    [
        {"init": "zero_outgoing"},
        {"init": "net2net"},
        {"init": "net2net", "noise": 0.5, "split": False},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_wider_spaces_compute_the_same(name: str, settings: dict[str, Any]) -> None:
    found = subject(zoo.MODELS[name]())
    spaces = exact_spaces(found)
    assert spaces
    for space in (spaces[0], spaces[-1]):
        before = found.snapshot()
        outputs = found.outputs()
        size = len(space)
        manager = managed(GrowWidth(space, 3, owner="wide", **settings), seed=5)
        commit = manager.apply(found.net, 0)
        assert commit is not None
        assert len(space) == size + 3
        assert space.owners.count("wide") == 3
        assert oracle.largest_difference(outputs, found.outputs()) < 1e-10
        gn.check(found.net)
        found.net.undo()
        assert oracle.same(before, found.snapshot()) == []
        found.net.redo()
        assert oracle.largest_difference(outputs, found.outputs()) < 1e-10
        found.step()


def test_neighbouring_spaces_are_copied_in_one_edit(found: Subject) -> None:
    spaces = exact_spaces(found)
    outputs = found.outputs()
    sizes_before = [len(space) for space in spaces]
    with found.net.edit() as edit:
        edit.set_owner(spaces[0], "mine")
    before = wholes(found)
    moments = states(found)
    managed(GrowWidth(spaces, 2, "net2net"), seed=1).apply(found.net, 0)
    assert [len(space) for space in spaces] == [size + 2 for size in sizes_before]
    assert oracle.largest_difference(outputs, found.outputs()) < 1e-10
    assert len(found.net.select(owner="mine")) == sizes_before[0] + 2
    # What computes the originals stays to the bit, with the state of its optimizer.
    writers = set(spaces[0].writers) - {name for space in spaces for name in space.readers}
    assert writers
    for name in writers:
        here = tuple(slice(0, size) for size in before[name].shape)
        if len(spaces[0].places()[name, 0][0]) == 1:
            assert same_bits(wholes(found)[name][here], before[name])
            assert same_bits(states(found)[name][here], moments[name])
    found.step()


def test_copies_beside_cut_and_frozen_relations_keep_the_function(found: Subject) -> None:
    spaces = exact_spaces(found)
    with found.net.edit(generator=torch.Generator()) as edit:
        edit.cut(every_relation(found).random(fraction=0.2, generator=torch.Generator()))
        edit.freeze(spaces[0][:2])
    outputs = found.outputs()
    before = found.snapshot()
    frozen = found.net.count().frozen
    managed(GrowWidth(spaces, 4, "net2net"), seed=2).apply(found.net, 0)
    assert found.net.count().frozen == frozen
    assert oracle.largest_difference(outputs, found.outputs()) < 1e-10
    found.net.undo()
    assert oracle.same(before, found.snapshot()) == []
    found.net.redo()
    found.step()


def test_a_file_keeps_rules_evidence_and_what_copies_share(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def rules() -> RuleManager:
        manager = RuleManager(seed=3)
        manager.add(PruneWeakest(fraction=0.3), schedule=At(1))
        manager.add(Rewire(grow="gradient", window=3), schedule=At(3))
        manager.add(GrowWidth(("layer1.0.conv1",), 2, "net2net"), schedule=At(0))
        return manager

    runs = []
    for _ in range(2):
        found = subject(zoo.MODELS["resnet"]())
        runs.append((found, rules()))
    (first, manager), (second, other) = runs
    manager.start(first.net)
    for step in range(3):
        first.step()
        manager.apply(first.net, step)
    gn.save(path, first.net, optimizer=first.optimizer, rules=manager, undo=True)
    gn.restore(path, into=second.net, optimizer=second.optimizer, rules=other)
    other.start(second.net)
    for found, own in runs:
        found.step()
        assert own.apply(found.net, 3) is not None
        found.step()
    assert oracle.largest_difference(first.outputs(), second.outputs()) == 0
    for found, _ in runs:
        for _ in range(3):
            found.net.undo()
    assert oracle.largest_difference(first.outputs(), second.outputs()) == 0


def test_growing_keeps_within_a_budget_and_refuses_what_changes_the_function(
    found: Subject,
) -> None:
    space = exact_spaces(found)[0]
    with found.net.edit() as edit:
        each = edit._relations_of({space.index: 1})
    size = len(space)
    manager = managed(GrowWidth(space, 5), budget=Budget(edits=2 * each + 1))
    manager.apply(found.net, 0)
    assert len(space) == size + 2
    assert managed(GrowWidth(space, 5), budget=Budget(edits=1)).apply(found.net, 1) is None
    normalised = [one for one in found.net.spaces if one.verdict in ("normalised", "pinned")]
    for init in ("zero_outgoing", "net2net"):
        with pytest.raises(gn.errors.EditError):
            managed(GrowWidth(normalised[0], 1, init)).apply(found.net, 2)


@pytest.mark.parametrize(
    "rule",
    [GrowForTask(nodes=2, classes_per_task=2), SplitIntoFamilies(0, 2)],
    ids=lambda rule: type(rule).__name__,
)
def test_rules_for_nets_alone_say_so(rule: Any) -> None:
    net = subject(zoo.MODELS["resnet"]()).net
    with pytest.raises(gn.errors.EditError):
        managed(rule).apply(net, 0, task=0)
    assert net.version == 0


class Beside(nn.Module):
    """A backbone that is adopted, and two nets that read its features."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = gn.GrapNet([5, 8, 3], dtype=torch.float64)
        self.other = gn.GrapNet([5, 4], dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)
        return self.head(features), self.other(features)


def test_one_budget_is_shared_by_a_model_and_nets_beside_it(found: Subject) -> None:
    model = Beside(found.model)
    graphs = {"backbone": found.net, "head": model.head, "other": model.other}
    before = {name: graph.count().relations for name, graph in graphs.items()}
    manager = managed(PruneWeakest(fraction=0.5), budget=Budget(edits=60, parents=1))
    preview = manager.apply(model, 0, dry_run=True)
    assert preview.cut == 60
    commits = manager.apply(model, 0)
    cut = {name: before[name] - graph.count().relations for name, graph in graphs.items()}
    assert sum(cut.values()) == 60
    # Shares follow the sizes; the backbone has most of the relations, in many tensors.
    assert set(commits) == {name for name, count in cut.items() if count}
    assert cut["backbone"] > cut["head"] > 0
    assert sum(weight.density < 1 for weight in found.net.transitions) > 2
    # One transaction: where a rule raises for one of them, none changes.
    versions = [graph.version for graph in graphs.values()]

    def raises_for_heads(net: Any, edit: Any, context: Any) -> None:
        edit.cut(RelationSet.of(net, [0]).smallest(count=1))
        if net is model.head:
            raise RuntimeError("no")

    manager.add(raises_for_heads)
    with pytest.raises(RuntimeError):
        manager.apply(model, 1)
    assert [graph.version for graph in graphs.values()] == versions
    gn.undo(*(graphs[name] for name in commits))
    assert {name: graph.count().relations for name, graph in graphs.items()} == before


def test_a_model_and_a_net_keep_within_a_share_of_parameters(found: Subject) -> None:
    head = gn.GrapNet([5, 16, 3], dtype=torch.float64)
    graphs = {"backbone": found.net, "head": head}
    before = {name: graph.count().parameters for name, graph in graphs.items()}
    manager = managed(PruneNodes(parameters=0.7))
    commits = manager.apply(graphs, 0)
    assert set(commits) == {"backbone", "head"}
    for name, graph in graphs.items():
        assert graph.count().parameters <= 0.7 * before[name]
    gn.undo(found.net, head)
    assert {name: graph.count().parameters for name, graph in graphs.items()} == before


def test_a_budget_of_connections_is_shared_as_well(found: Subject) -> None:
    model = Beside(found.model)
    graphs = [found.net, model.head, model.other]
    managed(PruneWeakest(fraction=0.5), seed=1).apply(model, 0)
    before = sum(graph.count().relations for graph in graphs)
    manager = managed(Rewire(fraction=0.4), budget=Budget(edits=30), seed=2)
    manager.apply(model, 1)
    assert sum(graph.count().relations for graph in graphs) == before
    moved = 0
    for graph in graphs:
        commit = graph.history[-1]
        if commit.by == "Rewire":
            moved += commit.counts["relations_removed"]
            assert commit.counts["relations_added"] == commit.counts["relations_removed"]
    assert 20 <= moved <= 30
