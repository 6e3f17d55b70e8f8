"""Physical means physical: a cut relation is gone from every place that stored it, and nothing else
moved.
"""

from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import grapnet as gn

PLACES = (
    "parameter",
    "gradient",
    "optimizer",
    "state weights",
    "state references",
    "file weights",
    "file references",
)
PARENTS, CHILDREN, OWNER, SLOTS = 6, 5, 2, [0, 3]


class Subject(Protocol):
    """A layer from whose node OWNER the relations SLOTS can be cut."""

    def sizes(self) -> dict[str, int]:
        """Returns how many entries each of PLACES holds."""
        ...

    def others(self) -> list[Any]:
        """Returns what every node but OWNER stores."""
        ...

    def cut(self) -> None: ...


class Physical:
    """A GrapNet."""

    def __init__(self, folder: Path) -> None:
        self.net = gn.GrapNet([PARENTS, CHILDREN], dtype=torch.float64)
        self.optimizer = torch.optim.Adam(self.net.parameters())
        gn.attach(self.optimizer, self.net)
        self.path = folder / "net.safetensors"
        _train_once(self.net, self.optimizer)

    def sizes(self) -> dict[str, int]:
        gn.save(self.path, self.net)
        state = self.net.state_dict()
        names = ("transitions.0.weight", "transitions.0.child")
        return _sizes(self.net.transitions[0].weight, self.optimizer, state, self.path, names)

    def others(self) -> list[Any]:
        nodes = [node for node in self.net.layers[0] if node.row != OWNER]
        return [(node.uid, node.children.uids.tolist(), node.W_alloc.tolist()) for node in nodes]

    def cut(self) -> None:
        with self.net.edit(reason="cut") as edit:
            edit.cut(self.net.layers[0][OWNER], slots=SLOTS)


