"""gn.open: a checkpoint in memory, its edits, and what follows them into the next file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from tests.checkpoint.files import build, parse
from tests.checkpoint.models import values
from tests.checkpoint.mutations import fold_details, unfold_details

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 6) -> None:
    """Takes three steps."""
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def trained(path: Path, **options: Any) -> tuple[gn.GrapNet, torch.optim.Optimizer]:
    """Saves a trained net with its optimizer and returns both."""
    net = gn.GrapNet([6, 8, 4], generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    train(net, optimizer)
    gn.save(path, net, optimizer=optimizer, epoch=3, **options)
    return net, optimizer


def cut(net: gn.GrapNet) -> None:
    with net.edit(reason="cut") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.25))


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        optimizer.state[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def assert_same_states(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for first, second in zip(states(one), states(other), strict=True):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[key])), key


def test_an_archive_tells_what_a_file_holds(tmp_path: Path) -> None:
    net, _ = trained(tmp_path / "net", undo=True)
    file = gn.open(tmp_path / "net")
    assert file.path == tmp_path / "net"
    assert not file.is_model
    assert file.undo
    assert file.history == "outline"
    assert file.kinds == {"optimizer": "Adam", "epoch": "data"}
    assert file.extras["epoch"] == 3
    assert file.extras["optimizer"]["param_groups"][0]["lr"] == 1e-3
    assert file.nbytes == (tmp_path / "net").stat().st_size
    assert file.sizes["values"] == 4 * (net.count().relations + net.count().biases)
    assert sum(file.sizes.values()) < file.nbytes
    assert values(file.net) == values(net)


def test_an_edit_of_an_archive_is_the_edit_of_the_live_net(tmp_path: Path) -> None:
    net, optimizer = trained(tmp_path / "net")
    cut(net)
    file = gn.open(tmp_path / "net")
    cut(file.net)
    saved = file.save(tmp_path / "cut")
    assert saved.extras == {"optimizer": "followed", "epoch": "kept"}
    assert saved.nbytes == (tmp_path / "cut").stat().st_size
    loaded = gn.load(tmp_path / "cut")
    assert values(loaded) == values(net)
    resumed = torch.optim.Adam(loaded.parameters())
    assert gn.restore(tmp_path / "cut", optimizer=resumed) == {"epoch": 3}
    assert_same_states(resumed, optimizer)


def test_undo_and_its_optimizer_state_go_through_an_archive(tmp_path: Path) -> None:
    net, optimizer = trained(tmp_path / "net")
    cut(net)
    gn.save(tmp_path / "net", net, undo=True, optimizer=optimizer)
    net.undo()
    file = gn.open(tmp_path / "net")
    file.net.undo()
    file.save()
    loaded = gn.load(tmp_path / "net")
    resumed = torch.optim.Adam(loaded.parameters())
    gn.restore(tmp_path / "net", optimizer=resumed)
    assert values(loaded) == values(net)
    assert_same_states(resumed, optimizer)
    loaded.redo()


def test_a_file_that_nobody_edited_is_written_as_it_was(tmp_path: Path) -> None:
    trained(tmp_path / "net", undo=True)
    gn.open(tmp_path / "net").save(tmp_path / "again")
    one = gn.open(tmp_path / "net")
    other = gn.open(tmp_path / "again")
    assert one.sizes == other.sizes
    assert values(one.net) == values(other.net)


def test_a_preview_writes_nothing_and_knows_the_size(tmp_path: Path) -> None:
    trained(tmp_path / "net")
    before = (tmp_path / "net").read_bytes()
    file = gn.open(tmp_path / "net")
    cut(file.net)
    preview = file.preview(drop=["optimizer"])
    assert list(tmp_path.iterdir()) == [tmp_path / "net"]
    assert (tmp_path / "net").read_bytes() == before
    saved = file.save(tmp_path / "cut", drop=["optimizer"])
    assert saved == preview
    assert saved.extras == {"optimizer": "dropped", "epoch": "kept"}
    assert gn.open(tmp_path / "cut").kinds == {"epoch": "data"}


def test_bytes_serve_as_a_file(tmp_path: Path) -> None:
    net, optimizer = trained(tmp_path / "net")
    data = gn.Archive.of(net, optimizer=optimizer).to_bytes()
    with torch.no_grad():
        net.transitions[0].weight.zero_()
    file = gn.open(data)
    assert file.path is None
    assert float(file.net.transitions[0].weight.detach().abs().sum()) > 0
    resumed = torch.optim.Adam(file.net.parameters())
    file.load(optimizer=resumed)
    assert_same_states(resumed, optimizer)
    with pytest.raises(ValueError, match="path"):
        file.save()
    with pytest.raises(gn.CheckpointError):
        gn.open(data[:-1])


def test_an_average_follows_and_what_cannot_follow_stops_the_save(tmp_path: Path) -> None:
    net, _ = trained(tmp_path / "net")
    average = AveragedModel(net)
    scores = torch.rand(net.transitions[0].size)
    gn.save(tmp_path / "net", net, average=average, scores=scores)
    file = gn.open(tmp_path / "net")
    cut(file.net)
    before = (tmp_path / "net").read_bytes()
    with pytest.raises(gn.CheckpointError, match="scores"):
        file.save()
    assert (tmp_path / "net").read_bytes() == before
    saved = file.save(keep=["scores"])
    assert saved.extras == {"average": "followed", "scores": "kept"}
    again = gn.open(tmp_path / "net")
    assert torch.equal(again.extras["scores"], scores)
    averaged = AveragedModel(again.net)
    again.load(average=averaged)
    assert torch.equal(averaged.module.transitions[0].weight, again.net.transitions[0].weight)
    with pytest.raises(gn.CheckpointError, match="nothing"):
        file.save(drop=["nothing"])


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(gn.GrapNet([6, 5]), nn.BatchNorm1d(5), gn.GrapNet([5, 4]))


def test_both_nets_of_a_model_are_edited_and_one_optimizer_follows_both(tmp_path: Path) -> None:
    live = model()
    optimizer = torch.optim.Adam(live.parameters())
    gn.attach(optimizer, live)
    train(live, optimizer)
    gn.save(tmp_path / "model", live, optimizer=optimizer)
    file = gn.open(tmp_path / "model")
    assert file.is_model
    assert list(file.nets) == ["0", "2"]
    assert "1.running_mean" in file.rest
    with pytest.raises(gn.CheckpointError, match="0, 2"):
        _ = file.net
    for net in (live[0], live[2], *file.nets.values()):
        cut(net)
    assert file.save().extras == {"optimizer": "followed"}
    restored = gn.open(tmp_path / "model").model(model())
    resumed = torch.optim.Adam(restored.parameters())
    gn.open(tmp_path / "model").load(optimizer=resumed)
    assert_same_states(resumed, optimizer)
    x = torch.randn(4, 6)
    assert torch.equal(restored.eval()(x), live.eval()(x))


def test_a_smaller_file_on_request(tmp_path: Path) -> None:
    net, optimizer = trained(tmp_path / "net")
    cut(net)
    gn.save(tmp_path / "net", net, undo=True, history="full", optimizer=optimizer)
    file = gn.open(tmp_path / "net")
    saved = file.save(tmp_path / "small", undo=False, history="outline")
    assert saved.nbytes < file.nbytes
    small = gn.open(tmp_path / "small")
    assert not small.undo
    assert small.history == "outline"
    with pytest.raises(gn.HistoryError):
        small.net.undo()
    with pytest.raises(gn.HistoryError):
        small.net.diff(0)
    assert small.net.history[-1].reason == "cut"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_is_one_that_it_can_step_with(
    name: str, tmp_path: Path
) -> None:
    live = nn.Sequential(gn.GrapNet([6, 5]), nn.Linear(5, 4))
    optimizer = OPTIMIZERS[name](live.parameters())
    train(live, optimizer)
    gn.save(tmp_path / "model", live, optimizer=optimizer)
    other = nn.Sequential(gn.GrapNet([6, 5]), nn.Linear(5, 4))
    gn.restore(tmp_path / "model", into=other)
    resumed = OPTIMIZERS[name](other.parameters())
    gn.restore(tmp_path / "model", optimizer=resumed)
    train(live, optimizer)
    train(other, resumed)
    for one, two in zip(live.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


class Own(torch.optim.SGD):
    """An optimizer of a class that is not torch's, with an option that is no number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.5)
        for group in self.param_groups:
            group["notes"] = {"made": "here"}


