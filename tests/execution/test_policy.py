"""A policy from outside of the library: this file alone makes it, and everything serves it."""

import copy
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.continual import ClosedFormReadout
from grapnet.execution._manager import BACKENDS
from grapnet.rules import GrowWidth, RemoveOrphans, RuleContext

from .attended import by_reference, step
from .figures import inputs
from .graphs import POLICIES

PACKAGE = Path(gn.__file__).parent
# what a net computes that runs with a policy of the library, written down another time
AUDITS: dict[str, Callable[[gn.GrapNet, Tensor], Tensor]] = {"attention": by_reference}


@dataclass(frozen=True)
class ParentGate:
    """z = b + Σ x·σ(gate)·w, with one gate for every parent."""

    name: ClassVar[str] = "parent_gate"
    columns: ClassVar[Mapping[str, str]] = {"gate": "parents"}
    not_a_sum: ClassVar[str] = "every parent's message is multiplied by its gate"

    def refusals(self, topology: Any, dtype: torch.dtype) -> list[str]:
        return []

    def prepare(self, topology: Any) -> Any:
        parents = topology.parents().long()
        children = topology.child.long()

        def plan(x: Tensor, values: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
            messages = (x * gate.sigmoid())[:, parents] * values  # [batch, n_relations]
            received = messages.new_zeros(len(x), topology.n_children)
            return bias + received.index_add(1, children, messages)

        return plan


@dataclass(frozen=True)
class Root:
    """z = b + Σ x·√|w|: a policy without Parameters of its own."""

    name: ClassVar[str] = "root"
    columns: ClassVar[Mapping[str, str]] = {}
    not_a_sum: ClassVar[str] = "a message is the root of a weight"

    def refusals(self, topology: Any, dtype: torch.dtype) -> list[str]:
        return []

    def prepare(self, topology: Any) -> Any:
        def plan(x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
            messages = x[:, topology.parents().long()] * values.abs().sqrt()
            received = messages.new_zeros(len(x), topology.n_children)
            return bias + received.index_add(1, topology.child.long(), messages)

        return plan


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """Registers the policies and leaves the process as it was."""
    before = dict(BACKENDS)
    gn.execution.register_backend(ParentGate)  # pyright: ignore[reportArgumentType]
    gn.execution.register_backend(Root)  # pyright: ignore[reportArgumentType]
    yield
    BACKENDS.clear()
    BACKENDS.update(before)


def gated(**options: Any) -> tuple[gn.GrapNet, torch.optim.Optimizer]:
    """Returns a net with gates at both transitions, and an optimizer that was attached before."""
    torch.manual_seed(0)
    net = gn.GrapNet([6, 5, 4], activation="tanh", density=0.8, dtype=torch.float64)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    gn.attach(optimizer, net)
    net.execution.use("parent_gate", **options)
    return net, optimizer


def expected(net: gn.GrapNet, x: Tensor) -> Tensor:
    """Computes the gated net with one matrix per transition."""
    for t, transition in enumerate(net.transitions):
        pairs = (transition.topology.parents().long(), transition.child.long())
        matrix = x.new_zeros(net.sizes[t], net.sizes[t + 1]).index_put(pairs, transition.values())
        gate = net.columns[f"gate_{t}"].value.sigmoid()
        x = net.layers[t + 1](x @ (gate[:, None] * matrix) + net.layers[t + 1].biases)
    return x


def require_right(net: gn.GrapNet) -> None:
    """Compares values and gradients with the matrices, live and read without gradients."""
    gn.check(net)
    x = inputs(net, 9)
    parameters = list(net.parameters())
    outputs = (net(x), expected(net, x))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)
    found = torch.autograd.grad(outputs[0].square().sum(), parameters)
    wanted = torch.autograd.grad(outputs[1].square().sum(), parameters)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(net(x), outputs[1].detach(), rtol=0, atol=1e-12)


def gates(net: gn.GrapNet, t: int) -> dict[int, float]:
    """Returns the gates of a transition by the uid of the parent."""
    uids = net.layers[t].uids.tolist()
    return dict(zip(uids, net.columns[f"gate_{t}"].value.tolist(), strict=True))


def test_it_is_trained_with_the_weights_and_leaves_with_the_next_choice() -> None:
    net, optimizer = gated()
    plain = copy.deepcopy(net)
    plain.execution.use("auto")
    assert not torch.allclose(net(inputs(net, 9)), plain(inputs(net, 9)))  # the gates do something
    require_right(net)
    before = gates(net, 1)
    losses = [step(net, optimizer) for _ in range(50)]
    assert losses[-1] < losses[0] / 2
    assert all(before[uid] != gate for uid, gate in gates(net, 1).items())
    require_right(net)
    kept = net.columns["gate_1"].value
    net.execution.use("parent_gate")
    assert net.columns["gate_1"].value is kept
    net.execution.use("parent_gate", transition=1, gate=torch.zeros(5))
    assert gates(net, 1) == dict.fromkeys(gates(net, 1), 0.0)
    net.execution.use("auto")
    assert not net.columns
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in net.parameters()
    }
    step(net, optimizer)


