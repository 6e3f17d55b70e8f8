"""DependencyGraph under Torch-Pruning's name, over the spaces of an adopted model."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.spaces import Adopted, Space

from . import ops
from ._group import Dependency as Dependency
from ._group import Group as Group
from ._group import GroupItem as GroupItem
from ._group import Node as Node
from ._group import Part, Target
from .function import BasePruningFunc, PrunerBox

# The pin of nodes that the model returns. They are removed only where they are asked for.
OUTPUT = ("output",)


class DependencyGraph:
    """Which channels of a model can only be removed together.

    `net` is the adopted model: attach optimizers to it with `gn.attach(optimizer, graph.net)`, and
    take back the last pruning with `graph.net.undo()`. A model that is adopted already keeps its
    graph.
    """

    model: nn.Module
    net: Adopted

    def __init__(self) -> None:
        self.REGISTERED_PRUNERS = dict(PrunerBox)
        self.CUSTOMIZED_PRUNERS: dict[Any, BasePruningFunc] = {}
        self.ignored_layers: list[nn.Module] = []
        self.ignored_params: list[nn.Parameter] = []
        self._history: list[list[Any]] = []

    def build_dependency(
        self,
        model: nn.Module,
        example_inputs: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        output_transform: Callable[[Any], Any] | None = None,
        unwrapped_parameters: Any = None,
        customized_pruners: Mapping[Any, BasePruningFunc] | None = None,
        ignored_layers: Sequence[nn.Module] | None = None,
        ignored_params: Sequence[nn.Parameter] | None = None,
        verbose: bool = True,
    ) -> "DependencyGraph":
        """Adopts a model, and sets it to evaluation mode; returns the graph itself.

        Args:
            model: the model.
            example_inputs: a tensor; a sequence, of positional arguments; or a dict, of keyword
                arguments.
            forward_fn: calls the model with the example.
            output_transform: does not matter here, as no output is needed.
            unwrapped_parameters: does not matter: every axis of every Parameter is followed.
            customized_pruners: pruners of one's own layers, by class or by layer.
            ignored_layers: layers whose output channels stay.
            ignored_params: Parameters that stay.
            verbose: does not matter.
        """
        self.model = model
        model.eval()
        for layer, pruner in (customized_pruners or {}).items():
            self.register_customized_layer(layer, pruner)
        self.ignored_layers.extend(ignored_layers or ())
        self.ignored_params.extend(ignored_params or ())
        self.net = _adopt(model, example_inputs, forward_fn)
        self._modules = dict(self.net.model.named_modules())
        self._paths = {module: path for path, module in self._modules.items()}
        self._module2name: dict[Any, str] = {m: name for name, m in model.named_modules()}
        for name, parameter in model.named_parameters():
            self._module2name[parameter] = name
        # Which spaces a dimension of a tensor has does not change with edits.
        self._spaces_at: dict[tuple[str, int], list[Space]] = {}
        for space in self.net.spaces:
            for place in space.places():
                self._spaces_at.setdefault(place, []).append(space)
        return self

    def register_customized_layer(
        self, layer_type_or_instance: Any, layer_pruner: BasePruningFunc
    ) -> None:
        """Registers the pruner of a class of layers, or of one layer."""
        self.CUSTOMIZED_PRUNERS[layer_type_or_instance] = layer_pruner

    @property
    def module2node(self) -> dict[Any, Node]:
        """The layers that have channels, with their nodes in the graph."""
        found = {}
        for name, dim in self._spaces_at:
            target = self._target(name, dim)
            if target is not None:
                found[target.module] = self._node(target.module)
        return found

    def get_pruner_of_module(self, module: Any) -> BasePruningFunc:
        """Returns the pruner of a layer."""
        for key in (module, type(module)):
            if key in self.CUSTOMIZED_PRUNERS:
                return self.CUSTOMIZED_PRUNERS[key]
        kind = ops.module2type(module)
        return self.REGISTERED_PRUNERS.get(kind, _NO_CHANNELS)

    def is_out_channel_pruning_fn(self, fn: Callable[..., Any]) -> bool:
        """Returns whether a function removes output channels."""
        return any(fn == pruner.prune_out_channels for pruner in self._pruners())

    def is_in_channel_pruning_fn(self, fn: Callable[..., Any]) -> bool:
        """Returns whether a function removes input channels."""
        return any(fn == pruner.prune_in_channels for pruner in self._pruners())

    def _pruners(self) -> list[BasePruningFunc]:
        return [*self.REGISTERED_PRUNERS.values(), *self.CUSTOMIZED_PRUNERS.values()]

    def get_out_channels(self, module_or_node: Any) -> int | None:
        """Returns the number of output channels of a layer."""
        module = getattr(module_or_node, "module", module_or_node)
        return self.get_pruner_of_module(module).get_out_channels(module)

    def get_in_channels(self, module_or_node: Any) -> int | None:
        """Returns the number of input channels of a layer."""
        module = getattr(module_or_node, "module", module_or_node)
        return self.get_pruner_of_module(module).get_in_channels(module)

    def get_pruning_group(
        self, module: Any, pruning_fn: Callable[..., Any], idxs: Sequence[int] | int
    ) -> Group:
        """Returns all layers that have to be pruned with some channels of one layer.

        Args:
            module: the layer, or a Parameter.
            pruning_fn: says which side of the layer, as `tp.prune_conv_out_channels` does.
            idxs: the channels. Where a node has several of them, one is enough to name it; heads
                and the channels in them need all of their channels.

        Raises:
            ValueError: the layer has no such channels, or they cannot be removed.
        """
        if isinstance(idxs, int):
            idxs = [idxs]
        side: ops.Side = "out" if self.is_out_channel_pruning_fn(pruning_fn) else "in"
        root = self._root(module, side)
        chosen = self._nodes_at(root, [int(index) for index in idxs])
        parts = []
        count = 0
        for space, rows in chosen:
            parts.append(Part(space, rows, torch.arange(count, count + len(rows))))
            count += len(rows)
        return Group(self, self._with_coupled(parts), root)

    def get_all_groups(
        self,
        ignored_layers: Sequence[nn.Module] = (),
        root_module_types: Sequence[type] = (ops.TORCH_CONV, ops.TORCH_LINEAR),
    ) -> Iterator[Group]:
        """Yields a group for every space that can be pruned, with all of its nodes.

        They come in the order of the model. Of channels inside of groups or heads, the groups and
        heads stay.

        Args:
            ignored_layers: layers whose output channels stay.
            root_module_types: at least one layer of these classes writes the space.
        """
        yield from self._all_groups(ignored_layers, root_module_types, outermost=False)

    def _all_groups(
        self, ignored_layers: Sequence[nn.Module], root_types: Sequence[type], *, outermost: bool
    ) -> Iterator[Group]:
        """Yields groups; of spaces inside of one another, the innermost or the outermost."""
        ignored = {id(layer) for layer in (*self.ignored_layers, *ignored_layers)}
        ignored |= {id(parameter) for parameter in self.ignored_params}
        seen: set[Space] = set()
        for space in self.net.spaces:
            if space in seen or space.pins not in ((), OUTPUT) or len(space) < 2:
                continue
            root = self._root_of(space, tuple(root_types))
            if root is None:
                continue
            inner, outer = self._nested(space, root)
            if (outer or not inner) if outermost else inner:
                continue
            rows = torch.arange(len(space))
            parts = self._with_coupled([Part(space, rows, rows)])
            seen.update(part.space for part in parts)
            group = Group(self, parts, root)
            if not any(self._is_ignored(item, ignored) for item in group):
                yield group

    def _is_ignored(self, item: GroupItem, ignored: set[int]) -> bool:
        return id(item.dep.layer) in ignored and self.is_out_channel_pruning_fn(item.dep.handler)

    def check_pruning_group(self, group: Group) -> bool:
        """Returns whether some nodes would stay."""
        return all(len(part.rows) < len(part.space) for part in group._parts)

    def prune(self, groups: Sequence[Group], *, record_history: bool = True) -> None:
        """Removes the nodes of groups, all in one edit of the adopted model.

        Raises:
            EditError: the model cannot run without them, or the pruner of a customized layer would
                remove something else. Nothing was changed.
        """
        customized = self._customized_copies(groups)
        with self.net.edit(reason=f"prune {', '.join(self._names(groups))}") as edit:
            for group in groups:
                for nodes in group._nodes:
                    edit.remove_nodes(nodes, interface=True)
            for nodes in self._nodes_in_heads(groups):
                edit.remove_nodes(nodes)
        for layer, smaller in customized:
            if _shapes(layer) != _shapes(smaller):
                self.net.undo()
                raise gn.errors.EditError(
                    f"the pruner of {type(layer).__name__} leaves {_shapes(smaller)}, but the model"
                    f" needs {_shapes(layer)}"
                )
        for layer, smaller in customized:
            _take_numbers(layer, smaller)
        if record_history:
            self._record(groups)

    def heads_of(self, group: Group) -> int:
        """Returns the number that must divide the remaining nodes of a group.

        The heads of `nn.MultiheadAttention` are together as wide as the stream that it reads.
        """
        multiple = 1
        for dep, _ in group:
            if isinstance(dep.layer, nn.MultiheadAttention):
                multiple = math.lcm(multiple, dep.layer.num_heads)
        return multiple

    def _nodes_in_heads(self, groups: Sequence[Group]) -> list[gn.NodeSet]:
        """Returns the weakest nodes in the heads of attentions whose stream becomes narrower, as
        many as have to go with it.

        Raises:
            EditError: the stream that is left cannot be divided into the heads.
        """
        leaving: dict[nn.MultiheadAttention, int] = {}
        for group in groups:
            for item in group:
                layer = item.dep.layer
                if isinstance(layer, nn.MultiheadAttention) and item.tensor == "in_proj_weight":
                    leaving[layer] = leaving.get(layer, 0) + len(item.idxs)
        found = []
        for layer, count in leaving.items():
            path = self._paths[layer]
            if count % layer.num_heads:
                raise gn.errors.EditError(
                    f"{path} has {layer.num_heads} heads, so a multiple of as many channels can be"
                    f" removed, not {count}"
                )
            place = (_joined(path, "in_proj_weight"), 0)
            distances = {}
            for space in self._spaces_at[place]:
                if not space.pins:
                    at = space.places()[place]
                    distances[space] = int(at[1, 0] - at[0, 0])
            # The channels in a head are next to each other.
            inner = min(distances, key=lambda space: distances[space])
            found.append(inner.weakest(count=count // layer.num_heads))
        return found

    def _names(self, groups: Sequence[Group]) -> list[str]:
        names = [self._module2name.get(group[0].dep.layer, "?") for group in groups]
        if len(names) > 4:
            names = [*names[:3], f"and {len(names) - 3} more"]
        return names

    def _customized_copies(self, groups: Sequence[Group]) -> list[tuple[nn.Module, nn.Module]]:
        """Returns customized layers, each with a copy that its own pruner has pruned.

        The edit prunes the layer itself; the copy shows which of its numbers follow.
        """
        copies: dict[int, tuple[nn.Module, nn.Module]] = {}
        registered = set(self.CUSTOMIZED_PRUNERS.values())
        for group in groups:
            for dep, idxs in group:
                if getattr(dep.handler, "__self__", None) in registered:
                    layer = dep.layer
                    _, smaller = copies.get(id(layer), (layer, None))
                    if smaller is None:
                        smaller = copy.deepcopy(layer)
                    copies[id(layer)] = (layer, dep.handler(smaller, list(idxs)))
        return list(copies.values())

    def _record(self, groups: Sequence[Group]) -> None:
        """Notes groups as if they had been pruned one after the other.

        Two groups may have their root on one axis: the channels of the second move up when those of
        the first have gone.
        """
        gone: dict[tuple[int, str], list[int]] = {}
        for group in groups:
            before = gone.setdefault(group._root.key, [])
            idxs = []
            for index in group[0].idxs:
                idxs.append(index - sum(earlier < index for earlier in before))
            before.extend(group[0].idxs)
            name = self._module2name[group._root.module]
            self._history.append([name, group._root.side == "out", idxs])

    def pruning_history(self) -> list[list[Any]]:
        """Returns what was pruned: the name of a layer, whether its output channels, and which."""
        return self._history

    def load_pruning_history(self, pruning_history: Sequence[Sequence[Any]]) -> None:
        """Prunes a model as another one was pruned."""
        self.net.prove(space for space in self.net.spaces if not space.pins)
        for name, is_out, idxs in pruning_history:
            module = self.model.get_submodule(name)
            pruner = self.get_pruner_of_module(module)
            pruning_fn = pruner.prune_out_channels if is_out else pruner.prune_in_channels
            self.get_pruning_group(module, pruning_fn, idxs).prune()

    def _node(self, module: Any) -> Node:
        return Node(module, self._module2name.get(module, type(module).__name__))

    def _root(self, module: Any, side: ops.Side) -> Target:
        """Returns the side of a layer that a group starts from."""
        if isinstance(module, nn.Parameter):
            for name, dim in self._spaces_at:
                target = self._target(name, dim)
                if target is not None and target.module is module:
                    return target
        elif module in self._paths:
            if self._is_customized(module):
                return Target(module, side, None)
            axis = ops.axis_of(module, side)
            if axis is not None:
                place = (_joined(self._paths[module], axis[0]), axis[1])
                return Target(module, side, place)
        raise ValueError(f"{module} is not in the dependency graph")

    def _nodes_at(self, root: Target, idxs: Sequence[int]) -> list[tuple[Space, Tensor]]:
        """Returns the nodes that have some channels of a layer, by space."""
        wanted = torch.as_tensor(sorted(set(idxs)))
        if root.place is None:
            space = self.net.space(self._paths[root.module], side=root.side)
            return [(space, wanted)]
        editable = []
        covered = torch.zeros_like(wanted, dtype=torch.bool)
        reasons = []
        for space in self._spaces_at.get(root.place, []):
            if space.pins in ((), OUTPUT):
                editable.append((space, space.places()[root.place]))
            else:
                reasons.append(f"{space.name}: {space.pins[0]}")
        found = []
        for space, at in editable:
            touched = torch.isin(at, wanted)
            # A channel of a head belongs to its head and to its place in all heads. Which of them
            # is meant shows only when all of its channels are given.
            is_alone = not any(
                torch.isin(at, other).any() for one, other in editable if one is not space
            )
            rows = (touched.any(1) if is_alone else touched.all(1)).nonzero().flatten()
            if len(rows):
                found.append((space, rows))
                covered |= torch.isin(wanted, at[rows])
        if not covered.all():
            name = self._module2name.get(root.module, "the layer")
            reasons = reasons or ["no node has them alone, or they do not exist"]
            raise ValueError(
                f"channels {wanted[~covered].tolist()} of {name} cannot be removed"
                f" ({'; '.join(reasons)})"
            )
        return found

    def _root_of(self, space: Space, root_types: tuple[type, ...]) -> Target | None:
        """Returns the layer of some classes that writes a space, with the fewest channels a
        node.
        """
        found = None
        fewest = 0
        for (name, dim), at in space.places().items():
            target = self._target(name, dim)
            if target is None or target.side != "out" or not isinstance(target.module, root_types):
                continue
            if found is None or at.shape[1] < fewest:
                found = target
                fewest = at.shape[1]
        return found

    def _nested(self, space: Space, root: Target) -> tuple[bool, bool]:
        """Returns whether other spaces lie inside of the nodes of a space on the axis of a layer,
        and whether it lies inside of those of another one.
        """
        inner = False
        outer = False
        if root.place is None:
            return inner, outer
        at = space.places()[root.place]
        for other in self._spaces_at[root.place]:
            if other is space or other.pins not in ((), OUTPUT) or len(other) < 2:
                continue
            there = other.places()[root.place]
            if torch.isin(at, there).any():
                # Neighbouring nodes of the inner space are closer to each other.
                is_inside = there[1, 0] - there[0, 0] < at[1, 0] - at[0, 0]
                inner = inner or bool(is_inside)
                outer = outer or not is_inside
        return inner, outer

    def _with_coupled(self, parts: list[Part]) -> list[Part]:
        """Returns parts of a group, with the nodes behind customized layers whose inputs and
        outputs are the same channels.
        """
        if not self.CUSTOMIZED_PRUNERS:
            return parts
        pairs = []
        for path, module in self._modules.items():
            pruner = self.get_pruner_of_module(module)
            if self._is_customized(module) and pruner.prune_in_channels == (
                pruner.prune_out_channels
            ):
                pairs.append((self.net.space(path, side="in"), self.net.space(path)))
        known = {part.space for part in parts}
        parts = list(parts)
        for part in parts:  # grows while it is read
            for one, other in pairs:
                if part.space is other:
                    one, other = other, one
                if part.space is one and other not in known and len(one) == len(other):
                    known.add(other)
                    parts.append(Part(other, part.rows, part.numbers))
        return parts

    def _is_customized(self, module: nn.Module) -> bool:
        """Returns whether a layer has a pruner of its own, and is none of torch's."""
        is_registered = module in self.CUSTOMIZED_PRUNERS or type(module) in self.CUSTOMIZED_PRUNERS
        return is_registered and ops.axis_of(module, "out") is None

    def _target(self, name: str, dim: int) -> Target | None:
        """Returns the layer and the side that a dimension of a tensor belongs to; None for tensors
        that follow others, such as biases.
        """
        path, _, tensor = name.rpartition(".")
        module = self._modules[path]
        ancestor = path
        while ancestor:
            if self._is_customized(self._modules[ancestor]):
                return Target(self._modules[ancestor], "out", None)
            ancestor = ancestor.rpartition(".")[0]
        if ops.axis_of(module, "out") is None:
            held = getattr(module, tensor)
            if isinstance(held, nn.Parameter):
                return Target(held, "out", (name, dim))
            return None
        side = ops.side_of(module, tensor, dim)
        if side is None:
            return None
        return Target(module, side, (name, dim))

    def _items(self, parts: Sequence[Part], root: Target) -> list[GroupItem]:
        """Returns the layers that have some nodes; the root comes first."""
        targets: dict[tuple[int, str], Target] = {root.key: root}
        idxs: dict[tuple[int, str], list[int]] = {root.key: []}
        numbers: dict[tuple[int, str], list[int]] = {root.key: []}
        for part in parts:
            customized: set[int] = set()
            for (name, dim), at in part.space.places().items():
                target = self._target(name, dim)
                if target is None:
                    continue
                positions = at[part.rows]
                if target.place is None:
                    # The channels of a customized layer are the nodes themselves, once.
                    if id(target.module) in customized:
                        continue
                    customized.add(id(target.module))
                    positions = part.rows[:, None]
                own = targets.setdefault(target.key, target)
                known = idxs.setdefault(own.key, [])
                if target.place is None and known:
                    continue
                known.extend(positions.reshape(-1).tolist())
                counted = part.numbers.repeat_interleave(positions.shape[1])
                numbers.setdefault(own.key, []).extend(counted.tolist())
        source = self._node(root.module)
        trigger = self._handler(root)
        items = []
        for key, target in targets.items():
            node = source if target is root else self._node(target.module)
            dep = Dependency(trigger, self._handler(target), source, node)
            tensor = ""
            dim = 0
            if target.place is not None:
                dim = target.place[1]
                if not isinstance(target.module, nn.Parameter):
                    tensor = target.place[0].rpartition(".")[2]
            items.append(GroupItem(dep, idxs[key], numbers[key], tensor, dim))
        return items

    def _handler(self, target: Target) -> Callable[..., Any]:
        pruner = self.get_pruner_of_module(target.module)
        if target.side == "out":
            return pruner.prune_out_channels
        return pruner.prune_in_channels