def test_what_cannot_follow_stays_while_its_parameters_do_not_move(tmp_path: Path) -> None:
    net = gn.GrapNet([6, 8, 4])
    optimizer = Own(net.parameters())
    train(net, optimizer)
    gn.save(tmp_path / "net", net, optimizer=optimizer)
    file = gn.open(tmp_path / "net")
    with file.net.edit() as edit:
        edit.set_owner(file.net.layers[1][:2], "task")
    assert file.save(tmp_path / "renamed").extras == {"optimizer": "kept"}
    loaded = gn.load(tmp_path / "renamed")
    resumed = Own(loaded.parameters())
    gn.restore(tmp_path / "renamed", optimizer=resumed)
    assert_same_states(resumed, optimizer)
    cut(file.net)
    with pytest.raises(gn.CheckpointError, match="optimizer"):
        file.save(tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


def test_groups_of_an_optimizer_follow_by_their_places(tmp_path: Path) -> None:
    live = model()
    groups = [
        {"params": list(live[1].parameters()), "lr": 0.1},
        {"params": list(live[0].parameters()), "lr": 0.2},
        {"params": list(live[2].parameters()), "lr": 0.3},
    ]
    optimizer = torch.optim.Adam(groups)
    gn.attach(optimizer, live)
    train(live, optimizer)
    gn.save(tmp_path / "model", live, optimizer=optimizer)
    file = gn.open(tmp_path / "model")
    for net in (live[0], live[2], *file.nets.values()):
        cut(net)
    file.save()
    again = gn.open(tmp_path / "model")
    restored = again.model(model())
    others = [
        {"params": list(restored[1].parameters())},
        {"params": list(restored[0].parameters())},
        {"params": list(restored[2].parameters())},
    ]
    resumed = torch.optim.Adam(others)
    again.load(optimizer=resumed)
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.2, 0.3]
    assert_same_states(resumed, optimizer)


