"""refit: readers receive what they receive in another model, beside least squares over its rows."""

import copy

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
import grapnet.rules as gn_rules
from grapnet.errors import EditError
from grapnet.rules import refit

DAMPING = 1e-13


def make_net(**settings) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(0)
    sizes = settings.pop("sizes", [6, 16, 12, 3])
    return gn.GrapNet(sizes, dtype=torch.float64, generator=generator, **settings)


def make_rows(count=400, seed=1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator, dtype=torch.float64)


def make_convolutions() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.Conv2d(6, 5, 3, stride=2),
        nn.Tanh(),
        nn.Conv2d(5, 4, 1),
        nn.Flatten(),
        nn.Linear(4 * 9, 3),
    ).double()


def sums_of(net: gn.GrapNet, layer: int, x: Tensor) -> Tensor:
    """Returns what the nodes of a layer receive."""
    found = []
    hook = net.layers[layer].register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        net(x)
    hook.remove()
    return found[0]


def sent_by(net: gn.GrapNet, layer: int, x: Tensor) -> Tensor:
    found = []
    hook = net.layers[layer].register_forward_hook(lambda _, args, output: found.append(output))
    with torch.no_grad():
        net(x)
    hook.remove()
    return found[0]


def solution(columns: Tensor, wanted: Tensor) -> Tensor:
    """Returns what least squares make of a constant and some columns."""
    columns = torch.cat([columns, torch.ones_like(wanted)[:, None]], 1)
    return columns @ torch.linalg.lstsq(columns, wanted, driver="gelsd").solution


def error(net: nn.Module, original: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((net(x) - original(x)).square().sum())


def bits_of(net: nn.Module) -> list[Tensor]:
    return [value.clone() for value in net.state_dict().values()]


def test_every_child_is_solved_over_its_own_relations_one_layer_after_the_other():
    net = make_net(density=0.7)
    x = make_rows()
    original = copy.deepcopy(net)
    with net.edit(allow_dead=True) as edit:
        for layer in net.layers[:-1]:
            edit.cut(layer.outgoing().random(fraction=0.4))
        edit.remove_nodes(net.layers[1][::3])
    wiring = [transition.topology.child.clone() for transition in net.transitions]
    before = error(net, original, x)
    done = refit(net, original, [x[:150], x[150:]], damping=DAMPING)
    assert [one.reader for one in done] == [f"layer {n} → layer {n + 1}" for n in range(3)]
    assert error(net, original, x) < 0.7 * before
    for transition, child in zip(net.transitions, wiring, strict=True):
        assert torch.equal(transition.topology.child, child)
    for layer, one in zip((1, 2, 3), done, strict=True):
        h = sent_by(net, layer - 1, x)
        left = torch.isin(original.layers[layer].uid, net.layers[layer].uid)
        wanted = sums_of(original, layer, x)[:, left]
        topology = net.transitions[layer - 1].topology
        for child in range(len(net.layers[layer])):
            parents = topology.parents()[topology.child == child].long()
            best = solution(h[:, parents], wanted[:, child])
            mine = sums_of(net, layer, x)[:, child]
            torch.testing.assert_close(mine, best, rtol=0, atol=1e-6)
        left_over = (sums_of(net, layer, x) - wanted).square().sum() / wanted.square().sum()
        assert one.left == pytest.approx(float(left_over), rel=1e-5)


def test_it_corrects_what_repair_leaves_to_the_layers_behind():
    net = make_net(sizes=[6, 48, 48, 48, 3])
    x = make_rows()
    original = copy.deepcopy(net)
    gn.prune(net, [x], relations=0.9, by="magnitude")
    repaired = error(net, original, x)
    done = refit(net, original, [x])
    assert len(done) == 4
    assert all(one.left < one.lost for one in done[1:])
    assert error(net, original, x) < 0.8 * repaired


def test_where_nothing_is_missing_nothing_is_committed():
    net = make_net()
    original = copy.deepcopy(net)
    assert refit(net, original, [make_rows()]) == ()
    assert net.version == original.version
    # The first layer is as in the original: its batches are never run.
    with net.edit() as edit:
        edit.cut(net.layers[2].outgoing().smallest(count=3))
    version = net.version
    done = refit(net, original, [make_rows()])
    assert [one.reader for one in done] == ["layer 2 → layer 3"]
    assert net.version == version + 1


def test_frozen_relations_and_biases_keep_their_bits():
    net = make_net()
    x = make_rows()
    original = copy.deepcopy(net)
    with net.edit() as edit:
        edit.freeze(net.layers[2][:4].outgoing())
        edit.freeze(net.layers[3][:1], incoming=False)
        edit.cut(net.layers[1].outgoing().smallest(fraction=0.6))
    held = net.transitions[2].frozen_values.clone()
    bias = net.layers[3].values()[0].clone()
    before = error(net, original, x)
    refit(net, original, [x])
    assert error(net, original, x) < before
    assert torch.equal(net.transitions[2].frozen_values, held)
    assert torch.equal(net.layers[3].values()[0], bias)


def test_several_transitions_into_a_layer_share_what_is_missing():
    net = make_net(skips=[(0, 2), (1, 3)])
    x = make_rows()
    original = copy.deepcopy(net)
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][::2])
    before = error(net, original, x)
    once = refit(net, original, [x], damping=DAMPING)
    assert all(one.left < one.lost for one in once)
    after = error(net, original, x)
    assert after < before
    # Each solves for what the others leave, so that another round does no worse.
    refit(net, original, [x], damping=DAMPING)
    assert error(net, original, x) <= after * (1 + 1e-9)


