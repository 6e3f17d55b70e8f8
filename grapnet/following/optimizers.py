"""gn.attach: optimizer state that follows every edit, coordinate by coordinate."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import ASGD, LBFGS, Adafactor, Adagrad, Optimizer, Rprop, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grapnet.core._change import IndexMap
from grapnet.core._commit import settle, unsettled
from grapnet.core._coordinates import Coordinates, layout_of
from grapnet.core._errors import OptimizerError
from grapnet.core._graph import Column, Graph
from grapnet.core._journal import Commit

from .averaging import attach_copy, detach_copy

_checked: "weakref.WeakKeyDictionary[Optimizer, _Checked]" = weakref.WeakKeyDictionary()


class _Checked:
    """Which layout every parameter had when the optimizer last stepped, or followed."""

    def __init__(self) -> None:
        self.changes = -1  # of layouts, in all graphs of the process
        self.groups = -1
        self.layouts: dict[int, object] = {}


def mark_followed(optimizer: Optimizer, parameters: Iterable[nn.Parameter] | None = None) -> None:
    """Notes that the optimizer's state fits the present coordinates of parameters (all of its own
    by default).
    """
    checked = _checked.setdefault(optimizer, _Checked())
    for parameter in parameters_of(optimizer) if parameters is None else parameters:
        checked.layouts[id(parameter)] = layout_of(parameter)


def forget(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Notes that the optimizer no longer holds parameters."""
    checked = _checked.setdefault(optimizer, _Checked())
    for parameter in parameters:
        checked.layouts.pop(id(parameter), None)


def refuse_stale_state(optimizer: Optimizer, *_: object) -> None:
    """Raises when the optimizer holds state of coordinates that have moved; one comparison if no
    net was edited.
    """
    checked = _checked.setdefault(optimizer, _Checked())
    if checked.changes == Coordinates.layout_changes and checked.groups == len(
        optimizer.param_groups
    ):
        return
    require_followed(optimizer, parameters_of(optimizer))
    mark_followed(optimizer)
    checked.changes, checked.groups = Coordinates.layout_changes, len(optimizer.param_groups)


