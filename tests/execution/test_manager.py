"""`net.execution`: choosing backends, describing the choice, and keeping plans through edits and
copies.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.core._transition import Topology
from grapnet.execution._manager import BACKENDS
from grapnet.execution._reference import Reference
from tests.fingerprint import fingerprint

from .figures import inputs, require_reference
from .graphs import EDITS, edited


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([6, 8, 5, 3], density=0.5, activation="tanh", dtype=torch.float64)


@dataclass(frozen=True)
class Noting(Reference):
    """A backend that notes what it prepares."""

    name: ClassVar[str] = "noting"
    prepared: ClassVar[list[Topology]] = []

    def prepare(self, topology: Topology) -> Any:
        self.prepared.append(topology)
        return super().prepare(topology)


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Noting]]:
    monkeypatch.setitem(BACKENDS, "noting", Noting)
    Noting.prepared.clear()
    yield Noting
    Noting.prepared.clear()


def prepared_of(net: gn.GrapNet) -> list[int]:
    """Returns the numbers of the transitions whose present wiring the test's backend prepared, and
    forgets them.
    """
    places = {id(store.child): t for t, store in enumerate(net.transitions)}
    found = [places.get(id(topology.child), -1) for topology in Noting.prepared]
    Noting.prepared.clear()
    return found


def test_use_redirects_all_transitions_or_one(net: gn.GrapNet) -> None:
    assert net.execution.choices() == ["auto", "auto", "auto"]
    net.execution.use("family")
    net.execution.use("dense", transition=1)
    net.execution.use("reference", 2)
    assert net.execution.choices() == ["family", "dense", "reference"]
    assert [row["runs"] for row in net.execution.describe()] == ["family", "dense", "reference"]
    require_reference(net, inputs(net, 5))
    net.execution.use("auto", 0)
    assert net.execution.choices() == ["auto", "dense", "reference"]
    net.execution.use("auto")
    assert net.execution.choices() == ["auto"] * 3


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception]]] = {
    "name": (("fastest",), {}, gn.errors.PlanError),
    "no name": ((None,), {}, gn.errors.PlanError),
    "option": (("dense",), {"most": 3}, gn.errors.PlanError),
    "kind of option": (("dense",), {"most_cells": "many"}, TypeError),
    "option of auto": (("auto",), {"most_cells": 3}, gn.errors.PlanError),
    "refused": (("dense",), {"most_cells": 10}, gn.errors.PlanError),
    "refused by one": (("dense", 2), {"most_cells": 10}, gn.errors.PlanError),
    "transition": (("dense", 3), {}, ValueError),
    "negative transition": (("dense", -1), {}, ValueError),
    "named transition": (("dense", "0"), {}, ValueError),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_choice_raises_and_changes_nothing(net: gn.GrapNet, wrong: str) -> None:
    net.execution.use("family", 1)
    net(inputs(net, 4))
    before = fingerprint(net)
    arguments, options, kind = WRONG[wrong]
    with pytest.raises(kind):
        net.execution.use(*arguments, **options)
    assert net.execution.choices() == ["auto", "family", "auto"]
    assert fingerprint(net) == before


@pytest.mark.parametrize("batch", [0, 1, 7, 256, 4096, 10**6])
@pytest.mark.parametrize("training", [False, True])
def test_describe_says_what_runs_and_why(net: gn.GrapNet, batch: int, training: bool) -> None:
    net.execution.use("family", 1)
    rows = net.execution.describe(batch, training=training)
    assert [row["transition"] for row in rows] == [0, 1, 2]
    assert [row["relations"] for row in rows] == [store.size for store in net.transitions]
    assert [row["chosen"] for row in rows] == ["auto", "family", "auto"]
    assert (rows[1]["runs"], rows[1]["why"]) == ("family", "chosen")
    for row in (rows[0], rows[2]):
        assert row["runs"] in set(BACKENDS)
        # the last without kernels, where nothing else was measured
        assert any(word in row["why"] for word in ("cpu", row["runs"], "no other backend"))
    # sparse where its kernels are missing
    assert all(row["refused"].keys() <= {"sparse", "tiles"} for row in rows)


@pytest.mark.sparse
def test_describe_names_the_backends_that_refuse() -> None:
    net = gn.GrapNet.from_relations([20_000, 20_000], [([0, 19_999], [19_999, 0])])
    (row,) = net.execution.describe()
    assert row["runs"] != "dense"
    assert row["refused"].keys() == {"dense", "tiles"}
    assert row["refused"]["dense"] == [
        "the matrix would hold 400,000,000 cells (limit 268,435,456)"
    ]
    with pytest.raises(
        gn.errors.PlanError, match="dense cannot run transition 0: the matrix would hold"
    ):
        net.execution.use("dense")
    net.execution.use("dense", most_cells=10**9)
    (row,) = net.execution.describe()
    # what was chosen, with its options
    assert (row["runs"], row["refused"].keys()) == ("dense", {"tiles"})


def test_a_matrix_of_more_cells_than_an_int32_counts_is_refused() -> None:
    net = gn.GrapNet.from_relations([70_000, 40_000], [([69_999, 3], [39_999, 2])])
    with pytest.raises(gn.errors.PlanError, match=r"2,800,000,000 cells \(limit 2,147,483,647\)"):
        net.execution.use("dense", most_cells=2**40)


def test_plans_in_use_are_ready_after_a_commit(net: gn.GrapNet, noting: type[Noting]) -> None:
    net.execution.use("noting")
    assert prepared_of(net) == []  # made when first needed
    for batch in (4, 3, 200, 4):
        net(inputs(net, batch))
    assert prepared_of(net) == [0, 1, 2]  # one serves every batch size
    edited(net, lambda net, edit: edit.cut(net.layers[1][0].outgoing()[:1]))
    assert prepared_of(net) == [1]
    net(inputs(net, 4))
    with torch.no_grad():
        net(inputs(net, 4))
    assert prepared_of(net) == []
    edited(net, EDITS["freeze"])
    edited(net, lambda net, edit: edit.set_activation(net.layers[1], "relu"))
    net(inputs(net, 4))
    assert prepared_of(net) == []  # no relation moved
    require_reference(net, inputs(net, 4))


def test_edits_in_a_row_do_not_make_plans_that_nobody_runs(
    net: gn.GrapNet, noting: type[Noting]
) -> None:
    net.execution.use("noting")
    net(inputs(net, 4))
    Noting.prepared.clear()
    for _ in range(6):
        edited(net, lambda net, edit: edit.cut(net.layers[0].outgoing()[:1]))
    assert len(Noting.prepared) <= 1  # the first one, because a forward pass had run
    net(inputs(net, 4))
    assert len(Noting.prepared) == 2
    assert prepared_of(net)[-1] == 0
    with net.edit(trial=True) as trial:
        trial.cut(net.layers[0].outgoing()[:1])
        trial.commit()
    net(inputs(net, 4))
    assert len(Noting.prepared) <= 2
    require_reference(net, inputs(net, 4))


def test_a_choice_keeps_the_plans_of_others(net: gn.GrapNet, noting: type[Noting]) -> None:
    net.execution.use("noting")
    net(inputs(net, 4))
    Noting.prepared.clear()
    net.execution.use("dense", 1)
    net(inputs(net, 4))
    net.execution.use("noting", 1)
    net(inputs(net, 4))
    assert len(Noting.prepared) <= 1


def test_an_edit_that_the_chosen_backend_refuses_changes_nothing() -> None:
    net = gn.GrapNet([6, 8, 5], density=0.5)
    net.execution.use("dense", most_cells=48)
    net(inputs(net, 4))
    before = fingerprint(net)
    for trial in (False, True):
        with pytest.raises(gn.errors.PlanError, match="54 cells"):
            grow(net, trial)
        assert fingerprint(net) == before
    net.execution.use("auto", 0)
    grow(net, trial=False)
    assert net.sizes == [6, 9, 5]
    net.undo()
    net.execution.use("dense", most_cells=48)
    with pytest.raises(gn.errors.PlanError):
        net.redo()
    assert net.sizes == [6, 8, 5]
    require_reference(net, inputs(net, 4))


def test_a_trial_ends_although_the_backend_chosen_in_it_cannot_run_what_returns() -> None:
    net = gn.GrapNet([6, 8, 5], density=0.5)
    x = inputs(net, 4)
    expected = net(x)
    with net.edit(trial=True) as edit:
        edit.remove_nodes(net.layers[1][:2])
        edit.commit()
        net.execution.use("dense", 0, most_cells=36)
        net.execution.use("dense", 1)
        assert not torch.equal(net(x), expected)
    assert net.execution.choices() == ["auto", "dense"]
    assert net.sizes == [6, 8, 5]
    assert torch.equal(net(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
    require_reference(net, x)


def grow(net: gn.GrapNet, trial: bool) -> None:
    with net.edit(trial=trial) as edit:
        edit.connect(net.layers[0], edit.add_nodes(1, 1))
        edit.commit()


COPIES: dict[str, Callable[[gn.GrapNet, Path], gn.GrapNet]] = {
    "deepcopy": lambda net, folder: copy.deepcopy(net),
    "pickle": lambda net, folder: pickle.loads(pickle.dumps(net)),
    "inside a module": lambda net, folder: copy.deepcopy(nn.Sequential(net))[0],
    "file": lambda net, folder: (gn.save(folder / "net", net), gn.load(folder / "net"))[1],
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_keeps_the_choices_and_has_plans_of_its_own(
    net: gn.GrapNet, way: str, tmp_path: Path
) -> None:
    for t, name in enumerate(("family", "auto", "dense")):
        net.execution.use(name, t)
    x = inputs(net, 4)
    expected = net(x)
    twin = COPIES[way](net, tmp_path)
    assert twin.execution.choices() == ["family", "auto", "dense"]
    assert twin.execution.families(1)[0].members.graph is twin
    assert torch.equal(twin(x), expected)
    edited(twin, EDITS["rewire"])
    require_reference(twin, x)
    assert torch.equal(net(x), expected)
    twin.execution.use("reference")
    assert net.execution.choices() == ["family", "auto", "dense"]
    edited(net, EDITS["cut_one"])
    require_reference(net, x)
    require_reference(twin, x)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "inside a module"])
def test_a_copy_keeps_the_options_of_a_choice(net: gn.GrapNet, way: str, tmp_path: Path) -> None:
    net.execution.use("dense", most_cells=48)
    twin = COPIES[way](net, tmp_path)
    with pytest.raises(gn.errors.PlanError, match="limit 48"):
        edited(twin, EDITS["add_nodes"])
