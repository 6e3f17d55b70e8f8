"""Gates of an edit on spaces: faults inside of them, refusals, and what they must notice.

A gate that fails, or that refuses, leaves the model, its optimizer and the random numbers as they
are. Mutations of the library show that the gates and the matrix of `test_edits` notice an error.
"""

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.core import _grid, _journal, _prepare
from grapnet.spaces import Adopted, Example, Space, _adopted, _edit, _gates, _operators, _probe
from grapnet.spaces import _typing as typing_module
from grapnet.spaces._axes import Product, find
from tests.spaces import matrix, oracle, zoo
from tests.spaces.subjects import Subject, differing_tensors, loss_of, remove, subject

LINE = re.compile(r"\w+\.py:\d+")


class Fault(Exception):
    """The failure that is injected."""


class Failing:
    """Raises an error at some of its calls, and otherwise does what it replaces."""

    def __init__(self, real: Callable[..., Any], error: type[BaseException], *at: int) -> None:
        self.real = real
        self.error = error
        self.at = at or range(1 << 30)
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls - 1 in self.at:
            raise self.error("injected")
        return self.real(*args, **kwargs)


# Where a fault is raised: an object and the name of a function that an edit calls.
PLACES: dict[str, tuple[Any, str]] = {
    "typing after the edit": (_gates, "discover_twin"),
    "search of attributes": (_gates, "_candidates"),
    "descriptions of modules": (_gates, "_descriptions"),
    "maps of tensors": (_adopted, "_axis_map"),
    "probe": (_probe, "_compare"),
    "run of the probe": (_probe._Copy, "run"),
    "values of new nodes": (_edit, "_alike"),
    "new contents": (_prepare, "prepare_grids"),
    "assignments": (_prepare, "_prepare_model"),
    "journal": (_journal.Journal, "_prepare"),
    "old backward passes": (_prepare, "_refuse_old_backwards"),
}
FAULTS = [(place, Fault) for place in PLACES]
FAULTS += [(place, (KeyboardInterrupt, MemoryError)[n % 2]) for n, place in enumerate(PLACES)]


def head_space(net: Adopted) -> Space:
    """The three heads of the first attention of `zoo.vit`: `num_heads` must follow."""
    found = [space for space in net.spaces if space.name.startswith("blocks.0.attn.qkv")]
    (heads,) = [space for space in found if len(space) == 3 and not space.pins]
    return heads


def edit_heads(subject: Subject) -> None:
    """Removes a head and adds hidden nodes."""
    net = subject.net
    with net.edit(reason="heads", generator=torch.Generator().manual_seed(5)) as edit:
        edit.remove_nodes(head_space(net)[1])
        edit.add_nodes(net.space("blocks.1.fc1"), 2)


@pytest.fixture
def vit() -> Subject:
    return subject(zoo.MODELS["vit"]())


@pytest.fixture(scope="module")
def edited() -> Subject:
    """What `edit_heads` leads to."""
    found = subject(zoo.MODELS["vit"]())
    edit_heads(found)
    return found


