"""Labels: one name a node, stored as codes into a small table."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .remap import IndexMap, flatnonzero


@dataclass(frozen=True, eq=False)
class Labels:
    """A column of names (owners, activations): `names[codes[row]]`; never changed in place."""

    codes: Tensor  # [n] int32, on the CPU
    names: tuple[str | None, ...]

    @classmethod
    def uniform(cls, name: str | None, size: int) -> "Labels":
        """Returns `size` rows of one name."""
        return cls(torch.zeros(size, dtype=torch.int32, device="cpu"), (name,))

    @classmethod
    def join(cls, columns: "list[Labels]") -> "Labels":
        """Returns the columns one below the other."""
        names = tuple(dict.fromkeys(name for column in columns for name in column.names))
        codes = [column._recoded(names) for column in columns]
        return cls(
            torch.cat(codes) if codes else torch.empty(0, dtype=torch.int32, device="cpu"), names
        )

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, row: int) -> str | None:
        return self.names[self.codes[row]]

    def __iter__(self) -> Iterator[str | None]:
        return (self.names[code] for code in self.codes.tolist())

    def select(self, rows: Tensor) -> "Labels":
        """Returns the labels of `rows`, in that order."""
        return Labels(self.codes[rows.long()], self.names)

    def where(self, name: str | None) -> Tensor:
        """Returns the rows that carry `name`."""
        if name not in self.names:
            return torch.empty(0, dtype=torch.int32, device="cpu")
        return flatnonzero(self.codes == self.names.index(name))

    def kinds(self) -> list[tuple[str | None, Tensor]]:
        """Returns every name in use with its rows."""
        return [(name, rows) for name in self.names if len(rows := self.where(name))]

    def differs(self, other: "Labels", rows: Tensor) -> Tensor:
        """Says for every row whether another column of the same length names it differently."""
        names = tuple(dict.fromkeys(self.names + other.names))
        return self._recoded(names)[rows.long()] != other._recoded(names)[rows.long()]

    def carry(self, index: IndexMap, born: "Labels") -> "Labels":
        """Returns the column after a commit, `born` at the inserted rows."""
        names = tuple(dict.fromkeys(self.names + born.names))
        return Labels(index.carry(self._recoded(names), born._recoded(names)), names)

    def replaced(self, rows: Tensor, others: "Labels") -> "Labels":
        """Returns the column with `others` at `rows`."""
        names = tuple(dict.fromkeys(self.names + others.names))
        codes = self._recoded(names).clone()
        codes[rows.long()] = others._recoded(names)
        return Labels(codes, names)

    def compact(self) -> "Labels":
        """Returns the same column with unused names left out of its table."""
        used = torch.bincount(self.codes, minlength=len(self.names)).tolist()
        names = tuple(name for name, count in zip(self.names, used, strict=True) if count)
        return Labels(self._recoded(names), names)

    def _recoded(self, names: tuple[str | None, ...]) -> Tensor:
        if names[: len(self.names)] == self.names:
            return self.codes
        table = torch.tensor(
            [names.index(n) if n in names else 0 for n in self.names],
            dtype=torch.int32,
            device="cpu",
        )
        return table[self.codes.long()]