def test_an_edit_of_one_net_leaves_what_undo_gives_back_in_the_other(tmp_path: Path) -> None:
    live = model()
    optimizer = torch.optim.Adam(live.parameters())
    gn.attach(optimizer, live)
    train(live, optimizer)
    cut(live[0])
    gn.save(tmp_path / "model", live, undo=True, optimizer=optimizer)
    file = gn.open(tmp_path / "model")
    cut(file.nets["2"])
    file.save()
    restored = gn.open(tmp_path / "model").model(model())
    resumed = torch.optim.Adam(restored.parameters())
    gn.restore(tmp_path / "model", optimizer=resumed)
    gn.attach(resumed, restored)
    cut(live[2])
    for each in (live, restored):
        each[0].undo()
    assert_same_states(resumed, optimizer)


def test_data_that_is_not_about_what_moved_stays(tmp_path: Path) -> None:
    net = gn.GrapNet([6, 8, 4])
    losses = torch.rand(7)
    gn.save(tmp_path / "net", net, losses=losses)
    file = gn.open(tmp_path / "net")
    cut(file.net)
    assert file.save().extras == {"losses": "kept"}
    assert torch.equal(gn.open(tmp_path / "net").extras["losses"], losses)


def test_an_existing_file_stays_on_request(tmp_path: Path) -> None:
    net, _ = trained(tmp_path / "net")
    (tmp_path / "other").write_text("mine")
    with pytest.raises(FileExistsError):
        gn.open(tmp_path / "net").save(tmp_path / "other", replace=False)
    assert (tmp_path / "other").read_text() == "mine"
    assert not gn.Archive.of(net).undo
    assert gn.Archive.of(net).history == "outline"


