"""A loaded net is the saved one, bit for bit: topology, values, names, journal, and what happens
next.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn

from .files import as_text, edited_net, objects_for, parse, train


def fresh() -> gn.GrapNet:
    return gn.GrapNet(
        [5, 4, 3], activation="gelu", density=0.5, generator=torch.Generator().manual_seed(2)
    )


def with_empty_layers() -> gn.GrapNet:
    return gn.GrapNet([0, 3, 0, 2])


def all_frozen() -> gn.GrapNet:
    net, _ = edited_net()
    with net.edit(reason="freeze everything") as edit:
        edit.freeze(net.select())
    assert net.count().trainable == 0
    return net


def diverged() -> gn.GrapNet:
    net, _ = edited_net()
    with torch.no_grad():
        net.transitions[0].weight[:2] = torch.tensor([[float("nan")], [float("inf")]])
        net.layers[2].bias[0] = -float("inf")
    return net


NETS = {
    "fresh": fresh,
    "float32": lambda: edited_net()[0],
    "float64": lambda: edited_net(torch.float64)[0],
    "bfloat16": lambda: edited_net(torch.bfloat16)[0],
    "empty layers": with_empty_layers,
    "all frozen": all_frozen,
    "diverged": diverged,
}


def reloaded(path: Path, net: gn.GrapNet, **settings: Any) -> gn.GrapNet:
    gn.save(path, net, history="full", **settings)
    return gn.load(path)


def content(net: gn.GrapNet) -> str:
    """Returns everything a net is and was, as text that is equal only bit for bit."""
    layers = [(layer.uids, layer.owners, layer.activations) for layer in net.layers]
    commits = [
        (repr(c), c.version, c.reason, c.by, c.undoes, list(c.operations)) for c in net.history
    ]
    diffs = [vars(net.diff(version)) for version in range(net.version)]
    return as_text(
        [
            net.version,
            net._next_uid,
            dict(net.state_dict()),
            layers,
            commits,
            diffs,
            net.execution.choices(),
        ]
    )


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_everything_returns(tmp_path, name, undo):
    net = NETS[name]()
    loaded = reloaded(tmp_path / "net", net, undo=undo)
    gn.check(loaded)
    assert content(loaded) == content(net)
    x = torch.linspace(-1, 1, 3 * net.sizes[0], dtype=net.transitions[0].weight.dtype).reshape(
        3, -1
    )
    assert as_text(loaded(x).detach()) == as_text(net(x).detach())


@pytest.mark.parametrize("name", NETS)
def test_the_next_edit_goes_the_same_way(tmp_path, name):
    net = NETS[name]()
    loaded = reloaded(tmp_path / "net", net)
    for each in (net, loaded):
        with each.edit(reason="next", generator=torch.Generator().manual_seed(3)) as edit:
            new = edit.add_nodes(1, 2, owner="next")
            edit.connect(new, edit.add_nodes(2, 1))
            edit.cut(each.layers[0].outgoing()[:2])
    assert content(loaded) == content(net)


def test_a_loaded_journal_is_saved_again(tmp_path):
    net, _ = edited_net()
    again = reloaded(tmp_path / "b", reloaded(tmp_path / "a", net, undo=True), undo=True)
    assert as_text(parse((tmp_path / "a").read_bytes())) == as_text(
        parse((tmp_path / "b").read_bytes())
    )
    again.undo()


def gone_values(net: gn.GrapNet, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the weight that is about to be cut, and the moments that Adam holds for it."""
    parameter = net.transitions[0].weight
    slots = {key: value[4] for key, value in optimizer.state[parameter].items() if value.dim()}
    return {
        "weight": parameter.detach()[4].clone(),
        **{key: value.clone() for key, value in slots.items()},
    }


def test_by_default_a_file_holds_nothing_that_was_cut(tmp_path):
    net = gn.GrapNet([6, 5, 3], activation="tanh", generator=torch.Generator().manual_seed(4))
    objects = objects_for(net)
    gn.attach(objects["optimizer"], net)
    train(net, objects, 3)
    gone = gone_values(net, objects["optimizer"])
    assert gone.keys() == {"weight", "exp_avg", "exp_avg_sq"}
    orphan = net.layers[1][2]
    before = net.layers[2].biases.detach().clone()
    gone |= {
        "bias": orphan.bias.detach().clone(),
        "first": orphan.W_alloc.detach()[0, 0],
        "before folding": before[0],
    }
    gn.save(tmp_path / "before", net, history="full", **objects)
    with net.edit(reason="cut") as edit:
        edit.cut(net.layers[0].outgoing()[4])
        edit.cut(orphan.incoming())
    with net.edit(reason="fold") as edit:
        edit.remove_orphans(fold_bias=True)
    gn.save(tmp_path / "net", net, history="full", **objects)
    gn.save(tmp_path / "undo", net, history="full", undo=True, **objects)
    for name, value in gone.items():
        pattern = value.numpy().tobytes()
        assert pattern in (tmp_path / "before").read_bytes(), name
        assert pattern not in (tmp_path / "net").read_bytes(), name
        assert pattern in (tmp_path / "undo").read_bytes(), name


