"""Blocks of adopted models that come and leave, against models that were built by hand."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import grapnet as gn
from grapnet.core import _commit
from tests.spaces import matrix, oracle
from tests.spaces.subjects import Subject, differing_tensors, step, subject

# Models with a container of residual blocks.
STACKS = {
    "resnet": "layer1",
    "vit": "blocks",
    "hf_gpt2": "transformer.h",
    "hf_llama": "model.layers",
}
LANGUAGE = ["hf_gpt2", "hf_llama"]
# Numbers that count the blocks, by the names that their configs have for them.
COUNTERS = {"hf_gpt2": "n_layer", "hf_llama": "num_hidden_layers"}


def subject_of(name: str) -> Subject:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    return subject(matrix.CASES[name]())


def insert(one: Subject, path: str, after: int = 0, **options: Any) -> gn.Commit:
    with one.net.edit(reason="deeper") as edit:
        edit.insert(path, after=after, **options)
    assert edit.receipt is not None
    return edit.receipt


def remove(one: Subject, path: str, index: int) -> gn.Commit:
    with one.net.edit(reason="shallower") as edit:
        edit.remove(path, index)
    assert edit.receipt is not None
    return edit.receipt


def described(net: Any) -> list[tuple[Any, ...]]:
    """Returns everything that discovery finds out about the spaces of a graph."""
    found = []
    for space in net.spaces:
        roles = (space.writers, space.readers, space.riders)
        found.append((space.name, len(space), space.pins, set(space._members), roles))
    return found


def require_like_adopted_anew(one: Subject) -> None:
    """Asserts that the graph is as if the model had been adopted with its present blocks."""
    gn.check(one.net)
    anew = gn.adopt(copy.deepcopy(one.model), *one.case.inputs, **one.case.kwargs)
    assert described(one.net) == described(anew)
    ends = [(weight.name, weight.source, weight.target) for weight in one.net.transitions]
    assert ends == [(weight.name, weight.source, weight.target) for weight in anew.transitions]


def indices_of(container: nn.Module) -> list[list[int]]:
    found = []
    for block in container.children():
        modules = [module for module in block.modules() if hasattr(module, "layer_idx")]
        found.append([module.layer_idx for module in modules])
    return found


def snapshot(one: Subject) -> dict[str, Any]:
    picture = one.snapshot()
    picture["spaces"] = [(space.name, space.uid.tolist(), space.owners) for space in one.net.spaces]
    picture["parameters"] = [id(parameter) for parameter in one.model.parameters()]
    held = [[id(p) for p in group["params"]] for group in one.optimizer.param_groups]
    picture["groups"] = held
    return picture


@pytest.mark.parametrize("name", STACKS)
def test_an_inserted_block_changes_nothing_and_then_trains(name: str) -> None:
    one = subject_of(name)
    path = STACKS[name]
    container = one.model.get_submodule(path)
    depth = len(container)
    expected = one.outputs()
    receipt = insert(one, path)
    assert oracle.largest_difference(one.outputs(), expected) == 0
    assert len(container) == depth + 1
    assert receipt.counts["blocks_added"] == 1
    assert receipt.counts["nodes_added"] > 0
    require_like_adopted_anew(one)
    block = container[1]
    before = {key: value.detach().clone() for key, value in block.named_parameters()}
    for _ in range(3):
        one.step()
    still = [key for key, value in block.named_parameters() if torch.equal(value, before[key])]
    assert still == []
    assert oracle.largest_difference(one.outputs(), expected) > 0


@pytest.mark.parametrize("name", STACKS)
def test_removing_what_was_inserted_restores_all_bits(name: str) -> None:
    one = subject_of(name)
    before = snapshot(one)
    insert(one, STACKS[name])
    remove(one, STACKS[name], 1)
    assert oracle.same(before, snapshot(one)) == []
    require_like_adopted_anew(one)


def without_block(one: Subject, path: str, index: int) -> tuple[nn.Module, Adam]:
    """Returns a copy of the model with one block less, and an Adam with the same state."""
    copied = oracle.copy_of(one.model)
    states = {}
    for name, parameter in one.model.named_parameters():
        states[name] = copy.deepcopy(one.optimizer.state[parameter])
    parameters = dict(copied.named_parameters())
    del copied.get_submodule(path)[index]
    for number, block in enumerate(copied.get_submodule(path)):
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    for counter in COUNTERS.values():
        if hasattr(getattr(copied, "config", None), counter):
            setattr(copied.config, counter, len(copied.get_submodule(path)))
    optimizer = Adam(copied.parameters(), lr=1e-3)
    held = {id(parameter) for parameter in copied.parameters()}
    for name, parameter in parameters.items():
        if id(parameter) in held:
            optimizer.state[parameter] = states[name]
    return copied, optimizer


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("index", [0, 1])
def test_a_removed_block_leaves_the_model_built_without_it(name: str, index: int) -> None:
    one = subject_of(name)
    path = STACKS[name]
    expected, optimizer = without_block(one, path, index)
    before = one.outputs()
    remove(one, path, index)
    assert differing_tensors(one.model, expected) == []
    outputs = oracle.outputs_of(expected, one.case)
    assert oracle.largest_difference(one.outputs(), outputs) == 0
    assert oracle.largest_difference(one.outputs(), before) > 0
    require_like_adopted_anew(one)
    for _ in range(2):
        one.step()
        step(expected, optimizer, one.case)
    assert differing_tensors(one.model, expected) == []


@pytest.mark.parametrize("name", STACKS)
def test_undo_and_redo_are_exact(name: str) -> None:
    one = subject_of(name)
    path = STACKS[name]
    at_first = snapshot(one)
    verdicts = [space.prove() for space in one.net.spaces]
    insert(one, path, owner="new")
    one.step()
    deeper = snapshot(one)
    block = one.model.get_submodule(path)[0]
    remove(one, path, 0)
    shallower = snapshot(one)
    one.net.undo()
    assert oracle.same(deeper, snapshot(one)) == []
    assert one.model.get_submodule(path)[0] is block
    one.net.redo()
    assert oracle.same(shallower, snapshot(one)) == []
    one.net.undo()
    # What was trained since the block came stays trained.
    trained = {key: value.detach().clone() for key, value in one.model.named_parameters()}
    one.net.undo()
    assert at_first["parameters"] == snapshot(one)["parameters"]
    assert at_first["groups"] == snapshot(one)["groups"]
    assert at_first["spaces"] == snapshot(one)["spaces"]
    assert [space.verdict for space in one.net.spaces] == verdicts
    one.net.redo()
    for key, value in one.model.named_parameters():
        assert torch.equal(value, trained[key])
    assert oracle.same(deeper, snapshot(one)) == []
    gn.check(one.net)


def test_training_goes_on_after_undo_as_if_the_block_had_stayed() -> None:
    one = subject_of("resnet")
    other = subject_of("resnet")
    remove(one, "layer1", 0)
    one.net.undo()
    for _ in range(2):
        one.step()
        other.step()
    assert differing_tensors(one.model, other.model) == []


@pytest.mark.parametrize("name", LANGUAGE)
def test_counters_and_indices_follow_so_that_models_generate(name: str) -> None:
    one = subject_of(name)
    path = STACKS[name]
    container = one.model.get_submodule(path)
    config: Any = one.model.config
    model: Any = one.model

    def generated() -> Tensor:
        ids = one.case.inputs[0]
        mask = torch.ones_like(ids)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=5, do_sample=False, use_cache=True
        )

    def counted() -> int:
        return getattr(config, COUNTERS[name])

    expected = generated()
    insert(one, path, -1)
    assert counted() == len(container) == 3
    assert indices_of(container) == [[0], [1], [2]]
    assert torch.equal(generated(), expected)
    remove(one, path, 0)
    assert counted() == len(container) == 2
    assert indices_of(container) == [[0], [1]]
    assert generated().shape == expected.shape
    one.net.undo()
    one.net.undo()
    assert counted() == 2
    assert indices_of(container) == [[0], [1]]
    assert torch.equal(generated(), expected)


def test_a_model_of_other_depth_is_saved_by_transformers(tmp_path: Path) -> None:
    one = subject_of("hf_llama")
    insert(one, "model.layers", 1)
    one.step()
    gn.ungraft(one.net)
    model: Any = one.model
    model.save_pretrained(tmp_path)
    loaded = type(one.model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    outputs = oracle.outputs_of(loaded, one.case)
    assert oracle.largest_difference(one.outputs(), outputs) < 1e-12


def test_counts_of_several_stages_follow() -> None:
    one = subject_of("hf_swin")
    config: Any = one.model.config
    insert(one, "swin.encoder.layers.0.blocks", 1)
    assert (tuple(config.depths), config.num_layers) == ((3, 1), 2)
    remove(one, "swin.encoder.layers.0.blocks", 0)
    assert (tuple(config.depths), config.num_layers) == ((2, 1), 2)
    edit = one.net.edit(trial=True)
    with edit:
        edit.insert("swin.encoder.layers.0.blocks", after=0)
        edit.insert("swin.encoder.layers.1.blocks", after=0)
        with pytest.raises(gn.errors.EditError, match="separate"):
            edit.commit()
    one.net.undo()
    one.net.undo()
    assert tuple(config.depths) == (2, 1)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_counter_of_another_part_stays(part: str) -> None:
    one = subject_of("hf_t5")
    config: Any = one.model.config
    insert(one, f"{part}.block", -1)
    assert config.num_layers == (3 if part == "encoder" else 2)
    assert config.num_decoder_layers == (3 if part == "decoder" else 2)


def test_several_blocks_come_and_leave_in_one_edit() -> None:
    one = subject_of("resnet")
    expected, _ = without_block(one, "layer1", 0)
    before = snapshot(one)
    at_first = one.outputs()
    with one.net.edit(reason="deeper") as edit:
        edit.insert("layer3", after=1)
        edit.insert("layer3", after=1)
        edit.insert("layer1", after=-1)
    assert edit.receipt is not None
    assert edit.receipt.counts["blocks_added"] == 3
    assert oracle.largest_difference(one.outputs(), at_first) == 0
    require_like_adopted_anew(one)
    with one.net.edit(reason="shallower") as edit:
        edit.remove("layer1", 0)
        edit.remove("layer3", 2)
        edit.remove("layer3", 3)
        edit.remove("layer1", 2)
    outputs = oracle.outputs_of(expected, one.case)
    assert oracle.largest_difference(one.outputs(), outputs) == 0
    assert differing_tensors(one.model, expected) == []
    require_like_adopted_anew(one)
    one.net.undo()
    one.net.undo()
    assert oracle.same(before, snapshot(one)) == []


class Residual(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Counted(nn.Module):
    """A model with a counter that no name tells, and with blocks that are called by names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.rows = nn.ModuleList([Residual(6, 5), Residual(6, 7), Residual(6, 4)])
        self.named = nn.Sequential()
        self.named.add_module("front", Residual(6, 5))
        self.named.add_module("back", Residual(6, 5))
        self.n = 3
        self.width = 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in range(self.n):
            x = self.rows[number](x)
        return self.named(x)


