"""Forward passes beside edits in another thread find one version; `tools.readers` runs them."""

import numpy as np
import pytest
import torch

import grapnet as gn
from tools import readers
from tools.readers import State, is_one_version, is_within_range


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
