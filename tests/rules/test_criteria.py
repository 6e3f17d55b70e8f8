"""Criteria: each against its published formula in plain torch, for nets and adopted models."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import conv2d, unfold

import grapnet as gn
from grapnet import rules
from grapnet.rules import PruneNodes, PruneWeakest, RuleContext, RuleManager

X = 24  # rows of a batch


class Mlp(nn.Module):
    """The feed-forward part of a transformer: tokens of a stream, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.embed(x)
        stream = stream + self.down(torch.nn.functional.gelu(self.up(stream)))
        return self.head(stream).mean(1)


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 9, 4),
    )


class Case:
    """A model, its data, and how plain torch sees one of its weights."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        if kind == "net":
            self.net: Any = gn.GrapNet([6, 10, 7, 3], density=0.7, activation="tanh").double()
            self.model: nn.Module = self.net
            self.x = torch.randn(X, 6, dtype=torch.float64)
            self.t = 1
        elif kind == "conv":
            self.model = conv_net().double()
            self.x = torch.randn(X, 3, 8, 8, dtype=torch.float64)
            self.net = gn.adopt(self.model, self.x[:2])
            self.t = self.net._named_transitions("2")[0]
        else:
            self.model = Mlp().double()
            self.x = torch.randn(X, 5, 6, dtype=torch.float64)
            self.net = gn.adopt(self.model, self.x[:2])
            self.t = self.net._named_transitions("up")[0]
        self.kind = kind
        self.y = torch.randint(3, (X,))

    @property
    def relations(self) -> gn.RelationSet:
        return gn.RelationSet.of(self.net, [self.t])

    def loss(self, output: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output, self.y, reduction="sum")

    def recorded(self, criterion: Any, candidates: Any) -> dict[str, Any]:
        """Returns the evidence of one forward and backward pass."""
        recorders = criterion.recorders(self.net, candidates)
        for recorder in recorders.values():
            recorder.arm(self.net)
        self.loss(self.model(self.x)).backward()
        for recorder in recorders.values():
            recorder.disarm()
        return recorders

    def score(self, criterion: Any, candidates: Any = None) -> Tensor:
        if candidates is None:
            candidates = self.relations
        return criterion.score(self.net, candidates, self.recorded(criterion, candidates))

    def by_pairs(self, table: Tensor) -> Tensor:
        """Returns the entries of [children, parents] at the relations."""
        relations = self.relations
        source, target = self.net.ends[self.t]
        parents = self.net.layers[source].rows(relations.parents).long()
        children = self.net.layers[target].rows(relations.children).long()
        return table[children, parents]

    def dense(self) -> tuple[Tensor, Tensor, Any]:
        """Returns the weight [out, in, *kernel], the input of its module and a function that
        computes the loss of one sample from a weight.
        """
        net = self.net
        if self.kind == "net":
            weights = torch.zeros(7, 10, dtype=torch.float64)
            topology = net.transitions[1].topology
            weights[topology.child.long(), topology.parents().long()] = (
                net.transitions[1].values().detach().view(-1)
            )
            hidden = hidden_of(self)

            def loss(weight: Tensor, h: Tensor, y: Tensor) -> Tensor:
                z = torch.tanh(weight @ h + net.layers[2].values().detach())
                last = torch.zeros(3, 7, dtype=torch.float64)
                wiring = net.transitions[2].topology
                values = net.transitions[2].values().detach().view(-1)
                last = last.index_put((wiring.child.long(), wiring.parents().long()), values)
                out = last @ z + net.layers[3].values().detach()
                return torch.nn.functional.cross_entropy(out, y)

            return weights, hidden, loss
        name = net.transitions[self.t].name
        module = self.model.get_submodule(name.rpartition(".")[0])
        inputs = []
        handle = module.register_forward_pre_hook(lambda m, args: inputs.append(args[0].detach()))
        with torch.no_grad():
            self.model(self.x)
        handle.remove()
        parameters = {k: p.detach() for k, p in self.model.named_parameters()}

        def loss(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
            given = {**parameters, name: weight}
            out = functional_call(self.model, given, (x.unsqueeze(0),))
            return torch.nn.functional.cross_entropy(out, y.unsqueeze(0))

        return module.weight.detach(), inputs[0], loss

    def per_sample_gradients(self) -> Tensor:
        """Returns the gradient of every sample's loss, [samples, out, in, *kernel]."""
        weight, inputs, loss = self.dense()
        x = inputs if self.kind == "net" else self.x
        return vmap(grad(loss), (None, 0, 0))(weight, x, self.y)


