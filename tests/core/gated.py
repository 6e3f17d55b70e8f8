"""A Llama-style feed-forward block: three nets that share their hidden units, and everything that
follows them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import grapnet as gn
from tests.core.test_faults import Fault
from tests.fingerprint import fingerprint

GONE = [1, 4]  # hidden units
Action = Callable[["Block"], object]


class Seen:
    """A follower with state of its own: how often each relation of a net was seen."""

    def __init__(self, net: gn.GrapNet) -> None:
        self.count = torch.arange(float(net.transitions[0].size))
        self.told = 0
        self.refuses = False

    def prepare(self, graph: gn.GrapNet, commit: gn.Commit) -> Callable[[], None]:
        if self.refuses:
            raise Fault("follower")
        count = commit.relations[0].carry(self.count) if 0 in commit.relations else self.count

        def install() -> None:
            self.count, self.told = count, self.told + 1

        return install


class Block(nn.Module):
    """gate, up and down of a Llama-style feed-forward block, one optimizer over all, and followers
    around it.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.gate = gn.GrapNet([4, 6], dtype=dtype, generator=draw)
        self.up = gn.GrapNet([4, 6], dtype=dtype, generator=draw)
        self.down = gn.GrapNet([6, 4], dtype=dtype, generator=draw)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        self.followers: list[Seen] = []
        for net in self.nets:
            self.followers += [Seen(net), Seen(net)]
            net.follow(self.followers[-2])
            gn.attach(self.optimizer, net)
            net.follow(self.followers[-1])
        with self.up.edit(reason="of its own") as edit:
            edit.freeze(self.up.layers[0][0].outgoing())
        for _ in range(3):
            self.step()

    @property
    def nets(self) -> tuple[gn.GrapNet, gn.GrapNet, gn.GrapNet]:
        return self.gate, self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))

    def step(self) -> None:
        width = len(self.gate.layers[0])
        x = torch.linspace(-1, 1, 8 * width, dtype=self.gate.transitions[0].weight.dtype).reshape(
            8, width
        )
        self.optimizer.zero_grad()
        (self(x) - x).square().sum().backward()
        self.optimizer.step()

    def hidden(self, rows: list[int]) -> tuple[gn.NodeSet, gn.NodeSet, gn.NodeSet]:
        return self.gate.layers[1][rows], self.up.layers[1][rows], self.down.layers[0][rows]


def write(block: Block, n: int, edit: gn.Edit) -> None:
    """Asks, in the n-th net, for two hidden units to go and for one to come with weights that are
    drawn.
    """
    net = block.nets[n]
    edit.remove_nodes(block.hidden(GONE)[n], interface=True)
    if net is block.down:
        edit.connect(edit.add_nodes(0, 1), net.layers[1])
    else:
        edit.connect(net.layers[0], edit.add_nodes(1, 1))


def edit(block: Block) -> None:
    """Does that in all three nets at once."""
    with gn.edit_together(*block.nets, reason="other hidden units", by="test") as edits:
        for n, one in enumerate(edits):
            write(block, n, one)


def edit_one_by_one(block: Block) -> None:
    """Does that in three edits."""
    for n, net in enumerate(block.nets):
        with net.edit(reason="other hidden units", by="test") as one:
            write(block, n, one)


def edited() -> Block:
    block = Block()
    edit(block)
    block.step()
    return block


def undone() -> Block:
    block = edited()
    gn.undo_together(*block.nets)
    return block


def state(block: Block) -> list[Any]:
    """Everything that a refused transaction must leave bit-identical."""
    return [
        [fingerprint(net, block.optimizer) for net in block.nets],
        [(follower.count.tolist(), follower.told) for follower in block.followers],
        torch.get_rng_state().tolist(),
    ]


def contents(block: Block) -> list[Any]:
    """What two blocks that went the same way have in common: values, optimizer state, followers."""
    found = [net.state_dict() for net in block.nets]
    return [
        found,
        list(block.optimizer.state.values()),
        [follower.count for follower in block.followers],
    ]


def assert_equal(one: Block, other: Block) -> None:
    torch.testing.assert_close(contents(one), contents(other), rtol=0, atol=0)


# What to do, and to which block.
ACTIONS: dict[str, tuple[Callable[[], Block], Action]] = {
    "edit": (Block, edit),
    "undo": (edited, lambda block: gn.undo_together(*block.nets)),
    "redo": (undone, lambda block: gn.redo_together(*block.nets)),
}
