"""gn.check: the invariants of a graph, each with the words that say which one broke."""

from itertools import pairwise

import torch
from torch import Tensor

from ._activation import is_activation
from ._coordinates import Coordinates
from ._errors import InvariantError
from ._graph import Graph
from ._layer import Layer


def check(net: Graph) -> None:
    """Raises InvariantError at the first broken invariant of the graph.

    Examples:
        >>> import grapnet as gn
        >>> gn.check(gn.GrapNet([3, 2]))
    """
    if len(net.layers) != len(net.transitions) + 1:
        raise InvariantError(
            f"{len(net.layers)} layers need {len(net.layers) - 1} transitions, there are"
            f" {len(net.transitions)}"
        )
    for number, layer in enumerate(net.layers):
        _check_layer(layer, f"layer {number}")
    uids = torch.cat([layer.uid for layer in net.layers])
    _require(len(uids.unique()) == len(uids), "a uid names two nodes")
    _require(
        len(uids) == 0 or int(uids.max()) < net.next_uid,
        f"a uid is not below next_uid ({net.next_uid})",
    )
    for t, transition in enumerate(net.transitions):
        where = f"transition {t}"
        check_wiring(
            transition.ptr, transition.child, len(net.layers[t]), len(net.layers[t + 1]), where
        )
        _require(
            transition.n_children == len(net.layers[t + 1]),
            f"{where} counts another number of children than the next layer",
        )
        _check_coordinates(transition, len(transition.child), where)
    for name, column in net.columns.items():
        _require(
            0 <= column.layer < len(net.layers), f"column {name}: there is no layer {column.layer}"
        )
        _check_coordinates(column, len(net.layers[column.layer]), f"column {name}")


def check_wiring(
    ptr: Tensor,
    child: Tensor,
    n_parents: int,
    n_children: int,
    where: str,
    *,
    distinct: bool = True,
) -> None:
    """Raises InvariantError when pointers or child references are not those of a wiring of this
    size.

    Without `distinct` a child that is named twice passes, which takes the longest to find.
    """
    _require(
        ptr.dtype == child.dtype == torch.int32 and ptr.dim() == child.dim() == 1,
        f"{where}: ptr and child are int32 vectors",
    )
    _require(
        len(ptr) == n_parents + 1, f"{where}: ptr has {len(ptr)} entries for {n_parents} parents"
    )
    _require(
        int(ptr[0]) == 0 and int(ptr[-1]) == len(child),
        f"{where}: ptr does not run from 0 to {len(child)}",
    )
    _require(not bool((ptr[1:] < ptr[:-1]).any()), f"{where}: ptr decreases")
    if len(child) == 0:
        return
    low, high = int(child.min()), int(child.max())
    _require(
        low >= 0 and high < n_children,
        f"{where}: child refers to row {low if low < 0 else high} of {n_children}",
    )
    if distinct:
        _require(
            not _has_twice(ptr, child, n_children),
            f"{where}: a node is related twice to the same child",
        )


def _check_layer(layer: Layer, where: str) -> None:
    uids = layer.uid
    _require(
        uids.dtype == torch.int64 and not bool((uids[1:] <= uids[:-1]).any()),
        f"{where}: uids are not ascending",
    )
    _require(len(uids) == 0 or int(uids[0]) >= 0, f"{where}: a uid is negative")
    for name, labels in (("activations", layer.activation_names), ("owners", layer.owner_names)):
        _require(len(labels) == len(uids), f"{where}: {len(labels)} {name} for {len(uids)} nodes")
        codes = labels.codes
        inside = len(codes) == 0 or (int(codes.min()) >= 0 and int(codes.max()) < len(labels.names))
        _require(inside, f"{where}: a code of {name} names nothing")
    for name, _ in layer.activation_names.kinds():
        _require(is_activation(name), f"{where}: there is no activation {name!r}")
    if not layer.is_sensory:
        _check_coordinates(layer, len(uids), where)


def _check_coordinates(store: Coordinates, size: int, where: str) -> None:
    held = store.frozen_at
    _require(
        not bool((held[1:] <= held[:-1]).any()), f"{where}: frozen positions are not ascending"
    )
    _require(
        len(held) == 0 or (int(held[0]) >= 0 and int(held[-1]) < size),
        f"{where}: a frozen position is outside 0…{size - 1}",
    )
    _require(
        len(store.frozen_values) == len(held),
        f"{where}: {len(store.frozen_values)} frozen values for {len(held)} positions",
    )
    _require(store.size == size, f"{where}: {store.size} coordinates where there should be {size}")
    _require(
        store.is_assembled_in_order(), f"{where}: frozen values would be put back in other places"
    )
    gradient = store.parameter.grad
    _require(
        gradient is None or gradient.shape == store.parameter.shape,
        f"{where}: the gradient has another shape",
    )


def _has_twice(ptr: Tensor, child: Tensor, n_children: int, chunk: int = 1 << 22) -> bool:
    """Says whether an owner names a child twice, a bounded number of relations at a time."""
    cuts = [0]
    while cuts[-1] < len(ptr) - 1:  # whole owners, about `chunk` relations together
        cuts.append(
            max(cuts[-1] + 1, int(torch.searchsorted(ptr, ptr[cuts[-1]] + chunk, right=True)) - 1)
        )
    for first, last in pairwise(cuts):
        part, ends = child[int(ptr[first]) : int(ptr[last])], ptr[first : last + 1]
        if _rises(ends - ends[0], part):
            continue
        owners = torch.arange(last - first, device=child.device).repeat_interleave(
            ends.diff().long()
        )
        keys = (owners * n_children + part).sort().values
        if bool((keys[1:] == keys[:-1]).any()):
            return True
    return False


def _rises(ptr: Tensor, child: Tensor) -> bool:
    """Says whether the children of every owner are in ascending order, each once, as in a full or a
    drawn wiring.
    """
    rises = child[1:] > child[:-1]
    starts = ptr[(ptr > 0) & (ptr < len(child))].long()
    rises[starts - 1] = True  # from one owner to the next
    return bool(rises.all())


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise InvariantError(broken)