def test_convolutions_are_solved_over_their_kernels_for_the_children_that_stay():
    model = make_convolutions()
    x = torch.randn(64, 2, 8, 8, dtype=torch.float64)
    net = gn.adopt(model, x[:2])
    original = copy.deepcopy(net)
    with net.edit() as edit:
        edit.remove_nodes(net.space("0")[:2])
        edit.remove_nodes(net.space("3")[[1, 3]])
        edit.cut(net.relations("3").random(fraction=0.3))
    before = error(model, original.model.eval(), x)
    statistics = model[1].running_mean.clone()
    assert model.training
    done = {one.reader: one for one in refit(net, original, [x[:40], x[40:]], damping=DAMPING)}
    assert model.training
    assert torch.equal(model[1].running_mean, statistics)
    assert list(done) == ["3.weight", "5.weight", "7.weight"]
    model.eval()
    assert error(model, original.model, x) < 0.5 * before
    with torch.no_grad():
        h = nn.functional.unfold(model[:3](x), 3, stride=2).transpose(1, 2)  # [64, 9, 4 · 9]
        wanted = original.model[:4](x)[:, [0, 2, 4]].flatten(2).transpose(1, 2)
        mine = model[:4](x).flatten(2).transpose(1, 2)
        exists = (model[3].weight != 0).flatten(1)
    for child in range(3):
        best = solution(h[..., exists[child]].flatten(0, 1), wanted[..., child].flatten())
        torch.testing.assert_close(mine[..., child].flatten(), best, rtol=0, atol=1e-6)


