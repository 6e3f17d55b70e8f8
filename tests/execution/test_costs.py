"""What `auto` chooses by: tables by kind of device and precision, and what is measured here."""

import copy
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet import execution
from grapnet.execution import _costs, _tune
from grapnet.execution._costs import Shape, fastest, kind_of, precision

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps measurements in a folder of the test."""
    monkeypatch.setenv("GRAPNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_costs, "_known", {})
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tune, "ROUNDS", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(_tune, "SECONDS", {"cpu": 1e-4, "cuda": 1e-4})


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def table(precise: str, ratio: float, kind: str = "") -> _costs.Table:
    """Returns a table in which sparse takes `ratio` times as long as dense everywhere."""
    one = {"cells": [1], "shares": [0.5], "batches": [1], "ratios": [[[ratio]]]}
    return _costs.Table(
        {
            "kind": kind or kind_of("cpu"),
            "precision": precise,
            "device": "an abacus",
            "date": "2026-01-01",
            "forward": {"sparse": one},
            "training": {"sparse": one},
        }
    )


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets sparse be fast in float32, slow in bfloat16, and not measured in anything else."""
    made = [table("float32", 0.1), table("bfloat16", 2.0)]
    known = {(one.data["kind"], one.data["precision"]): one for one in made}
    monkeypatch.setattr(_costs, "shipped", lambda: known)


def test_the_precision_is_the_one_that_is_set(matmul_precision: None) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert precision("cpu", dtype) == precision("cuda", dtype) == str(dtype)[6:]
    with torch.autocast("cpu", torch.bfloat16):
        assert precision("cpu", torch.float32) == "bfloat16"
        assert precision("cuda", torch.float32) == "float32"
        assert precision("cpu", torch.float64) == "float64"  # which autocast leaves alone
    torch.set_float32_matmul_precision("high")
    assert precision("cuda", torch.float32) == "tf32"
    assert precision("cpu", torch.float32) == "float32"
    torch.set_float32_matmul_precision("medium")
    assert precision("cuda", torch.float32) == "tf32"
    assert precision("cpu", torch.float32) == "bf32"


def test_compiled_code_reads_tf32_for_cuda_alone(matmul_precision: None) -> None:
    torch.set_float32_matmul_precision("high")

    @torch.compile(backend="eager", fullgraph=True)
    def is_tf32(x: torch.Tensor, device: str) -> torch.Tensor:
        return x + (precision(device, torch.float32) == "tf32")

    assert [int(is_tf32(torch.zeros(()), device)) for device in ("cpu", "cuda")] == [0, 1]


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="came with torch 2.9"
)
def test_the_precision_of_one_kind_of_device_is_read_too(matmul_precision: None) -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()  # torch does not say
        assert precision("cuda", torch.float32) == "tf32"
        assert precision("cpu", torch.float32) == "float32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.sparse
