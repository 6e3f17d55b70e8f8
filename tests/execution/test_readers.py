"""Forward passes beside edits in another thread find one version; `tools.readers` runs them."""

import copy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import grapnet as gn
from tools import readers
from tools.readers import State, is_one_version, is_within_range

PACKAGE = str(Path(gn.__file__).parent)


@pytest.mark.parametrize("backend", readers.BACKENDS)
def test_every_read_beside_edits_finds_one_version(backend: str) -> None:
    found = readers.judge([backend], reads=600, edits=100, jobs=2)["backends"][backend]
    assert list(found) == readers.phases_of(backend)
    faults = {name: phase for name, phase in found.items() if readers.faults_of(phase)}
    assert faults == {}
    for phase in found.values():
        # The readers and the edits did run, and more than one thread wanted to edit.
        assert phase["edits"] > 0
        assert phase.get("reads", 1) > 0
        assert phase.get("refused", 1) > 0


def states(*outputs: list[float], commits: list[int] | None = None) -> list[State]:
    numbers = commits or list(range(len(outputs)))
    pairs = zip(numbers, outputs, strict=True)
    return [State(number, (np.array(output),)) for number, output in pairs]


def test_a_read_of_two_versions_is_wrong() -> None:
    recorded = states([1.0, 2.0], [3.0, 4.0])
    assert is_one_version(recorded, 0, np.array([3.0, 4.0]))
    assert not is_one_version(recorded, 0, np.array([1.0, 4.0]))
    assert not is_one_version(recorded, 0, np.array([1.0]))


def test_training_mixes_values_that_a_coordinate_had() -> None:
    trained = states([1.0, 2.0], [3.0, 4.0], commits=[7, 7])
    assert is_within_range(trained, 0, np.array([1.0, 4.0]))
    assert not is_within_range(trained, 0, np.array([1.0, 5.0]))
    assert not is_within_range(trained, 0, np.array([1.0]))


class Torn(gn.GrapNet):
    """Returns the output of an earlier version beside that of the present one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        earlier = self.__dict__.setdefault("earlier", output)
        self.__dict__["earlier"] = output
        return torch.cat([earlier[:, :1], output[:, 1:]], dim=1)


@pytest.mark.parametrize(("kind", "wrong"), [(gn.GrapNet, False), (Torn, True)])
def test_a_net_that_mixes_versions_is_noticed(kind: type[gn.GrapNet], wrong: bool) -> None:
    torch.manual_seed(0)
    watched = readers.Watched(kind([3, 4, 2]), [torch.ones(1, 3)])
    watched.note()
    reader = readers.Reader([watched], 0, is_one_version)
    with watched.net.edit(reason="cut") as edit:
        edit.cut(watched.net.layers[0].outgoing()[:6])
    for _ in range(2):
        reader.read(0)
    watched.states.append(State(1, (watched.output(0),)))
    watched.states.append(watched.states[-1])
    reader.settle(0)
    assert reader.reads == 2
    assert (reader.tallies[0].wrong > 0) == wrong


class LineHook:
    """A trace function that calls `reached` at every line that the library runs."""

    def __init__(self, reached: Callable[[], None]) -> None:
        self.reached = reached

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.reached()
        return self


def commit(net: gn.GrapNet, hook: LineHook) -> None:
    """Grows and cuts; the hook sees the commit alone."""
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
        new = edit.add_nodes(1, 40, bias=0.25)
        edit.connect(net.layers[0], new, weights=0.125)
        edit.connect(new, net.layers[2], weights=0.01)
        before = sys.gettrace()
        sys.settrace(hook)
    sys.settrace(before)


@pytest.mark.parametrize("backend", ["reference", "dense", "family", "sparse"])
def test_a_read_at_any_line_of_a_commit_finds_one_version(backend: str) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([4, 30, 2], density=0.5, dtype=torch.float64)
    net.execution.use(backend)
    twin = copy.deepcopy(net)
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)
    outputs: list[torch.Tensor] = []

    @torch.no_grad()
    def read() -> None:
        outputs.append(net(x))

    def read_beside() -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    read()
    commit(twin, LineHook(lambda: None))
    with torch.no_grad():
        versions = [outputs[0], twin(x)]
    commit(net, LineHook(read_beside))
    found = [[torch.allclose(output, one) for one in versions] for output in outputs]
    assert all(any(equal) for equal in found)
    # All of before comes first, then all of after.
    assert found == sorted(found, reverse=True)
    assert found[-1] == [False, True]
