"""gn.execution.register_backend: what it takes, what it refuses, and files that ask for what nobody
registered.
"""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.execution._manager import BACKENDS
from grapnet.execution._reference import ReferencePlan


@pytest.fixture(autouse=True)
def known() -> Iterator[dict[str, Any]]:
    """Leaves the backends of the process as they were."""
    before = dict(BACKENDS)
    yield before
    BACKENDS.clear()
    BACKENDS.update(before)


def made() -> type[Any]:
    """Returns a class as the cell of a notebook defines it, another one at every call."""

    @dataclass(frozen=True)
    class Own:
        name: ClassVar[str] = "own"

        def refusals(self, topology, dtype):
            return []

        def prepare(self, topology):
            return ReferencePlan(topology)

    return Own


def changed(**attributes: Any) -> type[Any]:
    return type("Changed", (made(),), attributes)


@dataclass
class Melting:
    name: ClassVar[str] = "melting"
    refusals = prepare = lambda self, *_: []


@dataclass(frozen=True)
class Demanding:
    size: int
    name: ClassVar[str] = "demanding"
    refusals = prepare = lambda self, *_: []


class Bare:
    name = "bare"

    def prepare(self, topology):
        return lambda x, values, bias: x


@dataclass(frozen=True)
class Adjustable:
    scale: float = 1.0
    name: ClassVar[str] = "adjustable"
    columns: ClassVar[dict[str, str]] = {"gate": "parents"}
    not_a_sum: ClassVar[str] = "messages are gated"
    refusals = prepare = lambda self, *_: []


def gated(**attributes: Any) -> type[Any]:
    """Returns a policy without fields, with some attributes changed."""
    own = {"name": "gated", "columns": {"gate": "parents"}, "not_a_sum": "messages are gated"}
    return changed(**(own | attributes))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "an object": (lambda: made()(), TypeError),
    "no name": (lambda: changed(name=None), TypeError),
    "half finished": (lambda: Bare, TypeError),
    "nothing to prepare": (lambda: changed(prepare=None), TypeError),
    "no dataclass": (lambda: type("Plain", (Bare,), {"refusals": print}), TypeError),
    "not frozen": (lambda: Melting, TypeError),
    "no default": (lambda: Demanding, TypeError),
    "taken": (lambda: changed(name="dense"), ValueError),
    "auto": (lambda: changed(name="auto"), ValueError),
    "attention": (lambda: changed(name="attention"), ValueError),
    "a policy with fields": (lambda: Adjustable, TypeError),
    "no reason": (lambda: gated(not_a_sum=None), TypeError),
    "unknown ends": (lambda: gated(columns={"gate": "both"}), TypeError),
    "columns without ends": (lambda: gated(columns=["gate"]), TypeError),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_backend_is_refused_and_every_net_still_runs(
    known: dict[str, Any], wrong: str
) -> None:
    build, kind = WRONG[wrong]
    with pytest.raises(kind):
        gn.execution.register_backend(build())
    assert known == BACKENDS
    net = gn.GrapNet([6, 5, 3], density=0.5)
    net.execution.use("auto")
    assert net(torch.ones(2, 6)).shape == (2, 3)
    assert len(net.execution.describe()) == 2


def test_a_class_that_is_defined_again_takes_the_place_of_the_first() -> None:
    first = made()
    second = made()
    net = gn.GrapNet([6, 5, 3])
    gn.execution.register_backend(first)
    gn.execution.register_backend(first)
    net.execution.use("own")
    gn.execution.register_backend(second)
    assert BACKENDS["own"] is second
    assert net(torch.ones(2, 6)).shape == (2, 3)  # with the class that it has chosen
    net.execution.use("own")
    with pytest.raises(ValueError, match="called 'own' exists already; give this one another name"):
        gn.execution.register_backend(changed())


WAYS: dict[str, Callable[[gn.GrapNet, Path], gn.GrapNet]] = {
    "file": lambda net, path: (gn.save(path, net), gn.load(path))[1],
    "model": lambda net, path: _restored(net, path),
}


def _restored(net: gn.GrapNet, path: Path) -> gn.GrapNet:
    gn.save(path, nn.Sequential(net))
    model: Any = nn.Sequential(nn.Linear(1, 1))
    gn.restore(path, into=model)
    return model[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_asks_for_what_nobody_registered_says_so(tmp_path: Path, way: str) -> None:
    gn.execution.register_backend(made())
    net = gn.GrapNet([6, 5, 3])
    net.execution.use("own", 0)
    net.execution.use("reference", 1)
    x = torch.ones(2, 6)
    there = WAYS[way](net, tmp_path / "registered")
    assert (there.execution.choices(), there.execution._unmet) == (["own", "reference"], {})

    del BACKENDS["own"]
    with pytest.warns(UserWarning, match=r"backend 'own' .* net\.execution\.use\('own'\)"):
        here = WAYS[way](net, tmp_path / "elsewhere")
    torch.testing.assert_close(here(x), net(x))
    for one in (here, copy.deepcopy(here), pickle.loads(pickle.dumps(here))):
        assert (one.execution.choices(), one.execution._unmet) == (["own", "reference"], {0: "own"})
        rows = one.execution.describe()
        assert (rows[0]["chosen"], rows[0]["runs"], rows[1]["why"]) == ("own", "dense", "chosen")
        assert rows[0]["why"].startswith(
            "asked for 'own', which is not registered here; auto instead: "
        )

    with here.edit() as edit:
        edit.cut(here.layers[0][0], slots=[0])
    with pytest.warns(UserWarning, match="backend 'own'"):
        again = WAYS[way](here, tmp_path / "again")
    gn.execution.register_backend(made())
    again.execution.use("own", 0)
    assert (again.execution._unmet, again.execution.describe()[0]["runs"]) == ({}, "own")
    here.execution.use("auto")
    assert (here.execution.choices(), here.execution._unmet) == (["auto", "auto"], {})


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    gn.execution.register_backend(made())
    net = gn.GrapNet([6, 5, 3])
    net.execution.use("own")
    gn.save(tmp_path / "model", nn.Sequential(net))
    del BACKENDS["own"]
    model = nn.Sequential(plain := nn.Linear(6, 3))
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="own"):
        gn.restore(tmp_path / "model", into=model)
    assert model[0] is plain


def test_a_net_on_the_meta_device_says_that_it_cannot_run() -> None:
    for density in (1.0, 0.5):
        net = gn.GrapNet([4, 8, 3], density=density).to("meta")
        for device in ("cpu", "meta"):
            with pytest.raises(
                gn.errors.PlanError, match=r"on the meta device, .* gn\.load\(path\)"
            ):
                net(torch.ones(2, 4, device=device))


def test_a_net_cannot_be_made_on_the_meta_device() -> None:
    with pytest.raises(ValueError, match="meta device"):
        gn.GrapNet([4, 3], device="meta")
