"""gn.prune: layer by layer, repaired, undone, resumed."""

import copy
import sys

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.rules import (
    SNIP,
    Assignment,
    Budget,
    Choice,
    CovarianceSifter,
    Elimination,
    GradualSchedule,
    GraSP,
    Magnitude,
    NodeNorm,
    PruneNodes,
    PruneWeakest,
    Random,
    RemoveOrphans,
    RuleContext,
    SynFlow,
    gradual_pruning,
    lamp_scores,
)

# what belongs to the call and not to its rule
OF_THE_CALL = {"shares_by", "budget", "loss", "repair"}


def arranged(*, nodes=None, relations=None, **settings):
    """Returns the arguments of gn.prune for a rule with these settings."""
    found = {name: value for name, value in settings.items() if name in OF_THE_CALL}
    own = {name: value for name, value in settings.items() if name not in OF_THE_CALL}
    if nodes is not None or {"macs", "parameters"} & set(own):
        rule = PruneNodes(nodes, **({"by": "elimination", "keep": 1} | own))
        return found | {"nodes": rule}
    return found | {"relations": PruneWeakest(relations, **({"by": "alternating"} | own))}


def rows(count=256, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator)
    return torch.randn(count, width, generator=generator) @ mixing


def trained_net(sizes=(8, 24, 16, 4)):
    """Returns a net with an attached Adam that has taken some steps."""
    net = gn.GrapNet(list(sizes), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    gn.attach(optimizer, net)
    train(net, optimizer)
    return net, optimizer


def train(net, optimizer, steps=5):
    for step in range(steps):
        optimizer.zero_grad()
        net(rows(64, net.sizes[0], seed=step)).square().mean().backward()
        optimizer.step()


def error(net, expected, x):
    with torch.no_grad():
        return float((net(x) - expected).square().mean())


@pytest.mark.parametrize("by", ["norm", "subset", "elimination"])
def test_nodes_leave_every_hidden_layer_and_repair_helps(by):
    errors = {}
    for repair in (False, True):
        net, _ = trained_net()
        x = rows()
        expected = net(x).detach()
        pruning = gn.prune(net, [x[:128], x[128:]], nodes=0.5, by=by, repair=repair)
        assert net.sizes == [8, 12, 8, 4]
        assert [stage.leaving for stage in pruning.stages] == [12, 8]
        assert [stage.present for stage in pruning.stages] == [24, 16]
        assert all((stage.assigned > 0) == repair for stage in pruning.stages)
        errors[repair] = error(net, expected, x)
    assert errors[True] < 0.8 * errors[False]


@pytest.mark.parametrize("by", ["obs", "alternating"])
def test_relations_leave_every_transition_and_those_that_stay_are_assigned(by):
    errors = {}
    for name in (by, "magnitude"):
        net, _ = trained_net()
        x = rows()
        expected = net(x).detach()
        before = [t.size for t in net.transitions]
        rule = PruneWeakest(0.75, by=name, transitions=(0, 1), scope="transition")
        gn.prune(net, [x], relations=rule, repair=False)
        after = [t.size for t in net.transitions]
        assert after == [before[0] // 4, before[1] // 4, before[2]]
        errors[name] = error(net, expected, x)
    assert errors[by] < 0.5 * errors["magnitude"]


def squares(model, batch):
    """Returns a loss."""
    return model(batch).square().mean()


@pytest.mark.parametrize("criterion", [SNIP, GraSP])
def test_passes_of_a_criterion_do_not_make_what_the_repair_needs_stale(criterion):
    net, _ = trained_net()
    pruning = gn.prune(net, [rows()], relations=0.5, by=criterion([rows()], squares))
    assert [2 * stage.leaving for stage in pruning.stages] == [8 * 24, 24 * 16, 16 * 4]
    assert all(stage.assigned for stage in pruning.stages)


@pytest.mark.parametrize(
    "rule",
    [
        PruneWeakest(0.5),
        PruneWeakest(sparsity=0.7, by="random"),
        PruneWeakest(0.5, by=Random(seed=0), transitions=(0, 2)),
        PruneWeakest(0.5, compare="mean", keep=70),
        PruneWeakest(0.5, by=SynFlow()),
        PruneWeakest(0.5, scope="owner"),
        PruneWeakest(pattern=(2, 4)),
        PruneNodes(0.5),
        PruneNodes(0.5, scope="model"),
    ],
)
def test_a_rule_takes_what_it_takes_alone(rule):
    net, _ = uneven_net()
    alone = copy.deepcopy(net)
    with alone.edit(generator=torch.Generator().manual_seed(0)) as edit:
        rule(alone, edit, RuleContext())
    settings = {"nodes" if isinstance(rule, PruneNodes) else "relations": rule}
    gn.prune(net, [rows()], repair=False, generator=torch.Generator().manual_seed(0), **settings)
    assert net.sizes == alone.sizes
    assert [t.size for t in net.transitions] == [t.size for t in alone.transitions]


def test_a_schedule_prunes_to_its_final_sparsity():
    net, _ = trained_net()
    rule = PruneWeakest(sparsity=GradualSchedule(0.75, 0, 100), scope="transition")
    gn.prune(net, [rows()], relations=rule)
    assert [4 * t.size for t in net.transitions] == [8 * 24, 24 * 16, 16 * 4]


def test_magnitude_with_repair_is_better_than_without():
    errors = {}
    for repair in (False, True):
        net, _ = trained_net()
        x = rows()
        expected = net(x).detach()
        gn.prune(net, [x], relations=0.5, by="magnitude", repair=repair)
        errors[repair] = error(net, expected, x)
    assert errors[True] < 0.7 * errors[False]


def test_a_pattern_keeps_two_of_four():
    net, _ = trained_net()
    gn.prune(net, [rows()], relations=PruneWeakest(pattern=(2, 4), by="wanda"))
    for transition in net.transitions:
        dense = torch.zeros(transition.n_children, transition.topology.n_parents)
        dense[transition.child.long(), transition.topology.parents().long()] = 1
        assert bool((dense.unflatten(1, (-1, 4)).sum(2) <= 2).all())


def test_each_layer_sees_the_layers_before_it_pruned():
    """The second stage equals a stage of its own on the net that the first one left."""
    net, _ = trained_net()
    other = copy.deepcopy(net)
    x = rows()
    gn.prune(net, [x], nodes=0.5)
    gn.prune(other, [x], **arranged(nodes=0.5, spaces=1))
    gn.prune(other, [x], **arranged(nodes=0.5, spaces=2))
    assert torch.equal(net(x), other(x))
    # The other way round it sees other rows.
    third, _ = trained_net()
    gn.prune(third, [x], **arranged(nodes=0.5, spaces=2))
    gn.prune(third, [x], **arranged(nodes=0.5, spaces=1))
    assert not torch.allclose(net(x), third(x))


def test_undo_gives_everything_back_whatever_the_limit():
    net, optimizer = trained_net()
    net.journal.undo_limit = 1
    x = rows()
    before = net(x).detach()
    state = copy.deepcopy(optimizer.state_dict())
    pruning = gn.prune(net, [x], nodes=0.5)
    assert len(pruning.stages) == 2
    assert not torch.equal(net(x), before)
    pruning.undo()
    assert torch.equal(net(x), before)
    assert net.journal.undo_limit == 1
    for key, kept in state["state"].items():
        for name, value in kept.items():
            assert torch.equal(optimizer.state_dict()["state"][key][name], value)


def test_undo_after_another_edit_is_refused_and_changes_nothing():
    net, _ = trained_net()
    pruning = gn.prune(net, [rows()], nodes=0.5)
    with net.edit(reason="another") as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=1))
    version = net.version
    with pytest.raises(gn.errors.HistoryError):
        pruning.undo()
    assert net.version == version
    net.undo()
    pruning.undo()
    assert net.sizes == [8, 24, 16, 4]


