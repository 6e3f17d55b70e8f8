"""gn.open: a checkpoint in memory, its edits, and what follows them into the next file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from tests.checkpoint.files import build, parse
from tests.checkpoint.models import values

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "nadam": lambda p: torch.optim.NAdam(p),
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
    data = gn.checkpoint.Archive.of(net, optimizer=optimizer).to_bytes()
    with torch.no_grad():
        net.transitions[0].weight.zero_()
    file = gn.open(data)
    assert file.path is None
    assert file.nbytes == len(data)
    assert float(file.net.transitions[0].weight.detach().abs().sum()) > 0
    resumed = torch.optim.Adam(file.net.parameters())
    file.load(optimizer=resumed)
    assert_same_states(resumed, optimizer)
    with pytest.raises(ValueError, match="path"):
        file.save()
    with pytest.raises(gn.errors.CheckpointError):
        gn.open(data[:-1])


def test_an_average_follows_and_what_cannot_follow_stops_the_save(tmp_path: Path) -> None:
    net, _ = trained(tmp_path / "net")
    average = AveragedModel(net)
    scores = torch.rand(net.transitions[0].size)
    gn.save(tmp_path / "net", net, average=average, scores=scores)
    file = gn.open(tmp_path / "net")
    cut(file.net)
    before = (tmp_path / "net").read_bytes()
    with pytest.raises(gn.errors.CheckpointError, match="scores"):
        file.save()
    assert (tmp_path / "net").read_bytes() == before
    saved = file.save(keep=["scores"])
    assert saved.extras == {"average": "followed", "scores": "kept"}
    again = gn.open(tmp_path / "net")
    assert torch.equal(again.extras["scores"], scores)
    averaged = AveragedModel(again.net)
    again.load(average=averaged)
    assert torch.equal(averaged.module.transitions[0].weight, again.net.transitions[0].weight)
    with pytest.raises(gn.errors.CheckpointError, match="nothing"):
        file.save(drop=["nothing"])


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(gn.GrapNet([6, 5]), nn.BatchNorm1d(5), gn.GrapNet([5, 4]))


def grouped(live: nn.Module, *rates: float) -> torch.optim.Optimizer:
    """Returns an optimizer with a group a part, in another order than the model."""
    groups = []
    for n, rate in zip((1, 0, 2), rates, strict=True):
        groups.append({"params": list(live[n].parameters()), "lr": rate})
    return torch.optim.Adam(groups)


def test_both_nets_of_a_model_are_edited_and_one_optimizer_follows_both(tmp_path: Path) -> None:
    live = model()
    optimizer = grouped(live, 0.1, 0.2, 0.3)
    gn.attach(optimizer, live)
    train(live, optimizer)
    gn.save(tmp_path / "model", live, optimizer=optimizer)
    file = gn.open(tmp_path / "model")
    assert file.is_model
    assert list(file.nets) == ["0", "2"]
    assert "1.running_mean" in file.rest
    with pytest.raises(gn.errors.CheckpointError, match="0, 2"):
        _ = file.net
    for net in (live[0], live[2], *file.nets.values()):
        cut(net)
    assert file.save().extras == {"optimizer": "followed"}
    restored = gn.open(tmp_path / "model").model(model())
    resumed = grouped(restored, 0, 0, 0)
    gn.open(tmp_path / "model").load(optimizer=resumed)
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.2, 0.3]
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
    with pytest.raises(gn.errors.HistoryError):
        small.net.undo()
    with pytest.raises(gn.errors.HistoryError):
        small.net.diff(0)
    assert small.net.history[-1].reason == "cut"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on_with_a_restored_state(name: str, tmp_path: Path) -> None:
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
    with pytest.raises(gn.errors.CheckpointError, match="optimizer"):
        file.save(tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


def test_the_average_of_one_of_two_equal_nets_does_not_follow_the_other(tmp_path: Path) -> None:
    live = nn.Sequential(gn.GrapNet([5, 5]), gn.GrapNet([5, 5]))
    gn.save(tmp_path / "model", live, average=AveragedModel(live[0]))
    file = gn.open(tmp_path / "model")
    cut(file.nets["1"])
    with pytest.raises(gn.errors.CheckpointError, match="average"):
        file.save()


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


def test_a_backend_with_parameters_stops_an_optimizer_from_following(tmp_path: Path) -> None:
    trained(tmp_path / "net")
    file = gn.open(tmp_path / "net")
    file.net.execution.use("attention", transition=0)
    with pytest.raises(gn.errors.CheckpointError, match="optimizer"):
        file.save(tmp_path / "attended")
    assert not (tmp_path / "attended").exists()


def test_an_existing_file_stays_on_request(tmp_path: Path) -> None:
    net, _ = trained(tmp_path / "net")
    (tmp_path / "other").write_text("mine")
    with pytest.raises(FileExistsError):
        gn.open(tmp_path / "net").save(tmp_path / "other", replace=False)
    assert (tmp_path / "other").read_text() == "mine"
    assert not gn.checkpoint.Archive.of(net).undo
    assert gn.checkpoint.Archive.of(net).history == "outline"


def test_the_warning_of_an_unknown_backend_names_the_line_that_loads(tmp_path: Path) -> None:
    gn.save(tmp_path / "net", gn.GrapNet([3, 2]))
    document, tensors = parse((tmp_path / "net").read_bytes())
    document["execution"] = ["own"]
    (tmp_path / "net").write_bytes(build(json.dumps(document), tensors))
    with pytest.warns(UserWarning, match="own") as found:
        gn.load(tmp_path / "net")
    assert [warning.filename for warning in found] == [__file__]