def hidden_of(case: Case) -> Tensor:
    """Returns the activations of the first hidden layer of the net, computed by hand."""
    first = case.net.transitions[0]
    dense = torch.zeros(10, 6, dtype=torch.float64)
    topology = first.topology
    dense[topology.child.long(), topology.parents().long()] = first.values().detach().view(-1)
    return torch.tanh(case.x @ dense.t() + case.net.layers[1].values().detach())


KINDS = ["net", "conv", "mlp"]


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def root_mean_squares(case: Case) -> Tensor:
    """Returns the root mean square of what each number of the weight is multiplied with."""
    weight, inputs, _ = case.dense()
    if case.kind != "conv":
        return inputs.reshape(-1, inputs.shape[-1]).square().mean(0).sqrt().expand_as(weight)
    columns = unfold(inputs, 3, stride=2)  # [batch, in · 9, positions]
    squares = columns.square().mean((0, 2)).sqrt()
    return squares.view(1, *weight.shape[1:]).expand_as(weight)


def test_magnitude_is_the_norm_of_a_relation(case: Case) -> None:
    weight, _, _ = case.dense()
    expected = case.by_pairs(weight.flatten(2).norm(dim=2) if weight.dim() > 2 else weight.abs())
    found = rules.Magnitude().score(case.net, case.relations, {})
    torch.testing.assert_close(found, expected)


def test_wanda_multiplies_weights_with_the_norm_of_their_inputs(case: Case) -> None:
    weight, _, _ = case.dense()
    product = (weight * root_mean_squares(case)).flatten(1).view(*weight.shape[:2], -1)
    expected = case.by_pairs(product.norm(dim=2))
    torch.testing.assert_close(case.score(rules.Wanda()).double(), expected)


def test_taylor_is_the_first_order_change_of_the_loss(case: Case) -> None:
    weight, _, _ = case.dense()
    gradient = case.per_sample_gradients().sum(0)
    product = (weight * gradient).flatten(1).view(*weight.shape[:2], -1).sum(2).abs()
    expected = case.by_pairs(product)
    torch.testing.assert_close(case.score(rules.Taylor()), expected)


def test_fisher_sums_squared_gradients_of_single_samples(case: Case) -> None:
    weight, _, _ = case.dense()
    squares = case.per_sample_gradients().square().sum(0)
    product = (weight.square() * squares).flatten(1).view(*weight.shape[:2], -1).sum(2)
    torch.testing.assert_close(case.score(rules.Fisher()), case.by_pairs(product))
    # The square of the gradient of the whole batch is something else.
    together = case.per_sample_gradients().sum(0).square()
    wrong = (weight.square() * together).flatten(1).view(*weight.shape[:2], -1).sum(2)
    assert not torch.allclose(case.by_pairs(wrong), case.by_pairs(product), rtol=0.1)


def test_fisher_is_averaged_over_backward_passes(case: Case) -> None:
    criterion = rules.Fisher()
    recorders = criterion.recorders(case.net, case.relations)
    for recorder in recorders.values():
        recorder.arm(case.net)
    for _ in range(3):
        case.loss(case.model(case.x)).backward()
    once = case.score(criterion)
    again = criterion.score(case.net, case.relations, recorders)
    torch.testing.assert_close(again, once)


def test_correlation_is_that_of_the_two_ends() -> None:
    case = Case("net")
    hidden = hidden_of(case)
    weight, _, _ = case.dense()
    below = torch.tanh(hidden @ weight.t() + case.net.layers[2].values().detach())
    table = torch.corrcoef(torch.cat([below, hidden], 1).t())[:7, 7:].abs()
    torch.testing.assert_close(case.score(rules.Correlation()), case.by_pairs(table))


