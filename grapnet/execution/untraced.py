"""Functions that torch.compile calls without looking into them."""

import sys
from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Does what `torch.compiler.disable` does, but spares processes that compile nothing its import
    of a second.

    Example:
        >>> @untraced
        ... def doubled(x):
        ...     return 2 * x
        >>> doubled(4)
        8
    """
    apart: list[Callable[P, R]] = []  # made at the first call after torch's compiler was loaded

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not apart:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disable: Any = torch.compiler.disable  # its annotations cannot be followed
            apart.append(disable(function))
        return apart[0](*args, **kwargs)

    marked: Any = call
    # a trace stops before `call`, as before anything that is disabled
    marked._torchdynamo_disable = True
    _skip(marked.__code__)
    return call


def _skip(code: CodeType) -> None:
    """Keeps torch's compiler from compiling the frames of a code, where this torch can be told
    without loading it.
    """
    frames: Any = eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # otherwise they are compiled, which takes longer
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
