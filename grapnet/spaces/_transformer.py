"""Layers of transformers: their heads, hidden units and stream, found from the axes of tensors.

No table of model families is needed. A layer is a block that writes the space which it reads. Of
its tensors, those that write the stream read either heads, which are factors of a product of heads
and width, or hidden units.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from grapnet.core._errors import EditError

from ._axes import Atom, Expression, ProductOf, SumOf, atoms_of
from ._discovery import Typed
from ._plan import stream_of
from ._space import Space

if TYPE_CHECKING:
    from ._adopted import Adopted


@dataclass(frozen=True, eq=False)
class Attention:
    """The heads of one attention, as spaces.

    Without groups, `heads` and `kv_groups` are the same space. With grouped queries, several heads
    of queries share one head of keys and values, and no single head can leave: the model's own code
    needs groups of one size. Then a group leaves with all of its queries (`kv_groups`), or one
    query leaves every group (`queries`).

    Attributes:
        name: the tensor that reads the heads, the projection behind the attention.
    """

    name: str
    _groups: Space | None
    _queries: Space | None
    _problem: str = ""

    @property
    def heads(self) -> Space:
        """The heads; raises EditError for grouped queries, where none can leave alone."""
        if self._groups is not None and self._queries is not None:
            count = len(self._groups) * len(self._queries)
            raise EditError(
                f"the {count} heads that {self.name} reads share {len(self._groups)} heads of keys"
                " and values, so that none can leave alone: take kv_groups, or queries for one of"
                " every group"
            )
        found = self._groups or self._queries
        if found is None:
            raise EditError(self._problem or f"the attention of {self.name} has one head")
        return found

    @property
    def kv_groups(self) -> Space:
        """The heads of keys and values, each with the queries that read it; raises EditError if
        there is one for all queries.
        """
        if self._groups is None:
            raise EditError(
                self._problem or f"the attention of {self.name} has one head of keys and values"
            )
        return self._groups

    @property
    def queries(self) -> Space:
        """The heads of queries in every group; raises EditError if every head has keys and values
        of its own.
        """
        if self._queries is None:
            raise EditError(
                self._problem or f"every head of {self.name} has keys and values of its own"
            )
        return self._queries

    @property
    def spaces(self) -> tuple[Space, ...]:
        """The spaces of heads that there are: groups, then queries."""
        return tuple(space for space in (self._groups, self._queries) if space is not None)


class TransformerLayer:
    """A layer of an adopted transformer.

    It stays valid when other layers come and leave, and raises EditError once its block has left.

    Attributes:
        block: the module.
    """

    def __init__(self, net: "Adopted", block: nn.Module) -> None:
        self._net = net
        self.block = block

    @property
    def path(self) -> str:
        """The path of the block in the model."""
        path = self._find()
        if path is None:
            raise EditError(f"this {type(self.block).__name__} has left the model")
        return path

    def _find(self) -> str | None:
        for path, module in self._net.model.named_modules():
            if module is self.block:
                return path
        return None

    @property
    def container(self) -> str:
        """The path of the list that has the block: `edit.remove(layer.container, layer.index)`."""
        return self.path.rpartition(".")[0]

    @property
    def index(self) -> int:
        """The number of the block in its list."""
        container = self._net.model.get_submodule(self.container)
        blocks = list(container.children())
        return next(number for number, block in enumerate(blocks) if block is self.block)

    @property
    def stream(self) -> Space:
        """The space that the layer reads and writes; raises EditError if there are several."""
        atoms = stream_of(self._net._typed, self.path)
        found = [space for space in self._net.spaces if space._atom in atoms]
        if len(found) != 1:
            names = ", ".join(space.name for space in found)
            raise EditError(f"the stream of {self.path} is no single space, but {names or 'none'}")
        return found[0]

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attentions, in order: one, or two in a decoder that also reads an encoder."""
        typed = self._net._typed
        found = []
        for name, axis in self._read_axes():
            if not isinstance(axis, Atom) or _is_single_head(typed, axis, self._stream_atoms()):
                found.append(self._attention(name, axis))
        return tuple(found)

    @property
    def ffns(self) -> tuple[Space, ...]:
        """The spaces of hidden units, in order."""
        typed = self._net._typed
        found: dict[Space, None] = {}
        for _, axis in self._read_axes():
            if isinstance(axis, Atom) and not _is_single_head(typed, axis, self._stream_atoms()):
                space = self._space(axis)
                if space is not None:
                    found[space] = None
        return tuple(found)

    @property
    def heads(self) -> Space:
        """The heads of the only attention; see `Attention.heads`."""
        return self._only_attention().heads

    @property
    def kv_groups(self) -> Space:
        """The groups of the only attention; see `Attention.kv_groups`."""
        return self._only_attention().kv_groups

    @property
    def queries(self) -> Space:
        """The queries in every group of the only attention; see `Attention.queries`."""
        return self._only_attention().queries

    @property
    def ffn(self) -> Space:
        """The hidden units of the only feed-forward network."""
        found = self.ffns
        if len(found) != 1:
            raise EditError(f"{self.path} has {len(found)} spaces of hidden units; see `ffns`")
        return found[0]

    @property
    def spaces(self) -> tuple[Space, ...]:
        """All spaces of heads and of hidden units."""
        found: dict[Space, None] = {}
        for attention in self.attentions:
            found |= dict.fromkeys(attention.spaces)
        return (*found, *self.ffns)

    def _only_attention(self) -> Attention:
        found = self.attentions
        if len(found) != 1:
            raise EditError(f"{self.path} has {len(found)} attentions; see `attentions`")
        return found[0]

    def _stream_atoms(self) -> set[int]:
        return stream_of(self._net._typed, self.path)

    def _read_axes(self) -> Iterator[tuple[str, Expression]]:
        """Yields the tensors of the block that write the stream, with the axis that each reads."""
        typed = self._net._typed
        stream = self._stream_atoms()
        prefix = f"{self.path}."
        writers = {name for name, _ in _places(typed.writers, stream)}
        for name, axes in typed.axes.items():
            if name not in writers or not name.startswith(prefix):
                continue
            for dim, axis in enumerate(axes):
                atoms = set(atoms_of(axis))
                if not atoms & stream and (name, dim) in _places(typed.readers, atoms):
                    yield name, axis

    def _attention(self, name: str, axis: Expression) -> Attention:
        """Returns the attention whose heads lie on an axis, as groups × queries × width."""
        if isinstance(axis, Atom):
            return Attention(name, None, None)
        problem = ""
        outer: list[int] = []
        width: set[int] = set()
        if isinstance(axis, ProductOf):
            *factors, last = axis.parts
            width = set(atoms_of(last))
            outer = [factor.number for factor in factors if isinstance(factor, Atom)]
            if len(outer) < len(factors) or len(outer) > 2:
                problem = f"the heads that {name} reads are no spaces of their own"
        else:
            parts = [space for space in self._net.spaces if space._atom in atoms_of(axis)]
            pins = [pin for space in parts for pin in space.pins]
            problem = f"the heads that {name} reads do not have one size: {', '.join(pins)}"
        if problem:
            return Attention(name, None, None, problem)
        # Keys and values have the groups alone; queries have more.
        shared = set(outer)
        typed = self._net._typed
        readers = {name for name, _ in _places(typed.readers, set(typed.readers))}
        for writer, dim in _places(typed.writers, width):
            if writer not in readers:
                # The frequencies of rotary embeddings have the width of a head, too.
                continue
            for atom in width:
                for factors_of_one in _factors(typed.axes[writer][dim], atom):
                    shared &= factors_of_one
        groups = [atom for atom in outer if atom in shared]
        queries = [atom for atom in outer if atom not in shared]
        if len(groups) > 1 or len(queries) > 1:
            problem = f"the heads that {name} reads are no spaces of their own"
            return Attention(name, None, None, problem)
        return Attention(name, self._first(groups), self._first(queries))

    def _first(self, atoms: list[int]) -> Space | None:
        return self._space(Atom(atoms[0])) if atoms else None

    def _space(self, atom: Atom) -> Space | None:
        for space in self._net.spaces:
            if space._atom == atom.number:
                return space
        return None

    def __repr__(self) -> str:
        if self._find() is None:
            return "TransformerLayer(has left the model)"
        sizes = [f"{space.name}: {len(space)}" for space in self.spaces]
        return f"TransformerLayer({self.path!r}, {', '.join(sizes)})"


