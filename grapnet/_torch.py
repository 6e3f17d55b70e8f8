"""Everything that GrapNet uses of torch and torch does not promise to keep.

No other module names a private part of torch, and tests/test_torch_border.py holds what each of
these does. Functions in C are passed on as they are, so that calling one costs no frame of Python.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import (  # pyright: ignore[reportAttributeAccessIssue]
    _current_autograd_node,
    _current_graph_task_id,
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
# Where torch logs operations whose shapes do not fit, when tensors have no contents.
fake_tensor_logger = "torch._subclasses.fake_tensor"
# Leaves the dispatch modes of a trace for as long as the block runs.
disable_current_modes = _disable_current_modes


def in_forward_mode() -> bool:
    """Returns whether a level of forward-mode AD is open."""
    return forward_ad._current_level >= 0


def sequence_number(node: Any) -> int:
    """Returns the number that an autograd node got when it was made."""
    return node._sequence_nr()


def is_exporting() -> bool:
    """Returns whether torch.export is at work.

    `torch.compiler.is_exporting` is also True in torch.compile, up to torch 2.11.
    """
    # The flag exists from torch 2.7 on.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Does what `torch.compiler.disable` does, but does not import the compiler, which takes a
    second.

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
            disabled.append(disable(function))
        return disabled[0](*args, **kwargs)

    marked: Any = call
    # A trace stops before `call`, as before every function that is disabled.
    marked._torchdynamo_disable = True
    _skip_frames(marked.__code__)
    return call


def new_fake_mode() -> Any:
    """Returns a mode in which tensors have shapes but no contents.

    It is imported when it is first used, as it imports the settings of the compiler.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def new_fake_tensor(mode: Any, like: torch.Tensor, shape: Sequence[int] | None = None) -> Any:
    """Returns a tensor without contents, of the kind and layout of `like` or of another shape.

    A fake tensor cannot be on the meta device, so one that imitates a meta tensor is on the CPU.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    device = like.device
    if device.type == "meta":
        device = torch.device("cpu")
    if shape is None:
        empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    else:
        empty = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
    return FakeTensor(mode, empty, device)


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has no contents."""
    return type(tensor).__name__ == "FakeTensor"


@contextmanager
def dynamic_sizes() -> Iterator[None]:
    """Lets `torch.compile` treat the sizes of Parameters as variables, for as long as the block
    runs.

    torch takes them for constants: every edit that resizes a Parameter compiles the model again,
    and from the ninth time on it runs without the compiler. Inside this block the first such edit
    compiles it once more, later ones do not. Put the loop that trains and edits into the block.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> compiled = torch.compile(model, backend="eager")
        >>> with dynamic_sizes():
        ...     y = compiled(torch.ones(1, 3))
    """
    # The compiler is imported when it is first used.
    from torch._dynamo import config

    names = ("force_parameter_static_shapes", "force_nn_module_property_static_shapes")
    before = {name: getattr(config, name) for name in names if hasattr(config, name)}
    try:
        for name in before:
            setattr(config, name, False)
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