def require_followed(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raises OptimizerError when the optimizer's state of one of the parameters is of coordinates
    that have moved.
    """
    layouts = _checked.setdefault(optimizer, _Checked()).layouts
    for parameter in parameters:
        verb = getattr(parameter, "grapnet_replaced", None)
        if verb is not None:
            raise OptimizerError(
                f"this optimizer holds parameters that gn.{verb} has replaced, and would not train"
                " what is there. "
                + (
                    f"Give it to gn.{verb}(..., optimizer=optimizer), or make"
                    if verb != "restore"
                    else "Make"
                )
                + " another one for the model as it is"
            )
        layout = layout_of(parameter)
        if _holds_stale_state(
            optimizer, parameter, layouts.get(id(parameter), layout) is not layout
        ):
            raise OptimizerError(
                "this optimizer holds state of relations or biases that an edit has moved since: it"
                " was not attached then, is a copy of one that was, or has loaded a state dict of"
                " before the edit. Go on with another one, or with gn.restore(path,"
                " optimizer=optimizer) of a file saved after the edit; and attach it before"
                " editing: gn.attach(optimizer, net)"
            )


def mark_replaced(parameters: Iterable[nn.Parameter], verb: str) -> None:
    """Notes that parameters have left a model, so that an optimizer which still holds them refuses
    to step.
    """
    for parameter in parameters:
        parameter.grapnet_replaced = verb  # pyright: ignore[reportAttributeAccessIssue]
    Coordinates.layout_changes += 1  # every optimizer looks once


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns every Parameter of every group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _holds_stale_state(optimizer: Optimizer, parameter: nn.Parameter, moved: bool) -> bool:
    """Says whether the state is of coordinates that have moved: the parameter did, or a size says
    so.
    """
    if moved and isinstance(optimizer, LBFGS):
        return any(optimizer.state.values())
    values = [
        v
        for v in optimizer.state.get(parameter, {}).values()
        if isinstance(v, Tensor) and v.dim() > 0
    ]
    resized = layout_of(parameter) is not None and any(
        v.shape[1:] == parameter.shape[1:] and len(v) != len(parameter) and v.numel() != 1
        for v in values
    )
    return bool(values) and (moved or resized)


def _mark_loaded_state(
    setstate: Callable[[Optimizer, dict[str, Any]], None],
) -> Callable[[Optimizer, dict[str, Any]], None]:
    """Wraps the one method through which state arrives by load_state_dict, deepcopy and
    unpickling.
    """

    @functools.wraps(setstate)
    def marked(optimizer: Optimizer, state: dict[str, Any]) -> None:
        setstate(optimizer, state)
        mark_followed(optimizer)
        _checked[optimizer].changes = -1  # the next step compares sizes, before it changes anything

    return marked


def _settle_first(optimizer: Optimizer, *_: object) -> None:
    """Completes a commit that an interrupt has left, before the state is read."""
    if unsettled:
        settle()


def _settled(state_dict: Callable[[Optimizer], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wraps the method that hands out the state."""

    @functools.wraps(state_dict)
    def settled(optimizer: Optimizer) -> dict[str, Any]:
        _settle_first(optimizer)
        return state_dict(optimizer)

    return settled


register_optimizer_step_pre_hook(_settle_first)
Optimizer.state_dict = _settled(Optimizer.state_dict)

# torch has a hook for the steps of all optimizers but none for their loading, and state that is
# loaded and then left behind by an edit of equal size would be used for other relations in silence.
register_optimizer_step_pre_hook(refuse_stale_state)
Optimizer.__setstate__ = _mark_loaded_state(Optimizer.__setstate__)  # pyright: ignore[reportAttributeAccessIssue]


Newborn = Literal["zero", "mean"]

_REFUSED: dict[type[Optimizer], str] = {
    LBFGS: "LBFGS keeps one flat history over all parameters, which cannot follow an edit",
    Adafactor: (
        "Adafactor keeps averages over the rows and columns of a matrix, and relations are no"
        " matrix: what the ones that were cut have added to an average cannot be taken out of it"
    ),
    SparseAdam: "SparseAdam steps on sparse gradients only, and those of a GrapNet are dense",
}


def refuse_kind(optimizer: Optimizer) -> None:
    """Raises OptimizerError, with the reason, for an optimizer that cannot follow a net."""
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise OptimizerError(
                f"{reason}; use Adam, SGD or another that keeps one value a coordinate"
            )


def per_coordinate(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> list[str]:
    """Returns the state entries with one value a coordinate; raises for one that is neither that
    nor one number.

    A Parameter of a single coordinate cannot tell the two apart by shape; the optimizer's other
    Parameters can.
    """
    found = []
    for key, value in optimizer.state[parameter].items():
        if isinstance(value, Tensor) and value.numel() == 1 and value.shape != parameter.shape:
            continue
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            found += [] if value.numel() == 1 and _is_one_number(optimizer, key) else [key]
        elif isinstance(value, Tensor | list | tuple | dict):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise OptimizerError(
                f"the optimizer's {key!r} ({shape}) for {name} {list(parameter.shape)} is not one"
                " value a coordinate, so it cannot follow an edit; use another optimizer or make a"
                " new one after editing"
            )
    return found


def moved_state(
    optimizer: Optimizer,
    group: dict[str, Any],
    key: str,
    value: Tensor,
    index: IndexMap,
    newborn: Newborn,
) -> Tensor:
    """Returns one state tensor after an edit: survivors as they were, coordinates that come as
    `newborn` says.
    """
    survivors = index.old_size - len(index.removed)
    if newborn == "zero" or survivors == 0:
        return index.carry(value, clean_value(optimizer, group, key))
    moved = index.carry(value, 0.0)
    if len(index.inserted):
        moved.view(-1)[index.inserted.long()] = (moved.sum(dtype=torch.float64) / survivors).to(
            moved.dtype
        )
    return moved


def is_average(optimizer: Optimizer, key: str) -> bool:
    """Says whether a state entry is an average of the coordinate itself, so that a clean one is its
    present value.
    """
    return isinstance(optimizer, ASGD) and key == "ax"


def first_state(
    optimizer: Optimizer, group: dict[str, Any], example: Tensor, rows: int
) -> dict[str, Any]:
    """Returns the state before the first step of a Parameter of `rows` rows; Adagrad alone makes it
    ahead.
    """
    if not isinstance(optimizer, Adagrad):
        return {}
    accumulated = example.new_full((rows, *example.shape[1:]), group["initial_accumulator_value"])
    step = torch.zeros(
        (), dtype=torch.float32, device=accumulated.device if group.get("fused") else "cpu"
    )
    return {"step": step, "sum": accumulated}


def refuse_column(optimizer: Optimizer, column: Column) -> None:
    """Raises OptimizerError for an optimizer that cannot train a vector."""
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        raise OptimizerError(
            f"Muon trains matrices only, and {column.parameter_name} is a vector; use another"
            " for it"
        )


def lists_without(group: dict[str, Any], gone: set[int]) -> dict[str, list[Any]]:
    """Returns a group's Parameters, and their names where it has them, without some."""
    stays = [id(parameter) not in gone for parameter in group["params"]]
    lists = {key: group[key] for key in ("params", "param_names") if key in group}
    return {
        key: [item for item, kept in zip(items, stays, strict=True) if kept]
        for key, items in lists.items()
    }


def insert_column(
    lists: dict[str, list[Any]], column: Column, beside: nn.Parameter, mine: set[int]
) -> None:
    """Puts a column behind the net's last Parameter in a group, where `net.parameters()` would have
    had it.
    """
    params = lists["params"]
    place = 1 + max(n for n, parameter in enumerate(params) if id(parameter) in mine)
    if "param_names" in lists:
        name = lists["param_names"][
            next(n for n, parameter in enumerate(params) if parameter is beside)
        ]
        lists["param_names"].insert(place, name.removesuffix(column.beside) + column.parameter_name)
    params.insert(place, column.value)


def _is_one_number(optimizer: Optimizer, key: str) -> bool:
    """Says whether an entry is a single number also where the Parameter has several coordinates, or
    none.
    """
    for parameter, state in optimizer.state.items():
        value = state.get(key) if isinstance(parameter, Tensor) and parameter.numel() != 1 else None
        if isinstance(value, Tensor) and value.numel() == 1:
            return True
    return False


def clean_value(optimizer: Optimizer, group: dict[str, Any], key: str) -> float:
    """Returns what a state entry starts from."""
    if isinstance(optimizer, Rprop) and key == "step_size":
        return float(group["lr"])
    if isinstance(optimizer, Adagrad) and key == "sum":
        return float(group["initial_accumulator_value"])
    return 0.0


Survivors = Literal["keep", "renew"]
# parameter name -> state name -> the values of removed coordinates
Slots = dict[str, dict[str, Tensor]]

_attached: "weakref.WeakKeyDictionary[Optimizer, list[OptimizerFollower]]" = (
    weakref.WeakKeyDictionary()
)
_loaded_slots: "weakref.WeakKeyDictionary[Optimizer, list[_LoadedSlots]]" = (
    weakref.WeakKeyDictionary()
)


def attach(
    what: Optimizer | nn.Module,
    net: nn.Module,
    *,
    survivors: Survivors = "keep",
    newborn: Newborn = "zero",
) -> None:
    """Makes an optimizer, or an averaged copy, follow the commits of a net, for as long as both
    live.

    A coordinate that returns by undo gets the state that it had when it left. Any other that comes,
    grown or unfrozen, starts as `newborn` says. With Adam at the t-th step of its Parameter, and a
    gradient g, its first update is

    - "zero": lr · (1-β1)/(1-β1ᵗ) · √((1-β2ᵗ)/(1-β2)), against the sign of g: lr at first, 3.2 lr
      for a large t;
    - "mean": lr · (β1·m + (1-β1)·g)/(1-β1ᵗ) / √((β2·v + (1-β2)·g²)/(1-β2ᵗ)), with the survivors'
      mean moments m and v;
    - with `survivors="renew"`: lr, against the sign of g, and so for every coordinate.

    An `AveragedModel` that is not attached raises at its next update once coordinates have moved; a
    loop of one's own over the parameters of a copy cannot be watched, so attach the copy.

    Args:
        what: a `torch.optim` optimizer whose state is one value a coordinate, or one number a
            Parameter. Or a copy of the net: an `AveragedModel`, a module with one such copy inside,
            or the copy itself. There survivors keep their averages, newborn coordinates take the
            net's values, restored ones return as the copy had them, and what is frozen in the net
            is frozen and goes on being averaged. Orphans that are folded leave the copy its own
            constants.
        net: the net whose Parameters the optimizer holds, or of which `what` holds a copy. For an
            optimizer also a model with nets inside: it follows each whose Parameters it holds.
        survivors: "keep" carries the state of every coordinate that stays; "renew" starts all
            afresh at every commit, and the end of a trial brings back what was there before it.
        newborn: the state of a coordinate that comes: "zero" is clean; "mean" is the mean over the
            coordinates of its Parameter that stay, entry by entry, and clean where none stays.

    Raises:
        OptimizerError: the optimizer holds no Parameter of the net, is of a kind that cannot follow
            (LBFGS, Adafactor, SparseAdam) or was left behind by an edit; or the module holds no
            copy wired like the net.

    Examples:
        >>> import torch
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3, 2])
        >>> optimizer, averaged = (
        ...     torch.optim.Adam(net.parameters()),
        ...     torch.optim.swa_utils.AveragedModel(net),
        ... )
        >>> gn.attach(optimizer, net, newborn="mean")
        >>> gn.attach(averaged, net)
        >>> with net.edit(reason="drop the weakest") as edit:
        ...     edit.cut(net.layers[0].outgoing().smallest(count=5))
        >>> averaged.module.count().relations
        13
    """
    if survivors not in ("keep", "renew"):
        raise ValueError(f'survivors is "keep" or "renew", got {survivors!r}')
    if newborn not in ("zero", "mean"):
        raise ValueError(f'newborn is "zero" or "mean", got {newborn!r}')
    nets = _nets_to_follow(what, net, "attach")
    if isinstance(what, Optimizer):
        held = {id(parameter) for parameter in parameters_of(what)}
        nets = [one for one in nets if any(id(parameter) in held for parameter in one.parameters())]
        if not nets:
            raise OptimizerError(
                "this optimizer holds no parameter of the net; make it with net.parameters()"
            )
        refuse_kind(what)
        refuse_stale_state(what)
        mark_followed(what)
        for one in nets:
            _attach_optimizer(what, one, survivors, newborn)
    elif (survivors, newborn) == ("keep", "zero"):
        attach_copy(what, nets[0])
    else:
        raise ValueError(
            "survivors= and newborn= are about the state of optimizers; a copy has none"
        )


def detach(what: Optimizer | nn.Module, net: nn.Module) -> None:
    """Makes an optimizer or an averaged copy no longer follow the commits of a net; see
    `attach`.
    """
    for one in _nets_to_follow(what, net, "detach"):
        if not isinstance(what, Optimizer):
            detach_copy(what, one)
            continue
        for follower in _attached.get(what, []):
            if follower.net() is one:
                one.unfollow(follower)
        _attached[what] = [f for f in _attached.get(what, []) if f.net() is not one]


def undo_slots(optimizer: Optimizer, net: Graph) -> dict[int, Slots]:
    """Returns the state that undo gives back to an attached optimizer: of each commit, what it took
    away.
    """
    return next((f.kept_slots(net) for f in _attached.get(optimizer, []) if f.net() is net), {})


def slot_owners(optimizer: Optimizer, net: Graph) -> dict[str, int]:
    """Returns the places of a net's Parameters among all of an optimizer's, by their names in the
    net.
    """
    places = {id(p): place for place, p in enumerate(parameters_of(optimizer))}
    return {name: places[id(p)] for name, p in net.named_parameters() if id(p) in places}


def set_undo_slots(
    optimizer: Optimizer, nets: Iterable[tuple[dict[int, Slots], Mapping[str, int]]]
) -> None:
    """Gives back what `undo_slots` and `slot_owners` returned in another session, now or once a net
    is attached.
    """
    held = parameters_of(optimizer)
    loaded = [
        _LoadedSlots(slots, {name: held[n] for name, n in owners.items()}) for slots, owners in nets
    ]
    _loaded_slots[optimizer] = loaded
    for follower in _attached.get(optimizer, []):
        slots = _take_loaded(optimizer, follower.net())
        if slots is not None:
            follower.take_slots(slots)


def _take_loaded(optimizer: Optimizer, net: Graph | None) -> dict[int, Slots] | None:
    """Returns the slots that wait for a net, which then no longer wait; None when there are
    none.
    """
    waiting = _loaded_slots.get(optimizer, [])
    mine = [loaded for loaded in waiting if loaded.are_of(net)]
    if mine:
        _loaded_slots[optimizer] = [loaded for loaded in waiting if not loaded.are_of(net)]
    return mine[0].slots if mine else None


class _LoadedSlots(NamedTuple):
    """Slots that wait for the net that has these Parameters."""

    slots: dict[int, Slots]
    parameters: dict[str, nn.Parameter]

    def are_of(self, net: Graph | None) -> bool:
        mine = {} if net is None else dict(net.named_parameters())
        return bool(self.parameters) and all(
            mine.get(name) is p for name, p in self.parameters.items()
        )


def _nets_to_follow(what: object, net: object, verb: str) -> list[Graph]:
    """Returns the net, or for an optimizer those of a model; raises TypeError for anything else."""
    if isinstance(what, Optimizer | nn.Module) and isinstance(net, Graph):
        return [net]
    inside = (
        [part for part in net.modules() if isinstance(part, Graph)]
        if isinstance(net, nn.Module)
        else []
    )
    if isinstance(what, Optimizer) and inside:
        return inside
    if isinstance(what, Optimizer) and isinstance(net, nn.Module):
        raise TypeError(
            f"this {type(net).__name__} has no nets inside whose edits could be followed;"
            " gn.graft(model, where, optimizer=optimizer) puts nets into a model, and attaches the"
            " optimizer"
        )
    kinds = f"{type(what).__name__}, {type(net).__name__}"
    hint = "; of a model, give the copy of each net with its net" if inside else ""
    raise TypeError(
        f"the net comes second: gn.{verb}(optimizer, net) or gn.{verb}(averaged, net), got"
        f" ({kinds}){hint}"
    )


def _attach_optimizer(
    optimizer: Optimizer, net: Graph, survivors: Survivors, newborn: Newborn
) -> None:
    slots, loaded = undo_slots(optimizer, net), _take_loaded(optimizer, net)
    slots = slots if loaded is None else loaded
    detach(optimizer, net)
    follower = OptimizerFollower(optimizer, net, survivors, newborn, slots)
    _attached.setdefault(optimizer, []).append(follower)
    net.follow(follower)


class OptimizerFollower:
    """Carries one optimizer's state through the commits of one net."""

    def __init__(
        self,
        optimizer: Optimizer,
        net: Graph,
        survivors: Survivors,
        newborn: Newborn,
        slots: dict[int, Slots],
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.net = weakref.ref(net)
        self.survivors: Survivors = survivors
        self.newborn: Newborn = newborn
        self._slots = slots  # version -> what its commit took away, for undo
        self._before_trial: dict[nn.Parameter, dict[str, Any]] = {}  # what a trial has renewed

    def kept_slots(self, net: Graph) -> dict[int, Slots]:
        """Returns the slots of the commits that can still be taken back."""
        return {
            version: slots
            for version, slots in self._slots.items()
            if version in net.journal.kept_versions()
        }

    def take_slots(self, slots: dict[int, Slots]) -> None:
        """Takes over the slots of another session."""
        self._slots = dict(slots)

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Computes the state after the commit; raises OptimizerError when some of it cannot be
        mapped.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return lambda: None
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        names = {p: name for name, p in graph.named_parameters() if id(p) in groups}
        if self.survivors == "renew":
            return self._prepare_to_renew(optimizer, graph, commit, names, groups)
        require_followed(optimizer, names)
        versions = graph.journal.kept_versions()
        kept = {v: slots for v, slots in self._slots.items() if v == commit.undoes or v in versions}
        restored = kept.pop(commit.undoes, {}) if commit.undoes is not None else {}
        taken: Slots = {}
        moves = []
        for parameter, name in names.items():
            if name in commit.parameters and optimizer.state.get(parameter):
                index, back = commit.parameters[name], restored.get(name, {})
                move = _Move(
                    optimizer, groups[id(parameter)], parameter, name, index, back, self.newborn
                )
                taken[name] = move.taken
                moves.append(move)
        if not commit.ends_trial:
            kept[commit.version] = taken

        def install() -> None:
            for move in moves:
                move.install(optimizer)
            self._slots = kept
            mark_followed(optimizer, names)

        return install

    def _prepare_to_renew(
        self,
        optimizer: Optimizer,
        graph: Graph,
        commit: Commit,
        names: dict[nn.Parameter, str],
        groups: dict[int, dict[str, Any]],
    ) -> Callable[[], None]:
        present = {p: optimizer.state[p] for p in names if optimizer.state.get(p)}
        states = {}
        for p in present:
            index = commit.parameters.get(names[p])
            rows = len(p) if index is None else index.new_size
            states[p] = first_state(optimizer, groups[id(p)], p.detach(), rows)
        if commit.ends_trial:
            states |= self._before_trial
        before = present if graph.open_trial else {}

        def install() -> None:
            optimizer.state.update(states)
            self._before_trial = before
            mark_followed(optimizer, names)

        return install

    def prepare_columns(
        self, graph: Graph, coming: Sequence[Column], leaving: Sequence[Column]
    ) -> Callable[[], None]:
        """Finds the places of new columns, each in the group of the Parameter it is trained beside,
        if that is held.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return lambda: None
        gone, names = (
            {id(column.value) for column in leaving},
            {column.parameter_name for column in leaving},
        )
        lists = [lists_without(group, gone) for group in optimizer.param_groups]
        mine = {id(parameter) for parameter in graph.parameters()}
        states = {}
        for column in coming:
            beside = graph.get_parameter(column.beside)
            for group, changed in zip(optimizer.param_groups, lists, strict=True):
                if any(beside is parameter for parameter in group["params"]):
                    refuse_column(optimizer, column)
                    states[column.value] = first_state(
                        optimizer, group, column.value.detach(), len(column.value)
                    )
                    insert_column(changed, column, beside, mine)
            mine.add(id(column.value))
        slots = {
            v: {n: s for n, s in kept.items() if n not in names} for v, kept in self._slots.items()
        }

        def install() -> None:
            for group, changed in zip(optimizer.param_groups, lists, strict=True):
                for key, items in changed.items():
                    group[key][:] = items
            for column in leaving:
                optimizer.state.pop(column.value, None)
            forget(optimizer, [column.value for column in leaving])
            optimizer.state.update(
                {parameter: state for parameter, state in states.items() if state}
            )
            self._slots = slots
            mark_followed(optimizer, states)

        return install


class _Move:
    """The state of one Parameter on its way through one commit."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        parameter: nn.Parameter,
        name: str,
        index: IndexMap,
        restored: dict[str, Tensor],
        newborn: Newborn,
    ) -> None:
        self.taken: dict[str, Tensor] = {}
        self._parameter, self._index = parameter, index
        # entries that start from the values of the coordinates that come
        self._averages: list[str] = []
        self._state = dict(optimizer.state[parameter])
        for key in per_coordinate(optimizer, parameter, name):
            value, back = self._state[key], restored.get(key)
            if back is not None and len(back) != len(index.inserted):
                raise OptimizerError(
                    f"the {key!r} that undo would give back to {name} is of another length"
                )
            self.taken[key] = value.flatten().index_select(0, index.removed)
            if back is not None:
                self._state[key] = index.carry(value, back.view(-1, *value.shape[1:]))
                continue
            self._state[key] = moved_state(optimizer, group, key, value, index, newborn)
            self._averages += [key] if newborn == "zero" and is_average(optimizer, key) else []

    def install(self, optimizer: Optimizer) -> None:
        """Gives the optimizer the state; the Parameter has its new content already."""
        born = self._index.inserted.long()
        for key in self._averages:
            self._state[key].view(-1)[born] = self._parameter.detach().view(-1)[born]
        optimizer.state[self._parameter] = self._state
