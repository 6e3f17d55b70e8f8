"""gn.attach: optimizer state that follows every edit, coordinate by coordinate."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adagrad, Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grapnet.core.column import Column
from grapnet.core.errors import OptimizerError
from grapnet.core.graph import Graph
from grapnet.core.journal import Commit
from grapnet.core.values import Coordinates, layout_of

Survivors = Literal["keep", "renew"]
Slots = dict[str, dict[str, Tensor]]  # parameter name -> state name -> the values of removed coordinates

_attached: "weakref.WeakKeyDictionary[Optimizer, list[OptimizerFollower]]" = weakref.WeakKeyDictionary()
_loaded_slots: "weakref.WeakKeyDictionary[Optimizer, dict[int, Slots]]" = weakref.WeakKeyDictionary()
_checked: "weakref.WeakKeyDictionary[Optimizer, _Checked]" = weakref.WeakKeyDictionary()


def attach(
    optimizer: Optimizer, net: Graph, *, survivors: Survivors = "keep", newborn: Literal["zero"] = "zero"
) -> None:
    """Makes an optimizer follow the commits of a net, for as long as both live.

    Args:
        optimizer: any `torch.optim` optimizer whose state is one number a coordinate, or one a parameter.
        net: the net whose parameters it holds.
        survivors: "keep" carries the state of every coordinate that stays; "renew" starts all afresh at every commit.
        newborn: "zero" gives a new coordinate clean state. With Adam its first update then has the size of the learning
            rate times (1 - β1)/√(1 - β2), over the bias corrections of the parameter's step count.

    Raises:
        OptimizerError: the optimizer holds no parameter of the net.
    """
    if survivors not in ("keep", "renew"):
        raise ValueError(f'survivors is "keep" or "renew", got {survivors!r}')
    if newborn != "zero":
        raise ValueError(f'newborn is "zero", got {newborn!r}')
    mine = {id(p) for p in net.parameters()}
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise OptimizerError("this optimizer holds no parameter of the net; make it with net.parameters()")
    if isinstance(optimizer, LBFGS):
        raise OptimizerError("LBFGS keeps one flat history over all parameters, which cannot follow an edit")
    refuse_stale_state(optimizer)
    mark_followed(optimizer)
    detach(optimizer, net)
    follower = OptimizerFollower(optimizer, net, survivors, _loaded_slots.pop(optimizer, {}))
    _attached.setdefault(optimizer, []).append(follower)
    net.follow(follower)


def detach(optimizer: Optimizer, net: Graph) -> None:
    """Makes an optimizer no longer follow the commits of a net."""
    for follower in _attached.get(optimizer, []):
        if follower.net() is net:
            net.unfollow(follower)
    _attached[optimizer] = [f for f in _attached.get(optimizer, []) if f.net() is not net]


def undo_slots(optimizer: Optimizer, net: Graph) -> dict[int, Slots]:
    """Returns the state that undo gives back to an attached optimizer: of each commit, what it took away."""
    return next((f.kept_slots(net) for f in _attached.get(optimizer, []) if f.net() is net), {})


def set_undo_slots(optimizer: Optimizer, slots: dict[int, Slots]) -> None:
    """Keeps what `undo_slots` returned in another session until the optimizer is attached."""
    _loaded_slots[optimizer] = slots


class OptimizerFollower:
    """Carries one optimizer's state through the commits of one net."""

    def __init__(self, optimizer: Optimizer, net: Graph, survivors: Survivors, slots: dict[int, Slots]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.net = weakref.ref(net)
        self.survivors = survivors
        self._slots = slots  # version -> what its commit took away, for undo

    def kept_slots(self, net: Graph) -> dict[int, Slots]:
        """Returns the slots of the commits that can still be taken back."""
        return {version: slots for version, slots in self._slots.items() if net.journal.keeps(version)}

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Computes the state after the commit; raises OptimizerError when some of it cannot be mapped."""
        optimizer = self.optimizer()
        if optimizer is None:
            return lambda: None
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        moved = {graph.get_parameter(name): index for name, index in commit.parameters.items()}
        names = {p: name for name, p in graph.named_parameters() if id(p) in held}
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        states: dict[nn.Parameter, dict[str, Any]] = {}
        kept = {v: slots for v, slots in self._slots.items() if v == commit.undoes or graph.journal.keeps(v)}
        restored = kept.pop(commit.undoes, {}) if commit.undoes is not None else {}
        taken: Slots = {}
        for parameter, name in names.items():
            state = optimizer.state.get(parameter)
            if not state:
                continue
            if self.survivors == "renew":
                states[parameter] = {}
            elif parameter in moved:
                index, taken[name] = moved[parameter], {}
                states[parameter] = dict(state)
                for key in _per_coordinate(state, parameter, name):
                    taken[name][key] = state[key].flatten().index_select(0, index.removed)
                    born = restored.get(name, {}).get(key)
                    if born is not None and len(born) != len(index.inserted):
                        raise OptimizerError(f"the {key!r} that undo would give back to {name} is of another length")
                    if born is None:
                        clean = _clean_value(optimizer, groups[id(parameter)], key)
                        born = state[key].new_full((len(index.inserted),), clean)
                    states[parameter][key] = index.carry(state[key], born.view(-1, *state[key].shape[1:]))
        if not commit.ends_trial:
            kept[commit.version] = taken

        def install() -> None:
            for parameter, state in states.items():
                optimizer.state[parameter] = state
            self._slots = kept
            mark_followed(optimizer, list(moved))

        return install

    def prepare_columns(self, graph: Graph, coming: Sequence[Column], leaving: Sequence[Column]) -> Callable[[], None]:
        """Finds the places of new columns, each in the group of the Parameter it is trained beside, if that is held."""
        optimizer = self.optimizer()
        if optimizer is None:
            return lambda: None
        gone, names = {id(column.value) for column in leaving}, {column.parameter_name for column in leaving}
        lists = [_without(group, gone) for group in optimizer.param_groups]
        mine = {id(parameter) for parameter in graph.parameters()}
        states = {}
        for column in coming:
            beside = graph.get_parameter(column.beside)
            for group, changed in zip(optimizer.param_groups, lists, strict=True):
                if any(beside is parameter for parameter in group["params"]):
                    states[column.value] = _first_state(optimizer, group, column)
                    _insert(changed, column, beside, mine)
            mine.add(id(column.value))
        slots = {v: {n: s for n, s in kept.items() if n not in names} for v, kept in self._slots.items()}

        def install() -> None:
            for group, changed in zip(optimizer.param_groups, lists, strict=True):
                for key, items in changed.items():
                    group[key][:] = items
            for column in leaving:
                optimizer.state.pop(column.value, None)
                _checked[optimizer].layouts.pop(id(column.value), None)
            optimizer.state.update({parameter: state for parameter, state in states.items() if state})
            self._slots = slots
            mark_followed(optimizer, list(states))

        return install


class _Checked:
    """Which layout every parameter had when the optimizer last stepped."""

    def __init__(self) -> None:
        self.changes = -1
        self.layouts: dict[int, object] = {}


def mark_followed(optimizer: Optimizer, parameters: list[nn.Parameter] | None = None) -> None:
    """Notes that the optimizer's state fits the present coordinates of parameters (all of its own by default)."""
    checked = _checked.setdefault(optimizer, _Checked())
    if parameters is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        checked.layouts[id(parameter)] = layout_of(parameter)


def refuse_stale_state(optimizer: Optimizer, *_: object) -> None:
    """Raises when the optimizer holds state of coordinates that have moved; one comparison if no net was edited."""
    checked = _checked.setdefault(optimizer, _Checked())
    if checked.changes == Coordinates.layout_changes:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            layout = layout_of(parameter)
            moved = checked.layouts.get(id(parameter), layout) is not layout
            if _holds_stale_state(optimizer, parameter, moved):
                raise OptimizerError(
                    "this optimizer holds state of relations or biases that an edit has moved since its last step. "
                    "Attach it before editing: gn.attach(optimizer, net); or make a new optimizer now"
                )
    mark_followed(optimizer)
    checked.changes = Coordinates.layout_changes


def _holds_stale_state(optimizer: Optimizer, parameter: nn.Parameter, moved: bool) -> bool:
    """Says whether the state is of coordinates that have moved: the parameter did, or a size says so."""
    if moved and isinstance(optimizer, LBFGS):
        return any(optimizer.state.values())
    values = [v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor) and v.dim() > 0]
    resized = layout_of(parameter) is not None and any(
        v.dim() == parameter.dim() and len(v) != len(parameter) for v in values
    )
    return bool(values) and (moved or resized)


