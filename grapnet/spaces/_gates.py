"""Gates of an edit on spaces: whether the model runs with the new sizes, and which of its numbers
must follow.

A twin of the model on fake tensors is given the new shapes and typed again. The edit passes if the
axes have the types that were predicted. If the twin cannot run, or comes out with other types,
integers of its modules that equal a size which changes are changed too, the fewest possible:
`num_heads`, `split_size`. What was found for one module is tried first for others of its class.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from grapnet._torch import Convolution, Norm
from grapnet.core._change import AttributeChange
from grapnet.core._errors import EditError

from ._axes import Atom, Expression, ProductOf, SumOf, atoms_of, size_of
from ._copying import collector_paused
from ._discovery import Example, Twin, Typed, discover_twin, make_twin
from ._space import Space

# Integers that may follow one space; more than this are not searched for.
MOST_INTEGERS = 3


class Recipe(NamedTuple):
    """How a number of a module follows from an axis: it is the size of some neighbouring parts of
    the axis. The tensor is named from the module, so that the recipe serves all of its class.
    """

    kind: type[nn.Module]
    attribute: str
    tensor: str
    dim: int
    parts: tuple[int, int] | None  # from which to which; None: the whole axis


@dataclass(frozen=True)
class Candidate:
    """A number of one module that may follow an edit."""

    path: str
    attribute: str
    expression: Expression
    recipe: Recipe


class Gates:
    """The gates of one model; remembers which of its numbers follow which axes."""

    def __init__(self, model: nn.Module, typed: Typed, examples: Sequence[Example]) -> None:
        self._typed = typed
        # The groups of modules when they were typed: later, one group could be any factor.
        self._groups: dict[str, int] = {}
        for path, module in model.named_modules():
            if isinstance(module, nn.GroupNorm):
                self._groups[path] = module.num_groups
            elif isinstance(module, Convolution):
                self._groups[path] = module.groups
        self.examples = list(examples)
        self._bound: dict[tuple[str, str], Expression] = {}
        self._learned: list[Recipe] = []
        # For sizes with which the model runs: whether it computes with other numbers than before.
        self._passed: dict[tuple[int, ...], bool] = {}
        # The numbers by which modules describe their tensors, for the last change of sizes.
        self._described: dict[object, dict[tuple[str, str], Any]] = {}

    def foresee(
        self,
        model: nn.Module,
        changed: Sequence[Space],
        before: list[int],
        after: list[int],
        *,
        search: bool = True,
    ) -> list[AttributeChange]:
        """Returns the numbers of modules that must follow a change of sizes.

        Args:
            model: the model.
            changed: the spaces whose sizes change.
            before: the sizes of all atoms.
            after: the sizes that they shall have.
            search: whether to look for numbers that must follow and are not known yet.

        Raises:
            EditError: the model cannot run with the new sizes, or would be another one.
        """
        if before == after:
            return []
        if tuple(after) not in self._passed:
            known = self._bound
            learned = list(self._learned)
            try:
                self._search(model, changed, before, after, search)
            except BaseException:
                self._bound = known
                self._learned = learned
                raise
        sizes = (tuple(before), tuple(after))
        if sizes not in self._described:
            self._described = {sizes: self._descriptions(model, before, after)}
        found = dict(self._described[sizes])
        for (path, attribute), expression in self._bound.items():
            found[path, attribute] = size_of(expression, after)
        changes = []
        for (path, attribute), value in found.items():
            present = getattr(submodule(model, path), attribute)
            if present != value:
                changes.append(AttributeChange(path, attribute, present, value))
        return changes

    def has_other_numbers(self, sizes: list[int]) -> bool:
        """Returns whether a size is a number in the formula of the model with sizes that were
        foreseen: an operation computes with another number than at adoption.
        """
        return self._passed.get(tuple(sizes), False)

    @collector_paused()
    def _search(
        self,
        model: nn.Module,
        changed: Sequence[Space],
        before: list[int],
        after: list[int],
        search: bool,
    ) -> None:
        """Binds the numbers that must follow; raises EditError if none make the model run."""
        runs = _Runs(model, self._typed, self.examples, self._groups)
        self._apply_recipes(model, changed)
        problem = runs.problem(before, after, self._bound)
        if problem and not search:
            raise EditError(f"the model cannot run with other sizes: {problem}")
        if problem:
            self._fit(model, runs, changed, before, after)
        # Counts of heads that the model keeps and does not use follow, too.
        self._passed[tuple(after)] = runs.has_other_numbers
        counts = []
        heads = _integers(model, "head")
        for space in changed:
            for one in _candidates(heads, space, before, after):
                if (one.path, one.attribute) not in self._bound:
                    counts.append(one)
        if counts and not runs.problem(before, after, self._with(counts)):
            self._bound = self._with(counts)

    def _fit(
        self,
        model: nn.Module,
        runs: "_Runs",
        changed: Sequence[Space],
        before: list[int],
        after: list[int],
    ) -> None:
        """Binds the numbers without which the model does not run."""
        # One space after the other: few numbers follow each of them.
        left = []
        failed: dict[object, str] = {}
        for space in changed:
            alone = list(before)
            alone[space._atom] = after[space._atom]
            kind = (kind_of(model, space), before[space._atom], after[space._atom])
            if kind in failed:
                left.append((space, failed[kind]))
                continue
            self._apply_recipes(model, [space])
            problem = runs.problem(before, alone, self._bound)
            if problem and not self._bind_fewest(model, runs, [space], before, alone):
                failed[kind] = problem
                left.append((space, problem))
        # Two spaces of which one number is the size can only change together.
        for group in _sharing_numbers(model, [space for space, _ in left], before, after):
            together = list(before)
            for space in group:
                together[space._atom] = after[space._atom]
            self._apply_recipes(model, group)
            if runs.problem(before, together, self._bound):
                self._bind_fewest(model, runs, group, before, together)
        self._apply_recipes(model, changed)
        whole = runs.problem(before, after, self._bound)
        if not whole:
            return
        space, problem = left[0] if left else (changed[0], whole)
        raise EditError(
            f"the model cannot run with {after[space._atom]} nodes in {space.name} instead of"
            f" {before[space._atom]}, and no number of its modules was found that must follow:"
            f" {problem}"
        )

    def _bind_fewest(
        self,
        model: nn.Module,
        runs: "_Runs",
        changed: Sequence[Space],
        before: list[int],
        after: list[int],
    ) -> bool:
        """Binds the fewest numbers near the tensors of spaces that make the model run; returns
        whether there are any.
        """
        candidates: dict[tuple[str, str, int], Candidate] = {}
        integers = _integers(model)
        # What describes a module of torch follows anyway.
        described = self._descriptions(model, before, after)
        for space in changed:
            for one in _candidates(integers, space, before, after):
                size = size_of(one.expression, after)
                if described.get((one.path, one.attribute)) != size:
                    candidates.setdefault((one.path, one.attribute, size), one)
        options = _options(list(candidates.values()))
        # Numbers are added one by one, as long as each changes how the model fails.
        problems: dict[tuple[Candidate, ...], str] = {}
        problems[()] = runs.problem(before, after, self._bound)
        for _ in range(MOST_INTEGERS):
            longer: dict[tuple[Candidate, ...], str] = {}
            seen: set[frozenset[Candidate]] = set()
            for chosen, problem in problems.items():
                places = {(one.path, one.attribute) for one in chosen}
                for option in options:
                    more = (*chosen, *option)
                    is_taken = any((one.path, one.attribute) in places for one in option)
                    if is_taken or frozenset(more) in seen:
                        continue
                    seen.add(frozenset(more))
                    found = runs.problem(before, after, self._with(more))
                    if not found:
                        self._bound = self._with(more)
                        self._learned += [one.recipe for one in more]
                        return True
                    if found != problem:
                        longer[more] = found
            problems = longer
        return False

    def _descriptions(
        self, model: nn.Module, before: list[int], after: list[int]
    ) -> dict[tuple[str, str], Any]:
        return _descriptions(model, self._typed, self._groups, before, after)

    def _with(self, chosen: Sequence[Candidate]) -> dict[tuple[str, str], Expression]:
        """Returns the bound numbers with some more."""
        return self._bound | {(one.path, one.attribute): one.expression for one in chosen}

    def _apply_recipes(self, model: nn.Module, changed: Sequence[Space]) -> None:
        """Binds the numbers of modules of a class of which they are known."""
        if not self._learned:
            return
        atoms = {space._atom for space in changed}
        for path, module in model.named_modules():
            for recipe in self._learned:
                if type(module) is not recipe.kind:
                    continue
                tensor = f"{path}.{recipe.tensor}" if path else recipe.tensor
                axes = self._typed.axes.get(tensor)
                if axes is None:
                    continue
                expression = _part(axes[recipe.dim], recipe.parts)
                if expression is not None and atoms & set(atoms_of(expression)):
                    place = (path, recipe.attribute)
                    self._bound = {place: expression} | self._bound


def submodule(model: nn.Module, path: str) -> nn.Module:
    """Returns a module by its path, in a tenth of the time of `get_submodule`."""
    module = model
    for name in path.split(".") if path else ():
        found = module._modules[name]
        assert found is not None
        module = found
    return module


def kind_of(model: nn.Module, space: Space) -> frozenset[Any]:
    """Returns the classes of modules that hold a space, and where; equal for equal layers."""
    places = set()
    for (name, dim), axis in space._members.items():
        path, _, tensor = name.rpartition(".")
        module = type(model.get_submodule(path))
        places.add((module, tensor, dim, atoms_of(axis).index(space._atom)))
    return frozenset(places)


def _options(candidates: Sequence[Candidate]) -> list[tuple[Candidate, ...]]:
    """Returns what to change at a time: a number in all modules of a class, as where they share a
    stream, and then each alone.
    """
    alike: dict[Recipe, list[Candidate]] = {}
    for one in candidates:
        alike.setdefault(one.recipe, []).append(one)
    together = [tuple(group) for group in alike.values() if len(group) > 1]
    return [*together, *((one,) for one in candidates)]


class _Runs:
    """Runs of a twin of the model with other sizes."""

    def __init__(
        self,
        model: nn.Module,
        typed: Typed,
        examples: Sequence[Example],
        groups: dict[str, int],
    ) -> None:
        self._model = model
        self._groups = groups
        self._typed = typed
        self._examples = examples
        self._twin: Twin | None = None
        self._calls: list[Example] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._numbers: dict[tuple[str, str], Any] = {}  # as they are in the model
        self.has_other_numbers = False  # in the last run, than at adoption

    def problem(
        self,
        before: list[int],
        after: list[int],
        bound: dict[tuple[str, str], Expression],
    ) -> str:
        """Returns why the model with other sizes is not the one predicted; empty if it is."""
        twin = self._ready_twin(before)
        for name, axes in self._typed.axes.items():
            shape = tuple(size_of(axis, after) for axis in axes)
            if shape != self._shapes[name]:
                twin.set_shape(name, shape)
                self._shapes[name] = shape
        numbers = dict(self._numbers)
        numbers |= _descriptions(self._model, self._typed, self._groups, before, after)
        for place, expression in bound.items():
            numbers[place] = size_of(expression, after)
        for (path, attribute), value in numbers.items():
            module = twin.module.get_submodule(path)
            self._numbers.setdefault((path, attribute), getattr(module, attribute))
            setattr(module, attribute, value)
        try:
            again = discover_twin(twin, self._calls, modes=self._typed.modes)
        except Exception as error:
            # It may have stopped anywhere: the next run has a twin of its own.
            self._twin = None
            return f"{type(error).__name__}: {error}".splitlines()[0]
        self.has_other_numbers = again.scalars != self._typed.scalars
        return _first_difference(self._typed.signature(after), again.signature())

    def _ready_twin(self, before: list[int]) -> Twin:
        if self._twin is None:
            # A model that looks at values does so with other sizes, too.
            self._twin = make_twin(self._model, real=self._typed.needs_contents)
            self._calls = [self._twin.imitate(example) for example in self._examples]
            self._numbers = {}
            for name, axes in self._typed.axes.items():
                self._shapes[name] = tuple(size_of(axis, before) for axis in axes)
        return self._twin


def _first_difference(predicted: dict[str, Any], found: dict[str, Any]) -> str:
    for name, axes in predicted.items():
        if found.get(name) != axes:
            return f"the axes of {name} would be {found.get(name)}, not {axes}"
    return ""


class _Integers(NamedTuple):
    """The public integers of one module."""

    kind: type[nn.Module]
    values: dict[str, int]


def _integers(model: nn.Module, word: str = "") -> dict[str, _Integers]:
    """Returns the public integers of modules, by path; only those with a word in their names."""
    found: dict[str, _Integers] = {}
    for path, module in model.named_modules():
        values: dict[str, int] = {}
        for attribute, value in vars(module).items():
            if type(value) is int and word in attribute and not attribute.startswith("_"):
                values[attribute] = value
        if values:
            found[path] = _Integers(type(module), values)
    return found


def _candidates(
    integers: dict[str, _Integers], space: Space, before: list[int], after: list[int]
) -> Iterator[Candidate]:
    """Yields integers of modules near the tensors of a space that are the size of something that
    changes.
    """
    if not integers:
        return
    for (tensor, dim), axis in space._members.items():
        changing: dict[int, list[tuple[tuple[int, int] | None, Expression]]] = {}
        for parts, expression in spans(axis):
            size = size_of(expression, before)
            if size_of(expression, after) != size:
                changing.setdefault(size, []).append((parts, expression))
        owner, _, _ = tensor.rpartition(".")
        for path in _ancestors(owner):
            if path not in integers:
                continue
            kind, values = integers[path]
            inside = tensor.removeprefix(f"{path}.") if path else tensor
            for attribute, value in values.items():
                for parts, expression in changing.get(value, ()):
                    recipe = Recipe(kind, attribute, inside, dim, parts)
                    yield Candidate(path, attribute, expression, recipe)


def _sharing_numbers(
    model: nn.Module, spaces: Sequence[Space], before: list[int], after: list[int]
) -> list[list[Space]]:
    """Returns the groups of spaces near which the same number of a module is a size of several."""
    groups: list[tuple[set[tuple[str, str]], list[Space]]] = []
    integers = _integers(model)
    for space in spaces:
        found = _candidates(integers, space, before, after)
        places = {(one.path, one.attribute) for one in found}
        members = [space]
        apart = []
        for others, group in groups:
            if places & others:
                places |= others
                members = [*group, *members]
            else:
                apart.append((others, group))
        groups = [*apart, (places, members)]
    return [group for _, group in groups if len(group) > 1]


def _ancestors(path: str) -> Iterator[str]:
    """Yields the path of a module and of the two modules around it, but not of the whole model
    unless it is one of these itself.
    """
    for _ in range(3):
        yield path
        if not path:
            return
        path, _, _ = path.rpartition(".")


def spans(axis: Expression) -> Iterator[tuple[tuple[int, int] | None, Expression]]:
    """Yields an axis and its parts: terms of a sum, neighbouring factors of a product."""
    yield None, axis
    if isinstance(axis, Atom):
        return
    count = len(axis.parts)
    for start in range(count):
        longest = start + 1 if isinstance(axis, SumOf) else count
        for stop in range(start + 1, longest + 1):
            expression = _part(axis, (start, stop))
            if expression is not None and stop - start < count:
                yield (start, stop), expression


def _part(axis: Expression, parts: tuple[int, int] | None) -> Expression | None:
    """Returns some neighbouring parts of an axis; None if it does not have them."""
    if parts is None:
        return axis
    start, stop = parts
    if isinstance(axis, Atom) or stop > len(axis.parts):
        return None
    chosen = axis.parts[start:stop]
    if len(chosen) == 1:
        return chosen[0]
    return type(axis)(chosen)


def _descriptions(
    model: nn.Module,
    typed: Typed,
    groups: dict[str, int],
    before: list[int],
    after: list[int],
) -> dict[tuple[str, str], Any]:
    """Returns the numbers by which modules of torch describe their tensors, after an edit.

    Args:
        model: the model.
        typed: its axes.
        groups: the groups that modules had when the model was typed, by their paths.
        before: the sizes of all atoms before the edit.
        after: the same after it.
    """
    first = typed.sizes()
    moved = {atom for atom, size in enumerate(before) if after[atom] != size}
    names: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        names[id(tensor)] = name
    found: dict[tuple[str, str], Any] = {}
    for path, module in model.named_modules():
        # A tied tensor has its axes in every module that holds it.
        held: dict[str, tuple[Expression, ...]] = {}
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            axes = typed.axes.get(names.get(id(tensor), ""))
            if axes is not None:
                held[own] = axes
        here: set[int] = set()
        for axes in held.values():
            for axis in axes:
                here.update(atoms_of(axis))
        if here & moved:
            count = groups.get(path, 1)
            for attribute, value in _description(module, held, count, first, after).items():
                found[path, attribute] = value
    return found


def _description(
    module: nn.Module,
    held: dict[str, tuple[Expression, ...]],
    groups: int,
    first: list[int],
    after: list[int],
) -> dict[str, Any]:
    """Returns the numbers by which one module of torch describes its tensors.

    Args:
        module: the module.
        held: the axes of its tensors.
        groups: the number of its groups when it was typed.
        first: the sizes of all atoms at that time.
        after: the sizes that they shall have.
    """
    weight = held.get("weight")
    sizes = None
    if weight is not None:
        sizes = [size_of(axis, after) for axis in weight]
    if isinstance(module, Convolution) and weight is not None and sizes is not None:
        if groups > 1:
            groups = _groups_after(weight[0], groups, first, after)
        if module.transposed:
            return {"groups": groups, "in_channels": sizes[0], "out_channels": sizes[1] * groups}
        return {"groups": groups, "out_channels": sizes[0], "in_channels": sizes[1] * groups}
    if isinstance(module, nn.Linear) and sizes is not None:
        return {"out_features": sizes[0], "in_features": sizes[1]}
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and sizes is not None:
        return {"num_embeddings": sizes[0], "embedding_dim": sizes[1]}
    if isinstance(module, Norm):
        one = weight or held.get("running_mean")
        return {} if one is None else {"num_features": size_of(one[0], after)}
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and sizes is not None:
        return {"normalized_shape": tuple(sizes)}
    if isinstance(module, nn.GroupNorm) and weight is not None and sizes is not None:
        groups = _groups_after(weight[0], groups, first, after)
        return {"num_channels": sizes[0], "num_groups": groups}
    if isinstance(module, nn.PReLU) and sizes is not None:
        return {"num_parameters": sizes[0]}
    if isinstance(module, nn.MultiheadAttention) and "in_proj_weight" in held:
        width = size_of(held["in_proj_weight"][1], after)
        return {"embed_dim": width, "kdim": width, "vdim": width}
    # The transposed linear layer of Hugging Face's GPT-2.
    if type(module).__name__ == "Conv1D" and sizes is not None:
        return {"nx": sizes[0], "nf": sizes[1]}
    return {}


def _groups_after(axis: Expression, groups: int, before: list[int], after: list[int]) -> int:
    """Returns the number of groups of an axis: the size of the factors that lie outermost."""
    factors = axis.parts if isinstance(axis, ProductOf) else (axis,)
    size = 1
    changed = 1
    for factor in factors:
        if size == groups:
            break
        size *= size_of(factor, before)
        changed *= size_of(factor, after)
    return changed if size == groups else groups
