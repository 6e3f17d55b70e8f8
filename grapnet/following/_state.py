"""The state that optimizers keep, and the guard that refuses state of an older version of a net.

Every edited Parameter has a layout, a token that changes whenever its coordinates move. The guard
notes the layout that an optimizer's state is of: when the optimizer is attached, steps, follows a
commit, or loads a state dict after it was attached. State of any other layout is refused, and so is
state on an edited Parameter of which nothing was noted.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adagrad, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grapnet._torch import pytree
from grapnet.core._commit import settle, unsettled
from grapnet.core._coordinates import Coordinates, layout_of
from grapnet.core._errors import OptimizerError
from grapnet.core._graph import Graph

if TYPE_CHECKING:
    from ._optimizers import LoadedSlots, OptimizerFollower

State = dict[str, Any]

# Known optimizers, by patterns of class names; base classes count too.

_REFUSED = {
    "LBFGS": "it keeps one flat history over all parameters, which cannot follow an edit",
    "Adafactor": (
        "it keeps averages over the rows and columns of a matrix, and relations are no matrix: what"
        " the ones that were cut have added to an average cannot be taken out of it"
    ),
    "SparseAdam": "it steps on sparse gradients only, and those of a GrapNet are dense",
    "FOCUS": (
        "it corrects an average of the weights by the number of steps, which a newborn weight has"
        " not taken"
    ),
}
# Entries that are copies or averages of the weights: a newborn coordinate starts from its value.
_COPIES = {
    "*": ("old_p", "p0", "prev_param", "slow_buffer", "slow_param", "slow_params", "x0"),
    "*ScheduleFree*": ("x", "y", "z"),
    "A2Grad*": ("x_k",),
    "ASGD": ("ax",),
    "AccSGD": ("momentum_buffer",),
    "DAdaptSGD": ("z",),
    "Lookahead": ("backup_params",),
    "Ranger21": ("lookahead_params",),
    "SRMM": ("mov_avg_param",),
}
# What other entries start from, where that is not 0: a number, or the name of an option. The names
# of classes are whole ones.
_STARTS: dict[str, dict[str, float | str]] = {
    "Adagrad": {"sum": "initial_accumulator_value"},
    "Adai": {"beta1_prod": 1.0},
    "BSAM": {"s": 1.0},
    "DAdaptAdaGrad": {"alphak": 1e-6, "alpha_k": 1e-6},
    "Prodigy": {"s": 0.0},
    "Rprop": {"step_size": "lr"},
    "VSGD": {"bg": "pbg2", "bhg": "pbhg2"},
    "Yogi": {"exp_avg": "initial_accumulator", "exp_avg_sq": "initial_accumulator"},
}
# Entries of torch's own optimizers that are about gradients.
_MOMENTS = {"exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer", "square_avg"}
_MOMENTS |= {"acc_delta", "grad_avg", "prev", "step_size", "sum"}
OF_TORCH = tuple(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
)
_CONTAINERS = (dict, list, tuple, deque)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns every Parameter of every group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def inside_of(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers of the same Parameters among an optimizer's attributes."""
    inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if not inside:
        return []
    held = set(map(id, parameters_of(optimizer)))
    return [one for one in inside if not held.isdisjoint(map(id, parameters_of(one)))]


def held_by(optimizer: Optimizer, net: Graph) -> dict[str, nn.Parameter]:
    """Returns the Parameters of a net that an optimizer holds, by their names in the net."""
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    found = {name: store.parameter for name, store in net._stores().items()}
    return {name: parameter for name, parameter in found.items() if id(parameter) in held}


