"""Everything that GrapNet uses of torch and torch does not promise to keep.

No other module names a private part of torch, and tests/test_torch_border.py holds what each of
these does. Functions in C are passed on as they are, so that calling one costs no frame of Python.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from operator import attrgetter
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C import (  # pyright: ignore[reportAttributeAccessIssue]
    _current_autograd_node,
    _current_graph_task_id,
    _DisableTorchDispatch,
    _set_throw_on_mutable_data_ptr,
    _set_warn_deprecated_on_mutable_data_ptr,
)
from torch._C._dynamo import eval_frame
from torch._C._functorch import (  # pyright: ignore[reportMissingImports]
    is_legacy_batchedtensor as is_legacy_batchedtensor,
)
from torch._C._functorch import (  # pyright: ignore[reportMissingImports]
    peek_interpreter_stack as peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack as temporarily_clear_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.hub import tqdm as tqdm  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_in_torch_dispatch_mode

P = ParamSpec("P")
R = TypeVar("R")

# The number of the backward pass that runs in this thread, -1 outside of any.
current_graph_task_id = _current_graph_task_id
# The node whose backward or hook runs in this thread.
current_autograd_node = _current_autograd_node
# The number that the next autograd node of this thread gets.
next_sequence_number = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
# The hooks of all modules, in dicts that are empty when there are none.
global_module_hooks = (
    _global_forward_pre_hooks,
    _global_forward_hooks,
    _global_backward_pre_hooks,
    _global_backward_hooks,
)
# The hooks of the steps of all optimizers.
global_optimizer_hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
# Where torch logs operations whose shapes do not fit, when tensors have no contents.
fake_tensor_logger = "torch._subclasses.fake_tensor"
# Leaves the dispatch modes of a trace for as long as the block runs.
disable_current_modes = _disable_current_modes
# The name under which torch.compile(module) holds the module.
COMPILED = "_orig_mod"
# The classes that several kinds of modules share.
Convolution = nn.modules.conv._ConvNd
Norm = nn.modules.batchnorm._NormBase
BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm
# The hooks of a tensor's gradient, and those that run when a gradient was accumulated; or None.
gradient_hooks = attrgetter("_backward_hooks")
accumulation_hooks = attrgetter("_post_accumulate_grad_hooks")

_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_MODULE_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
# The attribute in which DDP looks for the names of parameters and buffers to leave alone.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def forward_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Returns the dicts of the hooks that a forward pass of a module calls."""
    attributes = vars(module)
    return [attributes[name] for name in _FORWARD_HOOKS]


def pass_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Returns the dicts of the hooks that a forward or backward pass of a module calls."""
    return [*forward_hooks(module), module._backward_pre_hooks, module._backward_hooks]


def module_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Returns the dicts of all hooks of a module."""
    attributes = vars(module)
    return [attributes[name] for name in _MODULE_HOOKS]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """Returns the dicts of the hooks that a step of an optimizer calls."""
    attributes = vars(optimizer)
    return [attributes["_optimizer_step_pre_hooks"], attributes["_optimizer_step_post_hooks"]]


def remove_forward_hook(module: nn.Module, hook: Any) -> None:
    """Removes a hook from the forward pass of a module without the handle of its registration,
    which a copy of the module does not have.
    """
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key in [key for key, registered in hooks.items() if registered is hook]:
            del hooks[key]
            with_kwargs.pop(key, None)


def uncompiled(model: Any) -> Any:
    """Returns the module that torch.compile(module) holds; anything else as it is."""
    return getattr(model, COMPILED, model)


@contextmanager
def without_compiled_calls(model: nn.Module) -> Iterator[None]:
    """Runs modules on which `compile()` was called as they are, inside the block: their compiled
    code may call no hooks that came later.
    """
    held = []
    for module in model.modules():
        if module._compiled_call_impl is not None:
            held.append((module, module._compiled_call_impl))
    try:
        for module, _ in held:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in held:
            module._compiled_call_impl = call


def count_of_writes(tensor: torch.Tensor) -> int:
    """Returns how often torch has noted a write into the memory of a tensor."""
    return tensor._version


def call_parameter(tensor: Any) -> None:
    """Makes `isinstance(tensor, nn.Parameter)` true of a tensor of another class."""
    tensor._is_param = True


