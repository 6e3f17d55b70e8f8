"""Discovery: runs a twin of a model without contents, and collects the axes of its tensors."""

from __future__ import annotations

import _thread
import copy
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grapnet._torch import Fakes, call_parameter
from grapnet.core._opened import opened_in

from . import _operators as _operators  # registers the rules
from ._axes import Atom, Axis, Expression, Numbers, SumOf, atoms_of, leaves, pin
from ._copying import collector_paused, copy_model, outputs_in
from ._results import Results
from ._typing import Typing, model_line, quiet

_CACHED = type(functools.lru_cache(lambda: None))
# Functions with a cache that some twin has filled.
_FILLED: set[Any] = set()
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class Example(NamedTuple):
    """Arguments of one call of a model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012


@dataclass(frozen=True)
class AtomRecord:
    """What is known of an atom.

    Attributes:
        size: The number of its indices.
        pins: Why its size cannot change; empty if it can.
        marks: What operations do over it, as "normalised over".
    """

    size: int
    pins: tuple[str, ...]
    marks: frozenset[str]


@dataclass(frozen=True)
class Typed:
    """The axes of every tensor of a model.

    Attributes:
        atoms: The atoms, by number.
        axes: The axes of every parameter and buffer with a dimension, by its first name.
        readers: For an atom the tensors and dimensions that contract it.
        writers: For an atom the tensors and dimensions that make it.
        outputs: For a module the axes of its first output tensor. A module that is called several
            times with different axes has no entry.
        inputs: For a module the axes of its first input tensor, likewise.
        unread: Tensors that no operation read; their atoms are pinned.
        unknown: Operations without a rule, as "aten::foo at file.py:123".
        notes: Hooks that were left out, and runs that needed contents or failed, with the reason.
        needs_contents: Whether the model looks at values, so that tensors without contents do not
            suffice to run it.
        modes: The modes that a twin must run in to give the same axes: evaluation alone, unless a
            run in training mode showed more.
        scalars: Numbers that operations computed with in the first mode, in order. Where an edit
            changes one of them, a size is also a number in the formula, as in a scale by the
            root of head_dim: then the edit is not what removing nodes should be.
        repeated: Modules that are called several times in a pass.
        grouped: Names of the weights of convolutions in groups: the outer factors of their first
            axis, as far as it is neither read nor written, are the groups.
    """

    atoms: tuple[AtomRecord, ...]
    axes: dict[str, tuple[Expression, ...]]
    readers: dict[int, tuple[tuple[str, int], ...]]
    writers: dict[int, tuple[tuple[str, int], ...]]
    outputs: dict[str, tuple[Expression, ...]]
    inputs: dict[str, tuple[Expression, ...]]
    unread: tuple[str, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...] = ()
    needs_contents: bool = False
    modes: tuple[bool, ...] = (False,)
    scalars: tuple[float, ...] = ()
    repeated: frozenset[str] = frozenset()
    grouped: frozenset[str] = frozenset()

    def sizes(self) -> list[int]:
        """Returns the size of every atom, by number."""
        return [atom.size for atom in self.atoms]

    def signature(self, sizes: Sequence[int] | None = None) -> dict[str, tuple[str, ...]]:
        """Returns a canonical text for the axes of every tensor.

        Atoms are numbered by their first appearance, and have their sizes. Two typings describe
        the same function of axes if and only if their signatures are equal. Atoms of size 1 are
        written as 1, without a number: they broadcast, and nothing identifies them.

        Args:
            sizes: Sizes of the atoms, to imagine an edit; those of the typing by default.
        """
        if sizes is None:
            sizes = self.sizes()
        numbers: dict[int, int] = {}
        texts: dict[str, tuple[str, ...]] = {}
        for name, axes in self.axes.items():
            texts[name] = tuple(_text(axis, sizes, numbers) for axis in axes)
        return texts


def _text(expression: Expression, sizes: Sequence[int], numbers: dict[int, int]) -> str:
    if isinstance(expression, Atom):
        size = sizes[expression.number]
        if size == 1:
            return "1"
        number = numbers.setdefault(expression.number, len(numbers))
        return f"{number}:{size}"
    texts = [_text(part, sizes, numbers) for part in expression.parts]
    if isinstance(expression, SumOf):
        return "(" + "+".join(texts) + ")"
    factors = [text for text in texts if text != "1"]
    return "*".join(factors) or "1"


class Recorder:
    """Notes the calls of the modules of a twin.

    The hooks of the twin hold it, so it does not hold the twin: without a cycle all of that is
    gone as soon as the twin is.

    Attributes:
        calls: (path, first input, first output) of every call of a module.
        typing: The typing under which the twin runs; None while it does not.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tensor | None, Tensor | None]] = []
        self.typing: Typing | None = None

    def hook(self, path: str) -> Any:
        """Returns a forward hook that notes input and output of a module."""

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.typing is None:
                return
            tensor = output
            if not isinstance(output, Tensor):
                tensor = next(iter(outputs_in(output)), None)
            source = next(iter(outputs_in((args, kwargs))), None)
            self.calls.append((path, source, tensor))
            if isinstance(module, _RECURRENT):
                self._pin_recurrent(module, output)

        return record

    def _pin_recurrent(self, module: nn.Module, output: Any) -> None:
        """Pins a recurrent module: its kernels keep sizes and flat copies of their own."""
        assert self.typing is not None
        why = f"no rule for nn.{type(module).__name__} at {model_line()}"
        self.typing.unknown[why.removeprefix("no rule for ")] = None
        for tensor in (*module.parameters(), *outputs_in(output)):
            for axis in self.typing.of(tensor):
                pin(axis, why)


