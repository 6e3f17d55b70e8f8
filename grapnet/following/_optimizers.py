"""gn.attach: optimizer state that follows every edit, coordinate by coordinate."""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grapnet.core._change import BlockParameter, DepthChange, shifted
from grapnet.core._commit import Tracked, carry_out, unfit_parameters
from grapnet.core._coordinates import Decision
from grapnet.core._errors import OptimizerError
from grapnet.core._graph import Column, Graph
from grapnet.core._grid_map import CellMap, Parted, cells_at, part_vectors, with_cells
from grapnet.core._journal import Commit
from grapnet.core._staging import stage, unstage

from ._averaging import attach_copy, detach_copy
from ._state import (
    OF_TORCH,
    State,
    adopt_state,
    clean_value,
    entries_of,
    first_state,
    forget,
    held_by,
    hidden_state,
    inside_of,
    is_copy,
    is_known,
    is_like,
    is_near,
    mark_followed,
    parameters_of,
    per_coordinate,
    record_of,
    refuse_kind,
    refuse_stale_state,
    require_followed,
    watch_state_dicts,
    with_entries,
)

Survivors = Literal["keep", "renew"]
Newborn = Literal["zero", "mean"]
What = TypeVar("What", bound=Optimizer | nn.Module)
# Fewer coordinates than these are like the weights by chance.
_ENOUGH = 4
# Parameter name -> state entry -> the values of the coordinates that left, and behind them those of
# the assigned ones
Slots = dict[str, dict[str, Tensor]]


def attach(
    what: What,
    net: nn.Module,
    *,
    survivors: Survivors = "keep",
    newborn: Newborn = "zero",
    copies: Iterable[str] | None = None,
) -> What:
    """Makes an optimizer, or an averaged copy, follow the commits of a net, as long as both exist,
    and returns it.

    A coordinate restored by undo gets its old state, with `survivors="keep"`. Any other new
    coordinate, grown or unfrozen, starts according to `newborn`. With Adam at the t-th step of its
    Parameter, and a gradient g, its first update is

    - "zero": lr · (1-β1)/(1-β1ᵗ) · √((1-β2ᵗ)/(1-β2)), against the sign of g: lr at first, 3.2 lr
      for a large t;
    - "mean": lr · (β1·m + (1-β1)·g)/(1-β1ᵗ) / √((β2·v + (1-β2)·g²)/(1-β2ᵗ)), with the survivors'
      mean moments m and v;
    - with `survivors="renew"`: lr, against the sign of g, and so for every coordinate.

    An optimizer that was not attached when coordinates moved raises at its next step. Nothing
    notices a copy that was not attached: attach it before the first edit.

    Args:
        what: an optimizer whose state is one value per coordinate or one number per Parameter; also
            one that wraps another optimizer, which then follows too. Or a copy of the net: an
            `AveragedModel`, a module with one such copy inside, or the copy itself. There survivors
            keep their averages, newborn coordinates take the net's values, and restored ones return
            as the copy had them. What is frozen in the net is frozen in the copy: a buffer, which
            an `AveragedModel` takes from the net at its next update. Orphans that are folded leave
            the copy its own constants.
        net: the net, or for an optimizer also a model with nets inside: it follows each net whose
            Parameters it holds.
        survivors: "keep" keeps the state of every surviving coordinate; "renew" resets all state at
            every commit, and the end of a trial restores it.
        newborn: the state of a new coordinate: "zero" is clean; "mean" is the mean over the
            survivors of its Parameter, and clean if there are none.
        copies: names of the state entries that are copies of the weights, such as "z" in
            schedule-free optimizers; a new coordinate starts there from its own value. Those of
            many optimizers are known. Without this argument, an unknown entry that is closer to the
            weights than to 0 after the first step stops the next edit; `copies=()` disables the
            check.

    Raises:
        OptimizerError: the optimizer holds no Parameter of the net, cannot follow (LBFGS,
            Adafactor, SparseAdam), missed an edit, has state that does not fit its Parameters, or
            trains sharded Parameters or inside the backward pass; or the module contains no copy
            with the wiring of the net.

    Examples:
        >>> import torch
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3, 2])
        >>> optimizer = gn.attach(torch.optim.Adam(net.parameters()), net, newborn="mean")
        >>> averaged = gn.attach(torch.optim.swa_utils.AveragedModel(net), net)
        >>> with net.edit(reason="drop the weakest") as edit:
        ...     edit.cut(net.layers[0].outgoing().smallest(count=5))
        >>> averaged.module.count().relations
        13
    """
    if survivors not in ("keep", "renew"):
        raise ValueError(f'survivors is "keep" or "renew", got {survivors!r}')
    if newborn not in ("zero", "mean"):
        raise ValueError(f'newborn is "zero" or "mean", got {newborn!r}')
    if isinstance(copies, str):
        raise TypeError(f"copies takes several names, as in copies=({copies!r},)")
    nets = _nets_to_follow(what, net, "attach")
    if isinstance(what, Optimizer):
        settings = _Settings(survivors, newborn, None if copies is None else frozenset(copies))
        _attach_optimizer(what, nets, settings)
    elif (survivors, newborn, copies) == ("keep", "zero", None):
        attach_copy(what, nets[0])
    else:
        raise ValueError(
            "survivors=, newborn= and copies= are about the state of optimizers; a copy of the net"
            " has none"
        )
    return what


