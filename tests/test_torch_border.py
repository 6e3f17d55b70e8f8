"""What GrapNet expects of the private parts of torch that `grapnet._torch` passes on.

A test that fails here after an update of torch names what has changed its meaning.
"""

import copy
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._functorch import config as functorch_config
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from grapnet import _torch


class Doubled(Function):
    """Twice its input; notes what the border shows while the backward runs."""

    seen: dict[str, object]

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # pyright: ignore[reportMissingParameterType]
        Doubled.seen = {}
        return 2 * x

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportMissingParameterType]
        Doubled.seen["task"] = _torch.current_graph_task_id()
        Doubled.seen["node"] = _torch.current_autograd_node()
        return 2 * gradients[0]


class Watching(TorchDispatchMode):
    """Counts the operators that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore[reportMissingParameterType]
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_graph_task_has_a_number_only_inside_of_a_backward() -> None:
    assert _torch.current_graph_task_id() == -1
    x = torch.ones(2, requires_grad=True)
    Doubled.apply(x).sum().backward()
    first = Doubled.seen["task"]
    assert _torch.current_graph_task_id() == -1
    Doubled.apply(x).sum().backward()
    assert -1 not in (first, Doubled.seen["task"])
    assert first != Doubled.seen["task"]


def test_the_current_node_is_the_one_whose_backward_runs() -> None:
    y = Doubled.apply(torch.ones(2, requires_grad=True))
    y.sum().backward()
    assert Doubled.seen["node"] is y.grad_fn
    assert isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    x = torch.ones(2, requires_grad=True)
    before = _torch.next_sequence_number()
    first = x * 2
    second = x * 3
    assert before <= _torch.sequence_number(first.grad_fn)
    assert _torch.sequence_number(first.grad_fn) < _torch.sequence_number(second.grad_fn)
    assert _torch.sequence_number(second.grad_fn) < _torch.next_sequence_number()


def test_the_interpreter_stack_is_empty_outside_of_transforms_and_can_be_cleared() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(_torch.peek_interpreter_stack() is None)
        with _torch.temporarily_clear_interpreter_stack():
            seen.append(_torch.peek_interpreter_stack() is None)
        seen.append(_torch.peek_interpreter_stack() is None)
        return x

    assert _torch.peek_interpreter_stack() is None
    torch.func.vmap(look)(torch.ones(3))
    assert seen == [False, True, False]


def test_a_dispatch_mode_is_noticed_and_can_be_left() -> None:
    assert not _torch.is_in_torch_dispatch_mode()
    with Watching() as mode:
        assert _torch.is_in_torch_dispatch_mode()
        torch.ones(2).add(1)
        count = mode.count
        with _torch.disable_current_modes():
            torch.ones(2).add(1)
        assert mode.count == count > 0
        assert _torch.is_in_torch_dispatch_mode()


def test_an_export_is_told_from_eager_execution() -> None:
    seen = []

    class Looking(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(_torch.is_exporting())
            return x + 1

    Looking()(torch.ones(2))
    torch.export.export(Looking(), (torch.ones(2),), strict=False)
    assert seen[0] is False
    assert set(seen[1:]) == {True}


def test_a_tree_is_taken_apart_by_paths_and_put_together_again() -> None:
    tree = {"a": [1, (2, 3)], 0.9: 4}
    leaves, form = _torch.pytree.tree_flatten_with_path(tree)
    assert [_torch.pytree.keystr(path) for path, _ in leaves] == [
        "['a'][0]",
        "['a'][1][0]",
        "['a'][1][1]",
        "[0.9]",
    ]
    assert _torch.pytree.tree_unflatten([leaf for _, leaf in leaves], form) == tree
    assert _torch.pytree.tree_leaves(tree) == [1, 2, 3, 4]


UNTRACED = """
import sys
import torch
from grapnet._torch import untraced

@untraced
def looked(x):
    return torch.compiler.is_compiling()

assert looked(1) is False
assert "torch._dynamo" not in sys.modules
seen = []

def traced(x):
    seen.append(torch.compiler.is_compiling())
    y = x + 1
    seen.append(looked(y))
    return y * 2

