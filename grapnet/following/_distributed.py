"""DistributedDataParallel around nets that are edited while they train."""

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grapnet._torch import ignored_by_ddp
from grapnet.core._change import Change, GridChange, VectorChange
from grapnet.core._commit import require_editable
from grapnet.core._errors import EditError, HistoryError, StaleTopologyError, TopologyError
from grapnet.core._graph import Graph
from grapnet.core._journal import Commit


class Distributed(nn.Module):
    """Trains nets, a module with nets inside or an adopted model in several processes, and keeps
    their graphs equal through edits.

    Edit on rank 0 only and then call `synchronize()` on every rank. The constructor is a collective
    call too: Parameters and frozen values become those of rank 0, and the graphs must be equal. The
    names of a state dict begin with "module.", as with DDP.

    Args:
        module: a GrapNet, any module with some inside, or what `gn.adopt` returned.
        ddp_options: further arguments of DistributedDataParallel. It ignores the buffers of nets,
            which are wiring and frozen values; its options for buffers apply to the rest of the
            module.

    Raises:
        ValueError: the module holds no net.
        RuntimeError: torch.distributed has not been initialised.
        TopologyError: the graphs differ between ranks; it is raised on all of them.
    """

    def __init__(self, module: nn.Module, **ddp_options: Any) -> None:
        super().__init__()
        nets = [part for part in module.modules() if isinstance(part, Graph)]
        if not nets:
            raise ValueError(
                f"this {type(module).__name__} is no net and contains none; use torch's"
                " DistributedDataParallel, or give what gn.adopt(model, ...) returns"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed has not been initialised; call"
                " torch.distributed.init_process_group(...) in every process first, or train the"
                " module without Distributed where there is only one"
            )
        group = ddp_options.get("process_group") or dist.group.WORLD
        mesh = ddp_options.get("device_mesh")
        if mesh is not None:
            group = mesh.get_group()
        self.module = module
        self.training = module.training
        self._nets = nets
        self._ranks = _Ranks(group, nets[0])
        self._outboxes = [_Outbox(net) for net in nets]
        self._options = ddp_options
        self._comm_hook: tuple[Any, Callable[..., Any]] | None = None
        # Graphs that differ stay different, so later calls repeat this message.
        self._difference = ""
        self._compare("")
        self._wrapper = self._rebuilt()

    @property
    def nets(self) -> list[Graph]:
        """The nets inside the module, in the order of `module.modules()`."""
        return self._nets

    @property
    def ddp(self) -> DistributedDataParallel:
        """The current wrapper, valid until the next edit."""
        return self._wrapper.ddp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; gradients are averaged over the ranks during backward.

        Raises:
            StaleTopologyError: a net was edited, or its Parameters were replaced, since the last
                `synchronize()`.
        """
        if not self._wrapper.is_current(self.nets):
            versions = ", ".join(
                f"version {before} was synchronized and {net.version} is here"
                for before, net in zip(self._wrapper.versions, self.nets, strict=True)
            )
            raise StaleTopologyError(
                f"a net was edited, in a trial perhaps, or got other Parameters ({versions}), so"
                " its gradients would not be averaged over the ranks. Call synchronize() on every"
                " rank after editing"
            )
        return self.ddp(*args, **kwargs)

    def synchronize(self) -> None:
        """Applies rank 0's edits on all ranks and rebuilds DDP; every rank must call it.

        The same edits made on every rank, as by `load_state_dict`, are accepted. Without any edit
        the ranks exchange one number.

        Raises:
            TopologyError: the graphs differ, or one could not follow; raised on all ranks, also by
                later calls.
            EditError: a rank has an open edit or is in inference mode; raised on all ranks, and
                nothing changes.
        """
        if self._difference:
            raise TopologyError(self._difference)
        message, trouble = self._packed()
        with torch.inference_mode(False), torch.enable_grad():
            changed = bool(trouble) or not self._wrapper.is_current(self.nets)
        if not self._ranks.any(changed):
            return
        pending = [commit for outbox in self._outboxes for commit in outbox.commits]
        last = pending[-1].reason if pending else ""
        reports = self._ranks.gather({"trouble": trouble, "commits": len(pending), "last": last})
        self._require_ready(reports)
        counts = [report["commits"] for report in reports]
        if counts[0] and not any(counts[1:]):
            message = self._ranks.broadcast(message)
            if self._ranks.rank > 0:
                trouble = self._repeat(message)
        self._compare(trouble)
        self._wrapper = self._rebuilt()
        for outbox in self._outboxes:
            outbox.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates the gradients of this rank without averaging, as in DDP."""
        with self.ddp.no_sync():
            yield

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Sets how gradients are averaged, as in DDP; the hook stays through edits."""
        self.ddp.register_comm_hook(state, hook)
        self._comm_hook = (state, hook)

    def train(self, mode: bool = True) -> "Distributed":
        """Sets training mode of the module."""
        super().train(mode)
        self.ddp.train(mode)
        return self

    def _packed(self) -> tuple[bytes, str]:
        """Returns rank 0's commits as bytes, and the reason why this rank cannot synchronize."""
        try:
            for net in self.nets:
                net._require_no_edit("synchronize")
                require_editable(net)
            if self._ranks.rank == 0 and any(outbox.commits for outbox in self._outboxes):
                return _pack([outbox.message() for outbox in self._outboxes]), ""
        except Exception as error:  # raised on all ranks, once they know of it
            return b"", f"{type(error).__name__}: {error}"
        return b"", ""

    def _repeat(self, message: bytes) -> str:
        """Follows rank 0 and returns the text of the error, if any."""
        try:
            for net, received in zip(self.nets, _unpack(message), strict=True):
                _repeat(net, received)
        except Exception as error:  # raised on all ranks, once they know of it
            return f"{type(error).__name__}: {error}"
        return ""

    def _require_ready(self, reports: list[dict[str, Any]]) -> None:
        busy = []
        for rank, report in enumerate(reports):
            if report["trouble"]:
                busy.append(f"rank {rank}: {report['trouble']}")
        if busy:
            raise EditError(
                f"the ranks cannot synchronize now, and nothing was changed ({'; '.join(busy)})"
            )
        counts = [report["commits"] for report in reports]
        if any(counts[1:]) and len(set(counts)) > 1:
            edited = []
            for rank, count in enumerate(counts):
                if rank > 0 and count > 0:
                    last = reports[rank]["last"]
                    edited.append(f"{count} on rank {rank} (the last: {last!r})")
            self._differ(
                "edits belong on rank 0, and since the last synchronize() there were commits"
                f" {', '.join(edited)}"
            )

    def _compare(self, trouble: str) -> None:
        """Raises TopologyError on all ranks if the graph of one differs from rank 0's, or could not
        follow it.
        """
        reports = self._ranks.gather(
            {"trouble": trouble, "digest": _digest(self.nets), "nets": repr(self.nets)}
        )
        differences = []
        for rank, report in enumerate(reports):
            if report["trouble"]:
                differences.append(f"rank {rank} could not follow: {report['trouble']}")
            elif report["digest"] != reports[0]["digest"]:
                differences.append(f"rank {rank} has {report['nets']}")
        if differences:
            self._differ(
                f"the graphs differ from rank 0's, {reports[0]['nets']}: {'; '.join(differences)}"
            )

    def _differ(self, difference: str) -> None:
        self._difference = (
            f"{difference}. The graphs of this model can no longer be trained together: load one"
            " checkpoint on all ranks, wrap it again, and edit on rank 0 alone"
        )
        raise TopologyError(self._difference)

    def _rebuilt(self) -> "_Wrapper":
        # The old wrapper lets go of the gradients before the next one takes hold of them.
        self.__dict__.pop("_wrapper", None)
        for net in self.nets:
            for name, buffer in net.named_buffers():
                if name.endswith("frozen_values") and len(buffer):
                    self._ranks.share(buffer)
        wrapper = _Wrapper(self.module, self.nets, self._options)
        if self._comm_hook is not None:
            wrapper.ddp.register_comm_hook(*self._comm_hook)
        return wrapper

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a Distributed belongs to its processes; copy or average its .module instead"
        )


