"""`net.execution`: choosing backends, describing the choice, and keeping plans through edits and
copies.
"""

import copy
import json
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.core._transition import Topology
from grapnet.execution.auto import Shape, fastest
from grapnet.execution.manager import BACKENDS
from tests.fingerprint import fingerprint

from .figures import inputs, require_reference
from .graphs import EDITS, SHAPES, edited


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([6, 8, 5, 3], density=0.5, activation="tanh", dtype=torch.float64)


@dataclass(frozen=True)
class Matrix:
    """A backend as a user would write it: a matrix made at every call, and an option that limits
    it.
    """

    most_parents: int = 100

    name: ClassVar[str] = "matrix"
    prepared: ClassVar[list[Topology]] = []

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        found = topology.n_parents
        return (
            []
            if found <= self.most_parents
            else [f"{found} parents are more than {self.most_parents}"]
        )

    def prepare(self, topology: Topology) -> "MatrixPlan":
        self.prepared.append(topology)
        return MatrixPlan(
            topology.parents().long(),
            topology.child.long(),
            (topology.n_parents, topology.n_children),
        )


@dataclass(frozen=True, eq=False)
class MatrixPlan:
    parents: Tensor
    children: Tensor
    shape: tuple[int, int]
    calls: list[int] = field(default_factory=list)

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        self.calls.append(len(x))
        matrix = values.new_zeros(self.shape).index_put((self.parents, self.children), values)
        return x @ matrix + bias


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Matrix]]:
    monkeypatch.setitem(BACKENDS, "matrix", Matrix)
    Matrix.prepared.clear()
    yield Matrix
    Matrix.prepared.clear()


def prepared_of(net: gn.GrapNet) -> list[int]:
    """Returns the numbers of the transitions whose present wiring the test's backend prepared, and
    forgets them.
    """
    places = {id(store.child): t for t, store in enumerate(net.transitions)}
    found = [places.get(id(topology.child), -1) for topology in Matrix.prepared]
    Matrix.prepared.clear()
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


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "name": (
        ("fastest",),
        {},
        gn.PlanError,
        "no backend is called 'fastest'; known are .*auto, dense, family",
    ),
    "no name": ((None,), {}, gn.PlanError, "no backend is called None"),
    "option": (
        ("dense",),
        {"most": 3},
        gn.PlanError,
        "dense has no option most; its options are: most_cells",
    ),
    "option of another": (
        ("family",),
        {"most_cells": 3},
        gn.PlanError,
        "family has no option most_cells",
    ),
    "option of auto": (("auto",), {"most_cells": 3}, gn.PlanError, "auto has no option most_cells"),
    "refused": (
        ("dense",),
        {"most_cells": 10},
        gn.PlanError,
        r"transition 0: .* 48 cells \(limit 10\)",
    ),
    "refused by one": (
        ("dense", 2),
        {"most_cells": 10},
        gn.PlanError,
        r"transition 2: .* 15 cells \(limit 10\)",
    ),
    "transition": (("dense", 3), {}, ValueError, "transitions 0 to 2, got 3"),
    "negative transition": (("dense", -1), {}, ValueError, "transitions 0 to 2, got -1"),
    "half a transition": (("dense", 0.5), {}, ValueError, r"transitions 0 to 2, got 0\.5"),
    "named transition": (("dense", "0"), {}, ValueError, "transitions 0 to 2, got '0'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_choice_says_so_and_changes_nothing(net: gn.GrapNet, wrong: str) -> None:
    net.execution.use("family", 1)
    net(inputs(net, 4))
    before = fingerprint(net)
    arguments, options, kind, message = WRONG[wrong]
    with pytest.raises(kind, match=message):
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
        assert "cpu" in row["why"] or row["runs"] in row["why"]
    assert all(row["refused"].keys() <= {"sparse"} for row in rows)  # where its kernels are missing


def test_describe_means_training_unless_told_otherwise(net: gn.GrapNet) -> None:
    rows = net.execution.describe()
    assert rows == net.execution.describe(256, training=True)
    assert rows != net.execution.describe(256, training=False)


@pytest.mark.parametrize("mode", ["forward", "training"])
def test_auto_reads_between_the_measured_batches(mode: str) -> None:
    costs = json.loads(files("grapnet.execution").joinpath("costs.json").read_text())
    low, high = costs["devices"]["cpu"][mode]["sparse"]["batches"][1:3]
    shape = Shape.of(gn.GrapNet([64, 64], density=0.1).transitions[0].topology)
    times = []
    for batch in (low, math.sqrt(low * high), high):
        _, expected = fastest(
            shape, ["dense", "sparse"], device="cpu", batch=batch, training=mode == "training"
        )
        times.append(expected["sparse"])
    # Times are read on logarithmic axes, so the middle is the geometric mean.
    assert times[1] == pytest.approx(math.sqrt(times[0] * times[2]))


@pytest.mark.sparse
def test_describe_names_the_backends_that_refuse() -> None:
    net = gn.GrapNet.from_relations([20_000, 20_000], [([0, 19_999], [19_999, 0])])
    (row,) = net.execution.describe()
    assert row["runs"] != "dense"
    assert row["refused"] == {
        "dense": ["the matrix would hold 400,000,000 cells (limit 268,435,456)"]
    }
    with pytest.raises(gn.PlanError, match="dense cannot run transition 0: the matrix would hold"):
        net.execution.use("dense")
    net.execution.use("dense", most_cells=10**9)
    (row,) = net.execution.describe()
    assert (row["runs"], row["refused"]) == ("dense", {})  # what was chosen, with its options


def test_a_matrix_of_more_cells_than_an_int32_counts_is_refused() -> None:
    net = gn.GrapNet.from_relations([70_000, 40_000], [([69_999, 3], [39_999, 2])])
    with pytest.raises(gn.PlanError, match=r"2,800,000,000 cells \(limit 2,147,483,647\)"):
        net.execution.use("dense", most_cells=2**40)


def test_auto_chooses_the_same_for_equal_nets() -> None:
    for name, shape in SHAPES.items():
        one, two = shape.build(), shape.build()
        for batch in (1, 7, 256):
            for training in (False, True):
                rows = [net.execution.describe(batch, training=training) for net in (one, two, one)]
                assert rows[0] == rows[1] == rows[2], name
        for net in (one, two):
            edited(net, EDITS["cut_one"])
        assert [r["runs"] for r in one.execution.describe()] == [
            r["runs"] for r in two.execution.describe()
        ], name


def test_a_backend_of_ones_own(net: gn.GrapNet, matrix: type[Matrix]) -> None:
    net.execution.use("matrix", most_parents=50)
    assert net.execution.choices() == ["matrix"] * 3
    for edit in ("cut_one", "add_nodes", "remove_nodes"):
        require_reference(net, inputs(net, 5))
        edited(net, EDITS[edit])
    require_reference(net, inputs(net, 5))
    with pytest.raises(
        gn.PlanError, match="matrix cannot run transition 0: 6 parents are more than 2"
    ):
        net.execution.use("matrix", most_parents=2)
    net.execution.use("auto")
    assert {row["runs"] for row in net.execution.describe()} <= {
        "dense",
        "family",
        "sparse",
        "reference",
    }


def test_plans_in_use_are_ready_after_a_commit(net: gn.GrapNet, matrix: type[Matrix]) -> None:
    net.execution.use("matrix")
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
    net: gn.GrapNet, matrix: type[Matrix]
) -> None:
    net.execution.use("matrix")
    net(inputs(net, 4))
    Matrix.prepared.clear()
    for _ in range(6):
        edited(net, lambda net, edit: edit.cut(net.layers[0].outgoing()[:1]))
    assert len(Matrix.prepared) <= 1  # the first one, because a forward pass had run
    net(inputs(net, 4))
    assert len(Matrix.prepared) == 2
    assert prepared_of(net)[-1] == 0
    with net.edit(trial=True) as trial:
        trial.cut(net.layers[0].outgoing()[:1])
        trial.commit()
    net(inputs(net, 4))
    assert len(Matrix.prepared) <= 2
    require_reference(net, inputs(net, 4))