def test_the_warning_of_an_unknown_backend_names_the_line_that_loads(tmp_path: Path) -> None:
    gn.save(tmp_path / "net", gn.GrapNet([3, 2]))
    document, tensors = parse((tmp_path / "net").read_bytes())
    document["execution"] = ["own"]
    (tmp_path / "net").write_bytes(build(json.dumps(document), tensors))
    with pytest.warns(UserWarning, match="own") as found:
        gn.load(tmp_path / "net")
    assert [warning.filename for warning in found] == [__file__]


class Interrupted:
    """An object that is interrupted when it takes its state for the first time."""

    taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken += 1
        if self.taken == 1:
            raise KeyboardInterrupt


def test_an_interrupt_is_passed_on_and_everything_is_as_before(tmp_path: Path) -> None:
    net, _ = trained(tmp_path / "net")
    gn.save(tmp_path / "net", net, first=torch.Generator(), slow=Interrupted())
    generator = torch.Generator().manual_seed(9)
    before = generator.get_state()
    with pytest.raises(KeyboardInterrupt):
        gn.restore(tmp_path / "net", first=generator, slow=Interrupted())
    assert torch.equal(generator.get_state(), before)


def forge(path: Path, change: Callable[[Any, dict[str, Tensor]], None]) -> None:
    """Changes a file, the details of its journal included, under a right digest."""
    document, tensors = parse(path.read_bytes())
    unfold_details(document, tensors)
    change(document, tensors)
    path.write_bytes(build(fold_details(json.dumps(document), tensors), tensors))


@pytest.mark.parametrize("rate", ["fast", None, [0.1]], ids=str)
def test_options_of_another_type_are_refused(rate: Any, tmp_path: Path) -> None:
    trained(tmp_path / "net")

    def change(document: Any, tensors: dict[str, Tensor]) -> None:
        group = document["extras"]["optimizer"]["tree"]["dict"][1][1]["list"][0]["dict"]
        entry = next(pair for pair in group if pair[0] == "lr")
        entry[1] = {"list": rate} if isinstance(rate, list) else rate

    forge(tmp_path / "net", change)
    net = gn.load(tmp_path / "net")
    with pytest.raises(gn.CheckpointError, match="lr"):
        gn.restore(tmp_path / "net", optimizer=torch.optim.Adam(net.parameters()))


@pytest.mark.parametrize(
    "places", [[["0"], ["0"]], [["0"], []], [["0"], ["0.1"]], [["0", "0"], ["2"]]]
)
def test_places_that_nets_cannot_have_are_refused(places: Any, tmp_path: Path) -> None:
    gn.save(tmp_path / "model", model())

    def change(document: Any, tensors: dict[str, Tensor]) -> None:
        for part, names in zip(document["nets"], places, strict=True):
            part["places"] = names

    forge(tmp_path / "model", change)
    with pytest.raises(gn.CheckpointError, match="nets"):
        gn.open(tmp_path / "model")


def transition_change(document: Any) -> list[Any]:
    """Returns the first change of a transition in the details of a journal, as key and record."""
    change = document["journal"]["details"]["dict"][0][1]["list"][0]["record"]
    return change[2]["dict"][0]


def out_of_range(document: Any, tensors: dict[str, Tensor]) -> None:
    transition_change(document)[0] = 2


def out_of_order(document: Any, tensors: dict[str, Tensor]) -> None:
    flat = tensors["journal.pool.int32"]
    # the positions of what the commit brought
    flat[:2] = flat[:2].flip(0)