def test_random_comes_from_the_generator(case: Case) -> None:
    def drawn(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        choice = rules.Random().choose(case.net, case.relations, {"generator": generator}, 9)
        return choice.leaving._positions_by_transition()[case.t]

    assert len(drawn(0)) == 9
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_a_criterion_without_evidence_says_so(case: Case) -> None:
    for criterion in (rules.Wanda(), rules.Taylor(), rules.Fisher()):
        with pytest.raises(gn.errors.EditError):
            criterion.score(case.net, case.relations, {})


def node_space(case: Case) -> Any:
    """Returns a hidden layer or space, and which one plain torch calls it."""
    if case.kind == "net":
        return case.net.layers[2]
    return case.net.space("0" if case.kind == "conv" else "up")


def node_activations(case: Case) -> Tensor:
    """Returns the activations of the space, [samples, …, nodes], with a gradient to come."""
    net = case.net
    if case.kind == "net":
        weight, hidden, _ = case.dense()
        return torch.tanh(hidden @ weight.t() + net.layers[2].values().detach())
    if case.kind == "conv":
        first: Any = case.model.get_submodule("0")
        return conv2d(case.x, first.weight, first.bias, padding=1).relu().detach()
    model: Any = case.model
    return torch.nn.functional.gelu(model.up(model.embed(case.x))).detach()


def loss_of_activations(case: Case, a: Tensor) -> Tensor:
    """Returns the loss as a function of the activations of the space."""
    model: Any = case.model
    if case.kind == "net":
        wiring = case.net.transitions[2].topology
        values = case.net.transitions[2].values().detach().view(-1)
        last = torch.zeros(3, 7, dtype=torch.float64)
        last[wiring.child.long(), wiring.parents().long()] = values
        return case.loss(a @ last.t() + case.net.layers[3].values().detach())
    if case.kind == "conv":
        return case.loss(model[2:](a))
    return case.loss(model.head(model.embed(case.x) + model.down(a)).mean(1))


def node_dim(case: Case) -> int:
    return 1 if case.kind == "conv" else -1


@pytest.mark.parametrize("side", ["both", "incoming", "outgoing"])
def test_node_norms_are_those_of_one_side_or_both(case: Case, side: Any) -> None:
    space = node_space(case)
    found = rules.NodeNorm(side).score(case.net, space, {})
    squares = torch.zeros(len(space), dtype=torch.float64)
    if case.kind == "net":
        for n, node in enumerate(space):
            if side != "outgoing":
                squares[n] += node.incoming().weights.square().sum() + node.bias.square()
            if side != "incoming":
                squares[n] += node.outgoing().weights.square().sum()
    else:
        model: Any = case.model
        writer, reader = (model[0], model[2]) if case.kind == "conv" else (model.up, model.down)
        if side != "outgoing":
            squares += writer.weight.detach().flatten(1).square().sum(1)
            squares += writer.bias.detach().square()
        if side != "incoming":
            squares += reader.weight.detach().movedim(1, 0).flatten(1).square().sum(1)
    torch.testing.assert_close(found, squares.detach().sqrt())


@pytest.mark.parametrize("statistic", ["mean", "rms", "rate"])
def test_mean_activations_are_means_over_samples_and_positions(case: Case, statistic: Any) -> None:
    a = node_activations(case).movedim(node_dim(case), -1)
    a = a.reshape(-1, a.shape[-1])
    expected = {
        "mean": a.mean(0).abs(),
        "rms": a.square().mean(0).sqrt(),
        "rate": (a > 0).double().mean(0),
    }[statistic]
    found = case.score(rules.MeanActivation(statistic), node_space(case))
    torch.testing.assert_close(found, expected)


def test_node_taylor_is_the_first_order_change_of_a_samples_loss(case: Case) -> None:
    a = node_activations(case).requires_grad_()
    (g,) = torch.autograd.grad(loss_of_activations(case, a), a)
    product = (a.detach() * g).movedim(node_dim(case), -1)
    expected = product.reshape(X, -1, product.shape[-1]).sum(1).abs().mean(0)
    torch.testing.assert_close(case.score(rules.NodeTaylor(), node_space(case)), expected)


def weighted_covariance(case: Case) -> Tensor:
    a = node_activations(case).movedim(node_dim(case), -1)
    a = a.reshape(-1, a.shape[-1]) * rules.NodeNorm("outgoing").score(
        case.net, node_space(case), {}
    )
    return torch.cov(a.t(), correction=0)


def test_a_column_subset_follows_the_largest_unexplained_variance(case: Case) -> None:
    covariance = weighted_covariance(case)
    order: list[int] = []
    for _ in range(len(covariance)):
        left = covariance.diagonal().clone()
        if order:
            some = covariance[order][:, order]
            explained = covariance[:, order] @ torch.linalg.solve(some, covariance[order])
            left -= explained.diagonal()
        left[order] = -1
        order.append(int(left.argmax()))
    found = case.score(rules.ColumnSubset(), node_space(case))
    assert found.argsort(descending=True).tolist() == order


def test_redundancy_eliminates_the_least_unexplained_node_first(case: Case) -> None:
    covariance = weighted_covariance(case)
    left = list(range(len(covariance)))
    order = []
    costs = []
    while left:
        unexplained = 1 / torch.linalg.inv(covariance[left][:, left]).diagonal()
        place = int(unexplained.argmin())
        costs.append(float(unexplained[place]))
        order.append(left.pop(place))
    found = case.score(rules.Redundancy(), node_space(case))
    assert found.argsort(stable=True).tolist() == order
    expected = torch.tensor(costs, dtype=torch.float64).cummax(0).values
    torch.testing.assert_close(found.sort().values, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("criterion", [rules.Redundancy(), rules.ColumnSubset()])
def test_of_two_equal_nodes_one_leaves_first_and_the_other_stays(criterion: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias):
            tensor[4] = tensor[1]
        # Norms do not see that they are equal, and find them strong.
        model[2].weight[:, [1, 4]] *= 3
    net = gn.from_module(model)
    recorders = criterion.recorders(net, net.layers[1])
    for recorder in recorders.values():
        recorder.arm(net)
    net(torch.randn(200, 4, dtype=torch.float64))
    leaving = criterion.choose(net, net.layers[1], recorders, 1).leaving
    assert leaving.uids.tolist() in ([5], [8])
    both = criterion.choose(net, net.layers[1], recorders, 2).leaving
    assert not {5, 8} <= set(both.uids.tolist())
    norms = rules.NodeNorm().choose(net, net.layers[1], {}, 2).leaving
    assert not {5, 8} & set(norms.uids.tolist())


def test_a_node_that_is_no_candidate_explains_others() -> None:
    case = Case("net")
    layer = case.net.layers[2]
    for criterion in (rules.Redundancy(), rules.ColumnSubset(), rules.NodeTaylor()):
        some = layer[[0, 2, 5]]
        evidence = case.recorded(criterion, layer)
        assert criterion.score(case.net, some, evidence).shape == (3,)
        assert set(criterion.choose(case.net, some, evidence, 2).leaving.uids.tolist()) <= set(
            some.uids.tolist()
        )


@pytest.mark.parametrize("by", ["magnitude", "wanda", "taylor", "fisher", "random"])
def test_a_manager_arms_what_a_criterion_needs(case: Case, by: str) -> None:
    rule = PruneWeakest(fraction=0.25, by=by, scope="child", transitions=case.t)
    manager = RuleManager(seed=3)
    manager.add(rule)
    with manager.recording(case.net):
        case.loss(case.model(case.x)).backward()
    scores = None
    if by != "random":
        evidence = manager._recorders[""].evidence("PruneWeakest") if by != "magnitude" else {}
        scores = rule.criterion.score(case.net, case.relations, evidence)
    children = case.relations.children
    before = case.net.transitions[case.t].topology.fan_in()
    relations = case.relations
    pairs = list(zip(relations.parents.tolist(), relations.children.tolist(), strict=True))
    assert manager.apply(case.net) is not None
    after = case.net.transitions[case.t].topology.fan_in()
    assert torch.equal(after, before - (0.25 * before.double()).round().long())
    if scores is None:
        return
    left = case.relations
    kept = set(zip(left.parents.tolist(), left.children.tolist(), strict=True))
    stays = torch.tensor([pair in kept for pair in pairs])
    for child in children.unique():
        own = children == child
        if (own & ~stays).any():
            assert scores[own & ~stays].max() <= scores[own & stays].min()


@pytest.mark.parametrize(
    "by", ["norm", "incoming", "outgoing", "activation", "taylor", "subset", "redundancy", "random"]
)
def test_nodes_are_removed_by_every_criterion(case: Case, by: str) -> None:
    space = node_space(case)
    rule = PruneNodes(0.5, by=by, spaces=[space], keep=1)
    manager = RuleManager(seed=3)
    manager.add(rule)
    with manager.recording(case.net):
        case.loss(case.model(case.x)).backward()
    expected = None
    if by != "random":
        evidence = manager._recorders[""].evidence("PruneNodes")
        scores = rule.criterion.score(case.net, space, evidence)
        weakest = scores.argsort(stable=True)[: round(0.5 * len(space))]
        expected = space.uids[sorted(set(range(len(space))) - set(weakest.tolist()))]
    size = len(space)
    manager.apply(case.net)
    assert len(node_space(case)) == size - round(0.5 * size)
    if expected is not None:
        assert torch.equal(node_space(case).uids, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_evidence_follows_edits_and_survives_a_checkpoint(kind: str) -> None:
    case = Case(kind)
    criterion = rules.Wanda()
    space = node_space(case)
    recorders = case.recorded(criterion, gn.RelationSet.of(case.net, case.net.leaving(space.index)))
    t = case.net.leaving(space.index)[0]
    scores = criterion.score(case.net, gn.RelationSet.of(case.net, [t]), recorders)
    parents = gn.RelationSet.of(case.net, [t]).parents
    gone = space[[0, 3]]
    stays = ~torch.isin(parents, gone.uids)
    saved = {name: recorder.state_dict() for name, recorder in recorders.items()}
    other = criterion.recorders(case.net, gn.RelationSet.of(case.net, [t]))
    for name, recorder in other.items():
        recorder.bind(case.net)
        recorder.load_state_dict(saved[name])
    with case.net.edit() as edit:
        edit.remove_nodes(gone)
    for evidence in (recorders, other):
        after = criterion.score(case.net, gn.RelationSet.of(case.net, [t]), evidence)
        torch.testing.assert_close(after, scores[stays])


@pytest.mark.parametrize("kept", [(2, 4), (4, 8), (1, 3)])
@pytest.mark.parametrize("by", ["magnitude", "wanda"])
def test_a_pattern_keeps_so_many_of_every_group_of_parents(
    case: Case, by: str, kept: tuple[int, int]
) -> None:
    n, m = kept
    rule = PruneWeakest(pattern=kept, by=by, transitions=case.t)
    manager = RuleManager()
    manager.add(rule)
    with manager.recording(case.net):
        case.loss(case.model(case.x)).backward()
    evidence = manager._recorders[""].evidence("PruneWeakest") if by == "wanda" else {}
    scores = rule.criterion.score(case.net, case.relations, evidence)
    source, target = case.net.ends[case.t]
    sizes = case.net.sizes

    def table(values: Tensor) -> Tensor:
        relations = case.relations
        found = torch.full((sizes[target], sizes[source]), -1.0, dtype=torch.float64)
        children = case.net.layers[target].rows(relations.children).long()
        parents = case.net.layers[source].rows(relations.parents).long()
        found[children, parents] = values.double()
        return found

    before = table(scores)
    manager.apply(case.net)
    after = table(torch.ones(len(case.relations)))
    for start in range(0, sizes[source], m):
        own = before[:, start : start + m]
        there = after[:, start : start + m] > 0
        present = (own >= 0).sum(1)
        assert torch.equal(there.sum(1), present.clamp(max=n))
        for row in range(len(own)):
            cut = (own[row] >= 0) & ~there[row]
            if cut.any() and there[row].any():
                assert own[row][cut].max() <= own[row][there[row]].min()
    # A net that has the pattern does not change.
    with case.net.edit() as edit:
        PruneWeakest(pattern=kept, transitions=case.t)(case.net, edit, RuleContext())
    assert edit.receipt is None


def test_frozen_relations_count_as_kept_in_a_pattern() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([8, 6])
    weakest = net.layers[0].outgoing().smallest(fraction=0.5)
    held = set(zip(weakest.parents.tolist(), weakest.children.tolist(), strict=True))
    with net.edit() as edit:
        edit.freeze(weakest)
    with net.edit() as edit:
        PruneWeakest(pattern=(2, 4))(net, edit, RuleContext())
    left = net.layers[0].outgoing()
    pairs = set(zip(left.parents.tolist(), left.children.tolist(), strict=True))
    assert held <= pairs
    for child in net.layers[1]:
        for start in (0, 4):
            group = {(p, child.uid) for p in range(start, start + 4)}
            frozen = len(group & held)
            assert len(group & pairs) == max(2, frozen)


def test_a_transition_keeps_its_share_in_the_scope_model() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([10, 20, 5])
    with torch.no_grad():
        net.transitions[1].weight.mul_(1e-4)

    def pruned(**settings: Any) -> list[int]:
        rule = PruneWeakest(sparsity=0.5, compare="score", **settings)
        with net.edit(trial=True, allow_dead=True) as edit:
            rule(net, edit, RuleContext())
            edit.commit()
            return [transition.size for transition in net.transitions]

    assert pruned() == [150, 0]  # the control: the small transition leaves as a whole
    assert pruned(keep=0.3) == [120, 30]
    assert pruned(keep=10) == [140, 10]


def test_scores_compare_by_mean_or_as_layer_adaptive_magnitudes() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([10, 20, 5])
    sizes = []
    for scale in (1.0, 1e-4):
        with torch.no_grad():
            net.transitions[1].weight.mul_(scale)
        for compare in ("lamp", "mean", "score"):
            rule = PruneWeakest(sparsity=0.5, compare=compare)
            with net.edit(trial=True, allow_dead=True) as edit:
                rule(net, edit, RuleContext())
                edit.commit()
                sizes.append([transition.size for transition in net.transitions])
    assert sizes[0] == sizes[3]
    assert sizes[1] == sizes[4]
    assert sizes[2] != sizes[5] == [150, 0]


def test_a_function_is_a_criterion() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([6, 8, 3])

    def largest_first(net: Any, candidates: gn.RelationSet, evidence: Any) -> Tensor:
        return -candidates.strengths

    strongest = net.select().outgoing().strengths.sort().values[-10:]
    with net.edit() as edit:
        PruneWeakest(fraction=10 / 72, by=largest_first)(net, edit, RuleContext())
    assert len(net.select().outgoing()) == 62
    assert net.select().outgoing().strengths.max() < strongest.min()
    rule = PruneWeakest(fraction=0.5, by=lambda net, relations, evidence: torch.ones(3))
    with net.edit() as edit, pytest.raises(ValueError, match=r"3 .* 62"):
        rule(net, edit, RuleContext())


class FirstNodes:
    """Chooses, and does not score: the nodes with the lowest uids leave, others get a bias."""

    def choose(self, net: Any, candidates: Any, evidence: Any, count: Any) -> rules.Choice:
        order = candidates.uids.argsort()
        biases = rules.Assignment(candidates[order[count:]], torch.tensor([2.0]))
        return rules.Choice(candidates[order[:count]], (biases,))


def test_a_criterion_that_only_chooses_can_assign() -> None:
    net = gn.GrapNet([4, 6, 2])
    first = net.layers[1].biases.detach().clone()
    with net.edit() as edit:
        PruneNodes(0.5, by=FirstNodes())(net, edit, RuleContext())
    assert net.layers[1].uids.tolist() == [7, 8, 9]
    assert net.layers[1].biases.tolist() == [2.0] * 3
    net.undo()
    assert torch.equal(net.layers[1].biases, first)
    with net.edit() as edit, pytest.raises(gn.errors.EditError):
        PruneNodes(0.5, by=FirstNodes(), scope="model")(net, edit, RuleContext())


class ByUid:
    """Chooses by the uid of the node, or of the parent: the smallest leave."""

    def choose(self, net: Any, candidates: Any, evidence: Any, count: Any) -> tuple[Any, None]:
        if isinstance(candidates, gn.RelationSet):
            return candidates.smallest(count=count, key=candidates.parents), None
        return candidates[candidates.uids.argsort()[:count]], None


def test_an_own_choice_is_a_plain_tuple_for_rules() -> None:
    net = gn.GrapNet([6, 8, 4])
    with net.edit() as edit:
        PruneWeakest(0.5, by=ByUid(), transitions=0)(net, edit, RuleContext())
    assert net.layers[0].outgoing().parents.unique().tolist() == [3, 4, 5]
    with net.edit() as edit:
        PruneNodes(0.25, by=ByUid())(net, edit, RuleContext())
    assert net.layers[1].uids.tolist() == list(range(8, 14))


def test_an_own_choice_by_hand_is_that_of_the_rule() -> None:
    net = gn.GrapNet([6, 8, 4])
    relations = net.layers[0].outgoing()
    leaving, assigned = ByUid().choose(net, relations, {}, 16)
    assert leaving.parents.unique().tolist() == [0, 1]
    assert assigned is None
    leaving, _ = ByUid().choose(net, net.layers[1], {}, 3)
    assert leaving.uids.tolist() == [6, 7, 8]


@pytest.mark.parametrize("scope", ["child", "owner", "transition", "model"])
def test_an_own_choice_keeps_to_the_scope_and_the_limits_of_a_rule(scope: Any) -> None:
    class Weakest:
        def choose(self, net: Any, candidates: Any, evidence: Any, count: Any) -> Any:
            assert int(count) > 0
            return candidates.smallest(count=count, key=candidates.strengths), None

    found = []
    for by in (Weakest(), "magnitude"):
        torch.manual_seed(0)
        net = gn.GrapNet([8, 10, 5])
        rule = PruneWeakest(0.4, by=by, scope=scope, compare="score", keep=30)
        budget = rules.Budget(edits=25, children=2)
        with net.edit() as edit:
            rule(net, edit, RuleContext(budget=budget))
        assert net.count().relations == 130 - 25
        found.append(net.state_dict())
    own, built_in = found
    for name, tensor in own.items():
        assert torch.equal(tensor, built_in[name])


def test_the_choice_of_a_criterion_has_two_parts() -> None:
    net = gn.GrapNet([6, 8, 4])
    relations = net.layers[0].outgoing()
    choice = rules.Magnitude().choose(net, relations, {}, 5)
    leaving, assigned = choice
    assert leaving is choice.leaving
    assert assigned is None
    with net.edit() as edit:
        rules.Choice(leaving, [(net.layers[1], torch.ones(8))]).write(edit)
    assert len(net.layers[0].outgoing()) == 43
    assert net.layers[1].biases.tolist() == [1.0] * 8


def test_what_an_own_choice_assigns_comes_and_leaves_with_its_cuts() -> None:
    class Doubled:
        def choose(self, net: Any, candidates: Any, evidence: Any, count: Any) -> Any:
            leaving = candidates.smallest(count=count)
            staying = candidates - leaving
            return leaving, [(staying, 2 * staying.weights.detach())]

    net = gn.GrapNet([6, 8, 4])
    before = copy.deepcopy(net.state_dict())
    kept = net.select().outgoing().largest(count=40).weights.detach()
    with net.edit() as edit:
        PruneWeakest(0.5, by=Doubled(), scope="model")(net, edit, RuleContext())
    assert torch.equal(net.select().outgoing().weights, 2 * kept)
    net.undo()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_quota_ranks_all_of_its_relations() -> None:
    class Half:
        def choose(self, net: Any, candidates: Any, evidence: Any, count: Any) -> Any:
            return candidates[: len(candidates) // 2].smallest(count=count), None

    net = gn.GrapNet([6, 8, 4])
    with net.edit() as edit, pytest.raises(ValueError, match=r"48 .* 24"):
        PruneWeakest(0.4, by=Half(), scope="child", transitions=0)(net, edit, RuleContext())


@pytest.mark.parametrize("settings", [{}, {"scope": "transition"}, {"scope": "model"}])
def test_tiles_are_ranked_by_the_scores_of_their_relations(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([64, 48])
    x = torch.randn(32, 64)
    x[:, :16] *= 1e-3  # weights of these parents count little, whatever their size
    manager = RuleManager()
    manager.add(PruneWeakest(fraction=0.25, by="wanda", tile=16, **settings))
    with manager.recording(net):
        net(x)
    manager.apply(net)
    degrees = net.transitions[0].topology.degrees
    assert degrees[:16].tolist() == [0] * 16
    assert degrees[16:].tolist() == [48] * 48


def test_a_tensor_that_cannot_be_scored_is_left_out_or_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 4, 3))
    net = gn.adopt(model, torch.randn(2, 3, 9, 9))
    recorders = PruneWeakest(fraction=0.5, by="wanda").recorders(net)
    assert len(recorders) == 2
    with pytest.raises(gn.errors.EditError):
        PruneWeakest(fraction=0.5, by="wanda", transitions="1").recorders(net)


def test_per_sample_gradients_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Case("conv").score(rules.Fisher())
    monkeypatch.setattr("grapnet.rules._saliency.CELLS", 64)
    torch.testing.assert_close(Case("conv").score(rules.Fisher()), whole)