def counted() -> Any:
    torch.manual_seed(0)
    model = Counted().double()
    x = torch.randn(4, 3, dtype=torch.float64)
    return model, x, gn.adopt(model, x)


def test_a_counter_without_a_telling_name_is_found() -> None:
    model, x, net = counted()
    expected = model(x)
    with net.edit() as edit:
        edit.insert("rows", after=1)
    assert torch.equal(model(x), expected)
    assert model.n == 4
    assert model.width == 3
    with net.edit() as edit:
        edit.remove("rows", 3)
    assert model.n == 3
    net.undo()
    net.undo()
    assert model.n == 3
    assert torch.equal(model(x), expected)


def test_the_model_itself_may_be_the_container() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), Residual(6, 5), nn.Linear(6, 2))
    x = torch.randn(4, 3)
    net = gn.adopt(model, x)
    expected = model(x)
    with net.edit() as edit:
        edit.insert("", after=1)
    assert torch.equal(model(x), expected)
    assert net.space("3").name == "3"
    assert [space.name for space in net.spaces] == ["0", "0:in", "1.up", "2.up", "3"]
    gn.check(net)


def refusals(one: Subject) -> dict[str, Any]:
    """Returns edits that are refused, by what is wrong with them."""
    return {
        "no module": lambda edit: edit.insert("nowhere", after=0),
        "no container": lambda edit: edit.insert("conv1", after=0),
        "no block": lambda edit: edit.insert("layer1", after=7),
        "no index": lambda edit: edit.remove("layer1", 2),
        "another stream": lambda edit: edit.remove("layer2", 0),
        "a copy of another stream": lambda edit: edit.insert("layer2", after=0),
        "state": lambda edit: edit.insert("layer1", after=0, state="warm"),
        "with nodes": lambda edit: (
            edit.insert("layer1", after=0),
            edit.remove_nodes(one.net.space("layer1.0.conv1")[:1]),
        ),
        "with relations": lambda edit: (
            edit.remove("layer1", 0),
            edit.cut(one.net.relations("layer1.1.conv1").smallest(count=1)),
        ),
        "all blocks": lambda edit: (edit.remove("layer1", 0), edit.remove("layer1", 1)),
        "copied and removed": lambda edit: (
            edit.insert("layer1", after=0),
            edit.remove("layer1", 0),
        ),
        "inside of another": lambda edit: (
            edit.insert("layer2.0.downsample", after=0),
            edit.insert("layer2", after=1),
        ),
    }


