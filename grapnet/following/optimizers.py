"""gn.attach: optimizer state that follows every edit, coordinate by coordinate."""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adagrad, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from grapnet.core._change import IndexMap, Shift
from grapnet.core._commit import Tracked, carry_out, settle, unfit_parameters, unsettled
from grapnet.core._coordinates import Coordinates, Decision, layout_of
from grapnet.core._errors import OptimizerError
from grapnet.core._graph import Column, Graph
from grapnet.core._journal import Commit

from .averaging import attach_copy, detach_copy

Survivors = Literal["keep", "renew"]
Newborn = Literal["zero", "mean"]
State = dict[str, Any]
# Parameter name -> state entry -> the values of the coordinates that left
Slots = dict[str, dict[str, Tensor]]

# What is known of optimizers, by patterns of class names. Base classes count too.

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
# What other entries start from, where that is not 0: a number, or the name of an option.
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
_OF_TORCH = tuple(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
)
_CONTAINERS = (dict, list, tuple, deque)
# Fewer coordinates than these are like the weights by chance.
_ENOUGH = 4


def attach(
    what: Optimizer | nn.Module,
    net: nn.Module,
    *,
    survivors: Survivors = "keep",
    newborn: Newborn = "zero",
    copies: Iterable[str] | None = None,
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
        what: an optimizer whose state is one value a coordinate, or one number a Parameter; also
            one that wraps another optimizer, which then follows too. Or a copy of the net: an
            `AveragedModel`, a module with one such copy inside, or the copy itself. There survivors
            keep their averages, newborn coordinates take the net's values, restored ones return as
            the copy had them, and what is frozen in the net is frozen and goes on being averaged.
            Orphans that are folded leave the copy its own constants.
        net: the net whose Parameters the optimizer holds, or of which `what` holds a copy. For an
            optimizer also a model with nets inside: it follows each whose Parameters it holds.
        survivors: "keep" carries the state of every coordinate that stays; "renew" starts all
            afresh at every commit, and the end of a trial brings back what was there before it.
        newborn: the state of a coordinate that comes: "zero" is clean; "mean" is the mean over the
            coordinates of its Parameter that stay, entry by entry, and clean where none stays.
        copies: names of the state entries that are copies of the weights, as "z" is in
            schedule-free optimizers: a coordinate that comes starts there from its own value. Those
            of many optimizers are known. Without this argument, an unknown entry that is nearer to
            the weights than to 0 after the first step stops the next edit; `copies=()` lets it be.

    Raises:
        OptimizerError: the optimizer holds no Parameter of the net, is of a kind that cannot follow
            (LBFGS, Adafactor, SparseAdam), was left behind by an edit, has state that does not fit
            its Parameters, or trains sharded Parameters or inside of the backward pass; or the
            module holds no copy wired like the net.

    Examples:
        >>> import torch
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3, 2])
        >>> optimizer = torch.optim.Adam(net.parameters())
        >>> averaged = torch.optim.swa_utils.AveragedModel(net)
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
    if isinstance(what, Optimizer) and isinstance(net, nn.Module):
        raise TypeError(
            f"this {type(net).__name__} has no nets inside whose edits could be followed;"
            " gn.graft(model, where, optimizer=optimizer) puts nets into a model, and attaches the"
            " optimizer"
        )
    hint = ""
    if inside:
        hint = "; of a model, give the copy of each net with its net"
    raise TypeError(
        f"the net comes second: gn.{verb}(optimizer, net) or gn.{verb}(averaged, net), got"
        f" ({type(what).__name__}, {type(net).__name__}){hint}"
    )


class _Settings(NamedTuple):
    """How an optimizer follows a net."""

    survivors: Survivors
    newborn: Newborn
    copies: frozenset[str] | None  # None: known ones, and others are looked for


