"""Compares a net with the oracle: structure, values, gradients, optimizer state, function."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

import grapnet as gn

from .oracle import Coordinate, Draft, Key, Node, Oracle, State

BATCH = 3
CLOSE = 1e-12
# a column a uid
TABLE = torch.randn(BATCH, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Comparison:
    """The comparisons of a machine; where both sides computed a number the oracle then goes on with
    the net's.
    """

    net: gn.GrapNet
    # the Parameters of the net by the names of their vectors, also of layers that have left
    known: dict[tuple[str, int], torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    oracle: Oracle
    graded: bool  # the net has gradients

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The Parameters of the net."""
        return list(self.net.parameters())

    def output(self) -> Tensor:
        """Returns the output for the fixed batch."""
        return self.net(TABLE[:, self.net.layers[0].uids])

    def loss(self, out: Tensor) -> Tensor:
        """Returns a loss with bounded slopes, so that no training diverges."""
        return (out.tanh() * TABLE[:, self.net.layers[-1].uids + 2048]).sum()

    def read(self, net: gn.GrapNet | None = None) -> State:
        """Returns a net as the oracle sees a graph."""
        layers = []
        relations = {}
        net = net or self.net
        saved = net.state_dict()
        for number, layer in enumerate(net.layers):
            biases: list[Coordinate | None] = [None] * len(layer)
            if number:
                held = saved[f"layers.{number}.frozen"].tolist()
                biases = [Coordinate(b, row in held) for row, b in enumerate(layer.biases.tolist())]
            columns = layer.uids.tolist(), layer.activations, layer.owners, biases
            layers.append([Node(*of) for of in zip(*columns, strict=True)])
            found = layer.outgoing()
            pairs = zip(found.parents.tolist(), found.children.tolist(), strict=True)
            values = zip(found.weights.tolist(), found.frozen.tolist(), strict=True)
            relations |= {
                pair: Coordinate(*value) for pair, value in zip(pairs, values, strict=True)
            }
        skips = []
        for source, target in net.ends:
            if target > source + 1:
                skips.append((-1 - len(skips), source, target))
        return State(layers, relations, skips=skips)

    def adopt_newborn(self, after: State, draft: Draft) -> None:
        """Checks the newborn values against their bounds and gives them to the oracle."""
        if not draft.bounds:
            return
        found = self.read().coordinates()
        coordinates = after.coordinates()
        for key, (least, most) in draft.bounds.items():
            value = found[key].value
            slack = 1e-15 if least < most else 0
            assert least - slack <= value <= most + slack, (
                f"{key}: {value} is not within {least} and {most}"
            )
            coordinates[key].value = value

    def forget_gradients(self) -> None:
        """Notes that the net has no gradients."""
        self.graded = False
        for coordinate in self.oracle.state.coordinates().values():
            coordinate.grad = 0.0

    def compare(self, state: State, computed: Collection[Key]) -> None:
        """Compares structure, sizes and values, bit by bit except where they were computed by both
        sides.
        """
        gn.check(self.net)
        found = self.read()
        assert found.outline(births=False) == state.outline(births=False)
        mine = found.coordinates()
        wanted = state.coordinates()
        for keys, close in ((wanted.keys() - set(computed), 0), (set(computed), CLOSE)):
            same([mine[key].value for key in keys], [wanted[key].value for key in keys], close)
        for key in computed:
            wanted[key].value = mine[key].value
        sizes = [len(layer) for layer in state.layers]
        frozen = sum(c.frozen for c in wanted.values())
        biases = sum(sizes[1:])
        relations = len(state.relations)
        count = self.net.count()
        assert (count.nodes, count.relations, count.biases, count.frozen) == (
            sum(sizes),
            relations,
            biases,
            frozen,
        )
        assert count.trainable == len(wanted) - frozen == sum(p.numel() for p in self.parameters)
        wiring = 4 * (relations + sum(sizes[source] + 1 for source, _ in state.ends()))
        assert (count.flops, count.bytes) == (
            2 * relations + biases,
            8 * len(wanted) + 4 * frozen + wiring,
        )

    def compare_carried(self, state: State, close: float) -> None:
        """Compares the gradients and the optimizer state that the last rule carried along."""
        vectors = state.vectors()
        assert self.net.ends == state.ends()
        for t, vector in enumerate(vectors[len(state.layers) - 1 :]):
            source, target = (self.net.layers[number] for number in state.ends()[t])
            if self.net.transitions[t].weight.grad is not None:
                found = source.outgoing(to=target).gradients
                same(found, [c.grad for c in vector.values()], 0)
        for p, name, vector in zip(self.parameters, state.vector_names(), vectors, strict=True):
            free = [c for c in vector.values() if not c.frozen]
            # A Parameter that came with a layer was not there for the last backward pass.
            has_gradient = self.graded and id(p) in self.graded_parameters
            assert (p.grad is not None) == has_gradient
            if p.grad is not None:
                same(p.grad, [c.grad for c in free], 0)
            held = self.optimizer.state.get(p, {})
            assert held.get("step", 0) == self.oracle.steps[name]
            if held:
                same(held["exp_avg"], [c.moments[0] for c in free], close)
                same(held["exp_avg_sq"], [c.moments[1] for c in free], close)
                columns = held["exp_avg"].flatten().tolist(), held["exp_avg_sq"].flatten().tolist()
                for coordinate, moments in zip(free, zip(*columns, strict=True), strict=True):
                    coordinate.moments = moments

    def compare_function(self, state: State, *, keep: bool) -> None:
        """Compares output and gradients on the fixed batch; if asked, net and oracle keep the
        gradients.
        """
        out, gradients = state.evaluate(TABLE[:, state.uids(0)], self.loss)
        mine = self.output()
        same(mine, out, CLOSE)
        if keep:
            self.net.zero_grad()
            self.loss(mine).backward()
            self.graded_parameters = {id(p) for p in self.parameters}
        if keep:
            found = [p.grad for p in self.parameters]
        else:
            found = torch.autograd.grad(self.loss(mine), self.parameters)
        for gradient, vector in zip(found, state.vectors(), strict=True):
            free = {key: c for key, c in vector.items() if not c.frozen}
            same(gradient, [gradients[key] for key in free], CLOSE)
            for coordinate, slope in zip(
                free.values(), gradient.flatten().tolist() if keep else (), strict=keep
            ):
                coordinate.grad = slope

    def compare_node(self, state: State, node: Node) -> None:
        """Compares one node with its handle."""
        handle = self.net.node(node.uid)
        owned = state.owned([node.uid])
        number = next(n for n in range(len(state.layers)) if node.uid in state.uids(n))
        parents = []
        for source, target in state.ends():
            if target == number:
                upper = state.uids(source)
                parents += [uid for uid in upper if (uid, node.uid) in state.relations]
        assert (handle.layer, handle.row) == (number, state.uids(number).index(node.uid))
        assert (handle.activation, handle.owner) == (node.activation, node.owner)
        assert handle.children.uids.tolist() == [child for _, child in owned]
        assert handle.parents.uids.tolist() == parents
        assert handle.W_alloc.tolist() == [[state.relations[pair].value for pair in owned]]
        assert handle.bias is None if node.bias is None else handle.bias.item() == node.bias.value
        belonging = [
            relation.frozen for pair, relation in state.relations.items() if node.uid in pair
        ]
        belonging += [] if node.bias is None else [node.bias.frozen]
        assert handle.frozen == (bool(belonging) and all(belonging))

    def compare_past(self, first: gn.GrapNet) -> None:
        """Compares the journal: its replay on the first net gives this wiring, and `diff` says what
        came and went.
        """
        then = self.read(first)
        now = self.oracle.state
        diff = self.net.diff(first.version)
        old, new = ({node.uid for layer in state.layers for node in layer} for state in (then, now))
        assert (diff.nodes_added.tolist(), diff.nodes_removed.tolist()) == (
            sorted(new - old),
            sorted(old - new),
        )
        assert {
            (p, c) for p, c in diff.relations_added.tolist()
        } == now.relations.keys() - then.relations.keys()
        assert {
            (p, c) for p, c in diff.relations_removed.tolist()
        } == then.relations.keys() - now.relations.keys()
        first.replay(c for c in self.net.history if c.version > first.version)
        assert self.read(first).outline(births=False) == self.oracle.state.outline(births=False)


def same(found: Any, wanted: Any, close: float) -> None:
    """Asserts that numbers are equal, or close relative to max(1, |wanted|)."""
    found, wanted = (
        torch.as_tensor(x, dtype=torch.float64).detach().flatten() for x in (found, wanted)
    )
    assert found.shape == wanted.shape
    off = (found - wanted).abs() / wanted.abs().clamp(min=1)
    assert bool((off <= close).all()), (
        f"differ by up to {off.max().item():.1e}: {found.tolist()} and {wanted.tolist()}"
    )


def births(state: State) -> object:
    """Returns the relations of the first transition, each with its birth."""
    return [(pair, state.relations[pair].birth) for pair in state.transition(0)]


def wiring(state: State) -> object:
    """Returns the relations as rows, and the sizes of the layers."""
    rows = {node.uid: row for layer in state.layers for row, node in enumerate(layer)}
    wires = []
    for t, (source, _) in enumerate(state.ends()):
        pairs = [(rows[p], rows[c]) for p, c in state.transition(t)]
        wires.append((len(state.layers[source]), pairs))
    return [len(layer) for layer in state.layers], wires