@pytest.mark.parametrize("what", refusals(None))  # pyright: ignore[reportArgumentType]
def test_a_refused_edit_changes_nothing(what: str) -> None:
    one = subject_of("resnet")
    before = snapshot(one)
    with pytest.raises(gn.errors.EditError), one.net.edit() as edit:
        refusals(one)[what](edit)
    assert one.net.version == 0
    assert oracle.same(before, snapshot(one)) == []


@pytest.mark.parametrize(
    ("name", "path"),
    [("hf_bert", "bert.encoder.layer"), ("hf_t5", "encoder.block")],
    ids=["the norm behind the block", "Parameters of the first block alone"],
)
def test_a_block_that_cannot_be_silent_is_refused(name: str, path: str) -> None:
    one = subject_of(name)
    before = snapshot(one)
    with pytest.raises(gn.errors.EditError):
        insert(one, path)
    assert oracle.same(before, snapshot(one)) == []


def test_blocks_with_names_of_their_own_are_refused() -> None:
    _, _, net = counted()
    with pytest.raises(gn.errors.EditError, match="front"), net.edit() as edit:
        edit.insert("named", after=0)


def test_a_follower_that_cannot_follow_refuses_the_edit() -> None:
    one = subject_of("resnet")
    before = snapshot(one)
    weight = dict(one.net.named_parameters())["layer1.0.conv1.weight"]
    followed = gn.follow(one.net, {"layer1.0.conv1.weight": torch.zeros_like(weight)})
    with pytest.raises(gn.errors.EditError, match="follows this graph"):
        insert(one, "layer1")
    assert oracle.same(before, snapshot(one)) == []
    del followed
    insert(one, "layer1")