def _clean_value(optimizer: Optimizer, group: dict[str, Any], key: str) -> float:
    """Returns what a state entry starts from."""
    if isinstance(optimizer, Rprop) and key == "step_size":
        return float(group["lr"])
    if isinstance(optimizer, Adagrad) and key == "sum":
        return float(group["initial_accumulator_value"])
    return 0.0


def _without(group: dict[str, Any], gone: set[int]) -> dict[str, list[Any]]:
    """Returns a group's Parameters, and their names where it has them, without some."""
    stays = [id(parameter) not in gone for parameter in group["params"]]
    lists = {key: group[key] for key in ("params", "param_names") if key in group}
    return {key: [item for item, kept in zip(items, stays, strict=True) if kept] for key, items in lists.items()}


def _insert(lists: dict[str, list[Any]], column: Column, beside: nn.Parameter, mine: set[int]) -> None:
    """Puts a column behind the net's last Parameter in a group, where `net.parameters()` would have had it."""
    params = lists["params"]
    place = 1 + max(n for n, parameter in enumerate(params) if id(parameter) in mine)
    if "param_names" in lists:
        name = lists["param_names"][next(n for n, parameter in enumerate(params) if parameter is beside)]
        lists["param_names"].insert(place, name.removesuffix(column.beside) + column.parameter_name)
    params.insert(place, column.value)


