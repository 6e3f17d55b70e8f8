"""gn.check: the invariants of a graph, and whether a model can run with the nets inside it."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ._activation import is_activation
from ._coordinates import Coordinates
from ._errors import EditError, InvariantError
from ._evaluating import evaluating
from ._graph import Graph
from ._layer import Layer, LiveNodes

# Relations that are searched together for repeated children.
_CHUNK = 1 << 22


def check(model: nn.Module, *inputs: Any, **keywords: Any) -> None:
    """Raises InvariantError at the first broken invariant of a net, or of the nets in a model.

    With inputs it also runs the model on them, in evaluation mode and without gradients: an edit of
    a net's inputs or outputs (`interface=True`) may leave shapes around the net that do not fit any
    more. The run leaves modes, buffers and the random state as they are; hooks see it.

    Args:
        model: a net, or any module.
        *inputs: what the model is called with.
        **keywords: the same, by name.

    Raises:
        InvariantError: a graph is broken inside.
        EditError: the model cannot run; the message names the module that failed.

    Examples:
        >>> import grapnet as gn
        >>> gn.check(gn.GrapNet([3, 2]))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> net = gn.graft(model, "0")["0"]
        >>> with net.edit(reason="narrower") as edit:
        ...     edit.remove_nodes(net.layers[1][:2], interface=True)
        >>> gn.check(model, torch.zeros(5, 4))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        grapnet.core._errors.EditError: '1' (LayerNorm) cannot run on an input of shape [5, 6]: ...
    """
    for module in model.modules():
        if isinstance(module, Graph):
            _check_graph(module)
    if inputs or keywords:
        _check_run(model, inputs, keywords)


def _check_run(model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raises EditError, naming the innermost module that was running, when a model cannot run."""
    names = {module: name for name, module in model.named_modules()}
    running: list[tuple[nn.Module, tuple[Any, ...]]] = []

    def enter(module: nn.Module, given: tuple[Any, ...]) -> None:
        running.append((module, given))

    def leave(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        while running.pop()[0] is not module:
            pass

    handles = [module.register_forward_pre_hook(enter) for module in names]
    handles += [module.register_forward_hook(leave) for module in names]
    # The run writes into copies of the buffers, such as a norm's running statistics.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = {tensor.device for tensor in model.state_dict().values() if tensor.is_cuda}
    try:
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices):
            functional_call(model, buffers, inputs, keywords)
    except Exception as error:
        module, given = running[-1] if running else (model, inputs)
        shapes = [list(one.shape) for one in given if isinstance(one, Tensor)]
        where = repr(names[module]) if names[module] else "the model itself"
        raise EditError(
            f"{where} ({type(module).__name__}) cannot run on an input of shape"
            f" {', '.join(map(str, shapes))}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _check_graph(net: Graph) -> None:
    net._check_tensors()
    if net._wired:
        _check_ends(net)
    for number, layer in enumerate(net._own_layers):
        _check_layer(layer, f"layer {number}")
    uids = torch.cat([layer.uid for layer in net._own_layers])
    _require(len(uids.unique()) == len(uids), "a uid names two nodes")
    _require(
        len(uids) == 0 or int(uids.max()) < net._next_uid,
        f"a uid is not below next_uid ({net._next_uid})",
    )
    for t, transition in enumerate(net._wired):
        where = f"transition {t}"
        n_parents = len(net.layers[transition.source])
        n_children = len(net.layers[transition.target])
        check_wiring(transition.ptr, transition.child, n_parents, n_children, where)
        _require(
            transition.n_children == n_children,
            f"{where} counts another number of children than layer {transition.target}",
        )
        _check_coordinates(transition, len(transition.child), where)
    for name, column in net.columns.items():
        _require(
            0 <= column.layer < len(net.layers),
            f"column {name}: layer {column.layer} does not exist",
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
    """Raises InvariantError if pointers or child references do not fit a wiring of this size.

    Without `distinct`, duplicate children pass, which are the slowest to find.
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
    low = int(child.min())
    high = int(child.max())
    _require(
        low >= 0 and high < n_children,
        f"{where}: child refers to row {low if low < 0 else high} of {n_children}",
    )
    if distinct:
        _require(
            not _has_twice(ptr, child, n_children),
            f"{where}: a node lists a child twice",
        )


def _check_ends(net: Graph) -> None:
    ends = net.ends
    for t, (source, target) in enumerate(ends):
        _require(
            0 <= source < target < len(net.layers),
            f"transition {t} leads from layer {source} to layer {target} of {len(net.layers)}",
        )
    _require(len(set(ends)) == len(ends), "two transitions lead from one layer to the same other")
    for number in range(1, len(net.layers)):
        _require(bool(net.entering(number)), f"no transition leads to layer {number}")


def _check_layer(layer: LiveNodes, where: str) -> None:
    uids = layer.uid
    _require(
        uids.dtype == torch.int64 and not bool((uids[1:] <= uids[:-1]).any()),
        f"{where}: uids are not ascending",
    )
    _require(len(uids) == 0 or int(uids[0]) >= 0, f"{where}: a uid is negative")
    for name, labels in (("activations", layer._activation_names), ("owners", layer._owner_names)):
        _require(len(labels) == len(uids), f"{where}: {len(labels)} {name} for {len(uids)} nodes")
        codes = labels.codes
        inside = len(codes) == 0 or (int(codes.min()) >= 0 and int(codes.max()) < len(labels.names))
        _require(inside, f"{where}: a code of {name} is out of range")
    for name, _ in layer._activation_names.kinds():
        _require(is_activation(name), f"{where}: unknown activation {name!r}")
    if isinstance(layer, Layer) and layer._has_biases:
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
    _require(store._is_assembled_in_order(), f"{where}: frozen values are out of order")
    gradient = store.parameter.grad
    _require(
        gradient is None or gradient.shape == store.parameter.shape,
        f"{where}: the gradient has another shape",
    )


def _has_twice(ptr: Tensor, child: Tensor, n_children: int) -> bool:
    """Returns whether an owner lists a child twice; checks a bounded number of relations at a
    time.
    """
    # Whole owners, about _CHUNK relations together.
    cuts = [0]
    while cuts[-1] < len(ptr) - 1:
        end = torch.searchsorted(ptr, ptr[cuts[-1]] + _CHUNK, right=True)
        cuts.append(max(cuts[-1] + 1, int(end) - 1))
    for first, last in pairwise(cuts):
        part = child[int(ptr[first]) : int(ptr[last])]
        ends = ptr[first : last + 1]
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
    """Returns whether the children of every owner are strictly ascending, as in a full or a drawn
    wiring.
    """
    rises = child[1:] > child[:-1]
    starts = ptr[(ptr > 0) & (ptr < len(child))].long()
    rises[starts - 1] = True  # from one owner to the next
    return bool(rises.all())


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise InvariantError(broken)
