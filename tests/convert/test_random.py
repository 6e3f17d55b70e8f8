"""Random stacks, grafts, edits, undo and ungraft, against a dense twin with the same entries
held.
"""

import copy
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import grapnet as gn

ACTIVATIONS = [nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, lambda: nn.LeakyReLU(0.2), nn.Identity]


@dataclass
class Kept:
    """Entries that an edit has taken: what they were, their state then, and what they are held
    at.
    """

    parameter: nn.Parameter
    entries: Tensor  # bool, like the Parameter
    value: Tensor
    state: dict[str, Tensor]
    restores_value: bool


class Twin:
    """A dense model in which what the net has cut, removed or frozen is held."""

    def __init__(self, module: nn.Sequential, optimizer: Optimizer) -> None:
        self.module, self.optimizer = copy.deepcopy((module, optimizer))
        self.linears = [part for part in self.module.modules() if isinstance(part, nn.Linear)]
        self.held = {p: torch.zeros_like(p, dtype=torch.bool) for p in self.module.parameters()}
        self.past: list[list[Kept]] = []

    def hold(self, asked: list[tuple[nn.Parameter, Tensor, bool]]) -> None:
        """Holds entries that are not held yet, at zero or at what they are."""
        kept = []
        for parameter, entries, at_zero in asked:
            fresh = entries & ~self.held[parameter]
            moving = entries if at_zero else fresh  # a frozen entry can still be cut
            state = {
                k: v.clone()
                for k, v in self.optimizer.state[parameter].items()
                if v.shape == parameter.shape
            }
            kept.append(Kept(parameter, fresh, parameter.detach().clone(), state, at_zero))
            kept.append(Kept(parameter, moving & ~fresh, parameter.detach().clone(), {}, at_zero))
            self.held[parameter] |= entries
            if at_zero:
                parameter.data[entries] = 0.0
        self.past.append(kept)

    def undo(self) -> None:
        """Gives the entries of the last edit back."""
        for number, kept in enumerate(reversed(self.past.pop())):
            if kept.restores_value:
                kept.parameter.data[kept.entries] = kept.value[kept.entries]
            if number % 2:  # it was free before
                self.held[kept.parameter] &= ~kept.entries
                for key, value in kept.state.items():
                    self.optimizer.state[kept.parameter][key][kept.entries] = value[kept.entries]

    def step(self, x: Tensor) -> None:
        """Takes one step, and puts what is held back."""
        before = {p: p.detach().clone() for p in self.held}
        step(self.module, self.optimizer, x)
        for parameter, entries in self.held.items():
            parameter.data[entries] = before[parameter][entries]

    def release(self) -> None:
        """Lets everything train again, with clean state where it was held."""
        for parameter, entries in self.held.items():
            for value in self.optimizer.state[parameter].values():
                if value.shape == parameter.shape:
                    value[entries] = 0.0
            entries.zero_()


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - x[..., :1]).square().mean().backward()
    optimizer.step()