def test_accept_lets_go_of_what_undo_keeps():
    net, _ = trained_net()
    net.journal.undo_limit = 1
    pruning = gn.prune(net, [rows()], nodes=0.5)
    assert len(net.journal.undoable) == 2
    pruning.accept()
    assert len(net.journal.undoable) == 1


def test_preview_returns_the_scores_and_changes_nothing():
    net, _ = trained_net()
    x = rows()
    before = net(x).detach()
    scores = iter([3.0, 2.0])
    pruning = gn.prune(net, [x], nodes=0.5, probe=lambda: next(scores), preview=True)
    assert (pruning.before, pruning.after) == (3.0, 2.0)
    assert [stage.leaving for stage in pruning.stages] == [12, 8]
    assert torch.equal(net(x), before)


class Stop(Exception):
    pass


def test_a_preview_that_fails_changes_nothing():
    net, _ = trained_net()
    before = net(rows()).detach()
    with pytest.raises(Stop):
        gn.prune(net, Interrupting([rows()]), nodes=0.5, preview=True)
    assert net.sizes == [8, 24, 16, 4]
    assert torch.equal(net(rows()), before)


def test_an_error_names_what_is_pruned_already():
    net, _ = trained_net()
    with pytest.raises(Stop) as error:
        gn.prune(net, Interrupting([rows()]), nodes=0.5)
    assert any("layer 1" in note for note in error.value.__notes__)


def test_dead_outputs_are_refused_unless_allowed():
    net, _ = trained_net((8, 6, 4))
    rule = PruneWeakest(0.99, transitions=1)
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, [rows()], relations=rule, repair=False)
    assert net.version == 0
    gn.prune(net, [rows()], relations=rule, repair=False, allow_dead=True)
    assert net.version == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"nodes": PruneWeakest(0.5)},
        {"relations": PruneNodes(0.5)},
        {"nodes": PruneNodes(0.5), "by": "norm"},
        {"relations": PruneWeakest(0.5), "by": "random"},
        {"nodes": 0.5, "budget": Budget(edits=10)},
        {"nodes": 0.5, "shares_by": "norm"},
        {"relations": PruneWeakest(pattern=(2, 4)), "shares_by": "magnitude"},
    ],
)
def test_settings_that_do_not_belong_together_are_refused(settings):
    net, _ = trained_net()
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, [rows()], **settings)
    assert net.version == 0


def test_the_probe_runs_in_evaluation_mode_and_the_optimizer_of_a_plain_model_follows():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(rows()).square().mean().backward()
    optimizer.step()
    modes = []

    def probe():
        modes.append(model.training)
        return 0.0

    gn.prune(model, [rows()], nodes=0.5, probe=probe, optimizer=optimizer)
    assert modes == [False, False]
    assert model.training
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (8, 8)
    optimizer.step()


@pytest.mark.parametrize("kind", ["nodes", "relations"])
def test_stages_of_an_adopted_model_come_in_the_order_of_the_calls(kind):
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(16, 4)
            self.middle = nn.Linear(24, 16)
            self.first = nn.Linear(8, 24)

        def forward(self, x):
            return self.last(self.middle(self.first(x).relu()).relu())

    net = gn.adopt(Reversed(), rows()[:2])
    pruning = gn.prune(net, [rows()], **{kind: 0.5})
    expected = {
        "nodes": ["first", "middle"],
        "relations": ["first.weight", "middle.weight", "last.weight"],
    }
    assert [stage.name for stage in pruning.stages] == expected[kind]
    pruning.undo()


class Interrupting(list):
    """Batches that raise when they are run the second time."""

    runs = 0

    def __iter__(self):
        self.runs += 1
        if self.runs == 2:
            raise Stop
        return super().__iter__()


