"""Files with a right digest whose content cannot be are refused, and nothing changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn

from .files import build, edited_net, parse
from .models import content

Tensors = dict[str, Tensor]
Change = Callable[[Any, Tensors], None]


def forge(path: Path, change: Change) -> None:
    """Changes a file under a right digest."""
    document, tensors = parse(path.read_bytes())
    change(document, tensors)
    path.write_bytes(build(json.dumps(document), tensors))


def connected() -> gn.GrapNet:
    """Returns a net with one commit that brought two relations."""
    ends = torch.tensor([0, 1])
    net = gn.GrapNet.from_relations([4, 3, 2], [(ends, ends), (ends, ends)])
    with net.edit() as edit:
        edit.connect(net.layers[0][2:], net.layers[1][2])
    return net


def removed() -> gn.GrapNet:
    """Returns a net with one commit that removed a node, and with one full transition."""
    net = gn.GrapNet([7, 5, 3])
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
        edit.cut(net.layers[1][1], slots=[1])
    return net


def edited() -> gn.GrapNet:
    return edited_net()[0]


# The graph


def untrained(value: Any) -> Change:
    return lambda document, tensors: document["graph"].update(untrained=value)


def full(transition: int, value: bool | None) -> Change:
    return lambda document, tensors: document["graph"]["transitions"][transition].update(full=value)


def much_dropout(document: Any, tensors: Tensors) -> None:
    document["graph"]["layers"][1]["dropout"] = 1.5


def unknown_activation(document: Any, tensors: Tensors) -> None:
    layer = document["graph"]["layers"][1]
    layer["activations"] = json.loads(json.dumps(layer["activations"]).replace("relu", "own"))


# The outline of the journal


def journal(**values: Any) -> Change:
    return lambda document, tensors: document["journal"].update(values)


def number(row: int, column: int, difference: int) -> Change:
    def change(document: Any, tensors: Tensors) -> None:
        tensors["journal.numbers"][row, column] += difference

    return change


def texts_out_of_order(document: Any, tensors: Tensors) -> None:
    tensors["journal.numbers"][1, -1] = 0


# The details of the journal


def details(change: Callable[[Any, Tensors], None]) -> Change:
    """Changes the first change of a transition in the details, given as key and record."""

    def changed(document: Any, tensors: Tensors) -> None:
        tree = json.loads(bytes(tensors["journal.details"].tolist()))
        change(tree["dict"][0][1]["list"][0]["record"][2]["dict"][0], tensors)
        tensors["journal.details"] = torch.tensor(
            list(json.dumps(tree).encode()), dtype=torch.uint8
        )

    return changed


def out_of_range(pair: Any, tensors: Tensors) -> None:
    pair[0] = 2


def out_of_order(document: Any, tensors: Tensors) -> None:
    # The positions of what the commit brought come first.
    flat = tensors["journal.pool.int32"]
    flat[:2] = flat[:2].flip(0)


def turns_a_newborn(pair: Any, tensors: Tensors) -> None:
    weights = pair[1]["record"][4]["record"]
    assert weights[4] == {"tensor": ["int32", 0]}
    weights[4] = {"tensor": ["int32", 1]}
    flat = tensors["journal.pool.int32"]
    tensors["journal.pool.int32"] = torch.cat([flat, flat[:1]])


def has_gradients(pair: Any, tensors: Tensors) -> None:
    weights = pair[1]["record"][4]["record"]
    assert weights[8] is None
    weights[8] = {"tensor": ["bool", 0]}


def has_blocks(document: Any, tensors: Tensors) -> None:
    tree = json.loads(bytes(tensors["journal.details"].tolist()))
    record = tree["dict"][0][1]["list"][0]["record"]
    assert record[0] == "Change"
    assert record[-1] is None
    record[-1] = record[1]
    tensors["journal.details"] = torch.tensor(list(json.dumps(tree).encode()), dtype=torch.uint8)


def unknown_uid(document: Any, tensors: Tensors) -> None:
    tensors["journal.pool.int64"][0] = 10**6


FORGERIES: dict[str, tuple[Callable[[], gn.GrapNet], Change]] = {
    "untrained names no Parameter": (removed, untrained(["layers.0.bias"])),
    "untrained names one twice": (removed, untrained(["layers.1.bias", "layers.1.bias"])),
    "a full transition has children": (removed, full(0, False)),
    "another transition is full": (removed, full(1, True)),
    "dropout": (removed, much_dropout),
    "an unknown activation": (removed, unknown_activation),
    "history": (removed, journal(history="some")),
    "undo is no bool": (removed, journal(undo=1)),
    "a version": (edited, number(0, 0, 2)),
    "the last version": (edited, number(-1, 0, 1)),
    "an undone version": (edited, number(0, 2, -1)),
    "a negative count": (edited, number(1, 3, -1)),
    "a text beyond the end": (edited, number(0, -1, 10**6)),
    "texts out of order": (edited, texts_out_of_order),
    "details of no transition": (connected, details(out_of_range)),
    "positions out of order": (connected, out_of_order),
    "a newborn that turns": (connected, details(turns_a_newborn)),
    "blocks": (connected, has_blocks),
    "gradients": (connected, details(has_gradients)),
    "an unknown uid": (removed, unknown_uid),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_net_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    make, change = FORGERIES[name]
    gn.save(tmp_path / "net", make(), history="full")
    gn.load(tmp_path / "net")
    forge(tmp_path / "net", change)
    with pytest.raises(gn.errors.CheckpointError):
        gn.load(tmp_path / "net")


def test_a_commit_that_does_not_fit_is_not_undone(tmp_path: Path) -> None:
    net = connected()
    gn.save(tmp_path / "net", net, undo=True)

    def change(document: Any, tensors: Tensors) -> None:
        # The rows of both relations, which begin after their positions.
        flat = tensors["journal.pool.int32"]
        flat[2:4] = flat[2:4].flip(0)

    forge(tmp_path / "net", change)
    loaded = gn.load(tmp_path / "net")
    before = content(loaded)
    with pytest.raises(gn.errors.HistoryError):
        loaded.undo()
    assert content(loaded) == before


def model() -> nn.Sequential:
    return nn.Sequential(gn.GrapNet([6, 5]), nn.BatchNorm1d(5), gn.GrapNet([5, 4]))


def places(*names: list[str]) -> Change:
    def change(document: Any, tensors: Tensors) -> None:
        for part, there in zip(document["nets"], names, strict=True):
            part["places"] = there

    return change


def no_nets(document: Any, tensors: Tensors) -> None:
    document["nets"] = []
    for name in [name for name in tensors if name.startswith("nets")]:
        del tensors[name]


MODEL_FORGERIES = {
    "one place for two nets": places(["0"], ["0"]),
    "a net without a place": places(["0"], []),
    "a place inside of a net": places(["0"], ["0.1"]),
    "a place twice": places(["0", "0"], ["2"]),
    "no nets": no_nets,
}


@pytest.mark.parametrize("name", MODEL_FORGERIES)
def test_nets_that_a_model_cannot_have_are_refused(name: str, tmp_path: Path) -> None:
    gn.save(tmp_path / "model", model())
    gn.open(tmp_path / "model")
    forge(tmp_path / "model", MODEL_FORGERIES[name])
    fresh = model()
    before = content(fresh)
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "model", into=fresh)
    assert content(fresh) == before
