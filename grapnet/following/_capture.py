"""gn.capture: training steps as CUDA graphs, which are recorded again after every edit."""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import increment_version
from torch.optim import SGD, Optimizer

from grapnet._torch import (
    forget_unscaled,
    global_module_hooks,
    global_optimizer_hooks,
    pytree,
)
from grapnet.core._commit import recordings, settle, transactions, unsettled
from grapnet.core._errors import CaptureError, OptimizerError

from ._state import inside_of, parameters_of, refuse_stale_state
from ._watch import CONSTANTS, Watch, has_foreign

P = ParamSpec("P")
R = TypeVar("R", bound=Tensor | tuple[Tensor, ...])
# Batches of different shapes for which one step keeps recordings.
_MOST = 8
# Modules that average gradients in hooks of their own.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "Distributed")


def capture(
    function: Callable[P, R],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    after_backward: Callable[[], object] | None = None,
    scaler: GradScaler | None = None,
) -> "CapturedStep[P, R]":
    """Returns a training step that runs as one CUDA graph, recorded again after every edit.

    `step(*batch)` clears the gradients, computes `function(*batch)`, its backward pass and a step
    of the optimizer, and returns what the function returns, detached. On a GPU the first call with
    a batch of some shape runs eagerly, the second one records it, and further ones replay the
    recording, without the cost of launching kernels one by one. After a commit, `execution.use`,
    `train`, `eval`, `to`, `load_state_dict` or any other change of the modules, the optimizer or
    its settings the next call runs eagerly again: every call is exactly one step. On other
    devices all calls run eagerly.

    Calls also run eagerly while recorders are armed, while modules, Parameters or the optimizer
    have hooks, and for batches that require gradients. `step.describe()` tells what ran, and why.

    On a GPU the optimizer gets `capturable=True` and a tensor as learning rate, in which schedulers
    write; SGD gets `fused=True`. Numbers that a recording keeps, such as betas that a scheduler
    changes in every step, keep the step from being recorded.

    Args:
        function: takes a batch, that is tensors, also in tuples, lists and dicts, and constants,
            and returns the loss, or a tuple of tensors of which the first one is the loss. It must
            not synchronize with the device, as `.item()` does. On a GPU it gets copies of the
            tensors of the batch, on the device of the model.
        model: everything that the function runs; an `nn.ModuleList` of several models.
        optimizer: an optimizer of torch that can be captured, or another one with an option
            `capturable`.
        after_backward: is called between the backward pass and the step of the optimizer, for
            example to clip gradients.
        scaler: scales the loss; gradients are unscaled when `after_backward` is called. Where the
            optimizer is not fused, torch needs the host for its step, which then runs after the
            graph.

    Raises:
        OptimizerError: the optimizer cannot be captured.
        CaptureError: the model is wrapped for several processes.

    Examples:
        >>> import torch
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 8, 2])
        >>> optimizer = gn.attach(torch.optim.AdamW(net.parameters(), lr=0.01), net)
        >>> def loss_of(x, y):
        ...     return torch.nn.functional.cross_entropy(net(x), y)
        >>> def clip():
        ...     torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        >>> step = gn.capture(loss_of, net, optimizer, after_backward=clip)
        >>> x = torch.randn(16, 4)
        >>> y = torch.randint(2, (16,))
        >>> loss = step(x, y)
        >>> with net.edit(reason="drop the weakest") as edit:
        ...     edit.cut(net.layers[0].outgoing().smallest(count=5))
        >>> loss = step(x, y)
        >>> step.describe()["eager"]
        2
    """
    _refuse_optimizer(optimizer)
    for module in model.modules():
        name = type(module).__name__
        if name in _WRAPPERS:
            raise CaptureError(
                f"{name} averages gradients over processes in hooks, which a recording does not"
                " contain; capture a step of the model itself"
            )
    return CapturedStep(function, model, optimizer, after_backward, scaler)