@pytest.mark.parametrize("undo", [True, False])
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, undo):
    x = rows()
    whole, _ = trained_net()
    gn.prune(whole, [x], nodes=0.5)
    net, _ = trained_net()
    with pytest.raises(Stop):
        gn.prune(net, Interrupting([x]), nodes=0.5)
    assert net.sizes == [8, 12, 16, 4]
    gn.save(tmp_path / "net.safetensors", net, undo=undo)
    net = gn.load(tmp_path / "net.safetensors")
    pruning = gn.prune(net, [x], nodes=0.5, resume=True)
    assert [stage.leaving for stage in pruning.stages] == [12, 8]
    assert torch.equal(net(x), whole(x))
    # Another call with the same settings prunes on unless it resumes.
    again = gn.prune(net, [x], nodes=0.5, resume=True)
    assert net.sizes == whole.sizes
    assert [stage.seconds for stage in again.stages] == [0.0, 0.0]
    gn.prune(net, [x], nodes=0.5)
    assert net.sizes == [8, 6, 4, 4]


def test_resume_goes_on_with_the_last_run_alone():
    """A second run with the same settings was interrupted; the first one was complete."""
    net, _ = trained_net()
    x = rows()
    gn.prune(net, [x], nodes=0.5).accept()
    with pytest.raises(Stop):
        gn.prune(net, Interrupting([x]), nodes=0.5)
    assert net.sizes == [8, 6, 8, 4]
    pruning = gn.prune(net, [x], nodes=0.5, resume=True)
    assert net.sizes == [8, 6, 4, 4]
    assert [stage.leaving for stage in pruning.stages] == [6, 4]
    pruning.undo()
    assert net.sizes == [8, 12, 8, 4]


def test_resume_prunes_a_net_that_only_an_earlier_run_has_come_to():
    torch.manual_seed(0)
    model = nn.Sequential(gn.GrapNet([8, 12, 8]), nn.ReLU(), gn.GrapNet([8, 16, 4]))
    x = rows()
    gn.prune(model, [x], nodes=0.5).accept()
    with pytest.raises(Stop):
        gn.prune(model, Interrupting([x]), nodes=0.5)
    assert [model[0].sizes, model[2].sizes] == [[8, 3, 8], [8, 8, 4]]
    pruning = gn.prune(model, [x], nodes=0.5, resume=True)
    assert [model[0].sizes, model[2].sizes] == [[8, 3, 8], [8, 4, 4]]
    assert [stage.leaving for stage in pruning.stages] == [3, 4]
    pruning.undo()
    assert [model[0].sizes, model[2].sizes] == [[8, 6, 8], [8, 8, 4]]


def test_resume_refuses_other_settings_and_other_commits():
    net, _ = trained_net()
    x = rows()
    first = arranged(nodes=0.5, spaces=1)
    gn.prune(net, [x], **first)
    version = net.version
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, [x], nodes=0.5, by="norm", resume=True)
    # the same settings in other words
    same = arranged(nodes=0.5, by=Elimination(), spaces=[1])
    assert len(gn.prune(net, [x], **same, resume=True).stages) == 1
    assert net.version == version
    net.undo()
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, [x], nodes=0.5, resume=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (arranged(nodes=0.5, spaces=[1]), arranged(nodes=0.5, spaces=[2])),
        (arranged(relations=0.5, transitions=[0]), arranged(relations=0.5, transitions=[0, 1])),
    ],
)
def test_resume_refuses_other_parts_of_the_net(first, second):
    net, _ = trained_net()
    gn.prune(net, [rows()], **first)
    version = net.version
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, [rows()], **second, resume=True)
    assert net.version == version
    gn.prune(net, [rows()], **first, resume=True)
    assert net.version == version


def test_resume_tells_functions_by_their_names():
    def by_bias(net, nodes, evidence):
        return nodes.biases.detach().abs()

    def by_minus_bias(net, nodes, evidence):
        return -nodes.biases.detach().abs()

    net, _ = trained_net()
    with pytest.raises(Stop):
        gn.prune(net, Interrupting([rows()]), nodes=0.5, by=by_bias)
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, [rows()], nodes=0.5, by=by_minus_bias, resume=True)
    assert net.sizes == [8, 12, 16, 4]
    gn.prune(net, [rows()], nodes=0.5, by=by_bias, resume=True)
    assert net.sizes == [8, 12, 8, 4]


@pytest.mark.parametrize("end", ["accept", "undo"])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_run_that_resumes_gives_back_the_undo_limit_of_the_first(tmp_path, is_loaded, end):
    net, _ = trained_net()
    net.journal.undo_limit = 0
    before = net(rows()).detach()
    with pytest.raises(Stop):
        gn.prune(net, Interrupting([rows()]), nodes=0.5)
    # One stage can be undone, and no more.
    assert net.journal.undo_limit == 1
    if is_loaded:
        gn.save(tmp_path / "net.safetensors", net, undo=True)
        net = gn.load(tmp_path / "net.safetensors")
    pruning = gn.prune(net, [rows()], nodes=0.5, resume=True)
    getattr(pruning, end)()
    assert net.journal.undo_limit == 0
    if end == "undo":
        assert torch.equal(net(rows()), before)


def test_a_run_that_fails_at_once_gives_the_undo_limits_back():
    model = nn.Sequential(trained_net()[0], gn.GrapNet([4, 6, 3]))
    for net in model:
        net.journal.undo_limit = 0
    batches = Interrupting([rows()])
    batches.runs = 1
    with pytest.raises(Stop):
        gn.prune(model, batches, nodes=0.5)
    assert [net.journal.undo_limit for net in model] == [0, 0]


