"""Trained and adopted models, and what an edit of one of their spaces must do, for tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import grapnet as gn
from grapnet.spaces import Adopted, Example, Space
from grapnet.spaces._grouped import Channels, GroupedWeight
from grapnet.spaces._typing import CONTRACTED
from tests.spaces import oracle
from tests.spaces.zoo import Case


@dataclass
class Subject:
    """An adopted model in float64 with an optimizer that follows it."""

    case: Case
    model: nn.Module
    optimizer: Optimizer
    net: Adopted

    @property
    def free(self) -> list[Space]:
        """The spaces whose nodes can be added and removed, as far as adoption knows."""
        return [space for space in self.net.spaces if not space.pins]

    def outputs(self) -> list[Tensor]:
        return oracle.outputs_of(self.model, self.case)

    def snapshot(self) -> dict[str, Any]:
        return oracle.snapshot(self.model, self.optimizer)

    def step(self) -> None:
        step(self.model, self.optimizer, self.case)


def trained(case: Case, device: str = "cpu") -> tuple[Case, nn.Module, Adam]:
    """Returns a case in float64 after a step of Adam, so that the optimizer has state."""
    case = case.to(torch.float64, device)
    model = case.model.eval()
    optimizer = Adam(model.parameters(), lr=1e-3)
    step(model, optimizer, case)
    return case, model, optimizer


def subject(case: Case, *, further: bool = True, device: str = "cpu") -> Subject:
    """Returns a trained and adopted model.

    Args:
        case: The model and its call.
        further: Whether the calls of other paths are examples, too.
        device: Where the model is.
    """
    case, model, optimizer = trained(case, device)
    examples = []
    if further:
        examples = [Example(*call) for call in case.further]
    net = gn.adopt(model, *case.inputs, examples=examples, optimizer=optimizer, **case.kwargs)
    return Subject(case, model, optimizer, net)


def loss_of(model: nn.Module, case: Case) -> Tensor:
    """Returns the mean square of all floating outputs."""
    total = torch.zeros((), dtype=torch.float64)
    for output in oracle.flattened(model(*case.inputs, **case.kwargs)):
        if output.is_floating_point() and output.requires_grad:
            total = total + output.double().square().mean()
    return total


def step(model: nn.Module, optimizer: Optimizer, case: Case) -> None:
    """Makes one step in training mode, always with the same dropout; leaves no gradients."""
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loss_of(model, case).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


def every_third(space: Space) -> list[int]:
    """Returns rows to remove: a third of the nodes, the first one not among them."""
    return list(range(len(space)))[1::3] or [0]


def cuts_of(rows: Mapping[Space, Sequence[int]]) -> dict[tuple[str, int], list[int]]:
    """Returns the positions that nodes of some spaces have on every axis, before an edit."""
    found: dict[tuple[str, int], set[int]] = {}
    for space, chosen in rows.items():
        for place, at in space.places().items():
            found.setdefault(place, set()).update(at[list(chosen)].reshape(-1).tolist())
    return {place: sorted(at) for place, at in found.items()}


def zeros_of(space: Space, rows: Sequence[int]) -> dict[tuple[str, int], list[int]]:
    """Returns the positions at which tensors read some nodes.

    Where only activations do, as in the product of queries and keys, all positions of the nodes.
    """
    readers = space.graph._typed.readers.get(space._atom, ())
    cuts = cuts_of({space: rows})
    if is_contracted(space) and not readers:
        return cuts
    return {place: at for place, at in cuts.items() if place in readers}


def is_contracted(space: Space) -> bool:
    """Returns whether two activations are contracted over the nodes of a space."""
    return CONTRACTED in space._marks


def attributes_of(commit: gn.Commit) -> dict[str, dict[str, Any]]:
    """Returns the numbers of modules that a commit set, as `oracle.sliced` takes them."""
    found: dict[str, dict[str, Any]] = {}
    for change in commit.change.attributes:
        found.setdefault(change.module, {})[change.name] = change.after
    return found


def differing_tensors(model: nn.Module, expected: nn.Module) -> list[str]:
    """Returns the names of parameters, buffers and gradients that differ, to the bit."""
    found = []
    left = oracle.tensors_of(model)
    right = oracle.tensors_of(expected)
    for name in sorted({*left, *right}):
        if name not in left or name not in right:
            found.append(f"{name} is missing")
        elif not same_bits(left[name], right[name]):
            found.append(name)
        elif not same_bits(left[name].grad, right[name].grad):
            found.append(f"gradient of {name}")
    return found


def same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    """Returns whether two tensors have the same shape and the same bytes; None equals None."""
    if left is None or right is None:
        return left is right
    return oracle._content(left) == oracle._content(right)


def hand_sliced(
    subject: Subject, copy: nn.Module, cuts: oracle.Cuts, states: Mapping[str, Any]
) -> tuple[nn.Module, Adam]:
    """Returns what the last edit must have led to: a smaller model, and an Adam with its states.

    Args:
        subject: The edited model.
        copy: A copy of the model from before the edit.
        cuts: The removed positions.
        states: What `oracle.sliced_adam_state` returned before the edit.
    """
    smaller = oracle.sliced(copy, cuts, attributes_of(subject.net.history[-1]))
    optimizer = Adam(smaller.parameters(), lr=1e-3)
    for name, parameter in smaller.named_parameters():
        for key, value in states.get(name, {}).items():
            optimizer.state[parameter][key] = value.clone()
    return smaller, optimizer


def remove(subject: Subject, rows: Mapping[Space, Sequence[int]]) -> gn.Commit:
    """Removes nodes of several spaces in one edit; returns its receipt."""
    with subject.net.edit(reason="remove") as edit:
        for space, chosen in rows.items():
            edit.remove_nodes(space[list(chosen)])
    assert edit.receipt is not None
    return edit.receipt


def classes_of(model: nn.Module) -> list[tuple[str, type]]:
    return [(path, type(module)) for path, module in model.named_modules()]


def cells_of(net: Adopted, weight: Any, pairs: Tensor) -> Tensor:
    """Returns a mask of the cells of a weight that hold relations, from where their nodes are.

    Args:
        net: The graph.
        weight: The weight.
        pairs: [n, 2] rows of parents and children.
    """
    places = {}
    for space in net.spaces:
        places[space] = {
            dim: at for (name, dim), at in space.places().items() if name == weight.name
        }
    mask = torch.zeros(weight.grid.shape, dtype=torch.bool)
    ends = (net.layers[weight.source], net.layers[weight.target])
    groups = weight._blocks.groups if isinstance(weight, GroupedWeight) else ()
    for pair in pairs.tolist():
        inside = torch.ones_like(mask)
        for end, row, dim in zip(ends, pair, (weight.in_dim, weight.out_dim), strict=True):
            for space, index in _factors(end, row):
                # Groups are on the first dimension of a weight.
                at_dim = 0 if space.index in groups else dim
                at = places[space][at_dim][index]
                inside &= torch.zeros_like(mask).index_fill_(at_dim, at, True)
        mask |= inside
    return mask


def _factors(end: Any, row: int) -> list[tuple[Space, int]]:
    """Returns the nodes that a node, or a channel, is made of."""
    if not isinstance(end, Channels):
        return [(end, row)]
    at = torch.unravel_index(torch.tensor(row), [len(space) for space in end.spaces])
    return [(space, int(one)) for space, one in zip(end.spaces, at, strict=True)]
