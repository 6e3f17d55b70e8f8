"""A hypothesis machine that drives a net through its public names next to the plain oracle."""

import copy
import os
import sys
import tempfile
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

import grapnet as gn

from .comparison import CLOSE, TABLE, Comparison, births, same, wiring
from .operations import NAMES, WEIGHTS, Operations, Planned, Reluctant
from .oracle import Draft, Key, Oracle, Refused, State

EMPTY = st.sampled_from([[3, 0, 2], [0, 2], [2, 3, 0, 2], [4, 2, 0]])
FILLED = st.sampled_from([3, 4, 3, 4, 2]).flatmap(
    lambda n: st.lists(st.integers(2, 6), min_size=n, max_size=n)
)
SIZES = st.integers(0, 7).flatmap(lambda n: FILLED if n else EMPTY)
RARE = ["failing_edit", "assign", "load_state_dict", "deepcopy", "save"]
ACTIONS = ["edit"] * 4 + ["there_and_back", "train"] * 3 + ["reverse", "trial"] * 2 + RARE
CALM = settings(
    deadline=None,
    database=None,
    print_blob=True,
    report_multiple_bugs=False,
    stateful_step_count=20,
)
ERRORS = (gn.errors.GrapNetError, ValueError, LookupError, TypeError, Planned)