def transformer_layers(net: "Adopted") -> list[TransformerLayer]:
    """Returns the layers of an adopted transformer, in the order of its modules.

    A list of blocks has layers if each of them writes the space that it reads, and has heads or
    hidden units; of lists inside of one another, the outermost has them.
    """
    found: list[TransformerLayer] = []
    inside: list[str] = []
    for path, module in net.model.named_modules():
        prefix = f"{path}." if path else ""
        if not isinstance(module, nn.Sequential | nn.ModuleList) or len(module) == 0:
            continue
        if any(path.startswith(other) for other in inside):
            continue
        if not all(stream_of(net._typed, f"{prefix}{key}") for key in module._modules):
            continue
        layers = [TransformerLayer(net, block) for block in module]
        if all(layer.attentions or layer.ffns for layer in layers):
            found += layers
            inside.append(prefix)
    return found


def _places(roles: dict[int, tuple[tuple[str, int], ...]], atoms: set[int]) -> set[tuple[str, int]]:
    """Returns the tensors and dimensions that have a role for some atoms."""
    return {place for atom in atoms for place in roles.get(atom, ())}


def _factors(axis: Expression, atom: int) -> Iterator[set[int]]:
    """Yields, for every place of an atom in an axis, the atoms that multiply it from outside."""
    if axis == Atom(atom):
        yield set()
    elif isinstance(axis, SumOf):
        for part in axis.parts:
            yield from _factors(part, atom)
    elif isinstance(axis, ProductOf):
        for number, part in enumerate(axis.parts):
            outside = {one.number for one in axis.parts[:number] if isinstance(one, Atom)}
            for inner in _factors(part, atom):
                yield outside | inner


def _is_single_head(typed: Typed, read: Atom, stream: set[int]) -> bool:
    """Returns whether an atom that a tensor reads is the width of values of a single head.

    Then a module beside the one that writes it makes queries and keys of the stream, whose own atom
    comes twice and is read by no tensor, as queries and keys meet one another alone.
    """
    homes = {_home(name) for name, _ in typed.writers.get(read.number, ())}
    reads_stream = {name for name, _ in _places(typed.readers, stream)}
    for atom, places in typed.writers.items():
        if atom == read.number or typed.readers.get(atom):
            continue
        count = 0
        for name, dim in places:
            if _home(name) in homes and name in reads_stream:
                count += sum(1 for _ in _factors(typed.axes[name][dim], atom))
        if count > 1:
            return True
    return False


def _home(tensor: str) -> str:
    """Returns the path of the module around the module that has a tensor."""
    module = tensor.rpartition(".")[0]
    return module.rpartition(".")[0]