def _first_state(optimizer: Optimizer, group: dict[str, Any], column: Column) -> dict[str, Any]:
    """Returns the state that an optimizer has before its first step; Adagrad alone makes it ahead."""
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        raise OptimizerError(f"Muon trains matrices only, and {column.parameter_name} is a vector; use another for it")
    if not isinstance(optimizer, Adagrad):
        return {}
    accumulated = torch.full_like(column.value.detach(), group["initial_accumulator_value"])
    step = torch.zeros((), dtype=torch.float32, device=accumulated.device if group.get("fused") else "cpu")
    return {"step": step, "sum": accumulated}


def _per_coordinate(state: dict[str, Any], parameter: nn.Parameter, name: str) -> list[str]:
    """Returns the state entries with one value a coordinate; raises for one that is neither that nor one number."""
    found = []
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            found.append(key)
        elif isinstance(value, Tensor | list | tuple | dict) and not (isinstance(value, Tensor) and value.dim() == 0):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise OptimizerError(
                f"the optimizer's {key!r} ({shape}) for {name} {list(parameter.shape)} is not one value a coordinate, "
                "so it cannot follow an edit; use another optimizer or make a new one after editing"
            )
    return found


def _mark_loaded_state(
    setstate: Callable[[Optimizer, dict[str, Any]], None],
) -> Callable[[Optimizer, dict[str, Any]], None]:
    """Wraps the one method through which state arrives by load_state_dict, deepcopy and unpickling."""

    @functools.wraps(setstate)
    def marked(optimizer: Optimizer, state: dict[str, Any]) -> None:
        setstate(optimizer, state)
        mark_followed(optimizer)

    return marked


# torch has a hook for the steps of all optimizers but none for their loading, and state that is loaded and then left
# behind by an edit of equal size would be used for other relations in silence.
register_optimizer_step_pre_hook(refuse_stale_state)
Optimizer.__setstate__ = _mark_loaded_state(Optimizer.__setstate__)  # pyright: ignore[reportAttributeAccessIssue]
