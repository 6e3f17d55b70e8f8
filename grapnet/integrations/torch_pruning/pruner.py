"""Pruners under Torch-Pruning's names: rank the nodes of all groups, and remove the weakest."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import function as function
from . import importance as importance
from .dependency import OUTPUT, DependencyGraph, Group
from .function import *  # noqa: F403 (the functions are also found here)
from .function import BasePruningFunc as BasePruningFunc
from .importance import MagnitudeImportance
from .ops import TORCH_BATCHNORM, TORCH_CONV, TORCH_LINEAR, TORCH_LSTM

# One ratio for every step, the first before any pruning.
Schedule = Callable[[float, int], list[float]]


def linear_scheduler(pruning_ratio: float, steps: int) -> list[float]:
    """Returns ratios that grow by the same amount at every step.

    Examples:
        >>> linear_scheduler(0.5, 2)
        [0.0, 0.25, 0.5]
    """
    return [step / steps * pruning_ratio for step in range(steps + 1)]


class _Record:
    """A group, the scores of its nodes, and the share of them to remove."""

    def __init__(self, group: Group, scores: Tensor, ratio: float) -> None:
        self.group = group
        self.scores = scores
        self.ratio = ratio


class BasePruner:
    """Removes the least important nodes of a model, at every step a larger share.

    The sizes of what the model returns stay. `pruner.DG.net` is the adopted model: every step is
    one edit, which attached optimizers follow and `pruner.DG.net.undo()` takes back. In an
    interactive step every group is an edit of its own.

    Args:
        model: the model.
        example_inputs: what it is called with; see `DependencyGraph.build_dependency`.
        importance: a function of a group that returns one score per node.
        global_pruning: whether the nodes of all groups are ranked together.
        pruning_ratio: the share of nodes to remove, of the model as it is now.
        pruning_ratio_dict: other shares, by module or tuple of modules.
        max_pruning_ratio: the largest share of the nodes of one group to remove.
        iterative_steps: the number of steps.
        iterative_pruning_ratio_scheduler: the share of every step.
        ignored_layers: modules whose output channels stay, with everything in them; Parameters that
            stay.
        round_to: numbers of channels that stay are multiples of this one.
        isomorphic: whether to rank together the nodes of groups with the same kinds of layers.
        num_heads: the layers that write heads, with their numbers.
        prune_num_heads: whether to remove heads of these layers.
        prune_head_dims: whether to remove channels in heads.
        head_pruning_ratio: the share of heads to remove.
        head_pruning_ratio_dict: other shares of heads, by module.
        customized_pruners: pruners of one's own layers.
        root_module_types: at least one layer of these classes writes the nodes of a group.
        forward_fn: calls the model with the example.
        ch_sparsity: an old name of pruning_ratio.
        ch_sparsity_dict: an old name of pruning_ratio_dict.
        unwrapped_parameters, output_transform, in_channel_groups, out_channel_groups,
            channel_groups: do not matter; the adopted model knows its groups and Parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        importance: Callable[[Group], Tensor | None],
        global_pruning: bool = False,
        pruning_ratio: float = 0.5,
        pruning_ratio_dict: Mapping[Any, float] | None = None,
        max_pruning_ratio: float = 1.0,
        iterative_steps: int = 1,
        iterative_pruning_ratio_scheduler: Schedule = linear_scheduler,
        ignored_layers: Sequence[Any] | None = None,
        round_to: int | None = None,
        isomorphic: bool = False,
        in_channel_groups: Any = None,
        out_channel_groups: Any = None,
        num_heads: Mapping[nn.Module, int] | None = None,
        prune_num_heads: bool = False,
        prune_head_dims: bool = True,
        head_pruning_ratio: float = 0.0,
        head_pruning_ratio_dict: Mapping[nn.Module, float] | None = None,
        customized_pruners: Mapping[Any, BasePruningFunc] | None = None,
        unwrapped_parameters: Any = None,
        root_module_types: Sequence[type] = (TORCH_CONV, TORCH_LINEAR, TORCH_LSTM),
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        output_transform: Callable[[Any], Any] | None = None,
        channel_groups: Any = None,
        ch_sparsity: float | None = None,
        ch_sparsity_dict: Mapping[Any, float] | None = None,
    ) -> None:
        if ch_sparsity is not None:
            pruning_ratio = ch_sparsity
        if ch_sparsity_dict is not None:
            pruning_ratio_dict = ch_sparsity_dict
        self.model = model
        self.importance = importance
        self.global_pruning = global_pruning
        self.pruning_ratio = pruning_ratio
        self.max_pruning_ratio = max_pruning_ratio
        self.iterative_steps = iterative_steps
        self.round_to = round_to
        self.isomorphic = isomorphic
        self.num_heads = dict(num_heads or {})
        self.prune_num_heads = prune_num_heads
        self.prune_head_dims = prune_head_dims
        self.root_module_types = tuple(root_module_types)
        self.ignored_layers: list[nn.Module] = []
        self.ignored_params: list[nn.Parameter] = []
        for layer in ignored_layers or ():
            if isinstance(layer, nn.Parameter):
                self.ignored_params.append(layer)
            else:
                self.ignored_layers.extend(layer.modules())
        self.DG = DependencyGraph().build_dependency(
            model,
            example_inputs,
            forward_fn=forward_fn,
            customized_pruners=customized_pruners,
            ignored_params=self.ignored_params,
        )
        self.current_step = 0
        schedule = iterative_pruning_ratio_scheduler
        self.per_step_pruning_ratio = schedule(pruning_ratio, iterative_steps)
        self.per_step_head_pruning_ratio = schedule(head_pruning_ratio, iterative_steps)
        # By layer: the number of the entry of pruning_ratio_dict, and its ratios.
        self._own_ratios: dict[nn.Module, tuple[int, list[float]]] = {}
        for number, (modules, ratio) in enumerate((pruning_ratio_dict or {}).items()):
            if not isinstance(modules, tuple):
                modules = (modules,)
            for module in modules:
                for layer in module.modules():
                    self._own_ratios[layer] = (number, schedule(ratio, iterative_steps))
        self._own_head_ratios: dict[nn.Module, list[float]] = {}
        for module, ratio in (head_pruning_ratio_dict or {}).items():
            for layer in module.modules():
                self._own_head_ratios[layer] = schedule(ratio, iterative_steps)
        # Nodes at the first step, by scope and by group.
        self._first_sizes: dict[Any, int] = {}

    def step(self, interactive: bool = False) -> Iterator[Group] | None:
        """Removes nodes up to the ratio of the next step.

        Args:
            interactive: yields the groups instead, and `group.prune()` removes the nodes of one.
        """
        self.current_step += 1
        if interactive:
            return self._interactive()
        groups = [record.group.subset(chosen) for record, chosen in self._chosen()]
        if groups:
            self.DG.prune(groups)
        return None

    def _interactive(self) -> Iterator[Group]:
        chosen = list(self._chosen())
        # All at once, which takes a fraction of the time of one by one.
        spaces = [space for record, _ in chosen for space in record.group.spaces]
        self.DG.net.prove(space for space in spaces if not space.pins)
        for record, numbers in chosen:
            yield record.group.subset(numbers)

    def estimate_importance(self, group: Group) -> Tensor | None:
        """Returns the scores of the nodes of a group."""
        return self.importance(group)

    def pruning_history(self) -> list[list[Any]]:
        """Returns what was pruned; see `DependencyGraph.pruning_history`."""
        return self.DG.pruning_history()

    def load_pruning_history(self, pruning_history: Sequence[Sequence[Any]]) -> None:
        """Prunes a model as another one was pruned."""
        self.DG.load_pruning_history(pruning_history)

    def reset(self) -> None:
        """Starts again with the first step."""
        self.current_step = 0

    def update_regularizer(self) -> None:
        """Adapts the regularizer to the groups that are left; nothing to do here."""

    def regularize(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Adds the gradients of a regularizer; there is none here."""

    def manual_prune_width(
        self,
        layer: nn.Module,
        pruning_fn: Callable[..., Any],
        pruning_ratios_or_idxs: float | Sequence[int],
    ) -> None:
        """Removes a share of the nodes of one layer, or some of its channels."""
        if not isinstance(pruning_ratios_or_idxs, float):
            self.DG.get_pruning_group(layer, pruning_fn, pruning_ratios_or_idxs).prune()
            return
        channels = self.DG.get_in_channels(layer)
        if self.DG.is_out_channel_pruning_fn(pruning_fn):
            channels = self.DG.get_out_channels(layer)
        group = self.DG.get_pruning_group(layer, pruning_fn, range(channels or 0))
        scores = self._scores(group)
        if scores is not None:
            count = int(len(scores) * pruning_ratios_or_idxs)
            group.subset(scores.argsort()[:count].tolist()).prune()

    def _groups(self) -> Iterator[Group]:
        """Yields the groups of nodes that are pruned."""
        for group in self.DG.get_all_groups(self.ignored_layers, self.root_module_types):
            if not any(space.pins == OUTPUT for space in group.spaces):
                yield group

    def _scores(self, group: Group) -> Tensor | None:
        """Returns the scores of the nodes of a group."""
        scores = self.estimate_importance(group)
        if scores is None:
            return None
        scores = scores.detach().float().cpu()
        channels = group[0].root_idxs
        if len(scores) == group.n_nodes or len(scores) != len(channels):
            return scores
        # An importance may know channels only; a node is worth the mean of its channels.
        numbers = torch.as_tensor(channels)
        counts = torch.bincount(numbers, minlength=group.n_nodes)
        sums = torch.zeros(group.n_nodes).index_add_(0, numbers, scores)
        return sums / counts.clamp(min=1)

    def _scopes(self) -> dict[Any, list[_Record]]:
        """Returns the groups, by the scope in which their nodes are ranked together."""
        scopes: dict[Any, list[_Record]] = {}
        for group in self._groups():
            has_heads = any(dep.layer in self.num_heads for dep, _ in group)
            if has_heads and not self.prune_head_dims:
                continue
            scores = self._scores(group)
            if scores is None:
                continue
            scope, ratio = self._scope_of(group)
            scopes.setdefault(scope, []).append(_Record(group, scores, ratio))
        if self.prune_num_heads:
            for group in self._head_groups():
                scores = self._scores(group)
                if scores is not None:
                    scope = ("heads",) if self.global_pruning else ("heads", _name(group))
                    ratio = self._head_ratio(group)
                    scopes.setdefault(scope, []).append(_Record(group, scores, ratio))
        return scopes

    def _head_groups(self) -> Iterator[Group]:
        """Yields the groups of heads."""
        found = self.DG._all_groups(self.ignored_layers, self.root_module_types, outermost=True)
        for group in found:
            if any(dep.layer in self.num_heads for dep, _ in group):
                yield group

    def _head_ratio(self, group: Group) -> float:
        for dep, _ in group:
            if dep.layer in self._own_head_ratios:
                return self._own_head_ratios[dep.layer][self.current_step]
        return self.per_step_head_pruning_ratio[self.current_step]

    def _scope_of(self, group: Group) -> tuple[Any, float]:
        """Returns the scope of a group, and the ratio to prune it to."""
        for dep, _ in group:
            writes = self.DG.is_out_channel_pruning_fn(dep.handler)
            if writes and dep.layer in self._own_ratios:
                number, ratios = self._own_ratios[dep.layer]
                scope = ("own", number) if self.global_pruning else ("own", _name(group))
                return scope, ratios[self.current_step]
        ratio = self.per_step_pruning_ratio[self.current_step]
        if self.isomorphic:
            kinds = []
            for dep, _ in group:
                writes = self.DG.is_out_channel_pruning_fn(dep.handler)
                kinds.append((type(dep.layer), writes))
            return ("isomorphic", *kinds), ratio
        if self.global_pruning:
            return ("all",), ratio
        return ("layer", _name(group)), ratio

    def _chosen(self) -> Iterator[tuple[_Record, list[int]]]:
        """Yields groups, each with the numbers of its nodes to remove."""
        if self.current_step > self.iterative_steps:
            warnings.warn(
                f"all {self.iterative_steps} steps of the pruner are done; nothing is pruned",
                stacklevel=3,
            )
            return
        for scope, records in self._scopes().items():
            scores = torch.cat([record.scores for record in records])
            first = self._first_sizes.setdefault(scope, len(scores))
            count = len(scores) - int(first * (1 - records[0].ratio))
            if count <= 0:
                continue
            weakest = torch.zeros(len(scores), dtype=torch.bool)
            weakest[scores.argsort(stable=True)[:count]] = True
            start = 0
            for record in records:
                stop = start + len(record.scores)
                numbers = self._allowed(record, int(weakest[start:stop].sum()))
                start = stop
                if numbers:
                    yield record, numbers

    def _allowed(self, record: _Record, count: int) -> list[int]:
        """Returns the numbers of the weakest nodes of a group, as many as may go."""
        size = len(record.scores)
        first = self._first_sizes.setdefault(("group", _name(record.group)), size)
        stay = max(size - count, math.ceil(first * (1 - self.max_pruning_ratio)), 1)
        multiple = math.lcm(self.round_to or 1, self.DG.heads_of(record.group))
        if count and multiple > 1:
            # A node may have several channels in a layer.
            channels = len(record.group[0].idxs) // size
            stay -= stay % (multiple // math.gcd(multiple, max(1, channels)))
            if stay == 0:
                return []
        return record.scores.argsort(stable=True)[: size - stay].tolist()


# Torch-Pruning's earlier names.
MetaPruner = BasePruner
MagnitudePruner = BasePruner


class _RegularizingPruner(BasePruner):
    """A pruner that also adds gradients which make whole groups of weights small."""

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        importance: Callable[[Group], Tensor | None],
        reg: float,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, example_inputs, importance, *args, **kwargs)
        self.reg = reg
        self.update_regularizer()

    def update_regularizer(self) -> None:
        """Adapts the regularizer to the groups that are left."""
        self._regularized = list(self._groups())

    @torch.no_grad()
    def _decay(
        self, group: Group, strengths: Tensor, types: tuple[type, ...], bias: bool = False
    ) -> None:
        """Adds weights times the strength of their node to the gradients of layers."""
        for item in group:
            weight = item.weight
            layer = item.dep.layer
            if not isinstance(layer, types) or weight is None or weight.grad is None:
                continue
            writes = self.DG.is_out_channel_pruning_fn(item.dep.handler)
            if writes and layer in self.ignored_layers:
                continue
            idxs = torch.as_tensor(item.idxs, device=weight.device)
            by_channel = strengths[torch.as_tensor(item.root_idxs)].to(weight)
            shape = [1] * weight.dim()
            shape[item.dim] = -1
            decay = weight.index_select(item.dim, idxs) * by_channel.view(shape)
            weight.grad.index_add_(item.dim, idxs, decay)
            own_bias = getattr(layer, "bias", None)
            if bias and writes and own_bias is not None and own_bias.grad is not None:
                own_bias.grad.index_add_(0, idxs, own_bias[idxs] * by_channel)


_LAYERS = (TORCH_CONV, nn.Linear, TORCH_BATCHNORM)


class GroupNormPruner(_RegularizingPruner):
    """Makes the norms of unimportant groups small while the model trains (DepGraph,
    https://arxiv.org/abs/2301.12900).

    Args:
        reg: the strength.
        alpha: the weakest nodes are pulled 2**alpha times as strongly as the strongest.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        importance: Callable[[Group], Tensor | None],
        reg: float = 1e-4,
        alpha: float = 4,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, example_inputs, importance, reg, *args, **kwargs)
        self.alpha = alpha

    def regularize(self, model: nn.Module, alpha: float | None = None, bias: bool = False) -> None:
        """Adds the gradients of the regularizer; call it between backward and the step."""
        if alpha is None:
            alpha = 2**self.alpha
        for group in self._regularized:
            scores = self._scores(group)
            if scores is None:
                continue
            norms = scores.sqrt()
            share = (norms.max() - norms) / (norms.max() - norms.min())
            if not share.isnan().any():
                self._decay(group, self.reg * alpha**share, _LAYERS, bias)


class BNScalePruner(_RegularizingPruner):
    """Makes the scales of batch norms sparse while the model trains (Network Slimming,
    https://arxiv.org/abs/1708.06519).

    Args:
        reg: the strength.
        group_lasso: whether the scales of a group shrink together.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        importance: Callable[[Group], Tensor | None],
        reg: float = 1e-5,
        group_lasso: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, example_inputs, importance, reg, *args, **kwargs)
        self.group_lasso = group_lasso

    def regularize(self, model: nn.Module, reg: float | None = None, bias: bool = False) -> None:
        """Adds the gradients of the regularizer; call it between backward and the step."""
        if reg is None:
            reg = self.reg
        if self.group_lasso:
            squares = MagnitudeImportance(normalizer=None, target_types=(TORCH_BATCHNORM,))
            for group in self._regularized:
                found = squares(group)
                if found is not None:
                    strengths = reg / (found.cpu() + 1e-9).sqrt()
                    self._decay(group, strengths, (TORCH_BATCHNORM,), bias)
            return
        for layer in model.modules():
            if not isinstance(layer, TORCH_BATCHNORM) or layer in self.ignored_layers:
                continue
            if layer.affine and layer.weight.grad is not None:
                layer.weight.grad.add_(layer.weight.detach().sign(), alpha=reg)


class GrowingRegPruner(_RegularizingPruner):
    """Pulls unimportant groups to 0 with a strength that grows (https://arxiv.org/abs/2012.09243).

    Args:
        reg: the strength at the beginning.
        delta_reg: what `update_reg` adds to it, for the weakest nodes.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        importance: Callable[[Group], Tensor | None],
        reg: float = 1e-5,
        delta_reg: float = 1e-5,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, example_inputs, importance, reg, *args, **kwargs)
        self.delta_reg = delta_reg

    def update_regularizer(self) -> None:
        """Adapts the regularizer to the groups that are left, and starts it again."""
        super().update_regularizer()
        self._strengths = [torch.full((g.n_nodes,), self.reg) for g in self._regularized]

    def update_reg(self) -> None:
        """Makes the regularizer stronger, the more the weaker a node is."""
        for place, group in enumerate(self._regularized):
            scores = self._scores(group)
            if scores is not None:
                share = (scores.max() - scores) / (scores.max() - scores.min() + 1e-8)
                self._strengths[place] += self.delta_reg * share

    def regularize(self, model: nn.Module, bias: bool = False) -> None:
        """Adds the gradients of the regularizer; call it between backward and the step."""
        for group, strengths in zip(self._regularized, self._strengths, strict=True):
            self._decay(group, strengths, _LAYERS, bias)


def _name(group: Group) -> tuple[str, ...]:
    """Returns what identifies a group, before and after edits."""
    return tuple(space.name for space in group.spaces)