class Residual(nn.Module):
    """A stream to which two blocks add, registered in another order than they are called in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.more = nn.ModuleList([nn.Linear(6, 24), nn.Linear(24, 6)])
        self.parts = nn.ModuleList([nn.Linear(6, 24), nn.Linear(24, 6)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.parts[1](self.parts[0](x).tanh())
        return self.last(x + self.more[1](self.more[0](x).tanh()))


def test_readers_come_in_the_order_of_their_calls():
    torch.manual_seed(4)
    model = Residual().double()
    x = make_rows()
    net = gn.adopt(model, x[:2])
    original = copy.deepcopy(net)
    gn.prune(net, [x], relations=0.7, by="magnitude")
    before = error(model, original.model, x)
    done = refit(net, original, [x])
    names = ["parts.0", "parts.1", "more.0", "more.1", "last"]
    assert [one.reader for one in done] == [f"{name}.weight" for name in names]
    assert error(model, original.model, x) < before


def test_nets_in_a_model_come_in_the_order_of_their_calls():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late = make_net(sizes=[3, 24, 2])
            self.early = make_net(sizes=[6, 24, 3])

        def forward(self, x: Tensor) -> Tensor:
            return self.late(self.early(x).tanh())

    model = Two()
    x = make_rows()
    original = copy.deepcopy(model)
    gn.prune(model, [x], relations=0.8, by="magnitude")
    before = error(model, original, x)
    done = refit(model, original, [x])
    assert [one.reader.partition(":")[0] for one in done] == ["early", "early", "late", "late"]
    assert error(model, original, x) < before


def test_what_else_the_children_receive_counts_as_missing():
    # The skip loses relations, and the other transition into the layer makes up for them.
    net = make_net(skips=[(0, 2)])
    x = make_rows()
    original = copy.deepcopy(net)
    with net.edit(allow_dead=True) as edit:
        edit.cut(net.layers[0].outgoing(to=net.layers[2]).smallest(fraction=0.7))
    done = refit(net, original, [x])
    assert {one.reader for one in done} >= {"layer 0 → layer 2", "layer 1 → layer 2"}
    assert refit(net, original, [x], transitions=0) == ()


def test_another_activation_is_made_up_for_behind_it():
    net = make_net()
    x = make_rows()
    original = copy.deepcopy(net)
    with net.edit() as edit:
        edit.set_activation(net.layers[1], "tanh")
    before = error(net, original, x)
    done = refit(net, original, [x])
    assert [one.reader for one in done] == ["layer 1 → layer 2", "layer 2 → layer 3"]
    assert error(net, original, x) < 0.5 * before


def test_a_module_that_is_called_several_times_is_left_as_it_is():
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 16)
            self.again = nn.Linear(16, 16)
            self.last = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            for _ in range(3):
                h = self.again(h).tanh()
            return self.last(h)

    model = Repeated().double()
    x = make_rows()
    net = gn.adopt(model, x[:2])
    original = copy.deepcopy(net)
    with net.edit(allow_dead=True) as edit:
        edit.cut(net.relations("again").smallest(fraction=0.6))
    weights = model.again.weight.clone()
    assert [one.reader for one in refit(net, original, [x])] == ["last.weight"]
    assert torch.equal(model.again.weight, weights)
    with pytest.raises(EditError, match="several times"):
        refit(net, original, [x], transitions="again")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_that_a_compiled_step_wrote_are_solved_for_over_all_batches():
    net = make_net()
    x = make_rows()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    gn.attach(optimizer, net)
    gn.prune(net, [x], relations=0.5, by="magnitude").undo()
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        net(x).square().mean().backward()
        step()
        optimizer.zero_grad()
    original = copy.deepcopy(net)
    with net.edit(allow_dead=True) as edit:
        for layer in net.layers[:-1]:
            edit.cut(layer.outgoing().smallest(fraction=0.8))
    before = error(net, original, x)
    done = refit(net, original, x.split(100))
    assert all(0 <= one.left < one.lost for one in done)
    assert error(net, original, x) < before


def test_a_compiled_net_is_refitted():
    net = make_net()
    x = make_rows()
    net.compile(backend="eager")
    with torch.no_grad():
        net(x)
    pruning = gn.prune(net, [x], relations=0.7, by="magnitude", refit=True)
    assert sum(stage.assigned for stage in pruning.stages if "refit" in stage.name) > 0
    pruning.undo()


def test_batches_are_there_and_can_be_run_again():
    net = make_net()
    x = make_rows()
    original = copy.deepcopy(net)
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][:4])
    for batches in (iter([x]), (part for part in [x]), x):
        with pytest.raises(TypeError):
            refit(net, original, batches)
    with pytest.raises(EditError, match="batches"):
        refit(net, original, [])


def test_gn_prune_lists_readers_that_are_too_wide_to_refit():
    net = make_net(sizes=[6, 12, 48, 12, 3])
    x = make_rows()
    pruning = gn.prune(
        net, [x], nodes=gn_rules.PruneNodes(0.5, spaces=(1,)), refit=True, most_cells=800
    )
    (skipped,) = pruning.skipped
    assert skipped.name == "refit layer 2 → layer 3"
    assert pruning.stages[-1].assigned > 0
    pruning.undo()


@pytest.mark.parametrize("is_net", [True, False])
def test_some_rows_of_a_pass_are_compared_with_the_same_rows(is_net):
    if is_net:
        model = make_net()
        x = make_rows()
        net: gn.GrapNet | gn.Adopted = model
    else:
        model = make_convolutions()
        x = torch.randn(64, 2, 8, 8, dtype=torch.float64)
        net = gn.adopt(model, x[:2])
    model.eval()
    original = copy.deepcopy(net)
    with net.edit() as edit:
        nodes = net.layers[1] if is_net else net.space("0")
        edit.remove_nodes(nodes[::2])
    plain = original if is_net else original.model
    before = error(model, plain, x)
    refit(net, original, [x], rows=300)
    assert error(model, plain, x) < 0.7 * before


def test_gn_prune_refits_at_the_end_and_undoes_all_of_it():
    net = make_net(sizes=[6, 48, 48, 3])
    x = make_rows()
    before = bits_of(net)
    plain = gn.prune(net, [x], nodes=0.8)
    original = copy.deepcopy(net)
    original.undo()
    original.undo()
    repaired = error(net, original, x)
    plain.undo()
    pruning = gn.prune(net, [x], nodes=0.8, refit=True)
    assert error(net, original, x) < repaired
    names = [stage.name for stage in pruning.stages]
    assert names[2:] == [f"refit layer {n} → layer {n + 1}" for n in range(3)]
    assert pruning.stages[2].assigned == 0  # It reads the same inputs with the same weights.
    assert pruning.stages[4].assigned > 0
    pruning.undo()
    assert all(map(torch.equal, bits_of(net), before))
    gn.prune(net, [x], nodes=0.8, refit=True, preview=True)
    assert all(map(torch.equal, bits_of(net), before))


def test_a_run_that_resumes_refits_to_the_unpruned_net():
    x = make_rows()
    whole = make_net(sizes=[6, 48, 48, 3])
    gn.prune(whole, [x], nodes=0.8, refit=True)

    class Ends(list):
        """Batches that end in an error once they were run so many times."""

        left = 4

        def __iter__(self):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("no more data")
            return super().__iter__()

    net = make_net(sizes=[6, 48, 48, 3])
    before = bits_of(net)
    with pytest.raises(RuntimeError, match="no more data"):
        gn.prune(net, Ends([x]), nodes=0.8, refit=True)
    assert net.version == 3  # two stages and one refit
    pruning = gn.prune(net, [x], nodes=0.8, refit=True, resume=True)
    for mine, other in zip(bits_of(net), bits_of(whole), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    with pytest.raises(EditError):
        gn.prune(net, [x], nodes=0.8, resume=True)  # other settings
    pruning.undo()
    assert all(map(torch.equal, bits_of(net), before))


def test_it_refuses_what_is_no_copy():
    net = make_net()
    x = make_rows()
    with pytest.raises(EditError):
        refit(net, net, [x])
    with pytest.raises(EditError):
        refit(net, net.to_module(), [x])
    original = copy.deepcopy(net)
    with net.edit() as edit:
        edit.connect(net.layers[1], edit.add_nodes(2, 3))
    version = net.version
    with pytest.raises(EditError, match="nodes"):
        refit(net, original, [x])
    assert net.version == version
    model = make_convolutions()
    graph = gn.adopt(model, torch.randn(2, 2, 8, 8, dtype=torch.float64))
    with pytest.raises(EditError, match="copy"):
        refit(graph, copy.deepcopy(model), [])
