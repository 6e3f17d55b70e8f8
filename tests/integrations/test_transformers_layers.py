"""Heads, groups, hidden units and layers of Hugging Face models, against masks made by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

import grapnet as gn
import grapnet.integrations.transformers as hf
from grapnet.rules import PruneNodes, RuleManager
from grapnet.spaces import Adopted
from tests.spaces import oracle
from tests.spaces.huggingface import FAMILIES, GROUPED, TEXT, TOKENS, built, ids
from tests.spaces.zoo import Case

pytestmark = pytest.mark.xdist_group("transformers")

HEAD_DIM = 8
# By family: heads without groups, groups and queries in each, hidden units; of the first layer.
UNGROUPED = {"heads": 3, "kv_groups": 3}
IN_GROUPS = {"kv_groups": 2, "queries": 3}
EXPECTED: dict[str, dict[str, int]] = {
    "bert": {**UNGROUPED, "ffn": 40},
    "distilbert": {**UNGROUPED, "ffn": 40},
    "albert": {**UNGROUPED, "ffn": 40},
    "modernbert": {**UNGROUPED, "ffn": 40},
    "gpt2": {**UNGROUPED, "ffn": 40},
    "opt": {**UNGROUPED, "ffn": 40},
    "gpt_neox": {**UNGROUPED, "ffn": 40},
    "llama": {**IN_GROUPS, "ffn": 40},
    "qwen2": {**IN_GROUPS, "ffn": 40},
    "qwen3": {**IN_GROUPS, "ffn": 40},
    "mistral": {**IN_GROUPS, "ffn": 40},
    "gemma2": {**IN_GROUPS, "ffn": 40},
    "phi3": {**IN_GROUPS, "ffn": 40},
    "mixtral": {**IN_GROUPS, "ffn": 40},
    "t5": {**UNGROUPED, "ffn": 40},
    "vit": {**UNGROUPED, "ffn": 40},
    "swin": {"heads": 2, "kv_groups": 2, "ffn": 36},
    "segformer": {"heads": 2, "kv_groups": 2, "ffn": 16},
    "mamba": {"ffn": 24},
}
# The projection behind the attention, and the second one of the feed-forward block, in a layer.
READERS = {
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "qwen3": ("self_attn.o_proj", "mlp.down_proj"),
    "phi": ("self_attn.dense", "mlp.fc2"),
    "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
    "opt": ("self_attn.out_proj", "fc2"),
    "bert": ("attention.output.dense", "output.dense"),
    "vit": ("attention.o_proj", "mlp.fc2"),
}
GROUPS = ["llama", "qwen3", "mistral"]
CAUSAL = ["gpt2", "opt", "llama", "mistral", "qwen3", "phi", "gpt_neox"]
# 6 heads of queries over 3 of keys and values, so that more than one group stays.
THREE_GROUPS = {**GROUPED, "num_key_value_heads": 3}
BUILT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", THREE_GROUPS),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", THREE_GROUPS),
    "mistral": ("MistralForCausalLM", "MistralConfig", THREE_GROUPS),
    "phi": ("PhiForCausalLM", "PhiConfig", {**TEXT, "use_cache": False}),
}


def case_of(name: str) -> Case:
    if name not in BUILT:
        return FAMILIES[name]()
    torch.manual_seed(0)
    return Case(built(*BUILT[name]), (ids(),))


def adopted(name: str) -> tuple[Case, Adopted]:
    case = case_of(name)
    case.model.double().eval()
    inputs = [x.double() if x.is_floating_point() else x for x in case.inputs]
    case = Case(case.model, tuple(inputs), case.kwargs)
    return case, gn.adopt(case.model, *case.inputs, **case.kwargs)


def output_of(case: Case, model: nn.Module | None = None) -> Tensor:
    with torch.no_grad():
        found: Any = (model or case.model)(*case.inputs, **case.kwargs)
    return found.logits


def heads_of(layer: hf.TransformerLayer) -> Any:
    """Returns the heads, or groups of them where queries are grouped."""
    return layer.attentions[0].spaces[0]


def silenced(model: nn.Module, path: str, positions: list[int]) -> nn.Module:
    """Returns a copy of a model in which a projection does not hear some positions."""
    copied = oracle.copy_of(model)
    module: Any = copied.get_submodule(path)
    with torch.no_grad():
        # Hugging Face's Conv1D has its weight transposed.
        weight = module.weight if type(module).__name__ == "Conv1D" else module.weight.t()
        weight[positions] = 0
    return copied


@pytest.mark.parametrize("name", EXPECTED)
def test_parts_are_told_from_axes_for_every_family(name: str) -> None:
    case = FAMILIES[name]()
    net = gn.adopt(case.model, *case.inputs, **case.kwargs)
    first = hf.layers(net)[0]
    found = {}
    for part in ("heads", "kv_groups", "queries", "ffn"):
        try:
            found[part] = len(getattr(first, part))
        except gn.errors.EditError:
            assert part not in EXPECTED[name]
    assert found == EXPECTED[name]
    assert first.index == 0
    assert case.model.get_submodule(first.path) is first.block
    assert any(name.startswith(first.path) for name in first.stream.writers)
    # The order is that of the modules, and a layer is found in one list alone.
    paths = [layer.path for layer in hf.layers(case.model)]
    assert len(set(paths)) == len(paths)
    assert not any(a != b and f"{b}.".startswith(f"{a}.") for a in paths for b in paths)


def test_models_without_transformer_layers_have_none() -> None:
    case = FAMILIES["resnet"]()
    assert hf.layers(gn.adopt(case.model, *case.inputs)) == []


def test_a_decoder_has_two_attentions_and_parts_have_paths() -> None:
    case = FAMILIES["bart"]()
    net = gn.adopt(case.model, *case.inputs, **case.kwargs)
    assert [layer.path for layer in hf.layers(net)] == [
        "model.encoder.layers.0",
        "model.encoder.layers.1",
        "model.decoder.layers.0",
        "model.decoder.layers.1",
    ]
    decoder = hf.layers(net, within="model.decoder")
    assert [layer.index for layer in decoder] == [0, 1]
    names = [attention.name for attention in decoder[0].attentions]
    assert names == [
        "model.decoder.layers.0.self_attn.out_proj.weight",
        "model.decoder.layers.0.encoder_attn.out_proj.weight",
    ]
    assert decoder[0].attentions[0].heads is not decoder[0].attentions[1].heads
    with pytest.raises(gn.errors.EditError):
        _ = decoder[0].heads
    assert hf.layers(net, within="model.dec") == []


def test_what_cannot_be_removed_is_refused_and_said() -> None:
    case = FAMILIES["llama"]()
    grouped = hf.layers(gn.adopt(case.model, *case.inputs))[0]
    with pytest.raises(gn.errors.EditError, match=r"6 heads .* share 2 heads"):
        _ = grouped.heads
    settings = {**GROUPED, "num_key_value_heads": 1}
    one_kv = hf.layers(gn.adopt(built("LlamaForCausalLM", "LlamaConfig", settings), ids()))[0]
    assert one_kv.heads is one_kv.queries
    assert len(one_kv.heads) == 6
    with pytest.raises(gn.errors.EditError, match="one head of keys and values"):
        _ = one_kv.kv_groups
    settings = {"n_embd": 24, "n_layer": 1, "n_head": 1, "vocab_size": 37, "n_positions": 16}
    model = built("GPT2LMHeadModel", "GPT2Config", {**settings, **TOKENS})
    single = hf.layers(gn.adopt(model, ids()))[0]
    assert len(single.ffn) == 96
    with pytest.raises(gn.errors.EditError, match="has one head"):
        _ = single.heads
    case = FAMILIES["bloom"]()
    sloped = hf.layers(gn.adopt(case.model, *case.inputs))[0]
    assert len(sloped.ffn) == 96
    with pytest.raises(gn.errors.EditError, match="arange"):
        _ = sloped.heads


@pytest.mark.parametrize("name", READERS)
def test_a_removed_head_is_a_head_whose_output_is_zero(name: str) -> None:
    case, net = adopted(name)
    layer = hf.layers(net)[1]
    heads = heads_of(layer)
    # A group has the rows of both of its queries.
    rows = HEAD_DIM * (2 if name in GROUPS else 1)
    path = f"{layer.path}.{READERS[name][0]}"
    expected = output_of(case, silenced(case.model, path, list(range(rows, 2 * rows))))
    other = output_of(case, silenced(case.model, path, list(range(rows))))
    before = output_of(case)
    with net.edit(reason="a head") as edit:
        edit.remove_nodes(heads[[1]])
    assert (output_of(case) - expected).abs().max() < 1e-12
    assert (output_of(case) - other).abs().max() > 1e-6
    assert (len(heads), heads_of(layer)) == (2, heads)
    net.undo()
    assert torch.equal(output_of(case), before)


@pytest.mark.parametrize("name", GROUPS[:2])
def test_a_query_leaves_every_group(name: str) -> None:
    case, net = adopted(name)
    layer = hf.layers(net)[0]
    path = f"{layer.path}.{READERS[name][0]}"
    # The second query of the two in each of 3 groups.
    positions = [head * HEAD_DIM + at for head in (1, 3, 5) for at in range(HEAD_DIM)]
    expected = output_of(case, silenced(case.model, path, positions))
    with net.edit(reason="one query a group") as edit:
        edit.remove_nodes(layer.queries[[1]])
    assert (output_of(case) - expected).abs().max() < 1e-12


def test_a_number_of_heads_in_a_shared_config_is_refused_and_nothing_changes() -> None:
    case, net = adopted("phi3")
    layer = hf.layers(net)[0]
    before = output_of(case)
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        edit.remove_nodes(layer.kv_groups[[0]])
    assert torch.equal(output_of(case), before)
    with net.edit() as edit:
        edit.remove_nodes(layer.ffn[:5])
    assert len(layer.ffn) == 35


@pytest.mark.parametrize("name", READERS)
def test_removed_hidden_units_are_columns_of_zero(name: str) -> None:
    case, net = adopted(name)
    layer = hf.layers(net)[0]
    path = f"{layer.path}.{READERS[name][1]}"
    expected = output_of(case, silenced(case.model, path, [0, 7, 39]))
    mask = torch.zeros(40, dtype=torch.bool)
    mask[[0, 7, 39]] = True
    with net.edit(reason="units by a mask") as edit:
        edit.remove_nodes(layer.ffn[mask])
    assert (output_of(case) - expected).abs().max() < 1e-12


def removed_everywhere(net: Adopted) -> None:
    """Removes a head, hidden units, a part of the stream and a layer."""
    first, second = hf.layers(net)
    with net.edit(reason="nodes") as edit:
        edit.remove_nodes(heads_of(second)[[0]])
        edit.remove_nodes(second.ffn[:11])
        edit.remove_nodes(first.stream.weakest(count=4))
    with net.edit(reason="a layer") as edit:
        edit.remove(first.container, first.index)


@pytest.mark.parametrize("name", CAUSAL)
def test_generate_uses_its_cache_after_all_removals_and_undo_restores_all_bits(name: str) -> None:
    case, net = adopted(name)
    model: Any = case.model
    model.generation_config.eos_token_id = None
    prompt = case.inputs[0][:, :3]
    before = output_of(case)
    text = model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True)
    removed_everywhere(net)
    (left,) = hf.layers(net)
    assert left.index == 0
    found = model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True)
    # What the model itself says, without a cache, token by token.
    expected = prompt
    with torch.no_grad():
        for _ in range(6):
            best = model(expected).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, best], 1)
    assert torch.equal(found, expected)
    net.undo()
    net.undo()
    assert torch.equal(output_of(case), before)
    again = model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True)
    assert torch.equal(again, text)


def test_a_layer_stays_valid_while_others_leave() -> None:
    _, net = adopted("gpt2")
    first, second = hf.layers(net)
    heads = second.heads
    with net.edit() as edit:
        edit.remove(first.container, first.index)
    assert (second.path, second.index, second.heads) == ("transformer.h.0", 0, heads)
    with pytest.raises(gn.errors.EditError):
        _ = first.path
    assert "left" in repr(first)
    net.undo()
    assert "transformer.h.0.attn.c_attn: 3" in repr(first)
    assert (first.path, second.path) == ("transformer.h.0", "transformer.h.1")
    with net.edit() as edit:
        edit.insert(first.container, after=first.index)
    copied = hf.layers(net)[1]
    assert copied.block is not first.block
    assert len(copied.heads) == 3
    assert second.index == 2


def trained(case: Case) -> tuple[Adam, Any]:
    """Trains a model for three steps, with labels that are its inputs."""
    optimizer = Adam(case.model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model: Any = case.model
        model(case.inputs[0], labels=case.inputs[0]).loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    return optimizer, step


def test_the_optimizer_follows_heads_and_layers() -> None:
    case = FAMILIES["gpt2"]()
    optimizer, step = trained(case)
    net = gn.adopt(case.model, *case.inputs, optimizer=optimizer)
    first, second = hf.layers(net)
    weight: Any = second.block.attn.c_attn.weight  # [24, 3 · 3 heads · 8]
    moments = {
        parameter: optimizer.state[parameter]["exp_avg"].clone()
        for parameter in case.model.parameters()
    }
    gone = set(first.block.parameters())
    with net.edit() as edit:
        edit.remove_nodes(second.heads[[1]])
    kept = [*range(8), *range(16, 24)]
    columns = [part * 24 + at for part in range(3) for at in kept]
    assert torch.equal(optimizer.state[weight]["exp_avg"], moments[weight][:, columns])
    with net.edit() as edit:
        edit.remove(first.container, first.index)
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert not held & gone
    net.undo()
    net.undo()
    for parameter, moment in moments.items():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moment)
    step()


def test_files_restore_other_heads_and_fewer_layers_into_a_fresh_model(tmp_path) -> None:
    case = FAMILIES["gpt2"]()
    optimizer, step = trained(case)
    net = gn.adopt(case.model, *case.inputs, optimizer=optimizer)
    removed_everywhere(net)
    step()
    gn.save(tmp_path / "model.safetensors", net, optimizer=optimizer)
    config = copy.deepcopy(FAMILIES["gpt2"]().model.config)
    config.n_layer = 1
    fresh = type(case.model)(config)
    other = Adam(fresh.parameters(), lr=1e-3)
    again = gn.adopt(fresh, *case.inputs, optimizer=other)
    gn.restore(tmp_path / "model.safetensors", into=again, optimizer=other)
    case.model.eval()
    fresh.eval()
    assert torch.equal(output_of(case, fresh), output_of(case))
    (layer,) = hf.layers(again)
    assert (len(layer.heads), len(layer.ffn), len(layer.stream)) == (2, 29, 20)
    for mine, restored in zip(case.model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], other.state[restored]["exp_avg"])


@pytest.mark.parametrize("name", GROUPS)
def test_pretrained_files_of_uniform_layers_while_the_graph_goes_on(name: str, tmp_path) -> None:
    case = case_of(name)
    case.model.eval()
    net = gn.adopt(case.model, *case.inputs)
    with net.edit() as edit:
        for layer in hf.layers(net):
            edit.remove_nodes(layer.kv_groups[[1]])
            edit.remove_nodes(layer.ffn[::4])
    with net.edit() as edit:
        edit.cut(net.relations("model.layers.0.mlp.up_proj").smallest(fraction=0.5))
    with net.edit() as edit:
        edit.remove("model.layers", 1)
    hf.save_pretrained(net, tmp_path)
    loaded = type(case.model).from_pretrained(tmp_path).eval()
    assert (loaded.config.num_key_value_heads, loaded.config.num_hidden_layers) == (2, 1)
    assert loaded.config.intermediate_size == 30
    assert torch.allclose(output_of(case, loaded), output_of(case), rtol=0, atol=1e-6)
    cut = loaded.model.layers[0].mlp.up_proj.weight
    assert int((cut == 0).sum()) == cut.numel() // 2
    # The graph goes on, and after undo the config is that of before.
    for _ in range(3):
        net.undo()
    hf.sync_config(net)
    first = case_of(name).model.config
    for key in ("num_key_value_heads", "intermediate_size", "num_hidden_layers"):
        assert getattr(case.model.config, key) == getattr(first, key)


def test_layers_that_differ_are_named_and_nothing_is_written(tmp_path) -> None:
    case = FAMILIES["llama"]()
    net = gn.adopt(case.model, *case.inputs)
    with net.edit() as edit:
        edit.remove_nodes(hf.layers(net)[1].ffn[:8])
    before = case.model.config.to_dict()
    with pytest.raises(
        gn.errors.EditError, match=r"40 in model\.layers\.0\.mlp.* 32 in model\.layers\.1"
    ):
        hf.save_pretrained(net, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert case.model.config.to_dict() == before


def batch_of(case: Case) -> dict[str, Tensor]:
    return {"input_ids": case.inputs[0], "labels": case.inputs[0]}


def exact_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the loss of a language model in float64, where its own is in float32."""
    logits = model(batch["input_ids"]).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def by_gate(case: Case, path: str, positions: list[int]) -> float:
    """Returns the derivative of the loss by a gate on some inputs of a module."""
    gate = torch.ones((), dtype=torch.float64, requires_grad=True)

    def scale(module: nn.Module, args: Any) -> Any:
        scaled = args[0].clone()
        scaled[..., positions] *= gate
        return (scaled, *args[1:])

    handle = case.model.get_submodule(path).register_forward_pre_hook(scale)
    (found,) = torch.autograd.grad(exact_loss(case.model, batch_of(case)), gate)
    handle.remove()
    return float(found)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("state", ["whole", "cut", "frozen", "untrainable"])
