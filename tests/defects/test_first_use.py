"""Defects that a new user of the library meets first.

Each test states the wanted behaviour and is expected to fail as long as the defect is there.
"""

import copy
import json
import re
import runpy
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
import grapnet.rules
from grapnet.integrations.transformers import graft_ffn

ROOT = Path(__file__).parents[2]


def require(holds: bool) -> None:
    """Fails the test when a control does not hold.

    An assertion would not do: it would count as the expected failure.
    """
    if not holds:
        pytest.fail("a control does not hold")


def is_refused(action: Callable[[], object]) -> bool:
    """Returns whether the library refuses an action; any other error is an error of the test."""
    try:
        action()
    except gn.GrapNetError:
        return True
    return False


def is_alive(net: gn.GrapNet) -> bool:
    """Returns whether every output depends on the input."""
    x = torch.randn(64, net.sizes[0], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        deviations = net(x).std(dim=0)
    return bool((deviations > 0).all())


def run_command(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    """Runs `grapnet` with these words in this process and returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["grapnet", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("grapnet", run_name="__main__", alter_sys=True)
    return int(end.value.code or 0)


def same_outputs(first: gn.GrapNet, second: gn.GrapNet) -> bool:
    x = torch.randn(4, first.sizes[0], generator=torch.Generator().manual_seed(0))
    return torch.equal(first(x), second(x))


def test_a_default_file_does_not_name_the_relations_that_were_cut(tmp_path: Path) -> None:
    net = gn.GrapNet([4, 6, 2])
    weakest = net.layers[0].outgoing().smallest(count=1)
    parent = int(weakest.parents)
    child = int(weakest.children)
    with net.edit(reason="cut one") as edit:
        edit.cut(weakest)
    path = tmp_path / "net.safetensors"

    gn.save(path, net, history="full")
    found = gn.load(path).blame(parent, child)
    require(found is not None and found.version == 1)

    gn.save(path, net)
    loaded = gn.load(path)
    require(loaded.version == 1)
    assert is_refused(lambda: loaded.blame(parent, child))
    assert is_refused(lambda: loaded.diff(0))


def test_the_prune_command_writes_a_smaller_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    full = tmp_path / "full.safetensors"
    pruned = tmp_path / "pruned.safetensors"
    torch.manual_seed(0)
    gn.save(full, gn.GrapNet([64, 128, 10]))
    words = ["--fraction", "0.9", "--json", "-o", pruned]
    require(run_command(monkeypatch, "prune", full, *words) == 0)
    outcome = json.loads(capsys.readouterr().out)
    require(gn.load(pruned).count().relations <= 1000)
    assert pruned.stat().st_size < 0.5 * full.stat().st_size
    # The outcome has the true sizes of both files, whatever the fields are called.
    assert full.stat().st_size in numbers_in(outcome)
    assert pruned.stat().st_size in numbers_in(outcome)


def numbers_in(outcome: object) -> set[int]:
    """Returns all whole numbers in the JSON outcome of a command."""
    return {int(digits) for digits in re.findall(r"\d+", json.dumps(outcome))}


def test_the_compact_command_writes_a_smaller_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    large = tmp_path / "large.safetensors"
    small = tmp_path / "small.safetensors"
    net = gn.GrapNet([64, 128, 10])
    with net.edit(reason="cut half") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.5))
    gn.save(large, net, undo=True)
    require(run_command(monkeypatch, "inspect", large) == 0)
    assert run_command(monkeypatch, "compact", large, "-o", small) == 0
    assert small.stat().st_size < large.stat().st_size
    assert same_outputs(gn.load(small), net)


def cut_of(net: gn.GrapNet, relations: gn.RelationSet) -> Callable[[], None]:
    """Returns an action that cuts these relations of a net."""

    def action() -> None:
        with net.edit(reason="cut") as edit:
            edit.cut(relations)

    return action


def test_cutting_the_last_relations_of_a_transition_raises() -> None:
    net = gn.GrapNet([6, 8, 4])
    assert is_refused(cut_of(net, net.layers[1].outgoing()))
    assert net.version == 0
    assert net.count().relations == 80


def test_cutting_the_last_parents_of_an_output_raises() -> None:
    net = gn.GrapNet([6, 8, 4])
    assert is_refused(cut_of(net, net.layers[2][:1].incoming()))
    assert net.version == 0
    assert net.count().relations == 80


def test_the_pruned_net_of_the_deployment_guide_depends_on_its_input() -> None:
    guide = (ROOT / "docs" / "guides" / "deploy.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    names = {}
    exec(examples[0], names)
    net = names["net"]
    require(net.version == 1)
    assert is_alive(net)


def pruning(fraction: float) -> gn.RuleManager:
    manager = gn.RuleManager(seed=0)
    manager.inject(grapnet.rules.PruneWeakest(fraction=fraction))
    return manager


def test_the_pruning_rule_leaves_outputs_that_depend_on_the_input() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([64, 128, 10])
    require(is_alive(net))
    pruning(0.9).apply(net)
    require(net.count().relations <= 1000)
    assert is_alive(net)


def test_the_preview_of_a_rule_that_empties_a_transition_raises() -> None:
    net = gn.GrapNet([6, 8, 4])
    pruning(0.5).apply(net, dry_run=True)
    assert is_refused(lambda: pruning(1.0).apply(net, dry_run=True))


def test_the_prune_command_leaves_outputs_that_depend_on_the_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    full = tmp_path / "full.safetensors"
    pruned = tmp_path / "pruned.safetensors"
    gn.save(full, gn.GrapNet([64, 128, 10]))
    require(is_alive(gn.load(full)))
    require(run_command(monkeypatch, "prune", full, "--fraction", "0.9", "-o", pruned) == 0)
    require(gn.load(pruned).count().relations <= 1000)
    assert is_alive(gn.load(pruned))


def test_the_prune_command_refuses_to_empty_a_transition(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = tmp_path / "full.safetensors"
    pruned = tmp_path / "pruned.safetensors"
    gn.save(full, gn.GrapNet([6, 8, 4]))
    require(run_command(monkeypatch, "prune", full, "--fraction", "0.5", "--dry-run") == 0)
    assert run_command(monkeypatch, "prune", full, "--fraction", "1.0", "-o", pruned) != 0
    assert not pruned.exists()


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="F8: the README has more than two thousand words",
)
def test_the_readme_has_at_most_900_words() -> None:
    words = (ROOT / "README.md").read_text().split()
    require(len(words) > 100)
    assert len(words) <= 900


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="F10: a transition has no density",
)
def test_a_transition_has_a_density() -> None:
    net = gn.GrapNet([8, 10, 5])
    with net.edit(reason="cut a quarter") as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=20))
    require(len(net.layers[0].outgoing()) == 60)
    assert getattr(net.transitions[0], "density", None) == 0.75
    assert getattr(net.transitions[1], "density", None) == 1.0


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="F11: the names of a net include its internals",
)
def test_the_names_of_a_net_are_for_users() -> None:
    internals = {
        "close_edit",
        "columns_of",
        "commit_change",
        "from_parts",
        "open_edit",
        "open_trial",
        "prepare_change",
        "require_no_edit",
        "set_columns",
        "take_back",
        "tokens",
        "write_all",
    }
    names = set(dir(gn.GrapNet([3, 2])))
    require({"edit", "select", "undo"} <= names)
    assert sorted(names & internals) == []


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="F11: the names of an edit include its internals",
)
def test_the_names_of_an_edit_are_for_users() -> None:
    internals = {"close", "is_waiting", "join", "prepare", "resolved"}
    names = set(dir(gn.GrapNet([3, 2]).edit()))
    require({"connect", "cut", "freeze"} <= names)
    assert sorted(names & internals) == []


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="F11: the names of a transition include its internals",
)
def test_the_names_of_a_transition_are_for_users() -> None:
    internals = {
        "differs_from",
        "hold",
        "is_assembled_in_order",
        "layout_changes",
        "prepare",
        "require_free",
        "rewire",
        "swap",
    }
    names = set(dir(gn.GrapNet([3, 2]).transitions[0]))
    require("weight" in names)
    assert sorted(names & internals) == []


class Attention(nn.Module):
    """Two projections and a dropout, as in an attention block."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.value = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.sigmoid(self.query(x)) * self.value(x))


class Block(nn.Module):
    """An attention block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attn(x))


@pytest.mark.xfail(
    strict=True,
    raises=TypeError,
    reason="F12: a pattern on names cannot be combined with a type of modules",
)
def test_a_pattern_can_be_limited_to_a_type() -> None:
    model = nn.Sequential(Block(), nn.Linear(8, 3))
    expected = ["0.attn.query", "0.attn.value"]
    require(list(gn.graft(copy.deepcopy(model), expected)) == expected)
    nets = gn.graft(model, "*.attn.*", only=nn.Linear)
    assert list(nets) == expected


class TiedModel(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(7, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.tok(ids))))


@pytest.mark.xfail(
    strict=True,
    raises=TypeError,
    reason="F13: a graft by type stops at a tied head, which cannot be left out by name",
)
def test_a_graft_leaves_out_modules_by_name() -> None:
    model = TiedModel()
    require(list(gn.graft(copy.deepcopy(model), "body")) == ["body"])
    nets = gn.graft(model, nn.Linear, skip=["head"])
    assert list(nets) == ["body"]
    assert type(model.head) is nn.Linear


class FeedForward(nn.Module):
    """A feed-forward block as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 32)
        self.fc2 = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="F14: graft_ffn, which needs no other package, is hidden among the integrations",
)
def test_graft_ffn_is_a_name_of_the_package() -> None:
    block = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    model = nn.Sequential(nn.Linear(4, 8), block)
    (expected,) = graft_ffn(copy.deepcopy(model))
    require(expected.net.sizes == [8, 32, 8])
    assert hasattr(gn, "graft_ffn")
    (handle,) = gn.graft_ffn(model)
    assert handle.net.sizes == [8, 32, 8]