def turns_a_newborn(document: Any, tensors: dict[str, Tensor]) -> None:
    weights = transition_change(document)[1]["record"][4]["record"]
    assert weights[4] == {"tensor": ["int32", 0]}
    weights[4] = {"tensor": ["int32", 1]}
    flat = tensors["journal.pool.int32"]
    tensors["journal.pool.int32"] = torch.cat([flat, flat[:1]])


def has_gradients(document: Any, tensors: dict[str, Tensor]) -> None:
    weights = transition_change(document)[1]["record"][4]["record"]
    assert weights[8] is None
    weights[8] = {"tensor": ["bool", 0]}


def has_no_change(document: Any, tensors: dict[str, Tensor]) -> None:
    document["journal"]["details"]["dict"][0][1] = {"list": []}
    for name in [name for name in tensors if name.startswith("journal.pool.")]:
        del tensors[name]


@pytest.mark.parametrize(
    "change", [out_of_range, out_of_order, turns_a_newborn, has_gradients, has_no_change]
)
def test_details_that_cannot_be_are_refused(
    change: Callable[[Any, dict[str, Tensor]], None], tmp_path: Path
) -> None:
    ends = torch.tensor([0, 1])
    net = gn.GrapNet.from_relations([4, 3, 2], [(ends, ends), (ends, ends)])
    with net.edit() as edit:
        edit.connect(net.layers[0][2:], net.layers[1][2])
    gn.save(tmp_path / "net", net, history="full")
    assert gn.load(tmp_path / "net").version == 1
    forge(tmp_path / "net", change)
    with pytest.raises(gn.CheckpointError, match="journal"):
        gn.load(tmp_path / "net")


def unknown_uid(document: Any, tensors: dict[str, Tensor]) -> None:
    tensors["journal.pool.int64"][0] = 10**6


def narrow_uids(document: Any, tensors: dict[str, Tensor]) -> None:
    details = json.dumps(document["journal"]["details"]).replace('"int64"', '"int16"')
    document["journal"]["details"] = json.loads(details)
    tensors["journal.pool.int16"] = tensors.pop("journal.pool.int64").to(torch.int16)


def much_dropout(document: Any, tensors: dict[str, Tensor]) -> None:
    document["graph"]["layers"][1]["dropout"] = 1.5


@pytest.mark.parametrize("change", [unknown_uid, narrow_uids, much_dropout])
def test_nodes_that_cannot_be_are_refused(
    change: Callable[[Any, dict[str, Tensor]], None], tmp_path: Path
) -> None:
    net = gn.GrapNet([4, 3, 2])
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
    gn.save(tmp_path / "net", net, history="full")
    assert gn.load(tmp_path / "net").version == 1
    forge(tmp_path / "net", change)
    with pytest.raises(gn.CheckpointError):
        gn.load(tmp_path / "net")


def test_what_an_archive_hands_out_is_as_it_is_after_the_edits(tmp_path: Path) -> None:
    net, optimizer = trained(tmp_path / "net")
    file = gn.open(tmp_path / "net")
    for each in (net, file.net):
        with each.edit() as edit:
            edit.cut(each.layers[0].outgoing()[:3])
            edit.connect(each.layers[0][5], edit.add_nodes(1, 3), weights="zero")
    resumed = torch.optim.Adam(file.net.parameters())
    file.load(optimizer=resumed)
    assert_same_states(resumed, optimizer)


