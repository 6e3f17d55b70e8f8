"""gn.Distributed: DistributedDataParallel around nets that are edited while they train."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grapnet.core.errors import EditError, StaleTopologyError, TopologyError
from grapnet.core.transaction import require_editable
from grapnet.network import GrapNet

from .agreement import Letter, Outbox, digest, pack, repeat, unpack

_REPORT = 4096  # bytes that every process says of itself once something was edited
_LONGEST_TEXT = 300  # characters of it in words, at most six bytes each
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # where DDP looks for names to leave alone


class Distributed(nn.Module):
    """Trains a module that holds GrapNets in several processes, and keeps their graphs equal
    through edits.

    Edit on rank 0 alone, by any means, and then call `synchronize()` on every rank. Making one is a
    collective call too: parameters and frozen values become those of rank 0, and the graphs must be
    equal. A state dict's names begin with "module.", as DDP's do; parameters are the module's own.

    Args:
        module: a GrapNet, or any module with some inside.
        ddp_options: what DistributedDataParallel takes besides the module. It never sees the
            buffers of a net, which are wiring and frozen values, so its options for buffers are
            about the rest of the module.

    Raises:
        ValueError: the module holds no GrapNet.
        RuntimeError: torch.distributed has not been initialised.
        TopologyError: the graphs differ between ranks; it is raised on all of them.
    """

    def __init__(self, module: nn.Module, **ddp_options: Any) -> None:
        super().__init__()
        nets = [part for part in module.modules() if isinstance(part, GrapNet)]
        if not nets:
            raise ValueError(
                f"this {type(module).__name__} holds no GrapNet; wrap it with torch's"
                " DistributedDataParallel itself"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed has not been initialised; call"
                " torch.distributed.init_process_group(...) in every process first, or train the"
                " module without Distributed where there is only one"
            )
        mesh, group = ddp_options.get("device_mesh"), ddp_options.get("process_group")
        self.module = module
        self.training = module.training
        self._nets = nets
        self._ranks = _Ranks(
            mesh.get_group() if mesh is not None else group or dist.group.WORLD, nets[0]
        )
        self._outboxes = [Outbox(net) for net in nets]
        self._options = ddp_options
        self._comm_hook: tuple[Any, Callable[..., Any]] | None = None
        self._difference = ""  # once graphs differ they stay so
        self._compare("")
        self._wrapper = self._rebuilt()

    @property
    def nets(self) -> list[GrapNet]:
        """The nets inside the module, in the order of `module.modules()`."""
        return self._nets

    @property
    def ddp(self) -> DistributedDataParallel:
        """The present wrapper, which lasts until the next edit."""
        return self._wrapper.ddp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; gradients are averaged over the ranks during backward.

        Raises:
            StaleTopologyError: a net was edited, or its parameters were exchanged, since the last
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
        """Carries out rank 0's edits on all ranks and makes ready to go on training; every rank
        must call it.

        The same edits made on every rank, as by `load_state_dict`, are taken as they are. Without
        any edit it costs one number sent around.

        Raises:
            TopologyError: the graphs differ, or one could not follow; it is raised on all ranks,
                now and from then on.
            EditError: a rank has an edit open or is in inference mode; it is raised on all ranks,
                nothing was changed.
        """
        if self._difference:
            raise TopologyError(self._difference)
        message, trouble = self._letters()
        pending = sum(len(outbox.sent) for outbox in self._outboxes)
        with torch.inference_mode(False), torch.enable_grad():
            changed = bool(trouble) or not self._wrapper.is_current(self.nets)
        if not self._ranks.any(changed):
            return
        size = 0 if message is None else len(message)
        reports = self._ranks.gather(
            {"trouble": trouble, "pending": pending, "size": size, "last": self._last_reason()}
        )
        self._require_ready(reports)
        trouble = ""
        if reports[0]["pending"] and not any(report["pending"] for report in reports[1:]):
            letters = self._ranks.broadcast(message, reports[0]["size"])
            trouble = "" if message is not None else self._repeat(letters)
        self._compare(trouble)
        self._wrapper = self._rebuilt()
        for outbox in self._outboxes:
            outbox.sent = []

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves gradients of this rank alone, to accumulate, as DDP's does."""
        with self.ddp.no_sync():
            yield

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Sets how gradients are averaged, as DDP's does; it stays through edits."""
        self.ddp.register_comm_hook(state, hook)
        self._comm_hook = (state, hook)

    def train(self, mode: bool = True) -> "Distributed":
        """Sets training mode of the module."""
        super().train(mode)
        self.ddp.train(mode)
        return self

    def _letters(self) -> tuple[Tensor | None, str]:
        """Returns rank 0's commits as they are sent, and what stands in the way of synchronizing,
        in words.
        """
        try:
            for net in self.nets:
                net.require_no_edit("synchronize")
                require_editable(net)
            if self._ranks.rank == 0 and any(outbox.sent for outbox in self._outboxes):
                return pack([outbox.letter() for outbox in self._outboxes]), ""
        except Exception as error:  # whatever it is, all ranks must hear of it
            return None, f"{type(error).__name__}: {error}"
        return None, ""

    def _last_reason(self) -> str:
        return next(
            (box.sent[-1].commit.reason for box in reversed(self._outboxes) if box.sent), ""
        )

    def _repeat(self, letters: Tensor) -> str:
        """Follows rank 0 and returns what went wrong, in words."""
        try:
            found: list[Letter] = unpack(letters)
            for net, letter in zip(self.nets, found, strict=True):
                repeat(net, letter)
        except Exception as error:  # raised on all ranks, once they have heard of it
            return f"{type(error).__name__}: {error}"
        return ""

    def _require_ready(self, reports: list[dict[str, Any]]) -> None:
        busy = [
            f"rank {n}: {report['trouble']}"
            for n, report in enumerate(reports)
            if report["trouble"]
        ]
        if busy:
            raise EditError(
                f"the ranks cannot synchronize now, and nothing was changed ({'; '.join(busy)})"
            )
        edited = [n for n, report in enumerate(reports) if n and report["pending"]]
        if edited and len({report["pending"] for report in reports}) > 1:
            told = ", ".join(
                f"{reports[n]['pending']} on rank {n} (the last: {reports[n]['last']!r})"
                for n in edited
            )
            self._differ(
                "edits belong on rank 0, and since the last synchronize() there were commits"
                f" {told}"
            )

    def _compare(self, trouble: str) -> None:
        """Raises TopologyError on all ranks when one has a graph unlike rank 0's, or could not
        follow it.
        """
        reports = self._ranks.gather(
            {"trouble": trouble, "digest": digest(self.nets), "nets": repr(self.nets)}
        )
        told = [
            f"rank {n} could not follow: {r['trouble']}"
            for n, r in enumerate(reports)
            if r["trouble"]
        ]
        told += [
            f"rank {n} has {r['nets']}"
            for n, r in enumerate(reports)
            if not r["trouble"] and r["digest"] != reports[0]["digest"]
        ]
        if told:
            self._differ(
                f"the graphs differ from rank 0's, {reports[0]['nets']}: {'; '.join(told)}"
            )

    def _differ(self, difference: str) -> None:
        self._difference = (
            f"{difference}. The graphs of this model can no longer be trained together: load one"
            " checkpoint on all ranks, wrap it again, and edit on rank 0 alone"
        )
        raise TopologyError(self._difference)

    def _rebuilt(self) -> "_Wrapper":
        # the old one lets go of the gradients before the next takes hold of them
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
    """One DDP wrapper, and how to see that it still averages every gradient."""

    def __init__(self, module: nn.Module, nets: list[GrapNet], options: dict[str, Any]) -> None:
        self.versions = [net.version for net in nets]
        self._structures = [net.structure for net in nets]
        ids = {id(buffer) for net in nets for buffer in net.buffers()}
        names = [
            name
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if id(buffer) in ids
        ]
        with _ignoring(module, names):
            self.ddp = DistributedDataParallel(module, **options)
        self.ddp.train(module.training)
        self._parameters = [parameter for net in nets for parameter in net.parameters()]
        self._columns = _columns(nets)
        self._accumulators = _accumulators(self._parameters)

    def is_current(self, nets: list[GrapNet]) -> bool:
        """Says whether the hooks of this wrapper still sit where the gradients of the nets arrive,
        if any will.
        """
        if any(
            net.structure is not token for net, token in zip(nets, self._structures, strict=True)
        ):
            return False
        return _same(_columns(nets), self._columns) and (
            not torch.is_grad_enabled()
            or _same(_accumulators(self._parameters), self._accumulators)
        )


