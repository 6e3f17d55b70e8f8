"""What all tests share: the compiled kernels that they run with, and quiet memory."""

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest

from grapnet.execution import _native

NONE = "none"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --kernels."""
    help = (
        "run one variant of the compiled kernels, such as avx2 or baseline, instead of the"
        f" fastest; {NONE}: they are not installed, and only tests of the sparse backend may be"
        " skipped"
    )
    parser.addoption("--kernels", help=help)


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the variant of the compiled kernels, in every process that runs tests, and hides what
    was tuned on this machine, or compiled by torch for other instructions than it may use now.
    """
    if limit := os.environ.get("ATEN_CPU_CAPABILITY"):
        # Code of inductor that was compiled without this limit gives NaN with it, and crashes.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{limit}"
    folder = tempfile.TemporaryDirectory(prefix="grapnet-cache-")
    os.environ["GRAPNET_CACHE"] = folder.name
    config.add_cleanup(folder.cleanup)
    wanted = config.getoption("--kernels")
    if wanted == NONE:
        if not _native.missing:
            raise pytest.UsageError("the compiled kernels are installed")
        config.pluginmanager.register(OnlySparseIsSkipped())
    elif wanted is not None:
        _native.use_variant(wanted)


@pytest.fixture(params=[NONE] if _native.missing else _native.variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with every variant of the compiled kernels that this machine can run."""
    before = _native.variant()
    _native.use_variant(request.param)
    yield request.param
    _native.use_variant(before)


class OnlySparseIsSkipped:
    """Fails a run in which a test is skipped for another reason than the missing kernels.

    Torch-Pruning, which some tests compare with, is not installed by default; others need a GPU.
    """

    def __init__(self) -> None:
        self.others: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a skip that names none of these."""
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = str(report.longrepr)
        if not any(name in reason for name in ("sparse", "Torch-Pruning", "CUDA")):
            self.others.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails the run."""
        if self.others:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names the tests."""
        for name in self.others:
            terminalreporter.write_line(f"skipped, and not for lack of the sparse kernels: {name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of the sparse backend where its kernels are not installed."""
    if not _native.missing:
        return
    skip = pytest.mark.skip(reason=f"sparse: {_native.missing}")
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("sparse") or "'sparse'" in repr(parameters):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Hides what imports and collection made from the garbage collector, which would walk it again
    and again.
    """
    gc.collect()
    gc.freeze()
