"""gn.capture on a GPU: recordings against a plain loop, through edits and all other changes."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
)

import grapnet as gn
from grapnet.errors import CaptureError, EditError, OptimizerError
from grapnet.rules import ActivationRecorder, Every, GradientRecorder, PruneWeakest, RuleManager
from tests.following.captured import FEATURES, Grafted, Twins, batch, plain_model, small_net

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

DEVICE = "cuda"
# Kernels that add with atomic operations round differently every time.
ROUNDED = 1e-5


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


def optimizer_of(name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns what makes an optimizer with the settings that a captured step gives to it, so that a
    plain loop computes in the same precision.
    """

    def make(parameters: Any) -> torch.optim.Optimizer:
        rate = torch.tensor(options.get("lr", 0.01), device=DEVICE)
        settings = {"fused": True} if name == "SGD" else {"capturable": True}
        others = {key: value for key, value in options.items() if key != "lr"}
        return getattr(torch.optim, name)(parameters, lr=rate, **settings, **others)

    return make


adam = optimizer_of("Adam")


def cut(net: Any) -> None:
    with net.edit(reason="cut") as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=4))


def grow(net: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with net.edit(reason="grow", generator=generator) as edit:
        nodes = edit.add_nodes(1, count=2)
        edit.connect(net.layers[0], nodes)
        edit.connect(nodes, net.layers[2])


def freeze(net: Any) -> None:
    with net.edit(reason="freeze") as edit:
        edit.freeze(net.layers[0].outgoing().smallest(count=9))


def remove(net: Any) -> None:
    with net.edit(reason="remove") as edit:
        edit.remove_nodes(net.layers[1][:2])


def undo(net: Any) -> None:
    net.undo()


def redo(net: Any) -> None:
    net.redo()


def activations(net: Any) -> None:
    with net.edit(reason="activations") as edit:
        edit.set_activation(net.layers[1][:5], "tanh")


def deepen(net: Any) -> None:
    with net.edit(reason="deepen") as edit:
        edit.insert_layer(1)


def rule(net: Any) -> None:
    manager = RuleManager(seed=0)
    manager.add(PruneWeakest(fraction=0.05), schedule=Every(1))
    manager.apply(net, 1)


def trial(net: Any) -> None:
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=7))
        edit.commit()
        net(torch.ones(3, FEATURES, device=DEVICE))


def use(name: str) -> Callable[[Any], None]:
    return lambda net: net.execution.use(name)


EDITS = [cut, grow, freeze, undo, redo, remove, activations, trial, rule, use("family")]


@pytest.mark.parametrize("backend", ["dense", "family", "sparse", "auto", "reference"])
def test_200_steps_with_ten_edits_are_those_of_a_plain_loop(backend: str) -> None:
    twins = Twins(small_net(DEVICE, backend), adam)
    rtol = 0.0 if backend in ("dense", "auto") else ROUNDED
    edits = [*EDITS[:-1], use(backend)]
    for edit in edits:
        twins.train(20, rtol=rtol)
        twins.edit(edit)
    counts = twins.step.describe()
    assert counts["eager"] + counts["replayed"] == 200
    assert (counts["eager"], counts["recorded"]) == (10, 10)


@pytest.mark.parametrize("operate", [*EDITS, deepen], ids=lambda edit: edit.__name__)
def test_no_edit_goes_unnoticed(operate: Callable[[Any], None]) -> None:
    twins = Twins(small_net(DEVICE), adam)
    for edit in (cut, undo):  # so that something can be undone and redone
        twins.edit(edit)
    twins.train(4, rtol=ROUNDED)
    before = twins.step.describe()
    assert before["replayed"] == 3
    twins.edit(cut if operate is undo else lambda net: None)
    twins.edit(operate)
    twins.both()
    after = twins.step.describe()
    assert after["eager"] == before["eager"] + 1
    twins.train(4, rtol=ROUNDED)
    assert twins.step.describe()["replayed"] == before["replayed"] + 4


