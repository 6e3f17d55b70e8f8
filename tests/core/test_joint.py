"""One transaction over several nets commits, is undone and is refused in all of them or none."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from tests.fingerprint import as_bytes, fingerprint

GONE = [1, 4]  # hidden units


class Block(nn.Module):
    """The gate, up and down nets of a Llama-style feed-forward block, and one optimizer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.gate = gn.GrapNet([4, 6], dtype=dtype, generator=draw)
        self.up = gn.GrapNet([4, 6], dtype=dtype, generator=draw)
        self.down = gn.GrapNet([6, 4], dtype=dtype, generator=draw)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        for net in self.nets:
            gn.attach(self.optimizer, net)
        with self.up.edit(reason="of its own") as edit:
            edit.freeze(self.up.layers[0][0].outgoing())
        for _ in range(3):
            self.step()

    @property
    def nets(self) -> tuple[gn.GrapNet, gn.GrapNet, gn.GrapNet]:
        return self.gate, self.up, self.down

    @property
    def sizes(self) -> list[list[int]]:
        return [net.sizes for net in self.nets]

    @property
    def versions(self) -> list[int]:
        return [net.version for net in self.nets]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))

    def step(self) -> None:
        x = torch.linspace(-1, 1, 32, dtype=self.gate.transitions[0].weight.dtype).reshape(8, 4)
        self.optimizer.zero_grad()
        (self(x) - x).square().sum().backward()
        self.optimizer.step()

    def hidden(self, rows: list[int]) -> tuple[gn.NodeSet, gn.NodeSet, gn.NodeSet]:
        return self.gate.layers[1][rows], self.up.layers[1][rows], self.down.layers[0][rows]


def write(block: Block, n: int, edit: gn.Edit) -> None:
    """Replaces, in the n-th net, two hidden units by one whose weights are drawn."""
    net = block.nets[n]
    edit.remove_nodes(block.hidden(GONE)[n], interface=True)
    if net is block.down:
        edit.connect(edit.add_nodes(0, 1), net.layers[1])
    else:
        edit.connect(net.layers[0], edit.add_nodes(1, 1))


def write_all(block: Block, edits: Any) -> None:
    for n, one in enumerate(edits):
        write(block, n, one)


def edit(block: Block) -> None:
    with gn.edit(*block.nets, reason="other hidden units", by="test") as edits:
        write_all(block, edits)


def edited() -> Block:
    block = Block()
    edit(block)
    block.step()
    return block


def state(block: Block) -> list[Any]:
    """Returns everything that a refused transaction must leave bit-identical."""
    nets = [fingerprint(net, block.optimizer) for net in block.nets]
    return [*nets, as_bytes(torch.get_rng_state())]


def contents(block: Block) -> list[Any]:
    """Returns what two blocks that went the same way have in common."""
    return [[net.state_dict() for net in block.nets], list(block.optimizer.state.values())]


def test_hidden_units_leave_all_nets_at_once_and_the_rest_computes_on() -> None:
    block = Block(torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64)
    keep = [row for row in range(6) if row not in GONE]
    gate, up, down = (net.to_module()[0] for net in block.nets)
    hidden = functional.silu(gate(x)) * up(x)
    expected = hidden[:, keep] @ down.weight[:, keep].T + down.bias
    versions = block.versions
    with gn.edit(*block.nets, reason="remove hidden units", by="me") as edits:
        for one, nodes in zip(edits, block.hidden(GONE), strict=True):
            one.remove_nodes(nodes, interface=True)
        assert block.versions == versions  # nothing takes effect inside the block
    torch.testing.assert_close(block(x), expected)
    assert block.sizes == [[4, 4], [4, 4], [4, 4]]
    assert block.versions == [version + 1 for version in versions]
    receipts = [one.receipt for one in edits]
    assert [net.history[-1] for net in block.nets] == receipts
    assert {(receipt.reason, receipt.by, receipt.joint.parts) for receipt in receipts} == {
        ("remove hidden units", "me", 3)
    }
    assert [receipt.joint.part for receipt in receipts] == [0, 1, 2]
    assert len({receipt.joint.name for receipt in receipts}) == 1
    assert "part 2 of 3" in repr(receipts[1])
    block.step()


