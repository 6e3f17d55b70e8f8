"""One transaction over several nets: a fault anywhere leaves all of them as they were."""

import copy
from contextlib import suppress

import pytest
import torch
from torch.nn import functional

import grapnet as gn
from tests.core.gated import (
    ACTIONS,
    GONE,
    Block,
    assert_equal,
    contents,
    edit,
    edit_one_by_one,
    state,
    write,
)
from tests.core.test_faults import Fault, Injection
from tests.fingerprint import fingerprint


def test_hidden_units_leave_all_nets_at_once_and_the_rest_computes_on() -> None:
    block = Block(torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64)
    keep = [row for row in range(6) if row not in GONE]
    gate, up, down = (net.to_module()[0] for net in block.nets)
    hidden = functional.silu(gate(x)) * up(x)
    expected = hidden[:, keep] @ down.weight[:, keep].T + down.bias
    versions = [net.version for net in block.nets]
    with gn.edit_together(*block.nets, reason="remove hidden units", by="me") as edits:
        for one, nodes in zip(edits, block.hidden(GONE), strict=True):
            one.remove_nodes(nodes, interface=True)
        # nothing takes effect inside the block
        assert [net.version for net in block.nets] == versions
    torch.testing.assert_close(block(x), expected)
    assert [net.sizes for net in block.nets] == [[4, 4], [4, 4], [4, 4]]
    assert [net.version for net in block.nets] == [version + 1 for version in versions]
    receipts = [one.receipt for one in edits]
    assert [net.history[-1] for net in block.nets] == receipts
    assert {(receipt.reason, receipt.by, receipt.joint.parts) for receipt in receipts} == {
        ("remove hidden units", "me", 3)
    }
    assert [receipt.joint.part for receipt in receipts] == [0, 1, 2]
    assert len({receipt.joint.name for receipt in receipts}) == 1
    assert "part 2 of 3" in repr(receipts[1])
    for net in block.nets:
        gn.check(net)
    block.step()


