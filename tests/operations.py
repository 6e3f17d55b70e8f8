"""Draws the operations of random edits, each asked of the library's edit and of the oracle's
draft.
"""

import copy
from collections import Counter
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

import grapnet as gn

from .oracle import PHI, Coordinate, Draft, Inserted, Node, Oracle

NAMES = sorted(PHI)
OWNERS = [None, "a", "b"]
WEIGHTS = st.floats(-1, 1, width=16)


class Planned(Exception):
    """Raised by a program inside an edit, or by a follower that refuses."""


class Reluctant:
    """A follower that stops every commit."""

    def prepare(self, graph: Any, commit: Any) -> None:
        raise Planned


class Operations(RuleBasedStateMachine):
    """What the programs draw from: nodes, relations, initialisations, legal and illegal
    operations.
    """

    # really executed, counted over the process
    counts: ClassVar[Counter[str]] = Counter()
    data: st.DataObject
    net: gn.GrapNet
    oracle: Oracle

    @property
    def default(self) -> list[str]:
        """The activation of each layer's newborn nodes."""
        return [layer.default_activation for layer in self.net.layers]

    def draw(self, strategy: st.SearchStrategy) -> Any:
        return self.data.draw(strategy)

    def some(self, options: list, least: int = 1, most: int = 3) -> list:
        """Draws some of the options, each at most once, in any order."""
        if not options:
            return []
        least = min(least, len(options))
        return self.draw(
            st.lists(st.sampled_from(options), min_size=least, max_size=most, unique=True)
        )

    def layer(self, first: int = 0, last: int = -1) -> int:
        """Draws the number of a layer."""
        return self.draw(st.integers(first, len(self.oracle.state.layers) + last))

    def nodes(self, uids: list[int]) -> Any:
        """Names nodes in one of the ways the library takes."""
        forms = [uids, torch.tensor(uids, dtype=torch.int64)]
        if not set(uids) - {node.uid for layer in self.oracle.state.layers for node in layer}:
            forms.append([self.net.node(uid) for uid in uids])
        return self.draw(st.sampled_from(forms))

    def node_set(self, number: int, uids: list[int]) -> gn.NodeSet:
        """Selects nodes of a layer."""
        return self.net.select(
            layer=number, where=lambda nodes: torch.isin(nodes.uids, torch.tensor(uids).long())
        )

    def values(self, size: int) -> tuple[Any, list]:
        """Draws an initialisation of `size` coordinates: as the library takes it, and one for
        each.
        """
        initial = self.draw(st.sampled_from(["linear", "alloc", "zero", "one", "given"]))
        if initial == "one":
            value = self.draw(WEIGHTS)
            return value, [value] * size
        if initial == "given":
            given = self.draw(st.lists(WEIGHTS, min_size=size, max_size=size))
            return torch.tensor(given, dtype=torch.float64), given
        return initial, [initial] * size

    def relations(self) -> tuple[gn.RelationSet, list]:
        """Draws relations: as the library selects them, and as pairs."""
        state = self.oracle.state
        t = self.draw(st.integers(0, len(state.ends()) - 1))
        above, below = state.ends()[t]
        pairs = state.transition(t)
        outgoing = self.net.layers[above].outgoing(to=self.net.layers[below])
        ways = ["positions", "frozen", "smallest", "largest", "outgoing", "incoming", "between"]
        how = self.draw(st.sampled_from(ways))
        if how in ("positions", "frozen"):
            frozen = [k for k, pair in enumerate(pairs) if state.relations[pair].frozen]
            places = self.some(frozen if how == "frozen" else list(range(len(pairs))), 1, 4)
            chosen = [pairs[k] for k in sorted(places)]
            found = outgoing[places]
        elif how in ("smallest", "largest"):
            size = self.draw(st.integers(0, 4))
            sign = 1 if how == "smallest" else -1
            ranked = sorted(pairs, key=lambda pair: sign * abs(state.relations[pair].value))[:size]
            chosen = [pair for pair in pairs if pair in ranked]
            found = getattr(outgoing, how)(count=size)
        else:
            parents = state.uids(above) if how == "incoming" else self.some(state.uids(above))
            children = state.uids(below) if how == "outgoing" else self.some(state.uids(below))
            chosen = [(p, c) for p, c in pairs if p in parents and c in children]
            upper = self.node_set(above, parents)
            lower = self.node_set(below, children)
            found = {
                "outgoing": lambda: upper.outgoing(to=self.net.layers[below]),
                "incoming": lambda: lower.incoming(of=self.net.layers[above]),
                "between": lambda: upper.outgoing(to=lower) & lower.incoming(of=upper),
            }[how]()
        assert list(zip(found.parents.tolist(), found.children.tolist(), strict=True)) == chosen
        return found, chosen

    def operations(self, edit: gn.Edit, draft: Draft, most: int = 5, *verbs: Any) -> None:
        """Asks for some operations, of all verbs unless some are named; those that change the
        depth are among themselves.
        """
        if not verbs and self.draw(st.integers(0, 5)) == 0:
            # The first verbs are drawn most often.
            verbs = (self.remove_skip, self.remove_layer, self.insert_skip, self.insert_layer)
            most = 2
        twice = [self.connect, self.cut, self.turn, self.write] * 2
        verbs = verbs or (self.add, self.remove, self.orphans, self.name, *twice)
        for verb in self.draw(st.lists(st.sampled_from(verbs), min_size=1, max_size=most)):
            self.counts["operations"] += 1
            verb(edit, draft)

    def present(self, draft: Draft, number: int) -> list[int]:
        """Returns the nodes of a layer that an operation can name, those added in this edit
        included.
        """
        born = [node.uid for n, node, _ in draft.added if n == number]
        return [uid for uid in self.oracle.state.uids(number) + born if uid not in draft.removed]

    def add(self, edit: gn.Edit, draft: Draft) -> None:
        number = self.layer()
        size = 0
        if len(self.present(draft, number)) < 8:
            size = self.draw(st.sampled_from([1, 2, 1, 2, 1, 2, 0]))
        kind = self.draw(st.sampled_from([None, *NAMES])) if number else None
        owner = self.draw(st.sampled_from(OWNERS))
        (bias, initials) = self.values(size)
        # counted from either end
        place = number - self.draw(st.sampled_from([0, len(self.default)]))
        uids = edit.add_nodes(place, size, activation=kind, owner=owner, bias=bias).uids.tolist()
        draft.add_nodes(number, uids, kind or self.default[number], owner, initials)

    def remove(self, edit: gn.Edit, draft: Draft) -> None:
        used = {uid for pair, _ in draft.connected for uid in pair}
        number = self.layer()
        uids = self.some([uid for uid in self.present(draft, number) if uid not in used], 1, 2)
        edit.remove_nodes(self.nodes(uids), interface=number in (0, len(self.default) - 1))
        draft.removed |= set(uids)

    def connect(self, edit: gn.Edit, draft: Draft) -> None:
        t = self.draw(st.integers(0, len(self.oracle.state.ends()) - 1))
        above, below = self.oracle.state.ends()[t]
        how = self.draw(st.sampled_from(["aligned", "all"]))
        upper = self.present(draft, above)
        lower = self.present(draft, below)
        asked = {pair for pair, _ in draft.connected}
        taken = asked | (self.oracle.state.relations.keys() - draft.cut)
        if how == "aligned":
            pairs = self.some([(p, c) for p in upper for c in lower if (p, c) not in taken], 0, 4)
            parents = [p for p, _ in pairs]
            children = [c for _, c in pairs]
        else:
            parents = self.some(upper)
            children = self.some(lower)
            pairs = [(p, c) for p in parents for c in children]
            if asked & set(pairs):
                return
            if taken & set(pairs) and self.draw(st.integers(0, 3)):  # at 0 the edit must be refused
                marks = [pair in pairs for pair in self.oracle.state.transition(t)]
                outgoing = self.net.layers[above].outgoing(to=self.net.layers[below])
                edit.cut(outgoing[torch.tensor(marks)])
                draft.cut |= self.oracle.state.relations.keys() & set(pairs)
        weights, initials = self.values(len(pairs))
        edit.connect(self.nodes(parents), self.nodes(children), pairs=how, weights=weights)
        draft.connected += zip(pairs, initials, strict=True)

    def cut(self, edit: gn.Edit, draft: Draft) -> None:
        owners = sorted({parent for parent, _ in self.oracle.state.relations})
        if owners and self.draw(st.booleans()):
            node = self.net.node(self.draw(st.sampled_from(owners)))
            owned = self.oracle.state.owned([node.uid])
            slots = self.some(list(range(-len(owned), len(owned))))
            edit.cut(node, slots=slots)
            draft.cut |= {owned[slot] for slot in slots}
        else:
            found, pairs = self.relations()
            edit.cut(found)
            draft.cut |= set(pairs)

    def turn(self, edit: gn.Edit, draft: Draft) -> None:
        held = any(coordinate.frozen for coordinate in self.oracle.state.coordinates().values())
        verb = self.draw(st.sampled_from(["freeze", "unfreeze"] if held else ["freeze"]))
        if self.draw(st.booleans()):
            found, keys = self.relations()
            getattr(edit, verb)(found)
        else:
            uids = self.some(
                [node.uid for layer in self.oracle.state.layers for node in layer], 1, 2
            )
            left_out = self.some(["incoming", "outgoing", "bias"], 0, 2)
            parts = {part: part not in left_out for part in ("incoming", "outgoing", "bias")}
            getattr(edit, verb)(self.nodes(uids), **parts)
            keys = draft.belonging(uids, **parts)
        draft.turn(verb, keys)

    def write(self, edit: gn.Edit, draft: Draft) -> None:
        """Assigns weights or biases."""
        later = [node.uid for layer in self.oracle.state.layers[1:] for node in layer]
        if self.draw(st.booleans()):
            found, keys = self.relations()
        else:
            keys = self.some(later)
            found = self.nodes(keys)
        given = self.draw(st.lists(WEIGHTS, min_size=len(keys), max_size=len(keys)))
        edit.assign(found, torch.tensor(given, dtype=torch.float64))
        draft.assign(keys, given)

    def orphans(self, edit: gn.Edit, draft: Draft) -> None:
        hidden = list(range(1, len(self.default) - 1))
        fold = self.draw(st.booleans())
        numbers = self.some(hidden) if self.draw(st.booleans()) else None
        owners = {parent for parent, _ in self.oracle.state.relations}
        bare = self.some(
            [uid for number in hidden for uid in self.oracle.state.uids(number) if uid in owners],
            1,
            2,
        )
        for uid in bare:
            edit.cut(self.net.node(uid).incoming())
        draft.cut |= {pair for pair in self.oracle.state.relations if pair[1] in bare}
        edit.remove_orphans(numbers, fold_bias=fold)
        for number in hidden if numbers is None else numbers:
            draft.orphans[number] = draft.orphans.get(number, False) or fold

    def name(self, edit: gn.Edit, draft: Draft) -> None:
        # sensory nodes do not activate
        kind, first = self.draw(st.sampled_from([("activation", 1), ("owner", 0)]))
        free = [
            uid for number in range(first, len(self.default)) for uid in self.present(draft, number)
        ]
        uids = self.some([uid for uid in free if (kind, uid) not in draft.names])
        name = self.draw(st.sampled_from(NAMES if first else OWNERS))
        getattr(edit, f"set_{kind}")(self.nodes(uids), name)
        draft.name(kind, uids, name)

    def insert_layer(self, edit: gn.Edit, draft: Draft) -> None:
        if len(self.default) + len(draft.inserted) > 6:
            return
        number = self.layer(last=-2)
        upper = self.oracle.state.layers[number]
        default = self.default[number]
        for one in draft.inserted:
            if one.after == number:
                upper = one.nodes
                default = self.inserted_default
        kinds = [node.activation for node in upper]
        # the only ones of these that change nothing behind themselves
        kind = self.draw(st.sampled_from(["identity", None, "relu"]))
        if set(kinds) - ({"identity", "relu"} if kind is None else {"relu"}):
            kind = "identity"
        surplus = 0
        if len(upper) < 6:
            surplus = self.draw(st.sampled_from([0, 0, 1, 2]))
        size = len(upper) + surplus
        init = self.draw(st.sampled_from(["identity", "net2deeper"]))
        owner = self.draw(st.sampled_from(OWNERS))
        given = size if surplus or self.draw(st.booleans()) else None
        place = number - self.draw(st.sampled_from([0, len(self.default)]))
        new = edit.insert_layer(place, given, init=init, activation=kind, owner=owner)
        names = [kind or name for name in kinds] + [kind or default] * surplus
        self.inserted_default = kind or default
        nodes = []
        for uid, name in zip(new.uids.tolist(), names, strict=True):
            nodes.append(Node(uid, name, owner, Coordinate()))
        draft.inserted.append(Inserted(number, nodes, len(upper), init == "net2deeper"))

    def remove_layer(self, edit: gn.Edit, draft: Draft) -> None:
        sizes = self.net.sizes
        hidden = range(1, len(sizes) - 1)
        # Most of the others must be refused.
        fitting = [n for n in hidden if sizes[n] == sizes[n - 1]]
        chosen = self.some(fitting if self.draw(st.integers(0, 3)) else list(hidden), 1, 1)
        if not chosen:
            return
        number = chosen[0]
        edit.remove_layer(self.draw(st.sampled_from([number, self.net.layers[number]])))
        draft.layers_removed.add(number)

    def insert_skip(self, edit: gn.Edit, draft: Draft) -> None:
        count = len(self.default)
        free = [(s, t) for s in range(count) for t in range(s + 2, count)]
        free = [ends for ends in free if ends not in self.oracle.state.ends()]
        for source, target in self.some(free, 1, 1):
            edit.insert_skip(source, self.draw(st.sampled_from([target, target - count])))
            draft.skips_inserted.append((source, target))

    def remove_skip(self, edit: gn.Edit, draft: Draft) -> None:
        for ends in self.some(self.oracle.state.ends()[len(self.default) - 1 :], 1, 1):
            edit.remove_skip(*ends)
            draft.skips_removed.add(ends)

    def illegal(self) -> Any:
        """Draws an operation that must fail, at once or when the edit commits."""
        net = self.net
        state = self.oracle.state

        def raise_planned(edit: gn.Edit) -> None:
            raise Planned

        found = [
            raise_planned,
            lambda edit: edit.add_nodes(len(net.layers), 1),
            lambda edit: edit.add_nodes(1, 1, activation="none of these"),
            lambda edit: edit.add_nodes(1, 2, bias=torch.ones(3)),
            lambda edit: edit.freeze(edit.add_nodes(1, 1)),
            lambda edit: edit.connect(edit.add_nodes(0, 1), edit.add_nodes(0, 1)),
            lambda edit: edit.connect(edit.add_nodes(0, 2), edit.add_nodes(1, 3), pairs="aligned"),
            lambda edit: edit.connect(
                edit.add_nodes(0, 2), edit.add_nodes(1, 3), weights=torch.ones(3, 2)
            ),
            lambda edit: edit.connect(
                edit.add_nodes(0, 1), edit.add_nodes(1, 1), weights=float("nan")
            ),
            lambda edit: edit.connect(
                edit.add_nodes(0, 1), edit.add_nodes(1, 1), weights="none of these"
            ),
            lambda edit: edit.connect([new := edit.add_nodes(0, 1), new], edit.add_nodes(1, 1)),
            lambda edit: [
                edit.set_owner(new, name) for new in [edit.add_nodes(1, 1)] for name in "ab"
            ],
            lambda edit: edit.set_activation([10**6], "relu"),
            lambda edit: edit.assign([10**6], 1.0),
            lambda edit: edit.assign(edit.add_nodes(1, 1), 1.0),
            lambda edit: edit.remove_orphans(0),
            lambda edit: net.edit().__enter__(),
            lambda edit: net.undo(),
            lambda edit: edit.insert_layer(-1),
            lambda edit: edit.remove_layer(0),
            lambda edit: edit.insert_skip(0, 1),
            lambda edit: edit.remove_skip(0, 1),
            lambda edit: (edit.insert_layer(0), edit.add_nodes(0, 1)),
        ]
        if len(net.layers[0]):
            node = net.layers[0][0]
            new = lambda edit: edit.connect(node, edit.add_nodes(1, 1))  # noqa: E731
            found.append(lambda edit: edit.insert_layer(0, activation="relu"))
            found.append(lambda edit: edit.remove_nodes(node))
            found.append(lambda edit: edit.cut(node, slots=[node.degree]))
            found.append(lambda edit: (new(edit), edit.remove_nodes(node, interface=True)))
        if state.relations:
            parent, child = next(iter(state.relations))
            found.append(lambda edit: edit.cut(copy.deepcopy(net).node(parent).outgoing()))
            found.append(lambda edit: (edit.connect(parent, child), edit.connect(parent, child)))
            owned = net.node(parent).outgoing()
            found.append(lambda edit: edit.assign(owned, float("nan")))
            found.append(lambda edit: (edit.assign(owned, 1.0), edit.assign(owned[:1], 1.0)))
        return self.draw(st.sampled_from(found))
