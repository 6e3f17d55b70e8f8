"""The way back of one transaction over several nets: in all of them or in none, and known again in
copies and files.
"""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from grapnet.rules import ActivationRecorder
from tests.checkpoint.files import build, parse
from tests.core.gated import GONE, Block, edit, edited, state


def test_undo_and_redo_go_through_all_nets_and_training_between() -> None:
    block = Block()
    values = [net.transitions[0].values().detach().clone() for net in block.nets]
    edit(block)
    grown = block.hidden([4])[0].uids.tolist()
    receipts = gn.undo_together(*block.nets[::-1])  # in any order
    for net, value in zip(block.nets, values, strict=True):
        assert torch.equal(net.transitions[0].values(), value)
    assert [receipt.reason for receipt in receipts] == ["undo: other hidden units"] * 3
    assert sorted(receipt.joint.part for receipt in receipts) == [0, 1, 2]
    block.step()
    receipts = gn.redo_together(*block.nets)
    assert [receipt.reason for receipt in receipts] == ["redo: other hidden units"] * 3
    assert block.hidden([4])[0].uids.tolist() == grown
    block.step()
    gn.undo_together(*block.nets)
    gn.redo_together(*block.nets)
    block.step()
    assert [net.version for net in block.nets] == [5, 6, 5]
    for net in block.nets:
        gn.check(net)


def test_what_is_not_the_whole_of_one_transaction_is_not_undone() -> None:
    block, other = edited(), edited()  # the same versions and reasons, and another transaction
    lonely = gn.GrapNet([4, 3])
    before = state(block)
    for nets in (
        block.nets[:2],
        (*block.nets[:2], other.down),
        (*block.nets, other.gate),
        (*block.nets[:2], copy.deepcopy(block.up)),
        (block.gate,),
    ):
        with pytest.raises(gn.HistoryError, match="not the whole of one transaction"):
            gn.undo_together(*nets)
    with pytest.raises(gn.HistoryError, match="net 2 of 4: there is nothing to undo"):
        gn.undo_together(block.gate, lonely, block.up, block.down)
    with pytest.raises(gn.HistoryError, match="net 1 of 3: there is nothing to redo"):
        gn.redo_together(*block.nets)
    assert state(block) == before
    with block.up.edit() as one:
        one.cut(block.up.layers[0][1].outgoing())
    with pytest.raises(gn.HistoryError, match="not the whole"):
        gn.undo_together(*block.nets)
    block.up.undo()
    gn.undo_together(*block.nets)


def test_undo_of_one_part_names_the_whole_and_goes_ahead_when_asked_for_alone() -> None:
    block = edited()
    before = state(block)
    with pytest.raises(
        gn.HistoryError, match=r"3 nets.*gn\.undo_together.*net\.undo\(alone=True\)"
    ):
        block.gate.undo()
    assert state(block) == before
    gn.undo_together(*block.nets)
    with pytest.raises(gn.HistoryError, match=r"gn\.redo_together.*net\.redo\(alone=True\)"):
        block.gate.redo()
    block.gate.redo(alone=True)
    assert block.gate.sizes == [4, 5]
    with pytest.raises(gn.HistoryError, match="net 1 of 3"):
        gn.redo_together(*block.nets)
    block.gate.undo()  # what was done alone is a commit like any other
    for net in block.nets[1:]:
        net.redo(alone=True)
    block.gate.redo()
    block.step()


def test_transactions_are_known_again_in_copies_and_files(tmp_path: Path) -> None:
    block = edited()
    copied = copy.deepcopy(nn.ModuleList(block.nets))
    pickled = pickle.loads(pickle.dumps(nn.ModuleList(block.nets)))
    for n, net in enumerate(block.nets):
        gn.save(tmp_path / f"{n}.gn", net, undo=True)
    loaded = [gn.load(tmp_path / f"{n}.gn") for n in range(3)]
    with pytest.raises(gn.HistoryError, match="undo_together"):
        loaded[0].undo()
    for nets in (list(copied), list(pickled), loaded):
        gn.undo_together(*nets)
        assert [net.sizes for net in nets] == [[4, 6], [4, 6], [6, 4]]
        gn.redo_together(*nets)
    assert [net.version for net in block.nets] == [1, 2, 1]
    gn.undo_together(*block.nets)


@pytest.mark.parametrize(
    "joint", ["x", [], ["x"], ["x", 3, 3], ["", 0, 2], ["x", 0, 1], ["x", -1, 2]], ids=str
)
def test_a_file_that_lies_about_a_transaction_is_refused(joint: Any, tmp_path: Path) -> None:
    path = tmp_path / "net.gn"
    gn.save(path, edited().gate)
    document, tensors = parse(path.read_bytes())
    outline = json.loads(bytes(tensors["journal.text"].tolist()))
    assert len(outline[3]) == 3
    outline[3] = joint
    text = json.dumps(outline).encode()
    tensors["journal.text"] = torch.tensor(list(text), dtype=torch.uint8)
    tensors["journal.numbers"][0, -1] = len(text)
    path.write_bytes(build(json.dumps(document), tensors))
    with pytest.raises(gn.CheckpointError, match=r"journal\.text"):
        gn.load(path)


def test_copies_and_recorders_follow_each_net_and_a_following_copy_is_no_partner() -> None:
    block = Block()
    averaged, recorder = AveragedModel(block.gate), ActivationRecorder(1)
    gn.attach(averaged, block.gate)
    recorder.arm(block.gate)
    block.step()
    seen = recorder.mean.clone()
    edit(block)
    keep = [row for row in range(6) if row not in GONE]
    assert torch.equal(recorder.mean[:4], seen[keep])
    assert averaged.module.sizes == block.gate.sizes
    with (
        pytest.raises(gn.EditError, match="copy"),
        gn.edit_together(averaged.module, block.gate) as edits,
    ):
        edits[1].cut(block.gate.layers[0][0].outgoing())
    assert averaged.module.version == block.gate.version == 1
    gn.undo_together(*block.nets)
    assert averaged.module.sizes == block.gate.sizes == [4, 6]
    with pytest.raises(gn.HistoryError):
        gn.redo_together(averaged.module, *block.nets)


def test_replay_repeats_each_part_as_a_commit_of_its_own() -> None:
    block = edited()
    twin = gn.GrapNet([4, 6])
    twin.replay(block.gate.history)
    assert twin.layers[1].uids.tolist() == block.gate.layers[1].uids.tolist()
    assert twin.history[-1].joint is None
    twin.undo()
