"""What a file holds beside the net goes through an edit from the shell with it, or stops it."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.checkpoint import container
from grapnet.rules import Moment, PruneWeakest
from tests.checkpoint.referee import as_text

from .conftest import model_of_nets
from .edited import assert_same_states, content, trained


class Lion(torch.optim.Adam):
    """An optimizer that torch does not have."""


def as_older(path: Path) -> None:
    """Takes from a file what files have not always said: which Parameter each state of an optimizer
    belongs to.
    """
    document, tensors = container.read(path)
    del document["journal"]["undo"]
    for part in document["extras"].values():
        del part["knows_owners"]
        part["owners"] = {}
    container.write(path, document, tensors)


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("order", ["parameters", "groups", "swapped", "named"])
def test_optimizers_of_several_groups_follow(tmp_path, run, undo, order):
    torch.manual_seed(0)
    net = gn.GrapNet([5, 4, 4, 4])
    named = list(net.named_parameters())
    groups = {
        "parameters": lambda: net.parameters(),
        "groups": lambda: [
            {"params": [p for _, p in named if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() == 1], "lr": 0.5},
        ],
        # transitions 1 and 2 are of one shape
        "swapped": lambda: [{"params": [p]} for _, p in reversed(named)],
        "named": lambda: [{"params": [pair]} for pair in reversed(named)],
    }[order]
    optimizer = torch.optim.AdamW(groups(), lr=0.01)
    gn.attach(optimizer, net)
    trained(net, optimizer, 5)
    gn.save(tmp_path / "old", net, undo=undo, opt=optimizer)
    done = run("cut", tmp_path / "old", "--all", "--smallest", "0.4", "-o", tmp_path / "new")
    assert (done.code, done.err) == (0, "")
    with net.edit() as edit:
        edit.cut(net.select().outgoing().smallest(fraction=0.4))
    loaded, expected = gn.load(tmp_path / "new"), {p: optimizer.state[p] for p in net.parameters()}
    net = loaded
    named = list(net.named_parameters())
    again = torch.optim.AdamW(groups())
    gn.restore(tmp_path / "new", opt=again)
    states = {name: again.state[p] for name, p in named}
    assert_same_states(states, dict(zip(states, expected.values(), strict=True)))
    assert [group["lr"] for group in again.param_groups] == [
        group["lr"] for group in optimizer.param_groups
    ]
    assert (undo_slots := bool(net.journal.undoable)) is undo, undo_slots


def test_what_cannot_follow_stops_the_edit_unless_dropped(tmp_path, run):
    torch.manual_seed(0)
    net = gn.GrapNet([5, 4, 4, 4])
    lion, lbfgs = Lion(net.parameters()), torch.optim.LBFGS(net.parameters())
    adam = torch.optim.Adam(net.parameters())
    for optimizer in (lion, adam):
        trained(net, optimizer, 5)
    scores = {"scores": torch.zeros(20)}
    for held, message in (
        (lion, "its class is not one of torch.optim"),
        (lbfgs, "LBFGS keeps one flat history"),
        (scores, "holds an array of shape [20]"),
    ):
        gn.save(tmp_path / "old", net, adam=adam, opt=held)
        before = content(tmp_path)
        asked = [
            "cut",
            tmp_path / "old",
            "--transition",
            0,
            "--smallest",
            "0.5",
            "-o",
            tmp_path / "new",
        ]
        for dry in ([], ["--dry-run"]):
            done = run(*asked, *dry)
            assert (done.code, done.out, done.err.count("\n")) == (2, "", 2)
            assert done.err.startswith("grapnet: 'opt' (")
            assert message in done.err
            assert "--drop opt" in done.err.splitlines()[1]
        assert content(tmp_path) == before
        done = run(*asked, "--drop", "opt", "--json")
        assert json.loads(done.out)["extras"] == {"adam": "followed", "opt": "dropped"}
        with pytest.raises(
            gn.CheckpointError, match=r"extras\.opt: not in this checkpoint, which holds adam"
        ):
            gn.restore(tmp_path / "new", opt=lion)
        gn.load(tmp_path / "new")  # which refuses tensors that nothing refers to
        (tmp_path / "new").unlink()
    kept = run(*asked, "--keep", "opt", "--json")
    assert json.loads(kept.out)["extras"] == {"adam": "followed", "opt": "kept"}
    assert torch.equal(gn.restore(tmp_path / "new")["opt"]["scores"], scores["scores"])
    other = run(
        "cut", tmp_path / "old", "--transition", 1, "--smallest", "0.5", "--dry-run", "--json"
    )
    # no vector of 20 has moved
    assert json.loads(other.out)["extras"] == {
        "adam": "followed",
        "opt": "kept",
    }


def test_an_older_file_is_not_guessed_at(tmp_path, run):
    net = gn.GrapNet([5, 4, 3])
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer, 5)
    gn.save(tmp_path / "old", net, opt=optimizer)
    as_older(tmp_path / "old")
    before = content(tmp_path)
    asked = ["cut", tmp_path / "old", "--all", "--smallest", 0.4, "-o", tmp_path / "new"]
    done = run(*asked)
    assert (done.code, done.out, content(tmp_path)) == (2, "", before)
    assert "this file is older, and does not say which of its states are the net's" in done.err
    again, other = gn.load(tmp_path / "old"), torch.optim.Adam(net.parameters())
    gn.restore(tmp_path / "old", opt=other)
    assert again.count() == net.count()  # it is read as ever
    assert run(*asked, "--drop", "opt").code == 0


def test_an_optimizer_of_another_net_of_equal_shapes_stays(tmp_path, run):
    torch.manual_seed(0)
    net, teacher = gn.GrapNet([5, 4, 3]), gn.GrapNet([5, 4, 3])
    mine, other = torch.optim.Adam(net.parameters()), torch.optim.Adam(teacher.parameters())
    trained(net, mine, 5)
    trained(teacher, other, 5)
    gn.save(tmp_path / "old", net, mine=mine, other=other)
    done = run(
        "cut",
        tmp_path / "old",
        "--transition",
        0,
        "--smallest",
        0.5,
        "-o",
        tmp_path / "new",
        "--json",
    )
    assert json.loads(done.out)["extras"] == {"mine": "followed", "other": "kept"}
    again = torch.optim.Adam(teacher.parameters())
    gn.restore(tmp_path / "new", other=again)
    assert_same_states(dict(enumerate(again.state.values())), dict(enumerate(other.state.values())))


def test_state_that_was_kept_as_it_was_is_never_taken_for_present(tmp_path, run):
    net = gn.GrapNet([5, 4, 3])
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer, 5)
    gn.save(tmp_path / "old", net, opt=optimizer)
    half = ["--transition", 0, "--smallest", 0.5]
    assert run("cut", tmp_path / "old", *half, "--keep", "opt", "-o", tmp_path / "new").code == 0
    done = run("cut", tmp_path / "new", *half, "--dry-run")
    assert (done.code, "as it was before another edit" in done.err) == (2, True)


@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor", "Lion"])
def test_edits_that_move_nothing_of_an_optimizer_leave_its_state_alone(tmp_path, run, kind):
    torch.manual_seed(0)
    net = gn.GrapNet([5, 4, 3])
    make = {"LBFGS": torch.optim.LBFGS, "Adafactor": torch.optim.Adafactor, "Lion": Lion}[kind]
    optimizer = make([net.transitions[1].weight, net.layers[2].parameter])

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = net(torch.ones(2, 5)).square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    gn.save(tmp_path / "old", net, opt=optimizer)
    new, bits = tmp_path / "new", as_text(optimizer.state_dict()["state"])
    for asked in (
        ["set-owner", "--layer", 1, "--to", "me"],
        ["freeze", "--transition", 0],
        ["cut", "--transition", 0, "--allow-dead"],
    ):
        done = run(asked[0], tmp_path / "old", *asked[1:], "-o", new, "--force", "--json")
        assert json.loads(done.out)["extras"] == {"opt": "kept"}
        again = gn.load(new)
        other = make([again.transitions[1].weight, again.layers[2].parameter])
        gn.restore(new, opt=other)
        assert as_text(other.state_dict()["state"]) == bits
    for asked in (
        ["freeze", "--transition", 1],
        ["cut", "--layer", 1, "--allow-dead"],
        ["freeze", "--layer", 2],
    ):
        done = run(asked[0], tmp_path / "old", *asked[1:], "--dry-run")
        assert (done.code, "cannot follow" in done.err) == (2, True)


def test_a_journal_that_keeps_no_details_hides_nothing_from_what_the_file_holds(tmp_path, run):
    net = gn.GrapNet([5, 4, 3])
    net.journal.undo_limit = net.journal.detail_limit = 0
    gn.save(tmp_path / "old", net, scores=torch.zeros(20))
    asked = ["cut", tmp_path / "old", "--transition", 0, "--smallest", 0.5]
    refused = run(*asked, "--dry-run")
    assert (refused.code, "holds an array of shape [20]" in refused.err) == (2, True)
    done = run(*asked, "--keep", "scores", "--dry-run", "--json")
    assert json.loads(done.out)["effect"]["removed"] == [10, 0]


def test_an_averaged_copy_follows(tmp_path, run):
    torch.manual_seed(0)
    net = gn.GrapNet([5, 6, 2])
    averaged = torch.optim.swa_utils.AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    averaged.update_parameters(net)
    trained(net, optimizer, 5)
    averaged.update_parameters(net)
    gn.save(tmp_path / "old", net, ema=averaged)
    done = run(
        "remove", tmp_path / "old", "--node", 5, "--node", 7, "-o", tmp_path / "new", "--json"
    )
    assert json.loads(done.out)["extras"] == {"ema": "followed"}
    gn.attach(averaged, net)
    with net.edit() as edit:
        edit.remove_nodes([5, 7])
    again = torch.optim.swa_utils.AveragedModel(gn.load(tmp_path / "new"))
    gn.restore(tmp_path / "new", ema=again)
    x = torch.randn(3, 5)
    assert torch.equal(again(x), averaged(x))
    assert not torch.equal(again(x), net(x))


def test_a_net_of_a_model_is_edited_and_the_rest_stays(tmp_path, run):
    model = model_of_nets()
    optimizer = torch.optim.Adam(model.parameters())
    gn.attach(optimizer, model)
    trained(model, optimizer, 8)
    gn.save(tmp_path / "old", model, optimizer=optimizer, epoch=3)
    refused = run("prune", tmp_path / "old", "--fraction", 0.5, "-o", tmp_path / "new")
    assert (refused.code, refused.err.splitlines()[1]) == (2, "hint: say --net, one of: 0, 2")
    refused = run(
        "prune", tmp_path / "old", "--net", "1", "--fraction", 0.5, "-o", tmp_path / "new"
    )
    assert (refused.code, refused.err.splitlines()[1]) == (2, "hint: nets stand at: 0, 2")
    words = ["--net", "0", "--fraction", 0.5, "--json"]
    done = run("prune", tmp_path / "old", *words, "-o", tmp_path / "new")
    assert json.loads(done.out)["extras"] == {"optimizer": "followed", "epoch": "kept"}
    net = model.get_submodule("0")
    assert isinstance(net, gn.GrapNet)
    with net.edit() as edit:
        PruneWeakest(fraction=0.5)(net, edit, Moment())
    again = model_of_nets()
    assert gn.restore(tmp_path / "new", into=again) == {"epoch": 3}
    other = torch.optim.Adam(again.parameters())
    gn.restore(tmp_path / "new", optimizer=other)
    gn.attach(other, again)
    assert net.count().relations == 24  # of 48
    x = torch.randn(5, 8)
    for each, its in ((model, optimizer), (again, other)):
        its.zero_grad()
        each(x).square().sum().backward()
        its.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_a_part_of_a_joint_transaction_is_undone_only_alone(tmp_path, run):
    nets = gn.GrapNet([4, 4]), gn.GrapNet([4, 2])
    model = nn.Sequential(*nets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, rules = torch.optim.lr_scheduler.StepLR(optimizer, 3), gn.RuleManager()
    with gn.edit_together(*nets, reason="both") as edits:
        for net, edit in zip(nets, edits, strict=True):
            edit.cut(net.layers[0].outgoing().smallest(count=3))
    gn.save(
        tmp_path / "old", model, undo=True, optimizer=optimizer, scheduler=scheduler, rules=rules
    )
    refused = run("undo", tmp_path / "old", "--net", "0", "-o", tmp_path / "new")
    told, hint = refused.err.splitlines()
    assert (refused.code, "part of a transaction over 2 nets" in told) == (2, True)
    assert hint == "hint: --alone takes it back in this net and leaves the other nets as they are"
    done = run("undo", tmp_path / "old", "--net", "0", "--alone", "-o", tmp_path / "new", "--json")
    assert json.loads(done.out)["extras"] == {
        "optimizer": "followed",
        "scheduler": "kept",
        "rules": "kept",
    }
    again = nn.Sequential(nn.Identity(), nn.Identity())
    gn.restore(tmp_path / "new", into=again, rules=rules)
    assert [net.count().relations for net in again if isinstance(net, gn.GrapNet)] == [16, 5]
