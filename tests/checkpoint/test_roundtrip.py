"""A loaded net is the saved one, bit for bit: topology, values, names, journal, and what happens
next.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn

from .files import build, edited_net, objects_for, parse, train
from .referee import as_text


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
            net.next_uid,
            dict(net.state_dict()),
            layers,
            commits,
            diffs,
            net.execution.choices(),
        ]
    )


def blamed(net: gn.GrapNet, blame: gn.Commit | None) -> str | None:
    return None if blame is None else f"{blame.version} {blame.reason}"


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


UNTRAINED = {
    "no list": "layers.1.bias",
    "no name": ["layers.1.bias", 1],
    "a list inside": [["layers.1.bias"]],
    "nobody's": ["layers.0.bias"],
    "twice": ["layers.1.bias", "layers.1.bias"],
}


@pytest.mark.parametrize("wrong", UNTRAINED)
def test_what_is_not_trained_is_no_parameter(tmp_path, wrong):
    gn.save(tmp_path / "net", fresh(), history="full")
    document, tensors = parse((tmp_path / "net").read_bytes())
    assert "untrained" not in document["graph"]  # files of before read as if all of it trained
    document["graph"]["untrained"] = UNTRAINED[wrong]
    (tmp_path / "net").write_bytes(build(json.dumps(document), tensors))
    with pytest.raises(gn.CheckpointError, match=r"^graph\.untrained: expected"):
        gn.load(tmp_path / "net")


def test_blame_returns(tmp_path):
    net, _ = edited_net()
    loaded = reloaded(tmp_path / "net", net)
    pairs = [
        pair
        for t in (0, 1)
        for pair in zip(
            *(getattr(net.layers[t].outgoing(), e).tolist() for e in ("parents", "children")),
            strict=True,
        )
    ]
    gone = net.diff(0).relations_removed.tolist()
    assert {blamed(net, net.blame(*pair)) for pair in [*pairs, *gone]} > {None, "1 grow"}
    for pair in [*pairs, *gone]:
        assert blamed(net, loaded.blame(*pair)) == blamed(net, net.blame(*pair))
    for uid in range(net.next_uid):
        assert blamed(net, loaded.blame(uid)) == blamed(net, net.blame(uid))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_undo_and_redo_go_on_when_asked_for(tmp_path, dtype):
    net, _ = edited_net(dtype)
    loaded = reloaded(tmp_path / "net", net, undo=True)
    done = 0
    for verb in ["redo"] + ["undo"] * 20 + ["redo"] * 20 + ["undo"] * 3:
        try:
            getattr(net, verb)()
            done += 1
        except gn.HistoryError:
            with pytest.raises(gn.HistoryError):
                getattr(loaded, verb)()
        else:
            getattr(loaded, verb)()
            assert content(loaded) == content(net)
    assert done == 1 + 7 + 7 + 3


def test_a_loaded_journal_is_saved_again(tmp_path):
    net, _ = edited_net()
    again = reloaded(tmp_path / "b", reloaded(tmp_path / "a", net, undo=True), undo=True)
    assert as_text(parse((tmp_path / "a").read_bytes())) == as_text(
        parse((tmp_path / "b").read_bytes())
    )
    again.undo()


def test_a_replayed_journal_leads_to_the_same_wiring(tmp_path):
    net = fresh()
    start = copy.deepcopy(net)
    with net.edit() as edit:
        edit.connect(edit.add_nodes(1, 2), net.layers[2][:1])
        edit.cut(net.layers[0].outgoing()[1:4])
    start.replay(reloaded(tmp_path / "net", net).history)
    for name in ("ptr", "child"):
        assert torch.equal(getattr(start.transitions[0], name), getattr(net.transitions[0], name))


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
    orphan, before = net.layers[1][2], net.layers[2].biases.detach().clone()
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
    with pytest.raises(gn.HistoryError):
        loaded.diff(0)
    with pytest.raises(gn.HistoryError):
        loaded.blame(loaded.layers[0][0], loaded.layers[1][0])
    with pytest.raises(gn.HistoryError):
        fresh().replay(loaded.history)
    gn.save(tmp_path / "again", loaded)
    assert parse((tmp_path / "again").read_bytes())[0] == document


def test_a_file_with_undo_keeps_the_details_that_undo_needs(tmp_path):
    net, _ = edited_net()
    net.journal.undo_limit = 2
    assert len(net.history) > 3
    gn.save(tmp_path / "net", net, undo=True)
    loaded = gn.load(tmp_path / "net")
    kept = [commit.version in net.journal.kept_versions() for commit in net.history]
    assert 0 < sum(kept) < len(kept)
    assert [commit.has_details for commit in loaded.history] == kept
    loaded.undo()
    net.undo()
    assert torch.equal(loaded.layers[0].outgoing().weights, net.layers[0].outgoing().weights)


WRONG_NUMBERS = {
    "version": (0, 0, 2),
    "last version": (-1, 0, 1),
    "undoes": (0, 2, -1),
    "count": (1, 3, -1),
    "count of details": (1, 3, 1000),
    "end of the text": (0, -1, 10**6),
    "order of the texts": (1, -1, 0),
}


@pytest.mark.parametrize("wrong", WRONG_NUMBERS)
def test_the_numbers_of_an_outline_are_possible(tmp_path, wrong):
    net, _ = edited_net()
    gn.save(tmp_path / "net", net, history="full")
    document, tensors = parse((tmp_path / "net").read_bytes())
    row, column, difference = WRONG_NUMBERS[wrong]
    tensors["journal.numbers"][row, column] += difference
    if wrong == "order of the texts":
        tensors["journal.numbers"][row, column] = 0
    (tmp_path / "net").write_bytes(build(json.dumps(document), tensors))
    with pytest.raises(gn.CheckpointError, match="journal"):
        gn.load(tmp_path / "net")


@pytest.mark.parametrize("text", [b"", b"[]", b'["cut",null,["cut"],3]', b'[1,null,["cut"],null]'])
def test_the_text_of_an_outline_is_possible(tmp_path, text):
    net = fresh()
    with net.edit(reason="cut") as edit:
        edit.cut(net.layers[0].outgoing()[:1])
    gn.save(tmp_path / "net", net)
    document, tensors = parse((tmp_path / "net").read_bytes())
    tensors["journal.text"] = torch.tensor(list(text), dtype=torch.uint8)
    tensors["journal.numbers"][0, -1] = len(text)
    (tmp_path / "net").write_bytes(build(json.dumps(document), tensors))
    with pytest.raises(gn.CheckpointError, match="journal"):
        gn.load(tmp_path / "net")


@pytest.mark.parametrize("wrong", ["some", "", None, 1])
def test_how_much_of_the_history_was_saved_is_one_of_two_words(tmp_path, wrong):
    gn.save(tmp_path / "net", fresh())
    document, tensors = parse((tmp_path / "net").read_bytes())
    document["journal"]["history"] = wrong
    (tmp_path / "net").write_bytes(build(json.dumps(document), tensors))
    with pytest.raises(gn.CheckpointError, match=r"journal\.history"):
        gn.load(tmp_path / "net")


def test_a_file_without_cut_weights_says_why_undo_is_impossible(tmp_path):
    net, _ = edited_net()
    loaded = reloaded(tmp_path / "net", net)
    for verb in (loaded.undo, loaded.redo, copy.deepcopy(loaded).undo):
        with pytest.raises(gn.HistoryError, match="undo=True"):
            verb()
    with loaded.edit(reason="one more") as edit:
        edit.cut(loaded.layers[0].outgoing()[:1])
    loaded.undo()
    loaded.redo()
    loaded.undo()
    with pytest.raises(gn.HistoryError, match="undo=True"):
        loaded.undo()


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_whether_a_journal_was_saved_with_undo_is_a_bool(tmp_path, wrong):
    gn.save(tmp_path / "net", fresh(), history="full", undo=True)
    document, tensors = parse((tmp_path / "net").read_bytes())
    document["journal"]["undo"] = wrong
    (tmp_path / "net").write_bytes(build(json.dumps(document), tensors))
    with pytest.raises(gn.CheckpointError, match=r"^journal\.undo: "):
        gn.load(tmp_path / "net")


def test_a_frozen_bit_of_the_journal_cannot_break_undo(tmp_path):
    net = fresh()
    with net.edit() as edit:
        edit.connect(net.layers[0], edit.add_nodes(1, 2))
    gn.save(tmp_path / "net", net, undo=True)
    document, tensors = parse((tmp_path / "net").read_bytes())
    bits = tensors["journal.pool.bool"]
    assert len(bits) > 8
    for place in range(len(bits)):
        bits[place] ^= True
        (tmp_path / "net").write_bytes(build(json.dumps(document), tensors))
        bits[place] ^= True
        # A relation that undo removes has the frozen bit that the net gives it.
        loaded = gn.load(tmp_path / "net")
        loaded.undo()
        gn.check(loaded)
        assert loaded.count() == fresh().count()
        loaded.redo()
        gn.check(loaded)


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


@pytest.mark.parametrize(("transition", "full"), [(0, False), (1, True), (0, None)])
def test_a_transition_is_full_when_its_file_says_so(tmp_path, transition, full):
    net = gn.GrapNet([7, 5, 3])
    with net.edit() as edit:
        edit.cut(net.layers[1][0], slots=[1])
    gn.save(tmp_path / "net", net)
    document, tensors = parse((tmp_path / "net").read_bytes())
    document["graph"]["transitions"][transition]["full"] = full
    (tmp_path / "net").write_bytes(build(json.dumps(document), tensors))
    with pytest.raises(gn.CheckpointError, match=rf"transitions\.{transition}"):
        gn.load(tmp_path / "net")


def test_a_cut_makes_the_file_smaller_except_for_the_journal(tmp_path):
    net, count = gn.GrapNet([40, 50, 10], density=0.9), 300
    gn.save(tmp_path / "before", net, history="full")
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=count))
    gn.save(tmp_path / "after", net, history="full")
    (_, before), (document, after) = (
        parse((tmp_path / name).read_bytes()) for name in ("before", "after")
    )
    assert len(before["transitions.0.weight"]) - len(after["transitions.0.weight"]) == count
    lost = len(before["transitions.0.child"]) - len(after["transitions.0.child"])
    assert lost == 6 * count // 8  # a child out of 50 takes six bits
    record = sum(t.nbytes for name, t in after.items() if name.startswith("journal."))
    described = sum(len(name) + 80 for name in after if name.startswith("journal.")) + len(
        str(document["journal"])
    )
    sizes = [(tmp_path / name).stat().st_size for name in ("before", "after")]
    assert sizes[1] - sizes[0] <= record + described - 4 * count - lost
    assert record <= 13 * count + 1000  # position, both ends and the frozen bit of every relation


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
    with pytest.raises(gn.CheckpointError, match=r"graph\.dtype: .*float32.*float64"):
        gn.save(tmp_path / "net", net, history="full")


def test_a_trial_is_not_saved(tmp_path):
    net, _ = edited_net()
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing()[:3])
        edit.commit()
        with pytest.raises(gn.CheckpointError, match=r"graph\.version: a trial is in effect"):
            gn.save(tmp_path / "net", net, history="full")
    assert content(reloaded(tmp_path / "net", net)) == content(net)


def test_an_activation_that_nobody_registered_is_named(tmp_path):
    gn.save(tmp_path / "net", gn.GrapNet([3, 2, 2], activation="gelu"))
    document, tensors = parse((tmp_path / "net").read_bytes())
    (tmp_path / "net").write_bytes(build(json.dumps(document).replace("gelu", "own"), tensors))
    with pytest.raises(
        gn.CheckpointError, match=r"graph\.layers\.1\.activations: 'own'.*register_activation"
    ):
        gn.load(tmp_path / "net")