def test_the_refusal_of_a_feed_forward_block_names_graft_ffn() -> None:
    model = nn.Sequential(nn.Linear(4, 8), FeedForward())
    with pytest.raises(gn.ConversionError) as refusal:
        gn.graft(model, "1")
    assert "graft_ffn" in str(refusal.value)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="F15: the refusal of a block with a LayerNorm does not name the norm",
)
def test_the_refusal_of_a_block_with_a_norm_names_the_norm() -> None:
    layers = OrderedDict(
        up=nn.Linear(8, 32), norm=nn.LayerNorm(32), act=nn.GELU(), down=nn.Linear(32, 8)
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(layers))
    with pytest.raises(gn.ConversionError) as refusal:
        graft_ffn(model)
    assert "norm" in str(refusal.value).lower()


class Residual(nn.Module):
    """Adds what a Linear computes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x)


def model_with_batch_norm() -> tuple[nn.Module, str]:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)), "0"


def model_with_residual() -> tuple[nn.Module, str]:
    return nn.Sequential(Residual(), nn.Linear(8, 3)), "0.fc"


@pytest.mark.parametrize("make", [model_with_batch_norm, model_with_residual])
@pytest.mark.xfail(
    strict=True,
    raises=TypeError,
    reason="F16: no check finds that an edit of an interface breaks the model around the net",
)
def test_a_check_of_the_model_finds_an_edit_that_it_cannot_run(
    make: Callable[[], tuple[nn.Module, str]],
) -> None:
    model, name = make()
    x = torch.randn(5, 8)
    net = gn.graft(model, name)[name]
    require(model(x).shape == (5, 3))
    with net.edit(reason="remove outputs that the model needs") as edit:
        edit.remove_nodes(net.layers[1][:4], interface=True)
    with pytest.raises(RuntimeError):
        model(x)
    with pytest.raises(gn.GrapNetError):
        gn.check(model, x)
    net.undo()
    gn.check(model, x)


COMMAND_WITHOUT_TORCH = """
import json
import sys
from importlib.metadata import entry_points