def test_an_edit_of_a_net_that_the_model_does_not_contain_is_noticed() -> None:
    teacher = small_net(DEVICE).eval()
    net = small_net(DEVICE)
    optimizer = adam(net.parameters())

    def distance(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return (net(x) - wanted).square().mean()

    step = gn.capture(distance, net, optimizer)
    x, _ = batch(0, DEVICE)
    for _ in range(3):
        step(x)
    cut(teacher)
    step(x)
    assert step.describe()["eager"] == 2


class Convolutions(nn.Module):
    """A small model to adopt."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x.view(-1, 1, 3, 4))).relu()
        return self.head(self.second(h).relu().flatten(1))


def test_adopted_models_with_opened_weights_train_alike() -> None:
    torch.backends.cudnn.deterministic = True
    model = Convolutions().to(DEVICE)
    twins = Twins(model, adam)
    x, _ = batch(0, DEVICE)
    nets = [gn.adopt(model, x) for model in twins.models]
    for net, optimizer in zip(nets, twins.optimizers, strict=True):
        gn.attach(optimizer, net)

    def each(operate: Callable[[Any, Any], None]) -> None:
        for net in nets:
            with net.edit() as edit:
                operate(net, edit)

    try:
        twins.train(4, rtol=ROUNDED)
        each(lambda net, edit: edit.cut(net.relations("head").smallest(fraction=0.5)))
        twins.train(4, rtol=ROUNDED)
        each(lambda net, edit: edit.cut(net.relations("second").smallest(fraction=0.3)))
        twins.train(4, rtol=ROUNDED)
        each(lambda net, edit: edit.remove_nodes(net.space("first")[:2]))
        twins.train(4, rtol=ROUNDED)
        for net in nets:
            net.undo()
        twins.train(4, rtol=ROUNDED)
        each(lambda net, edit: edit.freeze(net.relations("head").smallest(fraction=0.2)))
        twins.train(4, rtol=ROUNDED)
    finally:
        torch.backends.cudnn.deterministic = False
    counts = twins.step.describe()
    assert (counts["eager"], counts["recorded"], counts["replayed"]) == (6, 6, 18)


@pytest.mark.parametrize("make", [Grafted, plain_model])
def test_other_models_train_alike(make: Callable[[str], nn.Module]) -> None:
    twins = Twins(make(DEVICE), adam, clip=0.5)
    twins.train(20, rtol=ROUNDED)
    for model in twins.models:
        if isinstance(model, Grafted):
            cut(model.head)
    twins.train(20, rtol=ROUNDED)


NAMES = ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_that_is_taken_can_be_captured(name: str) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {}
    twins = Twins(small_net(DEVICE), optimizer_of(name, **options))
    twins.train(6, rtol=ROUNDED)
    twins.edit(cut)
    twins.train(6, rtol=ROUNDED)
    assert twins.step.describe()["replayed"] == 10


@pytest.mark.parametrize("fused", [True, False])
def test_a_plain_optimizer_gets_what_a_recording_needs(fused: bool) -> None:
    net = small_net(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
    x, y = batch(0, DEVICE)
    cross_entropy(net(x), y).backward()
    optimizer.step()  # so that there are counts of steps, on the host where it is not fused
    step = gn.capture(lambda x, y: cross_entropy(net(x), y), net, optimizer)
    for _ in range(4):
        step(x, y)
    assert step.describe()["replayed"] == 3
    assert optimizer.param_groups[0]["capturable"]
    weight = net.transitions[0].weight
    assert float(optimizer.state[weight]["step"]) == 5


def test_sgd_with_momentum_takes_new_layers() -> None:
    twins = Twins(small_net(DEVICE), optimizer_of("SGD", momentum=0.9))
    twins.train(3, rtol=ROUNDED)
    deepen(twins.models[0])
    x, y = batch(0, DEVICE)
    for _ in range(3):
        twins.step(x, y)
    assert twins.step.describe()["recorded"] == 2


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_write_the_learning_rate_of_the_recording(name: str) -> None:
    twins = Twins(small_net(DEVICE), adam)
    schedulers = [SCHEDULES[name](optimizer) for optimizer in twins.optimizers]
    for _ in range(12):
        twins.train(1, rtol=ROUNDED)
        for scheduler in schedulers:
            scheduler.step()
    counts = twins.step.describe()
    assert (counts["eager"], counts["recorded"]) == (1, 1)
    rates = [float(optimizer.param_groups[0]["lr"]) for optimizer in twins.optimizers]
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)
    assert rates[0] < 0.009


def test_a_number_that_is_assigned_as_learning_rate_reaches_the_recording() -> None:
    net = small_net(DEVICE).eval()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    plateau = ReduceLROnPlateau(optimizer, factor=0.0, patience=0)
    step = gn.capture(lambda x, y: cross_entropy(net(x), y), net, optimizer)
    for _ in range(3):
        step(*batch(0, DEVICE))
    optimizer.param_groups[0]["lr"] = 0.0
    before = net.transitions[0].weight.detach().clone()
    step(*batch(0, DEVICE))
    assert torch.equal(net.transitions[0].weight, before)
    optimizer.param_groups[0]["lr"] = 0.01
    step(*batch(0, DEVICE))
    assert not torch.equal(net.transitions[0].weight, before)
    for loss in (1.0, 2.0, 3.0):
        plateau.step(loss)
    before = net.transitions[0].weight.detach().clone()
    step(*batch(0, DEVICE))
    assert torch.equal(net.transitions[0].weight, before)
    assert step.describe()["eager"] == 1


def test_numbers_that_change_in_every_step_keep_it_from_being_recorded() -> None:
    twins = Twins(small_net(DEVICE), adam)
    cycles = [OneCycleLR(optimizer, 0.02, 20) for optimizer in twins.optimizers]
    for _ in range(5):
        twins.train(1, rtol=ROUNDED)
        for cycle in cycles:
            cycle.step()
    assert twins.step.describe()["replayed"] == 0


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_scaler_scales_alike(fused: bool, clip: float | None) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=torch.tensor(0.01, device=DEVICE), capturable=True, fused=fused
        )

    def scale() -> torch.amp.GradScaler:
        # The first steps overflow.
        return torch.amp.GradScaler(DEVICE, init_scale=2.0**40, growth_interval=3)

    twins = Twins(small_net(DEVICE), make, clip=clip, scale=scale, autocast=torch.float16)
    for _ in range(40):
        torch.testing.assert_close(*twins.both(), rtol=1e-3, atol=1e-4)
    twins.edit(cut)
    for _ in range(10):
        torch.testing.assert_close(*twins.both(), rtol=1e-3, atol=1e-4)
    scales = [scaler.get_scale() for scaler in twins.scalers if scaler is not None]
    assert scales[0] == scales[1] < 2.0**40
    steps = []
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        steps += [float(optimizer.state[p]["step"]) for p in model.parameters()]
    assert len(set(steps)) == 1
    assert 0 < steps[0] < 50
    # Where the first step overflows, an optimizer that is not fused gets its state at a later one.
    assert twins.step.describe()["eager"] == (2 if fused else 3)


@pytest.mark.parametrize("outside", [True, False])
def test_mixed_precision_reads_the_weights_of_every_step(outside: bool) -> None:
    twins = Twins(small_net(DEVICE).eval(), adam, autocast=None if outside else torch.bfloat16)
    losses = []
    for _ in range(30):
        if outside:
            with torch.autocast(DEVICE, torch.bfloat16):
                losses.append(float(twins.step(*batch(0, DEVICE))))
        else:
            losses.append(float(twins.step(*batch(0, DEVICE))))
    assert twins.step.describe()["replayed"] == 29
    assert losses[-1] < 0.8 * losses[0]
    assert len(set(losses)) > 15


def test_batches_of_several_shapes_have_recordings_of_their_own() -> None:
    twins = Twins(small_net(DEVICE), adam)
    for rows in (32, 20, 32, 20, 32, 20, 8, 8, 20):
        torch.testing.assert_close(*twins.both(rows), rtol=ROUNDED, atol=ROUNDED)
    twins.compare(rtol=ROUNDED)
    counts = twins.step.describe()
    assert (counts["eager"], counts["recordings"], counts["replayed"]) == (3, 3, 6)


def test_batches_come_from_the_host_and_stay_as_they_were() -> None:
    net = small_net(DEVICE).eval()
    step = gn.capture(lambda x, y: cross_entropy(net(x.mul_(2)), y), net, adam(net.parameters()))
    x, y = batch(0, "cpu")
    before = x.clone()
    losses = [step(x, y) for _ in range(4)]
    assert torch.equal(x, before)
    assert len({float(loss) for loss in losses}) == 4
    # Losses of earlier calls are not written over.
    assert losses[0] > losses[3]


def test_results_beside_the_loss_are_those_of_the_call() -> None:
    net = small_net(DEVICE).eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(x)
        return cross_entropy(logits, y), logits

    step = gn.capture(function, net, optimizer)
    for seed in range(4):
        x, y = batch(seed, DEVICE)
        _, logits = step(x, y)
        torch.testing.assert_close(logits, net(x).detach(), rtol=ROUNDED, atol=ROUNDED)
    assert step.describe()["replayed"] == 3


@pytest.mark.parametrize("recorder", [ActivationRecorder(1), GradientRecorder(0)])
def test_armed_recorders_see_every_step(recorder: Any) -> None:
    twins = Twins(small_net(DEVICE), adam)
    twins.train(3, rtol=ROUNDED)
    recorder.arm(twins.models[0])
    twins.train(3, rtol=ROUNDED)
    assert recorder.count > 0
    recorder.disarm()
    count = recorder.count
    twins.train(3, rtol=ROUNDED)
    assert recorder.count == count
    counts = twins.step.describe()
    assert (counts["eager"], counts["recorded"], counts["replayed"]) == (4, 1, 5)


def test_hooks_are_called_in_every_step() -> None:
    net = small_net(DEVICE)
    optimizer = adam(net.parameters())
    step = gn.capture(lambda x, y: cross_entropy(net(x), y), net, optimizer)
    seen: list[str] = []
    weight = net.transitions[0].weight

    def note(name: str) -> Callable[..., None]:
        return lambda *given: seen.append(name)

    registered = {
        "module": lambda: net.layers[1].register_forward_hook(note("module")),
        "parameter": lambda: weight.register_hook(note("parameter")),
        "accumulated": lambda: weight.register_post_accumulate_grad_hook(note("accumulated")),
        "optimizer": lambda: optimizer.register_step_post_hook(note("optimizer")),
        "modules": lambda: nn.modules.module.register_module_forward_hook(note("modules")),
    }
    for name, register in registered.items():
        for _ in range(3):
            step(*batch(0, DEVICE))
        seen.clear()
        handle = register()
        step(*batch(0, DEVICE))
        step(*batch(0, DEVICE))
        handle.remove()
        assert seen.count(name) >= 2
    step(*batch(0, DEVICE))
    assert step.describe()["eager"] == 1 + 2 * len(registered)


def changed_dropout(twins: Twins) -> None:
    twins.edit(lambda net: setattr(net.layers[1], "dropout", 0.5))


def changed_mode(twins: Twins) -> None:
    twins.edit(lambda net: net.eval())


def loaded(twins: Twins) -> None:
    twins.edit(lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True))


def moved(twins: Twins) -> None:
    twins.edit(lambda net: net.to(torch.float64).to(torch.float32))


def replaced(twins: Twins) -> None:
    for net in twins.models:
        weight = net.get_parameter("transitions.0.weight")
        weight.data = weight.data.clone()


def held(twins: Twins) -> None:
    twins.edit(lambda net: net.get_parameter("layers.2.bias").requires_grad_(False))


def decayed(twins: Twins) -> None:
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.1


def reloaded(twins: Twins) -> None:
    for optimizer in twins.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def attentive(twins: Twins) -> None:
    for net in twins.models:
        generator = torch.Generator().manual_seed(3)
        net.execution.use("attention", transition=1, generator=generator)


CHANGES = [
    changed_dropout,
    changed_mode,
    loaded,
    moved,
    replaced,
    held,
    decayed,
    reloaded,
    attentive,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_other_change_goes_unnoticed(change: Callable[[Twins], None]) -> None:
    twins = Twins(small_net(DEVICE), adam)
    for _ in range(4):
        twins.both()
    before = twins.step.describe()
    change(twins)
    for _ in range(4):
        torch.testing.assert_close(*twins.both(), rtol=ROUNDED, atol=ROUNDED)
    after = twins.step.describe()
    is_noticed = after["eager"] > before["eager"]
    # Weights that are copied into the present ones need no other recording.
    assert is_noticed or change is loaded


def test_what_is_equal_needs_no_other_recording() -> None:
    twins = Twins(small_net(DEVICE), adam)
    twins.train(3, rtol=ROUNDED)
    net = twins.models[0]
    assert isinstance(net, gn.GrapNet)
    with torch.no_grad():
        net.eval()(torch.ones(2, FEATURES, device=DEVICE))
    net.train()
    net.count()
    net.layers[1].dropout = 0.2
    twins.optimizers[0].param_groups[0]["betas"] = (0.9, 0.999)
    twins.optimizers[0].zero_grad()
    net.load_state_dict(net.state_dict())
    twins.train(3, rtol=ROUNDED)
    assert twins.step.describe()["eager"] == 1


def test_two_captured_steps_of_one_model_take_turns() -> None:
    net = small_net(DEVICE)
    optimizer = adam(net.parameters())
    twin = copy.deepcopy(net)
    other = adam(twin.parameters())

    def squares(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    first = gn.capture(lambda x: squares(net, x), net, optimizer)
    second = gn.capture(lambda x, y: entropy(net, x, y), net, optimizer)
    for seed in range(6):
        x, y = batch(seed, DEVICE)
        for captured, loss, given in ((first, squares, (x,)), (second, entropy, (x, y))):
            torch.manual_seed(seed)
            captured(*given)
            torch.manual_seed(seed)
            other.zero_grad()
            loss(twin, *given).backward()
            other.step()
            for one, two in zip(net.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one, two, rtol=1e-4, atol=ROUNDED)
                torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=ROUNDED)
    assert first.describe()["replayed"] == second.describe()["replayed"] == 5


def test_an_error_while_it_is_recorded_changes_nothing() -> None:
    net = small_net(DEVICE)
    optimizer = adam(net.parameters())
    fails = [False]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(net(x), y)
        if fails[0]:
            raise KeyError
        return loss

    step = gn.capture(loss_of, net, optimizer)
    step(*batch(0, DEVICE))
    before = [p.detach().clone() for p in net.parameters()]
    gradients = [p.grad for p in net.parameters()]
    state = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
    fails[0] = True
    with pytest.raises(KeyError):
        step(*batch(0, DEVICE))
    for p, weight, gradient in zip(net.parameters(), before, gradients, strict=True):
        assert torch.equal(p, weight)
        assert p.grad is gradient
    present = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
    assert torch.equal(present, state)
    fails[0] = False
    for _ in range(3):
        step(*batch(0, DEVICE))
    counts = step.describe()
    assert (counts["eager"], counts["recorded"], counts["replayed"]) == (2, 1, 2)


def test_a_step_that_needs_the_host_is_refused_and_can_be_mended() -> None:
    net = small_net(DEVICE)
    optimizer = adam(net.parameters())
    scale = [True]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(net(x), y)
        if scale[0]:
            loss = loss / loss.item()
        return loss

    step = gn.capture(loss_of, net, optimizer)
    for _ in range(2):
        step(*batch(0, DEVICE))
        before = net.transitions[0].weight.detach().clone()
        with pytest.raises(CaptureError):
            step(*batch(0, DEVICE))
        assert torch.equal(net.transitions[0].weight, before)
    scale[0] = False
    for _ in range(3):
        step(*batch(0, DEVICE))
    assert step.describe()["replayed"] == 2
    # Random numbers outside of the step, too.
    assert torch.rand(3, device=DEVICE).isfinite().all()


def test_an_optimizer_that_missed_an_edit_is_refused() -> None:
    net = small_net(DEVICE)
    optimizer = adam(net.parameters())
    step = gn.capture(lambda x, y: cross_entropy(net(x), y), net, optimizer)
    for _ in range(3):
        step(*batch(0, DEVICE))
    cut(net)
    with pytest.raises(OptimizerError):
        step(*batch(0, DEVICE))


def test_memory_does_not_grow_with_edits() -> None:
    net = gn.GrapNet([256, 1024, 256], density=0.5, device=DEVICE)
    optimizer = adam(net.parameters())
    gn.attach(optimizer, net)
    step = gn.capture(lambda x: net(x).square().mean(), net, optimizer)
    x = torch.randn(2048, 256, device=DEVICE)

    def train() -> int:
        for _ in range(4):
            step(x)
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    before = train()
    for _ in range(20):
        with net.edit(reason="cut") as edit:
            edit.cut(net.layers[0].outgoing().smallest(count=1000))
        after = train()
    assert step.describe()["recorded"] == 21
    assert after <= 1.1 * before
    step.release()
    assert step.describe()["recordings"] == 0


def test_a_commit_has_the_memory_of_the_recordings_and_a_refused_edit_leaves_it() -> None:
    net = small_net(DEVICE)
    optimizer = adam(net.parameters())
    gn.attach(optimizer, net)
    step = gn.capture(lambda x, y: cross_entropy(net(x), y), net, optimizer)
    for _ in range(3):
        step(*batch(0, DEVICE))
    with pytest.raises(EditError), net.edit(reason="cut all") as edit:
        edit.cut(net.layers[1].outgoing())
    assert step.describe()["recordings"] == 1
    step(*batch(0, DEVICE))
    assert step.describe()["eager"] == 1
    cut(net)
    assert step.describe()["recordings"] == 0


def test_replays_tell_autograd_that_weights_have_changed() -> None:
    net = small_net(DEVICE).eval()
    optimizer = adam(net.parameters())
    step = gn.capture(lambda x, y: cross_entropy(net(x), y), net, optimizer)
    for _ in range(3):
        step(*batch(0, DEVICE))
    x, y = batch(0, DEVICE)
    loss = cross_entropy(net(x), y)
    step(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_evaluation_between_replays_reads_the_present_weights() -> None:
    twins = Twins(small_net(DEVICE), adam)
    x, _ = batch(0, DEVICE)
    for _ in range(5):
        twins.both()
        outputs = []
        for net in twins.models:
            with torch.no_grad():
                outputs.append(net.eval()(x))
            net.train()
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=ROUNDED)
    assert twins.step.describe()["replayed"] == 4