class GraphMachine(Operations, Comparison):
    """Random programs on a small net in float64; after every rule net and oracle must agree."""

    @initialize(data=st.data(), seed=st.integers(0, 2**32))
    def start(self, data: st.DataObject, seed: int) -> None:
        """Makes a net: by density or from relations in any order, perhaps with empty layers and
        with transitions that skip layers.
        """
        self.counts["programs"] += 1
        torch.manual_seed(seed)
        self.data = data
        sizes = self.draw(SIZES)
        kinds = self.draw(
            st.lists(st.sampled_from(NAMES), min_size=len(sizes) - 1, max_size=len(sizes) - 1)
        )
        over = [(s, t) for t in range(2, len(sizes)) for s in range(t - 1)]
        skips = self.some(over, 0, 2) if self.draw(st.integers(0, 3)) == 0 else []
        if self.draw(st.booleans()):
            wires = [
                self.some([(p, c) for p in range(a) for c in range(b)], 8, 16)
                for a, b in pairwise(sizes)
            ]
            columns = [([p for p, _ in pairs], [c for _, c in pairs]) for pairs in wires]
            ways = {}
            for s, t in skips:
                pairs = self.some([(p, c) for p in range(sizes[s]) for c in range(sizes[t])], 0, 4)
                ways[s, t] = ([p for p, _ in pairs], [c for _, c in pairs])
            net = gn.GrapNet.from_relations(
                sizes, columns, skips=ways, activation=kinds, dtype=torch.float64
            )
        else:
            density = self.draw(st.floats(0.3, 1))
            how = self.draw(st.sampled_from(["uniform", "erk"]))
            net = gn.GrapNet(
                sizes,
                skips=skips,
                activation=kinds,
                density=density,
                distribution=how,
                dtype=torch.float64,
            )
        self.drive(net)
        self.oracle = Oracle(self.read())
        self.saved = None
        self.favourites = self.some(sorted(set(ACTIONS)), 0, 2)
        self.computed: set[Key] = set()  # what net and oracle both computed in the last rule
        self.graded = False
        self.turns = 0
        self.first = copy.deepcopy(net)
        if self.draw(st.booleans()):
            net.journal.undo_limit = self.oracle.limit = 3

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Does one of the actions, those most often that this program favours."""
        self.counts["actions"] += 1
        self.data = data
        getattr(self, self.draw(st.sampled_from(ACTIONS + self.favourites * 6)))()

    def edit(self, *verbs: Any) -> None:
        """Edits; where the oracle refuses, the library must."""
        own = self.draw(st.booleans())
        if self.draw(st.integers(0, 3)) == 0:
            self.net.zero_grad()
            self.forget_gradients()
        allow_dead = self.draw(st.booleans())
        before = after = self.oracle.state
        draft = Draft(before, allow_dead=allow_dead)
        old = self.loss(self.output())
        moved = self.net.layers[0].outgoing(to=self.net.layers[1])
        generator = torch.Generator().manual_seed(7) if own else None
        random = torch.get_rng_state()
        try:
            with self.net.edit(
                reason="program", by="machine", generator=generator, allow_dead=allow_dead
            ) as edit:
                self.operations(edit, draft, 5, *verbs)
                after = expected(draft)
                assert self.net.version == self.oracle.version
        except gn.errors.EditError:
            assert after is None, "the library refuses what the oracle allows"
            assert torch.equal(random, torch.get_rng_state())
            return
        assert after is not None, "the library allows what the oracle refuses"
        self.adopt_newborn(after, draft)
        self.computed = set(draft.shift)
        if self.oracle.commit(after, draft.shift):
            assert edit.receipt is self.net.history[-1]
            assert edit.receipt.version == self.oracle.version
            with pytest.raises(gn.errors.StaleTopologyError):
                old.backward()
            if moved and births(before) != births(after):
                with pytest.raises(gn.errors.StaleRelationsError):
                    moved.weights  # noqa: B018
        else:
            assert edit.receipt is None

    def trial(self) -> None:
        """Tries an edit: it takes effect, and then nothing has happened."""
        allow_dead = self.draw(st.sampled_from([None, False, True]))
        draft = Draft(self.oracle.state, allow_dead=allow_dead is not False)
        history = repr(self.net.history)
        relations = self.net.layers[0].outgoing()
        with self.net.edit(trial=True, allow_dead=allow_dead) as edit:
            self.operations(edit, draft)
            if (after := expected(draft)) is None:
                with pytest.raises(gn.errors.EditError):
                    edit.commit()
            else:
                edit.commit()
                self.adopt_newborn(after, draft)
                self.compare(after, draft.shift)
                self.compare_function(after, keep=False)
        assert repr(self.net.history) == history
        # selected before, still good
        same(relations.weights, self.net.layers[0].outgoing().weights, 0)

    def failing_edit(self) -> None:
        """Puts something illegal among legal operations, or lets a follower refuse: nothing may
        change.
        """
        random = torch.get_rng_state()
        follower = Reluctant()
        follows = self.draw(st.booleans())
        with pytest.raises(ERRORS):
            self.fail(None if follows else self.illegal(), follower)
        self.net.unfollow(follower)
        assert follows or torch.equal(random, torch.get_rng_state()), (
            "a refused edit drew random numbers"
        )

    def fail(self, illegal: Any, follower: Reluctant) -> None:
        """Makes an edit that fails."""
        draft = Draft(self.oracle.state)
        with self.net.edit() as edit:
            self.operations(edit, draft, 3)
            if illegal:
                illegal(edit)
                self.operations(edit, draft, 2)
            else:
                edit.add_nodes(0, 1)
                self.net.follow(follower)

    def there_and_back(self) -> None:
        """Edits, perhaps trains or tries something, and takes the edit back."""
        self.edit()
        self.agree()
        between = self.draw(st.sampled_from([None, self.train, self.trial]))
        if between:
            between()
            self.agree()
        self.reverse("undo")

    def reverse(self, verb: str = "") -> None:
        """Takes back the last commit or the last undo."""
        verb = verb or self.draw(st.sampled_from(["undo", "redo"]))
        stack = self.oracle.undoable if verb == "undo" else self.oracle.redoable
        if not stack:
            with pytest.raises(gn.errors.HistoryError):
                getattr(self.net, verb)()
            return
        self.computed = set(stack[-1][1])
        getattr(self.net, verb)()
        getattr(self.oracle, verb)()

    def deepcopy(self) -> None:
        """Copies the net, edits one of the two, and goes on with the other."""
        other = copy.deepcopy(self.net)
        follow = self.draw(st.booleans())
        edited = self.net if follow else other
        if follow:
            self.drive(other)
            self.oracle.forget_moments()
            self.forget_gradients()
        with edited.edit(allow_dead=True) as edit:
            edit.unfreeze(edited.select())
            edit.cut(edited.layers[0].outgoing())
            edit.connect(edit.add_nodes(0, 2), edit.add_nodes(1, 1))
        edited.layers[-1].biases = 9.0
        edited.undo()

    def remember(self) -> None:
        """Keeps a state dict."""
        state = self.oracle.state
        values = [[(c.value, c.frozen) for c in vector.values()] for vector in state.vectors()]
        self.saved = (
            {name: tensor.clone() for name, tensor in self.net.state_dict().items()},
            wiring(state),
            values,
        )

    def load_state_dict(self) -> None:
        """Loads the state dict that was kept, whatever is frozen; on another wiring it is
        refused.
        """
        if self.saved is None or self.draw(st.booleans()):
            self.remember()
            self.edit(self.turn)
            self.agree()
        saved, wires, values = self.saved
        if wires != wiring(self.oracle.state):
            with pytest.raises(gn.errors.TopologyError):
                self.net.load_state_dict(saved)
            return
        self.net.load_state_dict(saved)
        after = self.oracle.state.copy()
        for vector, kept in zip(after.vectors(), values, strict=True):
            for coordinate, (value, frozen) in zip(vector.values(), kept, strict=True):
                coordinate.turn(frozen)
                coordinate.value = value
        if not self.oracle.commit(after, {}):
            self.oracle.state = after

    def assign(self) -> None:
        """Assigns weights or biases; one frozen target is enough to refuse."""
        how = self.draw(st.sampled_from(["W_alloc", "weights", "bias", "biases"]))
        state = self.oracle.state
        later = [node.uid for layer in state.layers[1:] for node in layer]
        if how == "weights":
            target, keys = self.relations()
        elif how == "biases":
            number = self.layer(first=1)
            chosen = self.some(state.uids(number))
            keys = [uid for uid in later if uid in chosen]
            target = self.node_set(number, chosen)
        else:
            uids = self.some(state.uids(0) + later if how == "W_alloc" else later, 1, 1)
            if not uids:
                return
            target = self.net.node(uids[0])
            keys = state.owned(uids) if how == "W_alloc" else uids
        given = self.draw(st.lists(WEIGHTS, min_size=len(keys), max_size=len(keys)))
        value = given[0] if how == "bias" else torch.tensor(given, dtype=torch.float64)
        coordinates = [state.coordinates()[key] for key in keys]
        if any(coordinate.frozen for coordinate in coordinates):
            with pytest.raises(gn.errors.FrozenError):
                setattr(target, how, value)
            return
        setattr(target, how, value)
        for coordinate, number in zip(coordinates, given, strict=True):
            coordinate.value = number

    def train(self) -> None:
        """Makes a training step on the gradients that the last comparison left."""
        if self.draw(st.integers(0, 2)) == 0:
            torch.optim.SGD(self.parameters, lr=0.1).step()
            self.oracle.descend(0.1)
        else:
            self.optimizer.step()
            self.oracle.adam(0.01)
        self.computed = {key for key, c in self.oracle.state.coordinates().items() if not c.frozen}

    def save(self) -> None:
        """Saves net and optimizer and goes on with what is loaded."""
        undo = self.draw(st.booleans())
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "net")
            gn.save(path, self.net, undo=undo, history="full", optimizer=self.optimizer)
            self.drive(gn.load(path))
            gn.restore(path, optimizer=self.optimizer)
        if not undo:
            self.oracle.undoable = []
            self.oracle.redoable = []
        self.oracle.keep_in_file()
        self.forget_gradients()
        # The journal of a file begins behind the last layer that came or left.
        counts = [commit.counts for commit in self.net.history]
        if any(one["blocks_added"] or one["blocks_removed"] for one in counts):
            self.first = copy.deepcopy(self.net)

    def drive(self, net: gn.GrapNet) -> None:
        """Goes on with this net and a fresh optimizer that follows it."""
        self.net = net
        self.known = {}
        self.optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        gn.attach(self.optimizer, net)

    @invariant()
    def agree(self) -> None:
        """Net and oracle agree in structure, values, carried gradients, optimizer state and
        function.
        """
        self.counts["states compared"] += 1
        self.turns += 1
        state = self.oracle.state
        assert self.net.version == self.oracle.version
        for name, parameter in zip(state.vector_names(), self.net.parameters(), strict=True):
            known = self.known.setdefault(name, parameter)
            assert known is parameter, "a Parameter was replaced"
        held = self.optimizer.param_groups[0]["params"]
        kept = [a is b for a, b in zip(self.net.parameters(), held, strict=True)]
        assert all(kept), "the optimizer does not have the Parameters in their order"
        self.compare(state, self.computed)
        self.compare_carried(state, CLOSE if self.computed else 0)
        self.compare_function(state, keep=True)
        nodes = [node for layer in state.layers for node in layer]
        if nodes:
            self.compare_node(state, nodes[self.turns % len(nodes)])
        self.computed = set()
        self.graded = True

    def teardown(self) -> None:
        """At the end of a program the literal walk computes the same, every handle and the journal
        tell the truth.
        """
        if not hasattr(self, "oracle") or sys.exc_info()[0]:
            return
        same(self.net.walk(TABLE[:, self.net.layers[0].uids]), self.output(), CLOSE)
        for node in (node for layer in self.oracle.state.layers for node in layer):
            self.compare_node(self.oracle.state, node)
        self.compare_past(self.first)


def expected(draft: Draft) -> State | None:
    """Returns what the edit must lead to, None when it must be refused."""
    try:
        return draft.resolve()
    except Refused:
        return None


def run_programs(seed: int, programs: int, **options: Any) -> None:
    """Runs programs from a seed; an odd one takes the paths that only large graphs take
    otherwise.
    """
    chosen = settings(
        CALM, max_examples=programs, suppress_health_check=list(HealthCheck), **options
    )
    if seed % 2:
        small = {
            "core._index_map._FEW_RUNS": 0,
            "core._index_map.LARGE": 64,
            "execution._reference.CELLS": 8,
        }
    else:
        small = {}
    with ExitStack() as stack:
        stack.enter_context(
            patch("hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS", 60)
        )
        for name, size in small.items():
            stack.enter_context(patch(f"grapnet.{name}", size))
        run_state_machine_as_test(
            seeded(seed)(type("SeededMachine", (GraphMachine,), {})), settings=chosen
        )