class _Wrapper:
    """One DDP wrapper, and whether it still averages every gradient."""

    def __init__(self, module: nn.Module, nets: list[Graph], options: dict[str, Any]) -> None:
        self.versions = [net.version for net in nets]
        self._structures = [net._structure for net in nets]
        ids = set()
        for net in nets:
            ids |= {id(b) for name, b in net.named_buffers() if name.endswith("frozen_values")}
        names = [
            name
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if id(buffer) in ids
        ]
        with ignored_by_ddp(module, names):
            self.ddp = DistributedDataParallel(module, **options)
        self.ddp.train(module.training)
        self._parameters = [parameter for net in nets for parameter in net.parameters()]
        self._columns = _columns(nets)
        self._accumulators = _accumulators(self._parameters)

    def is_current(self, nets: list[Graph]) -> bool:
        """Returns whether the hooks of this wrapper still receive the gradients of the nets."""
        if not _same([net._structure for net in nets], self._structures):
            return False
        if not _same(_columns(nets), self._columns):
            return False
        if not torch.is_grad_enabled():
            return True
        return _same(_accumulators(self._parameters), self._accumulators)


class _Ranks:
    """The processes of one group, and their messages."""

    def __init__(self, group: Any, net: Graph) -> None:
        self._group = group
        self._net = net
        self.rank = dist.get_rank(group)
        self._first = dist.get_global_rank(group, 0)

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        device = torch.device("cpu")
        if dist.get_backend(self._group) == "nccl":
            device = self._net.device
        number = torch.tensor([int(flag)], device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        return bool(number)

    def gather(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the reports of all ranks, in their order."""
        reports: list[Any] = [None] * dist.get_world_size(self._group)
        with self._on_device():
            dist.all_gather_object(reports, report, group=self._group)
        return reports

    def broadcast(self, message: bytes) -> bytes:
        """Returns the message of rank 0."""
        messages = [message]
        with self._on_device():
            dist.broadcast_object_list(messages, self._first, group=self._group)
        return messages[0]

    def share(self, tensor: Tensor) -> None:
        """Overwrites a tensor with its content on rank 0."""
        dist.broadcast(tensor, self._first, group=self._group)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Makes torch's object collectives use the GPU of the net instead of the default device."""
        parameter = next(self._net.parameters())
        with torch.device("cpu"), torch.cuda.device_of(parameter):
            yield


@dataclass(frozen=True, eq=False)
class _Message:
    """What other processes need to repeat the commits of one graph."""

    # each with the undo limit that the journal had at the time
    commits: list[tuple[Commit, int]]
    next_uid: int
    undo_limit: int


class _Outbox:
    """Keeps the commits of one graph, with their new values, until they are sent.

    Trials are not kept.
    """

    # The blocks of an adopted model cannot be sent; the layers of a net can.
    follows_depth = True

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._sent: list[tuple[Commit, int]] = []
        graph.follow(self)

    @property
    def commits(self) -> list[Commit]:
        """The commits that have not been sent."""
        return [commit for commit, _ in self._sent]

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Prepares to keep a commit; see `Follower`."""
        if commit.change.depth is not None and graph._grids():
            raise EditError(
                "blocks of an adopted model do not come or leave while Distributed trains it;"
                " change its depth before, in every process"
            )
        if commit.ends_trial:
            return lambda: self._sent.__delitem__(-1)
        outgoing = (_outgoing(commit), graph.journal.undo_limit)
        return lambda: self._sent.append(outgoing)

    def message(self) -> _Message:
        """Returns the message for the other processes."""
        return _Message(self._sent, self._graph._next_uid, self._graph.journal.undo_limit)

    def clear(self) -> None:
        """Drops the commits after they are sent."""
        self._sent = []


def _pack(messages: Sequence[_Message]) -> bytes:
    """Returns messages as bytes; tensors that two parts share are in there once."""
    buffer = io.BytesIO()
    torch.save(messages, buffer)
    return buffer.getvalue()


def _unpack(message: bytes) -> list[_Message]:
    """Returns what `_pack` was given, its tensors on the CPU."""
    # The ranks of one job trust each other as much as their programs, so pickle is safe here.
    return torch.load(io.BytesIO(message), map_location="cpu", weights_only=False)


def _repeat(graph: Graph, message: _Message) -> None:
    """Applies the commits of an equal graph in another process.

    An undo is repeated as an undo, so that attached optimizers restore the state that they keep in
    their own process.

    Raises:
        HistoryError: the graph was not equal; the commits before the named one were applied.
    """
    journal = graph.journal
    for commit, undo_limit in message.commits:
        journal.undo_limit = undo_limit
        if commit.undoes is None:
            graph.replay([commit])
        elif journal.undoable and journal._next_undo().version == commit.undoes:
            graph.undo(alone=True)
        elif journal.redoable and journal._next_redo().version == commit.undoes:
            graph.redo(alone=True)
        else:
            raise HistoryError(
                f"commit {commit.version} ({commit.reason!r}) reverts commit {commit.undoes}, "
                "whose values this process no longer keeps"
            )
    graph._next_uid = message.next_uid
    journal.undo_limit = message.undo_limit


def _outgoing(commit: Commit) -> Commit:
    """Returns a commit with its new values; each process has the removed ones."""
    if commit.undoes is not None:
        return Commit(commit.version, commit.reason, Change({}, {}), undoes=commit.undoes)
    layers = {}
    for number, layer in commit.change.layers.items():
        columns = {name: _arriving(column) for name, column in layer.columns.items()}
        biases = layer.biases and _arriving(layer.biases)
        layers[number] = replace(layer, biases=biases, columns=columns)
    transitions = {}
    for number, transition in commit.change.transitions.items():
        transitions[number] = replace(transition, weights=_arriving(transition.weights))
    tensors = {name: _arriving(part) for name, part in commit.change.tensors.items()}
    change = replace(commit.change, layers=layers, transitions=transitions, tensors=tensors)
    return Commit(commit.version, commit.reason, change, commit.by, commit.operations)


_Part = TypeVar("_Part", VectorChange, GridChange)


def _arriving(part: _Part) -> _Part:
    """Returns the change of a vector or tensor with its new values alone."""
    assigned = part.assigned and replace(part.assigned, before=None)
    return replace(part, gone_values=None, assigned=assigned)


def _digest(graphs: Sequence[Graph]) -> str:
    """Returns the SHA-256 of graphs' structure: versions, uids, owners, activations, wiring, what
    is frozen.
    """
    total = hashlib.sha256()

    def add(title: str, *tensors: Tensor) -> None:
        total.update(f"\n{title} {[len(tensor) for tensor in tensors]}\n".encode())
        for tensor in tensors:
            total.update(tensor.cpu().numpy().tobytes())

    for graph in graphs:
        add(f"graph of version {graph.version}, next uid {graph._next_uid}")
        if graph._wired:
            add(f"ends {graph.ends}")
        for layer in graph.layers:
            add("layer", layer.uid)
            for column in (layer._owner_names, layer._activation_names):
                for name, rows in sorted(column.kinds(), key=lambda kind: str(kind[0])):
                    add(repr(name), rows)
        for transition in graph._wired:
            add("transition", transition.ptr, transition.child)
        for name, grid in graph._grids().items():
            if grid.opened is not None:
                add(name, grid.opened.pattern.kinds)
        for name, buffer in graph.named_buffers():
            if name.endswith("frozen_at"):
                add(name, buffer)
        for name, parameter in graph.named_parameters():
            shape = list(parameter.shape)
            add(f"{name} {parameter.dtype} {shape} {parameter.requires_grad}")
    return total.hexdigest()


@torch.enable_grad()
def _accumulators(parameters: list[nn.Parameter]) -> list[Any]:
    """Returns the gradient accumulators of Parameters; an edit or a cast replaces them."""
    found = []
    for parameter in parameters:
        view = parameter.view_as(parameter).grad_fn
        found.append(view and view.next_functions[0][0])
    return found


def _columns(nets: list[Graph]) -> list[nn.Parameter]:
    """Returns the Parameters that are added and removed without an edit."""
    return [column.value for net in nets for column in net.columns.values()]


def _same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))