def detach(what: Optimizer | nn.Module, net: nn.Module) -> None:
    """Makes an optimizer or an averaged copy no longer follow the commits of a net; see
    `attach`.
    """
    nets = _nets_to_follow(what, net, "detach")
    if not isinstance(what, Optimizer):
        for one in nets:
            detach_copy(what, one)
        return
    installs = []
    for optimizer in _with_state(what):
        installs += _prepare_followers(optimizer, nets, [])
    carry_out(installs, Decision())


def _nets_to_follow(what: object, net: object, verb: str) -> list[Graph]:
    """Returns the net, or for an optimizer those of a model; raises TypeError for anything else."""
    if isinstance(what, Optimizer | nn.Module) and isinstance(net, Graph):
        return [net]
    inside = []
    if isinstance(net, nn.Module):
        inside = [part for part in net.modules() if isinstance(part, Graph)]
    if isinstance(what, Optimizer) and inside:
        return inside
    raise TypeError(
        f"gn.{verb} takes (optimizer, net), (optimizer, model with nets inside) or (copy of the"
        f" net, net), got ({type(what).__name__}, {type(net).__name__})"
    )


class _Settings(NamedTuple):
    """The options with which an optimizer follows a net."""

    survivors: Survivors
    newborn: Newborn
    copies: frozenset[str] | None  # None: known ones, and others are looked for


def _attach_optimizer(what: Optimizer, nets: list[Graph], settings: _Settings) -> None:
    if not hasattr(what, "state") or not hasattr(what, "param_groups"):
        raise OptimizerError(
            f"this {type(what).__name__} has no state and param_groups like a torch.optim."
            "Optimizer, so it cannot follow an edit"
        )
    held = {id(parameter) for parameter in parameters_of(what)}
    nets = [one for one in nets if any(id(parameter) in held for parameter in one.parameters())]
    if not nets:
        raise OptimizerError(
            "this optimizer holds no parameter of the net; make it with net.parameters()"
        )
    for one in nets:
        reason = unfit_parameters(one)
        if reason:
            raise OptimizerError(reason)
    optimizers = _with_state(what)
    for optimizer in optimizers:
        refuse_kind(optimizer)
        adopt_state(optimizer)
        refuse_stale_state(optimizer)
        for one in nets:
            for name, parameter in held_by(optimizer, one).items():
                # Raises for state that does not fit.
                per_coordinate(optimizer, parameter, name)
    installs: list[Callable[[], None]] = []
    for optimizer in optimizers:
        record = record_of(optimizer)
        watch_state_dicts(optimizer)
        coming = []
        for one in nets:
            slots = undo_slots(optimizer, one)
            for loaded in record.loaded:
                if loaded.are_of(one):
                    slots = loaded.slots
            coming.append(OptimizerFollower(optimizer, one, settings, slots))
        waiting = [loaded for loaded in record.loaded if not any(map(loaded.are_of, nets))]
        installs += _prepare_followers(optimizer, nets, coming)
        installs.append(partial(setattr, record, "loaded", waiting))
        installs.append(partial(mark_followed, optimizer))
    carry_out(installs, Decision())


