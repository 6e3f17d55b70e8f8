"""Random programs on adopted models beside a plain model that is edited by hand.

The hand-edited model knows nothing of the library but the positions that `space.places()` gives,
the numbers of modules in the receipt, and the values of new entries.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
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
from grapnet.spaces import Adopted, Space
from tests.machine import CALM
from tests.operations import Planned, Reluctant
from tests.spaces import oracle, zoo
from tests.spaces.subjects import step, subject

MODELS = [
    "mlp",
    "vgg",
    "conv1d",
    "groupnorm",
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


@dataclass
class Mirror:
    """A plain model and its optimizer, edited by hand."""

    case: zoo.Case
    model: nn.Module
    optimizer: Adam
    nodes: list[list[tuple[int, str | None]]]
    undoable: list[Record] = field(default_factory=list)
    redoable: list[Record] = field(default_factory=list)

    def record(self, moves: Moves, attributes: Attributes) -> Record:
        """Returns what leads back from the edit with these moves, before it is made."""
        back = {place: (inserted, removed) for place, (removed, inserted) in moves.items()}
        values = {name: t.detach().clone() for name, t in oracle.tensors_of(self.model).items()}
        return Record(back, values, self.states(), attributes, copy.deepcopy(self.nodes))

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
    ) -> None:
        """Moves everything; new entries come from `values` and `states`."""
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
        for path, name, value in attributes:
            setattr(self.model.get_submodule(path), name, value)

    def reverse(self, record: Record) -> Record:
        """Takes an edit back; returns what leads back from that."""
        present = []
        for path, name, _ in record.attributes:
            present.append((path, name, getattr(self.model.get_submodule(path), name)))
        other = self.record(record.moves, present)
        self.apply(record.moves, record.values, record.states, record.attributes)
        self.nodes = record.nodes
        return other


def moved(tensor: Tensor, name: str, moves: Moves, filler: Tensor) -> Tensor:
    """Returns a tensor after moves along its axes; new entries are those of `filler`."""
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


@functools.cache
def adopted(name: str) -> tuple[zoo.Case, Adopted]:
    """Returns an adopted model to be copied, whose spaces are proved."""
    found = subject(zoo.MODELS[name]())
    for space in found.free:
        with found.net.edit(trial=True) as edit:
            edit.remove_nodes(space[0])
            try:
                edit.commit()
            except gn.EditError:
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
        self.mirror = Mirror(case, twin, Adam(twin.parameters(), lr=0.01), nodes_of(self.net))
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
        step(self.mirror.model, self.mirror.optimizer, self.case)

    def edit(self) -> None:
        """Edits both."""
        asked = self.plan()
        outputs = self.run(self.model)
        with self.net.edit(reason="program") as edit:
            before = places_of(asked)
            self.ask(edit, asked)
        if edit.receipt is None:
            assert not asked
            return
        self.version += 1
        record = self.follow(asked, before, edit.receipt)
        self.mirror.undoable.append(record)
        self.mirror.redoable.clear()
        if all(not rows and space.verdict == "exact" for space, rows, _, _ in asked):
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

    def ask(self, edit: Any, asked: Sequence[tuple[Space, list[int], int, str | None]]) -> None:
        """Asks an edit for everything that was planned."""
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
        record = self.mirror.record(moves, back)
        values = {name: t.detach().clone() for name, t in oracle.tensors_of(self.model).items()}
        self.mirror.apply(moves, values, self.states(), ahead)
        self.name_nodes(asked)
        return record

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Returns the states of the optimizer that follows, by the names of parameters."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = dict(self.optimizer.state[parameter])
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
        history = list(self.net.history)
        with self.net.edit(trial=True) as edit:
            before = places_of(asked)
            self.ask(edit, asked)
            receipt = edit.commit()
            record = None
            if receipt is not None:
                record = self.follow(asked, before, receipt)
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
        with pytest.raises((gn.GrapNetError, ValueError, Planned)):
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
        left = oracle.tensors_of(self.model)
        right = oracle.tensors_of(self.mirror.model)
        for name, tensor in left.items():
            close(tensor, right[name], name)
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


def cut_relations(net: Adopted, edit: Any, follower: Reluctant) -> None:
    edit.cut(net.spaces[0])


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
    cut_relations,
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