@pytest.mark.parametrize("state", ["clean", "copy"])
def test_parameters_come_into_the_groups_of_the_copied_block(state: str) -> None:
    one = subject_of("resnet")
    named = list(one.model.named_parameters())
    groups = [
        {"params": [(key, p) for key, p in named if p.dim() > 1], "lr": 1e-3},
        {"params": [(key, p) for key, p in named if p.dim() == 1], "lr": 1e-4},
    ]
    optimizer = Adam(groups)
    gn.detach(one.optimizer, one.net)
    gn.attach(optimizer, one.net)
    step(one.model, optimizer, one.case)
    insert(one, "layer1", state=state)
    for group, dims in zip(optimizer.param_groups, ([2, 4], [1]), strict=True):
        present = [(key, p) for key, p in one.model.named_parameters() if p.dim() in dims]
        assert group["param_names"] == [key for key, _ in present]
        assert [id(p) for p in group["params"]] == [id(p) for _, p in present]
    new = dict(one.model.get_submodule("layer1.1").named_parameters())
    for key, parameter in one.model.get_submodule("layer1.0").named_parameters():
        if state == "clean":
            assert new[key] not in optimizer.state
        else:
            mine = optimizer.state[new[key]]["exp_avg"]
            assert torch.equal(mine, optimizer.state[parameter]["exp_avg"])
            assert mine.data_ptr() != optimizer.state[parameter]["exp_avg"].data_ptr()
    step(one.model, optimizer, one.case)
    one.net.undo()
    assert optimizer.param_groups[0]["param_names"] == [key for key, p in named if p.dim() > 1]
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [
        id(p) for _, p in named if p.dim() == 1
    ]