def test_by_default_a_file_keeps_the_outline_of_every_commit(tmp_path):
    net, _ = edited_net()
    gn.save(tmp_path / "net", net)
    loaded = gn.load(tmp_path / "net")
    assert [repr(commit) for commit in loaded.history] == [repr(commit) for commit in net.history]
    assert [commit.counts for commit in loaded.history] == [commit.counts for commit in net.history]
    assert not any(commit.has_details for commit in loaded.history)
    assert [commit.time for commit in loaded.history] == pytest.approx(
        [commit.time for commit in net.history], abs=1e-5
    )
    document, tensors = parse((tmp_path / "net").read_bytes())
    assert {name for name in tensors if name.startswith("journal.")} == {
        "journal.numbers",
        "journal.text",
    }
    with pytest.raises(gn.errors.HistoryError):
        loaded.diff(0)
    with pytest.raises(gn.errors.HistoryError):
        loaded.blame(loaded.layers[0][0], loaded.layers[1][0])
    with pytest.raises(gn.errors.HistoryError):
        fresh().replay(loaded.history)
    gn.save(tmp_path / "again", loaded)
    assert parse((tmp_path / "again").read_bytes())[0] == document


def test_a_file_with_undo_keeps_the_details_that_undo_needs(tmp_path):
    net, _ = edited_net()
    net.journal.undo_limit = 2
    assert len(net.history) > 3
    gn.save(tmp_path / "net", net, undo=True)
    loaded = gn.load(tmp_path / "net")
    kept = [commit.version in net.journal._kept_versions() for commit in net.history]
    assert 0 < sum(kept) < len(kept)
    assert [commit.has_details for commit in loaded.history] == kept
    loaded.undo()
    net.undo()
    assert torch.equal(loaded.layers[0].outgoing().weights, net.layers[0].outgoing().weights)


def test_a_file_without_cut_weights_says_why_undo_is_impossible(tmp_path):
    net, _ = edited_net()
    loaded = reloaded(tmp_path / "net", net)
    for verb in (loaded.undo, loaded.redo, copy.deepcopy(loaded).undo):
        with pytest.raises(gn.errors.HistoryError, match="undo=True"):
            verb()
    with loaded.edit(reason="one more") as edit:
        edit.cut(loaded.layers[0].outgoing()[:1])
    loaded.undo()
    loaded.redo()
    loaded.undo()
    with pytest.raises(gn.errors.HistoryError, match="undo=True"):
        loaded.undo()


def test_the_wiring_of_a_full_transition_is_not_in_the_file(tmp_path):
    net = gn.GrapNet([7, 5, 3])
    with net.edit() as edit:
        edit.cut(net.layers[1][0], slots=[1])
    gn.save(tmp_path / "net", net)
    _, tensors = parse((tmp_path / "net").read_bytes())
    assert "transitions.0.child" not in tensors
    assert "transitions.1.child" in tensors
    loaded = gn.load(tmp_path / "net")
    for one, other in zip(loaded.transitions, net.transitions, strict=True):
        assert torch.equal(one.ptr, other.ptr)
        assert torch.equal(one.child, other.child)
        assert torch.equal(one.weight, other.weight)


AROUND = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("around", AROUND)
def test_surroundings_do_not_matter(tmp_path, around):
    net, objects = edited_net()
    with AROUND[around]():
        gn.save(
            tmp_path / "net",
            net,
            history="full",
            undo=True,
            table=torch.ones(2, device="cpu"),
            **objects,
        )
        loaded = gn.load(tmp_path / "net")
        fresh = objects_for(loaded)
        data = gn.restore(tmp_path / "net", **fresh)
    assert content(loaded) == content(net)
    assert not data["table"].is_inference()
    gn.attach(fresh["optimizer"], loaded)
    assert train(loaded, fresh, 2) == train(net, objects, 2)
    loaded.undo()
    gn.check(loaded)


def test_a_net_in_two_types_is_not_saved(tmp_path):
    net = gn.GrapNet([3, 2])
    net.layers[1].double()
    with pytest.raises(gn.errors.CheckpointError, match=r"graph\.dtype: .*float32.*float64"):
        gn.save(tmp_path / "net", net, history="full")
