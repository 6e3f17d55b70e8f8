"""gn.Distributed: two processes stay bit-identical through edits, and whatever would part them is
refused on both.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.learning.agreement import Outbox, pack, repeat, unpack
from grapnet.learning.distributed import Distributed

# one worker, so that the two processes start once
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes saw in every check of tests/learning/ranks.py."""
    folder, root = tmp_path_factory.mktemp("ranks"), Path(__file__).parents[2]
    command = [sys.executable, "-W", "error", "-m", "tests.learning.ranks", str(folder)]
    settings: dict[str, Any] = {
        "cwd": root,
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
        "text": True,
    }
    started = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, **settings)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=250)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(
        text[-3000:] for text in said
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def both(ranks: list[dict[str, Any]], check: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = ranks[0][check], ranks[1][check]
    assert [found.get("raised") for found in (first, second)] == [None, None]
    return first, second


def test_a_hundred_edits_of_every_kind_leave_the_ranks_bit_identical(ranks):
    first, second = both(ranks, "a_hundred_edits")
    assert first["version"] == second["version"] >= 100
    assert second["kinds"] == {}  # edits happened on rank 0 alone
    edits = {"cut", "connect", "add", "remove", "freeze", "unfreeze", "undo", "redo", "trial"}
    assert all(first["kinds"][kind] >= 5 for kind in edits)
    assert first["frozen"] > 0
    assert first["slots"] > 100  # Adam had state to follow with
    assert first["states"] == second["states"]
    # and something changed in between
    assert len(set(first["states"])) == len(first["states"]) > 15
    assert first["limit"] == second["limit"] == 100  # rank 1 began with 3


@pytest.mark.parametrize("kind", ["cut", "add", "trial"])
def test_a_plain_wrapper_drifts_apart_in_silence(ranks, kind):
    first, second = (rank[kind] for rank in both(ranks, "a_plain_wrapper"))
    assert first["before"] == second["before"]
    assert first["after"] != second["after"]
    assert first["error"] == second["error"] == ["nothing", ""]


def test_gradients_are_averages_after_edits_also_when_accumulated(ranks):
    for rank in both(ranks, "gradients"):
        assert rank["error"] < 1e-13 < rank["before"]
        assert rank["hook calls"] == 1  # the hook outlives the wrapper it was given to
    first, second = both(ranks, "gradients")
    assert first["state"] == second["state"]


def test_parameters_without_coordinates_are_no_obstacle(ranks):
    first, second = both(ranks, "frozen_and_empty")
    assert first == second
    assert set(first) == {"gradient_as_bucket_view", "find_unused_parameters", "static_graph"}
    assert all(found["sizes"] == [0, 0] and found["free"] == 0 for found in first.values())
    assert len({found["state"] for found in first.values()}) == 1  # the option changes nothing


def test_the_first_values_are_those_of_rank_0_and_the_graphs_must_be_equal(ranks):
    first, second = both(ranks, "first_values")
    assert first["before"] == first["after"] == second["after"] != second["before"]
    assert first["refused"] == second["refused"]
    kind, text = first["refused"]
    assert kind == "TopologyError"
    assert "rank 1 has [GrapNet(4-3-2, 17 relations" in text


def test_nets_inside_a_module_are_all_followed(ranks):
    first, second = both(ranks, "inside_a_host")
    assert first == second
    assert first["own"]
    assert first["names"] == []  # every name begins with "module."
    assert first["same"]
    assert first["modes"] == [False, False, False]
    assert first["old wrapper"]
    assert len({str(found) for found in first["states"]}) == 4
    assert first["copy"][0] == "TypeError"
    assert ".module" in first["copy"][1]


def test_a_stale_model_raises_until_it_is_synchronized(ranks):
    first, second = both(ranks, "stale")
    for name in ("edit", "trial", "inference", "attention", "cast"):
        kind, text = first[name]
        assert kind == "StaleTopologyError"
        assert "Call synchronize() on every rank" in text
    assert "version 0 was synchronized and 1 is here" in first["edit"][1]
    for rank in (first, second):
        assert rank["edit, synchronized"] == rank["trial, synchronized"] == ["nothing", ""]
        assert rank["nothing to do"]  # the wrapper stays
        assert rank["version"] == 2
    assert first["state"] == second["state"]


def test_processes_of_different_groups_go_their_own_ways(ranks):
    first, second = both(ranks, "alone_in_a_group")
    assert (first["version"], second["version"]) == (1, 2)
    assert first["state"] != second["state"]


def test_all_ranks_refuse_in_the_same_words(ranks):
    first, second = both(ranks, "refused")
    assert first == second
    expected = {
        "edit on rank 1": "1 on rank 1 (the last: 'cut 1')",
        "again": "1 on rank 1 (the last: 'cut 1')",
        "other edits on all": "rank 1 has [GrapNet(6-8-7-4, ",
        "a rank cannot follow": (
            "rank 1 could not follow: OptimizerError: this rank's follower refuses"
        ),
        "nothing to undo with": (
            "takes back commit 1, of which this process no longer keeps the values"
        ),
    }
    for name, words in expected.items():
        kind, text = first[name]
        assert kind == "TopologyError"
        assert words in text
        assert "load one checkpoint on all ranks" in text
    for name in ("open edit", "inference mode"):
        kind, text = first[name]
        assert kind == "EditError"
        assert "nothing was changed (rank 1: EditError" in text
    assert first["the same edit on all"] == ["nothing", ""]


def test_the_script_of_the_guide_keeps_the_ranks_equal(ranks):
    first, second = both(ranks, "the_guide")
    assert first == second
    assert first["reasons"] == ["drop the weakest twentieth"] * 3


def test_without_processes_it_says_what_to_call():
    with pytest.raises(RuntimeError, match="init_process_group"):
        Distributed(gn.GrapNet([3, 2]))


def test_a_module_without_a_net_is_refused():
    with pytest.raises(ValueError, match="this Linear holds no GrapNet"):
        Distributed(nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_commits_travel_as_bytes_and_share_what_they_share(dtype):
    nets = [
        gn.GrapNet([4, 5, 3], dtype=dtype, generator=torch.Generator().manual_seed(0))
        for _ in range(2)
    ]
    outbox = Outbox(nets[0])
    with nets[0].edit(reason="grow ✓", by="me") as edit:
        new = edit.add_nodes(1, 2, owner="new")
        edit.connect(nets[0].layers[0], new)
        edit.freeze(nets[0].layers[1][0])
        edit.cut(nets[0].layers[1].outgoing().smallest(count=3))
        edit.remark("why", score=0.1, count=3, certain=True, nothing=None)
    message = pack(outbox.letter())
    assert message.dtype == torch.uint8
    repeat(nets[1], unpack(message))
    assert all(
        torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(nets[0].buffers(), nets[1].buffers(), strict=True))
    first, second = nets[0].history[0], nets[1].history[0]
    assert (first.reason, first.by, first.operations) == (
        second.reason,
        second.by,
        second.operations,
    )
    with pytest.raises(TypeError, match="not a set"):
        pack({"a": {1, 2}})


def test_undo_beyond_what_the_other_process_would_keep_is_repeated():
    nets = [gn.GrapNet([10, 10, 3], generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    outbox, states = Outbox(nets[0]), [net.state_dict() for net in nets]
    nets[0].journal.undo_limit = 40
    for _ in range(30):
        with nets[0].edit() as edit:
            edit.cut(nets[0].layers[0].outgoing().smallest(count=2))
    for _ in range(30):
        nets[0].undo()
    nets[0].journal.undo_limit = 2
    repeat(nets[1], unpack(pack(outbox.letter())))
    assert [net.version for net in nets] == [60, 60]
    assert [net.journal.undo_limit for net in nets] == [2, 2]
    for net, before in zip(nets, states, strict=True):
        assert all(torch.equal(before[name], now) for name, now in net.state_dict().items())


def test_a_cut_relation_costs_thirteen_bytes_and_an_undo_nothing():
    net = gn.GrapNet([200, 100, 1])
    outbox = Outbox(net)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=10_000))
    cut = len(pack(outbox.letter()))
    assert 130_000 < cut < 132_000
    net.undo()
    assert len(pack(outbox.letter())) - cut < 300
