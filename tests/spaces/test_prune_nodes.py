"""PruneNodes and the costs of a model: exact counts, budgets that hold, and what must stay."""

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import grapnet as gn
from grapnet.rules import Every, PruneNodes, RuleContext, RuleManager
from grapnet.spaces import Adopted
from tests.spaces import oracle, zoo

# Grouped and depthwise convolutions, concatenation, transposed ones, heads, tied weights.
COUNTED = [
    "resnet",
    "mobilenet_v3",
    "resnext",
    "densenet",
    "unet",
    "conv3d",
    "autoencoder",
    "two_inputs_two_outputs",
    "vit",
    "multihead_encoder",
    "gqa_decoder",
    "gpt_tied",
]


def adopted(name: str) -> tuple[Adopted, zoo.Case]:
    case = zoo.MODELS[name]()
    case.model.eval()
    return gn.adopt(case.model, *case.inputs, **case.kwargs), case


def attention_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """What torch counts for attention on a GPU; it leaves out the operator of the CPU."""
    batch, heads, rows, width = q
    return 2 * batch * heads * rows * k[-2] * (width + v[-1])


def flops_by_torch(case: zoo.Case) -> int:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={operator: attention_flops})
    with counter, torch.no_grad():
        case.call()
    return counter.get_total_flops()


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def prune(net: Any, rule: Any) -> gn.Commit | None:
    with net.edit() as edit:
        rule(net, edit, RuleContext())
    return edit.receipt