def test_a_choice_keeps_the_plans_of_others(net: gn.GrapNet, matrix: type[Matrix]) -> None:
    net.execution.use("matrix")
    net(inputs(net, 4))
    Matrix.prepared.clear()
    net.execution.use("dense", 1)
    net(inputs(net, 4))
    net.execution.use("matrix", 1)
    net(inputs(net, 4))
    assert len(Matrix.prepared) <= 1


def test_an_edit_that_the_chosen_backend_refuses_changes_nothing() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([6, 8, 5], density=0.5)
    net.execution.use("dense", most_cells=48)
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    net(inputs(net, 4)).square().sum().backward()
    optimizer.step()
    before = fingerprint(net, optimizer)
    for trial in (False, True):
        with pytest.raises(
            gn.PlanError, match=r"dense cannot run transition 0: the matrix would hold 54 cells"
        ):
            grow(net, trial)
        assert fingerprint(net, optimizer) == before
    gn.check(net)
    net.execution.use("auto", 0)
    grow(net, trial=False)
    assert net.sizes == [6, 9, 5]
    net(inputs(net, 4)).sum().backward()
    optimizer.step()
    net.undo()
    net.execution.use("dense", most_cells=48)
    with pytest.raises(gn.PlanError):
        net.redo()
    assert net.sizes == [6, 8, 5]
    require_reference(net, inputs(net, 4))


def grow(net: gn.GrapNet, trial: bool) -> None:
    with net.edit(trial=trial) as edit:
        edit.connect(net.layers[0], edit.add_nodes(1, 1))
        edit.commit()


def test_a_follower_that_stops_the_commit_leaves_the_plans(net: gn.GrapNet) -> None:
    class Reluctant:
        def prepare(self, graph: object, commit: object) -> None:
            raise RuntimeError("no")

    net.execution.use("family")
    net(inputs(net, 4))
    before, reluctant = fingerprint(net), Reluctant()
    net.follow(reluctant)
    with pytest.raises(RuntimeError, match="no"):
        edited(net, EDITS["cut_one"])
    assert fingerprint(net) == before
    net.unfollow(reluctant)
    edited(net, EDITS["cut_one"])
    require_reference(net, inputs(net, 4))


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
    assert twin.execution.graph is twin
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
    with pytest.raises(gn.PlanError, match="limit 48"):
        edited(twin, EDITS["add_nodes"])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (["dense"], {}, r"called \['dense'\]"),
        ("dense", {"most_cells": "many"}, "most_cells .* got 'many'"),
    ],
)
def test_a_wrong_kind_of_name_or_option_is_named(
    name: object, options: dict[str, object], words: str
) -> None:
    net = gn.GrapNet([4, 3, 2])
    with pytest.raises(gn.PlanError, match=words):
        net.execution.use(name, **options)
    assert net.execution.choices() == ["auto", "auto"]
