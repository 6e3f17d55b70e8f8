"""Physical means physical: a cut relation is gone from every place that stored it, and nothing else
moved.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import grapnet as gn

PARENTS = 6
CHILDREN = 5
OWNER = 2
SLOTS = [0, 3]
FULL = PARENTS * CHILDREN


def train_once(run: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> None:
    run(torch.randn(8, PARENTS, dtype=torch.float64)).square().sum().backward()
    optimizer.step()


class Physical:
    """A GrapNet."""

    names = ("transitions.0.weight", "transitions.0.child")

    def __init__(self) -> None:
        self.model = gn.GrapNet([PARENTS, CHILDREN], dtype=torch.float64)
        self.weight = self.model.transitions[0].weight
        self.optimizer = torch.optim.Adam(self.model.parameters())
        gn.attach(self.optimizer, self.model)
        train_once(self.model, self.optimizer)

    def save(self, path: Path) -> None:
        gn.save(path, self.model)

    def others(self) -> list[Any]:
        """Returns what every node but OWNER stores."""
        nodes = [node for node in self.model.layers[0] if node.row != OWNER]
        return [(node.uid, node.children.uids.tolist(), node.W_alloc.tolist()) for node in nodes]

    def cut(self) -> None:
        with self.model.edit(reason="cut") as edit:
            edit.cut(self.model.layers[0][OWNER], slots=SLOTS)


class Masked:
    """What `torch.nn.utils.prune` makes of nn.Linear: weights that stay, and a mask over them."""

    names = ("weight", "mask")

    def __init__(self) -> None:
        self.model = nn.Linear(PARENTS, CHILDREN, dtype=torch.float64)
        self.model.register_buffer("mask", torch.ones(CHILDREN, PARENTS, dtype=torch.float64))
        self.weight = self.model.weight
        self.optimizer = torch.optim.Adam(self.model.parameters())
        train_once(lambda x: x @ (self.weight * self.model.mask).T, self.optimizer)

    def save(self, path: Path) -> None:
        save_file(self.model.state_dict(), path)

    def others(self) -> list[Any]:
        kept = [i for i in range(PARENTS) if i != OWNER]
        return [self.model.mask[:, kept].tolist(), self.weight[:, kept].tolist()]

    def cut(self) -> None:
        self.model.mask[SLOTS, OWNER] = 0


def sizes(subject: Physical | Masked, path: Path) -> dict[str, int]:
    """Returns how many numbers each place holds."""
    weights, references = subject.names
    subject.save(path)
    with safe_open(path, framework="pt") as file:
        stored = file.get_tensor(weights).numel()
        listed = stored  # while every relation exists, the weights say so
        if references in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(references)
            listed = tensor.numel()
            if tensor.dtype == torch.uint8:
                # Three bits for one of five children, without the bits that fill the last byte.
                listed = min(8 * tensor.numel() // 3, stored)
                assert 8 * tensor.numel() - 3 * listed < 8
    state = subject.model.state_dict()
    return {
        "parameter": subject.weight.numel(),
        "gradient": subject.weight.grad.numel(),
        "optimizer": subject.optimizer.state[subject.weight]["exp_avg"].numel(),
        "state weights": state[weights].numel(),
        "state references": state[references].numel(),
        "file weights": stored,
        "file references": listed,
    }


@pytest.mark.parametrize(("kind", "lost"), [(Physical, len(SLOTS)), (Masked, 0)])
def test_a_cut_shrinks_every_store_by_exactly_the_cut_relations_and_a_mask_none(
    kind: type[Physical | Masked], lost: int, tmp_path: Path
) -> None:
    subject = kind()
    others = subject.others()
    assert set(sizes(subject, tmp_path / "file").values()) == {FULL}
    subject.cut()
    assert set(sizes(subject, tmp_path / "file").values()) == {FULL - lost}
    assert subject.others() == others


def test_an_edit_far_away_costs_no_copy_of_a_neighbour() -> None:
    """Proposition 1's scope: the storage of other transitions is not even rewritten."""
    net = gn.GrapNet([4, 3, 2])
    places = [net.transitions[1].weight.data_ptr(), net.transitions[1].child.data_ptr()]
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
    assert [net.transitions[1].weight.data_ptr(), net.transitions[1].child.data_ptr()] == places
