"""Times and memory of a model, under Torch-Pruning's names."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[[nn.Module, Any], Any]


def measure_latency(
    model: nn.Module,
    example_inputs: Any,
    repeat: int = 300,
    warmup: int = 50,
    run_fn: Run | None = None,
) -> tuple[float, float]:
    """Returns the mean and the standard deviation of the milliseconds of a call."""
    model.eval()
    run = run_fn or _call
    for _ in range(warmup):
        run(model, example_inputs)
    times = []
    for _ in range(repeat):
        _synchronize()
        start = time.perf_counter()
        run(model, example_inputs)
        _synchronize()
        times.append(1000 * (time.perf_counter() - start))
    found = torch.tensor(times, dtype=torch.float64)
    return found.mean().item(), found.std().item()


def measure_fps(
    model: nn.Module,
    example_inputs: Any,
    repeat: int = 300,
    warmup: int = 50,
    run_fn: Run | None = None,
) -> float:
    """Returns the number of calls a second."""
    return 1000 / measure_latency(model, example_inputs, repeat, warmup, run_fn)[0]


def measure_throughput(
    model: nn.Module,
    example_inputs: Tensor,
    repeat: int = 300,
    warmup: int = 50,
    run_fn: Run | None = None,
) -> float:
    """Returns the number of examples a second."""
    calls = measure_fps(model, example_inputs, repeat, warmup, run_fn)
    return calls * example_inputs.shape[0]


def measure_memory(
    model: nn.Module, example_inputs: Any, device: Any = None, run_fn: Run | None = None
) -> int:
    """Returns the bytes of a GPU that a call takes at most."""
    torch.cuda.reset_peak_memory_stats(device)
    model.eval()
    (run_fn or _call)(model, example_inputs)
    return torch.cuda.max_memory_allocated(device)


def _call(model: nn.Module, example_inputs: Any) -> Any:
    return model(example_inputs)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