def test_an_optimizer_that_was_not_attached_is_refused() -> None:
    one = subject_of("resnet")
    other = SGD(one.model.parameters(), lr=0.1, momentum=0.9)
    step(one.model, other, one.case)
    insert(one, "layer1")
    with pytest.raises(gn.errors.OptimizerError):
        step(one.model, other, one.case)
    one.step()


def test_a_trial_takes_its_blocks_back() -> None:
    one = subject_of("hf_gpt2")
    one.model.zero_grad()
    before = snapshot(one)
    expected = one.outputs()
    with one.net.edit(trial=True) as edit:
        edit.remove("transformer.h", 0)
        edit.commit()
        assert oracle.largest_difference(one.outputs(), expected) > 0
    assert oracle.same(before, snapshot(one)) == []
    assert one.net.version == 0
    with one.net.edit(trial=True) as edit:
        edit.insert("transformer.h", after=1)
        edit.commit()
        one.outputs()
    assert oracle.same(before, snapshot(one)) == []
    gn.check(one.net)


@pytest.mark.parametrize("verb", ["insert", "remove"])
def test_a_backward_pass_from_before_raises(verb: str) -> None:
    one = subject_of("vit")
    loss = one.model(*one.case.inputs).square().sum()
    if verb == "insert":
        insert(one, "blocks")
    else:
        remove(one, "blocks", 1)
    with pytest.raises(RuntimeError):
        loss.backward()
    one.model.zero_grad()
    one.net.undo()
    loss = one.model(*one.case.inputs).square().sum()
    one.net.redo()
    with pytest.raises(RuntimeError):
        loss.backward()