def test_undo_of_an_earlier_run_or_of_dropped_stages_is_refused():
    net, _ = trained_net()
    net.journal.undo_limit = 1
    first = gn.prune(net, [rows()], nodes=0.5)
    second = gn.prune(net, [rows()], nodes=0.5)
    sizes = net.sizes
    with pytest.raises(gn.errors.HistoryError):
        first.undo()
    assert net.sizes == sizes
    second.undo()
    first.accept()
    with pytest.raises(gn.errors.HistoryError):
        first.undo()
    assert net.sizes == [8, 12, 8, 4]


def test_what_undo_keeps_counts_the_state_of_the_optimizer():
    net, optimizer = trained_net()
    alone = gn.prune(copy.deepcopy(net), [rows()], nodes=0.5).undo_bytes
    slots = 0
    for state in optimizer.state.values():
        slots += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
    assert gn.prune(net, [rows()], nodes=0.5).undo_bytes >= alone + slots


class Amplified:
    """Cuts the smallest relations, and gives those that stay twice their weights."""

    def choose(self, net, candidates, evidence, count):
        number = int(count)
        order = candidates.strengths.argsort()
        leaving = candidates[order[:number].sort().values]
        staying = candidates[order[number:].sort().values]
        return Choice(leaving, (Assignment(staying, 2 * staying.weights.detach()),))


@pytest.mark.parametrize("is_adopted", [False, True])
def test_what_an_own_criterion_assigns_is_not_repaired(is_adopted):
    weights = {}
    for by in (Amplified(), "magnitude"):
        net = trained_net()[0]
        if is_adopted:
            net = gn.adopt(net.to_module(), rows())
        pruning = gn.prune(net, [rows()], relations=0.5, by=by, repair=by != "magnitude")
        assert [2 * stage.leaving for stage in pruning.stages] == [8 * 24, 24 * 16, 16 * 4]
        weights[by] = [t.outgoing().weights.detach() for t in net.layers[:-1]]
    for doubled, plain in zip(*weights.values(), strict=True):
        assert torch.equal(doubled, 2 * plain)


class IntoBiases:
    """Removes the first nodes of layer 1, and gives those that read them other biases."""

    def choose(self, net, candidates, evidence, count):
        readers = net.layers[2]
        return Choice(candidates[:count], (Assignment(readers, torch.ones(len(readers))),))


def test_biases_that_an_own_criterion_assigns_are_not_repaired():
    net, _ = trained_net()
    kept = net.layers[1][12:].outgoing().weights.detach()
    gn.prune(net, [rows()], nodes=PruneNodes(0.5, by=IntoBiases(), spaces=1))
    assert net.sizes == [8, 12, 16, 4]
    assert torch.equal(net.layers[1].outgoing().weights, kept)
    assert torch.equal(net.layers[2].biases, torch.ones(16))


@pytest.mark.parametrize(
    "settings",
    [
        {"nodes": 0.5},
        {"nodes": 0.5, "repair": False},
        {"nodes": 0.5, "by": "norm"},
        {"relations": 0.5, "by": "magnitude"},
        {"relations": 0.5},
    ],
)
def test_most_cells_leaves_out_the_second_matrix_or_refuses_before_anything_changes(settings):
    x = rows()
    # A matrix for the second layer has 25² numbers.
    net, _ = trained_net((8, 16, 24, 4))
    with pytest.raises(gn.errors.GrapNetError) as error:
        gn.prune(net, [x], **settings, most_cells=25**2 - 1)
    assert "625" in str(error.value)
    assert net.version == 0
    gn.prune(net, [x], **settings, most_cells=25**2)
    assert net.version == 2 + ("relations" in settings)


def test_a_repair_without_rows_that_are_held_out_helps():
    errors = {}
    for repair in (False, True):
        net, _ = trained_net()
        x = rows()
        expected = net(x).detach()
        gn.prune(net, [x], nodes=0.5, by="norm", repair=repair, most_cells=25**2)
        errors[repair] = error(net, expected, x)
    assert errors[True] < 0.8 * errors[False]


@pytest.mark.parametrize("batches", [[], [torch.empty(0, 8)]])
def test_empty_batches_are_refused(batches):
    net, _ = trained_net()
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, batches, nodes=0.5)
    assert net.version == 0


