"""The config of a Hugging Face model after its layers were edited.

A config is met by its shape alone, so that no other library is imported. Which of its numbers must
change is found by trying: a model without contents is made from a changed config and typed, and
the change is right if all axes are those that the edited model has.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import nn

from grapnet.core._errors import EditError
from grapnet.spaces import Adopted
from grapnet.spaces._axes import size_of
from grapnet.spaces._discovery import discover
from grapnet.spaces._gates import spans
from grapnet.spaces._signature import Signature, signature_of

# A number in a config: names of attributes, and the position in a list.
Path = tuple[str | int, ...]
Shapes = dict[str, tuple[int, ...]]

# Numbers that may change at once, and models that are made at most.
MOST_NUMBERS = 5
MOST_TRIES = 512
_SHOWN = 3
# Sizes that many families look up in configs that may not have them, and derive otherwise.
_DERIVED = ("head_dim",)


def sync_config(net: Adopted) -> None:
    """Sets the numbers in the Hugging Face config of an adopted model to the sizes that its layers
    have, so that `save_pretrained` and `from_pretrained` work.

    A model without a config is left alone.

    Raises:
        EditError: no config describes the model, because layers differ or because the family has
            no number for a size; the message names them, and nothing changes.
    """
    config = getattr(net.model, "config", None)
    if not hasattr(config, "to_dict"):
        return
    trials = _Trials(net)
    if trials.is_right({}):
        return
    proposed = trials.proposals(_numbers(config))
    # One that makes something wrong may be right together with others.
    chosen = trials.search([change for change, effect in proposed.items() if effect != "harmful"])
    if chosen is None:
        # Sizes that a family derives from others until they are set, as GPT-2's n_inner.
        unset = trials.proposals_for_unset(_numbers(config))
        chosen = trials.search([*proposed, *unset])
    if chosen is None:
        raise EditError(trials.explanation(proposed))
    before = {path: _get(config, path) for path in chosen}
    for each in _configs(net.model):
        for path, value in chosen.items():
            if _get(each, path) == before[path]:
                _set(each, path, value)


class _Trials:
    """Models without contents, made from changed configs."""

    def __init__(self, net: Adopted) -> None:
        self._net = net
        self._config: Any = net.model.config
        first, atoms = signature_of(net._typed)
        sizes = {atoms[space._atom]: len(space) for space in net.spaces}
        self._resized = first.resized(sizes)
        # The same with atoms of size 1, which broadcast, left out of products.
        self._wanted, _ = signature_of(net._typed, net._atom_sizes())
        self._shapes = {name: tuple(self._wanted.shape(name)) for name in first.axes}
        self._tries = 0
        # What the config describes as it is.
        described, self._present = self._typed({})
        if described is None or described.axes != first.axes:
            where = ""
            if described is not None:
                where = f" at {first.difference(described)}"
            raise EditError(
                f"a model made from its own {type(self._config).__name__} differs{where} from this"
                " one; save it with gn.save or torch.save"
            )
        self._described: Signature = described

    def is_right(self, changes: Mapping[Path, int]) -> bool:
        """Returns whether a changed config describes the model, and can be saved."""
        if not self._is_valid(changes):
            return False
        shapes = self._made(changes)[1]
        if any(shapes.get(name) != shape for name, shape in self._shapes.items()):
            return False
        described, _ = self._typed(changes)
        return described is not None and not self._wanted.difference(described)

    def proposals(self, numbers: Mapping[Path, int | None]) -> dict[tuple[Path, int], str]:
        """Returns numbers of the config that are the size of something that has changed, with the
        size that it has, and the effect of the change alone.
        """
        changed: dict[int, dict[int, None]] = {}
        for before, after, _ in self._sizes():
            if before != after:
                changed.setdefault(before, {})[after] = None
        found = {}
        for path, value in numbers.items():
            for size in changed.get(value or 0, ()):
                effect = self._effect({path: size})
                if effect != "other":
                    found[path, size] = effect
        return found

    def proposals_for_unset(self, numbers: Mapping[Path, int | None]) -> list[tuple[Path, int]]:
        """Returns numbers that are not set in the config, with sizes that make shapes right."""
        sizes = {}
        for name, shape in self._shapes.items():
            for before, after in zip(self._present[name], shape, strict=True):
                if before != after:
                    sizes[after] = None
        found = []
        for path, value in numbers.items():
            for size in sizes if value is None else ():
                if self._effect({path: size}) == "useful":
                    found.append((path, size))
        # A derived size may be right at present, and must be set to stay so.
        parts = dict.fromkeys(size for _, size, _ in self._sizes() if size > 1)
        for name in _DERIVED:
            for size in parts if getattr(self._config, name, None) is None else ():
                if self._effect({(name,): size}) not in ("harmful", "other"):
                    found.append(((name,), size))
        return found

    def search(self, proposed: list[tuple[Path, int]]) -> dict[Path, int] | None:
        """Returns the fewest changes of numbers that describe the model; None if there are none."""
        self._tries = 0
        for count in range(1, MOST_NUMBERS + 1):
            for chosen in combinations(proposed, count):
                changes = dict(chosen)
                if len(changes) < count:
                    continue
                self._tries += 1
                if self._tries > MOST_TRIES:
                    return None
                if self.is_right(changes):
                    return changes
        return None

    def explanation(self, proposed: Iterable[tuple[Path, int]]) -> str:
        """Returns why no config describes the model: layers differ, or have no number."""
        kind = type(self._config).__name__
        lines = []
        for path in dict.fromkeys(path for path, _ in proposed):
            value = _get(self._config, path)
            layers: dict[int, dict[str, None]] = {}
            for before, after, name in self._sizes():
                if before == value:
                    layers.setdefault(after, {})[name.rpartition(".")[0] or name] = None
            if len(layers) > 1:
                parts = [f"{size} in {_listed(found)}" for size, found in layers.items()]
                lines.append(f"  {'.'.join(map(str, path))}: {'; '.join(parts)}")
        if not lines:
            wrong = []
            for name, shape in self._shapes.items():
                if self._present[name] != shape:
                    wrong.append(f"{name} {list(shape)}")
            lines.append(f"  it has no numbers for {_listed(wrong)}")
        return (
            f"no {kind} describes this model, so save_pretrained would write a model that cannot be"
            " loaded:\n"
            + "\n".join(lines)
            + "\nEdit them alike, or save the model with gn.save or torch.save"
        )

    def _sizes(self) -> Iterator[tuple[int, int, str]]:
        """Yields the size of every part of every axis as the config has it and as the model has it,
        with the tensor.
        """
        for name, axes in self._resized.axes.items():
            for axis in axes:
                for _, part in spans(axis):
                    before = size_of(part, self._described.sizes)
                    yield before, size_of(part, self._resized.sizes), name

    def _effect(self, changes: Mapping[Path, int]) -> str:
        """Returns "useful" for a change that makes shapes right, "harmful" for one that makes right
        ones wrong, "other" for one that brings or removes tensors, "refused" for one that no model
        can be made with, and else "none".
        """
        made, shapes = self._made(changes)
        if made is None:
            # Some families refuse a number without others, as heads that do not divide the stream.
            return "refused"
        if shapes.keys() != self._present.keys():
            return "other"
        effect = "none"
        for name, shape in self._shapes.items():
            pairs = zip(self._present[name], shapes[name], shape, strict=True)
            for before, after, wanted in pairs:
                if before == wanted != after:
                    return "harmful"
                if before != wanted == after:
                    effect = "useful"
        return effect

    def _is_valid(self, changes: Mapping[Path, int]) -> bool:
        """Returns whether the config's own checks, which `save_pretrained` runs, accept changes."""
        config = copy.deepcopy(self._config)
        try:
            for path, value in changes.items():
                _set(config, path, value)
            if hasattr(config, "validate"):
                config.validate()
        except Exception:
            return False
        return True

    def _made(self, changes: Mapping[Path, int]) -> tuple[nn.Module | None, Shapes]:
        """Returns the model of a changed config, without contents, and the shapes of its tensors;
        None if it cannot be made.
        """
        config = copy.deepcopy(self._config)
        make: Any = type(self._net.model)
        try:
            for path, value in changes.items():
                _set(config, path, value)
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                model = make(config)
        except Exception:
            return None, {}
        tensors = (*model.named_parameters(), *model.named_buffers())
        return model, {name: tuple(tensor.shape) for name, tensor in tensors}

    def _typed(self, changes: Mapping[Path, int]) -> tuple[Signature | None, Shapes]:
        """Returns the axes of the model of a changed config, as far as the adopted one has them."""
        model, shapes = self._made(changes)
        if model is None:
            return None, shapes
        try:
            typed = discover(model, self._net._gates.examples)
        except Exception:
            return None, shapes
        known = {name: typed.axes[name] for name in self._shapes if name in typed.axes}
        signature, _ = signature_of(replace(typed, axes=known))
        return signature, shapes


