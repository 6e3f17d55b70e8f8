"""Further known defects: every test marked as an expected failure states the wanted behaviour.

A mark is strict, so the change that cures a defect has to remove it. Tests without a mark are
controls: they show that the failure beside them comes from the defect and not from the set-up.

Run as a program, this file carries out PROGRAMS, each on two ranks that may end their processes.
"""

import copy
import datetime
import functools
import json
import multiprocessing
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from tests.execution.graphs import SHAPES
from tests.fingerprint import fingerprint

ROOT = Path(__file__).parents[2]


class SetupError(Exception):
    """The premise of a test does not hold, so that its failure would mean nothing."""


def ensure(premise: bool) -> None:
    """Raises SetupError, which no mark in this file expects, where a premise does not hold."""
    if not premise:
        raise SetupError


def cut(net: gn.GrapNet, child: int, reason: str = "cut") -> None:
    """Cuts the relation from the first node to the child with this uid."""
    with net.edit(reason=reason) as edit:
        edit.cut(net.layers[0][0].outgoing(to=[child]))


def children(net: gn.GrapNet) -> list[int]:
    """Returns the uids of the first node's children."""
    return [child.uid for child in net.layers[0][0].children]


# N1: a copy with another order of commits


def averaged_copy(net: gn.GrapNet, cuts: list[int]) -> AveragedModel:
    """Returns an average of a net, in which the first node then loses children one by one."""
    averaged = AveragedModel(net)
    for child in cuts:
        cut(averaged.module, child)
    return averaged


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="N1: a copy that made the same cuts in another order restores another relation",
)
def test_a_copy_with_another_order_of_cuts_is_refused_or_restores_the_same_relation() -> None:
    net = gn.GrapNet([4, 3, 2])
    averaged = averaged_copy(net, cuts=[6, 5])
    cut(net, 5)
    cut(net, 6)
    ensure(children(net) == [4])
    ensure(children(averaged.module) == [4])
    try:
        gn.attach(averaged, net)
    except gn.GrapNetError:
        return
    net.undo()
    ensure(children(net) == [4, 6])
    assert children(averaged.module) == [4, 6]


def test_a_copy_with_the_same_order_of_cuts_restores_the_same_relation() -> None:
    net = gn.GrapNet([4, 3, 2])
    averaged = averaged_copy(net, cuts=[5, 6])
    cut(net, 5)
    cut(net, 6)
    gn.attach(averaged, net)
    net.undo()
    assert children(net) == [4, 6]
    assert children(averaged.module) == [4, 6]


# N2: a copy whose journal keeps less than the net's


def net_and_copy_after_a_cut() -> tuple[gn.GrapNet, gn.GrapNet]:
    """Returns a net and its attached copy, which have both lost the relation from 0 to 4."""
    net = gn.GrapNet([4, 3, 2])
    twin = copy.deepcopy(net)
    gn.attach(twin, net)
    cut(net, 4)
    ensure(children(twin) == [5, 6])
    return net, twin


def require_consistent(net: gn.GrapNet) -> None:
    gn.check(net)
    assert net.version == net.history[-1].version


@pytest.mark.xfail(
    strict=True,
    raises=IndexError,
    reason="N2: a copy whose undo_limit was lowered breaks off the undo of the net half-way",
)
def test_undo_works_or_is_refused_when_the_copy_keeps_less() -> None:
    net, twin = net_and_copy_after_a_cut()
    twin.journal.undo_limit = 0
    net_before = fingerprint(net)
    twin_before = fingerprint(twin)
    try:
        net.undo()
    except gn.GrapNetError:
        assert fingerprint(net) == net_before
        assert fingerprint(twin) == twin_before
    else:
        assert children(net) == [4, 5, 6]
        assert children(twin) == [4, 5, 6]
    require_consistent(net)
    require_consistent(twin)


def test_undo_works_when_the_copy_keeps_just_enough() -> None:
    net, twin = net_and_copy_after_a_cut()
    twin.journal.undo_limit = 1
    net.undo()
    assert children(net) == [4, 5, 6]
    assert children(twin) == [4, 5, 6]
    require_consistent(net)
    require_consistent(twin)


def test_undo_is_refused_when_the_net_keeps_nothing() -> None:
    net, twin = net_and_copy_after_a_cut()
    net.journal.undo_limit = 0
    net_before = fingerprint(net)
    twin_before = fingerprint(twin)
    with pytest.raises(gn.HistoryError):
        net.undo()
    assert fingerprint(net) == net_before
    assert fingerprint(twin) == twin_before