def wide() -> nn.Sequential:
    """Returns a chain of convolutions of 64, 48 and 36 channels, wide enough for fine budgets."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 48, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(48, 36, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(36, 5),
    )


def wide_net() -> Adopted:
    return gn.adopt(wide(), torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("name", COUNTED)
def test_costs_are_those_that_torch_counts_before_and_after_an_edit(name: str) -> None:
    net, case = adopted(name)
    for _ in range(2):
        count = net.count()
        assert count.flops == flops_by_torch(case)
        assert count.macs == count.flops // 2
        assert count.parameters == parameters_of(case.model)
        assert count.nodes == sum(len(space) for space in net.spaces)
        held = [t for t in (*case.model.parameters(), *case.model.buffers()) if t.dim()]
        assert count.bytes == sum(t.numel() * t.element_size() for t in held)
        prune(net, PruneNodes(0.3))


@pytest.mark.parametrize("scope", ["space", "model"])
@pytest.mark.parametrize("budget", [{"macs": 0.6}, {"parameters": 0.7}])
@pytest.mark.parametrize("name", ["resnet", "mobilenet_v3", "resnext", "inception", "gpt_tied"])
def test_a_model_keeps_within_its_budget(name: str, budget: dict[str, Any], scope: Any) -> None:
    net, case = adopted(name)
    before = net.count()
    prune(net, PruneNodes(**budget, scope=scope))
    after = net.count()
    ((cost, share),) = budget.items()
    assert 0.5 * share * getattr(before, cost) < getattr(after, cost)
    assert getattr(after, cost) <= share * getattr(before, cost)
    assert after.flops == flops_by_torch(case)
    gn.check(net)


@pytest.mark.parametrize("scope", ["space", "model"])
@pytest.mark.parametrize("cost", ["macs", "parameters"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_no_more_goes_than_the_budget_needs(share: float, cost: str, scope: Any) -> None:
    net = wide_net()
    before = getattr(net.count(), cost)
    prune(net, PruneNodes(**{cost: share}, scope=scope))
    assert share - 0.02 < getattr(net.count(), cost) / before <= share


def test_many_small_cuts_lead_to_the_sizes_of_one_large_cut() -> None:
    at_once = wide_net()
    macs = at_once.count().macs
    prune(at_once, PruneNodes(macs=round(0.25 * macs)))
    in_steps = wide_net()
    for step in range(1, 31):
        prune(in_steps, PruneNodes(macs=round((1 - 0.75 * step / 30) * macs)))
    sizes = [[len(space) for space in net.spaces] for net in (at_once, in_steps)]
    assert sizes[0] == sizes[1]
    assert in_steps.version > 20


def test_an_int_is_an_absolute_budget_and_a_model_within_it_does_not_change() -> None:
    net = wide_net()
    target = net.count().macs // 3
    assert prune(net, PruneNodes(macs=target)) is not None
    assert net.count().macs <= target
    assert prune(net, PruneNodes(macs=target)) is None
    assert prune(net, PruneNodes(parameters=1.0)) is None
    assert prune(net, PruneNodes(latency=1.0)) is None


def test_a_fraction_takes_the_weakest_of_every_space() -> None:
    net = wide_net()
    spaces = [net.space("0"), net.space("3")]
    expected = [space.weakest(fraction=0.3, multiple=8).uids for space in spaces]
    receipt = prune(net, PruneNodes(0.3, multiple=8, spaces=spaces))
    assert receipt is not None
    gone = [change.gone.uids for change in receipt.change.layers.values()]
    assert all(torch.equal(a, b) for a, b in zip(gone, expected, strict=True))
    assert [len(space) for space in spaces] == [48, 40]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"count": 1, "fraction": 0.5},
        {"fraction": 1.5},
        {"count": -1},
        {"count": 2, "key": torch.ones(3)},
        {"count": 2, "key": torch.full((64,), torch.nan)},
    ],
    ids=str,
)
def test_a_space_and_a_selection_refuse_the_same(asked: dict[str, Any]) -> None:
    model = wide_net()
    with pytest.raises(ValueError, match=r"count|fraction|key"):
        model.space("0").weakest(**asked)
    net = gn.GrapNet([16, 4])
    with pytest.raises(ValueError, match=r"count|fraction|key"):
        net.layers[0].outgoing().smallest(**asked)


def test_sizes_of_tensors_stay_multiples_and_heads_count_by_their_width() -> None:
    net = wide_net()
    prune(net, PruneNodes(macs=0.5, multiple=8))
    assert [len(net.space(name)) % 8 for name in ("0", "3", "5")] == [0, 0, 0]
    # Two heads of eight entries stay, which are sixteen rows; of channels, a multiple of eight.
    encoder, _ = adopted("vit")
    prune(encoder, PruneNodes(0.34, multiple=8))
    sizes = {space.name: len(space) for space in encoder.spaces}
    assert sizes["blocks.0.attn.qkv#2"] == sizes["blocks.1.attn.qkv#2"] == 2
    assert sizes["blocks.0.fc1"] == sizes["blocks.1.fc1"] == 24


def test_the_scope_model_ranks_nodes_of_different_scales_together_and_keeps_some_of_each() -> None:
    net = wide_net()
    model = net.model
    with torch.no_grad():
        # A smaller scale of a whole space is no reason to take its nodes, a weak node is.
        for tensor in (model[3].weight, model[3].bias):
            tensor.mul_(1e-3)
        model[0].weight[:20].mul_(1e-3)
        model[0].bias[:20].mul_(1e-3)
        model[1].weight[:20].mul_(1e-3)
        model[3].weight[:, :20].mul_(1e-3)
    weak = net.space("0").uid[:20]
    total = sum(len(net.space(name)) for name in ("0", "3", "5"))
    receipt = prune(net, PruneNodes(20 / total, scope="model", keep=4))
    assert receipt is not None
    (change,) = receipt.change.layers.values()
    assert torch.equal(change.gone.uids, weak)
    prune(net, PruneNodes(0.9, scope="model", keep=4))
    assert min(len(net.space(name)) for name in ("0", "3", "5")) == 4


def test_scores_of_ones_own_are_ranked_as_they_are() -> None:
    net = wide_net()
    first = net.space("0")

    def score(net: Adopted, space: Any, evidence: Any) -> Tensor:
        offset = 0.0 if space is first else 100.0
        return torch.arange(len(space)) + offset

    kept = first.uid[10:]
    prune(net, PruneNodes(10 / 148, scope="model", by=score))
    assert torch.equal(net.space("0").uid, kept)
    assert [len(net.space(name)) for name in ("3", "5")] == [48, 36]


class Slow(nn.Module):
    """Takes a time in proportion to its width."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 40)
        self.down = nn.Linear(40, 2)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1e-4 * len(self.up.weight))
        return self.down(self.up(x).relu())