def test_one_optimizer_over_all_nets_follows_as_it_follows_edits_one_by_one() -> None:
    together = Block()
    alone = Block()
    torch.manual_seed(1)
    edit(together)
    torch.manual_seed(1)
    for n, net in enumerate(alone.nets):
        with net.edit(reason="other hidden units", by="test") as one:
            write(alone, n, one)
    for verb in ("undo", "redo"):
        torch.testing.assert_close(contents(together), contents(alone), rtol=0, atol=0)
        for block in (together, alone):
            block.step()
        getattr(gn, verb)(*together.nets)
        for net in alone.nets:
            getattr(net, verb)()
    torch.testing.assert_close(contents(together), contents(alone), rtol=0, atol=0)
    assert together.versions == alone.versions == [3, 4, 3]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("own_generator", [True, False])
def test_an_impossible_request_in_one_net_stops_all_and_gives_the_random_numbers_back(
    place: int, own_generator: bool
) -> None:
    block = Block()
    generator = torch.Generator().manual_seed(3) if own_generator else torch.default_generator
    before = state(block)
    drawn = generator.get_state()
    with pytest.raises(gn.errors.EditError):
        connect_what_is_related(block, place, generator)
    assert state(block) == before
    assert torch.equal(generator.get_state(), drawn)
    edit(block)


def connect_what_is_related(block: Block, place: int, generator: torch.Generator) -> None:
    with gn.edit(*block.nets, generator=generator) as edits:
        write_all(block, edits)
        edits[place].connect(block.nets[place].layers[0][0], block.nets[place].layers[1][0])


def test_an_error_while_the_block_opens_changes_nothing() -> None:
    block = Block()
    before = state(block)
    for act in (edit, lambda block: gn.undo(*block.nets)):
        with (
            block.down.edit(reason="another"),
            pytest.raises(gn.errors.EditError, match="'another'"),
        ):
            act(block)
    with torch.inference_mode(), pytest.raises(gn.errors.EditError):
        edit(block)
    assert state(block) == before
    edit(block)  # no edit was left open


@pytest.mark.parametrize("verb", [lambda *nets: gn.edit(*nets).__enter__(), gn.undo, gn.redo])
def test_nets_are_given_one_by_one_and_once(verb: Any) -> None:
    block = Block()
    for nets in ((), (block.gate, block.up, block.gate)):
        with pytest.raises(gn.errors.EditError):
            verb(*nets)
    for nets in ((list(block.nets),), (block.gate, block)):
        with pytest.raises(TypeError):
            verb(*nets)
    edit(block)


def test_commit_of_one_of_the_edits_is_refused_and_the_block_goes_on() -> None:
    block = Block()
    with gn.edit(*block.nets) as edits:
        write_all(block, edits)
        with pytest.raises(gn.errors.EditError):
            edits[1].commit()
        assert block.sizes == [[4, 6], [4, 6], [6, 4]]
    assert block.sizes == [[4, 5], [4, 5], [5, 4]]
    with pytest.raises(gn.errors.EditError):
        edits[1].commit()


def test_a_net_without_a_change_commits_nothing_and_is_no_part() -> None:
    block = Block()
    version = block.up.version
    with gn.edit(*block.nets) as edits:
        write(block, 0, edits[0])
        write(block, 2, edits[2])
        edits[1].cut(block.up.layers[0][:0].outgoing())
    assert block.up.version == version
    assert [one.receipt and one.receipt.joint.part for one in edits] == [0, None, 1]
    with pytest.raises(gn.errors.HistoryError):
        gn.undo(*block.nets)
    gn.undo(block.gate, block.down)
    with gn.edit(*block.nets) as edits:
        write(block, 0, edits[0])
    assert edits[0].receipt.joint is None  # a commit of one net is one like any other
    block.gate.undo()
    (receipt,) = gn.redo(block.gate)
    assert receipt.joint is None
    with gn.edit(*block.nets):
        pass
    assert block.versions == [5, 1, 2]


