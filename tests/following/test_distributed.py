"""Two processes stay bit-identical through edits, and whatever would part them is
refused on both.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import grapnet as gn
from grapnet.following._distributed import Distributed

# one worker, so that the two processes start once
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes saw in every check of tests/following/ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    root = Path(__file__).parents[2]
    strict = ["-W", "error", "-W", "ignore:a sparse transition runs slowly"]
    command = [sys.executable, *strict, "-m", "tests.following.ranks", str(folder)]
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
        written = [process.communicate(timeout=250)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(
        text[-3000:] for text in written
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def both(ranks: list[dict[str, Any]], check: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first = ranks[0][check]
    second = ranks[1][check]
    assert [found.get("raised") for found in (first, second)] == [None, None]
    return first, second


def test_layers_come_and_leave_on_all_ranks(ranks):
    first, second = both(ranks, "depth")
    assert first == second
    shallow = [6, 8, 7, 4]
    deep = [6, 6, 8, 10, 7, 4]
    assert first["sizes"] == [shallow, deep, deep, deep, shallow, deep, [6, 8, 10, 7, 4], deep]
    assert len(set(first["states"])) == 8
    assert first["names"][:2] == ["layers.1.bias", "layers.2.bias"]


def test_a_hundred_edits_of_every_kind_leave_the_ranks_bit_identical(ranks):
    first, second = both(ranks, "a_hundred_edits")
    assert first["version"] == second["version"] >= 100
    assert second["kinds"] == {}  # edits happened on rank 0 alone
    edits = {"cut", "connect", "add", "remove", "freeze", "unfreeze", "assign"}
    edits |= {"undo", "redo", "trial"}
    assert all(first["kinds"][kind] >= 5 for kind in edits)
    assert first["frozen"] > 0
    assert first["slots"] > 20  # Adam had state to follow with
    assert first["states"] == second["states"]
    # and something changed in between
    assert len(set(first["states"])) == len(first["states"]) > 15
    assert first["limit"] == second["limit"] == 100  # rank 1 began with 3


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
    assert first["refused"][0] == "TopologyError"


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


def test_the_spaces_of_an_adopted_model_are_edited_on_all_ranks(ranks):
    first, second = both(ranks, "adopted_model")
    assert first == second
    assert len(set(first["states"])) == 8
    assert first["sizes"] == [6, 6 * 9]


def test_a_pruning_with_repair_leaves_the_ranks_bit_identical(ranks):
    first, second = both(ranks, "pruned_and_repaired")
    assert first["states"] == second["states"]
    assert first["sizes"] == second["sizes"] == [6, 4]
    assert all(assigned > 0 for assigned in first["own"])
    assert not second["own"]


def test_a_stale_model_raises_until_it_is_synchronized(ranks):
    first, second = both(ranks, "stale")
    for name in ("edit", "trial", "inference", "attention", "cast"):
        assert first[name][0] == "StaleTopologyError"
    for rank in (first, second):
        assert rank["edit, synchronized"] == rank["trial, synchronized"] == ["nothing", ""]
        assert rank["nothing to do"]  # the wrapper stays
        assert rank["version"] == 2
    assert first["state"] == second["state"]


def test_processes_of_different_groups_go_their_own_ways(ranks):
    first, second = both(ranks, "alone_in_a_group")
    assert (first["version"], second["version"]) == (2, 3)
    assert first["kept"]
    assert second["kept"]
    assert first["state"] != second["state"]


def test_all_ranks_refuse_alike(ranks):
    first, second = both(ranks, "refused")
    assert first == second
    kinds = {name: kind for name, (kind, _) in first.items()}
    assert kinds == {
        "edit on rank 1": "TopologyError",
        "again": "TopologyError",
        "the same edit on all": "nothing",
        "other edits on all": "TopologyError",
        "a rank cannot follow": "TopologyError",
        "nothing to undo with": "TopologyError",
        "open edit": "EditError",
        "inference mode": "EditError",
    }
    # The reason of the commit that was made elsewhere than on rank 0.
    assert "cut 1 ✓" in first["edit on rank 1"][1]


def test_undo_beyond_what_the_other_process_would_keep_is_repeated(ranks):
    first, second = both(ranks, "undo_beyond_the_limit")
    assert first == second == {"version": 60, "limit": 2, "unchanged": True}


def test_a_transaction_over_several_nets_is_reverted_on_all_ranks(ranks):
    first, second = both(ranks, "parts_of_a_transaction")
    assert first == second
    versions = {verb: [version for version, _ in nets] for verb, nets in first.items()}
    assert versions == {"undo": [2, 2], "redo": [3, 3]}
    for (_, whole), (_, without) in zip(first["undo"], first["redo"], strict=True):
        assert without == whole - 2


def test_the_script_of_the_guide_keeps_the_ranks_equal(ranks):
    first, second = both(ranks, "the_guide")
    assert first == second
    assert first["reasons"] == ["drop the weakest twentieth"] * 3


def test_without_processes_it_says_what_to_call():
    with pytest.raises(RuntimeError, match="init_process_group"):
        Distributed(gn.GrapNet([3, 2]))


def test_a_module_without_a_net_is_refused():
    with pytest.raises(ValueError, match="Linear"):
        Distributed(nn.Linear(2, 2))


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every message that a model sends."""
    sizes = []
    broadcast = dist.broadcast_object_list

    def record(objects: list[bytes], *args: Any, **options: Any) -> None:
        sizes.append(len(objects[0]))
        broadcast(objects, *args, **options)

    monkeypatch.setattr(dist, "broadcast_object_list", record)
    return sizes


@pytest.mark.usefixtures("one_rank")
def test_the_biases_of_removed_nodes_are_not_sent(sent):
    for dtype in (torch.float32, torch.float64):
        net = gn.GrapNet.from_relations([1, 3_001, 1], [([0], [0]), ([0], [0])], dtype=dtype)
        model = Distributed(net)
        with net.edit() as edit:
            edit.remove_nodes(net.layers[1][1:])
        model.synchronize()
    # A value that is sent takes four bytes more in double precision.
    assert abs(sent[1] - sent[0]) < 3_000


@pytest.mark.usefixtures("one_rank")
def test_a_cut_relation_costs_twelve_bytes_and_an_undo_a_few(sent):
    net = gn.GrapNet([200, 100, 1])
    model = Distributed(net)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=10_000))
    model.synchronize()
    net.undo()
    model.synchronize()
    assert 120_000 < sent[0] < 125_000
    assert sent[1] < 2_000


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_net_is_not_edited_and_has_no_optimizer_attached():
    net = gn.GrapNet([4, 6, 2])
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    relations = net.layers[0].outgoing()[:12]
    with pytest.raises(gn.errors.GrapNetError):
        gn.attach(optimizer, net)
    with pytest.raises(gn.errors.GrapNetError), net.edit() as edit:
        edit.cut(relations)
    assert net.version == 0