class Twin:
    """A copy of a model that holds tensors without contents, or aliases of the model's own.

    Integer attributes may be set on its modules, and shapes with `set_shape`, to type what a
    model would be after an edit.

    Attributes:
        module: The copy. Tied tensors are tied in it as well; it has no hooks of the model.
        fakes: Its tensors without contents; None where they are real.
        outside: Names of the tensors that are neither parameters nor buffers, by id.
        left_out: Hooks of the model's forward pass that the twin does not have.
        recorder: Notes the calls of its modules.
    """

    def __init__(self, module: nn.Module, fakes: Fakes | None, outside: dict[int, str]) -> None:
        self.module = module
        self.fakes = fakes
        self.outside = outside
        self.left_out: list[str] = []
        self.recorder = Recorder()
        # Where each tensor is held, under its first name: (dictionary of a module, key).
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self.has_fast_path = False
        self.caches = _cached_functions(module)
        self._find_places()
        for path, child in module.named_modules():
            child.register_forward_hook(self.recorder.hook(path), with_kwargs=True)
            if isinstance(child, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
                self.has_fast_path = True

    def tensors(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers with a dimension, each under its first name."""
        found: dict[str, Tensor] = {}
        for name, places in self._places.items():
            holder, key = places[0]
            tensor = holder.get(key)
            if tensor is not None and tensor.dim():
                found[name] = tensor
        return found

    def set_shape(self, name: str, shape: Sequence[int]) -> None:
        """Replaces a tensor, wherever it is tied, by one of another shape, without contents or of
        ones.
        """
        holder, key = self._places[name][0]
        if self.fakes is None:
            other: Tensor = holder[key].detach().new_ones(tuple(shape))
            if isinstance(holder[key], nn.Parameter):
                other = nn.Parameter(other, holder[key].requires_grad)
        else:
            other = _imitation(self.fakes, holder[key], shape)
        for holder, key in self._places[name]:
            holder[key] = other

    def imitate(self, example: Example) -> Example:
        """Returns an example whose tensors have no contents, for a twin of that kind."""
        if self.fakes is None:
            return example
        made: dict[int, Tensor] = {}
        args = _imitated(self.fakes, tuple(example.args), made)
        return Example(args, _imitated(self.fakes, dict(example.kwargs), made))

    def _find_places(self) -> None:
        names: dict[int, str] = {}
        for kind in ("_parameters", "_buffers"):
            for path, module in self.module.named_modules():
                holder = vars(module)[kind]
                for key, tensor in holder.items():
                    if tensor is None:
                        continue
                    name = key
                    if path:
                        name = f"{path}.{key}"
                    first = names.setdefault(id(tensor), name)
                    self._places.setdefault(first, []).append((holder, key))


def _imitated(fakes: Fakes, tree: Any, made: dict[int, Tensor]) -> Any:
    """Returns a tree whose tensors have no contents; `made` are those so far, by id."""
    if isinstance(tree, Tensor):
        if id(tree) not in made:
            made[id(tree)] = _imitation(fakes, tree)
        return made[id(tree)]
    if isinstance(tree, dict):
        items = {key: _imitated(fakes, value, made) for key, value in tree.items()}
        if type(tree) is dict:
            return items
        same_kind = copy.copy(tree)
        same_kind.update(items)
        return same_kind
    if isinstance(tree, (list, tuple)):
        parts = [_imitated(fakes, item, made) for item in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        return type(tree)(parts)
    return tree


def _imitation(fakes: Fakes, tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Returns a tensor without contents that looks like another, or has another shape."""
    fake = fakes.imitate(tensor, shape)
    if tensor.requires_grad:
        fake.requires_grad_()
    if isinstance(tensor, nn.Parameter):
        call_parameter(fake)
    return fake


def make_twin(model: nn.Module, *, real: bool = False) -> Twin:
    """Copies a model without copying its weights.

    The model is not touched, not even for a moment. Its hooks are left out, and `Twin.left_out`
    names those of the forward pass; hooks of torch and transformers that compute weights or collect
    hidden states stay.

    Args:
        model: The model, on any device, the meta device included.
        real: Whether the parameters of the twin share the memory of the model's own, where
            tensors without contents do not suffice. Buffers and other tensors are cloned then.
    """
    fakes = None
    if not real:
        fakes = Fakes()
    memo: dict[int, Any] = {}
    held = [*model.named_parameters(), *model.named_buffers()]
    all_opened = opened_in(model)
    for _, tensor in held:
        opened = all_opened.get(id(tensor))
        if fakes is not None:
            double = _imitation(fakes, tensor, opened and opened.pattern.shape)
        elif opened is not None:
            double = nn.Parameter(opened.whole(tensor.detach()), tensor.requires_grad)
        elif isinstance(tensor, nn.Parameter):
            double = nn.Parameter(tensor.detach(), tensor.requires_grad)
        else:
            double = tensor.detach().clone()
        memo[id(tensor)] = double
    # Without contents nothing is written, so that other tensors can be shared.
    other = torch.clone if real else torch.detach
    module, names, left_out = copy_model(model, memo, other)
    # A closure may hold tensors of the model itself.
    for name, tensor in held:
        names[id(tensor)] = name
    twin = Twin(module, fakes, names)
    twin.left_out.extend(left_out)
    return twin


class _OutOfTorch(TorchFunctionMode):
    """Pins what leaves torch, where no operation can be seen.

    While such a mode is on, nn.MultiheadAttention does not take its fast path, which would hide
    its operations. The switch of torch for that path holds for all threads, so it is left alone.
    """

    _LEAVES = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__)

    def __init__(self, typing: Typing) -> None:
        super().__init__()
        self._typing = typing

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self._LEAVES:
            for axis in self._typing.of(args[0]):
                pin(axis, f"leaves torch by {func.__name__} at {model_line()}")
        return func(*args, **(kwargs or {}))


def _cached_functions(model: nn.Module) -> list[Any]:
    """Returns the functions with a `functools.lru_cache` that the code of a model may call.

    They are looked for in the classes of its modules and in the files of these classes, also inside
    of one decorator.
    """
    namespaces: dict[int, Mapping[str, Any]] = {}
    for module in model.modules():
        for base in type(module).__mro__[:-1]:
            if not base.__module__.startswith("torch."):
                source = sys.modules.get(base.__module__)
                for namespace in (vars(base), getattr(source, "__dict__", {})):
                    namespaces[id(namespace)] = namespace
    found: dict[int, Any] = {}
    for namespace in list(namespaces.values()):
        for value in list(namespace.values()):
            function = getattr(value, "__func__", value)
            inside = getattr(function, "__closure__", None)
            candidates = [function]
            if isinstance(inside, tuple):
                for cell in inside:
                    with suppress(ValueError):
                        candidates.append(cell.cell_contents)
            for candidate in candidates:
                if isinstance(candidate, _CACHED):
                    found[id(candidate)] = candidate
    return list(found.values())


@contextmanager
def _without_leaks(caches: Sequence[Any]) -> Iterator[None]:
    """Clears the filled caches of functions, so that the model finds no fake tensors there.

    They are cleared before the next run too: what the model put there since would make it a run of
    other operations.
    """
    for function in caches:
        if function in _FILLED:
            function.cache_clear()
    before = [function.cache_info().misses for function in caches]
    try:
        yield
    finally:
        for function, misses in zip(caches, before, strict=True):
            if function.cache_info().misses != misses:
                _FILLED.add(function)
                function.cache_clear()


@contextmanager
def undisturbed(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restores the generators of random numbers of torch, numpy and Python."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _in_another_thread(function: Callable[[], Any]) -> Any:
    """Runs a function in a new thread and returns its result, or raises its error.

    An interrupt stops only the waiting: one that left the mode of tensors without contents half-way
    would make torch abort the process.
    """
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def work(finished: Any) -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            finished.release()

    while not outcome and not errors:
        finished = threading.Lock()
        finished.acquire()
        # Not threading.Thread, which waits for its start without end: Python may raise an error
        # that is meant for this thread in the new one, before its first line.
        thread = _thread.start_new_thread(work, (finished,))
        while not finished.acquire(timeout=0.1):
            if thread not in sys._current_frames():
                break
    if errors:
        raise errors[0]
    return outcome[0]


def _run(twin: Twin, typing: Typing, example: Example, training: bool) -> Any:
    """Runs a twin under a typing. Lines of the model are looked for inside of `forward`."""
    named = twin.tensors()
    typing.attach(named, twin.outside)
    for tensor in outputs_in((example.args, example.kwargs)):
        typing.give(tensor, "input")
    twin.module.train(training)
    real_tensors: list[Tensor] = []
    if twin.fakes is None:
        real_tensors = list(named.values())
    function_mode: Any = nullcontext()
    if twin.fakes is None or twin.has_fast_path:
        function_mode = _OutOfTorch(typing)
    fake_mode: Any = nullcontext()
    typing.results = None
    if twin.fakes is not None:
        fake_mode = twin.fakes.mode
        typing.results = Results(twin.fakes)

    def forward() -> Any:
        twin.recorder.typing = typing
        quiet.on = True
        try:
            with (
                undisturbed(real_tensors),
                _without_leaks(twin.caches),
                torch.no_grad(),
                fake_mode,
                function_mode,
                typing,
            ):
                return twin.module(*example.args, **example.kwargs)
        finally:
            twin.recorder.typing = None
            quiet.on = False

    output = forward() if twin.fakes is None else _in_another_thread(forward)
    for tensor in outputs_in(output):
        for axis in typing.of(tensor):
            pin(axis, "output")
    # A buffer that the model replaced is the same buffer still.
    for name, tensor in twin.tensors().items():
        before = named.get(name)
        if before is not None and before is not tensor:
            typing.refine(before, tensor, f"{name} is replaced by another tensor")
    return output


@collector_paused()
def discover(
    model: nn.Module, examples: Sequence[Example], *, modes: Sequence[bool] = (False, True)
) -> Typed:
    """Types every axis of every parameter, buffer and activation of a model.

    A twin without contents runs once per mode and example. Where it cannot, because the model looks
    at values, a twin runs that shares the model's weights. The model itself is not touched.

    Args:
        model: The model.
        examples: Arguments of calls that together take every path of interest.
        modes: Whether to run in training mode, for each run.

    Raises:
        Exception: What the model raises, when no mode runs with an example.
    """
    twin = make_twin(model)
    typing = Typing()
    notes = list(twin.left_out)
    imitations = [twin.imitate(example) for example in examples]
    failures: dict[int, Exception] = {}
    ran: set[int] = set()
    after_first: Any = None
    scalars: tuple[float, ...] = ()
    needs_contents = False
    for training in modes:
        for index, example in enumerate(examples):
            try:
                if _run_either(model, twin, typing, example, imitations[index], training, notes):
                    needs_contents = True
                ran.add(index)
            except Exception as error:
                failures.setdefault(index, error)
                mode = _MODE_NAMES[training]
                notes.append(f"{mode} was not run: {_first_line(error)}")
        if after_first is None:
            after_first = _known(typing)
            scalars = tuple(typing.scalars)
    for index, error in failures.items():
        if index not in ran:
            raise error
    needed = tuple(modes)
    if after_first == _known(typing):
        needed = needed[:1]
    typed = _typed(twin, typing, notes, needed, scalars)
    return replace(typed, needs_contents=needs_contents)


_MODE_NAMES = {False: "evaluation mode", True: "training mode"}


def _run_either(
    model: nn.Module,
    twin: Twin,
    typing: Typing,
    example: Example,
    imitation: Example,
    training: bool,
    notes: list[str],
) -> bool:
    """Runs a twin without contents or, where it fails, one that shares the model's weights.

    Returns:
        Whether contents were needed.
    """
    recorded = len(twin.recorder.calls)
    computed = len(typing.scalars)
    try:
        _run(twin, typing, imitation, training)
        return False
    except Exception as error:
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise
        failure = error
    # What the failed run found of the axes holds; its calls come again.
    del twin.recorder.calls[recorded:]
    del typing.scalars[computed:]
    real = make_twin(model, real=True)
    _run(real, typing, example, training)
    twin.recorder.calls.extend(real.recorder.calls)
    notes.append(f"{_MODE_NAMES[training]} ran with contents: {_first_line(failure)}")
    return True


def _known(typing: Typing) -> Any:
    """Returns what is known of the parameters so far, to compare."""
    numbers = Numbers()
    axes = [[numbers.frozen(axis) for axis in row] for row in typing.named.values()]
    return axes, set(typing.read)


def discover_twin(
    twin: Twin, examples: Sequence[Example], *, modes: Sequence[bool] = (False,)
) -> Typed:
    """Types a twin as it is by now.

    Args:
        twin: A twin, perhaps with other shapes and attributes than its model.
        examples: What `twin.imitate` returned; made once, they serve every call.
        modes: Whether to run in training mode, for each run; `Typed.modes` says which are needed.

    Raises:
        Exception: What the twin raises, as where shapes do not fit.
    """
    typing = Typing()
    twin.recorder.calls.clear()
    scalars: tuple[float, ...] | None = None
    for training in modes:
        for example in examples:
            _run(twin, typing, example, training)
        if scalars is None:
            scalars = tuple(typing.scalars)
    return _typed(twin, typing, [], tuple(modes), scalars or ())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _typed(
    twin: Twin,
    typing: Typing,
    notes: Sequence[str],
    modes: tuple[bool, ...],
    scalars: tuple[float, ...],
) -> Typed:
    """Returns what a typing found, as immutable expressions over numbered atoms."""
    unread: list[str] = []
    seen = typing.seen()
    for name, axes in typing.named.items():
        why = "unseen: no operation read this part"
        if name not in typing.read:
            unread.append(name)
            why = "unseen: no operation read it"
        for axis in axes:
            for leaf in leaves(axis):
                if leaf not in seen:
                    pin(leaf, why)
    numbers = Numbers()
    named: dict[str, tuple[Expression, ...]] = {}
    for name, axes in typing.named.items():
        named[name] = tuple(numbers.frozen(axis) for axis in axes)
    inputs: dict[str, list[tuple[Expression, ...]]] = {}
    outputs: dict[str, list[tuple[Expression, ...]]] = {}
    called: set[str] = set()
    repeated: set[str] = set()
    for path, source, result in twin.recorder.calls:
        if path in called:
            repeated.add(path)
        called.add(path)
        if path == "":
            # The model itself returns last.
            called.clear()
        for record, tensor in ((inputs, source), (outputs, result)):
            if tensor is not None and typing.has(tensor):
                axes = tuple(numbers.frozen(axis) for axis in typing.of(tensor))
                record.setdefault(path, []).append(axes)
    atoms: list[AtomRecord] = []
    for leaf in numbers:
        pins = leaf.pins
        if leaf.size <= 1:
            pins = ("a single index, which broadcasts",)
        atoms.append(AtomRecord(leaf.size, pins, leaf.marks))
    return Typed(
        atoms=tuple(atoms),
        axes=named,
        readers=_roles(typing.read_dims, named, numbers),
        writers=_roles(typing.written_dims, named, numbers),
        outputs=_agreed(outputs, atoms),
        inputs=_agreed(inputs, atoms),
        unread=tuple(unread),
        unknown=tuple(typing.unknown),
        notes=tuple(notes),
        modes=modes,
        scalars=scalars,
        repeated=frozenset(repeated),
        grouped=frozenset(typing.grouped),
    )


def _roles(
    notes: Mapping[tuple[str, tuple[int, ...]], Sequence[Axis]],
    named: Mapping[str, tuple[Expression, ...]],
    numbers: Numbers,
) -> dict[int, tuple[tuple[str, int], ...]]:
    """Returns for each atom the tensors and dimensions in which operations contract or make it."""
    found: dict[int, dict[tuple[str, int], None]] = {}
    for (name, dims), axes in notes.items():
        used: dict[int, None] = {}
        for axis in axes:
            for leaf in leaves(axis):
                if leaf in numbers:
                    used[numbers[leaf]] = None
        for dim in dims:
            for atom in atoms_of(named[name][dim]):
                if atom in used:
                    found.setdefault(atom, {})[name, dim] = None
    return {atom: tuple(places) for atom, places in sorted(found.items())}


def _agreed(
    calls: Mapping[str, Sequence[tuple[Expression, ...]]], atoms: Sequence[AtomRecord]
) -> dict[str, tuple[Expression, ...]]:
    """Returns the axes that all calls of a module have in common; pinned ones may differ."""
    agreed: dict[str, tuple[Expression, ...]] = {}
    for path, rows in calls.items():
        first = rows[0]
        same = all(_same_free(first, other, atoms) for other in rows[1:] if other != first)
        if same:
            agreed[path] = first
    return agreed


def _same_free(
    a: tuple[Expression, ...], b: tuple[Expression, ...], atoms: Sequence[AtomRecord]
) -> bool:
    if len(a) != len(b):
        return False
    for left, right in zip(a, b, strict=True):
        free = any(not atoms[number].pins for number in (*atoms_of(left), *atoms_of(right)))
        if free and left != right:
            return False
    return True