def _sizes(
    weight: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    path: Path,
    names: tuple[str, str],
) -> dict[str, int]:
    """Returns how many numbers each place holds; `names` are those of the weights and of the
    references.
    """
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in names if name in file.keys()}  # noqa: SIM118
    # While every relation exists, the weights say so.
    stored.setdefault(names[1], stored[names[0]])
    references = stored[names[1]]
    if references.dtype == torch.uint8:
        # Three bits for one of five children, without the bits that fill the last byte.
        bits = 8 * references.numel()
        references = references.new_empty(min(bits // 3, stored[names[0]].numel()))
        assert bits - 3 * len(references) < 8
    return {
        "parameter": weight.numel(),
        "gradient": weight.grad.numel(),
        "optimizer": optimizer.state[weight]["exp_avg"].numel(),
        "state weights": state[names[0]].numel(),
        "state references": state[names[1]].numel(),
        "file weights": stored[names[0]].numel(),
        "file references": references.numel(),
    }


class Masked:
    """What `torch.nn.utils.prune` makes of nn.Linear: the weights stay and a mask says which
    count.
    """

    def __init__(self, folder: Path) -> None:
        self.linear = nn.Linear(PARENTS, CHILDREN, dtype=torch.float64)
        self.linear.register_buffer("mask", torch.ones(CHILDREN, PARENTS, dtype=torch.float64))
        self.optimizer = torch.optim.Adam(self.linear.parameters())
        self.path = folder / "twin.safetensors"
        _train_once(
            lambda x: x @ (self.linear.weight * self.linear.mask).T + self.linear.bias,
            self.optimizer,
        )

    def sizes(self) -> dict[str, int]:
        save_file(self.linear.state_dict(), self.path)
        return _sizes(
            self.linear.weight,
            self.optimizer,
            self.linear.state_dict(),
            self.path,
            ("weight", "mask"),
        )

    def others(self) -> list[Any]:
        kept = [i for i in range(PARENTS) if i != OWNER]
        return [
            (i, self.linear.mask[:, i].tolist(), self.linear.weight[:, i].tolist()) for i in kept
        ]

    def cut(self) -> None:
        self.linear.mask[SLOTS, OWNER] = 0


def check_physical(subject: Subject, place: str) -> None:
    """The test itself, the same for both."""
    before, others = subject.sizes(), subject.others()
    assert before[place] == PARENTS * CHILDREN
    subject.cut()
    after = subject.sizes()
    assert before[place] - after[place] == len(SLOTS), (
        f"{place} did not shrink by the cut relations"
    )
    assert subject.others() == others


@pytest.mark.parametrize("place", PLACES)
def test_a_cut_shrinks_every_store_by_exactly_the_cut_relations(place: str, tmp_path: Path) -> None:
    check_physical(Physical(tmp_path), place)


@pytest.mark.parametrize("place", PLACES)
def test_a_masked_layer_fails_the_same_test(place: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not shrink"):
        check_physical(Masked(tmp_path), place)


def test_the_twins_differ_in_storage_and_agree_in_the_function(tmp_path: Path) -> None:
    graph, masked = Physical(tmp_path), Masked(tmp_path)
    for node in graph.net.layers[0]:
        node.W_alloc = masked.linear.weight[:, node.row]
    graph.net.layers[1].biases = masked.linear.bias.detach()
    graph.cut()
    masked.cut()
    x = torch.randn(7, PARENTS, dtype=torch.float64)
    expected = x @ (masked.linear.weight * masked.linear.mask).T + masked.linear.bias
    assert torch.allclose(graph.net(x), expected, atol=1e-12, rtol=0)
    # the cut relations did count
    assert not torch.allclose(graph.net(x), masked.linear(x), atol=1e-3)


def test_the_owner_keeps_the_order_of_what_it_keeps(tmp_path: Path) -> None:
    net = Physical(tmp_path).net
    owner = net.layers[0][OWNER]
    children, weights = list(owner.children), owner.W_alloc.detach().clone()
    with net.edit() as edit:
        edit.cut(owner, slots=SLOTS)
    kept = [k for k in range(CHILDREN) if k not in SLOTS]
    assert list(owner.children) == [children[k] for k in kept]
    assert torch.equal(owner.W_alloc, weights[:, kept])


def test_cutting_changes_no_other_transition_layer_or_bias() -> None:
    net = gn.GrapNet([4, 3, 3, 2])
    net(torch.randn(5, 4)).sum().backward()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    with net.edit() as edit:
        edit.cut(net.layers[1][0], slots=[1])
    touched = {"transitions.1.weight", "transitions.1.child", "transitions.1.ptr"}
    differ = {
        name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert differ == touched
    assert {n for n, p in net.named_parameters() if not torch.equal(p.grad, gradients[n])} == {
        "transitions.1.weight"
    }


def test_the_bytes_of_a_cut_weight_are_not_in_the_file(tmp_path: Path) -> None:
    net = gn.GrapNet([3, 3], dtype=torch.float64)
    mark = torch.tensor(-1234.56789012345, dtype=torch.float64)
    pattern = mark.numpy().tobytes()
    net.layers[0][1].outgoing(slots=[1]).weights = mark
    gn.save(tmp_path / "before", net)
    with net.edit() as edit:
        edit.cut(net.layers[0][1], slots=[1])
    gn.save(tmp_path / "after", net)
    gn.save(tmp_path / "with undo", net, undo=True)
    assert pattern in (tmp_path / "before").read_bytes()
    assert pattern not in (tmp_path / "after").read_bytes()
    assert pattern in (tmp_path / "with undo").read_bytes()


def test_an_edit_far_away_costs_no_copy_of_a_neighbour() -> None:
    """Proposition 1's scope: the storage of other transitions is not even rewritten."""
    net = gn.GrapNet([4, 3, 2])
    places = [net.transitions[1].weight.data_ptr(), net.transitions[1].child.data_ptr()]
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
    assert [net.transitions[1].weight.data_ptr(), net.transitions[1].child.data_ptr()] == places


def _train_once(model: Any, optimizer: torch.optim.Optimizer) -> None:
    x: Tensor = torch.randn(8, PARENTS, dtype=torch.float64)
    model(x).square().sum().backward()
    optimizer.step()