def test_files_and_copies_keep_it(tmp_path: Path) -> None:
    net, optimizer = gated(bound=0.25)
    step(net, optimizer)
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
    gn.save(tmp_path / "net", net, undo=True, optimizer=optimizer)
    loaded = gn.load(tmp_path / "net")
    other = torch.optim.Adam(loaded.parameters(), lr=0.01)
    gn.restore(tmp_path / "net", optimizer=other)
    gn.attach(other, loaded)
    stream = io.BytesIO()
    torch.save(net, stream)
    stream.seek(0)
    for copied in (copy.deepcopy(net), torch.load(stream, weights_only=False)):
        assert torch.equal(copied(inputs(net, 9)), net(inputs(net, 9)))
        require_right(copied)
    assert loaded.columns["gate_1"].bound == 0.25
    for act in (lambda one: None, lambda one: one.undo()):
        for one in (net, loaded):
            act(one)
        assert loaded.execution.choices() == ["parent_gate"] * 2
        assert torch.equal(loaded(inputs(net, 9)), net(inputs(net, 9)))
        require_right(loaded)
        assert step(net, optimizer) == step(loaded, other)
    del BACKENDS["parent_gate"]
    with pytest.raises(gn.errors.CheckpointError, match="parent_gate"):
        gn.load(tmp_path / "net")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_of_the_library_follows_edits_undo_and_files(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([6, 5, 4]).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    gn.attach(optimizer, net)
    net.execution.use(name)
    x = inputs(net, 9)
    start = {column: net.columns[column].value.detach().clone() for column in net.columns}
    for _ in range(3):
        step(net, optimizer)
    assert start
    assert all(not torch.equal(net.columns[column].value, old) for column, old in start.items())
    before = net(x).detach()
    audit = AUDITS[name]
    torch.testing.assert_close(before, audit(net, x))
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][1])
    gn.check(net)
    torch.testing.assert_close(net(x), audit(net, x))
    with net.edit() as edit:
        nodes = edit.add_nodes(1, 2)
        edit.connect(net.layers[0], nodes)
        edit.connect(nodes, net.layers[2])
    torch.testing.assert_close(net(x), audit(net, x))
    net.undo()
    gn.save(tmp_path / "net", net)
    assert torch.equal(gn.load(tmp_path / "net")(x), net(x))
    assert torch.equal(copy.deepcopy(net)(x), net(x))
    net.undo()
    assert torch.equal(net(x), before)
    step(net, optimizer)


@pytest.mark.parametrize("name", ["parent_gate", "root", *POLICIES])
def test_whatever_relies_on_the_sum_refuses_it_and_says_why(name: str) -> None:
    net = gn.GrapNet([6, 5, 4])
    snapshot = net.snapshot()
    readout = ClosedFormReadout(net, 1)
    x = torch.randn(9, 6)
    readout.add(torch.randn(9, 5), torch.arange(9) % 4)
    net.execution.use(name, transition=1)
    policy = BACKENDS[name]()

    def apply(rule: Any) -> None:
        with net.edit() as edit:
            rule(net, edit, RuleContext())

    attempts = [
        net.snapshot,
        net.to_module,
        lambda: net.walk(x),
        lambda: torch.export.export(net, (x,)),
        readout.solve,
        lambda: apply(RemoveOrphans(fold_bias=True)),
        lambda: apply(GrowWidth(1, 2)),
    ]
    for attempt in attempts:
        with pytest.raises(gn.errors.PlanError) as caught:
            attempt()
        assert f"transition 1 runs with {name}" in str(caught.value)
        assert policy.not_a_sum in str(caught.value)  # pyright: ignore[reportAttributeAccessIssue]
    assert (net.version, net.sizes) == (0, [6, 5, 4])
    assert snapshot.is_stale(net)
    net.execution.use("auto")
    assert not snapshot.is_stale(net)
    for attempt in attempts:
        attempt()


def test_auto_never_picks_one() -> None:
    net = gn.GrapNet([6, 5, 4], density=0.5)
    runs = {row["runs"] for batch in (1, 64, 4096) for row in net.execution.describe(batch)}
    assert runs.isdisjoint({"parent_gate", "root", *POLICIES})


def test_no_file_of_the_library_asks_for_a_policy_by_name() -> None:
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert not [path for path, text in sources.items() if "parent_gate" in text]
    # imported where it is registered, and nowhere else
    statement = "_attention import Attention"
    importing = [path.name for path, text in sources.items() if statement in text]
    assert importing == ["_registry.py"]
    compared = [path.name for path, text in sources.items() if '== "attention"' in text]
    assert compared == []
