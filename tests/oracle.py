"""A plain oracle of a graph: lists, dicts and dense float64 matrices, with nothing of grapnet in
it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

PHI = {"identity": lambda z: z, "relu": torch.relu, "tanh": torch.tanh, "gelu": functional.gelu}
Pair = tuple[int, int]  # uids of parent and child
Key = Pair | int  # a relation, or the bias of the node with this uid
Initial = str | float
# Coordinates that an edit changes: the value of a bias before and after, None for what is assigned.
Shift = dict[Key, tuple[float, float] | None]
_births = count()


class Refused(Exception):
    """The operations of an edit contradict each other or the graph."""


@dataclass
class Coordinate:
    """A relation's weight or a node's bias; `birth` tells a newborn from the relation it
    replaces.
    """

    value: float = 0.0
    frozen: bool = False
    grad: float = 0.0
    moments: tuple[float, float] = (0.0, 0.0)  # Adam's exp_avg and exp_avg_sq
    birth: int = field(default_factory=lambda: next(_births))

    def turn(self, frozen: bool) -> None:
        """Freezes or releases; the gradient and the moments go with what leaves the optimizer."""
        if self.frozen != frozen:
            self.frozen = frozen
            self.grad = 0.0
            self.moments = (0.0, 0.0)


@dataclass
class Node:
    """A node; a sensory one has no bias."""

    uid: int
    activation: str
    owner: str | None
    bias: Coordinate | None


@dataclass
class State:
    """A graph; the relations of one parent stand in the dict in the order of its slots."""

    layers: list[list[Node]]
    relations: dict[Pair, Coordinate]
    # what each layer is called for good, also while others come before it and leave
    names: list[int] = field(default_factory=list)
    # transitions that skip layers: what each is called for good, and its two layers
    skips: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.names:
            self.names = list(range(len(self.layers)))

    def copy(self) -> "State":
        """Returns an independent copy."""
        layers = [
            [replace(n, bias=n.bias and replace(n.bias)) for n in layer] for layer in self.layers
        ]
        relations = {pair: replace(relation) for pair, relation in self.relations.items()}
        return State(layers, relations, list(self.names), list(self.skips))

    def vector_names(self) -> list[tuple[str, int]]:
        """Returns what the vectors are called for good, in the order of `vectors`."""
        later = self.names[1:]
        chain = [("bias", name) for name in later] + [("weight", name) for name in later]
        return chain + [("skip", name) for name, _, _ in self.skips]

    def ends(self) -> list[tuple[int, int]]:
        """Returns the layers that every transition leads from and to."""
        found = list(pairwise(range(len(self.layers))))
        for _, source, target in self.skips:
            found.append((self.names.index(source), self.names.index(target)))
        return found

    def depth(self) -> object:
        """Returns which layers and transitions there are."""
        return self.names, self.skips

    def uids(self, number: int) -> list[int]:
        """Returns the nodes of a layer in row order."""
        return [node.uid for node in self.layers[number]]

    def owned(self, uids: Iterable[int]) -> list[Pair]:
        """Returns the relations that nodes own, one owner after the other, transition by
        transition.
        """
        found = []
        targets: dict[int, list[set[int]]] = {}
        for source, target in self.ends():
            for uid in self.uids(source):
                targets.setdefault(uid, []).append(set(self.uids(target)))
        for uid in uids:
            own = [pair for pair in self.relations if pair[0] == uid]
            for children in targets.get(uid, ()):
                found += [pair for pair in own if pair[1] in children]
        return found

    def transition(self, t: int) -> list[Pair]:
        """Returns the relations of a transition in owner order."""
        source, target = self.ends()[t]
        children = set(self.uids(target))
        return [pair for pair in self.owned(self.uids(source)) if pair[1] in children]

    def coordinates(self) -> dict[Key, Coordinate]:
        """Returns every coordinate by its name."""
        return {key: coordinate for vector in self.vectors() for key, coordinate in vector.items()}

    def vectors(self) -> list[dict[Key, Coordinate]]:
        """Returns the biases of every layer after the first, then the relations of every
        transition, in order.
        """
        biases = [{node.uid: node.bias for node in layer} for layer in self.layers[1:]]
        wires = [
            {pair: self.relations[pair] for pair in self.transition(t)}
            for t in range(len(self.ends()))
        ]
        return biases + wires

    def reached(self) -> set[int]:
        """Returns the outputs that a path from the sensory layer leads to."""
        reached = set(self.uids(0))
        for number in range(1, len(self.layers)):
            lower = set(self.uids(number))
            reached |= {c for p, c in self.relations if p in reached and c in lower}
        return reached & set(self.uids(-1))

    def fan_in(self, uid: int) -> int:
        """Returns how many parents a node has."""
        return sum(child == uid for _, child in self.relations)

    def drop(self, uids: Iterable[int]) -> None:
        """Removes nodes with the relations at both their ends."""
        gone = set(uids)
        self.layers = [[node for node in layer if node.uid not in gone] for layer in self.layers]
        self.relations = {pair: r for pair, r in self.relations.items() if not gone & set(pair)}

    def outline(self, births: bool = True) -> object:
        """Returns all but the values: what an edit can change; without births two graphs can be
        compared.
        """
        layers = [
            [(n.uid, n.activation, n.owner, n.bias and n.bias.frozen) for n in layer]
            for layer in self.layers
        ]
        vectors = [
            [(key, births and c.birth, c.frozen) for key, c in v.items()] for v in self.vectors()
        ]
        return layers, vectors, self.ends()

    def evaluate(self, x: Tensor, loss) -> tuple[Tensor, dict[Key, float]]:
        """Returns the output for x and the gradient of loss(output) for every coordinate, by dense
        matrices.
        """
        outputs = [x]
        leaves: list[Tensor] = []
        matrices: dict[int, Tensor] = {}
        ends = self.ends()
        for number, lower in enumerate(self.layers[1:], start=1):
            bias = torch.tensor([j.bias.value for j in lower], dtype=x.dtype, requires_grad=True)
            leaves.append(bias)
            z = bias.expand(len(x), -1)
            for t, (source, target) in enumerate(ends):
                if target != number:
                    continue
                upper = self.layers[source]
                # A_ij = w_ij, or 0
                cells = [[self.relations.get((i.uid, j.uid)) for j in lower] for i in upper]
                values = [[0.0 if cell is None else cell.value for cell in row] for row in cells]
                matrix = torch.tensor(values, dtype=x.dtype).reshape(len(upper), len(lower))
                matrices[t] = matrix.requires_grad_()
                z = z + outputs[source] @ matrices[t]
            h = z
            if lower:
                h = torch.stack([PHI[j.activation](z[:, n]) for n, j in enumerate(lower)], 1)
            outputs.append(h)
        wires = [matrices[t] for t in range(len(ends))]
        out = outputs[-1]
        found = [g.tolist() for g in torch.autograd.grad(loss(out), leaves + wires)]
        gradients: dict[Key, float] = {}
        for number, bias in enumerate(found[: len(leaves)], start=1):
            gradients |= dict(zip(self.uids(number), bias, strict=True))
        for t, matrix in enumerate(found[len(leaves) :]):
            rows = self.uids(ends[t][0])
            columns = self.uids(ends[t][1])
            for p, c in self.transition(t):
                gradients[p, c] = matrix[rows.index(p)][columns.index(c)]
        return out.detach(), gradients


@dataclass
class Inserted:
    """A layer that an edit inserts; the first `same` nodes repeat those of the layer before."""

    after: int
    nodes: list[Node]
    same: int
    full: bool

    def relations(self, upper: list[Node]) -> Iterable[tuple[Pair, Initial]]:
        """Returns the relations that enter it, with their initial weights."""
        for row, parent in enumerate(upper):
            for place, node in enumerate(self.nodes):
                if place >= self.same:
                    yield (parent.uid, node.uid), "linear"
                elif self.full or place == row:
                    yield (parent.uid, node.uid), float(place == row)


class Draft:
    """What one edit asks for; every name in it means the graph as it was when the edit began."""

    def __init__(self, state: State, *, allow_dead: bool = True) -> None:
        self.state = state
        self.allow_dead = allow_dead
        self.added: list[tuple[int, Node, Initial]] = []
        self.removed: set[int] = set()
        self.connected: list[tuple[Pair, Initial]] = []
        self.cut: set[Pair] = set()
        self.frozen: set[Key] = set()
        self.thawed: set[Key] = set()
        self.assigned: list[tuple[Key, float]] = []
        self.names: dict[tuple[str, int], set[str | None]] = {}
        self.orphans: dict[int, bool] = {}
        self.inserted: list[Inserted] = []
        self.layers_removed: set[int] = set()
        self.skips_inserted: list[tuple[int, int]] = []
        self.skips_removed: set[tuple[int, int]] = set()
        # newborn -> least and greatest value; filled by resolve
        self.bounds: dict[Key, tuple[float, float]] = {}
        self.shift: Shift = {}  # filled by resolve

    def add_nodes(
        self,
        number: int,
        uids: Sequence[int],
        activation: str,
        owner: str | None,
        bias: Sequence[Initial],
    ) -> None:
        """Adds nodes at the end of a layer."""
        for uid, initial in zip(uids, bias, strict=True):
            self.added.append(
                (number, Node(uid, activation, owner, Coordinate() if number else None), initial)
            )

    def turn(self, verb: str, keys: Iterable[Key]) -> None:
        """Freezes or unfreezes coordinates."""
        (self.frozen if verb == "freeze" else self.thawed).update(keys)

    def assign(self, keys: Iterable[Key], values: Iterable[float]) -> None:
        """Gives coordinates other values."""
        self.assigned += zip(keys, values, strict=True)

    def belonging(
        self, uids: Iterable[int], incoming: bool, outgoing: bool, bias: bool
    ) -> set[Key]:
        """Returns the coordinates that belong to nodes."""
        uids = set(uids)
        keys: set[Key] = {
            p
            for p in self.state.relations
            if (outgoing and p[0] in uids) or (incoming and p[1] in uids)
        }
        return keys | {key for key in self.state.coordinates() if bias and key in uids}

    def name(self, kind: str, uids: Iterable[int], name: str | None) -> None:
        """Sets the "activation" or the "owner" of nodes."""
        for uid in uids:
            self.names.setdefault((kind, uid), set()).add(name)

    def resolve(self) -> State:
        """Returns the graph after the edit; raises Refused when it is illegal."""
        if self.inserted or self.layers_removed or self.skips_inserted or self.skips_removed:
            return self._deepen()
        pairs = [pair for pair, _ in self.connected]
        if any(self.removed & set(pair) for pair in pairs):
            raise Refused("connects a node that it removes")
        if len(set(pairs)) < len(pairs) or any(len(names) > 1 for names in self.names.values()):
            raise Refused("asks twice for a relation, or for two names")
        if len(dict(self.assigned)) < len(self.assigned):
            raise Refused("assigns a coordinate twice")
        after = self.state.copy()
        for number, node, _ in self.added:
            after.layers[number].append(replace(node, bias=node.bias and replace(node.bias)))
        after.relations = {pair: r for pair, r in after.relations.items() if pair not in self.cut}
        after.drop(self.removed)
        left: dict[int, float] = {}  # what orphans leave to biases
        for number in range(len(after.layers)):
            if number in self.orphans:
                gone = [node for node in after.layers[number] if after.fan_in(node.uid) == 0]
                if self.orphans[number]:
                    self._fold(gone, left)
                after.drop(node.uid for node in gone)
            for pair in pairs:
                if pair[0] in after.uids(number):
                    if pair in after.relations:
                        raise Refused("the relation exists")
                    after.relations[pair] = Coordinate()
        self._set_frozen(after)
        self._shift(after, left)
        self._assign(after, left)
        for node in (node for layer in after.layers for node in layer):
            for kind in ("activation", "owner"):
                for name in self.names.get((kind, node.uid), ()):
                    setattr(node, kind, name)
        self._bound(after)
        if not self.allow_dead and self._dies(after):
            raise Refused("takes the last relation of a transition or the last parent of an output")
        return after

    def _deepen(self) -> State:
        """Returns the graph with other layers; what leaves a layer passes on to the one before."""
        before = self.state.copy()
        layers: list[list[Node]] = []
        names: list[int] = []
        relations: dict[Pair, Coordinate] = {}
        self.bounds = {}
        comes = False  # whether the last layer so far comes with this edit
        for number, layer in enumerate(before.layers):
            if number not in self.layers_removed:
                if number:
                    relations |= self._passed_on(before, number, layers[-1], comes)
                layers.append(layer)
                names.append(before.names[number])
                comes = False
            for one in self.inserted:
                if one.after == number:
                    if one.same != len(layers[-1]):
                        raise Refused("the layer before has another size")
                    self._insert(one, layers[-1], relations)
                    layers.append(one.nodes)
                    names.append(1000 + next(_births))
                    comes = True
        return self._skip(before, State(layers, relations, names))

    def _skip(self, before: State, after: State) -> State:
        """Returns the graph with the transitions that skip layers."""
        gone = {before.names[number] for number in self.layers_removed}
        for place, (name, source, target) in enumerate(before.skips, len(before.layers) - 1):
            if {source, target} & gone:
                raise Refused("a transition that skips layers ends there")
            if before.ends()[place] not in self.skips_removed:
                after.skips.append((name, source, target))
                for pair in before.transition(place):
                    after.relations[pair] = before.relations[pair]
        for source, target in self.skips_inserted:
            ends = (before.names[source], before.names[target])
            if set(ends) & gone:
                raise Refused("a transition that skips layers would end there")
            after.skips.append((next(_births), *ends))
        if len(set(after.ends())) < len(after.ends()):
            raise Refused("two transitions would have the same ends")
        return after

    def _passed_on(
        self, before: State, number: int, upper: list[Node], comes: bool
    ) -> dict[Pair, Coordinate]:
        """Returns the relations that enter a layer, from the nodes that are before it now."""
        rows = {uid: row for row, uid in enumerate(before.uids(number - 1))}
        if len(upper) > len(rows) and not comes:
            raise Refused("the layer before has more nodes")
        found = {}
        for parent, child in before.transition(number - 1):
            if rows[parent] >= len(upper):
                raise Refused("the layer before has fewer nodes")
            relation = before.relations[parent, child]
            found[upper[rows[parent]].uid, child] = relation
        return found

    def _insert(self, one: Inserted, upper: list[Node], relations: dict[Pair, Coordinate]) -> None:
        for pair, initial in one.relations(upper):
            value = 0.0 if isinstance(initial, str) else initial
            relations[pair] = Coordinate(value)
            if isinstance(initial, str):
                bound = 1 / sqrt(len(upper))
                self.bounds[pair] = (-bound, bound)
        for node in one.nodes[one.same :]:
            bound = 1 / sqrt(len(upper)) if upper else 0.0
            self.bounds[node.uid] = (-bound, bound)

    def _dies(self, after: State) -> bool:
        alive = self.state.reached()
        ends = after.ends()
        for t in range(len(ends)):
            if alive and self.state.transition(t) and not after.transition(t):
                entering = [u for u in range(len(ends)) if ends[u][1] == ends[t][1]]
                if not any(after.transition(u) for u in entering):
                    return True
        return any(uid in alive and not after.fan_in(uid) for uid in after.uids(-1))

    def _fold(self, gone: list[Node], left: dict[int, float]) -> None:
        present = self.state.coordinates()
        for node in gone:
            if node.uid in present:
                bias = torch.tensor(node.bias.value + left.get(node.uid, 0.0), dtype=torch.float64)
                constant = PHI[node.activation](bias).item()
                for pair in self.state.owned([node.uid]):
                    if pair not in self.cut:
                        left[pair[1]] = left.get(pair[1], 0.0) + constant * present[pair].value

    def _set_frozen(self, after: State) -> None:
        before = self.state.coordinates()
        for key, coordinate in after.coordinates().items():
            if key in before and before[key].birth == coordinate.birth:
                coordinate.turn(
                    key in self.frozen or (coordinate.frozen and key not in self.thawed)
                )

    def _shift(self, after: State, left: dict[int, float]) -> None:
        self.shift = {}
        coordinates = after.coordinates()
        before = self.state.coordinates()
        for uid, amount in left.items():
            if uid in coordinates and amount != 0 and uid not in dict(self.assigned):
                bias = coordinates[uid]
                if bias.frozen or before[uid].frozen:
                    raise Refused("folds into a frozen bias")
                self.shift[uid] = bias.value, bias.value + amount
                bias.value += amount

    def _assign(self, after: State, left: dict[int, float]) -> None:
        before = self.state.coordinates()
        coordinates = after.coordinates()
        for key, value in self.assigned:
            found = coordinates.get(key)
            if found is None or found.birth != before[key].birth:
                continue
            if before[key].frozen and found.frozen:
                raise Refused("assigns a frozen coordinate")
            found.value = value
            if isinstance(key, int):
                found.value += left.get(key, 0.0)
            self.shift[key] = None

    def _bound(self, after: State) -> None:
        asked = dict(self.connected) | {
            node.uid: initial for number, node, initial in self.added if number
        }
        before = self.state.coordinates()
        self.bounds = {}
        born = {
            k: c
            for k, c in after.coordinates().items()
            if k not in before or before[k].birth != c.birth
        }
        for key in born:
            initial = asked[key]
            size = 0
            if initial == "linear":
                size = after.fan_in(key if isinstance(key, int) else key[1])
            elif initial == "alloc" and not isinstance(key, int):
                size = sum(not isinstance(other, int) and other[0] == key[0] for other in born)
            bound = 1 / sqrt(size) if size else 0.0
            self.bounds[key] = (-bound, bound) if isinstance(initial, str) else (initial, initial)


class Oracle:
    """A graph with its version, its way back, and Adam's step counts."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.limit = 16
        self.version = 0
        self.undoable: list[tuple[State, Shift]] = []
        self.redoable: list[tuple[State, Shift]] = []
        # of every vector, by its name; those that have left keep theirs
        self.steps: Counter[tuple[str, int]] = Counter()

    def commit(self, after: State, shift: Shift) -> bool:
        """Makes `after` the present graph; says whether that changes anything."""
        if after.outline() == self.state.outline() and None not in shift.values():
            return False
        self.undoable = [*self.undoable, (self.state, shift)][-self.limit :]
        self.redoable = []
        self.state = after
        self.version = self.version + 1
        return True

    def undo(self) -> None:
        """Takes the last commit back."""
        self._reverse(self.undoable, self.redoable)

    def redo(self) -> None:
        """Takes the last undo back."""
        self._reverse(self.redoable, self.undoable)

    def _reverse(self, stack: list, other: list) -> None:
        """Brings an earlier graph back: survivors go on as they are, the others return as they were
        when they left.
        """
        (earlier, shift) = stack.pop()
        # by births: a relation has another parent where a layer comes or leaves
        current = {c.birth: c for c in self.state.coordinates().values()}
        self.state, left = earlier.copy(), self.state
        for key, coordinate in self.state.coordinates().items():
            alive = current.get(coordinate.birth)
            (before, after) = shift.get(key) or (0.0, 0.0)
            survives = alive is not None
            is_assigned = key in shift and shift[key] is None
            if survives and not is_assigned:
                returns = key in shift and alive.value == after
                coordinate.value = before if returns else alive.value + (before - after)
            stays = survives and alive.frozen == coordinate.frozen  # in the optimizer, or out of it
            coordinate.grad = alive.grad if stays else 0.0
            if stays and not is_assigned:
                coordinate.moments = alive.moments
        other.append((left, {key: pair and pair[::-1] for key, pair in shift.items()}))
        self.version += 1

    def keep_in_file(self) -> None:
        """Drops what a file does not keep: the way back beyond layers that came or left."""
        for stack in (self.undoable, self.redoable):
            later = self.state
            kept = 0
            for state, _ in reversed(stack):
                if state.depth() != later.depth():
                    break
                kept += 1
                later = state
            del stack[: len(stack) - kept]

    def descend(self, rate: float) -> None:
        """Makes a step of plain gradient descent."""
        for vector in self.state.vectors():
            for coordinate in vector.values():
                coordinate.value -= 0.0 if coordinate.frozen else rate * coordinate.grad

    def adam(self, rate: float) -> None:
        """Makes a step of Adam (Kingma and Ba, with torch's usual settings)."""
        for name, vector in zip(self.state.vector_names(), self.state.vectors(), strict=True):
            self.steps[name] += 1
            slow = 1 - 0.999 ** self.steps[name]
            fast = 1 - 0.9 ** self.steps[name]
            for c in vector.values():
                if not c.frozen:
                    m = 0.9 * c.moments[0] + 0.1 * c.grad
                    v = 0.999 * c.moments[1] + 0.001 * c.grad**2
                    c.moments = m, v
                    c.value -= rate / fast * m / (sqrt(v) / sqrt(slow) + 1e-8)

    def forget_moments(self) -> None:
        """Drops Adam's state of what is there and of what undo would bring back."""
        self.steps = Counter()
        for state in [self.state, *(s for s, _ in self.undoable + self.redoable)]:
            for coordinate in state.coordinates().values():
                coordinate.moments = (0.0, 0.0)