def _numbers(config: Any, prefix: Path = ()) -> dict[Path, int | None]:
    """Returns the numbers of a config and of those inside of it, and what is not set."""
    found: dict[Path, int | None] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name.endswith(("_id", "_ids")):
            continue
        path = (*prefix, name)
        if value is None or type(value) is int:
            found[path] = value
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                if type(item) is int:
                    found[*path, place] = item
        elif hasattr(value, "to_dict"):
            found |= _numbers(value, path)
    return found


def _configs(model: nn.Module) -> Iterable[Any]:
    """Returns the configs of a model and of its parts, each once."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            found[id(config)] = config
    return found.values()


def _get(config: Any, path: Path) -> Any:
    """Returns a number of a config; None if there is none."""
    for step in path:
        if isinstance(step, str):
            config = getattr(config, step, None)
        else:
            config = config[step] if config and step < len(config) else None
    return config


def _set(config: Any, path: Path, value: int) -> None:
    *owner, last = path
    if isinstance(last, int):
        numbers = list(_get(config, tuple(owner)))
        numbers[last] = value
        *owner, last = owner
        setattr(_get(config, tuple(owner)), str(last), numbers)
    else:
        setattr(_get(config, tuple(owner)), last, value)


def _listed(names: Iterable[str]) -> str:
    """Returns the first few names."""
    names = list(names)
    rest = len(names) - _SHOWN
    text = ", ".join(names[:_SHOWN])
    return text if rest <= 0 else f"{text} and {rest} more"
