"""Everything that GrapNet uses of torch and torch does not promise to keep.

No other module names a private part of torch, and tests/test_torch_border.py holds what each of
these does. Functions in C are passed on as they are, so that calling one costs no frame of Python.
"""

import sys
from collections.abc import Callable
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


def _skip_frames(code: CodeType) -> None:
    """Keeps torch.compile from compiling the frames of a code object.

    A torch without this setting compiles the frames, which takes longer and computes the same.
    """
    frames: Any = eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
