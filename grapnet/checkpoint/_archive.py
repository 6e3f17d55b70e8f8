"""Archive: a checkpoint in memory, and the functions that save, open, load and restore one."""

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grapnet._network import GrapNet
from grapnet._torch import uncompiled
from grapnet.core._errors import CheckpointError
from grapnet.core._graph import Graph
from grapnet.spaces import Adopted
from grapnet.spaces._adopted import find_adopted

from . import _file
from ._adopted import describe_adopted, put_adopted
from ._codec import Fields, decode, entry
from ._codeless import rebuild_codeless
from ._extras import (
    Extra,
    Following,
    Moved,
    Target,
    follow,
    require_fit,
    restore_all,
    restore_slots,
    where,
)
from ._journal import Kept
from ._model import (
    describe_model,
    find_nets,
    put_into,
    read_places,
    rebuild_part,
    refuse_additions,
)
from ._net import describe_net, rebuild_net, warn_of_unmet_choices


@dataclass(frozen=True)
class Saved:
    """The result of `Archive.save`.

    Attributes:
        nbytes: the size of the file.
        extras: "followed", "kept" or "dropped" for every extra.
    """

    nbytes: int
    extras: dict[str, str]


class Archive:
    """A checkpoint in memory: nets to edit, and everything else in the file.

    `gn.open(path)` returns one. Its nets are ordinary nets. Optimizers, averages and other extras
    follow their edits, and `save` writes all of it:

        file = gn.open("net.safetensors")
        with file.net.edit(reason="prune") as edit:
            edit.cut(file.net.select().outgoing().smallest(fraction=0.5))
        file.save("pruned.safetensors")

    Attributes:
        path: the file it was read from, or None.
    """

    path: Path | None

    def __init__(
        self,
        document: dict[str, Any],
        tensors: dict[str, Tensor],
        path: Path | None = None,
    ) -> None:
        self.path = path
        self._document = document
        self._tensors = tensors
        self._fields = Fields(tensors)
        self._places = [names[0] for names in read_places(document)]
        self._extras: dict[str, Extra] = {}
        for name, part in entry(document, "extras", dict, "").items():
            self._extras[name] = Extra.read(name, part, self._fields)
        self._read_graphs: dict[str, Graph] | None = None
        self._moved: dict[str, Moved] = {}
        self._following: dict[tuple[str, str], Following] = {}  # by extra and place

    @classmethod
    def of(
        cls,
        model: nn.Module,
        /,
        *,
        undo: bool = False,
        history: Kept = "outline",
        **extras: Any,
    ) -> "Archive":
        """Packs a net, or a model with nets inside, and any extras; see `gn.save`."""
        document, tensors = _pack(model, extras, undo=undo, history=history)
        # copies, so that training on does not change the archive
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        return cls(document, tensors)

    @property
    def is_model(self) -> bool:
        """True for a model, with nets inside or adopted; False for a single net."""
        return self.is_adopted or "nets" in self._document

    @property
    def is_adopted(self) -> bool:
        """True for an adopted model."""
        return "adopted" in self._document

    @property
    def nets(self) -> dict[str, GrapNet]:
        """The nets by their names in the model; "" for a single net.

        Raises:
            CheckpointError: the file holds an adopted model, which is restored into a model.
        """
        self._require_nets()
        return {place: net for place, net in self._graphs.items() if isinstance(net, GrapNet)}

    @property
    def adopted(self) -> Adopted:
        """The graph of an adopted model, over its tensors alone.

        The file has no code, so the graph cannot run, its spaces keep their sizes, and `flops` of
        its `count()` are 0. Everything else works: `spaces`, `transitions`, `history`, cutting and
        freezing relations, owners, undo and redo, which `save` writes.

        Raises:
            CheckpointError: the file holds nets.
        """
        if not self.is_adopted:
            raise CheckpointError("nets: this file holds nets, not an adopted model; use `nets`")
        (net,) = self._graphs.values()
        assert isinstance(net, Adopted)
        return net

    @property
    def _graphs(self) -> dict[str, Graph]:
        """The nets, or the adopted model, by place; read when first asked for."""
        if self._read_graphs is None:
            graphs = self._rebuilt()
            for place, graph in graphs.items():
                if isinstance(graph, GrapNet):
                    warn_of_unmet_choices(graph)
                self._moved[place] = Moved(graph)
                for name, extra in self._extras.items():
                    self._following[name, place] = follow(name, extra, graph, place)
            self._read_graphs = graphs
        return self._read_graphs

    @property
    def net(self) -> GrapNet:
        """The only net.

        Raises:
            CheckpointError: there are several; use `nets`.
        """
        if len(self._places) > 1:
            raise CheckpointError(
                f"nets: this file holds {len(self._places)} nets, at {', '.join(self._places)};"
                " choose one: file.nets[place]"
            )
        return self.nets[self._places[0]]

    @property
    def extras(self) -> dict[str, Any]:
        """Copies of the extras: plain data, and the states of objects."""
        return {name: copy.deepcopy(extra.content) for name, extra in self._extras.items()}

    @property
    def kinds(self) -> dict[str, str]:
        """The class of every extra; "data" for plain data."""
        kinds = {}
        for name, extra in self._extras.items():
            kinds[name] = "data" if extra.kind == "data" else extra.made_by
        return kinds

    @property
    def rest(self) -> dict[str, Any]:
        """The state dict of the model without its nets; empty for a single net.

        That of an adopted model has all of its buffers, also those that state dicts omit.
        """
        if not self.is_model:
            return {}
        state = entry(self._document, "state", dict, "")
        return decode(state.get("tree"), "state", self._fields)

    @property
    def undo(self) -> bool:
        """True if it contains what undo needs."""
        return any(entry(part, "undo", bool, "journal.") for part in self._journals())

    @property
    def history(self) -> Kept:
        """The kept part of every commit: "outline" or "full"."""
        found = {entry(part, "history", str, "journal.") for part in self._journals()}
        return "full" if "full" in found else "outline"

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes."""
        if self.path is not None:
            return self.path.stat().st_size
        return len(_file.to_bytes(self._document, self._tensors))

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of its tensors by kind: values, wiring, journal, model and extras."""
        kinds: list[str] = ["values", "wiring", "journal", "model", "extras"]
        sizes = dict.fromkeys(kinds, 0)
        for name, tensor in self._tensors.items():
            sizes[_part_of(name)] += tensor.nbytes
        return sizes

    @torch.inference_mode(False)
    def model(self, into: nn.Module) -> nn.Module:
        """Puts copies of the current nets and the state of the saved model into a model like it,
        and returns that; see `gn.restore`.

        Raises:
            CheckpointError: something does not fit; nothing was changed.
        """
        document, tensors, _ = self._content(None, None, list(self._extras), [])
        # copies, so that training the model does not change the archive
        tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        Archive(document, tensors)._put(into, {}, {})
        return into

    @torch.inference_mode(False)
    def load(self, **objects: Any) -> dict[str, Any]:
        """Loads the saved states, moved by the edits since, into objects, all or none; see
        `gn.restore`.

        Args:
            objects: under the names they were saved by.

        Returns:
            The extras that were saved as plain data.

        Raises:
            CheckpointError: a name was not saved, a state cannot follow an edit, or an object is of
                another class, has Parameters of other shapes or refuses its state; nothing changes.
        """
        self._require_saved(objects)
        extras = {}
        for name in objects:
            extra, _ = self._after_edits(name, undo=self.undo)
            # a copy, so that training on does not change the archive
            extras[name] = copy.deepcopy(extra)
        self._put(None, objects, extras)
        return copy.deepcopy(self._data())

    def save(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        undo: bool | None = None,
        history: Kept | None = None,
        drop: Iterable[str] = (),
        keep: Iterable[str] = (),
        replace: bool = True,
    ) -> Saved:
        """Writes the current nets, and every extra after their edits, to a file.

        Args:
            path: the file; the one it was read from by default.
            undo: whether to keep what undo needs; as before by default.
            history: how much of every commit to keep; as before by default.
            drop: extras to omit.
            keep: extras to keep unchanged, even if they do not fit the edited nets.
            replace: whether to replace a file that exists.

        Raises:
            CheckpointError: an extra cannot follow an edit; nothing was written.
            FileExistsError: the file exists, and `replace` is False.
            OSError: the file cannot be written; an earlier one is as it was.
        """
        path = self.path if path is None else Path(path)
        if path is None:
            raise ValueError("this archive was not read from a file; pass a path")
        document, tensors, extras = self._content(undo, history, list(drop), list(keep))
        _file.write(path, document, tensors, replace=replace)
        return Saved(path.stat().st_size, extras)

    def preview(
        self,
        *,
        undo: bool | None = None,
        history: Kept | None = None,
        drop: Iterable[str] = (),
        keep: Iterable[str] = (),
    ) -> Saved:
        """Returns what `save` would return, and raises as it does; writes nothing."""
        document, tensors, extras = self._content(undo, history, list(drop), list(keep))
        return Saved(len(_file.to_bytes(document, tensors)), extras)

    def to_bytes(self) -> bytes:
        """Returns the bytes of the file that `save` writes."""
        document, tensors, _ = self._content(None, None, [], [])
        return _file.to_bytes(document, tensors)

    def _require_nets(self) -> None:
        """Raises CheckpointError for the file of an adopted model."""
        if self.is_adopted:
            raise CheckpointError(
                "adopted: this file holds a whole model, which has no nets. Create the model as it"
                " was before it was adopted, then gn.restore(path, into=model)"
            )

    def _data(self) -> dict[str, Any]:
        return {n: extra.content for n, extra in self._extras.items() if extra.kind == "data"}

    def _content(
        self, undo: bool | None, history: Kept | None, drop: list[str], keep: list[str]
    ) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
        """Returns the document and the tensors after the edits, and what became of the extras."""
        self._require_saved([*drop, *keep])
        undo = self.undo if undo is None else undo
        history = self.history if history is None else history
        as_before = (undo, history) == (self.undo, self.history)
        if self._read_graphs is None and as_before:
            # no net was read
            document = dict(self._document)
            tensors = {n: t for n, t in self._tensors.items() if _part_of(n) != "extras"}
        elif self.is_adopted:
            tensors = {}
            with torch.no_grad():
                part = describe_adopted(self.adopted, tensors, undo=undo, history=history)
            document = self._document | part
        else:
            tensors = {n: t for n, t in self._tensors.items() if _part_of(n) == "model"}
            document = self._document | self._described(tensors, undo=undo, history=history)
        parts = {}
        outcomes = dict.fromkeys(drop, "dropped")
        for name, extra in self._extras.items():
            if name in drop:
                continue
            outcomes[name] = "kept"
            if name not in keep:
                extra, outcomes[name] = self._after_edits(name, undo=undo)
            if not undo:
                extra = replace(extra, slots={})
            parts[name] = extra.describe(name, tensors)
        document["extras"] = parts
        return document, tensors, outcomes

    def _after_edits(self, name: str, *, undo: bool) -> tuple[Extra, str]:
        """Returns an extra after the edits of the nets, and whether it "followed" or was "kept"."""
        extra = replace(self._extras[name])
        outcome = "kept"
        for (owner, place), following in self._following.items():
            if owner == name:
                following.update(extra, self._moved[place], undo=undo)
                if following.how == "followed":
                    outcome = "followed"
        return extra, outcome

    def _require_saved(self, names: Iterable[str]) -> None:
        """Raises CheckpointError for a name under which nothing was saved."""
        for name in names:
            if name not in self._extras:
                saved = ", ".join(sorted(self._extras)) or "none"
                raise CheckpointError(
                    f"{where(name)}: not in this checkpoint, which holds {saved[:200]}"
                )

    def _described(
        self, tensors: dict[str, Tensor], *, undo: bool, history: Kept
    ) -> dict[str, Any]:
        """Adds the arrays of all nets to `tensors` and returns their parts of the document."""
        parts = []
        with torch.no_grad():
            for n, place in enumerate(self._places):
                own: dict[str, Tensor] = {}
                part = describe_net(self.nets[place], own, undo=undo, history=history)
                if not self.is_model:
                    tensors.update(own)
                    return part
                tensors.update({f"nets.{n}.{name}": tensor for name, tensor in own.items()})
                parts.append(self._document["nets"][n] | part)
        return {"nets": parts}

    def _rebuilt(self) -> dict[str, Graph]:
        """Returns new nets, or a new graph of an adopted model, from the file, by place."""
        with torch.inference_mode(False):
            if self.is_adopted:
                return {"": rebuild_codeless(self._document, self._fields)}
            if not self.is_model:
                return {"": rebuild_net(self._document, self._fields)}
            nets: dict[str, Graph] = {}
            for n, place in enumerate(self._places):
                nets[place] = rebuild_part(self._document, n, self._fields)
            return nets

    def _put(
        self, into: nn.Module | None, objects: Mapping[str, Any], extras: Mapping[str, Extra]
    ) -> None:
        """Loads the nets into a model and the states in `extras` into objects, all or none."""

        def targets() -> list[Target]:
            found = []
            for name, target in objects.items():
                require_fit(name, target, extras[name])
                found.append(Target(where(name), target, extras[name].content))
            return found

        if into is None:
            restore_all(targets())
        elif self.is_adopted:
            put_adopted(into, self._document, self._fields, targets)
        else:
            self._require_model(into, objects)
            put_into(into, self._document, self._fields, targets())
        for name, target in objects.items():
            if isinstance(target, Optimizer):
                restore_slots(target, extras[name], self._places)

    def _require_model(self, into: nn.Module, objects: Mapping[str, Any]) -> None:
        """Raises if `into` does not fit the file, or an object would hold Parameters that are
        replaced.
        """
        if not self.is_model:
            raise CheckpointError(
                "graph: this file holds one net, not a model; gn.load(path) returns it"
            )
        if isinstance(into, GrapNet):
            raise CheckpointError(
                "nets: this file holds a model with nets inside; pass such a model as into="
            )
        for name, target in objects.items():
            held = getattr(target, "optimizer", None)
            if isinstance(target, Optimizer) or isinstance(held, Optimizer):
                raise CheckpointError(
                    f"{where(name)}: its Parameters would be replaced by those of the nets. First"
                    " gn.restore(path, into=model), then create the optimizer with"
                    f" model.parameters(), then gn.restore(path, {name}={name})"
                )

    def _journals(self) -> list[dict[str, Any]]:
        parts = self._document.get("nets", [self._document])
        return [entry(part, "journal", dict, "") for part in parts]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    /,
    *,
    undo: bool = False,
    history: Kept = "outline",
    **extras: Any,
) -> None:
    """Writes a net, a model with nets inside or an adopted model, and any extras, to one file,
    atomically.

    The file holds the graph, journal, backends and `requires_grad` flags of every net; of a model
    also the names of its nets, what `gn.ungraft` needs, and the state dict of everything else. Of
    an adopted model it holds every Parameter and buffer, the axes of each, the spaces with their
    nodes, the journal, and the numbers of modules that edits have changed. A killed save leaves the
    earlier file unchanged, and a folder `.grapnet.….partial` that the next save removes.

    Args:
        path: the file; its folder must exist. A link is followed.
        model: a GrapNet, compiled or not, which `gn.load` returns; or any module with nets inside,
            or an adopted model or its graph, for `gn.restore(path, into=model)`.
        undo: also keep the cut weights that undo and redo need, with their optimizer state. By
            default the file holds nothing that was cut.
        history: "outline" keeps version, time, author, reason and counts of every commit; "full"
            also keeps its nodes and relations, which `diff`, `blame` and `replay` need.
        extras: objects with `state_dict()` (optimizers, schedulers, rules, memories),
            `torch.Generator`s (`torch.default_generator` is the global one), or plain data and
            tensors.

    Raises:
        CheckpointError: an extra is not data, a trial is in effect, a part of a net is also used
            elsewhere in the model, a net has additional modules, buffers or its own `forward`, or
            the tensors of an adopted model were changed outside of edits; nothing is written.
        OptimizerError: an optimizer has not followed an edit; nothing is written.
        OSError: the file cannot be written; an earlier one is as it was.
    """
    _file.write(path, *_pack(model, extras, undo=undo, history=history))