(command,) = entry_points(group="console_scripts", name="grapnet")
outcomes = []
for words in (["--version"], ["--help"], ["inspect"], ["inspect", "--no-such-option"]):
    sys.argv = ["grapnet", *words]
    try:
        code = command.load()()
    except SystemExit as end:
        code = end.code
    outcomes.append([words, code or 0, "torch" in sys.modules])
print(json.dumps(outcomes))
"""


def test_help_version_and_wrong_arguments_do_not_import_torch() -> None:
    command = [sys.executable, "-c", COMMAND_WITHOUT_TORCH]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    outcomes = json.loads(ran.stdout.splitlines()[-1])
    codes = [code for _, code, _ in outcomes]
    require(codes == [0, 0, 2, 2])
    assert [words for words, _, has_torch in outcomes if has_torch] == []


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="F18: the last step of RigL is given twice, to the rule and to its schedule",
)
def test_rigl_returns_a_rule_and_a_schedule_that_end_together() -> None:
    assert hasattr(grapnet.rules, "rigl")
    rule, schedule = grapnet.rules.rigl(steps=1000)
    assert rule.grow == "gradient"
    assert 0 < rule.decay_until <= 1000
    assert schedule.may_be_due(1, rule.decay_until)
    assert not schedule.may_be_due(rule.decay_until + 1, 10_000)