def reversed_padding(convolution: Any) -> list[int]:
    """Returns the padding of a convolution as `functional.pad` takes it: before and after, from
    the last dimension of the image to the first.
    """
    return convolution._reversed_padding_repeated_twice


def is_sharded(parameter: nn.Parameter) -> bool:
    """Returns whether a Parameter is a part of what the processes hold (FSDP or DTensor).

    Names decide, so that torch.distributed is not imported.
    """
    kinds = {kind.__name__ for kind in type(parameter).__mro__}
    return "DTensor" in kinds or hasattr(parameter, "_fsdp_flattened")


def is_stepped_in_backward(parameter: nn.Parameter) -> bool:
    """Returns whether torch.distributed.optim has an optimizer step a Parameter in backward."""
    return bool(getattr(parameter, "_in_backward_optimizers", None))


@contextmanager
def ignored_by_ddp(module: nn.Module, names: list[str]) -> Iterator[None]:
    """Makes the DDP that is built inside the block leave parameters and buffers alone, and those
    that the user named.
    """
    given = vars(module).get(_IGNORED)
    setattr(module, _IGNORED, [*names, *(given or ())])
    try:
        yield
    finally:
        if given is None:
            delattr(module, _IGNORED)
        else:
            setattr(module, _IGNORED, given)


def copy_each(targets: list[torch.Tensor], sources: tuple[torch.Tensor, ...]) -> None:
    """Copies every tensor into another one, on a GPU in one launch."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def in_forward_mode() -> bool:
    """Returns whether a level of forward-mode AD is open."""
    return forward_ad._current_level >= 0


def forget_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Allows a scaler to unscale gradients again although the optimizer has made no step since."""
    scaler._per_optimizer_states.pop(id(optimizer), None)


def sequence_number(node: Any) -> int:
    """Returns the number that an autograd node got when it was made."""
    return node._sequence_nr()


def is_exporting() -> bool:
    """Returns whether torch.export is at work.

    `torch.compiler.is_exporting` is also True in torch.compile, up to torch 2.11.
    """
    # The flag exists from torch 2.7 on.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def untraced(function: Callable[P, R], reason: str = "") -> Callable[P, R]:
    """Does what `torch.compiler.disable` does, but does not import the compiler, which takes a
    second.

    With `fullgraph=True` a trace that meets it raises, and shows the reason.

    Example:
        >>> @untraced
        ... def doubled(x):
        ...     return 2 * x
        >>> doubled(4)
        8
    """
    # The disabled function, made at the first call after the compiler was imported.
    disabled: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            # The annotations of `disable` cannot be followed.
            disable: Any = torch.compiler.disable
            disabled.append(disable(function, reason=reason))
        return disabled[0](*args, **kwargs)

    marked: Any = call
    # A trace stops before `call`, as before every function that is disabled.
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    _skip_frames(marked.__code__)
    return call


