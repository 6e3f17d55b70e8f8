"""What an edit was asked to do, before it is resolved against the graph."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .activation import activation_function
from .errors import EditError
from .layer import Layer
from .remap import as_tensor

INITIALISATIONS = ("linear", "alloc", "zero")
Initial = str | Tensor  # the name of an initialisation, or the values themselves


@dataclass(frozen=True, eq=False)
class Newborns:
    """Nodes to add to one layer."""

    uids: Tensor
    activation: str
    owner: str | None
    bias: Initial | None  # None: zero and frozen


@dataclass(frozen=True, eq=False)
class Connection:
    """Relations to add; rows count the layer's present nodes first and the edit's newborn ones
    after them.
    """

    parents: Tensor  # [n] int32
    children: Tensor  # [n] int32
    weights: Initial
    distinct: bool  # the pairs are known to differ from each other


@dataclass(frozen=True, eq=False)
class Naming:
    """Owners or activations to set."""

    kind: str  # "owners" or "activations"
    rows: Tensor
    name: str | None


@dataclass(eq=False)
class Requests:
    """The operations of one edit, by layer or by transition; their order does not matter."""

    newborns: dict[int, list[Newborns]] = field(default_factory=lambda: defaultdict(list))
    removals: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # rows
    connections: dict[int, list[Connection]] = field(default_factory=lambda: defaultdict(list))
    cuts: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # positions
    freeze_relations: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    freeze_biases: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    unfreeze_relations: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    unfreeze_biases: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    namings: dict[int, list[Naming]] = field(default_factory=lambda: defaultdict(list))
    orphans: dict[int, bool] = field(default_factory=dict)  # layer -> fold the bias

    def rows(self, layer: Layer, number: int, uids: Tensor) -> Tensor:
        """Returns the rows of uids in a layer, newborn nodes counted after the present ones, -1
        where they are not.
        """
        rows, offset = layer.rows(uids), len(layer)
        for newborns in self.newborns.get(number, ()):
            if len(newborns.uids):
                place = uids.numpy() - newborns.uids.numpy()[0]
                inside = (place >= 0) & (place < len(newborns.uids))
                rows.numpy()[inside] = place[inside] + offset
            offset += len(newborns.uids)
        return rows

    def connected_uids(self, layers: Sequence[Layer]) -> tuple[Tensor, Tensor]:
        """Returns the uids of the parents and of the children to connect, transition by
        transition.
        """
        parents, children = ([torch.empty(0, dtype=torch.int64, device="cpu")] for _ in range(2))
        for t, asked in sorted(self.connections.items()):
            upper, lower = (
                torch.cat(
                    [layers[n].uid, *(newborns.uids for newborns in self.newborns.get(n, ()))]
                )
                for n in (t, t + 1)
            )
            parents += [upper[connection.parents.long()] for connection in asked]
            children += [lower[connection.children.long()] for connection in asked]
        return torch.cat(parents), torch.cat(children)

    def removed_uids(self, layers: Sequence[Layer]) -> dict[int, Tensor]:
        """Returns the ascending uids of the present nodes to remove, layer by layer."""
        rows = {number: torch.cat(asked).unique().long() for number, asked in self.removals.items()}
        return {
            number: layers[number].uid[at[at < len(layers[number])]] for number, at in rows.items()
        }


def checked_initial(initial: Initial, count: int, what: str) -> Initial:
    """Returns the initialisation, values flattened; raises EditError for an unknown name or a wrong
    count.
    """
    if isinstance(initial, str):
        if initial not in INITIALISATIONS:
            raise EditError(
                f"no initialisation is called {initial!r}; known are {', '.join(INITIALISATIONS)},"
                " or give a tensor"
            )
        return initial
    values = as_tensor(initial).detach().clone()
    if values.numel() not in (1, count):
        raise EditError(
            f"{count} new {what} need {count} values (or one for all), got {values.numel()}"
        )
    if not bool(torch.isfinite(values).all()):
        raise EditError(f"the values for new {what} must be finite")
    return values.reshape(-1).expand(count)


def draw(
    initial: Initial,
    gains: Tensor,
    example: Tensor,
    generator: torch.Generator | None,
    at: Tensor | None = None,
) -> Tensor:
    """Returns one value for each entry of `gains`, uniform in ±1/√gain (0 where the gain is 0), or
    the given values.

    With `at` it is one for each of these places in `gains`.
    """
    if isinstance(initial, Tensor):
        return initial.to(example)
    if initial == "zero" or len(gains) == 0:
        return example.new_zeros(len(gains))
    bound = gains.to(example).rsqrt_().nan_to_num_(posinf=0.0)
    bound = bound if at is None else bound.index_select(0, at)
    device = example.device if generator is None else generator.device
    numbers = torch.empty(bound.shape[0], dtype=example.dtype, device=device).uniform_(
        -1, 1, generator=generator
    )
    return numbers.to(example.device) * bound


@contextmanager
def rewound_on_error(
    generator: torch.Generator | None, device: torch.device
) -> Iterator[torch.Generator]:
    """Gives the generator to draw from, the device's own by default; a block that raises has drawn
    nothing.
    """
    if generator is None:
        cuda = device.type == "cuda"
        generator = (
            torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
        )
    state = generator.get_state()
    try:
        yield generator
    except BaseException:
        generator.set_state(state)
        raise


def checked_owner(owner: str | None) -> None:
    """Raises EditError for an owner that is no tag."""
    if owner is not None and not isinstance(owner, str):
        raise EditError(f"an owner is a string or None, got {owner!r}")


def checked_activation(name: str) -> None:
    """Raises EditError for an unknown activation."""
    try:
        activation_function(name)
    except ValueError as error:
        raise EditError(str(error)) from None
