"""Weights as matrices: children × columns, for criteria and repairs that solve for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grapnet.core._opened import CUT, FROZEN
from grapnet.spaces._adopted import Adopted

from ._cells import Linear, linear_of


class Matrix(NamedTuple):
    """The weights of a transition of a net, or of a module of an adopted model, the bias last.

    Attributes:
        weights: [children, columns + 1] float64; a convolution has a column for every cell of its
            kernel, channel by channel.
        absent: the cells that do not exist, bool like the weights; a child without a bias has an
            absent one.
        frozen: the cells that keep their values.
    """

    weights: Tensor
    absent: Tensor
    frozen: Tensor


def matrix_of(net: Any, key: int | str) -> Matrix:
    """Returns the matrix of a transition of a net by its number, or of the weight of a module of an
    adopted model by its name.
    """
    if isinstance(key, str):
        return _of_module(net, linear_of(net, key))
    transition = net.transitions[key]
    topology = transition.topology
    layer = net.layers[transition.target]
    parents = topology.parents().long()
    children = topology.child.long()
    shape = (topology.n_children, topology.n_parents + 1)
    weights = torch.zeros(shape, dtype=torch.float64, device=parents.device)
    weights[children, parents] = transition.values().detach().view(-1).double()
    weights[:, -1] = layer.values().detach().double()
    absent = torch.ones_like(weights, dtype=torch.bool)
    absent[children, parents] = False
    absent[:, -1] = False
    frozen = torch.zeros_like(absent)
    held = transition.frozen_at.long()
    frozen[children[held], parents[held]] = True
    frozen[layer.frozen_at.long(), -1] = True
    return Matrix(weights, absent, frozen)


def key_of(net: Any, t: int) -> int | str:
    """Returns what `matrix_of` calls the matrix that has the relations of a transition."""
    if isinstance(net, Adopted):
        return net.transitions[t].name
    return t


def cells_of(net: Any, t: int, at: Tensor) -> Tensor:
    """Returns where relations are in their matrix, as child · columns + column without the bias,
    [n, numbers of a relation] int64.
    """
    transition = net.transitions[t]
    if isinstance(net, Adopted):
        linear = linear_of(net, transition.name)
        shape = linear.canonical(transition.grid.whole).shape
        numbers = torch.arange(shape.numel()).view(shape)
        return transition._numbers(linear.native(numbers), at).reshape(len(at), -1)
    topology = transition.topology
    parents = topology.parents_at(at).long()
    return (topology.child[at.long()].long() * topology.n_parents + parents)[:, None]


def spread_rows(net: Adopted, linear: Linear, of_rows: Tensor) -> Tensor:
    """Returns one entry per row of the pattern of a weight as [children, columns]."""
    pattern = net._pattern_of(linear.name)
    whole = of_rows.repeat_interleave(pattern.width).view(pattern.shape)
    return linear.canonical(whole).flatten(1)


def bias_of(linear: Linear) -> str:
    """Returns the name that the bias of a module has, if there is one."""
    return linear.name.removesuffix("weight") + "bias"


def _of_module(net: Adopted, linear: Linear) -> Matrix:
    grid = net._grids()[linear.name]
    device = grid.whole.device
    weights = linear.canonical(grid.whole).detach().flatten(1).double()
    kinds = spread_rows(net, linear, net._pattern_of(linear.name).kinds).to(device)
    absent = kinds == CUT
    frozen = kinds == FROZEN
    if not grid.parameter.requires_grad:
        frozen = ~absent
    count = len(weights)
    values = weights.new_zeros(count)
    is_missing = torch.ones(count, dtype=torch.bool, device=device)
    is_held = torch.zeros_like(is_missing)
    bias = net._grids().get(bias_of(linear))
    if bias is not None:
        values = bias.whole.detach().double()
        own = net._pattern_of(bias_of(linear)).kinds.to(device)
        is_missing = own == CUT
        is_held = own == FROZEN
        if not bias.parameter.requires_grad:
            is_held = ~is_missing
    return Matrix(
        torch.cat([weights, values[:, None]], 1),
        torch.cat([absent, is_missing[:, None]], 1),
        torch.cat([frozen, is_held[:, None]], 1),
    )
