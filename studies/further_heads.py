"""Hidden nodes other than plainly drawn ones for a solved head, and how nodes are sifted and
replaced between tasks.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.continual import (
    Batch,
    ClosedFormReadout,
    GramStatistics,
    Memory,
    logit_adjusted_cross_entropy,
)

from .learning import accuracy, train
from .stream_heads import Choice, Head, dense

SIDE = 7  # of the pictures
NORM = 2.0  # about that of the incoming weights of a plainly drawn node: 7 · 2/7
ACTIVATIONS = {"softplus": nn.Softplus, "silu": nn.SiLU}
Way = Literal["silent", "stored", "survivors"]
Logits = Callable[[Tensor], Tensor]  # inputs -> [batch, classes]
Draw = Callable[[Head, Batch, int], gn.GrapNet]  # from the content of the first task and a seed


class Layer(NamedTuple):
    """A hidden layer: weights [parents, nodes], biases [nodes], and which of the relations exist;
    all by default.
    """

    weights: Tensor
    biases: Tensor
    activation: str
    related: Tensor | None = None


def fixed_net(layers: Sequence[Layer], classes: int = 10) -> gn.GrapNet:
    """Returns a net of fixed hidden layers, the last related to every class with weight 0, to be
    solved for.
    """
    nodes = len(layers[-1].biases)
    out = Layer(torch.zeros(nodes, classes), torch.zeros(classes), "identity")
    relations = []
    for layer in (*layers, out):
        if layer.related is None:
            related = torch.ones_like(layer.weights, dtype=torch.bool)
        else:
            related = layer.related
        parents, children = related.nonzero(as_tuple=True)
        relations.append((parents, children, layer.weights[related]))
    net = gn.GrapNet.from_relations(
        [len(layers[0].weights), *(len(layer.biases) for layer in layers), classes],
        relations,
        biases=[layer.biases for layer in (*layers, out)],
        activation=[layer.activation for layer in (*layers, out)],
    )
    with net.edit(reason="fix the hidden nodes") as edit:
        for number in range(1, len(layers) + 1):
            edit.freeze(net.layers[number], outgoing=False)
    return net


def windows(head: Head, first: Batch, seed: int, *, width: int = 5) -> gn.GrapNet:
    """Returns a net whose nodes each relate only to a random square window of the picture."""
    generator = _generator(seed)
    place = torch.arange(SIDE)
    corner = torch.randint(0, SIDE - width + 1, (2, head.nodes, 1), generator=generator)
    inside = (place >= corner) & (place < corner + width)  # [rows or columns, nodes, side]
    related = (inside[0][:, :, None] & inside[1][:, None, :]).flatten(1).t().contiguous()
    weights = torch.randn(SIDE * SIDE, head.nodes, generator=generator) * (NORM / width)
    return fixed_net(
        [Layer(weights, torch.randn(head.nodes, generator=generator), head.activation, related)]
    )


def differences(head: Head, first: Batch, seed: int, *, steepness: float = 4.0) -> gn.GrapNet:
    """Returns a net whose incoming weights are differences of two images of the first task, biased
    to between them.
    """
    generator = _generator(seed)
    one, other = (
        first.x[torch.randint(0, len(first.x), (head.nodes,), generator=generator)]
        for _ in range(2)
    )
    apart = one - other
    weights = steepness * apart / apart.square().sum(1, keepdim=True).clamp(min=1)
    between = other + torch.rand(head.nodes, 1, generator=generator) * apart
    return fixed_net(
        [Layer(weights.t().contiguous(), -(between * weights).sum(1), head.activation)]
    )


def half_learned(
    head: Head, first: Batch, seed: int, *, rate: float = 2e-3, epochs: int = 10
) -> gn.GrapNet:
    """Returns a net half of whose nodes were trained on the first task, before its samples come in
    a second time.
    """
    torch.manual_seed(seed)
    count = head.nodes // 2
    inputs = first.x.shape[1]
    model = dense(inputs, count, ACTIVATIONS[head.activation])
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    train(model, optimizer, (first.x, first.y), batch=64, epochs=epochs)
    learned, bias = (parameter.detach() for parameter in list(model.parameters())[:2])
    drawn = _drawn(inputs, head.nodes - count, _generator(seed))
    weights = torch.cat([learned.t(), drawn[0]], 1)
    biases = torch.cat([bias, drawn[1]])
    return fixed_net([Layer(weights, biases, head.activation)])


def compressed(
    head: Head, first: Batch, seed: int, *, times: int = 3, looked_at: int = 2000
) -> gn.GrapNet:
    """Returns a net of more random nodes, and linear ones that are their principal directions on
    the first task.
    """
    torch.manual_seed(seed)
    weights, biases = _drawn(first.x.shape[1], times * head.nodes, _generator(seed))
    values = ACTIVATIONS[head.activation]()(first.x[:looked_at] @ weights + biases)
    directions = torch.pca_lowrank(values, q=head.nodes)[2].contiguous()
    linear = Layer(directions, torch.zeros(head.nodes), "identity")
    return fixed_net([Layer(weights, biases, head.activation), linear])


def weakest(gram: Tensor, cross: Tensor, ridge: float, count: int, *, steps: int) -> Tensor:
    """Returns the rows of the nodes, ascending, whose removal makes the ridge loss grow least, as
    `GramStatistics.weakest` does, also for guessed sums that are those of no data.

    The loss grows by |w|² / [(gram + ridge)⁻¹]ᵢᵢ when node i goes and the others are solved for
    again. After every step inverse and weights become exactly those without the nodes that went.

    Args:
        gram: Σ [h, 1] [h, 1]ᵀ.
        cross: Σ [h, 1] yᵀ.
        ridge: the penalty on the weights.
        count: how many nodes.
        steps: in how many they go; the others are looked at again after each.
    """
    system = gram.clone()
    system.diagonal()[:-1] += ridge
    inverse = torch.linalg.inv(system)
    weights = inverse @ cross
    left = torch.arange(len(gram))
    gone = []
    at_a_time = -(-count // steps)
    while count > 0:
        growth = weights[:-1].square().sum(1) / inverse.diagonal()[:-1]
        out = growth.argsort()[: min(count, at_a_time)]
        stay = torch.ones(len(left), dtype=torch.bool)
        stay[out] = False
        share = torch.linalg.solve(
            inverse[out][:, out], torch.cat([inverse[out][:, stay], weights[out]], 1)
        )
        lost = inverse[stay][:, out] @ share
        inverse = inverse[stay][:, stay] - lost[:, : len(lost)]
        weights = weights[stay] - lost[:, len(lost) :]
        gone.append(left[out])
        left = left[stay]
        count = count - len(out)
    return torch.cat(gone).sort().values if gone else left[:0]


def remove(net: gn.GrapNet, nodes: gn.NodeSet) -> None:
    """Removes nodes of the hidden layer; what follows the net carries the statistics of the others
    over.
    """
    with net.edit(reason="sift the random nodes") as edit:
        edit.remove_nodes(nodes)


def replace(net: gn.GrapNet, rows: Tensor, weights: Tensor, biases: Tensor) -> None:
    """Replaces nodes of the hidden layer by fixed ones with these incoming weights [inputs, nodes],
    at its end.
    """
    with net.edit(reason="replace the weakest nodes") as edit:
        edit.remove_nodes(net.layers[1][rows])
        grown = edit.add_nodes(1, len(biases), bias=biases)
        edit.connect(net.layers[0], grown, weights=weights)
        edit.connect(grown, net.layers[2], weights="zero")
    with net.edit(reason="fix the grown nodes") as edit:
        edit.freeze(net.layers[1][-len(biases) :], outgoing=False)


class EstimatedPast:
    """What is guessed about the sums that replaced nodes have missed, in addition to those of a
    readout.

    Args:
        readout: which counts late nodes as silent.
        way: "silent" guesses nothing. "stored" sums over the stored images, as if each stood for
            many of its class. "survivors" fits the nodes by the surviving ones on the stored images
            and takes what that says of all sums; what was not fitted counts as noise, so that the
            whole remains a sum of squares.
    """

    def __init__(self, readout: ClosedFormReadout, way: Way) -> None:
        self.readout = readout
        self._way = way
        self._gram, self._cross = (torch.zeros_like(part) for part in self._seen())

    def replaced(self, rows: Tensor, stored: Batch) -> None:
        """Follows `replace` of these rows."""
        size = len(self._gram) - 1
        count = len(rows)
        left = torch.ones(size + 1, dtype=torch.bool)
        left[rows] = False
        old = torch.cat([torch.arange(size - count), torch.tensor([size])])
        gram = torch.zeros_like(self._gram)
        cross = torch.zeros_like(self._cross)
        gram[old[:, None], old] = self._gram[left][:, left]
        cross[old] = self._cross[left]
        self._gram = gram
        self._cross = cross
        if self._way != "silent":
            if self._way == "stored":
                past_gram, past_cross = self._by_stored(stored)
            else:
                past_gram, past_cross = self._by_survivors(stored, old)
            late = slice(size - count, size)
            gram[late] = past_gram[late]
            gram[:, late] = past_gram[:, late]
            cross[late] = past_cross[late]

    def sums(self) -> tuple[Tensor, Tensor]:
        """Returns Σ [h, 1] [h, 1]ᵀ and Σ [h, 1] yᵀ, seen and guessed together."""
        gram, cross = self._seen()
        return gram + self._gram, cross + self._cross

    def solve(self, ridge: float) -> None:
        """Writes the outgoing relations and the biases they lead to."""
        gram, cross = self.sums()
        gram.diagonal()[:-1] += ridge
        found = torch.linalg.solve(gram, cross).float()
        net = self.readout.net
        # every node relates to every class, in order
        net.layers[1].outgoing().weights = found[:-1].flatten()
        net.layers[2].biases = found[-1]

    def _seen(self) -> tuple[Tensor, Tensor]:
        return self.readout.statistics.gram(), self.readout.statistics.cross()

    def _values(self, stored: Batch) -> Tensor:
        values = self.readout.features(stored.x).double()
        return torch.cat([values, torch.ones(len(values), 1).double()], 1)

    def _by_stored(self, stored: Batch) -> tuple[Tensor, Tensor]:
        values = self._values(stored)
        counts = self.readout.statistics.class_counts
        weighted = (
            values
            * (counts / stored.y.bincount(minlength=len(counts)).clamp(min=1))[stored.y][:, None]
        )
        return weighted.t() @ values, weighted.t() @ nn.functional.one_hot(
            stored.y, len(counts)
        ).double()

    def _by_survivors(self, stored: Batch, old: Tensor) -> tuple[Tensor, Tensor]:
        values = self._values(stored)
        gram, cross = self.sums()
        late = torch.ones(len(gram), dtype=torch.bool)
        late[old] = False
        known = values[:, old]
        wanted = values[:, late]
        fits = []
        for penalty in (1e-2, 1e-1, 1.0, 10.0):
            inverse = torch.linalg.inv(known @ known.t() + penalty * torch.eye(len(known)).double())
            dual = inverse @ wanted
            # what leaving one out gets wrong
            fits.append((dual / inverse.diagonal()[:, None], known.t() @ dual))
        wrong, fit = min(fits, key=lambda found: float(found[0].square().sum()))
        gram[late] = fit.t() @ gram[old]  # of the surviving ones; the rest follows from symmetry
        gram[:, late] = gram[late].t()
        among = fit.t() @ gram[old][:, old] @ fit
        among.diagonal().add_(wrong.square().mean(0) * self.readout.statistics.count)
        places = late.nonzero().squeeze(1)
        gram[places[:, None], places] = among
        cross[late] = fit.t() @ cross[old]
        return gram, cross


def better_drawn(
    stored: Batch, residual: Tensor, count: int, activation: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns the weights and biases of those of ten times as many drawn nodes that best follow
    what is left over.
    """
    weights, biases = _drawn(stored.x.shape[1], 10 * count, generator)
    values = ACTIVATIONS[activation]()(stored.x @ weights + biases)
    values = values - values.mean(0)
    follows = (values.t() @ residual).square().sum(1) / values.square().sum(0).clamp(min=1e-12)
    best = follows.argsort(descending=True)[:count]
    return weights[:, best], biases[best]


