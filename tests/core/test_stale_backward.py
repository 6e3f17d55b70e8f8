"""A backward through a forward pass of an older version never writes or returns a gradient.

Every edit, every backend and every way to run a backward pass make one cell. Without an edit the
same ways give the right gradients, and nothing raises that has no reason to.
"""

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.utils.checkpoint import checkpoint

import grapnet as gn

BACKENDS = ["reference", "dense", "family", "sparse", "attention"]


def x(*, grad: bool = False) -> Tensor:
    return torch.linspace(-1, 1, 20).reshape(5, 4).requires_grad_(grad)


def made(backend: str) -> gn.GrapNet:
    """Returns a net that has been edited once, so that there is something to undo."""
    torch.manual_seed(0)
    net = gn.GrapNet([4, 3, 2], activation="gelu")
    net.execution.use(backend)
    with net.edit(reason="first") as edit:
        edit.cut(net.layers[0][3], slots=[2])
    return net


# The edits

Operation = Callable[[gn.GrapNet, gn.Edit], object]


@dataclass(frozen=True)
class Kind:
    """An edit, and what has to happen to a net before its forward pass."""

    edit: Callable[[gn.GrapNet], object]
    before: Callable[[gn.GrapNet], object] = lambda net: None


def edited(operation: Operation, *, trial: bool = False) -> Callable[[gn.GrapNet], None]:
    def action(net: gn.GrapNet) -> None:
        with net.edit(reason="change", trial=trial) as edit:
            operation(net, edit)
            edit.commit()

    return action