# N3 and N4: what two ranks send each other


def synchronize_in_an_open_edit(rank: int, character: str) -> None:
    """Synchronizes while rank 0 has a commit to send and an edit open, both with long reasons.

    Both ranks refuse, and rank 1 follows once the edit is closed.
    """
    reason = 300 * character
    net = gn.GrapNet([4, 3, 2])
    model = gn.Distributed(net)
    if rank == 0:
        cut(net, 4, reason)
        with net.edit(reason=reason):
            require_refused(model.synchronize)
    else:
        require_refused(model.synchronize)
        assert net.version == 0
    model.synchronize()
    require_followed(net)


def synchronize_on_a_device(rank: int, device: str) -> None:
    """Sends a commit of rank 0 to rank 1 while `device` is the default device."""
    net = gn.GrapNet([4, 3, 2])
    model = gn.Distributed(net)
    if rank == 0:
        cut(net, 4)
    with torch.device(device):
        model.synchronize()
    require_followed(net)
    model(torch.ones(2, 4)).sum().backward()


def require_refused(synchronize: Callable[[], None]) -> None:
    with pytest.raises(gn.EditError):
        synchronize()


def require_followed(net: gn.GrapNet) -> None:
    assert children(net) == [5, 6]
    require_consistent(net)


PROGRAMS: dict[str, Callable[[int], None]] = {
    "six_bytes": functools.partial(synchronize_in_an_open_edit, character="é"),
    "twelve_bytes": functools.partial(synchronize_in_an_open_edit, character="\N{SEEDLING}"),
    "cpu": functools.partial(synchronize_on_a_device, device="cpu"),
    "meta": functools.partial(synchronize_on_a_device, device="meta"),
}


def run_rank(name: str, folder: str, rank: int) -> None:
    """Carries out one of PROGRAMS; a rank that fails closes the connection to the other."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=20),
    )
    PROGRAMS[name](rank)
    dist.destroy_process_group()


def run_programs(folder: str) -> None:
    """Writes the exit codes of both ranks of every program to `exit_codes.json`."""
    context = multiprocessing.get_context("fork")
    exit_codes = {}
    for name in PROGRAMS:
        ranks = [context.Process(target=run_rank, args=(name, folder, rank)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        exit_codes[name] = [process.exitcode for process in ranks]
    Path(folder, "exit_codes.json").write_text(json.dumps(exit_codes))


@pytest.fixture(scope="module")
def exit_codes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The exit codes of both ranks of every program; a negative one is that of a signal."""
    if sys.platform == "darwin":
        pytest.skip("forked processes are unsafe on macOS")
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.defects.test_found_later", str(folder)]
    subprocess.run(command, cwd=ROOT, timeout=120, check=True)
    return json.loads((folder / "exit_codes.json").read_text())


@pytest.mark.xdist_group("found_later")
def test_ranks_refuse_whatever_characters_a_reason_has(exit_codes: dict[str, list[int]]) -> None:
    assert exit_codes["twelve_bytes"] == [0, 0]


@pytest.mark.xdist_group("found_later")
def test_ranks_refuse_with_long_reasons(exit_codes: dict[str, list[int]]) -> None:
    assert exit_codes["six_bytes"] == [0, 0]


@pytest.mark.xdist_group("found_later")
def test_ranks_synchronize_whatever_the_default_device(exit_codes: dict[str, list[int]]) -> None:
    assert exit_codes["meta"] == [0, 0]


@pytest.mark.xdist_group("found_later")
def test_ranks_synchronize_with_the_cpu_as_default_device(
    exit_codes: dict[str, list[int]],
) -> None:
    assert exit_codes["cpu"] == [0, 0]


# N5: the layout of outputs


FEATURE_MAJOR = pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="N5: the output of the family backend is feature-major for some wirings",
)


@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        ("reference", "ragged"),
        ("dense", "ragged"),
        ("sparse", "ragged"),
        ("auto", "ragged"),
        ("family", "full"),
        pytest.param("family", "ragged", marks=FEATURE_MAJOR),
    ],
)
def test_what_leaves_a_net_is_row_major(backend: str, shape: str) -> None:
    net = SHAPES[shape].build()
    net.execution.use(backend)
    x = torch.linspace(-1, 1, 3 * net.sizes[0], dtype=torch.float64).reshape(3, -1)
    ensure(torch.allclose(net(x), net.walk(x)))
    assert net(x).is_contiguous()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)  # a forked process has no other threads
    torch.compiler.reset()  # imports what DistributedDataParallel needs, once for all ranks
    run_programs(sys.argv[1])
