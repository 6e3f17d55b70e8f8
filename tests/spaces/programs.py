"""Random programs on adopted models beside a plain model that is edited by hand.

The hand-edited model knows nothing of the library but the positions that `space.places()` gives,
the numbers of modules in the receipt, and the values of new entries.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from torch.optim import Adam

import grapnet as gn
from grapnet.core._opened import CUT, FREE, FROZEN
from grapnet.core._sets import RelationSet
from grapnet.spaces import Adopted, Space
from tests.machine import CALM
from tests.operations import Planned, Reluctant
from tests.spaces import oracle, zoo
from tests.spaces.subjects import cells_of, step, subject

MODELS = [
    "mlp",
    "vgg",
    "conv1d",
    "groupnorm",
    "grouped",
    "cascaded_concat",
    "concat_split",
    "pixel_shuffle",
    "bare_parameter",
    "multiple_inputs_and_outputs",
    "fully_connected",
    "autoencoder",
    "vit",
]
RARE = ["fail", "undo_all"]
ACTIONS = ["edit"] * 5 + ["train", "undo", "redo"] * 2 + ["try_out", *RARE]
OWNERS = [None, "red", "blue"]
EDITED = ("exact", "normalised", "differs")
CLOSE = 1e-9
LARGEST = 24  # nodes of a space

Moves = dict[tuple[str, int], tuple[list[int], list[int]]]  # removed before, inserted after
Tensors = dict[str, Tensor]
Attributes = list[tuple[str, str, Any]]


@dataclass
class Record:
    """What leads back from an edit: moves, and all contents of before."""

    moves: Moves
    values: Tensors
    states: dict[str, dict[str, Tensor]]
    attributes: Attributes
    nodes: list[list[tuple[int, str | None]]]  # uid and owner, by space
    kinds: Tensors
    assigned: Tensors  # by parameter: masks of the cells that get their values and states back


@dataclass
class Mirror:
    """A plain model and its optimizer, edited by hand."""

    case: zoo.Case
    model: nn.Module
    optimizer: Adam
    nodes: list[list[tuple[int, str | None]]]
    kinds: Tensors  # by parameter: CUT, FREE or FROZEN for every cell
    undoable: list[Record] = field(default_factory=list)
    redoable: list[Record] = field(default_factory=list)

    def record(self, moves: Moves, attributes: Attributes, assigned: Tensors) -> Record:
        """Returns what leads back from the edit with these moves and assigned cells, before it is
        made.
        """
        back = {place: (inserted, removed) for place, (removed, inserted) in moves.items()}
        values = {name: t.detach().clone() for name, t in oracle.tensors_of(self.model).items()}
        nodes = copy.deepcopy(self.nodes)
        kinds = {name: kind.clone() for name, kind in self.kinds.items()}
        return Record(back, values, self.states(), attributes, nodes, kinds, assigned)

    def step(self) -> None:
        """Makes a step; cells that are cut or frozen stay as they are, without state."""
        held = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        step(self.model, self.optimizer, self.case)
        for name, parameter in self.model.named_parameters():
            is_held = self.kinds[name] != FREE
            parameter.data[is_held] = held[name][is_held]
            self.clear(parameter, is_held)

    def clear(self, parameter: nn.Parameter, cells: Tensor) -> None:
        """Makes the state of some cells that of cells that were never trained."""
        for value in self.optimizer.state[parameter].values():
            if value.shape == parameter.shape:
                value[cells] = 0.0

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Returns copies of the states of the optimizer, by the names of parameters."""
        found = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            found[name] = {key: value.clone() for key, value in state.items()}
        return found

    def apply(
        self,
        moves: Moves,
        values: Tensors,
        states: Mapping[str, Mapping[str, Tensor]],
        attributes: Attributes,
        kinds: Tensors,
    ) -> None:
        """Moves everything; new entries come from `values` and `states`.

        `kinds` are those of all cells afterwards.
        """
        tensors = oracle.tensors_of(self.model)
        parameters = dict(self.model.named_parameters())
        for name in dict.fromkeys(name for name, _ in moves):
            tensor = tensors[name]
            shape = tensor.shape
            tensor.data = moved(tensor.data, name, moves, values[name])
            if name not in parameters:
                continue
            state = self.optimizer.state[parameters[name]]
            for key, value in state.items():
                if value.shape == shape:
                    state[key] = moved(value, name, moves, states[name][key])
            filler = torch.ones(parameters[name].shape, dtype=torch.uint8)
            self.kinds[name] = moved(self.kinds[name], name, moves, filler)
        for name, parameter in parameters.items():
            self.turn(parameter, kinds[name], self.kinds[name], values[name], states[name])
            self.kinds[name] = kinds[name]
        for path, name, value in attributes:
            setattr(self.model.get_submodule(path), name, value)

    def turn(
        self,
        parameter: nn.Parameter,
        kinds: Tensor,
        present: Tensor,
        values: Tensor,
        states: Mapping[str, Tensor],
    ) -> None:
        """Cuts, connects, freezes and unfreezes cells."""
        comes = (present == CUT) & (kinds != CUT)
        parameter.data[comes] = values[comes]
        parameter.data[kinds == CUT] = 0.0
        freed = (present != FREE) & (kinds == FREE)
        for key, value in self.optimizer.state[parameter].items():
            if value.shape == parameter.shape:
                value[freed] = states[key][freed]
        self.clear(parameter, kinds != FREE)

    def reverse(self, record: Record) -> Record:
        """Takes an edit back; returns what leads back from that."""
        present = []
        for path, name, _ in record.attributes:
            present.append((path, name, getattr(self.model.get_submodule(path), name)))
        back = {place: (inserted, removed) for place, (removed, inserted) in record.moves.items()}
        assigned = {}
        for name, cells in record.assigned.items():
            nothing = torch.zeros(self.kinds[name].shape, dtype=torch.bool)
            assigned[name] = moved(cells, name, back, nothing)
        other = self.record(record.moves, present, assigned)
        self.apply(record.moves, record.values, record.states, record.attributes, record.kinds)
        parameters = dict(self.model.named_parameters())
        for name, cells in record.assigned.items():
            parameter = parameters[name]
            parameter.data[cells] = record.values[name][cells]
            for key, value in self.optimizer.state[parameter].items():
                # The steps of a Parameter go on, also where it has a single coordinate.
                if value.shape == parameter.shape and key != "step":
                    value[cells] = record.states[name][key][cells]
            self.clear(parameter, record.kinds[name] != FREE)
        self.nodes = record.nodes
        return other