def run_while_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """Makes torch.compile call a function when it traces a call of it, with the real tensors among
    its arguments, and take the result for a constant; the other arguments must be constants.

    It does what `torch.compiler.assume_constant_result` does without importing the compiler.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


def traced_frame() -> int | None:
    """Returns the number of the function that torch.compile is tracing, the same each time it
    compiles it again; None if it is tracing none.
    """
    from torch._guards import CompileContext

    compiled = CompileContext.current_compile_id()
    return None if compiled is None else compiled.frame_id


def let_sizes_vary(tensor: torch.Tensor, dims: int | None = None) -> None:
    """Makes the next trace that reads a tensor take its sizes for variables, as far as it can.

    It does what `torch._dynamo.maybe_mark_dynamic` does without importing the compiler.

    Args:
        tensor: the tensor.
        dims: how many dimensions vary, the first ones; all by default.
    """
    if dims is None:
        dims = tensor.dim()
    marked: Any = tensor
    marked._dynamo_weak_dynamic_indices = set(range(dims))


class Fakes:
    """Tensors that have shapes but no contents, all of one mode.

    torch is imported further when the first of these is made, as the mode imports the settings of
    the compiler.

    Attributes:
        mode: The context in which operations on them run.
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        # The mode does so when it is entered. In torch 2.11, if it was built with CUDA and there is
        # no GPU, what is set ends with its thread, and the next operation crashes the process; the
        # mode is entered in threads that end.
        set_guard = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
        if set_guard is not None:
            set_guard()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Lets a look at the memory of a tensor warn or raise.
        self._guard_contents = _set_throw_on_mutable_data_ptr
        if self.mode._allow_unsafe_data_ptr_access:
            self._guard_contents = _set_warn_deprecated_on_mutable_data_ptr
        # For a device: the same with its number, and the attributes of a new tensor on it.
        self._states: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}

    def imitate(self, like: torch.Tensor, shape: Sequence[int] | None = None) -> Any:
        """Returns a tensor of the kind and layout of another, or of another shape.

        A fake tensor cannot be on the meta device, so one that imitates a meta tensor is on the
        CPU.
        """
        device = like.device
        if device.type == "meta":
            device = torch.device("cpu")
        if shape is None:
            return self.new(device, like.dtype, like.shape, like.stride())
        return self.new(device, like.dtype, shape)

    def new(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
    ) -> Any:
        """Returns a tensor, also inside of dispatch modes."""
        with _DisableTorchDispatch():
            if stride is None:
                empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
            else:
                empty = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")
            return self._wrapped(empty, device)

    def views(self, func: Any, args: Sequence[Any]) -> Any:
        """Returns what an operator returns that makes views of its first argument, one of these
        tensors; a list where it makes several. They share its storage.
        """
        from torch._subclasses.fake_tensor import in_kernel_invocation_manager

        device = args[0].fake_device
        with in_kernel_invocation_manager(self.mode):
            views = func(*args)
        with _DisableTorchDispatch():
            if isinstance(views, torch.Tensor):
                return self._wrapped(views, device)
            return [self._wrapped(view, device) for view in views]

    def has(self, tensor: Any) -> bool:
        """Returns whether a tensor is one of these, strided, and no constant: those have contents,
        which operations compute with.
        """
        if type(tensor).__name__ != "FakeTensor" or tensor.fake_mode is not self.mode:
            return False
        return tensor.constant is None and tensor.layout is torch.strided

    def _wrapped(self, empty: torch.Tensor, device: torch.device) -> Any:
        """Returns a meta tensor as one of these.

        What torch's own class sets on a new tensor is the same for all on a device, and setting it
        once is much faster.
        """
        from torch._subclasses.fake_tensor import FakeTensor

        known = self._states.get(device)
        if known is None:
            first = FakeTensor(self.mode, empty, device)
            self._states[device] = (first.fake_device, dict(vars(first)))
            return first
        numbered, state = known
        fake = torch.Tensor._make_subclass(
            FakeTensor,
            empty,
            False,
            dispatch_device=True,
            device_for_backend_keys=numbered,
        )
        self._guard_contents(fake)
        vars(fake).update(state)
        return fake


# What `dynamic_sizes` sets: sizes of Parameters and of other tensors of modules are variables, and
# code is compiled for more kinds of plans than 8 before torch gives up.
_DYNAMIC: dict[str, Any] = {
    "force_parameter_static_shapes": False,
    "force_nn_module_property_static_shapes": False,
    "recompile_limit": 64,
}


@contextmanager
def dynamic_sizes() -> Iterator[None]:
    """Lets `torch.compile` treat the sizes of Parameters and of wirings as variables, for as long
    as the block runs.

    torch takes them for constants: every edit that resizes a Parameter compiles the model again,
    and from the ninth time on it runs without the compiler, or raises with `fullgraph=True`. Inside
    this block the first such edit compiles it once more, later ones do not. Put the loop that
    trains and edits into the block.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> compiled = torch.compile(model, backend="eager")
        >>> with dynamic_sizes():
        ...     y = compiled(torch.ones(1, 3))
    """
    # The compiler is imported when it is first used.
    from torch._dynamo import config

    before = {name: getattr(config, name) for name in _DYNAMIC if hasattr(config, name)}
    try:
        for name, value in before.items():
            # A higher limit of recompilations stays.
            wanted = _DYNAMIC[name]
            setattr(config, name, wanted and max(wanted, value))
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _skip_frames(code: CodeType) -> None:
    """Keeps torch.compile from compiling the frames of a code object.

    A torch without this setting compiles the frames, which takes longer and computes the same.
    """
    frames: Any = eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
