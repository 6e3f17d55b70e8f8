"""What recorded training steps depend on, compared before every replay."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from grapnet._network import GrapNet
from grapnet._torch import accumulation_hooks, gradient_hooks, pass_hooks, step_hooks
from grapnet.core._commit import transactions
from grapnet.core._errors import CaptureError
from grapnet.core._graph import Graph
from grapnet.core._opened import is_watched

from ._state import parameters_of

# Values that are the same when they are equal; all other objects are compared by identity.
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# Attributes that torch gives to every module, and never replaces.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class Watch:
    """What recordings depend on beside their batches, as it was at one moment.

    All objects are compared by identity, in functions of C as far as possible, as every replay
    waits for it. That they are held here keeps their identities from being used again.

    Attributes:
        tensors: the Parameters and buffers of the model, and the Parameters of the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        # Dicts and lists of which all is watched, what each belongs to, and how long it was.
        self._views: list[Collection[Any]] = []
        self._owners: list[tuple[str, int]] = []
        # Modules, and what reads their own attributes.
        self._modules: list[dict[str, Any]] = []
        self._readers: list[itemgetter[Any]] = []
        # Dicts to which nothing may be added.
        self._sized: list[Mapping[Any, Any]] = []
        self._hooks: list[Mapping[Any, Any]] = []
        self._transactions = transactions()
        tensors: dict[Tensor, None] = {}
        for module in model.modules():
            self._add_module(module)
            held = (*module._parameters.values(), *module._buffers.values())
            tensors.update(dict.fromkeys(tensor for tensor in held if tensor is not None))
        self._add_optimizer(optimizer)
        tensors.update(dict.fromkeys(parameters_of(optimizer)))
        self.tensors = list(tensors)
        self._held = list(chain.from_iterable(self._views))
        self._attributes = list(self._read())
        self._length = sum(map(len, self._sized))
        self._places = self._placed()
        self._scaler = scaler
        self._scaling = self._scaled()

    def _add_module(self, module: nn.Module) -> None:
        name = type(module).__name__
        attributes = vars(module)
        self._hooks += pass_hooks(module)
        if isinstance(module, GrapNet):
            # Its plans are others after each commit, and after `use` and `to`.
            self._add("the execution of a net", vars(module.execution).values())
        # A graph over a model notes what it was asked for; its commits are counted.
        if isinstance(module, GrapNet) or not isinstance(module, Graph):
            own = [key for key in attributes if key not in _OF_TORCH]
            self._modules.append(attributes)
            self._sized.append(attributes)
            # With two keys or more it returns a tuple.
            self._readers.append(itemgetter("_modules", *own))
        for held in (module._parameters, module._buffers, module._modules):
            if held:
                self._add(name, held.values())
            else:
                self._sized.append(held)

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        self._hooks += step_hooks(optimizer)
        name = type(optimizer).__name__
        # Loading a state dict makes another list of groups, and another state.
        self._add(name, vars(optimizer).values())
        self._add(name, optimizer.param_groups)
        for group in optimizer.param_groups:
            self._add(name, group.values())
            self._add(name, group["params"])
        self._add(name, optimizer.state.values())
        for state in optimizer.state.values():
            self._add(name, state.values())

    def _add(self, name: str, view: Collection[Any]) -> None:
        self._views.append(view)
        self._owners.append((name, len(view)))

    def _read(self) -> Iterator[Any]:
        """Returns an iterator over the own attributes of all modules."""
        read: Any = call
        return chain.from_iterable(map(read, self._readers, self._modules))

    def difference(self) -> str:
        """Returns what has changed; empty if nothing has."""
        if transactions() != self._transactions:
            return "a net was edited"
        if not self._are_attributes_same():
            return "an attribute of a module has changed"
        is_same = sum(map(len, self._views)) == len(self._held)
        if not is_same or not all(map(is_, chain.from_iterable(self._views), self._held)):
            name = self._changed()
            if name:
                return f"{name} has changed"
        if self._placed() != self._places:
            return "a Parameter or buffer has other memory, or requires gradients or not"
        if self._scaled() != self._scaling:
            return "the settings of the scaler have changed"
        return ""

    def _are_attributes_same(self) -> bool:
        """Returns whether modules have the attributes that they had, or equal constants."""
        if sum(map(len, self._sized)) != self._length:
            return False
        try:
            if all(map(is_, self._read(), self._attributes)):
                return True
            return all(map(_are_same, self._read(), self._attributes))
        except KeyError:
            return False

    def _changed(self) -> str:
        """Returns the name of the first dict or list whose content has changed; empty if constants
        were only replaced by equal ones.
        """
        held = iter(self._held)
        for view, (name, length) in zip(self._views, self._owners, strict=True):
            before = list(islice(held, length))
            if len(view) != length or not all(map(_are_same, view, before)):
                return name
        return ""

    def require_on(self, device: torch.device) -> None:
        """Raises CaptureError if a tensor is not on a device."""
        for tensor in self.tensors:
            if tensor.device != device:
                raise CaptureError(
                    f"the model is on {device} and on {tensor.device}, and a recording runs on one"
                    " device; this step was not made"
                )

    def armed(self) -> str:
        """Returns which hooks the step would call; empty if none."""
        if any(self._hooks):
            return "a module or the optimizer has hooks, or a recorder is armed"
        if any(map(gradient_hooks, self.tensors)) or any(map(accumulation_hooks, self.tensors)):
            return "a Parameter has hooks"
        if any(map(is_watched, self.tensors)):
            return "a recorder is armed"
        return ""

    def _placed(self) -> tuple[list[int], list[Any]]:
        """Returns where the tensors are, and what is computed with them."""
        return list(map(Tensor.data_ptr, self.tensors)), list(map(_kind, self.tensors))

    def _scaled(self) -> tuple[Any, ...]:
        scaler = self._scaler
        if scaler is None:
            return ()
        return (
            scaler.is_enabled(),
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
        )


_kind = attrgetter("requires_grad", "shape")


def _are_same(one: Any, other: Any) -> bool:
    """Returns whether two objects are one, or the same number or text, or tuples of such, as betas
    are.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_are_same, one, other))
    return isinstance(one, CONSTANTS) and one == other


def has_foreign(hooks: Iterable[Mapping[int, Any]]) -> bool:
    """Returns whether one of the hooks is not of this library."""
    for registered in hooks:
        for hook in registered.values():
            if not str(getattr(hook, "__module__", "")).startswith("grapnet."):
                return True
    return False