def _prepare_followers(
    optimizer: Optimizer, nets: list[Graph], coming: "list[OptimizerFollower]"
) -> list[Callable[[], None]]:
    """Returns the assignments that replace the followers of an optimizer by `coming`."""
    record = record_of(optimizer)
    installs: list[Callable[[], None]] = []
    others = []
    for follower in record.followers:
        net = follower.net()
        if net is not None and any(net is one for one in nets):
            installs.append(partial(net.unfollow, follower))
        else:
            others.append(follower)
    installs.append(partial(setattr, record, "followers", [*others, *coming]))
    for net, follower in zip(nets, coming, strict=False):
        installs.append(partial(net.follow, follower))
    return installs


def _with_state(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers that hold the state of one that may wrap others: accelerate's wrapper
    has the state of the inner one, Lookahead also has its own.
    """
    inside = inside_of(optimizer)
    found = []
    for one in inside:
        found += _with_state(one)
    if all(one.state is not optimizer.state for one in inside):
        found.append(optimizer)
    return found


class _Held(NamedTuple):
    """A Parameter of the net with optimizer state."""

    parameter: nn.Parameter
    group: State
    state: State
    entries: dict[str, Tensor]  # of the state: tensors with one value per coordinate
    parted: Mapping[int, Parted] = {}  # those that moved with others, by their ids


class _Left(NamedTuple):
    """What a Parameter of a removed block was in an optimizer, for when the block comes back."""

    parameter: "weakref.ref[nn.Parameter]"
    group: int  # the number of its group
    place: int  # among the Parameters of the group
    name: str | None  # where the group has names
    state: State


class OptimizerFollower:
    """Moves the state of one optimizer through the commits of one net."""

    follows_depth = True

    def __init__(
        self, optimizer: Optimizer, net: Graph, settings: _Settings, slots: dict[int, Slots]
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.net = weakref.ref(net)
        # What torch's own optimizers keep is known.
        self._is_known = type(optimizer) in OF_TORCH
        self.is_measured = self._is_known or settings.copies is not None
        self._settings = settings
        # Entries that were compared with the weights, and whether they are near.
        self._near: dict[str, bool] = {}
        # Of Parameters whose block was removed, by their ids.
        self._left: dict[int, _Left] = {}
        # torch keeps the state; a commit passes it in, by the names of Parameters.
        self._tracked: Tracked[dict[str, _Held], dict[str, Any]] = Tracked(
            {}, take=self._take, carry=self._carry, give=self._give
        )
        self._tracked.remember(slots)

    def kept_slots(self, net: Graph) -> dict[int, Slots]:
        """Returns the slots of the commits that can still be undone."""
        versions = net.journal._kept_versions()
        kept = self._tracked.kept
        return {version: slots for version, slots in kept.items() if version in versions}

    def take_slots(self, slots: dict[int, Slots]) -> None:
        """Adopts the slots of another session."""
        self._tracked.remember(dict(slots))

    def measure(self) -> None:
        """Compares entries that may be copies of the weights with the weights, each one once.

        The hook of the optimizer's second step does this first: a copy may be of the weights as
        they were at the start, which later ones are no longer like.
        """
        optimizer = self.optimizer()
        net = self.net()
        if optimizer is None or net is None:
            return
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for parameter in net.parameters():
            for entry, value in entries_of(optimizer.state.get(parameter, {})).items():
                if entry in self._near or not is_like(value, parameter):
                    continue
                if not is_known(optimizer, entry):
                    pair = (value.detach().flatten(), parameter.detach().flatten())
                    found.setdefault(entry, []).append(pair)
                self.is_measured = True
        for entry, pairs in found.items():
            values = torch.cat([value.float() for value, _ in pairs])
            weights = torch.cat([weight.float() for _, weight in pairs])
            if len(values) >= _ENOUGH:
                self._near[entry] = is_near(values, weights)

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Computes the state after the commit; raises OptimizerError if some of it cannot be
        mapped.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return lambda: None
        # Parameters that the journal has let go of do not come back.
        self._left = {key: one for key, one in self._left.items() if one.parameter() is not None}
        # A wrapper may keep numbers in the state of what it wraps, as TRAC does.
        is_plain = all(issubclass(kind, Tensor) for kind in set(map(type, optimizer.state)))
        if not self._is_known or not is_plain:
            self._refuse_unknown_state(optimizer, held_by(optimizer, graph).values())
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        stores = graph._stores()
        is_kept = self._settings.survivors == "keep"
        names: Iterable[str] = stores
        if is_kept and commit.change.depth is None:
            # All other state stays as it is.
            names = commit.parameters
        parameters = {name: stores[name].parameter for name in names}
        parameters = {name: one for name, one in parameters.items() if id(one) in groups}
        if is_kept:
            require_followed(optimizer, parameters.values())
        leaving: set[str] = set()
        if commit.change.depth is not None:
            leaving = {one.name for one in commit.change.depth.leaving}
        held = {}
        for name, parameter in parameters.items():
            if name in leaving or (is_kept and name not in commit.parameters):
                continue
            state = optimizer.state.get(parameter, {})
            entries = {}
            if is_kept:
                entries = per_coordinate(optimizer, parameter, name)
            if not state and (is_kept or commit.kind != "end"):
                continue
            held[name] = _Held(parameter, groups[id(parameter)], state, entries)
        if is_kept:
            pairs = []
            for name, one in held.items():
                pairs += [(commit.parameters[name], value) for value in one.entries.values()]
            parted = part_vectors(pairs)
            held = {name: one._replace(parted=parted) for name, one in held.items()}
        install_tracked = self._tracked.prepare_from(held, graph, commit)
        install_blocks: Callable[[], None] | None = None
        if commit.change.depth is not None:
            is_renewed = not is_kept and commit.kind != "end"
            install_blocks = self._prepare_blocks(
                optimizer, commit.change.depth, names_of(graph), is_renewed
            )

        def install() -> None:
            install_tracked()
            for one in self._tracked.state.values():
                state = one.state
                if commit.is_staged:
                    state = with_entries(state, _unstaged(one))
                optimizer.state[one.parameter] = state
            mark_followed(optimizer, parameters.values())
            # The optimizer has it, and may let go of it.
            self._tracked.replace({})
            if install_blocks is not None:
                install_blocks()

        return install

    def _prepare_blocks(
        self,
        optimizer: Optimizer,
        change: DepthChange,
        names: Mapping[int, str],
        is_renewed: bool,
    ) -> Callable[[], None]:
        """Prepares for the Parameters of blocks or layers that come or leave.

        One that comes back returns to its place with its state. Any other comes into the group of
        the Parameter beside it, if the optimizer holds that, behind those of the same block.

        Args:
            optimizer: the optimizer.
            change: what comes and leaves.
            names: the names of the Parameters of the graph before the change, by their ids.
            is_renewed: whether Parameters that come back start with clean state.
        """
        gone = {id(one.parameter) for one in change.leaving}
        lists = [_lists_without(group, gone) for group in optimizer.param_groups]
        for changed in lists:
            _rename(changed, names, change.renamed)
        left = self._leaving(optimizer, gone)
        states: dict[nn.Parameter, State] = {}
        returning = []
        fresh: dict[str, list[BlockParameter]] = {}
        for one in change.coming:
            known = self._left.get(id(one.parameter))
            if known is not None and known.parameter() is one.parameter:
                returning.append((known, one))
            else:
                fresh.setdefault(one.block, []).append(one)
        for known, one in sorted(returning, key=lambda pair: pair[0].place):
            changed = lists[known.group]
            changed["params"].insert(known.place, one.parameter)
            if "param_names" in changed:
                changed["param_names"].insert(known.place, known.name or one.name)
            states[one.parameter] = known.state
            if is_renewed:
                group = optimizer.param_groups[known.group]
                states[one.parameter] = first_state(optimizer, group, one.parameter.detach())
        for parameters in fresh.values():
            for group, changed in zip(optimizer.param_groups, lists, strict=True):
                states |= self._place_block(optimizer, group, changed, parameters, names)

        def install() -> None:
            for group, changed in zip(optimizer.param_groups, lists, strict=True):
                for key, items in changed.items():
                    group[key][:] = items
            for one in change.leaving:
                optimizer.state.pop(one.parameter, None)
            forget(optimizer, [one.parameter for one in change.leaving])
            optimizer.state.update({p: state for p, state in states.items() if state})
            mark_followed(optimizer, states)
            self._left = left

        return install

    def _leaving(self, optimizer: Optimizer, gone: set[int]) -> dict[int, _Left]:
        """Returns what is known of Parameters that have left, and of those that leave."""
        found = dict(self._left)
        for number, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in gone:
                    name = None
                    if names is not None:
                        name = names[place]
                    state = optimizer.state.get(parameter, {})
                    reference = weakref.ref(parameter)
                    found[id(parameter)] = _Left(reference, number, place, name, state)
        return found

    def _place_block(
        self,
        optimizer: Optimizer,
        group: State,
        changed: dict[str, list[Any]],
        parameters: Sequence[BlockParameter],
        names: Mapping[int, str],
    ) -> dict[nn.Parameter, State]:
        """Adds the Parameters of a block whose companions are in a group to its lists; returns
        their states.
        """
        held = {id(parameter) for parameter in group["params"]}
        mine = [one for one in parameters if id(one.beside) in held]
        if not mine:
            return {}
        companions = {id(one.beside) for one in mine}
        present = changed["params"]
        places = [n for n, parameter in enumerate(present) if id(parameter) in companions]
        # A companion that leaves in the same commit has no place any more.
        start = max(places, default=len(present) - 1) + 1
        if places and mine[0].is_before:
            start = min(places)
        present[start:start] = [one.parameter for one in mine]
        if "param_names" in changed:
            prefix = _prefix_in(group, names)
            changed["param_names"][start:start] = [prefix + one.name for one in mine]
        states = {}
        for one in mine:
            states[one.parameter] = first_state(optimizer, group, one.parameter.detach())
            if one.copies_state:
                states[one.parameter] = self._copied_state(optimizer, one)
        return states

    def _copied_state(self, optimizer: Optimizer, one: BlockParameter) -> State:
        """Returns a copy of the state of the Parameter beside a new one."""
        assert one.beside is not None
        state = copy.deepcopy(dict(optimizer.state.get(one.beside, {})))
        # Entries that are copies of the weights start from those of the new Parameter.
        own = {}
        for entry, value in entries_of(state).items():
            if is_like(value, one.parameter) and self._is_copy(optimizer, entry):
                own[entry] = one.parameter.detach().to(value.dtype).view_as(value).clone()
        return with_entries(state, own)

    def prepare_columns(
        self, graph: Graph, coming: Sequence[Column], leaving: Sequence[Column]
    ) -> Callable[[], None]:
        """Finds the positions of new columns, each in the group of its companion Parameter, if the
        optimizer holds it.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return lambda: None
        gone = {id(column.value) for column in leaving}
        lists = [_lists_without(group, gone) for group in optimizer.param_groups]
        mine = {id(parameter) for parameter in graph.parameters()}
        states = {}
        for column in coming:
            beside = graph.get_parameter(column.beside)
            for group, changed in zip(optimizer.param_groups, lists, strict=True):
                if any(beside is parameter for parameter in group["params"]):
                    _refuse_column(optimizer, column)
                    value = column.value.detach()
                    states[column.value] = first_state(optimizer, group, value)
                    _insert_column(changed, column, beside, mine)
            mine.add(id(column.value))
        names = {column.parameter_name for column in leaving}
        kept = {}
        for version, slots in self._tracked.kept.items():
            kept[version] = {name: slot for name, slot in slots.items() if name not in names}

        def install() -> None:
            for group, changed in zip(optimizer.param_groups, lists, strict=True):
                for key, items in changed.items():
                    group[key][:] = items
            for column in leaving:
                optimizer.state.pop(column.value, None)
            forget(optimizer, [column.value for column in leaving])
            optimizer.state.update({p: state for p, state in states.items() if state})
            self._tracked.remember(kept)
            mark_followed(optimizer, states)

        return install

    def _take(self, held: dict[str, _Held], commit: Commit) -> dict[str, Any]:
        """Returns what undo needs: the state of removed and assigned coordinates, or all state for
        the end of a trial that renews it.
        """
        if self._settings.survivors == "renew":
            if commit.kind != "trial":
                return {}
            return {name: one.state for name, one in held.items()}
        taken: Slots = {}
        for name, one in held.items():
            index = commit.parameters[name]
            assigned = commit.assigned.get(name)
            taken[name] = {}
            for entry, value in one.entries.items():
                if id(value) in one.parted:
                    slots = one.parted[id(value)].gone
                else:
                    slots = index.take(value)
                if assigned is not None:
                    slots = torch.cat([slots, cells_at(value, assigned)])
                taken[name][entry] = slots
        return taken

    def _carry(self, held: dict[str, _Held], commit: Commit) -> dict[str, _Held]:
        """Returns the state after a commit, with initial values for new coordinates."""
        optimizer = self.optimizer()
        assert optimizer is not None
        carried = {}
        if self._settings.survivors == "renew":
            for name, one in held.items():
                content = commit.view.content(_name_after(commit, name))
                state = first_state(optimizer, one.group, content)
                carried[name] = one._replace(state=state)
            return carried
        # What the commit that this one reverts has removed and assigned.
        kept: Slots | None = None
        if commit.undoes is not None:
            kept = self._tracked.kept.get(commit.undoes)
        for name, one in held.items():
            returning = None
            if kept is not None:
                returning = kept.get(name, {})
            moved = {}
            for entry in one.entries:
                moved[entry] = self._moved(optimizer, one, name, entry, commit, returning)
                if commit.is_staged:
                    moved[entry] = stage(moved[entry])
            carried[name] = one._replace(state=with_entries(one.state, moved), entries=moved)
        return carried

    def _moved(
        self,
        optimizer: Optimizer,
        held: _Held,
        name: str,
        entry: str,
        commit: Commit,
        returning: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """Returns one entry of the state of a Parameter after a commit.

        Args:
            optimizer: the optimizer.
            held: the Parameter and its state.
            name: of the Parameter.
            entry: the entry.
            commit: the commit.
            returning: for a commit that reverts another one, what that one has taken, by entry;
                None if it is not known.
        """
        index = commit.parameters[name]
        assigned = commit.assigned.get(name)
        kept = None
        if returning is not None:
            kept = returning.get(entry)
        if assigned is None or assigned.shape[0] == 0:
            return self._carried(optimizer, held, name, entry, commit, kept)
        slots = None
        if kept is not None:
            slots = kept[index.n_born :]
            kept = kept[: index.n_born]
            if slots.shape != assigned.shape:
                raise _other_length(entry, name)
        places = index.new_positions(assigned)
        if slots is None and self._is_copy(optimizer, entry):
            slots = cells_at(commit.view.content(name), places)
        elif slots is None and returning is not None:
            # The reverted commit came before the first step.
            slots = torch.full(assigned.shape, clean_value(optimizer, held.group, entry))
        moved = self._carried(optimizer, held, name, entry, commit, kept)
        if slots is not None:
            moved = with_cells(moved, places, slots)
        return moved

    def _carried(
        self,
        optimizer: Optimizer,
        held: _Held,
        name: str,
        entry: str,
        commit: Commit,
        back: Tensor | None,
    ) -> Tensor:
        """Returns one entry of the state of a Parameter after a commit, apart from what it assigns.

        Args:
            optimizer: the optimizer.
            held: the Parameter and its state.
            name: of the Parameter.
            entry: the entry.
            commit: the commit.
            back: the slots that the coordinates have that come back; None if they are not known.
        """
        index = commit.parameters[name]
        value = held.entries[entry]
        if back is not None and len(back) != index.n_born:
            raise _other_length(entry, name)
        if self._is_copy(optimizer, entry):
            moved = _moved_copy(value, held.parameter, commit.view.content(name), index)
            if back is not None and index.n_born:
                index.give(moved, back)
            return moved
        if id(value) in held.parted:
            return held.parted[id(value)].kept
        if back is not None:
            return index.carry(value, back)
        start = clean_value(optimizer, held.group, entry)
        if self._settings.newborn == "mean":
            return _moved_with_mean(value, index, start)
        return index.carry(value, start)

    def _give(
        self, present: dict[str, _Held], kept: dict[str, Any], commit: Commit
    ) -> dict[str, _Held]:
        """Returns the state before a trial that has renewed it; any other has what the reverted
        commit had removed from `_carry`.
        """
        if self._settings.survivors == "keep" or commit.kind != "end":
            return present
        back = {}
        for name, one in present.items():
            state = kept.get(_name_after(commit, name), one.state)
            back[name] = one._replace(state=state)
        return back

    def _is_copy(self, optimizer: Optimizer, entry: str) -> bool:
        if self._settings.copies is not None and entry in self._settings.copies:
            return True
        return is_copy(optimizer, entry)

    def _refuse_unknown_state(
        self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]
    ) -> None:
        """Raises OptimizerError for state outside `optimizer.state`, and for unnamed copies of the
        weights.
        """
        hidden = hidden_state(optimizer, list(parameters))
        if hidden:
            raise OptimizerError(
                f"this {type(optimizer).__name__} keeps numbers of the coordinates in {hidden},"
                " where they cannot follow an edit; use another optimizer, or keep them in"
                " optimizer.state[parameter]"
            )
        if self._settings.copies is not None or self._settings.survivors == "renew":
            return
        self.measure()
        for entry, near in self._near.items():
            if near:
                raise OptimizerError(
                    f"the optimizer's {entry!r} is closer to the weights than to 0, so it may be a"
                    " copy of them, in which a new weight starts from its value. If so: "
                    f"gn.attach(optimizer, net, copies=({entry!r},)); if not:"
                    " gn.attach(optimizer, net, copies=())"
                )


def _other_length(entry: str, name: str) -> OptimizerError:
    return OptimizerError(f"the {entry!r} that undo would restore for {name} has another length")


def names_of(graph: Graph) -> dict[int, str]:
    """Returns the names of the Parameters of a graph, by their ids."""
    return {id(store.parameter): name for name, store in graph._stores().items()}


def _name_after(commit: Commit, name: str) -> str:
    """Returns the name that a Parameter has after a commit."""
    if commit.change.depth is None:
        return name
    return commit.change.depth.renamed.get(name, name)


def _rename(
    lists: dict[str, list[Any]], names: Mapping[int, str], renamed: Mapping[str, str]
) -> None:
    """Renames the Parameters of a group that are called otherwise after a commit."""
    found = []
    for parameter, name in zip(lists["params"], lists.get("param_names", ()), strict=False):
        own = names.get(id(parameter), "")
        if own in renamed and name.endswith(own):
            name = name.removesuffix(own) + renamed[own]
        found.append(name)
    if "param_names" in lists:
        lists["param_names"] = found


def _prefix_in(group: State, names: Mapping[int, str]) -> str:
    """Returns what the names of a group put before the names that Parameters have in a graph."""
    for parameter, name in zip(group["params"], group["param_names"], strict=True):
        own = names.get(id(parameter))
        if own is not None and name.endswith(own):
            return name.removesuffix(own)
    return ""


def _unstaged(held: _Held) -> dict[str, Tensor]:
    """Returns the entries of a state in the memory of the device of the Parameter."""
    device = held.parameter.device
    return {entry: unstage(value, device) for entry, value in held.entries.items()}


def _moved_copy(value: Tensor, parameter: nn.Parameter, weights: Tensor, index: CellMap) -> Tensor:
    """Returns a copy of the weights after a commit that gives the Parameter the content `weights`.

    Newborn coordinates start from their weight; where the commit changes the weight of a survivor,
    as a folded constant does, the copy changes with it.
    """
    born = index.inverse().take(weights)
    before = index.carry(parameter, born).to(value)
    moved = index.carry(value, born)
    return shifted(moved, before.view_as(moved), weights.to(value).view_as(moved))


def _moved_with_mean(value: Tensor, index: CellMap, start: float) -> Tensor:
    """Returns an entry after a commit, with the mean of the survivors for newborn coordinates, and
    `start` where nothing survives.
    """
    if index.n_survivors == 0:
        return index.carry(value, start)
    moved = index.carry(value, 0.0)
    if index.n_born:
        mean = moved.sum(dtype=torch.float64) / index.n_survivors
        index.give(moved, mean.expand(index.n_born))
    return moved


def _refuse_column(optimizer: Optimizer, column: Column) -> None:
    """Raises OptimizerError for an optimizer that cannot train a vector."""
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        raise OptimizerError(
            f"Muon trains matrices only, and {column.parameter_name} is a vector; use another"
            " for it"
        )


def _lists_without(group: State, gone: set[int]) -> dict[str, list[Any]]:
    """Returns a group's Parameters, and their names where it has them, without some."""
    stays = [id(parameter) not in gone for parameter in group["params"]]
    lists = {}
    for key in ("params", "param_names"):
        if key in group:
            pairs = zip(group[key], stays, strict=True)
            lists[key] = [item for item, is_kept in pairs if is_kept]
    return lists


def _insert_column(
    lists: dict[str, list[Any]], column: Column, beside: nn.Parameter, mine: set[int]
) -> None:
    """Puts a column behind the net's last Parameter in a group, where `net.parameters()` would have
    had it.
    """
    params = lists["params"]
    place = 1 + max(n for n, parameter in enumerate(params) if id(parameter) in mine)
    if "param_names" in lists:
        names = lists["param_names"]
        name = next(names[n] for n, parameter in enumerate(params) if parameter is beside)
        names.insert(place, name.removesuffix(column.beside) + column.parameter_name)
    params.insert(place, column.value)


def undo_slots(optimizer: Optimizer, net: Graph) -> dict[int, Slots]:
    """Returns the state that undo restores in an attached optimizer: what each commit removed."""
    for follower in record_of(optimizer).followers:
        if follower.net() is net:
            return follower.kept_slots(net)
    return {}


def slot_owners(optimizer: Optimizer, net: Graph) -> dict[str, int]:
    """Returns the places of a net's Parameters among all of an optimizer's, by their names in the
    net.
    """
    places = {id(p): place for place, p in enumerate(parameters_of(optimizer))}
    return {name: places[id(p)] for name, p in net.named_parameters() if id(p) in places}


def set_undo_slots(
    optimizer: Optimizer, nets: Iterable[tuple[dict[int, Slots], Mapping[str, int]]]
) -> None:
    """Restores what `undo_slots` and `slot_owners` returned in another session, now or when a net
    is attached.
    """
    held = parameters_of(optimizer)
    record = record_of(optimizer)
    record.loaded = []
    for slots, owners in nets:
        parameters = {name: held[place] for name, place in owners.items()}
        record.loaded.append(LoadedSlots(slots, parameters))
    for follower in record.followers:
        net = follower.net()
        waiting = []
        for loaded in record.loaded:
            if net is not None and loaded.are_of(net):
                follower.take_slots(loaded.slots)
            else:
                waiting.append(loaded)
        record.loaded = waiting


class LoadedSlots(NamedTuple):
    """Slots that wait for the net that has these Parameters."""

    slots: dict[int, Slots]
    parameters: dict[str, nn.Parameter]

    def are_of(self, net: Graph) -> bool:
        """Returns whether a net has the Parameters."""
        if not self.parameters:
            return False
        mine = dict(net.named_parameters())
        return all(mine.get(name) is parameter for name, parameter in self.parameters.items())