def _refuse_optimizer(optimizer: Optimizer) -> None:
    """Raises OptimizerError for an optimizer whose step cannot be recorded."""
    kind = type(optimizer)
    if inside_of(optimizer):
        raise OptimizerError(
            f"{kind.__name__} wraps another optimizer, and what it does on the host would not be"
            " repeated by a recording; capture a step of the optimizer inside of it"
        )
    # Every class of optimizers wraps the method once more.
    is_sgd = unwrap(kind.step) is unwrap(SGD.step)
    if not is_sgd and "capturable" not in optimizer.defaults:
        raise OptimizerError(
            f"{kind.__name__} cannot be captured: its step needs the host, as it has no option"
            " `capturable`. Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, ASGD, RMSprop, Rprop and"
            " SGD can be"
        )


class CapturedStep(Generic[P, R]):
    """A training step that runs as a CUDA graph; see `gn.capture`."""

    def __init__(
        self,
        function: Callable[P, R],
        model: nn.Module,
        optimizer: Optimizer,
        after_backward: Callable[[], object] | None,
        scaler: GradScaler | None,
    ) -> None:
        self._function: Callable[..., Any] = function
        self._model = model
        self._optimizer = optimizer
        self._after_backward = after_backward
        self._scaler = scaler
        self._stream: torch.cuda.Stream | None = None
        # The learning rates of the groups, as tensors that recordings read.
        self._rates: list[Tensor] = []
        # What all recordings depend on, and the kinds of batches that ran eagerly since.
        self._watch: Watch | None = None
        self._warm: set[Any] = set()
        self._recordings: dict[Any, _Recording] = {}
        self._pool: Any = None
        # Why there are no recordings, and why the last call ran as it did.
        self._empty = "nothing is recorded yet"
        self._why = "it was not called"
        self._counts = {"eager": 0, "recorded": 0, "replayed": 0}
        recordings.add(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Makes one training step with a batch, and returns the loss.

        An exception of the function leaves the weights, the gradients and the state of the
        optimizer as they were, and the next call starts over.

        Raises:
            CaptureError: the step cannot be recorded; it was not made.
        """
        if unsettled:
            settle()
        batch = _Batch(args, kwargs)
        device = self._device()
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            self._counts["eager"] += 1
            self._why = f"the model is on {device}"
            return self._run(args, kwargs)
        if torch.cuda.current_device() == device.index:
            return self._run_on(device, batch)
        with torch.cuda.device(device):
            return self._run_on(device, batch)

    def describe(self) -> dict[str, Any]:
        """Returns how often the step ran eagerly (`eager`), was recorded (`recorded`) and replayed
        a recording (`replayed`), how many recordings it has (`recordings`), and why the last call
        ran as it did (`why`).
        """
        return {**self._counts, "recordings": len(self._recordings), "why": self._why}

    def release(self, why: str = "the recordings were released") -> None:
        """Drops all recordings and their memory; the next call runs eagerly.

        Every commit does so.

        Args:
            why: the reason that `describe` gives for the next call.
        """
        self._recordings.clear()
        self._warm.clear()
        self._watch = None
        self._pool = None
        self._empty = why

    def _device(self) -> torch.device:
        """Returns where the step runs: the device of the first Parameter of the optimizer."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                return parameter.device
        return torch.device("cpu")

    def _run_on(self, device: torch.device, batch: "_Batch") -> Any:
        self._prepare_optimizer(device)
        why = self._reason_against(batch)
        if why:
            return self._run_aside(device, batch, why)
        if self._watch is None:
            why = self._empty
        else:
            why = self._watch.difference()
        if why:
            self.release(why)
        else:
            recording = self._recordings.get(batch.key)
            if recording is None and batch.key in self._warm:
                recording = self._record(device, batch)
            if recording is not None:
                return self._replay(recording, batch)
            why = "it is the first batch of its kind"
        before = transactions()
        results = self._run_aside(device, batch, why)
        if transactions() != before:
            self.release("the function edits a net")
            return results
        self._watch_again()
        if len(self._warm) > 8 * _MOST:
            self._warm.clear()
        self._warm.add(batch.key)
        return results

    def _reason_against(self, batch: "_Batch") -> str:
        """Returns why a call must run eagerly although nothing has changed; empty if it need
        not.
        """
        if batch.requires_grad:
            return "the batch requires gradients"
        if not torch.is_grad_enabled():
            return "gradients are disabled"
        if any(global_module_hooks) or has_foreign(global_optimizer_hooks):
            return "hooks are registered for all modules or optimizers"
        if self._watch is not None:
            return self._watch.armed()
        return Watch(self._model, self._optimizer, self._scaler).armed()

    def _watch_again(self) -> None:
        """Notes what recordings depend on, and drops those that depend on something else."""
        if self._watch is not None and not self._watch.difference():
            return
        self.release()
        self._watch = Watch(self._model, self._optimizer, self._scaler)

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Makes one step."""
        parameters = self._parameters()
        before = [parameter.grad for parameter in parameters]
        try:
            results = self._gradients(parameters, args, kwargs)
            self._update()
        except BaseException:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise
        return results

    def _gradients(self, parameters: Sequence[nn.Parameter], args: Any, kwargs: Any) -> Any:
        """Computes the gradients of a batch, and returns the results of the function."""
        place = self._device().type
        is_mixed = torch.is_autocast_enabled(place)
        if is_mixed:
            # What autocast keeps is of weights before the last step.
            torch.clear_autocast_cache()
        results = self._function(*args, **kwargs)
        loss = _loss_in(results)
        for parameter in parameters:
            parameter.grad = None
        # The backward pass runs in the dtypes of the forward pass.
        aside = torch.autocast(place, enabled=False) if is_mixed else nullcontext()
        with aside:
            if self._scaler is not None:
                loss = self._scaler.scale(loss)
            loss.backward()
        if isinstance(results, Tensor):
            return results.detach()
        return tuple(result.detach() for result in results)

    def _update(self) -> None:
        """Makes the step of the optimizer with the gradients that are there."""
        scaler = self._scaler
        if scaler is None:
            if self._after_backward is not None:
                self._after_backward()
            self._optimizer.step()
            return
        try:
            if self._after_backward is not None:
                scaler.unscale_(self._optimizer)
                self._after_backward()
            scaler.step(self._optimizer)
        except BaseException:
            forget_unscaled(scaler, self._optimizer)
            raise
        scaler.update()

    @property
    def _updates_outside(self) -> bool:
        """True if torch needs the host for the step: it asks whether a gradient is infinite."""
        if self._scaler is None or not self._scaler.is_enabled():
            return False
        return not getattr(self._optimizer, "_step_supports_amp_scaling", False)

    def _parameters(self) -> list[nn.Parameter]:
        """Returns all Parameters that get gradients, each one once."""
        found = dict.fromkeys(self._model.parameters())
        found.update(dict.fromkeys(parameters_of(self._optimizer)))
        return list(found)

    def _run_aside(self, device: torch.device, batch: "_Batch", why: str) -> Any:
        """Makes one step on the stream that records, as torch demands of a step that comes before a
        recording.
        """
        stream = self._side_stream(device)
        present = torch.cuda.current_stream()
        args, kwargs = batch.on(device)
        self._complete_momentum()
        stream.wait_stream(present)
        try:
            with torch.cuda.stream(stream):
                results = self._run(args, kwargs)
        finally:
            present.wait_stream(stream)
        self._counts["eager"] += 1
        self._why = why
        return results

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _record(self, device: torch.device, batch: "_Batch") -> "_Recording":
        """Records a step without running it; an error leaves everything as it was."""
        # What the guard looks at once, it must not look at while a graph is recorded.
        refuse_stale_state(self._optimizer)
        assert self._watch is not None
        self._watch.require_on(device)
        inputs = [tensor.detach() for tensor in batch.copies(device)]
        args, kwargs = batch.filled(inputs)
        parameters = self._parameters()
        before = [parameter.grad for parameter in parameters]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # The memory of the eager step, and of recordings that were dropped.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with _recorded(graph, self._side_stream(device), self._pool):
                results = self._gradients(parameters, args, kwargs)
                if not self._updates_outside:
                    self._update()
            gradients = [parameter.grad for parameter in parameters]
        except BaseException:
            self._warm.discard(batch.key)
            if not self._recordings:
                self._pool = None
            raise
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        while len(self._recordings) >= _MOST:
            self._recordings.pop(next(iter(self._recordings)))
        recording = _Recording(
            graph, inputs, results, list(zip(parameters, gradients, strict=True))
        )
        self._recordings[batch.key] = recording
        # The function may have kept something in its modules.
        self._watch = Watch(self._model, self._optimizer, self._scaler)
        self._counts["recorded"] += 1
        return recording

    def _replay(self, recording: "_Recording", batch: "_Batch") -> Any:
        for given, held in zip(batch.tensors, recording.inputs, strict=True):
            held.copy_(given, non_blocking=True)
        recording.graph.replay()
        for parameter, gradient in recording.gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        assert self._watch is not None
        # Autograd and kept rectangles learn that the weights have changed.
        increment_version(self._watch.tensors)
        if self._updates_outside:
            self._update()
        self._counts["replayed"] += 1
        self._why = "nothing has changed since it was recorded"
        # The next replay writes over the results.
        if isinstance(recording.results, Tensor):
            return recording.results.clone()
        return tuple(result.clone() for result in recording.results)

    def _prepare_optimizer(self, device: torch.device) -> None:
        """Lets the optimizer keep all that its step reads and changes on the device.

        A number that was assigned as the learning rate of a group goes into the group's tensor.
        """
        groups = self._optimizer.param_groups
        del self._rates[len(groups) :]
        for number, group in enumerate(groups):
            is_known = number < len(self._rates) and group["lr"] is self._rates[number]
            if not is_known or not group.get("capturable", True):
                self._prepare_group(number, group, device)

    def _prepare_group(self, number: int, group: dict[str, Any], device: torch.device) -> None:
        rate = group["lr"]
        is_fit = isinstance(rate, Tensor) and rate.device == device and rate.dim() == 0
        if number == len(self._rates):
            if not is_fit:
                rate = torch.tensor(float(rate), dtype=torch.float32, device=device)
            self._rates.append(rate)
        elif is_fit:
            self._rates[number] = rate
        elif self._rates[number].device == device:
            self._rates[number].fill_(float(rate))
        else:
            self._rates[number] = torch.tensor(float(rate), dtype=torch.float32, device=device)
        group["lr"] = self._rates[number]
        if "capturable" in group:
            group["capturable"] = True
        else:
            group["foreach"] = False
            group["fused"] = True
        for parameter in group["params"]:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                # Counts of steps, which wait on the host while `capturable` is off.
                if isinstance(value, Tensor) and value.dim() == 0:
                    state[name] = value.to(device)

    def _complete_momentum(self) -> None:
        """Lets Parameters that have come beside others start with a momentum of zeros: the fused
        kernel of SGD steps with the momentum of all Parameters of a group, or of none.
        """
        for group in self._optimizer.param_groups:
            if not group.get("momentum") or group.get("dampening") or "capturable" in group:
                continue
            states = [self._optimizer.state[parameter] for parameter in group["params"]]
            if not any(state.get("momentum_buffer") is not None for state in states):
                continue
            for parameter, state in zip(group["params"], states, strict=True):
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


class _Batch:
    """The arguments of one call.

    Attributes:
        tensors: all tensors in it, in order.
        key: equal for two batches that one recording can run: shapes, strides and dtypes of the
            tensors, and all constants.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._form: Any = None
        self._leaves: list[Any] = []
        tensors: list[Tensor] = []
        if not kwargs and all(isinstance(arg, Tensor) for arg in args):
            tensors.extend(args)
            constants: tuple[Any, ...] = ()
        else:
            self._leaves, self._form = pytree.tree_flatten((args, kwargs))
            found = []
            for leaf in self._leaves:
                if isinstance(leaf, Tensor):
                    tensors.append(leaf)
                    found.append(None)
                elif isinstance(leaf, CONSTANTS):
                    found.append((type(leaf), leaf))
                else:
                    raise TypeError(
                        "a batch is made of tensors, tuples, lists, dicts and constants, got"
                        f" {type(leaf).__name__}"
                    )
            constants = (self._form, *found)
        self.tensors = tensors
        kinds = tuple((one.shape, one.stride(), one.dtype, one.device) for one in tensors)
        settings = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self.key = (kinds, constants, settings, torch.are_deterministic_algorithms_enabled())

    @property
    def requires_grad(self) -> bool:
        """True if a tensor of it requires gradients."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def copies(self, device: torch.device) -> list[Tensor]:
        """Returns copies of its tensors, on a device; they keep their gradient functions."""
        found = []
        for tensor in self.tensors:
            if tensor.requires_grad:
                found.append(tensor.to(device))
            else:
                held = torch.empty_like(tensor, device=device)
                found.append(held.copy_(tensor, non_blocking=True))
        return found

    def filled(self, tensors: Iterable[Tensor]) -> tuple[Any, Any]:
        """Returns the arguments with other tensors in their places."""
        if self._form is None:
            return tuple(tensors), {}
        coming = iter(tensors)
        leaves = [next(coming) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._form)

    def on(self, device: torch.device) -> tuple[Any, Any]:
        """Returns the arguments with copies of the tensors on a device."""
        return self.filled(self.copies(device))


@dataclass(frozen=True, eq=False)
class _Recording:
    """A recorded step, and the memory that it reads and writes beside weights and optimizer."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    results: Any  # of the function
    gradients: list[tuple[nn.Parameter, Tensor | None]]


def _loss_in(results: Any) -> Tensor:
    """Returns the loss among the results of a function."""
    if isinstance(results, Tensor):
        return results
    if isinstance(results, tuple) and all(isinstance(one, Tensor) for one in results):
        for loss in results:
            return loss
    raise TypeError(
        "the function of a captured step returns a loss, or a tuple of tensors of which the first"
        f" one is the loss, got {type(results).__name__}"
    )


class _recorded:
    """Records what runs inside the block as a graph, on a stream.

    An error of torch about the recording is raised as CaptureError, any other as it is.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph = graph
        self._side = stream
        self._stream = torch.cuda.stream(stream)
        self._pool = pool
        self._collects = False

    def __enter__(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream())
        # A graph or a tensor that is collected while another one is recorded would disturb it.
        self._collects = gc.isenabled()
        gc.disable()
        self._stream.__enter__()
        try:
            # Other threads, such as those that load data, may go on meanwhile.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._leave()
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        broken = None
        try:
            self._graph.capture_end()
        except RuntimeError as failure:
            broken = failure
            self._mend()
        finally:
            self._leave()
        if broken is None and (error is None or "captur" not in str(error)):
            return
        cause = broken if error is None else error
        if not isinstance(cause, RuntimeError):
            return
        raise CaptureError(
            "this step cannot be recorded as a CUDA graph, and was not made: something in it needs"
            " the host, such as .item(), nonzero() or a copy to the CPU. Compute with tensors"
            f" instead, or train without gn.capture. {str(cause).splitlines()[0]}"
        ) from cause

    def _leave(self) -> None:
        self._stream.__exit__(None, None, None)
        if self._collects:
            gc.enable()

    def _mend(self) -> None:
        """Records something harmless: after a recording that was broken off, the random generator
        believes that it is still being recorded.
        """
        with suppress(RuntimeError):
            number = torch.zeros((), device=self._side.device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            number.add_(1)
            graph.capture_end()