@pytest.mark.parametrize(("place", "error"), FAULTS)
def test_a_fault_before_the_decision_changes_nothing(
    place: str,
    error: type[BaseException],
    vit: Subject,
    edited: Subject,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder, name = PLACES[place]
    failing = Failing(getattr(holder, name), error)
    random = torch.get_rng_state()
    heads = head_space(vit.net)
    before = vit.snapshot()
    loss = loss_of(vit.model, vit.case)
    with monkeypatch.context() as patched:
        # A plain function is bound to its class, a Failing object would not be.
        patched.setattr(holder, name, lambda *args, **kwargs: failing(*args, **kwargs))
        # A typing that raises Exception counts as a model that cannot run.
        with pytest.raises((error, gn.errors.EditError)):
            edit_heads(vit)
    assert failing.calls > 0
    assert oracle.same(before, vit.snapshot()) == []
    assert torch.equal(random, torch.get_rng_state())
    assert vit.net.version == 0
    assert torch.is_grad_enabled()
    gn.check(vit.net)
    loss.backward()
    vit.model.zero_grad()
    edit_heads(vit)
    assert differing_tensors(vit.model, edited.model) == []
    assert heads.verdict == "exact"


def try_heads(subject: Subject) -> None:
    """Removes a head in a trial."""
    with subject.net.edit(trial=True) as edit:
        edit.remove_nodes(head_space(subject.net)[0])
        edit.commit()


def undo(subject: Subject) -> None:
    subject.net.undo()


class Refusal:
    """A follower that stops every commit."""

    def prepare(self, graph: Adopted, commit: gn.Commit) -> Callable[[], None]:
        raise Fault


@pytest.mark.parametrize("act", [edit_heads, undo, try_heads])
def test_a_follower_that_refuses_stops_the_commit(
    act: Callable[[Subject], None], vit: Subject, edited: Subject
) -> None:
    refusal = Refusal()
    if act is undo:
        edit_heads(vit)
    vit.net.follow(refusal)
    before = vit.snapshot()
    with pytest.raises(Fault):
        act(vit)
    assert oracle.same(before, vit.snapshot()) == []
    vit.net.unfollow(refusal)
    act(vit)
    if act is not edit_heads:
        edit_heads(vit)
    assert differing_tensors(vit.model, edited.model) == []


def test_an_optimizer_that_cannot_follow_stops_the_commit(vit: Subject) -> None:
    weight = vit.model.blocks[0].attn.proj.weight
    vit.optimizer.state[weight]["odd"] = torch.zeros(2, 3)
    before = vit.snapshot()
    with pytest.raises(gn.errors.OptimizerError, match=r"blocks\.0\.attn\.proj\.weight"):
        edit_heads(vit)
    assert oracle.same(before, vit.snapshot()) == []
    del vit.optimizer.state[weight]["odd"]
    edit_heads(vit)


@pytest.mark.parametrize("at", [0, 5, 20])
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_an_install_that_fails_once_is_completed(
    at: int,
    error: type[BaseException],
    vit: Subject,
    edited: Subject,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = Failing(_grid.replace_content, error, at)
    monkeypatch.setattr(_grid, "replace_content", failing)
    with pytest.raises(error):
        edit_heads(vit)
    assert vit.net.version == 1
    _require_equal(vit, edited)


def test_installs_that_two_interrupts_stop_are_completed_by_the_next_call(
    vit: Subject, edited: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first attempt ends at its 11th Parameter, the second at its first.
    failing = Failing(_grid.replace_content, KeyboardInterrupt, 10, 11)
    monkeypatch.setattr(_grid, "replace_content", failing)
    with pytest.raises(KeyboardInterrupt):
        edit_heads(vit)
    assert vit.net.version == 1
    assert failing.calls > 12
    _require_equal(vit, edited)


def _require_equal(vit: Subject, edited: Subject) -> None:
    assert differing_tensors(vit.model, edited.model) == []
    assert vit.model.blocks[0].attn.num_heads == 2
    left = vit.optimizer.state_dict()["state"]
    right = edited.optimizer.state_dict()["state"]
    for number, state in left.items():
        for key, value in state.items():
            assert torch.equal(value, right[number][key]), (number, key)
    gn.check(vit.net)
    vit.step()
    vit.net.undo()
    assert vit.model.blocks[0].attn.num_heads == 3


# Refusals

# Where no operation of the model is to blame.
PLAIN = ("input", "output", "unseen", "positions of the data", "a tensor outside")


def spaces_of(net: Adopted, model: nn.Module, name: str) -> list[Space]:
    """Returns the spaces on the output axis of a module."""
    place = zoo.output_axis(model, name)
    return [space for space in net.spaces if place in space.places()]


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_what_is_pinned_is_refused_with_its_operation_and_line(name: str) -> None:
    case = zoo.REFUSED[name]()
    found = subject(case, further=False)
    before = found.snapshot()
    operations = []
    for module in case.expected.get("pinned", ()):
        for space in spaces_of(found.net, found.model, module):
            for verb in (_remove_first, _add_one):
                with pytest.raises(gn.errors.EditError) as refusal:
                    verb(found, space)
                message = str(refusal.value)
                assert space.name in message
                if not any(word in message for word in PLAIN):
                    assert LINE.search(message), message
                    operations.append(message)
    assert oracle.same(before, found.snapshot()) == []
    for operation in case.expected.get("operation", ()):
        everything = [*operations, *(pin for s in found.net.spaces for pin in s.pins)]
        assert any(operation in message for message in everything), everything
    for unseen in case.expected.get("unseen", ()):
        assert unseen in found.net._typed.unread


def _remove_first(found: Subject, space: Space) -> None:
    remove(found, {space: [0]})


def _add_one(found: Subject, space: Space) -> None:
    with found.net.edit() as edit:
        edit.add_nodes(space, 1)


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_the_free_spaces_beside_refused_ones_are_exact(name: str) -> None:
    case = zoo.REFUSED[name]()
    found = subject(case)
    for module in case.expected.get("free", ()):
        exact = []
        for space in spaces_of(found.net, found.model, module):
            if not space.pins:
                remove(found, {space: [0]})
                exact.append(space.verdict)
                found.net.undo()
        assert "exact" in exact, module


@pytest.mark.parametrize("name", ["hard_split"])
def test_edits_that_would_break_the_code_are_refused(name: str) -> None:
    case = zoo.REFUSED[name]()
    found = subject(case, further=False)
    before = found.snapshot()
    for module in case.expected["refused"]:
        spaces = spaces_of(found.net, found.model, module)
        assert spaces
        # Node 0 of the axis is in one of them.
        (first,) = [s for s in spaces if 0 in s.places()[zoo.output_axis(found.model, module)]]
        with pytest.raises(gn.errors.EditError) as refusal:
            remove(found, {first: [0]})
        assert first.name in str(refusal.value)
        assert f"{len(first) - 1} nodes" in str(refusal.value)
    assert oracle.same(before, found.snapshot()) == []


def test_what_another_path_may_share_is_pinned_where_values_choose_the_path() -> None:
    case = zoo.REFUSED["data_dependent"]()
    found = subject(case, further=False)
    for module in case.expected["refused"]:
        for space in spaces_of(found.net, found.model, module):
            assert any("negative" in why for why in space.pins)


def test_both_paths_of_an_if_are_edited_when_both_are_examples() -> None:
    case = zoo.REFUSED["two_paths"]()
    found = subject(case)
    remove(found, {found.net.space("trunk"): [0, 3]})
    assert found.model.short.in_features == 6
    assert found.model.deep[0].in_features == 6
    for args, kwargs in case.to(torch.float64).further:
        found.model(*args, **kwargs)
    found.step()


def test_parameters_of_a_path_that_was_not_taken_are_pinned() -> None:
    found = subject(zoo.REFUSED["two_paths"](), further=False)
    assert set(found.net._typed.unread) == {
        "deep.0.weight",
        "deep.0.bias",
        "deep.2.weight",
        "deep.2.bias",
    }
    before = found.snapshot()
    for name in ("deep.0", "deep.2"):
        for space in spaces_of(found.net, found.model, name):
            assert space.verdict == "pinned"
    assert oracle.same(before, found.snapshot()) == []


class Disagreeing(nn.Module):
    """One path takes the ten channels for two times five, the other for three and seven."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 10)
        self.three = nn.Linear(3, 2)
        self.seven = nn.Linear(7, 2)
        self.five = nn.Linear(5, 2)

    def forward(self, x: Tensor, pairs: bool = False) -> Tensor:
        x = torch.relu(self.trunk(x))
        if pairs:
            return self.five(x.view(len(x), 2, -1).sum(1))
        three, seven = torch.split(x, [3, 7], 1)
        return self.three(three) + self.seven(seven)


def test_paths_that_disagree_are_pinned_with_a_line() -> None:
    model = Disagreeing()
    x = torch.randn(2, 4)
    net = gn.adopt(model, x, examples=[Example((x,), {"pairs": True})])
    pins = [pin for space in net.spaces if "trunk.weight" in space.writers for pin in space.pins]
    assert pins
    assert all(LINE.search(pin) for pin in pins), pins
    with pytest.raises(gn.errors.EditError, match=r"test_gates\.py:\d+"), net.edit() as edit:
        edit.remove_nodes(net.space("trunk")[0])


# Numbers that follow


def test_a_hidden_attribute_follows_there_and_back(vit: Subject) -> None:
    attention = vit.model.blocks[0].attn
    before = vit.snapshot()
    commit = remove(vit, {head_space(vit.net): [0]})
    followed = {(c.module, c.name): (c.before, c.after) for c in commit.change.attributes}
    assert followed["blocks.0.attn", "num_heads"] == (3, 2)
    assert attention.num_heads == 2
    assert attention.head_dim == 8
    assert vit.model.blocks[1].attn.num_heads == 3
    vit.net.undo()
    assert oracle.same(before, vit.snapshot()) == []
    vit.net.redo()
    assert attention.num_heads == 2


def test_several_attributes_follow_one_space() -> None:
    found = subject(zoo.MODELS["gpt_tied"]())
    heads = [s for s in found.free if len(s) == 3 and s.name.startswith("h.0.c_attn")]
    commit = remove(found, {heads[0]: [2]})
    followed = {(c.module, c.name): (c.before, c.after) for c in commit.change.attributes}
    assert followed["h.0", "num_heads"] == (3, 2)
    assert followed["h.0", "split_size"] == (24, 16)
    assert ("h.0", "head_dim") not in followed
    found.step()


def test_one_number_of_two_spaces_follows_when_both_change_together() -> None:
    found = subject(zoo.MODELS["gpt_tied"]())
    widths = [s for s in found.free if len(s) == 8 and s.name.startswith("h.0.c_attn")]
    assert len(widths) == 2
    before = found.snapshot()
    with pytest.raises(gn.errors.EditError):
        remove(found, {widths[0]: [0]})
    assert oracle.same(before, found.snapshot()) == []
    remove(found, {width: [0, 5] for width in widths})
    assert found.model.h[0].head_dim == 6
    assert found.model.h[0].split_size == 18
    found.step()
    found.net.undo()


def test_what_cannot_follow_is_refused_after_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    found = subject(zoo.MODELS["multihead_encoder"]())
    heads = [s for s in found.free if len(s) == 3]
    before = found.snapshot()
    counting = Failing(_gates.discover_twin, Fault, -1)
    monkeypatch.setattr(_gates, "discover_twin", counting)
    with pytest.raises(gn.errors.EditError):
        remove(found, {heads[0]: [0]})
    assert 1 <= counting.calls <= 100
    assert oracle.same(before, found.snapshot()) == []
    # The hidden layer beside it is as free as ever.
    remove(found, {found.net.space("layers.0.linear1"): [0]})


def test_the_size_of_a_space_in_a_formula_is_found_by_the_probe(vit: Subject) -> None:
    widths = [s for s in vit.free if len(s) == 8 and s.name.startswith("blocks.0.attn.qkv")]
    for width in widths:
        try:
            remove(vit, {width: [0]})
        except gn.errors.EditError:
            continue
        vit.net.undo()
    assert {width.verdict for width in widths} <= {"differs", "exact", "unproved"}
    assert vit.net.space("blocks.0.fc1").verdict in ("exact", "unproved")


class Scaled(nn.Module):
    """A hidden layer with a large effect beside one whose width is a number in the formula."""

    def __init__(self) -> None:
        super().__init__()
        self.loud = nn.Linear(4, 6)
        self.loud_out = nn.Linear(6, 2)
        self.faint = nn.Linear(4, 6)
        self.faint_out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        loud = self.loud_out(torch.relu(self.loud(x)))
        faint = torch.relu(self.faint(x))
        return loud * 1e4 + self.faint_out(faint) / faint.shape[1]


def test_a_faint_difference_is_found_beside_a_loud_effect() -> None:
    torch.manual_seed(0)
    model = Scaled().double()
    net = gn.adopt(model, torch.randn(5, 4, dtype=torch.float64))
    with net.edit() as edit:
        edit.remove_nodes(net.space("loud")[:2])
        edit.remove_nodes(net.space("faint")[:2])
    assert net.space("loud").verdict == "exact"
    assert net.space("faint").verdict == "differs"


# Mutations: what the library forgets, the gates or the matrix notice


def is_noticed(build: Callable[[], zoo.Case]) -> bool:
    """Returns whether a gate refuses what it must not, or the matrix finds a difference."""
    try:
        outcomes = matrix.removals(subject(build()), train=1)
    except (AssertionError, RuntimeError, LookupError, ValueError):
        return True
    allowed = ("exact", "normalised")
    return any(outcome.verdict not in allowed for outcome in outcomes)


def test_nothing_is_noticed_without_a_mutation() -> None:
    for name in ("vgg", "cascaded_concat", "fully_connected", "groupnorm"):
        assert not is_noticed(zoo.MODELS[name]), name


FORGOTTEN = {
    "a rider": "4.bias",
    "a norm": "4.weight",
    "a buffer": "4.running_mean",
    "another buffer": "4.running_var",
    "a reader": "8.weight",
    "a writer": "3.weight",
    "a bias": "0.bias",
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_forgotten_tensor_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Adopted._maps_of

    def forgetful(self: Adopted, *args: Any) -> Any:
        maps = real(self, *args)
        maps.pop(FORGOTTEN[what], None)
        return maps

    monkeypatch.setattr(Adopted, "_maps_of", forgetful)
    assert is_noticed(zoo.MODELS["vgg"])


@pytest.mark.parametrize("what", ["4.bias", "4.running_mean", "8.weight"])
def test_a_tensor_that_moves_by_one_position_too_many_is_noticed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Adopted._maps_of

    def shifted(self: Adopted, *args: Any) -> Any:
        maps = real(self, *args)
        if what in maps:
            axes = {}
            for dim, index in maps[what].axes.items():
                removed = (index.removed + 1) % index.old_size
                axes[dim] = replace_removed(index, removed.sort().values)
            maps[what] = type(maps[what])(maps[what].shape, axes)
        return maps

    monkeypatch.setattr(Adopted, "_maps_of", shifted)
    assert is_noticed(zoo.MODELS["vgg"])


def replace_removed(index: Any, removed: Tensor) -> Any:
    return type(index)(index.old_size, index.new_size, removed, index.inserted)


def test_a_forgotten_member_of_a_space_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _adopted.spaces_of

    def forgetful(typed: Any) -> Any:
        axes = dict(typed.axes)
        axes.pop("4.bias", None)
        return real(replace(typed, axes=axes))

    monkeypatch.setattr(_adopted, "spaces_of", forgetful)
    assert is_noticed(zoo.MODELS["vgg"])


def test_a_reader_that_was_not_noted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _adopted.discover

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        typed = real(*args, **kwargs)
        readers = {}
        for atom, places in typed.readers.items():
            readers[atom] = tuple(place for place in places if place[0] != "8.weight")
        return replace(typed, readers=readers)

    monkeypatch.setattr(_adopted, "discover", forgetful)
    assert is_noticed(zoo.MODELS["vgg"])


def test_a_forgotten_attribute_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptions = _gates._descriptions
    candidates = _gates._candidates

    def forgetful(*args: Any) -> Any:
        found = descriptions(*args)
        return {place: value for place, value in found.items() if place[1] != "num_groups"}

    def forgetful_search(*args: Any) -> Any:
        return (one for one in candidates(*args) if one.attribute != "num_groups")

    # What the first forgets, the search finds: the model is edited as it should be.
    monkeypatch.setattr(_gates, "_descriptions", forgetful)
    assert not is_noticed(zoo.MODELS["groupnorm"])
    monkeypatch.setattr(_gates, "_candidates", forgetful_search)
    assert is_noticed(zoo.MODELS["groupnorm"])


def test_an_attribute_that_is_found_and_then_forgotten_is_noticed(
    vit: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _gates.Gates.foresee

    def forgetful(self: Any, *args: Any) -> Any:
        return [change for change in real(self, *args) if change.name != "num_heads"]

    monkeypatch.setattr(_gates.Gates, "foresee", forgetful)
    heads = head_space(vit.net)
    try:
        remove(vit, {heads: [0]})
        vit.outputs()
    except (gn.errors.EditError, RuntimeError):
        return
    assert heads.verdict != "exact"


def reversed_cat(typing: Any, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Types a concatenation as that of the same tensors in the other order."""
    return _operators.cat(typing, func, (list(reversed(args[0])), *args[1:]), kwargs, out)


def lone_norm(typing: Any, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Forgets that the weights of a norm have the channels of its input."""
    found = _operators.batch_norm(typing, func, (args[0], None, None, *args[3:]), kwargs, out)
    return found


def lone_sum(typing: Any, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Forgets that both sides of a sum have the same channels."""
    return [typing.of(args[0])]


def blind_convolution(typing: Any, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Forgets that a convolution reads the channels of its input."""
    noted = dict(typing.read_dims)
    found = _operators.convolution(typing, func, args, kwargs, out)
    typing.read_dims.clear()
    typing.read_dims.update(noted)
    return found


def turned_view(typing: Any, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Takes flattened channels for ones whose rows come first."""
    found = _operators.view(typing, func, args, kwargs, out)
    turned = []
    for axes in found:
        row = []
        for axis in axes:
            axis = find(axis)
            if isinstance(axis, Product):
                axis = Product(tuple(reversed(axis.parts)))
            row.append(axis)
        turned.append(row)
    return turned


BROKEN: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "cat": ("cascaded_concat", ("aten::cat",), reversed_cat),
    "batch norm": (
        "vgg",
        (
            "aten::native_batch_norm",
            "aten::cudnn_batch_norm",
            "aten::_native_batch_norm_legit",
            "aten::_native_batch_norm_legit_no_training",
            "aten::_batch_norm_with_update",
            "aten::_batch_norm_no_update",
            "aten::batch_norm",
        ),
        lone_norm,
    ),
    "sum": ("fully_connected", ("aten::add",), lone_sum),
    "reading": ("vgg", ("aten::convolution", "aten::conv2d"), blind_convolution),
    "flatten": (
        "vgg",
        ("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_alias"),
        turned_view,
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_of_typing_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, operators, rule = BROKEN[what]
    used = Failing(rule, Fault, -1)

    def counted(*args: Any) -> Any:
        return used(*args)

    # register_rule writes here; a patch of the table is undone after the test.
    for operator in operators:
        monkeypatch.setitem(typing_module._RULES, operator, counted)
    assert is_noticed(zoo.MODELS[name])
    assert used.calls > 0


class Divided(nn.Module):
    """Divides by a number that follows from the width, in steps of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.second(h / -(-h.shape[1] // 8))


def test_a_verdict_does_not_outlive_the_numbers_that_it_was_found_with() -> None:
    torch.manual_seed(0)
    net = gn.adopt(Divided().double(), torch.randn(5, 4, dtype=torch.float64))
    space = net.space("first")
    with net.edit() as edit:
        edit.remove_nodes(space[:1])
    assert space.verdict == "exact"
    with net.edit() as edit:
        edit.remove_nodes(space[:9])
    assert space.verdict == "differs"


def test_nodes_are_not_added_in_silence_where_the_size_is_a_number_in_the_formula() -> None:
    torch.manual_seed(0)
    model = Scaled().double()
    net = gn.adopt(model, torch.randn(5, 4, dtype=torch.float64))
    with pytest.raises(gn.errors.EditError, match="faint"), net.edit() as edit:
        edit.add_nodes(net.space("faint"), 2)
    assert net.version == 0
    with net.edit() as edit:
        edit.add_nodes(net.space("faint"), 2, readers="alike")
    assert net.version == 1


def test_numbers_are_not_taken_for_nodes() -> None:
    net = gn.adopt(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(2, 3))
    for nodes in ([0, 1], torch.tensor([0]), 0):
        with pytest.raises(gn.errors.EditError), net.edit() as edit:
            edit.remove_nodes(nodes)
    assert len(net.space("0")) == 4


def test_the_graph_of_a_model_that_is_adopted_again_ends() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)))
    first = gn.adopt(model, torch.randn(2, 3))
    with first.edit() as edit:
        edit.remove_nodes(first.space("0")[:1])
    second = gn.adopt(model, torch.randn(2, 3))
    assert gn.adopted(model) is second
    with pytest.raises(gn.errors.EditError):
        first.undo()
    with pytest.raises(gn.errors.EditError), first.edit():
        pass
    with pytest.raises(gn.errors.EditError, match="Sequential"):
        gn.adopt(model[1], torch.randn(2, 3))
    assert len(second.space("0")) == 3


def test_a_compiled_model_is_adopted_as_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net = gn.adopt(torch.compile(model, backend="eager"), torch.randn(2, 3))
    assert net.model is model
    assert len(net.space("0")) == 4


def test_parameters_that_no_example_reads_are_listed() -> None:
    case = zoo.MODELS["unused_parameters"]()
    net = gn.adopt(case.model, *case.inputs, **case.kwargs)
    assert net.unseen == tuple(sorted(net.unseen, key=list(dict(net.named_parameters())).index))
    assert set(case.expected["unseen"]) <= set(net.unseen)
    assert all(name in str(net) for name in net.unseen)


def test_a_graph_can_be_pickled() -> None:
    net = gn.adopt(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(2, 3))
    again = pickle.loads(pickle.dumps(net))
    with again.edit() as edit:
        edit.remove_nodes(again.space("0")[:1])
    assert (len(again.space("0")), len(net.space("0"))) == (3, 4)
