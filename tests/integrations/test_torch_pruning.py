"""Torch-Pruning's names: groups, importances and pruners as its users call them, on adopted
models.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import grapnet as gn
import grapnet.integrations.torch_pruning as tp


class Residual(nn.Module):
    """A stem and a block around which its input is added, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(8, 12, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))


class Grouped(nn.Module):
    """A convolution in groups between two others, and a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(3, 16, 1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.after = nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.depthwise(self.grouped(self.before(x))))


class Attention(nn.Module):
    """An attention with layers of its own for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q = nn.Linear(12, 24)
        self.k = nn.Linear(12, 24)
        self.v = nn.Linear(12, 24)
        self.out = nn.Linear(24, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = (q @ k.transpose(2, 3)).softmax(3) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Scale(nn.Module):
    """A layer of one's own: its inputs and outputs are the same channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.scale = nn.Parameter(torch.ones(width))
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * self.scale)


class ScalePruner(tp.pruner.BasePruningFunc):
    def prune_out_channels(self, layer, idxs):
        keep = [index for index in range(layer.width) if index not in idxs]
        layer.width -= len(idxs)
        layer.scale = self._prune_parameter_and_grad(layer.scale, keep, pruning_dim=0)
        tp.prune_linear_in_channels(layer.mix, idxs)
        tp.prune_linear_out_channels(layer.mix, idxs)
        return layer

    prune_in_channels = prune_out_channels

    def get_out_channels(self, layer):
        return layer.width

    get_in_channels = get_out_channels


IMAGES = torch.zeros(2, 3, 8, 8)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def built(model: nn.Module, example=IMAGES) -> tp.DependencyGraph:
    return tp.DependencyGraph().build_dependency(model, example_inputs=example)


def sizes(model: Residual) -> tuple[int, int]:
    """The widths of the stream and of the block."""
    return model.stem.out_channels, model.conv1.out_channels


def test_a_group_lists_the_layers_that_have_the_channels() -> None:
    model = Residual()
    graph = built(model)
    group = graph.get_pruning_group(model.stem, tp.prune_conv_out_channels, idxs=[1, 6])
    found = {(dep.layer, dep.handler): idxs for dep, idxs in group}
    flat = [*range(16, 32), *range(96, 112)]
    assert found == {
        (model.stem, tp.prune_conv_out_channels): [1, 6],
        (model.conv1, tp.prune_conv_in_channels): [1, 6],
        (model.conv2, tp.prune_conv_out_channels): [1, 6],
        (model.bn2, tp.prune_batchnorm_out_channels): [1, 6],
        (model.head, tp.prune_linear_in_channels): flat,
    }
    assert group[0].dep.target.module is model.stem
    assert group.n_nodes == 2
    assert {tuple(sorted(set(item.root_idxs))) for item in group} == {(0, 1)}
    assert "stem" in str(group)
    assert str(flat) in group.details()
    assert graph.check_pruning_group(group)


def test_pruning_a_group_equals_silencing_its_readers() -> None:
    model = Residual().eval()
    images = torch.randn(2, 3, 8, 8)
    graph = built(model)
    silent = Residual().eval()
    silent.load_state_dict(model.state_dict())
    with torch.no_grad():
        silent.conv1.weight[:, [1, 6]] = 0
        silent.head.weight[:, [*range(16, 32), *range(96, 112)]] = 0
    graph.get_pruning_group(model.stem, tp.prune_conv_out_channels, idxs=[1, 6]).prune()
    assert sizes(model) == (6, 12)
    assert model.head.in_features == 6 * 16
    torch.testing.assert_close(model(images), silent(images))


def test_channels_behind_a_flatten_name_their_node() -> None:
    model = Residual()
    graph = built(model)
    group = graph.get_pruning_group(model.head, tp.prune_linear_in_channels, idxs=[17])
    group.prune()
    assert model.head.in_features == 7 * 16
    assert sizes(model) == (7, 12)


def test_channels_that_do_not_exist_are_refused() -> None:
    model = Residual()
    graph = built(model)
    with pytest.raises(ValueError, match="9"):
        graph.get_pruning_group(model.stem, tp.prune_conv_out_channels, idxs=[0, 9])
    with pytest.raises(ValueError, match="input"):
        graph.get_pruning_group(model.stem, tp.prune_conv_in_channels, idxs=[0])
    with pytest.raises(ValueError, match="dependency graph"):
        graph.get_pruning_group(nn.Linear(2, 2), tp.prune_linear_out_channels, idxs=[0])
    whole = graph.get_pruning_group(model.conv1, tp.prune_conv_out_channels, idxs=range(12))
    assert not graph.check_pruning_group(whole)


def test_all_groups_can_be_pruned_one_after_the_other() -> None:
    model = Residual()
    graph = built(model)
    roots = []
    for group in graph.get_all_groups(ignored_layers=[model.head]):
        roots.append(group[0].dep.layer)
        group.prune(idxs=[2, 4])
    assert roots == [model.stem, model.conv1]
    assert sizes(model) == (6, 10)


def test_outputs_go_only_when_they_are_asked_for() -> None:
    model = Residual()
    graph = built(model)
    graph.get_pruning_group(model.head, tp.prune_linear_out_channels, idxs=[0]).prune()
    assert model(IMAGES).shape == (2, 4)
    importance = tp.importance.MagnitudeImportance()
    tp.pruner.MagnitudePruner(model, IMAGES, importance, pruning_ratio=0.5).step()
    assert model(IMAGES).shape == (2, 4)
    assert sizes(model) == (4, 6)


@pytest.mark.parametrize(
    ("importance", "expected"),
    [
        (tp.importance.MagnitudeImportance(p=1, normalizer=None, group_reduction="first"), [0, 2]),
        (tp.importance.BNScaleImportance(normalizer=None), [3, 1]),
        (tp.importance.TaylorImportance(normalizer=None), [0, 2]),
        (tp.importance.HessianImportance(normalizer=None), [0, 2]),
        (tp.importance.LAMPImportance(group_reduction="first"), [0, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_importances_order_channels(importance, expected: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([0.1, 3.0, 0.2, 5.0])[:, None].expand(4, 3))
        model[1].weight.copy_(torch.tensor([9.0, 0.2, 8.0, 0.1]))
        model[2].weight.fill_(0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if not isinstance(importance, tp.importance.BNScaleImportance):
        importance.target_types = (nn.Linear,)
    group = built(model, torch.zeros(2, 3)).get_pruning_group(
        model[0], tp.prune_linear_out_channels, idxs=[0, 1, 2, 3]
    )
    assert importance(group).argsort()[:2].tolist() == expected


def test_reductions_and_normalizers_agree() -> None:
    model = Residual()
    graph = built(model)
    group = graph.get_pruning_group(model.stem, tp.prune_conv_out_channels, idxs=range(8))

    def score(**kwargs) -> torch.Tensor:
        return tp.importance.MagnitudeImportance(bias=True, **kwargs)(group)

    rows = score(group_reduction=None, normalizer=None)
    # The stem and its bias, conv1, conv2, bn2 and its bias, the head.
    assert rows.shape == (7, 8)
    for name, expected in {
        "mean": rows.mean(0),
        "sum": rows.sum(0),
        "max": rows.amax(0),
        "prod": rows.prod(0),
        "first": rows[0],
        "gate": rows[-1],
    }.items():
        torch.testing.assert_close(score(group_reduction=name, normalizer=None), expected)
    mean = rows.mean(0)
    torch.testing.assert_close(score(normalizer="mean").mean(), torch.tensor(1.0))
    torch.testing.assert_close(score(normalizer="sum").sum(), torch.tensor(1.0))
    torch.testing.assert_close(score(normalizer="max").max(), torch.tensor(1.0))
    assert score(normalizer="standarization").min() == 0
    torch.testing.assert_close(score(normalizer="gaussian").std(), torch.tensor(1.0))
    for name in ("sentinel_0.5", "lamp"):
        assert torch.equal(score(normalizer=name).argsort(), mean.argsort())
    assert torch.equal(score(normalizer=lambda scores: -scores), -mean)
    with pytest.raises(ValueError, match="nonsense"):
        score(normalizer="nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        score(group_reduction="nonsense")


def test_taylor_asks_for_gradients() -> None:
    model = Residual()
    pruner = tp.pruner.BasePruner(model, IMAGES, tp.importance.TaylorImportance())
    with pytest.raises(RuntimeError, match="backward"):
        pruner.step()
    assert sizes(model) == (8, 12)


def test_the_geometric_median_goes_first() -> None:
    model = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [2.0], [9.0]]))
        model[1].weight.fill_(1.0)
    graph = built(model, torch.zeros(1, 1))
    group = graph.get_pruning_group(model[0], tp.prune_linear_out_channels, idxs=[0, 1, 2])
    assert tp.importance.FPGMImportance(p=1)(group).argmin() == 1


def test_a_pruner_reaches_its_ratio_in_steps() -> None:
    model = Residual()
    pruner = tp.pruner.MagnitudePruner(
        model,
        IMAGES,
        importance=tp.importance.MagnitudeImportance(),
        pruning_ratio=0.5,
        iterative_steps=2,
        ignored_layers=[model.head],
    )
    found = []
    for _ in range(2):
        pruner.step()
        found.append(sizes(model))
    assert found == [(6, 9), (4, 6)]
    with pytest.warns(UserWarning, match="2 steps"):
        pruner.step()


def test_the_weakest_channels_go() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        for layer, dim in ((model[0], 0), (model[2], 1)):
            layer.weight.copy_(torch.ones_like(layer.weight))
            layer.weight.index_fill_(dim, torch.tensor([1, 4]), 0.1)
    importance = tp.importance.MagnitudeImportance()
    pruner = tp.pruner.MagnitudePruner(model, torch.zeros(1, 3), importance, pruning_ratio=1 / 3)
    pruner.step()
    assert model[0].weight.eq(1).all()
    assert model[0].out_features == 4


def test_global_pruning_ranks_all_layers_together() -> None:
    model = Residual()
    with torch.no_grad():
        model.conv1.weight.mul_(1e-3)
        model.bn1.weight.mul_(1e-3)
        model.conv2.weight.mul_(1e-3)
    pruner = tp.pruner.MagnitudePruner(
        model,
        IMAGES,
        importance=tp.importance.MagnitudeImportance(normalizer=None),
        global_pruning=True,
        pruning_ratio=0.4,
        max_pruning_ratio=0.5,
    )
    pruner.step()
    # All eight of the weakest are in conv1, of which at most half may go.
    assert sizes(model) == (8, 6)


def test_ratios_of_single_layers_and_rounding() -> None:
    model = Residual()
    pruner = tp.pruner.MagnitudePruner(
        model,
        IMAGES,
        importance=tp.importance.RandomImportance(),
        pruning_ratio=0.1,
        pruning_ratio_dict={model.conv1: 0.3},
        round_to=4,
    )
    pruner.step()
    assert sizes(model) == (4, 8)


def test_ignored_layers_keep_their_outputs() -> None:
    model = Residual()
    importance = tp.importance.RandomImportance()
    pruner = tp.pruner.MagnitudePruner(model, IMAGES, importance, ignored_layers=[model.conv2])
    pruner.step()
    assert sizes(model) == (8, 6)


def test_isomorphic_groups_are_ranked_together() -> None:
    layers = []
    for _ in range(2):
        layers += [nn.Linear(6, 6), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(6, 2))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.mul_(1e-3)
    pruner = tp.pruner.MagnitudePruner(
        model,
        torch.zeros(1, 6),
        importance=tp.importance.MagnitudeImportance(normalizer=None, group_reduction="first"),
        global_pruning=True,
        isomorphic=True,
    )
    pruner.step()
    assert model[0].out_features + model[2].out_features == 6


def test_an_interactive_step_prunes_what_the_loop_prunes() -> None:
    model = Residual()
    importance = tp.importance.MagnitudeImportance()
    pruner = tp.pruner.MagnitudePruner(model, IMAGES, importance, pruning_ratio=0.5)
    for group in pruner.step(interactive=True):
        if group[0].dep.layer is model.conv1:
            group.prune()
            assert model.conv2.in_channels == 6
    assert sizes(model) == (8, 6)


def test_channels_in_groups_go_and_groups_stay() -> None:
    model = Grouped()
    pruner = tp.pruner.MagnitudePruner(model, IMAGES, tp.importance.MagnitudeImportance())
    pruner.step()
    assert model.before.out_channels == 8
    assert (model.grouped.groups, model.grouped.out_channels) == (4, 8)
    assert model.depthwise.groups == 8
    assert model(IMAGES).shape == (2, 4, 8, 8)


def test_heads_and_the_channels_in_them() -> None:
    model = Attention()
    example = torch.randn(2, 5, 12)
    graph = built(model, example)
    with pytest.raises(ValueError, match="alone"):
        graph.get_pruning_group(model.v, tp.prune_linear_out_channels, idxs=[0])
    # The first channel of every head.
    graph.get_pruning_group(model.v, tp.prune_linear_out_channels, idxs=[0, 6, 12, 18]).prune()
    assert (model.v.out_features, model.q.out_features, model.out.in_features) == (20, 24, 20)


def test_a_pruner_removes_heads_when_asked() -> None:
    model = Attention()
    layers = {model.q: 4, model.k: 4, model.v: 4}
    pruner = tp.pruner.BasePruner(
        model,
        torch.randn(2, 5, 12),
        tp.importance.MagnitudeImportance(),
        num_heads=layers,
        prune_num_heads=True,
        prune_head_dims=False,
        head_pruning_ratio=0.5,
    )
    pruner.step()
    assert model.heads == 2
    assert (model.q.out_features, model.v.out_features, model.out.in_features) == (12, 12, 12)


def test_one_layer_is_pruned_by_hand() -> None:
    model = Residual()
    pruner = tp.pruner.BasePruner(model, IMAGES, tp.importance.MagnitudeImportance())
    pruner.manual_prune_width(model.conv1, tp.prune_conv_out_channels, 0.25)
    assert sizes(model) == (8, 9)
    pruner.manual_prune_width(model.conv1, tp.prune_conv_in_channels, [0, 1])
    assert sizes(model) == (6, 9)


def test_scales_of_a_group_shrink_together() -> None:
    model = Residual()
    importance = tp.importance.BNScaleImportance()
    pruner = tp.pruner.BNScalePruner(model, IMAGES, importance, reg=0.1, group_lasso=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    pruner.regularize(model)
    torch.testing.assert_close(model.bn1.weight.grad, torch.full((12,), 0.1))
    assert not model.conv1.weight.grad.any()


class Transformer(nn.Module):
    """An attention of torch in a residual stream, whose width is also a number of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 24
        self.embed = nn.Linear(5, 24)
        self.norm = nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).reshape(len(x), -1, self.width)
        y = self.norm(x)
        return self.head(x + self.attention(y, y, y, need_weights=False)[0])