@pytest.mark.parametrize("able", ["avx512", "avx2", "default"])
def test_the_kind_of_a_cpu_is_what_torch_and_the_kernels_can_both_do(
    able: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_costs.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", able.upper)
    order = ["default", "baseline", "avx2", "avx512"]
    least = min(able, variant, key=order.index)
    assert kind_of("cpu") == f"cpu {'baseline' if least == 'default' else least}"
    assert kind_of("cuda") == "cuda"
    monkeypatch.setattr(_costs.platform, "machine", lambda: "aarch64")
    assert kind_of("cpu") == f"cpu aarch64 {able}"


def test_the_shipped_tables_are_whole() -> None:
    found = _costs.shipped()
    vectors = {("cpu avx512", name) for name in ("float64", "float32", "bfloat16", "float16")}
    vectors |= {("cpu avx2", name) for name in ("float64", "float32", "bfloat16", "float16")}
    vectors |= {("cpu baseline", name) for name in ("float64", "float32")}
    assert set(found) >= vectors | {("cuda", "float32")}
    for one in found.values():
        for mode in ("forward", "training"):
            for backend, measured in one.data[mode].items():
                assert backend in ("sparse", "family", "tiles")
                ratios = torch.tensor(measured["ratios"])
                axes = [measured[axis] for axis in ("cells", "shares", "batches")]
                assert ratios.shape == tuple(map(len, axes))
                assert all(axis == sorted(axis) for axis in axes)
                assert (ratios > 0).all()


@pytest.mark.sparse
@pytest.mark.usefixtures("tables")
def test_what_was_never_measured_runs_dense(matmul_precision: None) -> None:
    net = gn.GrapNet([64, 64], density=0.1)
    (row,) = net.execution.describe()
    assert row["runs"] == "sparse"
    assert "an abacus" in row["costs"]
    torch.set_float32_matmul_precision("medium")
    (row,) = net.execution.describe()
    assert row["runs"] == "dense"
    assert "not measured" in row["costs"]
    assert net.double().execution.describe()[0]["runs"] == "dense"
    huge = gn.GrapNet.from_relations([20_000, 20_000], [([0], [1])], dtype=torch.float64)
    assert huge.execution.describe()[0]["runs"] == "sparse"  # dense refuses it


@pytest.mark.sparse
@pytest.mark.usefixtures("tables")
def test_plans_follow_autocast_and_survive_a_commit() -> None:
    net = gn.GrapNet([64, 64], density=0.5)
    x = torch.randn(8, 64)
    plain = net(x)
    with torch.autocast("cpu", torch.bfloat16):
        half = net(x)
        assert net.execution.describe()[0]["runs"] == "dense"
    assert net.execution.describe()[0]["runs"] == "sparse"
    assert (plain.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(half.float(), plain, rtol=0.02, atol=0.02)
    used = set(net.execution._plans.lines)
    assert {key[2] for key in used} == {"float32", "bfloat16"}
    with net.edit(reason="cut one") as edit:
        edit.cut(net.layers[0][0], slots=[0])
    assert set(net.execution._plans.lines) == used
    reference = copy.deepcopy(net)
    reference.execution.use("reference")
    torch.testing.assert_close(net(x), reference(x))


def test_a_full_net_has_one_line_whatever_the_precision() -> None:
    net = gn.GrapNet([8, 4])
    x = torch.randn(3, 8)
    with torch.no_grad():
        net(x)
        with torch.autocast("cpu"):
            net(x)
        net(torch.randn(300, 8))
    assert len(net.execution._plans.lines) == 1


@pytest.mark.sparse
@pytest.mark.parametrize("device", DEVICES)
def test_tune_measures_this_net_and_keeps_the_answer(folder: Path, device: str) -> None:
    net = gn.GrapNet([64, 48, 4], density=0.3, device=device)
    x = torch.randn(2, 5, 64, device=device)
    state = torch.get_rng_state()
    rows = net.execution.tune(x)
    assert torch.equal(torch.get_rng_state(), state)
    for row in rows:
        assert "tuned here on 20" in row["costs"]
        assert row["runs"] in row["why"] or row["runs"] == "dense"
    (path,) = folder.iterdir()
    assert kind_of(device).replace(" ", "-") in path.name
    found = json.loads(path.read_text())
    assert len(found["points"]) == 2 * 2
    assert found["machine"]["torch"] == torch.__version__
    # another process reads it, and another net like this one has it
    _costs._known.clear()
    twin = copy.deepcopy(net)
    assert twin.execution.describe(10) == rows
    # of these batches, and of these numbers of relations, alone
    assert "tuned" not in net.execution.describe(1000)[0]["costs"]
    sparser = gn.GrapNet([64, 48, 4], density=0.1, device=device)
    assert "tuned" not in sparser.execution.describe(10)[0]["costs"]
    # again: the file keeps one point for each
    net.execution.tune(x)
    assert len(json.loads(path.read_text())["points"]) == 2 * 2


def test_auto_runs_no_tiles_below_the_size_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = table("float32", 0.1)
    for mode in ("forward", "training"):
        made.data[mode] = {"tiles": made.data[mode]["sparse"]}
    monkeypatch.setattr(_costs, "shipped", lambda: {(made.data["kind"], "float32"): made})
    for tile, runs in ((16, "dense"), (32, "dense"), (64, "tiles")):
        generator = torch.Generator().manual_seed(0)
        net = gn.GrapNet([256, 256], density=0.5, tile=tile, generator=generator)
        (row,) = net.execution.describe()
        assert (row["tile"], row["runs"]) == (tile, runs)


@pytest.mark.sparse
def test_the_reason_lists_the_fastest_backend_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made = table("float32", 0.5)
    tiled = table("float32", 0.1)
    for mode in ("forward", "training"):
        made.data[mode]["tiles"] = tiled.data[mode]["sparse"]
    monkeypatch.setattr(_costs, "shipped", lambda: {(made.data["kind"], "float32"): made})
    net = gn.GrapNet([256, 256], density=0.5, tile=64)
    (row,) = net.execution.describe()
    assert row["why"].index("tiles 0.10") < row["why"].index("sparse 0.50")


def test_what_dense_cannot_run_is_not_measured() -> None:
    net = gn.GrapNet.from_relations([20_000, 20_000], [([0, 19_999], [19_999, 0])])
    (before,) = net.execution.describe(2)
    (row,) = net.execution.tune(torch.randn(2, 20_000))
    assert "dense" in row["refused"]
    assert row == before


@pytest.mark.parametrize("threads", [1, 2])
def test_a_measurement_is_what_the_clock_gains(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0

    def step() -> None:
        nonlocal now
        now += 2.0

    clocks = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: now)
    monkeypatch.setattr(_tune, "time", clocks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert _tune._seconds(step, 3, torch.device("cpu")) == 6.0


@pytest.mark.sparse
def test_what_is_tuned_counts_more_than_tables(folder: Path) -> None:
    net = gn.GrapNet([256, 256], density=0.05)
    x = torch.randn(64, 256)
    with torch.no_grad():
        net(x)
    for ratio, runs in ((0.5, "sparse"), (2.0, "dense")):
        point = {
            "size": [256, 256],
            "relations": net.count().relations,
            "precision": "float32",
            "batch": 64,
            "training": False,
            "ratios": {"sparse": ratio},
            "date": "2026-01-01",
        }
        _costs.keep("cpu", {}, [point])
        (row,) = net.execution.describe(64, training=False)
        assert row["runs"] == runs
        assert row["costs"] == "tuned here on 2026-01-01 with this transition"
    # backends that were not measured with it are no option
    assert row["why"].endswith("dense being 1: sparse 2.00")


def test_a_net_runs_what_was_tuned_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    net = gn.GrapNet([64, 48], density=0.3)
    x = torch.randn(16, 64)
    expected = net(x)
    assert net.execution._plans.lines
    net.execution.tune(x)
    assert not net.execution._plans.lines
    torch.testing.assert_close(net(x), expected)


@pytest.mark.sparse
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"ratios"', '"rations"'),
        lambda text: text.replace("torch", "abacus"),
        lambda text: text.replace('"date"', '"day"'),
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(folder: Path, damage: Any) -> None:
    net = gn.GrapNet([64, 48], density=0.3)
    x = torch.randn(10, 64)
    net.execution.tune(x)
    (path,) = folder.iterdir()
    _costs._known.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "tuned" in net.execution.describe(10)[0]["costs"]  # the control
    path.write_text(damage(path.read_text()))
    _costs._known.clear()
    with pytest.warns(UserWarning, match="is ignored"):
        (row,) = net.execution.describe(10)
    assert "tuned" not in row["costs"]
    net.execution.tune(x)
    _costs._known.clear()
    assert "tuned" in net.execution.describe(10)[0]["costs"]


def test_other_versions_have_files_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = gn.GrapNet([64, 48], density=0.3)
    net.execution.tune(torch.randn(10, 64))
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert "tuned" not in net.execution.describe(10)[0]["costs"]
    net.execution.tune(torch.randn(10, 64))
    assert len(list(folder.iterdir())) == 2


@pytest.mark.sparse
def test_measurements_that_cannot_be_written_hold_in_the_process(folder: Path) -> None:
    folder.write_text("a file, not a folder")
    net = gn.GrapNet([64, 48], density=0.3)
    with pytest.raises(OSError, match="cache"):
        net.execution.tune(torch.randn(10, 64))
    assert "tuned" in net.execution.describe(10)[0]["costs"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_grid_becomes_the_table_of_its_precision(folder: Path, device: str) -> None:
    names = ["float32", "bfloat16"]
    sizes = [(32, 64), (16, 16)]
    for is_kept in (False, True):
        found = execution.tune(
            device, precisions=names, sizes=sizes, batches=[8, 2], is_kept=is_kept
        )
        assert folder.exists() == is_kept
    assert found.path is not None
    assert found.path.parent == folder
    assert [one["precision"] for one in found.tables] == names
    for table in found.tables:
        assert table["forward"]["sparse"]["cells"] == [16 * 16, 32 * 64]
        assert table["forward"]["sparse"]["batches"] == [2, 8]
    _costs._known.clear()
    for dtype in (torch.float32, torch.bfloat16):
        net = gn.GrapNet([32, 32], density=0.3, device=device, dtype=dtype)
        assert net.execution.describe(4)[0]["costs"].startswith("tuned here on")
    net = gn.GrapNet([32, 32], density=0.3, device=device, dtype=torch.float64)
    assert "tuned here" not in net.execution.describe(4)[0]["costs"]


def test_what_is_not_measured_of_a_grid_is_left_to_dense() -> None:
    grid = _tune.Grid(((16, 16),), (2,), {"sparse": (0.1, 0.5)})
    (made,) = _tune.measured_tables(torch.device("cpu"), ["float32"], grid, seconds=-1)
    assert made["training"]["sparse"]["ratios"] == [[[1.0], [1.0]]]


@pytest.mark.parametrize("mode", ["forward", "training"])
def test_auto_reads_between_the_measured_batches(mode: str) -> None:
    kind = kind_of("cpu")
    known = _costs.shipped().get((kind, "float32"))
    if known is None:
        return  # another kind of CPU
    low, high = known.data[mode]["sparse"]["batches"][1:3]
    shape = Shape.of(gn.GrapNet([64, 64], density=0.1).transitions[0].topology)
    times = []
    for batch in (low, round(math.sqrt(low * high)), high):
        _, why = fastest(
            shape,
            ["dense", "sparse"],
            device="cpu",
            precision="float32",
            batch=batch,
            training=mode == "training",
        )
        times.append(why.ratios["sparse"])
    # Times are read on logarithmic axes, so the middle is the geometric mean.
    assert times[1] == pytest.approx(math.sqrt(times[0] * times[2]))


def test_the_cache_folder_is_the_usual_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GRAPNET_CACHE")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(_costs.sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert _costs.cache_folder() == tmp_path / ".cache" / "grapnet"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _costs.cache_folder() == tmp_path / "xdg" / "grapnet"
    monkeypatch.setattr(_costs.sys, "platform", "darwin")
    assert _costs.cache_folder() == tmp_path / "Library" / "Caches" / "grapnet"
    monkeypatch.setattr(_costs.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert _costs.cache_folder() == tmp_path / "local" / "grapnet" / "Cache"