def cut(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.cut(net.layers[0][0], slots=[0])


def exchange(net: gn.GrapNet, edit: gn.Edit) -> None:
    """Leaves as many relations as before, in the same places of the array."""
    node = net.layers[0][0]
    edit.cut(node, slots=[-1])
    edit.connect(node, node.children[-1])


def connect(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.connect(net.layers[0][3], net.layers[1][2])


def add_nodes(net: gn.GrapNet, edit: gn.Edit) -> None:
    added = edit.add_nodes(1, 2)
    edit.connect(net.layers[0], added)
    edit.connect(added, net.layers[2])


def fold_orphans(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.cut(net.layers[1][0].incoming())
    edit.remove_orphans(fold_bias=True)


def freeze(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.freeze(net.layers[1][0])


def assign(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.assign(net.layers[1].outgoing(), 0.5)


KINDS: dict[str, Kind] = {
    "cut": Kind(edited(cut)),
    "exchange": Kind(edited(exchange)),
    "connect": Kind(edited(connect)),
    "add nodes": Kind(edited(add_nodes)),
    "remove nodes": Kind(edited(lambda net, edit: edit.remove_nodes(net.layers[1][1]))),
    "freeze": Kind(edited(freeze)),
    "unfreeze": Kind(
        edited(lambda net, edit: edit.unfreeze(net.layers[1][0])), before=edited(freeze)
    ),
    "set activation": Kind(edited(lambda net, edit: edit.set_activation(net.layers[1][0], "tanh"))),
    "assign": Kind(edited(assign)),
    "set owner": Kind(edited(lambda net, edit: edit.set_owner(net.layers[1], "task"))),
    "fold orphans": Kind(edited(fold_orphans)),
    "remove an output": Kind(
        edited(lambda net, edit: edit.remove_nodes(net.layers[2][1], interface=True))
    ),
    "undo": Kind(lambda net: net.undo()),
    "redo": Kind(lambda net: net.redo(), before=lambda net: net.undo()),
    "trial": Kind(edited(cut, trial=True)),
}


# The ways to run a backward pass

Gradients = Sequence[Tensor | None]
Loss = Callable[[gn.GrapNet], Tensor]
Finish = Callable[[], Gradients | None]


@dataclass(frozen=True)
class Way:
    """A forward pass, and the backward pass that `begin` returns to be run after the edit.

    The backward pass returns gradients of the Parameters, or writes them. `stale` is what it has to
    do after an edit: raise StaleTopologyError; raise any error; return and write nothing; or return
    the gradients of the pass that ran, which is what `torch.func` promises of a pure function.
    """

    begin: Callable[[gn.GrapNet], Finish]
    loss: Loss
    stale: Literal["raises", "fails", "nothing", "pure"]


def output_loss(net: gn.GrapNet) -> Tensor:
    return net(x()).square().sum()


def penalty_by_parameters(net: gn.GrapNet) -> Tensor:
    gradients = torch.autograd.grad(output_loss(net), list(net.parameters()), create_graph=True)
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


def penalty_by_input(net: gn.GrapNet) -> Tensor:
    inputs = x(grad=True)
    (gradient,) = torch.autograd.grad(net(inputs).square().sum(), inputs, create_graph=True)
    return gradient.square().sum()


WAYS: dict[str, Way] = {}


def way(
    *,
    loss: Loss = output_loss,
    stale: Literal["raises", "fails", "nothing", "pure"] = "raises",
) -> Callable[[Callable[[gn.GrapNet], Finish]], None]:
    """Adds a function to the WAYS under its name."""

    def add(begin: Callable[[gn.GrapNet], Finish]) -> None:
        WAYS[begin.__name__] = Way(begin, loss, stale)

    return add


def add_plain(name: str, loss: Loss) -> None:
    """Adds the plain backward of a loss to the WAYS."""
    WAYS[name] = Way(lambda net: loss(net).backward, loss, "raises")


add_plain("plain", output_loss)
add_plain("input_too", lambda net: net(x(grad=True)).square().sum())
add_plain("walk", lambda net: net.walk(x()).square().sum())
add_plain("W_alloc", lambda net: net.layers[0][1].W_alloc.square().sum())
add_plain("relations", lambda net: net.layers[0].outgoing().weights.square().sum())
add_plain("biases", lambda net: net.layers[1].biases.square().sum())
add_plain("biases_that_few_edits_touch", lambda net: net.layers[2].biases[:1].square().sum())
add_plain("double_backward_by_parameters", penalty_by_parameters)
add_plain("double_backward_by_input", penalty_by_input)


# Torch has an error of its own for a second pass that saves tensors of other shapes.
@way(stale="fails")
def checkpoint_without_reentry(net: gn.GrapNet) -> Finish:
    return checkpoint(net, x(), use_reentrant=False).square().sum().backward


@way()
def reentrant_checkpoint(net: gn.GrapNet) -> Finish:
    return checkpoint(net, x(grad=True), use_reentrant=True).square().sum().backward


def add_reentrant(name: str, part: Callable[[gn.GrapNet, Tensor], Tensor]) -> None:
    """Adds a function of a net and an input, under a reentrant checkpoint, to the WAYS."""

    def begin(net: gn.GrapNet) -> Finish:
        run = functools.partial(part, net)
        return checkpoint(run, x(grad=True), use_reentrant=True).square().sum().backward

    WAYS[name] = Way(begin, lambda net: part(net, x()).square().sum(), "raises")


add_reentrant("reentrant_checkpoint_of_a_model", lambda net, inputs: net(2 * inputs))
add_reentrant("reentrant_walk", lambda net, inputs: net.walk(inputs))
add_reentrant("reentrant_W_alloc", lambda net, inputs: inputs * net.layers[0][1].W_alloc.sum())
add_reentrant(
    "reentrant_relations", lambda net, inputs: inputs * net.layers[0].outgoing().weights.sum()
)
add_reentrant("reentrant_biases", lambda net, inputs: inputs * net.layers[1].biases.sum())


@way(stale="fails")
def autograd_grad(net: gn.GrapNet) -> Finish:
    loss = output_loss(net)
    return lambda: torch.autograd.grad(loss, list(net.parameters()))


@way(stale="nothing")
def autograd_grad_of_unused(net: gn.GrapNet) -> Finish:
    loss = output_loss(net)
    return lambda: torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)


@way(stale="nothing")
def backward_to_inputs(net: gn.GrapNet) -> Finish:
    loss = output_loss(net)
    return lambda: loss.backward(inputs=list(net.parameters()))


@way(stale="pure")
def functional_vjp(net: gn.GrapNet) -> Finish:
    inputs = x()

    def run(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(net, parameters, (inputs,)).square().sum()

    loss, pull = vjp(run, dict(net.named_parameters()))
    return lambda: list(pull(torch.ones_like(loss))[0].values())


@way()
def tensor_hooks(net: gn.GrapNet) -> Finish:
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient.clone())
    return output_loss(net).backward


@way()
def post_accumulate_hooks(net: gn.GrapNet) -> Finish:
    loss = output_loss(net)
    reached: list[Tensor] = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(reached.append)

    def finish() -> None:
        try:
            loss.backward()
        except gn.errors.StaleTopologyError:
            assert reached == []
            raise

    return finish


def add_switched(
    name: str,
    loss: Loss,
    of: Callable[[gn.GrapNet], nn.Module],
    run: Callable[[gn.GrapNet], Tensor] | None = None,
) -> None:
    """Adds a loss to the WAYS whose Parameters, or some of them, need no gradient in the edit.

    `run` computes the same loss in another way.
    """

    def begin(net: gn.GrapNet) -> Finish:
        result = (run or loss)(net)
        of(net).requires_grad_(False)

        def finish() -> None:
            of(net).requires_grad_(True)
            result.backward()

        return finish

    WAYS[name] = Way(begin, loss, "raises")


def relations_loss(net: gn.GrapNet) -> Tensor:
    return net.layers[0].outgoing().weights.square().sum()


def reentrant_loss(net: gn.GrapNet) -> Tensor:
    return checkpoint(net, x(grad=True), use_reentrant=True).square().sum()


add_switched("gradients_off", output_loss, lambda net: net)
add_switched("the_only_gradient_off", relations_loss, lambda net: net.transitions[0])
add_switched("reentrant_gradients_off", output_loss, lambda net: net, run=reentrant_loss)


@way()
def another_thread(net: gn.GrapNet) -> Finish:
    loss = output_loss(net)
    errors: list[Exception] = []

    def run() -> None:
        try:
            loss.backward()
        except Exception as error:
            errors.append(error)

    def finish() -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    return finish


# A sum, because torch refuses a backward that needs values which were written since.
@way(loss=lambda net: net.layers[0].outgoing().weights.sum())
def a_state_dict_loaded_after_the_edit(net: gn.GrapNet) -> Finish:
    loss = net.layers[0].outgoing().weights.sum()

    def finish() -> None:
        net.load_state_dict(net.state_dict())
        loss.backward()

    return finish


@way()
def a_cast_after_the_edit(net: gn.GrapNet) -> Finish:
    loss = output_loss(net)

    def finish() -> None:
        net.double()
        net.float()
        loss.backward()

    return finish


def runs(way: str, backend: str) -> bool:
    """Returns whether a way and a backend go together: the walk is the sum of Algorithm 1."""
    return "walk" not in way or backend != "attention"


CELLS = [(way, backend) for way in WAYS for backend in BACKENDS if runs(way, backend)]


def give_gradients(net: gn.GrapNet) -> list[Tensor | None]:
    """Gives every second Parameter a gradient and the others none; returns copies of them."""
    kept: list[Tensor | None] = []
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = None
        if number % 2 == 0:
            parameter.grad = torch.full_like(parameter, 0.25)
        kept.append(copy.deepcopy(parameter.grad))
    return kept


def same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return torch.equal(found, expected)


def result(finish: Finish) -> tuple[Exception | None, Gradients]:
    """Runs a backward pass; returns its error and the gradients that it returned."""
    try:
        returned = finish()
    except (RuntimeError, gn.errors.GrapNetError) as error:
        return error, []
    return None, returned or []


def outcome(way: Way, kind: Kind, backend: str) -> str:
    """Returns what is wrong with one cell, or an empty text."""
    net = made(backend)
    kind.before(net)
    expected = torch.autograd.grad(way.loss(net), list(net.parameters()), allow_unused=True)
    finish = way.begin(net)
    version = net.version
    kind.edit(net)
    kept = give_gradients(net)
    error, returned = result(finish)
    present = [parameter.grad for parameter in net.parameters()]
    if not all(map(same, present, kept)):
        # A pass that runs again at the version that it first ran at is not a stale one.
        if error is not None or version != net.version or way.begin not in REENTRANT:
            return f"a gradient was written, and then: {error!r}"
        for gradient, *parts in zip(present, kept, expected, strict=True):
            right = [part for part in parts if part is not None]
            torch.testing.assert_close(gradient, sum(right) if right else None)
    elif way.stale == "raises" and not isinstance(error, gn.errors.StaleTopologyError):
        return f"instead of StaleTopologyError: {error!r}"
    elif way.stale == "fails" and error is None:
        return "nothing was raised"
    elif way.stale in ("nothing", "pure") and error is not None:
        return f"raised {error!r}"
    elif way.stale == "nothing" and any(gradient is not None for gradient in returned):
        return "a gradient was returned"
    elif way.stale == "pure":
        torch.testing.assert_close(returned, expected)
    net.zero_grad()
    # The old loss is alive, and a fresh pass works all the same.
    output_loss(net).backward()
    gn.check(net)
    return ""


REENTRANT = {way.begin for name, way in WAYS.items() if name.startswith("reentrant")}


@pytest.mark.parametrize(("way", "backend"), CELLS)
def test_a_backward_of_an_older_version_writes_and_returns_no_gradient(
    way: str, backend: str
) -> None:
    wrong = {}
    for name, kind in KINDS.items():
        found = outcome(WAYS[way], kind, backend)
        if found:
            wrong[name] = found
    assert wrong == {}


@pytest.mark.parametrize(("way", "backend"), CELLS)
def test_without_an_edit_every_way_gives_the_right_gradients(way: str, backend: str) -> None:
    net = made(backend)
    twin = copy.deepcopy(net)
    if backend != "attention":
        twin.execution.use("reference")
    loss = WAYS[way].loss(twin)
    expected = torch.autograd.grad(loss, list(twin.parameters()), allow_unused=True)
    finish = WAYS[way].begin(net)
    net.zero_grad()
    returned = finish()
    found = returned or [parameter.grad for parameter in net.parameters()]
    for mine, right in zip(found, expected, strict=True):
        if right is None:
            assert mine is None or not mine.any()
        else:
            torch.testing.assert_close(mine, right)
    assert any(right is not None and right.any() for right in expected)


# What is no stale backward


def gradients_of(net: gn.GrapNet) -> list[Tensor]:
    return list(torch.autograd.grad(output_loss(net), list(net.parameters())))


def run_in_backward(run: Callable[[], object], *, reentrant: bool | None = None) -> list[object]:
    """Calls `run` from a hook of a backward pass, or in the second pass of a checkpoint."""
    results: list[object] = []

    def note(_: Tensor) -> None:
        with torch.enable_grad():
            results.append(run())

    def model(inputs: Tensor) -> Tensor:
        # The first pass of a checkpoint has called it too.
        results.append(run())
        return inputs * 2

    inputs = x(grad=True)
    if reentrant is None:
        output = inputs * 2
        output.register_hook(note)
    else:
        output = checkpoint(model, inputs, use_reentrant=reentrant)
    output.sum().backward()
    return results


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("edit", [None, "exchange", "add nodes", "set activation", "trial"])
def test_a_pass_of_a_net_that_was_edited_before_runs_inside_of_a_backward(
    backend: str, reentrant: bool | None, edit: str | None
) -> None:
    net = made(backend)
    # These passes of an older version stay alive and never get a backward.
    alive = [output_loss(net), checkpoint(net, x(grad=True), use_reentrant=True)]
    if edit is not None:
        KINDS[edit].edit(net)
    expected = gradients_of(net)

    def run() -> list[Tensor]:
        with torch.no_grad():
            net(x())
        with torch.enable_grad():
            return gradients_of(net)

    for found in run_in_backward(run, reentrant=reentrant):
        torch.testing.assert_close(found, expected)
    del alive


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_one_net_works_after_an_edit_of_another(
    backend: str, reentrant: bool
) -> None:
    net = made(backend)
    other = copy.deepcopy(net)
    expected = gradients_of(net)
    other(x())
    loss = checkpoint(net, x(grad=True), use_reentrant=reentrant).square().sum()
    for kind in ("add nodes", "undo", "cut"):
        KINDS[kind].edit(other)
    loss.backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_of_the_present_version_works_beside_one_of_an_older_version(
    backend: str,
) -> None:
    net = made(backend)
    old = checkpoint(net, x(grad=True), use_reentrant=True).square().sum()
    KINDS["exchange"].edit(net)
    expected = gradients_of(net)
    fresh = checkpoint(net, x(grad=True), use_reentrant=True).square().sum()
    fresh.backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    with pytest.raises(gn.errors.StaleTopologyError):
        old.backward()


# Autograd numbers its nodes in each thread by itself.


def in_a_thread(run: Callable[[], object], *, nodes: int = 0) -> object:
    """Returns what `run` does in a thread of its own, after so many nodes of autograd."""
    results: list[object] = []

    def work() -> None:
        number = torch.ones(1, requires_grad=True)
        for _ in range(nodes):
            number = number * 1
        try:
            results.append(run())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nodes", [0, 1000])
def test_a_checkpoint_works_in_another_thread_than_the_edit(reentrant: bool, nodes: int) -> None:
    net = made("reference")
    in_a_thread(lambda: KINDS["exchange"].edit(net), nodes=nodes)
    expected = gradients_of(net)

    def train() -> None:
        checkpoint(net, x(grad=True), use_reentrant=reentrant).square().sum().backward()

    in_a_thread(train)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("nodes", [0, 1000])
@pytest.mark.parametrize("edit_nodes", [0, 1000])
def test_an_older_checkpoint_raises_in_another_thread_than_the_edit(
    nodes: int, edit_nodes: int
) -> None:
    net = made("reference")
    ready = threading.Event()
    edited = threading.Event()

    def train() -> None:
        loss = checkpoint(net, x(grad=True), use_reentrant=True).square().sum()
        ready.set()
        edited.wait(timeout=30)
        loss.backward()

    def edit() -> None:
        ready.wait(timeout=30)
        in_a_thread(lambda: KINDS["exchange"].edit(net), nodes=edit_nodes)
        edited.set()

    editor = threading.Thread(target=edit)
    editor.start()
    try:
        with pytest.raises(gn.errors.StaleTopologyError):
            in_a_thread(train, nodes=nodes)
    finally:
        editor.join()
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frozen", ["nothing", "all", "no gradients"])
def test_the_gradient_of_the_input_alone_is_that_of_the_forward_that_ran(
    backend: str, frozen: str
) -> None:
    kinds = set(KINDS)
    if frozen == "all":
        # What is folded cannot be added to a frozen bias, and frozen weights are not assigned.
        kinds -= {"fold orphans", "assign"}
    for kind in sorted(kinds):
        net = made(backend)
        if frozen == "all":
            with net.edit() as edit:
                edit.freeze(net.select())
        KINDS[kind].before(net)
        net.requires_grad_(frozen != "no gradients")
        inputs = x(grad=True)
        old = net(inputs * 2).square().sum()
        (right,) = torch.autograd.grad(old, inputs, retain_graph=True)
        KINDS[kind].edit(net)
        (mine,) = torch.autograd.grad(old, inputs)
        assert torch.equal(mine, right), kind
        assert right.abs().sum() > 0, kind


def test_a_refused_or_empty_edit_makes_nothing_old() -> None:
    net = made("reference")
    loss = output_loss(net)
    with net.edit():
        pass
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.add_nodes(1, -1)
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing())
    loss.backward()


@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_net_follows_edits(grad: bool) -> None:
    torch._dynamo.reset()
    net = made("auto")
    compiled = torch.compile(net, backend="eager")
    for kind in ("cut", "add nodes", "freeze", "undo"):
        assert torch.allclose(compiled(x(grad=grad)), net(x()))
        old = compiled(x(grad=grad)).sum()
        KINDS[kind].edit(net)
        assert torch.allclose(compiled(x(grad=grad)), net(x()))
        with pytest.raises(gn.errors.StaleTopologyError):
            old.backward()
        net.zero_grad()
        compiled(x(grad=grad)).square().sum().backward()
        for parameter, gradient in zip(net.parameters(), gradients_of(net), strict=True):
            assert torch.allclose(parameter.grad, gradient)