def test_averaged_copies_follow() -> None:
    one = subject_of("resnet")
    averaged = AveragedModel(one.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    gn.attach(averaged, one.net)
    one.step()
    averaged.update_parameters(one.model)
    expected = oracle.outputs_of(averaged.module, one.case)
    before = oracle.snapshot(averaged)
    insert(one, "layer1", 1)
    assert oracle.largest_difference(oracle.outputs_of(averaged.module, one.case), expected) == 0
    one.step()
    averaged.update_parameters(one.model)
    remove(one, "layer1", 0)
    averaged.update_parameters(one.model)
    for mine, other in zip(averaged.module.parameters(), one.model.parameters(), strict=True):
        assert mine.shape == other.shape
    one.net.undo()
    one.net.undo()
    assert oracle.snapshot(averaged).keys() == before.keys()
    one.net.redo()
    averaged.update_parameters(one.model)
    with one.net.edit(trial=True) as edit:
        edit.insert("layer3", after=1)
        edit.commit()
        assert len(averaged.module.get_submodule("layer3")) == 3
    assert len(averaged.module.get_submodule("layer3")) == 2


def test_a_copy_that_was_attached_later_refuses_undo() -> None:
    one = subject_of("resnet")
    insert(one, "layer1")
    averaged = AveragedModel(one.model)
    gn.attach(averaged, one.net)
    with pytest.raises(gn.errors.HistoryError):
        one.net.undo()
    gn.detach(averaged, one.net)
    one.net.undo()
    gn.check(one.net)


def test_nodes_and_spaces_that_stay_are_the_same() -> None:
    one = subject_of("resnet")
    net = one.net
    stream = net.space("layer1.1.bn2")
    behind = net.space("layer1.1.conv1")
    inside = net.space("layer1.0.conv1")
    chosen = net.space("layer3.1.conv1")[2:4]
    gone = inside[:2]
    relations = net.relations("layer3.1.conv1")
    with net.edit() as edit:
        edit.set_owner(behind[:2], "mine")
    assert behind.prove() == "exact"
    insert(one, "layer1", owner="new")
    assert net.space("layer1.2.conv1") is behind
    assert behind.name == "layer1.2.conv1"
    assert behind.verdict == "exact"
    assert net.space("layer1.1.bn2") is stream
    assert len(net.select(owner="mine")) == 2
    assert len(net.select(owner="new")) == len(net.space("layer1.1.conv1"))
    assert chosen.uids.tolist() == net.space("layer3.1.conv1")[2:4].uids.tolist()
    with pytest.raises(gn.errors.StaleRelationsError):
        len(relations.weights)
    remove(one, "layer1", 0)
    with pytest.raises(gn.errors.StaleNodeError):
        gone.owners  # noqa: B018
    with pytest.raises(gn.errors.StaleNodeError):
        inside.index  # noqa: B018
    with net.edit() as edit:
        edit.remove_nodes(chosen)
    assert one.model.get_submodule("layer3.1.conv1").weight.shape[0] == 11
    for _ in range(3):
        net.undo()
    assert net.space("layer1.0.conv1") is inside
    assert net.space("layer1.1.conv1") is behind
    gn.check(net)


def test_new_blocks_are_edited_like_others() -> None:
    one = subject_of("hf_llama")
    with one.net.edit() as edit:
        edit.remove_nodes(one.net.space("model.layers.0.mlp.gate_proj")[:3])
        edit.cut(one.net.relations("model.layers.0.mlp.down_proj").smallest(fraction=0.2))
    expected = one.outputs()
    before = snapshot(one)
    insert(one, "model.layers")
    assert oracle.largest_difference(one.outputs(), expected) == 0
    block = "model.layers.1"
    assert one.net.relations(f"{block}.mlp.down_proj").weights.abs().max() == 0
    kept = len(one.net.relations("model.layers.0.mlp.down_proj"))
    assert len(one.net.relations(f"{block}.mlp.down_proj")) == kept
    one.step()
    with one.net.edit() as edit:
        edit.remove_nodes(one.net.space(f"{block}.mlp.gate_proj")[:3])
        edit.remove_nodes(one.net.space(f"{block}.self_attn.k_proj")[:1])
    one.step()
    gn.check(one.net)
    one.net.undo()
    one.net.undo()
    assert before["spaces"] == snapshot(one)["spaces"]
    gn.check(one.net)


def test_the_journal_tells_of_blocks() -> None:
    one = subject_of("vit")
    insert(one, "blocks")
    remove(one, "blocks", 2)
    first, second = one.net.history
    assert (first.counts["blocks_added"], second.counts["blocks_removed"]) == (1, 1)
    assert first.operations[0]["operation"] == "insert"
    assert first.change.depth is not None
    assert first.change.depth.came == ("blocks.1",)
    diff = one.net.diff(0)
    assert len(diff.nodes_added) == first.counts["nodes_added"]
    assert len(diff.nodes_removed) == second.counts["nodes_removed"]
    blamed = one.net.blame(one.net.space("blocks.1.fc1")[0])
    assert blamed is not None
    assert blamed.version == 1
    one.net.journal.undo_limit = 0
    assert one.net.history[0].counts == first.counts
    kept = one.net.history[0].change.depth
    assert kept is not None
    assert kept.after is None
    with pytest.raises(gn.errors.HistoryError):
        one.net.undo()


def test_a_model_of_other_depth_is_saved_and_restored(tmp_path: Path) -> None:
    one = subject_of("hf_llama")
    path = tmp_path / "model.safetensors"
    with one.net.edit() as edit:
        edit.remove_nodes(one.net.space("model.layers.1.mlp.gate_proj")[:5])
    insert(one, "model.layers", owner="new")
    one.step()
    with one.net.edit() as edit:
        edit.remove_nodes(one.net.space("model.layers.0.mlp.gate_proj")[:4])
    gn.save(path, one.net, optimizer=one.optimizer, undo=True, history="full")

    import transformers

    model = transformers.LlamaForCausalLM(copy.deepcopy(one.model.config)).double().eval()
    optimizer = Adam(model.parameters(), lr=1e-3)
    net = gn.adopt(model, *one.case.inputs, optimizer=optimizer, **one.case.kwargs)
    gn.restore(path, into=net, optimizer=optimizer)
    assert differing_tensors(model, one.model) == []
    assert len(net.select(owner="new")) == len(one.net.select(owner="new"))
    assert [c.counts for c in net.history] == [c.counts for c in one.net.history]
    for _ in range(2):
        one.step()
        step(model, optimizer, one.case)
    net.undo()
    one.net.undo()
    one.step()
    step(model, optimizer, one.case)
    assert differing_tensors(model, one.model) == []
    # The file has no blocks, so undo ends where they came.
    with pytest.raises(gn.errors.HistoryError):
        net.undo()
    original = matrix.CASES["hf_llama"]().model
    with pytest.raises(gn.errors.CheckpointError, match="as many blocks"):
        gn.restore(path, into=original)


def test_copies_of_the_graph_have_no_blocks() -> None:
    one = subject_of("resnet")
    insert(one, "layer1")
    copied = copy.deepcopy(one.net)
    with pytest.raises(gn.errors.HistoryError):
        copied.undo()
    with pytest.raises(gn.errors.HistoryError):
        subject_of("resnet").net.replay(one.net.history)
    gn.check(copied)
    one.net.undo()


def test_assignments_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt lets all of them run again."""
    one = subject_of("resnet")
    settle = _commit._Record.settle

    def twice(record: Any, *, again: bool = False) -> None:
        for install in list(record._installs):
            install()
        settle(record, again=again)

    monkeypatch.setattr(_commit._Record, "settle", twice)
    before = snapshot(one)
    expected = one.outputs()
    insert(one, "layer1")
    assert oracle.largest_difference(one.outputs(), expected) == 0
    remove(one, "layer1", 0)
    one.net.undo()
    one.net.undo()
    assert oracle.same(before, snapshot(one)) == []


def test_an_error_of_a_follower_changes_nothing() -> None:
    one = subject_of("hf_llama")
    before = snapshot(one)

    class Failing:
        follows_depth = True

        def prepare(self, graph: Any, commit: Any) -> Any:
            raise RuntimeError("no")

    failing = Failing()
    one.net.follow(failing)
    with pytest.raises(RuntimeError):
        insert(one, "model.layers")
    with pytest.raises(RuntimeError):
        remove(one, "model.layers", 0)
    assert oracle.same(before, snapshot(one)) == []
    assert one.net.version == 0


@pytest.mark.parametrize("name", LANGUAGE)
def test_blocks_come_and_leave_while_spaces_have_one_node(name: str) -> None:
    one = subject_of(name)
    path = STACKS[name]
    expected = subject_of(name)
    first, second = [f"{path}.{number}." for number in (0, 1)]
    heads = {"hf_gpt2": "attn.c_attn", "hf_llama": "self_attn.q_proj"}[name]
    for net in (one.net, expected.net):
        with net.edit(reason="one head") as edit:
            edit.remove_nodes(net.space(f"{first}{heads}")[1:])
            edit.remove_nodes(net.space(f"{second}{heads}")[:-1])
    single = one.net.space(f"{second}{heads}")
    before = snapshot(one)
    outputs = one.outputs()
    insert(one, path, after=1)
    assert oracle.largest_difference(one.outputs(), outputs) == 0
    copied = one.net.space(f"{path}.2.{heads}")
    assert len(copied) == 1
    assert copied is not single
    remove(one, path, 2)
    assert oracle.same(before, snapshot(one)) == []
    # The space of the block that stays is the same object, and its heads come back.
    remove(one, path, 0)
    assert one.net.space(f"{first}{heads}") is single
    copied_model, _ = without_block(expected, path, 0)
    others = oracle.outputs_of(copied_model, one.case)
    assert oracle.largest_difference(one.outputs(), others) == 0
    gn.check(one.net)
    with one.net.edit(reason="a head more") as edit:
        edit.add_nodes(single, 1)
    assert oracle.largest_difference(one.outputs(), others) < 1e-12
    for _ in range(2):
        one.net.undo()
    assert oracle.largest_difference(one.outputs(), outputs) == 0
    one.net.undo()
    one.net.undo()
    one.net.undo()
    assert len(single) > 1