def test_a_budget_of_latency_is_measured_on_copies() -> None:
    model = Slow()
    net = gn.adopt(model, torch.randn(3, 4))
    receipt = prune(net, PruneNodes(latency=0.5))
    assert receipt is not None
    assert 5 <= len(net.space("up")) <= 21
    remark = receipt.operations[-1]
    assert remark["latency_after"] <= 0.5 * remark["latency_before"]


def test_a_manager_prunes_while_the_model_trains() -> None:
    model = wide()
    optimizer = torch.optim.Adam(model.parameters())
    net = gn.adopt(model, torch.randn(2, 3, 8, 8), optimizer=optimizer)
    manager = RuleManager()
    manager.add(PruneNodes(0.25), schedule=Every(2, start=1, until=3))
    manager.start(net)
    x = torch.randn(8, 3, 8, 8)
    for step in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        manager.apply(net, step)
    assert [commit.reason for commit in net.history] == [
        "PruneNodes at step 1",
        "PruneNodes at step 3",
    ]
    assert [len(net.space(name)) for name in ("0", "3", "5")] == [36, 27, 20]
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (36, 3, 3, 3)
    assert net.history[0].operations[-1]["nodes"] == 16 + 12 + 9


def test_a_dry_run_tells_the_truth_and_leaves_no_trace() -> None:
    net, case = adopted("resnet")
    model = case.model
    optimizer = torch.optim.Adam(model.parameters())
    gn.attach(optimizer, net)
    oracle.first_tensor(case.call()).sum().backward()
    optimizer.step()
    model.train()
    manager = RuleManager()
    manager.add(PruneNodes(macs=0.5))
    before = oracle.snapshot(model, optimizer)
    first = net.count()
    modes = []

    def largest(present: nn.Module) -> float:
        assert present is model
        modes.append(present.training)
        return oracle.first_tensor(case.call()).abs().max()

    preview = manager.apply(net, dry_run=True, probe=largest)
    assert oracle.same(before, oracle.snapshot(model, optimizer)) == []
    assert net.version == 0 or net.history == []
    assert modes == [False, False]
    assert manager.apply(net, dry_run=True, probe=case.inputs[0]).output_change > 0

    sizes = {space.name: len(space) for space in net.spaces}
    commit = manager.apply(net)
    assert commit is not None
    assert (preview.before, preview.after) == (first, net.count())
    assert preview.macs == net.count().macs - first.macs < 0
    changed = {space.name: (sizes[space.name], len(space)) for space in net.spaces}
    assert preview.spaces == {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    model.eval()
    assert preview.measured is not None
    assert preview.measured[1] == pytest.approx(largest(model).item())
    text = str(preview)
    assert f"{first.macs:,}" in text
    assert all(f"{name}: {a} → {b} nodes" in text for name, (a, b) in preview.spaces.items())
    model.train()
    net.undo()
    # What was removed comes back without gradients.
    differences = oracle.same(before, oracle.snapshot(model, optimizer))
    assert [line for line in differences if not line.startswith("gradient of")] == []


def test_a_manager_finds_an_adopted_model_beside_nets() -> None:
    body = wide()
    net = gn.adopt(body, torch.randn(2, 3, 8, 8))
    head = gn.GrapNet([5, 20, 3])
    manager = RuleManager()
    manager.add(PruneNodes(0.5))
    commits = manager.apply(nn.ModuleDict({"body": body, "head": head}))
    assert list(commits) == ["body", "head"]
    assert head.sizes == [5, 10, 3]
    assert len(net.space("0")) == 32
    assert list(manager.apply(body)) == [""]
    with pytest.raises(ValueError, match="adopt"):
        manager.apply(wide())


def test_nodes_that_another_rule_removes_count_as_gone() -> None:
    net = wide_net()
    space = net.space("0")
    strongest = space[space.norms().argsort(descending=True)[:20].sort().values]
    target = net.count().macs // 2

    def first(net: Any, edit: Any, context: RuleContext) -> None:
        edit.remove_nodes(strongest)

    manager = RuleManager()
    manager.add(first)
    manager.add(PruneNodes(macs=target, multiple=4))
    manager.apply(net)
    assert 0.9 * target < net.count().macs <= target
    assert len(space) % 4 == 0


def test_settings_name_spaces_so_that_a_checkpoint_can_hold_them() -> None:
    net = wide_net()
    assert PruneNodes(0.5, spaces=net.space("0")).spaces == ("0",)
    assert PruneNodes(0.5, spaces=[net.space("0"), "3"]).spaces == ("0", "3")
    other = gn.GrapNet([4, 6, 6, 2])
    assert PruneNodes(0.5, spaces=other.layers[1:3]).spaces == (1, 2)
    manager = RuleManager()
    manager.add(PruneNodes(0.5, spaces=net.space("0")))
    state = copy.deepcopy(manager.state_dict())
    manager.load_state_dict(state)


def test_spaces_that_are_pinned_frozen_or_under_a_norm_stay() -> None:
    net, case = adopted("convnext")
    normalised = [space for space in net.spaces if space.verdict == "normalised"]
    pinned = [space for space in net.spaces if space.pins]
    assert normalised
    assert pinned
    sizes = [len(space) for space in (*normalised, *pinned)]
    frozen = next(space for space in net.spaces if space.verdict not in ("normalised", "pinned"))
    parameter = dict(case.model.named_parameters())[frozen.writers[0]]
    parameter.requires_grad_(False)
    size = len(frozen)
    assert prune(net, PruneNodes(0.5)) is not None
    assert [len(space) for space in (*normalised, *pinned)] == sizes
    assert len(frozen) == size
    # Asked for by name, a space under a norm is pruned.
    parameter.requires_grad_()
    assert prune(net, PruneNodes(0.5, spaces=normalised[0])) is not None


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (PruneNodes(0.5, spaces="8"), gn.errors.EditError),
        (PruneNodes(0.5, spaces="5"), gn.errors.EditError),
        (PruneNodes(0.5, spaces="nothing"), KeyError),
        (PruneNodes(macs=0.01, multiple=16), gn.errors.EditError),
        (PruneNodes(0.5, by=lambda net, space, evidence: torch.ones(3)), ValueError),
        (
            PruneNodes(0.5, by=lambda net, space, evidence: torch.full((len(space),), torch.nan)),
            ValueError,
        ),
    ],
    ids=["pinned", "frozen", "unknown", "too little", "short score", "NaN"],
)
def test_what_cannot_be_pruned_is_refused_and_nothing_changes(rule: Any, error: Any) -> None:
    net = wide_net()
    net.model[5].weight.requires_grad_(False)
    before = oracle.snapshot(net.model)
    with pytest.raises(error):
        prune(net, rule)
    assert oracle.same(before, oracle.snapshot(net.model)) == []
    assert net.version == 0


def test_a_model_without_a_space_to_prune_is_refused() -> None:
    net = gn.adopt(wide().requires_grad_(False), torch.randn(2, 3, 8, 8))
    with pytest.raises(gn.errors.EditError, match="no space"):
        prune(net, PruneNodes(0.5))


def test_hidden_layers_of_a_net_are_pruned_and_frozen_nodes_stay() -> None:
    net = gn.GrapNet([6, 30, 20, 4])
    with net.edit() as edit:
        edit.freeze(net.layers[1][:5])
    frozen = net.layers[1].uid[:5]
    before = net.count()
    prune(net, PruneNodes(macs=0.4, keep=2))
    after = net.count()
    assert 0.3 * before.macs < after.macs <= 0.4 * before.macs
    assert (net.sizes[0], net.sizes[-1]) == (6, 4)
    assert torch.isin(frozen, net.layers[1].uid).all()
    other = gn.GrapNet([6, 30, 20, 4])
    prune(other, PruneNodes(0.5, spaces=2))
    assert other.sizes == [6, 30, 10, 4]
    for rule in (PruneNodes(0.5, spaces=3), PruneNodes(latency=0.5)):
        with pytest.raises(gn.errors.EditError):
            prune(net, rule)
