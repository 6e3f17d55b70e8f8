"""gn.attach: optimizer state and averaged copies that follow every edit, coordinate by
coordinate.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from grapnet.core.column import Column
from grapnet.core.errors import OptimizerError
from grapnet.core.graph import Graph
from grapnet.core.journal import Commit
from grapnet.core.remap import IndexMap

from .averaged import attach_copy, detach_copy
from .optimizer_state import (
    Newborn,
    first_state,
    insert_column,
    is_average,
    lists_without,
    moved_state,
    per_coordinate,
    refuse_column,
    refuse_kind,
)
from .stale import forget, mark_followed, parameters_of, require_followed
from .stale import refuse_stale_state as refuse_stale_state

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
            version: slots for version, slots in self._slots.items() if net.journal.keeps(version)
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
        kept = {
            v: slots
            for v, slots in self._slots.items()
            if v == commit.undoes or graph.journal.keeps(v)
        }
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
