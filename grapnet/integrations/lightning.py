"""RulesCallback: rules in a Lightning Trainer, and Lightning's own checkpoints of modules whose
nets were edited.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import grapnet as gn

from .extra import require
from .lightning_nets import KEY, load_nets, load_rules, nets_in, save_nets

if TYPE_CHECKING:
    import lightning.pytorch as L
    from lightning.pytorch import callbacks
    from lightning.pytorch.strategies import SingleDeviceStrategy
else:
    L = require("lightning.pytorch", "lightning")
    callbacks = L.callbacks
    SingleDeviceStrategy = L.strategies.SingleDeviceStrategy

_NAMES = ("StochasticWeightAveraging", "WeightAveraging")  # not every Lightning 2 has the second
_AVERAGING = tuple(getattr(callbacks, name) for name in _NAMES if hasattr(callbacks, name))

__all__ = ["RulesCallback", "load_nets", "nets_in", "save_nets"]


class RulesCallback(L.Callback):
    """Applies rules to the nets inside a LightningModule, and makes checkpoints survive what they
    change.

    The trainer's optimizers follow every edit, whoever makes it. Rules are applied after the
    training batch in which an optimizer has stepped, before validation and before `ModelCheckpoint`
    saves; `step` is 0 after the first, also with `accumulate_grad_batches`. Recorders see training
    batches alone. Every checkpoint of the trainer holds the nets as they are wired and the state of
    the rules. `fit`, `validate`, `test` and `predict` with `ckpt_path=` put those nets into the
    module before Lightning loads the weights and asks for optimizers: the nets are other objects
    afterwards, so find them through the module.

    Args:
        rules: the manager of the only net, or managers by the names of nets in the module, such as
            `{"model.head": manager}`. None to edit by other means, or not at all.
        every: what a step is to the rules: an optimizer step, or an epoch. An epoch that was cut
            short is none.
        task: asked after the last batch of an epoch; what it returns, unless that is None, is the
            task that has ended.
        survivors: as for `gn.attach`.
        newborn: as for `gn.attach`.

    Examples:
        >>> from grapnet.rules import Every, PruneWeakest, RuleManager
        >>> manager = RuleManager()
        >>> manager.inject(PruneWeakest(0.1), schedule=Every(100, start=100))
        'PruneWeakest'
        >>> trainer = L.Trainer(callbacks=[RulesCallback(manager)], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        rules: gn.RuleManager | Mapping[str, gn.RuleManager] | None = None,
        *,
        every: Literal["step", "epoch"] = "step",
        task: Callable[["L.Trainer"], Any] | None = None,
        survivors: Literal["keep", "renew"] = "keep",
        newborn: Literal["zero", "mean"] = "zero",
    ) -> None:
        if every not in ("step", "epoch"):
            raise ValueError(f'every is "step" or "epoch", got {every!r}')
        if isinstance(rules, Mapping) and len({id(manager) for manager in rules.values()}) < len(
            rules
        ):
            raise ValueError(
                "a manager keeps the schedules and the evidence of one net; give every net its own"
            )
        self.rules, self.every, self.task = rules, every, task
        self.survivors: Literal["keep", "renew"] = survivors
        self.newborn: Literal["zero", "mean"] = newborn
        self.step = 0  # of the next time that rules are applied
        self._global_step = 0  # of the trainer, when a batch last ended
        self._running: dict[str, gn.RuleManager] = {}  # by the names of their nets, in a fit
        self._pauses = ExitStack()  # of managers, while an evaluation runs

    def managers(self, module: "L.LightningModule") -> dict[str, gn.RuleManager]:
        """Returns the managers by the names of the nets that they change.

        Raises:
            ValueError: the module has no such net, or several and a single manager.
        """
        nets = nets_in(module)
        there = f"{type(module).__name__} has {', '.join(map(repr, nets)) or 'none'}"
        if isinstance(self.rules, gn.RuleManager):
            if len(nets) != 1:
                raise ValueError(
                    f"one manager is for one net, and {there}; give managers by name: {{name:"
                    " manager}"
                )
            return dict.fromkeys(nets, self.rules)
        managers = dict(self.rules or {})
        for name in managers:
            if name not in nets:
                raise ValueError(f"rules are given for a net at {name!r}, and {there}")
        return managers

    def setup(self, trainer: "L.Trainer", pl_module: "L.LightningModule", stage: str) -> None:
        """Makes the module put its nets into checkpoints and take them from there.

        Raises:
            ValueError: the trainer runs a strategy or a callback that cannot follow edits.
        """
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise ValueError(
                f"rules run on one device, and this trainer uses {type(trainer.strategy).__name__},"
                " which wraps the parameters that an edit changes. Say Trainer(devices=1,"
                " strategy='auto'), or train with gn.Distributed in a loop of your own"
            )
        others: list[Any] = vars(trainer).get("callbacks", [])  # which Lightning sets from outside
        averaging = [
            type(callback).__name__ for callback in others if isinstance(callback, _AVERAGING)
        ]
        if averaging:
            raise ValueError(
                f"{averaging[0]} averages a copy that does not follow edits, relation by relation"
                " with others than its own. Average in a hook of your own, with an AveragedModel"
                " and gn.attach(averaged, net)"
            )
        for hook in (on_save_checkpoint, on_load_checkpoint):
            setattr(pl_module, hook.__name__, MethodType(hook, pl_module))

    def on_fit_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Attaches the optimizers to the nets whose Parameters they hold."""
        self.managers(pl_module)  # raises before anything is trained
        held = [
            {id(p) for group in optimizer.param_groups for p in group["params"]}
            for optimizer in trainer.optimizers
        ]
        strangers = set().union(*held) - {id(parameter) for parameter in pl_module.parameters()}
        for name, net in nets_in(pl_module).items():
            mine = {id(parameter) for parameter in net.parameters() if parameter.requires_grad}
            followers = [
                o for o, theirs in zip(trainer.optimizers, held, strict=True) if mine & theirs
            ]
            if mine and strangers and not followers:
                raise gn.OptimizerError(
                    f"no optimizer holds the parameters of the net at {name!r}, and one holds"
                    " parameters that are not in the module: it was made before a checkpoint was"
                    " loaded. Make it in configure_optimizers"
                )
            for optimizer in followers:
                gn.attach(optimizer, net, survivors=self.survivors, newborn=self.newborn)

    def on_train_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Lets the recorders watch that the first steps need, once the sanity check is over."""
        self._pauses.close()  # of an evaluation that was interrupted
        self._global_step, self._running = trainer.global_step, self.managers(pl_module)
        for name, manager in self._running.items():
            manager.start(pl_module.get_submodule(name), self.step)  # pyright: ignore[reportArgumentType]

    def on_train_batch_end(
        self,
        trainer: "L.Trainer",
        pl_module: "L.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Applies the rules that are due, if an optimizer has stepped or a task has ended."""
        stepped, self._global_step = trainer.global_step != self._global_step, trainer.global_step
        last = trainer.is_last_batch
        task = self.task(trainer) if last and self.task is not None else None
        if not (stepped or task is not None if self.every == "step" else last):
            return
        for name, manager in self._running.items():
            manager.apply(pl_module.get_submodule(name), self.step, task=task)  # pyright: ignore[reportArgumentType]
        self.step += 1

    def on_validation_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Lets no recorder watch: rules learn nothing of data that is held out."""
        for manager in self.managers(pl_module).values():
            self._pauses.enter_context(manager.pausing())

    def on_validation_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Lets the recorders go on that watched before."""
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
        """Gives the rules the state they had; the nets are back in the module already."""
        managers = self.managers(pl_module)
        for name, manager in managers.items():
            # leaves the recorders of a net that was there before
            manager.start(nets_in(pl_module)[name])
        load_rules(checkpoint, managers)


def on_save_checkpoint(module: "L.LightningModule", checkpoint: dict[str, Any]) -> None:
    """Puts the nets into a checkpoint that has none, one of weights alone; then calls the hook of
    the class.
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