def test_scores_are_derivatives_by_gates(name: str, state: str) -> None:
    case, net = adopted(name)
    layer = hf.layers(net)[1]
    paths = [f"{layer.path}.{reader}" for reader in READERS[name]]
    if state in ("cut", "frozen"):
        with net.edit() as edit:
            for path in paths:
                weakest = net.relations(path).smallest(fraction=0.3)
                if state == "cut":
                    edit.cut(weakest)
                else:
                    edit.freeze(weakest)
    if state == "untrainable":
        case.model.requires_grad_(False)
    found = hf.scores(net, [batch_of(case)], exact_loss)
    heads = heads_of(layer)
    rows = HEAD_DIM * (2 if name in GROUPS else 1)
    for node in range(len(heads)):
        expected = by_gate(case, paths[0], list(range(node * rows, (node + 1) * rows)))
        assert float(found.nodes[heads][node]) == pytest.approx(abs(expected), rel=1e-5)
    for unit in (0, 17):
        expected = by_gate(case, paths[1], [unit])
        assert float(found.nodes[layer.ffn][unit]) == pytest.approx(abs(expected), rel=1e-5)
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert all(p.requires_grad != (state == "untrainable") for p in case.model.parameters())


def test_scores_average_batches_and_leave_the_model_alone() -> None:
    case, net = adopted("gpt2")
    model: Any = case.model
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    batches = [{"input_ids": row[None], "labels": row[None]} for row in case.inputs[0]]
    together = hf.scores(net, batches)
    alone = [hf.scores(net, [batch]) for batch in batches]
    space = hf.layers(net)[0].heads
    mean = (alone[0].nodes[space] + alone[1].nodes[space]) / 2
    assert torch.allclose(together.nodes[space], mean)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())
    # What enters and leaves a layer, as the model itself tells it.
    model.eval()
    with torch.no_grad():
        states = model.transformer(batches[0]["input_ids"], output_hidden_states=True).hidden_states
    cosine = torch.cosine_similarity(states[0], states[1], dim=-1).mean()
    assert float(alone[0].layers[0]) == pytest.approx(1 - float(cosine))
    with pytest.raises(ValueError, match="labels"):
        hf.scores(net, [{"input_ids": case.inputs[0]}])
    with pytest.raises(ValueError, match="batch"):
        hf.scores(net, [])


def test_rules_remove_heads_of_all_layers_by_score() -> None:
    case, net = adopted("gpt2")
    found = hf.scores(net, [batch_of(case)])
    spaces = [layer.heads for layer in hf.layers(net)]
    manager = RuleManager()
    manager.add(
        PruneNodes(
            fraction=1 / 3,
            scope="model",
            spaces=spaces,
            keep=1,
            by=lambda net, heads, evidence: found.nodes[heads],
        )
    )
    ranked = torch.cat([found.nodes[space] for space in spaces])
    weakest = ranked.argsort()[:2].tolist()
    uids = torch.cat([space.uids for space in spaces])
    expected = [uid for row, uid in enumerate(uids.tolist()) if row not in weakest]
    manager.apply(net, step=0)
    assert torch.cat([space.uids for space in spaces]).tolist() == expected