def test_heads_of_torch_become_narrower_with_their_stream() -> None:
    model = Transformer()
    example = torch.randn(2, 7, 5)
    graph = built(model, example)
    group = graph.get_pruning_group(model.embed, tp.prune_linear_out_channels, idxs=[0, 1, 2])
    with pytest.raises(gn.errors.EditError):
        group.prune()
    pruner = tp.pruner.MagnitudePruner(model, example, tp.importance.MagnitudeImportance())
    pruner.step()
    attention = model.attention
    assert (model.width, attention.embed_dim, attention.head_dim) == (12, 12, 3)
    assert attention.in_proj_weight.shape == (36, 12)
    assert model(example).shape == (2, 7, 3)
    pruner.DG.net.undo()
    assert (model.width, attention.embed_dim) == (24, 24)


def test_optimizers_follow_and_steps_can_be_undone() -> None:
    model = Residual()
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.randn(2, 3, 8, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()

    step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weight = model.conv1.weight
    pruner = tp.pruner.MagnitudePruner(model, IMAGES, tp.importance.TaylorImportance())
    gn.attach(optimizer, pruner.DG.net)
    pruner.step()
    assert model.conv1.weight is weight
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape == (6, 4, 3, 3)
    pruner.DG.net.undo()
    assert sizes(model) == (8, 12)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    step()


def test_a_model_that_is_adopted_keeps_its_graph() -> None:
    model = Residual()
    net = gn.adopt(model, IMAGES)
    graph = built(model)
    assert graph.net is net
    tp.prune_conv_out_channels(model.conv1, idxs=[0])
    tp.prune_batchnorm_out_channels(model.bn1, idxs=[0])
    tp.prune_conv_in_channels(model.conv2, idxs=[0])
    assert built(model).net is not net


def test_layers_of_ones_own_are_pruned_with_their_numbers() -> None:
    model = nn.Sequential(nn.Linear(3, 6), Scale(6), nn.Linear(6, 2))
    graph = tp.DependencyGraph()
    graph.register_customized_layer(Scale, ScalePruner())
    graph.build_dependency(model, torch.randn(2, 3))
    group = graph.get_pruning_group(model[0], tp.prune_linear_out_channels, idxs=[0, 5])
    assert [dep.layer for dep, _ in group] == [model[0], model[1], model[2]]
    group.prune()
    assert (model[0].out_features, model[1].width, model[2].in_features) == (4, 4, 4)
    assert model(torch.randn(2, 3)).shape == (2, 2)


def test_a_pruner_that_leaves_other_shapes_is_refused() -> None:
    class Wrong(ScalePruner):
        def prune_out_channels(self, layer, idxs):
            return layer

        prune_in_channels = prune_out_channels

    model = nn.Sequential(nn.Linear(3, 6), Scale(6), nn.Linear(6, 2))
    pruners = {Scale: Wrong()}
    graph = tp.DependencyGraph()
    graph.build_dependency(model, torch.randn(2, 3), customized_pruners=pruners)
    with pytest.raises(gn.errors.EditError):
        graph.get_pruning_group(model[0], tp.prune_linear_out_channels, idxs=[0]).prune()
    assert model[0].out_features == 6


def test_histories_replay() -> None:
    model = Residual()
    pruner = tp.pruner.MagnitudePruner(
        model, IMAGES, tp.importance.MagnitudeImportance(), iterative_steps=2
    )
    pruner.step()
    pruner.step()
    history = json.loads(json.dumps(pruner.pruning_history()))
    other = Residual()
    built(other).load_pruning_history(history)
    other.load_state_dict(model.state_dict())
    assert sizes(other) == (4, 6)


def test_two_groups_on_one_axis_replay() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 8)
            self.left = nn.Linear(4, 2)
            self.right = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = self.first(x).split([self.left.in_features, self.right.in_features], 1)
            return self.left(left) + self.right(right)

    example = torch.randn(2, 3)
    model = Split()
    pruner = tp.pruner.MagnitudePruner(model, example, tp.importance.MagnitudeImportance())
    other = Split()
    other.load_state_dict(model.state_dict())
    pruner.step()
    built(other, example).load_pruning_history(pruner.pruning_history())
    assert other.first.out_features == 4
    assert torch.equal(other.first.weight, model.first.weight)