def mixed_model():
    """Returns a model with a depthwise and a grouped convolution, and a transposed one."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 1),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 6, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def images():
    return torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def embedding_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(18, 12), nn.Linear(12, 4))


def tokens():
    return torch.randint(20, (32, 3), generator=torch.Generator().manual_seed(0))


def names(parts):
    return [part.name for part in parts]


OF_RELATIONS = [
    "magnitude",
    "wanda",
    "taylor",
    "fisher",
    "correlation",
    "random",
    "obs",
    "alternating",
    SNIP,
    GraSP,
    SynFlow(),
]
OF_NODES = [
    "norm",
    "incoming",
    "outgoing",
    "activation",
    "taylor",
    "subset",
    "redundancy",
    "elimination",
    "random",
]


def loss_for(by):
    return squares if by in ("taylor", "fisher") else None


@pytest.mark.parametrize("by", OF_RELATIONS, ids=str)
def test_every_criterion_prunes_the_relations_of_nets_and_skips_what_is_not_repaired(by):
    net, _ = trained_net()
    model = mixed_model()
    for pruned, x in ((net, rows()), (model, images())):
        criterion = by
        if by in (SNIP, GraSP):
            criterion = by([x], squares)
        pruning = gn.prune(pruned, [x], relations=0.5, by=criterion, loss=loss_for(by))
        assert all(0 < stage.leaving < stage.present for stage in pruning.stages)
        if pruned is net:
            assert len(pruning.stages) == 3
            assert pruning.skipped == ()
        else:
            assert names(pruning.stages) == ["0.weight", "5.weight", "13.weight"]
            assert names(pruning.skipped) == ["3.weight", "7.weight", "9.weight"]


@pytest.mark.parametrize("by", OF_NODES)
def test_every_criterion_prunes_the_nodes_of_nets_and_skips_what_is_not_repaired(by):
    net, _ = trained_net()
    gn.prune(net, [rows()], nodes=0.5, by=by, loss=loss_for(by))
    assert net.sizes == [8, 12, 8, 4]
    pruning = gn.prune(mixed_model(), [images()], nodes=0.5, by=by, loss=loss_for(by))
    assert names(pruning.stages) == ["0", "9"]
    # The transposed convolution reads the groups.
    assert names(pruning.skipped) == ["5"]


def test_what_is_skipped_is_in_the_repr_with_the_reason():
    pruning = gn.prune(embedding_model(), [tokens()], relations=0.5, by="magnitude")
    (skipped,) = pruning.skipped
    assert skipped.name == "0.weight"
    assert "Embedding" in skipped.reason
    assert skipped.name in repr(pruning)
    assert skipped.reason in repr(pruning)


@pytest.mark.parametrize("by", ["magnitude", "random"])
def test_without_repair_all_that_can_be_scored_is_pruned(by):
    pruning = gn.prune(embedding_model(), [tokens()], relations=0.5, by=by, repair=False)
    assert names(pruning.stages) == ["0.weight", "2.weight", "3.weight"]
    assert pruning.skipped == ()
    pruning = gn.prune(mixed_model(), [images()], relations=0.5, by=by, repair=False)
    assert len(pruning.stages) == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"relations": PruneWeakest(0.5, transitions=["0", "9"])},
        {"relations": PruneWeakest(0.5, by="wanda", transitions=["0", "3"]), "repair": False},
        {"relations": PruneWeakest(0.5, by="obs", transitions="7"), "repair": False},
        {"nodes": PruneNodes(0.5, spaces=["0", "5"])},
    ],
)
def test_what_is_named_and_cannot_be_pruned_is_refused_before_anything_changes(settings):
    model = mixed_model()
    net = gn.adopt(model, images())
    with pytest.raises(gn.errors.EditError):
        gn.prune(model, Unread([images()]), **settings)
    assert net.version == 0


def test_a_model_of_which_nothing_can_be_pruned_is_refused():
    model = nn.Sequential(nn.Embedding(20, 6), nn.Flatten())
    with pytest.raises(gn.errors.EditError):
        gn.prune(model, [tokens()], relations=0.5, by="magnitude")
    assert len(gn.prune(model, [tokens()], relations=0.5, by="random", repair=False).stages) == 1


def test_transitions_of_a_net_that_run_with_attention_are_skipped():
    net, _ = trained_net()
    net.execution.use("attention", transition=1)
    pruning = gn.prune(net, [rows()], relations=0.5, by="magnitude")
    assert names(pruning.stages) == ["transition 0", "transition 2"]
    assert names(pruning.skipped) == ["transition 1"]
    pruning.undo()
    pruning = gn.prune(net, [rows()], nodes=0.5, by="norm")
    assert names(pruning.stages) == ["layer 2"]
    assert names(pruning.skipped) == ["layer 1"]


def test_what_the_criterion_of_the_shares_cannot_score_is_skipped():
    rule = PruneWeakest(0.5, by="magnitude", scope="model")
    settings = {"relations": rule, "shares_by": "wanda", "repair": False}
    pruning = gn.prune(mixed_model(), [images()], **settings)
    assert names(pruning.skipped) == ["3.weight", "7.weight", "9.weight"]


def test_a_failing_stage_leaves_that_layer_as_it_was():
    net, _ = trained_net()

    class Failing(Random):
        def score(self, net, candidates, evidence, /):
            raise Stop

    before = net(rows()).detach()
    with pytest.raises(Stop):
        gn.prune(net, [rows()], relations=0.5, by=Failing())
    assert torch.equal(net(rows()), before)


def test_gradients_and_modes_are_as_before():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), gn.GrapNet([16, 12, 4]))
    model.train()
    model[1].eval()
    model(rows()).sum().backward()
    gradient = model[0].weight.grad.clone()

    def loss(model, batch):
        return model(batch).square().mean()

    gn.prune(model, [rows()], relations=0.5, by="taylor", loss=loss, repair=False)
    assert model.training
    assert not model[1].training
    assert torch.equal(model[0].weight.grad, gradient)


def test_criteria_score_in_evaluation_mode():
    net, _ = trained_net()
    modes = []

    def score(net, candidates, evidence):
        modes.append(net.training)
        return candidates.strengths

    gn.prune(net, [rows()], relations=0.5, by=score)
    assert modes == [False, False, False]
    assert net.training


def test_too_large_an_undo_is_refused_first():
    net, _ = trained_net()
    with pytest.raises(gn.errors.GrapNetError, match="100"):
        gn.prune(net, [rows()], nodes=0.5, most_undo_bytes=100)
    assert net.version == 0
    assert gn.prune(net, [rows()], nodes=0.5, most_undo_bytes=10**6).undo_bytes > 100


def test_progress_says_what_undo_may_keep_before_the_first_pass(capfd):
    net, _ = trained_net()
    with pytest.raises(AssertionError):
        gn.prune(net, Unread([rows()]), nodes=0.5, progress=True)
    said = capfd.readouterr().err
    pruning = gn.prune(net, [rows()], nodes=0.5, progress=True)
    assert f"{pruning.undo_bytes / 1e6:.3f} MB" in said
    shown = capfd.readouterr().err
    assert "100" in shown
    for progress in (False, None):
        gn.prune(net, [rows()], nodes=0.5, progress=progress)
        assert capfd.readouterr().err == ""


def test_progress_is_shown_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    net, _ = trained_net()
    gn.prune(net, [rows()], nodes=0.5, progress=False)
    assert capsys.readouterr().err == ""
    gn.prune(net, [rows()], nodes=0.5)
    assert "MB" in capsys.readouterr().err


@pytest.mark.parametrize("batches", [iter([rows()]), rows()], ids=["iterator", "tensor"])
def test_what_is_no_list_of_batches_is_refused(batches):
    net, _ = trained_net()
    with pytest.raises(TypeError):
        gn.prune(net, batches, nodes=0.5)


@pytest.mark.parametrize(
    "amount",
    [
        {"relations": gradual_pruning(100, 0.9, every=10)},
        {"relations": CovarianceSifter()},
        {"nodes": RemoveOrphans()},
    ],
    ids=["scheduled", "another rule of relations", "another rule of nodes"],
)
def test_what_is_neither_a_share_nor_a_rule_of_its_kind_is_refused(amount):
    net, _ = trained_net()
    with pytest.raises(TypeError):
        gn.prune(net, [rows()], **amount)
    assert net.version == 0


@pytest.mark.parametrize("amounts", [{"nodes": 0.5}, {"relations": 0.5, "by": "obs"}])
def test_a_batch_with_nan_changes_nothing(amounts):
    net, _ = trained_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    spoiled = rows()
    spoiled[3, 2] = torch.nan
    with pytest.raises(gn.errors.GrapNetError, match="NaN"):
        gn.prune(net, [spoiled], **amounts)
    assert net.version == 0
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("amounts", [{}, {"nodes": 0.5, "relations": 0.5}])
def test_exactly_one_amount_is_given(amounts):
    net, _ = trained_net()
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, [rows()], **amounts)


def conv_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 12, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * 36, 4),
    )


@pytest.mark.parametrize("by", ["norm", "elimination"])
def test_a_plain_model_is_adopted_and_its_channels_leave(by):
    x = torch.randn(128, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    # Neighbouring pixels are alike.
    x = torch.nn.functional.avg_pool2d(x, 3, 1, 1)
    errors = {}
    for repair in (False, True):
        model = conv_model()
        expected = model(x).detach()
        pruning = gn.prune(model, [x[:64], x[64:]], nodes=0.5, by=by, repair=repair)
        assert model[0].weight.shape == (8, 3, 3, 3)
        assert model[5].weight.shape == (4, 6 * 36)
        errors[repair] = error(model, expected, x)
        pruning.undo()
        assert torch.equal(model(x), expected)
    assert errors[True] < 0.5 * errors[False]


def test_relations_of_an_adopted_model_leave():
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    errors = {}
    for by in ("magnitude", "alternating"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4))
        expected = model(x).detach()
        pruning = gn.prune(model, [x], relations=0.5, by=by, repair=False)
        errors[by] = error(model, expected, x)
        pruning.undo()
        assert torch.equal(model(x), expected)
    assert errors["alternating"] < errors["magnitude"]


def uneven_net():
    """Returns a net with weak nodes in its first hidden layer alone, and an attached Adam."""
    net, optimizer = trained_net()
    weak = net.layers[1][:14]
    weak.incoming().weights = 1e-3 * weak.incoming().weights.detach()
    weak.outgoing().weights = 1e-3 * weak.outgoing().weights.detach()
    weak.biases = 1e-3 * weak.biases.detach()
    return net, optimizer


def leaving(pruning):
    return [stage.leaving for stage in pruning.stages]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [8, 6]),
        ({"scope": "space", "by": "norm"}, [8, 6]),
        ({"scope": "model", "by": "norm"}, [14, 0]),
        ({"scope": "model", "shares_by": "norm"}, [14, 0]),
        ({"scope": "model", "by": "subset", "shares_by": NodeNorm(), "compare": "score"}, [14, 0]),
    ],
)
def test_the_scope_model_takes_nodes_where_they_are_weakest(settings, expected):
    """A share of 0.35 of the 40 nodes are 14, and those of layer 1 are the weakest of all."""
    net, _ = uneven_net()
    pruning = gn.prune(net, [rows()], **arranged(nodes=0.35, **settings))
    assert leaving(pruning) == expected
    assert net.sizes == [8, 24 - expected[0], 16 - expected[1], 4]


@pytest.mark.parametrize(
    "settings",
    [
        {"by": "magnitude"},
        {"shares_by": "magnitude"},
        {"by": "wanda", "shares_by": Magnitude(), "compare": "lamp"},
    ],
)
def test_the_scope_model_ranks_all_relations_before_the_first_stage(settings):
    net, _ = uneven_net()
    relations = net.select().outgoing()
    weakest = relations.smallest(fraction=0.5, key=lamp_scores(relations))
    layers = [net.layers[number].uid for number in range(3)]
    expected = [int(torch.isin(weakest.parents, uids).sum()) for uids in layers]
    assert expected != [t.size // 2 for t in net.transitions]
    each = copy.deepcopy(net)
    ranked = arranged(relations=0.5, scope="model", **settings)
    assert leaving(gn.prune(net, [rows()], **ranked)) == expected
    sizes = [t.size for t in each.transitions]
    assert leaving(gn.prune(each, [rows()], relations=0.5)) == [size // 2 for size in sizes]


def test_owners_lose_the_same_share():
    net, _ = trained_net()
    gn.prune(net, [rows()], relations=PruneWeakest(0.5, scope="owner"))
    assert [t.topology.degrees.unique().tolist() for t in net.transitions] == [[12], [8], [2]]


class Unread(list):
    """Batches that nothing may run."""

    def __iter__(self):
        raise AssertionError("the model ran")


@pytest.mark.parametrize(
    "settings",
    [
        {"nodes": 0.5},
        {"macs": 0.5},
        {"nodes": 0.5, "by": Elimination()},
        {"relations": 0.5},
        {"relations": 0.5, "by": "obs"},
    ],
)
def test_a_criterion_of_one_layer_does_not_rank_all_of_them(settings):
    net, _ = trained_net()
    with pytest.raises(gn.errors.EditError, match="shares_by"):
        gn.prune(net, Unread([rows()]), **arranged(scope="model", **settings))
    assert net.version == 0
    model = conv_model()
    with pytest.raises(gn.errors.EditError):
        gn.prune(model, Unread([rows()]), **arranged(scope="model", **settings))
    assert type(model[0].weight) is nn.Parameter


def test_one_that_is_named_may():
    net, _ = trained_net()
    rule = PruneNodes(0.5, by="elimination", scope="model")
    pruning = gn.prune(net, [rows()], nodes=rule, shares_by="elimination")
    assert sum(leaving(pruning)) == 20
    net, _ = trained_net()
    rule = PruneWeakest(0.5, by="obs", scope="model")
    pruning = gn.prune(net, [rows()], relations=rule, shares_by="obs")
    assert sum(leaving(pruning)) == 320


def test_a_layer_keeps_what_keep_asks_for():
    net, _ = uneven_net()
    ranked = arranged(nodes=0.35, keep=18, scope="model", shares_by="norm")
    assert leaving(gn.prune(net, [rows()], **ranked)) == [6, 0]
    net, _ = trained_net()
    assert leaving(gn.prune(net, [rows()], **arranged(nodes=0.5, keep=14))) == [10, 2]
    net, _ = trained_net()
    assert leaving(gn.prune(net, [rows()], **arranged(nodes=0.5, keep=0.5))) == [12, 8]
    for settings in ({}, {"scope": "model", "shares_by": "magnitude"}):
        net, _ = trained_net()
        pruning = gn.prune(net, [rows()], **arranged(relations=0.9, keep=60, **settings))
        left = [t.size for t in net.transitions]
        assert min(left) == 60
        assert [stage.present - stage.leaving for stage in pruning.stages] == left


@pytest.mark.parametrize(
    "settings", [{}, {"by": "norm", "scope": "model"}, {"scope": "model", "shares_by": "random"}]
)
@pytest.mark.parametrize("cost", ["macs", "parameters"])
def test_nodes_leave_down_to_a_budget(cost, settings):
    x = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    model = conv_model()
    expected = model(x).detach()
    net = gn.adopt(model, x[:1])
    before = getattr(net.count(), cost)
    pruning = gn.prune(model, [x], **arranged(**{cost: 0.4}, **settings))
    left = getattr(net.count(), cost)
    assert left <= 0.4 * before
    # A node more would be too much: of the larger layer it costs less than a tenth.
    assert left > 0.3 * before
    assert all(stage.assigned > 0 for stage in pruning.stages if stage.leaving)
    pruning.undo()
    assert torch.equal(model(x), expected)
    # An int is an absolute number.
    rule = PruneNodes(**{cost: int(0.7 * before)}, multiple=4)
    gn.prune(model, [x], nodes=rule, repair=False)
    assert getattr(net.count(), cost) <= 0.7 * before
    assert model[0].weight.shape[0] % 4 == model[2].weight.shape[0] % 4 == 0


def test_a_net_is_pruned_down_to_its_parameters():
    net, _ = trained_net()
    before = net.count().parameters
    gn.prune(net, [rows()], **arranged(parameters=0.5))
    assert 0.4 * before < net.count().parameters <= 0.5 * before


def test_a_budget_that_cannot_be_reached_changes_nothing():
    net, _ = trained_net()
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, [rows()], **arranged(parameters=0.1, keep=0.5))
    assert net.version == 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"by": "magnitude", "scope": "child"},
        {"scope": "model", "shares_by": "magnitude"},
    ],
)
def test_a_budget_limits_the_relations_of_the_whole_call(settings):
    net, _ = trained_net()
    limited = arranged(relations=0.5, budget=Budget(edits=100), **settings)
    pruning = gn.prune(net, [rows()], **limited)
    assert sum(leaving(pruning)) == 100
    assert net.count().relations == 540
    if not settings:
        # in proportion to 96, 192 and 32
        assert leaving(pruning) == [30, 60, 10]
    net, _ = trained_net()
    limited = arranged(relations=0.9, budget=Budget(parents=3, children=1), **settings)
    gn.prune(net, [rows()], **limited)
    for transition in net.transitions:
        assert int(transition.topology.fan_in().min()) >= 3
        assert int(transition.topology.degrees.min()) >= 1


def test_a_budget_holds_for_a_criterion_that_does_not_know_it():
    net, _ = trained_net()
    gn.prune(net, [rows()], relations=0.9, by=Amplified(), budget=Budget(parents=3))
    for transition in net.transitions:
        assert int(transition.topology.fan_in().min()) >= 3


@pytest.mark.parametrize("scope", ["transition", "model"])
def test_whole_tiles_leave_and_the_rest_is_repaired(scope):
    errors = {}
    for repair in (False, True):
        net, _ = trained_net((32, 64, 48, 16))
        x = rows(width=32)
        expected = net(x).detach()
        settings = {"by": "magnitude", "scope": scope, "tile": 16}
        pruning = gn.prune(net, [x], **arranged(relations=0.5, **settings), repair=repair)
        assert 0.4 < sum(leaving(pruning)) / (32 * 64 + 64 * 48 + 48 * 16) < 0.6
        assert all(count % 256 == 0 for count in leaving(pruning))
        net.execution.use("tiles")
        assert all(row["tile"] for row in net.execution.describe())
        errors[repair] = error(net, expected, x)
    assert errors[True] < 0.8 * errors[False]


def test_a_pattern_takes_a_budget():
    net, _ = trained_net()
    rule = PruneWeakest(pattern=(2, 4))
    pruning = gn.prune(net, [rows()], relations=rule, budget=Budget(edits=50))
    assert sum(leaving(pruning)) == 50


SHARED = [
    arranged(nodes=0.6, scope="model", shares_by="norm"),
    arranged(relations=0.5, scope="model", by="magnitude"),
    arranged(parameters=0.5, keep=2),
    arranged(relations=0.5, budget=Budget(edits=150)),
]


@pytest.mark.parametrize("settings", SHARED)
def test_undo_and_preview_give_everything_back_with_shares(settings):
    net, optimizer = trained_net()
    x = rows()
    before = net(x).detach()
    bits = {name: value.clone() for name, value in net.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    shown = gn.prune(net, [x], **settings, preview=True)
    assert torch.equal(net(x), before)
    pruning = gn.prune(net, [x], **settings)
    assert leaving(pruning) == leaving(shown)
    assert not torch.equal(net(x), before)
    pruning.undo()
    for name, value in net.state_dict().items():
        assert torch.equal(value, bits[name])
    for key, kept in state["state"].items():
        for name, value in kept.items():
            assert torch.equal(optimizer.state_dict()["state"][key][name], value)


class InterruptedAt(list):
    """Batches that raise when they are run for the n-th time."""

    def __init__(self, batches, number):
        super().__init__(batches)
        self.left = number

    def __iter__(self):
        self.left -= 1
        if self.left == 0:
            raise Stop
        return super().__iter__()


@pytest.mark.parametrize("settings", SHARED)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_run_that_resumes_goes_by_the_shares_of_the_first(tmp_path, settings, is_loaded):
    x = rows()
    whole, _ = uneven_net()
    stages = [stage for stage in gn.prune(whole, [x], **settings).stages if stage.leaving]
    for passes in (1, 2):
        net, _ = uneven_net()
        with pytest.raises(Stop):
            gn.prune(net, InterruptedAt([x], passes), **settings)
        if is_loaded:
            gn.save(tmp_path / "net.safetensors", net, undo=True)
            net = gn.load(tmp_path / "net.safetensors")
        pruning = gn.prune(net, [x], **settings, resume=True)
        found = [stage for stage in pruning.stages if stage.leaving]
        assert [stage[:3] for stage in found] == [stage[:3] for stage in stages]
        assert torch.equal(net(x), whole(x))


def test_shares_that_were_decided_anew_would_be_others():
    """A control for the test above: ranked again, the pruned net loses others."""
    net, _ = uneven_net()
    settings = arranged(relations=0.5, scope="model", by="magnitude")
    first = leaving(gn.prune(net, [rows()], **settings))
    second = leaving(gn.prune(net, [rows()], **settings))
    shares = [[round(count / sum(found), 2) for count in found] for found in (first, second)]
    assert shares[0] != shares[1]


@pytest.mark.parametrize(
    "other",
    [
        {"scope": "transition"},
        {"scope": "model", "compare": "mean"},
        {"scope": "model", "keep": 3},
        {"scope": "model", "shares_by": "random"},
        {"scope": "model", "budget": Budget(edits=10)},
    ],
)
def test_resume_refuses_other_scopes_limits_and_budgets(other):
    net, _ = trained_net()
    gn.prune(net, [rows()], relations=PruneWeakest(0.5, scope="model"))
    version = net.version
    changed = arranged(relations=0.5, by="magnitude", **other)
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, [rows()], **changed, resume=True)
    assert net.version == version
    # the same settings in other words
    settings = {"by": Magnitude(), "scope": "model", "keep": 0, "budget": Budget()}
    gn.prune(net, [rows()], **arranged(relations=0.5, **settings), resume=True)
    assert net.version == version


def test_nets_of_a_model_are_ranked_each_and_share_a_budget():
    torch.manual_seed(0)
    model = nn.Sequential(gn.GrapNet([8, 12, 8]), nn.ReLU(), gn.GrapNet([8, 16, 4]))
    expected = model(rows()).detach()
    settings = {"scope": "model", "by": "magnitude", "budget": Budget(edits=90)}
    pruning = gn.prune(model, [rows()], **arranged(relations=0.5, **settings))
    assert sum(leaving(pruning)) == 90
    # 192 relations each
    assert sum(leaving(pruning)[:2]) == 45
    pruning.undo()
    assert torch.equal(model(rows()), expected)


def test_criteria_that_need_gradients_rank_all_layers():
    net, _ = uneven_net()

    def loss(model, batch):
        return model(batch).square().mean()

    rule = PruneNodes(0.35, by="taylor", scope="model")
    pruning = gn.prune(net, [rows()], nodes=rule, loss=loss)
    assert sum(leaving(pruning)) == 14
    assert leaving(pruning)[0] > 8
    net, _ = uneven_net()
    with pytest.raises(gn.errors.EditError):
        gn.prune(net, [rows()], nodes=rule)
    assert net.version == 0


def test_relations_of_an_adopted_model_are_ranked_together():
    x = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    model = conv_model()
    expected = model(x).detach()
    net = gn.adopt(model, x[:1])
    relations = net.relations("0") | net.relations("2") | net.relations("5")
    weak = relations.smallest(fraction=0.5, key=lamp_scores(relations))
    counts = [len(weak & net.relations(name)) for name in ("0", "2", "5")]
    assert [2 * count for count in counts] != [len(net.relations(name)) for name in ("0", "2", "5")]
    settings = {"scope": "model", "by": "magnitude"}
    pruning = gn.prune(net, [x], **arranged(relations=0.5, **settings))
    assert leaving(pruning) == counts
    pruning.undo()
    assert torch.equal(model(x), expected)
    gn.prune(net, [x], **arranged(relations=0.9, keep=40, budget=Budget(children=1), **settings))
    assert min(len(net.relations(name)) for name in ("0", "2", "5")) >= 40