compiled = torch.compile(traced, backend="eager")
assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
assert seen == [True, False], seen
"""


def test_an_untraced_function_runs_outside_of_the_trace_and_imports_no_compiler() -> None:
    subprocess.run([sys.executable, "-c", UNTRACED], check=True, timeout=120)


def test_forward_mode_shows_in_its_level() -> None:
    assert not _torch.in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert _torch.in_forward_mode()
    assert not _torch.in_forward_mode()


def test_batched_gradients_are_batched_tensors() -> None:
    found = []

    class Noted(Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:  # pyright: ignore[reportMissingParameterType]
            return x.clone()

        @staticmethod
        def backward(ctx, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportMissingParameterType]
            found.append(_torch.is_legacy_batchedtensor(gradients[0]))
            return gradients[0]

    x = torch.ones(2, requires_grad=True)
    y = Noted.apply(x)
    torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert found == [False, True]


def test_fake_tensors_have_shapes_and_no_contents() -> None:
    fakes = _torch.Fakes()
    like = torch.zeros(3, 4).t()
    fake = fakes.imitate(like)
    assert fake.shape == (4, 3)
    assert fake.stride() == like.stride()
    assert fake.device == like.device
    wide = fakes.imitate(torch.zeros(2, device="meta"), (2, 10**12))
    # Without contents nothing is computed, so no memory of this size is needed.
    assert (wide + 1).sum(1).shape == (2,)


def test_fake_tensors_work_after_a_thread_that_used_them_has_ended() -> None:
    for _ in range(3):
        fakes = _torch.Fakes()
        fake = fakes.imitate(torch.zeros(3, 4))
        shapes = []

        def multiply(fake=fake, fakes=fakes, shapes=shapes) -> None:
            with fakes.mode:
                shapes.append((fake @ fake.t()).shape)

        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
        assert shapes == [(3, 3)]


def test_every_fake_tensor_is_what_the_first_one_is() -> None:
    fakes = _torch.Fakes()
    like = torch.zeros(3, 4)
    first = fakes.imitate(like)
    other = fakes.imitate(like)
    assert type(other) is type(first)
    assert vars(other) == vars(first)
    assert torch._C._dispatch_keys(other) == torch._C._dispatch_keys(first)
    assert other.untyped_storage()._cdata != first.untyped_storage()._cdata
    for fake in (first, other):
        assert not fake.requires_grad
        with fakes.mode:
            assert (fake @ fake.t()).shape == (3, 3)
            with pytest.raises(Exception, match="_local_scalar_dense"):
                fake.sum().item()


def test_the_memory_of_fake_tensors_is_guarded_as_torch_is_set() -> None:
    name = "fake_tensor_allow_unsafe_data_ptr_access"
    with functorch_config.patch(name, False):
        fakes = _torch.Fakes()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            fakes.imitate(torch.zeros(3)).data_ptr()


def test_fake_tensors_are_told_from_others() -> None:
    fakes = _torch.Fakes()
    assert fakes.has(fakes.imitate(torch.zeros(2)))
    assert not fakes.has(torch.zeros(2))
    assert not fakes.has(_torch.Fakes().imitate(torch.zeros(2)))
    with fakes.mode:
        assert fakes.has(torch.zeros(2))
        # A constant has contents.
        assert not fakes.has(torch.tensor(2.0))


def test_fake_tensors_are_made_inside_of_dispatch_modes() -> None:
    fakes = _torch.Fakes()
    with Watching() as watching:
        made = fakes.new(torch.device("cpu"), torch.float16, (2, 3), (1, 2))
        assert watching.count == 0
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.float16)


def test_views_of_fake_tensors_share_their_storage() -> None:
    fakes = _torch.Fakes()
    fake = fakes.imitate(torch.zeros(4, 3))
    with fakes.mode:
        turned = fakes.views(torch.ops.aten.t.default, (fake,))
        parts = fakes.views(torch.ops.aten.split.Tensor, (fake, 2))
    for view in (turned, *parts):
        assert fakes.has(view)
        assert view.untyped_storage()._cdata == fake.untyped_storage()._cdata
    assert turned.stride() == (1, 3)
    assert [part.storage_offset() for part in parts] == [0, 6]


def test_shapes_that_do_not_fit_are_logged_where_we_listen(caplog) -> None:
    fakes = _torch.Fakes()
    one = fakes.imitate(torch.zeros(1), (2, 3))
    listening = caplog.at_level("ERROR", logger=_torch.fake_tensor_logger)
    with listening, fakes.mode, pytest.raises(RuntimeError, match="3"):
        one @ one
    assert all(record.name == _torch.fake_tensor_logger for record in caplog.records)


def test_a_dispatch_mode_sees_every_operator() -> None:
    assert _torch.TorchDispatchMode is TorchDispatchMode
    with Watching() as watching:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert watching.count >= 1


def test_hooks_of_all_modules_and_optimizers_are_in_dicts_that_are_empty_without_them() -> None:
    register = [
        torch.nn.modules.module.register_module_forward_pre_hook,
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_full_backward_pre_hook,
        torch.nn.modules.module.register_module_full_backward_hook,
    ]
    for hooks, add in zip(_torch.global_module_hooks, register, strict=True):
        assert not hooks
        handle = add(lambda *given: None)
        assert len(hooks) == 1
        handle.remove()
        assert not hooks
    register_step = [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
    for hooks, add in zip(_torch.global_optimizer_hooks, register_step, strict=True):
        count = len(hooks)
        handle = add(lambda *given: None)
        assert len(hooks) == count + 1
        handle.remove()


def test_a_scaler_that_forgets_unscaled_gradients_unscales_others() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError):
        scaler.unscale_(optimizer)
    _torch.forget_unscaled(scaler, optimizer)
    scaler.unscale_(optimizer)


def test_copy_each_copies_every_tensor_into_its_own() -> None:
    targets = [torch.zeros(2), torch.zeros(3)]
    before = list(targets)
    _torch.copy_each(targets, (torch.ones(2), torch.arange(3.0)))
    assert [target.tolist() for target in before] == [[1, 1], [0, 1, 2]]


def test_a_function_runs_while_it_is_traced_and_not_afterwards() -> None:
    seen = []

    @_torch.run_while_tracing
    def note(tensor: Tensor, number: int) -> bool:
        seen.append((tensor, number, _torch.traced_frame()))
        return True

    held = torch.arange(3)

    def function(x: Tensor) -> Tensor:
        return x + 1 if note(held, 2) else x

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))
    # once for every size, 2 and then any
    compiled(torch.zeros(4))
    compiled(torch.zeros(5))
    assert [(tensor is held, number) for tensor, number, _ in seen] == [(True, 2), (True, 2)]
    first, second = (frame for _, _, frame in seen)
    assert first is not None
    assert first == second
    assert _torch.traced_frame() is None


def test_sizes_that_may_vary_are_compiled_once() -> None:
    graphs = []

    def backend(graph, inputs):  # pyright: ignore[reportMissingParameterType]
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for size in (3, 4, 5):
        x = torch.zeros(size)
        _torch.let_sizes_vary(x)
        compiled(x)
    assert len(graphs) == 1


def test_one_graph_shows_why_a_function_is_not_traced() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        return hidden(x)

    hidden = _torch.untraced(lambda x: x + 1, "it is hidden")
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="it is hidden"):
        function(torch.zeros(2))


PASS_HOOKS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)
STATE_HOOKS = (
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
)


@pytest.mark.parametrize("register", PASS_HOOKS + STATE_HOOKS)
def test_hooks_of_a_module_are_in_dicts_that_are_empty_without_them(register: str) -> None:
    module = nn.Linear(1, 1)
    found = {
        "forward": _torch.forward_hooks(module),
        "pass": _torch.pass_hooks(module),
        "all": _torch.module_hooks(module),
    }
    assert not any(any(hooks) for hooks in found.values())
    handle = getattr(module, register)(lambda *given: None)
    assert any(found["all"])
    assert any(found["pass"]) == (register in PASS_HOOKS)
    assert any(found["forward"]) == (register in PASS_HOOKS[:2])
    handle.remove()
    assert not any(found["all"])


def test_hooks_of_the_steps_of_an_optimizer_are_in_dicts() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    hooks = _torch.step_hooks(optimizer)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        assert not any(hooks)
        handle = register(print)
        assert any(hooks)
        handle.remove()


def test_hooks_of_a_tensor_show() -> None:
    tensor = torch.ones(1, requires_grad=True)
    registered = {
        _torch.gradient_hooks: tensor.register_hook,
        _torch.accumulation_hooks: tensor.register_post_accumulate_grad_hook,
    }
    for hooks, register in registered.items():
        assert not hooks(tensor)
        handle = register(print)
        assert list(hooks(tensor).values()) == [print]
        handle.remove()
        assert not hooks(tensor)


def test_a_copied_forward_hook_is_removed_without_its_handle() -> None:
    calls: list[str] = []

    def before(*given: object) -> None:
        calls.append("before")

    def after(*given: object) -> None:
        calls.append("after")

    module = nn.Linear(1, 1)
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    double = copy.deepcopy(module)
    double(torch.ones(1))
    assert calls == ["before", "after"]
    for hook in (before, after):
        _torch.remove_forward_hook(double, hook)
    double(torch.ones(1))
    assert calls == ["before", "after"]
    module(torch.ones(1))
    assert calls == ["before", "after"] * 2


def test_a_compiled_module_holds_the_module() -> None:
    module = nn.Linear(1, 1)
    compiled: Any = torch.compile(module, backend="eager")
    assert _torch.uncompiled(compiled) is _torch.uncompiled(module) is module
    assert dict(compiled.named_children()) == {_torch.COMPILED: module}


def test_a_module_compiled_in_place_runs_as_it_is_inside_a_block() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    module = Doubled()
    x = torch.randn(3, 2)

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *given: [torch.zeros(3, 2)]

    module.compile(backend=backend)
    with _torch.without_compiled_calls(module):
        assert torch.equal(module(x), 2 * x)
    assert not module(x).any()


def test_writes_into_tensors_are_counted() -> None:
    parameter = nn.Parameter(torch.ones(2))
    before = _torch.count_of_writes(parameter)
    _ = parameter + 1
    assert _torch.count_of_writes(parameter) == before
    with torch.no_grad():
        parameter.add_(1)
    assert _torch.count_of_writes(parameter) > before


def test_a_tensor_of_another_class_becomes_a_parameter() -> None:
    class Other(Tensor):
        pass

    tensor = torch.ones(2).as_subclass(Other)
    assert not isinstance(tensor, nn.Parameter)
    _torch.call_parameter(tensor)
    assert isinstance(tensor, nn.Parameter)


@pytest.mark.parametrize("padding", [(1, 2), "same"])
def test_the_padding_of_a_convolution_is_what_pad_takes(padding: tuple[int, int] | str) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 3, (5, 3), padding=padding)
    x = torch.randn(1, 2, 6, 5)
    padded = nn.functional.pad(x, _torch.reversed_padding(convolution))
    y = nn.functional.conv2d(padded, convolution.weight, convolution.bias)
    assert torch.allclose(y, convolution(x), atol=1e-6)


def test_classes_of_modules_are_those_of_their_kinds() -> None:
    kinds = {
        _torch.Convolution: (nn.Conv1d, nn.ConvTranspose3d),
        _torch.BatchNorm: (nn.BatchNorm1d, nn.SyncBatchNorm),
        _torch.InstanceNorm: (nn.InstanceNorm1d, nn.InstanceNorm3d),
        _torch.Norm: (nn.BatchNorm2d, nn.InstanceNorm2d),
    }
    for base, derived in kinds.items():
        assert all(issubclass(kind, base) for kind in derived)
        assert not issubclass(nn.Linear, base)


def test_an_ordinary_parameter_is_whole_and_steps_after_the_backward() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not _torch.is_sharded(parameter)
    assert not _torch.is_stepped_in_backward(parameter)


def test_ddp_ignores_what_is_named_in_the_block(tmp_path) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("steps", torch.zeros(1))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    try:
        with _torch.ignored_by_ddp(module, ["steps"]):
            wrapped = DistributedDataParallel(module)
        assert wrapped.parameters_to_ignore == {"steps"}
        assert DistributedDataParallel(module).parameters_to_ignore == set()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("bar", [_torch.tqdm, torch.hub._Faketqdm])
def test_a_progress_bar_is_on_stderr_whether_or_not_tqdm_is_installed(bar, capfd) -> None:  # pyright: ignore[reportMissingParameterType]
    for is_off in (True, False):
        with bar(total=4, desc="edits", unit="edit", disable=is_off) as shown:
            for _ in range(4):
                shown.update(1)
        found = capfd.readouterr()
        assert found.out == ""
        assert ("100" in found.err) != is_off