class _Ranks:
    """The processes of one group, and what they tell each other."""

    def __init__(self, group: Any, net: GrapNet) -> None:
        self._group, self._net = group, net
        self.rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)

    @property
    def device(self) -> torch.device:
        """Where the group's backend wants its bytes."""
        return self._net.device if dist.get_backend(self._group) == "nccl" else torch.device("cpu")

    def any(self, flag: bool) -> bool:
        """Says whether the flag is set on any rank."""
        number = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        return bool(number)

    def gather(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns what every rank says of itself, in the order of ranks."""
        told = {
            key: _short(value) if isinstance(value, str) else value for key, value in report.items()
        }
        text = json.dumps(told).encode().ljust(_REPORT)
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        found = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(found, mine, group=self._group)
        return [json.loads(each.cpu().numpy().tobytes()) for each in found]

    def broadcast(self, message: Tensor | None, size: int) -> Tensor:
        """Returns the bytes of rank 0; only rank 0 has the message before."""
        buffer = torch.empty(size, dtype=torch.uint8) if message is None else message
        buffer = buffer.to(self.device)
        self.share(buffer)
        return buffer

    def share(self, tensor: Tensor) -> None:
        """Gives a tensor the content that it has on rank 0."""
        dist.broadcast(tensor, self._first, group=self._group)


@contextlib.contextmanager
def _ignoring(module: nn.Module, names: list[str]) -> Iterator[None]:
    """Tells the DDP that is made inside the block which buffers to leave alone, besides what the
    user told it.
    """
    given = module.__dict__.get(_IGNORED)
    setattr(module, _IGNORED, [*names, *(given or ())])
    try:
        yield
    finally:
        delattr(module, _IGNORED) if given is None else setattr(module, _IGNORED, given)


@torch.enable_grad()
def _accumulators(parameters: list[nn.Parameter]) -> list[Any]:
    """Returns the nodes of autograd where the gradients of Parameters arrive; an edit or a cast
    makes others.
    """
    views = [p.view_as(p).grad_fn if p.requires_grad else None for p in parameters]
    return [view and view.next_functions[0][0] for view in views]


def _columns(nets: list[GrapNet]) -> list[nn.Parameter]:
    """Returns the Parameters that come and leave without an edit."""
    return [column.value for net in nets for column in net.columns.values()]


def _same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


def _short(text: str) -> str:
    """Returns at most as much text as a report has room for, on one line."""
    return " ".join(text.split())[:_LONGEST_TEXT]