def _attach_optimizer(what: Optimizer, nets: list[Graph], settings: _Settings) -> None:
    if not hasattr(what, "state") or not hasattr(what, "param_groups"):
        raise OptimizerError(
            f"this {type(what).__name__} has no state and param_groups as a torch.optim.Optimizer"
            " has them, so it cannot follow an edit"
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
        refuse_stale_state(optimizer)
        for one in nets:
            for name, parameter in _held_of(optimizer, one).items():
                # Raises for state that does not fit.
                per_coordinate(optimizer, parameter, name)
    installs: list[Callable[[], None]] = []
    for optimizer in optimizers:
        record = _record(optimizer)
        if record.hook is None:
            record.hook = optimizer.register_state_dict_pre_hook(_settle_first)
        coming = []
        waiting = record.loaded
        for one in nets:
            slots = undo_slots(optimizer, one)
            for loaded in waiting:
                if loaded.are_of(one):
                    slots = loaded.slots
            waiting = [loaded for loaded in waiting if not loaded.are_of(one)]
            coming.append(OptimizerFollower(optimizer, one, settings, slots))
        installs += _prepare_followers(optimizer, nets, coming)
        installs.append(partial(setattr, record, "loaded", waiting))
        installs.append(partial(mark_followed, optimizer))
    carry_out(installs, Decision())


def _prepare_followers(
    optimizer: Optimizer, nets: list[Graph], coming: "list[OptimizerFollower]"
) -> list[Callable[[], None]]:
    """Returns what lets `coming` carry an optimizer's state through the commits of nets, in place
    of what does at present.
    """
    record = _record(optimizer)
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
    has the state of the one inside, Lookahead has state of its own as well.
    """
    inside = _inside(optimizer)
    found = []
    for one in inside:
        found += _with_state(one)
    if all(one.state is not optimizer.state for one in inside):
        found.append(optimizer)
    return found


def _inside(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers of the same Parameters among an optimizer's attributes."""
    inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if not inside:
        return []
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    return [one for one in inside if any(id(p) in held for p in parameters_of(one))]


class _Held(NamedTuple):
    """A Parameter of the net that the optimizer holds, and has state of."""

    parameter: nn.Parameter
    group: State
    state: State
    entries: dict[str, Tensor]  # of the state: what has one value a coordinate


class OptimizerFollower:
    """Carries one optimizer's state through the commits of one net."""

    def __init__(
        self, optimizer: Optimizer, net: Graph, settings: _Settings, slots: dict[int, Slots]
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.net = weakref.ref(net)
        # What torch's own optimizers keep is known.
        self._is_known = type(optimizer) in _OF_TORCH
        self.is_measured = self._is_known or settings.copies is not None
        self._settings = settings
        # Entries that were compared with the weights, and whether they are near.
        self._near: dict[str, bool] = {}
        # torch keeps the state; here it passes through, by the names of Parameters.
        self._tracked: Tracked[dict[str, _Held], dict[str, Any]] = Tracked(
            {}, take=self._take, carry=self._carry, give=self._give
        )
        self._tracked.remember(slots)

    def kept_slots(self, net: Graph) -> dict[int, Slots]:
        """Returns the slots of the commits that can still be taken back."""
        versions = net.journal.kept_versions()
        kept = self._tracked.kept
        return {version: slots for version, slots in kept.items() if version in versions}

    def take_slots(self, slots: dict[int, Slots]) -> None:
        """Takes over the slots of another session."""
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
            for entry, value in _entries(optimizer.state.get(parameter, {})).items():
                if entry in self._near or not _is_like(value, parameter):
                    continue
                if not _is_known(optimizer, entry):
                    pair = (value.detach().flatten(), parameter.detach().flatten())
                    found.setdefault(entry, []).append(pair)
                self.is_measured = True
        for entry, pairs in found.items():
            values = torch.cat([value.float() for value, _ in pairs])
            weights = torch.cat([weight.float() for _, weight in pairs])
            if len(values) >= _ENOUGH:
                self._near[entry] = is_near(values, weights)

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Computes the state after the commit; raises OptimizerError when some of it cannot be
        mapped.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return lambda: None
        parameters = _held_of(optimizer, graph)
        is_kept = self._settings.survivors == "keep"
        if is_kept:
            require_followed(optimizer, parameters.values())
        # A wrapper may keep numbers in the state of what it wraps, as TRAC does.
        is_plain = all(isinstance(key, Tensor) for key in optimizer.state)
        if not self._is_known or not is_plain:
            self._refuse_unknown_state(optimizer, parameters.values())
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        held = {}
        for name, parameter in parameters.items():
            state = optimizer.state.get(parameter, {})
            entries = {}
            if is_kept:
                if not state or name not in commit.parameters:
                    continue
                entries = per_coordinate(optimizer, parameter, name)
            elif not state and commit.kind != "end":
                continue
            held[name] = _Held(parameter, groups[id(parameter)], state, entries)
        self._tracked.replace(held)
        install_tracked = self._tracked.prepare(graph, commit)

        def install() -> None:
            install_tracked()
            for one in self._tracked.state.values():
                optimizer.state[one.parameter] = one.state
            mark_followed(optimizer, parameters.values())
            # The optimizer has it, and may let go of it.
            self._tracked.replace({})

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
                    states[column.value] = _first_state(optimizer, group, value, len(value))
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
        """Returns what undo needs: the state of the coordinates that leave, or for the end of a
        trial that renews the state all of it.
        """
        if self._settings.survivors == "renew":
            if commit.kind != "trial":
                return {}
            return {name: one.state for name, one in held.items()}
        taken: Slots = {}
        for name, one in held.items():
            removed = commit.parameters[name].removed
            taken[name] = {}
            for entry, value in one.entries.items():
                taken[name][entry] = value.flatten().index_select(0, removed)
        return taken

    def _carry(self, held: dict[str, _Held], commit: Commit) -> dict[str, _Held]:
        """Returns the state after a commit, with what newborn coordinates start from."""
        optimizer = self.optimizer()
        net = self.net()
        assert optimizer is not None
        assert net is not None
        carried = {}
        for name, one in held.items():
            index = commit.parameters.get(name)
            if self._settings.survivors == "renew":
                rows = len(one.parameter) if index is None else index.new_size
                state = _first_state(optimizer, one.group, one.parameter.detach(), rows)
                carried[name] = one._replace(state=state)
                continue
            assert index is not None
            moved = {}
            for entry, value in one.entries.items():
                start = clean_value(optimizer, one.group, entry)
                if self._is_copy(optimizer, entry):
                    weights = _content_after(commit, name)
                    moved[entry] = _moved_copy(value, one.parameter, weights, index)
                elif self._settings.newborn == "mean":
                    moved[entry] = _moved_with_mean(value, index, start)
                else:
                    moved[entry] = index.carry(value, start)
            carried[name] = one._replace(state=with_entries(one.state, moved), entries=moved)
        return carried

    def _give(
        self, present: dict[str, _Held], kept: dict[str, Any], commit: Commit
    ) -> dict[str, _Held]:
        """Returns the state with what the commit that is taken back took away."""
        if self._settings.survivors == "renew":
            if commit.kind != "end":
                return present
            back = {}
            for name, one in present.items():
                back[name] = one._replace(state=kept.get(name, one.state))
            return back
        for name in present.keys() & kept.keys():
            inserted = commit.parameters[name].inserted.long()
            entries = present[name].entries
            for entry, back in kept[name].items():
                if len(back) != len(inserted):
                    raise OptimizerError(
                        f"the {entry!r} that undo would give back to {name} is of another length"
                    )
                if entry in entries and len(inserted):
                    # `_carry` has made this tensor for this commit.
                    entries[entry].view(-1)[inserted] = back.to(entries[entry])
        return present

    def _is_copy(self, optimizer: Optimizer, entry: str) -> bool:
        if self._settings.copies is not None and entry in self._settings.copies:
            return True
        return is_copy(optimizer, entry)

    def _refuse_unknown_state(
        self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]
    ) -> None:
        """Raises OptimizerError for state outside of its place, and for copies of the weights that
        are not named.
        """
        hidden = _hidden_state(optimizer, list(parameters))
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
                    f"the optimizer's {entry!r} is nearer to the weights than to 0, so it may be a"
                    " copy of them, which a newborn weight has to start from. If it is: "
                    f"gn.attach(optimizer, net, copies=({entry!r},)); if not:"
                    " gn.attach(optimizer, net, copies=())"
                )