def moved(tensor: Tensor, name: str, moves: Moves, filler: Tensor) -> Tensor:
    """Returns a tensor after moves along its axes; new entries are those of `filler`."""
    if tensor.dim() == 0:
        return tensor
    new = filler.clone()
    old_rows = []
    new_rows = []
    for dim in range(tensor.dim()):
        removed, inserted = moves.get((name, dim), ([], []))
        old_rows.append(oracle.kept(tensor.shape[dim], removed))
        new_rows.append(oracle.kept(new.shape[dim], inserted))
    new[grid(new_rows)] = tensor[grid(old_rows)]
    return new


def grid(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns indices that select the cells at the given rows of all axes."""
    return torch.meshgrid(*rows, indexing="ij")


class Turn(NamedTuple):
    """Something to do with the relations of a weight, or with the weights of some nodes."""

    verb: str
    target: Any  # a Weight or a Space
    chosen: Tensor  # [n, 2] rows of parents and children, or [n] rows of nodes

    @property
    def weight(self) -> Any:
        return self.target

    def ask(self, edit: Any, net: Adopted) -> None:
        """Asks an edit for it."""
        if isinstance(self.target, Space):
            getattr(edit, self.verb)(self.target[self.chosen])
            return
        parents = net.layers[self.target.source]
        children = net.layers[self.target.target]
        if self.verb == "connect":
            edit.connect(
                parents.uid[self.chosen[:, 0]],
                children.uid[self.chosen[:, 1]],
                pairs="aligned",
                tensor=self.target.name,
            )
            return
        t = net.transitions.index(self.target)
        at = self.target.topology.find(self.chosen[:, 0], self.chosen[:, 1])
        relations = RelationSet(net, {t: at.sort().values.int()})
        getattr(edit, self.verb)(relations)

    def cells(self, net: Adopted, kinds: Tensors) -> list[tuple[str, Tensor]]:
        """Returns the parameters that it touches, with a mask of their cells."""
        found = []
        if isinstance(self.target, Space):
            for (name, dim), at in self.target.places().items():
                if name in kinds:
                    mask = torch.zeros(kinds[name].shape, dtype=torch.bool)
                    mask.index_fill_(dim, at[self.chosen].reshape(-1), True)
                    found.append((name, mask))
            return found
        return [(self.target.name, cells_of(net, self.target, self.chosen))]


def pairs_of(weight: Any) -> Tensor:
    """Returns the rows of parents and children of all relations of a weight."""
    topology = weight.topology
    return torch.stack([topology.parents().long(), topology.child.long()], 1)


def missing_pairs(weight: Any) -> Tensor:
    """Returns the rows of parents and children that are not related."""
    topology = weight.topology
    related = torch.zeros(topology.n_parents, topology.n_children, dtype=torch.bool)
    related[topology.parents().long(), topology.child.long()] = True
    groups = [
        torch.arange(size) // (size // weight._n_groups)
        for size in (topology.n_parents, topology.n_children)
    ]
    return (~related & (groups[0][:, None] == groups[1])).nonzero()


def contents_of(net: Adopted) -> Tensors:
    """Returns all tensors of a model by name, as its modules compute with them."""
    found = {}
    for name, tensor in oracle.tensors_of(net.model).items():
        grid = net._grids().get(name)
        found[name] = (tensor if grid is None else grid.whole).detach().clone()
    return found


def spread_out(grid: Any, value: Tensor) -> Tensor:
    """Returns the state of free cells in the shape of the tensor, 0 for others."""
    whole = torch.zeros(grid.shape, dtype=value.dtype)
    rows = whole.view(-1, grid.opened.pattern.width)
    rows[grid.opened.free_at(value.device)] = value.view(-1, grid.opened.pattern.width)
    return whole


@functools.cache
def adopted(name: str) -> tuple[zoo.Case, Adopted]:
    """Returns an adopted model to be copied, whose spaces are proved."""
    found = subject(zoo.MODELS[name]())
    for space in found.free:
        with found.net.edit(trial=True) as edit:
            edit.remove_nodes(space[0])
            try:
                edit.commit()
            except gn.errors.EditError:
                continue
    return found.case, found.net


class SpaceMachine(RuleBasedStateMachine):
    """Random programs on a small model; after every rule it must equal the hand-edited one."""

    counts: ClassVar[Counter[str]] = Counter()

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Copies an adopted model and trains it for a step."""
        self.counts["programs"] += 1
        self.data = data
        case, net = adopted(self.draw(st.sampled_from(MODELS)))
        self.case = case
        self.net = copy.deepcopy(net)
        self.model = self.net.model
        self.parameters = list(self.model.parameters())
        self.optimizer = Adam(self.parameters, lr=0.01)
        gn.attach(self.optimizer, self.net)
        twin = copy.deepcopy(self.model)
        kinds = {}
        for name, parameter in twin.named_parameters():
            kinds[name] = torch.ones(parameter.shape, dtype=torch.uint8)
        optimizer = Adam(twin.parameters(), lr=0.01)
        self.mirror = Mirror(case, twin, optimizer, nodes_of(self.net), kinds)
        self.version = self.net.version
        self.favourites = self.draw(
            st.lists(st.sampled_from(sorted(set(ACTIONS))), max_size=2, unique=True)
        )
        self.train()

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    @property
    def free(self) -> list[Space]:
        """The spaces that can be edited: the matrix names those that are refused."""
        return [space for space in self.net.spaces if space.verdict in EDITED]

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Does one of the actions, those most often that this program favours."""
        self.counts["actions"] += 1
        self.data = data
        getattr(self, self.draw(st.sampled_from(ACTIONS + self.favourites * 4)))()

    def run(self, model: nn.Module) -> list[Tensor]:
        """Returns the outputs of a model in evaluation mode, in which nothing is drawn."""
        with torch.no_grad():
            return oracle.flattened(model(*self.case.inputs, **self.case.kwargs))

    def train(self) -> None:
        """Makes a step with both."""
        step(self.model, self.optimizer, self.case)
        self.mirror.step()

    def edit(self) -> None:
        """Edits both."""
        asked = self.plan()
        turns = self.plan_turns()
        written = self.plan_values()
        outputs = self.run(self.model)
        with self.net.edit(reason="program", allow_dead=True) as edit:
            before = places_of(asked)
            wanted = self.turned(turns)
            self.ask(edit, asked, turns, written)
        if edit.receipt is None:
            assert not asked
            return
        self.version += 1
        record = self.follow(asked, before, edit.receipt, wanted, written)
        self.mirror.undoable.append(record)
        self.mirror.redoable.clear()
        if (
            not turns
            and not written
            and all(not rows and space.verdict == "exact" for space, rows, _, _ in asked)
        ):
            after = self.run(self.model)
            assert oracle.largest_difference(after, outputs) < CLOSE

    def plan(self) -> list[tuple[Space, list[int], int, str | None]]:
        """Draws spaces with rows to remove, a number of nodes to add and their owner."""
        free = self.free
        least = int(self.draw(st.integers(0, 7)) > 0)
        chosen = self.draw(
            st.lists(st.sampled_from(range(len(free))), min_size=least, max_size=3, unique=True)
        )
        asked = []
        for number in chosen:
            space = free[number]
            rows = self.draw(
                st.lists(
                    st.integers(0, len(space) - 1),
                    max_size=max(0, len(space) - 1),
                    unique=True,
                )
            )
            count = 0
            if not rows or self.draw(st.integers(0, 3)) == 0:
                count = self.draw(st.integers(1, max(1, min(4, LARGEST - len(space)))))
            asked.append((space, sorted(rows), count, self.draw(st.sampled_from(OWNERS))))
        return asked

    def plan_turns(self) -> "list[Turn]":
        """Draws what to do with single relations and with the weights of nodes."""
        turns: list[Turn] = []
        for _ in range(self.draw(st.sampled_from([0, 0, 1, 2]))):
            weight = self.draw(st.sampled_from(self.net.transitions))
            verb = self.draw(st.sampled_from(["cut", "cut", "connect", "freeze", "unfreeze"]))
            seed = self.draw(st.integers(0, 99))
            random = torch.Generator().manual_seed(seed)
            share = self.draw(st.sampled_from([0.1, 0.5, 1.0]))
            relations = pairs_of(weight)
            if verb == "connect":
                relations = missing_pairs(weight)
            count = round(share * len(relations))
            chosen = relations[torch.randperm(len(relations), generator=random)[:count]]
            if len(chosen) and not any(turn.weight is weight for turn in turns):
                turns.append(Turn(verb, weight, chosen))
        if self.draw(st.integers(0, 3)) == 0:
            space = self.draw(st.sampled_from(self.net.spaces))
            rows = self.draw(st.lists(st.integers(0, len(space) - 1), min_size=1, unique=True))
            verb = self.draw(st.sampled_from(["freeze", "unfreeze"]))
            if not turns:
                turns.append(Turn(verb, space, torch.tensor(sorted(rows))))
        return turns

    def plan_values(self) -> Tensors:
        """Draws parameters to assign, with values for all of their cells."""
        if self.draw(st.integers(0, 2)) > 0:
            return {}
        names = self.draw(
            st.lists(st.sampled_from(sorted(self.mirror.kinds)), max_size=2, unique=True)
        )
        random = torch.Generator().manual_seed(self.draw(st.integers(0, 99)))
        present = contents_of(self.net)
        found = {}
        for name in names:
            values = torch.randn(present[name].shape, dtype=torch.float64, generator=random)
            kinds = self.mirror.kinds[name]
            found[name] = torch.where(kinds == FROZEN, present[name], values.to(present[name]))
            found[name][kinds == CUT] = torch.nan
        return found

    def turned(self, turns: "Sequence[Turn]") -> Tensors:
        """Returns the kinds of all cells after some turns, before any node moves."""
        kinds = {name: kind.clone() for name, kind in self.mirror.kinds.items()}
        for turn in turns:
            for name, cells in turn.cells(self.net, kinds):
                kind = kinds[name]
                if turn.verb == "cut":
                    kind[cells] = CUT
                elif turn.verb == "connect":
                    kind[cells & (kind == CUT)] = FREE
                elif turn.verb == "freeze":
                    kind[cells & (kind == FREE)] = FROZEN
                else:
                    kind[cells & (kind == FROZEN)] = FREE
        return kinds

    def ask(
        self,
        edit: Any,
        asked: Sequence[tuple[Space, list[int], int, str | None]],
        turns: "Sequence[Turn]" = (),
        written: Tensors | None = None,
    ) -> None:
        """Asks an edit for everything that was planned."""
        for name, values in (written or {}).items():
            self.counts["operations"] += 1
            edit.assign(dict(self.model.named_parameters())[name], values)
        for turn in turns:
            self.counts["operations"] += 1
            turn.ask(edit, self.net)
        for space, rows, count, owner in asked:
            self.counts["operations"] += 1
            if owner is not None and 0 not in rows:
                edit.set_owner(space[0], owner)
            if rows:
                edit.remove_nodes(space[rows])
            if count:
                # Where new nodes change the function, they are asked for by name.
                readers = "alike" if space.prove() == "differs" else "zero"
                edit.add_nodes(space, count, owner=owner, readers=readers)

    def follow(
        self,
        asked: Sequence[tuple[Space, list[int], int, str | None]],
        before: Mapping[int, Mapping[tuple[str, int], Tensor]],
        receipt: gn.Commit,
        wanted: Tensors,
        written: Tensors,
    ) -> Record:
        """Makes an edit of the library by hand; returns what leads back."""
        moves: Moves = {}
        for space, rows, count, _ in asked:
            new = range(len(space) - count, len(space))
            for place, at in space.places().items():
                removed, inserted = moves.setdefault(place, ([], []))
                removed += before[space._atom][place][rows].reshape(-1).tolist()
                inserted += at[list(new)].reshape(-1).tolist()
        attributes = receipt.change.attributes
        back = [(one.module, one.name, one.before) for one in attributes]
        ahead = [(one.module, one.name, one.after) for one in attributes]
        assigned = {}
        for name in written:
            present = self.mirror.kinds[name]
            thaws = (present == FROZEN) & (wanted[name] == FREE)
            assigned[name] = ((present == FREE) | thaws) & (wanted[name] != CUT)
        record = self.mirror.record(moves, back, assigned)
        values = contents_of(self.net)
        kinds = {}
        for name, kind in wanted.items():
            filler = torch.ones(values[name].shape, dtype=torch.uint8)
            kinds[name] = moved(kind, name, moves, filler)
        self.mirror.apply(moves, values, self.states(), ahead, kinds)
        for name, numbers in written.items():
            parameter = dict(self.mirror.model.named_parameters())[name]
            cells = moved(assigned[name], name, moves, torch.zeros_like(parameter) > 0)
            parameter.data[cells] = moved(numbers, name, moves, torch.zeros_like(parameter))[cells]
        self.name_nodes(asked)
        return record

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Returns the states of the optimizer that follows, by the names of parameters."""
        found = {}
        for name, grid in self.net._stores().items():
            state = dict(self.optimizer.state[grid.parameter])
            if grid.opened is not None:
                for key, value in state.items():
                    if value.shape == grid.parameter.shape:
                        state[key] = spread_out(grid, value)
            found[name] = state
        return found

    def name_nodes(self, asked: Sequence[tuple[Space, list[int], int, str | None]]) -> None:
        """Gives the nodes of the mirror uids and owners, the new ones the uids of the library."""
        for space, rows, count, owner in asked:
            number = self.net.spaces.index(space)
            nodes = self.mirror.nodes[number]
            if owner is not None and 0 not in rows:
                nodes[0] = (nodes[0][0], owner)
            nodes = [node for row, node in enumerate(nodes) if row not in rows]
            for uid in space.uids.tolist()[len(space) - count :]:
                nodes.append((uid, owner))
            self.mirror.nodes[number] = nodes

    def try_out(self) -> None:
        """Makes a trial, perhaps trains in it: what left comes back, survivors stay trained."""
        asked = self.plan()
        turns = self.plan_turns()
        written = self.plan_values()
        history = list(self.net.history)
        with self.net.edit(trial=True) as edit:
            before = places_of(asked)
            wanted = self.turned(turns)
            self.ask(edit, asked, turns, written)
            receipt = edit.commit()
            record = None
            if receipt is not None:
                record = self.follow(asked, before, receipt, wanted, written)
                self.compare()
                if self.draw(st.booleans()):
                    self.train()
        if record is not None:
            self.mirror.reverse(record)
        assert list(self.net.history) == history

    def undo(self) -> None:
        """Takes back the last edit."""
        self.turn("undo", self.mirror.undoable, self.mirror.redoable)

    def redo(self) -> None:
        """Takes back the last undo."""
        self.turn("redo", self.mirror.redoable, self.mirror.undoable)

    def undo_all(self) -> None:
        """Takes back everything."""
        while self.mirror.undoable:
            self.undo()

    def turn(self, verb: str, stack: list[Record], other: list[Record]) -> None:
        if not stack:
            with pytest.raises(gn.errors.HistoryError):
                getattr(self.net, verb)()
            return
        getattr(self.net, verb)()
        self.version += 1
        other.append(self.mirror.reverse(stack.pop()))

    def fail(self) -> None:
        """Puts something illegal into an edit, or lets a follower refuse: nothing may change."""
        random = torch.get_rng_state()
        before = oracle.snapshot(self.model, self.optimizer)
        asked = self.plan()
        illegal = self.draw(st.sampled_from(ILLEGAL))
        follower = Reluctant()
        with pytest.raises((gn.errors.GrapNetError, ValueError, Planned)):
            self.fail_by(asked, illegal, follower)
        self.net.unfollow(follower)
        assert oracle.same(before, oracle.snapshot(self.model, self.optimizer)) == []
        assert torch.equal(random, torch.get_rng_state())

    def fail_by(self, asked: Any, illegal: Callable[..., None], follower: Reluctant) -> None:
        """Makes an edit that fails."""
        if illegal is remove_everything:
            # A space that grows is not left without nodes.
            asked = [(space, rows, 0, owner) for space, rows, _, owner in asked]
        with self.net.edit() as edit:
            self.ask(edit, asked)
            illegal(self.net, edit, follower)

    @invariant()
    def agree(self) -> None:
        """Model and mirror agree in contents, optimizer, numbers, nodes and function."""
        self.counts["states compared"] += 1
        assert self.net.version == self.version
        parameters = zip(self.model.parameters(), self.parameters, strict=True)
        assert all(one is other for one, other in parameters)
        self.compare()

    def compare(self) -> None:
        right = oracle.tensors_of(self.mirror.model)
        for name, tensor in contents_of(self.net).items():
            close(tensor, right[name], name)
        for name, grid in self.net._stores().items():
            kinds = self.mirror.kinds[name]
            assert grid.parameter.numel() == int((kinds == FREE).sum()), name
            assert grid.n_frozen == int((kinds == FROZEN).sum()), name
        states = self.mirror.states()
        for name, state in self.states().items():
            assert state.keys() == states[name].keys()
            for key, value in state.items():
                close(value, states[name][key], f"{key} of {name}")
        assert numbers_of(self.model) == numbers_of(self.mirror.model)
        assert nodes_of(self.net) == self.mirror.nodes
        ours = self.run(self.model)
        theirs = self.run(self.mirror.model)
        assert oracle.largest_difference(ours, theirs) < CLOSE

    def teardown(self) -> None:
        """At the end the invariants of the graph hold."""
        if hasattr(self, "net"):
            gn.check(self.net)


def remove_everything(net: Adopted, edit: Any, follower: Reluctant) -> None:
    (space, *_) = [space for space in net.spaces if not space.pins]
    edit.remove_nodes(space)


def remove_pinned(net: Adopted, edit: Any, follower: Reluctant) -> None:
    (space, *_) = [space for space in net.spaces if space.pins]
    edit.remove_nodes(space[0])


def connect_existing(net: Adopted, edit: Any, follower: Reluctant) -> None:
    weight = net.transitions[0]
    (pair, *_) = [*pairs_of(weight).tolist(), [0, 0]]
    ends = (net.layers[weight.source][pair[0]], net.layers[weight.target][pair[1]])
    edit.connect(*ends, tensor=weight.name)
    edit.connect(*ends, tensor="no such tensor")


def add_twice(net: Adopted, edit: Any, follower: Reluctant) -> None:
    (space, *_) = [space for space in net.spaces if not space.pins]
    edit.add_nodes(space, 1)
    edit.add_nodes(space, 1)


def raise_in_the_block(net: Adopted, edit: Any, follower: Reluctant) -> None:
    raise Planned


def refuse_to_follow(net: Adopted, edit: Any, follower: Reluctant) -> None:
    # So that something changes, whatever was planned.
    (space, *_) = [space for space in net.spaces if not space.pins]
    names = {row: f"owner {row}" for row in range(2)}
    edit.set_owner(space[-1], names[space.owners[-1] == "owner 0"])
    net.follow(follower)


ILLEGAL = [
    remove_everything,
    remove_pinned,
    connect_existing,
    add_twice,
    raise_in_the_block,
    refuse_to_follow,
]


def places_of(asked: Sequence[tuple[Space, list[int], int, str | None]]) -> dict[int, Any]:
    return {space._atom: space.places() for space, _, _, _ in asked}


def nodes_of(net: Adopted) -> list[list[tuple[int, str | None]]]:
    return [list(zip(s.uids.tolist(), s.owners, strict=True)) for s in net.spaces]


def numbers_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the plain numbers of all modules, such as `num_heads`."""
    found = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, (int, float, tuple)):
                found[path, key] = value
    return found


def close(left: Tensor, right: Tensor, name: str) -> None:
    assert left.shape == right.shape, name
    assert oracle.largest_difference([left.detach()], [right.detach()]) < CLOSE, name


def run_programs(seed: int, programs: int, **options: Any) -> None:
    """Runs programs from a seed."""
    chosen = settings(
        CALM, max_examples=programs, suppress_health_check=list(HealthCheck), **options
    )
    machine = type("SeededMachine", (SpaceMachine,), {})
    with patch("hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS", 60):
        run_state_machine_as_test(seeded(seed)(machine), settings=chosen)