class _NoChannels(BasePruningFunc):
    """The pruner of layers that keep their channels as they come, such as activations."""

    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        return layer

    prune_in_channels = prune_out_channels

    def get_out_channels(self, layer: Any) -> int | None:
        return None

    get_in_channels = get_out_channels


_NO_CHANNELS = _NoChannels()


class _Called(nn.Module):
    """A model that a function calls."""

    def __init__(self, model: nn.Module, forward_fn: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._forward_fn = forward_fn

    def forward(self, example_inputs: Any) -> Any:
        return self._forward_fn(self.model, example_inputs)


def _adopt(
    model: nn.Module, example_inputs: Any, forward_fn: Callable[[nn.Module, Any], Any] | None
) -> Adopted:
    """Returns the graph of a model; the one that it has, if the model still fits to it."""
    if forward_fn is not None:
        return gn.adopt(_Called(model, forward_fn), example_inputs)
    try:
        net = gn.adopted(model)
        gn.check(net)
    except (KeyError, gn.errors.GrapNetError):
        pass
    else:
        return net
    if isinstance(example_inputs, dict):
        return gn.adopt(model, **example_inputs)
    if isinstance(example_inputs, list | tuple):
        try:
            return gn.adopt(model, *example_inputs)
        except TypeError:
            # The model takes the sequence as one argument.
            return gn.adopt(model, example_inputs)
    return gn.adopt(model, example_inputs)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shapes(layer: nn.Module) -> dict[str, list[int]]:
    """Returns the shapes of the tensors of a layer."""
    return {name: list(tensor.shape) for name, tensor in layer.state_dict().items()}


def _take_numbers(layer: nn.Module, smaller: nn.Module) -> None:
    """Sets the integers of a layer to those of a copy that was pruned."""
    for path, pruned in smaller.named_modules():
        module = layer.get_submodule(path)
        for name, value in vars(pruned).items():
            if type(value) is int and not name.startswith("_"):
                setattr(module, name, value)