def is_near(values: Tensor, weights: Tensor) -> bool:
    """Returns whether a vector is nearer to the weights than to 0, by far: at most half of its
    length away, and nearer for three quarters of the coordinates.

    Momentum points anywhere, and is seldom as long as the weights.
    """
    apart = values - weights
    if not bool(apart.norm() < values.norm() / 2):
        return False
    counted = (values != 0) | (weights != 0)
    nearer = (apart.abs() < values.abs())[counted]
    return bool(nearer.float().mean() >= 0.75)


def _content_after(commit: Commit, name: str) -> Tensor:
    """Returns the content that a commit gives a Parameter, which it has not yet while followers
    prepare.
    """
    kind, place, _ = name.split(".")
    if kind == "transitions":
        return commit.view.weights[int(place)].content
    if kind == "layers":
        return commit.view.biases[int(place)].content
    return commit.view.columns[place].content


def _moved_copy(value: Tensor, parameter: nn.Parameter, weights: Tensor, index: IndexMap) -> Tensor:
    """Returns a copy of the weights after a commit that gives the Parameter the content `weights`.

    Newborn coordinates start from their weight; where the commit changes the weight of a survivor,
    as a folded constant does, the copy changes with it.
    """
    born = weights.index_select(0, index.inserted)
    before = index.carry(parameter, born).to(value)
    moved = index.carry(value, born.to(value).view(-1, *value.shape[1:]))
    shift = Shift(index.inserted, before.view_as(moved), weights.to(value).view_as(moved))
    return shift.apply(moved)