def test_a_trial_takes_effect_in_all_nets_at_once_and_is_taken_back() -> None:
    block = Block()
    x = torch.ones(2, 4)
    before = copy.deepcopy(contents(block))
    gradients = [p.grad.clone() for p in block.parameters()]
    with gn.edit(*block.nets, trial=True) as edits:
        for one, nodes in zip(edits, block.hidden(GONE), strict=True):
            one.remove_nodes(nodes, interface=True)
        with pytest.raises(gn.errors.EditError, match="trial"):
            block(x)
        assert edits[1].commit() is edits[1].receipt is not None
        assert block.sizes == [[4, 4], [4, 4], [4, 4]]
        block(x)
        with pytest.raises(gn.errors.EditError):
            edits[0].commit()
    torch.testing.assert_close(contents(block), before, rtol=0, atol=0)
    for parameter, gradient in zip(block.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert [len(net.history) for net in block.nets] == block.versions == [0, 1, 0]
    block.step()


def test_undo_and_redo_go_through_all_nets_and_training_between() -> None:
    block = Block()
    values = [net.transitions[0].values().detach().clone() for net in block.nets]
    edit(block)
    grown = block.hidden([4])[0].uids.tolist()
    receipts = gn.undo(*block.nets[::-1])  # in any order
    for net, value in zip(block.nets, values, strict=True):
        assert torch.equal(net.transitions[0].values(), value)
    assert [receipt.reason for receipt in receipts] == ["undo: other hidden units"] * 3
    assert sorted(receipt.joint.part for receipt in receipts) == [0, 1, 2]
    block.step()
    receipts = gn.redo(*block.nets)
    assert [receipt.reason for receipt in receipts] == ["redo: other hidden units"] * 3
    assert block.hidden([4])[0].uids.tolist() == grown
    block.step()
    gn.undo(*block.nets)
    assert block.versions == [4, 5, 4]
    for net in block.nets:
        gn.check(net)


def test_what_is_not_the_whole_of_one_transaction_is_not_undone() -> None:
    block = edited()
    other = edited()  # the same versions and reasons, and another transaction
    lonely = gn.GrapNet([4, 3])
    before = state(block)
    for nets in (
        block.nets[:2],
        (*block.nets[:2], other.down),
        (*block.nets, other.gate),
        (*block.nets[:2], copy.deepcopy(block.up)),
        (block.gate,),
        (block.gate, lonely, block.up, block.down),
    ):
        with pytest.raises(gn.errors.HistoryError):
            gn.undo(*nets)
    with pytest.raises(gn.errors.HistoryError):
        gn.redo(*block.nets)
    assert state(block) == before
    with block.up.edit() as one:
        one.cut(block.up.layers[0][1].outgoing())
    with pytest.raises(gn.errors.HistoryError):
        gn.undo(*block.nets)
    block.up.undo()
    gn.undo(*block.nets)


def test_undo_of_one_part_names_the_whole_and_goes_ahead_when_asked_for_alone() -> None:
    block = edited()
    before = state(block)
    with pytest.raises(gn.errors.HistoryError):
        block.gate.undo()
    assert state(block) == before
    gn.undo(*block.nets)
    with pytest.raises(gn.errors.HistoryError):
        block.gate.redo()
    block.gate.redo(alone=True)
    assert block.gate.sizes == [4, 5]
    with pytest.raises(gn.errors.HistoryError, match="net 1 of 3"):
        gn.redo(*block.nets)
    block.gate.undo()  # what was done alone is a commit like any other
    for net in block.nets[1:]:
        net.redo(alone=True)
    block.gate.redo()
    block.step()


def test_transactions_are_known_again_in_copies_and_files(tmp_path: Path) -> None:
    block = edited()
    nets = nn.ModuleList(block.nets)
    for n, net in enumerate(block.nets):
        gn.save(tmp_path / f"{n}.gn", net, undo=True)
    loaded = [gn.load(tmp_path / f"{n}.gn") for n in range(3)]
    with pytest.raises(gn.errors.HistoryError):
        loaded[0].undo()
    for found in (list(copy.deepcopy(nets)), list(pickle.loads(pickle.dumps(nets))), loaded):
        gn.undo(*found)
        assert [net.sizes for net in found] == [[4, 6], [4, 6], [6, 4]]
        gn.redo(*found)
    assert block.versions == [1, 2, 1]
    gn.undo(*block.nets)


def test_a_copy_follows_its_net_and_is_no_partner_of_it() -> None:
    block = Block()
    averaged = AveragedModel(block.gate)
    gn.attach(averaged, block.gate)
    edit(block)
    assert averaged.module.sizes == block.gate.sizes
    with (
        pytest.raises(gn.errors.EditError, match="copy"),
        gn.edit(averaged.module, block.gate) as edits,
    ):
        edits[1].cut(block.gate.layers[0][0].outgoing())
    assert averaged.module.version == block.gate.version == 1
    gn.undo(*block.nets)
    assert averaged.module.sizes == block.gate.sizes == [4, 6]
    with pytest.raises(gn.errors.HistoryError):
        gn.redo(averaged.module, *block.nets)


def test_replay_repeats_each_part_as_a_commit_of_its_own() -> None:
    block = edited()
    twin = gn.GrapNet([4, 6])
    twin.replay(block.gate.history)
    assert twin.layers[1].uids.tolist() == block.gate.layers[1].uids.tolist()
    assert twin.history[-1].joint is None
    twin.undo()
