"""gn.open: a checkpoint in memory, its edits, and what follows them into the next file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from tests.checkpoint.models import values

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