def _moved_with_mean(value: Tensor, index: IndexMap, start: float) -> Tensor:
    """Returns an entry after a commit, with the mean of the survivors for newborn coordinates, and
    `start` where nothing survives.
    """
    survivors = index.old_size - len(index.removed)
    if survivors == 0:
        return index.carry(value, start)
    moved = index.carry(value, 0.0)
    if len(index.inserted):
        mean = moved.sum(dtype=torch.float64) / survivors
        moved.view(-1)[index.inserted.long()] = mean.to(moved.dtype)
    return moved


def per_coordinate(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> dict[str, Tensor]:
    """Returns the tensors of one value a coordinate in the state of a Parameter, also inside of
    lists, tuples and dicts.

    Raises:
        OptimizerError: a tensor is neither that nor one number.
    """
    found = {}
    for entry, value in _entries(optimizer.state.get(parameter, {})).items():
        if _has_a_value_a_coordinate(optimizer, parameter, name, entry, value):
            found[entry] = value
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
    """Returns whether part of the state has one value a coordinate, or is one number; raises
    OptimizerError for anything else.

    A Parameter of a single coordinate cannot tell the two apart by shape; the optimizer's other
    Parameters can.
    """
    if not isinstance(value, Tensor):
        if not _holds_tensors(value):
            return False
        form = type(value).__name__
    else:
        form = str(list(value.shape))
        is_whole = value.shape == parameter.shape
        if not is_whole and _is_known(optimizer, entry):
            # Prodigy's are flat.
            is_whole = value.shape == (parameter.numel(),)
        if value.numel() == 1 and not (is_whole and not _is_one_number(optimizer, entry)):
            return False
        if is_whole and value.is_floating_point():
            return True
        if is_whole:
            form = str(value.dtype)
    raise OptimizerError(
        f"the optimizer's {entry!r} ({form}) for {name} {list(parameter.shape)} is not one"
        " value a coordinate, so it cannot follow an edit; use another optimizer or make a"
        " new one after editing"
    )


def _is_one_number(optimizer: Optimizer, entry: str) -> bool:
    """Returns whether an entry is a single number also where the Parameter has several coordinates,
    or none.
    """
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and parameter.numel() != 1:
            value = _entries(state).get(entry)
            if isinstance(value, Tensor) and value.numel() == 1:
                return True
    return False


def _held_of(optimizer: Optimizer, net: Graph) -> dict[str, nn.Parameter]:
    """Returns the Parameters of a net that an optimizer holds, by their names in the net."""
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    stores = net.stores().items()
    return {name: store.parameter for name, store in stores if id(store.parameter) in held}


def _entries(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns what a state holds by name; momentum_buffer[0.9] is inside of a dict."""
    found = {}
    for key, value in state.items():
        if isinstance(value, _CONTAINERS):
            leaves, _ = pytree.tree_flatten_with_path(value)
            found |= {f"{key}{pytree.keystr(path)}": leaf for path, leaf in leaves}
        else:
            found[str(key)] = value
    return found


def _is_like(value: Any, parameter: Tensor) -> bool:
    """Returns whether something is a tensor of one number a coordinate."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.shape in (parameter.shape, (parameter.numel(),))


def _holds_tensors(value: object) -> bool:
    """Returns whether an object of another library has tensors among its attributes."""
    attributes = getattr(value, "__dict__", {})
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(dict(attributes)))


def _hidden_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> str:
    """Returns where an optimizer keeps numbers a coordinate outside of the state of its Parameters;
    empty when it does not.

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
    inside = [one.state for one in _inside(optimizer)]
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
                f"{name} cannot follow a net: {_REFUSED[name]}; use Adam, SGD or another that keeps"
                " one value a coordinate"
            )


def is_copy(optimizer: Optimizer, entry: str) -> bool:
    """Returns whether a state entry is known as a copy or an average of the weights."""
    for pattern, entries in _COPIES.items():
        if entry in entries and _is_a(optimizer, pattern):
            return True
    return False


def clean_value(optimizer: Optimizer, group: State, entry: str) -> float:
    """Returns what a state entry starts from."""
    for pattern, entries in _STARTS.items():
        if entry in entries and _is_a(optimizer, pattern):
            start = entries[entry]
            return float(group[start] if isinstance(start, str) else start)
    return 0.0


def _is_known(optimizer: Optimizer, entry: str) -> bool:
    """Returns whether it is known what a state entry starts from."""
    if isinstance(optimizer, _OF_TORCH) and entry in _MOMENTS:
        return True
    if is_copy(optimizer, entry):
        return True
    return any(entry in _STARTS[name] for name in _class_names(optimizer) if name in _STARTS)


def _is_a(optimizer: Optimizer, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in _class_names(optimizer))


def _class_names(optimizer: Optimizer) -> list[str]:
    return [kind.__name__ for kind in type(optimizer).__mro__]


def _first_state(optimizer: Optimizer, group: State, example: Tensor, rows: int) -> State:
    """Returns the state before the first step of a Parameter of `rows` rows; Adagrad alone makes it
    ahead.
    """
    if not isinstance(optimizer, Adagrad):
        return {}
    accumulated = example.new_full((rows, *example.shape[1:]), group["initial_accumulator_value"])
    device = accumulated.device if group.get("fused") else "cpu"
    return {"step": torch.zeros((), dtype=torch.float32, device=device), "sum": accumulated}


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
    """Returns the state that undo gives back to an attached optimizer: of each commit, what it took
    away.
    """
    for follower in _record(optimizer).followers:
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
    """Gives back what `undo_slots` and `slot_owners` returned in another session, now or once a net
    is attached.
    """
    held = parameters_of(optimizer)
    record = _record(optimizer)
    record.loaded = []
    for slots, owners in nets:
        parameters = {name: held[place] for name, place in owners.items()}
        record.loaded.append(_LoadedSlots(slots, parameters))
    for follower in record.followers:
        slots = _take_loaded(optimizer, follower.net())
        if slots is not None:
            follower.take_slots(slots)


def _take_loaded(optimizer: Optimizer, net: Graph | None) -> dict[int, Slots] | None:
    """Returns the slots that wait for a net, which then no longer wait; None when there are
    none.
    """
    record = _record(optimizer)
    mine = [loaded for loaded in record.loaded if loaded.are_of(net)]
    if not mine:
        return None
    record.loaded = [loaded for loaded in record.loaded if not loaded.are_of(net)]
    return mine[0].slots


class _LoadedSlots(NamedTuple):
    """Slots that wait for the net that has these Parameters."""

    slots: dict[int, Slots]
    parameters: dict[str, nn.Parameter]

    def are_of(self, net: Graph | None) -> bool:
        if net is None or not self.parameters:
            return False
        mine = dict(net.named_parameters())
        return all(mine.get(name) is parameter for name, parameter in self.parameters.items())


class _Record:
    """What is known of one optimizer.

    Attributes:
        followers: what carries its state, one for each net that it is attached to.
        loaded: slots that wait for their net.
        layouts: the layout that each Parameter had when the optimizer last stepped or followed.
        compared: how often layouts had changed, in all graphs of the process, and how many groups
            there were, when the layouts were last compared.
    """

    def __init__(self) -> None:
        self.followers: list[OptimizerFollower] = []
        self.loaded: list[_LoadedSlots] = []
        self.layouts: dict[int, object] = {}
        self.compared: tuple[int, int] = (-1, -1)
        self.hook: RemovableHandle | None = None  # before its state dict is read


_records: "weakref.WeakKeyDictionary[Optimizer, _Record]" = weakref.WeakKeyDictionary()


def _record(optimizer: Optimizer) -> _Record:
    """Returns the record of an optimizer; one that wraps another, and has its state, shares that
    one's.
    """
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value.state is optimizer.state:
            return _record(value)
    return _records.setdefault(optimizer, _Record())


def _settle_first(_: Optimizer) -> None:
    """Completes a commit that an interrupt has left, before the state is read."""
    if unsettled:
        settle()


def refuse_stale_state(optimizer: Optimizer, *_: object) -> None:
    """Raises when the optimizer holds state of coordinates that have moved; a few comparisons if no
    net was edited. Runs before every step of every optimizer.
    """
    if unsettled:
        settle()
    record = _record(optimizer)
    for follower in record.followers:
        if not follower.is_measured:
            follower.measure()
    present = (Coordinates.layout_changes, len(optimizer.param_groups))
    if record.compared == present:
        return
    require_followed(optimizer, parameters_of(optimizer))
    mark_followed(optimizer)
    record.compared = present


def require_followed(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raises OptimizerError when the optimizer's state of one of the parameters is of coordinates
    that have moved.
    """
    layouts = _record(optimizer).layouts
    for parameter in parameters:
        verb = getattr(parameter, "grapnet_replaced", None)
        if verb is not None:
            remedy = "Make"
            if verb != "restore":
                remedy = f"Give it to gn.{verb}(..., optimizer=optimizer), or make"
            raise OptimizerError(
                f"this optimizer holds parameters that gn.{verb} has replaced, and would not train"
                f" what is there. {remedy} another one for the model as it is"
            )
        layout = layout_of(parameter)
        has_moved = layouts.get(id(parameter), layout) is not layout
        if _holds_stale_state(optimizer, parameter, has_moved):
            raise OptimizerError(
                "this optimizer holds state of relations or biases that an edit has moved since: it"
                " was not attached then, is a copy of one that was, or has loaded a state dict of"
                " before the edit. Go on with another one, or with gn.restore(path,"
                " optimizer=optimizer) of a file saved after the edit; and attach it before"
                " editing: gn.attach(optimizer, net)"
            )


def _holds_stale_state(optimizer: Optimizer, parameter: nn.Parameter, has_moved: bool) -> bool:
    """Returns whether the state is of coordinates that have moved: the Parameter did, or a size
    shows it.
    """
    if has_moved and isinstance(optimizer, LBFGS):
        return any(optimizer.state.values())
    if has_moved and _hidden_state(optimizer, parameters_of(optimizer)):
        return True
    is_edited = layout_of(parameter) is not None
    if not has_moved and not is_edited:
        return False
    for value in _entries(optimizer.state.get(parameter, {})).values():
        if not isinstance(value, Tensor):
            if has_moved and _holds_tensors(value):
                return True
            continue
        if value.dim() == 0:
            continue
        is_alike = value.shape[1:] == parameter.shape[1:] and value.numel() != 1
        is_resized = is_edited and is_alike and len(value) != len(parameter)
        if has_moved or is_resized:
            return True
    return False


def mark_followed(optimizer: Optimizer, parameters: Iterable[nn.Parameter] | None = None) -> None:
    """Notes that the optimizer's state fits the present coordinates of parameters (all of its own
    by default).
    """
    layouts = _record(optimizer).layouts
    if parameters is None:
        parameters = parameters_of(optimizer)
    for parameter in parameters:
        layouts[id(parameter)] = layout_of(parameter)


def forget(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Notes that the optimizer no longer holds parameters."""
    layouts = _record(optimizer).layouts
    for parameter in parameters:
        layouts.pop(id(parameter), None)


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
        # The next step compares sizes, before it changes anything.
        _record(optimizer).compared = (-1, -1)

    return marked


# torch has a hook for the steps of all optimizers but none for their loading, and state that is
# loaded and then left behind by an edit of equal size would be used for other relations in silence.
register_optimizer_step_pre_hook(refuse_stale_state)
Optimizer.__setstate__ = _mark_loaded_state(Optimizer.__setstate__)  # pyright: ignore[reportAttributeAccessIssue]
