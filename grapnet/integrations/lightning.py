"""RulesCallback: rules in a Lightning Trainer, and Lightning checkpoints of modules with edited
nets.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.checkpoint import Archive
from grapnet.convert import describe_origin, place
from grapnet.convert._origin import match_names, match_places

from ._extra import require

if TYPE_CHECKING:
    import lightning.pytorch as L
    from lightning.pytorch import callbacks
    from lightning.pytorch.strategies import SingleDeviceStrategy
else:
    L = require("lightning.pytorch", "lightning")
    callbacks = L.callbacks
    SingleDeviceStrategy = L.strategies.SingleDeviceStrategy

KEY = "grapnet"  # under which a checkpoint holds the nets
_NAMES = ("StochasticWeightAveraging", "WeightAveraging")  # not every Lightning 2 has the second
_AVERAGING = tuple(getattr(callbacks, name) for name in _NAMES if hasattr(callbacks, name))

__all__ = ["RulesCallback", "load_nets", "nets_in", "save_nets"]


class RulesCallback(L.Callback):
    """Applies rules to the nets inside a LightningModule, and saves the edited nets in its
    checkpoints.

    The optimizers of the trainer follow every edit. Rules are applied after each training batch in
    which an optimizer stepped, before validation and `ModelCheckpoint`; `step` counts these batches
    from 0, also with `accumulate_grad_batches`. Recorders see training batches only. Every
    checkpoint holds the nets and the state of the rules. `fit`, `validate`, `test` and `predict`
    with `ckpt_path=` put these nets into the module before Lightning loads weights and creates
    optimizers. They are new objects, so look them up through the module.

    Args:
        rules: one manager for all nets of the module, or managers by the names of nets, such as
            `{"model.head": manager}`. None for no rules.
        every: the unit of a step for the rules: an optimizer step, or a complete epoch.
        task: called after the last batch of an epoch; returns the task that has ended, or None.
        survivors: as for `gn.attach`.
        newborn: as for `gn.attach`.

    Examples:
        >>> from grapnet.rules import Every, PruneWeakest, RuleManager
        >>> manager = RuleManager()
        >>> manager.add(PruneWeakest(0.1), schedule=Every(100, start=100))
        'PruneWeakest'
        >>> trainer = L.Trainer(callbacks=[RulesCallback(manager)], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        rules: gn.rules.RuleManager | Mapping[str, gn.rules.RuleManager] | None = None,
        *,
        every: Literal["step", "epoch"] = "step",
        task: Callable[["L.Trainer"], Any] | None = None,
        survivors: Literal["keep", "renew"] = "keep",
        newborn: Literal["zero", "mean"] = "zero",
    ) -> None:
        if isinstance(rules, Mapping) and len({id(manager) for manager in rules.values()}) < len(
            rules
        ):
            raise ValueError("a manager has one entry; rules=manager applies it to all nets")
        self.rules = rules
        self.every = every
        self.task = task
        self.survivors: Literal["keep", "renew"] = survivors
        self.newborn: Literal["zero", "mean"] = newborn
        self.step = 0  # of the next time that rules are applied
        self._global_step = 0  # of the trainer, when a batch last ended
        self._running: dict[str, gn.rules.RuleManager] = {}  # by the names of their nets, in a fit
        self._pauses = ExitStack()  # of managers, while an evaluation runs

    def managers(self, module: "L.LightningModule") -> dict[str, gn.rules.RuleManager]:
        """Returns the managers by the names of the nets with which they are saved.

        A manager of all nets is saved with the first of them.

        Raises:
            ValueError: the module has no such net.
        """
        nets = nets_in(module)
        there = f"{type(module).__name__} has {', '.join(map(repr, nets)) or 'none'}"
        if isinstance(self.rules, gn.rules.RuleManager):
            if not nets:
                raise ValueError(f"rules are for nets, and {there}")
            return {next(iter(nets)): self.rules}
        managers = dict(self.rules or {})
        for name in managers:
            if name not in nets:
                raise ValueError(f"rules are given for a net at {name!r}, and {there}")
        return managers

    def _model(self, module: "L.LightningModule", name: str) -> nn.Module:
        """Returns what the manager of that name changes: the whole module, or one net."""
        if isinstance(self.rules, gn.rules.RuleManager):
            return module
        return nets_in(module)[name]

    def setup(self, trainer: "L.Trainer", pl_module: "L.LightningModule", stage: str) -> None:
        """Makes the module save its nets in checkpoints and load them.

        Raises:
            ValueError: the trainer runs a strategy or a callback that cannot follow edits.
        """
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise ValueError(
                f"rules run on one device, and this trainer uses {type(trainer.strategy).__name__},"
                " which wraps the Parameters that an edit changes. Use Trainer(devices=1,"
                " strategy='auto'), or gn.following.Distributed in your own loop"
            )
        others: list[Any] = vars(trainer).get("callbacks", [])  # which Lightning sets from outside
        averaging = [
            type(callback).__name__ for callback in others if isinstance(callback, _AVERAGING)
        ]
        if averaging:
            raise ValueError(
                f"{averaging[0]} averages a copy that does not follow edits. Average in your own"
                " hook, with an AveragedModel and gn.attach(averaged, net)"
            )
        for hook in (on_save_checkpoint, on_load_checkpoint):
            setattr(pl_module, hook.__name__, MethodType(hook, pl_module))

    def on_fit_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Attaches the optimizers to the nets whose Parameters they hold."""
        self.managers(pl_module)  # raises before anything is trained
        held = []
        for optimizer in trainer.optimizers:
            held.append({id(p) for group in optimizer.param_groups for p in group["params"]})
        strangers = set().union(*held) - {id(parameter) for parameter in pl_module.parameters()}
        for name, net in nets_in(pl_module).items():
            mine = {id(parameter) for parameter in net.parameters() if parameter.requires_grad}
            followers = [
                o for o, theirs in zip(trainer.optimizers, held, strict=True) if mine & theirs
            ]
            if mine and strangers and not followers:
                raise gn.errors.OptimizerError(
                    f"no optimizer holds the parameters of the net at {name!r}, and one holds"
                    " parameters that are not in the module: it was created before a checkpoint"
                    " was loaded. Create it in configure_optimizers"
                )
            for optimizer in followers:
                gn.attach(optimizer, net, survivors=self.survivors, newborn=self.newborn)

    def on_train_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Starts the recorders for the first steps, after the sanity check."""
        self._pauses.close()  # of an evaluation that was interrupted
        self._global_step = trainer.global_step
        self._running = self.managers(pl_module)
        for name, manager in self._running.items():
            manager.start(self._model(pl_module, name), self.step)

    def on_train_batch_end(
        self,
        trainer: "L.Trainer",
        pl_module: "L.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Applies the rules that are due, if an optimizer has stepped or a task has ended."""
        stepped = trainer.global_step != self._global_step
        self._global_step = trainer.global_step
        last = trainer.is_last_batch
        task = self.task(trainer) if last and self.task is not None else None
        if not (stepped or task is not None if self.every == "step" else last):
            return
        for name, manager in self._running.items():
            manager.apply(self._model(pl_module, name), self.step, task=task)
        self.step += 1

    def on_validation_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Pauses the recorders, so that rules see no held-out data."""
        for manager in self.managers(pl_module).values():
            self._pauses.enter_context(manager.pausing())

    def on_validation_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Resumes the recorders."""
        self._pauses.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of the next step; the nets and the rules have their own place in a
        checkpoint.
        """
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self.step = state_dict["step"]

    def on_save_checkpoint(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Puts the nets and the state of their rules into the checkpoint."""
        save_nets(pl_module, checkpoint, self.managers(pl_module))

    def on_load_checkpoint(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Restores the state of the rules; the nets are in the module already."""
        managers = self.managers(pl_module)
        for name, manager in managers.items():
            # leaves the recorders of a net that was there before
            manager.start(self._model(pl_module, name))
        _load_rules(checkpoint, managers)


def on_save_checkpoint(module: "L.LightningModule", checkpoint: dict[str, Any]) -> None:
    """Adds the nets to a checkpoint without them (weights only); then calls the hook of the
    class.
    """
    if KEY not in checkpoint:
        save_nets(module, checkpoint)
    type(module).on_save_checkpoint(module, checkpoint)


def on_load_checkpoint(module: "L.LightningModule", checkpoint: dict[str, Any]) -> None:
    """Puts the nets of a checkpoint into the module before its weights; then calls the hook of the
    class.
    """
    load_nets(module, checkpoint)
    type(module).on_load_checkpoint(module, checkpoint)


def nets_in(module: nn.Module) -> dict[str, gn.GrapNet]:
    """Returns the nets inside a module by name; each occurs once.

    Examples:
        >>> list(nets_in(nn.ModuleDict({"encoder": nn.Linear(8, 4), "head": gn.GrapNet([4, 2])})))
        ['head']
    """
    return {name: part for name, part in module.named_modules() if isinstance(part, gn.GrapNet)}


def save_nets(
    module: nn.Module,
    checkpoint: dict[str, Any],
    rules: Mapping[str, gn.rules.RuleManager] | None = None,
) -> None:
    """Adds the nets of a module to a checkpoint, each as the bytes of a `gn.save` file.

    Args:
        module: the module.
        checkpoint: the dict, which `torch.load(…, weights_only=True)` reads.
        rules: managers by the names of nets, whose state goes with them.

    Raises:
        CheckpointError: a trial is in effect, a net has additional modules, buffers or its own
            `forward`, two nets share a Parameter, or the state of a rule is not data; the
            checkpoint is unchanged.
    """
    managers = rules or {}
    parts = []
    _require_apart(nets_in(module))
    for name, net in nets_in(module).items():
        extras: dict[str, Any] = {}
        if name in managers:
            extras["rules"] = managers[name]
        try:
            data = Archive.of(net, **extras).to_bytes()
        except gn.errors.CheckpointError as error:
            raise gn.errors.CheckpointError(f"{name}: {error}") from error
        part = {
            "name": name,
            "origin": describe_origin(net),
            "rules": bool(extras),
            "file": torch.frombuffer(bytearray(data), dtype=torch.uint8),
        }
        parts.append(part)
    checkpoint[KEY] = parts


def load_nets(module: nn.Module, checkpoint: Mapping[str, Any]) -> dict[str, gn.GrapNet]:
    """Puts the nets of a checkpoint into a module of any shape, and returns them by name.

    They are new objects with new Parameters, and take device, mode and `requires_grad` of what they
    replace. A grafted net may replace dense modules. A checkpoint without nets changes nothing. If
    only one of the two modules has compiled parts, the names in the `state_dict` of the checkpoint
    are adapted.

    Raises:
        CheckpointError: a net is damaged or does not fit; the module is unchanged.
        ConversionError: the module has other parts in place of a net, a net with hooks or
            additions, or a part compiled by `torch.compile(part)`; the module is unchanged.
    """
    found: dict[str, gn.GrapNet] = {}
    installs: list[Callable[[], None]] = []
    parts = checkpoint.get(KEY, [])
    here = match_places([part["name"] for part in parts], module)
    for part in parts:
        name = here[part["name"]]
        found[name] = net = _unpack(part["file"]).net
        installs.append(place(module, name, net, part["origin"]))
    for install in installs:
        install()
    state = checkpoint.get("state_dict", {})
    for name, own in match_names(state, module.state_dict()).items() if parts else ():
        state[own] = state.pop(name)
    return found


def _load_rules(checkpoint: Mapping[str, Any], rules: Mapping[str, gn.rules.RuleManager]) -> None:
    """Restores the state of managers by the names of their nets; one that was not saved starts
    again.

    Raises:
        CheckpointError: the rules are not those that were saved.
    """
    parts = [part for part in checkpoint.get(KEY, []) if part["rules"]]
    here = match_names([part["name"] for part in parts], rules.keys())
    for part in parts:
        manager = rules.get(here[part["name"]])
        if manager is not None:
            _unpack(part["file"]).load(rules=manager)


def _require_apart(nets: Mapping[str, gn.GrapNet]) -> None:
    """Raises CheckpointError if two nets share a Parameter."""
    owners: dict[int, str] = {}
    for name, net in nets.items():
        for parameter in net.parameters():
            if owners.setdefault(id(parameter), name) != name:
                raise gn.errors.CheckpointError(
                    f"the nets at {owners[id(parameter)]!r} and {name!r} share a Parameter"
                )


def _unpack(data: Tensor) -> Archive:
    """Returns the archive in the bytes of a file, [bytes] uint8."""
    return gn.open(data.cpu().numpy().tobytes())