def test_one_optimizer_over_all_nets_follows_as_it_follows_edits_one_by_one() -> None:
    together, alone = Block(), Block()
    torch.manual_seed(1)
    edit(together)
    torch.manual_seed(1)
    edit_one_by_one(alone)
    assert_equal(together, alone)
    for block in (together, alone):
        block.step()
    gn.undo_together(*together.nets)
    for net in alone.nets:
        net.undo()
    assert_equal(together, alone)  # the slots of what came back included
    for block in (together, alone):
        block.step()
    gn.redo_together(*together.nets)
    for net in alone.nets:
        net.redo()
    for block in (together, alone):
        block.step()
    assert_equal(together, alone)
    assert (
        [net.version for net in together.nets] == [net.version for net in alone.nets] == [3, 4, 3]
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_a_fault_at_any_call_before_the_swap_changes_no_net(action: str) -> None:
    make, act = ACTIONS[action]
    twin, block = make(), make()
    state(twin)  # runs the nets, as `state(block)` below does, so that both have the same plans
    with Injection() as notes:
        act(twin)
    assert notes.swapping
    count = len(notes.calls)
    before = state(block)
    # in every net; test_faults.py tries all of one
    numbers = {
        *range(0, count, count // 15),
        count - 1,
    }
    for number in numbers:
        with Injection(number) as injection, suppress(Fault):
            act(block)
        assert injection.calls == notes.calls[: number + 1]  # it failed, and where it should
        assert state(block) == before, injection.calls[-1]
    act(block)  # the same goes through once nothing fails
    assert [net.version for net in block.nets] == [net.version for net in twin.nets]


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("action", ACTIONS)
def test_a_follower_of_any_net_that_refuses_stops_all_of_them(action: str, place: int) -> None:
    make, act = ACTIONS[action]
    block = make()
    loss = block(torch.ones(2, 4)).sum()
    before, told = state(block), [follower.told for follower in block.followers]
    block.followers[place].refuses = True
    with pytest.raises(Fault):
        act(block)
    assert state(block) == before
    loss.backward()  # a forward pass of before is not stale
    block.followers[place].refuses = False
    act(block)
    assert [follower.told for follower in block.followers] == [number + 1 for number in told]
    block.step()


def test_without_it_a_failing_third_edit_leaves_the_first_two_changed() -> None:
    block = Block()
    before = state(block)[0]
    block.followers[-1].refuses = True
    with pytest.raises(Fault):
        edit_one_by_one(block)
    changed = [now != then for now, then in zip(state(block)[0], before, strict=True)]
    assert changed[:2] == [True, True]
    assert block.down.sizes == [6, 4]
    with pytest.raises(ValueError, match="expects x of shape"):
        block(torch.ones(2, 4))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("own_generator", [True, False])
def test_an_impossible_request_in_one_net_stops_all_and_gives_the_random_numbers_back(
    place: int, own_generator: bool
) -> None:
    block = Block()
    generator = torch.Generator().manual_seed(3) if own_generator else None
    before, drawn = state(block), generator and generator.get_state()
    with pytest.raises(gn.EditError, match="already"):
        connect_what_is_related(block, place, generator)
    assert state(block) == before
    assert generator is None or torch.equal(generator.get_state(), drawn)
    edit(block)


def connect_what_is_related(block: Block, place: int, generator: torch.Generator | None) -> None:
    with gn.edit_together(*block.nets, generator=generator) as edits:
        for n, one in enumerate(edits):
            write(block, n, one)
        edits[place].connect(block.nets[place].layers[0][0], block.nets[place].layers[1][0])


def test_an_optimizer_that_cannot_follow_one_net_stops_all() -> None:
    block = Block()
    block.optimizer.state[block.down.transitions[0].weight]["odd"] = torch.zeros(2, 3)
    before = state(block)
    with pytest.raises(gn.OptimizerError, match="odd"):
        edit(block)
    assert state(block) == before


def ask_for_a_layer_that_is_not_there(block: Block) -> None:
    with gn.edit_together(*block.nets) as edits:
        for n, one in enumerate(edits):
            write(block, n, one)
        edits[2].add_nodes(7, 1)


def test_an_error_inside_the_block_or_while_it_opens_changes_nothing() -> None:
    block = Block()
    before = state(block)
    with pytest.raises(gn.EditError, match="no layer 7"):
        ask_for_a_layer_that_is_not_there(block)
    with block.down.edit(reason="another"), pytest.raises(gn.EditError, match="'another'"):
        edit(block)
    with block.down.edit(reason="another"), pytest.raises(gn.EditError, match="'another'"):
        gn.undo_together(*block.nets)
    with torch.inference_mode(), pytest.raises(gn.EditError, match="inference_mode"):
        edit(block)
    assert state(block) == before
    edit(block)  # no edit was left open


@pytest.mark.parametrize("verb", ["edit", "undo", "redo"])
def test_nets_are_given_one_by_one_and_once(verb: str) -> None:
    block = Block()
    together = (
        getattr(gn, f"{verb}_together")
        if verb != "edit"
        else lambda *nets: gn.edit_together(*nets).__enter__()
    )
    with pytest.raises(gn.EditError, match="got none"):
        together()
    with pytest.raises(gn.EditError, match="number 1 and 3"):
        together(block.gate, block.up, block.gate)
    with pytest.raises(TypeError, match=r"\*nets"):
        together(list(block.nets))
    with pytest.raises(TypeError, match="got Block"):
        together(block.gate, block)
    edit(block)


def test_commit_of_one_of_the_edits_is_refused_and_the_block_goes_on() -> None:
    block = Block()
    with gn.edit_together(*block.nets) as edits:
        for n, one in enumerate(edits):
            write(block, n, one)
        with pytest.raises(gn.EditError, match="when its block ends"):
            edits[1].commit()
        assert [net.sizes for net in block.nets] == [[4, 6], [4, 6], [6, 4]]
    assert [net.sizes for net in block.nets] == [[4, 5], [4, 5], [5, 4]]
    with pytest.raises(gn.EditError, match="not open"):
        edits[1].commit()


def test_a_net_without_a_change_commits_nothing_and_is_no_part() -> None:
    block = Block()
    before = fingerprint(block.up, block.optimizer)
    with gn.edit_together(*block.nets) as edits:
        write(block, 0, edits[0])
        write(block, 2, edits[2])
        edits[1].cut(block.up.layers[0][:0].outgoing())
    assert fingerprint(block.up, block.optimizer)["version"] == before["version"]
    assert [one.receipt and one.receipt.joint.part for one in edits] == [0, None, 1]
    with pytest.raises(gn.HistoryError, match="exactly the nets"):
        gn.undo_together(*block.nets)
    gn.undo_together(block.gate, block.down)
    with gn.edit_together(*block.nets) as edits:
        write(block, 0, edits[0])
    assert edits[0].receipt.joint is None  # a commit of one net is one like any other
    block.gate.undo()
    (receipt,) = gn.redo_together(block.gate)
    assert receipt.joint is None
    with gn.edit_together(*block.nets):
        pass
    assert [net.version for net in block.nets] == [5, 1, 2]


def test_a_trial_takes_effect_in_all_nets_at_once_and_is_taken_back() -> None:
    block, x = Block(), torch.ones(2, 4)
    before, output = copy.deepcopy(contents(block)[:2]), block(x)
    gradients, history = (
        [p.grad.clone() for p in block.parameters()],
        [list(net.history) for net in block.nets],
    )
    with gn.edit_together(*block.nets, trial=True) as edits:
        for one, nodes in zip(edits, block.hidden(GONE), strict=True):
            one.remove_nodes(nodes, interface=True)
        with pytest.raises(gn.EditError, match="trial"):
            block(x)
        assert edits[1].commit() is edits[1].receipt is not None
        assert [net.sizes for net in block.nets] == [[4, 4], [4, 4], [4, 4]]
        block(x)
        with pytest.raises(gn.EditError, match="not open"):
            edits[0].commit()
    torch.testing.assert_close(contents(block)[:2], before, rtol=0, atol=0)
    assert torch.equal(block(x), output)
    assert all(
        torch.equal(p.grad, gradient)
        for p, gradient in zip(block.parameters(), gradients, strict=True)
    )
    assert [list(net.history) for net in block.nets] == history
    assert [net.version for net in block.nets] == [0, 1, 0]
    block.step()


def try_and_refuse_at_the_end(block: Block) -> None:
    with gn.edit_together(*block.nets, trial=True) as edits:
        for n, one in enumerate(edits):
            write(block, n, one)
        edits[0].commit()
        block.followers[2].refuses = True  # of the second net


def test_a_trial_that_fails_halfway_or_at_its_end_leaves_every_net_as_it_was() -> None:
    block = Block()
    before = state(block)
    block.followers[-1].refuses = True
    with gn.edit_together(*block.nets, trial=True) as edits:
        for n, one in enumerate(edits):
            write(block, n, one)
        with pytest.raises(Fault):
            edits[0].commit()
        with pytest.raises(gn.EditError, match="not open"):
            edits[2].commit()
    assert state(block) == before
    block.followers[-1].refuses = False
    with pytest.raises(Fault):
        try_and_refuse_at_the_end(block)
    assert [net.sizes for net in block.nets] == [[4, 6], [4, 6], [6, 4]]
    assert [net.version for net in block.nets] == [0, 1, 0]
    for net in block.nets:
        gn.check(net)