class Program:
    """One random run."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.sizes = [self.draw.randint(2, 6) for _ in range(self.draw.randint(2, 4))]
        modules: list[nn.Module] = []
        for n_in, n_out in zip(self.sizes, self.sizes[1:], strict=False):
            modules.append(
                nn.Linear(n_in, n_out, bias=self.draw.random() < 0.7, dtype=torch.float64)
            )
            modules.append(self.draw.choice(ACTIVATIONS)())
        self.model = nn.Sequential(nn.Identity(), nn.Sequential(*modules))
        self.optimizer = AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1)
        self.data = torch.Generator().manual_seed(seed)
        for _ in range(2):
            step(self.model, self.optimizer, self.batch())
        self.twin = Twin(self.model, self.optimizer)
        self.first = [sum(self.sizes[:n]) for n in range(len(self.sizes))]

    def batch(self) -> Tensor:
        return torch.randn(8, self.sizes[0], dtype=torch.float64, generator=self.data)

    def graft(self) -> None:
        """Makes the stack a net, perhaps without some weights that are zero."""
        drop_zeros = self.draw.random() < 0.5
        if drop_zeros:
            asked = []
            for mine, theirs in zip(self.model[1], self.twin.module[1], strict=True):
                if isinstance(mine, nn.Linear):
                    zeros = torch.rand_like(mine.weight) < 0.3
                    mine.weight.data[zeros] = 0.0
                    asked.append((theirs.weight, zeros, True))
            self.twin.hold(asked)
            self.twin.past.clear()
        self.net = gn.graft(self.model, "1", self.optimizer, drop_zeros=drop_zeros)["1"]

    def edit(self) -> None:
        """Cuts, freezes and removes, in one edit."""
        asked = []
        before = self.net.version
        with self.net.edit(allow_dead=True) as edit:
            for t in range(len(self.sizes) - 1):
                for verb in (edit.cut, edit.freeze):
                    chosen = (
                        self.net.layers[t]
                        .outgoing()
                        .smallest(
                            fraction=self.draw.random() / 2,
                            key=torch.rand(self.net.transitions[t].size),
                        )
                    )
                    verb(chosen)
                    entries = torch.zeros_like(self.twin.linears[t].weight, dtype=torch.bool)
                    rows = (
                        (chosen.children - self.first[t + 1]).long(),
                        (chosen.parents - self.first[t]).long(),
                    )
                    entries[rows] = True
                    asked.append((self.twin.linears[t].weight, entries, verb == edit.cut))
            hidden = [n for n in range(1, len(self.sizes) - 1) if len(self.net.layers[n]) > 1]
            if hidden and self.draw.random() < 0.5:
                number = self.draw.choice(hidden)
                uid = self.draw.choice(self.net.layers[number].uids.tolist())
                edit.remove_nodes([uid])
                asked += self.gone(number, uid - self.first[number])
        self.twin.hold(sorted(asked, key=lambda one: not one[2]))  # a cut beats a freeze
        # an edit that changes nothing is no commit, and cannot be undone
        if self.net.version == before:
            self.twin.past.pop()

    def gone(self, number: int, row: int) -> list[tuple[nn.Parameter, Tensor, bool]]:
        """Returns what stands for a node in the twin."""
        above = self.twin.linears[number - 1]
        below = self.twin.linears[number]
        incoming, outgoing = (
            torch.zeros_like(one.weight, dtype=torch.bool) for one in (above, below)
        )
        incoming[row] = True
        outgoing[:, row] = True
        asked = [(above.weight, incoming, True), (below.weight, outgoing, True)]
        if above.bias is not None:
            bias = torch.zeros_like(above.bias, dtype=torch.bool)
            bias[row] = True
            asked.append((above.bias, bias, True))
        return asked

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = self.batch()
            step(self.model, self.optimizer, x)
            self.twin.step(x)
        x = self.batch()
        torch.testing.assert_close(self.model(x), self.twin.module(x), rtol=1e-11, atol=1e-12)

    def require_equal_weights(self) -> None:
        """Asserts that the plain modules are the twin's, without the rows of removed nodes."""
        rows = [
            layer.uids - first for layer, first in zip(self.net.layers, self.first, strict=True)
        ]
        linears = [part for part in self.model.modules() if isinstance(part, nn.Linear)]
        for t, (mine, theirs) in enumerate(zip(linears, self.twin.linears, strict=True)):
            torch.testing.assert_close(
                mine.weight, theirs.weight[rows[t + 1]][:, rows[t]], rtol=1e-11, atol=1e-12
            )
            assert (mine.bias is None) == (theirs.bias is None)
            if mine.bias is not None:
                torch.testing.assert_close(
                    mine.bias, theirs.bias[rows[t + 1]], rtol=1e-11, atol=1e-12
                )


@pytest.mark.parametrize("seed", range(24))
def test_a_random_program_trains_like_its_dense_twin(seed):
    program = Program(seed)
    program.graft()
    program.steps(2)
    for _ in range(4):
        if program.twin.past and program.draw.random() < 0.4:
            program.net.undo()
            program.twin.undo()
        else:
            program.edit()
        gn.check(program.net)
        program.steps(1)
    sizes = program.net.sizes
    gn.ungraft(program.model, optimizer=program.optimizer)
    program.require_equal_weights()
    if sizes == program.sizes:
        program.twin.release()
        program.steps(2)
        program.require_equal_weights()