def quadratic_discriminant(statistics: GramStatistics, shrinkage: float = 0.05) -> Logits:
    """Returns the discriminant of classes with a covariance each, from sums that are kept apart by
    class.
    """
    parts = []
    for label in range(statistics.n_outputs):
        alone = statistics.copied()
        for other in set(range(statistics.n_outputs)) - {label}:
            alone.forget(other)
        square = alone.gram() / alone.count
        mean = square[-1, :-1]
        covariance = square[:-1, :-1] - mean[:, None] * mean
        covariance.diagonal().add_(shrinkage * covariance.diagonal().mean())
        parts.append((mean, torch.linalg.inv(covariance), covariance.logdet()))

    def logits(x: Tensor) -> Tensor:
        apart = [(x.double() - mean, inverse, size) for mean, inverse, size in parts]
        return torch.stack(
            [-0.5 * (((d @ inverse) * d).sum(1) + size) for d, inverse, size in apart], 1
        ).float()

    return logits


def tuned(
    readout: ClosedFormReadout,
    memory: Memory,
    *,
    rate: float,
    updates: int,
    batch: int,
    scale: float,
) -> gn.GrapNet:
    """Returns a copy of a solved net whose readout was then trained on stored images, with logit
    adjustment.
    """
    readout.solve()
    net = copy.deepcopy(readout.net)
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    for _ in range(updates):
        replay = memory.sample(batch)
        if replay is not None:
            counts = replay.y.bincount(minlength=net.sizes[-1])
            optimizer.zero_grad()
            logit_adjusted_cross_entropy(
                scale * net(replay.x), replay.y, replay.y.unique(), counts
            ).backward()
            optimizer.step()
    return net


def best_of(choice: Choice, options: Mapping[float, Sequence[Logits]], what: str) -> dict[str, Any]:
    """Returns the test accuracy of what does best on held-out images; an option is made of the
    trial and the stream.
    """
    held_out = (choice.held_out.x, choice.held_out.y)
    best = max(options, key=lambda key: accuracy(options[key][0], held_out))
    reached = accuracy(options[best][1], (choice.test.x, choice.test.y))
    return {"seen_class": reached, "chosen": {what: best}}


def averaged(own: Logits, other: Logits, share: float, scale: float) -> Logits:
    """Returns the mean of the log-probabilities of a solved head, whose targets are 0 and 1, and of
    another head.
    """
    return lambda x: (1 - share) * (scale * own(x)).log_softmax(1) + share * other(x).log_softmax(1)


def _drawn(inputs: int, nodes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    weights = torch.randn(inputs, nodes, generator=generator) * (NORM / math.sqrt(inputs))
    return weights, torch.randn(nodes, generator=generator)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(9000 + seed)