@torch.inference_mode(False)  # the tensors can be trained
def open(source: str | os.PathLike[str] | bytes, /) -> Archive:
    """Returns a checkpoint in memory, from a file or its bytes.

    Nets and extras are read on access:

        file = gn.open("run.safetensors")
        net = file.net
        optimizer = torch.optim.Adam(net.parameters())
        file.load(optimizer=optimizer)

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged or not a checkpoint.
    """
    # absolute, so that `save` finds the file wherever the process has gone since
    path = None if isinstance(source, bytes) else Path(source).absolute()
    document, tensors = _file.read(source)
    return Archive(document, tensors, path)


def load(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> GrapNet:
    """Returns the net of a checkpoint, ready to train, run and edit.

    It warns about a backend that is not registered in this process: `auto` runs instead, and the
    name stays in the next file.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, not a checkpoint, or holds a model; the message names
            the field.
    """
    archive = open(path)
    archive._require_nets()
    if archive.is_model:
        raise CheckpointError(
            "nets: this file holds a model with nets inside, not one net. Create a model like it,"
            " then gn.restore(path, into=model)"
        )
    (net,) = archive._rebuilt().values()
    assert isinstance(net, GrapNet)
    warn_of_unmet_choices(net)
    if device is None:
        return net
    with torch.inference_mode(False):
        return net.to(device)


def restore(
    path: str | os.PathLike[str], /, *, into: nn.Module | None = None, **objects: Any
) -> dict[str, Any]:
    """Loads a checkpoint into objects created like the saved ones, all or none.

    A model passed as `into` gets the saved nets in place of dense modules of any shape, also on the
    meta device, or of nets of any version. A net takes the device, dtype and `requires_grad` flags
    of what it replaces. Everything else is loaded by name and shape. The nets have new Parameters,
    so create the optimizer afterwards; one with the old Parameters raises OptimizerError at its
    next step:

        gn.restore(path, into=model)
        optimizer = torch.optim.Adam(model.parameters())
        gn.restore(path, optimizer=optimizer)

    An adopted model is restored into a model of its size at adoption, or of the saved size, with or
    without a graph. Parameters stay the same objects and take the saved shapes; numbers of modules
    such as `num_heads` follow. So an optimizer may exist already and be restored in the same call;
    one with older state that is not raises OptimizerError at its next step. A graph, of any version
    or fresh from `gn.adopt`, also gets the saved nodes, version and journal, and with a file saved
    by `undo=True` continues to undo:

        net = gn.adopt(model, images, optimizer=optimizer)
        gn.restore(path, into=net, optimizer=optimizer)

    Args:
        path: the file.
        into: a model created like the saved one, or the graph of an adopted model.
        objects: objects with `load_state_dict()`, or `torch.Generator`s, of the saved class, under
            the names they were saved by.

    Returns:
        The extras that were saved as plain data.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a name was not saved, an object is of another class, has Parameters of
            other shapes or refuses its state, a net to be replaced has hooks or additions or is
            wrapped by `torch.compile(net)`, or a model differs from the saved one in its tensors,
            axes or sizes; nothing changes.
    """
    archive = open(path)
    with torch.inference_mode(False):
        archive._require_saved(objects)
        archive._put(into, objects, archive._extras)
    return archive._data()


def _pack(
    model: nn.Module, extras: Mapping[str, Any], *, undo: bool, history: Kept
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the document and the tensors of a file; raises as `save` does."""
    held = uncompiled(model)
    if isinstance(held, GrapNet):  # torch.compile(net) is saved as the net
        model = held
    nets = find_nets(model) if isinstance(model, nn.Module) else {}
    whole = find_adopted(model) if isinstance(model, nn.Module) else None
    if not nets and whole is None:
        raise TypeError(
            "gn.save(path, model) saves a GrapNet, a model with nets inside or an adopted model;"
            f" this {type(model).__name__} is none of them"
        )
    places: dict[str, Graph] = {names[0]: net for net, names in nets.items()}
    tensors: dict[str, Tensor] = {}
    document: dict[str, Any] = {"format": _file.FORMAT}
    with torch.no_grad():
        if whole is not None:
            places[""] = whole
            document |= describe_adopted(whole, tensors, undo=undo, history=history)
        elif isinstance(model, GrapNet):
            refuse_additions(model, "this net")
            document |= describe_net(model, tensors, undo=undo, history=history)
        else:
            document |= describe_model(model, tensors, undo=undo, history=history)
        parts = {}
        for name, value in extras.items():
            parts[name] = Extra.of(value, places, undo=undo).describe(name, tensors)
        document["extras"] = parts
    return document, tensors


def _part_of(name: str) -> str:
    """Returns the part of a checkpoint that a tensor belongs to."""
    if name.startswith("extras"):
        return "extras"
    if name.startswith("state["):
        return "model"
    if name.startswith("nets."):
        name = name.split(".", 2)[2]
    if name.startswith("journal."):
        return "journal"
    if name.startswith("columns.") or name.endswith((".weight", ".bias")):
        return "values"
    return "wiring"