def test_state_dicts_carry_sizes_and_numbers(tmp_path: Path) -> None:
    model = Residual()
    model.note = 7
    tp.pruner.MagnitudePruner(model, IMAGES, tp.importance.MagnitudeImportance()).step()
    tp.save(tp.state_dict(model), tmp_path / "model.pth")
    other = Residual()
    weight = other.conv1.weight
    tp.load_state_dict(other, tp.load(tmp_path / "model.pth"))
    assert other.note == 7
    assert other.conv1.weight is weight
    assert sizes(other) == (4, 6)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(other.eval()(images), model.eval()(images))


@pytest.mark.parametrize(
    "kind", [tp.pruner.GroupNormPruner, tp.pruner.BNScalePruner, tp.pruner.GrowingRegPruner]
)
def test_regularizers_pull_weights_to_zero(kind) -> None:
    model = Residual()
    pruner = kind(model, IMAGES, tp.importance.GroupMagnitudeImportance(), reg=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    pruner.update_regularizer()
    pruner.regularize(model)
    assert model.bn1.weight.grad.gt(0).all()
    if kind is not tp.pruner.BNScalePruner:
        assert torch.equal(model.conv1.weight.grad.sign(), model.conv1.weight.sign())
    pruner.step()
    pruner.update_regularizer()
    pruner.regularize(model)
    assert sizes(model) == (4, 6)


def test_growing_strengths_are_largest_for_the_weakest() -> None:
    model = Residual()
    pruner = tp.pruner.GrowingRegPruner(model, IMAGES, tp.importance.GroupMagnitudeImportance())
    pruner.update_reg()
    group = next(iter(pruner.DG.get_all_groups()))
    weakest = tp.importance.GroupMagnitudeImportance()(group).argmin()
    assert pruner._strengths[0].argmax() == weakest


def test_counts_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    example = torch.zeros(5, 3)
    assert tp.utils.count_ops_and_params(model, example) == (3 * 6 + 6 * 2, 24 + 14)
    macs, params, by_layer, params_by_layer = tp.utils.count_ops_and_params(
        model, example, layer_wise=True
    )
    assert (by_layer[model], by_layer[model[0]], by_layer[model[1]]) == (macs, 18, 0)
    assert (params_by_layer[model], params_by_layer[model[2]]) == (params, 14)
    tp.utils.print_tool.before_pruning(model)
    graph = built(model, example)
    graph.get_pruning_group(model[0], tp.prune_linear_out_channels, idxs=[0]).prune()
    tp.utils.print_tool.after_pruning(model)
    assert "out_features=6, bias=True) => (0): Linear" in capsys.readouterr().out
    mean, deviation = tp.utils.benchmark.measure_latency(model, example, repeat=3, warmup=1)
    assert mean > 0
    assert deviation >= 0


def test_models_that_a_function_calls() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 6)
            self.second = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor, *, twice: bool) -> torch.Tensor:
            return self.second(self.first(x) * (1 + twice))

    model = Doubled()
    graph = tp.DependencyGraph().build_dependency(
        model, torch.zeros(2, 3), forward_fn=lambda model, x: model(x, twice=True).sum()
    )
    graph.get_pruning_group(model.first, tp.prune_linear_out_channels, idxs=[1]).prune()
    assert (model.first.out_features, model.second.in_features) == (5, 5)
    assert graph.pruning_history() == [["first", True, [1]]]


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "import torch_pruning as tp\n"
        "from torch_pruning.utils import count_params\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Linear(6, 2))\n"
        "importance = tp.importance.MagnitudeImportance()\n"
        "tp.pruner.MagnitudePruner(model, torch.zeros(1, 3), importance).step()\n"
        "print(count_params(model), sys.argv[1])\n"
    )
    command = [sys.executable, "-m", "grapnet.integrations.torch_pruning", str(script), "word"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "20 word\n"