def test_what_an_archive_hands_out_has_memory_of_its_own(tmp_path: Path) -> None:
    trained(tmp_path / "net")
    file = gn.open(tmp_path / "net")
    optimizers = []
    for _ in range(2):
        optimizer = torch.optim.Adam(file.net.parameters())
        file.load(optimizer=optimizer)
        optimizers.append(optimizer)
    before = file.extras["optimizer"]["state"][0]["exp_avg"]
    train(file.net, optimizers[0])
    assert torch.equal(states(optimizers[1])[0]["exp_avg"], before)
    assert torch.equal(file.extras["optimizer"]["state"][0]["exp_avg"], before)
    file.extras["optimizer"]["state"].clear()
    assert file.extras["optimizer"]["state"]
    gn.save(tmp_path / "model", model())
    file = gn.open(tmp_path / "model")
    one = file.model(model())
    other = file.model(model())
    kept = other[0].transitions[0].weight.detach().clone()
    with torch.no_grad():
        one[0].transitions[0].weight.add_(1)
    assert torch.equal(other[0].transitions[0].weight, kept)


def test_a_model_gets_the_nets_after_their_edits(tmp_path: Path) -> None:
    gn.save(tmp_path / "model", model())
    file = gn.open(tmp_path / "model")
    cut(file.nets["0"])
    restored = file.model(model())
    assert values(restored[0]) == values(file.nets["0"])
    assert restored[0].version == 1
    file.nets["0"].undo()
    assert file.model(model())[0].version == 2


def test_a_misspelt_history_leaves_the_file_alone(tmp_path: Path) -> None:
    net, _ = trained(tmp_path / "net")
    before = (tmp_path / "net").read_bytes()
    wrong: Any = "all"
    with pytest.raises(ValueError, match="history"):
        gn.save(tmp_path / "net", net, history=wrong)
    with pytest.raises(ValueError, match="history"):
        gn.open(tmp_path / "net").save(history=wrong)
    assert (tmp_path / "net").read_bytes() == before


def test_a_file_is_saved_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "net")
    monkeypatch.chdir(tmp_path)
    file = gn.open("net")
    cut(file.net)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.save()
    assert gn.load(tmp_path / "net").version == 1


def test_a_backend_with_parameters_stops_an_optimizer_from_following(tmp_path: Path) -> None:
    trained(tmp_path / "net")
    file = gn.open(tmp_path / "net")
    file.net.execution.use("attention", transition=0)
    with pytest.raises(gn.CheckpointError, match="optimizer"):
        file.save(tmp_path / "attended")
    assert not (tmp_path / "attended").exists()


def test_options_of_schedulers_and_of_users_may_differ(tmp_path: Path) -> None:
    net, optimizer = trained(tmp_path / "net")
    resumed = torch.optim.Adam([{"params": list(net.parameters()), "name": "head"}])
    torch.optim.lr_scheduler.StepLR(resumed, 3)
    assert "initial_lr" in resumed.param_groups[0]
    gn.restore(tmp_path / "net", optimizer=resumed)
    assert_same_states(resumed, optimizer)


def test_a_restore_fires_no_hooks_of_steps(tmp_path: Path) -> None:
    net, _ = trained(tmp_path / "net")
    seen = []
    hook = register_optimizer_step_post_hook(lambda *given: seen.append(given))
    try:
        gn.restore(tmp_path / "net", optimizer=torch.optim.Adam(net.parameters()))
    finally:
        hook.remove()
    assert seen == []


def test_blame_raises_when_a_later_commit_has_no_details(tmp_path: Path) -> None:
    net = gn.GrapNet([4, 3, 2])
    parent = net.layers[0][0]
    child = net.layers[1][1]
    with net.edit(reason="first") as edit:
        edit.cut(parent.outgoing(to=child))
    with net.edit(reason="back") as edit:
        edit.connect(parent, child)
    net.undo()
    with net.edit(reason="another") as edit:
        edit.cut(net.layers[1].outgoing()[:1])
    assert net.blame(parent, child).version == 3
    gn.save(tmp_path / "net", net, undo=True)
    loaded = gn.load(tmp_path / "net")
    assert [commit.has_details for commit in loaded.history] == [True, False, False, True]
    with pytest.raises(gn.HistoryError):
        loaded.blame(parent.uid, child.uid)