def per_coordinate(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> dict[str, Tensor]:
    """Returns the tensors with one value per coordinate in the state of a Parameter, also inside
    lists, tuples and dicts.

    Raises:
        OptimizerError: a tensor is neither that nor one number.
    """
    found = {}
    for entry, value in entries_of(optimizer.state.get(parameter, {})).items():
        if _has_a_value_a_coordinate(optimizer, parameter, name, entry, value):
            found[entry] = value
    return found


def entries_of(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the entries of a state by name; momentum_buffer[0.9] is inside a dict."""
    found = {}
    for key, value in state.items():
        if isinstance(value, _CONTAINERS):
            leaves, _ = pytree.tree_flatten_with_path(value)
            found |= {f"{key}{pytree.keystr(path)}": leaf for path, leaf in leaves}
        else:
            found[str(key)] = value
    return found


def with_entries(state: State, entries: Mapping[str, Tensor]) -> State:
    """Returns a state with other tensors in the place of some entries."""
    changed = {}
    for key, value in state.items():
        if isinstance(value, _CONTAINERS):
            leaves, form = pytree.tree_flatten_with_path(value)
            names = [f"{key}{pytree.keystr(path)}" for path, _ in leaves]
            pairs = zip(names, leaves, strict=True)
            moved = [entries.get(name, leaf) for name, (_, leaf) in pairs]
            changed[key] = pytree.tree_unflatten(moved, form)
        else:
            changed[key] = entries.get(str(key), value)
    return changed


def _has_a_value_a_coordinate(
    optimizer: Optimizer, parameter: nn.Parameter, name: str, entry: str, value: Any
) -> bool:
    """Returns whether an entry has one value per coordinate, or is one number; raises
    OptimizerError otherwise.

    A Parameter of a single coordinate cannot tell the two apart by shape; the optimizer's other
    Parameters can.
    """
    if not isinstance(value, Tensor):
        if not holds_tensors(value):
            return False
        form: Any = type(value).__name__
    else:
        if value.numel() == 1 and parameter.numel() != 1:
            return False
        form = list(value.shape)
        is_whole = value.shape == parameter.shape
        if not is_whole and is_known(optimizer, entry):
            # Prodigy's are flat.
            is_whole = value.shape == (parameter.numel(),)
        if value.numel() == 1 and not (is_whole and not _is_one_number(optimizer, entry)):
            return False
        if is_whole and value.is_floating_point():
            return True
        if is_whole:
            form = value.dtype
    raise OptimizerError(
        f"the optimizer's {entry!r} ({form}) for {name} {list(parameter.shape)} does not have"
        " one value per coordinate, so it cannot follow an edit; use another optimizer or make a"
        " new one after editing"
    )


def _is_one_number(optimizer: Optimizer, entry: str) -> bool:
    """Returns whether an entry is a single number also where the Parameter has several coordinates,
    or none.
    """
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and parameter.numel() != 1:
            value = entries_of(state).get(entry)
            if isinstance(value, Tensor) and value.numel() == 1:
                return True
    return False


def is_like(value: Any, parameter: Tensor) -> bool:
    """Returns whether something is a tensor with one number per coordinate."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.shape in (parameter.shape, (parameter.numel(),))


def holds_tensors(value: object) -> bool:
    """Returns whether an object of another library has tensors among its attributes."""
    attributes = getattr(value, "__dict__", {})
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(dict(attributes)))


def hidden_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> str:
    """Returns where an optimizer keeps numbers per coordinate outside the state of its Parameters;
    empty if it does not.

    Sizes decide: that of all Parameters together (flat), those of each of them, or the shape of a
    column of weights, which nothing else has.
    """
    sizes = {parameter.numel() for parameter in parameters if parameter.numel() > 1}
    columns = {parameter.shape for parameter in parameters if parameter.numel() > 1}
    columns = {shape for shape in columns if len(shape) > 1}
    total = sum(parameter.numel() for parameter in parameters_of(optimizer))
    for place, value in _places_outside_of_state(optimizer):
        tensors = []
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                tensors.append(leaf)
        found = {tensor.numel() for tensor in tensors}
        covers = bool(sizes) and sizes <= found
        flat = total > 1 and total in found
        if covers or flat or any(tensor.shape in columns for tensor in tensors):
            return place
    return ""


def _places_outside_of_state(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of an optimizer, and the parts of its state that belong to no
    Parameter.
    """
    inside = [one.state for one in inside_of(optimizer)]
    for name, value in vars(optimizer).items():
        is_of_another = any(value is state for state in inside)
        if name not in ("state", "param_groups", "defaults") and not is_of_another:
            yield f"its attribute {name!r}", value
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            yield f"state[{key!r}]", value


def refuse_kind(optimizer: Optimizer) -> None:
    """Raises OptimizerError, with the reason, for an optimizer that cannot follow a net."""
    for name in _class_names(optimizer):
        if name in _REFUSED:
            raise OptimizerError(
                f"{name} cannot follow a net: {_REFUSED[name]}; use Adam, SGD or another with one"
                " value per coordinate"
            )


def is_copy(optimizer: Optimizer, entry: str) -> bool:
    """Returns whether a state entry is known as a copy or an average of the weights."""
    for pattern, entries in _COPIES.items():
        if entry in entries and _is_a(optimizer, pattern):
            return True
    return False


def clean_value(optimizer: Optimizer, group: State, entry: str) -> float:
    """Returns what a state entry starts from."""
    for name, entries in _STARTS.items():
        if entry in entries and name in _class_names(optimizer):
            start = entries[entry]
            return float(group[start] if isinstance(start, str) else start)
    return 0.0


def is_known(optimizer: Optimizer, entry: str) -> bool:
    """Returns whether it is known what a state entry starts from."""
    if isinstance(optimizer, OF_TORCH) and entry in _MOMENTS:
        return True
    if is_copy(optimizer, entry):
        return True
    return any(entry in _STARTS[name] for name in _class_names(optimizer) if name in _STARTS)


def first_state(optimizer: Optimizer, group: State, content: Tensor) -> State:
    """Returns the state before the first step of a Parameter with this content; Adagrad alone makes
    it ahead.
    """
    if not isinstance(optimizer, Adagrad):
        return {}
    accumulated = torch.full_like(content, group["initial_accumulator_value"])
    device = accumulated.device if group.get("fused") else "cpu"
    return {"step": torch.zeros((), dtype=torch.float32, device=device), "sum": accumulated}


def is_before_first_step(optimizer: Optimizer, state: Mapping[str, Any]) -> bool:
    """Returns whether a state is the one that Adagrad makes ahead, the same for every
    coordinate.
    """
    return isinstance(optimizer, Adagrad) and "step" in state and float(state["step"]) == 0


def is_near(values: Tensor, weights: Tensor) -> bool:
    """Returns whether a vector is much closer to the weights than to 0: at most half of its length
    away, and closer for three quarters of the coordinates.

    Momentum is seldom as large as the weights.
    """
    apart = values - weights
    if not bool(apart.norm() < values.norm() / 2):
        return False
    counted = (values != 0) | (weights != 0)
    nearer = (apart.abs() < values.abs())[counted]
    return bool(nearer.float().mean() >= 0.75)


def _is_a(optimizer: Optimizer, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in _class_names(optimizer))


def _class_names(optimizer: Optimizer) -> list[str]:
    return [kind.__name__ for kind in type(optimizer).__mro__]


# The guard


class Record:
    """The record of one optimizer.

    Attributes:
        followers: one for each net that it is attached to.
        loaded: slots that wait for their net.
        layouts: the layout that the state of each Parameter is of, None for one never edited.
        compared: how often layouts had changed, in all graphs of the process, and how many groups
            there were, when the layouts were last compared.
        is_watched: whether saving and loading its state calls the guard.
    """

    def __init__(self) -> None:
        self.followers: list[OptimizerFollower] = []
        self.loaded: list[LoadedSlots] = []
        self.layouts: dict[int, object] = {}
        self.compared: tuple[int, int] = (-1, -1)
        self.is_watched = False


# Noted for state that was refused before anything else was known of it.
_UNKNOWN = object()

_records: "weakref.WeakKeyDictionary[Optimizer, Record]" = weakref.WeakKeyDictionary()


def record_of(optimizer: Optimizer) -> Record:
    """Returns the record of an optimizer; one that wraps another with the same state shares its
    record.
    """
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value.state is optimizer.state:
            return record_of(value)
    return _records.setdefault(optimizer, Record())


def watch_state_dicts(optimizer: Optimizer) -> None:
    """Makes the guard notice when the state of an optimizer is saved or loaded."""
    record = record_of(optimizer)
    if not record.is_watched:
        optimizer.register_state_dict_pre_hook(_settle_first)
        optimizer.register_load_state_dict_post_hook(_accept_loaded_state)
        record.is_watched = True


def _settle_first(_: Optimizer) -> None:
    """Completes a commit that an interrupt has left, before the state is read."""
    if unsettled:
        settle()


def _accept_loaded_state(optimizer: Optimizer) -> None:
    """Takes loaded state for that of the present coordinates; the next step compares the sizes."""
    mark_followed(optimizer)
    record_of(optimizer).compared = (-1, -1)


def refuse_stale_state(optimizer: Optimizer, *_: object) -> None:
    """Raises OptimizerError when an optimizer holds state of coordinates that have moved.

    torch calls this before every step of every optimizer. It makes a few comparisons if no net was
    edited since the last step.
    """
    if unsettled:
        settle()
    record = record_of(optimizer)
    for follower in record.followers:
        if not follower.is_measured:
            follower.measure()
    present = (Coordinates._layout_changes, len(optimizer.param_groups))
    if record.compared == present:
        return
    require_followed(optimizer, parameters_of(optimizer))
    mark_followed(optimizer)
    record.compared = present


def require_followed(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raises OptimizerError when the state of a Parameter is of coordinates that have moved."""
    layouts = record_of(optimizer).layouts
    for parameter in parameters:
        verb = getattr(parameter, "grapnet_replaced", None)
        if verb is not None:
            remedy = "Make"
            if verb != "restore":
                remedy = f"Give it to gn.{verb}(..., optimizer=optimizer), or make"
            raise OptimizerError(
                f"this optimizer holds Parameters that gn.{verb} has replaced, so it would not"
                " train"
                f" the model. {remedy} another one for the current model"
            )
        layout = layout_of(parameter)
        has_moved = layouts.get(id(parameter)) is not layout
        # Most Parameters were never edited.
        is_edited = layout is not None
        if (has_moved or is_edited) and _holds_stale_state(optimizer, parameter, has_moved):
            layouts.setdefault(id(parameter), _UNKNOWN)
            raise OptimizerError(
                "this optimizer holds state of an older version of the net: it was not attached"
                " when an edit moved relations or biases, or it has loaded a state dict from before"
                " the edit. Make another one and attach it before it loads a state dict and before"
                " the next edit: gn.attach(optimizer, net); or restore this one from a file saved"
                " after the edit: gn.restore(path, optimizer=optimizer)"
            )


def _holds_stale_state(optimizer: Optimizer, parameter: nn.Parameter, has_moved: bool) -> bool:
    """Returns whether the state belongs to coordinates that have moved, by the Parameter's layout
    or by size.
    """
    if has_moved and isinstance(optimizer, LBFGS):
        return any(optimizer.state.values())
    if has_moved and hidden_state(optimizer, parameters_of(optimizer)):
        return True
    is_edited = layout_of(parameter) is not None
    state = optimizer.state.get(parameter, {})
    if is_before_first_step(optimizer, state):
        has_moved = False
    for value in entries_of(state).values():
        if not isinstance(value, Tensor):
            if has_moved and holds_tensors(value):
                return True
            continue
        shape = value.shape
        if len(shape) == 0:
            continue
        is_resized = is_edited and shape != parameter.shape and value.numel() != 1
        if has_moved or (is_resized and shape[1:] == parameter.shape[1:]):
            return True
    return False


def mark_followed(optimizer: Optimizer, parameters: Iterable[nn.Parameter] | None = None) -> None:
    """Notes that the state of the optimizer fits the current coordinates of Parameters (all by
    default).
    """
    layouts = record_of(optimizer).layouts
    if parameters is None:
        parameters = parameters_of(optimizer)
    for parameter in parameters:
        layouts[id(parameter)] = layout_of(parameter)


def adopt_state(optimizer: Optimizer) -> None:
    """Takes state of which nothing was noted for that of the present coordinates."""
    layouts = record_of(optimizer).layouts
    for parameter in parameters_of(optimizer):
        layouts.setdefault(id(parameter), layout_of(parameter))


def forget(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Notes that the optimizer no longer holds parameters."""
    layouts = record_of(optimizer).layouts
    for parameter in parameters:
        layouts.pop(id(parameter), None)


def drop_layouts(parameters: Iterable[nn.Parameter]) -> None:
    """Takes the layouts off Parameters whose coordinates do not move any more.

    Optimizers with state of the present coordinates go on; others are refused as before.
    """
    for parameter in parameters:
        layout = layout_of(parameter)
        if layout is None:
            continue
        for record in list(_records.values()):
            if id(parameter) in record.layouts:
                is_present = record.layouts[id(parameter)] is layout
                record.layouts[id(parameter)] = None if is_present else _UNKNOWN
        del parameter.grapnet_layout  # pyright: ignore[reportAttributeAccessIssue]
    # Every optimizer compares once more.
    Coordinates._layout_changes += 1


def mark_replaced(parameters: Iterable[nn.Parameter], verb: str) -> None:
    """Notes that parameters have left a model, so that an optimizer which still holds them refuses
    to step.
    """
    for parameter in parameters:
        parameter.grapnet_replaced = verb  # pyright: ignore[reportAttributeAccessIssue]
    # Every optimizer compares once more.
    Coordinates._layout_changes += 1


register_optimizer_step_pre_hook(refuse_stale_state)
